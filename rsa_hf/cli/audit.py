"""`rsa-hf audit`."""

import json
from typing import Annotated

import typer

from rsa_hf.cli.common import list_keys, task_module, writable
from rsa_hf.utils.files import write_text
from rsa_hf.utils.text import finite_or_null


def audit(
    context: typer.Context,
    output: Annotated[str | None, typer.Option(help="A JSON file to write the numbers to.")] = None,
    _: Annotated[bool, list_keys("defect")] = False,
) -> None:
    """Count what can mislead in the data of defect detection: rsa-hf audit [CONFIG] [--key value …].

    Copies within and across splits, contradictory labels, the share of defective functions, what is cut at
    max_seq_length if a tokenizer_name or model_name_or_path is given, and the scores of a detector that counts words.
    Uses a run's keys for the data.

    Example: rsa-hf audit --train_file train.jsonl --validation_file valid.jsonl --test_file test.jsonl
    """
    file = None if output is None else writable(output)
    defect = task_module("defect")
    report = defect.audit_data(context.args)
    print(defect.format_audit(report))
    if file is not None:
        write_text(file, json.dumps(finite_or_null(report), indent=2) + "\n")
