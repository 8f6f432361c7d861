"""Numbers as the operator reads them, the unit always written: GiB counts 1024s, GB counts 1000s."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backend.wire import GIB, MIB

if TYPE_CHECKING:
    from backend.wire import Reading

UNREAD = ("not read yet", "no reading yet", "")


def size(count: float) -> str:
    """Write bytes with a binary unit and about three digits: 924 GiB, 4.58 TiB, 512 MiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{f'{value:.0f}' if value == int(value) else three(value)} {unit}"


def three(value: float) -> str:
    """Write a number with three digits: 4.58, 45.8, 458."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def few(value: float) -> str:
    """Write a small rate: 0.25, 1.5, 12, with no more digits than it deserves."""
    return f"{value:.2f}" if 0 < value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def rate(bytes_per_s: float) -> str:
    """Write a data rate in GB/s or MB/s, as disks and networks are sold."""
    if bytes_per_s >= 50e6:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def count(value: float) -> str:
    """Write a whole number with thousands apart."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Write a large number in five characters or fewer: 812, 2.4k, 17.3M."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            value = value / scale
            return f"{value:.0f}{letter}" if value >= 99.95 else f"{value:.1f}{letter}"
    return f"{value:.1f}" if 0 < value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Write a duration in its one or two largest units: 4.2 s, 42 s, 12 min, 3 h 12 min, 2 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def age(seconds: float) -> str:
    """Write how long ago something was, in whole seconds at least, so that it does not flicker."""
    return f"{int(max(0.0, seconds))} s" if seconds < 100 else duration(seconds)


def clock(at: float) -> str:
    """Write a wall time as the operator's clock shows it."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def moment(at: float, now: float) -> str:
    """Write when something ends: 18:02 today, Tue 18:02 on another day."""
    then, today = time.localtime(at), time.localtime(now)
    same = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same else "%a %H:%M", then)


def reading(value: Reading, spell: str = "{:.0f}") -> str:
    """Write a reading: its value, `n/a` where unsupported, `?` where not read yet, `fail` where it failed.

    Never a zero for a value that is not there.
    """
    number = value.number()
    if number is not None:
        return spell.format(number)
    if value.ok:
        return str(value.value)
    if value.unsupported:
        return "n/a"
    return "?" if value.problem in UNREAD else "fail"


def memory(used: Reading, total: Reading, gap: str = " ") -> str:
    """Write used and total memory: 93.4/140 GiB; below 1 GiB the used part is in MiB, so that no MiB is hidden."""
    whole = total.number()
    end = f"/{whole / GIB:.0f}{gap}GiB" if whole is not None else f"{gap}GiB"
    amount = used.number()
    if amount is None:
        return reading(used) + (end if whole is not None else "")
    if 0 < amount < GIB:
        return f"{max(1, round(amount / MIB))}{gap}MiB" + (end if whole is not None else "")
    return (three(amount / GIB) if amount else "0") + end
