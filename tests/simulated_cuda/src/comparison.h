// What the host's kernel writes, kept to compare it byte by byte with what the same kernel writes from its PTX.
//
// The host's kernel runs first, and what it has written is undone. Bytes that it writes and the interpreted one does not
// are not compared: on the host some kernels write whole vectors, past the end of what they have to say.
#pragma once

#include <bitset>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace simcuda {

class Comparison {
public:
    explicit Comparison(Machine &machine) : machine_(machine) {}

    // Call before either kernel writes.
    void before_write(u64 address, u64 nbytes) {
        for (const u64 end = address + nbytes; address < end;) {
            Page &page = page_of(address);
            const u64 stop = std::min(end, page.start + page.bytes.size());
            if (rewound_)
                for (; address < stop; ++address) page.written.set(address - page.start);
            address = stop;
        }
    }

    // The host's kernel has run: keep what it has written, and undo it.
    void rewind() {
        for (auto &[number, page] : pages_) {
            u8 *const memory = machine_.reachable(page.start);
            std::swap_ranges(page.bytes.begin(), page.bytes.end(), memory);
        }
        rewound_ = true;
        latest_ = nullptr;
    }

    // What the interpreted kernel has written differently; empty if nothing.
    std::string difference() const {
        u64 different = 0, first = ~0ull;
        u8 ours = 0, theirs = 0;
        for (const auto &[number, page] : pages_) {
            const u8 *const memory = machine_.reachable(page.start);
            for (size_t i = 0; i < page.bytes.size(); ++i) {
                if (!page.written[i] || memory[i] == page.bytes[i]) continue;
                ++different;
                if (page.start + i > first) continue;
                first = page.start + i;
                ours = memory[i];
                theirs = page.bytes[i];
            }
        }
        if (!different) return "";
        return text("%llu bytes differ from the host's: it writes %#04x where the host's kernel writes %#04x, ",
                    (unsigned long long)different, ours, theirs) +
               machine_.allocation_at(first)->describe(first);
    }

private:
    // The part of a page within an allocation.
    struct Page {
        u64 start = 0;
        std::vector<u8> bytes;  // before the host's kernel has run; then, what it has made of them
        std::bitset<PAGE> written;
    };

    Page &page_of(u64 address) {
        if (latest_ && address - latest_->start < latest_->bytes.size()) return *latest_;
        Page &page = pages_[address / PAGE];
        if (page.bytes.empty()) {
            const Allocation *const allocation = machine_.allocation_at(address);
            page.start = std::max(address / PAGE * PAGE, allocation->start);
            const u64 end = std::min(address / PAGE * PAGE + PAGE, allocation->end());
            const u8 *const memory = machine_.reachable(page.start);
            page.bytes.assign(memory, memory + (end - page.start));
        }
        latest_ = &page;
        return page;
    }

    Machine &machine_;
    std::unordered_map<u64, Page> pages_;
    Page *latest_ = nullptr;
    bool rewound_ = false;
};

}  // namespace simcuda
