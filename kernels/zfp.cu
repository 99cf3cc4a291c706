// ZFP, one-dimensional, fixed rate: byte for byte libzfp's stream without a header.
// A block is 4 values and `block_bits` long. A tile is 32 blocks, one per lane: `block_bits` words of 32 bits.
#include "numbers.h"
#include "reduce.h"
#include "status.h"
#include "zfp_tables.h"

constexpr int TILE = ZFP_BLOCK * LANES;

template <class F>
struct Format;

template <>
struct Format<float> {
    typedef i32 Int;
    typedef u32 UInt;
    static constexpr int PLANES = 32, MANTISSA = 23, EXPONENT = 8, BIAS = 127, LONGEST_BLOCK = 128;
    static constexpr u32 NEGABINARY = 0xaaaaaaaau;
};

template <>
struct Format<double> {
    typedef i64 Int;
    typedef u64 UInt;
    static constexpr int PLANES = 64, MANTISSA = 52, EXPONENT = 11, BIAS = 1023, LONGEST_BLOCK = 256;
    static constexpr u64 NEGABINARY = 0xaaaaaaaaaaaaaaaaull;
};

// 2 to the `exponent`, exact down to the subnormals; zero below them.
template <class F>
DEVICE F power_of_two(int exponent) {
    typedef typename Format<F>::UInt UInt;
    constexpr int M = Format<F>::MANTISSA;
    const int field = exponent + Format<F>::BIAS;
    const int place = field + M - 1;
    const UInt subnormal = place >= 0 ? (UInt)1 << (place & (Format<F>::PLANES - 1)) : 0;
    return float_of_bits(field > 0 ? (UInt)field << M : subnormal);
}

template <class Int>
DEVICE void forward_lift(Int &x, Int &y, Int &z, Int &w) {
    x += w, x >>= 1, w -= x;
    z += y, z >>= 1, y -= z;
    x += z, x >>= 1, z -= x;
    w += y, w >>= 1, y -= w;
    w += y >> 1, y -= w >> 1;
}

template <class Int>
DEVICE void inverse_lift(Int &x, Int &y, Int &z, Int &w) {
    y += w >> 1, w -= y >> 1;
    y += w, w += w, w -= y;
    z += x, x += x, x -= z;
    y += z, z += z, z -= y;
    w += x, x += x, x -= w;
}

// Fills value[0..3] of every lane with its block; a partial block gets libzfp's padding.
template <class T, class F>
DEVICE void load_blocks(const T *from, i64 start, i64 count, Lane<F> (&value)[ZFP_BLOCK]) {
    if (start + TILE <= count && in_packs<ZFP_BLOCK>(from)) {
        FOR_LANES(l) {
            const Pack<T, ZFP_BLOCK> pack = *(const Pack<T, ZFP_BLOCK> *)(from + start + ZFP_BLOCK * l);
            UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) value[j][l] = widen(pack.x[j]);
        }
        return;
    }
    if (start + TILE <= count) {
        FOR_LANES(l) {
            UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) value[j][l] = widen(from[start + ZFP_BLOCK * l + j]);
        }
        return;
    }
    FOR_LANES(l) {
        const i64 at = start + ZFP_BLOCK * l;
        value[0][l] = at < count ? (F)widen(from[at]) : (F)0;
        value[1][l] = at + 1 < count ? (F)widen(from[at + 1]) : value[0][l];
        value[2][l] = at + 2 < count ? (F)widen(from[at + 2]) : value[1][l];
        value[3][l] = at + 3 < count ? (F)widen(from[at + 3]) : value[0][l];
    }
}

// Per-lane state of a block: the integers to code, the bits so far, and their number. A block that fits a Word
// is kept in one; a longer one is flushed through it.
template <class F, class Word>
struct Blocks {
    static constexpr u32 WORD_BITS = 8 * sizeof(Word);
    Lane<typename Format<F>::UInt> integer[ZFP_BLOCK];
    Lane<Word> bits;
    Lane<u32> length;
};

// Scales a block to integers, decorrelates them and starts its code with the exponent. A block of zeros needs no more, and neither
// does one so small that its scale would overflow (libzfp's result is garbage there). Returns whether all values are finite.
template <class F, class Word>
DEVICE bool quantise(Lane<F> (&value)[ZFP_BLOCK], u32 block_bits, Blocks<F, Word> &blocks) {
    typedef typename Format<F>::Int Int;
    typedef typename Format<F>::UInt UInt;
    constexpr int M = Format<F>::MANTISSA, P = Format<F>::PLANES;
    constexpr int SMALLEST = P - 3, LARGEST = (1 << Format<F>::EXPONENT) - 2;
    constexpr UInt MAGNITUDE = ~(UInt)0 >> 1;
    Lane<u32> infinite;
    FOR_LANES(l) {
        UInt largest = 0;
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) {
            const UInt magnitude = bits_of_float(value[j][l]) & MAGNITUDE;
            largest = magnitude > largest ? magnitude : largest;
        }
        const int field = (int)(largest >> M);
        infinite[l] = field > LARGEST;
        const bool coded = field >= SMALLEST && field <= LARGEST;
        const F scale = float_of_bits((UInt)(coded ? P - 3 + 2 * Format<F>::BIAS - field : 0) << M);
        Int x[ZFP_BLOCK];
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) x[j] = (Int)(scale * (coded ? value[j][l] : (F)0));
        forward_lift(x[0], x[1], x[2], x[3]);
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j)
            blocks.integer[j][l] = ((UInt)x[j] + Format<F>::NEGABINARY) ^ Format<F>::NEGABINARY;
        blocks.bits[l] = coded ? 2 * (Word)(field + 1) + 1 : 0;
        blocks.length[l] = coded ? Format<F>::EXPONENT + 1 : block_bits;
    }
    return reduce_or(infinite) == 0;
}

// ORs the low `length` bits of `bits` into the stream of words at bit `at`.
DEVICE void put_bits(u32 *words, u32 at, u64 bits, u32 length) {
    for (u32 done = 0; done < length;) {
        const u32 place = at & 31;
        warp_atomic_or(words + (at >> 5), (u32)(bits >> done) << place);
        done += 32 - place;
        at += 32 - place;
    }
}

// Codes the bit planes, two at a time, until every block is full. Bits that exceed a Word are flushed.
template <bool FITS, class F, class Word>
DEVICE void encode_planes(Blocks<F, Word> &blocks, u32 block_bits, u32 *words) {
    constexpr u32 MASK = Blocks<F, Word>::WORD_BITS - 1;
    Lane<u32> row, out;
    FOR_LANES(l) row[l] = out[l] = 0;
    for (int k = Format<F>::PLANES - 2; k >= 0; k -= 2) {
        Lane<u32> open;
        FOR_LANES(l) {
            u32 pair = 0;
            UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) pair |= ((u32)(blocks.integer[j][l] >> k) & 3) << 2 * j;
            const u32 entry = ZFP_ENCODE.entry[row[l] + pair];
            const bool more = out[l] + blocks.length[l] < block_bits;
            blocks.bits[l] |= (Word)(more ? entry & 0xffff : 0) << (blocks.length[l] & MASK);
            blocks.length[l] += more ? entry >> 16 & 15 : 0;
            row[l] = entry >> 20;
            open[l] = out[l] + blocks.length[l] < block_bits;
        }
        if (!FITS) {
            FOR_LANES_IN_TURN(l) {
                if (blocks.length[l] >= 32 && open[l]) {
                    put_bits(words, l * block_bits + out[l], (u32)blocks.bits[l], 32);
                    blocks.bits[l] >>= 32 & MASK, blocks.length[l] -= 32, out[l] += 32;
                }
            }
        }
        if (!reduce_or(open)) break;
    }
    if (block_bits == 32) {
        FOR_LANES(l) words[l] = (u32)blocks.bits[l];
        return;
    }
    FOR_LANES_IN_TURN(l) {
        const u32 room = block_bits - out[l];
        const u32 length = blocks.length[l] < room ? blocks.length[l] : room;
        const u64 bits = length < 64 ? blocks.bits[l] & (((u64)1 << length) - 1) : blocks.bits[l];
        put_bits(words, l * block_bits + out[l], bits, bits ? length : 0);  // a block of zeros is longer than `bits`
    }
}

// Codes one tile into zeroed words. Returns whether all values are finite.
template <bool FITS, class Word, class T>
DEVICE bool encode_tile(const T *from, i64 start, i64 count, u32 block_bits, u32 *words) {
    typedef typename Wide<T>::type F;
    Lane<F> value[ZFP_BLOCK];
    Blocks<F, Word> blocks;
    load_blocks(from, start, count, value);
    const bool finite = quantise(value, block_bits, blocks);
    encode_planes<FITS>(blocks, block_bits, words);
    return finite;
}

template <class T>
DEVICE void encode(i64 first, i64 last, const T *from, i64 count, u32 *to, u32 block_bits, u64 *status) {
    const i64 tiles = (count + TILE - 1) / TILE;
    const i64 stream_words = ((count + 3) / 4 * block_bits + 63) / 64 * 2;  // libzfp pads to words of 64 bits
    bool finite = true;
    WARP_SHARED(u32, words, Format<typename Wide<T>::type>::LONGEST_BLOCK + 1);
    FOR_TILES(t) {
        for (u32 w = 0; w <= block_bits; w += LANES) FOR_LANES(l) if (w + l <= block_bits) words[w + l] = 0;
        warp_sync();
        if (block_bits <= 32)
            finite &= encode_tile<true, u32>(from, t * TILE, count, block_bits, words);
        else if (block_bits <= 64)
            finite &= encode_tile<true, u64>(from, t * TILE, count, block_bits, words);
        else
            finite &= encode_tile<false, u64>(from, t * TILE, count, block_bits, words);
        warp_sync();
        const i64 tile_words = t == tiles - 1 ? stream_words - t * block_bits : block_bits;
        for (u32 w = 0; w < tile_words; w += LANES) FOR_LANES(l) if (w + l < tile_words) to[t * block_bits + w + l] = words[w + l];
        warp_sync();
    }
    if (!finite) report(status, STATUS_NOT_FINITE);
}

// Copies the tile's words from the stream, and a few more because reads may go past the end.
DEVICE void load_words(const u32 *from, i64 stream_words, i64 start, u32 block_bits, u32 *words) {
    for (u32 w = 0; w < block_bits + 2; w += LANES)
        FOR_LANES(l) if (w + l < block_bits + 2) words[w + l] = start + w + l < stream_words ? from[start + w + l] : 0;
    warp_sync();
}

DEVICE u64 bits_at(const u32 *words, u32 at) {
    const u32 *word = words + (at >> 5);
    const u64 low = word[0] | (u64)word[1] << 32;
    return at & 31 ? low >> (at & 31) | (u64)word[2] << (64 - (at & 31)) : low;
}

// Decodes bit planes until every block's bits are used up. A block that fits a Word is read at once, a longer one incrementally.
template <bool FITS, class F, class Word>
DEVICE void decode_planes(Blocks<F, Word> &blocks, u32 block_bits, const u32 *words) {
    typedef typename Format<F>::UInt UInt;
    const u32 *const table = ZFP_DECODE->entry;  // all rows as one table, which compiles to a gather
    Lane<u32> row;
    FOR_LANES(l) {
        row[l] = 0;
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) blocks.integer[j][l] = 0;
    }
    for (int k = Format<F>::PLANES - 1; k >= 0; --k) {
        Lane<u32> open;
        FOR_LANES(l) {
            const u32 used = blocks.length[l], rest = block_bits - used;
            const u32 left = rest < ZFP_LONGEST_PLANE ? rest : ZFP_LONGEST_PLANE;
            const u32 at = l * block_bits + used;
            const u32 ahead = FITS ? (u32)(blocks.bits[l] >> (used & (Blocks<F, Word>::WORD_BITS - 1)))
                                   : (u32)((words[at >> 5] | (u64)words[(at >> 5) + 1] << 32) >> (at & 31));
            const u32 entry = table[left * (ZFP_STATES * ZFP_WINDOW) + row[l] + (ahead & (ZFP_WINDOW - 1))];
            UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) blocks.integer[j][l] |= (UInt)(entry >> j & 1) << k;
            blocks.length[l] += entry >> 4 & 15;
            row[l] = entry >> 8;
            open[l] = blocks.length[l] < block_bits;
        }
        if (!reduce_or(open)) break;
    }
}

template <class F, class Word>
DEVICE void dequantise(const Blocks<F, Word> &blocks, const Lane<F> &scale, Lane<F> (&value)[ZFP_BLOCK]) {
    typedef typename Format<F>::Int Int;
    FOR_LANES(l) {
        Int x[ZFP_BLOCK];
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j)
            x[j] = (Int)((blocks.integer[j][l] ^ Format<F>::NEGABINARY) - Format<F>::NEGABINARY);
        inverse_lift(x[0], x[1], x[2], x[3]);
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) value[j][l] = scale[l] * (F)x[j];
    }
}

// Reads the header before the bit planes. A block that starts with a zero bit is all zeros and ends there.
template <class F, class Word>
DEVICE Lane<F> read_exponents(Blocks<F, Word> &blocks, u32 block_bits, const u32 *words) {
    constexpr int E = Format<F>::EXPONENT;
    Lane<F> scale;
    if (block_bits == 32) {
        FOR_LANES(l) blocks.bits[l] = words[l];
    } else {
        FOR_LANES(l) blocks.bits[l] = (Word)bits_at(words, l * block_bits);
    }
    FOR_LANES(l) {
        const bool coded = blocks.bits[l] & 1;
        const int exponent = (int)(blocks.bits[l] >> 1 & ((1 << E) - 1)) - Format<F>::BIAS;
        scale[l] = coded ? power_of_two<F>(exponent - (Format<F>::PLANES - 2)) : (F)0;
        blocks.length[l] = coded ? E + 1 : block_bits;
    }
    return scale;
}

template <bool FITS, class Word, class F>
DEVICE void decode_tile(const u32 *words, u32 block_bits, Lane<F> (&value)[ZFP_BLOCK]) {
    Blocks<F, Word> blocks;
    const Lane<F> scale = read_exponents(blocks, block_bits, words);
    decode_planes<FITS>(blocks, block_bits, words);
    dequantise(blocks, scale, value);
}

template <class T>
DEVICE void decode(i64 first, i64 last, const u32 *from, i64 count, T *to, u32 block_bits, i64 op) {
    typedef typename Wide<T>::type F;
    const i64 stream_words = ((count + 3) / 4 * block_bits + 63) / 64 * 2;
    WARP_SHARED(u32, words, Format<F>::LONGEST_BLOCK + 2);
    FOR_TILES(t) {
        Lane<F> value[ZFP_BLOCK];
        load_words(from, stream_words, t * block_bits, block_bits, words);
        if (block_bits <= 32)
            decode_tile<true, u32>(words, block_bits, value);
        else if (block_bits <= 64)
            decode_tile<true, u64>(words, block_bits, value);
        else
            decode_tile<false, u64>(words, block_bits, value);
        UNROLL for (int j = 0; j < ZFP_BLOCK; ++j) keep_finite<T>(value[j]);
        store_lanes(to, t * TILE, count, value, op);
        warp_sync();
    }
}

#define ZFP_KERNELS(T)                                                                                            \
    KERNEL(zfp_encode_##T, const T *from, i64 count, u32 *to, i64 block_bits, u64 *status) {                       \
        encode(first, last, from, count, to, (u32)block_bits, status);                                            \
    }                                                                                                             \
    KERNEL(zfp_decode_##T, const u32 *from, i64 count, T *to, i64 block_bits, i64 op) {                            \
        decode(first, last, from, count, to, (u32)block_bits, op);                                                \
    }

ZFP_KERNELS(f16)
ZFP_KERNELS(bf16)
ZFP_KERNELS(f32)
ZFP_KERNELS(f64)
