/* The rendezvous: how ranks of a launcher meet
 *
 *     rank r                                          rank 0, listening
 *     HELLO: protocol, version, layout, rank,   ->
 *            size, pid, host, proof
 *                                               <-    WELCOME: a hash of the proof, at once
 *                                               <-    BEGIN when all ranks are there, or REFUSED
 *                                                     with the sentence that ends the run
 *
 * The proof is the hash of the hello under the key of the run (DTRAIN_JOB_KEY, else what the
 * launcher calls the run), and the hash in the WELCOME is one that only the same key can make; so
 * both ends know that they belong together, and the key itself is not sent.
 *
 * This is defended against:
 * - Strangers: a port scanner, a web browser, a rank of another run, another user who does not know
 *   the key. They are turned away, and the run goes on waiting: a stranger must not end it.
 * - Slow or silent strangers: rank 0 waits for nobody. It reads from up to 64 pending connections
 *   at a time, each has ten seconds to send its hello, and a hello has a fixed size.
 * - Mistakes: ranks that know the key and contradict each other (world size, version of dtrain, the
 *   same rank twice) end the run on all ranks, with both values in the sentence.
 *
 * This is not: the traffic is not encrypted, and a recorded hello is as good as the key. Who can
 * read or change the traffic must be kept away by the network. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/environment_internal.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__PROTOCOL 2u
#define DTRAIN__PENDING_MOST 64        /* further ones wait in the kernel's backlog */
#define DTRAIN__HELLO_NS 10000000000u  /* from connect to the hello, or to the WELCOME */
#define DTRAIN__REFUSAL_NS 3000000000u /* after a failure, for ranks that have yet to come */
#define DTRAIN__RENDEZVOUS_MS 300000u  /* and not more than timeout_ms */

/* The fixed hello of a rank, the data of its first frame. */
typedef struct dtrain__hello {
    uint64_t proof; /* the hash of what follows */
    uint64_t layout;
    int32_t rank, size, pid, unused;
    char version[24], host[72];
} dtrain__hello;

typedef struct dtrain__rendezvous {
    dtrain_world *world;
    const dtrain__placement *place;
    uint64_t start_ns, deadline_ns, logged_ns;
    int listener;
    dtrain__connection *pending; /* (PENDING_MOST) accepted, the hello has not come yet */
    int joined;                  /* ranks that are here, without rank 0 */
    int informed;                /* ranks that have been sent the failure */
    int strangers;
    char problem[200]; /* rank 0: the last stranger; other ranks: why the last try failed */
    dtrain_result result;
    char why[400];
} dtrain__rendezvous;

static uint64_t dtrain__hello_proof(const dtrain__placement *place, const dtrain__hello *hello)
{
    dtrain__hello rest = *hello;
    rest.proof = 0;
    return dtrain__siphash(place->key, &rest, sizeof rest);
}

static uint64_t dtrain__welcome_proof(const dtrain__placement *place, const dtrain__hello *hello)
{
    return dtrain__siphash(place->key, &hello->proof, sizeof hello->proof);
}

/* Hash the sizes that must be equal for ranks to share memory and frames. */
static uint64_t dtrain__struct_layout(void)
{
    const uint64_t none[2] = {0, 0};
    const uint64_t sizes[4] = {sizeof(dtrain__control), sizeof(dtrain__exit_record),
                               sizeof(dtrain__hello), sizeof(void *)};
    return dtrain__siphash(none, sizes, sizeof sizes);
}

static dtrain__hello dtrain__hello_make(const dtrain__rendezvous *r)
{
    dtrain__hello hello;
    memset(&hello, 0, sizeof hello);
    hello.layout = dtrain__struct_layout();
    hello.rank = r->world->rank;
    hello.size = r->world->size;
    hello.pid = (int32_t)getpid();
    snprintf(hello.version, sizeof hello.version, "%s", DTRAIN_VERSION_STRING);
    if (gethostname(hello.host, sizeof hello.host - 1) != 0) hello.host[0] = 0;
    hello.proof = dtrain__hello_proof(r->place, &hello);
    return hello;
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

/* Send small frames at once, and notice within some 30 s that a host has gone: by keepalive (10 s
 * of silence, then 4 probes 5 s apart) or by data that nobody acknowledges. */
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

/* Resolve the name of rank 0's host; NULL, and r->problem says why. "[::1]" is "::1". */
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
    snprintf(r->problem, sizeof r->problem, "the name cannot be resolved: %s", gai_strerror(error));
    return NULL;
}

/* Sleep, but not beyond the deadline; false when it has passed. */
static bool dtrain__meet_nap(const dtrain__rendezvous *r, int ms)
{
    const uint64_t now = dtrain__now_ns();
    if (now >= r->deadline_ns) return false;
    const uint64_t left = (r->deadline_ns - now) / 1000000u + 1;
    (void)poll(NULL, 0, left < (uint64_t)ms ? (int)left : ms);
    return true;
}

/* ---- Rank 0 -----------------------------------------------------------------------------------*/

/* Listen at one address. True when that decides it, by success or by a failure of the run; false
 * when another address should be tried. */
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

/* Find names that lead to a loopback address: many systems give one to their own host name, and
 * other hosts cannot call it. */
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

/* Listen at all addresses of this host, of both families where there are two. */
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

/* Listen at the address that the others will call, so that no other one is opened. */
static dtrain_result dtrain__listen(dtrain__rendezvous *r)
{
    struct addrinfo *found = dtrain__resolve(r);
    while (!found && dtrain__meet_nap(r, 500)) found = dtrain__resolve(r);
    if (!found)
        return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT, "rank 0's address %s: %s",
                                 r->place->address, r->problem);
    bool done = false;
    for (const struct addrinfo *at = found; at && !done; at = at->ai_next)
        if (!dtrain__is_alias(r->place->address, at->ai_addr))
            done = dtrain__listen_at(r, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
    if (!done && !dtrain__listen_everywhere(r))
        dtrain__meet_fail(r, DTRAIN_ERROR_SYSTEM, "rank 0 has no socket: %s", strerror(errno));
    return r->result;
}

/* Close the connection of a stranger and remember it for the sentence of a timeout. */
static void dtrain__turn_away(dtrain__rendezvous *r, dtrain__connection *end, const char *why)
{
    snprintf(r->problem, sizeof r->problem, "%s %s", end->name, why);
    if (r->strangers++ == 0)
        dtrain_log(
            r->world, DTRAIN_LOG_WARNING,
            "rendezvous: a connection from %s was turned away (only the first one is logged)",
            r->problem);
    dtrain__connection_close(end);
}

/* Tell a rank the sentence that ends the run. Nothing that the rank has sent is unread, so closing
 * does not reset the connection, and the sentence arrives. */
static void dtrain__refuse(dtrain__rendezvous *r, dtrain__connection *end)
{
    dtrain__frame_send(end, DTRAIN__FRAME_REFUSED, 0, r->result, 0, r->why, strlen(r->why));
    dtrain__connection_close(end);
    r->informed++;
}

/* Check that a rank of this run fits in. */
static dtrain_result dtrain__check_hello(dtrain__rendezvous *r, const dtrain__connection *end,
                                         const dtrain__hello *hello)
{
    const dtrain__connection *seats = r->world->link->ends;
    const int size = r->world->size;
    if (strcmp(hello->version, DTRAIN_VERSION_STRING) != 0 ||
        hello->layout != dtrain__struct_layout())
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) was built with another dtrain, version %s; "
                                 "rank 0 has %s: start the same program on all ranks",
                                 hello->rank, hello->host, hello->pid, hello->version,
                                 DTRAIN_VERSION_STRING);
    if (hello->size != size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) has world size %d, rank 0 has world size %d",
                                 hello->rank, hello->host, hello->pid, hello->size, size);
    if (hello->rank < 0 || hello->rank >= size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "a rank %d joins (%s, pid %d) in a world of %d", hello->rank,
                                 hello->host, hello->pid, size);
    if (hello->rank == 0 || seats[hello->rank].socket >= 0)
        return dtrain__meet_fail(
            r, DTRAIN_ERROR_MISMATCH,
            "rank %d was started twice: as pid %d from %s and as pid %d from %s", hello->rank,
            hello->rank ? seats[hello->rank].pid : (int32_t)getpid(),
            hello->rank ? seats[hello->rank].name : "rank 0's host", hello->pid, end->name);
    return DTRAIN_OK;
}

/* Give the pending connection to its rank, if its hello is one of this run. */
static void dtrain__admit(dtrain__rendezvous *r, dtrain__connection *end, const char *data)
{
    dtrain__hello hello;
    memcpy(&hello, data, sizeof hello);
    dtrain__frame_send(end, DTRAIN__FRAME_WELCOME, 0, 0, dtrain__welcome_proof(r->place, &hello),
                       NULL, 0);
    if (hello.proof != dtrain__hello_proof(r->place, &hello)) {
        dtrain__turn_away(r, end,
                          "has another DTRAIN_JOB_KEY than rank 0 or belongs to another run");
        return;
    }
    hello.version[sizeof hello.version - 1] = hello.host[sizeof hello.host - 1] = 0;
    if (r->result != DTRAIN_OK || dtrain__check_hello(r, end, &hello) != DTRAIN_OK) {
        dtrain__refuse(r, end);
        return;
    }
    dtrain__connection *seat = &r->world->link->ends[hello.rank];
    seat->socket = end->socket;
    seat->pid = hello.pid;
    memcpy(seat->name, end->name, sizeof seat->name);
    end->socket = -1;
    r->joined++;
}

static void dtrain__hear_pending(dtrain__rendezvous *r, dtrain__connection *end)
{
    dtrain__frame frame;
    const bool open = dtrain__frame_receive(end);
    const int there = dtrain__frame_get(end, &frame);
    if (there == 1 && frame.kind == DTRAIN__FRAME_HELLO && frame.number != DTRAIN__PROTOCOL) {
        static const char why[] =
            "speaks another protocol: all ranks need the same version of dtrain";
        dtrain__frame_send(end, DTRAIN__FRAME_REFUSED, 0, DTRAIN_ERROR_MISMATCH, 0, why,
                           sizeof why - 1);
        dtrain__turn_away(r, end, why);
    } else if (there == 1 && frame.kind == DTRAIN__FRAME_HELLO &&
               frame.bytes == sizeof(dtrain__hello)) {
        dtrain__admit(r, end, end->in + sizeof frame);
    } else if (there) {
        dtrain__turn_away(r, end, "does not begin as a rank does");
    } else if (!open) {
        dtrain__connection_close(end);
    }
}

static void dtrain__accept_pending(dtrain__rendezvous *r)
{
    for (int i = 0; i < DTRAIN__PENDING_MOST; i++) {
        dtrain__connection *end = &r->pending[i];
        struct sockaddr_storage address;
        struct sockaddr *from = (struct sockaddr *)(void *)&address;
        socklen_t length = sizeof address;
        if (end->socket >= 0) continue;
        const int socket = accept(r->listener, from, &length); /* accept4 may be hidden */
        if (socket < 0) return;
        fcntl(socket, F_SETFD, FD_CLOEXEC);
        fcntl(socket, F_SETFL, O_NONBLOCK);
        end->socket = socket;
        end->in_bytes = 0;
        end->opened_ns = dtrain__now_ns();
        dtrain__socket_tune(socket);
        dtrain__name_address(from, length, end->name, sizeof end->name);
    }
}

/* "2, 5 and 7" */
static void dtrain__missing_ranks(const dtrain__rendezvous *r, char *text, size_t room)
{
    size_t used = 0;
    int left = r->world->size - 1 - r->joined;
    text[0] = 0;
    for (int i = 1; i < r->world->size && used + 24 < room; i++) {
        if (r->world->link->ends[i].socket >= 0) continue;
        left--;
        used += (size_t)snprintf(text + used, room - used, "%s%d",
                                 used ? left ? ", " : " and " : "", i);
    }
    if (left) snprintf(text + used, room - used, " and %d more", left);
}

/* Keep the deadlines: of each pending connection and of the rendezvous. */
static void dtrain__meet_clock(dtrain__rendezvous *r)
{
    const uint64_t now = dtrain__now_ns();
    char missing[160];
    for (int i = 0; i < DTRAIN__PENDING_MOST; i++)
        if (r->pending[i].socket >= 0 && now - r->pending[i].opened_ns > DTRAIN__HELLO_NS)
            dtrain__turn_away(r, &r->pending[i], "did not say in time what it wants");
    if (r->result != DTRAIN_OK || (now < r->deadline_ns && now - r->logged_ns < 10000000000u))
        return;
    r->logged_ns = now;
    dtrain__missing_ranks(r, missing, sizeof missing);
    if (now < r->deadline_ns)
        dtrain_log(r->world, DTRAIN_LOG_INFO, "rank 0 waits at %s port %u for rank %s of %d",
                   r->place->address, r->place->port, missing, r->world->size);
    else
        dtrain__meet_fail(
            r, DTRAIN_ERROR_TIMEOUT,
            "rank 0 waited %.1f s at %s port %u, and of %d ranks these have not come: %s%s%s",
            1e-9 * (double)(now - r->start_ns), r->place->address, r->place->port, r->world->size,
            missing, r->strangers ? "; last turned away: " : "", r->strangers ? r->problem : "");
}

/* Hear whoever has something to say, for at most 0.1 s. A rank that has joined has nothing to say
 * before BEGIN, so its socket can only have been closed. */
static void dtrain__meet_round(dtrain__rendezvous *r)
{
    struct pollfd polls[1 + DTRAIN__PENDING_MOST + DTRAIN_MAX_RANKS];
    dtrain__connection *ends[1 + DTRAIN__PENDING_MOST + DTRAIN_MAX_RANKS];
    const int seats = 1 + DTRAIN__PENDING_MOST, count = seats + r->world->size;
    bool room = false;
    for (int i = 1; i < count; i++) {
        ends[i] = i < seats ? &r->pending[i - 1] : &r->world->link->ends[i - seats];
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
            dtrain__hear_pending(r, ends[i]);
            continue;
        }
        dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank %d (%s) left before all ranks had come",
                          i - seats, ends[i]->name);
        dtrain__connection_close(ends[i]);
        r->informed++;
    }
    if (ready > 0 && polls[0].revents) dtrain__accept_pending(r);
    dtrain__meet_clock(r);
}

/* Wait for all ranks and tell them how it went; after a failure, wait a little longer for those who
 * have yet to come and be told. */
static void dtrain__meet_all(dtrain__rendezvous *r)
{
    const int others = r->world->size - 1;
    while (r->result == DTRAIN_OK && r->joined < others) dtrain__meet_round(r);
    for (int i = 1; i <= others; i++) {
        dtrain__connection *end = &r->world->link->ends[i];
        if (end->socket < 0) continue;
        if (r->result != DTRAIN_OK) dtrain__refuse(r, end);
        else dtrain__frame_send(end, DTRAIN__FRAME_BEGIN, 0, 0, 0, NULL, 0);
    }
    const uint64_t most = dtrain__now_ns() + DTRAIN__REFUSAL_NS;
    const uint64_t end_ns = most < r->deadline_ns ? most : r->deadline_ns;
    while (r->result != DTRAIN_OK && r->informed < others && dtrain__now_ns() < end_ns)
        dtrain__meet_round(r);
}

static dtrain_result dtrain__host_world(dtrain__rendezvous *r)
{
    const dtrain_allocator *allocator = &r->world->allocator;
    r->pending = (dtrain__connection *)dtrain__alloc(allocator, DTRAIN__PENDING_MOST,
                                                     sizeof *r->pending, "pending connections");
    if (!r->pending)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MEMORY, "no memory for the rendezvous");
    for (int i = 0; i < DTRAIN__PENDING_MOST; i++) r->pending[i].socket = -1;
    if (dtrain__listen(r) == DTRAIN_OK) dtrain__meet_all(r);
    for (int i = 0; i < DTRAIN__PENDING_MOST; i++) dtrain__connection_close(&r->pending[i]);
    if (r->listener >= 0) close(r->listener);
    dtrain__free(allocator, r->pending, DTRAIN__PENDING_MOST, sizeof *r->pending);
    return r->result;
}

/* ---- The other ranks --------------------------------------------------------------------------*/

/* Note what was wrong with the last try; it may get better until the deadline. */
DTRAIN__PRINTF(2, 3)
static bool dtrain__try_failed(dtrain__rendezvous *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->problem, sizeof r->problem, format, args);
    va_end(args);
    dtrain__connection_close(&r->world->link->ends[0]);
    return false;
}

/* Wait for the next frame from rank 0, at most until `until_ns`: 1 it is there; 0 none came; -1 the
 * connection was closed or what came is no frame. */
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
        if (ready > 0 && !dtrain__frame_receive(end)) return -1;
    }
}

static bool dtrain__dial(dtrain__rendezvous *r, const struct addrinfo *at, uint64_t until_ns)
{
    dtrain__connection *end = &r->world->link->ends[0];
    int error = 0;
    socklen_t length = sizeof error;
    struct pollfd one;
    end->in_bytes = 0;
    dtrain__name_address(at->ai_addr, at->ai_addrlen, end->name, sizeof end->name);
    end->socket = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (end->socket < 0) return dtrain__try_failed(r, "no socket: %s", strerror(errno));
    dtrain__socket_tune(end->socket);
    if (connect(end->socket, at->ai_addr, at->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return dtrain__try_failed(r, "%s: %s", end->name, strerror(errno));
    one.fd = end->socket;
    one.events = POLLOUT;
    while (poll(&one, 1, 100) <= 0)
        if (dtrain__now_ns() >= until_ns)
            return dtrain__try_failed(r, "%s does not answer", end->name);
    if (getsockopt(end->socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    return error ? dtrain__try_failed(r, "%s: %s", end->name, strerror(error)) : true;
}

/* Say hello and read the WELCOME; true when rank 0 was found. *stranger: it is one of another run.
 * A REFUSED is left to await_begin, which knows what to do with it. */
static bool dtrain__introduce(dtrain__rendezvous *r, uint64_t until_ns, bool *stranger)
{
    dtrain__connection *end = &r->world->link->ends[0];
    const dtrain__hello hello = dtrain__hello_make(r);
    dtrain__frame frame;
    dtrain__frame_send(end, DTRAIN__FRAME_HELLO, hello.rank, 0, DTRAIN__PROTOCOL, &hello,
                       sizeof hello);
    const int there = dtrain__await_frame(end, until_ns, &frame);
    if (there == 1 && frame.kind == DTRAIN__FRAME_REFUSED) return true;
    if (there != 1 || frame.kind != DTRAIN__FRAME_WELCOME)
        return dtrain__try_failed(r, "what listens at %s does not answer as rank 0 does",
                                  end->name);
    dtrain__frame_drop(end, &frame);
    *stranger = frame.number != dtrain__welcome_proof(r->place, &hello);
    if (!*stranger) return true;
    return dtrain__try_failed(r,
                              "what listens at %s has another DTRAIN_JOB_KEY than this rank or "
                              "belongs to another run",
                              end->name);
}

/* Wait for BEGIN: rank 0 knows this rank, now the others have to come. */
static dtrain_result dtrain__await_begin(dtrain__rendezvous *r)
{
    dtrain__connection *end = &r->world->link->ends[0];
    dtrain__frame frame;
    char text[400];
    const uint64_t slack = 2000000000u; /* rank 0's own deadline has the better sentence */
    const int there = dtrain__await_frame(end, r->deadline_ns + slack, &frame);
    if (there == 1 && frame.kind == DTRAIN__FRAME_BEGIN) {
        dtrain__frame_drop(end, &frame);
        return DTRAIN_OK;
    }
    if (there == 1 && frame.kind == DTRAIN__FRAME_REFUSED) {
        dtrain__frame_text(&frame, end->in + sizeof frame, text, sizeof text);
        return dtrain__meet_fail(r, frame.value ? (dtrain_result)frame.value : DTRAIN_ERROR_PEER,
                                 "%s", text);
    }
    if (there)
        return dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank 0 (%s) left before all ranks had come",
                                 end->name);
    return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT,
                             "rank 0 (%s) has been waiting %.1f s for other ranks", end->name,
                             1e-9 * (double)(dtrain__now_ns() - r->start_ns));
}

/* Call rank 0 at all its addresses until it answers. It may not have started yet, and something
 * else may still be at its port: a run that just ends is given five seconds to go. */
static dtrain_result dtrain__join_world(dtrain__rendezvous *r)
{
    char other_run[sizeof r->problem] = "";
    uint64_t patience_ns = 0;
    bool joined = false;
    while (!joined) {
        bool stranger = false;
        struct addrinfo *found = dtrain__resolve(r);
        for (const struct addrinfo *at = found; at && !joined; at = at->ai_next) {
            const uint64_t most = dtrain__now_ns() + DTRAIN__HELLO_NS;
            const uint64_t until = most < r->deadline_ns ? most : r->deadline_ns;
            joined = dtrain__dial(r, at, until) && dtrain__introduce(r, until, &stranger);
        }
        if (found) freeaddrinfo(found);
        const uint64_t now = dtrain__now_ns();
        if (joined) break;
        if (stranger) memcpy(other_run, r->problem, sizeof other_run);
        if (stranger && !patience_ns) patience_ns = now + 5000000000u;
        if (stranger && now >= patience_ns)
            return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH, "%s", other_run);
        if (!dtrain__meet_nap(r, stranger ? 500 : 50))
            return dtrain__meet_fail(r, patience_ns ? DTRAIN_ERROR_MISMATCH : DTRAIN_ERROR_TIMEOUT,
                                     "rank 0 was not found at %s port %u for %.1f s: %s",
                                     r->place->address, r->place->port,
                                     1e-9 * (double)(now - r->start_ns),
                                     patience_ns ? other_run : r->problem);
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
    r.start_ns = r.logged_ns = dtrain__now_ns();
    r.deadline_ns = r.start_ns + (world->timeout_ns < most ? world->timeout_ns : most);
    if ((world->rank ? dtrain__join_world(&r) : dtrain__host_world(&r)) == DTRAIN_OK)
        return DTRAIN_OK;
    return dtrain_fail(r.result, "rendezvous: %s", r.why);
}
