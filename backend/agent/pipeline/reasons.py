"""Why a stage's run did not come to a good end: the one sentence that the operator reads first in the morning."""

from __future__ import annotations

import os

from backend.agent import runfiles
from backend.agent.progress import free_bytes
from backend.agent.reset import receipt
from backend.agent.runlog import read_log
from backend.agent.shards.audit.results import summary_of
from backend.wire import CLEAN, RESET, Receipt, Refused, Run, printable

WORDS = 400
FULL_BYTES = 1 << 20


def failure(run: Run, folder: str) -> str:
    """Return why a run that has ended did not end well; empty where it did."""
    if run.stage == RESET:
        return reset_failure(run, folder)
    if run.state == "exited" and run.exit_code == 0:
        return "it was stopped on request" if os.path.exists(os.path.join(folder, runfiles.STOP)) else ""
    if run.state != "exited":
        return "%s: %s" % (run.state, run.reason or "no reason is known")
    code = run.exit_code or 0
    head = run.reason or "exit status %d" % code
    if code > 0 and run.reason:
        head += ", exit status %d" % code
    said = "" if code < 0 else _said(run, folder)
    words = "%s: %s" % (head, said) if said else head
    return printable(words, WORDS) + _full(folder)


def _full(folder: str) -> str:
    """Say where the disk of a run's log has no room: what it could not write there may be what ended it."""
    return "; the disk of %s is full" % folder if free_bytes(folder) < FULL_BYTES else ""


def _said(run: Run, folder: str) -> str:
    """Return the run's own word on why it failed: its audit's, its progress's, or the last line of its log."""
    try:
        kinds = summary_of(folder)["faults"]
        return "; ".join("%s: %d" % (code, kind["count"]) for code, kind in kinds.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Refused):
        pass  # no audit
    if run.progress is not None and run.progress.state == "failed" and run.progress.message:
        return run.progress.message
    return last_line(folder)


def last_line(folder: str) -> str:
    """Return the last line of a run's log that says anything."""
    try:
        text = str(read_log(os.path.join(folder, runfiles.LOG), -1, 4000, True)["text"])
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def reset_failure(run: Run, folder: str) -> str:
    """Return why a reset did not leave clean GPUs; empty where it did."""
    if run.state == "exited" and run.exit_code == 0:
        return ""
    try:
        found = receipt.load(run.id)
    except Refused:
        return "%s without a receipt: %s" % (_how(run), last_line(folder) or "its log is empty")
    if run.exit_code is None and found.verdict == CLEAN:
        return ""  # its supervisor was killed; its own evidence is whole, and the next gate verifies again
    return printable(verdict_words(found), WORDS)


def verdict_words(found: Receipt) -> str:
    """Write a verdict that is not clean, with the first reasons."""
    worst = [gpu for gpu in found.after if gpu.verdict == found.verdict]
    words = found.verdict or "no verdict"
    words += ": %s" % found.interrupted if found.interrupted else ""
    words += ": GPU %d: %s" % (worst[0].index, worst[0].reason) if worst else ""
    words += ", and %d more GPUs" % (len(worst) - 1) if len(worst) > 1 else ""
    return "; ".join([words] + [one["reason"] for one in found.host_findings if one["level"] == "fail"])


def _how(run: Run) -> str:
    return run.reason or ("exit status %d" % run.exit_code if run.exit_code is not None else run.state)
