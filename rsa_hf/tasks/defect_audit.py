"""What can make the scores of a defect detector misleading: copies, contradictory labels, cut functions, easy words.

Copies are counted in two ways: `duplicates` are equal up to the length of whitespace; `clones` up to whitespace,
comments and identifiers.
"""

import keyword
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from rsa_hf.tasks.defect_data import conflicting, digest_of, identity, subsample
from rsa_hf.tasks.defect_scores import classification_scores
from rsa_hf.tasks.python_defects import Example
from rsa_hf.utils.text import format_table, percent

# Keywords of C, C++ and Java. Words that are neither these nor Python's keywords are identifiers.
_OTHER_KEYWORDS = (
    "auto bool case catch char const default delete do double enum extern float goto inline int long namespace new "
    "NULL nullptr operator private protected public register restrict short signed sizeof static struct switch "
    "template this throw typedef typename union unsigned using virtual void volatile true false self"
)
_KEYWORDS = frozenset([*keyword.kwlist, *_OTHER_KEYWORDS.split()])
# What is kept (strings and numbers), dropped (comments) and read (words).
_KEPT = r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\b[0-9][\w.]*)"""
_PIECES = re.compile(_KEPT + r"|/\*.*?\*/|//[^\n]*|([A-Za-z_]\w*)", re.DOTALL)
_PYTHON_PIECES = re.compile(_KEPT + r"|#[^\n]*|([A-Za-z_]\w*)")
_PYTHON = re.compile(r"^[ \t]*(?:(?:async +)?def +\w+ *\(|class +\w+ *(?:\(.*\))?:[ \t]*(?:#.*)?$)", re.MULTILINE)
_TOKENS = r"\w+|[^\w\s]"  # tokens of the baseline: words, numbers and signs
BASELINE_FUNCTIONS = 20_000  # the baseline is fitted to at most this many


def audit(
    splits: Mapping[str, Sequence[Example]], tokens: Mapping[str, Sequence[int]] | None = None, max_length: int = 0
) -> dict[str, Any]:
    """Count what can make scores misleading.

    Args:
        splits: the functions of each split, none empty.
        tokens: the number of tokens of each function, uncut, by split; None or empty: not known.
        max_length: number of tokens that the model sees; the rest is cut off.

    Returns:
        Numbers for `json.dump`. For each split, in "splits": `examples`, `positives`, `positive_share`, `duplicates`
        and `clones` of an earlier function of the split, `conflicting_labels` (distinct functions with both labels),
        and with `tokens` the shares `functions_cut` and `tokens_cut`. Over all splits: `conflicting_labels`, and for
        each pair of splits `cross_split_duplicates`, `cross_split_clones` and `cross_split_projects`.
    """
    texts = {split: {identity(example) for example in examples} for split, examples in splits.items()}
    clones = {split: {clone_group(example.func) for example in examples} for split, examples in splits.items()}
    projects = {split: {e.project for e in examples if e.project} for split, examples in splits.items()}
    statistics = {}
    for split, examples in splits.items():
        size, positives = len(examples), sum(example.target for example in examples)
        statistics[split] = {
            "examples": size,
            "positives": positives,
            "positive_share": positives / size,
            "duplicates": size - len(texts[split]),
            "clones": size - len(clones[split]),
            "conflicting_labels": len(conflicting(examples)),
        }
        if counts := tokens and tokens[split]:
            statistics[split] |= {
                "functions_cut": sum(count > max_length for count in counts) / size,
                "tokens_cut": sum(max(0, count - max_length) for count in counts) / sum(counts),
            }

    def shared(sets: Mapping[str, set[Any]]) -> dict[str, int]:
        return {f"{a}/{b}": len(sets[a] & sets[b]) for a, b in combinations(sets, 2)}

    return {
        **({"max_length": max_length} if tokens and any(tokens.values()) else {}),
        "splits": statistics,
        "conflicting_labels": len(conflicting(e for examples in splits.values() for e in examples)),
        "cross_split_duplicates": shared(texts),
        "cross_split_clones": shared(clones),
        "cross_split_projects": shared(projects),
    }


def clone_group(func: str) -> bytes:
    """A digest that functions share if they are equal up to whitespace, comments and identifiers."""
    pieces = _PYTHON_PIECES if _PYTHON.search(func) else _PIECES

    def read(piece: re.Match[str]) -> str:
        kept, word = piece.groups()
        return kept or (word if word in _KEYWORDS else "x" if word else "")

    return digest_of("".join(pieces.sub(read, func).split()))


def format_audit(report: Mapping[str, Any]) -> str:
    """The result of `audit` in lines for the terminal, with one row for each split.

    Its entries "split_by" and "word_counts" are shown if present: how splits were made, and the scores of
    `word_count_baseline`.
    """
    cut = [f"longer than {report['max_length']} tokens", "tokens cut"] if "max_length" in report else []
    rows = [["split", "functions", "defective", "share", "duplicates", "clones", "both labels", *cut]]
    for split, numbers in report["splits"].items():
        cells = (percent(value) if isinstance(value, float) else f"{value:,}" for value in numbers.values())
        rows.append([split, *cells])
    lines = [format_table(rows)]
    for name in ("duplicates", "clones", "projects"):
        counts = report[f"cross_split_{name}"]
        if counts:
            lines.append(f"{name} in two splits: " + ", ".join(f"{pair} {count:,}" for pair, count in counts.items()))
    lines.append(f"functions with both labels, over all splits: {report['conflicting_labels']:,}")
    if report.get("split_by"):
        lines.append(f"splits that were not given were made by {report['split_by']}")
    for split, scores in report.get("word_counts", {}).items():
        shown = ("accuracy", "f1", "mcc", "average_precision", "vd_score", "majority_accuracy")
        figures = ", ".join(f"{name} {percent(scores[name])}" for name in shown)
        lines.append(f"counts of words on {split}: {figures}")
    return "\n".join(lines)


def word_count_baseline(splits: Mapping[str, Sequence[Example]]) -> dict[str, dict[str, float]]:
    """The `classification_scores` of a detector that counts words, and pairs of them, on each split but "train".

    Logistic regression on TF-IDF weights of tokens (words, numbers and signs), fitted to at most 20,000 training
    functions. A model that does not score higher may have learned nothing else.
    """
    train = subsample(list(splits["train"]), BASELINE_FUNCTIONS, seed=0)
    counts = TfidfVectorizer(token_pattern=_TOKENS, lowercase=False, ngram_range=(1, 2), sublinear_tf=True)
    detector = make_pipeline(counts, LogisticRegression(max_iter=1000))
    detector.fit([example.func for example in train], [example.target for example in train])
    scores = {}
    for split in (split for split in splits if split != "train"):
        odds = detector.decision_function([example.func for example in splits[split]])
        targets = [example.target for example in splits[split]]
        scores[split] = classification_scores((odds > 0).astype(int), targets, odds)
    return scores
