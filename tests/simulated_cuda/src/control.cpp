// What a test asks of the machine beyond CUDA: settings, findings, injections, counts, the model's clock.
#include <algorithm>

#include "machine.h"

using namespace simcuda;

#define CONTROL extern "C" __attribute__((visibility("default")))

namespace {

using Guard = std::unique_lock<std::mutex>;

thread_local std::string answer;

Machine &machine() {
    return Machine::get();
}

const char *give(std::string text) {
    answer = std::move(text);
    return answer.c_str();
}

}  // namespace

// Starts again with these settings: handles, memory, findings and counts are gone. Returns an error, or "".
CONTROL const char *simcuda_configure(const char *settings) {
    Guard guard(machine().lock);
    return give(machine().configure(settings, true));
}

// Registers a kernel that runs a host function; in `layout` each argument behind the range of tiles is r (pointer to
// const), w (pointer), q (64-bit integer) or d (double).
CONTROL void simcuda_add_kernel(const char *family, const char *name, void *function, const char *layout) {
    Guard guard(machine().lock);
    machine().kernels[name] = Kernel{name, family, layout, function, true};
}

CONTROL const char *simcuda_findings() {
    Guard guard(machine().lock);
    std::string all;
    for (const std::string &finding : machine().findings) all += finding + "\n";
    return give(all);
}

CONTROL int simcuda_finding_count() {
    Guard guard(machine().lock);
    return (int)machine().findings.size();
}

CONTROL void simcuda_clear_findings() {
    Guard guard(machine().lock);
    machine().findings.clear();
}

// Plans a failure: KIND[:device=D][;n=N][;kernel=NAME]. Returns an error, or "".
CONTROL const char *simcuda_inject(const char *specification) {
    Guard guard(machine().lock);
    return give(machine().inject(specification));
}

CONTROL const char *simcuda_counts() {
    Guard guard(machine().lock);
    return give(machine().counts_as_json());
}

// What interpreted kernels did since the counts were reset, by name.
CONTROL const char *simcuda_profiles() {
    Guard guard(machine().lock);
    return give(machine().profiles_as_json());
}

// The names of the kernels whose PTX has been compared with the host's, since the process began.
CONTROL const char *simcuda_interpreted() {
    Guard guard(machine().lock);
    std::string all;
    for (const std::string &name : machine().interpreted) all += name + "\n";
    return give(all);
}

CONTROL void simcuda_reset_counts() {
    Guard guard(machine().lock);
    machine().reset_counts();
}

// Microseconds on the model's clock since the counts were reset.
CONTROL double simcuda_model_microseconds() {
    Guard guard(machine().lock);
    return machine().elapsed() / 1000;
}

// Says that the host (an MPI library, for example) accesses memory now; a finding if unfinished work does, too.
CONTROL void simcuda_host_access(CUdeviceptr address, size_t nbytes, int write, const char *what) {
    Guard guard(machine().lock);
    machine().host_access(address, nbytes, write != 0, what);
}

// What exists now is no leak.
CONTROL void simcuda_mark() {
    Guard guard(machine().lock);
    machine().mark();
}

// Finds what exists since the mark, or at all; returns the number of findings.
CONTROL int simcuda_leaks(int all) {
    Guard guard(machine().lock);
    return machine().leaks(all != 0);
}

// A context on another device than these (a bit for each) is a finding.
CONTROL void simcuda_expect_devices(unsigned mask) {
    Guard guard(machine().lock);
    for (auto &device : machine().devices) device->expected = mask >> device->ordinal & 1;
}

// Runs one operation of a stream that can run, or of any; returns 0 if there is none.
CONTROL int simcuda_step() {
    Guard guard(machine().lock);
    return machine().step(nullptr);
}

// Runs everything that can run.
CONTROL void simcuda_drain() {
    Guard guard(machine().lock);
    while (machine().step(nullptr)) {}
    machine().changed.notify_all();
}

// Reads device memory as a debugger would, without any order.
CONTROL int simcuda_peek(CUdeviceptr address, size_t nbytes, void *to) {
    Guard guard(machine().lock);
    if (machine().check_span(address, nbytes, "simcuda_peek", "source")) return 0;
    memcpy(to, machine().reachable(address), nbytes);
    return 1;
}

// Why the context of a device failed; "" if it did not.
CONTROL const char *simcuda_fault(int device) {
    Guard guard(machine().lock);
    return give(machine().devices.at((size_t)device)->fault_text);
}

// Makes failed devices work again, which no real one does: the next test starts on a device that works.
CONTROL void simcuda_repair() {
    Guard guard(machine().lock);
    machine().injections.clear();
    for (auto &device : machine().devices) {
        device->fault = CUDA_SUCCESS;
        device->fault_text.clear();
    }
}
