import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key=os.environ["OPENAI_API_KEY"]
)
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"name": "add", "description": "The sum.", "input_schema": schema}]
said = [{"role": "user", "content": "What is 12 + 30?"}]
for turn in range(4):
    sent = {"model": "m", "max_tokens": 64, "messages": said, "tools": tools}
    if turn % 2:
        with client.messages.stream(**sent) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**sent)
    said.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
        for block in message.content
        if block.type == "tool_use"
    ]
    said.append({"role": "user", "content": results or "Are you sure?"})
