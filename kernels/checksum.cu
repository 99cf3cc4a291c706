// Adler-32, as in zlib: 1 + the sum of the bytes, and the sum of all prefix sums, both modulo 65521.
// A tile is 4096 bytes: the largest power of two whose sums fit 32 bits, so that tiles need no modulo.
#include "simt.h"

constexpr i64 TILE = 4096;
constexpr int ROWS = 16;
constexpr u64 MODULUS = 65521;

// `unweighted` is the sum of the bytes; in `weighted` each byte counts once per byte from it to the end of the range.
struct Sums {
    u32 unweighted, weighted;
};

// Adds 16 rows, the most that 16-bit sums can hold, so that most of the work is done in 16-bit words.
DEVICE void add_rows(Lane<u32> &unweighted, Lane<u32> &passed, const u8 *rows) {
    FOR_LANES(l) {
        u16 sum = 0, sums = 0;
        UNROLL for (int r = 0; r < ROWS; ++r) {
            sum = (u16)(sum + rows[r * LANES + l]);
            sums = (u16)(sums + sum);
        }
        passed[l] += ROWS * unweighted[l] + sums;
        unweighted[l] += sum;
    }
}

DEVICE void add_row(Lane<u32> &unweighted, Lane<u32> &passed, const u8 *row, i64 length) {
    FOR_LANES(l) {
        unweighted[l] += l < length ? row[l] : 0;
        passed[l] += unweighted[l];
    }
}

DEVICE Sums sums_of(const u8 *bytes, i64 length) {
    Lane<u32> unweighted, passed;
    FOR_LANES(l) unweighted[l] = passed[l] = 0;
    i64 done = 0;
    for (; done + ROWS * LANES <= length; done += ROWS * LANES) add_rows(unweighted, passed, bytes + done);
    for (; done < length; done += LANES) add_row(unweighted, passed, bytes + done, length - done);

    Lane<u32> column;
    FOR_LANES(l) column[l] = unweighted[l] * (u32)l;
    const u32 all = reduce_sum(unweighted);
    const u32 missing = (u32)(-length & (LANES - 1));  // the last row was counted as a full one
    return {all, reduce_sum(passed) * LANES - reduce_sum(column) - missing * all};
}

// Tile t's sums go to partials[t]: `unweighted` in the low half, `weighted` in the high half.
KERNEL(checksum_tiles, const u8 *bytes, i64 nbytes, u64 *partials) {
    FOR_TILES(t) {
        const i64 start = t * TILE;
        const Sums sums = sums_of(bytes + start, nbytes - start < TILE ? nbytes - start : TILE);
        ONE_LANE partials[t] = (u64)sums.weighted << 32 | sums.unweighted;
    }
}

// Joins the partial sums of all tiles of `nbytes` bytes into *checksum. Launched with one tile.
KERNEL(checksum_join, const u64 *partials, i64 nbytes, u32 *checksum) {
    const i64 tiles = (nbytes + TILE - 1) / TILE;
    FOR_TILES(t) {
        Lane<u64> low, high;
        FOR_LANES(l) {
            low[l] = high[l] = 0;
            for (i64 tile = l; tile < tiles; tile += LANES) {
                const i64 end = (tile + 1) * TILE;
                const u64 behind = end < nbytes ? (u64)(nbytes - end) % MODULUS : 0;
                const u64 unweighted = partials[tile] & 0xffffffffu, weighted = partials[tile] >> 32;
                low[l] = (low[l] + unweighted) % MODULUS;
                high[l] = (high[l] + weighted + unweighted * behind) % MODULUS;
            }
        }
        const u64 a = (reduce_sum(low) + 1) % MODULUS;
        const u64 b = (reduce_sum(high) + (u64)nbytes % MODULUS) % MODULUS;
        ONE_LANE *checksum = (u32)(b << 16 | a);
    }
}
