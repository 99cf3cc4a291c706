// The functions of the CUDA driver API.
#include <algorithm>
#include <fstream>
#include <iterator>

#include "machine.h"

using namespace simcuda;

#define API extern "C" __attribute__((visibility("default"))) CUresult

namespace {

using Guard = std::unique_lock<std::mutex>;

Machine &machine() {
    return Machine::get();
}

Device *device_of(CUdevice ordinal) {
    auto &all = machine().devices;
    return ordinal >= 0 && (size_t)ordinal < all.size() ? all[ordinal].get() : nullptr;
}

Device *device_of(CUcontext context) {
    for (auto &device : machine().devices)
        if (device->created && device->context == (u64)context) return device.get();
    return nullptr;
}

Event *event_of(CUevent handle) {
    const auto known = machine().events.find((u64)handle);
    return known == machine().events.end() ? nullptr : known->second.get();
}

// The start of nearly every call: the lock, the current context, and the failure that it may have.
#define ENTER \
    Guard guard(machine().lock); \
    Device *device; \
    if (const CUresult error = machine().usable(&device)) return error

#define ENTER_WITH_STREAM(handle) \
    ENTER; \
    Stream *stream; \
    if (const CUresult error = machine().stream_of(handle, device, &stream)) return error; \
    if (stream->device->fault) return stream->device->fault

const char *const CAPTURED = "capture: %s was called while a stream captures, which invalidates the capture";

// Calls that wait or query are not allowed while the stream captures.
bool capturing(Stream &stream, const char *what) {
    if (stream.capture == CU_STREAM_CAPTURE_STATUS_NONE) return false;
    stream.capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    machine().find(text(CAPTURED, what));
    return true;
}

void use(Op &op, u64 address) {
    if (Allocation *allocation = machine().allocation_at(address)) op.uses.push_back(allocation);
}

// A copy as CUDA describes its synchronisation for each pair of kinds of memory; `synchronous`: cuMemcpy.
CUresult copy(Guard &guard, Stream &stream, u64 to, u64 from, u64 nbytes, const char *what, bool synchronous) {
    if (!nbytes) return CUDA_SUCCESS;
    if (!to || !from) return CUDA_ERROR_INVALID_VALUE;
    Machine &m = machine();
    if (const CUresult error = m.check_span(to, nbytes, what, "destination")) return error;
    if (const CUresult error = m.check_span(from, nbytes, what, "source")) return error;
    Allocation *target, *source;
    Op op;
    op.kind = Op::COPY;
    op.to = to, op.from = from, op.nbytes = nbytes;
    op.to_kind = m.kind_of(to, nbytes, &target);
    op.from_kind = m.kind_of(from, nbytes, &source);
    if (target) op.uses.push_back(target);
    if (source) op.uses.push_back(source);
    const auto on_host = [](MemoryKind kind) { return kind != MemoryKind::DEVICE && kind != MemoryKind::MANAGED; };
    const bool from_host = on_host(op.from_kind), to_host = on_host(op.to_kind);
    const char *const direction = from_host ? to_host ? "host_to_host" : "host_to_device"
                                  : to_host ? "device_to_host"
                                            : "device_to_device";
    m.count(stream, text("copies_%s", direction).c_str());
    m.count(stream, text("bytes_%s", direction).c_str(), nbytes);
    if (op.from_kind == MemoryKind::PAGEABLE && !to_host) {
        op.staged.assign((const u8 *)from, (const u8 *)from + nbytes);
        m.count(stream, "copies_from_pageable");
        // The driver may synchronise the stream before it stages.
        if (m.random() % 4 == 0 && stream.capture == CU_STREAM_CAPTURE_STATUS_NONE)
            if (const CUresult error = m.wait_stream(guard, stream, "stream_synchronisations_of_copies")) return error;
    }
    const bool waits = synchronous || (to_host && (from_host || op.to_kind == MemoryKind::PAGEABLE));
    if (waits && capturing(stream, what)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (to_host && op.to_kind == MemoryKind::PAGEABLE) m.count(stream, "copies_to_pageable");
    if (const CUresult error = m.put(guard, stream, std::move(op), "copies")) return error;
    return waits ? m.wait_stream(guard, stream, "stream_synchronisations_of_copies") : CUDA_SUCCESS;
}

CUresult fill(Guard &guard, Stream &stream, u64 to, u64 nbytes, int byte, const char *what) {
    if (!nbytes) return CUDA_SUCCESS;
    if (const CUresult error = machine().check_span(to, nbytes, what, "destination")) return error;
    Op op;
    op.kind = Op::FILL;
    op.to = to, op.nbytes = nbytes, op.byte = byte;
    Allocation *target;
    op.to_kind = machine().kind_of(to, nbytes, &target);
    if (!target) return CUDA_ERROR_INVALID_VALUE;
    op.uses.push_back(target);
    return machine().put(guard, stream, std::move(op), "fills");
}

CUresult load(const std::string &image, CUmodule *module) {
    ENTER;
    // A binary, PTX, or the text "simulated module of family NAME".
    const bool known = image.compare(0, 4, "\177ELF") == 0 || image.find(".entry") != std::string::npos ||
                       image.find("simulated module of family ") == 0;
    if (!known) return CUDA_ERROR_INVALID_IMAGE;
    auto made = std::make_unique<Module>();
    made->handle = machine().new_handle();
    made->device = device;
    made->image = image;
    if (machine().settings.ptx && image.find(".entry") != std::string::npos && image.compare(0, 4, "\177ELF")) {
        try {
            made->program = ptx::parse(image);
        } catch (const std::string &wrong) {
            machine().find("ptx: " + wrong);
            return CUDA_ERROR_INVALID_PTX;
        }
    }
    machine().count(device, "modules");
    *module = (CUmodule)made->handle;
    machine().modules[made->handle] = std::move(made);
    return CUDA_SUCCESS;
}

struct ErrorText {
    CUresult code;
    const char *name, *text;
};

#define ERROR(code, text) {code, #code, text}
const ErrorText ERRORS[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

}  // namespace

// Initialisation, errors, devices.

API cuInit(unsigned flags) {
    Guard guard(machine().lock);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (machine().forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (machine().devices.empty()) return CUDA_ERROR_NO_DEVICE;
    machine().initialised_ = true;
    return CUDA_SUCCESS;
}

API cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

API cuGetErrorName(CUresult code, const char **name) {
    for (const ErrorText &known : ERRORS)
        if (known.code == code) return *name = known.name, CUDA_SUCCESS;
    return *name = nullptr, CUDA_ERROR_INVALID_VALUE;
}

API cuGetErrorString(CUresult code, const char **string) {
    for (const ErrorText &known : ERRORS)
        if (known.code == code) return *string = known.text, CUDA_SUCCESS;
    return *string = nullptr, CUDA_ERROR_INVALID_VALUE;
}

API cuDeviceGetCount(int *count) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    *count = (int)machine().devices.size();
    return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice *found, int ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    if (!device_of(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *found = ordinal;
    return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int length, CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    if (!device_of(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "simulated %s", machine().settings.model->name);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid(u8 *uuid, CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    if (!device_of(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0x51, 16);
    uuid[15] = (u8)ordinal;
    return CUDA_SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *nbytes, CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    if (!device_of(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = device_of(ordinal)->capacity;
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    if (!device_of(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    const Model &model = *machine().settings.model;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = model.multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 16 + ordinal; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = machine().settings.capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = machine().settings.capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// Contexts.

API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = device_of(ordinal);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    machine().create(*device);
    ++device->retained;
    *context = (CUcontext)device->context;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = device_of(ordinal);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    if (!device->retained) return CUDA_ERROR_INVALID_CONTEXT;
    --device->retained;  // what the context holds stays: a program that goes on to use it is found by the leaks
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease(CUdevice ordinal) {
    return cuDevicePrimaryCtxRelease_v2(ordinal);
}

API cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *active) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = device_of(ordinal);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = device->created;
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *context) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = machine().current();
    *context = device ? (CUcontext)device->context : nullptr;
    return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = context ? device_of(context) : nullptr;
    if (context && !device) return CUDA_ERROR_INVALID_CONTEXT;
    machine().count(device, "context_sets");
    if (device != machine().current()) machine().count(device, "context_switches");
    machine().select(device);
    return CUDA_SUCCESS;
}

static thread_local std::vector<CUcontext> pushed_over;  // the contexts below the current one

API cuCtxPushCurrent_v2(CUcontext context) {
    CUcontext before;
    if (const CUresult error = cuCtxGetCurrent(&before)) return error;
    if (const CUresult error = cuCtxSetCurrent(context)) return error;
    pushed_over.push_back(before);
    return CUDA_SUCCESS;
}

API cuCtxPopCurrent_v2(CUcontext *popped) {
    if (const CUresult error = cuCtxGetCurrent(popped)) return error;
    if (pushed_over.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    const CUcontext below = pushed_over.back();
    pushed_over.pop_back();
    return cuCtxSetCurrent(below);
}

API cuCtxGetDevice(CUdevice *ordinal) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Device *device = machine().current();
    if (!device) return CUDA_ERROR_INVALID_CONTEXT;
    *ordinal = device->ordinal;
    return CUDA_SUCCESS;
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER;
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

API cuCtxSynchronize() {
    ENTER;
    return machine().wait_device(guard, *device, "device_synchronisations");
}

// Streams.

API cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority) {
    (void)priority;
    ENTER;
    if (flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *made = (CUstream)machine().new_stream(*device, !(flags & CU_STREAM_NON_BLOCKING))->handle;
    machine().count(device, "streams");
    device->used = true;
    return CUDA_SUCCESS;
}

API cuStreamCreate(CUstream *made, unsigned flags) {
    return cuStreamCreateWithPriority(made, flags, 0);
}

API cuStreamDestroy_v2(CUstream handle) {
    ENTER_WITH_STREAM(handle);
    if (stream->legacy || stream->per_thread) return CUDA_ERROR_INVALID_HANDLE;
    stream->destroyed = true;  // its work completes nevertheless
    machine().drop_agent(*stream);
    return CUDA_SUCCESS;
}

API cuStreamSynchronize(CUstream handle) {
    ENTER_WITH_STREAM(handle);
    if (capturing(*stream, "cuStreamSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    machine().count(*stream, "synchronisations");
    return machine().wait_stream(guard, *stream, "stream_synchronisations");
}

API cuStreamQuery(CUstream handle) {
    ENTER_WITH_STREAM(handle);
    if (capturing(*stream, "cuStreamQuery")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    machine().count(*stream, "stream_queries");
    const u64 number = stream->handle;
    Device &owner = *stream->device;
    machine().progress(stream);
    if (owner.fault) return owner.fault;
    if (!machine().streams.count(number) || !stream->queue.empty()) return CUDA_ERROR_NOT_READY;
    Record passed;
    passed.clock = stream->clock;
    passed.end = stream->end;
    machine().host_passes(passed, false);
    return CUDA_SUCCESS;
}

API cuStreamWaitEvent(CUstream handle, CUevent waited, unsigned flags) {
    (void)flags;
    ENTER_WITH_STREAM(handle);
    Event *event = event_of(waited);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    machine().count(*stream, "stream_waits");
    if (!event->latest) return CUDA_SUCCESS;
    if (event->latest->captured) {
        stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;  // the waiting stream joins the capture
        return CUDA_SUCCESS;
    }
    Op op;
    op.kind = Op::WAIT;
    op.record = event->latest;
    return machine().put(guard, *stream, std::move(op), nullptr);
}

API cuStreamGetCtx(CUstream handle, CUcontext *context) {
    ENTER_WITH_STREAM(handle);
    *context = (CUcontext)stream->device->context;
    return CUDA_SUCCESS;
}

API cuStreamGetFlags(CUstream handle, unsigned *flags) {
    ENTER_WITH_STREAM(handle);
    *flags = stream->blocking ? 0u : (unsigned)CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}

API cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    ENTER_WITH_STREAM(handle);
    *status = (CUstreamCaptureStatus)stream->capture;
    return CUDA_SUCCESS;
}

API cuStreamBeginCapture_v2(CUstream handle, int mode) {
    (void)mode;
    ENTER_WITH_STREAM(handle);
    if (stream->legacy || stream->capture != CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

API cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    ENTER_WITH_STREAM(handle);
    const int before = stream->capture;
    if (before == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_ILLEGAL_STATE;
    for (auto &entry : machine().streams)
        if (entry.second->device == stream->device) entry.second->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    *graph = nullptr;
    return before == CU_STREAM_CAPTURE_STATUS_ACTIVE ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

// Events.

API cuEventCreate(CUevent *made, unsigned flags) {
    ENTER;
    if (flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_unique<Event>();
    event->handle = machine().new_handle();
    event->number = ++machine().event_count;
    event->device = device;
    event->flags = flags;
    *made = (CUevent)event->handle;
    machine().events[event->handle] = std::move(event);
    machine().count(device, "events");
    return CUDA_SUCCESS;
}

API cuEventDestroy_v2(CUevent handle) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Event *event = event_of(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    const CUresult fault = event->device->fault;
    machine().events.erase((u64)handle);
    return fault;
}

API cuEventRecord(CUevent handle, CUstream to) {
    ENTER_WITH_STREAM(to);
    Event *event = event_of(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->device != stream->device) {
        machine().find(text("device: cuEventRecord of an event of GPU %d on ", event->device->ordinal) +
                       stream->describe());
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Op op;
    op.kind = Op::RECORD;
    op.record = event->latest = std::make_shared<Record>();
    return machine().put(guard, *stream, std::move(op), "event_records");
}

API cuEventRecordWithFlags(CUevent handle, CUstream to, unsigned flags) {
    (void)flags;
    return cuEventRecord(handle, to);
}

API cuEventQuery(CUevent handle) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Event *event = event_of(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    Device &owner = *event->device;
    machine().count(&owner, "event_queries");
    if (owner.fault) return owner.fault;
    const auto record = event->latest;
    if (!record) return CUDA_SUCCESS;
    if (record->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (!record->done) machine().progress(record->stream);
    if (owner.fault) return owner.fault;
    if (!record->done) {
        machine().count(&owner, "event_queries_not_ready");
        return CUDA_ERROR_NOT_READY;
    }
    machine().host_passes(*record, false);
    return CUDA_SUCCESS;
}

API cuEventSynchronize(CUevent handle) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Event *event = event_of(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->device->fault) return event->device->fault;
    const auto record = event->latest;
    if (!record) return CUDA_SUCCESS;
    if (record->captured) return CUDA_ERROR_CAPTURED_EVENT;
    return machine().wait_record(guard, *event->device, record, "event_waits");
}

API cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Event *first = event_of(from), *last = event_of(to);
    if (!first || !last || !first->latest || !last->latest) return CUDA_ERROR_INVALID_HANDLE;
    if ((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING || first->device != last->device)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!first->latest->done || !last->latest->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((last->latest->end - first->latest->end) / 1e6);
    return CUDA_SUCCESS;
}

// Memory.

API cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    ENTER;
    u64 made;
    const CUresult error = machine().allocate(device, MemoryKind::DEVICE, nbytes, "cuMemAlloc", &made);
    if (!error) *address = made;
    return error;
}

API cuMemAllocAsync(CUdeviceptr *address, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    u64 made;
    if (const CUresult error = machine().allocate(stream->device, MemoryKind::DEVICE, nbytes, "cuMemAllocAsync", &made))
        return error;
    // The memory exists for what is ordered behind this position of the stream: as if the stream wrote all of it here.
    machine().order_with_legacy(*stream);
    machine().host.set(HOST, machine().host[HOST] + 1);
    stream->clock.join(machine().host);
    stream->clock.set(stream->agent, stream->clock[stream->agent] + 1);
    machine().op_names.push_back("cuMemAllocAsync on " + stream->describe());
    Segment whole{made + nbytes, {stream->agent, stream->clock[stream->agent], machine().op_names.size() - 1}, {}};
    machine().allocation_at(made)->accesses[made] = whole;
    *address = made;
    return CUDA_SUCCESS;
}

API cuMemAllocManaged(CUdeviceptr *address, size_t nbytes, unsigned flags) {
    ENTER;
    if (flags != 1 && flags != 2) return CUDA_ERROR_INVALID_VALUE;
    u64 made;
    const CUresult error = machine().allocate(device, MemoryKind::MANAGED, nbytes, "cuMemAllocManaged", &made);
    if (!error) *address = made;
    return error;
}

API cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    (void)flags;
    ENTER;
    u64 made;
    const CUresult error = machine().allocate(device, MemoryKind::PINNED, nbytes, "cuMemHostAlloc", &made);
    if (!error) *address = (void *)made;
    return error;
}

API cuMemAllocHost_v2(void **address, size_t nbytes) {
    return cuMemHostAlloc(address, nbytes, 0);
}

static CUresult free_memory(u64 address, const char *what, bool of_host) {
    ENTER;
    if (!address) return CUDA_SUCCESS;
    Machine &m = machine();
    Allocation *allocation = m.allocation_at(address, true);
    const bool wrong_kind = allocation && (allocation->kind == MemoryKind::PINNED) != of_host;
    if (!allocation || allocation->freed || allocation->start != address || wrong_kind) {
        m.find(text("memory: %s of ", what) +
               (allocation ? allocation->describe(address)
                           : text("address %#llx, which is not allocated", (unsigned long long)address)));
        return CUDA_ERROR_INVALID_VALUE;
    }
    m.count(device, of_host ? "host_frees" : "frees");
    if (allocation->users)
        m.find(text("reuse: %s frees ", what) + allocation->describe(address) + " while queued work uses it");
    // It waits for the work that uses the memory, as it does on hardware.
    const bool waits = allocation->users;
    if (waits) m.count(device, "blocking_waits");
    while (allocation->users) {
        if (allocation->device->fault) return allocation->device->fault;
        if (!m.step(nullptr)) m.changed.wait_for(guard, std::chrono::milliseconds(1));
    }
    return m.release(*allocation, waits ? nullptr : what, m.host);
}

API cuMemFree_v2(CUdeviceptr address) {
    return free_memory(address, "cuMemFree", false);
}

API cuMemFreeHost(void *address) {
    return free_memory((u64)address, "cuMemFreeHost", true);
}

API cuMemFreeAsync(CUdeviceptr address, CUstream on) {
    ENTER_WITH_STREAM(on);
    Allocation *allocation = machine().allocation_at(address, true);
    if (!allocation || allocation->freed || allocation->start != address || allocation->kind != MemoryKind::DEVICE) {
        machine().find(text("memory: cuMemFreeAsync of address %#llx, which is not allocated", address));
        return CUDA_ERROR_INVALID_VALUE;
    }
    Op op;
    op.kind = Op::FREE;
    op.to = address;
    return machine().put(guard, *stream, std::move(op), "frees");
}

API cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    (void)flags;
    ENTER;
    if (!address || !nbytes) return CUDA_ERROR_INVALID_VALUE;
    const u64 start = (u64)address;
    auto &all = machine().allocations;
    for (const auto &[at, allocation] : all)
        if (!allocation->freed && at < start + nbytes && start < allocation->end())
            return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    auto made = std::make_unique<Allocation>();
    made->start = start, made->nbytes = nbytes;
    made->number = ++machine().allocation_count;
    made->kind = MemoryKind::REGISTERED;
    made->device = device;
    made->made_by = "cuMemHostRegister";
    all[start] = std::move(made);
    machine().count(device, "registrations");
    return CUDA_SUCCESS;
}

API cuMemHostUnregister(void *address) {
    ENTER;
    Allocation *allocation = machine().allocation_at((u64)address);
    if (!allocation || allocation->kind != MemoryKind::REGISTERED || allocation->start != (u64)address)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (allocation->users)
        machine().find("reuse: cuMemHostUnregister of " + allocation->describe(allocation->start) +
                       " while queued work uses it");
    while (allocation->users) {
        if (allocation->device->fault) return allocation->device->fault;
        if (!machine().step(nullptr)) machine().changed.wait_for(guard, std::chrono::milliseconds(1));
    }
    machine().release(*allocation, "cuMemHostUnregister", machine().host);
    machine().allocations.erase((u64)address);  // the host may do with the address what it likes
    return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr *found, void *address, unsigned flags) {
    (void)flags;
    ENTER;
    if (!machine().allocation_at((u64)address)) return CUDA_ERROR_INVALID_VALUE;
    *found = (u64)address;
    return CUDA_SUCCESS;
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER;
    *free = device->capacity - device->in_use;
    *total = device->capacity;
    return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *nbytes, CUdeviceptr address) {
    ENTER;
    Allocation *allocation = machine().allocation_at(address);
    if (!allocation) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = allocation->start;
    if (nbytes) *nbytes = allocation->nbytes;
    return CUDA_SUCCESS;
}

static CUresult attribute_of(Allocation *allocation, u64 address, int attribute, void *to) {
    const bool host =
        allocation && (allocation->kind == MemoryKind::PINNED || allocation->kind == MemoryKind::REGISTERED);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(u64 *)to = allocation ? allocation->device->context : 0; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)to = !allocation ? 0u : host ? (unsigned)CU_MEMORYTYPE_HOST : (unsigned)CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(u64 *)to = allocation ? address : 0; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(u64 *)to = allocation && allocation->kind != MemoryKind::DEVICE ? address : 0;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)to = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(u64 *)to = allocation ? allocation->number : 0; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)to = allocation && allocation->kind == MemoryKind::MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)to = allocation ? allocation->device->ordinal : -2; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)to = allocation && allocation->made_by == "cuMemAlloc";
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(u64 *)to = allocation ? allocation->start : 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(u64 *)to = allocation ? allocation->nbytes : 0; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)to = allocation != nullptr; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

API cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr address) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Allocation *allocation = machine().allocation_at(address);
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;
    return attribute_of(allocation, address, attribute, to);
}

API cuPointerGetAttributes(unsigned number, CUpointer_attribute *attributes, void **to, CUdeviceptr address) {
    Guard guard(machine().lock);
    if (const CUresult error = machine().initialised()) return error;
    Allocation *allocation = machine().allocation_at(address);
    for (unsigned i = 0; i < number; ++i)
        if (const CUresult error = attribute_of(allocation, address, attributes[i], to[i])) return error;
    return CUDA_SUCCESS;
}

// Copies and fills.

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    return copy(guard, *stream, to, from, nbytes, "cuMemcpyAsync", false);
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    return copy(guard, *stream, to, (u64)from, nbytes, "cuMemcpyHtoDAsync", false);
}

API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    return copy(guard, *stream, (u64)to, from, nbytes, "cuMemcpyDtoHAsync", false);
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    return copy(guard, *stream, to, from, nbytes, "cuMemcpyDtoDAsync", false);
}

API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
    ENTER_WITH_STREAM(nullptr);
    return copy(guard, *stream, to, from, nbytes, "cuMemcpy", true);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t nbytes) {
    return cuMemcpy(to, (u64)from, nbytes);
}

API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t nbytes) {
    return cuMemcpy((u64)to, from, nbytes);
}

API cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t nbytes, CUstream on) {
    ENTER_WITH_STREAM(on);
    return fill(guard, *stream, to, nbytes, byte, "cuMemsetD8Async");
}

API cuMemsetD8_v2(CUdeviceptr to, unsigned char byte, size_t nbytes) {
    return cuMemsetD8Async(to, byte, nbytes, nullptr);
}

// Modules and launches.

API cuModuleLoadData(CUmodule *module, const void *image) {
    // Without a length: text ends at its zero, and a binary is known by its first bytes and its section headers.
    const char *bytes = (const char *)image;
    if (memcmp(bytes, "\177ELF", 4)) return load(bytes, module);
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, bytes + 40, 8);
    memcpy(&size, bytes + 58, 2);
    memcpy(&count, bytes + 60, 2);
    return load(std::string(bytes, sections + (uint64_t)size * count), module);
}

API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, int *, void **) {
    return cuModuleLoadData(module, image);
}

API cuModuleLoad(CUmodule *module, const char *path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    return load(std::string(std::istreambuf_iterator<char>(file), {}), module);
}

API cuModuleUnload(CUmodule handle) {
    ENTER;
    if (!machine().modules.count((u64)handle)) return CUDA_ERROR_INVALID_HANDLE;
    auto &functions = machine().functions;
    for (auto it = functions.begin(); it != functions.end();)
        it = it->second->module->handle == (u64)handle ? functions.erase(it) : std::next(it);
    machine().modules.erase((u64)handle);
    return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction *function, CUmodule handle, const char *name) {
    ENTER;
    const auto module = machine().modules.find((u64)handle);
    if (module == machine().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    const auto &program = module->second->program;
    const bool interpreted = program && program->kernels.count(name);
    // A kernel that exists only as text.
    if (interpreted && !machine().kernels.count(name))
        machine().kernels[name] = {name, "", program->kernels.at(name).kinds.substr(2), nullptr, false};
    const auto kernel = machine().kernels.find(name);
    if (kernel == machine().kernels.end()) return CUDA_ERROR_NOT_FOUND;
    const std::string &image = module->second->image;
    const std::string family = "simulated module of family " + kernel->second.family + "\n";
    if (image.find(family) != 0 && image.find(name) == std::string::npos) return CUDA_ERROR_NOT_FOUND;
    if (program && !interpreted) return CUDA_ERROR_NOT_FOUND;
    for (const auto &entry : machine().functions)
        if (entry.second->kernel == &kernel->second && entry.second->module == module->second.get())
            return *function = (CUfunction)entry.first, CUDA_SUCCESS;
    auto made = std::make_unique<Function>();
    made->handle = machine().new_handle();
    made->kernel = &kernel->second;
    made->module = module->second.get();
    *function = (CUfunction)made->handle;
    machine().functions[made->handle] = std::move(made);
    return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    ENTER;
    if (!machine().functions.count((u64)handle)) return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 128; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 80; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = machine().settings.capability; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute, int) {
    ENTER;
    return machine().functions.count((u64)handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream on, void **arguments,
                   void **extra) {
    (void)shared_bytes;
    ENTER_WITH_STREAM(on);
    const auto known = machine().functions.find((u64)handle);
    if (known == machine().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
    const Kernel &kernel = *known->second->kernel;
    if (stream->device != device || known->second->module->device != device) {
        machine().find(text("device: kernel %s of a module of GPU %d was launched on ", kernel.name.c_str(),
                            known->second->module->device->ordinal) +
                       stream->describe() + text(" while GPU %d was current", device->ordinal));
        return CUDA_ERROR_INVALID_HANDLE;
    }
    // The kernels have 128 threads in a block, and grids of one dimension.
    if (!grid_x || grid_y != 1 || grid_z != 1 || block_x != 128 || block_y != 1 || block_z != 1 || !arguments || extra)
        return CUDA_ERROR_INVALID_VALUE;
    Op op;
    op.kind = Op::KERNEL;
    op.kernel = &kernel;
    if (grid_x <= machine().settings.ptx || !kernel.function) op.program = known->second->module->program;
    op.blocks = grid_x;
    memcpy(&op.first, arguments[0], 8);
    memcpy(&op.last, arguments[1], 8);
    for (size_t i = 0; i < kernel.layout.size(); ++i) {
        i64 value;
        memcpy(&value, arguments[i + 2], 8);
        if (kernel.layout[i] == 'd') {
            double number;
            memcpy(&number, &value, 8);
            op.doubles.push_back(number);
            continue;
        }
        op.integers.push_back(value);
        if (kernel.layout[i] != 'q') use(op, (u64)value);
    }
    machine().count(*stream, ("launches:" + kernel.name).c_str());
    return machine().put(guard, *stream, std::move(op), "launches");
}

API cuLaunchHostFunc(CUstream on, CUhostFn function, void *user) {
    ENTER_WITH_STREAM(on);
    Op op;
    op.kind = Op::HOST_FUNCTION;
    op.host_function = function;
    op.user = user;
    return machine().put(guard, *stream, std::move(op), "host_functions");
}
