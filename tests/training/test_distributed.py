"""The Accelerate configs, and the two scripts in two processes: they learn like one, also when they are killed."""

import json

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from script_runs import DEFECTS, LANGUAGE_MODEL, arguments, run_script, write_data

from launching import ROOT, run_python
from small_runs import saved_weights

CONFIGS = ROOT / "configs" / "accelerate"


SAYS = {
    "single_cpu": {"use_cpu": True},
    "two_cpus_gloo": {"use_cpu": True, "multi_gpu": True, "use_fsdp": False},
    "one_gpu_bf16": {"multi_gpu": False},
    "multi_gpu_ddp": {"multi_gpu": True},
    "fsdp2_bf16": {
        "use_fsdp": True, "fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_config_launches_what_its_name_says(name):
    file = CONFIGS / f"{name}.yaml"
    given = yaml.safe_load(file.read_text())
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "script.py"]))
    for key, value in {**SAYS[name], **{key: given[key] for key in ("num_processes", "mixed_precision")}}.items():
        assert str(getattr(args, key)).lower() == str(value).lower(), key


def launch(*command, **options):
    config = ("--config_file", CONFIGS / "two_cpus_gloo.yaml")
    return run_python("-m", "accelerate.commands.launch", *config, *command, **options)


@pytest.mark.slow
@pytest.mark.parametrize("script", [LANGUAGE_MODEL, DEFECTS])
def test_two_processes_that_are_killed_and_resumed_learn_like_one(script, tmp_path):
    """Each step takes 8 examples: 2 in each of 2 parts in each of 2 processes, or 8 in one."""
    data = write_data(tmp_path / "data", dropout=0.0)  # which every process draws for itself
    # A low rate: Adam divides by gradients, and so makes much of their rounding where they are small.
    settings = ["--max_train_steps", 7, "--checkpointing_steps", 3, "--seed", 1, "--learning_rate", 2e-4]
    run_script(script, data, tmp_path / "one", *settings, "--per_device_train_batch_size", 8)
    settings += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]
    command = arguments(script, data, tmp_path / "two", *settings, "--resume_from_checkpoint", "latest")

    killed = launch(ROOT / "tests" / "training" / "script_runs.py", *command)
    assert killed.returncode != 0
    assert [folder.name for folder in (tmp_path / "two").glob("step_*")] == ["step_3"], killed.stderr
    resumed = launch(*command, code=0)
    assert resumed.stdout.count("step 7:") == 1  # one process prints

    found, expected = saved_weights(tmp_path / "two"), saved_weights(tmp_path / "one")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Softmax does not depend on it: its gradient is a rounding error.
        if not name.endswith("key.bias"):
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two")]
    assert results[1] == pytest.approx(results[0], rel=1e-5)
