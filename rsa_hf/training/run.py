"""What the training scripts share beside the loop: the model, its answers, errors, results."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.hub.card import CardFacts, write_card
from rsa_hf.patching import is_patched, patch_model
from rsa_hf.plots import plot_rem
from rsa_hf.training.loop import TrainResult
from rsa_hf.training.metrics_log import finite_or_null
from rsa_hf.training.settings import ModelSettings, RunConfig
from rsa_hf.training.steps import Batch
from rsa_hf.utils.files import sole_writer, storage_errors, write_text
from rsa_hf.utils.locate import locate
from rsa_hf.utils.table import format_table

__all__ = [
    "card_facts",
    "launched_accelerator",
    "load_model",
    "predict_logits",
    "report_results",
    "require_positions_known",
    "require_tokens_known",
]


def launched_accelerator(mixed_precision: str) -> Accelerator:
    """The Accelerator of a script, whose processes find each other on machines without a GPU too.

    Accelerate itself takes processes on CPUs for single ones unless it is told of the CPU, and each would train
    alone and overwrite the others' files.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
    """
    return Accelerator(mixed_precision=mixed_precision, cpu=not torch.accelerator.is_available())


def load_model(
    auto_class: Any, settings: ModelSettings, rsa: RSAConfig | None, **config_values: Any
) -> PreTrainedModel:
    """Load a pretrained model, or make one from scratch, and put RSA heads on it.

    Weights are float32, whatever they were saved in; half precision is for the training loop to choose.

    Args:
        auto_class: `AutoModelForCausalLM` or another of transformers' Auto classes.
        settings: the model.
        rsa: the RSA heads; None: none are put on it.
        config_values: entries that the task wants in the model's config; those of the settings go before them.

    Raises:
        OSError: the model is not found.
        ValueError: an unknown model type, an unknown entry in `config_overrides`, or a plan that does not fit.
    """
    kind = settings.model_type
    if kind is not None and kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model_type={kind!r} is none of transformers' model types.{hint}")

    def config_with(**values: Any) -> Any:
        if kind is not None:
            return AutoConfig.for_model(kind, **values)
        assert settings.name_or_path is not None  # one of the two is given
        return AutoConfig.from_pretrained(locate(settings.name_or_path), **values)

    known = config_with()
    for key in settings.config_overrides:
        # transformers itself takes any key, and a misspelt one would change nothing.
        if not hasattr(known, key):
            near = difflib.get_close_matches(key, known.to_dict(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"config_overrides: a {type(known).__name__} has no entry {key!r}.{hint}")
    config = config_with(**{**config_values, **settings.config_overrides})
    keywords = {} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}
    model: PreTrainedModel
    if settings.name_or_path is None:
        model = auto_class.from_config(config, **keywords)
    else:
        model = auto_class.from_pretrained(
            locate(settings.name_or_path), config=config, dtype=torch.float32, **keywords
        )
    return model if rsa is None else patch_model(model, rsa)


def require_tokens_known(model: PreTrainedModel, num_tokens: int) -> None:
    """Check that the model has an embedding for each of a tokenizer's tokens.

    Raises:
        ValueError: it has fewer.
    """
    # Adaptive embeddings are several tables; their sizes are in the config.
    embeddings: Any = model.get_input_embeddings()
    known = embeddings.weight.shape[0] if hasattr(embeddings, "weight") else model.config.vocab_size
    if num_tokens > known:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, the model {known}. Give the model's own tokenizer as "
            "model.tokenizer, or set config_overrides.vocab_size of a model from scratch."
        )


def require_positions_known(model: PreTrainedModel, setting: str, num_tokens: int) -> None:
    """Check that a model with a table of positions has one for each token of an input.

    Rotary and relative positions have no end, whatever their config calls the longest input.

    Args:
        model: the model.
        setting: what says how long an input is, for the message.
        num_tokens: the longest input.

    Raises:
        ValueError: it has fewer.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or num_tokens <= most:
        return
    tokens = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not tokens]
    # OPT and its kin have two rows more.
    if any(most <= table.num_embeddings <= most + 2 for table in tables):
        raise ValueError(f"{setting}={num_tokens}: this model takes at most {most} tokens.")


@torch.no_grad()
def predict_logits(
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Any]],
    collate_fn: Callable[[list[Any]], Batch],
    batch_size: int,
) -> torch.Tensor:
    """The logits of a classifier, on the CPU, in the order of the rows. The model is left in eval mode.

    Args:
        model: the classifier.
        rows: what it is asked about; `input_ids` tells the lengths.
        collate_fn: makes a batch of a list of rows.
        batch_size: rows per batch.
    """
    model.eval()
    # Rows of like length together: less padding. The longest first, so that memory runs out at once or never.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    logits = []
    for start in range(0, len(order), batch_size):
        batch = collate_fn([rows[i] for i in order[start : start + batch_size]])
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)[torch.tensor(order).argsort()]


def card_facts(results: Path) -> CardFacts:
    """What the `results.json` of a run has for the model card: base model, data, seed and scores.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no `results.json` of a run.
    """
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
        config = content["config"]
        data, model = config["data"], config["model"]
        scores = {
            split: {name: float(value) for name, value in content[split].items() if value is not None}
            for split in ("validation", "test")
            if split in content
        }
        source = data.get("source")
        datasets = {"hub": data.get("hub_dataset"), "embedded": "Python's standard library"}
        return CardFacts(
            base_model=model.get("name_or_path"),
            datasets=tuple(filter(None, [datasets.get(str(source))])),
            seeds=(config["training"]["seed"],),
            scores=scores,
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{results} is no results.json of a training run ({error!r}).") from error


def report_results(
    config: RunConfig[Any],
    result: TrainResult,
    scores: Mapping[str, Mapping[str, float]],
    rows: Sequence[Sequence[str]],
    model: PreTrainedModel,
) -> None:
    """Print the table of a finished run, save its figures, and draw what the RSA heads have learned.

    In the output folder this writes `results.json` and, of a patched model, `rsa.png`; in `best/` its model card.

    Args:
        config: the settings of the run.
        result: what `train` returned.
        scores: the figures of the best model, by split; NaN and infinity become null in the file.
        rows: the table, its head first.
        model: the best model.

    Raises:
        StorageError: they cannot be written; the table was printed.
    """
    output = Path(config.training.output_dir)
    results = {
        "patched": is_patched(model),
        "steps": result.steps,
        "best_step": result.best_step,
        "train_tokens": result.tokens,
        **scores,
        "config": config.to_dict(),
    }
    print("\n" + format_table(rows))
    with sole_writer(output), storage_errors(output):
        write_text(output / "results.json", json.dumps(finite_or_null(results), indent=2) + "\n")
        written = [output / "results.json"]
        if is_patched(model):
            try:
                plot_rem(model, output / "rsa.png")
                written.append(output / "rsa.png")
            except ImportError as error:
                print(f"no picture of the RSA heads: {error}")
            card = write_card(model, result.best_dir, card_facts(output / "results.json"), plot=True)
            written += [] if card is None else [card]
    print(f"\nwritten: {', '.join(map(str, written))}")
