"""Curricula: which tasks to train on next."""

from treewise.rl.curriculum.task_sampler import CURRICULA, Curriculum, PractisedItem, TaskSampler, curriculum_named

__all__ = ["CURRICULA", "Curriculum", "PractisedItem", "TaskSampler", "curriculum_named"]
