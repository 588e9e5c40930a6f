"""The code encoder: its tokenizer, its masks, and what a training leaves."""

import pytest
import torch
from transformers import AutoTokenizer

from experiment_runs import finished
from experiments import code_encoder
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, DEFAULT

TEXTS = [f"static int f{i}(char *s) {{ return s[{i * i}] == '\\n' ? {i} : -1; }} /* naïve */" for i in range(60)]


@pytest.fixture
def small(monkeypatch, data_folder, tmp_path):
    """A few functions in place of the texts, and an empty cache."""
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    monkeypatch.setenv("RSA_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(code_encoder, "read_code", lambda most: (TEXTS[:most], TEXTS[-10:]))
    code_encoder.code_tokenizer.cache_clear()
    yield find_experiment("code-encoder").grid("toy", 1)
    code_encoder.code_tokenizer.cache_clear()


def test_the_cut_tokenizer_reads_its_text_as_the_whole_one(small, data_folder):
    cut, whole = code_encoder.code_tokenizer(40), AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "roberta")
    assert len(cut) < len(whole) / 50
    for text in TEXTS[:40]:
        found, expected = (each.convert_ids_to_tokens(each(text)["input_ids"]) for each in (cut, whole))
        assert found == expected
    assert cut.unk_token_id not in cut("Größe 戦場の 7919")["input_ids"]  # another text may take more tokens


def test_a_seventh_of_the_tokens_is_hidden(small):
    tokenizer = code_encoder.code_tokenizer(40)
    blocks = code_encoder.in_blocks(TEXTS * 20, tokenizer, 64)
    shown, hidden = code_encoder.masked(blocks, tokenizer, torch.Generator().manual_seed(0))
    assert (blocks[:, 0] == tokenizer.bos_token_id).all() and not hidden[:, 0].any()
    assert float(hidden[:, 1:].float().mean()) == pytest.approx(0.15, abs=0.01)
    assert torch.equal(shown[~hidden], blocks[~hidden])
    shares = [(shown == tokenizer.mask_token_id)[hidden], (shown == blocks)[hidden]]
    assert [float(share.float().mean()) for share in shares] == pytest.approx([0.8, 0.1], abs=0.03)


@pytest.mark.parametrize("place", range(3))
def test_a_trained_encoder_is_loaded_with_its_last_loss(small, place):
    settings = small[place]
    model, tokenizer, saved = code_encoder.load_encoder(settings)
    assert code_encoder.measure(settings)["nats per masked token"] == saved["losses"][-1]
    scored = code_encoder.in_blocks(TEXTS[-10:], tokenizer, settings["length"])
    assert code_encoder.validation_loss(model, scored, tokenizer) == pytest.approx(saved["losses"][-1], abs=1e-6)
    untrained = code_encoder.build(settings, len(tokenizer))
    assert abs(code_encoder.validation_loss(untrained, scored, tokenizer) - saved["losses"][-1]) > 1e-3


def runs(arm, losses):
    settings = {"layers": 4, "width": 192, "steps": 6, "arm": arm, "learning_rate": 1e-3}
    values = [{code_encoder.LOSS: each[-1], "tokens": [10.0, 20.0, 30.0], "losses": each} for each in losses]
    return [finished({**settings, "seed": seed}, each) for seed, each in enumerate(values)]


@pytest.mark.parametrize(("better", "verdict"), [(True, "confirmed"), (False, "not confirmed")])
def test_the_verdict_is_on_tokens_to_the_plain_loss(better, verdict):
    plain = runs("plain", [[4.0, 3.0, 2.0], [4.1, 3.1, 2.1]])
    rsa = runs(DEFAULT, [[3.0, 2.0, 1.5], [3.1, 2.1, 1.6]] if better else [[5.0, 4.0, 3.0], [5.1, 4.1, 3.1]])
    experiment = find_experiment("code-encoder")
    rows = experiment.summarise([*plain, *runs(CONVOLUTION, [[4.0, 2.0, 1.9], [4.0, 2.1, 1.9]]), *rsa])
    conclusion = experiment.conclude(rows)
    assert conclusion.verdict == verdict
    if better:
        assert "0.667" in conclusion.answer and any("-0.500" in each for each in conclusion.findings)
