"""Models that do not use transformers' attention interface: each against a dense reference, and as a whole model."""

import copy
import inspect
import math
import pickle
from dataclasses import replace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from test_generation import PIECES, batch, break_mask, difference, uncached
from transformers import (
    AutoModel,
    DecisionTransformerConfig,
    DynamicCache,
    JambaConfig,
    JambaModel,
    PreTrainedModel,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.decision_transformer.modeling_decision_transformer import DecisionTransformerGPT2Model
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

from architectures import (
    ADAPTED,
    CACHED,
    CAUSAL,
    HEADS,
    PADDED,
    STATIC,
    WINDOW,
    accepted,
    attention_modules,
    build_adapted,
    output_from,
    values_from,
)
from families import FULL_PLAN, VOCAB, widen
from references import relative_error
from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model, rem_matrix, unpatch_model
from test_patching import assert_refused, assert_same_state, state_of

PLAN = RSAConfig(**FULL_PLAN)
SHUT = RSAConfig(**{**FULL_PLAN, "gate_init": -math.inf})


def tokens(rows=2, length=11):
    return torch.randint(3, VOCAB, (rows, length))


def padded_tokens(name, rows=2, length=11, padding=3):
    ids = tokens(rows, length)
    if name not in PADDED:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


# --- one layer, against dense P -------------------------------------------------------------------------------------


def record_calls(modules):
    """The input, the residual (Bloom's second argument) and the output of each module, batch first for all."""
    calls = []

    def hook(module, args, keywords, output):
        states = args[0] if args else keywords["hidden_states"]
        calls.append((states, args[1] if len(args) > 1 else None, output[0]))

    for module in modules:
        module.register_forward_hook(hook, with_kwargs=True)
    return calls


def dense_mix(module, weights, value, visible, causal):
    """{(1 − g) A + g P} V for the RSA heads, A V for the plain ones (paper, eq. 4), with both T×S matrices."""
    rsa = module.rsa
    rates, (decay, theta) = rsa.rates(), rsa.per_head(rsa.rates())
    T, S = weights.shape[2:]
    P = rem_matrix(rsa.plan.kinds, decay, theta, rsa.plan.dilations, query_length=T, key_length=S, causal=causal)
    P = torch.where(visible, P, 0)
    R, gate = rsa.plan.num_rsa_heads, rates["gate"]
    both = torch.cat([(1 - gate) * weights[:, :R] + gate * P, weights[:, R:]], dim=1)
    return torch.einsum("bhts,bshd->bthd", both, value)


def visible_keys(mask, causal, window=None):
    """[B, 1, T, S] for as many queries as keys."""
    S = mask.shape[1]
    lags = torch.arange(S)[:, None] - torch.arange(S)
    seen = torch.ones(S, S, dtype=torch.bool) if not causal else lags >= 0
    if window is not None:
        seen = seen & (lags < window)
    return seen & mask.bool()[:, None, None, :]


@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_each_layer_is_the_dense_formula(name):
    model = patch_model(build_adapted(name), PLAN)
    inputs = padded_tokens(name)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    modules = attention_modules(model)
    calls = record_calls(modules)
    weights = model(**inputs, output_attentions=True).attentions
    causal = name in CAUSAL or name == "xlnet_causal"
    real = mask.bool()
    assert len(calls) == len(modules) == 2
    for layer, (module, (states, residual, output)) in enumerate(zip(modules, calls, strict=True)):
        if name.startswith("xlnet"):
            states, output = states.transpose(0, 1), output.transpose(0, 1)
        value = values_from(name, module, states)
        window = WINDOW if name == "gpt_neo" and layer == 0 else None

        def error(
            visible,
            causal=causal,
            module=module,
            layer=layer,
            value=value,
            states=states,
            residual=residual,
            output=output,
        ):
            mixed = dense_mix(module, weights[layer], value, visible, causal)
            return relative_error(output[real], output_from(name, module, states, residual, mixed)[real])

        assert error(visible_keys(mask, causal, window)) <= 1e-5
        # The other direction, and recurrence over padding or outside the window, are caught.
        assert error(visible_keys(mask, causal, window) & False) > 1e-2
        if causal:
            assert error(visible_keys(mask, False), causal=False) > 1e-2
        else:
            assert error(visible_keys(mask, True), causal=True) > 1e-2
        if "attention_mask" in inputs:
            assert error(visible_keys(torch.ones_like(mask), causal, window)) > 1e-4
        if window is not None:
            assert error(visible_keys(mask, causal)) > 1e-4


@pytest.mark.parametrize("name", PADDED)
@torch.no_grad()
def test_padding_stays_linear(name, recwarn):
    model = patch_model(build_adapted(name), PLAN)
    model(**padded_tokens(name))
    assert not [w for w in recwarn if "explicit P" in str(w.message)]


# --- whole models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_shut_gate_is_bitwise_the_plain_model_and_unpatching_is_exact(name, dtype):
    model, inputs = build_adapted(name).to(dtype), padded_tokens(name)
    before, expected = state_of(model), model(**inputs)[0]
    patch_model(model, SHUT)
    assert len(attention_modules(model)) == 2
    assert torch.equal(model(**inputs)[0], expected)
    unpatch_model(model)
    patch_model(model, PLAN)
    assert (model(**inputs)[0] - expected).abs().max() > 0.05
    unpatch_model(model)
    assert not is_patched(model)
    assert_same_state(model, before)
    assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_cached_chunked_and_uncached_agree(name, pieces, monkeypatch):
    model = patch_model(build_adapted(name, language_model=True), PLAN)
    inputs = accepted(model, batch())

    def gap():
        cache, logits, start = DynamicCache(config=model.config), [], 0
        for length in pieces:
            stop = start + length
            piece = {key: value[:, start:stop] for key, value in inputs.items() if key != "attention_mask"}
            seen = inputs["attention_mask"][:, :stop]
            logits.append(model(**piece, attention_mask=seen, past_key_values=cache).logits)
            start = stop
        real = inputs["attention_mask"].bool()
        return float((torch.cat(logits, 1)[real] - uncached(model, inputs)[real]).abs().max())

    assert gap() <= 1e-5

    def forgets_the_offset(mask):
        position = None if mask.query_position is None else torch.zeros_like(mask.query_position)
        return replace(mask, query_offset=0, query_position=position)

    break_mask(monkeypatch, forgets_the_offset)
    assert gap() > 1e-3


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, arguments) for name in CACHED for arguments in ({}, {"num_beams": 3})),
        *((name, {"cache_implementation": "static"}) for name in STATIC),
    ],
)
@torch.no_grad()
def test_generate_with_and_without_cache(name, arguments):
    model = patch_model(build_adapted(name, language_model=True), PLAN)
    inputs = padded_tokens(name)
    common = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = model.generate(**inputs, **common, **arguments)
    arguments = {key: value for key, value in arguments.items() if key != "cache_implementation"}
    assert torch.equal(cached, model.generate(**inputs, **common, **arguments, use_cache=False))


@pytest.mark.parametrize("name", ADAPTED)
def test_gradients_reach_every_rsa_parameter_with_and_without_checkpointing(name):
    model, ids = patch_model(build_adapted(name), PLAN), tokens()
    model.config.use_cache = False

    def gradients():
        model.zero_grad()
        model(ids)[0].square().mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    for key, _ in model.named_parameters():
        if ".rsa." in key:
            assert bool((expected[key] != 0).all()), key
    if not model.supports_gradient_checkpointing:
        return
    for module in model.modules():
        # Training mode, which checkpointing asks for, but no dropout.
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for reentrant in (False, True):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found = gradients()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_saved_and_loaded_gives_the_same_bits(name, tmp_path):
    model, inputs = patch_model(build_adapted(name), PLAN), padded_tokens(name)
    for module in model.modules():
        if isinstance(module, RSAHeads):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    expected = model(**inputs)[0]
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert torch.equal(loaded(**inputs)[0], expected)
    assert {key for key in loaded.state_dict() if ".rsa." in key} == {
        f"{module}.rsa.{parameter}"
        for module in model.config.rsa["modules"]
        for parameter in ("mu", "eta", "nu", "theta")
    }
    assert torch.equal(copy.deepcopy(model)(**inputs)[0], expected)


@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_a_pickle_connects_its_class_where_it_is_not_yet(whole, monkeypatch):
    model, ids = patch_model(build_adapted("bloom"), PLAN), tokens()
    expected = model(ids)[0]
    block = model.h[0]
    dumped = pickle.dumps(model if whole else block)
    connected = modeling_bloom.BloomAttention.forward
    # As in a process where no such model was built or patched.
    monkeypatch.setattr(modeling_bloom.BloomAttention, "forward", connected.__wrapped__)
    assert not torch.equal(model(ids)[0], expected)
    loaded = pickle.loads(dumped)
    assert modeling_bloom.BloomAttention.forward is not connected.__wrapped__
    if not whole:
        model.h[0] = loaded
    assert torch.equal((loaded if whole else model)(ids)[0], expected)


@torch.no_grad()
def test_a_dispatched_model_can_be_patched(monkeypatch):
    forward = inspect.unwrap(modeling_falcon.FalconAttention.forward)
    monkeypatch.setattr(modeling_falcon.FalconAttention, "forward", forward)
    model, ids = build_adapted("falcon"), tokens()
    twin = copy.deepcopy(model)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert modeling_falcon.FalconAttention.forward is forward  # a plain model's class is left alone
    patch_model(model, PLAN)
    assert torch.equal(model(ids)[0], patch_model(twin, PLAN)(ids)[0])


@pytest.mark.parametrize("name", ["bloom", "codegen", "deberta_v2", "falcon", "gptj", "mpt"])
@torch.no_grad()
def test_lora_beside_rsa(name):
    model, inputs = patch_model(build_adapted(name), PLAN), padded_tokens(name)
    config = LoraConfig(target_modules="all-linear", modules_to_save=["rsa"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    found = adapted(**inputs)[0]
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert isinstance(attention_modules(merged)[0].rsa, RSAHeads)
    # Were LoRA's half of the projection given what attention gave, unmixed, the two would differ.
    assert relative_error(merged(**inputs)[0], found) <= 1e-5
    assert relative_error(unpatch_model(merged)(**inputs)[0], found) > 1e-2


# --- GPT-2: one setting, under eager attention alone ----------------------------------------------------------------


def build_with_upcast_attention(family):
    if family == "gpt2":
        return build_adapted("gpt2_upcast")
    config = DecisionTransformerConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=HEADS, bos_token_id=1, eos_token_id=2
    )
    config.reorder_and_upcast_attn = True
    return widen(DecisionTransformerGPT2Model._from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("way", ["patched under sdpa", "loaded", "patched under eager"])
@pytest.mark.parametrize("family", ["gpt2", "decision transformer"])
@torch.no_grad()
def test_upcast_attention_keeps_its_recurrence_under_eager_attention(family, way, tmp_path):
    model, inputs = build_with_upcast_attention(family), padded_tokens("gpt2_upcast")
    if not model._supports_sdpa:
        pytest.skip(f"this transformers has no sdpa for {type(model).__name__}, to compare with")
    real = inputs["attention_mask"].bool()
    plain = model(**inputs)[0]
    if way != "patched under eager":
        model.set_attn_implementation("sdpa")
    patch_model(model, PLAN)
    model.set_attn_implementation("sdpa")
    expected = model(**inputs)[0]
    if way == "loaded":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    model.set_attn_implementation("eager")
    assert relative_error(model(**inputs)[0][real], expected[real]) <= 1e-5
    assert relative_error(plain[real], expected[real]) > 1e-2


@torch.no_grad()
def test_cross_attention_of_gpt2_with_upcast_attention_is_left_alone():
    model = build_adapted("gpt2_upcast", add_cross_attention=True)
    inputs, states = padded_tokens("gpt2_upcast"), torch.randn(2, 11, 32)
    expected = model(**inputs, encoder_hidden_states=states)[0]
    patch_model(model, SHUT, probe_inputs={"input_ids": tokens(1, 6), "encoder_hidden_states": torch.randn(1, 9, 32)})
    assert model.config.rsa["modules"] == ["h.0.attn", "h.1.attn"]
    assert torch.equal(model(**inputs, encoder_hidden_states=states)[0], expected)


# --- XLNet: memories, two streams -----------------------------------------------------------------------------------


@torch.no_grad()
def test_memories_of_a_causal_xlnet_are_the_past():
    model, ids = patch_model(build_adapted("xlnet_causal"), PLAN), tokens(length=12)
    expected, found, mems = model(ids)[0], [], None
    for piece in ids.split([5, 4, 1, 2], dim=1):
        out = model(piece, mems=mems, use_mems=True)
        found.append(out.last_hidden_state)
        mems = out.mems
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_memories_and_both_streams_are_the_dense_formula(monkeypatch):
    model = patch_model(build_adapted("xlnet"), PLAN)
    T, M = 6, 5
    mems = model(tokens(length=M), use_mems=True).mems
    ids = tokens(length=T)
    # A random order of prediction, two targets, and padding.
    order = torch.stack([torch.randperm(T) for _ in range(2)])
    perm_mask = (order[:, :, None] <= order[:, None, :]).float()
    mask = torch.ones(2, T)
    mask[1, :2] = 0
    targets = torch.zeros(2, 2, T)
    targets[:, 0, 3], targets[:, 1, 5] = 1, 1
    module, streams = model.layer[0].rel_attn, []
    core = type(module).rel_attn_core

    def record(self, q, k, v, r, **keywords):
        out = core(self, q, k, v, r, **keywords)
        if self is module:
            streams.append((v, keywords["attn_mask"], *out))
        return out

    monkeypatch.setattr(type(module), "rel_attn_core", record)
    model(ids, attention_mask=mask, perm_mask=perm_mask, target_mapping=targets, mems=mems, output_attentions=True)
    assert len(streams) == 2
    hidden = perm_mask.bool() | (mask == 0)[:, None, :]
    visible = torch.cat([torch.ones(2, T, M, dtype=torch.bool), ~hidden], dim=2)[:, None]
    for v, _, mixed, weights in streams:
        expected = dense_mix(module, weights.permute(2, 3, 0, 1), v.transpose(0, 1), visible, causal=False)
        assert relative_error(mixed.transpose(0, 1), expected) <= 1e-5
        broken = dense_mix(module, weights.permute(2, 3, 0, 1), v.transpose(0, 1), visible | True, causal=False)
        assert relative_error(mixed.transpose(0, 1), broken) > 1e-2


# --- flash attention, with a stand-in for its kernel ----------------------------------------------------------------


def flash_stand_in(query, key, value, attention_mask, query_length, is_causal, softmax_scale=None, **_):
    """What the kernel gives for [B, T or S, H or Hkv, D] and a 2-D mask or none."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    T, S = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    hidden = torch.arange(S) > (S - T + torch.arange(T))[:, None] if is_causal else torch.zeros(T, S, dtype=torch.bool)
    if attention_mask is not None:
        hidden = hidden | ~attention_mask[:, None, None, :].bool()
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, torch.finfo(query.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "modeling", "kind"),
    [
        ("falcon", modeling_falcon, "FalconFlashAttention2"),
        ("gptj", modeling_gptj, "GPTJFlashAttention2"),
        ("gpt_neo", modeling_gpt_neo, "GPTNeoFlashAttention2"),
    ],
)
@torch.no_grad()
def test_flash_attention_s_own_classes(name, modeling, kind, monkeypatch):
    # GPT-Neo's flash attention knows no windows, so all its layers are global here.
    changes = {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2} if name == "gpt_neo" else {}
    plain = build_adapted(name, language_model=True, **changes)
    weights = plain.state_dict()
    monkeypatch.setattr(modeling, "_flash_attention_forward", flash_stand_in, raising=False)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *_, **__: name)
    config = copy.deepcopy(plain.config)
    config._attn_implementation = "flash_attention_2"
    flash = type(plain)(config).eval()
    flash.load_state_dict(weights)
    patch_model(plain, PLAN)
    patch_model(flash, PLAN)
    assert {type(module).__name__ for module in attention_modules(flash)} == {kind}
    inputs = accepted(plain, batch())
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(uncached(flash, inputs)[real], uncached(plain, inputs)[real], rtol=1e-4, atol=1e-5)
    for pieces in PIECES.values():
        assert difference(flash, inputs, pieces, DynamicCache(config=config)) <= 1e-5


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["renamed", "other parameters"])
def test_a_moved_method_is_named_and_nothing_is_installed(broken, monkeypatch):
    model, cls = build_adapted("gptj"), modeling_gptj.GPTJAttention
    original = inspect.unwrap(cls._attn)
    if broken == "renamed":
        monkeypatch.delattr(cls, "_attn")
    else:
        monkeypatch.setattr(cls, "_attn", lambda self, states: original(self, states))
    message = r"transformers ≥ 5.17, < 6; installed is .*GPTJAttention was expected to define _attn\(query"
    assert_refused(model, RuntimeError, message)
    assert not hasattr(vars(cls).get("_attn"), "_rsa_hf_architecture")
    # A plain model is built all the same.
    build_adapted("gptj")


def test_a_missing_attribute_is_named():
    model = build_adapted("bloom")
    del model.h[1].self_attention.num_heads
    assert_refused(
        model, RuntimeError, "BloomAttention was expected to have num_heads, dense, but num_heads is missing"
    )


def test_a_projection_that_is_not_called_is_noticed():
    model = build_adapted("bloom", pretraining_tp=2, slow_but_exact=True)
    assert_refused(model, ValueError, "BloomAttention did not call dense.*slow_but_exact=False")


@torch.no_grad()
def test_hybrids_are_patched_in_their_layers_of_softmax_attention():
    config = JambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        pad_token_id=0,
    )
    model, ids = JambaModel(config).eval(), tokens()
    expected = model(ids)[0]
    patch_model(model, SHUT)
    assert model.config.rsa["modules"] == ["layers.1.self_attn", "layers.3.self_attn"]
    assert torch.equal(model(ids)[0], expected)
