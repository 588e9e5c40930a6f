"""`rsa-hf evaluate`: defect, lm."""

import json
from typing import Annotated, Any, Literal

import typer

from rsa_hf.cli.common import WITH_SETTINGS, list_keys, task_module
from rsa_hf.utils.text import finite_or_null

evaluate = typer.Typer(no_args_is_help=True, help="Score a saved model.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its name on the Hub.")]
Split = Annotated[Literal["validation", "test"], typer.Option(help="The split to score.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Probability above which a function counts as defective. Default: the one that the model's run chose."
    ),
]


def _run(task: str, model: str, split: Split, arguments: list[str], **settings: Any) -> None:
    scores = task_module(task).evaluate(model, split, arguments, **settings)
    print(json.dumps(finite_or_null(scores), indent=2))


@evaluate.command(**WITH_SETTINGS)
def defect(
    context: typer.Context,
    model: Model,
    split: Split = "test",
    threshold: Threshold = None,
    _: Annotated[bool, list_keys("defect")] = False,
) -> None:
    """Score a defect detector, as JSON: rsa-hf evaluate defect MODEL [CONFIG] [--key value …].

    Prints accuracy, F1 and MCC at the threshold 0.5 and at --threshold, the areas under the ROC and precision-recall
    curves, and the accuracy of the majority class for comparison. Uses a run's keys for the data to score, and
    per_device_eval_batch_size.

    Example: rsa-hf evaluate defect outputs/defect_minilm configs/defect_minilm_embedded.yaml
    """
    _run("defect", model, split, context.args, threshold=threshold)


@evaluate.command(**WITH_SETTINGS)
def lm(
    context: typer.Context, model: Model, split: Split = "test", _: Annotated[bool, list_keys("lm")] = False
) -> None:
    """Score a language model: rsa-hf evaluate lm MODEL [CONFIG] [--key value …].

    Prints bits per byte and perplexity per word and per token as JSON, with null for infinity. Uses a run's keys for
    the data to score, tokenizer_name and per_device_eval_batch_size.

    Example: rsa-hf evaluate lm outputs/lm_bytes configs/lm_bytes_embedded.yaml --split validation
    """
    _run("lm", model, split, context.args)
