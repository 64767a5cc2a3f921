"""Reinforcement learning on trees of rollouts.

samplers, tasks, branching, curriculum   how rollouts are made; each a table of names (`registry.py`) over small files
online          the loop: choose tasks, sample trees, reward, credit, train
update          from recorded rollouts to what an update trains on: advantages by name, and log-probs
success_book, node_values   estimates: success of tasks, values of parts of a tree
"""
