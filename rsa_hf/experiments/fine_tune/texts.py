"""Language modelling: WikiText-2, and the functions of Devign as C source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerBase

from rsa_hf.experiments.fine_tune.defects import read_devign
from rsa_hf.experiments.fine_tune.learning import Task
from rsa_hf.experiments.runner.data import data_file
from rsa_hf.tasks.language_modeling import (
    LanguageModelingDataConfig,
    evaluate_language_model,
    prepare_language_modeling,
)
from rsa_hf.tasks.text_data import line_boundary, read_texts

__all__ = ["portion", "text_task"]

WIKITEXT_FILES = {"train": "train", "validation": "valid", "test": "test"}
SCORED_AT_ONCE = 4096  # tokens; a large vocabulary's logits take much memory


@lru_cache(maxsize=1)
def read_splits(name: str) -> dict[str, bytes]:
    """The whole text of each split.

    Raises:
        FileNotFoundError: the data is not there.
        ValueError: there is no such text.
    """
    if name not in ("c", "wikitext-2"):
        raise ValueError(f"task={name!r}: c or wikitext-2 is needed, or devign.")
    if name == "c":
        return {
            split: "\n\n".join(example.func for example in examples).encode()
            for split, examples in read_devign().items()
        }
    files = {split: str(data_file(f"wikitext-2/{file}.txt.xz")) for split, file in WIKITEXT_FILES.items()}
    return read_texts(LanguageModelingDataConfig(source="files", files=files))


def portion(text: bytes, share: float, seed: int) -> bytes:
    """About this share of a text, in one piece of whole lines; where it begins is chosen by `seed`.

    Args:
        text: the whole.
        share: above 0; 1 is all of it.
        seed: for the beginning.
    """
    size = round(share * len(text))
    begin = text.rfind(b"\n", 0, Random(seed).randint(0, len(text) - size)) + 1
    end = begin + size
    return text[begin:end] if end >= len(text) else text[begin : text.rfind(b"\n", begin, end) + 1 or end]


def text_task(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    share: float,
    most: int,
    scored: int,
    length: int,
    seed: int,
) -> Task:
    """A text as blocks of tokens, scored in bits per byte.

    Args:
        name: `wikitext-2`, or `c`, the functions of Devign.
        tokenizer: of the model; None for bytes.
        share: of the training text.
        most: bytes of the training text that count as all of it.
        scored: bytes of the validation and of the test text, each, at most.
        length: tokens in a block.
        seed: of which portion is trained on.

    Raises:
        FileNotFoundError: the data is not there.
        ValueError: there is no such text.
    """
    texts = dict(read_splits(name))
    everything = texts["train"][: line_boundary(texts["train"], 0, most)]
    texts["train"] = portion(everything, share, seed)
    with TemporaryDirectory() as folder:
        files = {split: Path(folder) / f"{split}.txt" for split in texts}
        for split, text in texts.items():
            files[split].write_bytes(text)
        paths = {split: str(path) for split, path in files.items()}
        config = LanguageModelingDataConfig(source="files", files=paths, block_size=length, max_eval_bytes=scored)
        prepared = prepare_language_modeling(config, tokenizer)
    test, at_once = prepared.test, max(1, SCORED_AT_ONCE // length)
    assert test is not None
    return Task(
        measure="bits per byte",
        higher_is_better=False,
        rows=prepared.train,
        join=default_collate,
        validation=lambda model: evaluate_language_model(model, prepared.validation, at_once)["bits_per_byte"],
        test=lambda model: evaluate_language_model(model, test, at_once)["bits_per_byte"],
    )
