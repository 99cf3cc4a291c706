// Error-bounded: values become multiples of a step, in blocks of 32, each packed at the width that it needs.
//
// Stream: the step (f64) and the bound (f64), then a stream of tiles (tiles.h). A tile is 32 blocks: 32 bytes with the packing of
// each, then their words. The encoder also decodes every value: a block with a value that would violate the bound (in the
// caller's precision), or that is not finite, is stored exactly.
#include "numbers.h"
#include "reduce.h"
#include "tiles.h"

constexpr int BLOCKS = 32;
constexpr int TILE = BLOCKS * LANES;

// A block's byte: the width of its values in bits (0..31), with DELTA if each value is stored as the difference from the one
// before; or one of the two that store all bits.
constexpr u32 DELTA = 0x40, CONSTANT_BLOCK = 0xfe, RAW_BLOCK = 0xff;

struct Header {
    double step, bound;
};

template <class T>
struct Bits;
template <>
struct Bits<f16> {
    typedef u16 type;
};
template <>
struct Bits<bf16> {
    typedef u16 type;
};
template <>
struct Bits<f32> {
    typedef u32 type;
};
template <>
struct Bits<f64> {
    typedef u64 type;
};

template <class T>
DEVICE constexpr u32 raw_words() {
    return LANES * sizeof(T) / 4;
}
// Blocks this wide or wider are stored exactly; 32 is also the width of a value that violates the bound.
template <class T>
DEVICE constexpr u32 widest() {
    return raw_words<T>() < 32 ? raw_words<T>() : 32;
}
template <class T>
DEVICE constexpr u32 constant_words() {
    return (sizeof(T) + 3) / 4;
}
template <class T>
DEVICE constexpr i64 slot_bytes() {
    return BLOCKS + 4 * BLOCKS * raw_words<T>();
}

DEVICE float magnitude(float x) { return float_of_bits(bits_of_float(x) & 0x7fffffffu); }
DEVICE double magnitude(double x) { return float_of_bits(bits_of_float(x) & ~(u64)0 >> 1); }

// A step is `steps` times the bound, minus a margin for rounding.
DEVICE Header header_of(double bound, double steps) { return {steps * bound * (1 - 1.0 / 512), bound}; }

// The largest F below x (x positive): an error that rounds to it is an error of at most x.
DEVICE float next_below(float x) { return x > 0 ? float_of_bits(bits_of_float(x) - 1) : x; }
DEVICE double next_below(double x) { return x > 0 ? float_of_bits(bits_of_float(x) - 1) : x; }

template <class F>
struct Quantiser {
    F step, inverse, limit;

    // `bound` may be rounded up in the conversion to F, and so may an error: one step down compensates for either.
    MEMBER explicit Quantiser(const Header &header)
        : step((F)header.step), inverse((F)1 / (F)header.step), limit(next_below((F)header.bound)) {}
};

// The nearest multiple of the step, in steps; zero if there is none.
template <class F>
DEVICE i32 nearest(F value, const Quantiser<F> &by) {
    const F scaled = value * by.inverse;
    return (i32)((magnitude(scaled) < (F)(1 << 30) ? scaled : (F)0) + (scaled < 0 ? (F)-0.5 : (F)0.5));
}

// Quantises 32 values. `bad` is all ones if a decoded value would violate the bound, else zero.
template <class T, class F>
DEVICE void quantise(const Lane<F> &value, const Quantiser<F> &by, Lane<u32> &q, Lane<u32> &bad) {
    FOR_LANES(l) {
        const i32 steps = nearest(value[l], by);
        const F back = widen(narrow<T>(by.step * (F)steps));
        q[l] = (u32)steps;
        bad[l] = magnitude(back - value[l]) <= by.limit ? 0 : ~0u;
    }
}

// A block ready to be packed: its values, or their differences (the first from `before`, the last value of the previous
// block) if those are narrower.
struct Packing {
    Lane<u32> code;
    u32 width, delta;

    MEMBER void take_values(const Lane<u32> &q, const Lane<u32> &bad) {
        FOR_LANES(l) code[l] = zigzag((i32)q[l]) | bad[l];
        width = 32 - leading_zeros(reduce_or(code));
        delta = 0;
    }

    MEMBER void try_differences(const Lane<u32> &q, const Lane<u32> &bad, u32 before) {
        Lane<u32> difference;
        const Lane<u32> previous = shift_in(before, q);
        FOR_LANES(l) difference[l] = zigzag((i32)(q[l] - previous[l])) | bad[l];
        const u32 narrower = 32 - leading_zeros(reduce_or(difference));
        if (narrower < width) {
            code = difference;
            width = narrower;
            delta = DELTA;
        }
    }
};

DEVICE u32 block_words(u32 byte, u32 raw, u32 constant) {
    return byte == RAW_BLOCK ? raw : byte == CONSTANT_BLOCK ? constant : byte & ~DELTA;
}

// Element i of a block that stores all bits. A block starts at a multiple of 4 bytes, so larger elements are read in words.
template <class B>
DEVICE void store_kept(u32 *words, int i, B bits) {
    if constexpr (sizeof(B) == 8) {
        words[2 * i] = (u32)bits;
        words[2 * i + 1] = (u32)(bits >> 32);
    } else {
        ((B *)words)[i] = bits;
    }
}

template <class T>
DEVICE T load_kept(const u32 *words, int i) {
    if constexpr (sizeof(T) == 8)
        return float_of_bits(words[2 * i] | (u64)words[2 * i + 1] << 32);
    else
        return ((const T *)words)[i];
}

// Stores all bits of a block; only one value if all are equal.
template <class T>
DEVICE u32 keep_block(const T *from, i64 start, i64 count, u32 *out) {
    typedef typename Bits<T>::type B;
    const B *bits = (const B *)from;
    Lane<u32> other;
    FOR_LANES(l) other[l] = start + l < count && bits[start + l] != bits[start];
    if (reduce_or(other) == 0) {
        ONE_LANE {
            out[0] = 0;
            store_kept(out, 0, bits[start]);
        }
        return CONSTANT_BLOCK;
    }
    FOR_LANES(l) store_kept(out, l, start + l < count ? bits[start + l] : (B)0);
    return RAW_BLOCK;
}

template <class T, class F>
DEVICE void load_lanes(const T *from, i64 start, i64 count, Lane<F> &value, F beyond = 0) {
    if (start + LANES <= count) {
        FOR_LANES(l) value[l] = widen(from[start + l]);
    } else {
        FOR_LANES(l) value[l] = start + l < count ? (F)widen(from[start + l]) : beyond;
    }
}

// Several blocks at a time, step by step, for instruction-level parallelism.
constexpr int AT_ONCE = 4;

template <class T>
DEVICE u32 encode_tile(const T *from, i64 start, i64 count, const Quantiser<typename Wide<T>::type> &by, u8 *out) {
    u32 *words = (u32 *)(out + BLOCKS);
    u32 before = 0, useful = DELTA;
    for (int b = 0; b < BLOCKS; b += AT_ONCE) {
        Lane<u32> q[AT_ONCE], bad[AT_ONCE];
        Packing packing[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; ++i) {
            Lane<typename Wide<T>::type> value;
            load_lanes(from, start + (b + i) * LANES, count, value);
            quantise<T>(value, by, q[i], bad[i]);
        }
        UNROLL for (int i = 0; i < AT_ONCE; ++i) packing[i].take_values(q[i], bad[i]);
        if (useful) {  // differences that did not help earlier blocks of a tile, as in noise, will not help the next ones
            useful = 0;
            UNROLL for (int i = 0; i < AT_ONCE; ++i) {
                packing[i].try_differences(q[i], bad[i], before);
                before = broadcast(q[i], LANES - 1);
                useful |= packing[i].delta;
            }
        }
        UNROLL for (int i = 0; i < AT_ONCE; ++i) {
            const i64 at = start + (b + i) * LANES;
            u32 byte = packing[i].width | packing[i].delta;
            if (at >= count)
                byte = 0;
            else if (packing[i].width >= widest<T>())
                byte = keep_block(from, at, count, words);
            else
                store_planes(packing[i].code, packing[i].width, words);
            ONE_LANE out[b + i] = (u8)byte;
            words += block_words(byte, raw_words<T>(), constant_words<T>());
        }
    }
    return (u32)((u8 *)words - out);
}

template <class T>
DEVICE void encode(i64 first, i64 last, const T *from, i64 count, double bound, double steps, Header *header, u8 *slots, u32 *sizes,
                   u64 *starts) {
    TileWriter writer(slots, slot_bytes<T>(), first, sizes, starts);
    FOR_TILES(t) {
        const Header of_all = bound > 0 ? header_of(bound, steps) : *header;
        if (bound > 0 && t == 0) ONE_LANE *header = of_all;
        const Quantiser<typename Wide<T>::type> by(of_all);
        u8 *out = writer.begin(t);
        writer.end(t, encode_tile(from, t * TILE, count, by, out));
    }
}

// `before` is the last value of the previous block, in steps, and is updated to this block's.
template <class T, class F>
DEVICE void decode_block(u32 byte, const u32 *words, const Quantiser<F> &by, u32 &before, T *to, i64 start, i64 count, i64 op) {
    if (byte >= CONSTANT_BLOCK) {
        Lane<T> value[1];
        FOR_LANES(l) value[0][l] = load_kept<T>(words, byte == RAW_BLOCK ? l : 0);
        before = (u32)nearest((F)widen(load_kept<T>(words, byte == RAW_BLOCK ? LANES - 1 : 0)), by);
        store_lanes(to, start, count, value, op);
        return;
    }
    const u32 width = byte & ~DELTA;
    Lane<u32> q;
    Lane<F> value[1];
    FOR_LANES(l) q[l] = (u32)l < width ? words[l] : 0;
    transpose_bits(q);
    FOR_LANES(l) q[l] = unzigzag(q[l]);
    if (byte & DELTA) {
        q = scan_inclusive(q);
        FOR_LANES(l) q[l] += before;
    }
    before = broadcast(q, LANES - 1);
    FOR_LANES(l) value[0][l] = by.step * (F)(i32)q[l];
    store_lanes(to, start, count, value, op);
}

// Decodes one tile; fails if its blocks do not add up to `size` bytes.
template <class T>
DEVICE bool decode_tile(const u8 *in, u64 size, const Quantiser<typename Wide<T>::type> &by, T *to, i64 start, i64 count, i64 op) {
    Lane<u32> byte, words, bad;
    if (size < BLOCKS) return false;
    FOR_LANES(l) {
        byte[l] = in[l];
        words[l] = block_words(byte[l], raw_words<T>(), constant_words<T>());
        bad[l] = byte[l] < CONSTANT_BLOCK && (byte[l] & ~DELTA) >= widest<T>();
    }
    const Lane<u32> place = scan_exclusive(words);
    if (reduce_or(bad) || BLOCKS + 4 * (u64)reduce_sum(words) != size) return false;
    u32 before = 0;
    for (int b = 0; b < BLOCKS && start + b * LANES < count; ++b) {
        const u32 *block = (const u32 *)(in + BLOCKS) + broadcast(place, b);
        decode_block(broadcast(byte, b), block, by, before, to, start + b * LANES, count, op);
    }
    return true;
}

template <class T>
DEVICE void decode(i64 first, i64 last, const Header *header, const u32 *sizes, const u8 *tiles, i64 available, i64 count, T *to,
                   i64 op, u64 *status) {
    TileReader reader(sizes, (count + TILE - 1) / TILE, available, slot_bytes<T>());
    FOR_TILES(t) {
        const Quantiser<typename Wide<T>::type> by(*header);
        u64 at, size;
        if (!reader.find(t, at, size) || !decode_tile(tiles + at, size, by, to, t * TILE, count, op))
            report(status, STATUS_BAD_STREAM);
    }
}

// The minimum and maximum of the finite values of a tile; an empty range if there are none.
template <class T>
DEVICE void tile_range(const T *from, i64 start, i64 count, double *range) {
    typedef typename Wide<T>::type F;
    const F infinite = (F)1 / (F)0.0;
    Lane<F> greatest, turned;
    FOR_LANES(l) greatest[l] = turned[l] = -infinite;
    for (i64 at = start; at < start + TILE && at < count; at += LANES) {
        Lane<F> value;
        load_lanes(from, at, count, value, infinite);
        FOR_LANES(l) {
            const F x = value[l];
            const F up = magnitude(x) < infinite ? x : -infinite, down = magnitude(x) < infinite ? -x : -infinite;
            greatest[l] = up > greatest[l] ? up : greatest[l];
            turned[l] = down > turned[l] ? down : turned[l];
        }
    }
    const double high = (double)reduce_max(greatest), low = -(double)reduce_max(turned);
    ONE_LANE {
        range[0] = low;
        range[1] = high;
    }
}

// Writes the stream's header, with `share` of the range of all tiles as the bound.
DEVICE void make_header(const double *ranges, i64 tiles, double share, double steps, Header *header) {
    Lane<double> greatest, turned;
    FOR_LANES(l) greatest[l] = turned[l] = -1.0 / 0.0;
    for (i64 t = 0; t < tiles; t += LANES) {
        FOR_LANES(l) {
            if (t + l < tiles) {
                turned[l] = -ranges[2 * (t + l)] > turned[l] ? -ranges[2 * (t + l)] : turned[l];
                greatest[l] = ranges[2 * (t + l) + 1] > greatest[l] ? ranges[2 * (t + l) + 1] : greatest[l];
            }
        }
    }
    const double high = reduce_max(greatest), low = -reduce_max(turned);
    const Header made = header_of(high > low ? share * (high - low) : 0, steps);
    ONE_LANE *header = made;
}

// The last warp makes the header from the ranges of all tiles. *done is zero at launch.
template <class T>
DEVICE void find_range(i64 first, i64 last, const T *from, i64 count, double share, double steps, double *ranges, u64 *done,
                       Header *header) {
    const i64 tiles = (count + TILE - 1) / TILE;
    u64 mine = 0;
    FOR_TILES(t) {
        tile_range(from, t * TILE, count, ranges + 2 * t);
        ++mine;
    }
    if (!last_warp(done, mine, (u64)tiles)) return;
    const FloatMode mode;
    make_header(ranges, tiles, share, steps, header);
}

#define BOUND_KERNELS(T)                                                                                                  \
    KERNEL(bound_range_##T, const T *from, i64 count, double share, double steps, double *ranges, u64 *done,               \
           Header *header) {                                                                                              \
        find_range(first, last, from, count, share, steps, ranges, done, header);                                         \
    }                                                                                                                     \
    KERNEL(bound_encode_##T, const T *from, i64 count, double bound, double steps, Header *header, u8 *slots, u32 *sizes,  \
           u64 *starts) {                                                                                                 \
        encode(first, last, from, count, bound, steps, header, slots, sizes, starts);                                     \
    }                                                                                                                     \
    KERNEL(bound_decode_##T, const Header *header, const u32 *sizes, const u8 *tiles, i64 available, i64 count, T *to,     \
           i64 op, u64 *status) {                                                                                         \
        decode(first, last, header, sizes, tiles, available, count, to, op, status);                                      \
    }

BOUND_KERNELS(f16)
BOUND_KERNELS(bf16)
BOUND_KERNELS(f32)
BOUND_KERNELS(f64)
