"""Agents for tests, of the standard library alone: right ones, and one for each way to go wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path


def call(text="1+2?", path="chat/completions", **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    if path != "chat/completions":
        body = more
    return post(path, body)


async def right(task):
    sys.stdout.write(f"thinking about {task['question']}\n")
    made = call(task["question"])
    call(path="reward", reward=0.25, call_id=made["id"])
    return float(len(made["choices"][0]["message"]["content"]))


def not_asynchronous(task):
    call(task["question"])
    return 2


async def with_client(task, client):
    made = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
    await client.reward(made.id, 0.5)
    return 1.0


def drawn(task):
    call(str(random.random()))
    return 1.0


def drawn_reward(task):
    call(task["question"])
    return random.random()


def raising(task):
    call()
    raise ValueError("no idea")


def half(task):
    """Fails where a draw says so, which its seed decides."""
    call(task["question"])
    if random.random() < 0.5:
        raise ValueError("odd")
    return 1.0


def exiting(task):
    call()
    sys.exit(3)


def leaving(task):
    call()
    os._exit(0)


def hanging(task):
    call()
    if "pid_file" in task:
        Path(task["pid_file"]).write_text(str(os.getpid()))
    time.sleep(600)


def silent(task):
    return 1.0


def nothing(task):
    call(task["question"])


def words(task):
    call()
    return "good"


def infinite(task):
    call()
    return float("inf")


def giving(task):
    """Returns what its task says."""
    call()
    return eval(task["reward"])


def sending(task):
    """Sends what its task says, as JSON, of itself or of its call; and whatever the answer is, nothing else."""
    made = call()
    more = {"call_id": made["id"]} if task["of_call"] else {}
    for reward in task["rewards"]:
        try:
            post("reward", {"reward": reward, **more})
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
    return 1.0 if task["of_call"] else None


def killed(task):
    call()
    os.kill(os.getpid(), signal.SIGKILL)


def flooding(task):
    while True:
        try:
            call()
        except urllib.error.HTTPError:
            continue


def chatty(task):
    call()
    for _ in range(3000):
        sys.stdout.write("x" * 1000 + "\n")
    return 1.0


def daemons(task):
    """Leaves a process of another session that goes on calling, and says its number."""
    call()
    program = (
        "import os, time\nopen(os.environ['TREEWISE_TASK_FILE'] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    path = Path(os.environ["TREEWISE_TASK_FILE"] + ".pid")
    while not (path.is_file() and path.read_text()):
        time.sleep(0.01)
    Path(task["pid_file"]).write_text(path.read_text())
    return 1.0


def lingering(task):
    """The same, and does not end."""
    daemons(task)
    time.sleep(600)


def threads_and_forks(task):
    """Calls of threads and of a forked process are this episode's."""
    threads = [threading.Thread(target=call, args=(f"thread {i}",)) for i in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    child = os.fork()
    if not child:
        call("fork")
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def lying(task):
    """With the key of another: nobody's."""
    key, os.environ["OPENAI_API_KEY"] = os.environ["OPENAI_API_KEY"], "tw-guessed"
    try:
        call()
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
    os.environ["OPENAI_API_KEY"] = key
    call()
    return 1.0


def chat(talk, **more):
    body = {"model": "m", "messages": talk, **more}
    return post("chat/completions", body)


def post(path, body):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as answer:
        read = answer.read()
    return read.decode() if body.get("stream") else json.loads(read)


def rewriting(task):
    """Does to its history whatever comes to mind."""
    system, user = {"role": "system", "content": "Count."}, {"role": "user", "content": task["question"]}
    again = {"role": "user", "content": "And?"}

    def turn_of(talk, **more):
        return chat(talk, **more)["choices"][0]["message"]

    def plain(turn):
        return {"role": "assistant", "content": turn["content"] or ""}

    first = turn_of([system, user])
    second = turn_of([system, user, first, again])
    turn_of([system, user, plain(first), again, second, again])  # goes on
    turn_of([system, user, {**plain(first), "content": (first["content"] or "")[:2]}, again])  # drops a part of a turn
    turn_of([{**system, "content": "Count well."}, user, first, again])  # edits the system prompt
    asked = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    used = [user, {"role": "assistant", "content": None, "tool_calls": [asked]}]
    turn_of([system, *used, {"role": "tool", "tool_call_id": "c1", "content": "123456"}])
    turn_of([system, *used, {"role": "tool", "tool_call_id": "c1", "content": "123"}])  # cuts a result
    turn_of([system, {"role": "user", "content": "So far: nothing."}])  # compacts
    chat([system, user, first, again], n=2, temperature=0.5)  # two choices, and the same messages again
    turn_of([user], model="other")  # a judge, which is not trained
    turn_of([{"role": "system", "content": "You help."}, user], max_tokens=1)  # a sub-agent
    post("chat/completions", {"model": "m", "messages": [system, user, first, again, second, user], "stream": True})
    side_by_side = [[system, user, first, {"role": "user", "content": f"side {number}"}] for number in range(3)]
    threads = [threading.Thread(target=turn_of, args=(talk,)) for talk in side_by_side]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    child = os.fork()
    if not child:
        turn_of([system, user, first, {"role": "user", "content": "from a fork"}])
        os._exit(0)
    os.waitpid(child, 0)
    return random.random()


def replying(task):
    """One call; the reward is 0, 0.5 or 1, by the letters of the reply."""
    return score([chat([{"role": "user", "content": task["question"]}])])


def talking(task):
    """Three turns that go on; what it says between them is decided by the reply."""
    talk, made = [{"role": "user", "content": task["question"]}], []
    for _ in range(3):
        made.append(chat(talk))
        turn = made[-1]["choices"][0]["message"]
        talk += [turn, {"role": "user", "content": "ab"[len(turn["content"] or "") % 2]}]
    return score(made)


def editing(task):
    """Goes on, then from half of its first turn, then with other words before it: three rows."""
    user, again = {"role": "user", "content": task["question"]}, {"role": "user", "content": "c"}
    made = [chat([user])]
    turn = made[0]["choices"][0]["message"]
    text = turn["content"] or ""
    made.append(chat([user, turn, again]))
    made.append(chat([user, {"role": "assistant", "content": text[: len(text) // 2]}, again]))
    made.append(chat([{"role": "user", "content": "d"}, turn, again]))
    return score(made)


def score(made):
    """Of the texts of all replies."""
    text = "".join(each["choices"][0]["message"]["content"] or "" for each in made)
    return sum(map(ord, text)) % 3 / 2


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"properties": {}}}}


def hostile(task):
    """Rewrites its history in twelve ways, calls with a key that it guesses, from a fork, and dies in the end where a
    draw says so."""
    system, user = {"role": "system", "content": "Count."}, {"role": "user", "content": task["question"]}
    again, asked = {"role": "user", "content": "And?"}, {"name": "add", "arguments": '{"a": 1}'}
    uses = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "c1", "function": asked}]}

    def turn_of(*talk, **more):
        return chat(list(talk), **more)["choices"][0]["message"]

    def said(text):
        return {"role": "assistant", "content": text}

    def result(text):
        return {"role": "tool", "tool_call_id": "c1", "content": text}

    first = turn_of(system, user)
    text = first["content"] or ""
    second = turn_of(system, user, first, again)
    turn_of(system, user, uses, result("123456"))
    turn_of({**system, "content": "Count well."}, user, first, again)  # 1: the system prompt
    turn_of(system, {**user, "content": "3+4?"}, first, again)  # 2: what the user asked
    turn_of(system, user, said(text[: len(text) // 2]), again)  # 3: half of a turn
    turn_of(system, user, said("Something else."), again)  # 4: a whole turn
    turn_of(system, user, said(text + "!"), again)  # 5: more than the turn was
    turn_of(system, user, uses, result("123"))  # 6: a result that is cut
    turn_of(system, user, uses, result("654321"))  # 7: another result
    turn_of(system, user, again, second, again)  # 8: a turn less
    turn_of(system, user, first, first, again)  # 9: a turn twice
    turn_of(system, again, second, user, first, again)  # 10: another order
    turn_of(system, {"role": "user", "content": "So far: nothing."})  # 11: a summary
    turn_of(system, user, first, again, tools=[ADD])  # 12: other tools
    turn_of(system, user, first, again, tools=[ADD])  # the same once more
    lying(task)
    child = os.fork()
    if not child:
        turn_of(system, user, first, {"role": "user", "content": "from a fork"})
        os._exit(0)
    os.waitpid(child, 0)
    if random.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    return random.random()


def outliving(task):
    """Answers before its own call has ended."""
    threading.Thread(target=call, daemon=True).start()
    time.sleep(float(task.get("seconds", 0.3)))
    return 1.0


if __name__ == "__main__":
    given = json.loads(os.environ["TREEWISE_TASK"])
    assert json.loads(Path(os.environ["TREEWISE_TASK_FILE"]).read_text()) == given
    made = call(given["question"])
    if sys.argv[1:] == ["file"]:
        Path(os.environ["TREEWISE_REWARD_FILE"]).write_text("0.75\n")
    elif sys.argv[1:] == ["fail"]:
        sys.stderr.write("it broke\n")
        sys.exit(4)
    elif sys.argv[1:] == ["words"]:
        sys.stdout.write("so good\n")
    elif sys.argv[1:] == ["huge"]:
        sys.stdout.write("1e39\n")
    elif sys.argv[1:] == ["huge-file"]:
        Path(os.environ["TREEWISE_REWARD_FILE"]).write_text(f"-{10**400}\n")
    elif sys.argv[1:] == ["sent"]:
        call(path="reward", reward=3.5)
    else:
        sys.stdout.write("some words\n0.5\n")
