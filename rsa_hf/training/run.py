"""A training run: load the model, train it on Accelerate with evaluations, checkpoints and a log, report the results.

A resumed run gives bitwise the results of an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from rsa_hf.config import RSAConfig
from rsa_hf.hub import write_card
from rsa_hf.patching import is_patched, patch_model
from rsa_hf.plots import plot_rem
from rsa_hf.report import rsa_report
from rsa_hf.training.arguments import ModelSettings, RunConfig, TrainingSettings, did_you_mean
from rsa_hf.training.calibrated import FILE as CALIBRATION
from rsa_hf.training.carried import ParallelTracks
from rsa_hf.training.checkpoints import CheckpointFolder, Progress
from rsa_hf.training.steps import Batch, Examples, Stepper
from rsa_hf.training.trackers import RunLog, require_installed
from rsa_hf.utils.files import StorageError, recover, sole_writer, storage_errors, write_text, written_whole
from rsa_hf.utils.locate import locate
from rsa_hf.utils.text import finite_or_null, format_table

__all__ = [
    "TrainResult",
    "card_facts",
    "load_model",
    "make_accelerator",
    "predict_logits",
    "report_results",
    "require_positions_known",
    "require_tokens_known",
    "train",
]

logger = logging.getLogger(__name__)

BEST_STEP = "best.json"  # the step of `best/`, written before it


# --- the model ----------------------------------------------------------------------------------------------


def load_model(
    auto_class: Any, settings: ModelSettings, rsa: RSAConfig | None, **config_values: Any
) -> PreTrainedModel:
    """Load a pretrained model or make one from scratch, and patch it.

    Weights are loaded as float32; the training loop chooses the precision of the computation.

    Args:
        auto_class: `AutoModelForCausalLM` or another of transformers' Auto classes.
        settings: the model.
        rsa: the RSA heads; None: the model stays plain.
        config_values: entries of the model's config that the task needs; `settings.config_overrides` goes first.

    Raises:
        OSError: the model is not found.
        ValueError: an unknown model type, an unknown entry in `config_overrides`, or a plan that does not fit.
    """
    kind, name = settings.model_type, settings.name_or_path
    if kind is not None and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind!r} is not a model type of transformers.{did_you_mean(kind, CONFIG_MAPPING)}"
        )

    def config_with(**values: Any) -> Any:
        if kind is not None:
            return AutoConfig.for_model(kind, **values)
        assert name is not None  # one of the two is given
        return AutoConfig.from_pretrained(locate(name), **values)

    known = config_with()
    for key in settings.config_overrides:
        # transformers accepts any key, so that a misspelt one would have no effect.
        if not hasattr(known, key):
            hint = did_you_mean(key, known.to_dict())
            raise ValueError(f"config_overrides: a {type(known).__name__} has no entry {key!r}.{hint}")
    config = config_with(**{**config_values, **settings.config_overrides})
    keywords = {} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}
    model: PreTrainedModel
    if name is None:
        model = auto_class.from_config(config, **keywords)
    else:
        model = auto_class.from_pretrained(locate(name), config=config, dtype=torch.float32, **keywords)
    return model if rsa is None else patch_model(model, rsa)


def require_tokens_known(model: PreTrainedModel, num_tokens: int) -> None:
    """Check that the model has an embedding for each token of a tokenizer.

    Raises:
        ValueError: it has fewer embeddings.
    """
    # Adaptive embeddings have several tables, and their size in the config.
    embeddings: Any = model.get_input_embeddings()
    known = embeddings.weight.shape[0] if hasattr(embeddings, "weight") else model.config.vocab_size
    if num_tokens > known:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, the model {known}. Give the model's own tokenizer as "
            "model.tokenizer, or set config_overrides.vocab_size of a model from scratch."
        )


def require_positions_known(model: PreTrainedModel, setting: str, num_tokens: int) -> None:
    """Check that a model with a table of position embeddings has one for each token of an input.

    Rotary and relative positions have no limit, whatever `max_position_embeddings` says.

    Args:
        model: the model.
        setting: the setting with the length of an input, for the message.
        num_tokens: length of the longest input.

    Raises:
        ValueError: it has fewer position embeddings.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or num_tokens <= most:
        return
    tokens = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not tokens]
    # OPT has two more rows.
    if any(most <= table.num_embeddings <= most + 2 for table in tables):
        raise ValueError(f"{setting}={num_tokens}: this model takes at most {most} tokens.")


# --- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: optimiser steps done.
        tokens: input tokens seen, without padding.
        final_metrics: results of the evaluation after the last step.
        best_step: step with the best evaluation.
        best_metrics: results of the best evaluation.
        best_dir: folder of the model of that step, written by `save_pretrained`.
        final_dir: folder of the model after the last step.
    """

    steps: int
    tokens: int
    final_metrics: dict[str, float]
    best_step: int
    best_metrics: dict[str, float]
    best_dir: Path
    final_dir: Path


def make_accelerator(training: TrainingSettings) -> Accelerator:
    """The Accelerator of a run, with the precision and the trackers that its settings ask for.

    Raises:
        ImportError: the package of a tracker is not installed.
    """
    require_installed(training.report_to or [])
    return Accelerator(
        mixed_precision=training.mixed_precision,
        log_with=training.report_to or None,
        project_config=ProjectConfiguration(logging_dir=str(Path(training.output_dir) / "runs")),
        # Without this, each of several processes on a machine without a GPU trains alone and overwrites the others.
        cpu=not torch.accelerator.is_available(),
        # The loop accumulates gradients itself, and steps the schedule once per optimiser step.
        step_scheduler_with_optimizer=False,
    )


def train(
    model: PreTrainedModel,
    train_dataset: Examples | ParallelTracks | IterableDataset[Any],
    collate_fn: Callable[[list[Any]], Batch],
    evaluate: Callable[[PreTrainedModel], dict[str, float]],
    training: TrainingSettings,
    *,
    best_metric: str,
    greater_is_better: bool,
    class_weights: Sequence[float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Mapping[str, Any] | None = None,
    accelerator: Accelerator | None = None,
) -> TrainResult:
    """Train a model, patched or plain, with evaluation, checkpoints and logging.

    The gradient of a step is that of the mean loss over all labels except −100, over all micro-batches and processes:
    `batch_size=8, gradient_accumulation_steps=2` learns what `batch_size=16` does.

    Args:
        model: its forward takes what `collate_fn` returns, and returns the mean loss over the labels.
        train_dataset: the examples. A data set with a length is read once per epoch, in an order that depends on seed
            and epoch. An `IterableDataset` is read in its order and needs `training.max_steps`; a resumed run skips
            what it has seen. `ParallelTracks` are read in their order too, and the model carries its memory along
            each of them, across steps and checkpoints, until the epoch ends.
        collate_fn: makes a batch of a list of examples, with `labels` (`shift_labels` for parallel tracks).
        evaluate: returns metrics of the model. Every process calls it, as sharded models require, and the main
            process's result is used. It may switch the model to evaluation mode.
        training: how to train.
        best_metric: the metric that decides which model is best.
        greater_is_better: whether a higher value of it is better.
        class_weights: for classification, the weight of each class in the loss. The task computes them;
            `training.class_weights` only asks for them.
        tokenizer: saved with the model.
        settings: all settings of the run, as `RunConfig.to_dict` returns them. A checkpoint is only resumed under the
            same settings. Default: those of `training`.
        accelerator: as `make_accelerator` makes it, which has the trackers; default: a new one.

    Returns:
        The metrics and the folders of the models.

    Raises:
        ImportError: the package of a tracker is not installed.
        StorageError: a full disk, a folder that cannot be written, or another process that writes into it. Earlier
            checkpoints are intact, and the run can continue from them.
        TrainingDivergedError: the loss or its gradient became NaN or infinite.
        ValueError: the data, `evaluate`, the model or a checkpoint does not fit the settings.
    """
    num_examples = None if isinstance(train_dataset, IterableDataset) else len(train_dataset)
    if num_examples == 0:
        raise ValueError("the training set has 0 examples; at least one is needed.")
    if training.class_weights and class_weights is None:
        raise ValueError("training.class_weights=True, but this task has no classes to weigh; set it to false.")
    accelerator = make_accelerator(training) if accelerator is None else accelerator
    settings = {
        **(settings or {"training": asdict(training)}),
        "num_processes": accelerator.num_processes,
        "num_train_examples": num_examples,
    }
    output = Path(training.output_dir)
    checkpoints = CheckpointFolder(output / "checkpoints", settings, accelerator)
    log = RunLog(output, accelerator, settings)
    added = {"forward", "_original_forward"} - vars(model).keys()
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        stepper = Stepper(accelerator, model, train_dataset, collate_fn, training, class_weights)
        with sole_writer(output) if accelerator.is_main_process else nullcontext():
            run = _Run(model, stepper, checkpoints, log, training, evaluate, best_metric, greater_is_better, tokenizer)
            return run.complete()
    finally:
        if training.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        # Under mixed precision Accelerate wraps the model's forward. Its unwrap_model would also remove transformers'
        # decorators.
        for name in added & vars(model).keys():
            delattr(model, name)


@dataclass
class _Run:
    """A run: its parts and the loop over its steps."""

    model: PreTrainedModel
    stepper: Stepper
    checkpoints: CheckpointFolder
    log: RunLog
    training: TrainingSettings
    evaluate: Callable[[PreTrainedModel], dict[str, float]]
    best_metric: str
    greater_is_better: bool
    tokenizer: PreTrainedTokenizerBase | None

    def __post_init__(self) -> None:
        self.accelerator = self.stepper.accelerator
        self.output = Path(self.training.output_dir)

    def complete(self) -> TrainResult:
        """Take all remaining steps."""
        try:
            progress = self._restore()
            self.log.start(progress.step)
            self._take_steps(progress)
            if progress.best_step is None:  # a finished run whose best model was deleted
                self._evaluate(progress)
            self._save_model(self.output / "final")
            self.log.finish()
        except StorageError as error:
            newest = self.checkpoints.newest()
            kept = "No checkpoint was saved yet." if newest is None else f"The run can continue from {newest}."
            raise StorageError(f"{error} {kept}") from error
        assert progress.best_step is not None  # the last step is always evaluated
        return TrainResult(
            steps=progress.step,
            tokens=progress.tokens,
            final_metrics=progress.metrics,
            best_step=progress.best_step,
            best_metrics=progress.best_metrics,
            best_dir=self.output / "best",
            final_dir=self.output / "final",
        )

    def _take_steps(self, progress: Progress) -> None:
        training, stepper, is_main = self.training, self.stepper, self.accelerator.is_main_process
        total, steps_per_epoch = stepper.total_steps, stepper.steps_per_epoch

        def is_due(every: int) -> bool:
            return progress.step % every == 0 or progress.step == total

        self.model.train()
        with tqdm(total=total, initial=progress.step, desc="training", unit="step", disable=not is_main) as bar:
            while progress.step < total:
                learning_rate = stepper.learning_rate()
                loss, tokens = stepper.step(progress.step)
                progress.step += 1
                progress.tokens += tokens
                progress.losses.append(loss)
                bar.set_postfix(loss=f"{loss:.4f}", lr=f"{learning_rate:.2e}", refresh=False)
                bar.update()
                evaluates = is_due(training.eval_every_steps or steps_per_epoch or total)
                if evaluates:
                    self._evaluate(progress)
                    if is_main:
                        words = ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
                        bar.write(f"step {progress.step}: {words}")
                if evaluates or is_due(training.log_every_steps):
                    self._log(progress, learning_rate, evaluates)
                if is_due(training.save_every_steps) if training.save_every_steps else evaluates:
                    self.checkpoints.save(progress, stepper.carried)

    def _restore(self) -> Progress:
        """Clean up after a killed run, and load the checkpoint that `training.resume` asks for."""
        if self.accelerator.is_main_process:
            with storage_errors(self.output):
                recover(self.output / "best")
                recover(self.output / "final")
        self.checkpoints.recover()
        if self.training.resume == "never":
            folder = None
        elif self.training.resume == "auto":
            folder = self.checkpoints.newest()
        else:
            folder = Path(self.training.resume)
        progress = Progress() if folder is None else self.checkpoints.load(folder, self.stepper.carried)
        if progress.best_step is not None and not self._has_best(progress.best_step):
            logger.warning(
                "%s is not the model of step %d, the best when %s was saved; the best from now on will be kept.",
                *(self.output / "best", progress.best_step, folder),
            )
            progress.best_step, progress.best_metrics = None, {}
        self.checkpoints.clear(after=progress.step)
        return progress

    def _has_best(self, step: int) -> bool:
        """Whether `best/` is the model of this step. It is not in a new folder, or if a later step wrote it."""
        told = self.output / BEST_STEP
        known = json.loads(told.read_text(encoding="utf-8"))["step"] if told.exists() else step
        shared = [known == step and (self.output / "best").is_dir()]
        broadcast_object_list(shared)  # all processes have to agree, as they save models together
        return shared[0]

    def _log(self, progress: Progress, learning_rate: float, evaluated: bool) -> None:
        """Log the steps since the last call: mean loss, evaluation, gates and rates."""
        report = rsa_report(self.model)  # in all processes: under FSDP each holds a part of the parameters
        steps_per_epoch = self.stepper.steps_per_epoch
        train = {
            "epoch": None if steps_per_epoch is None else progress.step / steps_per_epoch,
            "loss": sum(progress.losses) / len(progress.losses),
            "learning_rate": learning_rate,
            "tokens": progress.tokens,
        }
        self.log.write(progress.step, train, progress.metrics if evaluated else None, report)
        progress.losses = []

    def _evaluate(self, progress: Progress) -> None:
        shared = [self.evaluate(self.model)]
        broadcast_object_list(shared)  # all processes have to agree on the best model
        progress.metrics = shared[0]
        self.model.train()
        if self.best_metric not in progress.metrics:
            raise ValueError(f"evaluate returned {', '.join(progress.metrics)}, but no {self.best_metric!r}.")
        if progress.best_step is None or self._is_better(progress.metrics, progress.best_metrics):
            progress.best_step, progress.best_metrics = progress.step, progress.metrics
            if self.accelerator.is_main_process:
                write_text(self.output / BEST_STEP, json.dumps({"step": progress.step}) + "\n")
            self._save_model(self.output / "best")

    def _is_better(self, metrics: dict[str, float], best: dict[str, float]) -> bool:
        value, known = metrics[self.best_metric], best[self.best_metric]
        if math.isnan(value) or math.isnan(known):
            return math.isnan(known) and not math.isnan(value)
        return value > known if self.greater_is_better else value < known

    def _save_model(self, folder: Path) -> None:
        state = self.accelerator.get_state_dict(self.stepper.model)  # gathers the shards of all processes
        if self.accelerator.is_main_process:
            with written_whole(folder) as temporary:
                self.model.save_pretrained(temporary, state_dict=state)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(temporary)
        self.accelerator.wait_for_everyone()


# --- results ------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_logits(
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Any]],
    collate_fn: Callable[[list[Any]], Batch],
    batch_size: int,
) -> torch.Tensor:
    """The logits of a classifier on the CPU, in the order of the rows. Leaves the model in evaluation mode.

    Args:
        model: the classifier.
        rows: its inputs, with `input_ids`.
        collate_fn: makes a batch of a list of rows.
        batch_size: rows per batch.
    """
    model.eval()
    # Batches of rows of similar length need less padding. With the longest first, memory runs out at once or never.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    logits = []
    for start in range(0, len(order), batch_size):
        batch = collate_fn([rows[i] for i in order[start : start + batch_size]])
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)[torch.tensor(order, device="cpu").argsort()]


def report_results(
    config: RunConfig[Any],
    result: TrainResult,
    scores: Mapping[str, Mapping[str, float]],
    rows: Sequence[Sequence[str]],
    model: PreTrainedModel,
) -> None:
    """Print the table of a finished run, save its results, and draw the decays and gates.

    Writes `results.json` into the output folder and, for a patched model, `rsa.png` there and a card into `best/`.

    Args:
        config: the settings of the run.
        result: what `train` returned.
        scores: the scores of the best model by split. NaN and infinity become null.
        rows: the rows of the table, the header first.
        model: the best model.

    Raises:
        StorageError: a file cannot be written. The table was printed before.
    """
    output = Path(config.training.output_dir)
    results = {
        "patched": is_patched(model),
        "steps": result.steps,
        "best_step": result.best_step,
        "train_tokens": result.tokens,
        **_calibration_scores(config),
        **scores,
        "config": config.to_dict(),
    }
    print(f"\n{format_table(rows)}")
    with sole_writer(output), storage_errors(output):
        write_text(output / "results.json", json.dumps(finite_or_null(results), indent=2) + "\n")
        written = [output / "results.json"]
        if is_patched(model):
            try:
                plot_rem(model, output / "rsa.png")
                written.append(output / "rsa.png")
            except ImportError as error:
                print(f"no picture of the RSA heads: {error}")
            card = write_card(model, result.best_dir, **card_facts(output / "results.json"))
            written += [] if card is None else [card]
    print(f"\nwritten: {', '.join(map(str, written))}")


def _calibration_scores(config: RunConfig[Any]) -> dict[str, dict[str, float]]:
    """The loss of a calibrated run before training, without RSA heads and with them."""
    if config.calibrate is None:
        return {}
    found = json.loads((Path(config.training.output_dir) / CALIBRATION).read_text(encoding="utf-8"))
    return {"calibration": found["scores"]}


def card_facts(results: Path) -> dict[str, Any]:
    """Read base model, data set, seed and scores from the `results.json` of a run, for the model card.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a `results.json` of a run.
    """
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
        config = content["config"]
        data = config["data"]
        datasets = {"hub": data.get("hub_dataset"), "embedded": "Python's standard library"}
        return {
            "base_model": config["model"].get("name_or_path"),
            "dataset": datasets.get(str(data.get("source"))),
            "seed": config["training"]["seed"],
            "dataset_config": data.get("hub_subset"),
            "scores": {
                split: {name: float(value) for name, value in content[split].items() if value is not None}
                for split in ("calibration", "validation", "test")
                if split in content
            },
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{results} is not the results.json of a training run ({error!r}).") from error
