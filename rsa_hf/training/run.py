"""What the training commands share beside the loop: load the model, predict, report results."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
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

__all__ = [
    "card_facts",
    "load_model",
    "predict_logits",
    "report_results",
    "require_positions_known",
    "require_tokens_known",
]


def load_model(
    auto_class: Any, settings: ModelSettings, rsa: RSAConfig | None, **config_values: Any
) -> PreTrainedModel:
    """Load a pretrained model or make one from scratch, and patch it.

    Weights are loaded as float32; the training loop chooses the precision of the computation.

    Args:
        auto_class: `AutoModelForCausalLM` or another of transformers' Auto classes.
        settings: the model.
        rsa: the RSA heads; None: the model stays plain.
        config_values: entries of the model's config that the task needs; `settings.config_overrides` goes first.

    Raises:
        OSError: the model is not found.
        ValueError: an unknown model type, an unknown entry in `config_overrides`, or a plan that does not fit.
    """
    kind = settings.model_type
    if kind is not None and kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model_type={kind!r} is not a model type of transformers.{hint}")

    def config_with(**values: Any) -> Any:
        if kind is not None:
            return AutoConfig.for_model(kind, **values)
        assert settings.name_or_path is not None  # one of the two is given
        return AutoConfig.from_pretrained(locate(settings.name_or_path), **values)

    known = config_with()
    for key in settings.config_overrides:
        # transformers accepts any key, so that a misspelt one would have no effect.
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
    """Check that the model has an embedding for each token of a tokenizer.

    Raises:
        ValueError: it has fewer embeddings.
    """
    # Adaptive embeddings have several tables, and their size in the config.
    embeddings: Any = model.get_input_embeddings()
    known = embeddings.weight.shape[0] if hasattr(embeddings, "weight") else model.config.vocab_size
    if num_tokens > known:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, the model {known}. Give the model's own tokenizer as "
            "model.tokenizer, or set config_overrides.vocab_size of a model from scratch."
        )


def require_positions_known(model: PreTrainedModel, setting: str, num_tokens: int) -> None:
    """Check that a model with a table of position embeddings has one for each token of an input.

    Rotary and relative positions have no limit, whatever `max_position_embeddings` says.

    Args:
        model: the model.
        setting: the setting with the length of an input, for the message.
        num_tokens: length of the longest input.

    Raises:
        ValueError: it has fewer position embeddings.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or num_tokens <= most:
        return
    tokens = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not tokens]
    # OPT has two more rows.
    if any(most <= table.num_embeddings <= most + 2 for table in tables):
        raise ValueError(f"{setting}={num_tokens}: this model takes at most {most} tokens.")


@torch.no_grad()
def predict_logits(
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Any]],
    collate_fn: Callable[[list[Any]], Batch],
    batch_size: int,
) -> torch.Tensor:
    """The logits of a classifier on the CPU, in the order of the rows. Leaves the model in evaluation mode.

    Args:
        model: the classifier.
        rows: its inputs, with `input_ids`.
        collate_fn: makes a batch of a list of rows.
        batch_size: rows per batch.
    """
    model.eval()
    # Batches of rows of similar length need less padding. With the longest first, memory runs out at once or never.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    logits = []
    for start in range(0, len(order), batch_size):
        batch = collate_fn([rows[i] for i in order[start : start + batch_size]])
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)[torch.tensor(order).argsort()]


def card_facts(results: Path) -> CardFacts:
    """Read base model, data set, seed and scores from the `results.json` of a run, for the model card.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a `results.json` of a run.
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
        raise ValueError(f"{results} is not the results.json of a training run ({error!r}).") from error


def report_results(
    config: RunConfig[Any],
    result: TrainResult,
    scores: Mapping[str, Mapping[str, float]],
    rows: Sequence[Sequence[str]],
    model: PreTrainedModel,
) -> None:
    """Print the table of a finished run, save its results, and draw the decays and gates.

    Writes `results.json` into the output folder and, for a patched model, `rsa.png` there and a card into `best/`.

    Args:
        config: the settings of the run.
        result: what `train` returned.
        scores: the scores of the best model by split. NaN and infinity become null.
        rows: the rows of the table, the header first.
        model: the best model.

    Raises:
        StorageError: a file cannot be written. The table was printed before.
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
    _print_table(rows)
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


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    table = Table(*rows[0], box=SIMPLE, show_edge=False, pad_edge=False)
    for row in rows[1:]:
        table.add_row(*row)
    # Lines of full length, also where the output is a file, for which rich assumes 80 columns.
    console = Console(width=1000)
    console.print()
    console.print(table)
