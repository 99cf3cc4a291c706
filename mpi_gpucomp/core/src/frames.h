// The frame of a chunk on the wire: a header of 48 bytes, then the payload. `codec/frame.py` documents the layout.
#pragma once

#include <cstdint>

namespace gpucomp {

constexpr int64_t HEADER_BYTES = 48;
constexpr uint8_t FRAME_RAW = 1, FRAME_CHECKED = 2;

#pragma pack(push, 1)
struct Header {
    char magic[4];
    uint8_t version, flags, dtype, zero;
    uint32_t wire_id, checksum;
    uint64_t sequence, decoded_bytes, payload_bytes, zeros;

    bool raw() const { return flags & FRAME_RAW; }
};
#pragma pack(pop)
static_assert(sizeof(Header) == HEADER_BYTES, "the layout on the wire");

// A header without lengths and checksum.
Header empty_header(uint32_t wire_id, uint8_t dtype, bool raw);

// Write a header, and its checksum over itself and the payload behind it.
void write_header(uint8_t *frame, uint32_t wire_id, uint8_t dtype, int64_t sequence, int64_t decoded_bytes,
                  int64_t payload_bytes, bool raw);

// Return the header of a frame of `nbytes` if it is well-formed, of elements of `itemsize` bytes, and complete; else
// nullptr. The payload is not looked at.
const Header *read_header(const uint8_t *frame, int64_t nbytes, uint8_t dtype, int64_t itemsize);

// Return true if the checksum of a complete frame is right.
bool verify(const uint8_t *frame);

// Use these kernels for checksums (kernels/checksum.cu).
void set_checksum_kernels(void *tiles, void *join);

}  // namespace gpucomp
