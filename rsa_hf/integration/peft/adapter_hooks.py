"""The hooks into PEFT: no adapter loses its gates and rates silently.

RSA heads are in PEFT's `modules_to_save`: each adapter has a copy of every gate and rate and saves it with its other
tensors. `HOOKS` adds what PEFT does not do for them when adapters are added, saved and loaded; `_Tuner` does so when
they are merged.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftConfig, load_peft_weights
from torch import nn

from rsa_hf.children import rsa_modules
from rsa_hf.integration.hooks import Hook, install_hooks
from rsa_hf.integration.peft.adapter_plan import (
    add_plan,
    drop_base,
    has_rsa,
    name_prefix,
    read_adapter_plan,
    require_fit,
    require_tensors,
    wrappers,
)
from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import RSA_KEY

OLDEST_PEFT = "0.19.1"  # tested with this version and the newest

# The options of huggingface_hub.hf_hub_download that choose which adapter is read.
HUB_OPTIONS = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download")


def install() -> None:
    """Install the hooks that are not in place; an ImportError if a function of PEFT is not as expected."""
    install_hooks(HOOKS, f"rsa_hf works with peft ≥ {OLDEST_PEFT}; installed is {peft.__version__}.")


# --- adapter_config.json --------------------------------------------------------------------------------------------


def _wrap_from_peft_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_peft_type(cls: Any, **kwargs: Any) -> Any:
        content = kwargs.pop("rsa", None)
        if content is None:
            return original(cls, **kwargs)
        adapter = read_adapter_plan(content)
        config = original(cls, **{**kwargs, "task_type": content.get("task_type")})
        config.rsa = adapter
        return config

    return from_peft_type


def _wrap_save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(
        self: Any,
        save_directory: Any,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: Any = "auto",
        is_main_process: bool = True,
        **keywords: Any,
    ) -> Any:
        if keywords.get("path_initial_model_for_weight_conversion") and any(map(has_rsa, self.peft_config.values())):
            raise ValueError(
                "path_initial_model_for_weight_conversion: PEFT converts the matrices of LoRA alone, so gates and "
                "rates would be lost. Save the adapter without it."
            )
        names, parent = selected_adapters or list(self.peft_config), Path(save_directory)
        folders = [parent if name == "default" else parent / name for name in names]
        options = (safe_serialization, selected_adapters, save_embedding_layers, is_main_process)
        with saved_with_plan(_base_of(self), folders if is_main_process else []):
            return original(self, save_directory, *options, **keywords)

    return save_pretrained


@contextmanager
def saved_with_plan(base: nn.Module, folders: Iterable[Path]) -> Iterator[None]:
    """A context in which PEFT saves adapters on `base` into `folders`: it adds the base model's plan to them."""
    for name, child in rsa_modules(base):
        if isinstance(child, RSAHeads) and any(parameter.requires_grad for parameter in child.parameters()):
            raise ValueError(
                f"the RSA heads of this {type(base).__name__} ({name}, …) are trained, but no adapter holds them, so "
                "they would be lost silently. Add the adapter with rsa_hf.peft.get_peft_model, or with "
                "modules_to_save=['rsa'] in its config; or freeze them."
            )
    yield
    for folder in folders:
        add_plan(base, folder)


# --- adding and loading adapters ------------------------------------------------------------------------------------


def _base_of(model: Any) -> nn.Module:
    """The model inside a PeftModel; any other model as it is."""
    if not hasattr(type(model), "get_base_model"):
        return model  # type: ignore[no-any-return]
    base: nn.Module = model.base_model if model._is_prompt_learning else model.base_model.model
    return base


def _wrap_inject_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        require_fit(config, self.model)
        is_patched = any(rsa_modules(model))
        saved = {name.split(".")[-1] for name in getattr(config, "modules_to_save", None) or ()}
        if saved & {part for name, _ in rsa_modules(model) for part in name.split(".")[:-1]}:
            raise ValueError(
                f"modules_to_save={config.modules_to_save}: a module with RSA heads in it cannot be saved as a whole. "
                "Name its other parts, such as its projections, and 'rsa'."
            )
        if is_patched and not isinstance(self, _Tuner):
            self.__class__ = _with_rsa(self.__class__)  # as torch's `fully_shard` does; PEFT's classes are unchanged
        original(self, model, adapter_name, *args, **kwargs)
        if is_patched and not (has_rsa(config) or config.inference_mode):
            warnings.warn(
                f"the adapter {adapter_name!r} trains no gates and rates: those of this model stay as they are. "
                "To train and save them with it, put 'rsa' into its modules_to_save, as "
                "rsa_hf.peft.with_rsa(config) does.",
                stacklevel=2,
            )
        for _, wrapper, held in wrappers(model, [adapter_name]):
            wrapper.weight = None  # BaseTuner._replace_module reads it when it takes the wrapper off
            if held and adapter_name in self.active_adapters:
                # If an earlier adapter has wrapped the heads, PEFT activates the new one in its own layers only.
                wrapper.set_adapter(adapter_name, inference_mode=config.inference_mode)

    return inject_adapter


def _wrap_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        base, present = _base_of(self), self.peft_config.get(adapter_name)
        hub = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
        config = PeftConfig.from_pretrained(model_id, **hub)
        if present is not None:
            # PeftModel.from_pretrained has added the adapter before it calls this method. The added one may accept
            # any base (check_base_name=False), and an adapter of prompt learning has not been checked yet.
            require_fit(present, base)
            drop_base(config)
        require_fit(config, base)
        if has_rsa(config) or any(rsa_modules(base)):
            require_tensors(load_peft_weights(model_id, device="cpu", **hub), config, base)
        return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _wrap_hotswap(original: Callable[..., Any]) -> Callable[..., Any]:
    def hotswap_adapter_from_state_dict(
        model: Any, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        base = _base_of(model)
        drop_base(config)
        require_fit(config, base)
        require_tensors(state_dict, model.peft_config[adapter_name], base)
        others = {key: tensor for key, tensor in state_dict.items() if not RSA_KEY.search(key)}
        original(model, others, adapter_name, config, *args, **kwargs)
        with torch.no_grad():
            for name, wrapper, held in wrappers(base, [adapter_name]):
                for parameter, value in wrapper.modules_to_save[adapter_name].named_parameters() if held else ():
                    value.copy_(state_dict[f"{name_prefix(config)}{name}.{parameter}"])

    return hotswap_adapter_from_state_dict


def _wrap_enable_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    def enable_adapters(self: Any) -> None:
        original(self)
        for _, wrapper, _ in wrappers(self):
            wrapper.enable_adapters(True)

    return enable_adapters


# --- merging adapters -----------------------------------------------------------------------------------------------


class _Tuner:
    """What PEFT's tuners do differently on a model with RSA heads."""

    model: nn.Module
    peft_config: dict[str, Any]

    def _check_merge_allowed(self) -> None:
        """Refuse replicated layers, as PEFT means to."""
        super()._check_merge_allowed()  # type: ignore[misc]
        if any(getattr(config, "layer_replication", None) for config in self.peft_config.values()):
            raise ValueError("layer_replication: layers share weights, so nothing can be merged. Save the adapter.")

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:
        """Whether a module gets an adapter layer: RSA heads and their parts never do, whatever pattern they match."""
        found = super()._check_target_module_exists(peft_config, key)  # type: ignore[misc]
        return found and "rsa" not in key.split(".")

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """Merge the gates and rates of the named adapters; PEFT takes those of the active one."""
        named = [] if adapter_names is None else list(wrappers(self.model, adapter_names))
        for _, _, held in named:
            if len(held) > 1:
                raise ValueError(
                    f"adapter_names={adapter_names}: {', '.join(held)} each have gates and rates of their own: only "
                    "one can be merged. Name one of them."
                )
        for _, wrapper, held in named:
            wrapper.set_adapter(held)
        return _unwrapped(super().merge_and_unload(progressbar, safe_merge, adapter_names))  # type: ignore[misc]

    def unload(self) -> nn.Module:
        """Take the adapters off, after LN tuning too."""
        return _unwrapped(super().unload())  # type: ignore[misc]

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge in place, but not while the gates and rates of another adapter are active."""
        for _, wrapper, held in [] if adapter_names is None else wrappers(self.model, adapter_names):
            if wrapper.active_adapters != held:
                raise ValueError(
                    f"adapter_names={adapter_names}: the active gates and rates are those of "
                    f"{wrapper.active_adapters}, and merging in place keeps them. Call set_adapter first."
                )
        super().merge_adapter(adapter_names, safe_merge)  # type: ignore[misc]

    def add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> None:
        """Sum adapters without gates and rates; if only one has some, PEFT would silently lose them."""
        held = sorted({name for _, _, names in wrappers(self.model, adapters) for name in names})
        if held:
            raise ValueError(
                f"adapters={adapters}: {', '.join(held)} hold gates and rates, which have no weighted sum. Sum "
                "adapters without them; merge_and_unload() first puts an adapter that has them into the model."
            )
        super().add_weighted_adapter(adapters, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        # The class has no name by which pickle could find it.
        return _new_tuner, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _with_rsa(tuner: type) -> type:
    return type(tuner.__name__, (_Tuner, tuner), {"__module__": __name__})


def _new_tuner(tuner: type) -> Any:
    return object.__new__(_with_rsa(tuner))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Replace the wrappers that LN tuning leaves behind with the RSA heads in them."""
    for name, wrapper, _ in list(wrappers(model)):
        heads = wrapper.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
        model.set_submodule(name, heads)
    return model


# --- the table ------------------------------------------------------------------------------------------------------

PEFT_MODEL = "peft.peft_model:PeftModel"
TUNER = "peft.tuners.tuners_utils:BaseTuner"
SWAP, NATIVE = "peft.utils.hotswap", "transformers.integrations.peft:PeftAdapterMixin"

HOOKS = (
    Hook("peft.config:PeftConfigMixin", "from_peft_type", _wrap_from_peft_type, "read an adapter's plan and its lock"),
    Hook(PEFT_MODEL, "save_pretrained", _wrap_save_pretrained, "save adapters with their plan and lock"),
    # PEFT and transformers both add adapters through it.
    Hook(TUNER, "inject_adapter", _wrap_inject_adapter, "check that base model and plan fit an adapter"),
    # Also if the adapter overwrites one that the model has.
    Hook(PEFT_MODEL, "load_adapter", _wrap_load_adapter, "check the tensors of an adapter"),
    Hook(SWAP, "hotswap_adapter_from_state_dict", _wrap_hotswap, "swap gates and rates too", False),
    # transformers' own function skips modules_to_save.
    Hook(NATIVE, "enable_adapters", _wrap_enable_adapters, "enable what disable_adapters has disabled", False),
)
