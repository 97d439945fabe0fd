// That all ranks were called with the same: a small exchange before anything else is sent (fattn/ring.hpp).
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fattn/device.hpp"
#include "fattn/ring_transport.hpp"
#include "fattn/types.hpp"

namespace fattn::detail {

using RingFacts = std::vector<std::pair<std::string, std::string>>;  // {"seqlen_q", "512"}

// Throws kInvalidArgument, on all ranks, with the first fact that differs from rank 0's and the rank that has it.
inline void agree(RingTransport& transport, const RingFacts& facts, void* stream = nullptr) {
  constexpr size_t kBytes = 1024;  // what is longer is compared so far
  const auto ranks = static_cast<size_t>(transport.ranks()), rank = static_cast<size_t>(transport.rank());
  if (ranks == 1) return;
  std::string mine;
  for (const auto& [name, value] : facts) mine += name + "=" + value + '\n';
  std::vector<char> host(ranks * kBytes);
  std::memcpy(host.data() + rank * kBytes, mine.data(), mine.size() < kBytes ? mine.size() : kBytes - 1);
  cuda::Buffer buffer;
  char* all = host.data();
  if (transport.device() == Device::kCuda) {
    buffer = cuda::Buffer(transport.device_index(), host.size());
    buffer.copy_from(host.data(), host.size(), stream);
    all = static_cast<char*>(buffer.get());
  }
  std::vector<RingPiece> pieces;
  for (size_t r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    pieces.push_back({all + rank * kBytes, kBytes, static_cast<int>(r), true});
    pieces.push_back({all + r * kBytes, kBytes, static_cast<int>(r), false});
  }
  transport.begin(pieces, stream);
  transport.finish(stream);
  transport.settle();
  if (transport.device() == Device::kCuda) buffer.copy_to(host.data(), host.size(), stream);
  const auto text_of = [&](size_t r) { return std::string(host.data() + r * kBytes, strnlen(host.data() + r * kBytes, kBytes)); };
  const std::string first = text_of(0);
  for (size_t r = 1; r < ranks; ++r) {
    const std::string other = text_of(r);
    if (other == first) continue;
    size_t begin = 0, at = 0;  // of the fact in which they differ
    for (; at < first.size() && at < other.size() && first[at] == other[at]; ++at)
      if (first[at] == '\n') begin = at + 1;
    const auto fact = [&](const std::string& text) { return text.substr(begin, text.find('\n', begin) - begin); };
    const std::string here = fact(first), there = fact(other), name = here.substr(0, here.find('='));
    throw Error(ErrorCode::kInvalidArgument, name + " is " + there.substr(there.find('=') + 1) + " on rank " + std::to_string(r) + " and " +
                                                 here.substr(here.find('=') + 1) + " on rank 0; all ranks must plan the same ring attention");
  }
}

}  // namespace fattn::detail
