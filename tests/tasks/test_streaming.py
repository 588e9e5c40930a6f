"""Streamed text gives the blocks of text in memory, in its order, however it comes in pieces."""

import gzip
import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from rsa_hf.tasks import language_modeling as lm
from rsa_hf.tasks.language_modeling import LanguageModelingDataConfig, StreamedBlocks, prepare_language_modeling
from rsa_hf.tasks.text_data import _cut_at_line, line_boundary, stream_training_text

TEXT = "".join(f"Line {i}: naïve café, “{i * 7919}” → 戦場のヴァルキュリア\n" for i in range(60)).encode()


@pytest.fixture(scope="module")
def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT.decode()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prepared(config, tokenizer=None):
    """The same configuration with its text in memory, and streamed."""
    both = [LanguageModelingDataConfig(**config, streaming=streaming) for streaming in (False, True)]
    return [prepare_language_modeling(one, tokenizer) for one in both]


def assert_same_blocks(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right) > 2
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("suffix", [".txt", ".gz"])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("limit", [None, 1500])
def test_files(tmp_path, monkeypatch, byte_level_bpe, suffix, words, limit):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 700)
    files = {"train": str(tmp_path / f"train{suffix}"), "validation": str(tmp_path / "validation.txt")}
    (tmp_path / f"train{suffix}").write_bytes(gzip.compress(TEXT) if suffix == ".gz" else TEXT)
    (tmp_path / "validation.txt").write_bytes(TEXT[:500])
    config = {"source": "files", "files": files, "block_size": 17, "max_train_bytes": limit}
    whole, streamed = prepared(config, byte_level_bpe if words else None)
    assert isinstance(streamed.train, StreamedBlocks)
    assert_same_blocks(whole.train, streamed.train)
    assert_same_blocks(whole.train, streamed.train)  # again from the start
    assert torch.equal(whole.validation.token_ids, streamed.validation.token_ids)
    assert (whole.vocab_size, whole.validation.num_bytes) == (streamed.vocab_size, streamed.validation.num_bytes)


def test_a_data_set_of_rows(tmp_path, monkeypatch, byte_level_bpe):
    """As on the Hub: `load_dataset` reads a local folder in the same way, as a real `datasets.IterableDataset`."""
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 300)
    folder = tmp_path / "data"
    folder.mkdir()
    for split, part in (("train", TEXT), ("validation", TEXT[:700])):
        rows = [json.dumps({"text": line, "id": 1}) for line in part.decode(errors="ignore").splitlines()]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    config = {"source": "hub", "hub_dataset": str(folder), "block_size": 9}
    whole, streamed = prepared(config, byte_level_bpe)
    assert_same_blocks(whole.train, streamed.train)
    assert torch.equal(whole.validation.token_ids, streamed.validation.token_ids)
    with pytest.raises(ValueError, match="text_column='words'"):
        prepared({**config, "text_column": "words"})
    with pytest.raises(ValueError, match="row 0 of validation is 1. Choose a column of strings"):
        prepare_language_modeling(LanguageModelingDataConfig(**config, text_column="id", streaming=True), None)
    (folder / "validation.jsonl").unlink()
    with pytest.raises(ValueError, match="'validation' is needed for streaming"):
        prepare_language_modeling(LanguageModelingDataConfig(**config, streaming=True), None)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(1, 70))
def test_the_limit_cuts_where_it_does_in_memory(text, cuts, limit):
    text = text.replace(b"\x01", b"\n")
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(_cut_at_line(chunks, limit)) == text[: line_boundary(text, 0, limit)]


def test_the_stream_is_read_only_as_far_as_it_is_needed(monkeypatch):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 150)
    read = []

    def chunks():
        for i in range(100):
            read.append(i)
            yield TEXT[:100]

    next(iter(StreamedBlocks(lambda: lm._encode("train", chunks(), None), 10)))
    assert read == [0, 1]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="has 5 tokens, fewer than block_size 8"):
        list(StreamedBlocks(lambda: [torch.arange(2), torch.arange(3)], 8))
    with pytest.raises(ValueError, match="num_workers=2"):
        list(DataLoader(StreamedBlocks(lambda: [torch.arange(99)], 8), num_workers=2, multiprocessing_context="fork"))
    files = {"train": str(tmp_path / "absent.txt"), "validation": str(tmp_path / "v.txt")}
    config = LanguageModelingDataConfig(source="files", files=files, streaming=True)
    with pytest.raises(FileNotFoundError, match="absent.txt"):
        list(stream_training_text(config))
