// Runs the cases of a file over the C interface of the core, with a thread for each rank, and compares the results.
//
//   core_driver <file of cases> <seconds without an end of a batch that are an error>
//
// `core_cases.py` writes the file. The cases of a batch run at once; a controlling thread preempts them at random.
// After a failure, ranks report to each other and drain what is in flight, as the engine does in Python.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "context.h"
#include "fake_mpi.h"
#include "frames.h"
#include "loopback_wire.h"

using namespace gpucomp;

// The C interface

struct Options {
    int64_t chunk, per_block, slot_bytes, tag, op;
    int64_t raw, in_place, updates_own, update_root, external, alone;
};
struct OpInfo {
    int64_t task, kind, source, target, count, op, loop, chunk, lane, raw, framed, frame, frame_bytes, capacity;
};
struct FailureInfo {
    int64_t code, lane, peer, chunk, loop, count, op, frame, frame_bytes;
    const char *text;
};
struct InFlight {
    int64_t kind, peer, rail, posted, waited, nbytes;
};

extern "C" {
void gc_set_threads(int32_t threads);
void gc_stop_workers(int64_t timeout_ns);
void gc_set_checksum_kernels(void *tiles, void *join);
int64_t gc_memory_in_use();
Codec *gc_codec_new(int64_t wire_id, int64_t dtype, int64_t itemsize, void *reduce, int64_t reduce_tile,
                    int64_t chooses);
void gc_codec_free(Codec *codec);
int32_t gc_codec_add(Codec *codec, int64_t direction, int64_t wire_id, int64_t op, int64_t count,
                     const int64_t *numbers, int64_t length);
int64_t gc_codec_encode(Codec *codec, int64_t source, int64_t count, int64_t frame, int64_t sequence, int64_t raw);
int64_t gc_codec_decode(Codec *codec, int64_t frame, int64_t nbytes, int64_t target, int64_t count, int64_t op,
                        int64_t sequence);
LoopbackNetwork *gc_loopback_new(int32_t size, int64_t eager, int32_t delay, uint64_t seed);
Wire *gc_loopback_wire(LoopbackNetwork *network, int32_t rank);
void gc_loopback_lose(LoopbackNetwork *network, int32_t rank);
int64_t gc_loopback_left(LoopbackNetwork *network);
void gc_loopback_free(LoopbackNetwork *network);
Wire *gc_faulty_wire(Wire *inner);
void gc_faulty_damage(Wire *wire, int64_t at, int32_t how, uint64_t seed);
void gc_faulty_add_target(Wire *wire, int32_t peer, int64_t tag);
int32_t gc_faulty_damaged_peer(Wire *wire);
Wire *gc_mpi_wire(const MpiLibrary *library, int32_t rank, int32_t size, int64_t largest_tag, uint64_t messages,
                  uint64_t segments, uint64_t control, const Segmentation *segmentation, const int32_t *remote,
                  int32_t remotes);
void gc_mpi_counts(Wire *wire, int64_t *segmented, int64_t *relayed);
Wire *gc_mux_wire(Wire *near, Wire *far, const int32_t *near_peers, int32_t count);
void gc_wire_free(Wire *wire);
Context *gc_context_new(Wire *wire);
void gc_context_free(Context *context);
int32_t gc_run(Context *context, int64_t timeout, int32_t foreground, int32_t until_moved);
void gc_interrupt(Context *context);
int32_t gc_next_event(Context *context, int32_t *kind, int32_t *code, void **task, void **op);
int64_t gc_next_control(Context *context, int32_t *peer, uint8_t *memory, int64_t capacity);
void gc_set_polling(Context *context, int32_t eager_polls, int32_t preempting);
int64_t gc_sleeps(Context *context);
int32_t gc_fault(Context *context, char *text, int64_t capacity);
void gc_bytes(Context *context, int64_t *sent, int64_t *received);
int64_t gc_probe_any(Context *context);
void gc_send_control(Context *context, int32_t peer, const uint8_t *data, int64_t nbytes);
Program *gc_program_new(const int64_t *numbers, int64_t length);
void gc_program_free(Program *program);
Task *gc_task_new(Context *context, const Program *program, Codec *codec, const Options *options, int64_t input,
                  int64_t input_blocks, const int64_t *input_starts, const int64_t *input_counts, int64_t output,
                  int64_t output_blocks, const int64_t *output_starts, const int64_t *output_counts);
void gc_task_free(Task *task);
void gc_task_set_python(Task *task, PythonDevice::Take take_slot, PythonDevice::GiveBack give_slot,
                        PythonDevice::Take take_scratch, PythonDevice::GiveBack give_scratch, PythonDevice::Open open);
void gc_task_set_trace(Task *task, void *records, int64_t mask, const int32_t *world, int64_t call, int64_t name,
                       int64_t call_class, int64_t comm);
void gc_task_set_peer_tag(Task *task, int32_t peer, int64_t tag);
void gc_task_prepare(Task *task, int64_t longest);
void gc_task_run(Task *task);
void gc_task_continue(Task *task);
void gc_task_suspend(Task *task);
void gc_task_halt(Task *task);
void gc_task_abandon(Task *task);
void gc_task_quiesce(Task *task);
int32_t gc_task_drain(Task *task, int64_t owed, const int32_t *peers, const int64_t *channels, const int64_t *counts);
int32_t gc_task_state(Task *task);
void gc_task_failure(Task *task, FailureInfo *info);
int64_t gc_task_sent(Task *task, int64_t *counts, int64_t capacity);
int64_t gc_task_in_flight(Task *task, InFlight *found, int64_t capacity);
void gc_op_info(Op *op, OpInfo *info);
void gc_op_done(Op *op, int64_t nbytes, int64_t status);
}

namespace {

using Random = std::mt19937_64;

constexpr int32_t DONE = 1, FAILED = 2;
constexpr int64_t WIRE_ID = 0x7E570001, DTYPE = 6, ITEM = 4;
constexpr int64_t LONG = 20'000'000'000;  // ns: a rank that sleeps for as long has missed an event, or waits forever
constexpr int64_t ANY_VALUE = INT64_MIN;
constexpr int64_t RING = 256;

__attribute__((format(printf, 1, 2))) std::string format(const char *pattern, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

[[noreturn]] void die(const std::string &text) {
    fprintf(stderr, "core_driver: %s\n", text.c_str());
    fflush(stderr);
    _exit(1);
}

// Kernels and the codec: a tile of 64 integers is encoded as bytes if all of them fit, behind a byte that says so.

constexpr int64_t TILE = 64, REDUCE_TILE = 4, UNREPRESENTABLE = 99, SCRATCH_BYTES = 16384;

#define KERNEL_ARGUMENTS \
    int64_t first, int64_t last, int64_t a, int64_t b, int64_t c, int64_t d, int64_t, int64_t, int64_t, int64_t, \
        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double

int32_t combined(int32_t there, int32_t arriving, int64_t op) {
    switch (op) {
        case 1:
            return there + arriving;
        case 2:
            return there * arriving;
        case 3:
            return arriving < there ? arriving : there;
        case 4:
            return arriving > there ? arriving : there;
        default:
            return arriving;
    }
}

void reduce_kernel(KERNEL_ARGUMENTS) {
    for (int64_t i = first * REDUCE_TILE; i < last * REDUCE_TILE && i < c; ++i)
        ((int32_t *)a)[i] = combined(((int32_t *)a)[i], ((const int32_t *)b)[i], d);
}

int64_t in_tile(int64_t tile, int64_t count) { return std::min(TILE, count - tile * TILE); }

// a source, b scratch, c count: the encoded size of each tile.
void size_kernel(KERNEL_ARGUMENTS) {
    for (int64_t tile = first; tile < last; ++tile) {
        bool small = true;
        for (int64_t i = 0; i < in_tile(tile, c); ++i) {
            const int32_t value = ((const int32_t *)a)[tile * TILE + i];
            small &= value >= -128 && value <= 127;
        }
        ((int64_t *)b)[2 + tile] = 1 + in_tile(tile, c) * (small ? 1 : ITEM);
    }
    (void)d;
}

// a source, b scratch, c count: where each tile starts; the total and the status come first.
void place_kernel(KERNEL_ARGUMENTS) {
    auto *numbers = (int64_t *)b;
    int64_t total = 0;
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t size = numbers[2 + tile];
        numbers[2 + tile] = total;
        total += size;
    }
    numbers[0] = total;
    numbers[1] = ((const int32_t *)a)[0] == UNREPRESENTABLE;
    (void)c, (void)d;
}

// a source, b scratch, c count, d target.
void write_kernel(KERNEL_ARGUMENTS) {
    const auto *numbers = (const int64_t *)b;
    const int64_t tiles = (c + TILE - 1) / TILE;
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = numbers[2 + tile], end = tile + 1 < tiles ? numbers[3 + tile] : numbers[0];
        uint8_t *to = (uint8_t *)d + start;
        const bool small = end - start == 1 + in_tile(tile, c);
        *to++ = small;
        for (int64_t i = 0; i < in_tile(tile, c); ++i) {
            const int32_t value = ((const int32_t *)a)[tile * TILE + i];
            if (small)
                *to++ = (uint8_t)(int8_t)value;
            else
                memcpy(to, &value, ITEM), to += ITEM;
        }
    }
}

// a source, b scratch, c count, d bytes of the source: where each tile starts, and the status.
void scan_kernel(KERNEL_ARGUMENTS) {
    auto *numbers = (int64_t *)b;
    int64_t at = 0;
    numbers[0] = numbers[1] = 0;
    for (int64_t tile = first; tile < last; ++tile) {
        numbers[2 + tile] = at;
        if (at >= d || ((const uint8_t *)a)[at] > 1) {
            numbers[1] = 1;
            return;
        }
        at += 1 + in_tile(tile, c) * (((const uint8_t *)a)[at] ? 1 : ITEM);
    }
    numbers[1] = at != d;
}

// a source, b scratch, c count, d target; the operation is behind them in the scratch.
template <int OP>
void read_kernel(KERNEL_ARGUMENTS) {
    const auto *numbers = (const int64_t *)b;
    if (numbers[1]) return;
    for (int64_t tile = first; tile < last; ++tile) {
        const uint8_t *from = (const uint8_t *)a + numbers[2 + tile];
        const bool small = *from++;
        for (int64_t i = 0; i < in_tile(tile, c); ++i) {
            int32_t value = (int8_t)*from, *to = (int32_t *)d + tile * TILE + i;
            if (!small) memcpy(&value, from, ITEM);
            from += small ? 1 : ITEM;
            *to = combined(*to, value, OP);
        }
    }
}

void checksum_tiles(int64_t first, int64_t last, const uint8_t *bytes, int64_t nbytes, uint64_t *sums) {
    for (int64_t tile = first; tile < last; ++tile) {
        sums[tile] = 0;
        for (int64_t i = tile * 4096; i < std::min(nbytes, (tile + 1) * 4096); ++i)
            sums[tile] += bytes[i] * (uint64_t)(i % 251 + 1);
    }
}

void checksum_join(int64_t, int64_t, const uint64_t *sums, int64_t nbytes, uint32_t *result) {
    uint64_t total = 1;
    for (int64_t tile = 0; tile < (nbytes + 4095) / 4096; ++tile) total = (total * 31 + sums[tile]) % 65521;
    *result = (uint32_t)(total << 16 | (total * 7 + 1) % 65521);
}

int64_t max_encoded(int64_t count) { return count * ITEM + (count + TILE - 1) / TILE; }

void record(Codec *codec, int64_t count, bool encodes, bool decodes) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    const auto launch = [&](std::vector<int64_t> &to, void *kernel, int64_t grain, std::vector<int64_t> arguments) {
        to.insert(to.end(), {Launch::KERNEL, (int64_t)kernel, tiles, grain, (int64_t)arguments.size() / 2, 0});
        to.insert(to.end(), arguments.begin(), arguments.end());
    };
    if (encodes) {
        std::vector<int64_t> numbers = {SCRATCH_BYTES, 0, 0, 1, 1, 0, max_encoded(count), 3};
        const std::vector<int64_t> arguments = {SOURCE, 0, SCRATCH, 0, CONSTANT, count, TARGET, 0};
        launch(numbers, (void *)size_kernel, 1, arguments);
        launch(numbers, (void *)place_kernel, 0, arguments);
        launch(numbers, (void *)write_kernel, 1, arguments);
        gc_codec_add(codec, 0, WIRE_ID, 0, count, numbers.data(), (int64_t)numbers.size());
    }
    static void *const readers[] = {(void *)read_kernel<0>, (void *)read_kernel<1>, (void *)read_kernel<2>,
                                    (void *)read_kernel<3>, (void *)read_kernel<4>};
    for (int64_t op = 0; decodes && op < 5; ++op) {
        std::vector<int64_t> numbers = {SCRATCH_BYTES, 0, 0, 0, 0, tiles + count, max_encoded(count), 2};
        launch(numbers, (void *)scan_kernel, 0, {SOURCE, 0, SCRATCH, 0, CONSTANT, count, NBYTES, 0});
        launch(numbers, readers[op], 1, {SOURCE, 0, SCRATCH, 0, CONSTANT, count, TARGET, 0});
        gc_codec_add(codec, 1, WIRE_ID, op, count, numbers.data(), (int64_t)numbers.size());
    }
}

// The codecs of the process: the core misses some recordings of the first, which it has to ask for.
class Codecs {
  public:
    Codec *const none = make(0), *const partial = make(WIRE_ID), *const full = make(WIRE_ID);

    void need(int64_t count) {
        std::lock_guard<std::mutex> guard(lock_);
        if (!count || !known_.insert(count).second) return;
        record(full, count, true, true);
        record(partial, count, count % 5 != 2, count % 7 != 3);
    }

  private:
    static Codec *make(int64_t wire_id) {
        return gc_codec_new(wire_id, DTYPE, ITEM, (void *)reduce_kernel, REDUCE_TILE, 0);
    }

    std::mutex lock_;
    std::set<int64_t> known_;
};
Codecs *codecs;

// Cases

struct Blocks64 {
    int64_t at;
    std::vector<int64_t> starts, counts;
};

struct RankCase {
    std::vector<int64_t> program, values, expected;
    Blocks64 input, output;
};

struct Case {
    int64_t ranks, wire, eager, delay, chunk, per_block, op, raw, updates_own, external, alone, coded, longest;
    int64_t damaged_rank, damage_at, damage_how, seed;
    std::vector<RankCase> by_rank;
};

constexpr int64_t REPEAT = 2, NO_MEMORY = 4;  // kinds of damage: of a message, and an allocation that fails

class Reader {
  public:
    explicit Reader(const char *path) {
        FILE *file = fopen(path, "rb");
        if (!file) die("no file of cases");
        int64_t number;
        while (fread(&number, sizeof number, 1, file) == 1) numbers_.push_back(number);
        fclose(file);
    }

    bool more() const { return at_ < numbers_.size(); }
    int64_t next() { return numbers_.at(at_++); }
    std::vector<int64_t> list() {
        std::vector<int64_t> found((size_t)next());
        for (int64_t &one : found) one = next();
        return found;
    }
    Blocks64 blocks() {
        Blocks64 found;
        found.at = next();
        found.starts = list();
        found.counts = list();
        return found;
    }

  private:
    std::vector<int64_t> numbers_;
    size_t at_ = 0;
};

Case read_case(Reader &from) {
    Case made;
    for (int64_t *field : {&made.ranks, &made.wire, &made.eager, &made.delay, &made.chunk, &made.per_block, &made.op,
                           &made.raw, &made.updates_own, &made.external, &made.alone, &made.coded, &made.longest,
                           &made.damaged_rank, &made.damage_at, &made.damage_how, &made.seed})
        *field = from.next();
    for (int64_t rank = 0; rank < made.ranks; ++rank) {
        RankCase one;
        one.program = from.list();
        one.input = from.blocks();
        one.output = from.blocks();
        one.values = from.list();
        one.expected = from.list();
        made.by_rank.push_back(std::move(one));
    }
    return made;
}

// Memory of external tasks: of the exact size, so that the address sanitizer notices every access outside.

std::atomic<int64_t> allocations{0}, until_no_memory{-1};

int64_t take_memory(int64_t nbytes) {
    if (until_no_memory.load() >= 0 && until_no_memory.fetch_sub(1) == 0) return 0;
    ++allocations;
    return (int64_t)malloc((size_t)std::max<int64_t>(1, nbytes));
}
void give_back_memory(int64_t address, int64_t) {
    --allocations;
    free((void *)address);
}
int64_t open_frame(int64_t address, int64_t nbytes, int64_t, int64_t, int64_t loop) {
    const Header *header = read_header((const uint8_t *)address, nbytes, DTYPE, ITEM);
    if (!header || header->sequence != (uint64_t)loop || !verify((const uint8_t *)address)) return -1;
    return (int64_t)header->decoded_bytes;
}

// A rank and its tasks

enum State { WAITING, RUNNING, SUSPENDED, COMPLETE, ABANDONED, SETTLED };

struct Running {
    const Case *what;
    const RankCase *own;
    int number;  // in the batch
    std::vector<int32_t> memory;
    Program *program = nullptr;
    Task *task = nullptr;
    State state = WAITING;
    bool reported = false;
    std::map<int, std::map<int64_t, int64_t>> reports;  // messages sent to this rank, by peer and channel
    std::vector<int64_t> sent;                          // by lane
};

struct Rank {
    int number = 0;
    Wire *wire = nullptr;    // a FaultyWire
    Wire *mpi = nullptr;
    Context *context = nullptr;
    std::recursive_mutex engine;  // of what follows
    std::vector<Running> tasks;
    std::vector<std::pair<Op *, std::pair<int64_t, int64_t>>> coded;
    Random random;
    std::vector<Record> records{RING};
};

struct World {
    LoopbackNetwork *loopback = nullptr;
    std::unique_ptr<fake_mpi::Network> mpi;
    std::vector<std::unique_ptr<Rank>> ranks;

    World(const Case &first) {
        const auto size = (int)first.ranks;
        const auto seed = (uint64_t)first.seed;
        if (first.wire != 1) loopback = gc_loopback_new(size, first.eager, (int32_t)first.delay, seed);
        if (first.wire) mpi = std::make_unique<fake_mpi::Network>(size, first.eager, (int)first.delay, seed);
        const MpiLibrary library = fake_mpi::library();
        const Segmentation cut = {128, 64, first.seed % 2 ? 1e18 : 1.0};
        for (int number = 0; number < size; ++number) {
            auto rank = std::make_unique<Rank>();
            rank->number = number;
            rank->random.seed(seed * 31 + (uint64_t)number);
            std::vector<int32_t> peers, near;
            for (int peer = 0; peer < size; ++peer) {
                peers.push_back(peer);
                if (peer % 2 == number % 2) near.push_back(peer);
            }
            Wire *inner = nullptr;
            if (mpi)
                inner = rank->mpi = gc_mpi_wire(&library, number, size, 1 << 20, mpi->endpoint(number, 0),
                                                mpi->endpoint(number, 1), mpi->endpoint(number, 2), &cut, peers.data(),
                                                size);
            if (loopback) {
                Wire *far = gc_loopback_wire(loopback, number);
                inner = inner ? gc_mux_wire(inner, far, near.data(), (int32_t)near.size()) : far;
            }
            rank->wire = gc_faulty_wire(inner);
            rank->context = gc_context_new(rank->wire);
            ranks.push_back(std::move(rank));
        }
    }

    ~World() {
        for (const auto &rank : ranks) {
            gc_context_free(rank->context);
            gc_wire_free(rank->wire);
        }
        if (loopback) gc_loopback_free(loopback);
    }

    int64_t left() { return (loopback ? gc_loopback_left(loopback) : 0) + (mpi ? mpi->left() : 0); }
};

struct Totals {
    int64_t cases = 0, failed = 0, preempted = 0, in_python = 0, segmented = 0, relayed = 0, lost = 0;
};

// The cases that run at once

class Batch {
  public:
    Batch(World &world, const std::vector<Case> &cases, bool preempts, bool loses, int64_t patience)
        : world_(world),
          cases_(cases),
          preempts_(preempts),
          loses_(loses),
          patience_(patience),
          random_((uint64_t)cases[0].seed) {}

    void run(Totals &totals) {
        for (const auto &rank : world_.ranks) make_tasks(*rank);
        damage();
        std::vector<std::thread> threads;
        for (const auto &rank : world_.ranks) {
            serving_ += 1;
            threads.emplace_back([this, &rank] { serve(*rank, true); });
            if (!preempts_ || random_() % 3) continue;
            serving_ += 1;
            threads.emplace_back([this, &rank] { serve(*rank, false); });
        }
        if (preempts_) threads.emplace_back([this] { preempt(); });
        if (loses_) threads.emplace_back([this] { lose(); });
        wait();
        // An interrupt ends one `run`, and two threads of a rank may be about to call it.
        for (; serving_.load(); usleep(500))
            for (const auto &rank : world_.ranks) gc_interrupt(rank->context);
        for (std::thread &thread : threads) thread.join();
        check(totals);
    }

  private:
    // Start

    void make_tasks(Rank &rank) {
        rank.tasks = std::vector<Running>(cases_.size());
        for (size_t n = 0; n < cases_.size(); ++n) {
            Running &one = rank.tasks[n];
            const Case &what = *(one.what = &cases_[n]);
            one.own = &what.by_rank[(size_t)rank.number];
            one.number = (int)n;
            one.memory.assign(one.own->values.begin(), one.own->values.end());
            one.program = gc_program_new(one.own->program.data(), (int64_t)one.own->program.size());
            if (!one.program) die("a table that is no program");
            for (const Blocks64 *blocks : {&one.own->input, &one.own->output})
                for (const int64_t count : blocks->counts) {
                    if (count >= what.chunk) codecs->need(what.chunk);
                    codecs->need(count % what.chunk);
                }
            const int64_t slot_bytes = HEADER_BYTES + max_encoded(what.chunk);
            const Options options = {what.chunk,       what.per_block, slot_bytes, tag(rank.number, n),
                                     what.op,          what.raw,       what.raw && !what.external,
                                     what.updates_own, 0,              what.external, what.alone};
            const auto address = [&](const Blocks64 &blocks) {
                return blocks.counts.empty() ? 0 : (int64_t)(one.memory.data() + blocks.at);
            };
            const Blocks64 &in = one.own->input, &out = one.own->output;
            Codec *codec = what.coded ? codecs->partial : codecs->none;
            one.task = gc_task_new(rank.context, one.program, codec, &options, address(in), (int64_t)in.counts.size(),
                                   in.starts.data(), in.counts.data(), address(out), (int64_t)out.counts.size(),
                                   out.starts.data(), out.counts.data());
            if (what.external)
                gc_task_set_python(one.task, take_memory, give_back_memory, take_memory, give_back_memory, open_frame);
            static const int32_t world[] = {0, 1, 2, 3, 4, 5, 6, 7};
            if (rank.random() % 2)
                gc_task_set_trace(one.task, rank.records.data(), RING - 1, world, (int64_t)n, 1, 1, 0);
            for (int peer = 0; peer < what.ranks; ++peer) gc_task_set_peer_tag(one.task, peer, tag(peer, n));
        }
    }

    // Each rank chooses its own tags.
    int64_t tag(int rank, size_t n) const { return 8 * ((int64_t)n * 8 + (rank * 3 + cases_[0].seed) % 8); }

    void damage() {
        const Case &first = cases_[0];
        if (first.damaged_rank < 0) return;
        if (first.damage_how == NO_MEMORY) {
            until_no_memory = first.damage_at;
            return;
        }
        Wire *wire = world_.ranks[(size_t)first.damaged_rank]->wire;
        gc_faulty_damage(wire, first.damage_at, (int32_t)first.damage_how, (uint64_t)first.seed);
        for (int peer = 0; peer < first.ranks; ++peer) gc_faulty_add_target(wire, peer, tag(peer, 0));
    }

    void start(Rank &rank) {
        usleep((useconds_t)((cases_[0].seed * 7 + rank.number * 1237) % 4 ? 0 : 1500));
        std::lock_guard<std::recursive_mutex> guard(rank.engine);
        std::vector<Running *> order;
        for (Running &one : rank.tasks) order.push_back(&one);
        std::shuffle(order.begin(), order.end(), rank.random);
        for (Running *one : order) {
            if (one->state != WAITING) continue;
            gc_task_prepare(one->task, one->what->longest);
            one->state = SUSPENDED;
            if (!preempts_ || rank.random() % 2) resume(*one);
        }
    }

    void resume(Running &one) {
        one.state = RUNNING;
        gc_task_run(one.task);
    }

    void suspend(Running &one) {
        one.state = SUSPENDED;
        ++preempted_;
        gc_task_suspend(one.task);
    }

    // Threads of a rank

    void serve(Rank &rank, bool foreground) {
        if (foreground) start(rank);
        bool busy = true;
        while (!over_.load()) {
            const int64_t timeout = !foreground ? 300'000 : busy ? 100'000 : LONG;
            const int64_t begun = now();
            const int32_t found = gc_run(rank.context, timeout, foreground, !foreground);
            std::lock_guard<std::recursive_mutex> guard(rank.engine);
            if (!found && timeout == LONG && now() - begun >= LONG && !over_.load()) on_silence(rank);
            busy = handle(rank);
        }
        --serving_;
    }

    // A rank with a running task has slept for long: it has missed an event, or the ranks wait for each other.
    void on_silence(Rank &rank) {
        for (const Running &one : rank.tasks)
            if (one.state == RUNNING)
                die(format("seed %ld: a rank has had no event:", cases_[0].seed) + describe(rank, one));
    }

    // Handle the events of a rank; return true if something has to be polled.
    bool handle(Rank &rank) {
        for (const auto &[op, result] : std::exchange(rank.coded, {})) gc_op_done(op, result.first, result.second);
        int32_t kind, code;
        void *task, *op;
        while (gc_next_event(rank.context, &kind, &code, &task, &op)) {
            if (kind == EVENT_CONTROL) receive_reports(rank);
            if (kind == EVENT_CODING) code_op(rank, (Op *)op);
            if (kind == EVENT_FAULT) on_fault(rank);
            for (Running &one : rank.tasks) {
                if (one.task != task || !task) continue;
                if (kind == EVENT_TASK) on_end(rank, one);
                if (kind == EVENT_STALLED && one.state == RUNNING) {
                    if (rank.random() % 2) {
                        gc_task_continue(one.task);
                    } else {
                        suspend(one);
                        resume(one);
                    }
                }
            }
        }
        bool busy = !rank.coded.empty();
        for (Running &one : rank.tasks) {
            if (one.state == ABANDONED) settle(rank, one);
            busy |= one.state == ABANDONED;
        }
        look(rank);
        return busy;
    }

    // Ask for what the monitor asks for.
    void look(Rank &rank) {
        InFlight found[32];
        for (const Running &one : rank.tasks)
            if (one.task) gc_task_in_flight(one.task, found, 32);
        int64_t sent, received;
        gc_bytes(rank.context, &sent, &received);
        gc_probe_any(rank.context);
    }

    // Do what Python does for an op; some ops complete later.
    void code_op(Rank &rank, Op *op) {
        ++in_python_;
        OpInfo info;
        gc_op_info(op, &info);
        const Running *owner = nullptr;
        for (const Running &one : rank.tasks)
            if ((int64_t)one.task == info.task) owner = &one;
        if (!owner) die("an op of no task");
        Codec *codec = owner->what->coded ? codecs->full : codecs->none;
        int64_t nbytes = info.count * ITEM, status = CODING_OK;
        void *target = (void *)info.target;
        const void *operand = (const void *)(info.kind == OP_DECODE ? info.frame : info.source);
        if (info.kind == OP_ENCODE && info.framed)
            nbytes = gc_codec_encode(codec, info.source, info.count, info.frame, info.loop, info.raw);
        else if (info.kind == OP_ENCODE && nbytes)
            memcpy((void *)info.frame, (const void *)info.source, (size_t)nbytes);
        else if (info.kind == OP_DECODE && info.framed)
            status = gc_codec_decode(codec, info.frame, info.frame_bytes, info.target, info.count, info.op, info.loop);
        else if (info.kind == OP_DECODE || info.kind == OP_REDUCE)
            codec->reduce_raw(target, operand, info.count, info.op, true);
        else if (info.kind == OP_COPY)
            memcpy(target, (const void *)info.source, (size_t)nbytes);
        if (rank.random() % 2)
            gc_op_done(op, nbytes, status);
        else
            rank.coded.emplace_back(op, std::make_pair(nbytes, status));
    }

    // Ends and failures

    void on_end(Rank &rank, Running &one) {
        if (one.state >= COMPLETE) return;
        if (gc_task_state(one.task) & FAILED) {
            read_failure(one);
            fail(rank, one);
        } else if (gc_task_state(one.task) & DONE) {
            note_sent(one);
            gc_task_free(one.task);
            one.task = nullptr;
            set(one, COMPLETE);
        }
    }

    void read_failure(Running &one) {
        FailureInfo info;
        gc_task_failure(one.task, &info);
        std::lock_guard<std::mutex> guard(lock_);
        uint64_t sum = 0;
        for (int64_t n = 0; info.frame && n < info.frame_bytes; ++n) sum += ((const uint8_t *)info.frame)[n];
        failures_ += format(" case %d code %ld lane %ld chunk %ld loop %ld bytes %ld sum %ld %s;", one.number,
                            info.code, info.lane, info.chunk, info.loop, info.frame_bytes, sum % 1000, info.text);
    }

    void note_sent(Running &one) {
        one.sent.resize(64);
        one.sent.resize((size_t)gc_task_sent(one.task, one.sent.data(), 64));
    }

    void fail(Rank &rank, Running &one) {
        gc_task_abandon(one.task);
        note_sent(one);
        set(one, ABANDONED);
        report(rank, one);
    }

    void report(Rank &rank, Running &one) {
        if (std::exchange(one.reported, true)) return;
        for (int peer = 0; peer < one.what->ranks; ++peer) {
            if (peer == rank.number) continue;
            std::vector<int64_t> message = {one.number};
            for (size_t lane = 0; lane < one.sent.size(); ++lane)
                if (one.program->lanes[lane].send == peer)
                    message.insert(message.end(), {one.program->lanes[lane].channel, one.sent[lane]});
            gc_send_control(rank.context, peer, (const uint8_t *)message.data(), (int64_t)message.size() * 8);
        }
        std::map<int64_t, int64_t> &own = one.reports[rank.number];
        for (size_t lane = 0; lane < one.sent.size(); ++lane)
            if (one.program->lanes[lane].send == rank.number) own[one.program->lanes[lane].channel] += one.sent[lane];
    }

    void receive_reports(Rank &rank) {
        int64_t numbers[128], nbytes;
        int32_t peer;
        while ((nbytes = gc_next_control(rank.context, &peer, (uint8_t *)numbers, sizeof numbers)) != -1) {
            if (nbytes < 0) die("a report that is too long");
            Running &one = rank.tasks.at((size_t)numbers[0]);
            std::map<int64_t, int64_t> &sent = one.reports[peer];
            for (int64_t n = 1; n < nbytes / 8; n += 2) sent[numbers[n]] += numbers[n + 1];
            if (one.state < COMPLETE) fail(rank, one);
            if (one.state == COMPLETE) report(rank, one);
            if (one.state == COMPLETE && (int64_t)one.reports.size() == one.what->ranks) set(one, SETTLED);
        }
    }

    void settle(Rank &rank, Running &one) {
        if ((int64_t)one.reports.size() < one.what->ranks) return;
        std::vector<int32_t> peers;
        std::vector<int64_t> channels, counts;
        for (const auto &[peer, sent] : one.reports)
            for (const auto &[channel, count] : sent) {
                peers.push_back(peer);
                channels.push_back(channel);
                counts.push_back(count);
            }
        const auto owed = (int64_t)peers.size();
        if (!gc_task_drain(one.task, owed, peers.data(), channels.data(), counts.data()) || !rank.coded.empty()) return;
        gc_task_free(one.task);
        one.task = nullptr;
        set(one, SETTLED);
    }

    void on_fault(Rank &rank) {
        char text[100];
        gc_fault(rank.context, text, sizeof text);
        if (!loses_) die("rank " + std::to_string(rank.number) + ": the wire has a fault: " + text + failures_);
        end_all(rank);
    }

    void end_all(Rank &rank) {
        for (Running &one : rank.tasks) {
            if (one.state == COMPLETE || one.state == SETTLED) continue;
            gc_task_halt(one.task);
            gc_task_quiesce(one.task);
            set(one, SETTLED);
        }
    }

    // Other threads

    void preempt() {
        for (int64_t left = (int64_t)(random_() % 60); left && !over_.load(); --left) {
            Rank &rank = *world_.ranks[random_() % world_.ranks.size()];
            {
                std::lock_guard<std::recursive_mutex> guard(rank.engine);
                Running &one = rank.tasks[random_() % rank.tasks.size()];
                if (one.state == RUNNING) suspend(one);
                else if (one.state == SUSPENDED) resume(one);
                gc_set_polling(rank.context, (int32_t)(random_() % 5), random_() % 2 == 0);
            }
            gc_sleeps(rank.context);
            if (random_() % 4 == 0) gc_interrupt(rank.context);
            usleep((useconds_t)(random_() % 400));
        }
        for (bool waiting = true; waiting && !over_.load();) {
            waiting = false;
            for (const auto &rank : world_.ranks) {
                std::lock_guard<std::recursive_mutex> guard(rank->engine);
                for (Running &one : rank->tasks) {
                    waiting |= one.state == WAITING;
                    if (one.state == SUSPENDED) resume(one);
                }
                gc_set_polling(rank->context, 4, false);
            }
            usleep(200);
        }
    }

    void lose() {
        usleep((useconds_t)(random_() % 3000));
        const auto lost = random_() % world_.ranks.size();
        gc_loopback_lose(world_.loopback, (int32_t)lost);
        Rank &rank = *world_.ranks[lost];
        std::lock_guard<std::recursive_mutex> guard(rank.engine);
        end_all(rank);
    }

    // The end

    void set(Running &one, State state) {
        std::lock_guard<std::mutex> guard(lock_);
        one.state = state;
        std::pair<int64_t, int64_t> &counts = ended_[one.number];
        if (state == COMPLETE) ++counts.first;
        if (state == SETTLED) ++counts.second;
        const int64_t ranks = cases_[0].ranks;
        for (size_t n = 0; n < cases_.size(); ++n) {
            const auto [complete, settled] = ended_[(int)n];
            if (loses_ ? complete + settled < ranks : complete < ranks && settled < ranks) return;
        }
        over_.store(true);
        over_event_.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> guard(lock_);
        if (over_event_.wait_for(guard, std::chrono::seconds(patience_), [&] { return over_.load(); })) return;
        std::string text = format("a batch does not end: seed %ld,", cases_[0].seed) + failures_;
        guard.unlock();
        for (const auto &rank : world_.ranks) {
            std::lock_guard<std::recursive_mutex> engine(rank->engine);
            for (const Running &one : rank->tasks) text += describe(*rank, one);
        }
        die(text);
    }

    static std::string describe(const Rank &rank, const Running &one) {
        std::string text = format("\nrank %d case %d state %d reports %zu", rank.number, one.number, one.state,
                                  one.reports.size());
        if (!one.task) return text;
        const Context::Guard guard(*rank.context);
        for (const Lane &lane : one.task->lanes()) {
            text += format("\n  to %d from %d channel %ld%s: loop %ld chunk %zu phase %d,", lane.program->send,
                           lane.program->receive, lane.program->channel, lane.finished ? " finished" : "", lane.loop,
                           lane.at, lane.phase);
            text += format(" %zu arriving, %zu leaving, %ld slots", lane.arriving.size(), lane.leaving.size(),
                           lane.slots);
        }
        return text;
    }

    void check(Totals &totals) {
        const bool no_memory = cases_[0].damage_how == NO_MEMORY && cases_[0].damaged_rank >= 0;
        bool damaged = no_memory && until_no_memory.exchange(-1) < 0;
        for (const auto &rank : world_.ranks) {
            if (cases_[0].damaged_rank == rank->number && !no_memory) damaged = gc_faulty_damaged_peer(rank->wire) >= 0;
            gc_faulty_damage(rank->wire, 0, 0, 0);  // no target any more
        }
        const int64_t seed = cases_[0].seed;
        for (const Case &what : cases_) {
            const auto number = (size_t)(&what - cases_.data());
            const bool failed = world_.ranks[0]->tasks[number].state == SETTLED;
            // Raw messages have no checksum, and the chunks of a loop the same sequence number.
            const bool unnoticed = !number && damaged && (what.raw || what.damage_how == REPEAT);
            if (!loses_ && failed != (!number && damaged) && !unnoticed)
                die(format("seed %ld case %zu has%s failed:", seed, number, failed ? "" : " not") + failures_);
            ++totals.cases;
            totals.failed += failed;
            for (const auto &rank : world_.ranks) {
                Running &one = rank->tasks[number];
                if (one.task) gc_task_free(one.task);
                gc_program_free(one.program);
                if (failed || loses_ || unnoticed) continue;
                for (size_t n = 0; n < one.memory.size(); ++n)
                    if (one.own->expected[n] != ANY_VALUE && one.own->expected[n] != one.memory[n])
                        die(format("seed %ld case %zu: rank %d element %zu is %d, not %ld", seed, number, rank->number,
                                   n, one.memory[n], one.own->expected[n]));
            }
        }
        if (loses_)
            ++totals.lost;
        else if (world_.left())
            die(format("seed %ld: %ld messages are left", seed, world_.left()));
        // Each worker keeps the scratch memory of one recording.
        if (gc_memory_in_use() % SCRATCH_BYTES || gc_memory_in_use() > 4 * SCRATCH_BYTES || allocations.load())
            die(format("seed %ld: %ld bytes in use, %ld allocations", seed, gc_memory_in_use(), allocations.load()));
        totals.preempted += preempted_;
        totals.in_python += in_python_;
    }

    World &world_;
    const std::vector<Case> &cases_;
    const bool preempts_, loses_;
    const int64_t patience_;
    Random random_;
    std::atomic<bool> over_{false};
    std::atomic<int> serving_{0};
    std::atomic<int64_t> preempted_{0}, in_python_{0};
    std::mutex lock_;  // of what follows
    std::condition_variable over_event_;
    std::map<int, std::pair<int64_t, int64_t>> ended_;
    std::string failures_;
};

}  // namespace

int main(int, char **argv) {
    gc_set_threads(3);
    gc_set_checksum_kernels((void *)checksum_tiles, (void *)checksum_join);
    codecs = new Codecs;
    Reader reader(argv[1]);
    std::map<std::vector<int64_t>, std::unique_ptr<World>> worlds;
    Totals totals;
    while (reader.more()) {
        const int64_t size = reader.next(), preempts = reader.next(), loses = reader.next();
        std::vector<Case> cases;
        for (int64_t n = 0; n < size; ++n) cases.push_back(read_case(reader));
        const Case &first = cases[0];
        std::unique_ptr<World> fresh;
        std::unique_ptr<World> &world = loses ? fresh : worlds[{first.ranks, first.wire, first.eager, first.delay}];
        if (!world) world = std::make_unique<World>(first);
        Batch(*world, cases, preempts, loses, atoll(argv[2])).run(totals);
    }
    for (const auto &[key, world] : worlds)
        for (const auto &rank : world->ranks) {
            int64_t segmented = 0, relayed = 0;
            if (rank->mpi) gc_mpi_counts(rank->mpi, &segmented, &relayed);
            totals.segmented += segmented;
            totals.relayed += relayed;
        }
    worlds.clear();
    gc_stop_workers(1'000'000'000);
    const std::string text =
        format("%ld cases, %ld failed, %ld preempted, %ld in Python, %ld segmented, %ld relayed, %ld lost",
               totals.cases, totals.failed, totals.preempted, totals.in_python, totals.segmented, totals.relayed,
               totals.lost);
    puts(text.c_str());
}
