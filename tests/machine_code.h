// The machine code of a cubin, an ELF file of 64 bits: its sections .text.* and the constants that they read.
#pragma once

#include <elf.h>

#include <cstring>
#include <string>
#include <string_view>

namespace fattn::test {

struct MachineCode {
  std::string bytes;  // of all of these sections, names and lengths before each; empty: this is no cubin
  size_t code = 0;    // bytes of .text.*
};

inline MachineCode machine_code(std::string_view image) {
  const auto copy = [&](auto& to, size_t from) {
    if (from > image.size() || image.size() - from < sizeof to) return false;
    std::memcpy(&to, image.data() + from, sizeof to);
    return true;
  };
  Elf64_Ehdr head;
  if (!copy(head, 0) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_ident[EI_CLASS] != ELFCLASS64 ||
      head.e_shentsize != sizeof(Elf64_Shdr))
    return {};
  const auto section = [&](size_t number, Elf64_Shdr& to) { return head.e_shoff <= image.size() && copy(to, head.e_shoff + number * sizeof to); };
  const auto content = [&](const Elf64_Shdr& of) {
    if (of.sh_type == SHT_NOBITS || of.sh_offset > image.size() || image.size() - of.sh_offset < of.sh_size) return std::string_view();
    return image.substr(of.sh_offset, of.sh_size);
  };
  Elf64_Shdr names, each;
  if (!section(head.e_shstrndx, names)) return {};
  const std::string_view texts = content(names);
  MachineCode found;
  for (size_t i = 0; i < head.e_shnum; ++i) {
    if (!section(i, each) || each.sh_name >= texts.size()) return {};
    const std::string_view rest = texts.substr(each.sh_name), name = rest.substr(0, rest.find('\0'));
    const bool is_code = name.starts_with(".text.");
    if (!is_code && !name.starts_with(".nv.constant")) continue;
    const std::string_view bytes = content(each);
    if (is_code) found.code += bytes.size();
    found.bytes.append(name).append(1, '\0').append(std::to_string(bytes.size())).append(1, '\0').append(bytes);
  }
  return found.code == 0 ? MachineCode{} : found;
}

}  // namespace fattn::test
