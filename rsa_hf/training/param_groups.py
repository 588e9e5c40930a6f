"""Optimiser parameter groups: weights with decay, without decay, and the RSA parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from rsa_hf.heads import RSAHeads

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    rsa_learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimiser.

    Args:
        model: a patched (or plain) model.
        learning_rate: for the weights.
        weight_decay: for matrices; vectors (biases, norms) and RSA parameters are never decayed, since decay would
            pull every gate to one half and every rate to its own middle.
        rsa_learning_rate: the pace at which μ, η, ν and θ move under Adam. Default: `parameter_scale` times
            `learning_rate`, which is also what a plain optimiser over `model.parameters()` gives them. Stored values
            are divided by `parameter_scale`, and so is the rate that stands in the group.

    Returns:
        Groups with `name`, `params`, `lr` and `weight_decay`, those without parameters left out: `weights`,
        `no_decay`, and `rsa` (one for each `parameter_scale` in the model). Only parameters that require gradients.

    Raises:
        ValueError: a rate that is not positive, or a negative weight decay.
    """
    for name, rate in (("learning_rate", learning_rate), ("rsa_learning_rate", rsa_learning_rate)):
        if rate is not None and not rate > 0:
            raise ValueError(f"{name}={rate}: a positive number is needed.")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay}: a number ≥ 0 is needed.")
    by_scale: dict[float, list[nn.Parameter]] = {}
    recurrent: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, RSAHeads):
            mine = [parameter for parameter in module.parameters() if parameter.requires_grad]
            by_scale.setdefault(module.plan.parameter_scale, []).extend(mine)
            recurrent.update(module.parameters())
    others = [p for p in model.parameters() if p.requires_grad and p not in recurrent]
    groups = [
        {
            "name": "weights",
            "params": [p for p in others if p.dim() >= 2],
            "lr": learning_rate,
            "weight_decay": weight_decay,
        },
        {
            "name": "no_decay",
            "params": [p for p in others if p.dim() < 2],
            "lr": learning_rate,
            "weight_decay": 0.0,
        },
    ]
    for scale, parameters in by_scale.items():
        rate = learning_rate if rsa_learning_rate is None else rsa_learning_rate / scale
        groups.append({"name": "rsa", "params": parameters, "lr": rate, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
