"""Time series as in the Informer's experiments: standardised, split in three parts, with time features.

Parts are in months of 30 days: 12, 4 and 4 of ETT (Zhou et al., 2021, section 5), whose end is not used, and 28, 10
and 10 of the weather.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.runner.resources import data_file

PARTS = ("train", "validation", "test")
MONTHS = {"ETTh1": (12, 4, 4), "ETTh2": (12, 4, 4), "ETTm1": (12, 4, 4), "WTH": (28, 10, 10)}
SEASONAL = "seasonal-"
SEASONAL_LENGTH, SEASONAL_VARIABLES, KEPT = 1500, 2, 0.9


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series of T steps.

    `times` are the hour of the day, the day of the week, of the month and of the year, preceded by the minute where
    steps are shorter than an hour, each from −½ to ½.
    """

    values: Tensor  # standardised on the training part, [T, N]
    times: Tensor  # [T, F]
    ends: Sequence[int]  # of each part

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
    """Load `ETTh1`, `ETTh2`, `ETTm1` or `WTH` from the data folder, or generate for instance `seasonal-8`.

    That is y_t = 0.9 y_{t−8} + noise, which is best predicted from 8 steps ago.
    """
    if name.startswith(SEASONAL):
        values = _seasonal(int(name.removeprefix(SEASONAL)))
        dates = pd.date_range("2000-01-01", periods=SEASONAL_LENGTH, freq="h")
        ends = [SEASONAL_LENGTH * tenths // 10 for tenths in (6, 8, 10)]
    else:
        table = pd.read_csv(data_file(f"ett/{name}.csv.xz"), index_col=0, float_precision="round_trip")
        values, dates = torch.tensor(table.to_numpy(float)), pd.DatetimeIndex(pd.to_datetime(table.index))
        month = pd.Timedelta(days=30) // (dates[1] - dates[0])
        ends = [month * months for months in itertools.accumulate(MONTHS[name])]
    train = values[: ends[0]]
    values = (values - train.mean(0)) / train.std(0, correction=0)
    times = [dates.hour / 23, dates.dayofweek / 6, (dates.day - 1) / 30, (dates.dayofyear - 1) / 365]
    if dates[1] - dates[0] < pd.Timedelta(hours=1):
        times.insert(0, dates.minute / 59)
    return Series(values.float(), torch.tensor(np.stack(times, axis=1) - 0.5, dtype=torch.float32), ends)


def _seasonal(period: int) -> Tensor:
    generator = torch.Generator().manual_seed(period)
    total = SEASONAL_LENGTH + period
    values = torch.randn(total, SEASONAL_VARIABLES, generator=generator, dtype=torch.float64)
    for t in range(period, total):
        values[t] = KEPT * values[t - period] + (1 - KEPT**2) ** 0.5 * values[t]
    return values[period:]


def windows(series: Series, origins: Tensor, context: int, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows around their first steps to predict, `origins` [B].

    Returns:
        C known values, [B, C, N]; H target values, [B, H, N]; and the time features of both, [B, C + H, F].
    """
    steps = origins[:, None] + torch.arange(-context, horizon)
    values = series.values[steps]
    return values[:, :context], values[:, context:], series.times[steps]
