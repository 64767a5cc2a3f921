"""TRL's fused head on trees."""

from treewise.integrations.trl.fused_seam import FusedSeam, has_fused_head

__all__ = ["FusedSeam", "has_fused_head"]
