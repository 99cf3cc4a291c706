// Memory: addresses that the host cannot reach, with an alias for queued work; and who has accessed which bytes.
#include "machine.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace simcuda {

namespace {

constexpr u64 GUARD = PAGE, MOST_POISONED = 16 << 20;
constexpr int POISON = 0xcb;
int window_files[HOST_WINDOW + 1];
struct sigaction previous_action;

u64 round_up(u64 n, u64 to) {
    return (n + to - 1) / to * to;
}

bool in_windows(u64 address) {
    return address - PUBLIC_BASE < WINDOWS;
}

}  // namespace

bool kernel_fault(u64 address);

static void on_fault(int number, siginfo_t *info, void *context) {
    const u64 address = (u64)info->si_addr;
    if (kernel_fault(address)) return;
    Machine &machine = Machine::get();
    if (in_windows(address)) {
        // Neither the machine's own code nor that of kernels comes here: the lock is not held by this thread.
        std::unique_lock<std::mutex> guard(machine.lock);
        if (machine.host_hazard(address)) return;
        Allocation *allocation = machine.allocation_at(address, true);
        const std::string where = allocation
                                      ? allocation->describe(address)
                                      : text("address %#llx, which is not allocated", (unsigned long long)address);
        machine.find("host: the host accesses " + where);
        fprintf(stderr, "simulated CUDA: the host accesses %s\n", where.c_str());
    }
    if (previous_action.sa_flags & SA_SIGINFO && previous_action.sa_sigaction)
        return previous_action.sa_sigaction(number, info, context);
    if (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);  // the access is made again, and ends the process
        return;
    }
    previous_action.sa_handler(number);
}

// Maps a window of addresses twice: as the program sees it, and for queued work.
static bool open_window(int window) {
    if (window_files[window]) return true;
    static bool handled = false;
    if (!handled) {
        handled = true;
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &previous_action);
    }
    const int file = memfd_create("simulated CUDA memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)WINDOW)) return false;
    for (const u64 base : {PUBLIC_BASE, PUBLIC_BASE + ALIAS_OFFSET}) {
        void *const wanted = (void *)(base + window * WINDOW);
        const int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        if (mmap(wanted, WINDOW, PROT_NONE, flags, file, 0) != wanted) return false;
        madvise(wanted, WINDOW, MADV_DONTDUMP);
    }
    window_files[window] = file;
    return true;
}

// The host must not access memory that a queued copy writes, nor write memory that one reads: the pages that such a
// copy covers completely are protected until it has run. Not behind a host function: then the host may still have its
// turn.
void Machine::protect(Op &op) {
    if (!settings.protect || host_functions_queued || op.nbytes < PAGE) return;
    const auto add = [&](u64 address, bool write) {
        const u64 first = round_up(address, PAGE), last = (address + op.nbytes) / PAGE * PAGE;
        if (address - (PUBLIC_BASE + HOST_WINDOW * WINDOW) >= WINDOW || first >= last) return;
        op.protects = true;
        for (u64 page = first; page < last; page += PAGE)
            ++(write ? protected_pages[page].writers : protected_pages[page].readers);
        // Where another copy already writes, reading stays forbidden.
        for (u64 page = first; page < last;) {
            u64 end = page;
            const bool written = protected_pages[page].writers;
            while (end < last && (protected_pages[end].writers != 0) == written) end += PAGE;
            mprotect((void *)page, end - page, written ? PROT_NONE : PROT_READ);
            page = end;
        }
    };
    if (op.staged.empty() && op.kind == Op::COPY) add(op.from, false);
    add(op.to, true);
}

void Machine::unprotect(Op &op) {
    if (!op.protects) return;
    const auto remove = [&](u64 address, bool write) {
        const u64 first = round_up(address, PAGE), last = (address + op.nbytes) / PAGE * PAGE;
        if (address - (PUBLIC_BASE + HOST_WINDOW * WINDOW) >= WINDOW || first >= last) return;
        for (u64 page = first; page < last; page += PAGE) {
            const auto known = protected_pages.find(page);
            if (known == protected_pages.end()) continue;
            u32 &users = write ? known->second.writers : known->second.readers;
            if (users) --users;
        }
        for (u64 page = first; page < last;) {
            const auto mode = [&](u64 at) {
                const auto known = protected_pages.find(at);
                if (known == protected_pages.end()) return PROT_READ | PROT_WRITE;
                return known->second.writers ? PROT_NONE : known->second.readers ? PROT_READ : PROT_READ | PROT_WRITE;
            };
            const int wanted = mode(page);
            u64 end = page;
            while (end < last && mode(end) == wanted) end += PAGE;
            mprotect((void *)page, end - page, wanted);
            page = end;
        }
        for (u64 page = first; page < last; page += PAGE) {
            const auto known = protected_pages.find(page);
            if (known != protected_pages.end() && !known->second.writers && !known->second.readers)
                protected_pages.erase(known);
        }
    };
    if (op.staged.empty() && op.kind == Op::COPY) remove(op.from, false);
    remove(op.to, true);
}

// Finds what the host does to protected memory, and lets it.
bool Machine::host_hazard(u64 address) {
    const u64 page = address / PAGE * PAGE;
    const auto known = protected_pages.find(page);
    if (known == protected_pages.end()) {
        // Another thread may have run the copy since.
        const Allocation *allocation = allocation_at(address);
        if (!allocation || allocation->kind == MemoryKind::DEVICE) return false;
        mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
        return true;
    }
    for (auto &entry : streams)
        for (const Op &op : entry.second->queue) {
            if (!op.protects) continue;
            const bool writes = address - op.to < op.nbytes;
            const bool reads = op.kind == Op::COPY && op.staged.empty() && address - op.from < op.nbytes;
            if (!writes && !reads) continue;
            find(text("host: the host %s ", writes ? "accesses" : "writes") +
                 allocation_at(address)->describe(address) + ", which an unfinished " + describe_op(op.number) +
                 (writes ? " writes" : " reads"));
        }
    protected_pages.erase(known);
    mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
    return true;
}

std::string Allocation::describe(u64 address) const {
    const std::string where = device ? text(" of GPU %d", device->ordinal) : "";
    return text("byte %lld of %llu bytes of %s%s memory%s at %#llx (%s, allocation %llu)", (long long)(address - start),
                (unsigned long long)nbytes, freed ? "freed " : "", name_of(kind), where.c_str(),
                (unsigned long long)start, made_by.c_str(), (unsigned long long)number);
}

CUresult Machine::allocate(Device *device, MemoryKind kind, u64 nbytes, const std::string &made_by, u64 *address) {
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    for (Injection &injection : injections)
        if (injection.kind == Injection::MEMORY && injection.device == device->ordinal && --injection.left == 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
    const bool on_device = kind == MemoryKind::DEVICE;
    if (on_device && (nbytes > device->capacity || device->in_use + nbytes > device->capacity))
        return CUDA_ERROR_OUT_OF_MEMORY;
    const int window = on_device ? device->ordinal : HOST_WINDOW;
    u64 &next = on_device ? device->next : host_window_next_;
    const u64 length = round_up(round_up(nbytes, 256), PAGE);
    if (!open_window(window) || length + 2 * GUARD > WINDOW - next) return CUDA_ERROR_OUT_OF_MEMORY;
    const u64 first = PUBLIC_BASE + window * WINDOW + next + GUARD;
    next += length + GUARD;
    // The end lies at the end of a page, so that an access behind it meets a page that is not there.
    auto made = std::make_unique<Allocation>();
    made->start = first + length - round_up(nbytes, 256);
    made->nbytes = nbytes;
    made->number = ++allocation_count;
    made->kind = kind;
    made->device = device;
    made->made_by = made_by;
    mprotect((void *)(first + ALIAS_OFFSET), length, PROT_READ | PROT_WRITE);
    if (!on_device) mprotect((void *)first, length, PROT_READ | PROT_WRITE);
    u8 *const bytes = (u8 *)(first + ALIAS_OFFSET);
    if (length <= MOST_POISONED) {
        memset(bytes, POISON, length);
    } else {
        memset(bytes, POISON, MOST_POISONED / 2);
        memset(bytes + length - MOST_POISONED / 2, POISON, MOST_POISONED / 2);
    }
    if (on_device) device->in_use += nbytes;
    device->used = true;
    count(device, on_device ? "allocations" : "host_allocations");
    *address = made->start;
    allocations[made->start] = std::move(made);
    return CUDA_SUCCESS;
}

// Frees memory; a finding if work that accesses it is not ordered before. Without a name of a call nothing is found.
CUresult Machine::release(Allocation &allocation, const char *what, const Clock &clock) {
    if (what) {
        const auto check = [&](const Epoch &epoch) {
            if (epoch.tick <= clock[epoch.agent]) return;
            find(text("reuse: %s frees ", what) + allocation.describe(allocation.start) + " before " +
                 describe_op(epoch.number) + " is known to have completed");
        };
        for (auto &[start, segment] : allocation.accesses) {
            check(segment.write);
            for (const Epoch &epoch : segment.reads) check(epoch);
        }
    }
    allocation.accesses.clear();
    allocation.freed = true;
    if (allocation.kind == MemoryKind::DEVICE) allocation.device->in_use -= allocation.nbytes;
    if (!in_windows(allocation.start)) return CUDA_SUCCESS;
    const u64 first = allocation.start / PAGE * PAGE, length = round_up(allocation.end(), PAGE) - first;
    mprotect((void *)(first + ALIAS_OFFSET), length, PROT_NONE);
    if (allocation.kind != MemoryKind::DEVICE) mprotect((void *)first, length, PROT_NONE);
    const u64 window = (first - PUBLIC_BASE) / WINDOW;
    fallocate(window_files[window], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)((first - PUBLIC_BASE) % WINDOW),
              (off_t)length);
    return CUDA_SUCCESS;
}

Allocation *Machine::allocation_at(u64 address, bool freed) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    Allocation &allocation = *std::prev(next)->second;
    return address < allocation.end() && (freed || !allocation.freed) ? &allocation : nullptr;
}

MemoryKind Machine::kind_of(u64 address, u64 nbytes, Allocation **allocation) {
    (void)nbytes;
    *allocation = allocation_at(address);
    return *allocation ? (*allocation)->kind : MemoryKind::PAGEABLE;
}

// Returns an error, and finds, if a span is not within one live allocation of CUDA's or in pageable memory.
CUresult Machine::check_span(u64 address, u64 nbytes, const char *what, const std::string &role) {
    Allocation *allocation = allocation_at(address, true);
    if (allocation && !allocation->freed && nbytes <= allocation->end() - address) return CUDA_SUCCESS;
    if (!allocation && !in_windows(address)) return CUDA_SUCCESS;
    if (!allocation) {
        find(text("memory: the %s of %s, address %#llx, is not allocated", role.c_str(), what,
                  (unsigned long long)address));
    } else if (allocation->freed) {
        find(text("memory: the %s of %s is ", role.c_str(), what) + allocation->describe(address));
    } else {
        find(text("memory: the %s of %s has %llu bytes from ", role.c_str(), what, (unsigned long long)nbytes) +
             allocation->describe(address) + " on");
    }
    return CUDA_ERROR_INVALID_VALUE;
}

u8 *Machine::reachable(u64 address) {
    return (u8 *)(in_windows(address) ? address + ALIAS_OFFSET : address);
}

// Checks an access against those of other agents that are not ordered before it, and remembers it.
void Machine::access(u64 start, u64 end, bool write, const Clock &clock, const Epoch &epoch, const std::string &by) {
    Allocation *allocation = allocation_at(start);
    if (!allocation || start >= end) return;
    auto &segments = allocation->accesses;
    const auto split = [&](u64 at) {
        auto next = segments.upper_bound(at);
        if (next == segments.begin()) return;
        auto found = std::prev(next);
        if (found->first == at || found->second.end <= at) return;
        Segment rest = found->second;
        found->second.end = at;
        segments.emplace_hint(next, at, std::move(rest));
    };
    const auto ordered = [&](const Epoch &before) { return before.tick <= clock[before.agent]; };
    const auto hazard = [&](u64 at, bool before_writes, const Epoch &before) {
        const bool producer_is_late = before.number < epoch.number ? before_writes && !write : write && !before_writes;
        find(text("%s: %s %s ", producer_is_late ? "use before the producer is done" : "reuse", by.c_str(),
                  write ? "writes" : "reads") +
             allocation->describe(at) +
             text(", which %s %s: nothing orders the two", describe_op(before.number).c_str(),
                  before_writes ? "writes" : "reads"));
    };
    split(start);
    split(end);
    u64 at = start;
    auto next = segments.lower_bound(start);
    while (at < end) {
        if (next == segments.end() || next->first > at) {
            const u64 until = next == segments.end() ? end : std::min(end, next->first);
            next = segments.emplace_hint(next, at, Segment{until, {}, {}});
        }
        Segment &segment = next->second;
        if (!ordered(segment.write)) hazard(at, true, segment.write);
        if (write) {
            for (const Epoch &read : segment.reads)
                if (!ordered(read)) hazard(at, false, read);
            segment.write = epoch;
            segment.reads.clear();
        } else {
            auto &reads = segment.reads;
            reads.erase(std::remove_if(reads.begin(), reads.end(), ordered), reads.end());
            reads.push_back(epoch);
        }
        at = segment.end;
        ++next;
    }
    // Neighbours with the same history become one segment again.
    for (auto one = segments.lower_bound(start); one != segments.end() && one->first <= end;) {
        if (one == segments.begin()) {
            ++one;
            continue;
        }
        auto before = std::prev(one);
        const auto same = [](const Epoch &a, const Epoch &b) { return a.agent == b.agent && a.tick == b.tick; };
        const auto &a = before->second, &b = one->second;
        if (a.end == one->first && same(a.write, b.write) && a.reads.size() == b.reads.size() &&
            std::equal(a.reads.begin(), a.reads.end(), b.reads.begin(), same)) {
            before->second.end = b.end;
            one = segments.erase(one);
        } else {
            ++one;
        }
    }
}

void Machine::host_access(u64 address, u64 nbytes, bool write, const std::string &what) {
    // Work that is still queued has made no access yet: what it may access is found by name.
    for (auto &entry : streams)
        for (const Op &op : entry.second->queue) {
            if (op.kind != Op::COPY && op.kind != Op::FILL) continue;
            const bool writes = op.to < address + nbytes && address < op.to + op.nbytes;
            const bool reads =
                op.kind == Op::COPY && op.staged.empty() && op.from < address + nbytes && address < op.from + op.nbytes;
            if (writes)
                find("host: " + what + (write ? " writes" : " reads") + " memory that an unfinished " +
                     describe_op(op.number) + " writes");
            else if (write && reads)
                find("host: " + what + " writes memory that an unfinished " + describe_op(op.number) + " reads");
        }
    host.set(HOST, host[HOST] + 1);
    op_names.push_back(what);
    access(address, address + nbytes, write, host, {HOST, host[HOST], op_names.size() - 1}, what);
}

}  // namespace simcuda
