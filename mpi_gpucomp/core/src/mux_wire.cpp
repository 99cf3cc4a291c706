#include "mux_wire.h"

#include <algorithm>

namespace gpucomp {
namespace {

constexpr int64_t NEAR_NAP = 50'000;  // ns between polls of a near wire without a descriptor, while it is in use

}  // namespace

MuxWire::MuxWire(Wire *near, Wire *far, const int32_t *near_peers, int count)
    : near_(near), far_(far), is_near_((size_t)far->size) {
    for (int n = 0; n < count; ++n) is_near_[(size_t)near_peers[n]] = true;
    rank = far->rank;
    size = far->size;
    largest_tag = std::min(near->largest_tag, far->largest_tag);
}

MuxWire::~MuxWire() {
    delete near_;
    delete far_;
}

Transfer *MuxWire::count(Transfer *transfer) {
    if (transfer && is_near_[(size_t)transfer->peer]) ++near_in_flight_;
    return transfer;
}

Transfer *MuxWire::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    return count(wire_of(peer)->send(peer, tag, data, nbytes));
}

Transfer *MuxWire::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    return count(wire_of(peer)->receive(peer, tag, data, capacity));
}

Transfer *MuxWire::relay(Transfer *received, int peer, int64_t tag) {
    Wire *wire = wire_of(peer);
    return wire == wire_of(received->peer) ? count(wire->relay(received, peer, tag)) : nullptr;
}

bool MuxWire::test(Transfer *transfer) {
    const bool done = wire_of(transfer->peer)->test(transfer);
    if (near_->fault.mpi_error || done) mirror();
    return done;
}

bool MuxWire::cancel(Transfer *receive) {
    const bool near = is_near_[(size_t)receive->peer];
    if (!wire_of(receive->peer)->cancel(receive)) return false;
    near_in_flight_ -= near;
    return true;
}

void MuxWire::release(Transfer *transfer) {
    near_in_flight_ -= is_near_[(size_t)transfer->peer];
    wire_of(transfer->peer)->release(transfer);
}

int64_t MuxWire::probe_any() {
    const int64_t tag = far_->probe_any();
    return tag >= 0 ? tag : near_->probe_any();
}

Transfer *MuxWire::discard(int peer, int64_t tag) { return count(wire_of(peer)->discard(peer, tag)); }

void MuxWire::mirror() {
    for (const Wire *wire : {near_, far_})
        if (wire->fault.mpi_error || !wire->fault.text.empty()) fault = wire->fault;
    bytes_sent = near_->bytes_sent + far_->bytes_sent;
    bytes_received = near_->bytes_received + far_->bytes_received;
}

bool MuxWire::poll() {
    const bool near_moved = near_->poll(), far_moved = far_->poll();
    mirror();
    return near_moved || far_moved;
}

int64_t MuxWire::poll_within() const {
    const int64_t within = far_->poll_within();
    if (!near_in_flight_) return within;
    return within < 0 ? NEAR_NAP : std::min(within, NEAR_NAP);
}

void MuxWire::revoke(const std::string &why) {
    near_->revoke(why);
    far_->revoke(why);
}

void MuxWire::close(bool abandon) {
    near_->close(abandon);
    far_->close(abandon);
}

bool MuxWire::closed() {
    const bool near_closed = near_->closed(), far_closed = far_->closed();
    return near_closed && far_closed;
}

}  // namespace gpucomp
