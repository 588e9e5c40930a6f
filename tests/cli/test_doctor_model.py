"""`rsa-hf doctor --model` finds no fault in sound models, and each check finds the broken RSA that it is for."""

import tempfile

import pytest
import torch
from transformers import AutoModelForSequenceClassification, ViTConfig, ViTModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import families
from families import CONFIGS, DECODERS, ENCODER_DECODERS, ENCODERS, build, build_language_model
from rsa_hf import checks
from rsa_hf.checks import Subject, examine
from survey.broken import BROKEN


def make(family, patched):
    """A plain model, or a patched one whose gates and rates are not at their initial values."""
    make = build if family in ENCODERS else build_language_model
    return families.patched(family, make=make) if patched else make(family)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS, "bert", "gemma3"])
def test_a_sound_model_passes(family, patched):
    found = {name: verdict for verdict, name, _ in examine(make(family, patched))}
    # Two checks do not apply to an encoder, and say so.
    not_applicable = ("causality", "cache") if family in ENCODERS else ()
    assert found == {name: "note" if name in not_applicable else "ok" for name in checks.CHECKS}


def test_a_classifier_and_a_bfloat16_model_pass(tmp_path):
    classifier = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    assert {verdict for verdict, *_ in examine(classifier)} == {"ok", "note"}
    build_language_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = type(build_language_model("llama")).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {name: verdict for verdict, name, _ in examine(loaded)} == dict.fromkeys(checks.CHECKS, "ok")


def failures(model):
    return {name: text for verdict, name, text in examine(model) if verdict == "FAIL"}


CAUGHT_BY = {
    "not quite shut": "identity",
    "one left behind": "unpatching",
    "rates lost": "reload",
    "does nothing": "effect",
    "rates not trained": "gradients",
    "other direction": "causality",
    "offset forgotten": "cache",
    "mask ignored": "padding",
}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("how", CAUGHT_BY)
def test_broken_rsa_is_found(how, patched):
    model = make("llama", patched)
    with BROKEN[how]():
        failed = set(failures(model))
    assert CAUGHT_BY[how] in failed
    if how not in ("does nothing", "other direction"):  # several checks find these two
        assert failed == {CAUGHT_BY[how]}


@pytest.mark.parametrize("family", ["bart", "bert"])
def test_right_padding_is_tried_where_a_text_sees_it(family, monkeypatch):
    model = make(family, True)
    if family == "bert":
        monkeypatch.setattr(Subject, "accepts", lambda self, name: name != "position_ids")
    with BROKEN["mask ignored"]():
        failed = failures(model)
    assert list(failed) == ["padding"] and failed["padding"].startswith("right-padded rows")


@pytest.mark.parametrize("patched", [False, True])
def test_attention_that_ignores_causality_is_found(patched, register_attention):
    """A user's attention function that ignores its mask."""

    def careless(module, query, key, value, attention_mask, **keywords):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **{**keywords, "is_causal": False})

    register_attention("careless", careless)
    model = make("llama", patched)
    model.set_attn_implementation("careless")
    assert "without RSA too, though its attention says that it is causal" in failures(model)["causality"]


def test_a_check_that_raises_is_a_failure(monkeypatch):
    monkeypatch.setattr(checks, "padded_inputs", lambda *_: [][1])
    failed = failures(make("gpt2", True))
    assert list(failed) == ["padding"] and "IndexError" in failed["padding"]


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("patched", [False, True])
def test_the_command_writes_nothing(patched, run, tmp_path, monkeypatch):
    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    make("gpt2", patched).save_pretrained(folder)
    before = contents(folder)
    code, out, _ = run("doctor", "--model", folder)
    assert contents(folder) == before
    assert list(scratch.iterdir()) == []
    assert f"{folder}: GPT2LMHeadModel {'has RSA heads' if patched else 'is plain'}" in out
    assert code == 0, out
    assert "all is well" in out


def test_a_model_that_cannot_be_tried_is_named(run, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    code, out, _ = run("doctor", "--model", tmp_path / "vit")
    assert code == 1
    assert "takes pixel_values: only models that take input_ids can be checked" in out
