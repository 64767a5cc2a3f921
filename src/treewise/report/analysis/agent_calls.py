"""What an agent's calls were, as an online run leaves them: a tree of each episode, sharing, what forks cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

CallLine = TypedDict(
    "CallLine",
    {
        "from": int | None,
        "model": str,
        "is_trained": bool,
        "new_tokens": int,
        "again_tokens": int,
        "tokens": Sequence[int],
        "fork": str | None,
        "rewards": Sequence[float | None],
        "text": str,
        "replies": Sequence[str],
    },
)  # what `rl.agents.calls` writes of a call


class EpisodeLine(TypedDict):
    """What it writes of an episode."""

    task: str
    reward: float | None
    failure: str | None
    calls: list[CallLine]


MAX_EPISODES = 12  # that are shown of an iteration
MAX_CALLS = 2_000  # of all of them together
MAX_DEPTH = 30  # of branches of branches
MAX_CHARS = 4_000  # of a text; its end
# Reasons for which nothing is written again.
HARMLESS = ("new conversation", "same messages again", "other message after the same ones")


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call. number: in its episode, from 0. model: as it was asked for. text: what was written behind the turn that
    it goes on from. replies: what was sampled. fork: why it does not go on from a turn as it was. branches: chains of
    calls that go on from it beside the first.
    """

    number: int
    model: str
    is_trained: bool
    new_tokens: int
    again_tokens: int
    tokens: int
    fork: str | None
    rewards: tuple[float, ...]
    text: str
    replies: tuple[str, ...]
    branches: tuple[tuple["AgentCall", ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """An episode. chains: of calls that each go on from the one before; the first begin with no turn above them.
    failure: why it has no reward.
    """

    task: str
    reward: float | None
    failure: str | None
    num_calls: int
    chains: tuple[tuple[AgentCall, ...], ...]


@dataclass(frozen=True, slots=True)
class AgentReport:
    """An iteration of an agent. call_ratio: tokens of one row per call / tree, of what is trained. forks: of each
    reason, calls and the tokens that they wrote again.
    """

    iteration: int
    num_episodes: int
    num_calls: int
    call_ratio: float
    share_ratio: float
    leaf_ratio: float
    forks: tuple[tuple[str, int, int], ...]
    episodes: tuple[AgentEpisode, ...]


def agent_report(
    iteration: int, lines: Sequence[EpisodeLine], call_ratio: float, share_ratio: float, leaf_ratio: float
) -> AgentReport:
    """Of the lines of an iteration's calls. Those that forked most are shown first."""
    forks: dict[str, tuple[int, int]] = {}
    for line in lines:
        for call in line["calls"]:
            if (reason := call["fork"]) is not None and reason not in HARMLESS:
                count, again = forks.get(reason, (0, 0))
                forks[reason] = (count + 1, again + int(call["again_tokens"]))
    ranked = sorted(lines, key=lambda line: (-sum(_forks(call) for call in line["calls"]), -len(line["calls"])))
    shown, room = [], MAX_CALLS
    for line in ranked[:MAX_EPISODES]:
        if len(line["calls"]) <= room:
            shown.append(_episode(line))
            room -= len(line["calls"])
    return AgentReport(
        iteration,
        len(lines),
        sum(len(line["calls"]) for line in lines),
        call_ratio,
        share_ratio,
        leaf_ratio,
        tuple((reason, *forks[reason]) for reason in sorted(forks, key=lambda reason: -forks[reason][1])),
        tuple(shown),
    )


def parsed_line(found: Any) -> EpisodeLine:
    """A line that is one of an episode. Raises what Python does where it is not."""
    line: EpisodeLine = found
    calls = line["calls"]
    for number, call in enumerate(calls):
        assert call["from"] is None or 0 <= call["from"] < number, f"call {number} goes on from {call['from']}"
        assert call["fork"] is None or isinstance(call["fork"], str)
        int(call["again_tokens"]), sum(call["tokens"]), str(call["text"])
    return {"calls": calls, "task": str(line["task"]), "reward": line["reward"], "failure": line["failure"]}


def _forks(call: CallLine) -> int:
    return int(call["fork"] is not None and call["fork"] not in HARMLESS)


def _episode(line: EpisodeLine) -> AgentEpisode:
    calls, below = line["calls"], dict[int | None, list[int]]()
    for number, call in enumerate(calls):
        below.setdefault(call["from"], []).append(number)

    def chain(number: int, depth: int = 0) -> tuple[AgentCall, ...]:
        found, left = list[AgentCall](), [number]
        while left:
            at = left.pop()
            on = below.get(at, [])
            others = on[1:]
            if depth == MAX_DEPTH:  # further ones stand in one chain
                left += reversed(others)
                others = []
            found.append(_call(at, calls[at], tuple(chain(each, depth + 1) for each in others)))
            left += on[:1]
        return tuple(found)

    chains = tuple(chain(number) for number in below.get(None, ()))
    return AgentEpisode(line["task"], line["reward"], line["failure"], len(calls), chains)


def _call(number: int, call: CallLine, branches: tuple[tuple[AgentCall, ...], ...]) -> AgentCall:
    return AgentCall(
        number,
        str(call["model"]),
        bool(call["is_trained"]),
        int(call["new_tokens"]),
        int(call["again_tokens"]),
        sum(call["tokens"]),
        call["fork"],
        tuple(float(value) for value in call["rewards"] if value is not None),
        call["text"][-MAX_CHARS:],
        tuple(str(text)[-MAX_CHARS:] for text in call["replies"]),
        branches,
    )
