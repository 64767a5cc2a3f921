"""Functions and classes of the user's by name, `module:name` or `file.py:name`, each file loaded once.

A file is a module under a name of its own, so what it defines can be sent to worker processes, which load it again.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from treewise.errors import ConfigError

_FILES: dict[str, ModuleType] = {}  # by resolved path


def found_by_name(name: str, what: str) -> Any:
    """What a module or a file defines. what: names it in errors, as `reward function`.

    Raises:
        ConfigError: no such module, file or name, or the module cannot be loaded: with the file and line of the error.
    """
    from treewise.rl.tasks.calls import described  # which imports this module

    location, _, attribute = name.rpartition(":")
    if not location or not attribute:
        raise ConfigError(f"{what} {name!r} must be written module:name or file.py:name.")
    is_file = location.endswith(".py")
    if is_file and not Path(location).expanduser().is_file():
        raise ConfigError(f"{what} {name!r}: {location} is not a file.")
    try:
        module = _module_of_file(str(Path(location).expanduser().resolve())) if is_file else _module(location)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module of the user's may raise anything, SystemExit included
        raise ConfigError(f"{what} {name!r} cannot be loaded: {described(error)}") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} {name!r}: {location} has no {attribute!r}.")
    return getattr(module, attribute)


def loaded_files() -> list[str]:
    """Paths of the files that were loaded so far."""
    return list(_FILES)


def load_files(paths: Sequence[str]) -> None:
    """Loads files, in a worker process."""
    for path in paths:
        _module_of_file(path)


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # `python -m` has it, the installed command does not
    return importlib.import_module(name)


def _module_of_file(path: str) -> ModuleType:
    if path in _FILES:
        return _FILES[path]
    name = f"{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # of any .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling finds what it defines by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[path] = module
    return module
