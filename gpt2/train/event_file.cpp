// The messages are protocol buffers of a few fields, written by hand: Event {1 wall_time: double, 2 step: int64, 3 file_version: string, 5 summary,
// 7 session_log}, Summary {1 value: repeated {1 tag: string, 2 simple_value: float}}, SessionLog {1 status: START = 1}.
#include "gpt2/train/event_file.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "files/printable.h"

namespace fattn::gpt2 {
namespace {

enum Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::array<uint32_t, 256> table_of_crc() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

template <class T>
void append_raw(std::string& to, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);  // little endian, as everything here
  to.append(bytes, sizeof value);
}
void append_varint(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>((value & 0x7f) | 0x80);
  to += static_cast<char>(value);
}
void append_key(std::string& to, unsigned field, Wire wire) { append_varint(to, field << 3 | static_cast<unsigned>(wire)); }
void append_bytes(std::string& to, unsigned field, const std::string& bytes) {
  append_key(to, field, kBytes);
  append_varint(to, bytes.size());
  to += bytes;
}

std::string event_at(int64_t step) {
  std::string event;
  append_key(event, 1, kFixed64);
  append_raw(event, std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  append_key(event, 2, kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  return event;
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  static const std::array<uint32_t, 256> table = table_of_crc();
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < bytes; ++i) crc = table[(crc ^ at[i]) & 0xff] ^ crc >> 8;
  return ~crc;
}

EventFile::EventFile(const std::string& folder, int64_t after) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw std::runtime_error("the folder '" + files::printable(folder) + "' cannot be made: " + error.message());
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  for (int attempt = 0; !file_; ++attempt) {
    path_ = (fs::path(folder) / ("events.out.tfevents." + std::to_string(now) + ".fattn." + std::to_string(getpid()) + "." + std::to_string(attempt)))
                .string();
    file_ = std::fopen(path_.c_str(), "wbex");
    if (!file_ && (errno != EEXIST || attempt == 100))
      throw std::runtime_error("'" + files::printable(path_) + "' cannot be created: " + std::strerror(errno));
  }
  std::string first = event_at(0);
  append_bytes(first, 3, "brain.Event:2");
  record(first);
  std::string started, log = event_at(after + 1);
  append_key(started, 1, kVarint);
  append_varint(started, 1);
  append_bytes(log, 7, started);
  record(log);
  flush();
}

EventFile::~EventFile() { std::fclose(file_); }

void EventFile::scalar(const std::string& tag, int64_t step, double value) {
  if (!std::isfinite(value)) return;
  std::string one, summary, event = event_at(step);
  append_bytes(one, 1, tag);
  append_key(one, 2, kFixed32);
  append_raw(one, static_cast<float>(value));
  append_bytes(summary, 1, one);
  append_bytes(event, 5, summary);
  record(event);
}

void EventFile::record(const std::string& event) {
  std::string framed;
  append_raw(framed, static_cast<uint64_t>(event.size()));
  append_raw(framed, masked(crc32c(framed.data(), framed.size())));
  framed += event;
  append_raw(framed, masked(crc32c(event.data(), event.size())));
  if (std::fwrite(framed.data(), 1, framed.size(), file_) != framed.size())
    throw std::runtime_error("'" + files::printable(path_) + "' cannot be written: " + std::strerror(errno));
}

void EventFile::flush() {
  if (std::fflush(file_) != 0) throw std::runtime_error("'" + files::printable(path_) + "' cannot be written: " + std::strerror(errno));
}

}  // namespace fattn::gpt2
