// Casts floats to a smaller type, rounding to nearest. Overflow is reported, so that the chunk can be sent raw.
#include "numbers.h"
#include "reduce.h"
#include "status.h"

constexpr int BLOCKS = 32;
constexpr int TILE = BLOCKS * LANES;

template <class Bits>
DEVICE constexpr bool all_ones(Bits bits, Bits mask) {
    return (bits & mask) == mask;
}

DEVICE bool infinite(f16 x) { return all_ones<u16>(x.bits, 0x7c00); }
DEVICE bool infinite(bf16 x) { return all_ones<u16>(x.bits, 0x7f80); }
DEVICE bool infinite(f32 x) { return all_ones<u32>(bits_of_float(x), 0x7f800000u); }
DEVICE bool infinite(f64 x) { return all_ones<u64>(bits_of_float(x), 0x7ff0000000000000ull); }

DEVICE f16 cast(f32 x, f16) { return narrow<f16>(x); }
DEVICE bf16 cast(f32 x, bf16) { return narrow<bf16>(x); }
DEVICE f32 cast(f64 x, f32) {
    const u64 bits = bits_of_float(x);
    const u32 nan = (u32)(bits >> 63) << 31 | 0x7fc00000u | (u32)(bits >> 29 & 0x7fffff);  // a GPU's conversion drops the payload
    return (bits & ~(u64)0 >> 1) > 0x7ff0000000000000ull ? float_of_bits(nan) : (f32)x;
}

template <class T, class Small>
DEVICE void encode(i64 first, i64 last, const T *from, i64 count, Small *to, u64 *status) {
    Lane<u32> lost;
    FOR_LANES(l) lost[l] = 0;
    FOR_TILES(t) {
        for (i64 at = t * TILE; at < (t + 1) * TILE && at < count; at += LANES) {
            FOR_LANES(l) {
                if (at + l < count) {
                    const T x = from[at + l];
                    const Small y = cast(x, Small());
                    lost[l] |= infinite(y) & !infinite(x);
                    to[at + l] = y;
                }
            }
        }
    }
    if (reduce_or(lost)) report(status, STATUS_NOT_FINITE);
}

template <class T, class Small>
DEVICE void decode(i64 first, i64 last, const Small *from, i64 count, T *to, i64 op) {
    FOR_TILES(t) {
        for (i64 at = t * TILE; at < (t + 1) * TILE && at < count; at += LANES) {
            Lane<T> value[1];
            FOR_LANES(l) value[0][l] = at + l < count ? (T)widen(from[at + l]) : (T)0;
            store_lanes(to, at, count, value, op);
        }
    }
}

#define CAST_KERNELS(T, Small)                                                                              \
    KERNEL(cast_encode_##T##_##Small, const T *from, i64 count, Small *to, u64 *status) {                    \
        encode(first, last, from, count, to, status);                                                       \
    }                                                                                                       \
    KERNEL(cast_decode_##T##_##Small, const Small *from, i64 count, T *to, i64 op) {                         \
        decode(first, last, from, count, to, op);                                                           \
    }

CAST_KERNELS(f32, f16)
CAST_KERNELS(f32, bf16)
CAST_KERNELS(f64, f32)
