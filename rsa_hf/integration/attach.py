"""The `rsa` children of a model: build them from the plan in its config, attach, detach and check them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.config import LayerConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.integration.architectures import architecture_of
from rsa_hf.integration.attention_modules import may_have_heads
from rsa_hf.saved_plan import read_plan
from rsa_hf.utils.brief import shorten

__all__ = ["attach_from_config", "attach_heads", "detach_heads", "require_whole_heads", "unplanned_modules"]

# transformers searches parameter names for this pattern while it loads; its own tests want it to end with them.
KEEP_IN_FLOAT32 = r"(?<![^.])rsa\.(?:mu|eta|nu|theta)$"


def attach_from_config(model: PreTrainedModel) -> list[RSAHeads]:
    """Build the `rsa` children that `model.config.rsa` names; without a plan, nothing.

    The parts of a composite model share its config but not its module names: a part with none of the modules is left
    alone, and whoever builds the whole model checks that it has them.

    Returns:
        Those that were not there yet.

    Raises:
        TypeError, ValueError: the plan is damaged, names modules that this model should have and has not, a module
            that is no self-attention, or one module by two names.
    """
    content = vars(model.config).get("rsa")
    if content is None:
        return []
    plan = read_plan(content)
    base = model.base_model
    layers = plan.config.layer_plans([None] * len(plan.modules))
    found = {name: module for name in plan.modules if (module := _submodule(base, name)) is not None}
    if not found:
        return []
    absent = [name for name in plan.modules if name not in found and name.split(".")[0] in base._modules]
    if absent:
        raise ValueError(
            f"config.rsa names the attention modules {shorten(absent)}, which this {type(base).__name__} does not "
            "have. Was the number of layers changed? Load the model with the config it was saved with."
        )
    wrong = [name for name, module in found.items() if not may_have_heads(name, module)]
    if wrong:
        kinds = sorted({type(found[name]).__name__ for name in wrong})
        raise ValueError(
            f"config.rsa names {shorten(wrong)} ({shorten(kinds)}), which is no self-attention of this "
            f"{type(base).__name__}: its RSA heads would never run. Load the model with the config it was saved with."
        )
    if len(set(found.values())) != len(found):
        raise ValueError(
            f"config.rsa names a module of this {type(base).__name__} twice, by two names ({shorten(list(found))}). "
            "Load the model with the config it was saved with."
        )
    new = attach_heads(
        [(found[name], layer) for name, layer in zip(plan.modules, layers, strict=True) if name in found]
    )
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), KEEP_IN_FLOAT32}
    return new


def unplanned_modules(model: PreTrainedModel) -> list[str]:
    """The modules whose heads are not those of the plan in the model's own config, as layers were dropped or moved.

    Where RSA parameters start is left out: those of a saved copy are in its files.
    """
    content = vars(model.config).get("rsa")
    if content is None:
        return []
    plan, base = read_plan(content), model.base_model
    planned = {
        _unwrapped(name): layer
        for name, layer in zip(plan.modules, plan.config.layer_plans([None] * len(plan.modules)), strict=True)
        if name.split(".")[0] in base._modules  # or it is of a part that this class does not have
    }
    found = {
        _unwrapped(name): heads.plan
        for name, module in base.named_modules()
        if (heads := heads_of(module)) is not None
    }

    def same(a: LayerConfig | None, b: LayerConfig | None) -> bool:
        if a is None or b is None:
            return False
        return a == replace(b, gate_init=a.gate_init, nu_init=a.nu_init, theta_init=a.theta_init)

    return [name for name in {**planned, **found} if not same(planned.get(name), found.get(name))]


def _unwrapped(name: str) -> str:
    """A module's name without those of wrappers on its way (FSDP's, checkpointing's), which do not reach files."""
    return ".".join(part for part in name.split(".") if not part.startswith("_"))


def attach_heads(layers: Sequence[tuple[nn.Module, LayerConfig]]) -> list[RSAHeads]:
    """Put an `rsa` child on each attention module that has none: on all of them or, where one fails, on none.

    Returns:
        The new children.

    Raises:
        ValueError: a module has another attribute of that name.
    """
    for module, _ in layers:
        if hasattr(module, "rsa") and not isinstance(module.rsa, RSAHeads):
            raise ValueError(
                f"{type(module).__name__} already has an attribute 'rsa' of type {type(module.rsa).__name__}."
            )
    heads = []
    for module, plan in layers:
        parameter = next(module.parameters(), None)
        # Not moved there afterwards: a model may be built on the meta device with some of its parameters elsewhere
        # (DiffLlama's, XLNet's), and nothing can be moved off that.
        with nullcontext() if parameter is None else parameter.device:
            heads.append(RSAHeads(plan))
    new = []
    for (module, _), child in zip(layers, heads, strict=True):
        if not hasattr(module, "rsa"):
            new.append(child)
            child.train(module.training)
            child._is_hf_initialized = child.mu.device.type != "meta"
            architecture = architecture_of(module)
            if architecture is not None:
                child.architecture = architecture
            module.add_module("rsa", child)
    return new


def detach_heads(model: nn.Module) -> None:
    """Remove every `rsa` child below `model`."""
    for module in list(model.modules()):
        if isinstance(module._modules.get("rsa"), RSAHeads):
            del module._modules["rsa"]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._keep_in_fp32_modules_strict:
            module._keep_in_fp32_modules_strict = set(module._keep_in_fp32_modules_strict) - {KEEP_IN_FLOAT32}


def _submodule(root: nn.Module, name: str) -> nn.Module | None:
    # Through children only: a name from a file must not reach other attributes.
    module: nn.Module | None = root
    for part in name.split("."):
        module = module._modules.get(part) if module is not None else None
    return module


def require_whole_heads(model: PreTrainedModel) -> None:
    """Check that each process has all heads of a layer: the first of a part of them are not the plan's.

    Raises:
        NotImplementedError: transformers has spread the heads over processes (`tp_plan`).
    """
    if (model._tp_size or 1) > 1:
        raise NotImplementedError(
            "RSA does not work with tensor parallelism: each process has some of a layer's heads, and would take the "
            "first of them for RSA heads. Load the model without tp_plan; FSDP2 and device_map leave heads whole."
        )
