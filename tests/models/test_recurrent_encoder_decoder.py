"""Encoder-decoder RNNs against cells stepped by hand, with padding, and in generation."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from models.cells import CELLS, steps_by_hand
from models.tiny import values_and_gradients
from rsa_hf.models.recurrent_encoder_decoder import (
    RecurrentEncoderDecoderConfig,
    RecurrentEncoderDecoderForConditionalGeneration,
    RecurrentEncoderDecoderModel,
)
from rsa_hf.models.recurrent_encoder_decoder.modeling_recurrent_encoder_decoder import RecurrentEncoderOutput

PAD, EOS, VOCAB, N = 0, 1, 11, 5
SOURCES = torch.tensor([[3, 4, 5, 6, 7, 1], [9, 2, 1, 0, 0, 0], [0, 0, 0, 8, 8, 1], [0, 0, 0, 0, 0, 0]])
LABELS = torch.tensor([[7, 2, 3, 1], [5, 1, -100, -100], [2, 2, 1, -100], [4, 1, -100, -100]])
SHAPES = [(cell, bidirectional) for cell in CELLS for bidirectional in (False, True)]


def build(model_class=RecurrentEncoderDecoderForConditionalGeneration, **changes):
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB, "hidden_size": N, "dropout": 0.0, "initializer_range": 1.0, "cell": "gru"}
    model = model_class(RecurrentEncoderDecoderConfig(**{**fields, **changes})).eval()
    for parameter in model.parameters():
        parameter.data *= 2  # at their start, the states after so few steps are nearly equal
    return model


def context_by_hand(model, source):
    """The decoder's initial state for each layer, from the real tokens of one source."""
    kind, encoder = model.config.cell, model.model.encoder
    parts = 2 if kind == "lstm" else 1
    projections, inputs, context = iter(encoder.projections), list(encoder.network.embeddings(source)), []
    for layer in encoder.network.layers:
        zeros = (layer.cell.weight_hh_l0.new_zeros(N),) * parts
        outputs, state = steps_by_hand(kind, layer, inputs, state=zeros)
        if model.config.bidirectional:
            backward, other = steps_by_hand(kind, layer, inputs[::-1], suffix="_l0_reverse", state=zeros)
            state = tuple(next(projections)(torch.cat(ends)) for ends in zip(state, other, strict=True))
            outputs = [torch.cat(pair) for pair in zip(outputs, backward[::-1], strict=True)]
        inputs = outputs
        context.append(state)
    return context


def decoded_by_hand(model, context, read):
    """The logits after every token that the decoder reads."""
    inputs = list(model.model.decoder.embeddings(read))
    for layer, state in zip(model.model.decoder.layers, context, strict=True):
        inputs, _ = steps_by_hand(model.config.cell, layer, inputs, state=state)
    return torch.stack([model.lm_head(x) for x in inputs])


def loss_by_hand(model):
    logits, losses = [], []
    for source, labels in zip(SOURCES, LABELS, strict=True):
        target = labels[labels != -100]
        read = torch.cat([torch.tensor([model.config.decoder_start_token_id]), target[:-1]])
        logits.append(decoded_by_hand(model, context_by_hand(model, source[source != PAD]), read))
        losses.append(F.cross_entropy(logits[-1], target, reduction="sum"))
    return logits, sum(losses) / int((LABELS != -100).sum())


@pytest.mark.parametrize(("cell", "bidirectional"), SHAPES)
@pytest.mark.parametrize("start", [None, 2])
def test_logits_loss_and_gradients_agree_with_cells_stepped_by_hand(cell, bidirectional, start, monkeypatch):
    # In float64, because a linear cell's states grow. The loss is float32, as always in transformers.
    model = build(cell=cell, bidirectional=bidirectional, decoder_start_token_id=start).double()
    logits, expected = loss_by_hand(model)
    outputs = model(SOURCES, attention_mask=(SOURCES != PAD).long(), labels=LABELS)
    for found, row in zip(outputs.logits, logits, strict=True):
        torch.testing.assert_close(found[: len(row)], row, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(outputs.loss, expected.float())
    wanted = values_and_gradients(model, expected.float())
    torch.testing.assert_close(values_and_gradients(model, outputs.loss), wanted, rtol=1e-4, atol=1e-6)
    assert all(gradient.any() for gradient in wanted.values())  # the encoder learns through the context
    # The control: labels that are not shifted.
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "prepare_decoder_input_ids_from_labels", lambda self, labels: labels.clamp(min=0))
        assert abs(float((model(SOURCES, labels=LABELS).loss - expected).detach())) > 1e-3
    # With num_items_in_batch the loss is the sum over the part, divided by that number.
    part = model(SOURCES, labels=LABELS, num_items_in_batch=100).loss
    torch.testing.assert_close(part, (expected * int((LABELS != -100).sum()) / 100).float())


def greedy_by_hand(model, source, steps):
    context, tokens = context_by_hand(model, source[source != PAD]), [model.config.decoder_start_token_id]
    while len(tokens) <= steps and tokens[-1] != EOS:
        tokens.append(int(decoded_by_hand(model, context, torch.tensor(tokens))[-1].argmax()))
    return tokens


@pytest.mark.parametrize(("cell", "bidirectional"), SHAPES)
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_every_step(cell, bidirectional, use_cache):
    # Untied, because a tied softmax with random weights repeats one token.
    model = build(cell=cell, bidirectional=bidirectional, tie_word_embeddings=False, decoder_start_token_id=3)
    found = model.generate(SOURCES, max_new_tokens=6, do_sample=False, use_cache=use_cache)
    expected = [greedy_by_hand(model, source, 6) for source in SOURCES]
    assert [row[: len(tokens)] for row, tokens in zip(found.tolist(), expected, strict=True)] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1  # the source is read


@torch.no_grad()
def test_a_target_in_segments_with_carried_state_is_one_target():
    model = build(cell="lstm", bidirectional=True)
    read = torch.tensor([[0, 4, 7, 2, 5]] * len(SOURCES))
    whole = model(SOURCES, decoder_input_ids=read, output_hidden_states=True)
    encoded = model.get_encoder()(SOURCES)
    first = model(encoder_outputs=encoded, decoder_input_ids=read[:, :2])
    second = model(state=first.state, decoder_input_ids=read[:, 2:])
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
    torch.testing.assert_close(encoded.context, whole.context)
    assert [part.shape for part in second.state] == [(len(SOURCES), 2, 1, N)] * 2
    assert len(whole.encoder_hidden_states) == len(whole.decoder_hidden_states) == 3
    generated = model.generate(SOURCES, max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)
    assert torch.equal(generated.encoder_hidden_states[-1], whole.encoder_hidden_states[-1])
    torch.testing.assert_close(generated.decoder_hidden_states[0][-1], whole.decoder_hidden_states[-1][:, :1])
    forgetful = model(SOURCES, decoder_input_ids=read[:, 2:]).logits
    assert float((forgetful - second.logits).abs().max()) > 1e-2
    # Left padding of the target.
    padded, mask = F.pad(read, (2, 0), value=5), F.pad(torch.ones_like(read), (2, 0))
    late = model(SOURCES, decoder_input_ids=padded, decoder_attention_mask=mask)
    torch.testing.assert_close(late.logits[:, 2:], whole.logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("cell", "bidirectional"), SHAPES)
@torch.no_grad()
def test_auto_classes_save_and_load_the_same_model(tmp_path, cell, bidirectional, tied):
    for model_class, auto in (
        (RecurrentEncoderDecoderModel, AutoModel),
        (RecurrentEncoderDecoderForConditionalGeneration, AutoModelForSeq2SeqLM),
    ):
        model = build(model_class, cell=cell, bidirectional=bidirectional, tie_word_embeddings=tied)
        model.save_pretrained(tmp_path)
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is model_class
        assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
        read = {"decoder_input_ids": LABELS.clamp(min=0)}
        assert torch.equal(loaded(SOURCES, **read)[0], model(SOURCES, **read)[0])
        base = getattr(loaded, "model", loaded)
        assert base.decoder.embeddings.weight is base.encoder.network.embeddings.weight
    assert (loaded.lm_head.weight is base.encoder.network.embeddings.weight) is tied
    loaded.resize_token_embeddings(VOCAB + 3)
    assert base.decoder.embeddings.weight is base.encoder.network.embeddings.weight
    logits = loaded(SOURCES, **read).logits
    torch.testing.assert_close(logits[..., :VOCAB], model(SOURCES, **read).logits)
    assert logits.shape[-1] == VOCAB + 3


def test_wrong_inputs_are_refused():
    model = build(cell="lstm")
    read = {"decoder_input_ids": LABELS.clamp(min=0)}
    outputs = model(SOURCES, **read)
    for state in (outputs.state[:1], [part[:2] for part in outputs.state], [part[:, :1] for part in outputs.state]):
        with pytest.raises(ValueError, match="state has shapes"):
            model(state=state, **read)
    for context in (outputs.context[:2], outputs.context[:, :1], outputs.context[:, :, :1]):
        with pytest.raises(ValueError, match="state has shape"):
            model(encoder_outputs=RecurrentEncoderOutput(context=context), **read)
    for inputs in ({"input_ids": SOURCES}, read):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**inputs)
