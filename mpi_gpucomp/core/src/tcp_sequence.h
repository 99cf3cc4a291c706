// The packets of a link, and the sequence numbers of both ends. No I/O.
//
// A packet is a fixed header and a payload. Most kinds have a number in the link's sequence and arrive exactly once,
// however often paths break. The others concern the path itself or the acknowledgements, and are lost with the path.
//
// A link has one sequence of packets each way, over whatever paths. The sender's state is posted >= transmitted >=
// acked; it keeps what is not acked. The receiver's is received >= delivered: it has all packets below `delivered`.
// A path that breaks loses what was in flight on it. The sender does not guess what that was: it waits until the
// receiver has closed that path too and reports its `AckState`. Packets that the receiver does not have are
// retransmitted, once the path has released the memory they were sent from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace gpucomp {

using Bytes = std::vector<uint8_t>;

struct SendTransfer;

enum PacketKind : uint8_t {
    // In sequence: a segment of a message; an announced message; credit for a message, its recall and the answer;
    // a control message; end; failure.
    DATA = 1,
    RTS,
    READY,
    WITHDRAW,
    WITHDRAWN,
    CONTROL,
    BYE,
    ABORT,
    // Out of sequence: an acknowledgement, a liveness probe, the receiver's state after a path was lost.
    ACK,
    PING,
    STATE,
};

constexpr uint32_t MAX_PAYLOAD_BYTES = 1u << 30;  // a header with a longer payload is malformed

// The header of a packet, in the byte order of the hosts: little endian.
struct PacketHeader {
    uint8_t kind = 0;
    uint8_t credited = 0;  // of DATA: 1 if the message uses a credit
    uint16_t check = 0;     // of all other fields
    uint32_t length = 0;  // bytes of the payload
    uint64_t sequence = 0;
    uint64_t acked = 0;  // every packet of the peer below this number has arrived
    int64_t tag = 0;
    uint64_t number = 0;  // of the message, among all from this rank to the peer; of WITHDRAW and its answer: credits
    uint64_t prior = 0;   // the message before it with this tag; 0 if the peer is known to have all of them
    int64_t offset = 0;   // of the payload in the message
    int64_t total = 0;    // bytes of the message

    bool in_sequence() const { return kind <= ABORT; }
    uint16_t checksum() const;
    bool malformed() const;
};
static_assert(sizeof(PacketHeader) == 64, "the header has no padding");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the header is sent as it is in memory");

// A packet to be sent in sequence, kept until the peer has acked it.
struct Outgoing {
    PacketHeader header;            // without sequence and acked
    const uint8_t *data = nullptr;  // the caller's memory, or that of `owned`
    Bytes owned;
    SendTransfer *owner = nullptr;  // the transfer that is notified of the ack

    Outgoing() = default;
    Outgoing(Outgoing &&) = default;
    Outgoing &operator=(Outgoing &&) = default;
    static Outgoing with_payload(PacketKind kind, Bytes payload);
};

// A path: its rail, and its generation (the number of paths so far) on that rail.
struct PathId {
    int rail = 0;
    uint64_t generation = 0;

    bool operator==(const PathId &other) const { return rail == other.rail && generation == other.generation; }
};

// What a receiver has, once it has closed all paths of each rail up to a generation.
struct AckState {
    uint64_t delivered = 0;
    std::vector<uint64_t> closed;        // for each rail, the last generation that is closed
    std::vector<uint64_t> out_of_order;  // packets that have arrived ahead of a missing one

    Bytes pack() const;
    static std::optional<AckState> unpack(const Bytes &data, size_t rails);
};

// The sender's end of a sequence, and the packets it keeps.
class SendSequence {
  public:
    uint64_t posted = 0, transmitted = 0, acked = 0;

    void post(Outgoing item);

    // Return the next packet for a path to send, retransmissions first; nullptr: none.
    const Outgoing *take(const PathId &path, uint64_t *number);

    // Release the packets that have arrived, up to the first that a closing path may still read.
    void ack(uint64_t delivered, std::vector<Outgoing> *released);

    // Queue retransmissions for the paths that the receiver has closed.
    void resume(const AckState &state, std::vector<Outgoing> *released);

    // Keep the packets of a closing path until it is released.
    void hold(const PathId &path);
    void release(const PathId &path, std::vector<Outgoing> *released);

    bool all_acked() const { return acked == posted; }

  private:
    struct Entry {
        Outgoing item;
        PathId path;
        bool carried = false;  // by `path`, and neither known to have arrived nor queued again
    };
    struct Held {
        PathId path;
        std::optional<AckState> state;  // the receiver's state for this path, once it has been reported
    };

    bool is_held(const Entry &entry) const;

    std::deque<Entry> kept_;  // from number `acked` on
    std::set<uint64_t> retransmit_;
    std::vector<Held> held_;
    uint64_t delivered_ = 0;  // what the receiver is known to have delivered
};

// A packet that is delivered in order.
struct Ordered {
    PacketKind kind;
    Bytes payload;
};

// The receiver's end of a sequence, and the packets that have arrived out of order.
class ReceiveSequence {
  public:
    uint64_t received = 0, delivered = 0;

    // Accept a packet that begins to arrive; return false for a duplicate.
    bool begin(uint64_t number, const PathId &path);

    // Take a packet that has arrived; append those that are now in order (packets without a place in it aside).
    void finish(uint64_t number, std::optional<Ordered> item, std::vector<Ordered> *ready);

    // Forget the packets that had only begun to arrive on a lost path.
    void drop_partial(const PathId &path);

    AckState state(std::vector<uint64_t> closed) const;

  private:
    std::map<uint64_t, std::optional<Ordered>> out_of_order_;
    std::map<uint64_t, PathId> arriving_;
};

}  // namespace gpucomp
