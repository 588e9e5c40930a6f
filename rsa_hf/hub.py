"""The model card of a patched model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from rsa_hf.report import rsa_report

__all__ = ["model_card"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

_CITATION = """@inproceedings{huang2023encoding,
  title     = {Encoding Recurrence into Transformers},
  author    = {Huang, Feiqing and Lu, Kexin and Cai, Yuxi and Qin, Zhen and Fang, Yanwen and Tian, Guangjian and
               Li, Guodong},
  booktitle = {International Conference on Learning Representations},
  year      = {2023}
}"""


def model_card(
    model: PreTrainedModel,
    *,
    base_model: str | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    command: str | None = None,
    plot: str | None = None,
) -> ModelCard:
    """The card of a patched model: how to load it, its plan and its gates, and what it scored.

    Args:
        model: a patched model.
        base_model: what was patched; it goes into the card's metadata only if it can be a Hub id, since a local path
            there is refused by the Hub.
        scores: tables of metrics, by the name of the run or split; shown as they are.
        command: what trained the model.
        plot: file name of a picture beside the card.

    Returns:
        The card: `card.save(folder / "README.md")`.

    Raises:
        ValueError: the model has no RSA heads.
    """
    report = rsa_report(model)
    if not report.layers:
        raise ValueError("the model has no RSA heads, so there is nothing to say on a card. Call patch_model first.")
    is_hub_id = base_model is not None and _HUB_ID.fullmatch(base_model) and not Path(base_model).exists()
    data = ModelCardData(
        library_name="transformers",
        tags=["rsa_hf", "rsa", "recurrence"],
        base_model=base_model if is_hub_id else None,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {type(model).__name__} with RSA heads",
        "Self-attention with recurrence (RSA, ICLR 2023): in the heads below, attention is mixed with a recurrence "
        "encoding matrix by a learned gate.",
        "## How to load it",
        f"```python\nimport rsa_hf  # pip install rsa_hf\nfrom transformers import {type(model).__name__}\n\n"
        f'model = {type(model).__name__}.from_pretrained("path/or/name")\n```',
        "Without `import rsa_hf` the checkpoint refuses to load, rather than run as a plain model.",
    ]
    if scores:
        parts += ["## Results", _score_table(scores)]
    if command:
        parts += ["## Training", f"```\n{command}\n```"]
    parts += ["## Gates and rates", f"```\n{report}\n```"]
    if plot:
        parts.append(f"![learned decay curves and gates]({plot})")
    parts += ["## Citation", f"```bibtex\n{_CITATION}\n```"]
    return ModelCard("\n\n".join(parts) + "\n")


def _score_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for score in scores.values() for name in score))
    rows = [["", *names], ["---"] * (len(names) + 1)]
    for run, score in scores.items():
        rows.append([run, *(f"{score[name]:.4g}" if name in score else "" for name in names)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
