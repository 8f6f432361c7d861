"""The guards of a reset, each with what it becomes when it is taken out and the tests that must then fail."""

from __future__ import annotations

from typing import NamedTuple


class Guard(NamedTuple):
    """One guard: `text` stands once in `file`, below backend/agent; `becomes` is the same code without the guard."""

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]


GUARDS = (
    Guard("self", "reset/plan.py", "if pid == os.getpid() or pid in self.spared_ids:", "if pid in self.spared_ids:",
          ("test_mode_circumstances.py::test_mode_29_agent_holds_the_device",)),
    Guard("ancestors (own shell, own sshd session)", "reset/plan.py",
          "if pid == os.getpid() or pid in self.spared_ids:",
          "if pid == os.getpid():",
          ("test_reset_guards.py::test_a_shell_that_resets_is_spared_though_it_has_a_context",)),
    Guard("own console and agent", "reset/plan.py", "if pid in self.ours and pid not in self.supervisors:", "if False:",
          ("test_reset_guards.py::test_an_agent_of_ours_is_spared_though_it_has_a_context",)),
    Guard("other users", "reset/plan.py", "if uid != os.geteuid() and not self.other_users:", "if False:",
          ("test_mode_circumstances.py::test_mode_13_another_users",)),
    Guard("protected programs", "reset/plan.py", "return protected(procfs.exe(pid))", 'return ""',
          ("test_reset_protected.py::test_a_protected_program_with_a_context_is_left_to_the_operator",)),
    Guard("nothing through a spared process", "reset/plan.py", "family.descendants(roots, stop=kept.__contains__)",
          "family.descendants(roots)",
          ("test_reset_guards.py::test_nothing_is_taken_through_a_process_that_is_spared",)),
    Guard("identity at binding", "reset/ladder.py", "if not same(wanted, bound.identity):", "if False:",
          ("test_reset_guards.py::test_who_becomes_another_program_between_plan_and_binding_gets_no_signal",)),
    Guard("identity is more than the pid", "pidfd.py",
          "return found == (planned if planned.inode else planned._replace(inode=found.inode))",
          "return found.pid == planned.pid",
          ("test_reset_identity.py::test_another_program_under_the_same_pid_is_not_the_same",
           "test_reset_guards.py::test_who_becomes_another_program_between_plan_and_binding_gets_no_signal")),
    Guard("signals go through the handle, not to the pid", "reset/ladder.py",
          "code = self.bound[key(one)].send(number)", 'code = __import__("os").kill(one.pid, number) or 0',
          ("test_mode_processes.py::test_mode_11_pid_reused_between_binding_and_the_first_signal",)),
    Guard("a start time at a single signal", "pidfd.py",
          "return bound.identity.start_ticks == start_ticks and bound.send(number) == 0",
          "return bound.send(number) == 0",
          ("test_reset_identity.py::test_a_reused_pid_is_another_process",)),
    Guard("newcomers stop a confirmed plan", "reset/plan.py",
          "if before is None and not pids & set(family.ancestors(one.pid)):", "if False:",
          ("test_mode_circumstances.py::test_mode_15_new_process_after_the_plan",)),
    Guard("a changed program stops a confirmed plan", "reset/plan.py",
          "if before is not None and (before.exe, before.uid) != (one.exe, one.uid):", "if False:",
          ("test_mode_circumstances.py::test_mode_12_victim_became_another_program",)),
    Guard("digest", "reset/cycle.py", "if digest and digest != plan.digest:", "if False:",
          ("test_reset_cycle.py::test_a_changed_plan_sends_no_signal",)),
    Guard("newcomers during the reset", "reset/ladder.py",
          "heirs = [one for one in fresh if self._related(one, seen)]", "heirs = fresh",
          ("test_reset_guards.py::test_who_appears_during_the_reset_is_named_and_left_alone",)),
    Guard("monitors", "reset/look.py", "return files >= CONTEXT_FILES or (maps > 0 and files == 0)",
          "return files > 0 or maps > 0",
          ("test_reset_cycle.py::test_memory_that_nobody_is_named_for_is_the_context_like_holders",)),
    Guard("a name needs files (pids of another namespace)", "reset/look.py",
          "if holding is not None and seen.minor(index) in holding.minors:", "if True:",
          ("test_mode_processes.py::test_mode_21_pid_of_another_namespace",)),
    Guard("heirs of a ghost", "reset/plan.py", "    _take_heirs(draft)\n", "",
          ("test_mode_processes.py::test_mode_07_fork_heir",)),
    Guard("one reset at a time", "reset/cycle.py", "one_at_a_time(what, machine.devices().scope()) as held",
          'one_at_a_time(what, machine.devices().scope(), "other") as held',
          ("test_reset_cycle.py::test_a_second_operator_is_told_who_resets",)),
    Guard("it cannot be asked to stop", "reset/cycle.py", "signal.signal(number, signal.SIG_IGN)",
          "signal.signal(number, signal.SIG_DFL)",
          ("test_reset_detached.py::test_a_reset_that_is_asked_to_stop_ends_with_its_verdict_all_the_same",)),
    Guard("the driver's zero", "reset/clearance.py", "elif value > state.limit.most_bytes:", "elif False:",
          ("test_mode_circumstances.py::test_mode_23_memory_after_the_kill",)),
    Guard("no context left in the lists", "reset/clearance.py", "        state.why.append(_listed(pid, kind))\n", "",
          ("test_mode_processes.py::test_mode_22_ghost_that_never_existed",)),
    Guard("nobody has the files", "reset/clearance.py", "if not named and holds_context(holding, state.minor):",
          "if False:", ("test_reset_cycle.py::test_in_doubt_it_spares_and_says_who_is_left",)),
    Guard("free for a whole second", "reset/clearance.py", "and now - clear_since >= STABLE_S:", "and True:",
          ("test_reset_cycle.py::test_the_full_second_of_stability_is_kept_by_default",)),
    Guard("a GPU that does not answer is unknown", "reset/verdict.py", "if state.unknown and not _gone(state):",
          "if False:", ("test_mode_circumstances.py::test_mode_24_driver_hangs_for_good",)),
    Guard("a driver blocked behind a victim is no hang", "reset/watch.py",
          "since = max(self._child.waiting_since, self._exited_at)", "since = self._child.waiting_since",
          ("test_mode_circumstances.py::test_mode_24_driver_blocks_while_a_victim_exits",)),
    Guard("what could not be read limits", "reset/verdict.py", "    if gaps:\n", "    if False:\n",
          ("test_mode_circumstances.py::test_mode_25_reading_without_permission",)),
    Guard("segments that somebody maps", "reset/leftovers.py",
          "        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n", "",
          ("test_reset_leftovers.py::test_one_that_is_opened_after_it_was_listed_is_not_removed",)),
)  # fmt: skip
