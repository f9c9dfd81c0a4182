/* GPUs, by NVML
 *
 * NVIDIA's management library comes with the driver. It is loaded when a program runs, so that
 * nothing needs its header or links with it, and a machine without it has no such metrics. The few
 * functions below have kept their numbers and layouts since 2013.
 *
 * Every rank asks about its own GPU. The answers are figures, which the ranks exchange in each step
 * anyway: so rank 0 sees the GPUs of all nodes. Asking takes the driver's lock and up to
 * milliseconds: it is done every gpu_every_ms, and steps in between repeat the last answers. What a
 * GPU does not support stays unknown. A lost GPU is one warning, and is not asked again. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"
#include "device/backend.h"
#include "device/device.h"

#include <dlfcn.h>

/* Where the C library has no dlopen of its own (glibc before 2.34 without -ldl, or linked
 * statically) the address is NULL, and there is no NVML. */
#pragma weak dlopen
#pragma weak dlsym
#pragma weak dlclose
#pragma weak dlerror

enum { DTRAIN__NVML_OK = 0, DTRAIN__NVML_NOT_SUPPORTED = 3, DTRAIN__NVML_GPU_IS_LOST = 15 };

/* A function of the library by its type; dlsym has addresses of objects, which are copied. */
typedef union dtrain__nvml_call {
    int (*plain)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*by_index)(unsigned index, void **device);
    int (*get)(void *device, void *answer);
    int (*get_one)(void *device, unsigned which, void *answer);
    int (*get_errors)(void *device, unsigned type, unsigned counter, void *answer);
} dtrain__nvml_call;

static bool dtrain__nvml_find(const dtrain__nvml *nvml, const char *name, dtrain__nvml_call *call)
{
    void *address = dlsym(nvml->library, name);
    memcpy(call, &address, sizeof address);
    return address != NULL;
}

/* A question to NVML: the figure, the function that answers, and where in its answer the number is
 * that makes the figure, times the scale. */
typedef struct dtrain__nvml_question {
    dtrain_figure figure;
    const char *function;
    int arguments;  /* before the answer: none, `which`, or `which` and 0 */
    unsigned which; /* sensor, clock or kind of errors */
    size_t at, bytes;
    double scale;
} dtrain__nvml_question;

static const dtrain__nvml_question dtrain__nvml_questions[] = {
    {DTRAIN_FIGURE_GPU_UTILIZATION, "nvmlDeviceGetUtilizationRates", 0, 0, 0, 4, 0.01},
    {DTRAIN_FIGURE_GPU_MEMORY, "nvmlDeviceGetMemoryInfo", 0, 0, 16, 8, 1}, /* total, free, used */
    {DTRAIN_FIGURE_GPU_CLOCK, "nvmlDeviceGetClockInfo", 1, 1, 0, 4, 1e6},  /* multiprocessors */
    {DTRAIN_FIGURE_GPU_POWER, "nvmlDeviceGetPowerUsage", 0, 0, 0, 4, 1e-3},
    {DTRAIN_FIGURE_GPU_TEMPERATURE, "nvmlDeviceGetTemperature", 1, 0, 0, 4, 1},
    {DTRAIN_FIGURE_GPU_THROTTLE, "nvmlDeviceGetCurrentClocksEventReasons", 0, 0, 0, 8, 1},
    /* its name before driver 535 */
    {DTRAIN_FIGURE_GPU_THROTTLE, "nvmlDeviceGetCurrentClocksThrottleReasons", 0, 0, 0, 8, 1},
    {DTRAIN_FIGURE_GPU_ECC, "nvmlDeviceGetTotalEccErrors", 2, 1, 0, 8, 1}, /* uncorrected */
};

static void dtrain__nvml_forget(dtrain__nvml *nvml)
{
    for (size_t i = 0; i < sizeof nvml->figures / sizeof *nvml->figures; i++)
        nvml->figures[i] = (float)DTRAIN__NAN;
}

/* Load the library and find the GPU. An error is the reason why there are no GPU metrics. */
DTRAIN__PRIVATE dtrain_result dtrain__nvml_open(dtrain_metrics *metrics)
{
    dtrain__nvml *nvml = &metrics->nvml;
    dtrain_world *world = metrics->world;
    const char *asked = getenv("DTRAIN_NVML");
    const char *path = asked && asked[0] ? asked : "libnvidia-ml.so.1", *why = NULL;
    const bool gpu = !dtrain_world_device(world)->ops->host_memory;
    int code = DTRAIN__NVML_NOT_SUPPORTED;
    dtrain_device_info device;
    dtrain_world_info info;
    dtrain__nvml_call call;
    char uuid[48];
    dtrain__nvml_forget(nvml);
    if (!gpu && (!asked || !asked[0]))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the ranks compute on the CPU");
    if (!dlopen || !dlsym || !dlclose)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program is linked without dlopen (add -ldl)");
    nvml->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library && dlerror) why = dlerror();
    if (!nvml->library)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%.190s",
                           why ? why : "the library cannot be loaded");
    if (dtrain__nvml_find(nvml, "nvmlInit_v2", &call)) code = call.plain();
    nvml->started = code == DTRAIN__NVML_OK;
    if (!nvml->started)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%.140s cannot be started (its error %d)",
                           path, code);
    /* a GPU has an id; where ranks compute on a CPU and NVML was asked for by its path, this rank's
     * is the GPU with its number on this host */
    code = DTRAIN__NVML_NOT_SUPPORTED;
    dtrain__world_info(world, &info);
    if (gpu && dtrain_device_query(dtrain_world_device(world), &device) == DTRAIN_OK &&
        strlen(device.id) == 36) { /* "GPU-" and 32 digits */
        snprintf(uuid, sizeof uuid, "%.12s-%.4s-%.4s-%.4s-%.12s", device.id, device.id + 12,
                 device.id + 16, device.id + 20, device.id + 24);
        if (dtrain__nvml_find(nvml, "nvmlDeviceGetHandleByUUID", &call))
            code = call.by_uuid(uuid, &nvml->device);
    } else if (dtrain__nvml_find(nvml, "nvmlDeviceGetHandleByIndex_v2", &call))
        code = call.by_index((unsigned)info.local_rank, &nvml->device);
    if (code == DTRAIN__NVML_OK) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "NVML does not know this rank's GPU (its error %d)", code);
}

/* Ask all questions, if it is time to, and hand the answers to the trainer, whose next step sends
 * them to all ranks. A lost GPU is a reason not to ask again. */
DTRAIN__PRIVATE void dtrain__nvml_sample(dtrain_metrics *metrics)
{
    dtrain__nvml *nvml = &metrics->nvml;
    const double now = dtrain_seconds();
    if (!nvml->device || nvml->reason[0] || now < nvml->ask_at) return;
    nvml->ask_at = now + 1e-3 * metrics->desc.gpu_every_ms;
    dtrain__nvml_forget(nvml);
    for (size_t i = 0; i < sizeof dtrain__nvml_questions / sizeof *dtrain__nvml_questions; i++) {
        const dtrain__nvml_question *q = &dtrain__nvml_questions[i];
        dtrain__nvml_call call;
        uint64_t answer[3] = {0, 0, 0}, number = 0;
        if (!dtrain__nvml_find(nvml, q->function, &call)) continue;
        const int code = q->arguments == 0   ? call.get(nvml->device, answer)
                         : q->arguments == 1 ? call.get_one(nvml->device, q->which, answer)
                                             : call.get_errors(nvml->device, q->which, 0, answer);
        memcpy(&number, (const char *)answer + q->at, q->bytes);
        if (code == DTRAIN__NVML_OK)
            nvml->figures[(int)q->figure - (int)DTRAIN_FIGURE_GPU_UTILIZATION] =
                (float)(q->scale * (double)number);
        if (code != DTRAIN__NVML_GPU_IS_LOST || nvml->reason[0]) continue;
        snprintf(nvml->reason, sizeof nvml->reason, "NVML says that the GPU is lost");
        dtrain_log(metrics->world, DTRAIN_LOG_WARNING, "the GPU of rank %d is lost, says NVML",
                   dtrain_world_rank(metrics->world));
    }
    if (metrics->desc.trainer)
        memcpy(dtrain__trainer_seen(metrics->desc.trainer)->gpu, nvml->figures,
               sizeof nvml->figures);
}

DTRAIN__PRIVATE void dtrain__nvml_close(dtrain_metrics *metrics)
{
    dtrain__nvml *nvml = &metrics->nvml;
    dtrain__nvml_call call;
    if (nvml->started && dtrain__nvml_find(nvml, "nvmlShutdown", &call)) (void)call.plain();
    if (nvml->library) dlclose(nvml->library);
    memset(nvml, 0, sizeof *nvml);
}
