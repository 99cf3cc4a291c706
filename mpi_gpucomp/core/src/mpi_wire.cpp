#include "mpi_wire.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>

namespace gpucomp {
namespace {

constexpr int64_t STATUS_BYTES = 128;
constexpr size_t WINDOW = 8;               // messages in the estimate of a link's rate

using Send = int (*)(const void *, int, uintptr_t, int, int, uintptr_t, void *);
using SendLong = int (*)(const void *, long long, uintptr_t, int, int, uintptr_t, void *);
using Recv = int (*)(void *, int, uintptr_t, int, int, uintptr_t, void *);
using RecvLong = int (*)(void *, long long, uintptr_t, int, int, uintptr_t, void *);
using Test = int (*)(void *, int *, void *);
using Cancel = int (*)(void *);
using TestCancelled = int (*)(const void *, int *);
using GetCount = int (*)(const void *, uintptr_t, int *);
using GetCountLong = int (*)(const void *, uintptr_t, long long *);
using Iprobe = int (*)(int, int, uintptr_t, int *, void *);
using Improbe = int (*)(int, int, uintptr_t, int *, void *, void *);
using Imrecv = int (*)(void *, int, uintptr_t, void *, void *);
using ImrecvLong = int (*)(void *, long long, uintptr_t, void *, void *);

}  // namespace

void drive_mpi(const MpiLibrary &library, uintptr_t comm, int tag) {
    alignas(16) uint8_t status[STATUS_BYTES];
    int found = 0;
    ((Iprobe)library.iprobe)((int)library.any_source, tag, comm, &found, status);
}

struct MpiWire::Request {
    uint64_t handle = 0;  // pointers (Open MPI) and integers (MPICH) both fit
    bool active = false;
    int64_t nbytes = 0;
};

struct MpiWire::Control {
    Request request;
    std::vector<uint8_t> bytes;
};

// The recent rate of messages to one peer.
struct MpiWire::Rate {
    std::deque<double> recent;
    int64_t last = 0;

    // A message counts as in flight from when it was posted, or from the completion of the previous one.
    void completed(int64_t posted, int64_t nbytes) {
        const int64_t time = now();
        recent.push_back((double)nbytes * 1e9 / (double)std::max<int64_t>(1, time - std::max(posted, last)));
        if (recent.size() > WINDOW) recent.pop_front();
        last = time;
    }

    // Segmented messages are faster on slow links. The median decides: some wait for a receiver that has no CPU.
    bool slow(double limit) const {
        if (recent.size() < WINDOW) return true;
        std::vector<double> sorted(recent.begin(), recent.end());
        std::nth_element(sorted.begin(), sorted.begin() + WINDOW / 2, sorted.end());
        return sorted[WINDOW / 2] <= limit;
    }
};

// A message in one piece, or the base of a segmented one.
struct MpiMessage : Transfer {
    MpiWire &wire;
    MpiWire::Request first;
    std::unique_ptr<uint8_t[]> memory;  // of a message that is dropped
    MpiWire::Rate *rate = nullptr;
    int64_t began = 0;

    explicit MpiMessage(MpiWire &wire) : wire(wire) {}

    virtual bool complete() {
        int64_t count = 0;
        if (!wire.test(&first, &count)) return false;
        if (!is_send) nbytes = arrived = count;
        return true;
    }

    virtual bool has_begun() { return state != PENDING || complete_now(); }

    bool complete_now() {
        if (state == PENDING && complete()) {
            state = DONE;
            if (!is_send) wire.bytes_received += nbytes;
            if (rate) rate->completed(began, nbytes);
        }
        return state != PENDING;
    }

    virtual bool cancel() {
        int64_t count = 0;
        if (wire.cancelled(&first, &count)) return true;
        if (first.active) return false;
        nbytes = arrived = count;
        state = DONE;
        wire.bytes_received += nbytes;
        return false;
    }
};

// A message whose segments are sent as they become available.
struct SegmentedSend : MpiMessage {
    std::deque<MpiWire::Request> full;
    MpiWire::Request last;
    bool has_last = false;

    using MpiMessage::MpiMessage;

    // Send the next segment; the last one is synchronous.
    void push(int64_t start, int64_t end, bool is_last) {
        MpiWire::Request *request = is_last ? &last : &full.emplace_back();
        wire.isend(data + start, end - start, peer, tag, wire.segments_, request, is_last);
        nbytes = end;
        if (!is_last) return;
        has_last = true;
        posted = now();
        wire.bytes_sent += end;
    }

    bool complete() override {
        int64_t count;
        if (!has_last || !wire.test(&last, &count) || !wire.test(&first, &count)) return false;
        while (!full.empty()) {
            if (!wire.test(&full.front(), &count)) return false;
            full.pop_front();
        }
        return true;
    }
};

// A segmented message that arrives: the first segment is posted, then those that it announces. Messages of one peer and
// tag post the latter in order: otherwise a segment could match another message's receive.
struct SegmentedReceive : MpiMessage {
    SegmentedReceive *before = nullptr;
    SegmentedReceive *behind = nullptr;
    bool first_arrived = false, opened = false, dropped = false;
    int64_t to_match = 0;  // of a dropped message: segments whose receives are not posted yet
    struct Segment {
        MpiWire::Request request;
        int64_t start;
    };
    std::deque<Segment> left;
    std::deque<std::unique_ptr<uint8_t[]>> memories;
    SegmentedSend *relayed = nullptr;

    using MpiMessage::MpiMessage;

    void enqueue() {
        SegmentedReceive *&latest = wire.latest_[{peer, tag}];
        before = latest;
        if (before) before->behind = this;
        latest = this;
    }

    void unlink() {
        if (behind) behind->before = before;
        if (before) before->behind = behind;
        const auto found = wire.latest_.find({peer, tag});
        if (found != wire.latest_.end() && found->second == this) {
            if (before)
                found->second = before;
            else
                wire.latest_.erase(found);
        }
        before = behind = nullptr;
    }

    // Return true if the first segment has arrived and the others are posted.
    bool open() {
        if (!opened) {
            if (before && !before->open()) return false;
            int64_t count = 0;
            if (!first_arrived) {
                if (!wire.test(&first, &count)) return false;
                first_arrived = true;
                nbytes = arrived = count;
            }
            post_rest();
            opened = true;
        }
        return dropped ? match_rest() : true;
    }

    void post_rest() {
        const int64_t following = wire.following(nbytes);
        if (dropped) {
            to_match = following;
            return;
        }
        for (int64_t n = 0; n < following; ++n) {
            const int64_t start = nbytes + n * wire.segment_bytes_;
            const int64_t end = n == following - 1 ? capacity : start + wire.segment_bytes_;
            left.push_back({{}, start});
            wire.irecv(data + start, end - start, peer, tag, wire.segments_, &left.back().request);
        }
    }

    // Of a dropped message: receive all segments, so that those behind them belong to another message.
    bool match_rest() {
        alignas(16) uint8_t status[STATUS_BYTES];
        uintptr_t found;
        while (to_match && wire.improbe(peer, tag, wire.segments_, &found, status)) {
            --to_match;
            const int64_t nbytes = wire.count(status);
            memories.emplace_back(new uint8_t[(size_t)nbytes + 1]);
            left.push_back({{}, 0});
            wire.imrecv(memories.back().get(), nbytes, &found, &left.back().request);
        }
        return !to_match;
    }

    bool complete() override {
        if (!open()) return false;
        int64_t count = 0;
        while (!left.empty() && wire.test(&left.front().request, &count)) {
            const int64_t start = left.front().start;
            left.pop_front();
            nbytes = arrived = dropped ? nbytes + count : start + count;
            if (relayed) relayed->push(start, nbytes, left.empty());
        }
        if (!left.empty()) return false;
        unlink();
        return true;
    }

    bool has_begun() override { return state != PENDING || open(); }

    bool cancel() override {
        if (first_arrived) return false;
        int64_t count = 0;
        if (wire.cancelled(&first, &count)) {
            unlink();
            return true;
        }
        if (first.active) return false;
        first_arrived = true;
        nbytes = arrived = count;
        return false;
    }
};

MpiWire::MpiWire(const MpiLibrary &library, int own, int ranks, int64_t tags, uintptr_t messages, uintptr_t segments,
                 uintptr_t control, const Segmentation &segmentation, const int32_t *remote, int remotes)
    : library_(library),
      messages_(messages),
      segments_(segments),
      control_(control),
      segmentation_(segmentation),
      segment_bytes_(segmentation.segment_bytes),
      max_whole_(segmentation.segment_bytes - segmentation.max_segments),
      remote_(remote, remote + remotes) {
    rank = own;
    size = ranks;
    largest_tag = tags;
}

MpiWire::~MpiWire() {
    // MPI may still read what has not been sent to a peer that is gone: it is kept for good.
    for (Control *control : control_sends_)
        if (!control->request.active) delete control;
}

// Return true if an MPI call has succeeded; remember the first error.
bool MpiWire::check(int code) {
    if (code && !fault.mpi_error) fault.mpi_error = code;
    return !code;
}

// Return true if the library has a function for long messages; else it is an error.
bool MpiWire::has(const void *for_long) { return for_long || check((int)library_.count_error); }

bool MpiWire::isend(const void *data, int64_t nbytes, int peer, int64_t tag, uintptr_t comm, Request *request,
                    bool synchronous) {
    request->active = true;  // also of a message that is not sent any more: it does not complete
    if (fault.mpi_error) return false;
    void *function = synchronous ? library_.issend : library_.isend;
    void *for_long = synchronous ? library_.issend_c : library_.isend_c;
    if (nbytes > INT_MAX)
        return has(for_long) &&
               check(((SendLong)for_long)(data, nbytes, library_.byte_type, peer, (int)tag, comm, &request->handle));
    return check(((Send)function)(data, (int)nbytes, library_.byte_type, peer, (int)tag, comm, &request->handle));
}

bool MpiWire::irecv(void *data, int64_t nbytes, int peer, int64_t tag, uintptr_t comm, Request *request) {
    request->active = true;
    if (fault.mpi_error) return false;
    if (nbytes > INT_MAX)
        return has(library_.irecv_c) && check(((RecvLong)library_.irecv_c)(data, nbytes, library_.byte_type, peer,
                                                                            (int)tag, comm, &request->handle));
    return check(((Recv)library_.irecv)(data, (int)nbytes, library_.byte_type, peer, (int)tag, comm, &request->handle));
}

int64_t MpiWire::count(const uint8_t *status) {
    int count = 0;
    check(((GetCount)library_.get_count)(status, library_.byte_type, &count));
    if (count != library_.undefined) return count;
    long long long_count = 0;
    if (has(library_.get_count_c)) check(((GetCountLong)library_.get_count_c)(status, library_.byte_type, &long_count));
    return long_count;
}

bool MpiWire::test(Request *request, int64_t *nbytes) {
    *nbytes = request->nbytes;
    if (!request->active) return true;
    if (fault.mpi_error) return false;
    alignas(16) uint8_t status[STATUS_BYTES];
    int done = 0;
    if (!check(((Test)library_.test)(&request->handle, &done, status)) || !done) return false;
    request->active = false;
    *nbytes = request->nbytes = count(status);
    return true;
}

// Cancel a receive; false: a message has matched it, and the request stays active while it arrives. That is not waited
// for: it takes as long as the peer takes to send it. A receive without a match is cancelled at once.
bool MpiWire::cancelled(Request *request, int64_t *nbytes) {
    if (fault.mpi_error) return false;
    alignas(16) uint8_t status[STATUS_BYTES];
    int done = 0, was_cancelled = 0;
    if (!check(((Cancel)library_.cancel)(&request->handle)) ||
        !check(((Test)library_.test)(&request->handle, &done, status)) || !done ||
        !check(((TestCancelled)library_.test_cancelled)(status, &was_cancelled)))
        return false;
    request->active = false;
    if (was_cancelled) return true;
    *nbytes = request->nbytes = count(status);
    return false;
}

bool MpiWire::improbe(int64_t peer, int64_t tag, uintptr_t comm, uintptr_t *message, uint8_t *status) {
    if (fault.mpi_error) return false;
    int found = 0;
    *message = 0;
    return check(((Improbe)library_.improbe)((int)peer, (int)tag, comm, &found, message, status)) && found;
}

bool MpiWire::imrecv(void *data, int64_t nbytes, uintptr_t *message, Request *request) {
    request->active = true;
    if (fault.mpi_error) return false;
    if (nbytes > INT_MAX)
        return has(library_.imrecv_c) &&
               check(((ImrecvLong)library_.imrecv_c)(data, nbytes, library_.byte_type, message, &request->handle));
    return check(((Imrecv)library_.imrecv)(data, (int)nbytes, library_.byte_type, message, &request->handle));
}

// The bytes of the first segment of a message.
int64_t MpiWire::first_segment(int64_t nbytes) const {
    const int64_t beyond = nbytes - max_whole_;
    return beyond <= 0 ? nbytes : max_whole_ + std::min(segmentation_.max_segments, (beyond + segment_bytes_) / (segment_bytes_ + 1));
}

// The number of segments that follow a first one.
int64_t MpiWire::following(int64_t first) const {
    return first <= segment_bytes_ ? std::max<int64_t>(0, first - max_whole_) : 0;
}

Transfer *MpiWire::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    const bool may_cut = is_segmented(peer, nbytes);
    Rate *rate = may_cut ? &rates_[peer] : nullptr;
    const bool cut = may_cut && (nbytes <= segment_bytes_ || rate->slow(segmentation_.slow));
    MpiMessage *message;
    if (cut)
        message = new SegmentedSend(*this);
    else
        message = new MpiMessage(*this);
    message->is_send = true;
    message->peer = peer;
    message->tag = tag;
    message->data = (uint8_t *)data;
    message->rate = rate;
    message->began = now();
    const int64_t first = cut ? first_segment(nbytes) : nbytes;
    message->nbytes = nbytes;
    isend(data, first, peer, tag, messages_, &message->first, false);
    if (!cut) {
        bytes_sent += nbytes;
        return message;
    }
    ++segmented_messages;
    auto *segmented = (SegmentedSend *)message;
    const int64_t rest = following(first);
    for (int64_t n = 0; n < rest; ++n) {
        const int64_t start = first + n * segment_bytes_;
        segmented->push(start, n == rest - 1 ? nbytes : start + segment_bytes_, n == rest - 1);
    }
    return message;
}

Transfer *MpiWire::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    const bool segmented = is_segmented(peer, capacity);
    MpiMessage *message;
    if (segmented)
        message = new SegmentedReceive(*this);
    else
        message = new MpiMessage(*this);
    message->peer = peer;
    message->tag = tag;
    message->data = (uint8_t *)data;
    message->capacity = capacity;
    irecv(data, capacity, peer, tag, messages_, &message->first);
    if (segmented) ((SegmentedReceive *)message)->enqueue();
    return message;
}

// Forward the first segment and those that follow; nullptr if none follow, or some have arrived.
Transfer *MpiWire::relay(Transfer *transfer, int peer, int64_t tag) {
    auto *received = dynamic_cast<SegmentedReceive *>(transfer);
    if (!received || !remote_.count(peer) || received->state != Transfer::PENDING) return nullptr;
    if (received->left.empty() || received->nbytes != received->left.front().start) return nullptr;
    auto *relay = new SegmentedSend(*this);
    relay->is_send = true;
    relay->peer = peer;
    relay->tag = tag;
    relay->data = received->data;
    relay->nbytes = received->nbytes;
    isend(relay->data, relay->nbytes, peer, tag, messages_, &relay->first, false);
    received->relayed = relay;
    ++relayed_messages;
    return relay;
}

bool MpiWire::test(Transfer *transfer) { return ((MpiMessage *)transfer)->complete_now(); }

bool MpiWire::begun(Transfer *transfer) { return ((MpiMessage *)transfer)->has_begun(); }

bool MpiWire::cancel(Transfer *transfer) {
    auto *message = (MpiMessage *)transfer;
    if (message->state != Transfer::PENDING || !message->cancel()) return false;
    delete message;
    return true;
}

int64_t MpiWire::probe_any() {
    if (fault.mpi_error) return -1;
    alignas(16) uint8_t status[STATUS_BYTES];
    int found = 0, tag = 0;
    if (!check(((Iprobe)library_.iprobe)((int)library_.any_source, (int)library_.any_tag, messages_, &found, status)) || !found)
        return -1;
    memcpy(&tag, status + library_.tag_offset, sizeof tag);
    return tag;
}

Transfer *MpiWire::discard(int peer, int64_t tag) {
    alignas(16) uint8_t status[STATUS_BYTES];
    uintptr_t found;
    if (!improbe(peer, tag, messages_, &found, status)) return nullptr;
    const bool segmented = segment_bytes_ && remote_.count(peer);
    MpiMessage *message;
    if (segmented)
        message = new SegmentedReceive(*this);
    else
        message = new MpiMessage(*this);
    message->peer = peer;
    message->tag = tag;
    const int64_t nbytes = count(status);
    message->memory.reset(new uint8_t[(size_t)nbytes + 1]);
    imrecv(message->memory.get(), nbytes, &found, &message->first);
    if (segmented) {
        ((SegmentedReceive *)message)->dropped = true;
        ((SegmentedReceive *)message)->enqueue();
    }
    return message;
}

void MpiWire::send_control(int peer, const void *data, size_t nbytes) {
    auto *control = new Control;
    control->bytes.assign((const uint8_t *)data, (const uint8_t *)data + nbytes);
    isend(control->bytes.data(), (int64_t)nbytes, peer, 0, control_, &control->request, false);
    control_sends_.push_back(control);
}

bool MpiWire::recv_control(int *peer, std::vector<uint8_t> *message) {
    alignas(16) uint8_t status[STATUS_BYTES];
    uintptr_t found;
    if (!improbe(library_.any_source, library_.any_tag, control_, &found, status)) return false;
    int source = 0;
    memcpy(&source, status + library_.source_offset, sizeof source);
    message->resize((size_t)count(status));
    *peer = source;
    Request request;
    int64_t nbytes;
    imrecv(message->data(), (int64_t)message->size(), &found, &request);
    while (!fault.mpi_error && !test(&request, &nbytes)) continue;  // it has arrived
    return !fault.mpi_error;
}

bool MpiWire::poll() {
    int64_t nbytes;
    while (!control_sends_.empty() && test(&control_sends_.front()->request, &nbytes)) {
        delete control_sends_.front();
        control_sends_.pop_front();
    }
    return false;
}

bool MpiWire::closed() {
    poll();
    return control_sends_.empty() || fault.mpi_error;  // after an error nothing completes
}

}  // namespace gpucomp
