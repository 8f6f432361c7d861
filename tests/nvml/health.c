/* What one GPU reads when its health is asked for: error records, links, settings. */
#include <string.h>

#include "double.h"

enum { DRAM = 2, SRAM = 7 };

NUMBER(nvmlDeviceGetComputeMode, u32, COMPUTE_MODE)
NUMBER(nvmlDeviceGetPcieReplayCounter, u32, PCIE_REPLAYS)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, u32, POWER_LIMIT_DEFAULT)
PART(nvmlDeviceGetRetiredPagesPendingStatus, RETIRED, 2)

int nvmlDeviceGetMemoryErrorCounter(void *handle, int kind, int counter, int place, u64 *o) {
    (void)kind, (void)counter;
    GPU_CALL(nvmlDeviceGetMemoryErrorCounter);
    if (place != DRAM && place != SRAM) return NOT_SUPPORTED;
    ANSWER(ECC_LIFETIME);
    *o = (u64)a->value[place == SRAM];
    return OK;
}

typedef struct { u32 version; u64 counts[11]; u32 threshold_exceeded; } sram_status;

int nvmlDeviceGetSramEccErrorStatus(void *handle, sram_status *o) {
    GPU_CALL(nvmlDeviceGetSramEccErrorStatus);
    if (o->version != (sizeof *o | 1 << 24)) return BAD_VERSION;
    ANSWER(SRAM_THRESHOLD);
    memset(o->counts, 0, sizeof o->counts);
    o->threshold_exceeded = (u32)a->value[0];
    return OK;
}

typedef struct { u32 version, unrepairable; } unrepairable_flag;

int nvmlDeviceGetUnrepairableMemoryFlag_v1(void *handle, unrepairable_flag *o) {
    GPU_CALL(nvmlDeviceGetUnrepairableMemoryFlag_v1);
    if (o->version != (sizeof *o | 1 << 24)) return BAD_VERSION;
    ANSWER(UNREPAIRABLE);
    o->unrepairable = (u32)a->value[0];
    return OK;
}

int nvmlDeviceGetRetiredPages(void *handle, int cause, u32 *count, u64 *out) {
    GPU_CALL(nvmlDeviceGetRetiredPages);
    ANSWER(RETIRED);
    u32 room = out ? *count : 0;
    *count = (u32)a->value[cause ? 1 : 0];
    for (u32 i = 0; i < *count && i < room; i++) out[i] = (u64)i << 12;
    return *count > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetEccMode(void *handle, u32 *current, u32 *pending) {
    GPU_CALL(nvmlDeviceGetEccMode);
    ANSWER(ECC_MODE);
    *current = (u32)a->value[0];
    *pending = (u32)a->value[1];
    return OK;
}

/* Links that a GPU lacks are refused as arguments, as drivers do for those above the last one. */
int nvmlDeviceGetNvLinkState(void *handle, u32 link, u32 *o) {
    GPU_CALL(nvmlDeviceGetNvLinkState);
    ANSWER(NVLINKS);
    if (!((u64)a->value[0] >> link & 1)) return BAD_ARGUMENT;
    *o = (u64)a->value[1] >> link & 1;
    return OK;
}

/* The third structure has a summary after the mask; the second one, which every driver takes, ends before it. */
typedef struct { u32 version; unsigned char cluster[16]; int status; u32 clique; unsigned char state; u32 mask; } fabric_v2;
typedef struct {
    u32 version; unsigned char cluster[16]; int status; u32 clique; unsigned char state; u32 mask; unsigned char summary;
} fabric_v3;

int nvmlDeviceGetGpuFabricInfoV(void *handle, fabric_v3 *o) {
    GPU_CALL(nvmlDeviceGetGpuFabricInfoV);
    int third = o->version == (sizeof(fabric_v3) | 3 << 24);
    if (!third && o->version != (sizeof(fabric_v2) | 2 << 24)) return BAD_VERSION;
    ANSWER(FABRIC);
    if (third && a->value[3] < 0) return BAD_VERSION;
    o->state = (unsigned char)a->value[0];
    o->status = (int)a->value[1];
    o->mask = (u32)a->value[2];
    if (third) o->summary = (unsigned char)a->value[3];
    return OK;
}

int nvmlDeviceValidateInforom(void *handle) { GPU_CALL(nvmlDeviceValidateInforom); ANSWER(INFOROM); return OK; }
