"""Curricula: which tasks to train on next."""

from treewise.rl.curriculum.task_sampler import CURRICULA, Curriculum, Outcome, TaskSampler, curriculum_named

__all__ = ["CURRICULA", "Curriculum", "Outcome", "TaskSampler", "curriculum_named"]
