"""LangChain on the demo model: a batch of questions in one engine, then one answer as it is written.

pip install -c constraints.txt -e ".[demo]" && python examples/langchain_chat.py
"""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_paged import ChatPaged

COUNTRIES = ["France", "Italy", "Japan", "Egypt", "Peru", "Kenya", "Norway", "India"]


def main() -> None:
    model = ChatPaged(model="demo", temperature=0, max_tokens=40)

    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}? Answer in one sentence.")])
    chain = prompt | model | StrOutputParser()
    answers = chain.batch([{"country": country} for country in COUNTRIES])
    for country, answer in zip(COUNTRIES, answers, strict=True):
        print(f"{country + ':':8} {answer}")

    print("\nStreamed: ", end="")
    usage = None
    for chunk in model.stream("Write one sentence about the sea."):
        print(chunk.content, end="", flush=True)
        usage = chunk.usage_metadata or usage
    print(f"\n{usage}")


if __name__ == "__main__":
    main()
