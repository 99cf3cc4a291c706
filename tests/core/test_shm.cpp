// Cases of the shared-memory wire: test_shm.py builds this program and runs each case in a process of its own.
//
//   test_shm <directory> <case> [processes|threads <ranks> <ring bytes> <single copy> <seed>]
//
// It prints "passed", or the check that failed.
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "shm_peers.h"
#include "shm_wire.h"

namespace gpucomp {
int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}
}  // namespace gpucomp

using namespace gpucomp;

namespace {

constexpr int64_t SECOND = 1000000000, PATIENCE = 30 * SECOND;

// What all ranks share, also as processes.
struct Shared {
    std::atomic<int> arrived, round, flag;
    std::atomic<int> ended[64];
};

constexpr int OTHER = 63;  // entry of `ended` that belongs to no rank

Shared *shared;
std::string key;

[[noreturn]] void failed(int line, const char *what, const std::string &got) {
    printf("line %d: %s: got '%s'\n", line, what, got.c_str());
    fflush(stdout);
    _exit(1);
}

#define CHECK(condition, got) \
    if (!(condition)) failed(__LINE__, #condition, got)
#define CHECK_EQUAL(value, expected) \
    if ((value) != (expected)) failed(__LINE__, #value " == " #expected, (value))

struct Options {
    bool threads = false;
    int ranks = 2;
    int64_t ring_bytes = 0;
    bool single_copy = true;
    uint64_t seed = 1;
};

Options options;

uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

struct Random {
    uint64_t state;
    uint64_t below(uint64_t bound) { return mix(state++) % bound; }
};

void barrier(int ranks) {
    const int round = shared->round.load();
    if (shared->arrived.fetch_add(1) + 1 == ranks) {
        shared->arrived.store(0);
        shared->round.store(round + 1);
        return;
    }
    const int64_t deadline = now() + PATIENCE;
    while (shared->round.load() == round) {
        CHECK(now() < deadline, "a rank that does not come");
        sched_yield();
    }
}

Wire *create(int rank) {
    return gc_shm_create(key.c_str(), rank, options.ranks, options.ring_bytes, options.single_copy);
}

Wire *connect(int rank) {
    Wire *wire = create(rank);
    CHECK_EQUAL(wire->fault.text, "");
    barrier(options.ranks);
    gc_shm_attach(wire, PATIENCE);
    CHECK_EQUAL(wire->fault.text, "");
    return wire;
}

// Sleep until there is work. A doorbell that never rings is a lost wake-up.
void sleep_on(Wire *wire) {
    if (!wire->arm()) return;
    pollfd waiting{wire->fd(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, PATIENCE / 1000000) == 1, "a lost wake-up");
}

void progress(Wire *wire) {
    if (!wire->poll() && wire->fault.text.empty()) sleep_on(wire);
}

void wait(Wire *wire, Transfer *transfer) {
    while (!wire->test(transfer)) {
        CHECK_EQUAL(wire->fault.text, "");
        progress(wire);
    }
}

// Like `wait`, while the peer does not sleep either and may be late with everything.
void wait_fault(Wire *wire) {
    while (wire->fault.text.empty()) progress(wire);
}

void leave(Wire *wire) {
    wire->close(false);
    const int64_t deadline = now() + PATIENCE;
    while (!wire->closed()) {
        CHECK(now() < deadline, "a wire that does not close");
        sched_yield();
    }
    delete wire;
}

void run(const std::function<void(int)> &rank_main) {
    if (options.threads) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < options.ranks; ++rank) threads.emplace_back(rank_main, rank);
        for (std::thread &thread : threads) thread.join();
        return;
    }
    std::vector<pid_t> processes;
    for (int rank = 0; rank < options.ranks; ++rank) {
        const pid_t process = fork();
        if (process == 0) {
            rank_main(rank);
            fflush(stdout);
            exit(0);
        }
        processes.push_back(process);
    }
    bool fine = true;
    for (int rank = 0; rank < options.ranks; ++rank) {
        int status;
        waitpid(processes[rank], &status, 0);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && shared->ended[rank].load();
        if (!killed && status) printf("rank %d ended with status %d\n", rank, status);
        fine &= killed || !status;
    }
    if (!fine) exit(1);
}

void fill(std::vector<uint8_t> &data, uint64_t of) {
    for (size_t i = 0; i < data.size(); i += 8) {
        const uint64_t word = mix(of * 0x100000001b3 + i);
        memcpy(&data[i], &word, std::min<size_t>(8, data.size() - i));
    }
}

// Random messages

struct Message {
    int id, source, destination, relayed_to;
    int64_t tag, nbytes, room;
    bool dropped;
};

constexpr int MESSAGES = 240, CONTROL_MESSAGES = 30, WINDOW = 12;

std::vector<Message> random_messages(uint64_t seed, int ranks, bool small) {
    Random random{mix(seed)};
    std::vector<Message> messages;
    for (int id = 0; id < MESSAGES; ++id) {
        Message of{};
        of.id = id;
        of.source = random.below(ranks);
        of.destination = random.below(ranks);
        of.relayed_to = -1;
        const int64_t limits[] = {1, 64, 5000, 17000, 70000, small ? 70000 : 400000, small ? 70000 : 3000000};
        of.nbytes = random.below(limits[random.below(7)]);
        of.room = of.nbytes + random.below(2) * random.below(1000);
        of.tag = random.below(4);
        const uint64_t special = random.below(10);
        if (special < 4) of.tag = (int64_t(1) << 40) + id;  // no other message has it
        if (special == 0) of.dropped = true;
        if (special == 1) of.relayed_to = random.below(ranks);
        if (special == 2 && of.nbytes) of.room = random.below(of.nbytes);  // too short
        messages.push_back(of);
    }
    return messages;
}

struct Traffic {
    Wire *wire;
    Random random;
    std::vector<Message> messages;

    struct Active {
        Message of;
        Transfer *transfer;
        std::vector<uint8_t> data;
        bool relayed = false;
    };
    std::deque<std::unique_ptr<Active>> sends, receives, relays;
    std::vector<Message> to_send, to_receive, to_drop;
    size_t sent = 0, received = 0;
    std::vector<int> control_sent, control_received;
    int64_t bytes_sent = 0, bytes_received = 0;
    std::vector<std::unique_ptr<Active>> relayed;  // received messages that must stay until their relay has completed

    Traffic(Wire *wire, uint64_t seed, const std::vector<Message> &messages)
        : wire(wire), random{mix(seed)}, messages(messages) {}

    static int64_t relay_tag(const Message &of) { return of.tag + (int64_t(1) << 41); }

    void run() {
        const int rank = wire->rank;
        for (const Message &of : messages) {
            if (of.source == rank) to_send.push_back(of);
            if (of.destination == rank) (of.dropped ? to_drop : to_receive).push_back(of);
            if (of.relayed_to == rank && of.nbytes) {
                Message relayed = of;
                relayed.source = of.destination;
                relayed.destination = rank;
                relayed.tag = relay_tag(of);
                relayed.relayed_to = -1;
                relayed.room = of.nbytes;
                to_receive.push_back(relayed);
            }
        }
        control_sent.resize(wire->size);
        control_received.resize(wire->size);
        while (!finished()) {
            CHECK_EQUAL(wire->fault.text, "");
            bool moved = post();
            moved |= random.below(3) == 0 && send_control();
            moved |= complete();
            moved |= receive_control();
            moved |= drop();
            moved |= random.below(4) == 0 && cancel();
            moved |= wire->poll();
            if (moved) continue;
            if (control_pending()) send_control();
            else if (random.below(8) == 0) sched_yield();
            else sleep_on(wire);
        }
        CHECK(wire->bytes_sent == bytes_sent, std::to_string(wire->bytes_sent));
        CHECK(wire->bytes_received == bytes_received, std::to_string(wire->bytes_received));
        CHECK(wire->probe_any() == -1, std::to_string(wire->probe_any()));
    }

    bool control_pending() const {
        for (int count : control_sent)
            if (count < CONTROL_MESSAGES) return true;
        return false;
    }

    bool finished() const {
        for (int count : control_received)
            if (count < CONTROL_MESSAGES) return false;
        return !control_pending() && sends.empty() && receives.empty() && relays.empty() && sent == to_send.size() &&
               received == to_receive.size() && to_drop.empty();
    }

    bool post() {
        if (sent < to_send.size() && sends.size() < WINDOW && random.below(2)) {
            const Message &of = to_send[sent++];
            auto active = std::make_unique<Active>();
            active->of = of;
            active->data.resize(of.nbytes);
            fill(active->data, of.id);
            active->transfer = wire->send(of.destination, of.tag, active->data.data(), of.nbytes);
            sends.push_back(std::move(active));
            return true;
        }
        // Receives of one peer and tag are posted in order, and so are those of all others. Relays have later places.
        if (received < to_receive.size() && receives.size() < WINDOW) {
            const Message &of = to_receive[received++];
            auto active = std::make_unique<Active>();
            active->of = of;
            active->data.resize(of.room + 1, 0xee);
            active->transfer = wire->receive(of.source, of.tag, active->data.data(), of.room);
            receives.push_back(std::move(active));
            return true;
        }
        return sent < to_send.size() && sends.size() < WINDOW;
    }

    bool complete() {
        bool moved = false;
        for (auto *active : {&sends, &relays})
            for (size_t i = 0; i < active->size();) {
                Active &of = *(*active)[i];
                if (!wire->test(of.transfer)) {
                    ++i;
                    continue;
                }
                CHECK(of.transfer->state == Transfer::DONE, of.transfer->error);
                CHECK(of.transfer->posted > 0, "0");
                bytes_sent += of.transfer->nbytes;
                wire->release(of.transfer);
                active->erase(active->begin() + i);
                moved = true;
            }
        for (size_t i = 0; i < receives.size();) {
            Active &of = *receives[i];
            const bool may_relay = of.of.relayed_to >= 0 && of.of.nbytes && !of.relayed && wire->begun(of.transfer);
            if (may_relay) start_relay(of);
            if (!wire->test(of.transfer)) {
                ++i;
                continue;
            }
            check(of);
            moved = true;
            if (of.relayed) relayed.push_back(std::move(receives[i]));
            else wire->release(of.transfer);
            receives.erase(receives.begin() + i);
        }
        for (size_t i = 0; i < relayed.size();) {
            if (relaying(relayed[i]->of.id)) {
                ++i;
                continue;
            }
            wire->release(relayed[i]->transfer);
            relayed.erase(relayed.begin() + i);
        }
        return moved;
    }

    bool relaying(int id) const {
        for (const auto &of : relays)
            if (of->of.id == id) return true;
        return false;
    }

    void start_relay(Active &received_message) {
        received_message.relayed = true;
        CHECK(received_message.transfer->nbytes == received_message.of.nbytes, "another length");
        auto active = std::make_unique<Active>();
        active->of = received_message.of;
        active->transfer = wire->relay(received_message.transfer, active->of.relayed_to, relay_tag(active->of));
        relays.push_back(std::move(active));
    }

    void check(Active &active) {
        Transfer *transfer = active.transfer;
        const Message &of = active.of;
        CHECK(active.data[of.room] == 0xee, "a write behind the buffer");
        if (of.nbytes > of.room) {
            CHECK(transfer->state == Transfer::FAILED, "a message longer than its receive");
            CHECK_EQUAL(transfer->error, "receive from rank " + std::to_string(of.source) + ", tag " +
                                             std::to_string(of.tag) + ": expected at most " + std::to_string(of.room) +
                                             " bytes, got " + std::to_string(of.nbytes));
            return;
        }
        CHECK(transfer->state == Transfer::DONE, transfer->error);
        CHECK(transfer->nbytes == of.nbytes && transfer->arrived == of.nbytes, std::to_string(transfer->nbytes));
        std::vector<uint8_t> expected(of.nbytes);
        fill(expected, of.id);
        CHECK(!of.nbytes || !memcmp(expected.data(), active.data.data(), of.nbytes), "other bytes");
        bytes_received += of.nbytes;
    }

    bool send_control() {
        const int peer = random.below(wire->size);
        if (control_sent[peer] >= CONTROL_MESSAGES) return false;
        const int number = control_sent[peer]++;
        std::vector<uint8_t> message(4 + mix(number) % (number % 7 ? 60 : 40000));
        fill(message, wire->rank * 1000 + number);
        memcpy(message.data(), &number, 4);
        wire->send_control(peer, message.data(), message.size());
        return true;
    }

    bool receive_control() {
        int peer;
        std::vector<uint8_t> message;
        if (!wire->recv_control(&peer, &message)) return false;
        const int number = control_received[peer]++;
        std::vector<uint8_t> expected(4 + mix(number) % (number % 7 ? 60 : 40000));
        fill(expected, peer * 1000 + number);
        memcpy(expected.data(), &number, 4);
        CHECK(message == expected, "control message " + std::to_string(number));
        return true;
    }

    bool drop() {
        for (size_t i = 0; i < to_drop.size(); ++i) {
            const Message &of = to_drop[i];
            Transfer *transfer = wire->discard(of.source, of.tag);
            if (!transfer) continue;
            while (!wire->test(transfer)) wire->poll();
            CHECK(transfer->nbytes == of.nbytes, std::to_string(transfer->nbytes));
            wire->release(transfer);
            to_drop.erase(to_drop.begin() + i);
            return true;
        }
        return false;
    }

    bool cancel() {
        uint8_t byte;
        Transfer *never = wire->receive(random.below(wire->size), int64_t(1) << 50, &byte, 1);
        const bool moved = wire->poll();
        CHECK(wire->cancel(never), "a receive that cannot be cancelled");
        if (receives.empty()) return moved;
        Active &last = *receives.back();
        if (last.of.tag < (int64_t(1) << 40) || !wire->cancel(last.transfer)) return moved;
        last.transfer = wire->receive(last.of.source, last.of.tag, last.data.data(), last.of.room);
        return moved;
    }
};

void traffic() {
    const std::vector<Message> messages = random_messages(options.seed, options.ranks, options.ranks > 4);
    run([&](int rank) {
        Wire *wire = connect(rank);
        Traffic(wire, options.seed * 100 + rank, messages).run();
        leave(wire);
    });
}

// Every wait sleeps: a message of 8 bytes and one of the ring's size, back and forth.
void ping_pong() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        const int next = (rank + 1) % options.ranks, previous = (rank + options.ranks - 1) % options.ranks;
        std::vector<uint8_t> data(64 << 10), to(64 << 10);
        for (int round = 0; round < 300; ++round) {
            const int64_t nbytes = round % 3 ? 8 : data.size();
            fill(data, round);
            Transfer *receive = wire->receive(previous, round, to.data(), nbytes);
            if (rank == 0) wait(wire, wire->send(next, round, data.data(), nbytes));
            wait(wire, receive);
            if (rank != 0) wait(wire, wire->send(next, round, to.data(), nbytes));
            CHECK(!memcmp(data.data(), to.data(), nbytes), "other bytes");
        }
        leave(wire);
    });
}

// What the contract says of each call, in lockstep.
void contract() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        const int peer = 1 - rank;
        std::vector<uint8_t> data(100000), to(100000);
        fill(data, 7);
        CHECK(gc_shm_single_copy(wire, peer) == options.single_copy, "the other path");
        CHECK(wire->largest_tag == INT64_MAX && wire->fd() >= 0 && wire->poll_within() == -1, "another answer");
        if (rank == 0) {
            const Transfer *short_one = wire->send(1, 1, data.data(), 100);
            CHECK(short_one->state == Transfer::DONE && short_one->is_send && short_one->nbytes == 100, "not sent");
            Transfer *long_one = wire->send(1, 2, data.data(), 100000);
            CHECK(!wire->test(long_one), "a long message that was not received");
            barrier(2);
            wait(wire, long_one);
            wire->release(long_one);
            wait(wire, wire->send(1, 3, data.data(), 100000));  // too long: dropped
            wait(wire, wire->send(1, 4, data.data(), 100000));  // discarded
        } else {
            barrier(2);
            CHECK(!wire->arm(), "it sleeps although messages have arrived");
            while (wire->poll()) {
            }
            CHECK(wire->arm(), "it does not sleep although nothing is to do");
            pollfd idle{wire->fd(), POLLIN, 0};
            CHECK(::poll(&idle, 1, 0) >= 0, "no descriptor");
            const int64_t tag = wire->probe_any();
            CHECK(tag == 1 || tag == 2, std::to_string(tag));
            CHECK(!wire->discard(0, 9), "a message that was not sent");
            Transfer *first = wire->receive(0, 1, to.data(), 100000);
            CHECK(first->state == Transfer::DONE && first->nbytes == 100 && first->arrived == 100, "not received");
            CHECK(!wire->cancel(first), "a completed receive was cancelled");
            Transfer *second = wire->receive(0, 2, to.data(), 100000);
            CHECK(second->nbytes == 100000, "no length although it was announced");
            CHECK(!wire->cancel(second), "a matched receive was cancelled");
            wait(wire, second);
            CHECK(data == to, "other bytes");
            Transfer *third = wire->receive(0, 3, to.data(), 99999);
            while (!wire->test(third)) progress(wire);
            CHECK_EQUAL(third->error, "receive from rank 0, tag 3: expected at most 99999 bytes, got 100000");
            Transfer *dropped;
            while (!(dropped = wire->discard(0, 4))) progress(wire);
            CHECK(wire->test(dropped) && dropped->nbytes == 100000, "not dropped");
            CHECK(wire->probe_any() == -1, std::to_string(wire->probe_any()));
            CHECK(wire->bytes_received == 100100, std::to_string(wire->bytes_received));
        }
        leave(wire);
    });
}

void left() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        uint8_t byte = 1;
        if (rank == 1) {
            wait(wire, wire->send(0, 1, &byte, 1));
            leave(wire);
            barrier(2);
            return;
        }
        barrier(2);
        wait(wire, wire->receive(1, 1, &byte, 1));  // what was sent before has arrived
        wire->send_control(1, &byte, 1);            // dropped
        Transfer *never = wire->receive(1, 2, &byte, 1);
        while (!wire->test(never) && wire->fault.text.empty()) progress(wire);
        CHECK(never->state == Transfer::PENDING, "a transfer that no peer can complete");
        CHECK_EQUAL(wire->fault.text, "rank 1 has left");
        CHECK(!wire->poll() && !wire->arm() && !wire->discard(1, 2), "a call that does something after a fault");
        CHECK(wire->send(1, 1, &byte, 1)->state == Transfer::PENDING, "a transfer that completes after a fault");
        wire->close(true);
        CHECK(wire->closed() && wire->closed(), "a failed wire that does not close");
        delete wire;
    });
}

void abandoned() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        std::vector<uint8_t> data(1 << 20);
        if (rank == 0) {
            wire->send(1, 1, data.data(), data.size());
            barrier(2);
            wire->close(true);
            while (!wire->closed()) sched_yield();
            barrier(2);
            barrier(2);  // the memory can still be read
        } else {
            barrier(2);
            while (wire->poll()) {
            }
            barrier(2);
            Transfer *never = wire->receive(0, 1, data.data(), data.size());
            while (!wire->test(never) && wire->fault.text.empty()) wire->poll();
            CHECK(never->state == Transfer::PENDING, "a message whose memory may have changed");
            CHECK_EQUAL(wire->fault.text, "rank 0 has left");
            barrier(2);
        }
        delete wire;
    });
}

void revoked() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        if (rank == 0) wire->revoke("rank 0: the codec failed");
        else wait_fault(wire);
        if (rank) CHECK_EQUAL(wire->fault.text, "rank 0: the codec failed");
        barrier(options.ranks);
        delete wire;
    });
}

// A rank is killed while all exchange long messages, and while its child still holds its descriptors.
void killed() {
    const int victim = options.ranks - 1;
    run([&](int rank) {
        Wire *wire = connect(rank);
        std::vector<std::vector<uint8_t>> data(2 * options.ranks, std::vector<uint8_t>(4 << 20));
        const int64_t end = now() + int64_t(options.seed % 20) * SECOND / 1000;
        if (rank == victim && options.seed % 2 && fork() == 0) {
            const int64_t deadline = now() + PATIENCE / 2;
            while (shared->flag.load() < options.ranks - 1) {
                shared->ended[OTHER].store(now() > deadline);
                if (shared->ended[OTHER].load()) break;
                usleep(1000);
            }
            _exit(0);
        }
        for (int64_t tag = 0; wire->fault.text.empty(); ++tag) {
            std::vector<Transfer *> transfers;
            for (int peer = 0; peer < options.ranks; ++peer) {
                transfers.push_back(wire->send(peer, tag, data[peer].data(), data[peer].size()));
                std::vector<uint8_t> &to = data[options.ranks + peer];
                transfers.push_back(wire->receive(peer, tag, to.data(), to.size()));
            }
            for (Transfer *transfer : transfers)
                while (!wire->test(transfer) && wire->fault.text.empty()) {
                    progress(wire);
                    if (rank == victim && now() > end) {
                        shared->ended[rank].store(1);
                        kill(getpid(), SIGKILL);
                    }
                }
        }
        CHECK_EQUAL(wire->fault.text, "rank " + std::to_string(victim) + " has ended");
        CHECK(!shared->ended[OTHER].load(), "an end that was noticed only with that of the child");
        shared->flag.fetch_add(1);
        wire->close(true);
        CHECK(wire->closed(), "a failed wire that does not close");
        delete wire;
    });
}

// A child destroys its copy of the wire: the parent's one goes on.
void forked() {
    run([&](int rank) {
        Wire *wire = connect(rank);
        const pid_t child = fork();
        if (child == 0) {
            delete wire;
            _exit(0);
        }
        waitpid(child, nullptr, 0);
        barrier(2);
        for (int i = 0; i < 200; ++i) wire->poll();  // would notice that the peer has left
        uint8_t byte = 42, to = 0;
        Transfer *receive = wire->receive(1 - rank, 1, &to, 1);
        wait(wire, wire->send(1 - rank, 1, &byte, 1));
        wait(wire, receive);
        CHECK(to == 42, std::to_string(to));
        leave(wire);
    });
}

// Rank 1 runs in other namespaces of networks and processes, as in a container, if the user may create them.
void namespaces() {
    run([&](int rank) {
        const bool inside = rank == 1 && !unshare(CLONE_NEWNET | CLONE_NEWPID);
        if (const pid_t child = inside ? fork() : 0) {
            int status;
            waitpid(child, &status, 0);
            CHECK(status == 0, std::to_string(status));
            _exit(0);  // a process that has unshared cannot start threads, as the sanitizer does at exit
        }
        Wire *wire = connect(rank);
        std::vector<uint8_t> data(3000000), to(data.size());
        fill(data, 1);
        for (int tag = 0; tag < 20; ++tag) {
            Transfer *receive = wire->receive(1 - rank, tag, to.data(), to.size());
            Transfer *send = wire->send(1 - rank, tag, data.data(), data.size());
            wait(wire, receive);
            wait(wire, send);
            CHECK(data == to, "other bytes");
        }
        if (rank == 0) {
            wait_fault(wire);
            CHECK_EQUAL(wire->fault.text, "rank 1 has ended");
        } else {
            _exit(0);
        }
        delete wire;
    });
}

// Rank 1 writes nonsense: rank 0 notices, or what it wrote happens to make sense.
void corrupt() {
    options.ring_bytes = 16 << 10;
    const int rounds = 60;
    std::string base = key;
    int noticed = 0;
    for (int round = 0; round < rounds; ++round) {
        key = base + std::to_string(round);
        std::atomic<int> &faults = shared->ended[OTHER];
        run([&](int rank) {
            Random random{mix(options.seed * 1000 + round)};
            if (rank == 0) {
                Wire *wire = connect(0);
                std::vector<uint8_t> data(50000), to(50000);
                wire->receive(1, 1, to.data(), 50000);
                for (int i = 0; i < 3; ++i) wire->send(1, i, data.data(), i ? 50000 : 10);
                barrier(2);
                for (int i = 0; i < 200; ++i) wire->poll();
                const std::string &text = wire->fault.text;
                CHECK(text.empty() || text == "the shared memory of rank 1 is corrupt", text);
                faults.fetch_add(!text.empty());
                barrier(2);
                delete wire;
                return;
            }
            ShmBootstrap by_hand(key, 1, 2, options.ring_bytes);
            CHECK(by_hand.create(), by_hand.error);
            barrier(2);
            CHECK(by_hand.attach(PATIENCE), by_hand.error);
            uint8_t *memory = by_hand.peers[0].memory->base, *own = by_hand.peers[1].memory->base;
            const ShmLayout &layout = by_hand.layout;
            ShmPositions *positions = layout.positions(memory, 1);
            uint8_t *ring = layout.ring(memory, 1);
            if (round % 5 == 0) {
                ShmRecord record;
                record.kind = ShmRecord::CONTROL;
                record.length = 100000 + random.below(1 << 30);
                memcpy(ring, &record, sizeof record);
                positions->tail.store(random.below(2) ? 2 * SHM_LINE : mix(random.state) / SHM_LINE * SHM_LINE);
            } else if (round % 5 == 1) {
                for (uint64_t i = 0; i < layout.ring_bytes; ++i) ring[i] = random.below(256);
                positions->tail.store(random.below(2) ? random.below(20000) : mix(random.state));
            } else if (round % 5 == 2) {
                layout.positions(own, 0)->head.store(mix(random.state));
            } else {
                ShmWriter writer(positions, ring, layout.ring_bytes);
                const std::vector<uint8_t> payload(4096);
                for (int i = 0; i < 20; ++i) {
                    ShmRecord record;
                    record.kind = random.below(9);
                    record.length = random.below(500);
                    record.tag = random.below(3);
                    record.nbytes = random.below(2) ? record.length : random.below(60000);
                    record.id = random.below(4);
                    record.address = random.below(2) ? 0 : mix(random.state);
                    if (writer.fits(record.length)) writer.write(record, payload.data());
                }
            }
            barrier(2);
            barrier(2);
        });
        noticed = shared->ended[OTHER].load();
    }
    CHECK(noticed > rounds / 2, std::to_string(noticed));
}

// What goes wrong before the ranks are connected.
void bootstrap() {
    options.ranks = 2;
    Wire *wire = create(0);
    CHECK_EQUAL(wire->fault.text, "");
    struct stat status;
    CHECK(!stat((key + ".0").c_str(), &status), "no socket file");
    CHECK((status.st_mode & 0777) == 0600, std::to_string(status.st_mode & 0777));

    Wire *again = create(0);
    CHECK_EQUAL(again->fault.text, "shared memory: creating " + key + ".0: Address already in use");
    delete again;

    const int attached = gc_shm_attach(wire, SECOND / 20);
    CHECK(attached == -1, "0");
    CHECK_EQUAL(wire->fault.text, "shared memory: expected all ranks in time, got no connection from: 1");
    delete wire;
    CHECK(stat((key + ".0").c_str(), &status) && errno == ENOENT, "a socket file that stays");

    wire = create(1);
    gc_shm_attach(wire, SECOND / 20);
    CHECK_EQUAL(wire->fault.text, "shared memory: connecting to rank 0 at " + key + ".0: No such file or directory");
    uint8_t byte = 0;
    CHECK(!wire->poll() && !wire->arm() && wire->probe_any() == -1, "a wire without peers that does something");
    CHECK(wire->send(0, 1, &byte, 1)->state == Transfer::PENDING, "a message without peers");
    delete wire;

    wire = gc_shm_create(key.c_str(), 0, 2, 20000, 1);
    CHECK_EQUAL(wire->fault.text,
                "shared memory: expected rings of a power of two of at least 16384 bytes, got 20000");
    delete wire;

    const std::string right = key;
    key += std::string(100, 'x');
    wire = create(0);
    CHECK_EQUAL(wire->fault.text,
                "shared memory: expected a key that makes paths of less than 108 bytes, got '" + key + "'");
    delete wire;

    key = right;
    options.threads = true;
    run([](int rank) {
        Wire *differing = gc_shm_create(key.c_str(), rank, 2, rank ? 16384 : 32768, 1);
        barrier(2);
        gc_shm_attach(differing, SECOND);
        CHECK(!differing->fault.text.empty(), "ranks of different sizes that connect");
        barrier(2);
        delete differing;
    });
    wire = create(0);
    CHECK_EQUAL(wire->fault.text, "");  // nothing was left behind
    delete wire;
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 3) return 2;
    const std::string what = arguments[2];
    key = std::string(arguments[1]) + "/wire";
    if (count > 7)
        options = Options{std::string(arguments[3]) == "threads", atoi(arguments[4]), atoll(arguments[5]),
                          atoi(arguments[6]) != 0, strtoull(arguments[7], nullptr, 10)};
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared = new (memory) Shared{};
    const std::map<std::string, void (*)()> cases = {
        {"traffic", traffic}, {"ping_pong", ping_pong}, {"contract", contract}, {"left", left},
        {"abandoned", abandoned}, {"revoked", revoked}, {"killed", killed}, {"forked", forked},
        {"namespaces", namespaces}, {"corrupt", corrupt}, {"bootstrap", bootstrap}};
    cases.at(what)();
    puts("passed");
}
