"""README's table and its figure: each number against arithmetic of its own on the stored runs."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import evidence
from experiments.evidence import BEGIN, END, find_entries, make_table, write_evidence
from experiments.runner.experiment import find_experiment
from experiments.runner.runner import FOLDER, read_runs

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
LINES = [line.strip("| ").split(" | ") for line in TABLE.splitlines()[2:]]
ENTRIES = find_entries(ROOT)
RSA = "two free lags"  # of RSAConfig.from_scratch


def cells(experiment, size):
    path = ROOT / FOLDER / experiment / size / "cells.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def mean_and_interval(differences):
    """Of [seeds, parts], or of (seeds,)."""
    x = np.array(differences, dtype=float)
    x = x.reshape(len(x), -1)
    half = 0.0
    for means in (x.mean(1), x.mean(0)):
        if len(means) > 1:
            half += (stats.t.interval(0.95, len(means) - 1)[1] * means.std(ddof=1)) ** 2 / len(means)
    return x.mean(), x.mean() - half**0.5, x.mean() + half**0.5


def by_arm(runs, case):
    """What the runs of each arm that has all seeds measured, by seed, at the rate whose first seed validates best."""
    found = defaultdict(dict)
    for run in runs:
        settings = run["cell"]
        if all(settings[name] == value for name, value in case.items()):
            found[settings["arm"]].setdefault(settings["learning_rate"], {})[settings["seed"]] = run["values"]
    chosen = {}
    for arm, rates in found.items():
        best = min(rates, key=lambda rate: rates[rate][0].get("validation", 0))
        if len(rates[best]) == 5:
            assert best == 0 or min(rates) < best < max(rates), f"{case}, {arm}: {best} is the lowest or highest"
            chosen[arm] = [rates[best][seed] for seed in sorted(rates[best])]
    return chosen


def expected_rows():
    """For each row of the table the best rival, and RSA's numbers against plain and against it, from the stored runs."""
    confirmed = cells("confirmation", "full")
    order = [(case["model"], case["text"]) for case in find_experiment("confirmation").grid("full", 1)]
    memories = ("token shift", "short convolution", "learned toeplitz")
    for runs, rivals, key in (
        (confirmed, ("short convolution",), order.index),
        (cells("rivals", "full"), ("linear biases", "rotary", "sinusoidal", *memories), lambda _: 0),
    ):
        cases = dict.fromkeys((run["cell"]["model"], run["cell"]["text"]) for run in runs)
        for model, text in sorted(cases, key=key):
            arms = by_arm(runs, {"model": model, "text": text})
            others = [arm for arm in rivals if arm in arms]
            if others and RSA in arms:
                best = min(others, key=lambda arm: np.mean([run["validation"] for run in arms[arm]]))
                ours, *theirs = ([run["test by part"] for run in arms[arm]] for arm in (RSA, "plain", best))
                yield best, *(mean_and_interval(np.subtract(ours, scores)) for scores in theirs)
    untrained = [run for run in cells("calibrate", "full") if run["cell"]["trained"] == "nothing"]
    smollm2 = [run for run in untrained if run["cell"]["model"] == "smollm2"]
    names = {
        "no recurrence": "its gates with P = 0",
        "token bias": "a token bias",
        "factors on the rows": "two factors a head, on the same rows",
        "ia3 on the rows": "IA³ on the same rows",
        "lora on the rows": "LoRA of rank 1 on the same rows",
    }
    for task in dict.fromkeys(run["cell"]["task"] for run in smollm2):
        runs = [run for run in smollm2 if run["cell"]["task"] == task]
        runs.sort(key=lambda run: -run["values"].get("validation", 0))  # of learning rates the best one stays
        score = {(run["cell"]["arm"], run["cell"]["seed"]): run["values"]["score"] for run in runs}
        found = {
            arm: mean_and_interval([score["calibrated", seed] - score[arm, seed] for seed in range(5)])
            for arm in ("plain", *names)
            if (arm, 0) in score
        }
        best = max(found.keys() - {"plain"}, key=lambda arm: found[arm][0])
        yield names[best], found["plain"], found[best]


def test_the_table_of_readme_is_what_the_stored_runs_say():
    expected = [*expected_rows()]
    assert len(LINES) == len(expected) >= 8
    for (*_, plain, best, rival), (name, over_plain, over_best) in zip(LINES, expected, strict=True):
        assert rival == name
        for cell, numbers in ((plain, over_plain), (best, over_best)):
            assert re.findall(r"[+-]\d+\.\d+", cell) == [f"{number:+.3f}" for number in numbers], cell


def test_verdicts_of_the_table_hold_for_all_rows_together():
    # Holm's procedure, by hand, on the p-values that the intervals say.
    rows = [effect.row for entry in ENTRIES for effect in entry.effects]
    p = [2 * stats.t.sf(abs(r.mean) * stats.t.ppf(0.975, r.seeds - 1) / (r.mean - r.low), r.seeds - 1) for r in rows]
    verdicts, going = ["undecided"] * len(rows), True
    for rank, i in enumerate(np.argsort(p)):
        going = going and p[i] <= 0.05 / (len(rows) - rank)
        if going:
            verdicts[i] = "better" if rows[i].mean < 0 else "worse"
    assert [cell.split()[-1] for line in LINES for cell in line[3:5]] == verdicts


@pytest.mark.parametrize("name", ["confirmation", "rivals"])
def test_counts_of_bytes_are_ahead_where_the_pages_say_so(name):
    runs, counts = cells(name, "full"), "byte counts"
    for model, text in {(run["cell"]["model"], run["cell"]["text"]) for run in runs if run["cell"]["arm"] == counts}:
        arms = by_arm(runs, {"model": model, "text": text})
        scores = {arm: np.mean([run["test"] for run in some]) for arm, some in arms.items()}
        assert len(scores) > 3 and (
            (text != "wikitext-2" and "llama" in model) or min(scores, key=scores.get) == counts
        )


@pytest.mark.parametrize("model", ["gpt2-0.1M", "llama-0.1M"])
def test_models_to_calibrate_are_better_than_trigrams_of_what_they_read(model):
    arms = by_arm(cells("calibrate", "full"), {"model": model, "trained": "nothing", "steps": 0})
    scores = {arm: [run["score"] for run in arms[arm]] for arm in ("plain", "byte trigrams")}
    assert all(plain < counted - 0.1 for plain, counted in zip(*scores.values(), strict=True))


AT_EDGES = re.compile(r"calibrate/full|synthetic")
KNOWN_EDGES = {"regular-languages/full": 4}  # learned at every rate
RESULTS = sorted(f"{path.parent.name}/{path.name}" for path in (ROOT / FOLDER).glob("*/*"))


@pytest.mark.parametrize("result", [name for name in RESULTS if not AT_EDGES.match(name)])
def test_no_learning_rate_is_chosen_at_an_edge(result):
    experiment, folder = find_experiment(result.partition("/")[0]), ROOT / FOLDER / result
    covered = json.loads((folder / "configuration.json").read_text(encoding="utf-8"))
    runs = [run for run in read_runs(folder).values() if run.settings in covered["cells"]]
    at_an_edge, chosen = experiment.edges(runs)
    assert at_an_edge == KNOWN_EDGES.get(result, 0) < chosen
    rate = next(filter(None, (run.settings["learning_rate"] for run in runs)))
    alone = [run for run in runs if run.settings["learning_rate"] == rate]
    assert experiment.edges(alone)[0] > 0  # with one rate tried it is at an edge


def test_writing_again_changes_nothing_but_a_wrong_table(tmp_path, monkeypatch):
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    readme = tmp_path / "README.md"
    readme.write_text(f"# A\n\n{BEGIN}\n| 1.000 |\n{END}\n\nB\n", encoding="utf-8")
    write_evidence(tmp_path)
    assert readme.read_text(encoding="utf-8") == f"# A\n\n{BEGIN}\n{TABLE}\n{END}\n\nB\n"
    assert (tmp_path / evidence.FIGURE).read_bytes().startswith(b"\x89PNG")
    assert make_table(ENTRIES) == TABLE
