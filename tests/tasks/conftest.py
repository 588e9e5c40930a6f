"""Texts, a tokenizer and data folders that several tests of the tasks share."""

import shutil
import sysconfig
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def text() -> bytes:
    return "".join(f"Line {i}: naïve café, “{i * 7919}” → 戦場のヴァルキュリア\n" for i in range(60)).encode()


@pytest.fixture(scope="session")
def byte_level_bpe(text) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text.decode()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def small_library(monkeypatch, tmp_path_factory):
    """The embedded data comes from a part of the standard library."""
    folder = tmp_path_factory.mktemp("library")
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py")):
        shutil.copy(file, folder)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))


@pytest.fixture
def hub_data(monkeypatch):
    """Stands in for `datasets.load_dataset`: set `returns` to columns by split, or to an error; `calls` has its
    arguments."""

    class HubData:
        returns = None
        calls = []  # noqa: RUF012  # one object per test

        def __call__(self, *arguments, **keywords):
            self.calls = [*self.calls, (*arguments, *keywords.values())]
            if isinstance(self.returns, Exception):
                raise self.returns
            return {split: datasets.Dataset.from_dict(columns) for split, columns in self.returns.items()}

    hub = HubData()
    monkeypatch.setattr(datasets, "load_dataset", hub)
    return hub
