"""The options, as annotated fields and as calls: read by the launcher, never run."""

from __future__ import annotations

from typing import Annotated as A
from typing import Any


def Arg(**_: Any) -> None:
    """Stand for the real one's record of an option."""


class ServerArgs:
    """The options of the stand-in."""

    model_path: A[str, Arg(help="", aliases=["--model"])]
    host: A[str, ""] = "127.0.0.1"
    port: A[int, ""] = 30000
    tp_size: A[int, Arg(aliases=["--tensor-parallel-size"])] = 1
    mem_fraction_static: A[float, ""] = 0.9
    disable_radix_cache: A[bool, ""] = False
    chunked_prefill_size: A[int, ""] = 8192
    cuda_graph_backend_decode: A[str, ""] = ""
    cuda_graph_backend_prefill: A[str, ""] = ""
    disable_cuda_graph: A[bool, Arg(no_cli=True)] = False
    forward_hooks: A[str, ""] = ""
    enable_return_aux_hidden_states: A[bool, ""] = False
    speculative_algorithm: A[str, ""] = ""
    return_aux_hidden_state_layer_ids: A[list, ""] = None
    not_an_option: int = 0

    @staticmethod
    def add_cli_args(parser: Any) -> None:
        """Add what has no field."""
        parser.add_argument("--trust-remote-code", action="store_true")
