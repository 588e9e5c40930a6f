"""Train a defect detector, patched with RSA heads or plain.

    accelerate launch scripts/train_defect_detection.py configs/defect_minilm_embedded.yaml [--key value …]

`--help` lists the keys, the YAML files in configs/ explain them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from rsa_hf import is_patched
from rsa_hf.tasks import defect_detection as task
from rsa_hf.tasks.audit import audit, format_audit
from rsa_hf.tasks.defect_data import DefectDataConfig, load_defect_data
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.loop import train
from rsa_hf.training.run import (
    load_model,
    locate,
    predict_logits,
    report_results,
    require_tokens_known,
    script_errors,
)


def main(arguments: list[str]) -> None:
    config = read_run_config(arguments, DefectDataConfig)
    training, output = config.training, Path(config.training.output_dir)
    accelerator = Accelerator(mixed_precision=training.mixed_precision)
    set_seed(training.seed)
    source = config.model.tokenizer or config.model.name_or_path
    if source is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; name one on the Hub, or a folder.")
    with accelerator.main_process_first():  # the others then find what the first has downloaded
        tokenizer = AutoTokenizer.from_pretrained(locate(source))
        model = load_model(AutoModelForSequenceClassification, config.model, config.rsa, num_labels=2)
        splits = load_defect_data(config.data)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_tokens_known(model, len(tokenizer))
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", sys.maxsize))
    if config.data.max_length > longest:
        raise ValueError(f"data.max_length={config.data.max_length}: this model takes at most {longest} tokens.")
    if "validation" not in splits:
        raise ValueError("the data has no validation split, by which the best model is chosen. Give one.")
    if accelerator.is_main_process:
        report = audit(splits, tokenizer, config.data.max_length)
        print(format_audit(report))
        output.mkdir(parents=True, exist_ok=True)
        (output / "audit.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    rows = {split: task.tokenize(examples, tokenizer, config.data) for split, examples in splits.items()}
    inputs = {split: list(of_split.remove_columns("example_id")) for split, of_split in rows.items()}
    collate = task.collator(tokenizer)

    def score(model: PreTrainedModel, split: str) -> dict[str, float]:
        logits = predict_logits(model, inputs[split], collate, training.eval_batch_size)
        return task.compute_metrics(logits, rows[split]["labels"], rows[split]["example_id"])

    labels = [example.target for example in splits["train"]]
    result = train(
        model,
        inputs["train"],
        collate,
        lambda model: score(model, "validation"),
        training,
        best_metric="accuracy",
        greater_is_better=True,
        class_weights=task.class_weights(labels).tolist() if training.class_weights else None,
        tokenizer=tokenizer,
        settings=config.to_dict(),
    )
    if not accelerator.is_main_process:
        return
    best = AutoModelForSequenceClassification.from_pretrained(result.best_dir).to(accelerator.device)
    scores = {"validation": result.best_metrics}
    if "test" in splits:
        scores["test"] = score(best, "test")
    name = "with RSA" if is_patched(best) else "plain"
    table = [["model", "split", "accuracy", "majority class", "F1", "MCC", "functions"]]
    for split, figures in scores.items():
        shares = (f"{figures[key]:.2%}" for key in ("accuracy", "majority_accuracy"))
        numbers = (f"{figures[key]:.4f}" for key in ("f1", "mcc"))
        table.append([name, split, *shares, *numbers, f"{figures['num_examples']:,}"])
    report_results(config, result, scores, table, best)


if __name__ == "__main__":
    with script_errors():
        main(sys.argv[1:])
