"""Transformer-XL as transformers 4.57 computes it, which ours is compared with.

    python -m venv reference && reference/bin/pip install torch transformers==4.57.1
    reference/bin/python scripts/transformer_xl_reference.py --output tests/models/golden

writes small random checkpoints, saved by transformers 4.57, and what it computes with them on two segments with
memory. The environment is one of its own, because transformers 5 has no Transformer-XL.

One line of the reference crashes on today's torch (`type_as(dtype=…)`); it is replaced while it is imported. Nothing
else is.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

VERSION = "4.57.1"

TINY = {
    "vocab_size": 29, "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "n_layer": 2,
    "mem_len": 6, "clamp_len": -1, "same_length": False, "dropout": 0.0, "init_std": 0.3, "proj_init_std": 0.3,
}  # fmt: skip
BANDS = {"cutoffs": [7, 13, 20]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"cutoffs": [], "div_val": 1, "untie_r": False},
    "one_table": {**BANDS, "div_val": 1, "same_length": True, "clamp_len": 9},
    "one_table_projected": {**BANDS, "div_val": 1, "d_embed": 12, "pre_lnorm": True, "clamp_len": 9},
    "tables": {**BANDS, "div_val": 2, "same_length": True, "clamp_len": 9},
    "tables_untied": {**BANDS, "div_val": 2, "pre_lnorm": True, "proj_share_all_but_first": False},
    "clamped": {"cutoffs": [], "div_val": 1, "clamp_len": 3},
}
SEGMENTS, BATCH, LENGTH = 2, 3, 8


def load_reference() -> Any:
    """The module of transformers 4.57, with the line that crashes replaced."""
    assert transformers.__version__ == VERSION, transformers.__version__
    name = "transformers.models.deprecated.transfo_xl.modeling_transfo_xl"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    broken, whole = ".type_as(\n                dtype=word_emb.dtype\n            )", ".to(dtype=word_emb.dtype)"
    assert source.count(broken) == 1
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source.replace(broken, whole), spec.origin, "exec"), module.__dict__)  # noqa: S102
    return module


def write_cases(output: Path, seed: int) -> None:
    """One folder a case: a checkpoint, and `expected.safetensors` with tokens and results."""
    reference = load_reference()
    for case, settings in CASES.items():
        torch.manual_seed(seed)
        model = reference.TransfoXLLMHeadModel(transformers.TransfoXLConfig(**{**TINY, **settings})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Fresh biases are zero, and cluster weights of one sign would hide which is whose.
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
        # transformers 4.57 cannot save biases that layers share as safetensors.
        model.save_pretrained(output / case, safe_serialization=settings.get("untie_r", True))
        tokens = torch.randint(TINY["vocab_size"], (SEGMENTS, BATCH, LENGTH))
        expected, mems = {"tokens": tokens}, None
        for i, segment in enumerate(tokens):
            losses = model(segment, mems=mems, labels=segment)
            model.zero_grad()
            losses.loss.backward()
            expected[f"loss.{i}"] = losses.loss.detach()
            expected[f"gradient.{i}"] = model.transformer.layers[0].dec_attn.qkv_net.weight.grad.clone()
            out = model(segment, mems=mems)
            mems = out.mems
            expected[f"logits.{i}"] = out.logits.detach()
            # Positions first there, rows first with us.
            expected[f"mems.{i}"] = torch.stack(mems).transpose(1, 2).contiguous()
        save_file(expected, output / case / "expected.safetensors", metadata={"torch": torch.__version__})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoints and their results")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and tokens")
    arguments = parser.parse_args()
    write_cases(arguments.output, arguments.seed)
