"""A process that runs a module and answers questions: lines of JSON on its standard input and output.

It imports what this process would, from the same paths. It ends with its standard input: when nobody holds it any more,
and when this process ends, however that happens.
"""

import itertools
import json
import queue
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from treewise.errors import TaskError

Answer = queue.SimpleQueue[dict[str, Any]]
Questions = queue.SimpleQueue[tuple[int, bytes] | None]
_Running = subprocess.Popen[bytes]


class Process:
    """Starts it. module: whose `__main__` part reads and answers. Several threads may ask."""

    def __init__(self, module: str) -> None:
        paths = [*sys.path, str(Path.cwd())]
        start = f"import runpy, sys; sys.path[:] = {paths!r}; runpy.run_module({module!r}, run_name='__main__')"
        self._process = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = itertools.count()
        self._answers: dict[int, Answer] = {}
        self._questions: Questions = queue.SimpleQueue()
        for work in (_write, _read):
            given = (self._process, self._questions, self._answers)
            threading.Thread(target=work, args=given, daemon=True, name="treewise-process").start()
        weakref.finalize(self, self._questions.put, None)

    def new_number(self) -> int:
        """One that was not given yet."""
        return next(self._numbers)

    def ask(self, question: str, /, **given: Any) -> Any:
        """The answer to a question.

        Raises:
            TaskError: the process answers with an error, or has ended.
        """
        found = self.tell(question, **given).get()
        if "error" in found:
            raise TaskError(found["error"])
        return found["value"]

    def tell(self, question: str, /, **given: Any) -> Answer:
        """Asks without waiting; where the answer will be. Finalizers may call it: nothing is locked."""
        number, answer = self.new_number(), Answer()
        self._answers[number] = answer
        self._questions.put(
            (number, json.dumps({"number": number, "question": question, "given": given}).encode() + b"\n")
        )
        return answer


def _write(process: _Running, questions: Questions, answers: dict[int, Answer]) -> None:
    assert process.stdin is not None
    while (question := questions.get()) is not None:
        number, line = question
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            answers.pop(number, Answer()).put(_ended(process))
    with suppress(OSError):
        process.stdin.close()


def _read(process: _Running, _: Questions, answers: dict[int, Answer]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            found = json.loads(line)
            answers.pop(found["number"]).put(found)
    process.wait()
    for number in list(answers):
        answers.pop(number, Answer()).put(_ended(process))


def _ended(process: _Running) -> dict[str, Any]:
    return {"error": f"its process has ended (exit code {process.wait()}); what it wrote stands above"}
