from .settings import OnlineSettings as OnlineSettings
from .trainer import OnlineTrainer as OnlineTrainer
