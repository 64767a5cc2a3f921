"""verl's FSDP engines on trees."""

from treewise.integrations.verl_engine.prefix_sharing import EngineSharing, install, share_engine, uninstall

__all__ = ["EngineSharing", "install", "share_engine", "uninstall"]
