// Functions with which Python tests send over a wire; the transfers of a wire are used by one thread.
#include <poll.h>

#include <ctime>

#include "../../mpi_gpucomp/core/src/wire.h"

using gpucomp::Transfer;
using gpucomp::Wire;

int64_t gpucomp::now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

extern "C" {

Transfer *harness_send(Wire *wire, int32_t peer, int64_t tag, const void *data, int64_t nbytes) {
    return wire->send(peer, tag, data, nbytes);
}

Transfer *harness_receive(Wire *wire, int32_t peer, int64_t tag, void *data, int64_t capacity) {
    return wire->receive(peer, tag, data, capacity);
}

// Return the bytes of a transfer that has completed; -1: it failed, -2: the wire has a fault, -3: not yet.
int64_t harness_wait(Wire *wire, Transfer *transfer, int64_t nanoseconds) {
    const int64_t deadline = gpucomp::now() + nanoseconds;
    while (!wire->test(transfer)) {
        if (!wire->fault.text.empty()) return -2;
        if (gpucomp::now() > deadline) return -3;
        if (wire->poll() || !wire->arm()) continue;
        pollfd readable = {wire->fd(), POLLIN, 0};
        poll(&readable, 1, 5);
    }
    const int64_t nbytes = transfer->state == Transfer::DONE ? transfer->nbytes : -1;
    wire->release(transfer);
    return nbytes;
}

const char *harness_fault(Wire *wire) { return wire->fault.text.c_str(); }
}
