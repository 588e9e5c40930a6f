"""`report_to`: trackers get what metrics.jsonl has, each step once, under the names that a Trainer gives them."""

import io
import json
import time
from collections import defaultdict

import numpy as np
import pytest
from accelerate import tracking
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.integrations.integration_utils import rewrite_logs

from rsa_hf import rsa_report, unpatch_model
from rsa_hf.plots import plot_rem
from rsa_hf.training import RSACallback, TrainingSettings
from small_runs import Killed, Mortal, arguments, assert_same_runs, gpt2, lines, run, texts

EVERY_STEP = {"max_steps": 6, "eval_every_steps": 3, "save_every_steps": 2}


def tensorboard(folder):
    """All event files of a folder, read by TensorBoard's own reader, without sampling."""
    return EventAccumulator(str(folder), {"scalars": 0, "images": 0, "tensors": 0}).Reload()


def points(folder):
    """The scalars of a run by name, each a list of step and value."""
    found = tensorboard(folder / "runs" / "rsa_hf")
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def expected_points(folder):
    """What metrics.jsonl has, under the names of transformers' callbacks."""
    found = defaultdict(list)
    for line in lines(folder):
        logs = {name: line[name] for name in ("epoch", "loss", "learning_rate", "tokens") if line[name] is not None}
        logs |= {f"eval_{name}": value for name, value in line.get("eval", {}).items()}
        layers = list(line.get("rsa", {}).values())
        if layers:
            logs["rsa/gate"] = np.mean([np.mean(heads["gate"]) for heads in layers])
        for i, heads in enumerate(layers):
            logs[f"rsa/gate/layer_{i:02d}"] = np.mean(heads["gate"])
            logs[f"rsa/decay/layer_{i:02d}"] = np.mean(np.abs(heads["decay"]))
        for name, value in rewrite_logs(logs).items():
            found[name].append((line["step"], pytest.approx(value, rel=1e-6)))
    return dict(found)


def hyperparameters(folder):
    """Those of each start that stored them."""
    found = []
    for file in (folder / "runs" / "rsa_hf").glob("*/events*"):
        content = tensorboard(file).SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
        session = metadata.parse_session_start_info_plugin_data(content)
        found.append({name: value.number_value or value.string_value for name, value in session.hparams.items()})
    return found


def interrupted(folder, killed_at=5, before=None, after=None):
    """A run with TensorBoard that is killed after a step and continued, with other settings before and after."""
    common = {**EVERY_STEP, "report_to": ["tensorboard"]}
    with pytest.raises(Killed):
        run(folder, data=Mortal(texts(20), 4 * killed_at), **{**common, **(before or {})})
    time.sleep(1)  # TensorBoard sorts its files by the second they were made in
    run(folder, **{**common, **(after or {})})


# --- one run --------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_values_of_metrics_jsonl(tmp_path):
    model = gpt2()
    run(tmp_path, model, **EVERY_STEP, report_to=["tensorboard"])
    found = points(tmp_path)
    assert found == expected_points(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["eval/loss"]] == [3, 6]
    for i, layer in enumerate(rsa_report(model).layers):
        for name in ("gate", "decay"):
            mean = np.mean([abs(getattr(head, name)) for head in layer.heads])
            assert found[f"train/rsa/{name}/layer_{i:02d}"][-1] == (6, pytest.approx(mean))


@pytest.mark.parametrize("attribute", ["gate", "decay"])
def test_another_value_would_show(tmp_path, monkeypatch, attribute):
    """The control: a gate or rate of one head, off by one part in a thousand."""
    right = tracking.TensorBoardTracker.log

    def wrong(self, values, step):
        name = f"train/rsa/{attribute}/layer_01"
        right(self, {**values, name: values[name] * 1.001}, step)

    monkeypatch.setattr(tracking.TensorBoardTracker, "log", wrong)
    run(tmp_path, **EVERY_STEP, report_to=["tensorboard"])
    assert points(tmp_path) != expected_points(tmp_path)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts(20))


def test_a_plain_model_and_data_without_a_length(tmp_path):
    """There are no gates to log, and the epoch is unknown."""
    run(tmp_path, unpatch_model(gpt2()), Stream(), report_to=["tensorboard"])
    found = points(tmp_path)
    assert found == expected_points(tmp_path)
    assert found.keys() == {"train/loss", "train/learning_rate", "train/tokens", "eval/loss"}
    assert tensorboard(tmp_path / "runs" / "rsa_hf").Tags()["images"] == []


def test_the_names_are_those_of_a_trainer_with_the_callback(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "trainer"))
    rows = texts(8)
    args = arguments(tmp_path, report_to="tensorboard", eval_strategy="steps", eval_steps=2)
    trainer = Trainer(gpt2(), args, train_dataset=rows, eval_dataset=rows)
    trainer.add_callback(RSACallback(trainer))
    trainer.train()
    run(tmp_path, report_to=["tensorboard"])
    ours, theirs = points(tmp_path).keys(), set(tensorboard(tmp_path / "trainer").Tags()["scalars"])
    assert ours - theirs == {"train/tokens"}
    assert {name for name in theirs if "rsa" in name} == {name for name in ours if "rsa" in name}


def test_settings_are_hyperparameters(tmp_path):
    run(tmp_path, report_to=["tensorboard"], mixed_precision="no", lr_schedule="cosine")
    (found,) = hyperparameters(tmp_path)
    assert found["training.learning_rate"] == 1e-2
    assert found["training.lr_schedule"] == "cosine"
    assert found["training.report_to"] == "['tensorboard']"
    assert found["num_train_examples"] == 20
    assert "training.max_grad_norm" in found


def test_the_decay_curves_are_drawn_after_each_evaluation(tmp_path):
    model = gpt2()
    run(tmp_path, model, **EVERY_STEP, report_to=["tensorboard"])
    images = tensorboard(tmp_path / "runs" / "rsa_hf").Images("rsa/decay_curves")
    assert [image.step for image in images] == [3, 6]
    first, last = (imread(io.BytesIO(image.encoded_image_string)) for image in images)
    plot_rem(model, tmp_path / "expected.png")
    assert np.array_equal(last, imread(tmp_path / "expected.png")[:, :, :3])
    assert not np.array_equal(first, last)


def test_without_matplotlib_there_are_no_images(tmp_path, monkeypatch):
    def absent(*arguments):
        raise ImportError("drawing needs matplotlib: pip install 'rsa_hf[plot]'")

    monkeypatch.setattr("rsa_hf.training.trackers.plot_rem", absent)
    run(tmp_path, report_to=["tensorboard"])
    assert points(tmp_path) == expected_points(tmp_path)
    assert tensorboard(tmp_path / "runs" / "rsa_hf").Tags()["images"] == []


# --- interrupted and continued --------------------------------------------------------------------------------------


def test_a_continued_run_has_each_step_once(tmp_path):
    run(tmp_path / "whole", **EVERY_STEP, report_to=["tensorboard"])
    interrupted(tmp_path / "parts")
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")
    assert points(tmp_path / "parts") == points(tmp_path / "whole")
    images = tensorboard(tmp_path / "parts" / "runs" / "rsa_hf").Images("rsa/decay_curves")
    assert [image.step for image in images] == [3, 6]
    assert len(hyperparameters(tmp_path / "parts")) == 1


def test_without_the_step_to_purge_from_steps_would_be_there_twice(tmp_path, monkeypatch):
    right = tracking.TensorBoardTracker.__init__

    def wrong(self, run_name, logging_dir, purge_step):
        right(self, run_name, logging_dir)

    monkeypatch.setattr(tracking.TensorBoardTracker, "__init__", wrong)
    interrupted(tmp_path)
    assert [step for step, _ in points(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5, 5, 6]


def test_a_run_that_starts_over_has_its_own_points_alone(tmp_path):
    run(tmp_path, **EVERY_STEP, report_to=["tensorboard"])
    time.sleep(1)
    run(tmp_path, max_steps=2, resume="never", report_to=["tensorboard"])
    assert [step for step, _ in points(tmp_path)["train/loss"]] == [1, 2]
    assert points(tmp_path) == expected_points(tmp_path)


def test_trackers_may_change_when_a_run_is_continued(tmp_path):
    run(tmp_path / "whole", **EVERY_STEP)
    interrupted(tmp_path / "added", before={"report_to": None})
    assert_same_runs(tmp_path / "added", tmp_path / "whole")
    assert [step for step, _ in points(tmp_path / "added")["train/loss"]] == [5, 6]
    assert len(hyperparameters(tmp_path / "added")) == 1
    interrupted(tmp_path / "removed", after={"report_to": None})
    assert_same_runs(tmp_path / "removed", tmp_path / "whole")
    assert not (tmp_path / "whole" / "trackers.json").exists()


def test_a_checkpoint_of_0_1_which_has_no_such_setting(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, data=Mortal(texts(20), 19), **EVERY_STEP)
    saved = json.loads((tmp_path / "checkpoints" / "step-4" / "progress.json").read_text())
    assert not any("report_to" in name for name in saved["settings"])
    assert run(tmp_path, **EVERY_STEP, report_to=["tensorboard"]).steps == 6


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["tensorbord"], ["tensorboard", "none"], ["all"], "tensorboard"])
def test_a_tracker_that_accelerate_does_not_know(names):
    with pytest.raises(ValueError, match=r"report_to=.*: null or a list of aim, tensorboard, wandb, .* is needed\."):
        TrainingSettings(report_to=names)


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", ["tensorboard"])
    words = r"report_to=\['tensorboard', 'aim'\]: not installed: aim\. pip install aim, or leave it out of report_to\."
    with pytest.raises(ImportError, match=words):
        run(tmp_path / "out", report_to=["tensorboard", "aim"])
    assert not (tmp_path / "out").exists()
