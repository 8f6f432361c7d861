"""The control file's layout, the same structures as double.h declares."""

from __future__ import annotations

import ctypes

from tests.nvml.build import function_names

MAX_GPUS, MAX_HOLDERS, MAX_STEPS, MAX_FIELDS, MAX_XIDS = 16, 64, 8, 48, 64
VALUES = (
    "memory", "memory_v1", "utilisation", "temperature_c", "power_mw", "power_limit_mw", "sm_mhz", "memory_mhz",
    "sm_max_mhz", "clock_reasons", "ecc_uncorrected", "ecc_corrected", "remapped", "mig", "margin_c", "slowdown_c",
    "shutdown_c", "persistence", "pcie", "fan_percent", "energy_mj", "pcie_rate_kb",
    "ecc_lifetime", "sram_threshold", "unrepairable", "retired", "ecc_mode", "compute_mode", "pcie_replays", "nvlinks",
    "fabric", "inforom", "power_limit_default_mw",
)  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        ("from_s", ctypes.c_double),
        ("error", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("value", ctypes.c_int64 * 4),
    )


class Value(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("unused", ctypes.c_int32), ("steps", Step * MAX_STEPS))


class Held(ctypes.Structure):
    _fields_ = (
        ("used", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("listed", ctypes.c_uint32),
        ("owner", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("owner_start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("shown_bytes", ctypes.c_uint64),
        ("gone_at_s", ctypes.c_double),
    )


class Field(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_uint32), ("answer", Value))


class Gpu(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("uuid", ctypes.c_char * 64),
        ("bus", ctypes.c_char * 32),
        ("minor", ctypes.c_int32),
        ("release_steps", ctypes.c_int32),
        ("release_delay_s", ctypes.c_double),
        ("release_s", ctypes.c_double),
        ("values", Value * len(VALUES)),
        ("field_count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("fields", Field * MAX_FIELDS),
        ("holders", Held * MAX_HOLDERS),
    )


class Rule(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("delay_us", ctypes.c_int32),
        ("hang_until_s", ctypes.c_double),
        ("error_until_s", ctypes.c_double),
    )


class Function(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 72), ("slots", Rule * (MAX_GPUS + 1)))


class Xid(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint32), ("xid", ctypes.c_uint32))


class Control(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("zero_s", ctypes.c_double),
        ("frozen_s", ctypes.c_double),
        ("cuda", ctypes.c_int32),
        ("field_overrun", ctypes.c_int32),
        ("driver", ctypes.c_char * 64),
        ("xid_count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("xids", Xid * MAX_XIDS),
        ("functions", Function * len(function_names())),
        ("gpus", Gpu * MAX_GPUS),
    )
