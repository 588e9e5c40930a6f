"""Put one model type through all checks, for every task that has a class for it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rsa_hf import patch_model
from survey.broken import BROKEN
from survey.checks import CHECKS, NotApplicable, Patched, padding_matters, patched
from survey.tiny_models import Case, build, tasks_of

__all__ = ["run_check", "survey_type"]


def survey_type(model_type: str) -> dict[str, Any]:
    """Every task of one type: {task: {"outcome": …, "why": …, "class": …, "layers": …, "checks": {name: …}}}.

    Outcomes:
        works: every check that applies holds, and catches its broken RSA.
        refused: `patch_model` raises; `why` is what it says.
        not built: there is no tiny model to try; `why` says what is missing.
        wrong: a check fails.
        unproven: a check holds with its broken RSA too.
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
    """Of a model that does not run on text alone."""
    try:
        patch_model(case.model)
    except (TypeError, ValueError, RuntimeError) as refusal:
        return {"outcome": "refused", "why": _said(refusal)}
    return {"outcome": "not built", "why": _said(error)}


def run_check(name: str, model: Patched) -> str:
    """`"holds"`, `"not applicable: …"`, `"wrong: …"`, or `"unproven: …"` where it holds with broken RSA too."""
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
