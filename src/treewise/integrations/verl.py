"""Importing this module serves every actor and reference engine of verl that is initialized afterwards, on trees.

In verl's configuration: `actor_rollout_ref.model.external_lib: treewise.integrations.verl` (docs/verl.md).
"""

from treewise.integrations.verl_engine import install

install()
