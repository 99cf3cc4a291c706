#include "loopback_wire.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace gpucomp {

struct LoopbackMessage : Transfer {
    std::vector<uint8_t> copy;  // of an eager message
    bool is_copy = false, detached = false;
    int waits = 0;
    int64_t arrives = 0;

    const uint8_t *bytes() const { return is_copy ? copy.data() : data; }
};

struct LoopbackReceive : Transfer {
    std::vector<uint8_t> memory;  // of a message that is dropped
    int64_t received = 0;
};

LoopbackNetwork::LoopbackNetwork(int size, int64_t eager, int delay, uint64_t seed)
    : size_(size), eager_(eager), delay_(delay), random_(seed), control_(size) {
    for (int rank = 0; rank < size; ++rank) bells_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
}

LoopbackNetwork::~LoopbackNetwork() {
    for (int bell : bells_) close(bell);
    for (const auto &[key, queue] : queues_)
        for (LoopbackMessage *message : queue.messages)
            if (message->detached) delete message;
}

void LoopbackNetwork::set_rate(int sender, int receiver, double bytes_per_second) {
    std::lock_guard<std::mutex> guard(lock_);
    rates_[{sender, receiver}] = bytes_per_second;
}

void LoopbackNetwork::lose(int rank) {
    std::lock_guard<std::mutex> guard(lock_);
    lost_ = rank;
    for (int other = 0; other < size_; ++other) ring(other);
}

int64_t LoopbackNetwork::left() {
    std::lock_guard<std::mutex> guard(lock_);
    int64_t count = 0;
    for (const auto &[key, queue] : queues_) count += (int64_t)(queue.messages.size() + queue.posted.size());
    for (const auto &messages : control_) count += (int64_t)messages.size();
    return count;
}

void LoopbackNetwork::ring(int rank) {
    const uint64_t one = 1;
    if (write(bells_[rank], &one, sizeof one) < 0) return;  // it is ringing already
}

// Match sends with posted receives, in order.
void LoopbackNetwork::match(const Key &key, Queue &queue) {
    while (!queue.messages.empty() && !queue.posted.empty()) {
        LoopbackMessage *message = queue.messages.front();
        if (message->waits > 0 || (message->arrives && now() < message->arrives)) return;
        LoopbackReceive *receive = queue.posted.front();
        queue.messages.pop_front();
        queue.posted.pop_front();
        receive->nbytes = receive->arrived = message->nbytes;
        if (message->nbytes > receive->capacity) {
            receive->error = "a message of " + std::to_string(message->nbytes) + " bytes for a buffer of " +
                             std::to_string(receive->capacity);
            receive->state = Transfer::FAILED;
        } else {
            if (message->nbytes) memcpy(receive->data, message->bytes(), (size_t)message->nbytes);
            receive->state = Transfer::DONE;
        }
        message->state = Transfer::DONE;
        if (message->detached) delete message;
        ring(std::get<0>(key));
        ring(std::get<1>(key));
    }
}

LoopbackWire::LoopbackWire(LoopbackNetwork &network, int own) : network_(network) {
    rank = own;
    size = network.size_;
    largest_tag = (1LL << 31) - 1;
}

Transfer *LoopbackWire::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    const LoopbackNetwork::Key key{rank, peer, tag};
    auto *message = new LoopbackMessage;
    message->is_send = true;
    message->peer = peer;
    message->tag = tag;
    message->data = (uint8_t *)data;
    message->nbytes = nbytes;
    if (nbytes <= network_.eager_) {
        message->copy.assign((const uint8_t *)data, (const uint8_t *)data + nbytes);
        message->is_copy = true;
    }
    if (nbytes <= network_.eager_) message->state = Transfer::DONE;
    if (network_.delay_) message->waits = (int)(network_.random_() % (uint64_t)(network_.delay_ + 1));
    const auto rate = network_.rates_.find({rank, peer});
    if (rate != network_.rates_.end()) {
        int64_t &free_at = network_.free_at_[{rank, peer}];
        free_at = std::max(now(), free_at) + (int64_t)((double)nbytes * 1e9 / rate->second);
        message->arrives = free_at;
    }
    bytes_sent += nbytes;
    LoopbackNetwork::Queue &queue = network_.queues_[key];
    queue.messages.push_back(message);
    network_.match(key, queue);
    network_.ring(peer);
    return message;
}

Transfer *LoopbackWire::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    const LoopbackNetwork::Key key{peer, rank, tag};
    auto *receive = new LoopbackReceive;
    receive->peer = peer;
    receive->tag = tag;
    receive->data = (uint8_t *)data;
    receive->capacity = capacity;
    LoopbackNetwork::Queue &queue = network_.queues_[key];
    queue.posted.push_back(receive);
    network_.match(key, queue);
    return receive;
}

bool LoopbackWire::test(Transfer *transfer) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    if (transfer->state == Transfer::PENDING) return false;
    if (!transfer->is_send) {
        auto *receive = (LoopbackReceive *)transfer;
        bytes_received += receive->nbytes - receive->received;
        receive->received = receive->nbytes;
    }
    return true;
}

bool LoopbackWire::cancel(Transfer *transfer) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    if (transfer->state != Transfer::PENDING) return false;
    auto &posted = network_.queues_[{transfer->peer, rank, transfer->tag}].posted;
    for (auto at = posted.begin(); at != posted.end(); ++at) {
        if (*at != transfer) continue;
        posted.erase(at);
        delete transfer;
        return true;
    }
    return false;
}

void LoopbackWire::release(Transfer *transfer) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    if (transfer->is_send) {
        auto *message = (LoopbackMessage *)transfer;
        for (LoopbackMessage *queued : network_.queues_[{rank, transfer->peer, transfer->tag}].messages)
            if (queued == message) {  // an eager message that the peer has not received yet
                message->detached = true;
                return;
            }
    }
    delete transfer;
}

int64_t LoopbackWire::probe_any() {
    std::lock_guard<std::mutex> guard(network_.lock_);
    for (const auto &[key, queue] : network_.queues_)
        if (std::get<1>(key) == rank && queue.messages.size() > queue.posted.size()) return std::get<2>(key);
    return -1;
}

Transfer *LoopbackWire::discard(int peer, int64_t tag) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    const LoopbackNetwork::Key key{peer, rank, tag};
    LoopbackNetwork::Queue &queue = network_.queues_[key];
    if (queue.messages.size() <= queue.posted.size()) return nullptr;
    auto *receive = new LoopbackReceive;
    receive->peer = peer;
    receive->tag = tag;
    receive->capacity = queue.messages[queue.posted.size()]->nbytes;
    receive->memory.resize((size_t)receive->capacity + 1);
    receive->data = receive->memory.data();
    queue.posted.push_back(receive);
    network_.match(key, queue);
    return receive;
}

void LoopbackWire::send_control(int peer, const void *data, size_t nbytes) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    network_.control_[peer].emplace_back(rank, std::vector<uint8_t>((const uint8_t *)data, (const uint8_t *)data + nbytes));
    network_.ring(peer);
}

bool LoopbackWire::recv_control(int *peer, std::vector<uint8_t> *message) {
    std::lock_guard<std::mutex> guard(network_.lock_);
    auto &waiting = network_.control_[rank];
    if (waiting.empty()) return false;
    *peer = waiting.front().first;
    *message = std::move(waiting.front().second);
    waiting.pop_front();
    return true;
}

bool LoopbackWire::poll() {
    std::lock_guard<std::mutex> guard(network_.lock_);
    uint64_t count;
    if (read(network_.bells_[rank], &count, sizeof count) < 0) count = 0;  // it was not ringing
    if (network_.lost_ >= 0 && network_.lost_ != rank && fault.text.empty())
        fault.text = "rank " + std::to_string(network_.lost_) + " has ended";
    if (network_.delay_ || !network_.rates_.empty()) {
        for (auto &[key, queue] : network_.queues_) {
            if (std::get<1>(key) != rank) continue;
            for (LoopbackMessage *message : queue.messages)
                if (message->waits > 0) --message->waits;
            network_.match(key, queue);
        }
    }
    return false;
}

int LoopbackWire::fd() const { return network_.bells_[rank]; }

}  // namespace gpucomp
