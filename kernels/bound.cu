// Error-bounded: values become multiples of a step, in blocks of 32, each packed at the width that it needs.
//
// Stream: the step (f64) and the bound (f64), then a stream of tiles (tiles.h). A tile is 32 blocks: 32 bytes that say how each is
// packed, then their words. Every value is decoded by the encoder too: a block with one that would break the bound (as
// seen in the caller's precision), or that is not finite, is kept exactly.
#include "numbers.h"
#include "reduce.h"
#include "tiles.h"

constexpr int BLOCKS = 32;
constexpr int TILE = BLOCKS * LANES;

// A block's byte: the width of its values in bits (0..31), with DELTA where each value is told as the difference from the one
// before; or one of the two that keep all bits.
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
// Blocks this wide or wider are kept exactly; 32 is also what a value that breaks the bound counts as.
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

// The largest F below x (x positive): an error that rounds to it is an error of at most x.
DEVICE float next_below(float x) { return x > 0 ? float_of_bits(bits_of_float(x) - 1) : x; }
DEVICE double next_below(double x) { return x > 0 ? float_of_bits(bits_of_float(x) - 1) : x; }

template <class F>
struct Quantiser {
    F step, inverse, limit;

    // `bound` may round up on its way to F: going one down undoes that.
    MEMBER explicit Quantiser(const Header &header)
        : step((F)header.step), inverse((F)1 / (F)header.step), limit(next_below((F)header.bound)) {
        if ((double)limit >= header.bound) limit = next_below(limit);
    }
};

// Quantises 32 values. Where one would not meet the bound when decoded, `bad` is all ones, else zero.
template <class T, class F>
DEVICE void quantise(const Lane<F> &value, const Quantiser<F> &by, Lane<u32> &q, Lane<u32> &bad) {
    FOR_LANES(l) {
        const F scaled = value[l] * by.inverse;
        const bool fits = magnitude(scaled) < (F)(1 << 30);
        const i32 nearest = (i32)((fits ? scaled : (F)0) + (scaled < 0 ? (F)-0.5 : (F)0.5));
        const F back = widen(narrow<T>(by.step * (F)nearest));
        q[l] = (u32)nearest;
        bad[l] = fits & (magnitude(back - value[l]) <= by.limit) ? 0 : ~0u;
    }
}

// Packs the values, or their differences (the first from `before`, the value in front of the block), whichever are narrower,
// as bit planes. Returns the block's byte; RAW_BLOCK, and nothing packed, where that is not less than `most` wide.
DEVICE u32 pack_block(const Lane<u32> &q, const Lane<u32> &bad, u32 before, u32 most, u32 *out) {
    Lane<u32> plain, delta;
    const Lane<u32> previous = shift_in(before, q);
    FOR_LANES(l) {
        plain[l] = zigzag((i32)q[l]) | bad[l];
        delta[l] = zigzag((i32)(q[l] - previous[l])) | bad[l];
    }
    const u32 plain_width = 32 - leading_zeros(reduce_or(plain));
    const u32 delta_width = 32 - leading_zeros(reduce_or(delta));
    const bool differences = delta_width < plain_width;
    const u32 width = differences ? delta_width : plain_width;
    if (width >= most) return RAW_BLOCK;
    store_planes(differences ? delta : plain, width, out);
    return differences ? width | DELTA : width;
}

DEVICE u32 block_words(u32 byte, u32 raw, u32 constant) {
    return byte == RAW_BLOCK ? raw : byte == CONSTANT_BLOCK ? constant : byte & ~DELTA;
}

// Keeps all bits of a block: once, if its values are all the same.
template <class T>
DEVICE u32 keep_block(const T *from, i64 start, i64 count, u32 *out) {
    typedef typename Bits<T>::type B;
    const B *bits = (const B *)from;
    B *to = (B *)out;
    Lane<u32> other;
    FOR_LANES(l) other[l] = start + l < count && bits[start + l] != bits[start];
    if (reduce_or(other) == 0) {
        ONE_LANE {
            out[0] = 0;
            to[0] = bits[start];
        }
        return CONSTANT_BLOCK;
    }
    FOR_LANES(l) to[l] = start + l < count ? bits[start + l] : (B)0;
    return RAW_BLOCK;
}

template <class T, class F>
DEVICE void load_lanes(const T *from, i64 start, i64 count, Lane<F> &value) {
    if (start + LANES <= count) {
        FOR_LANES(l) value[l] = widen(from[start + l]);
    } else {
        FOR_LANES(l) value[l] = start + l < count ? (F)widen(from[start + l]) : (F)0;
    }
}

template <class T>
DEVICE u32 encode_tile(const T *from, i64 start, i64 count, const Quantiser<typename Wide<T>::type> &by, u8 *out) {
    u32 *words = (u32 *)(out + BLOCKS);
    u32 before = 0;
    for (int b = 0; b < BLOCKS; ++b) {
        const i64 at = start + b * LANES;
        u32 byte = 0;
        if (at < count) {
            Lane<typename Wide<T>::type> value;
            Lane<u32> q, bad;
            load_lanes(from, at, count, value);
            quantise<T>(value, by, q, bad);
            byte = pack_block(q, bad, before, widest<T>(), words);
            if (byte == RAW_BLOCK)
                byte = keep_block(from, at, count, words);
            else
                before = broadcast(q, LANES - 1);
        }
        ONE_LANE out[b] = (u8)byte;
        words += block_words(byte, raw_words<T>(), constant_words<T>());
    }
    return (u32)((u8 *)words - out);
}

template <class T>
DEVICE void encode(i64 first, i64 last, const T *from, i64 count, const Header *header, u8 *slots, u32 *sizes, u64 *starts) {
    const Quantiser<typename Wide<T>::type> by(*header);
    TileWriter writer(slots, slot_bytes<T>(), first, sizes, starts);
    FOR_TILES(t) {
        u8 *out = writer.begin(t);
        writer.end(t, encode_tile(from, t * TILE, count, by, out));
    }
}

// `before` is the value in front of the block, in steps, and becomes the block's last one; blocks kept exactly do not count.
template <class T>
DEVICE void decode_block(u32 byte, const u32 *words, typename Wide<T>::type step, u32 &before, T *to, i64 start, i64 count, i64 op) {
    typedef typename Wide<T>::type F;
    if (byte >= CONSTANT_BLOCK) {
        const T *kept = (const T *)words;
        Lane<T> value[1];
        FOR_LANES(l) value[0][l] = kept[byte == RAW_BLOCK ? l : 0];
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
    FOR_LANES(l) value[0][l] = step * (F)(i32)q[l];
    store_lanes(to, start, count, value, op);
}

// Decodes one tile of `size` bytes, unless its blocks do not add up to that.
template <class T>
DEVICE bool decode_tile(const u8 *in, u64 size, typename Wide<T>::type step, T *to, i64 start, i64 count, i64 op) {
    Lane<u32> byte, words, bad;
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
        decode_block(broadcast(byte, b), block, step, before, to, start + b * LANES, count, op);
    }
    return true;
}

template <class T>
DEVICE void decode(i64 first, i64 last, const Header *header, const u8 *tiles, const u64 *offsets, i64 count, T *to, i64 op,
                   u64 *status) {
    const typename Wide<T>::type step = (typename Wide<T>::type)header->step;
    if (*status) return;
    FOR_TILES(t) {
        if (!decode_tile(tiles + offsets[t], offsets[t + 1] - offsets[t], step, to, t * TILE, count, op))
            report(status, STATUS_BAD_STREAM);
    }
}

// The least and the greatest finite value of a tile; where there is none, an empty range.
template <class T>
DEVICE void tile_range(const T *from, i64 start, i64 count, double *range) {
    typedef typename Wide<T>::type F;
    const F infinite = (F)1 / (F)0.0;
    Lane<F> greatest, turned;
    FOR_LANES(l) greatest[l] = turned[l] = -infinite;
    for (i64 at = start; at < start + TILE && at < count; at += LANES) {
        FOR_LANES(l) {
            const F x = at + l < count ? (F)widen(from[at + l]) : infinite;
            const bool finite = magnitude(x) < infinite;
            greatest[l] = finite & (x > greatest[l]) ? x : greatest[l];
            turned[l] = finite & (-x > turned[l]) ? -x : turned[l];
        }
    }
    const double high = (double)reduce_max(greatest), low = -(double)reduce_max(turned);
    ONE_LANE {
        range[0] = low;
        range[1] = high;
    }
}

// Turns the bound that was asked for into the stream's header: `share` of the range of all tiles, or that number itself where there are
// none. A step is `steps` times the bound, less a little that leaves room for roundings.
DEVICE void make_header(const double *ranges, i64 tiles, double share, double steps, Header *header) {
    double low = 0, high = 1;
    if (tiles) {
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
        high = reduce_max(greatest);
        low = -reduce_max(turned);
    }
    const double bound = high > low ? share * (high - low) : 0;
    ONE_LANE {
        header->bound = bound;
        header->step = steps * bound * (1 - 1.0 / 512);
    }
}

KERNEL(bound_header, const double *ranges, i64 tiles, double share, double steps, Header *header) {
    FOR_TILES(t) make_header(ranges, tiles, share, steps, header);
}

#define BOUND_KERNELS(T)                                                                                                  \
    KERNEL(bound_range_##T, const T *from, i64 count, double *ranges) {                                                    \
        FOR_TILES(t) tile_range(from, t * TILE, count, ranges + 2 * t);                                                   \
    }                                                                                                                     \
    KERNEL(bound_encode_##T, const T *from, i64 count, const Header *header, u8 *slots, u32 *sizes, u64 *starts) {         \
        encode(first, last, from, count, header, slots, sizes, starts);                                                   \
    }                                                                                                                     \
    KERNEL(bound_decode_##T, const Header *header, const u8 *tiles, const u64 *offsets, i64 count, T *to, i64 op,          \
           u64 *status) {                                                                                                 \
        decode(first, last, header, tiles, offsets, count, to, op, status);                                               \
    }

BOUND_KERNELS(f16)
BOUND_KERNELS(bf16)
BOUND_KERNELS(f32)
BOUND_KERNELS(f64)
