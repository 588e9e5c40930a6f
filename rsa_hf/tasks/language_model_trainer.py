"""A `transformers.Trainer` for language modelling: it evaluates in bits per byte and can carry a model's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, default_collate
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from rsa_hf.tasks.language_modeling import PreparedText, evaluate_language_model
from rsa_hf.tasks.text_data import TrainingTracks
from rsa_hf.training.arguments import TrainingSettings
from rsa_hf.training.carried import CarriedState
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs

__all__ = ["LanguageModelTrainer"]


class _Bar(ProgressCallback):
    def on_log(self, *_: Any, **__: Any) -> None:
        """Print nothing."""


class LanguageModelTrainer(Trainer):
    """Train like `rsa_hf.training.run.train`, without checkpoints and in one process.

    `evaluate` scores the validation text with `evaluate_language_model`: `eval_bits_per_byte` and the other metrics.
    During training it runs every `eval_every_steps` steps if that divides `max_steps`.

    Args:
        model_init: creates the model, as for `Trainer`.
        text: the training and validation text. With `carry_memory`, it has as many tracks as a step has rows.
        training: the training settings.
        eval_memory: the `memory` of `evaluate_language_model`.
        progress: whether to show progress bars.

    Raises:
        ValueError: `training.class_weights` is set, or `Trainer` refuses its arguments.
    """

    def __init__(
        self,
        model_init: Callable[[Any], PreTrainedModel],
        text: PreparedText,
        training: TrainingSettings,
        eval_memory: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        if training.class_weights:
            raise ValueError("training.class_weights=True: language modelling has no classes. Set it to false.")
        every, steps = training.eval_every_steps, training.max_steps
        evaluates = every is not None and steps is not None and steps % every == 0
        # Newer versions of transformers rename it and warn even about gradient_checkpointing=False.
        checkpointing: dict[str, Any] = {"gradient_checkpointing": True} if training.gradient_checkpointing else {}
        args = TrainingArguments(
            training.output_dir,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            num_train_epochs=training.epochs,
            max_steps=-1 if steps is None else steps,
            per_device_train_batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            warmup_steps=min(training.warmup_ratio, math.nextafter(1, 0)),  # 1 would mean one step
            lr_scheduler_type={"constant": "constant_with_warmup"}.get(training.lr_schedule, training.lr_schedule),
            max_grad_norm=training.max_grad_norm or 0.0,
            bf16=training.mixed_precision == "bf16",
            fp16=training.mixed_precision == "fp16",
            seed=training.seed,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=every if evaluates else None,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=not progress,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.accelerator.is_available(),
            **checkpointing,
        )
        super().__init__(
            args=args,
            model_init=model_init,
            train_dataset=text.train,
            eval_dataset=text.validation,
            data_collator=default_collate,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, training.rsa_learning_rate),
        )
        self.remove_callback(ProgressCallback if progress else PrinterCallback)  # both also print the time of a run
        if progress:
            self.add_callback(_Bar)
        self.text = text
        self.eval_batch_size = training.eval_batch_size
        self.eval_memory = eval_memory
        self._carried: CarriedState | None = None
        self._micro_batches = 0
        if isinstance(text.train, TrainingTracks):
            # The loss is a mean over the micro-batch, so the Trainer has to divide it by the accumulation steps.
            self.model_accepts_loss_kwargs = False

    def train(self, *args: Any, **keywords: Any) -> Any:
        """As `Trainer.train`. A new run starts with an empty memory."""
        self._carried, self._micro_batches = None, 0
        return super().train(*args, **keywords)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the validation text; the names of the metrics get the prefix `eval_`."""
        assert self.model is not None
        scores = evaluate_language_model(
            self.model, self.text.validation, self.eval_batch_size, memory=self.eval_memory
        )
        metrics = {f"eval_{name}": value for name, value in scores.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As `Trainer.compute_loss`. On tracks, the mean loss, with the model's memory carried along them."""
        tracks = self.text.train
        if not isinstance(tracks, TrainingTracks):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._carried is None:
            assert self.model is not None
            self._carried = CarriedState(self.model)
        if self._micro_batches * len(inputs["input_ids"]) % len(tracks) == 0:  # an epoch begins
            self._carried.reset()
        self._micro_batches += 1
        return self._carried.mean_loss(model, inputs, self._micro_batches % self.args.gradient_accumulation_steps)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if isinstance(self.text.train, TrainingTracks):
            return SequentialSampler(self.text.train)
        return super()._get_train_sampler(train_dataset)
