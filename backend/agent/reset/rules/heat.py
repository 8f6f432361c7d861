"""Heat, power, and what a GPU at rest should not do: be slowed down, or look busy."""

from __future__ import annotations

from typing import Iterator

from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.rules.case import Case
from backend.wire import NOT_SUPPORTED

MARGIN_WARN_C = 10
IDLE_WARN_C = 60
NO_LIMIT_C = 93
"""The most that cyclecloud-healthagent allows where the GPU names no limit."""

IDLE_POWER_RATIO = 1.5
SAMPLES = 3
"""How many moments, a second apart, a GPU has to look so: reasons and utilisation lag behind the release."""

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
SUSPECT = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL | POWER_BRAKE
"""nvmlClocksEventReasons. Idle (0x1), application clocks (0x2), the software power cap (0x4, normal at full load),
sync boost (0x10) and display clocks (0x100) are no fault (facts: reset, section 2)."""

COOL = "check airflow, fans and the inlet temperature"


def temperature(case: Case) -> Iterator[Finding]:
    """Degrees to the slowdown; where the GPU names no limit, the temperature itself.

    The margin of Hopper and later ends at an offset below zero, that of older ones at zero: an offset is never
    compared with a temperature.
    """
    heat, margin = case.value("temperature_c"), case.value("thermal_margin_c")
    shown = case.smi("TEMPERATURE")
    hot = "" if heat is None else " at %d °C" % heat
    if margin is not None:
        if margin <= (case.value("slowdown_offset_c") or 0):
            yield Finding("it is at its slowdown temperature: margin %d °C%s" % (margin, hot), COOL, shown)
        elif margin < MARGIN_WARN_C:
            yield Finding("%d °C are left to its slowdown temperature%s" % (margin, hot), COOL, shown, WARN)
    elif heat is not None and heat > NO_LIMIT_C:
        yield Finding("it is at %d °C, over %d" % (heat, NO_LIMIT_C), COOL, shown)
    if case.idle and not case.drawn_on and heat is not None and heat > IDLE_WARN_C:
        text = "nobody holds it and it is at %d °C, over %d" % (heat, IDLE_WARN_C)
        yield Finding(text, "normal for half a minute after a job; later, " + COOL, shown, WARN)


def power(case: Case) -> Iterator[Finding]:
    """Power at rest against the baseline's, and a limit below the default."""
    now, was = case.value("power_w"), case.recorded("power_w")
    if case.idle and now is not None and was and now > IDLE_POWER_RATIO * was:
        text = "nobody holds it and it draws %d W, at the baseline %d" % (now, was)
        yield Finding(text, "normal for half a minute after a job", case.smi("POWER"), WARN)
    limit_w, default_w = case.value("power_limit_w"), case.value("power_limit_default_w")
    accepted = case.recorded("power_limit_w")
    if limit_w is not None and default_w is not None and limit_w < default_w and limit_w != accepted:
        text = "its power limit is %d W, by default %d" % (limit_w, default_w)
        yield Finding(text, "sudo nvidia-smi -pl %d -i %s" % (default_w, case.address), case.smi("POWER"), WARN)


def clocks(case: Case) -> Iterator[Finding]:
    """Reasons that held its clocks down at each of the moments."""
    seen = [int(one.get("clock_reasons", NOT_SUPPORTED).number() or 0) for one in case.settled]
    always = SUSPECT if len(seen) >= SAMPLES else 0
    for reasons in seen:
        always &= reasons
    shown = case.smi("PERFORMANCE")
    if always & HW_THERMAL:
        yield Finding("its clocks are held down by heat (hardware)", COOL, shown)
    if always & POWER_BRAKE:
        yield Finding("its clocks are held down by the power brake", "check the host's power supplies", shown)
    if always & SW_THERMAL:
        yield Finding("its clocks are held down by heat (software)", COOL, shown, WARN)
    if always & HW_SLOWDOWN and not always & (HW_THERMAL | POWER_BRAKE) and case.value("persistence"):
        yield Finding("its clocks are held down by the hardware", "see the power supply and heat", shown, WARN)


def stuck_utilisation(case: Case) -> Iterator[Finding]:
    """A GPU that nobody holds and that says it works, at each of the moments."""
    seen = [one.get("utilisation_percent", NOT_SUPPORTED).number() or 0 for one in case.settled]
    if len(seen) >= SAMPLES and all(seen) and not case.drawn_on:
        text = "nobody holds it and its utilisation stays at %d %%" % min(seen)
        action = "open and close a CUDA context on it; if it stays so, " + case.reset
        yield Finding(text, action, case.query("utilization.gpu"), FAIL)
