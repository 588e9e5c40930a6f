"""Every model that carries a state: segments, padding, generation, heads, saving, training."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from broken import break_mask, forgets_the_offset
from families import ATTENTIONS, FULL_PLAN
from models import tiny
from models.tiny import SETTINGS, TINY, WITH_ATTENTION, build, difference, in_segments, run_segments, text
from rsa_hf import is_patched, patch_model, unpatch_model
from rsa_hf.children import active_heads
from rsa_hf.models import class_named
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM

SPLITS = {"odd": [5, 1, 11, 7], "tokens": [1] * 24}
KINDS = [(name, rsa) for name in TINY for rsa in (None, {}) if rsa is None or name in WITH_ATTENTION]
MORE_KINDS = KINDS + [(name, None if name.startswith("recurrent") else {}) for name in SETTINGS]
CASES = [(name, rsa, attention) for name, rsa in KINDS for attention in ATTENTIONS if name in WITH_ATTENTION]
CASES += [(name, rsa, "sdpa") for name, rsa in MORE_KINDS if name not in WITH_ATTENTION]


def label(value):
    return {None: "plain", "{}": "rsa"}.get(value if value is None else str(value))


each_kind_and_setting = pytest.mark.parametrize(("name", "rsa"), MORE_KINDS, ids=label)
each_model = pytest.mark.parametrize("name", TINY)
each_model_with_attention = pytest.mark.parametrize("name", WITH_ATTENTION)


# --- segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("name", "rsa", "attention"), CASES, ids=label)
@torch.no_grad()
def test_segments_equal_one_long_text(name, rsa, attention, lengths, monkeypatch):
    model, tokens = build(name, attention, rsa), text()
    whole = model(tokens)
    logits, state = run_segments(model, tokens, lengths)
    assert difference(logits, whole.logits) <= 1e-5
    torch.testing.assert_close(state, whole[model.segment_state], atol=1e-5, rtol=1e-5)
    # The controls: no carried state, and lags counted from the start of each segment.
    forgetful = torch.cat([model(segment).logits for segment in tokens.split(lengths, dim=1)], dim=1)
    assert difference(forgetful, whole.logits) > 1e-2
    if rsa is not None:
        break_mask(monkeypatch, forgets_the_offset)
        assert difference(in_segments(model, tokens, lengths), whole.logits) > 1e-3


@pytest.mark.parametrize(("name", "rsa"), KINDS, ids=label)
def test_no_gradient_reaches_the_previous_segment(name, rsa):
    model, tokens = build(name, rsa=rsa), text()
    embedded = model.get_input_embeddings()(tokens[:, :12]).detach().requires_grad_()
    state = model(inputs_embeds=embedded)[model.segment_state]
    assert not any(part.requires_grad for part in state)
    model(tokens[:, 12:], labels=tokens[:, 12:], **{model.segment_state: state}).loss.backward()
    assert embedded.grad is None
    assert all(bool(p.grad.any()) for _, heads in active_heads(model) for p in heads.parameters())
    # Within a segment it reaches the first token.
    model(inputs_embeds=embedded).logits[:, -1].sum().backward()
    assert float(embedded.grad[:, 0].abs().max()) > 0


# The zeros before a text of "transfo-xl:zeros" are not padding: they are visible.
@pytest.mark.parametrize(("name", "rsa", "attention"), [case for case in CASES if "zeros" not in case[0]], ids=label)
@torch.no_grad()
def test_padding_changes_nothing(name, rsa, attention):
    """Over segments, on both sides, and also in between if the model counts no distances."""
    between = name.startswith(("temporal", "recurrent")) or (name == "sru_plus_plus" and rsa is None)
    model, tokens = build(name, attention, rsa), text(4, 31)
    mask = torch.ones_like(tokens)
    mask[0, :10] = 0  # two whole windows, because the Block-Recurrent Transformer counts windows from the start
    mask[1, 20 : 24 if between else 31] = 0
    if between:
        mask[2, [0, 4, 5, 11, 13]] = 0
        mask[3, 12:24] = 0  # a whole segment
    found, state = [], None
    for segment in torch.arange(31).split([12, 12, 7]):
        inputs = {"attention_mask": mask[:, : segment[-1] + 1], model.segment_state: state}
        out = model(tokens[:, segment], **inputs)
        found.append(out.logits)
        state = out[model.segment_state]
    found = torch.cat(found, 1)
    for row, real, logits in zip(tokens, mask.bool(), found, strict=True):
        assert difference(logits[real], in_segments(model, row[None, real], 7)[0]) <= 1e-5
    # The controls: no mask, and a mask that does not cover the memory.
    assert difference(in_segments(model, tokens, 31)[0, 10:], found[0, 10:]) > 1e-3
    if name in ("transfo-xl", "sru_plus_plus"):
        state = model(tokens[:, :12], attention_mask=mask[:, :12])[model.segment_state]
        assert difference(model(tokens[:, 12:24], **{model.segment_state: state}).logits[0], found[0, 12:24]) > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
@each_model_with_attention
@pytest.mark.filterwarnings("error:.*gets no RSA heads")  # the recurrent layer of Block-Recurrent has none on purpose
@torch.no_grad()
def test_a_shut_gate_is_the_plain_model_bit_for_bit(name, attention):
    model, tokens = build(name, attention), text()
    plain = in_segments(model, tokens, [5, 12, 7])
    patch_model(model, {**FULL_PLAN, "gate_init": float("-inf")})
    assert torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)
    for _, heads in active_heads(model):
        heads.mu.fill_(0.0)
    assert difference(in_segments(model, tokens, [5, 12, 7]), plain) > 1e-2
    assert torch.equal(in_segments(unpatch_model(model), tokens, [5, 12, 7]), plain)


# --- generation -------------------------------------------------------------------------------------------------------

GENERATE = {
    "max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "output_scores": True,
    "return_dict_in_generate": True,
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 3])
@each_kind_and_setting
@torch.no_grad()
def test_generation_is_the_same_with_and_without_state(name, rsa, beams):
    model, tokens = build(name, rsa=rsa), text(length=9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "num_beams": beams}
    with_state = model.generate(**inputs, **GENERATE)
    without = model.generate(**inputs, **GENERATE, use_cache=False)
    assert torch.equal(with_state.sequences, without.sequences)
    torch.testing.assert_close(with_state.scores, without.scores, atol=1e-5, rtol=1e-5)
    if not name.startswith("block-recurrent") and name != "transfo-xl:zeros":  # these two count padding
        alone = model.generate(tokens[:1, 3:], num_beams=beams, **GENERATE)
        assert torch.equal(with_state.sequences[0, 3:], alone.sequences[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["greedy", "uncached", "beams"],
)
@each_model
@torch.no_grad()
def test_generation_continues_from_a_state(name, options):
    model, tokens = build(name, rsa={} if name in WITH_ATTENTION else None), text()
    whole = model.generate(tokens, **GENERATE, **options)
    state = {model.segment_state: model(tokens[:, :15])[model.segment_state]}
    found = model.generate(tokens[:, 15:], **state, **GENERATE, **options)
    assert torch.equal(found.sequences[:, 9:], whole.sequences[:, 24:])
    torch.testing.assert_close(found.scores, whole.scores, atol=1e-5, rtol=1e-5)
    forgetful = model.generate(tokens[:, 15:], **GENERATE, **options)
    assert difference(forgetful.scores[0].softmax(-1), whole.scores[0].softmax(-1)) > 1e-5


# --- heads and outputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TINY, "transfo-xl:window"])
def test_losses_are_cross_entropies_of_the_logits(name):
    model, tokens = build(name), text()
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    out = model(tokens, labels=labels)
    expected = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    # As the Trainer divides when it accumulates gradients.
    in_all = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(in_all, expected * (labels[:, 1:] != -100).sum() / 100)
    # The last token of a segment predicts the first token of the next.
    following = tokens.roll(-1, 1)
    shifted = model(tokens, shift_labels=following).loss
    torch.testing.assert_close(shifted, cross_entropy(out.logits.flatten(0, 1), following.flatten()))
    kept = model(tokens, logits_to_keep=2).logits
    torch.testing.assert_close(kept, out.logits[:, -2:])


@each_model
@torch.no_grad()
def test_outputs_have_the_fields_and_shapes_of_transformers(name):
    base, tokens = build(name, "eager", auto=AutoModel), text(length=7)
    out = base(tokens, output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape[:2]) for states in out.hidden_states] == [(2, 7)] * (base.config.num_hidden_layers + 1)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    if name in ("transfo-xl", "sru_plus_plus"):
        assert [tuple(weights.shape) for weights in out.attentions] == [(2, 8, 7, 7)] * 2
        torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 8, 7))
    last, state = base(tokens, return_dict=False)
    assert torch.equal(last, out.last_hidden_state)
    assert all(map(torch.equal, state, out[base.segment_state]))
    assert base.segment_state not in base(tokens, use_cache=False)
    assert base.segment_state in base.config.keys_to_ignore_at_inference
    scale = 32**0.5 if name in ("transfo-xl", "temporal_latent_bottleneck") else 1
    embedded = base.get_input_embeddings()(tokens) * scale
    torch.testing.assert_close(base(inputs_embeds=embedded).last_hidden_state, last)


@each_model
def test_a_classifier_reads_the_last_token_that_is_not_padding(name):
    model, tokens = build(name, auto=AutoModelForSequenceClassification, num_labels=3), text(length=9)
    alone = model(tokens[:1, :6]).logits
    torch.testing.assert_close(alone, model.score(model.base_model(tokens[:1, :6]).last_hidden_state[:, -1]))
    tokens[0, 6:] = 0
    torch.testing.assert_close(model(tokens).logits[:1], alone)
    mask, labels = (tokens != 0).long(), torch.tensor([1, 2])
    out = model(tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.logits[:1], alone)
    torch.testing.assert_close(out.loss, cross_entropy(out.logits, labels))
    assert model.segment_state in out


# --- as transformers models -------------------------------------------------------------------------------------------


@each_kind_and_setting
@torch.no_grad()
def test_auto_classes_save_and_load_the_same_model(name, rsa, tmp_path):
    model, tokens = build(name, rsa=rsa), text()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.num_parameters() == model.num_parameters()
    assert torch.equal(in_segments(loaded, tokens, [7, 17]), in_segments(model, tokens, [7, 17]))
    assert is_patched(loaded) == (rsa is not None)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        other = auto.from_pretrained(tmp_path)
        assert torch.equal(other.base_model(tokens)[0], model.base_model(tokens)[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "rsa"), [kind for kind in KINDS if kind[0] in WITH_ATTENTION], ids=label)
def test_gradient_checkpointing_changes_nothing(name, rsa, reentrant):
    model, tokens = build(name, rsa=rsa).train(), text()
    state = model(tokens[:, :8])[model.segment_state]

    def gradients():
        out = model(tokens[:, 8:], labels=tokens[:, 8:], **{model.segment_state: state})
        assert not any(part.requires_grad for part in out[model.segment_state])
        return tiny.values_and_gradients(model, out.loss)

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), plain)


@each_model_with_attention
@torch.no_grad()
def test_bfloat16_stays_close(name):
    model, tokens = build(name, rsa={}), text()

    def loss():
        state = model(tokens[:, :8])[model.segment_state]
        return model(tokens[:, 8:], labels=tokens[:, 8:], **{model.segment_state: state}).loss

    expected = loss()
    with torch.autocast("cpu", torch.bfloat16):
        assert abs(float(loss() - expected)) < 0.03 * float(expected)
    model.to(torch.bfloat16)
    dtypes = [part.dtype for part in model(tokens)[model.segment_state]]
    in_float32 = 2 if name == "sru_plus_plus" else 0  # the cells
    assert dtypes[:in_float32] == [torch.float32] * in_float32
    assert {dtype for dtype in dtypes[in_float32:] if dtype.is_floating_point} == {torch.bfloat16}
    assert model(tokens).logits.dtype == torch.bfloat16
    assert loss().dtype == torch.float32
    assert abs(float(loss() - expected)) < 0.03 * float(expected)


def test_the_class_names_of_transformers_4_are_known():
    assert class_named("TransfoXLLMHeadModel", "transfo-xl") is TransformerXLForCausalLM
    assert class_named("GPT2LMHeadModel", "gpt2") is class_named("Trainer", "transfo-xl") is None


@each_model
def test_label_smoothing_shifts_the_labels_of_a_language_model(name, tmp_path):
    model, ids = build(name), text()
    batch = {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-9, use_cpu=True, report_to="none")
    smoothed = Trainer(model, arguments).compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, model(**batch).loss)


@each_model
def test_wrong_inputs_are_refused(name):
    model, tokens = build(name), text()
    for inputs in ({}, {"input_ids": tokens, "inputs_embeds": torch.zeros(2, 24, model.config.hidden_size)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**inputs)
    state = model(tokens)[model.segment_state]
    wider = build(name, **{("d_model" if "d_model" in TINY[name] else "hidden_size"): 64})
    longer = build(name, **{size: 11 for size in ("window_size", "chunk_size") if size in TINY[name]})
    wrong = [
        state[:-1],
        tuple(part[:1] for part in state),
        (*state[:-1], state[-1][:, :0] if state[-1].dim() > 1 else state[-1][:1]),
        wider(tokens)[model.segment_state],
    ]
    if name in ("block-recurrent", "temporal_latent_bottleneck"):
        wrong.append(longer(text(length=21))[model.segment_state])
    for part in wrong:
        with pytest.raises(ValueError, match=f"{model.segment_state} has shapes .* are needed"):
            model(tokens, **{model.segment_state: part})
    model(tokens, **{model.segment_state: state})
