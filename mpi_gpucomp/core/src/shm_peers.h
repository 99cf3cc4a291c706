// Ranks of one host find each other: shared memory, a doorbell and the end of the process, for each pair.
//
// Each rank listens on a socket file that only its user can open. Each pair connects once and passes the descriptors of
// its memory, which has no name. The connection stays as doorbell; it works across network namespaces. It also ends
// with the peer, unless a child of the peer has inherited it: therefore the process is observed as well.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shm_ring.h"

namespace gpucomp {

// Mapped memory. Ranks of one process share one mapping.
class ShmMapping {
  public:
    ShmMapping(int descriptor, uint64_t bytes);
    ~ShmMapping();
    ShmMapping(const ShmMapping &) = delete;
    ShmMapping &operator=(const ShmMapping &) = delete;

    uint8_t *base = nullptr;      // nullptr: could not be mapped
    std::atomic<int> readers{0};  // ranks of this process that are copying from memory of this one's owner

  private:
    uint64_t bytes_;
};

struct ShmPeer {
    std::shared_ptr<ShmMapping> memory;
    int bell = -1;     // the connection
    int process = -1;  // readable when the peer's process has ended; -1: it cannot be observed from here
    pid_t pid = 0;
    bool same_process = false;
    bool readable = false;  // process_vm_readv is permitted
};

class ShmBootstrap {
  public:
    std::string error;  // empty: all is well
    ShmLayout layout;
    std::vector<ShmPeer> peers;  // by rank; the own entry has only memory

    ShmBootstrap(const std::string &key, int rank, int size, uint64_t ring_bytes);
    ~ShmBootstrap();

    // Create the memory and the socket file of this rank, which must not exist.
    bool create();

    // Connect to all other ranks, which have called `create`, and remove the socket file. Blocks.
    bool attach(int64_t timeout);

    // Return false in a child that has inherited this.
    bool is_owner() const;

  private:
    struct Hello;

    bool fail(const std::string &text);
    bool fail_errno(const std::string &what);
    bool connect_to(int peer, int64_t deadline);
    bool accept_one(int64_t deadline);
    bool send_hello(int connection);
    bool receive_hello(int connection, int64_t deadline, int expected);
    bool wait_readable(int descriptor, int64_t deadline);
    std::string path(int peer) const { return key_ + "." + std::to_string(peer); }
    void close_listener();

    std::string key_;
    const pid_t owner_;
    int rank_, memory_ = -1, listener_ = -1, connected_ = 0;
    uint64_t probe_ = 0;  // peers try to read it here
};

}  // namespace gpucomp
