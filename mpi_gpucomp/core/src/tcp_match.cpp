#include "tcp_match.h"

#include <algorithm>
#include <cstring>

#include "tcp_link.h"

namespace gpucomp {

int64_t SendTransfer::available() const { return source ? source->arrived : nbytes; }

Matcher::Matcher(int rank, int size) : links(size, nullptr), rank_(rank), peers_(size) {
    head_.previous = head_.next = &head_;
}

Matcher::~Matcher() {
    std::set<Message *> messages;
    for (const auto &one : unexpected_) messages.insert(one.second);
    for (const Peer &peer : peers_) {
        for (const auto &one : peer.parked) messages.insert(one.second);
        for (const auto &one : peer.arriving) messages.insert(one.second);
    }
    for (Message *message : messages) delete message;
    while (head_.next != &head_) {
        MatchedTransfer *first = head_.next;
        head_.next = first->next;
        delete first;
    }
}

template <class T>
T *Matcher::track(T *transfer, int peer, int64_t tag, const void *data, int64_t capacity) {
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->data = static_cast<uint8_t *>(const_cast<void *>(data));
    transfer->capacity = capacity;
    transfer->posted = now();
    transfer->next = &head_;
    transfer->previous = head_.previous;
    head_.previous->next = transfer;
    head_.previous = transfer;
    return transfer;
}

void Matcher::release(MatchedTransfer *transfer) {
    // A pending one is still referred to; it is freed with the matcher.
    if (transfer->state == Transfer::PENDING) return;
    transfer->previous->next = transfer->next;
    transfer->next->previous = transfer->previous;
    delete transfer;
}

void Matcher::count_copy(int64_t nbytes) {
    copies.times += 1;
    copies.nbytes += nbytes;
}

void Matcher::post(int peer, PacketKind kind, int64_t tag, uint64_t number) {
    Outgoing item;
    item.header.kind = kind;
    item.header.tag = tag;
    item.header.number = number;
    links[peer]->post(std::move(item));
}

// Sending

SendTransfer *Matcher::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    SendTransfer *send = track(new SendTransfer, peer, tag, data, nbytes);
    send->is_send = true;
    send->nbytes = nbytes;
    const bool eager = nbytes <= eager_bytes;
    Peer &to = peers_[peer];
    send->number = ++to.sent;
    Bytes copy;
    if (eager) {
        copy.assign(send->data, send->data + nbytes);
        count_copy(nbytes);
        send->state = Transfer::DONE;
    }
    if (peer == rank_) {
        Message *message = make_message(peer, tag, send->number, 0, nbytes);
        message->begun = true;
        message->whole = true;
        message->left = 0;
        message->arrived = nbytes;
        if (eager) {
            message->temporary = std::make_shared<Bytes>(std::move(copy));
            message->memory = message->temporary->data();
        } else {
            message->memory = send->data;
            message->local = send;
        }
        place(message);
        return send;
    }
    SendTag &channel = to.to[tag];
    send->prior = channel.unacked ? channel.last : 0;
    channel.last = send->number;
    channel.unacked += 1;
    if (!eager) {
        announce_or_begin(send);
        return send;
    }
    Outgoing item = Outgoing::with_payload(DATA, std::move(copy));
    if (channel.credit) {
        channel.credit -= 1;
        item.header.credited = 1;
    }
    item.header.tag = tag;
    item.header.number = send->number;
    item.header.prior = send->prior;
    item.header.total = nbytes;
    links[peer]->post(std::move(item));
    return send;
}

SendTransfer *Matcher::relay(ReceiveTransfer *received, int peer, int64_t tag) {
    if (received->state == Transfer::DONE) return send(peer, tag, received->data, received->nbytes);
    const Message *message = received->message;
    const bool lands_in_place = message != nullptr && message->nbytes <= received->capacity;
    if (!lands_in_place || !message->begun || peer == rank_ || message->nbytes <= eager_bytes) return nullptr;
    SendTransfer *send = track(new SendTransfer, peer, tag, received->data, received->nbytes);
    send->is_send = true;
    send->nbytes = received->nbytes;
    send->posted = 0;
    send->source = received;
    received->relays.push_back(send);
    Peer &to = peers_[peer];
    SendTag &channel = to.to[tag];
    send->number = ++to.sent;
    send->prior = channel.unacked ? channel.last : 0;
    channel.last = send->number;
    channel.unacked += 1;
    announce_or_begin(send);
    return send;
}

void Matcher::announce_or_begin(SendTransfer *send) {
    SendTag &channel = peers_[send->peer].to[send->tag];
    if (channel.credit) {
        channel.credit -= 1;
        links[send->peer]->select_rails();
        begin(send);
        return;
    }
    Outgoing item;
    item.header.kind = RTS;
    item.header.tag = send->tag;
    item.header.number = send->number;
    item.header.prior = send->prior;
    item.header.total = send->nbytes;
    channel.announced.push_back(send);
    links[send->peer]->post(std::move(item));
}

void Matcher::begin(SendTransfer *send) {
    send->credited = true;
    peers_[send->peer].leaving.push_back(send);
    links[send->peer]->wake();
}

bool Matcher::next_segment(int peer, int64_t longest, Outgoing *segment) {
    std::deque<SendTransfer *> &leaving = peers_[peer].leaving;
    for (auto one = leaving.begin(); one != leaving.end(); ++one) {
        // A relay that waits for bytes lets the messages behind it pass.
        SendTransfer *send = *one;
        const int64_t available = send->available();
        const int64_t length = std::min({available - send->sent, longest, segment_bytes});
        const int64_t shortest = std::min({relay_bytes, longest, segment_bytes});
        if (length <= 0 || (available < send->nbytes && length < shortest)) continue;
        PacketHeader &header = segment->header;
        header.kind = DATA;
        header.credited = 1;
        header.length = static_cast<uint32_t>(length);
        header.tag = send->tag;
        header.number = send->number;
        header.prior = send->prior;
        header.offset = send->sent;
        header.total = send->nbytes;
        segment->data = send->data + send->sent;
        segment->owner = send;
        send->sent += length;
        if (send->sent == send->nbytes) leaving.erase(one);
        return true;
    }
    return false;
}

void Matcher::on_acked(int peer, const Outgoing &item) {
    if (item.header.kind != DATA) return;
    SendTransfer *send = item.owner;
    if (send) {
        send->acked += item.header.length;
        if (send->acked < send->nbytes) return;
        send->state = Transfer::DONE;
        if (send->source) {
            std::vector<SendTransfer *> &relays = send->source->relays;
            relays.erase(std::remove(relays.begin(), relays.end(), send), relays.end());
            send->source = nullptr;
        }
    }
    peers_[peer].to[item.header.tag].unacked -= 1;
    drop_if_idle(peer, item.header.tag);
}

// Receiving

ReceiveTransfer *Matcher::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    ReceiveTransfer *receive = track(new ReceiveTransfer, peer, tag, data, capacity);
    ReceiveTag &channel = peers_[peer].from[tag];
    if (!channel.unexpected.empty()) {
        Message *message = channel.unexpected.front();
        channel.unexpected.pop_front();
        unexpected_.erase(message->order);
        message->order = 0;
        match(receive, message);
        return receive;
    }
    channel.posted.push_back(receive);
    if (capacity > eager_bytes && peer != rank_) {
        channel.wanted += 1;
        send_credits(peer, tag);
    }
    return receive;
}

bool Matcher::cancel(ReceiveTransfer *receive) {
    const auto found = peers_[receive->peer].from.find(receive->tag);
    if (found == peers_[receive->peer].from.end()) return false;
    ReceiveTag &channel = found->second;
    const auto one = std::find(channel.posted.begin(), channel.posted.end(), receive);
    if (one == channel.posted.end()) return false;
    channel.posted.erase(one);
    if (receive->capacity > eager_bytes && receive->peer != rank_) channel.wanted -= 1;
    drop_if_idle(receive->peer, receive->tag);
    receive->state = Transfer::FAILED;
    release(receive);
    return true;
}

ReceiveTransfer *Matcher::discard(int peer, int64_t tag) {
    const auto found = peers_[peer].from.find(tag);
    if (found == peers_[peer].from.end() || found->second.unexpected.empty()) return nullptr;
    auto memory = std::make_shared<Bytes>(found->second.unexpected.front()->nbytes);
    ReceiveTransfer *receive = this->receive(peer, tag, memory->data(), static_cast<int64_t>(memory->size()));
    receive->owned = std::move(memory);
    return receive;
}

int64_t Matcher::probe_any() const { return unexpected_.empty() ? -1 : unexpected_.begin()->second->tag; }

void Matcher::send_credits(int peer, int64_t tag) {
    ReceiveTag &channel = peers_[peer].from[tag];
    for (; channel.credit < channel.wanted; ++channel.credit) post(peer, READY, tag, 0);
}

void Matcher::recall_credits() {
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
        const std::set<int64_t> tags = std::move(peers_[peer].spare);
        peers_[peer].spare.clear();
        for (const int64_t tag : tags) {
            const auto found = peers_[peer].from.find(tag);
            if (found == peers_[peer].from.end()) continue;
            ReceiveTag &channel = found->second;
            const bool in_use = !channel.posted.empty() || !channel.unexpected.empty() || channel.wanted;
            if (channel.credit <= 0 || in_use) continue;
            channel.recalls += 1;
            post(static_cast<int>(peer), WITHDRAW, tag, static_cast<uint64_t>(channel.credit));
            channel.credit = 0;
        }
    }
}

void Matcher::drop_if_idle(int peer, int64_t tag) {
    Peer &ends = peers_[peer];
    const auto to = ends.to.find(tag);
    if (to != ends.to.end()) {
        const SendTag &channel = to->second;
        if (!channel.credit && !channel.unacked && channel.announced.empty()) ends.to.erase(to);
    }
    const auto from = ends.from.find(tag);
    if (from == ends.from.end()) return;
    const ReceiveTag &channel = from->second;
    if (!channel.posted.empty() || !channel.unexpected.empty() || channel.wanted || channel.recalls) return;
    if (channel.credit) {
        ends.spare.insert(tag);
    } else {
        ends.from.erase(from);
    }
}

Message *Matcher::make_message(int peer, int64_t tag, uint64_t number, uint64_t prior, int64_t nbytes) {
    Message *message = new Message;
    message->peer = peer;
    message->tag = tag;
    message->number = number;
    message->prior = prior;
    message->nbytes = message->left = nbytes;
    return message;
}

bool Matcher::is_placed(int peer, uint64_t number) const {
    return number < peers_[peer].placed_below || peers_[peer].placed.count(number);
}

void Matcher::place(Message *message) {
    Peer &from = peers_[message->peer];
    if (message->prior && !is_placed(message->peer, message->prior)) {
        from.parked.emplace(message->prior, message);
        return;
    }
    const uint64_t number = message->number;
    from.placed.insert(number);
    while (!from.placed.empty() && *from.placed.begin() == from.placed_below) {
        from.placed.erase(from.placed.begin());
        from.placed_below += 1;
    }
    if (message->whole) from.arriving.erase(number);
    ReceiveTag &channel = from.from[message->tag];
    if (channel.posted.empty()) {
        message->order = ++order_;
        unexpected_[message->order] = message;
        channel.unexpected.push_back(message);
    } else {
        ReceiveTransfer *receive = channel.posted.front();
        channel.posted.pop_front();
        if (receive->capacity > eager_bytes && receive->peer != rank_) channel.wanted -= 1;
        match(receive, message);
    }
    // At most one message follows another with the same tag.
    const auto next = from.parked.find(number);
    if (next == from.parked.end()) return;
    Message *waiting = next->second;
    from.parked.erase(next);
    place(waiting);
}

void Matcher::match(ReceiveTransfer *receive, Message *message) {
    receive->message = message;
    receive->nbytes = message->nbytes;
    receive->rail = message->rail;
    message->receive = receive;
    if (message->nbytes <= receive->capacity) {
        take_over(message, receive->data);
    } else {
        receive->error = "message from rank " + std::to_string(message->peer) + ", tag " +
                         std::to_string(message->tag) + ": expected at most " + std::to_string(receive->capacity) +
                         " bytes, got " + std::to_string(message->nbytes);
    }
    if (!message->begun) {
        peers_[message->peer].from[message->tag].wanted += 1;
        send_credits(message->peer, message->tag);
    } else if (message->whole) {
        complete(message);
    }
}

// Continue in the memory of the receive. What arrives elsewhere now is copied when its segment is complete.
void Matcher::take_over(Message *message, uint8_t *memory) {
    if (message->memory && message->nbytes) {
        if (message->arrived) std::memcpy(memory, message->memory, static_cast<size_t>(message->arrived));
        for (const auto &[offset, end] : message->ahead) {
            std::memcpy(memory + offset, message->memory + offset, static_cast<size_t>(end - offset));
        }
        count_copy(message->nbytes - message->left);
    }
    message->memory = memory;
    message->temporary.reset();
    message->receive->arrived = message->arrived;
}

bool Matcher::begin_segment(int peer, const PacketHeader &header, Landing *landing) {
    Peer &from = peers_[peer];
    const auto found = from.arriving.find(header.number);
    Message *message = found == from.arriving.end() ? nullptr : found->second;
    if (!message) {
        if (is_placed(peer, header.number)) return false;
        message = make_message(peer, header.tag, header.number, header.prior, header.total);
        from.arriving[header.number] = message;
    }
    if (message->tag != header.tag || message->nbytes != header.total) return false;
    if (!message->begun) {
        message->begun = true;
        ReceiveTag &channel = from.from[message->tag];
        if (header.credited) channel.credit -= 1;
        if (message->receive) channel.wanted -= 1;
    }
    if (found == from.arriving.end()) place(message);
    if (!message->memory) {
        message->temporary = std::make_shared<Bytes>(static_cast<size_t>(message->nbytes));
        message->memory = message->temporary->data();
    }
    landing->data = message->memory + header.offset;
    landing->keep = message->temporary;
    landing->message = message;
    return true;
}

void Matcher::on_progress(const PacketHeader &header, const Landing &landing, int64_t nbytes, int rail) {
    Message *message = landing.message;
    if (landing.data != message->memory + header.offset || header.offset > message->arrived) return;
    message->rail = rail;
    add_arrived(message, header.offset + nbytes);
}

void Matcher::add_arrived(Message *message, int64_t arrived) {
    if (arrived <= message->arrived) return;
    message->arrived = arrived;
    while (!message->ahead.empty() && message->ahead.begin()->first <= message->arrived) {
        message->arrived = std::max(message->arrived, message->ahead.begin()->second);
        message->ahead.erase(message->ahead.begin());
    }
    ReceiveTransfer *receive = message->receive;
    if (!receive || message->nbytes > receive->capacity) return;
    receive->arrived = message->arrived;
    for (const SendTransfer *relay : receive->relays) {
        const bool enough = message->arrived - relay->sent >= relay_bytes;
        if (enough || message->arrived == message->nbytes) links[relay->peer]->wake();
    }
}

bool Matcher::on_segment(const PacketHeader &header, const Landing &landing, int rail) {
    Message *message = landing.message;
    message->rail = rail;
    if (header.length && landing.data != message->memory + header.offset) {
        std::memcpy(message->memory + header.offset, landing.data, header.length);
        count_copy(header.length);
    }
    message->left -= header.length;
    const int64_t end = header.offset + header.length;
    if (header.offset <= message->arrived) {
        add_arrived(message, end);
    } else {
        message->ahead[header.offset] = end;
    }
    if (message->left) return false;
    message->whole = true;
    // One that waits for its place stays known, in case its announcement has been overtaken.
    if (is_placed(message->peer, message->number)) peers_[message->peer].arriving.erase(message->number);
    if (message->receive) complete(message);
    return true;
}

void Matcher::complete(Message *message) {
    ReceiveTransfer *receive = message->receive;
    peers_[message->peer].arriving.erase(message->number);
    receive->message = nullptr;
    receive->rail = message->rail;
    receive->state = receive->error.empty() ? Transfer::DONE : Transfer::FAILED;
    bytes_received += message->nbytes;
    const int64_t when = now();
    for (SendTransfer *relay : receive->relays) {
        relay->posted = when;
        relay->source = nullptr;
        links[relay->peer]->wake();
    }
    receive->relays.clear();
    if (message->local) message->local->state = Transfer::DONE;
    drop_if_idle(message->peer, message->tag);
    delete message;
}

void Matcher::on_packet(int peer, const PacketHeader &header) {
    Peer &ends = peers_[peer];
    if (header.kind == RTS) {
        // Its segments may have overtaken it.
        if (is_placed(peer, header.number) || ends.arriving.count(header.number)) return;
        Message *message = make_message(peer, header.tag, header.number, header.prior, header.total);
        ends.arriving[header.number] = message;
        place(message);
    } else if (header.kind == READY) {
        SendTag &channel = ends.to[header.tag];
        if (channel.announced.empty()) {
            channel.credit += 1;
            return;
        }
        SendTransfer *send = channel.announced.front();
        channel.announced.pop_front();
        begin(send);
    } else if (header.kind == WITHDRAW) {
        SendTag &channel = ends.to[header.tag];
        const int64_t taken = std::min(channel.credit, static_cast<int64_t>(header.number));
        channel.credit -= taken;
        post(peer, WITHDRAWN, header.tag, header.number - static_cast<uint64_t>(taken));
        drop_if_idle(peer, header.tag);
    } else if (header.kind == WITHDRAWN) {
        // Its number is that of the credits that messages have used meanwhile.
        ReceiveTag &channel = ends.from[header.tag];
        channel.credit += static_cast<int64_t>(header.number);
        channel.recalls -= 1;
        drop_if_idle(peer, header.tag);
    }
}

bool Matcher::is_receiving(int peer) const {
    const auto &arriving = peers_[peer].arriving;
    return std::any_of(arriving.begin(), arriving.end(),
                       [](const auto &one) { return one.second->begun || one.second->receive; });
}

size_t Matcher::tags_kept() const {
    size_t count = 0;
    for (const Peer &peer : peers_) count += peer.to.size() + peer.from.size();
    return count;
}

}  // namespace gpucomp
