// Joins tiles of variable size back to back in a stream.
// An encoder writes tile t's bytes at slots + starts[t] and their number to sizes[t].
#include "bytes.h"
#include "tiles.h"

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

// Tile t's bytes go from slots + starts[t] to `to` + the sizes before; *total = the sum of all sizes. Words behind the
// sizes, `padding` of them, become zero. On the host `to` may be `slots` itself: one worker copies all tiles in order, and
// no tile moves up.
KERNEL(tiles_join, const u8 *slots, const u64 *starts, u32 *sizes, i64 tiles, i64 padding, u8 *to, u64 *total) {
    Move move = {to, slots, 0};
    TileOffsets offsets(sizes);
    FOR_TILES(t) {
        const u64 offset = offsets.before(t);
        move.add(to + offset, slots + starts[t], sizes[t]);
        if (t == tiles - 1) {
            ONE_LANE {
                *total = offset + sizes[t];
                for (i64 i = 0; i < padding; ++i) sizes[tiles + i] = 0;
            }
        }
    }
    move.finish();
}
