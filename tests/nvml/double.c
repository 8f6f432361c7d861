/* A libnvidia-ml.so.1 that answers what a control file says, so that the real pynvml is under test.
 *
 * build.py generates names.h beside this file (the number of every function, and a stub for each function that is
 * not written here) and control.py maps the same structures from Python. The control file is shared memory: a test
 * changes an answer while the program under test runs, and reads how often each function was called.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "names.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { MAX_GPUS = 16, MAX_HOLDERS = 64, MAX_STEPS = 8, MAX_FIELDS = 16, MAX_XIDS = 64 };
enum { OK = 0, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMED_OUT = 10, BAD_VERSION = 25 };

/* One answer, or an error code, from a moment on (seconds of the control's clock). */
typedef struct { double from_s; int error; int unused; i64 value[4]; } step;
typedef struct { int count; int unused; step steps[MAX_STEPS]; } value;

/* Memory that lives as long as a process does, and for a while after. pid is what the lists name; owner is what holds. */
typedef struct {
    u32 used, pid, kind, listed, owner, unused;
    u64 owner_start, bytes, shown_bytes;
    double gone_at_s;
} holder;

typedef struct { u32 id, type; value answer; } field;

enum { MEMORY, MEMORY_V1, UTILISATION, TEMPERATURE, POWER, POWER_LIMIT, SM_CLOCK, MEMORY_CLOCK, SM_CLOCK_MAX, REASONS,
       ECC_UNCORRECTED, ECC_CORRECTED, REMAPPED, MIG, MARGIN, SLOWDOWN, SHUTDOWN, PERSISTENCE, PCIE, FAN, ENERGY,
       PCIE_RATE, VALUES };

typedef struct {
    char name[64], uuid[64], bus[32];
    int minor, release_steps;
    double release_delay_s, release_s;
    value values[VALUES];
    u32 field_count, unused;
    field fields[MAX_FIELDS];
    holder holders[MAX_HOLDERS];
} gpu;

/* What is wrong with one function on one GPU: slot 0 is the driver, slot i + 1 is GPU i. */
typedef struct { u64 calls; int error, delay_us; double hang_until_s; } rule;
typedef struct { char name[72]; rule slots[MAX_GPUS + 1]; } function;

typedef struct {
    u32 size, gpu_count;
    double zero_s, frozen_s;
    int cuda, field_overrun;
    char driver[64];
    u32 xid_count, unused;
    struct { u32 gpu, xid; } xids[MAX_XIDS];
    function functions[FUNCTION_COUNT];
    gpu gpus[MAX_GPUS];
} control;

static control *shared;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static control *state(void) {
    if (shared) return shared;
    const char *path = getenv("NVML_DOUBLE_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) { fprintf(stderr, "NVML_DOUBLE_CONTROL names no control file\n"); abort(); }
    void *at = mmap(0, sizeof(control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED || ((control *)at)->size != sizeof(control)) {
        fprintf(stderr, "the control file is not of this double's layout\n");
        abort();
    }
    return shared = at;
}

static gpu *gpu_of(const void *handle) {
    control *c = state();
    const char *at = handle, *first = (const char *)c->gpus;
    if (at < first || at >= first + sizeof c->gpus || (at - first) % sizeof(gpu)) return 0;
    return (gpu *)handle;
}

static void pause_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&t, 0);
}

static int obey(rule *r) {
    if (r->delay_us) pause_s(r->delay_us / 1e6);
    while (r->hang_until_s && r->hang_until_s > now_s()) pause_s(0.002);
    return r->error;
}

/* Count a call, wait as told, return the error that this function or (unless it makes handles) every function has. */
static int enter(int number, int slot, int with_any) {
    control *c = state();
    rule *own = &c->functions[number].slots[slot];
    __atomic_add_fetch(&own->calls, 1, __ATOMIC_RELAXED);
    int error = obey(own);
    if (!error && with_any) error = obey(&c->functions[ANY_FUNCTION].slots[slot]);
    return error;
}

#define DRIVER_CALL(name) do { int e_ = enter(F_##name, 0, 1); if (e_) return e_; } while (0)
#define GPU_CALL(name) \
    gpu *d = gpu_of(handle); \
    if (!d) return BAD_ARGUMENT; \
    do { int e_ = enter(F_##name, (int)(d - state()->gpus) + 1, 1); if (e_) return e_; } while (0)
#define ANSWER(which) \
    const step *a = at(&d->values[which]); \
    if (!a) return NOT_SUPPORTED; \
    if (a->error) return a->error

static const step *at(const value *v) {
    if (v->count == 1 && !v->steps[0].from_s) return &v->steps[0];
    control *c = state();
    double t = c->frozen_s >= 0 ? c->frozen_s : now_s() - c->zero_s;
    const step *found = 0;
    for (int i = 0; i < v->count; i++)
        if (v->steps[i].from_s <= t) found = &v->steps[i];
    return found;
}

int nvml_double_stub(int number, const void *first) {
    gpu *d = gpu_of(first);
    int error = enter(number, d ? (int)(d - state()->gpus) + 1 : 0, 1);
    return error ? error : NOT_SUPPORTED;
}

/* Processes and the memory that they hold */

static int lives(u32 pid, u64 start) {
    char path[64], text[1024], *end;
    u64 found = 0;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    if (!(end = strrchr(text, ')')) || end[2] == 'Z' || end[2] == 'X') return 0;
    char *word = end + 2;
    for (int i = 3; i < 22 && word; i++) if ((word = strchr(word, ' '))) word++;
    if (word) found = strtoull(word, 0, 10);
    return !start || found == start;
}

/* What of a holder is still there: all while its owner lives, then falling along the GPU's release curve. */
static u64 held_bytes(const gpu *d, holder *h) {
    if (!h->used) return 0;
    if (!h->owner || lives(h->owner, h->owner_start)) return h->bytes;
    if (!h->gone_at_s) h->gone_at_s = now_s();
    double into_s = now_s() - h->gone_at_s - d->release_delay_s;
    if (into_s < 0) return h->bytes;
    double freed = d->release_s > 0 ? into_s / d->release_s : 1;
    if (freed >= 1) { h->used = 0; return 0; }
    if (d->release_steps > 0) freed = (double)(int)(freed * d->release_steps) / d->release_steps;
    return (u64)(h->bytes * (1 - freed));
}

static u64 all_held_bytes(gpu *d) {
    u64 sum = 0;
    for (int i = 0; i < MAX_HOLDERS; i++) sum += held_bytes(d, &d->holders[i]);
    return sum;
}

typedef struct { u32 pid; u64 bytes; u32 instance, compute_instance; } listed;

static int process_list(gpu *d, u32 kind, u32 *count, listed *out) {
    u32 room = out ? *count : 0, n = 0;
    for (int i = 0; i < MAX_HOLDERS; i++) {
        holder *h = &d->holders[i];
        held_bytes(d, h);
        if (!h->used || !h->listed || h->kind != kind) continue;
        if (n < room) { listed p = {h->pid, h->shown_bytes, ~0u, ~0u}; out[n] = p; }
        n++;
    }
    *count = n;
    return n > room ? TOO_SMALL : OK;
}

#define PROCESS_LIST(name, kind) \
    int name(void *handle, u32 *count, listed *out) { GPU_CALL(name); return process_list(d, kind, count, out); }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, 0)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, 0)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 1)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 1)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 2)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 2)

/* The driver */

static int text(char *out, u32 room, const char *words) {
    if (strlen(words) + 1 > room) return TOO_SMALL;
    strcpy(out, words);
    return OK;
}

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

/* One GPU: what it is */

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

/* One GPU: what it reads */

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

#define NUMBER(name, type, which) int name(void *handle, type *o) { GPU_CALL(name); ANSWER(which); *o = (type)a->value[0]; return OK; }
#define PART(name, which, part) int name(void *handle, u32 *o) { GPU_CALL(name); ANSWER(which); *o = (u32)a->value[part]; return OK; }
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

/* XIDs, as events: a set sees what is raised after the GPU was registered with it */

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
    for (double end = now_s() + timeout_ms / 1e3;; pause_s(0.001)) {
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

#include "stubs.h"
