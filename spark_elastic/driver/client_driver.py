"""ClientDriver: the driver runs in the process that calls ``run``. Tasks have to reach the machine of that process."""

from __future__ import annotations

import concurrent.futures
import os
import secrets
from contextlib import ExitStack
from typing import ClassVar

from spark_elastic.driver.discovery import HostDiscovery
from spark_elastic.driver.driver_place import SIGNAL_SECONDS, CheckpointWish, begin_job
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.fault_plan import active_plan
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import JobCancelledError, SparkElasticError, TrainingFailedError
from spark_elastic.launchers.base import Launcher, SlotListener
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.ticket import Ticket


class ClientDriver:
    """Runs the driver's service on a thread of this process."""

    own_slots: ClassVar[int] = 0

    def __init__(self, wish: CheckpointWish | None) -> None:
        self._wish = wish

    def check(self, launcher: Launcher, host_discovery_script: str | os.PathLike[str] | None) -> None:
        """Check that the checkpoint directory can be written."""
        if self._wish is not None:
            self._wish.check()

    def sizes(
        self, launcher: Launcher, num_proc: int | None, min_np: int | None, max_np: int | None
    ) -> tuple[int, int, int]:
        """Return the launcher's sizes unchanged: all slots are for workers."""
        return launcher.sizes(num_proc, min_np, max_np)

    def run(
        self, launcher: Launcher, settings: JobSettings, call: bytes, log: EventLog, printer: OutputPrinter
    ) -> list[bytes]:
        """Run the job until it ends; Ctrl-C ends it."""
        run_id = secrets.token_hex(4)
        credentials = create_credentials(run_id)
        plan = active_plan()
        with ExitStack() as stack:
            service = stack.enter_context(
                SparkDriverService(
                    settings,
                    credentials,
                    bind_address=launcher.bind_address,
                    event_log=log,
                    printer=printer,
                    faults=plan,
                )
            )
            if settings.host_discovery_script is not None:
                stack.enter_context(HostDiscovery(settings.host_discovery_script, service.hosts_listed))
            ticket = Ticket(run_id, launcher.addresses(service.port), credentials, settings.network_interface)
            trouble = f"the job cannot go on in {launcher.platform}"
            listener = SlotListener(
                on_stopped=lambda reason: service.cancel(JobCancelledError(f"{trouble}: {reason}")),
                on_failed=lambda reason: service.cancel(TrainingFailedError(f"{trouble}: {reason}")),
                on_draining=service.drain_slot,
                on_given_up=service.slot_given_up,
            )
            slots = launcher.launch(ticket, settings.max_np, listener)
            service.begin(begin_job(log, run_id, settings, call, plan, self._wish, launcher.application), slots)
            with slots:
                try:
                    return _await(service)
                except SparkElasticError as error:
                    # If the slots have ended, the loss of all workers is a consequence of that, not the cause of the job's end.
                    ended = slots.find_end()
                    if ended and not isinstance(error, JobCancelledError):
                        raise JobCancelledError(f"{trouble}: {ended}") from error
                    raise
                except BaseException:
                    service.cancel(JobCancelledError("run() was interrupted"))
                    raise
                finally:
                    slots.submit_no_more()
                    service.stop_serving()


def _await(service: SparkDriverService) -> list[bytes]:
    """Wait for the outcome in short turns, because a thread that waits without a timeout may not notice Ctrl-C."""
    while True:
        try:
            return service.outcome.result(SIGNAL_SECONDS)
        except concurrent.futures.TimeoutError:
            continue
