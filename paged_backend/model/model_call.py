"""How a model's forward is called: with what its signature takes, and no more."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

_CACHE_NAMES = (
    "cache",
    "cache_params",
    "past_key_values",
)  # since transformers 5.24; in some models, and in most before


class ModelCall:
    """Calls a model on ids and positions [B, S] and returns logits [R, V] of the rows wanted, of all if None.

    A row is a token, counted through the batch. Some models take no `position_ids`, no `logits_to_keep` or no cache,
    and some swallow an argument they do not know.
    """

    def __init__(self, model: nn.Module, *, position_offset: int | None = 0) -> None:
        """`position_offset` is the position of a sequence's first token; None: the model is not told any positions."""
        self._model = model
        self._position_offset = position_offset or 0
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = position_offset is not None and ("position_ids" in parameters or takes_any)
        self._takes_keep = "logits_to_keep" in parameters
        self._takes_use_cache = "use_cache" in parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[-1])

    def plain(self, input_ids: Tensor) -> Tensor:
        """Logits [S, V] of one sequence, as anybody would compute them."""
        logits: Tensor = self._model(input_ids=input_ids[None], **self._use_cache(False)).logits[0]
        return logits

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: Tensor | None = None,
        *,
        cache: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        given = self._use_cache(cache is not None)
        if cache is not None:
            given[self._cache_name] = cache
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        return self.with_arguments(input_ids, positions, keep, **given)[0]

    def with_arguments(
        self, input_ids: Tensor, positions: Tensor, keep: Tensor | None, **given: Any
    ) -> tuple[Tensor, Any]:
        """The logits, and all that the model returned. Of several sequences with several tokens, `keep` has the same
        ones of each."""
        if self._takes_positions:
            given["position_ids"] = positions + self._position_offset if self._position_offset else positions
        num_sequences, num_new = input_ids.shape
        if self._takes_keep and keep is not None and (num_sequences == 1 or num_new > 1):
            given["logits_to_keep"] = keep[: len(keep) // num_sequences]
        output = self._model(input_ids=input_ids, **given)
        rows: Tensor = output.logits.reshape(-1, output.logits.shape[-1])
        is_whole = keep is not None and rows.shape[0] == input_ids.numel() > keep.shape[0]
        return rows[keep] if is_whole else rows, output

    def _use_cache(self, wanted: bool) -> dict[str, Any]:
        return {"use_cache": wanted} if self._takes_use_cache else {}
