"""The variants of a pretrained model, and the models, tasks and amounts of data that they are compared on."""

from __future__ import annotations

from dataclasses import replace

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.runner.experiment import Size
from rsa_hf.experiments.runner.summary import Setting, Settings
from rsa_hf.experiments.variants import NO_RECURRENCE

__all__ = ["DEFAULT", "DEVIGN", "FULL_MODELS", "GATES", "MULTIPLES", "PLAIN", "VARIANTS", "make_grid"]

PLAIN = "plain"
GATES = (-6.0, -3.0, 0.0, 1.0)
# Learning rates of RSA parameters under Adam, as multiples of the weights' learning rate.
MULTIPLES = (1.0, 20.0, 100.0)


def _name(config: RSAConfig) -> str:
    """Name of a variant, without a comma because `--only` splits at commas."""
    assert not isinstance(config.gate_init, tuple)
    spread = " theta spread" if isinstance(config.theta_init, tuple) else ""
    return f"mu {config.gate_init:+g} x{config.parameter_scale:g}{spread}"


DEFAULT = _name(RSAConfig())
FASTEST = _name(RSAConfig(parameter_scale=max(MULTIPLES)))
_SCRATCH = RSAConfig.from_scratch(1)
# Each differs from the default in one respect.
_CONFIGS = [
    *(RSAConfig(gate_init=gate) for gate in GATES),
    *(RSAConfig(parameter_scale=multiple) for multiple in MULTIPLES),
    replace(RSAConfig(), nu_init=_SCRATCH.nu_init, theta_init=_SCRATCH.theta_init),
]
VARIANTS: dict[str, RSAConfig | None] = {
    PLAIN: None,
    DEFAULT: RSAConfig(),
    NO_RECURRENCE: RSAConfig(),
    **{_name(config): config for config in _CONFIGS},
}

ALL = 10**9  # more than any data set has
DEVIGN = "devign"
_CLAIM = (PLAIN, DEFAULT, NO_RECURRENCE)
_RATES = (*_CLAIM, FASTEST)
# The same settings in every comparison of a model and task:
# length: tokens in a row; most: functions or bytes that count as all training data; scored: size of the validation and
# of the test split; layers: of MiniLM; pretraining_steps: of the small Llama.
_TOY: dict[str, Setting] = {
    "model": "llama-0.03M",
    "task": "c",
    "batch": 8,
    "length": 64,
    "most": 20_000,
    "scored": 2_000,
    "evaluations": 2,
    "layers": 0,
    "pretraining_steps": 30,
}
_QUICK: dict[str, Setting] = {
    "model": "llama-0.1M",
    "task": "c",
    "batch": 8,
    "length": 128,
    "most": 200_000,
    "scored": 8_000,
    "evaluations": 4,
    "layers": 0,
    "pretraining_steps": 400,
}
_MINILM: dict[str, Setting] = {
    "model": "minilm",
    "task": DEVIGN,
    "batch": 16,
    "length": 256,
    "most": ALL,
    "scored": ALL,
    "evaluations": 4,
    "layers": 6,
    "pretraining_steps": 0,
}
_SMOLLM2: dict[str, Setting] = {
    "model": "smollm2",
    "batch": 2,
    "length": 256,
    "most": ALL,
    "scored": 20_000,
    "evaluations": 2,
    "layers": 0,
    "pretraining_steps": 0,
}
FULL_MODELS = ("minilm", "smollm2")
Comparison = tuple[dict[str, Setting], tuple[float, ...], tuple[tuple[float, int, tuple[str, ...]], ...]]
# Shared settings, learning rates, and for each share of the data: steps and variants. All variants run at one share,
# those of the claim at the others. Where steps are few and the learning rate is low, RSA parameters hardly move, so
# the full size adds a faster one at the smallest share.
_COMPARISONS: dict[Size, tuple[Comparison, ...]] = {
    "toy": ((_TOY, (1e-2,), ((1.0, 30, _CLAIM),)),),
    "quick": ((_QUICK, (3e-3, 1e-2), ((0.01, 60, _CLAIM), (0.1, 60, tuple(VARIANTS)), (1.0, 60, _CLAIM))),),
    "full": (
        (_MINILM, (3e-5, 1e-4, 3e-4), ((0.01, 70, _RATES), (0.1, 400, tuple(VARIANTS)), (1.0, 2700, _CLAIM))),
        *(
            (
                {**_SMOLLM2, "task": text},
                (1e-4, 3e-4, 1e-3),
                ((0.01, 50, _RATES), (0.1, 500, tuple(VARIANTS)), (1.0, 5000, _CLAIM)),
            )
            for text in ("wikitext-2", "c")
        ),
    ),
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Models and tasks × shares of the data × seeds × variants × learning rates."""
    return [
        {**shared, "share": share, "steps": steps, "arm": variant, "learning_rate": rate, "seed": seed}
        for shared, rates, shares in _COMPARISONS[size]
        for share, steps, variants in shares
        for seed in range(seeds)
        for variant in variants
        for rate in rates
    ]
