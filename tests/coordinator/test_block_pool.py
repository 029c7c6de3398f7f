"""Reference counts, contents by hash, and what is given out first."""

from __future__ import annotations

import pytest

from tp_runtime.coordinator.block_pool import BlockPool
from tp_runtime.errors import TPRuntimeError

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_released_blocks_are_free_again():
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert pool.num_free == 1
    pool.check_invariants([table])
    pool.release(table)
    assert pool.num_free == 4
    pool.check_invariants([])
    pool.check_idle()


def test_a_shared_block_is_free_only_after_its_last_holder():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.register(table[:1], [A])
    pool.share(table)
    pool.release(table)
    assert pool.num_free == 1
    pool.check_invariants([table])
    pool.release(table)
    assert pool.num_free == 2


def test_known_contents_are_found_after_the_last_holder_let_go():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.register(table, [A, B])
    pool.release(table)
    assert pool.find([A, B, C]) == table
    assert pool.find([B]) == [table[1]]
    assert pool.find([C, A]) == []
    assert pool.count_unheld(table) == 2
    pool.share(table)
    assert pool.count_unheld(table) == 0
    pool.check_invariants([table])


def test_plain_free_blocks_go_before_known_ones_and_those_least_recently_used_first():
    pool = BlockPool(4)
    first, second, plain = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    pool.register(first[:1], [A])
    pool.register(second[:1], [B])
    pool.release(second)
    pool.release(first)
    pool.release(plain)
    assert set(pool.allocate(2)) == {plain[0], 3}
    assert pool.allocate(1) == second
    assert pool.find([B]) == []
    assert pool.find([A]) == first


def test_using_a_known_block_again_makes_it_the_youngest():
    pool = BlockPool(2)
    a, b = pool.allocate(1), pool.allocate(1)
    pool.register(a[:1], [A])
    pool.register(b[:1], [B])
    pool.release(a)
    pool.release(b)
    pool.share(a)
    pool.release(a)
    assert pool.allocate(1) == b


def test_the_end_of_a_table_is_evicted_before_its_beginning():
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(table, [A, B])
    pool.release(table)
    assert pool.allocate(1) == [table[1]]
    assert pool.find([A, B]) == [table[0]]


def test_a_duplicate_stays_with_its_holder_and_the_first_one_is_found():
    """The fault: the duplicate took over the hash, and releasing it lost the other's contents."""
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[:1], [A])
    pool.register(second[:1], [A])
    assert pool.find([A]) == first
    pool.release(second)
    assert pool.find([A]) == first
    pool.release(first)
    assert pool.find([A]) == first
    pool.check_invariants([])


def test_forgotten_contents_are_not_found_and_the_holder_keeps_the_block():
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(table, [A, B])
    pool.release(table[1:])
    pool.forget(table[0])
    pool.forget(table[1])
    pool.forget(table[1])  # nothing left to forget
    assert pool.find([A]) == pool.find([B]) == []
    pool.check_invariants([table[:1]])
    pool.release(table[:1])
    pool.check_idle()


def test_freeing_twice_is_an_error():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(TPRuntimeError, match="freed twice"):
        pool.release(table)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0]], "1 references and 0 holders|0 references and 1 holders"),
        ([[0, 1], [1]], "has 1 references and 2 holders"),
        ([[0, 1, 1]], "twice in one table"),
        ([], "1 references and 0 holders"),
    ],
)
def test_the_check_finds_lost_and_wrongly_shared_blocks(tables, message):
    pool = BlockPool(3)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(TPRuntimeError, match=message):
        pool.check_invariants(tables)


def test_the_idle_check_names_how_many_blocks_are_lost():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(TPRuntimeError, match="2 KV blocks"):
        pool.check_idle()
