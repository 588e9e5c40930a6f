"""Which heads get which REM: scores with standard errors over rows, and a bound on false discoveries.

The score of a head and a REM is the derivative of the loss with respect to the share a = g · mass of the REM, where
the mass is Σ |f(τ)|: what a gate opens for REMs of all rates alike. By gradients.py it is

    ∂loss/∂a = Σ_τ f(τ) c(τ) / mass − d / mass,

whose second term is the (1 − g) of eq. 4: a REM of small mass needs a wide gate, which damps attention.

Scores of hundreds of heads and dozens of REMs are looked at, so some are large by chance. What chance alone does is
seen by flipping the signs of rows: if a head's score has no tendency, its rows are as likely as their negatives. All
heads keep their dependence on each other, and each keeps the best of its REMs. Heads are chosen up to the threshold at
which the flips find, on average, no more than the allowed share of what is found (the false discovery rate).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rsa_hf.calibration.dictionary import unit_weights
from rsa_hf.calibration.gradients import Gradients

__all__ = ["Scores", "choose", "score"]

FLIPS = 50


@dataclass(frozen=True)
class Scores:
    """Derivatives of the loss with respect to the share of every REM, for every head of one model.

    Attributes:
        of_rows: for each layer [N, H, P], float64; the mean over the N rows is the derivative of the mean loss.
        masses: the mass of every REM in each layer, [P] each.
    """

    of_rows: list[Tensor]
    masses: list[Tensor]

    @cached_property
    def means(self) -> list[Tensor]:
        """The derivatives, for each layer [H, P]."""
        return [rows.mean(0) for rows in self.of_rows]

    @cached_property
    def in_errors(self) -> list[Tensor]:
        """The derivatives in standard errors, for each layer [H, P]."""
        return self.standardised()

    def standardised(self, signs: Tensor | None = None) -> list[Tensor]:
        """The derivatives in standard errors, for each layer [H, P]; with the signs of rows flipped, [N].

        Standard errors over few rows are themselves uncertain. So each variance is averaged with the median variance
        of all heads for the REM, as in a moderated t statistic (Smyth, 2004).
        """
        flipped = [rows if signs is None else rows * signs[:, None, None] for rows in self.of_rows]
        variances = [rows.var(0) / len(rows) for rows in flipped]
        typical = torch.cat(variances).median(0).values
        errors = [((variance + typical) / 2).sqrt() for variance in variances]
        return [torch.where(error > 0, rows.mean(0) / error, 0) for rows, error in zip(flipped, errors, strict=True)]

    def of(self, rows: Tensor) -> Scores:
        """The scores of some rows, by their indices."""
        return Scores([layer[rows] for layer in self.of_rows], self.masses)


def score(gradients: Gradients, directions: list[bool]) -> Scores:
    """The scores of all heads.

    Args:
        gradients: of one pass.
        directions: for each layer whether its REMs are masked. Unmasked ones have twice the mass.
    """
    of_rows, masses = [], []
    for by_lag, by_attention, causal in zip(gradients.lags, gradients.attention, directions, strict=True):
        weights, mass = unit_weights(by_lag.shape[-1])
        sides = 1 if causal else 2
        shares = (by_lag.double().cpu() @ weights.T - by_attention.double().cpu()[..., None] / mass) / sides
        of_rows.append(torch.where(mass > 0, shares, 0))
        masses.append(sides * mass)
    return Scores(of_rows, masses)


def choose(
    scores: Scores, false_discoveries: float, most: int | None, generator: torch.Generator
) -> list[tuple[int, int, int]]:
    """The heads whose loss would fall, each with its best REM, the surest first.

    Args:
        scores: of all heads.
        false_discoveries: the share of the chosen heads that may be there by chance.
        most: the largest number of heads; None: as many as are found.
        generator: draws the flips.

    Returns:
        (layer, head, place of the REM in the dictionary) of each chosen head.
    """
    best = [z.min(-1) for z in scores.in_errors]
    found = torch.cat([lowest.values for lowest in best])
    rows = len(scores.of_rows[0])
    flips = torch.randint(0, 2, (FLIPS, rows), generator=generator) * 2.0 - 1.0
    by_chance = torch.cat([z.min(-1).values for signs in flips for z in scores.standardised(signs.double())])
    order = found.argsort()
    # How many heads the flips have at or below the score of each head, on average.
    expected = torch.searchsorted(by_chance.sort().values, found[order], right=True) / FLIPS
    allowed = expected <= false_discoveries * torch.arange(1, len(order) + 1)
    count = int(allowed.nonzero().max()) + 1 if bool(allowed.any()) else 0
    places = [(layer, head) for layer, lowest in enumerate(best) for head in range(len(lowest.values))]
    chosen = [places[i] for i in order[: count if most is None else min(count, most)].tolist()]
    return [(layer, head, int(best[layer].indices[head])) for layer, head in chosen]
