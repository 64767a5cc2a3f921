"""treewise: train language models on trees of tokens, with exactly the gradients of training each trajectory alone.

The imports of `__init__.pyi` are the one list of public names, which type checkers and editors read, too. Names of
packages that need NumPy only are imported at once; others when they are first used, because these need torch.
"""

import ast
import pkgutil
from importlib import import_module
from typing import Any

from treewise import advantages, errors, planning, tree  # noqa: F401

__version__ = "0.1.0"


def _modules() -> dict[str, str]:
    """The module of each public name."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULE_OF = _modules()
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'treewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
