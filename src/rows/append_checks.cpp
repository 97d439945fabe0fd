// What an append is checked for: that its tensors fit together, and what lists in host memory say.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "problem/option_checks.h"
#include "rows/append.h"

namespace fattn::core::rows {

std::array<Named, 11> inputs_of(const fattn_append_problem& g) {
  return {Named{"k", &g.k},
          {"v", &g.v},
          {"q", &g.q},
          {"cos", &g.cos},
          {"sin", &g.sin},
          {"cache_seqlens", &g.cache_seqlens},
          {"cu_seqlens_new", &g.cu_seqlens_new},
          {"cache_batch_idx", &g.cache_batch_idx},
          {"block_table", &g.block_table},
          {"positions", &g.positions},
          {"cu_seqlens_q", &g.cu_seqlens_q}};
}
std::array<Named, 5> outputs_of(const fattn_append_problem& g) {
  return {Named{"k_cache", &g.k_cache}, {"v_cache", &g.v_cache}, {"q_out", &g.q_out}, {"seqused_k", &g.seqused_k}, {"status", &g.status}};
}

namespace {

constexpr const char* kPages = "(pages, page_size, nheads_k, headdim) of a paged cache (block_table)";

void check_headdim(const char* name, int64_t headdim) {
  if (headdim < 1 || headdim > kMostHeaddim) invalid(text("headdim of ", name, " is ", headdim, "; allowed: 1 to ", kMostHeaddim));
}

void check_new(const fattn_append_problem& g) {
  const bool packed = g.cu_seqlens_new.ndim != 0;
  const char* const dimensions =
      packed ? "(total_new, nheads_k, headdim) of packed sequences (cu_seqlens_new)" : "(batch, seqlen_new, nheads_k, headdim)";
  const int ndim = packed ? 3 : 4;
  check_numbers("k", g.k, ndim, dimensions, false);
  check_numbers("v", g.v, ndim, dimensions, false);
  check_fits("v", g.v, "k", g.k);
  check_device("v", g.v, "k", g.k);
  std::array<int64_t, 4> shape{};
  std::copy_n(g.k.shape, 4, shape.begin());
  shape[static_cast<size_t>(ndim - 1)] = g.v.shape[ndim - 1];
  check_shape("v", g.v, shape, "the shape of k, with a headdim of its own");
  check_headdim("k", g.k.shape[ndim - 1]);
  check_headdim("v", g.v.shape[ndim - 1]);
  if (packed) check_cu_seqlens("cu_seqlens_new", g.cu_seqlens_new, "k", g.k);
}

void check_caches(const fattn_append_problem& g, int64_t batch) {
  const bool paged = g.block_table.ndim != 0;
  const int64_t* const k = g.k.shape + g.k.ndim - 2;
  const auto check = [&](const char* name, const fattn_tensor& cache, int64_t headdim, const char* because) {
    check_numbers(name, cache, 4, paged ? kPages : "(entries, longest, nheads_k, headdim)", true);
    check_fits(name, cache, "k", g.k);
    check_device(name, cache, "k", g.k);
    check_shape(name, cache, {g.k_cache.shape[0], g.k_cache.shape[1], k[0], headdim}, because);
  };
  check("k_cache", g.k_cache, k[1], "nheads_k and headdim of k");
  check("v_cache", g.v_cache, g.v.shape[g.v.ndim - 1], "the shape of k_cache with the headdim of v");
  if (paged) {
    if (g.k_cache.shape[1] == 0) invalid(text("k_cache has the shape ", shape_text(g.k_cache), ", pages of 0 keys; allowed: at least 1"));
    if (g.cache_batch_idx.ndim != 0) invalid("cache_batch_idx is given beside block_table; index the table, and leave cache_batch_idx out");
    check_index_dtype("block_table", g.block_table);
    check_view("block_table", g.block_table, 2, "(batch, columns)", false);
    check_device("block_table", g.block_table, "k", g.k);
    if (g.block_table.shape[0] != batch)
      invalid(text("block_table has the shape ", shape_text(g.block_table), "; allowed: (", batch, ", columns), a row for each sequence"));
    check_memory("block_table", g.block_table);
  } else if (g.cache_batch_idx.ndim == 0 && g.k_cache.shape[0] != batch) {
    invalid(text("k_cache has ", g.k_cache.shape[0], " entries and there are ", batch,
                 " sequences; without cache_batch_idx, which says whose is which, they must be as many"));
  }
}

// Of a list of a number for each sequence.
void check_numbers_of(const char* name, const fattn_tensor& list, const fattn_append_problem& g, int64_t batch) {
  if (list.ndim == 0) return;
  check_index_dtype(name, list);
  check_list(name, list, "(batch)", "k", g.k);
  check_shape_of(name, list, {batch}, "a number for each sequence");
}

void check_angles(const fattn_append_problem& g, int64_t headdim) {
  if ((g.cos.ndim == 0) != (g.sin.ndim == 0)) invalid("one of cos and sin is absent; give both, or neither");
  if (g.cos.ndim == 0) {
    for (const Named& t : {Named{"positions", &g.positions}, {"q", &g.q}})
      if (t.tensor->ndim != 0) invalid(text(t.name, " is given without cos and sin, and nothing turns; give them, or leave it out"));
    return;
  }
  for (const Named& t : {Named{"cos", &g.cos}, {"sin", &g.sin}}) {
    check_numbers(t.name, *t.tensor, 2, "(positions, rotary_dim / 2)", false);
    check_fits(t.name, *t.tensor, "k", g.k);
    check_device(t.name, *t.tensor, "k", g.k);
    check_memory(t.name, *t.tensor);
  }
  check_shape("sin", g.sin, {g.cos.shape[0], g.cos.shape[1], 0, 0}, "the shape of cos");
  if (g.cos.shape[1] > headdim / 2)
    invalid(text("cos has the shape ", shape_text(g.cos), ", a rotary_dim of 2 * ", g.cos.shape[1], ", and headdim of k is ", headdim,
                 "; rotary_dim is at most headdim"));
}

void check_queries(const fattn_append_problem& g, int64_t batch, int64_t headdim) {
  if ((g.q.ndim == 0) != (g.q_out.ndim == 0)) invalid("one of q and q_out is absent; give both (q_out may be q itself), or neither");
  if (g.q.ndim == 0) {
    if (g.cu_seqlens_q.ndim != 0) invalid("cu_seqlens_q is given without q; give q, or leave it out");
    return;
  }
  const bool packed = g.cu_seqlens_q.ndim != 0;
  const int ndim = packed ? 3 : 4;
  const char* const dimensions = packed ? "(total_q, nheads, headdim) of packed sequences (cu_seqlens_q)" : "(batch, seqlen_q, nheads, headdim)";
  check_numbers("q", g.q, ndim, dimensions, false);
  check_numbers("q_out", g.q_out, ndim, dimensions, true);
  check_fits("q", g.q, "k", g.k);
  check_device("q", g.q, "k", g.k);
  check_device("q_out", g.q_out, "k", g.k);
  if (g.q_out.dtype != g.q.dtype)
    invalid(text("q_out is ", name_of(static_cast<DType>(g.q_out.dtype)), " but q is ", name_of(static_cast<DType>(g.q.dtype)),
                 "; they share one dtype"));
  check_shape("q_out", g.q_out, {g.q.shape[0], g.q.shape[1], g.q.shape[2], g.q.shape[3]}, "the shape of q");
  if (g.q.shape[ndim - 1] != headdim) invalid(text("q has a headdim of ", g.q.shape[ndim - 1], " and k of ", headdim, "; they must have the same"));
  if (packed) check_cu_seqlens("cu_seqlens_q", g.cu_seqlens_q, "k", g.k);
  const int64_t sequences = packed ? g.cu_seqlens_q.shape[0] - 1 : g.q.shape[0];
  if (sequences != batch)
    invalid(text(packed ? "cu_seqlens_q" : "q", " has ", sequences, " sequences and k has ", batch, "; they must have the same"));
}

void check_written_lists(const fattn_append_problem& g, const AppendSizes& sizes) {
  const auto check = [&](const char* name, const fattn_tensor& t, int64_t n, const char* dimensions, const char* because) {
    if (t.ndim == 0) return;
    check_dtype(name, t, FATTN_I32, "");
    check_view(name, t, 1, dimensions, true);
    check_device(name, t, "k", g.k);
    check_shape_of(name, t, {n}, because);
    check_memory(name, t);
  };
  check("seqused_k", g.seqused_k, sizes.batch, "(batch)", "a number for each sequence");
  check("status", g.status, 2, "(2)", "what is wrong, and where");
  if (g.seqused_k.ndim != 0 && sizes.room > std::numeric_limits<int32_t>::max())
    invalid(
        text("the caches have room for ", sizes.room, " keys of a sequence, and seqused_k counts to 2^31 - 1; give a part of them, or leave it out"));
}

// Outputs are apart from each other and from what is read.
void check_all_apart(const fattn_append_problem& g) {
  const auto outputs = outputs_of(g);
  const auto inputs = inputs_of(g);
  for (const Named& output : outputs) {
    if (output.tensor->ndim == 0) continue;
    for (const Named& input : inputs)
      if (input.tensor->ndim != 0)
        check_apart(output.name, *output.tensor, input.name, *input.tensor, output.tensor == &g.q_out && input.tensor == &g.q);
    for (const Named& other : outputs) {
      if (other.tensor == output.tensor) break;
      if (other.tensor->ndim != 0) check_apart(output.name, *output.tensor, other.name, *other.tensor, false);
    }
  }
}

// Who says it, of the nth sequence: "cache_seqlens[3]".
std::string said_by(const char* list, const char* number, const fattn_tensor& given, int64_t n) {
  return given.ndim != 0 ? text(list, "[", n, "]") : std::string(number);
}

void check_room(const fattn_append_problem& g, const AppendSizes& sizes, int64_t n, int64_t length, int64_t keys) {
  if (length >= 0 && keys <= sizes.room && length <= sizes.room - keys) return;
  const std::string room = g.block_table.ndim != 0
                               ? text("block_table has room for ", sizes.room, ", ", g.block_table.shape[1], " pages of ", sizes.cache_rows)
                               : text("the caches have room for ", sizes.room);
  invalid(text(said_by("cache_seqlens", "cache_seqlen", g.cache_seqlens, n), " is ", length, ", and ", keys, keys == 1 ? " key is" : " keys are",
               " new; allowed: ", keys <= sizes.room ? text("0 to ", sizes.room - keys) : std::string("fewer new keys alone"), ", for ", room));
}

// Rows of an entry or a page, side by side: [begin, end) of all, rows counted through entries or pages.
struct Written {
  int64_t begin, end;
};

// That no two new keys have one place. Few of them allocate nothing.
class DistinctPlaces {
 public:
  DistinctPlaces(const AppendSizes& sizes, const AppendLists& lists, bool paged) : sizes_(sizes), lists_(lists), paged_(paged) {
    int64_t count = 0;
    for (int64_t n = 0; n < sizes.batch; ++n) each(n, [&](const Written&) { ++count; });
    if (count > kFew) many_.resize(static_cast<size_t>(count));
    Written* const all = count > kFew ? many_.data() : few_;
    count = 0;
    for (int64_t n = 0; n < sizes.batch; ++n) each(n, [&](const Written& w) { all[count++] = w; });
    std::sort(all, all + count, [](const Written& a, const Written& b) { return a.begin < b.begin; });
    for (int64_t i = 1; i < count; ++i)
      if (all[i].begin < all[i - 1].end) refuse(all[i].begin);
  }

 private:
  template <class Body>
  void each(int64_t n, const Body& body) const {
    const int64_t length = lists_.length(n), end = length + lists_.new_keys(n), rows = sizes_.cache_rows;
    for (int64_t at = length; at < end;) {
      const int64_t stop = paged_ ? std::min(end, (at / rows + 1) * rows) : end;
      const Row place = lists_.place(n, at - length);
      body(Written{place.batch * rows + place.row, place.batch * rows + place.row + stop - at});
      at = stop;
    }
  }
  [[noreturn]] void refuse(int64_t place) const {
    const int64_t entry = place / sizes_.cache_rows, row = place % sizes_.cache_rows;
    if (paged_)
      invalid(text("page ", entry, " is in block_table twice where new keys are to be written: row ", row,
                   " of it would be written over. Pages that sequences share are read only; give each sequence pages of its own for its new keys"));
    invalid(text("entry ", entry, " is in cache_batch_idx twice, and row ", row,
                 " of it would be written twice; give each sequence an entry of its own"));
  }
  static constexpr int64_t kFew = 512;
  const AppendSizes& sizes_;
  const AppendLists& lists_;
  const bool paged_;
  Written few_[kFew];
  std::vector<Written> many_;
};

}  // namespace

AppendSizes check_append(const fattn_append_problem& g) {
  check_execution(g.backend, g.cpu_isa, g.num_threads, g.executor);
  if (g.interleaved != 0 && g.interleaved != 1) invalid(text("interleaved is ", g.interleaved, "; allowed: 0, 1"));
  if (g.q_positions < FATTN_QUERIES_LAST || g.q_positions > FATTN_QUERIES_TOGETHER)
    invalid(text("q_positions is ", g.q_positions, "; allowed: 0 (last), 1 (first), 2 (together)"));
  check_new(g);
  const bool packed = g.cu_seqlens_new.ndim != 0, packed_q = g.cu_seqlens_q.ndim != 0, paged = g.block_table.ndim != 0;
  const int64_t batch = packed ? g.cu_seqlens_new.shape[0] - 1 : g.k.shape[0];
  check_caches(g, batch);
  check_numbers_of("cache_seqlens", g.cache_seqlens, g, batch);
  check_numbers_of("cache_batch_idx", g.cache_batch_idx, g, batch);
  check_numbers_of("positions", g.positions, g, batch);
  if (g.cache_seqlens.ndim != 0 && g.cache_seqlen != 0)
    invalid(text("cache_seqlen is ", g.cache_seqlen, ", and cache_seqlens are given; leave one of them out"));
  const int64_t headdim = g.k.shape[g.k.ndim - 1];
  check_angles(g, headdim);
  check_queries(g, batch, headdim);
  AppendSizes sizes{};
  sizes.batch = batch;
  sizes.entries_new = packed ? 1 : batch;
  sizes.rows_new = g.k.shape[packed ? 0 : 1];
  sizes.heads_k = g.k.shape[g.k.ndim - 2];
  if (g.q.ndim != 0) {
    sizes.entries_q = packed_q ? 1 : batch;
    sizes.rows_q = g.q.shape[packed_q ? 0 : 1];
    sizes.heads = g.q.shape[g.q.ndim - 2];
  }
  sizes.cache_entries = g.k_cache.shape[0];
  sizes.cache_rows = g.k_cache.shape[1];
  sizes.positions = g.cos.ndim != 0 ? g.cos.shape[0] : 0;
  sizes.headdim = static_cast<int>(headdim);
  sizes.headdim_v = static_cast<int>(g.v.shape[g.v.ndim - 1]);
  sizes.half = g.cos.ndim != 0 ? static_cast<int>(g.cos.shape[1]) : 0;
  sizes.room = sizes.cache_rows;
  constexpr int64_t kMost = int64_t{1} << 56;  // so that sums of them are numbers, too
  if (paged && (__builtin_mul_overflow(sizes.cache_rows, g.block_table.shape[1], &sizes.room) || sizes.room > kMost))
    invalid(text("block_table has ", g.block_table.shape[1], " columns of pages of ", sizes.cache_rows,
                 " keys; allowed: 2^56 keys of a sequence. Give a part of the table"));
  const auto check_product = [&](const char* name, const fattn_tensor& t, int64_t entries, int64_t of_entry, int64_t heads) {
    int64_t rows = 0, all = 0;
    if (__builtin_mul_overflow(entries, of_entry, &rows) || rows > kMost || __builtin_mul_overflow(rows, heads, &all))
      invalid(text(name, " has the shape ", shape_text(t), "; batch and seqlen together must be at most 2^56. Split the batch"));
  };
  check_product("k", g.k, sizes.entries_new, sizes.rows_new, sizes.heads_k);
  check_product("q", g.q, sizes.entries_q, sizes.rows_q, sizes.heads);
  check_written_lists(g, sizes);
  for (const Named& t :
       std::initializer_list<Named>{{"k", &g.k}, {"v", &g.v}, {"k_cache", &g.k_cache}, {"v_cache", &g.v_cache}, {"q", &g.q}, {"q_out", &g.q_out}})
    if (t.tensor->ndim != 0) check_memory(t.name, *t.tensor);
  check_all_apart(g);
  check_stream(g.stream, static_cast<Device>(g.k.device_type));
  return sizes;
}

void check_append_values(const fattn_append_problem& g, const AppendSizes& sizes, bool readable) {
  const AppendLists lists(g, sizes);
  const bool packed = g.cu_seqlens_new.ndim != 0, packed_q = g.cu_seqlens_q.ndim != 0, paged = g.block_table.ndim != 0;
  const bool knows_keys = readable || (!packed && g.cache_seqlens.ndim == 0);
  const bool knows_positions = g.cos.ndim != 0 && (readable || (knows_keys && g.positions.ndim == 0));
  if (readable && packed) check_cu_seqlens_values("cu_seqlens_new", g.cu_seqlens_new, "k", sizes.rows_new);
  if (readable && packed_q) check_cu_seqlens_values("cu_seqlens_q", g.cu_seqlens_q, "q", sizes.rows_q);
  for (int64_t n = 0; n < (readable ? sizes.batch : std::min<int64_t>(sizes.batch, 1)); ++n) {
    if (knows_keys) check_room(g, sizes, n, lists.length(n), lists.new_keys(n));
    if (readable && g.cache_batch_idx.ndim != 0 && (lists.entry(n) < 0 || lists.entry(n) >= sizes.cache_entries))
      invalid(text("cache_batch_idx[", n, "] is ", lists.entry(n), "; allowed: 0 to ", sizes.cache_entries - 1, ", the entries of k_cache"));
    if (readable && paged && lists.new_keys(n) > 0) {
      const int64_t first = lists.length(n) / sizes.cache_rows, last = (lists.length(n) + lists.new_keys(n) - 1) / sizes.cache_rows;
      for (int64_t column = first; column <= last; ++column)
        if (lists.page(n, column) < 0 || lists.page(n, column) >= sizes.cache_entries)
          invalid(text("block_table[", n, ", ", column, "] is ", lists.page(n, column), ", and a new key is to be written there; allowed: 0 to ",
                       sizes.cache_entries - 1, ", the last page of k_cache"));
    }
    if (!knows_positions) continue;
    const char* const who = g.positions.ndim != 0 ? "positions" : g.cache_seqlens.ndim != 0 ? "cache_seqlens" : "cache_seqlen";
    const int64_t index = g.positions.ndim != 0 || g.cache_seqlens.ndim != 0 ? n : -1;
    check_positions(who, index, lists.key_position(n), lists.new_keys(n), sizes.positions);
    if (g.q.ndim == 0 || (packed_q && !readable) || lists.queries(n) == 0) continue;
    const int64_t first = lists.query_position(n), queries = g.q_positions == FATTN_QUERIES_TOGETHER ? 1 : lists.queries(n);
    if (first < 0 || queries > sizes.positions || first > sizes.positions - queries)
      invalid(text(said_by(who, who, g.positions.ndim != 0 ? g.positions : g.cache_seqlens, n), " is ", lists.key_position(n), ", so that ", queries,
                   queries == 1 ? " position of queries begins at " : " positions of queries begin at ", first, ", and cos has ", sizes.positions,
                   sizes.positions == 1 ? " row" : " rows", "; make cos and sin for more positions, or give fewer queries"));
  }
  const bool written = sizes.heads_k > 0;  // else caches have any number of rows, and none has memory
  if (readable && written && (paged || g.cache_batch_idx.ndim != 0)) DistinctPlaces(sizes, lists, paged);
}

}  // namespace fattn::core::rows
