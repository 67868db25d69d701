"""Which ways to run a model are worth trying, best first, and what is known of the one that was right."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paged_backend.engine.kv_layout import KVLayout
from paged_backend.model.attention import LayerSpec
from paged_backend.model.kv_cache import KVShape
from paged_backend.model.tiers.step_cache import keeps_state


class Tier(enum.StrEnum):
    """How a step of several sequences is computed; docs/models.md says it at length."""

    PACKED = "packed"
    """All tokens in one row, through paged attention."""
    STATEFUL = "stateful"
    """Chunk by chunk and all single tokens together; paged attention, and a state per sequence."""
    GATHERED = "gathered"
    """As stateful, with the model's own attention over keys and values gathered from their pages."""
    OWN_CACHE = "own cache"
    """Sequence by sequence, each with a cache of the model's own."""


class Way(NamedTuple):
    """One attempt."""

    tier: Tier
    whole_prompts: bool = False
    """The model cannot go on from a part of a prompt but token by token."""
    position_offset: int | None = 0
    """What the position of a sequence's first token is; None: the model counts by its cache."""

    def __str__(self) -> str:
        prompts = ", whole prompts" if self.whole_prompts else ""
        offset = f", positions from {self.position_offset}" if self.position_offset else ""
        offset = ", positions of its own" if self.position_offset is None else offset
        return f"{self.tier}{prompts}{offset}"


def ways_to_run(model: Any) -> Iterator[Way]:
    """Those that could be right, by what the model looks like; a self-check decides."""
    if keeps_state(model.config):
        yield Way(Tier.STATEFUL)
        yield Way(Tier.STATEFUL, whole_prompts=True)
    else:
        yield Way(Tier.PACKED)
        offset = _position_offset(model)
        if offset is not None:
            yield Way(Tier.PACKED, position_offset=offset)
    yield Way(Tier.GATHERED)
    yield Way(Tier.OWN_CACHE)
    yield Way(Tier.OWN_CACHE, whole_prompts=True)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield Way(Tier.OWN_CACHE, position_offset=None)
        yield Way(Tier.OWN_CACHE, whole_prompts=True, position_offset=None)


def _position_offset(model: Any) -> int | None:
    """Embeddings in the manner of RoBERTa count positions from the padding token's id."""
    pad_token_id = getattr(model.config, "pad_token_id", None)
    counts = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    return pad_token_id + 1 if counts and isinstance(pad_token_id, int) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a model is run, and what that takes."""

    way: Way
    layers: dict[str, int]
    """Kinds of layers that keep something per token, and how many of each there are."""
    difference: float
    """Between this way and a plain run, in standard deviations of the logits."""
    bytes_per_token: int
    """In each rank, if there are several."""
    bytes_per_old_token: int
    """Of these, what stays of a token that is behind all windows."""
    bytes_per_sequence: int
    """What a sequence keeps whatever its length."""
    num_tokens: int
    """How many fit in the KV cache, in sequences of `max_model_len` tokens."""
    max_model_len: int
    layout: KVLayout
    """Which layers have block tables of their own, and how far they look back."""
    max_num_seqs: int
    """How many sequences may run at once."""
    keeps_state: bool
    """Whether a sequence has more than its pages, so that nobody can go on from another one's pages."""

    @property
    def explanation(self) -> str:
        """The tier in a few words."""
        return _EXPLANATIONS[self.way.tier]


_EXPLANATIONS = {
    Tier.PACKED: "all sequences in one row of tokens, paged attention",
    Tier.STATEFUL: "chunks one by one, single tokens together; paged attention, and a state per sequence",
    Tier.GATHERED: "chunks one by one, single tokens together; the model's own attention over gathered pages",
    Tier.OWN_CACHE: "sequences one by one, each with the model's own cache",
}


def kinds_of_layers(specs: Sequence[KVShape]) -> dict[str, int]:
    return dict(Counter(map(_kind, specs)))


def _kind(spec: Any) -> str:
    if spec.source is not None:
        return "another layer's keys and values"
    size = f"{spec.num_kv_heads} x {spec.head_size}"
    if not isinstance(spec, LayerSpec):
        return f"own attention, {size}"
    kind = f"window of {spec.window}" if spec.window else f"chunks of {spec.chunk}" if spec.chunk else "full"
    return f"{kind}, latent, {size}" if spec.latent else f"{kind}, {size}"
