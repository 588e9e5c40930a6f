"""Hundreds of damaged checkpoints: each raises a documented error, or loads exactly what its files contain.

The content is read by the format of safetensors alone (`damage.tensors`) and loaded into a freshly patched model.
"""

from __future__ import annotations

import copy
import functools
import json
import resource
import tempfile
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import rsa_hf
import rsa_hf.peft
from families import CONFIGS, FULL_PLAN, MORE_CONFIGS, move_rates, widen
from models import tiny
from peft_adapters import METHODS, disturb
from reliability import damage
from reliability.record import number_of, try_many
from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model
from rsa_hf.cli.common import UserError, load_checkpoint
from rsa_hf.saved_plan import RSA_KEY

PACKAGE = str(Path(rsa_hf.__file__).parent)
DOCUMENTED = (ValueError, TypeError, OSError)
GIGABYTE = 2**30
IDS = torch.arange(3, 14)[None]

# One layer, and two for plans per layer and shards.
MODELS = {
    "gpt2": (CONFIGS["gpt2"], {"n_layer": 1}),
    "shards": (CONFIGS["gpt2"], {}),
    "bert": (CONFIGS["bert"], {"num_hidden_layers": 1}),
    "bart": (MORE_CONFIGS["bart"], {"encoder_layers": 1, "decoder_layers": 1}),
    "transfo-xl": (functools.partial(tiny.config, "transfo-xl"), {"n_layer": 1}),
}
OTHER_MODULES = {
    "gpt2": ["h.0.mlp", "h.0", "wte", "ln_f", "h", "h.0.attn.c_attn", "h.7.attn", "x"],
    "shards": ["h.0.mlp", "h.1.mlp.c_fc", "h.1.ln_1"],
    "bert": ["encoder", "embeddings", "pooler", "encoder.layer.0.attention", "encoder.layer.0.attention.output"],
    "bart": ["encoder", "shared", "decoder.layers.0.encoder_attn", "decoder.layers.0", "decoder.layers.0.fc1"],
    "transfo-xl": ["layers", "word_emb", "drop"],
}
KINDS = [*damage.KINDS, "other module"]


@functools.cache
def plain(name):
    """A plain model, which tests must not change."""
    torch.manual_seed(1)
    make, changes = MODELS[name]
    config = make()
    config.update(changes)
    return widen(AutoModel.from_config(config))


@functools.cache
def sound(name):
    """The files of a patched model whose gates and rates are not at their initial values."""
    model = move_rates(patch_model(copy.deepcopy(plain(name)), FULL_PLAN))
    return saved(model, max_shard_size="40KB" if name == "shards" else "5GB")


def saved(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        return {
            path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix in (".json", ".safetensors")
        }


def write(folder, files):
    """Replace the content of a folder."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


@contextmanager
def little_memory():
    """Limit the memory to little more than a tiny model needs."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIGABYTE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def no_refusal():
    """Turn an error in a check of the answer into a failure, since loading did not refuse the files."""
    try:
        yield
    except DOCUMENTED as error:
        raise AssertionError(f"loaded, but: {error!r}") from error


def same_bits(one, other):
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*bits)


# --- the right answer -----------------------------------------------------------------------------------------------


def outputs(model):
    inputs = {"decoder_input_ids": IDS[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **inputs)[0]


@functools.lru_cache(maxsize=64)
def freshly_patched(name, plan):
    return patch_model(copy.deepcopy(plain(name)), json.loads(plan))


def require_right(model, name, files, info):
    """Check that all tensors are those of the files, and that RSA heads act as in a freshly patched model."""
    found, state = damage.tensors(files), model.state_dict()
    content = json.loads(files[damage.CONFIG])
    for key, tensor in found.items():
        assert same_bits(state[key], tensor.to(state[key].dtype)) if key in state else not RSA_KEY.search(key), key
    absent = set(state) - set(found) - set(model.all_tied_weights_keys)
    assert absent <= set(info["missing_keys"])
    assert not set(found) & set(info["missing_keys"])
    assert not any(RSA_KEY.search(key) for key in absent)
    heads = {key.removesuffix(".rsa"): m for key, m in model.named_modules() if isinstance(m, RSAHeads)}
    assert set(heads) == set(content["rsa"]["modules"])
    assert model.config.rsa == content["rsa"]
    if absent or {**content, "rsa": None} != {**json.loads(sound(name)[damage.CONFIG]), "rsa": None}:
        return "right answer; transformers names new tensors" if absent else "right answer: another model"
    return require_effect(model, name, heads, state, content["rsa"]["plan"])


def require_effect(model, name, heads, state, plan):
    try:
        answer = outputs(model)
    except ValueError as error:
        if "RSA heads, but this attention layer has" not in str(error):
            raise
        return "refused by the first forward: ValueError"
    fresh = freshly_patched(name, json.dumps(plan | {"layers": None}))
    fresh.load_state_dict(state)
    assert same_bits(answer, outputs(fresh))
    open_gates = any(bool((h.rates()["gate"] > 1e-6).any()) for h in heads.values())
    for key in heads:
        del model.get_submodule(key)._modules["rsa"]
    # Beside a weight of 1e30 nothing else has an effect.
    tame = all(bool((value.abs() < 1e3).all()) for value in state.values() if value.is_floating_point())
    if open_gates and tame:
        assert not torch.equal(outputs(model), answer)
    return None


def is_of_transformers(error):
    """Whether an error was raised outside rsa_hf and these tests."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not frames[-1].startswith((PACKAGE, str(Path(__file__).parent)))


def require_sound_process(folder):
    """Check that after a refusal everything else works as before."""
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(0).device.type == "cpu"
    write(folder, sound("gpt2"))
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert require_right(model, "gpt2", sound("gpt2"), info) is None
    write(folder, plain_files())
    model = AutoModel.from_pretrained(folder)
    assert not is_patched(model)
    assert same_bits(outputs(model), outputs(plain("gpt2")))


@functools.cache
def plain_files():
    return saved(plain("gpt2"))


# --- the trials -----------------------------------------------------------------------------------------------------


def try_kind(kind, folder, count):
    def case(random):
        name = "shards" if kind == "shards" else random.choice(list(MODELS))
        files = dict(sound(name))
        if kind == "other module":
            modules = json.loads(files[damage.CONFIG])["rsa"]["modules"]
            damage.move_heads(files, random.choice(modules), random.choice(OTHER_MODULES[name]))
        else:
            damage.KINDS[kind](random, files)
        write(folder, files)
        try:
            model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            with pytest.raises(UserError, match=r"\S"):
                load_checkpoint(str(folder))
            if random.random() < 0.02:
                require_sound_process(folder)
            if not isinstance(error, DOCUMENTED) and is_of_transformers(error):
                return f"refused by transformers: {type(error).__name__}"
            raise
        with no_refusal():
            return require_right(model, name, files, info)

    return try_many(f"checkpoints: {kind}", case, DOCUMENTED, count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_or_loaded_as_it_is(kind, tmp_path):
    threads = threading.active_count()
    with little_memory():
        outcomes = try_kind(kind, tmp_path, -(-number_of("checkpoints") // len(KINDS)))
    if kind != "plan that fits":
        assert any(word.startswith("refused") for word in outcomes), outcomes
    require_sound_process(tmp_path)
    assert threading.active_count() <= threads + 8


# --- single protections ---------------------------------------------------------------------------------------------


def in_config(edit):
    return lambda files: damage.edit_json(files, damage.CONFIG, edit)


def moved(old, new):
    return lambda files: damage.move_heads(files, old, new)


def one_more(key, like):
    def change(files):
        parts = damage.parts_of(files[damage.WEIGHTS])
        files[damage.WEIGHTS] = damage.packed(parts | {key: parts[like]})

    return change


def in_tensor(key, value, dtype):
    def change(files):
        parts = damage.parts_of(files[damage.WEIGHTS])
        values = torch.full([len(parts[key][1]) // 4], value, dtype=damage.DTYPES[dtype])
        parts[key] = {**parts[key][0], "dtype": dtype}, values.numpy().tobytes()
        files[damage.WEIGHTS] = damage.packed(parts)

    return change


def in_index(place):
    return lambda files: damage.edit_json(files, damage.INDEX, lambda c: c["weight_map"].update({"wte.weight": place}))


ATTENTION, DECODER = "h.0.attn", "decoder.layers.0"
REFUSED = {
    "a feed-forward layer": ("gpt2", moved(ATTENTION, "h.0.mlp"), "h.0.mlp .GPT2MLP., which is no self-attention"),
    "a model inside": ("bart", moved("encoder.layers.0.self_attn", "encoder"), "encoder .BartEncoder., which is no"),
    "cross-attention": (
        "bart",
        moved(f"{DECODER}.self_attn", f"{DECODER}.encoder_attn"),
        "encoder_attn .BartAttention., which is no self-attention",
    ),
    "one module more": (
        "gpt2",
        in_config(lambda content: content["rsa"]["modules"].append("blocks.0.attn")),
        "an RSA plan for blocks.0.attn, which this GPT2Model does not have",
    ),
    "a layer too many": (
        "gpt2",
        in_config(lambda content: content["rsa"]["plan"].update(layers=[0, 1])),
        "layers=.0, 1..*each of the 1 patched layers",
    ),
    "a gate with the name of a buffer": (
        "gpt2",
        one_more("h.9.attn.c_attn.bias.rsa.mu", f"{ATTENTION}.rsa.mu"),
        "in the checkpoint, but not in the plan: h.9.attn.c_attn.bias.rsa.mu",
    ),
    "a vast angle": ("gpt2", in_tensor("h.0.attn.rsa.theta", 1e38, "F32"), "theta is .* of at most 1e.12, is needed"),
    "whole numbers": ("gpt2", in_tensor("h.0.attn.rsa.eta", 1, "I32"), "eta is of type int32"),
    "a pickle by another name": ("shards", in_index("config.json"), "its weights in config.json, a pickle"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_hostile_checkpoint_is_refused(how, tmp_path):
    name, change, words = REFUSED[how]
    files = dict(sound(name))
    change(files)
    write(tmp_path, files)
    with little_memory():
        with pytest.raises(DOCUMENTED, match=words) as error:
            AutoModel.from_pretrained(tmp_path)
        assert len(str(error.value)) < 1000
        with pytest.raises(UserError, match=words):
            load_checkpoint(str(tmp_path))


# --- adapters -------------------------------------------------------------------------------------------------------

ADAPTER = "adapter_config.json"
ADAPTER_KINDS = ["header bit", "body bit", "truncated", "length", "other content", "gone", "swapped", "missing"]
ADAPTER_KINDS += ["extra", "dtype", "shape", "place", "name", "number", "plan", "section", "modules", "config bit"]


@functools.cache
def sound_adapter():
    model = copy.deepcopy(plain("gpt2"))
    adapted = disturb(rsa_hf.peft.get_peft_model(model, METHODS["lora"](), RSAConfig(**FULL_PLAN)))
    return saved(adapted)


def require_right_adapter(adapted, files):
    state = adapted.state_dict()
    for key, tensor in damage.tensors_of(files["adapter_model.safetensors"]).items():
        parts = key.split(".")
        inside = ["modules_to_save", "default"] if RSA_KEY.search(key) else ["default"]
        place = parts[:-1] + inside + parts[-1:]
        names = [key, ".".join(place), ".".join([*parts[:-1], "default", parts[-1]])]
        held = next((name for name in names if name in state), None)
        assert held is not None or not RSA_KEY.search(key), key
        if held is not None:
            assert same_bits(state[held], tensor.to(state[held].dtype)), key
    content = json.loads(files[ADAPTER])
    base = adapted.get_base_model()
    assert base.config.rsa == {key: content["rsa"][key] for key in ("format_version", "modules", "plan")}


def test_a_damaged_adapter_is_refused_or_loaded_as_it_is(tmp_path):
    keys = list(plain("gpt2").state_dict())

    def case(random):
        files = dict(sound_adapter())
        files[damage.CONFIG] = files.pop(ADAPTER)  # the name that the changes look for
        damage.KINDS[random.choice(ADAPTER_KINDS)](random, files)
        if damage.CONFIG in files:
            files[ADAPTER] = files.pop(damage.CONFIG)
        write(tmp_path, files)
        model = copy.deepcopy(plain("gpt2"))
        try:
            adapted = rsa_hf.peft.load(model, tmp_path)
        except Exception as error:
            assert list(model.state_dict()) == keys
            assert not is_patched(model)
            assert "rsa" not in vars(model.config)
            if not isinstance(error, DOCUMENTED) and is_of_transformers(error):
                return f"refused by PEFT: {type(error).__name__}"
            raise
        with no_refusal():
            require_right_adapter(adapted, files)
        return None

    with little_memory():
        outcomes = try_many("adapters", case, DOCUMENTED)
    assert outcomes["right answer"] > 0
    assert outcomes["refused: ValueError"] > 5


@pytest.mark.parametrize("was_patched", [False, True])
def test_a_late_refusal_by_peft_leaves_the_base_unchanged(was_patched, tmp_path):
    """PEFT has added its layers when it finds that there is no such bias."""
    files = dict(sound_adapter())
    files[ADAPTER] = json.dumps(json.loads(files[ADAPTER]) | {"bias": "some"}).encode()
    write(tmp_path, files)
    model = copy.deepcopy(plain("gpt2"))
    if was_patched:
        patch_model(model, FULL_PLAN)
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    with pytest.raises(NotImplementedError, match="some"):
        rsa_hf.peft.load(model, tmp_path)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert is_patched(model) is was_patched and not hasattr(model, "peft_config")
