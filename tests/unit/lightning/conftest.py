"""What a Trainer outside a job leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


@pytest.fixture
def alone() -> Iterator[None]:
    """Take back what a Trainer outside a job leaves: variables, a number of threads, and a process group."""
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
