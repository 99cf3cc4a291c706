// Frames on a GPU: writes the header of an encoded chunk, and checks a received one (codec/frame.py has the layout).
//
// Every warp adds the sums of its tiles of the payload to those in `state`; the last one completes the checksum. So one
// kernel does it all, and the host waits once, for a size and a status that it can read without a copy.
#include "status.h"

constexpr i64 TILE = 4096;  // bytes: sums of positions and bytes fit 32 bits
constexpr int HEADER_BYTES = 48;
constexpr u64 MODULUS = 65521;

// Zero between two frames. A codec's kernels write size and status.
struct FrameState {
    u64 unweighted, weighted, tiles, size, status;
};

// The report: what the host reads when the kernel has completed.
struct Report {
    u64 size, status;
};

struct Sums {
    u32 unweighted, positions;  // the sum of the bytes, and of the bytes times their positions in the tile
};

DEVICE Sums sums_of(const u8 *bytes, i64 length) {
    Lane<u32> even, odd, rows, tail, tail_positions;  // sums of 16 bits side by side, and of rows times their number
    FOR_LANES(l) even[l] = odd[l] = rows[l] = tail[l] = tail_positions[l] = 0;
    const i64 words = length / (4 * LANES);
    for (i64 row = 0; row < words; ++row) {
        FOR_LANES(l) {
            const u32 word = ((const u32 *)bytes)[row * LANES + l];  // frames are aligned
            const u32 low = word & 0x00ff00ffu, high = word >> 8 & 0x00ff00ffu, both = low + high;
            even[l] += low;
            odd[l] += high;
            rows[l] += (u32)row * ((both & 0xffffu) + (both >> 16));
        }
    }
    for (i64 at = words * 4 * LANES; at < length; at += LANES) {
        FOR_LANES(l) {
            const u32 byte = at + l < length ? bytes[at + l] : 0;
            tail[l] += byte;
            tail_positions[l] += (u32)(at + l) * byte;
        }
    }
    Lane<u32> sum, positions;
    FOR_LANES(l) {
        const u32 first = even[l] & 0xffffu, second = odd[l] & 0xffffu, third = even[l] >> 16, fourth = odd[l] >> 16;
        const u32 all = first + second + third + fourth;
        sum[l] = all + tail[l];
        positions[l] = 4 * LANES * rows[l] + 4 * (u32)l * all + second + 2 * third + 3 * fourth + tail_positions[l];
    }
    return {reduce_sum(sum), reduce_sum(positions)};
}

// Adds the sums of this warp's tiles, of `tiles` in all, of a payload of `base` + `slope` * state->size bytes; returns
// true in the last warp, which sees those of all. A warp without a tile does not access `state`, which the last one may
// have ended already.
DEVICE bool add_sums(i64 first, i64 last, i64 tiles, const u8 *payload, i64 base, i64 slope, FrameState *state) {
    u64 unweighted = 0, weighted = 0, done = 0;
    FOR_TILES(t) {
        const i64 nbytes = slope ? base + slope * (i64)state->size : base;
        const i64 start = t * TILE, left = nbytes - start;
        ++done;
        if (left <= 0) continue;
        const Sums sums = sums_of(payload + start, left < TILE ? left : TILE);
        // Each byte counts once per byte from it to the end; one more MODULUS keeps the difference positive.
        unweighted += sums.unweighted;
        weighted += ((u64)left % MODULUS + MODULUS) * sums.unweighted - sums.positions;
    }
    ONE_LANE {
        if (unweighted) {
            atomic_add(&state->unweighted, unweighted);
            atomic_add(&state->weighted, weighted);
        }
    }
    return last_warp(&state->tiles, done, (u64)tiles);
}

// Adler-32 of a header with zeros in the field of the checksum, and of the payload behind it. For one lane.
DEVICE u32 checksum_of(const u64 *header, const FrameState *state, u64 nbytes) {
    u64 low = 1, high = 0;
    for (int word = 0; word < HEADER_BYTES / 8; ++word) {
        const u64 bytes = word == 1 ? header[1] & 0xffffffffu : header[word];
        UNROLL for (int k = 0; k < 8; ++k) {
            low += bytes >> 8 * k & 0xff;
            high += low;
        }
    }
    const u64 a = (low + state->unweighted) % MODULUS;
    const u64 b = (high + state->weighted + nbytes % MODULUS * (low % MODULUS)) % MODULUS;
    return (u32)(b << 16 | a);
}

DEVICE void end_frame(FrameState *state, Report *report, u64 size, u64 status) {
    report->size = size;
    report->status = status;
    *state = {0, 0, 0, 0, 0};
}

// Writes the header of a frame whose payload of `base` + `slope` * state->size bytes is in place. `kind` is the first
// word of the header, with the flag for a checksum. Launched with the `tiles` of the longest payload, at least one.
KERNEL(frame_seal, u8 *frame, FrameState *state, i64 tiles, i64 base, i64 slope, u64 kind, u64 wire_id, u64 sequence, u64 decoded_bytes,
       Report *report) {
    if (!add_sums(first, last, tiles, frame + HEADER_BYTES, base, slope, state)) return;
    ONE_LANE {
        const u64 nbytes = (u64)(base + slope * (i64)state->size);
        u64 header[HEADER_BYTES / 8] = {kind, wire_id, sequence, decoded_bytes, nbytes, 0};
        header[1] |= (u64)checksum_of(header, state, nbytes) << 32;
        UNROLL for (int word = 0; word < HEADER_BYTES / 8; ++word) ((u64 *)frame)[word] = header[word];
        end_frame(state, report, nbytes, state->status);
    }
}

// Reports whether the checksum of a frame is right, with the status of the kernels that have decoded it.
KERNEL(frame_verify, const u8 *frame, FrameState *state, i64 tiles, i64 nbytes, Report *report) {
    if (!add_sums(first, last, tiles, frame + HEADER_BYTES, nbytes, 0, state)) return;
    ONE_LANE {
        const u64 *header = (const u64 *)frame;
        const bool checked = header[0] >> 40 & 2;
        const bool wrong = checked && checksum_of(header, state, (u64)nbytes) != (u32)(header[1] >> 32);
        end_frame(state, report, state->size, state->status | (wrong ? STATUS_BAD_CHECKSUM : 0));
    }
}
