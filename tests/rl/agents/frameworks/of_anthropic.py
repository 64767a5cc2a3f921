"""The official SDK of Anthropic: two tools side by side, a stream."""

import json
import os

import anthropic

client = anthropic.Anthropic()
task = json.loads(os.environ["TREEWISE_TASK"])
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
given = {"model": "policy", "max_tokens": 200, "system": "You count."}
given["tools"] = [{"name": "add", "description": "Adds.", "input_schema": schema}]
talk = [{"role": "user", "content": task["question"]}]
while True:
    with client.messages.stream(messages=talk, **given) as stream:
        message = stream.get_final_message()
    talk.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        break
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(sum(use.input.values()))} for use in uses]
    talk.append({"role": "user", "content": results})
talk.append({"role": "user", "content": "And again?"})
print(client.messages.create(messages=talk, **given).content)
print(1.0)
