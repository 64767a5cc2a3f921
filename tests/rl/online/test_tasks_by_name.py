"""Tasks by name: what is missing is said before anything is loaded."""

import sys

import pytest

from treewise.errors import ConfigError
from treewise.rl.online.tasks_by_name import task_named


def test_a_missing_client_of_openenv_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found at the first `reset`, and blamed on the environment."""
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r"^openenv:http://localhost:1 needs openenv.*: pip install 'openenv"):
        task_named("openenv:http://localhost:1")
