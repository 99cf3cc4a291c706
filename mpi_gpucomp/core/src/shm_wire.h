// A wire between ranks of one host, through shared memory.
//
// Short messages are copied through the ring of the pair. The receiver of a long one copies it from the sender's memory
// (single copy: within a process, or with process_vm_readv where the kernel permits it), else the sender streams it
// through the ring. A waiting rank sleeps on `fd`, where doorbells of its peers and the end of their processes arrive.
#pragma once

#include <cstdint>

#include "wire.h"

#define GC_SHM_API extern "C" __attribute__((visibility("default")))

// Create the memory of a rank and a socket file `<key>.<rank>`, such as /dev/shm/<random name>.0, for this user alone.
// With `ring_bytes` 0 the size of the rings, a power of two, follows from the number of ranks; `single_copy` 0 copies
// all messages through the rings. All ranks pass the same key, size and ring_bytes. Never returns nullptr: `fault` of
// the wire says what went wrong.
GC_SHM_API gpucomp::Wire *gc_shm_create(const char *key, int rank, int size, int64_t ring_bytes, int single_copy);

// Connect to all ranks, which must have returned from gc_shm_create (a barrier), and remove the socket file. Blocks, at
// most for `timeout` nanoseconds; returns 0, or -1 with a `fault`.
GC_SHM_API int gc_shm_attach(gpucomp::Wire *wire, int64_t timeout);

// Return 1 if long messages from this rank are received with a single copy, 0 if they come through the ring.
GC_SHM_API int gc_shm_single_copy(const gpucomp::Wire *wire, int peer);
