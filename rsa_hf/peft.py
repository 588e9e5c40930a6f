"""PEFT adapters that hold gates and rates: with LoRA, with any other method, or alone.

    model = rsa_hf.peft.get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"), RSAConfig())
    model.save_pretrained("adapter")                 # PEFT's own method, as are load_adapter, push_to_hub, …
    model = rsa_hf.peft.load(base, "adapter")        # patches a plain base as the adapter says

RSA heads are in PEFT's `modules_to_save`: each adapter has its own copy of every gate and rate, in float32, and the
base model keeps its heads as `patch_model` made them. docs/peft.md says what follows from that.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.integration.peft.adapter_hooks import HUB_OPTIONS, install
from rsa_hf.integration.peft.adapter_plan import drop_base, has_rsa, plan_of, require_same_base
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
    """Patch a model and add an adapter that trains the gates and rates too.

    Args:
        model: any transformers model that `patch_model` takes, quantised or not.
        peft_config: the method to combine with RSA, e.g. a `LoraConfig`. It is not changed. None: an adapter of gates
            and rates alone, of a few kilobytes; for a classifier with a new head use `rsa_only_config` with its task.
        rsa_config: the RSA heads. None: the config that the model is patched with, or `RSAConfig()` for a plain model.
            With a config that names no heads, as `calibrate` may return, the adapter is that of `peft_config` alone.
        probe_inputs: see `patch_model`.
        **options: for `peft.get_peft_model`, e.g. `adapter_name`.

    Returns:
        The PEFT model; only the adapter and its gates and rates require gradients.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: see `patch_model`; or the method has no `modules_to_save`; or there is neither a method nor an RSA
            head. After any error the model is unchanged.
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
    if not is_patched(model):  # the config names no heads
        if peft_config is None:
            raise ValueError(
                "rsa_config names no heads, so an adapter of gates and rates alone would hold nothing. Give a plan "
                "with heads, or a method of PEFT."
            )
        config = peft_config
    with _restored_on_error(model, was_patched):
        return peft.get_peft_model(model, config, **options)


def with_rsa(peft_config: peft.PeftConfig) -> peft.PeftConfig:
    """Copy a PEFT config for an adapter that trains and saves the gates and rates too.

    Use it with everything that takes a config: `model.add_adapter(name, config)`, trainers with a `peft_config`.

    Raises:
        ValueError: the method has no `modules_to_save`.
    """
    if not hasattr(peft_config, "modules_to_save"):
        raise ValueError(
            f"{type(peft_config).__name__} has no modules_to_save, so its adapters cannot hold gates and rates. Use "
            "another method, such as LoraConfig, or None for an adapter of gates and rates alone."
        )
    config = copy.deepcopy(peft_config)
    if not has_rsa(config):
        config.modules_to_save = [*(config.modules_to_save or ()), "rsa"]
    return config


def rsa_only_config(task_type: str | None = None) -> peft.LoraConfig:
    """Make the config of an adapter of gates and rates alone: LoRA on no module (PEFT's dummy target).

    Args:
        task_type: as in `peft.TaskType`. PEFT also trains the new head of a classification task.
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
    """Load an adapter with RSA heads, and patch the base model as the adapter says.

    Args:
        model: the base model that the adapter was trained on, plain or patched with the same plan. It is recognised
            by its type, sizes and weights, so it may have been moved or renamed.
        adapter: folder of the adapter, or its name on the Hub.
        is_trainable: whether to go on training it.
        check_base_name: False also accepts a base model of the same type and sizes with other weights.
        probe_inputs: see `patch_model`.
        **options: for `PeftModel.from_pretrained`, e.g. `adapter_name`, `revision`.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: a different base model or plan; an adapter without a plan, or with tensors that do not fit its
            plan. After any error the model is unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"rsa_hf.peft.load takes a transformers PreTrainedModel, got {type(model).__name__}. On a PEFT model use "
            "model.load_adapter(adapter, adapter_name)."
        )
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    config = peft.PeftConfig.from_pretrained(os.fspath(adapter), **hub)
    plan = plan_of(config)
    if plan is None:
        raise ValueError(
            f"{adapter} does not say which RSA heads it is for: it is an adapter without any, or was saved without "
            "rsa_hf. Call patch_model with the plan it was trained with, then PeftModel.from_pretrained."
        )
    require_same_base(plan.base if check_base_name else {**plan.base, "weights": {}}, model)
    if not check_base_name:
        drop_base(config)
    was_patched = is_patched(model)
    if not was_patched:
        if not has_rsa(config):
            raise ValueError(
                f"{adapter} was trained on a patched model and holds no gates and rates itself. Load that model "
                f"({plan.base.get('name') or 'it has no name'}) and give it here."
            )
        patch_model(model, plan.saved.config, probe_inputs=probe_inputs)
    options |= {"is_trainable": is_trainable, "config": config}
    with _restored_on_error(model, was_patched):
        return peft.PeftModel.from_pretrained(model, os.fspath(adapter), **options)


@contextmanager
def _restored_on_error(model: PreTrainedModel, was_patched: bool) -> Iterator[None]:
    """After an error, remove PEFT's layers from the model again, and its RSA heads if it was plain.

    PEFT replaces one module after the other, and may fail at any of them.
    """
    children = [(parent, *item) for parent in model.modules() for item in parent._modules.items()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    config = dict(vars(model.config))  # layer_replication changes the number of layers
    had_adapters = hasattr(model, "peft_config")
    try:
        yield
    except BaseException:
        for parent, name, child in children:
            parent.add_module(name, child)
        for parameter, was_trained in trained:
            parameter.requires_grad_(was_trained)
        vars(model.config).update(config)
        if hasattr(model, "peft_config") and not had_adapters:
            del model.peft_config
        if not was_patched:
            unpatch_model(model)
        raise
