/* Settings: zeros become defaults, and fields that contradict each other are refused
 *
 * If a kind cannot honour a field, the error names both; nothing is downgraded silently. Fields are
 * checked one by one before ranks compare them, and together after AUTO has chosen a kind. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "device/device_internal.h"

/* ---- Fields one by one ------------------------------------------------------------------------*/

static bool dtrain__is_float_dtype(uint32_t dtype)
{
    return dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16;
}

static bool dtrain__is_share(float x) { return x > 0 && x <= 1; } /* false for NaN */

static dtrain_result dtrain__check_fields(const dtrain_strategy_desc *desc,
                                          const dtrain_compression_desc *how)
{
    const char *const call = "dtrain_strategy_create";
    const bool topk = how->kind == DTRAIN_COMPRESSION_TOPK;
    const bool momentum = how->topk_momentum >= 0 && how->topk_momentum < 1;
    const bool rises = !dtrain__is_share(how->warmup_ratio) || how->warmup_ratio < how->topk_ratio;
    const dtrain__bound bounds[] = {
        {desc->kind > DTRAIN_STRATEGY_AUTO, "kind", (double)desc->kind, "a dtrain_strategy_kind"},
        {desc->missing_gradient > DTRAIN_MISSING_GRADIENT_ZERO, "missing_gradient",
         (double)desc->missing_gradient, "a dtrain_missing_gradient"},
        {desc->accumulation > DTRAIN_ACCUMULATION_SHARD_EVERY, "accumulation",
         (double)desc->accumulation, "a dtrain_accumulation"},
        {desc->offload >= 2 * DTRAIN_OFFLOAD_PARAMS, "offload", (double)desc->offload,
         "a sum of DTRAIN_OFFLOAD_*"},
        {desc->group_count && !desc->group_states, "group_count", (double)desc->group_count,
         "0, for group_states is NULL"},
        {how->kind > DTRAIN_COMPRESSION_TOPK, "compression", (double)how->kind,
         "a dtrain_compression"},
        {topk && !dtrain__is_share(how->topk_ratio), "topk_ratio", (double)how->topk_ratio,
         "a share above 0, at most 1"},
        {topk && how->warmup_steps && rises, "warmup_ratio", (double)how->warmup_ratio,
         "at most 1, and a warm-up begins at topk_ratio or above"},
        {topk && !momentum, "topk_momentum", (double)how->topk_momentum, "0 (off) or below 1"},
        {!topk && how->topk_momentum != 0, "topk_momentum", (double)how->topk_momentum,
         "0: the kind of compression is not DTRAIN_COMPRESSION_TOPK"},
        {!topk && how->warmup_steps, "warmup_steps", (double)how->warmup_steps,
         "0: the kind of compression is not DTRAIN_COMPRESSION_TOPK"},
        {!how->kind && !how->hook && how->no_error_feedback, "no_error_feedback", 1,
         "false: there is no compression"},
        {how->kind && how->hook, "compression", (double)how->kind,
         "0, for hook is set, or no hook"},
        {how->hook && how->hook->rounds - 1 >= DTRAIN_HOOK_ROUNDS, "hook->rounds",
         how->hook ? (double)how->hook->rounds : 0, "1 or 2"},
        {how->dense_below < 0, "dense_below", (double)how->dense_below, "a number of elements"},
    };
    DTRAIN__TRY(dtrain__check_bounds(call, bounds, sizeof bounds / sizeof bounds[0]));
    if (how->hook && (!how->hook->name || !how->hook->plan || !how->hook->compress ||
                      !how->hook->exchange || !how->hook->decompress))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: name, plan, compress, exchange or decompress of the hook is NULL",
                           call);
    if (dtrain__is_float_dtype(desc->param_dtype) && dtrain__is_float_dtype(desc->reduce_dtype))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: param_dtype is %s and reduce_dtype %s; expected f32, bf16 or f16", call,
                       dtrain_dtype_name((dtrain_dtype)desc->param_dtype),
                       dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype));
}

/* ---- Defaults ---------------------------------------------------------------------------------*/

static uint32_t dtrain__or(uint32_t value, uint32_t usual) { return value ? value : usual; }

/* Copy the program's desc and its compression into this library's structs. */
DTRAIN__PRIVATE dtrain_result dtrain__take_strategy(const dtrain_world *world,
                                                    const dtrain_strategy_desc *given,
                                                    dtrain_strategy_desc *desc,
                                                    dtrain_compression_desc *how)
{
    const dtrain_abi *abi = dtrain__abi_of(world);
    DTRAIN__TRY(dtrain__take(abi, DTRAIN__ABI_strategy_desc, given, desc));
    DTRAIN__TRY(dtrain__take(abi, DTRAIN__ABI_compression_desc, desc->compression, how));
    if (desc->compression) desc->compression = how;
    return DTRAIN_OK;
}

/* Copy the given desc (NULL: a zeroed one) to *desc, fill in defaults and check its fields one by
 * one. *how receives a copy of its compression, and must exist as long as *desc. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_desc(const dtrain_strategy_desc *given,
                                                   dtrain_strategy_desc *desc,
                                                   dtrain_compression_desc *how)
{
    memset(desc, 0, sizeof *desc);
    memset(how, 0, sizeof *how);
    if (given) *desc = *given;
    desc->kind = dtrain__or(desc->kind, DTRAIN_STRATEGY_DDP);
    desc->optimizer_states = dtrain__or(desc->optimizer_states, 2);
    if (!desc->bucket_bytes) desc->bucket_bytes = DTRAIN__BUCKET_BYTES;
    if (desc->compression) *how = *desc->compression;
    if (how->topk_ratio == 0) how->topk_ratio = 0.01f;
    if (how->warmup_ratio == 0) how->warmup_ratio = 0.25f;
    if (!how->dense_below) how->dense_below = 1024;
    if (!how->dense_steps) how->dense_steps = 10;
    desc->compression = how->kind || how->hook ? how : NULL;
    return dtrain__check_fields(desc, how);
}

/* ---- Fields together --------------------------------------------------------------------------*/

/* Fill in the default of accumulation, which depends on the kind, and refuse fields that contradict
 * the kind or each other. %s in a sentence is the kind's name. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_kind(dtrain_strategy_desc *desc,
                                                   const dtrain__kind_row *kind)
{
    const dtrain_mesh_info mesh = dtrain__mesh_info(desc->mesh);
    if (!desc->accumulation)
        desc->accumulation = kind->replicas       ? DTRAIN_ACCUMULATION_SHARD_EVERY
                             : kind->shards.grads ? DTRAIN_ACCUMULATION_EVERY
                                                  : DTRAIN_ACCUMULATION_LAST;
    const dtrain_compression_desc *how = desc->compression;
    const dtrain__classes *shards = &kind->shards;
    const bool last = desc->accumulation == DTRAIN_ACCUMULATION_LAST;
    const bool every = desc->accumulation == DTRAIN_ACCUMULATION_EVERY;
    const dtrain_comm_hook_desc *hook = how ? dtrain__hook_of(how) : NULL;
    const bool host_grads = (desc->offload & DTRAIN_OFFLOAD_GRADS) != 0;
    const bool host_params = (desc->offload & DTRAIN_OFFLOAD_PARAMS) != 0;
    const struct {
        bool wrong;
        const char *why;
    } rules[] = {
        {mesh.pipeline > 1 && shards->grads,
         "on a mesh with a pipeline axis units of several micro-batches are under way at once, and "
         "%s gathers or reduces them one after the other; use DTRAIN_STRATEGY_DDP or "
         "DTRAIN_STRATEGY_ZERO1"},
        {every && !shards->grads,
         "DTRAIN_ACCUMULATION_EVERY: %s keeps whole gradients, so reducing them in every "
         "micro-batch would cost time and save no memory; use DTRAIN_ACCUMULATION_LAST, or "
         "DTRAIN_STRATEGY_SHARD_GRAD_OP"},
        {desc->accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY && !kind->replicas,
         "DTRAIN_ACCUMULATION_SHARD_EVERY needs two levels of ranks, which %s does not have; use "
         "DTRAIN_STRATEGY_HYBRID_SHARD"},
        {desc->param_dtype != DTRAIN_DTYPE_F32 && !shards->params,
         "param_dtype: %s keeps parameters whole, in fp32; autocast of the tape rounds them where "
         "they are used"},
        {how && shards->state,
         "compression: %s reduces gradients to shards, and what one rank selects of them is not "
         "what another needs; use DTRAIN_STRATEGY_DDP, or reduce_dtype"},
        {how && how->topk_momentum > 0 && how->no_error_feedback,
         "topk_momentum gathers velocity in the residual, and no_error_feedback is set"},
        {hook && ((desc->hierarchical && !hook->takes_slices) ||
                  (desc->reduce_dtype != DTRAIN_DTYPE_F32 && !hook->takes_low)),
         "hierarchical cuts parameters and reduce_dtype rounds, and a hook that does not say that "
         "it takes slices or rounds by itself takes whole tensors in fp32: use "
         "DTRAIN_COMPRESSION_TOPK with them"},
        {desc->hierarchical && (kind->owners || kind->replicas),
         "hierarchical: %s sends whole tensors to their owners (zero3), or goes node by node by "
         "itself (hybrid_shard); leave it out"},
        {desc->node_size && !kind->replicas && !desc->hierarchical,
         "node_size means something to DTRAIN_STRATEGY_HYBRID_SHARD and to hierarchical only, not "
         "to %s"},
        {desc->keep_after_forward && !shards->params,
         "keep_after_forward is set, but %s never shards parameters"},
        {desc->offload && !(desc->offload & DTRAIN_OFFLOAD_OPTIMIZER),
         "offload has DTRAIN_OFFLOAD_GRADS or DTRAIN_OFFLOAD_PARAMS without "
         "DTRAIN_OFFLOAD_OPTIMIZER: what is in host memory is updated there; add it"},
        {host_params && !shards->params,
         "DTRAIN_OFFLOAD_PARAMS: %s needs whole parameters on the device; use "
         "DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_ZERO3 or DTRAIN_STRATEGY_HYBRID_SHARD"},
        {host_grads && (!shards->grads || last),
         "DTRAIN_OFFLOAD_GRADS: %s, or DTRAIN_ACCUMULATION_LAST, keeps whole gradients on the "
         "device; use DTRAIN_STRATEGY_SHARD_GRAD_OP or a kind below it, and "
         "DTRAIN_ACCUMULATION_EVERY"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        char why[400];
        if (!rules[i].wrong) continue;
        snprintf(why, sizeof why, rules[i].why, kind->name);
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "dtrain_strategy_create: %s", why);
    }
    return DTRAIN_OK;
}

/* ---- Compare across ranks ---------------------------------------------------------------------*/

/* The settings that ranks compare: descs, and values computed from them. */
typedef struct dtrain__compared {
    dtrain_strategy_desc desc;
    dtrain_compression_desc how;
    dtrain_pipeline_desc pipeline;
    dtrain__groups groups;
    int data;
    bool ahead;
    uint64_t units;
    uint32_t rounds;
    const char *kind, *param_dtype, *reduce_dtype, *compression;
} dtrain__compared;

#define DTRAIN__OF(field, type) DTRAIN__SAME(dtrain__compared, field, type)
#define DTRAIN__DESC(field, type) DTRAIN__SAME_AS(dtrain__compared, desc.field, #field, type)
#define DTRAIN__HOW(field, type) DTRAIN__SAME_AS(dtrain__compared, how.field, #field, type)
#define DTRAIN__AXIS(field, name, type) \
    DTRAIN__SAME_AS(dtrain__compared, field, "a mesh of " name, type)

/* clang-format off */
static const dtrain__same_field dtrain__compared_fields[] = {
    DTRAIN__AXIS(groups.tensor_ranks, "tensor", INT), DTRAIN__AXIS(data, "data", INT),
    DTRAIN__AXIS(groups.pipeline_ranks, "pipeline", INT),
    DTRAIN__AXIS(groups.sequence_parallel, "sequence_parallel", BOOL),
    DTRAIN__OF(pipeline.kind, UINT), DTRAIN__OF(pipeline.chunks, UINT),
    DTRAIN__SAME_AS(dtrain__compared, units, "pipeline.units", HASH), DTRAIN__OF(kind, TEXT),
    DTRAIN__DESC(missing_gradient, UINT), DTRAIN__DESC(accumulation, UINT),
    DTRAIN__OF(param_dtype, TEXT), DTRAIN__OF(reduce_dtype, TEXT),
    DTRAIN__DESC(offload, FLAGS), DTRAIN__DESC(hierarchical, BOOL), DTRAIN__DESC(node_size, UINT),
    DTRAIN__DESC(keep_after_forward, BOOL), DTRAIN__DESC(bucket_bytes, UINT),
    DTRAIN__DESC(init_seed, UINT),
    DTRAIN__SAME_AS(dtrain__compared, ahead, "overlap (no_overlap is false)", BOOL),
    DTRAIN__OF(compression, TEXT),
    DTRAIN__SAME_AS(dtrain__compared, rounds, "hook->rounds", UINT),
    DTRAIN__HOW(no_error_feedback, BOOL), DTRAIN__HOW(topk_ratio, FLOAT),
    DTRAIN__HOW(topk_momentum, FLOAT),
    DTRAIN__HOW(warmup_ratio, FLOAT), DTRAIN__HOW(dense_below, INT), DTRAIN__HOW(dense_steps, UINT),
    DTRAIN__HOW(warmup_steps, UINT)};
/* clang-format on */

static void dtrain__compared_fill(dtrain__compared *own, const dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const dtrain__kind_row *kind = dtrain__row_of(desc->kind);
    const dtrain_comm_hook_desc *hook =
        desc->compression ? dtrain__hook_of(&strategy->compression) : NULL;
    own->desc = *desc;
    own->how = strategy->compression;
    own->groups = strategy->groups;
    own->data = dtrain_comm_size(strategy->groups.data);
    if (desc->pipeline) own->pipeline = *desc->pipeline;
    own->pipeline.chunks = (uint32_t)strategy->stages.chunks;
    const size_t listed = own->pipeline.units ? (size_t)strategy->stages.stages : 0;
    own->units = dtrain__fnv1a(DTRAIN__FNV_BASIS, own->pipeline.units, listed * sizeof(uint32_t));
    own->ahead = (!kind || kind->shards.params) && !desc->no_overlap;
    own->kind = kind ? kind->name : "auto";
    own->param_dtype = dtrain_dtype_name((dtrain_dtype)desc->param_dtype);
    own->reduce_dtype = dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype);
    own->compression = hook ? hook->name : "none";
    own->rounds = hook ? hook->rounds : 0;
}

/* Send an error of this rank to all ranks. Without an error, fail on all ranks if parameters or
 * settings differ. A setting is compared if it decides the collectives of a step, their order, or
 * the initial values. Ranks can differ in who owns the memory of gradients. They can
 * differ in no_overlap if no unit is gathered; else it changes the order, because a prefetched unit
 * is gathered before the gradients of the unit after it are reduced. */
DTRAIN__PRIVATE dtrain_result dtrain__compare_settings(const dtrain_strategy *strategy,
                                                       const dtrain__groups *groups,
                                                       dtrain_result mine)
{
    dtrain__compared own;
    dtrain__same_list lists[2];
    memset(&own, 0, sizeof own);
    memset(lists, 0, sizeof lists);
    if (mine == DTRAIN_OK) {
        dtrain__compared_fill(&own, strategy);
        lists[0] = DTRAIN__SAME_STRUCT(dtrain__compared_fields, &own);
        lists[1] = dtrain__same_params(strategy);
    }
    return dtrain__same(groups->all, mine, "dtrain_strategy_create", lists, 2);
}

/* Refuse a mesh without a world or of another world, and a comm that is not its data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__mesh_fits(const dtrain_world *world,
                                                const dtrain_strategy_desc *desc)
{
    const char *const call = "dtrain_strategy_create";
    dtrain_comm *data = dtrain_mesh_comm(desc->mesh, DTRAIN_AXIS_DATA);
    if (!data || data->world != world)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: the mesh of the desc was made %s, and a strategy's is made with its "
            "world; create it by dtrain_mesh_create(world, ...)",
            call, data ? "in another world" : "without a world, for plans");
    if (!desc->comm || desc->comm == data) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "%s: the desc has a comm of %d ranks and a mesh whose data axis has %d; with "
        "a mesh leave comm NULL",
        call, dtrain_comm_size(desc->comm), dtrain_comm_size(data));
}

/* Refuse settings that parameters in fp64 do not support. */
DTRAIN__PRIVATE dtrain_result dtrain__check_wide(const dtrain_param *params, size_t count,
                                                 const dtrain_strategy_desc *desc)
{
    const char *what = desc->compression                        ? "compression"
                       : desc->offload                          ? "offload"
                       : desc->mesh                             ? "mesh"
                       : desc->param_dtype != DTRAIN_DTYPE_F32  ? "param_dtype"
                       : desc->reduce_dtype != DTRAIN_DTYPE_F32 ? "reduce_dtype"
                                                                : NULL;
    if (dtrain__sums_dtype(params, count) != DTRAIN_DTYPE_F64 || !what) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_strategy_create: the parameters are fp64, which has no %s: leave it "
                       "0, or make the parameters fp32, bf16 or fp16",
                       what);
}

/* Refuse arrays that the device cannot read, and values of sharded parameters in host arrays. */
DTRAIN__PRIVATE dtrain_result dtrain__check_layout(const dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const bool apart = strategy->device->ops->stream_create != NULL; /* separate device memory */
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (apart && ((p->typed_value && dtrain__on_host(strategy->device, p->typed_value)) ||
                      (p->typed_grad && dtrain__on_host(strategy->device, p->typed_grad))))
            return dtrain__param_fail(p, i,
                                      "typed_value or typed_grad is host memory, which the %s "
                                      "device cannot convert; give device memory, or NULL",
                                      strategy->device->ops->name);
        if (!layout->shards.params) continue;
        if (dtrain__host_value(p) && dtrain__shard_bucket(layout, i))
            return dtrain__param_fail(p, i,
                                      "its value is the host's, but %s shards parameters and has "
                                      "to own them: leave value NULL and give it an init",
                                      strategy->kind->name);
    }
    return DTRAIN_OK;
}
