// The ops of a task on a GPU: queued on the task's streams, and completed by events, so that the host never blocks.
//
// Kernels run on one stream, in order. Frames leave and arrive through pinned memory on streams of their own, beside the
// kernels. A chunk of a codec with a fixed size needs one event, behind kernels and copy. Where the size varies, the copy
// is queued once the kernels have written it to memory that the host can read.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "task.h"

namespace gpucomp {

class CudaQueue {
  public:
    enum Stream { COMPUTE, IN, OUT, STREAMS };

    CudaQueue(CudaDevice &device, void *compute, void *in, void *out);
    ~CudaQueue();

    // Let all streams wait for what is queued on the one for kernels so far: the producer of the elements.
    void begin();

    // Return true once that has completed: messages may be sent from the elements' memory.
    bool begun();

    // Start an op of a task. Its state says when it has completed.
    void start(Op *op);

    // Complete the ops whose work has completed; return true if there were any.
    bool poll();

    bool busy() const { return !jobs_.empty(); }

    // Wait for everything that is queued, also after an error.
    void synchronize();

    Memory &slots() { return *device_.pinned; }
    Memory &scratch() { return *device_.device; }

    // The first error: the GPU, the driver's name of the error, and what was queued.
    const std::string &error() const { return error_; }

    // The stream of an op's accesses to elements.
    static Stream stream_of(const Op &op) { return op.kind == OP_ENCODE && !op.framed ? OUT : COMPUTE; }

  private:
    struct Report {
        uint64_t size, status;
    };
    struct Job {
        Job(Op *op, Stream stream) : op(op), stream(stream) {}

        Op *op;
        Stream stream;
        void *event = nullptr;
        uint8_t *memory = nullptr;  // on the GPU, until the job has completed
        int64_t nbytes = 0;
        uint8_t *frame = nullptr;   // in it
        Report *report = nullptr;
        const Recording *recording = nullptr;
        bool sized = true;          // the copy of the frame is queued
        std::vector<void *> kernels;
    };

    bool encode(Job &job);
    bool seal(Job &job, uint32_t wire_id, int64_t base, int64_t slope, bool raw, int64_t most);
    bool encode_raw(Job &job);
    bool send_out(Job &job, int64_t nbytes);
    bool decode(Job &job);
    bool run(Job &job, const Recording &recording, const void *source, void *target, uint8_t *scratch, int64_t nbytes);
    bool launch(Job &job, void *function, int64_t tiles, int64_t blocks, int64_t *values, size_t count);
    bool reduce(Job &job, void *target, const void *source);
    bool copy(void *to, const void *from, int64_t nbytes, Stream stream);
    bool mark(Job &job, Stream stream);
    bool order(Stream later, Stream earlier);
    bool take(Job &job, int64_t nbytes);
    bool complete(Job &job);
    void end(Job &job, CodingStatus status);
    bool check(int code, const Job *job);

    CudaDevice &device_;
    void *streams_[STREAMS];
    void *begun_ = nullptr;
    std::deque<Job> jobs_;
    uint8_t *state_ = nullptr;         // of kernels/frame.cu: zero between two frames
    uint8_t *reports_ = nullptr;
    std::vector<Report *> free_reports_;
    std::vector<std::pair<uint8_t *, int64_t>> lost_;  // memory of failed jobs, which the GPU may still use
    std::string error_;
};

}  // namespace gpucomp
