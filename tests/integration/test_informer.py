"""The patched Informer of transformers: both of its attentions against equation 4 written out."""

from dataclasses import replace

import pytest
import torch
from transformers import InformerConfig, InformerForPrediction

from broken import break_mask
from families import widen
from references import equation_4, relative_error
from rsa_hf import RSAConfig, patch_model

CONTEXT, HORIZON, HEADS = 11, 7, 4
PLAN = RSAConfig(num_cyclical_pairs=1, num_dilated_cyclical_pairs=1, dilation=3, gate_init=0.3)


def build(kind):
    torch.manual_seed(0)
    lengths = {"context_length": CONTEXT, "prediction_length": HORIZON, "lags_sequence": [1, 2]}
    sizes = {"num_time_features": 1, "d_model": 16, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    return widen(InformerForPrediction(InformerConfig(**lengths, **sizes, attention_type=kind)))


def series():
    torch.manual_seed(1)
    past = CONTEXT + 2
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, HORIZON),
        "future_time_features": torch.randn(2, HORIZON, 1),
    }


@torch.no_grad()
def largest_difference(kind):
    """The largest error of a self-attention layer before its projection, against dense P; and the number of layers."""
    model, plain = patch_model(build(kind), PLAN, probe_inputs=series()), build(kind)
    names = [name for name, module in model.named_modules() if hasattr(module, "rsa")]
    worst = 0.0
    for name in names:
        module, twin = model.get_submodule(name), plain.get_submodule(name)
        hidden = torch.randn(2, 9, 16)
        causal = "decoder" in name
        mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None].expand(2, 1, 9, 9)
        outputs = []
        for each in (module, twin):
            seen = {}
            each.out_proj.register_forward_hook(lambda _, args, out, seen=seen: seen.update(mixed=args[0]))
            each.v_proj.register_forward_hook(lambda _, args, out, seen=seen: seen.update(value=out))
            torch.manual_seed(3)
            each(hidden, attention_mask=mask if causal else None)
            outputs.append(seen)
        value, attention = (outputs[1][name].view(2, 9, HEADS, 4) for name in ("value", "mixed"))
        expected = equation_4(module.rsa, attention, value.transpose(1, 2), causal=causal).flatten(2)
        worst = max(worst, float(relative_error(outputs[0]["mixed"], expected)))
        assert relative_error(outputs[1]["mixed"], expected) > 0.05  # recurrence matters
    return worst, len(names)


@pytest.mark.parametrize("kind", ["prob", "full"])
def test_every_layer_is_equation_4(kind, monkeypatch):
    worst, layers = largest_difference(kind)
    assert layers == 4
    assert worst < 1e-5
    break_mask(monkeypatch, lambda mask: replace(mask, causal=not mask.causal))
    assert largest_difference(kind)[0] > 0.05
