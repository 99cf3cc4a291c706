// A link: all packets to and from one peer, on the paths that exist. No I/O.
//
// Paths are ordered in tiers: those of the first tier with a live path carry the traffic, the others stand by. A broken
// path is closed by both ends, which exchange their state over another path, or over the next one. A path may need time
// to close, until it neither writes to the callers' memory nor reads from it; it is not reported as closed before. A
// path of a better tier is used from the next message on: packets already posted stay on their paths.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tcp_match.h"
#include "tcp_sequence.h"

namespace gpucomp {

enum class Liveness { ALIVE, SUSPECT, DEAD };

// Return what a silence means; SUSPECT: probe now.
//
// A probe that reaches the peer's kernel is a sign of life, whatever the peer's process does. One that does not get
// there in time means that the path is dead, and not that the peer has nothing to send.
Liveness check_liveness(int64_t when, int64_t last_seen, int64_t probed, int64_t timeout, bool busy);

// A path that was lost, and the time it cost, in nanoseconds.
struct Failover {
    int peer, rail;
    std::string reason;
    int64_t silence;        // from the last sign of life to the detection
    int64_t downtime = -1;  // from the last sign of life until both ends had resynchronised; -1: they have not yet
    uint64_t generation;
    int64_t last_seen;
};

// A packet that a path sends now.
struct Packet {
    PacketHeader header;
    const uint8_t *payload = nullptr;
    Bytes owned;  // the payload of a packet out of sequence
};

class Link;

// One connection to a peer on one rail, ordered and reliable while it lasts. It takes packets to send from its link,
// and hands it those that arrive.
class Path {
  public:
    const PathId id;
    Link *const link;
    std::deque<Outgoing> urgent;  // packets out of sequence, which are sent first
    int64_t probed = 0;           // when it was probed last
    int64_t since;                // when it was made

    Path(PathId path_id, Link *its_link) : id(path_id), link(its_link), since(now()) {}
    virtual ~Path() = default;

    // Send a packet out of sequence as soon as possible.
    void send_urgent(PacketKind kind, Bytes payload = {});

    // Schedule a flush: the link has packets to send.
    virtual void wake() = 0;

    // Return the time of the last sign of life.
    virtual int64_t last_seen(int64_t when) = 0;

    // Return true if the control side finds out whether the path is dead.
    virtual bool is_bridged() const { return false; }

    // Return why this end cannot use the path, if it knows: the device has no carrier.
    virtual std::string fault() = 0;

    // Close the connection, deliver nothing more, and call `Link::on_closed` once, now or later: when the callers'
    // memory cannot be written or read any more.
    virtual void close() = 0;

    // Progress a close that has not completed; called periodically.
    virtual void poll_close() {}
};

// The packets to and from one peer.
class Link {
  public:
    // `tiers` are rail numbers, the preferred ones first.
    Link(int peer, std::vector<std::vector<int>> tiers, Matcher *matcher, int64_t timeout);

    const int peer;
    std::map<int, Path *> paths;          // by rail
    std::vector<uint64_t> abandoned;      // for each rail, the last generation that was given up
    std::map<Path *, int64_t> closing;    // paths that were given up and have not closed yet, and since when
    int64_t disconnected_since;           // since when there is no path, if there is none
    bool peer_left = false;
    std::vector<Failover> failovers;
    std::function<void(int rail, uint64_t generation, const std::string &why)> on_path_down;

    // Sending

    // Send a packet in sequence, ahead of the segments of messages.
    void post(Outgoing item);

    // Schedule a flush of the paths in use.
    void wake();

    // Return the next packet for a path to send; false if there is none.
    bool next_packet(Path *path, Packet *packet);

    // Return true if anything is queued, unacked or expected.
    bool busy() const;

    // Return true if everything posted has arrived.
    bool all_acked() const { return queue_.empty() && sender_.all_acked(); }

    // Receiving

    // Choose where the payload of a packet goes that begins to arrive; false: the packet is malformed.
    bool accept(Path *path, const PacketHeader &header, Landing *landing);

    // The first `nbytes` of a payload have arrived, and will not change.
    void on_progress(Path *path, const PacketHeader &header, const Landing &landing, int64_t nbytes);

    // Handle a packet that has arrived.
    void on_packet(Path *path, const PacketHeader &header, Landing *landing);

    // Acknowledge what has arrived, unless a packet sent meanwhile has done so: at once if a sender waits for it or
    // keeps much memory until then, and `always` if it has waited for some time.
    void send_ack(Path *path, bool always);

    // Paths

    // Use a new path; an existing one on its rail is older and is dropped.
    void add_path(Path *path);

    // Give a path up; the peer is informed when it has closed.
    void drop_path(Path *path, const std::string &reason);

    // A path has closed: report our state on all paths, and continue with its packets.
    void on_closed(Path *path);

    // Close all paths; `closing` has those that have not closed yet.
    void close();

    // Use the best tier with a live path; paths that replace broken ones must be stable first.
    void select_rails();

    // Probe silent paths, drop dead ones, and acknowledge what has not been acknowledged yet.
    void check_paths(int64_t when);

    // For each rail, the last generation up to which all paths have closed.
    std::vector<uint64_t> closed() const;

    const std::set<int> &in_use() const { return in_use_; }

    // Return the rails without a path, and those of the first tier that are not in use.
    std::set<int> down() const;

  private:
    void fill_header(PacketHeader *header, uint64_t sequence);
    void on_urgent(Path *path, const PacketHeader &header, const Landing &landing);
    void deliver(Ordered ordered);
    void resume(const AckState &state);
    void on_acked();
    void close_path(Path *path, int64_t when);
    void report_state(Path *path);
    void resolve_failovers();
    bool is_stable(const Path *path) const;
    std::set<int> best_tier(const std::set<int> &rails) const;

    const std::vector<std::vector<int>> tiers_;
    Matcher *const matcher_;
    const int64_t timeout_;
    SendSequence sender_;
    ReceiveSequence receiver_;
    std::deque<Outgoing> queue_;
    std::set<int> in_use_;
    uint64_t last_acked_ = 0;    // the last acknowledgement sent to the peer
    bool ack_awaited_ = false;   // by a sender at the peer
    int64_t unacked_bytes_ = 0;  // payload that has arrived since
    std::vector<uint64_t> peer_closed_;
    std::vector<Outgoing> released_;
    std::vector<Ordered> ready_;
};

}  // namespace gpucomp
