"""An engine of fakes that is crowded: requests come, are aborted and fail in a cache that holds few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from helpers import check_blocks, is_idle, make_engine
from paged_backend.engine.request import Request


class CrowdedMachine(RuleBasedStateMachine):
    """Subclasses begin with `crowd`, have rules that `submit` into `requests`, and check each request in the end."""

    requests = Bundle("requests")

    def crowd(self, **options: Any) -> None:
        """Options are those of `make_engine`."""
        self.engine = make_engine(**options)
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
