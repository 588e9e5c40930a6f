// scan.cpp on PyTorch's tensors: the operators `rsa_hf::walk`, which autograd differentiates, and `walk_backward`.

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "problem.h"

namespace rsa_hf {
namespace {

using torch::jit::Stack;

// The arguments in the order of autograd.py, which declares the operators: first the tensors, beginning with those
// that have a gradient (`Problem.tensors` of problem.py). Undefined ones are missing; `mask` and `visible` always are.
enum {
  VALUE, ATTENTION, MU, ETA, NU, THETA, FREE_LAGS, GRADIENTS,
  MASK = GRADIENTS, KEY_MASK, DOCUMENTS, VISIBLE, LAYOUT, TENSORS
};
using Tensors = std::array<at::Tensor, TENSORS>;

enum { SCALE, NUM_FREE_LAGS, NUM_KEY_VALUE_GROUPS, QUERY_LENGTH, QUERY_OFFSET, CAUSAL, SLIDING_WINDOW, OTHERS };
using Others = c10::IValue;  // a list: compiled autograd cannot hash a tuple

constexpr Index WORTH_A_THREAD = 1 << 15;  // numbers per thread, at least
constexpr Index FEW_QUERIES = 16;          // as in mask.py

at::Tensor tensor_or_undefined(const c10::IValue& value) { return value.isNone() ? at::Tensor() : value.toTensor(); }

// A tensor with its signs in memory: PyTorch stores the sign of a negated view as a bit.
at::Tensor in_dtype(at::Tensor tensor, at::ScalarType dtype) {
  if (tensor.is_neg()) tensor = tensor.resolve_neg();
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// Float64 for float64 values, else float32: decay powers and sums lose too much in half precision.
at::ScalarType working_dtype(const at::Tensor& value) {
  return value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Instead of `at::empty` and `at::empty_strided`, which go through the dispatcher several times.
at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const at::Tensor tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) tensor.fill_(NAN);
  return tensor;
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return empty(sizes, c10::contiguous_strides(sizes), dtype);
}

// With contiguous channels, in the memory order of another tensor if that one has contiguous channels.
at::Tensor empty_rows(const at::Tensor& like, at::ScalarType dtype) {
  if (like.stride(-1) == 1) {
    const auto strides = at::infer_dense_strides(like.sizes(), like.strides());
    if (strides.back() == 1) return empty(like.sizes(), strides, dtype);
  }
  return empty(like.sizes(), dtype);
}

// A `Problem`, and the tensors whose memory it reads.
struct ProblemOfTensors {
  Problem problem{};
  std::vector<at::Tensor> kept;
  at::ScalarType dtype;

  ProblemOfTensors(const Tensors& tensors, const Others& arguments) : dtype(working_dtype(tensors[VALUE])) {
    const auto others = arguments.toListRef();
    const auto& value = tensors[VALUE];
    Problem& p = problem;
    p.layout = static_cast<const Row*>(pointer(tensors[LAYOUT]));
    p.heads = tensors[LAYOUT].numel() / (sizeof(Row) / sizeof(Index));
    p.rows = value.size(0);
    p.channels = value.size(3);
    p.queries = others[QUERY_LENGTH].toInt();
    p.query_offset = others[QUERY_OFFSET].toInt();
    p.is_causal = others[CAUSAL].toBool();
    p.keys = p.is_causal ? p.query_offset + p.queries : value.size(2);
    p.num_key_value_groups = others[NUM_KEY_VALUE_GROUPS].toInt();
    p.threads = std::min<Index>(at::get_num_threads(), p.rows * p.heads * p.keys * p.channels / WORTH_A_THREAD);
    p.threads = std::max<Index>(p.threads, 1);
    const auto window = others[SLIDING_WINDOW].isNone() ? 0 : others[SLIDING_WINDOW].toInt();
    p.window = window < p.keys ? window : 0;
    std::tie(p.key_mask, p.key_mask_row) = row_of_keys<bool>(tensors[KEY_MASK], at::kBool);
    std::tie(p.documents, p.documents_row) = row_of_keys<int64_t>(tensors[DOCUMENTS], at::kLong);
    p.scale = others[SCALE].toDouble();
    p.free_lags_of_head = others[NUM_FREE_LAGS].toInt();
    p.mu = learned(tensors[MU]);
    p.eta = learned(tensors[ETA]);
    p.nu = learned(tensors[NU]);
    p.theta = learned(tensors[THETA]);
    p.free_lags = learned(tensors[FREE_LAGS]);
    p.value = rows(value);
  }

  // A tensor in the dtype of the problem: [B, H, T, D], or [B, T, H, D] if its positions come first.
  Tensor rows(at::Tensor tensor, bool positions_first = false) {
    if (!tensor.defined()) return {};
    tensor = in_dtype(tensor, dtype);
    if (tensor.stride(3) != 1) tensor = tensor.contiguous();
    const auto head = tensor.stride(positions_first ? 2 : 1), position = tensor.stride(positions_first ? 1 : 2);
    return {pointer(tensor), tensor.stride(0), head, position};
  }

  Learned learned(at::Tensor tensor) {
    if (!tensor.defined()) return {};
    tensor = in_dtype(tensor, tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    return {pointer(tensor.contiguous()), tensor.scalar_type() == at::kDouble};
  }

  void solve(Pass pass) const {
    if (dtype == at::kDouble) rsa_hf::solve<double>(problem, pass);
    else rsa_hf::solve<float>(problem, pass);
  }

 private:
  // [B or 1, S], and the stride from row to row.
  template <typename Number>
  std::pair<const Number*, Index> row_of_keys(const at::Tensor& given, at::ScalarType dtype) {
    if (!given.defined()) return {};
    const auto tensor = in_dtype(given, dtype).contiguous();
    return {static_cast<const Number*>(pointer(tensor)), tensor.size(0) == 1 ? 0 : tensor.size(1)};
  }

  void* pointer(const at::Tensor& tensor) {
    kept.push_back(tensor);
    return const_cast<void*>(tensor.const_data_ptr());
  }
};

// Call `visit(begin, length)` for each run of heads below `count` that are not in `heads` (ascending).
template <typename Visit>
void for_other_heads(const std::vector<Index>& heads, Index count, Visit visit) {
  Index begin = 0;
  for (Index head : heads) {
    if (head > begin) visit(begin, head - begin);
    begin = head + 1;
  }
  if (count > begin) visit(begin, count - begin);
}

void copy_other_heads(const Problem& p, const at::Tensor& from, const at::Tensor& to) {
  std::vector<Index> heads;
  for (Index h = 0; h < p.heads; h++) heads.push_back(p.layout[h].index);
  for_other_heads(heads, from.size(2), [&](Index begin, Index length) {
    to.narrow(2, begin, length).copy_(from.narrow(2, begin, length));
  });
}

at::Tensor forward(const Tensors& tensors, const Others& others) {
  ProblemOfTensors read(tensors, others);
  Problem& p = read.problem;
  const auto& attention = tensors[ATTENTION];
  const auto sizes = attention.defined() ? attention.sizes().vec()
                                         : std::vector<int64_t>{p.rows, p.heads, p.queries, p.channels};
  const auto output = empty(sizes, read.dtype);
  p.attention = read.rows(attention, true);
  p.output = read.rows(output, attention.defined());
  if (attention.defined()) copy_other_heads(p, attention, output);
  const bool are_few = p.queries <= FEW_QUERIES && p.queries < tensors[VALUE].size(2);
  read.solve(are_few ? Pass::FEW_QUERIES : Pass::FORWARD);
  return attention.defined() ? in_dtype(output, attention.scalar_type()) : output;
}

Tensors backward(const at::Tensor& grad, const Tensors& tensors, const Others& others) {
  ProblemOfTensors read(tensors, others);
  Problem& p = read.problem;
  const auto &value = tensors[VALUE], &attention = tensors[ATTENTION];
  Tensors found;
  found[VALUE] = empty_rows(value, read.dtype);
  if (p.keys < value.size(2)) found[VALUE].narrow(2, p.keys, value.size(2) - p.keys).zero_();
  std::vector<Index> are_read;
  for (Index h = 0; h < p.heads; h++)
    if (!p.shares_value(h)) are_read.push_back(p.layout[h].index / p.num_key_value_groups);
  for_other_heads(are_read, value.size(1),
                  [&](Index begin, Index length) { found[VALUE].narrow(1, begin, length).zero_(); });
  if (attention.defined()) {
    found[ATTENTION] = empty_rows(attention, read.dtype);
    copy_other_heads(p, grad, found[ATTENTION]);
  }
  Learned* sums[] = {&p.dmu, &p.deta, &p.dnu, &p.dtheta, &p.dfree_lags};
  for (int i = MU; i < GRADIENTS; i++) {
    if (!tensors[i].defined()) continue;
    const auto dtype = tensors[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    found[i] = empty(tensors[i].sizes(), dtype);
    std::memset(found[i].mutable_data_ptr(), 0, found[i].nbytes());
    *sums[i - MU] = read.learned(found[i]);
  }
  p.attention = read.rows(attention, true);
  p.grad = read.rows(grad, attention.defined());
  p.dattention = read.rows(found[ATTENTION], true);
  p.dvalue = read.rows(found[VALUE]);
  read.solve(Pass::BACKWARD);
  for (int i = 0; i < GRADIENTS; i++)
    if (found[i].defined()) found[i] = in_dtype(found[i], tensors[i].scalar_type());
  return found;
}

// --- autograd -------------------------------------------------------------------------------------------------------

bool has_tangent(const at::Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

// Whether a gradient is a plain tensor, and nothing differentiates it again.
bool is_plain(const at::Tensor& grad) {
  using Key = c10::DispatchKey;
  const c10::DispatchKeySet wrapped{Key::Batched, Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Python};
  return !at::GradMode::is_enabled() && !grad.key_set().has_any(wrapped) && !has_tangent(grad);
}

// The same gradients from plain PyTorch: the operator `differentiable_backward` of autograd.py.
Tensors backward_in_pytorch(const at::Tensor& grad, const Tensors& tensors, const Others& others) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("rsa_hf::differentiable_backward", "");
  Stack stack{grad};
  for (const auto& tensor : tensors) stack.push_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
  for (const auto& other : others.toListRef()) stack.push_back(other);
  op.callBoxed(&stack);
  Tensors found;
  for (int i = 0; i < GRADIENTS; i++)
    if (tensors[i].defined()) found[i] = stack[i].toTensor();
  return found;
}

struct Walk : torch::autograd::Function<Walk> {
  using Context = torch::autograd::AutogradContext;
  using List = torch::autograd::variable_list;

  // `given` holds the defined `tensors`: autograd only sees tensors that are in a list.
  static at::Tensor forward(Context* context, at::TensorList given, const Tensors& tensors, const Others& others) {
    context->save_for_backward(List(tensors.begin(), tensors.end()));
    context->saved_data["others"] = others;
    return rsa_hf::forward(tensors, others);
  }

  static List backward(Context* context, const List& grads) {
    const auto saved = context->get_saved_variables();
    Tensors tensors;
    std::copy(saved.begin(), saved.end(), tensors.begin());
    const Others others = context->saved_data["others"];
    const auto found = is_plain(grads[0]) ? rsa_hf::backward(grads[0], tensors, others)
                                          : backward_in_pytorch(grads[0], tensors, others);
    List results = defined(found);
    results.resize(defined(tensors).size() + 2);  // plus `tensors` and `others`
    return results;
  }

  static List defined(const Tensors& tensors) {
    List found;
    for (const auto& tensor : tensors)
      if (tensor.defined()) found.push_back(tensor);
    return found;
  }
};

// --- operators ------------------------------------------------------------------------------------------------------

// Take the arguments from a stack; a gradient, which comes before them, stays.
std::pair<Tensors, Others> take(Stack* stack) {
  const auto first = stack->end() - OTHERS - TENSORS;
  Tensors tensors;
  std::transform(first, first + TENSORS, tensors.begin(), tensor_or_undefined);
  c10::impl::GenericList others(c10::AnyType::get());
  others.reserve(OTHERS);
  std::for_each(first + TENSORS, stack->end(), [&](c10::IValue& other) { others.push_back(std::move(other)); });
  stack->erase(first, stack->end());
  return {tensors, others};
}

void walk(const c10::OperatorHandle&, Stack* stack) {
  const auto [tensors, others] = take(stack);
  stack->push_back(forward(tensors, others));
}

// Without `Walk` if no gradient is asked for, because it takes time even then.
void differentiable_walk(const c10::OperatorHandle&, Stack* stack) {
  const auto [tensors, others] = take(stack);
  const bool is_plain = !at::GradMode::is_enabled() && std::none_of(tensors.begin(), tensors.end(), has_tangent);
  stack->push_back(is_plain ? forward(tensors, others)
                            : Walk::apply(at::TensorList(Walk::defined(tensors)), tensors, others));
}

void walk_backward(const c10::OperatorHandle&, Stack* stack) {
  const auto [tensors, others] = take(stack);
  const auto grad = torch::jit::pop(*stack).toTensor();
  const auto found = backward(grad, tensors, others);
  for (int i = 0; i < GRADIENTS; i++)
    stack->push_back(found[i].defined() ? found[i] : empty({0}, grad.scalar_type()));
}

using torch::CppFunction;

TORCH_LIBRARY_IMPL(rsa_hf, CPU, library) {
  library.impl("walk", CppFunction::makeFromBoxedFunction<&walk>());
  library.impl("walk_backward", CppFunction::makeFromBoxedFunction<&walk_backward>());
}

TORCH_LIBRARY_IMPL(rsa_hf, AutogradCPU, library) {
  library.impl("walk", CppFunction::makeFromBoxedFunction<&differentiable_walk>());
}

}  // namespace
}  // namespace rsa_hf
