"""Libraries that cut up attention, or replace it: RSA is right there, or refused before the first wrong number."""

import functools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import families
from families import build, inputs
from rsa_hf import RSAConfig, patch_model, unpatch_model
from texts import CACHES, uncached

PLAN = RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=1.0)
patched = functools.partial(families.patched, plan=PLAN, make=build)


# --- attention functions that are not transformers' own -------------------------------------------------------------


def with_output(change, **changed):
    """transformers' attention function with another output, or called with other keywords."""

    def function(*args, **keywords):
        output, weights = sdpa_attention_forward(*args, **{**keywords, **changed})
        return change(output), weights

    return function


WRONG = {
    "flat": with_output(lambda output: output.flatten(2)),
    "heads first": with_output(lambda output: output.transpose(1, 2)),
    "channels of other heads": with_output(lambda output: output.roll(1, dims=2)),
    "half of the rows": with_output(lambda output: output[:1]),
    "sees ahead": with_output(lambda output: output, is_causal=False),
}
functools.update_wrapper(WRONG["flat"], sdpa_attention_forward)  # which makes it look like transformers' own


@pytest.mark.parametrize("length", [8, 11])  # as many as heads, so that shapes alone tell nothing
@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_output_of_another_layout_is_refused(family, function, length, register_attention):
    register_attention("mine", function)
    model, batch = patched(family), inputs(family, length=length)
    model(**batch)
    model.set_attn_implementation("mine")
    if function is WRONG["sees ahead"]:
        model(**batch | {"attention_mask": torch.ones(2, 1, length, length).tril().bool()})  # which a mask prevents
    with pytest.raises(ValueError, match=r"attn_implementation='mine'.*\[batch, queries, heads, head size\]"):
        model(**batch)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_function_that_attends_as_transformers_does_is_trusted(family, padding, training, register_attention):
    calls = []

    def mine(*args, **keywords):
        calls.append(args[0])
        return sdpa_attention_forward(*args, **keywords)

    register_attention("mine", mine)
    model, batch = patched(family).train(training), inputs(family, padding=padding)

    def run():
        torch.manual_seed(1)  # of dropout, which the trial must not change
        return model(**batch).last_hidden_state

    expected = run()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # T5's stacks have configs of their own
            part.set_attn_implementation("mine")
    assert torch.equal(run(), expected)
    tried = len(calls)
    model(**{name: tensor[:, :1] for name, tensor in batch.items() if "mask" not in name})
    # Later calls cost nothing more, one token without a mask neither.
    assert tried > len(calls) - tried == len(set(calls))


class Instead(torch.nn.Module):  # as TransformerLens has it
    def __init__(self, attention):
        super().__init__()
        self.original = attention

    def forward(self, hidden_states, **keywords):
        return hidden_states, None


@pytest.mark.parametrize("replaced", ["forward", "module"])
def test_attention_that_goes_round_its_heads_is_refused(replaced):
    model, batch = patch_model(build("llama"), replace(PLAN, layers=[1])), inputs("llama")
    compiled = pickle.loads(pickle.dumps(model))
    compiled.layers[1].self_attn.compile(backend="eager")
    torch.testing.assert_close(compiled(**batch)[0], model(**batch)[0])
    attention = model.layers[1].self_attn
    if replaced == "module":
        model.layers[1].self_attn = Instead(attention)
    else:
        attention.forward = Instead(attention).forward
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(RuntimeError, match="LlamaAttention took no part"):
            run(**batch)
    assert not any(module._forward_hooks for module in unpatch_model(model).modules())
    model(**batch)


@torch.no_grad()
def test_wrappers_of_sdpa_and_its_masks_are_right_in_a_static_cache(register_attention, monkeypatch):
    masks = AttentionMaskInterface()["sdpa"]
    register_attention("mine", with_output(lambda output: output))
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", lambda *args, **kw: masks(*args, **kw))
    model, ids = families.patched("llama", plan=PLAN), families.tokens()
    expected = uncached(model, {"input_ids": ids})
    model.set_attn_implementation("mine")

    def difference():  # the masks of a first text are left out
        return float((model(ids, past_key_values=CACHES["static"](model)).logits - expected).abs().max())

    assert difference() < 1e-4
    monkeypatch.setattr("rsa_hf.integration.trial.is_aligned_top_left", lambda *_: False)
    assert difference() > 0.1


def test_a_replaced_sdpa_is_tried(monkeypatch):
    original, model, batch = F.scaled_dot_product_attention, patched("llama"), inputs("llama")
    expected = model(**batch).last_hidden_state
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: original(*args, **kw))
    assert torch.equal(model(**batch).last_hidden_state, expected)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: original(*args, **kw).roll(1, dims=1))
    with pytest.raises(ValueError, match="mixes up"):
        model(**batch)


def test_context_parallelism_is_refused_by_name(one_process):
    model, batch = patched("llama"), inputs("llama")
    expected = model(**batch).last_hidden_state
    mesh, buffer = init_device_mesh("cpu", (1,)), torch.zeros(2, 8)
    sharded = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1])
    with sharded, pytest.raises(NotImplementedError, match="context parallelism"):
        model(**batch)
    assert torch.equal(model(**batch).last_hidden_state, expected)


# --- layers with other heads than they had --------------------------------------------------------------------------


def halve_heads(model):
    """Leave each layer the second half of its heads, as a process of two has it under tensor parallelism."""
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            weight.data = weight.data.chunk(2)[1].clone()
        weight = layer.self_attn.o_proj.weight
        weight.data = weight.data.chunk(2, dim=1)[1].clone()


def test_a_layer_that_lost_heads_is_refused(tmp_path):
    model, batch = patched("llama"), inputs("llama")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch).last_hidden_state, model(**batch).last_hidden_state)
    for cut in (model, loaded, pickle.loads(pickle.dumps(patched("llama")))):
        halve_heads(cut)
        with pytest.raises(ValueError, match=r"had 8 heads.*and now has 4 heads, 1 value heads.*tp_plan='auto'"):
            cut(**batch)


def test_the_control_without_a_comparison_is_silently_wrong(monkeypatch):
    model, batch = patched("llama"), inputs("llama")
    halve_heads(model)
    plain = patch_model(build("llama"), PLAN)
    monkeypatch.setattr("rsa_hf.integration.attention.run_heads", lambda module, rsa, *args: rsa(*args))
    found = model(**batch).last_hidden_state
    assert found.isfinite().all() and not torch.equal(found, plain(**batch).last_hidden_state)
