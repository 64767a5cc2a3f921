"""The online loop: choose tasks, sample trees, reward, credit, train.

Both names are imported when they are first used: reports read what a run logged without its trainer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewise.rl.online.settings import OnlineSettings
    from treewise.rl.online.trainer import OnlineTrainer

__all__ = ["OnlineSettings", "OnlineTrainer"]
_MODULES = {"OnlineSettings": "settings", "OnlineTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
