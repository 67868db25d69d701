"""A real model answers through LangChain: one answer streamed, then eight at once in one paged KV cache.

python examples/quickstart.py
"""

import time

from langchain_paged import ChatPaged
from paged_backend import LLM

chat = ChatPaged(model="demo", temperature=0, max_tokens=60)

print("--- one answer, streamed")
for chunk in chat.stream("Give me three reasons to learn the guitar."):
    print(chunk.text, end="", flush=True)

print("\n\n--- eight answers, computed together")
places = ["Rome", "Cairo", "Lima", "Oslo", "Delhi", "Quito", "Dakar", "Kyoto"]
start = time.perf_counter()
answers = chat.batch([f"What is {place} known for? Answer in one sentence." for place in places])
seconds = time.perf_counter() - start
for place, answer in zip(places, answers, strict=True):
    print(f"{place:6} {' '.join(answer.text.split())}")

num_tokens = sum(answer.usage_metadata["output_tokens"] for answer in answers)
stats = LLM.shared("demo").stats()  # the engine that every ChatPaged of this model shares
print(
    f"\n{num_tokens} tokens in {seconds:.1f} s, up to {stats.largest_batch} requests in one step; "
    f"{stats.num_free_blocks} of {stats.num_blocks} KV-cache blocks are free again"
)
