#include "tcp_wire.h"

#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace gpucomp {

namespace {

constexpr int UNSENT_BYTES = 1 << 20;           // what the kernel accepts beyond the bytes in flight
constexpr size_t BATCH_PACKETS = 16;            // what is handed to the kernel in one call
constexpr size_t BATCH_BYTES = 1 << 20;
constexpr int READS = 16;                       // from one path before the others are served
constexpr int64_t CLOCK_SLACK = 10000000;       // that the kernel's clock may lag
constexpr int64_t SHORTEST_TICK = 10000000;     // between checks of the paths: an eighth of the timeout in these bounds
constexpr int64_t LONGEST_TICK = 250000000;
constexpr int64_t RECALL_PERIOD = 1000000000;   // between recalls of credits
constexpr int64_t ABANDON_LIMIT = 500000000;    // that `abandon` waits for acknowledgements of peers that may be gone
constexpr int64_t LARGEST_TAG = (1LL << 31) - 1;
constexpr int EVENTS = 64;

// Fields of struct tcp_info, by offset: older headers lack the last one.
constexpr size_t INFO_PROBES = 3, INFO_UNACKED = 24, INFO_LAST_ACK = 56, INFO_UNSENT = 144, INFO_BYTES = 148;

// What the peer's kernel has acknowledged, independent of its process.
struct KernelState {
    uint32_t unacked;   // TCP segments in flight
    uint32_t last_ack;  // milliseconds since the last acknowledgement
    uint32_t unsent;    // bytes that have not left yet
    uint8_t probes;     // of a closed window, not answered yet
};

bool query_kernel(int fd, KernelState *state) {
    uint8_t info[INFO_BYTES] = {};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &length)) return false;
    state->probes = info[INFO_PROBES];
    std::memcpy(&state->unacked, info + INFO_UNACKED, sizeof state->unacked);
    std::memcpy(&state->last_ack, info + INFO_LAST_ACK, sizeof state->last_ack);
    std::memcpy(&state->unsent, info + INFO_UNSENT, sizeof state->unsent);
    return true;
}

std::string reason_of(int error) {
    std::string text = std::strerror(error);
    if (!text.empty() && text[0] >= 'A' && text[0] <= 'Z') text[0] = static_cast<char>(text[0] - 'A' + 'a');
    return text;
}

std::vector<std::vector<int>> striped(const std::vector<std::vector<int>> &tiers, int stripes) {
    std::vector<std::vector<int>> all;
    for (const auto &tier : tiers) {
        all.emplace_back();
        for (const int rail : tier) {
            for (int stripe = 0; stripe < stripes; ++stripe) all.back().push_back(rail * stripes + stripe);
        }
    }
    return all;
}

}  // namespace

// A path

TcpPath::TcpPath(PathId path_id, Link *its_link, TcpWire *wire, int fd)
    : Path(path_id, its_link), wire_(wire), fd_(fd), last_seen_(now()) {
    const int on = 1, unsent = UNSENT_BYTES;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
    int family = AF_UNSPEC;
    socklen_t length = sizeof family;
    getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length);
    bridged_ = family == AF_UNIX;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = this;
    if (epoll_ctl(wire->epoll_, EPOLL_CTL_ADD, fd, &event)) unusable_ = reason_of(errno);
}

TcpPath::~TcpPath() {
    if (fd_ >= 0) ::close(fd_);
}

void TcpPath::watch(bool writing) {
    epoll_event event{};
    event.events = EPOLLIN | (writing ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    event.data.ptr = this;
    epoll_ctl(wire_->epoll_, EPOLL_CTL_MOD, fd_, &event);
}

void TcpPath::wake() { wire_->schedule(this); }

bool TcpPath::fill_batch() {
    size_t total = 0;
    for (const Packet &packet : batch_) total += packet.header.length;
    while (batch_.size() < BATCH_PACKETS && total < BATCH_BYTES) {
        Packet packet;
        if (!link->next_packet(this, &packet)) break;
        total += packet.header.length;
        batch_.push_back(std::move(packet));
    }
    return !batch_.empty();
}

bool TcpPath::flush() {
    if (!is_open() || blocked_ || !fill_batch()) return false;
    iovec parts[2 * BATCH_PACKETS];
    size_t count = 0, skip = sent_;
    for (Packet &packet : batch_) {
        const iovec sides[2] = {{&packet.header, sizeof packet.header},
                                {const_cast<uint8_t *>(packet.payload), packet.header.length}};
        for (const iovec &side : sides) {
            const size_t skipped = std::min(skip, side.iov_len);
            skip -= skipped;
            if (skipped == side.iov_len) continue;
            parts[count++] = {static_cast<uint8_t *>(side.iov_base) + skipped, side.iov_len - skipped};
        }
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno == EINTR) return true;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            blocked_ = true;
            watch(true);
        } else {
            link->drop_path(this, reason_of(errno));
        }
        return false;
    }
    wire_->moved = true;
    advance(static_cast<size_t>(sent));
    return true;
}

void TcpPath::advance(size_t count) {
    sent_ += count;
    while (!batch_.empty() && sent_ >= sizeof(PacketHeader) + batch_.front().header.length) {
        sent_ -= sizeof(PacketHeader) + batch_.front().header.length;
        batch_.pop_front();
    }
}

void TcpPath::on_ready(uint32_t events) {
    if (!is_open()) return;
    if (events & EPOLLOUT && blocked_) {
        blocked_ = false;
        watch(false);
        wake();
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    for (int number = 0; number < READS && is_open() && read(); ++number) continue;
    if (is_open()) link->send_ack(this, false);
}

// Read once, with what follows the payload, and handle it; return true if there may be more.
bool TcpPath::read() {
    iovec parts[2];
    int count = 0;
    size_t direct = 0, wanted = 0;
    bool all = true;
    if (in_payload_) {
        direct = header_.length - got_;
        all = landing_.data != nullptr;
        if (!all) direct = std::min(direct, wire_->discarded.size());
        parts[count++] = {all ? landing_.data + got_ : wire_->discarded.data(), direct};
        wanted = direct;
    }
    if (all) {
        parts[count++] = {buffer_.data() + last_, buffer_.size() - last_};
        wanted += buffer_.size() - last_;
    }
    const ssize_t got = readv(fd_, parts, count);
    if (got < 0) {
        if (errno == EINTR) return true;
        if (errno != EAGAIN && errno != EWOULDBLOCK) link->drop_path(this, reason_of(errno));
        return false;
    }
    if (got == 0) {
        link->drop_path(this, "closed by the peer");
        return false;
    }
    wire_->moved = true;
    last_seen_ = now();
    const size_t taken = std::min(static_cast<size_t>(got), direct);
    last_ += static_cast<size_t>(got) - taken;
    if (taken) on_payload(taken);
    consume();
    wire_->flush();
    return static_cast<size_t>(got) == wanted;
}

void TcpPath::on_payload(size_t count) {
    got_ += count;
    if (landing_.data) link->on_progress(this, header_, landing_, static_cast<int64_t>(got_));
}

// Handle what is in the read buffer.
void TcpPath::consume() {
    while (is_open()) {
        if (in_payload_) {
            const size_t count = std::min(last_ - first_, header_.length - got_);
            if (count) {
                if (landing_.data) std::memcpy(landing_.data + got_, buffer_.data() + first_, count);
                first_ += count;
                on_payload(count);
            }
            if (got_ < header_.length) break;
            end_packet();
        } else if (last_ - first_ < sizeof(PacketHeader) || !begin_packet()) {
            break;
        }
    }
    std::memmove(buffer_.data(), buffer_.data() + first_, last_ - first_);
    last_ -= first_;
    first_ = 0;
}

bool TcpPath::begin_packet() {
    std::memcpy(&header_, buffer_.data() + first_, sizeof header_);
    first_ += sizeof header_;
    if (header_.check != header_.checksum()) {
        link->drop_path(this, "damaged packet header");
        return false;
    }
    if (header_.malformed() || !link->accept(this, header_, &landing_)) {
        link->drop_path(this, "malformed packet header");
        return false;
    }
    in_payload_ = true;
    got_ = 0;
    return true;
}

void TcpPath::end_packet() {
    in_payload_ = false;
    Landing landing = std::move(landing_);
    landing_ = Landing();
    link->on_packet(this, header_, &landing);
}

int64_t TcpPath::last_seen(int64_t when) {
    last_seen_ = std::max(last_seen_, wire_->sign_of_life(link->peer, id.rail));
    // Acknowledgements of the peer's kernel count too: they prove the path, whatever the peer's process does.
    KernelState state;
    if (!is_open() || !query_kernel(fd_, &state)) return last_seen_;
    const bool sending = state.unacked || state.unsent || !batch_.empty() || !urgent.empty();
    // A process that does not read closes its window. Its kernel has acknowledged what was sent, and answers the probes
    // of this one, at intervals that grow; not those within half a second of the last answer (tcp_invalid_ratelimit).
    const bool window_closed = state.unsent && !state.unacked && state.probes <= 1;
    if (window_closed || (!sending && probed > last_seen_)) {
        last_seen_ = when;  // what was sent, a probe at least, has arrived
    } else if (state.unacked) {
        last_seen_ = std::max(last_seen_, std::min(when, when - state.last_ack * int64_t{1000000} + CLOCK_SLACK));
    }
    return last_seen_;
}

std::string TcpPath::fault() {
    const int rail = id.rail / wire_->settings.stripes;
    return wire_->has_carrier(rail) ? "" : wire_->settings.names[rail] + " has no carrier";
}

void TcpPath::close() {
    if (fd_ >= 0) {
        // It takes effect at once; unsent bytes are dropped. Where a child of this process has inherited the descriptor,
        // closing it would neither end the connection, nor its events, which refer to this path.
        epoll_ctl(wire_->epoll_, EPOLL_CTL_DEL, fd_, nullptr);
        shutdown(fd_, SHUT_RDWR);
        ::close(fd_);
    }
    fd_ = -1;
    batch_.clear();
    landing_ = Landing();
    in_payload_ = false;
    wire_->bury(this);
    link->on_closed(this);
}

// The wire

TcpWire::TcpWire(int its_rank, int its_size, TcpSettings its_settings)
    : settings(std::move(its_settings)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      matcher_(its_rank, its_size),
      links_(its_size),
      carriers_(settings.names.size(), 1),
      left_(its_size, 0),
      signs_of_life_(its_size * settings.names.size() * settings.stripes),
      query_socket_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
      command_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      event_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      tick_period_(std::min(LONGEST_TICK, std::max(SHORTEST_TICK, settings.timeout / 8))),
      next_tick_(now()) {
    rank = its_rank;
    size = its_size;
    largest_tag = LARGEST_TAG;
    matcher_.stripes = settings.stripes;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    const bool opened = epoll_ >= 0 && query_socket_ >= 0 && command_fd_ >= 0 && event_fd_ >= 0;
    if (!opened || epoll_ctl(epoll_, EPOLL_CTL_ADD, command_fd_, &event)) {
        lose("rank " + std::to_string(rank) + " cannot open its descriptors: " + reason_of(errno));
    }
    const auto tiers = striped(settings.tiers, settings.stripes);
    for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        links_[peer] = std::make_unique<Link>(peer, tiers, &matcher_, settings.timeout);
        matcher_.links[peer] = links_[peer].get();
        links_[peer]->on_path_down = [this, peer](int stripe, uint64_t generation, const std::string &why) {
            add_event(TcpEvent{TcpEvent::PATH_DOWN, peer, stripe, generation, why});
        };
    }
    publish();
}

TcpWire::~TcpWire() {
    shut();
    for (const int fd : {epoll_, query_socket_, command_fd_, event_fd_}) {
        if (fd >= 0) ::close(fd);
    }
}

void TcpWire::lose(const std::string &text) {
    if (fault.text.empty()) fault.text = text;
}

Transfer *TcpWire::send(int peer, int64_t tag, const void *data, int64_t nbytes) {
    bytes_sent += nbytes;
    Transfer *send = matcher_.send(peer, tag, data, nbytes);
    flush();  // a short message has completed for the caller, who may not poll again
    return send;
}

Transfer *TcpWire::receive(int peer, int64_t tag, void *data, int64_t capacity) {
    return matcher_.receive(peer, tag, data, capacity);
}

Transfer *TcpWire::relay(Transfer *received, int peer, int64_t tag) {
    Transfer *relay = matcher_.relay(static_cast<ReceiveTransfer *>(received), peer, tag);
    if (relay) bytes_sent += relay->nbytes;
    flush();
    return relay;
}

bool TcpWire::test(Transfer *transfer) {
    if (transfer->state != Transfer::PENDING) return true;
    if (transfer->peer != rank && link_of(transfer->peer)->peer_left) {
        lose("rank " + std::to_string(transfer->peer) + " has left");
    }
    return false;
}

bool TcpWire::begun(Transfer *transfer) {
    return test(transfer) || (!transfer->is_send && transfer->arrived > 0 && transfer->nbytes <= transfer->capacity);
}

bool TcpWire::cancel(Transfer *receive) { return matcher_.cancel(static_cast<ReceiveTransfer *>(receive)); }

void TcpWire::release(Transfer *transfer) { matcher_.release(static_cast<MatchedTransfer *>(transfer)); }

int64_t TcpWire::probe_any() { return matcher_.probe_any(); }

Transfer *TcpWire::discard(int peer, int64_t tag) { return matcher_.discard(peer, tag); }

void TcpWire::send_control(int peer, const void *data, size_t nbytes) {
    const uint8_t *bytes = static_cast<const uint8_t *>(data);
    if (peer == rank) {
        matcher_.control.push_back(ReceivedControl{peer, false, Bytes(bytes, bytes + nbytes)});
    } else if (!link_of(peer)->peer_left) {
        link_of(peer)->post(Outgoing::with_payload(CONTROL, Bytes(bytes, bytes + nbytes)));
        flush();
    }
}

bool TcpWire::recv_control(int *peer, std::vector<uint8_t> *message) {
    if (matcher_.control.empty()) return false;
    ReceivedControl &first = matcher_.control.front();
    const bool is_abort = first.is_abort;
    if (is_abort) {
        lose(std::string(first.payload.begin(), first.payload.end()));
    } else {
        *peer = first.peer;
        *message = std::move(first.payload);
    }
    matcher_.control.pop_front();
    return !is_abort;
}

void TcpWire::schedule(TcpPath *path) {
    if (path->queued || !path->is_open()) return;
    path->queued = true;
    dirty_.push_back(path);
}

// Send what is queued, a batch of each path after the other.
void TcpWire::flush() {
    if (flushing_) return;
    flushing_ = true;
    while (!dirty_.empty()) {
        TcpPath *path = dirty_.front();
        dirty_.pop_front();
        path->queued = false;
        if (path->flush()) schedule(path);
    }
    flushing_ = false;
}

bool TcpWire::poll() {
    moved = false;
    flush();
    epoll_event events[EVENTS];
    const int count = epoll_wait(epoll_, events, EVENTS, 0);
    for (int number = 0; number < count; ++number) {
        if (events[number].data.ptr) {
            static_cast<TcpPath *>(events[number].data.ptr)->on_ready(events[number].events);
        } else {
            run_commands();
        }
    }
    const int64_t when = now();
    if (when >= next_tick_) tick(when);
    flush();
    bytes_received = matcher_.bytes_received;
    free_dead();
    if (published_changes_ != matcher_.rail_changes) publish();
    return moved;
}

bool TcpWire::arm() {
    flush();
    return dirty_.empty();
}

int64_t TcpWire::poll_within() const {
    if (size == 1 || closed_) return -1;
    return std::max<int64_t>(0, next_tick_ - now());
}

void TcpWire::tick(int64_t when) {
    next_tick_ = when + tick_period_;
    check_carriers();
    for (const auto &link : links_) {
        if (!link) continue;
        link->check_paths(when);
        if (fault.text.empty() && !leaving_ && !link->peer_left) check_peer(link.get(), when);
        if (link->peer_left && !left_[link->peer]) {
            left_[link->peer] = 1;
            add_event(TcpEvent{TcpEvent::PEER_LEFT, link->peer, 0, 0, ""});
        }
    }
    if (when >= next_recall_ && !leaving_) {
        next_recall_ = when + RECALL_PERIOD;
        matcher_.recall_credits();
    }
}

void TcpWire::check_carriers() {
    for (size_t rail = 0; rail < carriers_.size(); ++rail) {
        const std::string &device = settings.devices[rail];
        if (device.empty()) continue;
        ifreq query{};
        std::strncpy(query.ifr_name, device.c_str(), sizeof query.ifr_name - 1);
        const int wanted = IFF_UP | IFF_RUNNING;
        carriers_[rail] = ioctl(query_socket_, SIOCGIFFLAGS, &query) == 0 && (query.ifr_flags & wanted) == wanted;
    }
}

// Fail if a peer has been unreachable for too long.
void TcpWire::check_peer(Link *link, int64_t when) {
    const std::string ends = " from rank " + std::to_string(rank) + " to rank " + std::to_string(link->peer);
    for (const auto &one : link->closing) {
        if (when - one.second > settings.limit) lose("a path" + ends + " that does not close");
    }
    const int64_t disconnected = when - link->disconnected_since;
    if (link->paths.empty() && disconnected > settings.limit) {
        char seconds[32];
        std::snprintf(seconds, sizeof seconds, "%.1f", static_cast<double>(disconnected) / 1e9);
        lose("no path" + ends + ": all paths down for " + seconds + " s");
    }
}

void TcpWire::revoke(const std::string &why) {
    if (closed_) return;
    for (const auto &link : links_) {
        if (link) link->post(Outgoing::with_payload(ABORT, Bytes(why.begin(), why.end())));
    }
    flush();
}

void TcpWire::close(bool abandon) {
    if (leaving_) return;
    leaving_ = true;
    deadline_ = now() + (abandon ? ABANDON_LIMIT : settings.limit);
    for (const auto &link : links_) {
        if (link) link->post(Outgoing::with_payload(BYE, {}));
    }
}

bool TcpWire::closed() {
    if (closed_ || !leaving_) return closed_;
    const bool arrived = std::all_of(links_.begin(), links_.end(), [](const std::unique_ptr<Link> &link) {
        return !link || link->all_acked() || (link->peer_left && link->paths.empty());
    });
    if (!arrived && now() < deadline_) return false;
    shut();
    return true;
}

void TcpWire::shut() {
    if (closed_) return;
    closed_ = leaving_ = true;
    {
        const std::lock_guard<std::mutex> lock(control_mutex_);
        is_shut_ = true;
        for (const Command &one : commands_) {
            if (one.kind == Command::ADD_PATH) ::close(one.fd);
        }
        commands_.clear();
    }
    for (const auto &link : links_) {
        if (link) link->close();
    }
    free_dead();
}

void TcpWire::free_dead() {
    if (dead_.empty()) return;
    const auto is_dead = [](const TcpPath *path) { return !path->is_open(); };
    dirty_.erase(std::remove_if(dirty_.begin(), dirty_.end(), is_dead), dirty_.end());
    for (const TcpPath *path : dead_) delete path;
    dead_.clear();
}

// The control side

void TcpWire::command(Command command) {
    const std::lock_guard<std::mutex> lock(control_mutex_);
    if (is_shut_) {
        if (command.kind == Command::ADD_PATH) ::close(command.fd);
        return;
    }
    commands_.push_back(std::move(command));
    eventfd_write(command_fd_, 1);
}

void TcpWire::add_path(int peer, int stripe, uint64_t generation, int fd) {
    command(Command{Command::ADD_PATH, peer, stripe, generation, fd, ""});
}

void TcpWire::drop_path(int peer, int stripe, const std::string &reason) {
    command(Command{Command::DROP_PATH, peer, stripe, 0, -1, reason});
}

size_t TcpWire::index_of(int peer, int stripe) const {
    return static_cast<size_t>(peer) * settings.names.size() * settings.stripes + stripe;
}

void TcpWire::seen(int peer, int stripe) { signs_of_life_[index_of(peer, stripe)] = now(); }

int64_t TcpWire::sign_of_life(int peer, int stripe) const { return signs_of_life_[index_of(peer, stripe)]; }

void TcpWire::fail(const std::string &text) { command(Command{Command::FAIL, 0, 0, 0, -1, text}); }

void TcpWire::run_commands() {
    eventfd_t ignored;
    eventfd_read(command_fd_, &ignored);
    std::vector<Command> commands;
    {
        const std::lock_guard<std::mutex> lock(control_mutex_);
        commands.swap(commands_);
    }
    moved = true;
    for (const Command &one : commands) {
        if (one.kind == Command::ADD_PATH) {
            use_socket(one);
        } else if (one.kind == Command::FAIL) {
            lose(one.text);
        } else {
            Link *link = link_of(one.peer);
            const auto found = link->paths.find(one.stripe);
            if (found != link->paths.end()) link->drop_path(found->second, one.text);
        }
    }
}

void TcpWire::use_socket(const Command &command) {
    Link *link = link_of(command.peer);
    const auto current = link->paths.find(command.stripe);
    uint64_t last = link->abandoned[command.stripe];
    if (current != link->paths.end()) last = std::max(last, current->second->id.generation);
    if (command.generation <= last) {
        ::close(command.fd);  // an old one, delayed
        add_event(TcpEvent{TcpEvent::PATH_DOWN, command.peer, command.stripe, command.generation, ""});
        return;
    }
    auto *path = new TcpPath(PathId{command.stripe, command.generation}, link, this, command.fd);
    link->add_path(path);
    if (!path->unusable().empty()) link->drop_path(path, path->unusable());
}

void TcpWire::add_event(TcpEvent event) {
    const std::lock_guard<std::mutex> lock(control_mutex_);
    events_.push_back(std::move(event));
    eventfd_write(event_fd_, 1);
}

bool TcpWire::next_event(TcpEvent *event) {
    const std::lock_guard<std::mutex> lock(control_mutex_);
    eventfd_t ignored;
    if (events_.empty()) {
        eventfd_read(event_fd_, &ignored);
        return false;
    }
    *event = std::move(events_.front());
    events_.pop_front();
    return true;
}

void TcpWire::publish() {
    published_changes_ = matcher_.rail_changes;
    Snapshot taken;
    const size_t rails = settings.names.size();
    taken.in_use.assign(size, std::vector<uint8_t>(rails, 0));
    taken.down = taken.in_use;
    for (const auto &link : links_) {
        if (!link) continue;
        for (const int stripe : link->in_use()) taken.in_use[link->peer][stripe / settings.stripes] = 1;
        for (const int stripe : link->down()) taken.down[link->peer][stripe / settings.stripes] = 1;
        for (const Failover &one : link->failovers) {
            taken.failovers.push_back(one);
            taken.failovers.back().rail /= settings.stripes;
        }
    }
    const std::lock_guard<std::mutex> lock(control_mutex_);
    snapshot_ = std::move(taken);
}

TcpWire::Snapshot TcpWire::snapshot() {
    const std::lock_guard<std::mutex> lock(control_mutex_);
    return snapshot_;
}

}  // namespace gpucomp

using gpucomp::SHORTEST_TICK;
using gpucomp::TcpSettings;
using gpucomp::TcpWire;
using gpucomp::Wire;

namespace {

TcpWire *tcp(Wire *wire) { return static_cast<TcpWire *>(wire); }

// Split a text into lines; as many as there are.
std::vector<std::string> lines_of(const char *text) {
    std::vector<std::string> lines(1);
    for (; *text; ++text) {
        if (*text == '\n') {
            lines.emplace_back();
        } else {
            lines.back().push_back(*text);
        }
    }
    return lines;
}

void copy_text(const std::string &text, char *to, size_t capacity) {
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(to, text.data(), length);
    to[length] = 0;
}

}  // namespace

#define GC_API extern "C" __attribute__((visibility("default")))

struct GcTcpEvent {
    int32_t kind, peer, stripe, unused;
    uint64_t generation;
    char reason[104];
};

struct GcTcpFailover {
    int32_t peer, rail;
    int64_t silence, downtime;  // nanoseconds; downtime -1: not yet over
    char reason[104];
};

// `tier_of` has the tier of each rail; names and devices are lines of text. Times are in nanoseconds.
GC_API Wire *gc_tcp_new(int32_t rank, int32_t size, int32_t rails, const int32_t *tier_of, const char *names,
                        const char *devices, int32_t stripes, int64_t timeout, int64_t limit) {
    TcpSettings settings;
    settings.names = lines_of(names);
    settings.devices = lines_of(devices);
    if (rank < 0 || rank >= size || rails < 1 || stripes < 1 || timeout < 1 || limit < 1) return nullptr;
    const size_t count = static_cast<size_t>(rails);
    if (settings.names.size() != count || settings.devices.size() != count) return nullptr;
    for (int32_t rail = 0; rail < rails; ++rail) {
        if (tier_of[rail] < 0 || tier_of[rail] > static_cast<int32_t>(settings.tiers.size())) return nullptr;
        if (tier_of[rail] == static_cast<int32_t>(settings.tiers.size())) settings.tiers.emplace_back();
        settings.tiers[tier_of[rail]].push_back(rail);
    }
    settings.stripes = stripes;
    settings.timeout = timeout;
    settings.limit = limit;
    return new TcpWire(rank, size, std::move(settings));
}

GC_API void gc_tcp_free(Wire *wire) { delete wire; }

GC_API int32_t gc_tcp_poll(Wire *wire) { return wire->poll(); }

// Leave, and return when all is closed. No other thread may use the wire.
GC_API void gc_tcp_close(Wire *wire, int32_t abandon) {
    wire->close(abandon != 0);
    while (!wire->closed()) {
        if (wire->poll() || !wire->arm()) continue;
        const int64_t within = std::min(wire->poll_within(), SHORTEST_TICK) / 1000000;
        pollfd readable = {wire->fd(), POLLIN, 0};
        ::poll(&readable, 1, static_cast<int>(within));
    }
}

// The wire takes over the socket, also where it returns without using it.
GC_API void gc_tcp_add_path(Wire *wire, int32_t peer, int32_t stripe, uint64_t generation, int32_t fd) {
    tcp(wire)->add_path(peer, stripe, generation, fd);
}

GC_API void gc_tcp_drop_path(Wire *wire, int32_t peer, int32_t stripe, const char *reason) {
    tcp(wire)->drop_path(peer, stripe, reason);
}

GC_API void gc_tcp_seen(Wire *wire, int32_t peer, int32_t stripe) { tcp(wire)->seen(peer, stripe); }

GC_API void gc_tcp_fail(Wire *wire, const char *text) { tcp(wire)->fail(text); }

GC_API int32_t gc_tcp_event_fd(Wire *wire) { return tcp(wire)->event_fd(); }

GC_API int32_t gc_tcp_next_event(Wire *wire, GcTcpEvent *event) {
    gpucomp::TcpEvent next;
    if (!tcp(wire)->next_event(&next)) return 0;
    *event = GcTcpEvent{next.kind, next.peer, next.stripe, 0, next.generation, {}};
    copy_text(next.reason, event->reason, sizeof event->reason);
    return 1;
}

// For each rail to a peer: 1 if it carries the traffic, 2 if it is down or not in use again yet; the sum of both.
GC_API void gc_tcp_rails(Wire *wire, int32_t peer, uint8_t *states) {
    const TcpWire::Snapshot snapshot = tcp(wire)->snapshot();
    for (size_t rail = 0; rail < snapshot.in_use[peer].size(); ++rail) {
        states[rail] = static_cast<uint8_t>(snapshot.in_use[peer][rail] + 2 * snapshot.down[peer][rail]);
    }
}

// Write at most `capacity` of the lost paths; return how many there are.
GC_API int64_t gc_tcp_failovers(Wire *wire, GcTcpFailover *found, int64_t capacity) {
    const TcpWire::Snapshot snapshot = tcp(wire)->snapshot();
    const int64_t count = static_cast<int64_t>(snapshot.failovers.size());
    for (int64_t number = 0; number < std::min(count, capacity); ++number) {
        const gpucomp::Failover &one = snapshot.failovers[number];
        found[number] = GcTcpFailover{one.peer, one.rail, one.silence, one.downtime, {}};
        copy_text(one.reason, found[number].reason, sizeof found[number].reason);
    }
    return count;
}

// The number and bytes of copies within this rank.
GC_API void gc_tcp_copies(Wire *wire, int64_t *times_and_bytes) {
    times_and_bytes[0] = tcp(wire)->copies().times;
    times_and_bytes[1] = tcp(wire)->copies().nbytes;
}
