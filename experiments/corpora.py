"""The texts and functions that experiments train on. All settings of rsa_hf's data are made here."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from experiments.runner.resources import data_file
from rsa_hf.tasks.defect_data import DefectDataConfig, load_defect_data
from rsa_hf.tasks.defect_detection import tokenize
from rsa_hf.tasks.language_modeling import PreparedText, prepare_language_modeling
from rsa_hf.tasks.python_defects import Example, load_python_defects
from rsa_hf.tasks.text8 import clean_text8
from rsa_hf.tasks.text_blocks import TrainingBlocks
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts

WIKITEXT = {"train": "train", "validation": "valid", "test": "test"}  # names of its files, and of Devign's
LONGEST_FUNCTION = 10_000  # characters


def _config(files: Mapping[str, str], **sizes: int) -> LanguageModelingDataConfig:
    """Files by split; without any, the embedded source code of Python's standard library."""
    return LanguageModelingDataConfig(**{f"{split}_file": path for split, path in files.items()}, **sizes)  # type: ignore[arg-type]


def _files(corpus: str) -> dict[str, str]:
    if corpus == "enwik8":
        return {"train": str(data_file("enwik8/enwik8_prefix.xz"))}
    if corpus == "wikitext-2":
        return {split: str(data_file(f"wikitext-2/{name}.txt.xz")) for split, name in WIKITEXT.items()}
    return {}


@functools.lru_cache(maxsize=4)  # shared by the runs of an experiment
def read_corpus(corpus: str, train_bytes: int, eval_bytes: int, block: int) -> PreparedText:
    """At most `train_bytes` of a text to train on, and `eval_bytes` of other text to score, in blocks of bytes.

    The corpus is `enwik8` (a prefix of it), `wikitext-2` or `python` (source code of the standard library).
    """
    sizes = {"block_size": block, "max_train_bytes": train_bytes, "max_eval_bytes": eval_bytes}
    return prepare_language_modeling(_config(_files(corpus), **sizes), None)


def training_blocks(text: PreparedText) -> TrainingBlocks:
    """The blocks to train on of `read_corpus`."""
    assert isinstance(text.train, TrainingBlocks)
    return text.train


@functools.lru_cache(maxsize=4)
def read_splits(corpus: str) -> dict[str, bytes]:
    """The text of each split: of a corpus, of `text8` (made from the prefix of enwik8), or functions in random order.

    Functions are those of `c` (Devign) and `python functions` (the standard library).
    """
    if corpus in ("c", "python functions"):
        functions = read_devign() if corpus == "c" else load_python_defects(max_characters=LONGEST_FUNCTION)
        found = {split: [each.func for each in some if not each.kind] for split, some in functions.items()}
        return {split: "\n\n".join(some).encode() for split, some in found.items()}
    if corpus == "text8":
        return {split: clean_text8(text) for split, text in read_splits("enwik8").items()}
    return read_texts(_config(_files(corpus)))


def in_blocks(
    texts: Mapping[str, bytes], tokenizer: PreTrainedTokenizerBase | None, block: int, eval_bytes: int
) -> PreparedText:
    """Texts by split in blocks of tokens (None: bytes); at most `eval_bytes` are scored of each."""
    with TemporaryDirectory() as folder:
        files = {split: Path(folder) / f"{split}.txt" for split in texts}
        for split, text in texts.items():
            files[split].write_bytes(text)
        config = _config(
            {split: str(path) for split, path in files.items()}, block_size=block, max_eval_bytes=eval_bytes
        )
        return prepare_language_modeling(config, tokenizer)


def read_part(corpus: str, megabytes: float, eval_bytes: int, block: int, seed: int) -> PreparedText:
    """As `read_corpus`, with a contiguous piece of about this size to train on; `seed` chooses where it begins."""
    texts = read_splits(corpus)
    train = portion(texts["train"], megabytes * 1e6 / len(texts["train"]), seed)
    return in_blocks({**texts, "train": train}, None, block, eval_bytes)


def portion(text: bytes, share: float, seed: int) -> bytes:
    """A contiguous piece of whole lines, about this share of a text; `seed` chooses where it begins."""
    size = round(share * len(text))
    begin = text.rfind(b"\n", 0, Random(seed).randint(0, len(text) - size)) + 1
    end = begin + size
    return text[begin:end] if end >= len(text) else text[begin : text.rfind(b"\n", begin, end) + 1 or end]


@functools.lru_cache(maxsize=2)
def read_devign(most: int | None = None) -> dict[str, list[Example]]:
    """The functions of each split, of those to train on at most so many, chosen at random.

    Training functions that are duplicates or occur in another split are left out.
    """
    files = {f"{split}_file": str(data_file(f"devign/{name}.jsonl.xz")) for split, name in WIKITEXT.items()}
    return load_defect_data(DefectDataConfig(max_train_samples=most, **files))  # type: ignore[arg-type]


def encode(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """Functions as rows of at most so many tokens, with their labels."""
    return tokenize(examples, tokenizer, DefectDataConfig(max_seq_length=length)).remove_columns("example_id")


def sample(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """A random sample, or all examples if there are no more."""
    return examples if count >= len(examples) else Random(seed).sample(examples, count)


def text8_tokens(codes: Tensor) -> Tensor:
    """The token ids of `text8_tokenizer` for the characters of text8."""
    return (codes != ord(" ")) * (codes - ord("a") + 1)
