"""One step of the engine: schedule, run the model, sample, update, write text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from paged_backend.engine.beam_search import Candidate
from paged_backend.engine.beams import conclude, move_on
from paged_backend.engine.kv_map import KVMap, kv_map
from paged_backend.engine.metrics import EngineMetrics, EngineStats
from paged_backend.engine.output_processor import OutputProcessor, RawLogprobs, SampledToken
from paged_backend.engine.request import FinishReason, Request, Sequence, Status
from paged_backend.engine.scheduler import OutOfDeviceMemoryError, SampledSequence, Scheduler, SchedulerOutput
from paged_backend.errors import EngineDeadError, EngineError, RequestTimeoutError
from paged_backend.outputs import CompletionOutput

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the model on what was scheduled."""

    def execute(self, output: SchedulerOutput) -> Any:
        """Logits [R, V]: for each scheduled sequence in order, those of its last `num_logits` tokens.

        Raises OutOfDeviceMemoryError, after the swaps to host memory, if fewer tokens may be computed for want of
        memory."""
        ...

    def rows(self, logits: Any, rows: list[int]) -> Any:
        """These rows of the logits, in this order; the sampler may overwrite the result."""
        ...


class Sampler(Protocol):
    """Chooses tokens."""

    def sample(self, logits: Any, sequences: list[Sequence]) -> Iterable[SampledToken | Exception]:
        """The next token of each sequence, or what ends its request; logits has one row for each."""
        ...

    def candidates(self, logits: Any, sequences: list[Sequence], nums: list[int]) -> list[list[Candidate]]:
        """The `nums[i]` best next tokens of sequence *i*, best first, without those that must not come."""
        ...

    def prompt_logprobs(self, logits: Any, token_ids: list[int], num_logprobs: int) -> list[RawLogprobs]:
        """The log-probabilities of `token_ids`; row i of the logits predicts id i."""
        ...


class EngineOutput(NamedTuple):
    """News of a request: something new in one of its outputs, or the error that ended it."""

    request: Request
    news: CompletionOutput | Exception


class Engine:
    """Owns the requests from their admission to their end; used by one thread.

    A step for which the device has no memory is scheduled anew, with half as many tokens. Any other error in a step
    ends the requests in that step; an error with one request's text, or in its own logits processors, ends that
    request. Either way their blocks are free again and the engine goes on. A runner that cannot go on raises
    EngineDeadError, which is passed on.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close` is called when nothing will be run any more."""
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._output_processor = output_processor
        self._requests: dict[str, Request] = {}
        self._timed: dict[str, Request] = {}
        """Those with a deadline."""
        self._metrics = EngineMetrics()
        self.close = close

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if request.deadline is not None:
            self._timed[request.request_id] = request
        self._scheduler.add_request(request)

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request; unknown and finished ids are fine."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.beam_search is not None:
            conclude(request, self._scheduler, FinishReason.ABORT)
            return self._emit(request.sequences)
        alive = [sequence for sequence in request.sequences if sequence.status is not Status.FINISHED]
        self._scheduler.finish_all(alive, FinishReason.ABORT)
        return self._emit(alive)

    def step(self) -> list[EngineOutput]:
        """Advance every scheduled sequence and return the news."""
        outputs = self._expire()
        if not self._scheduler.has_work:
            return outputs
        start = time.monotonic()
        scheduled = self._scheduler.schedule()
        assert scheduled.scheduled, "sequences wait, but none of them could be scheduled"
        try:
            logits = self._runner.execute(scheduled)
            self._collect_prompt_logprobs(scheduled, logits)
            advanced = self._scheduler.advance(scheduled)
            sampled, beams = list[SampledSequence](), list[SampledSequence]()
            for item in advanced:
                (sampled if item.sequence.request.beam_search is None else beams).append(item)
            self._name_candidates(logits, beams)
            num_sampled, position = len(beams), 0
            while sampled:
                tokens = self._sample(logits, sampled)
                num_sampled += len(tokens)
                outputs += self._update(sampled, tokens)
                sampled, position = self._scheduler.accept(sampled, position), position + 1
        except EngineDeadError:
            raise
        except OutOfDeviceMemoryError as error:  # which only the runner raises, before anything has advanced
            return outputs + self._without_memory(scheduled, error)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(scheduled.scheduled))
            return outputs + self._fail_step(scheduled, error)
        outputs += self._move_beams(beams)
        outputs += self._emit_scored(scheduled)
        self._metrics.step(scheduled, num_sampled, time.monotonic() - start, self._scheduler)
        return outputs

    def fail_all(self, error: Exception) -> list[EngineOutput]:
        """End every request with `error`."""
        return [output for request in list(self._requests.values()) for output in self._fail(request, error)]

    def reset_prefix_cache(self) -> None:
        sequences = (sequence for request in self._requests.values() for sequence in request.sequences)
        self._scheduler.kv_cache_manager.forget_prefixes(self._scheduler.running, sequences)

    def stats(self) -> EngineStats:
        return self._metrics.stats(self._scheduler)

    def kv_map(self, max_cells: int) -> KVMap:
        return kv_map(self._scheduler, self.stats(), max_cells)

    def _without_memory(self, scheduled: SchedulerOutput, error: OutOfDeviceMemoryError) -> list[EngineOutput]:
        """The step is to be scheduled anew, with fewer tokens, unless it had one only."""
        num_tokens = scheduled.num_tokens
        if self._scheduler.retry_with_less(scheduled):
            logger.warning("no memory for a step of %d tokens, trying again with half of them: %s", num_tokens, error)
            return []
        reason = EngineError(
            f"the device has no memory left even for a step of {num_tokens} token ({error}); lower kv_cache_memory or "
            "gpu_memory_utilization, or free memory that others have taken on it"
        )
        return self._fail_step(scheduled, reason)

    def _expire(self) -> list[EngineOutput]:
        now = time.monotonic()
        outputs: list[EngineOutput] = []
        for request in [one for one in self._timed.values() if one.deadline is not None and one.deadline <= now]:
            outputs += self._fail(request, timeout_error(request, now))
        return outputs

    def _sample(self, logits: Any, sampled: list[SampledSequence]) -> list[SampledToken | Exception]:
        rows = self._runner.rows(logits, [row for _, row in sampled])
        return list(self._sampler.sample(rows, [sequence for sequence, _ in sampled]))

    def _name_candidates(self, logits: Any, beams: list[SampledSequence]) -> None:
        if not beams:
            return
        rows = self._runner.rows(logits, [row for _, row in beams])
        searches = [sequence.request.beam_search for sequence, _ in beams]
        nums = [search.num_candidates for search in searches if search is not None]
        named = self._sampler.candidates(rows, [sequence for sequence, _ in beams], nums)
        for (sequence, _), candidates in zip(beams, named, strict=True):
            sequence.candidates = candidates

    def _move_beams(self, beams: list[SampledSequence]) -> list[EngineOutput]:
        now = time.monotonic()
        outputs: list[EngineOutput] = []
        for request in {sequence.request.request_id: sequence.request for sequence, _ in beams}.values():
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if move_on(request, self._scheduler):
                outputs += self._emit(request.sequences)
        return outputs

    def _collect_prompt_logprobs(self, scheduled: SchedulerOutput, logits: Any) -> None:
        """Each computed prompt token predicts the next one; called before the scheduler counts them as computed."""
        end_row = 0
        for sequence, num_tokens, num_logits in scheduled.scheduled:
            end_row += num_logits
            request = sequence.request
            if request.prompt_logprobs is None or request.first_logits is None or num_logits == 0:
                continue
            first = len(request.prompt_logprobs)
            token_ids = request.prompt_token_ids[first : sequence.num_computed_tokens + num_tokens + 1]
            start_row = end_row - num_logits
            rows = self._runner.rows(logits, list(range(start_row, start_row + len(token_ids))))
            num_logprobs = request.params.prompt_logprobs or 0
            named = map(self._output_processor.named, self._sampler.prompt_logprobs(rows, token_ids, num_logprobs))
            request.prompt_logprobs += named

    def _update(self, sampled: list[SampledSequence], tokens: list[SampledToken | Exception]) -> list[EngineOutput]:
        now = time.monotonic()
        outputs: list[EngineOutput] = []
        for (sequence, _), token in zip(sampled, tokens, strict=True):
            if sequence.status is Status.FINISHED:
                continue  # it failed a moment ago, with another sample of the same request
            if isinstance(token, Exception):
                outputs += self._fail_choice(sequence, token)
                continue
            metrics = sequence.request.metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            self._scheduler.update(sequence, token.token_id, is_complete=token.is_complete)
            outputs += self._write(sequence, token)
        return outputs

    def _emit_scored(self, scheduled: SchedulerOutput) -> list[EngineOutput]:
        """The news of those who wanted no tokens."""
        scored = (sequence.request for sequence, _, _ in scheduled.scheduled if sequence.request.max_tokens == 0)
        return [output for request in scored if request.is_finished for output in self._emit(request.sequences)]

    def _write(self, sequence: Sequence, token: SampledToken) -> list[EngineOutput]:
        try:
            stop = self._output_processor.append(sequence, token)
        except Exception as error:
            return self._fail_text(sequence, error)
        if stop is not None:
            # The text decides over the ids: a stop string in the last token allowed is the reason for the end.
            self._scheduler.finish(sequence, FinishReason.STOP)
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
        return self._emit([sequence])

    def _emit(self, sequences: list[Sequence]) -> list[EngineOutput]:
        """The news of sequences of one request."""
        outputs: list[EngineOutput] = []
        for sequence in sequences:
            try:
                news = self._output_processor.emit(sequence)
            except Exception as error:
                return outputs + self._fail_text(sequence, error)
            if news is not None:
                outputs.append(EngineOutput(sequence.request, news))
        if sequences and sequences[0].status is Status.FINISHED:
            self._forget_if_finished(sequences[0].request)
        return outputs

    def _fail_text(self, sequence: Sequence, error: Exception) -> list[EngineOutput]:
        request = sequence.request
        logger.error("the tokens of request %s could not be written as text", request.request_id, exc_info=error)
        return self._fail(request, engine_error("the output could not be decoded:", error))

    def _fail_choice(self, sequence: Sequence, error: Exception) -> list[EngineOutput]:
        """A logits processor raised, or the output cannot go on within its grammar."""
        request = sequence.request
        logger.error("the next token of request %s could not be chosen", request.request_id, exc_info=error)
        return self._fail(request, engine_error("the next token could not be chosen:", error))

    def _fail_step(self, scheduled: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        self._scheduler.kv_cache_manager.unpublish_step()
        for sequence in scheduled.preempted:  # whose way to host memory may have failed
            self._scheduler.kv_cache_manager.forget_swapped(sequence)
        requests = {sequence.request.request_id: sequence.request for sequence, _, _ in scheduled.scheduled}
        failures = ((request, engine_error("the step failed with", error)) for request in requests.values())
        return [output for request, failure in failures for output in self._fail(request, failure)]

    def _fail(self, request: Request, error: Exception) -> list[EngineOutput]:
        self._scheduler.finish_all(request.sequences, FinishReason.ERROR)
        if not self._forget(request):
            return []
        self._metrics.failed(error)
        return [EngineOutput(request, error)]

    def _forget_if_finished(self, request: Request) -> None:
        if request.is_finished and self._forget(request):
            request.metrics.finished_time = time.monotonic()
            self._metrics.finished(request)

    def _forget(self, request: Request) -> bool:
        """False if it was forgotten before."""
        self._timed.pop(request.request_id, None)
        return self._requests.pop(request.request_id, None) is not None


def timeout_error(request: Request, now: float) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"request {request.request_id} did not finish within its timeout "
        f"({now - request.metrics.arrival_time:.1f} s after arrival, "
        f"{sum(s.num_output_tokens for s in request.sequences if s.token_ids)} tokens generated)"
    )


def engine_error(what: str, cause: Exception) -> EngineError:
    error = EngineError(f"{what} {type(cause).__name__}: {cause}")
    error.__cause__ = cause.with_traceback(None)  # whose frames hold the engine
    return error
