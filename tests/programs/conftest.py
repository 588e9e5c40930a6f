"""Real programs and libraries on patched models; `make programs` runs them and writes PROGRAMS.md.

Each test has the marker `program(name, what, refused=reason)`, of which scripts/programs_page.py makes its row.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from families import tiny_config
from launching import run_python
from rsa_hf import RSAConfig, patch_model

BIN = Path(sys.executable).parent


def rows(program, **named):
    """Parameters by what is tried with each, which is its row on the page."""
    return [pytest.param(value, marks=pytest.mark.program(program, what)) for what, value in named.items()]


def pytest_configure(config):
    config.addinivalue_line("markers", "program(name, what, refused=None): a row of PROGRAMS.md")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("program"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def tokenizer(data_folder):
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def patched(tokenizer, tmp_path_factory):
    """The folder of a small patched Llama with GPT-2's vocabulary and open gates."""
    torch.manual_seed(0)
    special = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny_config("llama", vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes, **special)
    model = AutoModelForCausalLM.from_config(config)
    patch_model(model, RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=1.0))
    folder = tmp_path_factory.mktemp("models") / "patched"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentences():
    """48 distinct sentences."""
    nouns = ["cat", "pilot", "river", "letter", "engine", "garden"]
    verbs = ["finds", "follows", "forgets", "repairs"]
    return [f"The {a} {verb} the {b}." for a in nouns for verb in verbs for b in nouns[:2]]


@pytest.fixture
def run(tmp_path):
    """Run a command line with `rsa-hf run`, offline; returns its output."""

    def run(*words):
        kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        ended = run_python(BIN / "rsa-hf", "run", *words, code=0, cwd=tmp_path, timeout=None, **kept)
        return ended.stdout + ended.stderr

    return run


@pytest.fixture
def jsonl(tmp_path):
    """Write rows as JSON lines below the test's folder; returns the file."""

    def jsonl(name, rows):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return jsonl
