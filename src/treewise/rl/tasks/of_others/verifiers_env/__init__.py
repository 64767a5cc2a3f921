"""`verifiers:NAME`, environments of the package `verifiers` (0.4) with one agent: the policy.

tasks, process    the task, and the process of its environment, as the trainer sees them
worker, loading   that process, which alone imports the package; what of an environment is not served, said by name
episode, policy, tools   an episode: the environment's `run`, the agent whose turns the trainer samples, its tools
"""
