// Runs kernels, and sees every byte that they access.
//
// The kernels are compiled with the compiler's race instrumentation, whose callbacks are implemented here: they check
// each access against the allocations, and collect ranges of bytes. An access outside of memory that the GPU can reach
// is what it is on hardware: the kernel ends, and the context has failed.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>

#include <algorithm>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "comparison.h"
#include "machine.h"

namespace simcuda {

namespace {

constexpr int OPEN_RUNS = 8, KNOWN = 4;

// Bytes accessed without a gap, and the end of their allocation.
struct Run {
    u64 start = 0, end = 0, limit = 0;
};

struct Recorder {
    bool active = false;
    Machine *machine = nullptr;
    Stream *stream = nullptr;
    const Op *op = nullptr;
    u64 stack_start = 0, stack_end = 0;
    Run runs[2][OPEN_RUNS];
    int oldest[2] = {}, latest[2] = {};
    std::vector<Range> done[2];
    Range known[KNOWN];
    int next_known = 0;
    u64 wrong = 0, wrong_bytes = 0;
    bool wrong_write = false;
    Comparison *comparison = nullptr;
    sigjmp_buf out;
};

thread_local Recorder recorder;

Range own_image() {
    static Range found = [] {
        Range image{0, 0};
        dl_iterate_phdr(
            [](dl_phdr_info *info, size_t, void *to) {
                Range span{~0ull, 0};
                for (int i = 0; i < info->dlpi_phnum; ++i) {
                    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
                    const u64 start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
                    span.start = std::min(span.start, start);
                    span.end = std::max(span.end, start + info->dlpi_phdr[i].p_memsz);
                }
                const u64 here = (u64)&own_image;
                if (here < span.start || here >= span.end) return 0;
                *(Range *)to = span;
                return 1;
            },
            &image);
        return image;
    }();
    return found;
}

[[noreturn]] void stop(u64 address, u64 nbytes, bool write) {
    recorder.wrong = address;
    recorder.wrong_bytes = nbytes;
    recorder.wrong_write = write;
    siglongjmp(recorder.out, 1);
}

void record_range(u64 address, u64 nbytes, bool write) {
    Recorder &r = recorder;
    const u64 end = address + nbytes;
    const auto covers = [&](Run &run) {
        if (address < run.start || address > run.end || end > run.limit) return false;
        if (end > run.end) run.end = end;
        return true;
    };
    Run *const runs = r.runs[write];
    if (covers(runs[r.latest[write]])) return;
    for (int i = 0; i < OPEN_RUNS; ++i) {
        if (!covers(runs[i])) continue;
        r.latest[write] = i;
        return;
    }
    u64 limit = 0;
    for (const Range &range : r.known)
        if (address >= range.start && end <= range.end) limit = range.end;
    if (!limit) {
        const Allocation *allocation = r.machine->allocation_at(address);
        if (!allocation) {
            const Range image = own_image();
            if (address >= image.start && address < image.end && !write) return;
            stop(address, nbytes, write);
        }
        if (end > allocation->end()) stop(address, nbytes, write);
        if (allocation->kind == MemoryKind::DEVICE && allocation->device != r.stream->device)
            stop(address, nbytes, write);
        limit = allocation->end();
        r.known[r.next_known++ % KNOWN] = {allocation->start, limit};
    }
    r.latest[write] = r.oldest[write]++ % OPEN_RUNS;
    Run &evicted = runs[r.latest[write]];
    if (evicted.start < evicted.end) r.done[write].push_back({evicted.start, evicted.end});
    evicted = {address, end, limit};
}

void record_access(u64 address, u64 nbytes, bool write) {
    Recorder &r = recorder;
    if (!r.active) return;
    if (address - PUBLIC_BASE - ALIAS_OFFSET < WINDOWS)
        address -= ALIAS_OFFSET;
    else if (address >= r.stack_start && address < r.stack_end)
        return;
    record_range(address, nbytes, write);
    if (write && r.comparison) r.comparison->before_write(address, nbytes);
}

std::vector<Range> merged(std::vector<Range> &ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.start < b.start; });
    std::vector<Range> result;
    for (const Range &range : ranges) {
        if (!result.empty() && range.start <= result.back().end)
            result.back().end = std::max(result.back().end, range.end);
        else
            result.push_back(range);
    }
    return result;
}

using Entry = void (*)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double,
                       double, double);

}  // namespace

// Handles a fault of the kernel that this thread runs. A kernel that has read an address of this GPU from memory
// reaches it as the program knows it, so that page is opened while the kernel runs. Anything else ends the kernel.
bool kernel_fault(u64 address) {
    Recorder &r = recorder;
    if (!r.active) return false;
    const u64 page = address / PAGE * PAGE;
    const Allocation *allocation = r.machine->allocation_at(address);
    const bool reachable =
        allocation && (allocation->kind != MemoryKind::DEVICE || allocation->device == r.stream->device);
    if (!reachable || !r.machine->opened.insert(page).second) stop(address, 1, false);
    mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
    return true;
}

// Runs a kernel from its PTX. `why` gets the last finding.
ptx::End Machine::interpret(const Op &op, std::string *why) {
    Device *const device = recorder.stream->device;
    ptx::Launch launch;
    launch.program = op.program.get();
    launch.kernel = &op.program->kernels.at(op.kernel->name);
    launch.arguments = {(u64)op.first, (u64)op.last};
    size_t integer = 0, number = 0;
    for (const char kind : op.kernel->layout) {
        u64 bits = 0;
        if (kind == 'd')
            memcpy(&bits, &op.doubles[number++], 8);
        else
            bits = (u64)op.integers[integer++];
        launch.arguments.push_back(bits);
    }
    launch.blocks = (u32)op.blocks;
    launch.threads = 128;
    launch.seed = random();
    launch.lockstep = settings.lockstep;
    launch.resolve = [this, device](u64 address, ptx::Span *span) {
        const Allocation *allocation = allocation_at(address);
        if (!allocation || (allocation->kind == MemoryKind::DEVICE && allocation->device != device)) return false;
        *span = {allocation->start, allocation->end(), reachable(address) - (u8 *)address};
        return true;
    };
    launch.accessed = record_access;
    launch.find = [this, why](const std::string &what) { find(*why = what); };
    launch.profile = &profiles[op.kernel->name];
    return ptx::run(launch);
}

CUresult Machine::run_kernel(Stream &stream, Op &op, u64 *moved) {
    Recorder &r = recorder;
    if (!r.stack_end) {
        pthread_attr_t attributes;
        void *start;
        size_t length;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &start, &length);
        pthread_attr_destroy(&attributes);
        r.stack_start = (u64)start;
        r.stack_end = r.stack_start + length;
    }
    r.machine = this;
    r.stream = &stream;
    r.op = &op;
    const auto forget = [&r] {
        for (int write = 0; write < 2; ++write) {
            r.done[write].clear();
            for (Run &run : r.runs[write]) run = {};
        }
        for (Range &range : r.known) range = {};
    };
    forget();
    i64 i[14] = {};
    double d[4] = {};
    size_t integer = 0, number = 0;
    for (const char kind : op.kernel->layout) {
        if (kind == 'd') {
            d[number] = op.doubles[number];
            ++number;
            continue;
        }
        i[integer] = op.integers[integer];
        if (kind != 'q' && (u64)i[integer] - PUBLIC_BASE < WINDOWS) i[integer] += ALIAS_OFFSET;
        ++integer;
    }
    // The blocks of a grid run in any order. One block runs its tiles in order.
    std::vector<i64> cuts{op.first, op.last};
    if (op.blocks > 1 && op.last - op.first > 1)
        for (int cut = 0; cut < 3; ++cut) cuts.push_back(op.first + (i64)(random() % (u64)(op.last - op.first + 1)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<Range> parts;
    for (size_t k = 0; k + 1 < cuts.size(); ++k) parts.push_back({(u64)cuts[k], (u64)cuts[k + 1]});
    std::shuffle(parts.begin(), parts.end(), random);
#if defined(__SSE2__)
    const unsigned mode = _mm_getcsr();
#endif
    // Runs the kernel; returns false if it was stopped.
    const auto guarded = [&](auto run) {
        r.active = true;
        const bool stopped = sigsetjmp(r.out, 1);
        if (!stopped) run();
        r.active = false;
#if defined(__SSE2__)
        _mm_setcsr(mode);
#endif
        for (const u64 page : opened) {
            const auto known = protected_pages.find(page);
            const bool readable = known != protected_pages.end() && !known->second.writers;
            mprotect((void *)page, PAGE, readable ? PROT_READ : PROT_NONE);
        }
        opened.clear();
        return !stopped;
    };
    const auto on_host = [&](const std::vector<Range> &parts) {
        for (const Range &part : parts)
            ((Entry)op.kernel->function)((i64)part.start, (i64)part.end, i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7],
                                         i[8], i[9], i[10], i[11], i[12], i[13], d[0], d[1], d[2], d[3]);
    };
    std::string fault;
    ptx::End end = ptx::End::DONE;
    bool failed;
    if (!op.program) {
        failed = !guarded([&] { on_host(parts); });
    } else {
        Comparison comparison(*this);
        bool compared = false;
        if (settings.compare && op.kernel->function) {
            r.comparison = &comparison;
            // One tile in each call: within a call, encoders on the host write tiles without gaps.
            std::vector<Range> tiles;
            for (i64 tile = op.first; tile < op.last; ++tile) tiles.push_back({(u64)tile, (u64)tile + 1});
            std::shuffle(tiles.begin(), tiles.end(), random);
            compared = guarded([&] { on_host(tiles); });
            comparison.rewind();
            forget();
        }
        failed = !guarded([&] { end = interpret(op, &fault); });
        r.comparison = nullptr;
        if (compared && !failed && end == ptx::End::DONE) {
            interpreted.insert(op.kernel->name);
            const std::string wrong = comparison.difference();
            if (!wrong.empty()) find("ptx: " + op.kernel->name + ": " + wrong);
        }
    }
    if (failed) {
        const u64 address = r.wrong - (r.wrong - PUBLIC_BASE - ALIAS_OFFSET < WINDOWS ? ALIAS_OFFSET : 0);
        const Allocation *allocation = allocation_at(address, true);
        std::string where;
        if (allocation) {
            where = allocation->describe(address);
            if (!allocation->freed && address + r.wrong_bytes <= allocation->end())
                where += ", which this GPU cannot reach";
        } else {
            const auto next = allocations.upper_bound(address);
            where = text("address %#llx, which is ", (unsigned long long)address);
            if (address - PUBLIC_BASE >= WINDOWS)
                where += "pageable host memory";
            else if (next == allocations.begin())
                where += "not allocated";
            else
                where += text("%llu bytes behind ", (unsigned long long)(address - std::prev(next)->second->end())) +
                         std::prev(next)->second->describe(std::prev(next)->second->start);
        }
        const std::string what = text("memory: %s %s %llu bytes at ", describe_op(op.number).c_str(),
                                      r.wrong_write ? "writes" : "reads", (unsigned long long)r.wrong_bytes) +
                                 where;
        find(what);
        fail(*stream.device, CUDA_ERROR_ILLEGAL_ADDRESS, what);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (end != ptx::End::DONE) {
        const CUresult code = end == ptx::End::ILLEGAL_ADDRESS ? CUDA_ERROR_ILLEGAL_ADDRESS
                              : end == ptx::End::MISALIGNED    ? CUDA_ERROR_MISALIGNED_ADDRESS
                                                               : CUDA_ERROR_LAUNCH_FAILED;
        fail(*stream.device, code, fault);
        return code;
    }
    const Epoch epoch{stream.agent, op.clock[stream.agent], op.number};
    const std::string by = describe_op(op.number);
    for (int write = 0; write < 2; ++write) {
        for (const Run &run : r.runs[write])
            if (run.start < run.end) r.done[write].push_back({run.start, run.end});
        for (const Range &range : merged(r.done[write])) {
            *moved += range.end - range.start;
            // Runs merge across allocations only where these touch, which they never do.
            if (settings.track) access(range.start, range.end, write, op.clock, epoch, by);
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace simcuda

// The callbacks of the instrumentation.
using simcuda::record_access;
using simcuda::u64;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void *) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_vptr_update(void **, void *) {}
#define ACCESSES(n) \
    EXPORT void __tsan_read##n(void *at) { \
        record_access((u64)at, n, false); \
    } \
    EXPORT void __tsan_write##n(void *at) { \
        record_access((u64)at, n, true); \
    } \
    EXPORT void __tsan_unaligned_read##n(void *at) { \
        record_access((u64)at, n, false); \
    } \
    EXPORT void __tsan_unaligned_write##n(void *at) { \
        record_access((u64)at, n, true); \
    } \
    EXPORT void __tsan_volatile_read##n(void *at) { \
        record_access((u64)at, n, false); \
    } \
    EXPORT void __tsan_volatile_write##n(void *at) { \
        record_access((u64)at, n, true); \
    }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
EXPORT void __tsan_read_range(void *at, size_t nbytes) {
    record_access((u64)at, nbytes, false);
}
EXPORT void __tsan_write_range(void *at, size_t nbytes) {
    record_access((u64)at, nbytes, true);
}
#define ATOMICS(bits, T) \
    EXPORT T __tsan_atomic##bits##_fetch_add(volatile T *at, T by, int) { \
        record_access((u64)at, sizeof(T), true); \
        return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); \
    } \
    EXPORT T __tsan_atomic##bits##_fetch_or(volatile T *at, T by, int) { \
        record_access((u64)at, sizeof(T), true); \
        return __atomic_fetch_or(at, by, __ATOMIC_RELAXED); \
    } \
    EXPORT T __tsan_atomic##bits##_load(const volatile T *at, int) { \
        record_access((u64)at, sizeof(T), false); \
        return __atomic_load_n(at, __ATOMIC_RELAXED); \
    } \
    EXPORT void __tsan_atomic##bits##_store(volatile T *at, T value, int) { \
        record_access((u64)at, sizeof(T), true); \
        __atomic_store_n(at, value, __ATOMIC_RELAXED); \
    }
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
