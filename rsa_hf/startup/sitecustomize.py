"""Install rsa_hf's hooks as Python starts, in the programs that `rsa-hf run` runs and in their child processes.

Python imports the first module of this name on its path before any other code (see `site`). `rsa_hf.run` puts the
folder of this file first in PYTHONPATH, which child processes inherit.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

# This module hides any other sitecustomize of the environment (coverage's, a distribution's): run that too.
_here = os.path.dirname(os.path.abspath(__file__))
_spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

if importlib.util.find_spec("rsa_hf") is None:
    print(
        f"rsa-hf run: rsa_hf is not installed for {sys.executable}, which cannot load its checkpoints.",
        file=sys.stderr,
    )
else:
    import rsa_hf  # noqa: F401
