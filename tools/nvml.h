/* nvml.h: figures of the GPUs of all ranks, by NVIDIA's management library. Include it after dtrain.h.
 *
 *     nvml gpus;
 *     nvml_open(world, 5000, &gpus);                   every rank
 *     nvml_step(&gpus, &record);                       every rank, after each dtrain_trainer_step
 *     dtrain_metrics_step(metrics, &record);           all files have the figures
 *     nvml_close(&gpus);
 *
 * The library comes with the driver. It is loaded when a program runs, so that nothing needs its header or links with
 * it: libnvidia-ml.so.1, or the path in DTRAIN_NVML of the environment. The functions called have kept their numbers
 * and layouts since 2013.
 *
 * A rank asks about its GPU, and ranks gather the answers: a record gets one value for all of them. An answer takes
 * the driver's lock and up to milliseconds, so ranks ask every few seconds, and records in between repeat the last
 * answers. What a GPU does not support is not added. A lost GPU is one warning, and is not asked again. */
#ifndef TOOLS_NVML_H
#define TOOLS_NVML_H

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* glibc before 2.34 has no dlopen without -ldl: then the address is NULL, and there is no NVML. */
#pragma weak dlopen
#pragma weak dlsym
#pragma weak dlclose
#pragma weak dlerror

enum { NVML_OK = 0, NVML_NOT_SUPPORTED = 3, NVML_GPU_IS_LOST = 15 };
enum { NVML_UTILIZATION, NVML_MEMORY, NVML_CLOCK, NVML_POWER, NVML_HEAT, NVML_THROTTLE, NVML_ECC };
enum { NVML_FIGURES = NVML_ECC + 1 };

/* The names of the figures, and how those of ranks become one: mean, most, union of bits, sum. */
static const struct nvml_figure {
    const char *name;
    char how;
} nvml_figures[NVML_FIGURES] = {
    {"gpu_utilization", '/'},         /* 0 to 1 */
    {"gpu_memory_bytes", '>'},        /* in use, by all processes */
    {"gpu_clock_hz", '/'},            /* of the multiprocessors */
    {"gpu_power_watts", '/'},         /* of the board */
    {"gpu_temperature_celsius", '>'}, /* of the chip */
    {"gpu_throttle", '|'},            /* bits of NVML's clocks event reasons, at most 2^9 */
    {"gpu_ecc_errors", '+'},          /* uncorrected since the driver was loaded */
};

/* A question to NVML: the figure, the function that answers, and the number in its answer that makes the figure, times
 * the scale. */
static const struct nvml_question {
    int figure;
    const char *function;
    int arguments;  /* before the answer: none, `which`, or `which` and 0 */
    unsigned which; /* sensor, clock or kind of errors */
    size_t at, bytes;
    double scale;
} nvml_questions[] = {
    {NVML_UTILIZATION, "nvmlDeviceGetUtilizationRates", 0, 0, 0, 4, 0.01},
    {NVML_MEMORY, "nvmlDeviceGetMemoryInfo", 0, 0, 16, 8, 1}, /* total, free, used */
    {NVML_CLOCK, "nvmlDeviceGetClockInfo", 1, 1, 0, 4, 1e6},
    {NVML_POWER, "nvmlDeviceGetPowerUsage", 0, 0, 0, 4, 1e-3},
    {NVML_HEAT, "nvmlDeviceGetTemperature", 1, 0, 0, 4, 1},
    {NVML_THROTTLE, "nvmlDeviceGetCurrentClocksEventReasons", 0, 0, 0, 8, 1},
    {NVML_THROTTLE, "nvmlDeviceGetCurrentClocksThrottleReasons", 0, 0, 0, 8, 1}, /* before 535 */
    {NVML_ECC, "nvmlDeviceGetTotalEccErrors", 2, 1, 0, 8, 1},
};

/* Fields are for reading. */
typedef struct nvml {
    dtrain_world *world;
    char reason[200];           /* why this rank's GPU has no figures; "" */
    int ranks;                  /* whose figures are gathered; 0: no rank has any */
    float *answers;             /* (ranks, NVML_FIGURES); NaN: unknown */
    double every_ms, passed_ms; /* in steps since the last questions */
    void *library, *device;
    bool started;
} nvml;

/* A function of the library by its type; dlsym has addresses of objects, which are copied. */
typedef union nvml__call {
    int (*plain)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*by_index)(unsigned index, void **device);
    int (*get)(void *device, void *answer);
    int (*get_one)(void *device, unsigned which, void *answer);
    int (*get_errors)(void *device, unsigned type, unsigned counter, void *answer);
} nvml__call;

static inline bool nvml__find(const nvml *n, const char *name, nvml__call *call)
{
    void *address = dlsym(n->library, name);
    memcpy(call, &address, sizeof address);
    return address != NULL;
}

/* Load the library and find the GPU of this rank. An error is the reason why it has no figures. */
static inline dtrain_result nvml__load(nvml *n)
{
    dtrain_device *device = dtrain_world_device(n->world);
    const bool gpu = !device->ops->host_memory;
    const char *asked = getenv("DTRAIN_NVML"), *why = NULL;
    const char *path = asked && *asked ? asked : "libnvidia-ml.so.1";
    int code = NVML_NOT_SUPPORTED;
    dtrain_device_info about;
    dtrain_world_info info;
    nvml__call call;
    char uuid[48];
    if (!gpu && (!asked || !*asked))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the ranks compute on the CPU");
    if (!dlopen || !dlsym || !dlclose)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program is linked without dlopen (add -ldl)");
    n->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!n->library && dlerror) why = dlerror();
    if (!n->library)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%.190s",
                           why ? why : "the library cannot be loaded");
    if (nvml__find(n, "nvmlInit_v2", &call)) code = call.plain();
    n->started = code == NVML_OK;
    if (!n->started)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%.140s cannot be started (its error %d)",
                           path, code);
    /* A GPU has an id. Where ranks compute on a CPU, the GPU with the rank's number on its host is asked. */
    code = NVML_NOT_SUPPORTED;
    dtrain_world_query(n->world, &info);
    if (gpu && dtrain_device_query(device, &about) == DTRAIN_OK &&
        strlen(about.id) == 36) { /* "GPU-" and 32 digits */
        snprintf(uuid, sizeof uuid, "%.12s-%.4s-%.4s-%.4s-%.12s", about.id, about.id + 12,
                 about.id + 16, about.id + 20, about.id + 24);
        if (nvml__find(n, "nvmlDeviceGetHandleByUUID", &call))
            code = call.by_uuid(uuid, &n->device);
    } else if (nvml__find(n, "nvmlDeviceGetHandleByIndex_v2", &call))
        code = call.by_index((unsigned)info.local_rank, &n->device);
    if (code == NVML_OK) return DTRAIN_OK;
    n->device = NULL;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "NVML does not know this rank's GPU (its error %d)", code);
}

/* Ask all questions about this rank's GPU. */
static inline void nvml__ask(nvml *n, float answers[NVML_FIGURES])
{
    for (int f = 0; f < NVML_FIGURES; f++) answers[f] = NAN;
    for (size_t i = 0; n->device && i < sizeof nvml_questions / sizeof *nvml_questions; i++) {
        const struct nvml_question *q = &nvml_questions[i];
        uint64_t answer[3] = {0, 0, 0}, number = 0;
        nvml__call call;
        if (!nvml__find(n, q->function, &call)) continue;
        const int code = q->arguments == 0   ? call.get(n->device, answer)
                         : q->arguments == 1 ? call.get_one(n->device, q->which, answer)
                                             : call.get_errors(n->device, q->which, 0, answer);
        memcpy(&number, (const char *)answer + q->at, q->bytes);
        if (code == NVML_OK) answers[q->figure] = (float)(q->scale * (double)number);
        if (code != NVML_GPU_IS_LOST || n->reason[0]) continue;
        snprintf(n->reason, sizeof n->reason, "NVML says that the GPU is lost");
        dtrain_log(n->world, DTRAIN_LOG_WARNING, "the GPU of rank %d is lost, says NVML",
                   dtrain_world_rank(n->world));
    }
    if (n->reason[0]) n->device = NULL;
}

/* Find the GPU of each rank, to be asked every so many milliseconds of training. Collective over the world; its only
 * errors are a lack of memory and those of dtrain_world_all_gather. n->reason says why this rank has no figures. */
static inline dtrain_result nvml_open(dtrain_world *world, uint32_t every_ms, nvml *n)
{
    bool known[DTRAIN_MAX_RANKS];
    memset(n, 0, sizeof *n);
    n->world = world;
    n->every_ms = n->passed_ms = every_ms;
    if (nvml__load(n) != DTRAIN_OK)
        snprintf(n->reason, sizeof n->reason, "%s", dtrain_last_error());
    const bool own = !n->reason[0];
    const dtrain_result result = dtrain_world_all_gather(world, &own, sizeof own, known);
    const int size = dtrain_world_size(world);
    for (int rank = 0; result == DTRAIN_OK && rank < size; rank++)
        if (known[rank]) n->ranks = size;
    if (n->ranks) n->answers = (float *)calloc((size_t)size, NVML_FIGURES * sizeof(float));
    if (n->ranks && !n->answers)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "nvml_open: no memory for the answers of %d ranks",
                           size);
    return result;
}

/* Return the answer of a rank to a figure, in which a file of prometheus.h has shares. */
static inline double nvml_share(void *user, const char *name, int rank)
{
    const nvml *n = (const nvml *)user;
    for (int f = 0; f < NVML_FIGURES && rank < n->ranks; f++)
        if (strcmp(name, nvml_figures[f].name) == 0)
            return (double)n->answers[rank * NVML_FIGURES + f];
    return (double)NAN;
}

/* Reduce a figure over the ranks that know it. Return false if none does. */
static inline bool nvml__reduce(const nvml *n, int figure, double *value)
{
    const char how = nvml_figures[figure].how;
    int known = 0;
    *value = 0;
    for (int rank = 0; rank < n->ranks; rank++) {
        const double one = (double)n->answers[rank * NVML_FIGURES + figure];
        if (!isfinite(one)) continue;
        known++;
        if (how == '>') *value = fmax(*value, one);
        else if (how == '|') *value = (double)((uint64_t)*value | (uint64_t)one);
        else *value += one;
    }
    if (how == '/' && known) *value /= known;
    return known > 0;
}

/* Add the figures to a step's record. Collective over the world when it is time to ask: a record has the same step_ms
 * on all ranks, so their sums reach every_ms in the same step. */
static inline dtrain_result nvml_step(nvml *n, dtrain_step_record *record)
{
    if (!n->ranks) return DTRAIN_OK;
    n->passed_ms += dtrain_record_value(record, "step_ms");
    if (n->passed_ms >= n->every_ms) {
        float own[NVML_FIGURES];
        nvml__ask(n, own);
        n->passed_ms = 0;
        const dtrain_result result = dtrain_world_all_gather(n->world, own, sizeof own, n->answers);
        if (result != DTRAIN_OK) return result;
    }
    for (int f = 0; f < NVML_FIGURES; f++) {
        double value;
        if (!nvml__reduce(n, f, &value)) continue;
        const dtrain_result result = dtrain_record_add(record, nvml_figures[f].name, "", value);
        if (result != DTRAIN_OK) return result;
    }
    return DTRAIN_OK;
}

/* Unload the library and free the answers. Local; a zeroed struct has nothing to unload. */
static inline void nvml_close(nvml *n)
{
    nvml__call call;
    if (n->started && nvml__find(n, "nvmlShutdown", &call)) (void)call.plain();
    if (n->library) dlclose(n->library);
    free(n->answers);
    memset(n, 0, sizeof *n);
}

#endif /* TOOLS_NVML_H */
