"""What is compared: the plain model, and RSA heads, that start elsewhere, learn at another pace, or do not recur."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.arms import DAMPED, damp
from rsa_hf.patching import patch_model

__all__ = ["ARMS", "DEFAULT", "FASTEST", "GATES", "MULTIPLES", "PLAIN", "make_arm"]

PLAIN = "plain"
GATES = (-6.0, -3.0, 0.0, 1.0)
# The pace of RSA parameters under Adam, as a multiple of the weights'.
MULTIPLES = (1.0, 20.0, 100.0)


def _name(plan: RSAConfig) -> str:
    """An arm as it is typed on a command line, so without a comma."""
    assert not isinstance(plan.gate_init, tuple)
    spread = " theta spread" if isinstance(plan.theta_init, tuple) else ""
    return f"mu {plan.gate_init:+g} x{plan.parameter_scale:g}{spread}"


DEFAULT = _name(RSAConfig())
FASTEST = _name(RSAConfig(parameter_scale=max(MULTIPLES)))
_SCRATCH = RSAConfig.from_scratch(1)
# Each differs from the default in one thing alone.
_PLANS = [
    *(RSAConfig(gate_init=gate) for gate in GATES),
    *(RSAConfig(parameter_scale=multiple) for multiple in MULTIPLES),
    replace(RSAConfig(), nu_init=_SCRATCH.nu_init, theta_init=_SCRATCH.theta_init),
]
ARMS: dict[str, RSAConfig | None] = {
    PLAIN: None,
    DEFAULT: RSAConfig(),
    DAMPED: RSAConfig(),
    **{_name(plan): plan for plan in _PLANS},
}


def make_arm(arm: str, model: PreTrainedModel) -> PreTrainedModel:
    """Turn a pretrained model into an arm of the comparison, in place.

    Raises:
        ValueError: there is no such arm.
    """
    if arm not in ARMS:
        raise ValueError(f"arm={arm!r}: one of {', '.join(ARMS)} is needed.")
    plan = ARMS[arm]
    if plan is not None:
        patch_model(model, plan)
    if arm == DAMPED:
        damp(model)
    return model
