// A GPU through functions of the CUDA driver that are found at run time: nothing of CUDA is needed to build the core.
//
// Python owns the context, the streams and the kernels, and allocates memory; their handles are passed down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory.h"

namespace gpucomp {

// The functions of the driver that the core calls. Handles are pointers, and 0 is success.
struct CudaDriver {
    int (*ctx_get_current)(void **context);
    int (*ctx_set_current)(void *context);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_synchronize)(void *event);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*memcpy_async)(uint64_t to, uint64_t from, size_t nbytes, void *stream);
    int (*memset_async)(uint64_t to, unsigned char byte, size_t nbytes, void *stream);
    int (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                         void **extra);
    int (*get_error_name)(int code, const char **name);

    // Load the functions from a library; return false and the reason if that is impossible.
    bool load(const char *library, std::string *reason);
};

constexpr int CUDA_NOT_READY = 600;

// Memory that Python allocates, kept for reuse up to a limit: nothing is allocated per chunk.
class PythonMemory : public Memory {
  public:
    using Take = int64_t (*)(int64_t nbytes);
    using GiveBack = void (*)(int64_t address, int64_t nbytes);

    PythonMemory(Take take, GiveBack give_back) : take_(take), give_back_(give_back) {}

    void *take(int64_t nbytes) override;
    void give_back(void *address, int64_t nbytes) override;
    void trim();  // give back what is not in use

  private:
    static constexpr int64_t LIMIT = 1 << 28;

    const Take take_;
    const GiveBack give_back_;
    std::mutex lock_;
    std::map<int64_t, std::vector<void *>> free_;
    int64_t kept_ = 0;
};

class CudaDevice {
  public:
    // The context is the one that is current in the calling thread.
    CudaDevice(const CudaDriver &driver, std::string name, void *context, std::unique_ptr<PythonMemory> device,
               std::unique_ptr<PythonMemory> pinned);
    ~CudaDevice();

    const CudaDriver driver;
    const std::string name;  // cuda:0
    const std::unique_ptr<PythonMemory> device, pinned;
    void *seal = nullptr, *verify = nullptr;  // kernels/frame.cu
    int64_t most_blocks = 1;

    void name_kernel(void *function, const char *name);
    std::string kernel_name(void *function);

    void *take_event();
    void give_back_event(void *event);

    // Makes the context current in this thread. One that another context was current in gets that back at the end; a
    // thread without one keeps ours, so that it is selected once.
    class Current {
      public:
        explicit Current(CudaDevice &device);
        ~Current();
        Current(const Current &) = delete;
        int code = 0;

      private:
        CudaDevice &device_;
        void *before_ = nullptr;
        bool restore_ = false;
    };

  private:
    void *const context_;
    std::mutex lock_;
    std::vector<void *> events_;
    std::map<void *, std::string> kernels_;
};

}  // namespace gpucomp
