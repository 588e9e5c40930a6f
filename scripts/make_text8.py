"""Make text8 of a Wikipedia dump: of enwik9 the data set of that name.

    python scripts/make_text8.py enwik9 data/text8.txt

Reads the whole dump into memory.
"""

import argparse
from pathlib import Path

from rsa_hf.tasks.text8 import clean_text8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="the XML of pages, from its beginning")
    parser.add_argument("text", type=Path, help="the file to write; its name ends in .txt, as configs want it")
    parser.add_argument("--characters", type=int, default=100_000_000, help="at most so many (default: 10⁸)")
    arguments = parser.parse_args()
    text = clean_text8(arguments.dump.read_bytes())[: arguments.characters]
    arguments.text.parent.mkdir(parents=True, exist_ok=True)
    arguments.text.write_bytes(text)
    print(f"written: {arguments.text}, {len(text):,} characters")


if __name__ == "__main__":
    main()
