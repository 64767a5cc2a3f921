"""Questions to a process: answers by number, errors by text, and what a process that ends leaves behind."""

import textwrap

import pytest

from treewise.errors import TaskError
from treewise.rl.tasks.of_others.verifiers_env.process import Process

ANSWERING = """
    import json, os, sys

    if __name__ == "__main__":
        held = []
        for line in sys.stdin:
            asked = json.loads(line)
            number, question, given = asked["number"], asked["question"], asked["given"]
            if question == "die":
                os._exit(3)
            if question == "hold":
                held.append(number)
                continue
            found = {"error": "no"} if question == "fail" else {"value": given}
            for each in (number, *held):
                print(json.dumps({"number": each, **found}), flush=True)
            held = []
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(textwrap.dedent(ANSWERING))
    monkeypatch.syspath_prepend(tmp_path)
    return Process("answering")


def test_answers_go_to_their_questions(process):
    later = process.tell("hold", a=1)
    assert process.ask("other", question=2) == {"question": 2}
    assert later.get(timeout=60)["value"] == {"question": 2}
    with pytest.raises(TaskError, match=r"^no$"):
        process.ask("fail")


def test_a_process_that_ended_is_an_error_for_all_who_wait(process):
    waits = process.tell("hold")
    with pytest.raises(TaskError, match=r"its process has ended \(exit code 3\)"):
        process.ask("die")
    assert "exit code 3" in waits.get(timeout=60)["error"]
    with pytest.raises(TaskError, match="exit code 3"):
        process.ask("anything")


def test_a_process_ends_when_nobody_holds_it(process):
    held = [Process("answering")]
    assert held[0].ask("other") == {}
    started = held.pop()._process
    assert started.wait(60) == 0
    assert process.ask("other") == {}
