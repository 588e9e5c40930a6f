"""Queries that are not at positions of keys: an error by every way to P V, never memory that nobody has written."""

import pytest
import torch

import families
from rsa_hf import RSAConfig, rem_product
from rsa_hf.children import attach_heads
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.read_mask import read_attention_mask


@pytest.fixture(params=["pytorch", "cpp", "triton"])
def backend(request, monkeypatch):
    if request.param == "triton":
        from ops import kernels_under_test

        kernels_under_test.use_small_chunks(monkeypatch)
    if request.param == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setenv("RSA_HF_BACKEND", request.param)


def layer():
    return RSAHeads(RSAConfig(num_regular=2, num_cyclical_pairs=1).layer_plans([4])[0])


def mixed(T, S, offset, causal):
    attention, value = torch.randn(2, T, 4, 3), torch.randn(2, 4, S, 3)
    return layer()(attention, value, AttentionMask(T, S, offset, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S", "offset"), [(9, 5, -4), (9, 5, 0), (4, 5, 2), (4, 5, -1), (1, 5, 5), (20, 19, 0)])
@pytest.mark.usefixtures("backend")
def test_queries_without_keys_are_an_error(T, S, offset, causal):
    with pytest.raises(ValueError, match=f"query_length={T}, query_offset={offset}, key_length={S}"):
        mixed(T, S, offset, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S", "offset"), [(5, 5, 0), (4, 5, 1), (4, 5, 0), (1, 5, 4), (1, 5, 0), (20, 29, 3)])
@pytest.mark.usefixtures("backend")
def test_queries_at_keys_write_all_memory(T, S, offset, causal):
    with torch.no_grad():
        assert mixed(T, S, offset, causal).isfinite().all()


def test_memory_that_nobody_has_written_is_caught(monkeypatch):
    if isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setattr(AttentionMask, "__post_init__", lambda self: None)
    assert not mixed(20, 19, -1, True).isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "mask",
    [None, torch.ones(2, 1, 9, 5, dtype=torch.bool), torch.zeros(2, 1, 9, 5), torch.zeros(2, 1, 1, 5)],
    ids=["none", "boolean", "additive", "one row"],
)
@pytest.mark.parametrize("aligned_top_left", [True, False])
def test_a_call_with_more_queries_than_keys_is_an_error(mask, causal, aligned_top_left):
    query, key = torch.randn(2, 4, 9, 3), torch.randn(2, 4, 5, 3)
    with pytest.raises(ValueError, match=r"query_length=9.*key_length=5.*self-attention"):
        read_attention_mask(query, key, mask, causal=causal, aligned_top_left=aligned_top_left)


@pytest.mark.parametrize("family", families.ENCODER_DECODERS)
def test_heads_on_cross_attention_are_an_error(family):
    model = families.build(family)
    layer = (
        model.decoder.layers[0].encoder_attn if family == "bart" else model.decoder.block[0].layer[1].EncDecAttention
    )
    attach_heads([(layer, RSAConfig(num_regular=1, causal=False).layer_plans([8])[0])])
    ids = torch.randint(3, families.VOCAB, (2, 9))
    with pytest.raises(ValueError, match="query_length=9.*key_length=5"):
        model(input_ids=ids[:, :5], decoder_input_ids=ids)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_is_an_error_when_it_runs(dynamic):
    compiled = torch.compile(
        lambda value, T: rem_product(value, "regular", 0.9, query_length=T), backend="aot_eager", dynamic=dynamic
    )
    value = torch.randn(2, 4, 19, 3)
    assert torch.equal(compiled(value, 18), rem_product(value, "regular", 0.9, query_length=18))
    with pytest.raises(ValueError, match="query_length=20, query_offset=-1, key_length=19"):
        compiled(value, 20)


@pytest.mark.usefixtures("fresh_compiler")
def test_lengths_of_a_graph_stay_symbols():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda value, queries: rem_product(value, "regular", 0.9, query_length=queries.shape[0]),
        backend=count,
        fullgraph=True,
        dynamic=True,
    )
    for T, S in ((18, 40), (40, 40), (33, 90), (90, 90)):
        value = torch.randn(2, 4, S, 3)
        expected = rem_product(value, "regular", 0.9, query_length=T)
        assert torch.equal(compiled(value, torch.empty(T)), expected)
    assert len(graphs) <= 2  # T = S may be a case of its own
