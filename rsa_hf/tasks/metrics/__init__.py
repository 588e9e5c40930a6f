"""`evaluate` metric modules that ship with the package: no Hub needed."""

from __future__ import annotations

from pathlib import Path

import evaluate

__all__ = ["load_metric"]


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of the package's metrics.

    Args:
        name: The metric, as the folders beside this file are called: "defect_detection" or
            "language_modeling".

    Returns:
        The module. It keeps its predictions in memory, so that processes which score at the same time do not
        wait for each other's files.

    Raises:
        ValueError: If there is no metric of that name.
    """
    folder = Path(__file__).parent / name
    if not (folder / f"{name}.py").is_file():
        known = sorted(path.stem for path in Path(__file__).parent.glob("*/*.py") if path.stem == path.parent.name)
        raise ValueError(f"there is no metric {name!r}; choose one of {', '.join(known)}")
    return evaluate.load(str(folder), keep_in_memory=True)
