"""The reset of GPUs by their driver: check again, let go, record, reset, put back, verify, receipt.

A detached run like the kill-and-verify cycle, under the same lock, with a journal and a receipt of the same kind. What
is to happen is on disk before nvidia-smi is started, so that this boot never resets a GPU twice for one fault even
where the reset is killed midway. nvidia-smi inherits the locks: they last until it has ended.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Dict, List, Tuple

from backend.agent import driverhold, ours, procfs
from backend.agent.files import write_json
from backend.agent.holders import scan
from backend.agent.launch import reasons, shut
from backend.agent.reset import verdict
from backend.agent.reset.cycle import conclude, new_receipt, say, show, verify
from backend.agent.reset.finding import FAIL, Finding
from backend.agent.reset.gpureset import faults, smi
from backend.agent.reset.gpureset.examine import Examined, examine, strangers
from backend.agent.reset.gpureset.needs import needs
from backend.agent.reset.gpureset.persistence import KIND, OUTPUT, Persistence
from backend.agent.reset.hostlock import Held, one_at_a_time
from backend.agent.reset.interrupted import BEGUN
from backend.agent.reset.receipt import Journal, store
from backend.agent.seam import Machine
from backend.wire import CLEAN, UNHEALTHY, UNKNOWN, VERDICTS, GpuVerdict, Refused

LET_GO_S = 15.0
"""How long ours may take to close the driver: they look every half second, and one that opens it takes longest."""

DONE, FAILED, HANGS, UNSUPPORTED, NOT_BEGUN = "done", "failed", "has not ended", "not supported", faults.NOT_BEGUN
NEXT = "do not reset it again: reboot the host, then power cycle it; if the fault comes again, have it serviced"
UNVERIFIED = "after the GPU reset, before the check that follows it had ended"


def main(machine: Machine, run_dir: str, options: Dict[str, Any]) -> int:
    """Reset GPUs. Returns 0 where the host is clean afterwards, 1 where it is not, 4 where a need was not met.

    `options`: id, gpus (indices or UUIDs, as text), because, in_vm, accept_limited, cuda_test.
    """
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    mark = ours.register("reset")
    try:
        with one_at_a_time("GPU reset %s" % options["id"], machine.devices().scope()) as lock:
            return GpuReset(machine, run_dir, options, lock).run()
    except Refused as error:
        say(str(error))
        return 4
    finally:
        ours.forget(mark)


class GpuReset:
    """One reset of GPUs from its check to its receipt. `lock` is that of the host."""

    def __init__(self, machine: Machine, run_dir: str, options: Dict[str, Any], lock: Held) -> None:
        self._machine, self._options, self._lock = machine, options, lock
        self._run_dir = run_dir
        self._journal = Journal(run_dir)
        self._receipt = new_receipt(machine, str(options["id"]), "gpu-reset")
        self._receipt.notes += lock.passed
        self._argv = smi.find(machine.smi)

    def run(self) -> int:
        """Do it all and return the exit status."""
        try:
            return self._run()
        finally:
            self._journal.close()

    def _run(self) -> int:
        wall_s = self._receipt.started_at = time.time()
        self._journal.write("phase", "checking what a GPU reset needs", monotonic_s=time.monotonic(), wall_s=wall_s)
        options = self._options
        seen = examine(self._machine, options["gpus"], str(options.get("because") or ""))
        found = needs(self._machine, seen, bool(options.get("in_vm")))
        receipt = self._receipt
        receipt.before, receipt.driver, receipt.cuda = seen.receipt.after, seen.receipt.driver, seen.receipt.cuda
        receipt.gpu_reset = self._intent(seen, [vars(gate) for gate in found])
        closed = shut(found)
        if closed:
            return self._refuse(reasons(closed))
        try:
            with driverhold.hold() as held:
                self._let_go(seen)
                self._begin()
                self._reset(seen, (*self._lock.fds, held))
        except Refused as error:
            return self._refuse(str(error))
        return self._verify(seen)

    def _intent(self, seen: Examined, needed: List[Dict[str, Any]]) -> Dict[str, Any]:
        gpus = [
            {"index": one.facts.index, "uuid": one.facts.uuid, "bus": one.facts.bus_id, "name": one.facts.name,
             "faults": one.faults} for one in seen.targets
        ]  # fmt: skip
        addresses = ",".join(one.address for one in seen.targets)
        return {
            "gpus": gpus, "needs": needed, "command": [*self._argv, "--gpu-reset", "-i", addresses], "begun": False,
            "outcome": "", "rc": None, "output": "", "at_s": None, "took_s": None,
            "kernel_log_seq": seen.kernel_log_seq,
        }  # fmt: skip

    def _let_go(self, seen: Examined) -> None:
        """Wait until nobody has the GPUs open: ours close the driver, and nobody may have come since the check."""
        self._journal.write("phase", "having every process of eightzeros let go of the driver")
        minors = {one.minor for one in seen.targets}
        end = time.monotonic() + LET_GO_S
        while True:
            found = scan(self._machine.devices())
            left = [one for one in found.holdings.values() if minors & set(one.minors)]
            others = [one for one in strangers(found) if one in left]
            if others or (left and time.monotonic() > end):
                one = (others or left)[0]
                text = "process %d (%s) has a GPU open" % (one.pid, procfs.command(one.pid, 60))
                raise Refused("precondition", text, "end it, then try again")
            if not left:
                return
            time.sleep(0.05)

    def _begin(self) -> None:
        """Put on record what is about to happen. Raises Refused where that is not possible."""
        self._receipt.gpu_reset["begun"] = True
        try:
            write_json(os.path.join(self._run_dir, BEGUN), self._receipt)
            problem = self._journal.problem
        except OSError as error:
            problem = "%s: %s" % (self._run_dir, error.strerror or error)
        if problem:
            self._receipt.gpu_reset["begun"] = False
            raise Refused("precondition", "no record of it can be kept: " + problem, "free space on that disk")

    def _reset(self, seen: Examined, locks: Tuple[int, ...]) -> None:
        """Run nvidia-smi, with persistence mode off around it."""
        said, journal = self._receipt.gpu_reset, self._journal
        output = os.path.join(self._run_dir, OUTPUT)
        persistence = Persistence(self._argv, journal, output)
        journal.write("phase", "resetting GPU %s" % ", ".join(str(one.facts.index) for one in seen.targets))
        try:
            problem = persistence.turn_off(seen.targets)
            if problem:
                said.update(outcome=NOT_BEGUN, output=problem)
                return
            said["at_s"] = journal.write(KIND, " ".join(said["command"]), step="begin").at_s
            ended = smi.call(said["command"], smi.RESET_S, output, locks)
            said.update(rc=ended.rc, output=ended.text, outcome=outcome_of(ended))
            said["took_s"] = round(journal.now_s() - said["at_s"], 3)
            text = "nvidia-smi: %s: %s" % (said["outcome"], ended.text or "it said nothing")
            journal.write(KIND, text, step="end", rc=ended.rc, outcome=said["outcome"], took_s=said["took_s"])
        except OSError as error:
            said.update(outcome=NOT_BEGUN, output="nvidia-smi could not be started: %s" % (error.strerror or error))
        finally:
            if said["outcome"] == HANGS:
                persistence.leave()
            else:
                persistence.put_back()
            self._receipt.notes += persistence.problems
            self._receipt.durations["gpu_reset"] = said["took_s"] or 0.0

    def _verify(self, seen: Examined) -> int:
        """Judge every GPU as a verification does; what the reset itself came to is part of the verdict."""
        receipt, options = self._receipt, self._options
        receipt.verdict, receipt.interrupted = UNKNOWN, UNVERIFIED
        store(receipt)  # the verification weighs what was before this reset less, and a kill here leaves it told
        if receipt.gpu_reset["outcome"] == HANGS:
            return self._give_up()
        self._journal.write("phase", "verifying every GPU")
        tested = bool(options.get("cuda_test", True))
        checked = verify(
            self._machine, accept_limited=bool(options.get("accept_limited")), keep=False, cuda_test=tested
        )
        for name in ("after", "unseen", "host_findings", "cuda_tests", "xids", "kernel_log"):
            setattr(receipt, name, getattr(checked, name))
        receipt.durations.update(checked.durations)
        receipt.notes += checked.notes[1:]  # the first says whose rights it ran with, which ours says already
        receipt.interrupted = ""
        findings = [Finding(**one) for one in receipt.host_findings]
        word = max(checked.verdict, self._judge_outcome(seen), verdict.of_host(receipt.after, findings),
                   key=VERDICTS.index)  # fmt: skip
        self._finish(word, "")
        return 0 if verdict.passes(word, bool(options.get("accept_limited"))) else 1

    def _give_up(self) -> int:
        """End without a verification: an nvidia-smi that has not ended keeps the driver and the locks."""
        text = "nvidia-smi has not ended within %.0f s, and is left alone" % smi.RESET_S
        receipt = self._receipt
        receipt.after = [GpuVerdict(one.index, one.uuid, UNKNOWN, text, NEXT, "ps -C nvidia-smi -o pid,stat,wchan,args")
                         for one in receipt.before]  # fmt: skip
        receipt.interrupted = ""
        self._finish(UNKNOWN, text)
        return 1

    def _judge_outcome(self, seen: Examined) -> str:
        """Put a reset that did not succeed into the verdict of its GPUs, and return the worst that it makes them."""
        said = self._receipt.gpu_reset
        if said["outcome"] == DONE:
            return CLEAN
        text = "its reset: %s (%s)" % (said["outcome"], said["output"] or "nvidia-smi said nothing")
        action = "see who has it open, and reset it again" if said["outcome"] == NOT_BEGUN else NEXT
        command = "cat %s" % os.path.join(self._run_dir, OUTPUT)
        indices = {one.facts.index for one in seen.targets}
        for one in self._receipt.after:
            if one.index in indices:
                one.verdict = max(one.verdict, UNHEALTHY, key=VERDICTS.index)
                one.reason, one.action, one.command = "%s; %s" % (text, one.reason), action, command
                one.findings.insert(0, Finding(text, action, command, FAIL)._asdict())
        return UNHEALTHY

    def _refuse(self, why: str) -> int:
        self._receipt.notes.append("refused: %s; no GPU was reset" % why)
        self._receipt.after = self._receipt.before
        self._finish(verdict.of_host(self._receipt.before), "precondition: %s; no GPU was reset" % why)
        return 4

    def _finish(self, word: str, reason: str) -> None:
        self._receipt.verdict = word
        problem = conclude(self._receipt, self._journal)
        text = word + (": %s" % reason if reason else "") + ("; %s" % problem if problem else "")
        self._journal.write("verdict", text, verdict=word, receipt=self._receipt.path, problem=problem)
        show(self._receipt, text)


def outcome_of(ended: smi.Said) -> str:
    """Say what nvidia-smi made of it. A success that it only claims shows in the verification."""
    text = ended.text.lower()
    if ended.rc is None:
        return HANGS
    if "in use" in text or "being used by" in text:
        return NOT_BEGUN
    if "not supported" in text:
        return UNSUPPORTED
    return DONE if ended.rc == 0 and "could not be reset" not in text else FAILED
