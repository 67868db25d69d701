"""When a sequence ends by its ids. (Stop strings are searched in the text: see detokenizer.py.)"""

from __future__ import annotations

from paged_backend.engine.request import FinishReason, Sequence
from paged_backend.sampling_params import RepetitionDetection

StopVerdict = tuple[FinishReason | None, int | None]


def stop_after(sequence: Sequence, max_len: int, *, is_complete: bool = False) -> StopVerdict:
    """Whether the newest token was the last one, and the stop token id if the user named it.

    `is_complete` says that the sequence's grammar allows no other token, however few there are.
    """
    request, params = sequence.request, sequence.request.params
    token_id, num_output_tokens = sequence.token_ids[-1], sequence.num_output_tokens
    if not (is_complete or token_id in request.end_token_ids or params.repetition_detection is not None):
        return (None, None) if num_left_of(sequence, max_len) > 0 else (FinishReason.LENGTH, None)
    if num_output_tokens > params.min_tokens:
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
        if not params.ignore_eos and token_id in request.eos_token_ids:
            return FinishReason.STOP, None
        detection = params.repetition_detection
        if not is_complete and detection is not None and repeats_itself(_tail(sequence, detection), detection):
            return FinishReason.REPETITION, None
    if is_complete:
        return FinishReason.STOP, None
    if num_left_of(sequence, max_len) <= 0:
        return FinishReason.LENGTH, None
    return None, None


def num_left_of(sequence: Sequence, max_len: int) -> int:
    """Most tokens that the sequence may still get."""
    return min(sequence.request.max_tokens + sequence.num_prompt_tokens, max_len) - len(sequence.token_ids)


def _tail(sequence: Sequence, detection: RepetitionDetection) -> list[int]:
    """As much of the output as the longest repetition takes."""
    longest = detection.max_pattern_size * detection.min_count
    return sequence.token_ids[max(sequence.num_prompt_tokens, sequence.num_tokens - longest) :]


def repeats_itself(token_ids: list[int], detection: RepetitionDetection) -> bool:
    """Whether the ids end in one pattern, `min_count` times in a row."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        num_needed = size * detection.min_count
        if num_needed > len(token_ids):
            return False
        tail = token_ids[-num_needed:]
        if tail == tail[:size] * detection.min_count:
            return True
    return False
