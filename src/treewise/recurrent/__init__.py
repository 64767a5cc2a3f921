"""Recurrent and convolutional layers on trees: each segment computed once, from the state its parent ended with."""

from treewise.recurrent.mixers import install, kinds_of, refuse_unknown, supports
from treewise.recurrent.rows import TreeRows

__all__ = ["TreeRows", "install", "kinds_of", "refuse_unknown", "supports"]
