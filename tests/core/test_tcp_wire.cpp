// Wires over loopback sockets: several ranks in one process, which a test connects, cuts and connects again.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../mpi_gpucomp/core/src/tcp_wire.h"
#include "check.h"

namespace gpucomp {

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

namespace {

constexpr int64_t MILLISECOND = 1000000;
constexpr int64_t PATIENCE = 60000 * MILLISECOND;

// Connect two sockets over the loopback device.
void connect_pair(int family, int fds[2]) {
    sockaddr_storage address{};
    socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    address.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET) {
        reinterpret_cast<sockaddr_in *>(&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
        reinterpret_cast<sockaddr_in6 *>(&address)->sin6_addr = in6addr_loopback;
    }
    const int listener = socket(family, SOCK_STREAM, 0);
    CHECK(bind(listener, reinterpret_cast<sockaddr *>(&address), length) == 0 && listen(listener, 1) == 0);
    getsockname(listener, reinterpret_cast<sockaddr *>(&address), &length);
    fds[0] = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    connect(fds[0], reinterpret_cast<sockaddr *>(&address), length);
    fds[1] = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
    CHECK(fds[1] >= 0);
    close(listener);
}

// Forward the packets of a connection to another one, with one bit of one header flipped.
void forward(int from, int to, int damaged_packet, int bit) {
    const auto copy = [&](uint8_t *data, size_t count) {
        for (size_t got = 0; got < count;) {
            const ssize_t some = read(from, data + got, count - got);
            if (some <= 0) return false;
            got += static_cast<size_t>(some);
        }
        return true;
    };
    Bytes payload;
    PacketHeader header;
    for (int packet = 0; copy(reinterpret_cast<uint8_t *>(&header), sizeof header); ++packet) {
        payload.resize(header.length);
        if (!copy(payload.data(), payload.size())) break;
        if (packet == damaged_packet) reinterpret_cast<uint8_t *>(&header)[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        if (send(to, &header, sizeof header, MSG_NOSIGNAL) < 0) break;
        if (!payload.empty() && send(to, payload.data(), payload.size(), MSG_NOSIGNAL) < 0) break;
    }
    shutdown(to, SHUT_RDWR);
    shutdown(from, SHUT_RDWR);
}

struct Job {
    std::vector<std::unique_ptr<TcpWire>> ranks;
    std::map<std::array<int, 3>, uint64_t> generations;  // by lower rank, higher rank, stripe
    std::map<std::array<int, 3>, int> sockets;           // of the lower rank, to be cut
    std::vector<uint8_t> stopped;
    int family = AF_INET;
    bool reconnects = true, takes_events = true;
    int lost = 0;

    Job(int size, TcpSettings settings, int its_family = AF_INET) : stopped(size, 0), family(its_family) {
        settings.names.assign(count_rails(settings), "lo");
        settings.devices.assign(settings.names.size(), "lo");
        for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<TcpWire>(rank, size, settings));
        const int stripes = static_cast<int>(settings.names.size()) * settings.stripes;
        for (int one = 0; one < size; ++one) {
            for (int two = one + 1; two < size; ++two) {
                for (int stripe = 0; stripe < stripes; ++stripe) connect(one, two, stripe);
            }
        }
    }

    static size_t count_rails(const TcpSettings &settings) {
        size_t rails = 0;
        for (const auto &tier : settings.tiers) rails += tier.size();
        return rails;
    }

    void connect(int one, int two, int stripe) {
        int fds[2];
        connect_pair(family, fds);
        const uint64_t generation = ++generations[{one, two, stripe}];
        ranks[one]->add_path(two, stripe, generation, fds[0]);
        ranks[two]->add_path(one, stripe, generation, fds[1]);
        sockets[{one, two, stripe}] = fds[0];
    }

    void handle_events(int rank) {
        TcpEvent event;
        while (ranks[rank]->next_event(&event)) {
            if (event.kind != TcpEvent::PATH_DOWN) continue;
            ++lost;
            const int one = std::min(rank, event.peer), two = std::max(rank, event.peer);
            const bool is_last = event.generation == generations[{one, two, event.stripe}];
            if (reconnects && is_last) connect(one, two, event.stripe);
        }
    }

    // Poll all ranks; sleep if none has anything to do, as contexts do.
    void step() {
        bool moved = false;
        std::vector<pollfd> fds;
        int64_t sleep = 5 * MILLISECOND;
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
            if (stopped[rank]) continue;
            moved |= ranks[rank]->poll();
            if (takes_events) handle_events(static_cast<int>(rank));
        }
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
            if (stopped[rank]) continue;
            moved |= !ranks[rank]->arm();
            const int64_t within = ranks[rank]->poll_within();
            if (within >= 0) sleep = std::min(sleep, within);
            fds.push_back(pollfd{ranks[rank]->fd(), POLLIN, 0});
        }
        if (!moved) ::poll(fds.data(), fds.size(), static_cast<int>(sleep / MILLISECOND));
    }

    template <class Ready>
    void until(Ready ready) {
        const int64_t deadline = now() + PATIENCE;
        while (!ready()) {
            step();
            CHECK(now() < deadline);
        }
    }

    void wait(int rank, Transfer *transfer) {
        until([&] { return ranks[rank]->test(transfer); });
        CHECK(transfer->state == Transfer::DONE);
    }

    void pass(int64_t nanoseconds) {
        const int64_t end = now() + nanoseconds;
        until([&] { return now() > end; });
    }

    void leave() {
        for (auto &rank : ranks) rank->close(false);
        until([&] {
            bool all = true;
            for (auto &rank : ranks) all &= rank->closed();
            return all;
        });
    }
};

TcpSettings settings_of(std::vector<std::vector<int>> tiers, int stripes = 1, int64_t timeout = 1000 * MILLISECOND) {
    TcpSettings settings;
    settings.tiers = std::move(tiers);
    settings.stripes = stripes;
    settings.timeout = timeout;
    settings.limit = 20000 * MILLISECOND;
    return settings;
}

Bytes pattern(size_t size, unsigned seed) {
    Bytes data(size);
    std::mt19937 random(seed);
    for (size_t at = 0; at + 4 <= size; at += 4) {
        const uint32_t value = random();
        std::memcpy(data.data() + at, &value, 4);
    }
    return data;
}

// Pass messages of many sizes both ways, with receives posted before and after.
void test_messages(TcpSettings settings, int family) {
    Job job(2, std::move(settings), family);
    for (const size_t size : {0, 1, 100, 1000, 1025, 16384, 16385, 300000, 5000000}) {
        for (const bool posted : {true, false}) {
            const Bytes data = pattern(size, 3);
            Bytes there(size + 1), back(size + 1);
            Transfer *receiving[2] = {nullptr, nullptr};
            const auto receive = [&] {
                receiving[0] = job.ranks[0]->receive(1, 7, back.data(), static_cast<int64_t>(back.size()));
                receiving[1] = job.ranks[1]->receive(0, 7, there.data(), static_cast<int64_t>(there.size()));
            };
            if (posted) receive();
            Transfer *one = job.ranks[0]->send(1, 7, data.data(), static_cast<int64_t>(size));
            Transfer *two = job.ranks[1]->send(0, 7, data.data(), static_cast<int64_t>(size));
            if (!posted) {
                job.until([&] { return job.ranks[0]->probe_any() == 7 && job.ranks[1]->probe_any() == 7; });
                receive();
            }
            for (int rank = 0; rank < 2; ++rank) job.wait(rank, receiving[rank]);
            job.wait(0, one);
            job.wait(1, two);
            CHECK(receiving[0]->nbytes == static_cast<int64_t>(size) && receiving[1]->nbytes == receiving[0]->nbytes);
            CHECK(std::equal(data.begin(), data.end(), there.begin()));
            CHECK(std::equal(data.begin(), data.end(), back.begin()));
            job.ranks[0]->release(one);
            job.ranks[1]->release(two);
            for (int rank = 0; rank < 2; ++rank) job.ranks[rank]->release(receiving[rank]);
        }
    }
    CHECK(job.ranks[0]->bytes_sent == job.ranks[1]->bytes_received && job.lost == 0);
    job.leave();
}

// A chain: every rank relays what it receives while it arrives, with any paths being cut.
void test_relays_under_cuts(TcpSettings settings, int cuts, unsigned seed) {
    constexpr int SIZE = 3, AHEAD = 3;
    const int stripes = static_cast<int>(Job::count_rails(settings)) * settings.stripes;
    Job job(SIZE, std::move(settings));
    std::mt19937 draw(seed);
    int made = 0, number = 0;
    int relays = 0;
    const auto cut = [&] {
        const int one = static_cast<int>(draw() % (SIZE - 1));
        const int two = one + 1 + static_cast<int>(draw() % (SIZE - 1 - one));
        shutdown(job.sockets[{one, two, static_cast<int>(draw() % stripes)}], SHUT_RDWR);
        ++made;
    };
    while (made < cuts || number < 8) {
        std::vector<Bytes> data, there[SIZE];
        std::vector<Transfer *> sending, receiving[SIZE];
        const int count = 1 + static_cast<int>(draw() % 6);
        for (int chunk = 0; chunk < count; ++chunk) {
            const size_t bytes = draw() % 5 ? draw() % 3000000 : draw() % 20000;
            data.push_back(pattern(bytes, draw()));
            for (int rank = 1; rank < SIZE; ++rank) there[rank].emplace_back(bytes + draw() % 20000);
        }
        const int64_t tag = ++number;
        std::vector<uint8_t> relayed(count, 0);
        std::vector<Transfer *> relay(count, nullptr);
        int posted[SIZE] = {0, 0, 0};
        job.until([&] {
            bool all = true;
            for (int rank = 1; rank < SIZE; ++rank) {
                // Few receives are posted ahead, as by a pipeline with little staging memory.
                int completed = 0;
                for (Transfer *one : receiving[rank]) completed += job.ranks[rank]->test(one);
                for (; posted[rank] < count && posted[rank] < completed + AHEAD; ++posted[rank]) {
                    Bytes &where = there[rank][posted[rank]];
                    receiving[rank].push_back(
                        job.ranks[rank]->receive(rank - 1, tag, where.data(), static_cast<int64_t>(where.size())));
                }
                all &= completed == count;
            }
            if (sending.empty()) {
                for (const Bytes &one : data) {
                    sending.push_back(job.ranks[0]->send(1, tag, one.data(), static_cast<int64_t>(one.size())));
                }
            }
            for (int chunk = 0; chunk < posted[1]; ++chunk) {
                Transfer *source = receiving[1][chunk];
                if (relay[chunk] || !job.ranks[1]->begun(source) || (chunk && !relay[chunk - 1])) continue;
                const bool early = source->state == Transfer::PENDING;
                relay[chunk] = job.ranks[1]->relay(source, 2, tag);
                if (relay[chunk]) relays += early;
            }
            for (Transfer *one : sending) all &= job.ranks[0]->test(one);
            for (Transfer *one : relay) all &= one != nullptr && job.ranks[1]->test(one);
            if (made < cuts && draw() % 20 == 0) cut();
            return all;
        });
        for (int rank = 1; rank < SIZE; ++rank) {
            for (int chunk = 0; chunk < count; ++chunk) {
                CHECK(receiving[rank][chunk]->nbytes == static_cast<int64_t>(data[chunk].size()));
                CHECK(std::equal(data[chunk].begin(), data[chunk].end(), there[rank][chunk].begin()));
                job.ranks[rank]->release(receiving[rank][chunk]);
            }
        }
        for (Transfer *one : relay) {
            CHECK(one->posted > 0);
            job.ranks[1]->release(one);
        }
        for (Transfer *one : sending) job.ranks[0]->release(one);
    }
    CHECK(relays > 0);
    const TcpWire::Snapshot snapshot = job.ranks[0]->snapshot();
    CHECK(cuts == 0 || job.lost > 0);
    for (const Failover &one : snapshot.failovers) CHECK(!one.reason.empty() && one.silence >= 0);
    job.leave();
}

void test_control_messages_and_a_failure() {
    Job job(2, settings_of({{0}, {1}}));
    for (uint8_t number = 0; number < 100; ++number) {
        const Bytes text(number * 30, number);
        job.ranks[0]->send_control(1, text.data(), text.size());
    }
    int peer = -1;
    Bytes message;
    for (uint8_t number = 0; number < 100; ++number) {
        job.until([&] { return job.ranks[1]->recv_control(&peer, &message); });
        CHECK(peer == 0 && message == Bytes(number * 30, number));
    }
    job.ranks[0]->revoke("rank 2 is gone");
    job.until([&] { return !job.ranks[1]->recv_control(&peer, &message) && !job.ranks[1]->fault.text.empty(); });
    CHECK(job.ranks[1]->fault.text == "rank 2 is gone");
}

void test_a_rank_that_has_left() {
    Job job(2, settings_of({{0}}));
    Bytes memory(100000);
    Transfer *receiving = job.ranks[1]->receive(0, 1, memory.data(), 100000);
    job.ranks[0]->close(false);
    job.until([&] { return job.ranks[0]->closed(); });
    job.until([&] { return job.ranks[1]->test(receiving) || !job.ranks[1]->fault.text.empty(); });
    CHECK(receiving->state == Transfer::PENDING && job.ranks[1]->fault.text == "rank 0 has left");
    job.ranks[1]->send_control(0, "x", 1);
    job.ranks[1]->close(true);
    job.until([&] { return job.ranks[1]->closed(); });
    CHECK(job.ranks[1]->snapshot().failovers.empty());
}

void test_all_paths_down() {
    TcpSettings settings = settings_of({{0}, {1}}, 1, 100 * MILLISECOND);
    settings.limit = 300 * MILLISECOND;
    Job job(2, std::move(settings));
    job.pass(50 * MILLISECOND);
    job.reconnects = false;
    job.ranks[0]->drop_path(1, 0, "cut by the test");
    job.ranks[0]->drop_path(1, 1, "cut by the test");
    job.until([&] { return !job.ranks[0]->fault.text.empty() && !job.ranks[1]->fault.text.empty(); });
    CHECK(job.ranks[0]->fault.text.rfind("no path from rank 0 to rank 1: all paths down for 0.", 0) == 0);
    const TcpWire::Snapshot snapshot = job.ranks[0]->snapshot();
    CHECK(snapshot.failovers.size() == 2 && snapshot.failovers[0].reason == "cut by the test");
    CHECK(snapshot.down[1] == std::vector<uint8_t>(2, 1) && snapshot.in_use[1] == std::vector<uint8_t>(2, 0));
    job.ranks[0]->fail("too late");
    job.pass(20 * MILLISECOND);
    CHECK(job.ranks[0]->fault.text.rfind("no path", 0) == 0);
}

// The kernel of a rank that does not run acknowledges for it.
void test_a_hung_rank_stays_connected() {
    Job job(2, settings_of({{0}, {1}}, 1, 200 * MILLISECOND));
    const Bytes data = pattern(20000000, 1);
    Bytes memory(data.size());
    Transfer *receiving = job.ranks[1]->receive(0, 1, memory.data(), static_cast<int64_t>(memory.size()));
    Transfer *sending = job.ranks[0]->send(1, 1, data.data(), static_cast<int64_t>(data.size()));
    job.until([&] { return receiving->arrived > 0; });
    job.stopped[1] = 1;
    job.pass(700 * MILLISECOND);
    CHECK(sending->state == Transfer::PENDING && job.ranks[0]->snapshot().failovers.empty());
    job.stopped[1] = 0;
    job.wait(1, receiving);
    job.wait(0, sending);
    CHECK(memory == data && job.ranks[0]->snapshot().failovers.empty());
}

void test_old_connections_and_garbage() {
    Job job(2, settings_of({{0}, {1}}));
    job.pass(20 * MILLISECOND);
    job.reconnects = false;
    int fds[2];
    connect_pair(AF_INET, fds);
    job.ranks[0]->add_path(1, 0, 1, fds[0]);  // of the generation in use
    job.until([&] { return job.lost == 1; });
    char byte;
    CHECK(read(fds[1], &byte, 1) == 0 && job.ranks[0]->snapshot().failovers.empty());
    close(fds[1]);
    connect_pair(AF_INET, fds);
    job.ranks[0]->add_path(1, 0, 5, fds[0]);
    const Bytes garbage(200, 0x77);
    CHECK(write(fds[1], garbage.data(), garbage.size()) == 200);
    job.until([&] { return job.ranks[0]->snapshot().failovers.size() == 2; });
    CHECK(job.ranks[0]->snapshot().failovers[0].reason == "replaced by a new connection of the peer");
    CHECK(job.ranks[0]->snapshot().failovers[1].reason == "damaged packet header");
    close(fds[1]);
}

// A path is given up when a bit of a header was flipped, whichever; another one goes on, and nothing is lost.
void test_damaged_headers(unsigned seed) {
    std::mt19937 draw(seed);
    for (int bit = 0; bit < 8 * static_cast<int>(sizeof(PacketHeader)); bit += 1 + static_cast<int>(draw() % 20)) {
        Job job(2, settings_of({{0}}, 1, 20000 * MILLISECOND));
        int to_relay[2], from_relay[2];
        connect_pair(AF_INET, to_relay);
        connect_pair(AF_INET, from_relay);
        const uint64_t generation = ++job.generations[{0, 1, 0}];
        job.ranks[0]->add_path(1, 0, generation, to_relay[0]);
        job.ranks[1]->add_path(0, 0, generation, from_relay[0]);
        for (const int fd : {to_relay[1], from_relay[1]}) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
        std::thread there(forward, to_relay[1], from_relay[1], 1 + static_cast<int>(draw() % 3), bit);
        std::thread back(forward, from_relay[1], to_relay[1], -1, 0);
        for (const size_t size : {100, 5000, 400000, 100, 100, 30000}) {
            const Bytes data = pattern(size, bit);
            Bytes memory(size);
            Transfer *receiving = job.ranks[1]->receive(0, 7, memory.data(), static_cast<int64_t>(size));
            Transfer *sending = job.ranks[0]->send(1, 7, data.data(), static_cast<int64_t>(size));
            job.wait(1, receiving);
            job.wait(0, sending);
            CHECK(memory == data);
            job.ranks[1]->release(receiving);
            job.ranks[0]->release(sending);
        }
        bool detected = false;
        for (const Failover &one : job.ranks[1]->snapshot().failovers) detected |= one.reason == "damaged packet header";
        CHECK(detected);
        job.leave();
        there.join();
        back.join();
        close(to_relay[1]);
        close(from_relay[1]);
    }
}

// A bridged path is probed, but only the control side gives it up; its signs of life count.
void test_a_bridged_path_is_not_timed_out() {
    Job job(2, settings_of({{0}, {1}}, 1, 100 * MILLISECOND));
    job.pass(20 * MILLISECOND);
    job.reconnects = false;
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
    job.ranks[0]->add_path(1, 0, 2, fds[0]);
    job.until([&] { return job.ranks[0]->snapshot().failovers.size() == 1; });  // the former path
    job.stopped[1] = 1;
    const Bytes data = pattern(100, 1);
    Transfer *sending = job.ranks[0]->send(1, 5, data.data(), static_cast<int64_t>(data.size()));
    Bytes got(1 << 16);
    CHECK(read(fds[1], got.data(), got.size()) > 0);  // the state
    job.pass(500 * MILLISECOND);
    CHECK(read(fds[1], got.data(), got.size()) >= static_cast<ssize_t>(2 * sizeof(PacketHeader)));  // probes
    CHECK(job.ranks[0]->snapshot().failovers.size() == 1);
    job.ranks[0]->seen(1, 0);
    close(fds[1]);
    job.until([&] { return job.ranks[0]->snapshot().failovers.size() == 2; });
    const Failover lost = job.ranks[0]->snapshot().failovers[1];
    CHECK(lost.reason == "closed by the peer" && lost.silence < 400 * MILLISECOND);
    job.stopped[1] = 0;
    Bytes memory(data.size());
    job.wait(1, job.ranks[1]->receive(0, 5, memory.data(), static_cast<int64_t>(memory.size())));
    job.wait(0, sending);
    CHECK(memory == data);
}

// A child of this process has inherited the sockets: a path ends nevertheless, at both ends.
void test_a_child_that_holds_the_sockets() {
    Job job(2, settings_of({{0}}));
    const Bytes data = pattern(300000, 1);
    Bytes memory(data.size());
    const auto exchange = [&] {
        Transfer *receiving = job.ranks[1]->receive(0, 5, memory.data(), static_cast<int64_t>(memory.size()));
        job.wait(0, job.ranks[0]->send(1, 5, data.data(), static_cast<int64_t>(data.size())));
        job.wait(1, receiving);
        CHECK(memory == data);
        std::fill(memory.begin(), memory.end(), uint8_t{0});
    };
    exchange();
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (;;) pause();
    }
    job.reconnects = false;
    job.ranks[0]->drop_path(1, 0, "cut by the test");
    job.until([&] { return job.lost == 2; });
    job.connect(0, 1, 0);
    exchange();
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    job.leave();
}

// A process that may not open more files: an error, and no wait.
void test_no_descriptors() {
    rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    const rlimit none = {0, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    TcpSettings settings = settings_of({{0}});
    settings.names = settings.devices = {"lo"};
    TcpWire wire(0, 2, settings);
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK(wire.fault.text == "rank 0 cannot open its descriptors: too many open files");

    Job job(2, settings_of({{0}, {1}}));
    job.reconnects = false;
    job.ranks[0]->add_path(1, 0, 2, open("/dev/null", O_RDWR));  // cannot be waited for
    job.until([&] { return job.ranks[0]->snapshot().failovers.size() == 2; });
    CHECK(job.ranks[0]->snapshot().failovers[1].reason == "operation not permitted");
    const Bytes data = pattern(100000, 1);
    Bytes memory(data.size());
    Transfer *receiving = job.ranks[1]->receive(0, 5, memory.data(), static_cast<int64_t>(memory.size()));
    job.wait(0, job.ranks[0]->send(1, 5, data.data(), static_cast<int64_t>(data.size())));
    job.wait(1, receiving);
    CHECK(memory == data);
    job.leave();
}

// The control side works in another thread, without the lock of the context.
void test_control_in_another_thread() {
    Job job(2, settings_of({{0}, {1}}));
    std::atomic<bool> ended{false};
    std::atomic<int> lost{0};
    std::thread control([&] {
        uint64_t generation = 1;
        while (!ended) {
            TcpEvent event;
            for (auto &rank : job.ranks) {
                while (rank->next_event(&event)) ++lost;
                CHECK(rank->snapshot().in_use.size() == 2 && rank->copies().times >= 0);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            int fds[2];
            connect_pair(AF_INET, fds);
            generation += 1;
            job.ranks[0]->add_path(1, static_cast<int>(generation % 2), generation, fds[0]);
            job.ranks[1]->add_path(0, static_cast<int>(generation % 2), generation, fds[1]);
            if (generation % 5 == 0) job.ranks[0]->drop_path(1, 1, "cut by the test");
        }
    });
    job.takes_events = false;
    const Bytes data = pattern(200000, 1);
    for (int number = 0; number < 200; ++number) {
        Bytes memory(data.size());
        Transfer *receiving = job.ranks[1]->receive(0, 1, memory.data(), static_cast<int64_t>(memory.size()));
        Transfer *sending = job.ranks[0]->send(1, 1, data.data(), static_cast<int64_t>(data.size()));
        job.wait(1, receiving);
        job.wait(0, sending);
        CHECK(memory == data);
    }
    job.until([&] { return lost > 4; });
    ended = true;
    control.join();
    job.leave();
}

// Return the seconds of a stream of messages through a chain of ranks.
double stream(int size, size_t total, size_t chunk, int ahead) {
    Job job(size, settings_of({{0}}));
    const Bytes data = pattern(total, 1);
    std::vector<Bytes> there(size, Bytes(total));
    const size_t count = total / chunk;
    std::vector<std::vector<Transfer *>> receiving(size), relays(size);
    std::vector<size_t> done(size, 0);
    std::vector<Transfer *> sending;
    job.pass(20 * MILLISECOND);
    const int64_t start = now();
    for (size_t number = 0; number < count; ++number) {
        sending.push_back(job.ranks[0]->send(1, 1, data.data() + number * chunk, static_cast<int64_t>(chunk)));
    }
    job.until([&] {
        bool all = true;
        for (int rank = 1; rank < size; ++rank) {
            std::vector<Transfer *> &mine = receiving[rank];
            while (done[rank] < mine.size() && job.ranks[rank]->test(mine[done[rank]])) ++done[rank];
            while (mine.size() < count && mine.size() < done[rank] + static_cast<size_t>(ahead)) {
                uint8_t *where = there[rank].data() + mine.size() * chunk;
                mine.push_back(job.ranks[rank]->receive(rank - 1, 1, where, static_cast<int64_t>(chunk)));
            }
            if (rank + 1 < size) {
                std::vector<Transfer *> &next = relays[rank];
                while (next.size() < mine.size() && job.ranks[rank]->begun(mine[next.size()])) {
                    Transfer *relay = job.ranks[rank]->relay(mine[next.size()], rank + 1, 1);
                    if (!relay) break;
                    next.push_back(relay);
                }
            }
            all &= done[rank] == count;
        }
        return all;
    });
    const double seconds = static_cast<double>(now() - start) / 1e9;
    for (int rank = 1; rank < size; ++rank) CHECK(there[rank] == data);
    for (Transfer *one : sending) job.wait(0, one);
    job.leave();
    return seconds;
}

bool has_ipv6() {
    const int fd = socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    const bool found = fd >= 0 && bind(fd, reinterpret_cast<sockaddr *>(&address), sizeof address) == 0;
    if (fd >= 0) close(fd);
    return found;
}

}  // namespace
}  // namespace gpucomp

// test_tcp_wire [SEED [CUTS]]; test_tcp_wire threads; test_tcp_wire stream SIZE TOTAL CHUNK AHEAD
int main(int count, char **arguments) {
    using namespace gpucomp;
    if (count == 6) {
        const int size = std::atoi(arguments[2]);
        const double seconds = stream(size, static_cast<size_t>(std::atol(arguments[3])),
                                      static_cast<size_t>(std::atol(arguments[4])), std::atoi(arguments[5]));
        std::printf("%.2f ms\n", seconds * 1e3);
        return 0;
    }
    test_control_in_another_thread();
    if (count == 2 && std::strcmp(arguments[1], "threads") == 0) {
        std::puts("ok");
        return 0;
    }
    const unsigned seed = count > 1 ? static_cast<unsigned>(std::atoi(arguments[1])) : 1;
    const int cuts = count > 2 ? std::atoi(arguments[2]) : 40;
    test_messages(settings_of({{0}}), AF_INET);
    test_messages(settings_of({{0, 1}}, 2), AF_INET);
    if (has_ipv6()) test_messages(settings_of({{0}, {1}}), AF_INET6);
    test_control_messages_and_a_failure();
    test_a_rank_that_has_left();
    test_all_paths_down();
    test_a_hung_rank_stays_connected();
    test_old_connections_and_garbage();
    test_damaged_headers(seed);
    test_a_bridged_path_is_not_timed_out();
    test_a_child_that_holds_the_sockets();
    test_no_descriptors();
    test_relays_under_cuts(settings_of({{0}}), 0, seed);
    test_relays_under_cuts(settings_of({{0}, {1}}), cuts, seed);
    test_relays_under_cuts(settings_of({{0, 1}}), cuts, seed + 1);
    test_relays_under_cuts(settings_of({{0}, {1}}, 2), cuts, seed + 2);
    stream(3, 1 << 23, 1 << 20, 3);
    std::puts("ok");
}
