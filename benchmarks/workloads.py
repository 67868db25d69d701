"""The work every engine is given, so that figures compare: chats, greedy, end-of-sequence ignored.

Prompts differ from round to round, so that no engine finds an earlier round in its cache.
"""

from __future__ import annotations

import dataclasses

TOPICS = (
    *("spring", "databases", "ocean tides", "sorting algorithms", "the Roman empire", "bicycles", "black holes"),
    *("bread baking", "HTTP caching", "whales", "compilers", "gardens", "glaciers", "jazz", "chess", "volcanoes"),
)
SYSTEM_PROMPT = "You are a careful assistant for a support desk. " + " ".join(
    f"Rule {i}: answer politely, cite the section {i * 7 % 13} of the handbook when relevant, and never invent facts."
    for i in range(20)
)

NUM_REGISTER_ENTRIES = 200
"""So many that they come to about 4,000 tokens."""

Conversation = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """So many conversations at once, each answered with `num_tokens` tokens (greedy, end-of-sequence ignored)."""

    name: str
    num_conversations: int
    num_tokens: int = 64
    system: str = "template"
    """`template`: the template's own system prompt, if it has one. `shared`: one of about 480 tokens for all, which no
    engine has seen before. `distinct`: a short one that differs from the first words on, so that nothing is shared.
    `long`: one of about 4,000 tokens, another one for each conversation."""
    is_decode_only: bool = False
    """Prompts are the same in each round, so that after a warm-up only the answers are left to compute: for engines
    with a prefix cache."""

    @property
    def counts_prompts(self) -> bool:
        """Whether its rate is one of prompt tokens, since there is next to nothing else."""
        return self.num_tokens == 1

    def conversations(self, round_: int) -> list[Conversation]:
        if self.is_decode_only:
            round_ = 0
        return [self._conversation(index, round_) for index in range(self.num_conversations)]

    def _conversation(self, index: int, round_: int) -> Conversation:
        topic = TOPICS[(index + round_) % len(TOPICS)]
        task = f"Write a short paragraph about {topic}, point {index + 100 * round_}"
        question = f"{task}, and explain why it matters to people."
        user = {"role": "user", "content": question}
        system_prompts = {
            "shared": f"Shift {round_}. {SYSTEM_PROMPT}",
            "distinct": f"{index + 100 * round_} is your number. You answer politely and in short sentences.",
            "long": _register(index + 100 * round_),
        }
        if self.system not in system_prompts:
            return [user]
        return [{"role": "system", "content": system_prompts[self.system]}, user]


def _register(number: int) -> str:
    """A text of about 4,000 tokens that differs from the first words on."""
    entries = (
        f"On day {day} clerk {number * 31 % 89} counted {(number + 1) * day * 17 % 997} parcels "
        f"and signed for {TOPICS[day % len(TOPICS)]}."
        for day in range(NUM_REGISTER_ENTRIES)
    )
    return f"Register {number}. " + " ".join(entries)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("b1", 1),
        Workload("b8", 8),
        Workload("b32", 32),
        Workload("b64", 64),
        Workload("shared32", 32, system="shared"),
        Workload("distinct32", 32, system="distinct"),
        Workload("decode4k", 8, system="long", is_decode_only=True),
        Workload("prefill4k", 1, num_tokens=1, system="long"),
    )
}
