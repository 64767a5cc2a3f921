"""treewise: train language models on trees of tokens, with exactly the gradients of training each trajectory alone.

`__init__.pyi` is the one list of public names, which type checkers, editors and `lazy_loader` read: each is imported
when it is first used, so that `import treewise` loads neither NumPy nor torch.
"""

import lazy_loader

__version__ = "0.1.0"

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """A public name. Exceptions stand in `treewise.errors`; code from before 0.1.0 finds them here, too."""
    if name.endswith("Error"):
        from treewise import errors

        return getattr(errors, name)
    return _public(name)
