// Builds messages from parts: text("headdim is ", 0, "; allowed: 1 to ", 576).
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace fattn::core {

namespace detail {

// Numbers are written as std::ostream writes them in the "C" locale: whole ones in decimal, others with up to six digits. Made without a stream,
// because every plan has texts and streams take most of its time.
template <class Part>
void append(std::string& to, const Part& part) {
  if constexpr (std::is_convertible_v<const Part&, const char*>) {
    to += static_cast<const char*>(part);
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    to += std::string_view(part);
  } else if constexpr (std::is_same_v<Part, char>) {
    to += part;
  } else if constexpr (std::is_same_v<Part, bool>) {
    to += part ? '1' : '0';
  } else if constexpr (std::is_enum_v<Part>) {
    append(to, +part);  // of C: what is no number by itself does not compile
  } else if constexpr (std::is_pointer_v<Part>) {
    char digits[20];
    to.append("0x").append(digits, std::to_chars(digits, digits + sizeof digits, reinterpret_cast<uintptr_t>(part), 16).ptr);
  } else {
    static_assert(std::is_arithmetic_v<Part> && sizeof(Part) > 1 && sizeof(Part) <= 8, "texts, characters, and numbers of 2 to 8 bytes");
    char digits[32];
    if constexpr (std::is_floating_point_v<Part>)
      to.append(digits, std::to_chars(digits, digits + sizeof digits, part, std::chars_format::general, 6).ptr);
    else
      to.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
  }
}

}  // namespace detail

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string all;
  (detail::append(all, parts), ...);
  return all;
}

}  // namespace fattn::core
