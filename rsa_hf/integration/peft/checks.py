"""Whether an adapter fits a model: the plan, the base model, and the tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peft import PeftConfig, load_peft_weights
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.children import is_peft_wrapper
from rsa_hf.integration.peft.adapter_plan import AdapterPlan, describe_base, differing_weights, plan_of_model
from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import RSA_KEY, differences, require_number
from rsa_hf.utils.text import shorten

__all__ = [
    "drop_base",
    "has_rsa",
    "name_prefix",
    "plan_of",
    "require_adapter_file",
    "require_fit",
    "require_same_base",
    "require_tensors",
    "rsa_modules",
    "wrappers",
]


def has_rsa(config: Any) -> bool:
    """Whether an adapter with this config has gates and rates of its own."""
    return any(name.split(".")[-1] == "rsa" for name in getattr(config, "modules_to_save", None) or ())


def plan_of(config: Any) -> AdapterPlan | None:
    """The plan that was read with an adapter's config; None for a new adapter, and for one without a plan."""
    adapter: AdapterPlan | None = vars(config).get("rsa")
    return adapter


def drop_base(config: Any) -> None:
    """Let an adapter's config accept any base model with the right plan."""
    if (adapter := plan_of(config)) is not None:
        config.rsa = replace(adapter, base={})


def rsa_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The `rsa` children of a model with their names: RSA heads, or PEFT's wrappers round them."""
    for name, module in model.named_modules():
        child = module._modules.get("rsa")
        if child is not None and (isinstance(child, RSAHeads) or is_peft_wrapper(child)):
            yield f"{name}.rsa" if name else "rsa", child


def wrappers(model: nn.Module, adapter_names: Iterable[str] = ()) -> Iterator[tuple[str, Any, list[str]]]:
    """PEFT's wrappers round RSA heads, with their names and those of the given adapters that they hold copies for."""
    for name, child in rsa_modules(model):
        if is_peft_wrapper(child):
            copies: Any = child.modules_to_save
            yield name, child, [adapter for adapter in adapter_names if adapter in copies]


def require_fit(config: Any, model: nn.Module) -> None:
    """Check that a model, with adapters or without, is an adapter's base model and is patched with the same plan.

    Raises:
        ValueError: another base model, one that is not patched, or one with another plan.
    """
    adapter = plan_of(config)
    if adapter is not None:
        require_same_base(adapter.base, model)
    present = plan_of_model(model)
    if present is None and (adapter is not None or has_rsa(config)):
        raise ValueError(
            f"this adapter is for a model with RSA heads, but this {type(model).__name__} has none: they would be "
            "lost silently. rsa_hf.peft.load(model, adapter) patches the model as the adapter says and loads it; to "
            "train a new one use rsa_hf.peft.get_peft_model, or call patch_model first."
        )
    if present is not None and adapter is not None and present != adapter.saved:
        raise ValueError(
            f"the adapter was trained with another plan than this model is patched with "
            f"({differences(adapter.saved, present)}; the adapter's first). Patch a fresh copy of the base model "
            "with the adapter's plan: rsa_hf.peft.load(model, adapter) does."
        )


def require_same_base(base: Mapping[str, Any], model: nn.Module, *, compare_weights: bool = True) -> None:
    """Check that a model is the base model of an adapter, whether it is patched or not.

    Type, sizes and sampled weights decide; the name does not, as folders are moved.

    Args:
        base: what identifies the base model (see adapter_plan.py); empty: any model is accepted.
        model: the model.
        compare_weights: False also accepts other weights.

    Raises:
        ValueError: it is of another type, has other sizes or other weights.
    """
    if not base:
        return
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ValueError(f"this adapter is for a {base.get('model_type')}, but this is a {kind}. Load that model.")
    present, name = describe_base(model), base.get("name") or "one without a name"
    changed = [
        f"{key} is {present.get(key)!r}, not {value!r:.200}"
        for key, value in base.items()
        if key not in ("name", "weights") and present.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"this adapter is for another base model ({name!s:.200}): {'; '.join(changed)}. Load that model."
        )
    if compare_weights and (differing := differing_weights(base, model)):
        raise ValueError(
            f"this adapter was trained on another base model: on {name!s:.200}, and this one "
            f"({present['name'] or 'without a name'}) has other weights in {shorten(differing)}. Load the model that "
            "the adapter was trained on. To use the adapter on this one all the same: rsa_hf.peft.load(model, "
            "adapter, check_base_name=False)."
        )


def name_prefix(config: Any) -> str:
    """What PEFT puts before the names of the base model's modules in the files of an adapter."""
    return "base_model." if config.is_prompt_learning else "base_model.model."


def require_tensors(tensors: Mapping[str, Tensor], config: Any, model: nn.Module) -> None:
    """Check that an adapter has a tensor for each RSA parameter of its base model, and no others.

    Raises:
        ValueError: a tensor is missing or unexpected, has another shape, or holds no numbers.
    """
    found = {key.removeprefix(name_prefix(config)): tensor for key, tensor in tensors.items() if RSA_KEY.search(key)}
    heads = {name: getattr(child, "original_module", child) for name, child in rsa_modules(model)}
    expected = {
        f"{name}.{parameter}": value.shape
        for name, module in heads.items()
        for parameter, value in module.named_parameters()
        if has_rsa(config)
    }
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


def require_adapter_file(
    model: PreTrainedModel, files: Sequence[str] | None, tensors: Mapping[str, Tensor] | None
) -> None:
    """Check what transformers' own `load_adapter` is about to read into a model that has the adapter's layers already.

    Args:
        model: a model with an adapter.
        files: the file of the adapter's tensors; empty where `tensors` are given.
        tensors: the adapter's tensors.

    Raises:
        ValueError: see `require_fit` and `require_tensors`.
    """
    if files:
        folder = os.path.dirname(files[0])
        config = PeftConfig.from_pretrained(folder)
        require_fit(config, model)
        require_tensors(load_peft_weights(folder, device="cpu"), config, model)
    elif tensors is not None:
        *_, newest = model.peft_config.values()
        require_tensors(tensors, newest, model)
