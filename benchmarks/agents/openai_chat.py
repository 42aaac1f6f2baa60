import json

from openai import OpenAI

client, said = OpenAI(), [{"role": "user", "content": "What is 12 + 30?"}]
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
for _ in range(4):
    message = (
        client.chat.completions.create(model="m", messages=said, tools=[tool]).choices[0].message
    )
    said.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        total = sum(json.loads(call.function.arguments).values())
        said.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    if not message.tool_calls:
        said.append({"role": "user", "content": "Are you sure?"})
