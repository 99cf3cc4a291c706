// An MPI library of one process, for tests: just what `mpi_wire.cpp` calls, between ranks that are threads.
//
// A communicator is the address of an `Endpoint`, a request that of an `Operation`. Short messages are copied by their
// sender, long ones by their receiver. A completed request may be reported late, a cancelled one is not.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <tuple>
#include <vector>

#include "mpi_wire.h"

namespace fake_mpi {

constexpr int ANY = -1, NO_LONG_COUNTS = 2, TRUNCATED = 15, UNDEFINED = -32766;

struct Status {
    int source, tag;
    int64_t nbytes;
    int cancelled;
};

class Network;

struct Operation {
    Network *network = nullptr;
    bool done = false;
    void *data = nullptr;
    int64_t capacity = 0;
    Status status = {};
    std::vector<uint8_t> copy;  // of a short message
    const uint8_t *bytes = nullptr;
    bool detached = false;      // nothing refers to the sender's request any more
};

struct Endpoint {
    Network *network;
    int rank, context;  // a context per communicator
};

class Network {
  public:
    Network(int ranks, int64_t eager, int delay, uint64_t seed) : eager_(eager), delay_(delay), random_(seed) {
        for (int rank = 0; rank < ranks; ++rank)
            for (int context = 0; context < 3; ++context) endpoints_.push_back({this, rank, context});
    }

    uintptr_t endpoint(int rank, int context) { return (uintptr_t)&endpoints_[(size_t)(3 * rank + context)]; }

    int64_t left() {
        std::lock_guard<std::mutex> guard(lock_);
        int64_t count = 0;
        for (const auto &[key, queue] : queues_) count += (int64_t)(queue.sent.size() + queue.posted.size());
        return count;
    }

    // Long messages that match their receives from now on do not arrive until `let_go`.
    void hold() {
        std::lock_guard<std::mutex> guard(lock_);
        holds_ = true;
    }
    void let_go() {
        std::lock_guard<std::mutex> guard(lock_);
        holds_ = false;
        for (const auto &[message, operation] : held_) deliver(message, operation);
        held_.clear();
    }

    Operation *send(int rank, int context, const void *data, int64_t nbytes, int peer, int tag, bool synchronous) {
        std::lock_guard<std::mutex> guard(lock_);
        auto *operation = new Operation;
        operation->network = this;
        operation->status = {rank, tag, nbytes, 0};
        operation->bytes = (const uint8_t *)data;
        if (nbytes <= eager_) {
            operation->copy.assign(operation->bytes, operation->bytes + nbytes);
            operation->bytes = operation->copy.data();
            operation->done = !synchronous;
        }
        Queue &queue = queues_[{peer, rank, tag, context}];
        queue.sent.push_back(operation);
        match(queue);
        return operation;
    }

    Operation *receive(int rank, int context, void *data, int64_t capacity, int peer, int tag) {
        std::lock_guard<std::mutex> guard(lock_);
        auto *operation = new Operation;
        operation->network = this;
        operation->data = data;
        operation->capacity = capacity;
        Queue &queue = queues_[{rank, peer, tag, context}];
        queue.posted.push_back(operation);
        match(queue);
        return operation;
    }

    // Return 0, or the error of a request that has completed and is freed.
    int test(Operation **request, int *done, Status *status) {
        std::lock_guard<std::mutex> guard(lock_);
        Operation *operation = *request;
        const bool late = delay_ && !operation->status.cancelled && random_() % (uint64_t)(delay_ + 1);
        *done = operation->done && !late;
        if (!*done) return 0;
        *status = operation->status;
        const bool cut = operation->data && operation->status.nbytes > operation->capacity;
        *request = nullptr;
        if (is_queued(operation))
            operation->detached = true;
        else
            delete operation;
        return cut ? TRUNCATED : 0;
    }

    void cancel(Operation *operation) {
        std::lock_guard<std::mutex> guard(lock_);
        for (auto &[key, queue] : queues_)
            for (auto at = queue.posted.begin(); at != queue.posted.end(); ++at) {
                if (*at != operation) continue;
                queue.posted.erase(at);
                operation->done = true;
                operation->status.cancelled = 1;
                return;
            }
    }

    // Find a message without a receive, and take it out if `taken` is given.
    bool probe(int rank, int context, int peer, int tag, Status *status, Operation **taken) {
        std::lock_guard<std::mutex> guard(lock_);
        for (auto &[key, queue] : queues_) {
            const auto &[to, from, its_tag, its_context] = key;
            const bool wanted = (peer == ANY || peer == from) && (tag == ANY || tag == its_tag);
            if (to != rank || its_context != context || !wanted || queue.sent.empty()) continue;
            *status = queue.sent.front()->status;
            if (taken) {
                *taken = queue.sent.front();
                queue.sent.pop_front();
                probed_.push_back(*taken);
            }
            return true;
        }
        return false;
    }

    Operation *receive_probed(Operation *message, void *data, int64_t capacity) {
        std::lock_guard<std::mutex> guard(lock_);
        auto *operation = new Operation;
        operation->network = this;
        operation->data = data;
        operation->capacity = capacity;
        for (auto at = probed_.begin(); at != probed_.end(); ++at)
            if (*at == message) {
                probed_.erase(at);
                break;
            }
        deliver(message, operation);
        return operation;
    }

  private:
    using Key = std::tuple<int, int, int, int>;  // receiver, sender, tag, context
    struct Queue {
        std::deque<Operation *> sent, posted;
    };

    void match(Queue &queue) {
        while (!queue.sent.empty() && !queue.posted.empty()) {
            Operation *message = queue.sent.front(), *operation = queue.posted.front();
            queue.sent.pop_front();
            queue.posted.pop_front();
            deliver(message, operation);
        }
    }

    void deliver(Operation *message, Operation *operation) {
        if (holds_ && message->status.nbytes > eager_) {
            held_.emplace_back(message, operation);
            return;
        }
        operation->status = message->status;
        const int64_t nbytes = std::min(operation->capacity, message->status.nbytes);
        if (nbytes) memcpy(operation->data, message->bytes, (size_t)nbytes);
        operation->done = message->done = true;
        if (message->detached) delete message;
    }

    bool is_queued(const Operation *operation) {
        for (const auto &[key, queue] : queues_)
            for (const Operation *sent : queue.sent)
                if (sent == operation) return true;
        for (const Operation *probed : probed_)
            if (probed == operation) return true;
        return false;
    }

    std::mutex lock_;
    const int64_t eager_;
    const int delay_;
    std::mt19937_64 random_;
    std::map<Key, Queue> queues_;
    std::vector<Operation *> probed_;
    std::vector<std::pair<Operation *, Operation *>> held_;
    bool holds_ = false;
    std::deque<Endpoint> endpoints_;
};

inline int isend(const void *data, int count, uintptr_t, int peer, int tag, uintptr_t comm, void *request) {
    const auto [network, rank, context] = *(Endpoint *)comm;
    *(Operation **)request = network->send(rank, context, data, count, peer, tag, false);
    return 0;
}
inline int issend(const void *data, int count, uintptr_t, int peer, int tag, uintptr_t comm, void *request) {
    const auto [network, rank, context] = *(Endpoint *)comm;
    *(Operation **)request = network->send(rank, context, data, count, peer, tag, true);
    return 0;
}
inline int irecv(void *data, int count, uintptr_t, int peer, int tag, uintptr_t comm, void *request) {
    const auto [network, rank, context] = *(Endpoint *)comm;
    *(Operation **)request = network->receive(rank, context, data, count, peer, tag);
    return 0;
}
inline int iprobe(int peer, int tag, uintptr_t comm, int *found, void *status) {
    const auto [network, rank, context] = *(Endpoint *)comm;
    *found = network->probe(rank, context, peer, tag, (Status *)status, nullptr);
    return 0;
}
inline int improbe(int peer, int tag, uintptr_t comm, int *found, void *message, void *status) {
    const auto [network, rank, context] = *(Endpoint *)comm;
    *found = network->probe(rank, context, peer, tag, (Status *)status, (Operation **)message);
    return 0;
}
inline int get_count(const void *status, uintptr_t, int *count) {
    *count = (int)((const Status *)status)->nbytes;
    return 0;
}
inline int test_cancelled(const void *status, int *cancelled) {
    *cancelled = ((const Status *)status)->cancelled;
    return 0;
}

inline int test(void *request, int *done, void *status) {
    auto **operation = (Operation **)request;
    *done = 1;
    return *operation ? (*operation)->network->test(operation, done, (Status *)status) : 0;
}
inline int cancel(void *request) {
    (*(Operation **)request)->network->cancel(*(Operation **)request);
    return 0;
}
inline int imrecv(void *data, int count, uintptr_t, void *message, void *request) {
    auto **operation = (Operation **)message;
    *(Operation **)request = (*operation)->network->receive_probed(*operation, data, count);
    return 0;
}

inline gpucomp::MpiLibrary library() {
    gpucomp::MpiLibrary found = {};
    found.isend = (void *)isend;
    found.issend = (void *)issend;
    found.irecv = (void *)irecv;
    found.test = (void *)test;
    found.cancel = (void *)cancel;
    found.test_cancelled = (void *)test_cancelled;
    found.get_count = (void *)get_count;
    found.iprobe = (void *)iprobe;
    found.improbe = (void *)improbe;
    found.imrecv = (void *)imrecv;
    found.any_source = found.any_tag = ANY;
    found.status_bytes = sizeof(Status);
    found.source_offset = offsetof(Status, source);
    found.tag_offset = offsetof(Status, tag);
    found.undefined = UNDEFINED;
    found.count_error = NO_LONG_COUNTS;
    return found;
}

}  // namespace fake_mpi
