// The C interface of the core; `core/library.py` declares it to Python. Handles are addresses of objects.
#include <cstdio>
#include <cstring>

#include "context.h"
#include "cuda_device.h"
#include "cuda_queue.h"
#include "frames.h"
#include "faulty_wire.h"
#include "loopback_wire.h"
#include "mpi_wire.h"
#include "mux_wire.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace gpucomp;

namespace {

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

Blocks blocks_of(int64_t address, int64_t count, const int64_t *starts, const int64_t *counts) {
    Blocks blocks;
    blocks.address = (uint8_t *)address;
    blocks.starts.assign(starts, starts + count);
    blocks.counts.assign(counts, counts + count);
    return blocks;
}

void remove_running(Context &context, Task *task) {
    for (size_t n = 0; n < context.running.size(); ++n) {
        if (context.running[n] != task) continue;
        context.running.erase(context.running.begin() + (std::ptrdiff_t)n);
        return;
    }
}

}  // namespace

// Workers, checksums, trace

API void gc_set_threads(int32_t threads) { Workers::shared().set_threads(threads); }
API void gc_stop_workers(int64_t timeout_ns) { Workers::shared().stop(timeout_ns); }
API void gc_set_checksum_kernels(void *tiles, void *join) { set_checksum_kernels(tiles, join); }
API int64_t gc_next_record_number() { return record_numbers().fetch_add(1, std::memory_order_relaxed); }
API int64_t gc_memory_in_use() { return HostMemory::shared().in_use(); }

// Codecs

API Codec *gc_codec_new(int64_t wire_id, int64_t dtype, int64_t itemsize, void *reduce, int64_t reduce_tile,
                        int64_t chooses) {
    auto *codec = new Codec;
    codec->wire_id = (uint32_t)wire_id;
    codec->dtype = (uint8_t)dtype;
    codec->itemsize = itemsize;
    codec->reduce = reduce;
    codec->reduce_tile = reduce_tile;
    codec->chooses = chooses;
    codec->accepted.push_back((uint32_t)wire_id);
    return codec;
}
API void gc_codec_free(Codec *codec) { delete codec; }
API void gc_codec_accept(Codec *codec, int64_t wire_id) { codec->accepted.push_back((uint32_t)wire_id); }
API int32_t gc_codec_add(Codec *codec, int64_t direction, int64_t wire_id, int64_t op, int64_t count,
                         const int64_t *numbers, int64_t length) {
    auto recording = Recording::parse(numbers, length);
    if (!recording) return 0;
    codec->add((int)direction, (uint32_t)wire_id, op, count, std::move(recording));
    return 1;
}
API void gc_codec_add_chooser(Codec *codec, int64_t count, int64_t block, int64_t blocks, double wire, double raw,
                              double margin, int64_t chunks_per_sample, int64_t candidates, const int64_t *ids,
                              const int64_t *sample_counts, const double *costs) {
    Chooser chooser;
    chooser.block = block;
    chooser.blocks = blocks;
    chooser.wire = wire;
    chooser.raw = raw;
    chooser.margin = margin;
    chooser.chunks_per_sample = chunks_per_sample;
    for (int64_t n = 0; n < candidates; ++n) {
        const Recording *sample = codec->find(0, (uint32_t)ids[n], 0, sample_counts[n]);
        if (sample) chooser.candidates.push_back({(uint32_t)ids[n], sample, costs[2 * n], costs[2 * n + 1]});
    }
    codec->add_chooser(count, std::move(chooser));
}

API int64_t gc_codec_encode(Codec *codec, int64_t source, int64_t count, int64_t frame, int64_t sequence, int64_t raw) {
    return codec->encode((const void *)source, count, (uint8_t *)frame, sequence, raw, false);
}
API int64_t gc_codec_decode(Codec *codec, int64_t frame, int64_t nbytes, int64_t target, int64_t count, int64_t op,
                            int64_t sequence) {
    return codec->decode((const uint8_t *)frame, nbytes, (void *)target, count, op, sequence, false, false);
}

// GPUs

API CudaDevice *gc_cuda_new(const char *library, const char *name, void *seal, void *verify, int64_t most_blocks,
                            PythonMemory::Take take, PythonMemory::GiveBack give_back, PythonMemory::Take take_pinned,
                            PythonMemory::GiveBack give_back_pinned, char *reason, int64_t capacity) {
    CudaDriver driver;
    std::string why;
    void *context = nullptr;
    if (driver.load(library, &why) && (driver.ctx_get_current(&context) || !context)) why = "no context is current";
    if (!why.empty()) {
        snprintf(reason, (size_t)capacity, "%s", why.c_str());
        return nullptr;
    }
    auto *made = new CudaDevice(driver, name, context, std::make_unique<PythonMemory>(take, give_back),
                                std::make_unique<PythonMemory>(take_pinned, give_back_pinned));
    made->seal = seal;
    made->verify = verify;
    made->most_blocks = most_blocks;
    return made;
}
API void gc_cuda_name_kernel(CudaDevice *device, void *function, const char *name) { device->name_kernel(function, name); }
API void gc_cuda_trim(CudaDevice *device) {
    device->device->trim();
    device->pinned->trim();
}
API void gc_task_set_cuda(Task *task, CudaDevice *device, void *compute, void *in, void *out) {
    task->cuda = std::make_unique<CudaQueue>(*device, compute, in, out);
}

// Wires

API LoopbackNetwork *gc_loopback_new(int32_t size, int64_t eager, int32_t delay, uint64_t seed) {
    return new LoopbackNetwork(size, eager, delay, seed);
}
API Wire *gc_loopback_wire(LoopbackNetwork *network, int32_t rank) { return new LoopbackWire(*network, rank); }
API void gc_loopback_set_rate(LoopbackNetwork *network, int32_t sender, int32_t receiver, double bytes_per_second) {
    network->set_rate(sender, receiver, bytes_per_second);
}
API void gc_loopback_lose(LoopbackNetwork *network, int32_t rank) { network->lose(rank); }
API int64_t gc_loopback_left(LoopbackNetwork *network) { return network->left(); }
API void gc_loopback_free(LoopbackNetwork *network) { delete network; }

API Wire *gc_faulty_wire(Wire *inner) { return new FaultyWire(inner); }
API void gc_faulty_damage(Wire *wire, int64_t at, int32_t how, uint64_t seed) {
    ((FaultyWire *)wire)->damage(at, (FaultyWire::Damage)how, seed);
}
API void gc_faulty_add_target(Wire *wire, int32_t peer, int64_t tag) { ((FaultyWire *)wire)->add_target(peer, tag); }
API int32_t gc_faulty_damaged_peer(Wire *wire) { return ((FaultyWire *)wire)->damaged_peer(); }
API void gc_faulty_signal_after(Wire *wire, int64_t messages, int32_t signal) {
    ((FaultyWire *)wire)->signal_after(messages, signal);
}

API Wire *gc_mpi_wire(const MpiLibrary *library, int32_t rank, int32_t size, int64_t largest_tag, uint64_t messages,
                      uint64_t segments, uint64_t control, const Segmentation *segmentation, const int32_t *remote,
                      int32_t remotes) {
    return new MpiWire(*library, rank, size, largest_tag, messages, segments, control, *segmentation, remote, remotes);
}
// Segmented and relayed messages so far.
API void gc_mpi_counts(Wire *wire, int64_t *segmented, int64_t *relayed) {
    *segmented = ((MpiWire *)wire)->segmented_messages;
    *relayed = ((MpiWire *)wire)->relayed_messages;
}
API Wire *gc_mux_wire(Wire *near, Wire *far, const int32_t *near_peers, int32_t count) {
    return new MuxWire(near, far, near_peers, count);
}
API int32_t gc_wire_fault(Wire *wire, char *text, int64_t capacity) {
    strncpy(text, wire->fault.text.c_str(), (size_t)capacity - 1);
    text[capacity - 1] = 0;
    return wire->fault.mpi_error;
}
API void gc_wire_free(Wire *wire) { delete wire; }

// Contexts

// nullptr: the process may not open more files.
API Context *gc_context_new(Wire *wire) {
    auto made = std::make_unique<Context>(*wire);
    return made->is_open() ? made.release() : nullptr;
}
API void gc_context_drive_mpi(Context *context, const MpiLibrary *library, uint64_t self, uint64_t world, int32_t tag) {
    context->progress_elsewhere = [known = *library, self, world, tag] {
        drive_mpi(known, self, tag);   // Open MPI progresses nothing for a communicator with failed ranks,
        drive_mpi(known, world, tag);  // MPICH nothing for one of this rank alone
    };
}
API void gc_context_free(Context *context) { delete context; }
API void gc_context_close(Context *context) { context->shut(); }
API int32_t gc_run(Context *context, int64_t timeout, int32_t foreground, int32_t until_moved) {
    return context->run(timeout, foreground, until_moved);
}
API void gc_interrupt(Context *context) { context->interrupt(); }
API int32_t gc_next_event(Context *context, int32_t *kind, int32_t *code, void **task, void **op) {
    Context::Guard guard(*context);
    Event event;
    if (!context->next_event(&event)) return 0;
    *kind = event.kind;
    *code = event.code;
    *task = event.task;
    *op = event.op;
    return 1;
}
// Copy the next control message and return its length; -1: there is none; -2 - length: it is longer than the memory.
API int64_t gc_next_control(Context *context, int32_t *peer, uint8_t *memory, int64_t capacity) {
    Context::Guard guard(*context);
    if (context->control.empty()) return -1;
    auto &[from, message] = context->control.front();
    const auto length = (int64_t)message.size();
    if (length > capacity) return -2 - length;
    memcpy(memory, message.data(), message.size());
    *peer = from;
    context->control.pop_front();
    return length;
}
API void gc_set_polling(Context *context, int32_t eager_polls, int32_t preempting) {
    Context::Guard guard(*context);
    context->eager_polls = eager_polls;
    context->preempting = preempting;
    context->notify();  // a thread that sleeps would not look for stalled tasks
}
API int64_t gc_sleeps(Context *context) { return context->sleeps; }
API int32_t gc_fault(Context *context, char *text, int64_t capacity) {
    Context::Guard guard(*context);
    return gc_wire_fault(&context->wire, text, capacity);
}
API void gc_bytes(Context *context, int64_t *sent, int64_t *received) {
    Context::Guard guard(*context);
    *sent = context->wire.bytes_sent;
    *received = context->wire.bytes_received;
}

// Messages that Python sends and receives itself

API Transfer *gc_send(Context *context, int32_t peer, int64_t tag, int64_t address, int64_t nbytes) {
    Context::Guard guard(*context);
    Transfer *transfer = context->wire.send(peer, tag, (const void *)address, nbytes);
    transfer->posted = now();
    return transfer;
}
API Transfer *gc_receive(Context *context, int32_t peer, int64_t tag, int64_t address, int64_t capacity) {
    Context::Guard guard(*context);
    Transfer *transfer = context->wire.receive(peer, tag, (void *)address, capacity);
    transfer->posted = now();
    return transfer;
}
// 0: in flight, 1: completed, 2: failed, 3: the wire has a fault.
API int32_t gc_test(Context *context, Transfer *transfer, int64_t *nbytes, int32_t *rail, char *text, int64_t capacity) {
    Context::Guard guard(*context);
    if (!context->wire.test(transfer)) {
        const WireFault &fault = context->wire.fault;
        return fault.mpi_error || !fault.text.empty() ? 3 : 0;
    }
    *nbytes = transfer->nbytes;
    *rail = transfer->rail;
    if (transfer->state != Transfer::FAILED) return 1;
    strncpy(text, transfer->error.c_str(), (size_t)capacity - 1);
    text[capacity - 1] = 0;
    return 2;
}
API int32_t gc_cancel(Context *context, Transfer *transfer) {
    Context::Guard guard(*context);
    return context->wire.cancel(transfer);
}
API void gc_release(Context *context, Transfer *transfer) {
    Context::Guard guard(*context);
    context->wire.release(transfer);
}
API int32_t gc_begun(Context *context, Transfer *transfer) {
    Context::Guard guard(*context);
    return context->wire.begun(transfer);
}
API Transfer *gc_relay(Context *context, Transfer *received, int32_t peer, int64_t tag) {
    Context::Guard guard(*context);
    return context->wire.relay(received, peer, tag);
}
API Transfer *gc_discard(Context *context, int32_t peer, int64_t tag) {
    Context::Guard guard(*context);
    return context->wire.discard(peer, tag);
}
API int64_t gc_probe_any(Context *context) {
    Context::Guard guard(*context);
    return context->wire.probe_any();
}
// Return 0, and send nothing, if the wire has a fault.
API int32_t gc_send_control(Context *context, int32_t peer, const uint8_t *data, int64_t nbytes) {
    Context::Guard guard(*context);
    const WireFault &fault = context->wire.fault;
    if (fault.mpi_error || !fault.text.empty()) return 0;
    context->wire.send_control(peer, data, (size_t)nbytes);
    return 1;
}
API void gc_revoke(Context *context, const char *why) {
    Context::Guard guard(*context);
    context->wire.revoke(why);
}
API void gc_close(Context *context, int32_t abandon) {
    Context::Guard guard(*context);
    context->wire.close(abandon);
}
API int32_t gc_closed(Context *context) {
    Context::Guard guard(*context);
    context->wire.poll();
    return context->wire.closed();
}

// Tasks

API Program *gc_program_new(const int64_t *numbers, int64_t length) { return Program::parse(numbers, length).release(); }
API void gc_program_free(Program *program) { delete program; }

API Task *gc_task_new(Context *context, const Program *program, Codec *codec, const Options *options, int64_t input,
                      int64_t input_blocks, const int64_t *input_starts, const int64_t *input_counts, int64_t output,
                      int64_t output_blocks, const int64_t *output_starts, const int64_t *output_counts) {
    TaskOptions chosen;
    chosen.chunk = options->chunk;
    chosen.per_block = options->per_block;
    chosen.slot_bytes = options->slot_bytes;
    chosen.tag = options->tag;
    chosen.op = options->op;
    chosen.raw = options->raw;
    chosen.in_place = options->in_place;
    chosen.updates_own = options->updates_own;
    chosen.update_root = options->update_root;
    chosen.external = options->external;
    chosen.alone = options->alone;
    return new Task(*context, context->wire, *program, *codec, chosen,
                    blocks_of(input, input_blocks, input_starts, input_counts),
                    blocks_of(output, output_blocks, output_starts, output_counts));
}
API void gc_task_free(Task *task) {
    Context::Guard guard(task->context());
    task->context().forget(task);
    remove_running(task->context(), task);
    delete task;
}
API void gc_task_set_python(Task *task, PythonDevice::Take take_slot, PythonDevice::GiveBack give_slot,
                            PythonDevice::Take take_scratch, PythonDevice::GiveBack give_scratch, PythonDevice::Open open) {
    task->slot_memory.take_memory = take_slot;
    task->slot_memory.give_back_memory = give_slot;
    task->scratch_memory.take_memory = take_scratch;
    task->scratch_memory.give_back_memory = give_scratch;
    task->open = open;
}
API void gc_task_set_trace(Task *task, void *records, int64_t mask, const int32_t *world, int64_t call, int64_t name,
                           int64_t call_class, int64_t comm) {
    task->trace.ring = {(Record *)records, mask};
    task->trace.world = world;
    task->trace.call = (uint32_t)call;
    task->trace.name = (uint16_t)name;
    task->trace.call_class = (uint16_t)call_class;
    task->trace.comm = (uint8_t)comm;
}
API void gc_task_set_peer_tag(Task *task, int32_t peer, int64_t tag) {
    Context::Guard guard(task->context());
    task->peer_tags[peer] = tag;
}
API void gc_task_prepare(Task *task, int64_t longest) {
    Context::Guard guard(task->context());
    task->prepare(longest);
}
API void gc_task_post_early(Task *task) {
    Context::Guard guard(task->context());
    task->post_early();
}
API void gc_task_run(Task *task) {
    Context::Guard guard(task->context());
    remove_running(task->context(), task);
    task->active = true;
    task->stalled = false;
    task->last_moved = now();
    task->context().running.push_back(task);
    task->context().notify();
}
API void gc_task_continue(Task *task) {
    Context::Guard guard(task->context());
    task->stalled = false;
    task->last_moved = now();
}
API void gc_task_suspend(Task *task) {
    Context::Guard guard(task->context());
    remove_running(task->context(), task);
    task->suspend();
}
API void gc_task_halt(Task *task) {
    Context::Guard guard(task->context());
    task->active = false;
    remove_running(task->context(), task);
}
API void gc_task_abandon(Task *task) {
    Context::Guard guard(task->context());
    remove_running(task->context(), task);
    task->abandon();
}
API void gc_task_quiesce(Task *task) {
    if (!task->cuda) return task->quiesce();
    Context::Guard guard(task->context());
    task->quiesce();
}
API int32_t gc_task_drain(Task *task, int64_t owed, const int32_t *peers, const int64_t *channels, const int64_t *counts) {
    Context::Guard guard(task->context());
    std::map<std::pair<int, int64_t>, int64_t> messages;
    for (int64_t n = 0; n < owed; ++n) messages[{peers[n], channels[n]}] = counts[n];
    task->context().wire.poll();
    return task->drain(messages);
}
// Bits: 1 done, 2 failed, 4 busy.
API int32_t gc_task_state(Task *task) {
    Context::Guard guard(task->context());
    return task->done | task->failed << 1 | task->busy() << 2;
}
API void gc_task_failure(Task *task, FailureInfo *info) {
    Context::Guard guard(task->context());
    const Failure &failure = task->failure;
    *info = {failure.code, failure.lane, failure.peer, failure.chunk, failure.loop, failure.count, failure.op,
             (int64_t)failure.frame, failure.nbytes, failure.text.c_str()};
}
// The messages sent by each lane.
API int64_t gc_task_sent(Task *task, int64_t *counts, int64_t capacity) {
    Context::Guard guard(task->context());
    int64_t n = 0;
    for (const Lane &lane : task->lanes()) {
        if (n == capacity) break;
        counts[n++] = lane.sent;
    }
    return n;
}
API int64_t gc_task_in_flight(Task *task, InFlight *found, int64_t capacity) {
    Context::Guard guard(task->context());
    int64_t n = 0;
    for (const Lane &lane : task->lanes()) {
        // A relayed message does not count for the next link until all of it has arrived here.
        for (const Lane::Leaving &one : lane.leaving)
            if (n < capacity && one.transfer->posted)
                found[n++] = {RECORD_SEND, lane.program->send, one.transfer->rail, one.transfer->posted, 0, one.slot->nbytes};
        for (const auto &[transfer, slot] : lane.arriving)
            if (n < capacity)
                found[n++] = {RECORD_RECV, lane.program->receive, transfer->rail, transfer->posted, transfer->waited, 0};
    }
    return n;
}

// Ops that Python carries out

API void gc_op_info(Op *op, OpInfo *info) {
    *info = {(int64_t)op->task, op->kind, (int64_t)op->source, (int64_t)op->target, op->count, op->op, op->loop, op->chunk,
             op->lane ? op->lane->number : -1, op->raw, op->framed, op->slot ? (int64_t)op->slot->memory : 0,
             op->slot ? op->slot->nbytes : 0, op->task->options.slot_bytes};
}
API void gc_op_done(Op *op, int64_t nbytes, int64_t status) {
    Context &context = op->task->context();
    {
        Context::Guard guard(context);
        op->task->op_done(op, nbytes, (CodingStatus)status);
    }
    context.notify();
}
