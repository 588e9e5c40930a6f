"""Scores of language models against a loop over tokens, and counts against plain counting."""

import lzma
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rsa_hf.tasks import language_modeling as lm
from rsa_hf.tasks.language_modeling import load_language_modeling_tokenizer, prepare_language_modeling
from rsa_hf.tasks.text_blocks import EvaluationBlocks
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.tasks.text_scores import evaluate_language_model


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # Large initial weights make losses differ from token to token, so that a wrong average shows.
    config = GPT2Config(vocab_size=256, n_layer=2, n_head=2, n_embd=32, n_positions=64, initializer_range=0.5)
    return GPT2LMHeadModel(config).double()


def byte_blocks(text: bytes, block_size: int, stride: int | None = None) -> EvaluationBlocks:
    return EvaluationBlocks(torch.tensor(list(text)), block_size, len(text) - 1, len(text[1:].split()), stride)


# --- the score of a model -------------------------------------------------------------------------------------------


@torch.no_grad()
def nll_token_by_token(model: torch.nn.Module, text: bytes, block_size: int, stride: int) -> float:
    """The sum of one forward per token on its context alone."""
    model.eval()
    total = 0.0
    for target in range(1, len(text)):
        block = 0 if target < block_size else 1 + (target - block_size) // stride
        context = torch.tensor([list(text[block * stride : target])])
        logits = model(input_ids=context).logits[0, -1]
        total -= float(logits[text[target]]) - math.log(sum(math.exp(x) for x in logits.tolist()))
    return total


@pytest.mark.parametrize(("block_size", "stride"), [(16, None), (16, 5), (64, 63), (2, 1), (33, 1)])
@pytest.mark.parametrize("length", [2, 17, 80])
def test_evaluation_equals_a_loop_over_tokens(gpt2, text, block_size, stride, length):
    text = text[:length]
    expected = nll_token_by_token(gpt2, text, block_size, stride or block_size - 1)
    gpt2.train()  # evaluation must switch dropout off
    result = evaluate_language_model(gpt2, byte_blocks(text, block_size, stride), batch_size=3)
    num_words = len(text[1:].split())
    assert result == pytest.approx(
        {
            "loss_nats_per_token": expected / (length - 1),
            "token_perplexity": math.exp(expected / (length - 1)),
            "word_perplexity": math.exp(expected / num_words),
            "bits_per_byte": expected / (length - 1) * math.log2(math.e),
            "num_tokens": length - 1,
            "num_words": num_words,
            "num_bytes": length - 1,
        },
        rel=1e-8,
    )
    if (length, stride) == (80, None):  # the control: a mean of the means of blocks, the last of which is short
        blocks = [{key: value[None] for key, value in block.items()} for block in byte_blocks(text, block_size)]
        losses = [float(gpt2.eval()(**block).loss.detach()) for block in blocks]
        assert sum(losses) / len(losses) != pytest.approx(expected / (length - 1), rel=1e-3)


def test_half_precision_logits_are_summed_in_full_precision(text):
    class FixedLogits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed = torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16())

        def forward(self, input_ids):
            assert not torch.is_grad_enabled(), "evaluation must not keep activations for a backward pass"
            return SimpleNamespace(logits=self.fixed.expand(*input_ids.shape, -1))

    model = FixedLogits()
    exact = -model.fixed.double().log_softmax(0)[list((text * 4)[1:])].mean().item()
    result = evaluate_language_model(model, byte_blocks(text * 4, 64), batch_size=8)
    assert result["loss_nats_per_token"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("block_size", [16, 200])
def test_evaluation_restores_the_mode_of_every_module(gpt2, text, block_size):
    gpt2.train()
    gpt2.transformer.h[0].eval()
    before = [module.training for module in gpt2.modules()]
    with pytest.raises(IndexError) if block_size > 64 else nullcontext():  # the model's positions
        evaluate_language_model(gpt2, byte_blocks(text[:300], block_size), batch_size=2)
    assert [module.training for module in gpt2.modules()] == before


# --- tokens and counts ----------------------------------------------------------------------------------------------


def from_text(folder, text: bytes, tokenizer=None, **options):
    """Prepare a text as both the training and the validation text."""
    path = folder / "text.txt"
    path.write_bytes(text)
    files = {"train_file": str(path), "validation_file": str(path)}
    return prepare_language_modeling(LanguageModelingDataConfig(**{**files, "block_size": 2, **options}), tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byt5"])
@pytest.mark.parametrize("piece_bytes", [30, 10**6])
def test_tokens_cover_the_text_and_counts_leave_out_the_first(
    tmp_path, monkeypatch, text, byte_level_bpe, kind, piece_bytes
):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", piece_bytes)  # 30 cuts inside lines, 10**6 does not cut
    tokenizer = {"bytes": None, "bpe": byte_level_bpe, "byt5": ByT5Tokenizer()}[kind]
    decode = bytes if tokenizer is None else lambda ids: tokenizer.decode(ids).encode()
    text = b"Hello  two\twords\n\n" + text
    prepared = from_text(tmp_path, text, tokenizer)
    assert torch.equal(prepared.train.token_ids, prepared.validation.token_ids)
    ids = prepared.validation.token_ids.tolist()
    first = decode(ids[:1])
    assert decode(ids) == text
    assert first and text.startswith(first)
    assert prepared.validation.num_bytes == len(text) - len(first)
    assert prepared.validation.num_words == len(re.findall(rb"[^ \t\n\r\v\f]+", text[len(first) :]))
    lines = from_text(tmp_path, text, tokenizer, count_line_ends_as_words=True).validation
    assert lines.num_words - prepared.validation.num_words == len(text.splitlines())


def test_a_lower_casing_tokenizer_counts_the_whole_text(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = from_text(tmp_path, b"Hello World\n", PreTrainedTokenizerFast(tokenizer_object=tokenizer)).validation
    assert (text.token_ids.tolist(), text.num_bytes, text.num_words) == ([1, 2], 12, 2)


def test_texts_that_cannot_be_scored_are_refused(tmp_path, byte_level_bpe, monkeypatch):
    monkeypatch.setattr(lm, "TOKENIZED_PIECE_BYTES", 20)
    with pytest.raises(ValueError, match=r"the train text is not UTF-8.* byte 33\."):
        from_text(tmp_path, b"one line\n" * 3 + b"more\na\xffc\n", byte_level_bpe)
    (tmp_path / "one.txt").write_bytes(b"a")
    with pytest.raises(ValueError, match="validation text has 1 token"):
        from_text(tmp_path, b"a text\n", validation_file=str(tmp_path / "one.txt"))


def test_wikitext_counts_are_the_published_ones_and_gpt2_tokens_decode_to_the_text(data_folder, tmp_path):
    folder = data_folder / "wikitext-2"
    names = {"train": "train", "validation": "valid", "test": "test"}
    files = {f"{split}_file": str(folder / f"{name}.txt.xz") for split, name in names.items()}
    config = LanguageModelingDataConfig(**files, max_train_bytes=100_000, count_line_ends_as_words=True)
    prepared = prepare_language_modeling(config, None)
    assert (prepared.validation.num_words, prepared.test.num_words) == (217_646, 245_569)
    assert prepared.test.num_bytes == 1_256_448
    tokenizer = load_language_modeling_tokenizer(str(data_folder / "tokenizers" / "gpt2"))
    text = lzma.decompress((folder / "valid.txt.xz").read_bytes())[:100_000]
    text = text[: text.rindex(b"\n") + 1]
    prepared = from_text(tmp_path, text, tokenizer)
    assert tokenizer.decode(prepared.validation.token_ids.tolist()).encode() == text
    assert prepared.validation.num_bytes == len(text) - 1  # the first token is one space
    assert prepared.validation.num_words == len(text.split())
