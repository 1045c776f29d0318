"""Where gradients on a GPU may be read too early: with which versions of torch."""

from __future__ import annotations

import warnings

import pytest

from spark_elastic.worker.checks.early_gradients import warn_of_early_gradients


@pytest.mark.parametrize("version", ["2.8.0+cu126", "2.10.0"])
def test_a_torch_whose_gloo_may_be_late_is_warned_of(version: str) -> None:
    with pytest.warns(UserWarning, match=r"Gloo reduces gradients on a GPU here.*torch " + version.replace("+", r"\+")):
        warn_of_early_gradients(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "3.0.0a0"])
def test_a_torch_whose_gloo_waits_for_the_copies_is_not_warned_of(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_early_gradients(version)
