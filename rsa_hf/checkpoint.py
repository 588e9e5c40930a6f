"""The plan as it stands in a checkpoint's config, and the `rsa` children built from it.

`config.rsa` is `{"format_version": 1, "modules": [names], "plan": {RSAConfig fields}}`. The names are relative to the
base model, so that any head class loads the checkpoint, and counts are written out, so that no default matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.adapters import adapter_of
from rsa_hf.config import HeadPlan, RSAConfig
from rsa_hf.heads import RSAHeads

__all__ = [
    "RSA_KEY",
    "SavedPlan",
    "attach_from_config",
    "attach_heads",
    "detach_heads",
    "differences",
    "read_plan",
    "require_number",
    "saved_plans",
    "shorten",
    "write_plan",
]

FORMAT_VERSION = 1
MAX_MODULES = 4096  # more than any model has
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
            f"config.rsa has format_version {content.get('format_version')!r}; this rsa_hf reads {FORMAT_VERSION}. A "
            "newer checkpoint needs a newer rsa_hf."
        )
    if set(content) != {"format_version", "modules", "plan"}:
        raise ValueError(f"config.rsa has the keys {sorted(content)}; needed: format_version, modules, plan.")
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
    return plan


def differences(old: SavedPlan, new: SavedPlan) -> str:
    """Where two plans differ, for messages."""
    before, after = old.config.to_dict(), new.config.to_dict()
    changed = [f"{key}: {before[key]!r} → {after[key]!r}" for key in before if before[key] != after[key]]
    if old.modules != new.modules:
        changed.append(f"modules: {shorten(old.modules)} → {shorten(new.modules)}")
    return "; ".join(changed)


def shorten(names: Sequence[str]) -> str:
    """The first few of many names, for messages."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown}, … ({len(names)} in all)"


def saved_plans(config: PreTrainedConfig) -> list[Any]:
    """`config.rsa` of this config and of the configs in it, as they stand."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    return [vars(part)["rsa"] for part in parts if vars(part).get("rsa") is not None]


def attach_from_config(model: PreTrainedModel) -> None:
    """Build the `rsa` children that `model.config.rsa` names; without a plan, nothing.

    The parts of a composite model share its config but not its module names: a part with none of the modules is left
    alone, and whoever builds the whole model checks that it has them.

    Raises:
        TypeError, ValueError: the plan is damaged, or names modules that this model should have and has not.
    """
    content = vars(model.config).get("rsa")
    if content is None:
        return
    plan = read_plan(content)
    base = model.base_model
    layers = plan.config.layer_plans([None] * len(plan.modules))
    found = {name: module for name in plan.modules if (module := _submodule(base, name)) is not None}
    if not found:
        return
    absent = [name for name in plan.modules if name not in found and name.split(".")[0] in base._modules]
    if absent:
        raise ValueError(
            f"config.rsa names the attention modules {', '.join(absent)}, which this {type(base).__name__} does not "
            "have. Was the number of layers changed? Load the model with the config it was saved with."
        )
    attach_heads([(found[name], layer) for name, layer in zip(plan.modules, layers, strict=True) if name in found])
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), KEEP_IN_FLOAT32}


def attach_heads(layers: Sequence[tuple[nn.Module, HeadPlan]]) -> None:
    """Put an `rsa` child on each attention module: on all of them or, where one fails, on none.

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
    for (module, _), child in zip(layers, heads, strict=True):
        if not hasattr(module, "rsa"):
            child.train(module.training)
            adapter = adapter_of(module)
            if adapter is not None:
                child.adapter = adapter
            module.add_module("rsa", child)


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


def require_number(name: str, parameter: Tensor) -> None:
    """Check the values of an RSA parameter that was read from a file.

    Raises:
        ValueError: a gate is NaN, or a rate is not finite.
    """
    # A gate may be shut (−inf) or wide open (inf); a rate may not.
    bad = parameter.isnan() if name.endswith("mu") else ~parameter.isfinite()
    if bool(bad.any()):
        raise ValueError(
            f"{name} is {parameter.tolist()} in the checkpoint: "
            f"{'a number' if name.endswith('mu') else 'a finite number'} is needed. The file is damaged, or "
            "training diverged: load an earlier checkpoint."
        )
