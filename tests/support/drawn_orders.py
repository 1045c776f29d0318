"""Row groups, orders and batch sizes for Hypothesis to draw."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from spark_elastic.data.order import OrderSpec
from spark_elastic.data.plan import BatchPlan

sizes = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 40), st.just(300)), max_size=12).map(
    lambda found: np.array(found, np.int64)
)
specs = st.builds(
    OrderSpec,
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    lanes=st.integers(1, 9),
    window=st.integers(1, 50),
    mix=st.booleans(),
)
plans = st.one_of(
    st.builds(BatchPlan, st.integers(1, 20), st.none(), st.booleans()),
    st.builds(BatchPlan, st.none(), st.integers(1, 60), st.booleans()),
)
