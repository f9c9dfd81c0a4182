/* Parameter groups: defaults, membership, checks
 *
 * The desc of an optimizer is group 0, and its groups are 1, 2, ...; a parameter names its group.
 * An optimizer lists its tensors group by group, so that each group is one call of its kernel:
 *
 *     shards    wte (0)   qkv (1)   bias (0)   proj (1)
 *     tensors   wte       bias    | qkv        proj           groups[0]: 0, 2    groups[1]: 2, 2 */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/query.h"
#include "strategy/strategy.h"
#include "strategy/core_view_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"

/* ---- Defaults ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_optimizer_desc dtrain_optimizer_defaults(dtrain_optimizer_kind kind)
{
    static const dtrain_optimizer_desc kinds[] = {
        /* kind, betas, epsilon, weight_decay, momentum, nesterov, variance_steps, lr_scale */
        {DTRAIN_OPTIMIZER_ADAMW, 0.9f, 0.999f, 1e-8f, 0.01f, 0, false, 0, 1, NULL, 0},
        {DTRAIN_OPTIMIZER_SGD, 0, 0, 0, 0, 0, false, 0, 1, NULL, 0},
        {DTRAIN_OPTIMIZER_LION, 0.9f, 0.99f, 0, 0, 0, false, 0, 1, NULL, 0},
        {DTRAIN_OPTIMIZER_MUON, 0, 0, 1e-7f, 0, 0.95f, true, 0, 1, NULL, 0},
    };
    dtrain_optimizer_desc desc; /* without a kind, which dtrain_optimizer_create refuses */
    memset(&desc, 0, sizeof desc);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (kinds[i].kind == (uint32_t)kind) desc = kinds[i];
    return desc;
}

/* ---- Membership -------------------------------------------------------------------------------*/

/* Count the fp32 tensors of state per parameter. */
DTRAIN__PRIVATE size_t dtrain__states_of(const dtrain_optimizer_desc *desc)
{
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) return 2;
    return desc->kind != DTRAIN_OPTIMIZER_SGD || desc->momentum > 0;
}

/* Return the hyper-parameters of a parameter, or of an alias. */
DTRAIN__PRIVATE const dtrain_optimizer_desc *dtrain__desc_of(const dtrain_optimizer *optimizer,
                                                             const dtrain_param *param)
{
    return &optimizer->groups[param->state.storage->group].desc;
}

/* Find the optimizer's tensor of this rank's piece of a parameter; NULL: this rank has none. */
DTRAIN__PRIVATE const dtrain_optimizer_tensor *dtrain__moments_of(const dtrain_optimizer *optimizer,
                                                                  const dtrain_param *param)
{
    for (size_t i = 0; i < optimizer->tensor_count; i++)
        if (optimizer->sources[i]->param == param) return &optimizer->tensors[i];
    return NULL;
}

/* Make the table of groups. dtrain__optimizer_memory lists their tensors. */
DTRAIN__PRIVATE dtrain_result dtrain__groups_make(dtrain_optimizer *optimizer,
                                                  const dtrain_optimizer_desc *desc)
{
    const size_t count = (size_t)desc->group_count + 1;
    optimizer->groups = (dtrain__group *)dtrain__alloc(
        &optimizer->allocator, count, sizeof *optimizer->groups, "groups of an optimizer");
    if (!optimizer->groups) return DTRAIN_ERROR_MEMORY;
    optimizer->group_count = count;
    for (size_t g = 0; g < count; g++) {
        dtrain_optimizer_desc *own = &optimizer->groups[g].desc;
        *own = g ? desc->groups[g - 1] : *desc;
        own->groups = NULL;
        own->group_count = 0;
    }
    return DTRAIN_OK;
}

#define DTRAIN__GROUP(field, type) DTRAIN__SAME(dtrain_optimizer_desc, field, type)

static void dtrain__group_of(const void *at, size_t g, void *record)
{
    memcpy(record, &((const dtrain_optimizer *)at)->groups[g].desc, sizeof(dtrain_optimizer_desc));
}

DTRAIN__PRIVATE dtrain__same_list dtrain__same_groups(const dtrain_optimizer *optimizer)
{
    /* clang-format off */
    static const dtrain__same_field fields[] = {
        DTRAIN__SAME_AS(dtrain_optimizer_desc, kind, "kind of optimizer", UINT),
        DTRAIN__GROUP(beta1, FLOAT), DTRAIN__GROUP(beta2, FLOAT), DTRAIN__GROUP(epsilon, FLOAT),
        DTRAIN__GROUP(weight_decay, FLOAT), DTRAIN__GROUP(momentum, FLOAT),
        DTRAIN__GROUP(nesterov, BOOL), DTRAIN__GROUP(variance_steps, UINT),
        DTRAIN__GROUP(lr_scale, FLOAT)};
    /* clang-format on */
    const dtrain__same_list list = {"group",
                                    fields,
                                    sizeof fields / sizeof *fields,
                                    optimizer ? optimizer->group_count : 0,
                                    optimizer,
                                    dtrain__group_of};
    return list;
}

/* ---- Checks -----------------------------------------------------------------------------------*/

static bool dtrain__not_below(float value, float least)
{
    return dtrain__is_finite(value) && value >= least;
}

static bool dtrain__is_beta(float value) { return dtrain__not_below(value, 0) && value < 1; }

/* Refuse a group's desc that was not filled with defaults, or that makes no sense. */
static dtrain_result dtrain__check_group(const dtrain_optimizer_desc *desc, uint32_t number)
{
    char call[48];
    const bool adamw = desc->kind == DTRAIN_OPTIMIZER_ADAMW;
    const bool lion = desc->kind == DTRAIN_OPTIMIZER_LION;
    const bool muon = desc->kind == DTRAIN_OPTIMIZER_MUON;
    const bool betas = adamw || lion, momentum = !betas;
    const dtrain__bound bounds[] = {
        {!dtrain__not_below(desc->weight_decay, 0), "weight_decay", (double)desc->weight_decay,
         "a finite number of 0 or more"},
        {!dtrain__not_below(desc->lr_scale, FLT_MIN), "lr_scale", (double)desc->lr_scale,
         "a finite number above 0, usually 1; DTRAIN_PARAM_FROZEN keeps a parameter as it is"},
        {betas && !dtrain__is_beta(desc->beta1), "beta1", (double)desc->beta1,
         "0 or more, below 1"},
        {betas && !dtrain__is_beta(desc->beta2), "beta2", (double)desc->beta2,
         "0 or more, below 1"},
        {adamw && !dtrain__not_below(desc->epsilon, 0), "epsilon", (double)desc->epsilon,
         "a finite number of 0 or more"},
        {muon && !dtrain__not_below(desc->epsilon, FLT_MIN), "epsilon", (double)desc->epsilon,
         "a finite number above 0: a matrix without gradient has the norm 0"},
        {momentum && !dtrain__not_below(desc->momentum, 0), "momentum", (double)desc->momentum,
         "a finite number of 0 or more"},
        {momentum && desc->nesterov && !(desc->momentum > 0), "momentum", (double)desc->momentum,
         "a number above 0, since nesterov is true"},
        {!adamw && desc->variance_steps, "variance_steps", (double)desc->variance_steps,
         "0: AdamW alone has second moments"},
        {number && desc->group_count, "group_count", (double)desc->group_count,
         "0: groups have none of their own"},
    };
    snprintf(call, sizeof call, "dtrain_optimizer_create: group %u", number);
    if (!adamw && !lion && !muon && desc->kind != DTRAIN_OPTIMIZER_SGD)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: kind %u is not a dtrain_optimizer_kind; start from "
                           "dtrain_optimizer_defaults()",
                           call, (unsigned)desc->kind);
    if (muon && !DTRAIN__MODELS)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: Muon multiplies matrices, which belongs to models, and this program "
            "leaves them out: compile dtrain.h without DTRAIN_OMIT_MODELS and "
            "DTRAIN_CORE, or take AdamW",
            call);
    return dtrain__check_bounds(call, bounds, sizeof bounds / sizeof bounds[0]);
}

/* Refuse a parameter whose group does not exist. For Muon, refuse a parameter that is no matrix or
 * of which no rank has the whole. Slices follow from the layout, so all ranks fail. */
static dtrain_result dtrain__check_member(const dtrain_optimizer_desc *desc,
                                          const dtrain_strategy *strategy, size_t i)
{
    const char *const call = "dtrain_optimizer_create";
    dtrain_strategy_info info;
    size_t count;
    const dtrain_param *p = &dtrain__params_of(strategy, &count)[i];
    const uint32_t group = p->group;
    if (group > desc->group_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: parameter %zu (\"%s\") is in group %u, and the desc has %u "
                           "group%s besides group 0, which is the desc itself",
                           call, i, dtrain__short(p->name), group, desc->group_count,
                           desc->group_count == 1 ? "" : "s");
    const dtrain_optimizer_desc *own = group ? &desc->groups[group - 1] : desc;
    if (p->dtype == DTRAIN_DTYPE_F64 && own->kind != DTRAIN_OPTIMIZER_ADAMW &&
        own->kind != DTRAIN_OPTIMIZER_SGD)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: parameter %zu (\"%s\") is fp64, which AdamW and SGD update, not "
                           "Lion and Muon",
                           call, i, dtrain__short(p->name));
    if (own->kind != DTRAIN_OPTIMIZER_MUON || !dtrain__is_updated(p)) return DTRAIN_OK;
    if (dtrain__param_dims(p) < 2 || (p->count == 0 && dtrain__has_memory(p)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: parameter %zu (\"%s\") is in group %u, of Muon, and has %d "
                           "dimension%s and %lld elements: Muon is for matrices; give it another "
                           "group, of AdamW",
                           call, i, dtrain__short(p->name), group, dtrain__param_dims(p),
                           dtrain__param_dims(p) == 1 ? "" : "s", (long long)p->count);
    if (p->cut.axis && dtrain__groups_of(strategy).tensor_ranks > 1)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: parameter %zu (\"%s\") is in group %u, of Muon, which needs "
                           "whole matrices, and its cut by %s gives each of %d ranks of the tensor "
                           "axis a part; give it a group of AdamW, or leave the cut out",
                           call, i, dtrain__short(p->name), group,
                           p->cut.axis == DTRAIN_CUT_ROWS ? "rows" : "columns",
                           dtrain__groups_of(strategy).tensor_ranks);
    if (!dtrain__is_sliced(strategy, i)) return DTRAIN_OK;
    dtrain__strategy_info(strategy, &info);
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: parameter %zu (\"%s\") is in group %u, of Muon, which needs whole "
                       "matrices, and %s cuts them in slices; use DTRAIN_STRATEGY_ZERO3, which "
                       "shards by whole tensors, or DTRAIN_STRATEGY_DDP",
                       call, i, dtrain__short(p->name), group, info.name);
}

/* Refuse a desc that makes no sense, by itself or for these parameters under this strategy. */
DTRAIN__PRIVATE dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc,
                                                      const dtrain_strategy *strategy)
{
    if (desc->group_count && !desc->groups)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_optimizer_create: group_count is %u and groups is NULL",
                           desc->group_count);
    DTRAIN__TRY(dtrain__check_group(desc, 0));
    for (uint32_t g = 0; g < desc->group_count; g++)
        DTRAIN__TRY(dtrain__check_group(&desc->groups[g], g + 1));
    size_t count;
    (void)dtrain__params_of(strategy, &count);
    for (size_t i = 0; i < count; i++) DTRAIN__TRY(dtrain__check_member(desc, strategy, i));
    return DTRAIN_OK;
}
