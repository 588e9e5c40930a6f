"""First-order effects of recurrence: how the loss changes with the weight of each lag, of every head, in every row.

An RSA head adds P V to attention's output A with a gate g (paper, eq. 4), out = (1 − g) A + g P V, where
P[t, s] = f(t − s). With G = ∂loss/∂out, as one backward pass gives it for all heads,

    ∂loss/∂g = Σ_τ f(τ) c(τ) − d,    c(τ) = Σ_t ⟨G_t, V_{t−τ}⟩,    d = Σ_t ⟨G_t, A_t⟩.

c and d do not depend on f. So one pass gives the derivatives for every REM and, by the chain rule, for its rates.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_pt_utils import find_batch_size

from rsa_hf.children import heads_of
from rsa_hf.config import LayerSpec, RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.mask import AttentionMask, boolean_mask, lags
from rsa_hf.ops.shard import Shard
from rsa_hf.patching import patch_model, unpatch_model
from rsa_hf.rem import working_dtype

MOST_PRODUCTS = 2**24  # of queries and keys at a time
HEAD_RATE = 1e-3
IGNORED_LABEL = -100  # by transformers' losses
KNOWS_LITTLE = 0.95  # share of the loss of a constant guess


@dataclass(frozen=True)
class Gradients:
    """What one pass over N rows says about each layer. Sums over rows are derivatives of the mean loss, times N."""

    lags: list[Tensor]  # c(τ) of each layer, [N, H, S]; S is the length of its longest row
    attention: list[Tensor]  # d of each layer, [N, H]
    terms: float  # number of terms in the loss of a row, on average: its labels other than −100


class ProbedModel:
    """An unpatched model whose layers can be given RSA heads and asked for gradients; it is restored on exit."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> "ProbedModel":
        model = self.model
        self._training = {module: module.training for module in model.modules()}
        self._trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        patch_model(model, RSAConfig(num_regular=1, gate_init=-math.inf))
        self.probes = []
        for module in list(model.modules()):
            if (heads := heads_of(module)) is not None:
                module.rsa = _Probe(heads.spec)
                self.probes.append(module.rsa)
        model.eval().requires_grad_(False)
        self._head_before: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        return self

    def __exit__(self, *error: Any) -> None:
        for parameter, (value, grad) in self._head_before.items():
            parameter.data.copy_(value)
            parameter.grad = grad
        unpatch_model(self.model)
        for module, was_training in self._training.items():
            module.training = was_training
        for parameter, was_trainable in self._trainable.items():
            parameter.requires_grad_(was_trainable)

    @property
    def directions(self) -> list[bool]:
        """Whether the REMs of each layer are masked; known after a pass."""
        return [probe.causal for probe in self.probes]

    def train_head(self, batches: Sequence[Mapping[str, Any]], steps: int) -> int:
        """Train all of the model but its base, if it is a classifier that knows no more than the label counts.

        The loss of a new head says little about the layers below it. The head is restored on exit. Returns the number
        of AdamW steps that were taken, 0 for a model that needs none.
        """
        if not self._is_at_chance(batches):
            return 0
        base = set(self.model.base_model.parameters())
        head = [parameter for parameter in self.model.parameters() if parameter not in base]
        self._head_before = {parameter: (parameter.detach().clone(), parameter.grad) for parameter in head}
        optimizer = torch.optim.AdamW([parameter.requires_grad_() for parameter in head], lr=HEAD_RATE)
        for batch in itertools.islice(itertools.cycle(batches), steps):
            optimizer.zero_grad()
            self._loss(batch).backward()
            optimizer.step()
        self.model.requires_grad_(False)
        return steps

    @torch.no_grad()
    def _is_at_chance(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the model is a classifier whose loss is about that of a constant guess."""
        labels = [batch.get("labels") for batch in batches]
        is_classifier = all(isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point() for x in labels)
        if not is_classifier or self.model.base_model is self.model:
            return False
        counts = torch.cat(labels).unique(return_counts=True)[1].double()  # type: ignore[arg-type]
        shares = counts / counts.sum()
        guess = -float(torch.xlogy(shares, shares).sum())
        rows = [find_batch_size(batch) for batch in batches]
        loss = sum(float(self._loss(batch)) * count for batch, count in zip(batches, rows, strict=True)) / sum(rows)
        return bool(loss > KNOWS_LITTLE * guess)

    def set_heads(self, config: RSAConfig) -> None:
        """Give the layers the heads that a config names, and no others."""
        for probe in self.probes:
            probe.current = None
        assert config.layers is not None
        for layer, spec in zip(config.layers, config.layer_specs([None] * len(config.layers)), strict=True):
            self.probes[layer].current = RSAHeads(spec).to(self.model.device)

    def gradients(self, batches: Iterable[Mapping[str, Any]]) -> Gradients:
        """Run each batch forward and backward."""
        by_batch, rows, terms = [], [], 0
        for batch in batches:
            found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.probes]
            for probe, calls in zip(self.probes, found, strict=True):
                probe.found = calls
            self._loss(batch).backward()
            rows.append(find_batch_size(batch))
            labels = batch.get("labels")
            terms += int((labels != IGNORED_LABEL).sum()) if isinstance(labels, Tensor) else rows[-1]
            by_batch.append([_summed_over_calls(calls, rows[-1]) for calls in found])
        for probe in self.probes:
            probe.found = None
        layers = list(zip(*by_batch, strict=True))
        return Gradients(
            [_concatenated([count * c for count, (c, _) in zip(rows, layer, strict=True)]) for layer in layers],
            [torch.cat([count * d for count, (_, d) in zip(rows, layer, strict=True)]) for layer in layers],
            terms / sum(rows),
        )

    @torch.no_grad()
    def losses(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """The loss of each row, [N]."""
        single = (
            take_rows(batch, row)
            for batch in batches
            for row in torch.arange(find_batch_size(batch), device="cpu").split(1)
        )
        return torch.tensor([float(self._loss(row)) for row in single], dtype=torch.float32, device="cpu")

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        # Copies, because tensors that were made in inference_mode cannot be saved for the backward pass.
        inputs = {key: x.to(self.model.device, copy=True) if isinstance(x, Tensor) else x for key, x in batch.items()}
        loss: Tensor | None = getattr(self.model(**inputs), "loss", None)
        if loss is None:
            raise ValueError(
                f"{type(self.model).__name__} gives no loss for batches with {', '.join(batch)}: they need labels, "
                "and the model a head that computes a loss."
            )
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"the model's loss on a batch is {float(loss)}: there is nothing to calibrate on.")
        return loss


def take_rows(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some rows of a batch, by their indices; values without an entry for each row stay as they are."""
    count = find_batch_size(batch)

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count

    return {key: value[rows.to(value.device)] if has_rows(value) else value for key, value in batch.items()}


def _summed_over_calls(found: list[tuple[Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
    """The sums over all calls of a layer in one batch."""
    c, d = _concatenated([c for c, _ in found]), torch.cat([d for _, d in found])
    return c.unflatten(0, (-1, rows)).sum(0), d.unflatten(0, (-1, rows)).sum(0)


def _concatenated(of_lags: list[Tensor]) -> Tensor:
    longest = max(x.shape[-1] for x in of_lags)
    return torch.cat([F.pad(x, (0, longest - x.shape[-1])) for x in of_lags])


class _Probe(RSAHeads):
    """An `rsa` child that records c and d of each backward pass in `found`, with RSA heads of its own or without."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.current: RSAHeads | None = None
        self.found: list[tuple[Tensor, Tensor]] | None = None
        self.causal = True  # as the mask of the last call

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask, shard: Shard | None = None) -> Tensor:
        """Equation 4 for the current heads."""
        if shard is not None:
            raise NotImplementedError(
                "calibrate does not work with tensor parallelism. Calibrate the model loaded without tp_plan; the "
                "config that it gives fits the split model."
            )
        self.causal = mask.causal
        output = attention if self.current is None else self.current(attention, value, mask)
        if (found := self.found) is None or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # all weights are frozen
            output = output.detach().requires_grad_()
        dtype, attention, value = working_dtype(value), attention.detach(), value.detach()

        @torch.no_grad()
        def record(grad: Tensor) -> None:
            by_attention = (grad.to(dtype) * attention.to(dtype)).sum((1, 3))
            found.append((lag_products(grad.to(dtype), value.to(dtype), mask), by_attention))

        output.register_hook(record)
        return output


def lag_products(grad: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """c(τ) = Σ_t ⟨G_t, V_s⟩ over the keys s at lag τ that query t sees, in either direction if REMs are unmasked.

    G is [B, T, H, D] and V [B, Hv, S, D]; the result is [B, H, S], 0 at lag 0.
    """
    B, _, H, _ = grad.shape
    S, shared = value.shape[2], grad.shape[2] // value.shape[1]
    tau = lags(mask, value.device)
    visible = (boolean_mask(mask, tau) & (tau != 0)).expand(B, H, -1, -1)
    products = grad.new_zeros(B, H, S)
    # A few heads of a row at a time: all products at once would take as much memory as attention written out.
    heads_at_once = max(1, MOST_PRODUCTS // tau.numel())
    for row in range(B):
        keys = torch.where(visible[row].any(-2)[..., None], value[row].repeat_interleave(shared, 0), 0)
        queries = grad[row].transpose(0, 1)
        for first in range(0, H, heads_at_once):
            some = slice(first, first + heads_at_once)
            both = torch.where(visible[row, some], queries[some] @ keys[some].mT, 0)
            products[row, some].index_add_(1, tau.abs().flatten(), both.flatten(1))
    return products
