"""How a chain stands: what its driver wrote, held against what has become of the driver and of its stages' runs."""

from __future__ import annotations

import itertools
from typing import List

from backend.agent.pipeline.reasons import failure, last_line
from backend.agent.pipeline.record import read
from backend.agent.runs import RunStore
from backend.wire import RESET, RUN_ENDED, Pipeline, Refused, Run, Step

REFUSED = 4
OVER = ("done", "skipped", "ended", "up")


def standing(store: RunStore, chain_id: str) -> Pipeline:
    """Return the chain as it is now. Raises Refused `not-found` where there is none of this id."""
    folder = store.folder(chain_id)
    run, chain = store.get(chain_id), read(folder)
    if run is None:
        raise Refused("not-found", "there is no chain `%s` on this host" % chain_id)
    if chain is None:
        chain = Pipeline(chain_id, started_at=run.started_at)
        if run.state in RUN_ENDED:
            chain.state, chain.ended_at = "refused" if run.exit_code == REFUSED else "failed", run.ended_at
            chain.reason = last_line(folder) or run.reason or "it ended before its first stage"
        return chain
    if chain.state == "running" and run.state in RUN_ENDED:
        chain.state, chain.ended_at = "interrupted", run.ended_at
        chain.reason = _how(run, folder)
        chain.fix = "go on with --from, once the stage that it was at has ended"
    for step in chain.steps:
        _refresh(store, step, chain.state)
    if chain.state == "interrupted":
        chain.go_on = go_on(chain.steps)
    return chain


def go_on(steps: List[Step]) -> str:
    """Return where to begin next time: at the first step that is not done, or at the server that it needs and lost."""
    at = next((at for at, step in enumerate(steps) if step.state not in OVER), len(steps))
    if at == len(steps):
        return ""
    ahead = itertools.takewhile(lambda step: step.kind != RESET, steps[at:])
    if any(step.needs_service for step in ahead):
        for back in itertools.takewhile(lambda step: step.kind != RESET, reversed(steps[:at])):
            if back.state == "ended":
                return back.name
    return steps[at].name


def _refresh(store: RunStore, step: Step, state: str) -> None:
    """Correct a step by what its run is now."""
    if step.state == "checking" and state == "interrupted":
        step.state, step.reason = "waiting", "it was not launched"
    if step.state not in ("running", "up") or not step.run_id:
        return
    run = store.get(step.run_id)
    if run is None:
        step.state, step.reason = "failed", "the record of run %s is gone" % step.run_id
    elif run.state in RUN_ENDED:
        why = failure(run, store.folder(run.id))
        was_up, step.ended_at = step.state == "up", run.ended_at
        step.state = "ended" if was_up else "failed" if why else "done"
        step.reason = why or step.reason
    elif state == "interrupted" and step.state == "running":
        step.reason = "it goes on without the chain"


def _how(run: Run, folder: str) -> str:
    """Say why the driver is gone."""
    words: List[str] = ["its driver is gone", run.reason or "exit status %s" % run.exit_code]
    if not run.reason:
        words.append(last_line(folder))
    return ": ".join(word for word in words if word)
