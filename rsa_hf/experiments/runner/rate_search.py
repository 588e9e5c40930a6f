"""Learning rates searched with the first seed alone: the others run at the rate that was best for their arm with it.

Every arm tries the same rates. With r rates and n seeds that is r + n − 1 runs an arm in place of r · n, and so, for
the same time, more seeds. Without a score to search by, every seed runs every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rsa_hf.experiments.runner.cells import Cell, Result, Setting
from rsa_hf.experiments.runner.summary import rated

__all__ = ["cells_to_run", "number_of_runs", "results_of_all_seeds"]

Arm = tuple[tuple[str, Setting], ...]
Score = Callable[[Result], float]
RATE, SEED = "learning_rate", "seed"


def cells_to_run(cells: Mapping[str, Cell], kept: Mapping[str, Result], score: Score | None) -> dict[str, Cell]:
    """The cells of the first seed, and where all rates of an arm have run with it, the others' at the best one.

    Args:
        cells: all of them, by key, with a `seed`, and with a `learning_rate` where rates are searched.
        kept: what has run.
        score: the rate with the least of it is the best; None: there is no search.

    Returns:
        Those that are known to be needed, whether they have run or not.
    """
    if score is None:
        return dict(cells)
    first = _first_seed(cells)
    searched: dict[Arm, dict[str, Setting]] = {}
    for key, cell in cells.items():
        if cell[SEED] == first:
            searched.setdefault(_arm(cell, score), {})[key] = cell[RATE]
    best = {
        arm: rates[min(rates, key=lambda key: rated(score(kept[key])))]
        for arm, rates in searched.items()
        if rates.keys() <= kept.keys()
    }
    return {
        key: cell for key, cell in cells.items() if cell[SEED] == first or cell[RATE] == best.get(_arm(cell, score))
    }


def number_of_runs(cells: Mapping[str, Cell], score: Score | None) -> int:
    """How many cells there will be to run in the end; arguments as of `cells_to_run`."""
    if score is None:
        return len(cells)
    first = _first_seed(cells)
    others = {(_arm(cell, score), cell[SEED]) for cell in cells.values() if cell[SEED] != first}
    return sum(cell[SEED] == first for cell in cells.values()) + len(others)


def results_of_all_seeds(cells: Mapping[str, Cell], kept: Mapping[str, Result], score: Score | None) -> list[Result]:
    """The results of those arms that have run with every seed; arguments as of `cells_to_run`."""
    needed = cells_to_run(cells, kept, score)
    unfinished = {_arm(cell, score) for key, cell in needed.items() if key not in kept}
    return [kept[key] for key, cell in needed.items() if _arm(cell, score) not in unfinished]


def _arm(cell: Cell, score: Score | None) -> Arm:
    """What runs with every seed: the settings of a cell but the seed, and the rate where it is searched."""
    left_out = (SEED,) if score is None else (RATE, SEED)
    return tuple((name, value) for name, value in cell.items() if name not in left_out)


def _first_seed(cells: Mapping[str, Cell]) -> int:
    return min(int(cell[SEED]) for cell in cells.values())
