"""Run a function right after a module is first imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def run_after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` now if the module ``name`` is loaded, otherwise right after its first import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Find one module through the other finders, and run an action after its loader."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self.action()

        spec.loader.exec_module = load_and_act  # each module has a loader of its own
        return spec
