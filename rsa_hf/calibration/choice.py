"""Which heads get which REM, and how much of it: scores with standard errors over rows, and a bound on chance.

The score of a head and a REM is the derivative of the loss with respect to the share a = g · mass of the REM, where
the mass is Σ |f(τ)|. A share is what a gate opens, comparable between REMs of all rates. By gradients.py, the score is

    ∂loss/∂a = Σ_τ f(τ) c(τ) / mass − d / mass.

The first term is the recurrence, the second the (1 − g) of eq. 4, which damps attention. The larger the mass, the less
a share damps. In the paper, a short memory has a small mass; with free lags, it may have any mass.

**Whether.** Some of many scores are large by chance. Flipping the signs of rows shows what chance alone does: if a
head's score has no tendency, its rows are as likely as their negatives. Flips keep the dependence between heads, and
each head keeps the best of its REMs. Heads are chosen up to the threshold at which the flips find, on average, no more
than the allowed share of what is found (the false discovery rate). Only the first term counts here: a head that is
better off damped wants no recurrence.

**Which.** Of the REMs beyond the threshold, a head gets the one whose whole derivative is the surest.

**How much.** The second derivative of a mean of log-likelihoods is about their Fisher information: the variance of one
term's derivative, so a row's variance times its number of terms. A Newton step is −derivative / second derivative.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rsa_hf.calibration.gradients import Gradients
from rsa_hf.config import HeadConfig
from rsa_hf.rem import lag_weights

FLIPS = 50
FIRST_STEP = 0.35  # part of a Newton step that a head takes when it is chosen
LARGEST_GROWTH = 2.0  # of a share in one step, relative to the share
WIDEST_GATE = 0.9


def fixed_rem(kind: str, decay: float, theta: float = 0.0, dilation: int = 1) -> HeadConfig:
    """A REM with fixed rates, as a head whose layer, index and gate are not chosen yet."""
    return HeadConfig(0, 0, kind, decay, 0.0, theta, dilation)


def short_rem(decay: float, mass: float) -> HeadConfig:
    """A regular REM of `NUM_FREE_LAGS` free weights, in proportion to the powers of `decay`, with `mass` in total."""
    powers = [decay**k for k in range(1, NUM_FREE_LAGS + 1)]
    scale = mass / sum(map(abs, powers))
    return replace(fixed_rem("regular", 0.0), free_lags=tuple(scale * power for power in powers))


NUM_FREE_LAGS = 3
_SHORT, _LONG = (0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8, 0.9)
_MASSES = (0.1, 0.3, 1.0, 4.0)  # of the short ones
_ANGLES = (math.pi / 8, math.pi / 4, math.pi / 2, 3 * math.pi / 4)

# The REMs that are tried on every head: regular ones of both signs, short ones with several masses; cyclical pairs;
# and regular ones that see every d-th position.
DICTIONARY = (
    *(short_rem(sign * size, mass) for sign, size, mass in itertools.product((1, -1), _SHORT, _MASSES)),
    *(fixed_rem("regular", sign * size) for sign in (1, -1) for size in _LONG),
    *(fixed_rem("regular", size) for size in (0.95, 0.98, 0.99)),
    *(
        fixed_rem(kind, size, angle)
        for size, angle, kind in itertools.product((0.5, 0.7, 0.85, 0.95, 0.98), _ANGLES, ("cos", "sin"))
    ),
    *(fixed_rem("regular", size, dilation=d) for size, d in itertools.product((0.3, 0.6, 0.9), (2, 3, 4, 8))),
)


def unit_weights(length: int) -> tuple[Tensor, Tensor]:
    """f(τ) of every REM at the lags 0 … length − 1, divided by its mass Σ |f(τ)|, [P, length]; and the masses, [P].

    Unscaled, slow REMs could not be compared with fast ones: at λ = 0.99 the weights of a row of P sum to 99. A REM
    that reaches no lag below `length` has mass 0 and weights 0.
    """
    lags = torch.arange(length, device="cpu")
    rates = ((rem.kind, rem.decay, rem.theta, rem.dilation, rem.free_lags) for rem in DICTIONARY)
    weights = torch.stack([lag_weights(*of_rem, lags) for of_rem in rates])
    mass = weights.abs().sum(1)
    return weights / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None], mass


@dataclass(frozen=True)
class Scores:
    """Derivatives of the loss with respect to the share of every REM, for every head of one model.

    Each layer has [N, H, P], float64. Means over the N rows are derivatives of the mean loss.
    """

    recurrence: list[Tensor]  # the first term
    whole: list[Tensor]  # both terms
    masses: list[Tensor]  # the mass of every REM in each layer, [P] each
    terms: float  # number of terms in the loss of a row

    @cached_property
    def means(self) -> list[Tensor]:
        """The derivatives, for each layer [H, P]."""
        return [rows.mean(0) for rows in self.whole]

    def of(self, rows: Tensor) -> "Scores":
        """The scores of some rows, given by their indices or as a boolean mask."""
        recurrence, whole = ([layer[rows] for layer in each] for each in (self.recurrence, self.whole))
        return Scores(recurrence, whole, self.masses, self.terms)


@dataclass
class Choice:
    """A chosen head, and the share a = g · mass of its REM, which moves to where its derivative vanishes."""

    layer: int
    head: int
    rem: int  # index of its REM in the dictionary
    mass: float  # of the REM
    certainty: float  # by how many standard errors the recurrence's derivative is below zero
    derivative: float  # of the loss with respect to the share, without any heads
    curvature: float  # approximately the second derivative

    def __post_init__(self) -> None:
        # All heads move at once, and change each other's derivatives: a whole step would be too far.
        self.share = self._possible(-FIRST_STEP * self.derivative / self.curvature)

    def _possible(self, share: float) -> float:
        return min(max(share, 0.0), WIDEST_GATE * self.mass)

    def move(self, scores: Scores) -> None:
        """Take a secant step from the derivative without any heads and the one with all of them."""
        derivative = float(scores.means[self.layer][self.head, self.rem])
        rise = (derivative - self.derivative) / self.share if self.share else 0.0
        step = -derivative / max(rise, self.curvature)
        self.share = self._possible(self.share + min(max(step, -self.share), LARGEST_GROWTH * self.share))

    def config(self) -> HeadConfig:
        """The head as a config names it."""
        return replace(DICTIONARY[self.rem], layer=self.layer, head=self.head, gate=self.share / self.mass)


def score(gradients: Gradients, directions: list[bool]) -> Scores:
    """The scores of all heads. `directions`: whether a layer's REMs are masked; if not, they have twice the mass."""
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
    """Means over rows [N, …] in units of their standard errors.

    Standard errors over few rows are themselves uncertain. So each variance is averaged with the median variance of
    all heads for the REM, as in a moderated t statistic (Smyth, 2004).
    """
    variances = [rows.var(0) / len(rows) for rows in of_rows]
    typical = torch.cat(variances).median(0).values
    errors = [((variance + typical) / 2).sqrt() for variance in variances]
    return [torch.where(error > 0, rows.mean(0) / error, 0) for rows, error in zip(of_rows, errors, strict=True)]


def choose(scores: Scores, false_discoveries: float, generator: torch.Generator) -> list[Choice]:
    """The heads on which recurrence would lower the loss, the surest first.

    `false_discoveries` is the share of them that may be chosen by chance. The generator draws the flips.
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
    # How many heads score at or below each head under the flips, on average.
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
        of_rows, mass = scores.whole[layer][:, head, rem], float(scores.masses[layer][rem])
        derivative, curvature = float(of_rows.mean()), scores.terms * float(of_rows.var())
        # A head may lose more from what its gate damps than it gains.
        if derivative < 0 < curvature:
            certainty = -float(found[layer][head, rem])
            chosen.append(Choice(layer, head, rem, mass, certainty, derivative, curvature))
    return chosen
