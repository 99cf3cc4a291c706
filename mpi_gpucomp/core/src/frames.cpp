#include "frames.h"

#include <cstring>
#include <vector>

namespace gpucomp {
namespace {

constexpr uint32_t MODULUS = 65521;
constexpr int64_t TILE = 4096;
constexpr uint8_t VERSION = 1;

void (*checksum_tiles)(int64_t, int64_t, const uint8_t *, int64_t, uint64_t *) = nullptr;
void (*checksum_join)(int64_t, int64_t, const uint64_t *, int64_t, uint32_t *) = nullptr;

uint32_t adler32(const uint8_t *bytes, int64_t nbytes) {
    uint32_t low = 1, high = 0;
    for (int64_t i = 0; i < nbytes; ++i) {
        low = (low + bytes[i]) % MODULUS;
        high = (high + low) % MODULUS;
    }
    return high << 16 | low;
}

uint32_t payload_checksum(const uint8_t *bytes, int64_t nbytes) {
    if (!checksum_tiles || !nbytes) return adler32(bytes, nbytes);
    thread_local std::vector<uint64_t> partials;
    const int64_t tiles = (nbytes + TILE - 1) / TILE;
    if ((int64_t)partials.size() < tiles) partials.resize(tiles);
    uint32_t result = 0;
    checksum_tiles(0, tiles, bytes, nbytes, partials.data());
    checksum_join(0, 1, partials.data(), nbytes, &result);
    return result;
}

// The checksum of a frame whose header has zeros in the field of the checksum.
uint32_t frame_checksum(const Header &header, const uint8_t *payload) {
    const uint32_t front = adler32((const uint8_t *)&header, sizeof header);
    const uint32_t back = payload_checksum(payload, header.payload_bytes);
    const uint64_t low = ((front & 0xFFFF) + (back & 0xFFFF) + MODULUS - 1) % MODULUS;
    const uint64_t weight = ((front & 0xFFFF) + MODULUS - 1) % MODULUS;
    const uint64_t high = ((front >> 16) + (back >> 16) + header.payload_bytes % MODULUS * weight) % MODULUS;
    return (uint32_t)(high << 16 | low);
}

}  // namespace

void set_checksum_kernels(void *tiles, void *join) {
    checksum_tiles = (decltype(checksum_tiles))tiles;
    checksum_join = (decltype(checksum_join))join;
}

Header empty_header(uint32_t wire_id, uint8_t dtype, bool raw) {
    return {{'G', 'P', 'C', 'F'}, VERSION, (uint8_t)(FRAME_CHECKED | (raw ? FRAME_RAW : 0)), dtype, 0, wire_id, 0, 0, 0, 0, 0};
}

void write_header(uint8_t *frame, uint32_t wire_id, uint8_t dtype, int64_t sequence, int64_t decoded_bytes,
                  int64_t payload_bytes, bool raw) {
    Header header = empty_header(wire_id, dtype, raw);
    header.sequence = (uint64_t)sequence;
    header.decoded_bytes = (uint64_t)decoded_bytes;
    header.payload_bytes = (uint64_t)payload_bytes;
    header.checksum = frame_checksum(header, frame + HEADER_BYTES);
    memcpy(frame, &header, sizeof header);
}

const Header *read_header(const uint8_t *frame, int64_t nbytes, uint8_t dtype, int64_t itemsize) {
    if (nbytes < HEADER_BYTES) return nullptr;
    const Header *header = (const Header *)frame;
    const bool known = !memcmp(header->magic, "GPCF", 4) && header->version == VERSION && header->dtype == dtype &&
                       !header->zero && !header->zeros && !(header->flags & ~(FRAME_RAW | FRAME_CHECKED)) &&
                       (header->flags & FRAME_CHECKED || !header->checksum);
    const bool whole = header->decoded_bytes % itemsize == 0 &&
                       (!header->raw() || header->payload_bytes == header->decoded_bytes) &&
                       header->payload_bytes <= (uint64_t)(nbytes - HEADER_BYTES);
    return known && whole ? header : nullptr;
}

bool verify(const uint8_t *frame) {
    Header header;
    memcpy(&header, frame, sizeof header);
    if (!(header.flags & FRAME_CHECKED)) return true;
    const uint32_t expected = header.checksum;
    header.checksum = 0;
    return frame_checksum(header, frame + HEADER_BYTES) == expected;
}

}  // namespace gpucomp
