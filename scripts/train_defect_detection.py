"""Train a defect detector, patched with RSA heads or plain, on one or several processes.

    accelerate launch scripts/train_defect_detection.py configs/defect_minilm_embedded.yaml [--key value ...]

It is `rsa-hf train defect`; `--help` lists the keys.
"""

import sys

from rsa_hf.cli import main

if __name__ == "__main__":
    main(["train", "defect", *sys.argv[1:]])
