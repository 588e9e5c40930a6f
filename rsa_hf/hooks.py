"""Every touch on transformers' internals, but for the classes in `adapters.py`. Importing `rsa_hf` installs them.

Plain models are not affected. Each hook is checked before any is installed: where transformers has moved, importing
`rsa_hf` raises, says which hook does not fit and which versions do, and leaves transformers as it was.

What the hooks do:

* `AttentionInterface.get_interface`: an attention module with a child named `rsa` gets its output mixed.
* `ContinuousMixin.init_continuous_batching`: refused for a patched model, before a thread of its own is started.
* `PreTrainedModel.post_init`: a config that holds a plan (`config.rsa`) gets its `rsa` children built.
* `PreTrainedModel._initialize_weights`: `rsa` children that no checkpoint fills start as the plan says.
* `PreTrainedModel._load_pretrained_model`, `_from_config`: a checkpoint and its plan must match exactly.
* `PreTrainedModel.save_pretrained`: recurrence is never saved without its plan, and gets a model card.
* `PushToHubMixin._upload_modified_files`, `Trainer.create_model_card`: the model card survives theirs.
* `PreTrainedConfig.to_json_file`, `_dict_from_json_file`: the locks that keep a transformers without `rsa_hf` from
  loading a patched checkpoint as a plain model, put on in the file and taken off in memory.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.modeling_utils import AttentionInterface, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

from rsa_hf.adapters import connect, has_adapters, watch
from rsa_hf.card import CardFacts, read_facts, write_card
from rsa_hf.checkpoint import attach_from_config, read_plan, saved_plans
from rsa_hf.geometry import flash_documents, is_causal, read_geometry
from rsa_hf.heads import RSAHeads, heads_of, holds_copies
from rsa_hf.versions import require_transformers

__all__ = ["AttentionCall", "Hook", "install", "installed", "record_attention_calls", "replace_all", "require_number"]

# What a transformers without rsa_hf prints when it meets the lock, so it has to tell what to do.
LOCK = "rsa_hf (this checkpoint has RSA heads: pip install rsa_hf, then import rsa_hf before loading it)"

NO_CONTINUOUS_BATCHING = (
    "RSA does not work with continuous batching: its paged cache is filled inside the attention function, so the "
    "values of earlier tokens cannot be seen. Use model.generate(...) instead."
)

logger = logging.getLogger(__name__)

RSA_KEY = re.compile(r"(^|\.)rsa\.(mu|eta|nu|theta)$")


@dataclass(frozen=True)
class Hook:
    """One function of another library that is replaced, and the parameters it is expected to have."""

    owner: Any  # a class or a module
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def install() -> None:
    """Install all hooks; does nothing where they are installed already.

    Raises:
        ImportError: transformers is outside the supported range, or one of its internals is not as expected.
    """
    replace_all([hook for hook in _HOOKS if not _is_in_place(hook)], require_transformers())


def installed() -> dict[str, bool]:
    """Each hook by name, and whether it is in place."""
    return {f"{hook.owner.__name__}.{hook.name}": _is_in_place(hook) for hook in _HOOKS}


def _is_in_place(hook: Hook) -> bool:
    return hasattr(getattr(hook.owner, hook.name, None), "_rsa_hf_hook")


def replace_all(hooks: Sequence[Hook], fits: str) -> None:
    """Put every hook in its place or, where one does not fit, none of them.

    Args:
        hooks: what to replace.
        fits: which versions of the library fit, for the message.

    Raises:
        ImportError: a function is missing or has not the expected parameters.
    """
    originals = []
    for hook in hooks:
        static = inspect.getattr_static(hook.owner, hook.name, None)
        function = getattr(static, "__func__", static)
        found = list(inspect.signature(function).parameters) if callable(function) else None
        if found is None or [name for name in hook.parameters if name not in found]:
            raise ImportError(
                f"{fits} {hook.owner.__name__}.{hook.name} was expected to take ({', '.join(hook.parameters)}), but "
                f"{'is missing' if found is None else 'takes (' + ', '.join(found) + ')'}. Install a version that "
                "rsa_hf was tested with, or a newer rsa_hf."
            )
        originals.append((hook, static, function))
    for hook, static, function in originals:
        replacement = functools.wraps(function)(hook.wrap(function))
        replacement._rsa_hf_hook = True  # type: ignore[attr-defined]
        kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
        setattr(hook.owner, hook.name, kind(replacement) if kind else replacement)


# --- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, as `record_attention_calls` sees it.

    Attributes:
        module: the attention module.
        num_heads: H.
        query_length: T.
        key_length: S.
        causal: direction as the call or the module says it; None: neither does.
        sees_later: whether any query but the last saw the last key; None on the meta device, where nothing is seen.
    """

    module: nn.Module
    num_heads: int
    query_length: int
    key_length: int
    causal: bool | None
    sees_later: bool | None

    @property
    def direction(self) -> bool | None:
        """Whether the call is causal, as its mask shows or, where that shows nothing, as the module says."""
        return self.causal if self.sees_later is None else not self.sees_later


_recording = threading.Lock()


@contextmanager
def record_attention_calls() -> Iterator[list[AttentionCall]]:
    """Record every call of attention while the context is open: through the interface, and in connected modules."""
    calls: list[AttentionCall] = []

    def record(module: nn.Module, num_heads: int, query_length: int, key_length: int, causal: bool) -> None:
        calls.append(AttentionCall(module, num_heads, query_length, key_length, causal, sees_later=not causal))

    with _recording, watch(record):
        original = AttentionInterface.get_interface

        def recording(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            base = original(self, name, default)

            def attention(
                module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any
            ) -> Any:
                _require_supported(name, keywords)
                # Zero queries weigh all keys alike that they see, and only the last has a value here.
                last = torch.zeros_like(value)
                last[:, :, -1] = 1
                seen = base(module, torch.zeros_like(query), key, last, *args, **keywords)[0]
                sees_later = None if seen.is_meta else bool((seen[:, :-1] != 0).any())
                causal = is_causal(module, keywords)
                calls.append(AttentionCall(module, query.shape[1], query.shape[2], key.shape[2], causal, sees_later))
                return base(module, query, key, value, *args, **keywords)

            return attention

        setattr(AttentionInterface, "get_interface", recording)  # noqa: B010  (mypy refuses the plain assignment)
        try:
            yield calls
        finally:
            setattr(AttentionInterface, "get_interface", original)  # noqa: B010


def _wrap_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Any:
        base = original(self, attn_implementation, default)

        def attention(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            rsa = heads_of(module)
            if rsa is None:
                return base(module, *args, **keywords)
            return _attention_with_rsa(rsa, base, attn_implementation, module, *args, **keywords)

        return attention

    return get_interface


def _attention_with_rsa(
    rsa: RSAHeads,
    base: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    _require_supported(implementation, keywords)
    output, weights = base(module, query, key, value, attention_mask, *args, **keywords)
    flash = "flash" in (implementation or "")
    causal = rsa.plan.causal if rsa.plan.causal is not None else is_causal(module, keywords)
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal. Patch with RSAConfig(causal=True) or "
            "RSAConfig(causal=False)."
        )
    geometry = read_geometry(
        query,
        key,
        attention_mask,
        causal=causal,
        aligned_top_left=implementation == "sdpa",
        # Under sdpa and eager windows and documents are in the mask; flash attention takes them as keywords.
        sliding_window=keywords.get("sliding_window") if flash else None,
        documents=flash_documents(query, key, keywords) if flash and attention_mask is None else None,
    )
    return rsa(output, value, geometry), weights


def _require_supported(implementation: str | None, keywords: dict[str, Any]) -> None:
    if keywords.get("cache") is not None or (implementation or "").startswith("paged|"):
        raise NotImplementedError(NO_CONTINUOUS_BATCHING)
    if implementation == "flex_attention":
        raise NotImplementedError(
            "RSA does not work with flex attention: its masks (BlockMask) are functions, which cannot be read. Use "
            "attn_implementation='sdpa', 'eager' or 'flash_attention_2'."
        )


def _wrap_init_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_continuous_batching(self: Any, *args: Any, **keywords: Any) -> Any:
        # Raised in the thread that generates, an error would only be logged, and the caller given no tokens.
        if any(isinstance(module, RSAHeads) for module in self.modules()):
            raise NotImplementedError(NO_CONTINUOUS_BATCHING)
        return original(self, *args, **keywords)

    return init_continuous_batching


# --- building, initialising, loading --------------------------------------------------------------------------------


def _wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: PreTrainedModel) -> None:
        attach_from_config(self)
        if saved_plans(self.config):
            connect(self)
        elif has_adapters(self):
            # Before anybody (Accelerate) keeps bound methods of it. A plain model has to work in any case; should its
            # classes not be as expected, patch_model says so.
            with suppress(RuntimeError):
                connect(self)
        original(self)

    return post_init


def _wrap_initialize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **keywords: Any) -> None:
        if isinstance(module, RSAHeads):
            module.reset_parameters()
            return
        original(self, module, *args, **keywords)

    return _initialize_weights


def _require_attached(model: PreTrainedModel) -> None:
    if saved_plans(model.config) and not any(isinstance(m, RSAHeads) for m in model.modules()):
        plan = read_plan(next(iter(saved_plans(model.config))))
        raise ValueError(
            f"the config holds an RSA plan for the modules {', '.join(plan.modules[:3])}, … but "
            f"{type(model).__name__} has none of them, and would run as a plain model. Load it with the class that "
            "was patched, or remove config.rsa."
        )


def _wrap_from_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def _from_config(cls: type[PreTrainedModel], config: PreTrainedConfig, **keywords: Any) -> PreTrainedModel:
        model: PreTrainedModel = original(cls, config, **keywords)
        if not _is_part_of_patched(model):
            _require_attached(model)
        return model

    return _from_config


def _is_part_of_patched(model: PreTrainedModel) -> bool:
    """Whether a model is built inside of the patched one, and has its modules under shorter names (Mllama)."""
    present = {name for name, _ in model.named_modules()}
    planned = [name for content in saved_plans(model.config) for name in read_plan(content).modules]
    return any(name in present for name in (full.partition(".")[2] for full in planned))


def _wrap_load_pretrained_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **keywords: Any
    ) -> Any:
        _require_attached(model)
        _require_safetensors(model, checkpoint_files, load_config)
        loading_info, *rest = original(model, state_dict, checkpoint_files, load_config, *args, **keywords)
        loading_info.unexpected_keys -= _empty_tensors(loading_info.unexpected_keys, checkpoint_files)
        _require_matching_keys(model, loading_info)
        _require_numbers(model)
        return (loading_info, *rest)

    return _load_pretrained_model


def _require_safetensors(model: PreTrainedModel, checkpoint_files: Any, load_config: Any) -> None:
    pickled = [
        os.path.basename(file) for file in checkpoint_files or () if str(file).endswith((".bin", ".pt", ".pth"))
    ]
    if pickled and saved_plans(model.config) and load_config.use_safetensors is not False:
        raise ValueError(
            f"this checkpoint with RSA heads has its weights in {', '.join(pickled[:3])}, a pickle, which can run "
            "code when it is read; rsa_hf saves safetensors alone. If you trust where it comes from, load it with "
            "from_pretrained(..., use_safetensors=False), and save it again."
        )


def _empty_tensors(keys: set[str], checkpoint_files: Any) -> set[str]:
    """RSA keys whose tensor has no entries: a writer may keep `eta` (0,) for a plan without regular heads."""
    wanted = {key for key in keys if RSA_KEY.search(key)}
    files = [file for file in checkpoint_files or () if str(file).endswith(".safetensors")] if wanted else []
    empty = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            empty |= {key for key in wanted.intersection(tensors.keys()) if 0 in tensors.get_slice(key).get_shape()}
    return empty


def _require_matching_keys(model: PreTrainedModel, loading_info: Any) -> None:
    # Keys of parts that this class does not have at all, e.g. the decoder of a T5EncoderModel.
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    unexpected = [
        key
        for key in sorted(loading_info.unexpected_keys)
        if RSA_KEY.search(key) and not any(pattern.search(key) for pattern in ignored)
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
        problems.append(f"missing from the checkpoint: {', '.join(missing)}")
    if unexpected:
        problems.append(f"in the checkpoint, but not in the plan: {', '.join(unexpected)}")
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


# --- saving ---------------------------------------------------------------------------------------------------------


def _wrap_save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(
        self: PreTrainedModel, save_directory: Any, is_main_process: bool = True, *args: Any, **keywords: Any
    ) -> Any:
        has_heads = any(isinstance(module, RSAHeads) for module in self.modules())
        if not self._hf_peft_config_loaded and any(holds_copies(module) for module in self.modules()):
            raise ValueError(
                f"the RSA heads of this {type(self).__name__} are wrapped by PEFT, so a saved copy could not be "
                "loaded again. Save the PEFT model instead, or the model that its merge_and_unload() returns."
            )
        if has_heads and not saved_plans(self.config):
            raise ValueError(
                f"this {type(self).__name__} has RSA heads, but its config has no plan (config.rsa), so a saved copy "
                "could not be loaded again. Save the model that was given to patch_model, or patch this part itself."
            )
        if saved_plans(self.config) and not has_heads:
            raise ValueError(
                f"config.rsa of this {type(self).__name__} holds an RSA plan, but the model has no RSA heads. Remove "
                "config.rsa, or patch the model."
            )
        result = original(self, save_directory, is_main_process, *args, **keywords)
        if has_heads and is_main_process and _is_first_process():
            _write_card(self, save_directory)
            _hook_trainer()
        return result

    return save_pretrained


def _wrap_upload_modified_files(original: Callable[..., Any]) -> Callable[..., Any]:
    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **keywords: Any) -> Any:
        if isinstance(self, PreTrainedModel) and saved_plans(self.config):
            _write_card(self, working_dir, CardFacts(name=repo_id), plot=True)
        return original(self, working_dir, repo_id, *args, **keywords)

    return _upload_modified_files


def _wrap_create_model_card(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_model_card(self: Any, *args: Any, **keywords: Any) -> None:
        facts = read_facts(self.args.output_dir)
        original(self, *args, **keywords)
        model = self.accelerator.unwrap_model(self.model)
        if self.is_world_process_zero() and isinstance(model, PreTrainedModel) and saved_plans(model.config):
            facts = facts.updated(CardFacts(seeds=(self.args.seed,), name=getattr(self, "hub_model_id", None)))
            _write_card(model, self.args.output_dir, facts, plot=True)

    return create_model_card


def _hook_trainer() -> None:
    """Hook the Trainer's card, if there is a Trainer.

    Not on import, which would take as long again for those who have none. Whoever pushes with a Trainer saves the
    model first, and its module is loaded by then.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return
    hook = Hook(module.Trainer, "create_model_card", ("self",), _wrap_create_model_card)
    if not _is_in_place(hook):
        try:
            replace_all([hook], "The Trainer will write its own model card alone.")
        except ImportError as error:
            logger.warning("%s", error)


def _write_card(model: PreTrainedModel, folder: Any, facts: CardFacts | None = None, plot: bool = False) -> None:
    try:
        write_card(model, folder, facts, plot)
    except Exception as error:
        # The weights are saved, and hours of training are not to end because of a card.
        logger.warning("the model card in %s was not brought up to date: %s", folder, error)


def _is_first_process() -> bool:
    return not (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()
    )


def _wrap_to_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_json_file(self: PreTrainedConfig, json_file_path: Any, *args: Any, **keywords: Any) -> None:
        if not saved_plans(self):
            original(self, json_file_path, *args, **keywords)
            return
        # Written beside and renamed: at no moment is there a config.json without its locks.
        beside = f"{os.fspath(json_file_path)}.{os.getpid()}.tmp"
        try:
            original(self, beside, *args, **keywords)
            with open(beside, encoding="utf-8") as file:
                content = json.load(file)
            content["attn_implementation"] = LOCK
            content["fusion_config"] = {**(content.get("fusion_config") or {}), LOCK: True}
            with open(beside, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
            os.replace(beside, json_file_path)
        except BaseException:
            if os.path.exists(beside):
                os.remove(beside)
            raise

    return to_json_file


def _wrap_dict_from_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def _dict_from_json_file(cls: type[PreTrainedConfig], json_file: Any) -> Any:
        content = original(cls, json_file)
        if isinstance(content, dict):
            # Before anything is built: a plan from a file may ask for any amount of memory.
            for part in (content, *content.values()):
                if isinstance(part, dict) and part.get("rsa") is not None:
                    read_plan(part["rsa"])
            _take_off_locks(content)
        return content

    return _dict_from_json_file


def _take_off_locks(content: dict[str, Any]) -> None:
    if str(content.get("attn_implementation", "")).startswith("rsa_hf"):
        del content["attn_implementation"]
    fusions = content.get("fusion_config")
    if isinstance(fusions, dict):
        kept = {name: value for name, value in fusions.items() if not name.startswith("rsa_hf")}
        if kept:
            content["fusion_config"] = kept
        elif fusions:
            del content["fusion_config"]


_HOOKS = (
    Hook(AttentionInterface, "get_interface", ("self", "attn_implementation", "default"), _wrap_get_interface),
    Hook(ContinuousMixin, "init_continuous_batching", ("self",), _wrap_init_continuous_batching),
    Hook(PreTrainedModel, "post_init", ("self",), _wrap_post_init),
    Hook(PreTrainedModel, "_initialize_weights", ("self", "module"), _wrap_initialize_weights),
    Hook(PreTrainedModel, "_from_config", ("cls", "config"), _wrap_from_config),
    Hook(
        PreTrainedModel,
        "_load_pretrained_model",
        ("model", "state_dict", "checkpoint_files", "load_config"),
        _wrap_load_pretrained_model,
    ),
    Hook(PreTrainedModel, "save_pretrained", ("self", "save_directory", "is_main_process"), _wrap_save_pretrained),
    Hook(PushToHubMixin, "_upload_modified_files", ("self", "working_dir", "repo_id"), _wrap_upload_modified_files),
    Hook(PreTrainedConfig, "to_json_file", ("self", "json_file_path"), _wrap_to_json_file),
    Hook(PreTrainedConfig, "_dict_from_json_file", ("cls", "json_file"), _wrap_dict_from_json_file),
)
