/* toy_transport.h: the smallest transport for the engine of dtrain's communicators: ranks are threads of one process
 * and read each other's memory. Read the opening of src/comm/engine_internal.h first. A real transport must, besides,
 * survive a rank that ends while others read its buffers.
 *
 * Every rank has a half of each communicator, which it alone writes. Operation s uses slot s % 2 W. */
#ifndef TOY_TRANSPORT_H
#define TOY_TRANSPORT_H

enum { TOY_SLOTS = 2 * DTRAIN__WINDOW };

typedef struct toy_slot {
    uint64_t shown_to, read_to; /* atomic: s once it is shown; once all inputs are read */
    const char *send;
    dtrain__shown shown; /* small data follow */
    char small[DTRAIN__SMALL_BYTES];
} toy_slot;
typedef struct toy_letters { /* in one direction between two ranks */
    uint64_t sent, taken;    /* atomic: counted by the sender; by the receiver */
    const dtrain__work *work;
} toy_letters;
typedef struct toy_half {
    dtrain__abort_record report; /* of rank 0 only */
    int32_t users;               /* atomic */
    toy_slot slots[TOY_SLOTS];
    toy_letters letters[DTRAIN_MAX_RANKS];
} toy_half;
typedef struct toy_comm {
    dtrain__engine base;
    toy_half *own, *halves[DTRAIN_MAX_RANKS];
    char *scratch; /* of the oldest operation */
} toy_comm;
typedef struct toy_work {
    dtrain__work base;
    bool begun;
} toy_work;

static toy_slot *toy_slot_of(const dtrain__engine *comm, uint64_t sequence, int rank)
{
    return &((const toy_comm *)comm)->halves[rank]->slots[sequence % TOY_SLOTS];
}
static void toy_show(dtrain__engine *comm, dtrain__work *work)
{
    toy_slot *slot = toy_slot_of(comm, work->sequence, comm->base.rank);
    (void)dtrain__write_shown(comm, work, &slot->shown);
    slot->send = (const char *)work->what.send;
    dtrain__store(&slot->shown_to, work->sequence);
}
static const dtrain__shown *toy_heard(const dtrain__engine *comm, uint64_t sequence, int rank)
{
    toy_slot *slot = toy_slot_of(comm, sequence, rank);
    return dtrain__load(&slot->shown_to) >= sequence ? &slot->shown : NULL;
}
/* The result goes into memory of this rank's own until all have read their inputs, which may be where the
 * result belongs. */
static bool toy_move(dtrain__engine *base, dtrain__work *work, bool oldest)
{
    toy_comm *comm = (toy_comm *)base;
    dtrain_collective what = work->what;
    const char *in[DTRAIN_MAX_RANKS];
    const size_t bytes = dtrain__recv_bytes(&what, base->base.size);
    size_t first = 0, count;
    if (work->small) return true;
    if (!oldest) return false;
    if (!((toy_work *)work)->begun) {
        free(comm->scratch);
        what.recv = comm->scratch = (char *)malloc(bytes);
        if (!what.recv)
            return dtrain__engine_fail(&base->base, DTRAIN_ERROR_MEMORY, "malloc") == DTRAIN_OK;
        if (dtrain__kind_of(what.kind)->cuts)
            dtrain__slice(&what, base->base.size, base->base.rank, &first, &count);
        for (int i = 0; i < base->base.size; i++)
            in[i] =
                toy_slot_of(base, work->sequence, i)->send + first * dtrain_dtype_bytes(what.dtype);
        dtrain__pull(&base->base, &what, in, 0, what.count);
        ((toy_work *)work)->begun = true;
        dtrain__store(&toy_slot_of(base, work->sequence, base->base.rank)->read_to, work->sequence);
    }
    for (int i = 0; i < base->base.size; i++)
        if (dtrain__load(&toy_slot_of(base, work->sequence, i)->read_to) < work->sequence)
            return false;
    if (dtrain__gets(&what, base->base.rank)) memcpy(work->what.recv, comm->scratch, bytes);
    return true;
}
static bool toy_message(dtrain__engine *base, dtrain__work *work)
{
    toy_comm *comm = (toy_comm *)base;
    const bool sends = work->what.kind == DTRAIN_COLLECTIVE_SEND;
    toy_letters *out = &comm->own->letters[work->what.root];
    toy_letters *in = &comm->halves[work->what.root]->letters[base->base.rank];
    toy_letters *letters = sends ? out : in;
    if (sends && !((toy_work *)work)->begun) {
        ((toy_work *)work)->begun = true;
        letters->work = work;
        dtrain__store(&letters->sent, letters->sent + 1);
    }
    if (sends) return dtrain__load(&letters->taken) == letters->sent;
    if (dtrain__load(&letters->sent) == letters->taken) return false;
    if (!dtrain__message_agrees(base, work, &letters->work->shown)) return false;
    if (work->what.count)
        memcpy(work->what.recv, letters->work->what.send,
               dtrain__recv_bytes(&work->what, base->base.size));
    dtrain__store(&letters->taken, letters->taken + 1);
    return true;
}
static bool toy_lags(const dtrain__engine *base, const dtrain__work *work, int rank)
{
    const toy_comm *comm = (const toy_comm *)base;
    const bool sends = work->what.kind == DTRAIN_COLLECTIVE_SEND;
    const toy_letters *letters =
        sends ? &comm->own->letters[rank] : &comm->halves[rank]->letters[base->base.rank];
    if (work->sequence)
        return dtrain__load(&toy_slot_of(base, work->sequence, rank)->read_to) < work->sequence;
    return (dtrain__load(&letters->taken) == dtrain__load(&letters->sent)) != sends;
}
static dtrain_result toy_map(dtrain__engine *comm, size_t bytes, void **out)
{
    (void)comm;
    *out = calloc(1, bytes + 64);
    return *out ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory");
}
static void toy_unmap(dtrain__engine *comm, void *memory, size_t bytes)
{
    (void)comm, (void)bytes;
    free(memory);
}
static dtrain_result toy_make(dtrain__engine *base, int64_t *address)
{
    toy_comm *comm = (toy_comm *)base;
    comm->own = (toy_half *)calloc(1, sizeof *comm->own);
    if (!comm->own) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory");
    comm->own->users = base->base.size;
    *address = (int64_t)(intptr_t)comm->own;
    return DTRAIN_OK;
}
static void toy_join(dtrain__engine *base, const int64_t *addresses)
{
    toy_comm *comm = (toy_comm *)base;
    for (int i = 0; i < base->base.size; i++) comm->halves[i] = (toy_half *)(intptr_t)addresses[i];
    base->report = &comm->halves[0]->report;
}
static void toy_release(dtrain__engine *base)
{
    toy_comm *comm = (toy_comm *)base;
    if (!base->report) free(comm->own); /* nobody else has joined it */
    for (int i = 0; base->report && i < base->base.size; i++)
        if (__atomic_sub_fetch(&comm->halves[i]->users, 1, __ATOMIC_ACQ_REL) == 0)
            free(comm->halves[i]);
    free(comm->scratch);
}
#endif
