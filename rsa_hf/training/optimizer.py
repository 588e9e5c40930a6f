"""`optimizer_cls_and_kwargs`: the parameter groups of RSA in a plain `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from rsa_hf.training.param_groups import param_groups

__all__ = ["optimizer_cls_and_kwargs"]

# Keys by which the Trainer lets an optimiser choose its own parameters (GaLore, LOMO, layer-wise ones).
_OWN_PARAMETERS = {"params", "model", "optimizer_dict"}


def optimizer_cls_and_kwargs(
    args: TrainingArguments, rsa_learning_rate: float | None = None
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The argument of that name of `transformers.Trainer`: the optimiser of `args`, in the groups of `param_groups`.

    Left to itself the Trainer trains RSA parameters at the pace that their `parameter_scale` gives them, and decays
    them with the weights. Here they are never decayed, and their pace can be chosen. The groups are made when the
    Trainer makes its optimiser, of the model it trains and of what `args` say then: also after `model_init`, under
    FSDP, and in each trial of `hyperparameter_search`.

        args = TrainingArguments("outputs", learning_rate=2e-5, weight_decay=0.01)
        Trainer(model, args, ..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, rsa_learning_rate=1e-3))

    Args:
        args: those of the Trainer: `optim`, `optim_args`, `learning_rate`, `weight_decay`, Adam's settings.
        rsa_learning_rate: the pace of μ, η, ν and θ, as in `param_groups`.

    Returns:
        A factory, which the Trainer takes in place of an optimiser class, and the arguments it calls it with.

    Raises:
        ValueError: `args.optim` chooses the parameters itself, so that groups cannot be given to it, or a rate is
            not positive.
    """
    _optimizer_of(args)
    if rsa_learning_rate is not None and not rsa_learning_rate > 0:
        raise ValueError(f"rsa_learning_rate={rsa_learning_rate}: a positive number is needed.")
    # transformers declares a class, and takes a factory too.
    return cast("type[Optimizer]", _factory), {"args": args, "rsa_learning_rate": rsa_learning_rate}


def _optimizer_of(args: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class that `args` choose, and its arguments; see `optimizer_cls_and_kwargs` for what is refused."""
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
    is_class = isinstance(cls, type) and issubclass(cls, Optimizer)
    # The Trainer keeps embeddings out of bitsandbytes' 8 bits by the class, which it does not see behind a factory.
    eight_bits = is_class and "bitsandbytes" in str(cls) and keywords.get("optim_bits") == 8
    if not is_class or eight_bits or _OWN_PARAMETERS & keywords.keys():
        raise ValueError(
            f"optim={str(args.optim)!r} treats some parameters in its own way and takes no groups. Choose another, "
            "such as 'adamw_torch', or leave optimizer_cls_and_kwargs out: RSA parameters then learn at "
            "parameter_scale times the learning rate."
        )
    return cls, keywords


def _factory() -> Callable[..., Optimizer]:
    return _make


def _make(model: nn.Module, *, args: TrainingArguments, rsa_learning_rate: float | None) -> Optimizer:
    # Callables like this one are called anew for every optimiser; nothing that was given is changed.
    cls, keywords = _optimizer_of(args)
    groups = param_groups(model, keywords["lr"], args.weight_decay, rsa_learning_rate)
    return cls(groups, **keywords)
