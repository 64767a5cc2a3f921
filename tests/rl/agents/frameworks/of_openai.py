"""The official SDK of OpenAI: two tools side by side, thinking that is dropped, a stream, two choices."""

import json
import os

import openai

client = openai.OpenAI()
task = json.loads(os.environ["TREEWISE_TASK"])
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
talk = [{"role": "system", "content": "You count."}, {"role": "user", "content": task["question"]}]
while True:
    message = client.chat.completions.create(model="policy", messages=talk, tools=tools).choices[0].message
    talk.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        total = sum(json.loads(call.function.arguments).values())
        talk.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
talk.append({"role": "user", "content": "And again?"})
with client.chat.completions.stream(model="policy", messages=talk) as stream:
    print(stream.get_final_completion().choices[0].message.content)
print(len(client.chat.completions.create(model="policy", messages=talk, n=2).choices))
print(1.0)
