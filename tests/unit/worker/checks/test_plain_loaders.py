"""PlainLoaders: what of torch's own loaders and their iterations is looked at."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from spark_elastic.worker.checks.plain_loaders import PlainLoaders


def test_a_loader_that_was_refused_while_it_was_made_and_is_still_referenced_is_skipped() -> None:
    with pytest.raises(ValueError, match="batch_size") as refused:
        DataLoader([0, 1, 2, 3], batch_size=0)  # type: ignore[arg-type]
    PlainLoaders()
    assert refused.tb is not None, "its traceback holds the loader"


def test_an_iteration_that_another_thread_is_just_making_is_not_followed() -> None:
    above = DataLoader([0, 1, 2, 3])  # type: ignore[arg-type]
    loaders = PlainLoaders()
    half_made = _SingleProcessDataLoaderIter.__new__(_SingleProcessDataLoaderIter)
    assert [loaders.feeds_training([]) for _ in range(4)] == [False] * 4
    del above, half_made
