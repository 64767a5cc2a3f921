"""The agent of examples/box_agent.py on the standard library alone, which runs anywhere."""

import json
import os
import urllib.request

INSTRUCTIONS = "Use the tools, then answer with one word."
TOOLS = {"box_of": ("person", "The number of a person's box."), "look_in": ("box", "What lies in a box.")}


def run(task):
    found = {"box_of": ("boxes", "nobody"), "look_in": ("things", "nothing")}
    talk = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task["question"]}]
    for _ in range(4):
        turn = ask(talk)
        talk.append(turn)
        if not turn.get("tool_calls"):
            return float((turn["content"] or "").strip() == task["answer"])
        for call in turn["tool_calls"]:
            column, missing = found[call["function"]["name"]]
            (word,) = json.loads(call["function"]["arguments"]).values()
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": task[column].get(word, missing)})
    return 0.0


def ask(talk):
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": {"properties": {given: {"type": "string"}}}},
        }
        for name, (given, text) in TOOLS.items()
    ]
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": talk, "tools": tools}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answer:
        return json.loads(answer.read())["choices"][0]["message"]
