"""The checks of `rsa-hf doctor --model`: what RSA promises, tried on a user's own model.

Each check takes a `Subject` and gives findings. Bits are compared in the model's own dtype; the rest is compared in
float32, and a gap counts as a share of what open gates change: a check that passed where RSA does nothing would prove
nothing. What the plain model itself does not hold is a note, and no failure of RSA.
"""

from __future__ import annotations

import inspect
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.cli.findings import Finding, guarded
from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads
from rsa_hf.lookup import heads_of
from rsa_hf.patching import is_patched, patch_model, unpatch_model

__all__ = [
    "Subject",
    "check_cache",
    "check_causality",
    "check_effect",
    "check_identity",
    "check_padding",
    "check_reload",
    "examine",
    "examined",
]

TOLERANCE = 2e-3  # of RSA's effect
LEAST_EFFECT = 1e-3  # of the outputs' size: what half-open gates change at the least
NOTHING = 1e-4  # share of the outputs that rounding may change
LENGTH, DECODER_LENGTH, LATER, PADDING = 16, 13, 4, 3
PIECES = {"token by token": [1] * 5, "in pieces of several tokens": [4, 3]}

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


def examine(model: PreTrainedModel) -> Iterator[Finding]:
    """Try a model, patched or not; one without RSA heads gets some for as long as it takes.

    Args:
        model: as loaded. Afterwards it is as it was, but for its dtype, which is float32.

    Raises:
        ValueError: the model does not take text.
    """
    with examined(model) as subject:
        yield from guarded("identity", lambda: check_identity(subject))
        yield from guarded("reload", lambda: check_reload(subject))
        if not getattr(model, "is_quantized", False):
            model.float()
        yield from guarded("effect", lambda: check_effect(subject))
        yield from guarded("causality", lambda: check_causality(subject))
        yield from guarded("cache", lambda: check_cache(subject))
        yield from guarded("padding", lambda: check_padding(subject))


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


# --- the checks -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_identity(subject: Subject) -> Iterator[Finding]:
    """Shut gates give the bits of the unpatched model, and so does `unpatch_model`."""
    with _without_heads(subject.model):
        plain = subject.streams()
        again = subject.streams()
    if not _same_bits(again, plain):
        yield Finding("note", "identity", "the plain model gives other outputs when it is run again: not comparable")
        return
    with _gates(subject.model, -math.inf):
        shut = subject.streams()
    same = _same_bits(shut, plain)
    words = "shut gates change no bit" if same else f"shut gates change the outputs by {_share(shut, plain):.1e}"
    yield Finding("ok" if same else "FAIL", "identity", words)
    problem = _after_unpatching(subject, plain)
    yield Finding("FAIL" if problem else "ok", "unpatching", problem or "gives the plain model, bit for bit")


def _after_unpatching(subject: Subject, plain: Streams) -> str | None:
    model = subject.model
    if subject.before is not None:
        names, config = subject.before
    else:
        names = [name for name in model.state_dict() if ".rsa." not in name]
        config = {key: value for key, value in model.config.to_dict().items() if key != "rsa"}
    with _unpatched(model):
        if is_patched(model):
            return "leaves RSA heads behind"
        if list(model.state_dict()) != names:
            return "leaves other tensors than there were"
        if model.config.to_dict() != config:
            return "leaves another config than there was"
        found = subject.streams()
    return None if _same_bits(found, plain) else f"leaves outputs that are off by {_share(found, plain):.1e}"


@torch.no_grad()
def check_reload(subject: Subject) -> Iterator[Finding]:
    """What `save_pretrained` writes, in a folder of its own, comes back through `from_pretrained` bit for bit."""
    problem = _off_after_reload(subject) if subject.before is None else _moved_off_after_reload(subject)
    if problem is None:
        yield Finding("ok", "reload", "saved and loaded, it gives the same bits")
        return
    with _unpatched(subject.model):
        plain = _off_after_reload(subject)
    if plain is not None:
        yield Finding("note", "reload", f"the plain model does not come back the same either: {plain}")
    else:
        yield Finding("FAIL", "reload", problem)


def _moved_off_after_reload(subject: Subject) -> str | None:
    """The same with gates and rates off their starts: what is loaded must come from the file."""
    parameters = [parameter for _, heads in _layers(subject.model) for parameter in heads.parameters()]
    starts = [parameter.clone() for parameter in parameters]
    try:
        for i, parameter in enumerate(parameters):
            parameter.add_(0.01 * (1 + i % 7))
        return _off_after_reload(subject)
    finally:
        for parameter, start in zip(parameters, starts, strict=True):
            parameter.copy_(start)


def _off_after_reload(subject: Subject) -> str | None:
    model = subject.model
    with tempfile.TemporaryDirectory(prefix="rsa-hf-doctor-") as folder:
        model.save_pretrained(folder)
        try:
            loaded = type(model).from_pretrained(
                folder,
                dtype=model.dtype,
                attn_implementation=getattr(model.config, "_attn_implementation", None),
            )
        except Exception as error:
            return f"what was saved does not load: {type(error).__name__}: {str(error).strip():.300}"
    if is_patched(loaded) is not is_patched(model):
        return "what was saved has lost its RSA heads"
    if getattr(loaded.config, "rsa", None) != getattr(model.config, "rsa", None):
        return "what was saved has another plan"
    saved, found = model.state_dict(), loaded.state_dict()
    changed = [name for name in saved if ".rsa." in name and not torch.equal(saved[name].cpu(), found[name].cpu())]
    if changed:
        return f"other gates and rates were loaded than were saved: {', '.join(changed[:3])}"
    expected = subject.streams()
    moved: Any = loaded
    after = subject.streams(moved.to(model.device).eval())
    return None if _same_bits(after, expected) else f"outputs after loading are off by {_share(after, expected):.1e}"


@torch.no_grad()
def check_effect(subject: Subject) -> Iterator[Finding]:
    """The RSA heads take part: half-open gates change the outputs."""
    with _without_heads(subject.model):
        plain = subject.streams()
    with _gates(subject.model, 0.0):
        found = subject.streams()
    share = _share(found, plain)
    works = all(bool(stream.isfinite().all()) for stream in found.values()) and share >= LEAST_EFFECT
    yield Finding("ok" if works else "FAIL", "effect", f"half-open gates change the outputs by {share:.1%}")


@torch.no_grad()
def check_causality(subject: Subject) -> Iterator[Finding]:
    """Where attention is causal, later tokens leave earlier outputs as they are."""
    causal = _is_said_to_be_causal(subject)
    with _without_heads(subject.model):
        plain = _backwards(subject)
    if plain > NOTHING:
        words = f"later tokens change earlier outputs by {plain:.1e} without RSA too"
        if causal:
            yield Finding("FAIL", "causality", f"{words}, though its attention says that it is causal")
        else:
            yield Finding("note", "causality", "not causal: its tokens see later ones, and so do its RSA heads")
        return
    with _gates(subject.model, 0.0):
        found = _backwards(subject)
    if found <= NOTHING:
        yield Finding("ok", "causality", "later tokens leave earlier outputs as they are")
    else:
        yield Finding("FAIL", "causality", f"later tokens change earlier outputs by {found:.1e} through the RSA heads")


@torch.no_grad()
def check_cache(subject: Subject) -> Iterator[Finding]:
    """A text that comes in pieces, over a cache, gives what it gives at once."""
    if not subject.accepts("past_key_values") or not _is_said_to_be_causal(subject):
        yield Finding("note", "cache", "no causal decoder: it keeps no cache")
        return
    with _without_heads(subject.model):
        plain = subject.streams()[subject.text]
    with _gates(subject.model, 0.0):
        at_once = subject.streams()[subject.text]
    effect = _distance(at_once, plain)
    for name, pieces in PIECES.items():
        try:
            with _without_heads(subject.model):
                gap = _distance(_in_pieces(subject, pieces), plain) / _size(plain)
            problem = f"is off by {gap:.1e}" if not gap <= NOTHING else None
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {str(error).strip():.100})"
        if problem is not None:
            yield Finding("note", "cache", f"{name}, the plain model {problem}: not comparable")
            continue
        with _gates(subject.model, 0.0):
            off = _distance(_in_pieces(subject, pieces), at_once) / effect
        words = f"{name}, outputs are off by {off:.1e} of RSA's effect"
        yield Finding("ok" if off <= TOLERANCE else "FAIL", "cache", words)


@torch.no_grad()
def check_padding(subject: Subject) -> Iterator[Finding]:
    """A padded row, in a batch, gives what it gives alone."""
    if not subject.accepts("attention_mask"):
        yield Finding("note", "padding", "it takes no attention_mask")
        return
    # Padding behind a text shows nothing where no token sees it; before it, it moves positions that only count slots.
    sees_later = "decoder_input_ids" in subject.inputs or not _is_said_to_be_causal(subject)
    for side in ("left", "right") if sees_later else ("left",):
        with _without_heads(subject.model):
            plain, padded = _alone_and_padded(subject, side)
        gap = _share(padded, plain)
        if gap <= NOTHING:
            break
    else:
        yield Finding("note", "padding", f"padding changes the plain model by {gap:.1e} too: not comparable")
        return
    with _gates(subject.model, 0.0):
        alone, padded = _alone_and_padded(subject, side)
    off = max(_distance(padded[name], alone[name]) / _distance(alone[name], plain[name]) for name in _reached(subject))
    words = f"{side}-padded rows are off by {off:.1e} of RSA's effect"
    yield Finding("ok" if off <= TOLERANCE else "FAIL", "padding", words)


# --- how the checks run a model -------------------------------------------------------------------------------------


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


def _layers(model: nn.Module) -> list[tuple[nn.Module, RSAHeads]]:
    return [(module, heads) for module in model.modules() if (heads := heads_of(module)) is not None]


def _decoder(subject: Subject) -> nn.Module:
    """The part that the outputs come from: of an encoder-decoder its decoder, else all."""
    network: Any = subject.model
    return network.get_decoder() if "decoder_input_ids" in subject.inputs else subject.model


def _is_said_to_be_causal(subject: Subject) -> bool:
    return any(
        heads.plan.causal or getattr(module, "is_causal", None) is True for module, heads in _layers(_decoder(subject))
    )


def _reached(subject: Subject) -> list[str]:
    """The streams that RSA heads change: the encoder of an encoder-decoder need not have any."""
    network: Any = subject.model
    if subject.text == "input_ids":
        return ["input_ids"]
    return [subject.text, *(["input_ids"] if _layers(network.get_encoder()) else [])]


def _backwards(subject: Subject) -> float:
    """How much other last tokens change the outputs before them, as a share of what they change of their own."""
    ids = subject.inputs[subject.text]
    changed = torch.cat([ids[:, :-LATER], ids[:, -LATER:].flip(0, 1)], dim=1)
    change = subject.streams(None, **{subject.text: changed})[subject.text] - subject.streams()[subject.text]
    return _size(change[:, :-LATER]) / _size(change[:, -LATER:])


def _in_pieces(subject: Subject, pieces: Sequence[int]) -> Tensor:
    ids = subject.inputs[subject.text]
    cache, found = None, []
    for piece in ids.split([ids.shape[1] - sum(pieces), *pieces], dim=1):
        out = subject.run(**{subject.text: piece}, past_key_values=cache, use_cache=True)
        cache = out.get("past_key_values")
        if cache is None:
            raise ValueError("the model gives no cache")
        found.append(out["logits"] if "logits" in out else out["last_hidden_state"])
    return torch.cat(found, dim=1)


def _alone_and_padded(subject: Subject, side: str) -> tuple[Streams, Streams]:
    """The first text alone, and padded beside a longer one; real tokens only."""
    first, second = subject.inputs["input_ids"].split(1)
    others = {name: ids[:1] for name, ids in subject.inputs.items() if name != "input_ids"}
    pad = getattr(subject.model.config.get_text_config(), "pad_token_id", None) or 0
    parts = [first, torch.full_like(first[:, :PADDING], pad)]
    longer = torch.cat([second[:, :PADDING], second], dim=1)
    batch = torch.cat([torch.cat(parts if side == "right" else parts[::-1], dim=1), longer])
    real = slice(PADDING, None) if side == "left" else slice(first.shape[1])
    mask = torch.zeros_like(batch)
    mask[0, real], mask[1] = 1, 1
    alone = subject.streams(None, **_placed(subject, first, torch.ones_like(first)), **others)
    both = {name: ids.expand(2, -1) for name, ids in others.items()}
    padded = subject.streams(None, **_placed(subject, batch, mask), **both)
    return alone, {name: stream[:1, real] if name == "input_ids" else stream[:1] for name, stream in padded.items()}


def _placed(subject: Subject, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Inputs with the position of each token, where a model takes that."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if subject.accepts("position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


@contextmanager
def _gates(model: nn.Module, mu: float) -> Iterator[None]:
    """Set every μ, and put it back."""
    gates = [heads.mu for _, heads in _layers(model)]
    before = [gate.detach().clone() for gate in gates]
    try:
        for gate in gates:
            gate.fill_(mu)
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)


@contextmanager
def _without_heads(model: nn.Module) -> Iterator[None]:
    """Run the model as if it had no RSA heads, without any of the code that takes them off."""
    layers = _layers(model)
    try:
        for module, _ in layers:
            del module._modules["rsa"]
        yield
    finally:
        for module, heads in layers:
            module._modules["rsa"] = heads


@contextmanager
def _unpatched(model: PreTrainedModel) -> Iterator[None]:
    """Call `unpatch_model`, and put the RSA heads back afterwards."""
    layers, content, strict = _layers(model), model.config.rsa, model._keep_in_fp32_modules_strict
    try:
        unpatch_model(model)
        yield
    finally:
        for module, heads in layers:
            module._modules["rsa"] = heads
        model.config.rsa = content
        model._keep_in_fp32_modules_strict = strict


def _same_bits(found: Streams, expected: Streams) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def _share(found: Streams, expected: Streams) -> float:
    """The largest distance of a stream, as a share of its size."""
    return max(_distance(found[name], expected[name]) / _size(expected[name]) for name in expected)


def _distance(found: Tensor, expected: Tensor) -> float:
    return _size(found.double() - expected.double())


def _size(values: Tensor) -> float:
    return float(values.double().norm())
