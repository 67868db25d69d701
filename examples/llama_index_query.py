"""LlamaIndex on the demo model: an index, several questions in one engine at once, and one answer as it is written.

pip install -c constraints.txt -e ".[demo,llama-index]" && python examples/llama_index_query.py
"""

from __future__ import annotations

import asyncio

from llama_index.core import Document, Settings, VectorStoreIndex

from llama_index.embeddings.paged import PagedEmbedding
from llama_index.llms.paged import Paged

FACTS = [
    "The Amazon river is 6400 km long.",
    "The Eiffel tower is 330 m high.",
    "A blue whale weighs up to 190 tonnes.",
    "Mount Everest is 8849 m high.",
]
QUESTIONS = ["How long is the Amazon river?", "How high is the Eiffel tower?", "How much does a blue whale weigh?"]


async def main() -> None:
    # Both use the same engine. A model that was made for embeddings finds texts better than this one.
    Settings.llm = Paged(model="demo", temperature=0, max_tokens=40)
    Settings.embed_model = PagedEmbedding(model="demo", pooling="mean")
    Settings.tokenizer = Settings.llm.tokenizer

    index = VectorStoreIndex.from_documents([Document(text=fact) for fact in FACTS])
    engine = index.as_query_engine(similarity_top_k=2)
    answers = await asyncio.gather(*(engine.aquery(question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {answer}")

    print("\nStreamed: ", end="")
    async for response in await Settings.llm.astream_complete("Write one sentence about the sea."):
        print(response.delta, end="", flush=True)
    print(f"\n{response.raw['usage']}")


if __name__ == "__main__":
    asyncio.run(main())
