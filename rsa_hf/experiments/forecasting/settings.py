"""What is run at each size, and what was published.

Lengths and layers of the full size are those of the scripts that came with the Informer (multivariate; Zhou et al.,
2021), with its widths, learning rate, epochs and batches.
"""

from __future__ import annotations

from rsa_hf.experiments.forecasting.arms import ARMS, FAMILIES
from rsa_hf.experiments.runner.cells import Cell
from rsa_hf.experiments.runner.experiment import Size

__all__ = ["PUBLISHED", "cells"]

# Mean squared errors without and with RSA (Huang et al., 2023, section 4.1), by series, horizon and family.
PUBLISHED: dict[tuple[object, ...], dict[str, float]] = {
    ("ETTh1", 24, "informer"): {"plain": 0.762, "rsa": 0.414},
    # "Patched Transformer-XL"; here it reads single steps.
    ("ETTh1", 24, "transformer-xl"): {"plain": 0.514, "rsa": 0.466},
    ("ETTh1", 48, "informer"): {"plain": 1.006, "rsa": 0.467},
    ("ETTh2", 24, "informer"): {"plain": 2.558, "rsa": 1.264},
    ("ETTm1", 288, "informer"): {"plain": 1.371, "rsa": 0.835},
    ("WTH", 336, "informer"): {"plain": 1.096, "rsa": 0.846},
}
# Horizon, context, label, encoder and decoder layers.
ETTH1 = ((24, 48, 48, 2, 1), (48, 96, 48, 2, 1), (168, 168, 168, 2, 1), (336, 168, 168, 2, 1), (720, 336, 336, 2, 1))
ETTH2 = ((24, 48, 48, 2, 1), (48, 96, 96, 2, 1), (168, 336, 336, 3, 2), (336, 336, 168, 3, 2), (720, 720, 336, 3, 2))
ETTM1 = ((24, 672, 96, 2, 1), (48, 96, 48, 2, 1), (96, 384, 384, 2, 1), (288, 672, 288, 2, 1), (672, 672, 384, 2, 1))
WTH = ((24, 168, 168, 3, 2), (48, 96, 96, 2, 1), (168, 336, 168, 3, 2), (336, 720, 168, 3, 2), (720, 720, 336, 3, 2))
Lengths = tuple[int, int, int, int, int]
LENGTHS: dict[Size, dict[str, tuple[Lengths, ...]]] = {
    "toy": {"seasonal-8": ((8, 16, 16, 1, 1),)},
    "quick": {"ETTh1": ETTH1[:1]},
    "full": {"ETTh1": ETTH1, "ETTh2": ETTH2, "ETTm1": ETTM1, "WTH": WTH},
}
# A day, which `rsa_hf.experiments.theory.dilation` suggests for each of them, and is published for ETTh1.
DILATION = {"seasonal-8": 8, "ETTh1": 24, "ETTh2": 24, "ETTm1": 96, "WTH": 24}
# Windows are scored `stride` steps apart, in no step with the day.
TRAINING: dict[Size, dict[str, int]] = {
    "toy": {"width": 16, "batch": 16, "steps": 40, "epochs": 2, "stride": 7},
    "quick": {"width": 32, "batch": 8, "steps": 30, "epochs": 4, "stride": 13},
    "full": {"width": 512, "batch": 32, "steps": 266, "epochs": 6, "stride": 1},
}
# Quick and toy runs have one learning rate for all arms; full ones have the same search for each.
RATES: dict[Size, tuple[float, ...]] = {"toy": (1e-2,), "quick": (4e-3,), "full": (1e-4, 3e-4)}
CHOSEN: dict[Size, tuple[str, ...]] = {
    "toy": ("informer",),
    "quick": ("informer", "log-sparse", "transformer-xl"),
    "full": FAMILIES,
}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Series × horizons × families × arms × learning rates × seeds; the seeds outermost, whole comparisons first."""
    return [
        {
            "series": series,
            "horizon": horizon,
            "context": context,
            "label": label,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
            "dilation": DILATION[series],
            **TRAINING[size],
            "family": family,
            "arm": arm,
            "learning_rate": rate,
            "seed": seed,
        }
        for series, lengths in LENGTHS[size].items()
        for horizon, context, label, encoder_layers, decoder_layers in lengths
        for seed in range(seeds)
        for family in CHOSEN[size]
        for arm in ARMS
        for rate in RATES[size]
    ]
