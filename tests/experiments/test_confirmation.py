"""The confirmation of the defaults: what is scored and concluded. test_experiments.py has the verdict."""

from experiment_runs import conclude, fake_runs
from experiments import confirmation
from experiments.variants import CONVOLUTION, DEFAULT


def test_rsa_has_to_be_ahead_of_the_convolution_in_the_mean():
    plain = fake_runs("confirmation", "plain", (3.0, 3.1, 3.05))
    convolved = fake_runs("confirmation", CONVOLUTION, (2.5, 2.52, 2.51))

    def found(*rsa):
        return conclude("confirmation", plain, convolved, fake_runs("confirmation", DEFAULT, rsa))

    behind = found(2.6, 2.62, 2.61)
    assert behind.verdict == "not confirmed" and found(2.5, 2.51, 2.51).verdict == "confirmed"
    assert len(behind.findings) == 3 and "-0.440" in behind.findings[2]


def test_the_scored_texts_are_two_and_long_enough(data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    for _, name, _ in confirmation.CASES["full"]:
        if name != "text8":
            text = confirmation.read_corpus(name, 10**9, 200_000, 256)
            sizes = [scored.num_bytes for scored in (text.validation, text.test)]
            assert min(sizes) > 190_000
