"""A double of NVIDIA's management library, for tests and benchmarks without a GPU."""

from tests.nvml.double import NOT_AVAILABLE, GpuDouble, NvmlDouble

__all__ = ["NOT_AVAILABLE", "GpuDouble", "NvmlDouble"]
