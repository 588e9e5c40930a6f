"""Repairs of Triton's interpreter, which runs kernels on a machine without a GPU (TRITON_INTERPRET=1).

Only tests and `bench_gpu.py --dry` interpret kernels. The interpreter of Triton 3.6 to 3.9

* keeps scalars as arrays of one element, of which NumPy makes no `int` since 2.4;
* keeps bfloat16 as whole numbers, and multiplies those in matrix products;
* keeps a comparison that is repeated to a block as 32-bit numbers, which its loads refuse as a mask since 3.9;
* patches the whole language anew at every call of a helper function, which takes most of the time;
* computes every sum and product of whole numbers again in 64 bits, to find overflow, which takes a third of the rest.
"""

import dataclasses
import functools
from typing import Any

import triton


@functools.cache
def repair_interpreter() -> None:
    """Repair Triton's interpreter; does nothing if kernels are compiled."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    _count_with_numpy(interpreter)
    _multiply_bfloat16(interpreter)
    _repeat_booleans(interpreter)
    _patch_once(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _count_with_numpy(interpreter: Any) -> None:
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _multiply_bfloat16(interpreter: Any) -> None:
    original = interpreter.InterpreterBuilder.create_dot
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
        return original(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _repeat_booleans(interpreter: Any) -> None:
    original = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, x: Any) -> Any:
        return interpreter.TensorHandle(original(self, kind, x).data.astype(x.data.dtype), x.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _patch_once(interpreter: Any) -> None:
    """Patch the language once per launch for each module that defines helpers."""
    original_patch, original_launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: dict[str, Any] = {}

    def patch_lang(function: Any) -> Any:
        if function.__module__ not in patched:
            patched[function.__module__] = original_patch(function)
            return patched[function.__module__]
        return interpreter._LangPatchScope()

    def launch(self: Any, *args: Any, **keywords: Any) -> Any:
        patched.clear()
        return original_launch(self, *args, **keywords)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch
