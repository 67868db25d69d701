"""Rotary frequencies that transformers chooses anew in each call, by the longest sequence in it: chosen once instead.

Otherwise one sequence of a batch would decide for all others, and keys in the cache would be turned by other
frequencies than the queries that meet them.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "default"


def freeze_frequencies(model: Any, max_model_len: int) -> None:
    """Give every sequence the frequencies of one that is `max_model_len` tokens long (longrope, dynamic NTK)."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_chosen_by_length(kinds):
            _freeze(module, kinds, None, max_model_len)
            module.rope_type = _FIXED
        elif isinstance(kinds, dict):  # one for each type of layer
            for layer_type, kind in kinds.items():
                if _is_chosen_by_length(kind):
                    _freeze(module, kind, layer_type, max_model_len)
            module.rope_type = {name: _FIXED if _is_chosen_by_length(kind) else kind for name, kind in kinds.items()}


def length_limits(rope_parameters: dict[str, Any], limit: int) -> tuple[int, int]:
    """What a model with such positions takes by default, and at most if asked to.

    `limit` is what its config says. Up to the first of both, frequencies are those that it was trained with.
    """
    kind = rope_parameters.get("rope_type")
    original = int(rope_parameters.get("original_max_position_embeddings") or limit)
    factor = float(rope_parameters.get("factor") or 1.0)
    if kind == "yarn":  # switched on by hand, as a rule without raising max_position_embeddings
        longest = max(limit, int(original * factor))
        return longest, longest
    if kind == "longrope":
        return original, max(limit, original)
    if kind == "dynamic":
        return limit, max(limit, int(limit * factor))
    return limit, limit


def _is_chosen_by_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _freeze(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(module, f"{prefix}inv_freq")
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    chosen, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, frequencies.device, seq_len=max_model_len, **arguments)
    setattr(module, f"{prefix}inv_freq", chosen.to(frequencies.dtype))
    setattr(module, f"{prefix}attention_scaling", scaling)
