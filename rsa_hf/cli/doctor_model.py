"""The checks of `rsa-hf doctor --model`: whether RSA keeps its promises on a user's own model.

Bits are compared in the model's own dtype, everything else in float32. A deviation is measured as a share of RSA's
effect, the change that open gates make; if RSA had no effect, every other check would pass. If the plain model itself
fails a check, the finding is a note and not a failure of RSA.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.cli.doctor import Finding, guarded
from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.patching import is_patched, patch_model, unpatch_model

__all__ = ["examine"]

LENGTH, DECODER_LENGTH = 16, 13  # tokens of the inputs
TOLERANCE = 2e-3  # share of RSA's effect
NOTHING = 1e-4  # share of the outputs that rounding may change
LEAST_EFFECT = 1e-3  # share of the outputs that half-open gates have to change
LATER = 4  # tokens that the causality check changes
PIECES = {"token by token": [1] * 5, "in pieces of several tokens": [4, 3]}
PADDING = 3  # tokens

Streams = dict[str, Tensor]


@torch.no_grad()
def examine(model: PreTrainedModel) -> Iterator[Finding]:
    """Check a model. A plain one gets RSA heads; afterwards the model is float32.

    Raises:
        TypeError, ValueError, RuntimeError: the model takes no text, or `patch_model` refuses it.
    """
    model.eval()
    inputs = _inputs(model)
    names, config = [name for name in model.state_dict() if ".rsa." not in name], model.config.to_dict()
    config.pop("rsa", None)
    if not is_patched(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an encoder or decoder that gets no RSA heads
            patch_model(model, RSAConfig(gate_init=0.0))
        parameters = itertools.chain.from_iterable(heads.parameters() for _, heads in _rsa_layers(model))
        for i, parameter in enumerate(parameters):
            parameter.add_(0.01 * (1 + i % 7))  # other values than the initial ones, which a reload has to find
    subject = Subject(model, inputs)
    yield from guarded("identity", lambda: check_identity(subject))
    yield from guarded("unpatching", lambda: check_unpatching(subject, names, config))
    yield from guarded("reload", lambda: check_reload(subject))
    if not getattr(model, "is_quantized", False):
        subject = Subject(model.float(), inputs)
    yield from guarded("effect", lambda: check_effect(subject))
    yield from guarded("causality", lambda: check_causality(subject))
    yield from guarded("cache", lambda: check_cache(subject))
    yield from guarded("padding", lambda: check_padding(subject))


# --- the model and its inputs -------------------------------------------------------------------------------


class Subject:
    """A model with RSA heads, and its inputs.

    Attributes:
        model: the model.
        plain: a copy without the heads, made without the code of `unpatch_model`. Copies share all other tensors.
        shut: a copy with shut gates.
        opened: a copy with half-open gates.
        inputs: random tokens, for an encoder-decoder of both halves.
        text: the input whose tokens the outputs belong to.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
        self.model = model
        self.plain = _copy(model)
        for module, _ in _rsa_layers(self.plain):
            del module._modules["rsa"]
        self.shut = _with_gates(model, -math.inf)
        self.opened = _with_gates(model, 0.0)
        self.inputs = inputs
        self.text = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"

    def run(self, model: PreTrainedModel, **changed: Any) -> Any:
        """Run a model, with some inputs replaced. One without logits per token runs as its base model."""
        network: Any = model if model.get_output_embeddings() is not None else model.base_model
        return network(**{**self.inputs, **changed})

    def streams(self, model: PreTrainedModel, **changed: Any) -> Streams:
        """Outputs per token, [B, T, ...], keyed by the input that has these tokens."""
        out = self.run(model, **changed)
        last = out["logits"] if "logits" in out else out["last_hidden_state"]
        encoder = out.get("encoder_last_hidden_state")
        return {self.text: last} if encoder is None else {"input_ids": encoder, self.text: last}

    def accepts(self, name: str) -> bool:
        """Whether the model's forward has an argument of this name."""
        return name in inspect.signature(self.model.forward).parameters

    def is_causal(self) -> bool:
        """Whether an attention module that the outputs come from declares itself causal."""
        network: Any = self.model
        decoder = network.get_decoder() if "decoder_input_ids" in self.inputs else network
        return any(
            heads.plan.causal or getattr(module, "is_causal", None) is True for module, heads in _rsa_layers(decoder)
        )


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    config: Any = model.config
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is None or "input_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes {getattr(model, 'main_input_name', 'other inputs')}: doctor tries models "
            "that take input_ids."
        )
    parts = [vars(config), vars(config.get_text_config())]
    special = {value for part in parts for key, value in part.items() if key.endswith(("_token_id", "_token_index"))}
    allowed = [token for token in range(min(vocab_size, 5000)) if token not in special] or [0]
    tokens = torch.tensor(allowed, device="cpu")
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (2, length), generator=generator, device="cpu")].to(model.device)

    inputs = {"input_ids": text(LENGTH)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = text(DECODER_LENGTH)
    return inputs


def _rsa_layers(model: nn.Module) -> list[tuple[nn.Module, RSAHeads]]:
    """The attention modules with RSA heads, and their heads."""
    return [(module, heads) for module in model.modules() if (heads := heads_of(module)) is not None]


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares every parameter and buffer with the model."""
    return copy.deepcopy(model, {id(each): each for each in itertools.chain(model.parameters(), model.buffers())})


def _with_gates(model: PreTrainedModel, mu: float) -> PreTrainedModel:
    """A copy with its own μ, all set to one value, that shares the other tensors."""
    copied = _copy(model)
    for _, heads in _rsa_layers(copied):
        heads.mu = nn.Parameter(torch.full_like(heads.mu, mu))
    return copied


# --- comparisons --------------------------------------------------------------------------------------------


def _same_bits(found: Streams, expected: Streams) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def _norm(values: Tensor) -> float:
    return float(values.double().norm())


def _distance(found: Tensor, expected: Tensor) -> float:
    return _norm(found.double() - expected.double())


def _relative(found: Streams, expected: Streams) -> float:
    """The largest relative distance of a stream."""
    return max(_distance(found[name], expected[name]) / _norm(expected[name]) for name in expected)


# --- checks -------------------------------------------------------------------------------------------------


def check_identity(subject: Subject) -> Iterator[Finding]:
    """Shut gates give the outputs of the plain model, bit for bit."""
    plain, again = subject.streams(subject.plain), subject.streams(subject.plain)
    if not _same_bits(again, plain):
        yield Finding("note", "identity", "the plain model's outputs differ from run to run: not comparable")
        return
    shut = subject.streams(subject.shut)
    same = _same_bits(shut, plain)
    text = "shut gates change no bit" if same else f"shut gates change the outputs by {_relative(shut, plain):.1e}"
    yield Finding("ok" if same else "FAIL", "identity", text)


def check_unpatching(subject: Subject, names: list[str], config: dict[str, Any]) -> Iterator[Finding]:
    """`unpatch_model` gives the plain model.

    Args:
        subject: the model.
        names: of the plain model's tensors.
        config: the plain model's.
    """
    model = unpatch_model(_copy(subject.model))
    plain, found = subject.streams(subject.plain), subject.streams(model)
    if is_patched(model):
        problem = "leaves RSA heads behind"
    elif list(model.state_dict()) != names:
        problem = "leaves tensors that were not there before, or lacks some"
    elif model.config.to_dict() != config:
        problem = "leaves a changed config"
    elif not _same_bits(found, plain) and _same_bits(subject.streams(subject.plain), plain):
        problem = f"changes the outputs by {_relative(found, plain):.1e}"
    else:
        problem = ""
    yield Finding("FAIL" if problem else "ok", "unpatching", problem or "gives the plain model, bit for bit")


def check_reload(subject: Subject) -> Iterator[Finding]:
    """What `save_pretrained` writes into a temporary folder is loaded bit for bit by `from_pretrained`."""
    problem = _problem_after_reload(subject, subject.model)
    if problem is None:
        yield Finding("ok", "reload", "saved and loaded, it gives the same bits")
        return
    plain = _problem_after_reload(subject, unpatch_model(_copy(subject.model)))
    if plain is not None:
        yield Finding("note", "reload", f"the plain model is not loaded as it was saved either: {plain}")
    else:
        yield Finding("FAIL", "reload", problem)


def _problem_after_reload(subject: Subject, model: PreTrainedModel) -> str | None:
    with tempfile.TemporaryDirectory(prefix="rsa-hf-doctor-") as folder:
        model.save_pretrained(folder)
        try:
            loaded: Any = type(model).from_pretrained(
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
        return f"gates and rates are not loaded as they were saved: {', '.join(changed[:3])}"
    expected = subject.streams(model)
    after = subject.streams(loaded.to(model.device).eval())
    return None if _same_bits(after, expected) else f"loading changes the outputs by {_relative(after, expected):.1e}"


def check_effect(subject: Subject) -> Iterator[Finding]:
    """Half-open gates change the outputs."""
    found = subject.streams(subject.opened)
    share = _relative(found, subject.streams(subject.plain))
    works = all(bool(stream.isfinite().all()) for stream in found.values()) and share >= LEAST_EFFECT
    yield Finding("ok" if works else "FAIL", "effect", f"half-open gates change the outputs by {share:.1%}")


def check_causality(subject: Subject) -> Iterator[Finding]:
    """Under causal attention, later tokens do not change earlier outputs."""
    plain = _backward_influence(subject, subject.plain)
    if plain > NOTHING:
        text = f"later tokens change earlier outputs by {plain:.1e} without RSA too"
        if subject.is_causal():
            yield Finding("FAIL", "causality", f"{text}, though its attention says that it is causal")
        else:
            yield Finding("note", "causality", "not causal: tokens see later ones, and so do the RSA heads")
        return
    found = _backward_influence(subject, subject.opened)
    if found <= NOTHING:
        yield Finding("ok", "causality", "later tokens do not change earlier outputs")
    else:
        yield Finding("FAIL", "causality", f"later tokens change earlier outputs by {found:.1e} through the RSA heads")


def _backward_influence(subject: Subject, model: PreTrainedModel) -> float:
    """How much other last tokens change earlier outputs, relative to the change of their own outputs."""
    ids = subject.inputs[subject.text]
    changed = torch.cat([ids[:, :-LATER], ids[:, -LATER:].flip(0, 1)], dim=1)
    change = subject.streams(model, **{subject.text: changed})[subject.text] - subject.streams(model)[subject.text]
    return _norm(change[:, :-LATER]) / _norm(change[:, -LATER:])


def check_cache(subject: Subject) -> Iterator[Finding]:
    """A text read in pieces with a cache gives the outputs of the whole text."""
    if not subject.accepts("past_key_values") or not subject.is_causal():
        yield Finding("note", "cache", "no causal decoder, so there is no cache")
        return
    plain = subject.streams(subject.plain)[subject.text]
    at_once = subject.streams(subject.opened)[subject.text]
    for name, pieces in PIECES.items():
        try:
            gap = _distance(_in_pieces(subject, subject.plain, pieces), plain) / _norm(plain)
            problem = f"is off by {gap:.1e}" if not gap <= NOTHING else None
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {str(error).strip():.100})"
        if problem is not None:
            yield Finding("note", "cache", f"{name}, the plain model {problem}: not comparable")
            continue
        off = _distance(_in_pieces(subject, subject.opened, pieces), at_once) / _distance(at_once, plain)
        text = f"{name}, outputs are off by {off:.1e} of RSA's effect"
        yield Finding("ok" if off <= TOLERANCE else "FAIL", "cache", text)


def _in_pieces(subject: Subject, model: PreTrainedModel, pieces: Sequence[int]) -> Tensor:
    ids = subject.inputs[subject.text]
    cache, found = None, []
    for piece in ids.split([ids.shape[1] - sum(pieces), *pieces], dim=1):
        out = subject.run(model, **{subject.text: piece}, past_key_values=cache, use_cache=True)
        cache = out.get("past_key_values")
        if cache is None:
            raise ValueError("the model returns no cache")
        found.append(out["logits"] if "logits" in out else out["last_hidden_state"])
    return torch.cat(found, dim=1)


def check_padding(subject: Subject) -> Iterator[Finding]:
    """A padded row in a batch gives the outputs of the row alone."""
    if not subject.accepts("attention_mask"):
        yield Finding("note", "padding", "the model takes no attention_mask")
        return
    # A causal model never sees right padding. Left padding shifts the positions of a model that counts slots.
    sees_later = "decoder_input_ids" in subject.inputs or not subject.is_causal()
    for side in ("left", "right") if sees_later else ("left",):
        plain, padded = _alone_and_padded(subject, subject.plain, side)
        gap = _relative(padded, plain)
        if gap <= NOTHING:
            break
    else:
        yield Finding("note", "padding", f"padding changes the plain model by {gap:.1e} too: not comparable")
        return
    alone, padded = _alone_and_padded(subject, subject.opened, side)
    network: Any = subject.model
    reached = [subject.text]
    if subject.text != "input_ids" and _rsa_layers(network.get_encoder()):
        reached.append("input_ids")
    off = max(_distance(padded[name], alone[name]) / _distance(alone[name], plain[name]) for name in reached)
    text = f"{side}-padded rows are off by {off:.1e} of RSA's effect"
    yield Finding("ok" if off <= TOLERANCE else "FAIL", "padding", text)


def _alone_and_padded(subject: Subject, model: PreTrainedModel, side: str) -> tuple[Streams, Streams]:
    """Outputs of the first text alone, and padded in a batch with a longer one; without those of the padding."""
    first, second = subject.inputs["input_ids"].split(1)
    others = {name: ids[:1] for name, ids in subject.inputs.items() if name != "input_ids"}
    pad = getattr(subject.model.config.get_text_config(), "pad_token_id", None) or 0
    parts = [first, torch.full_like(first[:, :PADDING], pad)]
    longer = torch.cat([second[:, :PADDING], second], dim=1)
    batch = torch.cat([torch.cat(parts if side == "right" else parts[::-1], dim=1), longer])
    real = slice(PADDING, None) if side == "left" else slice(first.shape[1])
    mask = torch.zeros_like(batch)
    mask[0, real], mask[1] = 1, 1
    alone = subject.streams(model, **_with_positions(subject, first, torch.ones_like(first)), **others)
    both = {name: ids.expand(2, -1) for name, ids in others.items()}
    padded = subject.streams(model, **_with_positions(subject, batch, mask), **both)
    return alone, {name: stream[:1, real] if name == "input_ids" else stream[:1] for name, stream in padded.items()}


def _with_positions(subject: Subject, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    inputs = {"input_ids": ids, "attention_mask": mask}
    if subject.accepts("position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs
