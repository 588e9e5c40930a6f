"""The model card of a patched model, made from the template `model_card.md`.

Saving a patched model writes the card, and `write_card` writes one with results. A later save replaces the part
between two comments, which describes the weights saved with it, and leaves the rest of the card to its user.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import RepoCard
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.layer import RSAHeads
from rsa_hf.plots import plot_rem
from rsa_hf.report import rsa_report
from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.files import write_text

CARD, PLOT = "README.md", "rsa.png"
TEMPLATE = Path(__file__).with_name("model_card.md")
TAGS = ["rsa_hf", "rsa", "recurrence"]
RESULTS = "with RSA heads"  # ends the name of rsa_hf's entry of `model-index`
TASKS = {  # by the end of the class's name
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
# The Hub's metric for each name of a score. Scores with other names are only in the card's table.
METRICS = {name: name for name in ("accuracy", "f1", "roc_auc", "average_precision", "perplexity", "bits_per_byte")}
METRICS |= dict.fromkeys(("matthews_correlation", "mcc"), "matthews_correlation")
METRICS |= dict.fromkeys(("token_perplexity", "word_perplexity"), "perplexity")
METRICS |= {f"{name}_at_threshold": METRICS[name] for name in ("accuracy", "f1", "mcc")}

_BEGIN = "<!-- rsa_hf: generated on every save, down to the next rsa_hf comment -->"
_END = "<!-- rsa_hf: end -->"
_SECTION = re.compile(rf"<!-- rsa_hf: [^\n]*-->\n.*?{_END}", re.DOTALL)  # those of earlier versions too
_FRONT_MATTER = re.compile(r"\s*---\n")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

Scores = Mapping[str, Mapping[str, float]]


def write_card(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    base_model: str | None = None,
    dataset: str | None = None,
    scores: Scores | None = None,
    seed: int | None = None,
    plot: bool = True,
) -> Path | None:
    """Write the card of a patched model, README.md, into the folder where it is saved.

    An existing card keeps its text and metadata. rsa_hf's part of it is replaced, tags are added, and results that
    rsa_hf wrote are replaced by `scores`.

    Args:
        model: a patched model.
        folder: where the model is saved.
        name: the model's name on the Hub.
        base_model: the model that was patched; None: the name it was loaded from. Only a Hub id is shown.
        dataset: the training data. Only a Hub id goes into the metadata's `datasets`.
        scores: metrics by run or split, shown as a table. With a data set, those of the splits "validation" and "test"
            also go into the metadata's `model-index`, which the Hub shows.
        seed: the seed of the training run.
        plot: whether to draw `rsa.png` beside the card; it is left out if matplotlib is not installed.

    Returns:
        The card's path; None if there is a README without metadata, which is not a card and stays as it is.

    Raises:
        OSError: the card cannot be written; the existing one is unchanged.
        ValueError: the model has no RSA heads, or the existing card's metadata is invalid YAML.
    """
    heads = [module for module in model.modules() if isinstance(module, RSAHeads)]
    if not heads:
        raise ValueError("the model has no RSA heads, so it has no card. Call patch_model first.")
    path = Path(folder) / CARD
    present = path.read_text(encoding="utf-8") if path.exists() else None
    if present is not None and not _FRONT_MATTER.match(present):
        return None
    # FSDP2 puts a class that cannot be imported in front of the model's own.
    model_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    base_model = base_model if _is_hub_id(base_model) else _loaded_from(model)
    results = _results(model_class.__name__, dataset, scores or {})
    data = ModelCardData(
        library_name="transformers",
        base_model=base_model,
        datasets=[dataset] if dataset is not None and _is_hub_id(dataset) else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        tags=TAGS,
        model_name=f"{model_class.__name__} {RESULTS}" if results else None,
        eval_results=results or None,
    )
    picture = None
    # Reading a sharded or offloaded parameter needs all processes, but only the first one writes a card.
    parameters = [parameter for module in heads for parameter in module.parameters()]
    can_be_read = all(p.device.type != "meta" and not hasattr(p, "full_tensor") for p in parameters)
    if plot and can_be_read:
        with suppress(ImportError):  # no matplotlib
            plot_rem(model, path.with_name(PLOT))
            picture = PLOT
    training = {"base model": base_model, "data set": dataset, "seed": seed}
    plan = next(iter(saved_plans(model.config)))["plan"]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        begin=_BEGIN,
        end=_END,
        model_class=model_class.__name__,
        package="transformers" if hasattr(transformers, model_class.__name__) else model_class.__module__,
        name=name or "path/or/name",
        scores=scores,
        metrics=list(dict.fromkeys(metric for row in (scores or {}).values() for metric in row)),
        training=[f"{key}: {value}" for key, value in training.items() if value is not None],
        plan="{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in plan.items()) + "\n}",
        report=str(rsa_report(model)) if can_be_read else None,
        picture=picture,
    )
    write_text(path, str(card) if present is None else _merged(present, card))
    return path


def clear_card(folder: str | os.PathLike[str]) -> None:
    """Remove rsa_hf's part and its tags from the card in a folder where a plain model is saved."""
    path = Path(folder) / CARD
    if not path.exists() or not _SECTION.search(present := path.read_text(encoding="utf-8")):
        return
    card = RepoCard(_SECTION.sub("", present))
    card.data["tags"] = [tag for tag in _listed(card.data.get("tags")) if tag not in TAGS] or None
    write_text(path, str(card))


def _merged(present: str, new: ModelCard) -> str:
    """An existing card with the generated part of a new one."""
    try:
        # RepoCard, because ModelCard parses `model-index` and drops what does not fit.
        card = RepoCard(present)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"the metadata at the head of {CARD} is invalid: {error}") from error
    [section] = _SECTION.findall(new.text)
    # A function as replacement, so that backslashes in the section are not escapes.
    body, found = _SECTION.subn(lambda _: section, card.text, count=1)
    card.text = body if found else f"{card.text.rstrip()}\n\n{section}\n"
    data: dict[str, Any] = new.data.to_dict()  # type: ignore[no-untyped-call]
    entries = _listed(card.data.get("model-index"))
    others = [each for each in entries if not (isinstance(each, dict) and str(each.get("name")).endswith(RESULTS))]
    card.data["model-index"] = [*others, *data.pop("model-index", [])] or None
    for key, value in data.items():
        own = card.data.get(key)
        card.data[key] = list(dict.fromkeys([*_listed(own), *value])) if isinstance(value, list) else own or value
    return str(card)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _is_hub_id(name: str | None) -> bool:
    """Whether a name can be a model or data set on the Hub. An existing path is not one."""
    return name is not None and bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def _loaded_from(model: PreTrainedModel) -> str | None:
    # `outputs/best` looks like a Hub id too, but only a downloaded model has its config in the cache.
    name = str(getattr(model.config, "_name_or_path", ""))
    return name if _is_hub_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str) else None


def _results(class_name: str, dataset: str | None, scores: Scores) -> list[EvalResult]:
    """The scores on splits of the data set, as the Hub lists them; without NaN and infinity."""
    tasks = [task for ending, task in TASKS.items() if class_name.endswith(ending)]
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset if _is_hub_id(dataset) else "custom",
            dataset_name=dataset,
            dataset_split=split,
            metric_type=METRICS[name],
            metric_name=name.replace("_", " "),
            metric_value=value,
        )
        for task in tasks
        for split in ("validation", "test")
        for name, value in scores.get(split, {}).items()
        if dataset is not None and name in METRICS and math.isfinite(value)
    ]
