"""What a PEFT adapter says of the RSA heads it was made for, and whether a model fits it.

It stands in adapter_config.json as `rsa`: the content of `config.rsa` (see checkpoint.py), and under `base` what tells
one base model from another: its name, its type and its sizes. RSA parameters are vectors whose shapes depend on the
plan alone, so shapes could not tell GPT-2 from GPT-2 medium.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads, is_peft_wrapper
from rsa_hf.saved_plan import RSA_KEY, SavedPlan, differences, read_plan, require_number, saved_plans, write_plan
from rsa_hf.utils.brief import shorten

__all__ = [
    "AdapterPlan",
    "describe",
    "read_adapter_plan",
    "require_fit",
    "require_same_base",
    "require_tensors",
    "rsa_children",
]

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class AdapterPlan:
    """The plan that an adapter was trained with, and its base model.

    Attributes:
        plan: the plan and the modules it is for.
        base_name: the base model's name on the Hub or its folder; None where it has none.
        model_type: as in the base model's config.
        sizes: hidden size and numbers of layers and heads, those that the config has.
    """

    plan: SavedPlan
    base_name: str | None
    model_type: str
    sizes: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The content of `rsa` in adapter_config.json."""
        base = {"name": self.base_name, "model_type": self.model_type, **self.sizes}
        return {**write_plan(self.plan), "base": base}

    def without_name(self) -> AdapterPlan:
        """The same, for a base model under any name."""
        return replace(self, base_name=None)


def read_adapter_plan(content: Any) -> AdapterPlan:
    """Read and validate the content of `rsa` in adapter_config.json.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: an unknown format or key, or a value that is not allowed.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("base"), Mapping):
        raise TypeError(f"rsa in adapter_config.json is a mapping with a mapping `base` in it, got {content!r:.200}")
    base = dict(content["base"])
    plan = read_plan({key: value for key, value in content.items() if key != "base"})
    name, model_type = base.pop("name", None), base.pop("model_type", None)
    if not isinstance(model_type, str) or not (name is None or isinstance(name, str)):
        raise TypeError(f"base in adapter_config.json has name={name!r:.200} and model_type={model_type!r:.200}.")
    for key, value in base.items():
        if key not in _SIZES:
            raise ValueError(f"base in adapter_config.json has {key!r:.200}; allowed: {', '.join(_SIZES)}.")
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"base in adapter_config.json has {key}={value!r:.200}: a whole number is needed.")
    return AdapterPlan(plan, name, model_type, base)


def describe(model: nn.Module) -> AdapterPlan | None:
    """What an adapter for this model has to say; None where the model has no RSA heads.

    Raises:
        ValueError: the model has RSA heads but no plan.
    """
    if not isinstance(model, PreTrainedModel) or not any(isinstance(module, RSAHeads) for module in model.modules()):
        return None
    plans = saved_plans(model.config)
    if not plans:
        raise ValueError(
            f"this {type(model).__name__} has RSA heads, but its config has no plan (config.rsa). Use the model that "
            "was given to patch_model, or patch this part itself."
        )
    return _describe(model, read_plan(plans[0]))


def _describe(model: PreTrainedModel, plan: SavedPlan) -> AdapterPlan:
    text: Any = model.config.get_text_config()
    found = {name: getattr(text, name, None) for name in _SIZES}
    sizes = {name: value for name, value in found.items() if isinstance(value, int)}
    return AdapterPlan(plan, model.name_or_path or None, str(model.config.model_type), sizes)


def require_fit(adapter: AdapterPlan | None, holds_values: bool, model: nn.Module) -> None:
    """Check that a model is the one an adapter was made for.

    Args:
        adapter: what the adapter says; None where it says nothing.
        holds_values: whether it brings its own gates and rates (`"rsa"` in `modules_to_save`).
        model: the base model, without adapters or with.

    Raises:
        ValueError: another base model, one that is not patched, or one with another plan.
    """
    if adapter is not None:
        require_same_base(adapter, model)
    present = describe(model)
    if present is None and (adapter is not None or holds_values):
        raise ValueError(
            f"this adapter is for a model with RSA heads, but this {type(model).__name__} has none: they would be "
            "lost in silence. rsa_hf.peft.load(model, adapter) patches the model as the adapter says and loads it; to "
            "train a new one use rsa_hf.peft.get_peft_model, or call patch_model first."
        )
    if present is not None and adapter is not None and present.plan != adapter.plan:
        raise ValueError(
            f"the adapter was trained with another plan than this model is patched with "
            f"({differences(adapter.plan, present.plan)}; the adapter's first). Patch a fresh copy of the base model "
            "with the adapter's plan: rsa_hf.peft.load(model, adapter) does."
        )


def require_same_base(adapter: AdapterPlan, model: nn.Module) -> None:
    """Check that a model is the base model that an adapter names, whether it is patched or not.

    Raises:
        ValueError: it is of another type, has other sizes or another name.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"the adapter is for a {adapter.model_type}, but this is a {type(model).__name__}.")
    present = _describe(model, adapter.plan)
    wanted = {"model_type": adapter.model_type, **adapter.sizes}
    found = {"model_type": present.model_type, **present.sizes}
    changed = [
        f"{key} is {found.get(key)!r}, not {wanted.get(key)!r}" for key in wanted if found.get(key) != wanted[key]
    ]
    if changed:
        raise ValueError(
            f"this adapter is for another base model ({adapter.base_name or 'without a name'}): {'; '.join(changed)}."
        )
    if adapter.base_name and present.base_name and not _same_name(adapter.base_name, present.base_name):
        raise ValueError(
            f"this adapter was trained on the base model {adapter.base_name!r}, and this one is called "
            f"{present.base_name!r}. Load that one. If this is the same model under another name, "
            "rsa_hf.peft.load(model, adapter, check_base_name=False) takes it."
        )


def _same_name(one: str, other: str) -> bool:
    return one == other or (os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other))


def rsa_children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The `rsa` children of a model with their names: RSA heads, or PEFT's wrapper round them."""
    for name, module in model.named_modules():
        child = module._modules.get("rsa")
        if child is not None and (isinstance(child, RSAHeads) or is_peft_wrapper(child)):
            yield f"{name}.rsa" if name else "rsa", child


def require_tensors(tensors: Mapping[str, Tensor], prefix: str, holds_values: bool, model: nn.Module) -> None:
    """Check that the tensors of an adapter have a value for each RSA parameter of a model, and none beside.

    Args:
        tensors: the tensors of the adapter, by name.
        prefix: what stands before the names of the base model.
        holds_values: whether there should be RSA parameters at all.
        model: the base model, without adapters or with.

    Raises:
        ValueError: a tensor is missing, or not expected, or has another shape, or holds no number.
    """
    found = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if RSA_KEY.search(key)}
    if not found and not holds_values:
        return
    present = {
        f"{name}.{parameter}": value.shape
        for name, child in rsa_children(model)
        for parameter, value in (child if isinstance(child, RSAHeads) else child.original_module).named_parameters()  # type: ignore[union-attr]
    }
    if not present:
        raise ValueError(
            f"the adapter holds RSA parameters ({shorten(list(found))}), but this {type(model).__name__} has no RSA "
            "heads: they would be lost in silence. rsa_hf.peft.load(model, adapter) patches the model as the adapter "
            "says; where the adapter does not say it, call patch_model with the plan it was trained with."
        )
    expected = present if holds_values else {}
    problems = []
    if missing := [key for key in expected if key not in found]:
        problems.append(f"missing from the adapter: {shorten(missing)}")
    if unexpected := [key for key in found if key not in expected]:
        problems.append(f"in the adapter, but not in the model: {shorten(unexpected)}")
    for key, shape in expected.items():
        if key in found and found[key].shape != shape:
            problems.append(f"{key} has shape {tuple(found[key].shape)} in the adapter, {tuple(shape)} in the model")
    if problems:
        raise ValueError(
            f"the RSA parameters of the adapter do not fit this {type(model).__name__} ({'; '.join(problems)}). Load "
            "it on the model class and with the plan it was trained with; if its files are damaged, get them again."
        )
    for key, tensor in found.items():
        require_number(key, tensor)
