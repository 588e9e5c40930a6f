#!/usr/bin/env bash
# Install a wheel into a bare environment, and try what needs no optional package: scripts/try_wheel.sh PYTHON WHEEL
set -euo pipefail
python=$1
wheel=$(realpath "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
"$bin/pip" install --quiet torch==2.13.0
"$bin/pip" install --quiet "$wheel"
cd "$folder"
"$bin/rsa-hf" --help > /dev/null
"$bin/rsa-hf" doctor
"$bin/python" - <<'PYTHON'
import importlib.metadata

import torch
from transformers import AutoModel, BertConfig, BertModel

import rsa_hf
from rsa_hf import RSAConfig, patch_model

assert importlib.metadata.version("rsa_hf") == rsa_hf.__version__
model = patch_model(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)), RSAConfig()).eval()
model.save_pretrained("saved")
tokens = torch.arange(12)[None]
same = AutoModel.from_pretrained("saved").eval()
assert torch.equal(model(tokens).last_hidden_state, same(tokens).last_hidden_state)
print("patched, saved and loaded with rsa_hf", rsa_hf.__version__)
PYTHON

# A command whose packages are missing names the extra.
names_extra() {
  local message
  if message=$("$bin/rsa-hf" "${@:2}" 2>&1); then echo "rsa-hf ${*:2} works without the extra $1" && exit 1; fi
  grep -qF "rsa_hf[$1]" <<< "$message" || { echo "$message" && exit 1; }
}
names_extra plot inspect saved --plot a.png
