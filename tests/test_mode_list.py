"""The 41 known ways in which a GPU stays dirty or a reset goes wrong: each has a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
OTHERS = {
    14: ("respawner", "test_reset_cycle.py", "test_names_who_starts_a_killed_holder_again"),
    27: ("XID lines", "test_reset_xids.py", "test_what_the_kill_left_is_its_own_and_what_another_did_is_not"),
    30: ("connection lost midway", "test_reset_detached.py", "test_a_reset_ends_though_its_starter_was_killed"),
    31: ("disk of the receipt full", "test_reset_cycle.py", "test_a_full_disk_takes_neither_verdict_nor_kill"),
    32: ("two operators at once", "test_reset_cycle.py", "test_a_second_operator_is_told_who_resets"),
    33: ("segments left in shared memory", "test_reset_leftovers.py",
         "test_what_anybody_has_open_mapped_or_on_its_way_is_in_use_until_it_ends"),
    34: ("port still taken", "test_reset_leftovers.py",
         "test_a_reset_tells_what_is_left_behind_and_who_has_the_port"),
    37: ("control codes in a title", "test_reset_holders.py",
         "test_no_name_can_hide_a_holder_or_leak_into_the_terminal"),
    41: ("CUDA test leaves memory", "test_reset_cuda.py", "test_41_what_the_test_leaves_behind_is_not_clean"),
}  # fmt: skip
"""Modes whose test stands with its subject and is not called test_mode_NN: number, name, file, test."""

OPEN = {40: "/proc mounted with hidepid=2: what a user without root cannot list is not told as unseen"}
"""Modes that no test shows yet. Take one out of here with the test that shows it."""


def test_every_known_mode_has_a_test() -> None:
    named = {int(number) for path in HERE.glob("test_mode_*.py")
             for number in re.findall(r"^def test_mode_(\d\d)_", path.read_text(encoding="utf-8"), re.M)}  # fmt: skip
    assert named | OTHERS.keys() | OPEN.keys() == set(range(1, 42))
    assert not OPEN.keys() & (named | OTHERS.keys())


def test_what_the_list_names_is_there() -> None:
    gone = [(number, file, test) for number, (_, file, test) in OTHERS.items()
            if f"def {test}(" not in (HERE / file).read_text(encoding="utf-8")]  # fmt: skip
    assert not gone, "give the new name of these tests in tests/test_mode_list.py, or write them"
