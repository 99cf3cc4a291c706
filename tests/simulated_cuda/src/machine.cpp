// Contexts, queues and the scheduler.
#include "machine.h"

#include <pthread.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>

namespace simcuda {

// Published figures. A100 and H100 SXM: multiprocessors, memory and NVLink (half of the total is one direction) from
// NVIDIA's data sheets of the two GPUs; PCIe from its specification: 16 lanes of generation 4 and 5 in one direction.
// What a program gets is less: a model, never a measurement.
static const Model MODELS[] = {
    {"A100", 108, 80, 80e9, 2039, 32, 300},
    {"H100", 132, 90, 80e9, 3350, 64, 450},
};

constexpr u64 MOST_QUEUED = 1024;  // a launch blocks while this many operations are queued, as on hardware
constexpr double LEAST_KERNEL = 2000, COPY_LATENCY = 1000, HOST_COPY = 10;  // ns, ns and bytes per ns: assumptions

thread_local Machine::HostTime Machine::host_time_;

std::string text(const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    std::string result(vsnprintf(nullptr, 0, format, arguments), 0);
    vsnprintf(result.data(), result.size() + 1, format, again);
    va_end(arguments);
    va_end(again);
    return result;
}

const char *name_of(MemoryKind kind) {
    static const char *const names[] = {"device", "pinned", "managed", "registered", "pageable"};
    return names[(int)kind];
}

double Engine::fit(double ready, double duration) const {
    auto next = busy.upper_bound(ready);
    if (next != busy.begin() && std::prev(next)->second > ready) ready = std::prev(next)->second;
    while (next != busy.end() && next->first < ready + duration) {
        ready = std::max(ready, next->second);
        ++next;
    }
    return ready;
}

void Engine::take(double start, double duration) {
    double end = start + duration;
    auto next = busy.lower_bound(start);
    if (next != busy.begin() && std::prev(next)->second >= start) {
        --next;
        start = next->first;
    }
    while (next != busy.end() && next->first <= end) {
        end = std::max(end, next->second);
        next = busy.erase(next);
    }
    busy[start] = end;
}

std::string Stream::describe() const {
    if (legacy) return text("the legacy default stream of GPU %d", device->ordinal);
    return text("%sstream %d of GPU %d", per_thread ? "per-thread default " : "", number, device->ordinal);
}

Machine &Machine::get() {
    static Machine *machine = new Machine;  // never destroyed: threads may outlive static objects
    return *machine;
}

Machine::Machine() {
    pthread_atfork(nullptr, nullptr, [] {
        Machine &machine = get();
        new (&machine.lock) std::mutex;
        new (&machine.changed) std::condition_variable;
        machine.forked = machine.initialised_;
        machine.threads_ = false;
    });
    const char *settings_of_program = getenv("MPI_GPUCOMP_SIMULATED_CUDA");
    const std::string wrong = configure(settings_of_program ? settings_of_program : "", false);
    if (!wrong.empty()) {
        fprintf(stderr, "simulated CUDA: environment variable MPI_GPUCOMP_SIMULATED_CUDA: %s\n", wrong.c_str());
        abort();
    }
}

static u64 rank_of_process() {
    for (const char *name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
        if (const char *value = getenv(name)) return strtoull(value, nullptr, 10);
    return 0;
}

std::string Machine::configure(const char *from, bool from_program) {
    Settings made;
    made.model = &MODELS[0];
    const std::string all = from;
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find(',', at), all.size()), equals = all.find('=', at);
        if (equals == std::string::npos || equals > end)
            return "expected name=value, got '" + all.substr(at, end - at) + "'";
        const std::string name = all.substr(at, equals - at), value = all.substr(equals + 1, end - equals - 1);
        const double number = strtod(value.c_str(), nullptr);
        at = end + 1;
        if (name == "seed")
            made.seed = strtoull(value.c_str(), nullptr, 10);
        else if (name == "devices")
            made.devices = std::clamp((int)number, 0, MAX_DEVICES);
        else if (name == "starve")
            made.starve = number != 0;
        else if (name == "track")
            made.track = number != 0;
        else if (name == "protect")
            made.protect = number != 0;
        else if (name == "eager")
            made.eager = number != 0;
        else if (name == "ptx")
            made.ptx = (i64)number;
        else if (name == "lockstep")
            made.lockstep = number != 0;
        else if (name == "compare")
            made.compare = number != 0;
        else if (name == "capability")
            made.capability = (int)number;
        else if (name == "background")
            made.background_ms = number;
        else if (name == "capacity")
            made.capacity = (u64)number;
        else if (name == "launch_us")
            made.launch_us = number;
        else if (name == "copy_us")
            made.copy_us = number;
        else if (name == "event_us")
            made.event_us = number;
        else if (name == "wake_us")
            made.wake_us = number;
        else if (name == "inject")
            made.inject = value;
        else if (name == "gpu") {
            made.model = nullptr;
            for (const Model &model : MODELS)
                if (value == model.name) made.model = &model;
            if (!made.model) return "expected gpu=A100 or gpu=H100, got '" + value + "'";
        } else
            return "expected seed, devices, gpu, capability, ptx, lockstep, compare, starve, track, protect, eager, background, "
                   "capacity, launch_us, copy_us, event_us, wake_us or inject, got '" +
                   name + "'";
    }
    if (from_program && !streams.empty()) reset();
    if (!made.capability) made.capability = made.model->capability;
    settings = made;
    reset();
    return made.inject.empty() ? "" : inject(made.inject.c_str());
}

void Machine::reset() {
    for (auto &entry : streams) {
        Stream &stream = *entry.second;
        const size_t kept = !stream.queue.empty() && stream.queue.front().running;
        while (stream.queue.size() > kept) stream.queue.pop_back();
    }
    // A host function of an earlier program may still run: its stream is needed until it returns.
    for (auto it = streams.begin(); it != streams.end();)
        it = it->second->queue.empty() ? streams.erase(it) : std::next(it);
    events.clear();
    profiles.clear();
    modules.clear();
    functions.clear();
    while (!allocations.empty()) {
        Allocation &allocation = *allocations.begin()->second;
        if (!allocation.freed) release(allocation, nullptr, host);
        allocations.erase(allocations.begin());
    }
    const std::vector<std::unique_ptr<Device>> before = std::move(devices);
    devices.clear();
    for (int ordinal = 0; ordinal < settings.devices; ++ordinal) {
        devices.push_back(std::make_unique<Device>());
        devices.back()->ordinal = ordinal;
        devices.back()->next = (u64)ordinal < before.size() ? before[ordinal]->next : 0;
        devices.back()->capacity = settings.capacity ? settings.capacity : (u64)settings.model->memory_bytes;
    }
    findings.clear();
    seen_.clear();
    injections.clear();
    op_names.assign(1, "nothing");
    protected_pages.clear();
    host_functions_queued = 0;
    random.seed(settings.seed + 1000003 * rank_of_process());
    starved_ = nullptr;
    queued_ = 0;
    puts_ = 0;
    ++generation_;
    latest_host_ = epoch_ = 0;
    initialised_ = false;
}

void Machine::find(const std::string &what) {
    if (seen_.insert(what).second) findings.push_back(what);
}

void Machine::count(Stream &stream, const char *what, u64 by) {
    stream.counts[what] += by;
    stream.device->counts[what] += by;
}

void Machine::count(Device *device, const char *what, u64 by) {
    if (device) device->counts[what] += by;
}

static std::string json(const Counts &counts) {
    std::string result;
    for (const auto &[name, number] : counts)
        result += text("%s\"%s\": %llu", result.empty() ? "" : ", ", name.c_str(), (unsigned long long)number);
    return "{" + result + "}";
}

std::string Machine::counts_as_json() const {
    std::string of_devices, of_streams;
    for (const auto &device : devices)
        of_devices +=
            text("%s\"%d\": %s", of_devices.empty() ? "" : ", ", device->ordinal, json(device->counts).c_str());
    for (const auto &[handle, stream] : streams)
        of_streams += text("%s\"%llu\": %s", of_streams.empty() ? "" : ", ", (unsigned long long)handle,
                           json(stream->counts).c_str());
    return "{\"devices\": {" + of_devices + "}, \"streams\": {" + of_streams + "}, " +
           text("\"model_microseconds\": %.3f}", elapsed() / 1000);
}

std::string Machine::profiles_as_json() const {
    std::string all;
    for (const auto &[name, p] : profiles) {
        const std::pair<const char *, u64> parts[] = {
            {"launches", p.launches},       {"warps", p.warps},
            {"instructions", p.instructions}, {"lanes", p.lanes},
            {"loads", p.loads},             {"load_bytes", p.load_bytes},
            {"load_sectors", p.load_sectors}, {"stores", p.stores},
            {"store_bytes", p.store_bytes}, {"store_sectors", p.store_sectors},
            {"shared", p.shared},           {"shared_cycles", p.shared_cycles},
            {"atomics", p.atomics},         {"shuffles", p.shuffles}};
        Counts counts;
        for (const auto &[what, number] : parts) counts[what] = number;
        all += (all.empty() ? "" : ", ") + ("\"" + name + "\": " + json(counts));
    }
    return "{" + all + "}";
}

void Machine::reset_counts() {
    profiles.clear();
    for (auto &device : devices) device->counts.clear();
    for (auto &entry : streams) entry.second->counts.clear();
    epoch_ += elapsed();
}

double Machine::elapsed() const {
    double latest = latest_host_;
    for (const auto &entry : streams) latest = std::max(latest, entry.second->end);
    return std::max(0.0, latest - epoch_);
}

double Machine::host_now() {
    if (host_time_.generation != generation_) host_time_ = {generation_, latest_host_};
    return host_time_.now;
}

void Machine::host_pays(double microseconds) {
    host_time_.now = host_now() + 1000 * microseconds;
    latest_host_ = std::max(latest_host_, host_time_.now);
}

void Machine::host_passes(const Record &record, bool blocked) {
    host.join(record.clock);
    if (record.end > host_now()) host_time_.now = record.end;
    host_pays(blocked ? settings.wake_us : 0);
}

std::string Machine::inject(const char *specification) {
    char kind[32] = "";
    Injection made{Injection::FAULT, CUDA_SUCCESS, 0, 1, ""};
    std::string rest = specification;
    const size_t colon = std::min(rest.find(':'), rest.size());
    snprintf(kind, sizeof kind, "%s", rest.substr(0, colon).c_str());
    const std::string known = kind;
    if (known == "illegal_address")
        made.code = CUDA_ERROR_ILLEGAL_ADDRESS;
    else if (known == "launch_failed")
        made.code = CUDA_ERROR_LAUNCH_FAILED;
    else if (known == "out_of_memory")
        made.kind = Injection::MEMORY, made.code = CUDA_ERROR_OUT_OF_MEMORY;
    else if (known == "unavailable")
        made.kind = Injection::LOST, made.code = CUDA_ERROR_DEVICE_UNAVAILABLE;
    else if (known == "ecc")
        made.kind = Injection::LOST, made.code = CUDA_ERROR_ECC_UNCORRECTABLE;
    else
        return "expected illegal_address, launch_failed, out_of_memory, unavailable or ecc, got '" + known + "'";
    for (size_t at = colon + 1; at < rest.size();) {
        const size_t end = std::min(rest.find(';', at), rest.size()), equals = std::min(rest.find('=', at), end);
        const std::string name = rest.substr(at, equals - at),
                          value = equals < end ? rest.substr(equals + 1, end - equals - 1) : "";
        if (name == "device")
            made.device = atoi(value.c_str());
        else if (name == "n")
            made.left = atoll(value.c_str());
        else if (name == "kernel")
            made.kernel = value;
        else
            return "expected device, n or kernel, got '" + name + "'";
        at = end + 1;
    }
    injections.push_back(made);
    return "";
}

bool Machine::injected(Device &device, Op &op) {
    for (Injection &injection : injections) {
        if (injection.kind != Injection::FAULT || injection.device != device.ordinal) continue;
        if (!injection.kernel.empty() && injection.kernel != op.kernel->name) continue;
        if (--injection.left != 0) continue;
        fail(device, injection.code, "injected into kernel " + op.kernel->name);
        return true;
    }
    return false;
}

void Machine::mark() {
    for (auto &entry : streams) entry.second->marked = true;
    for (auto &entry : events) entry.second->marked = true;
    for (auto &entry : allocations) entry.second->marked = true;
}

int Machine::leaks(bool all) {
    const size_t before = findings.size();
    for (auto &[handle, stream] : streams)
        if (!stream->destroyed && !stream->legacy && !stream->per_thread && (all || !stream->marked))
            find("leak: " + stream->describe() + " was never destroyed");
    for (auto &[handle, event] : events)
        if (all || !event->marked)
            find(text("leak: event %llu of GPU %d was never destroyed", (unsigned long long)event->number,
                      event->device->ordinal));
    for (auto &[start, allocation] : allocations)
        if (!allocation->freed && (all || !allocation->marked))
            find("leak: " + allocation->describe(start) + " was never freed");
    for (auto &device : devices)
        if (device->created && !device->used)
            find(text("context: GPU %d has a context that nothing uses: it was created by accident", device->ordinal));
    return (int)(findings.size() - before);
}

CUresult Machine::initialised() {
    ++calls;
    return forked || !initialised_ ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

thread_local struct {
    u64 generation;
    Device *device;
} current_context;

Device *Machine::current() {
    return current_context.generation == generation_ ? current_context.device : nullptr;
}

void Machine::select(Device *device) {
    current_context = {generation_, device};
}

void Machine::create(Device &device) {
    if (device.created) return;
    device.created = true;
    device.context = new_handle();
    device.legacy = new_stream(device, true);
    device.legacy->legacy = true;
    count(&device, "contexts");
    if (!device.expected)
        find(text("context: one was created on GPU %d, which this process was not expected to use", device.ordinal));
}

CUresult Machine::usable(Device **device) {
    if (const CUresult error = initialised()) return error;
    *device = current();
    if (!*device || !(*device)->created) return CUDA_ERROR_INVALID_CONTEXT;
    for (Injection &injection : injections)
        if (injection.kind == Injection::LOST && injection.device == (*device)->ordinal && --injection.left == 0)
            fail(**device, injection.code, "injected: the device was lost");
    return (*device)->fault;
}

Stream *Machine::new_stream(Device &device, bool blocking) {
    auto made = std::make_unique<Stream>();
    made->handle = new_handle();
    made->number = ++stream_count_;
    made->device = &device;
    made->blocking = blocking;
    if (spare_agents_.empty()) {
        made->agent = (u32)ticks_.size();
        ticks_.push_back(0);
    } else {
        made->agent = spare_agents_.back();
        spare_agents_.pop_back();
    }
    made->clock.set(made->agent, ticks_[made->agent]);
    return (streams[made->handle] = std::move(made)).get();
}

CUresult Machine::stream_of(CUstream handle, Device *device, Stream **stream) {
    const u64 number = (u64)handle;
    if (number <= 2 && (!device || !device->created)) return CUDA_ERROR_INVALID_CONTEXT;
    if (number <= 1) return *stream = device->legacy, CUDA_SUCCESS;
    if (number == 2) {
        Stream *&own = device->per_thread[std::this_thread::get_id()];
        if (!own) {
            own = new_stream(*device, true);
            own->per_thread = true;
        }
        return *stream = own, CUDA_SUCCESS;
    }
    const auto known = streams.find(number);
    if (known == streams.end() || known->second->destroyed) return CUDA_ERROR_INVALID_HANDLE;
    return *stream = known->second.get(), CUDA_SUCCESS;
}

// An agent's number is used again once the host knows of everything that it did.
void Machine::erase_if_over(Stream &stream) {
    if (!stream.destroyed || !stream.queue.empty()) return;
    ticks_[stream.agent] = stream.clock[stream.agent];
    if (host[stream.agent] >= stream.clock[stream.agent]) spare_agents_.push_back(stream.agent);
    if (starved_ == &stream) starved_ = nullptr;
    latest_host_ = std::max(latest_host_, std::min(stream.end, latest_host_));
    streams.erase(stream.handle);
}

void Machine::drop_agent(Stream &stream) {
    erase_if_over(stream);
}

std::string Machine::describe(const Op &op, const Stream &stream) const {
    switch (op.kind) {
    case Op::KERNEL: return "kernel " + op.kernel->name + " on " + stream.describe();
    case Op::COPY:
        return text("copy of %llu bytes from %s to %s memory on %s", (unsigned long long)op.nbytes,
                    name_of(op.from_kind), name_of(op.to_kind), stream.describe().c_str());
    case Op::FILL: return text("fill of %llu bytes on %s", (unsigned long long)op.nbytes, stream.describe().c_str());
    case Op::RECORD: return "record on " + stream.describe();
    case Op::WAIT: return "wait on " + stream.describe();
    case Op::HOST_FUNCTION: return "host function on " + stream.describe();
    case Op::FREE: return "cuMemFreeAsync on " + stream.describe();
    }
    return "";
}

std::string Machine::describe_op(u64 number) const {
    return text("%s (operation %llu)", op_names[number].c_str(), (unsigned long long)number);
}

// The legacy default stream runs behind what the blocking streams of its context had queued, and they behind it.
void Machine::order_with_legacy(Stream &stream) {
    if (!stream.blocking) return;
    Device &device = *stream.device;
    const auto pass = [&](Stream &from, Stream &to) {
        to.clock.join(from.clock);
        if (from.queue.empty()) {
            to.end = std::max(to.end, from.end);
            return;
        }
        auto record = std::make_shared<Record>();
        record->stream = &from;
        record->clock = from.clock;
        Op recording, waiting;
        recording.kind = Op::RECORD, waiting.kind = Op::WAIT;
        recording.record = waiting.record = record;
        recording.counted = waiting.counted = false;
        from.queue.push_back(std::move(recording));
        to.queue.push_back(std::move(waiting));
        queued_ += 2;
    };
    if (!stream.legacy) return pass(*device.legacy, stream);
    for (auto &entry : streams) {
        Stream &other = *entry.second;
        if (other.device == &device && other.blocking && !other.legacy) pass(other, stream);
    }
}

CUresult Machine::put(std::unique_lock<std::mutex> &guard, Stream &stream, Op op, const char *what) {
    Device &device = *stream.device;
    if (device.fault) return device.fault;
    device.used = true;
    if (stream.capture != CU_STREAM_CAPTURE_STATUS_NONE) {  // captured work is not run: a graph would launch it
        if (op.record && op.kind == Op::RECORD) op.record->captured = true;
        return CUDA_SUCCESS;
    }
    if (what) count(stream, what);
    host_pays(op.kind == Op::KERNEL                        ? settings.launch_us
              : op.kind == Op::COPY || op.kind == Op::FILL ? settings.copy_us
                                                           : settings.event_us);
    order_with_legacy(stream);
    host.set(HOST, host[HOST] + 1);
    stream.clock.join(host);
    stream.clock.set(stream.agent, stream.clock[stream.agent] + 1);
    op.number = op_names.size();
    op.clock = stream.clock;
    op.issued = host_now();
    op_names.push_back(describe(op, stream));
    if (op.record) {
        if (op.kind == Op::RECORD) {
            op.record->clock = op.clock;
            op.record->stream = &stream;
        } else {
            stream.clock.join(op.record->clock);
        }
    }
    for (Allocation *used : op.uses) ++used->users;
    if (op.kind == Op::HOST_FUNCTION) ++host_functions_queued;
    if (op.kind == Op::COPY || op.kind == Op::FILL) protect(op);
    stream.queue.push_back(std::move(op));
    ++queued_;
    if (settings.starve && ++puts_ % 64 == 1) {
        auto chosen = std::next(streams.begin(), (long)(random() % streams.size()));
        starved_ = random() % 4 ? chosen->second.get() : nullptr;
    }
    if (!threads_) start_threads();
    if (settings.eager) return wait(guard, device, &stream, [&] { return stream.queue.empty(); });
    while (queued_ > MOST_QUEUED && step(nullptr)) {}
    if (random() % 4 == 0) progress(nullptr);
    return CUDA_SUCCESS;  // a failure that this work met is reported by a later call
}

bool Machine::runnable(const Stream &stream) const {
    if (stream.queue.empty()) return false;
    const Op &op = stream.queue.front();
    return !op.running && !(op.kind == Op::WAIT && !op.record->done);
}

void Machine::closure(Stream *stream, std::set<Stream *> &found) const {
    if (!stream || !found.insert(stream).second || stream->queue.empty()) return;
    const Op &op = stream->queue.front();
    if (op.kind == Op::WAIT && !op.record->done) closure(op.record->stream, found);
}

// Runs the first operation of one stream, if any can run; in half the cases one that `wanted` waits for.
bool Machine::step(Stream *wanted) {
    ++calls;
    std::vector<Stream *> can, chosen;
    for (auto &entry : streams)
        if (runnable(*entry.second)) can.push_back(entry.second.get());
    if (can.empty()) return false;
    if (wanted && random() % 2) {
        std::set<Stream *> needed;
        closure(wanted, needed);
        for (Stream *stream : can)
            if (needed.count(stream)) chosen.push_back(stream);
    }
    if (chosen.empty())
        for (Stream *stream : can)
            if (stream != starved_) chosen.push_back(stream);
    if (chosen.empty()) chosen = can;
    run(*chosen[random() % chosen.size()]);
    return true;
}

void Machine::progress(Stream *wanted) {
    static const int steps[] = {0, 0, 1, 1, 2, 5};
    for (int left = steps[random() % 6]; left > 0 && step(wanted); --left) {}
}

void Machine::run(Stream &stream) {
    Op &op = stream.queue.front();
    if (op.kind == Op::HOST_FUNCTION) {
        op.running = true;
        host_queue_.push_back(&stream);
        host_work_.notify_one();
        return;
    }
    Op taken = std::move(op);
    stream.queue.pop_front();
    --queued_;
    perform(stream, taken);
    unprotect(taken);
    for (Allocation *used : taken.uses) --used->users;
    erase_if_over(stream);
    changed.notify_all();
}

void Machine::perform(Stream &stream, Op &op) {
    u64 moved = 0;
    const Epoch epoch{stream.agent, op.clock[stream.agent], op.number};
    const auto touch = [&](u64 address, bool write) {
        access(address, address + op.nbytes, write, op.clock, epoch, describe_op(op.number));
    };
    switch (op.kind) {
    case Op::KERNEL:
        if (injected(*stream.device, op)) return;
        if (run_kernel(stream, op, &moved)) return;
        break;
    case Op::COPY:
        if (op.staged.empty()) touch(op.from, false);
        touch(op.to, true);
        memmove(reachable(op.to), op.staged.empty() ? reachable(op.from) : op.staged.data(), op.nbytes);
        break;
    case Op::FILL:
        touch(op.to, true);
        memset(reachable(op.to), op.byte, op.nbytes);
        break;
    case Op::FREE:
        if (Allocation *freed = allocation_at(op.to)) release(*freed, "cuMemFreeAsync", op.clock);
        break;
    default: break;
    }
    time_op(stream, op, moved);
    if (op.kind == Op::RECORD) {
        op.record->done = true;
        op.record->end = stream.end;
    }
}

void Machine::time_op(Stream &stream, Op &op, u64 moved) {
    Device &device = *stream.device;
    const Model &model = *settings.model;
    double ready = std::max(op.issued + 1000 * settings.start_us, stream.end), duration = 0;
    Engine *engine = nullptr;
    const auto on_host = [](MemoryKind kind) { return kind != MemoryKind::DEVICE; };
    if (op.kind == Op::WAIT) ready = std::max(stream.end, op.record->end);
    if (op.kind == Op::RECORD) ready = stream.end;
    if (op.kind == Op::KERNEL) {
        const i64 wide =
            std::clamp<i64>((SLICES * op.blocks + model.multiprocessors - 1) / model.multiprocessors, 1, SLICES);
        duration = std::max(LEAST_KERNEL, (double)moved / (model.hbm * (double)wide / SLICES));
        std::vector<std::pair<double, Engine *>> free;
        for (Engine &slice : device.slices) free.push_back({slice.fit(ready, duration), &slice});
        std::sort(free.begin(), free.end());
        ready = free[wide - 1].first;
        for (i64 i = 0; i < wide; ++i) free[i].second->take(ready, duration);
    } else if (op.kind == Op::COPY) {
        if (on_host(op.from_kind) && on_host(op.to_kind))
            duration = (double)op.nbytes / HOST_COPY;
        else if (on_host(op.from_kind))
            engine = &device.to_device;
        else if (on_host(op.to_kind))
            engine = &device.to_host;
        else if (op.to / WINDOW == op.from / WINDOW)
            duration = 2 * (double)op.nbytes / model.hbm;
        else
            engine = &device.link;
        if (engine) duration = (double)op.nbytes / (engine == &device.link ? model.nvlink : model.pcie);
        duration += COPY_LATENCY;
        if (engine) {
            ready = engine->fit(ready, duration);
            engine->take(ready, duration);
        }
    } else if (op.kind == Op::FILL) {
        duration = LEAST_KERNEL + (double)op.nbytes / model.hbm;
    }
    op.start = ready;
    stream.end = op.end = ready + duration;
}

void Machine::fail(Device &device, CUresult code, const std::string &why) {
    if (device.fault) return;
    device.fault = code;
    device.fault_text = why;
    for (auto &entry : streams) {
        Stream &stream = *entry.second;
        if (stream.device != &device) continue;
        const size_t kept = !stream.queue.empty() && stream.queue.front().running;
        while (stream.queue.size() > kept) {
            Op &dropped = stream.queue.back();
            if (dropped.kind == Op::RECORD) dropped.record->done = true;
            for (Allocation *used : dropped.uses) --used->users;
            if (dropped.kind == Op::HOST_FUNCTION) --host_functions_queued;
            unprotect(dropped);
            stream.queue.pop_back();
            --queued_;
        }
    }
    changed.notify_all();
}

CUresult Machine::wait_record(std::unique_lock<std::mutex> &guard, Device &device, std::shared_ptr<Record> record,
                              const char *what) {
    const bool blocked = !record->done;
    count(&device, what);
    if (blocked) count(&device, "blocking_waits");
    const CUresult result = wait(guard, device, record->stream, [&] { return record->done; });
    if (!result) host_passes(*record, blocked);
    return result;
}

CUresult Machine::wait_stream(std::unique_lock<std::mutex> &guard, Stream &stream, const char *what) {
    auto record = std::make_shared<Record>();
    record->done = stream.queue.empty();
    record->stream = &stream;
    record->clock = stream.clock;
    record->end = stream.end;
    if (!record->done) {
        Op op;
        op.kind = Op::RECORD;
        op.record = record;
        op.clock = stream.clock;
        op.counted = false;
        stream.queue.push_back(std::move(op));
        ++queued_;
    }
    return wait_record(guard, *stream.device, record, what);
}

CUresult Machine::wait_device(std::unique_lock<std::mutex> &guard, Device &device, const char *what) {
    std::vector<u64> handles;
    for (auto &entry : streams)
        if (entry.second->device == &device) handles.push_back(entry.first);
    count(&device, what);
    for (const u64 handle : handles) {
        const auto known = streams.find(handle);
        if (known == streams.end()) continue;
        if (const CUresult error = wait_stream(guard, *known->second, "stream_synchronisations_of_device"))
            return error;
    }
    return device.fault;
}

void Machine::start_threads() {
    threads_ = true;
    std::thread([this] { host_functions(); }).detach();
    std::thread([this] { background(); }).detach();
}

void Machine::host_functions() {
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
        host_work_.wait(guard, [this] { return !host_queue_.empty(); });
        Stream *stream = host_queue_.front();
        host_queue_.pop_front();
        const CUhostFn function = stream->queue.front().host_function;
        void *const user = stream->queue.front().user;
        host.join(stream->queue.front().clock);  // the function may say so to other threads
        guard.unlock();
        function(user);
        guard.lock();
        Op op = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (queued_) --queued_;
        if (host_functions_queued) --host_functions_queued;
        time_op(*stream, op, 0);
        erase_if_over(*stream);
        changed.notify_all();
    }
}

void Machine::background() {
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
        const double pause = settings.background_ms > 0 ? settings.background_ms : 100;
        guard.unlock();
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(pause));
        guard.lock();
        if (settings.background_ms > 0 && queued_ && calls == seen_calls_) step(nullptr);
        seen_calls_ = calls;
    }
}

}  // namespace simcuda
