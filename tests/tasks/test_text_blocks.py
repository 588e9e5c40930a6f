"""Blocks, segments and tracks of texts whose token ids are their positions: no token is lost or scored twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rsa_hf.tasks.text_blocks import EvaluationBlocks, EvaluationSegments, TrainingBlocks, TrainingTracks


def assert_each_token_scored_once(blocks: EvaluationBlocks) -> None:
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


@given(st.integers(40, 200), st.integers(2, 40))
def test_training_blocks_are_whole_and_drop_the_tail(num_tokens, block_size):
    items = list(TrainingBlocks(torch.arange(num_tokens, dtype=torch.int32), block_size))
    whole = num_tokens // block_size * block_size
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(whole))
    assert all(item["labels"].tolist() == [-100, *item["input_ids"].tolist()[1:]] for item in items)


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="block_size=9: more than the 8 tokens"):
        TrainingBlocks(torch.arange(8), 9)
    with pytest.raises(ValueError, match="has 8 tokens; 4 tracks"):
        TrainingTracks(torch.arange(8), 2, 4)  # the last token needs a target


def assert_rows_continue(tracks: TrainingTracks) -> None:
    """Check that each row starts where it ended in the last batch, and that no token is read twice."""
    assert len(tracks) % tracks.num_tracks == 0
    items = list(tracks)
    for item in items:
        first = int(item["input_ids"][0])
        assert item["input_ids"].tolist() == list(range(first, first + tracks.block_size))
        assert torch.equal(item["shift_labels"], item["input_ids"] + 1)
    for before, after in zip(items, items[tracks.num_tracks :], strict=False):
        assert int(after["input_ids"][0]) == int(before["shift_labels"][-1])
    read = sorted(token for item in items for token in item["input_ids"].tolist())
    assert read == list(range(len(read)))
    # Only the tail is left out.
    assert len(tracks.token_ids) - len(read) <= tracks.block_size * tracks.num_tracks


@given(st.integers(211, 500), st.integers(2, 30), st.integers(1, 7))
def test_tracks_are_contiguous_and_cover_the_text_once(num_tokens, block_size, num_tracks):
    assert_rows_continue(TrainingTracks(torch.arange(num_tokens), block_size, num_tracks))


@pytest.mark.parametrize("wrong", ["permuted", "blocks one after the other"])
def test_rows_that_do_not_continue_are_caught(monkeypatch, wrong):
    original = TrainingTracks.__getitem__
    broken = {
        "permuted": lambda self, i: original(self, i ^ 1 if i // 4 % 2 else i),
        "blocks one after the other": lambda self, i: original(self, i // 4 + i % 4 * self.num_segments),
    }
    monkeypatch.setattr(TrainingTracks, "__getitem__", broken[wrong])
    with pytest.raises(AssertionError):
        assert_rows_continue(TrainingTracks(torch.arange(200), 7, 4))


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
