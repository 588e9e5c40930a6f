"""Convert a Transformer-XL checkpoint to a folder that AutoModelForCausalLM loads.

    python scripts/convert_transformer_xl.py checkpoint_best.pt outputs/xl

Without --config the file has to contain the architecture, as NVIDIA's do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rsa_hf.models.transformer_xl import TransformerXLConfig
from rsa_hf.models.transformer_xl.convert_transformer_xl_checkpoint import convert_checkpoint

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a .pt file of NVIDIA's or the original Transformer-XL")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--config", type=Path, help="a config.json, for a file without the architecture")
    given = parser.parse_args()
    # Not from_pretrained, which takes a config without `zero_memory` for one of transformers 4.
    fields = None if given.config is None else json.loads(given.config.read_text(encoding="utf-8"))
    model = convert_checkpoint(given.source, given.output, None if fields is None else TransformerXLConfig(**fields))
    print(f"written: {given.output} ({model.num_parameters():,} parameters)")
