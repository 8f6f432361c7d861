/* A double of the driver's CUDA library: memory is the process's own, and the kernel of the CUDA test runs here.

   Beside the library lies a file `faults` with lines `UUID FUNCTION WHAT`. UUID may be `*`; WHAT is an error's number,
   or hang, crash, wrong (a word of the data), residue (memory that stays when the process is gone). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FREE_BYTES (4u << 20)

static int alive;
static size_t words;
static char text_of_module[1];
static char function_of_module[1];

static void beside(const char *name, char *path, size_t size)
{
    Dl_info own;
    dladdr((void *)beside, &own);
    const char *slash = strrchr(own.dli_fname, '/');
    snprintf(path, size, "%.*s%s", (int)(slash - own.dli_fname + 1), own.dli_fname, name);
}

static int fault(const char *function, int *wrong)
{
    char path[4096], uuid[128], where[64], what[64];
    const char *mine = getenv("CUDA_VISIBLE_DEVICES");
    beside("faults", path, sizeof path);
    FILE *file = fopen(path, "r");
    *wrong = 0;
    if (!file)
        return 0;
    while (fscanf(file, "%127s %63s %63s", uuid, where, what) == 3) {
        if (strcmp(where, function) || (strcmp(uuid, "*") && strcmp(uuid, mine ? mine : "")))
            continue;
        if (!strcmp(what, "hang"))
            for (;;)
                pause();
        if (!strcmp(what, "crash"))
            *(volatile int *)0 = 1;
        if (!strcmp(what, "wrong") || !strcmp(what, "residue"))
            *wrong = 1;
        else {
            fclose(file);
            return atoi(what);
        }
    }
    fclose(file);
    return 0;
}

#define ENTER(function) \
    int wrong, code = fault(function, &wrong); \
    if (code) return code; \
    if (!alive) return 3;

int cuInit(unsigned flags)
{
    int wrong, code = fault("cuInit", &wrong);
    const char *mine = getenv("CUDA_VISIBLE_DEVICES");
    if (code || flags)
        return code ? code : 1;
    alive = 1;
    return mine && *mine ? 0 : 100;
}

int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } known[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
        {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {100, "CUDA_ERROR_NO_DEVICE"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {218, "CUDA_ERROR_INVALID_PTX"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {800, "CUDA_ERROR_NOT_PERMITTED"},
        {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (known[at].code == code) {
            *name = known[at].name;
            return 0;
        }
    return 1;
}

int cuDeviceGetCount(int *count) { ENTER("cuDeviceGetCount") *count = 1; return 0; }

int cuDeviceGet(int *device, int ordinal) { ENTER("cuDeviceGet") *device = 7; return ordinal ? 101 : 0; }

int cuCtxCreate_v2(void **context, unsigned flags, int device)
{
    ENTER("cuCtxCreate_v2")
    if (device != 7 || flags)
        return 101;
    *context = &alive;
    return 0;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER("cuMemGetInfo_v2")
    *free_bytes = FREE_BYTES;
    *total = 2 * FREE_BYTES;
    return 0;
}

int cuMemAlloc_v2(uint64_t *at, size_t bytes)
{
    ENTER("cuMemAlloc_v2")
    if (bytes > FREE_BYTES)
        return 2;
    *at = (uint64_t)(uintptr_t)malloc(bytes);
    words = bytes / 4;
    return *at ? 0 : 2;
}

int cuMemsetD32_v2(uint64_t at, unsigned value, size_t count)
{
    ENTER("cuMemsetD32_v2")
    for (size_t number = 0; number < count; number++)
        ((uint32_t *)(uintptr_t)at)[number] = value;
    return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    ENTER("cuMemcpyDtoH_v2")
    memcpy(to, (void *)(uintptr_t)from, bytes);
    if (wrong)
        ((uint32_t *)to)[5] ^= 0x10;
    return 0;
}

int cuCtxSynchronize(void) { ENTER("cuCtxSynchronize") return 0; }

int cuModuleLoadData(void **module, const char *text)
{
    ENTER("cuModuleLoadData")
    *module = text_of_module;
    return strstr(text, ".version") && strstr(text, ".entry stamp(.param .u64 words, .param .u32 count)") ? 0 : 218;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    ENTER("cuModuleGetFunction")
    *function = function_of_module;
    return module == text_of_module && !strcmp(name, "stamp") ? 0 : 500;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra)
{
    ENTER("cuLaunchKernel")
    uint32_t *at = (uint32_t *)(uintptr_t) * (uint64_t *)arguments[0], count = *(uint32_t *)arguments[1];
    if (function != function_of_module || gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || stream || extra)
        return 1;
    if (count != words)
        return 700;
    for (uint64_t number = 0; number < (uint64_t)gx * bx && number < count; number++)
        at[number] = (at[number] ^ (uint32_t)number) * 2654435761u;
    if (wrong)
        at[count - 1]++;
    return 0;
}

int cuModuleUnload(void *module) { ENTER("cuModuleUnload") return module == text_of_module ? 0 : 400; }

int cuMemFree_v2(uint64_t at) { ENTER("cuMemFree_v2") free((void *)(uintptr_t)at); return 0; }

int cuCtxDestroy_v2(void *context)
{
    ENTER("cuCtxDestroy_v2")
    if (wrong) {
        char path[4096];
        beside("residue", path, sizeof path);
        FILE *file = fopen(path, "w");
        fputs(getenv("CUDA_VISIBLE_DEVICES"), file);
        fclose(file);
    }
    return context == &alive ? 0 : 201;
}
