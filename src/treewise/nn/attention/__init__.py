"""Attention on trees: one function registered with transformers, three implementations behind it."""

from treewise.nn.attention.gateway import Gateway, GatewayRead
from treewise.nn.attention.interface import IMPLEMENTATIONS, TreeContext, install, is_installed
from treewise.nn.attention.legacy_layers import has_older, install_older
from treewise.nn.attention.mask import TreeMask
from treewise.nn.attention.mask_audit import observed, refuse_other_masks

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
