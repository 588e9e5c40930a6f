"""Fixtures for all tests. No test reaches a network: Hub access is switched off before anything is imported."""

import atexit
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Many tests compare bit for bit. On some processors MKL's last bit depends on a tensor's address.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU, kernels are interpreted. Triton reads this when it is imported, and transformers imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import huggingface_hub
import torch.distributed
import transformers.utils.hub
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, GPT2Config

import rsa_hf  # noqa: F401  (installs the hooks)
from families import VOCAB
from hub_stand_in import TOKEN, StandIn
from rsa_hf.ops.cpp.build import library

# Every run gets the same examples. There is no deadline, because shared machines stall.
settings.register_profile("rsa_hf", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("rsa_hf")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items):
    for item in items:
        for fast in item.iter_markers("slow_unless"):
            if all(item.callspec.params[name] not in values for name, values in fast.kwargs.items()):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()  # a full collection would look at a million objects of imported modules each time


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler():
    """Nothing that torch.compile has compiled for an earlier test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with real data and checkpoints, beside the repository."""
    folder = Path(os.environ.get("RSA_HF_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the data folder {folder}; set RSA_HF_DATA to where it is")
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(data_folder, tmp_path_factory):
    """The folder of a tiny GPT-2 with the real vocabulary, and its tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "gpt2").save_pretrained(folder)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def use_backend(name, monkeypatch):
    if name == "triton":
        from ops import kernels_under_test

        kernels_under_test.use_small_chunks(monkeypatch)
    if name == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", name)
    return name


@pytest.fixture(params=["pytorch", "cpp", "triton"])
def backend(request, monkeypatch):
    """Each backend in turn, Triton interpreted where there is no GPU."""
    return use_backend(request.param, monkeypatch)


@pytest.fixture(params=["pytorch", "cpp"])
def cpu_backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.fixture
def register_attention(monkeypatch):
    """Register an attention function for one test, with the masks of sdpa."""

    def register(name, function):
        masks = AttentionMaskInterface()["sdpa"]
        for interface, registered in ((AttentionInterface, function), (AttentionMaskInterface, masks)):
            monkeypatch.setitem(interface._global_mapping, name, registered)

    return register


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command of `rsa-hf` in this process; returns its exit code, standard output and standard error."""
    from rsa_hf.cli import main

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rsa-hf", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A new stand-in for the Hub and an empty cache, with a user who is logged in by HF_TOKEN."""
    with StandIn() as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # Otherwise a thread of transformers may ask for a safetensors copy of pickled weights at any time.
        monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
        yield hub
        assert hub.unknown == []


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with a token for each word w4, w5, …, as many as the models of families.py have."""
    words = ["[PAD]", "<s>", "</s>", "[UNK]", *(f"w{i}" for i in range(4, VOCAB))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
