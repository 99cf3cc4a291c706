// Lossless, after MPC: differences of values that are `stride` apart, in bit planes of 32 values, without zero planes.
//
// Stream: a stream of tiles (tiles.h). A tile is 32 blocks of 32 values: for each block a bitmap of its non-zero planes, then those
// planes. Values are treated as integers, so every bit is restored: NaN payloads, infinities and the sign of zero.
#include "reduce.h"
#include "tiles.h"

constexpr int BLOCKS = 32;
constexpr int TILE = BLOCKS * LANES;

template <class U>
struct Words;
template <>
struct Words<u32> {
    static constexpr int PER_VALUE = 1;
    typedef i32 Int;
    static MEMBER u32 word(u32 x, int) { return x; }
    static MEMBER u32 value(const u32 (&word)[1]) { return word[0]; }
};
template <>
struct Words<u64> {
    static constexpr int PER_VALUE = 2;
    typedef i64 Int;
    static MEMBER u32 word(u64 x, int i) { return (u32)(x >> 32 * i); }
    static MEMBER u64 value(const u32 (&word)[2]) { return word[0] | (u64)word[1] << 32; }
};

template <class U>
DEVICE constexpr i64 slot_bytes() {
    return BLOCKS * Words<U>::PER_VALUE * 4 * (1 + LANES);
}

// The zigzag differences of 32 values from those `stride` before; values before the tile count as zero.
template <class U>
DEVICE void differences(const U *from, i64 tile, i64 start, i64 count, int stride, Lane<U> &difference) {
    typedef typename Words<U>::Int Int;
    if (start - stride >= tile && start + LANES <= count) {
        FOR_LANES(l) difference[l] = zigzag((Int)(from[start + l] - from[start + l - stride]));
        return;
    }
    FOR_LANES(l) {
        const i64 at = start + l;
        const U value = at < count ? from[at] : 0, before = at < count && at - stride >= tile ? from[at - stride] : 0;
        difference[l] = zigzag((Int)(value - before));
    }
}

template <class U>
DEVICE u32 encode_tile(const U *from, i64 tile, i64 count, int stride, u8 *out) {
    constexpr int N = Words<U>::PER_VALUE;
    u32 *const maps = (u32 *)out;
    u32 *planes = maps + BLOCKS * N;
    for (int b = 0; b < BLOCKS; ++b) {
        Lane<U> difference;
        differences(from, tile, tile + b * LANES, count, stride, difference);
        UNROLL for (int i = 0; i < N; ++i) {
            Lane<u32> x;
            FOR_LANES(l) x[l] = Words<U>::word(difference[l], i);
            transpose_bits(x);
            const u32 map = store_nonzero(x, planes);
            ONE_LANE maps[b * N + i] = map;
            planes += count_ones(map);
        }
    }
    return (u32)((u8 *)planes - out);
}

template <class U>
DEVICE void encode(i64 first, i64 last, const U *from, i64 count, i64 stride, u8 *slots, u32 *sizes, u64 *starts) {
    TileWriter writer(slots, slot_bytes<U>(), first, sizes, starts);
    FOR_TILES(t) {
        u8 *out = writer.begin(t);
        writer.end(t, encode_tile(from, t * TILE, count, (int)stride, out));
    }
}

// Decodes one tile; fails if its bitmaps do not add up to `size` bytes.
template <class T, class U>
DEVICE bool decode_tile(const u8 *in, u64 size, int stride, T *to, i64 start, i64 count, i64 op) {
    constexpr int N = Words<U>::PER_VALUE;
    const u32 *maps = (const u32 *)in, *planes = maps + BLOCKS * N;
    if (size < 4 * BLOCKS * N) return false;
    Lane<u32> ones;
    Lane<int> carried_from;
    FOR_LANES(l) {
        ones[l] = 0;
        UNROLL for (int i = 0; i < N; ++i) ones[l] += count_ones(maps[l * N + i]);
        carried_from[l] = LANES - stride + l % stride;
    }
    if (4 * ((u64)reduce_sum(ones) + BLOCKS * N) != size) return false;
    Lane<U> value;
    FOR_LANES(l) value[l] = 0;
    for (int b = 0; b < BLOCKS && start + b * LANES < count; ++b) {
        const Lane<U> carried = shuffle(value, carried_from);
        Lane<u32> word[N];
        UNROLL for (int i = 0; i < N; ++i) {
            const u32 map = maps[b * N + i];
            word[i] = load_nonzero(map, planes);
            transpose_bits(word[i]);
            planes += count_ones(map);
        }
        FOR_LANES(l) {
            u32 parts[N];
            UNROLL for (int i = 0; i < N; ++i) parts[i] = word[i][l];
            value[l] = unzigzag(Words<U>::value(parts));
        }
        value = scan_strided(value, stride);
        Lane<T> result[1];
        FOR_LANES(l) {
            value[l] += carried[l];
            result[0][l] = float_of_bits(value[l]);
        }
        store_lanes(to, start + b * LANES, count, result, op);
    }
    return true;
}

template <class U, class T>
DEVICE void decode(i64 first, i64 last, const u32 *sizes, const u8 *tiles, i64 available, i64 stride, i64 count, T *to, i64 op,
                   u64 *status) {
    TileReader reader(sizes, (count + TILE - 1) / TILE, available, slot_bytes<U>());
    FOR_TILES(t) {
        u64 at, size;
        if (!reader.find(t, at, size) || !decode_tile<T, U>(tiles + at, size, (int)stride, to, t * TILE, count, op))
            report(status, STATUS_BAD_STREAM);
    }
}

#define MPC_KERNELS(T, U)                                                                                            \
    KERNEL(mpc_encode_##T, const U *from, i64 count, i64 stride, u8 *slots, u32 *sizes, u64 *starts) {                \
        encode(first, last, from, count, stride, slots, sizes, starts);                                              \
    }                                                                                                                \
    KERNEL(mpc_decode_##T, const u32 *sizes, const u8 *tiles, i64 available, i64 stride, i64 count, T *to, i64 op,    \
           u64 *status) {                                                                                            \
        decode<U>(first, last, sizes, tiles, available, stride, count, to, op, status);                              \
    }

MPC_KERNELS(f32, u32)
MPC_KERNELS(f64, u64)
