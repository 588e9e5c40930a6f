"""Optimiser parameter groups: weights with decay, weights without decay, RSA parameters."""

from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from rsa_hf.layer import RSAHeads

# Optimisers, by a part of their names, whose parameters the Trainer chooses from the model.
_WITH_OWN_PARAMETERS = ("galore", "apollo", "lomo")


def param_groups(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.0, rsa_learning_rate: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups of a patched (or plain) model for a torch optimiser.

    Args:
        model: the model; parameters that require no gradient are left out.
        learning_rate: for the weights.
        weight_decay: for matrices. Vectors (biases, norms) and RSA parameters are never decayed: decay would pull
            every gate to one half and every rate to the middle of its range.
        rsa_learning_rate: the rate at which Adam moves μ, η, ν, θ and free lags. Default: as under a plain optimiser
            over `model.parameters()`, which is `learning_rate` for free lags and `parameter_scale` times as much for
            the others, which are stored divided by `parameter_scale`, so the `lr` of their group is divided by it too.

    Returns:
        Groups with `name`, `params`, `lr` and `weight_decay`: `weights`, `no_decay`, and one `rsa` for each
        `parameter_scale` in the model, with free lags in the group of scale 1.
    """
    by_scale: dict[float, list[nn.Parameter]] = {}
    recurrent: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, RSAHeads):
            for name, parameter in module.named_parameters():
                recurrent.add(parameter)
                if parameter.requires_grad:
                    scale = 1.0 if name == "free_lags" else module.spec.layout.scale  # free lags are stored unscaled
                    by_scale.setdefault(scale, []).append(parameter)
    others = [p for p in model.parameters() if p.requires_grad and p not in recurrent]
    matrices, vectors = [p for p in others if p.dim() >= 2], [p for p in others if p.dim() < 2]
    groups = [
        {"name": "weights", "params": matrices, "lr": learning_rate, "weight_decay": weight_decay},
        {"name": "no_decay", "params": vectors, "lr": learning_rate, "weight_decay": 0.0},
    ]
    for scale, parameters in by_scale.items():
        rate = learning_rate if rsa_learning_rate is None else rsa_learning_rate / scale
        groups.append({"name": "rsa", "params": parameters, "lr": rate, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def optimizer_cls_and_kwargs(
    args: TrainingArguments, rsa_learning_rate: float | None = None
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The `optimizer_cls_and_kwargs` argument of `transformers.Trainer`: the optimiser of `args` on `param_groups`.

    By default the Trainer applies weight decay to RSA parameters, and their learning rate follows from
    `parameter_scale`. With this argument they are never decayed and can have their own rate, as in `param_groups`:

        args = TrainingArguments("outputs", learning_rate=2e-5, weight_decay=0.01)
        Trainer(model, args, ..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, rsa_learning_rate=1e-3))

    The groups are made when the Trainer makes its optimiser, from the model and `args` at that time: also after
    `model_init`, under FSDP, and in each trial of `hyperparameter_search`.

    Raises:
        ValueError: `args.optim` chooses its own parameters, so it accepts no groups.
    """
    _optimizer_of(args)
    # transformers' annotation asks for a class, but the Trainer accepts a factory too.
    return cast("type[Optimizer]", lambda: _make), {"args": args, "rsa_learning_rate": rsa_learning_rate}


def _optimizer_of(args: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimiser class of `args` and its arguments; a ValueError if it accepts no groups."""
    if not any(part in args.optim for part in _WITH_OWN_PARAMETERS):
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
        # The Trainer knows bitsandbytes by the class, to keep embeddings out of 8 bits; a factory hides the class.
        eight_bits = "bitsandbytes" in str(cls) and keywords.get("optim_bits") == 8
        if isinstance(cls, type) and issubclass(cls, Optimizer) and not eight_bits:
            return cls, keywords
    raise ValueError(
        f"optim={OptimizerNames(args.optim).value!r} chooses its own parameters and accepts no groups. Use another, "
        "such as 'adamw_torch', or transformers' Trainer without optimizer_cls_and_kwargs."
    )


def _make(model: nn.Module, *, args: TrainingArguments, rsa_learning_rate: float | None) -> Optimizer:
    cls, keywords = _optimizer_of(args)
    groups = param_groups(model, keywords["lr"], args.weight_decay, rsa_learning_rate)
    return cls(groups, **keywords)
