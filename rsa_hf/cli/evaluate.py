"""`rsa-hf evaluate defect` and `rsa-hf evaluate lm`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rsa_hf.cli.models import arm
from rsa_hf.cli.train import PASSED_ON, Config

__all__ = ["evaluate"]

evaluate = typer.Typer(no_args_is_help=True, help="Score a saved model on the data of a YAML file.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its name on the Hub.")]
Split = Annotated[str, typer.Option(help="validation or test.")]


@evaluate.command(context_settings=PASSED_ON)
def defect(context: typer.Context, model: Model, config: Config, split: Split = "test") -> None:
    """Score a defect detector: accuracy, F1, MCC, and the majority class to compare with; as JSON.

    The section `data` of CONFIG is what counts; what follows, as --key value, overrides it.

    Example: rsa-hf evaluate defect outputs/defect_minilm/best configs/defect_minilm_embedded.yaml
    """
    arm()
    from rsa_hf.tasks.train_defect_detection import evaluate
    from rsa_hf.training.metrics_log import finite_or_null
    from rsa_hf.training.run import script_errors

    with script_errors():
        print(json.dumps(finite_or_null(evaluate(model, split, [config, *context.args])), indent=2))


@evaluate.command(context_settings=PASSED_ON)
def lm(context: typer.Context, model: Model, config: Config, split: Split = "test") -> None:
    """Score a language model: bits per byte, perplexity per word and per token; as JSON, null for infinity.

    The section `data` of CONFIG is what counts; what follows, as --key value, overrides it.

    Example: rsa-hf evaluate lm outputs/lm_bytes/best configs/lm_bytes_embedded.yaml --split validation
    """
    arm()
    from rsa_hf.tasks.train_language_model import evaluate
    from rsa_hf.training.metrics_log import finite_or_null
    from rsa_hf.training.run import script_errors

    with script_errors():
        print(json.dumps(finite_or_null(evaluate(model, split, [config, *context.args])), indent=2))
