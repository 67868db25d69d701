"""Multiple choice by score: which answer does the model find most likely? Then the likeliest completions of a prompt.

python examples/score_choices.py
"""

from paged_backend import LLM, BeamSearchParams

QUESTIONS = {
    "The capital of France is": [" Paris.", " London.", " Tokyo."],
    "Water is made of hydrogen and": [" oxygen.", " iron.", " sand."],
    "The opposite of hot is": [" cold.", " green.", " Tuesday."],
}

with LLM("demo") as llm:
    scores_of_each = llm.score(list(QUESTIONS), list(QUESTIONS.values()))
    (beams,) = llm.beam_search("My favourite season is", BeamSearchParams(beam_width=4, max_tokens=8, n=3))

for (question, choices), scores in zip(QUESTIONS.items(), scores_of_each, strict=True):
    # Per token, so that long answers have a chance.
    choice, best = max(zip(choices, scores, strict=True), key=lambda pair: pair[1].logprob / pair[1].num_tokens)
    print(f"{question}{choice}  (log-probability {best.logprob:.2f}, greedy: {best.is_greedy})")

for output in beams.outputs:
    print(f"{beams.prompt}{output.text}  (score {output.score:.3f})")
