"""Paths as users and records write them."""

import os
from pathlib import Path


def path_of(text: str | Path) -> Path:
    """The path of a text, `~` followed. Where that leads to no home (`~nobody`) it stays, and is then not found."""
    return Path(os.path.expanduser(text))
