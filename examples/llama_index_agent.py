"""A LlamaIndex agent on the demo model: a tool that it must call first, and an object that its answer must be.

pip install -c constraints.txt -e ".[demo,grammar,llama-index]" && python examples/llama_index_agent.py
"""

from __future__ import annotations

import asyncio
from typing import Literal

from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index.llms.paged import Paged


class City(BaseModel):
    city: Literal["Paris", "Oslo", "Lima"]


class Person(BaseModel):
    """Somebody whom a text is about."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather in a city now."""
    return {"Paris": "sunny, 21 degrees", "Oslo": "snow, -4 degrees", "Lima": "fog, 17 degrees"}[city]


async def main() -> None:
    model = Paged(model="demo", temperature=0, max_tokens=60)

    # A model as small as this one calls tools only if it must, and then with arguments that fit the schema. What it
    # says of the result is another matter: `return_direct` hands it out as it is.
    tool = FunctionTool.from_defaults(fn=weather, fn_schema=City, return_direct=True)
    agent = FunctionAgent(tools=[tool], llm=model, initial_tool_choice="weather", allow_parallel_tool_calls=False)
    handler = agent.run("What is the weather like in Oslo?")
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            print(f"{event.tool_name}({event.tool_kwargs}) -> {event.tool_output}")
    print(f"Agent: {await handler}")

    prompt = PromptTemplate("Who is this text about?\n\n{text}")
    texts = ["Anna is 31 years old and lives in Oslo.", "Tom, who is 8 years old, can already swim."]
    people = await asyncio.gather(*(model.astructured_predict(Person, prompt, text=text) for text in texts))
    for text, person in zip(texts, people, strict=True):
        print(f"{text}\n  {person!r}")


if __name__ == "__main__":
    asyncio.run(main())
