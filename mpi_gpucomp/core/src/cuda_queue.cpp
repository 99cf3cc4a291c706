#include "cuda_queue.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "frames.h"

namespace gpucomp {
namespace {

constexpr int64_t STATE_BYTES = 40, REPORTS = MAX_OPS + 8, CHECKSUM_TILE = 4096;
constexpr int64_t WARPS_PER_BLOCK = 4;  // as in kernels/simt_cuda.h
constexpr unsigned THREADS = 32 * WARPS_PER_BLOCK;
constexpr size_t PARAMETERS = 16;
constexpr int64_t MOST_TILES_OF_CHECKSUM_BLOCK = 4 * WARPS_PER_BLOCK;
constexpr uint64_t BAD_CHECKSUM = 4;  // as in kernels/status.h

int64_t aligned(int64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

}  // namespace

CudaQueue::CudaQueue(CudaDevice &device, void *compute, void *in, void *out) : device_(device), streams_{compute, in, out} {
    const CudaDevice::Current current(device_);
    state_ = (uint8_t *)device_.device->take(STATE_BYTES);
    reports_ = (uint8_t *)device_.pinned->take(REPORTS * (int64_t)sizeof(Report));
    if (!state_ || !reports_) {
        error_ = device_.name + ": no memory";
        return;
    }
    for (int64_t n = 0; n < REPORTS; ++n) free_reports_.push_back((Report *)reports_ + n);
    check(current.code, nullptr);
    check(device_.driver.memset_async((uint64_t)state_, 0, STATE_BYTES, streams_[COMPUTE]), nullptr);
}

CudaQueue::~CudaQueue() {
    synchronize();
    for (const auto &[memory, nbytes] : lost_) device_.device->give_back(memory, nbytes);
    device_.give_back_event(begun_);
    if (state_) device_.device->give_back(state_, STATE_BYTES);
    if (reports_) device_.pinned->give_back(reports_, REPORTS * (int64_t)sizeof(Report));
}

void CudaQueue::begin() {
    const CudaDevice::Current current(device_);
    begun_ = device_.take_event();
    if (!check(device_.driver.event_record(begun_, streams_[COMPUTE]), nullptr)) return;
    for (const Stream other : {IN, OUT}) check(device_.driver.stream_wait_event(streams_[other], begun_, 0), nullptr);
}

bool CudaQueue::begun() {
    if (!begun_ || !error_.empty()) return true;
    const CudaDevice::Current current(device_);
    const int code = device_.driver.event_query(begun_);
    if (code == CUDA_NOT_READY) return false;
    check(code, nullptr);
    device_.give_back_event(begun_);
    begun_ = nullptr;
    return true;
}

void CudaQueue::start(Op *op) {
    const CudaDevice::Current current(device_);
    jobs_.emplace_back(op, stream_of(*op));
    Job &job = jobs_.back();
    const int64_t nbytes = op->nbytes = op->count * op->task->codec.itemsize;
    bool queued = error_.empty() && check(current.code, &job);
    if (queued) {
        switch (op->kind) {
            case OP_ENCODE:
                if (op->framed)
                    queued = encode(job);
                else
                    queued = order(OUT, COMPUTE) && copy(op->slot->memory, op->source, nbytes, OUT) && mark(job, OUT);
                break;
            case OP_DECODE:
                queued = decode(job);
                break;
            case OP_COPY:
                queued = copy(op->target, op->source, nbytes, COMPUTE) && mark(job, COMPUTE);
                break;
            case OP_REDUCE:
                queued = reduce(job, op->target, op->source) && mark(job, COMPUTE);
                break;
            case OP_RELEASE:
                break;
        }
    }
    if (!queued) end(job, op->status == CODING_OK ? CODING_DEVICE : op->status);
    while (!jobs_.empty() && !jobs_.front().op) jobs_.pop_front();
}

bool CudaQueue::poll() {
    if (jobs_.empty()) return false;
    const CudaDevice::Current current(device_);
    bool moved = false, waiting[STREAMS] = {};
    for (Job &job : jobs_) {
        if (!job.op || waiting[job.stream]) continue;
        const int code = job.event ? device_.driver.event_query(job.event) : 0;
        if (code == CUDA_NOT_READY && error_.empty()) {
            waiting[job.stream] = true;
            continue;
        }
        moved = true;
        if (!check(code, &job) || !error_.empty())
            end(job, CODING_DEVICE);
        else if (!complete(job))
            end(job, job.op->status == CODING_OK ? CODING_DEVICE : job.op->status);
    }
    while (!jobs_.empty() && !jobs_.front().op) jobs_.pop_front();
    return moved;
}

void CudaQueue::synchronize() {
    const CudaDevice::Current current(device_);
    for (void *stream : streams_) {
        void *event = device_.take_event();
        if (!device_.driver.event_record(event, stream)) device_.driver.event_synchronize(event);
        device_.give_back_event(event);
    }
    while (busy()) poll();
}

// Encoding

bool CudaQueue::encode(Job &job) {
    Op &op = *job.op;
    Codec &codec = op.task->codec;
    const int64_t nbytes = op.count * codec.itemsize;
    if (!op.count) {
        write_header(op.slot->memory, codec.wire_id, codec.dtype, op.loop, 0, 0, op.raw);
        op.nbytes = HEADER_BYTES;
        end(job, CODING_OK);
        return true;
    }
    if (op.raw || !codec.wire_id) return encode_raw(job);
    job.recording = codec.find(0, codec.wire_id, 0, op.count);
    if (!job.recording) {
        op.status = CODING_MISSING;
        return false;
    }
    const Recording &recording = *job.recording;
    const int64_t scratch = aligned(recording.scratch_bytes);
    const int64_t most = std::max(nbytes, (int64_t)recording.most);  // a raw payload may follow
    if (!take(job, scratch + HEADER_BYTES + most)) return false;
    job.frame = job.memory + scratch;
    if (!run(job, recording, op.source, job.frame + HEADER_BYTES, job.memory, nbytes) ||
        !seal(job, codec.wire_id, recording.base, recording.slope, false, (int64_t)recording.most))
        return false;
    if (recording.slope) {
        job.sized = false;
        return mark(job, COMPUTE);
    }
    return send_out(job, HEADER_BYTES + recording.base);
}

bool CudaQueue::encode_raw(Job &job) {
    Op &op = *job.op;
    const int64_t nbytes = op.count * op.task->codec.itemsize;
    job.recording = nullptr;
    job.sized = true;
    if (!job.frame) {
        if (!take(job, HEADER_BYTES + nbytes)) return false;
        job.frame = job.memory;
    }
    // The codec none sends its payload as it is, and without the flag of chunks that another codec could not shrink.
    const bool raw = op.raw || op.task->codec.wire_id;
    return copy(job.frame + HEADER_BYTES, op.source, nbytes, COMPUTE) &&
           seal(job, op.task->codec.wire_id, nbytes, 0, raw, nbytes) && send_out(job, HEADER_BYTES + nbytes);
}

bool CudaQueue::seal(Job &job, uint32_t wire_id, int64_t base, int64_t slope, bool raw, int64_t most) {
    const Op &op = *job.op;
    if (!job.report) {
        job.report = free_reports_.back();
        free_reports_.pop_back();
    }
    Header header = empty_header(wire_id, op.task->codec.dtype, raw);
    int64_t kind;
    memcpy(&kind, &header, sizeof kind);
    const int64_t tiles = std::max<int64_t>(1, (most + CHECKSUM_TILE - 1) / CHECKSUM_TILE);
    int64_t values[] = {(int64_t)job.frame, (int64_t)state_, tiles, base, slope, kind, (int64_t)wire_id, op.loop,
                        op.count * op.task->codec.itemsize, (int64_t)job.report};
    const int64_t blocks = (tiles + MOST_TILES_OF_CHECKSUM_BLOCK - 1) / MOST_TILES_OF_CHECKSUM_BLOCK;
    return launch(job, device_.seal, tiles, blocks, values, 10);
}

// Copy the frame to the memory that it is sent from.
bool CudaQueue::send_out(Job &job, int64_t nbytes) {
    job.op->nbytes = nbytes;
    return order(OUT, COMPUTE) && copy(job.op->slot->memory, job.frame, nbytes, OUT) && mark(job, OUT);
}

// Decoding

bool CudaQueue::decode(Job &job) {
    Op &op = *job.op;
    const Codec &codec = op.task->codec;
    const uint8_t *frame = op.slot->memory;
    const int64_t decoded = op.count * codec.itemsize;
    if (!op.framed) {
        if (!op.op) return copy(op.target, frame, decoded, COMPUTE) && mark(job, COMPUTE);
        return take(job, decoded) && copy(job.memory, frame, decoded, IN) && order(COMPUTE, IN) &&
               reduce(job, op.target, job.memory) && mark(job, COMPUTE);
    }
    const Header *header = read_header(frame, op.slot->nbytes, codec.dtype, codec.itemsize);
    if (!header || !codec.accepts(header->wire_id) || header->decoded_bytes != (uint64_t)decoded ||
        header->sequence != (uint64_t)op.loop) {
        op.status = CODING_BAD_HEADER;
        return false;
    }
    const bool raw = header->raw() || !header->wire_id;
    const Recording *recording = raw || !op.count ? nullptr : codec.find(1, header->wire_id, op.op, op.count);
    if (!raw && op.count && !recording) {
        op.status = CODING_MISSING;  // of a length that no chunk of ours has
        return false;
    }
    const int64_t nbytes = (int64_t)header->payload_bytes;
    if (recording ? header->payload_bytes < recording->least || header->payload_bytes > recording->most
                  : nbytes != (raw ? decoded : 0)) {
        op.status = CODING_BAD_PAYLOAD;
        return false;
    }
    if (!op.count) {
        end(job, gpucomp::verify(frame) ? CODING_OK : CODING_BAD_CHECKSUM);
        return true;
    }
    const int64_t scratch = recording ? aligned(recording->scratch_bytes) : 0;
    if (!take(job, scratch + HEADER_BYTES + nbytes)) return false;
    job.frame = job.memory + scratch;
    uint8_t *payload = job.frame + HEADER_BYTES;
    if (!copy(job.frame, frame, HEADER_BYTES + nbytes, IN) || !order(COMPUTE, IN)) return false;
    const bool queued = recording ? run(job, *recording, payload, op.target, job.memory, nbytes)
                        : op.op   ? reduce(job, op.target, payload)
                                  : copy(op.target, payload, nbytes, COMPUTE);
    if (!queued) return false;
    // The verification of a frame comes behind its decoding, which is safe on any bytes: it also reports the decoder's status.
    job.report = free_reports_.back();
    free_reports_.pop_back();
    const int64_t tiles = std::max<int64_t>(1, (nbytes + CHECKSUM_TILE - 1) / CHECKSUM_TILE);
    int64_t values[] = {(int64_t)job.frame, (int64_t)state_, tiles, nbytes, (int64_t)job.report};
    const int64_t blocks = (tiles + MOST_TILES_OF_CHECKSUM_BLOCK - 1) / MOST_TILES_OF_CHECKSUM_BLOCK;
    return launch(job, device_.verify, tiles, blocks, values, 5) && mark(job, COMPUTE);
}

// Work on the GPU

bool CudaQueue::run(Job &job, const Recording &recording, const void *source, void *target, uint8_t *scratch, int64_t nbytes) {
    const int64_t results = (int64_t)state_ + 24;  // size and status in the state
    const int64_t bases[] = {0, (int64_t)source, (int64_t)target, (int64_t)scratch, nbytes, results};
    for (const Launch &one : recording.launches) {
        int64_t values[PARAMETERS];
        const size_t count = one.integers.size();
        for (size_t k = 0; k < count; ++k) values[k] = bases[one.integers[k].base] + one.integers[k].value;
        bool queued;
        if (one.kind == Launch::COPY)
            queued = copy((void *)values[0], (const void *)values[1], values[2], COMPUTE);
        else if (one.kind == Launch::FILL)
            queued = check(device_.driver.memset_async((uint64_t)values[0], (unsigned char)values[1], (size_t)values[2],
                                                       streams_[COMPUTE]), &job);
        else
            queued = launch(job, one.function, one.tiles, one.grain, values, count);
        if (!queued) return false;
    }
    return true;
}

bool CudaQueue::launch(Job &job, void *function, int64_t tiles, int64_t blocks, int64_t *values, size_t count) {
    int64_t first = 0;
    void *parameters[PARAMETERS + 2] = {&first, &tiles};
    for (size_t k = 0; k < count; ++k) parameters[k + 2] = values + k;
    job.kernels.push_back(function);
    const auto grid = (unsigned)std::max<int64_t>(1, std::min(blocks, device_.most_blocks));
    return check(device_.driver.launch_kernel(function, grid, 1, 1, THREADS, 1, 1, 0, streams_[COMPUTE], parameters, nullptr),
                 &job);
}

bool CudaQueue::reduce(Job &job, void *target, const void *source) {
    const Codec &codec = job.op->task->codec;
    const int64_t count = job.op->count, tiles = (count + codec.reduce_tile - 1) / codec.reduce_tile;
    int64_t values[] = {(int64_t)target, (int64_t)source, count, job.op->op};
    return launch(job, codec.reduce, tiles, (tiles + WARPS_PER_BLOCK - 1) / WARPS_PER_BLOCK, values, 4);
}

bool CudaQueue::copy(void *to, const void *from, int64_t nbytes, Stream stream) {
    return !nbytes ||
           check(device_.driver.memcpy_async((uint64_t)to, (uint64_t)from, (size_t)nbytes, streams_[stream]), nullptr);
}

// Record the event that completes the job.
bool CudaQueue::mark(Job &job, Stream stream) {
    if (!job.event) job.event = device_.take_event();
    job.stream = stream;
    return check(device_.driver.event_record(job.event, streams_[stream]), &job);
}

// Let later work of a stream wait for what is queued on another.
bool CudaQueue::order(Stream later, Stream earlier) {
    void *event = device_.take_event();
    const bool done = check(device_.driver.event_record(event, streams_[earlier]), nullptr) &&
                      check(device_.driver.stream_wait_event(streams_[later], event, 0), nullptr);
    device_.give_back_event(event);  // a wait refers to what was recorded before, also if it is recorded again
    return done;
}

bool CudaQueue::take(Job &job, int64_t nbytes) {
    job.memory = (uint8_t *)device_.device->take(nbytes);
    if (!job.memory) {
        job.op->status = CODING_NO_MEMORY;
        return false;
    }
    job.nbytes = nbytes;
    return true;
}

// Completion

// The work of a job up to its event has completed; return false if it has failed.
bool CudaQueue::complete(Job &job) {
    Op &op = *job.op;
    if (op.kind == OP_ENCODE && job.recording) {
        const uint64_t raw_bytes = (uint64_t)(op.count * op.task->codec.itemsize);
        if (job.report->status & job.recording->unrepresentable || job.report->size >= raw_bytes) return encode_raw(job);
        if (!job.sized) {
            job.sized = true;
            return send_out(job, HEADER_BYTES + (int64_t)job.report->size);
        }
    }
    CodingStatus status = CODING_OK;
    if (op.kind == OP_DECODE && job.report && job.report->status)
        status = job.report->status & BAD_CHECKSUM ? CODING_BAD_CHECKSUM : CODING_BAD_PAYLOAD;
    end(job, status);
    return true;
}

void CudaQueue::end(Job &job, CodingStatus status) {
    if (!job.op) return;
    if (job.memory && status == CODING_DEVICE)
        lost_.emplace_back(job.memory, job.nbytes);
    else if (job.memory)
        device_.device->give_back(job.memory, job.nbytes);
    if (job.report) free_reports_.push_back(job.report);
    device_.give_back_event(job.event);
    job.op->status = status;
    job.op->state.store(status == CODING_MISSING ? Op::REFUSED : Op::DONE, std::memory_order_release);
    job.op = nullptr;
}

// Return true for success; remember the first error with the kernels that it may come from.
bool CudaQueue::check(int code, const Job *job) {
    if (!code) return true;
    if (!error_.empty()) return false;
    const char *name = nullptr;
    device_.driver.get_error_name(code, &name);
    error_ = device_.name + ": " + (name ? name : "CUDA error " + std::to_string(code));
    std::set<std::string> kernels;
    for (const Job &one : jobs_)
        if (one.op)
            for (void *function : one.kernels) kernels.insert(device_.kernel_name(function));
    if (job)
        for (void *function : job->kernels) kernels.insert(device_.kernel_name(function));
    std::string names;
    for (const std::string &one : kernels) names += (names.empty() ? " in or before " : ", ") + one;
    error_ += names;
    return false;
}

}  // namespace gpucomp
