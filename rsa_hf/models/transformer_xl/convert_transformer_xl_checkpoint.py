"""Convert checkpoints of the original Transformer-XL, and of NVIDIA's, which descends from it.

They differ from the layout of transformers 4, which is ours:

* names: the model's parts are at the top level instead of below `transformer`; NVIDIA's softmax has lists of weights
  and biases instead of layers, and its tied projections a second time under another name;
* the softmax's entries for the bands but the first are reversed, the last band's first;
* a text begins without memory instead of zeros.

NVIDIA's `same_length` sees `mem_len` + 1 positions; the converted model sees `mem_len`, as the original does.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsa_hf.models.transformer_xl.configuration_transformer_xl import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling_transformer_xl import TransformerXLForCausalLM

__all__ = ["convert_checkpoint"]

_RENAMED = (
    (re.compile(r"^(word_emb|layers|r_w_bias|r_r_bias|pos_emb)\b"), r"transformer.\1"),
    (re.compile(r"^crit\.out_layers_weights\.(\d+)$"), r"crit.out_layers.\1.weight"),
    (re.compile(r"^crit\.out_layers_biases\.(\d+)$"), r"crit.out_layers.\1.bias"),
)
# Computed, or the embedding's projections a second time.
_LEFT_OUT = re.compile(r"^(transformer\.pos_emb\.inv_freq|crit\.shared_out_projs\.\d+)$")
_RENAMED_FIELDS = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}
# Classes of NVIDIA's training script that its checkpoints hold beside the weights; they are not needed.
_VOCABULARIES = ("utils.vocabulary.Vocab", "utils.vocabulary.OpenAIVocab", "vocabulary.Vocab", "data_utils.Vocab")


def convert_checkpoint(
    source: str | Path, output: str | Path, config: TransformerXLConfig | None = None
) -> TransformerXLForCausalLM:
    """Convert a `.pt` file to a folder that `AutoModelForCausalLM.from_pretrained` loads, and return the model.

    Args:
        source: a checkpoint of NVIDIA's training script (`model_config` and `model_state`), or a state dict in the
            original's layout. Code in it is never run.
        output: the folder to write.
        config: the architecture, for a file that does not contain it.

    Raises:
        ValueError: the file holds something else, or does not fill the model; nothing is written then.
    """
    content = _read(Path(source))
    if config is None:
        if "model_config" not in content:
            raise ValueError(
                f"{source} does not contain the architecture. Give convert_checkpoint(..., "
                "config=TransformerXLConfig(…)) as it was trained, untie_r=False in the original."
            )
        config = _read_config(content["model_config"])
    model = TransformerXLForCausalLM(config)
    state = _to_our_layout(content.get("model_state", content))
    for target, origin in model.all_tied_weights_keys.items():
        # A file holds a tied parameter once or twice.
        if origin in state and not torch.equal(state.setdefault(target, state[origin]), state[origin]):
            raise ValueError(f"the config ties {target} to {origin}, but {source} has different values for them.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{source} does not have this layout or architecture. {error}") from error
    model.save_pretrained(output)
    return model


def _to_our_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converted = {}
    for key, value in state.items():
        for pattern, replacement in _RENAMED:
            key = pattern.sub(replacement, key)
        if not _LEFT_OUT.match(key):
            converted[key] = value.flip(0) if key in ("crit.cluster_weight", "crit.cluster_bias") else value
    return converted


def _read(path: Path) -> Mapping[str, Any]:
    """Tensors, plain values and the settings of a training script; nothing that would run code."""
    ignored = [(_Ignored, name) for name in _VOCABULARIES]
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *ignored]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds Python objects, not only tensors and settings; a whole model, as the original saves it? "
            "Where it was trained, run torch.save(torch.load('model.pt').state_dict(), 'state.pt'), and convert that "
            f"with config=…. ({error})"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; a state dict is needed.")
    return content


class _Ignored:
    """In place of an object that is not needed."""

    def __setstate__(self, state: Any) -> None:
        pass


def _read_config(fields: Mapping[str, Any]) -> TransformerXLConfig:
    named = {_RENAMED_FIELDS.get(name, name): value for name, value in fields.items() if value is not None}
    known = {name: named[name] for name in (*TransformerXLConfig.__annotations__, "attn_type") if name in named}
    return TransformerXLConfig(**{**known, "untie_r": False, "zero_memory": False})
