"""The run that takes a chain from stage to stage: gates, launch, wait, judge; it stops at the first that is not well.

It holds nothing of its stages: each is a detached run with a supervisor of its own, and goes on when this process
dies. A stop ends the stage that it waits for, never a server that is up. Exit status: 0 the whole chain is done, 1 a
stage failed, 4 a gate refused one, 143 it was stopped.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from backend.agent import launch, ours
from backend.agent.ops import TABLE, Context
from backend.agent.paths import state_dir
from backend.agent.pipeline import services
from backend.agent.pipeline.order import Order, StepOrder, parse
from backend.agent.pipeline.reasons import failure
from backend.agent.pipeline.record import Record
from backend.agent.pipeline.standing import OVER, go_on
from backend.agent.progress import write_progress
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.runs import RunStore
from backend.agent.runtree import RUN_DIR_ENV, RUN_ENV
from backend.agent.seam import Machine
from backend.agent.workers import Workers
from backend.wire import (
    CHAIN_ENV,
    PIPELINE,
    RESET,
    RUN_ENDED,
    RUN_LIVE,
    Gate,
    Pipeline,
    Progress,
    Refused,
    Run,
    Step,
    from_dict,
)

TICK_S = 0.25
GATES_S, START_S = 120.0, 60.0
PLANS = 3
"""How often a reset is planned anew where somebody came in between the plan and its start."""

LAST_WRITE_S = 60.0
ENDED = {"done": "is done", "failed": "failed", "refused": "was refused", "stopped": "was stopped"}
EXIT = {"done": 0, "failed": 1, "refused": 4, "stopped": 128 + signal.SIGTERM}


class Halt(Exception):
    """The chain ends here: its state, why, what to do, and the gates where they are the reason."""

    def __init__(self, state: str, reason: str, fix: str = "", gates: Optional[List[Gate]] = None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.fix, self.gates = state, reason, fix, gates or []


def main(machine: Machine) -> int:
    """Drive the chain that the environment holds. Returns the exit status of the chain."""
    run_dir, text = os.environ.pop(RUN_DIR_ENV, ""), os.environ.pop(CHAIN_ENV, "")
    os.environ.pop(RUN_ENV, None)  # what is started here is no part of this run
    if not run_dir or not text:
        sys.stderr.write("eightzeros pipeline: no chain in the environment; a console starts it\n")
        return 2
    mark = ours.register(PIPELINE)
    try:
        with one_at_a_time("chain %s" % os.path.basename(run_dir), state_dir(), PIPELINE):
            return Driver(machine, run_dir, parse(text)).run()
    except (Refused, OSError) as error:
        sys.stderr.write("eightzeros pipeline: %s\n" % error)
        return 4 if isinstance(error, Refused) else 1
    finally:
        ours.forget(mark)


def say(text: str) -> None:
    """Write a line of the run's log; a log that cannot be written stops nothing."""
    try:
        sys.stdout.write("%s %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), text))
        sys.stdout.flush()
    except (OSError, ValueError):
        pass


class Driver:
    """One chain from its first step to its end."""

    def __init__(self, machine: Machine, run_dir: str, order: Order) -> None:
        self._machine, self._dir, self._order = machine, run_dir, order
        self._store = RunStore(machine)
        self._record, self._workers = Record(run_dir), Workers()
        steps = [Step(one.name, one.kind, needs_service=one.needs_service) for one in order.steps]
        for step, asked in zip(steps[: order.start], order.steps):
            step.state = "skipped"
            served = self._serving(asked.name) if asked.service else ""
            if served:  # an earlier chain started it, and what follows may need it
                step.state, step.run_id = "up", served
        self._chain = Pipeline(os.path.basename(run_dir), steps=steps, started_at=time.time())
        self._stop_asked = False
        self._told = ""

    def run(self) -> int:
        """Do it all and return the exit status."""
        for number in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        chain = self._chain
        try:
            for at in range(self._order.start, len(chain.steps)):
                self._step(
                    chain.steps[at], self._order.steps[at], self._order.forced if at == self._order.start else ""
                )
            left = [step.name for step in chain.steps if step.state == "up"]
            self._end("done", "%s %s still up" % (", ".join(left), "are" if len(left) > 1 else "is") if left else "")
        except Halt as halt:
            chain.fix, chain.gates = halt.fix, halt.gates
            self._end(halt.state, halt.reason)
        finally:
            self._workers.close()
        return EXIT[chain.state]

    def _serving(self, stage: str) -> str:
        live = [run.id for run in self._store.list() if run.stage == stage and run.state in RUN_LIVE]
        return live[0] if live else ""

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    def _end(self, state: str, reason: str) -> None:
        chain = self._chain
        step = next((one for one in chain.steps if one.state not in OVER), None)
        chain.state, chain.reason, chain.ended_at = state, reason, time.time()
        chain.go_on = go_on(chain.steps)
        if step is not None:
            step.state, step.reason, step.ended_at = state, reason, chain.ended_at
        words = "the chain %s" % ENDED[state]
        words += " at %s" % step.name if step is not None else ""
        words += ": %s" % reason if reason else ""
        say(words)
        end = time.monotonic() + LAST_WRITE_S
        self._record.write(chain)
        while self._record.problem and time.monotonic() < end:
            time.sleep(1.0)
            self._record.write(chain)
        self._progress("done" if state == "done" else "failed", words)

    # --- one step ---

    def _step(self, step: Step, order: StepOrder, forced: str) -> None:
        if self._stop_asked:
            raise Halt("stopped", "stopped on request, before it began")
        step.started_at, step.forced = time.time(), forced
        self._mark(step, "checking", "checking the gates of %s" % step.name)
        if order.kind == RESET:
            self._reset(step)
            return
        gates = self._gates(order)
        closed = launch.shut(gates)
        if closed and not forced:
            raise Halt("refused", launch.reasons(closed), closed[0].fix, gates)
        spec = order.run_spec(new_id(order.name), forced)
        try:
            self._work(lambda: launch.start(self._machine, self._store, spec, gates), START_S)
        except Refused as refused:
            raise Halt("failed", refused.message, refused.hint) from None
        self._launched(step, spec.id)
        self._follow(step, order, spec.id)

    def _gates(self, order: StepOrder) -> List[Gate]:
        needs = dict(order.requirements)
        needs["others"] = dict(needs.get("others") or {}, chain=self._chain.id)
        limited = bool(self._order.policy.get("accept_limited"))
        try:
            found = self._work(lambda: launch.check(self._machine, self._store, needs, limited), GATES_S)
        except Refused as refused:
            return [Gate("gates", None, "they could not be checked: %s" % refused.message, refused.hint)]
        return [from_dict(Gate, row) for row in found]

    def _launched(self, step: Step, run_id: str) -> None:
        step.run_id = run_id
        self._mark(step, "running", "%s: launched as %s" % (step.name, run_id))

    def _mark(self, step: Step, state: str, words: str) -> None:
        step.state = state
        say(words)
        self._record.write(self._chain)
        self._progress("running", words)

    # --- a reset ---

    def _reset(self, step: Step) -> None:
        run_id = new_id(RESET)
        for attempt in range(PLANS):
            try:
                plan = self._op("reset.plan", self._order.policy)
                self._spare_others(plan, step)
                self._op("reset.start", dict(self._order.policy, id=run_id, digest=plan["digest"]))
                break
            except Refused as refused:
                if refused.code != "plan-changed" or attempt == PLANS - 1:
                    raise Halt("failed", refused.message, refused.hint) from None
        self._launched(step, run_id)
        self._wait(step, run_id, lambda run: None)
        self._op("receipts.list", {})  # which makes the receipt of one that was killed
        self._judge(step, run_id)
        for one in self._chain.steps:
            run = self._store.get(one.run_id) if one.state == "up" else None
            if run is not None and run.state in RUN_ENDED:
                one.state, one.reason, one.ended_at = "ended", "ended by %s" % run_id, run.ended_at
        self._mark(step, "done", "%s: every GPU is clean" % step.name)

    def _spare_others(self, plan: Dict[str, Any], step: Step) -> None:
        """Refuse a reset that would end somebody's run: the chain was told to end what it started, and strays."""
        mine = {one.run_id for one in self._chain.steps}
        for victim in plan["victims"]:
            run = self._store.get(victim["run_id"]) if victim["run_id"] else None
            if run is None or run.id in mine or run.stage in self._order.services or step.forced:
                continue
            text = "it would end run %s (%s), which is none of this chain" % (run.id, run.stage)
            gate = Gate("no other run", False, text, "let it finish, or stop it: eightzeros stop %s" % run.id)
            raise Halt("refused", "%s: %s" % (gate.name, gate.detail), gate.fix, [gate])

    # --- waiting ---

    def _follow(self, step: Step, order: StepOrder, run_id: str) -> None:
        """Wait until a stage has ended well, or, where it serves, is up."""
        if order.service:
            patience = services.Patience(order)
            run = self._wait(step, run_id, patience.look)
            if run.state not in RUN_ENDED:
                self._mark(step, "up", "%s: up" % step.name)
                return
        else:
            self._wait(step, run_id, self._needed_server if order.needs_service else lambda run: None)
        self._judge(step, run_id)
        if order.service:
            raise Halt("failed", "it ended before it was up", "see eightzeros logs %s" % run_id)
        absent = [path for path in order.outputs if not os.path.exists(os.path.expanduser(path))]
        if absent:
            raise Halt("failed", "it ended well, but left no %s" % ", ".join(absent), "see eightzeros logs %s" % run_id)
        self._mark(step, "done", "%s: done" % step.name)

    def _needed_server(self, run: Run) -> Optional[str]:
        """Say which service of this chain has ended, on which the run depends."""
        for one in self._chain.steps:
            served = self._store.get(one.run_id) if one.state == "up" else None
            if served is not None and served.state in RUN_ENDED:
                why = failure(served, self._store.folder(served.id)) or "it ended by itself"
                one.state, one.reason, one.ended_at = "ended", why, served.ended_at
                return "%s (%s) has ended: %s; %s was stopped" % (one.name, served.id, why, run.stage)
        return None

    def _wait(self, step: Step, run_id: str, look: Callable[[Run], Optional[str]]) -> Run:
        """Wait for the end of a run, or until `look` says "": enough. Any other word of it stops the run, and halts."""
        stopping = ""
        while True:
            run = self._store.get(run_id)
            if run is None:
                raise Halt("failed", "the record of run %s is gone" % run_id)
            if run.state in RUN_ENDED:
                if stopping:
                    raise Halt("stopped" if self._stop_asked else "failed", stopping)
                return run
            why = "stopped on request" if self._stop_asked else look(run)
            if why == "":
                return run
            if why and not stopping:
                stopping = why
                self._stop(run)
            self._tell(step, run)
            time.sleep(TICK_S)

    def _stop(self, run: Run) -> None:
        say("stopping %s" % run.id)
        try:
            self._work(lambda: self._store.stop(run.id, run.grace_s), START_S)
        except Refused as refused:
            say("%s could not be stopped: %s" % (run.id, refused))

    def _judge(self, step: Step, run_id: str) -> None:
        run = self._store.get(run_id)
        why = failure(run, self._store.folder(run_id)) if run is not None else "its record is gone"
        if why:
            raise Halt("failed", why, "see eightzeros logs %s" % run_id)
        step.ended_at = run.ended_at if run is not None else time.time()

    # --- telling ---

    def _tell(self, step: Step, run: Run) -> None:
        """Keep the progress current: where the chain is, and what its stage says of itself."""
        if self._record.problem:
            self._record.write(self._chain)
        message = run.progress.message if run.progress is not None else ""
        self._progress("running", "%s (%s)%s" % (step.name, run.state, ": %s" % message if message else ""))

    def _progress(self, state: str, words: str) -> None:
        steps = self._chain.steps
        at = sum(one.state in OVER for one in steps)
        text = "%d of %d stages; %s" % (at, len(steps), words)
        if text != self._told:
            write_progress(self._dir, Progress(time.time(), state, message=text))
            self._told = text

    # --- work that may block ---

    def _op(self, name: str, args: Dict[str, Any]) -> Any:
        """Ask for an operation as a console would."""
        operation = TABLE[name]
        return self._work(lambda: operation.call(Context(self._machine, self._store), args), operation.deadline_s)

    def _work(self, work: Callable[[], Any], deadline_s: float) -> Any:
        """Do it in a process of its own with a deadline: a GPU driver that hangs must not hang the chain."""
        self._workers.start(0, deadline_s, work)
        while True:
            wait_s = max(0.0, self._workers.due() - time.monotonic())
            ready, _, _ = select.select(self._workers.filenos(), [], [], min(wait_s, 1.0))
            for message in self._workers.step(set(ready)):
                if message["ok"]:
                    return message["result"]
                error = message["error"]
                raise Refused(error["code"], error["message"], error["hint"])


def new_id(stage: str) -> str:
    """Make a run's id as the console does."""
    return "%s-%s-%s" % (stage.partition(":")[0][:32], time.strftime("%m%d-%H%M%S"), os.urandom(2).hex())
