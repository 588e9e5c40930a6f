"""Defect detection and language modelling: data, model inputs, metrics and training runs.

The names below are imported on first use (PEP 562), so that one task does not import what only the other one needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.tasks.defect_audit import *  # noqa: F403
    from rsa_hf.tasks.defect_data import *  # noqa: F403
    from rsa_hf.tasks.defect_detection import tokenize as tokenize
    from rsa_hf.tasks.defect_scores import *  # noqa: F403
    from rsa_hf.tasks.language_modeling import LanguageModelTrainer as LanguageModelTrainer
    from rsa_hf.tasks.language_modeling import load_language_modeling_tokenizer as load_language_modeling_tokenizer
    from rsa_hf.tasks.language_modeling import prepare_language_modeling as prepare_language_modeling
    from rsa_hf.tasks.metrics import *  # noqa: F403
    from rsa_hf.tasks.text8 import *  # noqa: F403
    from rsa_hf.tasks.text_data import *  # noqa: F403
    from rsa_hf.tasks.text_scores import *  # noqa: F403

_NAMES = {
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
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
