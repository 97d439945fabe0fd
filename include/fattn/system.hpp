// What fattn found on this machine: processor, optional libraries, environment variables.
#pragma once

#include <vector>

#include "fattn/types.hpp"

namespace fattn {

inline fattn_cpu_info cpu_info() {
  fattn_cpu_info info{};
  info.struct_size = sizeof info;
  check(fattn_query_cpu(&info));
  return info;
}

inline bool available(const fattn_cpu_info& cpu, Isa isa) { return (cpu.isas_available >> static_cast<int32_t>(isa)) & 1u; }

inline std::vector<fattn_library_info> libraries() {
  std::vector<fattn_library_info> all;
  for (int32_t i = 0;; ++i) {
    fattn_library_info info{};
    info.struct_size = sizeof info;
    if (fattn_query_library(i, &info) != FATTN_OK) return all;
    all.push_back(info);
  }
}

inline std::vector<fattn_env_info> environment() {
  std::vector<fattn_env_info> all;
  for (int32_t i = 0;; ++i) {
    fattn_env_info info{};
    info.struct_size = sizeof info;
    if (fattn_query_environment(i, &info) != FATTN_OK) return all;
    all.push_back(info);
  }
}

inline std::vector<fattn_architecture_info> architectures() {
  std::vector<fattn_architecture_info> all;
  for (int32_t i = 0;; ++i) {
    fattn_architecture_info info{};
    info.struct_size = sizeof info;
    if (fattn_query_architecture(i, &info) != FATTN_OK) return all;
    all.push_back(info);
  }
}

// The support table, row by row.
inline std::vector<std::vector<fattn_feature_info>> features() {
  std::vector<std::vector<fattn_feature_info>> rows;
  for (int32_t feature = 0;; ++feature) {
    std::vector<fattn_feature_info> row;
    for (int32_t way = 0;; ++way) {
      fattn_feature_info info{};
      info.struct_size = sizeof info;
      if (fattn_query_feature(feature, way, &info) != FATTN_OK) break;
      row.push_back(info);
    }
    if (row.empty()) return rows;
    rows.push_back(row);
  }
}

}  // namespace fattn
