// What the host sides of the v3 forward and backward kernels share: widths, and tensors as TMA sees them.
#pragma once

#include <cstdint>
#include <string>

#include "backend/cuda/pair_features.h"
#include "backend/cuda/target.h"
#include "device/tensor_map.h"
#include "problem/problem.h"
#include "shared/text.h"

namespace fattn::core::cuda {

// Types of a specialisation: kernels/v3/mask.h and score.h.
enum class V3Mask : int32_t { kFull, kCausal, kWindow };
enum class V3Score : int32_t { kPlain, kSigned, kCapped };
constexpr const char* kV3MaskTypes[] = {"v3::FullMask", "v3::CausalMask", "v3::WindowMask"};
constexpr const char* kV3ScoreTypes[] = {"v3::PlainScore", "v3::SignedScore", "v3::CappedScore"};
inline V3Mask v3_mask(const Problem& p) { return p.windowed() ? V3Mask::kWindow : p.causal ? V3Mask::kCausal : V3Mask::kFull; }
// Whether its kernels know lengths of keys. Of packed sequences the list of their tiles says how many keys each has, and passes see no difference.
inline bool v3_lengths(const Problem& p) { return p.has_seqused_k && !p.packed; }
// What of pairs and of batch entries its kernels have.
inline PairFeatures v3_pair_features(const Problem& p) {
  PairFeatures pair = pair_features(p);
  pair.lengths = v3_lengths(p);
  return pair;
}
// Whether its kernels take FeatureParams.
constexpr bool has_features(V3Mask mask, V3Score score) { return mask == V3Mask::kWindow || score == V3Score::kCapped; }

// Why no v3 kernel takes such tensors, whatever their strides; empty: strides and tiles decide.
std::string v3_refusal(const Problem& problem);

// headdim rounded up to what a kernel is specialised for; TMA fills up with zeros. 0: too wide.
int v3_width(int64_t headdim);

// As TMA copies it: in columns of 64 elements, which are 128 bytes.
inline constexpr int kColumnBytes = 128;
constexpr int v3_columns(int width) { return (width + 63) / 64; }

// What __launch_bounds__ leaves a thread, which ptxas uses whole: a kernel's registers before they are moved between its warps.
constexpr int v3_launch_registers(int threads) { return 65536 / threads / 8 * 8; }

// (batch, rows, heads, headdim) in boxes of `box_rows`; packed sequences are one batch entry.
TiledTensor v3_tiled(const Problem& problem, int64_t rows, int64_t heads, int64_t headdim, const Strides& strides, int box_rows);
inline TiledTensor tiled_q(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_rows(), p.nheads, p.headdim, p.q, box_rows); }
inline TiledTensor tiled_k(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_keys(), p.nheads_k, p.headdim, p.k, box_rows); }
inline TiledTensor tiled_v(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_keys(), p.nheads_k, p.headdim_v, p.v, box_rows); }

// The source of a specialisation while it is put together. It begins with the line that `fattn cache list` shows.
class V3Source {
 public:
  V3Source(int32_t dtype, int width, int width_v) {
    add("// ", name_of(static_cast<DType>(dtype)), ", headdim up to ", width);
    if (width_v != width) add(" and ", width_v);
  }
  template <class... Parts>
  void add(const Parts&... parts) {
    text_ += core::text(parts...);
  }
  // Members of Spec.
  void add_type(const char* name, const char* type) { add("  using ", name, " = fattn::", type, ";\n"); }
  void add_int(const char* name, int value) { add("  static constexpr int ", name, " = ", value, ";\n"); }
  void add_bool(const char* name, bool value) { add("  static constexpr bool ", name, " = ", value ? "true" : "false", ";\n"); }
  void add_mask(V3Mask mask) { add_type("Mask", kV3MaskTypes[static_cast<int>(mask)]); }
  void add_score(V3Score score) { add_type("Score", kV3ScoreTypes[static_cast<int>(score)]); }
  void comment_on(V3Mask mask, V3Score score) {
    add(mask == V3Mask::kCausal   ? ", causal"
        : mask == V3Mask::kWindow ? ", window"
                                  : "",
        score == V3Score::kSigned   ? ", scale not positive"
        : score == V3Score::kCapped ? ", softcap"
                                    : "");
  }
  void add_element(int32_t dtype) { add_type("Element", dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f16"); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace fattn::core::cuda
