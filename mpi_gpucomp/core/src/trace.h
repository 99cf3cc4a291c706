// The trace ring: fixed-size records of chunks, written here and read by the monitor, which maps the same memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace gpucomp {

enum RecordKind : uint8_t { RECORD_SEND = 1, RECORD_RECV = 2, RECORD_ENCODE = 3, RECORD_DECODE = 4 };

struct Record {
    int64_t post, transmit, complete, number, nbytes;
    uint32_t raw_bytes, call, chunk;
    int32_t peer;
    uint16_t name, call_class;
    uint8_t lane, kind;
    int8_t rail;
    uint8_t comm;
};
static_assert(sizeof(Record) == 64, "the layout that the monitor maps");

struct Ring {
    Record *records = nullptr;
    int64_t mask = 0;
};

// Numbers of records, shared by all rings of the process and by the records that Python writes.
inline std::atomic<int64_t> &record_numbers() {
    static std::atomic<int64_t> numbers{1};
    return numbers;
}

// What the records of one call have in common.
struct CallTrace {
    Ring ring;
    const int32_t *world = nullptr;  // ranks of the communicator in the world
    uint32_t call = 0;
    uint16_t name = 0, call_class = 0;
    uint8_t comm = 0;

    explicit operator bool() const { return ring.records != nullptr; }

    void write(RecordKind kind, int64_t post, int64_t transmit, int64_t complete, int64_t nbytes, int64_t raw_bytes,
               int peer, int lane, int64_t chunk, int rail) const {
        if (!ring.records) return;
        const int64_t number = record_numbers().fetch_add(1, std::memory_order_relaxed);
        const Record record = {post, transmit, complete, number, nbytes, (uint32_t)raw_bytes, call, (uint32_t)chunk,
                               peer < 0 ? -1 : world[peer], name, call_class, (uint8_t)lane, kind, (int8_t)rail, comm};
        memcpy(&ring.records[number & ring.mask], &record, sizeof record);
    }
};

}  // namespace gpucomp
