"""A user's model under the checks: how it is run, with its gates set, and without its RSA heads."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.patching import is_patched, patch_model, unpatch_model
from rsa_hf.saved_plan import configs_with_plans

__all__ = [
    "Streams",
    "Subject",
    "examined",
    "gates_at",
    "is_said_to_be_causal",
    "rsa_layers",
    "unpatched",
    "without_heads",
]

LENGTH, DECODER_LENGTH = 16, 13

Streams = dict[str, Tensor]


@dataclass
class Subject:
    """A model with RSA heads, in evaluation mode, and how it is run.

    Attributes:
        model: the user's model; the checks leave it as it was.
        inputs: random tokens; of an encoder-decoder for both halves.
        before: names of all tensors, and the config, before doctor put the RSA heads on; None where the checkpoint
            has them.
    """

    model: PreTrainedModel
    inputs: dict[str, Tensor]
    before: tuple[list[str], dict[str, Any]] | None

    @property
    def text(self) -> str:
        """The input whose tokens the outputs belong to."""
        return "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"

    def run(self, model: PreTrainedModel | None = None, **changed: Any) -> Any:
        """The output for the inputs, some of them changed: with logits per token, or else the base model's."""
        whole: Any = self.model if model is None else model
        network = whole if whole.get_output_embeddings() is not None else whole.base_model
        return network(**{**self.inputs, **changed})

    def streams(self, model: PreTrainedModel | None = None, **changed: Any) -> Streams:
        """Outputs that belong to tokens, [B, T, …], by the name of the input that the tokens are in."""
        out = self.run(model, **changed)
        last = out["logits"] if "logits" in out else out["last_hidden_state"]
        encoder = out.get("encoder_last_hidden_state")
        return {self.text: last} if encoder is None else {"input_ids": encoder, self.text: last}

    def accepts(self, name: str) -> bool:
        """Whether the model's forward takes such an argument."""
        return name in inspect.signature(self.model.forward).parameters


@contextmanager
def examined(model: PreTrainedModel) -> Iterator[Subject]:
    """The subject of the checks.

    Raises:
        TypeError, ValueError, RuntimeError: the model takes no text, or `patch_model` refuses it.
    """
    model.eval()
    inputs = _inputs(model)
    if is_patched(model):
        yield Subject(model, inputs, None)
        return
    before = list(model.state_dict()), model.config.to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of halves without RSA heads: what is patched is what is tried
        patch_model(model, RSAConfig(gate_init=0.0))
    try:
        yield Subject(model, inputs, before)
    finally:
        unpatch_model(model)


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    config: Any = model.config
    size = getattr(config.get_text_config(), "vocab_size", None)
    accepted = inspect.signature(model.forward).parameters
    if size is None or "input_ids" not in accepted:
        raise ValueError(
            f"{type(model).__name__} takes {getattr(model, 'main_input_name', 'other inputs')}: doctor tries models "
            "that take input_ids."
        )
    parts = [vars(config), vars(config.get_text_config())]
    special = {value for part in parts for key, value in part.items() if key.endswith(("_token_id", "_token_index"))}
    tokens = torch.tensor([token for token in range(min(size, 5000)) if token not in special] or [0])
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (2, length), generator=generator)].to(model.device)

    inputs = {"input_ids": text(LENGTH)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = text(DECODER_LENGTH)
    return inputs


def rsa_layers(model: nn.Module) -> list[tuple[nn.Module, RSAHeads]]:
    """The attention modules of a model that have RSA heads, and those."""
    return [(module, heads) for module in model.modules() if (heads := heads_of(module)) is not None]


def is_said_to_be_causal(subject: Subject) -> bool:
    """Whether any attention that the outputs come through says that it is causal."""
    return any(
        heads.plan.causal or getattr(module, "is_causal", None) is True
        for module, heads in rsa_layers(_decoder(subject))
    )


def _decoder(subject: Subject) -> nn.Module:
    """The part that the outputs come from: of an encoder-decoder its decoder, else all."""
    network: Any = subject.model
    return network.get_decoder() if "decoder_input_ids" in subject.inputs else subject.model


@contextmanager
def gates_at(model: nn.Module, mu: float) -> Iterator[None]:
    """Set every μ, and put it back."""
    gates = [heads.mu for _, heads in rsa_layers(model)]
    before = [gate.detach().clone() for gate in gates]
    try:
        for gate in gates:
            gate.fill_(mu)
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)


@contextmanager
def without_heads(model: nn.Module) -> Iterator[None]:
    """Run the model as if it had no RSA heads, without any of the code that takes them off."""
    layers = rsa_layers(model)
    try:
        for module, _ in layers:
            del module._modules["rsa"]
        yield
    finally:
        for module, heads in layers:
            module._modules["rsa"] = heads


@contextmanager
def unpatched(model: PreTrainedModel) -> Iterator[None]:
    """Call `unpatch_model`, and put the RSA heads back afterwards."""
    layers, strict = rsa_layers(model), model._keep_in_fp32_modules_strict
    plans = [(config, vars(config)["rsa"]) for config in configs_with_plans(model)]
    try:
        unpatch_model(model)
        yield
    finally:
        for module, heads in layers:
            module._modules["rsa"] = heads
        for config, content in plans:
            config.rsa = content
        model._keep_in_fp32_modules_strict = strict
