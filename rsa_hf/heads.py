"""`RSAHeads`: the trainable part of one RSA layer, and the mixing of attention and recurrence (paper eq. 4)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from rsa_hf.config import LayerConfig
from rsa_hf.ops.autograd import recur
from rsa_hf.ops.decode import LagTable, decode
from rsa_hf.ops.mask import Geometry
from rsa_hf.ops.types import Mixing, Recurrence, widest_dtype, working_dtype
from rsa_hf.rem import decay_rates

__all__ = ["RSAHeads", "heads_in_force", "heads_of", "holds_copies"]


class RSAHeads(nn.Module):
    """The gate and the rates of one layer's RSA heads: out = (1 − g) · attention + g · P V (paper, eq. 4).

    Parameters, all one-dimensional, float32 whatever the model's dtype, and stored as value / parameter_scale:

    * `mu`: (1,), or (R,) with one gate per head; g = σ(μ).
    * `eta`: (k1 + k4,); λ = tanh η.
    * `nu`, `theta`: (k2 + k5,), or twice as many where pairs are not tied; γ = sigmoid ν, θ in radians.

    Those that a plan has no heads for are None.

    Args:
        plan: the heads of this layer.
    """

    mu: nn.Parameter
    eta: nn.Parameter | None
    nu: nn.Parameter | None
    theta: nn.Parameter | None
    adapter: Any = None  # goes with the layer into copies and pickles; see adapters/table.py
    _is_hf_initialized: bool = False  # transformers' mark: a model built around this one starts what is new alone

    def __init__(self, plan: LayerConfig) -> None:
        super().__init__()
        self.plan = plan
        sizes = {
            "mu": plan.num_rsa_heads if plan.gate_per_head else 1,
            "eta": plan.num_eta,
            "nu": plan.num_nu,
            "theta": plan.num_nu,
        }
        for name, size in sizes.items():
            # No empty parameters: savers that look for shared storage take all of them for one and drop it.
            parameter = nn.Parameter(torch.empty(size, dtype=torch.float32)) if size else None
            self.register_parameter(name, parameter)
        self._kept: tuple[Any, list[nn.Parameter], Recurrence, Tensor, LagTable] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter that a checkpoint has not set to where it starts.

        η is spread over [−2, −1] ∪ [1, 2] (paper, section 3); μ, and the ends between which ν and θ are spread over
        the pairs, are the plan's.
        """
        plan = self.plan
        eta = [_spread_over_both_signs((i + 0.5) / plan.num_eta) for i in range(plan.num_eta)]
        pairs = plan.num_cyclical_pairs + plan.num_dilated_cyclical_pairs

        def spread(ends: tuple[float, float]) -> list[float]:
            low, high = ends
            values = [low + (high - low) * (i + 0.5) / pairs for i in range(pairs)]
            # Untied, in head order: the cos heads of a kind, then its sin heads, each starting as the tied pair would.
            k2 = plan.num_cyclical_pairs
            return values if plan.tie_pairs else 2 * values[:k2] + 2 * values[k2:]

        starts = {
            "mu": [plan.gate_init] * self.mu.numel(),
            "eta": eta,
            "nu": spread(plan.nu_init),
            "theta": spread(plan.theta_init),
        }
        for name, start in starts.items():
            parameter = getattr(self, name)
            if (
                parameter is not None
                and parameter.device.type != "meta"
                and not getattr(parameter, "_is_hf_initialized", False)
            ):
                parameter.copy_(torch.tensor(start, dtype=torch.float32) / plan.parameter_scale)

    def rates(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """What is in force: `gate` (1,) or (R,), `lam` (k1 + k4,), `gamma` and `theta` as `nu` is.

        Args:
            dtype: to compute them in.
        """
        scale = self.plan.parameter_scale

        def value(parameter: nn.Parameter | None) -> Tensor:
            return self.mu.new_empty(0, dtype=dtype) if parameter is None else torch.mul(parameter.to(dtype), scale)

        lam, gamma = decay_rates(value(self.eta), value(self.nu))
        return {"gate": torch.sigmoid(value(self.mu)), "lam": lam, "gamma": gamma, "theta": value(self.theta)}

    def forward(self, attention: Tensor, value: Tensor, geometry: Geometry) -> Tensor:
        """Mix the recurrence into the output of attention.

        Args:
            attention: softmax attention's output, [B, T, H, D].
            value: V, [B, Hkv, S, D]; head h reads value head h // (H / Hkv).
            geometry: who sees whom.

        Returns:
            [B, T, H, D] in the dtype of `attention`: RSA heads mixed, plain heads untouched.

        Raises:
            ValueError: the layer has fewer heads than the plan has RSA heads, or other lengths than `geometry`.
            NotImplementedError: `torch.jit.trace` records the call.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise NotImplementedError(
                "RSA does not work with torch.jit.trace, which torch.onnx.export(dynamo=False) uses too: it would "
                "record what the masks of the example say. Use torch.export, or torch.onnx.export(..., dynamo=True)."
            )
        R, H = self.plan.num_rsa_heads, attention.shape[2]
        if R > H or H % value.shape[1]:
            raise ValueError(
                f"the plan has {R} RSA heads, but this attention layer has {H} heads and {value.shape[1]} value "
                f"heads: at most {H} RSA heads, and a whole number of heads per value head, are possible."
            )
        if value.shape[2] != geometry.key_length or attention.shape[1] != geometry.query_length:
            raise ValueError(
                f"attention has {attention.shape[1]} queries and {value.shape[2]} values, but the mask was read for "
                f"{geometry.query_length} and {geometry.key_length}."
            )
        if value.is_meta:
            return torch.empty_like(attention)  # a shape is all there is
        if self.mu.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling():
            # Not through `_apply`: FSDP and DeepSpeed hand a module parameters of their own.
            warnings.warn(
                f"RSA parameters came as {self.mu.dtype}: gates and rates are rounded, and learn coarsely. Under "
                "FSDP2 call rsa_hf.training.fsdp.shard_rsa_heads before the model is prepared.",
                stacklevel=2,
            )
        groups = H // value.shape[1]
        is_step = geometry.query_length == 1 and geometry.key_length > 1 and geometry.causal
        if is_step and not self._is_trained(value):
            return self._decode(attention, value, geometry, groups)
        self._kept = None  # a new text begins; what was kept for the last one is not trusted any longer
        recurrence, gate = self._in_force(groups)
        return recur(value, recurrence, geometry, Mixing(attention, gate))

    def _is_trained(self, value: Tensor) -> bool:
        return torch.is_grad_enabled() and (value.requires_grad or any(p.requires_grad for p in self.parameters()))

    def _decode(self, attention: Tensor, value: Tensor, geometry: Geometry, groups: int) -> Tensor:
        """One step of generation, with what depends on the parameters alone kept from step to step."""
        dtype = working_dtype(value)
        if torch.compiler.is_compiling():
            (recurrence, gate), table = self._in_force(groups), None
            gate = gate[:, None].to(dtype)
        else:
            recurrence, gate, table = self._tables(value, groups, dtype)
        R = len(recurrence.kinds)
        product = decode(value, recurrence, geometry, table).transpose(1, 2)
        if attention.shape[2] == R:
            return torch.lerp(attention.to(dtype), product, gate).to(attention.dtype)
        mixed, plain = attention.split((R, attention.shape[2] - R), dim=2)
        return torch.cat([torch.lerp(mixed.to(dtype), product, gate).to(attention.dtype), plain], dim=2)

    def _tables(self, value: Tensor, groups: int, dtype: torch.dtype) -> tuple[Recurrence, Tensor, LagTable]:
        """What is in force, gates as [R, 1], and the weights of its lags."""
        S = value.shape[2]
        # (Under torch's parametrize they are in a child: there is none else, and to look for one takes long.)
        own = self.parameters() if self._modules else self._parameters.values()
        parameters = [parameter for parameter in own if parameter is not None]
        # What is made under inference_mode cannot be a part of a graph later.
        state: list[Any] = [groups, dtype, value.device, torch.is_inference_mode_enabled()]
        for parameter in parameters:
            version = -1 if parameter.is_inference() else parameter._version
            # What is written through `.data` counts no version, and a text that begins with one token in a static
            # cache does not show that it is a new one. On a GPU reading the values would wait for it.
            values = parameter.tolist() if parameter.device.type == "cpu" else None
            state += [id(parameter), parameter.data_ptr(), version, values]
        kept = self._kept
        if kept is None or kept[0] != state or kept[4].longest < S:
            recurrence, gate = self._in_force(groups)
            # Room to grow, so that a cache that grows by a step does not need a new table for each.
            table = LagTable(recurrence, dtype, 2 * S)
            # The parameters are held, so that no other can get the id of one that was replaced.
            self._kept = kept = (state, parameters, recurrence, gate[:, None].to(dtype), table)
        return kept[2:]

    def _in_force(self, groups: int) -> tuple[Recurrence, Tensor]:
        """The REMs, for values that `groups` heads share, and the gate of each head, (R,)."""
        # Near ±1 float32 has no numbers for rates that parameters tell apart, and 1 − λ² would give η a gradient of 0.
        rates = self.rates(widest_dtype(self.mu.device))
        decay, theta = self.per_head(rates)
        gate = rates["gate"].expand(self.plan.num_rsa_heads)
        # Behind a shut gate P V is never read, so that it may not overflow either: 0 · inf would be NaN.
        decay = torch.where(gate.float() == 0, 0, decay)
        return Recurrence(self.plan.kinds, decay, theta, self.plan.dilations, groups), gate

    def per_head(self, rates: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """λ or γ, and θ, of each RSA head in head order: (R,) each."""
        plan = self.plan
        k1, copies = plan.num_regular, 2 if plan.tie_pairs else 1
        undilated = plan.num_cyclical_pairs * 2 // copies

        def in_head_order(regular: Tensor, cyclical: Tensor) -> Tensor:
            plain, dilated = [cyclical[:undilated]] * copies, [cyclical[undilated:]] * copies
            return torch.cat([regular[:k1], *plain, regular[k1:], *dilated])

        return (
            in_head_order(rates["lam"], rates["gamma"]),
            in_head_order(torch.zeros_like(rates["lam"]), rates["theta"]),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RSAHeads:
        # model.half() and model.to(bfloat16) must not round the rates: a step of bfloat16 near γ = 0.9 changes a
        # memory of 100 tokens by a third. Devices still change.
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not tensor.is_floating_point():
                return moved
            return tensor.to(moved.device)

        self._kept = None  # parameters may get other numbers at the same address
        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles make tables of their own.
        return {**self.__dict__, "_kept": None}

    def extra_repr(self) -> str:
        """The plan, in `print(model)`."""
        plan = self.plan
        return (
            f"regular={plan.num_regular}, cyclical_pairs={plan.num_cyclical_pairs}, "
            f"dilated_regular={plan.num_dilated_regular}, dilated_cyclical_pairs={plan.num_dilated_cyclical_pairs}, "
            f"dilation={list(plan.dilation)}"
        )


def _spread_over_both_signs(fraction: float) -> float:
    """Walk [−2, −1] and then [1, 2] as the fraction goes from 0 to 1."""
    return -2 + 2 * fraction if fraction < 0.5 else 2 * fraction


def heads_of(module: nn.Module) -> RSAHeads | None:
    """The RSA heads of an attention module, its child `rsa`; None where it has none."""
    rsa = module._modules.get("rsa")
    # By its plan, not its class: PEFT puts a wrapper there that passes attributes on.
    return cast(RSAHeads, rsa) if isinstance(getattr(rsa, "plan", None), LayerConfig) else None


def holds_copies(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper round RSA heads: the heads as patched, and a copy for each adapter."""
    return isinstance(module._modules.get("original_module"), RSAHeads)


def heads_in_force(model: nn.Module) -> Iterator[tuple[str, RSAHeads]]:
    """The RSA heads that a forward pass uses, with their names in the model, in module order.

    Under PEFT these are the copies of the active adapter or, where it has none or is disabled, the heads as patched.
    """
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in seen:
            continue
        if isinstance(module, RSAHeads):
            yield name, module
        elif holds_copies(module):
            seen.update(module.modules())
            # The wrapper passes attributes on to the copy in force, so whose method this is tells which one it is.
            yield name, cast(Any, module).rates.__self__
