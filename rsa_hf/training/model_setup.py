"""The model of a run: loaded or made from scratch, and tried once on the longest input before it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel, logging

from rsa_hf.training.arguments import ModelArguments, as_mapping, did_you_mean
from rsa_hf.utils.locate import locate

__all__ = ["largest_token_id", "load_model", "require_head", "require_inputs_fit"]


def load_model(auto_class: Any, arguments: ModelArguments, **config_values: Any) -> PreTrainedModel:
    """Load a pretrained model or make one from scratch; weights are float32. New parameters are printed.

    Args:
        auto_class: `AutoModelForCausalLM` or another of transformers' Auto classes.
        arguments: the model.
        config_values: entries of the model's config that the task needs; `config_overrides` goes first.

    Raises:
        OSError: the model is not found.
        ValueError: an unknown model type or entry in `config_overrides`, or a head for another number of classes.
    """
    kind, name = arguments.model_type, arguments.model_name_or_path
    if (kind is None) == (name is None):
        raise ValueError(
            f"model_name_or_path={name!r} and model_type={kind!r}: give the first for a pretrained model, or the "
            "second for one from scratch."
        )
    if kind is not None and kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type={kind!r}: transformers has no such type.{did_you_mean(kind, CONFIG_MAPPING)}")

    def config_with(**values: Any) -> Any:
        return (
            AutoConfig.for_model(str(kind), **values) if name is None else AutoConfig.from_pretrained(place, **values)
        )

    place, overrides = locate(name or ""), as_mapping("config_overrides", arguments.config_overrides)
    known = config_with()
    for key in overrides:
        # transformers accepts any key, so that a misspelt one would have no effect.
        if not hasattr(known, key):
            hint = did_you_mean(key, known.to_dict())
            raise ValueError(f"config_overrides: a {type(known).__name__} has no entry {key!r}.{hint}")
    config = config_with(**{**config_values, **overrides})
    keywords = {} if arguments.attn_implementation is None else {"attn_implementation": arguments.attn_implementation}
    model: PreTrainedModel
    if name is None:
        model = auto_class.from_config(config, **keywords)
        return model
    with _without_load_report():
        model, info = auto_class.from_pretrained(
            place,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **keywords,
        )
    sizes = {each[0]: f"{list(each[1])} in the checkpoint, {list(each[2])} here" for each in info["mismatched_keys"]}
    if sizes and not arguments.ignore_mismatched_sizes:
        raise ValueError(
            f"{name} has weights of other sizes: {', '.join(f'{key} {size}' for key, size in sizes.items())}. "
            "Its head is for another number of classes, or config_overrides changes a size. "
            "ignore_mismatched_sizes=true makes these weights new."
        )
    new = sorted({*info["missing_keys"], *sizes})
    if new:
        PartialState().print(f"{', '.join(new)}: new, will be trained")
    return model


def require_head(auto_class: Any, name: str) -> PreTrainedModel:
    """Load a model to score it, and require that no part of it is new: a random head would be scored.

    Raises:
        OSError: the model is not found.
        ValueError: the checkpoint lacks weights of the model.
    """
    model: PreTrainedModel
    with _without_load_report():
        model, info = auto_class.from_pretrained(locate(name), output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no {', '.join(sorted(info['missing_keys']))}, which a {type(model).__name__} needs: it was "
            "not trained for this task. Name a checkpoint that was."
        )
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' report of missing weights: who loads says what is new."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def largest_token_id(tokenizer: Any) -> int:
    """The largest id of a tokenizer. One with gaps has ids beyond its length; None is raw bytes."""
    return 255 if tokenizer is None else max(tokenizer.get_vocab().values())


@torch.no_grad()
def require_inputs_fit(model: PreTrainedModel, token_id: int, length: int, setting: str) -> None:
    """Check by a forward pass that a model takes the largest token id and the longest input.

    Config entries do not tell: RoBERTa's 514 positions hold 512 tokens, rotary positions have no limit, and tables of
    positions may be buffers. No shorter input is tried: on one, BigBird changes its attention for good.

    Args:
        model: the model, in memory of the CPU: an index that is too large would end a CUDA process.
        token_id: the largest token id of the data.
        length: tokens of the longest input.
        setting: the name of the setting that gives the length, for the message.

    Raises:
        ValueError: the forward pass fails.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    usual = 0 if pad != 0 else 1  # RoBERTa gives padding no position
    embeddings: Any = model.get_input_embeddings()
    vocabulary = getattr(getattr(embeddings, "weight", None), "shape", [model.config.vocab_size])[0]
    was_training = model.training
    try:
        model.eval()
        model(input_ids=torch.tensor([[usual] * (length - 1) + [token_id]], device=model.device))
    except (IndexError, RuntimeError, ValueError) as error:
        if token_id >= vocabulary:
            raise ValueError(
                f"the tokenizer has ids up to {token_id}, the model {vocabulary} embeddings. Give the model's own "
                "tokenizer as tokenizer_name, or set vocab_size in config_overrides of a model from scratch."
            ) from error
        raise ValueError(
            f"{setting}={length}: the model takes no inputs of so many tokens ({error!s:.200}). Lower it."
        ) from error
    finally:
        model.train(was_training)
