// Moves messages for shm_speed.py, as a context does: post, poll, and sleep after a short spin.
#include <poll.h>

#include <ctime>
#include <vector>

#include "shm_wire.h"

namespace gpucomp {
int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}
}  // namespace gpucomp

using namespace gpucomp;

// Send `nbytes` to the other rank, or receive them, in messages of `part` bytes; return -1 if the wire fails.
GC_SHM_API int shm_speed_move(Wire *wire, int sends, void *data, int64_t nbytes, int64_t part, int64_t spin) {
    const int peer = 1 - wire->rank;
    auto *bytes = static_cast<uint8_t *>(data);
    std::vector<Transfer *> transfers;
    for (int64_t begin = 0; begin < nbytes; begin += part) {
        const int64_t length = nbytes - begin < part ? nbytes - begin : part;
        uint8_t *at = bytes + begin;
        transfers.push_back(sends ? wire->send(peer, 1, at, length) : wire->receive(peer, 1, at, length));
    }
    int64_t idle_since = 0;
    for (Transfer *transfer : transfers) {
        while (!wire->test(transfer)) {
            if (!wire->fault.text.empty()) return -1;
            if (wire->poll()) {
                idle_since = 0;
            } else if (!idle_since) {
                idle_since = now();
            } else if (now() - idle_since > spin && wire->arm()) {
                pollfd waiting{wire->fd(), POLLIN, 0};
                ::poll(&waiting, 1, 1000);
            }
        }
        wire->release(transfer);
    }
    return 0;
}

// Exchange messages of `nbytes` with the other rank, `rounds` times; return -1 if the wire fails.
GC_SHM_API int shm_speed_exchange(Wire *wire, void *data, int64_t nbytes, int rounds, int64_t spin) {
    for (int round = 0; round < 2 * rounds; ++round)
        if (shm_speed_move(wire, round % 2 == wire->rank, data, nbytes, nbytes, spin)) return -1;
    return 0;
}

GC_SHM_API const char *shm_speed_fault(Wire *wire) { return wire->fault.text.c_str(); }
