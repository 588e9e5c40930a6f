"""The model card of a patched model.

rsa_hf writes its part of README.md between two comments and regenerates it on every save; text outside of them is left
unchanged. The first comment stores, as JSON, the facts that the model does not hold (data sets, seeds, scores), so
that the part can be regenerated from the model and the previous card.

transformers writes README.md in three places: `push_to_hub` and `save_pretrained(push_to_hub=True)` put the Hub's
card, or an empty one, into the folder just before the upload, and `Trainer.create_model_card` replaces the card in the
output folder before `Trainer.push_to_hub` uploads it. `integration/saving.py` calls `write_card` after each of them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CardData, EvalResult, try_to_load_from_cache
from huggingface_hub.repocard import RepoCard
from huggingface_hub.repocard_data import eval_results_to_model_index
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.heads import RSAHeads
from rsa_hf.report import rsa_report
from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.files import write_text
from rsa_hf.utils.text import without_credentials

__all__ = ["CardFacts", "clear_card", "is_hub_id", "read_facts", "write_card"]

CARD = "README.md"
PLOT = "rsa.png"
TAGS = ("rsa_hf", "rsa", "recurrence")
TASKS = {  # by the end of the class's name
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
# The scores in the metadata: the name of the metric, on the Hub where it has it, and one that is shown.
METRICS = {
    "accuracy": ("accuracy", "Accuracy"),
    "f1": ("f1", "F1"),
    "matthews_correlation": ("matthews_correlation", "MCC"),
    "mcc": ("matthews_correlation", "MCC"),
    "roc_auc": ("roc_auc", "ROC AUC"),
    "average_precision": ("average_precision", "Average precision"),
    "accuracy_at_threshold": ("accuracy", "Accuracy at the threshold chosen on validation"),
    "f1_at_threshold": ("f1", "F1 at the threshold chosen on validation"),
    "mcc_at_threshold": ("matthews_correlation", "MCC at the threshold chosen on validation"),
    "perplexity": ("perplexity", "Perplexity"),
    "token_perplexity": ("perplexity", "Perplexity per token"),
    "word_perplexity": ("perplexity", "Perplexity per word"),
    "bits_per_byte": ("bits_per_byte", "Bits per byte"),
}

_BEGIN = "<!-- rsa_hf: generated on every save, down to the next rsa_hf comment"
_BEGIN_0_1 = "<!-- rsa_hf: from here to rsa_hf's next comment the card is made anew on every save"  # of version 0.1
_END = "<!-- rsa_hf: end -->"
_SECTION = re.compile(
    f"({re.escape(_BEGIN)}|{re.escape(_BEGIN_0_1)})(?P<facts>[^\\n]*) -->\\n.*?{re.escape(_END)}", re.DOTALL
)
_TITLE = re.compile(r"^(# \w+) with RSA heads$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\s*---\n")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

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
    """Facts for a model card that the model itself does not hold.

    Attributes:
        base_model: the model that was patched. Only a Hub id goes into the metadata: the Hub refuses a path.
        datasets: the training data. Only Hub ids go into the metadata's `datasets`.
        metrics: names of the metrics for the metadata; None: those of `scores`, as far as they are known.
        seeds: seeds of the training runs.
        scores: metrics by run or split, shown as a table. If there is one data set, those of its splits ("validation"
            and "test") also go into the metadata's `model-index`, which the Hub shows.
        command: the command that trained the model.
        name: the model's name on the Hub.
        dataset_config: the configuration of the data set, if it has several.
    """

    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = ()
    scores: Mapping[str, Mapping[str, float]] | None = None
    command: str | None = None
    name: str | None = None
    dataset_config: str | None = None

    def updated(self, other: CardFacts) -> CardFacts:
        """These facts, overridden by those that `other` has."""
        return replace(self, **{f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name)})


def is_hub_id(name: str | None) -> bool:
    """Whether a name can be a model or data set on the Hub. An existing path is not one."""
    return name is not None and bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def write_card(
    model: PreTrainedModel, folder: str | os.PathLike[str], facts: CardFacts | None = None, plot: bool = False
) -> Path | None:
    """Write the card of a patched model into a folder, or update the existing one.

    Missing facts are taken from the existing card. Outside of rsa_hf's part only its metadata changes: missing tags
    are added, results that rsa_hf wrote are replaced, and a base model that is no Hub id is removed.

    Args:
        model: a patched model.
        folder: where the model is saved.
        facts: facts that the model does not hold.
        plot: whether to draw `rsa.png` beside the card. It is left out if matplotlib is not installed.

    Returns:
        The card's path. None if `README.md` has no metadata, so is no model card; it is left unchanged.

    Raises:
        StorageError: the card cannot be written; the existing one is unchanged.
        ValueError: the model has no RSA heads, or the card's metadata is invalid YAML.
    """
    if not any(isinstance(module, RSAHeads) for module in model.modules()):
        raise ValueError("the model has no RSA heads, so it has no card. Call patch_model first.")
    path = Path(folder) / CARD
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"---\nlibrary_name: transformers\n---\n\n# {_class_of(model).__name__} with RSA heads\n"
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not _FRONT_MATTER.match(text):
            return None
    earlier = _facts_in(text)
    facts = earlier.updated(facts or CardFacts())
    if facts.base_model is None:
        facts = replace(facts, base_model=_loaded_from(model))
    picture = None
    if plot and _can_be_read(model):
        try:
            from rsa_hf.plots import plot_rem

            plot_rem(model, Path(folder) / PLOT)
            picture = PLOT
        except ImportError as error:
            logger.info("no picture on the card: %s", error)
    card = _read_card(text)
    _add_metadata(card.data, facts)
    _replace_results(card.data, _class_of(model).__name__, earlier, facts)
    section = without_credentials(_section(model, facts, picture))  # the command may hold a token
    # A function as replacement: backslashes of the section are not escapes.
    body, found = _SECTION.subn(lambda _: section, card.text, count=1)
    card.text = body if found else f"{card.text.rstrip()}\n\n{section}\n"
    write_text(path, str(card))
    return path


def clear_card(folder: str | os.PathLike[str]) -> None:
    """Remove rsa_hf's part from the card in a folder, after a plain model replaced a patched one there.

    Raises:
        StorageError: the card cannot be written; the existing one is unchanged.
        ValueError: the card's metadata is invalid YAML.
    """
    path = Path(folder) / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    facts = _facts_in(text)
    text, found = _SECTION.subn("", text, count=1)
    if found:
        card = _read_card(_TITLE.sub(r"\1", text, count=1))
        card.data["tags"] = [tag for tag in _listed(card.data.get("tags")) if tag not in TAGS] or None
        _replace_results(card.data, "", facts, CardFacts())
        write_text(path, f"{str(card).rstrip()}\n")


def read_facts(folder: str | os.PathLike[str]) -> CardFacts:
    """Read the facts on the card in a folder. They are empty if there is no card, or none of rsa_hf's."""
    path = Path(folder) / CARD
    return _facts_in(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else CardFacts()


def _read_card(text: str) -> RepoCard:
    try:
        # RepoCard, because ModelCard parses `model-index` into EvalResults and drops what does not fit them.
        return RepoCard(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"the metadata at the head of {CARD} is invalid: {error}") from error


def _loaded_from(model: PreTrainedModel) -> str | None:
    # `outputs/best` looks like a Hub id too, but only a downloaded model has its config in the cache.
    name = str(getattr(model.config, "_name_or_path", ""))
    return name if is_hub_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str) else None


def _add_metadata(data: CardData, facts: CardFacts) -> None:
    """Add to a card's metadata; existing entries stay."""
    base = [name for name in _listed(data.get("base_model")) if is_hub_id(name)]
    if not base and is_hub_id(facts.base_model):
        base = [facts.base_model]
    scored = [name for score in (facts.scores or {}).values() for name in score]
    metrics = facts.metrics if facts.metrics is not None else [METRICS[name][0] for name in scored if name in METRICS]
    lists = {"tags": TAGS, "datasets": filter(is_hub_id, facts.datasets), "metrics": metrics}
    data["library_name"] = data.get("library_name") or "transformers"
    data["base_model"] = base[0] if len(base) == 1 else base or None
    for key, more in lists.items():
        data[key] = list(dict.fromkeys([*_listed(data.get(key)), *more])) or None


def _replace_results(data: CardData, class_name: str, earlier: CardFacts, facts: CardFacts) -> None:
    """Replace the results of earlier facts in a card's `model-index`; other entries stay, well-formed or not."""
    before = _results(earlier, sorted(set(TASKS.values())))
    now = _results(facts, [task for ending, task in TASKS.items() if class_name.endswith(ending)])
    models = _listed(data.get("model-index"))
    lists = [each["results"] for each in models if isinstance(each, dict) and isinstance(each.get("results"), list)]
    for results in lists:
        results[:] = [result for result in results if result not in before]
    if now and lists:
        lists[0] += now  # the Hub expects one model
    elif now:
        models.append({"name": class_name, "results": now})
    data["model-index"] = models or None


def _results(facts: CardFacts, tasks: list[str]) -> list[Any]:
    """The scores on the splits of the data set, as the Hub lists them in `model-index`; no NaN or infinity."""
    if len(facts.datasets) != 1:
        return []
    [dataset] = facts.datasets
    found = [
        EvalResult(
            task_type=task,
            dataset_type=dataset if is_hub_id(dataset) else "custom",
            dataset_name=dataset,
            dataset_config=facts.dataset_config,
            dataset_split=split,
            metric_type=METRICS[name][0],
            metric_name=METRICS[name][1],
            metric_value=value,
        )
        for task in tasks
        for split in ("validation", "test")
        for name, value in (facts.scores or {}).get(split, {}).items()
        if name in METRICS and math.isfinite(value)
    ]
    [model] = eval_results_to_model_index("", found)
    return list(model["results"])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


# --- the generated part ---------------------------------------------------------------------------------------------


def _section(model: PreTrainedModel, facts: CardFacts, plot: str | None) -> str:
    name, cls = facts.name or "path/or/name", _class_of(model)
    parts = [
        f"{_BEGIN} {_to_json(facts)} -->",
        "## RSA heads",
        "This model uses self-attention with recurrence (RSA, ICLR 2023). In each head listed below, a learned gate "
        "mixes attention with a recurrence encoding matrix P: `RSA(X) = {[1 − σ(μ)] · softmax(QKᵀ/√D) + σ(μ) · P} V`.",
        "### How to load it",
        f"```python\nimport rsa_hf  # pip install rsa_hf\nfrom {_place_of(cls)} import {cls.__name__}\n\n"
        f'model = {cls.__name__}.from_pretrained("{name}")\n```',
        "Import `rsa_hf` first. Without it, loading this checkpoint is an error.",
    ]
    if facts.scores:
        parts += ["### Results", _score_table(facts.scores)]
    training = []
    if facts.base_model:
        # A local path means nothing to others and may reveal the user's name.
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
        parts.append(f"```\n{rsa_report(model)}\n```")
    else:
        parts.append("Their values were not available when the model was saved. `rsa-hf card FOLDER` adds them.")
    if plot:
        parts.append(f"![learned decay curves and gates]({plot})")
    parts += ["### Citation", f"```bibtex\n{_CITATION}\n```", _END]
    return "\n\n".join(parts)


def _class_of(model: PreTrainedModel) -> type:
    """The class of a model, without the class that FSDP2 puts in front of it, which cannot be imported."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def _place_of(cls: type) -> str:
    """The outermost package that exports a class, else the class's own module."""
    parts = cls.__module__.split(".")
    places = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next(
        (place for place in places if getattr(sys.modules.get(place), cls.__name__, None) is cls), cls.__module__
    )


def _can_be_read(model: PreTrainedModel) -> bool:
    """Whether this process holds all gates and rates: none is offloaded or sharded.

    Reading a sharded parameter needs all processes, but only the first one writes a card, so it would wait for ever.
    """
    heads = [module for module in model.modules() if isinstance(module, RSAHeads)]
    parameters = [parameter for module in heads for parameter in module.parameters()]
    return all(p.device.type != "meta" and not hasattr(p, "full_tensor") for p in parameters)


def _plan(model: PreTrainedModel) -> str:
    content = next(iter(saved_plans(model.config)))
    # One line per setting: with an indent, json.dumps gives each number in a list a line of its own.
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
    if not is_hub_id(known.get("base_model")):
        known.pop("base_model", None)
    # Escaped, so that no value can end the comment with "-->".
    return json.dumps(known).replace("<", "\\u003c").replace(">", "\\u003e")


def _facts_in(text: str) -> CardFacts:
    """The facts in a card's comment; none if it was edited and is no JSON object of facts any more."""
    match = _SECTION.search(text)
    try:
        content = json.loads(match["facts"]) if match else {}
    except json.JSONDecodeError:
        return CardFacts()
    known = {field.name: content[field.name] for field in fields(CardFacts) if field.name in content}
    facts: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
    return CardFacts(**facts)
