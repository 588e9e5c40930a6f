"""The model card: its content, and its place beside what others wrote."""

import logging
import math
import re
import resource
import subprocess
import sys

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, RepoCard
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from families import CONFIGS, FULL_PLAN, build
from rsa_hf import RSAConfig, patch_model, rsa_report, unpatch_model
from rsa_hf.hub import card
from rsa_hf.hub.card import CardFacts, read_facts, write_card
from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLForCausalLM
from rsa_hf.utils.files import StorageError


@pytest.fixture
def model():
    return patch_model(build("gpt2"), RSAConfig(**FULL_PLAN))


def card_of(model, folder, facts=None, plot=False):
    return ModelCard.load(write_card(model, folder, facts, plot))


def test_a_card_has_the_facts_the_report_and_the_code_to_load(model, tmp_path):
    facts = CardFacts(
        base_model="openai-community/gpt2",
        datasets=("Salesforce/wikitext", "./texts"),
        seeds=(0, 1),
        scores={"test": {"accuracy": 0.61234}},
        command="make demo",
    )
    card = card_of(model, tmp_path, facts, plot=True)
    assert card.data.base_model == "openai-community/gpt2"
    assert card.data.library_name == "transformers"
    assert card.data.datasets == ["Salesforce/wikitext"]
    assert card.data.metrics == ["accuracy"]
    assert {"rsa_hf", "rsa"} <= set(card.data.tags)
    for part in (
        "import rsa_hf",
        "GPT2Model.from_pretrained",
        str(rsa_report(model)),
        "| test | 0.6123 |",
        "rsa.png",
        "* seeds: 0, 1",
        '"dilation": [2, 3, 5]',
        "@inproceedings{huang2023encoding",
        "make demo",
    ):
        assert part in card.content


def transformer_xl():
    sizes = {"d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 16, "n_layer": 1, "mem_len": 4, "clamp_len": -1}
    return TransformerXLForCausalLM(TransformerXLConfig(vocab_size=97, cutoffs=[], div_val=1, **sizes))


@pytest.mark.parametrize("make", [lambda: build("gpt2"), transformer_xl], ids=["transformers", "ours"])
def test_the_code_on_a_card_loads_the_model(make, tmp_path):
    model = patch_model(make(), RSAConfig(num_regular=1))
    model.save_pretrained(tmp_path)
    write_card(model, tmp_path, CardFacts(name=str(tmp_path)))
    code = re.search(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), flags=re.DOTALL)[1]
    assert str(tmp_path) in code
    code += "print(type(model).__name__, sum(value.double().abs().sum().item() for value in model.parameters()))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, total = done.stdout.split()
    assert name == type(model).__name__
    assert float(total) == pytest.approx(sum(value.double().abs().sum().item() for value in model.parameters()))


def test_under_fsdp_the_code_names_the_models_own_class(model, tmp_path):
    """FSDP2 replaces a model's class by one that cannot be imported."""
    model.__class__ = type("FSDPGPT2Model", (FSDPModule, type(model)), {})
    code = "from transformers import GPT2Model\n\nmodel = GPT2Model.from_pretrained"
    assert code in card_of(model, tmp_path).content


# --- written into a folder -----------------------------------------------------------------------------------------


FACTS = CardFacts(
    base_model="openai-community/gpt2",
    datasets=("Salesforce/wikitext",),
    metrics=("perplexity",),
    seeds=(3,),
    scores={"test": {"perplexity": 21.5}},
    command="train --> it <b>",
    name="someone/rsa",
)


def test_every_save_updates_the_card(model, tmp_path):
    model.save_pretrained(tmp_path)
    write_card(model, tmp_path, FACTS)
    assert read_facts(tmp_path) == FACTS
    before = (tmp_path / "README.md").read_text()
    with torch.no_grad():
        model.h[0].attn.rsa.mu.zero_()
    model.save_pretrained(tmp_path)
    after = (tmp_path / "README.md").read_text()
    assert str(rsa_report(model)) in after
    assert str(rsa_report(model)) not in before
    assert read_facts(tmp_path) == FACTS
    assert "| test | 21.5 |" in after
    assert ModelCard(after).data.to_dict() == ModelCard(before).data.to_dict()


def test_the_card_reports_the_weights_that_were_saved(model, tmp_path):
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


def test_saving_keeps_what_others_wrote(model, tmp_path):
    card = (
        "---\nlicense: mit\nbase_model: /home/me/gpt2\ntags: [mine]\nmodel-index: [{odd: 1}]\n---\n\n# Mine\n\nHello\n"
    )
    (tmp_path / "README.md").write_text(card)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "# Mine\n\nHello\n" in text
    assert "model-index:\n- odd: 1\n" in text
    assert "/home/me" not in text
    assert "- mine\n- rsa_hf\n" in text
    again = text.replace("Hello", "Hello\\1 again")
    (tmp_path / "README.md").write_text(again)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == again


# --- the results that the Hub shows --------------------------------------------------------------------------------


SCORES = {
    "validation": {"accuracy": 0.625, "threshold": 0.4, "f1_at_threshold": 0.5, "num_examples": 8},
    "test": {"accuracy": 0.5, "f1": 0.25, "roc_auc": math.nan},
    "seed 3": {"accuracy": 0.75},
}


@pytest.fixture
def classifier():
    return patch_model(AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]()), RSAConfig(num_regular=1))


def results_of(card):
    """(data set, split, name of the metric, value) of each result of a card."""
    listed = ModelCard.load(card).data.eval_results or []
    return [(each.dataset_name, each.dataset_split, each.metric_name, each.metric_value) for each in listed]


def test_the_metadata_lists_what_was_measured_on_a_split(classifier, tmp_path):
    facts = CardFacts(datasets=("someone/functions",), dataset_config="c", scores=SCORES)
    card = ModelCard.load(write_card(classifier, tmp_path, facts))
    assert {
        (each.task_type, each.dataset_type, each.dataset_name, each.dataset_config) for each in card.data.eval_results
    } == {("text-classification", "someone/functions", "someone/functions", "c")}
    assert [
        (each.dataset_split, each.metric_type, each.metric_name, each.metric_value) for each in card.data.eval_results
    ] == [
        ("validation", "accuracy", "Accuracy", 0.625),
        ("validation", "f1", "F1 at the threshold chosen on validation", 0.5),
        ("test", "accuracy", "Accuracy", 0.5),
        ("test", "f1", "F1", 0.25),
    ]
    assert card.data.metrics == ["accuracy", "f1", "roc_auc"]


@pytest.mark.parametrize(
    ("datasets", "scores"),
    [
        ((), SCORES),
        (("someone/functions", "someone/others"), SCORES),
        (("someone/functions",), {"test": {"loss": 1.0}, "seed 3": {"accuracy": 0.5}}),
    ],
    ids=["no data set", "two data sets", "no metric of a split"],
)
def test_other_scores_are_in_the_table_alone(classifier, tmp_path, datasets, scores):
    card = ModelCard.load(write_card(classifier, tmp_path, CardFacts(datasets=datasets, scores=scores)))
    assert "model-index" not in card.data and card.data.eval_results is None
    assert "### Results" in card.content


def test_a_perplexity_that_is_infinite_is_left_out(tmp_path):
    model = patch_model(AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()), RSAConfig(num_regular=1))
    scores = {"test": {"token_perplexity": 21.5, "word_perplexity": math.inf, "bits_per_byte": 1.25}}
    facts = CardFacts(datasets=("Python's standard library",), scores=scores)
    card = ModelCard.load(write_card(model, tmp_path, facts))
    assert [
        (each.task_type, each.dataset_type, each.metric_type, each.metric_value) for each in card.data.eval_results
    ] == [
        ("text-generation", "custom", "perplexity", 21.5),
        ("text-generation", "custom", "bits_per_byte", 1.25),
    ]
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.to_dict() == card.data.to_dict()


THEIRS = """---
model-index:
- name: mine
  results:
  - task: {type: text-classification}
    dataset: {name: someone/functions, type: someone/functions, split: test}
    metrics:
    - {type: accuracy, value: 0.9, name: Accuracy, verified: true}
- name: another
  results: []
---
"""


def test_results_of_others_stay(classifier, tmp_path):
    (tmp_path / "README.md").write_text(THEIRS)
    theirs = ("someone/functions", "test", "Accuracy", 0.9)
    facts = CardFacts(datasets=("someone/functions",), scores={"test": {"accuracy": 0.5, "f1": 0.25}})
    ours = [("someone/functions", "test", "Accuracy", 0.5), ("someone/functions", "test", "F1", 0.25)]
    path = write_card(classifier, tmp_path, facts)
    assert results_of(path) == [theirs, *ours]
    for _ in range(2):  # saved again, they are there once
        classifier.save_pretrained(tmp_path)
        assert results_of(path) == [theirs, *ours]
    # New scores replace those before them; so does another data set.
    write_card(classifier, tmp_path, CardFacts(scores={"test": {"accuracy": 0.75}}))
    assert results_of(path) == [theirs, ("someone/functions", "test", "Accuracy", 0.75)]
    write_card(classifier, tmp_path, CardFacts(datasets=("someone/others",)))
    assert results_of(path) == [theirs, ("someone/others", "test", "Accuracy", 0.75)]
    # A plain model has none of ours.
    unpatch_model(classifier).save_pretrained(tmp_path)
    assert results_of(path) == [theirs]
    index = yaml.safe_load(THEIRS.strip().strip("-"))["model-index"]
    assert RepoCard.load(path).data["model-index"] == index


# --- in the place of others ----------------------------------------------------------------------------------------


def test_a_plain_model_saved_in_its_place_removes_the_rsa_section_only(tmp_path):
    unpatched = build("gpt2")
    unpatched.save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
    model = patch_model(build("gpt2"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(path.read_text().replace("- rsa_hf", "- mine\n- rsa_hf", 1) + "\n## What it is for\n")
    unpatch_model(model).save_pretrained(tmp_path)
    rest = "--- library_name: transformers tags: - mine --- # GPT2Model ## What it is for"
    assert " ".join(path.read_text().split()) == rest
    patch_model(model).save_pretrained(tmp_path)
    assert "## RSA heads" in path.read_text() and "## What it is for" in path.read_text()


def test_a_readme_that_is_not_a_card_is_left_unchanged(model, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


def test_a_card_that_cannot_be_read_does_not_stop_saving(model, tmp_path, caplog):
    broken = "---\nlicense: [mit\n---\n"
    (tmp_path / "README.md").write_text(broken)
    with caplog.at_level(logging.WARNING):
        model.save_pretrained(tmp_path)
    assert "was not brought up to date" in caplog.text
    assert (tmp_path / "README.md").read_text() == broken
    assert (tmp_path / "model.safetensors").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_card_that_cannot_be_written_leaves_the_previous_one(model, tmp_path):
    write_card(model, tmp_path, CardFacts(seeds=(1,)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(StorageError, match="cannot write to"):
            write_card(model, tmp_path, CardFacts(seeds=(2,)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_card_of_version_0_1_is_updated(model, tmp_path):
    write_card(model, tmp_path, FACTS)
    path = tmp_path / "README.md"
    text = path.read_text()
    path.write_text(text.replace(card._BEGIN, card._BEGIN_0_1))
    assert path.read_text() != text
    model.save_pretrained(tmp_path)
    assert path.read_text() == text


@pytest.mark.parametrize("facts", ["[1]", "{", '{"of a later version": 1}'])
def test_unreadable_facts_are_ignored(model, tmp_path, facts):
    write_card(model, tmp_path, CardFacts(seeds=(1,)))
    path = tmp_path / "README.md"
    path.write_text(path.read_text().replace('{"seeds": [1]}', facts))
    assert read_facts(tmp_path) == CardFacts()


def test_only_the_main_process_writes(model, tmp_path):
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


def test_a_local_path_is_not_named_as_the_base_model(model, tmp_path):
    for path in (str(tmp_path), "./outputs/best", "/nowhere/at/all"):
        card = card_of(model, tmp_path, CardFacts(base_model=path))
        assert card.data.base_model is None and path not in card.content


@pytest.mark.parametrize("where", ["offloaded", "sharded"])
def test_gates_on_other_devices_or_processes_are_not_read(model, tmp_path, where):
    heads = model.h[0].attn.rsa
    if where == "offloaded":
        heads.to("meta")
    else:
        heads.mu.full_tensor = lambda: pytest.fail("every process would have to take part")
    write_card(model, tmp_path, plot=True)
    card = (tmp_path / "README.md").read_text()
    assert '"num_dilated_cyclical_pairs": 1' in card
    assert "`rsa-hf card FOLDER` adds them" in card
    assert not (tmp_path / "rsa.png").exists()
