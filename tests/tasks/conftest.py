"""Texts, a tokenizer and data folders that several tests of the tasks share."""

from pathlib import Path

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


@pytest.fixture(scope="session")
def devign_folder(data_folder) -> Path:
    """The Devign functions in the CodeXGLUE split: {train,valid,test}.jsonl.xz."""
    return data_folder / "devign"
