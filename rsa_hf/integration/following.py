"""Hooks into a module that takes long to import and may never be: they follow its import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["follow"]


def follow(name: str, install: Callable[[], None]) -> None:
    """Call `install` now if the module is imported already, else as soon as it is.

    Args:
        name: of the module, in full.
        install: puts hooks in place. Whoever imports the module may want nothing of them, so it should not raise.
    """
    if name in sys.modules:
        install()
    elif not any(isinstance(finder, _Follower) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Follower(name, install))  # two of a name would ask each other, without end


class _Follower(MetaPathFinder):
    """Finds a module as the other finders do, and installs the hooks once it is executed."""

    def __init__(self, name: str, install: Callable[[], None]) -> None:
        self.name, self.install = name, install

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`; also called by those who only ask whether the module is there."""
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
