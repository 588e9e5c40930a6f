"""The configs of published models build models of the published sizes, on the meta device."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from launching import ROOT
from rsa_hf import patch_model, rsa_report
from rsa_hf.tasks.language_modeling import LanguageModelingDataConfig, main
from rsa_hf.training.arguments import read_arguments
from rsa_hf.training.model_setup import load_model

FOLDER = ROOT / "configs" / "published"


def size(name, *arguments):
    run = read_arguments([str(FOLDER / f"{name}.yaml"), *arguments], LanguageModelingDataConfig)
    with torch.device("meta"):
        model = load_model(AutoModelForCausalLM, run.model)
        return (model if run.rsa.config is None else patch_model(model, run.rsa.config)).num_parameters()


@pytest.mark.parametrize(
    ("layers", "plain", "rsa"), [(10, 34_139_675, 50), (14, 47_789_595, 70), (16, 54_614_555, 80)]
)
def test_transformer_xl_has_the_published_number_of_parameters(layers, plain, rsa):
    arguments = [] if layers == 14 else ["--config_overrides.n_layer", str(layers)]
    assert size("lm_text8_transformer_xl", *arguments) == plain + rsa
    assert size("lm_text8_transformer_xl", *arguments, "--rsa", "none") == plain


@pytest.mark.parametrize("corpus", ["text8", "enwik8"])
def test_block_recurrent_has_rsa_heads_in_all_layers_but_the_recurrent_one(corpus):
    name = f"lm_{corpus}_block_recurrent"
    assert size(name) == size(name, "--rsa", "none") + 13 * 5


def test_a_tiny_version_of_each_config_trains(tmp_path):
    """Two steps with reduced sizes, but the plan and the tokenizer of the config."""
    (tmp_path / "text.txt").write_text(" the quick brown fox jumps over the lazy dog" * 100)
    small = {"d_model": 32, "d_head": 4, "d_inner": 32, "n_layer": 3}
    for path in sorted(FOLDER.glob("*.yaml")):
        sizes = dict(small, **({"mem_len": 16} if "xl" in path.stem else {"window_size": 16, "num_state_vectors": 4}))
        overrides = [word for key, value in sizes.items() for word in (f"--config_overrides.{key}", str(value))]
        output = tmp_path / path.stem
        main(
            [str(path), *overrides, "--train_file", str(tmp_path / "text.txt"), "--block_size", "16",
             "--max_steps", "2", "--per_device_train_batch_size", "2", "--eval_steps", "2", "--save_steps", "2", "--use_cpu", "--output_dir", str(output)]
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(output)
        assert len(rsa_report(model).layers) == (3 if "xl" in path.stem else 2)
