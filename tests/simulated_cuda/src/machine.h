// A model of CUDA devices in one process: contexts, streams, events, memory, a scheduler, and what it finds and counts.
//
// No thread belongs to a stream. Queued work runs inside the calls of the program, in an order that a seed selects
// among those that CUDA allows: when a call waits, queries or queues. Only if the program makes no call for a while
// does a background thread run some, so that a program that polls memory makes progress. Everything is under one lock,
// except host functions, which have a thread of their own.
//
// Hazards are found by vector clocks, not by what happens to run first: an agent is a stream, or the host (all its
// threads are one agent: how they synchronise among each other is not visible here). Each operation has the clock of
// everything that is ordered before it, and each byte range remembers its last write and the reads since.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cuda_abi.h"
#include "ptx.h"

namespace simcuda {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

constexpr int HOST = 0;
constexpr int MAX_DEVICES = 15;
constexpr int HOST_WINDOW = MAX_DEVICES;
// Away from where programs, PMIx and the kernel put memory. Addresses are not used twice, so windows are large.
constexpr u64 WINDOW = 1ull << 38, WINDOWS = WINDOW * (MAX_DEVICES + 1), PAGE = 4096;
constexpr u64 PUBLIC_BASE = 0x100000000000, ALIAS_OFFSET = WINDOWS;

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// What is ordered before an operation: for each agent, the number of its operations.
struct Clock {
    std::vector<u32> ticks;

    u32 operator[](size_t agent) const { return agent < ticks.size() ? ticks[agent] : 0; }
    void set(size_t agent, u32 tick) {
        if (agent >= ticks.size()) ticks.resize(agent + 1);
        ticks[agent] = tick;
    }
    void join(const Clock &other) {
        if (other.ticks.size() > ticks.size()) ticks.resize(other.ticks.size());
        for (size_t i = 0; i < other.ticks.size(); ++i)
            if (other.ticks[i] > ticks[i]) ticks[i] = other.ticks[i];
    }
};

// One access of an agent: operation `number` is its operation `tick`.
struct Epoch {
    u32 agent = 0, tick = 0;
    u64 number = 0;
};

struct Range {
    u64 start, end;
};

enum class MemoryKind { DEVICE, PINNED, MANAGED, REGISTERED, PAGEABLE };
const char *name_of(MemoryKind kind);

struct Stream;
struct Device;

struct Segment {
    u64 end = 0;
    Epoch write;
    std::vector<Epoch> reads;
};

struct Allocation {
    u64 start = 0, nbytes = 0, number = 0;
    MemoryKind kind = MemoryKind::PAGEABLE;
    Device *device = nullptr;
    std::string made_by;
    bool freed = false, marked = false;
    Clock ready;  // of cuMemAllocAsync: the memory exists for what is ordered behind it
    std::map<u64, Segment> accesses;
    u64 users = 0;  // queued operations that name an address of it

    u64 end() const { return start + nbytes; }
    std::string describe(u64 address) const;
};

// A completed or future passing of a position in a stream; what an event holds after it was recorded.
struct Record {
    bool done = false, captured = false;
    Clock clock;
    double end = 0;
    Stream *stream = nullptr;
};

struct Event {
    u64 handle = 0, number = 0;
    Device *device = nullptr;
    unsigned flags = 0;
    bool marked = false;
    std::shared_ptr<Record> latest;
};

struct Kernel {
    std::string name, family, layout;  // of each argument: r const pointer, w pointer, q integer, d double
    void *function = nullptr;
    bool tracked = false;
};

struct Module {
    u64 handle = 0;
    Device *device = nullptr;
    std::string image;
    std::shared_ptr<ptx::Program> program;  // if its kernels are interpreted
};

struct Function {
    u64 handle = 0;
    const Kernel *kernel = nullptr;
    Module *module = nullptr;
};

struct Op {
    enum Kind { KERNEL, COPY, FILL, RECORD, WAIT, HOST_FUNCTION, FREE } kind = KERNEL;
    u64 number = 0;
    Clock clock;
    double issued = 0, start = 0, end = 0;
    bool counted = true, running = false, protects = false;
    const Kernel *kernel = nullptr;
    std::shared_ptr<ptx::Program> program;
    std::vector<i64> integers;
    std::vector<double> doubles;
    i64 first = 0, last = 0, blocks = 0;
    u64 to = 0, from = 0, nbytes = 0;
    MemoryKind to_kind = MemoryKind::PAGEABLE, from_kind = MemoryKind::PAGEABLE;
    std::vector<u8> staged;
    int byte = 0;
    std::shared_ptr<Record> record;
    CUhostFn host_function = nullptr;
    void *user = nullptr;
    std::vector<Allocation *> uses;
};

// Busy intervals of one engine; work takes the first gap, so that the order in which it happens to run matters little.
struct Engine {
    std::map<double, double> busy;
    double fit(double ready, double duration) const;
    void take(double start, double duration);
};

struct Model {
    const char *name;
    int multiprocessors, capability;
    double memory_bytes, hbm, pcie, nvlink;  // bytes, and bytes per nanosecond in one direction
};

using Counts = std::map<std::string, u64>;

struct Stream {
    u64 handle = 0;
    u32 agent = 0;
    int number = 0;
    Device *device = nullptr;
    bool blocking = true, legacy = false, per_thread = false, destroyed = false, marked = false;
    int capture = CU_STREAM_CAPTURE_STATUS_NONE;
    std::deque<Op> queue;
    Clock clock;
    double end = 0;
    Counts counts;
    std::string describe() const;
};

constexpr int SLICES = 8;  // of a GPU's multiprocessors, for kernels that run side by side

struct Device {
    int ordinal = 0;
    u64 context = 0;
    int retained = 0;
    bool created = false, expected = true, used = false;
    CUresult fault = CUDA_SUCCESS;
    std::string fault_text;
    u64 next = 0, in_use = 0, capacity = 0;
    Stream *legacy = nullptr;
    std::map<std::thread::id, Stream *> per_thread;
    Engine slices[SLICES], to_device, to_host, link;
    Counts counts;
};

struct Injection {
    enum Kind { FAULT, MEMORY, LOST } kind;
    CUresult code;
    int device;
    i64 left;
    std::string kernel;
};

struct Settings {
    u64 seed = 0;
    int devices = 1;
    bool starve = true, track = true, protect = true, eager = false, lockstep = false, compare = false;
    int capability = 0;
    i64 ptx = 0;  // interpret kernels in grids of up to so many blocks
    double background_ms = 20;
    double launch_us = 2.5, copy_us = 3, event_us = 1, wake_us = 20, start_us = 2;
    u64 capacity = 0;
    const Model *model = nullptr;
    std::string inject;
};

class Machine {
public:
    static Machine &get();

    std::string configure(const char *settings, bool from_program);
    void reset();

    // Findings, counts and the virtual clock.
    void find(const std::string &what);
    void count(Stream &stream, const char *what, u64 by = 1);
    void count(Device *device, const char *what, u64 by = 1);
    std::string counts_as_json() const;
    void reset_counts();
    double elapsed() const;
    std::string inject(const char *specification);
    int leaks(bool all);
    void mark();

    // Contexts.
    CUresult initialised();
    Device *current();
    void select(Device *device);
    void create(Device &device);
    CUresult usable(Device **device);
    CUresult stream_of(CUstream handle, Device *current, Stream **stream);
    Stream *new_stream(Device &device, bool blocking);
    void drop_agent(Stream &stream);
    u64 new_handle() { return next_handle_ += 0x100; }

    // Queues.
    CUresult put(std::unique_lock<std::mutex> &lock, Stream &stream, Op op, const char *what);
    void order_with_legacy(Stream &stream);
    bool step(Stream *wanted);
    void progress(Stream *wanted);
    template <class Done>
    CUresult wait(std::unique_lock<std::mutex> &lock, Device &device, Stream *wanted, Done done);
    CUresult wait_stream(std::unique_lock<std::mutex> &lock, Stream &stream, const char *what);
    CUresult wait_device(std::unique_lock<std::mutex> &lock, Device &device, const char *what);
    CUresult wait_record(std::unique_lock<std::mutex> &lock, Device &device, std::shared_ptr<Record> record,
                         const char *what);
    void host_passes(const Record &record, bool blocked);
    void fail(Device &device, CUresult code, const std::string &why);
    void host_pays(double microseconds);
    double host_now();

    // Memory.
    CUresult allocate(Device *device, MemoryKind kind, u64 nbytes, const std::string &made_by, u64 *address);
    CUresult release(Allocation &allocation, const char *what, const Clock &clock);
    Allocation *allocation_at(u64 address, bool freed = false);
    MemoryKind kind_of(u64 address, u64 nbytes, Allocation **allocation);
    CUresult check_span(u64 address, u64 nbytes, const char *what, const std::string &role);
    void access(u64 start, u64 end, bool write, const Clock &clock, const Epoch &epoch, const std::string &by);
    void host_access(u64 address, u64 nbytes, bool write, const std::string &what);
    std::string describe_op(u64 number) const;
    u8 *reachable(u64 address);
    void protect(Op &op);
    void unprotect(Op &op);
    bool host_hazard(u64 address);
    CUresult run_kernel(Stream &stream, Op &op, u64 *moved);
    ptx::End interpret(const Op &op, std::string *why);
    std::string profiles_as_json() const;
    std::string describe(const Op &op, const Stream &stream) const;

    std::mutex lock;
    std::condition_variable changed;
    Settings settings;
    bool initialised_ = false, forked = false;
    std::vector<std::unique_ptr<Device>> devices;
    std::map<u64, std::unique_ptr<Stream>> streams;
    std::map<u64, std::unique_ptr<Event>> events;
    std::map<u64, std::unique_ptr<Module>> modules;
    std::map<u64, std::unique_ptr<Function>> functions;
    std::map<std::string, Kernel> kernels;
    std::map<u64, std::unique_ptr<Allocation>> allocations;
    std::vector<std::string> findings;
    std::vector<Injection> injections;
    Clock host;
    std::mt19937_64 random;
    std::vector<std::string> op_names;
    std::map<std::string, ptx::Profile> profiles;
    std::set<std::string> interpreted;  // kernels whose PTX has run beside the host's, since the process began
    u64 calls = 0, event_count = 0, allocation_count = 0;
    struct Unfinished {
        u32 writers = 0, readers = 0;
    };
    std::map<u64, Unfinished> protected_pages;  // pages of host memory that queued copies access completely
    u64 host_functions_queued = 0;
    std::set<u64> opened;  // pages of device memory that a kernel reached by an address that it read from memory

private:
    Machine();
    bool runnable(const Stream &stream) const;
    void run(Stream &stream);
    void perform(Stream &stream, Op &op);
    void closure(Stream *stream, std::set<Stream *> &found) const;
    void time_op(Stream &stream, Op &op, u64 moved);
    bool injected(Device &device, Op &op);
    void background();
    void host_functions();
    void erase_if_over(Stream &stream);
    void start_threads();

    u64 next_handle_ = 0x5c0000000000, puts_ = 0, host_window_next_ = 0;
    std::vector<u32> spare_agents_;
    std::vector<u32> ticks_{1};
    int stream_count_ = 0;
    Stream *starved_ = nullptr;
    bool threads_ = false;
    std::set<std::string> seen_;
    std::deque<Stream *> host_queue_;
    std::condition_variable host_work_;
    u64 queued_ = 0, seen_calls_ = 0;
    double epoch_ = 0;
    u64 generation_ = 0;
    struct HostTime {
        u64 generation = 0;
        double now = 0;
    };
    static thread_local HostTime host_time_;
    double latest_host_ = 0;
};

template <class Done>
CUresult Machine::wait(std::unique_lock<std::mutex> &guard, Device &device, Stream *wanted, Done done) {
    while (!done()) {
        if (device.fault) return device.fault;
        if (!step(wanted)) changed.wait_for(guard, std::chrono::milliseconds(1));
    }
    return device.fault;
}

}  // namespace simcuda
