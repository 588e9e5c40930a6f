"""Two processes learn like one, and only one of them writes; the configs in `configs/accelerate/`."""

import json
import math
from pathlib import Path

import distributed_run as single
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from launching import ROOT, run_python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rsa_hf import is_patched
from small_runs import assert_same_runs, classifier, gpt2, lines, logged, stack, texts

CONFIGS = ROOT / "configs" / "accelerate"
SCRIPT = Path(single.__file__)


def launch(config, *command):
    return run_python("-m", "accelerate.commands.launch", "--config_file", CONFIGS / config, *command)


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


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of one launch of two processes, for all tests in which they do not fail."""
    folder = tmp_path_factory.mktemp("two")
    done = launch("two_cpus_gloo.yaml", SCRIPT, "train", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder and the Trainer of the same runs in this process, with the same global batch."""
    folder = tmp_path_factory.mktemp("one")
    single.run_loop(folder / "whole", texts(11), batch_size=4, report_to=["tensorboard"])
    return folder, single.run_trainer(folder / "trainer", batch_size=4)


def assert_close_weights(left, right, start, tolerance):
    """Compare weights up to a share of how far training has moved each parameter."""
    assert left.keys() == right.keys()
    for name, value in right.items():
        if name.endswith("key.bias"):
            continue  # softmax does not depend on it, so its gradient is a rounding error
        moved = (value - start[name]).norm()
        assert moved > 0, name
        assert (left[name] - value).norm() < tolerance * moved, name


@pytest.mark.slow
def test_two_processes_learn_like_one(two, one):
    for rank in (0, 1):
        found = json.loads((two / f"rank{rank}.json").read_text())
        assert found["processes"] == 2
        assert found["device"].startswith("cpu")
    ours, alone = lines(two / "whole"), lines(one[0] / "whole")
    assert [line["step"] for line in ours] == list(range(1, 8))
    for left, right in zip(ours, alone, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert (left["tokens"], left["epoch"]) == (right["tokens"], right["epoch"])
        assert left.get("eval", {}).keys() == right.get("eval", {}).keys()
    start = gpt2(0.0).state_dict()
    states = [AutoModelForCausalLM.from_pretrained(f / "whole" / "final").state_dict() for f in (two, one[0])]
    assert_close_weights(*states, start, tolerance=2e-3)
    # The control: the mean of the two processes' means is another loss.
    batch = [texts(11)[i] for i in (0, 1, 9, 10)]
    halves = [gpt2(0.0)(**stack(half)).loss.item() for half in (batch[:2], batch[2:])]
    whole = gpt2(0.0)(**stack(batch)).loss.item()
    assert abs(sum(halves) / 2 - whole) > 1e-4 * whole


@pytest.mark.slow
def test_only_the_main_process_writes_to_trackers(two, one):
    files = [sorted(file.name.split(".")[-2] for file in (f / "whole").rglob("events.*")) for f in (two, one[0])]
    assert len(files[0]) == len(files[1]) > 0
    process = set(files[0])
    assert len(process) == 1  # the number of the process that wrote a file


@pytest.mark.slow
def test_killed_and_continued_in_two_processes_is_bitwise_the_whole_run(two):
    assert_same_runs(two / "parts", two / "whole")


@pytest.mark.slow
def test_each_of_two_processes_carries_the_memory_of_its_tracks(two, tmp_path):
    single.run_carried(tmp_path, batch_size=4)
    assert logged(two / "carried") == pytest.approx(logged(tmp_path), rel=1e-5)
    assert logged(two / "carried", "tokens") == logged(tmp_path, "tokens")
    checkpoint = two / "carried" / "checkpoints" / "step-6"
    saved = [path.name for path in sorted(checkpoint.glob("segment_state_*"))]
    assert saved == ["segment_state_0.pt", "segment_state_1.pt"]
    assert_same_runs(two / "carried_parts", two / "carried")


@pytest.mark.slow
def test_one_process_loads_but_does_not_resume_a_checkpoint_of_two(two, tmp_path):
    """Another number of processes would take other steps."""
    checkpoint = two / "whole" / "checkpoints" / "step-7"
    saved = load_file(checkpoint / "model.safetensors")
    model = gpt2(0.0)
    missing, unexpected = model.load_state_dict(saved, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    final = AutoModelForCausalLM.from_pretrained(two / "whole" / "final")
    assert is_patched(final)
    ids = torch.arange(1, 20)[None]
    assert torch.equal(model.eval()(ids).logits, final.eval()(ids).logits)
    with pytest.raises(ValueError, match="num_processes was 2, now 1"):
        single.run_loop(tmp_path, texts(11), resume=str(checkpoint))


@pytest.mark.slow
def test_the_trainer_in_two_processes_learns_like_one(two, one):
    histories = [json.loads((two / f"rank{rank}.json").read_text())["history"] for rank in (0, 1)]
    trainer = one[1]
    for history in histories:
        assert len(history) == len(trainer.state.log_history)
        for left, right in zip(history, trainer.state.log_history, strict=True):
            for key, value in right.items():
                # eval_loss counts rows twice that are added to even out the processes; metrics do not.
                if not key.endswith(("_runtime", "_per_second", "_flos", "eval_loss")):
                    assert left[key] == pytest.approx(value, rel=1e-4), key
    evaluated = next(logs for logs in histories[0] if "eval_loss" in logs)
    assert evaluated["eval_num_examples"] == 7  # one of the processes has a row less
    assert any("rsa/gate" in logs for logs in histories[0])
    last = AutoModelForSequenceClassification.from_pretrained(two / "trainer" / "checkpoint-4").state_dict()
    assert_close_weights(last, trainer.model.state_dict(), classifier().state_dict(), tolerance=2e-3)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_run(tmp_path):
    done = launch("two_cpus_gloo.yaml", SCRIPT, "fail", tmp_path)
    assert done.returncode != 0
    assert "error: this process has met a bad example" in done.stderr
    assert not (tmp_path / "final").exists()


@pytest.mark.slow
def test_the_script_in_two_processes_writes_and_prints_once(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text, not a long one\n" for i in range(400)))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    values = {f"config_overrides.{name}": value for name, value in sizes.items()}
    values |= {"source": "files", "files.train": text, "block_size": 32, "max_steps": 3, "eval_every_steps": 3}
    values |= {"batch_size": 4, "output_dir": tmp_path / "out", "log_every_steps": 1}
    script = [ROOT / "scripts" / "train_language_model.py", ROOT / "configs" / "lm_bytes_embedded.yaml"]
    done = launch("two_cpus_gloo.yaml", *script, *(f"--{key}={value}" for key, value in values.items()))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(tmp_path / "out")] == [1, 2, 3]
    assert done.stdout.count("bits per byte") == 1  # one table, from one process
    assert done.stderr.count("| 0/3 [") == 1  # one progress bar
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["train_tokens"] == 3 * 4 * 32 * 2
    assert math.isfinite(results["test"]["bits_per_byte"])
