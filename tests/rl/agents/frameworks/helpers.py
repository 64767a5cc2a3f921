"""A sampler that uses the tools that a prompt shows, as their framework wants them; an agent's episodes on it."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from tests.rl.agents.helpers import Speaker, episodes_on
from treewise.rl.agents.endpoint import Endpoint, listening
from treewise.rl.agents.running import AgentRunner


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


BEGUN = called("x").partition("x")[0]  # of a call that was asked for
ADDS = "\n".join((called("add", a=1, b=2), called("add", a=3, b=4)))
TWO = "Let me see.\n" + ADDS


@dataclass
class ToolUser(Speaker):
    """Says what `say` makes of a prompt and its last message, as `user\\n1+2?`; of a call that is begun, the rest."""

    say: Callable[[str, str], str] = str

    def _one(self, request):
        prompt = self.tokenizer.decode(list(request.prefix_ids))
        *_, last, turn = prompt.split("<|im_start|>")
        text = self.say(prompt, last)
        self.texts = [text.removeprefix(BEGUN) if turn.endswith(BEGUN) else text]
        return super()._one(request)


@contextmanager
def runner_on(speaker, command, **settings):
    with episodes_on(speaker, **settings) as episodes, listening(Endpoint(episodes)) as url:
        runner = AgentRunner(command, url, episodes, seconds=120.0)
        try:
            yield runner
        finally:
            runner.close()
