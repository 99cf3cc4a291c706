#include "faulty_wire.h"

#include <signal.h>
#include <unistd.h>

namespace gpucomp {
namespace {

// A message that never leaves.
struct LostMessage : Transfer {};

}  // namespace

FaultyWire::FaultyWire(Wire *inner) : inner_(inner) {
    rank = inner->rank;
    size = inner->size;
    largest_tag = inner->largest_tag;
}

void FaultyWire::damage(int64_t at, Damage how, uint64_t seed) {
    targets_.clear();
    left_ = at;
    how_ = how;
    random_.seed(seed);
    damaged_peer_ = -1;
    last_.clear();
}

void FaultyWire::signal_after(int64_t messages, int signal) {
    until_signal_ = messages;
    signal_ = signal;
}

void FaultyWire::count() {
    if (until_signal_ > 0 && --until_signal_ == 0) kill(getpid(), signal_);
}

// Return true if a message may have to be damaged.
bool FaultyWire::is_target(int peer, int64_t tag) const {
    if (damaged_peer_ >= 0) return false;
    for (const auto &[wanted, first] : targets_)
        if ((wanted < 0 || wanted == peer) && tag >= first && tag <= first + 7) return true;
    return false;
}

void FaultyWire::mirror() {
    if (inner_->fault.mpi_error || !inner_->fault.text.empty()) fault = inner_->fault;
    bytes_sent = inner_->bytes_sent;
    bytes_received = inner_->bytes_received;
}

bool FaultyWire::damaged(int peer, int64_t tag, const uint8_t *data, int64_t nbytes, std::vector<uint8_t> *changed) {
    if (!is_target(peer, tag)) return false;
    std::vector<uint8_t> bytes(data, data + nbytes);
    std::vector<uint8_t> &last = last_[{peer, tag}];
    const std::vector<uint8_t> before = last;
    last = bytes;
    if (left_ > 0 || (how_ == REPEAT ? before.empty() : how_ != LOSE && !nbytes)) {
        left_ -= left_ > 0;
        return false;
    }
    damaged_peer_ = peer;
    if (how_ == REPEAT)
        bytes = before;
    else if (how_ == CUT)
        bytes.resize(random_() % (uint64_t)nbytes);
    else if (how_ == FLIP)
        bytes[random_() % (uint64_t)nbytes] ^= (uint8_t)(1u << random_() % 8);
    *changed = std::move(bytes);
    return true;
}

Transfer *FaultyWire::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    count();
    std::vector<uint8_t> changed;
    Transfer *transfer;
    if (!damaged(peer, tag, (const uint8_t *)data, nbytes, &changed)) {
        transfer = inner_->send(peer, tag, data, nbytes);
    } else if (how_ == LOSE) {
        transfer = new LostMessage;
        transfer->is_send = true;
        transfer->state = Transfer::DONE;
    } else {
        kept_.push_back(std::move(changed));
        transfer = inner_->send(peer, tag, kept_.back().data(), (int64_t)kept_.back().size());
    }
    mirror();
    return transfer;
}

Transfer *FaultyWire::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    count();
    return inner_->receive(peer, tag, data, capacity);
}

Transfer *FaultyWire::relay(Transfer *received, int peer, int64_t tag) {
    // A message that may have to be damaged is sent from here.
    return is_target(peer, tag) ? nullptr : inner_->relay(received, peer, tag);
}

bool FaultyWire::test(Transfer *transfer) {
    if (dynamic_cast<LostMessage *>(transfer)) return true;
    const bool done = inner_->test(transfer);
    mirror();
    return done;
}

bool FaultyWire::begun(Transfer *transfer) {
    const bool found = inner_->begun(transfer);
    mirror();
    return found;
}

bool FaultyWire::cancel(Transfer *receive) {
    const bool done = inner_->cancel(receive);
    mirror();
    return done;
}

void FaultyWire::release(Transfer *transfer) {
    if (dynamic_cast<LostMessage *>(transfer))
        delete transfer;
    else
        inner_->release(transfer);
}

bool FaultyWire::poll() {
    const bool moved = inner_->poll();
    mirror();
    return moved;
}

}  // namespace gpucomp
