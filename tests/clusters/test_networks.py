"""Networks that are not as simple as one interface with one name: names, IPv6, several interfaces, an address translator."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts import Hosts
from reports import events
from standalone import Standalone, free_port
from submitted import Submitted, unshared

pytestmark = pytest.mark.long

Submit = Callable[..., Submitted]

LOCAL = "127.0.0.1"
# Where executors reach the driver, which knows nothing of this address.
OUTSIDE = "127.0.0.77"
NOWHERE = "nowhere.invalid"


def test_the_name_of_the_machine_need_not_resolve(submit: Submit) -> None:
    job = submit(prefix=unshared("uts", f"hostname {NOWHERE}"))
    job.strike()
    job.end()


def test_a_name_of_the_driver_that_does_not_resolve_is_named(submit: Submit) -> None:
    settings = {"spark.driver.host": NOWHERE, "spark.driver.bindAddress": LOCAL}
    job = submit(settings=settings, given={"start_timeout": 10.0})
    said = job.fail()
    assert f"spark.driver.host={NOWHERE} does not resolve here" in said


def test_a_job_runs_on_ipv6(submit: Submit, tmp_path: Path) -> None:
    job = submit(
        environment={"SPARK_LOCAL_IP": "::1", "SPARK_PREFER_IPV6": "true"},
        settings={"spark.driver.extraJavaOptions": "-Djava.net.preferIPv6Addresses=true"},
    )
    job.strike()
    job.end()
    assert addresses(tmp_path) == {"::1"}


def addresses(folder: Path) -> set[str]:
    """Return those from which tasks have reached the driver."""
    return {event["facts"]["address"] for event in events(folder) if event["event"] == "host_facts"}


# ---------------------------------------------------------------- several interfaces


@pytest.fixture
def hosts(nothing_left: None) -> Iterator[Hosts]:
    """Two, which reach the driver by their first interface, each other not."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2))
        except OSError as error:
            pytest.skip(f"takes hosts with networks of their own: {error}")
        hosts.block(*hosts.addresses)
        yield hosts


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path, hosts.driver)
    for address in hosts.addresses:
        cluster.add_worker(address, prefix=hosts.prefix(address))
    yield cluster
    cluster.end()


NETWORKS = {"IPv4": ["10.214.9.2/24", "10.214.9.3/24"], "IPv6 only": ["fd5e:9::2/64", "fd5e:9::3/64"]}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_workers_meet_on_the_interface_that_is_given(
    submit: Submit, hosts: Hosts, cluster: Standalone, tmp_path: Path, network: list[str]
) -> None:
    hosts.plug("eth1", network)
    job = submit(**on(cluster, hosts), given={"network_interface": "eth1"})
    job.strike()
    job.end()
    assert addresses(tmp_path) == set(hosts.addresses), "the driver is reached by the other interface"


def test_where_workers_do_not_reach_each_other_the_setting_is_named(
    submit: Submit, hosts: Hosts, cluster: Standalone
) -> None:
    said = submit(**on(cluster, hosts), given={"num_proc": 2, "min_np": 2, "form_timeout": 3.0}).fail()
    assert "worlds in a row broke before all ranks were connected. Can the workers reach each other" in said
    assert "(network_interface)?" in said


def on(cluster: Standalone, hosts: Hosts) -> dict[str, object]:
    settings = {"spark.executor.memory": "512m", "spark.driver.bindAddress": hosts.driver}
    return {"master": cluster.url, "settings": settings, "environment": {"SPARK_LOCAL_IP": hosts.driver}}


# ---------------------------------------------------------------- a driver behind an address translator


class Translator:
    """Passes what comes to these ports at the outer address on to the same ports of this machine, as a NAT router would."""

    def __init__(self, ports: list[int]) -> None:
        self._listeners = [socket.create_server((OUTSIDE, port)) for port in ports]
        # The port of each connection that was passed on.
        self.passed: list[int] = []

    def __enter__(self) -> Translator:
        for listener in self._listeners:
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, *of: object) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                outer, _ = listener.accept()
            except OSError:
                return
            port = listener.getsockname()[1]
            try:
                inner = socket.create_connection((LOCAL, port))
            except OSError:
                outer.close()
                continue
            self.passed.append(port)
            for source, sink in ((outer, inner), (inner, outer)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.fixture
def translated() -> Iterator[tuple[Translator, dict[str, str], int]]:
    """A translator, the settings of a driver behind it, and the third port that it passes on."""
    driver, blocks, ours = ports = [free_port() for _ in range(3)]
    settings = {
        "spark.driver.host": OUTSIDE,
        "spark.driver.bindAddress": LOCAL,
        "spark.driver.port": str(driver),
        "spark.driver.blockManager.port": str(blocks),
    }
    with Translator(ports) as translator:
        yield translator, settings, ours


def test_a_driver_behind_an_address_translator_is_reached_on_driver_port(
    submit: Submit, translated: tuple[Translator, dict[str, str], int]
) -> None:
    translator, settings, port = translated
    job = submit(settings=settings, given={"driver_port": port})
    job.strike()
    job.end()
    assert port in translator.passed


def test_without_driver_port_a_driver_behind_an_address_translator_is_not_reached_and_the_address_is_named(
    submit: Submit, translated: tuple[Translator, dict[str, str], int]
) -> None:
    _, settings, _ = translated
    said = submit(settings=settings, given={"start_timeout": 30.0}).fail()
    assert "NotEnoughHostsError" in said
    assert f"ended without registering at the driver; can executors reach it at {OUTSIDE}:" in said
