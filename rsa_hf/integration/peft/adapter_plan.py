"""What an adapter with RSA heads says about itself in adapter_config.json, under the key `rsa`.

It is the content of `config.rsa` (see saved_plan.py), with `base`, which identifies the base model, and the adapter's
task type. The config's own `task_type` holds a lock instead: a PEFT without rsa_hf does not know that type and refuses
the adapter, which it would otherwise load without its gates and rates.

`base` has several entries, because the shapes of RSA parameters do not distinguish GPT-2 from GPT-2 medium:

* `name`: its name on the Hub, or the folder it was loaded from; None where it has none.
* `model_type`, and the hidden size and numbers of layers and heads that its config has. An adapter that replicates
  layers does not say how many the base model had; its plan and its tensors do.
* `weights`: a few values of some of its weight matrices, by name. Absent in adapters of version 0.1, and where no
  matrix can be read (sharded or offloaded models).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, isclose, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import SavedPlan, read_plan, saved_plans, write_plan
from rsa_hf.utils.files import write_text

__all__ = [
    "LOCK",
    "AdapterPlan",
    "describe_base",
    "differing_weights",
    "plan_of_model",
    "read_adapter_plan",
    "write_adapter_plan",
]

# Part of PEFT's error for an unknown task type, so it says what to do.
LOCK = (
    "rsa_hf (this adapter has RSA heads: pip install rsa_hf, then import rsa_hf before loading it, or start the "
    "program with rsa-hf run)"
)

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_MATRICES = 8  # number of matrices that are sampled
_PLACES = (17, 101, 1009, 100_003, 1_000_003)  # in the flattened matrix; they stay the same if an embedding grows
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TOLERANCE = {"rel_tol": 2**-7, "abs_tol": 1e-6}  # the same base model may be loaded in bfloat16 or float16


@dataclass(frozen=True)
class AdapterPlan:
    """The plan that an adapter was trained with, and its base model.

    Attributes:
        saved: the plan.
        base: what identifies the base model (see above); empty: any base model is accepted.
    """

    saved: SavedPlan
    base: Mapping[str, Any]


def plan_of_model(model: nn.Module) -> SavedPlan | None:
    """The plan that a model is patched with; None where it has no RSA heads.

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
    return read_plan(plans[0])


def describe_base(model: PreTrainedModel) -> dict[str, Any]:
    """`base` for a model, patched or plain, with adapters or without."""
    text: Any = model.config.get_text_config()
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(text, name, None), int)}
    # Trained parameters, such as biases with LoRA, are no longer those of the base model.
    frozen = [(name, matrix) for name, matrix in _matrices(model.base_model) if not matrix.requires_grad]
    # With replicated layers, a layer has another number than in the base model.
    if any(getattr(config, "layer_replication", None) for config in getattr(model, "peft_config", {}).values()):
        sizes.pop("num_hidden_layers", None)
        frozen = [(name, matrix) for name, matrix in frozen if not re.search(r"\.\d+\.", name)]
    step = max(1, ceil(len(frozen) / _MATRICES))
    sampled = {name: _sample(matrix) for name, matrix in frozen[::step]}
    weights = {name: values for name, values in sampled.items() if len(set(values)) > 1 and all(map(isfinite, values))}
    base = {"name": model.name_or_path or None, "model_type": str(model.config.model_type), **sizes}
    return base | ({"weights": weights} if weights else {})


def differing_weights(base: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The sampled matrices of a base model that have other values in this model.

    Returns:
        Their names, where they are more than half of those in both; else none. A part that its checkpoint does not
        have, such as a new pooler, is random in each model.
    """
    weights, present = base.get("weights", {}), dict(_matrices(model.base_model))
    shared = [name for name in weights if name in present]

    def is_same(name: str) -> bool:
        return all(isclose(a, b, **_TOLERANCE) for a, b in zip(weights[name], _sample(present[name]), strict=False))

    differing = [name for name in shared if not is_same(name)]
    return differing if 2 * len(differing) > len(shared) else []


def _matrices(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The weight matrices of a model that no adapter wraps and whose values can be read, by name.

    Adapters may change what they wrap: merging and some initialisations (PiSSA) write into the base layer. Quantised
    matrices, tensors of sharded and of offloaded models have another type, dtype or device.
    """
    for name, parameter in module.named_parameters(recurse=False):
        can_be_read = type(parameter) is nn.Parameter and parameter.device.type != "meta"
        if can_be_read and parameter.ndim > 1 and parameter.dtype in _DTYPES:
            yield f"{prefix}{name}", parameter
    for name, child in module.named_children():
        if not child._modules.keys() & {"base_layer", "original_module"}:
            yield from _matrices(child, f"{prefix}{name}.")


def _sample(matrix: Tensor) -> list[float]:
    places = [place for place in _PLACES if place < matrix.numel()]
    return [float(f"{value:.4g}") for value in matrix.detach().flatten()[places].float().tolist()]


def write_adapter_plan(adapter: AdapterPlan, folder: Path) -> None:
    """Add the plan and the lock to the adapter_config.json that PEFT has written into a folder.

    The file is replaced as a whole. Where that fails it is deleted: without the lock a PEFT without rsa_hf would load
    the adapter.
    """
    file = folder / "adapter_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        task_type = content["rsa"]["task_type"] if "rsa" in content else content.get("task_type")
        content["rsa"] = {**write_plan(adapter.saved), "base": adapter.base, "task_type": task_type}
        content["task_type"] = LOCK
        write_text(file, json.dumps(content, indent=2, sort_keys=True))
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def read_adapter_plan(content: Any) -> AdapterPlan:
    """Read and validate the content of `rsa` in adapter_config.json, except for the task type.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: an unknown format or key, or a value that is not allowed.
    """
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
