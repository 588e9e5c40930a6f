"""Run all checks on model types, for every task that has a class for them."""

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers

from rsa_hf import patch_model
from rsa_hf.checks import NotApplicable
from survey.broken import BROKEN
from survey.checks import CHECKS, Patched, padding_matters, patched
from survey.tiny_models import Case, build, tasks_of


def survey_type(model_type: str) -> dict[str, Any]:
    """Check one type on every task: {task: {"outcome": …, "why": …, "class": …, "layers": …, "checks": {name: …}}}.

    `table.py` explains the outcomes.
    """
    return {task: _survey_task(model_type, task) for task in tasks_of(model_type)}


def _survey_task(model_type: str, task: str) -> dict[str, Any]:
    try:
        case = build(model_type, task)
    except Exception as error:
        return {"outcome": "not built", "why": _said(error)}
    record: dict[str, Any] = {"class": type(case.model).__name__}
    try:
        with torch.no_grad():
            finite = bool(case.model(**case.inputs).logits.isfinite().all())
    except Exception as error:
        return {**record, **_refusal(case, error)}
    if not finite:
        return {**record, "outcome": "not built", "why": "the tiny model gives numbers that are not finite"}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with patched(case) as model:
                record["layers"] = len(model.heads)
                record["without"] = [str(w.message) for w in warned if "gets no RSA heads" in str(w.message)]
                record["checks"] = {name: run_check(name, model) for name in CHECKS}
    except (TypeError, ValueError, RuntimeError) as error:
        return {**record, "outcome": "refused", "why": _said(error)}
    failed = [f"{name}: {said}" for name, said in record["checks"].items() if said.startswith(("wrong", "unproven"))]
    kinds = {said.split(": ")[1].split(" ")[0] for said in failed}
    record["outcome"] = "works" if not failed else "wrong" if "wrong" in kinds else "unproven"
    return {**record, "why": "; ".join(failed)}


def _refusal(case: Case, error: Exception) -> dict[str, str]:
    """The outcome for a model that does not run on text alone."""
    try:
        patch_model(case.model)
    except (TypeError, ValueError, RuntimeError) as refusal:
        return {"outcome": "refused", "why": _said(refusal)}
    return {"outcome": "not built", "why": _said(error)}


def run_check(name: str, model: Patched) -> str:
    """`"holds"`, `"not applicable: …"`, `"wrong: …"`, or `"unproven: …"` if it holds with broken RSA too."""
    check, controls = CHECKS[name]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check(model)
        except NotApplicable as reason:
            return f"not applicable: {reason}"
        except AssertionError as error:
            return f"wrong: {error}"
        except Exception as error:
            return f"wrong: {_said(error)}"
        for control in controls:
            if control == "mask ignored" and not padding_matters(model):
                continue
            try:
                with BROKEN[control]():
                    check(model)
            except AssertionError:
                continue
            except Exception as error:
                return f"unproven: broken RSA ({control}) gives {_said(error)}"
            return f"unproven: it holds with broken RSA too ({control})"
    return "holds"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def survey(
    model_types: Sequence[str], jobs: int = 1, seconds_per_type: float = 60, seconds: float = float("inf")
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each type with its record (`survey_type`) as it is finished.

    Each type runs in a process of its own, `jobs` at a time, so that a crash ends one type only. A type that takes
    longer than `seconds_per_type` is killed and recorded as "not built". None is started after `seconds`.
    """
    context = multiprocessing.get_context("fork")  # so that transformers is imported once
    begun, waiting = time.monotonic(), list(model_types)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while running or waiting:
        if time.monotonic() - begun > seconds:
            waiting = []
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_try, args=(name, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1):
            name, process, _ = running.pop(receiver)  # type: ignore[index]
            try:
                record = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                record = _gave_up(name, f"its process ended with exit code {process.exitcode}")
            yield name, record
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > seconds_per_type:
                process.kill()
                del running[receiver]
                yield name, _gave_up(name, f"it took longer than {seconds_per_type:.0f} seconds")


def _try(model_type: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    sender.send(survey_type(model_type))


def _gave_up(model_type: str, why: str) -> dict[str, Any]:
    return {task: {"outcome": "not built", "why": why} for task in tasks_of(model_type)}
