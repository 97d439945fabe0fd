// The element types that a safetensors file may name.
#pragma once

#include <cstdint>
#include <string_view>

namespace fattn::files::safetensors {

struct DTypeName {
  std::string_view name;
  uint64_t bits;
};

// As the format's reference implementation lists them. Types below a byte fill whole bytes as a tensor.
inline constexpr DTypeName kDTypes[] = {
    {"BOOL", 8},    {"U8", 8},          {"I8", 8},          {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},
    {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64}, {"I64", 64},    {"U64", 64},
};

// 0 if the format knows no such type.
constexpr uint64_t bits_of(std::string_view dtype) {
  for (const DTypeName& known : kDTypes)
    if (known.name == dtype) return known.bits;
  return 0;
}

}  // namespace fattn::files::safetensors
