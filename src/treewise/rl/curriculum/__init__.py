"""Curricula: which tasks, or recorded trees, to train on next."""

from treewise.rl.curriculum.rules import CURRICULA, Curriculum, Outcome, curriculum_named
from treewise.rl.curriculum.task_sampler import Pool, TaskSampler

__all__ = ["CURRICULA", "Curriculum", "Outcome", "Pool", "TaskSampler", "curriculum_named"]
