"""The demo, run as a stranger would, and then looked into by somebody who believes none of what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.engines.embedded import EmbeddedEngine
from tests import ckptreader

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).resolve().parent.parent
DEMO_S = 110
VERDICT = "CLEAN" if os.geteuid() == 0 else "CLEAN (limited)"
"""Without root the files of other users cannot be looked into, here as on a real host, and the verdict says so."""

SHARD = re.compile(r"rows_0-2000/data_(\d+)\.ckpt")


@dataclass
class Demo:
    """A demo that has ended: what it printed, what it left, and two processes of the test that it met."""

    samples: int
    folder: Path
    said: dict[str, Any]
    code: int
    stderr: str
    bystanders: list[subprocess.Popen[bytes]]

    def json(self, *parts: str) -> Any:
        return json.loads(self.folder.joinpath(*parts).read_bytes())

    @property
    def out(self) -> Path:
        return self.folder / "data" / "states"

    @property
    def state(self) -> Path:
        return self.folder / "home" / ".local" / "state" / "eightzeros"


def run_demo(samples: int, scratch: Path) -> Demo:
    """Run it beside two processes that a `pkill -f sglang` would take, and that hold nothing."""
    keep, home = scratch / "kept", scratch / "home"
    home.mkdir()
    lookalikes = [["sglang::scheduler_TP0", "300"], ["python3 -m sglang.launch_server", "300"]]
    bystanders = [subprocess.Popen(words, executable=shutil.which("sleep")) for words in lookalikes]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tui.cli", "demo", "--headless", "--json",
             "--samples", str(samples), "--keep", str(keep)],
            cwd=CHECKOUT, env={**os.environ, "HOME": str(home)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=DEMO_S, check=False,
        )  # fmt: skip
    except BaseException:
        end(bystanders)
        raise
    said = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return Demo(samples, keep, said, done.returncode, done.stderr, bystanders)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=[16, pytest.param(256, marks=pytest.mark.slow)])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    found = run_demo(request.param, tmp_path_factory.mktemp("demo"))
    yield found
    end(found.bystanders)


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    return EmbeddedEngine()


def start_ticks(pid: int) -> int | None:
    """Return when the process under this pid started, or None where none runs: read here, not by our procfs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def corpus(demo: Demo) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (demo.folder / "data" / "corpus.jsonl").read_text().splitlines()]


def check_shard(path: Path, record: dict[str, Any], engine: EmbeddedEngine) -> None:
    """Compute a record's states again from its tokens and compare every bit of the file with them."""
    tensors = ckptreader.read(path)
    assert set(tensors) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
    assert tensors["input_ids"].tolist() == record["input_ids"]
    assert tensors["loss_mask"].tolist() == record["loss_mask"]
    states = engine.states(record["input_ids"])
    length, hidden = len(record["input_ids"]), engine.hidden_size
    assert tensors["aux_hidden_state"].shape == (1, length, 3 * hidden)
    assert tensors["hidden_state"].shape == (1, length, hidden)
    assert np.array_equal(tensors["aux_hidden_state"][0], states.aux)
    assert np.array_equal(tensors["hidden_state"][0], states.last)


def test_it_says_that_all_went_well_and_prints_one_object(demo: Demo) -> None:
    assert demo.code == 0, demo.stderr
    assert demo.said["virtual"] is True
    assert (demo.said["samples"], demo.said["shards"], demo.said["gpus"]) == (demo.samples, demo.samples, 8)
    assert (demo.said["verdict"], demo.said["killed"]) == (VERDICT, 9)
    assert demo.said["resumed"] is True
    assert 0 < demo.said["samples_resumed"] < demo.samples


def test_every_sample_is_there_once_with_the_states_of_its_own_tokens(demo: Demo, engine: EmbeddedEngine) -> None:
    records = corpus(demo)
    files = {path.relative_to(demo.out).as_posix() for path in demo.out.rglob("*") if path.is_file()}
    shards = {name for name in files if SHARD.fullmatch(name)}
    assert shards == {f"rows_0-2000/data_{index}.ckpt" for index in range(demo.samples)}
    assert not [name for name in files - shards if "rows_" in name], "a killed writer's leftovers"
    for index, record in enumerate(records):
        check_shard(demo.out / f"rows_0-2000/data_{index}.ckpt", record, engine)
    assert len(records) == demo.samples
    assert demo.said["tokens"] == sum(len(record["input_ids"]) for record in records)


def test_the_journal_agrees_with_the_files(demo: Demo) -> None:
    lines = [json.loads(line) for line in (demo.out / "journal.jsonl").read_text().splitlines()][1:]
    assert Counter(line["index"] for line in lines) == Counter(range(demo.samples))
    records = corpus(demo)
    for line in lines:
        data = (demo.out / line["file"]).read_bytes()
        assert (line["bytes"], line["crc32"]) == (len(data), zlib.crc32(data))
        assert (line["id"], line["tokens"]) == (
            records[line["index"]]["id"],
            len(records[line["index"]]["input_ids"]),
        )
    assert demo.said["bytes"] == sum(line["bytes"] for line in lines)


def test_a_changed_bit_a_swapped_sample_and_a_torn_file_would_be_found(
    demo: Demo, engine: EmbeddedEngine, tmp_path: Path
) -> None:
    """The checks above can fail: each fault that they are for makes them."""
    records, first = corpus(demo), demo.out / "rows_0-2000" / "data_0.ckpt"
    data, copy = first.read_bytes(), tmp_path / "copy.ckpt"
    check_shard(first, records[0], engine)
    with pytest.raises(AssertionError):
        check_shard(demo.out / "rows_0-2000" / "data_1.ckpt", records[0], engine)
    copy.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        check_shard(copy, records[0], engine)
    copy.write_bytes(data[: len(data) // 2])
    with pytest.raises(Exception, match="zip"):
        check_shard(copy, records[0], engine)


def test_the_extraction_was_really_killed_and_the_same_command_finished_it(demo: Demo) -> None:
    first, second = (demo.json("home", ".local", "state", "eightzeros", "runs", run, "exit.json")
                     for run in demo.said["runs"])  # fmt: skip
    assert (first["code"], second["code"]) == (-9, 0)
    argvs = [json.loads((demo.state / "runs" / run / "run.json").read_bytes())["argv"] for run in demo.said["runs"]]
    assert argvs[0] == argvs[1]
    at = [json.loads(line)["at"] for line in (demo.out / "journal.jsonl").read_text().splitlines()[1:]]
    assert sum(stamp < first["at"] for stamp in at) == demo.said["samples_resumed"]


def test_who_held_a_gpu_is_gone_and_nothing_of_the_demo_lives_on(demo: Demo) -> None:
    record = demo.json("demo.json")
    assert sorted(gpu for one in record["victims"] if one["role"] == "serving" for gpu in one["gpus"]) == list(range(8))
    for one in record["cast"]:
        assert start_ticks(one["pid"]) != one["start_ticks"], f"{one['role']} {one['pid']} lives"
    home = b"HOME=" + os.fsencode(demo.folder / "home")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        assert home not in environment.split(b"\0"), f"process {pid} was left behind"


def test_bystanders_with_the_servers_name_are_alive(demo: Demo) -> None:
    for process in demo.bystanders:
        assert process.poll() is None
        assert b"sglang" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_the_receipt_names_signals_to_the_victims_only(demo: Demo) -> None:
    record, receipt = demo.json("demo.json"), demo.json("receipt.json")
    victims = {one["pid"]: one["start_ticks"] for one in record["victims"]}
    deaf = {one["pid"] for one in record["cast"] if one["rank"] == 3}
    assert {signal["pid"] for signal in receipt["signals"]} == set(victims)
    assert {signal["pid"] for signal in receipt["signals"] if signal["signal"] == "SIGKILL"} == deaf
    assert {one["pid"]: one["start_ticks"] for one in receipt["killed"]} == victims
    assert record["monitor"]["pid"] in {one["pid"] for one in receipt["plan"]["spared"]}
    assert receipt["virtual"] is True
    assert receipt["survivors"] == []
    assert [(gpu["index"], gpu["verdict"], gpu["used_bytes"][0]) for gpu in receipt["after"]] == [
        (index, VERDICT, 0) for index in range(8)
    ]
    assert all(gpu["verdict"] == "NOT CLEAN" and gpu["used_bytes"][0] >= 60 << 30 for gpu in receipt["before"])


def test_the_receipt_on_the_host_is_the_one_that_was_copied(demo: Demo) -> None:
    assert json.loads(Path(demo.said["receipt"]).read_bytes()) == demo.json("receipt.json")
    assert Path(demo.said["receipt"]).is_relative_to(demo.state)


def test_nothing_was_written_outside_its_folder(demo: Demo) -> None:
    home = demo.folder.parent / "home"
    assert [path for path in home.rglob("*") if "eightzeros" in path.name or path.suffix == ".json"] == []
