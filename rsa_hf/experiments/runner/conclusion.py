"""The verdict on a claim, and the rule that derives it from intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rsa_hf.experiments.runner.summary import Row

__all__ = ["Conclusion", "Verdict", "judge", "undecided", "weakest"]

Verdict = Literal["confirmed", "not confirmed", "not measurable at this size"]


@dataclass(frozen=True)
class Conclusion:
    """What the rows say about the claim.

    Attributes:
        verdict: "confirmed", "not confirmed" or "not measurable at this size".
        sentence: the result in one sentence.
        findings: the comparisons behind it.
    """

    verdict: Verdict
    sentence: str
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict}: {self.sentence}", *(f"  {each}" for each in self.findings)])


def judge(comparisons: Sequence[Row], even: float) -> Verdict:
    """The verdict on comparisons in which less is better.

    Confirmed if every interval lies below `even`; not confirmed if an interval lies at or above it; not measurable
    otherwise, where chance may have decided. A single seed has no interval: it cannot confirm a claim, but it can
    fail it. The same holds for an infinite mean, of a run with RSA that diverged.

    Args:
        comparisons: differences to the plain model, or ratios.
        even: their value where RSA changes nothing.

    Raises:
        ValueError: there are no comparisons.
    """
    if not comparisons:
        raise ValueError("there is no comparison to judge: both of its variants have to be run.")
    if any((row.mean if math.isnan(row.low) else row.low) >= even for row in comparisons):
        return "not confirmed"
    return "confirmed" if all(row.high < even for row in comparisons) else "not measurable at this size"


def weakest(*verdicts: Verdict) -> Verdict:
    """The verdict on a claim whose parts must all hold."""
    order: tuple[Verdict, ...] = ("not confirmed", "not measurable at this size", "confirmed")
    return min(verdicts, key=order.index)


def undecided(comparisons: Sequence[Row], even: float) -> str:
    """A sentence on the comparisons that chance may have decided; empty if there are none."""
    # An infinite mean has no interval either, but it decides against the claim.
    count = sum(
        not math.isinf(row.mean) and (math.isnan(row.low) or row.low < even <= row.high) for row in comparisons
    )
    if not count:
        return ""
    return (
        f" {count} of {len(comparisons)} comparisons are undecided (the interval contains {even:g}, or there is only "
        "one seed): they need more seeds or longer training."
    )
