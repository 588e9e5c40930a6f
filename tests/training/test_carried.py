"""Memory carried from step to step: the same as one pass over the text, also if a run is interrupted."""

import carried_run
import pytest
import torch
from carried_run import LENGTH, lstm, run, tracks
from torch.utils.data import default_collate

from launching import run_processes
from models import tiny
from rsa_hf.training import newest_whole_checkpoint
from small_runs import Killed, Mortal, assert_same_weights, gpt2, losses, saved_weights


def transformer_xl(**changes):
    torch.manual_seed(0)
    return tiny.build("transfo-xl", rsa={}, **{"mem_len": 64, **changes})


MODELS = {
    "transformer_xl": transformer_xl,
    "adaptive": lambda **changes: transformer_xl(cutoffs=[9, 20], div_val=2, **changes),
    "lstm": lstm,
}


STILL = {"learning_rate": 1e-30, "rsa_learning_rate": 1e-30}  # parameters do not move


@torch.no_grad()
def losses_in_one_pass(model, data):
    """The mean loss of each step, with each row of the data read in one forward."""
    model.eval()
    whole = data.num_segments * LENGTH
    starts = [track * whole for track in range(data.num_tracks)]
    rows = torch.stack([data.token_ids[start : start + whole + 1] for start in starts])
    log_probabilities = model(rows[:, :-1]).logits.log_softmax(-1)
    losses = -log_probabilities.gather(2, rows[:, 1:, None])[..., 0]
    return losses.unflatten(1, (-1, LENGTH)).mean(dim=(0, 2)).tolist()


# --- losses and gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_that_of_one_pass_over_each_track(tmp_path, name, accumulation):
    """Over two epochs, each of which starts without memory."""
    expected = losses_in_one_pass(MODELS[name](), tracks())
    division = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = run(tmp_path / "carried", MODELS[name](), **STILL, **division, max_steps=8)
    assert losses(trainer) == pytest.approx((expected * 2)[:8], abs=1e-5)
    trainer.train()  # again, from the beginning
    assert losses(trainer) == pytest.approx((expected * 2)[:8], abs=1e-5)

    # The control: another loss without memory.
    model = MODELS[name]()
    argument = model.segment_state
    model.register_forward_pre_hook(
        lambda module, positional, inputs: (positional, {**inputs, argument: None}), with_kwargs=True
    )
    dropped = losses(run(tmp_path / "dropped", model, **STILL, **division))
    assert dropped[0] == pytest.approx(expected[0], abs=1e-5)
    assert min(abs(a - b) for a, b in zip(dropped[1:], expected[1:], strict=True)) > 1e-4


def test_gradients_stop_at_the_carried_memory(tmp_path):
    """Against a loop with torch's loss and optimiser."""
    by_hand, data = lstm(), tracks()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.0)
    state, expected = None, []
    for step in range(6):
        batch = default_collate([data[4 * step + row] for row in range(4)])
        out = by_hand(batch["input_ids"], state=state)
        state = tuple(part.detach() for part in out.state)
        loss = torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), batch["shift_labels"])
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses(run(tmp_path, lstm(), weight_decay=0.0, max_grad_norm=0.0)) == pytest.approx(expected, abs=1e-6)


# --- interrupted and continued --------------------------------------------------------------------------------

PARTS = {"save_strategy": "steps", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("name", "step"), [("lstm", 8), ("adaptive", 6), ("transformer_xl", 3), ("transformer_xl", 8)]
)
def test_killed_and_continued_is_bitwise_the_whole_run(tmp_path, name, step):
    """With dropout, and checkpoints inside epochs of 6 steps and at their end."""
    settings = {"max_steps": 10, **PARTS}
    whole = run(tmp_path / "whole", MODELS[name](dropout=0.1), **settings)
    with pytest.raises(Killed):  # as it reads an example of this step, counted from 0
        run(tmp_path / "parts", MODELS[name](dropout=0.1), Mortal(tracks(), 4 * step), **settings)
    torch.manual_seed(99)  # a new process has other generators
    checkpoint = newest_whole_checkpoint(tmp_path / "parts")
    parts = run(tmp_path / "parts", MODELS[name](dropout=0.1), resume=checkpoint, **settings)
    assert losses(parts) == losses(whole)
    assert_same_weights(parts.model.state_dict(), whole.model.state_dict())


def test_without_the_memory_of_the_checkpoint_losses_differ(tmp_path, monkeypatch):
    whole = losses(run(tmp_path, lstm(dropout=0.1), max_steps=5, **PARTS))
    monkeypatch.setattr("rsa_hf.training.rsa_trainer.send_to_device", lambda states, device: {})
    parts = losses(run(tmp_path, lstm(dropout=0.1), resume=str(tmp_path / "checkpoint-2"), max_steps=5, **PARTS))
    assert parts[:2] == whole[:2]
    assert parts[2:] != whole[2:]


@pytest.mark.slow  # starts processes
def test_two_processes_that_are_killed_and_continued_carry_like_one(tmp_path):
    run_processes(2, carried_run.__file__, tmp_path)
    expected = run(tmp_path / "one", lstm(), max_steps=carried_run.STEPS).model.state_dict()
    whole, parts = (saved_weights(tmp_path / name) for name in ("whole", "parts"))
    assert_same_weights(parts, whole)
    for name, value in whole.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_settings_that_do_not_fit_the_model_or_the_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a GPT2LMHeadModel carries nothing"):
        run(tmp_path, gpt2())
    with pytest.raises(ValueError, match="the data has 4 tracks, but a step takes 6 rows"):
        run(tmp_path, lstm(), per_device_train_batch_size=3, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="label_smoothing_factor: has no effect"):
        run(tmp_path, lstm(), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="returned no mems to carry"):
        run(tmp_path, transformer_xl(mem_len=0))
