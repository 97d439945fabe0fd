// The operators torch.ops.fattn.forward, backward and append, on torch's stable interface: one binary for torch 2.10 and every later one. They know
// no autograd; python/fattn has that, the fakes and the front. Layout and meaning of every tensor: include/fattn/fattn.h.
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "fattn/fattn.hpp"
#include "torch/append.h"
#include "torch/plans.h"
#include "torch/scores.h"
#include "torch/stack.h"

namespace fattn::torch {
namespace {

// The version of the interface that the operators are written for, as torch wants it: 2.10.
constexpr uint64_t kTorchVersion = (2ULL << 56) | (10ULL << 48);

// What torch shows where it names the origin of an operator; __FILE__ would be a path of the machine that built this.
constexpr char kFile[] = "torch/operators.cpp";

// The last arguments of every operator, in this order: those that most calls set come first, because torch takes a tenth of a microsecond for each
// that is given, and half of that for each that is not. So what most calls leave out is taken by operators of their own.
const std::string kOptionsSchema =
    "float? softmax_scale=None, bool causal=False, bool deterministic=False, bool bhsd=False, SymInt window_left=-1, SymInt window_right=-1, float "
    "softcap=0., "
    "int backend=0, int algorithm=0";
// The last two stand for softmax_scale and softcap where compiled code has them as symbols, which a float of a schema cannot be.
const std::string kScoresSchema = ", float p_dropout=0., bool fp32_outputs=False, bool batch_invariant=False" + Scores::schema(false) +
                                  ", Tensor? softmax_scale_at=None, Tensor? softcap_at=None";
const std::string kPackedSchema = Scores::schema(true) + ", SymInt max_seqlen_q=0, SymInt max_seqlen_k=0";
enum class Takes { kOptions, kScores, kPacked };  // each with those before it
struct Choices {
  Options options;
  bool bhsd = false;          // dimensions of q, k, v, o and their gradients: heads before seqlen
  bool fp32_outputs = false;  // new ones of 16-bit inputs: o, and dq, dk and dv. Tensors that are there say it themselves
  Scores scores;
};
// What a number's tensor holds: one float64 in the host's memory, whatever device q is on.
double number_at(const char* name, const Tensor& tensor) {
  if (tensor.dim() != 0 || tensor.dtype() != aoti_torch_dtype_float64() || tensor.device_type() != aoti_torch_device_type_cpu())
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + " is a tensor of another kind; allowed: 0 dimensions, float64, on the CPU");
  require_storage(name, tensor, DType::kF64);
  return *static_cast<const double*>(tensor.data());
}
template <Takes takes>
Choices take_choices(Arguments& arguments) {
  Choices choices;
  Options& o = choices.options;
  o.softmax_scale = arguments.optional_number();
  o.causal = arguments.flag();
  o.deterministic = arguments.flag();
  choices.bhsd = arguments.flag();
  o.window_left = arguments.integer();
  o.window_right = arguments.integer();
  o.softcap = arguments.number();
  o.backend = static_cast<Backend>(arguments.integer());
  o.algorithm = static_cast<Algorithm>(arguments.integer());
  if constexpr (takes != Takes::kOptions) {
    o.p_dropout = arguments.number();
    choices.fp32_outputs = arguments.flag();
    o.batch_invariant = arguments.flag();
    choices.scores.take(arguments, false);
    if (const auto scale = arguments.optional_tensor()) o.softmax_scale = number_at("softmax_scale_at", *scale);
    if (const auto softcap = arguments.optional_tensor()) o.softcap = number_at("softcap_at", *softcap);
  }
  if constexpr (takes == Takes::kPacked) {
    choices.scores.take(arguments, true);
    o.max_seqlen_q = arguments.integer();
    o.max_seqlen_k = arguments.integer();
  }
  uint32_t threads = 0;
  check_torch(torch_get_num_threads(&threads), "reading the number of threads");
  o.num_threads = static_cast<int>(threads);
  return choices;
}

void* current_stream(const Tensor& q) {
  if (!q.on_cuda()) return nullptr;
  if (!aoti_torch_get_current_cuda_stream) throw Error(ErrorCode::kInternal, "q is on a CUDA device, but this torch is built without CUDA");
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(q.device_index(), &stream), "reading the current CUDA stream");
  return stream;
}

// On the current stream, with a workspace of torch's allocator: it may be freed at once, because torch gives memory to later work on the same
// stream only.
template <class Tensors>
void execute_at_once(const Tensors& tensors, const Options& options, const Tensor& q) {
  const KnownPlan& known = PlanCache::of_this_thread().get(describe(tensors, options));
  const size_t bytes = known.workspace_bytes;
  if (bytes == 0) return known.plan.execute(tensors, nullptr, 0, current_stream(q));
  const Tensor workspace = Tensor::empty<1>({static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8(), q);
  known.plan.execute(tensors, workspace.mutable_data(), bytes, current_stream(q));
}

// What the library itself has no memory for on a GPU, a context or a kernel, is told in torch's words too.
template <class Tensors>
void execute(const Tensors& tensors, const Options& options, const Tensor& q) {
  try {
    execute_at_once(tensors, options, q);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory || !q.on_cuda() || std::string_view(error.what()).find(kOutOfCudaMemory) == 0) throw;
    throw Error(error.code(), std::string(kOutOfCudaMemory) + ". " + error.what());
  }
}

int32_t lse_dtype(const Tensor& q) { return q.dtype() == aoti_torch_dtype_float64() ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(); }

// Of a new output beside inputs of this dtype.
int32_t output_dtype(const Tensor& like, const Choices& choices) {
  const int32_t dtype = like.dtype();
  const bool has_16_bits = dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16();
  return choices.fp32_outputs && has_16_bits ? aoti_torch_dtype_float32() : dtype;
}

ForwardTensors forward_inputs(const Tensor& q, const Tensor& k, const Tensor& v, bool bhsd, const Scores& scores) {
  ForwardTensors tensors;
  tensors.q = input("q", q, bhsd);
  tensors.k = input("k", k, bhsd);
  tensors.v = input("v", v, bhsd);
  tensors.scores = scores.views();
  return tensors;
}

template <Takes takes>
auto result_shapes(const fattn::Tensor& q, const fattn::Tensor& v) {
  if constexpr (takes == Takes::kPacked)
    return std::pair(std::array{q.shape(0), q.shape(1), v.shape(v.ndim() - 1)}, std::array{q.shape(1), q.shape(0)});
  else
    return std::pair(std::array{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, std::array{q.shape(0), q.shape(2), q.shape(1)});
}
Tensor new_result(const std::array<int64_t, 4>& shape, int32_t dtype, const Tensor& like, bool bhsd) {
  return Tensor::empty4(shape, dtype, like, bhsd);
}
Tensor new_result(const std::array<int64_t, 3>& shape, int32_t dtype, const Tensor& like, bool) { return Tensor::empty(shape, dtype, like); }
template <Takes takes>
auto shape_of(const fattn::Tensor& t) {
  if constexpr (takes == Takes::kPacked)
    return std::array{t.shape(0), t.shape(1), t.shape(2)};
  else
    return shape4(t);
}

// Of packed sequences q, k, v, o and their gradients have 3 dimensions, lse 2; k and v of a paged cache have 4.
template <Takes takes>
void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const auto choices = take_choices<takes>(arguments);
  const bool bhsd = choices.bhsd;

  ForwardTensors tensors = forward_inputs(q, k, v, bhsd, choices.scores);
  const auto [o_shape, lse_shape] = result_shapes<takes>(tensors.q, tensors.v);
  Tensor o = new_result(o_shape, output_dtype(q, choices), q, bhsd);
  Tensor lse = Tensor::empty(lse_shape, lse_dtype(q), q);
  tensors.o = output("o", o, bhsd);
  tensors.lse = output("lse", lse);
  execute(tensors, choices.options, q);
  stack[0] = result(std::move(o));
  stack[1] = result(std::move(lse));
}

void forward_out(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor(), lse = arguments.tensor();
  const Choices choices = take_choices<Takes::kScores>(arguments);
  const auto& [options, bhsd, _, scores] = choices;

  ForwardTensors tensors = forward_inputs(q, k, v, bhsd, scores);
  tensors.o = output("o", o, bhsd);
  tensors.lse = output("lse", lse);
  execute(tensors, options, q);
}

BackwardTensors backward_inputs(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                const std::optional<Tensor>& dlse, bool bhsd, const Scores& scores) {
  BackwardTensors tensors;
  tensors.q = input("q", q, bhsd);
  tensors.k = input("k", k, bhsd);
  tensors.v = input("v", v, bhsd);
  tensors.o = input("o", o, bhsd);
  tensors.lse = input("lse", lse);
  tensors.dout = input("dout", dout, bhsd);
  if (dlse) tensors.dlse = input("dlse", *dlse);
  tensors.scores = scores.views();
  return tensors;
}

// The gradient of one of the scores, in its shape and dtype; without elements if it is not wanted.
Tensor new_gradient(bool wanted, const char* name, const std::optional<Tensor>& of, const fattn::Tensor& view, const Tensor& q, fattn::Tensor& to) {
  if (!wanted) return Tensor::empty<1>({0}, q.dtype(), q);
  if (!of) throw Error(ErrorCode::kInvalidArgument, std::string(name) + " is wanted, and what it is the gradient of is absent");
  Tensor gradient = view.ndim() == 4 ? Tensor::empty<4>(shape4(view), of->dtype(), q) : Tensor::empty<1>({view.shape(0)}, of->dtype(), q);
  to = beside(name, gradient, gradient.mutable_data(), view.dtype());
  return gradient;
}

// `with_more`: the gradients of bias and sinks, as they are wanted, are further results.
template <Takes takes, bool with_more>
void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dout = arguments.tensor(), q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor(),
               lse = arguments.tensor();
  const Choices choices = take_choices<takes>(arguments);
  const auto& [options, bhsd, _, scores] = choices;
  std::optional<Tensor> dlse;
  if constexpr (takes != Takes::kOptions)
    if (auto given = arguments.optional_tensor()) dlse.emplace(std::move(*given));
  bool wants_dbias = false, wants_dsinks = false;
  if constexpr (with_more) {
    wants_dbias = arguments.flag();
    wants_dsinks = arguments.flag();
  }

  BackwardTensors tensors = backward_inputs(dout, q, k, v, o, lse, dlse, bhsd, scores);
  Tensor dq = new_result(shape_of<takes>(tensors.q), output_dtype(q, choices), q, bhsd);
  Tensor dk = new_result(shape_of<takes>(tensors.k), output_dtype(k, choices), q, bhsd);
  Tensor dv = new_result(shape_of<takes>(tensors.v), output_dtype(v, choices), q, bhsd);
  tensors.dq = output("dq", dq, bhsd);
  tensors.dk = output("dk", dk, bhsd);
  tensors.dv = output("dv", dv, bhsd);
  if constexpr (with_more) {
    Tensor dbias = new_gradient(wants_dbias, "dbias", scores.bias(), tensors.scores.bias, q, tensors.dbias);
    Tensor dsinks = new_gradient(wants_dsinks, "dsinks", scores.sinks(), tensors.scores.sinks, q, tensors.dsinks);
    execute(tensors, options, q);
    stack[3] = result(std::move(dbias));
    stack[4] = result(std::move(dsinks));
  } else {
    execute(tensors, options, q);
  }
  stack[0] = result(std::move(dq));
  stack[1] = result(std::move(dk));
  stack[2] = result(std::move(dv));
}

void backward_out(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dout = arguments.tensor(), q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor(),
               lse = arguments.tensor(), dq = arguments.tensor(), dk = arguments.tensor(), dv = arguments.tensor();
  const Choices choices = take_choices<Takes::kScores>(arguments);
  const auto& [options, bhsd, _, scores] = choices;
  const std::optional<Tensor> dlse = arguments.optional_tensor();

  BackwardTensors tensors = backward_inputs(dout, q, k, v, o, lse, dlse, bhsd, scores);
  tensors.dq = output("dq", dq, bhsd);
  tensors.dk = output("dk", dk, bhsd);
  tensors.dv = output("dv", dv, bhsd);
  execute(tensors, options, q);
}

// torch makes a RuntimeError of whatever is thrown; the front makes Python's customary exception of the status in its text.
template <void (*body)(StableIValue*)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    body(stack);
  } catch (const Error& e) {
    throw std::runtime_error(std::string("fattn: ") + fattn_status_name(static_cast<fattn_status>(e.code())) + ": " + e.what());
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("fattn: out_of_memory: out of memory; use a smaller problem or free memory");
  }
}

// Registered when the library is loaded, until the process ends.
class Registration {
 public:
  Registration() {
    check_torch(aoti_torch_library_init_def("fattn", kFile, __LINE__, &schemas_), "making the namespace fattn");
    const std::string forward = "(Tensor q, Tensor k, Tensor v, " + kOptionsSchema, outputs = ") -> (Tensor o, Tensor lse)";
    define("forward" + forward + outputs);
    define("forward_with_scores" + forward + kScoresSchema + outputs);
    define("forward_varlen" + forward + kScoresSchema + kPackedSchema + outputs);
    const std::string backward = "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, " + kOptionsSchema;
    const std::string dlse = ", Tensor? dlse=None", gradients = ") -> (Tensor dq, Tensor dk, Tensor dv",
                      more = ", bool wants_dbias=False, bool wants_dsinks=False", all_gradients = gradients + ", Tensor dbias, Tensor dsinks)";
    define("backward" + backward + gradients + ")");
    define("backward_with_scores" + backward + kScoresSchema + dlse + gradients + ")");
    define("backward_with_more" + backward + kScoresSchema + dlse + more + all_gradients);
    define("backward_varlen" + backward + kScoresSchema + kPackedSchema + dlse + gradients + ")");
    define("backward_varlen_with_more" + backward + kScoresSchema + kPackedSchema + dlse + more + all_gradients);
    // The same into tensors that are there.
    define("forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) o, Tensor(b!) lse, " + kOptionsSchema + kScoresSchema + ") -> ()");
    define("backward_out(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, " +
           kOptionsSchema + kScoresSchema + dlse + ") -> ()");
    define(kAppendSchema);
    implement("CPU", cpu_);
    implement("CUDA", cuda_);
  }
  ~Registration() {
    for (TorchLibraryHandle library : {cuda_, cpu_, schemas_}) aoti_torch_delete_library_object(library);
  }
  Registration(const Registration&) = delete;

 private:
  void define(const std::string& schema) { check_torch(aoti_torch_library_def(schemas_, schema.c_str()), "defining an operator"); }
  static void implement(const char* key, TorchLibraryHandle& library) {
    check_torch(aoti_torch_library_init_impl("fattn", key, kFile, __LINE__, &library), "opening the namespace fattn");
    const auto implementation = [&](const char* name, void (*body)(StableIValue*, uint64_t, uint64_t)) {
      check_torch(torch_library_impl(library, name, body, kTorchVersion), "implementing an operator");
    };
    implementation("forward", boxed<forward<Takes::kOptions>>);
    implementation("forward_with_scores", boxed<forward<Takes::kScores>>);
    implementation("forward_varlen", boxed<forward<Takes::kPacked>>);
    implementation("backward", boxed<backward<Takes::kOptions, false>>);
    implementation("backward_with_scores", boxed<backward<Takes::kScores, false>>);
    implementation("backward_with_more", boxed<backward<Takes::kScores, true>>);
    implementation("backward_varlen", boxed<backward<Takes::kPacked, false>>);
    implementation("backward_varlen_with_more", boxed<backward<Takes::kPacked, true>>);
    implementation("forward_out", boxed<forward_out>);
    implementation("backward_out", boxed<backward_out>);
    implementation("append", boxed<append<current_stream>>);
  }

  TorchLibraryHandle schemas_ = nullptr, cpu_ = nullptr, cuda_ = nullptr;
};

const Registration registration;

}  // namespace
}  // namespace fattn::torch
