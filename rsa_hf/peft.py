"""PEFT beside RSA: LoRA, or any other method, and the gates and rates in one adapter; or an adapter of these alone.

    model = rsa_hf.peft.get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"), RSAConfig())
    model.save_pretrained("adapter")                 # PEFT's own, as are load_adapter, set_adapter, push_to_hub, …
    model = rsa_hf.peft.load(base, "adapter")        # patches a plain base as the adapter says

RSA heads ride on PEFT's `modules_to_save`: each adapter has its own copy of every gate and rate, in float32, and the
base model keeps the heads as they were patched. So

* `disable_adapter()` gives the base model *as patched*, with its gates where they began, not the plain model. For the
  plain one take everything off: `unpatch_model(model.unload())`.
* `merge_and_unload()` gives an ordinary patched model with the trained gates and rates: save and load it as any other.
* Adapters on one model share its plan; a batch for several adapters at once (`adapter_names=`) is refused by PEFT.

An adapter folder is in PEFT's format: adapter_config.json (with the plan, see adapter_plan.py) and
adapter_model.safetensors. `PeftModel.from_pretrained` and `model.load_adapter` load it on a base that is patched with
the same plan, and raise on any other; without `import rsa_hf` PEFT refuses the folder.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.integration.peft.adapter_plan import AdapterPlan, require_same_base
from rsa_hf.integration.peft.hooks import HUB_OPTIONS, holds_values, install
from rsa_hf.patching import is_patched, patch_model, unpatch_model

__all__ = ["get_peft_model", "load", "rsa_only_config", "with_rsa"]

install()


def get_peft_model(
    model: PreTrainedModel,
    peft_config: peft.PeftConfig | None = None,
    rsa_config: RSAConfig | Mapping[str, Any] | None = None,
    *,
    probe_inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> peft.PeftModel:
    """Patch a model and put an adapter on it that trains the gates and rates too.

    Args:
        model: any transformers model that `patch_model` takes; quantised ones too.
        peft_config: the method beside RSA, e.g. a `LoraConfig`; it is not changed. None: an adapter of gates and rates
            alone, a few kilobytes.
        rsa_config: the plan. None: the one that the model is patched with already, else `RSAConfig()`.
        probe_inputs: see `patch_model`.
        **options: for `peft.get_peft_model`, e.g. `adapter_name`.

    Returns:
        The PEFT model; only the adapter and its gates and rates require gradients.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, such as a PEFT model.
        ValueError: see `patch_model`; or the method has no `modules_to_save`. The model is then as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"rsa_hf.peft.get_peft_model takes a transformers PreTrainedModel, got {type(model).__name__}. For "
            "another adapter on a PEFT model use model.add_adapter(name, rsa_hf.peft.with_rsa(peft_config))."
        )
    config = rsa_only_config() if peft_config is None else with_rsa(peft_config)
    was_patched = is_patched(model)
    if rsa_config is not None or not was_patched:
        patch_model(model, rsa_config, probe_inputs=probe_inputs)
    with _or_as_it_was(model, was_patched):
        return peft.get_peft_model(model, config, **options)


def with_rsa(peft_config: peft.PeftConfig) -> peft.PeftConfig:
    """A copy of a PEFT config whose adapter trains and saves the gates and rates too.

    For everything that takes a config: `model.add_adapter(name, config)`, trainers with a `peft_config` argument.

    Raises:
        ValueError: the method has no `modules_to_save`.
    """
    if not hasattr(peft_config, "modules_to_save"):
        raise ValueError(
            f"{type(peft_config).__name__} has no modules_to_save, so its adapters cannot hold gates and rates. Use "
            "another method, such as LoraConfig, or None for an adapter of gates and rates alone."
        )
    config = copy.deepcopy(peft_config)
    if not holds_values(config):
        config.modules_to_save = [*(config.modules_to_save or ()), "rsa"]
    return config


def rsa_only_config(task_type: str | None = None) -> peft.LoraConfig:
    """The config of an adapter that holds gates and rates alone, and with a task its new head, as PEFT does.

    PEFT has no method without a layer of its own, so this is LoRA on PEFT's name for no module at all: such an adapter
    loads with every PEFT, and can be saved, switched and merged like another.

    Args:
        task_type: as in `peft.TaskType`.
    """
    return peft.LoraConfig(task_type=task_type, target_modules=DUMMY_TARGET_MODULES, modules_to_save=["rsa"])


def load(
    model: PreTrainedModel,
    adapter: str | os.PathLike[str],
    *,
    is_trainable: bool = False,
    check_base_name: bool = True,
    probe_inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> peft.PeftModel:
    """Load an adapter with RSA heads, patching the base model as the adapter says.

    Args:
        model: the base model that the adapter was trained on, plain or patched with the same plan.
        adapter: folder of the adapter, or its name on the Hub.
        is_trainable: whether to go on training it.
        check_base_name: False accepts the base model under another name, e.g. a copy in another folder; its type and
            sizes must be the same.
        probe_inputs: see `patch_model`.
        **options: for `PeftModel.from_pretrained`, e.g. `adapter_name`, `revision`.

    Returns:
        The PEFT model.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, such as a PEFT model: `model.load_adapter(adapter, name)` adds one.
        ValueError: another base model or plan, or an adapter without a plan or whose tensors do not fit it. The model
            is then as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"rsa_hf.peft.load takes a transformers PreTrainedModel, got {type(model).__name__}. On a PEFT model use "
            "model.load_adapter(adapter, adapter_name)."
        )
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    config = peft.PeftConfig.from_pretrained(os.fspath(adapter), **hub)
    plan: AdapterPlan | None = vars(config).get("rsa")
    if plan is None:
        raise ValueError(
            f"{adapter} does not say which RSA heads it is for: it is an adapter without any, or was saved without "
            "rsa_hf. Call patch_model with the plan it was trained with, then PeftModel.from_pretrained."
        )
    if not check_base_name:
        plan = config.rsa = plan.without_name()
    require_same_base(plan, model)
    was_patched = is_patched(model)
    if not was_patched:
        if not holds_values(config):
            raise ValueError(
                f"{adapter} was trained on a patched model and holds no gates and rates itself. Load that model "
                f"({plan.base_name or 'it has no name'}) and give it here."
            )
        patch_model(model, plan.plan.config, probe_inputs=probe_inputs)
    with _or_as_it_was(model, was_patched):
        return peft.PeftModel.from_pretrained(
            model, os.fspath(adapter), is_trainable=is_trainable, config=config, **options
        )


@contextmanager
def _or_as_it_was(model: PreTrainedModel, was_patched: bool) -> Iterator[None]:
    """After an error give the model back its modules, what of it is trained, and its patching.

    PEFT puts its layers in one after the other, and may find only then that it cannot.
    """
    children = [(module, dict(module._modules)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    peft_config = vars(model).get("peft_config")
    try:
        yield
    except BaseException:
        for module, before in children:
            module._modules.clear()
            module._modules.update(before)
        for parameter, was_trained in trained:
            parameter.requires_grad_(was_trained)
        if peft_config is None:
            vars(model).pop("peft_config", None)
        if not was_patched:
            unpatch_model(model)
        raise
