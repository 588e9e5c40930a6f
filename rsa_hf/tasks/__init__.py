"""Defect detection and language modelling: data, model inputs, metrics and training runs.

The names below are imported on first use (PEP 562), so that one task does not import what only the other one needs.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "DefectDataConfig": "defect_data",
    "LanguageModelTrainer": "language_model_trainer",
    "LanguageModelingDataConfig": "text_data",
    "audit": "defect_audit",
    "clean_text8": "text8",
    "compute_metrics": "defect_detection",
    "evaluate_language_model": "language_modeling",
    "format_audit": "defect_audit",
    "load_defect_data": "defect_data",
    "load_language_modeling_tokenizer": "language_modeling",
    "load_metric": "metrics",
    "perplexities": "metrics",
    "prepare_language_modeling": "language_modeling",
    "text8_tokenizer": "text8",
    "tokenize": "defect_detection",
    "trainer_metrics": "defect_detection",
}

__all__ = [
    "DefectDataConfig",
    "LanguageModelTrainer",
    "LanguageModelingDataConfig",
    "audit",
    "clean_text8",
    "compute_metrics",
    "evaluate_language_model",
    "format_audit",
    "load_defect_data",
    "load_language_modeling_tokenizer",
    "load_metric",
    "perplexities",
    "prepare_language_modeling",
    "text8_tokenizer",
    "tokenize",
    "trainer_metrics",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
