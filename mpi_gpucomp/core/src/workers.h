// The worker threads of the process: they run codecs, and share the tiles of large kernels.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace gpucomp {

class Work {
  public:
    virtual ~Work() = default;
    virtual void run() = 0;
};

// One kernel: tiles first .. last - 1 are run by `call`.
struct TileRange {
    virtual ~TileRange() = default;
    virtual void call(int64_t first, int64_t last) = 0;
};

class Workers {
  public:
    static Workers &shared();

    void set_threads(int count);
    int threads() const { return threads_; }

    void submit(Work *work);

    // Run a kernel over all tiles, with idle workers where each gets at least `grain` tiles. Returns when it is done.
    void run_tiles(const std::shared_ptr<TileRange> &kernel, int64_t tiles, int64_t grain);

    // Run no more work, and wait for what is running: the interpreter ends, and the memory with it.
    void stop(int64_t timeout_ns);

  private:
    struct Split;

    void start(int wanted);
    void serve();

    std::mutex lock_;
    std::condition_variable wake_, quiet_;
    std::deque<Work *> queue_;
    std::deque<std::shared_ptr<Split>> splits_;
    int threads_ = 1, started_ = 0, idle_ = 0, running_ = 0;
    bool stopped_ = false;
};

}  // namespace gpucomp
