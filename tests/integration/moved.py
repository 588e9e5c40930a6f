"""Import rsa_hf beside a changed transformers or peft. test_hooks.py runs this in a process of its own.

    python moved.py '{"renamed": "post_init", "other": null, "peft": false}'
    python moved.py '{"renamed": null, "other": ["transformers.modeling_utils", "PreTrainedModel", "post_init"], …}'

`renamed` is a name to replace in the whole source of the libraries, so that they still work themselves. `other` is a
function, as module, class (or "") and name, that gets other parameters and does the same. Without either, rsa_hf is
not imported.

It imports rsa_hf, uses its public names, and runs plain models. It prints a line of JSON: the messages, the attributes
of the libraries that were replaced, and a digest of the plain models' outputs.
"""

import hashlib
import importlib
import importlib.machinery
import inspect
import json
import logging
import re
import sys
import tempfile
import warnings
from contextlib import suppress
from importlib.metadata import version

SUFFIX = "_of_another_version"
MOVABLE = ("transformers", "peft")


class RenamingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with a name replaced in its source."""

    renamed_name: str

    def get_code(self, fullname):
        source = self.get_source(fullname)
        changed = re.sub(rf"\b{self.renamed_name}\b", f"{self.renamed_name}{SUFFIX}", source)
        return super().get_code(fullname) if changed == source else compile(changed, self.path, "exec")


class RenamingFinder(importlib.machinery.PathFinder):
    renamed_name: str

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.split(".")[0] not in MOVABLE:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = RenamingLoader(spec.loader.name, spec.loader.path)
            spec.loader.renamed_name = cls.renamed_name
        return spec


def rename(name):
    RenamingFinder.renamed_name = name
    sys.meta_path.insert(0, RenamingFinder)


def find(module, name):
    holder = importlib.import_module(module)
    return getattr(holder, name) if name else holder


def give_other_parameters(owner, name):
    static = inspect.getattr_static(owner, name)
    original = getattr(static, "__func__", static)

    def moved(*everything, **by_name):
        return original(*everything, **by_name)

    kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
    setattr(owner, name, kind(moved) if kind else moved)


def library_contents():
    """The attributes of all classes, and the callables of all modules of the libraries, by owner and name."""
    modules = [module for key, module in list(sys.modules.items()) if key.split(".")[0] in MOVABLE]
    known = [(module, name, value) for module in modules for name, value in list(vars(module).items())]
    classes = {value for _, _, value in known if inspect.isclass(value) and value.__module__.split(".")[0] in MOVABLE}
    found = {(module.__name__, name): value for module, name, value in known if callable(value)}
    places = [(cls, f"{cls.__module__}.{cls.__qualname__}") for cls in classes]
    return found | {(place, name): value for cls, place in places for name, value in list(vars(cls).items())}


def plain_digest(renamed, with_peft):
    """Digest the outputs of a plain model: saved and loaded, generating, trained, and with LoRA."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    def call(owner, name, *arguments):
        return getattr(owner, name + SUFFIX if name == renamed else name)(*arguments)

    found = hashlib.sha256()
    torch.manual_seed(0)
    ids = torch.arange(24).reshape(2, 12)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, pad_token_id=0)).eval()

    def add(tensor):
        found.update(tensor.detach().numpy().tobytes())

    with tempfile.TemporaryDirectory() as folder:
        call(model, "save_pretrained", folder)
        model = call(AutoModelForCausalLM, "from_pretrained", folder)
    add(model.generate(ids, max_new_tokens=5, do_sample=False))
    if with_peft:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM")).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    add(model(input_ids=ids).logits)
    return found.hexdigest()


def messages(names):
    """Import rsa_hf, look up its public names, and return the warnings and the error."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rsa_hf").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        importlib.import_module("rsa_hf")  # may warn, but must not raise
    said += [str(warning.message) for warning in warned if "rsa_hf" in str(warning.message)]
    if not said:
        raise SystemExit("rsa_hf was imported without a warning")
    try:
        for module, name in names:
            getattr(importlib.import_module(module), name)
    except ImportError as error:
        said.append(str(error))
    return said


def main(renamed, other, with_peft):
    if renamed:
        rename(renamed)
    import transformers
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401
    from transformers.generation.continuous_batching import continuous_api  # noqa: F401

    assert transformers.__version__ == version("transformers")
    with suppress(ImportError):  # without PreTrainedModel neither can be imported, and rsa_hf stops before
        import peft.utils.hotswap  # noqa: F401
        from transformers import Trainer  # noqa: F401

    if other:
        give_other_parameters(find(*other[:2]), other[2])
    if not (renamed or other):
        print(json.dumps({"said": [], "plain": plain_digest(None, with_peft)}))
        return
    before = library_contents()
    said = messages([("rsa_hf", "patch_model"), *([("rsa_hf.peft", "load")] if with_peft else [])])
    after = library_contents()
    touched = [f"{owner}.{name}" for (owner, name), value in before.items() if after[owner, name] is not value]
    print(json.dumps({"said": said, "touched": sorted(touched), "plain": plain_digest(renamed, with_peft)}))


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    main(case["renamed"], case["other"], case["peft"])
