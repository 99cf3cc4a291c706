// Messages between ranks, matched by peer and tag, in order. No I/O.
//
// A short message is sent at once, as a copy. A long one needs a credit for its tag: a receiver that posts a receive
// for long messages sends one (READY), so that the message leaves without a round trip. Without a credit the message
// is announced (RTS), and the receiver sends a credit once a receive has matched. Segments go from the sender's buffer
// into the receiver's without a copy in between. The credit of a cancelled receive stays with the sender; a message
// that uses it and finds no receive arrives in temporary memory, and is copied. Credits that are left over when no
// receive is posted are recalled after a while, so that no state of a tag outlives its messages.
//
// Messages from one rank to another are numbered. A message names the one before it with the same tag, so that it is
// matched in order although segments overtake each other on different paths.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tcp_sequence.h"
#include "wire.h"

namespace gpucomp {

class Link;
struct Message;
struct ReceiveTransfer;

// A transfer of the matcher, in the list of those that the caller has not released.
struct MatchedTransfer : Transfer {
    MatchedTransfer *previous = nullptr, *next = nullptr;
};

struct SendTransfer : MatchedTransfer {
    uint64_t number = 0, prior = 0;
    bool credited = false;
    int64_t sent = 0, acked = 0;
    ReceiveTransfer *source = nullptr;  // the message that is relayed, until it has arrived

    int64_t available() const;
};

struct ReceiveTransfer : MatchedTransfer {
    Message *message = nullptr;          // the message that has matched, until it has arrived
    std::vector<SendTransfer *> relays;  // sends that wait for its bytes
    std::shared_ptr<Bytes> owned;        // the memory of a discarded message
};

// A message that arrives, or has arrived and found no receive.
struct Message {
    int peer = -1;
    int64_t tag = 0;
    uint64_t number = 0, prior = 0;
    int64_t nbytes = 0;
    bool begun = false;                // its first bytes are here, or on their way into `memory`
    bool whole = false;                // all of it is here
    uint64_t order = 0;                // among the messages without a receive
    uint8_t *memory = nullptr;         // where it arrives
    std::shared_ptr<Bytes> temporary;  // this memory, where it is not the receive's
    int64_t left = 0;                  // bytes of segments that have not arrived completely
    int64_t arrived = 0;               // length of the prefix that has arrived, with those of incomplete segments
    std::map<int64_t, int64_t> ahead;  // segments that have arrived beyond this prefix: offset and end
    ReceiveTransfer *receive = nullptr;
    SendTransfer *local = nullptr;  // the send of a message to this rank itself, while its memory is in use
    int rail = 0;
};

// Where the payload of a packet goes.
struct Landing {
    uint8_t *data = nullptr;      // nullptr: discard it
    std::shared_ptr<Bytes> keep;  // what owns that memory, if it is not a receive's
    Message *message = nullptr;   // of a segment
};

// Copies of messages made within a rank, which any thread may read.
struct Copies {
    std::atomic<int64_t> times{0}, nbytes{0};
};

// A received control message; an ABORT carries the reason of a peer's failure.
struct ReceivedControl {
    int peer;
    bool is_abort;
    Bytes payload;
};

// The messages and control messages of one rank.
class Matcher {
  public:
    int64_t eager_bytes = 1 << 14;    // the longest message that is sent without a credit
    int64_t segment_bytes = 1 << 20;  // of longer messages
    int64_t relay_bytes = 1 << 14;    // the shortest segment of a relayed message, the last one aside
    int stripes = 1;                  // sockets of each rail: the links have as many paths for it

    std::vector<Link *> links;  // for each peer; nullptr for this rank itself
    std::deque<ReceivedControl> control;
    int64_t bytes_received = 0;
    Copies copies;
    uint64_t rail_changes = 0;  // counted by the links: rails in use, lost paths

    Matcher(int rank, int size);
    ~Matcher();
    Matcher(const Matcher &) = delete;
    Matcher &operator=(const Matcher &) = delete;

    // Called by the wire.
    SendTransfer *send(int peer, int64_t tag, const void *data, int64_t nbytes);
    ReceiveTransfer *receive(int peer, int64_t tag, void *data, int64_t capacity);
    SendTransfer *relay(ReceiveTransfer *received, int peer, int64_t tag);
    bool cancel(ReceiveTransfer *receive);
    ReceiveTransfer *discard(int peer, int64_t tag);
    int64_t probe_any() const;
    void release(MatchedTransfer *transfer);

    // Recall the credits that are left over for tags without a receive. Called periodically.
    void recall_credits();

    // Called by the links.

    // Return the next segment of a message that may leave; false if there is none.
    bool next_segment(int peer, int64_t longest, Outgoing *segment);

    // Choose the memory of a segment that begins to arrive; false if it contradicts what is known of its message.
    bool begin_segment(int peer, const PacketHeader &header, Landing *landing);

    // The first `nbytes` of a segment have arrived, and will not change.
    void on_progress(const PacketHeader &header, const Landing &landing, int64_t nbytes, int rail);

    // A segment has arrived; return true if its message is complete now.
    bool on_segment(const PacketHeader &header, const Landing &landing, int rail);

    // A packet in sequence other than a segment has arrived, in any order.
    void on_packet(int peer, const PacketHeader &header);

    void on_acked(int peer, const Outgoing &item);

    // Return true if a message is expected from a peer.
    bool is_receiving(int peer) const;

    // The number of tags for which something is kept, for tests.
    size_t tags_kept() const;

  private:
    // What a rank keeps of a tag towards a peer. It is dropped when both ends are back at the initial state.
    struct SendTag {
        int64_t credit = 0;
        uint64_t last = 0;    // the last message
        int64_t unacked = 0;  // messages
        std::deque<SendTransfer *> announced;
    };
    struct ReceiveTag {
        int64_t credit = 0;   // sent, and not yet used by a message that has arrived
        int64_t wanted = 0;   // needed by posted receives, and by announced messages that have matched
        int64_t recalls = 0;  // unanswered
        std::deque<ReceiveTransfer *> posted;
        std::deque<Message *> unexpected;
    };
    struct Peer {
        uint64_t sent = 0;  // messages so far
        std::deque<SendTransfer *> leaving;
        std::unordered_map<int64_t, SendTag> to;
        std::unordered_map<int64_t, ReceiveTag> from;
        std::set<int64_t> spare;  // tags whose credits may be left over
        uint64_t placed_below = 1;
        std::set<uint64_t> placed;  // messages from that number on that are placed
        std::unordered_map<uint64_t, Message *> arriving;
        std::map<uint64_t, Message *> parked;  // by the message they wait for
    };

    template <class T>
    T *track(T *transfer, int peer, int64_t tag, const void *data, int64_t capacity);
    void post(int peer, PacketKind kind, int64_t tag, uint64_t number);
    void announce_or_begin(SendTransfer *send);
    void begin(SendTransfer *send);
    void drop_if_idle(int peer, int64_t tag);
    Message *make_message(int peer, int64_t tag, uint64_t number, uint64_t prior, int64_t nbytes);
    bool is_placed(int peer, uint64_t number) const;
    void place(Message *message);
    void match(ReceiveTransfer *receive, Message *message);
    void send_credits(int peer, int64_t tag);
    void take_over(Message *message, uint8_t *memory);
    void add_arrived(Message *message, int64_t arrived);
    void complete(Message *message);
    void count_copy(int64_t nbytes);

    const int rank_;
    std::vector<Peer> peers_;
    std::map<uint64_t, Message *> unexpected_;  // of all peers and tags, in the order of their arrival
    uint64_t order_ = 0;
    MatchedTransfer head_;  // of the list of transfers
};

}  // namespace gpucomp
