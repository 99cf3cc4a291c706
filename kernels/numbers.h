// The element types of the kernels, and the two 16-bit floats, whose arithmetic is done in float32.
#pragma once
#include "simt.h"

typedef float f32;
typedef double f64;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

template <bool FIRST, class A, class B>
struct Select {
    typedef A type;
};
template <class A, class B>
struct Select<false, A, B> {
    typedef B type;
};

// N adjacent elements that a lane of a GPU accesses at once, or in parts of 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T x[N];
};

// Returns whether lanes may access packs of N elements of an array, which may start at any element.
template <int N, class T>
DEVICE bool in_packs(const T *array) {
    return WIDE_ACCESS && N > 1 && (u64)array % alignof(Pack<T, N>) == 0;
}

// `Wide<T>::type` is the type in which arithmetic on T is done.
template <class T>
struct Wide {
    typedef T type;
};
template <>
struct Wide<f16> {
    typedef float type;
};
template <>
struct Wide<bf16> {
    typedef float type;
};

template <class T>
DEVICE T widen(T x) {
    return x;
}

DEVICE float widen(f16 x) {
    const u32 magnitude = (u32)(x.bits & 0x7fff) << 13;
    const u32 sign = (u32)(x.bits & 0x8000) << 16;
    // 2^112 moves the exponent's bias from 15 to 127, and normalises subnormals.
    const u32 finite = bits_of_float(float_of_bits(magnitude) * float_of_bits(0x77800000u));
    const u32 special = magnitude | 0x7f800000u;
    return float_of_bits(sign | ((x.bits & 0x7c00) == 0x7c00 ? special : finite));
}

DEVICE float widen(bf16 x) { return float_of_bits((u32)x.bits << 16); }

// Rounds to nearest, ties to even. A value too large for float16 becomes infinite; a NaN stays a NaN.
template <class T>
struct Narrow {
    static MEMBER T of(T x) { return x; }
};

template <>
struct Narrow<f16> {
    static MEMBER f16 of(float x) {
        const u32 bits = bits_of_float(x);
        const u32 magnitude = bits & 0x7fffffffu;
        const u32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        const u32 subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
        const u32 finite = magnitude < 0x38800000u ? subnormal : normal;
        const u32 nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        const u32 special = magnitude > 0x7f800000u ? nan : 0x7c00u;
        return {(u16)(((bits >> 16) & 0x8000u) | (magnitude >= 0x47800000u ? special : finite))};
    }
};

template <>
struct Narrow<bf16> {
    static MEMBER bf16 of(float x) {
        const u32 bits = bits_of_float(x);
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        const u32 nan = (bits >> 16) | 0x40u;
        return {(u16)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
    }
};

template <class T>
DEVICE T narrow(typename Wide<T>::type x) {
    return Narrow<T>::of(x);
}

// The largest finite value of a 16-bit float. Rounding a larger float32 to it would make an infinity.
template <class T>
struct Largest;
template <>
struct Largest<f16> {
    static constexpr float value = 65504.0f;
};
template <>
struct Largest<bf16> {
    static constexpr float value = 3.3895313892515355e38f;
};

// Clamps a value before it is narrowed to a 16-bit float, so that a lossy value near the limit stays finite.
template <class T>
DEVICE void keep_finite(Lane<float> &x) {
    if constexpr (sizeof(T) == 2) {
        FOR_LANES(l) {
            const float most = Largest<T>::value;
            x[l] = x[l] > most ? most : x[l] < -most ? -most : x[l];
        }
    }
}

template <class T>
DEVICE void keep_finite(Lane<double> &) {}
