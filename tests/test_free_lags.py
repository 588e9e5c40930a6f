"""Models whose heads have free lags, against P written out."""

import copy
import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import rsa_hf.peft
from families import PAD, VOCAB, build, build_language_model
from references import double_loop, lag_weight, relative_error
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, patch_model, rsa_report
from rsa_hf.config import LayerSpec
from rsa_hf.ops.mask import boolean_mask, lags
from rsa_hf.plots import plot_rem

PAPER = {"num_regular": 1, "num_dilated_cyclical_pairs": 1, "dilation": [2, 3], "gate_init": 0.2, "theta_init": 0.9}
FREE = RSAConfig(**PAPER, num_free_lags=2)
NAMED = RSAConfig(
    heads=[
        HeadConfig(0, 0, "regular", decay=0.0, gate=0.5, free_lags=(1.0, 0.0, 0.0)),  # a token shift
        HeadConfig(1, 1, "sin", decay=0.8, gate=0.4, theta=0.7),
        HeadConfig(1, 2, "cos", decay=0.6, gate=0.4, theta=2.0, free_lags=(-0.3, 0.8, 0.1)),
    ],
    num_free_lags=3,
)


def padded_inputs():
    """Two rows of 9 tokens, one of them with padding on the left."""
    ids = torch.randint(PAD + 1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[0, :3] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def written_out(late=0):
    """A forward that computes P V in nested loops; with free lags that come too late it is wrong."""

    def forward(self, attention, value, mask, shard=None):
        rems, gate = self.rems_and_gate()

        def weight(described, rate, angle, step):
            kind, free = described
            place = step - 1 - late
            return free[place] if 0 <= place < len(free) else lag_weight(kind, rate, angle, step)

        tau = lags(mask, value.device)
        visible = boolean_mask(mask, tau).expand(len(value), 1, -1, -1)
        groups = attention.shape[2] // value.shape[1]
        keys = value[:, [head // groups for head in self.spec.heads]].double()
        sizes = (self.spec.dilations, mask.query_length, mask.query_offset, mask.causal)
        described = [*zip(self.spec.kinds, self.free_lags.view(len(gate), -1).double(), strict=True)]
        product = double_loop(keys, described, rems.decay, rems.theta, *sizes, visible, weight)
        mixed, places = attention.double().clone(), list(self.spec.heads)
        gate = gate[:, None]
        mixed[:, :, places] = (1 - gate) * mixed[:, :, places] + gate * product.transpose(1, 2)
        return mixed.to(attention.dtype)

    return forward


def moved(model):
    """Move every RSA parameter away from its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".rsa." in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
@pytest.mark.parametrize("backend", ["pytorch", "cpp"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta"])
@pytest.mark.parametrize("config", [FREE, NAMED], ids=["counted", "named"])
def test_a_model_computes_p_as_written_out(monkeypatch, family, config, backend):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", backend)
    model, batch = moved(patch_model(build(family), config)), padded_inputs()
    real = batch["attention_mask"].bool()
    found = model(**batch).last_hidden_state[real]
    monkeypatch.setattr(RSAHeads, "forward", written_out())
    assert relative_error(found, model(**batch).last_hidden_state[real]) < 1e-5
    monkeypatch.setattr(RSAHeads, "forward", written_out(late=1))
    assert relative_error(found, model(**batch).last_hidden_state[real]) > 1e-3


@torch.no_grad()
def test_free_lags_start_as_the_papers():
    model, batch = build("llama"), padded_inputs()
    paper = patch_model(copy.deepcopy(model), RSAConfig(**PAPER))
    free = patch_model(model, FREE)
    torch.testing.assert_close(free(**batch)[0], paper(**batch)[0], rtol=1e-5, atol=1e-6)
    heads = free.layers[0].self_attn.rsa
    assert [heads.eta.numel(), heads.nu.numel(), heads.theta.numel(), heads.free_lags.numel()] == [1, 1, 1, 3 * 2]


@torch.no_grad()
def test_generation_with_a_cache_agrees_with_none():
    model = moved(patch_model(build_language_model("llama"), NAMED))
    ids = padded_inputs()["input_ids"][:, -6:]
    cached, uncached = (
        model.generate(
            ids, max_new_tokens=12, do_sample=False, use_cache=use, return_dict_in_generate=True, output_scores=True
        )
        for use in (True, False)
    )
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.scores), torch.stack(uncached.scores), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("config", [FREE, NAMED], ids=["counted", "named"])
def test_a_saved_model_and_an_adapter_have_the_same_free_lags(tmp_path, config):
    base, batch = build_language_model("llama"), padded_inputs()
    model = moved(patch_model(copy.deepcopy(base), config))
    model.save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())["rsa"]
    assert content["format_version"] == 3  # which rsa_hf 0.1 and 0.2 refuse
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model")(**batch).logits, model(**batch).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).model.layers[1].self_attn.rsa
    assert torch.equal(half.free_lags, model.model.layers[1].self_attn.rsa.free_lags)  # no bit is rounded away
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = moved(rsa_hf.peft.get_peft_model(copy.deepcopy(base), lora, rsa_config=config).eval())
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = rsa_hf.peft.load(base, tmp_path / "adapter")
    assert torch.equal(loaded(**batch).logits, adapted(**batch).logits)


def test_the_report_and_the_picture_have_the_free_lags(tmp_path):
    model = moved(patch_model(build("llama"), NAMED))
    report = rsa_report(model)
    [first], (sin, cos) = (layer.heads for layer in report.layers)
    assert first.free_lags == pytest.approx((1.0, 0.0, 0.0), abs=0.1)
    assert [*sin.free_lags, *cos.free_lags] == model.layers[1].self_attn.rsa.free_lags.tolist()
    assert " ".join(f"{weight:+.4f}" for weight in cos.free_lags) in str(report)
    plot_rem(model, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size > 1000
    assert "free lags" not in str(rsa_report(patch_model(build("llama"), RSAConfig(**PAPER))))


def test_a_config_says_how_many_lags_are_free():
    assert "num_free_lags" not in RSAConfig(**PAPER).to_dict()  # earlier versions do not know the word
    assert RSAConfig.from_dict(FREE.to_dict()) == FREE and RSAConfig.from_dict(NAMED.to_dict()) == NAMED
    [spec] = FREE.layer_specs([4])
    assert isinstance(spec, LayerSpec) and spec != RSAConfig(**PAPER).layer_specs([4])[0]
    one = HeadConfig(0, 0, "cos", 0.5, 0.5, free_lags=(1.0,))
    assert RSAConfig(heads=[one]).num_free_lags == 1
    with pytest.raises(ValueError, match="free_lags=.*: None, or 2 numbers"):
        RSAConfig(heads=[one], num_free_lags=2)
    with pytest.raises(ValueError, match="num_free_lags=9: a whole number from 0 to 8"):
        RSAConfig(num_free_lags=9)
    with pytest.raises((TypeError, ValueError), match="free_lags"):
        HeadConfig(0, 0, "cos", 0.5, 0.5, free_lags=(float("nan"), 0.5))
