/* Calls of device and communicator that several files make, and permanent errors */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "device/device_internal.h"

/* ---- Calls ------------------------------------------------------------------------------------*/

/* Name a bucket and its first parameter in the record of the next collective. */
DTRAIN__PRIVATE void dtrain__label(const dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                   const char *part)
{
    dtrain__call_label(strategy->world, part, bucket - strategy->layout.buckets,
                       strategy->params[bucket->first_param].name);
}

DTRAIN__PRIVATE dtrain_result dtrain__convert(dtrain_strategy *strategy, int64_t count,
                                              const void *x, uint32_t x_dtype, void *y,
                                              uint32_t y_dtype)
{
    dtrain_convert_args args = {count, x, y, (dtrain_dtype)x_dtype, (dtrain_dtype)y_dtype};
    if (count == 0) return DTRAIN_OK;
    if (x_dtype == y_dtype) /* x or y can be in host memory */
        return dtrain_device_copy(strategy->device, y, x,
                                  (size_t)count * dtrain_dtype_bytes((dtrain_dtype)x_dtype));
    return strategy->device->ops->convert(strategy->device, &args);
}

/* Wait for all handles, also after an error: every handle must be freed, and waiting on a failed
 * communicator returns at once. */
DTRAIN__PRIVATE dtrain_result dtrain__wait_works(const dtrain_strategy *strategy,
                                                 dtrain_work **works)
{
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->works_per_bucket; i++) {
        const dtrain_result one = dtrain_work_wait(works[i]);
        works[i] = NULL;
        if (result == DTRAIN_OK) result = one;
    }
    return result;
}

/* ---- When a call is allowed -------------------------------------------------------------------*/

DTRAIN__PRIVATE const char *dtrain__unrecordable(const dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const dtrain_comm *all = strategy->groups.all;
    if (desc->offload) return "everything on the device: an offloaded update runs on the host";
    if (desc->compression) return "no compression: its first steps are not like the later ones";
    if (desc->missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR)
        return "another missing_gradient: DTRAIN_MISSING_GRADIENT_ERROR asks all ranks in every "
               "step";
    if (all->size > 1 && strcmp(all->ops->name, "nccl") != 0)
        return "collectives on the device (dtrain_nccl.h): those here go through the host";
    return NULL;
}

/* Refuse a call in a graph that the host captures if the step cannot be part of a graph. Nothing
 * has been started yet, and the strategy stays usable. */
static dtrain_result dtrain__check_capture(const dtrain_strategy *strategy, const char *call)
{
    dtrain_device *device = strategy->device;
    if (strategy->notes.device_weight || !dtrain__capturing(device)) return DTRAIN_OK;
    const char *missing = dtrain__unrecordable(strategy);
    if (!strategy->notes.sync_count) missing = "a whole step before it, which allocates memory";
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const void *value = dtrain__host_value(p), *grad = dtrain__host_grad(p);
        if ((value && dtrain__on_host(device, value)) || (grad && dtrain__on_host(device, grad)))
            missing = "parameters and gradients in device memory";
    }
    if (!missing) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: a captured graph needs %s", call, missing);
}

DTRAIN__PRIVATE dtrain_result dtrain__strategy_usable(const dtrain_strategy *strategy,
                                                      const char *call)
{
    DTRAIN__GIVEN(call, strategy);
    if (strategy->failure != DTRAIN_OK)
        return dtrain_fail(strategy->failure, "%s", strategy->failure_text);
    if (!strategy->notes.failed_load) return dtrain__check_capture(strategy, call);
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: %s failed after it had replaced a part of the values; load a whole "
                       "checkpoint, or end",
                       call, strategy->notes.failed_load);
}

/* True if this rank is between the first gather or mark of a backward and finish. */
DTRAIN__PRIVATE bool dtrain__in_backward(const dtrain_strategy *strategy)
{
    return strategy->marked_count || strategy->backward != DTRAIN__NONE;
}

/* Check that no backward is under way: each rank starts its collectives at a different time, and
 * other collectives would come in between. */
DTRAIN__PRIVATE dtrain_result dtrain__between_backwards(const dtrain_strategy *strategy,
                                                        const char *call)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (!dtrain__in_backward(strategy)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: a backward is under way; call dtrain_strategy_finish before", call);
}

/* Check that no step is half done: gradients are the mean of a whole step, or there are none. */
DTRAIN__PRIVATE dtrain_result dtrain__between_steps(const dtrain_strategy *strategy,
                                                    const char *call)
{
    DTRAIN__TRY(dtrain__between_backwards(strategy, call));
    if (!strategy->accumulated) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: this step has further micro-batches, says dtrain_strategy_accumulate; "
                       "call it after the last one's dtrain_strategy_finish",
                       call);
}

/* ---- Failure ----------------------------------------------------------------------------------*/

/* Fail all communicators on which other ranks can wait, also of a mesh. Return the permanent
 * error. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_fail(dtrain_strategy *strategy, dtrain_result code,
                                                    const char *text)
{
    char kept[DTRAIN__ERROR_BYTES];
    snprintf(kept, sizeof kept, "%s", text);
    for (size_t i = 0; i < strategy->owned_count; i++)
        if (strategy->owned[i]) strategy->owned[i]->ops->fail(strategy->owned[i], code, kept);
    const dtrain__groups *groups = &strategy->groups;
    for (size_t i = 0; i < strategy->param_count && strategy->ties; i++)
        if (strategy->ties[i]) strategy->ties[i]->ops->fail(strategy->ties[i], code, kept);
    dtrain_comm *const others[] = {groups->tensor, groups->pipeline, groups->model, groups->all};
    for (int i = 0; i < 4; i++)
        if (others[i] && others[i] != groups->data) others[i]->ops->fail(others[i], code, kept);
    return groups->data->ops->fail(groups->data, code, kept);
}

/* Make an error permanent: communicator and device do not recover, and only some gradients are
 * averaged. Fail the communicators with it, because other ranks wait for this one. If the error
 * came from a communicator, its fail returns that error. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_keep(dtrain_strategy *strategy, dtrain_result result)
{
    if (result == DTRAIN_OK || strategy->failure != DTRAIN_OK) return result;
    strategy->failure = dtrain__strategy_fail(strategy, result, dtrain_last_error());
    snprintf(strategy->failure_text, sizeof strategy->failure_text, "%s",
             dtrain__bare(dtrain_last_error()));
    return strategy->failure;
}
