"""`generate()` is the same for all models that hand something from segment to segment."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "recurrent": {"hidden_size": 16, "num_hidden_layers": 2},
    "sru_plus_plus": {"hidden_size": 16, "projection_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "temporal_latent_bottleneck": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "chunk_size": 4,
        "num_states": 3,
    },
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])


@pytest.fixture(params=SIZES)
def model(request):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        request.param, vocab_size=12, eos_token_id=None, pad_token_id=0, **SIZES[request.param]
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_hidden_states_are_returned_where_they_are_asked_for(model):
    found = model.generate(
        IDS, max_new_tokens=3, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    assert [step[-1].shape[1] for step in found.hidden_states] == [7, 1, 1]
    with torch.no_grad():
        whole = model(found.sequences, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(found.hidden_states[-1][-1][:, 0], whole[:, -2], rtol=1e-5, atol=1e-5)


def test_a_given_state_is_behind_all_tokens_where_nothing_is_kept(model):
    with torch.no_grad():
        state = model(IDS, use_cache=True).state
    more = IDS.flip(1)
    kept = model.generate(more, state=state, max_new_tokens=5, do_sample=False)
    anew = model.generate(more, state=state, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(kept, anew)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_each_of_several_sequences_goes_on_behind_the_state_of_its_row(model, options):
    with torch.no_grad():
        state = model(IDS, use_cache=True).state
    more = IDS.flip(1)
    behind = model.generate(more, state=state, max_new_tokens=5, do_sample=False, **options)
    whole = model.generate(torch.cat([IDS, more], 1), max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(behind, whole[:, IDS.shape[1] :])
