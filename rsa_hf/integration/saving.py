"""Hooks into saving: recurrence is never saved without its plan, and a patched model has a model card.

* `PreTrainedModel.save_pretrained`: what is saved can be loaded again, and gets a model card.
  A plain model that takes a patched one's place takes rsa_hf's part off the card that is there.
* `PushToHubMixin._upload_modified_files`: the model card survives the one that is made there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads, is_peft_wrapper
from rsa_hf.hub.card import CardFacts, clear_card, write_card
from rsa_hf.integration.attach import unplanned_modules
from rsa_hf.integration.peft.hooks import add_plan, saved_with_plan
from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.brief import shorten

__all__ = ["bring_card_up_to_date", "wrap_save_pretrained", "wrap_upload_modified_files"]

logger = logging.getLogger(__name__)


def wrap_save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to save heads without their plan; bring the model card up to date."""

    def save_pretrained(
        self: PreTrainedModel,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        has_heads = any(isinstance(module, RSAHeads) for module in self.modules())
        if not self._hf_peft_config_loaded and any(is_peft_wrapper(module) for module in self.modules()):
            raise ValueError(
                f"the RSA heads of this {type(self).__name__} are wrapped by PEFT, so a saved copy could not be "
                "loaded again. Save the PEFT model instead, or the model that its merge_and_unload() returns. After "
                "transformers' own delete_adapter, which leaves PEFT's layers in the model, load the base model again."
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
        unplanned = [] if self._hf_peft_config_loaded else unplanned_modules(self)
        if unplanned:
            raise ValueError(
                f"the RSA heads of this {type(self).__name__} are not those of its plan (config.rsa) in "
                f"{shorten(unplanned)}, so a saved copy could not be loaded again, or would differ. Were layers "
                "dropped, added or moved? Patch the model as it is now; what was trained is kept by state = "
                "model.state_dict(); patch_model(unpatch_model(model), config); model.load_state_dict(state)."
            )
        saved = _rsa_tensors(self, state_dict or {})  # now: transformers takes out what it has written
        is_first = is_main_process and _is_first_process()
        folders = [Path(save_directory)] if is_first else []
        with saved_with_plan(self, folders) if self._hf_peft_config_loaded else nullcontext():
            result = original(self, save_directory, is_main_process, state_dict, *args, **keywords)
        if is_first:
            with _holding(saved):
                bring_card_up_to_date(self, save_directory)
        return result

    return save_pretrained


def _rsa_tensors(model: PreTrainedModel, state: Mapping[str, Any]) -> list[tuple[RSAHeads, str, torch.Tensor]]:
    """Of the tensors to be saved those of RSA heads, with the heads and the parameter that they are of."""
    return [
        (module, key, tensor)
        for name, module in model.named_modules()
        if isinstance(module, RSAHeads)
        for key, _ in module.named_parameters(recurse=False)
        if isinstance(tensor := state.get(f"{name}.{key}"), torch.Tensor)
    ]


@contextmanager
def _holding(tensors: list[tuple[RSAHeads, str, torch.Tensor]]) -> Iterator[None]:
    """The heads with other values than their own: averaged ones, or those gathered from other processes."""
    own = [heads._parameters[key] for heads, key, _ in tensors]
    try:
        for heads, key, tensor in tensors:
            heads._parameters[key] = torch.nn.Parameter(tensor.detach(), requires_grad=False)
        yield
    finally:
        for (heads, key, _), parameter in zip(tensors, own, strict=True):
            heads._parameters[key] = parameter


def wrap_upload_modified_files(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bring the model card up to date before it is uploaded."""

    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **keywords: Any) -> Any:
        if isinstance(self, PreTrainedModel):
            if self._hf_peft_config_loaded:  # save_pretrained(push_to_hub=True) uploads before it returns
                add_plan(self, Path(working_dir))
            bring_card_up_to_date(self, working_dir, CardFacts(name=repo_id), plot=True)
        return original(self, working_dir, repo_id, *args, **keywords)

    return _upload_modified_files


def bring_card_up_to_date(
    model: PreTrainedModel, folder: Any, facts: CardFacts | None = None, plot: bool = False
) -> None:
    """Write the card of a patched model, clear that of a plain one; where that fails, warn."""
    try:
        if saved_plans(model.config):
            write_card(model, folder, facts, plot)
        elif not model._hf_peft_config_loaded:  # which saves an adapter alone, beside whatever is there
            clear_card(folder)
    except Exception as error:
        # The weights are saved, and hours of training are not to end because of a card.
        logger.warning("the model card in %s was not brought up to date: %s", folder, error)


def _is_first_process() -> bool:
    return not (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()
    )
