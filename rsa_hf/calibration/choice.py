"""Which heads get which REM, and how much of it: scores with standard errors over rows, and a bound on chance.

The score of a head and a REM is the derivative of the loss with respect to the share a = g · mass of the REM, where
the mass is Σ |f(τ)|: what a gate opens for REMs of all rates alike. By gradients.py it is

    ∂loss/∂a = Σ_τ f(τ) c(τ) / mass − d / mass.

The first term is the recurrence, the second the (1 − g) of eq. 4, which damps attention.

**Whether.** Hundreds of heads and dozens of REMs are looked at, so some scores are large by chance. What chance alone
does is seen by flipping the signs of rows: if a head's score has no tendency, its rows are as likely as their
negatives. All heads keep their dependence on each other, and each keeps the best of its REMs. Heads are chosen up to
the threshold at which the flips find, on average, no more than the allowed share of what is found (the false discovery
rate). Only the first term counts here: a head that is better damped wants no recurrence.

**Which.** Of the REMs beyond the threshold, a head gets the one whose whole derivative is the surest.

**How much.** The second derivative of a mean of log-likelihoods is about their Fisher information: the variance of one
term's derivative, so that of a row times its number of terms. A Newton step is then −derivative / second derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rsa_hf.calibration.dictionary import unit_weights
from rsa_hf.calibration.gradients import Gradients

__all__ = ["Choice", "Scores", "choose", "score"]

FLIPS = 50


@dataclass(frozen=True)
class Scores:
    """Derivatives of the loss with respect to the share of every REM, for every head of one model.

    Attributes:
        recurrence: the first term, for each layer [N, H, P], float64; the mean over the N rows is the derivative of
            the mean loss.
        whole: both terms, in the same form.
        masses: the mass of every REM in each layer, [P] each.
        terms: number of terms in the loss of a row.
    """

    recurrence: list[Tensor]
    whole: list[Tensor]
    masses: list[Tensor]
    terms: float

    @cached_property
    def means(self) -> list[Tensor]:
        """The derivatives, for each layer [H, P]."""
        return [rows.mean(0) for rows in self.whole]

    def of(self, rows: Tensor) -> Scores:
        """The scores of some rows, by their indices or truth values."""
        recurrence, whole = ([layer[rows] for layer in each] for each in (self.recurrence, self.whole))
        return Scores(recurrence, whole, self.masses, self.terms)


@dataclass(frozen=True)
class Choice:
    """A head that is chosen.

    Attributes:
        layer: index of its layer.
        head: index of the head in the layer.
        rem: place of its REM in the dictionary.
        certainty: by how many standard errors the recurrence's derivative is below zero.
        curvature: about the second derivative of the loss with respect to the share.
    """

    layer: int
    head: int
    rem: int
    certainty: float
    curvature: float


def score(gradients: Gradients, directions: list[bool]) -> Scores:
    """The scores of all heads.

    Args:
        gradients: of one pass.
        directions: for each layer whether its REMs are masked. Unmasked ones have twice the mass.
    """
    recurrence, whole, masses = [], [], []
    for by_lag, by_attention, causal in zip(gradients.lags, gradients.attention, directions, strict=True):
        weights, mass = unit_weights(by_lag.shape[-1])
        sides = 1 if causal else 2
        of_lags = by_lag.double().cpu() @ weights.T / sides
        damping = by_attention.double().cpu()[..., None] / (sides * mass)
        recurrence.append(of_lags)
        whole.append(torch.where(mass > 0, of_lags - damping, 0))
        masses.append(sides * mass)
    return Scores(recurrence, whole, masses, gradients.terms)


def in_errors(of_rows: list[Tensor]) -> list[Tensor]:
    """Means over rows [N, …] in standard errors.

    Standard errors over few rows are themselves uncertain. So each variance is averaged with the median variance of
    all heads for the REM, as in a moderated t statistic (Smyth, 2004).
    """
    variances = [rows.var(0) / len(rows) for rows in of_rows]
    typical = torch.cat(variances).median(0).values
    errors = [((variance + typical) / 2).sqrt() for variance in variances]
    return [torch.where(error > 0, rows.mean(0) / error, 0) for rows, error in zip(of_rows, errors, strict=True)]


def choose(scores: Scores, false_discoveries: float, generator: torch.Generator) -> list[Choice]:
    """The heads whose loss recurrence would lower, the surest first.

    Args:
        scores: of all heads.
        false_discoveries: the share of the chosen heads that may be there by chance.
        generator: draws the flips.
    """
    found = in_errors(scores.recurrence)
    best = torch.cat([z.amin(-1) for z in found])
    rows = len(scores.recurrence[0])
    flips = torch.randint(0, 2, (FLIPS, rows), generator=generator, device="cpu").double() * 2 - 1
    by_chance = []
    for signs in flips:
        flipped = in_errors([layer * signs[:, None, None] for layer in scores.recurrence])
        by_chance += [z.amin(-1) for z in flipped]
    order = best.argsort()
    # How many heads the flips have at or below the score of each head, on average.
    expected = torch.searchsorted(torch.cat(by_chance).sort().values, best[order], right=True) / FLIPS
    allowed = expected <= false_discoveries * torch.arange(1, len(order) + 1, device="cpu")
    count = int(allowed.nonzero().max()) + 1 if bool(allowed.any()) else 0
    if count == 0:
        return []
    threshold, whole = float(best[order[count - 1]]), in_errors(scores.whole)
    places = [(layer, head) for layer, z in enumerate(found) for head in range(len(z))]
    chosen = []
    for layer, head in (places[i] for i in order[:count].tolist()):
        rem = int(torch.where(found[layer][head] <= threshold, whole[layer][head], torch.inf).argmin())
        derivative = scores.whole[layer][:, head, rem]
        curvature = scores.terms * float(derivative.var())
        # A head may be harmed by what its gate damps more than it gains.
        if float(derivative.mean()) < 0 < curvature:
            chosen.append(Choice(layer, head, rem, -float(found[layer][head, rem]), curvature))
    return chosen
