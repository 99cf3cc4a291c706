// One running collective: executes this rank's program of a schedule, lane by lane.
//
// A lane is a state machine that stops where it has to wait and goes on from there when it is polled again. So a task
// that is not progressed keeps its place. Encoding and decoding run beside the lanes, as ops: an op starts when no
// earlier unfinished op of the task reads or writes the same elements in a conflicting way.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "coding.h"
#include "memory.h"
#include "trace.h"
#include "wire.h"
#include "workers.h"

namespace gpucomp {

constexpr int AHEAD = 2;       // receives that a lane posts ahead; as many as sends where they need no staging memory
constexpr int DEPTH = 8;       // sends of a lane in flight: the buffered chunks of `schedule.ir`
constexpr int PREFETCH = 3;    // chunks that are encoded before their send is due
constexpr size_t MAX_OPS = 64; // unfinished ops of a task: local copies wait beyond that
constexpr int64_t GROW_AFTER = 5'000'000;  // ns without progress after which a lane gets slots for all buffered sends

enum Kind : int64_t { SEND, RECEIVE, FORWARD, REDUCE_SEND, REDUCE_STORE, REDUCE_STORE_SEND, COPY, REDUCE, NOP };

struct Place {
    int64_t buffer = -1;  // 0 input, 1 output, 2 scratch
    int64_t chunk = 0;
};

// A step of one chunk, as `engine/program.py` writes it.
struct Step {
    Kind kind = NOP;
    bool first = false, last = false;  // of the chunks of a step of the schedule
    Place source, target;
    int64_t value = -1, uses = 0;      // the value that is sent, and how many sends use it in this form
    bool initial = false;              // it was there at the start of the loop
    bool in_place = false;             // and is never overwritten: it can be sent from where it is
    bool final = false;                // it is in writable memory and stays: a lossy codec may settle it
    int64_t written = -1, shares = 0;  // the value that is written, and how many sends use the frame it came in
    bool shares_raw = false;           // in which form these send
    bool written_final = false;
    bool zero_copy = false;            // a raw message may be received in its place: nothing was written there before
    std::vector<std::pair<int64_t, int64_t>> after;  // lanes, and how many of their steps must have completed

    bool receives() const { return kind >= RECEIVE && kind <= REDUCE_STORE_SEND; }
    bool sends() const { return kind == SEND || kind == FORWARD || kind == REDUCE_SEND || kind == REDUCE_STORE_SEND; }
    bool reduces() const { return kind >= REDUCE_SEND && kind <= REDUCE_STORE_SEND; }
    const Place &place() const { return target.buffer >= 0 ? target : source; }
};

struct LaneProgram {
    int send = -1, receive = -1;
    int64_t channel = 0;
    bool raw = false, receives_raw = false;
    int64_t shared = 0;      // frames per loop that may be kept for the sends of other lanes
    int64_t steps = 0;       // of the schedule, in a loop
    std::vector<Step> chunks;
    std::vector<int64_t> receiving;  // positions in `chunks`
};

struct Program {
    std::vector<LaneProgram> lanes;
    int64_t values = 0;

    static std::unique_ptr<Program> parse(const int64_t *numbers, int64_t length);
};

// A caller's buffer as blocks.
struct Blocks {
    uint8_t *address = nullptr;
    std::vector<int64_t> starts, counts;
};

struct TaskOptions {
    int64_t chunk = 1, per_block = 1, slot_bytes = 0, tag = 0, op = 1;
    bool raw = false;          // without frames and codec
    bool in_place = false;     // messages may be sent from and received into the elements' memory
    bool updates_own = false;  // a rank that sends a final value replaces its own by the decoded one
    bool update_root = false;
    bool external = false;     // all coding is done by Python
    bool alone = false;        // short chunks: coded by the thread that polls
};

class Context;
class CudaQueue;
class Task;
struct Lane;

// Memory of a frame that is being filled, sent, forwarded or decoded; each of those holds it once.
struct Slot {
    uint8_t *memory = nullptr;
    int64_t nbytes = 0, decoded_bytes = 0;
    int holders = 1;
    Lane *staging = nullptr;  // nullptr: the caller's memory, used in place
    bool verified = false;
};

// A frame that several sends use, or will use once it is encoded.
struct Shared {
    int64_t left = 0;
    Slot *slot = nullptr;
};

struct Range {
    const uint8_t *begin = nullptr, *end = nullptr;
    bool overlaps(const Range &other) const { return begin < other.end && other.begin < end; }
};

enum OpKind : int32_t { OP_ENCODE = 1, OP_DECODE = 2, OP_COPY = 3, OP_REDUCE = 4, OP_RELEASE = 5 };

struct Op : Work {
    enum State { WAITING, RUNNING, REFUSED, DONE, HANDLED };  // refused: Python has to do it

    Task *task = nullptr;
    Lane *lane = nullptr;
    OpKind kind = OP_COPY;
    std::atomic<int> state{WAITING};
    bool with_python = false;
    const uint8_t *source = nullptr;
    uint8_t *target = nullptr;
    int64_t count = 0, op = 0, loop = 0, chunk = 0, posted = 0;
    bool raw = false, framed = true, silent = false;
    Slot *slot = nullptr;
    uint64_t shared = 0;     // key of the frame to publish, 0: none
    bool blocks_lane = false;
    void *freed = nullptr;   // memory to release when everything before has completed
    int64_t freed_bytes = 0;
    Range reads, writes;
    int64_t nbytes = 0;
    CodingStatus status = CODING_OK;

    void run() override;
    bool conflicts(const Op &earlier) const {
        return writes.overlaps(earlier.writes) || writes.overlaps(earlier.reads) || reads.overlaps(earlier.writes);
    }
};

struct Lane {
    const LaneProgram *program = nullptr;
    int number = 0;
    int64_t loop = 0;
    size_t at = 0;
    int phase = 0;
    bool finished = false;
    Slot *slot = nullptr;        // the message that is being handled
    Op *encoding = nullptr;      // the op that the lane waits for
    bool relayed = false;
    std::deque<std::pair<Transfer *, Slot *>> arriving;
    struct Leaving {
        Transfer *transfer;
        Slot *slot;
        Transfer *received;  // the message that is relayed, which must stay as long
    };
    std::deque<Leaving> leaving;
    int64_t messages = 0, expected = 0;
    int64_t slots = 0;           // free
    bool grown = false, wants_slot = false;
    int64_t sent = 0, taken = 0, left = 0;
    int64_t taken_at = 0, interval = INT64_MAX;
    uint8_t *temporary = nullptr;
    int64_t temporary_bytes = 0;
};

struct Failure {
    int32_t code = 0;  // a CodingStatus, or one of the following
    int32_t lane = 0;
    int64_t chunk = 0, loop = 0, peer = -1, nbytes = 0, count = 0, op = 0;
    const uint8_t *frame = nullptr;
    std::string text;
};
enum : int32_t { FAILED_LENGTH = 100, FAILED_SCRATCH = 101, FAILED_TRANSFER = 102, FAILED_MEMORY = 103, FAILED_SEQUENCE = 104 };

// What Python does for tasks whose codec or memory is not the core's.
struct PythonDevice : Memory {
    using Take = int64_t (*)(int64_t nbytes);
    using GiveBack = void (*)(int64_t address, int64_t nbytes);
    using Open = int64_t (*)(int64_t address, int64_t nbytes, int64_t lane, int64_t chunk, int64_t loop);

    Take take_memory = nullptr;
    GiveBack give_back_memory = nullptr;

    void *take(int64_t nbytes) override { return (void *)take_memory(nbytes); }
    void give_back(void *address, int64_t nbytes) override { give_back_memory((int64_t)address, nbytes); }
};

class Task {
  public:
    Task(Context &context, Wire &wire, const Program &program, Codec &codec, const TaskOptions &options, Blocks input,
         Blocks output);
    ~Task();

    TaskOptions options;
    Codec &codec;
    CallTrace trace;
    std::unordered_map<int, int64_t> peer_tags;
    PythonDevice slot_memory, scratch_memory;  // of external tasks
    PythonDevice::Open open = nullptr;
    std::unique_ptr<CudaQueue> cuda;  // of tasks whose elements are on a GPU

    bool done = false, failed = false, active = false, stalled = false;
    int64_t last_moved = 0, longest_wait = 0;  // for preemption
    Failure failure;

    void prepare(int64_t longest);
    // Post receives of a task that does not run yet; the last of each lane is withheld, so that no sender completes
    // before this rank runs.
    void post_early();
    bool progress();
    void suspend();
    void abandon();
    void quiesce();
    bool drain(const std::map<std::pair<int, int64_t>, int64_t> &owed);
    void op_done(Op *op, int64_t nbytes, CodingStatus status);

    bool busy() const { return !ops_.empty(); }
    bool ended() const { return abandoned_; }
    const std::deque<Lane> &lanes() const { return lanes_; }
    Context &context() { return context_; }
    int64_t waits_for_slot_since() const { return slot_wait_; }
    bool waits_for_gpu() const;

  private:
    bool advance(Lane &lane);
    bool step(Lane &lane);
    bool after_done(const Step &step, int64_t loop) const;
    void end_step(Lane &lane);
    void end_loop(int64_t loop);

    bool receive(Lane &lane, const Step &step);
    bool open_frame(Lane &lane, const Step &step, Slot *slot, bool forwarded);
    bool run_send(Lane &lane, const Step &step);
    bool run_receive(Lane &lane, const Step &step);
    bool run_reduce(Lane &lane, const Step &step);
    bool run_local(Lane &lane, const Step &step);
    Shared *encode_shared(Lane &lane, const Step &step, int64_t loop);
    void prefetch(Lane &lane);
    void share(const Step &step, int64_t loop, Slot *slot, bool raw);
    void post(Lane &lane, Slot *slot);
    void leave(Lane &lane, Transfer *transfer, Slot *slot, Transfer *received = nullptr);
    bool release_sent(Lane &lane);
    void post_receives(Lane &lane, int64_t withheld = 0);
    bool wants_receive(const Lane &lane, bool in_place) const;
    Transfer *head(Lane &lane);

    Op *encode(Lane &lane, const uint8_t *source, int64_t count, int64_t loop, int64_t chunk, Slot *slot);
    void decode(Lane &lane, Slot *slot, uint8_t *target, int64_t count, int64_t op, int64_t loop, int64_t chunk,
                bool silent = false);
    void queue(Op *op);
    bool finish_ops();
    bool start_ops();
    bool check_done();
    void fail(Lane *lane, int32_t code, int64_t loop, int64_t chunk, Slot *slot = nullptr, int64_t count = 0);

    Slot *take_slot(Lane &lane);
    Slot *in_place_slot(uint8_t *memory, int64_t nbytes);
    Slot *hold(Slot *slot, int64_t times = 1) {
        slot->holders += (int)times;
        return slot;
    }
    void release(Slot *slot);
    int64_t length(const Place &place, int64_t loop) const;
    bool fits(Lane &lane, const Step &step, int64_t count);
    uint8_t *elements(const Place &place, int64_t loop) const;
    uint8_t *take_scratch(Lane &lane, int64_t nbytes);
    uint8_t *write_scratch(Lane &lane, int64_t chunk, int64_t count);
    uint64_t key(int64_t loop, int64_t value, bool raw) const { return ((uint64_t)loop * program_.values + value) * 2 + raw + 1; }
    Memory &slots();
    Memory &scratch();
    int64_t tag_of(int peer) const {
        const auto found = peer_tags.find(peer);
        return found == peer_tags.end() ? options.tag : found->second;
    }

    Context &context_;
    Wire &wire_;
    const Program &program_;
    Blocks input_, output_;
    int64_t loops_ = 0;
    std::deque<Lane> lanes_;
    std::vector<int64_t> finished_;  // steps, by lane
    std::unordered_map<uint64_t, Shared> shared_;
    struct ScratchChunk {
        uint8_t *memory;
        int64_t count;
    };
    std::map<std::pair<int64_t, int64_t>, ScratchChunk> scratch_;  // by loop and chunk
    std::deque<Op *> ops_;
    std::vector<Transfer *> discarding_;
    std::map<std::pair<int, int64_t>, int64_t> drained_;
    bool abandoned_ = false;
    std::vector<Slot *> all_slots_, free_slots_;
    int64_t slot_wait_ = 0;
};

}  // namespace gpucomp
