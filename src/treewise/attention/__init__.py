"""Attention on trees: one function registered with transformers, three implementations behind it."""

from treewise.attention.audit import observed, refuse_other_masks
from treewise.attention.gateway import Gateway, GatewayRead
from treewise.attention.interface import IMPLEMENTATIONS, TreeContext, install, is_installed
from treewise.attention.mask import TreeMask
from treewise.attention.older import has_older, install_older

__all__ = [
    "IMPLEMENTATIONS",
    "Gateway",
    "GatewayRead",
    "TreeContext",
    "TreeMask",
    "has_older",
    "install",
    "install_older",
    "is_installed",
    "observed",
    "refuse_other_masks",
]
