"""`RSATrainer`: `transformers.Trainer` for patched models, and for models that carry a memory between segments."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer

from rsa_hf.hub import write_card
from rsa_hf.patching import is_patched
from rsa_hf.training.arguments import RSATrainingArguments
from rsa_hf.training.callbacks import ProgressBar, RSACallback, StopOnSignal, require_finite
from rsa_hf.training.carried import carried_from, segment_state_of
from rsa_hf.training.fsdp import shard_rsa_heads
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs


class RSATrainer(Trainer):
    """`transformers.Trainer`, with what it lacks for patched models.

    * RSA parameters have their own learning rate, `args.rsa_learning_rate`, and no weight decay (`param_groups`).
    * Gates and rates are logged (`RSACallback`), and the model card that `push_to_hub` uploads shows them.
    * Under FSDP2, RSA parameters stay float32 (`shard_rsa_heads`).
    * A loss that is NaN or infinite ends the training; SIGTERM and Ctrl-C end it after a checkpoint.
    * A model with a `segment_state` carries it along the tracks of a data set, across checkpoints. Such a data set has
      `num_tracks`, and its example i continues example i − `num_tracks`.

    Arguments are those of `Trainer`.

    Raises:
        ValueError: parallel tracks for a model without a state; in training, more or fewer rows in a step than tracks.
        DivergedError: while training.
    """

    args: RSATrainingArguments
    train_dataset: Any

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        given = inspect.signature(Trainer).bind(*positional, **keywords).arguments
        args = given["args"] = given.get("args") or RSATrainingArguments(output_dir="trainer_output")
        if (given.get("optimizers") or (None,))[0] is None and given.get("optimizer_cls_and_kwargs") is None:
            rate = getattr(args, "rsa_learning_rate", None)
            given["optimizer_cls_and_kwargs"] = optimizer_cls_and_kwargs(args, rate)
        if getattr(given.get("model"), "segment_state", None) is not None:
            args.use_cache = True  # otherwise the Trainer switches off the state that a model returns
        super().__init__(**given)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ProgressBar)
        self.stop = StopOnSignal(self)
        self.add_callback(RSACallback(self))
        self.add_callback(self.stop)
        self.card_facts: Mapping[str, Any] = {}  # keyword arguments of `write_card`
        self._last_loss: Tensor | None = None
        self._states: dict[int, Any] = {}  # carried along the tracks, for each micro-batch of a step
        self._state_name: str | None = None  # in training on tracks
        self._micro_batches = 0
        self._num_tracks: int | None = getattr(self.train_dataset, "num_tracks", None)
        if self._num_tracks is not None:
            # The loss is a mean over the micro-batch: the Trainer divides it by the number of micro-batches.
            self.model_accepts_loss_kwargs = False
            args.train_sampling_strategy = "sequential"
            if args.label_smoothing_factor:
                raise ValueError("label_smoothing_factor: has no effect with carry_memory. Leave it out.")

    def train(self, *args: Any, **keywords: Any) -> Any:
        """As `Trainer.train`. A new run starts with an empty memory."""
        assert self.model is not None
        shard_rsa_heads(self.model, self.accelerator)
        self._state_name = None if self._num_tracks is None else segment_state_of(self.model)
        self._states, self._micro_batches = {}, 0
        try:
            return super().train(*args, **keywords)
        finally:
            self.stop.restore_handlers()

    def training_step(self, *args: Any, **keywords: Any) -> Tensor:
        """As `Trainer.training_step`."""
        self._last_loss = super().training_step(*args, **keywords)
        return self._last_loss

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """As `Trainer.log`; a loss that is NaN or infinite ends the training."""
        super().log(logs, *args, **keywords)
        if "loss" in logs:
            require_finite(logs["loss"], self.state.global_step)

    def create_model_card(self, *args: Any, **keywords: Any) -> None:
        """Write rsa_hf's model card for a patched model, and the Trainer's for any other."""
        assert self.model is not None
        if not is_patched(self.model):
            super().create_model_card(*args, **keywords)
        elif self.is_world_process_zero():
            write_card(self.accelerator.unwrap_model(self.model), str(self.args.output_dir), **self.card_facts)

    # --- memory carried along parallel tracks -----------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As `Trainer.compute_loss`. On tracks, the mean loss, with the model's memory carried along them."""
        if self._state_name is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        rows = len(inputs["input_ids"])  # not the setting's if auto_find_batch_size has changed the batch size
        in_step = rows * self.args.gradient_accumulation_steps * self.args.world_size
        if self._num_tracks != in_step:
            raise ValueError(f"the data has {self._num_tracks} tracks, but a step takes {in_step} rows: one of each.")
        if self._micro_batches * rows % (len(self.train_dataset) // self.args.world_size) == 0:  # an epoch begins
            self._states = {}
        place = self._micro_batches % self.args.gradient_accumulation_steps
        self._micro_batches += 1
        outputs = model(**inputs, **{self._state_name: self._states.get(place)})
        self._states[place] = carried_from(outputs, self._state_name)
        return outputs.loss

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **keywords: Any) -> None:
        if self._last_loss is not None:
            require_finite(self._last_loss, self.state.global_step)
        super()._save_checkpoint(*args, **keywords)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A tied weight is saved once, under one of its names.
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", {})
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # The memory is saved and loaded with the states of the random generators, which a process also needs to continue.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._state_name is not None:
            # Clones: torch.save writes the whole storage behind a view.
            torch.save(recursively_apply(torch.clone, self._states), self._state_file(output_dir))
        self.accelerator.wait_for_everyone()  # trainer_state.json follows, which marks the checkpoint as complete

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._state_name is not None and checkpoint is not None:
            # To the CPU first: torch.load does not accept cpu:0, the device of processes under gloo.
            states = torch.load(self._state_file(checkpoint), map_location="cpu", weights_only=True)
            self._states = send_to_device(states, self.args.device)
            self._micro_batches = self.state.global_step * self.args.gradient_accumulation_steps

    def _state_file(self, checkpoint: str) -> Path:
        return Path(checkpoint, f"segment_state_{self.args.process_index}.pt")
