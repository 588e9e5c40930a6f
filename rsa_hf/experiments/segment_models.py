"""Models that carry a memory along a text, and their training on consecutive segments."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.arms import DAMPED, damp
from rsa_hf.experiments.runner.data import data_file
from rsa_hf.patching import patch_model
from rsa_hf.tasks.text8 import TEXT8_SYMBOLS, clean_text8
from rsa_hf.tasks.text_blocks import EvaluationSegments, TrainingTracks
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts
from rsa_hf.training.carried import CarriedState
from rsa_hf.training.optimizer import param_groups

__all__ = [
    "ARCHITECTURES",
    "ARMS",
    "SHAPES",
    "SegmentedText",
    "Shape",
    "build",
    "read_segments",
    "rsa_plan",
    "train_on_segments",
]

ARMS = ("plain", "rsa", DAMPED)
ARCHITECTURES = ("transformer-xl", "block-recurrent")


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its batches.

    Attributes:
        layers: of each architecture; one of the Block-Recurrent Transformer's is recurrent and has no RSA heads.
        recurrent_layer: its index.
        width: of hidden states.
        heads: per layer.
        inner: width of the feed-forward layers.
        segment: tokens in a segment, and in Transformer-XL's memory.
        window: tokens between two updates of the states. Less than a segment: an update is learned only where a
            window follows it in the same segment.
        states: of the recurrent layer.
        batch: segments in a step.
        dropout: of both architectures.
        pre_lnorm: of Transformer-XL: layers normalise what they read, not what they add up. The published ones do not,
            and learn no more than the frequencies of symbols in the hundred steps of a small run.
    """

    layers: dict[str, int]
    recurrent_layer: int
    width: int
    heads: int
    inner: int
    segment: int
    window: int
    states: int
    batch: int
    dropout: float
    pre_lnorm: bool


SHAPES = {
    "small": Shape({"transformer-xl": 2, "block-recurrent": 3}, 1, 64, 8, 128, 64, 32, 8, 8, 0.0, True),
    "14 layers": Shape({"transformer-xl": 14, "block-recurrent": 14}, -3, 512, 8, 2048, 512, 256, 512, 22, 0.1, False),
}
# Of two dilated cyclical pairs in 8 heads.
PUBLISHED_DILATION = {"enwik8": (3, 6, 9, 12), "text8": (6, 6, 12, 12)}


@dataclass(frozen=True)
class SegmentedText:
    """A text to train on and two to score, in segments.

    Attributes:
        train: as many tracks as a step has segments.
        validation: to choose by.
        test: to report.
        vocab_size: number of symbols.
    """

    train: TrainingTracks
    validation: EvaluationSegments
    test: EvaluationSegments
    vocab_size: int


@functools.lru_cache(maxsize=4)  # each cell of an experiment asks again
def _texts(corpus: str) -> dict[str, bytes]:
    if corpus == "python":
        return read_texts(LanguageModelingDataConfig())
    path = data_file("enwik8/enwik8_prefix.xz")
    texts = read_texts(LanguageModelingDataConfig(source="files", files={"train": str(path)}))
    return {split: clean_text8(text) for split, text in texts.items()} if corpus == "text8" else texts


def read_segments(corpus: str, shape: Shape, eval_bytes: int) -> SegmentedText:
    """A corpus in segments, cut 90 / 5 / 5 in order.

    Args:
        corpus: `enwik8` (its prefix, bytes), `text8` (made of that, 27 symbols) or `python` (source code of the
            standard library, bytes, split by file).
        shape: how it is cut.
        eval_bytes: at most so many of the validation and of the test text.

    Raises:
        FileNotFoundError: the data is missing.
    """
    texts = _texts(corpus)

    def tokens(text: bytes) -> Tensor:
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # The tokens of `text8_tokenizer`, for all at once.
        return torch.where(codes == ord(" "), 0, codes - ord("a") + 1) if corpus == "text8" else codes

    def evaluation(split: str) -> EvaluationSegments:
        text = texts[split][:eval_bytes]
        return EvaluationSegments(tokens(text), shape.segment, len(text) - 1, len(text[1:].split()))

    return SegmentedText(
        TrainingTracks(tokens(texts["train"]), shape.segment, shape.batch),
        evaluation("validation"),
        evaluation("test"),
        len(TEXT8_SYMBOLS) if corpus == "text8" else 256,
    )


def rsa_plan(shape: Shape, corpus: str) -> RSAConfig:
    """The plan of a size, for a text: the published one at 14 layers, else that for models trained from scratch."""
    if shape is SHAPES["14 layers"]:
        return RSAConfig(num_dilated_cyclical_pairs=2, dilation=PUBLISHED_DILATION[corpus], gate_init=1.0)
    return RSAConfig.from_scratch(shape.heads)


def build(architecture: str, shape: Shape, corpus: str, vocab_size: int, arm: str) -> PreTrainedModel:
    """A model with random weights.

    Args:
        architecture: one of `ARCHITECTURES`.
        shape: its size.
        corpus: what it is for: the published dilating factors depend on it.
        vocab_size: number of symbols.
        arm: one of `ARMS`: as it is, with RSA heads, or with those and P of zeros.
    """
    common = {
        "vocab_size": vocab_size,
        "d_model": shape.width,
        "n_head": shape.heads,
        "d_head": shape.width // shape.heads,
        "d_inner": shape.inner,
        "n_layer": shape.layers[architecture],
        "dropout": shape.dropout,
        "dropatt": 0.0,
        "eos_token_id": None,
    }
    if architecture == "transformer-xl":
        config = AutoConfig.for_model(
            "transfo-xl", **common, cutoffs=[], div_val=1, untie_r=False,
            mem_len=shape.segment, clamp_len=-1, same_length=False, pre_lnorm=shape.pre_lnorm,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(
            "block-recurrent", **common,
            window_size=shape.window, recurrent_layers=[shape.recurrent_layer], num_state_vectors=shape.states,
        )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    if arm != "plain":
        patch_model(model, rsa_plan(shape, corpus))
    if arm == DAMPED:
        damp(model)
    return model


def train_on_segments(model: PreTrainedModel, tracks: TrainingTracks, learning_rate: float, steps: int) -> None:
    """Train a model along the tracks, with what it carries; where they end, all begin again.

    AdamW, a warm-up over a twentieth of the steps and a cosine down to 0, gradients of norm at most 1.
    """
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate))
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=max(1, steps // 20), num_training_steps=steps)
    carried = CarriedState(model)
    model.train()
    for step in range(steps):
        segment = step % tracks.num_segments
        if segment == 0:
            carried.reset()
        rows = [tracks[segment * tracks.num_tracks + track] for track in range(tracks.num_tracks)]
        batch = {name: value.to(model.device) for name, value in default_collate(rows).items()}
        carried.mean_loss(model, batch, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
