// A wire with faults, for tests: damages or loses a message, and signals the process at a certain message.
#pragma once

#include <map>
#include <random>

#include "wire.h"

namespace gpucomp {

class FaultyWire : public Wire {
  public:
    enum Damage { FLIP = 0, CUT = 1, REPEAT = 2, LOSE = 3 };

    explicit FaultyWire(Wire *inner);
    ~FaultyWire() override { delete inner_; }

    // Damage message number `at` of those that are sent to a target, or a later one if that cannot be.
    void damage(int64_t at, Damage how, uint64_t seed);
    // A target: a peer (-1: any) and the eight tags from `tag` on.
    void add_target(int peer, int64_t tag) { targets_.push_back({peer, tag}); }
    int damaged_peer() const { return damaged_peer_; }

    // Signal the process at the n-th message from now on that is sent or received.
    void signal_after(int64_t messages, int signal);

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override;
    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override;
    Transfer *relay(Transfer *received, int peer, int64_t tag) override;
    bool test(Transfer *transfer) override;
    bool begun(Transfer *transfer) override;
    bool cancel(Transfer *receive) override;
    void release(Transfer *transfer) override;
    int64_t probe_any() override { return inner_->probe_any(); }
    Transfer *discard(int peer, int64_t tag) override { return inner_->discard(peer, tag); }
    void send_control(int peer, const void *data, size_t nbytes) override { inner_->send_control(peer, data, nbytes); }
    bool recv_control(int *peer, std::vector<uint8_t> *message) override { return inner_->recv_control(peer, message); }
    bool interleaves() const override { return inner_->interleaves(); }
    bool poll() override;
    int fd() const override { return inner_->fd(); }
    bool arm() override { return inner_->arm(); }
    int64_t poll_within() const override { return inner_->poll_within(); }
    void revoke(const std::string &why) override { inner_->revoke(why); }
    void close(bool abandon) override { inner_->close(abandon); }
    bool closed() override { return inner_->closed(); }

  private:
    void count();
    bool is_target(int peer, int64_t tag) const;
    void mirror();
    bool damaged(int peer, int64_t tag, const uint8_t *data, int64_t nbytes, std::vector<uint8_t> *changed);

    Wire *inner_;
    std::vector<std::pair<int, int64_t>> targets_;
    int64_t left_ = 0, until_signal_ = 0;
    int damaged_peer_ = -1, signal_ = 0;
    Damage how_ = FLIP;
    std::mt19937_64 random_;
    std::map<std::pair<int, int64_t>, std::vector<uint8_t>> last_;
    std::vector<std::vector<uint8_t>> kept_;  // damaged messages, which the wire may still read
};

}  // namespace gpucomp
