"""The checks of `rsa-hf doctor --model`: what RSA promises, tried on a user's own model, one check a file.

Each check takes a `Subject` and gives findings. Bits are compared in the model's own dtype; the rest is compared in
float32, and a gap counts as a share of what open gates change: a check that passed where RSA does nothing would prove
nothing. What the plain model itself does not hold is a note, and no failure of RSA.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from rsa_hf.cli.doctor_model.cache import check_cache
from rsa_hf.cli.doctor_model.causality import check_causality
from rsa_hf.cli.doctor_model.effect import check_effect
from rsa_hf.cli.doctor_model.identity import check_identity
from rsa_hf.cli.doctor_model.padding import check_padding
from rsa_hf.cli.doctor_model.reload import check_reload
from rsa_hf.cli.doctor_model.subject import examined
from rsa_hf.cli.findings import Finding, guarded

__all__ = ["examine"]


def examine(model: PreTrainedModel) -> Iterator[Finding]:
    """Try a model, patched or not; one without RSA heads gets some for as long as it takes.

    Args:
        model: as loaded. Afterwards it is as it was, but for its dtype, which is float32.

    Raises:
        ValueError: the model does not take text.
    """
    with examined(model) as subject:
        yield from guarded("identity", lambda: check_identity(subject))
        yield from guarded("reload", lambda: check_reload(subject))
        if not getattr(model, "is_quantized", False):
            model.float()
        yield from guarded("effect", lambda: check_effect(subject))
        yield from guarded("causality", lambda: check_causality(subject))
        yield from guarded("cache", lambda: check_cache(subject))
        yield from guarded("padding", lambda: check_padding(subject))
