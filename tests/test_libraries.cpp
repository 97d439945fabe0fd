// OpenBLAS opened at run time: found, missing, not an OpenBLAS; its thread count is put back.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "cpu/openblas.h"
#include "device/dynamic_library.h"
#include "fattn/fattn.hpp"
#include "in_child.h"

namespace {

using fattn::core::DynamicLibrary;
using fattn::core::OneBlasThread;
using fattn::core::openblas;

// Runs `body` in a child with FATTN_OPENBLAS set, and returns what it returns. The library is opened once in a process,
// so every test has a process of its own and the parent never opens it.
template <class Body>
std::string in_child(const char* openblas_setting, const Body& body) {
  return fattn::test::in_child({{"FATTN_OPENBLAS", openblas_setting}}, body);
}

std::string reason() { return openblas() ? "opened " + openblas().path : openblas().reason; }

void expect_contains(const std::string& text, const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << "in: " << text; }

TEST(OpenBlas, FoundByDefault) {
  const std::string answer = in_child(nullptr, reason);
  EXPECT_EQ(answer.rfind("opened /", 0), 0u) << answer;
}

TEST(OpenBlas, PathThatIsGivenIsOpened) {
  const std::string found = in_child(nullptr, [] { return openblas().path; });
  EXPECT_EQ(in_child(found.c_str(), reason), "opened " + found);
}

TEST(OpenBlas, MissingFileSaysWhatToDo) {
  const std::string answer = in_child("/nonexistent/libopenblas.so", reason);
  expect_contains(answer, "/nonexistent/libopenblas.so");
  expect_contains(answer, "apt install libopenblas0-pthread");
  expect_contains(answer, "FATTN_OPENBLAS");
}

TEST(OpenBlas, RelativePathIsRefused) { expect_contains(in_child("./libopenblas.so.0", reason), "a relative path is not opened"); }

TEST(OpenBlas, LibraryWithoutTheFunctions) { expect_contains(in_child("libm.so.6", reason), "it has no function cblas_sgemm"); }

TEST(OpenBlas, StandardIsUnsupportedWithoutIt) {
  const std::string answer = in_child("/nonexistent", [] {
    float x[4] = {};
    const fattn::Tensor t(x, fattn::DType::kF32, {1, 1, 1, 4});
    fattn::Options options;
    options.backend = fattn::Backend::kCpu;
    options.algorithm = fattn::Algorithm::kStandard;
    const fattn::Support support = fattn::supported(fattn::describe(fattn::ForwardTensors{t, t, t, t, {}, {}}, options));
    return support ? std::string("supported") : support.reason;
  });
  expect_contains(answer, "algorithm standard on the CPU needs OpenBLAS");
  expect_contains(answer, "apt install");
}

TEST(OpenBlas, StatusIsListed) {
  const std::string answer = in_child("/nonexistent", [] {
    const auto all = fattn::libraries();
    return all.empty() ? std::string("none") : std::string(all[0].name) + (all[0].loaded ? " loaded " : " missing ") + all[0].reason;
  });
  expect_contains(answer, "OpenBLAS missing ");
  expect_contains(in_child(nullptr,
                           [] {
                             const auto all = fattn::libraries();
                             return all.empty() ? std::string("none") : std::string(all[0].path) + (all[0].loaded ? " loaded" : " missing");
                           }),
                  "libopenblas");
}

// The count of the process is 1 while an object lives and what it was before afterwards, nested and in a forked child.
TEST(OpenBlas, ThreadCountIsPutBack) {
  const auto counts = [] {
    const auto& blas = openblas();
    if (!blas) return blas.reason;
    std::string seen;
    const auto note = [&] { seen += std::to_string(blas.get_num_threads()) + " "; };
    blas.set_num_threads(2);
    {
      const OneBlasThread outer(blas);
      note();
      {
        const OneBlasThread inner(blas);
        note();
      }
      note();
      // The user of the parent does not exist in the child.
      seen += in_child(nullptr, [&] {
        { const OneBlasThread one(blas); }
        return std::to_string(blas.get_num_threads());
      });
      seen += " ";
    }
    note();
    return seen;
  };
  EXPECT_EQ(in_child(nullptr, counts), "1 1 1 2 2 ");
}

TEST(OpenBlas, OpenedOnceFromSeveralThreads) {
  const std::string answer = in_child(nullptr, [] {
    const fattn::core::OpenBlas* seen[4] = {};
    std::thread threads[4];
    for (int i = 0; i < 4; ++i) threads[i] = std::thread([&seen, i] { seen[i] = &openblas(); });
    for (std::thread& t : threads) t.join();
    for (const auto* s : seen)
      if (s != seen[0] || !*s) return std::string("differs");
    return std::string("same");
  });
  EXPECT_EQ(answer, "same");
}

TEST(DynamicLibrary, FunctionsAndFiles) {
  const DynamicLibrary libm("libm.so.6");
  ASSERT_TRUE(libm) << libm.reason();
  const auto cosine = libm.function<double (*)(double)>("cos");
  ASSERT_NE(cosine, nullptr);
  EXPECT_EQ(cosine(0.0), 1.0);
  EXPECT_EQ(libm.function<void (*)()>("fattn_no_such_function"), nullptr);
  expect_contains(libm.file_of("cos"), "libm");
  EXPECT_EQ(libm.file_of("fattn_no_such_function"), "");
}

}  // namespace
