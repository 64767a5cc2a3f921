"""Attention on trees: one function registered with transformers, behind it a table of implementations.

`__init__.pyi` lists the names; each is imported when it is first used, so that the table's names load no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
