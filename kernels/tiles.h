// Streams of tiles whose encoded size varies: sizes of all tiles first (u32 each), then their bytes, back to back.
//
// The offset of a tile depends on the sizes of all tiles before it. So an encoder writes tile t at
// slots + starts[t] and its size to sizes[t]; `tiles_offsets` and `tiles_join` (tiles.cu) then close the gaps. On a GPU every tile has its
// own slot. On the host a range of tiles is processed in order, so its tiles are written without gaps, and with a single worker
// nothing is left to move.
#pragma once
#include "status.h"

struct TileWriter {
    u8 *slots, *next;
    i64 slot_bytes, ahead;
    u32 *sizes;
    u64 *starts;

    // The first `ahead` bytes of the slots are in use.
    MEMBER TileWriter(u8 *slots, i64 slot_bytes, i64 first, u32 *sizes, u64 *starts, i64 ahead = 0)
        : slots(slots), next(slots + ahead + first * slot_bytes), slot_bytes(slot_bytes), ahead(ahead), sizes(sizes), starts(starts) {}

    MEMBER u8 *begin(i64 t) {
#ifdef __CUDACC__
        next = slots + ahead + t * slot_bytes;
#endif
        starts[t] = (u64)(next - slots);
        return next;
    }

    MEMBER void end(i64 t, u32 size) {
        sizes[t] = size;
        next += size;
    }
};

DEVICE u32 zigzag(i32 x) { return (u32)x << 1 ^ (u32)(x >> 31); }
DEVICE u64 zigzag(i64 x) { return (u64)x << 1 ^ (u64)(x >> 63); }
DEVICE u32 unzigzag(u32 x) { return x >> 1 ^ (0 - (x & 1)); }
DEVICE u64 unzigzag(u64 x) { return x >> 1 ^ (0 - (x & 1)); }
