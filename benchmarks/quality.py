"""What each precision costs in quality: perplexity and first choices on a fixed text, against another precision's.

    python benchmarks/quality.py --precisions float32 bfloat16 int8 int4

The text, about 20,000 tokens in `benchmarks/data`, is half English, of books whose copyright has expired and of this
project's documents, and half Python, of this project, as they once were. It is read in pieces of `--length` tokens.
Every token's log-probability and the first choice before it come from the engine, by `prompt_logprobs`. A second
figure beside the choices: how sure the other precision was where they differ, which is small if it was a tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import Any

from paged_backend import LLM, SamplingParams
from rounds import versions

DATA = pathlib.Path(__file__).parent / "data"
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a model made of a text's tokens, all but the first of each piece."""

    logprobs: list[float]
    choices: list[int]
    margins: list[float]
    """By how much the first choice's log-probability is above the second's."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Reading) -> float:
        """The share of tokens before which both have the same first choice."""
        return sum(a == b for a, b in zip(self.choices, other.choices, strict=True)) / len(self.choices)

    def margin_of_disagreement(self, other: Reading) -> float:
        """The mean of the other's margins where the choices differ, 0 if they never do."""
        margins = [margin for a, b, margin in zip(self.choices, other.choices, other.margins, strict=True) if a != b]
        return sum(margins) / max(1, len(margins))


def read(model: str, precision: str, texts: dict[str, str], length: int, options: dict[str, Any]) -> dict[str, Reading]:
    with LLM(model, **PRECISIONS[precision] | {"enable_prefix_caching": False} | options) as llm:
        return {name: _read_text(llm, text, length) for name, text in texts.items()}


def _read_text(llm: LLM, text: str, length: int) -> Reading:
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    reading = Reading([], [], [])
    for piece, output in zip(pieces, llm.generate(pieces, params), strict=True):
        assert output.prompt_logprobs is not None
        for token_id, entries in zip(piece[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None
            first, second = sorted(entries.items(), key=lambda item: item[1].rank or 0)[:2]
            reading.logprobs.append(entries[token_id].logprob)
            reading.choices.append(first[0])
            reading.margins.append(first[1].logprob - second[1].logprob)
    return reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--against", default="bfloat16", choices=list(PRECISIONS), help="what they are compared with")
    parser.add_argument("--length", type=int, default=1024, help="tokens per piece")
    parser.add_argument("--num-tokens", type=int, help="only so many tokens, about, of each text")
    arguments = parser.parse_args()

    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.txt"))}
    if arguments.num_tokens:
        texts = {name: text[: 4 * arguments.num_tokens] for name, text in texts.items()}
    print(f"{versions()}, {arguments.model}, pieces of {arguments.length} tokens")
    readings: dict[str, dict[str, Reading]] = {}
    for precision in dict.fromkeys([arguments.against, *arguments.precisions]):
        readings[precision] = read(arguments.model, precision, texts, arguments.length, {})
        for name, reading in readings[precision].items():
            other = readings[arguments.against][name]
            print(
                f"{precision:9} {name:8} {len(reading.choices):6} tokens  perplexity {reading.perplexity:7.3f} "
                f"({100 * (reading.perplexity / other.perplexity - 1):+.2f} %)  "
                f"same first choice {100 * reading.agreement(other):6.2f} %  "
                f"margin where not {reading.margin_of_disagreement(other):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
