#include "shm_peers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "wire.h"

namespace gpucomp {

namespace {

constexpr uint64_t MAGIC = 0x67633173686d0001;

// Memory that ranks of this process have created, by socket path.
std::mutex registry_lock;
std::map<std::string, std::weak_ptr<ShmMapping>> &registry() {
    static auto *mappings = new std::map<std::string, std::weak_ptr<ShmMapping>>;  // outlives wires closed at exit
    return *mappings;
}

bool address_of(const std::string &path, sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (path.size() >= sizeof address->sun_path) return false;
    memcpy(address->sun_path, path.c_str(), path.size() + 1);
    return true;
}

}  // namespace

ShmMapping::ShmMapping(int descriptor, uint64_t bytes) : bytes_(bytes) {
    void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) base = static_cast<uint8_t *>(mapped);
}

ShmMapping::~ShmMapping() {
    if (base) munmap(base, bytes_);
}

struct ShmBootstrap::Hello {
    uint64_t magic;
    int32_t rank, size;
    uint64_t ring_bytes, probe_address, probe;
};

ShmBootstrap::ShmBootstrap(const std::string &key, int rank, int size, uint64_t ring_bytes)
    : layout{size, ring_bytes}, peers(size), key_(key), owner_(getpid()), rank_(rank) {}

ShmBootstrap::~ShmBootstrap() {
    close_listener();
    if (memory_ >= 0) ::close(memory_);
    for (ShmPeer &peer : peers) {
        if (peer.bell >= 0) ::close(peer.bell);
        if (peer.process >= 0) ::close(peer.process);
    }
    if (peers[rank_].memory) {
        std::lock_guard<std::mutex> guard(registry_lock);
        registry().erase(path(rank_));
    }
}

bool ShmBootstrap::is_owner() const { return getpid() == owner_; }

bool ShmBootstrap::fail(const std::string &text) {
    if (error.empty()) error = "shared memory: " + text;
    return false;
}

bool ShmBootstrap::fail_errno(const std::string &what) { return fail(what + ": " + strerror(errno)); }

void ShmBootstrap::close_listener() {
    if (listener_ < 0) return;
    if (is_owner()) unlink(path(rank_).c_str());
    ::close(listener_);
    listener_ = -1;
}

bool ShmBootstrap::create() {
    if (layout.ring_bytes < SHM_SMALLEST_RING || (layout.ring_bytes & (layout.ring_bytes - 1)))
        return fail("expected rings of a power of two of at least " + std::to_string(SHM_SMALLEST_RING) +
                    " bytes, got " + std::to_string(layout.ring_bytes));
    sockaddr_un address;
    if (!address_of(path(peers.size() - 1), &address) || !address_of(path(rank_), &address))
        return fail("expected a key that makes paths of less than " + std::to_string(sizeof address.sun_path) +
                    " bytes, got '" + key_ + "'");
    memory_ = memfd_create("gpucomp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory_ < 0 || ftruncate(memory_, layout.total())) return fail_errno("creating it");
    // A rank that has mapped it would crash if it became shorter.
    if (fcntl(memory_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) return fail_errno("sealing it");
    auto mapping = std::make_shared<ShmMapping>(memory_, layout.total());
    if (!mapping->base) return fail_errno("mapping it");
    if (getrandom(&probe_, sizeof probe_, 0) != sizeof probe_) return fail_errno("random bytes");
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // The mode of the socket becomes that of the file. A file that exists makes bind fail.
    const auto *place = reinterpret_cast<sockaddr *>(&address);
    if (listener < 0 || fchmod(listener, 0600) || bind(listener, place, sizeof address)) {
        fail_errno("creating " + path(rank_));
        if (listener >= 0) ::close(listener);
        return false;
    }
    listener_ = listener;
    if (listen(listener_, peers.size())) return fail_errno("listening on " + path(rank_));
    peers[rank_].memory = mapping;
    peers[rank_].same_process = true;
    std::lock_guard<std::mutex> guard(registry_lock);
    registry()[path(rank_)] = mapping;
    return true;
}

bool ShmBootstrap::attach(int64_t timeout) {
    const int64_t deadline = now() + timeout;
    const int size = peers.size();
    // Connections complete before they are accepted, therefore no order of the ranks can block.
    for (int peer = 0; peer < rank_; ++peer)
        if (!connect_to(peer, deadline) || !send_hello(peers[peer].bell)) return false;
    for (connected_ = 0; connected_ < size - 1 - rank_;)
        if (!accept_one(deadline)) return false;
    for (int peer = 0; peer < rank_; ++peer) {
        const int connection = peers[peer].bell;
        if (!receive_hello(connection, deadline, peer)) return false;
    }
    close_listener();
    ::close(memory_);
    memory_ = -1;
    return true;
}

bool ShmBootstrap::connect_to(int peer, int64_t deadline) {
    sockaddr_un address;
    address_of(path(peer), &address);
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0) return fail_errno("a socket");
    peers[peer].bell = connection;
    const int64_t left = std::max<int64_t>(deadline - now(), 1000000);
    const timeval patience{left / 1000000000, left % 1000000000 / 1000};  // for a peer whose backlog is full
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    while (connect(connection, reinterpret_cast<sockaddr *>(&address), sizeof address)) {
        if (errno != EINTR) return fail_errno("connecting to rank " + std::to_string(peer) + " at " + path(peer));
    }
    return true;
}

bool ShmBootstrap::accept_one(int64_t deadline) {
    if (!wait_readable(listener_, deadline)) {
        std::string missing;
        for (int peer = rank_ + 1; peer < int(peers.size()); ++peer)
            if (!peers[peer].memory) missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
        return fail("expected all ranks in time, got no connection from: " + missing);
    }
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) return errno == EINTR || errno == ECONNABORTED || fail_errno("accepting a connection");
    if (!receive_hello(connection, deadline, -1)) {
        ::close(connection);
        return false;
    }
    ++connected_;
    return send_hello(connection);
}

bool ShmBootstrap::wait_readable(int descriptor, int64_t deadline) {
    for (;;) {
        const int64_t left = deadline - now();
        pollfd waiting{descriptor, POLLIN, 0};
        const int count = ::poll(&waiting, 1, left > 0 ? int(std::min<int64_t>(left / 1000000 + 1, 1000)) : 0);
        if (count > 0) return true;
        if ((count < 0 && errno != EINTR) || left <= 0) return false;
    }
}

bool ShmBootstrap::send_hello(int connection) {
    Hello hello{MAGIC, rank_, layout.size, layout.ring_bytes, reinterpret_cast<uint64_t>(&probe_), probe_};
    iovec part{&hello, sizeof hello};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &memory_, sizeof(int));
    // An empty socket buffer takes it whole.
    return sendmsg(connection, &message, MSG_NOSIGNAL) == sizeof hello || fail_errno("greeting a rank");
}

bool ShmBootstrap::receive_hello(int connection, int64_t deadline, int expected) {
    const std::string who = expected < 0 ? "a higher rank" : "rank " + std::to_string(expected);
    if (!wait_readable(connection, deadline)) return fail("expected a greeting of " + who + " in time, got none");
    Hello hello;
    iovec part{&hello, sizeof hello};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    ssize_t got;
    while ((got = recvmsg(connection, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
    }
    const cmsghdr *rights = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    int memory = -1;
    if (rights && rights->cmsg_type == SCM_RIGHTS) memcpy(&memory, CMSG_DATA(rights), sizeof memory);
    struct Closer {
        int descriptor;
        ~Closer() {
            if (descriptor >= 0) ::close(descriptor);
        }
    } closer{memory};
    if (got != sizeof hello || memory < 0 || hello.magic != MAGIC || (expected >= 0 && hello.rank != expected) ||
        (expected < 0 && (hello.rank <= rank_ || hello.rank >= layout.size || peers[hello.rank].memory)))
        return fail("expected a greeting of " + who + ", got " + std::to_string(got) + " bytes of another");
    if (hello.size != layout.size || hello.ring_bytes != layout.ring_bytes)
        return fail("expected " + std::to_string(layout.size) + " ranks and rings of " +
                    std::to_string(layout.ring_bytes) + " bytes, got " + std::to_string(hello.size) + " and " +
                    std::to_string(hello.ring_bytes) + " at rank " + std::to_string(hello.rank));
    struct stat status;
    const bool sealed = fcntl(memory, F_GET_SEALS) & F_SEAL_SHRINK;
    if (fstat(memory, &status) || uint64_t(status.st_size) != layout.total() || !sealed)
        return fail("expected " + std::to_string(layout.total()) + " bytes of rank " + std::to_string(hello.rank) +
                    " that cannot shrink, got others");

    ShmPeer &peer = peers[hello.rank];
    ucred who_is{};
    socklen_t length = sizeof who_is;
    getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who_is, &length);
    peer.pid = who_is.pid;
    peer.same_process = peer.pid == getpid();
    if (peer.same_process) {
        std::lock_guard<std::mutex> guard(registry_lock);
        const auto found = registry().find(path(hello.rank));
        if (found != registry().end()) peer.memory = found->second.lock();
        peer.same_process = bool(peer.memory);
    }
    if (!peer.memory) peer.memory = std::make_shared<ShmMapping>(memory, layout.total());
    if (!peer.memory->base) {
        peer.memory.reset();
        return fail_errno("mapping that of rank " + std::to_string(hello.rank));
    }
    if (peer.pid > 0 && !peer.same_process) {
        peer.process = int(syscall(SYS_pidfd_open, peer.pid, 0));
        uint64_t probe = 0;
        iovec local{&probe, sizeof probe}, remote{reinterpret_cast<void *>(hello.probe_address), sizeof probe};
        const ssize_t read = process_vm_readv(peer.pid, &local, 1, &remote, 1, 0);
        peer.readable = read == sizeof probe && probe == hello.probe;
    }
    peer.bell = connection;
    return true;
}

}  // namespace gpucomp
