"""The loop: the same gradient however a step is divided, the same run however often it is interrupted."""

import json
import math
import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rsa_hf import RSAConfig, is_patched, patch_model, rsa_report
from rsa_hf.training.loop import TrainingDivergedError, train
from rsa_hf.training.settings import TrainingSettings
from rsa_hf.training.steps import StepExamples, StreamedExamples

PLAN = RSAConfig(num_regular=1, num_cyclical_pairs=1)


def gpt2(**values) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    return patch_model(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **values)), PLAN)


def classifier(**values) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = BertConfig(**sizes, vocab_size=64, max_position_embeddings=32, **values)
    return patch_model(BertForSequenceClassification(config), PLAN)


def texts(n: int) -> list[dict[str, torch.Tensor]]:
    """Blocks with from 1 to 15 labels each, so that shares of the loss differ."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(n):
        ids = torch.randint(1, 64, (16,), generator=generator)
        labels = ids.clone()
        labels[: 1 + i % 15] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def functions(n: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (n, 12), generator=generator)
    return [{"input_ids": row, "labels": torch.tensor(int(i % 3 == 0))} for i, row in enumerate(ids)]


def stack(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return {"loss": model(**stack(texts(4))).loss.item()}


def run(folder, model=None, data=None, evaluate=evaluate, best_metric="loss", greater_is_better=False, **settings):
    keywords = {name: settings.pop(name) for name in ("class_weights", "tokenizer") if name in settings}
    defaults = {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "warmup_ratio": 0.25, "log_every_steps": 1}
    training = TrainingSettings(**{"output_dir": str(folder), **defaults, **settings})
    return train(
        gpt2() if model is None else model,
        texts(20) if data is None else data,
        stack,
        evaluate,
        training,
        best_metric=best_metric,
        greater_is_better=greater_is_better,
        **keywords,
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# --- one step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_is_the_big_batch(tmp_path, accumulation):
    """Without dropout the loss and the weights of two optimiser steps agree, though micro-batches differ in labels."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    common = {"max_steps": 2, "learning_rate": 1e-3}
    run(tmp_path / "whole", gpt2(**off), batch_size=8, **common)
    run(
        tmp_path / "parts",
        gpt2(**off),
        batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        **common,
    )
    for whole, parts in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert parts["tokens"] == whole["tokens"]
    whole, parts = weights(tmp_path / "whole" / "final"), weights(tmp_path / "parts" / "final")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-6)


def test_logged_loss_is_the_model_s_own(tmp_path):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    expected = gpt2(**off)(**stack(texts(20))).loss.item()
    run(tmp_path, gpt2(**off), batch_size=20, max_steps=1)
    assert lines(tmp_path)[0]["loss"] == pytest.approx(expected, abs=1e-6)


def test_class_weights(tmp_path):
    """The weighted mean over the whole step, as torch's cross_entropy has it over one batch."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    data = functions(12)
    batch = stack(data)
    with torch.no_grad():
        logits = classifier(**off)(batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], weight=torch.tensor([0.5, 3.0])).item()
    for accumulation in (1, 3):
        run(
            tmp_path / str(accumulation),
            classifier(**off),
            data,
            evaluate=lambda model: {"loss": 0.0},
            batch_size=12 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            class_weights=[0.5, 3.0],
        )
        assert lines(tmp_path / str(accumulation))[0]["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "batch", "accumulation"), [(20, 2, 3), (7, 8, 1), (24, 4, 2), (25, 4, 2), (1, 2, 2)])
def test_a_step_takes_the_same_examples_however_many_processes_share_it(n, batch, accumulation):
    alone = StepExamples(n, 4 * batch, accumulation, 1, 0, seed=3)
    shared = [StepExamples(n, batch, accumulation, 4, rank, seed=3) for rank in range(4)]
    seen = []
    for step in range(2 * alone.steps_per_epoch):
        micro_batches, counts = alone(step)
        expected = [i for micro_batch in micro_batches for i in micro_batch]
        assert counts
        assert 1 <= len(micro_batches) <= accumulation
        got = []
        for one in shared:
            micro_batches, counts = one(step)
            assert micro_batches[0]  # every process takes part in every step
            assert max(map(len, micro_batches)) <= batch
            got += [i for micro_batch in micro_batches for i in micro_batch] if counts else []
        assert sorted(got) == sorted(expected)
        seen += expected
    assert sorted(seen) == sorted(list(range(n)) * 2)
    assert n < 5 or seen[:n] != seen[n:]  # another order in each epoch


def test_rsa_parameters_move_at_their_own_rate(tmp_path):
    """Adam's first step moves every value by its rate: 20 times the weights', or what is asked for."""
    for name, settings, pace in (("default", {}, 20e-3), ("own", {"rsa_learning_rate": 0.5}, 0.5)):
        model = gpt2()
        before = [layer.rsa.mu.item() * 20 for layer in (block.attn for block in model.transformer.h)]
        weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
        run(tmp_path / name, model, max_steps=1, learning_rate=1e-3, warmup_ratio=0.0, weight_decay=0.0, **settings)
        after = [block.attn.rsa.mu.item() * 20 for block in model.transformer.h]
        moved = [abs(b - a) for a, b in zip(before, after, strict=True)]
        assert moved == pytest.approx([pace] * 2, rel=1e-2)
        largest = (model.transformer.h[0].attn.c_attn.weight - weight).abs().max().item()
        assert largest == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path, family):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}

    def make():
        torch.manual_seed(0)
        return gpt2() if family == "gpt2" else patch_model(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)), PLAN)

    for checkpointing in (False, True):
        model = make()

        def is_on(model=model):
            return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

        def evaluate_and_look(model, checkpointing=checkpointing, is_on=is_on):
            assert is_on() == checkpointing
            return evaluate(model)

        run(tmp_path / str(checkpointing), model, evaluate=evaluate_and_look, gradient_checkpointing=checkpointing)
        assert not is_on()
    # Not bit for bit: what is computed again may lie elsewhere in memory, and some processors' sums depend on that.
    kept, recomputed = weights(tmp_path / "False" / "final"), weights(tmp_path / "True" / "final")
    assert kept.keys() == recomputed.keys()
    for name in kept:
        torch.testing.assert_close(kept[name], recomputed[name], rtol=1e-4, atol=1e-5)


def test_bf16_leaves_the_model_unwrapped(tmp_path):
    model = gpt2()
    forward = model.forward.__func__
    AcceleratorState._reset_state()
    try:
        run(tmp_path, model, mixed_precision="bf16")
    finally:
        AcceleratorState._reset_state()
    assert model.forward.__func__ is forward
    assert "_original_forward" not in vars(model)
    assert model(**stack(texts(2))).logits.dtype == torch.float32
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path))


# --- a whole run ----------------------------------------------------------------------------------------------


def test_what_is_logged_and_saved(tmp_path):
    model = gpt2()
    start = rsa_report(model)
    result = run(tmp_path, model, epochs=2, max_steps=None, log_every_steps=2)
    assert result.steps == 10
    assert result.tokens == 2 * 20 * 16
    log = lines(tmp_path)
    assert [line["step"] for line in log] == [2, 4, 5, 6, 8, 10]
    assert [line["epoch"] for line in log] == [0.4, 0.8, 1.0, 1.2, 1.6, 2.0]
    assert [line["step"] for line in log if "eval" in line] == [5, 10]
    assert log[-1]["eval"] == result.final_metrics
    # Warm-up over 2.5 of 10 steps, rounded up, then linearly to 0 after the tenth.
    rates = {line["step"]: line["learning_rate"] for line in log}
    assert rates[2] == pytest.approx(1e-2 / 3)
    assert rates[4] == pytest.approx(1e-2)
    assert rates[10] == pytest.approx(1e-2 / 7)
    end = rsa_report(model)
    for layer in end.layers:
        logged = log[-1]["rsa"][layer.module]
        assert logged["gate"] == [head.gate for head in layer.heads]
        assert logged["decay"] == [head.decay for head in layer.heads]
        assert logged["theta"] == [head.theta for head in layer.heads]
    assert end != start
    assert_same_weights(weights(result.final_dir), model.state_dict())
    assert is_patched(AutoModelForCausalLM.from_pretrained(result.best_dir))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-5"]


def test_plain_model(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=32))
    run(tmp_path, model)
    assert all("rsa" not in line for line in lines(tmp_path))


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
    states, given = [], iter(values)

    def evaluate(model):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"score": next(given)}

    result = run(
        tmp_path, evaluate=evaluate, best_metric="score", greater_is_better=greater_is_better, eval_every_steps=1
    )
    assert result.best_step == best
    assert_same_weights(weights(result.best_dir), states[best - 1])
    # JSON has no NaN and no infinity.
    assert [line["eval"]["score"] for line in lines(tmp_path)] == [v if math.isfinite(v) else None for v in values]


def test_tokenizer_is_saved_beside_the_model(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    result = run(tmp_path, tokenizer=Tokenizer())
    assert (result.best_dir / "tokenizer.json").exists()
    assert (result.final_dir / "tokenizer.json").exists()


# --- interrupted and continued --------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing in the package catches it, as nothing catches a signal."""


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_schedule": "linear", "save_every_steps": 2},
        {"lr_schedule": "cosine", "save_every_steps": 3, "gradient_accumulation_steps": 2, "batch_size": 2},
        {"lr_schedule": "constant", "save_every_steps": 4, "log_every_steps": 3, "eval_every_steps": 2},
    ],
)
@pytest.mark.parametrize("killed_at", [3, 5, 6, 11])
def test_killed_and_continued_is_bitwise_the_whole_run(tmp_path, settings, killed_at):
    """Dropout is on, epochs have 5 steps, and checkpoints lie inside epochs: all generators and orders count."""
    settings = {"max_steps": 12, **settings}
    whole = run(tmp_path / "whole", **settings)

    fetched = []

    class Data(list):
        def __getitem__(self, index):
            fetched.append(index)
            if killed_at is not None and len(fetched) > 4 * killed_at:
                raise Killed
            return super().__getitem__(index)

    with pytest.raises(Killed):
        run(tmp_path / "parts", data=Data(texts(20)), **settings)
    killed_at = None
    torch.manual_seed(99)  # another process would have other generators
    parts = run(tmp_path / "parts", data=Data(texts(20)), **settings)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert (parts.steps, parts.tokens, parts.best_step) == (whole.steps, whole.tokens, whole.best_step)
    assert (parts.best_metrics, parts.final_metrics) == (whole.best_metrics, whole.final_metrics)
    for folder in ("best", "final"):
        assert_same_weights(weights(tmp_path / "parts" / folder), weights(tmp_path / "whole" / folder))


@pytest.mark.parametrize("plan", [RSAConfig(num_regular=2), RSAConfig(num_cyclical_pairs=1)])
def test_a_plan_with_empty_parameters_is_continued(tmp_path, plan):
    """Without cyclical heads ν and θ have no elements, without regular ones η has none."""

    def go_on():
        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=32, vocab_size=64)
        run(tmp_path, patch_model(GPT2LMHeadModel(config), plan), save_every_steps=2)
        return weights(tmp_path / "final")

    expected = go_on()
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    assert_same_weights(go_on(), expected)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    run(tmp_path, max_steps=4, save_every_steps=2)
    saved = Accelerator.save_state

    def dies_while_writing(self, folder, **keywords):
        saved(self, folder, **keywords)
        raise Killed

    monkeypatch.setattr(Accelerator, "save_state", dies_while_writing)
    with pytest.raises(Killed):
        run(tmp_path / "other", save_every_steps=2)
    assert not list((tmp_path / "other" / "checkpoints").glob("step-*"))
    monkeypatch.undo()
    # The rest of the killed run is in nobody's way.
    run(tmp_path / "other", save_every_steps=2)
    names = sorted(path.name for path in (tmp_path / "other" / "checkpoints").iterdir())
    assert names == ["step-2", "step-4"]


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path)
    written = (tmp_path / "metrics.jsonl").read_text()

    def fail(model):
        raise AssertionError("nothing is left to evaluate")

    assert run(tmp_path, evaluate=fail) == first
    assert (tmp_path / "metrics.jsonl").read_text() == written


def test_never_starts_over_and_a_path_is_taken(tmp_path):
    run(tmp_path, save_every_steps=1)
    after_four = weights(tmp_path / "final")
    result = run(tmp_path, save_every_steps=1, resume=str(tmp_path / "checkpoints" / "step-3"))
    assert result.steps == 4
    assert_same_weights(weights(tmp_path / "final"), after_four)
    (tmp_path / "checkpoints" / "step-9").mkdir()  # not ours
    run(tmp_path, max_steps=2, resume="never")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-9"]


def scored(scores):
    """What gives these scores, one after the other, or is killed."""
    following = iter(scores)

    def evaluate(model):
        if isinstance(score := next(following), Killed):
            raise score
        return {"loss": score}

    return evaluate


def test_the_best_model_is_the_one_that_is_said_to_be(tmp_path):
    every_two = {"max_steps": 6, "eval_every_steps": 2, "save_every_steps": 1}
    first = run(tmp_path / "first", evaluate=scored([1.0, 3.0, 4.0]), **every_two)
    assert first.best_step == 2
    # In another folder, which has no model of step 2.
    checkpoint = str(tmp_path / "first" / "checkpoints" / "step-5")
    moved = run(tmp_path / "moved", evaluate=scored([4.0]), **every_two, resume=checkpoint)
    assert (moved.best_step, moved.best_metrics) == (6, {"loss": 4.0})
    assert_same_weights(weights(moved.best_dir), weights(moved.final_dir))
    # Killed after step 4 was the best, and continued from step 3 with other evaluations.
    with pytest.raises(Killed):
        run(tmp_path / "killed", evaluate=scored([1.0, 0.5, Killed()]), **{**every_two, "save_every_steps": 3})
    others = {"max_steps": 6, "eval_every_steps": 3, "save_every_steps": 3}
    continued = run(tmp_path / "killed", evaluate=scored([2.0]), **others)
    assert (continued.best_step, continued.best_metrics) == (6, {"loss": 2.0})
    assert_same_weights(weights(continued.best_dir), weights(continued.final_dir))
    # A run that has ended and lost its best model has the last one.
    shutil.rmtree(tmp_path / "first" / "best")
    lost = run(tmp_path / "first", evaluate=scored([4.0]), **every_two)
    assert (lost.best_step, lost.best_metrics) == (6, {"loss": 4.0}) and lost.best_dir.is_dir()


def test_a_half_written_line_is_dropped(tmp_path):
    run(tmp_path, max_steps=4, save_every_steps=2)
    whole = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run(tmp_path, max_steps=4, save_every_steps=2)
    assert lines(tmp_path) == whole


# --- streamed -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Examples one after the other; `read` tells how many were."""

    def __init__(self, examples, killed_after=None):
        self.examples, self.killed_after, self.read = examples, killed_after, 0

    def __iter__(self):
        for example in self.examples:
            if self.read == self.killed_after:
                raise Killed
            self.read += 1
            yield example


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_is_the_data_set_in_its_order(tmp_path, monkeypatch, accumulation):
    """Over the end of an epoch, which has a smaller last step; dropout is on."""
    settings = {"max_steps": 8, "batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    settings |= {"eval_every_steps": 4}
    run(tmp_path / "stream", data=Stream(texts(21)), **settings)
    monkeypatch.setattr("rsa_hf.training.steps.random.Random.shuffle", lambda self, order: None)
    run(tmp_path / "list", data=texts(21), **settings)
    without_epochs = [{k: v for k, v in line.items() if k != "epoch"} for line in lines(tmp_path / "list")]
    assert [{k: v for k, v in line.items() if k != "epoch"} for line in lines(tmp_path / "stream")] == without_epochs
    assert_same_weights(weights(tmp_path / "stream" / "final"), weights(tmp_path / "list" / "final"))


@pytest.mark.parametrize("killed_at", [3, 7])
def test_a_stream_is_continued_bitwise(tmp_path, killed_at):
    settings = {"max_steps": 9, "save_every_steps": 2, "eval_every_steps": 3}
    run(tmp_path / "whole", data=Stream(texts(20)), **settings)
    with pytest.raises(Killed):
        run(tmp_path / "parts", data=Stream(texts(20), killed_after=4 * killed_at + 1), **settings)
    again = Stream(texts(20))
    run(tmp_path / "parts", data=again, **settings)
    assert again.read == 4 * 9  # those before the checkpoint are read past
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "parts" / "final"), weights(tmp_path / "whole" / "final"))


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_the_steps_of_a_stream(num_processes):
    alone = StreamedExamples(range(11), 2 * num_processes, 1, 1, 0)
    shared = [StreamedExamples(range(11), 2, 1, num_processes, rank) for rank in range(num_processes)]
    for step in [0, 1, 2, 3, 7, 4]:  # forward, past some, and back
        expected = [i for micro_batch in alone(step)[0] for i in micro_batch]
        parts = [one(step) for one in shared]
        assert all(micro_batches[0] for micro_batches, _ in parts)
        got = [i for micro_batches, counts in parts if counts for one in micro_batches for i in one]
        assert sorted(got) == sorted(expected)


def test_a_stream_needs_max_steps_and_examples(tmp_path):
    with pytest.raises(ValueError, match=r"training.max_steps=None, but a stream has no length: set max_steps"):
        run(tmp_path, data=Stream(texts(4)), max_steps=None)
    with pytest.raises(ValueError, match="has 0 examples"):
        run(tmp_path, data=Stream([]))


# --- refused --------------------------------------------------------------------------------------------------


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
    for word in words:
        assert word in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_settings_that_decide_nothing_may_change(tmp_path):
    run(tmp_path)
    run(tmp_path, log_every_steps=2, eval_every_steps=3, save_every_steps=3, eval_batch_size=7)


@pytest.mark.parametrize("content", [None, "{", '{"progress": {"stp": 1}, "settings": {}}', "[]"])
def test_no_whole_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / "progress.json").write_text(content)
    with pytest.raises(ValueError, match="is not an intact checkpoint") as error:
        run(tmp_path / "out", resume=str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_nan_stops_before_the_step(tmp_path, accumulation):
    model = gpt2()
    calls = []

    def breaks(module, inputs, output):
        calls.append(module.training)
        if calls.count(True) > 2 * accumulation:
            output.loss = output.loss * math.nan

    model.register_forward_hook(breaks)
    with pytest.raises(
        TrainingDivergedError, match=r"the loss is nan at step 3.*training\.learning_rate \(now 0\.01\)"
    ):
        run(tmp_path, model, gradient_accumulation_steps=accumulation, save_every_steps=2)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_an_infinite_loss_stops_too(tmp_path):
    model = gpt2()
    with torch.no_grad():
        model.lm_head.weight.fill_(1e38)
    with pytest.raises(TrainingDivergedError, match="at step 1"):
        run(tmp_path, model)


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_infinite_gradient_at_a_finite_loss_stops_before_the_step(tmp_path, max_grad_norm):
    model = gpt2()
    seen = []

    def breaks(gradient):
        seen.append(gradient)
        return gradient * math.inf if len(seen) == 3 else gradient

    model.lm_head.weight.register_hook(breaks)
    with pytest.raises(TrainingDivergedError, match=r"the norm of the gradient is (nan|inf) at step 3"):
        run(tmp_path, model, max_grad_norm=max_grad_norm, save_every_steps=1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="has 0 examples"):
        run(tmp_path, data=[])
    with pytest.raises(ValueError, match="a batch has input_ids, but no labels"):
        run(tmp_path, data=[{"input_ids": torch.ones(4, dtype=torch.long)}])
    nothing = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.full((4,), -100)}]
    with pytest.raises(ValueError, match="the examples of step 1 have no label"):
        run(tmp_path, data=nothing)
    with pytest.raises(ValueError, match="evaluate returned loss, but no 'accuracy'"):
        run(tmp_path, best_metric="accuracy")
