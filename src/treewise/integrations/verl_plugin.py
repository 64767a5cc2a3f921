"""The entry point of treewise in verl's group `verl.plugins`: makes the modes of `verl_trainer` known to verl.

verl loads plugins in each process that imports it, one after the other, and another may be there to register a
platform, which verl's trainer asks for when it is imported. So nothing of verl is imported here: the modes are
registered when the process has imported that trainer.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRAINERS = "verl.trainer.ppo.v1"


class _AfterImport(MetaPathFinder):
    """Finds verl's trainers as Python does, and registers the modes once they are imported."""

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        if fullname != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from treewise.integrations.verl_trainer import register

    register()


if TRAINERS in sys.modules:
    _register()
elif not any(isinstance(each, _AfterImport) for each in sys.meta_path):
    sys.meta_path.insert(0, _AfterImport())
