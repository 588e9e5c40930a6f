"""The model card: its content, and its place beside what others wrote."""

import logging
import math
import re

import pytest
import yaml
from huggingface_hub import ModelCard, RepoCard
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from families import CONFIGS, FULL_PLAN, build
from launching import run_python
from models import tiny
from rsa_hf import RSAConfig, patch_model, rsa_report, unpatch_model
from rsa_hf.hub import write_card


@pytest.fixture
def model():
    return patch_model(build("gpt2"), RSAConfig(**FULL_PLAN))


@pytest.fixture
def classifier():
    return patch_model(AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]()), RSAConfig(num_regular=1))


def test_a_card_has_the_facts_the_report_and_the_picture(model, tmp_path):
    facts = {"name": "someone/rsa", "base_model": "openai-community/gpt2", "dataset": "Salesforce/wikitext"}
    scores = {"test": {"accuracy": 0.61234, "loss": 2.0}, "seed 3": {"accuracy": 0.5}}
    card = ModelCard.load(write_card(model, tmp_path, **facts, scores=scores, seed=3))
    assert (card.data.base_model, card.data.library_name) == ("openai-community/gpt2", "transformers")
    assert card.data.datasets == ["Salesforce/wikitext"]
    assert {"rsa_hf", "rsa"} <= set(card.data.tags)
    for part in (
        "| | accuracy | loss |\n|---|---|---|\n| test | 0.6123 | 2 |\n| seed 3 | 0.5 |  |\n",
        "![learned decay curves and gates](rsa.png)",
        "* seed: 3",
    ):
        assert part in card.content
    assert (tmp_path / "rsa.png").exists()


def test_a_plain_model_saved_in_its_place_takes_its_part_out(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text() + "\nOf its user.\n")
    unpatch_model(model).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "recurrence" not in card.content and "Of its user." in card.text


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("make", [lambda: build("gpt2"), lambda: tiny.build("transfo-xl")])
def test_the_code_on_a_card_loads_the_model(make, tmp_path):
    model = patch_model(make(), RSAConfig(num_regular=1))
    model.save_pretrained(tmp_path)
    card = write_card(model, tmp_path, name=str(tmp_path), plot=False).read_text()
    code = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)[1]
    code += "print(type(model).__name__, sum(value.double().abs().sum().item() for value in model.parameters()))\n"
    name, total = run_python("-c", code, code=0).stdout.split()
    assert name == type(model).__name__
    assert float(total) == pytest.approx(sum(value.double().abs().sum().item() for value in model.parameters()))


def test_under_fsdp_the_code_names_the_models_own_class(model, tmp_path):
    """FSDP2 replaces a model's class by one that cannot be imported."""
    model.__class__ = type("FSDPGPT2Model", (FSDPModule, type(model)), {})
    code = "from transformers import GPT2Model\n\nmodel = GPT2Model.from_pretrained"
    assert code in write_card(model, tmp_path, plot=False).read_text()


# --- the results that the Hub shows ---------------------------------------------------------------------------------

SCORES = {
    "validation": {"accuracy": 0.625, "threshold": 0.4, "mcc_at_threshold": 0.5, "num_examples": 8},
    "test": {"accuracy": 0.5, "roc_auc": math.nan},
    "seed 3": {"accuracy": 0.75},
}


def test_the_metadata_lists_what_was_measured_on_a_split(classifier, tmp_path):
    path = write_card(classifier, tmp_path, dataset="someone/functions", scores=SCORES)
    data = ModelCard.load(path).data
    assert {(each.task_type, each.dataset_type) for each in data.eval_results} == {
        ("text-classification", "someone/functions")
    }
    assert {each.dataset_name for each in data.eval_results} == {"someone/functions"}
    assert [(each.dataset_split, each.metric_type, each.metric_value) for each in data.eval_results] == [
        ("validation", "accuracy", 0.625),
        ("validation", "matthews_correlation", 0.5),
        ("test", "accuracy", 0.5),
    ]
    assert data.metrics == ["accuracy", "matthews_correlation"]


def test_a_perplexity_that_is_infinite_is_left_out(tmp_path):
    model = patch_model(AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()), RSAConfig(num_regular=1))
    scores = {"test": {"token_perplexity": 21.5, "word_perplexity": math.inf, "bits_per_byte": 1.25}}
    path = write_card(model, tmp_path, dataset="Python's standard library", scores=scores)
    results = ModelCard.load(path).data.eval_results
    assert {(each.task_type, each.dataset_type) for each in results} == {("text-generation", "custom")}
    assert [each.metric_type for each in results] == ["perplexity", "bits_per_byte"]


THEIRS = """---
license: mit
tags: [mine]
model-index:
- name: mine
  results:
  - task: {type: text-classification}
    dataset: {name: someone/functions, type: someone/functions, split: test}
    metrics:
    - {type: accuracy, value: 0.9, name: Accuracy, verified: true}
- {odd: 1}
---

# Mine

Hello
"""


def test_what_others_wrote_stays(classifier, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(THEIRS)

    def index():
        return RepoCard.load(path).data["model-index"]

    theirs = yaml.safe_load(THEIRS.split("---")[1])["model-index"]
    write_card(classifier, tmp_path, dataset="someone/functions", scores={"test": {"accuracy": 0.5}})
    assert index()[:-1] == theirs
    assert index()[-1]["results"][0]["metrics"][0]["value"] == 0.5
    # New results replace those before them, and new weights have none until they are measured.
    write_card(classifier, tmp_path, dataset="someone/functions", scores={"test": {"accuracy": 0.75}})
    assert [entry["results"][0]["metrics"][0]["value"] for entry in index()[2:]] == [0.75]
    classifier.save_pretrained(tmp_path)
    assert index() == theirs
    text = path.read_text()
    assert "# Mine\n\nHello\n" in text and "license: mit" in text and "- mine\n- rsa_hf\n" in text
    path.write_text(text.replace("Hello", "Hello\\1 again"))
    classifier.save_pretrained(tmp_path)
    assert path.read_text() == text.replace("Hello", "Hello\\1 again")


# --- written when a model is saved ----------------------------------------------------------------------------------


def test_a_save_describes_the_weights_that_were_saved(model, tmp_path):
    """`state_dict` may hold other weights than the model."""
    averaged = {name: value.clone() for name, value in model.state_dict().items()}
    averaged["h.0.attn.rsa.mu"].fill_(0.1)
    parameters = dict(model.named_parameters())
    model.save_pretrained(tmp_path, state_dict=averaged)
    saved = str(rsa_report(type(model).from_pretrained(tmp_path)))
    assert saved != str(rsa_report(model)) and saved in (tmp_path / "README.md").read_text()
    # The model keeps its parameters, which an optimiser may hold.
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path)
    assert str(rsa_report(model)) in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("comment", ["made anew on every save", 'generated on every save {"seeds": [1]}'])
def test_a_card_of_an_earlier_version_is_updated(model, tmp_path, comment):
    model.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    text = path.read_text()
    earlier = re.sub("<!-- rsa_hf: generated.*?-->\n.*?##", f"<!-- rsa_hf: {comment} -->\nold ##", text, count=1)
    assert earlier != text
    path.write_text(earlier)
    model.save_pretrained(tmp_path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "warning"), [("# My project\n", ""), ("---\nlicense: [mit\n---\n", "was not brought up to date")]
)
def test_a_readme_that_is_no_card_or_cannot_be_read_stays_as_it_is(model, tmp_path, caplog, text, warning):
    (tmp_path / "README.md").write_text(text)
    with caplog.at_level(logging.WARNING):
        model.save_pretrained(tmp_path)
    assert warning in caplog.text
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "model.safetensors").exists()


def test_a_local_path_is_not_named_as_the_base_model(model, tmp_path):
    for path in (str(tmp_path), "./outputs/best", "/nowhere/at/all"):
        card = ModelCard.load(write_card(model, tmp_path, base_model=path, plot=False))
        assert card.data.base_model is None and path not in card.content


@pytest.mark.parametrize("where", ["offloaded", "sharded"])
def test_gates_on_other_devices_or_processes_are_not_read(model, tmp_path, where):
    heads = model.h[0].attn.rsa
    if where == "offloaded":
        heads.to("meta")
    else:
        heads.mu.full_tensor = lambda: pytest.fail("every process would have to take part")
    card = write_card(model, tmp_path).read_text()
    assert '"num_dilated_cyclical_pairs": 1' in card
    assert "Their values were not available" in card
    assert not (tmp_path / "rsa.png").exists()
