"""Episodes: ids only grow, only sampled ids are trained, and a branch is what the episode was at that turn."""

import copy
import itertools
import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from treewise.errors import ConfigError, DataError, TaskError
from treewise.rl.recorder.chat_tokens import ChatTokens, ToolCall
from treewise.rl.tasks import (
    Calls,
    EnvironmentEpisode,
    EnvironmentTask,
    GuessNumber,
    RewardFailure,
    RewardRunner,
    TurnTask,
)
from treewise.rl.tasks.environment import opening, state_method, tool_schemas, tools_of
from treewise.rl.tasks.episode import start_episodes

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN3 = Path(__file__).parents[2] / "data" / "fixtures" / "qwen3" / "tokenizer_config.json"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", additional_special_tokens=[SPECIAL[0]], pad_token=SPECIAL[2]
    )


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens(byte_tokenizer(), "chatml")


@dataclass
class Corridor:
    """Rooms 0 to 3, a key in the last one. Copied by deep copy: it has no `fork`."""

    room: int = 0

    def reset(self, seed: int = 0) -> str:
        self.room = seed % 3
        return f" You are in room {self.room}. Take the key."

    def move(self, direction: str) -> str:
        """Walks to the next room.

        Args:
            direction: Either left or right.
        """
        step = {"left": -1, "right": 1}.get(direction)
        if step is None or not 0 <= self.room + step < 4:
            return f"You cannot go {direction}. You are in room {self.room}."
        self.room += step
        return f"You are in room {self.room}."

    def take(self) -> str:
        """Takes the key, if it is here."""
        return "You have the key." if self.room == 3 else "There is no key here."

    def get_reward(self) -> float:
        return float(self.room)


class Counting:
    """Counts up; holds a lock, so it cannot be copied and is replayed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0

    def reset(self, seed: int) -> None:
        self.total = seed

    def add(self, number: int) -> str:
        """Adds to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return f"total {self.total}"

    def get_reward(self) -> float:
        return float(self.total)


class Forgetful(Counting):
    """Answers every new object otherwise."""

    numbers = itertools.count()

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.total += next(self.numbers)


class Faulty(Counting):
    def wait(self) -> str:
        """Waits for long."""
        threading.Event().wait()
        return "done"

    def fail(self) -> str:
        """Fails."""
        raise KeyError("no such thing")

    def get_reward(self) -> float:
        return float("nan")


class Talker:
    """Answers whole turns: carries calls out itself, asks on after a turn without one, and ends with "bye"."""

    can_be_copied = False
    tools = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}},)

    def reset(self, seed: int) -> list[dict[str, Any]]:
        self.taken: list[Any] = []
        self.cut_off: Any = None
        self.done = False
        return [{"role": "system", "content": "Talk."}, {"role": "user", "content": f"Hello {seed}"}]

    def respond(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.taken.append(message)
        self.done = message["content"] == "bye"
        if message["content"] == "crash":
            raise ValueError("no answer")
        calls = message["tool_calls"]
        told = [{"role": "tool", "content": str(each["problem"] or sum(each["arguments"].values()))} for each in calls]
        return [*told, {"role": "user", "content": f"and {len(self.taken)}"}]

    def take_messages(self, messages: Any) -> None:
        self.cut_off = None if messages[-1] in self.taken else messages[-1].get("num_tokens")

    def get_reward(self) -> float:
        return len(self.taken) + (sum(self.cut_off) / 1000 if self.cut_off else 0)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def take_turn(episode: EnvironmentEpisode, text: str, finish_reason: str = "stop") -> None:
    ids = episode.chat.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    episode.begin_turn(ids, finish_reason)()
    episode.end_turn()


def start_episode(task: TurnTask, item: Any, chat: ChatTokens, calls: Calls | None = None) -> EnvironmentEpisode:
    return start_episodes(task, [item], chat, calls or Calls())[0]


def branch_of(episode: EnvironmentEpisode, turn: int) -> EnvironmentEpisode:
    branch = episode.begin_branch(turn)
    branch.open()
    return branch


def begin(chat: ChatTokens, factory: Any, **settings: Any) -> EnvironmentEpisode:
    task = EnvironmentTask(factory, **settings)
    assert isinstance(task, TurnTask)
    return start_episode(task, task.item("train", 3), chat)


def reward_of(episode: EnvironmentEpisode, runner: RewardRunner | None = None) -> Any:
    return (runner or RewardRunner()).of_episodes([episode])[0]


def text_of(episode: EnvironmentEpisode) -> str:
    return episode.chat.tokenizer.decode(episode.token_ids)


def test_ids_grow_and_equal_what_the_template_renders(chat: ChatTokens) -> None:
    episode = begin(chat, Corridor)
    turns = [call("move", direction="left"), call("take"), "I give up."]
    seen: list[list[int]] = [list(episode.token_ids)]
    for text in turns:
        take_turn(episode, text)
        assert episode.token_ids[: len(seen[-1])] == seen[-1]
        seen.append(list(episode.token_ids))
    rendered = chat.template.render([[*episode.messages]], episode.schemas, "test", generation=True)[0]
    assert text_of(episode) == rendered + turns[-1] + "<|im_end|>"
    for text, start in zip(turns, episode.turn_starts, strict=True):
        assert chat.tokenizer.decode(episode.token_ids[start:]).startswith(text + "<|im_end|>")
    assert (episode.end_reason, episode.num_turns) == ("answered", 3)
    assert "You cannot go left" in text_of(episode) or "You are in room" in text_of(episode)


def test_sampled_ids_are_kept_where_the_tokenizer_would_write_others(chat: ChatTokens) -> None:
    episode = begin(chat, Corridor)
    text = call("take").replace("take", "t\\u0061ke")  # JSON that no template writes
    take_turn(episode, text)
    assert text + "<|im_end|>" in text_of(episode)
    assert "key" in text_of(episode)[text_of(episode).index(text) :]


@pytest.mark.parametrize(("factory", "method"), [(GuessNumber, "fork"), (Corridor, "deepcopy"), (Counting, "replay")])
def test_a_branch_is_the_episode_at_that_turn(chat: ChatTokens, factory: Any, method: str) -> None:
    actions = {
        GuessNumber: [call("guess", number=str(n)) for n in (1, 16, 1)],
        Corridor: [call("move", direction=d) for d in ("left", "right", "right")],
        Counting: [call("add", number=n) for n in (1, 5, 2)],
    }[factory]
    episode = begin(chat, factory)
    assert episode.method == method
    for text in actions:
        take_turn(episode, text)
    before = (list(episode.token_ids), reward_of(episode), vars(episode.environment).copy())
    for turn in range(4):
        branch = branch_of(episode, turn)
        assert branch.token_ids == episode.token_ids[: len(branch.token_ids)]
        for text in actions[turn:]:
            take_turn(branch, text)
        assert branch.token_ids == episode.token_ids
        assert branch.turn_starts == episode.turn_starts
        assert branch.messages == episode.messages
        assert reward_of(branch) == before[1]
        other = branch_of(episode, turn)
        take_turn(other, actions[0])
        branch_of(other, other.num_turns)
    assert (episode.token_ids, reward_of(episode), vars(episode.environment)) == before


def test_a_replay_that_differs_refuses_the_branch(chat: ChatTokens) -> None:
    episode = begin(chat, Forgetful, name="forgetful")
    take_turn(episode, call("add", number=1))
    take_turn(episode, call("add", number=1))
    assert branch_of(episode, 0).num_turns == 0  # nothing to compare yet
    with pytest.raises(TaskError, match=r"forgetful/train/3, episode 0, turn 0: call 0 \(add\)"):
        branch_of(episode, 2)


def test_endings(chat: ChatTokens) -> None:
    length = begin(chat, Counting)
    take_turn(length, call("add", number=1), "length")
    assert (length.end_reason, length.environment.total) == ("length", 6)
    turns = begin(chat, Counting, max_turns=1)
    take_turn(turns, call("add", number=1))
    assert (turns.end_reason, turns.environment.total) == ("max_turns", 7)
    guess = begin(chat, GuessNumber)
    take_turn(guess, call("guess", number=str(guess.environment.secret)))
    assert (guess.end_reason, reward_of(guess)) == ("done", 1.0)


def test_mistakes_of_the_model_are_told_to_it(chat: ChatTokens) -> None:
    episode = begin(chat, Faulty)
    for text in (call("fail"), call("fly"), "<tool_call>{</tool_call>", "<tool_call>", call("add", count=1)):
        take_turn(episode, text)
        assert episode.end_reason is None
    told = text_of(episode)
    for message in ("no such thing", "Tool fly not found", "not JSON", "is not closed", "unexpected keyword"):
        assert message in told


def test_faults_of_the_environment_are_failures_of_the_rollout(chat: ChatTokens) -> None:
    runner = RewardRunner()
    task = EnvironmentTask(Faulty, name="faulty")
    episode = start_episode(task, task.item("train", 0), chat)
    episode.calls.timeout_seconds = 0.05  # of what never answers; what does may take its time
    take_turn(episode, call("wait"))
    assert episode.end_reason == "failed"
    failure = reward_of(episode, runner)
    assert isinstance(failure, RewardFailure)
    assert "faulty/train/0, episode 0: reward timeout: tool wait of turn 0" in str(failure)
    other = begin(chat, Faulty)
    take_turn(other, "nothing")
    assert isinstance(reward_of(other, runner), RewardFailure)
    assert "get_reward returned nan" in str(reward_of(other, runner))


class Forking(Counting):
    """Its third fork goes wrong, and all after it."""

    def __init__(self, fault: Any) -> None:
        super().__init__()
        self.fault, self.num_forks = fault, 0

    def fork(self) -> Any:
        self.num_forks += 1
        if self.num_forks > 2:
            return self.fault()
        return self


def raises() -> None:
    raise KeyError("no session")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (raises, r"reward raised: .*KeyError: 'no session'"),
        (lambda: None, "reward raised: .*TypeError: fork returned None"),
        (threading.Event().wait, "reward timeout: .*no answer within 0.05 seconds"),
    ],
    ids=["raises", "none", "hangs"],
)
def test_a_fork_that_goes_wrong_costs_its_rollout_or_its_branch(chat: ChatTokens, fault: Any, reason: str) -> None:
    task = EnvironmentTask(lambda: Forking(fault), name="forking")
    episode = start_episode(task, task.item("train", 0), chat)
    for _ in range(2):
        take_turn(episode, call("add", number=1))
        assert episode.end_reason is None
    if "timeout" in reason:
        episode.calls.timeout_seconds = 0.05
    with pytest.raises(TaskError, match="forking/train/0, episode 0: " + reason.split(": ", 1)[1]):
        branch_of(episode, 2)
    take_turn(episode, call("add", number=1))
    assert episode.end_reason == "failed"
    failure = f"forking/train/0, episode 0: {reason.split(':')[0]}: fork before turn 2: "
    assert re.search(failure, str(reward_of(episode)))
    with pytest.raises(TaskError):
        branch_of(episode, 2)


def test_what_can_no_longer_be_copied_when_a_branch_begins_is_played_again(chat: ChatTokens) -> None:
    class Late(Corridor):
        is_closed = False

        def __deepcopy__(self, memo: Any) -> "Late":
            if self.is_closed:
                raise TypeError("a socket")
            return copy.copy(self)

    episode = begin(chat, Late)
    assert episode.method == "deepcopy"
    take_turn(episode, call("move", direction="right"))
    episode.environment.is_closed = True
    branch = branch_of(episode, 1)
    assert (branch.environment.room, branch.environment.is_closed) == (episode.environment.room, False)


@pytest.mark.parametrize(
    "answer", [None, "and?", ["and?"], [{"role": "user", "content": None}], [{"role": b"user", "content": "and?"}], {}]
)
def test_what_answers_a_turn_and_is_no_list_of_messages_is_a_failure(chat: ChatTokens, answer: Any) -> None:
    class Odd(Talker):
        def respond(self, message: dict[str, Any]) -> Any:
            return answer

    episode = begin(chat, Odd)
    take_turn(episode, "hello")
    assert episode.end_reason == "failed"
    assert "TypeError: respond returned" in str(reward_of(episode))


class Pretending(str):
    """A text that hides what it is, as subclasses may."""

    def __str__(self) -> str:
        return self

    def encode(self, *_: Any) -> bytes:
        return b""


@pytest.mark.parametrize("where", ["tool", "reset"])
def test_half_of_a_surrogate_pair_is_a_failure_and_not_the_end_of_the_tokenizer(chat: ChatTokens, where: str) -> None:
    class Cut(Counting):
        def reset(self, seed: int) -> str:
            super().reset(seed)
            return Pretending("\ud83d") if where == "reset" else ""

        def add(self, number: int) -> str:
            """Adds.

            Args:
                number: A number.
            """
            return Pretending("\ud83d")

    class Talking(Talker):
        def reset(self, seed: int) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "\ud83d"}]

    if where == "reset":
        with pytest.raises(TaskError, match=r"cannot be reset: .*lone surrogate"):
            begin(chat, Talking)
        with pytest.raises(TaskError, match=r"cannot be reset: .*UnicodeEncodeError"):
            begin(chat, Cut)
        return
    episode = begin(chat, Cut)
    take_turn(episode, call("add", number=1))
    assert episode.end_reason == "failed"
    assert "tool add of turn 0: " in str(reward_of(episode))
    assert "UnicodeEncodeError" in str(reward_of(episode))


def test_a_template_without_tools_is_refused_and_text_actions_need_none() -> None:
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    chat = ChatTokens(byte_tokenizer(), "{% for m in messages %}" + turn + "{% endfor %}<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match=r"does not write tools.* would hold guess; give a chat_template.*'chatml'"):
        begin(chat, GuessNumber)
    assert "Guess a number" in text_of(begin(chat, GuessNumber, text_tool="guess"))


def test_what_reset_returns_stands_apart_from_the_prompt(chat: ChatTokens) -> None:
    class Greeting(Counting):
        def reset(self, seed: int) -> str:
            super().reset(seed)
            return f"Seed {seed}."

    assert begin(chat, Greeting).messages == [{"role": "user", "content": "Use the tools.\nSeed 6."}]
    assert begin(chat, Greeting, prompt="Add: ").messages == [{"role": "user", "content": "Add: Seed 6."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    assert opening(parts, "Now.")[0]["content"] == [*parts[0]["content"], {"type": "text", "text": "Now."}]
    with pytest.raises(ConfigError, match="the prompt is '  '"):
        EnvironmentTask(Greeting, prompt="  ")


def test_what_an_environment_raises_names_its_line(chat: ChatTokens) -> None:
    class Broken(Counting):
        def reset(self, seed: int) -> None:
            raise KeyError("\x1b[31mno")

    with pytest.raises(
        TaskError, match=r"environment/train/3: the environment cannot be reset: .*test_episode.py:\d+"
    ) as e:
        begin(chat, Broken)
    assert "\x1b" not in str(e.value)
    with pytest.raises(ConfigError, match=r"cannot be made: .*test_episode.py:\d+: ZeroDivisionError"):
        EnvironmentTask(lambda: 1 / 0)


def test_text_may_be_the_action_itself(chat: ChatTokens) -> None:
    episode = begin(chat, GuessNumber, text_tool="guess")
    assert "tool_call" not in text_of(episode)
    take_turn(episode, "is it 99?")
    assert text_of(episode).endswith("<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="text_tool 'say'"):
        EnvironmentTask(GuessNumber, text_tool="say")
    with pytest.raises(ConfigError, match="'take' has no parameter"):
        EnvironmentTask(Corridor, text_tool="take")


@pytest.mark.parametrize(
    "settings", [{"rows": "x"}, {"rows": [5]}, {"max_turns": "x"}, {"max_turns": 0}, {"held_out": "x"}, {"held_out": 1}]
)
def test_settings_of_environments(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EnvironmentTask(GuessNumber, **settings)


def test_a_template_that_rewrites_history_is_refused() -> None:
    template = json.loads(QWEN3.read_text())["chat_template"]
    chat = ChatTokens(byte_tokenizer(), template)
    episode = begin(chat, GuessNumber, text_tool="guess")
    with pytest.raises(DataError, match="environment/train/3, episode 0, turn 0: the chat template rewrites"):
        take_turn(episode, "<think>\nmaybe\n</think>\n\n99")
    kept = begin(chat, Corridor)  # tool answers leave the thinking where it is
    take_turn(kept, "<think>\nmaybe\n</think>\n\n" + call("take"))
    assert text_of(kept).count("maybe") == 1
    assert text_of(kept).endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_end_ids(chat: ChatTokens) -> None:
    assert chat.end_ids == (chat.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


PHI = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


def test_a_turn_ends_where_a_history_ends_it() -> None:
    """As Phi-3's template: an end-of-text token behind the last turn alone, which the model never samples."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ChatTokens(tokenizer, PHI).end_ids == (end,)
    words = PHI.replace("m.content +", "m.content + '.' +").replace("<|endoftext|>", "")
    assert ChatTokens(tokenizer, words).end_ids == (end,)


def test_a_text_begins_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[begin])
    chat = ChatTokens(tokenizer, PHI)
    assert chat.text_ids("<s>Hi") == chat.text_ids("Hi")
    assert chat.text_ids("<s>Hi").count(tokenizer.bos_token_id) == 1


def test_calls_in_the_form_of_hermes(chat: ChatTokens) -> None:
    def calls(text: str) -> tuple[ToolCall, ...]:
        return chat.read(chat.tokenizer(text)["input_ids"], "", []).calls

    text = 'so <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and ' + call("b", y="2")
    assert calls(text) == (ToolCall("a", {"x": 1}), ToolCall("b", {"y": "2"}))
    assert calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')[0].arguments == {"x": 1}
    assert calls("no call") == ()
    for wrong in ('{"arguments": {}}', "[1]", '{"name": "a", "arguments": [1]}', '{"name": "a", "arguments": "{"}'):
        assert calls(f"<tool_call>{wrong}</tool_call>")[0].problem


def test_calls_by_the_tokenizers_own_response_template() -> None:
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (Path(utils.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    utils.add_response_schema(tokenizer)
    assert tokenizer.response_template is not None
    prefix = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    ids = tokenizer(call("take") + "<|im_end|>", add_special_tokens=False)["input_ids"]
    schemas = tool_schemas(Corridor(), "test")
    assert ChatTokens(tokenizer).read(ids, tokenizer.decode(prefix), schemas).calls == (ToolCall("take", {}),)


def test_tools_are_public_methods() -> None:
    assert set(tools_of(GuessNumber())) == {"guess"}
    assert set(tools_of(Corridor())) == {"move", "take"}
    assert state_method(Counting()) == "replay"
    no_hints = type("NoHints", (), {"reset": lambda self: None, "act": lambda self, x: x})
    with pytest.raises(ConfigError, match="tool 'act' has no schema"):
        tool_schemas(no_hints(), "here")


# -- environments that answer whole turns -----------------------------------------------------------------------------


def test_an_environment_may_answer_whole_turns(chat):
    episode = begin(chat, Talker)
    prompt = text_of(episode)
    assert '"name": "add"' in prompt
    assert "Hello 6<|im_end|>" in prompt
    turn = "I add: " + call("add", a=1, b=2) + "<tool_call>{</tool_call>"
    take_turn(episode, turn)
    message = episode.environment.taken[0]
    assert message["content"] == "I add:"
    assert [each["name"] for each in message["tool_calls"]] == ["add", "unknown"]
    assert message["num_tokens"] == [len(chat.tokenizer(prompt)["input_ids"]), len(turn) + 1]
    told = text_of(episode)
    assert "<tool_response>\n3\n</tool_response>" in told
    assert told.endswith("<|im_start|>user\nand 1<|im_end|>\n<|im_start|>assistant\n")
    assert episode.method == "replay"
    branch = branch_of(episode, 1)
    assert (branch.token_ids, branch.environment.taken) == (episode.token_ids, [message])
    take_turn(episode, "well")
    take_turn(episode, "bye")
    assert (episode.end_reason, reward_of(episode)) == ("done", 3.0)
    take_turn(branch, "we", "length")
    assert branch.end_reason == "length"
    assert 1.2 < reward_of(branch) < 2  # gets the turn that was cut off


def test_whole_turns_that_fail_or_reach_the_limit_end_the_episode(chat):
    episode = begin(chat, Talker, max_turns=2)
    branch = branch_of(episode, 0)
    take_turn(episode, "crash")
    assert episode.end_reason == "failed"
    assert "ValueError: no answer" in reward_of(episode).message
    take_turn(branch, "a")
    take_turn(branch, "b")
    assert (branch.end_reason, reward_of(branch)) == ("max_turns", 2.0)


def test_whole_turns_are_compared_when_they_are_played_again(chat):
    class Forgetful(Talker):
        num_resets = 0

        def respond(self, message):
            Forgetful.num_resets += 1
            return [{"role": "user", "content": str(Forgetful.num_resets)}]

    episode = begin(chat, Forgetful)
    take_turn(episode, "a")
    with pytest.raises(TaskError, match=r"turn 0: call 0 \(respond\) returns another result than before"):
        branch_of(episode, 1)


@pytest.mark.parametrize(("opening", "text"), [([], "prompt is empty"), ([{"role": "user"}], "no content")])
def test_prompts_of_whole_turns_are_checked(chat, opening, text):
    class Silent(Talker):
        def reset(self, seed):
            return opening

    with pytest.raises(TaskError, match=text):
        begin(chat, Silent)
