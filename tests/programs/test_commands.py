"""Commands of other programs, started by `rsa-hf run` on a patched checkpoint."""

import json
import lzma
import socket
import subprocess
import time
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

import rsa_hf.peft
from launching import ROOT, run_python
from programs.conftest import BIN, rows
from rsa_hf import is_patched


def rsa_tensors(folder):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name: value for name, value in state.items() if ".rsa." in name}


def has_moved(folder, patched):
    """Whether training has changed all gates and rates."""
    before = rsa_tensors(patched)
    return all(not torch.equal(value, before[name]) for name, value in rsa_tensors(folder).items())


@pytest.mark.program(
    "lm_eval", "`lm_eval --model hf` on three paradigms of BLiMP: the accuracy of the log-likelihoods"
)
def test_lm_eval(run, jsonl, patched, tokenizer, data_folder, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-eval: make programs")
    with lzma.open(data_folder / "blimp" / "blimp.jsonl.xz", "rt", encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file]
    paradigms = ("adjunct_island", "anaphor_number_agreement", "npi_present_1")
    chosen = {name: [pair for pair in pairs if pair["UID"] == name][:20] for name in paradigms}
    for name, some in chosen.items():
        sentences = [{key: pair[key] for key in ("sentence_good", "sentence_bad")} for pair in some]
        data = jsonl(f"tasks/{name}.jsonl", sentences)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{train: {data}}}}}\n"
            "output_type: multiple_choice\nvalidation_split: train\ndoc_to_text: ''\ndoc_to_target: 0\n"
            "doc_to_choice: '{{[sentence_good, sentence_bad]}}'\n"
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
        )
    run(
        *("lm_eval", "--model", "hf", "--model_args", f"pretrained={patched}", "--device", "cpu"),
        *("--tasks", ",".join(f"local_{name}" for name in paradigms), "--include_path", "tasks"),
        *("--output_path", "scores.json"),
    )
    [file] = tmp_path.glob("scores*.json")
    scores = json.loads(file.read_text())["results"]
    model = AutoModelForCausalLM.from_pretrained(patched)
    for name, some in chosen.items():
        both = [[log_likelihood(model, tokenizer, pair[f"sentence_{x}"]) for x in ("good", "bad")] for pair in some]
        right = [good > bad for good, bad in both]
        assert scores[f"local_{name}"]["acc,none"] == sum(right) / len(right)


def log_likelihood(model, tokenizer, sentence):
    tokens = torch.tensor([tokenizer.bos_token_id, *tokenizer(f" {sentence}").input_ids])[None]
    with torch.no_grad():
        return -model(input_ids=tokens, labels=tokens).loss.item() * (tokens.shape[1] - 1)


# --- TRL ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trl(run, jsonl, patched):
    """Train with a TRL command on these rows, and save to the folder `trained`; returns the command's output."""
    pytest.importorskip("trl", reason="needs TRL: make programs")

    def train(command, rows, *options):
        jsonl("data/train.jsonl", rows)
        return run(
            *("trl", command, "--model_name_or_path", patched, "--dataset_name", "data", "--output_dir", "trained"),
            *("--max_steps", "2", "--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu"),
            *("--bf16", "false", *options),
        )

    return train


@pytest.fixture
def texts(sentences):
    return [{"text": text} for text in sentences]


SFT = {
    "`trl sft`: gates and rates learn, and are saved": "",
    "`trl sft --packing`: wrapped rows": "--packing --packing_strategy wrapped --max_length 64",
}


@pytest.mark.parametrize("options", rows("trl", **SFT))
def test_trl_sft(options, trl, texts, patched, tmp_path):
    trl("sft", texts * 4, *options.split())
    assert has_moved(tmp_path / "trained", patched)


LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--learning_rate", "1e-3")


@pytest.mark.program("trl", "`trl sft --use_peft`: a warning says that gates and rates stay frozen")
def test_trl_sft_with_lora(trl, texts):
    assert "trains no gates and rates" in trl("sft", texts, *LORA)


@pytest.mark.program("trl", "`trl sft --use_peft --lora_modules_to_save rsa`: trained, saved, merged")
def test_trl_sft_with_lora_and_rsa(trl, texts, patched, tmp_path):
    assert "trains no gates and rates" not in trl("sft", texts, *LORA, "--lora_modules_to_save", "rsa")
    adapted = rsa_hf.peft.load(AutoModelForCausalLM.from_pretrained(patched), tmp_path / "trained")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=tokens).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert has_moved(tmp_path / "merged", patched)


@pytest.mark.program("trl", "`trl dpo`")
def test_trl_dpo(trl, sentences, patched, tmp_path):
    trl("dpo", [{"prompt": text, "chosen": " Yes.", "rejected": " No, never."} for text in sentences])
    assert has_moved(tmp_path / "trained", patched)


@pytest.mark.program("trl", "`trl grpo`: four completions a prompt, rewarded by their length")
def test_trl_grpo(trl, sentences, patched, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def vowels(completions, **_):\n    return [float(sum(map(text.count, 'aeiou'))) for text in completions]\n"
    )
    options = "--num_generations 4 --max_completion_length 12 --reward_funcs rewards.vowels --learning_rate 1e-3"
    trl("grpo", [{"prompt": text} for text in sentences], *options.split())
    assert has_moved(tmp_path / "trained", patched)


# --- transformers and accelerate ----------------------------------------------------------------------------------


SERVE = {
    "`transformers serve`: a chat completion is what `generate` gives": "",
    "`transformers serve --continuous-batching`: the same": (
        "--continuous-batching --cb-num-blocks 64 --cb-max-batch-tokens 64"
    ),
}


@pytest.mark.parametrize("options", rows("transformers", **SERVE))
def test_transformers_serve(options, patched, tokenizer, tmp_path):
    pytest.importorskip("uvicorn", reason="needs transformers[serving]: make programs")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    serve = ["transformers", "serve", str(patched), "--port", str(port), "--device", "cpu", *options.split()]
    command = [BIN / "rsa-hf", "run", *serve]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not _answers(port):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
        messages = [{"role": "user", "content": "The cat finds"}]
        body = {"model": str(patched), "messages": messages, "max_tokens": 8, "temperature": 0, "stream": False}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        assert server.wait(60) is not None
    model = AutoModelForCausalLM.from_pretrained(patched)
    assert is_patched(model)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer == tokenizer.decode(tokens, skip_special_tokens=True)


def _answers(port):
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.program("accelerate", "`accelerate launch -m rsa_hf.run SCRIPT` on two processes")
def test_accelerate_launch(patched, tmp_path):
    (tmp_path / "score.py").write_text(
        "from accelerate import PartialState\nfrom transformers import AutoModel\n"
        f"AutoModel.from_pretrained({str(patched)!r})\nstate = PartialState(cpu=True)\n"
        # In one write, as both processes write to the same pipe.
        "print(f'loaded on {state.process_index} of {state.num_processes}\\n', end='', flush=True)\n"
    )
    config = ROOT / "configs" / "accelerate" / "two_cpus_gloo.yaml"
    launch = ("-m", "accelerate.commands.launch", "--config_file", config, "-m", "rsa_hf.run")
    ended = run_python(*launch, "score.py", code=0, cwd=tmp_path)
    loaded = [line for line in ended.stdout.splitlines() if line.startswith("loaded")]
    assert sorted(loaded) == ["loaded on 0 of 2", "loaded on 1 of 2"]
