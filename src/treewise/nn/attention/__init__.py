"""Attention on trees: one function registered with transformers, behind it a table of implementations."""

from treewise.nn.attention.gateway import ANCHOR, EVERYTHING, NOTHING, Carried, Gateway, GatewayRead, carry
from treewise.nn.attention.implementations import AUTO, IMPLEMENTATIONS, choose
from treewise.nn.attention.interface import AttentionName, TreeContext, install, install_legacy_layers
from treewise.nn.attention.mask import TreeMask
from treewise.nn.attention.mask_audit import check_masks, observe_masks

__all__ = [
    "ANCHOR",
    "AUTO",
    "AttentionName",
    "Carried",
    "EVERYTHING",
    "NOTHING",
    "IMPLEMENTATIONS",
    "choose",
    "Gateway",
    "GatewayRead",
    "TreeContext",
    "TreeMask",
    "carry",
    "install",
    "install_legacy_layers",
    "observe_masks",
    "check_masks",
]
