"""`textarena:GAME`: games for one player of the package `textarena` (0.7.4), the text of a turn as the move.

A game draws from Python's global random numbers. Here each has numbers of its own, which are put in place around a
call, so games of several episodes do not meet and a copy goes on as its original would.
"""

import random
import threading
from functools import partial
from typing import Any

from treewise.errors import ConfigError, pip_install
from treewise.rl.tasks.environment import EnvironmentTask

_GLOBAL = threading.Lock()


class Game:
    """An environment of TRL's form. The reward is the game's; 0 where it has not ended."""

    def __init__(self, game: str) -> None:
        self._game, self._made = game, _made(game)
        self._random = random.Random(0).getstate()
        self._seen = ""

    def reset(self, seed: int = 0) -> str:
        """Begins the game of a seed."""
        self._random = random.Random(seed).getstate()
        self._alone(lambda: self._made.reset(num_players=1, seed=seed))
        self._seen = ""
        return self._news()

    def play(self, move: str) -> str:
        """Makes a move.

        Args:
            move: The move, in the form that the game asks for.
        """
        self._alone(lambda: self._made.step(move))
        return "The game is over." if self.done else self._news()

    def get_reward(self) -> float:
        """The reward of the player."""
        rewards = self._made.state.rewards
        return float((rewards or {}).get(0, 0.0)) if self.done else 0.0

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return bool(self._made.state.done)

    def _news(self) -> str:
        """What the game says, without what it has said before."""
        text = str(self._alone(self._made.get_observation)[1])
        news = text.removeprefix(self._seen)
        self._seen = text
        return news.strip()

    def _alone(self, call: Any) -> Any:
        with _GLOBAL:
            before = random.getstate()
            random.setstate(self._random)
            try:
                return call()
            finally:
                self._random = random.getstate()
                random.setstate(before)


def _made(game: str) -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(f"textarena:{game} needs {error.name}: {pip_install('textarena', 'nltk')}.") from None
    try:
        return textarena.make(game)
    except LookupError as error:  # word lists of nltk, which it downloads when a game is made
        raise ConfigError(f"textarena:{game} needs data of nltk: {' '.join(str(error).split())[:200]}") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"textarena:{game}: {error}") from None


def textarena_task(game: str, **settings: Any) -> EnvironmentTask:
    """The task of a game. settings: of `EnvironmentTask`."""
    given = {"prompt": "Play this game. Answer with your next move alone.", "text_tool": "play", **settings}
    return EnvironmentTask(partial(Game, game), name=f"textarena:{game}", **given)
