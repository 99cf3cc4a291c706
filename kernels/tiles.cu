// Tiles of variable size: joined back to back in a stream, and located in one.
// An encoder writes tile t's bytes at slots + starts[t] and their number to sizes[t].
#include "bytes.h"
#include "status.h"

// Lane l's offset is `total` plus the sizes of the lanes before it; `total` grows by the sizes of all.
DEVICE Lane<u64> place(const Lane<u64> &sizes, u64 &total) {
    const Lane<u64> ends = scan_inclusive(sizes);
    Lane<u64> offsets;
    FOR_LANES(l) offsets[l] = total + ends[l] - sizes[l];
    total += broadcast(ends, LANES - 1);
    return offsets;
}

DEVICE void store_offsets(u64 *offsets, i64 start, i64 tiles, const Lane<u64> &x) {
    FOR_LANES(l) {
        if (start + l < tiles) offsets[start + l] = x[l];
    }
}

// offsets[t] = the sum of the sizes before tile t; *total = the sum of all. Launched with one tile.
KERNEL(tiles_offsets, const u32 *sizes, i64 tiles, u64 *offsets, u64 *total) {
    FOR_TILES(t) {
        u64 sum = 0;
        for (i64 start = 0; start < tiles; start += LANES) {
            Lane<u64> size;
            FOR_LANES(l) size[l] = start + l < tiles ? sizes[start + l] : 0;
            store_offsets(offsets, start, tiles, place(size, sum));
        }
        ONE_LANE *total = sum;
    }
}

// A copy that is extended while the next one is adjacent in source and target.
struct Move {
    u8 *to;
    const u8 *from;
    i64 nbytes;

    MEMBER void finish() {
        if (to != from && nbytes) copy_bytes(to, from, nbytes);
        nbytes = 0;
    }

    MEMBER void add(u8 *next_to, const u8 *next_from, i64 more) {
        if (next_to != to + nbytes || next_from != from + nbytes) {
            finish();
            to = next_to;
            from = next_from;
        }
        nbytes += more;
    }
};

// Tile t's bytes go from slots + starts[t] to `to` + offsets[t]. On the host `to` may be `slots` itself: one worker
// copies all tiles in order, and no tile moves up.
KERNEL(tiles_join, const u8 *slots, const u64 *starts, const u32 *sizes, const u64 *offsets, u8 *to) {
    Move move = {to, slots, 0};
    FOR_TILES(t) move.add(to + offsets[t], slots + starts[t], sizes[t]);
    move.finish();
}

// Reads `tiles` sizes of 4 bytes from an untrusted stream: each a multiple of 4 from `smallest` to `largest`, together
// exactly `available` bytes. offsets[t] = the sum of the sizes before tile t, up to offsets[tiles]; all zero if the sizes are
// invalid, which sets *status. Launched with one tile.
KERNEL(tiles_open, const u8 *sizes_at, i64 tiles, i64 available, u64 *offsets, i64 smallest, i64 largest, u64 *status) {
    FOR_TILES(t) {
        u64 sum = 0;
        bool good = available >= 0;
        for (i64 start = 0; good && start < tiles; start += LANES) {
            Lane<u64> size;
            Lane<u32> bad;
            FOR_LANES(l) {
                const bool there = start + l < tiles;
                size[l] = there ? load_u32(sizes_at + 4 * (start + l)) : 0;
                bad[l] = there && ((i64)size[l] < smallest || (i64)size[l] > largest || size[l] % 4);
            }
            store_offsets(offsets, start, tiles, place(size, sum));
            good = !ballot(bad) && sum <= (u64)available;
        }
        good &= sum == (u64)available;
        ONE_LANE offsets[tiles] = good ? sum : 0;
        if (good) continue;
        report(status, STATUS_BAD_STREAM);
        Lane<u64> zero;
        FOR_LANES(l) zero[l] = 0;
        for (i64 start = 0; start < tiles; start += LANES) store_offsets(offsets, start, tiles, zero);
    }
}
