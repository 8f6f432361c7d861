"""The whole transaction: guard, look, bind, stop, clear, health, verdict, receipt.

It runs as a detached run of its own and finishes whatever happens to console, connection or agent. Its
journal is in the run's folder, its receipt among the host's receipts before the verdict is shown.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from backend.agent import ours, procfs
from backend.agent.reset import health, leftovers, verdict
from backend.agent.reset.baseline import load as load_baseline
from backend.agent.reset.clearance import Clearance, Clearing, MemoryCurve, states
from backend.agent.reset.exercise import exercise
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.interrupted import keep_begun
from backend.agent.reset.judging import judge, judge_before
from backend.agent.reset.ladder import Ladder, PlanChanged, describe_stuck, key
from backend.agent.reset.look import Look, look
from backend.agent.reset.plan import difference, make_plan
from backend.agent.reset.receipt import Journal, confirmed, forget_plan, store
from backend.agent.reset.watch import Watch, nobody_exits
from backend.agent.reset.xids.gathering import Gathering
from backend.agent.seam import Machine
from backend.wire import CLEAN, GpuVerdict, Plan, Receipt, Refused

VERIFY_S = 1.0
"""A verification does not wait for what is not free: only for it to stay free."""


def main(machine: Machine, run_dir: str, options: Dict[str, Any]) -> int:
    """Run one reset. Returns 0 where the host is clean, 1 where it is not, 4 where it was refused.

    It cannot be asked to stop: a kill that was begun ends with a verdict, within the hard limit of its waits.

    `options`: id, digest and plan (the file with the victims that were confirmed), other_users,
    accept_limited; cuda_test (True unless said otherwise); grace_s and deadline_s replace what the plan says.
    """
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    mark = ours.register("reset")
    try:
        what = "reset %s" % options.get("id", os.path.basename(run_dir))
        with one_at_a_time(what, machine.devices().scope()) as held:
            return Cycle(machine, run_dir, options, held.passed).run()
    except Refused as error:
        say(str(error))
        return 4
    finally:
        ours.forget(mark)


class Cycle:
    """One reset from its first look to its receipt. `notes` are what its receipt begins with."""

    def __init__(self, machine: Machine, run_dir: str, options: Dict[str, Any], notes: Sequence[str] = ()) -> None:
        from backend.agent.runs import RunStore

        self._machine, self._options = machine, options
        self._runs = RunStore(machine)
        self._journal, self._run_dir = Journal(run_dir), run_dir
        self._watch = Watch(machine.driver)
        self._xids = Gathering(machine.kernel_log, self._watch)
        self._curve = MemoryCurve(self._journal)
        self._receipt = new_receipt(machine, str(options.get("id") or os.path.basename(run_dir)), "reset")
        self._receipt.notes += notes
        self._health = health.NOTHING
        self._exiting: Callable[[], bool] = nobody_exits

    def run(self) -> int:
        """Do it all and return the exit status."""
        try:
            return self._run()
        finally:
            self._watch.close()
            self._xids.close()
            self._journal.close()
            forget_plan(self._options.get("plan"))

    def _run(self) -> int:
        receipt, journal = self._receipt, self._journal
        journal.write("phase", "looking at the host", monotonic_s=time.monotonic(), wall_s=time.time())
        self._watch.open()
        about_driver(receipt, self._watch)
        self._xids.begin()
        self._health = health.read(self._watch)
        seen, plan = self._look_again()
        receipt.plan, receipt.before = plan, self._before(seen)
        receipt.durations["scan"] = journal.now_s()
        ladder = Ladder(self._watch, self._curve, journal, self._look_again)
        try:
            try:
                self._agree(plan, seen)
                ladder.bind(plan.victims)
            except PlanChanged as error:
                return self._refuse(str(error))
            keep_begun(self._run_dir, receipt)
            return self._carry_out(plan, ladder)
        finally:
            ladder.close()

    def _look_again(self) -> Tuple[Look, Plan]:
        occupancy = self._watch.occupancy(self._exiting)
        self._curve.note(occupancy)
        seen = look(self._machine.devices(), self._watch.inventory, occupancy)
        return seen, make_plan(seen, self._runs, bool(self._options.get("other_users")))

    def _before(self, seen: Look) -> List[GpuVerdict]:
        found = states(seen, self._watch.unknown, load_baseline())
        return judge_before(self._watch, found, self._health)

    def _agree(self, plan: Plan, seen: Look) -> None:
        """Compare with what the operator confirmed; only what the planned ones started since may be new."""
        path, digest = self._options.get("plan"), self._options.get("digest")
        if not path:
            if digest and digest != plan.digest:
                raise PlanChanged("what would be killed changed since it was confirmed")
            return
        try:
            planned = confirmed(path)
        except (OSError, ValueError) as error:
            raise PlanChanged("the confirmed plan cannot be read: %s" % error) from None
        changed = difference(planned, plan, seen.family)
        if changed:
            raise PlanChanged(changed)

    def _refuse(self, why: str) -> int:
        self._receipt.notes.append("plan changed: %s; no signal was sent" % why)
        self._receipt.after = self._receipt.before
        self._finish(verdict.of_host(self._receipt.before), "plan-changed: %s; no signal was sent" % why)
        return 4

    def _carry_out(self, plan: Plan, ladder: Ladder) -> int:
        grace_s = float(self._options.get("grace_s") or plan.grace_s)
        deadline_s = float(self._options.get("deadline_s") or plan.deadline_s)
        self._exiting = lambda: ladder.exiting() and time.monotonic() < ladder.last_signal_at + deadline_s
        if ladder.bound:
            count = "%d process%s" % (len(ladder.bound), "es" if len(ladder.bound) > 1 else "")
            self._journal.write("phase", "stopping %s, at most %.0f s of grace" % (count, grace_s))
        else:
            self._journal.write("phase", "nobody to stop")
        self._xids.signalling()
        self._receipt.durations.update(ladder.stop(grace_s, deadline_s))
        self._journal.write("phase", "waiting for every GPU to be free")
        clearing = Clearing(self._watch, self._machine.devices, self._curve)
        cleared = clearing.wait(ladder.last_signal_at, deadline_s, ladder.fds)
        while cleared.ended != "clear" and ladder.another_round(time.monotonic() + deadline_s):
            cleared = clearing.wait(ladder.last_signal_at, deadline_s, ladder.fds)
        self._xids.cleared()
        self._account(ladder, cleared)
        began = time.monotonic()
        not_wanted = "" if self._options.get("cuda_test", True) else "cuda_test is off for this host"
        cleared_at = began if cleared.release_s is None else ladder.last_signal_at + cleared.release_s
        tried = exercise(self._machine, self._watch, self._receipt, self._journal, cleared, cleared_at, not_wanted)
        self._journal.write("phase", "checking the health of every GPU")
        word = judge(self._receipt, self._watch, self._machine.devices(), tried.states, self._health,
                     tried.cleared_at, tried.findings, self._xids)  # fmt: skip
        self._receipt.durations["verdict"] = round(time.monotonic() - began, 3)
        left = leftovers.of_host(self._machine.host_root, self._runs.list(), plan.victims)
        self._receipt.leftovers, self._receipt.ports = left.segments, left.ports
        self._finish(word, "")
        return 0 if verdict.passes(word, bool(self._options.get("accept_limited"))) else 1

    def _account(self, ladder: Ladder, cleared: Clearance) -> None:
        """Write down who was killed, who was not, and how long it took."""
        receipt = self._receipt
        receipt.signals = ladder.signals
        receipt.survivors = ladder.living()
        left = {key(one) for one in receipt.survivors}
        receipt.killed = [one for which, one in ladder.victims.items() if which not in left]
        for one in receipt.survivors:
            text = "process %d (%s) did not end: %s" % (one.pid, one.command[:60], describe_stuck(one.pid))
            receipt.notes.append(text)
            for index in one.gpus:
                if index in cleared.states:
                    cleared.states[index].why.append(text)
        receipt.notes.extend(ladder.respawned)
        if cleared.release_s is not None:
            receipt.durations["release"] = round(cleared.release_s, 3)
        if self._watch.longest_block_s > 0.5:
            receipt.notes.append("one call to the driver took %.1f s" % self._watch.longest_block_s)

    def _finish(self, word: str, reason: str) -> None:
        """Write the receipt, then show the verdict."""
        receipt, journal = self._receipt, self._journal
        for one in receipt.after:
            journal.write("gpu", "GPU %d: %s: %s" % (one.index, one.verdict, one.reason), gpu=one.index,
                          verdict=one.verdict)  # fmt: skip
        receipt.verdict = word
        problem = conclude(receipt, journal)
        text = word + (": %s" % reason if reason else "") + ("; %s" % problem if problem else "")
        journal.write("verdict", text, verdict=word, receipt=receipt.path, problem=problem)
        show(receipt, text)


def new_receipt(machine: Machine, receipt_id: str, kind: str) -> Receipt:
    """Begin a receipt: which host, who asked and with which rights, when."""
    rights = "run as uid %d, capabilities %s" % (os.geteuid(), procfs.status(os.getpid()).get("CapEff", "unknown"))
    return Receipt(
        receipt_id, kind, host=socket.gethostname(), virtual=machine.virtual, user=procfs.user_name(os.geteuid()),
        boot_id=procfs.boot_id(), started_at=time.time(), notes=[rights],
    )  # fmt: skip


def about_driver(receipt: Receipt, watch: Watch) -> None:
    """Note the driver, or why there is none."""
    receipt.driver, receipt.cuda = watch.inventory.driver, watch.inventory.cuda
    if watch.inventory.problem:
        receipt.notes.append("the driver: %s" % watch.inventory.problem)


def conclude(receipt: Receipt, journal: Journal) -> str:
    """Close a receipt and write it. Returns what could not be written, in words."""
    receipt.durations["total"] = journal.now_s()
    if receipt.plan is not None:
        receipt.unseen = receipt.plan.unseen
    if journal.problem:
        receipt.notes.append(journal.problem)
    problem = store(receipt)
    return "; ".join(text for text in (journal.problem, problem) if text)


def verify(
    machine: Machine, *, accept_limited: bool, receipt_id: str = "", keep: bool = True, cuda_test: bool = False
) -> Receipt:
    """Check without killing: every GPU free for at least a second, and healthy; with `cuda_test` it computes too.

    With `keep` the receipt is written too; a gate that is looked at again and again leaves none behind.
    """
    journal = Journal(None)
    receipt = new_receipt(machine, receipt_id or time.strftime("verify-%Y%m%d-%H%M%S-") + str(os.getpid()), "verify")
    watch = Watch(machine.driver)
    xids = Gathering(machine.kernel_log, watch)
    try:
        watch.open()
        about_driver(receipt, watch)
        xids.begin()
        nobody: Callable[[], List[int]] = list
        clearing = Clearing(watch, machine.devices, MemoryCurve(journal))
        began = time.monotonic()
        cleared = clearing.wait(began, VERIFY_S, nobody)
        not_wanted = "" if cuda_test else "a verification runs one only when asked to"
        tried = exercise(machine, watch, receipt, journal, cleared, began, not_wanted)
        receipt.verdict = judge(receipt, watch, machine.devices(), tried.states, health.NOTHING, tried.cleared_at,
                                tried.findings, xids)  # fmt: skip
        receipt.unseen = sorted({text for state in cleared.states.values() for text in state.limited})
    finally:
        watch.close()
        xids.close()
    if verdict.passes(receipt.verdict, accept_limited) and receipt.verdict != CLEAN:
        receipt.notes.append("a limited verdict is accepted on this host")
    if keep:
        conclude(receipt, journal)
    return receipt


def show(receipt: Receipt, text: str) -> None:
    """Print the verdict of every GPU for the run's log."""
    lines = ["GPU %d: %s: %s" % (one.index, one.verdict, one.reason) for one in receipt.after]
    lines += ["  %s -> %s" % (one.command, one.action) for one in receipt.after if one.action]
    say("\n".join([*lines, text]))


def say(text: str) -> None:
    """Print for the run's log; a log that cannot be written stops nothing."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        pass
