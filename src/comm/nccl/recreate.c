/* Going on with fewer ranks after a failure
 *
 * Abort and create anew is the one recovery that works in every version of NCCL; shrinking or
 * revoking in place would be other paths to the same end, each with versions and deadlocks of its
 * own. */

#include "comm/nccl/nccl_internal.h"

static dtrain_result dtrain_nccl__check_group(const dtrain_nccl__hub *hub,
                                              const dtrain_nccl_group *group, int *rank)
{
    *rank = -1;
    if (!group || !group->ranks || group->rank_count < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_nccl_recreate: the group has no ranks");
    if (!group->exchange && group->rank_count > 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_nccl_recreate: the group has no exchange, and the world's "
                           "control plane has ended with the failure");
    for (int i = 0; i < group->rank_count; i++) {
        const int one = group->ranks[i];
        if (one < 0 || one >= dtrain_world_size(hub->world))
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_nccl_recreate: the world has no rank %d", one);
        for (int j = 0; j < i; j++)
            if (group->ranks[j] == one)
                return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                                   "dtrain_nccl_recreate: rank %d is in the group twice", one);
        if (one == dtrain_world_rank(hub->world)) *rank = i;
    }
    if (*rank >= 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_nccl_recreate: this rank, %d, is not in the group",
                       dtrain_world_rank(hub->world));
}

static dtrain_result dtrain_nccl__exchange_alone(void *user, const void *mine, size_t bytes,
                                                 void *all)
{
    (void)user;
    memcpy(all, mine, bytes);
    return DTRAIN_OK;
}

/* Create the new communicator. From here on an error belongs to the hub again, and stands until the
 * next attempt. */
static dtrain_result dtrain_nccl__recreate_steps(dtrain_nccl__hub *hub,
                                                 const dtrain_nccl_group *group, int rank,
                                                 dtrain_nccl__comm **comm)
{
    ncclUniqueId id;
    /* Aborted kernels leave their streams: a device that does not become idle cannot go on. */
    dtrain_result result = hub->device->ops->synchronize(hub->device);
    if (result == DTRAIN_OK)
        result =
            dtrain_nccl__comm_make(hub, group->rank_count, rank, group->ranks, "survivors", comm);
    DTRAIN_NCCL_TRY(dtrain_nccl__rendezvous(hub, group, result, rank, &id));
    DTRAIN_NCCL_TRY(dtrain_nccl__comm_init(*comm, &id));
    for (dtrain_nccl__memory *m = hub->memory; m; m = m->next)
        DTRAIN_NCCL_TRY(dtrain_nccl__register(*comm, m));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_nccl_recreate(dtrain_comm *failed, const dtrain_nccl_group *group,
                                              dtrain_comm **out)
{
    dtrain_nccl__comm *comm = NULL;
    dtrain_nccl_group resolved;
    int rank;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_nccl_recreate: out is NULL");
    *out = NULL;
    if (!failed || failed->ops != dtrain_nccl_comm_ops())
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_nccl_recreate: this is not a communicator over NCCL");
    dtrain_nccl__hub *hub = ((dtrain_nccl__comm *)failed)->hub;
    if (hub->code == DTRAIN_OK)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_nccl_recreate: nothing has failed; dtrain_comm_split makes "
                           "smaller communicators of a healthy one");
    DTRAIN_NCCL_TRY(dtrain_nccl__check_group(hub, group, &rank));
    resolved = *group;
    if (!resolved.exchange) resolved.exchange = dtrain_nccl__exchange_alone;
    hub->code = DTRAIN_OK;
    hub->recreated = true;
    for (int i = 0; i < DTRAIN_NCCL__MARKS; i++) hub->marks[i].recorded = false;
    const dtrain_result result = dtrain_nccl__recreate_steps(hub, &resolved, rank, &comm);
    if (result == DTRAIN_OK) {
        *out = &comm->base;
        return DTRAIN_OK;
    }
    dtrain_nccl__fail(hub, result, "dtrain_nccl_recreate: %s",
                      dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    if (comm) dtrain_nccl__comm_free(comm);
    return dtrain_nccl__hub_error(hub);
}
