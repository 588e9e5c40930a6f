"""patch_model and unpatch_model on whole models."""

import copy
import math

import pytest
import torch
import transformers
from torch.nn.utils import prune
from transformers import AutoModel, AutoModelForCausalLM, BertLMHeadModel, EncoderDecoderConfig, EncoderDecoderModel

from families import ATTENTIONS, CONFIGS, FAMILIES, FULL_PLAN, build, inputs, move_rates, tiny_config, tokens
from model_state import assert_refused, assert_same_state, state_of
from rsa_hf import RSAConfig, is_patched, patch_model, peft, unpatch_model
from rsa_hf.checks import examine
from rsa_hf.saved_plan import saved_plans


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_shut_gate_and_unpatching_give_the_plain_model_bit_for_bit(family, attention):
    model, batch, padded = build(family, attention), inputs(family), inputs(family, padding=3)
    before, expected, expected_padded = state_of(model), model(**batch)[0], model(**padded)[0]
    for gate in (-math.inf, 0.5):
        assert patch_model(model, RSAConfig(**{**FULL_PLAN, "gate_init": gate})) is model
        assert is_patched(model)
        found = model(**batch)[0]
        assert torch.equal(found, expected) if gate < 0 else (found - expected).abs().max() > 0.05
        assert torch.equal(model(**padded)[0], expected_padded) is (gate < 0)
        assert unpatch_model(model) is model
        assert not is_patched(model)
        assert_same_state(model, before)
        assert torch.equal(model(**batch)[0], expected)


def test_a_model_with_several_end_tokens_can_be_patched_and_checked():
    model = AutoModelForCausalLM.from_config(tiny_config("llama", eos_token_id=[1, 2, 3]))  # as Llama 3
    assert is_patched(patch_model(model))
    assert [name for verdict, name, _ in examine(model) if verdict == "FAIL"] == []


def test_patching_again_does_nothing_with_the_same_plan_and_is_refused_with_another():
    model = build("gpt2")
    patch_model(model, RSAConfig(**FULL_PLAN))
    with torch.no_grad():
        model.h[0].attn.rsa.mu.fill_(0.01)
    before = state_of(model)
    patch_model(model, RSAConfig(**FULL_PLAN))
    patch_model(model, dict(FULL_PLAN))
    with pytest.raises(ValueError, match=r"another plan \(.*gate_init: 0.5 → 1.0.*unpatch_model"):
        patch_model(model, RSAConfig(**{**FULL_PLAN, "gate_init": 1.0}))
    with pytest.raises(ValueError, match=r"modules: h.0.attn, h.1.attn → h.1.attn"):
        patch_model(model, RSAConfig(**FULL_PLAN, layers=[1]))
    assert_same_state(model, before)


def test_a_model_with_two_text_configs_is_probed_and_takes_adapters(tmp_path):
    sound = transformers.EncodecConfig(hidden_size=16, num_filters=4, codebook_size=64, codebook_dim=16)
    parts = {"text_encoder": CONFIGS["t5"](), "audio_encoder": sound, "decoder": tiny_config("musicgen_decoder")}
    config = transformers.MusicgenConfig(**{name: part.to_dict() for name, part in parts.items()})
    model = transformers.MusicgenForConditionalGeneration(config)
    peft.get_peft_model(copy.deepcopy(model), rsa_config=FULL_PLAN).save_pretrained(tmp_path)
    peft.load(model, tmp_path)
    assert len(model.config.rsa["modules"]) == 4


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_a_model_without_softmax_attention_is_refused(model_type):
    model = AutoModel.from_config(tiny_config(model_type))
    assert_refused(model, ValueError, rf"{type(model).__name__} has no attention .*into softmax self-attention")


def test_what_cannot_be_run_is_refused():
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        patch_model(torch.nn.Linear(2, 2))
    model = build("gpt2")
    with pytest.raises(ValueError, match=r"trial run of GPT2Model with tokens failed.*probe_inputs"):
        patch_model(model, probe_inputs={"tokens": torch.ones(1, 4)})


def test_a_model_whose_base_takes_hidden_states_is_run_as_a_whole(tmp_path):
    config = tiny_config("dinov3_vit", image_size=16, patch_size=4)
    model, given = AutoModel.from_config(config).eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}
    patch_model(model, RSAConfig(**FULL_PLAN), probe_inputs=given).save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**given)[0], model(**given)[0])


def test_rsa_heads_that_are_not_called_are_an_error(monkeypatch):
    # As without the hook on the attention interface: the heads would exist and learn nothing.
    monkeypatch.setattr("rsa_hf.integration.attention.mix_recurrence", lambda module, output, *args, **kw: output)
    assert_refused(build("gpt2"), RuntimeError, "h.0.attn, h.1.attn took no part")


def test_patching_changes_neither_the_training_mode_nor_random_numbers():
    model = build("gpt2").train()
    model.h[0].eval()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    patch_model(model)
    assert torch.equal(torch.rand(4), expected)
    assert model.training
    assert not model.h[0].training
    assert not model.h[0].attn.rsa.training
    assert model.h[1].attn.rsa.training


@pytest.mark.filterwarnings("ignore:the encoder of this BigBirdPegasusModel")
@torch.no_grad()
def test_a_trial_run_changes_no_module():
    """A block-sparse model switches to dense attention for good at its first short input."""
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    model = AutoModel.from_config(tiny_config("bigbird_pegasus", **sparse, encoder_layers=1, decoder_layers=1)).eval()
    ids = tokens(1, 40)

    def found():
        plain = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
        return [(n, id(m), type(m)) for n, m in model.named_modules()], plain, model(ids)[0]

    def assert_unchanged():
        modules, plain, output = found()
        assert (modules, plain) == before[:2]
        assert torch.equal(output, before[2])

    before = found()
    patch_model(model, RSAConfig(gate_init=-math.inf))
    assert model.config.rsa["modules"] == ["decoder.layers.0.self_attn"]
    assert torch.equal(model(ids)[0], before[2])
    unpatch_model(model)
    assert_unchanged()

    def fail(*_):
        raise RuntimeError("in the last module")

    handle = list(model.encoder.modules())[-1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="trial run of .* failed .*in the last module"):
        patch_model(model)
    handle.remove()
    assert_unchanged()
    # The control: a short input outside of `patch_model` does make it dense.
    model(ids[:, :8])
    assert found()[0] != before[0]


@torch.no_grad()
def test_unpatching_a_model_removes_the_plan_of_its_part(tmp_path):
    parts = [CONFIGS["bert"](), CONFIGS["bert"]()]
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).eval()
    before, batch = state_of(model), inputs("t5")
    expected = model(**batch)[0]
    patch_model(model.decoder, RSAConfig(**FULL_PLAN))
    assert unpatch_model(model) is model
    assert not is_patched(model)
    assert_same_state(model, before)
    assert "rsa" not in vars(model.decoder.config)
    model.save_pretrained(tmp_path / "plain")
    patch_model(model, RSAConfig(**FULL_PLAN))
    assert saved_plans(model.config) == [model.config.rsa]
    patched = model(**batch)[0]
    assert not torch.equal(patched, expected)
    model.save_pretrained(tmp_path / "patched")
    assert torch.equal(EncoderDecoderModel.from_pretrained(tmp_path / "patched")(**batch)[0], patched)


@torch.no_grad()
def test_unpatching_a_loaded_model_removes_the_plan_of_its_halves(tmp_path):
    # T5 gives each half a copy of its config, and a loaded config has the plan.
    patch_model(build("t5"), RSAConfig(**FULL_PLAN)).save_pretrained(tmp_path / "patched")
    model = unpatch_model(AutoModel.from_pretrained(tmp_path / "patched"))
    for part in (model, model.encoder, model.decoder):
        assert not saved_plans(part.config)
        part.save_pretrained(tmp_path / "plain")


def test_building_a_model_from_a_patched_config_warns(tmp_path, caplog):
    """Without the warning, a control that is meant to be plain has RSA heads unnoticed."""
    config = CONFIGS["gpt2"]()
    before = copy.deepcopy(config)
    model = patch_model(AutoModelForCausalLM.from_config(config), RSAConfig(**FULL_PLAN))
    model.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    copy.deepcopy(model)
    assert not is_patched(AutoModelForCausalLM.from_config(before))
    assert not caplog.records
    assert is_patched(AutoModelForCausalLM.from_config(config))
    [record] = caplog.records  # one for the model, none for its parts
    assert record.levelname == "WARNING" and "GPT2Model is built with RSA heads" in record.getMessage()
    unpatch_model(model)
    assert not is_patched(AutoModelForCausalLM.from_config(config))


@torch.no_grad()
@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_built_around_a_trained_one_keeps_its_gates_and_rates(loaded, tmp_path):
    encoder = move_rates(patch_model(AutoModel.from_config(CONFIGS["bert"]()), RSAConfig(**FULL_PLAN)))
    if loaded:
        encoder.save_pretrained(tmp_path)
        encoder = AutoModel.from_pretrained(tmp_path)
        encoder.encoder.layer[0].attention.self.rsa.mu = torch.nn.Parameter(torch.ones(1))  # not marked as initialised
    weights, batch = copy.deepcopy(encoder.state_dict()), inputs("bert")
    expected = encoder(**batch)[0]
    decoder = BertLMHeadModel(CONFIGS["bert"]())
    around = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    around.init_weights()
    assert all(torch.equal(value, weights[name]) for name, value in around.encoder.state_dict().items())
    assert torch.equal(around.encoder(**batch)[0], expected)


@torch.no_grad()
def test_output_attentions_are_the_softmax_weights():
    model, ids = build("gpt2", "eager"), inputs("gpt2")["input_ids"]
    expected = model(ids, output_attentions=True)
    patch_model(model, RSAConfig(**FULL_PLAN))
    found = model(ids, output_attentions=True)
    # The input of the first layer is the same. Its output is not.
    assert torch.equal(found.attentions[0], expected.attentions[0])
    assert not torch.allclose(found.last_hidden_state, expected.last_hidden_state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_quantised_model_can_be_patched(family):
    model = torch.ao.quantization.quantize_dynamic(build(family), {torch.nn.Linear}, torch.qint8)
    patch_model(model, RSAConfig(**FULL_PLAN))
    assert model(**inputs(family))[0].isfinite().all() and patch_model(model, RSAConfig(**FULL_PLAN)) is model


def test_a_forward_that_was_replaced_on_an_instance_is_named():
    model = build("llama")
    original = model.layers[1].self_attn.forward
    model.layers[1].self_attn.forward = lambda *args, **keywords: original(*args, **keywords)
    with pytest.raises(ValueError, match="LlamaAttention.*replaced on an instance"):
        patch_model(model)


@torch.no_grad()
def test_weights_that_a_hook_computes_are_patched_too():
    model, batch = build("llama"), inputs("llama")
    with torch.enable_grad():
        prune.random_unstructured(model.layers[0].self_attn.v_proj, "weight", 0.5)
    expected = model(**batch)[0]
    assert torch.equal(patch_model(model, RSAConfig(gate_init=-math.inf))(**batch)[0], expected)


def test_a_model_that_is_patched_in_inference_mode_can_be_trained():
    model = build("llama")
    with torch.inference_mode():
        patch_model(model, RSAConfig())
    model(**inputs("llama"))[0].sum().backward()
    assert model.layers[0].self_attn.rsa.mu.grad.abs().sum() > 0


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_what_was_compiled_before_is_compiled_again():
    model = AutoModel.from_config(tiny_config("bloom", n_layer=1)).eval()  # not through the attention interface
    compiled, ids = torch.compile(model, backend="eager"), inputs("gpt2")["input_ids"]
    plain = compiled(ids)[0]
    expected = patch_model(model, RSAConfig(**FULL_PLAN))(ids)[0]
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(compiled(ids)[0], expected)


def test_patching_reads_no_weight_of_a_linear_layer():
    """Patching a large model, or one whose weights are still on the disk, therefore takes no longer."""
    model = build("llama")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.fill_(torch.nan)
    hidden = []
    handle = model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    patch_model(model)
    handle.remove()
    assert is_patched(model)
    assert len(hidden) == 2  # trial runs
    assert all(bool(output.isfinite().all()) for output in hidden)
