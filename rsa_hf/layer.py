"""`RSAHeads`, the trainable part of one RSA layer.

Notation: batch B, heads H, RSA heads R ≤ H, value heads Hv, queries T, keys S, head size D.

An RSA head mixes softmax attention with the recurrence P V (paper, eq. 4):

    out = (1 − g) · softmax(QKᵀ/√D) V + g · P V        g = sigmoid μ

P is the head's recurrence encoding matrix, P[t, s] = f(τ) with τ = position(t) − position(s) (`rem.py`; eqs. 2 and 3).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import logging

from rsa_hf.config import LayerSpec
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import Learned, Problem
from rsa_hf.ops.shard import Shard, sum_gradients
from rsa_hf.rem import KINDS, decay_rates

logger = logging.get_logger(__name__)

PARAMETERS = ("mu", "eta", "nu", "theta", "free_lags")
SHUT = 1e4  # largest initial |μ|: σ(−SHUT) is exactly 0, and averages of it, unlike those of −∞, are not NaN


class RSAHeads(nn.Module):
    """Gates and rates of one layer's RSA heads: out = (1 − g) · attention + g · P V (paper, eq. 4).

    All parameters are one-dimensional, float32 whatever the model's dtype. All but the last are stored as
    value / parameter_scale:

    * `mu`: (1,), or (R,) with one gate per head; g = sigmoid μ.
    * `eta`: one per regular head; λ = tanh η.
    * `nu`, `theta`: one per cyclical head, or per pair where pairs are tied; γ = sigmoid ν, θ in radians.
    * `free_lags`: f(kd) for the steps k = 1 … K of the first RSA head, then of the second, and so on.

    A parameter is None if the spec has no heads for it.

    Args:
        spec: the heads of this layer.
    """

    mu: nn.Parameter
    eta: nn.Parameter | None
    nu: nn.Parameter | None
    theta: nn.Parameter | None
    free_lags: nn.Parameter | None
    architecture: Any = None  # row in integration/architectures, kept here to be copied and pickled with the layer
    model_config: Any = None  # the model's config, if there is a row and its direction depends on that
    layer_shape: tuple[int, int, int] | None = None  # heads, value heads, head size; None: loaded, and not yet called
    _is_hf_initialized: bool = True  # tells transformers' own initialisation to skip the module

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        # With dynamic=True, Dynamo cannot read a float of one object in several checkpointed layers.
        self.spec = replace(spec, layout=replace(spec.layout))
        for name in PARAMETERS:
            size = len(getattr(spec, name))
            # None instead of an empty parameter: savers take all empty tensors for one shared tensor and drop them.
            parameter = nn.Parameter(torch.empty(size, dtype=torch.float32)) if size else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters as the spec says, except those on the meta device."""
        for name in PARAMETERS:
            parameter = getattr(self, name)
            if parameter is not None and parameter.device.type != "meta":
                start = torch.tensor(getattr(self.spec, name), dtype=torch.float32, device=parameter.device)
                start = start.clamp(-SHUT, SHUT) if name == "mu" else start
                start = start if name == "free_lags" else start / self.spec.layout.scale
                if isinstance(parameter, DTensor):  # every process has the values: None sends nothing
                    start = distribute_tensor(start, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(start)

    def rates(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Effective values: `gate` (1,) or (R,), `lam` shaped as `eta`, `gamma` and `theta` shaped as `nu`."""
        scale = self.spec.layout.scale

        def value(parameter: nn.Parameter | None) -> Tensor:
            return self.mu.new_empty(0, dtype=dtype) if parameter is None else torch.mul(parameter.to(dtype), scale)

        lam, gamma = decay_rates(value(self.eta), value(self.nu))
        return {"gate": torch.sigmoid(value(self.mu)), "lam": lam, "gamma": gamma, "theta": value(self.theta)}

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask, shard: Shard | None = None) -> Tensor:
        """Mix P V into the output of softmax attention (eq. 4).

        Args:
            attention: output of softmax attention, [B, T, H, D].
            value: V, [B, Hv, S, D]; head h reads value head h // (H / Hv).
            mask: which keys each query sees.
            shard: under tensor parallelism, the run of the layer's heads that `attention` and `value` hold.

        Returns:
            [B, T, H, D] in the dtype of `attention`: RSA heads mixed, plain heads unchanged.

        Raises:
            ValueError: the layer does not have the heads of the spec, or its sizes do not fit each other or the mask.
            NotImplementedError: called under `torch.jit.trace`.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise NotImplementedError(
                "RSA does not work with torch.jit.trace, which torch.onnx.export(dynamo=False) uses too: it would "
                "record the masks of the example. Use torch.export, or torch.onnx.export(..., dynamo=True)."
            )
        (B, T, H, D), (_, Hv, S, _), last = attention.shape, value.shape, self.spec.layout.rows[-1].head
        total = H if shard is None else H * shard.size
        if last >= total or H % Hv:
            raise ValueError(
                f"the spec has RSA heads up to index {last}, but this attention layer has {total} heads and "
                f"{Hv * total // H} value heads: indices below {total}, and a whole number of heads per value head, "
                "are possible."
            )
        if (mask.query_length, mask.key_length) != (T, S) or value.shape != (B, Hv, S, D):
            raise ValueError(
                f"attention is {list(attention.shape)}, value {list(value.shape)}, and the mask is for "
                f"{mask.query_length} queries and {mask.key_length} keys: [B, T, H, D] and [B, Hv, S, D] are needed."
            )
        if value.is_meta:
            return torch.empty_like(attention)
        learned, layout = self.learned, self.spec.layout
        assert learned.mu is not None
        if learned.mu.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling():
            learned = self._in_float32()
        if shard is not None:
            attention, learned = sum_gradients(attention, learned, shard)
            layout = layout.of_run(shard.heads(H))
            if not layout.rows:
                return attention
        return solve(Problem(value, attention, learned, layout, H // Hv, mask))

    @property
    def learned(self) -> Learned:
        """The parameters, as `ops` takes them."""
        own = self._parameters  # attribute access, which looks here last, takes five times as long
        return Learned(*(own[name] if name in own else getattr(self, name) for name in PARAMETERS))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RSAHeads":
        # model.half() and model.to(bfloat16) must not round the rates: one step of bfloat16 near γ = 0.9 changes the
        # weight of a lag of 100 by a third. Devices still change.
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not tensor.is_floating_point():
                return moved
            return tensor.to(moved.device)

        had_values = not self.mu.is_meta
        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        if not (had_values or self.mu.is_meta):
            self.reset_parameters()  # to_empty() leaves the memory as it was
        return self

    def _in_float32(self) -> Learned:
        """Undo a change of dtype that `_apply` could not prevent, if the parameters are the module's own.

        TRL casts everything that is trained alongside quantised weights, accelerate's loaders everything they load.
        FSDP and DeepSpeed, which need a process group, have parameters of their own.
        """
        dtype, advice = self.mu.dtype, "They are float32 from now on."
        if dist.is_initialized() or not all(isinstance(parameter, nn.Parameter) for parameter in self.parameters()):
            advice = (
                "Under FSDP use FSDP2, and call rsa_hf.training.shard_rsa_heads(model, accelerator) before the model "
                "is prepared. Where TRL has rounded them, undo it before train(): parameter.data = "
                "parameter.data.float()."
            )
        else:
            with torch.inference_mode(False):
                for parameter in self.parameters():
                    parameter.data = parameter.data.float()
        logger.warning_once(f"RSA parameters are {dtype}: gates and rates are rounded, and learn coarsely. {advice}")
        return self.learned

    def extra_repr(self) -> str:
        """The spec, in `print(model)`."""
        layout = self.spec.layout
        counts = Counter((KINDS[row.kind], row.dilation) for row in layout.rows)
        described = [f"{n} {kind}{f' dilated by {d}' if d > 1 else ''}" for (kind, d), n in counts.items()]
        return f"{', '.join(described)}; heads {list(layout.heads)}"
