// Token files and the loader: what is written is read, damage is named, every batch is the same whatever came before it.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

#include "files/checksum.h"
#include "gpt2/data/loader.h"
#include "gpt2/data/permutation.h"
#include "gpt2/data/token_file.h"
#include "gpt2/data/token_writer.h"
#include "gpt2/data/validation_draw.h"
#include "gpt2/error.h"
#include "temporary_folder.h"
#include "thrown.h"

namespace fattn::gpt2 {
namespace {

using test::thrown_by;

using test::TemporaryFolder;

// A stream as it was written: ids, the number of the document, whether a token is a target.
struct Stream {
  std::vector<int32_t> ids, documents;
  std::vector<bool> targets;
};

// Documents of random lengths, some with prompts, in files of about `shard` tokens.
Stream write(const std::string& folder, unsigned seed, int documents, uint64_t shard, uint32_t vocab = 1000) {
  std::mt19937 random(seed);
  TokenSetWriter writer(folder, {vocab, static_cast<Token>(vocab - 1), 77}, shard);
  Stream stream;
  const auto append = [&](size_t count, bool targets) {
    std::vector<Token> ids(count);
    for (Token& id : ids) id = static_cast<Token>(random() % (vocab - 1));
    writer.append(ids.data(), count, targets, 2 * count);
    stream.ids.insert(stream.ids.end(), ids.begin(), ids.end());
    stream.targets.insert(stream.targets.end(), count, targets);
  };
  for (int d = 0; d < documents; ++d) {
    if (random() % 3 == 0) append(random() % 30, false);
    append(1 + random() % (random() % 8 == 0 ? 200 : 20), true);
    writer.end_document();
    stream.ids.push_back(static_cast<int32_t>(vocab - 1));
    stream.targets.push_back(true);
    stream.documents.resize(stream.ids.size(), d);
  }
  writer.finish();
  EXPECT_EQ(writer.tokens(), stream.ids.size());
  EXPECT_EQ(writer.documents(), static_cast<uint64_t>(documents));
  return stream;
}

std::vector<int32_t> numbers_of(const Batch& b) {
  std::vector<int32_t> all;
  for (const int32_t* part : {b.ids, b.targets, b.positions, b.documents})
    if (part) all.insert(all.end(), part, part + b.sequences * b.seqlen);
  all.push_back(static_cast<int32_t>(b.target_count));
  return all;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_bytes(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

LoaderOptions options_of(int64_t sequences, int64_t seqlen, bool shuffle = true) {
  LoaderOptions o;
  o.sequences = sequences;
  o.seqlen = seqlen;
  o.shuffle = shuffle;
  o.seed = 5;
  o.vocab_size = 1000;
  return o;
}

TEST(Gpt2DataSmall, ChecksumsAreThoseOfTheSpecification) {
  EXPECT_EQ(files::xxh64("", 0), 0xef46db3751d8e999u);
  EXPECT_EQ(files::xxh64("a", 1), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(files::xxh64("abc", 3), 0x44bc2cf5ad770999u);
  const std::string text = "Nobody inspects the spammish repetition";
  EXPECT_EQ(files::xxh64(text.data(), text.size()), 0xfbcea83c8a378bf1u);
}

TEST(Gpt2DataSmall, PermutationsGiveEachNumberOnce) {
  for (const uint64_t n : {1, 2, 3, 5, 16, 17, 1000}) {
    std::set<uint64_t> seen;
    bool moved = false;
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t at = Permutation(n, 9)(i);
      EXPECT_LT(at, n);
      moved |= at != i;
      seen.insert(at);
    }
    EXPECT_EQ(seen.size(), n);
    EXPECT_TRUE(moved || n < 4);
  }
}

TEST(Gpt2DataSmall, ValidationHasItsShare) {
  for (const double share : {0.001, 0.05, 0.1, 0.3, 0.5})
    for (const uint64_t seed : {0, 1, 2}) {
      const ValidationDraw draw(share, seed);
      int drawn = 0;
      for (uint64_t i = 0; i < 10000; ++i) drawn += draw.has(i);
      EXPECT_NEAR(drawn, 10000 * share, share < 0.2 ? 2 : 10000 * share * 0.2) << share;
    }
  EXPECT_FALSE(ValidationDraw(0, 1).has(0));
}

TEST(Gpt2DataSmall, RowsInOrderAreTheStream) {
  for (const uint32_t vocab : {1000u, 100000u}) {  // ids of 2 and of 4 bytes
    for (const int64_t seqlen : {1, 7, 64, 300}) {
      const TemporaryFolder folder;
      const std::string path = (folder.path() / "set").string();
      const Stream s = write(path, 3, 60, 150, vocab);
      LoaderOptions o = options_of(4, seqlen, false);
      o.vocab_size = vocab;
      Loader loader({path}, o);
      const auto n = static_cast<int64_t>(s.ids.size());
      ASSERT_EQ(loader.tokens(), n);
      int64_t token = 0;
      for (int64_t b = 0; b < loader.batches_an_epoch(); ++b) {
        ASSERT_EQ(loader.position().batch, b);
        const Batch& batch = loader.next();
        int64_t targets = 0, later_documents = 0;
        for (int64_t i = 0; i < batch.sequences * seqlen; ++i, ++token) {
          const bool begins_row = i % seqlen == 0;
          targets += batch.targets[i] != -1;
          if (token >= n) {
            ASSERT_EQ(batch.targets[i], -1);
            continue;
          }
          const auto t = static_cast<size_t>(token);
          const bool goes_on = token + 1 < n && s.documents[t + 1] == s.documents[t],
                     new_document = token > 0 && s.documents[t - 1] != s.documents[t];
          ASSERT_EQ(batch.ids[i], s.ids[t]);
          ASSERT_EQ(batch.targets[i], goes_on && s.targets[t + 1] ? s.ids[t + 1] : -1) << token;
          ASSERT_EQ(batch.positions[i], begins_row || new_document ? 0 : batch.positions[i - 1] + 1);
          later_documents += !begins_row && new_document;
          if (batch.documents) {
            ASSERT_EQ(batch.documents[i], begins_row ? 0 : batch.documents[i - 1] + new_document);
          }
        }
        // Where every row is one document there are no numbers of them; what fills the last row up is a document, too.
        if (token <= n) {
          ASSERT_EQ(batch.documents != nullptr, later_documents > 0);
        }
        ASSERT_EQ(batch.target_count, targets);
      }
      ASSERT_GE(token, n);
      ASSERT_EQ(loader.position().epoch, 1);
    }
  }
}

TEST(Gpt2DataSmall, AnEpochHasEveryRowOnceAndTheNextOneInAnotherOrder) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string();
  const Stream s = write(path, 4, 50, 200);
  Loader loader({path}, options_of(3, 16));
  std::vector<int32_t> expected = s.ids, first;
  std::sort(expected.begin(), expected.end());
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<int32_t> ids, rows;
    for (int64_t b = 0; b < loader.batches_an_epoch(); ++b) {
      const Batch& batch = loader.next();
      ids.insert(ids.end(), batch.ids, batch.ids + 48);
    }
    if (epoch == 0)
      first = ids;
    else
      EXPECT_NE(ids, first);
    std::sort(ids.begin(), ids.end());
    EXPECT_TRUE(std::includes(ids.begin(), ids.end(), expected.begin(), expected.end()));  // and padding
  }
}

TEST(Gpt2DataSmall, EveryPositionGivesTheSameContinuation) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string();
  write(path, 5, 40, 100);
  const LoaderOptions o = options_of(2, 32);
  std::vector<std::vector<int32_t>> batches;
  std::vector<LoaderPosition> positions;
  Loader loader({path}, o);
  const int64_t count = 2 * loader.batches_an_epoch() + 2;
  for (int64_t b = 0; b < count; ++b) {
    positions.push_back(loader.position());
    batches.push_back(numbers_of(loader.next()));
  }
  for (size_t from = 0; from < batches.size(); ++from) {
    Loader again({path}, o, positions[from]);
    for (size_t b = from; b < std::min(batches.size(), from + 3); ++b) ASSERT_EQ(numbers_of(again.next()), batches[b]) << from << " " << b;
    EXPECT_EQ(again.fingerprint(), loader.fingerprint());
  }
}

// Three ranks have what one process has, batch by batch, over two epochs whose batches they do not divide.
TEST(Gpt2DataSmall, RanksTakeTurns) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string();
  write(path, 6, 40, 1000);
  LoaderOptions o = options_of(2, 15);
  Loader whole({path}, o);
  ASSERT_NE(whole.batches_an_epoch() % 3, 0);
  o.ranks = 3;
  std::vector<std::unique_ptr<Loader>> parts;
  for (o.rank = 0; o.rank < 3; ++o.rank) parts.push_back(std::make_unique<Loader>(std::vector<std::string>{path}, o));
  for (int64_t round = 0, begin = 0; round < 2 * (whole.batches_an_epoch() / 3 + 1); ++round) {
    for (int64_t rank = 0; rank < 3; ++rank) {
      Loader& part = *parts[static_cast<size_t>(rank)];
      EXPECT_EQ(part.batches_an_epoch(), whole.batches_an_epoch());
      begin = part.position().batch;
      const Batch& mine = part.next();
      if (begin + rank >= whole.batches_an_epoch()) {
        EXPECT_EQ(mine.target_count, 0);
        continue;
      }
      EXPECT_EQ(whole.position().batch, begin + rank);
      ASSERT_EQ(numbers_of(mine), numbers_of(whole.next())) << round << " " << rank;
    }
  }
  EXPECT_EQ(whole.position().epoch, 2);
}

TEST(Gpt2DataSmall, WhatCannotBeReadIsNamed) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string(), first = path + "/00000.tokens", second = path + "/00001.tokens";
  write(path, 7, 40, 300);
  const auto load = [&](const std::string& from, const LoaderOptions& o) { return thrown_by([&] { Loader({from}, o).next(); }); };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos ? "" : text; };
  EXPECT_EQ(has(load(path, options_of(1, 100000)), "less than one sequence of 100000"), "");
  EXPECT_EQ(has(load(folder.path().string() + "/none", options_of(1, 8)), "none"), "");
  EXPECT_EQ(has(load(folder.path().string(), options_of(1, 8)), "has no token files"), "");
  LoaderOptions small = options_of(1, 8);
  small.vocab_size = 500;
  EXPECT_EQ(has(load(path, small), "00000.tokens' has the id 999 as its token number"), "");
  EXPECT_EQ(has(thrown_by([&] { Loader({path}, options_of(1, 8), {0, 1 << 20}); }), "there is no batch 1048576"), "");
  const std::string whole = bytes_of(first);
  std::string damaged = whole;
  damaged[40] = static_cast<char>(damaged[40] ^ 4);
  write_bytes(first, damaged);
  EXPECT_EQ(has(load(path, options_of(1, 8)), "00000.tokens' is damaged: bytes 0 to"), "");
  write_bytes(first, whole.substr(0, whole.size() - 1));
  EXPECT_EQ(has(load(path, options_of(1, 8)), "00000.tokens'"), "");
  write_bytes(first, "text");
  EXPECT_EQ(has(load(path, options_of(1, 8)), "is no token file"), "");
  std::filesystem::remove(first);
  EXPECT_EQ(has(load(path, options_of(1, 8)), "lacks its file number 0"), "");
  write_bytes(first, whole);
  for (const auto& entry : std::filesystem::directory_iterator(path))
    if (entry.path() != first && entry.path() != second) std::filesystem::remove(entry.path());
  EXPECT_EQ(has(load(path, options_of(1, 8)), "lacks the last of its files"), "");
  // Another vocabulary.
  TokenSetWriter other((folder.path() / "other").string(), {1000, 0, 78}, 100);
  const Token id = 1;
  other.append(&id, 1, true, 1);
  other.finish();
  EXPECT_EQ(has(thrown_by([&] { Loader({first, (folder.path() / "other").string()}, options_of(1, 8)); }), "another tokenizer"), "");
}

TEST(Gpt2DataSmall, EveryBitThatIsTurnedIsFound) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string(), file = path + "/00000.tokens";
  write(path, 8, 5, 1 << 20);
  const std::string whole = bytes_of(file);
  const auto check = [&] { return thrown_by([&] { TokenFile(file).check_all(); }); };
  EXPECT_EQ(check(), "nothing was thrown");
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
    write_bytes(file, damaged);
    ASSERT_NE(check(), "nothing was thrown") << "byte " << at << " of " << whole.size();
  }
}

TEST(Gpt2Data, LoadsFasterThanAnythingLearns) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "set").string();
  TokenSetWriter writer(path, {1000, 0, 1}, 1 << 30);
  std::vector<Token> ids(700, 5);
  for (int d = 0; d < 40000; ++d) {
    writer.append(ids.data(), ids.size(), true, ids.size());
    writer.end_document();
  }
  writer.finish();
  Loader loader({path}, options_of(32, 1024));
  loader.next();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t b = 1; b < loader.batches_an_epoch(); ++b) loader.next();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const double rate = 2 * static_cast<double>(loader.tokens()) / seconds / 1e6;
  RecordProperty("megabytes_a_second", static_cast<int>(rate));
  std::printf("%.0f MB/s of tokens\n", rate);
  EXPECT_GT(rate, 20);  // 200 and more on a quiet processor; one that is shared may take any time
}

}  // namespace
}  // namespace fattn::gpt2
