"""Flash and flex attention in whole models: each of their ways to pass a mask gives the results of sdpa and eager."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as integration
from transformers.masking_utils import flash_attention_mask

import flash_stand_in
import flex_stand_in
from broken import break_mask, forgets_the_offset, ignored, without_window
from families import ENCODERS, PAD, WINDOWED, build, build_language_model, patched, tokens
from models.tiny import values_and_gradients
from references import relative_error
from rsa_hf.ops.read_mask import evaluate_block_mask
from texts import CACHES, in_pieces, padded, uncached

FLASH, FLEX = "flash_attention_2", "flex_attention"
DECODERS = {FLASH: ["gpt2", "llama", *WINDOWED], FLEX: ["llama", *WINDOWED]}
BIDIRECTIONAL = [*ENCODERS, "modernbert"]  # ModernBERT has windows to both sides
CASES = [(FLASH, family) for family in [*DECODERS[FLASH], "roberta", "modernbert"]]
CASES += [(FLEX, family) for family in [*DECODERS[FLEX], *BIDIRECTIONAL, "bart"]]
LENGTH = 13
TOLERANCE, FAR = 1e-6, 0.01  # relative errors: of rounding, and of a misread mask
recognised = pytest.mark.filterwarnings("error:unsupported mask")  # so P V is linear


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    flash_stand_in.install(monkeypatch)
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", flex_stand_in.attention)
    with torch._dynamo.config.patch(disable=True):  # block masks are torch's, made without compiling
        yield


def pair(family, attention, reference="sdpa"):
    """The same patched model under the attention and under a reference.

    In float64: flash attention casts float32 to another dtype, and finds none in GPT-2. Eager attention then gives NaN
    for rows of padding.
    """
    base = build if family in BIDIRECTIONAL else build_language_model
    models = [patched(family, each, make=lambda *of: base(*of).double()) for each in (attention, reference)]
    assert [model.config._attn_implementation for model in models] == [attention, reference]
    return models


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize(("attention", "family"), CASES)
@recognised
@torch.no_grad()
def test_padding_and_windows_give_the_results_of_the_reference(attention, family, side, monkeypatch):
    found, expected = pair(family, attention, "sdpa" if side else "eager")
    batch = padded(tokens(3, LENGTH), (5, 2), side or "left")
    real = batch["attention_mask"].bool()
    if side is None:
        batch, real = {"input_ids": batch["input_ids"]}, real | True
    elif family not in DECODERS[FLASH]:
        del batch["position_ids"]  # these make their own
    if family == "bart":
        batch["decoder_input_ids"], real = tokens(3, 7), torch.ones(3, 7, dtype=torch.bool)
    wanted = expected(**batch)[0][real]
    assert relative_error(found(**batch)[0][real], wanted) < TOLERANCE
    is_windowed = family in WINDOWED or family == "modernbert"
    # A causal query sees no padding on its right.
    if is_windowed if side is None else side == "left" or family not in DECODERS[FLASH]:
        break_mask(monkeypatch, without_window if side is None else ignored)
        assert relative_error(found(**batch)[0][real], wanted) > FAR


@torch.no_grad()
def test_flex_attention_in_a_static_cache_without_padding_has_the_recurrence_of_the_whole_text(monkeypatch):
    # Its attention sees an empty slot: transformers' mask counts the new keys twice. Here P V stands alone.
    plan, ids = {"num_regular": 8, "gate_init": 30.0}, tokens(2, LENGTH)
    model = patched("llama", FLEX, plan=plan, make=lambda *of: build_language_model(*of).double())
    wanted = model(ids).logits[:, -1]

    def error():
        cache = CACHES["static"](model)
        model(ids[:, :-1], past_key_values=cache)
        return relative_error(model(ids[:, -1:], past_key_values=cache).logits[:, -1], wanted)

    assert error() < TOLERANCE
    monkeypatch.setattr("rsa_hf.ops.read_mask._is_late", lambda _: False)
    assert error() > FAR


def test_patching_runs_no_flex_attention(monkeypatch):
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", None)  # wrong for 8 tokens on a CPU
    assert patched("llama", FLEX).config._attn_implementation == FLEX


@pytest.mark.parametrize("masks", [flash_attention_mask, None])
@recognised
@torch.no_grad()
def test_flash_attention_by_another_name_has_windows_and_documents(masks, monkeypatch):
    found, expected = pair("mistral", FLASH)
    load = flash_utils.lazy_import_flash_attention
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda _, *args, **kw: load(FLASH, *args, **kw))
    monkeypatch.setitem(AttentionInterface._global_mapping, "a/kernel", AttentionInterface()[FLASH])
    if masks is not None:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "a/kernel", masks)
    found.config._attn_implementation_internal = "a/kernel"  # as for a kernel of the Hub
    ids, restarting = tokens(1, LENGTH), torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]

    def errors():
        for told in ({}, {"position_ids": restarting}):
            wanted = expected(ids, use_cache=False, **told).logits
            yield relative_error(found(ids, use_cache=False, **told).logits, wanted)

    assert max(errors()) < TOLERANCE
    monkeypatch.setattr("rsa_hf.integration.attention._WITH_WINDOWS", (masks,))
    assert min(errors()) > FAR


@pytest.mark.parametrize(
    ("attention", "family", "told_by"),
    [
        *((FLASH, family, "position_ids") for family in [*DECODERS[FLASH], "roberta"]),  # ModernBERT gets no positions
        *((FLASH, family, "cu_seq_lens_q") for family in [*DECODERS[FLASH], "roberta", "modernbert"]),
        *((FLEX, family, "position_ids") for family in DECODERS[FLEX]),
    ],
)
@recognised
@torch.no_grad()
def test_packed_documents_give_the_results_of_single_ones(attention, family, told_by, monkeypatch):
    found, expected = pair(family, attention)
    lengths = [6, 1, 9, 4]
    ids, ends = tokens(1, sum(lengths)), torch.tensor([0, *lengths]).cumsum(0).int()
    first = PAD + 1 if family == "roberta" else 0  # RoBERTa's positions start behind the padding index
    told = {"position_ids": torch.cat([torch.arange(first, first + n) for n in lengths])[None]}
    if family in DECODERS[FLASH]:
        told["use_cache"] = False
    if told_by == "cu_seq_lens_q":
        told |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        told |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    alone = torch.cat([expected(part)[0] for part in ids.split(lengths, 1)], 1)
    assert relative_error(found(ids, **told)[0], alone) < TOLERANCE
    break_mask(monkeypatch, ignored)
    assert relative_error(found(ids, **told)[0], alone) > FAR


@pytest.mark.parametrize(
    ("attention", "cache", "pieces", "padding"),
    [
        *((FLASH, cache, [4, 3, 1, 2, 1, 1, 1], padding) for cache in CACHES for padding in ((5, 2), ())),
        # Static caches change the offset that a mask_mod has captured, so chunks see ahead in the plain model too.
        *((FLEX, "dynamic", pieces, (5, 2)) for pieces in ([7, 1, 1, 1, 1, 1, 1], [3, 5, 3, 2])),
        (FLEX, "static", [1] * LENGTH, (5, 2)),
    ],
)
@pytest.mark.parametrize("family", DECODERS[FLASH])
@torch.no_grad()
def test_cached_runs_agree_with_the_whole_text(family, attention, cache, pieces, padding, monkeypatch):
    if family not in DECODERS[attention]:
        pytest.skip(f"{family} has no {attention}")
    found, expected = pair(family, attention)
    batch = padded(tokens(3, LENGTH), padding)
    real = batch["attention_mask"].bool()
    wanted = uncached(expected, batch)[real]

    def gap():
        return relative_error(in_pieces(found, batch, pieces, CACHES[cache](found))[real], wanted)

    assert gap() < TOLERANCE
    break_mask(monkeypatch, forgets_the_offset)
    assert gap() > FAR


@torch.no_grad()
def test_documents_of_a_block_mask_that_change_in_place_are_read_anew(monkeypatch):
    found, expected = pair("llama", FLEX)
    ids, documents = tokens(3, LENGTH), torch.zeros(LENGTH, dtype=torch.long)
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

    assert max(gap(LENGTH), gap(4), gap(9)) < TOLERANCE
    kept = {}  # the control keeps what a BlockMask was first evaluated to

    def by_identity(mask, attention, key_length):
        return kept.setdefault(mask, evaluate_block_mask(mask, attention, key_length))

    monkeypatch.setattr("rsa_hf.ops.read_mask.evaluate_block_mask", by_identity)
    assert gap(4) < TOLERANCE
    assert gap(9) > FAR


@pytest.mark.parametrize("family", ["llama", "gemma3", "modernbert"])
def test_gradients_of_training_are_those_of_sdpa(family, monkeypatch):
    found, expected = pair(family, FLEX)
    batch = padded(tokens(3, LENGTH), (5, 2))
    if family == "modernbert":
        del batch["position_ids"]
    real = batch["attention_mask"].bool()

    def gradients(model):
        found = values_and_gradients(model, model(**batch)[0][real])
        return torch.cat([value.flatten() for name, value in found.items() if ".rsa." in name or "embed" in name])

    wanted = gradients(expected)
    assert relative_error(gradients(found), wanted) < 1e-4
    break_mask(monkeypatch, ignored)
    assert relative_error(gradients(found), wanted) > FAR
