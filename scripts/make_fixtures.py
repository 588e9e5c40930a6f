"""Save tiny models and adapters with this version, for later versions to load.

    python scripts/make_fixtures.py

writes tests/fixtures/VERSION/, where VERSION is that of the package without its last number. tests/fixtures/0.1 was
written with version 0.1. Run it once for each release that changes what is saved. A folder that exists is not
replaced: the fixtures of a version must come from that version. tests/test_fixtures.py loads all of these folders;
tests/earlier_versions.py describes what is in them.

The models are random and seeded, so two runs write the same files. Gates and rates are moved away from where they
start, each to another value.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# First: it sets torch up for results that are the same on every processor.
from earlier_versions import MEMORIES, arithmetic, load_model, outputs, unnoticed  # noqa: E402, I001

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, PreTrainedModel  # noqa: E402

import rsa_hf.peft  # noqa: E402
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, patch_model  # noqa: E402

VOCAB, BATCH, LENGTH = 24, 2, 21
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 20}
POSITIONS = {"max_position_embeddings": 32}
LLAMA = {**BERT, **POSITIONS, "num_key_value_heads": 2, **SPECIAL}
GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 6, "n_positions": 32, **SPECIAL}
T5 = {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 6, "decoder_start_token_id": 0,
      "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
XL = {"cutoffs": [9, 14], "div_val": 2, "d_model": 12, "n_head": 6, "d_head": 4, "d_inner": 20, "n_layer": 2,
      "mem_len": 16, "clamp_len": 64, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
BLOCKS = {"d_model": 12, "n_head": 6, "d_head": 4, "d_inner": 20, "n_layer": 2, "window_size": 8,
          "recurrent_layers": [-1], "num_state_vectors": 3, "pad_token_id": 0}  # fmt: skip
BOTTLENECK = {**BERT, "chunk_size": 8, "num_states": 3, "pad_token_id": 0}
SRU = {"hidden_size": 10, "projection_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "mem_len": 16,
       "pad_token_id": 0}  # fmt: skip
RECURRENT = {"cell": "lstm", "hidden_size": 12, "num_hidden_layers": 2, "pad_token_id": 0}

PAIRS = RSAConfig(num_cyclical_pairs=1, num_dilated_cyclical_pairs=2, dilation=(2, 3, 2, 5))
FULL = RSAConfig(
    num_regular=1, num_cyclical_pairs=1, num_dilated_regular=1, num_dilated_cyclical_pairs=1, dilation=(2, 3, 4)
)
PER_HEAD = RSAConfig(
    num_regular=1,
    num_cyclical_pairs=1,
    num_dilated_cyclical_pairs=1,
    dilation=3,
    gate_per_head=True,
    parameter_scale=1.0,
)
# The encoder's second layer and both of the decoder's.
PER_LAYER = RSAConfig(
    heads=(
        HeadConfig(layer=1, head=0, kind="regular", decay=0.7, gate=0.3),
        HeadConfig(layer=1, head=1, kind="regular", decay=-0.7, gate=0.3, dilation=2),
        HeadConfig(layer=2, head=0, kind="cos", decay=0.8, gate=0.5, theta=0.8, pair=0),
        HeadConfig(layer=2, head=1, kind="sin", decay=0.8, gate=0.5, theta=0.8, pair=0),
        HeadConfig(layer=3, head=2, kind="sin", decay=0.6, gate=0.7, theta=0.4),
    ),
    gate_per_head=False,
)

NAMED = RSAConfig(
    heads=(
        HeadConfig(layer=0, head=1, kind="regular", decay=-0.4, gate=0.2),
        HeadConfig(layer=0, head=4, kind="sin", decay=0.7, gate=0.5, theta=1.1, dilation=2),
        HeadConfig(layer=1, head=5, kind="cos", decay=0.9, gate=0.8, theta=0.3),
    )
)

CAUSAL, MASKED, SEQUENCES, TRANSLATION = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSeq2SeqLM",
)
# Folder, model type, its Auto class, its sizes, and its plan: None for a model without attention.
MODELS: list[tuple[str, str, str, dict[str, Any], RSAConfig | None]] = [
    ("gpt2", "gpt2", CAUSAL, GPT2, RSAConfig()),
    ("gpt2_shards", "gpt2", CAUSAL, GPT2, FULL),
    ("roberta", "roberta", SEQUENCES, {**BERT, **SPECIAL, **POSITIONS, "num_labels": 3}, FULL),
    ("bert", "bert", MASKED, {**BERT, **SPECIAL, **POSITIONS}, PER_HEAD),
    ("llama", "llama", CAUSAL, LLAMA, RSAConfig.from_scratch(6)),
    ("llama_bfloat16", "llama", CAUSAL, {**LLAMA, "dtype": torch.bfloat16}, FULL),
    ("llama_named", "llama", CAUSAL, LLAMA, NAMED),
    ("bert_named", "bert", MASKED, {**BERT, **SPECIAL, **POSITIONS}, NAMED),
    ("t5", "t5", TRANSLATION, T5, PER_LAYER),
    ("transformer_xl", "transfo-xl", CAUSAL, XL, PAIRS),
    ("transformer_xl_classifier", "transfo-xl", SEQUENCES, XL, PAIRS),
    ("block_recurrent", "block-recurrent", CAUSAL, BLOCKS, PAIRS),
    ("block_recurrent_classifier", "block-recurrent", SEQUENCES, BLOCKS, PAIRS),
    ("temporal_latent_bottleneck", "temporal_latent_bottleneck", CAUSAL, BOTTLENECK, FULL),
    ("temporal_latent_bottleneck_classifier", "temporal_latent_bottleneck", SEQUENCES, BOTTLENECK, FULL),
    ("sru_plus_plus", "sru_plus_plus", CAUSAL, SRU, FULL),
    ("sru_plus_plus_classifier", "sru_plus_plus", SEQUENCES, SRU, FULL),
    ("recurrent", "recurrent", CAUSAL, RECURRENT, None),
    ("recurrent_classifier", "recurrent", SEQUENCES, {**RECURRENT, "bidirectional": True, "cell": "gru"}, None),
    ("recurrent_encoder_decoder", "recurrent_encoder_decoder", TRANSLATION, RECURRENT, None),
]
# Folder, model type, Auto class and sizes of the base, and the method beside RSA: None for RSA alone.
ADAPTERS: list[tuple[str, str, str, dict[str, Any], peft.PeftConfig]] = [
    ("gpt2_lora", "gpt2", CAUSAL, GPT2, peft.LoraConfig(r=2, task_type="CAUSAL_LM")),
    (
        "roberta_rsa_only",
        "roberta",
        SEQUENCES,
        {**BERT, **SPECIAL, **POSITIONS},
        rsa_hf.peft.rsa_only_config("SEQ_CLS"),
    ),
]
# Where the base of an adapter was when it was trained: a folder that is not there any longer.
FORMER_FOLDER = "/home/somebody/models/base-of-{name}"


def build(model_type: str, auto_class: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A random model; its weights are large, so that attention is far from uniform and nothing is multiplied by 0."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **sizes)
    model = getattr(transformers, auto_class).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            start = parameter if parameter.dim() == 1 else torch.zeros(())  # norms and biases stay near their start
            parameter.copy_(start + 0.3 * torch.randn(parameter.shape))
    return model.eval()


@torch.no_grad()
def move(model: torch.nn.Module) -> None:
    """Stands for training: move what would be trained of an adapter, and all gates and rates."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    for module in model.modules():
        if isinstance(module, RSAHeads):
            for name, parameter in module.named_parameters():
                start = 0.0 if name == "mu" else parameter * module.plan.parameter_scale
                parameter.copy_((start + 0.5 * torch.randn(parameter.shape)) / module.plan.parameter_scale)


def make_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The arguments of the calls: two where the model has a memory; else one, with a padded row."""
    tokens = torch.randint(3, VOCAB, (2, BATCH, LENGTH))
    if model.config.is_encoder_decoder:
        return {
            "0.input_ids": tokens[0],
            "0.attention_mask": padding(on_the_left=False),
            "0.decoder_input_ids": tokens[1, :, :-4].contiguous(),
        }
    if has_memory(model):
        return {"0.input_ids": tokens[0], "1.input_ids": tokens[1]}
    return {"0.input_ids": tokens[0], "0.attention_mask": padding(on_the_left=True)}


def padding(*, on_the_left: bool) -> torch.Tensor:
    """A mask whose last row has five tokens of padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, slice(0, 5) if on_the_left else slice(-5, None)] = 0
    return mask


def has_memory(model: PreTrainedModel) -> bool:
    """Whether the model can go on from an earlier segment."""
    returned = getattr(model.config, "keys_to_ignore_at_inference", ())
    return not set(MEMORIES).isdisjoint(returned) and not getattr(model.config, "bidirectional", False)


def write(folder: Path, auto_class: str, model: torch.nn.Module, save: Callable[[], None]) -> None:
    """Save a model with its inputs and outputs, and check that what is loaded computes the same."""
    inputs = make_inputs(model.get_base_model() if isinstance(model, peft.PeftModel) else model)
    expected = outputs(model, inputs)
    save()
    for card in folder.glob("**/README.md"):
        card.unlink()
    loaded = outputs(load_model(folder, auto_class), inputs)
    for name, tensor in expected.items():
        if not torch.equal(loaded[name], tensor):
            raise SystemExit(f"{folder.name}: {name} differs after loading.")
    missed, _ = unnoticed(model, inputs, expected, bitwise=False)
    if missed:
        raise SystemExit(f"{folder.name}: other values of {', '.join(missed)} hardly change an output.")
    save_file(inputs, folder / "inputs.safetensors")
    save_file(expected, folder / "expected.safetensors")
    written = {"auto_class": auto_class, "arithmetic": arithmetic()}
    (folder / "fixture.json").write_text(json.dumps(written, indent=2) + "\n")


def write_model(folder: Path, model_type: str, auto_class: str, sizes: dict[str, Any], plan: RSAConfig | None) -> None:
    model = build(model_type, auto_class, sizes)
    if plan is not None:
        patch_model(model, plan)
        move(model)
    shards = {"max_shard_size": "10KB"} if folder.name.endswith("_shards") else {}
    write(folder, auto_class, model, lambda: model.save_pretrained(folder / "checkpoint", **shards))


def write_adapter(
    folder: Path, model_type: str, auto_class: str, sizes: dict[str, Any], config: peft.PeftConfig
) -> None:
    base = build(model_type, auto_class, sizes)
    base.save_pretrained(folder / "base")
    base.name_or_path = FORMER_FOLDER.format(name=folder.name)
    model = rsa_hf.peft.get_peft_model(base, config, FULL).eval()
    move(model)
    write(folder, auto_class, model, lambda: model.save_pretrained(folder / "adapter"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "fixtures", help="the folder of all versions")
    folder = parser.parse_args().output / ".".join(rsa_hf.__version__.split(".")[:2])
    if folder.exists():
        raise SystemExit(f"{folder} exists. What a version has written stays as it is.")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    for name, *arguments in MODELS:
        write_model(folder / name, *arguments)
    for name, *arguments in ADAPTERS:
        write_adapter(folder / name, *arguments)
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
