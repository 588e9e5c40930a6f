"""Plans that name single heads or leave lags free: whole models against dense P, saving, and adapters."""

import copy
import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

import rsa_hf.peft
from families import FAMILIES, build, build_language_model, inputs, move_rates
from model_state import assert_same_state, state_of
from references import equation_4, relative_error
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, is_patched, patch_model
from rsa_hf.ops.mask import boolean_mask, lags
from texts import PIECES, difference, padded_batch

# The last layer of each model has none of the first heads, and a single one; groups of grouped values are incomplete.
HEADS = (
    HeadConfig(0, 1, "regular", decay=0.9, gate=0.4),
    HeadConfig(0, 2, "sin", decay=0.8, gate=0.5, theta=0.7, dilation=2),
    HeadConfig(0, 6, "regular", decay=-0.6, gate=0.7, dilation=3),
    HeadConfig(0, 7, "cos", decay=0.95, gate=0.3, theta=-2.0),
    HeadConfig(1, 5, "cos", decay=0.7, gate=0.6, theta=0.4),
)
FREE_HEADS = (
    HeadConfig(0, 0, "regular", decay=0.0, gate=0.5, free_lags=(1.0, 0.0, 0.0)),  # a token shift
    HeadConfig(1, 1, "sin", decay=0.8, gate=0.4, theta=0.7),
    HeadConfig(1, 2, "cos", decay=0.6, gate=0.4, theta=2.0, free_lags=(-0.3, 0.8, 0.1)),
)
COUNTED = {"num_regular": 1, "num_dilated_cyclical_pairs": 1, "dilation": [2, 3], "gate_init": 0.2, "theta_init": 0.9}
WITH_HEADS = RSAConfig(heads=HEADS)
CONFIGS = {
    "named": WITH_HEADS,
    "named, free lags": RSAConfig(heads=FREE_HEADS, num_free_lags=3),
    "free lags": RSAConfig(**COUNTED, num_free_lags=2),
}


def dense(shift=0, late=0):
    """Eq. 4 by the explicit P; `shift` puts the recurrence on other heads, `late` the free lags on other lags."""

    def forward(self, attention, value, mask):
        heads = [(head + shift) % attention.shape[2] for head in self.spec.layout.heads]
        masks = {"query_offset": mask.query_offset, "visible": boolean_mask(mask, lags(mask, value.device))}
        changes = {"free_lags": lambda free: free.roll(late, -1)}
        return equation_4(self, attention, value, heads=heads, changes=changes, causal=mask.causal, **masks)

    return forward


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("named", family) for family in [*FAMILIES, "mistral", "modernbert"]),
        *((name, family) for name in ("named, free lags", "free lags") for family in ("gpt2", "llama", "roberta")),
    ],
)
@pytest.mark.usefixtures("cpu_backend")
@torch.no_grad()
def test_a_model_agrees_with_dense_p(name, family, monkeypatch):
    model = move_rates(patch_model(build(family), CONFIGS[name]))
    batch = inputs(family, padding=4)
    real = slice(None) if family == "t5" else batch["attention_mask"].bool()
    found = model(**batch).last_hidden_state[real]
    monkeypatch.setattr(RSAHeads, "forward", dense())
    assert relative_error(found, model(**batch).last_hidden_state[real]) < 1e-5
    for broken in [dense(shift=1), dense(late=1)] if "free lags" in name else [dense(shift=1)]:
        monkeypatch.setattr(RSAHeads, "forward", broken)
        assert relative_error(found, model(**batch).last_hidden_state[real]) > 1e-3


@torch.no_grad()
def test_cached_runs_with_free_lags_agree_with_the_whole_text():
    model = move_rates(patch_model(build_language_model("llama"), CONFIGS["named, free lags"]))
    assert difference(model, padded_batch(), PIECES["cached"], DynamicCache(config=model.config)) < 1e-4


@torch.no_grad()
def test_free_lags_start_as_the_papers():
    model, batch = build("llama"), inputs("llama", padding=3)
    paper = patch_model(copy.deepcopy(model), RSAConfig(**COUNTED))
    free = patch_model(model, CONFIGS["free lags"])
    torch.testing.assert_close(free(**batch)[0], paper(**batch)[0], rtol=1e-5, atol=1e-6)
    heads = free.layers[0].self_attn.rsa
    assert [heads.eta.numel(), heads.nu.numel(), heads.theta.numel(), heads.free_lags.numel()] == [1, 1, 1, 3 * 2]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_saved_model_and_an_adapter_have_the_same_heads(name, tmp_path):
    config, batch = CONFIGS[name], inputs("llama", padding=4)
    base = build_language_model("llama")
    model = move_rates(patch_model(copy.deepcopy(base), config))
    model.save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())["rsa"]
    # rsa_hf 0.1 refuses both, rsa_hf 0.2 the format of free lags.
    assert content["format_version"] == (3 if "free lags" in name else 2)
    if name == "named":
        assert set(content["plan"]) == {"layers", "causal", "parameter_scale", "gate_per_head", "heads"}
    for auto in (AutoModelForCausalLM, AutoModel):
        loaded = auto.from_pretrained(tmp_path / "model")
        expected = model(**batch)[0] if auto is AutoModelForCausalLM else model.model(**batch)[0]
        assert torch.equal(loaded(**batch)[0], expected)
        assert patch_model(loaded, config) is loaded
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for key, value in half.state_dict().items():
        assert ".rsa." not in key or torch.equal(value, model.state_dict()[key])  # no bit is rounded away
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = move_rates(rsa_hf.peft.get_peft_model(copy.deepcopy(base), lora, rsa_config=config))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = rsa_hf.peft.load(base, tmp_path / "adapter")
    assert torch.equal(loaded(**batch).logits, adapted(**batch).logits)


@pytest.mark.parametrize("config", [RSAConfig(heads=()), {"heads": []}])
def test_a_plan_without_heads_leaves_a_model_plain(config, caplog):
    model = build("gpt2")
    before = state_of(model)
    assert patch_model(model, config) is model
    assert not is_patched(model)
    assert_same_state(model, before)
    assert "stays without recurrence" in caplog.text
    patch_model(model, WITH_HEADS)
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model, config)
