"""Texts are read, cut, streamed and divided into blocks and tracks; no token is lost or scored twice."""

import gzip
import itertools
import json
import lzma
import math
import random
import sysconfig
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rsa_hf.tasks import language_modeling as lm
from rsa_hf.tasks import text_data
from rsa_hf.tasks.compressed import open_compressed
from rsa_hf.tasks.language_modeling import prepare_language_modeling
from rsa_hf.tasks.text_data import (
    EvaluationBlocks,
    EvaluationSegments,
    LanguageModelingDataConfig,
    StreamedBlocks,
    TrainingBlocks,
    TrainingTracks,
    line_boundary,
    read_texts,
    stream_training_text,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "files"}, r"files=\{\}: needed with source='files', and read only there"),
        ({"source": "files", "files": {"train": "a.txt", "dev": "b.txt"}}, "'validation' and 'test' are optional"),
        ({"source": "files", "files": {"test": "a.txt"}}, "'train' is needed"),
        ({"files": {"train": "a.txt"}}, "files=.*: needed with source='files', and read only there"),
        ({"hub_dataset": "x"}, "hub_dataset='x': needed with source='hub', and read only there"),
        ({"source": "hub"}, "hub_dataset=None: needed with source='hub'"),
        ({"block_size": 1}, "block_size=1, eval_block_size=None: 2 or more"),
        ({"eval_block_size": 1}, "eval_block_size=1: 2 or more"),
        ({"block_size": 8, "stride": 8}, "stride=8: from 1 to 7"),
        ({"stride": 0}, "stride=0: from 1 to 255"),
        ({"eval_block_size": 8, "stride": 8}, "stride=8: from 1 to 7"),
        ({"validation_fraction": 0}, "validation_fraction=0 and test_fraction=0.05: the first must be above 0"),
        ({"validation_fraction": math.nan}, "validation_fraction=nan"),
        ({"validation_fraction": 0.6, "test_fraction": 0.4}, r"test_fraction=0\.4: .* sum below 1"),
        ({"test_fraction": -0.1}, r"test_fraction=-0\.1"),
        ({"streaming": True}, "streaming=True: a stream has no end"),
        ({"source": "files", "files": {"train": "a.txt"}, "streaming": True}, "streaming=True: a stream has no end"),
        ({"carry_memory": True, "streaming": True, "source": "hub", "hub_dataset": "x"}, "without carry_memory"),
        ({"eval_memory": {"mem_len": 3}}, r"eval_memory=\{'mem_len': 3\}: has no effect without carry_memory"),
        ({"carry_memory": True, "stride": 5}, "stride=5: not with carry_memory"),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelingDataConfig(**options)


# --- files ----------------------------------------------------------------------------------------------------------


def from_files(folder: Path, **options) -> dict[str, bytes]:
    """Write the texts given for splits to files, and read them with the other options."""
    files = {}
    for split in text_data.SPLITS:
        if split in options:
            files[split] = str(folder / f"{split}.txt")
            Path(files[split]).write_bytes(options.pop(split))
    return read_texts(LanguageModelingDataConfig(source="files", files=files, **options))


@pytest.mark.parametrize("suffix", [".txt", ".gz", ".xz"])
def test_files_are_read_as_bytes_and_split_in_order(tmp_path, suffix):
    text = b"caf\xc3\xa9\r\n\xff\x00 not UTF-8\r\n" * 200
    path = tmp_path / f"corpus{suffix}"
    with {".txt": open, ".gz": gzip.open, ".xz": lzma.open}[suffix](path, "wb") as stream:
        stream.write(text)
    parts = read_texts(LanguageModelingDataConfig(source="files", files={"train": str(path)}))
    assert list(parts) == ["train", "validation", "test"]
    assert b"".join(parts.values()) == text
    assert [len(part) / len(text) for part in parts.values()] == pytest.approx([0.9, 0.05, 0.05], abs=1e-3)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "neither packing"])
def test_the_error_names_a_damaged_file(tmp_path, compress, damage):
    generator = random.Random(0)
    data = compress(b"".join(b"%x\n" % generator.getrandbits(64) for _ in range(30_000)))
    half = len(data) // 2
    rest = {"truncated": b"", "overwritten": b"\xff" * (len(data) - half)}
    path = tmp_path / ("text.gz" if compress is gzip.compress else "text.xz")
    path.write_bytes(data[:half] + rest[damage] if damage in rest else b"neither packing")
    with (
        pytest.raises(ValueError, match=rf"{path} is truncated or corrupt .*again"),
        open_compressed(path, ".txt") as f,
    ):
        f.read()


def test_the_error_names_an_unusable_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"), open_compressed(tmp_path / "absent.txt", ".txt"):
        pass
    with (
        pytest.raises(ValueError, match=r"ends in '\.parquet'; allowed are \.txt"),
        open_compressed("a.parquet", ".txt"),
    ):
        pass
    with pytest.raises(ValueError, match=r"nothing is left of the train text \(0 bytes"):
        from_files(tmp_path, train=b"")
    with pytest.raises(ValueError, match=r"left of the validation text \(6 bytes, max_eval_bytes=1\)\. Raise"):
        from_files(tmp_path, train=b"text", validation="戦場".encode(), max_eval_bytes=1)
    with pytest.raises(ValueError, match=r"left of the test text \(0 bytes, .*larger fraction"):
        from_files(tmp_path, train=b"abcdefgh")


def test_given_splits_are_kept_and_missing_ones_cut_from_the_training_text(tmp_path, text):
    given_texts = {"train": text, "validation": b"one two", "test": b"three"}
    assert from_files(tmp_path, **given_texts) == given_texts
    assert "test" not in from_files(tmp_path, train=text, validation=b"one two")
    assert "test" not in from_files(tmp_path, train=text, test_fraction=0)
    only_test = from_files(tmp_path, train=text, test=b"three", validation_fraction=0.2)
    assert only_test["test"] == b"three"
    assert only_test["train"] + only_test["validation"] == text
    assert len(only_test["validation"]) == pytest.approx(0.2 * len(text), abs=4)


@given(st.text(min_size=60, max_size=120), st.integers(1, 200))
@settings(max_examples=60)
def test_cuts_keep_lines_and_characters_whole(tmp_path_factory, text, limit):
    folder, text = tmp_path_factory.mktemp("cut"), text.encode("utf-8", "ignore")
    train = b"a" * 16 + text
    limit += 16
    kept = from_files(folder, train=train, validation=b"ab", max_train_bytes=limit)["train"]
    assert train.startswith(kept)
    kept.decode()
    assert len(kept) <= limit
    if kept != train and b"\n" in train[:limit]:
        assert kept == train[:limit].rpartition(b"\n")[0] + b"\n"
    elif kept != train:
        assert len(kept) > limit - 4
    for part in from_files(folder, train=text * 4, validation_fraction=0.3, test_fraction=0.3).values():
        part.decode()


# --- the standard library, the Hub ----------------------------------------------------------------------------------


def test_the_embedded_text_is_split_by_file():
    splits = read_texts(LanguageModelingDataConfig())
    assert len(splits["train"]) > 5_000_000
    assert all(len(split) > 50_000 for split in splits.values())
    root = Path(sysconfig.get_path("stdlib"))
    for name in ["ast.py", "json/decoder.py", "asyncio/events.py", "random.py", "typing.py", "email/message.py"]:
        assert sum((root / name).read_bytes() in split for split in splits.values()) == 1, name
    assert read_texts(LanguageModelingDataConfig(seed=4))["train"][:500] != splits["train"][:500]


def test_the_embedded_text_leaves_out_copies_and_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match="nothing is left of the train text"):
        read_texts(LanguageModelingDataConfig())
    for index in range(9):
        (tmp_path / f"module{index}.py").write_text(f"value = {index // 3}")  # three of each
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("left out\n")
    splits = read_texts(LanguageModelingDataConfig(validation_fraction=0.25, test_fraction=0.25))
    lines = b"".join(splits.values()).decode().splitlines()
    assert sorted(lines) == ["# coding: latin-1", "name = 'é'", "value = 0", "value = 1", "value = 2"]
    assert list(read_texts(LanguageModelingDataConfig(test_fraction=0))) == ["train", "validation"]


def test_hub_rows_become_lines(monkeypatch):
    rows = [" = Title = \n", "", "some words\n", "no line end"] * 20
    loaded = {split: datasets.Dataset.from_dict({"body": rows}) for split in ("train", "validation")}
    calls = []

    def load_dataset(*arguments, streaming):
        calls.append((*arguments, streaming))
        return datasets.DatasetDict(loaded)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = LanguageModelingDataConfig(source="hub", hub_dataset="owner/name", hub_subset="raw", text_column="body")
    lines = b" = Title = \n\nsome words\nno line end\n" * 20
    assert read_texts(config) == {"train": lines, "validation": lines}
    assert calls == [("owner/name", "raw", False)]
    del loaded["validation"]
    assert b"".join(read_texts(config).values()) == lines
    loaded["train"] = loaded["train"].rename_column("body", "text")
    with pytest.raises(ValueError, match=r"'body'.*not in the dataset. Current columns in the dataset: \['text'\]"):
        read_texts(config)
    loaded["test"] = loaded.pop("train")
    with pytest.raises(ValueError, match=r"hub_dataset='owner/name': has the splits \['test'\]; needed: \{'train'\}"):
        read_texts(config)


# --- streams --------------------------------------------------------------------------------------------------------


def assert_streamed_as_in_memory(config, tokenizer=None):
    """Compare the blocks of a text in memory with those of two passes over its stream."""
    whole, streamed = (
        prepare_language_modeling(LanguageModelingDataConfig(**config, streaming=streaming), tokenizer)
        for streaming in (False, True)
    )
    assert isinstance(streamed.train, StreamedBlocks)
    for _ in range(2):
        left, right = list(whole.train), list(streamed.train)
        assert len(left) == len(right) > 2
        assert all(torch.equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a | b)
    assert torch.equal(whole.validation.token_ids, streamed.validation.token_ids)
    assert (whole.vocab_size, whole.validation.num_bytes) == (streamed.vocab_size, streamed.validation.num_bytes)


@pytest.mark.parametrize("suffix", [".txt", ".gz"])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("limit", [None, 1500])
def test_streamed_files_give_the_blocks_of_files_in_memory(
    tmp_path, monkeypatch, text, byte_level_bpe, suffix, words, limit
):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 700)
    files = {"train": str(tmp_path / f"train{suffix}"), "validation": str(tmp_path / "validation.txt")}
    Path(files["train"]).write_bytes(gzip.compress(text) if suffix == ".gz" else text)
    Path(files["validation"]).write_bytes(text[:500])
    config = {"source": "files", "files": files, "block_size": 17, "max_train_bytes": limit}
    assert_streamed_as_in_memory(config, byte_level_bpe if words else None)


def test_streamed_rows_give_the_blocks_of_rows_in_memory(tmp_path, monkeypatch, text, byte_level_bpe):
    """As on the Hub: `load_dataset` reads a local folder as a `datasets.IterableDataset` too."""
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 300)
    for split, part in (("train", text), ("validation", text[:700])):
        rows = [json.dumps({"text": line, "id": 1}) for line in part.decode(errors="ignore").splitlines()]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    config = {"source": "hub", "hub_dataset": str(tmp_path), "block_size": 9}
    assert_streamed_as_in_memory(config, byte_level_bpe)
    with pytest.raises(ValueError, match="'words'"):
        read_texts(LanguageModelingDataConfig(**config, text_column="words", streaming=True))
    (tmp_path / "validation.jsonl").unlink()
    with pytest.raises(ValueError, match="needed: .*'validation'"):
        read_texts(LanguageModelingDataConfig(**config, streaming=True))


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(1, 70))
def test_the_limit_cuts_a_stream_like_a_text_in_memory(text, cuts, limit):
    text = text.replace(b"\x01", b"\n")
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(text_data._cut_at_line(chunks, limit)) == text[: line_boundary(text, 0, limit)]


def test_a_stream_is_read_lazily(monkeypatch):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 150)
    read = []

    def chunks():
        for i in range(100):
            read.append(i)
            yield b"0123456789" * 10

    next(iter(StreamedBlocks(lambda: lm._encode(chunks(), None), 10)))
    assert read == [0, 1]


def test_streams_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match="block_size=8: more than the 5 tokens"):
        list(StreamedBlocks(lambda: [torch.arange(2), torch.arange(3)], 8))
    # The workers are shut down here: kept alive by the traceback, they take 10 seconds to end later.
    workers = iter(
        DataLoader(StreamedBlocks(lambda: [torch.arange(99)], 8), num_workers=2, multiprocessing_context="fork")
    )
    with pytest.raises(ValueError, match="num_workers=2"):
        next(workers)
    workers._shutdown_workers()
    files = {"train": str(tmp_path / "absent.txt"), "validation": str(tmp_path / "v.txt")}
    with pytest.raises(FileNotFoundError, match="absent.txt"):
        list(stream_training_text(LanguageModelingDataConfig(source="files", files=files, streaming=True)))


# --- blocks and segments --------------------------------------------------------------------------------------------


def assert_each_token_scored_once(blocks: EvaluationBlocks) -> None:
    """Check a text whose token ids are their positions."""
    scored = []
    for index, block in enumerate(blocks):
        input_ids, labels = block["input_ids"].tolist(), block["labels"].tolist()
        assert input_ids == list(range(input_ids[0], input_ids[0] + len(input_ids)))
        assert len(input_ids) == blocks.block_size or index == len(blocks) - 1
        assert labels[0] == -100  # the first token has no context
        assert all(label in (-100, token) for label, token in zip(labels, input_ids, strict=True))
        scored += [label for label in labels if label != -100]
    assert scored == list(range(1, len(blocks.token_ids)))


@given(st.integers(2, 200), st.integers(2, 40), st.data())
@settings(max_examples=200)
def test_blocks_score_each_token_but_the_first_once(num_tokens, block_size, data):
    stride = data.draw(st.none() | st.integers(1, block_size - 1))
    blocks = EvaluationBlocks(torch.arange(num_tokens), block_size, 1, 1, stride)
    assert_each_token_scored_once(blocks)
    for index in range(1, len(blocks)):
        assert (blocks[index]["labels"] == -100).sum() == block_size - (stride or block_size - 1)


@pytest.mark.parametrize("wrong_stride", [8, 9])
def test_unscored_tokens_are_caught(wrong_stride):
    with pytest.raises(AssertionError):
        assert_each_token_scored_once(EvaluationBlocks(torch.arange(40), 8, 1, 1, wrong_stride))


@given(st.integers(2, 200), st.integers(2, 40))
def test_segments_score_each_token_but_the_first_once(num_tokens, block_size):
    items = list(EvaluationSegments(torch.arange(num_tokens), block_size, 1, 1))
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(num_tokens - 1))
    assert torch.cat([item["shift_labels"] for item in items]).tolist() == list(range(1, num_tokens))
    assert all(len(item["input_ids"]) == block_size for item in items[:-1])


@given(st.integers(2, 200), st.integers(2, 40))
def test_training_blocks_are_whole_and_drop_the_tail(num_tokens, block_size):
    token_ids = torch.arange(num_tokens, dtype=torch.int32)
    if num_tokens < block_size:
        with pytest.raises(ValueError, match=rf"block_size={block_size}: more than the {num_tokens} tokens"):
            TrainingBlocks(token_ids, block_size)
        return
    items = list(TrainingBlocks(token_ids, block_size))
    whole = num_tokens // block_size * block_size
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(whole))
    assert all(item["labels"].tolist() == [-100, *item["input_ids"].tolist()[1:]] for item in items)


def assert_rows_continue(tracks, num_tracks):
    """Check that each row starts where it ended in the last batch, for a text whose token ids are their positions."""
    assert len(tracks) % num_tracks == 0
    items = list(tracks)
    for item in items:
        first = int(item["input_ids"][0])
        assert item["input_ids"].tolist() == list(range(first, first + tracks.block_size))
        assert torch.equal(item["shift_labels"], item["input_ids"] + 1)
    for before, after in zip(items, items[num_tracks:], strict=False):
        assert int(after["input_ids"][0]) == int(before["shift_labels"][-1])
    return items


@given(st.integers(1, 500), st.integers(2, 30), st.integers(1, 7))
def test_tracks_are_contiguous_and_cover_the_text_once(num_tokens, block_size, num_tracks):
    if num_tokens < block_size * num_tracks + 1:
        with pytest.raises(ValueError, match=rf"has {num_tokens} tokens; {num_tracks} tracks .* of {block_size} take"):
            TrainingTracks(torch.arange(num_tokens), block_size, num_tracks)
        return
    items = assert_rows_continue(TrainingTracks(torch.arange(num_tokens), block_size, num_tracks), num_tracks)
    read = sorted(token for item in items for token in item["input_ids"].tolist())
    assert read == list(range(len(read)))  # each token once
    assert num_tokens - len(read) <= block_size * num_tracks  # except the tail


@pytest.mark.parametrize("wrong", ["permuted", "blocks one after the other"])
def test_rows_that_do_not_continue_are_caught(monkeypatch, wrong):
    original = TrainingTracks.__getitem__
    broken = {
        "permuted": lambda self, i: original(self, i ^ 1 if i // 4 % 2 else i),
        "blocks one after the other": lambda self, i: original(self, i // 4 + i % 4 * self.num_segments),
    }
    monkeypatch.setattr(TrainingTracks, "__getitem__", broken[wrong])
    with pytest.raises(AssertionError):
        assert_rows_continue(TrainingTracks(torch.arange(200), 7, 4), 4)


@pytest.mark.parametrize("kind", [TrainingBlocks, TrainingTracks, EvaluationBlocks, EvaluationSegments])
def test_items_are_copies_of_int64(kind):
    tokens = torch.arange(50, dtype=torch.int32)
    data = kind(tokens, 8, *{TrainingBlocks: [], TrainingTracks: [2]}.get(kind, [1, 1]))
    batch = next(iter(DataLoader(data, batch_size=3, shuffle=True)))
    assert all(value.shape == (3, 8) and value.dtype == torch.int64 for value in batch.values())
    for key in data[1]:
        item = data[1]
        item[key].zero_()
        assert sum(int(value.abs().sum()) > 0 for value in item.values()) == 1
    assert torch.equal(tokens, torch.arange(50, dtype=torch.int32))
    assert torch.equal(data[-1]["input_ids"], data[len(data) - 1]["input_ids"])
    with pytest.raises(IndexError):
        data[len(data)]
