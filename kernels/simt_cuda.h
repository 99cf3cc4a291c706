// The constructs of simt.h on a GPU: a lane is a thread.
#pragma once

constexpr int WARPS_PER_BLOCK = 4;
constexpr int BLOCKS_PER_SM = 6;  // 80 registers per lane; without this limit ptxas spills to get down to 32

#define MEMBER __device__ __forceinline__
#define DEVICE static MEMBER
#define CONSTANT __device__ const
#define KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * LANES, BLOCKS_PER_SM) name(i64 first, i64 last, __VA_ARGS__)
#define FOR_TILES(t) \
    for (i64 t = first + (i64)blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / LANES; t < last; \
         t += (i64)gridDim.x * WARPS_PER_BLOCK)
#define FOR_LANES(l) if (const int l = threadIdx.x % LANES; true)
#define FOR_LANES_IN_TURN(l) FOR_LANES(l)
#define ONE_LANE if (threadIdx.x % LANES == 0)
#define WARP_SHARED(T, name, n) \
    __shared__ T name##_of_block[WARPS_PER_BLOCK][n]; \
    T *name = name##_of_block[threadIdx.x / LANES]
#define BLOCK_SHARED(T, name, n) __shared__ T name[n]
#define UNROLL _Pragma("unroll")

constexpr int COUNTER_COPIES = 4;
constexpr bool WIDE_ACCESS = true;  // adjacent elements of a lane are worth an access of up to 16 bytes

constexpr u32 ALL_LANES = 0xffffffffu;

template <class T>
struct Lane {
    T value;
    MEMBER T &operator[](int) { return value; }
    MEMBER const T &operator[](int) const { return value; }
};

DEVICE void warp_sync() { __syncwarp(); }
DEVICE void block_sync() { __syncthreads(); }
DEVICE int warp_of_block() { return threadIdx.x / LANES; }

struct FloatMode {  // a GPU's is IEEE at all times
    MEMBER FloatMode() {}
};

DEVICE void atomic_or(u64 *where, u64 bits) { atomicOr(where, bits); }
DEVICE void atomic_add(u32 *where, u32 amount) { atomicAdd(where, amount); }
DEVICE void atomic_add(u64 *where, u64 amount) { atomicAdd(where, amount); }

// Adds the tiles that this warp has done to *done, which is zero at launch. Returns true in the warp that brings it to
// `all`: it sees what the others have written before.
DEVICE bool last_warp(u64 *done, u64 mine, u64 all) {
    u64 before = 0;
    if (!mine) return false;
    __threadfence();
    __syncwarp();
    ONE_LANE before = atomicAdd(done, mine);
    before = __shfl_sync(ALL_LANES, before, 0);
    __threadfence();
    return before + mine == all;
}
// Between the lanes of one warp only.
DEVICE void warp_atomic_or(u32 *where, u32 bits) { atomicOr(where, bits); }
DEVICE void warp_atomic_add(u32 *where, u32 amount) { atomicAdd(where, amount); }

DEVICE int count_ones(u32 x) { return __popc(x); }
DEVICE int leading_zeros(u32 x) { return __clz((int)x); }

DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE double float_of_bits(u64 bits) { return __longlong_as_double((i64)bits); }
DEVICE u32 bits_of_float(float x) { return __float_as_uint(x); }
DEVICE u64 bits_of_float(double x) { return (u64)__double_as_longlong(x); }

// Bit l of the result is set if lane l's copy is not zero.
DEVICE u32 ballot(const Lane<u32> &x) { return __ballot_sync(ALL_LANES, x.value != 0); }

template <class T>
DEVICE Lane<T> shuffle(const Lane<T> &x, const Lane<int> &from) {
    return {__shfl_sync(ALL_LANES, x.value, from.value)};
}

template <class T>
DEVICE T broadcast(const Lane<T> &x, int from) {
    return __shfl_sync(ALL_LANES, x.value, from);
}

template <int MASK>
DEVICE Lane<u32> shuffle_xor(const Lane<u32> &x) {
    return {__shfl_xor_sync(ALL_LANES, x.value, MASK)};
}

// Lane l gets lane l-1's copy, and lane 0 gets `first`.
template <class T>
DEVICE Lane<T> shift_in(T first, const Lane<T> &x) {
    const T below = __shfl_up_sync(ALL_LANES, x.value, 1);
    return {threadIdx.x % LANES ? below : first};
}

// Lane l gets the sum over the lanes l, l - stride, l - 2 * stride, ...
template <class T>
DEVICE Lane<T> scan_strided(const Lane<T> &x, int stride) {
    T sum = x.value;
    for (int step = stride; step < LANES; step *= 2) {
        const T below = __shfl_up_sync(ALL_LANES, sum, step);
        if ((int)(threadIdx.x % LANES) >= step) sum += below;
    }
    return {sum};
}

template <class T>
DEVICE T reduce_or(const Lane<T> &x) {
    T all = x.value;
    UNROLL for (int step = LANES / 2; step; step /= 2) all |= __shfl_xor_sync(ALL_LANES, all, step);
    return all;
}

template <class T>
DEVICE T reduce_sum(const Lane<T> &x) {
    T all = x.value;
    UNROLL for (int step = LANES / 2; step; step /= 2) all += __shfl_xor_sync(ALL_LANES, all, step);
    return all;
}

template <class T>
DEVICE T reduce_max(const Lane<T> &x) {
    T all = x.value;
    UNROLL for (int step = LANES / 2; step; step /= 2) {
        const T other = __shfl_xor_sync(ALL_LANES, all, step);
        all = other > all ? other : all;
    }
    return all;
}

// Writes the non-zero words of the lanes back to back, and returns their bitmap.
DEVICE u32 store_nonzero(const Lane<u32> &x, u32 *to) {
    const u32 map = __ballot_sync(ALL_LANES, x.value != 0);
    if (x.value) to[__popc(map & ((1u << threadIdx.x % LANES) - 1))] = x.value;
    return map;
}

// Reads them back, with zeros for the other lanes.
DEVICE Lane<u32> load_nonzero(u32 map, const u32 *from) {
    const u32 lane = threadIdx.x % LANES;
    return {map >> lane & 1 ? from[__popc(map & ((1u << lane) - 1))] : 0};
}

// Writes the low halves of the words of the lanes in the bitmap, back to back. The host may write up to 32 bytes more.
DEVICE void store_halves(u32 map, const Lane<u32> &x, u16 *to) {
    const u32 lane = threadIdx.x % LANES;
    if (map >> lane & 1) to[__popc(map & ((1u << lane) - 1))] = (u16)x.value;
}

// Reads them back; the values of the other lanes are undefined. The host may read up to 32 bytes more.
DEVICE Lane<u32> load_halves(u32 map, const u16 *from) {
    const u32 lane = threadIdx.x % LANES;
    return {map >> lane & 1 ? from[__popc(map & ((1u << lane) - 1))] : 0u};
}
