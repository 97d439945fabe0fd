// Of the stand-in for NCCL: bytes between any two processes, over sockets that are made when they are wanted.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct StubPiece {
  void* data;
  size_t bytes;
  int peer;
  bool sent;
};

inline bool transfer(int socket, void* data, size_t bytes, bool send_it) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t n = send_it ? send(socket, at, bytes, MSG_NOSIGNAL) : recv(socket, at, bytes, 0);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// A name of no file.
inline sockaddr_un socket_address(const std::string& name, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = name.size() < sizeof address.sun_path - 2 ? name.size() : sizeof address.sun_path - 2;
  std::memcpy(address.sun_path + 1, name.data(), length);
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

class StubPeers {
 public:
  bool listen_as(const std::string& group, int rank) {
    group_ = group;
    rank_ = rank;
    socklen_t size = 0;
    const sockaddr_un address = socket_address(group + "-r" + std::to_string(rank), size);
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) == 0 && listen(listener_, 64) == 0;
  }

  // Every peer and direction has a thread, as the library's transfers go on beside each other.
  bool exchange(const std::vector<StubPiece>& pieces) {
    std::map<std::pair<int, bool>, std::vector<StubPiece>> by_peer;
    for (const StubPiece& p : pieces) by_peer[{p.peer, p.sent}].push_back(p);
    std::atomic<bool> fine{true};
    std::vector<std::thread> threads;
    for (const auto& item : by_peer)
      threads.emplace_back([this, &fine, &item] {
        const int socket = item.first.second ? connection_to(item.first.first) : connection_from(item.first.first);
        bool all = socket >= 0;
        for (size_t i = 0; all && i < item.second.size(); ++i) all = transfer(socket, item.second[i].data, item.second[i].bytes, item.second[i].sent);
        if (!all) fine = false;
      });
    for (std::thread& thread : threads) thread.join();
    return fine;
  }

  // Whoever waits comes back.
  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    for (const auto* sockets : {&to_, &from_})
      for (const auto& [peer, socket] : *sockets) shutdown(socket, SHUT_RDWR);
  }
  ~StubPeers() {
    for (const auto* sockets : {&to_, &from_})
      for (const auto& [peer, socket] : *sockets) close(socket);
    if (listener_ >= 0) close(listener_);
  }

 private:
  int connection_to(int peer) {
    const std::lock_guard lock(mutex_);
    if (ended_) return -1;
    if (const auto found = to_.find(peer); found != to_.end()) return found->second;
    socklen_t size = 0;
    const sockaddr_un address = socket_address(group_ + "-r" + std::to_string(peer), size);
    const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(made, reinterpret_cast<const sockaddr*>(&address), size) != 0 || !transfer(made, &rank_, sizeof rank_, true)) {
      close(made);
      return -1;
    }
    return to_[peer] = made;
  }
  int connection_from(int peer) {
    for (;;) {
      const std::lock_guard lock(mutex_);
      if (ended_) return -1;
      if (const auto found = from_.find(peer); found != from_.end()) return found->second;
      pollfd waiting{listener_, POLLIN, 0};
      if (poll(&waiting, 1, 5) <= 0) continue;
      const int socket = accept(listener_, nullptr, nullptr);
      int who = -1;
      if (socket < 0 || !transfer(socket, &who, sizeof who, false)) return -1;
      from_[who] = socket;
    }
  }

  std::string group_;
  int rank_ = 0, listener_ = -1;
  std::mutex mutex_;
  std::map<int, int> to_, from_;
  bool ended_ = false;
};
