"""P V, alone or mixed into attention (eq. 4), as one differentiable operation, and the choice of its backend.

`RSA_HF_BACKEND=pytorch|cpp|triton`, which is read once, chooses the backend. The default is Triton on a GPU that can
run it, C++ on a CPU with a compiler, else plain PyTorch. Neither Triton nor C++ supports arbitrary masks, and Triton
does not support 2 to 16 queries after cached keys; PyTorch computes these cases under every setting.

PyTorch itself differentiates `product_in_pytorch`, any number of times and in every mode. C++ and Triton only have
first derivatives, in `operator.cpp` and in `_Triton`; for all others (a backward pass with `create_graph=True`,
forward mode, the transforms of `torch.func`), `product_in_pytorch` is used instead.

Code under `torch.compile`, `torch.export` and dispatch modes, such as FakeTensorMode, goes through the operators
`rsa_hf::recurrence` and `rsa_hf::recurrence_backward`, one node each in a graph: the path taken inside depends on the
values of a mask, which a graph does not know. ONNX has no such operator; there P is built from plain operators.
"""

import functools
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rsa_hf.ops import cpp
from rsa_hf.ops.mask import AttentionMask, remembered
from rsa_hf.ops.problem import Layout, Learned, Problem, rems_and_gate
from rsa_hf.ops.pytorch import product_in_pytorch
from rsa_hf.ops.read_mask import read_mask
from rsa_hf.rem import is_recorded, is_transformed

BACKENDS = ("pytorch", "cpp", "triton")
VARIABLE = "RSA_HF_BACKEND"
REQUESTED = os.environ.get(VARIABLE, "")  # asking at each call would take as long as a small operation

Gradients = tuple[Tensor | None, ...]  # of `Problem.tensors`


def solve(problem: Problem) -> Tensor:
    """The output of a problem: P V, or eq. 4."""
    if is_recorded():
        return _solve_recorded(problem)
    if is_transformed():
        return _in_pytorch(problem)
    path = _path(problem)
    if path != "triton" or not torch.is_grad_enabled():
        return _forward(path, problem)
    result: Tensor = _Triton.apply(problem, *problem.tensors)  # type: ignore[no-untyped-call]
    return result


# --- which code -----------------------------------------------------------------------------------------------------


def _path(problem: Problem) -> str:
    """The backend, or `"pytorch"` if the backend does not support the mask."""
    backend, mask = choose_backend(problem), problem.mask
    if problem.value.numel() == 0 or mask.query_length == 0:
        return "pytorch"
    if backend == "cpp":
        return backend if mask.visible is None else "pytorch"
    if backend == "triton" and mask.is_step and mask.documents is None:
        is_row = mask.query_position is not None and mask.visible is not None and mask.visible.shape[1] == 1
        return "triton" if is_row or mask.visible is None else "pytorch"
    return "pytorch" if mask.visible is not None or mask.has_few_queries else backend


def choose_backend(problem: Problem) -> str:
    """One of BACKENDS: that of RSA_HF_BACKEND (an error if it cannot run here), else the default, as above."""
    chosen = REQUESTED
    if chosen and chosen not in BACKENDS:
        raise ValueError(f"{VARIABLE}={chosen!r}: choose from {', '.join(BACKENDS)}, or unset it for the default.")
    value = problem.value
    backend = chosen or ("cpp" if value.is_cpu else "triton" if value.is_cuda else "pytorch")
    if backend == "pytorch":
        return backend
    if backend == "cpp":
        reason = cpp.obstacle(problem)
    else:
        from rsa_hf.ops.triton import obstacle

        reason = obstacle(problem)
    if reason is None:
        return backend
    if chosen:
        raise RuntimeError(f"{VARIABLE}={backend} cannot run: {reason}. Unset it, or choose pytorch.")
    if backend == "triton":
        _warn_once(f"RSA computes P V in plain PyTorch, not in Triton: {reason}.")
    return "pytorch"


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _in_pytorch(problem: Problem) -> Tensor:
    value, attention, learned, layout, num_key_value_groups, mask = problem
    # Without autocast: decay powers and sums lose too much in half precision.
    with torch.autocast(value.device.type, enabled=False):
        rems, gate = rems_and_gate(learned, layout, num_key_value_groups)
        return product_in_pytorch(value, rems, mask, attention, gate)


def _forward(path: str, problem: Problem) -> Tensor:
    if path == "cpp":
        output: Tensor = torch.ops.rsa_hf.walk.default(*_arguments(problem, problem.layout.numbers))
        return output
    if path == "triton":
        from rsa_hf.ops.triton.launch import triton_forward

        return triton_forward(problem)
    return _in_pytorch(problem)


def _backward(path: str, grad: Tensor, problem: Problem) -> Gradients:
    """The gradients of `_forward`."""
    if path == "cpp":
        arguments = _arguments(problem, problem.layout.numbers)
        return _given(torch.ops.rsa_hf.walk_backward.default(grad, *arguments), problem.tensors)
    if path == "triton" and problem.mask.visible is None:
        from rsa_hf.ops.triton.launch import triton_backward

        return triton_backward(grad, problem)
    return _backward_in_pytorch(grad, problem)


def _backward_in_pytorch(grad: Tensor, problem: Problem) -> Gradients:
    """The gradients of `_in_pytorch`: in a transform, in an operator, or if they are differentiated again."""
    given = [place for place, tensor in enumerate(problem.tensors) if tensor is not None]

    def product(value: Tensor, *others: Tensor) -> Tensor:
        tensors = dict(zip(given[1:], others, strict=True))
        attention, *learned = map(tensors.get, range(1, len(problem.tensors)))
        return _in_pytorch(problem._replace(value=value, attention=attention, learned=Learned(*learned)))

    tensors = [tensor for tensor in problem.tensors if tensor is not None]
    if is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad):
        gradients = torch.func.vjp(product, *tensors)[1](grad)
    else:  # torch.func refuses hooks on saved tensors, which checkpointing uses
        again = torch.is_grad_enabled()
        autograd_is_on = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        with torch.enable_grad(), autograd_is_on:  # it is off inside an operator
            copies = [x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_() for x in tensors]
            options = {"create_graph": again, "materialize_grads": True}
            gradients = torch.autograd.grad(product(*copies), copies, grad, **options)
    found = dict(zip(given, gradients, strict=True))
    return tuple(map(found.get, range(len(problem.tensors))))


# --- eager ----------------------------------------------------------------------------------------------------------


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.described = problem[3:]
        return _forward("triton", problem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        value, attention, *learned = ctx.saved_tensors
        problem = Problem(value, attention, Learned(*learned), *ctx.described)
        path = "pytorch" if _is_differentiated_again(grad) else "triton"
        return (None, *_backward(path, grad, problem))


def _is_differentiated_again(grad: Tensor) -> bool:
    """Whether the result of this backward pass is part of a graph, or of a transform."""
    # `is_grads_batched=True` uses another kind of batched tensor.
    return torch.is_grad_enabled() or is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad)


# --- the operators --------------------------------------------------------------------------------------------------

# How many arguments are `Problem.tensors`, come from the mask, and are others; operator.cpp counts them too.
_TENSORS, _MASKS, _OTHERS = 7, 4, 8
_ARGUMENTS = (
    "Tensor value, Tensor? attention, Tensor? mu, Tensor? eta, Tensor? nu, Tensor? theta, Tensor? free_lags, "
    "Tensor? mask, Tensor? key_mask, Tensor? documents, Tensor? visible, int[] layout, float scale, "
    "int num_free_lags, int num_key_value_groups, SymInt query_length, SymInt query_offset, bool causal, "
    "SymInt? sliding_window"
)
# Not `torch.library.custom_op`, which looks for the source lines of what it registers among all modules: 40 ms.
_LIBRARY = torch.library.Library("rsa_hf", "DEF")
_GRADIENTS = ", ".join(["Tensor"] * _TENSORS)
_OF_CPP = _ARGUMENTS.replace("int[] layout", "Tensor layout")  # a tensor takes less time to pass
for _name, _taken in (("recurrence", _ARGUMENTS), ("walk", _OF_CPP)):
    _LIBRARY.define(f"{_name}({_taken}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.define(f"{_name}_backward(Tensor grad, {_taken}) -> ({_GRADIENTS})", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(f"differentiable_backward(Tensor grad, {_OF_CPP}) -> ({_GRADIENTS})", tags=torch.Tag.pt2_compliant_tag)


def _arguments(problem: Problem, numbers: Sequence[int] | Tensor) -> tuple[Any, ...]:
    """The arguments of the operators; `numbers` is the layout as a flat list, or for C++ `Layout.numbers`."""
    layout, mask = problem.layout, problem.mask
    return (
        *problem.tensors,
        *(mask.unread_mask, mask.key_mask, mask.documents, mask.visible),
        *(numbers, layout.scale, layout.num_free_lags, problem.num_key_value_groups),
        *(mask.query_length, mask.query_offset, mask.causal, mask.sliding_window),
    )


def _problem(*arguments: Any) -> Problem:
    """The problem from the arguments of an operator."""
    value, attention, *learned = arguments[:_TENSORS]
    mask, key_mask, documents, visible, numbers, scale, K, groups, *sizes = arguments[_TENSORS:]
    query_length, query_offset, causal, window = sizes
    S = value.shape[2]
    if mask is None:
        read = AttentionMask(query_length, S, query_offset, causal, key_mask, documents, window, visible)
    else:
        read = remembered(read_mask, mask, query_length, S, causal)
    if isinstance(numbers, Tensor):
        numbers = numbers.flatten().tolist()
    layout = Layout.from_numbers(tuple(numbers), scale, K)
    return Problem(value, attention, Learned(*learned), layout, groups, read)


def _given(gradients: Iterable[Tensor], tensors: Iterable[Tensor | None]) -> Gradients:
    """The gradients of `Problem.tensors`, from those of an operator, which returns a tensor for each None too."""
    return tuple(None if x is None else found for found, x in zip(gradients, tensors, strict=True))


@torch.library.impl(_LIBRARY, "differentiable_backward", "CompositeImplicitAutograd")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of `rsa_hf::walk`, as operations that can be differentiated; called by operator.cpp."""
    gradients = _backward_in_pytorch(grad, _problem(*arguments))
    return tuple(grad.new_empty(0) if gradient is None else gradient for gradient in gradients)


# --- compiled and exported ------------------------------------------------------------------------------------------


def _solve_recorded(problem: Problem) -> Tensor:
    if is_transformed() or torch.onnx.is_in_onnx_export() or problem.mask.is_step:
        return _in_pytorch(problem)  # a compiler makes few kernels of a step
    numbers = [number for row in problem.layout.rows for number in row]  # not `Layout.numbers`, which takes a lock
    output: Tensor = torch.ops.rsa_hf.recurrence(*_arguments(problem, numbers))
    return output


@torch.library.impl(_LIBRARY, "recurrence", "CompositeExplicitAutograd")
def _operator(*arguments: Any) -> Tensor:
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "rsa_hf::recurrence, P V in an exported program, has no forward-mode derivative. Differentiate the model "
            "that was exported, or use backward mode."
        )
    problem = _problem(*arguments)
    return _laid_out_like(_forward(_path(problem), problem), problem.empty_output())


@torch.library.impl(_LIBRARY, "recurrence", "Meta")
def _(*arguments: Any) -> Tensor:
    # Without the mask, which has no values to read here.
    return _problem(*arguments[:_TENSORS], None, *arguments[_TENSORS + 1 :]).empty_output()


@torch.library.impl(_LIBRARY, "recurrence_backward", "CompositeExplicitAutograd")
def _backward_operator(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    problem = _problem(*arguments)
    gradients = _backward(_path(problem), grad, problem)
    # An operator returns tensors (never None), with the strides that its fake implementation promises.
    return tuple(
        grad.new_empty(0) if gradient is None else _laid_out_like(gradient, torch.empty_like(tensor))
        for gradient, tensor in zip(gradients, arguments[:_TENSORS], strict=True)
    )


def _laid_out_like(result: Tensor, promised: Tensor) -> Tensor:
    return result if result.stride() == promised.stride() else promised.copy_(result)


@torch.library.impl(_LIBRARY, "recurrence_backward", "Meta")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in arguments[:_TENSORS])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[: _TENSORS + _MASKS])
    ctx.others = inputs[_TENSORS + _MASKS :]


def _differentiate(ctx: Any, grad: Tensor) -> Gradients:
    arguments = (*ctx.saved_tensors, *ctx.others)
    rest = [None] * (_MASKS + _OTHERS)
    if _is_differentiated_again(grad):
        return (*_backward_in_pytorch(grad, _problem(*arguments)), *rest)
    gradients = torch.ops.rsa_hf.recurrence_backward(grad, *arguments)
    return (*_given(gradients, arguments[:_TENSORS]), *rest)


torch.library.register_autograd("rsa_hf::recurrence", _differentiate, setup_context=_save, lib=_LIBRARY)
