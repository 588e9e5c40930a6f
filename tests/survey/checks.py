"""Checks of RSA on a patched tiny model of any type, which raise AssertionError if they fail.

Tolerances are relative to RSA's effect, because a check that passes when RSA does nothing proves nothing. If the plain
model does not have the property that is checked, the check raises `NotApplicable`. `CHECKS` names with each check the
broken RSA (`broken.py`) that it must catch.
"""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model, unpatch_model
from survey.reference import plain_attention, reference_attention, without_attention
from survey.tiny_models import FIRST_TOKEN, LAST_TOKEN, TASKS, Case

__all__ = ["CHECKS", "NotApplicable", "Patched", "padding_matters", "patched"]

TOLERANCE = 2e-3  # of RSA's effect
LEAST_EFFECT = 1e-2  # share of the outputs that an open gate changes at least
NOTHING = 1e-5  # share of the outputs that rounding may change
PADDING = 3


class NotApplicable(Exception):  # noqa: N818
    """The plain model does not have the property that is checked; the message says why."""


@dataclass
class Patched:
    """A tiny model with RSA heads, and its outputs, state-dict keys and config from before patching."""

    case: Case
    plain: Tensor
    plain_keys: list[str]
    plain_config: dict[str, Any]

    @property
    def heads(self) -> list[RSAHeads]:
        """All RSA layers."""
        return [module for module in self.case.model.modules() if isinstance(module, RSAHeads)]


@contextmanager
def patched(case: Case) -> Iterator[Patched]:
    """The case with RSA on up to four heads, half-open gates, and rates moved from their initial values."""
    model = case.model
    with torch.no_grad(), reference_attention() as seen:
        plain = logits(case)
    before = Patched(case, plain, list(model.state_dict()), copy.deepcopy(model.config.to_dict()))
    heads = min(seen.values(), default=4)  # as many kinds of REMs as fit
    dilated = {"num_dilated_regular": 1, "dilation": 2} if heads >= 2 else {}
    patch_model(model, RSAConfig(num_regular=1, num_cyclical_pairs=int(heads >= 4), gate_init=0.0, **dilated))
    try:
        torch.manual_seed(1)
        with torch.no_grad():
            for heads in before.heads:
                for parameter in heads.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.02)
        yield before
    finally:
        unpatch_model(model)


def logits(case: Case, model: PreTrainedModel | None = None) -> Tensor:
    """The model's logits for the inputs of the case."""
    return (model or case.model)(**case.inputs).logits


def streams(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of each token, [B, T, …], by the name of the input that has the tokens."""
    model = case.model
    if case.task == "sequence-classification":
        model = case.model.base_model
        if case.model.config.is_encoder_decoder:
            inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    out = model(**inputs)
    last = out.logits if case.model is model else out.last_hidden_state
    encoder = getattr(out, "encoder_last_hidden_state", None)
    if encoder is None:
        return {"input_ids": last}
    return {"input_ids": encoder} | ({"decoder_input_ids": last} if "decoder_input_ids" in case.inputs else {})


def check_values(model: Patched) -> None:
    """With and without padding, outputs equal those of the paper's equation 4, written out."""
    case = model.case
    for name, inputs in {"text": case.inputs, "left-padded text": _padded(case)}.items():
        with plain_attention():
            plain = _results(case, inputs)
        with reference_attention() as seen:
            expected = _results(case, inputs)
        if not (case.model.config.is_encoder_decoder and case.task == "sequence-classification"):
            left = [type(module).__name__ for module in seen if not hasattr(module, "rsa")]
            assert not left, f"self-attention without RSA heads: {', '.join(left)}"
        found = _results(case, inputs)
        for stream in _reached(model, expected):
            effect = _distance(expected[stream], plain[stream])
            share = effect / float(plain[stream].norm())
            assert share >= LEAST_EFFECT, f"{stream} of {name}: an open gate changes {share:.1e} of the outputs"
            gap = _distance(found[stream], expected[stream]) / effect
            assert gap <= TOLERANCE, f"{stream} of {name}: off by {gap:.1e} of RSA's effect"


def check_shut_gate(model: Patched) -> None:
    """A shut gate gives the unpatched model, bit for bit."""
    with _gate(model, -math.inf):
        found = logits(model.case)
    assert torch.equal(found, model.plain), f"off by {_distance(found, model.plain):.1e}"


def check_direction(model: Patched) -> None:
    """With P alone, later tokens reach earlier outputs exactly if they do in the plain model."""
    case, outside = model.case, []
    names = _reached(model, streams(case, case.inputs))
    for name in names:
        with plain_attention():
            plain = _backwards(case, name)
        with without_attention():
            elsewhere = _backwards(case, name)
        with _gate(model, math.inf):
            found = _backwards(case, name)
        if plain <= NOTHING:
            assert found <= NOTHING, f"{name}: a later token changes earlier outputs by {found:.1e} of its own change"
        elif elsewhere > NOTHING:
            outside.append(name)
        else:
            assert found >= LEAST_EFFECT, (
                f"{name}: a later token changes earlier outputs by {found:.1e} of its own change only"
            )
    if outside == names:
        raise NotApplicable("later tokens reach earlier ones outside attention as well")


def check_left_padding(model: Patched) -> None:
    """Left padding does not change the outputs of a text."""
    case = model.case
    if not padding_matters(model):
        raise NotApplicable("no recurrence can reach padding: there are no RSA heads there, or no values")

    def gap() -> float:
        found, alone = streams(case, _padded(case)), streams(case, _placed(case, case.inputs))
        return sum(_distance(found[name][:1, -alone[name].shape[1] :], alone[name][:1]) for name in alone)

    with plain_attention():
        plain, before = gap(), streams(case, case.inputs)
    if plain > NOTHING * sum(float(stream.norm()) for stream in before.values()):
        raise NotApplicable(f"padding changes the plain model too (by {plain:.1e})")
    after = streams(case, case.inputs)
    share = gap() / sum(_distance(after[name], before[name]) for name in before)
    assert share <= TOLERANCE, f"off by {share:.1e} of RSA's effect"


def padding_matters(model: Patched) -> bool:
    """Whether a recurrence that sees padding gives other outputs."""
    case, inputs = model.case, _padded(model.case)
    with reference_attention():
        expected = _results(case, inputs)["input_ids"]
    with reference_attention(seen_padding=(PADDING, inputs["input_ids"].shape[1])):
        through = _results(case, inputs)["input_ids"]
    return _distance(through, expected) > LEAST_EFFECT * TOLERANCE * float(expected.norm())


def check_cache(model: Patched) -> None:
    """A text that is read in pieces over a cache gives the outputs of the whole text."""
    case = model.case
    if case.task not in ("causal-lm", "seq2seq"):
        raise NotApplicable("this head does not generate")
    if not _reached(model, [case.text]):
        raise NotApplicable("the decoder has no RSA heads")
    with plain_attention():
        if _backwards(case, case.text) > NOTHING:
            raise NotApplicable("later tokens reach earlier ones in the plain model")
        pieces = _pieces(case)
        before = streams(case, case.inputs)[case.text]
    at_once = streams(case, case.inputs)[case.text]
    share = _distance(_in_pieces(case, pieces), at_once) / _distance(at_once, before)
    assert share <= TOLERANCE, f"pieces of {pieces}: off by {share:.1e} of RSA's effect"


def check_saving(model: Patched) -> None:
    """A model that is saved and loaded through its Auto class has the same outputs, bit for bit."""
    case, auto = model.case, TASKS[model.case.task][1]
    # A part of a composite model may have no Auto class of its own.
    loader = auto if type(case.model.config) in auto._model_mapping else type(case.model)

    def gap() -> float | str:
        try:
            with tempfile.TemporaryDirectory() as folder:
                case.model.save_pretrained(folder)
                loaded = loader.from_pretrained(folder).eval()
            assert not is_patched(case.model) or loaded.config.rsa == case.model.config.rsa, "the plan differs"
            return _distance(logits(case, loaded), logits(case))
        except Exception as error:
            return str(error)

    found = gap()
    if found == 0:
        return
    with _unpatched(model):
        plain = gap()
    if plain != 0:
        raise NotApplicable(f"the plain model does not come back the same either ({plain!s:.200})")
    raise AssertionError(f"off by {found}")


@torch.enable_grad()
def check_gradients(model: Patched) -> None:
    """Every gate and rate gets the gradient of the equation written out, which is finite and not zero."""
    parameters = {n: p for n, p in model.case.model.named_parameters() if p.requires_grad}

    def gradients() -> dict[str, Tensor | None]:
        found = logits(model.case)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
        values = torch.autograd.grad((found * weights).sum(), list(parameters.values()), allow_unused=True)
        return dict(zip(parameters, values, strict=True))

    with reference_attention():
        expected = gradients()
    found = gradients()
    reached = {name.rsplit(".", 2)[0] for name, gradient in expected.items() if gradient is not None}
    names = [name for name in parameters if ".rsa." in name and name.rsplit(".", 2)[0] in reached]
    if not names:
        raise NotApplicable("the plain model's attention gets no gradients either")
    largest = max(float(expected[name].norm()) for name in names)
    for name in names:
        gradient, wanted = found[name], expected[name]
        assert gradient is not None, f"{name} gets no gradient"
        usable = bool((gradient.isfinite() & (gradient != 0)).all())
        assert usable, f"{name} has the gradient {gradient.tolist()}"
        gap = _distance(gradient, wanted) / max(float(wanted.norm()), LEAST_EFFECT * largest)
        assert gap <= TOLERANCE, f"the gradient of {name} is off by {gap:.1e} of it"


def check_unpatching(model: Patched) -> None:
    """Unpatching restores the model from before, with its config and state-dict keys."""
    with _unpatched(model):
        again = model.case.model
        assert list(again.state_dict()) == model.plain_keys, "the keys of the state dict differ"
        config, before = again.config.to_dict(), model.plain_config
        changed = sorted(key for key in {*config, *before} if config.get(key) != before.get(key))
        assert not changed, f"the config differs in {', '.join(changed)}"
        found = logits(model.case)
        assert torch.equal(found, model.plain), f"off by {_distance(found, model.plain):.1e}"


CHECKS: dict[str, tuple[Callable[[Patched], None], tuple[str, ...]]] = {
    "values": (check_values, ("does nothing", "one step late", "other direction", "mask ignored")),
    "shut gate": (check_shut_gate, ("not quite shut",)),
    "direction": (check_direction, ("other direction",)),
    "left padding": (check_left_padding, ("mask ignored",)),
    "cache": (check_cache, ("offset forgotten",)),
    "saving": (check_saving, ("rates lost",)),
    "gradients": (check_gradients, ("rates not trained", "one step late")),
    "unpatching": (check_unpatching, ("one left behind",)),
}


# --- how the checks run a model -------------------------------------------------------------------------------------


def _results(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs at real tokens, and the logits of a classifier."""
    mask = inputs.get("attention_mask")
    found = streams(case, inputs)
    if mask is not None:
        found["input_ids"] = found["input_ids"][mask[:, -found["input_ids"].shape[1] :].bool()]
    if case.task == "sequence-classification" and mask is None:
        found["logits"] = case.model(**inputs).logits
    return found


def _padded(case: Case) -> dict[str, Tensor]:
    """The inputs with padding before the first text, and with more text before the second."""
    ids = case.inputs["input_ids"]
    first = torch.full((1, PADDING), getattr(case.model.config.get_text_config(), "pad_token_id", None) or 0)
    ids = torch.cat([torch.cat([first, ids[:1, :PADDING]]), ids], dim=1)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return _placed(case, {**case.inputs, "input_ids": ids, "attention_mask": mask})


def _placed(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, with position ids if the model takes them."""
    if "position_ids" not in inspect.signature(case.model.forward).parameters:
        return inputs
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return {**inputs, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _backwards(case: Case, name: str) -> float:
    """How much another last token changes earlier outputs, relative to the change of its own output."""
    ids = case.inputs[name].clone()
    ids[:, -1] = FIRST_TOKEN + (ids[:, -1] + 1) % (LAST_TOKEN - FIRST_TOKEN)
    change = (streams(case, {**case.inputs, name: ids})[name] - streams(case, case.inputs)[name]).abs()
    return float(change[:, :-1].max() / change[:, -1].max())


def _pieces(case: Case) -> list[int]:
    """The lengths in which the plain model can read the text over a cache: several tokens at once, or one by one."""
    length = case.inputs[case.text].shape[1]
    expected, problem = streams(case, case.inputs)[case.text], ""
    for pieces in ([length - 5, 3, 1, 1], [length - 2, 1, 1]):
        try:
            gap = _distance(_in_pieces(case, pieces), expected) / float(expected.norm())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if gap <= NOTHING:
                return pieces
            problem = f"off by {gap:.1e}"
    raise NotApplicable(f"the plain model cannot do it either ({problem})")


def _in_pieces(case: Case, pieces: list[int]) -> Tensor:
    cache, found = None, []
    for ids in case.inputs[case.text].split(pieces, dim=1):
        out = case.model(**{**case.inputs, case.text: ids}, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        if cache is None:
            raise NotApplicable("the model keeps no cache")
        found.append(out.logits)
    return torch.cat(found, dim=1)


def _reached(model: Patched, names: Iterable[str]) -> list[str]:
    """The names of the texts that RSA heads read: in an encoder-decoder one half may have none."""
    if not model.case.model.config.is_encoder_decoder:
        return list(names)
    halves = {"input_ids": model.case.model.get_encoder(), "decoder_input_ids": model.case.model.get_decoder()}
    return [name for name in names if name == "logits" or is_patched(halves[name])]


@contextmanager
def _unpatched(model: Patched) -> Iterator[None]:
    """Unpatch the model in the block, and restore its heads afterwards."""
    network, plan = model.case.model, RSAConfig.from_dict(model.case.model.config.rsa["plan"])
    states = [copy.deepcopy(heads.state_dict()) for heads in model.heads]
    try:
        unpatch_model(network)
        yield
    finally:
        for module in network.modules():
            module._modules.pop("rsa", None)
        patch_model(network, plan)
        for heads, state in zip(model.heads, states, strict=True):
            heads.load_state_dict(state)


@contextmanager
def _gate(model: Patched, mu: float) -> Iterator[None]:
    """Set every μ in the block, and restore it afterwards."""
    gates = [heads.mu for heads in model.heads]
    before = [gate.detach().clone() for gate in gates]
    try:
        for gate in gates:
            gate.data.fill_(mu)
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.data.copy_(value)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm())
