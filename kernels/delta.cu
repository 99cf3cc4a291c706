// Lossless differences from a base that sender and receiver hold.
//
// The bits of each value, as an integer, minus those of the base. Neighbours change by similar amounts, so blocks of 32
// differences are packed at the width that they need; an unchanged block costs only its byte.
//
// Stream: a stream of tiles (tiles.h). A tile is 32 blocks: 32 bytes with the width of each in bits, then their planes.
#include "numbers.h"
#include "tiles.h"

constexpr int BLOCKS = 32;
constexpr int TILE = BLOCKS * LANES;

// Zigzag code of a difference, whose upper bits are zero if it is small, in words of 32 bits.
template <class U>
struct Change;
template <>
struct Change<u16> {
    typedef u32 Code;
    static constexpr int WORDS = 1;
    static MEMBER u32 code(u16 difference) { return zigzag((i32)(i16)difference); }
};
template <>
struct Change<u32> {
    typedef u32 Code;
    static constexpr int WORDS = 1;
    static MEMBER u32 code(u32 difference) { return zigzag((i32)difference); }
};
template <>
struct Change<u64> {
    typedef u64 Code;
    static constexpr int WORDS = 2;
    static MEMBER u64 code(u64 difference) { return zigzag((i64)difference); }
};

template <class U>
DEVICE constexpr u32 widest() {
    return 8 * sizeof(U);
}
template <class U>
DEVICE constexpr i64 slot_bytes() {
    return BLOCKS + TILE * sizeof(U);
}

DEVICE u32 word_of(u32 code, int) { return code; }
DEVICE u32 word_of(u64 code, int i) { return (u32)(code >> 32 * i); }
DEVICE u32 planes_of(u32 width, int word) {
    const u32 below = 32 * (u32)word;
    return width <= below ? 0 : width - below < 32 ? width - below : 32;
}

template <class U>
DEVICE void changes(const U *from, const U *base, i64 start, i64 count, Lane<typename Change<U>::Code> &code) {
    if (start + LANES <= count) {
        FOR_LANES(l) code[l] = Change<U>::code((U)(from[start + l] - base[start + l]));
    } else {
        FOR_LANES(l) code[l] = start + l < count ? Change<U>::code((U)(from[start + l] - base[start + l])) : 0;
    }
}

template <class U>
DEVICE u32 encode_tile(const U *from, const U *base, i64 start, i64 count, u8 *out) {
    constexpr int N = Change<U>::WORDS;
    u32 *words = (u32 *)(out + BLOCKS);
    for (int b = 0; b < BLOCKS; ++b) {
        Lane<typename Change<U>::Code> code;
        changes(from, base, start + b * LANES, count, code);
        Lane<u32> word[N];
        u32 width = 0;
        UNROLL for (int i = 0; i < N; ++i) {
            FOR_LANES(l) word[i][l] = word_of(code[l], i);
            const u32 used = reduce_or(word[i]);
            if (used) width = 32 * (u32)i + 32 - leading_zeros(used);
        }
        ONE_LANE out[b] = (u8)width;
        UNROLL for (int i = 0; i < N; ++i) {
            store_planes(word[i], planes_of(width, i), words);
            words += planes_of(width, i);
        }
    }
    return (u32)((u8 *)words - out);
}

template <class U>
DEVICE void encode(i64 first, i64 last, const U *from, const U *base, i64 count, u8 *slots, u32 *sizes, u64 *starts) {
    TileWriter writer(slots, slot_bytes<U>(), first, sizes, starts);
    FOR_TILES(t) {
        u8 *out = writer.begin(t);
        writer.end(t, encode_tile(from, base, t * TILE, count, out));
    }
}

template <class U>
DEVICE void decode_block(u32 width, const u32 *words, const U *base, U *to, i64 start, i64 count) {
    typedef typename Change<U>::Code Code;
    Lane<Code> code;
    FOR_LANES(l) code[l] = 0;
    UNROLL for (int i = 0; i < Change<U>::WORDS; ++i) {
        const u32 planes = planes_of(width, i);
        Lane<u32> x;
        FOR_LANES(l) x[l] = (u32)l < planes ? words[l] : 0;
        transpose_bits(x);
        FOR_LANES(l) code[l] |= (Code)x[l] << 32 * i;
        words += planes;
    }
    if (start + LANES <= count) {
        FOR_LANES(l) to[start + l] = (U)(base[start + l] + (U)unzigzag(code[l]));
    } else {
        FOR_LANES(l) if (start + l < count) to[start + l] = (U)(base[start + l] + (U)unzigzag(code[l]));
    }
}

// Decodes one tile; fails if its blocks do not add up to `size` bytes.
template <class U>
DEVICE bool decode_tile(const u8 *in, u64 size, const U *base, U *to, i64 start, i64 count) {
    Lane<u32> width, bad;
    if (size < BLOCKS) return false;
    FOR_LANES(l) {
        width[l] = in[l];
        bad[l] = width[l] > widest<U>();
    }
    if (reduce_or(bad) || BLOCKS + 4 * (u64)reduce_sum(width) != size) return false;
    const Lane<u32> place = scan_exclusive(width);
    for (int b = 0; b < BLOCKS && start + b * LANES < count; ++b) {
        const u32 *words = (const u32 *)(in + BLOCKS) + broadcast(place, b);
        decode_block(broadcast(width, b), words, base, to, start + b * LANES, count);
    }
    return true;
}

template <class U>
DEVICE void decode(i64 first, i64 last, const u32 *sizes, const u8 *tiles, i64 available, const U *base, i64 count, U *to,
                   u64 *status) {
    TileReader reader(sizes, (count + TILE - 1) / TILE, available, slot_bytes<U>());
    FOR_TILES(t) {
        u64 at, size;
        if (!reader.find(t, at, size) || !decode_tile(tiles + at, size, base, to, t * TILE, count))
            report(status, STATUS_BAD_STREAM);
    }
}

#define DELTA_KERNELS(U)                                                                                              \
    KERNEL(delta_encode_##U, const U *from, const U *base, i64 count, u8 *slots, u32 *sizes, u64 *starts) {            \
        encode(first, last, from, base, count, slots, sizes, starts);                                                 \
    }                                                                                                                 \
    KERNEL(delta_decode_##U, const u32 *sizes, const u8 *tiles, i64 available, const U *base, i64 count, U *to,        \
           u64 *status) {                                                                                             \
        decode(first, last, sizes, tiles, available, base, count, to, status);                                        \
    }

DELTA_KERNELS(u16)
DELTA_KERNELS(u32)
DELTA_KERNELS(u64)
