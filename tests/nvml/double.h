/* A libnvidia-ml.so.1 that answers what a control file says, so that the real pynvml is under test.
 *
 * build.py generates names.h (the number of every function) and stubs.h (a stub for each function that is not written
 * here), and control.py maps the same structures from Python. The control file is shared memory: a test changes an
 * answer while the program under test runs, and reads how often each function was called.
 *
 * control.c keeps the file and the rules of each function, driver.c answers for the driver and its list of GPUs,
 * processes.c for who holds memory, readings.c and health.c for what one GPU reads, events.c for XIDs.
 */
#ifndef NVML_DOUBLE_H
#define NVML_DOUBLE_H

#include "names.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { MAX_GPUS = 16, MAX_HOLDERS = 64, MAX_STEPS = 8, MAX_FIELDS = 48, MAX_XIDS = 64 };
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
       PCIE_RATE, ECC_LIFETIME, SRAM_THRESHOLD, UNREPAIRABLE, RETIRED, ECC_MODE, COMPUTE_MODE, PCIE_REPLAYS, NVLINKS,
       FABRIC, INFOROM, POWER_LIMIT_DEFAULT, VALUES };

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
typedef struct { u64 calls; int error, delay_us; double hang_until_s, error_until_s; } rule;
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
control *state(void);
double now_s(void);
void pause_s(double seconds);

/* Return the GPU behind a handle, or 0 where it is none. */
gpu *gpu_of(const void *handle);

/* Count a call, wait as told, return the error that this function or (unless it makes handles) every function has. */
int enter(int number, int slot, int with_any);

/* Return what of an answer holds at this moment, or 0. */
const step *at(const value *v);

int text(char *out, u32 room, const char *words);
u64 all_held_bytes(gpu *d);

#define DRIVER_CALL(name) do { int e_ = enter(F_##name, 0, 1); if (e_) return e_; } while (0)
#define GPU_CALL(name) \
    gpu *d = gpu_of(handle); \
    if (!d) return BAD_ARGUMENT; \
    do { int e_ = enter(F_##name, (int)(d - state()->gpus) + 1, 1); if (e_) return e_; } while (0)
#define ANSWER(which) \
    const step *a = at(&d->values[which]); \
    if (!a) return NOT_SUPPORTED; \
    if (a->error) return a->error

#define NUMBER(name, type, which) int name(void *handle, type *o) { GPU_CALL(name); ANSWER(which); *o = (type)a->value[0]; return OK; }
#define PART(name, which, part) int name(void *handle, u32 *o) { GPU_CALL(name); ANSWER(which); *o = (u32)a->value[part]; return OK; }

#endif
