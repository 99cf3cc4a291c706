// Messages over MPI, on communicators of its own, through pointers to the functions of the library that mpi4py has
// loaded: one binary serves Open MPI and MPICH, and nothing of MPI is needed to build it.
//
// Long messages between nodes are sent in segments below the library's rendezvous threshold. Over TCP an MPI library
// sends short messages eagerly and starts a rendezvous for long ones. In a chain this handshake is paid per hop and per
// chunk by ranks that poll rarely, and the link idles meanwhile. Only the last segment is sent in synchronous mode: the
// message completes when the receiver has matched it, which bounds the unexpected messages at the receiver. Segments are
// relayed while the message still arrives.
//
// The length of the first segment encodes the number of segments that follow, so no header is added: a first segment of
// at most `max_whole_` bytes stands alone, and one of `max_whole_ + n` bytes is followed by n others. All of them are
// full but the last, which takes the remainder. A first message longer than a segment is the whole message: the sender
// decides, and segments only on slow links. On fast links the copies of MPI's eager protocol cost more than the
// rendezvous they avoid.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "wire.h"

namespace gpucomp {

// The values that differ between MPI libraries, as `transport/mpi.py` reads them.
struct MpiLibrary {
    void *isend, *issend, *irecv, *test, *cancel, *test_cancelled, *get_count, *iprobe, *improbe, *imrecv;
    // For messages of 2 GiB and more; nullptr if the library has none (before MPI 4).
    void *isend_c, *issend_c, *irecv_c, *imrecv_c, *get_count_c;
    uintptr_t byte_type;
    int64_t any_source, any_tag, status_bytes, source_offset, tag_offset, undefined, count_error;
};

// Lets the library progress what it has buffered: a probe of `comm` for a tag that nobody sends.
void drive_mpi(const MpiLibrary &library, uintptr_t comm, int tag);

// How long messages to remote peers are cut.
struct Segmentation {
    int64_t segment_bytes;  // 0: not at all
    int64_t max_segments;   // that follow the first one
    double slow;            // bytes per second up to which a link is slow, such as one of 1 Gbit/s
};

struct MpiMessage;
struct SegmentedSend;
struct SegmentedReceive;

class MpiWire : public Wire {
  public:
    MpiWire(const MpiLibrary &library, int rank, int size, int64_t largest_tag, uintptr_t messages, uintptr_t segments,
            uintptr_t control, const Segmentation &segmentation, const int32_t *remote, int remotes);

    int64_t segmented_messages = 0, relayed_messages = 0;  // so far

    ~MpiWire() override;

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override;
    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override;
    Transfer *relay(Transfer *received, int peer, int64_t tag) override;
    bool test(Transfer *transfer) override;
    bool begun(Transfer *transfer) override;
    bool cancel(Transfer *receive) override;
    int64_t probe_any() override;
    Transfer *discard(int peer, int64_t tag) override;
    void send_control(int peer, const void *data, size_t nbytes) override;
    bool recv_control(int *peer, std::vector<uint8_t> *message) override;
    bool poll() override;
    bool interleaves() const override { return true; }
    bool closed() override;

  private:
    friend struct MpiMessage;
    friend struct SegmentedSend;
    friend struct SegmentedReceive;
    struct Request;
    struct Rate;

    bool check(int code);
    bool has(const void *for_long);
    bool isend(const void *data, int64_t nbytes, int peer, int64_t tag, uintptr_t comm, Request *request, bool synchronous);
    bool irecv(void *data, int64_t nbytes, int peer, int64_t tag, uintptr_t comm, Request *request);
    bool test(Request *request, int64_t *nbytes);
    bool cancelled(Request *request, int64_t *nbytes);
    int64_t count(const uint8_t *status);
    bool improbe(int64_t peer, int64_t tag, uintptr_t comm, uintptr_t *message, uint8_t *status);
    bool imrecv(void *data, int64_t nbytes, uintptr_t *message, Request *request);
    int64_t first_segment(int64_t nbytes) const;
    int64_t following(int64_t first) const;
    bool is_segmented(int peer, int64_t nbytes) const { return segment_bytes_ && nbytes > max_whole_ && remote_.count(peer); }

    const MpiLibrary library_;
    const uintptr_t messages_, segments_, control_;
    const Segmentation segmentation_;
    const int64_t segment_bytes_, max_whole_;
    std::set<int> remote_;
    std::map<int, Rate> rates_;
    std::map<std::pair<int, int64_t>, SegmentedReceive *> latest_;  // the last segmented message that has not arrived
    struct Control;
    std::deque<Control *> control_sends_;
};

}  // namespace gpucomp
