"""OpenVINO GenAI's continuous batching, on a model that optimum-intel has converted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import protocol


def convert(model: Path, precision: str, converted: Path) -> None:
    optimum = Path(sys.executable).with_name("optimum-cli")
    command = [optimum, "export", "openvino", "-m", model, "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", precision, converted], check=True)


def load(model: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    import openvino_genai

    scheduler = {
        "cache_size": 2,  # GB
        "max_num_seqs": 256,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "dynamic_split_fuse": True,
    }
    scheduler_config = openvino_genai.SchedulerConfig()
    for name, value in scheduler.items():
        setattr(scheduler_config, name, value)
    device = {"INFERENCE_NUM_THREADS": threads, **options}
    pipe = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler_config, "CPU", device)
    tokenizer = pipe.get_tokenizer()

    def generate(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        config.apply_chat_template = False
        prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in conversations]
        results = pipe.generate(prompts, [config] * len(prompts))
        return (
            sum(result.perf_metrics.get_num_input_tokens() for result in results),
            results[0].perf_metrics.get_num_generated_tokens(),  # of the whole call
        )

    return protocol.Engine(generate, scheduler | device)


if __name__ == "__main__":
    protocol.serve("openvino-genai", load, convert)
