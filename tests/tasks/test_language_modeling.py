"""Language modelling against references that share no code with it: a loop over tokens, plain counting."""

import gzip
import lzma
import math
import os
import random
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rsa_hf.tasks import language_modeling as lm
from rsa_hf.tasks.language_modeling import (
    EvaluationBlocks,
    LanguageModelingDataConfig,
    TrainingBlocks,
    evaluate_language_model,
    load_language_modeling_tokenizer,
    prepare_language_modeling,
)
from rsa_hf.tasks.text_data import SPLITS

TEXT = "".join(f"Line {i}: naïve café, “{i * 7919}” → 戦場のヴァルキュリア\n" for i in range(60)).encode()


@pytest.fixture(scope="module")
def data_root() -> Path:
    root = Path(os.environ.get("RSA_HF_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no real data at {root}; set RSA_HF_DATA to its folder")
    return root


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # Large initial weights, so that losses differ from token to token and a wrong average shows.
    config = GPT2Config(vocab_size=256, n_layer=2, n_head=2, n_embd=32, n_positions=64, initializer_range=0.5)
    return GPT2LMHeadModel(config).double()


@pytest.fixture(scope="module")
def byte_level_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT.decode()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class FixedLogits(torch.nn.Module):
    """A model whose logits are one given vector at every position."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.fixed = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        assert not torch.is_grad_enabled(), "evaluation must not keep activations for a backward pass"
        return SimpleNamespace(logits=self.fixed.expand(*input_ids.shape, -1))


def byte_blocks(text: bytes, block_size: int, stride: int | None = None) -> EvaluationBlocks:
    words = re.findall(rb"[^ \t\n\r\v\f]+", text[1:])
    return EvaluationBlocks(torch.tensor(list(text)), block_size, len(text) - 1, len(words), stride)


def from_files(folder: Path, tokenizer=None, *, train: bytes = TEXT, **options):
    """Prepare texts given as bytes: `train`, and `validation` and `test` among the options."""
    files = {}
    for split, text in {"train": train, **options}.items():
        if split in SPLITS:
            files[split] = str(folder / f"{split}.txt")
            Path(files[split]).write_bytes(text)
    rest = {name: value for name, value in options.items() if name not in SPLITS}
    config = LanguageModelingDataConfig(source="files", files=files, **{"block_size": 16, **rest})
    return prepare_language_modeling(config, tokenizer)


def raw(blocks) -> bytes:
    return bytes(blocks.token_ids.tolist())


@torch.no_grad()
def nll_token_by_token(model: torch.nn.Module, text: bytes, block_size: int, stride: int) -> float:
    """One forward for each token, on nothing but its context, and Python's sum."""
    model.eval()
    total = 0.0
    for target in range(1, len(text)):
        block = 0 if target < block_size else 1 + (target - block_size) // stride
        context = torch.tensor([list(text[block * stride : target])])
        logits = model(input_ids=context).logits[0, -1]
        total -= float(logits[text[target]]) - math.log(sum(math.exp(x) for x in logits.tolist()))
    return total


# ---------------------------------------------------------------- the score of a model


@pytest.mark.parametrize(("block_size", "stride"), [(16, None), (16, 5), (64, 63), (2, 1), (33, 1)])
@pytest.mark.parametrize("length", [2, 17, 90])
def test_evaluation_equals_a_loop_over_tokens(gpt2, block_size, stride, length):
    text = TEXT[:length]
    expected = nll_token_by_token(gpt2, text, block_size, stride or block_size - 1)
    gpt2.train()  # dropout would show
    result = evaluate_language_model(gpt2, byte_blocks(text, block_size, stride), batch_size=3)
    num_words = len(text[1:].split())
    assert result == {
        "loss_nats_per_token": pytest.approx(expected / (length - 1), rel=1e-10),
        "token_perplexity": pytest.approx(math.exp(expected / (length - 1)), rel=1e-9),
        "word_perplexity": pytest.approx(math.exp(expected / num_words), rel=1e-8),
        "bits_per_byte": pytest.approx(expected / (length - 1) * math.log2(math.e), rel=1e-10),
        "num_tokens": length - 1,
        "num_words": num_words,
        "num_bytes": length - 1,
    }


@torch.no_grad()
def test_wrong_evaluations_are_caught(gpt2):
    text, block_size = TEXT[:70], 16
    expected = nll_token_by_token(gpt2, text, block_size, block_size - 1) / (len(text) - 1)

    def block_losses(blocks):
        return [float(gpt2(**{k: v[None] for k, v in block.items()}).loss) for block in blocks]

    gpt2.eval()
    blocks = byte_blocks(text, block_size)
    mean_of_means = sum(block_losses(blocks[i] for i in range(len(blocks)))) / len(blocks)
    assert mean_of_means != pytest.approx(expected, rel=1e-3)

    blocks.stride = block_size  # the first token of each block is now scored by nobody
    unscored = evaluate_language_model(gpt2, blocks, batch_size=2)
    assert unscored["num_tokens"] != len(text) - 1
    assert unscored["loss_nats_per_token"] != pytest.approx(expected, rel=1e-3)


@torch.no_grad()
def test_labels_suit_the_losses_of_transformers(gpt2):
    """transformers' own shifted loss, block by block, sums to the evaluation."""
    gpt2.eval()
    blocks = byte_blocks(TEXT[:150], 32, 20)
    total = 0.0
    for index in range(len(blocks)):
        item = blocks[index]
        loss = gpt2(input_ids=item["input_ids"][None], labels=item["labels"][None]).loss
        total += float(loss) * int((item["labels"] != -100).sum())
    result = evaluate_language_model(gpt2, blocks, batch_size=4)
    # transformers computes its loss in float32, whatever the model's dtype.
    assert result["loss_nats_per_token"] == pytest.approx(total / 149, rel=1e-6)

    item = TrainingBlocks(torch.tensor(list(TEXT)), 32)[3]
    logits = gpt2(input_ids=item["input_ids"][None]).logits[0, :-1]
    expected = -logits.log_softmax(-1)[torch.arange(31), list(TEXT[97:128])].mean()
    loss = gpt2(input_ids=item["input_ids"][None], labels=item["labels"][None]).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batch_size_does_not_matter(gpt2, batch_size):
    blocks = byte_blocks(TEXT[:100], 16, 7)
    one = evaluate_language_model(gpt2, blocks, batch_size=1)
    assert evaluate_language_model(gpt2, blocks, batch_size, device="cpu") == pytest.approx(one, rel=1e-12)


def test_uniform_model_takes_eight_bits_per_byte():
    model = FixedLogits(torch.zeros(256, dtype=torch.float64))
    result = evaluate_language_model(model, byte_blocks(TEXT, 50), batch_size=8)
    assert result["bits_per_byte"] == pytest.approx(8, rel=1e-13)
    assert result["token_perplexity"] == pytest.approx(256, rel=1e-12)
    bits_per_word = 8 * (len(TEXT) - 1) / len(TEXT.split())
    assert math.log2(result["word_perplexity"]) == pytest.approx(bits_per_word, rel=1e-12)


def test_half_precision_logits_are_summed_in_full_precision():
    logits = (torch.randn(256, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    text = TEXT * 4
    exact = -logits.double().log_softmax(0)[list(text[1:])].sum().item() / (len(text) - 1)
    result = evaluate_language_model(FixedLogits(logits), byte_blocks(text, 64), batch_size=8)
    assert result["loss_nats_per_token"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_mode_back(gpt2, fails):
    gpt2.train()
    gpt2.transformer.h[0].eval()
    before = [module.training for module in gpt2.modules()]
    blocks = byte_blocks(TEXT[:300], 200 if fails else 16)  # longer than the model's 64 positions
    if fails:
        with pytest.raises(IndexError):
            evaluate_language_model(gpt2, blocks, batch_size=2)
    else:
        evaluate_language_model(gpt2, blocks, batch_size=2)
    assert [module.training for module in gpt2.modules()] == before
    assert all(parameter.grad is None for parameter in gpt2.parameters())


def test_unknown_tokens_are_refused(gpt2):
    blocks = EvaluationBlocks(torch.tensor([1, 300]), 8, num_bytes=1, num_words=1)
    with pytest.raises(ValueError, match=r"token id 300.* vocab_size is 256.*resize_token"):
        evaluate_language_model(gpt2, blocks, batch_size=1)


# ---------------------------------------------------------------- blocks


def assert_each_token_scored_once(blocks: EvaluationBlocks) -> None:
    """For a text whose token ids are their positions."""
    num_tokens, scored = len(blocks.token_ids), []
    for index in range(len(blocks)):
        input_ids, labels = blocks[index]["input_ids"].tolist(), blocks[index]["labels"].tolist()
        assert input_ids == list(range(input_ids[0], input_ids[0] + len(input_ids)))
        assert len(input_ids) == blocks.block_size or index == len(blocks) - 1
        assert labels[0] == -100  # the model could not predict it: nothing stands before it
        assert all(label in (-100, token) for label, token in zip(labels, input_ids, strict=True))
        scored += [label for label in labels if label != -100]
    assert scored == list(range(1, num_tokens))


@given(st.integers(2, 200), st.integers(2, 40), st.data())
@settings(deadline=None, max_examples=200)
def test_each_token_but_the_first_is_scored_once(num_tokens, block_size, data):
    stride = data.draw(st.none() | st.integers(1, block_size - 1))
    blocks = EvaluationBlocks(torch.arange(num_tokens), block_size, 1, 1, stride)
    assert_each_token_scored_once(blocks)
    for index in range(1, len(blocks)):
        context = blocks[index]["labels"].tolist().index(int(blocks[index]["labels"].max()))
        assert context >= 1
        assert (blocks[index]["labels"] == -100).sum() == block_size - blocks.stride


@pytest.mark.parametrize("wrong_stride", [8, 9])
def test_unscored_tokens_are_caught(wrong_stride):
    blocks = EvaluationBlocks(torch.arange(40), 8, 1, 1)
    blocks.stride = wrong_stride
    with pytest.raises(AssertionError):
        assert_each_token_scored_once(blocks)


@given(st.integers(2, 200), st.integers(2, 40))
@settings(deadline=None)
def test_training_blocks_are_whole_and_drop_the_tail(num_tokens, block_size):
    token_ids = torch.arange(num_tokens, dtype=torch.int32)
    if num_tokens < block_size:
        with pytest.raises(ValueError, match=rf"{num_tokens} tokens, fewer than block_size {block_size}"):
            TrainingBlocks(token_ids, block_size)
        return
    blocks = TrainingBlocks(token_ids, block_size)
    items = [blocks[index] for index in range(len(blocks))]
    assert torch.equal(
        torch.cat([item["input_ids"] for item in items]), torch.arange(num_tokens // block_size * block_size)
    )
    for item in items:
        assert item["labels"].tolist() == [-100, *item["input_ids"].tolist()[1:]]


def test_blocks_at_their_limits():
    blocks = TrainingBlocks(torch.arange(64), 16)
    assert torch.equal(blocks[-1]["input_ids"], blocks[3]["input_ids"])
    with pytest.raises(IndexError):
        blocks[4]
    batch = next(iter(DataLoader(blocks, batch_size=3, shuffle=True)))
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 16)
    assert batch["input_ids"].dtype == torch.int64
    batch["input_ids"].zero_()
    blocks[1]["labels"].zero_()
    assert torch.equal(blocks.token_ids, torch.arange(64))
    with pytest.raises(ValueError, match=r"1 token.*at least 2"):
        EvaluationBlocks(torch.arange(1), 8, 1, 1)
    with pytest.raises(ValueError, match="stride=8: choose from 1 to 7"):
        EvaluationBlocks(torch.arange(20), 8, 1, 1, stride=8)
    with pytest.raises(ValueError, match="a block size of 1: choose 2 or more"):
        TrainingBlocks(torch.arange(20), 1)


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("suffix", [".txt", ".gz", ".xz"])
def test_files_are_read_as_raw_bytes(tmp_path, suffix):
    text = b"caf\xc3\xa9\r\n\xff\x00 not UTF-8\r\n" * 200
    path = tmp_path / f"corpus{suffix}"
    with {".txt": open, ".gz": gzip.open, ".xz": lzma.open}[suffix](path, "wb") as stream:
        stream.write(text)
    config = LanguageModelingDataConfig(source="files", files={"train": str(path)}, block_size=8)
    prepared = prepare_language_modeling(config, load_language_modeling_tokenizer("bytes"))
    parts = [raw(prepared.train), raw(prepared.validation), raw(prepared.test)]
    assert b"".join(parts) == text
    assert [len(part) for part in parts] == pytest.approx([len(text) * x for x in (0.9, 0.05, 0.05)], abs=4)
    assert prepared.train.token_ids.dtype == torch.uint8
    assert prepared.vocab_size == 256


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_damaged_files_are_named(tmp_path, compress, damage):
    generator = random.Random(0)
    data = compress(b"".join(b"%x\n" % generator.getrandbits(64) for _ in range(30_000)))
    half = len(data) // 2
    data = data[:half] + (b"" if damage == "truncated" else b"\xff" * (len(data) - half))
    path = tmp_path / ("text.gz" if compress is gzip.compress else "text.xz")
    path.write_bytes(data)
    config = LanguageModelingDataConfig(source="files", files={"train": str(path)})
    with pytest.raises(ValueError, match=rf"{path} is truncated or corrupt .*again"):
        prepare_language_modeling(config, None)


def test_unusable_files_are_named(tmp_path):
    def prepare(name):
        config = LanguageModelingDataConfig(source="files", files={"train": str(tmp_path / name)})
        prepare_language_modeling(config, None)

    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        prepare("absent.txt")
    with pytest.raises(ValueError, match=r"ends in '\.parquet'; allowed are \.txt, \.gz, \.xz"):
        prepare("text.parquet")
    (tmp_path / "text.gz").write_bytes(b"not compressed")
    with pytest.raises(ValueError, match=r"text\.gz is truncated or corrupt"):
        prepare("text.gz")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"nothing is left of the train text \(0 bytes"):
        prepare("empty.txt")


def test_given_splits_are_kept_and_missing_ones_cut_off(tmp_path):
    all_given = from_files(tmp_path, validation=b"one two", test=b"three")
    assert (raw(all_given.train), raw(all_given.validation), raw(all_given.test)) == (
        TEXT,
        b"one two",
        b"three",
    )
    assert from_files(tmp_path, validation=b"one two").test is None
    assert from_files(tmp_path, test_fraction=0).test is None
    only_test = from_files(tmp_path, test=b"three", validation_fraction=0.2)
    assert raw(only_test.test) == b"three"
    assert raw(only_test.train) + raw(only_test.validation) == TEXT
    assert len(only_test.validation.token_ids) == pytest.approx(0.2 * len(TEXT), abs=4)


@given(st.text(min_size=60, max_size=120), st.integers(1, 200))
@settings(deadline=None, max_examples=60)
def test_cuts_keep_lines_and_characters_whole(tmp_path_factory, text, limit):
    folder, text = tmp_path_factory.mktemp("cut"), text.encode("utf-8", "ignore")
    train = b"a" * 16 + text
    prepared = from_files(folder, train=train, validation=b"ab", max_train_bytes=16 + limit, validation_fraction=0.3)
    kept = raw(prepared.train)
    assert train.startswith(kept)
    kept.decode()
    assert len(kept) <= 16 + limit
    if kept != train:
        whole_lines = train[: 16 + limit].rpartition(b"\n")[0]
        if b"\n" in train[: 16 + limit]:
            assert kept == whole_lines + b"\n"
        else:
            assert len(kept) > 16 + limit - 4
    split = from_files(folder, train=text * 4, validation_fraction=0.3, test_fraction=0.3, block_size=2)
    for part in (split.train, split.validation, split.test):
        raw(part).decode()


def test_too_little_text_is_said(tmp_path):
    assert len(from_files(tmp_path, validation=b"xy", block_size=1000).validation) == 1
    with pytest.raises(ValueError, match="training text has 5 tokens, fewer than block_size 16; choose"):
        from_files(tmp_path, train=b"short", validation=b"xy")
    with pytest.raises(ValueError, match=r"has 1 token\(s\); at least 2"):
        from_files(tmp_path, validation=b"x")
    with pytest.raises(ValueError, match=r"left of the validation text \(6 bytes, max_eval_bytes=1\): raise"):
        from_files(tmp_path, validation="戦場".encode(), max_eval_bytes=1)
    with pytest.raises(ValueError, match=r"left of the test text \(0 bytes, .*larger fraction"):
        from_files(tmp_path, train=b"abcdefgh", block_size=2)


def test_embedded_text_is_split_by_file():
    prepared = prepare_language_modeling(LanguageModelingDataConfig(), None)
    splits = [raw(prepared.train), raw(prepared.validation), raw(prepared.test)]
    assert len(splits[0]) > 5_000_000
    assert all(len(split) > 50_000 for split in splits)
    root = Path(sysconfig.get_path("stdlib"))
    names = ["ast.py", "json/decoder.py", "asyncio/events.py", "random.py", "typing.py", "email/message.py"]
    for name in names:
        assert sum((root / name).read_bytes() in split for split in splits) == 1, name

    limits = {"max_train_bytes": 10_000, "max_eval_bytes": 5_000, "block_size": 64}
    first, again, other = (
        prepare_language_modeling(LanguageModelingDataConfig(seed=seed, **limits), None) for seed in (3, 3, 4)
    )
    assert torch.equal(first.train.token_ids, again.train.token_ids)
    assert not torch.equal(first.train.token_ids[:500], other.train.token_ids[:500])
    assert 9_000 < len(first.train.token_ids) <= 10_000
    assert len(first.validation.token_ids) <= 5_000
    without_test = prepare_language_modeling(LanguageModelingDataConfig(test_fraction=0, **limits), None)
    assert without_test.test is None


def test_embedded_text_leaves_out_copies_and_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"has 0 Python source files; use source 'files' or 'hub'"):
        prepare_language_modeling(LanguageModelingDataConfig(), None)
    for index in range(9):
        (tmp_path / f"module{index}.py").write_text(f"value = {index // 3}")  # three of each
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("left out\n")
    config = LanguageModelingDataConfig(validation_fraction=0.25, test_fraction=0.25, block_size=4)
    prepared = prepare_language_modeling(config, None)
    splits = [raw(prepared.train), raw(prepared.validation), raw(prepared.test)]
    assert sorted(b"".join(splits).decode().splitlines()) == [
        "# coding: latin-1",
        "name = 'é'",
        "value = 0",
        "value = 1",
        "value = 2",
    ]


def test_hub_rows_become_lines(monkeypatch):
    rows = [" = Title = \n", "", "some words\n", "no line end"] * 20
    calls = []

    def load_dataset(*arguments, streaming):
        calls.append((*arguments, streaming))
        return datasets.DatasetDict(loaded)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = LanguageModelingDataConfig(
        source="hub", hub_dataset="owner/name", hub_subset="raw", text_column="body", block_size=8
    )
    loaded = {split: datasets.Dataset.from_dict({"body": rows}) for split in ("train", "validation")}
    prepared = prepare_language_modeling(config, None)
    assert calls == [("owner/name", "raw", False)]
    assert raw(prepared.train) == b" = Title = \n\nsome words\nno line end\n" * 20
    assert prepared.test is None

    del loaded["validation"]
    prepared = prepare_language_modeling(config, None)
    assert (
        raw(prepared.train) + raw(prepared.validation) + raw(prepared.test)
        == "".join(row if row.endswith("\n") else row + "\n" for row in rows).encode()
    )

    loaded = {"train": datasets.Dataset.from_dict({"text": rows})}
    with pytest.raises(ValueError, match=r"text_column='body': 'owner/name' has the columns \['text'\]"):
        prepare_language_modeling(config, None)
    loaded = {"train": datasets.Dataset.from_dict({"body": ["a", None]})}
    with pytest.raises(ValueError, match="text_column='body': row 1 of train is None. Choose"):
        prepare_language_modeling(config, None)
    loaded = {"test": datasets.Dataset.from_dict({"body": rows})}
    with pytest.raises(ValueError, match=r"'owner/name' has the splits \['test'\]; 'train' is needed"):
        prepare_language_modeling(config, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "web"}, "source='web': choose one of embedded, hub, files"),
        ({"source": "files"}, r"files=\{\}: source 'files' needs 'train'"),
        ({"source": "files", "files": {"train": "a.txt", "dev": "b.txt"}}, "'validation' and 'test' are allowed"),
        ({"files": {"train": "a.txt"}}, "files=.*: read only with source='files'"),
        ({"hub_dataset": "x"}, "hub_dataset='x': needed with source='hub', and read only there"),
        ({"source": "files", "files": {"train": "a.txt"}, "hub_subset": "x"}, "hub_subset='x': read only"),
        ({"source": "hub"}, "hub_dataset=None: needed with source='hub'"),
        ({"block_size": 1}, "a block size of 1: choose 2 or more"),
        ({"block_size": 8, "stride": 8}, "stride=8: choose from 1 to 7"),
        ({"stride": 0}, "stride=0: choose from 1 to 255"),
        ({"eval_block_size": 1}, "a block size of 1: choose 2 or more"),
        ({"eval_block_size": 8, "stride": 8}, "stride=8: choose from 1 to 7"),
        ({"validation_fraction": 0}, "validation_fraction=0 and test_fraction=0.05: the first must be above 0"),
        ({"validation_fraction": math.nan}, "validation_fraction=nan"),
        ({"validation_fraction": 0.6, "test_fraction": 0.4}, r"test_fraction=0\.4: .* sum below 1"),
        ({"test_fraction": -0.1}, r"test_fraction=-0\.1"),
        ({"streaming": True}, "streaming=True: a stream has no end"),
        ({"source": "files", "files": {"train": "a.txt"}, "streaming": True}, "streaming=True: a stream has no end"),
        ({"eval_memory": {"mem_len": 3}}, r"eval_memory=\{'mem_len': 3\}: has no effect without carry_memory"),
        ({"carry_memory": True, "stride": 5}, "stride=5: not with carry_memory"),
        (
            {"carry_memory": True, "streaming": True, "source": "hub", "hub_dataset": "x"},
            "streaming=True: not with carry_memory",
        ),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelingDataConfig(**options)


# ---------------------------------------------------------------- tokens and counts


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byt5"])
@pytest.mark.parametrize("piece_bytes", [30, 10**6])
def test_tokens_cover_the_text_and_counts_follow_the_first(tmp_path, monkeypatch, byte_level_bpe, kind, piece_bytes):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", piece_bytes)  # 30 cuts inside lines, 10**6 nowhere
    tokenizer = {"bytes": None, "bpe": byte_level_bpe, "byt5": ByT5Tokenizer()}[kind]
    text = b"Hello  two\twords\n\n" + TEXT
    blocks = from_files(tmp_path, tokenizer, validation=text).validation
    ids = blocks.token_ids.tolist()
    if tokenizer is None:
        first, decoded = b"H", bytes(ids)
    else:
        first, decoded = tokenizer.decode(ids[:1]).encode(), tokenizer.decode(ids).encode()
    assert decoded == text
    assert first
    assert text.startswith(first)
    assert blocks.num_bytes == len(text) - len(first)
    assert blocks.num_words == len(re.findall(rb"[^ \t\n\r\v\f]+", text[len(first) :]))
    lines = from_files(tmp_path, tokenizer, validation=text, count_line_ends_as_words=True).validation
    assert lines.num_words - blocks.num_words == len(text.splitlines())


def test_lower_casing_tokenizer_counts_the_whole_text(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    prepared = from_files(tmp_path, PreTrainedTokenizerFast(tokenizer_object=tokenizer), validation=b"Hello World\n")
    assert prepared.validation.token_ids.tolist() == [1, 2]
    assert (prepared.validation.num_bytes, prepared.validation.num_words, prepared.vocab_size) == (12, 2, 3)


def test_text_that_is_no_utf8_is_refused(tmp_path, byte_level_bpe):
    with pytest.raises(ValueError, match=r"validation text is not UTF-8 \(.*byte 0xff.*\); .*'bytes'"):
        from_files(tmp_path, byte_level_bpe, validation=b"one line\nanother\nab\xffc\n")


def test_wikitext_counts_are_the_published_ones(data_root):
    folder = data_root / "wikitext-2"
    config = LanguageModelingDataConfig(
        source="files",
        files={s: str(folder / f"{n}.txt.xz") for s, n in zip(SPLITS, ("train", "valid", "test"), strict=True)},
        max_train_bytes=100_000,
        count_line_ends_as_words=True,
    )
    prepared = prepare_language_modeling(config, None)
    assert (prepared.validation.num_words, prepared.test.num_words) == (217_646, 245_569)
    assert prepared.test.num_bytes == 1_256_448


def test_gpt2_tokenizer_on_wikitext(data_root):
    tokenizer = load_language_modeling_tokenizer(str(data_root / "tokenizers" / "gpt2"))
    paths = {split: str(data_root / "wikitext-2" / "valid.txt.xz") for split in ("train", "validation")}
    config = LanguageModelingDataConfig(source="files", files=paths, max_train_bytes=50_000, max_eval_bytes=100_000)
    prepared = prepare_language_modeling(config, tokenizer)
    text = lzma.decompress(Path(paths["train"]).read_bytes())[:100_000]
    text = text[: text.rindex(b"\n") + 1]
    assert tokenizer.decode(prepared.validation.token_ids.tolist()).encode() == text
    assert prepared.validation.num_bytes == len(text) - 1  # the first token is one space
    assert prepared.validation.num_words == len(text.split())
    assert prepared.vocab_size == 50_257


def test_enwik8_prefix_is_split_in_order(data_root):
    path = data_root / "enwik8" / "enwik8_prefix.xz"
    config = LanguageModelingDataConfig(source="files", files={"train": str(path)}, block_size=512)
    prepared = prepare_language_modeling(config, None)
    parts = [raw(prepared.train), raw(prepared.validation), raw(prepared.test)]
    assert b"".join(parts) == lzma.decompress(path.read_bytes())
    assert [len(part) for part in parts] == pytest.approx([3_738_658, 207_703, 207_703], abs=4)
