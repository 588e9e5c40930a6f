"""The child `rsa` of an attention module: finding it, attaching it and removing it."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rsa_hf.config import LayerSpec
from rsa_hf.layer import RSAHeads

Model = TypeVar("Model", bound=nn.Module)


def heads_of(module: nn.Module) -> RSAHeads | None:
    """The RSA heads of an attention module, its child `rsa`; None if it has none."""
    rsa = module._modules.get("rsa")
    # Recognised by its spec, not its class: under PEFT the child is a wrapper that forwards attribute access.
    return cast(RSAHeads, rsa) if isinstance(getattr(rsa, "spec", None), LayerSpec) else None


def is_peft_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper round RSA heads: the patched heads, and a copy for each adapter."""
    return isinstance(module._modules.get("original_module"), RSAHeads)


def shared_copy(model: Model) -> Model:
    """A copy that shares every tensor and hook with the model."""
    memo: dict[int, Any] = {id(each): each for each in itertools.chain(model.parameters(), model.buffers())}
    for module in model.modules():
        # A weight computed by pruning or weight_norm, or an output that is kept, may be part of a graph.
        memo |= {id(each): each for each in vars(module).values() if isinstance(each, Tensor)}
        memo |= {id(hooks): hooks.copy() for hooks in (module._forward_hooks, module._forward_pre_hooks)}
    return copy.deepcopy(model, memo)


def rsa_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The RSA heads of a model, or PEFT's wrappers round them, with their names in the model, in module order."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and (isinstance(module, RSAHeads) or is_peft_wrapper(module)):
            inside.update(module.modules())
            yield name, module


def active_heads(model: nn.Module) -> Iterator[tuple[str, RSAHeads]]:
    """The RSA heads that a forward pass uses, with their names, in the order of `rsa_modules`.

    Under PEFT these are the copies of the active adapter, or the patched heads if no adapter with heads is active.
    """
    for name, child in rsa_modules(model):
        if is_peft_wrapper(child):
            copies = {} if child.disable_adapters else child.modules_to_save
            active = (copies[adapter] for adapter in child.active_adapters if adapter in copies)
            child = next(active, child.original_module)
        yield name, child


def attach_heads(layers: Sequence[tuple[nn.Module, LayerSpec]]) -> list[RSAHeads]:
    """Put an `rsa` child on each attention module that has none, and return the new children."""
    new = []
    for module, spec in layers:
        if hasattr(module, "rsa"):
            continue
        parameter = next(module.parameters(), None)
        # Created on the module's device, because a tensor cannot be moved off the meta device: DiffLlama and XLNet
        # create some of their parameters elsewhere while the rest of the model is built on it.
        with torch.inference_mode(False), nullcontext() if parameter is None else parameter.device:
            child = RSAHeads(spec)
        module.add_module("rsa", child.train(module.training))
        new.append(child)
    return new


def detach_heads(model: nn.Module) -> None:
    """Remove every `rsa` child below `model`."""
    for module in list(model.modules()):
        if isinstance(module._modules.get("rsa"), RSAHeads):
            del module._modules["rsa"]
