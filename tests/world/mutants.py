"""``python -m tests.world.mutants``: switches off one protection after the other, and shows which world notices.

    MUTANT=name         this one alone; several are separated by semicolons
    MUTANT_SECONDS=60   how long worlds are tried for each, in seconds of one core
    MUTANT_PROCESSES=2  how many are tried at once; by default as many as there are cores

Rows with a star are protections that the protocol was without at some time.

Every protection of the protocol has an entry here. One that nothing notices is either not needed or not tested. Some
are noticed by tests alone: they are there for what the bus of today, and so that of a world, does not do.
"""

import sys
from itertools import chain

from .mutation import Mutant
from .trial import SECONDS, attempt, attempt_all, chosen

_AGENT = "resile_learner.agent.core"
_REPORTING = "resile_learner.agent.reporting"
_MEMBERSHIP = "resile_learner.membership.machine"
_SYNC = "resile_learner.membership.recovery"
_SESSION = "resile_learner.worker.session"
_PROTOCOL = "resile_learner.training.protocol"
_CHECKPOINTER = "resile_learner.checkpoint.checkpointer"
_STORE = "resile_learner.checkpoint.store"
_REGISTRY = "resile_registry.core"
_CORE = "resile_scheduler.core"

TESTS = {
    "resile_learner.agent.core": ("tests/learner/test_agent_core.py",),
    "resile_learner.agent.job_files": ("tests/learner/test_job_files.py",),
    "resile_learner.agent.outputs": ("tests/learner/test_outputs.py",),
    "resile_learner.agent.reporting": ("tests/learner/test_reporting.py",),
    "resile_learner.membership": ("tests/learner/test_membership.py", "tests/learner/test_membership_machine.py"),
    "resile_learner.worker.peers": ("tests/learner/test_peers.py", "tests/world/test_worker.py"),
    "resile_learner.worker": ("tests/learner/test_suspicions.py", "tests/world/test_worker.py"),
    "resile_learner.collectives.peer": ("tests/learner/test_rounds.py",),
    "resile_learner.training.rounds": ("tests/learner/test_rounds.py", "tests/world/test_worker.py"),
    "resile_learner.training": ("tests/learner/test_training_call.py", "tests/world/test_worker.py"),
    "resile_learner.checkpoint": (
        "tests/learner/test_checkpoint.py",
        "tests/learner/test_checkpointer.py",
        "tests/learner/test_lineage.py",
        "tests/learner/test_uploads.py",
        "tests/learner/test_upload_queue.py",
        "tests/world/test_pause.py",
    ),
    "resile_registry.core": ("tests/registry/test_core.py",),
    "resile_scheduler.core.decisions": ("tests/scheduler/test_pool_suspend.py", "tests/scheduler/test_simulator.py"),
    "resile_scheduler.core.job_view": (
        "tests/scheduler/test_simulator.py",
        "tests/scheduler/test_environment_requests.py",
    ),
    "resile_scheduler.core.backoff": ("tests/scheduler/test_backoff.py",),
    "resile_scheduler.core.retention": ("tests/scheduler/test_retention.py",),
    "resile_scheduler.core": (
        "tests/scheduler/test_core.py",
        "tests/scheduler/test_assignments.py",
        "tests/scheduler/test_environment_requests.py",
        "tests/scheduler/test_recovery.py",
        "tests/scheduler/test_starts.py",
        "tests/scheduler/test_pool_suspend.py",
        "tests/scheduler/test_suspicions.py",
    ),
    "resile_scheduler.lease": ("tests/scheduler/test_lease.py",),
    "resile_scheduler.executor": ("tests/scheduler/test_executor.py", "tests/scheduler/test_service.py"),
    "resile_scheduler.service": ("tests/scheduler/test_service.py",),
    "resile_shared.bus.buckets": ("tests/shared/test_buckets.py",),
}
"""What is tried when no world notices a mutant, by the beginning of its module's name."""

MUTANTS = (
    # agents
    Mutant(
        "agent obeys old allocations",
        "an allocation that arrives late, or again, undoes a newer one",
        _AGENT,
        "if known and (allocation.epoch, allocation.generation) < (known.epoch, known.generation):",
        "if False:",
    ),
    Mutant(
        "agent starts workers on held slots",
        "two workers on one slot",
        _AGENT,
        "if holder := next(held, None):",
        "if (holder := next(held, None)) and False:",
        once_missing=True,
    ),
    Mutant(
        "agent forgets how a worker ended that is named once more",
        "a script that fails is started again and again, since nobody hears why its worker ended",
        _AGENT,
        "if (job, placement.worker) not in self.workers]",
        "if self.workers.get((job, placement.worker), Worker(0, 'gone')).state == 'gone']",
    ),
    Mutant(
        "agent starts a worker again that has ended",
        "a scheduler that has not heard of its end names it once more",
        _AGENT,
        "        if self._highest.has_placed(job, placement.worker):\n",
        "        if False:\n",
        once_missing=True,
    ),
    Mutant(
        "agent obeys orders for another incarnation",
        "workers that an earlier incarnation was to start",
        _AGENT,
        "if (placement.host, placement.incarnation) == (self.host, self.incarnation):",
        "if placement.host == self.host:",
    ),
    Mutant(
        "agent stops workers of another incarnation",
        "a late instruction ends workers that are needed",
        _AGENT,
        "if stop.incarnation != self.incarnation:",
        "if False:",
    ),
    Mutant(
        "agent of a lost host goes on",
        "workers whose slots are given away go on",
        _AGENT,
        "if record.state in _GONE:",
        "if False:",
    ),
    Mutant(
        "agent does not kill what an empty allocation names no more",
        "workers of a job that has ended or starts again hold their slots",
        _AGENT,
        "        if not allocation.placements:\n            return self._kill_all(job)\n",
        "        if not allocation.placements:\n            return []\n",
    ),
    Mutant(
        "agent forgets workers at once",
        "their end, told in a heartbeat that was lost, is never told again",
        _AGENT,
        'if worker.state != "gone" or now - worker.ended < LISTED_SECONDS:',
        'if worker.state != "gone":',
    ),
    Mutant(
        "agent announces its host once",
        "a host whose first message was lost is never used",
        _AGENT,
        "or now < self._announce_due or",
        "or self._announce_due != 0.0 or",
    ),
    Mutant(
        "agent sends no order to a worker that starts to listen late",
        "a worker that missed its order waits for ever",
        _AGENT,
        "return [*beat, *([SendToWorker(job, message.worker, order)] if order else [])]",
        "return beat",
    ),
    Mutant(
        "agent leaves its workers alone when their job is taken from its host",
        "workers of a job that is deleted run for ever, and others miss the generation that they have to leave",
        _AGENT,
        "self._watched, (self._assigned or frozenset()) | living",
        "self._watched, (self._assigned or frozenset())",
    ),
    Mutant(
        "agent obeys allocations of jobs that it does not watch",
        "an allocation that was under way starts workers of a job that was taken from the host",
        _AGENT,
        "        if job not in self._watched:\n            return []\n",
        "",
    ),
    Mutant(
        "agent watches what an earlier scheduler assigns",
        "a scheduler that was replaced keeps workers from starting",
        _AGENT,
        "if not isinstance(event, Allocation | AssignJobs | StopWorkers | PauseWorkers):",
        "if not isinstance(event, Allocation | StopWorkers | PauseWorkers):",
    ),
    Mutant(
        "agent watches what was assigned to another incarnation",
        "a late instruction keeps workers from starting",
        _AGENT,
        "if assign.incarnation != self.incarnation:",
        "if False:",
    ),
    Mutant(
        "agent removes files before it knows what is assigned",
        "the output of a job that goes on here begins anew, and what was stored of it is overwritten",
        _AGENT,
        "return self._assigned is None or job in self._watched",
        "return job in self._watched",
    ),
    Mutant(
        "agent stores the output of deleted jobs",
        "files of a job of which nothing should be left",
        "resile_learner.agent.job_files",
        "        return entry is None or entry.value.is_deleted\n",
        "        return False\n",
    ),
    Mutant(
        "agent writes facts behind half a line",
        "facts that were kept while a disk was full, or after a crash, cannot be read",
        _REPORTING,
        'file.write(b"\\n" + line if self.ends_torn else line)',
        "file.write(line)",
        once_missing=True,
    ),
    Mutant(
        "agent begins uploads again that take long",
        "each holds a thread, and the same file is uploaded several times at once",
        "resile_learner.agent.outputs",
        "while running := self._running.get(job):",
        "while running := None:",
        once_missing=True,
    ),
    Mutant(
        "a name that cannot be stored keeps back the files behind it",
        "the output of a job that completed is lost, and the agent tries again for ever",
        "resile_learner.agent.outputs",
        "except NameRefused as error:",
        "except ZeroDivisionError as error:",
        once_missing=True,
    ),
    Mutant(
        "agent keeps no facts on its disk",
        "what was reported and not published is lost with the agent",
        _REPORTING,
        "            self._spool.add(Spooled(id=message.id, report=content))\n",
        "            pass\n",
    ),
    Mutant(
        "agent obeys schedulers of earlier epochs",
        "a leader that was replaced has its workers started beside those of the new one",
        _AGENT,
        "return [] if self._is_from_earlier_leader(event) else self._handle(event, now)",
        "return self._handle(event, now)",
        once_missing=True,
    ),
    # the scheduler
    Mutant(
        "scheduler gives slots away before their holders are gone",
        "two workers on one slot, or starts that the agents refuse",
        f"{_CORE}.pool",
        "if worker.phase is Phase.GONE and worker.number not in named:",
        "if worker.number not in named:",
    ),
    Mutant(
        "scheduler uses hosts that it has not heard of",
        "after a restart of the scheduler, slots that are held are given away",
        f"{_CORE}.pool",
        "self.is_usable(slot) and self.hosts[slot.host].is_heard\n",
        "self.is_usable(slot)\n",
    ),
    Mutant(
        "scheduler counts reports of any generation",
        "a generation that was cut off completes a job that has started again",
        f"{_CORE}.worker_reports",
        "is_current = job.generations.may_be_active(report.generation)",
        "is_current = True",
    ),
    Mutant(
        "scheduler counts checkpoints of any lineage",
        "a pause ends with a checkpoint of a run that was given up",
        f"{_CORE}.worker_reports",
        "case CheckpointSaved() as checkpoint if checkpoint.lineage == job.record.lineage:",
        "case CheckpointSaved() as checkpoint:",
        once_missing=True,
    ),
    Mutant(
        "scheduler believes old heartbeats",
        "a heartbeat that arrives late says that a worker is alive, or gone",
        f"{_CORE}.host_events",
        "if beat.incarnation != host.record.incarnation or beat.number <= host.beat:",
        "if beat.incarnation != host.record.incarnation:",
    ),
    Mutant(
        "scheduler believes heartbeats of another incarnation",
        "workers of an agent that has ended are taken for alive",
        f"{_CORE}.host_events",
        "if beat.incarnation != host.record.incarnation or beat.number <= host.beat:",
        "if beat.number <= host.beat:",
    ),
    Mutant(
        "scheduler keeps workers of hosts that were lost while none led",
        "a job waits for ever for workers that are gone",
        f"{_CORE}.host_events",
        "if host is None or host.record.incarnation != worker.incarnation or not host.is_alive:",
        "if False:",
    ),
    Mutant(
        "scheduler forgets the workers that it does not know",
        "a worker that an earlier scheduler dropped keeps its slot, which is given away",
        f"{_CORE}.host_events",
        'if report.state == "gone" or slot in self._pool.holders or slot not in host.slots:',
        "if True:",
    ),
    Mutant(
        "scheduler misses workers that disappear from the heartbeats",
        "a job waits for ever for a worker whose end nobody reported",
        f"{_CORE}.host_events",
        "if worker.was_seen and (job.id, worker.number) not in listed:",
        "if False:",
    ),
    Mutant(
        "scheduler tells agents once to stop workers",
        "a worker whose stop was lost holds its slot for ever",
        f"{_CORE}.outgoing",
        "if not worker.stop_sent or worker.slot.host == heard:",
        "if not worker.stop_sent:",
    ),
    Mutant(
        "scheduler assigns jobs once",
        "an agent that missed the instruction never learns of the workers that are placed on its host",
        f"{_CORE}.host_events",
        "        host.watched = None if beat.jobs is None else frozenset(beat.jobs)\n",
        "",
    ),
    Mutant(
        "scheduler takes jobs from hosts while their workers leave",
        "an agent that has not watched the newest allocation yet never does",
        f"{_CORE}.outgoing",
        "jobs = frozenset(job.id for job, _ in self._pool.held_on(name))",
        "jobs = frozenset(job.id for job, w in self._pool.held_on(name) if job.generations.names(w.number))",
    ),
    Mutant(
        "scheduler takes jobs from hosts that it has not heard of",
        "after a restart of the scheduler, agents are told to leave workers alone that it does not know of",
        f"{_CORE}.outgoing",
        "if host.is_alive and host.is_heard and not is_settled:",
        "if host.is_alive and not is_settled:",
    ),
    Mutant(
        "scheduler assigns all jobs to all hosts",
        "each host gets the allocations of the whole pool",
        f"{_CORE}.outgoing",
        "jobs = frozenset(job.id for job, _ in self._pool.held_on(name))",
        "jobs = frozenset(job.id for job in self._pool.jobs.values())",
    ),
    Mutant(
        "scheduler takes jobs from hosts before the allocation is stored",
        "after a crash, an agent starts workers again that it has forgotten",
        "resile_scheduler.executor",
        "        for starts_workers in (False, True):\n",
        "        for host, instruction in batch.instructions:\n"
        "            await self._bus.send(subjects.instruction(host), instruction)\n"
        "        for starts_workers in (False, True):\n",
    ),
    Mutant(
        "scheduler gives a slot before it is given up in storage",
        "after a crash in between, two jobs hold it",
        "resile_scheduler.executor",
        "if each.has_addresses != starts_workers]",
        "if starts_workers]",
    ),
    Mutant(
        "new scheduler believes that two jobs hold one slot",
        "it cannot start",
        f"{_CORE}.restore",
        "            if slot in self._pool.holders:",
        "            if False:",
    ),
    Mutant(
        "new scheduler counts on the record of every host with a job",
        "it cannot start once the registry has removed one",
        f"{_CORE}.pool",
        "        if host is None:  # the registry has removed it: it has no slots\n            return\n",
        "",
    ),
    Mutant(
        "new scheduler removes jobs before it knows who is alive",
        "a worker of a deleted job goes on, and stores what nobody removes",
        f"{_CORE}.retention",
        "if not self._deleted or any(host.is_alive and not host.is_heard for host in self._pool.hosts.values()):",
        "if not self._deleted:",
    ),
    Mutant(
        "scheduler deletes all jobs beyond the limits at once",
        "a limit that was lowered keeps the scheduler busy for so long that it is deposed",
        f"{_CORE}.retention",
        "kept[: max(0, MAX_LEAVING - num_leaving)]",
        "kept",
        once_missing=True,
    ),
    Mutant(
        "a pause is doubled for ever",
        "after some days of failures it is a number that no float holds, and the scheduler ends",
        f"{_CORE}.backoff",
        "2.0 ** min(times, MAX_DOUBLINGS)",
        "2.0 ** times",
        once_missing=True,
    ),
    Mutant(
        "scheduler asks once for a pause",
        "a pause whose request was lost never happens",
        f"{_CORE}.outgoing",
        "PAUSE_AGAIN_SECONDS = 5.0",
        "PAUSE_AGAIN_SECONDS = 1e9",
    ),
    Mutant(
        "scheduler fails jobs without a result at once",
        "a result that is still on its way comes too late",
        f"{_CORE}.recovery",
        "RESULT_SECONDS = 10.0",
        "RESULT_SECONDS = 0.0",
        once_missing=True,
    ),
    Mutant(
        "scheduler does not wait for what agents still have to report",
        "a result that waits in an agent comes too late",
        f"{_CORE}.recovery",
        "if any(host and host.is_alive and host.num_waiting for host in hosts):",
        "if False:",
        once_missing=True,
    ),
    Mutant(
        "scheduler does not wait for what it still has to read",
        "a job fails for want of a result that is stored already",
        "resile_scheduler.service",
        "is_behind = self._is_reading and self._lease.position < self._newest_report",
        "is_behind = False",
        once_missing=True,
    ),
    Mutant(
        "scheduler ignores that a result was lost with its host",
        "a job that completed on a host that failed is said to have failed",
        f"{_CORE}.recovery",
        "elif silenced := self._silenced(job):",
        'elif silenced := "":',
    ),
    Mutant(
        "scheduler does not recover",
        "members wait for ever for one that is gone",
        f"{_CORE}.recovery",
        "return bool(job.suspicions.vanished or _lost(job))",
        "return False",
    ),
    Mutant(
        "scheduler withdraws the only worker that a job moves to",
        "the leaver that has handed over to it waits for a recovery",
        f"{_CORE}.worker_ends",
        " or _may_have_taken_over(job, worker):",
        ":",
        once_missing=True,
    ),
    Mutant(
        "scheduler misses those that a completed job should have moved to",
        "a completed job fails as its joiners are stopped",
        f"{_CORE}.worker_ends",
        "    if job.record.completed or not job.generations.has_started:\n        return False\n",
        "    if not job.generations.has_started:\n        return False\n",
    ),
    Mutant(
        "scheduler recovers with no leaver",
        "a job starts again from a checkpoint beside a worker that has its state",
        f"{_CORE}.recovery",
        "if not members and not _may_have_moved(job) and not _has_trained_since_switch(job):",
        "if False:",
        once_missing=True,
    ),
    Mutant(
        "scheduler recovers with a leaver that is behind",
        "iterations that were committed and stored are trained again",
        f"{_CORE}.recovery",
        "if not members and not _may_have_moved(job) and not _has_trained_since_switch(job):",
        "if not members and not _may_have_moved(job):",
    ),
    Mutant(
        "scheduler changes a recovery that is not active",
        "members of two generations wait for each other",
        f"{_CORE}.allocator",
        "return not (generations.is_cold_starting or generations.is_recovering or generations.gone_since is not None)",
        "return not (generations.is_cold_starting or generations.gone_since is not None)",
    ),
    Mutant(
        "scheduler changes a cold start that is ordered",
        "initial members of two generations wait for each other",
        f"{_CORE}.allocator",
        "return not (generations.is_cold_starting or generations.is_recovering or generations.gone_since is not None)",
        "return not (generations.is_recovering or generations.gone_since is not None)",
    ),
    Mutant(
        "scheduler names workers again that it left behind",
        "a worker that the others gave up comes back with an old state",
        f"{_CORE}.allocator",
        "                worker.fence()\n",
        "                pass\n",
    ),
    Mutant(
        "scheduler writes without a lease",
        "two schedulers decide",
        "resile_scheduler.executor",
        "            await self._lease.confirm()\n",
        "            pass\n",
    ),
    Mutant(
        "scheduler stores allocations first",
        "after a crash, workers run that no record knows of",
        "resile_scheduler.executor",
        "        await _concurrently(self._store(record, items) for record, items in records)\n",
        "        await _concurrently(self._store_allocation(allocation) for allocation in batch.allocations)\n"
        "        await _concurrently(self._store(record, items) for record, items in records)\n",
    ),
    Mutant(
        "scheduler reads on where it is, not where it has stored",
        "a report that it had read and not stored is lost when it crashes",
        "resile_scheduler.service",
        "            if batch is not None:\n                await batch.done.wait()\n",
        "            pass\n",
    ),
    Mutant(
        "bucket has no fence",
        "a scheduler that was replaced changes what the new one stored",
        "resile_shared.bus.buckets",
        '            "Nats-Expected-Last-Subject-Sequence": str(fence.revision),\n'
        '            "Nats-Expected-Last-Subject-Sequence-Subject": self._spec.fence,\n',
        "",
        once_missing=True,
    ),
    Mutant(
        "a standby takes a lease that is renewed",
        "two schedulers lead in turns",
        "resile_scheduler.lease",
        "return begun - self._since >= self._patience",
        "return True",
    ),
    Mutant(
        "a pause counts only the checkpoints of the active generation",
        "a pause that meets a change of members never ends",
        f"{_CORE}.worker_reports",
        "case CheckpointSaved() as checkpoint if checkpoint.lineage == job.record.lineage:",
        "case CheckpointSaved() as checkpoint if report.generation == job.generations.active_number:",
        once_missing=True,
    ),
    Mutant(
        "a cold start has no deadline",
        "initial members that do not reach each other wait for ever",
        f"{_CORE}.deadlines",
        "            elif job.generations.placements:\n                self._give_up_start(job, now)\n",
        "",
        once_missing=True,
    ),
    Mutant(
        "a cold start resumes only from what was reported",
        "a job whose reports were lost starts from 0 beside a complete checkpoint",
        f"{_CORE}.allocator",
        "resume=cold_start and job.record.lineage > 0,",
        "resume=cold_start and job.record.checkpoint is not None,",
        once_missing=True,
    ),
    Mutant(
        "scheduler ends nobody who waits after the completion",
        "members that lost one after the completion wait for a recovery for ever",
        f"{_CORE}.probing",
        "            self._end_waiting(job, accuser, accusation, now=now)\n",
        "",
        once_missing=True,
    ),
    Mutant(
        "a probe leaves members of a complete job behind",
        "a member that is left behind after the completion is neither ended nor heard, and its job never ends",
        f"{_CORE}.probing",
        "if job.record.completed or not job.generations.has_started:\n                continue\n            here =",
        "if not job.generations.has_started:\n                continue\n            here =",
        once_missing=True,
    ),
    Mutant(
        "a start whose links broke is waited for like one that loads a checkpoint",
        "a job that starts again waits ten minutes for members that have left its first round",
        f"{_CORE}.deadlines",
        "if job.suspicions.have_lasted(self._link_seconds):",
        "if False:",
        once_missing=True,
    ),
    Mutant(
        "scheduler ends when the bus refuses a write",
        "one record that is too large ends every scheduler",
        "resile_scheduler.executor",
        "_REFUSALS = (MessageTooLarge, StoreFailed)",
        "_REFUSALS = ()",
        once_missing=True,
    ),
    Mutant(
        "a pool that ends suspends nothing",
        "the hosts of a pool go while its jobs train: what they trained is lost",
        f"{_CORE}.decisions",
        "        if not self._is_suspended:\n",
        "        if False:\n",
        once_missing=True,
    ),
    Mutant(
        "scheduler obeys a request to suspend that was meant for an earlier one",
        "a pool that runs again gives no job a slot",
        f"{_CORE}.core",
        "case PoolSuspendRequested(epoch=epoch) if epoch != self.epoch:",
        "case PoolSuspendRequested(epoch=epoch) if False:",
        once_missing=True,
    ),
    Mutant(
        "the end of a job that the bus refuses is not stored again",
        "a job that has failed runs for ever, as far as anybody can see, and again under the next scheduler",
        "resile_scheduler.service",
        "        self._group.create_task(self._executor.retry())\n",
        "",
        once_missing=True,
    ),
    Mutant(
        "a submission is known by what could be stored of it",
        "a job whose record was too large is another one when it is submitted again",
        f"{_CORE}.job_commands",
        "job.record.spec_sha256 == _digest(event.spec)",
        "job.record.spec == event.spec",
        once_missing=True,
    ),
    Mutant(
        "scheduler resumes jobs on any class of device",
        "the workers refuse the checkpoint of another class, and the job fails",
        f"{_CORE}.job_view",
        "if host is not None), job.record.device_class)\n",
        'if host is not None), "")\n',
    ),
    # the registry
    Mutant(
        "registry believes hellos of old incarnations",
        "a hello that arrives again brings a host back as it was",
        _REGISTRY,
        "if known and hello.incarnation < known.incarnation:",
        "if False:",
    ),
    Mutant(
        "registry loses no host",
        "what ran on a host that failed is waited for, for ever",
        _REGISTRY,
        "if self._listening_time - heard <= self._detection_seconds:",
        "if True:",
    ),
    Mutant(
        "registry brings lost incarnations back",
        "a host that was lost is used again though its workers were given up",
        _REGISTRY,
        "        if hello.host not in self._last_heard:\n            return []\n",
        "",
    ),
    # membership
    Mutant(
        "members switch when one of them is ready",
        "members train in two generations",
        _MEMBERSHIP,
        "if self._recovery_order or agreed <= self._current.generation or any(other != agreed for other in named):",
        "agreed = max(named)\n        if self._recovery_order or agreed <= self._current.generation:",
    ),
    Mutant(
        "members switch during a recovery",
        "members of a generation that is given up train on",
        _MEMBERSHIP,
        "if self._recovery_order or agreed <= self._current.generation or any(other != agreed for other in named):",
        "if agreed <= self._current.generation or any(other != agreed for other in named):",
    ),
    Mutant(
        "members form a generation before its joiners are ready",
        "members wait for a joiner that is not there",
        _MEMBERSHIP,
        "return self._is_linked_to(order.workers) and all((j, order.generation) in self._ready_from for j in joiners)",
        "return self._is_linked_to(order.workers) and bool(joiners or True)",
    ),
    Mutant(
        "workers obey old orders",
        "an order that arrives late undoes a newer one",
        _MEMBERSHIP,
        "if order.generation in self._orders or (order.generation <= self._newest_generation and not is_first):",
        "if order.generation in self._orders:",
    ),
    Mutant(
        "workers connect once",
        "a connection that broke is never made again",
        _MEMBERSHIP,
        "return [*self._connect(self._newest), *self._advance_joining()] if self._orders else []",
        "return self._advance_joining() if self._orders else []",
    ),
    Mutant(
        "a superseded recovery takes effect",
        "members start with different generations",
        _MEMBERSHIP,
        "case StateSynced(generation) if not self._is_superseded(generation):",
        "case StateSynced(generation):",
    ),
    Mutant(
        "dropped workers go on",
        "a worker that was left behind keeps its slot",
        _MEMBERSHIP,
        "            return self._on_dropped()\n",
        "            return []\n",
    ),
    Mutant(
        "members send their rounds once in a recovery",
        "a recovery waits for a round that was lost with a connection",
        _SYNC,
        "        self._sent = {item for item in self._sent if item[0] != peer}\n",
        "        pass\n",
    ),
    Mutant(
        "a member that is behind gives its state",
        "an iteration that was committed is lost",
        _SYNC,
        "            furthest = max(rounds[worker] for worker in order.workers)\n"
        "            behind = tuple(worker for worker in order.workers if rounds[worker] < furthest)\n",
        "            furthest = min(rounds[worker] for worker in order.workers)\n"
        "            behind = tuple(worker for worker in order.workers if rounds[worker] > furthest)\n",
    ),
    Mutant(
        "leavers leave at once",
        "what they sent last is lost, and a member waits for it",
        _SESSION,
        "        confirmed = self._leave_acknowledgement.await_confirmations(others, tag, obsolete=is_recalled)\n",
        "        confirmed = frozenset(others)\n",
    ),
    Mutant(
        "members report a lost peer once",
        "a report that was lost with the scheduler is never made again",
        "resile_learner.worker.suspicions",
        "if now - reported >= self._interval]",
        "if now - reported >= 1e9]",
    ),
    Mutant(
        "a peer whose control connection breaks before there is one for data is not dialed again",
        "two members stay unconnected for ever, and nobody suspects anything",
        "resile_learner.worker.peers",
        "        if self._is_connected(member.worker):\n",
        '        if "data" in self._established[member.worker]:\n',
    ),
    Mutant(
        "a data connection whose control connection broke counts for the next attempt",
        "each attempt to connect undoes the one before, without end",
        "resile_learner.worker.peers",
        'if kind == "data" and self._established[peer] == ["data", "control"]:',
        "if False:",
    ),
    # training and checkpoints
    Mutant(
        "training completes before its model is stored",
        "a completed job without a model",
        _PROTOCOL,
        "        while self._idle_round():\n",
        "        while False:\n",
    ),
    Mutant(
        "a cold start loads no checkpoint",
        "a job starts from 0 beside a complete checkpoint",
        _PROTOCOL,
        "if self._session.resume:",
        "if False:",
    ),
    Mutant(
        "initial members choose a checkpoint each for itself",
        "members that found different checkpoints train together, or wait for each other for ever",
        "resile_learner.checkpoint.cold_start",
        "start = store.decide_start(Start(",
        "start = (lambda own: own)(Start(",
        once_missing=True,
    ),
    Mutant(
        "a checkpoint of a lineage that was cut off is an ancestor",
        "a job resumes from what members stored after a newer cold start had begun without them",
        "resile_learner.checkpoint.lineage",
        "if c.lineage == last.lineage and c <= last)",
        "if c.lineage == last.lineage)",
        once_missing=True,
    ),
    Mutant(
        "all lineages store their model under one key",
        "members that were cut off replace the model that a completion names",
        "resile_learner.checkpoint.lineage",
        'return f"models/lineage-{lineage}.safetensors"',
        'return "models/lineage-1.safetensors"',
        once_missing=True,
    ),
    Mutant(
        "a pause that is saved is told once",
        "a pause whose report was lost never ends",
        _CHECKPOINTER,
        "if self._clock() - self._paused_reported >= PAUSED_SECONDS:",
        "if False:",
        once_missing=True,
    ),
    Mutant(
        "initial members do not compare what they train",
        "workers with different data train together",
        "resile_learner.training.rounds",
        "check_members_agree(",
        "print(",
    ),
    Mutant(
        "a worker that ends training alone is not named",
        "its run is completed early, and the others train on without it",
        "resile_learner.training.rounds",
        "        if others:\n",
        "        if False:\n",
        once_missing=True,
    ),
    Mutant(
        "a worker that ends training alone is a peer that sends nonsense",
        "its peers close their links to it, and its script is not named",
        "resile_learner.collectives.peer",
        'raise OtherRound(f"worker {self.link.peer}")',
        'raise Malformed("unexpected")',
        once_missing=True,
    ),
    Mutant(
        "a checkpoint exists before all of its parts",
        "a job resumes from half a checkpoint",
        _CHECKPOINTER,
        "if tracker is None or self._uploads is None or not tracker.complete or tracker.name == self._committing:",
        "if tracker is None or self._uploads is None or not tracker.parts or tracker.name == self._committing:",
    ),
    Mutant(
        "checksums are not verified",
        "a job resumes from damaged parts",
        _STORE,
        "            if sha.hexdigest() == part.sha256:\n",
        "            if True:\n",
    ),
    Mutant(
        "a newer lineage does not fence the older ones in storage",
        "members that were cut off delete or store checkpoints of a job that has started again",
        _STORE,
        "        if newest > lineage:\n            raise FencedError(self._objects.url, lineage, newest)\n",
        "",
        once_missing=True,
    ),
    Mutant(
        "a job starts where its environment is not ready",
        "its slots idle while pip builds",
        f"{_CORE}.job_view",
        "        if self.waits_for_environment(fitting):\n",
        "        if False:\n",
    ),
    Mutant(
        "what no host can build is tried again and again",
        "a job whose packages do not exist never ends",
        f"{_CORE}.environment_requests",
        "            self._recovery.fail(job, report.reason, now=now)\n",
        "            job.backoff.add(host, now=now)\n",
    ),
    Mutant(
        "a host that failed once is not tried again",
        "a job whose pip was killed is waiting for ever",
        f"{_CORE}.environment_requests",
        '        return report is not None and report.state == "failed"\n',
        "        return False\n",
    ),
    Mutant(
        "a manifest replaces another one",
        "two generations store different checkpoints of one name",
        _STORE,
        "if self._objects.create(manifest_key(name), manifest.model_dump_json(indent=1).encode()):",
        "self._objects.put(manifest_key(name), [memoryview(manifest.model_dump_json(indent=1).encode())])\n"
        "        if True:",
    ),
    Mutant(
        "a member that is behind keeps its share of a checkpoint",
        "a checkpoint waits for parts that nobody stores",
        _CHECKPOINTER,
        "        if is_behind:\n            self._unfinished = {}\n",
        "",
    ),
    Mutant(
        "the parts of a lost member are not divided again",
        "a checkpoint waits for parts that nobody stores",
        _CHECKPOINTER,
        "        if has_recovered:\n            self.divide_parts()\n        else:\n            self._commit()\n",
        "        self._commit()\n",
    ),
)


def tests_of(*mutants: Mutant) -> tuple[str, ...]:
    """Return the tests of the modules of ``mutants``."""
    found = (next((tests for name, tests in TESTS.items() if each.module.startswith(name)), ()) for each in mutants)
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def main() -> int:
    """Try all mutants, or those that are named; return 1 if nothing notices one."""
    if sys.argv[1:2] == ["--try"]:
        mutant = next(mutant for mutant in MUTANTS if mutant.name == sys.argv[2])
        return attempt([mutant], tests_of(mutant), seconds=SECONDS)
    names = chosen("MUTANT", [mutant.name for mutant in MUTANTS])
    starred = [mutant.name for mutant in MUTANTS if mutant.once_missing]
    return 1 if attempt_all("tests.world.mutants", names, starred=starred) else 0


if __name__ == "__main__":
    sys.exit(main())
