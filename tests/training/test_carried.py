"""Memory carried from step to step: the same as one pass over the text, also if a run is interrupted."""

import pytest
import torch
from torch.utils.data import default_collate

import small_runs
from models import tiny
from models.tiny import VOCAB
from rsa_hf.tasks.text_data import TrainingTracks
from rsa_hf.training.carried import CarriedState
from small_runs import Killed, Mortal, assert_same_runs, gpt2, logged

LENGTH = 8


def transformer_xl(**changes):
    torch.manual_seed(0)
    return tiny.build("transfo-xl", rsa={}, **{"mem_len": 64, **changes})


def lstm(**changes):
    torch.manual_seed(0)
    return tiny.build("recurrent", dilations=[1, 1], **changes)


MODELS = {
    "transformer_xl": transformer_xl,
    "adaptive": lambda **changes: transformer_xl(cutoffs=[9, 20], div_val=2, **changes),
    "lstm": lstm,
}


def tracks(num_tracks=4, num_segments=6):
    """The same text in any number of tracks."""
    tokens = torch.randint(0, VOCAB, (4 * 6 * LENGTH + 1,), generator=torch.Generator().manual_seed(1))
    assert num_tracks * num_segments <= 24
    return TrainingTracks(tokens[: num_tracks * num_segments * LENGTH + 1], LENGTH, num_tracks)


@torch.no_grad()
def evaluate(model):
    model.eval()
    return {"loss": model(torch.arange(LENGTH)[None]).logits.logsumexp(-1).mean().item()}


def run(folder, model, data=None, **settings):
    settings = {"max_steps": 6, "warmup_ratio": 0.0, **settings}
    return small_runs.run(folder, model, tracks() if data is None else data, evaluate, **settings)


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
    division = {"batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    result = run(tmp_path / "carried", MODELS[name](), **STILL, **division, max_steps=12)
    assert result.tokens == 12 * 4 * LENGTH
    assert logged(tmp_path / "carried") == pytest.approx(expected * 2, abs=1e-5)

    # The control: another loss without memory.
    model = MODELS[name]()
    argument = model.segment_state
    model.register_forward_pre_hook(
        lambda module, positional, inputs: (positional, {**inputs, argument: None}), with_kwargs=True
    )
    run(tmp_path / "dropped", model, **STILL, **division)
    dropped = logged(tmp_path / "dropped")
    assert dropped[0] == pytest.approx(expected[0], abs=1e-5)
    assert min(abs(a - b) for a, b in zip(dropped[1:], expected[1:], strict=True)) > 1e-4


def test_permuted_rows_give_other_losses(tmp_path, monkeypatch):
    expected = losses_in_one_pass(lstm(), tracks())
    read = TrainingTracks.__getitem__
    monkeypatch.setattr(TrainingTracks, "__getitem__", lambda self, i: read(self, i ^ 1 if i // 4 % 2 else i))
    run(tmp_path, lstm(), **STILL)
    assert logged(tmp_path)[0] == pytest.approx(expected[0], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(logged(tmp_path), expected, strict=True)) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_accumulated_steps_are_those_of_the_large_batch(tmp_path, name):
    still = losses_in_one_pass(MODELS[name](), tracks())
    run(tmp_path / "whole", MODELS[name]())
    run(tmp_path / "parts", MODELS[name](), batch_size=2, gradient_accumulation_steps=2)
    assert logged(tmp_path / "parts") == pytest.approx(logged(tmp_path / "whole"), abs=1e-4)
    assert abs(logged(tmp_path / "whole")[-1] - still[-1]) > 1e-2  # the model learns


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
    run(tmp_path, lstm(), weight_decay=0.0, max_grad_norm=None, lr_schedule="constant")
    assert logged(tmp_path) == pytest.approx(expected, abs=1e-6)


def has_bf16_lstm():
    """Whether torch can run an LSTM under bfloat16 autocast on this processor."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.ones(2, 1, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_losses_in_bf16_are_close(tmp_path, name):
    if name == "lstm" and not has_bf16_lstm():
        pytest.skip("torch has no bfloat16 LSTM on this processor")
    expected = losses_in_one_pass(MODELS[name](), tracks())
    run(tmp_path, MODELS[name](), mixed_precision="bf16", **STILL)
    assert logged(tmp_path) == pytest.approx(expected, rel=2e-2)


# --- interrupted and continued --------------------------------------------------------------------------------

PARTS = {"save_every_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 2}


def killed_at(step, folder, model, **settings):
    """Run until the run is killed as it reads an example of this step, counted from 0."""
    with pytest.raises(Killed):
        run(folder, model, Mortal(tracks(), 4 * step), **PARTS, **settings)
    torch.manual_seed(99)  # a new process has other generators


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [3, 6, 8])
def test_killed_and_continued_is_bitwise_the_whole_run(tmp_path, name, step):
    """With dropout, and checkpoints inside epochs of 6 steps and at their end."""
    run(tmp_path / "whole", MODELS[name](dropout=0.1), max_steps=10, **PARTS)
    killed_at(step, tmp_path / "parts", MODELS[name](dropout=0.1), max_steps=10)
    run(tmp_path / "parts", MODELS[name](dropout=0.1), max_steps=10, **PARTS)
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")


def test_without_the_memory_of_the_checkpoint_losses_differ(tmp_path, monkeypatch):
    run(tmp_path / "whole", lstm(dropout=0.1), max_steps=5, **PARTS)
    killed_at(3, tmp_path / "parts", lstm(dropout=0.1), max_steps=5)
    monkeypatch.setattr(CarriedState, "load", lambda *arguments: None)
    run(tmp_path / "parts", lstm(dropout=0.1), max_steps=5, **PARTS)
    assert logged(tmp_path / "parts")[:2] == logged(tmp_path / "whole")[:2]
    assert logged(tmp_path / "parts")[2:] != logged(tmp_path / "whole")[2:]


# --- errors ---------------------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_the_model_or_the_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a GPT2LMHeadModel carries nothing.*Set data.carry_memory to false"):
        run(tmp_path, gpt2())
    with pytest.raises(ValueError, match=r"the data has 4 tracks, but a step takes 6 rows \(3 in each of 2 micro"):
        run(tmp_path, lstm(), batch_size=3, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"returned no mems to carry .* use_cache=True and a memory of more than 0"):
        run(tmp_path, transformer_xl(mem_len=0))
    assert not list((tmp_path / "checkpoints").glob("*"))
