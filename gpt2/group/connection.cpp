#include "gpt2/group/connection.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

using files::printable;

// In front of each message, as it lies in memory: all machines that fattn runs on are little-endian.
struct Head {
  uint32_t magic = 0x47544146;  // "FATG"
  uint16_t kind = 0;
  uint16_t version = 1;
  uint32_t bytes = 0;
};
static_assert(sizeof(Head) == 12);

constexpr uint32_t kMost = 16u << 20;  // bytes of a message
constexpr uint32_t kMostOfStrangers = 4096;
constexpr int kConnecting = 2000;  // milliseconds that a try may take

std::string place(const std::string& host, int port) { return "'" + printable(host, 200) + "', port " + std::to_string(port); }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses addresses_of(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;  // IPv4 and IPv6
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0)
    throw Error("where the processes of the run meet cannot be found: '" + printable(host, 200) + "': " + gai_strerror(status) +
                "; give an address or a name that this machine knows (MASTER_ADDR, --rendezvous)");
  return {found, &freeaddrinfo};
}

void prepare(int fd) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);  // messages are small and waited for
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
}

}  // namespace

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}
void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Socket listen_at(const std::string& host, int port) {
  int reason = 0;
  const Addresses all = addresses_of(host, port, 0);
  for (const addrinfo* at = all.get(); at; at = at->ai_next) {
    Socket socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) {
      reason = errno;
      continue;
    }
    const int yes = 1;
    setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0 && listen(socket.get(), SOMAXCONN) == 0) {
      prepare(socket.get());
      return socket;
    }
    if (reason != EADDRINUSE) reason = errno;
  }
  const std::string begin = "rank 0 cannot listen at " + place(host, port) + ": ";
  if (reason == EADDRINUSE) throw Error(begin + "the port is taken, perhaps by another run; choose another MASTER_PORT, or --rendezvous FILE");
  if (reason == EADDRNOTAVAIL) throw Error(begin + "that is no address of this machine; give the one of the machine that runs rank 0");
  throw Error(begin + std::strerror(reason));
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Socket connect_to(const std::string& host, int port, std::string& reason) {
  const Addresses all = addresses_of(host, port, 0);
  for (const addrinfo* at = all.get(); at; at = at->ai_next) {
    Socket socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) continue;
    prepare(socket.get());
    int error = connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd waiting{socket.get(), POLLOUT, 0};
      socklen_t size = sizeof error;
      if (poll(&waiting, 1, kConnecting) <= 0)
        error = ETIMEDOUT;
      else if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        error = errno;
    }
    if (error == 0) return socket;
    reason = std::strerror(error);
  }
  return Socket();
}

Socket accept_from(const Socket& listener) {
  Socket socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) prepare(socket.get());
  return socket;
}

void Connection::send(MessageKind kind, const std::string& text) {
  if (closed()) return;
  Head head;
  head.kind = static_cast<uint16_t>(kind);
  head.bytes = static_cast<uint32_t>(text.size());
  out_.erase(0, std::exchange(sent_, 0));
  out_.append(reinterpret_cast<const char*>(&head), sizeof head).append(text);
}

bool Connection::work() {
  if (closed()) return false;
  while (has_to_send()) {
    const ssize_t n = ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0) break;  // reading says that it is closed, behind what was said before
    sent_ += static_cast<size_t>(n);
  }
  char part[65536];
  for (;;) {
    const ssize_t n = recv(socket_.get(), part, sizeof part, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n <= 0) return false;
    in_.append(part, static_cast<size_t>(n));
    if (in_.size() > sizeof(Head) + kMost) return true;  // next() takes it, or refuses it
  }
}

std::optional<Message> Connection::next() {
  Head head;
  if (in_.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, in_.data(), sizeof head);
  if (head.magic != Head().magic) throw Error("what came over the socket is no message of fattn");
  if (head.version != Head().version) throw Error("a message of version " + std::to_string(head.version) + "; this fattn knows version 1");
  if (head.bytes > (trusted_ ? kMost : kMostOfStrangers) || head.kind < static_cast<uint16_t>(MessageKind::kHello) ||
      head.kind > static_cast<uint16_t>(MessageKind::kBye))
    throw Error("a message of kind " + std::to_string(head.kind) + " with " + std::to_string(head.bytes) + " bytes; fattn sends none such");
  if (in_.size() < sizeof head + head.bytes) return std::nullopt;
  Message message{static_cast<MessageKind>(head.kind), in_.substr(sizeof head, head.bytes)};
  in_.erase(0, sizeof head + head.bytes);
  return message;
}

}  // namespace fattn::gpt2
