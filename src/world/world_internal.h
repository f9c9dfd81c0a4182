/* The world of a rank, and the control page that ranks share
 *
 * Every rank has a dtrain_world. It points to the control page, where ranks publish their exits,
 * aborts and records of all-gathers. A wait for another rank polls that page:
 *
 *     dtrain__wait_turn --(every 32nd)--> dtrain__wait_poll --> link, if any --> control page
 *                                                 |
 *                                                 +--> PEER, with a sentence; TIMEOUT; or OK
 *
 * The arenas follow the page, one per rank: shared memory is allocated from them. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/abi_internal.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "device/device.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

typedef enum dtrain__end {
    DTRAIN__RUNNING = 0,
    DTRAIN__LEFT = 1,      /* rank_main returned 0 */
    DTRAIN__RETURNED = 2,  /* rank_main returned something else */
    DTRAIN__SIGNALED = 3,  /* killed by a signal */
    DTRAIN__UNSTARTED = 4, /* its world could not be made */
    DTRAIN__STOPPED = 5,   /* killed by the launcher after the grace period */
    DTRAIN__LOST = 6       /* ended, and nobody saw how */
} dtrain__end;

#define DTRAIN__EXIT_TEXT 496

/* How one rank ended. The rank writes it once, or the launcher if the rank could not. */
typedef struct dtrain__exit_record {
    uint32_t how;                  /* atomic, stored last: dtrain__end */
    int32_t value;                 /* return value or signal */
    int32_t after;                 /* 1 + the rank whose failure made this rank fail; 0: none */
    int32_t code;                  /* dtrain_result of the last error, after a failure */
    uint64_t ended_ns;             /* time of this record */
    char error[DTRAIN__EXIT_TEXT]; /* the rank's last error, after a failure */
} dtrain__exit_record;

/* A rank's records of dtrain_world_all_gather: record n is in half n % 2. Two halves are enough: a
 * rank writes record n + 2 after it has seen every record n + 1, and each record n + 1 was written
 * by a rank that had read every record n. */
typedef struct dtrain__gather_slot {
    uint64_t sequence; /* atomic, stored last: number of records written */
    uint64_t bytes[2];
    char data[2][DTRAIN_WORLD_ALL_GATHER_BYTES];
} dtrain__gather_slot;

/* The first abort of the run. */
typedef struct dtrain__abort_record {
    uint32_t state; /* atomic: 0 none, 1 being written, 2 complete */
    int32_t rank, code;
    char text[500];
} dtrain__abort_record;

/* A rank's progress, for the flight records of other ranks (comm/flight.c). Each field is atomic by
 * itself. All are zero if ranks share no memory. */
typedef struct dtrain__pulse {
    uint64_t beat_ns;       /* last reading of the clock inside the library */
    uint64_t inside;        /* 1: the rank is inside the library now */
    int64_t comm;           /* communicator number of the rank's last collective */
    int64_t first;          /* that communicator's first rank in the world */
    uint64_t sequence;      /* number of the rank's last collective */
    uint64_t world_started; /* number of the last collective started among all ranks */
    uint64_t world_done;    /* number of the last collective done among all ranks */
    uint64_t cache_line;    /* unused: a pulse fills a cache line */
} dtrain__pulse;

/* A long wait, for comm/circle.c. The fields between `number` and `text` are atomic by themselves,
 * and belong to this wait or to a later one. */
typedef struct dtrain__long_wait {
    uint64_t number;   /* atomic, stored last: number of the wait, from 1, below 2^31; 0: none */
    int64_t comm;      /* the communicator's number; -1: dtrain_world_all_gather */
    uint64_t sequence; /* of the collective; messages: 0 */
    uint32_t kind;     /* dtrain_collective_kind */
    char text[176];    /* the call, for error sentences */
} dtrain__long_wait;

/* The control page, at the start of the shared region. If ranks share no memory, each has a private
 * copy, which the link updates. */
typedef struct dtrain__control {
    uint32_t first_failed; /* atomic: 1 + rank of the first failure, 0 = none */
    uint32_t ended_count;  /* atomic: number of exit records */
    int caught;            /* atomic: signal that asks the run to stop, see signals.c; 0 = none */
    uint64_t progress;     /* atomic: 1 + the highest step announced, 0 = none */
    uint64_t promised;     /* atomic: bytes allocated from all arenas */
    uint64_t free_at_start;
    char *arenas; /* (world size, arena_bytes); NULL if no memory is shared */
    size_t arena_bytes;
    dtrain__abort_record aborted;
    dtrain__exit_record exits[DTRAIN_MAX_RANKS];
    dtrain__gather_slot slots[DTRAIN_MAX_RANKS];
    uint64_t waits[DTRAIN_MAX_RANKS]; /* atomic: the rank that each rank waits for, see control.c */
    dtrain__pulse pulses[DTRAIN_MAX_RANKS];
    dtrain__long_wait long_waits[DTRAIN_MAX_RANKS];
    uint64_t facts[DTRAIN_MAX_RANKS][DTRAIN_MAX_RANKS]; /* atomic: [awaited][waiter], circle.c */
    uint32_t holders[DTRAIN_MAX_RANKS]; /* atomic: joined ranks that use this rank's mapping, see
                                           page.c */
} dtrain__control;

/* The process of a joined rank. */
typedef struct dtrain__life {
    uint64_t host;    /* a hash; equal for ranks that can see each other's processes */
    int64_t pid;      /* in the namespace of that host */
    uint64_t started; /* see dtrain__process_started; 0: unknown */
} dtrain__life;

/* The mapping of a control page and, if there are any, its arenas. */
typedef struct dtrain__region {
    dtrain__control *control;
    size_t bytes;
} dtrain__region;

/* Allocated memory of an arena. Memory between two ranges is free. */
typedef struct dtrain__range {
    size_t begin, end; /* whole pages, from the start of the arena */
} dtrain__range;

typedef struct dtrain__part dtrain__part;   /* see comm/local.c */
typedef struct dtrain__guest dtrain__guest; /* see launch/join.c */
struct dtrain__engine;
struct dtrain__work;
struct dtrain__wait;
typedef dtrain_result (*dtrain__look_fn)(dtrain_world *world, struct dtrain__engine *comm,
                                         const struct dtrain__work *work,
                                         struct dtrain__wait *wait);

struct dtrain_world {
    int rank, size;
    int local_rank, local_size, node, node_count; /* of the machine, whatever node_ranks is */
    int node_ranks;                               /* of the launch desc */
    uint64_t moves; /* steps of this rank's collectives; a new step shortens naps */
    uint32_t threads;
    bool oversubscribed; /* true if there are more threads than cores: waits must not spin */
    uint32_t naps;       /* number of next turns that sleep, see control.c */
    bool catches;        /* true if signals are noted as requests to stop, see signals.c */
    uint32_t restart_count;
    uint64_t job;        /* a number shared by all attempts of this run, and by no other run */
    pid_t launcher;      /* the process that forked this rank, or 0 */
    uint64_t base_bytes; /* memory of the process before the model; 0 if ranks are threads */
    uint64_t timeout_ns, join_ns;
    uint64_t *progress; /* in the file that dtrain-run reads, see launch/restart.c; or NULL */
    dtrain__control *control;
    struct dtrain__link *link; /* of ranks that a launcher has started, see link.c; or NULL */
    dtrain__guest *guest;      /* of dtrain_world_join, see launch/join.c; or NULL */
    dtrain_result (*gather)(dtrain_world *world, const void *mine, size_t bytes); /* all-gather of
                                                a guest without a shared page; or NULL */
    void (*tell)(dtrain_world *world); /* sends or receives an abort, without a link; or NULL */
    const void *comm_given; /* of the join desc, until the world's communicator is made */
    dtrain__region page;    /* the mapping of `control`, of joined ranks */
    dtrain__life lives[DTRAIN_MAX_RANKS]; /* of joined ranks */
    int mapper;                         /* first rank of this process, which has mapped the page */
    int looked;                         /* last rank whose process was checked */
    uint64_t looked_ns;                 /* time of that check */
    uint64_t left_ns[DTRAIN_MAX_RANKS]; /* when this rank saw that a rank left or ended; or 0 */
    char no_region[200];                /* why joined ranks of one host share no memory; or "" */
    uint32_t *mine;        /* 1 in this process, 0 in a process that a rank has forked */
    dtrain__range *ranges; /* (range_count), sorted */
    size_t range_count, range_room;
    dtrain_abi abi; /* sizes of the program's structs */
    dtrain_allocator allocator;
    dtrain__log_sink log;
    dtrain_device *device;
    const struct dtrain_comm_ops *comm_ops; /* from the launch desc; NULL: local */
    dtrain_comm *comm;                      /* all ranks */
    uint64_t gather_count;
    int64_t clock_offset_ns;      /* rank 0's clock less this rank's, see link.c */
    uint64_t clock_error_ns;      /* bound of that offset's error */
    int caused_by;                /* 1 + the rank whose failure ended this rank's call; 0: none */
    struct dtrain__engine *comms; /* this rank's communicators, newest first */
    uint64_t long_wait_ns;        /* a longer wait gets a number, see comm/circle.c */
    uint64_t long_wait_count;     /* numbers given so far */
    dtrain__look_fn look_for_circle; /* NULL until there is an engine */
    int64_t comm_count;              /* every existing communicator has a smaller number */
    dtrain__timeline timeline;
    dtrain__part *retired; /* parts of destroyed communicators that other ranks can still read */
};

/* A request to stop can reach a rank twice: timeout(1) and Slurm send it to a process group or to
 * all processes of a job, and the launcher forwards it. Within this time it is one request. */
#define DTRAIN__ONE_REQUEST_NS 1000000000u

#define DTRAIN__YIELDS_PER_POLL 32u /* 10 us on an idle machine */

typedef struct dtrain__wait {
    uint32_t turns, yields; /* turns stop at SPIN_TURNS, yields can wrap */
    bool polled;            /* true if the last turn polled: time for the caller's rare checks */
    uint64_t last_ns, waited_ns; /* last reading of the clock; time waited */
    uint64_t moves, moved_ns;    /* last world->moves; waited_ns when it changed */
    uint64_t number,
        looked_ns;            /* number of a long wait, see comm/circle.c; time of its last look */
    uint64_t facts, facts_ns; /* sum of the facts read last; time of its last change */
} dtrain__wait;

/* Return a rank's record of the last dtrain__world_gather: DTRAIN_WORLD_ALL_GATHER_BYTES. */
static inline const void *dtrain__gathered(const dtrain_world *world, int rank)
{
    return world->control->slots[rank].data[world->gather_count % 2];
}

/* world/world.c */
DTRAIN__PRIVATE void dtrain__world_info(const dtrain_world *world, dtrain_world_info *info);

/* world/control.c */
DTRAIN__PRIVATE const char *dtrain__signal_name(int number);
DTRAIN__PRIVATE void dtrain__describe_end(const dtrain__control *control, int rank, char *text,
                                          size_t room);
DTRAIN__PRIVATE void dtrain__record_end(dtrain__control *control, int rank, dtrain__end how,
                                        int value, const char *error);
DTRAIN__PRIVATE bool dtrain__record_lost(dtrain__control *control, int rank);
DTRAIN__PRIVATE void dtrain__look_for_lost(dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__left_for(dtrain_world *world, int rank, uint64_t grace_ns);
DTRAIN__PRIVATE bool dtrain__await_abort(const dtrain__control *control,
                                         const dtrain__abort_record *record);
DTRAIN__PRIVATE bool dtrain__record_abort(const dtrain__control *control,
                                          dtrain__abort_record *record, int rank,
                                          dtrain_result code, const char *text);
DTRAIN__PRIVATE int dtrain__first_failure(const dtrain__control *control);
DTRAIN__PRIVATE dtrain__wait dtrain__wait_begin(void);
DTRAIN__PRIVATE void dtrain__set_waits(dtrain_world *world, int rank);
DTRAIN__PRIVATE int dtrain__waits(const dtrain_world *world, int rank);
DTRAIN__PRIVATE int dtrain__behind(const dtrain_world *world, int rank);
DTRAIN__PRIVATE dtrain_result dtrain__trouble(dtrain_world *world);
DTRAIN__PRIVATE dtrain_result dtrain__wait_poll(dtrain_world *world, dtrain__wait *wait);
DTRAIN__PRIVATE dtrain_result dtrain__wait_turn(dtrain_world *world, dtrain__wait *wait);
DTRAIN__PRIVATE dtrain_result dtrain__world_check(const dtrain_world *world, const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__world_gather(dtrain_world *world, const void *mine,
                                                   size_t bytes);
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__abort_with(dtrain_world *world, dtrain_result code,
                                                 const char *format, ...);

/* world/arena.c */
DTRAIN__PRIVATE void *dtrain__map_bytes(void *hint, size_t bytes, int file);
DTRAIN__PRIVATE dtrain_result dtrain__map_region(size_t given, uint32_t ranks, void *hint, int file,
                                                 dtrain__region *region);
DTRAIN__PRIVATE bool dtrain__is_shared(const dtrain_world *world, const void *memory, size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__promise(dtrain_world *world, size_t bytes);
DTRAIN__PRIVATE void dtrain__unpromise(dtrain_world *world, size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__shared_alloc(dtrain_world *world, size_t bytes, void **out);
DTRAIN__PRIVATE void dtrain__shared_free(dtrain_world *world, void *memory);

/* world/signals.c */
DTRAIN__PRIVATE bool dtrain__hangup_ignored(void);
DTRAIN__PRIVATE void dtrain__signals_install(bool dumps, sigset_t mask);
DTRAIN__PRIVATE dtrain_result dtrain__signals_begin(bool dumps, sigset_t mask);
DTRAIN__PRIVATE void dtrain__signals_end(void);
DTRAIN__PRIVATE int dtrain__signal_caught(void);
DTRAIN__PRIVATE uint32_t dtrain__dumps_asked(void);
