"""transformers: `generate` on one padded batch, or `generate_batch`, its continuous batching (`--options`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import protocol

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load(folder: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
    pad = tokenizer.pad_token_id

    def rendered(conversations: list[protocol.Conversation]) -> list[str]:
        return [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]

    @torch.inference_mode()
    def static_batch(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        batch = tokenizer(rendered(conversations), return_tensors="pt", padding=True, add_special_tokens=False)
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        ids = model.generate(**batch, **length, do_sample=False, pad_token_id=pad)
        num_rows, width = batch["input_ids"].shape
        return int(batch["attention_mask"].sum()), num_rows * (ids.shape[1] - width)

    @torch.inference_mode()
    def generate_batch(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        config = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=pad
        )
        inputs = tokenizer(rendered(conversations), add_special_tokens=False)["input_ids"]
        outputs = model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False)
        return sum(map(len, inputs)), sum(len(output.generated_tokens) for output in outputs.values())

    settings = {"dtype": precision, "attn_implementation": model.config._attn_implementation}
    if options.get("generate_batch"):
        return protocol.Engine(generate_batch, settings)
    return protocol.Engine(static_batch, settings)


if __name__ == "__main__":
    protocol.serve("transformers", load)
