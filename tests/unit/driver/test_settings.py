"""JobSettings: wrong values are refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spark_elastic.driver.settings import JobSettings
from spark_elastic.worker.backends import BACKENDS

SIZES = {"min_np": 1, "max_np": 4, "num_proc": 2}
TIMES = ["start_timeout", "elastic_timeout", "hang_timeout", "heartbeat_timeout", "ready_timeout", "form_timeout"]


@pytest.mark.parametrize(("min_np", "num_proc", "max_np"), [(0, 1, 1), (2, 1, 3), (1, 3, 2), (3, 3, 2), (-1, 1, 1)])
def test_sizes_out_of_order_are_refused_with_their_values(min_np: int, num_proc: int, max_np: int) -> None:
    with pytest.raises(ValueError, match=f"min_np={min_np}, num_proc={num_proc}, max_np={max_np}"):
        JobSettings(min_np=min_np, num_proc=num_proc, max_np=max_np)


@pytest.mark.parametrize("name", ["min_np", "num_proc", "max_np"])
@pytest.mark.parametrize("value", [1.0, "2", None, True])
def test_a_size_that_is_no_whole_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        JobSettings(**{**SIZES, name: value})


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [0, -1, math.nan, "10", None, True])
def test_a_timeout_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        JobSettings(**SIZES, **{name: value})


def test_a_time_may_be_one_of_numpys_numbers() -> None:
    settings = JobSettings(**SIZES, start_timeout=np.int64(50), hang_timeout=np.float32(2.5))  # type: ignore[arg-type]
    assert [type(settings.start_timeout), settings.start_timeout] == [float, 50]
    assert [type(settings.hang_timeout), settings.hang_timeout] == [float, 2.5]


@pytest.mark.parametrize("name", ["join_window", "join_patience", "yield_after"])
@pytest.mark.parametrize("value", [-1, math.nan, "10", None])
def test_the_lesser_known_times_are_checked_too(name: str, value: object) -> None:
    """Found in review: run() passes them on unseen."""
    with pytest.raises(ValueError, match=name):
        JobSettings(**SIZES, **{name: value})


def test_a_timeout_may_be_infinite() -> None:
    assert JobSettings(**SIZES, elastic_timeout=math.inf).elastic_timeout == math.inf


@pytest.mark.parametrize("value", [-1, 1.5, "3"])
def test_a_reset_limit_that_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="reset_limit"):
        JobSettings(**SIZES, reset_limit=value)


@pytest.mark.parametrize("value", [0, 1, -0.1, math.nan, "0.1", True])
def test_a_fraction_of_the_speed_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="replace_slow must be None or a fraction between 0 and 1"):
        JobSettings(**SIZES, replace_slow=value)


def test_no_worker_of_a_fixed_world_is_replaced_for_being_slow() -> None:
    with pytest.raises(ValueError, match="elastic=False"):
        JobSettings(**SIZES, replace_slow=0.1, elastic=False)


@pytest.mark.parametrize("backend", ["mpi", "", "GLOO"])
def test_an_unknown_backend_is_refused_with_the_known_ones(backend: str) -> None:
    with pytest.raises(ValueError, match=f"{', '.join(BACKENDS)} or None"):
        JobSettings(**SIZES, backend=backend)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="driver_port"):
        JobSettings(**SIZES, driver_port=port)


def test_an_interface_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="network_interface must be the name of an interface, not 3"):
        JobSettings(**SIZES, network_interface=3)


@pytest.mark.parametrize("env", [{"A": 1}, {2: "b"}])
def test_an_environment_that_is_not_of_strings_is_refused(env: dict[object, object]) -> None:
    with pytest.raises(ValueError, match="env must map strings to strings"):
        JobSettings(**SIZES, env=env)


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"A": "x\0y"}, {"A\0": "1"}, {"": "1"}])
def test_variables_that_no_process_can_have_are_refused(env: dict[str, str]) -> None:
    """Hosts were started again and again, as the process of their workers could not be."""
    with pytest.raises(ValueError, match=r"env cannot set '.*' to '.*': a name has at least one character and no '='"):
        JobSettings(**SIZES, env=env)
