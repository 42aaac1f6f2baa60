"""argv: chat or responses."""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if sys.argv[1] == "chat" else "responses")


@function_tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


agent = Agent(name="adder", instructions="Use the tool.", tools=[add])
result = Runner.run_sync(agent, "What is 12 + 30?")
again = [*result.to_input_list(), {"role": "user", "content": "Are you sure?"}]
print(Runner.run_sync(agent, again).final_output)
