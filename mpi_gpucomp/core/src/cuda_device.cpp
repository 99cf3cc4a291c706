#include "cuda_device.h"

#include <dlfcn.h>

namespace gpucomp {
namespace {

constexpr unsigned WITHOUT_TIMING = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

bool CudaDriver::load(const char *library, std::string *reason) {
    void *loaded = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    if (!loaded) {
        *reason = dlerror();
        return false;
    }
    const auto find = [&](auto *&function, const char *name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded, name));
        if (!function && reason->empty()) *reason = std::string(library) + " has no " + name;
    };
    find(ctx_get_current, "cuCtxGetCurrent");
    find(ctx_set_current, "cuCtxSetCurrent");
    find(event_create, "cuEventCreate");
    find(event_destroy, "cuEventDestroy_v2");
    find(event_record, "cuEventRecord");
    find(event_query, "cuEventQuery");
    find(event_synchronize, "cuEventSynchronize");
    find(stream_wait_event, "cuStreamWaitEvent");
    find(memcpy_async, "cuMemcpyAsync");
    find(memset_async, "cuMemsetD8Async");
    find(launch_kernel, "cuLaunchKernel");
    find(get_error_name, "cuGetErrorName");
    return reason->empty();
}

void *PythonMemory::take(int64_t nbytes) {
    const int64_t size = HostMemory::size_class(nbytes);
    {
        std::lock_guard<std::mutex> guard(lock_);
        const auto found = free_.find(size);
        if (found != free_.end() && !found->second.empty()) {
            void *block = found->second.back();
            found->second.pop_back();
            kept_ -= size;
            return block;
        }
    }
    void *block = (void *)take_(size);
    if (block) return block;
    trim();  // what is kept in other sizes may be what is missing
    return (void *)take_(size);
}

void PythonMemory::give_back(void *address, int64_t nbytes) {
    const int64_t size = HostMemory::size_class(nbytes);
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (kept_ + size <= LIMIT) {
            free_[size].push_back(address);
            kept_ += size;
            return;
        }
    }
    give_back_((int64_t)address, size);
}

void PythonMemory::trim() {
    std::map<int64_t, std::vector<void *>> unused;
    {
        std::lock_guard<std::mutex> guard(lock_);
        unused.swap(free_);
        kept_ = 0;
    }
    for (const auto &[size, blocks] : unused)
        for (void *block : blocks) give_back_((int64_t)block, size);
}

CudaDevice::CudaDevice(const CudaDriver &driver, std::string name, void *context, std::unique_ptr<PythonMemory> device,
                       std::unique_ptr<PythonMemory> pinned)
    : driver(driver), name(std::move(name)), device(std::move(device)), pinned(std::move(pinned)), context_(context) {}

CudaDevice::~CudaDevice() {
    const Current current(*this);
    for (void *event : events_) driver.event_destroy(event);
    device->trim();
    pinned->trim();
}

void CudaDevice::name_kernel(void *function, const char *name) {
    std::lock_guard<std::mutex> guard(lock_);
    kernels_[function] = name;
}

std::string CudaDevice::kernel_name(void *function) {
    std::lock_guard<std::mutex> guard(lock_);
    return kernels_[function];
}

void *CudaDevice::take_event() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (!events_.empty()) {
            void *event = events_.back();
            events_.pop_back();
            return event;
        }
    }
    void *event = nullptr;
    return driver.event_create(&event, WITHOUT_TIMING) ? nullptr : event;
}

void CudaDevice::give_back_event(void *event) {
    if (!event) return;
    std::lock_guard<std::mutex> guard(lock_);
    events_.push_back(event);
}

CudaDevice::Current::Current(CudaDevice &device) : device_(device) {
    code = device.driver.ctx_get_current(&before_);
    if (code || before_ == device.context_) return;
    code = device.driver.ctx_set_current(device.context_);
    restore_ = !code && before_;
}

CudaDevice::Current::~Current() {
    if (restore_) device_.driver.ctx_set_current(before_);
}

}  // namespace gpucomp
