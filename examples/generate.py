"""Complete prompts with settings of their own, and look at more than the text.

python examples/generate.py
"""

from paged_backend import LLM, SamplingParams

with LLM("demo") as llm:
    greedy, sampled = llm.generate(
        ["The three primary colours are", "My favourite season is"],
        [
            SamplingParams(temperature=0, max_tokens=20, stop=["\n"]),
            SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, n=3, seed=7, logprobs=1),
        ],
    )

print(greedy.prompt + greedy.outputs[0].text)
for sample in sampled.outputs:
    average = sample.cumulative_logprob / len(sample.token_ids)
    print(f"{sampled.prompt}{sample.text!r}  (log-probability per token {average:.2f})")
