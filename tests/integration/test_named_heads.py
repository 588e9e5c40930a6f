"""Plans that name single heads: whole models against dense P, and patching, saving and adapters with such plans."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from families import FAMILIES, PAD, VOCAB, build, build_language_model
from model_state import assert_same_state, state_of
from references import equation_4, relative_error
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, is_patched, patch_model
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import boolean_mask, lags

# The last layer of each model has none of the first heads, and a single one; groups of grouped values are incomplete.
HEADS = (
    HeadConfig(0, 1, "regular", decay=0.9, gate=0.4),
    HeadConfig(0, 2, "sin", decay=0.8, gate=0.5, theta=0.7, dilation=2),
    HeadConfig(0, 6, "regular", decay=-0.6, gate=0.7, dilation=3),
    HeadConfig(0, 7, "cos", decay=0.95, gate=0.3, theta=-2.0),
    HeadConfig(1, 5, "cos", decay=0.7, gate=0.6, theta=0.4),
)
NAMED = RSAConfig(heads=HEADS)


def padded_inputs(family):
    ids = torch.randint(3, VOCAB, (2, 13))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[mask == 0] = PAD
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"decoder_input_ids": torch.randint(3, VOCAB, (2, 9))} if family == "t5" else {})


def dense(shift=0):
    """Eq. 4 by the explicit P; `shift` puts the recurrence on other heads."""

    def forward(self, attention, value, mask):
        heads = [(head + shift) % attention.shape[2] for head in self.spec.heads]
        masks = {"query_offset": mask.query_offset, "visible": boolean_mask(mask, lags(mask, value.device))}
        return equation_4(self, attention, value, heads=heads, causal=mask.causal, **masks)

    return forward


@pytest.mark.parametrize("backend", ["pytorch", "cpp"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "modernbert"])
@torch.no_grad()
def test_a_model_agrees_with_dense_p(family, backend, monkeypatch):
    if backend == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", backend)
    model, batch = patch_model(build(family), NAMED), padded_inputs(family)
    real = slice(None) if family == "t5" else batch["attention_mask"].bool()
    found = model(**batch).last_hidden_state[real]
    monkeypatch.setattr(RSAHeads, "forward", dense())
    assert relative_error(found, model(**batch).last_hidden_state[real]) < 1e-5
    monkeypatch.setattr(RSAHeads, "forward", dense(shift=1))
    assert relative_error(found, model(**batch).last_hidden_state[real]) > 1e-2


@torch.no_grad()
def test_a_saved_model_has_the_same_heads(tmp_path):
    model, batch = patch_model(build_language_model("llama"), NAMED), padded_inputs("llama")
    model.model.layers[0].self_attn.rsa.mu += 0.05
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())["rsa"]
    assert content["format_version"] == 2  # which rsa_hf 0.1 refuses
    assert set(content["plan"]) == {"layers", "causal", "parameter_scale", "gate_per_head", "heads"}
    for auto in (AutoModelForCausalLM, AutoModel):
        loaded = auto.from_pretrained(tmp_path)
        expected = model(**batch)[0] if auto is AutoModelForCausalLM else model.model(**batch)[0]
        assert torch.equal(loaded(**batch)[0], expected)
        assert patch_model(loaded, NAMED) is loaded


@pytest.mark.parametrize("config", [RSAConfig(heads=()), {"heads": []}])
def test_a_plan_without_heads_leaves_a_model_plain(config, caplog):
    model = build("gpt2")
    before = state_of(model)
    assert patch_model(model, config) is model
    assert not is_patched(model)
    assert_same_state(model, before)
    assert "stays without recurrence" in caplog.text
    patch_model(model, NAMED)
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model, config)
