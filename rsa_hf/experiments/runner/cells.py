"""A cell is one run of an experiment; a result is a cell that has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Cell", "Result", "Setting", "Values"]

Setting = str | int | float | bool

# The settings of one run: an arm, a seed, sizes; values that JSON knows. "seed" is what `summarise` averages over.
Cell = Mapping[str, Setting]
# What was measured: numbers by name, and lists of them for the figure.
Values = dict[str, float | list[float]]


@dataclass(frozen=True)
class Result:
    """A cell that has run.

    Attributes:
        cell: its settings.
        values: what `run_cell` returned.
        seconds: wall time.
        machine: what it ran on, in words.
        versions: of the packages that its figures depend on.
    """

    cell: Cell
    values: Values
    seconds: float
    machine: str
    versions: Mapping[str, str]

    def number(self, name: str) -> float:
        """A value that is one number.

        Raises:
            KeyError: there is no such value.
            TypeError: it is a list.
        """
        value = self.values[name]
        if isinstance(value, list):
            raise TypeError(f"{name} is a list of {len(value)} numbers.")
        return value
