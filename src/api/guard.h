// What every function of the C ABI does around its body: exceptions become status codes and this thread's last message.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <type_traits>

#include "fattn/error.hpp"
#include "problem/option_checks.h"
#include "shared/text.h"

namespace fattn::core {

// Keeps `message` for fattn_last_error() and returns `status`. Defined in c_api.cpp.
fattn_status fail(fattn_status status, const char* message) noexcept;

// The same for std::bad_alloc, which does not say how much was asked for.
fattn_status fail_without_memory() noexcept;

template <class Body>
fattn_status guarded(const Body& body) noexcept {
  try {
    body();
    return FATTN_OK;
  } catch (const Error& e) {
    return fail(static_cast<fattn_status>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return fail_without_memory();
  } catch (const std::exception& e) {
    return fail(FATTN_ERROR_INTERNAL, e.what());
  } catch (...) {
    return fail(FATTN_ERROR_INTERNAL, "an exception of unknown type");
  }
}

inline void not_null(const void* pointer, const char* name) {
  if (!pointer) throw Error(ErrorCode::kInvalidArgument, text(name, " is a null pointer"));
}
template <class T>
T& checked(T* pointer, const char* name) {
  not_null(pointer, name);
  return *pointer;
}

// A struct that begins with its size: the size must be one that this library knows. What a caller gives keeps `reserved` at 0, so that a later
// library may give it a meaning.
template <class T>
T& sized(T* pointer, const char* name) {
  checked(pointer, name);
  if (pointer->struct_size != sizeof(T))
    throw Error(ErrorCode::kAbi, text(name, ".struct_size is ", pointer->struct_size, "; this library knows ", sizeof(T), " (ABI version ",
                                      FATTN_ABI_VERSION, "). Set it to sizeof and build against this library's fattn.h"));
  if constexpr (requires { pointer->abi_version; }) check_abi_version(pointer->abi_version);
  if constexpr (std::is_const_v<T> && requires { pointer->reserved; })
    if (pointer->reserved != 0)
      throw Error(ErrorCode::kInvalidArgument,
                  text(name, ".reserved is ", pointer->reserved, "; it must be 0: clear the struct before it is filled"));
  return *pointer;
}

// As much of `from` as fits, always terminated.
inline void copy(char* to, size_t bytes, std::string_view from) {
  const size_t n = std::min(from.size(), bytes - 1);
  if (n > 0) std::memcpy(to, from.data(), n);
  to[n] = '\0';
}
template <size_t N>
void copy(char (&to)[N], std::string_view from) {
  copy(to, N, from);
}

}  // namespace fattn::core
