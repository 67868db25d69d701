"""Several answers stream at once in one event loop; one of them is stopped early, which frees its memory.

python examples/async_streams.py
"""

import asyncio

from paged_backend import LLM, SamplingParams


async def answer(llm: LLM, question: str, most_chunks: int = 1000) -> str:
    text = ""
    params = SamplingParams(temperature=0, max_tokens=60)
    async with llm.astream_chat([{"role": "user", "content": question}], params) as stream:
        async for output in stream:
            text += output.outputs[0].text
            most_chunks -= 1
            if most_chunks == 0:
                return text + " [stopped]"
    return text


async def main() -> None:
    llm = await LLM.ashared("demo")
    answers = await asyncio.gather(
        answer(llm, "Why is the sky blue?"),
        answer(llm, "What do bees do all day?"),
        answer(llm, "Tell me a very long story.", most_chunks=10),
    )
    for text in answers:
        print("-", " ".join(text.split()))
    stats = llm.stats()
    print(f"{stats.largest_batch} answers shared steps; {stats.num_free_blocks} of {stats.num_blocks} blocks are free")


asyncio.run(main())
