"""The checks of the survey, on a sample of architectures and on broken RSA, and its records and table."""

import json
from contextlib import nullcontext

import pytest
from transformers import CONFIG_MAPPING, AutoModel

from families import effect_of_later_tokens
from launching import ROOT
from rsa_hf import patch_model
from survey.broken import BROKEN
from survey.checks import CHECKS, patched
from survey.runner import run_check
from survey.table import Records, outcome, write_table
from survey.tiny_models import build, tasks_of, tiny_config

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
    ("bigbird_pegasus", "causal-lm"): {"padding"},
    **{(name, "seq2seq"): set() for name in ("t5", "bart", "nllb-moe")},
    ("whisper", "causal-lm"): {"padding"},  # the decoder alone
    # Beside the attention interface.
    **{(name, "causal-lm"): set() for name in ("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj")},
    **{(name, "causal-lm"): set() for name in ("mpt", "rembert", "xglm")},
    **{(name, "causal-lm"): {"cache"} for name in ("openai-gpt", "xlnet")},
    **{(name, "masked-lm"): {"cache"} for name in ("deberta", "deberta-v2", "megatron-bert", "mpnet", "roformer")},
}
FAST = ["gpt2", "deepseek_v3", "recurrent_gemma", "layoutlm", "t5", "bloom", "xlnet", "deberta"]


@pytest.mark.slow_unless(model_type=FAST)
@pytest.mark.parametrize(("model_type", "task"), SAMPLE)
def test_the_checks_hold_for_a_sample_of_architectures(model_type, task):
    if model_type in ("doge", "rembert") and effect_of_later_tokens(build(model_type, task).model) > 1e-6:
        pytest.skip("the plain model of this transformers sees later tokens, so it has no cache to agree with")
    with patched(build(model_type, task)) as model:
        found = {name: run_check(name, model) for name in CHECKS}
    assert {name for name, said in found.items() if said.startswith("not applicable: ")} == SAMPLE[model_type, task]
    assert {name: said for name, said in found.items() if not said.startswith("not applicable: ")} == {
        name: "holds" for name in CHECKS if name not in SAMPLE[model_type, task]
    }


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="this transformers has no Inkling 2")
def test_attention_whose_keys_are_no_tokens_gets_no_heads():
    config = tiny_config("inkling2_text")  # from a depth on it attends to the states of earlier layers
    config.layer_types, config.num_hidden_layers = config.layer_types * 6, 12
    assert len(patch_model(AutoModel.from_config(config)).config.rsa["modules"]) == 12
    with pytest.raises(ValueError, match="no attention that can be patched"):  # compressed keys
        patch_model(AutoModel.from_config(tiny_config("deepseek_v4")))


@pytest.fixture(scope="module")
def gpt2():
    with patched(build("gpt2", "causal-lm")) as model:
        yield model


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_cannot_fail_is_unproven(check, gpt2, monkeypatch):
    for how in BROKEN:
        monkeypatch.setitem(BROKEN, how, nullcontext)
    assert run_check(check, gpt2).startswith("unproven: it holds with broken RSA too")


@pytest.mark.parametrize("model_type", ["longt5", "minimax", "bigbird_pegasus"])  # the last one replaces its attention
def test_attention_that_stays_plain_warns(model_type):
    with pytest.warns(UserWarning, match=r"(Local|Lightning|BlockSparse)Attention of this .* gets no RSA heads"):
        patch_model(build(model_type, tasks_of(model_type)[-1]).model)


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
