"""Learning rates searched with the first seed alone: the others run at the rate that was best for their arm with it.

Every arm tries the same rates. With r rates and n seeds that is r + n − 1 runs an arm in place of r · n, and so, for
the same time, more seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rsa_hf.reproduce.cells import Cell, Result, Setting

__all__ = ["arm_of", "cells_to_run", "number_of_runs"]

RATE, SEED = "learning_rate", "seed"


def arm_of(cell: Cell) -> tuple[tuple[str, Setting], ...]:
    """The settings of a cell but its learning rate and seed."""
    return tuple((name, value) for name, value in cell.items() if name not in (RATE, SEED))


def cells_to_run(
    cells: Mapping[str, Cell], kept: Mapping[str, Result], score: Callable[[Result], float]
) -> dict[str, Cell]:
    """The cells of the first seed, and where all rates of an arm have run with it, the others' at the best one.

    Args:
        cells: all of them, by key, with a `learning_rate` and a `seed`.
        kept: what has run.
        score: the rate with the least of it is the best.
    """
    first = _first_seed(cells)
    searched: dict[tuple[tuple[str, Setting], ...], dict[str, Setting]] = {}
    for key, cell in cells.items():
        if cell[SEED] == first:
            searched.setdefault(arm_of(cell), {})[key] = cell[RATE]
    best = {
        arm: rates[min(rates, key=lambda key: score(kept[key]))]
        for arm, rates in searched.items()
        if rates.keys() <= kept.keys()
    }
    return {key: cell for key, cell in cells.items() if cell[SEED] == first or cell[RATE] == best.get(arm_of(cell))}


def number_of_runs(cells: Mapping[str, Cell]) -> int:
    """How many cells there will be to run in the end."""
    first = _first_seed(cells)
    others = {(arm_of(cell), cell[SEED]) for cell in cells.values() if cell[SEED] != first}
    return sum(cell[SEED] == first for cell in cells.values()) + len(others)


def _first_seed(cells: Mapping[str, Cell]) -> int:
    return min(int(cell[SEED]) for cell in cells.values())
