"""Every layer and head is drawn."""

import math

import pytest
from transformers import AutoModelForCausalLM

from families import tiny_config
from rsa_hf import RSAConfig, patch_model, rsa_report
from rsa_hf.plots import plot_rem

Figure = pytest.importorskip("matplotlib.figure").Figure


def gpt2(layers, **plan):
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2", num_hidden_layers=layers))
    return patch_model(model, RSAConfig(**plan))


@pytest.fixture
def figures(monkeypatch):
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **how: (saved.append(self), save(self, *args, **how)))
    return saved


@pytest.mark.parametrize("layers", [1, 6, 25])
def test_every_layer_has_a_panel_and_a_gate(tmp_path, figures, layers):
    path = tmp_path / "new" / "rsa"
    plot_rem(gpt2(layers), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    upper, lower = figures[0].subfigs
    titles = [axes.get_title(loc="left") for axes in upper.axes if axes.axison]
    assert titles == [f"transformer.h.{i}.attn" for i in range(layers)]
    assert len(lower.axes[0].patches) == layers


def test_every_head_has_its_curve_and_its_kind_a_label(tmp_path, figures):
    model = gpt2(1, num_regular=2, num_cyclical_pairs=1, num_dilated_cyclical_pairs=1, dilation=[2, 4])
    report = rsa_report(model)
    plot_rem(report, tmp_path / "rsa.png")
    axes = figures[0].subfigs[0].axes[0]
    drawn = {tuple(line.get_xdata()[:2]): line.get_ydata() for line in axes.lines if len(line.get_xdata()) > 2}
    for head in report.layers[0].heads[4:]:
        wave = {"cos": math.cos, "sin": math.sin}[head.kind]
        assert drawn[(head.dilation, 2 * head.dilation)][1] == pytest.approx(head.decay**2 * wave(2 * head.theta))
    labels = [text.get_text() for text in figures[0].subfigs[0].legends[0].get_texts()]
    assert [*(label.split()[0] for label in labels[:3]), *labels[3:]] == ["regular", "cos", "sin", "dilated by 2, 4"]
