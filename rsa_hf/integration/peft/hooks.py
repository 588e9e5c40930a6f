"""Every touch on PEFT's internals: no adapter loses RSA heads in silence. Put in place when `peft` is imported.

An adapter that is saved from a patched model carries the plan and what tells its base model (adapter_plan.py) as
`rsa` in adapter_config.json; the gates and rates themselves lie beside the adapter's other tensors, as PEFT keeps any
module of `modules_to_save`. What the hooks do:

* `PeftConfig.save_pretrained`, `from_json_file`, `from_peft_type`: write and read the plan, and a lock that keeps a
  PEFT without `rsa_hf` from loading such an adapter as if it had no RSA heads.
* `PeftModel.save_pretrained`, `PreTrainedModel.save_pretrained`: hand the plan to the config, and save nothing that
  was trained but is not in the adapter.
* `PeftModel.from_pretrained`, `load_adapter` and `PreTrainedModel.load_adapter`: before anything is changed, check
  that base model, plan and tensors fit; `BaseTuner.inject_adapter`, `PeftModel.add_adapter` and
  `set_peft_model_state_dict` check what comes another way.
* `hotswap_adapter_from_state_dict`: swaps gates and rates too.
* `LoraModel.add_weighted_adapter`, `IA3Model.add_weighted_adapter`: gates and rates have no weighted sum.
* `BaseTuner.merge_adapter`: merges no adapter in place beside the gates and rates of another one.
* `BaseTuner._unload_and_optionally_merge`, and those of methods with their own: the adapters that are named give the
  gates and rates too, and no method leaves heads in PEFT's wrappers.
* `BaseTuner._replace_module`: methods other than LoRA can be merged, though RSA heads have no `weight`.
* `PreTrainedModel.enable_adapters`: transformers disables wrapped modules, but enables only LoRA layers again.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads, is_peft_wrapper
from rsa_hf.integration.hooks import ADVICE, Hook, install_hooks
from rsa_hf.integration.peft.adapter_plan import (
    AdapterPlan,
    describe,
    read_adapter_plan,
    require_fit,
    require_tensors,
    rsa_children,
)
from rsa_hf.saved_plan import RSA_KEY

__all__ = ["HUB_OPTIONS", "holds_values", "install"]

logger = logging.getLogger(__name__)

PEFT_RANGE = "0.19.1"  # tested with this one and the newest

# What a PEFT without rsa_hf prints when it meets the lock, so it has to tell what to do.
LOCK = "rsa_hf (this adapter has RSA heads: pip install rsa_hf, then import rsa_hf before loading it)"

# Those of huggingface_hub.hf_hub_download that both adapter_config.json and the tensors are fetched with.
HUB_OPTIONS = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download")

_installed = False


def install() -> None:
    """Put the hooks in place; does nothing where they are.

    Raises:
        ImportError: one of PEFT's internals is not as expected.
    """
    global _installed
    if _installed:
        return
    import peft

    fits = f"rsa_hf works with peft ≥ {PEFT_RANGE}; installed is {peft.__version__}."
    try:
        hooks = _hooks()
    except ImportError as error:
        raise ImportError(f"{fits} Something that rsa_hf needs is not there: {error}. {ADVICE}") from error
    install_hooks(hooks, fits)
    _installed = True


# --- adapter_config.json --------------------------------------------------------------------------------------------


def _wrap_config_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, save_directory: Any, **keywords: Any) -> None:
        adapter: AdapterPlan | None = vars(self).get("rsa")
        if adapter is None or os.path.isfile(save_directory):
            original(self, save_directory, **keywords)
            return
        os.makedirs(save_directory, exist_ok=True)
        # Written beside and renamed: at no moment is there an adapter_config.json without its lock.
        with tempfile.TemporaryDirectory(dir=save_directory) as beside:
            original(self, beside, **keywords)
            file = Path(beside, "adapter_config.json")
            content = json.loads(file.read_text(encoding="utf-8"))
            content["rsa"] = {**adapter.to_dict(), "task_type": content.get("task_type")}
            content["task_type"] = LOCK
            file.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
            os.replace(file, Path(save_directory, file.name))

    return save_pretrained


def _wrap_from_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_json_file(cls: Any, path_json_file: Any, **keywords: Any) -> Any:
        content = original(cls, path_json_file, **keywords)
        if isinstance(content, dict) and isinstance(content.get("rsa"), dict):
            content["rsa"] = dict(content["rsa"])
            content["task_type"] = content["rsa"].pop("task_type", None)
        return content

    return from_json_file


def _wrap_from_peft_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_peft_type(cls: Any, **kwargs: Any) -> Any:
        content = kwargs.pop("rsa", None)
        adapter = None if content is None else read_adapter_plan(content)
        config = original(cls, **kwargs)
        if adapter is not None:
            config.rsa = adapter
        return config

    return from_peft_type


def holds_values(config: Any) -> bool:
    """Whether an adapter brings its own gates and rates."""
    return any(name.split(".")[-1] == "rsa" for name in getattr(config, "modules_to_save", None) or ())


# --- saving ---------------------------------------------------------------------------------------------------------


def _wrap_model_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **keywords: Any) -> Any:
        with _plan_in(self.peft_config.values(), _base(self)):
            return original(self, *args, **keywords)

    return save_pretrained


def _wrap_transformers_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **keywords: Any) -> Any:
        if not self._hf_peft_config_loaded:
            return original(self, *args, **keywords)
        with _plan_in(self.peft_config.values(), self):
            return original(self, *args, **keywords)

    return save_pretrained


@contextmanager
def _plan_in(configs: Iterable[Any], base: nn.Module) -> Iterator[None]:
    """Give the configs of a model's adapters its plan while they are saved."""
    adapter = describe(base)
    lost = [name for name, child in rsa_children(base) if isinstance(child, RSAHeads) and _is_trained(child)]
    if lost:
        raise ValueError(
            f"the RSA heads of this {type(base).__name__} ({lost[0]}, …) are trained, but no adapter holds them, so "
            "they would be lost in silence. Add the adapter with rsa_hf.peft.get_peft_model, or with "
            "modules_to_save=['rsa'] in its config; or freeze them."
        )
    configs = list(configs)
    before = [vars(config).get("rsa") for config in configs]
    try:
        for config in configs:
            config.rsa = adapter
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.rsa = value


def _is_trained(heads: RSAHeads) -> bool:
    return any(parameter.requires_grad for parameter in heads.parameters())


# --- loading --------------------------------------------------------------------------------------------------------


def _base(model: Any) -> nn.Module:
    """The model inside a PeftModel; any other model as it is."""
    if not hasattr(type(model), "get_base_model"):
        return model  # type: ignore[no-any-return]
    base: nn.Module = model.base_model if getattr(model, "_is_prompt_learning", False) else model.base_model.model
    return base


def _prefix(config: Any) -> str:
    return "base_model." if config.is_prompt_learning else "base_model.model."


def _require_adapter_fits(
    base: nn.Module,
    folder: Any,
    options: Mapping[str, Any],
    *,
    config: Any = None,
    tensors: Any = None,
    is_new: bool = True,
) -> None:
    """Check an adapter against a model before either is touched.

    Args:
        base: the model without PEFT's wrapper.
        folder: where the adapter is, in the file system or on the Hub.
        options: keyword arguments, those for the Hub among them.
        config: the adapter's config, where it is known already.
        tensors: the adapter's tensors, where they are known already.
        is_new: whether the name of its base model matters: not so for one that goes over an adapter of this model.
    """
    from peft import PeftConfig, load_peft_weights

    hub = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
    if config is None:
        config = PeftConfig.from_pretrained(folder, **hub)
    adapter: AdapterPlan | None = vars(config).get("rsa")
    if adapter is None and not holds_values(config) and not any(rsa_children(base)):
        return
    if adapter is not None and not is_new:
        adapter = adapter.without_name()
    require_fit(adapter, holds_values(config), base)
    if tensors is None:
        try:
            tensors = load_peft_weights(folder, device="cpu", **hub)
        except SafetensorError as error:
            raise ValueError(
                f"the tensors of the adapter in {folder} are no sound safetensors file ({error}). Get them again, or "
                "save the adapter again."
            ) from error
    require_tensors(tensors, _prefix(config), holds_values(config), base)


def _wrap_from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(
        cls: Any,
        model: Any,
        model_id: Any,
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _require_adapter_fits(_base(model), model_id, kwargs, config=config)
        return original(cls, model, model_id, adapter_name, is_trainable, config, *args, **kwargs)

    return from_pretrained


def _wrap_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        _require_adapter_fits(_base(self), model_id, kwargs, is_new=adapter_name not in self.peft_config)
        return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _wrap_transformers_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        load_config = given.get("load_config")
        options = {
            **(getattr(load_config, "download_kwargs", None) or {}),
            **(given.get("adapter_kwargs") or {}),
            **kwargs,
        }
        folder = given.get("peft_model_id") or getattr(load_config, "pretrained_model_name_or_path", None)
        config, tensors = given.get("peft_config"), given.get("adapter_state_dict")
        if folder is not None or (
            config is not None and tensors is not None
        ):  # else the original says what is missing
            _require_adapter_fits(self, folder, options, config=config, tensors=tensors)
        return original(self, *args, **kwargs)

    return load_adapter


def _holding(adapter_name: str, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers round RSA heads that have a copy for an adapter, with their names."""
    for name, child in rsa_children(model):
        if is_peft_wrapper(child) and adapter_name in child.modules_to_save:  # type: ignore[operator]
            yield name, child


def _holders(adapter_names: Iterable[str], model: nn.Module) -> list[str]:
    """Those of the adapters that have gates and rates of their own."""
    return [name for name in adapter_names if any(_holding(name, model))]


def _wrap_inject_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        require_fit(vars(config).get("rsa"), holds_values(config), model)
        original(self, model, adapter_name, *args, **kwargs)
        if adapter_name in self.active_adapters:
            # PEFT activates it in its own layers; heads wrapped for another adapter would give the base's gates.
            for _, child in _holding(adapter_name, model):
                child.set_adapter(adapter_name, inference_mode=config.inference_mode)

    return inject_adapter


def _wrap_add_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_adapter(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        if peft_config.is_prompt_learning:  # the others come to inject_adapter
            require_fit(vars(peft_config).get("rsa"), holds_values(peft_config), self.base_model)
        return original(self, adapter_name, peft_config, *args, **kwargs)

    return add_adapter


def _wrap_set_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_peft_model_state_dict(
        model: Any, peft_model_state_dict: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> Any:
        config = model.peft_config[adapter_name]
        require_tensors(peft_model_state_dict, _prefix(config), holds_values(config), _base(model))
        return original(model, peft_model_state_dict, adapter_name, *args, **kwargs)

    return set_peft_model_state_dict


def _wrap_hotswap(original: Callable[..., Any]) -> Callable[..., Any]:
    def hotswap_adapter_from_state_dict(
        model: Any, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        base, present = _base(model), model.peft_config[adapter_name]
        adapter: AdapterPlan | None = vars(config).get("rsa")
        require_fit(adapter and adapter.without_name(), holds_values(config), base)
        require_tensors(state_dict, _prefix(config), holds_values(present), base)
        others = {key: tensor for key, tensor in state_dict.items() if not RSA_KEY.search(key)}
        original(model, others, adapter_name, config, *args, **kwargs)
        with torch.no_grad():
            for name, child in _holding(adapter_name, base):
                for parameter, value in child.modules_to_save[adapter_name].named_parameters():
                    value.copy_(state_dict[f"{_prefix(config)}{name}.{parameter}"])

    return hotswap_adapter_from_state_dict


def _wrap_add_weighted_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_weighted_adapter(self: Any, adapters: list[str], *args: Any, **kwargs: Any) -> None:
        # Where two of them hold the same module PEFT refuses too; of one it would start a new copy, or make none.
        held = _holders(adapters, self.model)
        if held:
            raise ValueError(
                f"the adapters {', '.join(held)} hold gates and rates, which the sum of adapters would lose in "
                "silence. Sum adapters without them: merge_and_unload() puts one that has them into the model first."
            )
        original(self, adapters, *args, **kwargs)

    return add_weighted_adapter


def _wrap_merge_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge_adapter(self: Any, adapter_names: list[str] | None = None, *args: Any, **kwargs: Any) -> None:
        if adapter_names is not None:
            held = _holders(adapter_names, self.model)
            wrapped = (child for _, child in rsa_children(self.model) if is_peft_wrapper(child))
            if any(child.active_adapters != held for child in wrapped):
                raise ValueError(
                    f"merged in place, {', '.join(adapter_names)} would stand beside the gates and rates that are "
                    "active, which are not theirs. Call set_adapter first, then merge_adapter()."
                )
        original(self, adapter_names, *args, **kwargs)

    return merge_adapter


def _wrap_unload(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def unload(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = signature.bind(self, *args, **kwargs).arguments.get("adapter_names")
        if names is not None:
            held = _holders(names, self.model)
            if len(held) > 1:
                raise ValueError(
                    f"the adapters {', '.join(held)} each have gates and rates of their own: only one can be merged."
                )
            for _, child in rsa_children(self.model):
                if is_peft_wrapper(child):
                    child.set_adapter(held)  # type: ignore[operator]  # PEFT takes the heads that are active
        unloaded = original(self, *args, **kwargs)
        for module in list(unloaded.modules()):
            child = module._modules.get("rsa")
            if child is not None and is_peft_wrapper(child):  # LN tuning unloads its own layers alone
                heads = child.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
                module.add_module("rsa", heads)
        return unloaded

    return unload


def _wrap_replace_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def _replace_module(self: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: Any) -> None:
        if isinstance(new_module, RSAHeads):
            parent.add_module(child_name, new_module)
            return
        original(self, parent, child_name, new_module, child)

    return _replace_module


def _wrap_enable_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    def enable_adapters(self: Any) -> None:
        original(self)
        for _, child in rsa_children(self):
            if is_peft_wrapper(child):
                child.enable_adapters(True)  # type: ignore[operator]

    return enable_adapters


def _hook(owner: Any, name: str, parameters: tuple[str, ...], wrap: Callable[..., Any]) -> Hook:
    place = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}:{owner.__qualname__}"
    return Hook(place, name, parameters, wrap, "", "adapters with RSA heads cannot be saved or loaded")


def _hooks() -> list[Hook]:
    from peft import PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.ia3 import IA3Model
    from peft.tuners.ln_tuning import LNTuningModel
    from peft.tuners.lora import LoraModel
    from peft.tuners.mixed import MixedModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils import hotswap, save_and_load
    from transformers.integrations.peft import PeftAdapterMixin

    # A function is known by its name in every module that imported it.
    name = "set_peft_model_state_dict"
    function = getattr(save_and_load, name, None)
    loaded = [module for key, module in sys.modules.items() if key.split(".")[0] == "peft"]
    holders = [module for module in loaded if vars(module).get(name, ...) is function] or [save_and_load]
    parameters = ("model", "peft_model_state_dict", "adapter_name")
    return [
        _hook(PeftConfigMixin, "save_pretrained", ("self", "save_directory"), _wrap_config_save),
        _hook(PeftConfigMixin, "from_json_file", ("cls", "path_json_file"), _wrap_from_json_file),
        _hook(PeftConfigMixin, "from_peft_type", ("cls", "kwargs"), _wrap_from_peft_type),
        _hook(PeftModel, "save_pretrained", ("self", "save_directory"), _wrap_model_save),
        _hook(
            PeftModel,
            "from_pretrained",
            ("cls", "model", "model_id", "adapter_name", "is_trainable", "config"),
            _wrap_from_pretrained,
        ),
        _hook(PeftModel, "load_adapter", ("self", "model_id", "adapter_name"), _wrap_load_adapter),
        _hook(PeftModel, "add_adapter", ("self", "adapter_name", "peft_config"), _wrap_add_adapter),
        _hook(BaseTuner, "inject_adapter", ("self", "model", "adapter_name"), _wrap_inject_adapter),
        *(
            _hook(tuner, "add_weighted_adapter", ("self", "adapters"), _wrap_add_weighted_adapter)
            for tuner in (LoraModel, IA3Model)
        ),
        _hook(BaseTuner, "merge_adapter", ("self", "adapter_names", "safe_merge"), _wrap_merge_adapter),
        *(
            _hook(tuner, "_unload_and_optionally_merge", ("self", "merge", "adapter_names"), _wrap_unload)
            for tuner in (BaseTuner, LNTuningModel, MixedModel)
        ),
        _hook(
            BaseTuner, "_replace_module", ("self", "parent", "child_name", "new_module", "child"), _wrap_replace_module
        ),
        *(_hook(module, name, parameters, _wrap_set_state_dict) for module in holders),
        _hook(
            hotswap,
            "hotswap_adapter_from_state_dict",
            ("model", "state_dict", "adapter_name", "config"),
            _wrap_hotswap,
        ),
        _hook(PreTrainedModel, "save_pretrained", ("self", "save_directory"), _wrap_transformers_save),
        _hook(
            PeftAdapterMixin,
            "load_adapter",
            ("self", "peft_model_id", "adapter_name", "peft_config", "adapter_state_dict"),
            _wrap_transformers_load_adapter,
        ),
        _hook(PeftAdapterMixin, "enable_adapters", ("self",), _wrap_enable_adapters),
    ]
