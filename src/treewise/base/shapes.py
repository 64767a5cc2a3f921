"""Shapes in annotations: `Float[Tensor, "T M"]` is a floating tensor of T rows and M columns.

The tests check them at every call (jaxtyping and beartype, by an import hook in tests/conftest.py): letters that stand
in several annotations of one function mean one size. Elsewhere nothing is imported and nothing checked: the
annotations are then the plain array types. A single letter has a space before it, `Float[Tensor, " T"]`, because type
checkers take a lone word in quotes for the name of a class. `Context` is the type of `ctx` in autograd functions.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    class Context(FunctionCtx):
        """Of a `torch.autograd.Function`: what its forward keeps there for its backward."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
    from typing import Annotated as Shaped
elif "jaxtyping" in sys.modules:  # imported first by who wants the checks
    from jaxtyping import Bool, Float, Int, Shaped
else:

    class _ArrayType:
        """`_ArrayType[Tensor, "T M"]` is Tensor."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    Bool = Float = Int = Shaped = _ArrayType
if not TYPE_CHECKING:
    Context = object

__all__ = ["Bool", "Context", "Float", "Int", "Shaped"]
