"""The task of configs/agent-products.toml through the OpenAI Agents SDK. stdin: a JSON list of
conversations; stdout: one of what was answered at their ends. argv: how the calculator is described
to the model, as JSON.
"""

import ast
import asyncio
import json
import operator
import sys

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    Runner,
    set_default_openai_api,
    set_tracing_disabled,
)

set_tracing_disabled(True)
set_default_openai_api("chat_completions")
SCHEMA = json.loads(sys.argv[1])["function"]
KNOWN = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node):
    if isinstance(node, ast.BinOp):
        return KNOWN[type(node.op)](value(node.left), value(node.right))
    return node.value


async def calculate(context, arguments):
    try:
        return str(value(ast.parse(str(json.loads(arguments)["expression"]), mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, OverflowError):
        return "Error: this is no arithmetic expression."


TOOL = FunctionTool(
    name=SCHEMA["name"],
    description=SCHEMA["description"],
    params_json_schema=SCHEMA["parameters"],
    on_invoke_tool=calculate,
    strict_json_schema=False,
)


def items(messages):
    """As the SDK has them: calls and their results are entries of their own."""
    for message in messages:
        if message["role"] == "tool":
            named = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "function_call_output", **named}
        elif message["content"]:
            yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


async def answer(messages, limit):
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    agent = Agent(name="products", instructions=system, tools=[TOOL])
    async with limit:
        try:
            result = await Runner.run(agent, list(items(messages)), max_turns=2)
        except MaxTurnsExceeded:
            return ""
    return str(result.final_output)


async def main():
    limit = asyncio.Semaphore(8)
    asked = json.load(sys.stdin)
    print(json.dumps(await asyncio.gather(*(answer(each, limit) for each in asked))))


asyncio.run(main())
