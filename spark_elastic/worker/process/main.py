"""The life of a training worker: fetch the user's function, call it, send its result."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack

import cloudpickle
import msgspec

from spark_elastic._script import remember_script
from spark_elastic.errors import NotInWorldError
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import WHOLE_JOB
from spark_elastic.protocol.ticket import Payload, Ticket
from spark_elastic.worker import faults
from spark_elastic.worker.checks.lone_training import LoneTraining
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.fixed_world import call_in_fixed_world
from spark_elastic.worker.job import Job, current_job, enter_job
from spark_elastic.worker.process.children import ending_children
from spark_elastic.worker.process.imports import note_imports
from spark_elastic.worker.runtime import REAL_RUNTIME, Runtime


def run_worker(ticket: Ticket, number: int, token: str, runtime: Runtime = REAL_RUNTIME) -> int:
    """Run one worker in this process and return its exit code. The process has just been forked from the warm parent."""
    runtime.prepare()
    with ExitStack() as stack:
        control = stack.enter_context(runtime.control(ticket, number, token, runtime))
        payload = msgspec.msgpack.decode(control.payload(), type=Payload)
        faults.arm(runtime.injector(payload.faults, control.claim_fault))
        faults.reached(Point.BOOT)
        try:
            _join_job(stack, control, ticket, number, payload, runtime)
        except Exception as error:
            control.failed(error)
            return 1
        try:
            return _call(control, payload, runtime)
        finally:
            note_imports()


def _join_job(
    stack: ExitStack, control: ControlClient, ticket: Ticket, number: int, payload: Payload, runtime: Runtime
) -> None:
    checkpoints = None
    if payload.checkpoint is not None:
        checkpoints = stack.enter_context(runtime.checkpoints(payload.checkpoint, control.report, control.beat))
    address = _group_address(ticket, control)
    enter_job(
        Job(control, number, address, payload.form_timeout, payload.max_np, checkpoints, not payload.elastic, runtime)
    )
    runtime.set_pin(lambda key, make: _pin(control, key, make))


def _call(control: ControlClient, payload: Payload, runtime: Runtime) -> int:
    job = current_job()
    assert job is not None

    def call() -> object:
        function, args, kwargs, sys.argv = _unpickle(payload.call)
        with LoneTraining(job), ending_children():
            value = function(*args, **kwargs)
        job.reporter.flush()
        return value

    try:
        value = call() if payload.elastic else call_in_fixed_world(job, call)
    except BaseException as error:
        runtime.end_failed_program()
        job.reporter.left_early()
        # In a fixed world the other ranks would wait in vain for a rank that has raised. The error named here would recur in
        # every attempt.
        control.failed(error, fatal=not payload.elastic or isinstance(error, NotInWorldError))
        return 1
    world = job.world
    faults.reached(
        Point.RESULT,
        rank=None if world is None else world.rank,
        generation=None if world is None else world.generation,
    )
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        problem = f"the result of fn, of type {kind}, cannot be pickled: {type(error).__name__}: {error}"
        control.raised(problem, "", traceback.format_exc(), fatal=True)
        return 1
    runtime.end_program(control.beat)
    control.send_result(data, elastic=job.finished)
    return 0


def _unpickle(pickled: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object], list[str]]:
    """Return the function, its arguments, and those of the command that has started the driver."""
    try:
        function, args, kwargs, argv = pickle.loads(pickled)
        remember_script(function)
        return function, args, kwargs, list(argv)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"fn needs the module {error.name!r}, which this executor does not have; install it there, or ship its file or a "
            "zip of its package: with --py-files or spark.submit.pyFiles, in a running classic session with "
            "sparkContext.addPyFile(path), in Spark Connect with spark.addArtifacts(path, pyfile=True)"
        ) from error


def _pin(control: ControlClient, key: str, make: Callable[[], bytes]) -> bytes:
    """Return a value that the whole job shares: the first worker to ask makes it, and newcomers get the same one."""
    name = f"pinned/{key}"
    if control.store("check", (name,), generation=WHOLE_JOB).amount:
        return control.store("get", (name,), generation=WHOLE_JOB).values[0]
    return control.store("set_default", (name,), (make(),), generation=WHOLE_JOB).values[0]


def _group_address(ticket: Ticket, control: ControlClient) -> str:
    if ticket.network_interface is None:
        return control.address
    from spark_elastic.task.facts import interface_address

    return interface_address(ticket.network_interface)
