"""Defect detection with code encoders that were pretrained here (`code_encoder.py`): RSA heads, none, and rivals.

* `plain`, `short convolution`, `two free lags`: encoders that had these heads from the first step of pretraining.
* `calibrated`: the plain encoder with the heads that `calibrate` chooses on the training functions.
* `all heads scaled`: the plain encoder with a learned factor on each head.
* `lora`, `lora, two free lags`: LoRA of rank 8 on the first and the third encoder.
* `word counts`: no encoder, but logistic regression on counts of words, as in `rsa-hf audit`.

Encoders and fine-tuning have the same seeds. The state with the best average precision on validation is tested.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import peft
import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import DataCollatorWithPadding, RobertaForSequenceClassification

import rsa_hf.peft
from experiments import code_encoder
from experiments.calibrate.arms import ALL_SCALED, CALIBRATED
from experiments.calibrate.arms import make_variant as make_calibrated
from experiments.corpora import encode, read_devign, sample
from experiments.runner.comparison import Case, Comparison, all_measured, compare_variants, difference
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import BestWeights, adamw_linear_decay, batch_loss, default_device, evaluation_steps, fit
from experiments.runner.summary import Settings, Values
from experiments.variants import CONVOLUTION, DEFAULT, make_variant
from rsa_hf import RSAConfig
from rsa_hf.calibration import run_calibration
from rsa_hf.tasks.defect_audit import word_count_baseline
from rsa_hf.tasks.defect_scores import compute_metrics, pair_rates_of
from rsa_hf.tasks.python_defects import Example, load_python_defects

PLAIN, LORA, LORA_WITH_RSA, WORDS = "plain", "lora", f"lora; {DEFAULT}", "word counts"
ENCODED = (PLAIN, CONVOLUTION, DEFAULT, CALIBRATED, ALL_SCALED, LORA, LORA_WITH_RSA)
ARMS = (*ENCODED, WORDS)
ENCODERS = {CONVOLUTION: CONVOLUTION, DEFAULT: DEFAULT, LORA_WITH_RSA: DEFAULT}  # of the others: plain
DEVIGN, PAIRS = "devign", "python pairs"
# Plan of the encoder, data, share of the training functions, epochs.
LARGER = [(DEVIGN, 0.01, 10), (DEVIGN, 0.1, 4), (DEVIGN, 1.0, 2), (PAIRS, 1.0, 4)]
CASES: dict[Size, list[tuple[str, str, float, int]]] = {
    "toy": [("toy", DEVIGN, 0.002, 1)],
    "quick": [("quick", DEVIGN, 0.01, 4), ("quick", PAIRS, 0.1, 2)],
    "full": [(plan, *case) for plan in ("small", "full") for case in LARGER],
}
GROUP = ("encoder", "task", "share", "epochs")
SCORED: dict[Size, int] = {"toy": 20, "quick": 400, "full": 10**9}  # validation functions, and test functions
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCH, EVALUATIONS, CALIBRATION_ROWS = 32, 4, 256
SCORES = ("accuracy", "f1", "mcc", "average_precision", "vd_score", "pair_correct")
VALIDATION, OVER_PLAIN, MCNEMAR = "validation", "average precision − plain", "McNemar's p"


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Cases × variants × learning rates × seeds."""
    return [
        {**dict(zip(GROUP, case, strict=True)), "scored": SCORED[size], **each}
        for case in CASES[size]
        for arm in ARMS
        for each in combinations(arm=[arm], learning_rate=[0.0] if arm == WORDS else RATES, seed=range(seeds))
    ]


def read_functions(settings: Settings) -> dict[str, Sequence[Example]]:
    """The functions of each split: a share of those to train on, by the seed."""
    splits = dict(read_devign() if settings["task"] == DEVIGN else load_python_defects())
    for split in ("validation", "test"):
        splits[split] = splits[split][: settings["scored"] // 2 * 2]  # whole pairs
    train = splits["train"]
    return {**splits, "train": sample(train, round(settings["share"] * len(train)), settings["seed"])}


def make_classifier(settings: Settings) -> tuple[Any, Any]:
    """A pretrained encoder with a new head for two classes, not yet calibrated or with LoRA; and its tokenizer."""
    arm = ENCODERS.get(settings["arm"], PLAIN)
    # Encoders have two seeds.
    plan = {"arm": arm, "learning_rate": code_encoder.RATE, "seed": settings["seed"] % 2}
    plan |= code_encoder.PLANS[settings["encoder"]]
    encoder, tokenizer, _ = code_encoder.load_encoder(plan)
    torch.manual_seed(settings["seed"])
    plain = RobertaForSequenceClassification(code_encoder.make_config(plan, len(tokenizer)))
    model = make_variant(arm, plain, plan["length"])
    weights = {name: tensor for name, tensor in encoder.state_dict().items() if name.startswith("roberta.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith("classifier.") for name in missing), missing
    return model, tokenizer


def add_arm(model: Any, settings: Settings, rows: Any, collate: Any) -> Any:
    """Turn a classifier with a pretrained encoder into a variant."""
    arm = settings["arm"]
    if arm == CALIBRATED:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings["seed"]))
        some = [rows[i] for i in chosen[:CALIBRATION_ROWS].tolist()]
        batches = [{**collate(some[i : i + 16])} for i in range(0, len(some), 16)]
        found = run_calibration(model, batches, seed=settings["seed"], progress=False)
        return make_calibrated(CALIBRATED, model, found.config)
    if arm == ALL_SCALED:
        return make_calibrated(ALL_SCALED, model, RSAConfig(heads=()))
    if arm == LORA:
        return peft.get_peft_model(model, peft.LoraConfig("SEQ_CLS", r=8, lora_alpha=16))
    if arm == LORA_WITH_RSA:
        return rsa_hf.peft.get_peft_model(model, peft.LoraConfig("SEQ_CLS", r=8, lora_alpha=16))
    return model


def measure(settings: Settings) -> Values:
    """The scores of the test functions, and which of them were told right, in packs of 32."""
    functions, seed = read_functions(settings), settings["seed"]
    if settings["arm"] == WORDS:
        words = word_count_baseline(functions)
        scores = {name: words["test"][name] for name in SCORES if name in words["test"]}
        return {VALIDATION: words["validation"]["average_precision"], **scores}
    with torch.random.fork_rng():
        model, tokenizer = make_classifier(settings)
        length = model.config.max_position_embeddings - 2
        rows = {split: encode(some, tokenizer, length) for split, some in functions.items()}
        labels = {split: [row["labels"] for row in some] for split, some in rows.items()}
        collate = DataCollatorWithPadding(tokenizer)
        model = add_arm(model.to(default_device()), settings, rows["train"], collate).to(default_device())
        steps = max(EVALUATIONS, settings["epochs"] * len(rows["train"]) // BATCH)
        optimizer, schedule = adamw_linear_decay(model, settings["learning_rate"], steps)
        best, marks = BestWeights(model), evaluation_steps(steps, EVALUATIONS)

        def evaluate(step: int, loss: Tensor) -> bool:
            if not math.isfinite(float(loss)):
                return True
            if step in marks:
                logits = predict_logits(model, rows["validation"], collate)
                best.add(-compute_metrics(logits, labels["validation"])["average_precision"])
            return False

        loss = batch_loss(model, rows["train"], min(BATCH, len(rows["train"])), seed, collate)
        fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    lowest = best.restore()
    if math.isnan(lowest):  # diverged
        return {VALIDATION: math.nan, **dict.fromkeys(SCORES, math.nan)}
    logits = predict_logits(model, rows["test"], collate)
    classes = logits.argmax(1).tolist()
    found = compute_metrics(logits, labels["test"]) | pair_rates_of(functions["test"], classes)
    right = [int(a == b) for a, b in zip(classes, labels["test"], strict=True)]
    packed = [float(sum(bit << k for k, bit in enumerate(right[i : i + 32]))) for i in range(0, len(right), 32)]
    return {VALIDATION: -lowest, **{name: found[name] for name in SCORES if name in found}, "right": packed}


@torch.no_grad()
def predict_logits(model: Any, rows: Sequence[Mapping[str, Any]], collate: Callable[[list[Any]], Any]) -> Tensor:
    """The logits of a classifier on the CPU, in the order of the rows."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))  # less padding
    logits = []
    for start in range(0, len(order), 2 * BATCH):
        batch = collate([rows[i] for i in order[start : start + 2 * BATCH]])
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)[torch.tensor(order).argsort()]


# --- results ------------------------------------------------------------------------------------------------------


def _mcnemar(case: Case, arm: str) -> list[float] | None:
    """The p-value of McNemar's exact test of an arm against plain, on the answers of all seeds."""
    if arm == PLAIN or any("right" not in run.values for run in (*case.runs[arm], *case.runs[PLAIN])):
        return None
    gained = lost = 0  # functions that the arm alone tells right, and that plain alone does
    for one, two in zip(case.runs[arm], case.runs[PLAIN], strict=True):
        for a, b in zip(map(int, one.values["right"]), map(int, two.values["right"]), strict=True):
            gained += (a & ~b).bit_count()
            lost += (b & ~a).bit_count()
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return [p] * len(case.runs[arm])  # of all seeds together


COMPARISON = Comparison(
    GROUP,
    (PLAIN, DEFAULT),
    lambda run: -float(run.values[VALIDATION]),
    {
        **all_measured(VALIDATION, *SCORES, "learning_rate"),
        OVER_PLAIN: difference(ARMS[1:], PLAIN, "average_precision", higher_is_better=True),
        MCNEMAR: _mcnemar,
    },
    judged=(OVER_PLAIN,),
    of_arm=DEFAULT,
    higher_is_better=True,
    listed=("average precision", "accuracy", MCNEMAR),
    shown="average precision",
    label="average precision",
)


EXPERIMENT = compare_variants(
    COMPARISON,
    name="defect",
    claim="A code encoder with RSA heads from the first step of pretraining finds defects with a higher average "
    "precision than the same encoder without them.",
    published="Section 4.3 of the paper detects defects in C functions with other models; its figures are not at "
    "hand. CodeBERT is reported at 62.08 % accuracy on all of Devign (CodeXGLUE).",
    remark="The encoders are those of code-encoder, with two seeds of pretraining. Learning rates are chosen by the "
    "average precision on the validation functions. McNemar's test pools the answers of all seeds, which are on the "
    "same functions: its p-values are too small.",
    seeds={"toy": 2, "quick": 4, "full": 10},
    grid=make_grid,
    measure=measure,
    parts=(*GROUP, "arm"),
)
