"""`openenv:URL`: an environment on a server of OpenEnv (`openenv`), by its generic client.

The text of a turn is one field of the action; the observation is shown without the server's bookkeeping, and the reward
is the sum of the steps'. A session cannot be copied: branches within an episode are played again in a session of their
own, and compared; `replay: false` says that this cannot be, and then they start at the prompt.
"""

import json
from functools import partial
from typing import Any

from treewise.errors import ConfigError, pip_install
from treewise.rl.tasks.environment import EnvironmentTask

_HIDDEN = ("reward", "done", "metadata", "rubric_reward")


class Session:
    """An environment of TRL's form.

    Parameters:
        url: of the server. action, observation: the fields of the two that hold a text; None for the observation: all
            of it, as JSON. replay: whether the same seed and actions give the same observations. action_fields:
            further fields of each action.
    """

    can_be_copied = False

    def __init__(
        self, url: str, action: str, observation: str | None, action_fields: dict[str, Any], *, replay: bool
    ) -> None:
        self._url, self._field, self._observation, self._fields = url, action, observation, action_fields
        self.can_be_replayed, self.done, self._total = replay, False, 0.0
        self._client: Any = None

    def reset(self, seed: int = 0) -> str:
        """Opens a session and begins the episode of a seed."""
        self._client = _client_class(self._url)(base_url=self._url).sync()
        self.done, self._total = False, 0.0
        return self._taken(self._client.reset(seed=seed))

    def act(self, text: str) -> str:
        """Takes a step.

        Args:
            text: The action.
        """
        return self._taken(self._client.step({**self._fields, self._field: text}))

    def get_reward(self) -> float:
        """The sum of the rewards of all steps; ends the session."""
        self._client.close()
        return self._total

    def _taken(self, result: Any) -> str:
        self.done = bool(result.done)
        self._total += float(result.reward or 0.0)
        values = {name: value for name, value in result.observation.items() if name not in _HIDDEN}
        return str(values[self._observation]) if self._observation else json.dumps(values)


def _client_class(url: str) -> Any:
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError(f"openenv:{url} needs {error.name}: {pip_install('openenv')}.") from None
    return GenericEnvClient


def openenv_task(
    url: str,
    action: str = "message",
    observation: str | None = None,
    action_fields: dict[str, Any] | None = None,
    replay: bool = True,
    **settings: Any,
) -> EnvironmentTask:
    """The task of a server; see `Session`. settings: of `EnvironmentTask`.

    Raises:
        ConfigError: the package is not installed.
    """
    _client_class(url)
    factory = partial(Session, url, action, observation, action_fields or {}, replay=replay)
    given = {"prompt": "Answer with your next action alone.", "text_tool": "act", **settings}
    return EnvironmentTask(factory, name=f"openenv:{url}", **given)
