/* GPUs, by NVML
 *
 * NVIDIA's management library comes with the driver. It is loaded when a program runs, so that
 * nothing needs its header or links with it, and a machine without it has no such metrics. The few
 * functions below have kept their numbers and layouts since 2013.
 *
 * Every rank asks about its own GPU: which one that is, it knows; and the answers travel with the
 * words that a step gathers anyway, so that rank 0 sees the GPUs of all nodes. Asking takes the
 * driver's lock and up to milliseconds: it is done every gpu_every_ms, not in every step, and words
 * repeat the last answer in between. What this GPU cannot tell (NOT_SUPPORTED) stays unknown; a
 * lost GPU is one warning, and is not asked again. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "train/trainer_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"
#include "device/device.h"

#include <dlfcn.h>

/* Where the C library has no dlopen of its own (glibc before 2.34 without -ldl, or linked
 * statically) the address is NULL, and there is no NVML. */
#pragma weak dlopen
#pragma weak dlsym
#pragma weak dlclose
#pragma weak dlerror

enum { DTRAIN__NVML_OK = 0, DTRAIN__NVML_NOT_SUPPORTED = 3, DTRAIN__NVML_GPU_IS_LOST = 15 };

enum {
    DTRAIN__NVML_INIT,
    DTRAIN__NVML_SHUTDOWN,
    DTRAIN__NVML_BY_UUID,
    DTRAIN__NVML_BY_INDEX,
    DTRAIN__NVML_UTILIZATION,
    DTRAIN__NVML_MEMORY,
    DTRAIN__NVML_CLOCK,
    DTRAIN__NVML_POWER,
    DTRAIN__NVML_TEMPERATURE,
    DTRAIN__NVML_REASONS,
    DTRAIN__NVML_REASONS_BEFORE, /* its name before driver 535 */
    DTRAIN__NVML_ECC,
    DTRAIN__NVML_CALLS
};

/* Calls of the library; a function's address is an object's in dlsym, and is copied. */
typedef int (*dtrain__nvml_plain_fn)(void);
typedef int (*dtrain__nvml_find_fn)(const char *uuid, void **device);
typedef int (*dtrain__nvml_index_fn)(unsigned index, void **device);
typedef int (*dtrain__nvml_out_fn)(void *device, void *out);
typedef int (*dtrain__nvml_which_fn)(void *device, unsigned which, unsigned *out);
typedef int (*dtrain__nvml_ecc_fn)(void *device, unsigned type, unsigned counter,
                                   unsigned long long *out);

static int dtrain__nvml_plain(const dtrain__nvml *nvml, int call)
{
    dtrain__nvml_plain_fn function;
    memcpy(&function, &nvml->calls[call], sizeof function);
    return function ? function() : DTRAIN__NVML_NOT_SUPPORTED;
}

static int dtrain__nvml_out(const dtrain__nvml *nvml, int call, void *out)
{
    dtrain__nvml_out_fn function;
    memcpy(&function, &nvml->calls[call], sizeof function);
    return function ? function(nvml->device, out) : DTRAIN__NVML_NOT_SUPPORTED;
}

static int dtrain__nvml_which(const dtrain__nvml *nvml, int call, unsigned which, unsigned *out)
{
    dtrain__nvml_which_fn function;
    memcpy(&function, &nvml->calls[call], sizeof function);
    return function ? function(nvml->device, which, out) : DTRAIN__NVML_NOT_SUPPORTED;
}

/* Find this rank's GPU: by the id that the device has, and where ranks compute on a CPU and NVML
 * was asked for by its path, the GPU with the rank's number on this host. */
static int dtrain__nvml_find(dtrain_metrics *metrics, bool gpu)
{
    dtrain__nvml *nvml = &metrics->nvml;
    dtrain_device_info info;
    dtrain_world_info world;
    if (gpu && dtrain_device_query(dtrain_world_device(metrics->world), &info) == DTRAIN_OK &&
        strlen(info.id) == 36) {
        dtrain__nvml_find_fn find;
        char uuid[48];
        snprintf(uuid, sizeof uuid, "%.12s-%.4s-%.4s-%.4s-%.12s", info.id, info.id + 12,
                 info.id + 16, info.id + 20, info.id + 24); /* "GPU-" and 32 digits */
        memcpy(&find, &nvml->calls[DTRAIN__NVML_BY_UUID], sizeof find);
        return find ? find(uuid, &nvml->device) : DTRAIN__NVML_NOT_SUPPORTED;
    }
    dtrain__nvml_index_fn at;
    dtrain_world_query(metrics->world, &world);
    memcpy(&at, &nvml->calls[DTRAIN__NVML_BY_INDEX], sizeof at);
    return at ? at((unsigned)world.local_rank, &nvml->device) : DTRAIN__NVML_NOT_SUPPORTED;
}

static void dtrain__nvml_reason(dtrain__nvml *nvml, const char *format, ...) DTRAIN__PRINTF(2, 3);
static void dtrain__nvml_reason(dtrain__nvml *nvml, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(nvml->reason, sizeof nvml->reason, format, args);
    va_end(args);
}

/* Load the library and find the GPU. Whatever is missing, the reason says it and nothing fails. */
DTRAIN__PRIVATE void dtrain__nvml_open(dtrain_metrics *metrics)
{
    static const char *const names[DTRAIN__NVML_CALLS] = {
        "nvmlInit_v2",
        "nvmlShutdown",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEccErrors"};
    dtrain__nvml *nvml = &metrics->nvml;
    const char *asked = metrics->desc.nvml_path ? metrics->desc.nvml_path : getenv("DTRAIN_NVML");
    const char *path = asked && asked[0] ? asked : "libnvidia-ml.so.1";
    const bool gpu = !dtrain_world_device(metrics->world)->ops->host_memory;
    for (size_t i = 0; i < sizeof nvml->figures / sizeof *nvml->figures; i++)
        nvml->figures[i] = (float)DTRAIN__NAN;
    if (metrics->desc.no_gpu) dtrain__nvml_reason(nvml, "desc's no_gpu is set");
    else if (!gpu && (!asked || !asked[0]))
        dtrain__nvml_reason(nvml, "the ranks compute on the CPU");
    else if (!dlopen || !dlsym || !dlclose)
        dtrain__nvml_reason(nvml, "this program is linked without dlopen (add -ldl)");
    if (nvml->reason[0]) return;
    nvml->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library) {
        const char *why = dlerror ? dlerror() : NULL;
        dtrain__nvml_reason(nvml, "%.190s", why ? why : "the library cannot be loaded");
        return;
    }
    for (int i = 0; i < DTRAIN__NVML_CALLS; i++) nvml->calls[i] = dlsym(nvml->library, names[i]);
    int code = nvml->calls[DTRAIN__NVML_INIT] ? dtrain__nvml_plain(nvml, DTRAIN__NVML_INIT)
                                              : (int)DTRAIN__NVML_NOT_SUPPORTED;
    nvml->started = code == DTRAIN__NVML_OK;
    if (nvml->started) {
        code = dtrain__nvml_find(metrics, gpu);
        if (code != DTRAIN__NVML_OK)
            dtrain__nvml_reason(nvml, "NVML does not know this rank's GPU (its error %d)", code);
    } else dtrain__nvml_reason(nvml, "%.140s cannot be started (its error %d)", path, code);
}

/* Note an answer; a lost GPU ends the questions. */
static void dtrain__nvml_note(dtrain_metrics *metrics, int code, dtrain_figure figure, double value)
{
    dtrain__nvml *nvml = &metrics->nvml;
    const int at = (int)figure - (int)DTRAIN_FIGURE_GPU_UTILIZATION;
    nvml->figures[at] = code == DTRAIN__NVML_OK ? (float)value : (float)DTRAIN__NAN;
    if (code != DTRAIN__NVML_GPU_IS_LOST || nvml->reason[0]) return;
    dtrain__nvml_reason(nvml, "NVML says that the GPU is lost");
    dtrain_log(metrics->world, DTRAIN_LOG_WARNING, "the GPU of rank %d is lost, says NVML",
               dtrain_world_rank(metrics->world));
}

/* Ask, if it is time to, and hand the answers to the trainer, whose next step tells all ranks. */
DTRAIN__PRIVATE void dtrain__nvml_sample(dtrain_metrics *metrics)
{
    dtrain__nvml *nvml = &metrics->nvml;
    const double now = dtrain_seconds();
    struct {
        unsigned gpu, memory;
    } utilization = {0, 0};
    struct {
        unsigned long long total, free, used;
    } memory = {0, 0, 0};
    unsigned clock = 0, power = 0, temperature = 0;
    unsigned long long reasons = 0, errors = 0;
    dtrain__nvml_ecc_fn ecc;
    if (!nvml->device || nvml->reason[0] || now < nvml->ask_at) return;
    nvml->ask_at = now + 1e-3 * metrics->desc.gpu_every_ms;
    int code = dtrain__nvml_out(nvml, DTRAIN__NVML_UTILIZATION, &utilization);
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_UTILIZATION, 0.01 * utilization.gpu);
    code = dtrain__nvml_out(nvml, DTRAIN__NVML_MEMORY, &memory);
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_MEMORY, (double)memory.used);
    code = dtrain__nvml_which(nvml, DTRAIN__NVML_CLOCK, 1, &clock); /* multiprocessors, MHz */
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_CLOCK, 1e6 * clock);
    code = dtrain__nvml_out(nvml, DTRAIN__NVML_POWER, &power); /* mW */
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_POWER, 1e-3 * power);
    code = dtrain__nvml_which(nvml, DTRAIN__NVML_TEMPERATURE, 0, &temperature);
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_TEMPERATURE, temperature);
    const int call =
        nvml->calls[DTRAIN__NVML_REASONS] ? DTRAIN__NVML_REASONS : DTRAIN__NVML_REASONS_BEFORE;
    code = dtrain__nvml_out(nvml, call, &reasons);
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_THROTTLE, (double)reasons);
    memcpy(&ecc, &nvml->calls[DTRAIN__NVML_ECC], sizeof ecc);
    code = ecc ? ecc(nvml->device, 1, 0, &errors) : DTRAIN__NVML_NOT_SUPPORTED;
    dtrain__nvml_note(metrics, code, DTRAIN_FIGURE_GPU_ECC, (double)errors);
    if (metrics->desc.trainer)
        memcpy(metrics->desc.trainer->gpu, nvml->figures, sizeof nvml->figures);
}

DTRAIN__PRIVATE void dtrain__nvml_close(dtrain_metrics *metrics)
{
    dtrain__nvml *nvml = &metrics->nvml;
    if (nvml->started) (void)dtrain__nvml_plain(nvml, DTRAIN__NVML_SHUTDOWN);
    if (nvml->library) dlclose(nvml->library);
    memset(nvml, 0, sizeof *nvml);
}
