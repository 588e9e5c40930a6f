"""Caches that drop keys are refused: P V counts distances in slots. Caches that keep what attention sees are not."""

from contextlib import nullcontext

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import flash_stand_in
import rsa_hf.integration.attention as hooks
from families import FULL_PLAN, patched, tiny_config, tokens, widen
from rsa_hf import RSAConfig, patch_model, unpatch_model
from survey import checks
from survey.tiny_models import build

LENGTH, KEPT = 8, [0, 1, 2, 6, 7]
REFUSED = "position 8.*slot 5.*dropped keys.*unpatch_model"


def after(count):
    return {"input_ids": tokens(2, count), "position_ids": torch.arange(LENGTH, LENGTH + count)[None]}


def compressed(model):
    """The cache of a text, of which a few keys are left in every layer without a window."""
    cache = DynamicCache(config=model.config)
    model(tokens(length=LENGTH), past_key_values=cache)
    for layer in cache.layers:
        if not layer.is_sliding:
            layer.keys, layer.values = layer.keys[:, :, KEPT], layer.values[:, :, KEPT]
    return cache


def by_lengths_alone(mask, positions):
    """A check that compares positions with the number of keys, instead of with the slots of the queries."""
    if positions.max() >= mask.key_length:
        raise ValueError("position 8, slot 5: dropped keys; unpatch_model")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("family", "attention"),
    # Gemma 3 has a window in every other layer, whose cache is whole.
    [("llama", "sdpa"), ("llama", "eager"), ("llama", "flash_attention_2"), ("gpt2", "sdpa"), ("gemma3", "sdpa")],
)
@torch.no_grad()
def test_a_compressed_cache_is_refused(family, attention, count, monkeypatch):
    flash_stand_in.install(monkeypatch)
    model = patched(family, attention).double()
    with pytest.raises(ValueError, match=REFUSED):
        model(**after(count), past_key_values=compressed(model))
    unpatch_model(model)
    assert model(**after(count), past_key_values=compressed(model)).logits.isfinite().all()


@torch.no_grad()
def test_positions_beyond_the_slots_of_a_static_cache_are_refused(monkeypatch):
    model = patched("llama")

    def run():
        cache = StaticCache(config=model.config, max_cache_len=20)
        model(tokens(2, 5), past_key_values=cache)
        model(**after(1), past_key_values=cache)

    with pytest.raises(ValueError, match=REFUSED):
        run()
    monkeypatch.setattr(hooks, "require_all_keys", by_lengths_alone)
    run()  # nothing is raised: there are more slots than positions


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("llama", "flash_attention_2"), ("gpt2", "sdpa")]
)
@pytest.mark.parametrize("case", ["prefix", "right", "answer", "left", "slots", "restarts"])
@torch.no_grad()
def test_padding_between_keys_is_refused_where_positions_do_not_count_it(family, attention, case, monkeypatch):
    flash_stand_in.install(monkeypatch)
    model, cache, mask = patched(family, attention), DynamicCache(), torch.ones(2, LENGTH + 4, dtype=torch.long)
    if case in ("answer", "restarts"):  # after a prompt that is padded on the right; packed rows
        mask[1, slice(5, 7) if case == "answer" else slice(10, 12)] = 0
        given = {"input_ids": tokens(2, LENGTH + 4)}
    elif case != "right":
        model(tokens(2, LENGTH), past_key_values=cache, attention_mask=mask[:, :LENGTH])
        mask[1, slice(LENGTH, LENGTH + 2) if case == "prefix" else slice(1)] = 0
        given = {"input_ids": tokens(2, 4)}
    else:  # a prompt that is padded on the right, and the first token after it
        mask[1, 9:11] = 0
        given = {"input_ids": tokens(2, 1)}
        model(tokens(2, LENGTH + 3), past_key_values=cache, attention_mask=mask[:, :-1])
    positions = mask.cumsum(1) - 1
    if case in ("slots", "restarts"):
        positions = torch.arange(LENGTH + 4).expand(2, -1) % (5 if case == "restarts" else LENGTH + 4)
    given |= {"attention_mask": mask, "position_ids": positions[:, cache.get_seq_length() :].clamp(min=0)}
    if case in ("left", "slots", "restarts"):
        assert model(**given, past_key_values=cache).logits.isfinite().all()
        return
    with pytest.raises(ValueError, match="padding between the tokens of a row"):
        model(**given, past_key_values=cache)


@pytest.mark.parametrize("family", ["falcon", "bloom"])
@torch.no_grad()
def test_padding_between_keys_is_refused_where_attention_knows_no_positions(family):
    model, mask = patch_model(build(family, "causal-lm").model, RSAConfig(num_regular=1)), torch.ones(2, LENGTH + 4)
    for hidden, count in ((slice(1), 4), (slice(1), 1), (slice(LENGTH, LENGTH + 2), 4), (slice(5, 7), 1)):
        mask[:], mask[1, hidden], cache, begun = 1, 0, DynamicCache(), LENGTH + 4 - count
        model(tokens(2, begun), past_key_values=cache, attention_mask=mask[:, :begun])
        with nullcontext() if hidden.start is None else pytest.raises(ValueError, match="padding between the tokens"):
            model(tokens(2, count), past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("cached", [0, 6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.filterwarnings("ignore:unsupported mask")
@torch.no_grad()
def test_texts_that_begin_alike_are_refused_in_one_row(attention, cached):
    model, ids = patched("llama", attention), tokens(1, 12)
    visible, positions = torch.ones(12, 12, dtype=torch.bool).tril()[None, None], torch.arange(12)[None]
    visible[..., 9:, 6:9] = False

    def run(positions):
        mask = visible if attention == "sdpa" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        cache = model(ids[:, :cached]).past_key_values if cached else None
        given = {"attention_mask": mask[:, :, cached:], "position_ids": positions[:, cached:]}
        return model(ids[:, cached:], **given, past_key_values=cache).logits

    assert run(positions).isfinite().all()  # the same mask of one text
    positions[:, 9:] -= 3
    with pytest.raises(ValueError, match="several texts that begin alike"):
        run(positions)


@pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers has no DeepSeek V3.2")
@pytest.mark.filterwarnings("ignore:unsupported mask")
@torch.no_grad()
def test_a_cache_whose_keys_are_selected_is_refused():
    case, ids = build("deepseek_v32", "causal-lm"), tokens(2, LENGTH)
    model = patch_model(case.model, RSAConfig(num_regular=1))
    expected = model(ids, use_cache=False).logits
    start = model(ids[:, :-1])
    found = model(ids[:, -1:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(found, expected[:, -1:], rtol=1e-4, atol=1e-4)
    for module in model.modules():
        if hasattr(module, "indexer"):
            module.indexer.index_topk = module.config.index_topk = 4
    start = model(ids[:, :-1])
    with pytest.raises(NotImplementedError, match="attends to 4 of 8 keys"):
        model(ids[:, -1:], past_key_values=start.past_key_values)
    unpatch_model(model)
    with checks.patched(case) as subject:  # without a cache, against the equation written out
        checks.check_values(subject)


REFERENCE_WINDOW = {"layer_types": ["reference_sliding_attention"] * 2, "sliding_window": 4}  # of UnlimitedOCR


@pytest.mark.parametrize(("family", "settings"), [("doge", {"keep_window_size": 4}), ("llama", REFERENCE_WINDOW)])
@torch.no_grad()
def test_a_cache_that_may_lack_keys_is_refused(family, settings):
    model, cache = patch_model(build(family, "causal-lm").model, RSAConfig(num_regular=1)), DynamicCache()
    vars(model.config).update(settings)
    model(tokens(2, 3), past_key_values=cache)
    model(tokens(2, 1), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="attends to 4 of 5 keys"):
        model(tokens(2, 1), past_key_values=cache)


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    return AutoModel.from_config(tiny_config("qwen2_vl_text", num_key_value_heads=2, rope_parameters=rope))


def roberta():
    return AutoModelForCausalLM.from_config(tiny_config("roberta", pad_token_id=1, is_decoder=True))


POSITIONS = {
    "from one": ("llama", torch.arange(1, 13)[None], True),
    "from two": ("llama", torch.arange(2, 14)[None], True),
    "RoBERTa's own": (roberta, torch.arange(2, 14)[None], True),
    "documents that restart": ("llama", torch.cat([torch.arange(9), torch.arange(3)])[None], False),
    # Several axes, which may run ahead, as of a video.
    "a video": (qwen2_vl, (torch.arange(12) * 3)[None, None].expand(3, 2, -1), False),
}


@pytest.mark.parametrize(("model", "positions", "run_ahead"), POSITIONS.values(), ids=POSITIONS)
@torch.no_grad()
def test_positions_that_are_not_slots_are_right(model, positions, run_ahead, monkeypatch):
    model = patched(model) if isinstance(model, str) else patch_model(widen(model()), FULL_PLAN)
    ids = tokens(2, 12)
    wanted = model(ids, position_ids=positions)[0]

    def logits():
        cache, rows = DynamicCache(config=model.config), []
        for start, stop in [(0, 9), (9, 11), (11, 12)]:
            piece = {"position_ids": positions[..., start:stop], "past_key_values": cache}
            rows.append(model(ids[:, start:stop], **piece)[0])
        return torch.cat(rows, 1)

    torch.testing.assert_close(logits(), wanted, rtol=1e-4, atol=1e-4)
    if run_ahead:
        monkeypatch.setattr(hooks, "require_all_keys", by_lengths_alone)
        with pytest.raises(ValueError, match="dropped keys"):
            logits()
