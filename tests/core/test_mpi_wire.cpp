// The wire over MPI, with a library of one process: what random schedules do not reach.
#include <ctime>
#include <memory>

#include "check.h"
#include "fake_mpi.h"

namespace gpucomp {

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

namespace {

using fake_mpi::Network;
using Bytes = std::vector<uint8_t>;

constexpr int64_t EAGER = 16, GIGABYTE = 1 << 30;
const int32_t PEERS[] = {0, 1};

// Two ranks; with segments of `segment_bytes` unless that is 0.
struct Job {
    Network network{2, EAGER, 0, 1};
    MpiWire sender, receiver;

    explicit Job(int64_t segment_bytes = 0, MpiLibrary library = fake_mpi::library())
        : sender(library, 0, 2, 1000, comm(0, 0), comm(0, 1), comm(0, 2), {segment_bytes, 8, 1e12}, PEERS, 2),
          receiver(library, 1, 2, 1000, comm(1, 0), comm(1, 1), comm(1, 2), {segment_bytes, 8, 1e12}, PEERS, 2) {}

    uintptr_t comm(int rank, int context) { return network.endpoint(rank, context); }
};

// A receive that a message has matched is not cancelled, and nothing waits for the rest of the message.
void test_cancel_of_a_message_that_arrives(int64_t segment_bytes) {
    Job job(segment_bytes);
    const Bytes data(200, 7);
    Bytes memory(200), other(200);
    job.network.hold();
    Transfer *sending = job.sender.send(1, 5, data.data(), 200);
    Transfer *receiving = job.receiver.receive(0, 5, memory.data(), 200);
    Transfer *unmatched = job.receiver.receive(0, 6, other.data(), 200);
    CHECK(job.receiver.cancel(unmatched));
    CHECK(!job.receiver.cancel(receiving));
    CHECK(!job.receiver.test(receiving) && !job.receiver.fault.mpi_error);
    job.network.let_go();
    CHECK(job.receiver.test(receiving) && job.sender.test(sending));
    CHECK(memory == data && receiving->nbytes == 200 && job.network.left() == 0);
    job.receiver.release(receiving);
    job.sender.release(sending);
}

// Functions of MPI 4 for counts of more than 31 bits, which only take note of the counts.
std::vector<int64_t> counts;

int isend_c(const void *, long long count, uintptr_t, int, int, uintptr_t, void *request) {
    counts.push_back(count);
    *(void **)request = nullptr;
    return 0;
}
int irecv_c(void *, long long count, uintptr_t, int, int, uintptr_t, void *request) {
    counts.push_back(count);
    *(void **)request = nullptr;
    return 0;
}
int imrecv_c(void *, long long count, uintptr_t, void *, void *request) {
    counts.push_back(count);
    *(void **)request = nullptr;
    return 0;
}
int improbe_long(int, int, uintptr_t, int *found, void *message, void *) {
    *found = 1;
    *(void **)message = nullptr;
    return 0;
}
int get_count_of_long(const void *, uintptr_t, int *count) {
    *count = fake_mpi::UNDEFINED;
    return 0;
}
int get_count_c(const void *, uintptr_t, long long *count) {
    *count = 3 * GIGABYTE;
    return 0;
}

void test_messages_of_more_than_2_gib() {
    MpiLibrary library = fake_mpi::library();
    library.isend_c = (void *)isend_c;
    library.irecv_c = (void *)irecv_c;
    library.imrecv_c = (void *)imrecv_c;
    library.improbe = (void *)improbe_long;
    library.get_count = (void *)get_count_of_long;
    library.get_count_c = (void *)get_count_c;
    Job job(0, library);
    uint8_t byte = 0;  // nothing is read or written
    job.sender.release(job.sender.send(1, 5, &byte, 3 * GIGABYTE));
    job.receiver.release(job.receiver.receive(0, 5, &byte, 4 * GIGABYTE));
    job.receiver.release(job.receiver.discard(0, 5));
    CHECK((counts == std::vector<int64_t>{3 * GIGABYTE, 4 * GIGABYTE, 3 * GIGABYTE}));
    CHECK(!job.sender.fault.mpi_error && !job.receiver.fault.mpi_error);
}

// A library without these functions: an error, and no call of a function that is not there.
void test_long_messages_without_mpi_4() {
    Job job;
    uint8_t byte = 0;
    Transfer *sending = job.sender.send(1, 5, &byte, 3 * GIGABYTE);
    Transfer *receiving = job.receiver.receive(0, 5, &byte, 3 * GIGABYTE);
    CHECK(job.sender.fault.mpi_error == fake_mpi::NO_LONG_COUNTS && !job.sender.test(sending));
    CHECK(job.receiver.fault.mpi_error == fake_mpi::NO_LONG_COUNTS && !job.receiver.test(receiving));
    CHECK(!job.receiver.cancel(receiving));
    job.sender.release(sending);
    job.receiver.release(receiving);
    job.sender.send_control(1, &byte, 1);
    CHECK(job.sender.closed());  // although it is not sent any more
}

// A control message that a peer has not received outlives the wire.
void test_control_message_to_a_rank_that_is_late() {
    Network network(2, EAGER, 0, 1);
    const auto wire = [&](int rank) {
        return std::make_unique<MpiWire>(fake_mpi::library(), rank, 2, 1000, network.endpoint(rank, 0),
                                         network.endpoint(rank, 1), network.endpoint(rank, 2), Segmentation{0, 8, 1e12},
                                         PEERS, 2);
    };
    const Bytes text(200, 7);
    auto sender = wire(0);
    sender->send_control(1, text.data(), text.size());
    CHECK(!sender->closed());
    sender.reset();
    int peer = -1;
    Bytes message;
    CHECK(wire(1)->recv_control(&peer, &message) && peer == 0 && message == text);
}

}  // namespace
}  // namespace gpucomp

int main() {
    gpucomp::test_cancel_of_a_message_that_arrives(0);
    gpucomp::test_cancel_of_a_message_that_arrives(64);
    gpucomp::test_messages_of_more_than_2_gib();
    gpucomp::test_long_messages_without_mpi_4();
    gpucomp::test_control_message_to_a_rank_that_is_late();
    std::puts("ok");
}
