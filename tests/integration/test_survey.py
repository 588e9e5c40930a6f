"""The checks of the survey, on a sample of architectures and on broken RSA, and its records and table."""

import json
import time
from contextlib import nullcontext

import pytest
import torch

from families import effect_of_later_tokens
from launching import ROOT
from rsa_hf import RSAConfig, patch_model
from rsa_hf.integration.loading import is_self_attention
from survey import runner
from survey.broken import BROKEN
from survey.checks import CHECKS, patched
from survey.runner import run_check, survey
from survey.table import Records, outcome, write_table
from survey.tiny_models import build, model_types, tasks_of

# Learned, rotary and relative positions, grouped values, latent attention, sliding windows, a hybrid, a classifier,
# modules that state no direction (LayoutLM, Doge) or a wrong one (BigBirdPegasus, NLLB-MoE), and parameters outside
# the meta device (DiffLlama); each with the checks that do not apply to it.
SAMPLE = {
    ("gpt2", "causal-lm"): set(),
    ("llama", "sequence-classification"): set(),
    ("gemma2", "causal-lm"): set(),
    ("deepseek_v3", "causal-lm"): set(),
    ("recurrent_gemma", "causal-lm"): {"padding", "cache"},
    ("doge", "causal-lm"): set(),
    ("diffllama", "causal-lm"): set(),
    ("roberta", "masked-lm"): {"cache"},
    ("layoutlm", "masked-lm"): {"cache"},
    ("t5", "seq2seq"): set(),
    ("bart", "seq2seq"): set(),
    ("bigbird_pegasus", "causal-lm"): {"padding"},
    ("nllb-moe", "seq2seq"): set(),
    # Beside the attention interface.
    **{(name, "causal-lm"): set() for name in ("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj")},
    **{(name, "causal-lm"): set() for name in ("mpt", "rembert", "xglm")},
    **{(name, "causal-lm"): {"cache"} for name in ("openai-gpt", "xlnet")},
    **{(name, "masked-lm"): {"cache"} for name in ("deberta", "deberta-v2", "megatron-bert", "mpnet", "roformer")},
}


# Attention with an unusual name, attention beside a small module with a similar name, and an ordinary case.
@pytest.mark.parametrize(
    ("model_type", "task"), [("longcat_flash", "causal-lm"), ("neomme", "masked-lm"), ("bert", "masked-lm")]
)
def test_a_plan_may_name_the_patched_modules_and_no_others(model_type, task):
    if model_type not in model_types():
        pytest.skip(f"this transformers has no {model_type}")
    model = patch_model(build(model_type, task).model)
    names = model.config.rsa["modules"]
    assert all(is_self_attention(name, model.base_model.get_submodule(name)) for name in names)
    others = [name for name, _ in model.base_model.named_modules() if name not in names]
    assert not any(is_self_attention(name, model.base_model.get_submodule(name)) for name in others if name)


@pytest.mark.parametrize("model_type", ["canine", "longformer"])
def test_a_plan_may_not_name_attention_beside_the_interface(model_type):
    """Heads on it would load and never run."""
    model = build(model_type, tasks_of(model_type)[0]).model
    names = [name for name, module in model.base_model.named_modules() if "SelfAttention" in type(module).__name__]
    assert names
    assert not any(is_self_attention(name, model.base_model.get_submodule(name)) for name in names)


def sees_later(model):
    """Whether later tokens change the output of a plain model at earlier ones."""
    return effect_of_later_tokens(model.eval()) > 1e-6


@pytest.mark.parametrize(("model_type", "task"), SAMPLE)
def test_the_checks_hold_for_a_sample_of_architectures(model_type, task):
    if model_type == "doge" and sees_later(build(model_type, task).model):
        pytest.skip("the plain Doge of this transformers sees later tokens, so it has no cache to agree with")
    with patched(build(model_type, task)) as model:
        found = {name: run_check(name, model) for name in CHECKS}
    assert {name for name, said in found.items() if said.startswith("not applicable: ")} == SAMPLE[model_type, task]
    assert {name: said for name, said in found.items() if not said.startswith("not applicable: ")} == {
        name: "holds" for name in CHECKS if name not in SAMPLE[model_type, task]
    }


@pytest.fixture(scope="module")
def gpt2():
    with patched(build("gpt2", "causal-lm")) as model:
        yield model


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_cannot_fail_is_unproven(check, gpt2, monkeypatch):
    for how in BROKEN:
        monkeypatch.setitem(BROKEN, how, nullcontext)
    assert run_check(check, gpt2).startswith("unproven: it holds with broken RSA too")


@pytest.mark.parametrize(
    ("model_type", "task"), [("layoutlm", "masked-lm"), ("doge", "causal-lm"), ("bigbird_pegasus", "causal-lm")]
)
def test_a_direction_that_modules_do_not_state_is_found(model_type, task):
    model = build(model_type, task).model
    causal = not sees_later(model)  # Doge has another direction in older versions of transformers
    assert model_type == "doge" or causal is (model_type == "bigbird_pegasus")
    assert patch_model(model, RSAConfig()).config.rsa["plan"]["causal"] is causal
    assert (
        patch_model(build("gpt2", "causal-lm").model).config.rsa["plan"]["causal"] is None
    )  # GPT-2's modules state it


@torch.no_grad()
def test_both_directions_of_an_encoder_decoder_are_found(tmp_path):
    def t5():
        model = build("t5", "seq2seq").model
        model.set_attn_implementation("eager")  # sdpa treats a module that states no direction as causal
        return model

    def logits(model):
        return model.eval()(input_ids=torch.arange(3, 12)[None], decoder_input_ids=torch.arange(3, 8)[None]).logits

    said, found = patch_model(t5()), t5()
    assert said.config.rsa["plan"]["causal"] is None
    for module in found.modules():
        vars(module).pop("is_causal", None)
    if not sees_later(found.get_encoder()):
        pytest.skip("without the attribute the plain T5 of this transformers has a causal encoder")
    causal = [False] * found.config.num_layers + [True] * found.config.num_decoder_layers
    assert patch_model(found).config.rsa["plan"]["causal"] == causal
    assert torch.equal(logits(found), logits(said))
    found.save_pretrained(tmp_path)
    assert torch.equal(logits(type(found).from_pretrained(tmp_path, attn_implementation="eager")), logits(said))
    broken = patch_model(t5(), RSAConfig(causal=causal[::-1]))
    assert not torch.allclose(logits(broken), logits(said), atol=1e-5)


def test_patching_half_of_an_encoder_decoder_warns():
    with pytest.warns(UserWarning, match="the encoder of this LongT5.* gets no RSA heads.*LongT5LocalAttention"):
        patch_model(build("longt5", "seq2seq").model)


def test_a_speech_decoder_alone_is_patched_without_probe_inputs():
    assert patch_model(build("whisper", "causal-lm").model).config.rsa["modules"][0].startswith("decoder.")


def test_a_model_type_that_hangs_or_crashes_is_recorded(monkeypatch):
    monkeypatch.setattr(runner, "survey_type", lambda name: time.sleep(60))
    (name, record) = next(survey(["gpt2"], seconds_per_type=0.2))
    assert name == "gpt2" and record["causal-lm"]["why"] == "it took longer than 0 seconds"
    monkeypatch.setattr(runner, "survey_type", lambda name: exit(3))
    (_, record) = next(survey(["gpt2"]))
    assert record["causal-lm"] == {"outcome": "not built", "why": "its process ended with exit code 3"}
    assert list(survey(["gpt2"], seconds=-1)) == []


def test_the_committed_table_is_that_of_the_committed_records(tmp_path):
    path = ROOT / "results" / "architectures.json"
    records = Records(tmp_path / "none.json")
    content = json.loads(path.read_text())
    records.versions = content["versions"]
    dict.update(records, content["types"])  # assigning them one by one would write the file each time
    write_table(records, tmp_path / "SUPPORTED.md")
    assert (tmp_path / "SUPPORTED.md").read_text() == (ROOT / "SUPPORTED.md").read_text()
    found = {name: outcome(record) for name, record in records.items()}
    assert list(found.values()).count("works") >= 200
    assert not [name for name in found if found[name] in ("wrong", "unproven")]


@pytest.mark.slow  # checks every tenth model type
def test_every_tenth_model_type_has_the_outcome_in_the_table():
    records = Records(ROOT / "results" / "architectures.json")
    sample = [name for name in model_types()[::10] if name in records]
    if not sample:
        pytest.skip("results/architectures.json was found with other versions of torch or transformers")
    found = {name: outcome(record) for name, record in survey(sample, seconds_per_type=120)}
    assert found == {name: outcome(records[name]) for name in sample}
