// The functions of fmt, compiled here once for the lab and the command line: header-only, each unit would have them all.
#ifndef FMT_HEADER_ONLY

#include <fmt/format-inl.h>

// What fmt declares and its headers leave to such a unit.
template fmt::detail::dragonbox::decimal_fp<float> fmt::detail::dragonbox::to_decimal(float) noexcept;
template fmt::detail::dragonbox::decimal_fp<double> fmt::detail::dragonbox::to_decimal(double) noexcept;
template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl<char>(fmt::detail::locale_ref);
template char fmt::detail::decimal_point_impl<char>(fmt::detail::locale_ref);

#endif
