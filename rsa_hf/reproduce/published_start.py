"""Where ν and θ start in the paper: experiments on its tables keep to it, and the default is compared with it."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["PUBLISHED_START"]

# Section 3; fields of `RSAConfig`.
PUBLISHED_START: dict[str, Any] = {"nu_init": (1.0, 2.0), "theta_init": math.pi / 4}
