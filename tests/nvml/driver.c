/* The driver as a whole, and what its GPUs are. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "double.h"

int nvmlInitWithFlags(u32 flags) { (void)flags; DRIVER_CALL(nvmlInitWithFlags); return OK; }
int nvmlInit_v2(void) { DRIVER_CALL(nvmlInit_v2); return OK; }
int nvmlShutdown(void) { DRIVER_CALL(nvmlShutdown); return OK; }
int nvmlSystemGetDriverVersion(char *o, u32 n) { DRIVER_CALL(nvmlSystemGetDriverVersion); return text(o, n, state()->driver); }
int nvmlSystemGetNVMLVersion(char *o, u32 n) { DRIVER_CALL(nvmlSystemGetNVMLVersion); return text(o, n, state()->driver); }
int nvmlSystemGetCudaDriverVersion(int *v) { DRIVER_CALL(nvmlSystemGetCudaDriverVersion); *v = state()->cuda; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { DRIVER_CALL(nvmlSystemGetCudaDriverVersion_v2); *v = state()->cuda; return OK; }
int nvmlDeviceGetCount_v2(u32 *n) { DRIVER_CALL(nvmlDeviceGetCount_v2); *n = state()->gpu_count; return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
        case 3: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case 9: return "Driver Not Loaded";
        case 10: return "Timeout";
        case 15: return "GPU is lost";
        case 16: return "GPU requires reset";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

static int handle_of(int number, u32 index, gpu **out) {
    control *c = state();
    if (index >= c->gpu_count) return BAD_ARGUMENT;
    int error = enter(number, index + 1, 0);
    if (!error) *out = &c->gpus[index];
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, gpu **out) { return handle_of(F_nvmlDeviceGetHandleByIndex_v2, index, out); }

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **out) {
    for (u32 i = 0; i < state()->gpu_count; i++)
        if (!strcmp(uuid, state()->gpus[i].uuid)) return handle_of(F_nvmlDeviceGetHandleByUUID, i, out);
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, gpu **out) {
    for (u32 i = 0; i < state()->gpu_count; i++)
        if (!strcasecmp(bus, state()->gpus[i].bus)) return handle_of(F_nvmlDeviceGetHandleByPciBusId_v2, i, out);
    return NOT_FOUND;
}

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;

int nvmlDeviceGetName(void *handle, char *o, u32 n) { GPU_CALL(nvmlDeviceGetName); return text(o, n, d->name); }
int nvmlDeviceGetUUID(void *handle, char *o, u32 n) { GPU_CALL(nvmlDeviceGetUUID); return text(o, n, d->uuid); }

int nvmlDeviceGetIndex(void *handle, u32 *o) {
    GPU_CALL(nvmlDeviceGetIndex);
    *o = (u32)(d - state()->gpus);
    return OK;
}

int nvmlDeviceGetMinorNumber(void *handle, u32 *o) {
    GPU_CALL(nvmlDeviceGetMinorNumber);
    if (d->minor < 0) return NOT_SUPPORTED;
    *o = (u32)d->minor;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *o) {
    GPU_CALL(nvmlDeviceGetPciInfo_v3);
    memset(o, 0, sizeof *o);
    sscanf(d->bus, "%x:%x:%x", &o->domain, &o->bus, &o->device);
    snprintf(o->legacy, sizeof o->legacy, "%04x:%02x:%02x.0", o->domain & 0xffff, o->bus & 0xff, o->device & 0xff);
    snprintf(o->bus_id, sizeof o->bus_id, "%s", d->bus);
    return OK;
}
