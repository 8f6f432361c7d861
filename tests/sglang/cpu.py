"""What lets SGLang run on a plain CPU; nothing in its installation is changed.

Imported first by every program here that imports SGLang or transformers.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any

import torch


def declare_vision_operators() -> None:
    """Declare two operators of torchvision, whose own library needs CUDA's to load.

    transformers imports torchvision for its image processors, and torchvision describes these two as it is
    imported. With a text model nothing calls them.
    """
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


class _Kernels(types.ModuleType):
    """A module that has every name, and nothing behind it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} has no build for this machine")

        return absent


def stand_in_for_kernels() -> None:
    """Put a stand-in for sgl_kernel, whose wheels load libcuda, where it cannot be imported.

    SGLang imports some names from it on the CPU too, and calls none with the torch_native attention.
    """
    try:
        import sgl_kernel  # noqa: F401
    except ImportError:
        kernels = _Kernels("sgl_kernel")
        kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
        sys.modules["sgl_kernel"] = kernels


def latent_attention(_config: dict[str, Any]) -> None:
    """Register DeepSeek's latent attention for torch_native: a --forward-hooks factory that makes no hook.

    SGLang's table lacks that backend and falls back to a rule of Triton's, whose prefill does not suit it.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as table

    table.AttentionBackendRegistry.register("torch_native", lambda *_: table.AttnForwardMethod.MLA)


def prepare() -> None:
    """Do all of it that comes before the import of SGLang."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # or the first use of an expert router compiles C++
    declare_vision_operators()
    stand_in_for_kernels()
