"""Calibration as a whole: a planted head is found, noise is not, and bad input leaves the model as it was."""

import copy
import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from families import tiny_config
from model_state import assert_same_state, state_of
from rsa_hf import HeadConfig, RSAConfig, calibrate, is_patched, patch_model, unpatch_model
from rsa_hf.calibration import choice, procedure, run_calibration

VOCAB, T, H = 23, 24, 4
PLANTED = HeadConfig(1, 2, "regular", decay=0.5, gate=0.35)


def language_model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=H, n_positions=T, resid_pdrop=0, bos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": H, "intermediate_size": 16, "max_position_embeddings": 16}
    return BertForSequenceClassification(tiny_config("bert", vocab_size=VOCAB, **sizes))


@pytest.fixture(scope="module")
def shifted():
    """A model of uniform attention that was trained with a token shift on one head, which is then taken away."""
    model = patch_model(language_model(), RSAConfig(heads=[PLANTED]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("rsa" not in name)
        if "c_attn.weight" in name:
            is_value = torch.arange(3 * 32) >= 2 * 32
            parameter.data *= is_value  # no queries and keys
            parameter.register_hook(lambda grad, kept=is_value: grad * kept)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(250):
        ids = text(32)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return unpatch_model(model.eval())


def text(rows):
    """Each token follows from one of those before the last, the one at lag τ with a probability ∝ λ^τ."""
    ids = torch.randint(VOCAB, (rows, T))
    lags = torch.distributions.Geometric(1 - PLANTED.decay).sample((rows, T)).long() + 1
    for t in range(2, T):
        source = (t - 1 - lags[:, t]).clamp(min=0)
        ids[:, t] = (ids.gather(1, source[:, None])[:, 0] + 1) % VOCAB
    return ids


def batches(rows=48, size=16):
    return [{"input_ids": ids, "labels": ids} for ids in text(rows).split(size)]


def test_a_planted_token_shift_is_found_at_its_head_with_its_rate(shifted):
    torch.manual_seed(1)
    found = run_calibration(shifted, batches(256), max_rows=256, progress=False)
    assert found.heads
    surest = max(found.heads, key=lambda head: head.certainty)
    assert (surest.config.layer, surest.config.head, surest.config.kind) == (1, 2, "regular")
    assert surest.config.decay == pytest.approx(PLANTED.decay, abs=0.11)
    assert not is_patched(shifted)
    fresh = batches()
    plain, model = loss(shifted, fresh), patch_model(copy.deepcopy(shifted), found.config)
    assert plain - loss(model, fresh) > found.gain / 2 > 0


def loss(model, given):
    with torch.no_grad():
        return sum(float(model(**batch).loss) for batch in given) / len(given)


def test_a_broken_score_loses(shifted, monkeypatch):
    torch.manual_seed(1)
    original, given = choice.score, batches(24, 12)
    right = run_calibration(shifted, given, progress=False)
    for change in (lambda x: x.roll(1, 1), torch.neg):  # another head, the other sign

        def score(*arguments, change=change):
            found = original(*arguments)
            parts = ([change(rows) for rows in each] for each in (found.recurrence, found.whole))
            return choice.Scores(*parts, found.masses, found.terms)

        monkeypatch.setattr(procedure, "score", score)
        assert run_calibration(shifted, given, progress=False).gain < right.gain / 2


@pytest.mark.slow  # a hundred calibrations
def test_labels_that_are_noise_choose_nothing_in_95_of_100_seeds():
    model, chosen = classifier(), 0
    for seed in range(100):
        torch.manual_seed(seed)
        batch = {"input_ids": torch.randint(VOCAB, (24, 8)), "labels": torch.randint(2, (24,))}
        chosen += bool(calibrate(model, [batch], progress=False, seed=seed).heads)
    assert chosen <= 5


def test_rows_of_one_document_are_no_evidence_for_each_other():
    torch.manual_seed(0)
    documents = [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCAB, (3, 1, T)).repeat(1, 16, 1)]
    mixed = {name: torch.stack([each[name] for each in documents], 1).flatten(0, 1) for name in documents[0]}
    in_order, shuffled = (run_calibration(language_model(), given, progress=False) for given in (documents, [mixed]))
    # Random tokens cannot be learned, but shuffled, the copies of a row in other thirds pretend that they were.
    assert in_order.gain < shuffled.gain / 2


def test_more_passes_gain_more(shifted):
    torch.manual_seed(1)
    given, fresh = batches(), batches()
    plans = [calibrate(shifted, given, progress=False, gate_passes=passes) for passes in (1, 3)]
    losses = [loss(patch_model(copy.deepcopy(shifted), plan), fresh) for plan in plans]
    assert losses[0] > losses[1]


@pytest.mark.parametrize("seed", range(2))
def test_few_rows_show_the_gain_or_say_how_many_could(shifted, seed):
    torch.manual_seed(seed)
    found = run_calibration(shifted, batches(12, 4), progress=False)
    if found.heads:
        assert (PLANTED.layer, PLANTED.head) in {(head.config.layer, head.config.head) for head in found.heads}
        assert found.rows_needed is None
    else:
        # A mean of n times as many rows has an error that is √n times smaller.
        enough = 12 * (2.5 * found.gain_error / found.gain) ** 2 if found.gain > 0 else 0
        assert found.rows_needed == max(64, math.ceil(enough))
        few = "12 rows are too few to tell; with" if found.gain > 0 else "12 rows are few:"
        assert f"{few} {found.rows_needed}" in str(found)


def test_many_rows_without_a_gain_are_enough():
    torch.manual_seed(0)
    model, noise = language_model(), torch.randint(VOCAB, (4, 16, T))
    found = run_calibration(model, [{"input_ids": ids, "labels": ids} for ids in noise])
    assert not found.heads and found.gain <= 0
    assert found.rows_needed is None and str(found).endswith("There is no gain on held-out rows")


def with_a_nan():
    model = language_model()
    with torch.no_grad():
        model.transformer.wte.weight[3] = torch.nan
    return model


@pytest.mark.parametrize(
    ("build", "given", "error", "message"),
    [
        (language_model, lambda: [{"input_ids": text(16)}], ValueError, "gives no loss for batches with input_ids"),
        (language_model, lambda: batches(4), ValueError, "4 rows, but at least 12"),
        (language_model, lambda: [{"labels": [1, 2]}], ValueError, "a batch with labels in it has no tensor"),
        (language_model, lambda: [{"input_ids": text(16)[0]}], ValueError, "give batches of them, such as DataLoader"),
        (language_model, lambda: [text(16)], TypeError, "a batch is a Tensor"),
        (with_a_nan, batches, ValueError, "loss on a batch is nan"),
        (lambda: patch_model(language_model()), batches, ValueError, "patched already"),
        (lambda: torch.nn.Linear(2, 2), batches, TypeError, "got Linear"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error(build, given, error, message):
    model = build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        calibrate(model, given(), progress=False)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(a.nan_to_num(), before[name].nan_to_num()) for name, a in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_a_data_loader_with_rows_of_unlike_lengths_is_read():
    tokens = [{"input_ids": torch.randint(VOCAB, (length,))} for length in torch.randint(4, T, (20,)).tolist()]

    def collate(rows):
        ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        mask = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}

    loader = DataLoader(tokens, batch_size=6, collate_fn=collate)
    assert run_calibration(language_model(), loader, progress=False, max_rows=15).num_rows == 15
    without = collate(tokens[:12])
    without["labels"][3] = -100
    kept = run_calibration(language_model(), [without, collate(tokens[12:])], progress=False)
    assert kept.num_rows == 19
    singly = run_calibration(language_model(), [collate([row]) for row in tokens], progress=False)
    assert run_calibration(language_model(), loader, progress=False).loss == pytest.approx(singly.loss, rel=1e-5)


def labelled_rows(model):
    """The label is the token before the last; the encoder's first layer sees it, a new head does not read it yet."""
    ids = torch.randint(VOCAB, (64, 6))
    ids[:, 1:] = ids[:, :1]
    given = [{"input_ids": rows, "labels": (rows[:, 0] > 11).long()} for rows in ids.split(16)]
    model(**given[0])  # which writes `problem_type` into the config
    return given


def test_the_new_head_of_a_classifier_is_trained_and_put_back():
    model = classifier()
    given = labelled_rows(model)
    model.bert.embeddings.requires_grad_(False)
    model.train().bert.encoder.layer[0].eval()
    model(**given[0]).loss.backward()  # gradients that the head has already are neither used nor lost
    before = state_of(model)
    flags = {name: module.training for name, module in model.named_modules()}
    gradients = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    found = run_calibration(model, given, progress=False, head_steps=7)
    assert found.head_steps == 7
    assert_same_state(model, before)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert [p.requires_grad for p in model.parameters()] == [grad is not None for grad in gradients]
    for parameter, grad in zip(model.parameters(), gradients, strict=True):
        assert grad is None or (parameter.grad is grad[0] and torch.equal(*grad))
    untrained = run_calibration(model, given, progress=False, head_steps=0)
    assert untrained.loss > found.loss


def test_a_head_that_knows_the_labels_is_not_trained(shifted):
    assert run_calibration(shifted, batches(), progress=False).head_steps == 0
    model = classifier().eval()
    ids = torch.randint(VOCAB, (16, 6))
    with torch.no_grad():
        model.classifier.weight *= 1000
        labels = model(ids).logits.sub(model(ids).logits.mean(0)).argmax(-1)
        model.classifier.bias -= model(ids).logits.mean(0)
    assert 0 < int(labels.sum()) < 16
    assert run_calibration(model, [{"input_ids": ids, "labels": labels}], progress=False).head_steps == 0


def test_a_context_of_pytorch_changes_nothing(monkeypatch):
    monkeypatch.setattr(procedure, "CERTAIN", -math.inf)  # so that heads are named
    settings = {"false_discoveries": 1.0, "gate_passes": 1, "head_steps": 2, "progress": False}
    model = classifier()
    given = labelled_rows(model)
    expected = run_calibration(model, given, **settings)
    assert expected.heads and expected.head_steps
    autocast, meta = torch.autocast("cpu", torch.bfloat16), torch.device("meta")
    for context in (autocast, torch.no_grad(), torch.inference_mode(), meta):
        with context:
            copies = [{name: tensor.clone() for name, tensor in batch.items()} for batch in given]
            assert run_calibration(model, copies, **settings) == expected, context
