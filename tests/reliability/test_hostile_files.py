"""Hostile plans and checkpoints are refused with a documented error, or read as they are."""

import copy
import functools
import json
import re
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import rsa_hf
import rsa_hf.peft
from families import CONFIGS, FULL_PLAN, MORE_CONFIGS, build, move_rates, widen
from file_edits import edit_tensors
from model_state import assert_same_state, state_of
from models import tiny
from reliability import hostile
from reliability.hostile import CONFIG, WEIGHTS
from reliability.trials import try_many
from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model, unpatch_model
from rsa_hf.cli.common import load_checkpoint
from rsa_hf.saved_plan import read_plan

PACKAGE = str(Path(rsa_hf.__file__).parent)
DOCUMENTED = (ValueError, TypeError, OSError)
IDS = torch.arange(3, 14)[None]
# One layer, and two for shards.
MODELS = {
    "gpt2": (CONFIGS["gpt2"], {"n_layer": 1}),
    "shards": (CONFIGS["gpt2"], {}),
    "bart": (MORE_CONFIGS["bart"], {"encoder_layers": 1, "decoder_layers": 1}),
    "transfo-xl": (functools.partial(tiny.config, "transfo-xl"), {"n_layer": 1}),
}


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
        paths = [path for path in Path(folder).iterdir() if path.suffix in (".json", ".safetensors")]
        return {path.name: path.read_bytes() for path in paths}


def write(folder, files):
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


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


def is_rsa(key):
    return re.search(r"\.rsa\.(mu|eta|nu|theta)$", key)


def outputs(model):
    inputs = {"decoder_input_ids": IDS[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **inputs)[0]


def by_another(error):
    """The outcome for an undocumented error that was raised outside rsa_hf and these tests, else None."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = isinstance(error, DOCUMENTED) or raised_in.startswith((PACKAGE, str(Path(__file__).parent)))
    return None if is_ours else f"refused by another library: {type(error).__name__}"


# --- plans ---------------------------------------------------------------------------------------------------------


def test_a_hostile_plan_is_refused_or_read_correctly():
    def case(random):
        config = RSAConfig.from_dict(hostile.plan(random))
        assert RSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    outcomes = try_many("plans", case, (ValueError, TypeError), fast=600, full=100_000)
    assert min(outcomes["right answer"], outcomes["refused: ValueError"], outcomes["refused: TypeError"]) > 20


def test_a_hostile_plan_leaves_no_model_half_patched():
    model = build("gpt2")
    before = state_of(model)

    def case(random):
        try:
            patch_model(model, hostile.plan(random))
        except Exception:
            assert_same_state(model, before)
            raise
        for heads in [module for module in model.modules() if isinstance(module, RSAHeads)]:
            rates = heads.rates()
            assert not rates.pop("gate").isnan().any()
            assert all(bool(rate.isfinite().all()) for rate in rates.values())
        unpatch_model(model)
        assert_same_state(model, before)

    outcomes = try_many("patches", case, (ValueError, TypeError), fast=100, full=5000)
    assert outcomes["right answer"] > 5


# --- checkpoints ---------------------------------------------------------------------------------------------------


def require_right(model, name, folder, info):
    """Check that all tensors are those of the files, and that RSA heads act as in a freshly patched model."""
    found, state = hostile.tensors(folder), model.state_dict()
    content = json.loads((folder / CONFIG).read_bytes())
    for key, tensor in found.items():
        assert same_bits(state[key], tensor.to(state[key].dtype)) if key in state else not is_rsa(key), key
    absent = set(state) - set(found) - set(model.all_tied_weights_keys)
    assert absent <= set(info["missing_keys"])
    assert not set(found) & set(info["missing_keys"])
    assert not any(map(is_rsa, absent))
    heads = {key.removesuffix(".rsa"): m for key, m in model.named_modules() if isinstance(m, RSAHeads)}
    assert set(heads) == set(content["rsa"]["modules"])
    assert model.config.rsa == content["rsa"]
    if absent or {**content, "rsa": None} != {**json.loads(sound(name)[CONFIG]), "rsa": None}:
        return "right answer; transformers names new tensors" if absent else "right answer: another model"
    try:
        answer = outputs(model)
    except ValueError as error:
        if "RSA heads, but this attention layer has" not in str(error):
            raise
        return "refused by the first forward: ValueError"
    plan = read_plan({**content["rsa"], "plan": content["rsa"]["plan"] | {"layers": None}})  # it may be an earlier one
    fresh = patch_model(copy.deepcopy(plain(name)), plan.config)
    fresh.load_state_dict(state)
    assert same_bits(answer, outputs(fresh))
    is_open = any(bool((layer.rates()["gate"] > 1e-6).any()) for layer in heads.values())
    for key in heads:
        del model.get_submodule(key)._modules["rsa"]
    # Beside a weight of 1e30 nothing else has an effect.
    if is_open and all(bool((value.abs() < 1e3).all()) for value in state.values() if value.is_floating_point()):
        assert not torch.equal(outputs(model), answer)
    return None


def require_sound_process(folder):
    """Check that after a refusal everything else works as before."""
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(0).device.type == "cpu"
    write(folder, sound("gpt2"))
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert require_right(model, "gpt2", folder, info) is None
    write(folder, saved(plain("gpt2")))
    model = AutoModel.from_pretrained(folder)
    assert not is_patched(model)
    assert same_bits(outputs(model), outputs(plain("gpt2")))


def other_module(name):
    """Damage that moves the heads of one module to one that is not self-attention."""

    def change(random, folder):
        modules = json.loads((folder / CONFIG).read_bytes())["rsa"]["modules"]
        others = [key for key, _ in plain(name).named_modules() if key and key not in modules]
        hostile.move_heads(folder, random.choice(modules), random.choice([*others, "h.7.attn", "x"]))

    return change


@pytest.mark.parametrize("kind", [*hostile.DAMAGES, "other module"])
def test_a_damaged_checkpoint_is_refused_or_loaded_as_it_is(kind, tmp_path):
    def case(random):
        name = random.choice(list(MODELS))
        write(tmp_path, sound(name))
        hostile.DAMAGES.get(kind, other_module(name))(random, tmp_path)
        try:
            model, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
        except Exception as error:
            with pytest.raises(ValueError, match=r"\S"):
                load_checkpoint(str(tmp_path))
            if (outcome := by_another(error)) is None:
                raise
            return outcome
        with no_refusal():
            return require_right(model, name, tmp_path, info)

    outcomes = try_many(f"checkpoints: {kind}", case, DOCUMENTED, fast=6, full=375)
    refused = [word.startswith("refused") for word in outcomes]
    assert any(refused) or kind in ("plan that fits", "dtype"), outcomes
    assert all(refused) or kind not in ("shape", "other module"), outcomes
    require_sound_process(tmp_path)


def test_a_gate_with_the_name_of_a_buffer_is_refused(tmp_path):
    """transformers ignores unexpected tensors whose names look like those of GPT-2's buffers."""
    write(tmp_path, sound("gpt2"))
    key = "h.9.attn.c_attn.bias.rsa.mu"
    edit_tensors(tmp_path / WEIGHTS, lambda content: content.update({key: content["h.0.attn.rsa.mu"].clone()}))
    with pytest.raises(ValueError, match=key):
        AutoModel.from_pretrained(tmp_path)
