"""Find the self-attention modules of a model, put RSA heads on them, and take them off again."""

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.children import attach_heads, detach_heads, is_peft_wrapper, shared_copy
from rsa_hf.config import RSAConfig
from rsa_hf.integration.attention import connect, disconnect
from rsa_hf.integration.loading import is_named_self_attention, is_self_attention
from rsa_hf.integration.paged import forget_paged_cache
from rsa_hf.integration.split_layers import require_whole_sequence
from rsa_hf.integration.trial import AttentionCall, record_attention_calls
from rsa_hf.layer import RSAHeads
from rsa_hf.saved_plan import SavedPlan, differences, name_in_files, read_plan, text_config, with_parts, write_plan
from rsa_hf.utils.text import shorten

logger = logging.getLogger(__name__)

PROBE_LENGTH = 8
PROBE_DECODER_LENGTH = 5  # not the encoder's length, or cross-attention would look like self-attention


def patch_model(
    model: PreTrainedModel,
    config: RSAConfig | Mapping[str, Any] | None = None,
    *,
    probe_inputs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Put RSA heads on the self-attention modules of a model, in place.

    The modules are found by running a copy of the model's base, which shares its weights, on a few tokens. The copy is
    patched and run again, to check that every RSA layer takes part. If anything fails, the model is left as it was.

    The config is written to `model.config.rsa`. A model that is built from this config object later has RSA heads too,
    which is logged as a warning; for a plain model, copy the config before patching.

    Args:
        model: any transformers model whose attention goes through transformers' attention interface, or is listed in
            `rsa_hf/integration/architectures`.
        config: which heads become RSA heads; None: `RSAConfig()`. A mapping is read with `RSAConfig.from_dict`.
        probe_inputs: keyword arguments for the trial runs, for a base model that does not take `input_ids`; query and
            key lengths of cross-attention must differ. None: the base model's attribute `rsa_probe_inputs`, or a few
            tokens.

    Returns:
        The model. Patching again with the same config does nothing; so does a config without heads, with a warning.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`, or a setting has the wrong type.
        ValueError: the model has no attention that can be patched, the config does not fit it, it is patched already
            with another config, or it is on the meta device and its modules do not say whether they are causal.
        NotImplementedError: the model's sequence is split across processes.
        RuntimeError: an RSA layer took no part in the forward pass, or a class is not as expected.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch_model takes a transformers PreTrainedModel, got {type(model).__name__}. Patch the model inside, "
            "before it is wrapped (DDP, PEFT, torch.compile); with PEFT use rsa_hf.peft.get_peft_model."
        )
    if not isinstance(config, RSAConfig):
        config = RSAConfig.from_dict({} if config is None else config)
    if config.heads == ():
        if is_patched(model):
            raise ValueError("the config names no heads, but the model is patched already. Call unpatch_model.")
        logger.warning("the config names no heads, so this %s stays without recurrence.", type(model).__name__)
        return model
    require_whole_sequence(model)
    if not is_patched(model) and any("base_layer" in module._modules for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} has PEFT adapters already, which would not save RSA heads that come later. "
            "Patch first, or use rsa_hf.peft.get_peft_model; to keep what the adapters learned, patch the model that "
            "merge_and_unload() returns."
        )
    base = model.base_model
    # DINOv3's base is an encoder that takes hidden states.
    takes_inputs = getattr(base, "main_input_name", "input_ids") in inspect.signature(base.forward).parameters
    # A forward pass may change a module permanently: a short input makes BigBird replace its block-sparse attention.
    whole: Any = shared_copy(base if takes_inputs else model).eval()
    if any(each._attn_implementation == "flex_attention" for each in with_parts(whole.config)):
        # Its kernel for CPUs takes long to compile, may fail to, and is wrong for 8 tokens in torch 2.13.
        whole.set_attn_implementation("eager")
    trial = whole if takes_inputs else whole.base_model
    run = functools.partial(_run, whole, probe_inputs)
    for layer in whole.modules():
        # bitsandbytes packs weights on first use, and the copy shares them with the model.
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("bitsandbytes."):
            layer.forward = functools.partial(_zeros, layer)  # type: ignore[method-assign]
    connect(whole)
    found, others = _self_attention_calls(trial, base, run)
    if others:
        warnings.warn(
            f"{shorten(others)} of this {type(base).__name__} gets no RSA heads: it computes something else than "
            "softmax attention, or not through transformers' attention interface, or its queries and keys have no "
            "common time axis.",
            stacklevel=2,
        )
    names = list(found)
    if config.layers is not None:
        if config.layers[-1] >= len(names):
            raise ValueError(
                f"layers={list(config.layers)}: this model has {len(names)} self-attention modules, so indices go "
                f"from 0 to {len(names) - 1}: {shorten(names)}."
            )
        names = [names[i] for i in config.layers]
    calls = {name_in_files(name): found[name] for name in names}
    config = _with_direction(config, calls)
    plan = SavedPlan.of(list(calls), config, [call.layer_shape[0] for call in calls.values()])
    if is_patched(model):
        _require_same_plan(model, plan)
        return model
    _require_all_called(trial, {name: call.module for name, call in calls.items()}, plan, run)
    new = attach_heads([(base.get_submodule(name), plan.layers[name_in_files(name)]) for name in names])
    for heads, call in zip(new, calls.values(), strict=True):
        heads.layer_shape = call.layer_shape
    connect(base)
    forget_paged_cache(model)
    model.config.rsa = write_plan(plan)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code compiled before does not notice that `connect` wraps methods
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the RSA heads in place: restores the exact model, config and state-dict keys. Returns the model.

    A plain model is left as it is.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
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
    if not is_patched(model):  # a plan in its config may belong to another model that shares the config
        return model
    detach_heads(model)
    disconnect(model)
    forget_paged_cache(model)
    # A part that is a model itself may have been patched alone, or have its own copy of the config (T5's halves).
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        for config in with_parts(part.config):
            vars(config).pop("rsa", None)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether any module of the model has RSA heads."""
    return any(isinstance(module, RSAHeads) for module in model.modules())


def _with_direction(config: RSAConfig, calls: Mapping[str, AttentionCall]) -> RSAConfig:
    """Set the config's `causal` if modules do not say it (LayoutLM, Doge) or are wrong (BigBirdPegasus, NLLB-MoE)."""
    if config.causal is not None:
        return config
    unknown = [name for name, call in calls.items() if call.causal is None]
    if unknown:
        raise ValueError(
            f"{shorten(unknown)} ({type(calls[unknown[0]].module).__name__}): the modules do not say whether they are "
            "causal, and no mask shows it on the meta device, or where probe_inputs end in padding. Set causal in "
            "RSAConfig: True, False, or a list of one of them for each layer."
        )
    directions = tuple(bool(call.causal) for call in calls.values())
    if all(call.stated is call.causal for call in calls.values()):
        return config
    return replace(config, causal=directions[0] if len(set(directions)) == 1 else directions)


def _require_same_plan(model: PreTrainedModel, plan: SavedPlan) -> None:
    content = vars(model.config).get("rsa")
    if (present := None if content is None else read_plan(content)) == plan:
        return
    what = "in part" if present is None else f"with another plan ({differences(present, plan)})"
    raise ValueError(
        f"the model is patched already, {what}. Call unpatch_model first; that discards the trained gates and rates."
    )


def _self_attention_calls(
    trial: nn.Module, base: nn.Module, run: Callable[[], None]
) -> tuple[dict[str, AttentionCall], list[str]]:
    """A call of each self-attention module that can be patched, in module order; the classes of others that ran."""
    names = {module: name for name, module in trial.named_modules()}
    named = {module for module, name in names.items() if is_named_self_attention(name, module)}
    ran: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: ran.add(module)) for module in named]
    with record_attention_calls() as calls:
        run()
    for hook in hooks:
        hook.remove()
    ran |= named - set(trial.modules())  # replaced while they ran: BigBird's block-sparse attention
    by_module = {call.module: call for call in calls if call.query_length == call.key_length}
    if bound := sorted({type(module).__name__ for module in by_module.keys() & set(base.modules())}):
        raise ValueError(
            f"a copy of this {type(trial).__name__} runs {shorten(bound)} of the model itself: a forward was replaced "
            "on an instance (layer.forward = …). Patch first, and replace or compile it afterwards."
        )
    found = {
        name: by_module[module]
        for module, name in names.items()
        # Equal lengths in `probe_inputs` make cross-attention look like self-attention; loading would refuse it.
        if module in by_module and is_self_attention(name, module)
    }
    if found:
        return found, sorted({type(module).__name__ for module in ran if names[module] not in found})
    classes = {type(module).__name__ for module in trial.modules()}
    raise ValueError(
        f"{type(trial).__name__} has no attention that can be patched: no self-attention module called transformers' "
        "attention interface, and no class is among those of transformers that rsa_hf knows (attention by name: "
        f"{shorten(sorted(name for name in classes if 'attention' in name.lower())) or 'none'}). RSA mixes recurrence "
        "into softmax self-attention."
    )


def _require_all_called(
    trial: nn.Module, modules: Mapping[str, nn.Module], plan: SavedPlan, run: Callable[[], None]
) -> None:
    """Put RSA heads on modules of the trial copy, and check that they take part in a forward pass."""
    new = attach_heads([(module, plan.layers[name]) for name, module in modules.items()])
    run()
    silent = [name for name, heads in zip(modules, new, strict=True) if heads.layer_shape is None]
    if silent:
        raise RuntimeError(
            f"the RSA heads of {shorten(silent)} took no part in a forward pass; the model is unchanged. Leave these "
            "modules out with layers=[…], or give probe_inputs on which they run."
        )


def _run(trial: nn.Module, probe_inputs: Mapping[str, Any] | None) -> None:
    """Run a model once; the random generator stays as it was."""
    inputs = dict(_default_inputs(trial) if probe_inputs is None else probe_inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                with _WithoutWeights():
                    trial(**inputs)
            except Exception:  # some models need the values; others fail here again
                trial(**inputs)
    except Exception as error:
        advice = "Give patch_model(..., probe_inputs={...}) that its forward accepts."
        if any(has_offloaded_params(module) for module in trial.modules()):
            advice = "Some of its weights are offloaded: load it without device_map, patch it, save it, and load that."
        raise ValueError(
            f"a trial run of {type(trial).__name__} with {', '.join(inputs)} failed ({type(error).__name__}: "
            f"{error}). {advice}"
        ) from error


def _zeros(layer: Any, x: Tensor) -> Tensor:
    """The output of a linear layer of zeros."""
    return x.new_zeros(*x.shape[:-1], layer.out_features)


class _WithoutWeights(TorchFunctionMode):
    """Linear layers return zeros, so that patching a large model does not read all of its weights twice."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear and len(args) >= 2 and type(args[1]) in (nn.Parameter, Tensor):
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if function is torch.addmm and len(args) == 3 and type(args[2]) in (nn.Parameter, Tensor):  # GPT-2's Conv1D
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1])
        return function(*args, **(kwargs or {}))


def token_ids(settings: Iterable[Any]) -> set[Any]:
    """The token ids in settings of a config. A setting may be a list: Llama 3 has several end tokens."""
    return {token for each in settings for token in (each if isinstance(each, list) else [each])}


def _default_inputs(base: nn.Module) -> dict[str, Any]:
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
    text = text_config(config)
    special = token_ids(getattr(text, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id"))
    token = next(token for token in range(len(special) + 1) if token not in special)
    device = next((p.device for p in base.parameters()), torch.device("cpu"))
    inputs = {"input_ids": torch.full((1, PROBE_LENGTH), token, device=device)}
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        rows = getattr(text, "num_codebooks", 1)  # MusicGen reads a row of sound as one row for each codebook
        inputs["decoder_input_ids"] = torch.full((rows, PROBE_DECODER_LENGTH), token, device=device)
    return inputs
