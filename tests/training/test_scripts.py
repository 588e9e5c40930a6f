"""The two training scripts."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from rsa_hf import is_patched
from rsa_hf.calibration import procedure
from rsa_hf.calibration.choice import Choice
from rsa_hf.tasks.defect_detection import evaluate

ROOT = Path(__file__).parents[2]
SCRIPTS = {"lm": "train_language_model.py", "defect": "train_defect_detection.py"}


def command(task, arguments, config=None):
    config = config or {"lm": "lm_bytes_embedded.yaml", "defect": "defect_minilm_embedded.yaml"}[task]
    return [str(ROOT / "scripts" / SCRIPTS[task]), str(ROOT / "configs" / config), *map(str, arguments)]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script in this process; returns standard output, standard error and the exit code."""

    def run(task, *arguments, config=None):
        monkeypatch.setattr(sys, "argv", command(task, arguments, config))
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return printed.out, printed.err, code

    return run


def on_a_text(folder, sizes, **values):
    """Options that turn the config of a language model into a run of about a second."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text, not a long one\n" for i in range(400)))
    values |= {f"config_overrides.{name}": value for name, value in sizes.items()}
    values |= {"source": "files", "files.train": text, "block_size": 32, "batch_size": 4}
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.fixture
def language_model(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    return on_a_text(tmp_path, sizes, max_steps=6, eval_every_steps=3)


FUNCTIONS = [f"int f{i}(int a) {{ return a {'<=>'[i % 3]} {i}; }}" for i in range(40)]


@pytest.fixture
def defect_detection(tmp_path):
    """Options for a run of about a second: a small BERT, its tokenizer, and 40 functions, one in four defective."""
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(FUNCTIONS, trainers.BpeTrainer(vocab_size=100, special_tokens=special))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 32}
    model = BertModel(BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=32))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "bert")
    values = {"name_or_path": tmp_path / "bert", "source": "files", "max_length": 32, "chunk_overlap": 4}
    for i, split in enumerate(("train", "validation", "test")):
        path = values[f"{split}_file"] = tmp_path / f"{split}.jsonl"
        chosen = FUNCTIONS[:20] if split == "train" else FUNCTIONS[10 * i + 10 : 10 * i + 20]
        lines = [json.dumps({"func": text, "target": int(j % 4 == 0)}) for j, text in enumerate(chosen)]
        path.write_text("\n".join(lines))
    values |= {"epochs": 2, "batch_size": 8, "eval_batch_size": 4}
    return [f"--{key}={value}" for key, value in values.items()]


# --- language modelling ---------------------------------------------------------------------------------------


def test_a_language_model_is_trained_patched_and_plain(tmp_path, run, language_model):
    for name, extra in (("with RSA", []), ("plain", ["--rsa", "null"])):
        folder = tmp_path / name
        out, err, code = run("lm", *language_model, "--output_dir", folder, *extra)
        assert code == 0, err
        results = json.loads((folder / "results.json").read_text())
        patched = name == "with RSA"
        assert results["patched"] == patched
        assert results["steps"] == 6
        assert results["config"]["data"]["block_size"] == 32
        assert 0 < results["test"]["bits_per_byte"] < 9
        table = [line for line in out.splitlines() if line.startswith((name, "model"))]
        assert len(table) == 3
        assert f"{results['test']['bits_per_byte']:.5g}" in table[2]
        assert "training: 100%" in err
        assert (folder / "rsa.png").exists() == patched
        assert is_patched(AutoModelForCausalLM.from_pretrained(folder / "best")) == patched


@pytest.mark.parametrize(
    ("config", "sizes", "memory"),
    [
        ("lm_bytes_transformer_xl.yaml", {"d_model": 32, "n_layer": 1, "d_inner": 32, "mem_len": 16}, {"mem_len": 96}),
        ("lm_bytes_lstm.yaml", {"hidden_size": 32, "num_hidden_layers": 1}, {}),
        pytest.param(
            "lm_bytes_sru_plus_plus.yaml",
            {"hidden_size": 32, "projection_size": 32, "num_hidden_layers": 1, "mem_len": 16},
            {"mem_len": 96},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lm_bytes_block_recurrent.yaml",
            {"d_model": 32, "n_layer": 2, "d_inner": 32, "window_size": 16, "num_state_vectors": 8},
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lm_bytes_temporal_latent_bottleneck.yaml",
            {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "chunk_size": 8, "num_states": 4},
            {},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_language_model_with_memory_is_trained_and_evaluated(tmp_path, run, run_rsa_hf, config, sizes, memory):
    """With longer memory and other segments in evaluation, by the script and by `rsa-hf evaluate`."""
    values = {"max_steps": 40, "eval_every_steps": 20, "learning_rate": 1e-2, "eval_block_size": 24}
    values |= {f"eval_memory.{name}": value for name, value in memory.items()}
    options = on_a_text(tmp_path, sizes, output_dir=tmp_path / "out", **values)
    _, err, code = run("lm", *options, config=config)
    assert code == 0, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["config"]["data"]["carry_memory"]
    assert results["train_tokens"] == 40 * 4 * 32
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "best")
    assert all(getattr(trained.config, name) == value for name, value in sizes.items())

    def evaluated(*more):
        best = tmp_path / "out" / "best"
        code, out, err = run_rsa_hf("evaluate", "lm", best, ROOT / "configs" / config, *options, *more)
        assert code == 0, err
        return json.loads(out)["bits_per_byte"]

    assert evaluated() == pytest.approx(results["test"]["bits_per_byte"], rel=1e-6)
    # A state that holds the whole past gives the same score in any segments. A memory of a fixed number of tokens sees
    # more or less of the past, which matters for SRU++, whose attention has no positions. Blocks score worse.
    if "sru" not in config:
        assert evaluated("--eval_block_size=50") == pytest.approx(evaluated(), rel=1e-2 if memory else 1e-6)
    blocks = ["--carry_memory=false", "--eval_memory={}", "--eval_block_size=4"]
    assert evaluated(*blocks) > 1.02 * evaluated()


# --- defect detection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("with RSA", []),
        ("plain", ["--rsa", "null"]),
        ("with RSA", ["--long_functions", "chunk", "--max_length", "12", "--class_weights", "true"]),
    ],
)
def test_a_defect_detector_is_trained_patched_and_plain(tmp_path, run, defect_detection, name, extra):
    folder = tmp_path / "out"
    out, err, code = run("defect", *defect_detection, "--output_dir", folder, *extra)
    assert code == 0, err
    results = json.loads((folder / "results.json").read_text())
    assert results["patched"] == (name == "with RSA")
    assert results["test"]["num_examples"] == 10  # functions, however many chunks
    assert results["test"]["majority_accuracy"] == 0.7
    test = results["test"]
    areas = [f"{test['roc_auc']:.4f}", f"{test['average_precision']:.4f}"]
    for row, threshold, at in zip(
        out.splitlines()[-4:-2], (0.5, test["threshold"]), ("", "_at_threshold"), strict=True
    ):
        numbers = [f"{test[f'f1{at}']:.4f}", f"{test[f'mcc{at}']:.4f}"]
        shares = [f"{test[f'accuracy{at}']:.2%}", "70.00%"]
        assert row.split()[-9:] == ["test", f"{threshold:.4g}", *shares, *numbers, *areas, "10"]
        assert row.startswith(name)
    assert results["validation"]["threshold"] == test["threshold"]
    # The threshold is on the card of a patched model, and in the results beside `best` of any.
    settings = command("defect", [*defect_detection, *extra])[1:]
    assert evaluate(str(folder / "best"), "test", settings) == pytest.approx(test)
    shutil.copytree(folder / "best", tmp_path / "moved")
    assert ("threshold" in evaluate(str(tmp_path / "moved"), "test", settings)) == (name == "with RSA")
    assert evaluate(str(tmp_path / "moved"), "test", settings, threshold=0.1)["threshold"] == 0.1
    assert "defective" in out.splitlines()[0]  # the audit
    audit = json.loads((folder / "audit.json").read_text())
    assert audit["splits"]["train"]["examples"] == 20
    assert (folder / "rsa.png").exists() == (name == "with RSA")
    for saved in ("best", "final"):
        assert is_patched(AutoModelForSequenceClassification.from_pretrained(folder / saved)) == (name == "with RSA")
        assert AutoTokenizer.from_pretrained(folder / saved).model_max_length == 32


def test_a_defect_detector_may_be_a_decoder_without_a_padding_token(tmp_path, run, defect_detection):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert", pad_token=None, eos_token="[SEP]")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    GPT2Model(GPT2Config(n_layer=1, n_embd=24, n_head=12, vocab_size=len(tokenizer), n_positions=32)).save_pretrained(
        tmp_path / "gpt2"
    )
    more = ["--name_or_path", tmp_path / "gpt2", "--output_dir", tmp_path / "out"]
    _, err, code = run("defect", *defect_detection, *more)
    assert code == 0, err
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "best")
    assert is_patched(best)
    assert best.config.pad_token_id == tokenizer.eos_token_id


# --- errors ---------------------------------------------------------------------------------------------------

SHORT_GPT2 = "{vocab_size: 256, n_embd: 16, n_layer: 1, n_head: 8, n_positions: 8}"


@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        ("lm", ["--lerning_rate", "1"], "--lerning_rate: unknown key 'lerning_rate'. Did you mean 'learning_rate'?"),
        ("lm", ["--rsa.num_regular", "9"], "layer 0 has 8 attention heads, but the plan asks for"),
        ("lm", ["--files.train", "absent.txt"], "[Errno 2] No such file or directory: 'absent.txt'"),
        ("lm", ["--tokenizer", "null"], "model.tokenizer=None"),
        ("lm", ["--config_overrides.vocab_size", "100"], "the tokenizer has 256 tokens, the model 100."),
        ("lm", ["--model_type", "gpt2", "--config_overrides", SHORT_GPT2], "data.block_size="),
        ("lm", ["--carry_memory", "true"], "a LlamaForCausalLM carries nothing from segment to segment"),
        ("lm", ["--eval_memory.mem_len", "9"], "data: eval_memory={'mem_len': 9}: has no effect without carry_memory"),
        (
            "lm",
            ["--eval_memory.mem_len", "9", "--carry_memory", "true"],
            "eval_memory=['mem_len']: a LlamaForCausalLM allows none",
        ),
        ("lm", ["--class_weights", "true"], "training.class_weights=True, but this task has no classes"),
        ("defect", ["--bach_size", "1"], "--bach_size: unknown key 'bach_size'. Did you mean 'batch_size'?"),
        ("defect", ["--max_length", "64"], "data.max_length=64: this model takes at most 32 tokens."),
        ("defect", ["--validation_file", "null"], "the data has no validation split"),
        ("defect", ["--train_file", "absent.jsonl"], "[Errno 2] No such file or directory: 'absent.jsonl'"),
        ("defect", ["--name_or_path", "/absent"], ""),  # in transformers' words
        ("defect", ["--name_or_path", "null", "--model_type", "bert"], "model.tokenizer=None"),
    ],
)
def test_wrong_settings_give_one_line_and_no_traceback(
    tmp_path, run, language_model, defect_detection, task, arguments, words
):
    settings = language_model if task == "lm" else defect_detection
    out, err, code = run(task, *settings, "--output_dir", tmp_path / "out", *arguments)
    assert code == 2
    error = err[err.index("error: ") :]
    assert error.startswith(f"error: {words}")
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_a_decoder_has_the_same_scores_with_any_padding_token(tmp_path, defect_detection):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    sizes = {"n_embd": 48, "n_layer": 1, "n_head": 12, "n_positions": 32, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    scores = []
    for padding, batch_size in ((None, 1), (None, 10), (tokenizer.unk_token_id, 10)):
        model.config.pad_token_id = padding
        for part in (tokenizer, model):
            part.save_pretrained(tmp_path / "decoder")
        settings = [str(ROOT / "configs" / "defect_minilm_embedded.yaml"), *map(str, defect_detection)]
        settings += ["--eval_batch_size", str(batch_size)]
        scores.append(evaluate(str(tmp_path / "decoder"), "test", settings))
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(ValueError, match=r"data\.max_length=64: this model takes at most 32 tokens\."):
        evaluate(str(tmp_path / "decoder"), "test", [*settings, "--max_length", "64"])


# --- calibration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lm", "defect"])
def test_a_run_is_calibrated_on_its_training_data(task, tmp_path, run, request, monkeypatch):
    options = request.getfixturevalue({"lm": "language_model", "defect": "defect_detection"}[task])
    calibrations = []

    def choose(scores, *_):
        calibrations.append(len(scores.recurrence[0]))
        return [Choice(0, 1, int(scores.means[0][1].argmin()), 3.0, 1e-9)]

    monkeypatch.setattr(procedure, "choose", choose)
    monkeypatch.setattr(procedure, "CERTAIN", -1e9)
    calibrate = "{max_rows: 16, gate_passes: 1, head_steps: 2}"
    monkeypatch.setattr(procedure._Share, "move", lambda *_: None)
    options = [*options, "--output_dir", tmp_path / "run", "--rsa", f"{{calibrate: {calibrate}}}"]
    out, err, code = run(task, *options)
    assert code == 0, err
    assert "1 heads; the loss of 16 rows" in out
    found = json.loads((tmp_path / "run" / "calibration.json").read_text())
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["config"]["rsa"] == {"calibrate": found["made for"]["rsa"]["calibrate"]}
    assert results["calibration"] == {"loss, plain": found["loss"], "loss": found["loss"] - found["gain"]}
    best = (AutoModelForCausalLM if task == "lm" else AutoModelForSequenceClassification).from_pretrained(
        tmp_path / "run" / "best"
    )
    [head] = best.config.rsa["plan"]["heads"]
    assert [head] == found["config"]["heads"] and (head["layer"], head["head"]) == (0, 1)
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    assert "calibration" in card and f"{found['loss']:.4g}"[:4] in card
    # A run that continues reads what was found; one that starts over, or has another seed, calibrates again.
    times = len(calibrations)
    for more, is_new in (
        ([], False),
        (["--resume", "never"], True),
        (["--training.seed", 1, "--resume", "never"], True),
    ):
        _, err, code = run(task, *options, *more)
        assert code == 0, err
        assert (len(calibrations) > times) == is_new
        times = len(calibrations)


def test_a_run_without_a_gain_stays_plain(tmp_path, run, language_model, monkeypatch):
    monkeypatch.setattr(procedure, "choose", lambda *_: [])
    options = [*language_model, "--output_dir", tmp_path / "run", "--rsa", "{calibrate: {}}"]
    out, err, code = run("lm", *options)
    assert code == 0, err
    assert "no heads: the loss of 64 rows" in out
    assert not is_patched(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best"))


def test_memory_over_rows_cannot_be_calibrated(tmp_path, run, language_model):
    options = [*language_model, "--output_dir", tmp_path / "run", "--rsa", "{calibrate: {}}", "--carry_memory", "true"]
    _, err, code = run("lm", *options)
    assert code == 2 and "rsa.calibrate reads single rows" in err
