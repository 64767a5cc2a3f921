"""Training: a `transformers.Trainer` whose optimizer steps are planned sets of trees."""

from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.trainer import TreeTrainer

__all__ = ["TreeTrainer", "TreeTrainingArguments"]
