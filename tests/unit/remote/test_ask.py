import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_eagle3_sglang.remote.ask import Ask, parse


@given(st.sets(st.integers(0, 300)), st.integers(301, 4000), st.sampled_from(["native", "fp8"]))
def test_a_request_id_says_what_was_asked(chosen: set[int], length: int, rows: str):
    ask = Ask("0f3a", length, np.array(sorted(chosen), dtype=np.int64), rows)
    found = parse(ask.rid())
    assert found is not None
    assert (found.name, found.length, found.rows) == ("0f3a", length, rows)
    assert found.supervised.dtype == np.int64
    assert np.array_equal(found.supervised, ask.supervised)


def test_a_chat_is_short_and_the_worst_case_bounded():
    chat = Ask("0" * 16, 2048, np.concatenate([np.arange(100, 700), np.arange(900, 2048)]))
    assert len(chat.rid()) < 60
    # Every other token, which no chat has.
    assert len(Ask("0" * 16, 2048, np.arange(0, 2048, 2)).rid()) < 8_000


@pytest.mark.parametrize(
    "rid", ["", "a1b2", "eagle3:zz:native:3:", "eagle3:a:native:3:x", "HEALTH_CHECK_1", "eagle3:a:native:3:0+1\n"]
)
def test_other_requests_are_not_ours(rid: str):
    assert parse(rid) is None
