// GPT-2's tokenizer on vocabularies made here: merges against the plain way, texts in parts, what is no UTF-8. Hugging Face's ids: tests/python.
#include <gtest/gtest.h>

#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/tokenizer/merge.h"
#include "gpt2/tokenizer/splitter.h"
#include "gpt2/tokenizer/tokenizer.h"
#include "gpt2/tokenizer/utf8.h"
#include "gpt2/tokenizer/vocabulary_files.h"
#include "thrown.h"

namespace fattn::gpt2 {
namespace {

using test::thrown_by;

// All bytes, and merges of random pairs of tokens over the letters a, b, c and a space; ids are scattered.
VocabularySource random_source(unsigned seed, size_t merges) {
  std::mt19937 random(seed);
  VocabularySource source;
  std::vector<std::string> names;
  for (int byte = 0; byte < 256; ++byte) source.tokens.push_back({std::string(1, static_cast<char>(byte)), (byte * 77) % 256});
  const auto id_of = [&](const std::string& bytes) {
    for (const SourceToken& token : source.tokens)
      if (token.bytes == bytes) return token.id;
    return Token{-1};
  };
  names = {"a", "b", "c", " "};
  while (source.merges.size() < merges) {
    const std::string left = names[random() % names.size()], right = names[random() % names.size()];
    if (left.size() + right.size() > 9 || right[0] == ' ' || id_of(left + right) >= 0) continue;
    const auto id = static_cast<Token>(source.tokens.size());
    source.tokens.push_back({left + right, id});
    source.merges.push_back({id_of(left), id_of(right), id, static_cast<uint32_t>(source.merges.size())});
    names.push_back(left + right);
  }
  return source;
}

// As the algorithm is written down.
std::vector<Token> merged_plainly(const VocabularySource& source, const std::string& piece) {
  std::vector<Token> ids;
  for (const char c : piece) ids.push_back((static_cast<uint8_t>(c) * 77) % 256);
  for (;;) {
    const Merge* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (const Merge& merge : source.merges)
        if (merge.left == ids[i] && merge.right == ids[i + 1] && (!best || merge.rank < best->rank)) {
          best = &merge;
          at = i;
        }
    if (!best) return ids;
    ids[at] = best->result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(Gpt2TokenizerSmall, MergesAreThoseOfThePlainWay) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const VocabularySource source = random_source(seed, 40);
    const Vocabulary vocabulary(source);
    Merger merger(vocabulary);
    std::mt19937 random(seed);
    for (const size_t length : {1, 2, 3, 7, 30, 95, 96, 97, 98, 150}) {  // the heap begins above 96
      std::string piece;
      for (size_t i = 0; i < length; ++i) piece += "abc"[random() % (seed % 3 + 1)];
      std::vector<Token> ids = {-5};
      merger.merge(piece, ids);
      ASSERT_EQ(ids[0], -5);
      ids.erase(ids.begin());
      ASSERT_EQ(ids, merged_plainly(source, piece)) << piece;
    }
  }
}

std::string random_text(std::mt19937& random, size_t length) {
  static const char* const parts[] = {"a", "b", "c", " ", " ", "  ", "\n", "é", "中", "😀", "'s", "1", "<e>", "<e", "\xe4\xb8", "\xff", "!"};
  std::string text;
  while (text.size() < length) text += parts[random() % std::size(parts)];
  return text;
}

TEST(Gpt2TokenizerSmall, TextInPartsGivesTheSameTokens) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    VocabularySource source = random_source(seed, 40);
    source.add_prefix_space = seed % 2 == 1;
    if (seed % 3 > 0) source.added.push_back({"<e>", 500, true, false, seed % 3 == 2});
    const Tokenizer tokenizer(source);
    std::mt19937 random(seed);
    const std::string text = random_text(random, 300'000);
    Encoder encoder(tokenizer);
    const std::vector<Token> whole = encoder.encode(text);
    std::vector<Token> parts;
    size_t early = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t n = std::min<size_t>(text.size() - at, random() % 70'000);
      encoder.feed(std::string_view(text).substr(at, n), parts);
      at += n;
      if (at < 250'000) early = parts.size();
    }
    EXPECT_EQ(early > 0, seed % 3 != 2) << "tokens that reach over white space keep a text in one part";
    encoder.finish(parts);
    EXPECT_EQ(parts, whole);
    encoder.feed("a b", parts);  // and once more, from the beginning
    encoder.finish(parts);
    parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(whole.size()));
    EXPECT_EQ(parts, encoder.encode("a b"));
  }
}

TEST(Gpt2TokenizerSmall, ThereAndBack) {
  const Tokenizer tokenizer(random_source(3, 40));
  std::mt19937 random(7);
  Encoder encoder(tokenizer);
  for (int i = 0; i < 50; ++i) {
    const std::string text = random_text(random, random() % 300);
    std::string valid;
    EXPECT_EQ(append_repaired(text, true, valid), text.size());
    EXPECT_EQ(is_utf8(text), text == valid);
    EXPECT_TRUE(is_utf8(valid));
    EXPECT_EQ(decode(tokenizer, encoder.encode(text)), valid);
    EXPECT_EQ(encoder.encode(text), encoder.encode(valid));
  }
  Decoder decoder(tokenizer);
  std::string text;
  EXPECT_THROW(decoder.feed(-1, text), Error);
  EXPECT_THROW(decoder.feed(tokenizer.vocabulary().size(), text), Error);
  EXPECT_TRUE(encoder.encode("").empty());
}

TEST(Gpt2TokenizerSmall, DecodedPartsAreWholeCharacters) {
  const Tokenizer tokenizer(random_source(1, 10));
  const auto byte = [](int b) { return static_cast<Token>((b * 77) % 256); };
  Decoder decoder(tokenizer);
  std::string text;
  for (const int b : {0xf0, 0x9f, 0x98}) {
    decoder.feed(byte(b), text);
    EXPECT_EQ(text, "");
  }
  decoder.feed(byte(0x80), text);
  EXPECT_EQ(text, "😀");
  decoder.feed(byte(0xe4), text);
  decoder.feed(byte('a'), text);  // it was none after all
  EXPECT_EQ(text,
            "😀\xef\xbf\xbd"
            "a");
  decoder.feed(byte(0xe4), text);
  decoder.feed(byte(0xb8), text);
  decoder.finish(text);
  EXPECT_EQ(text,
            "😀\xef\xbf\xbd"
            "a\xef\xbf\xbd");
}

TEST(Gpt2TokenizerSmall, EachPartThatIsNoCharacterIsOneReplacement) {
  const auto repaired = [](const std::string& bytes) {
    std::string text;
    append_repaired(bytes, true, text);
    return text;
  };
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(repaired("\x80\xff"), bad + bad);
  EXPECT_EQ(repaired("\xc0\xaf"), bad + bad);            // overlong
  EXPECT_EQ(repaired("\xed\xa0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(repaired("\xf4\x90\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(repaired("\xf0\x9f\x98"
                     "a"),
            bad + "a");  // cut: one for the part that is there
  EXPECT_EQ(repaired("\xe4\xb8\xe4\xb8\xad"), bad + "中");
  std::string text;
  EXPECT_EQ(append_repaired("ab\xf0\x9f", false, text), 2u);
  EXPECT_EQ(text, "ab");
  EXPECT_EQ(append_repaired("\xf0\x28", false, text), 2u);
  EXPECT_EQ(text, "ab" + bad + "(");
}

TEST(Gpt2TokenizerSmall, Pieces) {
  const Splitter splitter;
  const auto pieces = [&](const std::string& text) {
    std::string shown;
    const auto *at = reinterpret_cast<const uint8_t*>(text.data()), *end = at + text.size();
    while (at < end) {
      const uint8_t* next = splitter.piece_end(at, end);
      shown += "[" + std::string(at, next) + "]";
      at = next;
    }
    return shown;
  };
  EXPECT_EQ(pieces("it's we'LL 'tis 'll"), "[it]['s][ we]['][LL][ '][tis][ '][ll]");
  EXPECT_EQ(pieces("a  b \n c\n"), "[a][ ][ b][ \n][ c][\n]");
  EXPECT_EQ(pieces("x12²y !?z   "), "[x][12²][y][ !?][z][   ]");
  EXPECT_EQ(pieces("\t\ta\xc2\xa0 b"), "[\t][\t][a][\xc2\xa0][ b]");
  EXPECT_EQ(pieces("'"), "[']");
  EXPECT_EQ(pieces("'l"), "['][l]");
}

TEST(Gpt2TokenizerSmall, RanksThatAreRefused) {
  const auto error = [](const char* text) { return thrown_by([&] { Tokenizer{parse_tiktoken(text)}; }); };
  EXPECT_NE(error("").find("is empty"), std::string::npos);
  EXPECT_NE(error("YQ==").find("line 1 of the ranks"), std::string::npos);
  EXPECT_NE(error("YQ== 0\nYQ= 1").find("line 2 of the ranks begins with no base64"), std::string::npos);
  EXPECT_NE(error("Y=Q= 1").find("no base64"), std::string::npos);
  EXPECT_NE(error("YQ== -1").find("its rank"), std::string::npos);
  EXPECT_NE(error("YQ== 2147483648").find("its rank"), std::string::npos);
  EXPECT_NE(error("YQ== 0\nYQ== 1").find("twice"), std::string::npos);
  EXPECT_NE(error("YQ== 2147483646").find("are allowed"), std::string::npos);
  std::string long_token;
  for (int i = 0; i < 90; ++i) long_token += "YWFh";
  EXPECT_NE(error((long_token + " 0").c_str()).find("at most 256"), std::string::npos);
  EXPECT_NE(error("YQ== 0").find("lacks tokens of single bytes"), std::string::npos);
}

TEST(Gpt2TokenizerSmall, MergesThatAreRefused) {
  const auto error = [](const char* merges) { return thrown_by([&] { parse_vocab_and_merges(R"({"a":0,"b":1,"ab":2})", merges); }); };
  EXPECT_EQ(error("#version: 0.2\na b\n\r\n"), "nothing was thrown");
  EXPECT_NE(error("a b c").find("line 1 of the merges"), std::string::npos);
  EXPECT_NE(error("a b\nab").find("line 2 of the merges"), std::string::npos);
  EXPECT_NE(error("b a").find("needs the token 'ba'"), std::string::npos);
  EXPECT_NE(error("a \xff").find("line 1"), std::string::npos);
}

}  // namespace
}  // namespace fattn::gpt2
