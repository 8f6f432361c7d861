"""The plan of a reset as rows: trees, nothing cut, and what there is to lose."""

from __future__ import annotations

import pytest

from backend.wire import Process
from tests.fakefleet import make_tree_plan
from tests.rowtext import text
from tui.commands.reset import plan_lines
from tui.widgets.plan_rows import plan_rows, plan_summary
from tui.widgets.process_tree import forest
from tui.widgets.rows import row_width


def started(*pairs: tuple[int, int]) -> list[Process]:
    """Make processes of (pid, parent)."""
    return [Process(pid, pid, ppid=parent) for pid, parent in pairs]


def drawn(*pairs: tuple[int, int]) -> list[str]:
    return [one.mark + str(one.process.pid) for one in forest(started(*pairs))]


def test_children_stand_below_the_one_that_started_them() -> None:
    assert drawn((10, 1), (12, 11), (11, 10), (13, 10), (20, 1)) == ["10", "├ 11", "│ └ 12", "└ 13", "20"]


def test_a_ring_of_parents_and_a_chain_without_end_are_drawn_once_each() -> None:
    assert sorted(drawn((1, 2), (2, 1), (3, 3))) == ["1", "2", "3"]
    chain = forest(started(*((pid, pid - 1) for pid in range(1, 200))))
    assert [one.process.pid for one in chain] == list(range(1, 200))
    assert max(len(one.mark) for one in chain) <= 20


@pytest.mark.parametrize("width", [67, 104])
def test_every_word_of_a_plan_stands_whole_in_its_rows(width: int) -> None:
    plan = make_tree_plan()
    rows = plan_rows(plan, width)
    shown = " ".join(text(rows).replace("│", " ").split())
    assert max(row_width(row) for row in rows) <= width
    assert "…" not in shown
    for one in [*plan.victims, *plan.spared]:
        for part in (str(one.pid), one.user, one.command, one.reason, one.method):
            assert part in shown, part
    for line in [*plan.losses, *plan.unseen]:
        assert line in shown
    assert plan_summary(plan) == "kills 12 · spares 2 · 1 not readable"


def test_the_command_prints_the_same_trees() -> None:
    lines = plan_lines(make_tree_plan())
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in lines if line.lstrip()[:1].isdigit()}
    assert depth["41200"] < depth["41205"] < depth["41210"] == depth["41217"] < depth["41301"]
    assert any("3 uncommitted samples" in line for line in lines)
