"""DriverMachine: turns what happened (events) into what to do (commands).

It does no I/O, starts nothing and reads no clock, so that every schedule of faults can be replayed. Each formed world is a
*generation*. ``phases`` has the table of what a world and a worker go through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from spark_elastic._exhaustive import assert_never
from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver import watchdog
from spark_elastic.driver.admission import Admission
from spark_elastic.driver.clock import MachineClock
from spark_elastic.driver.failures import FailureBook, FirstSign, describe_exit
from spark_elastic.driver.forming import (
    choose_next,
    choose_replaced,
    find_drained,
    is_gathered,
    is_sealed,
    newest_commit,
)
from spark_elastic.driver.history import History
from spark_elastic.driver.hosts import Host
from spark_elastic.driver.joining import joins_at, why_interrupt
from spark_elastic.driver.phases import WorkerChange, WorkerPhase, WorldChange, WorldPhase
from spark_elastic.driver.ranks import assign_ranks
from spark_elastic.driver.roster import Roster
from spark_elastic.driver.setbacks import Setbacks
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.shortage import Shortage
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.voting import find_to_call_back, have_all_delivered, have_all_voted
from spark_elastic.driver.world import Worker, World
from spark_elastic.errors import (
    RanksDifferError,
    SparkElasticError,
    TrainingFailedError,
    WorkerFailure,
    name_worker,
)
from spark_elastic.protocol.messages import Activity, CommitId, Member


class DriverMachine:
    """Decides for one job. Events come in by ``note``; what follows from all that is known is decided by ``decide``.

    ``handle`` is both. Noting an event costs the same in a small and in a large world, deciding looks at all workers: who gets
    many events at once notes them all and decides once. ``over`` tells that the machine has decided for the last time.
    """

    def __init__(self, settings: JobSettings, now: float) -> None:
        self.settings = settings
        self._roster = Roster()
        self.hosts = self._roster.hosts
        self.workers = self._roster.workers
        self.admission = Admission()
        self.world: World | None = None
        self.over = False
        self.book = FailureBook()
        self.setbacks = Setbacks(settings)
        self._history = History()
        self._commands: list[do.Command] = []
        self._generation = 0
        self._sizes: dict[int, int] = {}
        self._newest_seen: CommitId | None = None
        # Set once a worker has shown that the user's function has an elastic function.
        self._elastic_since: float | None = None
        self._plain_target: int | None = None
        self._started = now
        self._shortage = Shortage(settings)
        # Lost workers whose exit code, once it is known, counts against the user's code.
        self._exits_to_count: set[int] = set()
        self._clock = MachineClock(now)
        # What a handler returns is done after what it has ordered itself.
        self._handlers: dict[type, Callable[..., list[do.Command] | None]] = {
            ev.TaskRegistered: self._task_registered,
            ev.TaskHeard: self._roster.task_heard,
            ev.TaskLost: self._task_lost,
            ev.SlotGivenUp: self._slot_given_up,
            ev.HostDraining: self._host_draining,
            ev.HostsListed: self._hosts_listed,
            ev.WorkerConnected: self._roster.worker_connected,
            ev.WorkerGone: self._worker_gone,
            ev.WorkerSeen: self._roster.worker_seen,
            ev.WorkerExited: self._worker_exited,
            ev.WorkerReady: self._worker_ready,
            ev.WorkerAborted: self._worker_aborted,
            ev.WorldBroken: self._world_broken,
            ev.GroupFormed: self._group_formed,
            ev.WorkerReturned: self._worker_returned,
            ev.WorkerRaised: self._worker_raised,
            ev.ResultFlowed: self._roster.result_flowed,
            ev.ResultArrived: self._result_arrived,
            ev.WorkerHeard: self._worker_heard,
            ev.Tick: self._tick,
        }

    # ------------------------------------------------------------------ entrance

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Take note of an event at driver time ``now`` (monotonic seconds); return what to do, in order."""
        return [*self.note(event, now), *self.decide()]

    def note(self, event: ev.Event, now: float) -> list[do.Command]:
        """Take note of an event; return what it calls for by itself, in order."""
        pause = self._clock.advance(now)
        if pause is not None:
            self._record("driver_paused", seconds=round(pause, 3))
        self._history.happened(event, now)
        try:
            if self.over:
                self._after_the_end(event)
            else:
                self._commands += self._handlers[type(event)](event, self._clock.now) or ()
        except Exception as error:
            raise self._history.fault(error) from error
        return self._take_commands()

    def decide(self) -> list[do.Command]:
        """Do whatever has become possible by what was noted; return what to do, in order."""
        try:
            if not self.over:
                self._advance(self._clock.now)
        except Exception as error:
            raise self._history.fault(error) from error
        return self._take_commands()

    def cancel(self, error: SparkElasticError) -> list[do.Command]:
        """End the job for a reason from outside."""
        self._fail(error)
        return self._take_commands()

    def deadline(self) -> float | None:
        """Driver time at which a ``Tick`` is due before the regular one, or None."""
        if self.over:
            return None
        times = [self.hosts.next_ready_at(self._clock.now), joins_at(self.situation, self.admission)]
        known = [time for time in times if time is not None]
        return self._clock.to_driver_time(min(known)) if known else None

    def _take_commands(self) -> list[do.Command]:
        taken, self._commands = self._commands, []
        return taken

    @property
    def generation(self) -> int:
        """The number of the present world, or of the last one."""
        return self._generation

    # ------------------------------------------------------------------ hosts

    def _task_registered(self, event: ev.TaskRegistered, now: float) -> list[do.Command]:
        host = Host(event.host, event.slot, event.name, event.place, event.address)
        return self._roster.register(host, self._members)

    def _task_lost(self, event: ev.TaskLost, now: float) -> None:
        host = self.hosts.remove(event.host)
        if host is None:
            return
        self._record("host_lost", host=event.host, name=host.name, reason=event.reason)
        if host.worker is not None:
            # Its supervisor is gone, and a worker ends with its supervisor.
            self._lose(host.worker, f"its host was lost: {event.reason}", now)

    def _slot_given_up(self, event: ev.SlotGivenUp, now: float) -> None:
        self._shortage.slot_given_up(event.reason)
        self._record("slot_given_up", slot=event.slot, reason=event.reason)

    def _host_draining(self, event: ev.HostDraining, now: float) -> list[do.Command]:
        deadline = None if event.deadline is None else self._clock.from_driver_time(event.deadline)
        return self._roster.take_away(event.host, deadline, self._members)

    def _hosts_listed(self, event: ev.HostsListed, now: float) -> list[do.Command]:
        return self._roster.take_listing(event.slots, self._members)

    # ------------------------------------------------------------------ workers

    def _worker_heard(self, event: ev.WorkerHeard, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        worker.heard = now
        if event.beats != worker.beats:
            worker.beats = event.beats
            worker.active_at = now
            if worker.awaited_since is not None:
                worker.awaited_since = now
        if self.world is not None and event.generation == self.world.generation and self.is_member(event.worker):
            known, worker.activity = worker.activity, event.activity
            if (known.collectives, known.moved) != (event.activity.collectives, event.activity.moved):
                worker.active_at = now
            self._note_commit(worker, event.commit)

    def _worker_ready(self, event: ev.WorkerReady, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase in (WorkerPhase.LEAVING, WorkerPhase.DONE):
            return
        worker.heard = now
        if not self.is_member(event.worker) and event.commit is not None:
            return  # only a member of a world has made or got a commit
        if self._elastic_since is None:
            self._elastic_since = now
        world = self.world
        if world is not None and event.worker in world.ranks:
            if event.generation != world.generation:
                return
            # After a planned interrupt ranks come back without a reason; those that the driver has called back are expected.
            expected = worker.awaited_since is not None or (world.phase is WorldPhase.INTERRUPTING and not event.reason)
            if not expected and world.phase is not WorldPhase.FINISHING:
                reason = f"rank {world.ranks[event.worker]} reports: {event.reason or 'it left without being asked to'}"
                if world.phase is WorldPhase.FORMING:
                    self._break_unconnected(reason, now)
                else:
                    self._break(reason, now)
                if event.worker not in self.workers:
                    return
        worker.enter(WorkerChange.STOOD_READY)
        worker.ready_at = worker.active_at = now
        worker.awaited_since = None
        worker.commit = event.commit
        self._note_commit(worker, event.commit)
        self._record("worker_ready", worker=event.worker, generation=event.generation, commit=str(event.commit))

    def _worker_aborted(self, event: ev.WorkerAborted, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or self.world is None or event.generation != self.world.generation:
            return
        worker.heard = now
        if self.is_member(event.worker):
            self.world.answered.add(event.worker)
            if event.commit is not None:
                self.world.holding.add(event.worker)
            self._note_commit(worker, event.commit)

    def _world_broken(self, event: ev.WorldBroken, now: float) -> None:
        world = self.world
        if world is None or event.generation != world.generation or event.worker not in self.workers:
            return
        if event.worker in world.ranks and world.phase in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
            self._break(f"rank {world.ranks[event.worker]} reports: {event.reason}", now)

    def _group_formed(self, event: ev.GroupFormed, now: float) -> None:
        world = self.world
        if world is None or event.generation != world.generation or event.worker not in self.workers:
            return
        if event.worker in world.ranks:
            world.acknowledged.add(event.worker)
        if world.phase is WorldPhase.FORMING and len(world.acknowledged) == len(world.members):
            self._change_world(WorldChange.CONNECTED)
            world.was_formed = True
            self.setbacks.formed()
            for worker in self._living_members():
                worker.active_at = now
                worker.form_failures = 0
                worker.has_connected = True
            self._record(
                "world_formed",
                generation=world.generation,
                size=len(world.members),
                seconds=round(now - world.since, 4),
            )

    def _worker_returned(self, event: ev.WorkerReturned, now: float) -> None:
        worker = self.workers.get(event.worker)
        world = self.world
        if (
            worker is None
            or world is None
            or event.generation != world.generation
            or worker.phase is not WorkerPhase.MEMBER
        ):
            return
        self._note_commit(worker, event.commit)
        worker.active_at = now
        worker.enter(WorkerChange.RETURNED)

    def _worker_raised(self, event: ev.WorkerRaised, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is WorkerPhase.LEAVING:
            return
        world = self.world
        failure = WorkerFailure(
            event.worker,
            self.situation.rank_of(event.worker),
            worker.host_name,
            f"raised {event.error}",
            event.traceback,
        )
        self.book.add(failure)
        if world is not None and event.worker in world.ranks:
            world.raised.add(event.worker)
        if event.fatal:
            kind = RanksDifferError if event.kind == RanksDifferError.__name__ else TrainingFailedError
            self._fail(kind(event.error, (failure,)))
            return
        if self.situation.speaks_of_the_job(event.worker):
            self.book.count_exception(self._generation, event.where, event.error)
        self._lose(event.worker, f"raised {event.error}", now)
        if world is None and not self.over:
            self._give_up_if_pointless()

    def _worker_gone(self, event: ev.WorkerGone, now: float) -> None:
        if self.situation.speaks_of_the_job(event.worker):
            self._exits_to_count.add(event.worker)
        self._lose(event.worker, event.sign, now)

    def _worker_exited(self, event: ev.WorkerExited, now: float) -> None:
        if self._roster.exited(event):
            return
        if event.worker in self.workers:
            if self.situation.speaks_of_the_job(event.worker):
                self._exits_to_count.add(event.worker)
            self._lose(event.worker, describe_exit(event.code), now)
        is_why = self.book.explain(event.worker, event.code, event.last_lines)
        if event.worker in self._exits_to_count and not self.over:
            self._exits_to_count.discard(event.worker)
            self.book.count_exit(self._generation, event.code)
            if self.world is None:
                self._give_up_if_pointless()
        host = self.hosts.get(event.host)
        if host is not None and host.at_fault and not self.over:
            known = self.book.failures.get(event.worker)
            cause = known.cause if known is not None else describe_exit(event.code)
            self._commands.append(do.RestartTask(host.host, f"its workers keep failing, the last one: {cause}"))
        self._record(
            "worker_exited", worker=event.worker, code=event.code, meaning=describe_exit(event.code), explains=is_why
        )

    def _result_arrived(self, event: ev.ResultArrived, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        worker.heard = now
        finishing = self.world is not None and self.world.phase is WorldPhase.FINISHING
        if event.elastic and not (finishing and self.is_member(event.worker)):
            return  # nobody has been told to return
        if not event.elastic and (self._elastic_since is not None or self._generation > 0):
            failure = WorkerFailure(
                event.worker, None, worker.host_name, "fn returned without calling its elastic function"
            )
            self._fail(
                TrainingFailedError(
                    "fn has an elastic function, but one worker returned without calling it; every worker has to",
                    (failure,),
                )
            )
            return
        if worker.phase is WorkerPhase.DONE:
            return
        worker.active_at = now
        worker.enter(WorkerChange.DELIVERED)
        self._record("result_arrived", worker=event.worker)

    # ------------------------------------------------------------------ losing a worker

    def _lose(self, number: int, why: str | FirstSign, now: float) -> None:
        """Take a worker out of the job. It is fenced from here on: whatever it still sends is ignored."""
        worker = self.workers.get(number)
        if worker is None or worker.phase is WorkerPhase.DONE or self.over:
            return
        self._commands += self._roster.remove(worker)
        if worker.phase is WorkerPhase.LEAVING:
            return
        world = self.world
        cause, is_explained = (why.value, False) if isinstance(why, FirstSign) else (why, True)
        rank = self.situation.rank_of(number)
        is_joining = self.situation.is_joining(worker)
        if number not in self.book.failures:
            self.book.add(WorkerFailure(number, rank, worker.host_name, cause), is_explained=is_explained)
        self._record("worker_lost", worker=number, rank=rank, host=worker.host_name, cause=cause)
        self._roster.blame_place(worker, now, is_member=self.is_member(number))
        if world is None or number not in world.ranks:
            return
        if world.phase is WorldPhase.FINISHING and self.settings.elastic:
            self._fail(
                TrainingFailedError(
                    f"rank {rank} was lost after training had finished, before its result arrived", self.book.story()
                )
            )
            return
        self._forgive_the_blamed(world)
        if worker.phase is not WorkerPhase.READY:  # who has left its collectives leaves nobody hanging
            if is_joining:
                self._newcomers_failed(worker, cause, now)
            self._break(f"rank {rank} on {worker.host_name} was lost: {cause}", now, is_newcomers=is_joining)
        if not self.over and not self._living_members():
            self._all_members_lost(world)

    def _break_unconnected(self, reason: str, now: float) -> None:
        """The ranks of a world have not connected to each other: break it, and replace who is to blame."""
        world = self.world
        assert world is not None
        members = self._living_members()
        missing = [worker for worker in members if worker.worker not in world.acknowledged]
        for worker in missing:
            worker.form_failures += 1
            world.blamed.add(worker.worker)
        cost = now - world.since
        replaced = choose_replaced(members, missing, took_long=cost >= self.settings.form_timeout / 2)
        self._break(reason, now)
        for worker in replaced:
            if not worker.has_connected:
                pause = self.admission.unconnected(worker.place, now, cost)
                self._record(
                    "newcomers_paused",
                    host=worker.host_name,
                    failures=1,
                    seconds=pause,
                    reason="nobody could connect to them",
                )
            self._lose(worker.worker, f"could not connect to the others ({worker.form_failures} times in a row)", now)

    def _forgive_the_blamed(self, world: World) -> None:
        """Somebody was lost: if the world has not formed, that is the reason."""
        if not world.was_formed:
            for number in world.blamed & set(self.workers):
                self.workers[number].form_failures -= 1
            world.blamed.clear()

    def _newcomers_failed(self, newcomer: Worker, cause: str, now: float) -> None:
        """A newcomer has broken a world that others have trained in: once a world, count it, and let further ones wait."""
        world = self.world
        assert world is not None
        if not world.newcomers_failed:
            world.newcomers_failed = True
            pause = self.admission.failed(now, now - world.since)
            if pause:
                self._record(
                    "newcomers_paused",
                    host=None,
                    failures=self.admission.failures,
                    seconds=pause,
                    reason=f"{name_worker(newcomer.worker, world.ranks[newcomer.worker])} on {newcomer.host_name} {cause}",
                )

    def _break(self, reason: str, now: float, is_newcomers: bool | None = None) -> None:
        """The world cannot go on: have everybody abort its collectives and come back to the elastic function.

        ``is_newcomers`` tells whether a newcomer was lost, or another member; None: nobody is known to be.
        """
        world = self.world
        assert world is not None
        if world.phase is not WorldPhase.BREAKING:
            self._change_world(WorldChange.BROKE)
            world.broken_by = reason
            self._record("world_broken", generation=world.generation, reason=reason)
            if is_newcomers is None:  # who feels a newcomer's end may say so before that is heard of
                is_newcomers = any(map(self.situation.is_joining, self._living_members()))
            world.counts_as_reset = not is_newcomers
            if self._fail_if(self.setbacks.broke(reason, self.book.story(), is_newcomers)):
                return
        elif is_newcomers is False and not world.counts_as_reset:
            world.counts_as_reset = True
            if self._fail_if(self.setbacks.counts(reason, self.book.story())):
                return
        waiting = [
            worker for worker in self._living_members() if worker.phase in (WorkerPhase.MEMBER, WorkerPhase.VOTED)
        ]
        fresh = [worker for worker in waiting if worker.awaited_since is None]
        for worker in fresh:
            worker.awaited_since = now
        if fresh:
            self._commands.append(
                do.AbortWorld(world.generation, tuple(worker.worker for worker in fresh), world.broken_by)
            )

    def _break_stuck(self, reason: str, silent: Collection[int], now: float) -> None:
        """The world waits for itself. The next has connections of its own; if it gets stuck, too, who does not answer goes."""
        if self._fail_if(self.setbacks.got_stuck(reason, bool(silent), self.book.story())):
            return
        self._break(reason, now)
        if self.setbacks.is_stuck_again:
            for number in silent:
                self._lose(number, "its connections to the others were silent in two worlds in a row", now)

    def _abort_device_if_all_answered(self) -> None:
        """Have the device's group aborted once all members have told what they had completed.

        An abort on one rank can complete the collectives of others with nonsense. A member that is ready has left its own.
        """
        world = self.world
        if world is None or world.device_aborted or not world.answered:
            return
        members = self._living_members()
        inside = [worker for worker in members if worker.phase in (WorkerPhase.MEMBER, WorkerPhase.VOTED)]
        if all(worker.awaited_since is not None and worker.worker in world.answered for worker in inside):
            world.device_aborted = True
            for worker in inside:
                worker.awaited_since = self._clock.now
            self._commands.append(do.AbortDevice(world.generation, tuple(worker.worker for worker in members)))

    def _all_members_lost(self, world: World) -> None:
        what = f"all {len(world.members)} workers of generation {world.generation} were lost"
        if not self.settings.elastic:
            pass  # nobody holds anything: all of it runs again
        elif world.raised >= set(world.workers):
            self._fail(TrainingFailedError(f"all {len(world.members)} workers of the world raised", self.book.story()))
        elif any(worker.phase is WorkerPhase.READY and worker.commit is not None for worker in self.workers.values()):
            pass  # a drained one that had not been let go yet
        elif world.was_formed or self._newest_seen is not None:
            self._lose_state(what)
        else:
            # Nobody had begun to train: the next world starts from the beginning.
            self._drop_world(WorldChange.LOST)
            self._give_up_if_pointless()

    def _lose_state(self, what: str) -> None:
        """Nobody holds the state any more: go on from the newest durable checkpoint, as a new run would, or fail."""
        if self._fail_if(self.setbacks.lost_state(what, self.book.story())):
            return
        self._record("state_lost", generation=self._generation, reason=what)
        self._drop_world(WorldChange.LOST)
        self._give_up_if_pointless()

    # ------------------------------------------------------------------ moving on

    def _advance(self, now: float) -> None:
        """Do whatever has become possible. Each step looks at the whole state, whichever event came."""
        if not self.settings.elastic and self.world is not None and self.world.phase is WorldPhase.BREAKING:
            self._run_again(self.world)
        self._start_workers(now)
        self._commands += self._roster.release_drained()
        self._finish_if_voted(now)
        if self.world is not None and self.world.phase is WorldPhase.FINISHING:
            if have_all_delivered(self.situation):
                self._change_world(WorldChange.DELIVERED)
                self._finish(self.world.workers)
            return
        if self._elastic_since is None and self._finish_plain(now):
            return
        self._abort_device_if_all_answered()
        self._dismiss_drained_if_sealed()
        self._interrupt_if_planned()
        self._form_if_ready(now)
        self._shortage.note(self.situation)

    def _run_again(self, world: World) -> None:
        """End what is left of a fixed world; the next one runs all of the user's function again, in new processes."""
        # Results that are there already are of no use without the others'.
        self._commands += self._roster.kill(self._living_members())
        self._record("run_again", generation=world.generation)
        self._drop_world(WorldChange.REPEATED)

    def _start_workers(self, now: float) -> None:
        if self.world is not None and self.world.phase is WorldPhase.FINISHING:
            return
        # A function without an elastic part runs in num_proc workers, no more.
        limit = self._plain_target or self.settings.num_proc if self._elastic_since is None else None
        self._commands += self._roster.start_workers(now, limit)

    def _finish_if_voted(self, now: float) -> None:
        if have_all_voted(self.situation):
            world = self._change_world(WorldChange.VOTED)
            self._commands.append(do.FinishWorld(world.generation, world.workers))
            self._record("world_finished", generation=world.generation, size=len(world.members))
            self._commands += self._roster.dismiss(
                [worker for worker in self.workers.values() if worker.worker not in world.ranks]
            )
        elif voted := find_to_call_back(self.situation):
            for worker in voted:
                worker.enter(WorkerChange.CALLED_BACK)
                worker.awaited_since = now
            numbers = tuple(worker.worker for worker in voted)
            self._commands.append(do.AbortWorld(self._generation, numbers, "other ranks were interrupted"))

    def _finish_plain(self, now: float) -> bool:
        """End a job whose function has no elastic part once enough results are there. Return whether it did."""
        target = self._plain_target
        if target is None:
            target = self.settings.num_proc
            if now - self._started >= self.settings.start_timeout and self.settings.min_np <= len(self.workers):
                target = self._plain_target = min(len(self.workers), target)
        done = [worker.worker for worker in self.workers.values() if worker.phase is WorkerPhase.DONE]
        if len(done) < target:
            return False
        self._finish(tuple(sorted(done)[:target]))
        return True

    def _interrupt_if_planned(self) -> None:
        reason = why_interrupt(self.situation, self.admission)
        if reason:
            world = self._change_world(WorldChange.INTERRUPTED)
            self._commands.append(do.InterruptWorld(world.generation, world.workers))
            self._record("world_interrupted", generation=world.generation, reason=reason)

    def _form_if_ready(self, now: float) -> None:
        if not is_gathered(self.situation):
            return
        if self.world is not None and self.world.phase is WorldPhase.BREAKING and self._give_up_if_pointless():
            return
        newest = newest_commit(self.situation)
        if newest is None and self._newest_seen is not None:
            # Those who are left have not got it yet, or, committing in place, were caught between step and commit.
            self._lose_state("all workers that held the newest commit were lost")
            if self.over:
                return
        seen = self.situation
        chosen = choose_next(seen, self.admission, newest)
        if len(chosen) >= seen.needed:
            self._form(assign_ranks(chosen), newest, now)
        else:
            # Who drains and is not kept would only hold a slot that may be needed elsewhere.
            self._commands += self._roster.dismiss(find_drained(seen, kept={worker.worker for worker in chosen}))

    def _dismiss_drained_if_sealed(self) -> None:
        seen = self.situation
        if seen.world is not None and is_sealed(seen):
            self._commands += self._roster.dismiss(find_drained(seen, kept=seen.world.ranks))

    def _form(self, members: tuple[Member, ...], newest: CommitId | None, now: float) -> None:
        self._generation += 1
        self._sizes[self._generation] = len(members)
        previous_size = self._sizes[newest.generation] if newest is not None else 0
        if self.world is not None:
            self._change_world(WorldChange.FOLLOWED)
        self.world = World(self._generation, members, since=now)
        if self._fail_if(self.setbacks.forming(self.book.story())):
            return
        for member in members:
            worker = self.workers[member.worker]
            worker.enter(WorkerChange.CHOSEN)
            worker.activity = Activity()
            worker.active_at = now
            worker.awaited_since = None
        self._commands.append(do.FormWorld(self._generation, members, previous_size))
        self._record(
            "world_forming",
            generation=self._generation,
            size=len(members),
            previous_size=previous_size,
            workers=[member.worker for member in members],
            newest_commit=str(newest),
        )

    # ------------------------------------------------------------------ time

    def _tick(self, event: ev.Tick, now: float) -> None:
        for host in self.hosts:
            host.heard = now if host.heard is None else host.heard
        for check in watchdog.checks():
            if not self.over:
                for finding in list(check(self.situation)):
                    self._act_on(finding, now)
        if not self.over:
            self._check_shortage()

    @property
    def situation(self) -> Situation:
        """What is known at the moment, for those who judge it."""
        return Situation(
            self._clock.now, self._started, self.settings, self.hosts, self.workers, self.world, self._generation
        )

    def _act_on(self, finding: watchdog.Finding, now: float) -> None:
        match finding:
            case watchdog.HostSilent(host, reason):
                self._commands.append(do.RestartTask(host, reason))
                self._task_lost(ev.TaskLost(host, reason), now)
            case watchdog.WorkerHung(worker, cause):
                self._lose(worker, cause, now)
            case watchdog.RanksUnconnected(reason):
                self._break_unconnected(reason, now)
            case watchdog.WorldStuck(reason):
                self._break(reason, now)
            case watchdog.CollectivesStuck(reason, silent):
                self._break_stuck(reason, silent, now)
            case watchdog.Pointless(reason):
                self._fail(TrainingFailedError(reason, self.book.story()))
            case watchdog.RanksDiffer(reason):
                self._fail(RanksDifferError(reason, self.book.story()))
            case _:
                assert_never(finding)

    def _check_shortage(self) -> None:
        if self._shortage.is_time_to_yield(self.situation):
            self._commands += self._roster.yield_slots()
        self._fail_if(self._shortage.verdict(self.situation, self._elastic_since))

    # ------------------------------------------------------------------ small questions and answers

    def _note_commit(self, worker: Worker, commit: CommitId | None) -> None:
        if commit is None or (worker.commit is not None and commit < worker.commit):
            return
        worker.commit = commit
        if self._newest_seen is None or commit > self._newest_seen:
            self._newest_seen = commit
        world = self.world
        if world is None or commit.generation != world.generation or commit.index == 0:
            return
        if not worker.has_progressed:
            worker.has_progressed = True
            self.admission.progressed(worker.place)
        if not world.progressed:
            world.progressed = True
            self.setbacks.progressed()
            self.book.progressed(world.generation)
            self._roster.progressed(world.workers)

    def _living_members(self) -> list[Worker]:
        return self.situation.members

    def _change_world(self, change: WorldChange) -> World:
        """Move the newest world on to the phase that follows a change."""
        world = self.world
        assert world is not None, change
        before = world.phase
        world.enter(change)
        what = f"generation {world.generation}: {before.name} → {world.phase.name}"
        self._history.changed(what, self._clock.driver_time)
        return world

    def _drop_world(self, change: WorldChange) -> None:
        """End the newest world; the next one begins from what it finds, as the first one does."""
        if self.world is not None:
            self._change_world(change)
        self.world = None
        self._newest_seen = None

    @property
    def _members(self) -> Collection[int]:
        """The numbers of those who form the newest world."""
        return self.world.ranks if self.world is not None else ()

    def is_member(self, number: int) -> bool:
        """Whether a worker belongs to the newest world."""
        return number in self._members

    def _give_up_if_pointless(self) -> bool:
        verdict = self.book.verdict()
        if verdict is not None:
            self._fail(TrainingFailedError(verdict, self.book.story()))
        return self.over

    def _finish(self, workers: tuple[int, ...]) -> None:
        self.over = True
        self._record("job_finished", workers=list(workers), resets=self.setbacks.resets)
        self._commands.append(do.FinishJob(workers))
        self._commands += self._roster.release_all()

    def _fail(self, error: SparkElasticError) -> None:
        if self.over:
            return
        self.over = True
        self._record("job_failed", error=type(error).__name__, message=str(error))
        self._commands.append(do.FailJob(error))
        self._commands += self._roster.release_all()

    def _fail_if(self, error: SparkElasticError | None) -> bool:
        """Fail the job if there is a reason to. Return whether there is."""
        if error is not None:
            self._fail(error)
        return error is not None

    def _after_the_end(self, event: ev.Event) -> None:
        """A closed job admits nobody."""
        if isinstance(event, ev.TaskRegistered):
            self._commands.append(do.ReleaseTask(event.host))
        elif isinstance(event, ev.WorkerExited):
            self.book.explain(event.worker, event.code, event.last_lines)

    def _record(self, kind: str, **fields: object) -> None:
        self._commands.append(do.Record(kind, fields))
