// Messages between the processes of a run, over TCP: each with its kind and its length, which is checked before anything is read for it. Sockets
// never block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace fattn::gpt2 {

enum class MessageKind : uint16_t {
  kHello = 1,    // who comes, and with what
  kWelcome = 2,  // rank 0's answer, once all are there
  kBeat = 3,     // still there, and what is being done
  kPart = 4,     // a rank's part of an exchange
  kWhole = 5,    // all parts of it
  kFailed = 6,   // the run has failed, in words
  kBye = 7       // an end as it should be
};

struct Message {
  MessageKind kind = MessageKind::kBeat;
  std::string text;  // bytes
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : fd_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// Listens at that address alone. Port 0: a free one. Throws Error: no such host, no address of this machine, the port is taken.
Socket listen_at(const std::string& host, int port);
int port_of(const Socket& socket);

// One try; none: nobody listens there (yet), `reason` says why. Throws Error where there is no such host.
Socket connect_to(const std::string& host, int port, std::string& reason);
// Null where nobody waits.
Socket accept_from(const Socket& listener);

class Connection {
 public:
  explicit Connection(Socket socket) : socket_(std::move(socket)) {}

  int descriptor() const { return socket_.get(); }
  bool closed() const { return !socket_; }
  void close() { socket_.close(); }
  bool has_to_send() const { return sent_ < out_.size(); }

  // Before it, only short messages are taken: whoever is on the other side has not said who it is.
  void trust() { trusted_ = true; }
  void send(MessageKind kind, const std::string& text);
  // Sends and reads what goes without waiting. False: the other side has closed; what it said before is still there.
  bool work();
  // The next whole message. Throws Error where the bytes are none of ours.
  std::optional<Message> next();

 private:
  Socket socket_;
  std::string in_, out_;
  size_t sent_ = 0;
  bool trusted_ = false;
};

}  // namespace fattn::gpt2
