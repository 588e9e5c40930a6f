"""Kinds of models, and the outputs that each gives alone.

As a script it writes the outputs of plain models before rsa_hf is imported, then those of patched models.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from architectures import build_adapted
from families import VOCAB, build_language_model

FAMILIES = ("gpt2", "llama", "bloom")
SEEDS = (0, 1)
PLANS = (
    {"num_regular": 2, "num_cyclical_pairs": 1, "gate_init": 0.5},
    {"num_dilated_cyclical_pairs": 2, "dilation": [2, 3, 2, 5], "gate_init": 1.0, "layers": [1]},
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """All that a model's outputs depend on; `plan` is an index of PLANS, or None."""

    family: str
    seed: int
    plan: int | None = None
    dtype: torch.dtype = torch.float32


KINDS = [Kind(*kind) for kind in product(FAMILIES, SEEDS, (None, 0, 1), DTYPES)]
KINDS.sort(key=lambda kind: kind.plan is not None)  # plain ones first, before rsa_hf is imported


def build(family: str, seed: int) -> PreTrainedModel:
    """Build a plain model, with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_adapted(family, language_model=True) if family == "bloom" else build_language_model(family)


def batch_of(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Tokens and padding for each family and seed."""
    generator = torch.Generator().manual_seed(10 * seed + FAMILIES.index(family))
    ids = torch.randint(3, VOCAB, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : 2 + seed] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def outputs(model: PreTrainedModel, kind: Kind) -> list[torch.Tensor]:
    """Logits of a batch, and of the next step with a cache."""
    batch = batch_of(kind.family, kind.seed)
    first = model(**batch, use_cache=True)
    step = torch.full((2, 1), 5)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(step)], 1)
    second = model(input_ids=step, attention_mask=mask, past_key_values=first.past_key_values)
    return [first.logits, second.logits]


def looks(model: nn.Module) -> list[tuple[str, str, list[str], list[str]]]:
    """The class, attributes, parameters and hooks of each module, which a plain model must keep."""
    found = []
    for name, module in model.named_modules():
        of_class = f"{type(module).__module__}.{type(module).__qualname__}"
        hooks = [key for key in vars(module) if "hook" in key and vars(module)[key]]
        found.append((name, of_class, sorted(vars(module)), sorted([*dict(module.named_parameters()), *hooks])))
    return found


def main(path: str) -> None:
    """Save what each kind gives alone."""
    torch.set_num_threads(1)
    written: dict[str, Any] = {"outputs": {}, "looks": {}, "configs": {}}
    for kind in KINDS:
        if kind.plan is None:
            assert "rsa_hf" not in sys.modules
            model = build(kind.family, kind.seed).to(kind.dtype)
            written["looks"][kind] = looks(model)
            written["configs"][kind] = model.config.to_dict()
        else:
            from rsa_hf import patch_model

            model = patch_model(build(kind.family, kind.seed), PLANS[kind.plan]).to(kind.dtype)
        written["outputs"][kind] = outputs(model, kind)
        if kind.plan is None:
            written["attention functions"] = sorted(ALL_ATTENTION_FUNCTIONS)
    torch.save(written, path)


if __name__ == "__main__":
    # The classes are to be those of the module that the tests import.
    from reliability import neighbours

    neighbours.main(sys.argv[1])
