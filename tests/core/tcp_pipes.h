// Two ranks whose links are joined by paths in memory, which a test progresses, breaks and replaces.
//
// Slow paths do not close at once: until then they write garbage into the buffer they were receiving into, and the
// memory they were given to send must not change.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "../../mpi_gpucomp/core/src/tcp_link.h"
#include "check.h"

namespace gpucomp {

struct End;

struct Pipe : Path {
    struct Sent {
        PacketHeader header;
        Bytes payload;
        const uint8_t *memory;  // it was sent from
    };

    End *end;
    Pipe *other = nullptr;
    std::deque<Sent> wire;   // packets that the peer has not taken
    Packet packet;           // keeps the payload of the last packet out of sequence
    bool shut = false, done = false;
    uint8_t *landing = nullptr;
    size_t landing_bytes = 0;
    std::shared_ptr<Bytes> keep;

    Pipe(PathId path_id, Link *its_link, End *its_end) : Path(path_id, its_link), end(its_end) {}
    void wake() override {}
    int64_t last_seen(int64_t when) override { return when; }
    std::string fault() override { return ""; }
    void close() override;
    void finish_close();
    bool put();
    bool get(double share = 1.0);
};

struct End {
    Matcher matcher;
    Link link;
    bool slow;
    std::vector<Pipe *> closing;

    End(int rank, const std::vector<std::vector<int>> &tiers, bool is_slow)
        : matcher(rank, 2), link(1 - rank, tiers, &matcher, 1000000000), slow(is_slow) {
        matcher.links[1 - rank] = &link;
    }
};

inline void Pipe::close() {
    CHECK(!shut);
    shut = true;
    end->closing.push_back(this);
    if (!end->slow) finish_close();
}

inline void Pipe::finish_close() {
    if (end->slow && landing) std::memset(landing, 0xee, landing_bytes);
    if (end->slow) {
        for (const Sent &sent : wire) {
            if (sent.header.kind == DATA && !sent.payload.empty()) {
                CHECK(std::memcmp(sent.memory, sent.payload.data(), sent.payload.size()) == 0);
            }
        }
    }
    end->closing.erase(std::find(end->closing.begin(), end->closing.end(), this));
    done = true;
    keep.reset();
    link->on_closed(this);
}

// Send the next packet; its payload is read now, as by a socket.
inline bool Pipe::put() {
    if (shut || !link->next_packet(this, &packet)) return false;
    Sent sent{packet.header, Bytes(packet.header.length), packet.payload};
    if (!sent.payload.empty()) std::memcpy(sent.payload.data(), packet.payload, sent.payload.size());
    wire.push_back(std::move(sent));
    return true;
}

// Receive the next packet, or only its first part, after which the path breaks.
inline bool Pipe::get(double share) {
    if (shut || other->wire.empty()) return false;
    const Sent sent = std::move(other->wire.front());
    other->wire.pop_front();
    Landing where;
    CHECK(link->accept(this, sent.header, &where));
    const auto kept = static_cast<size_t>(static_cast<double>(sent.payload.size()) * share);
    landing = where.data;
    landing_bytes = sent.payload.size();
    keep = where.keep;
    if (where.data && kept) {
        std::memcpy(where.data, sent.payload.data(), kept);
        if (!end->slow) link->on_progress(this, sent.header, where, static_cast<int64_t>(kept));
    }
    if (share < 1) {
        link->drop_path(this, "broken");
        return true;
    }
    landing = nullptr;
    link->on_packet(this, sent.header, &where);
    link->send_ack(this, false);
    return true;
}

struct Pair {
    std::vector<int> rails;
    std::unique_ptr<End> ends[2];
    std::vector<uint64_t> generations;
    std::vector<std::unique_ptr<Pipe>> pipes;

    Pair(const std::vector<std::vector<int>> &tiers, bool slow) {
        for (const auto &tier : tiers) rails.insert(rails.end(), tier.begin(), tier.end());
        generations.assign(rails.size(), 0);
        for (int rank = 0; rank < 2; ++rank) {
            ends[rank] = std::make_unique<End>(rank, tiers, slow);
            Matcher &matcher = ends[rank]->matcher;
            matcher.eager_bytes = 8;
            matcher.segment_bytes = 16;
            matcher.relay_bytes = 4;
        }
        for (const int rail : rails) connect(rail);
    }

    // Make a new path, which replaces the one on its rail.
    void connect(int rail) {
        generations[rail] += 1;
        Pipe *made[2];
        for (int side = 0; side < 2; ++side) {
            const PathId id{rail, generations[rail]};
            pipes.push_back(std::make_unique<Pipe>(id, &ends[side]->link, ends[side].get()));
            made[side] = pipes.back().get();
        }
        made[0]->other = made[1];
        made[1]->other = made[0];
        for (int side = 0; side < 2; ++side) ends[side]->link.add_path(made[side]);
    }

    Pipe *path(int side, int rail) {
        const auto found = ends[side]->link.paths.find(rail);
        return found == ends[side]->link.paths.end() ? nullptr : static_cast<Pipe *>(found->second);
    }

    // Return true if a path is open at both ends.
    bool joined() {
        return std::any_of(rails.begin(), rails.end(), [this](int rail) {
            Pipe *one = path(0, rail);
            return one && one->other == path(1, rail);
        });
    }

    // Pass some packets both ways on one rail.
    void run(int rail, int steps) {
        for (int step = 0; step < steps; ++step) {
            Pipe *pipe = path(step % 2, rail);
            if (pipe) pipe->put();
            pipe = path(step % 2, rail);
            if (pipe) pipe->get();
        }
    }

    // Deliver everything, on new paths or on the remaining ones, which do not break any more.
    void drain(bool reconnect = true) {
        if (reconnect) {
            for (const int rail : rails) connect(rail);
        }
        for (bool moved = true; moved;) {
            moved = false;
            for (auto &end : ends) {
                while (!end->closing.empty()) {
                    end->closing.front()->finish_close();
                    moved = true;
                }
            }
            for (int side = 0; side < 2; ++side) {
                for (const int rail : rails) {
                    Pipe *pipe = path(side, rail);
                    if (pipe) moved |= pipe->put();
                    pipe = path(side, rail);
                    if (pipe) moved |= pipe->get();
                }
            }
        }
    }

    // As after a while without traffic.
    void idle() {
        for (auto &end : ends) {
            end->link.check_paths(now());
            end->matcher.recall_credits();
        }
        drain(false);
    }
};

}  // namespace gpucomp
