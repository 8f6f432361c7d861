/* What one GPU reads. */
#include <string.h>

#include "double.h"

typedef struct { u64 total, free, used; } memory_v1;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *o) {
    GPU_CALL(nvmlDeviceGetMemoryInfo_v2);
    if (o->version != (sizeof *o | 2 << 24)) return BAD_VERSION;
    ANSWER(MEMORY);
    o->total = a->value[0];
    o->reserved = a->value[1];
    o->used = a->value[2] + all_held_bytes(d);
    o->free = o->total - o->reserved - o->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *o) {
    GPU_CALL(nvmlDeviceGetMemoryInfo);
    int own = d->values[MEMORY_V1].count > 0;
    ANSWER(own ? MEMORY_V1 : MEMORY);
    o->total = a->value[0];
    o->used = (own ? a->value[1] : a->value[1] + a->value[2]) + all_held_bytes(d);
    o->free = o->total - o->used;
    return OK;
}

NUMBER(nvmlDeviceGetPowerUsage, u32, POWER)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, u32, POWER_LIMIT)
NUMBER(nvmlDeviceGetPowerManagementLimit, u32, POWER_LIMIT)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, REASONS)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, REASONS)
NUMBER(nvmlDeviceGetPersistenceMode, u32, PERSISTENCE)
NUMBER(nvmlDeviceGetFanSpeed, u32, FAN)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, ENERGY)
PART(nvmlDeviceGetCurrPcieLinkGeneration, PCIE, 0)
PART(nvmlDeviceGetCurrPcieLinkWidth, PCIE, 1)
PART(nvmlDeviceGetMaxPcieLinkGeneration, PCIE, 2)
PART(nvmlDeviceGetMaxPcieLinkWidth, PCIE, 3)

int nvmlDeviceGetUtilizationRates(void *handle, u32 *o) {
    GPU_CALL(nvmlDeviceGetUtilizationRates);
    ANSWER(UTILISATION);
    o[0] = (u32)a->value[0];
    o[1] = (u32)a->value[1];
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, u32 *o) {
    (void)sensor;
    GPU_CALL(nvmlDeviceGetTemperature);
    ANSWER(TEMPERATURE);
    *o = (u32)a->value[0];
    return OK;
}

int nvmlDeviceGetTemperatureV(void *handle, int *o) {
    GPU_CALL(nvmlDeviceGetTemperatureV);
    ANSWER(TEMPERATURE);
    o[2] = (int)a->value[0];
    return OK;
}

int nvmlDeviceGetMarginTemperature(void *handle, int *o) {
    GPU_CALL(nvmlDeviceGetMarginTemperature);
    ANSWER(MARGIN);
    o[1] = (int)a->value[0];
    return OK;
}

int nvmlDeviceGetTemperatureThreshold(void *handle, int kind, u32 *o) {
    GPU_CALL(nvmlDeviceGetTemperatureThreshold);
    if (kind > 1) return NOT_SUPPORTED;
    ANSWER(kind ? SLOWDOWN : SHUTDOWN);
    *o = (u32)a->value[0];
    return OK;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, u32 *o) {
    GPU_CALL(nvmlDeviceGetClockInfo);
    ANSWER(kind == 2 ? MEMORY_CLOCK : SM_CLOCK);
    *o = (u32)a->value[0];
    return OK;
}

int nvmlDeviceGetMaxClockInfo(void *handle, int kind, u32 *o) {
    GPU_CALL(nvmlDeviceGetMaxClockInfo);
    if (kind == 2) return NOT_SUPPORTED;
    ANSWER(SM_CLOCK_MAX);
    *o = (u32)a->value[0];
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, u64 *o) {
    (void)counter;
    GPU_CALL(nvmlDeviceGetTotalEccErrors);
    ANSWER(kind ? ECC_UNCORRECTED : ECC_CORRECTED);
    *o = (u64)a->value[0];
    return OK;
}

int nvmlDeviceGetRemappedRows(void *handle, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failure) {
    GPU_CALL(nvmlDeviceGetRemappedRows);
    ANSWER(REMAPPED);
    *corrected = (u32)a->value[0];
    *uncorrected = (u32)a->value[1];
    *pending = (u32)a->value[2];
    *failure = (u32)a->value[3];
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, u32 *current, u32 *pending) {
    GPU_CALL(nvmlDeviceGetMigMode);
    ANSWER(MIG);
    *current = (u32)a->value[0];
    *pending = (u32)a->value[1];
    return OK;
}

int nvmlDeviceGetPcieThroughput(void *handle, int counter, u32 *o) {
    (void)counter;
    GPU_CALL(nvmlDeviceGetPcieThroughput);
    ANSWER(PCIE_RATE);
    *o = (u32)a->value[0];
    return OK;
}

typedef struct { u32 id, scope; i64 timestamp, latency; u32 type; int result; i64 value; } field_value;

int nvmlDeviceGetFieldValues(void *handle, int count, field_value *out) {
    GPU_CALL(nvmlDeviceGetFieldValues);
    for (int i = 0; i < count; i++) {
        out[i].result = NOT_SUPPORTED;
        for (u32 k = 0; k < d->field_count; k++) {
            const step *a = at(&d->fields[k].answer);
            if (d->fields[k].id != out[i].id || !a) continue;
            out[i].result = a->error;
            out[i].type = d->fields[k].type;
            out[i].value = a->value[0];
        }
    }
    if (state()->field_overrun) memset(&out[count], 0xee, sizeof *out);
    return OK;
}
