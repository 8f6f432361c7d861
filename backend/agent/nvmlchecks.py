"""Numbers of the driver as readings: a value inside its bounds, else failed. A sentinel is never shown as a number."""

from __future__ import annotations

from typing import Any, Callable

from backend.wire import Reading, failed

Check = Callable[[Any], Reading]


def within(low: float, high: float, unit: str, parts: int = 1) -> Check:
    """Make a check: a number of the driver, `parts` to the unit, is a value inside the bounds and failed outside.

    Sentinels (2^64-1, 2^32-1) and absurd values are never shown as numbers.
    """

    def check(raw: Any) -> Reading:
        value = raw if parts == 1 else raw / parts
        if low <= value <= high:
            return Reading(value)
        return failed("out of range: %s %s" % (raw if parts == 1 else "%g" % value, unit))

    return check


PERCENT = within(0, 100, "%")
COUNT = within(0, (1 << 62) - 1, "errors")
FLAG = within(0, 1, "(0 or 1)")
CELSIUS = within(0, 200, "°C")
DEGREES_LEFT = within(-200, 200, "°C")
WATTS = within(0.001, 20000, "W", 1000)  # a GPU that answers draws power: 0 W is a misread sensor
MEGAHERTZ = within(0, 20000, "MHz")
REASONS = within(0, (1 << 32) - 1, "as clock event reasons")
FAN = within(0, 200, "%")  # the intended speed, which may exceed 100
ACTION = within(0, 255, "as recovery action")
ROWS = within(0, (1 << 31) - 1, "rows")  # counts of 32 bits, whose sentinel is 2^32-1
LANES = within(1, 64, "lanes")
GENERATION = within(1, 16, "as generation")
SMALL = within(0, 255, "as state")
