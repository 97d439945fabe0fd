// A checksum of bytes that finds damage, not forgery: XXH64, as its specification defines it, so that other programs can compute it too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fattn::files {

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace fattn::files
