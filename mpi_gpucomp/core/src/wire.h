// The contract of a wire: non-blocking messages between ranks, ordered for each pair of ranks and tag.
//
// A wire moves bytes between addresses and knows nothing of collectives. A message may be shorter than the buffer of its
// receive, and never longer. No call blocks. Messages are matched by peer and tag, in order; there are no wildcards.
// Ranks can also exchange control messages, which need no posted receive and no tag.
//
// Threads: all calls but `wake` are made under the lock of the context that owns the wire. The context sleeps without
// it, on the descriptor `fd`, between `arm` and the next `poll`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpucomp {

// A posted send or receive. The wire allocates it, and frees it after `Wire::release`.
struct Transfer {
    enum State : uint8_t { PENDING, DONE, FAILED };

    State state = PENDING;
    bool is_send = false;
    int peer = -1;
    int64_t tag = 0;
    uint8_t *data = nullptr;  // the caller's memory; it must not change (send) or be read (receive) before completion
    int64_t capacity = 0;     // bytes of that memory
    int64_t nbytes = 0;       // length of the message; of a receive, valid once the message has begun to arrive
    int64_t arrived = 0;      // of a receive: length of the prefix that has arrived, for wires that can relay
    int64_t posted = 0;       // when it was posted (`now`); of a relayed message, when its last byte had arrived; 0: not yet
    int64_t waited = 0;       // when a lane first blocked on it; 0: never
    int rail = 0;             // the rail that carried it; the last one if several did
    std::string error;        // why it has FAILED, where only this transfer is affected (a message longer than the receive)

    virtual ~Transfer() = default;
};

// Why a wire cannot be used any more.
struct WireFault {
    std::string text;   // for error messages: "rank 3 has left"; empty while the wire works
    int mpi_error = 0;  // the error code of the MPI library, if it was one
};

class Wire {
  public:
    int rank = 0, size = 1;
    int64_t largest_tag = 0;
    int64_t bytes_sent = 0, bytes_received = 0;  // of all messages so far, without control messages
    WireFault fault;  // set once, by whichever call notices; later calls do nothing and transfers do not complete

    virtual ~Wire() = default;

    virtual Transfer *send(int peer, int64_t tag, const void *data, int64_t nbytes) = 0;
    virtual Transfer *receive(int peer, int64_t tag, void *data, int64_t capacity) = 0;

    // Forward a received message that has begun to arrive to a peer, as it arrives; nullptr where this has no benefit:
    // then the caller sends it when it is complete. The received transfer must stay until the relay has completed.
    virtual Transfer *relay(Transfer *, int, int64_t) { return nullptr; }

    // Return true if the transfer has completed or failed. May make progress on it.
    virtual bool test(Transfer *transfer) = 0;

    // Return true if a part of the message has arrived, so that it can be relayed.
    virtual bool begun(Transfer *transfer) { return test(transfer); }

    // Cancel a receive that no message has matched, and free it. Return false if one has, and it continues.
    virtual bool cancel(Transfer *receive) = 0;

    // The caller has no more use for a completed transfer.
    virtual void release(Transfer *transfer) { delete transfer; }

    // Return the tag of a message that has arrived or was announced and for which no receive is posted; -1: none.
    virtual int64_t probe_any() = 0;

    // Receive and drop such a message; nullptr if there is none. The transfer owns its memory.
    virtual Transfer *discard(int peer, int64_t tag) = 0;

    // Control messages from one rank arrive in order. Those to a rank that has left are dropped.
    virtual void send_control(int peer, const void *data, size_t nbytes) = 0;
    virtual bool recv_control(int *peer, std::vector<uint8_t> *message) = 0;

    // Return true if messages whose receives are posted share the link, so that the first arrives no sooner than the last.
    virtual bool interleaves() const { return false; }

    // Make progress; return true if anything moved. Never blocks.
    virtual bool poll() = 0;

    // A descriptor that is readable when `poll` has work to do, -1 if the wire has none and must be polled.
    virtual int fd() const { return -1; }

    // Prepare to sleep on `fd`; false: there is work already, do not sleep.
    virtual bool arm() { return true; }

    // Nanoseconds after which `poll` must be called even without an event (timers of liveness checks); -1: never.
    virtual int64_t poll_within() const { return -1; }

    // Tell the peers why this rank fails (the text of `fault` or of the caller), where the network supports it.
    virtual void revoke(const std::string &) {}

    // Begin to leave: nothing new is sent. `closed` is true once everything that was sent has arrived, and all
    // resources but memory are released. To abandon (true) means that peers may be gone: they get only a short time.
    virtual void close(bool) {}
    virtual bool closed() { return true; }
};

int64_t now();  // nanoseconds of CLOCK_MONOTONIC, the clock of Python's perf_counter_ns

}  // namespace gpucomp
