"""Queries that are not at positions of keys are an error, never memory that nobody has written."""

import pytest
import torch

import families
from rsa_hf import RSAConfig, rem_product
from rsa_hf.children import attach_heads
from rsa_hf.ops.mask import AttentionMask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S", "offset"), [(9, 5, -4), (9, 5, 0), (4, 5, 2), (4, 5, -1), (1, 5, 5), (20, 19, 0)])
def test_queries_without_keys_are_an_error(T, S, offset, causal):
    with pytest.raises(ValueError, match=f"query_length={T}, query_offset={offset}, key_length={S}"):
        AttentionMask(T, S, offset, causal)


@pytest.mark.parametrize("family", families.ENCODER_DECODERS)
def test_heads_on_cross_attention_are_an_error(family):
    model = families.build(family)
    layer = (
        model.decoder.layers[0].encoder_attn if family == "bart" else model.decoder.block[0].layer[1].EncDecAttention
    )
    attach_heads([(layer, RSAConfig(num_regular=1, causal=False).layer_specs([8])[0])])
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
