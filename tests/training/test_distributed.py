"""The Accelerate configs, and the two scripts in two processes: they learn like one, also when they are killed."""

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from launching import ROOT, run_python
from script_runs import DEFECTS, LANGUAGE_MODEL, arguments, run_script, trained_weights, write_data

CONFIGS = ROOT / "configs" / "accelerate"


# --- the configs ----------------------------------------------------------------------------------------------------


def launched_with(config):
    """The arguments that `accelerate launch` reads from a file."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / config), "script.py"])
    return _validate_launch_command(args)[0]


@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_accelerate_reads_every_config(config):
    read = load_config_from_file(str(CONFIGS / config)).to_dict()
    given = yaml.safe_load((CONFIGS / config).read_text())
    for key, value in given.items():
        assert str(read[key]) == str(value), key
    args = launched_with(config)
    assert args.num_processes == given["num_processes"]
    assert args.mixed_precision == given["mixed_precision"]
    # Each file shows the command that uses it.
    assert f"--config_file configs/accelerate/{config}" in (CONFIGS / config).read_text()


def test_every_config_launches_what_its_name_says():
    assert launched_with("single_cpu.yaml").use_cpu
    two = launched_with("two_cpus_gloo.yaml")
    assert two.use_cpu and two.multi_gpu and not two.use_fsdp
    assert not launched_with("one_gpu_bf16.yaml").multi_gpu
    assert launched_with("multi_gpu_ddp.yaml").multi_gpu
    fsdp = launched_with("fsdp2_bf16.yaml")
    assert fsdp.use_fsdp and fsdp.fsdp_version == 2
    assert str(fsdp.fsdp_cpu_ram_efficient_loading).lower() == "false"
    assert fsdp.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"


# --- two processes --------------------------------------------------------------------------------------------------


def launch(*command):
    return run_python("-m", "accelerate.commands.launch", "--config_file", CONFIGS / "two_cpus_gloo.yaml", *command)


@pytest.mark.slow
@pytest.mark.parametrize("script", [LANGUAGE_MODEL, DEFECTS])
def test_two_processes_that_are_killed_and_resumed_learn_like_one(script, tmp_path):
    """Each step takes 8 examples: 2 in each of 2 parts in each of 2 processes, or 8 in one."""
    data = write_data(tmp_path / "data", dropout=0.0)  # which every process draws for itself
    settings = ["--max_train_steps", 7, "--checkpointing_steps", 3, "--seed", 1]
    run_script(script, data, tmp_path / "one", *settings, "--per_device_train_batch_size", 8)
    settings += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]
    command = arguments(script, data, tmp_path / "two", *settings, "--resume_from_checkpoint", "latest")

    killed = launch(ROOT / "tests" / "training" / "script_runs.py", *command)
    assert killed.returncode != 0
    assert [folder.name for folder in (tmp_path / "two").glob("step_*")] == ["step_3"], killed.stderr
    resumed = launch(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("step 7:") == 1  # one process prints

    found, expected = trained_weights(tmp_path / "two"), trained_weights(tmp_path / "one")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Softmax does not depend on it: its gradient is a rounding error.
        if not name.endswith("key.bias"):
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two")]
    assert results[1] == pytest.approx(results[0], rel=1e-5)
