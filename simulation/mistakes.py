"""The mistakes of the product that the simulation has to notice, one per line: what goes wrong, where, and by which change.

If no schedule notices a mistake, a unit test does, which is named with the mistake. Left out are mistakes for which
another guard makes up (``form_timeout`` of driver and rank, two checks of a commit in a broken world), and mistakes that need
something that does not happen in a job: messages of a connection keep their order, and there are no more slots than ``max_np``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function of the product, and a piece of its source that is replaced."""

    name: str
    where: str
    old: str
    new: str
    # The unit test that notices the mistake, as module:function, if no schedule does. It is called without fixtures.
    test: str = ""


_WORKER_EVENTS = "spark_elastic.driver.worker_events:"
_LOSSES = "spark_elastic.driver.losses:"
_SETBACKS = "spark_elastic.driver.setbacks:Setbacks."
_ADVANCE = "spark_elastic.driver.advance:"
_ROSTER = "spark_elastic.driver.roster:Roster."
_WATCHDOG = "spark_elastic.driver.watchdog:"
_FORMING = "spark_elastic.driver.forming:"
MUTANTS = (
    Mutant(
        "a job goes on after more resets than it may have",
        _SETBACKS + "over_limit",
        "self._counted <= limit",
        "self._counted <= limit + 1",
    ),
    Mutant(
        "a job that may have as many resets ends at the last of them",
        _SETBACKS + "over_limit",
        "self._counted <= limit",
        "self._counted < limit",
    ),
    Mutant(
        "newcomers that break a world use up reset_limit",
        _SETBACKS + "broke",
        "self._by_newcomers <= NEWCOMERS_LIMIT",
        "False",
        test="tests.unit.driver.test_setbacks:test_newcomers_that_fail_count_only_where_nothing_else_happens_any_more",
    ),
    Mutant(
        "the end at the limit waits for a loss for ever",
        _LOSSES + "end_at_limit_if_due",
        "job.now < world.explained_by",
        "True",
        test="tests.unit.driver.test_losses:test_a_reset_limit_does_not_wait_long_for_a_loss_that_nobody_hears_of",
    ),
    Mutant(
        "a reset that a rank has reported does not end a job at its limit",
        _LOSSES + "end_at_limit_if_due",
        "return end_at_limit(",
        "return False and end_at_limit(",
        test="tests.unit.driver.test_losses:test_a_reset_limit_ends_a_job_whose_world_broke_without_a_loss_once_all_have_come_back",
    ),
    Mutant("lost workers are not fenced", _ROSTER + "remove", "del self.workers[worker.worker]", "pass"),
    Mutant("lost workers are not killed", _ROSTER + "remove", "host is None or host.worker == worker.worker", "False"),
    Mutant(
        "the world need not have a holder of the newest commit",
        "spark_elastic.driver.ranks:choose_members",
        "if newest is not None and",
        "if False and",
    ),
    Mutant(
        "a worker that is too slow leaves though too few are left without it",
        "spark_elastic.driver.slowness:can_spare",
        "len(seen.members) - 1 + len(seen.newcomers) >= seen.settings.min_np",
        "True",
        test="tests.unit.driver.test_slowness:test_without_a_spare_worker_it_stays_which_is_told_once_and_leaves_when_a_newcomer_is_ready",
    ),
    Mutant(
        "a hang in a collective is ignored",
        _WATCHDOG + "stuck_collectives",
        "late = find_late(inside, is_awaited)",
        "late: list[Worker] = []",
    ),
    Mutant(
        "a world in which all ranks wait for each other is waited for",
        _WATCHDOG + "stuck_collectives",
        "elif any(worker.activity.waiting for worker in inside):",
        "elif False:",
    ),
    Mutant(
        "a silent worker is waited for", _WATCHDOG + "silent_workers", "seen.now - worker.heard > patience", "False"
    ),
    Mutant(
        "a worker whose Python is held by one long call is taken for silent",
        _WORKER_EVENTS + "worker_seen",
        "worker.heard = job.now",
        "pass",
    ),
    Mutant(
        "a survivor in user code is waited for",
        _WATCHDOG + "late_survivors",
        "worker.awaited_since is not None and",
        "False and",
    ),
    Mutant(
        "worlds below min_np form",
        "spark_elastic.driver.situation:Situation.needed",
        "return self.settings.min_np",
        "return 1",
    ),
    Mutant(
        "survivors that are not ready are not waited for",
        _FORMING + "is_gathered",
        "all(worker.phase is WorkerPhase.READY for worker in seen.members)",
        "True",
    ),
    Mutant("survivors are not aborted", _LOSSES + "abort_if_due", "if awaited:", "if False:"),
    Mutant(
        "what a worker said of its commits before counts for more",
        _WORKER_EVENTS + "worker_ready",
        "worker.commit = event.commit",
        "worker.commit = event.commit or worker.commit",
    ),
    Mutant(
        "a pause of the driver is not forgiven",
        "spark_elastic.driver.clock:MachineClock.advance",
        "gap > PAUSE_SECONDS",
        "False",
    ),
    Mutant(
        "workers that are too many stay ready, with what they hold",
        _FORMING + "find_left_out",
        "worker.commit is not None and",
        "False and",
    ),
    Mutant(
        "more workers train than are to",
        "spark_elastic.driver.joining:joins_at",
        "len(members) >= seen.most",
        "len(members) >= seen.settings.max_np",
        test="tests.unit.driver.test_sizing:test_a_newcomer_that_was_on_its_way_waits",
    ),
    Mutant(
        "newcomers are never let in",
        "spark_elastic.driver.joining:find_interrupt",
        "due is not None and seen.now >= due",
        "False",
    ),
    Mutant(
        "ranks go by youth",
        "spark_elastic.driver.ranks:assign_ranks",
        "key=lambda candidate: candidate.worker",
        "key=lambda candidate: -candidate.worker",
    ),
    Mutant(
        "a host gets a second worker",
        "spark_elastic.driver.hosts:Host.is_vacant",
        "self.worker is None and ",
        "",
    ),
    Mutant(
        "a loss after the finish goes unnoticed",
        _LOSSES + "_lose_member",
        "if world.phase is WorldPhase.FINISHING and job.settings.elastic:",
        "if False:",
    ),
    Mutant(
        "the job is over at the first vote", "spark_elastic.driver.voting:have_all_voted", "return all(", "return any("
    ),
    Mutant(
        "a drained worker stays while too few others are left",
        _ADVANCE + "_form_if_ready",
        "job.order(*job.roster.dismiss(find_drained(seen, kept={worker.worker for worker in chosen})))",
        "pass",
    ),
    Mutant(
        "the driver's loop spins after the end",
        "spark_elastic.driver.machine:DriverMachine.deadline",
        "if job.over:",
        "if False:",
    ),
    Mutant(
        "commits are ordered by index",
        "spark_elastic.driver.holders:newest_held",
        "sorted(commits, reverse=True)",
        "sorted(commits, reverse=True, key=lambda commit: commit.index)",
    ),
    Mutant(
        "a slice that is missing is not missed",
        "spark_elastic.driver.holders:find_holders",
        "if len(found) == slices.of:",
        "if found:",
    ),
    Mutant(
        "a commit in slices begins before all ranks hold the last one",
        "spark_elastic.worker.state.commits:Commits._meet",
        "if world is not None and",
        "if False and",
    ),
    Mutant(
        "no rank but one keeps a slice",
        "spark_elastic.worker.state.slices:choose_slices",
        "min(redundancy, size - 1) + 1",
        "1",
    ),
    Mutant(
        "of a divided optimizer what has come from others is dropped",
        "spark_elastic.worker.state.keepers.sharded:Sharded.divide",
        "{**stays, **received}",
        "stays",
    ),
    Mutant(
        "a rank keeps its parts of a divided optimizer as they are when it goes back to an older commit",
        "spark_elastic.worker.state.keepers.sharded:Sharded.catch_up",
        "newest is not None and self._spare.commit == newest",
        "False",
    ),
    Mutant(
        "all survivors are given up with one host",
        _SETBACKS + "lost_state",
        "not self._settings.durable",
        "False",
    ),
    Mutant(
        "a commit need not be whole",
        "spark_elastic.worker.state.keepers.copies:OnDevice.settle",
        "self.snapshots.switch()",
        "pass",
    ),
    Mutant(
        "a copy on a GPU counts although an abort has met it",
        "spark_elastic.worker.world:World.wait_for",
        "return copy.was_made",
        "return True",
    ),
    Mutant("a copy on a GPU is not waited for", "spark_elastic.worker.world:World.wait_for", "copy.wait()", "pass"),
    Mutant(
        "a rank aborts its device's group before the others have looked",
        "spark_elastic.worker.world:World.abort",
        "self.group.abort()",
        "(self.group.abort(), self.group.abort_device())",
    ),
    Mutant(
        "the devices' groups are aborted when the first rank has looked",
        _ADVANCE + "_abort_device_if_all_answered",
        "if all(",
        "if any(",
        "tests.unit.driver.test_advance:test_the_devices_group_is_aborted_once_when_all_ranks_have_told_what_they_had_completed",
    ),
    Mutant(
        "the devices' groups are not aborted",
        _ADVANCE + "_abort_device_if_all_answered",
        "if all(",
        "if False and all(",
    ),
    Mutant(
        "the last commit before a reset is not settled",
        "spark_elastic.worker.state.commits:Commits.go_back",
        "self.settle()",
        "pass",
    ),
    Mutant(
        "a repaired rank does not say what it holds",
        "spark_elastic.worker.state.objects:ObjectState.sync",
        "job.control.commit = world.newest_commit",
        "pass",
    ),
    Mutant(
        "a dirty rank says that it holds its last commit",
        "spark_elastic.worker.state.commits:Commits.go_back",
        "job.control.commit = None",
        "pass",
    ),
    Mutant(
        "optimizers step in broken worlds",
        "spark_elastic.worker.state.keepers.in_place:check_world",
        "if world.is_broken():",
        "if False:",
    ),
    Mutant(
        "the state is not restored after a loss",
        "spark_elastic.worker.elastic:_run",
        "        state.restore()",
        "        pass",
    ),
    Mutant(
        "an interrupt is seen by the rank itself at once",
        "spark_elastic.worker.state.exchange:Exchange.go_on",
        "if self.is_interrupted:",
        "if self.is_interrupted or self._job.control.is_interrupted:",
    ),
    Mutant(
        "each rank chooses the next exchange by itself",
        "spark_elastic.worker.state.exchange:Exchange.read",
        "everybody[0].next_after",
        "everybody[self._world.rank].next_after",
    ),
    Mutant(
        "commits that no reduction precedes are not confirmed",
        "spark_elastic.worker.state.exchange:Exchange.go_on",
        "not has_met or",
        "",
    ),
    Mutant(
        "interrupts outlive their generation",
        "spark_elastic.worker.control:ControlClient.is_interrupted",
        "self._interrupted == self.generation",
        "self._interrupted > 0",
    ),
    Mutant(
        "aborts reach later generations",
        "spark_elastic.worker.control:ControlClient.is_aborted",
        "self._aborted >= generation",
        "self._aborted > 0",
    ),
    Mutant(
        "a vote ends at an old finish",
        "spark_elastic.worker.control:ControlClient.vote",
        "if self._finished != self.generation:",
        "if False:",
    ),
    Mutant(
        "newcomers take the wrong donor",
        "spark_elastic.worker.state.repair:plan_repair",
        "if commit == newest]",
        "if commit is not None]",
    ),
    Mutant(
        "a share of the rows is given twice",
        "spark_elastic.data.plan:make_step",
        "even(rows, sharers)",
        "even(rows + 1, sharers)",
    ),
    Mutant(
        "the loader does not go back",
        "spark_elastic.data.loader:PositionedLoader.load_state_dict",
        'state["position"]',
        'max(state["position"], self._tracker.position)',
    ),
    Mutant(
        "a duplicate of a slot takes it over",
        "spark_elastic.driver.service:SparkDriverService._serve_task",
        "while slot in self._slots.values():",
        "while False:",
    ),
    Mutant(
        "who waits in a closed store is not told",
        "spark_elastic.driver.control_store:ControlStore.close_generation",
        "waiter.answer(StoreReply(waiter.request.number, gone=True))",
        "pass",
    ),
    Mutant(
        "progress is counted at the seal",
        "spark_elastic.driver.job_state:JobState.note_commit",
        "commit.index == 0",
        "commit.index < 0",
        "tests.unit.driver.test_reference_scenarios:test_a_function_that_never_commits_fails_with_a_hint",
    ),
    Mutant(
        "one rank's commit is progress of all",
        "spark_elastic.driver.job_state:JobState.note_commit",
        "len(world.committed) == len(world.ranks)",
        "bool(world.committed)",
        "tests.unit.driver.test_reference_scenarios:"
        "test_a_commit_of_others_in_the_step_in_which_a_rank_fails_is_no_progress",
    ),
    Mutant(
        "newcomers' random numbers are independent of their rank",
        "spark_elastic.worker.state.generators:seed_newcomer",
        "world.generation, world.rank)",
        "world.generation)",
        "tests.unit.worker.state.test_torch_state:test_newcomers_draw_random_numbers_of_their_own_rank_and_generation",
    ),
    Mutant(
        "who is late after an abort has ready_timeout",
        _WATCHDOG + "late_survivors",
        "max(seen.settings.ready_timeout, _time_without_progress(seen, seen.world))",
        "seen.settings.ready_timeout",
        "tests.unit.driver.test_reference_scenarios:test_a_survivor_that_does_not_come_back_is_fenced_after_hang_timeout",
    ),
    Mutant(
        "a heartbeat does not restart the time after an abort",
        _WORKER_EVENTS + "worker_heard",
        "worker.awaited_since = job.now",
        "pass",
        "tests.unit.driver.test_watchdog:test_a_heartbeat_of_the_last_holder_restarts_its_time",
    ),
    Mutant(
        "the last holder is fenced like anybody else",
        _WATCHDOG + "last_holders",
        "return set() if known - suspects else",
        "return set() if True else",
    ),
    Mutant(
        "what silent workers hold is taken for known",
        _WATCHDOG + "last_holders",
        "and _is_heard(seen, worker)",
        "",
        "tests.unit.driver.test_watchdog:test_who_falls_silent_a_moment_later_is_no_proof_that_the_state_is_safe",
    ),
    Mutant(
        "what members of a broken world hold is taken for known",
        _WATCHDOG + "last_holders",
        "and (worker.phase is WorkerPhase.READY or not is_broken or worker.worker in holding)",
        "",
        "tests.unit.driver.test_watchdog:test_a_silent_rank_of_a_broken_world_is_replaced_once_another_is_back_with_the_state",
    ),
    Mutant(
        "silent ranks are judged by what they had said",
        _WATCHDOG + "stuck_collectives",
        "if not all(_is_heard(seen, worker) for worker in seen.members):",
        "if False:",
        "tests.unit.driver.test_watchdog:test_ranks_that_the_driver_does_not_hear_are_not_judged_by_what_they_said_before",
    ),
    Mutant(
        "newcomers are not blamed first",
        _FORMING + "choose_replaced",
        "if newcomers and any(worker.has_connected for worker in members):",
        "if False:",
        "tests.unit.driver.test_admission:test_a_newcomer_that_cannot_be_connected_to_costs_one_attempt_and_not_the_job",
    ),
    Mutant(
        "the last holder is replaced for not connecting",
        _FORMING + "choose_replaced",
        "(len(holders) > 1 or worker not in holders)",
        "True",
        "tests.unit.driver.test_admission:test_the_last_holder_of_the_newest_commit_is_never_replaced_for_not_connecting",
    ),
    Mutant(
        "newcomers that fail are let in at once",
        "spark_elastic.driver.admission:Admission.failed",
        "if self.failures < FREE_FAILURES:",
        "if True:",
        "tests.unit.driver.test_admission:test_newcomers_that_fail_every_time_break_a_few_worlds_and_then_have_to_wait",
    ),
    Mutant(
        "a place that cannot be connected to is let in at once",
        "spark_elastic.driver.admission:Admission.unconnected",
        "record.opens_at = now + pause",
        "pass",
        "tests.unit.driver.test_admission:test_a_newcomer_that_cannot_be_connected_to_costs_one_attempt_and_not_the_job",
    ),
    Mutant(
        "newcomers that wait are not taken when too few are left",
        _FORMING + "choose_next",
        "if kept_out and len(chosen) < seen.needed:",
        "if False:",
        "tests.unit.driver.test_admission:test_newcomers_that_have_to_wait_are_taken_when_there_are_too_few_without_them",
    ),
    Mutant(
        "the exceptions of newcomers condemn the job",
        "spark_elastic.driver.situation:Situation.speaks_of_the_job",
        "worker is not None and self.is_joining(worker)",
        "False",
        "tests.unit.driver.test_admission:test_newcomers_that_raise_in_worlds_that_never_commit_do_not_condemn_the_job",
    ),
    Mutant(
        "newcomers that fail use up reset_limit",
        _SETBACKS + "broke",
        "if by_newcomers:",
        "if False:",
        "tests.unit.driver.test_admission:test_newcomers_that_fail_do_not_count_against_reset_limit_while_the_others_commit",
    ),
    Mutant(
        "newcomers may fail for ever where nothing else happens",
        _SETBACKS + "broke",
        "if self._by_newcomers <= NEWCOMERS_LIMIT:",
        "if True:",
        "tests.unit.driver.test_admission:test_newcomers_that_fail_where_the_job_cannot_go_on_without_them_count",
    ),
    Mutant(
        "a change of what trains that one rank makes alone is waited for",
        _WATCHDOG + "differing_ranks",
        "if others:",
        "if False:",
        "tests.unit.driver.test_watchdog:test_a_change_that_one_rank_has_made_alone_ends_the_job_at_once_and_is_named",
    ),
)
