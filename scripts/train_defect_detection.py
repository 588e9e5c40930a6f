"""Train a defect detector, patched with RSA heads or plain.

    accelerate launch scripts/train_defect_detection.py configs/defect_minilm_embedded.yaml [--key value …]

`--help` lists the keys, the YAML files in configs/ explain them.
"""

import sys

from rsa_hf.tasks.train_defect_detection import main
from rsa_hf.training.run import script_errors

if __name__ == "__main__":
    with script_errors():
        main(sys.argv[1:])
