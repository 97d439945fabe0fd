// The two 16-bit element types that tensor cores read, as tags with their bits.
#pragma once

namespace fattn {

struct bf16 {
  unsigned short bits;
};
struct f16 {
  unsigned short bits;
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

}  // namespace fattn
