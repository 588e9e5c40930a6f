"""The model card of a patched model, and how it lives beside cards that others write.

What rsa_hf writes on a card stands between two comments and is made anew on every save; what stands outside of them
is left as it is. The first comment holds, as JSON, what the model itself does not know (data sets, seeds, scores), so
that a card can be made anew from the model and the card before it.

transformers writes README.md in three places: `push_to_hub` and `save_pretrained(push_to_hub=True)` put the card of
the Hub, or an empty one, into the folder just before it is uploaded, and `Trainer.create_model_card` replaces the one
in the output folder before `Trainer.push_to_hub` uploads that. So `hooks/saving.py` calls `write_card` after each.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from huggingface_hub import CardData, ModelCard, try_to_load_from_cache
from huggingface_hub.repocard import RepoCard
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads
from rsa_hf.report import RSAReport, rsa_report
from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.credentials import without_credentials
from rsa_hf.utils.files import write_text

__all__ = ["CardFacts", "clear_card", "is_hub_id", "model_card", "read_facts", "write_card"]

CARD = "README.md"
PLOT = "rsa.png"
TAGS = ("rsa_hf", "rsa", "recurrence")
HUB_METRICS = ("accuracy", "f1", "matthews_correlation", "perplexity")  # as the Hub calls them

_BEGIN = "<!-- rsa_hf: from here to rsa_hf's next comment the card is made anew on every save"
_END = "<!-- rsa_hf: end -->"
_SECTION = re.compile(re.escape(_BEGIN) + r"(?P<facts>[^\n]*) -->\n.*?" + re.escape(_END), re.DOTALL)
_TITLE = re.compile(r"^(# \w+) with RSA heads$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\s*---\n")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_BAR = 20  # characters of a gate that is wide open

_CITATION = """@inproceedings{huang2023encoding,
  title     = {Encoding Recurrence into Transformers},
  author    = {Huang, Feiqing and Lu, Kexin and Cai, Yuxi and Qin, Zhen and Fang, Yanwen and Tian, Guangjian and
               Li, Guodong},
  booktitle = {International Conference on Learning Representations},
  year      = {2023}
}"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CardFacts:
    """What a card says that cannot be read off the model.

    Attributes:
        base_model: what was patched. Into the card's metadata goes only what can be a Hub id: the Hub refuses a path.
        datasets: what it was trained on; those that can be Hub ids go into the metadata.
        metrics: names of the metrics, for the metadata; None: those of `scores`.
        seeds: of the training runs.
        scores: tables of metrics, by the name of the run or split; shown as they are.
        command: what trained the model.
        name: the model's own name on the Hub.
    """

    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = ()
    scores: Mapping[str, Mapping[str, float]] | None = None
    command: str | None = None
    name: str | None = None

    def updated(self, other: CardFacts) -> CardFacts:
        """These facts, with those that `other` has in their place."""
        return replace(self, **{f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name)})


def is_hub_id(name: str | None) -> bool:
    """Whether a name can be that of a model or data set on the Hub; the path of something that exists cannot."""
    return name is not None and bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def model_card(model: PreTrainedModel, facts: CardFacts | None = None, *, plot: str | None = None) -> ModelCard:
    """The card of a patched model: how to load it, its plan and its gates, and what it scored.

    Args:
        model: a patched model.
        facts: what the model does not know. Where they name no base model, it is the Hub id that the model was loaded
            from, if it was.
        plot: file name of a picture beside the card.

    Returns:
        The card: `card.save(folder / "README.md")`.

    Raises:
        ValueError: the model has no RSA heads.
    """
    return ModelCard(str(_merge(None, model, facts or CardFacts(), plot)))


def write_card(
    model: PreTrainedModel, folder: str | os.PathLike[str], facts: CardFacts | None = None, plot: bool = False
) -> Path | None:
    """Write the card of a patched model into a folder, or bring the one that is there up to date.

    Facts that are not given are taken from the card that is there. Of that card nothing else is changed, but tags that
    are missing are added to its metadata, and a base model that is no Hub id is taken out.

    Args:
        model: a patched model.
        folder: where it is saved.
        facts: what the model does not know.
        plot: whether to draw `rsa.png` beside the card; left out where matplotlib is not installed.

    Returns:
        The card's path; None where `README.md` is no model card (it has no metadata), and so was left alone.

    Raises:
        StorageError: the card cannot be written; the one that is there is as it was.
        ValueError: the model has no RSA heads, or the card's metadata is no YAML.
    """
    path = Path(folder) / CARD
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else None
    if text is not None and not _FRONT_MATTER.match(text):
        return None
    known = CardFacts() if text is None else _facts_in(text)
    picture = None
    if plot and _can_be_read(model):
        try:
            from rsa_hf.plots import plot_rem

            plot_rem(model, Path(folder) / PLOT)
            picture = PLOT
        except ImportError as error:
            logger.info("no picture on the card: %s", error)
    card = _merge(text, model, known.updated(facts or CardFacts()), picture)
    write_text(path, str(card))  # whole: a card that someone has written into must not be lost half-way
    return path


def clear_card(folder: str | os.PathLike[str]) -> None:
    """Take what rsa_hf wrote off the card in a folder, where a plain model has taken a patched one's place.

    Raises:
        StorageError: the card cannot be written; the one that is there is as it was.
        ValueError: the card's metadata is no YAML.
    """
    path = Path(folder) / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    text, found = _SECTION.subn("", text, count=1)
    if found:
        card = _read_card(_TITLE.sub(r"\1", text, count=1))
        card.data["tags"] = [tag for tag in _listed(card.data.get("tags")) if tag not in TAGS] or None
        write_text(path, f"{str(card).rstrip()}\n")


def read_facts(folder: str | os.PathLike[str]) -> CardFacts:
    """The facts on the card in a folder; none where there is no card, or one without a part of rsa_hf's."""
    path = Path(folder) / CARD
    return _facts_in(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else CardFacts()


def _merge(text: str | None, model: PreTrainedModel, facts: CardFacts, plot: str | None) -> RepoCard:
    if not any(isinstance(module, RSAHeads) for module in model.modules()):
        raise ValueError("the model has no RSA heads, so there is nothing to say on a card. Call patch_model first.")
    if facts.base_model is None:
        facts = replace(facts, base_model=_loaded_from(model))
    section = without_credentials(_section(model, facts, plot))  # the command may be one with a token
    if text is None:
        text = f"---\nlibrary_name: transformers\n---\n\n# {_class_of(model).__name__} with RSA heads\n"
    card = _read_card(text)
    _add_metadata(card.data, facts)
    # A function in place of the text: a backslash in it is no escape.
    body, found = _SECTION.subn(lambda _: section, card.text, count=1)
    card.text = body if found else f"{card.text.rstrip()}\n\n{section}\n"
    return card


def _read_card(text: str) -> RepoCard:
    try:
        # Not a ModelCard: that one reads `model-index` into objects, and drops what it does not understand.
        return RepoCard(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"the metadata at the head of {CARD} cannot be read: {error}") from error


def _loaded_from(model: PreTrainedModel) -> str | None:
    # `outputs/best` may look like a Hub id and be none: a model that was downloaded has left its config in the cache.
    name = str(getattr(model.config, "_name_or_path", ""))
    return name if is_hub_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str) else None


def _add_metadata(data: CardData, facts: CardFacts) -> None:
    """Put into a card's metadata what belongs there; what is there already stays."""
    base = [name for name in _listed(data.get("base_model")) if is_hub_id(name)]
    if not base and is_hub_id(facts.base_model):
        base = [facts.base_model]
    scored = [name for score in (facts.scores or {}).values() for name in score]
    metrics = facts.metrics if facts.metrics is not None else [name for name in scored if name in HUB_METRICS]
    lists = {
        "tags": TAGS,
        "datasets": [name for name in facts.datasets if is_hub_id(name)],
        "metrics": metrics,
    }
    merged = {key: list(dict.fromkeys([*_listed(data.get(key)), *more])) for key, more in lists.items()}
    entries = {"library_name": data.get("library_name") or "transformers", "base_model": base, **merged}
    for key, value in entries.items():
        data[key] = value[0] if key == "base_model" and len(value) == 1 else value or None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


# --- the part that is made anew -------------------------------------------------------------------------------------


def _section(model: PreTrainedModel, facts: CardFacts, plot: str | None) -> str:
    name, cls = facts.name or "path/or/name", _class_of(model)
    parts = [
        f"{_BEGIN} {_to_json(facts)} -->",
        "## RSA heads",
        "Self-attention with recurrence (RSA, ICLR 2023): in the heads below, attention is mixed with a recurrence "
        "encoding matrix by a learned gate, `RSA(X) = {[1 − σ(μ)] · softmax(QKᵀ/√D) + σ(μ) · P} V`.",
        "### How to load it",
        f"```python\nimport rsa_hf  # pip install rsa_hf\nfrom {_place_of(cls)} import {cls.__name__}\n\n"
        f'model = {cls.__name__}.from_pretrained("{name}")\n```',
        "Without `import rsa_hf` the checkpoint refuses to load, rather than run as a plain model.",
    ]
    if facts.scores:
        parts += ["### Results", _score_table(facts.scores)]
    training = []
    if facts.base_model:
        # The path of a folder means nothing to others, and may say more of its owner than is meant.
        shown = facts.base_model if is_hub_id(facts.base_model) else "a local checkpoint"
        training.append(f"* base model: {shown}")
    if facts.datasets:
        training.append(f"* data sets: {', '.join(facts.datasets)}")
    if facts.seeds:
        training.append(f"* seeds: {', '.join(map(str, facts.seeds))}")
    if training or facts.command:
        parts.append("### Training")
        parts += ["\n".join(training)] if training else []
        parts += [f"```\n{facts.command}\n```"] if facts.command else []
    parts += ["### Plan", f"```json\n{_plan(model)}\n```"]
    parts.append("### Gates and rates")
    if _can_be_read(model):
        report = rsa_report(model)
        parts.append(f"```\n{_gates(report)}\n\n{report}\n```")
    else:
        parts.append("Not known where the model was saved; `rsa-hf card FOLDER` fills them in.")
    if plot:
        parts.append(f"![learned decay curves and gates]({plot})")
    parts += ["### Citation", f"```bibtex\n{_CITATION}\n```", _END]
    return "\n\n".join(parts)


def _class_of(model: PreTrainedModel) -> type:
    """The class of a model; not the one that FSDP2 makes of it, which nobody can import."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def _place_of(cls: type) -> str:
    """Where others import a class from: the outermost package that has it, or else its own module."""
    parts = cls.__module__.split(".")
    places = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next(
        (place for place in places if getattr(sys.modules.get(place), cls.__name__, None) is cls), cls.__module__
    )


def _can_be_read(model: PreTrainedModel) -> bool:
    """Whether this process has the gates and rates, and none of them is offloaded or spread over several.

    To read what is spread out all processes have to take part, but only the first one writes a card: it would wait for
    ever.
    """
    heads = [module for module in model.modules() if isinstance(module, RSAHeads)]
    parameters = [parameter for module in heads for parameter in module.parameters()]
    return all(p.device.type != "meta" and not hasattr(p, "full_tensor") for p in parameters)


def _gates(report: RSAReport) -> str:
    """The mean gate of each layer as a bar: what a picture would show, for readers without one."""
    width = max(len(layer.module) for layer in report.layers)
    lines = [f"{'gate'.ljust(width)}  0 is attention only, 1 is recurrence only"]
    for layer in report.layers:
        gate = fmean(head.gate for head in layer.heads)
        bar = "█" * round(_BAR * gate)
        lines.append(f"{layer.module.ljust(width)}  {bar.ljust(_BAR, '░')}  {gate:.4f}")
    return "\n".join(lines)


def _plan(model: PreTrainedModel) -> str:
    content = next(iter(saved_plans(model.config)))
    # One line a setting: the lists of numbers in it would fill pages.
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content["plan"].items())
    return f"{{\n{lines}\n}}"


def _score_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for score in scores.values() for name in score))
    rows = [["", *names], ["---"] * (len(names) + 1)]
    for run, score in scores.items():
        rows.append([run, *(f"{score[name]:.4g}" if name in score else "" for name in names)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# --- facts ----------------------------------------------------------------------------------------------------------


def _to_json(facts: CardFacts) -> str:
    known = {name: value for name, value in asdict(facts).items() if value}
    if "base_model" in known and not is_hub_id(known["base_model"]):
        del known["base_model"]
    # A comment ends at "-->", which no value may bring along.
    return json.dumps(known).replace("<", "\\u003c").replace(">", "\\u003e")


def _facts_in(text: str) -> CardFacts:
    """The facts on a card, which may be anyone's: what is not of the right type is not taken."""
    match = _SECTION.search(text)
    try:
        content = json.loads(match["facts"]) if match else {}
    except json.JSONDecodeError:
        content = {}
    if not isinstance(content, dict):
        return CardFacts()
    known: dict[str, Any] = {
        key: content[key] for key in ("base_model", "command", "name") if isinstance(content.get(key), str)
    }
    for key, kind in (("datasets", str), ("metrics", str), ("seeds", int)):
        entries = content.get(key)
        if isinstance(entries, list) and all(isinstance(entry, kind) for entry in entries):
            known[key] = tuple(entries)
    scores = content.get("scores")
    if isinstance(scores, dict) and all(
        isinstance(score, dict) and all(isinstance(figure, (int, float)) for figure in score.values())
        for score in scores.values()
    ):
        known["scores"] = scores
    return CardFacts(**known)
