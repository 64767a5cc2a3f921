"""Reinforcement learning on trees of rollouts.

samplers, tasks, branching, curriculum   how rollouts are made; each a table of names (`registry.py`) over small files
online          the loop: choose tasks, sample trees, reward, credit, train
rollout_batch   advantages by name, and where log-probs come from, for a batch of rollouts
update          the update on recorded rollouts, from these
success_book, node_values   estimates: success of tasks, values of parts of a tree
trl_rollouts    trees sampled inside of TRL's GRPOTrainer
"""
