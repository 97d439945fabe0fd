// Workers take turns: to read a batch of text, which one does at a time, and to write its tokens, in the order in which batches were read.
#include "gpt2/data/tokenize.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "files/printable.h"
#include "gpt2/data/records.h"
#include "gpt2/data/token_writer.h"
#include "gpt2/data/validation_draw.h"
#include "gpt2/data/workers.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

constexpr uint64_t kBatchBytes = 1 << 20, kPartBytes = 1 << 20;

// Tokens of a batch, and what belongs to whom.
struct Encoded {
  struct Run {
    size_t count;
    bool targets, ends_document;
    bool begins_unit;  // drawn for validation or not as a whole
    uint64_t text_bytes;
  };
  std::vector<Token> ids;
  std::vector<Run> runs;
  std::vector<std::string> bad;
  uint64_t bytes = 0;
};

void encode_lines(const TextPart& part, const TextFile& file, Encoder& encoder, Encoded& to) {
  for (const LineOfPart& line : lines_of(part)) {
    try {
      const std::vector<RecordPart> pieces = parse_record(line.text, file.format);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const size_t before = to.ids.size();
        encoder.encode(pieces[i].text, to.ids);
        to.runs.push_back({to.ids.size() - before, pieces[i].targets, i + 1 == pieces.size(), i == 0, pieces[i].text.size()});
      }
    } catch (const Error& e) {
      to.bad.push_back(files::printable(file.path) + ":" + std::to_string(line.number) + ": " + e.what());
    }
  }
}

// Small texts are drawn in small parts, so that some of them are for validation.
uint64_t part_bytes_of(const Tokenizer& tokenizer, const TextFiles& texts, double validation) {
  if (!tokenizer.can_be_cut() || tokenizer.adds_prefix_space()) return 0;
  if (validation <= 0) return kPartBytes;
  return std::clamp<uint64_t>(static_cast<uint64_t>(static_cast<double>(texts.bytes) * validation / 8), 1 << 10, 1 << 16);
}

class Work {
 public:
  Work(const Tokenizer& tokenizer, const TextFiles& texts, const std::string& out, const TokenizeOptions& options)
      : tokenizer_(tokenizer),
        texts_(texts),
        options_(options),
        reader_(texts, part_bytes_of(tokenizer, texts, options.validation)),
        draw_(options.validation, options.seed),
        train_(out + "/train", vocabulary_of(tokenizer), options.shard_tokens),
        validation_(out + "/validation", vocabulary_of(tokenizer), options.shard_tokens) {}

  Tokenized run() {
    run_on_threads(options_.threads, [this] { work(); });
    train_.finish();
    validation_.finish();
    return {set_of(train_), set_of(validation_), bad_lines_};
  }

 private:
  static TokenizedSet set_of(const TokenSetWriter& writer) {
    return {writer.tokens(), writer.documents(), writer.targets(), writer.text_bytes(), writer.file_bytes(), writer.files()};
  }

  void work() {
    try {
      Encoder encoder(tokenizer_, true);
      for (;;) {
        std::vector<TextPart> parts;
        uint64_t number = 0;
        {
          const std::lock_guard lock(reading_);
          if (failed_) return;
          parts = reader_.next(kBatchBytes);
          number = read_++;
        }
        if (parts.empty()) return;
        const Encoded encoded = encode(parts, encoder);
        std::unique_lock lock(writing_);
        turn_.wait(lock, [&] { return failed_ || written_ == number; });
        if (failed_) return;
        write(encoded);
        ++written_;
        turn_.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(writing_);
      failed_ = true;  // the others need not wait for this one's turn
      turn_.notify_all();
      throw;
    }
  }

  Encoded encode(const std::vector<TextPart>& parts, Encoder& encoder) const {
    Encoded encoded;
    for (const TextPart& part : parts) {
      const TextFile& file = texts_.files[part.file];
      encoded.bytes += part.bytes.size();
      if (holds_lines(file.format)) {
        encode_lines(part, file, encoder, encoded);
        continue;
      }
      const size_t before = encoded.ids.size();
      encoder.encode(part.bytes, encoded.ids);
      encoded.runs.push_back({encoded.ids.size() - before, true, part.ends_document, !part.bytes.empty(), part.bytes.size()});
    }
    return encoded;
  }

  void write(const Encoded& encoded) {
    const Token* ids = encoded.ids.data();
    for (const Encoded::Run& run : encoded.runs) {
      if (run.begins_unit) {
        TokenSetWriter& drawn = draw_.has(units_++) ? validation_ : train_;
        if (&drawn != now_) now_->end_document(false);  // the document goes on elsewhere
        now_ = &drawn;
      }
      now_->append(ids, run.count, run.targets, run.text_bytes);
      ids += run.count;
      if (run.ends_document) now_->end_document();
    }
    for (const std::string& bad : encoded.bad)
      if (options_.bad_line) options_.bad_line(bad);
    bad_lines_ += encoded.bad.size();
    if (options_.progress) options_.progress(encoded.bytes);
  }

  const Tokenizer& tokenizer_;
  const TextFiles& texts_;
  const TokenizeOptions& options_;
  TextReader reader_;
  const ValidationDraw draw_;
  TokenSetWriter train_, validation_;
  TokenSetWriter* now_ = &train_;
  std::mutex reading_, writing_;
  std::condition_variable turn_;
  std::atomic<bool> failed_{false};
  uint64_t read_ = 0, written_ = 0, units_ = 0, bad_lines_ = 0;
};

}  // namespace

Tokenized tokenize(const Tokenizer& tokenizer, const TextFiles& texts, const std::string& out, const TokenizeOptions& options) {
  return Work(tokenizer, texts, out, options).run();
}

}  // namespace fattn::gpt2
