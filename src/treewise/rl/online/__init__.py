"""The online loop: choose tasks, sample trees, reward, credit, train."""

from treewise.rl.online.settings import OnlineSettings
from treewise.rl.online.trainer import OnlineTrainer

__all__ = ["OnlineSettings", "OnlineTrainer"]
