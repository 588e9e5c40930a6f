"""Time series as in the Informer's experiments: standardised, split in three parts, with time features.

Parts are in months of 30 days: 12, 4 and 4 of ETT (Zhou et al., 2021, section 5), whose end is not used, and 28, 10
and 10 of the weather.
"""

from __future__ import annotations

import csv
import functools
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import torch
from torch import Tensor

from rsa_hf.experiments.runner.data import data_file

__all__ = ["PARTS", "Series", "load_series", "windows"]

PARTS = ("train", "validation", "test")
MONTHS = {"ETTh1": (12, 4, 4), "ETTh2": (12, 4, 4), "ETTm1": (12, 4, 4), "WTH": (28, 10, 10)}
SEASONAL = "seasonal-"
SEASONAL_LENGTH, SEASONAL_VARIABLES, KEPT = 1500, 2, 0.9


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series of T steps.

    Attributes:
        values: standardised on the training part, [T, N].
        times: hour of the day, day of the week, of the month and of the year, preceded by the minute where steps are
            shorter than an hour, each from −½ to ½; [T, F].
        ends: where each part ends.
    """

    values: Tensor
    times: Tensor
    ends: tuple[int, int, int]

    def part(self, part: str) -> range:
        """The steps of a part, one of `PARTS`."""
        i = PARTS.index(part)
        return range(self.ends[i - 1] if i else 0, self.ends[i])

    def origins(self, part: str, context: int, horizon: int, stride: int = 1) -> Tensor:
        """First steps of all horizons within a part, [n]; their context may lie in the part before."""
        steps = self.part(part)
        return torch.arange(max(steps.start, context), steps.stop - horizon + 1, stride)


@functools.lru_cache(maxsize=4)
def load_series(name: str) -> Series:
    """Load a series.

    Args:
        name: `ETTh1`, `ETTh2`, `ETTm1` or `WTH`, from the data folder; or for instance `seasonal-8`, generated:
            y_t = 0.9 y_{t−8} + noise, which is best predicted from 8 steps ago.

    Raises:
        FileNotFoundError: the data is missing.
    """
    if name.startswith(SEASONAL):
        return _seasonal(int(name.removeprefix(SEASONAL)))
    with lzma.open(data_file(f"ett/{name}.csv.xz"), "rt", encoding="utf-8") as file:
        rows = iter(csv.reader(file))
        next(rows)
        dates, values = list[datetime](), list[list[float]]()
        for date, *entries in rows:
            dates.append(_date(date))
            values.append([float(entry) for entry in entries])
    month = timedelta(days=30) // (dates[1] - dates[0])
    first, second, third = MONTHS[name]
    ends = (month * first, month * (first + second), month * (first + second + third))
    return _standardised(torch.tensor(values, dtype=torch.float64), dates, ends)


def _date(text: str) -> datetime:
    return datetime.strptime(text, "%m/%d/%Y %H:%M") if "/" in text else datetime.fromisoformat(text)


def _seasonal(period: int) -> Series:
    generator = torch.Generator().manual_seed(period)
    total = SEASONAL_LENGTH + period
    values = torch.randn(total, SEASONAL_VARIABLES, generator=generator, dtype=torch.float64)
    for t in range(period, total):
        values[t] = KEPT * values[t - period] + (1 - KEPT**2) ** 0.5 * values[t]
    dates = [datetime(2000, 1, 1) + timedelta(hours=t) for t in range(SEASONAL_LENGTH)]
    ends = (SEASONAL_LENGTH * 6 // 10, SEASONAL_LENGTH * 8 // 10, SEASONAL_LENGTH)
    return _standardised(values[period:], dates, ends)


def _standardised(values: Tensor, dates: list[datetime], ends: tuple[int, int, int]) -> Series:
    train = values[: ends[0]]
    values = (values - train.mean(0)) / train.std(0, correction=0)
    minutes = dates[1] - dates[0] < timedelta(hours=1)
    times = torch.tensor([list(_features(date, minutes)) for date in dates])
    return Series(values.float(), times, ends)


def _features(date: datetime, minutes: bool) -> Iterator[float]:
    if minutes:
        yield date.minute / 59 - 0.5
    yield date.hour / 23 - 0.5
    yield date.weekday() / 6 - 0.5
    yield (date.day - 1) / 30 - 0.5
    yield (date.timetuple().tm_yday - 1) / 365 - 0.5


def windows(series: Series, origins: Tensor, context: int, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut windows: known values, target values, and the time features of both.

    Args:
        series: of N variables and F features of the time.
        origins: first step to predict of each window, [B].
        context: known steps before it, C.
        horizon: steps to predict, H.

    Returns:
        [B, C, N], [B, H, N] and [B, C + H, F].
    """
    steps = origins[:, None] + torch.arange(-context, horizon)
    values = series.values[steps]
    return values[:, :context], values[:, context:], series.times[steps]
