"""The settings of a job, validated once on the driver and frozen from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_elastic._integers import whole_number
from spark_elastic._seconds import seconds_above
from spark_elastic.worker.backends import BACKENDS

_RARE_TIMEOUTS = ("heartbeat_timeout", "ready_timeout", "form_timeout", "join_window", "join_patience", "yield_after")
_TIMEOUTS = ("start_timeout", "elastic_timeout", "hang_timeout", *_RARE_TIMEOUTS)
# The settings that ``run`` takes without naming them in its signature. ``adaptive_np`` is the estimators'.
RARE_SETTINGS = (*_RARE_TIMEOUTS, "adaptive_np")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Everything that the driver's decisions depend on. All times are in seconds.

    The first block is the public contract of ``spark_elastic.run``; the second holds settings that few users change.
    """

    # ``run`` learns the sizes that the user leaves out from the cluster, once everything else has been checked.
    min_np: int = 1
    max_np: int = 1
    num_proc: int = 1
    start_timeout: float = 600.0
    elastic_timeout: float = 600.0
    hang_timeout: float = 300.0
    reset_limit: int | None = None
    replace_slow: float | None = None
    backend: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network_interface: str | None = None
    driver_port: int = 0
    host_discovery_script: str | None = None
    # False forms one world of num_proc workers around the whole function. After a loss, the function runs again in new processes.
    elastic: bool = True
    # Whether commits are also written to a durable checkpoint.
    durable: bool = False
    # The setting of the launcher's platform that gives workers more memory; None if it has none.
    memory_setting: str | None = "spark.executor.memoryOverhead"

    # A worker whose process is stopped (SIGSTOP) for this long is replaced, and so is a host that does not answer (a frozen
    # machine, a cut network). A running process counts as alive, whatever it does; ``hang_timeout`` judges its progress. For
    # the last holders of the newest commit, the limit is ``elastic_timeout``.
    heartbeat_timeout: float = 20.0
    # How long a survivor may take to return to its elastic function after an abort; never less than ``hang_timeout``.
    ready_timeout: float = 60.0
    # How long the ranks of a new world may take to connect to each other.
    form_timeout: float = 60.0
    # Newcomers are collected until none has arrived for ``join_window``, or the first has waited ``join_patience``.
    join_window: float = 0.25
    join_patience: float = 10.0
    # Whether only some of the workers train if that is measured to be faster; estimators set it by ``adaptiveNp``.
    adaptive_np: bool = False
    # A run that holds fewer than min_np slots gives them back after this time, so that another run can finish.
    yield_after: float = 30.0

    def __post_init__(self) -> None:
        check_sizes(self.min_np, self.num_proc, self.max_np)
        for name in _TIMEOUTS:
            object.__setattr__(self, name, seconds_above(name, getattr(self, name)))  # it may be one of NumPy's
        if self.reset_limit is not None:
            object.__setattr__(self, "reset_limit", whole_number("reset_limit", self.reset_limit, 0))
        if self.replace_slow is not None:
            check_fraction("replace_slow", self.replace_slow)
            if not self.elastic:
                raise ValueError(
                    "replace_slow needs a world that can continue without one of its workers; with elastic=False it cannot"
                )
        if self.adaptive_np and not self.elastic:
            raise ValueError(
                "adaptive_np needs a world that can continue with fewer workers; with elastic=False it cannot"
            )
        self._check_network()
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(f"env must map strings to strings, not {key!r} to {value!r}")
            if not key or "=" in key or "\0" in key + value:
                raise ValueError(
                    f"env cannot set {key!r} to {value!r}: a name has at least one character and no '=', and neither has a NUL"
                )

    def _check_network(self) -> None:
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, not {self.backend!r}")
        if self.network_interface is not None and not isinstance(self.network_interface, str):
            raise ValueError(f"network_interface must be the name of an interface, not {self.network_interface!r}")
        object.__setattr__(self, "driver_port", whole_number("driver_port", self.driver_port, 0))
        if self.driver_port > 65535:
            raise ValueError(f"driver_port must be a port from 0 (any) to 65535, not {self.driver_port!r}")


def check_fraction(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``0 < value < 1``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
        raise ValueError(f"{name} must be None or a fraction between 0 and 1, not {value!r}")


def check_sizes(min_np: int, num_proc: int, max_np: int) -> None:
    """Raise ``ValueError`` unless ``1 <= min_np <= num_proc <= max_np``."""
    for name, value in (("min_np", min_np), ("num_proc", num_proc), ("max_np", max_np)):
        whole_number(name, value)
    if not 1 <= min_np <= num_proc <= max_np:
        raise ValueError(
            f"1 <= min_np <= num_proc <= max_np must hold, but min_np={min_np}, num_proc={num_proc}, max_np={max_np}"
        )
