"""Texts are read, cut and streamed, and no line or character is torn apart. test_data_files.py has what goes wrong."""

import gzip
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rsa_hf.tasks import language_modeling as lm
from rsa_hf.tasks.data_files import SPLITS
from rsa_hf.tasks.language_modeling import prepare_language_modeling
from rsa_hf.tasks.text_blocks import StreamedBlocks
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts

# --- files ----------------------------------------------------------------------------------------------------------


def from_files(folder: Path, **options) -> dict[str, bytes]:
    """Write the texts given for splits to files, and read them with the other options."""
    for split in SPLITS:
        if split in options:
            path = folder / f"{split}.txt"
            path.write_bytes(options.pop(split))
            options[f"{split}_file"] = str(path)
    return read_texts(LanguageModelingDataConfig(**options))


def test_given_splits_are_kept_and_missing_ones_cut_from_the_training_text(tmp_path, text):
    text = text + b"\xff\x00 not UTF-8\r\n"
    given_texts = {"train": text, "validation": b"one two", "test": b"three"}
    assert from_files(tmp_path, **given_texts) == given_texts
    assert "test" not in from_files(tmp_path, train=text, validation=b"one two")
    assert "test" not in from_files(tmp_path, train=text, test_split_percentage=0)
    only_test = from_files(tmp_path, train=text, test=b"three", validation_split_percentage=20)
    assert only_test["test"] == b"three"
    assert only_test["train"] + only_test["validation"] == text
    assert len(only_test["validation"]) == pytest.approx(0.2 * len(text), abs=4)
    parts = from_files(tmp_path, train=text)
    assert list(parts) == ["train", "validation", "test"]
    assert b"".join(parts.values()) == text
    assert [len(part) / len(text) for part in parts.values()] == pytest.approx([0.9, 0.05, 0.05], abs=1e-3)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train": b""}, "nothing is left of the train text"),
        ({"train": b"text", "validation": "戦場".encode(), "max_eval_bytes": 1}, "validation .*max_eval_bytes"),
        ({"train": b"abcdefgh"}, "nothing is left of the test text"),
        ({"validation": b"text"}, "train_file=None"),
    ],
)
def test_empty_and_missing_texts_are_refused(tmp_path, texts, message):
    with pytest.raises(ValueError, match=message):
        from_files(tmp_path, **texts)


@given(st.text(min_size=60, max_size=120), st.integers(17, 200))
@settings(max_examples=60)
def test_cuts_keep_lines_and_characters_whole(tmp_path_factory, text, limit):
    folder, text = tmp_path_factory.mktemp("cut"), text.encode("utf-8", "ignore")
    train = b"a" * 16 + text
    kept = from_files(folder, train=train, validation=b"ab", max_train_bytes=limit)["train"]
    assert train.startswith(kept)
    kept.decode()
    assert len(kept) <= limit
    if kept != train and b"\n" in train[:limit]:
        assert kept == train[:limit].rpartition(b"\n")[0] + b"\n"
    elif kept != train:
        assert len(kept) > limit - 4
    shares = {"validation_split_percentage": 30, "test_split_percentage": 30}
    for part in from_files(folder, train=text * 4, **shares).values():
        part.decode()


# --- the standard library, the Hub ----------------------------------------------------------------------------------


def test_the_embedded_text_is_split_by_file_and_leaves_out_copies_and_tests(tmp_path, monkeypatch):
    splits = read_texts(LanguageModelingDataConfig())
    assert len(splits["train"]) > 5_000_000
    assert all(len(split) > 50_000 for split in splits.values())
    root = Path(sysconfig.get_path("stdlib"))
    for name in ["ast.py", "json/decoder.py", "asyncio/events.py", "random.py"]:
        assert sum((root / name).read_bytes() in split for split in splits.values()) == 1, name
    assert read_texts(LanguageModelingDataConfig(sample_seed=4))["train"][:500] != splits["train"][:500]
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    for index in range(9):
        (tmp_path / f"module{index}.py").write_text(f"value = {index // 3}")  # three of each
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("left out\n")
    shares = {"validation_split_percentage": 25, "test_split_percentage": 25}
    lines = b"".join(read_texts(LanguageModelingDataConfig(**shares)).values()).decode().splitlines()
    assert sorted(lines) == ["# coding: latin-1", "name = 'é'", "value = 0", "value = 1", "value = 2"]
    assert list(read_texts(LanguageModelingDataConfig(test_split_percentage=0))) == ["train", "validation"]


def test_hub_rows_become_lines(hub_data):
    rows = {"body": [" = Title = \n", "", "some words\n", "no line end"] * 20}
    hub_data.returns = {"train": rows, "dev": rows}
    columns = {"validation_split_name": "dev", "text_column_name": "body"}
    lines = b" = Title = \n\nsome words\nno line end\n" * 20
    texts = read_texts(LanguageModelingDataConfig("owner/name", "raw", **columns))
    assert texts == {"train": lines, "validation": lines}
    assert hub_data.calls == [("owner/name", "raw", False)]
    del hub_data.returns["dev"]
    assert b"".join(read_texts(LanguageModelingDataConfig("owner/name", text_column_name="body")).values()) == lines


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["file", "compressed file", "rows"])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("limit", [None, 1500])
def test_streamed_texts_give_the_blocks_of_texts_in_memory(
    tmp_path, monkeypatch, text, byte_level_bpe, source, words, limit
):
    """In two passes. `load_dataset` reads the rows of a local folder as a stream too, as it does on the Hub."""
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 700)
    settings = {"dataset_name": str(tmp_path)}
    for split, part in (("train", text), ("validation", text[:500])):
        if source == "rows":
            rows = [json.dumps({"text": line, "id": 1}) for line in part.decode(errors="ignore").splitlines()]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
        else:
            path = tmp_path / f"{split}.txt{'.gz' * (source == 'compressed file')}"
            path.write_bytes(gzip.compress(part) if path.suffix == ".gz" else part)
            settings = {**settings, "dataset_name": None, f"{split}_file": str(path)}
    whole, streamed = (
        prepare_language_modeling(
            LanguageModelingDataConfig(**settings, block_size=17, max_train_bytes=limit, streaming=streaming),
            byte_level_bpe if words else None,
        )
        for streaming in (False, True)
    )
    assert isinstance(streamed.train, StreamedBlocks)
    for _ in range(2):
        left, right = list(whole.train), list(streamed.train)
        assert len(left) == len(right) > 2
        assert all(torch.equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a | b)
    assert torch.equal(whole.validation.token_ids, streamed.validation.token_ids)
    assert whole.validation.num_bytes == streamed.validation.num_bytes


def test_a_stream_is_read_lazily(monkeypatch):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 150)
    chunks = iter([b"0123456789" * 10] * 100)
    next(iter(StreamedBlocks(lambda: lm._encode(chunks, None, "train"), 10)))
    assert len(list(chunks)) == 98


def test_streams_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="block_size=8: more than the 5 tokens"):
        list(StreamedBlocks(lambda: [torch.arange(2), torch.arange(3)], 8))
    # The workers are shut down here: kept alive by the traceback, they take 10 seconds to end later.
    data = StreamedBlocks(lambda: [torch.arange(99)], 8)
    workers = iter(DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    with pytest.raises(ValueError, match="num_workers=2"):
        next(workers)
    workers._shutdown_workers()
