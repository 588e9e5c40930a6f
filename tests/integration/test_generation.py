"""Cached, chunked and uncached runs agree, with padding, and broken RSA does not."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from broken import break_mask, farthest, forgets_the_offset
from families import ATTENTIONS, DECODERS, FULL_PLAN, MORE_CONFIGS, VOCAB, WINDOWED, build_language_model, widen
from rsa_hf import patch_model
from texts import CACHES, PIECES, difference, padded_batch, uncached


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", [*DECODERS, *WINDOWED])
@torch.no_grad()
def test_cached_chunked_and_uncached_agree(family, attention, cache, pieces, monkeypatch):
    model = patch_model(build_language_model(family, attention), FULL_PLAN)
    inputs = padded_batch()
    assert difference(model, inputs, pieces, CACHES[cache](model)) <= 1e-5
    break_mask(monkeypatch, forgets_the_offset)
    assert difference(model, inputs, pieces, CACHES[cache](model)) > 1e-3


@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_sdpa_registered_under_another_name_keeps_its_alignment(cache, monkeypatch):
    # As transformers' documentation registers attention functions. Without padding, the first tokens of a static cache
    # come without a mask, which then has the alignment of sdpa.
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setitem(interface._global_mapping, "own_sdpa", interface()["sdpa"])
    model = patch_model(build_language_model("llama", "own_sdpa"), FULL_PLAN)
    inputs = {name: rows[2:] for name, rows in padded_batch().items()}
    assert difference(model, inputs, PIECES["cached"], CACHES[cache](model)) <= 1e-5


@pytest.mark.filterwarnings("ignore:RSA met")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_tokens_of_an_image_that_see_ahead_agree_with_and_without_a_cache(attention, cache, monkeypatch):
    """A prompt of Gemma 3 with images, whose tokens see all of their image. Text is causal."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=MORE_CONFIGS["gemma3"]().to_dict(),
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
    )
    model = widen(Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention))
    patch_model(model, FULL_PLAN)
    inputs = padded_batch()
    del inputs["position_ids"]
    real, images = inputs["attention_mask"].bool(), torch.zeros_like(inputs["input_ids"])
    images[:, 5:9], images[0, 11:13] = 1, 1
    expected = uncached(model, {**inputs, "token_type_ids": images})

    def gap():
        past = CACHES[cache](model.base_model.language_model)
        found = model(**inputs, token_type_ids=images, past_key_values=past).logits
        return float((found - expected)[real].abs().max())

    assert gap() <= 1e-5
    assert float((uncached(model, inputs) - expected)[real].abs().max()) > 1e-2  # images do see ahead
    if cache == "static":
        monkeypatch.setattr("rsa_hf.ops.read_mask.query_position", farthest)
        assert gap() > 1e-2
