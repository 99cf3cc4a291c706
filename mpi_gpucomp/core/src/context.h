// What one communicator runs: its wire, its tasks, and the events that need Python.
//
// `run` moves chunks until there is an event, and sleeps while there is nothing to do. One thread at a time runs; a
// caller that waits takes over from a background thread. The lock is held while something moves, not during sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "task.h"
#include "wire.h"

namespace gpucomp {

// The values are part of the interface with `core/library.py`.
enum EventKind : int32_t {
    EVENT_CONTROL = 1,   // a control message has arrived
    EVENT_TASK = 2,      // a task is done or has failed
    EVENT_CODING = 3,    // Python has to encode, decode, copy or reduce
    EVENT_STALLED = 4,   // a running task waits for longer than its limit, and others wait for its slot
    EVENT_FAULT = 5,     // the wire cannot be used any more
};

struct Event {
    int32_t kind = 0, code = 0;
    void *task = nullptr, *op = nullptr;
};

class Context {
  public:
    explicit Context(Wire &wire);
    ~Context();

    Wire &wire;
    std::recursive_mutex lock;
    std::vector<Task *> running;  // the tasks that have a slot, in order
    std::deque<std::pair<int, std::vector<uint8_t>>> control;
    int eager_polls = 4;          // polls without progress before the first sleep, on wires that must be polled
    bool preempting = false;      // report stalled tasks
    // Called now and then by a thread that has to wait: what a peer may be waiting for although this wire does not
    // carry it. MPI sends the rest of a message only while its sender is in MPI.
    std::function<void()> progress_elsewhere;

    // Move chunks until there is an event, the time is over, or (`until_moved`) anything has moved. `foreground` calls
    // take over from others. Return bits: 1 something moved, 2 there are events.
    int run(int64_t timeout, bool foreground, bool until_moved);

    // Close the descriptors of the context, which is not run any more.
    void shut();
    bool is_open() const { return bell_ >= 0; }

    // End a `run` of another thread soon.
    void interrupt();

    // Work outside of the lock has completed; called by any thread.
    void notify();

    // A worker is about to complete an op, and notifies behind that: until then the context must stay, although the
    // op's task may be freed.
    class Completion {
      public:
        explicit Completion(Context &context) : context_(context) { ++context_.completions_; }
        ~Completion() {
            context_.notify();
            --context_.completions_;
        }
        Completion(const Completion &) = delete;

      private:
        Context &context_;
    };

    // Holds the lock; a thread that runs lets it through between two steps.
    class Guard {
      public:
        explicit Guard(Context &context) : context_(context) {
            ++context_.wanted_;
            context_.lock.lock();
            --context_.wanted_;
        }
        ~Guard() { context_.lock.unlock(); }
        Guard(const Guard &) = delete;

      private:
        Context &context_;
    };

    bool next_event(Event *event);
    void add_event(const Event &event) { events_.push_back(event); }
    void task_ended(Task *task) { events_.push_back({EVENT_TASK, 0, task, nullptr}); }
    void ask_python(Op *op) { events_.push_back({EVENT_CODING, 0, op->task, op}); }
    void forget(const Task *task);

    std::atomic<int64_t> sleeps{0};  // how often a thread has slept in `run`

  private:
    bool step();
    void sleep(int64_t timeout, std::unique_lock<std::recursive_mutex> &guard);
    int64_t until_elsewhere(int64_t time) const;
    void check_stalls();

    std::deque<Event> events_;
    std::condition_variable_any free_;
    int bell_;
    std::atomic<bool> sleeping_{false}, notified_{false}, interrupted_{false};
    bool led_ = false, led_in_foreground_ = false, faulted_ = false;
    std::atomic<int> wanted_{0}, completions_{0};
    int64_t nap_ = 0, progressed_ = 0, elsewhere_ = 0;
    int idle_polls_ = 0;
};

}  // namespace gpucomp
