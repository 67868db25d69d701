"""How the memory for sequences is shared out between pages and what sequences keep besides."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.model import kv_cache

_STATES_SHARE = 1 / 2


class Room(NamedTuple):
    """For how much there is memory."""

    num_blocks: int
    max_num_seqs: int


def room_for(
    config: EngineConfig, block_bytes: int, state_bytes: int, max_model_len: int, device: torch.device
) -> Room:
    """As many blocks as fit and can be of use. What sequences keep besides pages, `state_bytes` each, takes half of the
    memory at most: it limits how many may run at once."""
    block_bytes = max(1, block_bytes)  # a model without attention needs blocks only to count by
    if not state_bytes:
        return Room(kv_cache.num_blocks_for(config, block_bytes, max_model_len, device), config.max_num_seqs)
    memory = kv_cache.memory_for(config, device)
    num_states = min(int(memory * _STATES_SHARE) // state_bytes, config.max_num_seqs)
    if num_states < 1:
        raise ConfigError(
            f"kv_cache_memory={config.kv_cache_memory!r} gives {memory} bytes, half of them for sequences' states; "
            f"one takes {state_bytes} bytes; raise it"
        )
    rest = dataclasses.replace(config, kv_cache_memory=memory - num_states * state_bytes, max_num_seqs=num_states)
    return Room(kv_cache.num_blocks_for(rest, block_bytes, max_model_len, device), num_states)
