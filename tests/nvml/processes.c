/* Processes and the memory that they hold. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

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

u64 all_held_bytes(gpu *d) {
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
