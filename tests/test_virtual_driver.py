"""The virtual driver: memory follows real processes, and two readers agree."""

from __future__ import annotations

import fcntl
import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from backend.agent.seam import DriverError
from backend.virtual.claims import Claim, Ledger, device_path, lay_out, take
from backend.virtual.driver import RESERVED_BYTES, TOTAL_BYTES, VirtualDevices, VirtualDriver, release_s
from backend.wire import GIB, LEAN, SLOW
from tests.virtualcast import Cast, gone, kill
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    with Cast(tmp_path / "host") as started:
        yield started


def used(driver: VirtualDriver, gpu: int = 0) -> int:
    reading, contexts = driver.occupancy(gpu)
    assert reading.ok
    assert not contexts.problem
    return int(reading.number() or 0)


def released(root: Path, claim: Claim, ago_s: float) -> None:
    """Leave what a reader would that saw a claim released some seconds ago."""
    at_ns = time.monotonic_ns() - int(ago_s * 1e9)
    (root / "released" / f"{claim.gpu}.{claim.pid}.1.{at_ns}").write_text(json.dumps(vars(claim)))


def test_an_idle_gpu_reads_as_an_idle_h200(cast: Cast) -> None:
    driver = VirtualDriver(str(cast.root))
    inventory = driver.open()
    try:
        readings, contexts = driver.lean(1)
    finally:
        driver.close()
    assert inventory.virtual
    assert VirtualDriver.virtual
    assert "virtual" in inventory.gpus[0].name
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert all(gpu.uuid.startswith("VIRTUAL-") for gpu in inventory.gpus)
    assert set(readings) == set(LEAN)
    assert set(driver.slow(1)) == set(SLOW)
    assert readings["memory_used_bytes"].value == 0
    assert readings["memory_total_bytes"].value == TOTAL_BYTES == 143771 << 20
    assert driver.slow(1)["memory_reserved_bytes"].value == RESERVED_BYTES == 615 << 20
    assert (readings["utilisation_percent"].value, readings["power_w"].value) == (0, 75.0)
    assert contexts.processes == []


def test_open_says_why_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no virtual GPU"):
        VirtualDriver(str(tmp_path)).open()


def test_the_driver_keeps_the_device_files_open_as_any_client_does(cast: Cast) -> None:
    devices, driver = VirtualDevices(str(cast.root)), VirtualDriver(str(cast.root))
    driver.open()
    try:
        held = [devices.gpus_of(os.stat(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
    finally:
        driver.close()
    assert {found for found in held if found is not None} == {(), (0,), (1,)}


def test_devices_are_known_by_inode_and_not_by_name(cast: Cast, tmp_path: Path) -> None:
    devices = VirtualDevices(str(cast.root))
    alias, stranger = tmp_path / "elsewhere", tmp_path / "nvidia0"
    os.link(device_path(str(cast.root), "nvidia1"), alias)
    stranger.touch()
    assert devices.gpus_of(os.stat(alias)) == (1,)
    assert devices.gpus_of(os.stat(stranger)) is None
    st = os.stat(alias)
    device = os.major(st.st_dev), os.minor(st.st_dev)
    assert devices.gpus_of_map(device, st.st_ino, "/anything") == (1,)
    assert devices.gpus_of_map(device, os.stat(stranger).st_ino, "/dev/nvidia1") is None


def test_memory_is_held_by_a_real_process_and_goes_when_it_is_killed(cast: Cast) -> None:
    driver, other = VirtualDriver(str(cast.root)), VirtualDriver(str(cast.root))
    (holder,) = cast.hold("--gpus", "0", "--gib", "63", "--release-ms", "150")
    assert used(driver) == 63 * GIB
    assert used(driver, 1) == 0
    assert [pid for pid, _, _ in driver.occupancy(0)[1].processes] == [holder["pid"]]
    kill(holder)
    seen: list[int] = []
    until(lambda: seen.append(used(driver)) or not seen[-1], every_s=0.005)
    assert gone(holder)
    assert seen == sorted(seen, reverse=True)
    assert used(other) == 0
    assert other.occupancy(0)[1].processes == []


def test_an_heir_keeps_the_memory_and_the_driver_names_the_dead_opener(cast: Cast) -> None:
    driver = VirtualDriver(str(cast.root))
    opener, heir = cast.hold("--gpus", "1", "--gib", "20", "--heir", "0", processes=2)
    assert heir["role"] == "heir"
    kill(opener)
    until(lambda: gone(opener))
    for _ in range(3):  # each reading looks at the locks anew
        assert used(driver, 1) == 20 * GIB
        assert [pid for pid, _, _ in driver.occupancy(1)[1].processes] == [opener["pid"]]
    kill(heir)
    until(lambda: used(driver, 1) == 0)


def test_every_reader_sees_the_same_release(tmp_path: Path) -> None:
    lay_out(str(tmp_path), 1)
    os.close(take(str(tmp_path), Claim(gpu=0, pid=os.getpid(), used_bytes=GIB, release_ms=60_000)))
    first, second = Ledger(str(tmp_path)), Ledger(str(tmp_path))
    (seen,), (again,) = first.on(0), second.on(0)
    assert seen == again
    assert seen.released_at_s is not None
    assert os.listdir(tmp_path / "claims") == []


@pytest.mark.parametrize(("ago_s", "part"), [(1, 1.0), (30, 0.6), (50, 0.25), (70, 0.0)])
def test_memory_falls_in_steps_over_the_release(tmp_path: Path, ago_s: int, part: float) -> None:
    lay_out(str(tmp_path), 1)
    released(tmp_path, Claim(gpu=0, pid=4242, used_bytes=GIB, release_ms=60_000), ago_s)
    assert used(VirtualDriver(str(tmp_path))) == int(GIB * part)


def test_pinned_memory_lengthens_the_release() -> None:
    assert release_s(Claim(0, 1, GIB)) == pytest.approx(0.1)
    assert release_s(Claim(0, 1, GIB, pinned_bytes=40 * 10**9)) == pytest.approx(2.5)


def test_a_release_long_past_is_forgotten(tmp_path: Path) -> None:
    lay_out(str(tmp_path), 1)
    released(tmp_path, Claim(gpu=0, pid=4242, used_bytes=GIB), 300)
    assert Ledger(str(tmp_path)).on(0) == []
    assert os.listdir(tmp_path / "released") == []


def test_a_claim_being_made_is_never_taken_for_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks at the worst moment, just before the lock, must see nothing yet."""
    lay_out(str(tmp_path), 1)
    ledger, flock, seen = Ledger(str(tmp_path)), fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            seen.append(ledger.on(0))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    fd = take(str(tmp_path), Claim(gpu=0, pid=os.getpid(), used_bytes=GIB))
    try:
        assert seen == [[]]
        assert [claim.released_at_s for claim in ledger.on(0)] == [None]
    finally:
        os.close(fd)


def number(driver: VirtualDriver, name: str) -> float:
    value = driver.lean(0)[0][name].number()
    assert value is not None
    return value


def test_load_shows_in_every_reading(cast: Cast) -> None:
    driver = VirtualDriver(str(cast.root))
    cast.hold("--gpus", "0", "--gib", "90", "--load", "1")
    assert number(driver, "utilisation_percent") >= 90
    until(lambda: number(driver, "power_w") > 400)
    until(lambda: number(driver, "temperature_c") > 30)
    assert number(driver, "sm_clock_mhz") > 1700
    assert int(number(driver, "clock_reasons")) & 1 == 0


def test_each_reading_lags_after_the_release_as_on_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(str(tmp_path), 1)
    driver, now = VirtualDriver(str(tmp_path)), time.monotonic()
    released(tmp_path, Claim(gpu=0, pid=4242, used_bytes=GIB, load=1.0, release_ms=30, claimed_at_s=now - 600), 0)

    def at(seconds: float, name: str) -> float:
        monkeypatch.setattr("backend.virtual.driver.time", SimpleNamespace(monotonic=lambda: now + seconds))
        return number(driver, name)

    assert (at(0.1, "memory_used_bytes"), at(0.1, "utilisation_percent") >= 90) == (0, True)
    assert (at(0.5, "utilisation_percent"), at(0.5, "sm_clock_mhz") > 345) == (0, True)
    assert (at(2.0, "sm_clock_mhz"), at(2.0, "clock_reasons"), at(2.0, "power_w") > 100) == (345, 1, True)
    assert (at(60.0, "power_w"), at(60.0, "temperature_c")) == (75.0, 27)


def test_a_folder_that_cannot_be_read_is_a_failed_reading_and_never_zero(cast: Cast) -> None:
    driver = VirtualDriver(str(cast.root))
    driver.open()
    (cast.root / "claims").rename(cast.root / "moved")
    try:
        reading, contexts = driver.occupancy(0)
        lean, _ = driver.lean(0)
    finally:
        driver.close()
        (cast.root / "moved").rename(cast.root / "claims")
    assert reading.failed
    assert contexts.problem
    assert not any(value.ok for value in lean.values())
