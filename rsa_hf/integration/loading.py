"""Hooks into building, initialising and loading: a config that holds a plan gets its heads, and a checkpoint fits it.

* `PreTrainedModel.post_init`: a config that holds a plan (`config.rsa`) gets its `rsa` children built.
* `PreTrainedModel._initialize_weights`: `rsa` children that no checkpoint fills start as the plan says.
* `PreTrainedModel._load_pretrained_model`, `_from_config`: a checkpoint and its plan must match exactly. Its files are
  looked at first: what is wrong with them is said before memory is taken for anything.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.integration.architectures import connect
from rsa_hf.integration.attach import attach_from_config, require_whole_heads
from rsa_hf.integration.peft.checks import require_adapter_file
from rsa_hf.saved_plan import RSA_KEY, read_plan, require_number, saved_plans
from rsa_hf.utils.brief import shorten

__all__ = [
    "MismatchError",
    "wrap_from_config",
    "wrap_initialize_weights",
    "wrap_load_pretrained_model",
    "wrap_post_init",
]

logger = logging.getLogger(__name__)


class MismatchError(ValueError, RuntimeError):
    """Tensors of other shapes than the model's: a RuntimeError, as transformers raises for them, and a ValueError."""


def wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the RSA heads that the config of a model asks for."""

    def post_init(self: PreTrainedModel) -> None:
        # from_pretrained builds on the meta device. Elsewhere the weights are random, and a config that is shared with
        # a patched model would give RSA heads to a control that is meant to be plain.
        if any(heads.mu.device.type != "meta" for heads in attach_from_config(self)):
            logger.warning(
                "A %s is built with RSA heads, as its config has a plan of them: config.rsa. A plain one needs a "
                "config of its own, copied before patch_model or after unpatch_model.",
                type(self).__name__,
            )
        if saved_plans(self.config):
            connect(self)
        original(self)

    return post_init


def wrap_initialize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start RSA heads as their plan says."""

    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **keywords: Any) -> None:
        if isinstance(module, RSAHeads):
            if not module._is_hf_initialized:
                module.reset_parameters()
                module._is_hf_initialized = True
            return
        original(self, module, *args, **keywords)

    return _initialize_weights


def _require_attached(model: PreTrainedModel) -> None:
    """Check that each module of the plan has its heads, but for parts that this class does not have at all."""
    planned = [name for content in saved_plans(model.config) for name in read_plan(content).modules]
    if not planned:
        return
    attached = [name for name, module in model.named_modules() if heads_of(module) is not None]
    if not attached:
        raise ValueError(
            f"the config holds an RSA plan for the modules {', '.join(planned[:3])}, … but "
            f"{type(model).__name__} has none of them, and would run as a plain model. Load it with the class that "
            "was patched, or remove config.rsa."
        )
    absent = [
        name
        for name in planned
        if not any(f".{found}".endswith(f".{name}") for found in attached) and not _is_ignored(model, f"{name}.rsa.mu")
    ]
    if absent:
        raise ValueError(
            f"the config holds an RSA plan for {shorten(absent)}, which this {type(model).__name__} does not have. "
            "Load the model with the class and the config it was saved with."
        )


def _is_ignored(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor is of a part that this class does not have at all, e.g. the decoder of a T5EncoderModel.

    The plan names it then. Patterns alone say too much: GPT-2's "attn.bias" is found in "h.9.attn.c_attn.bias.rsa.mu".
    """
    module = key.rpartition(".rsa.")[0]
    planned = any(f".{module}".endswith(f".{name}") for plan in saved_plans(model.config) for name in plan["modules"])
    return planned and any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def wrap_from_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check that each module of the plan has its heads."""

    def _from_config(cls: type[PreTrainedModel], config: PreTrainedConfig, **keywords: Any) -> PreTrainedModel:
        model: PreTrainedModel = original(cls, config, **keywords)
        if not _is_part_of_patched(model):
            _require_attached(model)
        return model

    return _from_config


def _is_part_of_patched(model: PreTrainedModel) -> bool:
    """Whether a model is built inside of the patched one, and has its modules under shorter names (Mllama)."""
    present = {name for name, _ in model.named_modules()}
    planned = [name.split(".") for content in saved_plans(model.config) for name in read_plan(content).modules]
    return any(".".join(parts[i:]) in present for parts in planned for i in range(1, len(parts)))


def wrap_load_pretrained_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check the files of a checkpoint, and that its tensors match its plan."""

    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **keywords: Any
    ) -> Any:
        _require_attached(model)
        if saved_plans(model.config) and not model._hf_peft_config_loaded:
            require_whole_heads(model)
            for file in checkpoint_files or ():
                _require_inside(str(file), load_config.pretrained_model_name_or_path)
            _require_safetensors(checkpoint_files, load_config)
            _require_sound_files(checkpoint_files)
        if model._hf_peft_config_loaded:
            require_adapter_file(model, checkpoint_files, state_dict)
        loading_info, *rest = original(model, state_dict, checkpoint_files, load_config, *args, **keywords)
        loading_info.unexpected_keys -= _empty_tensors(loading_info.unexpected_keys, checkpoint_files)
        _require_matching_keys(model, loading_info)
        if saved_plans(model.config) and loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            _refuse_mismatched(model, loading_info.mismatched_keys)
        _require_numbers(model)
        return (loading_info, *rest)

    return _load_pretrained_model


def _require_safetensors(checkpoint_files: Any, load_config: Any) -> None:
    # An index may name any file, and transformers takes all that are no safetensors for pickles.
    pickled = [os.path.basename(file) for file in checkpoint_files or () if not str(file).endswith(".safetensors")]
    if pickled and load_config.use_safetensors is not False:
        raise ValueError(
            f"this checkpoint with RSA heads has its weights in {shorten(pickled):.300}, a pickle, which can run "
            "code when it is read; rsa_hf saves safetensors alone. If you trust where it comes from, load it with "
            "from_pretrained(..., use_safetensors=False), and save it again."
        )


def _require_sound_files(checkpoint_files: Any) -> None:
    """Check that the files of a patched checkpoint can be read, and the RSA tensors in them."""
    holders: dict[str, str] = {}
    for file in _safetensors(checkpoint_files):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in filter(RSA_KEY.search, tensors.keys()):
                    if key in holders:
                        raise ValueError(f"{key} stands in two files of the checkpoint: {holders[key]} and {file}.")
                    holders[key] = file
                    require_number(key, tensors.get_tensor(key))
        except SafetensorError as error:
            raise ValueError(
                f"{file} is no sound safetensors file ({error}). Get it again, or save it again."
            ) from error


def _require_inside(file: str, folder: Any) -> None:
    """Check that a file, which an index may have named, is one of the checkpoint's own."""
    # By name alone: in a cache of the Hub files are links to other folders.
    if os.path.isdir(str(folder)):
        inside = Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
    else:
        # The cache itself may be anywhere, also at "../cache".
        parts, own = Path(file).parts, repo_folder_name(repo_id=str(folder), repo_type="model")
        inside = file == str(folder) or ".." not in parts[parts.index(own) if own in parts else 0 :]
    if not inside:
        raise ValueError(f"the checkpoint names a file outside of its own folder: {file!r:.500}. It was not read.")


def _safetensors(checkpoint_files: Any) -> list[str]:
    return [str(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")]


def _empty_tensors(keys: set[str], checkpoint_files: Any) -> set[str]:
    """RSA keys whose tensor has no entries: a writer may keep `eta` (0,) for a plan without regular heads."""
    wanted = {key for key in keys if RSA_KEY.search(key)}
    empty = set()
    for file in _safetensors(checkpoint_files) if wanted else []:
        with safe_open(file, framework="pt") as tensors:
            empty |= {key for key in wanted.intersection(tensors.keys()) if 0 in tensors.get_slice(key).get_shape()}
    return empty


def _refuse_mismatched(model: PreTrainedModel, mismatched: Sequence[tuple[str, Any, Any]]) -> None:
    # Transformers says so too, but after it has taken memory for all that the config asks for.
    shapes = [f"{key} has shape {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in sorted(mismatched)]
    raise MismatchError(
        f"the weights do not fit the config of this {type(model).__name__}: {shorten(shapes)}. Load them with the "
        "config.json they were saved with, or with ignore_mismatched_sizes=True for new tensors in place of those."
    )


def _require_matching_keys(model: PreTrainedModel, loading_info: Any) -> None:
    unexpected = [
        key for key in sorted(loading_info.unexpected_keys) if RSA_KEY.search(key) and not _is_ignored(model, key)
    ]
    missing = [key for key in sorted(loading_info.missing_keys) if RSA_KEY.search(key)]
    if model._hf_peft_config_loaded:  # `model.load_adapter` comes this way too; an adapter has no weights of its base
        if unexpected:
            raise ValueError(
                f"transformers {transformers.__version__} does not load the gates and rates of an adapter: "
                "they would be lost in silence. Load it with rsa_hf.peft.load or PeftModel.from_pretrained, on a "
                "fresh base model, or use a newer transformers."
            )
        missing = []
    mismatched = [entry for entry in sorted(loading_info.mismatched_keys) if RSA_KEY.search(entry[0])]
    problems = []
    if missing:
        problems.append(f"missing from the checkpoint: {shorten(missing)}")
    if unexpected:
        problems.append(f"in the checkpoint, but not in the plan: {shorten(unexpected)}")
    for key, found, expected in mismatched:
        problems.append(f"{key} has shape {tuple(found)} in the checkpoint, but the plan needs {tuple(expected)}")
    if problems:
        raise ValueError(
            f"the RSA weights do not fit the plan in config.rsa ({'; '.join(problems)}). Load the weights together "
            "with the config.json they were saved with; to add RSA to a plain checkpoint, load it plain and call "
            "patch_model."
        )


def _require_numbers(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if RSA_KEY.search(name) and parameter.device.type != "meta":
            require_number(name, parameter)
