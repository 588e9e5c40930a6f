"""Defect detection and language modelling: data, model inputs, metrics and training runs.

The names below are imported on first use (PEP 562), so that one task does not import what only the other one needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.tasks.defect_audit import audit, format_audit, word_count_baseline
    from rsa_hf.tasks.defect_data import DefectDataConfig, load_defect_data
    from rsa_hf.tasks.defect_detection import tokenize
    from rsa_hf.tasks.defect_scores import (
        bootstrap_intervals,
        choose_threshold,
        compute_metrics,
        pair_rates,
        trainer_metrics,
        vd_score,
    )
    from rsa_hf.tasks.language_modeling import (
        LanguageModelTrainer,
        load_language_modeling_tokenizer,
        prepare_language_modeling,
    )
    from rsa_hf.tasks.metrics import load_metric
    from rsa_hf.tasks.text8 import clean_text8, text8_tokenizer
    from rsa_hf.tasks.text_data import LanguageModelingDataConfig
    from rsa_hf.tasks.text_scores import evaluate_language_model, perplexities

__all__ = [
    "DefectDataConfig",
    "LanguageModelTrainer",
    "LanguageModelingDataConfig",
    "audit",
    "bootstrap_intervals",
    "choose_threshold",
    "clean_text8",
    "compute_metrics",
    "evaluate_language_model",
    "format_audit",
    "load_defect_data",
    "load_language_modeling_tokenizer",
    "load_metric",
    "pair_rates",
    "perplexities",
    "prepare_language_modeling",
    "text8_tokenizer",
    "tokenize",
    "trainer_metrics",
    "vd_score",
    "word_count_baseline",
]

_MODULES = {
    "defect_audit": ("audit", "format_audit", "word_count_baseline"),
    "defect_data": ("DefectDataConfig", "load_defect_data"),
    "defect_detection": ("tokenize",),
    "defect_scores": (
        *("bootstrap_intervals", "choose_threshold", "compute_metrics", "pair_rates", "trainer_metrics", "vd_score"),
    ),
    "language_modeling": ("LanguageModelTrainer", "load_language_modeling_tokenizer", "prepare_language_modeling"),
    "metrics": ("load_metric",),
    "text8": ("clean_text8", "text8_tokenizer"),
    "text_data": ("LanguageModelingDataConfig",),
    "text_scores": ("evaluate_language_model", "perplexities"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
