"""The experiment `forecasting`: its data, its variants, which differ in RSA alone, and its verdict."""

import lzma
from datetime import datetime, timedelta

import pytest
import torch
from torch import nn

from experiment_runs import conclude, measure_again, zero_rems
from experiments import forecasting
from experiments.forecasting import EXPERIMENT, train
from experiments.forecasting.models import FAMILIES, Task, make_forecaster
from experiments.forecasting.series import PARTS, load_series
from experiments.runner import resources
from experiments.variants import patched_modules

TASK = Task(context=40, label=20, horizon=10, variables=2, time_features=4)
SHAPE = {"width": 16, "encoder_layers": 2, "decoder_layers": 1, "dilation": 24}


def test_a_series_has_parts_of_12_4_and_4_months_and_is_standardised_on_the_first(tmp_path, monkeypatch):
    start = datetime(2016, 7, 1)
    lines = [f"{start + timedelta(hours=t)},{t % 100},{3 * (t % 7) + 1}" for t in range(21 * 30 * 24)]
    (tmp_path / "ett").mkdir()
    with lzma.open(tmp_path / "ett" / "ETTh1.csv.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join(["date,A,B", *lines, ""]))
    monkeypatch.setenv("RSA_HF_DATA", str(tmp_path))
    monkeypatch.setattr(resources, "DIGESTS", {})
    series = load_series.__wrapped__("ETTh1")
    assert [series.part(part) for part in PARTS] == [range(8640), range(8640, 11520), range(11520, 14400)]
    raw = torch.tensor([[t % 100, 3 * (t % 7) + 1] for t in range(8640)]).double()
    expected = (raw - raw.mean(0)) / ((raw - raw.mean(0)) ** 2).mean(0).sqrt()
    torch.testing.assert_close(series.values[:8640].double(), expected, rtol=0, atol=1e-6)
    # 13:00 on Friday, July 1st, day 183 of a leap year.
    expected = torch.tensor([13 / 23 - 0.5, 4 / 6 - 0.5, 0 / 30 - 0.5, 182 / 365 - 0.5])
    torch.testing.assert_close(series.times[13], expected)


def forecaster(family, variant, seed=0):
    torch.manual_seed(seed)
    return make_forecaster(family, variant, TASK, **SHAPE).eval()


def example():
    torch.manual_seed(1)
    return torch.randn(2, 40, 2), torch.rand(2, 50, 4) - 0.5


def predict(model, values, times):
    torch.manual_seed(2)  # ProbSparse attention samples keys
    with torch.no_grad():
        return model(values, times)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_variants_differ_in_rsa_alone(family):
    plain, rsa = forecaster(family, "plain"), forecaster(family, "rsa")
    mine = {name: p for name, p in rsa.state_dict().items() if ".rsa." not in name}
    assert mine.keys() == plain.state_dict().keys()
    assert all(torch.equal(p, mine[name]) for name, p in plain.state_dict().items())
    patched = [heads for _, heads in patched_modules(rsa)]
    assert len(patched) == 3  # the self-attention of every layer
    informer = family == "informer"
    assert {len(heads.spec.layout.rows) for heads in patched} == {8 if informer else 4}
    day = 24 if informer else 6  # patches
    dilations = [{row.dilation for row in heads.spec.layout.rows} for heads in patched]
    assert all(day in of_layer <= {1, day} for of_layer in dilations)
    found = predict(rsa, *example())
    assert found.shape == (2, 10, 2)
    assert (found - predict(plain, *example())).abs().max() > 1e-5


def test_dlinear_is_linear_in_trend_and_rest():
    model, (values, times) = forecaster("dlinear", "plain"), example()
    trend = torch.stack([values[:, [min(max(s, 0), 39) for s in range(t - 12, t + 13)]].mean(1) for t in range(40)], 1)
    weights, biases = (model.trend.weight, model.rest.weight), model.trend.bias + model.rest.bias
    parts = [torch.einsum("hc,bcn->bhn", w, x) for w, x in zip(weights, (trend, values - trend), strict=True)]
    torch.testing.assert_close(predict(model, values, times), sum(parts) + biases[:, None], atol=1e-5, rtol=1e-4)


class Constant(nn.Module):
    """Predicts one learned number everywhere."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))

    def forward(self, values, times):
        return self.value.expand(len(values), times.shape[1] - values.shape[1], values.shape[2])


def test_training_returns_the_model_with_the_lowest_validation_error(monkeypatch):
    seen, model = [], Constant()

    def validation_error(model, *_):
        seen.append(model.value.item())
        return [3.0, 1.0, 2.0][len(seen) - 1]

    monkeypatch.setattr(forecasting, "score", validation_error)
    settings = {"epochs": 3, "steps": 2, "batch": 4, "learning_rate": 0.1, "stride": 4, "seed": 0}
    assert train(model, load_series("seasonal-8"), Task(16, 8, 8, 2, 4), settings) == 1.0
    assert len(set(seen)) == 3 and model.value.item() == seen[1]


@pytest.mark.slow
def test_broken_rsa_loses(toy, monkeypatch):
    runs, conclusion = toy("forecasting")
    assert conclusion.verdict != "not confirmed"
    zero_rems(monkeypatch)
    found = measure_again(EXPERIMENT, runs, arm="rsa")
    assert EXPERIMENT.summarise(found).mean("mse, rsa / plain") > 0.9
    assert conclude("forecasting", found).verdict != "confirmed"
