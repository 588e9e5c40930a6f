"""rsa-hf: the effect and the exit code of each command, the messages for mistakes, and tracebacks for faults."""

import json
import math
import os
import shutil
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

import rsa_hf.integration
from families import CONFIGS, FULL_PLAN, build
from launching import ROOT, run_python
from rsa_hf import RSAHeads, is_patched, patch_model, rsa_report
from rsa_hf.calibration import procedure
from rsa_hf.calibration.choice import Choice

RSA_HF = ["-c", "import sys; sys.argv[0] = 'rsa-hf'; from rsa_hf.cli import main; main()"]


@pytest.fixture
def patched(tmp_path):
    model = patch_model(build("gpt2"), FULL_PLAN)
    model.save_pretrained(tmp_path / "patched")
    return model, tmp_path / "patched"


def test_patch_keeps_the_class_the_weights_and_the_tokenizer(run, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    base = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    for part in (base, tokenizer):
        part.save_pretrained(tmp_path / "base")
    plan = tmp_path / "plan.yaml"
    plan.write_text("rsa: {num_regular: 1, num_dilated_cyclical_pairs: 1, dilation: 3}\n")
    code, out, err = run("patch", "~/base", "$HOME/out", "--plan", plan)
    assert (code, err) == (0, "")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert is_patched(loaded)
    assert f"2 layers patched, {rsa_report(loaded).num_parameters} RSA parameters" in out
    assert loaded.config.rsa["plan"]["dilation"] == 3
    assert run("patch", "~/base", "~/all", "--plan", "rsa: from_scratch")[0] == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in load_file(tmp_path / "base" / "model.safetensors").items():
        assert torch.equal(weights[name], value)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert "RSA heads" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["patch", "{base}", "{base}"], "exists and is not an empty folder. Choose another one, or give --overwrite."),
        (["patch", "./absent", "out"], "./absent: there is no such folder."),
        (["patch", "package:absent/model", "out"], "'absent' is not installed"),
        (["patch", "{base}", "out", "--plan", "{{num_regula: 2}}"], "unknown RSA setting 'num_regula'. Did you mean"),
        (["patch", "{base}", "out", "--plan", "absent.yaml"], "No such file or directory: 'absent.yaml'"),
        (["patch", "{base}", "out", "--plan", "{{a"], "not valid YAML"),
        (["patch", "{base}", "out", "--plan", "[1]"], "expected RSAConfig or a mapping, got list"),
        (["patch", "{patched}", "out"], "already has RSA heads"),
        (["calibrate", "{patched}", "out", "--text", "text.txt"], "patched already"),
        (["calibrate", "{base}", "out", "--text", "x", "--config", "x"], "either --text FILE, or --config FILE"),
        (["calibrate", "{base}", "out", "--text", "latin.txt"], "latin.txt is not in UTF-8"),
        (["calibrate", "{base}", "out", "--text", "text.txt", "--block-size", "9999"], "--block-size=9999: from"),
        (["calibrate", "{base}", "out", "--text", "text.txt", "--block-size", "300"], "--block-size=300: the model"),
        (["calibrate", "{masked}", "out", "--text", "text.txt"], "--text is for causal language models"),
        (["inspect", "{patched}", "--plot", "text.txt/x.png"], "text.txt/x.png cannot be written"),
        (["doctor", "--model", "./absent"], "there is no such folder"),
        (["inspect", "{base}"], "plain checkpoint"),
        (["inspect", "adapter"], "adapter is a PEFT adapter, not a model"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch, gpt2_folder, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    (tmp_path / "latin.txt").write_bytes("é\n".encode("latin-1") * 200)
    AutoModelForMaskedLM.from_config(CONFIGS["roberta"]()).save_pretrained(tmp_path / "masked")
    shutil.copytree(gpt2_folder, tmp_path / "patched")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    patch_model(AutoModelForCausalLM.from_pretrained(gpt2_folder)).save_pretrained(tmp_path / "patched")
    places = {"base": gpt2_folder, "patched": tmp_path / "patched", "masked": tmp_path / "masked"}
    code, out, err = run(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def language_model(gpt2_folder, tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8") * 2)
    return shutil.copytree(gpt2_folder, tmp_path / "base"), "--text", tmp_path / "text.txt", "--block-size", 16


@pytest.mark.slow_unless(source=["text"])
@pytest.mark.parametrize("source", ["text", "config"])
def test_calibrate_saves_what_it_has_found(source, run, tmp_path, language_model, monkeypatch):
    base, *options = language_model
    if source == "config":
        (tmp_path / "run.yaml").write_text(f"train_file: {options[1]}\nblock_size: 16\n")
        options = ["--config", tmp_path / "run.yaml"]

    def choose(scores, *_):
        rems = [(i, h, int(scores.means[i][h].argmin())) for i, h in ((0, 3), (1, 1))]
        return [Choice(i, h, rem, float(scores.masses[i][rem]), 3.0, -1.0, 1.0) for i, h, rem in rems]

    monkeypatch.setattr(procedure, "choose", choose)
    monkeypatch.setattr(procedure, "CERTAIN", -math.inf)
    code, out, err = run("calibrate", base, tmp_path / "out", *options, "--max-rows", 12)
    assert code == 0, err
    assert " heads; the loss of 12 rows" in out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert loaded.config.rsa["plan"]["heads"] == content["config"]["heads"]
    assert {(head["layer"], head["head"]) for head in content["config"]["heads"]} <= {(0, 3), (1, 1)}
    assert f"{content['loss']:.4g}" in (tmp_path / "out" / "README.md").read_text()
    assert {"tokenizer.json", "calibration.png"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_calibrate_writes_nothing_where_it_finds_nothing(run, tmp_path, language_model, monkeypatch):
    base, *options = language_model
    monkeypatch.setattr(procedure, "choose", lambda *_: [])
    code, out, _ = run("calibrate", base, tmp_path / "out", *options, "--max-rows", 12)
    assert code == 0
    assert out.startswith("no heads: the loss of 12 rows")
    assert out.endswith(f"nothing is written to {tmp_path / 'out'}\n")
    assert not (tmp_path / "out").exists()


def test_inspect_prints_the_report_as_text_json_and_picture(run, patched, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model, folder = patched
    code, out, _ = run("inspect", "~/patched", "--plot", "$HOME/rsa.png")
    assert code == 0
    assert str(rsa_report(model)) in out
    assert (tmp_path / "rsa.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("inspect", folder, "--json")
    assert json.loads(out) == json.loads(json.dumps(rsa_report(model).to_dict()))
    with torch.no_grad():
        next(module for module in model.modules() if isinstance(module, RSAHeads)).eta.fill_(1e3)
    model.save_pretrained(tmp_path / "lasting")  # λ is 1, so the half-life is infinite, which JSON cannot say
    code, out, err = run("inspect", tmp_path / "lasting", "--json", "--plot", tmp_path / "rsa.png")
    assert json.loads(out, parse_constant=pytest.fail)["layers"][0]["heads"][0]["half_life"] is None
    assert code == 0 and "written: " in err


def test_doctor_finds_no_fault_here(run):
    code, out, _ = run("doctor")
    assert code == 0 and "self-check, cpu" in out and "FAIL" not in out, out


def test_doctor_reports_broken_hooks_and_a_broken_product(run, monkeypatch):
    monkeypatch.setattr(
        rsa_hf.integration.attention.AttentionInterface, "get_interface", lambda self, name, default: default
    )
    monkeypatch.setattr("rsa_hf.integration.install", lambda: None)
    monkeypatch.setattr("rsa_hf.ops.rem_product", lambda value, *_: value)
    code, out, _ = run("doctor")
    assert code == 1
    assert "FAIL  hook                 AttentionInterface.get_interface" in out
    assert "FAIL  self" in out


USE = "from rsa_hf import patch_model"


def test_an_unsupported_transformers_is_named_by_every_command(tmp_path):
    stub = tmp_path / "transformers"
    stub.mkdir()
    (stub / "__init__.py").write_text("__version__ = '4.57.0'\n")

    def run(code, *command):
        done = run_python(*command, code=code, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
        assert ("Traceback" in done.stderr) == (command[-1] == USE)
        return done

    words = "rsa_hf works with transformers ≥ 5.17, < 5.25; installed is 4.57.0."
    shown = run(1, *RSA_HF, "doctor").stdout
    assert f"FAIL  hooks                ImportError: {words} Install one that fits: pip install" in shown
    assert "see FAIL above" in shown
    assert run(2, *RSA_HF, "inspect", "x").stderr.startswith(f"error: {words}")
    used = run(0, "-c", "import rsa_hf; rsa_hf.__version__")
    assert f"UserWarning: rsa_hf cannot be used: {words}" in used.stderr
    assert f"ImportError: {words}" in run(1, "-c", USE).stderr


def test_all_keys_are_listed_by_an_option_of_their_own(run):
    (_, keys, _), (_, shown, _) = (run("audit", option) for option in ("--list-keys", "--help"))
    assert "--max_seq_length" in keys and "--num_train_epochs" in keys and "--num_train_epochs" not in shown


def test_help_needs_neither_torch_nor_transformers():
    code = "import sys; sys.argv = ['rsa-hf', '--help']; from rsa_hf.cli import app; app(standalone_mode=False)"
    run_python("-c", f"{code}; assert not {{'torch', 'transformers'}} & set(sys.modules)", code=0)


def test_the_version_is_shown(run):
    assert run("--version") == (0, f"rsa_hf {metadata.version('rsa_hf')}\n", "")


@pytest.mark.parametrize("command", ["--help", pytest.param("inspect", marks=pytest.mark.slow)])
def test_a_terminal_without_greek_letters_is_written_to(command, patched):
    arguments = [command, patched[1]] if command == "inspect" else ["doctor", command]
    assert not run_python(*RSA_HF, *arguments, code=0, PYTHONIOENCODING="cp1252", COLUMNS="200").stderr
