#include "context.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace gpucomp {
namespace {

constexpr int64_t SHORTEST_NAP = 20'000, LONGEST_NAP = 500'000;
constexpr int64_t QUICK = 400'000;        // ns between progress below which the next is polled for without sleeping
constexpr int64_t FIRST_LIMIT = 300'000;  // ns after which a task that has never waited longer is stalled
constexpr int64_t STICKINESS = 5;         // multiple of its longest wait so far, for one that has progressed
constexpr int64_t MAX_LIMIT = 100'000'000;
constexpr int64_t OFTEN = 500'000, SELDOM = 5'000'000;  // ns between calls of `progress_elsewhere`
constexpr int64_t GPU_SPIN = 50'000, GPU_NAP = 20'000;  // ns of polling, then between polls, while a GPU works
constexpr int HEAD_TRIES = 5;             // polls of the first task in each step; the others get one

}  // namespace

Context::Context(Wire &wire) : wire(wire), bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), nap_(SHORTEST_NAP) {}

Context::~Context() { shut(); }

void Context::shut() {
    while (completions_.load()) sched_yield();
    Guard guard(*this);
    if (bell_ >= 0) close(bell_);
    bell_ = -1;
}

int Context::run(int64_t timeout, bool foreground, bool until_moved) {
    std::unique_lock<std::recursive_mutex> guard(lock);
    const int64_t deadline = now() + timeout;
    while (led_) {
        if (!foreground || led_in_foreground_) {
            const int64_t left = deadline - now();
            if (left <= 0 || !events_.empty()) return events_.empty() ? 0 : 2;
            free_.wait_for(guard, std::chrono::nanoseconds(left));
            if (!events_.empty()) return 2;
            continue;
        }
        interrupt();
        free_.wait_for(guard, std::chrono::milliseconds(1));
    }
    led_ = true;
    led_in_foreground_ = foreground;
    bool moved = false;
    for (;;) {
        notified_.store(false);
        const bool stepped = step();
        moved |= stepped;
        if (!events_.empty() || (until_moved && moved) || bell_ < 0 || interrupted_.load() || wire.fault.mpi_error ||
            !wire.fault.text.empty())
            break;
        const int64_t time = now();
        if (stepped) {
            // After a long wait the next is expected to take as long, and is slept for at once.
            const int64_t gap = time - progressed_;
            progressed_ = time;
            idle_polls_ = gap < QUICK ? 0 : eager_polls;
            nap_ = std::min(LONGEST_NAP, std::max(SHORTEST_NAP, gap / 8));
        }
        if (time >= deadline) break;
        if (wanted_.load()) {
            guard.unlock();
            sched_yield();
            guard.lock();
            continue;
        }
        if (stepped) continue;
        if (progress_elsewhere && until_elsewhere(time) <= 0) {
            elsewhere_ = time;
            guard.unlock();
            progress_elsewhere();
            guard.lock();
            continue;
        }
        sleep(deadline - time, guard);
    }
    interrupted_.store(false);
    led_ = false;
    free_.notify_all();
    return moved | (events_.empty() ? 0 : 2);
}

void Context::interrupt() {
    interrupted_.store(true);
    const uint64_t one = 1;
    if (sleeping_.load() && write(bell_, &one, sizeof one) < 0) return;  // the bell is ringing already
}

void Context::notify() {
    notified_.store(true);
    const uint64_t one = 1;
    if (sleeping_.load() && write(bell_, &one, sizeof one) < 0) return;
}

bool Context::next_event(Event *event) {
    if (events_.empty()) return false;
    *event = events_.front();
    events_.pop_front();
    return true;
}

// Drop the events of a task that is about to be freed.
void Context::forget(const Task *task) {
    events_.erase(std::remove_if(events_.begin(), events_.end(), [&](const Event &one) { return one.task == task; }),
                  events_.end());
}

bool Context::step() {
    if (faulted_ || bell_ < 0) return false;
    bool moved = wire.poll();
    int peer;
    std::vector<uint8_t> message;
    while (wire.recv_control(&peer, &message)) {
        if (control.empty()) add_event({EVENT_CONTROL, 0, nullptr, nullptr});
        control.emplace_back(peer, std::move(message));
        message.clear();
    }
    for (size_t n = 0; n < running.size(); ++n)
        for (int tries = n ? 1 : HEAD_TRIES; tries && running[n]->active && running[n]->progress(); --tries) moved = true;
    if (wire.fault.mpi_error || !wire.fault.text.empty()) {
        faulted_ = true;
        add_event({EVENT_FAULT, 0, nullptr, nullptr});
    }
    if (preempting) check_stalls();
    return moved;
}

void Context::check_stalls() {
    const int64_t time = now();
    for (Task *task : running) {
        if (task->stalled || task->done || task->failed || task->busy()) continue;
        const int64_t limit = std::min(MAX_LIMIT, std::max(FIRST_LIMIT, STICKINESS * task->longest_wait));
        const int64_t idle = time - task->last_moved;
        if (idle > limit || (idle > FIRST_LIMIT / 4 && wire.probe_any() >= 0)) {
            task->stalled = true;
            add_event({EVENT_STALLED, idle > limit, task, nullptr});
        }
    }
}

// The time until `progress_elsewhere` is due: later and later while nothing moves.
int64_t Context::until_elsewhere(int64_t time) const {
    return elsewhere_ + std::min(SELDOM, std::max(OFTEN, (time - progressed_) / 8)) - time;
}

void Context::sleep(int64_t timeout, std::unique_lock<std::recursive_mutex> &guard) {
    const int descriptor = wire.fd();
    if (descriptor < 0) {
        if (++idle_polls_ <= eager_polls) return;
        timeout = std::min(timeout, nap_);
        nap_ = std::min(LONGEST_NAP, 2 * nap_);
    }
    const int64_t within = wire.poll_within();
    if (within >= 0) timeout = std::min(timeout, within);
    if (progress_elsewhere) timeout = std::min(timeout, std::max<int64_t>(0, until_elsewhere(now())));
    if (preempting) timeout = std::min(timeout, FIRST_LIMIT / 2);
    for (const Task *task : running) {
        if (!task->waits_for_gpu()) continue;
        if (now() - progressed_ < GPU_SPIN) return;
        timeout = std::min(timeout, GPU_NAP);
    }
    for (const Task *task : running)
        if (task->waits_for_slot_since()) timeout = std::min(timeout, GROW_AFTER);
    sleeping_.store(true);
    if (bell_ >= 0 && !notified_.load() && !interrupted_.load() && wire.arm()) {
        pollfd sources[2] = {{bell_, POLLIN, 0}, {descriptor, POLLIN, 0}};
        const timespec span = {timeout / 1'000'000'000, timeout % 1'000'000'000};
        ++sleeps;
        guard.unlock();
        const int ready = ppoll(sources, descriptor < 0 ? 1 : 2, &span, nullptr);
        guard.lock();
        if (ready > 0 && sources[0].revents) {
            uint64_t count;
            if (read(bell_, &count, sizeof count) < 0 && errno != EAGAIN) notified_.store(true);
        }
    }
    sleeping_.store(false);
}

}  // namespace gpucomp
