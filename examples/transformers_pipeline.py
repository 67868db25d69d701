"""Hugging Face transformers on the engine: the pipeline that you have, then one that keeps many prompts in flight.

pip install -c constraints.txt -e ".[demo]" && python examples/transformers_pipeline.py
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

import transformers_paged
from paged_backend import demo_folder

COUNTRIES = ["France", "Italy", "Japan", "Egypt", "Peru", "Kenya", "Norway", "India"]


def main() -> None:
    name = str(demo_folder())  # or a folder of yours, or a hub id
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    chats = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in COUNTRIES]

    with transformers_paged.enable(model, tokenizer):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        for result in pipe(chats, batch_size=8, max_new_tokens=20, do_sample=False):
            question, answer = result[0]["generated_text"]
            print(f"{question['content']:36} {answer['content']}")

        print("\nA few words about the sea, as they come:")
        inputs = tokenizer(["The sea is"], return_tensors="pt")
        model.generate(**inputs, streamer=TextStreamer(tokenizer), max_new_tokens=30, do_sample=False)

        print("\nFrom a generator, answered side by side without padding:")
        paged = pipeline("paged-text-generation", model=model, tokenizer=tokenizer, device="cpu")
        for result in paged((chat for chat in chats[:4]), max_new_tokens=20, do_sample=False, return_full_text=False):
            print(result[0]["generated_text"])


if __name__ == "__main__":
    main()
