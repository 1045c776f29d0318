"""Jobs on the rows of the fixture ``dataset``: how many there are, and what every such job has to hold."""

from __future__ import annotations

from typing import Any

import pytest

ROWS = 1000
EPOCHS = 2
# 1000 rows in global batches of 64 are 15 steps and a tail of 40; then the commit that ends the epoch.
STEPS = 16 + 1


def check(run: Any, epochs: int = EPOCHS) -> None:
    for result in run.results:
        assert result["seen"] == pytest.approx([epochs] * ROWS)
        assert result["val"] == pytest.approx(epochs * ROWS)
        assert result["seen"] == run.results[0]["seen"]
