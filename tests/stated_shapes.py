"""Shapes are checked where a function states them, and no other function is wrapped.

jaxtyping wraps every function of a package: each call binds its arguments and keeps a table of sizes. That was a third
of the time of tests that train, whose calls mostly go to functions without shapes.
"""

from typing import Any

from treewise.testing import shape_checks


def check_stated_shapes(*packages: str) -> None:
    """Before these are imported. Without jaxtyping nothing is checked."""
    if not shape_checks.install(*packages):
        return
    import jaxtyping

    whole = jaxtyping.jaxtyped

    def jaxtyped(*functions: Any, **settings: Any) -> Any:
        """In place of the decorator that the hook writes above every function and class."""
        if functions:
            return whole(*functions, **settings)
        return lambda each: whole(each, **settings) if states_shapes(each) else each

    jaxtyping.jaxtyped = jaxtyped


def states_shapes(function: Any) -> bool:
    """Of a dataclass: what it is made from."""
    made_by = function.__init__ if isinstance(function, type) else function
    return any(shape_checks._has_shape(each) for each in getattr(made_by, "__annotations__", {}).values())
