#include "tcp_sequence.h"

#include <algorithm>
#include <cstring>

namespace gpucomp {

// A damaged number or length would let both ends wait for each other, until the timeout.
uint16_t PacketHeader::checksum() const {
    PacketHeader copy = *this;
    copy.check = 0;
    uint64_t words[sizeof(PacketHeader) / 8], mixed = 0;
    std::memcpy(words, &copy, sizeof words);
    for (const uint64_t word : words) {
        mixed = (mixed ^ word) * 0x9E3779B97F4A7C15u;
        mixed ^= mixed >> 32;
    }
    return static_cast<uint16_t>(mixed ^ mixed >> 16);
}

bool PacketHeader::malformed() const {
    if (kind < DATA || kind > STATE || length > MAX_PAYLOAD_BYTES) return true;
    return kind == DATA && (offset < 0 || total < 0 || number == 0 || offset > total || length > total - offset);
}

Outgoing Outgoing::with_payload(PacketKind kind, Bytes payload) {
    Outgoing item;
    item.header.kind = kind;
    item.header.length = static_cast<uint32_t>(payload.size());
    item.owned = std::move(payload);
    item.data = item.owned.data();
    return item;
}

Bytes AckState::pack() const {
    std::vector<uint64_t> numbers = {delivered, closed.size()};
    numbers.insert(numbers.end(), closed.begin(), closed.end());
    numbers.insert(numbers.end(), out_of_order.begin(), out_of_order.end());
    Bytes data(numbers.size() * sizeof(uint64_t));
    std::memcpy(data.data(), numbers.data(), data.size());
    return data;
}

std::optional<AckState> AckState::unpack(const Bytes &data, size_t rails) {
    if (data.size() % sizeof(uint64_t) || data.size() < (2 + rails) * sizeof(uint64_t)) return std::nullopt;
    std::vector<uint64_t> numbers(data.size() / sizeof(uint64_t));
    std::memcpy(numbers.data(), data.data(), data.size());
    if (numbers[1] != rails) return std::nullopt;
    AckState state;
    const auto out_of_order = numbers.begin() + 2 + static_cast<std::ptrdiff_t>(rails);
    state.delivered = numbers[0];
    state.closed.assign(numbers.begin() + 2, out_of_order);
    state.out_of_order.assign(out_of_order, numbers.end());
    return state;
}

void SendSequence::post(Outgoing item) {
    kept_.push_back(Entry{std::move(item), PathId(), false});
    ++posted;
}

const Outgoing *SendSequence::take(const PathId &path, uint64_t *number) {
    *number = transmitted;
    bool found = false;
    while (!found && !retransmit_.empty()) {
        *number = *retransmit_.begin();
        retransmit_.erase(retransmit_.begin());
        found = *number >= acked;
    }
    if (!found) {
        if (transmitted == posted) return nullptr;
        *number = transmitted++;
    }
    Entry &entry = kept_[*number - acked];
    entry.path = path;
    entry.carried = true;
    return &entry.item;
}

bool SendSequence::is_held(const Entry &entry) const {
    const auto is_its_path = [&](const Held &held) { return held.path == entry.path; };
    return entry.carried && std::any_of(held_.begin(), held_.end(), is_its_path);
}

void SendSequence::ack(uint64_t delivered, std::vector<Outgoing> *released) {
    delivered_ = std::max(delivered_, delivered);
    while (acked < std::min(delivered_, transmitted) && !is_held(kept_.front())) {
        released->push_back(std::move(kept_.front().item));
        kept_.pop_front();
        ++acked;
    }
}

void SendSequence::resume(const AckState &state, std::vector<Outgoing> *released) {
    ack(state.delivered, released);
    for (Held &held : held_) {
        if (held.path.generation <= state.closed[held.path.rail]) held.state = state;
    }
    const std::set<uint64_t> arrived(state.out_of_order.begin(), state.out_of_order.end());
    for (uint64_t number = acked; number < transmitted; ++number) {
        Entry &entry = kept_[number - acked];
        if (!entry.carried || is_held(entry) || entry.path.generation > state.closed[entry.path.rail]) continue;
        entry.carried = false;
        // Packets that have arrived may have to wait for one before them that a closing path may still read.
        if (number >= delivered_ && !arrived.count(number)) retransmit_.insert(number);
    }
}

void SendSequence::hold(const PathId &path) { held_.push_back(Held{path, std::nullopt}); }

void SendSequence::release(const PathId &path, std::vector<Outgoing> *released) {
    const auto found = std::find_if(held_.begin(), held_.end(), [&](const Held &held) { return held.path == path; });
    if (found == held_.end()) return;
    const std::optional<AckState> state = std::move(found->state);
    held_.erase(found);
    if (state) {
        resume(*state, released);
    } else {
        ack(delivered_, released);
    }
}

bool ReceiveSequence::begin(uint64_t number, const PathId &path) {
    if (number < delivered || out_of_order_.count(number) || arriving_.count(number)) return false;
    arriving_[number] = path;
    return true;
}

void ReceiveSequence::finish(uint64_t number, std::optional<Ordered> item, std::vector<Ordered> *ready) {
    arriving_.erase(number);
    out_of_order_[number] = std::move(item);
    received = std::max(received, number + 1);
    while (!out_of_order_.empty() && out_of_order_.begin()->first == delivered) {
        std::optional<Ordered> &first = out_of_order_.begin()->second;
        if (first) ready->push_back(std::move(*first));
        out_of_order_.erase(out_of_order_.begin());
        ++delivered;
    }
}

void ReceiveSequence::drop_partial(const PathId &path) {
    for (auto one = arriving_.begin(); one != arriving_.end();) {
        one = one->second == path ? arriving_.erase(one) : std::next(one);
    }
}

AckState ReceiveSequence::state(std::vector<uint64_t> closed) const {
    AckState state;
    state.delivered = delivered;
    state.closed = std::move(closed);
    for (const auto &one : out_of_order_) state.out_of_order.push_back(one.first);
    return state;
}

}  // namespace gpucomp
