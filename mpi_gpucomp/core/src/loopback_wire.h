// Many ranks in one process: messages are copied between their buffers.
//
// A send completes when the message has been received, as in a network's rendezvous protocol, or at once if it has at
// most `eager` bytes. Programs that rely on more buffering than a network guarantees deadlock here too. For tests a
// network delays messages at random, limits bandwidths, or loses a rank.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <tuple>

#include "wire.h"

namespace gpucomp {

struct LoopbackMessage;
struct LoopbackReceive;

class LoopbackNetwork {
  public:
    LoopbackNetwork(int size, int64_t eager, int delay, uint64_t seed);
    ~LoopbackNetwork();

    void set_rate(int sender, int receiver, double bytes_per_second);  // 0: as fast as memory
    void lose(int rank);
    int64_t left();  // messages, receives and control messages in flight

  private:
    friend class LoopbackWire;
    using Key = std::tuple<int, int, int64_t>;  // sender, receiver, tag

    struct Queue {
        std::deque<LoopbackMessage *> messages;
        std::deque<LoopbackReceive *> posted;
    };

    void match(const Key &key, Queue &queue);
    void ring(int rank);

    std::mutex lock_;
    const int size_;
    const int64_t eager_;
    const int delay_;
    std::mt19937_64 random_;
    std::map<Key, Queue> queues_;
    std::vector<std::deque<std::pair<int, std::vector<uint8_t>>>> control_;
    std::vector<int> bells_;
    std::map<std::pair<int, int>, double> rates_;
    std::map<std::pair<int, int>, int64_t> free_at_;
    int lost_ = -1;
};

class LoopbackWire : public Wire {
  public:
    LoopbackWire(LoopbackNetwork &network, int rank);

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override;
    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override;
    bool test(Transfer *transfer) override;
    bool cancel(Transfer *receive) override;
    void release(Transfer *transfer) override;
    int64_t probe_any() override;
    Transfer *discard(int peer, int64_t tag) override;
    void send_control(int peer, const void *data, size_t nbytes) override;
    bool recv_control(int *peer, std::vector<uint8_t> *message) override;
    bool poll() override;
    int fd() const override;

    int64_t poll_within() const override { return network_.delay_ || !network_.rates_.empty() ? 100'000 : -1; }

  private:
    LoopbackNetwork &network_;
};

}  // namespace gpucomp
