"""Change the files of a checkpoint or an adapter."""

import json

from safetensors.torch import load_file, save_file


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
