"""Find the self-attention modules of a model, put RSA heads on them, and take them off again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads, is_peft_wrapper
from rsa_hf.integration.architectures import NO_SOFTMAX_ATTENTION, connect
from rsa_hf.integration.attach import attach_heads, detach_heads, require_whole_heads
from rsa_hf.integration.attention import AttentionCall, record_attention_calls
from rsa_hf.saved_plan import SavedPlan, configs_with_plans, differences, read_plan, write_plan
from rsa_hf.utils.brief import shorten

__all__ = ["is_patched", "patch_model", "unpatch_model"]

PROBE_LENGTH = 8
PROBE_DECODER_LENGTH = 5  # another length than the encoder's, or cross-attention looks like self-attention


def patch_model(
    model: PreTrainedModel,
    config: RSAConfig | Mapping[str, Any] | None = None,
    *,
    probe_inputs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Put RSA heads on the self-attention modules of a model, in place.

    Which modules those are is found by running the model's base once on a few tokens; after patching it is run again,
    to see that every RSA layer takes part. Where anything fails the model is as it was before.

    The plan is written on `model.config`, as `config.rsa`: a model that is built from this very object later has RSA
    heads too, which is logged as a warning. Give a plain one a copy from before.

    Args:
        model: any transformers model whose attention goes through transformers' attention interface, or is one of
            those in `rsa_hf/adapters/`.
        config: the plan; None: `RSAConfig()`. A mapping is read with `RSAConfig.from_dict`.
        probe_inputs: keyword arguments for that run, for a base model that does not take `input_ids`; query and key
            lengths of cross-attention must differ.

    Returns:
        The model. Patching again with the same plan does nothing.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or a setting has the wrong type.
        ValueError: the model has no attention that can be patched, the plan does not fit it, it is patched already
            with another plan, or on the meta device its layers do not say their directions.
        NotImplementedError: the model's heads are spread over processes by tensor parallelism.
        RuntimeError: an RSA layer took no part in the model's forward pass, or the model is one of those in
            `rsa_hf/adapters/` and not as expected.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch_model takes a transformers PreTrainedModel, got {type(model).__name__}. For a wrapped model (DDP, "
            "PEFT, torch.compile) patch the model inside, before it is wrapped; rsa_hf.peft.get_peft_model patches "
            "and adds a PEFT adapter in one call."
        )
    if config is None:
        config = RSAConfig()
    elif isinstance(config, Mapping):
        config = RSAConfig.from_dict(config)
    elif not isinstance(config, RSAConfig):
        raise TypeError(f"config is an RSAConfig or a mapping, got {type(config).__name__}: {config!r:.200}")
    require_whole_heads(model)
    if not is_patched(model) and any("base_layer" in module._modules for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} has PEFT adapters already, which would not save RSA heads that come later. "
            "Patch first, or use rsa_hf.peft.get_peft_model; to keep what the adapters learned, patch the model that "
            "merge_and_unload() returns."
        )
    base = model.base_model
    found = _self_attention_calls(base, probe_inputs)
    _warn_of_parts_without(base, {call.module for call in found.values()})
    names = list(found)
    if config.layers is not None:
        if config.layers[-1] >= len(names):
            raise ValueError(
                f"layers={list(config.layers)}: this model has {len(names)} self-attention modules, so indices go "
                f"from 0 to {len(names) - 1}: {shorten(names)}."
            )
        names = [names[i] for i in config.layers]
    num_heads = [found[name].num_heads for name in names]
    config = _with_direction(config, {name: found[name] for name in names})
    plan = SavedPlan(tuple(names), config.resolved(num_heads))
    if is_patched(model):
        _require_same_plan(model, plan)
        return model
    attach_heads(list(zip([found[name].module for name in names], plan.config.layer_plans(num_heads), strict=True)))
    model.config.rsa = write_plan(plan)
    try:
        _require_all_called(base, names, probe_inputs)
    except BaseException:
        unpatch_model(model)
        raise
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Take the RSA heads off again: the exact model, config and state-dict keys from before.

    Args:
        model: a patched model; one that is not patched is left as it is.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no `PreTrainedModel`.
        ValueError: PEFT holds the RSA heads.
    """
    take_off_first = (
        "First take the adapters off: unpatch_model(model.merge_and_unload()) keeps what LoRA learned, "
        "unpatch_model(model.unload()) gives the plain model. Layers of an adapter from transformers' own add_adapter "
        "stay, even after delete_adapter: load the base model again."
    )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"unpatch_model takes a transformers PreTrainedModel, got {type(model).__name__}. For DDP and "
            f"torch.compile give the model inside. For a PEFT model: {take_off_first}"
        )
    if any(is_peft_wrapper(module) for module in model.modules()):
        raise ValueError(f"PEFT holds the RSA heads of this {type(model).__name__}. {take_off_first}")
    detach_heads(model)
    for config in configs_with_plans(model):
        del config.rsa
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether any module of the model has RSA heads."""
    return any(isinstance(module, RSAHeads) for module in model.modules())


def _with_direction(config: RSAConfig, calls: Mapping[str, AttentionCall]) -> RSAConfig:
    """The plan; with the direction in it where modules say none, or another than their masks have.

    Some classes carry no `is_causal` (LayoutLM, Doge), or one that their masks belie (BigBirdPegasus; NLLB-MoE, whose
    encoder and decoder share it).
    """
    if config.causal is not None:
        return config
    unknown = [name for name, call in calls.items() if call.direction is None]
    if unknown:
        raise ValueError(
            f"{shorten(unknown)} ({type(calls[unknown[0]].module).__name__}): the modules do not say whether they are "
            "causal, and on the meta device no mask shows it. Set causal=True or causal=False in RSAConfig."
        )
    directions = tuple(bool(call.direction) for call in calls.values())
    if all(call.causal is call.direction for call in calls.values()):
        return config
    return replace(config, causal=directions[0] if len(set(directions)) == 1 else directions)


def _warn_of_parts_without(base: Any, modules: Collection[nn.Module]) -> None:
    """Say which half of an encoder-decoder has no self-attention that can be patched."""
    if not base.config.is_encoder_decoder:
        return
    for half, part in (("encoder", base.get_encoder()), ("decoder", base.get_decoder())):
        if part is not base and not any(module in modules for module in part.modules()):
            kinds = sorted({type(m).__name__ for m in part.modules() if "attention" in type(m).__name__.lower()})
            warnings.warn(
                f"the {half} of this {type(base).__name__} gets no RSA heads: none of its self-attention goes through "
                f"transformers' attention interface with queries and keys on one time axis ({shorten(kinds)}).",
                stacklevel=3,
            )


def _require_same_plan(model: PreTrainedModel, plan: SavedPlan) -> None:
    content = vars(model.config).get("rsa")
    present = None if content is None else read_plan(content)
    if present == plan:
        return
    if present is None:
        what = "a part of this model is patched already"
    else:
        what = f"the model is patched already, with another plan ({differences(present, plan)})"
    raise ValueError(f"{what}. Call unpatch_model first; that discards the trained gates and rates.")


def _self_attention_calls(base: nn.Module, probe_inputs: Mapping[str, Any] | None) -> dict[str, AttentionCall]:
    """The self-attention modules that can be patched, by name relative to the base, in order."""
    _require_softmax_attention(base)
    connect(base)
    with record_attention_calls() as calls:
        _probe(base, probe_inputs)
    by_module = {call.module: call for call in calls if call.query_length == call.key_length}
    found = {name: by_module[module] for name, module in base.named_modules() if module in by_module}
    if found:
        return found
    if calls:
        seen = shorten(sorted({type(call.module).__name__ for call in calls}))
        raise ValueError(
            f"{type(base).__name__} has cross-attention only ({seen}: query and key lengths differ), which RSA never "
            "patches: recurrence needs queries and keys on one time axis."
        )
    looked_at = shorten(sorted({type(m).__name__ for m in base.modules() if "attention" in type(m).__name__.lower()}))
    raise ValueError(
        f"{type(base).__name__} has no attention that can be patched: no module called transformers' attention "
        "interface, and rsa_hf.integration.architectures has no entry for its classes. Looked at "
        f"{sum(1 for _ in base.modules())} modules, among them of attention: {looked_at or 'none'}."
    )


def _require_softmax_attention(base: nn.Module) -> None:
    config: Any = base.config
    reason = NO_SOFTMAX_ATTENTION.get(config.model_type)
    if reason is not None:
        raise ValueError(
            f"{type(base).__name__} has no attention that can be patched: {reason}, and RSA mixes recurrence into "
            "softmax attention. Hybrid models are patched in their layers of softmax attention."
        )


def _require_all_called(base: nn.Module, names: Sequence[str], probe_inputs: Mapping[str, Any] | None) -> None:
    called: set[str] = set()
    handles = [
        base.get_submodule(name).rsa.register_forward_hook(lambda *_, name=name: called.add(name))  # type: ignore[union-attr]
        for name in names
    ]
    try:
        _probe(base, probe_inputs)
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name in names if name not in called]
    if silent:
        raise RuntimeError(
            f"the RSA heads of {shorten(silent)} took no part in a forward pass; the model is unchanged."
        )


def _probe(base: nn.Module, probe_inputs: Mapping[str, Any] | None) -> None:
    """Run the base model once, in evaluation mode, leaving its modules and the random generators as they were."""
    inputs = dict(_probe_inputs(base) if probe_inputs is None else probe_inputs)
    try:
        with _modules_put_back(base), torch.no_grad(), torch.random.fork_rng(devices=[]):
            base.eval()
            try:
                with _WithoutWeights():
                    base(**inputs)
            except Exception:  # of a model to which values matter; if it fails for good, it says so now
                base(**inputs)
    except Exception as error:
        advice = "Give patch_model(..., probe_inputs={...}) that its forward accepts."
        if any(has_offloaded_params(module) for module in base.modules()):
            advice = "Some of its weights are offloaded: load it without device_map, patch it, save it, and load that."
        raise ValueError(
            f"a trial run of {type(base).__name__} with {', '.join(inputs)} failed ({type(error).__name__}: {error}). "
            f"{advice}"
        ) from error


@contextmanager
def _modules_put_back(base: nn.Module) -> Iterator[None]:
    """Leave every module as it was, with its children and its flags.

    A short input makes BigBird replace its block-sparse attention by dense modules, for good.
    """
    before = []
    for module in base.modules():
        own = vars(module)
        before += [(entries, dict(entries)) for entries in (own, own["_modules"], own["_parameters"], own["_buffers"])]
    try:
        yield
    finally:
        for entries, known in before:
            entries.clear()
            entries.update(known)


class _WithoutWeights(TorchFunctionMode):
    """Linear layers give zeros: who calls whom, and with which shapes, depends on no weight of a large matrix."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear and len(args) >= 2 and type(args[1]) in (nn.Parameter, Tensor):
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if function is torch.addmm and len(args) == 3 and type(args[2]) in (nn.Parameter, Tensor):  # GPT-2's Conv1D
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1])
        return function(*args, **(kwargs or {}))


def _probe_inputs(base: nn.Module) -> dict[str, Any]:
    own: dict[str, Any] | None = getattr(base, "rsa_probe_inputs", None)
    if own is not None:
        return own
    accepted = inspect.signature(base.forward).parameters
    main = getattr(base, "main_input_name", "input_ids")
    if main != "input_ids" and main in accepted:
        raise ValueError(
            f"{type(base).__name__} takes {main}, not input_ids: give patch_model(..., probe_inputs={{{main!r}: …}}), "
            "a small input on which the model runs."
        )
    config: Any = base.config
    text = config.get_text_config()
    special = {getattr(text, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    token = next(token for token in range(len(special) + 1) if token not in special)
    device = next((p.device for p in base.parameters()), torch.device("cpu"))
    inputs = {"input_ids": torch.full((1, PROBE_LENGTH), token, device=device)}
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = torch.full((1, PROBE_DECODER_LENGTH), token, device=device)
    return inputs
