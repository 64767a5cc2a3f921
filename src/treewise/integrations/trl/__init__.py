"""TRL's trainers on trees."""

from treewise.integrations.trl.prefix_sharing import Sharing, share_prefixes

__all__ = ["Sharing", "share_prefixes"]
