"""The arrays of a step say, token for token, what the scheduler has decided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers import make_request, make_scheduler
from helpers_crowd import LAYOUTS
from paged_backend import SpeculativeConfig
from paged_backend.engine.kv_layout import Reach
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
            blocks = [table.blocks[position // BLOCK_SIZE] for table in sequence.tables]
            slots.append([block * BLOCK_SIZE + position % BLOCK_SIZE for block in blocks])
        keep += range(len(ids) - num_logits, len(ids))
        starts.append(len(ids))
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.T.tolist() == slots
    assert inputs.keep.tolist() == keep
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.seq_lens.tolist() == [item.sequence.num_computed_tokens + item.num_tokens for item in scheduled]
    for index, item in enumerate(scheduled):
        tables = [table.blocks.tolist() for table in item.sequence.tables]
        rows = inputs.block_tables[:, index].tolist()
        assert [row[: len(table)] for row, table in zip(rows, tables, strict=True)] == tables


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
    max_num_batched_tokens=st.integers(6, 30),
    speculates=st.booleans(),
    reaches=st.sampled_from(LAYOUTS),
)
def test_every_step_of_mixed_requests(
    prompts: list[tuple[int, int, bool]], max_num_batched_tokens: int, speculates: bool, reaches: tuple[Reach, ...]
) -> None:
    scheduler = make_scheduler(
        num_blocks=40 * len(reaches),
        reaches=reaches,
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
