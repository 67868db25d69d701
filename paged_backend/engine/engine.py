"""One step of the engine: schedule, run the model, sample, update, write text; or launch one while another runs."""

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


class Draws(Protocol):
    """Tokens that a device is drawing."""

    @property
    def tokens(self) -> Any:
        """What a runner finds them in, by their rows, as long as nobody else knows them."""
        ...

    def result(self) -> Iterable[SampledToken | Exception]:
        """The same as from `sample`; waits for the device."""
        ...


class Sampler(Protocol):
    """Chooses tokens."""

    def sample(self, logits: Any, sequences: list[Sequence]) -> Iterable[SampledToken | Exception]:
        """The next token of each sequence, or what ends its request; logits has one row for each."""
        ...

    def start(self, logits: Any, sequences: list[Sequence]) -> Draws | None:
        """The same without waiting; None, and nothing done, if a sequence's next draw depends on this one's token, in
        other ways than through the model. Called only where steps are scheduled asynchronously."""
        ...

    def candidates(self, logits: Any, sequences: list[Sequence], nums: list[int]) -> list[list[Candidate]]:
        """The `nums[i]` best next tokens of sequence *i*, best first, without those that must not come."""
        ...

    def prompt_logprobs(self, logits: Any, token_ids: list[int], num_logprobs: int) -> list[RawLogprobs]:
        """The log-probabilities of `token_ids`; row i of the logits predicts id i."""
        ...


class _Step(NamedTuple):
    """A step that was launched: what it computes, and who gets a token from its logits."""

    scheduled: SchedulerOutput
    logits: Any
    sampled: list[SampledSequence]
    beams: list[SampledSequence]
    draws: Draws | None
    """None: tokens are drawn when the step is completed."""

    @property
    def may_wait(self) -> bool:
        """Whether another step may be scheduled before this one is completed."""
        scheduled = self.scheduled
        return self.draws is not None and not (self.beams or scheduled.pools or scheduled.is_held_up)


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

    With asynchronous scheduling a step is launched before the tokens of the one before are known: it finds them on the
    device. What else is made of a token happens meanwhile, one step late: text, the end of its sequence, its block in
    the prefix cache. A sequence that has ended by then was computed once too often, and that token is dropped. Where
    tokens have to be known first, as for grammars, the step is completed before the next one is scheduled.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        *,
        is_asynchronous: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close` is called when nothing will be run any more."""
        self._is_asynchronous = is_asynchronous
        self._in_flight: _Step | None = None
        self._newest: SchedulerOutput | None = None
        """The step that was scheduled last."""
        self._since = 0.0
        """Until when the time of steps is counted."""
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
        return self._scheduler.has_work or self._in_flight is not None

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
        """Advance every scheduled sequence and return the news, those of the step in flight if there is one."""
        outputs = self._expire()
        if not self.has_work:
            return outputs
        self._since = time.monotonic()
        before, self._in_flight = self._in_flight, None
        scheduled = self._newest = self._scheduler.schedule()
        assert scheduled.scheduled or before is not None, "sequences wait, but none of them could be scheduled"
        step: _Step | None = None
        failure: Exception | None = None
        try:
            if scheduled.scheduled:
                step = self._launch(scheduled, before)
                outputs += self._emit_scored(scheduled)
        except EngineDeadError:
            raise
        except OutOfDeviceMemoryError as error:  # which only the runner raises, before anything has advanced
            outputs += self._without_memory(scheduled, error)
        except Exception as error:
            failure = error
        if before is not None:  # which may have ended requests of the step that failed
            self._complete(before, outputs)
        if failure is not None:
            outputs += self._fail_step(scheduled, failure)
        elif step is not None and step.may_wait:
            self._in_flight = step
        elif step is not None:
            self._complete(step, outputs)
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

    def _launch(self, scheduled: SchedulerOutput, before: _Step | None) -> _Step:
        if before is not None and before.draws is not None:
            scheduled.pending_tokens = before.draws.tokens
        logits = self._runner.execute(scheduled)
        self._collect_prompt_logprobs(scheduled, logits)
        sampled, beams = list[SampledSequence](), list[SampledSequence]()
        for item in self._scheduler.advance(scheduled):
            (sampled if item.sequence.request.beam_search is None else beams).append(item)
        draws = self._start(logits, sampled) if self._is_asynchronous and sampled else None
        return _Step(scheduled, logits if draws is None or beams else None, sampled, beams, draws)

    def _start(self, logits: Any, sampled: list[SampledSequence]) -> Draws | None:
        rows = self._runner.rows(logits, [row for _, row in sampled])
        draws = self._sampler.start(rows, [sequence for sequence, _ in sampled])
        if draws is not None:
            for row, (sequence, _) in enumerate(sampled):
                sequence.num_pending_tokens += 1
                sequence.pending_id = -1 - row
        return draws

    def _complete(self, step: _Step, outputs: list[EngineOutput]) -> None:
        """Make of a step's tokens what becomes of them, and add the news."""
        scheduled, logits, sampled, beams, draws = step
        num_sampled, position = len(beams), 0
        if draws is not None:
            for sequence, _ in sampled:
                sequence.num_pending_tokens -= 1
        try:
            self._name_candidates(logits, beams)
            if draws is not None:
                num_sampled += sum(sequence.status is not Status.FINISHED for sequence, _ in sampled)
                outputs += self._update(sampled, list(draws.result()))
                sampled = []
            while sampled:
                tokens = self._sample(logits, sampled)
                num_sampled += len(tokens)
                outputs += self._update(sampled, tokens)
                sampled, position = self._scheduler.accept(sampled, position), position + 1
        except EngineDeadError:
            raise
        except Exception as error:
            outputs += self._fail_step(scheduled, error)
            return
        outputs += self._move_beams(beams)
        now = time.monotonic()
        self._metrics.step(scheduled, num_sampled, now - self._since, self._scheduler)
        self._since = now

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
        return self._fail_requests(scheduled, reason)

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
        logger.error("a step of %d sequences failed", len(scheduled.scheduled), exc_info=error)
        return self._fail_requests(scheduled, error)

    def _fail_requests(self, scheduled: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """End the requests of a step."""
        if scheduled is self._newest:  # else it was computed, and its tokens alone have failed
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
