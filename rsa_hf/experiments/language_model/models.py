"""Models with a memory, and their training along consecutive segments of a text."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.byte_models import corpus_files
from rsa_hf.experiments.runner.fit import fit
from rsa_hf.experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf.tasks.text8 import TEXT8_SYMBOLS, clean_text8
from rsa_hf.tasks.text_data import EvaluationSegments, LanguageModelingDataConfig, TrainingTracks, read_texts
from rsa_hf.training.carried import CarriedState
from rsa_hf.training.optimizer import param_groups

__all__ = [
    "ARCHITECTURES",
    "PUBLISHED_SIZE",
    "SHAPES",
    "VARIANTS",
    "SegmentedText",
    "Shape",
    "build",
    "read_segments",
    "rsa_plan",
    "train_on_segments",
]

VARIANTS = ("plain", "rsa", NO_RECURRENCE)
ARCHITECTURES = ("transformer-xl", "block-recurrent")
PUBLISHED_SIZE = "14 layers"


@dataclass(frozen=True)
class Shape:
    """Size of a model and of its batches.

    Attributes:
        layers: by architecture; one layer of the Block-Recurrent Transformer is recurrent and has no RSA heads.
        recurrent_layer: its index.
        width: hidden size.
        heads: heads per layer.
        inner: width of feed-forward layers.
        segment: tokens in a segment, and in the memory of Transformer-XL.
        window: tokens between two updates of the recurrent states. Less than a segment: an update is learned only if
            a window follows it in the same segment.
        states: number of recurrent states.
        batch: segments in a step.
        dropout: of both architectures.
        pre_lnorm: whether Transformer-XL normalises the input of each block. The published models do not; in the few
            hundred steps of a small run they then learn no more than the frequencies of symbols.
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
    PUBLISHED_SIZE: Shape(
        {"transformer-xl": 14, "block-recurrent": 14}, -3, 512, 8, 2048, 512, 256, 512, 22, 0.1, False
    ),
}
# Of two dilated cyclical pairs in 8 heads.
PUBLISHED_DILATION = {"enwik8": (3, 6, 9, 12), "text8": (6, 6, 12, 12)}


@dataclass(frozen=True)
class SegmentedText:
    """A corpus in segments.

    Attributes:
        train: parallel streams of text, one for each row of a batch.
        validation: to choose the learning rate by.
        test: to report.
        vocab_size: number of symbols.
    """

    train: TrainingTracks
    validation: EvaluationSegments
    test: EvaluationSegments
    vocab_size: int


@functools.lru_cache(maxsize=4)  # shared by the runs of an experiment
def _texts(corpus: str) -> dict[str, bytes]:
    if corpus == "python":
        return read_texts(LanguageModelingDataConfig())
    texts = read_texts(LanguageModelingDataConfig(source="files", files=corpus_files("enwik8")))
    return {split: clean_text8(text) for split, text in texts.items()} if corpus == "text8" else texts


def read_segments(corpus: str, shape: Shape, eval_bytes: int) -> SegmentedText:
    """Read a corpus, split 90 / 5 / 5 in order.

    Args:
        corpus: `enwik8` (its prefix, bytes), `text8` (made from that prefix, 27 symbols) or `python` (source code of
            the standard library, bytes, split by file).
        shape: length and number of segments.
        eval_bytes: maximum size of the validation text and of the test text.

    Raises:
        FileNotFoundError: the data is missing.
    """
    texts = _texts(corpus)

    def tokens(text: bytes) -> Tensor:
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # The token ids of `text8_tokenizer`, vectorised.
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
    """The published plan at the published size, otherwise the plan for models trained from scratch."""
    if shape is SHAPES[PUBLISHED_SIZE]:
        return RSAConfig(num_dilated_cyclical_pairs=2, dilation=PUBLISHED_DILATION[corpus], gate_init=1.0)
    return RSAConfig.from_scratch(shape.heads)


def build(architecture: str, shape: Shape, corpus: str, vocab_size: int, variant: str) -> PreTrainedModel:
    """A model with random weights.

    Args:
        architecture: one of `ARCHITECTURES`.
        shape: its size.
        corpus: the text to be trained on, which the published dilation factors depend on.
        vocab_size: number of symbols.
        variant: one of `VARIANTS`.
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
    add_rsa(model, variant, None if variant == "plain" else rsa_plan(shape, corpus))
    return model


def train_on_segments(model: PreTrainedModel, streams: TrainingTracks, learning_rate: float, steps: int) -> None:
    """Train along parallel streams of text, carrying the memory; at their end, start again with an empty memory.

    AdamW; the learning rate warms up over a twentieth of the steps and then follows a cosine down to 0.
    """
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate))
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=max(1, steps // 20), num_training_steps=steps)
    carried = CarriedState(model)

    def loss(step: int) -> Tensor:
        segment = (step - 1) % streams.num_segments
        if segment == 0:
            carried.reset()
        first = segment * streams.num_tracks
        batch = default_collate([streams[first + stream] for stream in range(streams.num_tracks)])
        return carried.mean_loss(model, {name: value.to(model.device) for name, value in batch.items()}, 0)

    fit(loss, optimizer, steps, model=model, schedule=schedule)
