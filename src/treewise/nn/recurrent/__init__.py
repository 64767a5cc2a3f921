"""Recurrent and convolutional layers on trees: each segment computed once, from the state its parent ended with."""

from treewise.nn.recurrent.guest import RecurrentRows, state_bytes
from treewise.nn.recurrent.mixers import install, kinds_of, refuse_unknown
from treewise.nn.recurrent.rows import TreeRows
from treewise.nn.recurrent.segments import peak_cuts

__all__ = ["RecurrentRows", "TreeRows", "install", "kinds_of", "peak_cuts", "refuse_unknown", "state_bytes"]
