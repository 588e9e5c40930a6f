"""The plan as it stands in a checkpoint's config, and the `rsa` children built from it.

`config.rsa` is `{"format_version": 1, "modules": [names], "plan": {RSAConfig fields}}`. The names are relative to the
base model, so that any head class loads the checkpoint, and counts are written out, so that no default matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.adapters import adapter_of
from rsa_hf.attention_modules import may_have_heads
from rsa_hf.brief import brief, shorten
from rsa_hf.config import HeadPlan, RSAConfig
from rsa_hf.heads import RSAHeads
from rsa_hf.lookup import heads_of

__all__ = [
    "RSA_KEY",
    "SavedPlan",
    "attach_from_config",
    "attach_heads",
    "configs_with_plans",
    "detach_heads",
    "differences",
    "read_plan",
    "require_number",
    "require_whole_heads",
    "saved_plans",
    "unplanned_modules",
    "write_plan",
]

FORMAT_VERSION = 1
MAX_MODULES = 4096  # more than any model has
MAX_STORED = 1e12  # of a rate as it is stored; times any parameter_scale and any lag it is still finite in float32
RSA_KEY = re.compile(r"(^|\.)rsa\.(mu|eta|nu|theta)$")  # a tensor of a checkpoint that belongs to RSA heads
# transformers searches parameter names for this pattern while it loads; its own tests want it to end with them.
KEEP_IN_FLOAT32 = r"(?<![^.])rsa\.(?:mu|eta|nu|theta)$"
_MODULE_NAME = re.compile(r"[A-Za-z]\w*(\.\w+)*", re.ASCII)


@dataclass(frozen=True)
class SavedPlan:
    """A plan with the names of the attention modules it is for, relative to the base model."""

    modules: tuple[str, ...]
    config: RSAConfig


def write_plan(plan: SavedPlan) -> dict[str, Any]:
    """The content of `config.rsa`."""
    return {"format_version": FORMAT_VERSION, "modules": list(plan.modules), "plan": plan.config.to_dict()}


def read_plan(content: Any) -> SavedPlan:
    """Read and validate the content of `config.rsa`, which may come from anyone: nothing is built for it.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: an unknown format or key, or a value that is not allowed.
    """
    if not isinstance(content, Mapping):
        raise TypeError(f"config.rsa is a mapping, got {type(content).__name__}: {content!r:.200}")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"config.rsa has format_version {brief(content.get('format_version'))}; this rsa_hf reads "
            f"{FORMAT_VERSION}. A newer checkpoint needs a newer rsa_hf."
        )
    if set(content) != {"format_version", "modules", "plan"}:
        raise ValueError(f"config.rsa has the keys {brief(sorted(content))}; needed: format_version, modules, plan.")
    modules = content["modules"]
    if not isinstance(modules, (list, tuple)) or not modules:
        raise TypeError(f"config.rsa['modules'] is a list of module names, got {modules!r:.200}")
    for name in modules:
        if not isinstance(name, str) or len(name) > 500 or not _MODULE_NAME.fullmatch(name):
            raise ValueError(f"config.rsa['modules'] has {name!r:.200}, which is no module name such as 'h.0.attn'.")
    if len(set(modules)) != len(modules):
        raise ValueError("config.rsa['modules'] names a module more than once.")
    if len(modules) > MAX_MODULES:
        raise ValueError(f"config.rsa['modules'] has {len(modules)} names; at most {MAX_MODULES} are allowed.")
    plan = SavedPlan(tuple(modules), RSAConfig.from_dict(content["plan"]))
    plan.config.layer_plans([None] * len(modules))
    layers = plan.config.layers
    if layers is not None and (len(layers) != len(modules) or layers[-1] >= MAX_MODULES):
        raise ValueError(
            f"config.rsa['plan'] has layers={brief(layers)}, but config.rsa['modules'] names {len(modules)} modules: "
            f"one index below {MAX_MODULES} for each is needed."
        )
    return plan


def differences(old: SavedPlan, new: SavedPlan) -> str:
    """Where two plans differ, for messages."""
    before, after = old.config.to_dict(), new.config.to_dict()
    changed = [f"{key}: {before[key]!r} → {after[key]!r}" for key in before if before[key] != after[key]]
    if old.modules != new.modules:
        changed.append(f"modules: {shorten(old.modules)} → {shorten(new.modules)}")
    return "; ".join(changed)


def saved_plans(config: PreTrainedConfig) -> list[Any]:
    """`config.rsa` of this config and of the configs in it, as they stand."""
    return [vars(part)["rsa"] for part in _with_parts(config) if vars(part).get("rsa") is not None]


def configs_with_plans(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs, of a model and of its parts, that have a plan, `config.rsa`; each once.

    A part that is a model itself may have been patched alone, or have a copy of the whole's config (T5's halves).
    """
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    parts = {id(part): part for config in configs for part in _with_parts(config) if "rsa" in vars(part)}
    return list(parts.values())


def _with_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]


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

    def same(a: HeadPlan | None, b: HeadPlan | None) -> bool:
        if a is None or b is None:
            return False
        return a == replace(b, gate_init=a.gate_init, nu_init=a.nu_init, theta_init=a.theta_init)

    return [name for name in {**planned, **found} if not same(planned.get(name), found.get(name))]


def _unwrapped(name: str) -> str:
    """A module's name without those of wrappers on its way (FSDP's, checkpointing's), which do not reach files."""
    return ".".join(part for part in name.split(".") if not part.startswith("_"))


def attach_heads(layers: Sequence[tuple[nn.Module, HeadPlan]]) -> list[RSAHeads]:
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
            adapter = adapter_of(module)
            if adapter is not None:
                child.adapter = adapter
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


def require_number(name: str, parameter: Tensor) -> None:
    """Check the values of an RSA parameter that was read from a file.

    Args:
        name: of the tensor, ending in `mu`, `eta`, `nu` or `theta`.
        parameter: as it is stored.

    Raises:
        TypeError: it holds no floating-point numbers.
        ValueError: a gate is NaN, or a rate is not finite, or so large that no training can have brought it there.
    """
    if not parameter.is_floating_point():
        raise TypeError(
            f"{name} is of type {str(parameter.dtype).removeprefix('torch.')} in the checkpoint: floating-point "
            "numbers are needed. The file is damaged: get it again."
        )
    # A gate may be shut (−inf) or wide open (inf). A rate of NaN or ±inf has no meaning: NaN in θ, or in λ, is NaN in
    # all that its head gives, and the angle of an infinite θ is not defined.
    is_gate = name.endswith("mu")
    bad = parameter.isnan() if is_gate else ~(parameter.abs() <= MAX_STORED)
    if bool(bad.any()):
        raise ValueError(
            f"{name} is {brief(parameter.tolist())} in the checkpoint: "
            f"{'a number' if is_gate else f'a finite number, of at most {MAX_STORED:g},'} is needed. The file is "
            "damaged, or training diverged: load an earlier checkpoint."
        )
