"""Sampled tokens to what the reader of a request gets: text, log-probabilities, the reason for the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from paged_backend.engine.detokenizer import Detokenizer, whole_text
from paged_backend.engine.incremental_text import Decode
from paged_backend.engine.request import FinishReason, Request, Sequence
from paged_backend.outputs import CompletionOutput, Logprob, TokenLogprobs

RawLogprobs = dict[int, tuple[float, int]]
"""Token id to (log-probability, rank)."""
_NO_IDS = frozenset[int]()


class SampledToken(Protocol):
    """What the sampler returns for each row."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprobs(self) -> RawLogprobs | None: ...
    @property
    def is_complete(self) -> bool: ...


class TextDecoder(NamedTuple):
    """The ways a tokenizer turns ids into text."""

    without_special: Decode
    with_special: Decode
    with_special_unspaced: Decode | None = None
    """Without the spaces that slow tokenizers put between special tokens."""
    special_ids: frozenset[int] = frozenset()
    """What `without_special` leaves out."""
    bytes_of: Callable[[frozenset[int]], Mapping[int, bytes]] | None = None
    """For tokenizers that do nothing but join their tokens' bytes: ids to leave out -> the bytes of each id."""

    def keeping(self, kept: frozenset[int]) -> Decode:
        """`without_special`, but for these ids."""
        dropped = self.special_ids - kept
        decode = self.with_special_unspaced or self.with_special
        return lambda ids: decode([token_id for token_id in ids if token_id not in dropped])


class SequenceOutput:
    """What one sequence has produced and its reader has not got yet."""

    __slots__ = ("cumulative_logprob", "detokenizer", "logprobs", "num_sent")

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.num_sent = 0
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0


class OutputProcessor:
    """Keeps each sequence's text; a sequence whose text nobody needs before its end is decoded once, at the end."""

    def __init__(self, decoder: TextDecoder | None) -> None:
        self._decoder = decoder
        self._token_texts: dict[int, str] = {}

    def append(self, sequence: Sequence, token: SampledToken) -> str | None:
        """Take note of the sequence's newest token; returns the stop string it completes, if any."""
        output: SequenceOutput | None = sequence.output
        if output is None:
            output = sequence.output = SequenceOutput(self._detokenizer(sequence.request))
        if token.logprobs is not None:
            output.logprobs.append(self.named(token.logprobs))
            output.cumulative_logprob += token.logprobs[token.token_id][0]
        if output.detokenizer is None or _is_hidden_end(sequence):
            return None
        return output.detokenizer.append(token.token_id)

    def emit(self, sequence: Sequence) -> CompletionOutput | None:
        """What is new since the last call, or None if it is not time yet."""
        request, params = sequence.request, sequence.request.params
        is_finished = sequence.finish_reason is not None
        if request.final_only and not is_finished:
            return None
        output: SequenceOutput = sequence.output or SequenceOutput(None)
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + output.num_sent :]
        if not is_finished and len(token_ids) < params.stream_interval:
            return None
        text = self._take_text(sequence, output)
        if not (is_finished or text or token_ids):
            return None
        output.num_sent += len(token_ids)
        logprobs, output.logprobs = output.logprobs, []
        cumulative_logprob = None if params.logprobs is None else output.cumulative_logprob
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=sequence.hypothesis.logprob if sequence.hypothesis else cumulative_logprob,
            logprobs=None if params.logprobs is None else logprobs,
            finish_reason=sequence.finish_reason and sequence.finish_reason.value,
            stop_reason=sequence.stop_reason,
            score=sequence.hypothesis.score if sequence.hypothesis else None,
        )

    def named(self, logprobs: RawLogprobs) -> TokenLogprobs:
        """The same with each token's text."""
        return {token: Logprob(value, rank, self._token_text(token)) for token, (value, rank) in logprobs.items()}

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.params
        if self._decoder is None or not params.detokenize or (request.final_only and not params.stop):
            return None
        return Detokenizer(
            self._decode_of(request),
            bytes_of=self._bytes_of(request),
            stop=params.stop or (),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _decode_of(self, request: Request) -> Decode:
        assert self._decoder is not None
        if request.params.skip_special_tokens:
            kept = request.markup.kept_special_ids
            return self._decoder.keeping(kept) if kept else self._decoder.without_special
        if request.params.spaces_between_special_tokens or self._decoder.with_special_unspaced is None:
            return self._decoder.with_special
        return self._decoder.with_special_unspaced

    def _bytes_of(self, request: Request) -> Mapping[int, bytes] | None:
        """What `_decode_of` joins, if that is all that it does."""
        if self._decoder is None or self._decoder.bytes_of is None:
            return None
        skips = request.params.skip_special_tokens
        return self._decoder.bytes_of(self._decoder.special_ids - request.markup.kept_special_ids if skips else _NO_IDS)

    def _take_text(self, sequence: Sequence, output: SequenceOutput) -> str:
        request = sequence.request
        if output.detokenizer is not None:
            if sequence.finish_reason is not None:
                output.detokenizer.finish()
            return output.detokenizer.take()
        if self._decoder is None or not request.params.detokenize or sequence.finish_reason is None:
            return ""
        end = sequence.num_tokens - _is_hidden_end(sequence)
        return whole_text(self._decode_of(request), sequence.token_ids[sequence.num_prompt_tokens : end])

    def _token_text(self, token_id: int) -> str | None:
        """The token decoded on its own, with its leading space, which some decoders drop at the start of a text."""
        if self._decoder is None:
            return None
        text = self._token_texts.get(token_id)
        if text is None:
            decode: Callable[[list[int]], str] = self._decoder.with_special
            text = self._token_texts[token_id] = decode([token_id, token_id])[len(decode([token_id])) :]
        return text


def _is_hidden_end(sequence: Sequence) -> bool:
    """Whether the newest token ended the sequence by its id, and so is no part of the text."""
    request = sequence.request
    if sequence.finish_reason is not FinishReason.STOP or isinstance(sequence.stop_reason, str):
        return False
    if request.params.include_stop_str_in_output and sequence.stop_reason is not None:
        return False
    return sequence.token_ids[-1] in request.end_token_ids
