"""The settings of a run: YAML and flags, keys of TrainingArguments, one line for a mistake."""

import dataclasses

import pytest
import yaml
from transformers import TrainingArguments

from launching import ROOT
from rsa_hf import RSAConfig
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.training.arguments import read_arguments

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def read(tmp_path, text, *words, data=DefectDataConfig):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_arguments([str(path), "--output_dir", str(tmp_path / "out"), *words], data)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_are_read(path):
    data = DefectDataConfig if path.stem.startswith("defect") else LanguageModelingDataConfig
    run = read_arguments([str(path)], data)
    written = yaml.safe_load(path.read_text())
    assert run.training.learning_rate == float(written["learning_rate"])
    rsa = RSAConfig.from_scratch().to_dict() if written["rsa"] == "from_scratch" else written["rsa"]
    assert run.rsa.config == (None if rsa is None else RSAConfig.from_dict(rsa))


def test_keys_and_defaults_are_those_of_training_arguments(tmp_path):
    ours = read(tmp_path, "", "--use_cpu").training
    theirs = TrainingArguments(str(tmp_path / "out"), use_cpu=True)
    others = {"logging_nan_inf_filter", "dataloader_pin_memory", "logging_dir", "run_name"}
    for each in dataclasses.fields(TrainingArguments):
        if each.name not in others:
            assert getattr(ours, each.name) == getattr(theirs, each.name), each.name


def test_flags_go_before_the_file_and_are_read_alike(tmp_path):
    text = "learning_rate: 1e-4\nmax_steps: 7\nbf16: no\neval_strategy: no\nreport_to: [tensorboard, wandb]\n"
    text += "label_values: [1, 2]\n"
    run = read(tmp_path, text, "--max_steps=9", "--rsa", "{num_regular: 1, gate_init: -.inf}", "--no_deduplicate")
    assert (run.training.learning_rate, run.training.max_steps, run.training.bf16) == (1e-4, 9, False)
    assert run.training.eval_strategy == "no"
    assert (run.training.report_to, run.data.label_values) == (["tensorboard", "wandb"], ["1", "2"])
    assert run.data.deduplicate is False
    assert run.rsa.config == RSAConfig(num_regular=1, gate_init=float("-inf"))
    same = read(tmp_path, text + "rsa: {num_regular: 1, gate_init: -.inf}\n")
    assert same.rsa.config == run.rsa.config


def test_an_entry_of_a_mapping_can_be_set_alone(tmp_path):
    text = "config_overrides: {a: 1, b: 2}\nrsa: {num_regular: 1}\n"
    run = read(tmp_path, text, "--config_overrides.b", "3", "--rsa.gate_init=-1.5")
    assert run.model.config_overrides == {"a": 1, "b": 3}
    assert run.rsa.config == RSAConfig(num_regular=1, gate_init=-1.5)


@pytest.mark.parametrize("written", ["none", "null"])
def test_rsa_none_is_the_plain_model_and_its_absence_the_default(tmp_path, written):
    assert read(tmp_path, "", "--rsa", written).rsa.config is None
    assert read(tmp_path, f"rsa: {written}\n").rsa.config is None
    assert read(tmp_path, "").rsa.config == RSAConfig()
    assert read(tmp_path, "rsa: calibrate\n").rsa.calibrate.max_rows == 64
    assert read(tmp_path, "rsa: {calibrate: {max_rows: 20}}\n").rsa.calibrate.max_rows == 20


def test_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "runs")
    run = read(tmp_path, "train_file: ~/a.jsonl\n", "--output_dir", "~/$RUNS/1")
    assert run.training.output_dir == str(tmp_path / "runs" / "1")
    assert run.data.train_file == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("learning_rat: 1\n", [], "Did you mean 'learning_rate'"),
        ("", ["--learning_rat", "1"], "Did you mean 'learning_rate'"),
        ("batch_size: 4\n", [], "per_device_train_batch_size"),
        ("learning_rate: fast\n", [], "learning_rate"),
        ("long_functions: cut\n", [], "long_functions"),
        ("eval_strategy: sometimes\n", [], "sometimes"),
        ("rsa: {num_regula: 1}\n", [], "num_regula"),
        ("rsa: [{num_regular: 1}]\n", [], "rsa: .* a mapping, got list"),
        ("rsa: {calibrate: {rows: 1}}\n", [], "rows"),
        ("rsa: {calibrate: {}, num_regular: 1}\n", [], "beside"),
        ("config_overrides: 3\n", [], "a mapping is needed"),
        ("- 1\n", [], "keys with values"),
        ("learning_rate: 1\nlearning_rate: 2\n", [], "'learning_rate' stands twice"),
        ("max_seq_length: [64]\n", [], "max_seq_length: .* one value is needed"),
        ("", ["--rsa", "{num_regular: 1}", "--rsa.gate_init", "1"], "one would replace the other"),
        ("output_dir: !!python/object/apply:os.system [true]\n", [], "not valid YAML"),  # builds no objects
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path, text, words, said):
    with pytest.raises(ValueError, match=said) as raised:
        read(tmp_path, text, *words)
    assert "\n" not in str(raised.value)


def test_metrics_of_the_tasks_know_whether_less_is_better(tmp_path):
    words = ["--eval_strategy", "steps", "--load_best_model_at_end", "--metric_for_best_model"]
    for metric in ("bits_per_byte", "eval_loss_nats_per_token", "vd_score", "accuracy"):
        assert read(tmp_path, "", *words, metric).training.greater_is_better is (metric == "accuracy")


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "fixtures").glob("*/configs/*.yaml")), ids=str)
def test_the_run_files_of_earlier_versions_are_told_the_new_keys(path):
    with pytest.raises(ValueError, match="training.batch_size → per_device_train_batch_size") as raised:
        read_arguments([str(path)], DefectDataConfig)
    assert "\n" not in str(raised.value)
