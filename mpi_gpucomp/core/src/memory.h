// Staging memory: blocks that are reused, so that nothing is allocated per chunk.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace gpucomp {

constexpr int64_t ALIGNMENT = 256;

// Where tasks get memory for frames and scratch chunks.
class Memory {
  public:
    virtual ~Memory() = default;
    virtual void *take(int64_t nbytes) = 0;  // nullptr: there is none
    virtual void give_back(void *address, int64_t nbytes) = 0;
};

// Host memory. Four size classes for each power of two; unused blocks are kept up to a limit.
class HostMemory : public Memory {
  public:
    static HostMemory &shared() {
        static HostMemory *memory = new HostMemory;  // never destroyed: threads may outlive static objects
        return *memory;
    }

    void *take(int64_t nbytes) override {
        const int64_t size = size_class(nbytes);
        {
            std::lock_guard<std::mutex> guard(lock_);
            in_use_ += size;
            auto found = free_.find(size);
            if (found != free_.end() && !found->second.empty()) {
                void *block = found->second.back();
                found->second.pop_back();
                kept_ -= size;
                return block;
            }
        }
        void *block = aligned_alloc(ALIGNMENT, size);
        if (!block) {
            std::lock_guard<std::mutex> guard(lock_);
            in_use_ -= size;
        }
        return block;
    }

    void give_back(void *address, int64_t nbytes) override {
        const int64_t size = size_class(nbytes);
        std::lock_guard<std::mutex> guard(lock_);
        in_use_ -= size;
        if (kept_ + size > LIMIT) {
            free(address);
            return;
        }
        free_[size].push_back(address);
        kept_ += size;
    }

    int64_t in_use() {
        std::lock_guard<std::mutex> guard(lock_);
        return in_use_;
    }

    static int64_t size_class(int64_t nbytes) {
        int64_t step = ALIGNMENT;
        while (step * 8 < nbytes) step *= 2;
        return nbytes <= ALIGNMENT ? ALIGNMENT : (nbytes + step - 1) / step * step;
    }

  private:
    static constexpr int64_t LIMIT = 1 << 28;

    std::mutex lock_;
    std::map<int64_t, std::vector<void *>> free_;
    int64_t in_use_ = 0, kept_ = 0;
};

}  // namespace gpucomp
