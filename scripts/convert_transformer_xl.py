"""Convert a checkpoint of the original Transformer-XL, or of NVIDIA's, to a folder that AutoModelForCausalLM loads.

    python scripts/convert_transformer_xl.py checkpoint_best.pt outputs/xl

Without --config the file has to contain the architecture, as NVIDIA's do. Both differ from the layout of transformers
4, which is ours:

* names: the model's parts are at the top level instead of below `transformer`; NVIDIA's softmax has lists of weights
  and biases instead of layers, and its tied projections a second time under another name;
* the softmax's entries for the bands but the first are reversed, the last band's first;
* a text begins without memory instead of zeros.

NVIDIA's `same_length` sees `mem_len` + 1 positions; the converted model sees `mem_len`, as the original does.
"""

import argparse
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLForCausalLM

RENAMED = (
    (re.compile(r"^(word_emb|layers|r_w_bias|r_r_bias|pos_emb)\b"), r"transformer.\1"),
    (re.compile(r"^crit\.out_layers_weights\.(\d+)$"), r"crit.out_layers.\1.weight"),
    (re.compile(r"^crit\.out_layers_biases\.(\d+)$"), r"crit.out_layers.\1.bias"),
)
# Computed, or the embedding's projections a second time.
LEFT_OUT = re.compile(r"^(transformer\.pos_emb\.inv_freq|crit\.shared_out_projs\.\d+)$")
RENAMED_FIELDS = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}
# Classes of NVIDIA's training script that its checkpoints hold beside the weights; they are not needed.
VOCABULARIES = ("utils.vocabulary.Vocab", "utils.vocabulary.OpenAIVocab", "vocabulary.Vocab", "data_utils.Vocab")


def convert_checkpoint(source: Path, output: Path, config: TransformerXLConfig | None = None) -> PreTrainedModel:
    """Convert a `.pt` file to a folder, and return the model.

    Args:
        source: a checkpoint of NVIDIA's training script (`model_config` and `model_state`), or a state dict in the
            original's layout. Code in it is never run.
        output: the folder to write.
        config: the architecture, for a file that does not contain it.

    Raises:
        ValueError: the file holds something else, or does not fill the model; nothing is written then.
    """
    content = read(source)
    if config is None:
        if "model_config" not in content:
            raise ValueError(
                f"{source} does not contain the architecture. Give it by --config; untie_r=false in the original."
            )
        named = {RENAMED_FIELDS.get(name, name): value for name, value in content["model_config"].items()}
        known = [name for name in (*TransformerXLConfig.__annotations__, "attn_type") if named.get(name) is not None]
        config = TransformerXLConfig(**{**{name: named[name] for name in known}, "untie_r": False})
    model = TransformerXLForCausalLM(config)
    state = to_our_layout(content.get("model_state", content))
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


def to_our_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converted = {}
    for key, value in state.items():
        for pattern, replacement in RENAMED:
            key = pattern.sub(replacement, key)
        if not LEFT_OUT.match(key):
            converted[key] = value.flip(0) if key in ("crit.cluster_weight", "crit.cluster_bias") else value
    return converted


def read(path: Path) -> Mapping[str, Any]:
    """Tensors, plain values and the settings of a training script; nothing that would run code."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *((Ignored, name) for name in VOCABULARIES)]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds Python objects, not only tensors and settings; a whole model, as the original saves it? "
            "Where it was trained, run torch.save(torch.load('model.pt').state_dict(), 'state.pt'), and convert that "
            f"with --config. ({error})"
        ) from error
    if isinstance(content, Mapping):
        return content
    raise ValueError(f"{path} holds a {type(content).__name__}; a state dict is needed.")


class Ignored:
    """Stands for an object that is not needed."""

    def __setstate__(self, state: Any) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a .pt file of NVIDIA's or the original Transformer-XL")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--config", type=Path, help="a config.json, for a file without the architecture")
    given = parser.parse_args()
    # Not from_pretrained, which takes a config without `zero_memory` for one of transformers 4.
    given_config = given.config and TransformerXLConfig(**json.loads(given.config.read_text(encoding="utf-8")))
    model = convert_checkpoint(given.source, given.output, given_config)
    print(f"written: {given.output} ({model.num_parameters():,} parameters)")
