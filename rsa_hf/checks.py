"""The promises of a patched model, as checks that run on any model that takes text.

Each check returns a line that says what holds. It raises `Failed` if the promise is broken, and `NotApplicable` if
the plain model does not keep it either. A deviation is measured as a share of RSA's effect, the change that half-open
gates make: if RSA had no effect, every other check would pass.
"""

import inspect
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.children import heads_of, shared_copy
from rsa_hf.config import RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.patching import is_patched, patch_model, token_ids, unpatch_model
from rsa_hf.utils.versions import CACHE

LENGTH, DECODER_LENGTH, PADDING = 16, 13, 3  # tokens of the inputs, and of padding
TOLERANCE = 2e-3  # share of RSA's effect
ROUNDING = 1e-4  # share of the outputs that rounding may change
LEAST_EFFECT = 1e-3  # share of the outputs that half-open gates must change
CHANGED_TOKENS = 4  # last tokens, which the causality check changes
PIECES = ([3, 1, 1], [1, 1, 1])  # tokens per piece after the first; not every plain model takes several at once

Streams = dict[str, Tensor]


class Failed(AssertionError):  # noqa: N818
    """A promise that the model does not keep."""


class NotApplicable(Exception):  # noqa: N818
    """The plain model does not have the property that is checked; the message says why."""


class PlainState:
    """A plain model's tensor names, config and outputs before it is patched; no outputs if it is patched already."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
        self.names = [name for name in model.state_dict() if ".rsa." not in name]
        self.config = {key: value for key, value in model.config.to_dict().items() if key != "rsa"}
        self.outputs = None if is_patched(model) else _run(model, inputs)[0]


class Subject:
    """A model with RSA heads, its inputs (token ids, [2, T]), and the class that loads it.

    `plain` is a copy without the heads (made without the code of `unpatch_model`); `shut` and `opened` are copies
    with shut and with half-open gates. `text` names the input that the outputs belong to, token by token.
    """

    def __init__(
        self, model: PreTrainedModel, inputs: dict[str, Tensor], before: PlainState | None = None, loader: Any = None
    ) -> None:
        self.model, self.inputs, self.loader = model, inputs, loader or type(model)
        self.before = before or PlainState(model, inputs)
        self.plain = shared_copy(model)
        for module, _ in _rsa_layers(self.plain):
            del module._modules["rsa"]
        self.shut, self.opened = with_gates(model, -math.inf), with_gates(model, 0.0)
        self.text = _text_of(inputs)

    def streams(self, model: PreTrainedModel, **changed: Any) -> Streams:
        """Outputs per token, [B, T, ...], keyed by the input that has these tokens."""
        return _run(model, {**self.inputs, **changed})[0]

    def accepts(self, name: str) -> bool:
        """Whether the model's forward has an argument of this name."""
        return name in inspect.signature(self.model.forward).parameters

    @cached_property
    def leak(self) -> float:
        """How much later tokens change earlier outputs of the plain model."""
        return backward_influence(self, self.plain, self.text)

    def halves(self) -> dict[str, nn.Module]:
        """The part of the model that reads each text."""
        model: Any = self.model
        if "decoder_input_ids" not in self.inputs:
            return {"input_ids": model}
        return {"input_ids": model.get_encoder(), "decoder_input_ids": model.get_decoder()}

    def reached(self) -> list[str]:
        """The texts that RSA heads read: one half of an encoder-decoder may have none."""
        return [name for name, half in self.halves().items() if _rsa_layers(half)]


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Streams, Any]:
    """Outputs per token, and the cache; a model without logits per token runs as its base model."""
    network: Any = model if model.get_output_embeddings() is not None else model.base_model
    out = network(**inputs)
    streams = {} if (encoder := out.get("encoder_last_hidden_state")) is None else {"input_ids": encoder}
    streams[_text_of(inputs)] = out["logits"] if "logits" in out else out["last_hidden_state"]
    return streams, out.get(CACHE)


def _text_of(inputs: dict[str, Any]) -> str:
    return "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"


def _random_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    config: Any = model.config
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is None or "input_ids" not in inspect.signature(model.forward).parameters:
        takes = getattr(model, "main_input_name", "other inputs")
        raise ValueError(f"{type(model).__name__} takes {takes}: only models that take input_ids can be checked.")
    settings = (*vars(config).items(), *vars(config.get_text_config()).items())
    special = token_ids(value for key, value in settings if key.endswith(("_token_id", "_token_index")))
    tokens = torch.tensor([i for i in range(min(vocab_size, 5000)) if i not in special] or [0], device="cpu")
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (2, length), generator=generator, device="cpu")].to(model.device)

    decoder = {"decoder_input_ids": text(DECODER_LENGTH)} if config.is_encoder_decoder else {}
    return {"input_ids": text(LENGTH), **decoder}


def _rsa_layers(model: nn.Module) -> list[tuple[nn.Module, RSAHeads]]:
    """The attention modules with RSA heads, and their heads."""
    return [(module, heads) for module in model.modules() if (heads := heads_of(module)) is not None]


def with_gates(model: PreTrainedModel, mu: float) -> PreTrainedModel:
    """Copy a patched model; the copy has its own μ, all set to one value, and shares the other tensors."""
    copied = shared_copy(model)
    for _, heads in _rsa_layers(copied):
        heads.mu = nn.Parameter(torch.full_like(heads.mu, mu))
    return copied


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of a difference."""
    return float((found.double() - expected.double()).norm())


def _relative(found: Streams, expected: Streams) -> float:
    """The largest relative distance over all streams."""
    return max(distance(found[name], expected[name]) / float(expected[name].double().norm()) for name in expected)


def _same_bits(found: Streams, expected: Streams) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def backward_influence(subject: Subject, model: PreTrainedModel, text: str) -> float:
    """How much changing a text's last tokens changes its earlier outputs, relative to the change of their own."""
    ids = subject.inputs[text]
    changed = torch.cat([ids[:, :-CHANGED_TOKENS], ids[:, -CHANGED_TOKENS:].flip(0, 1)], dim=1)
    change = subject.streams(model, **{text: changed})[text].double() - subject.streams(model)[text].double()
    return float(change[:, :-CHANGED_TOKENS].norm() / change[:, -CHANGED_TOKENS:].norm())


def check_identity(subject: Subject) -> str:
    """A shut gate gives the plain model, bit for bit."""
    _require_outputs(subject, subject.shut, "shut gates change")
    return "shut gates change no bit"


def check_unpatching(subject: Subject) -> str:
    """Unpatching restores the plain model, with its config and the names of its tensors."""
    model, before = unpatch_model(shared_copy(subject.model)), subject.before
    if is_patched(model):
        raise Failed("leaves RSA heads behind")
    if list(model.state_dict()) != before.names:
        raise Failed("leaves tensors that were not there before, or lacks some")
    if model.config.to_dict() != before.config:
        raise Failed("leaves a changed config")
    _require_outputs(subject, model, "changes")
    return "gives the plain model, bit for bit"


def _require_outputs(subject: Subject, model: PreTrainedModel, what: str) -> None:
    """Check that a model has the outputs of the plain one."""
    plain = subject.streams(subject.plain)
    if not _same_bits(subject.streams(subject.plain), plain):
        raise NotApplicable("the plain model's outputs differ from run to run: not comparable")
    expected, found = subject.before.outputs or plain, subject.streams(model)
    if not _same_bits(found, expected):
        raise Failed(f"{what} the outputs by {_relative(found, expected):.1e}")


def check_reload(subject: Subject) -> str:
    """A model that is saved and loaded has the same outputs, bit for bit."""
    problem = _problem_after_reload(subject, subject.model)
    if problem is None:
        return "saved and loaded, it gives the same bits"
    if plain := _problem_after_reload(subject, unpatch_model(shared_copy(subject.model))):
        raise NotApplicable(f"the plain model is not loaded as it was saved either: {plain}")
    raise Failed(problem)


def _problem_after_reload(subject: Subject, model: PreTrainedModel) -> str | None:
    with tempfile.TemporaryDirectory(prefix="rsa-hf-check-") as folder:
        model.save_pretrained(folder)
        try:
            loaded: Any = subject.loader.from_pretrained(folder, dtype=model.dtype)
        except Exception as error:
            return f"what was saved does not load: {type(error).__name__}: {str(error).strip():.300}"
    implementation = model.config._attn_implementation  # config.json does not hold it
    if loaded.config._attn_implementation != implementation:
        loaded.set_attn_implementation(implementation)
    if getattr(loaded.config, "rsa", None) != getattr(model.config, "rsa", None):
        return "what was saved has another plan, or none"
    saved, found = model.state_dict(), loaded.state_dict()
    changed = [name for name in saved if ".rsa." in name and not torch.equal(saved[name].cpu(), found[name].cpu())]
    if changed:
        return f"gates and rates are not loaded as they were saved: {', '.join(changed[:3])}"
    expected, after = subject.streams(model), subject.streams(loaded.to(model.device).eval())
    return None if _same_bits(after, expected) else f"loading changes the outputs by {_relative(after, expected):.1e}"


def check_effect(subject: Subject) -> str:
    """Half-open gates change the outputs."""
    found = subject.streams(subject.opened)
    share = _relative(found, subject.streams(subject.plain))
    text = f"half-open gates change the outputs by {share:.1%}"
    if not all(bool(stream.isfinite().all()) for stream in found.values()) or share < LEAST_EFFECT:
        raise Failed(text)
    return text


@torch.enable_grad()
def check_gradients(subject: Subject) -> str:
    """Every gate and rate that the outputs depend on gets a finite gradient."""
    parameters = {n: p.requires_grad_() for n, p in subject.opened.named_parameters() if ".rsa." in n}
    outputs = subject.streams(subject.opened)[subject.text].float()
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(outputs.device)
    found = torch.autograd.grad((outputs * weights).sum(), list(parameters.values()), allow_unused=True)
    gradients = dict(zip(parameters, found, strict=True))
    reached = {name.rpartition(".")[0] for name, gradient in gradients.items() if gradient is not None}
    if not reached:
        raise Failed("no gate and no rate gets a gradient")
    for name, gradient in gradients.items():
        if name.rpartition(".")[0] in reached and (gradient is None or not bool(gradient.isfinite().all())):
            raise Failed(f"{name} has the gradient {None if gradient is None else gradient.tolist()}")
    return "gates and rates get finite gradients"


def check_causality(subject: Subject) -> str:
    """Under causal attention, later tokens do not change earlier outputs."""
    if subject.leak > ROUNDING:
        layers = _rsa_layers(subject.halves()[subject.text])
        if any(heads.spec.causal or getattr(module, "is_causal", None) is True for module, heads in layers):
            text = f"later tokens change earlier outputs by {subject.leak:.1e} without RSA too"
            raise Failed(f"{text}, though its attention says that it is causal")
        raise NotApplicable("not causal: tokens see later ones, and so do the RSA heads")
    found = backward_influence(subject, subject.opened, subject.text)
    if not found <= ROUNDING:
        raise Failed(f"later tokens change earlier outputs by {found:.1e} through the RSA heads")
    return "later tokens do not change earlier outputs"


def check_cache(subject: Subject) -> str:
    """A text that is read in pieces with a cache gives the outputs of the whole text."""
    if not subject.accepts(CACHE) or subject.leak > ROUNDING:
        raise NotApplicable("no causal decoder, so there is no cache")
    if subject.text not in subject.reached():
        raise NotApplicable("the decoder has no RSA heads")
    plain = subject.streams(subject.plain)[subject.text]
    for pieces in PIECES:
        try:
            gap = distance(_in_pieces(subject, subject.plain, pieces), plain) / float(plain.double().norm())
            problem = f"is off by {gap:.1e}"
        except Exception as error:
            gap, problem = math.inf, f"fails ({type(error).__name__}: {str(error).strip():.100})"
        if gap <= ROUNDING:
            break
    else:
        raise NotApplicable(f"token by token, the plain model {problem}: not comparable")
    at_once = subject.streams(subject.opened)[subject.text]
    off = distance(_in_pieces(subject, subject.opened, pieces), at_once) / distance(at_once, plain)
    text = f"in pieces of {', '.join(map(str, pieces))} tokens, outputs are off by {off:.1e} of RSA's effect"
    if not off <= TOLERANCE:
        raise Failed(text)
    return text


def _in_pieces(subject: Subject, model: PreTrainedModel, pieces: Sequence[int]) -> Tensor:
    ids = subject.inputs[subject.text]
    cache, found = None, []
    for piece in ids.split([ids.shape[1] - sum(pieces), *pieces], dim=1):
        inputs = {**subject.inputs, subject.text: piece, CACHE: cache, "use_cache": True}
        streams, cache = _run(model, inputs)
        found.append(streams[subject.text])
    return torch.cat(found, dim=1)


def check_padding(subject: Subject) -> str:
    """A padded text in a batch gives the outputs of the text alone."""
    if not subject.accepts("attention_mask"):
        raise NotApplicable("the model takes no attention_mask")
    # A causal model never sees right padding. Left padding shifts the positions of a model that counts slots.
    sees_later = "decoder_input_ids" in subject.inputs or subject.leak > ROUNDING
    for side in ("left", "right") if sees_later else ("left",):
        plain, padded = _alone_and_padded(subject, subject.plain, side)
        gap = _relative(padded, plain)
        if gap <= ROUNDING:
            break
    else:
        raise NotApplicable(f"padding changes the plain model by {gap:.1e} too: not comparable")
    alone, padded = _alone_and_padded(subject, subject.opened, side)
    reached = {subject.text, *subject.reached()}
    off = max(distance(padded[name], alone[name]) / distance(alone[name], plain[name]) for name in reached)
    text = f"{side}-padded rows are off by {off:.1e} of RSA's effect"
    if not off <= TOLERANCE:
        raise Failed(text)
    return text


def padded_inputs(subject: Subject, side: str) -> dict[str, Tensor]:
    """The inputs with padding on one side of the first text, and with more text before the second."""
    ids, pad = subject.inputs["input_ids"], getattr(subject.model.config.get_text_config(), "pad_token_id", None)
    ends = (PADDING, 0) if side == "left" else (0, PADDING)
    batch = torch.cat([F.pad(ids[:1], ends, value=pad or 0), torch.cat([ids[1:, :PADDING], ids[1:]], dim=1)])
    mask = torch.cat([F.pad(torch.ones_like(ids[:1]), ends), torch.ones_like(batch[1:])])
    return subject.inputs | _placed(subject, batch, mask)


def _alone_and_padded(subject: Subject, model: PreTrainedModel, side: str) -> tuple[Streams, Streams]:
    """Outputs of the first text alone, and padded in a batch with a longer one; those of the padding are dropped."""
    first = {name: ids[:1] for name, ids in subject.inputs.items()}
    ids = first["input_ids"]
    alone = _run(model, first | _placed(subject, ids, torch.ones_like(ids)))[0]
    padded = _run(model, padded_inputs(subject, side))[0]
    real = slice(-ids.shape[1], None) if side == "left" else slice(ids.shape[1])
    return alone, {name: stream[:1, real] if name == "input_ids" else stream[:1] for name, stream in padded.items()}


def _placed(subject: Subject, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if subject.accepts("position_ids") else {}
    return {"input_ids": ids, "attention_mask": mask, **positions}


OF_BITS = (check_identity, check_unpatching, check_reload)  # in the model's own dtype
OF_NUMBERS = (check_effect, check_gradients, check_causality, check_cache, check_padding)  # in float32
CHECKS = {check.__name__.removeprefix("check_"): check for check in (*OF_BITS, *OF_NUMBERS)}


@torch.no_grad()
def examine(model: PreTrainedModel) -> Iterator[tuple[str, str, str]]:
    """Run all checks on a model; for each, yield "ok", "FAIL" or "note" (it does not apply), its name, and a line.

    A plain model gets RSA heads; afterwards the model is float32, unless it is quantised. Raises a ValueError if it
    takes no text.
    """
    model.eval()
    inputs = _random_inputs(model)
    before = PlainState(model, inputs)
    if not is_patched(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attention that gets no RSA heads
            patch_model(model, RSAConfig(gate_init=0.0))
        parameters = itertools.chain.from_iterable(heads.parameters() for _, heads in _rsa_layers(model))
        for i, parameter in enumerate(parameters):
            parameter.add_(0.01 * (1 + i % 7))  # away from the initial values, so that a reload has to find them
    subject = Subject(model, inputs, before)
    yield from (_verdict(check, subject) for check in OF_BITS)
    if not getattr(model, "is_quantized", False):
        subject = Subject(model.float(), inputs, before)
    yield from (_verdict(check, subject) for check in OF_NUMBERS)


def _verdict(check: Callable[[Subject], str], subject: Subject) -> tuple[str, str, str]:
    try:
        verdict, text = "ok", check(subject)
    except NotApplicable as reason:
        verdict, text = "note", str(reason)
    except Failed as failure:
        verdict, text = "FAIL", str(failure)
    except Exception as error:
        verdict, text = "FAIL", f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    return verdict, check.__name__.removeprefix("check_"), text
