"""Search the head plan of a language model: what `rsa-hf search-heads` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.tasks.language_model_trainer import LanguageModelTrainer
from rsa_hf.tasks.language_modeling import (
    LanguageModelingDataConfig,
    load_language_modeling_tokenizer,
    prepare_language_modeling,
)
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.run import load_model, require_positions_known, require_tokens_known
from rsa_hf.training.search import FoundPlan, head_plan_space, search_head_plans
from rsa_hf.training.settings import RunConfig
from rsa_hf.utils.locate import locate
from rsa_hf.utils.table import format_table

__all__ = ["heads_per_layer", "main", "plan_as_yaml", "search"]

METRIC = "eval_bits_per_byte"
SHOWN = 10
# What a score does not depend on.
BESIDE_THE_POINT = ("output_dir", "log_every_steps", "save_every_steps", "resume")


def main(
    arguments: Sequence[str], trials: int, dilations: Sequence[int], storage: Path | None = None
) -> list[FoundPlan]:
    """Search, print the best plans, and write the best one into the output folder as `head_plan.yaml`.

    Args:
        arguments: a YAML file and `--key value` settings, as `read_run_config` takes them.
        trials: how many in all.
        dilations: as of `head_plan_space`.
        storage: of `search_head_plans`; None: `head_plans.log` in the output folder.

    Raises:
        ImportError: optuna is not installed.
        OSError, ValueError: a file, a name or a setting does not fit.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    output = Path(config.training.output_dir)
    storage = output / "head_plans.log" if storage is None else storage
    found = search(config, trials, dilations, storage)
    rows = [["trial", "bits per byte", "regular", "cyclical pairs", "dilated regular", "dilated pairs", "dilation"]]
    for each in found[:SHOWN]:
        plan = each.plan
        counts = (plan.num_regular, plan.num_cyclical_pairs, plan.num_dilated_regular, plan.num_dilated_cyclical_pairs)
        score = "ended early" if each.score is None else f"{each.score:.5g}"
        rows.append([str(each.number), score, *(str(count or 0) for count in counts), str(plan.dilation or "")])
    text = plan_as_yaml(found[0].plan)
    path = output / "head_plan.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# The best of {len(found)} head plans: {found[0].score:.5g} bits per byte.\n{text}", "utf-8")
    print(f"\n{format_table(rows)}\n\nThe best of {len(found)}, for the file of a run:\n\n{text}")
    print(f"written: {path}, {storage}")
    return found


def search(
    config: RunConfig[LanguageModelingDataConfig],
    trials: int,
    dilations: Sequence[int],
    storage: Path,
    progress: bool = True,
) -> list[FoundPlan]:
    """Try head plans on the model of a run, each trained as the run says and scored on the validation text.

    The plan of the run is tried first, where it is the same in all layers and has one dilating factor. Its other
    settings (gates, layers) hold for all plans.

    Args:
        config: the run.
        trials: as of `search_head_plans`.
        dilations: as of `head_plan_space`.
        storage: as of `search_head_plans`.
        progress: show a bar for each trial.

    Returns:
        As `search_head_plans`.

    Raises:
        ImportError: optuna is not installed.
        OSError, ValueError: a file, a name or a setting does not fit.
    """
    training = config.training
    tokenizer_name = config.model.tokenizer or config.model.name_or_path
    if tokenizer_name is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; 'bytes' is one that needs no files.")
    rows = training.batch_size * training.gradient_accumulation_steps
    text = prepare_language_modeling(
        config.data, load_language_modeling_tokenizer(locate(tokenizer_name)), num_tracks=rows
    )
    plain = load_model(AutoModelForCausalLM, config.model, None)
    require_tokens_known(plain, text.vocab_size)
    require_positions_known(plain, "data.block_size", config.data.block_size)
    require_positions_known(plain, "data.eval_block_size", config.data.evaluation_block_size)
    num_heads = heads_per_layer(plain)
    base = replace(
        config.rsa or RSAConfig(),
        num_regular=None,
        num_cyclical_pairs=None,
        num_dilated_regular=None,
        num_dilated_cyclical_pairs=None,
        dilation=None,
    )

    def model_init(trial: Any) -> PreTrainedModel:
        if trial is None:  # the Trainer asks for one when it is made
            return plain
        return load_model(AutoModelForCausalLM, config.model, head_plan_space(trial, num_heads, dilations, base))

    settings = config.to_dict() | {"rsa": base.to_dict(), "dilations": list(dilations)}
    settings["training"] = {k: v for k, v in settings["training"].items() if k not in BESIDE_THE_POINT}
    trainer = LanguageModelTrainer(model_init, text, training, config.data.eval_memory, progress)
    first = None if config.rsa is None else config.rsa.resolved([num_heads])
    if first is not None and not _can_be_drawn(first, dilations):
        first = None
    return search_head_plans(trainer, METRIC, trials, storage, settings=settings, base=base, first=first)


def _can_be_drawn(plan: RSAConfig, dilations: Sequence[int]) -> bool:
    counts = (plan.num_regular, plan.num_cyclical_pairs, plan.num_dilated_regular, plan.num_dilated_cyclical_pairs)
    dilated = bool(plan.num_dilated_regular or plan.num_dilated_cyclical_pairs)
    uniform = not any(isinstance(count, tuple) for count in counts)
    return uniform and (plan.dilation in tuple(dilations) if dilated else plan.dilation is None)


def heads_per_layer(model: PreTrainedModel) -> int:
    """The number of attention heads H.

    Raises:
        ValueError: the model's config does not say.
    """
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(
            f"the config of a {type(model).__name__} has no num_attention_heads: no head plan can be made."
        )
    return heads


def plan_as_yaml(plan: RSAConfig) -> str:
    """The section `rsa` of a run's file, without what is as `RSAConfig()` has it."""
    defaults = RSAConfig().to_dict()
    values = {name: value for name, value in plan.to_dict().items() if value != defaults[name]}
    text: str = yaml.safe_dump({"rsa": values}, sort_keys=False)
    return text
