#include "jit/compile.h"

#include <algorithm>
#include <chrono>

#include "shared/text.h"

namespace fattn::core::jit {
namespace {

using Clock = std::chrono::steady_clock;

struct Program {
  const Nvrtc& nvrtc;
  nvrtcProgram handle = nullptr;
  ~Program() {
    if (handle) nvrtc.destroyProgram(&handle);
  }
};

int stop_when_late(void* deadline, void*) { return Clock::now() > *static_cast<const Clock::time_point*>(deadline) ? 1 : 0; }

template <class Size, class Get>
std::string bytes_of(nvrtcProgram program, Size size, Get get) {
  size_t bytes = 0;
  if (size(program, &bytes) != kNvrtcSuccess || bytes == 0 || bytes > static_cast<size_t>(kMaxEntryFileBytes)) return "";
  std::string held(bytes, '\0');
  return get(program, held.data()) == kNvrtcSuccess ? held : "";
}

std::string list_of(const std::vector<int>& architectures) {
  std::string all;
  for (const int arch : architectures) all += (all.empty() ? "" : ", ") + target_name(arch, false);
  return all;
}

// The line of the log that says most to a person: the first with an error.
std::string first_error(const std::string& log) {
  const size_t at = log.find("error");
  if (at == std::string::npos) return "";
  const size_t begin = log.rfind('\n', at) == std::string::npos ? 0 : log.rfind('\n', at) + 1;
  return log.substr(begin, std::min<size_t>(log.find('\n', at) - begin, 300));
}

// What the source begins with, if that is a comment of one line.
std::string first_comment(const std::string& source) {
  constexpr std::string_view kMark = "// ";
  return source.rfind(kMark, 0) == 0 ? source.substr(kMark.size(), source.find('\n') - kMark.size()) : "";
}

}  // namespace

Compiled compile(const Nvrtc& nvrtc, const Request& request, const Digest& key, const std::vector<Source>& headers, double seconds) {
  Compiled result;
  Entry& entry = result.entry;
  entry.key = key;
  entry.version = nvrtc.version;
  entry.arch = request.arch;
  entry.arch_specific = request.arch_specific;
  entry.name = request.entry;
  entry.description = first_comment(request.source);
  if (std::find(nvrtc.architectures.begin(), nvrtc.architectures.end(), request.arch) == nvrtc.architectures.end()) {
    result.problem = text("it compiles for ", list_of(nvrtc.architectures), " only; install another NVRTC or set FATTN_NVRTC");
    return result;
  }

  std::vector<std::string> paths;
  std::vector<const char*> texts, names, options;
  paths.reserve(headers.size());  // `names` points into it
  for (const Source& header : headers) {
    texts.push_back(header.text.data());
    names.push_back(paths.emplace_back(header.path).c_str());
  }
  const std::vector<std::string> option_texts = options_of(request, nvrtc.version);
  for (const std::string& option : option_texts) options.push_back(option.c_str());

  // NVRTC looks for headers that it was not given in the folder of the source. This one is never a folder: without a folder in the
  // name, that would be the working directory.
  const std::string name = "/dev/null/" + request.entry + ".cu";
  const auto start = Clock::now();
  Program program{nvrtc};
  nvrtcResult status =
      nvrtc.createProgram(&program.handle, request.source.c_str(), name.c_str(), static_cast<int>(headers.size()), texts.data(), names.data());
  auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  if (status == kNvrtcSuccess && nvrtc.setFlowCallback) nvrtc.setFlowCallback(program.handle, stop_when_late, &deadline);
  if (status == kNvrtcSuccess) {
    status = nvrtc.compileProgram(program.handle, static_cast<int>(options.size()), options.data());
    entry.log = bytes_of(program.handle, nvrtc.getProgramLogSize, nvrtc.getProgramLog);
    while (!entry.log.empty() && entry.log.back() == '\0') entry.log.pop_back();
  }
  entry.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (status == kNvrtcCancelled) {
    result.problem = text("it was stopped after ", seconds, " seconds; make the kernel smaller");
  } else if (status != kNvrtcSuccess) {
    const char* meaning = nvrtc.getErrorString(status);
    const std::string error = first_error(entry.log);
    result.problem = text(meaning ? meaning : "an error without a name", error.empty() ? "" : ": ", error);
  } else {
    entry.image = bytes_of(program.handle, nvrtc.getCUBINSize, nvrtc.getCUBIN);
    entry.resources = parse_resources(entry.log);
    if (entry.image.empty()) result.problem = "it gave no cubin";
  }
  return result;
}

}  // namespace fattn::core::jit
