"""What of an environment the loop does not serve is refused by name, in whichever task it stands."""

import pytest

from treewise.errors import ConfigError

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("ignore")]  # of the package


def load(name, num_tasks=10, runtime=None, env=None, **taskset):
    from treewise.rl.tasks.of_others.verifiers_env.loading import loaded

    return loaded(name, num_tasks, runtime, env or {}, taskset)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("nowhere", {}, "taskset 'nowhere' not found"),
        ("before_the_fourth", {}, "it is written for another verifiers than 0.4"),
        ("of_another_version", {}, "No module named 'verifiers.utils'.*written for another verifiers than 0.4"),
        ("odd_forms", {"form": "empty"}, "has no tasks"),
        ("odd_forms", {"colour": 1}, "colour"),
        ("odd_forms", {"form": "Boxed"}, r"Boxed needs a container runtime .*\(task 2\)"),
        ("odd_forms", {"form": "Unpaid"}, r"has no rewards \(task 2\)"),
        ("odd_forms", {"form": "image"}, r"requires image 'python:3.13'.*\(task 3\)"),
        ("odd_forms", {"form": "Rewritten"}, r"rewrites turns \(shorten\) \(task 2\)"),
        ("odd_forms", {"form": "Remote"}, r"toolset Same is a server of its own .*\(task 2\)"),
        ("odd_forms", {"form": "Mixed"}, r"toolset Stateful has another state \(OtherState\) than its task \(task 2\)"),
        ("odd_forms", {"task": {"judges": [{"id": "reference"}]}}, "judge reference needs PRIME_API_KEY"),
        ("solver_and_judge", {}, r"has several agents \(solver, judge\)"),
        ("scripted_user", {"env": {"echo": {"harness": {"id": "codex"}}}}, "needs the harness codex for its echo"),
        ("scripted_user", {"env": {"echo": {"model": "gpt"}}}, "names the model of its echo"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, settings, text, monkeypatch):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=text):
        load(name, **settings)


def test_a_runtime_that_an_agent_names_is_kept():
    from treewise.rl.tasks.of_others.verifiers_env.loading import unsandboxed

    env, tasks = load("files_and_sums")
    assert (env.config.agent.runtime.type, unsandboxed(env, tasks)) == (
        "subprocess",
        ["same_file", "setup", "finalize"],
    )
    env, tasks = load("files_and_sums", env={"agent": {"runtime": {"type": "docker"}}})
    assert (env.config.agent.runtime.type, unsandboxed(env, tasks)) == ("docker", [])


def test_a_container_serves_tasks_that_need_one():
    _, tasks = load("odd_forms", form="Boxed", runtime={"type": "docker"})
    assert len(tasks) == 4
