"""The block pool against a model of it that keeps plain lists."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_backend.engine.block_pool import BlockKey, BlockPool


def key(number: int) -> BlockKey:
    return (None, (number,))


def test_the_block_free_for_longest_is_forgotten_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release([blocks[1], blocks[0], blocks[2]])

    pool.allocate()

    assert [pool.find(key(number)) is not None for number in range(3)] == [True, False, True]
    assert pool.num_evictions == 1


def test_a_found_free_block_is_as_good_as_new_again() -> None:
    pool = BlockPool(2)
    blocks = [pool.allocate() for _ in range(2)]
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release(blocks)
    pool.share(blocks[0])
    pool.release([blocks[0]])

    pool.allocate()

    assert pool.find(key(0)) is not None
    assert pool.find(key(1)) is None


def test_blocks_that_nobody_can_find_are_handed_out_first() -> None:
    pool = BlockPool(3)
    known, unknown, unpublished = (pool.allocate() for _ in range(3))
    for number, block in enumerate((known, unpublished)):
        pool.publish(block, key(number))
    pool.release([known, unknown, unpublished])
    pool.unpublish(unpublished)

    assert {pool.allocate(), pool.allocate()} == {unknown, unpublished}
    assert pool.num_evictions == 0


def test_of_two_blocks_with_one_key_the_first_stays_known() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()

    assert pool.publish(first, key(1)) == pool.publish(second, key(1))

    found = pool.find(key(1))
    assert found is not None and found.block == first


def test_a_prefix_id_is_never_given_twice() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    before = pool.publish(block, key(1))
    pool.unpublish(block)

    assert pool.publish(block, key(1)) != before


class PoolMachine(RuleBasedStateMachine):
    """`holds`: how often each block is held. `knows`: what findable blocks hold. `free`: in the order of release."""

    @initialize(num_blocks=st.integers(1, 6))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holds: Counter[int] = Counter()
        self.knows: dict[int, BlockKey] = {}
        self.free = list(range(num_blocks))
        self.prefix_ids: dict[int, BlockKey] = {}

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        unknown = {block for block in self.free if block not in self.knows}
        block = self.pool.allocate()
        assert block in unknown if unknown else block == self.free[0]
        self.free.remove(block)
        self.knows.pop(block, None)
        self.holds[block] = 1

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = sorted(+self.holds | Counter(self.knows.keys()))
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.share(block)
            self.holds[block] += 1
            if block in self.free:
                self.free.remove(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(sorted(+self.holds)))[: data.draw(st.integers(1, 3))]
        self.pool.release(blocks)
        self.holds.subtract(blocks)
        self.free += [block for block in blocks if not self.holds[block]]

    @rule(data=st.data(), number=st.integers(0, 4))
    def publish(self, data: st.DataObject, number: int) -> None:
        blocks = sorted(block for block in +self.holds if block not in self.knows)
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            prefix_id = self.pool.publish(block, key(number))
            assert self.prefix_ids.setdefault(prefix_id, key(number)) == key(number)
            if key(number) not in self.knows.values():
                self.knows[block] = key(number)

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.unpublish(block)
        self.knows.pop(block, None)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.knows.clear()

    @invariant()
    def what_is_found_holds_what_its_key_says(self) -> None:
        found = {number: self.pool.find(key(number)) for number in range(5)}
        blocks = {hit.block: key(number) for number, hit in found.items() if hit is not None}
        assert blocks == self.knows
        assert self.pool.num_cached == sum(block in self.knows for block in self.free)

    @invariant()
    def every_block_is_either_used_or_free(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(+self.holds)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert [self.pool.ref_count(block) for block in range(self.pool.num_blocks)] == [
            self.holds[block] for block in range(self.pool.num_blocks)
        ]


TestPoolAgainstItsModel = PoolMachine.TestCase
TestPoolAgainstItsModel.settings = settings(stateful_step_count=30)
