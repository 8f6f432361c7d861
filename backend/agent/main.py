"""The agent's program: which machine it is on, and which role it plays."""

from __future__ import annotations

import json
import os
import sys
from typing import List

from backend.agent.seam import Machine


def main(argv: List[str]) -> int:
    """Run a role on a real host: NVML is the driver, the kernel's device numbers say what belongs to a GPU."""
    from backend.agent.devices import NvidiaDevices
    from backend.agent.nvml import NvmlDriver
    from backend.agent.xid.kernellog import DEVICE

    machine = Machine(
        NvmlDriver, NvidiaDevices, relaunch(), cuda_library="libcuda.so.1", kernel_log=DEVICE, smi=["nvidia-smi"]
    )
    return serve(machine, argv)


def relaunch(*arguments: str, module: str = "backend.agent.main") -> List[str]:
    """Return the words that start this same program again, before the role's name.

    Shipped, the program is the folder that it was unpacked to; in a checkout it is a module.
    """
    program = os.path.abspath(sys.argv[0])
    if os.path.isdir(program):
        return [sys.executable, "-E", "-s", "-S", program, *arguments]
    return [sys.executable, "-m", module, *arguments]


def serve(machine: Machine, argv: List[str]) -> int:
    """Play the role that the first word names, and return the exit status."""
    role, words = (argv[0], argv[1:]) if argv else ("agent", [])
    if role == "agent":
        from backend.agent.loop import Loop

        return Loop(machine, nonce=words[0] if words else "").run()
    if role == "supervise":
        from backend.agent.supervisor import supervise

        return supervise(words[0])
    if role == "reset":
        from backend.agent.reset.cycle import main as reset

        return reset(machine, words[0], json.loads(words[1]))
    if role == "gpureset":
        from backend.agent.reset.gpureset.cycle import main as gpureset

        return gpureset(machine, words[0], json.loads(words[1]))
    if role == "cudatest":
        from backend.agent.reset.cudachild import main as cudatest

        return cudatest(machine.cuda_library, int(words[0]))
    if role == "adopt":
        from backend.agent.adopt.watcher import main as adopt

        return adopt(words)
    if role == "audit":
        from backend.agent.shards.audit.main import main as audit

        return audit(words)
    if role == "train":
        from backend.agent.train.main import main as train

        return train(words)
    if role == "record":
        from backend.agent.flight.recorder import record

        return record(machine)
    if role == "pipeline":
        from backend.agent.pipeline.driver import main as pipeline

        return pipeline(machine)
    if role == "retire":
        from backend.agent.retire.main import main as retire

        return retire(machine, words[0])
    roles = "agent, supervise, reset, gpureset, cudatest, adopt, audit, train, record, pipeline, retire"
    sys.stderr.write("eightzeros agent: no role `%s`; roles: %s\n" % (role, roles))
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
