"""An engine of fakes that is crowded: requests come, are aborted and fail in a cache that holds few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from helpers import check_blocks, is_idle, make_engine
from paged_backend.engine.kv_layout import EVERYTHING, KVLayout, Reach
from paged_backend.engine.request import Request

ALL_ALIKE = (EVERYTHING,)
LAYOUTS = [
    ALL_ALIKE,
    (Reach(window=3),),
    (Reach(chunk=4),),
    (EVERYTHING, Reach(window=5)),
    (EVERYTHING, Reach(window=2), Reach(window=2)),
    (EVERYTHING, EVERYTHING, Reach(chunk=4)),
    (Reach(window=9), Reach(window=4)),
]
"""How far the groups of layers look back, of models of all kinds."""


class CrowdedMachine(RuleBasedStateMachine):
    """Subclasses begin with `crowd`, have rules that `submit` into `requests`, and check each request in the end."""

    requests = Bundle("requests")

    def crowd(self, reaches: tuple[Reach, ...], num_spare: int, block_size: int, **options: Any) -> None:
        """A cache that has so many blocks more than the longest sequence needs; options are those of `make_engine`."""
        layout = KVLayout(reaches, block_size, options["max_num_batched_tokens"])
        num_blocks = layout.num_blocks_for(options["max_model_len"]) + num_spare
        self.engine = make_engine(num_blocks=num_blocks, block_size=block_size, reaches=reaches, **options)
        self.makers: dict[str, Callable[[], Request]] = {}
        """How to make each request again."""
        self.aborted: set[str] = set()

    def submit(self, make: Callable[[], Request], num_copies: int = 1) -> list[str]:
        """Their ids."""
        made = [make() for _ in range(num_copies)]
        self.makers |= {request.request_id: make for request in made}
        self.engine.add(*made)
        return [request.request_id for request in made]

    def check(self, request_id: str, make: Callable[[], Request]) -> None:
        """Asserts what is true of a request in the end."""
        raise NotImplementedError

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @rule()
    def step_that_fails(self) -> None:
        self.engine.failing_step()

    @rule(num_tokens=st.integers(1, 6))
    def step_that_runs_out_of_memory(self, num_tokens: int) -> None:
        self.engine.step_without_memory(num_tokens)

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    @invariant()
    def no_block_is_lost(self) -> None:
        check_blocks(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert is_idle(self.engine.engine.stats())
        for request_id, make in self.makers.items():
            self.check(request_id, make)
