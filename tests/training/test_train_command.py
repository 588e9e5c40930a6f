"""`rsa-hf train` and `rsa-hf evaluate`, on tiny models: what a user sees, and runs that end in the middle."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, BertModel

from families import CONFIGS, tiny_config
from file_edits import edit_json
from launching import ROOT, run_processes
from rsa_hf import patch_model
from rsa_hf.training.callbacks import RSACallback
from small_runs import assert_same_weights, saved_weights

SIZES = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_dropout": 0.1, "bos_token_id": None}
LM = {
    "model_type": "llama",
    "config_overrides": {**SIZES, "eos_token_id": None},
    "tokenizer_name": "bytes",
    "block_size": 16,
    "rsa": "from_scratch",
    "max_steps": 8,
    "per_device_train_batch_size": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "bits_per_byte",
    "learning_rate": 1e-2,
    "use_cpu": True,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(300)))
    return path


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(CONFIGS["bert"]()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "functions.jsonl"
    texts = [f"w{i % 10 + 4} w{i * 7 % 10 + 4} w{i % 3 + 4}{' w5' * (i % 11)}" for i in range(42)]
    rows = [{"func": text, "target": int(i % 10 > 4), "idx": i} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def defect(encoder, functions):
    files = {f"{split}_file": str(functions) for split in ("train", "validation", "test")}
    return {"model_name_or_path": str(encoder), **files, "deduplicate": False, "use_cpu": True}


def written(folder, settings):
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return str(path)


# --- what a run says and leaves -------------------------------------------------------------------------------


def test_a_run_that_ended_before_its_results_takes_no_further_step(tmp_path, text, run):
    words = ["train", "lm", written(tmp_path, {**LM, "train_file": str(text)}), "--output_dir"]
    assert run(*words, tmp_path / "out")[0] == 0
    plan = json.loads((tmp_path / "out" / "config.json").read_text())["rsa"]["plan"]
    assert (plan["num_cyclical_pairs"], plan["num_free_lags"], plan["parameter_scale"]) == (2, 2, 1.0)
    expected = saved_weights(tmp_path / "out")
    edit_json(tmp_path / "out" / "run.json", lambda record: record.pop("result"))
    (tmp_path / "out" / "model.safetensors").unlink()
    code, out, _ = run(*words, (tmp_path / "out").rename(tmp_path / "moved"))
    assert code == 0 and "continues from step 8" in out
    assert_same_weights(saved_weights(tmp_path / "moved"), expected)


def test_other_data_or_settings_are_not_taken_for_the_same_run(tmp_path, defect, functions, run):
    data = tmp_path / "functions.jsonl"
    data.write_text(functions.read_text())
    settings = {**defect, "train_file": str(data), "test_file": None, "max_steps": 2, "max_seq_length": 16}
    words = ["train", "defect", written(tmp_path, settings), "--output_dir", tmp_path / "out"]
    code, out, _ = run(*words)
    assert code == 0 and "classifier" in out  # announced as new
    assert run(*words, "--logging_steps", 7)[0] == 0  # changes nothing that is learned
    corrected = data.read_text().replace('"target": 1', '"target": 2', 1).replace('"target": 2', '"target": 0', 1)
    for text in (corrected, data.read_text().replace('"idx": 0', '"idx": 77')):
        data.write_text(text)
        code, _, err = run(*words)
        assert code == 2 and "the data" in err
    data.write_text(functions.read_text())
    for key, value in (("learning_rate", 1e-3), ("data_seed", 7)):
        code, _, err = run(*words, f"--{key}", value)
        assert code == 2 and key in err
    (tmp_path / "out" / "run.json").unlink()  # as of a Trainer of the user's own
    code, _, err = run(*words)
    assert code == 2 and "has checkpoints, but no run.json" in err
    (tmp_path / "out" / "checkpoint-mine").mkdir()
    assert run(*words, "--max_seq_length", 4096, "--overwrite_output_dir")[0] == 2
    assert (tmp_path / "out" / "checkpoint-2").is_dir()  # until a run begins
    words += ["--learning_rate", 1e-3, "--overwrite_output_dir"]
    (tmp_path / "out" / "predictions.jsonl").touch()  # of the old model
    assert run(*words)[0] == 0 and not (tmp_path / "out" / "predictions.jsonl").exists()
    assert (tmp_path / "out" / "checkpoint-mine").is_dir()
    assert "hf upload" in run(*words[:-1], "--push_to_hub")[1]  # it had finished


@pytest.mark.slow_unless(long_functions=["chunk"])
@pytest.mark.parametrize("long_functions", ["truncate", "chunk"])
def test_a_defect_detector_is_scored_alike_by_its_run_and_by_evaluate(
    tmp_path, defect, functions, run, long_functions
):
    settings = {"long_functions": long_functions, "class_weights": True, "max_seq_length": 6, "chunk_overlap": 2}
    config = written(tmp_path, {**defect, **settings, "max_steps": 3})
    unused = ("--prediction_loss_only", "true", "--eval_do_concat_batches", "false")
    assert run("train", "defect", config, "--output_dir", tmp_path / "out", *unused)[0] == 0
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    evaluation = ["evaluate", "defect", tmp_path / "out", config]
    others = ["--train_file", "gone.jsonl", "--validation_file", "gone.jsonl"]  # are not read
    scores = json.loads(run(*evaluation, "--split", "test", *others)[1])
    low, high = scores.pop("intervals")["accuracy"]
    assert low <= scores["accuracy"] <= high
    assert scores == {key: pytest.approx(results[f"test_{key}"]) for key in scores} and "threshold" in scores
    same = json.loads(run("evaluate", "defect", tmp_path / "out" / "checkpoint-3", "--test_file", functions)[1])
    assert same["roc_auc"] == pytest.approx(scores["roc_auc"])  # cut alike, without the config
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", {**defect, "max_seq_length": 16})
    assert json.loads(run(*evaluation[:-1], other)[1])["roc_auc"] == pytest.approx(scores["roc_auc"])
    longer = [json.loads(run(*evaluation, f"--max{_}seq{_}length", 16)[1])["roc_auc"] for _ in "_-"]
    assert longer[0] == longer[1] != pytest.approx(scores["roc_auc"])
    assert run(*evaluation, "--threshold", "nan")[0] == 2
    assert "its class 1" not in run(*evaluation)[2]
    edit_json(tmp_path / "out" / "checkpoint-3" / "config.json", lambda c: c["id2label"].update({"1": "SAFE"}))
    assert "of its class 1, 'SAFE'" in run("evaluate", "defect", tmp_path / "out" / "checkpoint-3", config)[2]
    at = json.loads(run(*evaluation, "--threshold", 1)[1])["accuracy_at_threshold"]
    assert at == sum(json.loads(line)["target"] == 0 for line in functions.read_text().splitlines()) / 42
    assert run("predict", tmp_path / "out", functions, f"--output={tmp_path}/new/scores.jsonl")[0] == 0
    assert (tmp_path / "new" / "scores.jsonl").read_text() == (tmp_path / "out" / "predictions.jsonl").read_text()
    predictions = (tmp_path / "out" / "predictions.txt").read_text().split()
    assert len(predictions) == 2 * 42


def test_the_labels_of_a_defect_detector_are_smoothed(tmp_path, defect, run):
    """As transformers' Trainer does it where a model computes its loss itself."""
    losses = []
    for smoothing in (0, 0.5):
        settings = {**defect, "label_smoothing_factor": smoothing, "max_steps": 1, "max_seq_length": 16}
        out = tmp_path / str(smoothing)
        assert run("train", "defect", written(tmp_path, settings), "--output_dir", out)[0] == 0
        losses.append(json.loads((out / "trainer_state.json").read_text())["log_history"][-1]["train_loss"])
    assert losses[0] != losses[1]


def test_a_language_model_is_scored_alike_by_its_run_and_by_evaluate(tmp_path, text, run):
    config, out = written(tmp_path, {**LM, "train_file": str(text), "max_steps": 2}), tmp_path / "out"
    assert run("train", "lm", config, "--output_dir", out)[0] == 0
    bits = json.loads((out / "all_results.json").read_text())["test_bits_per_byte"]
    assert f" {bits:.4g} |" in (out / "README.md").read_text()
    scores = json.loads(run("evaluate", "lm", out, config, "--tokenizer_name", "bytes")[1])
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    # The perplexity of a word of 12,000 letters is infinite, which JSON cannot say.
    (tmp_path / "word.txt").write_text("line" * 3000)
    said = run("evaluate", "lm", out, config, "--test_file", tmp_path / "word.txt")[1]
    assert json.loads(said, parse_constant=pytest.fail)["word_perplexity"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "lm", "CONFIG", "--learning_rate=1e30", "--logging_steps=1"], "the loss is"),
        (["train", "lm", "CONFIG", "--metric_for_best_model=perplexity"], "choose from bits_per_byte, loss,"),
        (["train", "lm", "CONFIG", "--bf16_full_eval=true"], "would round the model that is saved"),
        (["train", "lm", "--max_steps=1", "CONFIG"], "a CONFIG comes before all keys"),
        (["train", "lm", "CONFIG", "--config_overrides={}", "--model_type=bert"], "sees the tokens that it predicts"),
        (["train", "lm", "CONFIG", "--config_overrides={d_model: wide}", "--model_type=transfo-xl"], "d_model"),
        (["train", "lm", "CONFIG", "--config_overrides={hidden_size: 8}", "--model_type=recurrent"], "be patched"),
        (["train", "lm", "absent.yaml"], "absent.yaml"),
        (["train", "lm", "CONFIG", "--rsa=none", "--model_name_or_path=PATCHED"], "the checkpoint has RSA heads"),
        (["train", "defect", "--dataloader_drop_last", "true"], "would leave functions out of the scores"),
        (["evaluate", "lm", "./absent", "CONFIG"], "absent"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, text, run, words, said, monkeypatch):
    settings = {**LM, "train_file": str(text), "output_dir": str(tmp_path / "out")}
    if any("PATCHED" in word for word in words):
        del settings["model_type"], settings["config_overrides"]
        model = AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=256))
        patch_model(model).save_pretrained(tmp_path / "PATCHED")
    monkeypatch.chdir(tmp_path)
    config = written(tmp_path, settings)
    code, _, err = run(*(config if word == "CONFIG" else word for word in words))
    assert code == 2 and said in err
    assert "Traceback" not in err


def test_a_calibrated_run_continues_with_its_plan(tmp_path, text, run):
    settings = {**LM, "train_file": str(text), "rsa": {"calibrate": {"max_rows": 12}}, "max_steps": 2}
    words = ["train", "lm", written(tmp_path, settings), "--output_dir", tmp_path / "out"]
    assert run(*words)[0] == 0
    found = json.loads((tmp_path / "out" / "calibration.json").read_text())
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert {f"calibration_{key}" for key in found["scores"]} <= results.keys()
    assert results["patched"] == bool(found["config"]["heads"])
    assert run(*words, "--rsa", '{"calibrate": {"max_rows": 13}}', "--overwrite_output_dir")[0] == 0
    assert json.loads((tmp_path / "out" / "calibration.json").read_text())["num_rows"] == found["num_rows"] + 1


# --- processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow_unless(number=[signal.SIGTERM])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_same_command_starts_continues_to_the_same_weights_and_has_finished(tmp_path, text, run, number):
    settings = {**LM, "train_file": str(text), "max_steps": 40, "eval_steps": 5, "save_steps": 5}
    words = ["train", "lm", written(tmp_path, settings), "--output_dir"]
    code, out, _ = run(*words, tmp_path / "whole")
    assert code == 0 and "the run starts." in out

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-c", "from rsa_hf.cli import main; main()", *map(str, [*words, tmp_path / "parts"])]
    process = subprocess.Popen(line, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 250
    while not (tmp_path / "parts" / "checkpoint-10" / "trainer_state.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate()[1]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number, said
        assert "The same command goes on" in said

    code, out, _ = run(*words, tmp_path / "parts")
    assert code == 0 and "continues from step" in out
    assert_same_weights(saved_weights(tmp_path / "parts"), saved_weights(tmp_path / "whole"))
    for name in ("config.json", "README.md", "all_results.json", "trainer_state.json", "curves.png", "rsa.png"):
        assert (tmp_path / "parts" / name).is_file(), name
    before = (tmp_path / "parts" / "model.safetensors").stat().st_mtime_ns
    code, out, _ = run(*words, tmp_path / "parts")
    assert code == 0 and "had finished" in out
    assert "bits per byte" in out
    assert (tmp_path / "parts" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_stop_keeps_its_checkpoint_and_the_evaluation_that_is_due(tmp_path, text, run, monkeypatch, strategy):
    often = {"eval_strategy": strategy, "save_strategy": strategy, "save_total_limit": 1, "max_steps": -1}
    settings = {**LM, **often, "train_file": str(text), "per_device_train_batch_size": 64, "num_train_epochs": 2}
    words = ["train", "lm", written(tmp_path, settings), "--output_dir"]

    def evaluations(folder):
        state = json.loads((folder / "trainer_state.json").read_text())
        found = [(record["step"], record["eval_loss"]) for record in state["log_history"] if "eval_loss" in record]
        return found, state["best_global_step"]

    assert run(*words, tmp_path / "whole")[0] == 0
    (stop, _), *others = evaluations(tmp_path / "whole")[0]
    assert others

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == stop - 1:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as context:
        context.setattr(RSACallback, "on_step_begin", interrupt)
        assert run(*words, tmp_path / "parts")[0] == 128 + signal.SIGTERM
    assert f"continues from step {stop}" in run(*words, tmp_path / "parts")[1]
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")
    assert_same_weights(saved_weights(tmp_path / "parts"), saved_weights(tmp_path / "whole"))


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("task", ["lm", "defect"])
def test_two_processes_learn_what_one_does(tmp_path, text, defect, run, task):
    if task == "lm":
        settings = {**LM, "train_file": str(text), "max_steps": 5, "load_best_model_at_end": False}
        settings["config_overrides"] = {**LM["config_overrides"], "attention_dropout": 0.0}
    else:
        settings = {**defect, "max_seq_length": 16, "num_train_epochs": 2, "learning_rate": 1e-3}
        settings["config_overrides"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = written(tmp_path, settings)
    words = ["-c", "from rsa_hf.cli import main; main()", "train", task, config, "--output_dir", tmp_path / "two"]
    words += ["--per_device_train_batch_size", "3", "--ddp_backend", "gloo"]
    run_processes(2, "--no-python", sys.executable, *words)
    one = ["train", task, config, "--output_dir", tmp_path / "one", "--per_device_train_batch_size", 6]
    assert run(*one)[0] == 0
    one, two = saved_weights(tmp_path / "one"), saved_weights(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4, msg=name)
    scores = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
