"""Search the head plan of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from rsa_hf.config import COUNTS, RSAConfig
from rsa_hf.tasks.language_model_trainer import LanguageModelTrainer
from rsa_hf.tasks.language_modeling import load_language_modeling_tokenizer, prepare_language_modeling, require_fit
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.training.arguments import RunConfig, read_run_config
from rsa_hf.training.run import load_model
from rsa_hf.training.search import FoundPlan, head_plan_space, search_head_plans
from rsa_hf.utils.text import format_table

__all__ = ["main", "plan_as_yaml", "search"]

# Training settings that do not change a score.
WITHOUT_EFFECT = ("output_dir", "log_every_steps", "report_to", "save_every_steps", "resume")


def main(arguments: Sequence[str], trials: int, dilations: Sequence[int], storage: Path | None = None) -> None:
    """Search, print the ten best plans, and write the best one to `head_plan.yaml` in the output folder.

    Args:
        arguments: a YAML file and `--key value` settings, as for `read_run_config`.
        trials: the total number of trials.
        dilations: as for `head_plan_space`.
        storage: as for `search_head_plans`; None: `head_plans.log` in the output folder.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    path = Path(config.training.output_dir) / "head_plan.yaml"
    storage = path.with_name("head_plans.log") if storage is None else storage
    found = search(config, trials, dilations, storage)
    rows = [["trial", "bits per byte", "regular", "cyclical pairs", "dilated regular", "dilated pairs", "dilation"]]
    for each in found[:10]:
        score = "ended early" if each.score is None else f"{each.score:.5g}"
        counts = (str(getattr(each.plan, name) or 0) for name in COUNTS)
        rows.append([str(each.number), score, *counts, str(each.plan.dilation or "")])
    text = plan_as_yaml(found[0].plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# The best of {len(found)} head plans: {found[0].score:.5g} bits per byte.\n{text}", "utf-8")
    print(f"\n{format_table(rows)}\n\nThe best of {len(found)}, for the YAML file of a run:\n\n{text}")
    print(f"written: {path}, {storage}")


def search(
    config: RunConfig[LanguageModelingDataConfig],
    trials: int,
    dilations: Sequence[int],
    storage: Path,
    progress: bool = True,
) -> list[FoundPlan]:
    """Train the model of a run with different head plans, and score each on the validation text.

    The run's own plan is tried first if the search space contains it: all layers equal, one of the given dilations.
    Its other settings (gates, layers) hold for all plans.

    Args:
        config: the run.
        trials: as for `search_head_plans`, whose result is returned.
        dilations: as for `head_plan_space`.
        storage: as for `search_head_plans`.
        progress: whether to show a progress bar for each trial.

    Raises:
        ImportError: optuna is not installed.
        OSError, ValueError: a file, a name or a setting is invalid.
    """
    training = config.training
    if config.calibrate is not None:
        raise ValueError(
            "rsa.calibrate: a search draws plans that count heads. Take calibrate out of the section rsa."
        )
    tokenizer = load_language_modeling_tokenizer(config.model.tokenizer or config.model.name_or_path)
    rows = training.batch_size * training.gradient_accumulation_steps
    text = prepare_language_modeling(config.data, tokenizer, num_tracks=rows)
    plain = load_model(AutoModelForCausalLM, config.model, None)
    require_fit(plain, text.vocab_size, config.data)
    num_heads = getattr(plain.config.get_text_config(), "num_attention_heads", None)
    if num_heads is None:
        raise ValueError(
            f"a {type(plain).__name__} has no num_attention_heads in its config to make a head plan of. Choose "
            "a model with attention."
        )
    drawn: dict[str, Any] = dict.fromkeys([*COUNTS, "dilation"])
    base = replace(config.rsa or RSAConfig(), **drawn)

    def model_init(trial: Any) -> PreTrainedModel:
        if trial is None:  # the Trainer's first model; it is not trained
            return plain
        return load_model(AutoModelForCausalLM, config.model, head_plan_space(trial, num_heads, dilations, base))

    settings = config.to_dict() | {"rsa": base.to_dict(), "dilations": list(dilations)}
    settings["training"] = {k: v for k, v in settings["training"].items() if k not in WITHOUT_EFFECT}
    trainer = LanguageModelTrainer(model_init, text, training, config.data.eval_memory, progress)
    first = None if config.rsa is None else config.rsa.resolved([num_heads])
    if first is not None and not _can_be_drawn(first, dilations):
        first = None
    return search_head_plans(trainer, "eval_bits_per_byte", trials, storage, settings=settings, base=base, first=first)


def _can_be_drawn(plan: RSAConfig, dilations: Sequence[int]) -> bool:
    """Whether `head_plan_space` contains a plan."""
    dilated = bool(plan.num_dilated_regular or plan.num_dilated_cyclical_pairs)
    uniform = not any(isinstance(getattr(plan, name), tuple) for name in COUNTS)
    return uniform and (plan.dilation in tuple(dilations) if dilated else plan.dilation is None)


def plan_as_yaml(plan: RSAConfig) -> str:
    """The section `rsa` of a run's YAML file, without default values."""
    defaults = RSAConfig().to_dict()
    values = {name: value for name, value in plan.to_dict().items() if value != defaults[name]}
    text: str = yaml.safe_dump({"rsa": values}, sort_keys=False)
    return text
