"""Reset and launch as the operator does them: by key and by button, refused and forced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.config import Host
from backend.wire import NOT_CLEAN, Gate, Refused
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.fakefleet import FakeFleet, config, make_plan, make_receipt, make_run, make_tree_plan
from tui.screens.base import Dialog
from tui.screens.fleet import FleetScreen

# --- reset ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["key", "button"])
async def test_reset_shows_its_plan_and_the_focus_is_on_cancel(by: str) -> None:
    async with console() as shown:
        await (shown.press("R") if by == "key" else shown.pilot.click("#do-reset"))
        await shown.sees("KILLS 2 processes", "LOSES", "kills 2 · spares 1", "Kill 2 and verify")
        assert shown.app.focused.id == "cancel"
        await shown.press("end")
        await shown.sees("SPARES 1", "a daemon of the driver", "baseline recorded")
        await shown.press("enter")
        await shown.shows(FleetScreen)
        assert not shown.asked("start_reset")


@pytest.mark.parametrize("by", ["key", "button"])
async def test_a_confirmed_reset_runs_to_its_verdict(by: str) -> None:
    async with console() as shown:
        await shown.press("R")
        await shown.sees("Kill 2 and verify")
        await (shown.press("right", "enter") if by == "key" else shown.pilot.click("#go"))
        await shown.sees("Resetting", "does not stop the reset")
        assert shown.asked("start_reset") == [("start_reset", "gpu-01", "d1")]
        shown.fleet.reset_step("gpu-01", 0.0, "phase", "looking at the host")
        shown.fleet.reset_step("gpu-01", 0.2, "signal", "SIGTERM to 41210")
        await shown.sees("looking at the host", "SIGTERM to 41210")
        shown.fleet.end_reset("gpu-01", make_receipt("gpu-01"))
        await shown.sees("CLEAN", "╭─╮", "MiB above the recorded baseline", "reset-1.json")
        await shown.press("escape")
        await shown.sees("CLEAN 0 0 0 0 0 0 0 0")


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE, (160, 100)])
async def test_a_long_plan_leaves_its_buttons_in_sight_and_can_be_read_to_its_end(size: tuple[int, int]) -> None:
    fleet = FakeFleet(config())
    fleet.plan = make_tree_plan()
    fleet.plan.victims += [replace(one, pid=one.pid + 20_000, ppid=1) for one in fleet.plan.victims]
    async with console(size, fleet=fleet) as shown:
        await shown.press("R")
        await shown.sees("Esc Cancel", "Kill 24 and verify", "NOT CLEAN", "LOSES", "kills 24 · spares 2")
        await shown.press("end")
        await shown.sees("Kill 24 and verify", "a monitor: no context", "baseline recorded")


async def test_four_keys_lead_from_the_wall_to_a_finished_reset() -> None:
    async with console() as shown:
        shown.fleet.on_reset = lambda host: shown.fleet.end_reset(host, make_receipt("gpu-01"))
        pressed = 0
        for key, then in (("R", "Kill 2 and verify"), ("right", "Kill 2"), ("enter", "next: launch")):
            await shown.press(key)
            pressed += 1
            await shown.sees(then)
        assert pressed <= 4
        await shown.sees("CLEAN", "reset-1.json")


async def test_closing_the_dialog_leaves_the_reset_and_opening_it_finds_it() -> None:
    async with console() as shown:
        await shown.press("R")
        await shown.sees("Kill 2 and verify")
        await shown.press("right", "enter")
        await shown.sees("Resetting")
        await shown.press("escape")
        await shown.sees("RESETTING")
        shown.fleet.reset_step("gpu-01", 1.0, "phase", "waiting for every GPU")
        await shown.press("R")
        await shown.sees("Resetting", "waiting for every GPU")
        assert len(shown.asked("plan_reset")) == 1


async def test_a_verdict_that_is_not_clean_names_the_reason() -> None:
    async with console(MIDDLE) as shown:
        receipt = make_receipt("gpu-01", NOT_CLEAN, reason="pid 7 is in state D", command="cat /proc/7/stat")
        shown.fleet.on_reset = lambda host: shown.fleet.end_reset(host, receipt)
        await shown.press("R")
        await shown.sees("Kill 2 and verify")
        await shown.press("right", "enter")
        await shown.sees("NOT CLEAN", "pid 7 is in state D", "see it by hand: cat /proc/7/stat")


async def test_nothing_to_kill_offers_to_verify() -> None:
    async with console() as shown:
        shown.fleet.plan = make_plan(0)
        await shown.press("R")
        await shown.sees("NOTHING TO KILL")
        await shown.press("right", "enter")
        await shown.sees("Verified", "MiB above the recorded baseline")
        assert shown.asked("verify")
        assert not shown.asked("start_reset")


async def test_verify_has_a_key_of_its_own() -> None:
    async with console() as shown:
        await shown.press("V")
        await shown.sees("Verified", "╭─╮")
        assert not shown.asked("plan_reset")


async def test_a_refused_plan_says_why() -> None:
    async with console() as shown:
        shown.fleet.error = Refused("busy", "a reset [x] is running", "wait")
        await shown.press("R")
        await shown.sees("REFUSED", "a reset [x] is running (wait)")
        assert shown.app.screen.query_one("#go").disabled


async def test_the_button_is_shut_until_the_plan_is_there() -> None:
    async with console() as shown:
        shown.fleet.hold = True
        await shown.press("R")
        await shown.sees("asking the host")
        assert shown.app.screen.query_one("#go").disabled


@pytest.mark.parametrize(
    ("losses", "run_id", "asks"), [([], "extract-1", False), (["1 h"], "extract-1", True), ([], "", True)]
)
async def test_confirm_never_is_for_own_runs_that_lose_nothing(losses: list[str], run_id: str, asks: bool) -> None:
    settings = config(1)
    fleet = FakeFleet(replace_host(settings, Host(confirm="never")))
    fleet.plan = make_plan(1)
    fleet.plan.losses, fleet.plan.victims[0].run_id = losses, run_id
    async with console(fleet=fleet) as shown:
        await shown.press("R")
        await shown.until(lambda: shown.asked("plan_reset"))
        await shown.sees("Kill 1 and verify" if asks else "Resetting")
        assert bool(shown.asked("start_reset")) is not asks


def replace_host(settings, host: Host):
    """Give the first host other settings."""
    import msgspec

    return msgspec.structs.replace(settings, hosts={"gpu-01": host})


# --- launch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["key", "button"])
async def test_launch_starts_the_first_stage_that_waits(by: str) -> None:
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].runs["p"] = make_run("p", "prepare", "exited", exit_code=0)
    async with console(fleet=fleet) as shown:
        await (shown.press("L") if by == "key" else shown.pilot.click("#do-launch"))
        await shown.sees("Every gate of serve is open", "Launch serve")
        await (shown.press("enter", "enter") if by == "key" else shown.pilot.click("#go"))
        await shown.until(lambda: shown.asked("launch"))
        assert shown.asked("launch") == [("launch", "gpu-01", "serve", "")]
        await shown.shows(FleetScreen)
        await shown.sees("serve running")


async def test_launch_is_shut_while_a_gate_is_and_a_reason_opens_it() -> None:
    async with console() as shown:
        shown.fleet.gate_list = [
            Gate("gpus", False, "GPU 3 holds 612 MiB", "reset it"),
            Gate("shm", None, "not readable"),
        ]
        await shown.press("L")
        await shown.sees("FAIL", "GPU 3 holds 612 MiB", "do: reset it", "unknown", "Launch prepare anyway")
        go = shown.app.screen.query_one("#go")
        assert go.disabled
        await shown.press("enter")
        assert shown.app.focused.id == "reason"
        await shown.press(*"short")
        assert go.disabled
        await shown.press(*" no more")
        await shown.until(lambda: not go.disabled)
        await shown.press("enter", "enter")
        await shown.until(lambda: shown.asked("launch"))
        assert shown.asked("launch") == [("launch", "gpu-01", "prepare", "short no more")]


async def test_launch_is_shut_when_the_gates_cannot_be_checked() -> None:
    async with console() as shown:
        shown.fleet.error = ConnectionError("the host is lost")
        await shown.press("L")
        await shown.sees("could not be checked", "the host is lost")
        assert shown.app.screen.query_one("#go").disabled


async def test_a_refused_launch_says_why_and_stays() -> None:
    async with console() as shown:
        await shown.press("L")
        await shown.sees("Every gate of prepare is open")
        shown.fleet.gate_list = [Gate("gpus", False, "now dirty")]
        await shown.pilot.click("#go")
        await shown.sees("was not launched", "now dirty")
        assert isinstance(shown.app.screen, Dialog)


async def test_another_stage_is_checked_when_it_is_chosen() -> None:
    async with console() as shown:
        await shown.press("L")
        await shown.sees("Every gate of prepare")
        await shown.press("down", "down")
        await shown.sees("Every gate of extract", "Launch extract")
