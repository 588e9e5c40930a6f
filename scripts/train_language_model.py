"""Train a causal language model, patched with RSA heads or plain, on one or several processes.

    accelerate launch scripts/train_language_model.py configs/lm_bytes_embedded.yaml [--key value ...]

It is `rsa-hf train lm`; `--help` lists the keys.
"""

import sys

from rsa_hf.cli import main

if __name__ == "__main__":
    main(["train", "lm", *sys.argv[1:]])
