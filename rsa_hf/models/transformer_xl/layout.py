"""Checkpoints fill a model completely, or are refused."""

from __future__ import annotations

from transformers.modeling_utils import PreTrainedModel

from rsa_hf.utils.brief import shorten

__all__ = ["require_layout"]

HEADS = ("crit", "score")  # of the language model and of the classifier; a checkpoint may be of another class


def require_layout(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
    """Refuse a checkpoint that lacks parameters of the model, or has others.

    What may differ is a whole head: a fresh one where the checkpoint has none, or one that the class does not have.

    Args:
        model: as loaded.
        missing: keys of the model that the checkpoint did not have.
        unexpected: keys of the checkpoint that the model does not have.

    Raises:
        ValueError: anything else differs.
    """
    own = set(model.state_dict()) - set(model.all_tied_weights_keys)
    for head in HEADS:
        keys = {key for key in own if key.startswith(f"{head}.")}
        if not keys:
            unexpected = {key for key in unexpected if not key.startswith(f"{head}.")}
        elif keys <= missing:
            missing = missing - keys
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not have the layout of {type(model).__name__}: missing are "
            f"{shorten(sorted(missing)) or 'none'}; unexpected are {shorten(sorted(unexpected)) or 'none'}. Files of "
            "the original implementation or of NVIDIA's are converted with "
            "rsa_hf.models.transformer_xl.conversion.convert_checkpoint. Nothing was loaded."
        )
