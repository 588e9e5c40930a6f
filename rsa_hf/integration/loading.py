"""Building, loading and resuming: a config with a plan gets RSA heads, and a checkpoint has to match them exactly."""

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME

from rsa_hf.children import attach_heads, heads_of
from rsa_hf.integration.attention import architecture_of, connect
from rsa_hf.integration.peft.adapter_plan import require_adapter_file
from rsa_hf.integration.split_layers import require_whole_sequence
from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import RSA_KEY, differences, read_plan, saved_plans
from rsa_hf.utils.text import shorten

logger = logging.getLogger(__name__)

_ATTENTION = re.compile(r"(?i:attention|attn)|MLA")  # LongCat's attention is called multi-head latent attention, MLA
# Cross-attention, and attention over the states of earlier layers or over channels.
_CROSS = re.compile(r"cross|encoder_?attn|enc(?:oder)?_?dec|attentionresidual|channelattention", re.IGNORECASE)


# --- building -------------------------------------------------------------------------------------------------------


def wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the RSA heads that the config of a model asks for."""

    def post_init(self: PreTrainedModel) -> None:
        # from_pretrained builds on the meta device. Elsewhere the weights are random, and a config that is shared with
        # a patched model would give RSA heads to a control that is meant to be plain.
        if any(heads.mu.device.type != "meta" for heads in _attach_from_config(self)):
            logger.warning(
                "A %s is built with RSA heads, because its config has a plan for them: config.rsa. For a plain one "
                "copy the config before patch_model or after unpatch_model.",
                type(self).__name__,
            )
        if saved_plans(self.config):
            connect(self)
        original(self)

    return post_init


def _attach_from_config(model: PreTrainedModel) -> list[RSAHeads]:
    """Build the `rsa` children that `model.config.rsa` names, and return them; without a plan, nothing.

    The parts of a composite model share its config but not its module names. A part with none of the modules stays
    plain; loading checks that the whole model has them.
    """
    base = model.base_model
    if vars(model.config).get("rsa") is None or (base is not model and any(map(heads_of, base.modules()))):
        return []  # the base has built its heads from the same plan
    modules = dict(base.named_modules(remove_duplicate=False))
    layers = read_plan(model.config.rsa).layers
    found = {name: (modules[name], layer) for name, layer in layers.items() if name in modules}
    wrong = [name for name, (module, _) in found.items() if not is_self_attention(name, module)]
    if wrong:
        kinds = sorted({type(found[name][0]).__name__ for name in wrong})
        raise ValueError(
            f"config.rsa names {shorten(wrong)} ({shorten(kinds)}), which is not self-attention of this "
            f"{type(base).__name__}: its RSA heads would never run. Load the model with the config it was saved with."
        )
    return attach_heads(list(found.values()))


def is_self_attention(name: str, module: nn.Module) -> bool:
    """Whether RSA heads on a module would run in its self-attention, from names and classes.

    A checkpoint may name a feed-forward layer, whose heads would never run, or cross-attention, which has no common
    time axis. In transformers and this package, self-attention that can be patched has a row in
    `architectures/table.py`, or its class is from a file that imports the attention interface. DeepSeek V4's
    `compressor` adds keys that are not tokens once a text is long.
    Classes of other packages (`trust_remote_code`) may be named in any way: the answer for them is True.
    """
    kind = type(module)
    if kind.__module__.partition(".")[0] not in ("torch", "transformers", "rsa_hf"):
        return True
    files = (sys.modules.get(cls.__module__) for cls in kind.__mro__)
    if architecture_of(module) is None and not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
        return False
    return is_named_self_attention(name, module) and not getattr(module, "compressor", None)


def is_named_self_attention(name: str, module: nn.Module) -> bool:
    """Whether a module computes self-attention, of any kind, by its name and class.

    It is the innermost module that has weight matrices and "Attention" in the name of its class; `BertAttention`, for
    example, only holds a `BertSelfAttention`. Cross-attention often has the class of self-attention: names and
    `is_cross_attention` tell it. Florence-2 has attention over channels, and PatchTST's may take turns.
    """
    if not _is_attention(module) or any(_is_attention(child) for child in module.modules() if child is not module):
        return False
    is_cross = _CROSS.search(".".join([*name.split(".")[-2:], type(module).__name__]))
    on_channels = getattr(getattr(module, "config", None), "channel_attention", False)
    return not (is_cross or on_channels or getattr(module, "is_cross_attention", False))


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, PreTrainedModel) or not _ATTENTION.search(type(module).__name__):
        return False
    # Quantised layers may have their weights in buffers, or packed.
    return any(parameter.dim() > 1 for parameter in module.parameters()) or any(
        hasattr(child, "in_features") for child in module.modules()
    )


# --- loading --------------------------------------------------------------------------------------------------------


def wrap_load_pretrained_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check that the tensors of a checkpoint match its plan."""

    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, *args: Any, **keywords: Any
    ) -> Any:
        patched = bool(saved_plans(model.config))
        if patched:
            _require_planned_heads(model)
        if model._hf_peft_config_loaded:
            require_adapter_file(model, checkpoint_files, state_dict)
        elif patched:
            require_whole_sequence(model)
        loading_info, *rest = original(model, state_dict, checkpoint_files, *args, **keywords)
        _require_matching_keys(model, loading_info)
        return (loading_info, *rest)

    return _load_pretrained_model


def _require_planned_heads(model: PreTrainedModel) -> None:
    """Check that each module of the plan has its heads, except for parts that this class does not have at all."""
    planned = _planned_modules(model)
    attached = [name for name, module in model.named_modules() if heads_of(module) is not None]
    absent = [
        name
        for name in planned
        if not any(f".{found}".endswith(f".{name}") for found in attached) and not _is_absent(model, f"{name}.rsa.mu")
    ]
    if absent or not attached:
        raise ValueError(
            f"the config holds an RSA plan for {shorten(absent or planned)}, which this {type(model).__name__} does "
            "not have: it would run without their RSA heads. Load the model with the class and the config it was "
            "saved with; a part of it can be taken from the loaded model."
        )


def _planned_modules(model: PreTrainedModel) -> list[str]:
    return [name for content in saved_plans(model.config) for name in content["modules"]]


def _is_absent(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor belongs to a part that this class does not have, such as the encoder of a BartForCausalLM."""
    module = key.rpartition(".rsa.")[0]
    planned = {name.split(".")[0] for name in _planned_modules(model) if f".{module}".endswith(f".{name}")}
    are_parts = bool(planned) and all(name.endswith(("encoder", "decoder", "model", "tower")) for name in planned)
    return are_parts and planned.isdisjoint(part for name, _ in model.named_modules() for part in name.split("."))


def _require_matching_keys(model: PreTrainedModel, loading_info: Any) -> None:
    """Check that the RSA tensors of a checkpoint are those of the plan."""
    unexpected = [key for key in loading_info.unexpected_keys if RSA_KEY.search(key) and not _is_absent(model, key)]
    # `model.load_adapter` calls this too; an adapter has no weights of its base.
    missing = [] if model._hf_peft_config_loaded else filter(RSA_KEY.search, loading_info.missing_keys)
    problems = []
    if missing := sorted(missing):
        problems.append(f"missing from the checkpoint: {shorten(missing)}")
    if unexpected:
        problems.append(f"in the checkpoint, but not in the plan: {shorten(sorted(unexpected))}")
    for key, found, expected in sorted(loading_info.mismatched_keys):
        if RSA_KEY.search(key):
            problems.append(f"{key} has shape {tuple(found)} in the checkpoint, but the plan needs {tuple(expected)}")
    if problems:
        raise ValueError(
            f"the RSA weights do not fit the plan in config.rsa ({'; '.join(problems)}). Load the weights with the "
            "class and the config.json they were saved with (a tower can be taken from the loaded model); to add RSA "
            "to a plain checkpoint, load it plain and call patch_model. An adapter that this transformers does not "
            "load itself: rsa_hf.peft.load."
        )


# --- resuming -------------------------------------------------------------------------------------------------------


def wrap_load_from_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a checkpoint with another plan."""

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **keywords: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PreTrainedModel):  # the plan of an adapter is checked where it is loaded
            _require_plan_of_model(Path(resume_from_checkpoint), model)
        return original(self, resume_from_checkpoint, *args, **keywords)

    return _load_from_checkpoint


def _require_plan_of_model(folder: Path, model: PreTrainedModel) -> None:
    if not (folder / CONFIG_NAME).is_file():
        return
    configs = model.config, type(model.config).from_pretrained(folder)
    own, theirs = ([read_plan(content) for content in saved_plans(config)] for config in configs)
    # Heads are compared, not configs: the checkpoint has trained values wherever they started.
    heads, other_heads = ([(plan.modules, plan.layers) for plan in plans] for plans in (own, theirs))
    if len(heads) == len(other_heads) and all(each in other_heads for each in heads):
        return
    if own and theirs:
        what = f"its RSA heads have another plan than the model's ({differences(theirs[0], own[0])})"
    else:
        what = f"the {'checkpoint' if theirs else 'model'} alone has RSA heads"
    raise ValueError(
        f"{folder} cannot be resumed from: {what}. Give the Trainer the model that the run was started with, "
        "or leave resume_from_checkpoint out."
    )
