"""The Triton kernels with extreme numbers, as the other paths, but with the rounding of 16-bit weights."""

import pytest
import torch
from hypothesis import Phase, given, settings

from ops import kernels_under_test
from reliability.extremes import assert_right, differentiated, problems
from reliability.record import Part, is_full, note

EXAMPLES = 20 if is_full() else 4
small_chunks = kernels_under_test.small_chunks
MASKS = ("none", "padding", "all padding", "single tokens", "documents", "poison")


@pytest.mark.usefixtures("small_chunks")
def test_the_kernels_are_right():
    tried = {"right": 0}

    @settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate))
    @given(problem=problems(dtypes=(torch.float32, torch.bfloat16, torch.float16), masks=MASKS, batches=(0, 1)))
    def test(problem):
        # For 16-bit values a weight is the sum of two 16-bit numbers. float16 has none below 2^-24.
        half = problem.value.dtype != torch.float32
        assert_right(problem, differentiated(problem), roundings=1024 if half else 64, floor=2.0**-23 if half else 0)
        tried["right"] += 1

    test()
    note(Part.NUMBERS, "P V of the same extremes by the Triton kernels", tried)
