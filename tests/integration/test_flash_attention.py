"""Flash attention in whole models: each of its ways to pass a mask gives the results of sdpa and eager."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch

import flash_stand_in
import rsa_hf.integration.attention as hooks
from families import FULL_PLAN, PAD, VOCAB, WINDOWED, build, build_language_model
from references import relative_error
from rsa_hf import patch_model
from texts import CACHES, in_pieces, padded

DECODERS = ["gpt2", "llama", *WINDOWED]
ENCODERS = ["roberta", "modernbert"]  # ModernBERT has windows to both sides
LENGTH = 13
PADDING = (5, 2)
FAR = 0.1  # the relative error of a misread mask


@dataclass(frozen=True)
class Flash:
    """The device and the dtype that flash attention runs in, and the tolerance there."""

    device: str
    dtype: torch.dtype
    tolerance: float


@pytest.fixture(params=["stand-in", "kernel"])
def flash(request, monkeypatch) -> Flash:
    """Make attn_implementation="flash_attention_2" work, with the stand-in or the real kernel."""
    if request.param == "kernel":
        if not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None:
            pytest.skip("the real kernel needs a CUDA GPU and the package flash_attn")
        return Flash("cuda", torch.bfloat16, 3e-2)
    flash_stand_in.install(monkeypatch)
    # From float32 transformers casts to another dtype, and finds none in GPT-2.
    return Flash("cpu", torch.float64, 1e-6)


def pair(family, flash, reference="sdpa"):
    """The same patched model under flash attention and under the reference."""
    models, builder = [], build if family in ENCODERS else build_language_model
    for attention in ("flash_attention_2", reference):
        torch.manual_seed(1)
        model = builder(family, attention).to(flash.device, flash.dtype)
        patch_model(model, FULL_PLAN)
        assert model.config._attn_implementation == attention
        models.append(model)
    models[0].load_state_dict(models[1].state_dict())
    return models


def misread(monkeypatch, **otherwise):
    """Make every RSA layer read its mask with other arguments."""
    read = hooks.read_attention_mask

    def misreading(query, key, mask, **keywords):
        return read(query, key, **{"attention_mask": mask, **keywords, **otherwise})

    monkeypatch.setattr(hooks, "read_attention_mask", misreading)


def tokens(flash, rows=3, length=LENGTH):
    return torch.randint(3, VOCAB, (rows, length), device=flash.device)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
@torch.no_grad()
def test_padding_gives_the_results_of_sdpa(family, side, flash, monkeypatch):
    found, expected = pair(family, flash)
    batch = padded(tokens(flash), PADDING, side)
    real = batch["attention_mask"].bool()
    if family in ENCODERS:
        del batch["position_ids"]  # encoders make their own
    wanted = expected(**batch)[0][real]
    assert relative_error(found(**batch)[0][real], wanted) < flash.tolerance
    if side == "left" or family in ENCODERS:  # a causal query sees no padding on its right
        misread(monkeypatch, attention_mask=None)
        assert relative_error(found(**batch)[0][real], wanted) > FAR


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
@torch.no_grad()
def test_without_a_mask_the_results_are_those_of_eager(family, flash, monkeypatch):
    found, expected = pair(family, flash, "eager")
    ids = tokens(flash)
    wanted = expected(ids)[0]
    assert relative_error(found(ids)[0], wanted) < flash.tolerance
    if family in WINDOWED or family == "modernbert":
        misread(monkeypatch, sliding_window=None)
        assert relative_error(found(ids)[0], wanted) > FAR / 10


def packed(flash, lengths, first):
    """Position ids that restart at each document of a row, and the cumulative lengths."""
    positions = torch.cat([torch.arange(first, first + n) for n in lengths])[None].to(flash.device)
    ends = torch.tensor([0, *lengths], device=flash.device).cumsum(0).int()
    cumulative = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    cumulative |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return positions, cumulative


@pytest.mark.parametrize(
    ("family", "told_by"),
    [
        *((family, "position_ids") for family in [*DECODERS, "roberta"]),  # ModernBERT's attention gets no positions
        *((family, "cu_seq_lens_q") for family in [*DECODERS, *ENCODERS]),
    ],
)
@torch.no_grad()
def test_packed_documents_give_the_results_of_single_ones(family, told_by, flash, monkeypatch):
    found, expected = pair(family, flash)
    lengths = [6, 1, 9, 4]
    ids = tokens(flash, 1, sum(lengths))
    # RoBERTa's positions start behind the padding index.
    positions, cumulative = packed(flash, lengths, PAD + 1 if family == "roberta" else 0)
    told = {"position_ids": positions, **(cumulative if told_by == "cu_seq_lens_q" else {})}
    alone = torch.cat([expected(part)[0] for part in ids.split(lengths, 1)], 1)
    assert relative_error(found(ids, **told)[0], alone) < flash.tolerance
    if family in DECODERS:  # under sdpa, masks of encoders ignore positions
        assert relative_error(expected(ids, position_ids=positions, use_cache=False)[0], alone) < flash.tolerance
    misread(monkeypatch, segment_ids=None)
    assert relative_error(found(ids, **told)[0], alone) > FAR / 10


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_cached_runs_agree_with_the_whole_text(family, cache, padding, flash, monkeypatch):
    found, expected = pair(family, flash)
    batch = padded(tokens(flash), PADDING)
    if not padding:
        batch = {name: rows[2:] for name, rows in batch.items()}
    real = batch["attention_mask"].bool()
    wanted = expected(**batch, use_cache=False)[0][real]
    pieces = [4, 3, 1, 2, 1, 1, 1]

    def gap():
        return relative_error(in_pieces(found, batch, pieces, CACHES[cache](found))[real], wanted)

    assert gap() < flash.tolerance
    misread(monkeypatch, aligned_top_left=True)
    if cache == "static":  # the empty slots would be counted twice, and the queries come before the first key
        with pytest.raises(ValueError, match="positions of keys"):
            gap()
    else:
        assert gap() > FAR / 10


@torch.no_grad()
def test_cross_attention_stays_softmax_attention(flash):
    found, expected = pair("bart", flash)
    # transformers applies the padding of the keys to as many queries, which is right only on the left.
    ids, decoder_ids = padded(tokens(flash), PADDING), tokens(flash, 3, 7)
    del ids["position_ids"]
    wanted = expected(**ids, decoder_input_ids=decoder_ids)[0]
    assert relative_error(found(**ids, decoder_input_ids=decoder_ids)[0], wanted) < flash.tolerance
