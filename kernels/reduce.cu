// reduce_<type>: to = to op from, element by element; the operations are in reduce.h. A tile is 1024 elements.
// The two buffers do not overlap. An operation that is not defined for the type leaves `to` unchanged.
#include "reduce.h"

constexpr i64 TILE = 1024;

template <class R>
struct Complex {
    R re, im;
};
typedef Complex<float> c64;
typedef Complex<double> c128;

template <class R>
DEVICE Complex<R> operator+(Complex<R> a, Complex<R> b) {
    return {a.re + b.re, a.im + b.im};
}

// Added, never subtracted: of a difference and a sum of products gcc 12 makes a fused vfmaddsub, which rounds differently,
// even with -ffp-contract=off.
template <class R>
DEVICE Complex<R> operator*(Complex<R> a, Complex<R> b) {
    const R less = -a.im;
    return {a.re * b.re + less * b.im, a.re * b.im + a.im * b.re};
}

#define OPERATION(Name, result) \
    struct Name { \
        template <class T> \
        static MEMBER T of(T there, T arriving) { \
            return (T)(result); \
        } \
    };
OPERATION(BitAnd, there &arriving)
OPERATION(BitOr, there | arriving)
OPERATION(BitXor, there ^ arriving)
OPERATION(And, (there != 0) & (arriving != 0))
OPERATION(Or, (there != 0) | (arriving != 0))
OPERATION(Xor, (there != 0) ^ (arriving != 0))

template <class Op, class T>
DEVICE void reduce(i64 first, i64 last, T *__restrict__ to, const T *__restrict__ from, i64 count) {
    FOR_TILES(t) {
        const i64 start = t * TILE;
        const i64 stop = start + TILE < count ? start + TILE : count;
        const i64 whole = stop - (stop - start) % LANES;
        for (i64 i = start; i < whole; i += LANES) FOR_LANES(l) Onto<Op, T>::put(to[i + l], from[i + l]);
        FOR_LANES(l) {
            if (whole + l < stop) Onto<Op, T>::put(to[whole + l], from[whole + l]);
        }
    }
}

template <class T>
DEVICE void reduce_any(i64 first, i64 last, T *to, const T *from, i64 count, i64 op) {
    switch (op) {
        case REPLACE: return reduce<Replace>(first, last, to, from, count);
        case SUM: return reduce<Sum>(first, last, to, from, count);
        case PROD: return reduce<Prod>(first, last, to, from, count);
    }
}

template <class T>
DEVICE void reduce_ordered(i64 first, i64 last, T *to, const T *from, i64 count, i64 op) {
    switch (op) {
        case MIN: return reduce<Min>(first, last, to, from, count);
        case MAX: return reduce<Max>(first, last, to, from, count);
        default: return reduce_any(first, last, to, from, count, op);
    }
}

template <class T>
DEVICE void reduce_whole(i64 first, i64 last, T *to, const T *from, i64 count, i64 op) {
    switch (op) {
        case BAND: return reduce<BitAnd>(first, last, to, from, count);
        case BOR: return reduce<BitOr>(first, last, to, from, count);
        case BXOR: return reduce<BitXor>(first, last, to, from, count);
        case LAND: return reduce<And>(first, last, to, from, count);
        case LOR: return reduce<Or>(first, last, to, from, count);
        case LXOR: return reduce<Xor>(first, last, to, from, count);
        default: return reduce_ordered(first, last, to, from, count, op);
    }
}

#define REDUCE(suffix, T, operations) \
    KERNEL(reduce_##suffix, T *to, const T *from, i64 count, i64 op) { operations(first, last, to, from, count, op); }

REDUCE(u8, u8, reduce_whole)
REDUCE(i8, i8, reduce_whole)
REDUCE(u16, u16, reduce_whole)
REDUCE(i16, i16, reduce_whole)
REDUCE(u32, u32, reduce_whole)
REDUCE(i32, i32, reduce_whole)
REDUCE(u64, u64, reduce_whole)
REDUCE(i64, i64, reduce_whole)
REDUCE(f16, f16, reduce_ordered)
REDUCE(bf16, bf16, reduce_ordered)
REDUCE(f32, float, reduce_ordered)
REDUCE(f64, double, reduce_ordered)
REDUCE(c64, c64, reduce_any)
REDUCE(c128, c128, reduce_any)
