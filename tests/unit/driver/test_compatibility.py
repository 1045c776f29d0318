"""Hosts that cannot take part in a job are refused with what to do about it; those that differ are named."""

from __future__ import annotations

import platform

import pytest
from msgspec.structs import replace

from spark_elastic.driver.compatibility import why_refuse, why_warn
from spark_elastic.protocol.messages import HostFacts
from spark_elastic.task.facts import gather_facts


@pytest.fixture
def facts() -> HostFacts:
    return replace(gather_facts("127.0.0.1", (), 1, 0), name="node7", python=platform.python_version(), torch="2.8")


def test_a_host_like_the_driver_is_taken_without_a_word(facts: HostFacts) -> None:
    assert (why_refuse(facts), why_warn(facts, [facts])) == ("", "")


def test_another_patch_release_of_python_is_the_same_python(facts: HostFacts) -> None:
    major, minor, _ = platform.python_version().split(".")
    assert why_refuse(replace(facts, python=f"{major}.{minor}.99")) == ""


def test_another_minor_release_of_python_is_refused(facts: HostFacts) -> None:
    assert "a task on node7 runs Python 3.1.0" in why_refuse(replace(facts, python="3.1.0"))
    assert "PYSPARK_PYTHON" in why_refuse(replace(facts, python="3.1.0"))


def test_a_host_without_torch_is_refused(facts: HostFacts) -> None:
    assert why_refuse(replace(facts, torch="")) == "a task on node7 has no torch: install it on all executors"


def test_another_minor_release_of_torch_than_that_of_the_hosts_before_is_refused_and_both_are_named(
    facts: HostFacts,
) -> None:
    said = why_refuse(replace(facts, torch="2.10.0+cpu"), [replace(facts, name="node3", torch="2.9.1")])
    assert said.startswith("a task on node7 has torch 2.10.0+cpu, one on node3 2.9.1:")


def test_another_patch_release_or_build_of_torch_only_causes_a_warning(facts: HostFacts) -> None:
    mine, others = (
        replace(facts, torch="2.8.0+cpu"),
        [replace(facts, torch="2.8.1"), replace(facts, torch="2.8.0+cu130")],
    )
    assert why_refuse(mine, others) == ""
    assert "has torch 2.8.0+cpu, others have 2.8.0+cu130, 2.8.1;" in why_warn(mine, others)


def test_a_differing_torch_is_named_with_those_of_the_others(facts: HostFacts) -> None:
    others = [replace(facts, torch=version) for version in ("2.7", "2.6", "2.8", "2.7")]
    assert "has torch 2.8, others have 2.6, 2.7;" in why_warn(facts, others)
