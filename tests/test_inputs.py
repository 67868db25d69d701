"""The arrays of a step say, token for token, what the scheduler has decided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers import make_request, make_scheduler
from paged_backend import SpeculativeConfig
from paged_backend.engine.scheduler import ScheduledSequence
from paged_backend.model.inputs import StepInputs, step_inputs

BLOCK_SIZE = 4


def check(inputs: StepInputs, scheduled: list[ScheduledSequence]) -> None:
    """Everything once more, one token at a time."""
    ids, positions, slots, keep, starts = [], [], [], [], [0]
    for sequence, num_tokens, num_logits in scheduled:
        computed = sequence.num_computed_tokens
        tokens = (sequence.token_ids + sequence.draft_token_ids)[computed : computed + num_tokens]
        assert len(tokens) == num_tokens
        for position, token_id in enumerate(tokens, start=computed):
            ids.append(token_id)
            positions.append(position)
            slots.append(sequence.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        keep += range(len(ids) - num_logits, len(ids))
        starts.append(len(ids))
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.keep.tolist() == keep
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.seq_lens.tolist() == [item.sequence.num_computed_tokens + item.num_tokens for item in scheduled]
    assert [
        row[: len(item.sequence.block_table)] for row, item in zip(inputs.block_tables.tolist(), scheduled, strict=True)
    ] == [item.sequence.block_table.tolist() for item in scheduled]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
    max_num_batched_tokens=st.integers(6, 30),
    speculates=st.booleans(),
)
def test_every_step_of_mixed_requests(
    prompts: list[tuple[int, int, bool]], max_num_batched_tokens: int, speculates: bool
) -> None:
    scheduler = make_scheduler(
        num_blocks=40,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        speculation=SpeculativeConfig() if speculates else None,
    )
    for length, n, wants_logprobs in prompts:
        options = {"prompt_logprobs": 0} if wants_logprobs and n == 1 else {}
        scheduler.add_request(make_request([5, 6] * length, n=n, max_tokens=6, **options))
    while scheduler.has_work:
        output = scheduler.schedule()
        inputs = step_inputs(output.scheduled, BLOCK_SIZE)
        check(inputs, output.scheduled)
        sampled = scheduler.advance(output)
        while sampled:
            for sequence, _ in sampled:
                scheduler.update(sequence, 5 + sequence.num_tokens % 2)
            sampled = scheduler.accept(sampled)


def test_arrays_can_be_written_to() -> None:
    scheduler = make_scheduler(block_size=BLOCK_SIZE)
    scheduler.add_request(make_request(range(5)))

    assert all(array.flags.writeable for array in step_inputs(scheduler.schedule().scheduled, BLOCK_SIZE))
