// Streams of tiles whose encoded size varies: sizes of all tiles first (u32 each), then their bytes, back to back.
//
// The offset of a tile depends on the sizes of all tiles before it. So an encoder writes tile t at
// slots + starts[t] and its size to sizes[t]; `tiles_join` (tiles.cu) then closes the gaps. On a GPU every tile has its
// own slot. On the host a range of tiles is processed in order, so its tiles are written without gaps, and with a single worker
// nothing is left to move.
//
// Each warp adds up the sizes before its tiles, because that takes less time than a kernel for all of them: the sizes are
// about a thousandth of the stream, and their loads do not depend on each other.
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

// The offsets of tiles, in increasing order.
struct TileOffsets {
    const u32 *sizes;
    i64 next = 0;
    u64 sum = 0;  // of the sizes before `next`

    MEMBER explicit TileOffsets(const u32 *sizes) : sizes(sizes) {}

    MEMBER u64 before(i64 t) {
        if (next < t) {
            Lane<u64> part;
            FOR_LANES(l) part[l] = 0;
            for (; next < t; next += LANES) FOR_LANES(l) part[l] += next + l < t ? sizes[next + l] : 0;
            next = t;
            sum += reduce_sum(part);
        }
        return sum;
    }
};

// Finds the tiles of an untrusted stream, in increasing order: `count` sizes, each a multiple of 4 from 4 to `largest`,
// together exactly `available` bytes.
struct TileReader {
    const u32 *sizes;
    i64 count, available;
    u32 largest;
    i64 next = 0;
    u64 sum = 0;
    bool good;

    MEMBER TileReader(const u32 *sizes, i64 count, i64 available, i64 largest)
        : sizes(sizes), count(count), available(available), largest((u32)largest), good(available >= 0) {}

    // Sets the offset and the size of tile t, which lie within the stream; returns false if a size up to it is invalid, or
    // if the sizes of all tiles do not add up.
    MEMBER bool find(i64 t, u64 &offset, u64 &size) {
        Lane<u64> part;
        Lane<u32> bad;
        FOR_LANES(l) {
            part[l] = 0;
            bad[l] = !good;
        }
        for (; next <= t; next += LANES) {
            FOR_LANES(l) {
                const u32 one = next + l <= t ? sizes[next + l] : 4;
                part[l] += next + l < t ? one : 0;
                bad[l] |= one - 4 > largest - 4 || one % 4;
            }
        }
        next = t + 1;
        offset = sum + reduce_sum(part);
        size = sizes[t];
        sum = offset + size;
        good = !ballot(bad) && (t == count - 1 ? sum == (u64)available : sum <= (u64)available);
        return good;
    }
};

DEVICE u32 zigzag(i32 x) { return (u32)x << 1 ^ (u32)(x >> 31); }
DEVICE u64 zigzag(i64 x) { return (u64)x << 1 ^ (u64)(x >> 63); }
DEVICE u32 unzigzag(u32 x) { return x >> 1 ^ (0 - (x & 1)); }
DEVICE u64 unzigzag(u64 x) { return x >> 1 ^ (0 - (x & 1)); }
