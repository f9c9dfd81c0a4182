/* The rendezvous
 *
 *     rank r                                             rank 0, listening
 *     HELLO: protocol, a random number        ->
 *                                             <-         CHALLENGE: a random number, proof
 *     JOIN: rank, size, version, host, proof  ->         checked, kept; others are waited for
 *                                             <-         BEGIN, when all are there, or REFUSED
 *
 * A proof is the keyed hash of both random numbers, so the key itself never travels and an old
 * proof is worth nothing. This keeps out what comes by mistake or from someone who does not know
 * the key: another run, a port scanner, another user. It does not hide what is sent and does not
 * protect a connection that stands: who can read or change the traffic must be kept away by the
 * network; and a short key can be guessed by who has read a proof.
 *
 * Who speaks another protocol or does not know the key is turned away and the run goes on waiting:
 * a stranger must not be able to end it. Ranks that know the key and contradict each other (world
 * size, version, the same rank twice) end the run on all ranks, with both values in the sentence.
 *
 * Rank 0 never waits for one guest: each has ten seconds to say all it has to say. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/environment_internal.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__PROTOCOL 1u
#define DTRAIN__GUESTS 64             /* at once; further ones wait in the kernel's backlog */
#define DTRAIN__GUEST_NS 10000000000u /* for the whole handshake */
#define DTRAIN__TELL_NS 3000000000u   /* after a failure, for those who have yet to come */
#define DTRAIN__RENDEZVOUS_MS 300000u /* and not more than timeout_ms */

enum { DTRAIN__GREETED = 0, DTRAIN__CHALLENGED = 1, DTRAIN__LEAVING = 2 }; /* stages of a guest */

/* What a rank says about itself; begins with the proof, which covers the rest. */
typedef struct dtrain__card {
    uint64_t proof, layout;
    int32_t rank, size, pid, unused;
    char version[24], host[72];
} dtrain__card;

typedef struct dtrain__rendezvous {
    dtrain_world *world;
    const dtrain__placement *place;
    uint64_t start_ns, deadline_ns, said_ns;
    int listener;
    dtrain__connection *guests; /* (GUESTS) */
    int32_t *pids;              /* (size) of the ranks that are here */
    int here;                   /* without rank 0 */
    int told;                   /* of a failure */
    int strangers;
    char stranger[200]; /* the last one, and why it was turned away */
    dtrain_result result;
    char why[400];
} dtrain__rendezvous;

static uint64_t dtrain__random(void)
{
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        number ^= dtrain__now_ns() ^ (uint64_t)getpid() << 48;
    return number;
}

/* The first word says who proves: an answer cannot be sent back as one's own. */
static uint64_t dtrain__prove(const dtrain__placement *place, const uint64_t nonce[2],
                              const dtrain__card *card)
{
    unsigned char text[24 + sizeof *card];
    const uint64_t head[3] = {card ? 2u : 1u, nonce[0], nonce[1]};
    memset(text, 0, sizeof text);
    memcpy(text, head, sizeof head);
    if (card) memcpy(text + sizeof head, card, sizeof *card);
    memset(text + sizeof head, 0, sizeof card->proof);
    return dtrain__siphash(place->key, text, sizeof text);
}

/* What must be equal for ranks to share memory and frames. */
static uint64_t dtrain__struct_layout(void)
{
    const uint64_t none[2] = {0, 0};
    const uint64_t sizes[4] = {sizeof(dtrain__control), sizeof(dtrain__fate), sizeof(dtrain__card),
                               sizeof(void *)};
    return dtrain__siphash(none, sizes, sizeof sizes);
}

static void dtrain__card_make(const dtrain__rendezvous *r, const uint64_t nonce[2],
                              dtrain__card *card)
{
    memset(card, 0, sizeof *card);
    card->layout = dtrain__struct_layout();
    card->rank = r->world->rank;
    card->size = r->world->size;
    card->pid = (int32_t)getpid();
    snprintf(card->version, sizeof card->version, "%s", DTRAIN_VERSION_STRING);
    if (gethostname(card->host, sizeof card->host - 1) != 0) card->host[0] = 0;
    card->proof = dtrain__prove(r->place, nonce, card);
}

/* The first failure stands. */
DTRAIN__PRINTF(3, 4)
static dtrain_result dtrain__meet_fail(dtrain__rendezvous *r, dtrain_result code,
                                       const char *format, ...)
{
    va_list args;
    if (r->result != DTRAIN_OK) return r->result;
    va_start(args, format);
    vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return r->result = code;
}

/* ---- Sockets ----------------------------------------------------------------------------------*/

static void dtrain__name_address(const struct sockaddr *address, socklen_t length, char *text,
                                 size_t room)
{
    char host[64], port[16];
    if (getnameinfo(address, length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        snprintf(text, room, "an unknown address");
    else snprintf(text, room, "%s port %s", host, port);
}

/* Small frames at once; a host that is gone is noticed after some 30 s, with traffic or without. */
static void dtrain__socket_tune(int socket)
{
    const int on = 1, idle_s = 10, between_s = 5, probes = 4, unanswered_ms = 30000;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

/* All addresses of rank 0's host; NULL with r->stranger telling why. "[::1]" is "::1". */
static struct addrinfo *dtrain__resolve(dtrain__rendezvous *r)
{
    struct addrinfo wanted, *found = NULL;
    char host[sizeof r->place->address], port[16];
    const char *from = r->place->address;
    const size_t length = strlen(from);
    const bool bracketed = length > 2 && from[0] == '[' && from[length - 1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(bracketed ? length - 2 : length), from + bracketed);
    snprintf(port, sizeof port, "%u", r->place->port);
    memset(&wanted, 0, sizeof wanted);
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = AI_NUMERICSERV;
    const int error = getaddrinfo(host, port, &wanted, &found);
    if (!error) return found;
    snprintf(r->stranger, sizeof r->stranger, "the name cannot be resolved: %s",
             gai_strerror(error));
    return NULL;
}

static bool dtrain__meet_nap(const dtrain__rendezvous *r, int ms)
{
    const uint64_t now = dtrain__now_ns();
    if (now >= r->deadline_ns) return false;
    const uint64_t left = (r->deadline_ns - now) / 1000000u + 1;
    (void)poll(NULL, 0, left < (uint64_t)ms ? (int)left : ms);
    return true;
}

/* ---- Rank 0 -----------------------------------------------------------------------------------*/

/* True when done with it, well or not. */
static bool dtrain__listen_at(dtrain__rendezvous *r, const struct sockaddr *address,
                              socklen_t length)
{
    const int on = 1, off = 0;
    char name[96];
    const int listener = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return false;
    dtrain__name_address(address, length, name, sizeof name);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->sa_family == AF_INET6) /* :: answers for IPv4 too */
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(listener, address, length) == 0 && listen(listener, SOMAXCONN) == 0) {
        r->listener = listener;
        return true;
    }
    const int error = errno;
    close(listener);
    if (error == EADDRNOTAVAIL) return false;
    dtrain__meet_fail(r, DTRAIN_ERROR_SYSTEM,
                      "rank 0 cannot listen at %s: %s; is another run there? Set DTRAIN_PORT, the "
                      "same on all ranks, to a free port",
                      name, strerror(error));
    return true;
}

/* Many systems give their own name a loopback address, which other hosts cannot call. */
static bool dtrain__is_alias(const char *host, const struct sockaddr *address)
{
    const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
    char number[sizeof(struct in6_addr)];
    const bool loopback = address->sa_family == AF_INET ? ntohl(four->sin_addr.s_addr) >> 24 == 127
                                                        : IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
    return loopback && strcmp(host, "localhost") != 0 && host[0] != '[' &&
           inet_pton(AF_INET, host, number) != 1 && inet_pton(AF_INET6, host, number) != 1;
}

/* At all addresses, both families where there are two. */
static bool dtrain__listen_everywhere(dtrain__rendezvous *r)
{
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    memset(&six, 0, sizeof six);
    memset(&four, 0, sizeof four);
    six.sin6_family = AF_INET6;
    four.sin_family = AF_INET;
    six.sin6_port = four.sin_port = htons((uint16_t)r->place->port);
    dtrain_log(r->world, DTRAIN_LOG_INFO,
               "%s leads to no address of this host that others can call: rank 0 listens at all",
               r->place->address);
    return dtrain__listen_at(r, (const struct sockaddr *)(const void *)&six, sizeof six) ||
           dtrain__listen_at(r, (const struct sockaddr *)(const void *)&four, sizeof four);
}

/* At the address the others will call, so that nothing else is opened. */
static dtrain_result dtrain__listen(dtrain__rendezvous *r)
{
    struct addrinfo *found = dtrain__resolve(r);
    while (!found && dtrain__meet_nap(r, 500)) found = dtrain__resolve(r);
    if (!found)
        return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT, "rank 0's address %s: %s",
                                 r->place->address, r->stranger);
    bool done = false;
    for (const struct addrinfo *at = found; at && !done; at = at->ai_next)
        if (!dtrain__is_alias(r->place->address, at->ai_addr))
            done = dtrain__listen_at(r, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
    if (!done && !dtrain__listen_everywhere(r))
        dtrain__meet_fail(r, DTRAIN_ERROR_SYSTEM, "rank 0 has no socket: %s", strerror(errno));
    return r->result;
}

/* Said and closed in this order, or the other end might lose the sentence. */
static void dtrain__refuse(dtrain__connection *end, dtrain_result code, const char *text)
{
    if (end->socket < 0 || end->stage == DTRAIN__LEAVING) return;
    dtrain__frame_put(end, DTRAIN__REFUSED, 0, code, 0, text, strlen(text));
    (void)dtrain__flush(end);
    shutdown(end->socket, SHUT_WR);
    end->stage = DTRAIN__LEAVING;
}

static void dtrain__turn_away(dtrain__rendezvous *r, dtrain__connection *guest, dtrain_result code,
                              const char *why)
{
    snprintf(r->stranger, sizeof r->stranger, "%s %s", guest->name, why);
    if (r->strangers++ == 0)
        dtrain_log(
            r->world, DTRAIN_LOG_WARNING,
            "rendezvous: a connection from %s was turned away (only the first one is logged)",
            r->stranger);
    if (code == DTRAIN_OK) dtrain__close(guest);
    else dtrain__refuse(guest, code, why);
}

static void dtrain__hear_hello(dtrain__rendezvous *r, dtrain__connection *guest,
                               const dtrain__frame *frame, const char *data)
{
    if (frame->kind != DTRAIN__HELLO || frame->bytes != sizeof guest->nonce[0]) {
        dtrain__turn_away(r, guest, DTRAIN_OK, "does not begin as a rank does");
    } else if (frame->number != DTRAIN__PROTOCOL) {
        dtrain__turn_away(r, guest, DTRAIN_ERROR_MISMATCH,
                          "speaks another protocol: all ranks need the same version of dtrain");
    } else {
        memcpy(&guest->nonce[0], data, sizeof guest->nonce[0]);
        guest->nonce[1] = dtrain__random();
        const uint64_t proof = dtrain__prove(r->place, guest->nonce, NULL);
        dtrain__frame_put(guest, DTRAIN__CHALLENGE, 0, 0, guest->nonce[1], &proof, sizeof proof);
        (void)dtrain__flush(guest);
        guest->stage = DTRAIN__CHALLENGED;
    }
}

/* The rank has shown that it belongs to this run; now it has to fit in. */
static dtrain_result dtrain__check_card(dtrain__rendezvous *r, const dtrain__connection *guest,
                                        const dtrain__card *card)
{
    const dtrain_world *world = r->world;
    if (strcmp(card->version, DTRAIN_VERSION_STRING) != 0 ||
        card->layout != dtrain__struct_layout())
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) was built with another dtrain, version %s; "
                                 "rank 0 has %s: start the same program on all ranks",
                                 card->rank, card->host, card->pid, card->version,
                                 DTRAIN_VERSION_STRING);
    if (card->size != world->size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) has world size %d, rank 0 has world size %d",
                                 card->rank, card->host, card->pid, card->size, world->size);
    if (card->rank < 0 || card->rank >= world->size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "a rank %d joins (%s, pid %d) in a world of %d", card->rank,
                                 card->host, card->pid, world->size);
    if (r->pids[card->rank])
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d was started twice: as pid %d from %s and as pid %d from "
                                 "%s",
                                 card->rank, r->pids[card->rank],
                                 card->rank ? world->link->ends[card->rank].name : "rank 0's host",
                                 card->pid, guest->name);
    return DTRAIN_OK;
}

static void dtrain__hear_join(dtrain__rendezvous *r, dtrain__connection *guest,
                              const dtrain__frame *frame, const char *data)
{
    dtrain__card card;
    if (frame->kind == DTRAIN__JOIN && frame->bytes == sizeof card)
        memcpy(&card, data, sizeof card);
    else memset(&card, 0, sizeof card);
    card.version[sizeof card.version - 1] = card.host[sizeof card.host - 1] = 0;
    if (frame->kind != DTRAIN__JOIN || frame->bytes != sizeof card ||
        card.proof != dtrain__prove(r->place, guest->nonce, &card)) {
        dtrain__turn_away(r, guest, DTRAIN_ERROR_MISMATCH,
                          "has another DTRAIN_JOB_KEY than rank 0 or belongs to another run");
        return;
    }
    dtrain__frame_drop(guest, frame);
    if (r->result != DTRAIN_OK || dtrain__check_card(r, guest, &card) != DTRAIN_OK) {
        dtrain__refuse(guest, r->result, r->why);
        r->told++;
        return;
    }
    dtrain__connection *seat = &r->world->link->ends[card.rank];
    seat->socket = guest->socket;
    seat->in_bytes = guest->in_bytes;
    memcpy(seat->in, guest->in, guest->in_bytes);
    memcpy(seat->name, guest->name, sizeof seat->name);
    guest->socket = -1;
    r->pids[card.rank] = card.pid ? card.pid : -1;
    r->here++;
}

static void dtrain__hear_guest(dtrain__rendezvous *r, dtrain__connection *guest)
{
    dtrain__frame frame;
    const bool open = dtrain__receive(guest);
    if (guest->stage == DTRAIN__LEAVING) guest->in_bytes = 0;
    const int there = guest->stage == DTRAIN__LEAVING ? 0 : dtrain__frame_get(guest, &frame);
    if (there < 0) {
        dtrain__turn_away(r, guest, DTRAIN_OK, "does not begin as a rank does");
    } else if (there && guest->stage == DTRAIN__CHALLENGED) {
        dtrain__hear_join(r, guest, &frame, guest->in + sizeof frame);
    } else if (there) {
        dtrain__hear_hello(r, guest, &frame, guest->in + sizeof frame);
        if (guest->stage == DTRAIN__CHALLENGED) dtrain__frame_drop(guest, &frame);
    }
    if (!open) dtrain__close(guest);
}

static void dtrain__admit(dtrain__rendezvous *r)
{
    for (int i = 0; i < DTRAIN__GUESTS; i++) {
        dtrain__connection *guest = &r->guests[i];
        struct sockaddr_storage address;
        struct sockaddr *from = (struct sockaddr *)(void *)&address;
        socklen_t length = sizeof address;
        if (guest->socket >= 0) continue;
        const int socket = accept(r->listener, from, &length); /* accept4 may be hidden */
        if (socket < 0) return;
        fcntl(socket, F_SETFD, FD_CLOEXEC);
        fcntl(socket, F_SETFL, O_NONBLOCK);
        memset(guest, 0, sizeof *guest);
        guest->socket = socket;
        guest->rank = -1;
        guest->opened_ns = dtrain__now_ns();
        dtrain__socket_tune(socket);
        dtrain__name_address(from, length, guest->name, sizeof guest->name);
    }
}

/* "2, 5 and 7" */
static void dtrain__missing_ranks(const dtrain__rendezvous *r, char *text, size_t room)
{
    size_t used = 0;
    int left = r->world->size - 1 - r->here;
    text[0] = 0;
    for (int i = 1; i < r->world->size && used + 24 < room; i++) {
        if (r->pids[i]) continue;
        left--;
        used += (size_t)snprintf(text + used, room - used, "%s%d",
                                 used ? left ? ", " : " and " : "", i);
    }
    if (left) snprintf(text + used, room - used, " and %d more", left);
}

static void dtrain__meet_clock(dtrain__rendezvous *r)
{
    const uint64_t now = dtrain__now_ns();
    char missing[160];
    for (int i = 0; i < DTRAIN__GUESTS; i++)
        if (r->guests[i].socket >= 0 && now - r->guests[i].opened_ns > DTRAIN__GUEST_NS)
            dtrain__turn_away(r, &r->guests[i], DTRAIN_OK, "did not say in time what it wants");
    if (now < r->deadline_ns && now - r->said_ns < 10000000000u) return;
    r->said_ns = now;
    dtrain__missing_ranks(r, missing, sizeof missing);
    if (now < r->deadline_ns)
        dtrain_log(r->world, DTRAIN_LOG_INFO, "rank 0 waits at %s port %u for rank %s of %d",
                   r->place->address, r->place->port, missing, r->world->size);
    else
        dtrain__meet_fail(
            r, DTRAIN_ERROR_TIMEOUT,
            "rank 0 waited %.1f s at %s port %u, and of %d ranks these have not come: "
            "%s%s%s",
            1e-9 * (double)(now - r->start_ns), r->place->address, r->place->port, r->world->size,
            missing, r->strangers ? "; last turned away: " : "", r->strangers ? r->stranger : "");
}

/* One round: whoever has something to say is heard, nobody is waited for. */
static void dtrain__meet_round(dtrain__rendezvous *r)
{
    struct pollfd polls[1 + DTRAIN__GUESTS + DTRAIN_MAX_RANKS];
    dtrain__connection *ends[1 + DTRAIN__GUESTS + DTRAIN_MAX_RANKS];
    const int seats = 1 + DTRAIN__GUESTS, count = seats + r->world->size;
    bool room = false;
    for (int i = 1; i < count; i++) {
        ends[i] = i < seats ? &r->guests[i - 1] : &r->world->link->ends[i - seats];
        polls[i].fd = ends[i]->socket;
        polls[i].events = POLLIN;
        if (i < seats && polls[i].fd < 0) room = true;
    }
    polls[0].fd = room ? r->listener : -1;
    polls[0].events = POLLIN;
    const int ready = poll(polls, (nfds_t)count, 100);
    for (int i = 1; ready > 0 && i < count; i++) {
        if (!polls[i].revents) continue;
        if (i < seats) {
            dtrain__hear_guest(r, ends[i]);
            continue;
        }
        dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank %d (%s) left before all ranks had come",
                          i - seats, ends[i]->name);
        dtrain__close(ends[i]);
        r->told++;
    }
    if (ready > 0 && polls[0].revents) dtrain__admit(r);
    dtrain__meet_clock(r);
}

/* Ranks that are here learn how it ended, and go when it failed. */
static void dtrain__tell_seats(dtrain__rendezvous *r)
{
    for (int i = 1; i < r->world->size; i++) {
        dtrain__connection *end = &r->world->link->ends[i];
        if (end->socket < 0) continue;
        if (r->result == DTRAIN_OK) {
            dtrain__frame_put(end, DTRAIN__BEGIN, 0, 0, 0, NULL, 0);
            (void)dtrain__flush(end); /* the first bytes in an empty buffer: they fit */
        } else {
            dtrain__refuse(end, r->result, r->why);
            dtrain__close(end);
            r->told++;
        }
    }
}

/* Waits for all ranks; after a failure a little longer, for those who have yet to come and hear of
 * it. */
static void dtrain__meet_all(dtrain__rendezvous *r)
{
    while (r->result == DTRAIN_OK && r->here + 1 < r->world->size) dtrain__meet_round(r);
    dtrain__tell_seats(r);
    const uint64_t now = dtrain__now_ns(), most = now + DTRAIN__TELL_NS;
    const uint64_t end_ns = most < r->deadline_ns ? most : r->deadline_ns;
    while (r->result != DTRAIN_OK && r->told + 1 < r->world->size && dtrain__now_ns() < end_ns)
        dtrain__meet_round(r);
}

static dtrain_result dtrain__host_world(dtrain__rendezvous *r)
{
    const dtrain_allocator *allocator = &r->world->allocator;
    const size_t size = (size_t)r->world->size;
    r->guests = (dtrain__connection *)dtrain__alloc(allocator, DTRAIN__GUESTS, sizeof *r->guests,
                                                    "guests of the rendezvous");
    r->pids = (int32_t *)dtrain__alloc(allocator, size, sizeof *r->pids, "the list of ranks");
    if (!r->guests || !r->pids) {
        dtrain__meet_fail(r, DTRAIN_ERROR_MEMORY, "no memory for the rendezvous");
    } else {
        r->pids[0] = (int32_t)getpid();
        for (int i = 0; i < DTRAIN__GUESTS; i++) r->guests[i].socket = -1;
        if (dtrain__listen(r) == DTRAIN_OK) dtrain__meet_all(r);
        for (int i = 0; i < DTRAIN__GUESTS; i++) dtrain__close(&r->guests[i]);
        if (r->listener >= 0) close(r->listener);
    }
    dtrain__free(allocator, r->pids, size, sizeof *r->pids);
    dtrain__free(allocator, r->guests, DTRAIN__GUESTS, sizeof *r->guests);
    return r->result;
}

/* ---- The other ranks --------------------------------------------------------------------------*/

/* What was wrong with the last try; it may get better until the deadline. */
DTRAIN__PRINTF(2, 3)
static bool dtrain__try_again(dtrain__rendezvous *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->stranger, sizeof r->stranger, format, args);
    va_end(args);
    dtrain__close(&r->world->link->ends[0]);
    return false;
}

/* The next frame from rank 0, at most until `until_ns`: 1; 0 none came; -1 closed or nonsense. */
static int dtrain__await_frame(dtrain__connection *end, uint64_t until_ns, dtrain__frame *frame)
{
    for (;;) {
        const int there = dtrain__frame_get(end, frame);
        const uint64_t now = dtrain__now_ns();
        struct pollfd one;
        if (there) return there;
        if (now >= until_ns) return 0;
        one.fd = end->socket;
        one.events = POLLIN;
        const int ready =
            poll(&one, 1, (int)dtrain__min((int64_t)(until_ns - now) / 1000000 + 1, 1000));
        if (ready > 0 && !dtrain__receive(end)) return -1;
    }
}

static bool dtrain__dial(dtrain__rendezvous *r, const struct addrinfo *at, uint64_t until_ns)
{
    dtrain__connection *end = &r->world->link->ends[0];
    int error = 0;
    socklen_t length = sizeof error;
    struct pollfd one;
    end->in_bytes = end->out_begin = end->out_end = 0;
    dtrain__name_address(at->ai_addr, at->ai_addrlen, end->name, sizeof end->name);
    end->socket = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (end->socket < 0) return dtrain__try_again(r, "no socket: %s", strerror(errno));
    dtrain__socket_tune(end->socket);
    if (connect(end->socket, at->ai_addr, at->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return dtrain__try_again(r, "%s: %s", end->name, strerror(errno));
    one.fd = end->socket;
    one.events = POLLOUT;
    while (poll(&one, 1, 100) <= 0)
        if (dtrain__now_ns() >= until_ns)
            return dtrain__try_again(r, "%s does not answer", end->name);
    if (getsockopt(end->socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    return error ? dtrain__try_again(r, "%s: %s", end->name, strerror(error)) : true;
}

/* The handshake up to JOIN; true when rank 0 has what it needs. */
static bool dtrain__introduce(dtrain__rendezvous *r, uint64_t until_ns, bool *stranger)
{
    dtrain__connection *end = &r->world->link->ends[0];
    const uint64_t mine = dtrain__random();
    dtrain__frame frame;
    dtrain__card card;
    uint64_t proof;
    dtrain__frame_put(end, DTRAIN__HELLO, r->world->rank, 0, DTRAIN__PROTOCOL, &mine, sizeof mine);
    (void)dtrain__flush(end);
    const int there = dtrain__await_frame(end, until_ns, &frame);
    const char *data = end->in + sizeof frame;
    if (there == 1 && frame.kind == DTRAIN__REFUSED)
        return true; /* it is read again by who waits for BEGIN */
    if (there != 1 || frame.kind != DTRAIN__CHALLENGE || frame.bytes != sizeof proof)
        return dtrain__try_again(r, "what listens at %s does not answer as rank 0 does", end->name);
    memcpy(&proof, data, sizeof proof);
    end->nonce[0] = mine;
    end->nonce[1] = frame.number;
    dtrain__frame_drop(end, &frame);
    *stranger = proof != dtrain__prove(r->place, end->nonce, NULL);
    dtrain__card_make(r, end->nonce, &card);
    if (*stranger) dtrain__frame_put(end, DTRAIN__REFUSED, r->world->rank, 0, 0, NULL, 0);
    else dtrain__frame_put(end, DTRAIN__JOIN, r->world->rank, 0, 0, &card, sizeof card);
    (void)dtrain__flush(end);
    if (*stranger)
        return dtrain__try_again(r,
                                 "what listens at %s has another DTRAIN_JOB_KEY than this rank "
                                 "or belongs to another run",
                                 end->name);
    return true;
}

/* Rank 0 has this rank's card: now the others have to come. */
static dtrain_result dtrain__await_begin(dtrain__rendezvous *r)
{
    dtrain__connection *end = &r->world->link->ends[0];
    dtrain__frame frame;
    char text[400];
    const uint64_t slack = 2000000000u; /* rank 0's own deadline has the better sentence */
    const int there = dtrain__await_frame(end, r->deadline_ns + slack, &frame);
    if (there == 1 && frame.kind == DTRAIN__BEGIN) {
        dtrain__frame_drop(end, &frame);
        return DTRAIN_OK;
    }
    if (there == 1 && frame.kind == DTRAIN__REFUSED) {
        dtrain__frame_text(&frame, end->in + sizeof frame, text, sizeof text);
        return dtrain__meet_fail(r, (dtrain_result)frame.value, "%s", text);
    }
    if (there)
        return dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank 0 (%s) left before all ranks had come",
                                 end->name);
    return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT,
                             "rank 0 (%s) has been waiting %.1f s for other ranks", end->name,
                             1e-9 * (double)(dtrain__now_ns() - r->start_ns));
}

/* Calls rank 0 at all its addresses until it answers. It may not have started yet; something else
 * may still be at its port: a run that just ends is given five seconds to go. */
static dtrain_result dtrain__join_world(dtrain__rendezvous *r)
{
    char other_run[sizeof r->stranger] = "";
    uint64_t patience_ns = 0;
    bool joined = false;
    while (!joined) {
        bool stranger = false;
        struct addrinfo *found = dtrain__resolve(r);
        for (const struct addrinfo *at = found; at && !joined; at = at->ai_next) {
            const uint64_t most = dtrain__now_ns() + DTRAIN__GUEST_NS;
            const uint64_t until = most < r->deadline_ns ? most : r->deadline_ns;
            joined = dtrain__dial(r, at, until) && dtrain__introduce(r, until, &stranger);
        }
        if (found) freeaddrinfo(found);
        const uint64_t now = dtrain__now_ns();
        if (joined) break;
        if (stranger) memcpy(other_run, r->stranger, sizeof other_run);
        if (stranger && !patience_ns) patience_ns = now + 5000000000u;
        if (stranger && now >= patience_ns)
            return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH, "%s", other_run);
        if (!dtrain__meet_nap(r, stranger ? 500 : 50))
            return dtrain__meet_fail(r, patience_ns ? DTRAIN_ERROR_MISMATCH : DTRAIN_ERROR_TIMEOUT,
                                     "rank 0 was not found at %s port %u for %.1f s: %s",
                                     r->place->address, r->place->port,
                                     1e-9 * (double)(now - r->start_ns),
                                     patience_ns ? other_run : r->stranger);
    }
    return dtrain__await_begin(r);
}

DTRAIN__PRIVATE dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place)
{
    dtrain__rendezvous r;
    memset(&r, 0, sizeof r);
    const uint64_t most = (uint64_t)DTRAIN__RENDEZVOUS_MS * 1000000u;
    r.world = world;
    r.place = place;
    r.listener = -1;
    r.start_ns = r.said_ns = dtrain__now_ns();
    r.deadline_ns = r.start_ns + (world->timeout_ns < most ? world->timeout_ns : most);
    if ((world->rank ? dtrain__join_world(&r) : dtrain__host_world(&r)) == DTRAIN_OK)
        return DTRAIN_OK;
    return dtrain_fail(r.result, "rendezvous: %s", r.why);
}
