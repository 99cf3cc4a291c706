// Adler-32, as in zlib: 1 + the sum of the bytes, and the sum of all such sums on the way, both modulo 65521.
// A tile is 4096 bytes: the most (as a power of two) whose sums fit 32 bits, so that tiles never divide.
#include "simt.h"

constexpr i64 TILE = 4096;
constexpr int ROWS = 16;
constexpr u64 MODULUS = 65521;

// A byte counts once in `plain`, and in `weighted` once for every byte from it to the end of the span, itself included.
struct Sums {
    u32 plain, weighted;
};

// Adds 16 rows: as many as 16-bit sums hold, so that most of the work is done in short words.
DEVICE void add_rows(Lane<u32> &plain, Lane<u32> &passed, const u8 *rows) {
    FOR_LANES(l) {
        u16 sum = 0, sums = 0;
        UNROLL for (int r = 0; r < ROWS; ++r) {
            sum = (u16)(sum + rows[r * LANES + l]);
            sums = (u16)(sums + sum);
        }
        passed[l] += ROWS * plain[l] + sums;
        plain[l] += sum;
    }
}

DEVICE void add_row(Lane<u32> &plain, Lane<u32> &passed, const u8 *row, i64 length) {
    FOR_LANES(l) {
        plain[l] += l < length ? row[l] : 0;
        passed[l] += plain[l];
    }
}

DEVICE Sums sums_of(const u8 *bytes, i64 length) {
    Lane<u32> plain, passed;
    FOR_LANES(l) plain[l] = passed[l] = 0;
    i64 done = 0;
    for (; done + ROWS * LANES <= length; done += ROWS * LANES) add_rows(plain, passed, bytes + done);
    for (; done < length; done += LANES) add_row(plain, passed, bytes + done, length - done);

    Lane<u32> column;
    FOR_LANES(l) column[l] = plain[l] * (u32)l;
    const u32 all = reduce_sum(plain);
    const u32 missing = (u32)(-length & (LANES - 1));  // the last row counted as if it were full
    return {all, reduce_sum(passed) * LANES - reduce_sum(column) - missing * all};
}

// Tile t's sums go to partials[t]: the plain one in the low half, the weighted one in the high half.
KERNEL(checksum_tiles, const u8 *bytes, i64 nbytes, u64 *partials) {
    FOR_TILES(t) {
        const i64 start = t * TILE;
        const Sums sums = sums_of(bytes + start, nbytes - start < TILE ? nbytes - start : TILE);
        ONE_LANE partials[t] = (u64)sums.weighted << 32 | sums.plain;
    }
}

// Joins the partial sums of all tiles of `nbytes` bytes into *checksum. There is one tile of work.
KERNEL(checksum_join, const u64 *partials, i64 nbytes, u32 *checksum) {
    const i64 tiles = (nbytes + TILE - 1) / TILE;
    FOR_TILES(t) {
        Lane<u64> low, high;
        FOR_LANES(l) {
            low[l] = high[l] = 0;
            for (i64 tile = l; tile < tiles; tile += LANES) {
                const i64 end = (tile + 1) * TILE;
                const u64 behind = end < nbytes ? (u64)(nbytes - end) % MODULUS : 0;
                const u64 plain = partials[tile] & 0xffffffffu, weighted = partials[tile] >> 32;
                low[l] = (low[l] + plain) % MODULUS;
                high[l] = (high[l] + weighted + plain * behind) % MODULUS;
            }
        }
        const u64 a = (reduce_sum(low) + 1) % MODULUS;
        const u64 b = (reduce_sum(high) + (u64)nbytes % MODULUS) % MODULUS;
        ONE_LANE *checksum = (u32)(b << 16 | a);
    }
}
