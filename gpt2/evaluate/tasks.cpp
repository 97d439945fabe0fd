#include "gpt2/evaluate/tasks.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "files/json.h"
#include "files/printable.h"
#include "gpt2/data/records.h"
#include "gpt2/data/texts.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

constexpr uint64_t kReadBytes = uint64_t{1} << 20;

// `take` of each line until it says no. What it throws gets the file and the line in front.
template <class Take>
void for_each_line(const TextFiles& texts, TextFormat format, const Take& take) {
  TextReader reader(texts, 0);
  for (std::vector<TextPart> parts; !(parts = reader.next(kReadBytes)).empty();)
    for (const TextPart& part : parts) {
      const TextFile& file = texts.files[part.file];
      if (file.format != format) throw Error("'" + files::printable(file.path) + "' has no lines of JSON for this task; give a .jsonl file");
      for (const LineOfPart& line : lines_of(part)) {
        try {
          if (!take(line.text)) return;
        } catch (const Error& e) {
          throw Error("'" + files::printable(file.path) + "', line " + std::to_string(line.number) + ": " + e.what());
        }
      }
    }
}

Example example_of(std::string_view line) {
  const std::vector<RecordPart> parts = parse_record(line, TextFormat::kCompletion);
  Example example{parts[0].text, {parts[1].text}};
  const nlohmann::json object = files::parse_json(line);
  if (const auto at = object.find("answers"); at != object.end()) {
    if (!at->is_array()) throw Error(std::string("\"answers\" is ") + files::kind_of(*at) + "; it must be a list of texts");
    for (const nlohmann::json& one : *at) {
      if (!one.is_string()) throw Error(std::string("one of \"answers\" is ") + files::kind_of(one) + "; it must be text");
      example.answers.push_back(one.get<std::string>());
    }
  }
  return example;
}

}  // namespace

std::vector<Example> read_examples(const std::string& path, int64_t limit) {
  std::vector<Example> examples;
  for_each_line(find_texts({path}, TextFormat::kCompletion), TextFormat::kCompletion, [&](std::string_view line) {
    examples.push_back(example_of(line));
    return limit == 0 || static_cast<int64_t>(examples.size()) < limit;
  });
  if (examples.empty()) throw Error("'" + files::printable(path) + "' has no line {\"prompt\", \"completion\"}");
  return examples;
}

std::vector<std::vector<Token>> read_documents(const std::string& path, Documents kind, const Tokenizer& tokenizer, std::optional<Token> end,
                                               int64_t limit) {
  std::vector<std::vector<Token>> documents;
  Encoder encoder(tokenizer, true);
  const auto full = [&] { return limit > 0 && static_cast<int64_t>(documents.size()) >= limit; };
  const auto add = [&](std::vector<Token> tokens) {
    if (end) tokens.push_back(*end);
    if (tokens.size() > 1) documents.push_back(std::move(tokens));
    return !full();
  };
  const TextFormat format = kind == Documents::kDialogue ? TextFormat::kDialogue : TextFormat::kCode;
  const TextFiles texts = find_texts({path}, format);
  if (kind == Documents::kDialogue) {
    for_each_line(texts, format, [&](std::string_view line) { return add(encoder.encode(parse_record(line, format)[0].text)); });
  } else {
    TextReader reader(texts, 0);
    for (std::vector<TextPart> parts; !full() && !(parts = reader.next(kReadBytes)).empty();)
      for (const TextPart& part : parts)
        if (!add(encoder.encode(part.bytes))) break;
  }
  if (documents.empty()) throw Error("'" + files::printable(path) + "' has no document of two tokens or more");
  return documents;
}

Mean mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x;
  const double mean = sum / static_cast<double>(values.size());
  const double off = kNormal95 * scatter_of(values, std::vector<double>(values.size(), 1), mean);
  return {mean, mean - off, mean + off};
}

DocumentLoss evaluate_documents(Session& session, const std::vector<std::vector<Token>>& documents, int64_t context, int64_t stride,
                                const std::function<void(const DocumentLoss&)>& done) {
  DocumentLoss result;
  std::vector<double> losses, counts;
  double sum = 0;
  for (const std::vector<Token>& tokens : documents) {
    const Evaluation e = evaluate(session, tokens, windows_of(static_cast<int64_t>(tokens.size()), context, stride));
    losses.push_back(e.loss * static_cast<double>(e.tokens));
    counts.push_back(static_cast<double>(e.tokens));
    sum += losses.back();
    result.tokens += e.tokens;
    ++result.documents;
    result.loss.value = sum / static_cast<double>(result.tokens);
    const double off = kNormal95 * scatter_of(losses, counts, result.loss.value);
    result.loss.low = result.loss.value - off;
    result.loss.high = result.loss.value + off;
    if (done) done(result);
  }
  return result;
}

}  // namespace fattn::gpt2
