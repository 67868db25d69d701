"""The rows of a `generate` call through the engine, to the tensors that transformers' own loop would return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend import LLM, EngineError, RequestHandle, SamplingParams
from transformers_paged.call import Call
from transformers_paged.rows import Row

T = TypeVar("T")


class InFlight:
    """The requests of the `generate` calls inside `collect`, for whoever wants to end them from another thread."""

    current: ContextVar[InFlight | None] = ContextVar("transformers_paged_in_flight", default=None)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[RequestHandle] = []
        self._is_aborted = False

    def collect(self, function: Callable[..., T], *args: Any) -> T:
        token = self.current.set(self)
        try:
            return function(*args)
        finally:
            self.current.reset(token)

    def add(self, handles: Sequence[RequestHandle]) -> None:
        with self._lock:
            self._handles += handles
            is_aborted = self._is_aborted
        if is_aborted:
            self.abort()

    def abort(self) -> None:
        with self._lock:
            self._is_aborted = True
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.abort()


def decode(llm: LLM, call: Call, params: Sequence[SamplingParams], rows: Sequence[Row]) -> Any:
    """Ids [rows, L + T], or a GenerateDecoderOnlyOutput. An error in a logits processor is raised as it was."""
    step_by_step = bool(call.criteria) or call.streamer is not None
    handles: list[RequestHandle] = []
    try:
        for row, one in enumerate(params):
            prompt = {"prompt_token_ids": call.token_ids(call.prompt_of(row))}
            interval = 1 if step_by_step else call.max_new_tokens  # no news before the end
            handles.append(llm.submit(prompt, one.replace(stream_interval=interval), lora_request=call.lora_request))
        if (in_flight := InFlight.current.get()) is not None:
            in_flight.add(handles)
        if step_by_step:
            token_ids = _Lockstep(call, rows, handles).run()
        else:
            token_ids = [handle.result().outputs[0].token_ids for handle in handles]
    except EngineError:
        for error in (row.error for row in rows if row.error is not None):
            raise error from None
        raise
    finally:
        for handle in handles:
            handle.close()
    return _output(call, token_ids, rows)


class _Lockstep:
    """Reads all rows token by token, as transformers' loop makes them, for its stopping criteria and its streamer.

    The engine may be ahead of the reader: what it made after a row's end is dropped, and its request aborted.
    """

    def __init__(self, call: Call, rows: Sequence[Row], handles: Sequence[RequestHandle]) -> None:
        self._call = call
        self._rows = rows
        self._readers = [_Reader(handle) for handle in handles]
        self._input_ids = call.input_ids
        self._token_ids: list[list[int]] = [[] for _ in range(call.num_rows)]
        self._scores: tuple[Tensor, ...] | None = () if call.captures("output_scores") else None
        self._is_unfinished = [True] * call.num_rows

    def run(self) -> list[list[int]]:
        """The ids that each row has got."""
        while any(self._is_unfinished):
            self._step()
        return self._token_ids

    def _step(self) -> None:
        call, readers, pads = self._call, self._readers, self._call.pads_finished_rows
        reading = [is_unfinished or not pads for is_unfinished in self._is_unfinished]
        tokens = [call.pad_token_id] * len(reading)
        for row in (row for row, is_read in enumerate(reading) if is_read):
            tokens[row] = next(readers[row])
            self._token_ids[row].append(tokens[row])
        new_ids = torch.tensor(tokens, device=self._input_ids.device)
        self._input_ids = torch.cat([self._input_ids, new_ids[:, None]], dim=1)
        self._end_rows(tokens)
        if call.streamer is not None:
            call.streamer.put(new_ids.cpu())
        for row, is_unfinished in enumerate(self._is_unfinished):
            if not is_unfinished and pads:
                readers[row].close()

    def _end_rows(self, tokens: list[int]) -> None:
        call, num_new = self._call, len(max(self._token_ids, key=len))
        if self._scores is not None:
            self._scores += (_stacked(self._rows, "scores", num_new - 1),)
        stops = call.criteria(self._input_ids, self._scores).tolist()
        for row, (token, stop) in enumerate(zip(tokens, stops, strict=True)):
            if stop or token in call.eos_token_ids or num_new >= call.max_new_tokens:
                self._is_unfinished[row] = False


class _Reader:
    """The tokens of one request, one by one."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._token_ids: list[int] = []

    def __next__(self) -> int:
        while not self._token_ids:
            self._token_ids = next(self._handle).outputs[0].token_ids[::-1]
        return self._token_ids.pop()

    def close(self) -> None:
        self._handle.close()


def _output(call: Call, token_ids: list[list[int]], rows: Sequence[Row]) -> Any:
    num_new = max(map(len, token_ids))
    padded = [ids + [call.pad_token_id] * (num_new - len(ids)) for ids in token_ids]
    new_ids = torch.tensor(padded, dtype=torch.long, device=call.prompts.device)
    sequences = torch.cat([call.input_ids.long(), new_ids], dim=1)
    if not call.config.return_dict_in_generate:
        return sequences
    captured = {
        name: tuple(_stacked(rows, name, step) for step in range(num_new))
        for name in ("scores", "logits")
        if call.captures(f"output_{name}")
    }
    return GenerateDecoderOnlyOutput(sequences=sequences, **captured)


def _stacked(rows: Sequence[Row], name: str, step: int) -> Tensor:
    """[rows, V] of one step, with zeros for rows that had ended before."""
    kept: list[Tensor | None] = [getattr(row, name).get(step) for row in rows]
    some = next(tensor for tensor in kept if tensor is not None)
    return torch.stack([torch.zeros_like(some) if tensor is None else tensor for tensor in kept])
