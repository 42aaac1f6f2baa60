"""argv: tool or code."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> str:
    """The sum of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


model = OpenAIServerModel(
    "m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
kind = ToolCallingAgent if sys.argv[1] == "tool" else CodeAgent
kind(tools=[add], model=model, max_steps=3, verbosity_level=0).run("What is 12 + 30?")
