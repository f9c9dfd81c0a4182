/* toy_transport.h: the smallest transport for a communicator of dtrain: ranks are threads of one process and read each
 * other's memory. It includes only dtrain.h. A real transport must, besides, survive a rank that ends while
 * others read its buffers.
 *
 * Every rank has a half of each communicator, and only it writes there. Collective s uses slot s % 2 W. */
#ifndef TOY_TRANSPORT_H
#define TOY_TRANSPORT_H
#include "dtrain.h"
#include <stdlib.h>
#include <string.h>

enum { TOY_SLOTS = 2 * DTRAIN_WINDOW };

typedef struct toy_slot {
    uint64_t shown_to, read_to; /* atomic: s once it is shown; once all inputs are read */
    const void *send;
    dtrain_call call; /* small data follow */
    char small[DTRAIN_SMALL_BYTES];
} toy_slot;
typedef struct toy_letters { /* in one direction between two ranks */
    uint64_t sent, taken;    /* atomic: counted by the sender; by the receiver */
    const dtrain_transport_work *work;
} toy_letters;
typedef struct toy_half {
    uint64_t report[DTRAIN_REPORT_BYTES / 8]; /* of rank 0 only */
    int32_t users;                            /* atomic */
    toy_slot slots[TOY_SLOTS];
    toy_letters letters[DTRAIN_MAX_RANKS];
} toy_half;
typedef struct toy_comm {
    dtrain_comm base;
    toy_half *own, *halves[DTRAIN_MAX_RANKS];
    void *scratch; /* of the oldest operation */
} toy_comm;
typedef struct toy_work {
    dtrain_transport_work base;
    bool begun;
} toy_work;

static uint64_t toy_load(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static void toy_store(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
static toy_slot *toy_slot_of(const dtrain_comm *comm, uint64_t sequence, int rank)
{
    return &((const toy_comm *)comm)->halves[rank]->slots[sequence % TOY_SLOTS];
}
static toy_letters *toy_letters_of(const dtrain_comm *comm, int from, int to)
{
    return &((const toy_comm *)comm)->halves[from]->letters[to];
}
static void toy_show(dtrain_comm *comm, dtrain_transport_work *work)
{
    toy_slot *slot = toy_slot_of(comm, work->sequence, comm->rank);
    slot->call = work->call;
    slot->send = work->what.send;
    if (work->small && work->send_bytes) memcpy(&slot->call + 1, slot->send, work->send_bytes);
    toy_store(&slot->shown_to, work->sequence);
}
static const dtrain_call *toy_heard(const dtrain_comm *comm, uint64_t sequence, int rank)
{
    const toy_slot *slot = toy_slot_of(comm, sequence, rank);
    const toy_letters *letters = toy_letters_of(comm, rank, comm->rank);
    if (!sequence) return toy_load(&letters->sent) > letters->taken ? &letters->work->call : NULL;
    return toy_load(&slot->shown_to) >= sequence ? &slot->call : NULL;
}
static bool toy_message(dtrain_comm *comm, toy_work *own)
{
    const dtrain_collective *what = &own->base.what;
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    toy_letters *letters = sends ? toy_letters_of(comm, comm->rank, what->root)
                                 : toy_letters_of(comm, what->root, comm->rank);
    if (sends && !own->begun) {
        own->begun = true;
        letters->work = &own->base;
        toy_store(&letters->sent, letters->sent + 1);
    }
    if (sends) return toy_load(&letters->taken) == letters->sent;
    if (!own->base.agreed) return false;
    if (own->base.recv_bytes) memcpy(what->recv, letters->work->what.send, own->base.recv_bytes);
    toy_store(&letters->taken, letters->taken + 1);
    return true;
}
/* The result goes into memory of this rank's own until all have read their inputs, which may be where the
 * result belongs. */
static bool toy_move(dtrain_comm *base, dtrain_transport_work *work)
{
    toy_comm *comm = (toy_comm *)base;
    dtrain_collective what = work->what;
    const void *in[DTRAIN_MAX_RANKS];
    if (!work->sequence) return toy_message(base, (toy_work *)work);
    if (work->small) return true;
    if (!work->oldest) return false;
    if (!((toy_work *)work)->begun) {
        free(comm->scratch);
        what.recv = comm->scratch = malloc(work->recv_bytes + 1);
        if (!what.recv) return base->ops->fail(base, DTRAIN_ERROR_MEMORY, "malloc") == DTRAIN_OK;
        for (int i = 0; i < base->size; i++) in[i] = toy_slot_of(base, work->sequence, i)->send;
        dtrain_collective_result(base, &what, in);
        ((toy_work *)work)->begun = true;
        toy_store(&toy_slot_of(base, work->sequence, base->rank)->read_to, work->sequence);
    }
    for (int i = 0; i < base->size; i++)
        if (toy_load(&toy_slot_of(base, work->sequence, i)->read_to) < work->sequence) return false;
    if (work->recv_bytes) memcpy(work->what.recv, comm->scratch, work->recv_bytes);
    return true;
}
static bool toy_lags(const dtrain_comm *comm, const dtrain_transport_work *work, int rank)
{
    const bool sends = work->what.kind == DTRAIN_COLLECTIVE_SEND;
    const toy_letters *letters =
        toy_letters_of(comm, sends ? comm->rank : rank, sends ? rank : comm->rank);
    if (work->sequence)
        return toy_load(&toy_slot_of(comm, work->sequence, rank)->read_to) < work->sequence;
    return (toy_load(&letters->taken) == toy_load(&letters->sent)) != sends;
}
static dtrain_result toy_map(dtrain_comm *comm, size_t bytes, void **out)
{
    (void)comm;
    *out = calloc(1, bytes + 64);
    return *out ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}
static void toy_unmap(dtrain_comm *comm, void *memory, size_t bytes)
{
    (void)comm, (void)bytes;
    free(memory);
}
static dtrain_result toy_make(dtrain_comm *base, int64_t *address)
{
    toy_comm *comm = (toy_comm *)base;
    comm->own = (toy_half *)calloc(1, sizeof *comm->own);
    if (!comm->own) return DTRAIN_ERROR_MEMORY;
    comm->own->users = base->size;
    *address = (int64_t)(intptr_t)comm->own;
    return DTRAIN_OK;
}
static void *toy_join(dtrain_comm *base, const int64_t *addresses)
{
    toy_comm *comm = (toy_comm *)base;
    for (int i = 0; i < base->size; i++) comm->halves[i] = (toy_half *)(intptr_t)addresses[i];
    return comm->halves[0]->report;
}
static void toy_release(dtrain_comm *base, bool joined)
{
    toy_comm *comm = (toy_comm *)base;
    if (!joined) free(comm->own);
    for (int i = 0; joined && i < base->size; i++)
        if (__atomic_sub_fetch(&comm->halves[i]->users, 1, __ATOMIC_ACQ_REL) == 0)
            free(comm->halves[i]);
    free(comm->scratch);
}

static const dtrain_transport_ops toy_transport = {
    sizeof(toy_comm), sizeof(toy_work), 0,         toy_make, toy_join, toy_release, toy_map,
    toy_unmap,        toy_show,         toy_heard, toy_move, toy_lags, NULL};

/* Return the table to be given as comm_ops. */
static dtrain_comm_ops toy_comm_ops(void)
{
    const dtrain_comm_ops *local;
    dtrain_comm_ops ops;
    memset(&ops, 0, sizeof ops);
    if (dtrain_comm_ops_by_name("local", &local) == DTRAIN_OK) ops = *local;
    ops.name = "toy";
    ops.transport = &toy_transport;
    return ops;
}
#endif
