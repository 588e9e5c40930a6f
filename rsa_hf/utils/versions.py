"""Names that differ between the supported versions of transformers."""

import transformers
from packaging.version import Version

# The argument and the output of a model that hold its keys and values.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
