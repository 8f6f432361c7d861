/* XIDs, as events: a set sees what is raised after the GPU was registered with it. */
#include <stdlib.h>

#include "double.h"

typedef struct { u32 next, gpus; } event_set;
typedef struct { void *device; u64 type, data; u32 instance, compute_instance; } event_data;
enum { XID_EVENT = 8 };

int nvmlEventSetCreate(event_set **out) {
    DRIVER_CALL(nvmlEventSetCreate);
    *out = calloc(1, sizeof **out);
    (*out)->next = state()->xid_count;
    return OK;
}

int nvmlEventSetFree(event_set *set) { DRIVER_CALL(nvmlEventSetFree); free(set); return OK; }

int nvmlDeviceGetSupportedEventTypes(void *handle, u64 *o) {
    GPU_CALL(nvmlDeviceGetSupportedEventTypes);
    *o = XID_EVENT;
    return OK;
}

int nvmlDeviceRegisterEvents(void *handle, u64 types, event_set *set) {
    GPU_CALL(nvmlDeviceRegisterEvents);
    if (types & ~(u64)XID_EVENT) return NOT_SUPPORTED;
    set->gpus |= 1u << (d - state()->gpus);
    return OK;
}

int nvmlEventSetWait_v2(event_set *set, event_data *out, u32 timeout_ms) {
    DRIVER_CALL(nvmlEventSetWait_v2);
    control *c = state();
    for (double end = now_s() + timeout_ms / 1e3;; pause_s(0.005)) {
        while (set->next < c->xid_count) {
            u32 i = set->next++ % MAX_XIDS;
            if (!(set->gpus & 1u << c->xids[i].gpu)) continue;
            event_data found = {&c->gpus[c->xids[i].gpu], XID_EVENT, c->xids[i].xid, ~0u, ~0u};
            *out = found;
            return OK;
        }
        if (now_s() >= end) return TIMED_OUT;
    }
}
