"""What all ranks publish comes back to each of them, and takes little room on the way."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.protocol.packing import pack, unpack


@given(st.lists(st.binary(max_size=9)), st.binary(max_size=9))
def test_values_come_back_in_order(values: list[bytes], end: bytes) -> None:
    whole = [value + end for value in values]
    assert unpack(pack(whole)) == tuple(whole)


@pytest.mark.parametrize("ranks", [10, 1000])
def test_values_that_end_alike_take_little_more_than_what_differs(ranks: int) -> None:
    """Gloo's address of a rank: some bytes of its own, and a number for each rank of the group."""
    alike = b"".join(rank.to_bytes(8, "little") for rank in range(ranks))
    own = [os.urandom(28) for _ in range(ranks)]
    assert len(pack([value + bytes(126) + alike for value in own])) < len(alike) + 40 * ranks
