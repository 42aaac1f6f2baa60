"""argv: whole or stream."""

import sys
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

warnings.simplefilter("ignore")
from langgraph.prebuilt import create_react_agent  # noqa: E402


@tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


model = ChatOpenAI(model="m", streaming=sys.argv[1] == "stream")
agent = create_react_agent(model, [add])
state = agent.invoke({"messages": [("user", "What is 12 + 30?")]})
agent.invoke({"messages": [*state["messages"], ("user", "Are you sure?")]})
