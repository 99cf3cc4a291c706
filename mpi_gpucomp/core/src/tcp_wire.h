// The wire over TCP sockets: several paths to each peer, with failover between them.
//
// Each path is a socket on one rail; a rail may have several (stripes). The ranks connect, authenticate and reconnect
// in Python, which hands the connected sockets to the wire and learns from it which paths were lost. Both sides
// exchange commands and events in queues of their own, without the lock of the context.
//
// Packets are sent from the callers' memory and received into it: the kernel's copies are the only ones, but for what
// follows a header in the read buffer of a path.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tcp_link.h"
#include "wire.h"

namespace gpucomp {

class TcpWire;

struct TcpSettings {
    std::vector<std::vector<int>> tiers;  // numbers of rails that are used together, the preferred ones first
    std::vector<std::string> names;       // of the rails, as given by the user
    std::vector<std::string> devices;     // their network devices; empty where the address suffices
    int stripes = 1;                      // sockets of each rail and peer
    int64_t timeout = 1000000000;         // silence after which a path is dead
    int64_t limit = 30000000000;          // time without a path after which a peer has failed
};

// A socket to a peer.
class TcpPath : public Path {
  public:
    TcpPath(PathId path_id, Link *its_link, TcpWire *wire, int fd);
    ~TcpPath() override;

    void wake() override;
    int64_t last_seen(int64_t when) override;
    bool is_bridged() const override { return bridged_; }
    std::string fault() override;
    void close() override;

    // Send a batch; return true if there may be more to send now.
    bool flush();
    void on_ready(uint32_t events);
    bool is_open() const { return fd_ >= 0; }

    // Return why the path cannot be used from the start; empty: it can.
    const std::string &unusable() const { return unusable_; }

    bool queued = false;  // for a flush

  private:
    static constexpr size_t READ_BUFFER = 1024;  // for headers and short packets

    void watch(bool writing);
    bool fill_batch();
    void advance(size_t count);
    bool read();
    void consume();
    bool begin_packet();
    void end_packet();
    void on_payload(size_t count);

    TcpWire *const wire_;
    int fd_;
    int64_t last_seen_;
    std::string unusable_;
    bool bridged_ = false;  // a local socket, whose bytes the control side carries on
    bool blocked_ = false;
    std::deque<Packet> batch_;
    size_t sent_ = 0;  // bytes of the first packet of the batch
    std::array<uint8_t, READ_BUFFER> buffer_;
    size_t first_ = 0, last_ = 0;  // what is in the read buffer
    bool in_payload_ = false;
    PacketHeader header_;
    Landing landing_;
    size_t got_ = 0;  // bytes of the payload
};

// What Python is informed of.
struct TcpEvent {
    enum Kind : int32_t { PATH_DOWN = 1, PEER_LEFT = 2 };

    int32_t kind, peer, stripe;  // stripes are numbered over all rails
    uint64_t generation;
    std::string reason;
};

class TcpWire : public Wire {
  public:
    TcpWire(int its_rank, int its_size, TcpSettings settings);
    ~TcpWire() override;

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override;
    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override;
    Transfer *relay(Transfer *received, int peer, int64_t tag) override;
    bool test(Transfer *transfer) override;
    bool begun(Transfer *transfer) override;
    bool cancel(Transfer *receive) override;
    void release(Transfer *transfer) override;
    int64_t probe_any() override;
    Transfer *discard(int peer, int64_t tag) override;
    void send_control(int peer, const void *data, size_t nbytes) override;
    bool recv_control(int *peer, std::vector<uint8_t> *message) override;
    bool poll() override;
    int fd() const override { return epoll_; }
    bool arm() override;
    int64_t poll_within() const override;
    void revoke(const std::string &why) override;
    void close(bool abandon) override;
    bool closed() override;

    // The control side; these may be called by any thread at any time.

    // Hand over a connected and authenticated socket.
    void add_path(int peer, int stripe, uint64_t generation, int fd);

    // Break a path.
    void drop_path(int peer, int stripe, const std::string &reason);

    // Report a sign of life of a path that is bridged: its socket knows nothing of the network.
    void seen(int peer, int stripe);

    // Report that a peer cannot be reached any more.
    void fail(const std::string &text);

    // Return the descriptor that is readable while there are events.
    int event_fd() const { return event_fd_; }
    bool next_event(TcpEvent *event);

    // The state at the end of the last `poll`.
    struct Snapshot {
        std::vector<std::vector<uint8_t>> in_use, down;  // by peer and rail
        std::vector<Failover> failovers;
    };
    Snapshot snapshot();
    const Copies &copies() const { return matcher_.copies; }

    // Called by the paths.
    void schedule(TcpPath *path);
    void flush();
    void bury(TcpPath *path) { dead_.push_back(path); }
    bool has_carrier(int rail) const { return carriers_[rail]; }
    int64_t sign_of_life(int peer, int stripe) const;

    const TcpSettings settings;
    const int epoll_;
    bool moved = false;                     // since `poll` began
    std::array<uint8_t, 1 << 16> discarded;  // payloads of duplicates

  private:
    struct Command {
        enum Kind { ADD_PATH, DROP_PATH, FAIL } kind;
        int peer, stripe;
        uint64_t generation;
        int fd;
        std::string text;
    };

    void command(Command command);
    void run_commands();
    void use_socket(const Command &command);
    void add_event(TcpEvent event);
    void tick(int64_t when);
    void check_carriers();
    void check_peer(Link *link, int64_t when);
    void lose(const std::string &text);
    void publish();
    void free_dead();
    void shut();
    Link *link_of(int peer) const { return links_[peer].get(); }
    size_t index_of(int peer, int stripe) const;

    Matcher matcher_;
    std::vector<std::unique_ptr<Link>> links_;
    std::deque<TcpPath *> dirty_;
    std::vector<TcpPath *> dead_;
    bool flushing_ = false;
    std::vector<uint8_t> carriers_;  // by rail
    std::vector<uint8_t> left_;      // by peer: reported as left
    std::vector<std::atomic<int64_t>> signs_of_life_;  // by peer and stripe
    const int query_socket_, command_fd_, event_fd_;
    int64_t tick_period_, next_tick_, next_recall_ = 0;
    bool leaving_ = false, closed_ = false;
    int64_t deadline_ = 0;
    uint64_t published_changes_ = ~uint64_t{0};

    std::mutex control_mutex_;  // of what follows
    std::vector<Command> commands_;
    std::deque<TcpEvent> events_;
    Snapshot snapshot_;
    bool is_shut_ = false;
};

}  // namespace gpucomp
