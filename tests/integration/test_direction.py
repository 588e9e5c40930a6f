"""The direction of P is that of attention, wherever a model says it: P alone sees later tokens where attention does."""

import warnings
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Blip2QFormerConfig, Blip2QFormerModel, PatchTSTConfig, PatchTSTModel
from transformers.models.swin import modeling_swin

from architectures import build_adapted
from families import ENCODER_DECODERS, VOCAB, build, build_language_model, effect_of_later_tokens, tokens, widen
from rsa_hf import RSAConfig, RSAHeads, patch_model
from texts import CACHES, padded, padded_batch

ALL_HEADS = RSAConfig(num_regular=4, num_cyclical_pairs=2, gate_init=30.0)  # P alone
build_with = partial(build_adapted, language_model=True)
NAMES = ["bloom", "codegen", "falcon", "gpt2", "gptj", "llama", "mpt"]


# A plain MPT cannot run with is_causal=False.
@pytest.mark.parametrize(("name", "causal"), [*((n, True) for n in NAMES), *((n, False) for n in NAMES if n != "mpt")])
def test_the_config_says_the_direction(name, causal, tmp_path):
    model = build_with(name) if causal else build_with(name, is_causal=False)
    attention = effect_of_later_tokens(model) > 0.01
    assert attention is not causal
    patch_model(model, ALL_HEADS)
    assert (effect_of_later_tokens(model) > 0.01) is attention
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB, (2, 10))
    assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["gpt_neo", "openai-gpt"])
def test_a_class_that_does_not_read_the_config_stays_causal(name):
    assert effect_of_later_tokens(patch_model(build_with(name, is_causal=False), ALL_HEADS)) == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_layers_that_look_both_ways_find_their_place_in_a_static_cache(attention, monkeypatch):
    model = build_with("llama", is_causal=False)
    model.set_attn_implementation(attention)
    patch_model(model, ALL_HEADS)
    batch = padded_batch()
    real = batch["attention_mask"].bool()

    def difference():
        caches = (CACHES[kind](model) for kind in ("static", "dynamic"))
        static, dynamic = (model(**batch, past_key_values=cache).logits[real] for cache in caches)
        return float((static - dynamic).abs().max())

    assert difference() < 1e-4
    # As if the queries were the last of all slots.
    monkeypatch.setattr("rsa_hf.ops.read_mask.query_position", lambda visible, T, S, *_: S - T)
    assert difference() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gptj", "megatron_bert", "xlnet"])
def test_padding_in_probe_inputs_does_not_hide_the_direction(name, side):
    model, batch = build_adapted(name), padded(tokens(2, 8), (2, 4), side)
    model.set_attn_implementation("eager")
    patch_model(model, ALL_HEADS, probe_inputs={key: batch[key] for key in ("input_ids", "attention_mask")})
    assert {heads.spec.causal for heads in model.modules() if isinstance(heads, RSAHeads)} <= {None, name in NAMES}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [(1,), (4, 4, 1)])
def test_a_last_token_on_its_own_does_not_hide_the_direction(sizes, attention):
    """As in the last stage of a small image, or the last chunk of a recording."""
    model = build("bert", attention)
    chunks = torch.block_diag(*(torch.ones(size, size) for size in sizes))[None, None] > 0
    mask = chunks if attention == "sdpa" else torch.zeros(chunks.shape).masked_fill(~chunks, -1e9)
    probe = {"input_ids": torch.ones(1, sum(sizes), dtype=torch.long), "attention_mask": mask}
    patch_model(model, ALL_HEADS, probe_inputs=probe)
    assert {heads.spec.causal for heads in model.modules() if isinstance(heads, RSAHeads)} == {None}
    assert effect_of_later_tokens(model) > 0.01


@pytest.mark.parametrize("name", ["llama", "openai-gpt"])
def test_the_plan_cannot_show_tokens_that_attention_hides(name):
    assert effect_of_later_tokens(patch_model(build_with(name), {**ALL_HEADS.to_dict(), "causal": False})) == 0


def test_a_keyword_says_the_direction_of_one_call():
    model = patch_model(build_with("xglm"), ALL_HEADS)
    assert effect_of_later_tokens(model, is_causal=False) > 0.01
    assert effect_of_later_tokens(model) == 0


def test_the_control_that_believes_the_table_sees_no_later_token(monkeypatch):
    monkeypatch.setattr("rsa_hf.integration.trial.direction_shown", lambda output, stated: True)
    monkeypatch.setattr(
        RSAHeads, "model_config", property(lambda self: None, lambda self, config: None), raising=False
    )
    model = build_with("falcon", is_causal=False)
    assert effect_of_later_tokens(model) > 0.01
    with pytest.warns(UserWarning, match="unsupported mask"):
        assert effect_of_later_tokens(patch_model(model, ALL_HEADS)) == 0


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_probes_of_equal_lengths_put_no_heads_on_cross_attention(family, tmp_path):
    ids = torch.randint(3, VOCAB, (2, 10))
    model = build_language_model(family)
    patch_model(model, RSAConfig(num_regular=1), probe_inputs={"input_ids": ids, "decoder_input_ids": ids})
    names = [name for name, module in model.named_modules() if "rsa" in module._modules]
    assert len(names) == 4
    assert not any("EncDec" in name or "encoder_attn" in name for name in names)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    inputs = {"input_ids": ids[:, :5], "decoder_input_ids": ids}  # more queries than keys in cross-attention
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("sound", [(1, 6, 32), (2, 4, 32)])
def test_a_module_inside_cross_attention_gets_no_heads(sound):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = Blip2QFormerConfig(**sizes, hidden_size=32, encoder_hidden_size=32)
    probe = {"query_embeds": torch.randn(1, 6, 32), "encoder_hidden_states": torch.randn(sound)}
    model = patch_model(Blip2QFormerModel(config), RSAConfig(num_regular=1), probe_inputs=probe)
    assert [name.split(".")[3] for name in model.config.rsa["modules"]] == ["attention", "attention"]


def test_attention_over_channels_gets_no_heads():
    model = PatchTSTModel(PatchTSTConfig(channel_attention=True, d_model=32, num_input_channels=5))
    with pytest.raises(ValueError, match="PatchTSTModel has no attention that can be patched"):
        patch_model(model, RSAConfig(num_regular=1), probe_inputs={"past_values": torch.randn(1, 32, 5)})


@torch.no_grad()
def test_padding_between_the_tokens_of_an_encoder_is_a_warning():
    model, ids = patch_model(build("bert"), ALL_HEADS), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, attention_mask=mask)
    mask[1, 7] = 1
    with pytest.warns(UserWarning, match="padding between the tokens of a row"):
        model(ids, attention_mask=mask)


@pytest.mark.skipif(not hasattr(modeling_swin, "ALL_ATTENTION_FUNCTIONS"), reason="needs Swin on the interface")
@pytest.mark.filterwarnings("ignore:unsupported mask")
@torch.no_grad()
def test_the_edge_of_a_shifted_image_is_not_crossed():
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    model = widen(modeling_swin.SwinModel(modeling_swin.SwinConfig(**sizes, depths=[2], num_heads=[4])))
    pixels = torch.randn(1, 3, 32, 32)

    def reached():
        """Which parts of the image see its first corner."""
        other = pixels.clone()
        other[..., :2, :2] = 1
        return (model(pixels)[0] != model(other)[0]).any(-1)

    plain = reached()
    plan = RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=30.0)
    patch_model(model, plan, probe_inputs={"pixel_values": pixels})
    assert 1 < int(plain.sum()) < 256
    assert torch.equal(reached(), plain)
