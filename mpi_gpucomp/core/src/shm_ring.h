// The shared memory of a rank: its state, and a ring for each rank that sends to it.
//
// A ring has one writer and one reader. It holds records: a header of 64 bytes, and a payload that may wrap around. The
// reader trusts nothing in it: positions and lengths are checked before they are used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpucomp {

constexpr uint64_t SHM_LINE = 64;  // cache lines keep the positions of writer and reader apart, and align records
constexpr uint64_t SHM_PAGE = 4096;
constexpr uint64_t SHM_SMALLEST_RING = 16 << 10;
constexpr size_t SHM_WHY_BYTES = 512;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share atomics only if these need no lock");

// What a rank says of itself to all others.
struct ShmHeader {
    enum State : uint32_t { RUNNING, LEFT, FAILED };

    alignas(SHM_LINE) std::atomic<uint32_t> sleeping;  // set: whoever makes work for this rank clears it and rings
    alignas(SHM_LINE) std::atomic<uint32_t> state;     // leaves RUNNING once, before memory of unfinished sends changes
    char why[SHM_WHY_BYTES];                           // with FAILED, written before it
};

struct ShmPositions {
    alignas(SHM_LINE) std::atomic<uint64_t> tail;           // bytes written so far, by the writer
    alignas(SHM_LINE) std::atomic<uint64_t> head;           // bytes read so far, by the reader
    alignas(SHM_LINE) std::atomic<uint32_t> writer_blocked;  // the writer sleeps until half of the ring is free
};

struct alignas(SHM_LINE) ShmRecord {
    enum Kind : uint32_t {
        EAGER = 1,     // a short message
        ANNOUNCE,      // a long message, at `address` if the receiver may read it there
        STREAM,        // asks for the announced message `id` through the ring, from byte `nbytes` on
        DATA,          // the next part of the message `id`
        FINISH,        // the receiver needs no more of the message `id`
        CONTROL_PART,  // a part of a control message, not the last one
        CONTROL        // a control message or its last part
    };

    uint32_t kind = 0;
    uint32_t length = 0;  // of the payload
    int64_t tag = 0;
    int64_t nbytes = 0;
    uint64_t id = 0;
    uint64_t address = 0;
};

static_assert(sizeof(ShmRecord) == SHM_LINE && sizeof(ShmPositions) == 3 * SHM_LINE, "records stay aligned");

inline uint64_t shm_round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where things are in the memory of a rank.
struct ShmLayout {
    int size = 1;
    uint64_t ring_bytes = 0;

    uint64_t rings_begin() const { return shm_round_up(sizeof(ShmHeader) + size * sizeof(ShmPositions), SHM_PAGE); }
    uint64_t total() const { return rings_begin() + size * ring_bytes; }
    ShmHeader *header(uint8_t *base) const { return reinterpret_cast<ShmHeader *>(base); }
    ShmPositions *positions(uint8_t *base, int writer) const {
        return reinterpret_cast<ShmPositions *>(base + sizeof(ShmHeader)) + writer;
    }
    uint8_t *ring(uint8_t *base, int writer) const { return base + rings_begin() + writer * ring_bytes; }
};

// All positions are sequentially consistent: a writer publishes and then looks if the reader sleeps, a reader says that
// it sleeps and then looks at the ring, and one of the two must see the other.
class ShmWriter {
  public:
    bool corrupt = false;  // the reader's position makes no sense

    ShmWriter() = default;
    ShmWriter(ShmPositions *at, uint8_t *ring, uint64_t bytes) : at_(at), ring_(ring), bytes_(bytes) {}

    static uint64_t space(uint64_t payload) { return SHM_LINE + shm_round_up(payload, SHM_LINE); }

    // Return true if a record with so long a payload fits now.
    bool fits(uint64_t payload) {
        if (bytes_ - (tail_ - head_) >= space(payload)) return true;
        refresh();
        return !corrupt && bytes_ - (tail_ - head_) >= space(payload);
    }

    void write(const ShmRecord &record, const void *payload) {
        memcpy(ring_ + tail_ % bytes_, &record, sizeof record);
        const uint64_t begin = (tail_ + SHM_LINE) % bytes_, until_wrap = bytes_ - begin;
        const uint64_t first = record.length < until_wrap ? record.length : until_wrap;
        if (first) memcpy(ring_ + begin, payload, first);
        if (record.length > first) memcpy(ring_, static_cast<const uint8_t *>(payload) + first, record.length - first);
        tail_ += space(record.length);
        at_->tail.store(tail_);
    }

    // Ask to be woken when half of the ring is free; `half_free` must be called after the writer says that it sleeps.
    void block() { at_->writer_blocked.store(1); }
    bool half_free() {
        refresh();
        return !corrupt && bytes_ - (tail_ - head_) >= bytes_ / 2;
    }

  private:
    void refresh() {
        const uint64_t head = at_->head.load();
        if (head < head_ || head > tail_) corrupt = true;
        else head_ = head;
    }

    ShmPositions *at_ = nullptr;
    uint8_t *ring_ = nullptr;
    uint64_t bytes_ = 0, tail_ = 0, head_ = 0;
};

class ShmReader {
  public:
    bool corrupt = false;  // the writer's position or the length of a record makes no sense

    ShmReader() = default;
    ShmReader(ShmPositions *at, const uint8_t *ring, uint64_t bytes) : at_(at), ring_(ring), bytes_(bytes) {}

    bool empty() {
        if (tail_ != head_) return false;
        const uint64_t tail = at_->tail.load();
        if (tail < tail_ || tail - head_ > bytes_ || tail % SHM_LINE) corrupt = true;
        else tail_ = tail;
        return tail_ == head_;
    }

    // Copy the header of the next record, because the writer could still change it in the ring.
    bool peek(ShmRecord *record) {
        if (corrupt || empty()) return false;
        memcpy(record, ring_ + head_ % bytes_, sizeof *record);
        if (ShmWriter::space(record->length) > tail_ - head_) corrupt = true;
        return !corrupt;
    }

    void copy(const ShmRecord &record, void *to) const {
        const uint64_t begin = (head_ + SHM_LINE) % bytes_, until_wrap = bytes_ - begin;
        const uint64_t first = record.length < until_wrap ? record.length : until_wrap;
        if (first) memcpy(to, ring_ + begin, first);
        if (record.length > first) memcpy(static_cast<uint8_t *>(to) + first, ring_, record.length - first);
    }

    // Free the record; return true if the writer sleeps until there is room, and there is.
    bool pop(const ShmRecord &record) {
        head_ += ShmWriter::space(record.length);
        at_->head.store(head_);
        return at_->writer_blocked.load() && bytes_ - (tail_ - head_) >= bytes_ / 2 && at_->writer_blocked.exchange(0);
    }

  private:
    ShmPositions *at_ = nullptr;
    const uint8_t *ring_ = nullptr;
    uint64_t bytes_ = 0, tail_ = 0, head_ = 0;
};

}  // namespace gpucomp
