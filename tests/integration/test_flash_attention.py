"""Flash attention in whole models: each of its ways to pass a mask gives the results of sdpa and eager."""

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
TOLERANCE, FAR = 1e-6, 0.1  # relative errors: of rounding, and of a misread mask


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    flash_stand_in.install(monkeypatch)


def pair(family, reference="sdpa"):
    """The same patched model under flash attention and under the reference.

    In float64: from float32 transformers casts to another dtype, and finds none in GPT-2.
    """
    models, builder = [], build if family in ENCODERS else build_language_model
    for attention in ("flash_attention_2", reference):
        torch.manual_seed(1)
        model = builder(family, attention).double()
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


def tokens(rows=3, length=LENGTH):
    return torch.randint(3, VOCAB, (rows, length))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
@torch.no_grad()
def test_padding_gives_the_results_of_sdpa(family, side, monkeypatch):
    found, expected = pair(family)
    batch = padded(tokens(), PADDING, side)
    real = batch["attention_mask"].bool()
    if family in ENCODERS:
        del batch["position_ids"]  # encoders make their own
    wanted = expected(**batch)[0][real]
    assert relative_error(found(**batch)[0][real], wanted) < TOLERANCE
    if side == "left" or family in ENCODERS:  # a causal query sees no padding on its right
        misread(monkeypatch, attention_mask=None)
        assert relative_error(found(**batch)[0][real], wanted) > FAR


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
@torch.no_grad()
def test_without_a_mask_the_results_are_those_of_eager(family, monkeypatch):
    found, expected = pair(family, "eager")
    ids = tokens()
    wanted = expected(ids)[0]
    assert relative_error(found(ids)[0], wanted) < TOLERANCE
    if family in WINDOWED or family == "modernbert":
        misread(monkeypatch, sliding_window=None)
        assert relative_error(found(ids)[0], wanted) > FAR / 10


def packed(lengths, first):
    """Position ids that restart at each document of a row, and the cumulative lengths."""
    positions = torch.cat([torch.arange(first, first + n) for n in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
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
def test_packed_documents_give_the_results_of_single_ones(family, told_by, monkeypatch):
    found, expected = pair(family)
    lengths = [6, 1, 9, 4]
    ids = tokens(1, sum(lengths))
    # RoBERTa's positions start behind the padding index.
    positions, cumulative = packed(lengths, PAD + 1 if family == "roberta" else 0)
    told = {"position_ids": positions, **(cumulative if told_by == "cu_seq_lens_q" else {})}
    alone = torch.cat([expected(part)[0] for part in ids.split(lengths, 1)], 1)
    assert relative_error(found(ids, **told)[0], alone) < TOLERANCE
    if family in DECODERS:  # under sdpa, masks of encoders ignore positions
        assert relative_error(expected(ids, position_ids=positions, use_cache=False)[0], alone) < TOLERANCE
    misread(monkeypatch, segment_ids=None)
    assert relative_error(found(ids, **told)[0], alone) > FAR / 10


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_cached_runs_agree_with_the_whole_text(family, cache, padding, monkeypatch):
    found, expected = pair(family)
    batch = padded(tokens(), PADDING)
    if not padding:
        batch = {name: rows[2:] for name, rows in batch.items()}
    real = batch["attention_mask"].bool()
    wanted = expected(**batch, use_cache=False)[0][real]
    pieces = [4, 3, 1, 2, 1, 1, 1]

    def gap():
        return relative_error(in_pieces(found, batch, pieces, CACHES[cache](found))[real], wanted)

    assert gap() < TOLERANCE
    misread(monkeypatch, aligned_top_left=True)
    if cache == "static":  # the empty slots would be counted twice, and the queries come before the first key
        with pytest.raises(ValueError, match="positions of keys"):
            gap()
    else:
        assert gap() > FAR / 10
