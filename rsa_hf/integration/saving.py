"""Saving: heads are saved only together with their plan, and a patched model gets a model card."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed
from torch.nn.utils.stateless import _reparametrize_module
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.children import heads_of, is_peft_wrapper
from rsa_hf.hub.card import clear_card, write_card
from rsa_hf.integration.peft.adapter_hooks import saved_with_plan
from rsa_hf.integration.peft.adapter_plan import add_plan
from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import SavedPlan, name_in_files, read_plan, saved_plans, with_parts
from rsa_hf.utils.text import shorten

logger = logging.getLogger(__name__)


def wrap_save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to save what could not be loaded again; after saving, bring the model card up to date."""

    def save_pretrained(
        self: PreTrainedModel,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        _require_heads_as_planned(self)
        # These may be averages, or gathered from other processes. Taken now, because saving empties the state dict.
        saved = {
            name: state_dict[name]
            for name, _ in self.named_parameters()
            if state_dict is not None and name in state_dict and ".rsa." in name
        }
        is_first = is_main_process and not (torch.distributed.is_initialized() and torch.distributed.get_rank())
        folders = [Path(save_directory)] if is_first else []
        with saved_with_plan(self, folders) if self._hf_peft_config_loaded else nullcontext():
            result = original(self, save_directory, is_main_process, state_dict, *args, **keywords)
        if is_first:
            with _reparametrize_module(self, saved):
                _update_card(self, save_directory, plot=False)
        return result

    return save_pretrained


def _require_heads_as_planned(model: PreTrainedModel) -> None:
    """Check that a saved copy can be loaded: the heads are those of `config.rsa`, and not wrapped by PEFT."""
    name = type(model).__name__
    has_adapter = model._hf_peft_config_loaded  # transformers then saves the adapter only
    if not has_adapter and any(is_peft_wrapper(module) for module in model.modules()):
        raise ValueError(
            f"the RSA heads of this {name} are wrapped by PEFT, so a saved copy could not be loaded again. Save the "
            "PEFT model instead, or the model that its merge_and_unload() returns. After transformers' own "
            "delete_adapter, which leaves PEFT's layers in the model, load the base model again."
        )
    has_heads = any(isinstance(module, RSAHeads) for module in model.modules())
    if has_heads and not saved_plans(model.config):
        raise ValueError(
            f"this {name} has RSA heads, but its config has no plan (config.rsa), so a saved copy could not be loaded "
            "again. Save the model that was given to patch_model, or patch this part itself."
        )
    if saved_plans(model.config) and not has_heads:
        raise ValueError(
            f"config.rsa of this {name} holds an RSA plan, but the model has no RSA heads. Patch the model, or give "
            "it a copy of its config without `rsa`: a patched model may share this one."
        )
    for part, plan in [] if has_adapter else _planned_parts(model):
        if not (mismatched := _mismatched_modules(part, plan)):
            continue
        of_layers = plan.config.heads is not None
        renumbered = ", with a config whose heads have the layers' new numbers" if of_layers else ""
        raise ValueError(
            f"the RSA heads of this {name} are not those of its plan (config.rsa) in {shorten(mismatched)}, so a "
            "saved copy could not be loaded again, or would differ. Were layers dropped, added or moved? Patch the "
            f"model as it is now{renumbered}; to keep what was trained: state = model.state_dict(); "
            "patch_model(unpatch_model(model), config); model.load_state_dict(state)."
        )


def _planned_parts(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, SavedPlan]]:
    """This model and the models in it whose config has a plan, each with its plan; only the first per config."""
    planned = {id(config): config for config in with_parts(model.config) if vars(config).get("rsa") is not None}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and planned.pop(id(part.config), None) is not None:
            yield part, read_plan(part.config.rsa)


def _mismatched_modules(model: PreTrainedModel, plan: SavedPlan) -> list[str]:
    """The modules whose heads are not those of the plan in the config, because layers were dropped or moved."""
    base = model.base_model
    named = ((name_in_files(name), heads_of(module)) for name, module in base.named_modules())
    found = {name: heads.spec for name, heads in named if heads is not None}
    # A name whose first part is missing belongs to a part of the model that this class does not have.
    planned = {name: spec for name, spec in plan.layers.items() if name.split(".")[0] in base._modules}
    return [name for name in {**planned, **found} if planned.get(name) != found.get(name)]


def wrap_upload_modified_files(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before an upload, write the card, which transformers has just overwritten, and add an adapter's plan."""

    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **keywords: Any) -> Any:
        if isinstance(self, PreTrainedModel):
            if self._hf_peft_config_loaded:  # save_pretrained(push_to_hub=True) uploads before it returns
                add_plan(self, Path(working_dir))
            _update_card(self, working_dir, name=repo_id)
        return original(self, working_dir, repo_id, *args, **keywords)

    return _upload_modified_files


def _update_card(model: PreTrainedModel, folder: Any, **facts: Any) -> None:
    try:
        if saved_plans(model.config):
            write_card(model, folder, **facts)
        else:
            clear_card(folder)
    except Exception as error:
        # The weights are saved: a run must not end because of a card.
        logger.warning("the model card in %s was not brought up to date: %s", folder, error)
