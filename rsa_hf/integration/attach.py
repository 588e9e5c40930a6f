"""The `rsa` children of a model: attach them, build them from the plan in a config, compare both, detach them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.config import LayerConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.integration.architectures import architecture_of
from rsa_hf.integration.attention_modules import is_self_attention
from rsa_hf.saved_plan import read_plan
from rsa_hf.utils.brief import shorten

__all__ = ["attach_from_config", "attach_heads", "detach_heads", "mismatched_modules", "require_whole_heads"]

# transformers searches parameter names for this pattern while it loads; its own tests want it to end with them.
KEEP_IN_FLOAT32 = r"(?<![^.])rsa\.(?:mu|eta|nu|theta)$"


def attach_from_config(model: PreTrainedModel) -> list[RSAHeads]:
    """Build the `rsa` children that `model.config.rsa` names; without a plan, nothing.

    The parts of a composite model share its config but not its module names. A part with none of the modules is left
    alone; loading checks that the whole model has them.

    Returns:
        The new children.

    Raises:
        TypeError, ValueError: the plan is damaged, names modules that this model should have and has not, a module
            that is no self-attention, or one module by two names.
    """
    if vars(model.config).get("rsa") is None:
        return []
    layers, base = _planned_layers(model), model.base_model
    found = {name: module for name in layers if (module := _submodule(base, name)) is not None}
    if not found:
        return []
    absent = [name for name in layers if name not in found and name.split(".")[0] in base._modules]
    if absent:
        raise ValueError(
            f"config.rsa names the attention modules {shorten(absent)}, which this {type(base).__name__} does not "
            "have. Was the number of layers changed? Load the model with the config it was saved with."
        )
    wrong = [name for name, module in found.items() if not is_self_attention(name, module)]
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
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), KEEP_IN_FLOAT32}
    return attach_heads([(module, layers[name]) for name, module in found.items()])


def mismatched_modules(model: PreTrainedModel) -> list[str]:
    """The modules whose heads are not those of the plan in the model's config, because layers were dropped or moved.

    Where RSA parameters start is not compared: a saved copy has their values in its files.
    """
    if vars(model.config).get("rsa") is None:
        return []
    base = model.base_model
    planned = {
        _without_wrappers(name): layer
        for name, layer in _planned_layers(model).items()
        if name.split(".")[0] in base._modules  # otherwise it is of a part that this class does not have
    }
    found = {
        _without_wrappers(name): heads.plan
        for name, module in base.named_modules()
        if (heads := heads_of(module)) is not None
    }

    def same(a: LayerConfig | None, b: LayerConfig | None) -> bool:
        if a is None or b is None:
            return False
        return a == replace(b, gate_init=a.gate_init, nu_init=a.nu_init, theta_init=a.theta_init)

    return [name for name in {**planned, **found} if not same(planned.get(name), found.get(name))]


def _planned_layers(model: PreTrainedModel) -> dict[str, LayerConfig]:
    """Of each module that `config.rsa` names, the config of its heads."""
    plan = read_plan(model.config.rsa)
    return dict(zip(plan.modules, plan.config.layer_plans([None] * len(plan.modules)), strict=True))


def _without_wrappers(name: str) -> str:
    """A module's name without the parts that wrappers add (FSDP, activation checkpointing): files do not have them."""
    return ".".join(part for part in name.split(".") if not part.startswith("_"))


def attach_heads(layers: Sequence[tuple[nn.Module, LayerConfig]]) -> list[RSAHeads]:
    """Put an `rsa` child on each attention module that has none; where one fails, on none of them.

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
        # Created on the module's device, because a tensor cannot be moved off the meta device: DiffLlama and XLNet
        # create some of their parameters elsewhere while the rest of the model is built there.
        with nullcontext() if parameter is None else parameter.device:
            heads.append(RSAHeads(plan))
    new = []
    for (module, _), child in zip(layers, heads, strict=True):
        if not hasattr(module, "rsa"):
            new.append(child)
            child.train(module.training)
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
    """Check that each process has all heads of a layer.

    Raises:
        NotImplementedError: transformers has split the heads across processes (`tp_plan`).
    """
    if (model._tp_size or 1) > 1:
        raise NotImplementedError(
            "RSA does not work with tensor parallelism: each process has some of a layer's heads, and would treat the "
            "first of them as RSA heads. Load the model without tp_plan; FSDP2 and device_map leave heads whole."
        )
