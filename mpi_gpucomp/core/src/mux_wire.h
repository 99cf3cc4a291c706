// Two wires as one: peers on this host are reached over the near one, the others over the far one.
//
// Control messages go over the far wire to all peers, so that a rank with nothing in flight on the near one can sleep on
// the descriptor of the far one.
#pragma once

#include "wire.h"

namespace gpucomp {

class MuxWire : public Wire {
  public:
    // Owns both wires; `near_peers` are ranks.
    MuxWire(Wire *near, Wire *far, const int32_t *near_peers, int count);
    ~MuxWire() override;

    Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) override;
    Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) override;
    Transfer *relay(Transfer *received, int peer, int64_t tag) override;
    bool test(Transfer *transfer) override;
    bool begun(Transfer *transfer) override { return wire_of(transfer->peer)->begun(transfer); }
    bool cancel(Transfer *receive) override;
    void release(Transfer *transfer) override;
    int64_t probe_any() override;
    Transfer *discard(int peer, int64_t tag) override;
    void send_control(int peer, const void *data, size_t nbytes) override { far_->send_control(peer, data, nbytes); }
    bool recv_control(int *peer, std::vector<uint8_t> *message) override { return far_->recv_control(peer, message); }
    bool interleaves() const override { return near_->interleaves() && near_in_flight_; }
    bool poll() override;
    int fd() const override { return far_->fd(); }
    bool arm() override { return far_->arm(); }
    int64_t poll_within() const override;
    void revoke(const std::string &why) override;
    void close(bool abandon) override;
    bool closed() override;

  private:
    Wire *wire_of(int peer) const { return is_near_[peer] ? near_ : far_; }
    Transfer *count(Transfer *transfer);
    void mirror();

    Wire *const near_, *const far_;
    std::vector<bool> is_near_;
    int64_t near_in_flight_ = 0;  // transfers that have not been released or cancelled
};

}  // namespace gpucomp
