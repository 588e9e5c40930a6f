"""Several axes in one picture, in the style of rsa_hf's own."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rsa_hf.plots import COLOURS, saved_figure

__all__ = ["COLOURS", "panels"]


@contextmanager
def panels(
    path: str | Path, count: int, columns: int = 3, width: float = 3.4, height: float = 3.0
) -> Iterator[list[Any]]:
    """Yield axes, some of them side by side; save the figure when the block ends without an error. Sizes in inches."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    with saved_figure(path, max(5.0, width * columns), height * rows + 0.2) as figure:
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in grid[count:]:
            axes.set_axis_off()
        yield grid[:count]
