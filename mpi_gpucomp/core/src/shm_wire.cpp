#include "shm_wire.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <unordered_map>

#include "shm_peers.h"

namespace gpucomp {

namespace {

constexpr int64_t EAGER_BYTES = 16 << 10;
constexpr int64_t SMALLEST_READ = 64 << 10;  // for shorter messages, the system call costs more than a second copy
constexpr int64_t READ_BYTES = 1 << 20;  // read from a sender in one `poll`, which must return soon
constexpr uint64_t ALL_RINGS = 64 << 20, LARGEST_RING = 1 << 20;
constexpr int POLLS_PER_LOOK = 64;             // polls without sleep until the descriptors are looked at
constexpr int64_t ABANDON_WITHIN = 100000000;  // nanoseconds

uint64_t default_ring_bytes(int size) {
    uint64_t bytes = LARGEST_RING;
    while (bytes > SHM_SMALLEST_RING && bytes * size * size > ALL_RINGS) bytes /= 2;
    return bytes;
}

struct ShmTransfer : Transfer {
    ShmTransfer *previous = nullptr, *next = nullptr;  // of all transfers of the wire
    uint64_t id = 0;                                   // the sender's number of a long message
    uint64_t address = 0;                              // of a receive: where the sender has the message
    int64_t streamed = 0;                              // of a send: bytes that are in the ring
    const Transfer *source = nullptr;                  // of a relay, until it is complete
};

// A message without a receive: its bytes, or its announcement.
struct Unexpected {
    ShmRecord record;
    std::unique_ptr<uint8_t[]> data;
};

struct Matches {
    std::deque<ShmTransfer *> posted;
    std::deque<Unexpected> unexpected;
};

// A record that waits for room in the ring.
struct Queued {
    ShmRecord record;
    ShmTransfer *send = nullptr;  // its payload is this send's message
    std::vector<uint8_t> bytes;   // its payload otherwise
};

struct Pair {
    ShmPeer *peer = nullptr;
    ShmHeader *header = nullptr;
    ShmWriter out;
    ShmReader in;
    bool left = false;
    std::deque<Queued> queue;
    std::unordered_map<uint64_t, ShmTransfer *> announced;  // sends until the receiver has all or asks for a stream
    std::deque<ShmTransfer *> streams;                      // sends through the ring
    std::deque<ShmTransfer *> reads;                        // receives from the sender's memory
    std::unordered_map<uint64_t, ShmTransfer *> arriving;   // receives through the ring
    std::unordered_map<int64_t, Matches> matches;
    size_t unexpected = 0;
    std::vector<uint8_t> control;  // parts of a control message
};

class ShmWire final : public Wire {
  public:
    ShmWire(const char *key, int own_rank, int ranks, uint64_t ring_bytes, bool single_copy)
        : bootstrap_(key, own_rank, ranks, ring_bytes), ring_bytes_(ring_bytes), single_copy_(single_copy) {
        rank = own_rank;
        size = ranks;
        largest_tag = INT64_MAX;
        eager_bytes_ = std::min<int64_t>(EAGER_BYTES, ring_bytes / 4 - SHM_LINE);
        part_bytes_ = ring_bytes / 8;
        smallest_read_ = std::min<int64_t>(SMALLEST_READ, ring_bytes / 4);
        if (!bootstrap_.create()) fail(bootstrap_.error);
        else own_ = bootstrap_.layout.header(bootstrap_.peers[rank].memory->base);
    }

    ~ShmWire() override {
        leave();
        while (transfers_) release(transfers_);
    }

    bool attach(int64_t timeout) {
        if (!fault.text.empty()) return false;
        if (!bootstrap_.attach(timeout)) return fail(bootstrap_.error);
        epoll_ = epoll_create1(EPOLL_CLOEXEC);
        if (epoll_ < 0) return fail(std::string("shared memory: epoll: ") + strerror(errno));
        const ShmLayout &layout = bootstrap_.layout;
        pairs_ = std::vector<Pair>(size);
        for (int peer = 0; peer < size; ++peer) {
            Pair &pair = pairs_[peer];
            pair.peer = &bootstrap_.peers[peer];
            uint8_t *theirs = pair.peer->memory->base, *ours = bootstrap_.peers[rank].memory->base;
            pair.header = layout.header(theirs);
            pair.out = ShmWriter(layout.positions(theirs, rank), layout.ring(theirs, rank), ring_bytes_);
            pair.in = ShmReader(layout.positions(ours, peer), layout.ring(ours, peer), ring_bytes_);
            for (int descriptor : {pair.peer->bell, pair.peer->process}) {
                epoll_event event{};
                event.events = EPOLLIN;
                event.data.u64 = uint64_t(peer) << 32 | uint32_t(descriptor);
                if (descriptor >= 0 && epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event))
                    return fail(std::string("shared memory: epoll: ") + strerror(errno));
            }
        }
        return true;
    }

    bool has_single_copy(int peer) const {
        const ShmPeer &of = bootstrap_.peers[peer];
        return single_copy_ && (of.same_process || of.readable);
    }

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override {
        ShmTransfer *transfer = add(true, peer, tag, static_cast<uint8_t *>(const_cast<void *>(data)), nbytes);
        transfer->nbytes = nbytes;
        transfer->posted = now();
        if (usable(peer)) start(transfer);
        return transfer;
    }

    Transfer *relay(Transfer *received, int peer, int64_t tag) override {
        ShmTransfer *transfer = add(true, peer, tag, received->data, received->nbytes);
        transfer->nbytes = received->nbytes;
        if (received->state == Transfer::DONE) transfer->posted = now();
        else transfer->source = received;
        if (usable(peer)) start(transfer);
        return transfer;
    }

    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override {
        ShmTransfer *transfer = add(false, peer, tag, static_cast<uint8_t *>(data), capacity);
        transfer->posted = now();
        if (over()) return transfer;
        Pair &pair = pairs_[peer];
        const auto found = pair.matches.find(tag);
        if (found == pair.matches.end() || found->second.unexpected.empty()) {
            pair.matches[tag].posted.push_back(transfer);
            return transfer;
        }
        const Unexpected message = take_unexpected(pair, found);
        match(pair, transfer, message.record);
        if (message.data && transfer->state == Transfer::PENDING) {
            memcpy(transfer->data, message.data.get(), transfer->nbytes);
            finish_receive(transfer);
        }
        return transfer;
    }

    bool test(Transfer *transfer) override {
        if (transfer->state == Transfer::PENDING && !over() && pairs_[transfer->peer].left) has_left(transfer->peer);
        return transfer->state != Transfer::PENDING;
    }

    bool begun(Transfer *transfer) override { return test(transfer) || transfer->arrived > 0; }

    bool cancel(Transfer *receive) override {
        if (receive->state != Transfer::PENDING || pairs_.empty()) return false;
        Pair &pair = pairs_[receive->peer];
        const auto found = pair.matches.find(receive->tag);
        if (found == pair.matches.end()) return false;
        std::deque<ShmTransfer *> &posted = found->second.posted;
        const auto place = std::find(posted.begin(), posted.end(), receive);
        if (place == posted.end()) return false;
        posted.erase(place);
        if (posted.empty() && found->second.unexpected.empty()) pair.matches.erase(found);
        release(receive);
        return true;
    }

    void release(Transfer *transfer) override {
        auto *of = static_cast<ShmTransfer *>(transfer);
        (of->previous ? of->previous->next : transfers_) = of->next;
        if (of->next) of->next->previous = of->previous;
        delete of;
    }

    int64_t probe_any() override {
        for (Pair &pair : pairs_)
            if (pair.unexpected)
                for (auto &[tag, of] : pair.matches)
                    if (!of.unexpected.empty()) return tag;
        return -1;
    }

    Transfer *discard(int peer, int64_t tag) override {
        if (over()) return nullptr;
        Pair &pair = pairs_[peer];
        const auto found = pair.matches.find(tag);
        if (found == pair.matches.end() || found->second.unexpected.empty()) return nullptr;
        const Unexpected message = take_unexpected(pair, found);
        ShmTransfer *transfer = add(false, peer, tag, nullptr, 0);
        transfer->nbytes = transfer->arrived = message.record.nbytes;
        transfer->state = Transfer::DONE;
        if (message.record.kind == ShmRecord::ANNOUNCE) answer(pair, ShmRecord::FINISH, message.record.id);
        return transfer;
    }

    void send_control(int peer, const void *data, size_t nbytes) override {
        if (over() || closing_ || pairs_[peer].left) return;
        Pair &pair = pairs_[peer];
        const auto *bytes = static_cast<const uint8_t *>(data);
        do {
            const size_t part = std::min<size_t>(nbytes, eager_bytes_);
            Queued queued;
            queued.record.kind = part < nbytes ? ShmRecord::CONTROL_PART : ShmRecord::CONTROL;
            queued.record.length = part;
            queued.bytes.assign(bytes, bytes + part);
            enqueue(pair, std::move(queued));
            bytes += part;
            nbytes -= part;
        } while (nbytes);
    }

    bool recv_control(int *peer, std::vector<uint8_t> *message) override {
        if (control_.empty()) return false;
        *peer = control_.front().first;
        *message = std::move(control_.front().second);
        control_.pop_front();
        return true;
    }

    bool poll() override {
        if (over()) return false;
        bool moved = false;
        if (armed_ || ++polls_ % POLLS_PER_LOOK == 0) {
            armed_ = false;
            own_->sleeping.store(0);
            moved = look();
        }
        for (Pair &pair : pairs_) {
            moved |= drain(pair);
            moved |= read(pair);
            moved |= flush(pair);
            if (!fault.text.empty()) return true;
        }
        return moved;
    }

    int fd() const override { return epoll_; }

    bool arm() override {
        if (over()) return false;
        for (Pair &pair : pairs_)
            if (has_output(pair)) pair.out.block();
        own_->sleeping.store(1);
        armed_ = true;
        for (Pair &pair : pairs_) {
            const bool arrived = !pair.in.empty() || pair.in.corrupt;
            const bool writable = has_output(pair) && (pair.out.half_free() || pair.out.corrupt);
            if (!arrived && !writable && pair.reads.empty()) continue;
            armed_ = false;
            own_->sleeping.store(0);
            return false;
        }
        return true;
    }

    void revoke(const std::string &why) override {
        if (!own_) return;
        publish_failure(fault.text.empty() ? why : fault.text);
        for (Pair &pair : pairs_) ring(pair);
    }

    void close(bool abandon) override {
        if (!closing_) closing_ = now();
        abandon_ |= abandon;
    }

    bool closed() override {
        if (!over()) {
            poll();
            const bool idle = std::all_of(pairs_.begin(), pairs_.end(), [](const Pair &pair) {
                return pair.left || (pair.queue.empty() && pair.streams.empty() && pair.announced.empty());
            });
            if (!idle && fault.text.empty() && !(abandon_ && now() - closing_ > ABANDON_WITHIN)) return false;
        }
        leave();
        return true;
    }

  private:
    bool fail(const std::string &text) {
        if (fault.text.empty()) {
            fault.text = text;
            if (own_) publish_failure(text);
        }
        return false;
    }

    bool has_left(int peer) { return fail("rank " + std::to_string(peer) + " has left"); }

    bool corrupt(const Pair &pair) {
        return fail("the shared memory of rank " + std::to_string(number(pair)) + " is corrupt");
    }

    int number(const Pair &pair) const { return int(&pair - pairs_.data()); }

    // Not attached, failed or left.
    bool over() const { return !own_ || pairs_.empty() || !fault.text.empty(); }

    void publish_failure(const std::string &why) {
        if (own_->state.load() != ShmHeader::RUNNING) return;
        const size_t length = std::min(why.size(), SHM_WHY_BYTES - 1);
        memcpy(own_->why, why.data(), length);
        own_->why[length] = 0;
        stop(ShmHeader::FAILED);
    }

    // After this, the memory of unfinished sends may change: peers do not complete receives with what they read there.
    // Ranks of this process do not even read it, it may be unmapped; a part that they are copying ends soon.
    void stop(ShmHeader::State state) {
        own_->state.store(state);
        while (bootstrap_.peers[rank].memory->readers.load()) sched_yield();
    }

    void leave() {
        if (!own_) return;
        if (bootstrap_.is_owner() && own_->state.load() == ShmHeader::RUNNING) stop(ShmHeader::LEFT);
        own_ = nullptr;
        for (Pair &pair : pairs_) forget(pair);
        if (epoll_ >= 0) ::close(epoll_);
        epoll_ = -1;
    }

    // A child of this process may have inherited the descriptors, therefore closing them is not enough. Nor may it end
    // the connection when it destroys its copy of the wire.
    void forget(Pair &pair) {
        if (pair.peer->bell >= 0 && bootstrap_.is_owner()) shutdown(pair.peer->bell, SHUT_RDWR);
        for (int *descriptor : {&pair.peer->bell, &pair.peer->process}) {
            if (*descriptor < 0) continue;
            if (bootstrap_.is_owner()) epoll_ctl(epoll_, EPOLL_CTL_DEL, *descriptor, nullptr);
            ::close(*descriptor);
            *descriptor = -1;
        }
    }

    ShmTransfer *add(bool is_send, int peer, int64_t tag, uint8_t *data, int64_t capacity) {
        auto *transfer = new ShmTransfer;
        transfer->is_send = is_send;
        transfer->peer = peer;
        transfer->tag = tag;
        transfer->data = data;
        transfer->capacity = capacity;
        transfer->next = transfers_;
        if (transfers_) transfers_->previous = transfer;
        transfers_ = transfer;
        return transfer;
    }

    bool usable(int peer) {
        return !over() && !closing_ && (!pairs_[peer].left || has_left(peer));
    }

    void ring(Pair &pair) {
        static const uint8_t byte = 0;
        // A full buffer holds a byte that will wake the peer as well.
        if (pair.peer->bell >= 0 && ::send(pair.peer->bell, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
    }

    void wake(Pair &pair) {
        if (pair.header->sleeping.load() && pair.header->sleeping.exchange(0)) ring(pair);
    }

    // Receive doorbells; return true if a peer has left or ended.
    bool look() {
        bool noticed = false;
        epoll_event events[16];
        const int count = epoll_wait(epoll_, events, 16, 0);
        for (int i = 0; i < count && fault.text.empty(); ++i) {
            Pair &pair = pairs_[events[i].data.u64 >> 32];
            const int descriptor = int(uint32_t(events[i].data.u64));
            bool over = descriptor == pair.peer->process;
            if (descriptor == pair.peer->bell) {
                uint8_t bytes[64];
                const ssize_t got = recv(descriptor, bytes, sizeof bytes, MSG_DONTWAIT);
                over = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR) ||
                       pair.header->state.load() == ShmHeader::FAILED;
            }
            if (over) ended(pair);
            noticed |= over;
        }
        return noticed;
    }

    void ended(Pair &pair) {
        drain(pair);
        forget(pair);
        const std::string who = "rank " + std::to_string(number(pair));
        const std::string why(pair.header->why, strnlen(pair.header->why, SHM_WHY_BYTES));
        const uint32_t state = pair.header->state.load();
        if (state == ShmHeader::LEFT) pair.left = true;
        else if (state == ShmHeader::RUNNING) fail(who + " has ended");
        else fail(why.empty() ? who + " has failed" : why);
    }

    void start(ShmTransfer *transfer) {
        Pair &pair = pairs_[transfer->peer];
        Queued queued;
        queued.record.tag = transfer->tag;
        queued.record.nbytes = transfer->nbytes;
        if (transfer->nbytes <= eager_bytes_ && !transfer->source) {
            queued.record.kind = ShmRecord::EAGER;
            queued.record.length = transfer->nbytes;
            queued.send = transfer;
        } else {
            queued.record.kind = ShmRecord::ANNOUNCE;
            queued.record.id = transfer->id = ++last_id_;
            if (!transfer->source) queued.record.address = reinterpret_cast<uint64_t>(transfer->data);
            pair.announced[transfer->id] = transfer;
        }
        enqueue(pair, std::move(queued));
    }

    void answer(Pair &pair, ShmRecord::Kind kind, uint64_t id, int64_t nbytes = 0) {
        Queued queued;
        queued.record.kind = kind;
        queued.record.id = id;
        queued.record.nbytes = nbytes;
        enqueue(pair, std::move(queued));
    }

    void enqueue(Pair &pair, Queued queued) {
        if (pair.left) return;
        if (!pair.queue.empty() || !write(pair, queued)) pair.queue.push_back(std::move(queued));
    }

    bool write(Pair &pair, const Queued &queued) {
        if (!pair.out.fits(queued.record.length)) return pair.out.corrupt && corrupt(pair);
        pair.out.write(queued.record, queued.send ? queued.send->data : queued.bytes.data());
        wake(pair);
        if (queued.send) finish_send(queued.send);
        return true;
    }

    void finish_send(ShmTransfer *transfer) {
        transfer->state = Transfer::DONE;
        bytes_sent += transfer->nbytes;
    }

    void finish_receive(ShmTransfer *transfer) {
        transfer->arrived = transfer->nbytes;
        transfer->state = Transfer::DONE;
        bytes_received += transfer->nbytes;
    }

    static int64_t sendable(ShmTransfer *transfer) {
        if (transfer->source && transfer->source->state == Transfer::DONE) {
            transfer->source = nullptr;
            transfer->posted = now();
        }
        return (transfer->source ? transfer->source->arrived : transfer->nbytes) - transfer->streamed;
    }

    bool has_output(Pair &pair) const {
        return !pair.queue.empty() ||
               std::any_of(pair.streams.begin(), pair.streams.end(), [](ShmTransfer *of) { return sendable(of) > 0; });
    }

    bool flush(Pair &pair) {
        bool moved = false;
        while (!pair.queue.empty()) {
            if (!write(pair, pair.queue.front())) return moved;
            pair.queue.pop_front();
            moved = true;
        }
        // In order; a relay that waits for bytes does not block the ones behind it.
        for (size_t i = 0; i < pair.streams.size();) {
            ShmTransfer *transfer = pair.streams[i];
            const int64_t bytes = std::min<int64_t>(sendable(transfer), part_bytes_);
            if (bytes == 0) {
                ++i;
                continue;
            }
            if (!pair.out.fits(bytes)) {
                if (pair.out.corrupt) corrupt(pair);
                return moved;
            }
            ShmRecord record;
            record.kind = ShmRecord::DATA;
            record.length = bytes;
            record.id = transfer->id;
            pair.out.write(record, transfer->data + transfer->streamed);
            wake(pair);
            moved = true;
            transfer->streamed += bytes;
            if (transfer->streamed == transfer->nbytes) {
                pair.streams.erase(pair.streams.begin() + i);
                finish_send(transfer);
            }
        }
        return moved;
    }

    // Handle what is in the ring, but not what is added meanwhile: a busy sender must not keep `poll` from returning.
    bool drain(Pair &pair) {
        ShmRecord record;
        uint64_t budget = ring_bytes_;
        bool moved = false;
        while (budget && fault.text.empty() && pair.in.peek(&record)) {
            if (!handle(pair, record)) return corrupt(pair);
            const uint64_t space = ShmWriter::space(record.length);
            budget -= std::min(budget, space);
            if (pair.in.pop(record)) wake(pair);
            moved = true;
        }
        if (pair.in.corrupt) corrupt(pair);
        return moved;
    }

    // Return false if the record makes no sense.
    bool handle(Pair &pair, const ShmRecord &record) {
        switch (record.kind) {
            case ShmRecord::EAGER:
                return record.nbytes == record.length && arrive(pair, record);
            case ShmRecord::ANNOUNCE:
                return record.nbytes > 0 && arrive(pair, record);
            case ShmRecord::STREAM: {
                const auto found = pair.announced.find(record.id);
                if (found == pair.announced.end()) return false;
                if (record.nbytes < 0 || record.nbytes >= found->second->nbytes) return false;
                found->second->streamed = record.nbytes;
                pair.streams.push_back(found->second);
                pair.announced.erase(found);
                return true;
            }
            case ShmRecord::FINISH: {
                const auto found = pair.announced.find(record.id);
                if (found == pair.announced.end()) return false;
                finish_send(found->second);
                pair.announced.erase(found);
                return true;
            }
            case ShmRecord::DATA: {
                const auto found = pair.arriving.find(record.id);
                if (found == pair.arriving.end()) return false;
                ShmTransfer *transfer = found->second;
                if (!record.length || record.length > transfer->nbytes - transfer->arrived) return false;
                pair.in.copy(record, transfer->data + transfer->arrived);
                transfer->arrived += record.length;
                if (transfer->arrived == transfer->nbytes) {
                    pair.arriving.erase(found);
                    finish_receive(transfer);
                }
                return true;
            }
            case ShmRecord::CONTROL_PART:
            case ShmRecord::CONTROL: {
                const size_t before = pair.control.size();
                pair.control.resize(before + record.length);
                pair.in.copy(record, pair.control.data() + before);
                if (record.kind == ShmRecord::CONTROL) {
                    control_.emplace_back(number(pair), std::move(pair.control));
                    pair.control.clear();
                }
                return true;
            }
        }
        return false;
    }

    bool arrive(Pair &pair, const ShmRecord &record) {
        Matches &of = pair.matches[record.tag];
        if (of.posted.empty()) {
            Unexpected message{record, nullptr};
            if (record.kind == ShmRecord::EAGER) {
                message.data.reset(new uint8_t[record.length]);
                pair.in.copy(record, message.data.get());
            }
            of.unexpected.push_back(std::move(message));
            ++pair.unexpected;
            return true;
        }
        ShmTransfer *transfer = of.posted.front();
        of.posted.pop_front();
        if (of.posted.empty()) pair.matches.erase(record.tag);
        match(pair, transfer, record);
        if (record.kind == ShmRecord::EAGER && transfer->state == Transfer::PENDING) {
            pair.in.copy(record, transfer->data);
            finish_receive(transfer);
        }
        return true;
    }

    Unexpected take_unexpected(Pair &pair, std::unordered_map<int64_t, Matches>::iterator found) {
        Unexpected message = std::move(found->second.unexpected.front());
        found->second.unexpected.pop_front();
        if (found->second.unexpected.empty() && found->second.posted.empty()) pair.matches.erase(found);
        --pair.unexpected;
        return message;
    }

    // Begin to receive a message. One that was announced moves later, a short one by the caller.
    void match(Pair &pair, ShmTransfer *transfer, const ShmRecord &record) {
        transfer->nbytes = record.nbytes;
        if (record.nbytes > transfer->capacity) {
            transfer->state = Transfer::FAILED;
            transfer->error = "receive from rank " + std::to_string(transfer->peer) + ", tag " +
                              std::to_string(record.tag) + ": expected at most " + std::to_string(transfer->capacity) +
                              " bytes, got " + std::to_string(record.nbytes);
            if (record.kind == ShmRecord::ANNOUNCE) answer(pair, ShmRecord::FINISH, record.id);
        } else if (record.kind == ShmRecord::ANNOUNCE) {
            transfer->id = record.id;
            transfer->address = record.address;
            const bool readable = record.address && has_single_copy(transfer->peer);
            if (readable && record.nbytes > smallest_read_) pair.reads.push_back(transfer);
            else request_stream(pair, transfer);
        }
    }

    void request_stream(Pair &pair, ShmTransfer *transfer) {
        pair.arriving[transfer->id] = transfer;
        answer(pair, ShmRecord::STREAM, transfer->id, transfer->arrived);
    }

    // Copy the next part of a message from its sender's memory.
    bool read(Pair &pair) {
        if (pair.reads.empty() || !fault.text.empty()) return false;
        ShmTransfer *transfer = pair.reads.front();
        const size_t bytes = std::min(transfer->nbytes - transfer->arrived, READ_BYTES);
        auto *remote = reinterpret_cast<uint8_t *>(transfer->address) + transfer->arrived;
        ssize_t got = bytes;
        if (pair.peer->same_process) {
            pair.peer->memory->readers.fetch_add(1);
            const bool valid = pair.header->state.load() == ShmHeader::RUNNING;
            if (valid) memcpy(transfer->data + transfer->arrived, remote, bytes);
            pair.peer->memory->readers.fetch_sub(1);
        } else {
            const iovec to{transfer->data + transfer->arrived, bytes}, from{remote, bytes};
            got = process_vm_readv(pair.peer->pid, &to, 1, &from, 1, 0);
        }
        // What was read since the sender failed or left is not the message.
        if (pair.header->state.load() != ShmHeader::RUNNING) {
            ended(pair);
            has_left(transfer->peer);
            return true;
        }
        if (got <= 0) {
            if (got < 0 && errno == EPERM) pair.peer->readable = false;
            pair.reads.pop_front();
            request_stream(pair, transfer);
            return true;
        }
        transfer->arrived += got;
        if (transfer->arrived == transfer->nbytes) {
            pair.reads.pop_front();
            answer(pair, ShmRecord::FINISH, transfer->id);
            finish_receive(transfer);
        }
        return true;
    }

    ShmBootstrap bootstrap_;
    uint64_t ring_bytes_;
    bool single_copy_, armed_ = false, abandon_ = false;
    int64_t eager_bytes_, part_bytes_, smallest_read_, closing_ = 0;
    ShmHeader *own_ = nullptr;  // nullptr: not created, or left
    int epoll_ = -1;
    unsigned polls_ = 0;
    uint64_t last_id_ = 0;
    std::vector<Pair> pairs_;
    ShmTransfer *transfers_ = nullptr;
    std::deque<std::pair<int, std::vector<uint8_t>>> control_;
};

}  // namespace

}  // namespace gpucomp

using gpucomp::ShmWire;
using gpucomp::Wire;

Wire *gc_shm_create(const char *key, int rank, int size, int64_t ring_bytes, int single_copy) {
    const uint64_t bytes = ring_bytes > 0 ? uint64_t(ring_bytes) : gpucomp::default_ring_bytes(size);
    return new ShmWire(key, rank, size, bytes, single_copy != 0);
}

int gc_shm_attach(Wire *wire, int64_t timeout) { return static_cast<ShmWire *>(wire)->attach(timeout) ? 0 : -1; }

int gc_shm_single_copy(const Wire *wire, int peer) { return static_cast<const ShmWire *>(wire)->has_single_copy(peer); }
