"""Runs of about a second of the two Accelerate scripts: models, data, and the process that is killed."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
LANGUAGE_MODEL, DEFECTS = "train_language_model.py", "train_defect_detection.py"
FUNCTIONS = [f"int f{i}(int a) {{ return a {'<=>'[i % 3]} {i}; }}" for i in range(40)]


def write_data(folder, dropout):
    """Write a tokenizer, a small BERT, functions and a text; returns the arguments of each script for them."""
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(FUNCTIONS, trainers.BpeTrainer(vocab_size=100, special_tokens=special))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    BertModel(BertConfig(**sizes, **rates, vocab_size=100)).save_pretrained(folder / "bert")
    # 21 functions or 17 blocks of text for training and 11 or 8 for validation: the last batches are incomplete.
    for split, part in {"train": FUNCTIONS[:21], "valid": FUNCTIONS[21:32]}.items():
        lines = [json.dumps({"func": text, "target": int(i % 4 == 0)}) for i, text in enumerate(part)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
        (folder / f"{split}.txt").write_text("\n".join(part))

    def files(kind):
        return ["--train_file", folder / f"train.{kind}", "--validation_file", folder / f"valid.{kind}"]

    LlamaConfig(**sizes, num_key_value_heads=4, attention_dropout=dropout).save_pretrained(folder / "llama")
    model = ["--config_name", folder / "llama", "--tokenizer_name", folder / "bert"]
    return {
        LANGUAGE_MODEL: [*model, *files("txt"), "--block_size", 16],
        DEFECTS: ["--model_name_or_path", folder / "bert", *files("jsonl"), "--max_length", 32],
    }


def arguments(script, data, output, *more):
    common = ["--learning_rate", 1e-3, "--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 3]
    return [str(ROOT / "scripts" / script), *map(str, [*data[script], *common, "--output_dir", output, *more])]


def run_script(script, data, output, *more):
    run(arguments(script, data, output, *more))


def run(command):
    sys.argv = command
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    runpy.run_path(command[0], run_name="__main__")


def interrupt_second_checkpoint(interrupt):
    """Make the second checkpoint of this process end, half written, with a call of `interrupt`."""
    save, saved = Accelerator.save_state, []

    def save_state(self, folder):
        save(self, folder)
        saved.append(folder)
        if len(saved) == 2:
            (Path(folder) / "optimizer.bin").unlink()
            interrupt()

    return save_state


if __name__ == "__main__":  # script_runs.py COMMAND: the script, killed while it writes its second checkpoint
    if os.environ["RANK"] == "0":
        Accelerator.save_state = interrupt_second_checkpoint(lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(sys.argv[1:])
