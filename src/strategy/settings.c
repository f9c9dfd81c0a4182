/* Settings. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"

static bool dtrain__is_float_dtype(uint32_t dtype)
{
    return dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16;
}

/* Fields that stand by themselves. */
static dtrain_result dtrain__check_fields(const dtrain_strategy_desc *desc)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->missing_gradient > DTRAIN_MISSING_GRADIENT_ERROR)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_missing_gradient", call,
                           (unsigned)desc->missing_gradient);
    if (desc->accumulation > DTRAIN_ACCUMULATION_SHARD_EVERY)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_accumulation", call,
                           (unsigned)desc->accumulation);
    if (!dtrain__is_float_dtype(desc->param_dtype) || !dtrain__is_float_dtype(desc->reduce_dtype))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: param_dtype is %s and reduce_dtype %s; expected f32, bf16 or f16",
                           call, dtrain_dtype_name((dtrain_dtype)desc->param_dtype),
                           dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype));
    if (desc->kept_unit_count && !desc->kept_units)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: kept_unit_count is %u, kept_units is NULL",
                           call, desc->kept_unit_count);
    if (desc->whole_below < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: whole_below is %lld", call,
                           (long long)desc->whole_below);
    if (desc->offload >= 2 * DTRAIN_OFFLOAD_PARAMS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: offload 0x%x has bits that mean nothing",
                           call, (unsigned)desc->offload);
    if (desc->kind > DTRAIN_STRATEGY_AUTO)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: %u is not a dtrain_strategy_kind; DTRAIN_STRATEGY_DDP is %u", call,
                           (unsigned)desc->kind, (unsigned)DTRAIN_STRATEGY_DDP);
    return dtrain__check_compression(desc);
}

/* What is left to the default, in a desc whose kind is known. */
DTRAIN__PRIVATE void dtrain__resolve_accumulation(dtrain_strategy_desc *desc,
                                                  const dtrain__traits *traits)
{
    if (desc->accumulation) return;
    if (!traits->grads) desc->accumulation = DTRAIN_ACCUMULATION_LAST;
    else if (traits->kind == DTRAIN_STRATEGY_HYBRID_SHARD)
        desc->accumulation = DTRAIN_ACCUMULATION_SHARD_EVERY;
    else desc->accumulation = DTRAIN_ACCUMULATION_EVERY;
}

/* What is in host memory is updated there, whatever the kind. */
static dtrain_result dtrain__check_classes(const dtrain_strategy_desc *desc)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->offload && !(desc->offload & DTRAIN_OFFLOAD_OPTIMIZER))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: offload has DTRAIN_OFFLOAD_GRADS or DTRAIN_OFFLOAD_PARAMS without "
                           "DTRAIN_OFFLOAD_OPTIMIZER: what is in host memory is updated there; add "
                           "it",
                           call);
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_offload(const dtrain_strategy_desc *desc,
                                           const dtrain__traits *traits)
{
    const char *const call = "dtrain_strategy_create";
    DTRAIN__TRY(dtrain__check_classes(desc));
    if ((desc->offload & DTRAIN_OFFLOAD_PARAMS) && !traits->params)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: DTRAIN_OFFLOAD_PARAMS: %s needs whole parameters on the device; use "
            "DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_ZERO3 or DTRAIN_STRATEGY_HYBRID_SHARD",
            call, traits->name);
    if (!(desc->offload & DTRAIN_OFFLOAD_GRADS)) return DTRAIN_OK;
    if (!traits->grads)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: DTRAIN_OFFLOAD_GRADS: %s keeps whole gradients on the device; use "
                           "DTRAIN_STRATEGY_SHARD_GRAD_OP or a kind below it",
                           call, traits->name);
    if (desc->accumulation == DTRAIN_ACCUMULATION_LAST)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: DTRAIN_OFFLOAD_GRADS: DTRAIN_ACCUMULATION_LAST keeps whole gradients "
            "on the device; use DTRAIN_ACCUMULATION_EVERY",
            call);
    return DTRAIN_OK;
}

/* Fields that not every kind can honour: a clear error, never a silent downgrade. */
DTRAIN__PRIVATE dtrain_result dtrain__check_combination(const dtrain_strategy_desc *desc,
                                                        const dtrain__traits *traits)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->accumulation == DTRAIN_ACCUMULATION_EVERY && traits->state && !traits->grads)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: %s keeps whole gradients, so reducing them in every micro-batch "
                           "would cost time and save no memory; use DTRAIN_ACCUMULATION_LAST, or "
                           "DTRAIN_STRATEGY_SHARD_GRAD_OP",
                           call, traits->name);
    if (desc->accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY &&
        traits->kind != DTRAIN_STRATEGY_HYBRID_SHARD)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: DTRAIN_ACCUMULATION_SHARD_EVERY needs two levels of ranks, which %s "
            "does not have; use DTRAIN_STRATEGY_HYBRID_SHARD",
            call, traits->name);
    if (desc->param_dtype != DTRAIN_DTYPE_F32 && !traits->params)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: param_dtype %s: %s keeps parameters whole, in fp32; autocast of "
                           "the tape rounds them where they are used",
                           call, dtrain_dtype_name((dtrain_dtype)desc->param_dtype), traits->name);
    if (desc->compression && traits->state)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: compression: %s reduces gradients to shards, and what one rank "
                           "selects of them is not what another needs; use DTRAIN_STRATEGY_DDP, or "
                           "reduce_dtype",
                           call, traits->name);
    if (desc->compression && desc->accumulation == DTRAIN_ACCUMULATION_EVERY)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: compression sends what micro-batches have added up; with "
                           "DTRAIN_ACCUMULATION_EVERY it would send the same again and again; use "
                           "DTRAIN_ACCUMULATION_LAST",
                           call);
    if (desc->hierarchical && (traits->owners || traits->kind == DTRAIN_STRATEGY_HYBRID_SHARD))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: hierarchical: %s", call,
                           traits->owners
                               ? "DTRAIN_STRATEGY_ZERO3 sends whole tensors to their owners, "
                                 "wherever they are; use DTRAIN_STRATEGY_FULL_SHARD"
                               : "DTRAIN_STRATEGY_HYBRID_SHARD goes node by node by itself; "
                                 "leave it out");
    if (desc->node_size && traits->kind != DTRAIN_STRATEGY_HYBRID_SHARD && !desc->hierarchical)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: node_size is %u, which means something to DTRAIN_STRATEGY_HYBRID_SHARD and "
            "to hierarchical only, not to %s",
            call, desc->node_size, traits->name);
    if ((desc->keep_after_forward || desc->kept_unit_count) && !traits->params)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: keep_after_forward or kept_units is set, but %s "
                           "never shards parameters",
                           call, traits->name);
    if (desc->whole_below && !traits->state)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: whole_below is %lld, but %s shards nothing", call,
                           (long long)desc->whole_below, traits->name);
    return dtrain__check_offload(desc, traits);
}

static uint32_t dtrain__or(uint32_t value, uint32_t usual) { return value ? value : usual; }

/* Zeros become defaults; *compression is memory for a copy of the desc's. */
static void dtrain__resolve_zeros(dtrain_strategy_desc *desc, dtrain_compression_desc *compression)
{
    desc->kind = dtrain__or(desc->kind, DTRAIN_STRATEGY_DDP);
    desc->param_dtype = dtrain__or(desc->param_dtype, DTRAIN_DTYPE_F32);
    desc->reduce_dtype = dtrain__or(desc->reduce_dtype, DTRAIN_DTYPE_F32);
    desc->optimizer_states = dtrain__or(desc->optimizer_states, 2);
    if (!desc->bucket_bytes) desc->bucket_bytes = DTRAIN__BUCKET_BYTES;
    if (!desc->first_bucket_bytes)
        desc->first_bucket_bytes = desc->bucket_bytes < DTRAIN__FIRST_BUCKET_BYTES
                                       ? desc->bucket_bytes
                                       : DTRAIN__FIRST_BUCKET_BYTES;
    if (!desc->compression) return;
    *compression = *desc->compression;
    desc->compression = compression;
    compression->powersgd_rank = dtrain__or(compression->powersgd_rank, 1);
    if (compression->topk_ratio == 0) compression->topk_ratio = 0.01f;
    if (compression->warmup_ratio == 0) compression->warmup_ratio = 0.25f;
    if (!compression->dense_below) compression->dense_below = 1024;
    if (!compression->dense_steps) compression->dense_steps = 10;
}

/* *desc = the desc that was given (NULL: a zeroed one), its defaults filled in and its fields
 * checked one by one. *compression must live as long as *desc. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_desc(const dtrain_strategy_desc *given,
                                                   dtrain_strategy_desc *desc,
                                                   dtrain_compression_desc *compression)
{
    memset(desc, 0, sizeof *desc);
    if (given) *desc = *given;
    dtrain__resolve_zeros(desc, compression);
    DTRAIN__TRY(dtrain__check_fields(desc));
    if (desc->compression && !desc->compression->kind) desc->compression = NULL;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__strategy_resolve(dtrain_strategy *strategy,
                                                       const dtrain_strategy_desc *given)
{
    DTRAIN__TRY(dtrain__resolve_desc(given, &strategy->desc, &strategy->compression));
    strategy->desc.comm = strategy->comm;
    if (strategy->desc.offload && strategy->device->ops->host_memory)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_strategy_create: offload is 0x%x, but the memory of the %s "
                           "device is the host's: what a GPU would be relieved of is on the CPU "
                           "already; use 0",
                           (unsigned)strategy->desc.offload, strategy->device->ops->name);
    return dtrain__check_classes(&strategy->desc);
}

/* Settings that decide which collectives a step makes and in which order, or what values it starts
 * from. Ranks may differ in who owns the gradients, and in no_overlap where nothing is gathered: a
 * unit that is fetched ahead comes before the gradients of the one after it. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_compare(dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const dtrain__traits *traits = dtrain__traits_of(desc->kind);
    const size_t kept_bytes = (size_t)desc->kept_unit_count * sizeof *desc->kept_units;
    dtrain_compression_desc how;
    const bool ahead = (!traits || traits->params) && !desc->no_overlap;
    static const char *const methods[] = {"none", "top-k", "PowerSGD"};
    dtrain__registration mine;
    memset(&how, 0, sizeof how);
    if (desc->compression) how = *desc->compression;
    memset(&mine, 0, sizeof mine);
    mine.params = strategy->params;
    mine.count = strategy->param_count;
    snprintf(
        mine.settings, sizeof mine.settings,
        "kind %s, missing_gradient %u, accumulation %u, param_dtype %s, reduce_dtype %s, "
        "offload %u, node_size %u, keep_after_forward %d, kept units %08x, whole_below "
        "%lld, buckets of %zu and %zu bytes, init_seed %llu, fetches ahead %d, compression %s, "
        "sparse_exchange %u, powersgd_rank %u, hierarchical %d, no_error_feedback %d, "
        "topk_ratio %.9g, topk_momentum %.9g, warmup_ratio %.9g, dense_below %lld, dense_steps "
        "%llu, warmup_steps %llu",
        traits ? traits->name : "auto", (unsigned)desc->missing_gradient,
        (unsigned)desc->accumulation, dtrain_dtype_name((dtrain_dtype)desc->param_dtype),
        dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype), (unsigned)desc->offload,
        (unsigned)desc->node_size, desc->keep_after_forward,
        (unsigned)dtrain__fnv1a(DTRAIN__FNV_BASIS, desc->kept_units, kept_bytes),
        (long long)desc->whole_below, desc->first_bucket_bytes, desc->bucket_bytes,
        (unsigned long long)desc->init_seed, ahead, methods[how.kind],
        (unsigned)how.sparse_exchange, (unsigned)how.powersgd_rank, desc->hierarchical,
        how.no_error_feedback, (double)how.topk_ratio, (double)how.topk_momentum,
        (double)how.warmup_ratio, (long long)how.dense_below, (unsigned long long)how.dense_steps,
        (unsigned long long)how.warmup_steps);
    return dtrain__registration_compare(strategy->comm, &mine, strategy->gathered);
}
