"""The process of a rank other than 0: it loads its shard as rank 0 does, then runs the steps that rank 0 sends.

Rank 0 starts it, with the number of the socket that it talks through and its own process id, and ends it by a signal.
It ends by itself when rank 0's process is gone, however that went.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from paged_backend.config import EngineConfig
    from paged_backend.model.runner import RankStep

_LOOK_SECONDS = 1.0


class RankSetup(NamedTuple):
    """What a rank must know to load its shard."""

    rank: int
    num_ranks: int
    port: int
    """Of the store in which the ranks find each other."""
    device: torch.device
    """Of which kind each rank has one."""
    path: str
    """What `from_pretrained` is given."""
    options: dict[str, object]
    dtype: torch.dtype | str
    name: str
    config: EngineConfig


class RankReport(NamedTuple):
    """What a rank tells rank 0: that it waits for work or, with an error, why it ends."""

    error: str | None = None


def main(arguments: list[str]) -> None:
    connection = Connection(int(arguments[0]))
    threading.Thread(target=_end_with, args=(int(arguments[1]),), daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 says it all
    try:
        _serve(connection)
    except (EOFError, ConnectionError):  # rank 0 has gone
        pass
    except BaseException as error:
        connection.send(RankReport(f"{type(error).__name__}: {error}"))
    os._exit(0)  # what waits for other ranks in other threads, waits for nothing


def _serve(connection: Connection) -> None:
    # Imported here, since torch and transformers take seconds, in which rank 0's process may end.
    from transformers.utils import logging as transformers_logging

    from paged_backend.model import shards
    from paged_backend.model.loader import LoadedModel, load_shard
    from paged_backend.model.runner import ModelRunner

    transformers_logging.disable_progress_bar()
    connection.send(RankReport())
    setup: RankSetup = connection.recv()
    shards.join(setup.rank, setup.num_ranks, setup.device, setup.port)
    model = load_shard(setup.path, setup.options, setup.dtype, setup.config, setup.device)
    connection.send(RankReport())
    length: int = connection.recv()
    loaded = LoadedModel(model=model, name=setup.name, max_model_len=length, owns_weights=True, embedding=None)
    runner = ModelRunner(loaded, setup.config)
    connection.send(RankReport())
    while True:
        step: RankStep = connection.recv()
        runner.follow(step)


def _end_with(parent: int) -> None:
    """The socket's end tells it too, but not while the main thread computes, nor if a fork of the parent lives on."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)
