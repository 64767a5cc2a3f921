"""Data: files, chat templates and records, turned into the trajectories and trees that are trained.

Nothing here depends on models; tokenizers are transformers' own, loaded when a record holds text, and torch is
imported only to open a dump that `torch.save` wrote. `__init__.pyi` lists the names; each is imported when it is first
used, so that trees which are there already load none of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
