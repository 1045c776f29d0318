"""A dataset for fits in one process."""

from __future__ import annotations

import pytest
from fit_plans import write_line


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """y = 2 x in 100 rows, with weights."""
    return write_line(tmp_path_factory.mktemp("rows"))
