"""A deletion's plan and its receipt in words, for the command and the console alike."""

from __future__ import annotations

from typing import Any

from tui import format

_REFERS = {"unseen": "not known"}
"""What stands before a reference that is none: what could not be looked into."""


def plan_lines(plan: dict[str, Any], now: float) -> list[str]:
    """Write a plan as plain lines of text."""
    lines = [f"{plan['path']}" + ("  (a deletion that has begun goes on)" if plan["resumes"] else "")]
    links = f", {format.count(plan['links'])} of them links" if plan["links"] else ""
    freed = f"{format.size(plan['bytes'])} ({format.size(plan['freed_bytes'])} on the disk)"
    lines.append(f"  {format.count(plan['files'])} files{links} in {format.count(plan['folders'])} folders, {freed}")
    if plan["newest_at"] is not None:
        newest, oldest = (format.duration(now - plan[key]) for key in ("newest_at", "oldest_at"))
        lines.append(f"  last written {newest} ago, the oldest file {oldest} ago")
    for part in plan["parts"]:
        age = format.duration(now - part["newest_at"]) + " ago" if part["newest_at"] else "-"
        name = part["name"] + "/" if part["name"] else "files of its own"
        lines.append(f"    {name:<20} {format.count(part['files']):>8} files {format.size(part['bytes']):>9}  {age}")
    lines += [f"    and {plan['parts_left_out']} more folders"] if plan["parts_left_out"] else []
    lines += [f"  {_REFERS.get(ref['kind'], 'refers to it: ' + ref['kind'])}: {ref['text']}" for ref in plan["refs"]]
    lines += [f"  REFUSED {one['code']}: {one['text']}" for one in plan["refused"]]
    more = plan["refused_count"] - len(plan["refused"])
    return lines + ([f"  and {more} more reasons"] if more > 0 else [])


def receipt_lines(receipt: dict[str, Any]) -> list[str]:
    """Write what a deletion has come to."""
    done = receipt["deleted"] or {"files": 0, "bytes": 0}
    lines = [f"{receipt['verdict']}: {format.count(done['files'])} files, {format.size(done['bytes'])}"]
    return lines + ([f"  {receipt['reason']}"] if receipt["reason"] else [])
