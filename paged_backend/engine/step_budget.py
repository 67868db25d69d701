"""How many tokens a step may compute."""

from __future__ import annotations

_NUM_CAUTIOUS_STEPS = 64


class StepBudget:
    """As many as the setting says; fewer for a while, if the device ran out of memory in a step of that size."""

    def __init__(self, most: int) -> None:
        self.num_tokens = self._most = most
        self._num_steps = 0
        """Steps since the limit last changed."""

    def ran_out(self, num_tokens: int) -> None:
        """The device had no memory for a step of that many tokens: the next one may have half of them."""
        self.num_tokens = max(1, num_tokens // 2)
        self._num_steps = 0

    def step_computed(self) -> None:
        """After enough steps that went well twice as many are tried, since memory is free that was not."""
        if self.num_tokens == self._most:
            return
        self._num_steps += 1
        if self._num_steps == _NUM_CAUTIOUS_STEPS:
            self.num_tokens = min(2 * self.num_tokens, self._most)
            self._num_steps = 0
