"""`rsa-hf evaluate defect` and `rsa-hf evaluate lm`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from rsa_hf.cli.models import install_hooks
from rsa_hf.cli.train import WITH_SETTINGS, Config, help_with_keys, run_errors

__all__ = ["evaluate"]

evaluate = typer.Typer(no_args_is_help=True, help="Score a saved model on the data of a YAML file.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its name on the Hub.")]
Split = Annotated[str, typer.Option(help="validation or test.")]


def _evaluate_defect(model: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    from rsa_hf.tasks.defect_detection import evaluate

    return evaluate(model, split, arguments)


def _evaluate_lm(model: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    from rsa_hf.tasks.language_modeling import evaluate

    return evaluate(model, split, arguments)


def _print(scores: dict[str, float]) -> None:
    from rsa_hf.training.metrics_log import finite_or_null

    print(json.dumps(finite_or_null(scores), indent=2))


@evaluate.command(**WITH_SETTINGS)
def defect(
    context: typer.Context,
    model: Model,
    config: Config,
    split: Split = "test",
    _: Annotated[bool, help_with_keys(lambda: _evaluate_defect("", "", ["--help"]))] = False,
) -> None:
    """Score a defect detector: accuracy, F1, MCC, and the majority class to compare with; as JSON.

    Of CONFIG the data and the batch size are used. Words after it, as --key value, override its keys.

    Example: rsa-hf evaluate defect outputs/defect_minilm/best configs/defect_minilm_embedded.yaml
    """
    install_hooks()
    with run_errors():
        _print(_evaluate_defect(model, split, [config, *context.args]))


@evaluate.command(**WITH_SETTINGS)
def lm(
    context: typer.Context,
    model: Model,
    config: Config,
    split: Split = "test",
    _: Annotated[bool, help_with_keys(lambda: _evaluate_lm("", "", ["--help"]))] = False,
) -> None:
    """Score a language model: bits per byte, perplexity per word and per token; as JSON, null for infinity.

    Of CONFIG the data and the batch size are used. Words after it, as --key value, override its keys.

    Example: rsa-hf evaluate lm outputs/lm_bytes/best configs/lm_bytes_embedded.yaml --split validation
    """
    install_hooks()
    with run_errors():
        _print(_evaluate_lm(model, split, [config, *context.args]))
