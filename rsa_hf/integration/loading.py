"""Building and loading: a config with a plan gets its RSA heads, and a checkpoint has to match its plan exactly."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import heads_of
from rsa_hf.integration.architectures import connect
from rsa_hf.integration.attach import attach_from_config, require_whole_heads
from rsa_hf.integration.peft.checks import require_adapter_file
from rsa_hf.saved_plan import RSA_KEY, require_number, saved_plans
from rsa_hf.utils.brief import shorten

__all__ = ["wrap_load_pretrained_model", "wrap_post_init"]

logger = logging.getLogger(__name__)


def wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the RSA heads that the config of a model asks for."""

    def post_init(self: PreTrainedModel) -> None:
        # from_pretrained builds on the meta device. Elsewhere the weights are random, and a config that is shared with
        # a patched model would give RSA heads to a control that is meant to be plain.
        if any(heads.mu.device.type != "meta" for heads in attach_from_config(self)):
            logger.warning(
                "A %s is built with RSA heads, because its config has a plan for them: config.rsa. For a plain one "
                "copy the config before patch_model or after unpatch_model.",
                type(self).__name__,
            )
        if saved_plans(self.config):
            connect(self)
        original(self)

    return post_init


def wrap_load_pretrained_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check the files of a checkpoint before they are read, and that its tensors match its plan."""

    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **keywords: Any
    ) -> Any:
        patched = bool(saved_plans(model.config))
        if patched:
            _require_planned_heads(model)
        if model._hf_peft_config_loaded:
            require_adapter_file(model, checkpoint_files, state_dict)
        elif patched:
            require_whole_heads(model)
            _check_files(checkpoint_files or (), load_config)
        loading_info, *rest = original(model, state_dict, checkpoint_files, load_config, *args, **keywords)
        _require_matching_keys(model, loading_info)
        if patched and not load_config.ignore_mismatched_sizes:
            _require_matching_shapes(model, loading_info)
        for name, parameter in model.named_parameters():
            if RSA_KEY.search(name) and parameter.device.type != "meta":
                require_number(name, parameter)
        return (loading_info, *rest)

    return _load_pretrained_model


# --- the plan -------------------------------------------------------------------------------------------------------


def _require_planned_heads(model: PreTrainedModel) -> None:
    """Check that each module of the plan has its heads, except for parts that this class does not have at all."""
    planned = _planned_modules(model)
    attached = [name for name, module in model.named_modules() if heads_of(module) is not None]
    absent = [
        name
        for name in planned
        if not any(f".{found}".endswith(f".{name}") for found in attached) and not _is_ignored(model, f"{name}.rsa.mu")
    ]
    if not attached:
        raise ValueError(
            f"the config holds an RSA plan for the modules {shorten(planned)}, but {type(model).__name__} has none "
            "of them, and would run as a plain model. Load it with the class that was patched, or remove config.rsa."
        )
    if absent:
        raise ValueError(
            f"the config holds an RSA plan for {shorten(absent)}, which this {type(model).__name__} does not have. "
            "Load the model with the class and the config it was saved with."
        )


def _planned_modules(model: PreTrainedModel) -> list[str]:
    return [name for content in saved_plans(model.config) for name in content["modules"]]


def _is_ignored(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor is of a part that this class does not have at all, e.g. the decoder of a T5EncoderModel.

    The plan names it then. Patterns alone match too much: GPT-2's "attn.bias" is in "h.9.attn.c_attn.bias.rsa.mu".
    """
    module = key.rpartition(".rsa.")[0]
    is_planned = any(f".{module}".endswith(f".{name}") for name in _planned_modules(model))
    return is_planned and any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())


# --- the files ------------------------------------------------------------------------------------------------------


def _check_files(checkpoint_files: Any, load_config: Any) -> None:
    """Check the files of a patched checkpoint before memory is taken for anything in them.

    Raises:
        ValueError: a file is outside of the checkpoint's folder, a pickle, or damaged; or an RSA tensor is in two
            files, or holds NaN or values out of range.
        TypeError: an RSA tensor holds no floating-point numbers.
    """
    files = [str(file) for file in checkpoint_files]
    for file in files:
        _require_inside(file, load_config.pretrained_model_name_or_path)
    # An index may name any file, and transformers takes all that are no safetensors for pickles.
    pickled = [os.path.basename(file) for file in files if not file.endswith(".safetensors")]
    if pickled and load_config.use_safetensors is not False:
        raise ValueError(
            f"this checkpoint with RSA heads has its weights in {shorten(pickled):.300}, a pickle, which can run "
            "code when it is read; rsa_hf saves safetensors alone. If you trust where it comes from, load it with "
            "from_pretrained(..., use_safetensors=False), and save it again."
        )
    holders: dict[str, str] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            continue
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


# --- what was loaded ------------------------------------------------------------------------------------------------


def _require_matching_keys(model: PreTrainedModel, loading_info: Any) -> None:
    """Check that the RSA tensors of a checkpoint are those of the plan.

    Raises:
        ValueError: one is missing, unexpected, or has another shape.
    """
    unexpected = [
        key for key in sorted(loading_info.unexpected_keys) if RSA_KEY.search(key) and not _is_ignored(model, key)
    ]
    missing = [key for key in sorted(loading_info.missing_keys) if RSA_KEY.search(key)]
    if model._hf_peft_config_loaded:  # `model.load_adapter` comes this way too; an adapter has no weights of its base
        if unexpected:
            raise ValueError(
                f"transformers {transformers.__version__} does not load the gates and rates of an adapter, and they "
                "would be lost. Load it with rsa_hf.peft.load or PeftModel.from_pretrained, on a fresh base model, or "
                "use a newer transformers."
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


def _require_matching_shapes(model: PreTrainedModel, loading_info: Any) -> None:
    """Check the shapes of all other tensors; transformers does so only after it has allocated those of the config."""
    if loading_info.mismatched_keys:
        shapes = [
            f"{key} has shape {tuple(found)}, not {tuple(wanted)}"
            for key, found, wanted in sorted(loading_info.mismatched_keys)
        ]
        raise ValueError(
            f"the weights do not fit the config of this {type(model).__name__}: {shorten(shapes)}. Load them with the "
            "config.json they were saved with, or with ignore_mismatched_sizes=True to start those tensors anew."
        )
