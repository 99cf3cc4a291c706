#include "coding.h"

#include <algorithm>
#include <cstring>

#include "frames.h"
#include "memory.h"
#include "workers.h"

namespace gpucomp {
namespace {

constexpr size_t INTEGERS = 14, DOUBLES = 4, MAX_REMEMBERED = 64;

// A kernel takes its integers and its doubles in registers of different kinds, so their order among each other does not
// matter, and arguments that it does not have are ignored (x86-64 and arm64).
using Kernel = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double);

struct KernelCall : TileRange {
    void *function = nullptr;
    int64_t i[INTEGERS] = {};
    double d[DOUBLES] = {};

    void call(int64_t first, int64_t last) override {
        ((Kernel)function)(first, last, i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12],
                           i[13], d[0], d[1], d[2], d[3]);
    }
};

struct Scratch {
    uint8_t *memory = nullptr;
    int64_t nbytes = 0;
    ~Scratch() { release(); }

    uint8_t *of(int64_t wanted) {
        if (wanted > nbytes) {
            release();
            memory = (uint8_t *)HostMemory::shared().take(wanted);
            nbytes = memory ? wanted : 0;
        }
        return memory;
    }

    void release() {
        if (memory) HostMemory::shared().give_back(memory, nbytes);
        memory = nullptr;
        nbytes = 0;
    }
};

thread_local Scratch scratch_of_thread, sample_of_thread;

}  // namespace

std::unique_ptr<Recording> Recording::parse(const int64_t *numbers, int64_t length) {
    auto made = std::make_unique<Recording>();
    const int64_t *at = numbers, *end = numbers + length;
    if (length < 9) return nullptr;
    made->scratch_bytes = *at++;
    made->result = *at++;
    made->base = *at++;
    made->slope = *at++;
    made->unrepresentable = (uint64_t)*at++;
    made->least = (uint64_t)*at++;
    made->most = (uint64_t)*at++;
    const int64_t launches = *at++;
    for (int64_t n = 0; n < launches; ++n) {
        if (end - at < 6) return nullptr;
        Launch launch;
        launch.kind = *at++;
        launch.function = (void *)*at++;
        launch.tiles = *at++;
        launch.grain = *at++;
        const int64_t integers = *at++, doubles = *at++;
        if (integers > (int64_t)INTEGERS || doubles > (int64_t)DOUBLES || end - at < 2 * integers + doubles) return nullptr;
        for (int64_t k = 0; k < integers; ++k, at += 2) launch.integers.push_back({at[0], at[1]});
        for (int64_t k = 0; k < doubles; ++k, ++at) {
            double value;
            memcpy(&value, at, sizeof value);
            launch.doubles.push_back(value);
        }
        made->launches.push_back(std::move(launch));
    }
    return made;
}

int64_t Recording::run(const void *source, void *target, int64_t nbytes, bool alone, uint64_t *status) const {
    uint8_t *scratch = scratch_bytes ? scratch_of_thread.of(scratch_bytes) : nullptr;
    const int64_t bases[] = {0, (int64_t)source, (int64_t)target, (int64_t)scratch, nbytes};
    for (const Launch &launch : launches) {
        int64_t values[INTEGERS] = {};
        for (size_t k = 0; k < launch.integers.size(); ++k)
            values[k] = bases[launch.integers[k].base] + launch.integers[k].value;
        if (launch.kind == Launch::COPY) {
            memcpy((void *)values[0], (const void *)values[1], (size_t)values[2]);
        } else if (launch.kind == Launch::FILL) {
            memset((void *)values[0], (int)values[1], (size_t)values[2]);
        } else if (alone || !launch.grain || launch.tiles < 2 * launch.grain) {
            KernelCall call;
            call.function = launch.function;
            memcpy(call.i, values, sizeof values);
            for (size_t k = 0; k < launch.doubles.size(); ++k) call.d[k] = launch.doubles[k];
            call.call(0, launch.tiles);
        } else {
            auto call = std::make_shared<KernelCall>();
            call->function = launch.function;
            memcpy(call->i, values, sizeof values);
            for (size_t k = 0; k < launch.doubles.size(); ++k) call->d[k] = launch.doubles[k];
            Workers::shared().run_tiles(call, launch.tiles, launch.grain);
        }
    }
    uint64_t written[2] = {0, 0};
    if (result >= 0) memcpy(written, scratch + result, sizeof written);
    *status = written[1];
    return base + slope * (int64_t)written[0];
}

void Codec::add(int direction, uint32_t id, int64_t op, int64_t count, std::unique_ptr<Recording> recording) {
    std::lock_guard<std::mutex> guard(lock_);
    recordings_.emplace(std::make_tuple(direction, id, op, count), std::move(recording));
}

void Codec::add_chooser(int64_t count, Chooser chooser) {
    std::lock_guard<std::mutex> guard(lock_);
    choosers_.emplace(count, std::move(chooser));
}

const Recording *Codec::find(int direction, uint32_t id, int64_t op, int64_t count) const {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = recordings_.find(std::make_tuple(direction, id, op, count));
    return found == recordings_.end() ? nullptr : found->second.get();  // never removed
}

bool Codec::encodes(int64_t count) const {
    if (external) return false;
    if (!count || (!wire_id && !chooses)) return true;
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (choosers_.count(count)) return true;
    }
    return find(0, wire_id, 0, count) != nullptr;
}

uint32_t Codec::choose(const uint8_t *source, int64_t count, bool alone) {
    const Chooser *chooser = nullptr;
    {
        std::lock_guard<std::mutex> guard(lock_);
        const auto found = choosers_.find(count);
        if (found == choosers_.end()) return wire_id;
        chooser = &found->second;
        const auto known = next_.find(source);
        if (known != next_.end()) {
            const auto [left, id] = known->second;
            next_.erase(known);
            if (left > 1) next_[source + count * itemsize] = {left - 1, id};
            return id;
        }
    }
    // A sample of blocks from the start, the middle and the end.
    const uint8_t *sample = source;
    int64_t elements = count;
    if (chooser->blocks && !chooser->candidates.empty()) {
        elements = chooser->blocks * chooser->block;
        const int64_t bytes = chooser->block * itemsize;
        uint8_t *copy = sample_of_thread.of(elements * itemsize);
        for (int64_t n = 0; n < chooser->blocks; ++n)
            memcpy(copy + n * bytes, source + (count - chooser->block) * n / (chooser->blocks - 1) * itemsize, bytes);
        sample = copy;
    }
    uint32_t best = chooser->raw_id;
    double shortest = -1;
    Scratch encoded;
    for (const Candidate &candidate : chooser->candidates) {
        uint64_t status = 0;
        void *to = encoded.of((int64_t)candidate.sample->most);
        const int64_t size = candidate.sample->run(sample, to, 0, alone, &status);
        if (status & candidate.sample->unrepresentable || !size) continue;
        const double ratio = (double)(elements * itemsize) / (double)size;
        double time = chooser->wire / ratio;
        if (candidate.encode > time) time = candidate.encode;
        if (candidate.decode > time) time = candidate.decode;
        if (shortest < 0 || time < shortest) {
            shortest = time;
            best = candidate.wire_id;
        }
    }
    if (shortest < 0 || shortest * chooser->margin > chooser->raw) best = chooser->raw_id;
    std::lock_guard<std::mutex> guard(lock_);
    if (next_.size() >= MAX_REMEMBERED) next_.clear();  // of chunks that were never encoded
    if (chooser->chunks_per_sample > 1) next_[source + count * itemsize] = {chooser->chunks_per_sample - 1, best};
    return best;
}

int64_t Codec::encode(const void *source, int64_t count, uint8_t *frame, int64_t sequence, bool raw, bool alone) {
    const int64_t nbytes = count * itemsize;
    uint8_t *payload = frame + HEADER_BYTES;
    uint32_t id = wire_id;
    int64_t size = -1;
    if (!raw) {
        if (count) id = choose((const uint8_t *)source, count, alone);
        const Recording *recording = count ? find(0, id, 0, count) : nullptr;
        uint64_t status = 0;
        if (!count) {
            size = 0;
            if (chooses) id = 0;
        } else if (!id) {  // the codec none
            memcpy(payload, source, nbytes);
            size = nbytes;
        } else if (recording) {
            size = recording->run(source, payload, nbytes, alone, &status);
            if (status & recording->unrepresentable) size = -1;
        }
        raw = id ? size < 0 || (nbytes && size >= nbytes) : false;
    }
    if (raw) {
        memcpy(payload, source, nbytes);
        size = nbytes;
    }
    write_header(frame, id, dtype, sequence, nbytes, size, raw);
    return HEADER_BYTES + size;
}

CodingStatus Codec::decode(const uint8_t *frame, int64_t nbytes, void *target, int64_t count, int64_t op,
                           int64_t sequence, bool verified, bool alone) const {
    const Header *header = read_header(frame, nbytes, dtype, itemsize);
    if (!header || !accepts(header->wire_id) || header->decoded_bytes != (uint64_t)(count * itemsize) ||
        header->sequence != (uint64_t)sequence)
        return CODING_BAD_HEADER;
    if (!verified && !gpucomp::verify(frame)) return CODING_BAD_CHECKSUM;
    const uint8_t *payload = frame + HEADER_BYTES;
    if (header->raw() || !header->wire_id) {
        if (header->payload_bytes != header->decoded_bytes) return CODING_BAD_PAYLOAD;
        if (!op)
            memcpy(target, payload, header->payload_bytes);
        else
            reduce_raw(target, payload, count, op, alone);
        return CODING_OK;
    }
    if (!count) return header->payload_bytes ? CODING_BAD_PAYLOAD : CODING_OK;
    const Recording *recording = find(1, header->wire_id, op, count);
    if (!recording) return CODING_MISSING;
    if (header->payload_bytes < recording->least || header->payload_bytes > recording->most) return CODING_BAD_PAYLOAD;
    uint64_t status = 0;
    recording->run(payload, target, (int64_t)header->payload_bytes, alone, &status);
    return status ? CODING_BAD_PAYLOAD : CODING_OK;
}

void Codec::reduce_raw(void *target, const void *source, int64_t count, int64_t op, bool alone) const {
    auto call = std::make_shared<KernelCall>();
    call->function = reduce;
    call->i[0] = (int64_t)target;
    call->i[1] = (int64_t)source;
    call->i[2] = count;
    call->i[3] = op;
    const int64_t tiles = (count + reduce_tile - 1) / reduce_tile;
    if (alone)
        call->call(0, tiles);
    else
        Workers::shared().run_tiles(call, tiles, 64);
}

}  // namespace gpucomp
