"""`serve_cpu.py ARGUMENTS` is `python -m sglang.launch_server ARGUMENTS` on a CPU.

The server's processes are spawned and run this file again under another name, so all of them are prepared.
"""

from __future__ import annotations

import cpu

cpu.prepare()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
