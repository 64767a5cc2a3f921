"""Google's SDK of Gemini: two tools side by side, a stream, tokens counted, results without ids."""

import json
import os

from google import genai
from google.genai import types

client = genai.Client()
task = json.loads(os.environ["TREEWISE_TASK"])
numbers = {"a": types.Schema(type=types.Type.INTEGER), "b": types.Schema(type=types.Type.INTEGER)}
add = types.FunctionDeclaration(
    name="add", description="Adds.", parameters=types.Schema(type=types.Type.OBJECT, properties=numbers)
)
config = types.GenerateContentConfig(
    system_instruction="You count.", tools=[types.Tool(function_declarations=[add])], max_output_tokens=200
)
talk = [types.Content(role="user", parts=[types.Part(text=task["question"])])]
assert client.models.count_tokens(model="policy", contents=talk).total_tokens > 0
while True:
    parts = []
    for chunk in client.models.generate_content_stream(model="policy", contents=talk, config=config):
        for candidate in chunk.candidates or ():
            parts += candidate.content.parts or []
    talk.append(types.Content(role="model", parts=parts))
    calls = [part.function_call for part in parts if part.function_call]
    if not calls:
        break
    results = [
        types.Part.from_function_response(name=call.name, response={"result": sum(call.args.values())})
        for call in calls
    ]
    talk.append(types.Content(role="user", parts=results))
talk.append(types.Content(role="user", parts=[types.Part(text="And again?")]))
last = client.models.generate_content(model="policy", contents=talk, config=config)
print(last.text, last.usage_metadata.total_token_count)
print(1.0)
