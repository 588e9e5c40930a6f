"""Which models are compared on which tasks, how large, and how long they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rsa_hf.experiments.arms import DAMPED
from rsa_hf.experiments.fine_tune.arms import ARMS, DEFAULT, FASTEST, PLAIN
from rsa_hf.experiments.runner.experiment import Size

__all__ = ["COMPARISONS", "DEVIGN", "Comparison"]

ALL = 10**9  # more than any data has
DEVIGN = "devign"


@dataclass(frozen=True)
class Comparison:
    """A pretrained model on a share of a task's data.

    Attributes:
        model: what `load_pretrained` takes.
        task: `devign` or a text.
        share: of the training data.
        steps: of training.
        arms: what is compared.
        rates: learning rates, tried by every arm.
        batch: rows a step.
        length: tokens in a row, at most.
        most: what counts as all of the training data, in functions or bytes.
        scored: functions or bytes of the validation and the test split, each.
        evaluations: how many times it is scored on the way.
        layers: of MiniLM.
        pretraining_steps: of the small Llama.
    """

    model: str
    task: str
    share: float
    steps: int
    arms: Sequence[str]
    rates: Sequence[float]
    batch: int
    length: int
    most: int
    scored: int
    evaluations: int = 4
    layers: int = 0
    pretraining_steps: int = 0


_CLAIM = (PLAIN, DEFAULT, DAMPED)
_PACES = (*_CLAIM, FASTEST)
COMPARISONS: dict[Size, tuple[Comparison, ...]] = {
    "toy": (
        Comparison(
            model="llama-0.03M",
            task="c",
            share=1.0,
            steps=30,
            arms=_CLAIM,
            rates=(1e-2,),
            batch=8,
            length=64,
            most=20_000,
            scored=2_000,
            evaluations=2,
            pretraining_steps=30,
        ),
    ),
    "quick": tuple(
        # All arms at one share, and what the claim is of at the others.
        Comparison(
            model="llama-0.1M",
            task="c",
            share=share,
            steps=60,
            arms=arms,
            rates=(3e-3, 1e-2),
            batch=8,
            length=128,
            most=200_000,
            scored=8_000,
            pretraining_steps=400,
        )
        for share, arms in ((0.01, _CLAIM), (0.1, tuple(ARMS)), (1.0, _CLAIM))
    ),
    # As in quick runs; but where steps are few and the weights' rate is low, RSA parameters hardly move at their usual
    # pace, so at the least share there is a faster one too.
    "full": (
        *(
            Comparison(
                model="minilm",
                task=DEVIGN,
                share=share,
                steps=steps,
                arms=arms,
                rates=(3e-5, 1e-4, 3e-4),
                batch=16,
                length=256,
                most=ALL,
                scored=ALL,
                layers=6,
            )
            for share, steps, arms in ((0.01, 70, _PACES), (0.1, 400, tuple(ARMS)), (1.0, 2700, _CLAIM))
        ),
        *(
            Comparison(
                model="smollm2",
                task=text,
                share=share,
                steps=steps,
                arms=arms,
                rates=(1e-4, 3e-4, 1e-3),
                batch=2,
                length=256,
                most=ALL,
                scored=20_000,
                evaluations=2,
            )
            for text in ("wikitext-2", "c")
            for share, steps, arms in ((0.01, 50, _PACES), (0.1, 500, tuple(ARMS)), (1.0, 5000, _CLAIM))
        ),
    ),
}
