// Links without sockets: whatever path breaks at any time, every byte arrives once, and messages in order.
#include <ctime>
#include <list>
#include <random>

#include "tcp_pipes.h"

namespace gpucomp {

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

namespace {

constexpr int CAPACITY = 80;

struct SentMessage {
    Bytes expected, memory;
    SendTransfer *transfer;
};

struct PostedReceive {
    Bytes memory;
    ReceiveTransfer *transfer;
};

using Key = std::pair<int, int64_t>;

// The messages between two ranks, with the expected contents.
struct Exchange {
    Pair &pair;
    std::mt19937 random{5};
    std::map<Key, std::list<SentMessage>> sent;          // by sender and tag
    std::map<Key, std::list<PostedReceive>> received;    // the same
    std::vector<Bytes> control[2];

    void send(int side, int64_t tag, int size) {
        std::list<SentMessage> &list = sent[{side, tag}];
        Bytes data(size);
        for (uint8_t &byte : data) byte = static_cast<uint8_t>(random());
        list.push_back(SentMessage{data, data, nullptr});
        list.back().transfer = pair.ends[side]->matcher.send(1 - side, tag, list.back().memory.data(), size);
    }

    void receive(int side, int64_t tag, int capacity = CAPACITY) {
        std::list<PostedReceive> &list = received[{1 - side, tag}];
        list.push_back(PostedReceive{Bytes(CAPACITY), nullptr});
        list.back().transfer = pair.ends[side]->matcher.receive(1 - side, tag, list.back().memory.data(), capacity);
    }

    // Relay a message that arrives, back to its sender with another tag.
    void relay(int side, int64_t tag) {
        std::list<PostedReceive> &list = received[{1 - side, tag}];
        size_t number = 0;
        for (PostedReceive &one : list) {
            Matcher &matcher = pair.ends[side]->matcher;
            if (one.transfer->state == Transfer::PENDING) {
                SendTransfer *relay = matcher.relay(one.transfer, 1 - side, tag + 10);
                if (relay) {
                    auto source = sent[{1 - side, tag}].begin();
                    std::advance(source, number);
                    const Bytes &data = source->expected;
                    sent[{side, tag + 10}].push_back(SentMessage{data, {}, relay});
                }
                return;
            }
            ++number;
        }
    }

    void cancel(int side, int64_t tag) {
        std::list<PostedReceive> &list = received[{1 - side, tag}];
        for (auto one = list.begin(); one != list.end(); ++one) {
            if (one->transfer->state == Transfer::PENDING && pair.ends[side]->matcher.cancel(one->transfer)) {
                list.erase(one);
                return;
            }
        }
    }

    void send_control(int side, int size) {
        Bytes text(size + 1);
        text[0] = static_cast<uint8_t>(control[side].size());
        control[side].push_back(text);
        pair.ends[side]->link.post(Outgoing::with_payload(CONTROL, text));
    }

    // Overwrite the memory of completed sends, as callers may.
    void overwrite() {
        for (auto &one : sent) {
            for (SentMessage &message : one.second) {
                if (message.transfer->state != Transfer::DONE) continue;
                std::fill(message.memory.begin(), message.memory.end(), 0xaa);
            }
        }
    }

    void check(bool reconnect) {
        for (auto &[key, messages] : sent) {
            while (received[key].size() < messages.size()) receive(1 - key.first, key.second);
        }
        for (auto &[key, receives] : received) {
            while (receives.size() > sent[key].size()) {
                CHECK(pair.ends[1 - key.first]->matcher.cancel(receives.back().transfer));
                receives.pop_back();
            }
        }
        pair.drain(reconnect);
        for (auto &[key, messages] : sent) {
            auto receiving = received[key].begin();
            for (const SentMessage &message : messages) {
                const ReceiveTransfer *transfer = receiving->transfer;
                CHECK(message.transfer->state == Transfer::DONE);
                CHECK(transfer->state == Transfer::DONE);
                CHECK(transfer->nbytes == static_cast<int64_t>(message.expected.size()));
                CHECK(transfer->arrived == transfer->nbytes);
                Bytes expected = message.expected;
                expected.resize(CAPACITY);
                CHECK(receiving->memory == expected);
                ++receiving;
            }
        }
        for (int side = 0; side < 2; ++side) {
            const std::deque<ReceivedControl> &arrived = pair.ends[1 - side]->matcher.control;
            CHECK(arrived.size() == control[side].size());
            for (size_t number = 0; number < arrived.size(); ++number) {
                CHECK(arrived[number].payload == control[side][number]);
            }
        }
        // Credits that are left over go back, one after the other if one crosses its recall.
        for (int round = 0; round < 8; ++round) pair.idle();
        for (const auto &end : pair.ends) {
            CHECK(end->link.all_acked() && !end->link.busy());
            CHECK(end->matcher.tags_kept() == 0);
            CHECK(end->matcher.probe_any() == -1);
        }
    }
};

void act(Exchange &exchange, std::mt19937 &draw) {
    Pair &pair = exchange.pair;
    const int action = static_cast<int>(draw() % 42), side = static_cast<int>(draw() % 2);
    const int number = static_cast<int>(draw() % 3), size = static_cast<int>(draw() % 71);
    const int rail = number % static_cast<int>(pair.rails.size());
    Pipe *path = pair.path(side, rail);
    if (action < 8) {
        if (path) path->put();
    } else if (action < 16) {
        if (path) path->get();
    } else if (action < 24) {  // so that long messages progress
        pair.run(rail, size / 8);
    } else if (action < 28) {
        exchange.send(side, number, size);
    } else if (action < 31) {
        exchange.receive(side, number);
    } else if (action < 33) {
        exchange.relay(side, number);
    } else if (action == 33) {
        exchange.cancel(side, number);
    } else if (action == 34) {
        exchange.send_control(side, size);
    } else if (action == 35 && path) {
        pair.ends[side]->link.drop_path(path, "dropped");
    } else if (action == 36 && path) {  // within a packet
        path->get(size / 71.0);
    } else if (action == 37) {
        pair.connect(rail);
    } else if (action == 38 && !pair.ends[side]->closing.empty()) {
        pair.ends[side]->closing[draw() % pair.ends[side]->closing.size()]->finish_close();
    } else if (action == 39) {
        pair.ends[side]->matcher.recall_credits();
    }
    exchange.overwrite();
}

void test_every_byte_arrives_once_whatever_breaks(unsigned first, unsigned seeds) {
    const std::vector<std::vector<std::vector<int>>> all_tiers = {{{0}, {1}}, {{0, 1}}, {{0, 1}, {2}}, {{0}}};
    for (unsigned seed = first; seed < first + seeds; ++seed) {
        std::mt19937 draw(seed);
        Pair pair(all_tiers[seed % 4], seed / 4 % 2);
        Exchange exchange{pair, std::mt19937(seed), {}, {}, {}};
        const unsigned steps = 100 + draw() % 400;
        for (unsigned step = 0; step < steps; ++step) act(exchange, draw);
        exchange.check(draw() % 2 || !pair.joined());
    }
}

void test_duplicates_are_dropped() {
    ReceiveSequence receiver;
    std::vector<Ordered> ready;
    const PathId path{0, 1}, other{1, 1};
    CHECK(receiver.begin(1, path) && !receiver.begin(1, other));
    receiver.finish(1, Ordered{CONTROL, {2}}, &ready);
    CHECK(ready.empty() && !receiver.begin(1, other) && receiver.received == 2);
    const AckState state = receiver.state({0, 0});
    CHECK(state.delivered == 0 && state.out_of_order == std::vector<uint64_t>{1});
    CHECK(receiver.begin(0, other));
    receiver.finish(0, Ordered{CONTROL, {1}}, &ready);
    CHECK(ready.size() == 2 && ready[0].payload == Bytes{1} && ready[1].payload == Bytes{2});
    CHECK(!receiver.begin(0, path) && !receiver.begin(1, path));
}

Outgoing item_of(uint8_t number) { return Outgoing::with_payload(CONTROL, {number}); }

int take(SendSequence &sender, const PathId &path) {
    uint64_t number = 0;
    const Outgoing *item = sender.take(path, &number);
    CHECK(!item || item->data[0] == number);
    return item ? static_cast<int>(number) : -1;
}

void test_only_lost_packets_are_retransmitted() {
    SendSequence sender;
    std::vector<Outgoing> released;
    for (uint8_t number = 0; number < 4; ++number) sender.post(item_of(number));
    const PathId path{0, 3}, other{1, 1};
    CHECK(take(sender, path) == 0 && take(sender, other) == 1 && take(sender, path) == 2);
    sender.resume(AckState{0, {3, 0}, {2}}, &released);
    CHECK(released.empty());
    CHECK(take(sender, other) == 0 && take(sender, other) == 3 && take(sender, other) == -1);
    sender.ack(4, &released);
    CHECK(released.size() == 4 && sender.all_acked());
}

void test_packets_of_a_closing_path_are_kept() {
    SendSequence sender;
    std::vector<Outgoing> released;
    const PathId path{0, 1}, other{1, 1};
    for (uint8_t number = 0; number < 3; ++number) {
        sender.post(item_of(number));
        CHECK(take(sender, path) == number);
    }
    sender.hold(path);
    sender.ack(1, &released);
    sender.resume(AckState{1, {1, 0}, {2}}, &released);
    CHECK(released.empty() && take(sender, other) == -1);
    sender.release(path, &released);
    CHECK(released.size() == 1 && take(sender, other) == 1 && take(sender, other) == -1);
    sender.ack(3, &released);
    CHECK(released.size() == 3);
}

void test_a_path_is_reported_only_after_it_has_closed() {
    Pair pair({{0}, {1}}, true);
    Bytes memory(40), data(40);
    for (size_t at = 0; at < data.size(); ++at) data[at] = static_cast<uint8_t>(at);
    const ReceiveTransfer *receiving = pair.ends[1]->matcher.receive(0, 4, memory.data(), 40);
    pair.ends[0]->matcher.send(1, 4, data.data(), 40);
    Pipe *sending = pair.path(0, 0), *other = pair.path(1, 0);
    while (sending->wire.empty() || sending->wire.front().header.kind != DATA) {
        other->get();
        other->put();
        sending->get();
        sending->put();
    }
    other->get(0.5);
    Link &link = pair.ends[1]->link;
    CHECK(link.in_use() == std::set<int>{1} && link.closed() == std::vector<uint64_t>(2) && link.abandoned[0] == 1);
    CHECK(link.failovers[0].downtime < 0);
    pair.connect(0);
    CHECK(link.closed()[0] == 0);  // a new path does not close the previous one
    pair.drain(false);
    CHECK(receiving->state == Transfer::DONE && memory == data && link.closed()[0] == 1);
    for (const auto &end : pair.ends) {
        for (const Failover &one : end->link.failovers) CHECK(one.downtime >= 0);
    }
}

void test_generations_close_in_order() {
    Pair pair({{0}, {1}}, true);
    End &end = *pair.ends[0];
    pair.connect(0);
    pair.connect(0);
    Pipe *first = end.closing[0], *second = end.closing[1];
    second->finish_close();
    CHECK(end.link.closed()[0] == 0);
    first->finish_close();
    CHECK(end.link.closed()[0] == 2);
}

void test_failback_waits_for_the_next_message() {
    Pair pair({{0}, {1}}, false);
    Matcher &matcher = pair.ends[0]->matcher;
    Link &link = pair.ends[0]->link;
    const Bytes data(4);
    CHECK(link.in_use() == std::set<int>{0});
    link.drop_path(pair.path(0, 0), "dropped");
    CHECK(link.in_use() == std::set<int>{1});
    pair.connect(0);
    matcher.send(1, 3, data.data(), 4);
    CHECK(link.in_use() == std::set<int>{1} && link.down() == std::set<int>{0});  // not before it is stable
    link.paths[0]->since -= 1100000000;
    CHECK(link.in_use() == std::set<int>{1});
    matcher.send(1, 3, data.data(), 4);
    CHECK(link.in_use() == std::set<int>{0} && link.down().empty());
    link.drop_path(link.paths[1], "dropped");
    link.drop_path(link.paths[0], "dropped");
    CHECK(link.in_use().empty());
    pair.connect(1);
    CHECK(link.in_use() == std::set<int>{1});  // the only one
    CHECK(link.failovers.size() == 3 && link.failovers[1].rail == 1 && link.failovers[2].reason == "dropped");
}

void test_a_too_long_message_is_an_error_without_overflow() {
    for (const int capacity : {20, 5}) {  // with a credit, and announced
        Pair pair({{0}}, false);
        Bytes memory(30, 7);
        const Bytes data(25);
        const ReceiveTransfer *receiving = pair.ends[1]->matcher.receive(0, 4, memory.data(), capacity);
        const SendTransfer *sending = pair.ends[0]->matcher.send(1, 4, data.data(), 25);
        pair.drain();
        CHECK(receiving->state == Transfer::FAILED && sending->state == Transfer::DONE);
        const std::string expected = std::to_string(capacity) + " bytes, got 25";
        CHECK(receiving->error == "message from rank 0, tag 4: expected at most " + expected);
        CHECK(memory == Bytes(30, 7));
    }
}

void test_a_rank_sends_to_itself() {
    Pair pair({{0}}, false);
    Matcher &matcher = pair.ends[0]->matcher;
    for (const int size : {0, 3, 40}) {
        Bytes memory(50), data(size, 9);
        const SendTransfer *sending = matcher.send(0, 1, data.data(), size);
        CHECK((sending->state == Transfer::DONE) == (size < 40) && matcher.probe_any() == 1);
        const ReceiveTransfer *receiving = matcher.receive(0, 1, memory.data(), 50);
        CHECK(sending->state == Transfer::DONE && receiving->state == Transfer::DONE && receiving->nbytes == size);
        CHECK(std::equal(data.begin(), data.end(), memory.begin()));
        const ReceiveTransfer *early = matcher.receive(0, 1, memory.data(), 50);
        matcher.send(0, 1, data.data(), size);
        CHECK(early->state == Transfer::DONE);
    }
    CHECK(matcher.probe_any() == -1 && matcher.tags_kept() == 0);
}

void test_the_credit_of_a_cancelled_receive() {
    Pair pair({{0}}, false);
    Matcher &sender = pair.ends[0]->matcher, &receiver = pair.ends[1]->matcher;
    Bytes memory(30), data(30, 5);
    ReceiveTransfer *receiving = receiver.receive(0, 2, memory.data(), 30);
    pair.drain();
    CHECK(receiver.cancel(receiving));
    const SendTransfer *sending = sender.send(1, 2, data.data(), 30);
    pair.drain();
    CHECK(sending->state == Transfer::DONE && receiver.probe_any() == 2);  // in temporary memory
    CHECK(receiver.discard(0, 3) == nullptr);
    ReceiveTransfer *dropped = receiver.discard(0, 2);
    CHECK(dropped && !receiver.cancel(dropped) && dropped->state == Transfer::DONE && dropped->nbytes == 30);
    CHECK(receiver.probe_any() == -1);
    // Another one: recalled, and then a message has to be announced.
    CHECK(receiver.cancel(receiver.receive(0, 2, memory.data(), 30)));
    pair.drain();
    CHECK(sender.tags_kept() == 1);
    pair.idle();
    CHECK(sender.tags_kept() == 0 && receiver.tags_kept() == 0);
    const SendTransfer *announced = sender.send(1, 2, data.data(), 30);
    pair.drain();
    CHECK(announced->state == Transfer::PENDING && receiver.probe_any() == 2);
    const ReceiveTransfer *late = receiver.receive(0, 2, memory.data(), 30);
    pair.drain();
    CHECK(late->state == Transfer::DONE && announced->state == Transfer::DONE && memory == data);
}

// A receive that is posted while a message arrives in temporary memory takes it over.
void test_a_late_receive_takes_a_message_over() {
    Pair pair({{0}}, false);
    Matcher &sender = pair.ends[0]->matcher, &receiver = pair.ends[1]->matcher;
    Bytes memory(64), data(64);
    for (size_t at = 0; at < data.size(); ++at) data[at] = static_cast<uint8_t>(at);
    CHECK(receiver.cancel(receiver.receive(0, 2, memory.data(), 64)));
    pair.drain();
    sender.send(1, 2, data.data(), 64);
    Pipe *from = pair.path(0, 0), *to = pair.path(1, 0);
    CHECK(from->put() && from->put());
    while (to->get()) continue;
    const int64_t copied = receiver.copies.nbytes;
    const ReceiveTransfer *late = receiver.receive(0, 2, memory.data(), 64);
    CHECK(late->arrived == 32 && receiver.copies.nbytes == copied + 32);
    pair.drain(false);
    CHECK(late->state == Transfer::DONE && memory == data && receiver.copies.nbytes == copied + 32);
}

void test_long_messages_are_not_copied() {
    Pair pair({{0}}, false);
    Bytes memory(300), data(300);
    pair.ends[1]->matcher.receive(0, 2, memory.data(), 300);
    pair.ends[0]->matcher.send(1, 2, data.data(), 300);
    pair.drain();
    CHECK(pair.ends[0]->matcher.copies.times == 0 && pair.ends[1]->matcher.copies.times == 0);
    pair.ends[0]->matcher.send(1, 2, data.data(), 5);
    CHECK(pair.ends[0]->matcher.copies.times == 1 && pair.ends[0]->matcher.copies.nbytes == 5);
}

void test_transfers_report_their_rail() {
    for (const int size : {5, 40}) {
        Pair pair({{0}, {1}}, false);
        Bytes memory(size), data(size);
        for (const int rail : {0, 1}) {
            const ReceiveTransfer *receiving = pair.ends[1]->matcher.receive(0, 2, memory.data(), size);
            const SendTransfer *sending = pair.ends[0]->matcher.send(1, 2, data.data(), size);
            pair.drain(false);
            CHECK(receiving->rail == rail && (size == 5 || sending->rail == rail));
            if (pair.path(0, 0)) pair.ends[0]->link.drop_path(pair.path(0, 0), "dropped");
        }
    }
}

// A relay without bytes does not block the messages behind it, and leaves as they arrive.
void test_relays_leave_as_bytes_arrive() {
    Pair pair({{0}}, false);
    Matcher &first = pair.ends[0]->matcher, &second = pair.ends[1]->matcher;
    Bytes data(48, 3), middle(48), back(48), other(48, 4), other_back(48);
    ReceiveTransfer *receiving = second.receive(0, 1, middle.data(), 48);
    const ReceiveTransfer *relayed = first.receive(1, 2, back.data(), 48);
    const ReceiveTransfer *passing = first.receive(1, 3, other_back.data(), 48);
    pair.drain();
    CHECK(second.relay(receiving, 0, 2) == nullptr);  // nothing has arrived
    first.send(1, 1, data.data(), 48);
    Pipe *from = pair.path(0, 0), *to = pair.path(1, 0);
    CHECK(from->put());
    while (to->get()) continue;
    SendTransfer *relay = second.relay(receiving, 0, 2);
    CHECK(relay && relay->posted == 0 && relay->nbytes == 48);
    second.send(0, 3, other.data(), 48);
    while (to->put() | from->get()) continue;
    CHECK(relayed->arrived == 16 && passing->state == Transfer::DONE);
    pair.drain(false);
    pair.idle();
    CHECK(relayed->state == Transfer::DONE && back == data && relay->state == Transfer::DONE && relay->posted > 0);
}

void test_malformed_headers_and_states() {
    PacketHeader header;
    header.kind = DATA;
    header.number = 1;
    header.length = 2;
    header.total = 2;
    CHECK(!header.malformed());
    header.offset = 1;
    CHECK(header.malformed());
    header.kind = 0;
    CHECK(header.malformed());
    header.kind = STATE + 1;
    CHECK(header.malformed());
    header.kind = CONTROL;
    header.length = MAX_PAYLOAD_BYTES + 1;
    CHECK(header.malformed());
    header.check = header.checksum();
    for (size_t bit = 0; bit < 8 * sizeof header; ++bit) {
        PacketHeader damaged = header;
        reinterpret_cast<uint8_t *>(&damaged)[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        CHECK(damaged.check != damaged.checksum());
    }
    for (const size_t size : {0, 7, 8, 24, 33}) CHECK(!AckState::unpack(Bytes(size), 2));
    const AckState state{7, {1, 2}, {9, 11}};
    CHECK(AckState::unpack(state.pack(), 2)->out_of_order == state.out_of_order);
}

void test_a_silent_path_is_probed_before_it_is_dropped() {
    const int64_t unit = 100000000;  // a tenth of the timeout
    const auto check = [=](int64_t last_seen, int64_t probed, bool busy) {
        return check_liveness(100 * unit, last_seen * unit / 10, probed * unit / 10, 10 * unit, busy);
    };
    CHECK(check(980, 0, true) == Liveness::ALIVE);
    CHECK(check(970, 0, true) == Liveness::SUSPECT);
    CHECK(check(970, 980, true) == Liveness::ALIVE);
    CHECK(check(990, 900, true) == Liveness::ALIVE);
    CHECK(check(900, 920, true) == Liveness::DEAD);
    CHECK(check(510, 0, false) == Liveness::ALIVE);
    CHECK(check(490, 0, false) == Liveness::SUSPECT);
}

}  // namespace
}  // namespace gpucomp

// test_tcp_link [FIRST_SEED [SEEDS]]
int main(int count, char **arguments) {
    using namespace gpucomp;
    const unsigned first = count > 1 ? static_cast<unsigned>(std::atoi(arguments[1])) : 0;
    const unsigned seeds = count > 2 ? static_cast<unsigned>(std::atoi(arguments[2])) : 400;
    test_duplicates_are_dropped();
    test_only_lost_packets_are_retransmitted();
    test_packets_of_a_closing_path_are_kept();
    test_a_path_is_reported_only_after_it_has_closed();
    test_generations_close_in_order();
    test_failback_waits_for_the_next_message();
    test_a_too_long_message_is_an_error_without_overflow();
    test_a_rank_sends_to_itself();
    test_the_credit_of_a_cancelled_receive();
    test_a_late_receive_takes_a_message_over();
    test_long_messages_are_not_copied();
    test_transfers_report_their_rail();
    test_relays_leave_as_bytes_arrive();
    test_malformed_headers_and_states();
    test_a_silent_path_is_probed_before_it_is_dropped();
    test_every_byte_arrives_once_whatever_breaks(first, seeds);
    std::puts("ok");
}
