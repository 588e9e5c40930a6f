"""A run of `rsa-hf train`: say how it starts, train, save the model, and show the results."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rsa_hf.patching import is_patched
from rsa_hf.plots import plot_training_curves
from rsa_hf.training.arguments import RunArguments
from rsa_hf.training.checkpoints import RunFolder, newest_whole_checkpoint
from rsa_hf.training.rsa_trainer import RSATrainer
from rsa_hf.utils.files import write_text
from rsa_hf.utils.text import finite_or_null, format_table


def train_to_end(trainer: RSATrainer, folder: RunFolder, metrics: Iterable[str]) -> None:
    """Start or continue the training, and load the best model if `load_best_model_at_end` asks for it.

    `metrics` are the names of an evaluation's metrics besides the loss. A signal ends the run with a SystemExit, after
    a checkpoint.
    """
    args, main = trainer.args, trainer.is_world_process_zero()
    known, best = {"loss", *metrics}, args.metric_for_best_model
    if best is not None and best.removeprefix("eval_") not in known:
        raise ValueError(f"metric_for_best_model={best!r}: choose from {', '.join(sorted(known))}.")
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ValueError("bf16_full_eval and fp16_full_eval would round the model that is saved. Set bf16 or fp16.")
    folder.clear()
    trainer.accelerator.wait_for_everyone()
    # All processes look before the first of them writes a checkpoint.
    checkpoint = args.resume_from_checkpoint or newest_whole_checkpoint(args.folder)
    trainer.accelerator.wait_for_everyone()
    path = Path(checkpoint or "", TRAINER_STATE_NAME)
    state = None if checkpoint is None else TrainerState.load_from_json(str(path))
    if state is not None and state.best_model_checkpoint is not None:
        moved = args.folder / Path(state.best_model_checkpoint).name  # where it is now if the folder was moved
        if moved.exists() and not Path(state.best_model_checkpoint).exists():
            state.best_model_checkpoint = str(moved)
            if main:
                state.save_to_json(str(path))
    if main:
        folder.write()
        says = "starts" if state is None else f"continues from step {state.global_step}"
        print(f"{args.output_dir}: the run {says}.")
    if state is not None and state.global_step >= state.max_steps and not args.resume_from_checkpoint:
        # The Trainer would take one more step.
        trainer.state = state
        kept = state.best_model_checkpoint if args.load_best_model_at_end else None
        trainer._load_from_checkpoint(str(kept or checkpoint))
        return
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.stop.signal is not None:
        if not (args.folder / f"checkpoint-{trainer.state.global_step}").exists():
            assert trainer.model is not None
            trainer._save_checkpoint(trainer.model, trial=None)  # the signal came after the last step
        if main:
            step = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
            goes_on = "" if args.save_only_model else " The same command goes on from there."
            print(f"stopped at {step}, with a checkpoint.{goes_on}", file=sys.stderr)
        trainer.accelerator.end_training()
        raise SystemExit(128 + trainer.stop.signal)


def finish_run(
    trainer: RSATrainer,
    run: RunArguments[Any],
    folder: RunFolder,
    scores: Mapping[str, Mapping[str, float]],
    table: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> None:
    """Save the model with its card, the results and the pictures, print the table and the notes, and push if asked.

    `scores` are those of each split and, as "calibration", the losses before training; in `all_results.json`, NaN and
    infinity become null. The first row of `table` is its header.
    """
    args, output, model = run.training, run.training.folder, trainer.model
    assert isinstance(model, PreTrainedModel)
    trainer.save_model()
    trainer.save_state()
    trainer.card_facts = {
        "base_model": run.model.model_name_or_path,
        "dataset": run.data.dataset_name or (None if run.data.train_file else "Python's standard library"),
        "scores": {split: values for split, values in scores.items() if values},
        "seed": args.seed,
    }
    metrics = {
        f"{'eval' if split == 'validation' else split}_{name}": value
        for split, values in scores.items()
        for name, value in values.items()
    }
    if trainer.is_world_process_zero():
        results = {"patched": is_patched(model), "steps": trainer.state.global_step, **metrics}
        write_text(output / "all_results.json", json.dumps(finite_or_null(results), indent=2) + "\n")
        if is_patched(model):
            trainer.create_model_card()
        _draw_curves(trainer.state.log_history, output / "curves.png")
        shown = "\n".join([format_table(table), *notes])
        print(f"\n{shown}\n\nwritten: {output}")
    if args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        folder.write(result=shown)
    trainer.accelerator.wait_for_everyone()  # a launcher ends all processes when one of them fails as it exits
    trainer.accelerator.end_training()  # a process group that is left open may abort the process


def _draw_curves(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the losses of a run by step, if matplotlib is installed."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for record in history:
        for key, name in (("loss", "training"), ("eval_loss", "validation")):
            if key in record:
                curves.setdefault(name, []).append((record["step"], record[key]))
    if not curves:
        return
    try:
        plot_training_curves(curves, path, xlabel="step", ylabel="loss", title="")
    except ImportError as error:
        print(f"no pictures: {error}")
