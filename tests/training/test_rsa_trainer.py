"""`RSATrainer`: optimiser groups, gates in the log, losses that diverge, signals, and a card."""

import signal

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import get_last_checkpoint

import small_runs
from rsa_hf import unpatch_model
from rsa_hf.tasks.defect_detection import _loss
from rsa_hf.training import RSATrainer, newest_whole_checkpoint
from rsa_hf.training.callbacks import DivergedError
from small_runs import classifier, functions, gpt2, trainer


@pytest.mark.parametrize("file", [None, "trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_an_incomplete_checkpoint_is_passed_over(tmp_path, file):
    """A truncated file, or no trainer_state.json, which is written last."""
    trainer(tmp_path, max_steps=10, save_strategy="steps", save_steps=5).train()
    assert newest_whole_checkpoint(tmp_path) == get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    path = tmp_path / "checkpoint-10" / (file or "trainer_state.json")
    if file is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert newest_whole_checkpoint(tmp_path / "nothing") is None


def test_a_checkpoint_of_the_model_alone_is_passed_over(tmp_path):
    """The Trainer would go on from it with a new optimiser and schedule, without a word."""
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True).train()
    assert get_last_checkpoint(tmp_path) is not None
    assert newest_whole_checkpoint(tmp_path) is None


class PoisonedLoss(TrainerCallback):
    """Makes a weight NaN before a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            next(model.parameters()).data.fill_(float("nan"))


def test_a_loss_that_is_nan_ends_the_training_and_leaves_the_checkpoints(tmp_path):
    training = trainer(tmp_path, max_steps=9, save_strategy="steps", save_steps=2, logging_steps=100)
    training.add_callback(PoisonedLoss(3))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(DivergedError, match="after step 4.*learning_rate"):
        training.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_the_card_that_is_pushed_shows_gates_and_a_plain_model_keeps_the_trainers(tmp_path):
    plain_arguments = TrainingArguments(str(tmp_path / "ours"), use_cpu=True, report_to="none")
    RSATrainer(model=gpt2(), args=plain_arguments).create_model_card()
    assert "RSA" in (tmp_path / "ours" / "README.md").read_text()
    plain = trainer(tmp_path / "plain", unpatch_model(gpt2()))
    plain.create_model_card(model_name="plain")
    assert "RSA" not in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.parametrize(("weights", "smoothing"), [(None, 0.0), ([0.5, 2.0], 0.0), (None, 0.3)])
def test_micro_batches_give_the_weighted_mean_over_the_step(weights, smoothing):
    """Against torch's loss on the whole batch; a mean of means is the control."""
    model, batch = classifier(), small_runs.stack(functions(7))
    labels = batch.pop("labels")
    logits = model(**batch).logits
    weight = None if weights is None else torch.tensor(weights)
    each = torch.nn.functional.cross_entropy(logits, labels, weight, reduction="none", label_smoothing=smoothing)
    outputs = [(part, SequenceClassifierOutput(logits=logits[part])) for part in (slice(0, 4), slice(4, 7))]
    parts = [_loss(each, labels[part], 7, weight, smoothing) for part, each in outputs]
    torch.testing.assert_close(sum(parts), each.sum() / 7)
    means = [_loss(each, labels[part], None, weight, smoothing) for part, each in outputs]
    assert abs(sum(means) / 2 - each.mean()) > 1e-4
