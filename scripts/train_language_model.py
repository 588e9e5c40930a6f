"""Train a causal language model, patched with RSA heads or plain.

    accelerate launch scripts/train_language_model.py configs/lm_bytes_embedded.yaml [--key value …]

`--help` lists the keys, the YAML files in configs/ explain them.
"""

import sys

from rsa_hf.tasks.train_language_model import main
from rsa_hf.training.run import script_errors

if __name__ == "__main__":
    with script_errors():
        main(sys.argv[1:])
