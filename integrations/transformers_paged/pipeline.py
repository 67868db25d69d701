"""The text-generation pipeline with many prompts in flight: the task `paged-text-generation`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from transformers_paged.decoding import InFlight
from transformers_paged.model import enable, enabled

TASK = "paged-text-generation"


class PagedTextGenerationPipeline(TextGenerationPipeline):  # type: ignore[misc]
    """`TextGenerationPipeline` whose prompts share the engine's batches; inputs and results are the same.

    Lists, generators, datasets and chats run through a sliding window: up to `batch_size` prompts (by default as many
    as the engine takes) are in flight, nothing is padded, and results come in order. So up to that many inputs are
    read ahead. With a `streamer`, one prompt runs at a time.

    An input that fails raises its error in its place. An iterator goes on with the next input after that; a list ends.
    With `return_exceptions=True` the error itself is the result, and nothing is raised.

    The model is enabled as by `enable(model, tokenizer, **engine_kwargs)`, unless it is already.
    """

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        now = enabled(self.model) if engine_kwargs is None else None
        self._paged = now or enable(self.model, self.tokenizer, **engine_kwargs or {})

    def __call__(self, text_inputs: Any, *, batch_size: int | None = None, **kwargs: Any) -> Any:
        """As `TextGenerationPipeline`."""
        most = batch_size or self._batch_size or self._paged.llm.config.max_num_seqs
        return super().__call__(text_inputs, batch_size=most, **kwargs)

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> _Results:
        """Called by the base class for everything but a single prompt; `num_workers` makes no difference."""
        postprocess_params = {**postprocess_params}
        returns_errors = postprocess_params.pop("return_exceptions", False)
        stages = _Stages(
            prepare=lambda item: self.preprocess(item, **preprocess_params),
            generate=lambda prepared: self.forward(prepared, **forward_params),
            finish=lambda outputs: self.postprocess(outputs, **postprocess_params),
        )
        most = 1 if forward_params.get("streamer") is not None else batch_size
        return _Results(inputs, stages, most, returns_errors)

    def run_single(
        self,
        inputs: Any,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """Called by the base class for a single prompt."""
        (result,) = self.get_iterator([inputs], 0, 1, preprocess_params, forward_params, postprocess_params)
        return result

    def _sanitize_parameters(
        self, return_exceptions: bool | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess_params, forward_params, postprocess_params = super()._sanitize_parameters(**kwargs)
        if return_exceptions is not None:
            postprocess_params["return_exceptions"] = return_exceptions
        return preprocess_params, forward_params, postprocess_params


class _Stages(NamedTuple):
    """What happens to an input; only `generate` runs beside others."""

    prepare: Callable[[Any], Any]
    generate: Callable[[Any], Any]
    finish: Callable[[Any], Any]


class _Results:
    """The results of some inputs. Each iteration starts anew, and reads nothing before its first step."""

    def __init__(self, inputs: Any, stages: _Stages, most_in_flight: int, returns_errors: bool) -> None:
        self._inputs = inputs
        self._stages = stages
        self._most_in_flight = most_in_flight
        self._returns_errors = returns_errors

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[Any]:
        inputs = self._inputs
        has_length = isinstance(inputs, Sized)  # as datasets have, some of which know no other end
        items = (inputs[index] for index in range(len(inputs))) if has_length else iter(inputs)
        ends_with_error = isinstance(inputs, list) and not self._returns_errors
        return _Window(items, self._stages, self._most_in_flight, self._returns_errors, ends_with_error)


class _Window:
    """Keeps a number of inputs in flight, in threads that only wait. Dropping or closing it aborts them."""

    def __init__(
        self, items: Iterator[Any], stages: _Stages, most_in_flight: int, returns_errors: bool, ends_with_error: bool
    ) -> None:
        self._items: Iterator[Any] | None = items
        self._stages = stages
        self._most_in_flight = most_in_flight
        self._returns_errors, self._ends_with_error = returns_errors, ends_with_error
        self._pending: deque[tuple[Future[Any], InFlight]] = deque()
        self._threads = ThreadPoolExecutor(most_in_flight, thread_name_prefix=TASK)

    def __iter__(self) -> _Window:
        return self

    def __next__(self) -> Any:
        while self._items is not None and len(self._pending) < self._most_in_flight:
            self._start_next(self._items)
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            return self._stages.finish(self._pending[0][0].result())
        except Exception as error:
            if self._returns_errors:
                return error
            if self._ends_with_error:
                self.close()
            raise
        finally:
            if self._pending:
                self._pending.popleft()

    def close(self) -> None:
        self._items = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._pending:
            self._pending.pop()[1].abort()

    def __del__(self) -> None:
        self.close()

    def _start_next(self, items: Iterator[Any]) -> None:
        """An error of the inputs themselves comes in its place too, and is the last that comes."""
        in_flight = InFlight()
        try:
            item = next(items)
        except StopIteration:
            self._items = None
            return
        except Exception as error:
            self._items = None
            self._pending.append((_failed(error), in_flight))
            return
        self._pending.append((self._started(item, in_flight), in_flight))

    def _started(self, item: Any, in_flight: InFlight) -> Future[Any]:
        try:
            prepared = self._stages.prepare(item)
        except Exception as error:
            return _failed(error)
        return self._threads.submit(in_flight.collect, self._stages.generate, prepared)


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


if TASK not in PIPELINE_REGISTRY.supported_tasks:
    PIPELINE_REGISTRY.register_pipeline(TASK, PagedTextGenerationPipeline, AutoModelForCausalLM, type="text")
