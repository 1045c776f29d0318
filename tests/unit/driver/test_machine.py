"""The machine's entrance: every event has its function, the deadline is never past, and every schedule of events ends."""

from __future__ import annotations

from typing import get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.job_state import EXIT_SECONDS
from spark_elastic.driver.machine import NOTED_BY
from spark_elastic.errors import JobCancelledError, ResetLimitExceededError
from spark_elastic.protocol.messages import CommitId


def test_every_event_is_noted_by_a_function_of_its_own() -> None:
    assert set(NOTED_BY) == set(get_args(ev.Event))
    assert len(set(NOTED_BY.values())) == len(NOTED_BY)


def test_cancelling_ends_the_job_once() -> None:
    machine = running("a").machine
    assert [
        type(command) for command in machine.cancel(JobCancelledError("stop")) if not isinstance(command, do.Record)
    ] == [
        do.FailJob,
        do.ReleaseTask,
    ]
    assert machine.cancel(JobCancelledError("again")) == []


def lost_at_the_end() -> Script:
    """A job that a worker's loss ends, of which only a broken connection is known so far."""
    script = running("a", "b", reset_limit=0)
    script.send(ev.WorkerGone(1, FirstSign.CONNECTION_BROKE))
    assert script.job.over
    assert script.outcome is None
    return script


def test_the_error_of_a_job_waits_for_the_exit_code_that_explains_it() -> None:
    script = lost_at_the_end()
    deadline = script.machine.deadline()
    assert deadline is not None
    assert script.now < deadline <= script.now + EXIT_SECONDS
    script.exits(1, -11)
    assert str(script.error).startswith(
        "failures have caused 1 reset, more than reset_limit=0 allows; the last one: rank 1 on b was lost: killed by SIGSEGV\n\n"
        "rank 1 (worker 1) on b: killed by SIGSEGV\n"
    )


def test_the_error_of_a_job_does_not_wait_for_long() -> None:
    script = lost_at_the_end()
    script.pass_time(EXIT_SECONDS)
    assert "its connection to the driver broke" in str(script.error)


def test_the_end_of_the_workers_host_explains_the_error_as_well() -> None:
    script = lost_at_the_end()
    script.lose_host(1)
    assert "rank 1 on b was lost: its host was lost: " in str(script.error)


def test_cancelling_a_job_that_has_failed_ends_it_with_its_own_error() -> None:
    script = lost_at_the_end()
    commands = script.machine.cancel(JobCancelledError("stop"))
    (error,) = (command.error for command in commands if isinstance(command, do.FailJob))
    assert isinstance(error, ResetLimitExceededError)


def test_a_loss_whose_exit_is_never_told_of_delays_no_later_error() -> None:
    script = running("a", "b", "c", reset_limit=1)
    script.send(ev.WorkerGone(1, FirstSign.CONNECTION_BROKE))
    script.lose_host(1)
    script.come_back(0, 2)
    script.commit()
    script.exits(2, -11)
    assert script.outcome is not None


def test_the_next_deadline_is_never_in_the_past_while_a_newcomer_waits_for_one_that_boots() -> None:
    script = running("a")
    early, late = script.register("b"), script.register("c")
    script.send(ev.WorkerConnected(script.worker_on(late)))
    script.boot(script.worker_on(early))
    script.pass_time(2)
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now, "the driver's loop would spin until the other has booted"


def test_the_next_deadline_is_never_in_the_past_while_a_vote_is_out() -> None:
    script = running("a", "b")
    script.vote(0)
    script.join("c")
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now, "the driver's loop would spin until the last rank votes"


def test_the_next_deadline_is_never_in_the_past_while_the_world_is_full() -> None:
    script = running("a", "b", max_np=2)
    script.join("c")
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now


def test_there_is_no_next_deadline_after_the_end() -> None:
    """The service asks after every event: a deadline in the past would have its loop spin while tasks are on their way out."""
    script = running("a", "b")
    script.join("c", wait=False)
    script.machine.cancel(JobCancelledError("Ctrl-C"))
    script.now += 1
    script.send(ev.TaskHeard(0))
    assert script.machine.deadline() is None


class AnySchedule(RuleBasedStateMachine):
    """Any order of legal events; ``Script`` checks every command, the invariants here look at the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(
            min_np=2, max_np=4, num_proc=2, start_timeout=60, elastic_timeout=60, hang_timeout=30, yield_after=20,
            ready_timeout=15, form_timeout=15, adaptive_np=True,
        )  # fmt: skip

    def pick(self, number: int, phases: set[str]) -> int | None:
        fitting = [p.worker for p in self.script.processes.values() if p.phase in phases]
        return fitting[number % len(fitting)] if fitting else None

    @precondition(lambda self: len(self.script.hosts) < 5)
    @rule(name=st.sampled_from("abc"))
    def register(self, name: str) -> None:
        used = {host.slot for host in self.script.job.hosts}
        free = [slot for slot in range(5) if slot not in used]
        if free:  # tasks that were told to restart may still hold theirs
            self.script.register(name, slot=free[0])

    @rule(number=st.integers(0, 9))
    def boot(self, number: int) -> None:
        worker = self.pick(number, {"starting"})
        if worker is not None:
            self.script.boot(worker)

    @rule(number=st.integers(0, 9))
    def acknowledge(self, number: int) -> None:
        worker = self.pick(number, {"forming"})
        if worker is not None:
            self.script.send(ev.GroupFormed(worker, self.script.processes[worker].generation))
            process = self.script.processes[worker]
            process.phase, process.commit = "training", CommitId(process.generation, 0)
            self.script.heartbeat(worker)

    @rule()
    def acknowledge_all(self) -> None:
        for number in range(len(self.script.processes)):
            self.acknowledge(number)
            self.acknowledge(0)

    @rule(number=st.integers(0, 9))
    def commit_one(self, number: int) -> None:
        worker = self.pick(number, {"training"})
        if worker is not None:
            self.script.commit(worker)

    @precondition(lambda self: self.script.generation > 0)
    @rule(period=st.sampled_from([1000, 2000, 4000]), times=st.integers(1, 3))
    def time_steps(self, period: int, times: int) -> None:
        ranks = self.script.ranks
        timed = ev.StepsTimed(ranks[0], self.script.generation, (1,) * len(ranks), (600,) * len(ranks), period, rows=12)
        for _ in range(times):
            self.script.send(timed)

    @rule(number=st.integers(0, 9), planned=st.booleans())
    def come_back(self, number: int, planned: bool) -> None:
        worker = self.pick(number, {"training", "forming", "voted"})
        world = self.script.job.world
        if worker is None or world is None or self.script.processes[worker].generation != world.generation:
            return
        if world.phase.name == "BREAKING" or (world.phase.name == "INTERRUPTING" and planned):
            self.script.ready(worker, "" if world.phase.name == "INTERRUPTING" else "a peer was lost")

    @rule()
    def all_come_back(self) -> None:
        for number in range(len(self.script.processes)):
            self.come_back(number, True)
            self.come_back(0, True)

    @rule(number=st.integers(0, 9))
    def vote(self, number: int) -> None:
        worker = self.pick(number, {"training"})
        if worker is not None:
            self.script.vote(worker)

    @rule(number=st.integers(0, 9))
    def result(self, number: int) -> None:
        world = self.script.job.world
        worker = self.pick(number, {"voted"})
        if worker is not None and world is not None and world.phase.name == "FINISHING":
            self.script.deliver(worker)

    @rule(number=st.integers(0, 9), code=st.sampled_from([-9, -11, 0, 1]))
    def kill(self, number: int, code: int) -> None:
        if self.script.processes:
            workers = list(self.script.processes)
            self.script.kill(workers[number % len(workers)], code=code)

    @rule(number=st.integers(0, 9), line=st.integers(0, 9))
    def raise_error(self, number: int, line: int) -> None:
        worker = self.pick(number, {"booting", "training"})
        if worker is not None:
            self.script.raises(worker, where=f"train.py:{line}")

    @rule()
    def end_those_told(self) -> None:
        self.script.end_those_told()

    @precondition(lambda self: self.script.hosts)
    @rule(number=st.integers(0, 9))
    def lose_host(self, number: int) -> None:
        hosts = list(self.script.hosts)
        self.script.lose_host(hosts[number % len(hosts)])

    @precondition(lambda self: self.script.hosts)
    @rule(number=st.integers(0, 9), deadline=st.none() | st.integers(0, 20))
    def drain(self, number: int, deadline: int | None) -> None:
        hosts = list(self.script.hosts)
        self.script.drain(hosts[number % len(hosts)], None if deadline is None else self.script.now + deadline)

    @rule(number=st.integers(0, 9), generation=st.integers(0, 5))
    def say_something_stale(self, number: int, generation: int) -> None:
        stale = [ev.GroupFormed, ev.WorkerAborted, ev.WorkerReturned, ev.WorkerReady, ev.WorldBroken]
        if generation < self.script.job.generation:
            kind = stale[number % len(stale)]
            rest = {ev.GroupFormed: (), ev.WorldBroken: ("a connection ended",)}.get(kind, (CommitId(generation, 1),))
            worker = number if kind is not ev.WorkerReady else 10**6
            self.script.send(kind(worker, generation, *rest))

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0]), mute=st.integers(-3, 9))
    def pass_time(self, seconds: float, mute: int) -> None:
        self._forget_released()
        self.script.pass_time(seconds, step=0.5, silent={mute})

    @rule()
    def pause_the_driver(self) -> None:
        self.script.now += 1000
        self.script.send(ev.Tick())

    def _forget_released(self) -> None:
        """Tasks that were released or restarted are gone before long."""
        for host in [host for host in self.script.hosts if self.script.job.hosts.get(host) is None]:
            self.script.lose_host(host)

    @invariant()
    def the_machine_is_consistent(self) -> None:
        job = self.script.job
        self._forget_released()
        for host in job.hosts:
            if host.worker in job.workers:
                assert job.workers[host.worker].host == host.host
        world = job.world
        if world is not None and not job.over and world.phase.name == "RUNNING":
            assert len(world.members) == len([w for w in world.workers if w in job.workers])

    def teardown(self) -> None:
        """Given hosts that stay up and workers that do their work, every job ends."""
        script = self.script
        script.end_those_told()
        for host in [host.host for host in script.job.hosts if host.draining]:
            script.lose_host(host)
        for _ in range(60):
            if script.outcome is not None:
                return
            self._forget_released()
            for _ in range(4 - len(script.hosts)):
                self.register("d")  # unless those that are to restart hold all slots: they come back below
            for process in list(script.processes.values()):
                if process.phase in ("starting", "booting"):
                    script.boot(process.worker)
            self.all_come_back()
            self.acknowledge_all()
            world = script.job.world
            if world is not None and world.phase.name == "RUNNING":
                script.vote(*[w for w in script.living if script.processes[w].phase == "training"])
            elif world is not None and world.phase.name == "FINISHING":
                script.deliver()
            script.end_those_told()
            script.pass_time(2, busy=True)
        raise AssertionError(f"the job does not end: {script.job.world}, {script.job.workers}")


AnySchedule.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


TestAnySchedule = AnySchedule.TestCase
