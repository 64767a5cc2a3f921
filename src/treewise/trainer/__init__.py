"""Training: a `transformers.Trainer` whose optimizer steps are planned sets of trees."""

from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.trainer import NonFiniteError, TreeTrainer

__all__ = ["NonFiniteError", "TreeTrainer", "TreeTrainingArguments"]
