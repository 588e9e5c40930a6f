"""Try RSA on a tiny random model of every type in transformers' text mappings, and write down what works.

    python scripts/survey_architectures.py                       # all types: goes on where an earlier run stopped
    python scripts/survey_architectures.py --only gpt2 roberta   # these again, whatever is known of them
    python scripts/survey_architectures.py --minutes 3           # as many as fit; run it again for more

Every type in transformers' causal-LM, masked-LM, sequence-classification and seq2seq mappings is built with random
weights and put through the checks of tests/survey/checks.py. What is found of a type is kept in
results/architectures.json as soon as it is known, and thrown away once torch, transformers or rsa_hf has another
version or --fresh is given. Once all types are known SUPPORTED.md is written.
"""

import argparse
import os
import sys
from pathlib import Path

# On some processors MKL's last bit depends on where a tensor lies in memory, and checks compare bit for bit.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the checks are those of the tests

from survey.runner import survey  # noqa: E402
from survey.table import Records, write_table  # noqa: E402
from survey.tiny_models import model_types  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", choices=model_types(), help="try these types, anew")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no new type after this time")
    parser.add_argument("--seconds-per-type", type=float, default=60, help="a type that takes longer is given up")
    parser.add_argument("--jobs", type=int, default=1, help="types tried at the same time")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "architectures.json")
    parser.add_argument("--table", type=Path, default=ROOT / "SUPPORTED.md")
    arguments = parser.parse_args()

    records = Records(arguments.results, fresh=arguments.fresh)
    wanted = arguments.only or [name for name in model_types() if name not in records]
    for name, record in survey(wanted, arguments.jobs, arguments.seconds_per_type, arguments.minutes * 60):
        records[name] = record
        print(f"{name}: {', '.join(task + ' ' + found['outcome'] for task, found in record.items())}", flush=True)
    missing = [name for name in model_types() if name not in records]
    if missing:
        print(f"{len(missing)} of {len(model_types())} types are left; run this again.")
        return
    print(write_table(records, arguments.table))


if __name__ == "__main__":
    main()
