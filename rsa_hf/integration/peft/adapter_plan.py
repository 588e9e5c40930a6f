"""What an adapter with RSA heads says about itself in adapter_config.json, under the key `rsa`, and whether it fits.

It is the content of `config.rsa` (see saved_plan.py), with `base`, which identifies the base model, and the adapter's
task type. The config's own `task_type` holds a lock instead: a PEFT without rsa_hf does not know that type and refuses
the adapter, which it would otherwise load without its gates and rates.

`base` has the model's `name`, its `model_type`, its sizes, and in `weights` a few values of some of its matrices: the
shapes of RSA parameters do not distinguish GPT-2 from GPT-2 medium. There are no `weights` in adapters of version 0.1,
or where no matrix can be read (sharded or offloaded models). An adapter without gates and rates of its own also needs
a model whose gates and rates have the digest `gates_and_rates`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil, isclose, isfinite
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, load_peft_weights
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.children import is_peft_wrapper, rsa_modules
from rsa_hf.saved_plan import RSA_KEY, SavedPlan, differences, lock_of, read_plan, saved_plans, text_config, write_plan
from rsa_hf.utils.files import write_text
from rsa_hf.utils.text import shorten

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_MATRICES = 8  # number of matrices that are sampled
_PLACES = (17, 101, 1009, 100_003, 1_000_003)  # in the flattened matrix; they stay the same if an embedding grows
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TOLERANCE = {"rel_tol": 2**-7, "abs_tol": 1e-6}  # the same base model may be loaded in bfloat16 or float16


@dataclass(frozen=True)
class AdapterPlan:
    """The plan that an adapter was trained with, and what identifies its base model; empty: any model is accepted."""

    saved: SavedPlan
    base: Mapping[str, Any]


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


def wrappers(model: nn.Module, adapter_names: Iterable[str] = ()) -> Iterator[tuple[str, Any, list[str]]]:
    """PEFT's wrappers round RSA heads, with their names and those of the given adapters that they hold copies for."""
    for name, child in rsa_modules(model):
        if is_peft_wrapper(child):
            yield name, child, [adapter for adapter in adapter_names if adapter in child.modules_to_save]


def name_prefix(config: Any) -> str:
    """What PEFT puts before the names of the base model's modules in the files of an adapter."""
    return "base_model." if config.is_prompt_learning else "base_model.model."


# --- adapter_config.json --------------------------------------------------------------------------------------------


def add_plan(base: nn.Module, folder: Path) -> None:
    """Add plan and lock to the adapter_config.json in a folder, if there is one and the base model has a plan.

    The file is replaced as a whole. If that fails, it is deleted: without the lock a PEFT without rsa_hf would load
    the adapter.
    """
    file, plan = folder / "adapter_config.json", _plan_of_model(base)
    if plan is None or not isinstance(base, PreTrainedModel) or not file.is_file():
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        task_type = content["rsa"]["task_type"] if "rsa" in content else content.get("task_type")
        described = {**describe_base(base), "gates_and_rates": _digest_of_heads(base)}
        content["rsa"] = {**write_plan(plan), "base": described, "task_type": task_type}
        content["task_type"] = lock_of("adapter")
        write_text(file, json.dumps(content, indent=2, sort_keys=True))
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def read_adapter_plan(content: Any) -> AdapterPlan:
    """Read and validate the content of `rsa` in adapter_config.json, except for the task type, as `read_plan` does."""
    if not isinstance(content, Mapping) or not isinstance(content.get("base"), Mapping):
        raise TypeError(f"rsa in adapter_config.json is a mapping with a mapping `base` in it, got {content!r:.200}")
    saved = read_plan({key: value for key, value in content.items() if key not in ("base", "task_type")})
    weights = content["base"].get("weights", {})
    if not isinstance(weights, Mapping) or not all(map(_is_sample, weights.values())):
        raise TypeError(
            f"base in adapter_config.json has weights={weights!r:.200}: lists of finite numbers are needed."
        )
    return AdapterPlan(saved, content["base"])


def _is_sample(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and abs(value) < 1e38 for value in values)


# --- the base model -------------------------------------------------------------------------------------------------


def describe_base(model: PreTrainedModel) -> dict[str, Any]:
    """`base` for a model, patched or plain, with adapters or without."""
    text = text_config(model.config)
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(text, name, None), int)}
    # Trained parameters, such as biases with LoRA, are no longer those of the base model.
    frozen = [(name, matrix) for name, matrix in _matrices(model).items() if not matrix.requires_grad]
    # With replicated layers, a layer has another number than in the base model.
    if _has_replicated_layers(model):
        sizes.pop("num_hidden_layers", None)
        frozen = [(name, matrix) for name, matrix in frozen if not re.search(r"\.\d+\.", name)]
    sampled = {name: _sample(matrix) for name, matrix in frozen[:: max(1, ceil(len(frozen) / _MATRICES))]}
    weights = {name: values for name, values in sampled.items() if len(set(values)) > 1 and all(map(isfinite, values))}
    base = {"name": model.name_or_path or None, "model_type": str(model.config.model_type), **sizes}
    return base | ({"weights": weights} if weights else {})


def _has_replicated_layers(model: nn.Module) -> bool:
    return any(getattr(config, "layer_replication", None) for config in getattr(model, "peft_config", {}).values())


def differing_weights(base: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The sampled matrices whose values differ in a model, if they are more than half of those that it has.

    A part that the checkpoint does not have, such as a new pooler, is random in each model.
    """
    weights, present = base.get("weights", {}), _matrices(model)
    shared = [name for name in weights if name in present]

    def is_same(name: str) -> bool:
        return all(isclose(a, b, **_TOLERANCE) for a, b in zip(weights[name], _sample(present[name]), strict=False))

    differing = [name for name in shared if not is_same(name)]
    return differing if 2 * len(differing) > len(shared) else []


def _matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weight matrices of the base that no adapter wraps and whose values can be read, by name.

    Adapters may change what they wrap: merging and some initialisations (PiSSA) write into the base layer. Quantised
    matrices and tensors of sharded or offloaded models have another type, dtype or device.
    """
    base = model.base_model
    wrapped = {"base_layer", "original_module"}
    inside = tuple(f"{name}." for name, part in base.named_modules() if part._modules.keys() & wrapped)
    return {
        name: parameter
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if parameter.ndim > 1 and parameter.dtype in _DTYPES and parameter.device.type != "meta"
        if type(parameter) is nn.Parameter and not name.startswith(inside)
    }


def _digest_of_heads(model: nn.Module) -> str | None:
    """The digest of the gates and rates of a model's own heads, without adapters; None where they cannot be read."""
    heads = [getattr(child, "original_module", child) for _, child in rsa_modules(model)]
    values = [parameter.detach() for each in heads for parameter in each.parameters()]
    if not values or _has_replicated_layers(model) or any(x.is_meta or type(x) is not Tensor for x in values):
        return None
    numbers = torch.cat([value.float().cpu() for value in values]).numpy()
    return blake2b(numbers.tobytes(), digest_size=8).hexdigest()


def _sample(matrix: Tensor) -> list[float]:
    places = [place for place in _PLACES if place < matrix.numel()]
    return [float(f"{value:.4g}") for value in matrix.detach().flatten()[places].float().tolist()]


# --- whether an adapter fits a model --------------------------------------------------------------------------------


def _plan_of_model(model: nn.Module) -> SavedPlan | None:
    """The plan that a model is patched with; None where it has no RSA heads, or no plan for them."""
    plans = saved_plans(model.config) if isinstance(model, PreTrainedModel) and any(rsa_modules(model)) else []
    return read_plan(plans[0]) if plans else None


def require_fit(config: Any, model: nn.Module) -> None:
    """Check that a model, with adapters or without, is an adapter's base model and is patched with the same plan."""
    adapter, present = plan_of(config), _plan_of_model(model)
    if adapter is not None:
        require_same_base(adapter.base, model)
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
    if adapter is not None and not has_rsa(config):
        trained_with, found = adapter.base.get("gates_and_rates"), _digest_of_heads(model)
        if None not in (trained_with, found) and trained_with != found:
            raise ValueError(
                "this adapter has no gates and rates of its own, and was trained with others than this model has. "
                "Load it on the model that it was trained on."
            )


def require_same_base(base: Mapping[str, Any], model: nn.Module) -> None:
    """Check that a model, patched or not, has the type, sizes and weights that `base` has; the name may differ."""
    if not base:
        return
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ValueError(f"this adapter is for a {base.get('model_type')}, but this is a {kind}. Load that model.")
    present, name = describe_base(model), base.get("name") or "one without a name"
    changed = [
        f"{key} is {present.get(key)!r}, not {value!r:.200}"
        for key, value in base.items()
        if key not in ("name", "weights", "gates_and_rates") and present.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"this adapter is for another base model ({name!s:.200}): {'; '.join(changed)}. Load that model."
        )
    if differing := differing_weights(base, model):
        raise ValueError(
            f"this adapter was trained on another base model: on {name!s:.200}, and this one "
            f"({present['name'] or 'without a name'}) has other weights in {shorten(differing)}. Load the former, or "
            "use rsa_hf.peft.load(model, adapter, check_base_name=False)."
        )


def require_tensors(tensors: Mapping[str, Tensor], config: Any, model: nn.Module) -> None:
    """Check that an adapter has a tensor for each RSA parameter of its base model, of its shape, and no others."""
    found = {key.removeprefix(name_prefix(config)): tensor for key, tensor in tensors.items() if RSA_KEY.search(key)}
    expected = {
        f"{name}.{parameter}": value.shape
        for name, child in (rsa_modules(model) if has_rsa(config) else ())
        for parameter, value in getattr(child, "original_module", child).named_parameters()
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


def require_adapter_file(
    model: PreTrainedModel, files: Sequence[str] | None, tensors: Mapping[str, Tensor] | None
) -> None:
    """Check what transformers' own `load_adapter` is about to read, from a file or as tensors.

    The model has the adapter's layers already.
    """
    if files:
        folder = os.path.dirname(files[0])
        config = PeftConfig.from_pretrained(folder)
        require_fit(config, model)
        require_tensors(load_peft_weights(folder, device="cpu"), config, model)
    elif tensors is not None:
        *_, newest = model.peft_config.values()
        require_tensors(tensors, newest, model)
