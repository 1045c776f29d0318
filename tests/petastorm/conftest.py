"""Tests of the second environment; they use the helpers of the unit and integration tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "unit" / "data"), str(TESTS / "integration")]
os.environ["PYSPARK_PYTHON"] = sys.executable
