"""Search for the head plan, k1 … k6 and d (paper, section 3), by optuna and `Trainer.hyperparameter_search`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from transformers import Trainer

from rsa_hf.config import COUNTS, RSAConfig

__all__ = ["FoundPlan", "TrialLike", "head_plan_space", "search_head_plans"]


class TrialLike(Protocol):
    """The methods of an `optuna.Trial` that are used."""

    def suggest_int(self, name: str, low: int, high: int, /) -> int:
        """An integer from low to high, both included."""

    def suggest_categorical(self, name: str, choices: Sequence[int], /) -> int:
        """One of the choices."""


def head_plan_space(
    trial: TrialLike, num_heads: int, dilations: Sequence[int] = (2, 4, 8), base: RSAConfig | None = None
) -> RSAConfig:
    """Draw a head plan with k2 = k3 and k5 = k6 in which at least one head is an RSA head.

    Every such plan can be drawn: each count is drawn from the heads that the counts before it leave. Parameters have
    the names of the fields of `RSAConfig`, so that the best trial is a plan:

        def model_init(trial):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # from_config keeps the plan in it
            return model if trial is None else patch_model(model, head_plan_space(trial, config.num_attention_heads))

        trainer = Trainer(model_init=model_init, args=args, train_dataset=train, eval_dataset=validation)
        best = trainer.hyperparameter_search(lambda trial: {}, n_trials=30, direction="minimize", backend="optuna")
        plan = RSAConfig(**best.hyperparameters)

    Args:
        trial: an `optuna.Trial`.
        num_heads: H, the number of heads of a layer, or of the layer with the fewest.
        dilations: the factors d to choose from, one for all dilated heads; empty: no dilated heads. Autocorrelation
            and recurrence plots show which d fits a text.
        base: all other settings; default: those of `RSAConfig()`.

    Returns:
        A plan that is the same in every layer.
    """
    k4, k5, left = 0, 0, num_heads
    k2 = trial.suggest_int("num_cyclical_pairs", 0, left // 2)
    left -= 2 * k2
    if dilations:
        k5 = trial.suggest_int("num_dilated_cyclical_pairs", 0, left // 2)
        left -= 2 * k5
    k1 = trial.suggest_int("num_regular", 0 if dilations or k2 else 1, left)
    if dilations:
        k4 = trial.suggest_int("num_dilated_regular", 0 if k1 or k2 or k5 else 1, left - k1)
    return replace(
        base or RSAConfig(),
        num_regular=k1,
        num_cyclical_pairs=k2,
        num_dilated_regular=k4,
        num_dilated_cyclical_pairs=k5,
        dilation=trial.suggest_categorical("dilation", tuple(dilations)) if k4 or k5 else None,
    )


@dataclass(frozen=True)
class FoundPlan:
    """A plan of a trial.

    Attributes:
        number: index of the trial, counted from 0.
        score: score of the model; None if the trial was pruned.
        plan: the plan.
    """

    number: int
    score: float | None
    plan: RSAConfig


def search_head_plans(
    trainer: Trainer,
    metric: str,
    trials: int,
    storage: Path,
    *,
    greater_is_better: bool = False,
    settings: Mapping[str, Any] | None = None,
    base: RSAConfig | None = None,
    first: RSAConfig | None = None,
) -> list[FoundPlan]:
    """Try head plans, or continue an interrupted search.

    Args:
        trainer: its `model_init` takes a trial and patches the model with `head_plan_space`. If it evaluates during
            training (`eval_strategy`), trials below the median are pruned. With `disable_tqdm`, optuna is quiet too.
        metric: name of the score in the metrics of `trainer.evaluate`.
        trials: total number of trials, with those in `storage`.
        storage: file that keeps each finished trial.
        greater_is_better: whether a higher score is better.
        settings: all settings that the score depends on, for JSON. A search is only continued under the same.
        base: the `base` of `head_plan_space`.
        first: a plan to try first; `head_plan_space` must be able to draw it.

    Returns:
        All plans, the best first, pruned ones last.

    Raises:
        ImportError: optuna is not installed.
        ValueError: `storage` is not the file of this search.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState
    except ImportError as error:
        raise ImportError("the search for head plans needs optuna: pip install 'rsa_hf[search]'") from error
    _require_journal(storage)
    storage.parent.mkdir(parents=True, exist_ok=True)
    direction = "maximize" if greater_is_better else "minimize"
    verbosity = optuna.logging.get_verbosity()
    if trainer.args.disable_tqdm:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise a line for each study and trial
    study_in = {
        "storage": JournalStorage(JournalFileBackend(str(storage))),
        "study_name": "head-plans",
        "direction": direction,
        "load_if_exists": True,
    }
    study = optuna.create_study(**study_in)
    _require_same(study, {} if settings is None else json.loads(json.dumps(settings)), storage)

    def ended() -> list[Any]:
        return list(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))

    done = len(ended())
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    if first is not None and not done and not waiting:
        study.enqueue_trial({**{name: getattr(first, name) or 0 for name in COUNTS}, "dilation": first.dilation})
    try:
        if done < trials:
            trainer.hyperparameter_search(
                # `model_init` draws the plan; the training arguments stay the same.
                lambda trial: {},
                lambda metrics: metrics[metric],
                n_trials=trials - done,
                backend="optuna",
                # With the same seed a continued search would draw its first plans again.
                sampler=optuna.samplers.TPESampler(seed=trainer.args.seed + done),
                **study_in,
            )
    finally:
        optuna.logging.set_verbosity(verbosity)
    found = [
        FoundPlan(
            trial.number,
            trial.value if trial.state == TrialState.COMPLETE else None,
            replace(base or RSAConfig(), **trial.params),
        )
        for trial in ended()
    ]
    sign = -1 if greater_is_better else 1
    return sorted(found, key=lambda each: (each.score is None, sign * (each.score or 0.0)))


def _require_journal(storage: Path) -> None:
    """Raise a ValueError if a file is not a journal of optuna, which would append to it before it notices."""
    try:
        for line in storage.read_text(encoding="utf-8").splitlines() if storage.exists() else ():
            json.loads(line)["op_code"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{storage} is not the file of a search, or is damaged. Name another one.") from error


def _require_same(study: Any, settings: dict[str, Any], storage: Path) -> None:
    known = study.user_attrs.get("settings")
    if known is None:
        study.set_user_attr("settings", settings)
    elif known != settings:
        names = sorted(key for key in known.keys() | settings.keys() if known.get(key) != settings.get(key))
        raise ValueError(
            f"{storage} has trials under other settings ({', '.join(names)}), whose scores are not comparable. "
            "Restore them, or name another file."
        )
