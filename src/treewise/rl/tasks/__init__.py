"""Tasks: prompts and rewards of one turn, and environments of several."""

from treewise.rl.tasks.calls import Calls
from treewise.rl.tasks.chat_tokens import ChatTokens
from treewise.rl.tasks.environment import EnvironmentTask, GuessNumber
from treewise.rl.tasks.episode import EnvironmentEpisode
from treewise.rl.tasks.protocol import RewardRequest, SingleTurnTask, Task, TaskItem, TurnTask
from treewise.rl.tasks.reward_functions import math_reward
from treewise.rl.tasks.rewards import RewardFailure, RewardRunner
from treewise.rl.tasks.single_turn import ReasoningGymTask, RowsTask, SumTask

__all__ = [
    "Calls",
    "ChatTokens",
    "EnvironmentTask",
    "EnvironmentEpisode",
    "GuessNumber",
    "ReasoningGymTask",
    "RewardFailure",
    "RewardRequest",
    "RewardRunner",
    "RowsTask",
    "SingleTurnTask",
    "SumTask",
    "Task",
    "TaskItem",
    "TurnTask",
    "math_reward",
]
