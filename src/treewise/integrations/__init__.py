"""Other trainers on trees."""

from treewise.integrations.seam import Sharing, share_prefixes

__all__ = ["Sharing", "share_prefixes"]
