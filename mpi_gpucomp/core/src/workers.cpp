#include "workers.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <system_error>

namespace gpucomp {

// A kernel whose tiles are cut into ranges that threads claim one by one.
struct Workers::Split {
    std::shared_ptr<TileRange> kernel;
    int64_t tiles = 0;
    int ranges = 0;
    std::atomic<int> next{0}, completed{0};
    std::mutex lock;
    std::condition_variable done;

    void run_ranges() {
        for (int index; (index = next.fetch_add(1)) < ranges;) {
            kernel->call(tiles * index / ranges, tiles * (index + 1) / ranges);
            if (completed.fetch_add(1) + 1 == ranges) {
                std::lock_guard<std::mutex> guard(lock);
                done.notify_all();
            }
        }
    }

    void wait() {
        std::unique_lock<std::mutex> guard(lock);
        done.wait(guard, [&] { return completed.load() == ranges; });
    }
};

Workers &Workers::shared() {
    static Workers *workers = new Workers;  // never destroyed: its threads outlive static objects
    return *workers;
}

void Workers::set_threads(int count) {
    std::lock_guard<std::mutex> guard(lock_);
    threads_ = count < 1 ? 1 : count;
}

void Workers::submit(Work *work) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        // Idle threads may have been woken for earlier work that they have not taken yet.
        if ((size_t)idle_ <= queue_.size() + splits_.size()) start(started_ + 1);
        if (started_) {
            queue_.push_back(work);
            wake_.notify_one();
            return;
        }
    }
    work->run();
}

void Workers::run_tiles(const std::shared_ptr<TileRange> &kernel, int64_t tiles, int64_t grain) {
    int ranges = 1;
    auto split = std::make_shared<Split>();
    if (threads_ > 1 && tiles >= 2 * grain) {
        std::lock_guard<std::mutex> guard(lock_);
        start(threads_);
        const int64_t helpers = idle_ < threads_ - 1 ? idle_ : threads_ - 1;
        const int64_t most = tiles / grain;
        ranges = (int)(helpers + 1 < most ? helpers + 1 : most);
        split->kernel = kernel;
        split->tiles = tiles;
        split->ranges = ranges;
        for (int helper = 1; helper < ranges; ++helper) {
            splits_.push_back(split);
            wake_.notify_one();
        }
    }
    if (ranges < 2) {
        kernel->call(0, tiles);
        return;
    }
    split->run_ranges();
    split->wait();
}

void Workers::stop(int64_t timeout_ns) {
    std::unique_lock<std::mutex> guard(lock_);
    stopped_ = true;
    quiet_.wait_for(guard, std::chrono::nanoseconds(timeout_ns), [&] { return !running_; });
}

// Start threads up to `wanted`, and no more than are allowed.
void Workers::start(int wanted) {
    if (wanted > threads_) wanted = threads_;
    if (started_ >= wanted) return;
    sigset_t all, before;  // signals belong to Python's main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (; started_ < wanted; ++started_, ++idle_) std::thread(&Workers::serve, this).detach();
    } catch (const std::system_error &) {  // the process may have no more threads: those that there are do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Workers::serve() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        wake_.wait(guard, [&] { return !stopped_ && (!splits_.empty() || !queue_.empty()); });
        --idle_;
        ++running_;
        if (!splits_.empty()) {
            const std::shared_ptr<Split> split = splits_.front();
            splits_.pop_front();
            guard.unlock();
            split->run_ranges();
        } else {
            Work *work = queue_.front();
            queue_.pop_front();
            guard.unlock();
            work->run();
        }
        guard.lock();
        --running_;
        ++idle_;
        if (!running_) quiet_.notify_all();
    }
}

}  // namespace gpucomp
