"""The search for a head plan: its plan can be pasted, a search resumes, and its Trainer trains like the script."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from rsa_hf import RSAConfig, rsa_report
from rsa_hf.tasks.language_model_trainer import LanguageModelTrainer
from rsa_hf.tasks.language_modeling import (
    LanguageModelingDataConfig,
    evaluate_language_model,
    prepare_language_modeling,
)
from rsa_hf.tasks.search_language_model import main, plan_as_yaml
from rsa_hf.training import train
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.run import load_model

CONFIG = """
model:
  model_type: transfo-xl
  config_overrides: {{vocab_size: 256, cutoffs: [], div_val: 1, d_model: 16, n_head: 4, d_head: 4, d_inner: 16,
                      n_layer: 2, mem_len: 8, clamp_len: -1, same_length: false, dropout: 0.0, eos_token_id: null}}
  tokenizer: bytes
rsa: {{num_regular: 1, num_dilated_cyclical_pairs: 1, dilation: 4, gate_init: 0.0}}
data: {{source: files, files: {{train: {text}}}, block_size: 8, carry_memory: true, max_eval_bytes: 60}}
training: {{output_dir: {output}, learning_rate: 5.0e-3, max_steps: 7, batch_size: 3, gradient_accumulation_steps: 2,
           warmup_ratio: 0.2, lr_schedule: constant}}
"""


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 6)  # about 5 segments per track
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(text=text, output=tmp_path / "out"))
    return path


@pytest.fixture
def run(config, capsys):
    """Search, and return an exit code, what is printed, and the error."""

    def run(*arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--trials", type=int, default=30)
        parser.add_argument("--dilations", default="2,4,8")
        parser.add_argument("--storage", type=Path)
        known, settings = parser.parse_known_args(map(str, arguments))
        try:
            main([str(config), *settings], known.trials, [int(d) for d in known.dilations.split(",")], known.storage)
        except (ValueError, OSError, ImportError) as error:
            return 2, "", str(error)
        return 0, capsys.readouterr().out, ""

    return run


def test_a_search_resumes_and_its_best_plan_can_be_pasted(run, config, tmp_path):
    pytest.importorskip("optuna", reason="a search needs it: pip install 'rsa_hf[search]'")
    code, out, _ = run("--trials", 2, "--dilations", "2,4")
    assert code == 0 and "The best of 2" in out
    code, out, _ = run("--trials", 4, "--dilations", "2,4")
    assert code == 0 and "The best of 4" in out
    table = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert sorted(int(row[0]) for row in table) == [0, 1, 2, 3]
    # The plan of the file is tried first.
    [first] = [row for row in table if row[0] == "0"]
    assert first[2:] == ["1", "0", "0", "1", "4"]
    scores = [float(row[1]) for row in table]
    assert scores == sorted(scores) and scores[0] < scores[-1]
    # A search that has ended prints the same.
    assert run("--trials", 4, "--dilations", "2,4")[1] == out
    text = (tmp_path / "out" / "head_plan.yaml").read_text()
    assert text.split("\n", 1)[1].strip() in out
    settings = yaml.safe_load(config.read_text()) | yaml.safe_load(text)
    config.write_text(yaml.safe_dump(settings))
    pasted = read_run_config([str(config)], LanguageModelingDataConfig)
    model = load_model(AutoModelForCausalLM, pasted.model, pasted.rsa)
    assert [len(layer.heads) for layer in rsa_report(model).layers] == [
        int(table[0][2]) + 2 * int(table[0][3]) + int(table[0][4]) + 2 * int(table[0][5])
    ] * 2


def test_wrong_arguments_are_refused(run, tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="a search needs it: pip install 'rsa_hf[search]'")
    assert run("--trials", 1)[0] == 0
    code, _, err = run("--trials", 2, "--max_steps", 5)
    assert code == 2 and "trials under other settings (training)" in err
    code, _, err = run("--class_weights", "true")
    assert code == 2 and "training.class_weights=True: language modelling has no classes" in err
    other = tmp_path / "notes.txt"
    other.write_text("not a search\n")
    code, _, err = run("--storage", other)
    assert code == 2 and "notes.txt is not the file of a search" in err
    assert other.read_text() == "not a search\n"
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run()
    assert code == 2 and "pip install 'rsa_hf[search]'" in err


def test_the_trainer_trains_like_the_script(config):
    """Weights and score over two epochs with memory, against the loop of `rsa-hf train`."""
    settings = read_run_config([str(config)], LanguageModelingDataConfig)
    training = settings.training
    text = prepare_language_modeling(settings.data, None, num_tracks=6)
    assert 1 < len(text.train) / 6 < training.max_steps

    def fresh(_=None):
        torch.manual_seed(5)
        return load_model(AutoModelForCausalLM, settings.model, settings.rsa)

    trainer = LanguageModelTrainer(fresh, text, training, progress=False)
    for _ in range(2):  # the second run starts from a new model
        trainer.train()
    expected = fresh()
    train(
        expected, text.train, torch.utils.data.default_collate, lambda m: evaluate_language_model(m, text.validation, 8),
        training, best_metric="bits_per_byte", greater_is_better=False,
    )  # fmt: skip
    start = fresh()
    for (name, found), p, before in zip(
        trainer.model.named_parameters(), expected.parameters(), start.parameters(), strict=True
    ):
        moved = (p - before).abs().max()
        assert (found - p).abs().max() <= 1e-3 * moved + 1e-7, name
    score = evaluate_language_model(expected, text.validation, 8)["bits_per_byte"]
    assert trainer.evaluate()["eval_bits_per_byte"] == pytest.approx(score, abs=1e-5)


def test_warm_up_can_last_the_whole_training(config):
    settings = read_run_config([str(config), "--warmup_ratio", "1"], LanguageModelingDataConfig)
    text = prepare_language_modeling(settings.data, None, num_tracks=6)
    trainer = LanguageModelTrainer(lambda _: torch.nn.Linear(1, 1), text, settings.training, progress=False)
    assert trainer.args.get_warmup_steps(400) == 400


def test_a_plan_survives_yaml():
    plan = RSAConfig(
        num_regular=1, num_cyclical_pairs=0, num_dilated_regular=2, dilation=(3, 9), gate_init=(-1.0, 2.0)
    )
    content = yaml.safe_load(plan_as_yaml(plan))
    assert RSAConfig.from_dict(content["rsa"]) == plan
    assert set(content["rsa"]) == {
        *("num_regular", "num_cyclical_pairs", "num_dilated_regular", "dilation", "gate_init")
    }
