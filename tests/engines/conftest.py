"""Two real servers, and the run that nothing happens to."""

import pytest

from tests.engines.runs import HEADS, at_calls, run
from tests.engines.vllm_server import VllmServer
from tests.rl.online.helpers import TOKENIZER, tiny_policy


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    folder, logs = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("logs")
    tiny_policy(**HEADS).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    found = [VllmServer(folder, logs) for _ in range(2)]
    try:
        for each in found:
            each.start()
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            each.kill()


@pytest.fixture(scope="session")
def undisturbed(servers, tmp_path_factory):
    """The run, and the number of its calls for completions."""
    with at_calls({}) as calls:
        trainer = run(tmp_path_factory.mktemp("whole") / "run", servers[0])
    return trainer, len(calls)
