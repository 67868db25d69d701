"""How a beam search goes on and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from paged_backend.errors import InvalidRequestError
from paged_backend.fields import Checker, rejects_unknown_arguments
from paged_backend.sampling_params import SamplingParams

MAX_BEAM_WIDTH = 1024
_OF_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Fields that mean what they mean in `SamplingParams`."""


@rejects_unknown_arguments(InvalidRequestError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How a beam search goes on and when it ends; frozen, and checked once, here.

    Names follow vLLM; what they mean, and the scores, are those of transformers' `generate(num_beams=beam_width,
    max_new_tokens=max_tokens, do_sample=False)`. Raises `InvalidRequestError` that names the field, its value and its
    limit.
    """

    beam_width: int
    """How many unfinished outputs are pursued at a time, and how many finished ones are kept; 1 to 1024."""
    max_tokens: int
    """Most tokens to generate."""
    n: int | None = None
    """How many of the best outputs to return, at most `beam_width`; None: all. Fewer come back if constraints leave no
    more."""
    length_penalty: float = 1.0
    """An output's score is its log-probability / (number of its generated tokens, the end token too) **
    `length_penalty`, from -10 to 10: above 0 favours long outputs, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """When `beam_width` outputs are finished: True ends the search; False ends it if the best unfinished one, at its
    present length, does not score better than the worst of them; `"never"` ends it only if that cannot change with more
    tokens."""
    temperature: float = 0.0
    """0, since beam search draws nothing; vLLM's field."""
    min_tokens: int = 0
    """End tokens are masked until this many are generated."""
    ignore_eos: bool = False
    """Generate past the model's end tokens."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end an output, besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the text of a token of `stop_token_ids` at the end of the output."""
    repetition_penalty: float = 1.0
    """> 0; multiplies the log-probabilities of tokens in the prompt or the output, as transformers does."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        check = Checker(InvalidRequestError, self)
        check.integer("beam_width", 1, MAX_BEAM_WIDTH)
        check.integer("max_tokens", 1)
        check.integer("n", 1, self.beam_width, optional=True)
        check.number("length_penalty", -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            check.fail("early_stopping", "True, False or 'never'")
        check.number("temperature", 0.0, 0.0)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """What the rest of the engine must know: when an output ends, which tokens may come, how its text is made."""
        values = {name: getattr(self, name) for name in _OF_SAMPLING}
        return SamplingParams(n=self.n or self.beam_width, temperature=0.0, **values)
