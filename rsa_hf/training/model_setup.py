"""The model of a run: loaded or made from scratch, tried once on the longest input, and patched."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import IterableDataset
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, logging

from rsa_hf.calibration import run_calibration
from rsa_hf.config import RSAConfig
from rsa_hf.patching import is_patched, patch_model
from rsa_hf.training.arguments import ModelArguments, RunArguments, as_mapping
from rsa_hf.utils.files import write_text
from rsa_hf.utils.locate import locate
from rsa_hf.utils.text import did_you_mean


def load_model(auto_class: Any, arguments: ModelArguments, **config_values: Any) -> PreTrainedModel:
    """Load a pretrained model or make one from scratch, with an Auto class, in float32. New parameters are printed.

    `config_values` are entries of the model's config that the task needs; `config_overrides` takes precedence.
    """
    kind, name = arguments.model_type, arguments.model_name_or_path
    if (kind is None) == (name is None):
        both = f"model_name_or_path={name!r} and model_type={kind!r}"
        raise ValueError(f"{both}: give the first for a pretrained model, or the second for one from scratch.")
    if kind is not None and kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type={kind!r}: transformers has no such type.{did_you_mean(kind, CONFIG_MAPPING)}")
    place, overrides = locate(name or ""), as_mapping("config_overrides", arguments.config_overrides)
    values = {**config_values, **overrides}
    # transformers accepts any key, so a misspelt one would have no effect.
    if name is None:
        usual, config = (AutoConfig.for_model(str(kind), **changes) for changes in ({}, values))
        unknown = [key for key in overrides if not hasattr(usual, key)]
    else:
        config, unknown = AutoConfig.from_pretrained(place, return_unused_kwargs=True, **values)
        usual = config
    for key in unknown:
        hint = did_you_mean(key, usual.to_dict())
        raise ValueError(f"config_overrides: a {type(config).__name__} has no entry {key!r}.{hint}")
    attention = arguments.attn_implementation
    keywords: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if name is None:
        from_scratch: PreTrainedModel = auto_class.from_config(config, **keywords)
        return from_scratch
    keywords |= {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    model, info = _load_without_report(auto_class, place, **keywords)
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


def load_with_head(auto_class: Any, name: str) -> PreTrainedModel:
    """Load a model to score it, and require that no part of it is new: otherwise a random head would be scored."""
    model, info = _load_without_report(auto_class, locate(name))
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"{name} has no {missing}: it was not trained for this task. Name a checkpoint that was.")
    others = sorted(key for key in info["unexpected_keys"] if not key.startswith(f"{model.base_model_prefix}."))
    if others:  # a head of another task; a language model's own head may be tied, so that nothing is missing
        raise ValueError(
            f"{name} has {', '.join(others)}: it was trained for another task. Name a checkpoint of this."
        )
    return model


def _load_without_report(auto_class: Any, place: str, **keywords: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model, and information on its weights, without transformers' own report of missing ones."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, info = auto_class.from_pretrained(place, output_loading_info=True, **keywords)
        return model, info
    finally:
        logging.set_verbosity(verbosity)


def load_tokenizer(name: str, **settings: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer; a ValueError where files are missing, and transformers would make one without words."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(locate(name), **settings)
    if len({*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}) < 2:
        raise ValueError(
            f"{name} has no tokenizer: all words would be unknown. Save its own there by tokenizer.save_pretrained. "
            "Runs also take a tokenizer_name, which is bytes for a language model of bytes."
        )
    return tokenizer


def largest_token_id(tokenizer: Any) -> int:
    """The largest id of a tokenizer, which may be more than its length; None is raw bytes."""
    return 255 if tokenizer is None else max(tokenizer.get_vocab().values())


@torch.no_grad()
def require_inputs_fit(model: PreTrainedModel, tokenizer: Any, length: int, setting: str) -> None:
    """Check with a forward pass that a model takes the largest id of a tokenizer and the longest input.

    Config entries are not enough: RoBERTa's 514 positions hold 512 tokens, rotary positions have no limit, and tables
    of positions may be buffers. No shorter input is tried, as it would change BigBird's attention for good. The model
    is on the CPU: on CUDA, an index that is too large would end the process. `setting` is what gives the length.
    """
    token_id = largest_token_id(tokenizer)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    usual = 0 if pad != 0 else 1  # RoBERTa gives padding no position
    embeddings: Any = model.get_input_embeddings()
    vocabulary = getattr(getattr(embeddings, "weight", None), "shape", [model.config.vocab_size])[0]
    was_training = model.training
    try:
        model.eval()
        ids = torch.tensor([[usual] * (length - 1) + [token_id]], device=model.device)
        ends = getattr(model.config, "eos_token_id", None)
        if model.config.is_encoder_decoder and isinstance(ends, int) and length > 1:
            ids[:, -2:] = torch.tensor([token_id, ends])  # BART's classifier reads the last end token
        model(input_ids=ids)
    except (IndexError, RuntimeError, ValueError) as error:
        if token_id >= vocabulary:
            raise ValueError(
                f"the tokenizer has ids up to {token_id}, the model {vocabulary} embeddings. Give the model's own "
                "tokenizer as tokenizer_name, or set vocab_size in config_overrides of a model from scratch."
            ) from error
        raise ValueError(f"{setting}={length}: the model takes no input so long ({error!s:.200}).") from error
    finally:
        model.train(was_training)


@torch.no_grad()
def require_causal(model: PreTrainedModel) -> None:
    """Check that no token changes the logits before it; otherwise, perplexity would be meaningless."""
    was_training, ids = model.training, torch.arange(2, 6, device=model.device).repeat(2, 1)
    ids[1, -1] = 1
    try:
        first, other = model.eval()(input_ids=ids).logits[:, :-1]
    finally:
        model.train(was_training)
    if not torch.allclose(first, other, rtol=1e-3, atol=1e-4 * float(first.abs().max())):
        raise ValueError(
            f"this {type(model).__name__} sees the tokens that it predicts: it is no causal language model. For an "
            "encoder, set is_decoder: true in config_overrides of a run."
        )


def patch_for_run(
    model: PreTrainedModel, train_dataset: Any, collate_fn: Callable[[list[Any]], Any], run: RunArguments[Any]
) -> dict[str, float]:
    """Patch the plain model of a run as its settings say, after a calibration if they ask for one.

    A checkpoint with RSA heads keeps them if the settings do not mention `rsa`.

    The result of a calibration is printed and written to `calibration.json` and, with matplotlib, `calibration.png` in
    the output folder. A run that continues, and the other processes, read it there. The model stays plain if no gain
    was shown. Returns the calibration's scores: the losses before training, without and with RSA heads.
    """
    settings, args = run.rsa.calibrate, run.training
    if is_patched(model):
        if "rsa" in run.given:
            raise ValueError("rsa is given, but the checkpoint has RSA heads already. Leave rsa out to train them.")
        return {}
    if settings is None:
        if run.rsa.config is not None:
            patch_model(model, run.rsa.config)
        return {}
    path = args.folder / "calibration.json"
    with args.main_process_first():
        is_new = args.overwrite_output_dir or not (path.exists() and (path.parent / "run.json").exists())
        if is_new and args.should_save:
            batches = calibration_batches(
                train_dataset, collate_fn, settings.max_rows, args.per_device_train_batch_size, args.seed
            )
            model.to(args.device)  # type: ignore[arg-type]  # transformers' decorator
            found = run_calibration(model, batches, seed=args.seed, **asdict(settings))
            print(found)
            write_text(path, json.dumps({"scores": found.scores, **found.to_dict()}, indent=2) + "\n")
            with suppress(ImportError):  # no matplotlib, as `finish_run` reports
                found.plot(path.with_suffix(".png"))
        known = json.loads(path.read_text(encoding="utf-8"))
    patch_model(model, RSAConfig.from_dict(known["config"]))
    return dict(known["scores"])


def calibration_batches(
    train_dataset: Any, collate_fn: Callable[[list[Any]], Any], count: int, batch_size: int, seed: int
) -> list[dict[str, Any]]:
    """Some rows of a data set, drawn at random, or the first ones of a stream, in batches."""
    if hasattr(train_dataset, "num_tracks"):
        raise ValueError("rsa: calibrate reads single rows, so carry_memory=true cannot be used with it.")
    if isinstance(train_dataset, IterableDataset):
        rows = list(islice(train_dataset, count))
    else:
        order = torch.randperm(len(train_dataset), generator=torch.Generator().manual_seed(seed), device="cpu")
        rows = [train_dataset[i] for i in order[:count].tolist()]
    return [{**collate_fn(rows[i : i + batch_size])} for i in range(0, len(rows), batch_size)]
