"""What a console may ask of the record. Blocks are sent as they lie on the disk, a page at a time."""

from __future__ import annotations

import base64
import os
from typing import Any, Dict, List, Optional, Tuple

from backend.agent.flight.events import read_events
from backend.agent.flight.level import tail_blocks
from backend.agent.flight.place import flight_dir, start_recorder
from backend.agent.flight.record import LADDER, budget_bytes
from backend.agent.flight.segments import overlapping, read_segment, segment_names
from backend.agent.runfiles import locked
from backend.agent.seam import Machine
from backend.wire import Refused
from backend.wire.flight import FlightError, read_head

PAGE_BYTES = 180 * 1024
"""Of blocks in one answer: base64 makes a third more of it, and a wire line is 256 KiB."""

BEHIND = "~"
"""Sorts behind every segment: only the tail is left to send."""


def op_start(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Start the recorder where none runs, and say what there is."""
    start_recorder(machine)
    return op_info(machine, args)


def op_info(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return {recording, bytes, budget_bytes, levels: [{step_s, bytes, first}]}; first is None where nothing is."""
    folder = flight_dir()
    levels: List[Dict[str, Any]] = []
    for step_s, _, _ in LADDER:
        place = os.path.join(folder, str(step_s))
        size = sum(os.stat(os.path.join(place, name)).st_size for name in segment_names(place))
        levels.append({"step_s": step_s, "bytes": size, "first": _first(place, step_s)})
    used = sum(level["bytes"] for level in levels)
    return {
        "recording": locked(folder),
        "bytes": used,
        "budget_bytes": budget_bytes(folder, used),
        "levels": levels,
    }


def op_blocks(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return {blocks: [base64], next}: the blocks of `step_s` between `start` and `end`, a page at a time.

    `next`, given back as `after`, continues; it is None with the last page, whose last block may be the tail: rows
    that are not in a segment yet, and come again in a later answer.
    """
    step_s = args.get("step_s")
    if step_s not in [step for step, _, _ in LADDER]:
        text = "`step_s` must be one of %s, not %r" % (", ".join(str(step) for step, _, _ in LADDER), step_s)
        raise Refused("bad-request", text)
    start, end, after = _span(args)
    folder = os.path.join(flight_dir(), str(step_s))
    serial, tail = tail_blocks(folder, int(step_s))  # before the segments: it may become a block meanwhile
    blocks: List[str] = []
    size, stored = 0, False
    for name, found, data in overlapping(folder, start, end, after):
        if size + len(data) > PAGE_BYTES and blocks:
            return {"blocks": blocks, "next": [name, found.begin]}
        size += len(data)
        stored = stored or found.head.serial == serial
        blocks.append(base64.b64encode(data).decode("ascii"))
    left = [] if stored else [data for data in tail if read_head(data).last >= start and read_head(data).first <= end]
    if blocks and size + sum(map(len, left)) > PAGE_BYTES:
        return {"blocks": blocks, "next": [BEHIND, 0]}
    return {"blocks": blocks + [base64.b64encode(data).decode("ascii") for data in left], "next": None}


def op_events(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return {events, next}: what happened between `start` and `end`, from number `skip` on."""
    start, end, _ = _span(args)
    skip = args.get("skip") or 0
    if not isinstance(skip, int):
        raise Refused("bad-request", "`skip` must be a whole number, not %r" % (skip,))
    return read_events(flight_dir(), start, end, skip)


def _span(args: Dict[str, Any]) -> Tuple[float, float, Tuple[str, int]]:
    start, end, after = args.get("start", 0.0), args.get("end", 1e18), args.get("after") or ["", 0]
    for name, value in (("start", start), ("end", end)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise Refused("bad-request", "`%s` must be a time in seconds, not %r" % (name, value))
    good = isinstance(after, list) and len(after) == 2 and isinstance(after[0], str) and isinstance(after[1], int)
    if not good:
        raise Refused("bad-request", "`after` must be what `next` was, not %r" % (after,))
    return float(start), float(end), (after[0], after[1])


def _first(folder: str, step_s: int) -> Optional[float]:
    """Return the time of the oldest row of one step."""
    for name in segment_names(folder):
        data = read_segment(os.path.join(folder, name))
        try:
            return read_head(data).first
        except FlightError:
            continue
    tail = tail_blocks(folder, step_s)[1]
    return read_head(tail[0]).first if tail else None
