// Sums over processes and exchanges between them by NCCL on GPUs, a process each: right, alike on all, beside other work; a process that is gone ends
// the others' wait by an error.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "fattn/device.hpp"
#include "in_child.h"
#include "ops/process_sum.h"

namespace {

using namespace fattn;

struct Gone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The parent never starts CUDA, which no child could use then.
int gpus() {
  return std::stoi(test::in_child({}, [] { return std::to_string(cuda::count()); }));
}

float value(int rank, int64_t i) { return static_cast<float>((i * 37 + rank * 11) % 101) / 8; }  // sums of these are exact

// Runs `body(rank, id)` in a process a rank; what each returns.
template <class Body>
std::vector<std::string> in_processes(int ranks, const Body& body) {
  int channel[2];  // of NCCL's id
  if (pipe(channel) != 0) throw std::runtime_error("no pipe");
  auto answers = test::in_children(ranks, [&](int rank) -> std::string {
    try {
      std::vector<std::byte> id(ops::ProcessSum::kIdBytes);
      if (rank == 0) id = ops::ProcessSum::new_id();
      const auto bytes = static_cast<ssize_t>(id.size());
      for (int i = 1; rank == 0 && i < ranks; ++i)
        if (write(channel[1], id.data(), id.size()) != bytes) return "no id";
      if (rank > 0 && read(channel[0], id.data(), id.size()) != bytes) return "no id";
      return body(rank, id);
    } catch (const std::exception& e) {
      return e.what();
    }
  });
  close(channel[0]);
  close(channel[1]);
  return answers;
}

ops::Device device_of(int rank) {
  ops::Device device;
  device.place = ops::Place::kCuda;
  device.gpu = rank;
  return device;
}

// Sums of parts of one array, several times over; says what is wrong first.
std::string sum_parts(int rank, int ranks, const std::vector<std::byte>& id) {
  constexpr int64_t kNumbers = (1 << 22) + 5;
  ops::ProcessSum sum(device_of(rank), {id, rank, ranks, [] {}});
  const cuda::Stream stream(rank);
  cuda::Buffer buffer(rank, kNumbers * sizeof(float));
  std::vector<float> host(kNumbers);
  for (int round = 0; round < 3; ++round) {
    for (int64_t i = 0; i < kNumbers; ++i) host[static_cast<size_t>(i)] = value(rank, i + round);
    buffer.copy_from(host.data(), host.size() * sizeof(float), stream.get());
    auto* x = static_cast<float*>(buffer.get());
    const int64_t ends[] = {kNumbers, 3'000'001, 1'000'000, 7, 0};  // from behind, as a backward pass goes
    for (int part = 0; part < 4; ++part) sum.begin(x + ends[part + 1], ends[part] - ends[part + 1], stream.get());
    sum.finish(stream.get());
    buffer.copy_to(host.data(), host.size() * sizeof(float), stream.get());
    for (int64_t i = 0; i < kNumbers; ++i) {
      float expected = 0;
      for (int r = 0; r < ranks; ++r) expected += value(r, i + round);
      if (!(host[static_cast<size_t>(i)] == expected)) return "round " + std::to_string(round) + ", number " + std::to_string(i);
    }
  }
  return "fine";
}

TEST(ProcessSumGpu, OneProcess) {
  if (gpus() < 1) GTEST_SKIP() << "there is no GPU";
  EXPECT_EQ(in_processes(1, [](int rank, const auto& id) { return sum_parts(rank, 1, id); }), std::vector<std::string>{"fine"});
}

TEST(ProcessSumGpu, TwoProcesses) {
  if (gpus() < 2) GTEST_SKIP() << "there are less than two GPUs";
  EXPECT_EQ(in_processes(2, [](int rank, const auto& id) { return sum_parts(rank, 2, id); }), (std::vector<std::string>{"fine", "fine"}));
}

// Exchanges between sums, begun before the ones before are finished: each comes, in the order in which they were begun, and no sum is disturbed.
std::string exchange_between_sums(int rank, const std::vector<std::byte>& id) {
  constexpr int64_t kNumbers = 1 << 20, kParts = 4, kPart = kNumbers / kParts;
  const int peer = 1 - rank;
  ops::ProcessSum sum(device_of(rank), {id, rank, 2, [] {}});
  const cuda::Stream stream(rank);
  cuda::Buffer summed(rank, kNumbers * sizeof(float)), sent(rank, kNumbers * sizeof(float)), received(rank, kNumbers * sizeof(float));
  std::vector<float> host(kNumbers);
  const auto at = [](const cuda::Buffer& buffer, int64_t part) { return static_cast<float*>(buffer.get()) + part * kPart; };
  for (int round = 0; round < 3; ++round) {
    for (int64_t i = 0; i < kNumbers; ++i) host[static_cast<size_t>(i)] = value(rank, i + round);
    summed.copy_from(host.data(), host.size() * sizeof(float), stream.get());
    sent.copy_from(host.data(), host.size() * sizeof(float), stream.get());
    for (int64_t part = 0; part < kParts; ++part) {
      sum.begin(at(summed, part), kPart, stream.get());
      sum.begin_exchange({{at(sent, part), kPart * sizeof(float), peer, 1}, {at(received, kParts - 1 - part), kPart * sizeof(float), peer, 0}},
                         stream.get());
      if (part == 1) sum.begin_exchange({}, stream.get());  // with nobody
      if (part > 0) sum.finish_exchange(stream.get());
    }
    sum.finish_exchange(stream.get());
    sum.finish_exchange(stream.get());
    sum.settle();
    received.copy_to(host.data(), host.size() * sizeof(float), stream.get());
    for (int64_t i = 0; i < kNumbers; ++i)
      if (!(host[static_cast<size_t>((kParts - 1 - i / kPart) * kPart + i % kPart)] == value(peer, i + round)))
        return "round " + std::to_string(round) + ", received number " + std::to_string(i);
    sum.finish(stream.get());
    summed.copy_to(host.data(), host.size() * sizeof(float), stream.get());
    for (int64_t i = 0; i < kNumbers; ++i)
      if (!(host[static_cast<size_t>(i)] == value(0, i + round) + value(1, i + round)))
        return "round " + std::to_string(round) + ", summed number " + std::to_string(i);
  }
  try {
    sum.finish_exchange(stream.get());
  } catch (const Error&) {
    return "fine";
  }
  return "an exchange that was not begun is finished";
}

TEST(ProcessSumGpu, ExchangesBetweenSums) {
  if (gpus() < 2) GTEST_SKIP() << "there are less than two GPUs";
  EXPECT_EQ(in_processes(2, exchange_between_sums), (std::vector<std::string>{"fine", "fine"}));
}

TEST(ProcessSumGpu, OneThatIsGoneEndsTheWait) {
  if (gpus() < 2) GTEST_SKIP() << "there are less than two GPUs";
  const auto answers = in_processes(2, [](int rank, const auto& id) -> std::string {
    const auto begin = std::chrono::steady_clock::now();
    bool waits = false;
    const auto alive = [&] {
      if (waits && std::chrono::steady_clock::now() - begin > std::chrono::seconds(8)) throw Gone("rank 1 is gone");
    };
    ops::ProcessSum sum(device_of(rank), {id, rank, 2, alive});
    const cuda::Stream stream(rank);
    cuda::Buffer buffer(rank, 4096);
    auto* x = static_cast<float*>(buffer.get());
    sum.begin(x, 1024, stream.get());
    sum.finish(stream.get());
    if (rank == 1) std::raise(SIGKILL);
    sum.begin(x, 1024, stream.get());
    waits = true;
    sum.finish(stream.get());
    return "the sum of one";
  });
  EXPECT_EQ(answers[1], "");
  EXPECT_NE(answers[0], "");
  EXPECT_NE(answers[0], "the sum of one");
}

TEST(ProcessSumGpu, WrongUseIsNamed) {
  if (gpus() < 1) GTEST_SKIP() << "there is no GPU";
  const std::string said = test::in_child({}, [] {
    try {
      const ops::ProcessSum sum(device_of(0), {std::vector<std::byte>(5), 0, 1, [] {}});
      return std::string("taken");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  });
  EXPECT_NE(said.find("128 bytes"), std::string::npos) << said;
}

}  // namespace
