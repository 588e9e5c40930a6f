"""The training loop: steps, logs, checkpoints, streams and errors."""

import math
import shutil
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rsa_hf import RSAConfig, is_patched, patch_model, rsa_report
from rsa_hf.training import TrainingDivergedError
from rsa_hf.training.steps import StepExamples
from small_runs import (
    Killed,
    Mortal,
    assert_same_runs,
    assert_same_weights,
    classifier,
    evaluate,
    functions,
    gpt2,
    lines,
    logged,
    run,
    stack,
    texts,
    weights,
)


def saved_steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- one step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulated_steps_are_those_of_the_large_batch(tmp_path, accumulation):
    """Losses and weights of two steps without dropout, with another number of labels in each micro-batch."""
    common = {"max_steps": 2, "learning_rate": 1e-3}
    run(tmp_path / "whole", gpt2(0.0), batch_size=8, **common)
    divided = {"batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    run(tmp_path / "parts", gpt2(0.0), **divided, **common)
    assert logged(tmp_path / "parts") == pytest.approx(logged(tmp_path / "whole"), rel=1e-6)
    assert logged(tmp_path / "parts", "tokens") == logged(tmp_path / "whole", "tokens")
    whole, parts = weights(tmp_path / "whole" / "final"), weights(tmp_path / "parts" / "final")
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_the_logged_loss_is_the_models_own(tmp_path):
    expected = gpt2(0.0)(**stack(texts(20))).loss.item()
    run(tmp_path, gpt2(0.0), batch_size=20, max_steps=1)
    assert logged(tmp_path) == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_class_weights_give_the_weighted_mean_over_a_step(tmp_path, accumulation):
    """Against torch's cross_entropy over one batch."""
    batch = stack(functions(12))
    with torch.no_grad():
        logits = classifier()(batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], weight=torch.tensor([0.5, 3.0])).item()
    divided = {"batch_size": 12 // accumulation, "gradient_accumulation_steps": accumulation}
    settings = {"evaluate": lambda model: {"loss": 0.0}, "max_steps": 1, "class_weights": [0.5, 3.0]}
    run(tmp_path, classifier(), functions(12), **divided, **settings)
    assert logged(tmp_path) == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize(("n", "batch", "accumulation"), [(20, 2, 3), (7, 8, 1), (24, 4, 2), (25, 4, 2), (1, 2, 2)])
def test_a_step_takes_the_same_examples_with_any_number_of_processes(n, batch, accumulation):
    alone = StepExamples(range(n), 4 * batch, accumulation, 1, 0, seed=3)
    shared = [StepExamples(range(n), batch, accumulation, 4, rank, seed=3) for rank in range(4)]
    seen = []
    for step in range(2 * alone.steps_per_epoch):
        micro_batches, counts = alone(step)
        expected = [i for micro_batch in micro_batches for i in micro_batch]
        assert counts
        assert 1 <= len(micro_batches) <= accumulation
        got = []
        for one in shared:
            micro_batches, counts = one(step)
            assert micro_batches[0]
            assert max(map(len, micro_batches)) <= batch
            got += [i for micro_batch in micro_batches for i in micro_batch] if counts else []
        assert sorted(got) == sorted(expected)
        seen += expected
    assert sorted(seen) == sorted(list(range(n)) * 2)
    assert n < 5 or seen[:n] != seen[n:]  # another order in each epoch


@pytest.mark.parametrize(("settings", "pace"), [({}, 20e-3), ({"rsa_learning_rate": 0.5}, 0.5)])
def test_rsa_parameters_move_at_their_own_rate(tmp_path, settings, pace):
    """Adam's first step moves every value by its rate: 20 times the weights' rate, or the one asked for."""
    model = gpt2()
    before = [block.attn.rsa.mu.item() * 20 for block in model.transformer.h]
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    run(tmp_path, model, max_steps=1, learning_rate=1e-3, warmup_ratio=0.0, weight_decay=0.0, **settings)
    after = [block.attn.rsa.mu.item() * 20 for block in model.transformer.h]
    assert [abs(b - a) for a, b in zip(before, after, strict=True)] == pytest.approx([pace] * 2, rel=1e-2)
    largest = (model.transformer.h[0].attn.c_attn.weight - weight).abs().max().item()
    assert largest == pytest.approx(1e-3, rel=1e-2)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    def is_on(model):
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    def evaluate_and_look(model, expected):
        assert is_on(model) == expected
        return evaluate(model)

    for checkpointing in (False, True):
        model, look = gpt2(), partial(evaluate_and_look, expected=checkpointing)
        run(tmp_path / str(checkpointing), model, evaluate=look, gradient_checkpointing=checkpointing)
        assert not is_on(model)
    # Not bit for bit: recomputed values may have another address, on which sums depend on some processors.
    kept, recomputed = weights(tmp_path / "False" / "final"), weights(tmp_path / "True" / "final")
    torch.testing.assert_close(kept, recomputed, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_accelerator")
def test_bf16_leaves_the_model_unwrapped(tmp_path):
    model = gpt2()
    forward = model.forward.__func__
    run(tmp_path, model, mixed_precision="bf16")
    assert model.forward.__func__ is forward
    assert "_original_forward" not in vars(model)
    assert model(**stack(texts(2))).logits.dtype == torch.float32
    assert all(map(math.isfinite, logged(tmp_path)))


# --- a whole run ----------------------------------------------------------------------------------------------


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def test_a_run_logs_and_saves(tmp_path):
    model = gpt2()
    start = rsa_report(model)
    result = run(tmp_path, model, epochs=2, max_steps=None, log_every_steps=2, tokenizer=Tokenizer())
    assert (result.steps, result.tokens) == (10, 2 * 20 * 16)
    log = lines(tmp_path)
    assert logged(tmp_path, "step") == [2, 4, 5, 6, 8, 10]
    assert logged(tmp_path, "epoch") == [0.4, 0.8, 1.0, 1.2, 1.6, 2.0]
    assert [line["step"] for line in log if "eval" in line] == [5, 10]
    assert log[-1]["eval"] == result.final_metrics
    # Warm-up over 2.5 of 10 steps, rounded up, then a linear decay to 0 after the tenth.
    rates = {line["step"]: line["learning_rate"] for line in log}
    assert [rates[step] for step in (2, 4, 10)] == pytest.approx([1e-2 / 3, 1e-2, 1e-2 / 7])
    end = rsa_report(model)
    for layer in end.layers:
        for name, values in log[-1]["rsa"][layer.module].items():
            assert values == [getattr(head, name) for head in layer.heads]
        assert log[-1]["rsa"][layer.module].keys() == {"gate", "decay", "theta"}
    assert end != start
    assert_same_weights(weights(result.final_dir), model.state_dict())
    assert is_patched(AutoModelForCausalLM.from_pretrained(result.best_dir))
    assert all((folder / "tokenizer.json").exists() for folder in (result.best_dir, result.final_dir))
    assert saved_steps(tmp_path) == ["step-10", "step-5"]


@pytest.mark.parametrize(
    ("values", "greater_is_better", "best"),
    [
        ([3.0, 1.0, 2.0, 4.0], False, 2),
        ([3.0, 1.0, 2.0, 4.0], True, 4),
        ([2.0, 2.0, 2.0, 2.0], True, 1),
        ([math.nan, 1.0, math.nan, 0.5], True, 2),
        ([math.inf, math.nan, 7.0, math.inf], False, 3),
        ([math.nan] * 4, True, 1),
    ],
)
def test_the_best_model_is_kept(tmp_path, values, greater_is_better, best):
    """A plain model, so that the log has no gates."""
    states, given = [], iter(values)

    def evaluate(model):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"score": next(given)}

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=32))
    metric = {"best_metric": "score", "greater_is_better": greater_is_better}
    result = run(tmp_path, plain, evaluate=evaluate, eval_every_steps=1, **metric)
    assert result.best_step == best
    assert_same_weights(weights(result.best_dir), states[best - 1])
    # JSON has neither NaN nor infinity.
    assert [line["eval"]["score"] for line in lines(tmp_path)] == [v if math.isfinite(v) else None for v in values]
    assert all("rsa" not in line for line in lines(tmp_path))


# --- interrupted and continued --------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_at", [3, 6, 11])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr_schedule": "linear", "save_every_steps": 2},
        {"lr_schedule": "cosine", "save_every_steps": 3, "gradient_accumulation_steps": 2, "batch_size": 2},
        {"lr_schedule": "constant", "save_every_steps": 4, "log_every_steps": 3, "eval_every_steps": 2},
    ],
)
def test_killed_and_continued_is_bitwise_the_whole_run(tmp_path, settings, killed_at):
    """With dropout and with checkpoints inside epochs of 5 steps, so that random generators and orders matter."""
    whole = run(tmp_path / "whole", max_steps=12, **settings)
    with pytest.raises(Killed):
        run(tmp_path / "parts", data=Mortal(texts(20), 4 * killed_at), max_steps=12, **settings)
    torch.manual_seed(99)  # a new process has other generators
    parts = run(tmp_path / "parts", max_steps=12, **settings)
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")
    assert (parts.steps, parts.tokens, parts.best_step) == (whole.steps, whole.tokens, whole.best_step)
    assert (parts.best_metrics, parts.final_metrics) == (whole.best_metrics, whole.final_metrics)


@pytest.mark.parametrize("plan", [RSAConfig(num_regular=2), RSAConfig(num_cyclical_pairs=1)])
def test_a_plan_with_empty_parameters_is_continued(tmp_path, plan):
    """ν and θ are empty without cyclical heads, η without regular ones."""

    def run_again():
        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=32, vocab_size=64)
        run(tmp_path, patch_model(GPT2LMHeadModel(config), plan), save_every_steps=2)
        return weights(tmp_path / "final")

    expected = run_again()
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    assert_same_weights(run_again(), expected)


def test_a_run_killed_while_it_saves_leaves_no_checkpoint(tmp_path, monkeypatch):
    saved = Accelerator.save_state

    def dies_while_writing(self, folder, **keywords):
        saved(self, folder, **keywords)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", dies_while_writing)
        with pytest.raises(Killed):
            run(tmp_path, save_every_steps=2)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    run(tmp_path, save_every_steps=2)
    assert saved_steps(tmp_path) == ["step-2", "step-4"]


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path)
    written = (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a line that a killed run has begun
    # There is nothing to evaluate. Settings that do not change the training may differ.
    changed = {"log_every_steps": 2, "eval_every_steps": 3, "save_every_steps": 3, "eval_batch_size": 7}
    assert run(tmp_path, evaluate=None, **changed) == first
    assert (tmp_path / "metrics.jsonl").read_text() == written


def test_resume_takes_a_path_and_never_starts_anew(tmp_path):
    run(tmp_path, save_every_steps=1)
    after_four = weights(tmp_path / "final")
    result = run(tmp_path, save_every_steps=1, resume=str(tmp_path / "checkpoints" / "step-3"))
    assert result.steps == 4
    assert_same_weights(weights(tmp_path / "final"), after_four)
    (tmp_path / "checkpoints" / "step-9").mkdir()  # not a checkpoint
    run(tmp_path, max_steps=2, resume="never")
    assert logged(tmp_path, "step") == [1, 2]
    assert saved_steps(tmp_path) == ["step-2", "step-9"]


def scored(scores):
    """An evaluation with these losses, one after the other; `Killed()` among them is raised."""
    following = iter(scores)

    def evaluate(model):
        if isinstance(score := next(following), Killed):
            raise score
        return {"loss": score}

    return evaluate


def test_the_best_model_is_the_one_with_the_best_metrics_after_resuming(tmp_path):
    every_two = {"max_steps": 6, "eval_every_steps": 2, "save_every_steps": 1}
    first = run(tmp_path / "first", evaluate=scored([1.0, 3.0, 4.0]), **every_two)
    assert first.best_step == 2
    # Resumed in another folder, which has no model of step 2.
    checkpoint = str(tmp_path / "first" / "checkpoints" / "step-5")
    moved = run(tmp_path / "moved", evaluate=scored([4.0]), **every_two, resume=checkpoint)
    assert (moved.best_step, moved.best_metrics) == (6, {"loss": 4.0})
    assert_same_weights(weights(moved.best_dir), weights(moved.final_dir))
    # Killed after step 4, the best one, and continued from step 3 with other evaluations.
    with pytest.raises(Killed):
        run(tmp_path / "killed", evaluate=scored([1.0, 0.5, Killed()]), **{**every_two, "save_every_steps": 3})
    others = {"max_steps": 6, "eval_every_steps": 3, "save_every_steps": 3}
    continued = run(tmp_path / "killed", evaluate=scored([2.0]), **others)
    assert (continued.best_step, continued.best_metrics) == (6, {"loss": 2.0})
    assert_same_weights(weights(continued.best_dir), weights(continued.final_dir))
    # A finished run whose best model was deleted takes the last one.
    shutil.rmtree(tmp_path / "first" / "best")
    lost = run(tmp_path / "first", evaluate=scored([4.0]), **every_two)
    assert (lost.best_step, lost.best_metrics) == (6, {"loss": 4.0}) and lost.best_dir.is_dir()


# --- streamed -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """A stream of examples, of which `read` have been read."""

    def __init__(self, examples, killed_after=None):
        self.examples, self.killed_after, self.read = examples, killed_after, 0

    def __iter__(self):
        for example in self.examples:
            if self.read == self.killed_after:
                raise Killed
            self.read += 1
            yield example


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_trains_like_the_data_set_in_its_order(tmp_path, monkeypatch, accumulation):
    """With dropout, over the end of an epoch with a smaller last step."""
    settings = {"max_steps": 8, "batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    settings |= {"eval_every_steps": 4}
    run(tmp_path / "stream", data=Stream(texts(21)), **settings)
    monkeypatch.setattr("rsa_hf.training.steps.random.Random.shuffle", lambda self, order: None)
    run(tmp_path / "list", data=texts(21), **settings)
    assert lines(tmp_path / "stream") == [{**line, "epoch": None} for line in lines(tmp_path / "list")]
    assert_same_weights(weights(tmp_path / "stream" / "final"), weights(tmp_path / "list" / "final"))


@pytest.mark.parametrize("killed_at", [3, 7])
def test_a_stream_is_continued_bitwise(tmp_path, killed_at):
    settings = {"max_steps": 9, "save_every_steps": 2, "eval_every_steps": 3}
    run(tmp_path / "whole", data=Stream(texts(20)), **settings)
    with pytest.raises(Killed):
        run(tmp_path / "parts", data=Stream(texts(20), killed_after=4 * killed_at + 1), **settings)
    again = Stream(texts(20))
    run(tmp_path / "parts", data=again, **settings)
    assert again.read == 4 * 9  # also the examples before the checkpoint
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_the_steps_of_a_stream(num_processes):
    alone = StepExamples(Stream(range(11)), 2 * num_processes, 1, 1, 0, None)
    shared = [StepExamples(Stream(range(11)), 2, 1, num_processes, rank, None) for rank in range(num_processes)]
    for step in [0, 1, 2, 3, 7]:  # the last one skips some steps
        expected = [i for micro_batch in alone(step)[0] for i in micro_batch]
        parts = [one(step) for one in shared]
        assert all(micro_batches[0] for micro_batches, _ in parts)
        got = [i for micro_batches, counts in parts if counts for one in micro_batches for i in one]
        assert sorted(got) == sorted(expected)


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learning_rate": 0.5}, ["training.learning_rate was 0.01, now 0.5", "another training.output_dir"]),
        ({"max_steps": 8, "seed": 1}, ["training.max_steps was 4, now 8", "training.seed was 0, now 1"]),
        ({"data": texts(5)}, ["num_train_examples was 20, now 5"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, changed, words):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="belongs to a run with other settings") as error:
        run(tmp_path, **changed)
    assert all(word in str(error.value) for word in words)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("content", [None, "{", '{"progress": {"stp": 1}, "settings": {}}', "[]"])
def test_a_damaged_checkpoint_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "progress.json").write_text(content)
    with pytest.raises(ValueError, match="is not an intact checkpoint") as error:
        run(tmp_path / "out", resume=str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_loss_stops_the_run_before_the_step(tmp_path, accumulation):
    model, calls = gpt2(), []

    def breaks(module, inputs, output):
        calls.append(module.training)
        if calls.count(True) > 2 * accumulation:
            output.loss = output.loss * math.nan

    model.register_forward_hook(breaks)
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan at step 3.*learning_rate \(now 0\.01\)"):
        run(tmp_path, model, gradient_accumulation_steps=accumulation, save_every_steps=2)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert logged(tmp_path, "step") == [1, 2]
    assert saved_steps(tmp_path) == ["step-2"]


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_infinite_gradient_stops_the_run_before_the_step(tmp_path, max_grad_norm):
    model, seen = gpt2(), []

    def breaks(gradient):
        seen.append(gradient)
        return gradient * math.inf if len(seen) == 3 else gradient

    model.lm_head.weight.register_hook(breaks)
    with pytest.raises(TrainingDivergedError, match=r"the norm of the gradient is (nan|inf) at step 3"):
        run(tmp_path, model, max_grad_norm=max_grad_norm, save_every_steps=1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert saved_steps(tmp_path) == ["step-1", "step-2"]


UNLABELLED = {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.full((4,), -100)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": []}, "has 0 examples"),
        ({"data": Stream([])}, "has 0 examples"),
        ({"data": Stream(texts(4)), "max_steps": None}, "max_steps=None, but a stream has no length: set max_steps"),
        ({"data": [UNLABELLED]}, "the examples of step 1 have no label"),
        ({"best_metric": "accuracy"}, "evaluate returned loss, but no 'accuracy'"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, **settings)
