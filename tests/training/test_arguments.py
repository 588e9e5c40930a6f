"""The settings of a run from a YAML file and the command line, and the errors."""

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

from rsa_hf import HeadConfig, RSAConfig
from rsa_hf.calibration import CalibrationSettings
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.training.arguments import ConfigError, ModelSettings, TrainingSettings, read_run_config

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = "model: {name_or_path: gpt2}\n"


@dataclass
class Data:
    source: Literal["embedded", "hub"] = "embedded"
    files: dict[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 2)
    limit: int | None = None
    share: float = 0.5
    name: str | None = None
    shuffle: bool = True
    seed: int = 0


@pytest.fixture
def read(tmp_path):
    def read(text: str, *arguments: str, data=Data):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return read_run_config([str(path), *arguments], data)

    return read


def test_sections_that_are_left_out_have_defaults(read):
    config = read(MODEL)
    assert config.model == ModelSettings(name_or_path="gpt2")
    assert config.rsa is None
    assert config.data == Data()
    assert config.training == TrainingSettings()


def test_all_sections_are_read(read):
    config = read(
        "model: {model_type: llama, config_overrides: {hidden_size: 8}}\n"
        "rsa: {num_regular: 2, gate_init: -inf, layers: [0, 1]}\n"
        "data: {lengths: [4, 5], shuffle: false, name: x}\n"
        "training: {learning_rate: 1e-3, mixed_precision: no, resume: never}\n"
    )
    assert config.model.config_overrides == {"hidden_size": 8}
    assert config.rsa == RSAConfig(num_regular=2, gate_init=-math.inf, layers=(0, 1))
    assert config.data == Data(lengths=(4, 5), shuffle=False, name="x")
    assert (config.training.learning_rate, config.training.mixed_precision) == (1e-3, "no")


@pytest.mark.parametrize("spelling", [["--learning_rate", "1e-4"], ["--training.learning_rate=1e-4"]])
def test_the_command_line_overrides_the_file(read, spelling):
    assert read(MODEL + "training: {learning_rate: 2}\n", *spelling).training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("arguments", "section", "key", "value"),
    [
        (["--share", "1"], "data", "share", 1.0),
        (["--share", ".5"], "data", "share", 0.5),
        (["--limit", "1e4"], "data", "limit", 10_000),
        (["--limit", "null"], "data", "limit", None),
        (["--files", "{train: a.txt}"], "data", "files", {"train": "a.txt"}),
        (["--files.train", "a.txt", "--files.test=b.txt"], "data", "files", {"train": "a.txt", "test": "b.txt"}),
        (["--name", "2024"], "data", "name", "2024"),
        (["--name", "1e-4"], "data", "name", "1e-4"),
        (["--name=--odd"], "data", "name", "--odd"),
        (["--data.seed", "3"], "data", "seed", 3),
        (["--training.seed", "3"], "training", "seed", 3),
        (["--mixed_precision", "no"], "training", "mixed_precision", "no"),
        (["--gradient_checkpointing", "true"], "training", "gradient_checkpointing", True),
        (["--max_grad_norm", "null"], "training", "max_grad_norm", None),
        (["--gate_init", "-1.5"], "rsa", "gate_init", -1.5),
        (["--gate_init", "-inf"], "rsa", "gate_init", -math.inf),
        (["--rsa.nu_init", "[-3, 0]"], "rsa", "nu_init", (-3.0, 0.0)),
        (["--report_to", "tensorboard"], "training", "report_to", ["tensorboard"]),
        (["--report_to", "[tensorboard, wandb]"], "training", "report_to", ["tensorboard", "wandb"]),
        (["--report_to", "null"], "training", "report_to", None),
        (["--config_overrides.size", "1e4"], "model", "config_overrides", {"size": 1e4}),
        (["--rsa", "{num_regular: 3}", "--rsa.dilation", "2"], "rsa", "num_regular", 3),
    ],
)
def test_values_get_the_type_of_their_field(read, arguments, section, key, value):
    got = getattr(getattr(read(MODEL, *arguments), section), key)
    assert got == value
    assert type(got) is type(value)


def test_named_heads_and_calibration_are_read(read):
    head = {"layer": 1, "head": 3, "kind": "cos", "decay": 0.5, "gate": 0.25, "theta": 1.5, "dilation": 2}
    config = read(MODEL + f"rsa: {{heads: [{json.dumps(head)}]}}\n")
    assert config.rsa == RSAConfig(heads=[HeadConfig(**head)]) and config.calibrate is None
    assert config.to_dict()["rsa"]["heads"] == [head]
    config = read(MODEL + "rsa: {calibrate: {max_rows: 20}}\n", "--rsa.calibrate.max_heads", "7")
    assert config.rsa is None
    assert config.calibrate == CalibrationSettings(max_rows=20, max_heads=7)
    assert config.to_dict()["rsa"] == {"calibrate": asdict(config.calibrate)}
    assert read(MODEL, "--rsa.calibrate", "{}").calibrate == CalibrationSettings()


def test_rsa_null_gives_a_plain_model(read):
    assert read(MODEL + "rsa: {num_regular: 2}\n", "--rsa", "null").rsa is None


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        # unknown names
        ("modle: {}\n", [], ["'modle'", "Did you mean 'model'", "model, rsa, data, training"]),
        (MODEL + "training: {learning_rat: 1}\n", [], ["training", "'learning_rat'", "'learning_rate'", "batch_size"]),
        (MODEL + "rsa: {num_regulr: 1}\n", [], ["rsa", "'num_regulr'", "'num_regular'", "parameter_scale"]),
        (MODEL + "data: {files: {}, 3: 4}\n", [], ["data", "unknown key 3", "source"]),
        (MODEL, ["--lerning_rate", "1"], ["--lerning_rate", "Did you mean 'learning_rate'"]),
        (MODEL, ["--training.lerning_rate", "1"], ["--training.lerning_rate", "Did you mean 'learning_rate'"]),
        (MODEL, ["--trainin.seed", "1"], ["--trainin.seed", "unknown key 'trainin'"]),
        (MODEL, ["--model", "gpt2"], ["model", "gpt2"]),
        # ambiguous or incomplete
        (MODEL, ["--seed", "1"], ["--seed", "--data.seed or --training.seed"]),
        (MODEL, ["--share"], ["--share has no value", "--share=VALUE"]),
        (MODEL, ["--share", "--seed", "1"], ["--share has no value"]),
        (MODEL, ["other.yaml"], ["one YAML file", "other.yaml"]),
        # wrong types
        (MODEL + "training: {batch_size: many}\n", [], ["training.batch_size", "Expected a <class 'int'>", "many"]),
        (MODEL + "training: {batch_size: 1.5}\n", [], ["training.batch_size", "int", "1.5"]),
        (MODEL + "training: {batch_size: true}\n", [], ["training.batch_size", "int", "True"]),
        (MODEL, ["--batch_size", "many"], ["training.batch_size", "int", "many"]),
        (MODEL, ["--batch_size", "1.5e0"], ["training.batch_size", "int", "1.5"]),
        (MODEL + "training: {learning_rate: fast}\n", [], ["training.learning_rate", "float", "fast"]),
        (MODEL + "training: {learning_rate: null}\n", [], ["training.learning_rate=None: a value of type float"]),
        (MODEL + "training: {gradient_checkpointing: on_off}\n", [], ["gradient_checkpointing", "bool", "on_off"]),
        (MODEL + "training: {mixed_precision: fp8}\n", [], ["mixed_precision", "Literal", "bf16", "fp8"]),
        (MODEL + "training: {max_steps: x}\n", [], ["training.max_steps", "int", "None", "x"]),
        (MODEL + "data: {name: 2024}\n", [], ["data.name", "str", "2024"]),
        (MODEL + "data: {lengths: [1, x]}\n", [], ["data.lengths", "int", "x"]),
        (MODEL + "data: {files: a.txt}\n", [], ["data.files", "dict", "a.txt"]),
        (MODEL + "rsa: {num_regular: x}\n", [], ["rsa.num_regular", "class 'int'", "x"]),
        (MODEL + "rsa: 3\n", [], ["rsa=3", "a mapping"]),
        # values that are not allowed
        ("", [], ["model: name_or_path=None and model_type=None", "set one of the two"]),
        ("model: {name_or_path: a, model_type: b}\n", [], ["name_or_path='a' and model_type='b'"]),
        (MODEL + "training: {batch_size: 0}\n", [], ["training: batch_size=0", "≥ 1"]),
        (MODEL + "training: {learning_rate: -1}\n", [], ["learning_rate=-1.0", "positive"]),
        (MODEL + "training: {epochs: .inf}\n", [], ["epochs=inf", "positive"]),
        (MODEL + "training: {weight_decay: .nan}\n", [], ["weight_decay=nan", "≥ 0"]),
        (MODEL + "training: {warmup_ratio: 2}\n", [], ["warmup_ratio=2.0", "from 0 to 1"]),
        (MODEL + "training: {seed: -1}\n", [], ["seed=-1", "from 0"]),
        (MODEL + "training: {output_dir: ''}\n", [], ["output_dir=''"]),
        (
            MODEL + "training: {report_to: tensorbord}\n",
            [],
            ["training: report_to=['tensorbord']", "tensorboard, wandb"],
        ),
        (MODEL + "rsa: {parameter_scale: 0}\n", [], ["rsa: parameter_scale=0"]),
        (MODEL + "rsa: {calibrate: {max_rows: 2}}\n", [], ["rsa: max_rows=2: a whole number ≥ 12"]),
        (MODEL + "rsa: {calibrate: {max_rws: 20}}\n", [], ["rsa.calibrate", "max_rws"]),
        (MODEL + "rsa: {calibrate: {}, gate_init: 0}\n", [], ["calibrate: it chooses the heads", "so gate_init"]),
        (MODEL + "rsa: {calibrate: {class_path: os.system}}\n", [], ["rsa.calibrate", "not allowed"]),
        # not valid YAML, or not plain YAML
        ("model: [\n", [], ["run.yaml: not valid YAML", "line"]),
        ("- 1\n", [], ["run.yaml: sections with settings are needed, got list"]),
        (MODEL + MODEL, [], ["'model' is given more than once", "line 1"]),
        ("model: !!python/object/apply:os.getcwd []\n", [], ["not valid YAML", "could not determine a constructor"]),
        (MODEL, ["--files", "{a"], ["--files {a: not valid YAML"]),
    ],
)
def test_wrong_settings_are_refused(read, text, arguments, words):
    with pytest.raises(ConfigError) as error:
        read(text, *arguments)
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read"):
        read_run_config([str(tmp_path / "absent.yaml")], Data)
    with pytest.raises(ConfigError, match="one YAML file is needed.*got none"):
        read_run_config(["--share", "1"], Data)


def test_help_names_every_key_with_type_default_and_docstring(read, capsys):
    with pytest.raises(SystemExit) as stop:
        read(MODEL, "--help", data=LanguageModelingDataConfig)
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    sections = {
        "model": ModelSettings,
        "rsa": RSAConfig,
        "data": LanguageModelingDataConfig,
        "training": TrainingSettings,
    }
    for name, section in sections.items():
        for each in fields(section):
            assert re.search(rf"--{name}\.{each.name} \S.*?\S \(type: [^()]*, default: ", words), each.name
    assert "AdamW's learning rate" in words


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("published/*.yaml")]), ids=lambda path: path.stem
)
def test_shipped_configs_are_valid_and_explained(path):
    data = {"defect": DefectDataConfig, "lm": LanguageModelingDataConfig}[path.stem.split("_")[0]]
    config = read_run_config([str(path)], data)
    has_heads = config.model.model_type != "recurrent"
    assert (config.rsa is not None) == has_heads
    assert config.training.output_dir.startswith("outputs/")
    # Settings survive being written and read.
    if has_heads:
        assert RSAConfig.from_dict(config.to_dict()["rsa"]) == config.rsa
    for line in path.read_text(encoding="utf-8").splitlines():
        is_section = line.endswith(":") and not line.startswith("   ")
        assert not line.strip() or "#" in line or is_section, f"{path.name}: {line!r} has no comment"
