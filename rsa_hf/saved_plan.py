"""`SavedPlan`: an `RSAConfig` with the modules it is for, as `config.rsa` holds it in a checkpoint.

`config.rsa` is `{"format_version": 1, "modules": [names], "plan": {RSAConfig fields}}`. The names are relative to the
base model, so that any head class loads the checkpoint. A plan that names single heads has format version 2, which
rsa_hf 0.1 refuses; one with free lags has 3, which 0.2.0.dev refuses too. Plans of earlier versions are
converted when they are read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from rsa_hf.config import COUNTS, LayerSpec, RSAConfig
from rsa_hf.utils.text import brief, shorten

WITH_COUNTS, WITH_HEADS, WITH_FREE_LAGS = 1, 2, 3  # format versions
MAX_NAMED_HEADS = 65_536  # more than in any model: a damaged plan could otherwise ask for all memory
RSA_KEY = re.compile(r"(^|\.)rsa\.(mu|eta|nu|theta|free_lags)$")  # a tensor of a checkpoint that belongs to RSA heads
_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
_MODULE_NAME = re.compile(r"[A-Za-z]\w*(\.\w+)*", re.ASCII)


@dataclass(frozen=True)
class SavedPlan:
    """An RSA config with the attention modules that it is for."""

    modules: tuple[str, ...]  # their names, relative to the base model
    config: RSAConfig  # with its counts written out
    layers: dict[str, LayerSpec] = field(compare=False)  # the RSA heads of each module

    @classmethod
    def of(cls, modules: Sequence[str], config: RSAConfig, num_heads: Sequence[int | None]) -> "SavedPlan":
        """The plan for some modules. A config that does not fit is a ValueError. `num_heads`: see `layer_specs`."""
        layers = config.layer_specs(num_heads)
        return cls(tuple(modules), config.resolved(num_heads), dict(zip(modules, layers, strict=True)))


def name_in_files(module: str) -> str:
    """The name of a module in files: without the parts that torch's wrappers add."""
    return ".".join(part for part in module.split(".") if part not in _WRAPPED)


def write_plan(plan: SavedPlan) -> dict[str, Any]:
    """The content of `config.rsa`."""
    version = WITH_COUNTS if plan.config.heads is None else WITH_HEADS
    return {
        "format_version": WITH_FREE_LAGS if plan.config.num_free_lags else version,
        "modules": list(plan.modules),
        "plan": plan.config.to_dict(),
    }


def read_plan(content: Any) -> SavedPlan:
    """Read and validate the content of `config.rsa`, which may come from anyone, without building modules.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: an unknown format or key, or a value that is not allowed.
    """
    if not isinstance(content, Mapping):
        raise TypeError(f"config.rsa is a mapping, got {type(content).__name__}: {content!r:.200}")
    version = content.get("format_version")
    if version not in (WITH_COUNTS, WITH_HEADS, WITH_FREE_LAGS):
        raise ValueError(
            f"config.rsa has format_version {brief(version)}; this rsa_hf reads {WITH_COUNTS} to {WITH_FREE_LAGS}. "
            "A newer checkpoint needs a newer rsa_hf."
        )
    if set(content) != {"format_version", "modules", "plan"}:
        raise ValueError(f"config.rsa has the keys {brief(sorted(content))}; needed: format_version, modules, plan.")
    modules = content["modules"]
    if not isinstance(modules, (list, tuple)) or not modules:
        raise TypeError(f"config.rsa['modules'] is a list of module names, got {modules!r:.200}")
    for name in modules:
        if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
            raise ValueError(
                f"config.rsa['modules'] has {name!r:.200}, which must be a module name such as 'h.0.attn'."
            )
    if len(set(modules)) != len(modules):
        raise ValueError("config.rsa['modules'] names a module more than once.")
    plan = content["plan"]
    is_counted = version == WITH_COUNTS and isinstance(plan, Mapping)
    config = _read_counts(plan, len(modules)) if is_counted else RSAConfig.from_dict(plan)
    return SavedPlan.of(modules, config, [None] * len(modules))


def _read_counts(plan: Mapping[str, Any], n: int) -> RSAConfig:
    """Read a plan that counts heads, for `n` modules.

    Plans of earlier versions may also give counts and dilations per layer, spread gates over the layers, or leave the
    heads of a pair untied. For these, the config names the heads that they stand for.
    """
    plan = dict(plan)
    tied, gate, dilation = plan.pop("tie_pairs", True), plan.get("gate_init"), plan.get("dilation")
    if not isinstance(tied, bool):
        raise TypeError(f"tie_pairs={brief(tied)}: True or False is needed.")
    is_nested = isinstance(dilation, list) and any(isinstance(entry, list) for entry in dilation)
    given = [name for name in COUNTS if isinstance(plan.get(name), list)] + ["dilation"] * is_nested
    if tied and not given and not isinstance(gate, list):
        return RSAConfig.from_dict(plan)
    columns = {name: _entries(name, plan.pop(name), n) for name in given}
    if isinstance(gate, list):
        low, high = (RSAConfig(gate_init=end).gate_init for end in _entries("gate_init", gate, 2))
        columns["gate_init"] = [low + (high - low) * (i / (n - 1) if n > 1 else 0.5) for i in range(n)]
    whole = RSAConfig.from_dict({**plan, "gate_init": -3.0})
    heads = []
    for i, layer in enumerate(whole.layers or range(n)):
        own = {**plan, **{name: column[i] for name, column in columns.items()}}
        if not any(own.get(name) for name in COUNTS[2:]):
            own["dilation"] = None
        heads += RSAConfig.from_dict(own).counted_heads(layer, None)
        if len(heads) > MAX_NAMED_HEADS:
            raise ValueError(f"config.rsa['plan'] has more than {MAX_NAMED_HEADS:,} RSA heads: it is damaged.")
    return RSAConfig(
        heads=tuple(heads if tied else (replace(head, pair=None) for head in heads)),
        gate_per_head=whole.gate_per_head,
        causal=whole.causal,
        parameter_scale=whole.parameter_scale,
    )


def _entries(name: str, value: list[Any], n: int) -> list[Any]:
    if len(value) != n:
        raise ValueError(f"{name}={brief(value)}: a list of {n} is needed.")
    return value


def lock_of(what: str) -> str:
    """A value for a config that only rsa_hf knows. Without rsa_hf, the error quotes it, so it says what to do."""
    return (
        f"rsa_hf (this {what} has RSA heads: pip install rsa_hf, then import rsa_hf before loading it, or start the "
        "program with rsa-hf run)"
    )


def differences(old: SavedPlan, new: SavedPlan) -> str:
    """Describe the differences between two plans, for messages."""
    before, after = old.config.to_dict(), new.config.to_dict()
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changed = [f"{key}: {brief(before.get(key))} → {brief(after.get(key))}" for key in keys]
    if old.modules != new.modules:
        changed.append(f"modules: {shorten(old.modules)} → {shorten(new.modules)}")
    return "; ".join(changed)


def saved_plans(config: PreTrainedConfig) -> list[Any]:
    """`config.rsa` of this config and of the configs in it, not validated."""
    return [vars(part)["rsa"] for part in with_parts(config) if vars(part).get("rsa") is not None]


def with_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and the configs in it, at any depth."""
    inner = (value for value in vars(config).values() if isinstance(value, PreTrainedConfig))
    return [config, *(part for each in inner for part in with_parts(each))]


def text_config(config: Any) -> Any:
    """The config of a model's text part; of several that of the decoder (MusicGen)."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)
