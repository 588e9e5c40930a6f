"""`rsa-hf predict`."""

import json
from typing import Annotated

import typer

from rsa_hf.cli.common import list_keys, task_module, writable
from rsa_hf.utils.files import write_text


def predict(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a defect detector, or its name on the Hub.")],
    functions: Annotated[str, typer.Argument(help="A file of functions: JSON lines, a JSON array, CSV or Parquet.")],
    output: Annotated[str | None, typer.Option(help="A file to write to. Default: standard output.")] = None,
    _: Annotated[bool, list_keys("defect")] = False,
) -> None:
    """Score functions without labels with a defect detector: rsa-hf predict MODEL FUNCTIONS [--key value …].

    Writes a line of JSON for each function: idx, its own or its place; score, the probability of a defect; and label,
    clean or defective by the threshold that the model's run chose. Of a run's keys, it uses text_column_name, those
    for cutting functions, and per_device_eval_batch_size.

    Example: rsa-hf predict outputs/defect_minilm functions.jsonl --output scores.jsonl
    """
    file = None if output is None else writable(output)
    found = task_module("defect").predict(model, functions, context.args)
    lines = "".join(json.dumps(each) + "\n" for each in found)
    if file is None:
        print(lines, end="")
    else:
        write_text(file, lines)
