"""On a base of 4 or 8 bits, gates and rates stay float32, and train, save and merge without loss."""

import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from families import inputs
from peft_adapters import PLAN, adapter_values, base_model, disturb, logits
from rsa_hf import RSAHeads, patch_model
from rsa_hf.peft import get_peft_model, load

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'rsa_hf[quantized]'")
pytestmark = pytest.mark.slow  # importing bitsandbytes takes seconds

BITS = {
    "4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "4 bits, bfloat16": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    "8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


def quantised(folder, bits):
    dtype = torch.bfloat16 if "bfloat16" in bits else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits](), dtype=dtype)
    kinds = {type(module).__name__ for module in model.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    return model


def assert_float32(model):
    for module in model.modules():
        if isinstance(module, RSAHeads):
            assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("patched", ["checkpoint", "quantised model"])
def test_rates_stay_float32_and_learn(bits, patched, tmp_path):
    base = base_model("llama")
    if patched == "checkpoint":
        patch_model(base, PLAN)
    base.save_pretrained(tmp_path / "base")
    base = quantised(tmp_path / "base", bits)
    model = get_peft_model(prepare_model_for_kbit_training(base), LoraConfig(target_modules="all-linear"), PLAN)
    batch = inputs("llama")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = adapter_values(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    assert_float32(model)
    after = adapter_values(model)
    assert all((after[name] != before[name]).all() for name in before)
    disturb(model)
    expected = logits(model, batch)
    with model.disable_adapter():
        assert (logits(model, batch) - expected).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    loaded = load(prepare_model_for_kbit_training(quantised(tmp_path / "base", bits)), tmp_path / "adapter")
    assert all(torch.equal(value, adapter_values(model)[name]) for name, value in adapter_values(loaded).items())
    torch.testing.assert_close(logits(loaded, batch), expected)
    rates = list(adapter_values(loaded).values())
    merged = loaded.merge_and_unload()
    found = [value for name, value in merged.named_parameters() if ".rsa." in name]
    assert all(torch.equal(a, b) for a, b in zip(found, rates, strict=True))
