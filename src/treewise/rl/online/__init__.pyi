from .loop import OnlineTrainer as OnlineTrainer
from .settings import OnlineSettings as OnlineSettings
