"""Reinforcement learning on trees of rollouts."""
