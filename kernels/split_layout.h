// How split.cu splits floats into exponents and raw bits, and how the raw bits are stored.
#pragma once
#include "numbers.h"

constexpr int STATE_BYTES = 4 * LANES, SEED_BYTES = 2 * LANES;
constexpr int SLACK = 32;  // behind the last word of a stream, so that words can be read many at a time

// How a type is split: U holds its bits; MANTISSA bits of mantissa below EXPONENT bits of exponent below the sign.
// The raw bits of 32 values are stored as arrays of their low words, half-words and bytes, and bit planes of the rest.
template <class T>
struct Layout;
template <>
struct Layout<f16> {
    typedef u16 U;
    static constexpr int MANTISSA = 10, EXPONENT = 5, WORDS = 0, HALVES = 0, BYTES = 1, PLANES = 3;
};
template <>
struct Layout<bf16> {
    typedef u16 U;
    static constexpr int MANTISSA = 7, EXPONENT = 8, WORDS = 0, HALVES = 0, BYTES = 1, PLANES = 0;
};
template <>
struct Layout<f32> {
    typedef u32 U;
    static constexpr int MANTISSA = 23, EXPONENT = 8, WORDS = 0, HALVES = 1, BYTES = 1, PLANES = 0;
};
template <>
struct Layout<f64> {
    typedef u64 U;
    static constexpr int MANTISSA = 52, EXPONENT = 11, WORDS = 1, HALVES = 1, BYTES = 0, PLANES = 5;
};

template <class T>
struct Parts : Layout<T> {
    typedef Layout<T> L;
    typedef typename L::U U;
    static constexpr int SYMBOLS = 1 << L::EXPONENT;
    static constexpr int GROUPS = 128, TILE = GROUPS * LANES;  // small enough that a chunk's tiles fill a GPU
    // Groups at a time: a GPU loads all before it stores what it makes of the first, so that their latencies overlap. Types with
    // bit planes are slower on a host with more than one.
    static constexpr int AT_ONCE = L::PLANES ? 1 : 4;
    static constexpr int RAW_BYTES = LANES * (4 * L::WORDS + 2 * L::HALVES + L::BYTES) + 4 * L::PLANES;
    static constexpr int SEEDED_GROUPS = (SEED_BYTES + RAW_BYTES - 1) / RAW_BYTES;
    static constexpr i64 SLOT = STATE_BYTES + GROUPS * RAW_BYTES + 2 * TILE + SLACK;

    static MEMBER u32 exponent(U bits) { return (u32)(bits >> L::MANTISSA) & (SYMBOLS - 1); }
    static MEMBER U raw(U bits) {
        const U sign = (U)(bits >> (L::MANTISSA + L::EXPONENT));
        return (U)((bits & (((U)1 << L::MANTISSA) - 1)) | (U)(sign << L::MANTISSA));
    }
    static MEMBER U join(u32 exponent, U raw) {
        const U sign = (U)(raw >> L::MANTISSA);
        const U mantissa = (U)(raw & (((U)1 << L::MANTISSA) - 1));
        return (U)(mantissa | (U)exponent << L::MANTISSA | (U)(sign << (L::MANTISSA + L::EXPONENT)));
    }
};

// The raw bytes of `groups` groups, at least those of the initial states.
template <class T>
DEVICE i64 raw_bytes(int groups) {
    const i64 bytes = (i64)groups * Parts<T>::RAW_BYTES;
    return bytes < SEED_BYTES ? SEED_BYTES : bytes;
}

DEVICE f16 value_of(u16 bits, f16) { return {bits}; }
DEVICE bf16 value_of(u16 bits, bf16) { return {bits}; }
DEVICE f32 value_of(u32 bits, f32) { return float_of_bits(bits); }
DEVICE f64 value_of(u64 bits, f64) { return float_of_bits(bits); }

// The raw bits of 32 values: their low words, half-words and bytes, and bit planes of the rest.
template <class T>
DEVICE void store_raw(const Lane<typename Layout<T>::U> &raw, u8 *to) {
    typedef Layout<T> L;
    int shift = 0;
    if (L::WORDS) {
        FOR_LANES(l) ((u32 *)to)[l] = (u32)raw[l];
        to += 4 * LANES, shift += 32;
    }
    if (L::HALVES) {
        FOR_LANES(l) ((u16 *)to)[l] = (u16)(raw[l] >> shift);
        to += 2 * LANES, shift += 16;
    }
    if (L::BYTES) {
        FOR_LANES(l) to[l] = (u8)(raw[l] >> shift);
        to += LANES, shift += 8;
    }
    if (L::PLANES) {
        Lane<u32> rest;
        FOR_LANES(l) rest[l] = (u32)(raw[l] >> shift);
        transpose_bits(rest);
        FOR_LANES(l) if (l < L::PLANES) ((u32 *)to)[l] = rest[l];
    }
}

template <class T>
DEVICE void load_raw(const u8 *from, Lane<typename Layout<T>::U> &raw) {
    typedef Layout<T> L;
    typedef typename L::U U;
    int shift = 0;
    FOR_LANES(l) raw[l] = 0;
    if (L::WORDS) {
        FOR_LANES(l) raw[l] = (U)(raw[l] | ((const u32 *)from)[l]);
        from += 4 * LANES, shift += 32;
    }
    if (L::HALVES) {
        FOR_LANES(l) raw[l] = (U)(raw[l] | (U)((const u16 *)from)[l] << shift);
        from += 2 * LANES, shift += 16;
    }
    if (L::BYTES) {
        FOR_LANES(l) raw[l] = (U)(raw[l] | (U)from[l] << shift);
        from += LANES, shift += 8;
    }
    if (L::PLANES) {
        Lane<u32> rest;
        FOR_LANES(l) rest[l] = l < L::PLANES ? ((const u32 *)from)[l] : 0;
        transpose_bits(rest);
        FOR_LANES(l) raw[l] = (U)(raw[l] | (U)rest[l] << shift);
    }
}
