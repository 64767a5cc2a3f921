"""Shapes of tensors, checked at every call of a function that states them (jaxtyping and beartype).

    from treewise.testing.shape_checks import install
    install("treewise.nn", "my_package")        # before these are imported

Only annotations with shapes are checked, `Float[Tensor, "T M"]` of `treewise.base.shapes`; types of other arguments are
the business of a type checker.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar, get_args

from treewise.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def install(*packages: str) -> bool:
    """Checks the shapes in packages that are imported from now on; returns False where the tools are not installed.

    Raises:
        ConfigError: a package that is already imported, whose functions would not be checked.
    """
    if not find_spec("jaxtyping") or not find_spec("beartype"):
        return False
    imported = [name for name in packages if name in sys.modules]
    if imported:
        raise ConfigError(f"{', '.join(imported)} is already imported; check shapes before the first import.")
    from jaxtyping import install_import_hook

    install_import_hook(list(packages), "treewise.testing.shape_checks.check_shapes")
    return True


def check_shapes(function: _Function) -> _Function:
    """The function with its shapes checked; itself where it states none. The import hook calls it on every function."""
    annotations = getattr(function, "__annotations__", {})
    with_shapes = {name: each for name, each in annotations.items() if _has_shape(each)}
    if not with_shapes:
        return function
    from beartype import beartype

    function.__annotations__ = with_shapes
    checked: _Function = beartype(function)
    checked.__annotations__ = annotations
    return checked


def _has_shape(annotation: object) -> bool:
    return hasattr(annotation, "array_type") or any(_has_shape(each) for each in get_args(annotation))
