// The constructs of simt.h on the host: a lane is an array element, and FOR_LANES is a loop.
#pragma once

#include <cstddef>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define MEMBER inline __attribute__((always_inline))
#define DEVICE static MEMBER
#define CONSTANT static const
#define KERNEL(name, ...) extern "C" __attribute__((visibility("default"))) void name(i64 first, i64 last, __VA_ARGS__)
#define FOR_TILES(t) if (const FloatMode mode; true) for (i64 t = first; t < last; ++t)
#ifdef __clang__
#define FOR_LANES(l) _Pragma("clang loop vectorize(assume_safety)") for (int l = 0; l < LANES; ++l)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define FOR_LANES(l) _Pragma("GCC ivdep") for (int l = 0; l < LANES; ++l)
#define UNROLL _Pragma("GCC unroll 64")
#endif
#define FOR_LANES_IN_TURN(l) _Pragma("GCC unroll 32") for (int l = 0; l < LANES; ++l)
#define ONE_LANE
constexpr int COUNTER_COPIES = 8;  // of a counter that many lanes increment, to reduce dependencies between them
constexpr bool WIDE_ACCESS = false;
#define WARP_SHARED(T, name, n) alignas(64) T name[n]
#define BLOCK_SHARED(T, name, n) WARP_SHARED(T, name, n)
constexpr int WARPS_PER_BLOCK = 1;

template <class T>
struct alignas(64) Lane {
    T value[LANES];
    MEMBER T &operator[](int l) { return value[l]; }
    MEMBER const T &operator[](int l) const { return value[l]; }
};

// Sets IEEE floating-point mode, as on a GPU, for its lifetime: the program may have set the processor to flush denormal
// numbers to zero, and bytes and bounds would depend on that.
struct FloatMode {
#if defined(__SSE2__)
    const u32 before = __builtin_ia32_stmxcsr();
    MEMBER FloatMode() { set(0x1f80); }
    MEMBER ~FloatMode() { set(before); }
    static MEMBER void set(u32 mode) {
        __asm__ volatile("" : : : "memory");  // no access is moved across it
        __builtin_ia32_ldmxcsr(mode);
        __asm__ volatile("" : : : "memory");
    }
#elif defined(__aarch64__)
    u64 before;
    MEMBER FloatMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"((u64)0) : "memory");
    }
    MEMBER ~FloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
#else
    MEMBER FloatMode() {}
#endif
};

DEVICE void warp_sync() {}
DEVICE void block_sync() {}
DEVICE int warp_of_block() { return 0; }

DEVICE void atomic_or(u64 *where, u64 bits) { __atomic_fetch_or(where, bits, __ATOMIC_RELAXED); }
DEVICE void atomic_add(u32 *where, u32 amount) { __atomic_fetch_add(where, amount, __ATOMIC_RELAXED); }
DEVICE void atomic_add(u64 *where, u64 amount) { __atomic_fetch_add(where, amount, __ATOMIC_RELAXED); }
DEVICE bool last_warp(u64 *done, u64 mine, u64 all) {
    return mine && __atomic_fetch_add(done, mine, __ATOMIC_ACQ_REL) + mine == all;
}
DEVICE void warp_atomic_or(u32 *where, u32 bits) { *where |= bits; }
DEVICE void warp_atomic_add(u32 *where, u32 amount) { *where += amount; }

DEVICE int count_ones(u32 x) { return __builtin_popcount(x); }
DEVICE int leading_zeros(u32 x) { return x ? __builtin_clz(x) : 32; }

template <class To, class From>
DEVICE To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
DEVICE float float_of_bits(u32 bits) { return same_bits<float>(bits); }
DEVICE double float_of_bits(u64 bits) { return same_bits<double>(bits); }
DEVICE u32 bits_of_float(float x) { return same_bits<u32>(x); }
DEVICE u64 bits_of_float(double x) { return same_bits<u64>(x); }

DEVICE u32 ballot(const Lane<u32> &x) {
    u32 map = 0;
#if defined(__AVX512F__)
    UNROLL for (int v = 0; v < 2; ++v) {
        const __m512i part = _mm512_load_si512(x.value + 16 * v);
        map |= (u32)_mm512_test_epi32_mask(part, part) << 16 * v;
    }
#elif defined(__AVX2__)
    UNROLL for (int v = 0; v < 4; ++v) {
        const __m256i zero = _mm256_cmpeq_epi32(_mm256_load_si256((const __m256i *)x.value + v), _mm256_setzero_si256());
        map |= (~(u32)_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xff) << 8 * v;
    }
#else
    for (int l = 0; l < LANES; ++l) map |= (u32)(x[l] != 0) << l;
#endif
    return map;
}

template <class T>
DEVICE Lane<T> shuffle(const Lane<T> &x, const Lane<int> &from) {
    Lane<T> y;
    FOR_LANES(l) y[l] = x[from[l] & (LANES - 1)];
    return y;
}

#if defined(__AVX512F__)

DEVICE Lane<u32> shuffle(const Lane<u32> &x, const Lane<int> &from) {
    const __m512i low = _mm512_load_si512(x.value), high = _mm512_load_si512(x.value + 16);
    Lane<u32> y;
    UNROLL for (int v = 0; v < 2; ++v) {
        const __m512i place = _mm512_load_si512(from.value + 16 * v);
        _mm512_store_si512(y.value + 16 * v, _mm512_permutex2var_epi32(low, place, high));
    }
    return y;
}

#elif defined(__AVX2__)

// Looks each lane up in all four vectors, and selects one by the upper bits of the index.
DEVICE Lane<u32> shuffle(const Lane<u32> &x, const Lane<int> &from) {
    const __m256i *table = (const __m256i *)x.value;
    Lane<u32> y;
    UNROLL for (int v = 0; v < 4; ++v) {
        const __m256i place = _mm256_load_si256((const __m256i *)from.value + v);
        const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28));
        const __m256 bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(place, 27));
        __m256 found[4];
        UNROLL for (int t = 0; t < 4; ++t)
            found[t] = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(_mm256_load_si256(table + t), place));
        const __m256 lower = _mm256_blendv_ps(found[0], found[1], bit3), upper = _mm256_blendv_ps(found[2], found[3], bit3);
        _mm256_store_ps((float *)y.value + 8 * v, _mm256_blendv_ps(lower, upper, bit4));
    }
    return y;
}

#endif

template <class T>
DEVICE T broadcast(const Lane<T> &x, int from) {
    return x[from & (LANES - 1)];
}

// Eight lanes at a time, in a form that every compiler vectorises.
typedef u32 EightLanes __attribute__((vector_size(32)));

template <int MASK>
DEVICE Lane<u32> shuffle_xor(const Lane<u32> &x) {
    constexpr int M = MASK % 8;
    const EightLanes *from = (const EightLanes *)x.value;
    Lane<u32> y;
    UNROLL for (int v = 0; v < LANES / 8; ++v) {
        const EightLanes w = from[v ^ MASK / 8];
        ((EightLanes *)y.value)[v] =
            __builtin_shufflevector(w, w, 0 ^ M, 1 ^ M, 2 ^ M, 3 ^ M, 4 ^ M, 5 ^ M, 6 ^ M, 7 ^ M);
    }
    return y;
}

// In vectors as wide as the adjacent ones: a load across two narrower stores would stall.
DEVICE Lane<u32> shift_in(u32 first, const Lane<u32> &x) {
    Lane<u32> y;
#ifdef __AVX512F__
    typedef u32 Vector __attribute__((vector_size(64)));
    const Vector *from = (const Vector *)x.value;
    const Vector below = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, first};
    Vector *to = (Vector *)y.value;
    to[0] = __builtin_shufflevector(below, from[0], 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
    to[1] = __builtin_shufflevector(from[0], from[1], 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
#else
    const EightLanes *from = (const EightLanes *)x.value;
    EightLanes below = {0, 0, 0, 0, 0, 0, 0, first};
    UNROLL for (int v = 0; v < LANES / 8; ++v) {
        ((EightLanes *)y.value)[v] = __builtin_shufflevector(below, from[v], 7, 8, 9, 10, 11, 12, 13, 14);
        below = from[v];
    }
#endif
    return y;
}

template <class T>
DEVICE Lane<T> scan_strided(const Lane<T> &x, int stride) {
    Lane<T> sum = x;
    if (stride == 1) {  // the running sum stays in a register
        T so_far = 0;
        for (int l = 0; l < LANES; ++l) sum[l] = so_far += x[l];
        return sum;
    }
    for (int l = stride; l < LANES; ++l) sum[l] += sum[l - stride];
    return sum;
}

template <class T>
DEVICE T reduce_or(const Lane<T> &x) {
    T all = 0;
    FOR_LANES(l) all |= x[l];
    return all;
}

template <class T>
DEVICE T reduce_sum(const Lane<T> &x) {
    T all = 0;
    FOR_LANES(l) all += x[l];
    return all;
}

template <class T>
DEVICE T reduce_max(const Lane<T> &x) {
    T all = x[0];
    FOR_LANES(l) all = x[l] > all ? x[l] : all;
    return all;
}

#ifdef __AVX512F__

DEVICE u32 store_nonzero(const Lane<u32> &x, u32 *to) {
    const __m512i low = _mm512_load_si512(x.value), high = _mm512_load_si512(x.value + 16);
    const u32 low_map = _mm512_test_epi32_mask(low, low), high_map = _mm512_test_epi32_mask(high, high);
    _mm512_mask_compressstoreu_epi32(to, (__mmask16)low_map, low);
    _mm512_mask_compressstoreu_epi32(to + count_ones(low_map), (__mmask16)high_map, high);
    return low_map | high_map << 16;
}

DEVICE Lane<u32> load_nonzero(u32 map, const u32 *from) {
    Lane<u32> x;
    _mm512_store_si512(x.value, _mm512_maskz_expandloadu_epi32((__mmask16)map, from));
    from += count_ones(map & 0xffff);
    _mm512_store_si512(x.value + 16, _mm512_maskz_expandloadu_epi32((__mmask16)(map >> 16), from));
    return x;
}

DEVICE void store_halves(u32 map, const Lane<u32> &x, u16 *to) {
    UNROLL for (int half = 0; half < 2; ++half) {
        const __mmask16 part = (__mmask16)(map >> 16 * half);
        const __m512i packed = _mm512_maskz_compress_epi32(part, _mm512_load_si512(x.value + 16 * half));
        _mm512_mask_cvtepi32_storeu_epi16(to, 0xffff, packed);
        to += count_ones(part);
    }
}

DEVICE Lane<u32> load_halves(u32 map, const u16 *from) {
    Lane<u32> x;
    UNROLL for (int half = 0; half < 2; ++half) {
        const __mmask16 part = (__mmask16)(map >> 16 * half);
        const __m512i packed = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i *)from));
        _mm512_store_si512(x.value + 16 * half, _mm512_maskz_expand_epi32(part, packed));
        from += count_ones(part);
    }
    return x;
}

#else

DEVICE u32 store_nonzero(const Lane<u32> &x, u32 *to) {
    u32 map = 0;
    for (int l = 0; l < LANES; ++l) {
        *to = x[l];
        to += x[l] != 0;
        map |= (u32)(x[l] != 0) << l;
    }
    return map;
}

DEVICE Lane<u32> load_nonzero(u32 map, const u32 *from) {
    Lane<u32> x;
    for (int l = 0; l < LANES; ++l) x[l] = map >> l & 1 ? *from++ : 0;
    return x;
}

#ifdef __AVX2__

constexpr u64 EIGHT_BYTES = 0x0706050403020100ull;

// 0xff for each of the 8 bits that is set.
DEVICE u64 byte_mask(u32 eight_bits) { return _pdep_u64(eight_bits, 0x0101010101010101ull) * 0xff; }

DEVICE void store_halves(u32 map, const Lane<u32> &x, u16 *to) {
    UNROLL for (int v = 0; v < 4; ++v) {
        const u32 part = map >> 8 * v & 0xff;
        const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((i64)_pext_u64(EIGHT_BYTES, byte_mask(part))));
        const __m256i low = _mm256_and_si256(_mm256_load_si256((const __m256i *)x.value + v), _mm256_set1_epi32(0xffff));
        const __m256i packed = _mm256_permutevar8x32_epi32(low, order);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(packed, packed), 0x08);
        _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(halves));
        to += count_ones(part);
    }
}

DEVICE Lane<u32> load_halves(u32 map, const u16 *from) {
    Lane<u32> x;
    UNROLL for (int v = 0; v < 4; ++v) {
        const u32 part = map >> 8 * v & 0xff;
        const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((i64)_pdep_u64(EIGHT_BYTES, byte_mask(part))));
        const __m256i packed = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
        _mm256_store_si256((__m256i *)x.value + v, _mm256_permutevar8x32_epi32(packed, order));
        from += count_ones(part);
    }
    return x;
}

#else

DEVICE void store_halves(u32 map, const Lane<u32> &x, u16 *to) {
    for (; map; map &= map - 1) *to++ = (u16)x[__builtin_ctz(map)];
}

DEVICE Lane<u32> load_halves(u32 map, const u16 *from) {
    Lane<u32> x;
    for (int l = 0; l < LANES; ++l) x[l] = 0;
    for (; map; map &= map - 1) x[__builtin_ctz(map)] = *from++;
    return x;
}

#endif
#endif

#ifdef __AVX2__

// This instruction set has a ballot over bytes: sort the bytes of the 32 words by position, then take ballots.
DEVICE void sort_bytes(const Lane<u32> &x, __m256i (&plane)[4]) {
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i by_half = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i v[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        const __m256i words = _mm256_load_si256((const __m256i *)x.value + i);
        v[i] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, by_byte), by_half);
    }
    const __m256i even_low = _mm256_unpacklo_epi64(v[0], v[1]), even_high = _mm256_unpacklo_epi64(v[2], v[3]);
    const __m256i odd_low = _mm256_unpackhi_epi64(v[0], v[1]), odd_high = _mm256_unpackhi_epi64(v[2], v[3]);
    plane[0] = _mm256_permute2x128_si256(even_low, even_high, 0x20);
    plane[1] = _mm256_permute2x128_si256(odd_low, odd_high, 0x20);
    plane[2] = _mm256_permute2x128_si256(even_low, even_high, 0x31);
    plane[3] = _mm256_permute2x128_si256(odd_low, odd_high, 0x31);
}

DEVICE void store_planes(const Lane<u32> &x, u32 width, u32 *to) {
    __m256i bytes[4];
    sort_bytes(x, bytes);
    UNROLL for (u32 i = 0; i < 4; ++i) {
        if (8 * i >= width) break;
        UNROLL for (int bit = 7; bit >= 0; --bit) {
            to[8 * i + bit] = (u32)_mm256_movemask_epi8(bytes[i]);
            bytes[i] = _mm256_add_epi8(bytes[i], bytes[i]);
        }
    }
}

DEVICE void transpose_bits(Lane<u32> &x) { store_planes(x, LANES, x.value); }

#endif
