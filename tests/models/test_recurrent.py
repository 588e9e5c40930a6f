"""RNN, LSTM, GRU and linear RNN against cells stepped by hand, in both directions, with padding."""

import pytest
import torch

from models.cells import CELLS, steps_by_hand
from models.tiny import values_and_gradients
from rsa_hf.models.recurrent import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentModel,
)

VOCAB, N = 23, 6


def build(model_class=RecurrentModel, **changes):
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB, "hidden_size": N, "dropout": 0.0, "initializer_range": 1.0, **changes}
    return model_class(RecurrentConfig(**fields)).eval()


def draw(B=3, T=17):
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(0))


def by_hand(model, ids):
    rows = []
    for row in ids:
        inputs = list(model.embeddings(row))
        for layer, d in zip(model.layers, model.config.dilations, strict=True):
            outputs, _ = steps_by_hand(model.config.cell, layer, inputs, dilation=d)
            if model.config.bidirectional:
                reverse = {"suffix": "_l0_reverse", "dilation": d}
                backward, _ = steps_by_hand(model.config.cell, layer, inputs[::-1], **reverse)
                outputs = [torch.cat(pair) for pair in zip(outputs, backward[::-1], strict=True)]
            inputs = outputs
        rows.append(torch.stack(inputs))
    return torch.stack(rows)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dilations", [[1, 1], [1, 2], [3, 20]])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_agrees_with_cells_stepped_by_hand(cell, dilations, bidirectional):
    settings = {"cell": cell, "bidirectional": bidirectional}
    model, ids = build(**settings, dilations=dilations).double(), draw()
    found = values_and_gradients(model, model(ids).last_hidden_state)
    expected = by_hand(model, ids)
    for name, value in values_and_gradients(model, expected).items():
        # In a text shorter than the dilation no state is read.
        assert bool(value.any()) or (max(dilations) > 17 and "weight_hh" in name), name
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
    # The control: another dilation gives other states.
    other = build(**settings, dilations=[d + 1 for d in dilations])
    other.double().load_state_dict(model.state_dict())
    assert float((other(ids).last_hidden_state - expected).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dilations", [[1, 1], [2, 5]])
def test_padding_anywhere_changes_nothing(cell, dilations):
    """Of a bidirectional network; test_segment_models.py has one direction, and segments."""
    model = build(cell=cell, bidirectional=True, dilations=dilations)
    ids, mask = draw(4, 12), torch.ones(4, 12, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 7:] = 0
    mask[2, [0, 4, 5, 11]] = 0
    outputs = model(ids, mask)
    for b in range(4):
        alone = model(ids[b : b + 1, mask[b].bool()])
        found = outputs.last_hidden_state[b, mask[b].bool()]
        torch.testing.assert_close(found, alone.last_hidden_state[0], rtol=1e-5, atol=1e-6)
        for part, whole in zip(outputs.state or (), alone.state or (), strict=True):
            torch.testing.assert_close(part[b], whole[0], rtol=1e-5, atol=1e-6)
    assert float((model(ids).last_hidden_state - outputs.last_hidden_state)[0, 5:].abs().max()) > 1e-3


def test_a_bidirectional_classifier_reads_the_last_real_token_and_the_first():
    model = build(RecurrentForSequenceClassification, bidirectional=True, num_labels=3, pad_token_id=0)
    ids = draw(2, 9).clamp(min=1)
    ids[0, 6:] = 0
    hidden = model.model(ids[:1, :6]).last_hidden_state[0]
    expected = model.score(torch.cat([hidden[-1, :N], hidden[0, N:]]))
    torch.testing.assert_close(model(ids).logits[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(ids, attention_mask=(ids > 0).long()).logits, model(ids).logits)
    model(ids, labels=torch.tensor([0, 2])).loss.backward()
    assert model.score.weight.grad.any()


def test_bidirectional_networks_predict_no_next_token_and_take_no_state():
    with pytest.raises(ValueError, match="bidirectional=True"):
        build(RecurrentForCausalLM, bidirectional=True)
    with pytest.raises(ValueError, match="takes no state"):
        build(bidirectional=True)(draw(), state=build()(draw()).state)
