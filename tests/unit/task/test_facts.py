from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from spark_elastic.protocol.ticket import THREADS_VARIABLE
from spark_elastic.task import facts
from spark_elastic.task.facts import interface_address, worker_environment


def test_a_worker_inherits_the_tasks_environment_and_the_users_env_comes_last() -> None:
    environment = worker_environment({"A": "task", "B": "task"}, {"B": "user"}, (), 2, ["/code", ""])
    assert (environment["A"], environment["B"]) == ("task", "user")
    assert environment["PYTHONPATH"].startswith("/code:/")


def test_threads_default_to_the_tasks_cpus_where_the_task_says_nothing() -> None:
    assert worker_environment({}, {}, (), 3, [])["OMP_NUM_THREADS"] == "3"
    assert worker_environment({"OMP_NUM_THREADS": "7"}, {}, (), 3, [])["OMP_NUM_THREADS"] == "7"


def test_a_number_of_threads_that_somebody_has_chosen_holds_for_all_libraries() -> None:
    """Torch takes MKL's number where the two differ."""

    def threads(inherited: dict[str, str], given: dict[str, str]) -> list[str | None]:
        environment = worker_environment(inherited, given, (), 3, [])
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", THREADS_VARIABLE)
        return [environment.get(name) for name in names]

    assert threads({}, {}) == ["3", "3", "3", "3"]
    assert threads({"OMP_NUM_THREADS": "7"}, {}) == ["7", "7", "7", None]
    assert threads({}, {"OMP_NUM_THREADS": "1"}) == ["1", "1", "1", None]
    assert threads({"MKL_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "1"}) == ["1", "5", "1", None]
    # What the process that slots are forked from has as a default.
    above = worker_environment({}, {}, (), 3, [])
    assert threads(above, {}) == ["3", "3", "3", "3"]
    assert threads(above, {"OMP_NUM_THREADS": "1"}) == ["1", "1", "1", None]
    assert threads(above, {"MKL_NUM_THREADS": "1"}) == ["3", "1", "3", "3"]


@pytest.mark.parametrize(("torch", "told"), [("2.13.0", 0), ("2.13.0+cu130", 0), ("2.13.0+cpu", 1)])
def test_the_gpu_that_spark_assigned_is_the_only_one_a_worker_sees(
    monkeypatch: pytest.MonkeyPatch, torch: str, told: int
) -> None:
    monkeypatch.setattr(facts.importlib.metadata, "version", lambda name: torch)
    environment = worker_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, ("1",), 1, [])
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["SPARK_ELASTIC_DEVICE"] == "cuda:0"
    found = facts.gather_facts("127.0.0.1", ("1",), 1, 0)
    assert found.gpus == ("1",)
    assert sum("Spark has assigned GPU 1, which torch" in warning for warning in found.warnings) == told


ADDRESSES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "both": [(socket.AF_PACKET, "00:11"), (socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "10.0.0.1")],
    "sixth": [(socket.AF_PACKET, "00:12"), (socket.AF_INET6, "fe80::2%sixth"), (socket.AF_INET6, "2001:db8::2")],
    "link": [(socket.AF_PACKET, "00:13"), (socket.AF_INET6, "fe80::3%link")],
}


def test_an_interfaces_address_is_one_that_others_can_connect_to(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        name: [SimpleNamespace(family=family, address=address) for family, address in entries]
        for name, entries in ADDRESSES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert (interface_address("both"), interface_address("sixth")) == ("10.0.0.1", "2001:db8::2")
    with pytest.raises(
        ValueError,
        match=r"^network_interface='link' has no address here; the interfaces with an address are both, lo, sixth$",
    ):
        interface_address("link")


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"'eth99' does not exist here; the interfaces with an address are .*lo"):
        interface_address("eth99")
