"""Loads an environment of the package `verifiers` (0.4) with one agent, the policy, and says by name what of it the
loop does not serve. Imported by `worker.py` alone.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.session import hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing
from verifiers.v1.utils.decorators import discover_decorated

from treewise.errors import ConfigError
from treewise.rl.tasks.of_others.verifiers_env.policy import TurnLoop
from treewise.rl.tasks.of_others.verifiers_env.protocol import AgentConfig, Environment, EnvironmentConfig, Task

NEVER = 1e9  # seconds: the package counts the time of the sampler as the agent's


def loaded(
    name: str, num_tasks: int, runtime: object, env: Mapping[str, Any], taskset: Mapping[str, Any]
) -> tuple[Environment, list[Task]]:
    """The environment of a taskset, and its first tasks. env, taskset: fields of the two configurations.

    Raises:
        ConfigError: there is none, or the loop does not serve it.
    """
    config = _config({**env, "taskset": {"id": name, **taskset}}, name)
    seats: Mapping[str, AgentConfig] = agent_config_fields(config)
    problems = [f"has several agents ({', '.join(seats)})"] * (len(seats) != 1)
    for role, seat in seats.items():
        harness = seat.harness.id if seat.harness else vf.default_harness_id(name)
        has_own = harness not in ("null", "bash") or (seat.harness is not None and harness == "bash")
        problems += [f"needs the harness {harness} for its {role}"] * has_own
        problems += [f"names the model of its {role}"] * (seat.model is not None or seat.client is not None)
        default = seat.runtime if "runtime" in seat.model_fields_set else {"type": "subprocess"}
        own = type(seat).model_validate({"runtime": runtime or default, "harness": {"id": "null"}, "model": "policy"})
        update = {key: getattr(own, key) for key in ("runtime", "harness", "model", "retries")}
        update["timeout"] = seat.timeout.model_copy(update={"rollout": NEVER})
        config = config.model_copy(update={role: seat.model_copy(update=update)})
    found: Environment = vf.load_environment(config)
    tasks = list(found.taskset.take(num_tasks))
    problems += [] if tasks else ["has no tasks"]
    seats = agent_config_fields(config)
    seat = next(iter(seats.values()))
    for number, task in enumerate(tasks):
        for problem in _problems(found, seat, task):
            if not any(problem in known for known in problems):
                problems.append(f"{problem} (task {number})")
    if problems:
        raise ConfigError("; ".join(problems))
    return found, tasks


def _config(given: Mapping[str, Any], name: str) -> EnvironmentConfig:
    try:
        vf.taskset_config_type(name)
        config: EnvironmentConfig = vf.resolve_env_config(dict(given))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        module, cause = sys.modules.get(name.rpartition("/")[2].replace("-", "_").lower()), error.__cause__
        text = f"{error} ({cause})" if isinstance(cause, ImportError) else str(error)
        is_old = hasattr(module, "load_environment") or "module 'verifiers" in text or "named 'verifiers." in text
        text += f"; it is written for another verifiers than {version('verifiers')}" * is_old
        raise ConfigError(" ".join(text.split())[:700]) from error
    return config


def _problems(env: Environment, seat: AgentConfig, task: Task) -> Iterator[str]:
    """Why a task cannot be served."""
    toolsets = [*env.taskset.toolsets(env.taskset.config), *task.toolsets(task.config)]
    try:
        validate_pairing(TurnLoop(seat.harness), type(task), resolve_runtime_config(seat.runtime, task), tools=toolsets)
        for stop in task.hooks("stop"):
            hook_boundary(stop, allow_trace=True)
        hooks, judges = [*task.hooks("metric"), *task.hooks("reward")], task.plugged_judges()
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        yield str(error)
        return
    if not hooks and not judges and type(env).run is vf.SingleAgentEnv.run:
        yield "has no rewards"
    if rewriting := discover_decorated(task, "intercept"):
        yield f"rewrites turns ({', '.join(hook.__name__ for hook in rewriting)})"
    if task.data.skills:
        yield "installs skills"
    for toolset in toolsets:
        what, config = f"toolset {type(toolset).__name__}", toolset.config
        if config.url or getattr(config, "colocated", False) or config.runtime.type != "subprocess":
            yield f"{what} is a server of its own (url, colocated or runtime)"
        if not issubclass(state_cls(type(task)), state_cls(type(toolset))):
            yield f"{what} has another state ({state_cls(type(toolset)).__name__}) than its task"
    for judge in judges:
        host = urlsplit(judge.config.base_url).hostname
        if resolve_api_key(judge.config) == "EMPTY" and host not in ("localhost", "127.0.0.1", "::1"):
            yield f"judge {judge.reward_name} needs {judge.config.api_key_var} for {host}"


def unsandboxed(env: Environment, tasks: Sequence[Task]) -> list[str]:
    """What of the tasks runs in a folder of this machine: what gets a runtime where that is `subprocess`."""
    found: dict[str, None] = {}
    seats: Mapping[str, AgentConfig] = agent_config_fields(env.config)
    if any(seat.runtime.type != "subprocess" for seat in seats.values()):
        return []
    for task in {type(task): task for task in tasks}.values():
        hooks = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        own = [
            getattr(task, name) for name in ("setup", "finalize") if getattr(type(task), name) != getattr(vf.Task, name)
        ]
        found |= dict.fromkeys(hook.__name__ for hook in hooks + own if "runtime" in inspect.signature(hook).parameters)
    return list(found)
