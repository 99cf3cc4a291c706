#include "task.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "context.h"
#include "cuda_queue.h"
#include "frames.h"

namespace gpucomp {

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

std::unique_ptr<Program> Program::parse(const int64_t *numbers, int64_t length) {
    const int64_t *at = numbers, *end = numbers + length;
    auto program = std::make_unique<Program>();
    bool whole = true;
    auto next = [&]() -> int64_t {
        if (at < end) return *at++;
        whole = false;
        return 0;
    };
    const int64_t lanes = next();
    program->values = next();
    for (int64_t n = 0; whole && n < lanes; ++n) {
        LaneProgram lane;
        lane.send = (int)next();
        lane.receive = (int)next();
        lane.channel = next();
        lane.raw = next();
        lane.receives_raw = next();
        lane.shared = next();
        lane.steps = next();
        const int64_t chunks = next();
        for (int64_t c = 0; whole && c < chunks; ++c) {
            Step step;
            step.kind = (Kind)next();
            step.first = next();
            step.last = next();
            step.source = {next(), 0};
            step.source.chunk = next();
            step.target = {next(), 0};
            step.target.chunk = next();
            step.value = next();
            step.uses = next();
            step.initial = next();
            step.in_place = next();
            step.final = next();
            step.written = next();
            step.shares = next();
            step.shares_raw = next();
            step.written_final = next();
            step.zero_copy = next();
            const int64_t after = next();
            for (int64_t a = 0; whole && a < after; ++a) {
                const int64_t other = next();
                step.after.emplace_back(other, next());
            }
            if (step.receives()) lane.receiving.push_back((int64_t)lane.chunks.size());
            lane.chunks.push_back(std::move(step));
        }
        program->lanes.push_back(std::move(lane));
    }
    return whole && at == end ? std::move(program) : nullptr;
}

void Op::run() {
    const Context::Completion completion(task->context());
    const bool alone = task->options.alone;
    int64_t size = count * task->codec.itemsize;
    CodingStatus outcome = CODING_OK;
    switch (kind) {
        case OP_ENCODE:
            if (framed)
                size = task->codec.encode(source, count, slot->memory, loop, raw, alone);
            else
                memcpy(slot->memory, source, size);
            break;
        case OP_DECODE:
            if (framed)
                outcome = task->codec.decode(slot->memory, slot->nbytes, target, count, op, loop, slot->verified, alone);
            else if (!op)
                memcpy(target, slot->memory, size);
            else
                task->codec.reduce_raw(target, slot->memory, count, op, alone);
            break;
        case OP_COPY:
            memcpy(target, source, size);
            break;
        case OP_REDUCE:
            task->codec.reduce_raw(target, source, count, op, alone);
            break;
        case OP_RELEASE:
            break;
    }
    nbytes = size;
    status = outcome;
    state.store(outcome == CODING_MISSING ? REFUSED : DONE, std::memory_order_release);
}

Task::Task(Context &context, Wire &wire, const Program &program, Codec &codec, const TaskOptions &options, Blocks input,
           Blocks output)
    : options(options),
      codec(codec),
      context_(context),
      wire_(wire),
      program_(program),
      input_(std::move(input)),
      output_(std::move(output)),
      finished_(program.lanes.size()) {}

Task::~Task() {
    if (cuda) cuda->synchronize();
    std::set<Transfer *> transfers(discarding_.begin(), discarding_.end());
    for (Lane &lane : lanes_) {
        for (auto &[transfer, slot] : lane.arriving) transfers.insert(transfer);
        for (auto &[transfer, slot, received] : lane.leaving) transfers.insert({transfer, received});
        if (lane.temporary) scratch().give_back(lane.temporary, lane.temporary_bytes);
    }
    transfers.erase(nullptr);
    for (Transfer *transfer : transfers) wire_.release(transfer);
    for (Op *op : ops_) {
        if (op->freed) scratch().give_back(op->freed, op->freed_bytes);
        delete op;
    }
    for (auto &[place, chunk] : scratch_) scratch().give_back(chunk.memory, options.chunk * codec.itemsize);
    for (Slot *slot : all_slots_) {
        if (slot->staging && slot->memory) slots().give_back(slot->memory, options.slot_bytes);
        delete slot;
    }
}

void Task::prepare(int64_t longest) {
    loops_ = (longest + options.chunk * options.per_block - 1) / (options.chunk * options.per_block);
    for (size_t n = 0; n < program_.lanes.size(); ++n) {
        Lane &lane = lanes_.emplace_back();
        lane.program = &program_.lanes[n];
        lane.number = (int)n;
        lane.messages = lane.expected = loops_ * (int64_t)lane.program->receiving.size();
        // Frames kept for other lanes must not take the slots of those that would let them progress.
        lane.slots = 2 * AHEAD + lane.program->shared;
        lane.finished = !loops_ || lane.program->chunks.empty();
        if (lane.program->chunks.empty()) finished_[n] = loops_ * lane.program->steps;
    }
    if (cuda) cuda->begin();
    last_moved = now();
    active = true;
}

void Task::post_early() {
    for (Lane &lane : lanes_) post_receives(lane, 1);
}

bool Task::waits_for_gpu() const { return cuda && (cuda->busy() || (options.in_place && !cuda->begun())); }

// Progress all lanes as far as possible without blocking; return true if anything moved.
bool Task::progress() {
    if (done || failed || abandoned_) return finish_ops();
    bool moved = finish_ops();
    if (cuda && options.in_place && !cuda->begun()) return moved;  // the wire accesses the elements themselves
    for (Lane &lane : lanes_) {
        moved |= release_sent(lane);
        post_receives(lane);
        while (!failed && advance(lane)) moved = true;
        if (failed) return true;
        prefetch(lane);
    }
    moved |= start_ops();
    moved |= check_done();
    const int64_t time = now();
    if (moved) {
        longest_wait = std::max(longest_wait, time - last_moved);
        last_moved = time;
        slot_wait_ = 0;
        return true;
    }
    slot_wait_ = 0;
    for (Lane &lane : lanes_) {
        if (!lane.wants_slot || lane.grown) continue;
        slot_wait_ = last_moved;
        if (time - last_moved < GROW_AFTER) continue;
        // Every send may have to be buffered before a receive is reached, also where wires complete nothing that is not
        // tested, and the receives that are posted ahead keep their slots.
        lane.slots += DEPTH - AHEAD;
        lane.grown = moved = true;
    }
    return moved;
}

// Run the next part of a lane; return false if it has to wait.
bool Task::advance(Lane &lane) {
    if (lane.finished || ops_.size() >= MAX_OPS) return false;
    if (lane.encoding) return false;
    lane.wants_slot = false;
    const Step &step = lane.program->chunks[lane.at];
    if (lane.phase == 0) {
        if (step.first && !after_done(step, lane.loop)) return false;
        lane.phase = 1;
    }
    bool finished = true;
    switch (step.kind) {
        case SEND:
            finished = run_send(lane, step);
            break;
        case RECEIVE:
        case FORWARD:
            finished = run_receive(lane, step);
            break;
        case REDUCE_SEND:
        case REDUCE_STORE:
        case REDUCE_STORE_SEND:
            finished = run_reduce(lane, step);
            break;
        case COPY:
        case REDUCE:
            finished = run_local(lane, step);
            break;
        case NOP:
            break;
    }
    if (finished && !failed) end_step(lane);
    return finished;
}

bool Task::after_done(const Step &step, int64_t loop) const {
    for (const auto &[other, steps] : step.after)
        if (finished_[other] < loop * program_.lanes[other].steps + steps) return false;
    return true;
}

void Task::end_step(Lane &lane) {
    if (lane.program->chunks[lane.at].last) ++finished_[lane.number];
    lane.phase = 0;
    if (++lane.at < lane.program->chunks.size()) return;
    lane.at = 0;
    end_loop(lane.loop);
    if (++lane.loop == loops_) lane.finished = true;
}

// Release scratch when the last lane leaves a loop, behind the ops that use it.
void Task::end_loop(int64_t loop) {
    if (scratch_.empty()) return;
    for (size_t n = 0; n < finished_.size(); ++n)
        if (finished_[n] < (loop + 1) * program_.lanes[n].steps) return;
    for (auto at = scratch_.lower_bound({loop, 0}); at != scratch_.end() && at->first.first == loop;) {
        Op *op = new Op;
        op->kind = OP_RELEASE;
        op->freed = at->second.memory;
        op->freed_bytes = options.chunk * codec.itemsize;
        queue(op);
        at = scratch_.erase(at);
    }
}

// Return the next message of a lane, for a step that receives it; nullptr if there was no slot for its receive.
Transfer *Task::head(Lane &lane) {
    lane.wants_slot = lane.arriving.empty();
    return lane.wants_slot ? nullptr : lane.arriving.front().first;
}

// Take the next message of a lane and read its frame; false: it has not arrived.
bool Task::receive(Lane &lane, const Step &step) {
    Transfer *transfer = head(lane);
    if (!transfer || !wire_.test(transfer)) {
        if (transfer && !transfer->waited) transfer->waited = now();
        return false;
    }
    Slot *slot = lane.arriving.front().second;
    if (transfer->state == Transfer::FAILED) {
        failure.text = transfer->error;
        fail(&lane, FAILED_TRANSFER, lane.loop, step.place().chunk);
        return false;
    }
    lane.arriving.pop_front();
    const int64_t time = now();
    if (lane.taken_at) lane.interval = std::max<int64_t>(0, time - lane.taken_at);
    lane.taken_at = time;
    slot->nbytes = transfer->nbytes;
    ++lane.taken;
    if (trace)
        trace.write(RECORD_RECV, transfer->posted, transfer->waited, time, transfer->nbytes, 0, lane.program->receive,
                    lane.number, lane.taken, transfer->rail);
    if (!lane.relayed) wire_.release(transfer);
    lane.slot = slot;
    return open_frame(lane, step, slot, !lane.relayed && (step.kind == FORWARD || step.shares));
}

// Check the header of a received frame, and its payload before others get it.
bool Task::open_frame(Lane &lane, const Step &step, Slot *slot, bool forwarded) {
    if (options.raw) {
        slot->decoded_bytes = slot->nbytes;
        return true;
    }
    const int64_t chunk = step.place().chunk;
    if (options.external) {
        slot->decoded_bytes = open((int64_t)slot->memory, slot->nbytes, lane.number, chunk, lane.loop);
        if (slot->decoded_bytes >= 0) return true;
        fail(&lane, CODING_PYTHON, lane.loop, chunk, slot);
        return false;
    }
    const Header *header = read_header(slot->memory, slot->nbytes, codec.dtype, codec.itemsize);
    int32_t code = 0;
    if (!header)
        code = CODING_BAD_HEADER;
    else if (header->sequence != (uint64_t)lane.loop)
        code = FAILED_SEQUENCE;
    else if (forwarded && !cuda && !(slot->verified = verify(slot->memory)))
        code = CODING_BAD_CHECKSUM;
    if (code) {
        fail(&lane, code, lane.loop, chunk, slot);
        return false;
    }
    slot->decoded_bytes = (int64_t)header->decoded_bytes;
    return true;
}

// Send a chunk in the frame that it arrived in or that was encoded before, or encode it.
bool Task::run_send(Lane &lane, const Step &step) {
    Shared *shared = encode_shared(lane, step, lane.loop);
    if (!shared || !shared->slot || lane.leaving.size() >= DEPTH) return false;
    Slot *slot = shared->slot;
    if (!--shared->left) shared_.erase(key(lane.loop, step.value, lane.program->raw));
    post(lane, slot);
    return true;
}

// Return the frame of the value that a step sends, whose encoding is started if it was not; nullptr: no slot is free.
Shared *Task::encode_shared(Lane &lane, const Step &step, int64_t loop) {
    const uint64_t name = key(loop, step.value, lane.program->raw);
    const auto found = shared_.find(name);
    if (found != shared_.end()) return &found->second;
    const int64_t count = length(step.source, loop);
    uint8_t *source = elements(step.source, loop);
    if (options.in_place && step.in_place) {
        Shared &shared = shared_[name];
        shared = {step.uses, hold(in_place_slot(source, count * codec.itemsize), step.uses - 1)};
        return &shared;
    }
    Slot *slot = take_slot(lane);
    if (!slot) return nullptr;
    Shared &shared = shared_[name];
    shared.left = step.uses;
    Op *op = encode(lane, source, count, loop, step.source.chunk, slot);
    op->shared = name;
    queue(op);
    if (options.updates_own && (step.final || options.update_root))
        decode(lane, hold(slot), source, count, 0, loop, step.source.chunk);
    return &shared_[name];
}

// Encode chunks whose sends are due soon, where their elements are there from the start.
void Task::prefetch(Lane &lane) {
    if (lane.finished || options.external || (options.raw && options.in_place)) return;
    size_t at = lane.at;
    int64_t loop = lane.loop;
    const int64_t reserve = lane.program->receive >= 0 ? AHEAD : 0;
    for (int ahead = 0; ahead < PREFETCH && lane.slots > reserve && ops_.size() < MAX_OPS; ++ahead) {
        const Step &step = lane.program->chunks[at];
        if (step.kind != SEND || !step.initial) return;
        encode_shared(lane, step, loop);
        if (++at == lane.program->chunks.size()) {
            at = 0;
            if (++loop == loops_) return;
        }
    }
}

// Receive a chunk, decode it, and forward it where the step says so: while it arrives if the wire can.
bool Task::run_receive(Lane &lane, const Step &step) {
    if (lane.phase == 1) {
        if (step.kind == FORWARD) {
            Transfer *transfer = head(lane);
            if (!transfer || !wire_.begun(transfer)) {
                if (transfer && !transfer->waited) transfer->waited = now();
                return false;
            }
            const int peer = lane.program->send;
            Transfer *relay = transfer->state == Transfer::FAILED
                                  ? nullptr
                                  : wire_.relay(transfer, peer, tag_of(peer) + lane.program->channel);
            lane.relayed = relay != nullptr;
            if (relay) leave(lane, relay, hold(lane.arriving.front().second), transfer);
        }
        lane.phase = 2;
    }
    if (!receive(lane, step)) return false;
    Slot *slot = lane.slot;
    lane.slot = nullptr;
    share(step, lane.loop, slot, step.shares_raw);
    if (step.kind == FORWARD && !lane.relayed) post(lane, hold(slot));
    lane.relayed = false;
    uint8_t *target;
    int64_t count;
    if (step.target.buffer == 2) {
        count = slot->decoded_bytes / codec.itemsize;
        if (count > options.chunk) {
            fail(&lane, FAILED_SCRATCH, lane.loop, step.target.chunk, slot, count);
            return false;
        }
        target = write_scratch(lane, step.target.chunk, count);
        if (!target) return false;
    } else {
        count = length(step.target, lane.loop);
        target = elements(step.target, lane.loop);
    }
    decode(lane, slot, target, count, 0, lane.loop, step.target.chunk);
    return true;
}

// Reduce a received chunk with the local one; store the result, send it, or both.
bool Task::run_reduce(Lane &lane, const Step &step) {
    const int64_t count = length(step.source, lane.loop), nbytes = count * codec.itemsize;
    if (lane.phase == 1) {
        if (step.kind != REDUCE_SEND && !fits(lane, step, count)) return false;
        if (!lane.slot && !receive(lane, step)) return false;
        uint8_t *source = elements(step.source, lane.loop), *target;
        if (step.kind == REDUCE_SEND) {
            lane.temporary_bytes = nbytes;
            target = lane.temporary = take_scratch(lane, nbytes);
        } else if (step.target.buffer == 2) {
            target = write_scratch(lane, step.target.chunk, count);
        } else {
            target = elements(step.target, lane.loop);
        }
        if (failed) return false;
        if (target != source && count) {
            Op *op = new Op;
            op->kind = OP_COPY;
            op->source = source;
            op->target = target;
            op->count = count;
            op->reads = {source, source + nbytes};
            op->writes = {target, target + nbytes};
            queue(op);
        }
        Slot *slot = lane.slot;
        lane.slot = nullptr;
        decode(lane, slot, target, count, options.op, lane.loop, step.place().chunk);
        if (!step.sends()) return true;
        lane.phase = 2;
    }
    if (lane.phase == 2) {
        Slot *slot = take_slot(lane);
        if (!slot) return false;
        uint8_t *target = lane.temporary ? lane.temporary
                          : step.target.buffer == 2 ? scratch_[{lane.loop, step.target.chunk}].memory
                                                    : elements(step.target, lane.loop);
        Op *op = encode(lane, target, count, lane.loop, step.place().chunk, slot);
        op->blocks_lane = true;
        queue(op);
        if (options.updates_own && step.written_final && !lane.temporary)
            decode(lane, hold(slot), target, count, 0, lane.loop, step.place().chunk);
        if (lane.temporary) {
            Op *end = new Op;
            end->kind = OP_RELEASE;
            end->freed = lane.temporary;
            end->freed_bytes = lane.temporary_bytes;
            queue(end);
            lane.temporary = nullptr;
        }
        lane.encoding = op;
        lane.slot = slot;
        lane.phase = 3;
        return false;
    }
    Slot *slot = lane.slot;
    lane.slot = nullptr;
    share(step, lane.loop, slot, lane.program->raw);
    post(lane, slot);
    return true;
}

// Copy or reduce a local chunk.
bool Task::run_local(Lane &lane, const Step &step) {
    const int64_t count = length(step.source, lane.loop), nbytes = count * codec.itemsize;
    if (!fits(lane, step, count)) return false;
    uint8_t *source = elements(step.source, lane.loop);
    uint8_t *target = step.target.buffer == 2 ? write_scratch(lane, step.target.chunk, count)
                                              : elements(step.target, lane.loop);
    if (failed) return false;
    if (!count) return true;
    Op *op = new Op;
    op->kind = step.kind == COPY ? OP_COPY : OP_REDUCE;
    op->source = source;
    op->target = target;
    op->count = count;
    op->op = options.op;
    op->reads = {source, source + nbytes};
    op->writes = {target, target + nbytes};
    queue(op);
    return true;
}

// Keep a frame for the lanes that will send the same chunk in the same form.
void Task::share(const Step &step, int64_t loop, Slot *slot, bool raw) {
    if (step.shares) shared_[key(loop, step.written, raw)] = {step.shares, hold(slot, step.shares)};
}

void Task::post(Lane &lane, Slot *slot) {
    const int peer = lane.program->send;
    Transfer *transfer = wire_.send(peer, tag_of(peer) + lane.program->channel, slot->memory, slot->nbytes);
    transfer->posted = now();
    leave(lane, transfer, slot);
}

void Task::leave(Lane &lane, Transfer *transfer, Slot *slot, Transfer *received) {
    ++lane.sent;
    lane.leaving.push_back({transfer, slot, received});
}

bool Task::release_sent(Lane &lane) {
    bool moved = false;
    while (!lane.leaving.empty() && wire_.test(lane.leaving.front().transfer)) {
        const auto [transfer, slot, received] = lane.leaving.front();
        if (lane.relayed && received == lane.arriving.front().first) break;  // the lane has not taken the message yet
        lane.leaving.pop_front();
        ++lane.left;
        if (trace)
            trace.write(RECORD_SEND, transfer->posted, transfer->posted, now(), slot->nbytes, 0, lane.program->send,
                        lane.number, lane.left, transfer->rail);
        wire_.release(transfer);
        if (received) wire_.release(received);
        release(slot);
        moved = true;
    }
    return moved;
}

bool Task::wants_receive(const Lane &lane, bool in_place) const {
    if (lane.arriving.empty()) return true;
    if (lane.arriving.size() >= (size_t)(in_place ? DEPTH : AHEAD)) return false;
    // Where messages with posted receives are interleaved, the first of two would arrive no sooner than the second. So
    // the second receive is posted when about half of the first message should have arrived.
    constexpr int64_t QUICK = 1'000'000;
    return !wire_.interleaves() || lane.interval < QUICK || now() - lane.taken_at > lane.interval / 2;
}

void Task::post_receives(Lane &lane, int64_t withheld) {
    const int peer = lane.program->receive;
    while (peer >= 0 && lane.expected > withheld) {
        const int64_t next = lane.messages - lane.expected;
        const int64_t per_loop = (int64_t)lane.program->receiving.size();
        const Step &step = lane.program->chunks[lane.program->receiving[next % per_loop]];
        const bool in_place = options.in_place && step.zero_copy;
        if (!wants_receive(lane, in_place)) return;
        Slot *slot;
        int64_t capacity = options.slot_bytes;
        if (in_place) {
            const int64_t loop = next / per_loop;
            capacity = length(step.target, loop) * codec.itemsize;
            slot = in_place_slot(elements(step.target, loop), capacity);
        } else {
            slot = take_slot(lane);
            lane.wants_slot = false;  // a receive that is posted ahead may wait
            if (!slot) return;
        }
        Transfer *transfer = wire_.receive(peer, options.tag + lane.program->channel, slot->memory, capacity);
        transfer->posted = now();
        lane.arriving.emplace_back(transfer, slot);
        --lane.expected;
    }
}

// Ops

Op *Task::encode(Lane &lane, const uint8_t *source, int64_t count, int64_t loop, int64_t chunk, Slot *slot) {
    Op *op = new Op;
    op->kind = OP_ENCODE;
    op->lane = &lane;
    op->source = source;
    op->count = count;
    op->loop = loop;
    op->chunk = chunk;
    op->slot = slot;
    op->raw = lane.program->raw;
    op->framed = !options.raw;
    op->reads = {source, source + count * codec.itemsize};
    op->with_python = options.external || (op->framed && !op->raw && !codec.encodes(count));
    return op;
}

// Decode a frame, or store a raw message; it gives the slot back.
void Task::decode(Lane &lane, Slot *slot, uint8_t *target, int64_t count, int64_t reduction, int64_t loop,
                  int64_t chunk, bool silent) {
    const int64_t nbytes = count * codec.itemsize;
    if (options.raw) {
        if (slot->nbytes != nbytes) {
            fail(&lane, FAILED_LENGTH, loop, chunk, slot, count);
            return;
        }
        if (!slot->staging) {
            release(slot);
            return;
        }
    }
    Op *op = new Op;
    op->kind = OP_DECODE;
    op->lane = &lane;
    op->target = target;
    op->count = count;
    op->op = reduction;
    op->loop = loop;
    op->chunk = chunk;
    op->slot = slot;
    op->framed = !options.raw;
    op->silent = silent;
    op->writes = {target, target + nbytes};
    op->with_python = options.external;
    queue(op);
}

void Task::queue(Op *op) {
    op->task = this;
    op->posted = now();
    if (op->kind == OP_COPY || op->kind == OP_REDUCE) op->with_python = options.external;
    ops_.push_back(op);
}

// Start the ops that conflict with no earlier one; return true if any was run at once.
bool Task::start_ops() {
    bool ran = false;
    for (size_t n = 0; n < ops_.size(); ++n) {
        Op *op = ops_[n];
        if (op->state.load(std::memory_order_relaxed) != Op::WAITING) continue;
        bool free = true;
        for (size_t earlier = 0; free && earlier < n; ++earlier) {
            const Op &before = *ops_[earlier];
            const int state = before.state.load(std::memory_order_acquire);
            if (state == Op::HANDLED) continue;
            if (op->kind == OP_RELEASE)
                free = state == Op::DONE;
            else if (op->slot && op->slot == before.slot)
                free = false;  // a frame is decoded into its sender's own memory once its length is known
            else if (cuda && state == Op::RUNNING && !op->with_python && !before.with_python &&
                     CudaQueue::stream_of(*op) == CudaQueue::stream_of(before))
                continue;  // behind it on the same stream
            else if (!options.external)  // Python queues its work on one stream, in order
                free = state == Op::DONE || !op->conflicts(before);
        }
        if (!free) continue;
        op->state.store(Op::RUNNING, std::memory_order_relaxed);
        if (op->kind == OP_RELEASE) {
            op->state.store(Op::DONE, std::memory_order_relaxed);
            ran = true;
        } else if (op->with_python) {
            context_.ask_python(op);
        } else if (cuda) {
            cuda->start(op);
            ran = true;
        } else if (options.alone) {
            op->run();
            ran = true;
        } else {
            Workers::shared().submit(op);
        }
    }
    return ran;
}

// Python has done an op.
void Task::op_done(Op *op, int64_t nbytes, CodingStatus status) {
    op->nbytes = nbytes;
    op->status = status;
    op->state.store(Op::DONE, std::memory_order_release);
}

// Handle the ops that have completed; return true if there were any.
bool Task::finish_ops() {
    bool moved = cuda && cuda->poll();
    for (size_t n = 0; n < ops_.size() && !failed; ++n) {
        Op *op = ops_[n];
        const int state = op->state.load(std::memory_order_acquire);
        if (state == Op::REFUSED) {
            op->with_python = true;
            op->status = CODING_OK;
            op->state.store(Op::RUNNING, std::memory_order_relaxed);
            context_.ask_python(op);
        }
        if (state != Op::DONE) continue;
        moved = true;
        op->state.store(Op::HANDLED, std::memory_order_release);
        if (op->status != CODING_OK) {
            if (cuda) failure.text = cuda->error();
            fail(op->lane, op->status, op->loop, op->chunk, op->slot, op->count);
            failure.op = op->op;
            return true;
        }
        const int64_t raw_bytes = op->count * codec.itemsize;
        if (op->kind == OP_ENCODE) {
            op->slot->nbytes = op->nbytes;
            op->slot->decoded_bytes = raw_bytes;
            op->slot->verified = true;
            if (trace)
                trace.write(RECORD_ENCODE, op->posted, op->posted, now(), op->nbytes, raw_bytes, -1, op->lane->number,
                            op->loop, 0);
            if (op->blocks_lane) op->lane->encoding = nullptr;
            if (op->shared) {
                Shared &shared = shared_[op->shared];
                shared.slot = hold(op->slot, shared.left - 1);
            }
        } else if (op->kind == OP_DECODE) {
            if (trace)
                trace.write(RECORD_DECODE, op->posted, op->posted, now(), op->slot->nbytes, raw_bytes, -1,
                            op->lane->number, op->loop, 0);
            release(op->slot);
            op->slot = nullptr;
        } else if (op->kind == OP_RELEASE) {
            scratch().give_back(op->freed, op->freed_bytes);
            op->freed = nullptr;
        }
    }
    while (!ops_.empty() && ops_.front()->state.load(std::memory_order_relaxed) == Op::HANDLED) {
        delete ops_.front();
        ops_.pop_front();
    }
    return moved;
}

bool Task::check_done() {
    if (!ops_.empty()) return false;
    for (const Lane &lane : lanes_)
        if (!lane.finished || !lane.leaving.empty()) return false;
    done = true;
    context_.task_ended(this);
    return true;
}

void Task::fail(Lane *lane, int32_t code, int64_t loop, int64_t chunk, Slot *slot, int64_t count) {
    if (failed) return;
    failed = true;
    failure.code = code;
    failure.lane = lane ? lane->number : 0;
    failure.peer = lane ? lane->program->receive : -1;
    failure.loop = loop;
    failure.chunk = chunk;
    failure.count = count;
    if (slot) {
        failure.frame = slot->memory;
        failure.nbytes = slot->nbytes;
    }
    context_.task_ended(this);
}

// Preemption and failure

// Cancel unmatched receives and return their memory; other transfers continue.
void Task::suspend() {
    active = false;
    for (Lane &lane : lanes_) {
        while (!lane.arriving.empty() && wire_.cancel(lane.arriving.back().first)) {
            release(lane.arriving.back().second);
            lane.arriving.pop_back();
            ++lane.expected;
        }
    }
}

// Stop: receive, encode and send nothing more.
void Task::abandon() {
    suspend();
    abandoned_ = true;
    for (Op *op : ops_)
        if (op->state.load(std::memory_order_relaxed) == Op::WAITING) op->state.store(Op::HANDLED);
}

// Wait for running ops: afterwards nothing accesses the caller's buffers.
void Task::quiesce() {
    if (cuda) cuda->synchronize();
    for (const Op *op : ops_)
        while (op->state.load(std::memory_order_acquire) == Op::RUNNING && !op->with_python) usleep(50);
}

// Complete what is in flight, and drop what peers have sent (`owed`, by peer and channel); true if nothing is left.
bool Task::drain(const std::map<std::pair<int, int64_t>, int64_t> &owed) {
    for (Lane &lane : lanes_) {
        const std::pair<int, int64_t> from = {lane.program->receive, lane.program->channel};
        drained_[from] += lane.taken + (int64_t)lane.arriving.size();
        lane.taken = 0;
        for (auto &[transfer, slot] : lane.arriving) discarding_.push_back(transfer);
        lane.arriving.clear();
    }
    for (const auto &[from, count] : owed) {
        while (drained_[from] < count) {
            Transfer *transfer = wire_.discard(from.first, options.tag + from.second);
            if (!transfer) break;
            ++drained_[from];
            discarding_.push_back(transfer);
        }
    }
    if (cuda) cuda->poll();
    bool quiet = true;
    for (Transfer *transfer : discarding_) quiet &= wire_.test(transfer);
    for (Lane &lane : lanes_)
        for (const Lane::Leaving &one : lane.leaving) quiet &= wire_.test(one.transfer);
    // An op that was refused is not done any more.
    for (const Op *op : ops_) quiet &= op->state.load(std::memory_order_acquire) != Op::RUNNING;
    for (const auto &[from, count] : owed) quiet &= drained_[from] >= count;
    return quiet;
}

// Memory

Memory &Task::slots() {
    return options.external ? (Memory &)slot_memory : cuda ? cuda->slots() : HostMemory::shared();
}

Memory &Task::scratch() {
    return options.external ? (Memory &)scratch_memory : cuda ? cuda->scratch() : HostMemory::shared();
}

Slot *Task::take_slot(Lane &lane) {
    if (!lane.slots) {
        lane.wants_slot = true;
        return nullptr;
    }
    auto *memory = (uint8_t *)slots().take(options.slot_bytes);
    if (!memory) {
        fail(&lane, FAILED_MEMORY, lane.loop, 0);
        return nullptr;
    }
    --lane.slots;
    Slot *slot = in_place_slot(memory, 0);
    slot->staging = &lane;
    return slot;
}

Slot *Task::in_place_slot(uint8_t *memory, int64_t nbytes) {
    Slot *slot;
    if (free_slots_.empty()) {
        slot = new Slot;
        all_slots_.push_back(slot);
    } else {
        slot = free_slots_.back();
        free_slots_.pop_back();
        *slot = Slot();
    }
    slot->memory = memory;
    slot->nbytes = nbytes;
    return slot;
}

void Task::release(Slot *slot) {
    if (--slot->holders) return;
    if (slot->staging) {
        ++slot->staging->slots;
        slots().give_back(slot->memory, options.slot_bytes);
        slot->staging = nullptr;
    }
    slot->memory = nullptr;
    free_slots_.push_back(slot);
}

int64_t Task::length(const Place &place, int64_t loop) const {
    if (place.buffer == 2) return scratch_.at({loop, place.chunk}).count;
    const Blocks &blocks = place.buffer ? output_ : input_;
    const int64_t start = (loop * options.per_block + place.chunk % options.per_block) * options.chunk;
    const int64_t left = blocks.counts[place.chunk / options.per_block] - start;
    return std::max<int64_t>(0, std::min(options.chunk, left));
}

// Return true if a chunk has the length of the caller's chunk that it is written to; else fail: a peer has sent another
// length to scratch memory, where any length fits.
bool Task::fits(Lane &lane, const Step &step, int64_t count) {
    if (step.target.buffer < 0 || step.target.buffer == 2 || length(step.target, lane.loop) == count) return true;
    fail(&lane, FAILED_LENGTH, lane.loop, step.target.chunk, nullptr, length(step.target, lane.loop));
    failure.nbytes = count * codec.itemsize;
    return false;
}

uint8_t *Task::elements(const Place &place, int64_t loop) const {
    if (place.buffer == 2) return scratch_.at({loop, place.chunk}).memory;
    const Blocks &blocks = place.buffer ? output_ : input_;
    if (!length(place, loop)) return blocks.address;
    const int64_t start = (loop * options.per_block + place.chunk % options.per_block) * options.chunk;
    return blocks.address + (blocks.starts[place.chunk / options.per_block] + start) * codec.itemsize;
}

// Return nullptr, and fail, if there is no memory.
uint8_t *Task::take_scratch(Lane &lane, int64_t nbytes) {
    auto *memory = (uint8_t *)scratch().take(nbytes);
    if (!memory) fail(&lane, FAILED_MEMORY, lane.loop, 0);
    return memory;
}

uint8_t *Task::write_scratch(Lane &lane, int64_t chunk, int64_t count) {
    auto found = scratch_.find({lane.loop, chunk});
    if (found == scratch_.end()) {
        uint8_t *memory = take_scratch(lane, options.chunk * codec.itemsize);
        if (!memory) return nullptr;
        found = scratch_.emplace(std::make_pair(lane.loop, chunk), ScratchChunk{memory, 0}).first;
    }
    found->second.count = count;
    return found->second.memory;
}

}  // namespace gpucomp
