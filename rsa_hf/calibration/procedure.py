"""The calibration: check on held-out rows that a choice of heads helps, then choose on all rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_pt_utils import find_batch_size

from rsa_hf.calibration.choice import Choice, choose, in_errors, score
from rsa_hf.calibration.gradients import IGNORED_LABEL, ProbedModel, take_rows
from rsa_hf.calibration.result import CalibratedHead, Calibration
from rsa_hf.config import RSAConfig
from rsa_hf.patching import is_patched

FEWEST_ROWS, USUAL_ROWS = 12, 64
FOLDS = 3  # of the check
CERTAIN = 2.5  # standard errors by which the loss of held-out rows has to fall


@dataclass(frozen=True)
class CalibrationSettings:
    """How `calibrate` chooses heads.

    Args:
        false_discoveries: the share of the chosen heads that may be there by chance.
        max_rows: the largest number of rows to read.
        gate_passes: forward and backward passes over the rows that move the gates after they are opened; the check
            takes one fewer. More passes take longer, and open the gates wider where that lowers the loss.
        head_steps: training steps for the new head of a classifier, one whose loss is about that of a constant guess.
            The encoder is frozen meanwhile, and the head is restored afterwards.

    Raises:
        ValueError: a value is outside its range.
    """

    false_discoveries: float = 0.3
    max_rows: int = USUAL_ROWS
    gate_passes: int = 2
    head_steps: int = 50

    def __post_init__(self) -> None:
        if not 0 <= self.false_discoveries <= 1:
            raise ValueError(f"false_discoveries={self.false_discoveries!r}: a share from 0 to 1 is needed.")
        for name, least in (("max_rows", FEWEST_ROWS), ("gate_passes", 1), ("head_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r}: a whole number ≥ {least} is needed.")


def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> RSAConfig:
    """The config of the heads on which recurrence helps this model on this data, for `patch_model`.

        config = calibrate(model, batches)
        patch_model(model, config)  # better on such data than before, with nothing trained yet

    The config names no heads if no gain could be shown; `patch_model` then leaves the model as it is.
    `run_calibration` takes the same arguments, which it documents, and returns a report too.
    """
    return run_calibration(model, batches, seed=seed, progress=progress, **settings).config


def run_calibration(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> Calibration:
    """Find the heads on which recurrence helps a pretrained model, and how wide to open their gates.

    1. One backward pass gives the derivative of the loss with respect to the share of each REM of a dictionary on each
       head, with its standard error over rows. Heads are chosen as `choice.py` says.
    2. The gates of the chosen heads open by a part of a Newton step. Another `gate_passes` passes move each share
       towards the point where its derivative would vanish (the secant method, in damped steps).
    3. Both steps run without the first, the middle and the last third of the rows in turn, with one pass fewer:
       consecutive rows of a document are not independent. On the held-out rows, the mean loss must fall by 2.5
       standard errors. If it does, both steps run with all rows; otherwise the config names no heads.

    By default the rows pass through the model five times forward and backward, and three times forward only; weights
    get no gradients. The model is in evaluation mode meanwhile, and as before afterwards, even after an error.

    Args:
        model: an unpatched model whose output has a loss.
        batches: keyword arguments of the model's forward, labels included: a DataLoader, a list, a generator. Rows are
            read until there are `max_rows`; twelve are needed.
        seed: the seed of the random signs that show what chance does.
        progress: whether to show a progress bar.
        **settings: the fields of `CalibrationSettings`.

    Returns:
        The config, and what was found: `print(calibration)` for a table, `calibration.plot(path)` for a heatmap.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`, or a setting is unknown.
        ValueError: too few rows, no finite loss, a patched model, or a setting outside its range.
    """
    how = CalibrationSettings(**settings)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"calibrate takes a transformers PreTrainedModel, got {type(model).__name__}.")
    if is_patched(model):
        raise ValueError("the model is patched already. Calibrate a plain one: unpatch_model(model) gives it back.")
    read = _read(batches, how.max_rows)
    rows = sum(map(find_batch_size, read))
    with (
        torch.inference_mode(False),  # turns gradients on, after no_grad too
        torch.autocast(model.device.type, enabled=False),
        torch.device("cpu"),  # tensors are made here on the CPU, whatever the default device
        ProbedModel(model) as probed,
        tqdm(total=2 + (FOLDS + 1) * how.gate_passes, disable=not progress) as bar,
    ):
        bar.set_description("calibrate")
        fold_of_row = torch.arange(rows) * FOLDS // rows
        steps = probed.train_head(read, how.head_steps)
        losses = probed.losses(read)
        bar.update()
        scores = score(probed.gradients(read), probed.directions)
        bar.update()

        def fit(chosen: Tensor, moves: int) -> list[Choice]:
            """Choose heads on some rows, given as a boolean mask, and set their gates on the same rows."""
            found = scores.of(chosen)
            generator = torch.Generator().manual_seed(seed)
            heads = choose(found, how.false_discoveries, generator)
            for _ in range(moves if heads else 0):
                probed.set_heads(_config_of(heads))
                now = score(probed.gradients(_some(read, chosen)), probed.directions)
                for head in heads:
                    head.move(now)
                bar.update()
            return [head for head in heads if head.share > 0]

        # How much the loss of each row falls with heads that were chosen on other rows, and with P = 0 on these heads.
        gains, damped = torch.zeros(2, rows, dtype=torch.float32)
        for fold in range(FOLDS):
            held_out = fold_of_row == fold
            config = _config_of(fit(~held_out, how.gate_passes - 1))
            for found, tried in ((gains, config), (damped, _without_recurrence(config))):
                probed.set_heads(tried)
                found[held_out] = losses[held_out] - probed.losses(_some(read, held_out))
            bar.update()
        gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(rows)
        heads = fit(torch.ones_like(fold_of_row, dtype=torch.bool), how.gate_passes) if gain > CERTAIN * error else []
    of_best = (z.argmin(-1, keepdim=True) for z in in_errors(scores.recurrence))
    best = [means.gather(1, rem)[:, 0] for means, rem in zip(scores.means, of_best, strict=True)]
    heads.sort(key=lambda head: (head.layer, head.head))
    return Calibration(
        config=_config_of(heads),
        heads=tuple(CalibratedHead(head.config(), head.derivative, head.certainty) for head in heads),
        derivatives=tuple(tuple(of_layer.tolist()) for of_layer in best),
        num_rows=rows,
        loss=float(losses.mean()),
        gain=gain,
        gain_error=error,
        gain_without_recurrence=float(damped.mean()),
        head_steps=steps,
        rows_needed=None if heads else _rows_needed(rows, gain, error),
    )


def _rows_needed(rows: int, gain: float, error: float) -> int | None:
    """How many rows would make such a gain certain. A gain below 0 does not tell it, but few rows prove nothing."""
    needed = max(USUAL_ROWS, math.ceil(rows * (CERTAIN * error / gain) ** 2) if gain > 0 else 0)
    return needed if needed > rows else None


def _config_of(heads: list[Choice]) -> RSAConfig:
    return RSAConfig(heads=tuple(head.config() for head in heads))


def _without_recurrence(config: RSAConfig) -> RSAConfig:
    """The same gates with P = 0, so that they only damp attention."""
    heads = config.heads or ()
    return RSAConfig(heads=tuple(replace(head, kind="regular", decay=0.0, free_lags=None) for head in heads))


def _read(batches: Iterable[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The batches, up to a number of rows, without rows that have no label."""
    read: list[dict[str, Any]] = []
    rows = 0
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch is a {type(batch).__name__}: a dict of tensors by name is needed.")
        size, ids = find_batch_size(batch), batch.get("input_ids")
        if size is None or (isinstance(ids, Tensor) and ids.dim() == 1):
            raise ValueError(
                f"a batch with {', '.join(batch) or 'nothing'} in it has no tensor with rows: give batches of them, "
                "such as DataLoader(rows, batch_size=4)."
            )
        chosen, labels = torch.arange(size, device="cpu"), batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim() > 1:
            chosen = (labels != IGNORED_LABEL).flatten(1).any(1).nonzero()[:, 0]
        chosen = chosen[: most - rows]
        if len(chosen):
            read.append(take_rows(batch, chosen))
        rows += len(chosen)
        if rows >= most:
            break
    if rows < FEWEST_ROWS:
        raise ValueError(
            f"the batches have {rows} rows, but at least {FEWEST_ROWS} are needed to tell an effect from chance: give "
            "more batches, or a larger max_rows."
        )
    return read


def _some(batches: list[dict[str, Any]], chosen: Tensor) -> list[dict[str, Any]]:
    """Batches of some of the rows, given as a boolean mask."""
    parts = zip(batches, chosen.split([find_batch_size(batch) for batch in batches]), strict=True)
    return [take_rows(batch, of_batch.nonzero()[:, 0]) for batch, of_batch in parts if of_batch.any()]
