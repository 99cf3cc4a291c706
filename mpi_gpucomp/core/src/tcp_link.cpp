#include "tcp_link.h"

#include <algorithm>
#include <cstring>

namespace gpucomp {

namespace {

constexpr int64_t PROBE_SHARE = 4;                // a silent path is probed after this part of the timeout
constexpr int64_t IDLE_NANOSECONDS = 5000000000;  // how long an idle path may be silent before it is probed
constexpr int64_t STRIPED_BYTES = 1 << 18;        // of a segment where several paths share the traffic
constexpr int64_t ACK_BYTES = 1 << 20;            // of payload that arrive before they are acknowledged

}  // namespace

Liveness check_liveness(int64_t when, int64_t last_seen, int64_t probed, int64_t timeout, bool busy) {
    const int64_t probe_after = timeout / PROBE_SHARE;
    if (probed > last_seen) return when - probed > timeout - probe_after ? Liveness::DEAD : Liveness::ALIVE;
    const int64_t allowed = busy ? probe_after : std::max(timeout, IDLE_NANOSECONDS);
    return when - last_seen > allowed ? Liveness::SUSPECT : Liveness::ALIVE;
}

void Path::send_urgent(PacketKind kind, Bytes payload) {
    urgent.push_back(Outgoing::with_payload(kind, std::move(payload)));
    wake();
}

Link::Link(int its_peer, std::vector<std::vector<int>> tiers, Matcher *matcher, int64_t timeout)
    : peer(its_peer), disconnected_since(now()), tiers_(std::move(tiers)), matcher_(matcher), timeout_(timeout) {
    size_t rails = 0;
    for (const auto &tier : tiers_) rails += tier.size();
    abandoned.assign(rails, 0);
    peer_closed_.assign(rails, 0);
}

// Sending

void Link::post(Outgoing item) {
    const uint8_t kind = item.header.kind;
    queue_.push_back(std::move(item));
    if (kind == DATA || kind == RTS || kind == CONTROL) select_rails();
    wake();
}

void Link::wake() {
    for (const int rail : in_use_) paths[rail]->wake();
}

bool Link::next_packet(Path *path, Packet *packet) {
    if (!path->urgent.empty()) {
        Outgoing item = std::move(path->urgent.front());
        path->urgent.pop_front();
        packet->header = item.header;
        packet->owned = std::move(item.owned);
        packet->payload = packet->owned.data();
        fill_header(&packet->header, 0);
        return true;
    }
    const auto own = paths.find(path->id.rail);
    if (own == paths.end() || own->second != path || !in_use_.count(path->id.rail)) return false;
    uint64_t number = 0;
    const Outgoing *item = sender_.take(path->id, &number);
    if (!item) {
        if (!queue_.empty()) {
            sender_.post(std::move(queue_.front()));
            queue_.pop_front();
        } else {
            Outgoing segment;
            const int64_t longest = in_use_.size() > 1 ? STRIPED_BYTES : MAX_PAYLOAD_BYTES;
            if (!matcher_->next_segment(peer, longest, &segment)) return false;
            sender_.post(std::move(segment));
        }
        item = sender_.take(path->id, &number);
    }
    if (item->owner) item->owner->rail = path->id.rail / matcher_->stripes;
    packet->header = item->header;
    packet->payload = item->data;
    packet->owned.clear();
    fill_header(&packet->header, number);
    return true;
}

void Link::fill_header(PacketHeader *header, uint64_t sequence) {
    header->sequence = sequence;
    header->acked = last_acked_ = receiver_.delivered;
    header->check = header->checksum();
    ack_awaited_ = false;
    unacked_bytes_ = 0;
}

bool Link::busy() const { return !all_acked() || matcher_->is_receiving(peer); }

// Receiving

bool Link::accept(Path *path, const PacketHeader &header, Landing *landing) {
    *landing = Landing();
    if (header.in_sequence()) {
        if (!receiver_.begin(header.sequence, path->id)) return true;
        if (header.kind == DATA) return matcher_->begin_segment(peer, header, landing);
    }
    landing->keep = std::make_shared<Bytes>(header.length);
    landing->data = landing->keep->data();
    return true;
}

void Link::on_progress(Path *path, const PacketHeader &header, const Landing &landing, int64_t nbytes) {
    if (landing.message) matcher_->on_progress(header, landing, nbytes, path->id.rail / matcher_->stripes);
}

void Link::on_packet(Path *path, const PacketHeader &header, Landing *landing) {
    sender_.ack(header.acked, &released_);
    on_acked();
    if (!header.in_sequence()) {
        on_urgent(path, header, *landing);
        return;
    }
    if (!landing->message && !landing->keep) {  // a duplicate: the peer may not know that it has arrived
        ack_awaited_ = true;
        return;
    }
    unacked_bytes_ += header.length;
    std::optional<Ordered> ordered;
    if (header.kind == DATA) {
        const bool ended = matcher_->on_segment(header, *landing, path->id.rail / matcher_->stripes);
        ack_awaited_ |= ended && header.total > matcher_->eager_bytes;
    } else if (header.kind == CONTROL || header.kind == BYE || header.kind == ABORT) {
        ordered = Ordered{static_cast<PacketKind>(header.kind), std::move(*landing->keep)};
    } else {
        matcher_->on_packet(peer, header);
    }
    const uint64_t before = receiver_.delivered;
    receiver_.finish(header.sequence, std::move(ordered), &ready_);
    ack_awaited_ |= receiver_.delivered > before + 1;  // the sender may wait for one of those that were out of order
    for (Ordered &one : ready_) deliver(std::move(one));
    ready_.clear();
}

void Link::on_urgent(Path *path, const PacketHeader &header, const Landing &landing) {
    if (header.kind == PING) {
        path->send_urgent(ACK);
    } else if (header.kind == STATE) {
        const std::optional<AckState> state = AckState::unpack(*landing.keep, abandoned.size());
        if (state) resume(*state);
    }
}

void Link::deliver(Ordered ordered) {
    if (ordered.kind == BYE) {
        peer_left = ack_awaited_ = true;
    } else {
        matcher_->control.push_back(ReceivedControl{peer, ordered.kind == ABORT, std::move(ordered.payload)});
    }
}

void Link::on_acked() {
    for (const Outgoing &item : released_) matcher_->on_acked(peer, item);
    released_.clear();
}

void Link::send_ack(Path *path, bool always) {
    const auto own = paths.find(path->id.rail);
    if (own == paths.end() || own->second != path) return;
    if (!ack_awaited_ && receiver_.delivered == last_acked_) return;
    if (ack_awaited_ || unacked_bytes_ >= ACK_BYTES || always) {
        ack_awaited_ = false;
        unacked_bytes_ = 0;
        last_acked_ = receiver_.delivered;
        path->send_urgent(ACK);
    }
}

// Paths

void Link::add_path(Path *path) {
    const int rail = path->id.rail;
    if (paths.count(rail)) drop_path(paths[rail], "replaced by a new connection of the peer");
    paths[rail] = path;
    matcher_->rail_changes += 1;
    report_state(path);
    if (in_use_.empty()) select_rails();
    wake();
}

void Link::drop_path(Path *path, const std::string &reason) {
    const int rail = path->id.rail;
    const auto own = paths.find(rail);
    if (own == paths.end() || own->second != path) return;
    const int64_t when = now(), last_seen = path->last_seen(when);
    paths.erase(own);
    if (paths.empty()) disconnected_since = when;
    select_rails();
    if (!peer_left) {
        failovers.push_back(Failover{peer, rail, reason, when - last_seen, -1, path->id.generation, last_seen});
        if (on_path_down) on_path_down(rail, path->id.generation, reason);
    }
    close_path(path, when);
    wake();
}

void Link::close_path(Path *path, int64_t when) {
    abandoned[path->id.rail] = path->id.generation;
    closing[path] = when;
    sender_.hold(path->id);
    path->close();
}

void Link::on_closed(Path *path) {
    closing.erase(path);
    receiver_.drop_partial(path->id);
    for (const auto &one : paths) report_state(one.second);
    sender_.release(path->id, &released_);
    on_acked();
    resolve_failovers();
    wake();
}

void Link::report_state(Path *path) { path->send_urgent(STATE, receiver_.state(closed()).pack()); }

void Link::close() {
    const std::map<int, Path *> open = std::move(paths);
    paths.clear();
    in_use_.clear();
    for (const auto &one : open) close_path(one.second, now());
}

void Link::resume(const AckState &state) {
    for (size_t rail = 0; rail < state.closed.size(); ++rail) {
        const auto own = paths.find(static_cast<int>(rail));
        if (own != paths.end() && own->second->id.generation <= state.closed[rail]) {
            drop_path(own->second, "closed by the peer");
        }
    }
    sender_.resume(state, &released_);
    on_acked();
    for (size_t rail = 0; rail < peer_closed_.size(); ++rail) {
        peer_closed_[rail] = std::max(peer_closed_[rail], state.closed[rail]);
    }
    resolve_failovers();
    wake();
}

std::vector<uint64_t> Link::closed() const {
    std::vector<uint64_t> last = abandoned;
    for (const auto &one : closing) {
        uint64_t &generation = last[one.first->id.rail];
        generation = std::min(generation, one.first->id.generation - 1);
    }
    return last;
}

// Complete the records of paths that are closed at both ends.
void Link::resolve_failovers() {
    const std::vector<uint64_t> own = closed();
    for (auto one = failovers.rbegin(); one != failovers.rend(); ++one) {
        if (one->downtime < 0 && one->generation <= std::min(own[one->rail], peer_closed_[one->rail])) {
            one->downtime = now() - one->last_seen;
            matcher_->rail_changes += 1;
        }
    }
}

bool Link::is_stable(const Path *path) const { return path->id.generation == 1 || now() - path->since > timeout_; }

std::set<int> Link::best_tier(const std::set<int> &rails) const {
    for (const auto &tier : tiers_) {
        std::set<int> alive;
        for (const int rail : tier) {
            if (rails.count(rail)) alive.insert(rail);
        }
        if (!alive.empty()) return alive;
    }
    return {};
}

void Link::select_rails() {
    const bool all_in_use = in_use_.size() == tiers_[0].size() && in_use_.count(tiers_[0][0]);
    if (all_in_use && paths.size() == abandoned.size()) return;
    std::set<int> present, stable;
    for (const auto &[rail, path] : paths) {
        present.insert(rail);
        if (in_use_.count(rail) || is_stable(path)) stable.insert(rail);
    }
    in_use_ = best_tier(stable);
    if (in_use_.empty()) in_use_ = best_tier(present);
    matcher_->rail_changes += 1;
}

std::set<int> Link::down() const {
    std::set<int> rails;
    for (size_t rail = 0; rail < abandoned.size(); ++rail) {
        if (!paths.count(static_cast<int>(rail))) rails.insert(static_cast<int>(rail));
    }
    for (const int rail : tiers_[0]) {
        if (!in_use_.count(rail)) rails.insert(rail);
    }
    return rails;
}

void Link::check_paths(int64_t when) {
    const bool is_busy = busy();
    if (!is_busy) select_rails();
    const std::map<Path *, int64_t> before = closing;
    for (const auto &one : before) one.first->poll_close();
    const std::map<int, Path *> open = paths;
    for (const auto &[rail, path] : open) {
        if (paths.count(rail) == 0 || paths[rail] != path) continue;
        const std::string why = path->fault();
        const int64_t last_seen = path->last_seen(when);
        Liveness liveness = check_liveness(when, last_seen, path->probed, timeout_, is_busy);
        if (liveness == Liveness::DEAD && path->is_bridged()) liveness = Liveness::SUSPECT;
        if (!why.empty()) {
            drop_path(path, why);
        } else if (liveness == Liveness::SUSPECT) {
            path->probed = when;
            path->send_urgent(PING);
        } else if (liveness == Liveness::DEAD) {
            const int64_t hundredths = (when - last_seen) / 10000000;
            std::string digits = std::to_string(hundredths % 100);
            if (digits.size() < 2) digits.insert(0, "0");
            drop_path(path, "no sign of life for " + std::to_string(hundredths / 100) + "." + digits + " s");
        }
    }
    if (!in_use_.empty()) send_ack(paths[*in_use_.begin()], true);
}

}  // namespace gpucomp
