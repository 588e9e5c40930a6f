"""Flex attention in whole models: a BlockMask gives the results of eager attention, of sdpa, or of single documents."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache
from transformers.integrations import flex_attention as integration

import flex_stand_in
from broken import break_mask, forgets_the_offset
from families import ENCODERS, FULL_PLAN, VOCAB, WINDOWED, build, build_language_model, move_rates
from references import relative_error
from rsa_hf import patch_model
from rsa_hf.ops.read_mask import evaluate_block_mask
from texts import CACHES, PIECES, in_pieces, padded, uncached

DECODERS = ["llama", *WINDOWED]
BIDIRECTIONAL = [*ENCODERS, "modernbert"]  # ModernBERT has windows to both sides
LENGTH = 13
FAR = 0.01  # the relative error of a misread mask


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", flex_stand_in.attention)
    with torch._dynamo.config.patch(disable=True):  # block masks are torch's, made without compiling
        yield


def pair(family, reference="eager"):
    """The same patched model under flex attention and under the reference."""
    models = []
    for attention in ("flex_attention", reference):
        torch.manual_seed(1)
        model = (build if family in BIDIRECTIONAL else build_language_model)(family, attention)
        models.append(move_rates(patch_model(model, FULL_PLAN)))
        assert model.config._attn_implementation == attention
    models[0].load_state_dict(models[1].state_dict())
    return models


def tokens(rows=3, length=LENGTH):
    return torch.randint(3, VOCAB, (rows, length))


def misread(monkeypatch, change):
    """Make RSA see `change(block_mask, query, S)`; attention itself stays right."""
    monkeypatch.setattr("rsa_hf.ops.read_mask.evaluate_block_mask", change)


def swapped(block_mask, query, key_length):
    """Ask `mask_mod` with queries and keys swapped."""
    return evaluate_block_mask(block_mask, query, key_length).transpose(-1, -2)


def without_documents(block_mask, query, key_length):
    """Read a causal mask without its documents."""
    T = query.shape[2]
    return torch.ones(1, 1, T, key_length, dtype=torch.bool).tril(key_length - T)


def by_identity():
    """Keep what a BlockMask was first evaluated to, whatever its function reads later."""
    kept = {}

    def evaluate(block_mask, query, key_length):
        return kept.setdefault(block_mask, evaluate_block_mask(block_mask, query, key_length))

    return evaluate


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *BIDIRECTIONAL, "bart"])
@torch.no_grad()
def test_padding_and_windows_give_the_results_of_eager(family, side, monkeypatch):
    found, expected = pair(family)
    batch = padded(tokens(), (5, 2), side)
    real = batch["attention_mask"].bool()
    if family not in DECODERS:
        del batch["position_ids"]  # these make their own
    if family == "bart":
        batch["decoder_input_ids"] = tokens(3, 7)
        real = torch.ones(3, 7, dtype=torch.bool)
    wanted = expected(**batch)[0][real]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RSA met")  # recognised, so linear
        assert relative_error(found(**batch)[0][real], wanted) < 1e-5
    if family in DECODERS or family == "bart" or side == "left":  # swapping a mask of both sides moves padding alone
        misread(monkeypatch, swapped)
        assert relative_error(found(**batch)[0][real], wanted) > FAR


@pytest.mark.parametrize(
    ("cache", "pieces"),
    # Static caches change the offset that a mask_mod has captured, so chunks see ahead in the plain model too.
    [("dynamic", "cached"), ("dynamic", "chunked prefill"), ("static", "token by token")],
)
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_cached_runs_agree_with_the_whole_text(family, cache, pieces, monkeypatch):
    found, expected = pair(family)
    batch = padded(tokens(3, 14), (4, 1))
    real = batch["attention_mask"].bool()
    wanted = uncached(expected, batch)[real]

    def gap():
        return relative_error(in_pieces(found, batch, PIECES[pieces], CACHES[cache](found))[real], wanted)

    assert gap() < 1e-5
    break_mask(monkeypatch, forgets_the_offset)
    assert gap() > FAR


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_packed_documents_give_the_results_of_single_ones(family, monkeypatch):
    found, expected = pair(family)
    lengths = [6, 1, 9, 4]
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([expected(part)[0] for part in ids.split(lengths, 1)], 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RSA met")
        assert relative_error(found(ids, position_ids=positions, use_cache=False)[0], alone) < 1e-5
    misread(monkeypatch, without_documents)
    assert relative_error(found(ids, position_ids=positions, use_cache=False)[0], alone) > FAR


@torch.no_grad()
def test_documents_that_change_in_place_are_read_anew(monkeypatch):
    found, expected = pair("llama", "sdpa")
    ids, documents = tokens(3), torch.zeros(LENGTH, dtype=torch.long)
    # One mask for all rows.
    block_mask = create_block_mask(
        lambda b, h, q, k: (k <= q) & (documents[q] == documents[k]), None, None, LENGTH, LENGTH, device="cpu"
    )

    def gap(start):
        t = torch.arange(LENGTH)
        documents.copy_(t >= start)
        visible = (t <= t[:, None]) & (documents[:, None] == documents)
        wanted = expected(ids, attention_mask=visible.expand(3, 1, -1, -1), use_cache=False)[0]
        return relative_error(found(ids, attention_mask=block_mask, use_cache=False)[0], wanted)

    assert max(gap(LENGTH), gap(4), gap(9)) < 1e-5
    misread(monkeypatch, by_identity())
    assert gap(4) < 1e-5
    assert gap(9) > FAR
    misread(monkeypatch, without_documents)
    assert gap(4) > FAR


@pytest.mark.parametrize("prefill", [LENGTH, LENGTH - 4])
@pytest.mark.parametrize("blocks_know", [True, False])
@torch.no_grad()
def test_a_mask_function_that_looks_at_heads(blocks_know, prefill, monkeypatch):
    # Head h sees h + 2 positions back. Without H, the blocks do not know of heads, but the function does.
    found, expected = pair("llama", "sdpa")
    ids = tokens()
    t, reach = torch.arange(LENGTH), torch.arange(8)[:, None, None] + 2
    visible = ((t <= t[:, None]) & (t > t[:, None] - reach))[None].expand(3, -1, -1, -1)

    def mask_of(start, stop):
        def seen(b, h, q, k):
            return (k <= q + start) & (k > q + start - h - 2)

        return create_block_mask(seen, 3, 8 if blocks_know else None, stop - start, stop, device="cpu")

    def logits(model, flex):
        cache, rows = DynamicCache(config=model.config), []
        for start, stop in [(0, prefill), *((n, n + 1) for n in range(prefill, LENGTH))]:
            mask = mask_of(start, stop) if flex else visible[:, :, start:stop, :stop]
            rows.append(model(ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits)
        return torch.cat(rows, 1)

    wanted = logits(expected, False)
    with pytest.warns(UserWarning, match="quadratic"):
        assert relative_error(logits(found, True), wanted) < 1e-5
    misread(monkeypatch, lambda *args: evaluate_block_mask(*args)[:, :1])
    assert relative_error(logits(found, True), wanted) > FAR


@pytest.mark.parametrize("family", ["llama", "gemma3", "modernbert"])
def test_gradients_of_training_are_those_of_eager(family, monkeypatch):
    found, expected = pair(family)
    batch = padded(tokens(), (5, 2), "right")
    if family == "modernbert":
        del batch["position_ids"]
    real = batch["attention_mask"].bool()
    weights = torch.randn(real.sum(), found(**batch)[0].shape[-1])

    def gradients(model):
        model.zero_grad()
        (model(**batch)[0][real] * weights).sum().backward()
        return torch.cat([p.grad.flatten() for n, p in model.named_parameters() if ".rsa." in n or "embed" in n])

    wanted = gradients(expected)
    assert relative_error(gradients(found), wanted) < 1e-4
    misread(monkeypatch, lambda mask, query, S: torch.eye(S, dtype=torch.bool)[None, None])
    assert relative_error(gradients(found), wanted) > FAR
