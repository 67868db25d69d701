"""A LangChain agent with two tools on the demo model, to the end of its loop.

A model this small does not choose its tools well, so a middleware chooses for it: first the one, then the other, then
the answer. What it calls them with is the model's own, kept to their schemas by a grammar.

pip install -c constraints.txt -e ".[demo]" langchain && python examples/langchain_agent.py
"""

from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool

from langchain_paged import ChatPaged

WEATHER = {"Oslo": "4 degrees and snow", "Rome": "22 degrees and sun"}
PLAN = ["find_city", "get_weather", "none"]
SENTENCE = {"regex": r"[A-Z][A-Za-z0-9 ,']{10,150}[.]"}  # lest the model writes a third call as text


@tool
def find_city(country: str) -> str:
    """Find the capital of a country."""
    return {"Norway": "Oslo", "Italy": "Rome"}.get(country, f"no capital of {country} is known, take Oslo")


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{city}: {WEATHER.get(city, 'no data, probably rain')}"


class FollowThePlan(AgentMiddleware):
    """Forces one tool after the other, then an answer in words."""

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        num_results = sum(isinstance(message, ToolMessage) for message in request.messages)
        settings = {"structured_outputs": SENTENCE} if PLAN[num_results] == "none" else {"parallel_tool_calls": False}
        return handler(request.override(tool_choice=PLAN[num_results], model_settings=settings))


def main() -> None:
    model = ChatPaged(model="demo", temperature=0, max_tokens=80)
    agent = create_agent(model, [find_city, get_weather], middleware=[FollowThePlan()])
    state = agent.invoke({"messages": [("user", "What is the weather in the capital of Norway?")]})
    for message in state["messages"]:
        message.pretty_print()


if __name__ == "__main__":
    main()
