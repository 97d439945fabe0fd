#include "jit/planned.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "fattn/error.hpp"
#include "jit/key.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr std::string_view kLists[] = {"common", "packed", "quick", "full"};  // by Planned::List

bool parse_number(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string_view next_field(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  const std::string_view field = line.substr(0, line.find(' '));
  line.remove_prefix(std::min(field.size() + 1, line.size()));
  return field;
}

std::string unescaped(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '\\' && i + 1 < text.size();
    plain += !escape ? text[i] : text[i + 1] == 'n' ? '\n' : text[i + 1];
    i += escape ? 1 : 0;
  }
  return plain;
}

Planned parse_line(std::string_view line) {
  const auto wrong = [](const std::string& what) { throw Error(ErrorCode::kInternal, what); };
  Planned planned;
  const std::string_view list = next_field(line), budget = next_field(line);
  std::string_view targets = next_field(line);
  planned.request.entry = next_field(line);
  planned.request.source = unescaped(line);
  const auto* const found = std::find(std::begin(kLists), std::end(kLists), list);
  if (found == std::end(kLists)) wrong(text("the list is '", list, "'; allowed: common, packed, quick, full"));
  planned.list = static_cast<Planned::List>(found - kLists);
  if (!parse_number(budget, planned.budget) || planned.budget < 1 || planned.budget > 255)
    wrong(text("the budget is '", budget, "'; allowed: 1 to 255"));
  while (!targets.empty()) {
    std::string_view name = targets.substr(0, targets.find(','));
    targets.remove_prefix(std::min(name.size() + 1, targets.size()));
    Target target;
    target.arch_specific = !name.empty() && name.back() == 'a';
    if (target.arch_specific) name.remove_suffix(1);
    if (!parse_number(name, target.arch)) wrong(text("a target is '", name, "'; allowed: 75, 80, 90a, ..."));
    planned.targets.push_back(target);
  }
  if (planned.targets.empty()) wrong("there is no target");
  for (const Target& target : planned.targets) check_request(planned.on(target));
  return planned;
}

}  // namespace

Request Planned::on(const Target& target) const {
  Request on_target = request;
  on_target.arch = target.arch;
  on_target.arch_specific = target.arch_specific;
  return on_target;
}

std::vector<Planned> parse_planned(std::string_view content) {
  std::vector<Planned> all;
  for (int number = 1; !content.empty(); ++number) {
    const std::string_view line = content.substr(0, content.find('\n'));
    content.remove_prefix(std::min(line.size() + 1, content.size()));
    if (line.empty() || line[0] == '#') continue;
    try {
      all.push_back(parse_line(line));
    } catch (const Error& error) {
      throw Error(ErrorCode::kInternal, text("kernels/planned.txt, line ", number, ": ", error.what()));
    }
  }
  return all;
}

std::string planned_line(const Planned& planned) {
  std::string targets, source;
  for (const Target& target : planned.targets) targets += text(targets.empty() ? "" : ",", target.arch, target.arch_specific ? "a" : "");
  for (const char c : planned.request.source) source += c == '\n' ? "\\n" : c == '\\' ? "\\\\" : std::string(1, c);
  return text(kLists[static_cast<size_t>(planned.list)], " ", planned.budget, " ", targets, " ", planned.request.entry, " ", source);
}

std::vector<Request> planned_requests(int arch) {
  std::vector<Request> requests;
  const auto add = [&](std::string_view text, SourceTable sources) {
    for (const Planned& planned : parse_planned(text))
      for (const Target& target : planned.targets)
        if (target.arch == arch) {
          requests.push_back(planned.on(target));
          requests.back().sources = sources;
        }
  };
  add(embedded_planned(), embedded_sources);
  if (further_planned) {
    const PlannedList further = further_planned();
    add(further.text(), further.sources);
  }
  return requests;
}

}  // namespace fattn::core::jit
