"""Transformer-XL checkpoints of transformers 4, of the original code and of NVIDIA's."""

import argparse
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from convert_transformer_xl import convert_checkpoint
from transformers import AutoModelForCausalLM

from models import tiny
from models.tiny import BANDS, in_segments, text
from rsa_hf import RSAConfig, patch_model

GOLDEN = Path(__file__).parent / "golden"
build = partial(tiny.build, "transfo-xl")
config = partial(tiny.config, "transfo-xl")
LAYOUTS = {
    "plain": {"untie_r": False},
    "one_table": {"cutoffs": [9, 14, 20]},
    "one_table_projected": {"cutoffs": [9, 14, 20], "d_embed": 20},
    "tables": BANDS,
    "tables_untied": {**BANDS, "proj_share_all_but_first": False, "tie_word_embeddings": False, "pre_lnorm": True},
}


@pytest.mark.parametrize("layout", ["one_table", "plain", "tables"])
@torch.no_grad()
def test_bin_files_of_transformers_4_load_like_safetensors(layout, tmp_path):
    """`.bin` holds every tied parameter twice, safetensors once."""
    shutil.copytree(GOLDEN / layout, tmp_path, dirs_exist_ok=True)
    expected = AutoModelForCausalLM.from_pretrained(GOLDEN / layout)
    state = {name: value.clone() for name, value in expected.state_dict().items()}
    state["transformer.pos_emb.inv_freq"] = torch.ones(8)
    if layout == "plain":
        for i in range(2):
            for name in ("r_w_bias", "r_r_bias"):
                state[f"transformer.layers.{i}.dec_attn.{name}"] = state[f"transformer.{name}"].clone()
    for file in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / file).unlink(missing_ok=True)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = text(length=9)
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    assert loaded.num_parameters() == expected.num_parameters()
    assert loaded.config.zero_memory


def original(model, nvidia):
    """The model's weights as a state dict of the original implementation, or of NVIDIA's."""
    state = {}
    for name, value in model.state_dict().items():
        name = name.removeprefix("transformer.")
        if name.startswith("crit.cluster"):
            value = value.flip(0)
        if nvidia and name.startswith("crit.out_layers"):
            if name.endswith("weight") and model.config.tie_word_embeddings:
                continue
            part = "weights" if name.endswith("weight") else "biases"
            name = f"crit.out_layers_{part}.{name.split('.')[2]}"
        if nvidia and f"crit.{name.split('crit.')[-1]}" in model.all_tied_weights_keys:
            continue
        state[name] = value.clone()
        if nvidia and name.startswith("word_emb.emb_projs"):
            state[name.replace("word_emb.emb_projs", "crit.shared_out_projs")] = value.clone()
    state["pos_emb.inv_freq"] = torch.ones(16)
    return state


def nvidia_config(model):
    c = model.config
    return {
        "n_token": c.vocab_size, "n_layer": c.n_layer, "n_head": c.n_head, "d_model": c.d_model, "d_head": c.d_head,
        "d_inner": c.d_inner, "dropout": 0.1, "dropatt": 0.0, "dtype": None, "tie_weight": c.tie_word_embeddings,
        "d_embed": c.embedding_width, "div_val": c.div_val, "tie_projs": c.projections_tied, "pre_lnorm": c.pre_lnorm,
        "tgt_len": 16, "ext_len": 0, "mem_len": c.mem_len, "cutoffs": c.cutoffs, "same_length": c.same_length,
        "attn_type": 0, "clamp_len": c.clamp_len, "sample_softmax": -1,
    }  # fmt: skip


def log_probability_of_the_original(model, state, hidden, token):
    """log p of a token in the original's adaptive softmax, where the entry of band i is the i-th from the end."""
    edges = [0, *model.config.cutoffs, model.config.vocab_size]
    band = sum(token >= edge for edge in edges[1:-1])

    def logits(i, weight, bias):
        return (hidden @ state[f"crit.out_projs.{i}"]) @ weight.T + bias

    weight = torch.cat([state["crit.out_layers.0.weight"], state["crit.cluster_weight"]])
    head = logits(0, weight, torch.cat([state["crit.out_layers.0.bias"], state["crit.cluster_bias"]])).log_softmax(-1)
    if band == 0:
        return head[token]
    tail = logits(band, state[f"crit.out_layers.{band}.weight"], state[f"crit.out_layers.{band}.bias"]).log_softmax(-1)
    return head[-band] + tail[token - edges[band]]


@pytest.mark.parametrize("nvidia", [False, True], ids=["original", "nvidia"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_checkpoints_in_other_layouts_are_converted(layout, nvidia, tmp_path):
    model, tokens = build(**{**LAYOUTS[layout], "untie_r": False}), text()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    state = original(model, nvidia)
    if nvidia:
        args = argparse.Namespace(lr=0.01, cuda=True)
        content = {"args": args, "model_config": nvidia_config(model), "model_state": state}
        torch.save(content, tmp_path / "xl.pt")
        convert_checkpoint(tmp_path / "xl.pt", tmp_path / "xl")
    else:
        torch.save(state, tmp_path / "xl.pt")
        with pytest.raises(ValueError, match="does not contain the architecture"):
            convert_checkpoint(tmp_path / "xl.pt", tmp_path / "xl")
        assert not (tmp_path / "xl").exists()
        convert_checkpoint(tmp_path / "xl.pt", tmp_path / "xl", model.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "xl")
    assert torch.equal(in_segments(loaded, tokens, [10, 14]), in_segments(model, tokens, [10, 14]))
    if layout == "tables" and not nvidia:
        hidden = loaded.transformer(tokens)[0][0, -1]
        for token in (4, 11, 17, 25):
            expected = log_probability_of_the_original(loaded, state, hidden, token)
            torch.testing.assert_close(loaded(tokens).logits[0, -1, token], expected)


@pytest.mark.parametrize("layout", ["plain", "one_table"])
def test_a_resized_vocabulary_stays_tied(layout):
    model = patch_model(build(**LAYOUTS[layout]), RSAConfig())
    assert model.resize_token_embeddings(34).weight is model.crit.out_layers[0].weight
    assert model(torch.tensor([[33]])).logits.shape == (1, 1, 34)
