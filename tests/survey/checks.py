"""Checks of RSA on a patched tiny model of any type, which raise AssertionError if they fail.

Those of `rsa_hf.checks`, and three that compare with eq. 4 written out (`reference.py`). `CHECKS` names with each check
the broken RSA (`broken.py`) that it must catch: a check that passes when RSA does nothing proves nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from families import move_rates
from rsa_hf import RSAConfig, RSAHeads, checks, patch_model, unpatch_model
from survey.reference import plain_attention, reference_attention, without_attention
from survey.tiny_models import TASKS, Case

LEAST_EFFECT = 1e-2  # share of the outputs that an open gate changes at least


class Patched(checks.Subject):
    """A tiny model with RSA heads and its outputs, state-dict keys and config from before patching."""

    def __init__(self, case: Case, inputs: dict[str, Tensor], before: checks.PlainState) -> None:
        auto = TASKS[case.task][1]
        # A part of a composite model may have no Auto class of its own.
        super().__init__(case.model, inputs, before, auto if type(case.model.config) in auto._model_mapping else None)
        self.case = case
        self.heads = [module for module in case.model.modules() if isinstance(module, RSAHeads)]

    def logits(self) -> Tensor:
        """The model's logits for the inputs of the case."""
        return self.case.model(**self.case.inputs).logits


@contextmanager
def patched(case: Case) -> Iterator[Patched]:
    """The case with RSA on up to four heads, half-open gates, and rates moved from their initial values."""
    model, inputs = case.model, dict(case.inputs)
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", inputs["input_ids"])
    with torch.no_grad(), reference_attention() as seen:
        before = checks.PlainState(model, inputs)
    heads = min(seen.values(), default=4)  # as many kinds of REMs as fit
    dilated = {"num_dilated_regular": 1, "dilation": 2} if heads >= 2 else {}
    patch_model(model, RSAConfig(num_regular=1, num_cyclical_pairs=int(heads >= 4), gate_init=0.0, **dilated))
    try:
        torch.manual_seed(1)
        with torch.no_grad():
            move_rates(model)
            yield Patched(case, inputs, before)
    finally:
        unpatch_model(model)


def check_values(model: Patched) -> None:
    """With and without padding, outputs equal those of the paper's equation 4, written out."""
    for name, inputs in {"text": model.inputs, "left-padded text": padded_inputs(model)}.items():
        with plain_attention():
            plain = _results(model, inputs)
        with reference_attention() as seen:
            expected = _results(model, inputs)
        if model.case.task != "sequence-classification":
            left = [type(module).__name__ for module in seen if not hasattr(module, "rsa")]
            assert not left, f"self-attention without RSA heads: {', '.join(left)}"
        found = _results(model, inputs)
        for stream in [each for each in expected if each == "logits" or each in model.reached()]:
            effect = checks.distance(expected[stream], plain[stream])
            share = effect / float(plain[stream].norm())
            assert share >= LEAST_EFFECT, f"{stream} of {name}: an open gate changes {share:.1e} of the outputs"
            gap = checks.distance(found[stream], expected[stream]) / effect
            assert gap <= checks.TOLERANCE, f"{stream} of {name}: off by {gap:.1e} of RSA's effect"


def check_direction(model: Patched) -> None:
    """With P alone, later tokens reach earlier outputs exactly if they do in the plain model."""
    alone, outside = checks.with_gates(model.model, math.inf), []
    for name in model.reached():
        plain = checks.backward_influence(model, model.plain, name)
        with without_attention():
            elsewhere = checks.backward_influence(model, model.model, name)
        found = checks.backward_influence(model, alone, name)
        if plain <= checks.ROUNDING:
            assert found <= checks.ROUNDING, (
                f"{name}: a later token changes earlier outputs by {found:.1e} of its own change"
            )
        elif elsewhere > checks.ROUNDING:
            outside.append(name)
        else:
            assert found >= LEAST_EFFECT, (
                f"{name}: a later token changes earlier outputs by {found:.1e} of its own change only"
            )
    if outside == model.reached():
        raise checks.NotApplicable("later tokens reach earlier ones outside attention as well")


def check_padding(model: Patched) -> None:
    """Padding does not change the outputs of a text."""
    if not padding_matters(model):
        raise checks.NotApplicable("no recurrence can reach padding: there are no RSA heads there, or no values")
    checks.CHECKS["padding"](model)


def padding_matters(model: Patched) -> bool:
    """Whether a recurrence that sees padding gives other outputs."""
    inputs = padded_inputs(model)
    with reference_attention():
        expected = _results(model, inputs)["input_ids"]
    with reference_attention(seen_padding=(checks.PADDING, inputs["input_ids"].shape[1])):
        through = _results(model, inputs)["input_ids"]
    return checks.distance(through, expected) > LEAST_EFFECT * checks.TOLERANCE * float(expected.norm())


@torch.enable_grad()
def check_gradients(model: Patched) -> None:
    """Every gate and rate gets the gradient of the equation written out, which is finite and not zero."""
    parameters = {n: p for n, p in model.case.model.named_parameters() if p.requires_grad}

    def gradients() -> dict[str, Tensor | None]:
        found = model.logits()
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
        values = torch.autograd.grad((found * weights).sum(), list(parameters.values()), allow_unused=True)
        return dict(zip(parameters, values, strict=True))

    with reference_attention():
        expected = gradients()
    found = gradients()
    reached = {name.rsplit(".", 2)[0] for name, gradient in expected.items() if gradient is not None}
    names = [name for name in parameters if ".rsa." in name and name.rsplit(".", 2)[0] in reached]
    if not names:
        raise checks.NotApplicable("the plain model's attention gets no gradients either")
    largest = max(float(expected[name].norm()) for name in names)
    for name in names:
        gradient, wanted = found[name], expected[name]
        assert gradient is not None, f"{name} gets no gradient"
        usable = bool((gradient.isfinite() & (gradient != 0)).all())
        assert usable, f"{name} has the gradient {gradient.tolist()}"
        gap = checks.distance(gradient, wanted) / max(float(wanted.norm()), LEAST_EFFECT * largest)
        assert gap <= checks.TOLERANCE, f"the gradient of {name} is off by {gap:.1e} of it"


CHECKS: dict[str, tuple[Callable[[Patched], object], tuple[str, ...]]] = {
    "values": (check_values, ("does nothing", "one step late", "other direction", "mask ignored")),
    "identity": (checks.CHECKS["identity"], ("not quite shut",)),
    "direction": (check_direction, ("other direction",)),
    "padding": (check_padding, ("mask ignored",)),
    "cache": (checks.CHECKS["cache"], ("offset forgotten",)),
    "reload": (checks.CHECKS["reload"], ("rates lost",)),
    "unpatching": (checks.CHECKS["unpatching"], ("one left behind",)),
    # Last, because RecurrentGemma keeps its state, with its graph, which cannot be copied.
    "gradients": (check_gradients, ("rates not trained", "one step late")),
}


def padded_inputs(model: Patched) -> dict[str, Tensor]:
    return checks.padded_inputs(model, "left")


def _results(model: Patched, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs at real tokens, and the logits of a classifier."""
    mask = inputs.get("attention_mask")
    found = model.streams(model.model, **inputs)
    if mask is not None:
        found["input_ids"] = found["input_ids"][mask[:, -found["input_ids"].shape[1] :].bool()]
    if model.case.task == "sequence-classification" and mask is None:
        found["logits"] = model.logits()
    return found
