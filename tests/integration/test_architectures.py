"""Models beside transformers' attention interface: each layer against dense P, and each model as a whole."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

import flash_stand_in
from architectures import (
    ADAPTED,
    CAUSAL,
    PADDED,
    WINDOW,
    accepted,
    attention_modules,
    build_adapted,
    output_from,
    values_from,
)
from families import FULL_PLAN, inputs, tokens
from model_state import assert_refused
from references import equation_4, relative_error
from rsa_hf import RSAConfig, RSAHeads, patch_model, unpatch_model
from texts import PIECES, difference, padded_batch, uncached

PLAN = RSAConfig(**FULL_PLAN)


def padded_inputs(name):
    return inputs(name, padding=3 if name in PADDED else None)


# --- one layer, against dense P -------------------------------------------------------------------------------------


def record_calls(modules):
    """Record the input, the residual (Bloom's second argument) and the output of each call of the modules."""
    calls = []

    def hook(module, args, keywords, output):
        states = args[0] if args else keywords["hidden_states"]
        calls.append((states, args[1] if len(args) > 1 else None, output[0]))

    for module in modules:
        module.register_forward_hook(hook, with_kwargs=True)
    return calls


def dense_mix(module, weights, value, **masks):
    """{(1 − g) A + g P} V for the RSA heads (paper, eq. 4), A V for the plain ones, with both T×S matrices."""
    return equation_4(module.rsa, torch.einsum("bhts,bshd->bthd", weights, value), value.transpose(1, 2), **masks)


def layer_error(name, module, call, weights, value, real, **masks):
    states, residual, output = call
    mixed = dense_mix(module, weights, value, **masks)
    return relative_error(output[real], output_from(name, module, states, residual, mixed)[real])


@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_each_layer_is_equation_4(name, recwarn):
    model = patch_model(build_adapted(name), PLAN)
    batch = padded_inputs(name)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    modules = attention_modules(model)
    calls = record_calls(modules)
    weights = model(**batch, output_attentions=True).attentions
    causal = name in CAUSAL or name == "xlnet_causal"
    real, S = mask.bool(), mask.shape[1]
    assert len(calls) == len(modules) == 2
    assert not [w for w in recwarn if "unsupported mask" in str(w.message)]  # padding takes the linear path
    for layer, (module, (states, residual, output)) in enumerate(zip(modules, calls, strict=True)):
        if name.startswith("xlnet"):
            states, output = states.transpose(0, 1), output.transpose(0, 1)
        value = values_from(name, module, states)
        error = partial(layer_error, name, module, (states, residual, output), weights[layer], value, real)
        masks = {"key_mask": mask, "causal": causal}
        if name == "gpt_neo" and layer == 0:
            masks["sliding_window"] = WINDOW
        assert error(**masks) <= 1e-5
        # No recurrence, another direction, and recurrence over padding or outside the window are caught.
        assert error(**masks, visible=torch.zeros(1, 1, S, S, dtype=torch.bool)) > 1e-2
        assert error(causal=not causal, key_mask=mask) > 1e-2
        if "attention_mask" in batch:
            assert error(**{**masks, "key_mask": None}) > 1e-4
        if "sliding_window" in masks:
            assert error(**{**masks, "sliding_window": None}) > 1e-4


# --- whole models ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_unpickling_wraps_the_class(monkeypatch):
    """In a process in which no such model was built or patched."""
    model, ids = patch_model(build_adapted("bloom"), PLAN), tokens()
    expected, dumped = model(ids)[0], pickle.dumps(model)
    connected = modeling_bloom.BloomAttention.forward
    monkeypatch.setattr(modeling_bloom.BloomAttention, "forward", connected.__wrapped__)
    with pytest.raises(RuntimeError, match="BloomAttention took no part"):
        model(ids)
    assert torch.equal(pickle.loads(dumped)(ids)[0], expected)


@pytest.mark.parametrize("name", ["bloom", "codegen", "deberta_v2", "falcon", "gptj", "mpt"])
@torch.no_grad()
def test_lora_and_rsa_merge_to_the_same_outputs(name):
    model, batch = patch_model(build_adapted(name), PLAN), padded_inputs(name)
    config = LoraConfig(target_modules="all-linear", modules_to_save=["rsa"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    found = adapted(**batch)[0]
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert isinstance(attention_modules(merged)[0].rsa, RSAHeads)
    # If LoRA's half of the projection got the output of attention without the recurrence, the two would differ.
    assert relative_error(merged(**batch)[0], found) <= 1e-5
    assert relative_error(unpatch_model(merged)(**batch)[0], found) > 1e-2


@pytest.mark.parametrize("name", ["deberta_v2", "mpt", "openai"])
@torch.no_grad()
def test_texts_that_vmap_maps_over_give_what_a_batch_gives(name):
    model, batch = patch_model(build_adapted(name, attn_implementation="eager"), PLAN), padded_inputs(name)
    mapped = torch.func.vmap(lambda ids, mask: model(ids[None], attention_mask=mask[None])[0][0])
    assert torch.allclose(mapped(*batch.values()), model(**batch)[0], atol=1e-5)


@pytest.mark.parametrize("patched_under", ["sdpa", "eager"])
@torch.no_grad()
def test_upcast_attention_keeps_its_recurrence_under_eager_attention(patched_under):
    model, batch = build_adapted("gpt2_upcast"), padded_inputs("gpt2_upcast")
    real, plain = batch["attention_mask"].bool(), model(**batch)[0]
    model.set_attn_implementation(patched_under)
    patch_model(model, PLAN)
    model.set_attn_implementation("sdpa")
    expected = model(**batch)[0]
    model.set_attn_implementation("eager")
    assert relative_error(model(**batch)[0][real], expected[real]) <= 1e-5
    assert relative_error(plain[real], expected[real]) > 1e-2


@pytest.mark.parametrize("in_generate", [False, True])
@torch.no_grad()
def test_memories_and_both_streams_are_equation_4(in_generate, monkeypatch):
    model = patch_model(build_adapted("xlnet"), PLAN)
    T, M = 6, 5
    mems = model(tokens(length=M), use_mems=True).mems
    ids = tokens(length=T)
    # A random prediction order, or a last token that none sees; two targets, and padding.
    order = torch.stack([torch.randperm(T) for _ in range(2)])
    perm_mask = (order[:, :, None] <= order[:, None, :]).float()
    if in_generate:
        perm_mask = (torch.arange(T) == T - 1).float().expand(2, T, T)
    mask = torch.ones(2, T)
    mask[1, :2] = 0
    targets = torch.zeros(2, 2, T)
    targets[:, 0, 3], targets[:, 1, 5] = 1, 1
    module, streams = model.layer[0].rel_attn, []
    core = type(module).rel_attn_core

    def record(self, q, k, v, r, **keywords):
        out = core(self, q, k, v, r, **keywords)
        if self is module:
            streams.append((v, *out))
        return out

    monkeypatch.setattr(type(module), "rel_attn_core", record)
    model(ids, attention_mask=mask, perm_mask=perm_mask, target_mapping=targets, mems=mems, output_attentions=True)
    assert len(streams) == 2
    hidden = perm_mask.bool() | (mask == 0)[:, None, :]
    visible = torch.cat([torch.ones(2, T, M, dtype=torch.bool), ~hidden], dim=2)[:, None]
    for v, mixed, weights in streams:
        dense = partial(dense_mix, module, weights.permute(2, 3, 0, 1), v.transpose(0, 1), causal=False)
        assert relative_error(mixed.transpose(0, 1), dense(visible=visible)) <= 1e-5
        assert relative_error(mixed.transpose(0, 1), dense(visible=visible | True)) > 1e-2


@pytest.mark.parametrize(
    ("name", "modeling", "kind"),
    [
        ("falcon", modeling_falcon, "FalconFlashAttention2"),
        *([("gptj", modeling_gptj, "GPTJFlashAttention2")] if "gptj" in ADAPTED else []),
        ("gpt_neo", modeling_gpt_neo, "GPTNeoFlashAttention2"),
    ],
)
@torch.no_grad()
def test_classes_for_flash_attention_give_the_results_of_sdpa(name, modeling, kind, monkeypatch):
    # GPT-Neo's flash attention has no windows, so all its layers are global here.
    changes = {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2} if name == "gpt_neo" else {}
    plain = build_adapted(name, language_model=True, **changes)
    flash_stand_in.install(monkeypatch)
    # The modules import it only where flash_attn is installed.
    monkeypatch.setattr(modeling, "_flash_attention_forward", _flash_attention_forward, raising=False)
    flash = type(plain)._from_config(copy.deepcopy(plain.config), attn_implementation="flash_attention_2").eval()
    flash.load_state_dict(plain.state_dict())
    patch_model(plain, PLAN)
    patch_model(flash, PLAN)
    assert {type(module).__name__ for module in attention_modules(flash)} == {kind}
    batch = accepted(plain, padded_batch())
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(uncached(flash, batch)[real], uncached(plain, batch)[real], rtol=1e-4, atol=1e-5)
    for pieces in PIECES.values():
        assert difference(flash, batch, pieces, DynamicCache(config=flash.config)) <= 1e-5


def test_a_method_with_other_parameters_is_refused(monkeypatch):
    model, cls = build_adapted("gpt_neo"), modeling_gpt_neo.GPTNeoSelfAttention
    original = inspect.unwrap(cls._attn)
    monkeypatch.setattr(cls, "_attn", lambda self, states: original(self, states))
    assert_refused(model, RuntimeError, r"transformers ≥ 5.17, < 5.25; installed is .*GPTNeoSelfAttention")


def test_a_projection_that_is_not_called_is_an_error():
    model = build_adapted("bloom", pretraining_tp=2, slow_but_exact=True)
    assert_refused(model, ValueError, "BloomAttention did not call dense.*slow_but_exact=False")
