// The operations of reductions, and `store_lanes`, with which decoders store or reduce decoded values.
//
// Integers wrap around. 16-bit floats are computed in float32 and rounded once per operation. MIN and MAX keep the
// current value unless the incoming one is strictly smaller or larger: an incoming NaN is ignored, a current NaN stays, and
// of 0.0 and -0.0 the current one stays. The payload of a NaN from SUM or PROD is unspecified.
#pragma once
#include "numbers.h"

constexpr i64 REPLACE = 0, SUM = 1, PROD = 2, MIN = 3, MAX = 4;
constexpr i64 BAND = 5, BOR = 6, BXOR = 7, LAND = 8, LOR = 9, LXOR = 10;

// `Ring<T>::type` is the type in which T is added and multiplied, so that integers do not overflow.
template <class T>
struct Ring {
    typedef T type;
};
template <>
struct Ring<u8> {
    typedef u32 type;
};
template <>
struct Ring<i8> : Ring<u8> {};
template <>
struct Ring<u16> : Ring<u8> {};
template <>
struct Ring<i16> : Ring<u8> {};
template <>
struct Ring<i32> : Ring<u8> {};
template <>
struct Ring<i64> {
    typedef u64 type;
};

struct Sum {
    template <class T>
    static MEMBER T of(T there, T arriving) {
        typedef typename Ring<T>::type R;
        return (T)((R)there + (R)arriving);
    }
};

struct Prod {
    template <class T>
    static MEMBER T of(T there, T arriving) {
        typedef typename Ring<T>::type R;
        return (T)((R)there * (R)arriving);
    }
};

struct Min {
    template <class T>
    static MEMBER T of(T there, T arriving) {
        return arriving < there ? arriving : there;
    }
};

struct Max {
    template <class T>
    static MEMBER T of(T there, T arriving) {
        return arriving > there ? arriving : there;
    }
};

// `Onto<Op, T>::put(place, x)`: x is a T, or a T in its wide form.
template <class Op, class T>
struct Onto {
    template <class X>
    static MEMBER void put(T &place, X x) {
        typedef typename Wide<T>::type W;
        place = narrow<T>(Op::of((W)widen(place), (W)widen(x)));
    }
};

struct Replace;

template <class T>
struct Onto<Replace, T> {
    template <class X>
    static MEMBER void put(T &place, X x) {
        place = narrow<T>(x);
    }
    static MEMBER void put(T &place, T x) { place = x; }  // bit for bit, including NaN payloads
};

template <class Op, int N, class T, class X>
DEVICE void put_lanes(T *to, i64 start, i64 count, const Lane<X> (&x)[N]) {
    if (start + N * LANES <= count && in_packs<N>(to)) {
        FOR_LANES(l) {
            Pack<T, N> *const at = (Pack<T, N> *)(to + start + N * l);
            Pack<T, N> pack = *at;
            UNROLL for (int j = 0; j < N; ++j) Onto<Op, T>::put(pack.x[j], x[j][l]);
            *at = pack;
        }
    } else if (start + N * LANES <= count) {
        FOR_LANES(l) {
            UNROLL for (int j = 0; j < N; ++j) Onto<Op, T>::put(to[start + N * l + j], x[j][l]);
        }
    } else {
        FOR_LANES(l) {
            UNROLL for (int j = 0; j < N; ++j) {
                if (start + N * l + j < count) Onto<Op, T>::put(to[start + N * l + j], x[j][l]);
            }
        }
    }
}

// Lane l's N values go to the elements start + N*l .. of the `count` elements at `to`; values beyond the end are dropped.
// The values are Ts, or Ts in their wide form; with REPLACE, Ts are stored bit for bit. `op` is one of REPLACE .. MAX.
template <int N, class T, class X>
DEVICE void store_lanes(T *to, i64 start, i64 count, const Lane<X> (&x)[N], i64 op) {
    switch (op) {
        case REPLACE: return put_lanes<Replace>(to, start, count, x);
        case SUM: return put_lanes<Sum>(to, start, count, x);
        case PROD: return put_lanes<Prod>(to, start, count, x);
        case MIN: return put_lanes<Min>(to, start, count, x);
        case MAX: return put_lanes<Max>(to, start, count, x);
    }
}
