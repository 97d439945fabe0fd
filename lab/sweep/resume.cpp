#include "lab/sweep/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "lab/sweep/sweep.h"

namespace fattn::lab {
namespace {

using nlohmann::ordered_json;

// Where the same code would not take the same time.
struct Trait {
  const char* pointer;
  const char* words;
};
constexpr Trait kTraits[] = {{"/cpu/model", "on the processor"},
                             {"/cpu/logical_cpus", "on a machine whose number of processors was"},
                             {"/cpu/usable_threads", "with a number of usable threads of"},
                             {"/library_version", "with fattn"},
                             {"/commit", "with fattn built from commit"}};

std::string shown(const ordered_json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

ordered_json at(const ordered_json& environment, const char* pointer) {
  const ordered_json::json_pointer place(pointer);
  return environment.contains(place) ? environment.at(place) : ordered_json(nullptr);
}

std::string gpus_of(const ordered_json& environment) {
  std::string names;
  if (const auto gpus = environment.find("gpus"); gpus != environment.end())
    for (const ordered_json& gpu : *gpus) names += (names.empty() ? "" : ", ") + gpu.value("name", std::string("?"));
  return names.empty() ? "none" : names;
}

// --name and what is behind it, up to the next; a flag that is given twice has both values.
std::map<std::string, std::string> by_name(const std::vector<std::string>& flags) {
  std::map<std::string, std::string> all;
  std::string name;
  for (const std::string& flag : flags) {
    if (flag.rfind("--", 0) == 0) {
      name = flag;
      all[name] += all.count(name) > 0 ? "|" : "";
    } else {
      all[name] += (all[name].empty() ? "" : " ") + flag;
    }
  }
  return all;
}

void require_flags(const std::vector<std::string>& theirs, const std::vector<std::string>& ours, const std::vector<std::string>& free) {
  std::map<std::string, std::string> before = by_name(theirs), now = by_name(ours);
  for (const std::string& name : free) before.erase(name), now.erase(name);
  const auto words = [](const std::map<std::string, std::string>& flags, const std::string& name) {
    const auto found = flags.find(name);
    return found == flags.end() ? "without " + name : "with " + name + (found->second.empty() ? "" : " " + found->second);
  };
  for (const auto* flags : {&before, &now})
    for (const auto& [name, value] : *flags) {
      const auto a = before.find(name), b = now.find(name);
      if (a == before.end() || b == now.end() || a->second != b->second)
        throw std::runtime_error(fmt::format("it was measured {}, this sweep is {}", words(before, name), words(now, name)));
    }
}

}  // namespace

std::vector<ordered_json> rows_to_resume(const ordered_json& record, const std::vector<std::string>& flags, const ordered_json& environment,
                                         const std::vector<std::string>& free) {
  read_sweep(record);  // throws if it is none
  std::vector<ordered_json> rows;
  try {
    const ordered_json& there = record.at("environment");
    for (const Trait& trait : kTraits)
      if (const ordered_json a = at(there, trait.pointer), b = at(environment, trait.pointer); a != b)
        throw std::runtime_error(fmt::format("it was measured {} {}, here it is {}", trait.words, shown(a), shown(b)));
    if (const std::string a = gpus_of(there), b = gpus_of(environment); a != b)
      throw std::runtime_error(fmt::format("it was measured on a machine whose GPUs were: {}; here they are: {}", a, b));
    require_flags(record.at("flags").get<std::vector<std::string>>(), flags, free);
    for (const ordered_json& row : record.at("rows"))
      if (row.at("status") == "ok") rows.push_back(row);
  } catch (const nlohmann::json::exception& e) {
    throw std::runtime_error("its content is not that of a sweep: " + without_code(e.what()));
  }
  return rows;
}

}  // namespace fattn::lab
