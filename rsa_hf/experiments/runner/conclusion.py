"""What rows say about a claim: the verdict, and the rule by which intervals make one."""

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
        verdict: "confirmed" or "not confirmed", or "not measurable at this size".
        sentence: one honest sentence, whose figures are made from the rows.
        findings: what it sums up, comparison by comparison.
    """

    verdict: Verdict
    sentence: str
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict}: {self.sentence}", *(f"  {each}" for each in self.findings)])


def judge(comparisons: Sequence[Row], even: float) -> Verdict:
    """The verdict of comparisons in which less is better.

    Confirmed if every interval lies below `even`; not confirmed if one does not reach below it; and not measurable
    where chance may have decided. A single seed confirms nothing: it has no interval, and stands for both ends of one
    only where it is against the claim. So does an infinite mean, of a run with RSA that diverged.

    Args:
        comparisons: what RSA makes of the plain model's score: differences, or ratios.
        even: what they are where RSA changes nothing.

    Raises:
        ValueError: there is nothing to judge.
    """
    if not comparisons:
        raise ValueError("there is no comparison to judge: both arms of one have to be run.")
    if any((row.mean if math.isnan(row.low) else row.low) >= even for row in comparisons):
        return "not confirmed"
    return "confirmed" if all(row.high < even for row in comparisons) else "not measurable at this size"


def weakest(*verdicts: Verdict) -> Verdict:
    """The verdict of a claim all of whose parts have to hold."""
    order: tuple[Verdict, ...] = ("not confirmed", "not measurable at this size", "confirmed")
    return min(verdicts, key=order.index)


def undecided(comparisons: Sequence[Row], even: float) -> str:
    """A sentence that says in how many comparisons chance may have decided, and what would help; or nothing."""
    # An infinite mean has no interval either, but is against the claim.
    open_ones = sum(
        not math.isinf(row.mean) and (math.isnan(row.low) or row.low < even <= row.high) for row in comparisons
    )
    if not open_ones:
        return ""
    return (
        f" In {open_ones} of {len(comparisons)} the interval holds {even:g}, or there is one seed: more seeds or a "
        "longer training are needed to tell."
    )
