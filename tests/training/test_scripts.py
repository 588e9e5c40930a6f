"""The two Accelerate scripts in one process: what they write, how they resume, and their arguments."""

import json
import math
import shutil

import datasets
import pytest
from accelerate import Accelerator
from script_runs import DEFECTS, LANGUAGE_MODEL, interrupt_second_checkpoint, run_script, write_data
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rsa_hf import is_patched, rsa_report
from rsa_hf.tasks.defect_detection import predict
from small_runs import assert_same_weights, saved_weights

SCRIPTS = {LANGUAGE_MODEL: AutoModelForCausalLM, DEFECTS: AutoModelForSequenceClassification}
each_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), dropout=0.1)


@each_script
@pytest.mark.parametrize("rsa", ["default", "none", '{"num_cyclical_pairs": 1, "gate_init": 1.0}'])
def test_a_model_is_trained_evaluated_and_saved(script, rsa, data, tmp_path):
    out = tmp_path / "out"
    run_script(script, data, out, "--rsa", rsa, "--num_train_epochs", 2, "--report_to", "tensorboard")
    results = json.loads((out / "all_results.json").read_text())
    model = SCRIPTS[script].from_pretrained(out)
    assert is_patched(model) == (rsa != "none")
    assert {name: value for name, value in results.items() if "rsa" in name} == rsa_report(model).scalars()
    if script == LANGUAGE_MODEL:
        assert 1 < results["perplexity"] < 90  # of 100 tokens
        assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    else:
        assert 0.5 <= results["accuracy"] <= 1
        assert results.keys() >= {"f1", "mcc"}
    assert len(AutoTokenizer.from_pretrained(out)) == 100
    assert list(out.rglob("events.*"))
    steps = sorted(int(folder.name[5:]) for folder in out.glob("step_*"))
    assert steps == [steps[0], 2 * steps[0]]  # one an epoch


def interrupt():
    raise KeyboardInterrupt


@each_script
def test_an_interrupted_run_resumes_to_the_same_weights(script, data, tmp_path, monkeypatch):
    """Within the second epoch, with dropout, from the newest checkpoint that is complete."""
    out, settings = tmp_path / "parts", ["--max_train_steps", 16, "--checkpointing_steps", 7]
    run_script(script, data, tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", interrupt_second_checkpoint(interrupt))
        with pytest.raises(KeyboardInterrupt):
            run_script(script, data, out, *settings, "--resume_from_checkpoint", "latest")  # there is none yet
    assert [folder.name for folder in out.glob("step_*")] == ["step_7"]
    assert (out / "unfinished_step_14").exists()
    with pytest.raises(SystemExit):
        run_script(script, data, out, *settings)  # neither to resume nor in a folder of its own
    latest = [*settings, "--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match="other RSA heads"):  # the same numbers would be other gates and rates
        run_script(script, data, out, *latest, "--rsa", '{"parameter_scale": 1}')
    run_script(script, data, out, *latest)
    assert_same_weights(saved_weights(out), saved_weights(tmp_path / "whole"))
    # A checkpoint that is named is taken, whatever the newest is; checkpoints that come later are written again.
    shutil.copytree(out, tmp_path / "again")
    run_script(script, data, tmp_path / "again", *settings, "--resume_from_checkpoint", out / "step_7")
    assert_same_weights(saved_weights(tmp_path / "again"), saved_weights(out))


@each_script
def test_too_few_examples_and_a_folder_without_a_tokenizer_are_refused(script, data, tmp_path):
    """transformers makes a tokenizer of special tokens alone for such a folder: all functions would be equal."""
    AutoConfig.for_model("bert", vocab_size=100).save_pretrained(tmp_path / "bare")
    for option, value, words in (
        ("--per_device_train_batch_size", 1000, "too few"),
        ("--tokenizer_name", tmp_path / "bare", "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            run_script(script, data, tmp_path / "out", option, value)


def test_predict_cuts_functions_as_they_were_in_training(data, tmp_path):
    """Not as in the run that the model came from, nor with its threshold."""
    start, out, functions = tmp_path / "start", tmp_path / "out", data[DEFECTS][5]
    shutil.copytree(data[DEFECTS][1], start)
    AutoConfig.from_pretrained(start, defect_detection={"threshold": 0.0, "max_seq_length": 32}).save_pretrained(start)
    AutoTokenizer.from_pretrained(start, model_max_length=4).save_pretrained(start)
    run_script(DEFECTS, data, out, "--model_name_or_path", start, "--max_length", 8, "--max_train_steps", 2)
    rows = [json.loads(line) for line in functions.read_text().splitlines()]
    inputs = AutoTokenizer.from_pretrained(start)(
        [row["func"] for row in rows], truncation=True, max_length=8, padding=True, return_tensors="pt"
    )
    scores = SCRIPTS[DEFECTS].from_pretrained(out)(**inputs).logits.softmax(-1)[:, 1].tolist()
    found = predict(str(out), str(functions), [])
    assert [each["score"] for each in found] == pytest.approx(scores)
    right = [(each["label"] == "defective") == row["target"] for each, row in zip(found, rows, strict=True)]
    assert sum(right) / len(right) == json.loads((out / "all_results.json").read_text())["accuracy"]


def test_documents_in_tables_are_read_as_texts(data, tmp_path):
    """The same text gives the same model; `text` is not the only name that their column can have."""
    files = data[LANGUAGE_MODEL]
    for option, kind in (("--train_file", "json"), ("--validation_file", "csv")):
        place = files.index(option) + 1
        rows = datasets.Dataset.from_dict({"code": (lines := files[place].read_text().splitlines()), "other": lines})
        getattr(rows, f"to_{kind}")(documents := tmp_path / f"documents.{kind}")
        files = [*files[:place], documents, *files[place + 1 :]]
    run_script(LANGUAGE_MODEL, data, tmp_path / "text", "--max_train_steps", 2)
    files += ["--max_train_steps", 2, "--text_column_name", "code"]
    run_script(LANGUAGE_MODEL, {LANGUAGE_MODEL: files}, tmp_path / "json")
    assert_same_weights(saved_weights(tmp_path / "json"), saved_weights(tmp_path / "text"))
    assert (tmp_path / "json/all_results.json").read_text() == (tmp_path / "text/all_results.json").read_text()


def test_an_encoder_and_labels_that_are_no_class_are_refused(data, tmp_path):
    with pytest.raises(ValueError, match="sees the tokens that it predicts"):
        run_script(LANGUAGE_MODEL, data, tmp_path / "out", "--config_name", data[DEFECTS][1])
    (tmp_path / "share.jsonl").write_text(json.dumps({"func": "int f()", "target": 0.9}))
    with pytest.raises(KeyError, match=r"0\.9"):
        run_script(DEFECTS, data, tmp_path / "out", "--train_file", tmp_path / "share.jsonl")
