/* The rendezvous: how the ranks of a launcher connect
 *
 *     rank r                                           rank 0, listening
 *     hello: magic, version, layout, job,        ->
 *            rank, size, pid, host, proof
 *                                                <-    reply, at once: rank r is in, or a
 *                                                      sentence that says why not
 *
 * The connection then belongs to the link (link.c), and all ranks gather. The gathering ends when
 * the last rank has connected. If a rank does not connect, rank 0 aborts with a sentence.
 *
 * A proof is a hash under the key of the run (DTRAIN_JOB_KEY, else the launcher's name of the run).
 * The proof of a hello covers its other fields. The proof of a reply also covers the proof of the
 * hello. So both ends know that they belong to one run, and the key itself is never sent.
 *
 * The rendezvous handles:
 * - Strangers: a port scanner, a web browser, a rank of another run, a user without the key. Rank 0
 *   refuses them and continues to wait: a stranger must not end the run.
 * - Slow or silent strangers: rank 0 never blocks on a connection. It reads from 64 pending
 *   connections at a time, and a further one replaces the oldest.
 * - Another job at the port, if neither job has a key: its ranks have another desc.job. Rank 0
 *   refuses them while its own ranks connect.
 * - Mistakes: ranks that know the key and contradict each other (world size, version of dtrain, the
 *   same rank twice) end the run on all ranks, with both values in the sentence.
 *
 * The traffic is not encrypted, and a recorded hello is as good as the key. The network must keep
 * readers away. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__HELLO_MAGIC 0x374b5444u /* "DTK7": the seventh protocol */
#define DTRAIN__PENDING_MOST 64u
#ifndef POLLRDHUP /* Linux has it; libc shows it where _GNU_SOURCE came first */
#define POLLRDHUP 0x2000
#endif
#define DTRAIN__ANSWER_NS 10000000000u  /* limit of a connect and its reply */
#define DTRAIN__PATIENCE_NS 5000000000u /* how long to wait for another run at the port to end */
#define DTRAIN__REFUSAL_NS 3000000000u  /* how long a failed rank 0 answers ranks that come late */
#define DTRAIN__REPLY_OTHER_JOB 1
#define DTRAIN__OTHER_JOB_NS 10000000000u /* how long to prefer ranks of this job: other_job */

typedef struct dtrain__hello {
    uint32_t magic;
    int32_t rank, size, pid;
    uint64_t layout, job;
    char version[24], host[72];
    uint64_t proof;
} dtrain__hello;

typedef struct dtrain__reply {
    int32_t result, unused; /* dtrain_result, or REPLY_OTHER_JOB */
    char why[400];
    uint64_t proof;
} dtrain__reply;

/* A connection that rank 0 has accepted, before its hello is complete. */
typedef struct dtrain__pending {
    int socket; /* -1: none */
    size_t got;
    dtrain__hello hello;
} dtrain__pending;

typedef struct dtrain__rendezvous {
    dtrain_world *world;
    const dtrain__placement *place;
    uint64_t start_ns, deadline_ns, logged_ns;
    char problem[200]; /* rank 0: the last stranger; other ranks: why the last call failed */
    uint64_t other_ns; /* rank 0: time of the first hello from another job; 0: none */
    bool stranger;     /* other ranks: rank 0 of another run has answered */
    uint64_t until_ns; /* after `stranger`: time until which the other run can still end */

    /* Rank 0. */
    int listener;
    int came;                                      /* number of ranks that got a reply */
    dtrain__pending pending[DTRAIN__PENDING_MOST]; /* connection n is at n % PENDING_MOST */
    uint32_t accepted;                             /* connections so far */
    bool answered[DTRAIN_MAX_RANKS];
} dtrain__rendezvous;

/* Hash a message without the proof at its end, under the key of the run. `challenge` is the proof
 * that a reply answers, 0 for a hello. */
static uint64_t dtrain__proof(const dtrain__rendezvous *r, uint64_t challenge, const void *message,
                              size_t bytes)
{
    const uint64_t *key = r->place->key;
    const uint64_t chain[2] = {dtrain__siphash(key, &challenge, sizeof challenge), key[1]};
    return dtrain__siphash(chain, message, bytes - sizeof(uint64_t));
}

/* Hash the sizes of the structs that ranks share in memory or send. They must be equal. */
DTRAIN__PRIVATE uint64_t dtrain__shared_sizes(void)
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
    hello.magic = DTRAIN__HELLO_MAGIC;
    hello.rank = r->world->rank;
    hello.size = r->world->size;
    hello.pid = (int32_t)getpid();
    hello.layout = dtrain__shared_sizes();
    hello.job = r->place->job;
    snprintf(hello.version, sizeof hello.version, "%s", DTRAIN_VERSION_STRING);
    if (gethostname(hello.host, sizeof hello.host - 1) != 0) hello.host[0] = 0;
    hello.proof = dtrain__proof(r, 0, &hello, sizeof hello);
    return hello;
}

/* Return true after a failure: the abort in the control page is the result of all ranks. */
static bool dtrain__meet_failed(const dtrain__rendezvous *r)
{
    return dtrain__load(&r->world->control->aborted.state) == 2;
}

/* Log every 10 s which ranks are missing; abort with that sentence if `late` is an error. */
static void dtrain__meet_missing(dtrain__rendezvous *r, dtrain_result late, const char *text)
{
    if (late != DTRAIN_OK) dtrain_world_abort(r->world, late, text);
    else if (dtrain__now_ns() - r->logged_ns >= 10000000000u) {
        r->logged_ns = dtrain__now_ns();
        dtrain_log(r->world, DTRAIN_LOG_WARNING, "%s", text);
    }
}

/* Set the options of a socket. Small frames are sent at once. A lost host is noticed within 30 s:
 * by keepalive (10 s of silence, then 4 probes 5 s apart) or by unacknowledged data. */
static void dtrain__socket_tune(int socket)
{
    static const int options[][2] = {{TCP_NODELAY, 1},
                                     {TCP_KEEPIDLE, 10},
                                     {TCP_KEEPINTVL, 5},
                                     {TCP_KEEPCNT, 4},
                                     {TCP_USER_TIMEOUT, 30000}};
    const int on = 1;
    fcntl(socket, F_SETFD, FD_CLOEXEC);
    fcntl(socket, F_SETFL, O_NONBLOCK);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(socket, IPPROTO_TCP, options[i][0], &options[i][1], sizeof options[i][1]);
}

/* Send a message that fits in the kernel's buffer; false if the connection is broken. */
static bool dtrain__send_whole(int socket, const void *message, size_t bytes)
{
    size_t sent = 0;
    for (int tries = 0; sent < bytes && tries < 100; tries++) {
        const ssize_t more = send(socket, (const char *)message + sent, bytes - sent, MSG_NOSIGNAL);
        if (more > 0) sent += (size_t)more;
        else if (!dtrain__try_again(errno)) return false;
        else (void)poll(NULL, 0, 1);
    }
    return sent == bytes;
}

/* ---- Rank 0 -----------------------------------------------------------------------------------*/

/* Listen at all addresses of this host, with one socket for IPv6 and IPv4 if both exist. If rank
 * 0's address is a loopback address, listen only there. */
static bool dtrain__listen(dtrain__rendezvous *r)
{
    const char *host = r->place->address;
    const int on = 1, off = 0;
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    memset(&six, 0, sizeof six);
    memset(&four, 0, sizeof four);
    six.sin6_family = AF_INET6;
    four.sin_family = AF_INET;
    six.sin6_port = four.sin_port = htons((uint16_t)r->place->port);
    if (strcmp(host, "::1") == 0) six.sin6_addr = in6addr_loopback;
    if (strcmp(host, "localhost") == 0) host = "127.0.0.1";
    const bool loopback = strncmp(host, "127.", 4) == 0;
    if (loopback) inet_pton(AF_INET, host, &four.sin_addr);
    const int type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
    r->listener = loopback ? -1 : dtrain__above_stdio(socket(AF_INET6, type, 0));
    const bool both = r->listener >= 0;
    if (!both) r->listener = dtrain__above_stdio(socket(AF_INET, type, 0));
    if (both) setsockopt(r->listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    const struct sockaddr *address = (const struct sockaddr *)(both ? (void *)&six : (void *)&four);
    if (r->listener >= 0 &&
        setsockopt(r->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(r->listener, address, both ? sizeof six : sizeof four) == 0 &&
        listen(r->listener, SOMAXCONN) == 0)
        return true;
    const int error = errno;
    dtrain__socket_close(&r->listener);
    (void)dtrain__abort_with(
        r->world, DTRAIN_ERROR_SYSTEM,
        "rank 0 cannot listen at %s port %u: %s; is another run there? Set DTRAIN_PORT, the same "
        "on all ranks, to a free port",
        host, r->place->port, strerror(error));
    return false;
}

/* Answer the hello with this proof; false if the connection is broken. */
static bool dtrain__reply_to(const dtrain__rendezvous *r, int socket, uint64_t challenge,
                             int result, const char *why)
{
    dtrain__reply reply;
    memset(&reply, 0, sizeof reply);
    reply.result = result;
    snprintf(reply.why, sizeof reply.why, "%s", why);
    reply.proof = dtrain__proof(r, challenge, &reply, sizeof reply);
    return dtrain__send_whole(socket, &reply, sizeof reply);
}

/* Close the connection of a stranger, and note it for the sentence about missing ranks. */
static void dtrain__turn_away(dtrain__rendezvous *r, dtrain__pending *pending, const char *why)
{
    struct sockaddr_storage address;
    struct sockaddr *from = (struct sockaddr *)(void *)&address;
    socklen_t length = sizeof address;
    char host[64] = "an unknown address", port[16] = "";
    if (getpeername(pending->socket, from, &length) == 0)
        (void)getnameinfo(from, length, host, sizeof host, port, sizeof port,
                          NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(r->problem, sizeof r->problem, "%s port %s %s", host, port, why);
    dtrain__socket_close(&pending->socket);
}

/* Refuse a rank of another job when no key tells the jobs apart. If no rank of this job connects in
 * its place within OTHER_JOB_NS, let it in: it is a rank of this job with other settings, and the
 * programs compare their settings and can say which one differs. */
static bool dtrain__other_job(dtrain__rendezvous *r, dtrain__pending *pending)
{
    const dtrain__hello *hello = &pending->hello;
    const uint64_t now = dtrain__now_ns();
    if (hello->job == r->place->job || dtrain__meet_failed(r)) return false;
    const bool inside = hello->rank > 0 && hello->rank < r->world->size;
    const bool came = inside && r->world->link->ends[hello->rank].socket >= 0;
    if (!r->other_ns)
        dtrain_log(r->world, DTRAIN_LOG_WARNING,
                   "a rank %d with other settings or data than rank 0 has called (%s, pid %d): is "
                   "it of another job at this port? DTRAIN_JOB_KEY tells jobs apart",
                   hello->rank, hello->host, hello->pid);
    if (!r->other_ns) r->other_ns = now;
    if (inside && !came && now - r->other_ns >= DTRAIN__OTHER_JOB_NS) return false;
    (void)dtrain__reply_to(r, pending->socket, hello->proof, DTRAIN__REPLY_OTHER_JOB, "");
    dtrain__turn_away(r, pending, "has other settings or data than rank 0");
    return true;
}

/* Read more of a pending connection. When its hello is complete and belongs to this run, reply and
 * hand the connection to the link. */
static void dtrain__read_pending(dtrain__rendezvous *r, dtrain__pending *pending)
{
    dtrain__hello *hello = &pending->hello;
    const ssize_t got =
        recv(pending->socket, (char *)hello + pending->got, sizeof *hello - pending->got, 0);
    if (got > 0) pending->got += (size_t)got;
    if (pending->got >= sizeof hello->magic && hello->magic != DTRAIN__HELLO_MAGIC) {
        dtrain__turn_away(r, pending, "does not begin as a rank does");
        return;
    }
    if (got == 0 || (got < 0 && !dtrain__try_again(errno))) dtrain__socket_close(&pending->socket);
    if (pending->got < sizeof *hello) return;
    if (hello->proof != dtrain__proof(r, 0, hello, sizeof *hello)) {
        (void)dtrain__reply_to(r, pending->socket, hello->proof, DTRAIN_ERROR_MISMATCH, "");
        dtrain__turn_away(r, pending,
                          "has another DTRAIN_JOB_KEY than rank 0 or belongs to another run");
        return;
    }
    hello->version[sizeof hello->version - 1] = hello->host[sizeof hello->host - 1] = 0;
    if (dtrain__other_job(r, pending)) return;
    /* A rank that knows the key and contradicts this rank ends the run. */
    const dtrain__hello own = dtrain__hello_make(r);
    const int rank = hello->rank;
    dtrain__connection *end = rank >= 0 && rank < own.size ? &r->world->link->ends[rank] : NULL;
    char who[128], wrong[320] = "";
    snprintf(who, sizeof who, "rank %d (%s, pid %d)", rank, hello->host, hello->pid);
    if (strcmp(hello->version, own.version) != 0 || hello->layout != own.layout)
        snprintf(wrong, sizeof wrong,
                 "%s was built with another dtrain, version %s; rank 0 has %s: start the same "
                 "program on all ranks",
                 who, hello->version, own.version);
    else if (hello->size != own.size)
        snprintf(wrong, sizeof wrong, "%s has world size %d, rank 0 has world size %d", who,
                 hello->size, own.size);
    else if (!end) snprintf(wrong, sizeof wrong, "%s joins a world of %d ranks", who, own.size);
    else if (!rank || end->socket >= 0)
        snprintf(wrong, sizeof wrong, "rank %d was started twice: as %s and as %s, pid %d", rank,
                 rank ? end->name : "this rank 0", hello->host, hello->pid);
    if (wrong[0]) dtrain_world_abort(r->world, DTRAIN_ERROR_MISMATCH, wrong);
    const bool failed = dtrain__meet_failed(r);
    const dtrain__abort_record *why = &r->world->control->aborted;
    const bool sent = dtrain__reply_to(r, pending->socket, hello->proof, failed ? why->code : 0,
                                       failed ? why->text : "");
    if (sent && end && rank && !r->answered[rank]) {
        r->came++; /* a rank that got no reply connects again */
        r->answered[rank] = true;
    }
    if (!sent || failed) {
        dtrain__socket_close(&pending->socket);
        return;
    }
    snprintf(end->name, sizeof end->name, "%s, pid %d", hello->host, hello->pid);
    end->socket = pending->socket;
    pending->socket = -1;
}

/* Wait up to 0.1 s for connections and hellos, and handle them. The link reads the frames of a rank
 * when all ranks have come; until then rank 0 only watches for the end of the connection. A new
 * connection replaces the oldest pending one, which must be a stranger: ranks send their hello at
 * once. Log every 10 s which ranks are missing, and fail after the deadline. */
static void dtrain__meet_round(dtrain__rendezvous *r)
{
    struct pollfd polls[1 + DTRAIN__PENDING_MOST + DTRAIN_MAX_RANKS];
    dtrain__connection *ends = r->world->link->ends;
    const int first = 1 + (int)DTRAIN__PENDING_MOST, count = first + r->world->size;
    for (int i = 0; i < count; i++) {
        polls[i].fd = i >= first ? ends[i - first].socket
                      : i        ? r->pending[i - 1].socket
                                 : r->listener;
        polls[i].events = i >= first ? POLLRDHUP : POLLIN;
        polls[i].revents = 0;
    }
    (void)poll(polls, (nfds_t)count, 100);
    for (int i = 1; i < count; i++) {
        if (!polls[i].revents) continue;
        if (i < first) {
            dtrain__read_pending(r, &r->pending[i - 1]);
            continue;
        }
        (void)dtrain__abort_with(r->world, DTRAIN_ERROR_PEER,
                                 "rank %d (%s) left before all ranks had come", i - first,
                                 ends[i - first].name);
        dtrain__socket_close(&ends[i - first].socket);
    }
    const int socket = polls[0].revents ? dtrain__above_stdio(accept(r->listener, NULL, NULL)) : -1;
    const int error = errno;
    if (polls[0].revents && socket < 0 && error != EAGAIN && error != EINTR &&
        error != ECONNABORTED) {
        snprintf(r->problem, sizeof r->problem, "no connection can be accepted: %s%s",
                 strerror(error), error == EMFILE || error == ENFILE ? "; raise ulimit -n" : "");
        dtrain__socket_close(&r->pending[r->accepted++ % DTRAIN__PENDING_MOST].socket);
        (void)poll(NULL, 0, 50);
    }
    if (socket >= 0) {
        dtrain__pending *pending = &r->pending[r->accepted++ % DTRAIN__PENDING_MOST];
        dtrain__socket_close(&pending->socket);
        dtrain__socket_tune(socket);
        pending->socket = socket;
        pending->got = 0;
    }
    char missing[160] = "", text[DTRAIN__ERROR_BYTES];
    size_t used = 0;
    if (dtrain__meet_failed(r) || r->came == r->world->size - 1) return;
    for (int i = 1; i < r->world->size && used + 16 < sizeof missing; i++)
        if (ends[i].socket < 0)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d",
                                     used ? ", " : "", i);
    const uint64_t now = dtrain__now_ns();
    snprintf(text, sizeof text,
             "rank 0 has waited %.1f s at %s port %u, and %d of %d ranks have not come: %s%s%s",
             1e-9 * (double)(now - r->start_ns), r->place->address, r->place->port,
             r->world->size - 1 - r->came, r->world->size, missing,
             r->problem[0] ? "; the last trouble: " : "", r->problem);
    dtrain__meet_missing(r, now >= r->deadline_ns ? DTRAIN_ERROR_TIMEOUT : DTRAIN_OK, text);
}

/* Wait for all ranks. After a failure, reply it to ranks that come late, for at most REFUSAL_NS. */
static void dtrain__host_world(dtrain__rendezvous *r)
{
    const int others = r->world->size - 1;
    const rlim_t needed = 1 + DTRAIN__PENDING_MOST + (rlim_t)r->world->size;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < needed) { /* poll refuses more */
        (void)dtrain__abort_with(r->world, DTRAIN_ERROR_SYSTEM,
                                 "rank 0 may open %llu files and needs %llu for %d ranks; raise "
                                 "the limit (ulimit -n)",
                                 (unsigned long long)files.rlim_cur, (unsigned long long)needed,
                                 r->world->size);
        return;
    }
    if (!dtrain__listen(r)) return;
    if (!r->place->named)
        dtrain_log(r->world, DTRAIN_LOG_INFO,
                   "this run has neither DTRAIN_JOB_KEY nor a name of its launcher's: at %s port "
                   "%u %s tells it from another job",
                   r->place->address, r->place->port,
                   r->place->job ? "only what it was told to train" : "nothing");
    for (uint32_t i = 0; i < DTRAIN__PENDING_MOST; i++) r->pending[i].socket = -1;
    while (r->came < others && !dtrain__meet_failed(r)) dtrain__meet_round(r);
    const uint64_t end_ns = dtrain__now_ns() + DTRAIN__REFUSAL_NS;
    if (dtrain__meet_failed(r) && end_ns < r->deadline_ns) r->deadline_ns = end_ns;
    while (r->came < others && dtrain__now_ns() < r->deadline_ns) dtrain__meet_round(r);
    for (uint32_t i = 0; i < DTRAIN__PENDING_MOST; i++) dtrain__socket_close(&r->pending[i].socket);
    dtrain__socket_close(&r->listener);
}

/* ---- The other ranks --------------------------------------------------------------------------*/

/* Note why a call to rank 0 failed; a later call can succeed. Keep the answer of another run: a
 * later "connection refused" would hide the better reason. */
DTRAIN__PRINTF(2, 3)
static bool dtrain__try_failed(dtrain__rendezvous *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!r->stranger) vsnprintf(r->problem, sizeof r->problem, format, args);
    va_end(args);
    dtrain__socket_close(&r->world->link->ends[0].socket);
    return false;
}

/* Connect to rank 0 at one of its addresses, send the hello, and wait for the reply. Return false
 * if another call can succeed. */
static bool dtrain__call(dtrain__rendezvous *r, const struct addrinfo *at)
{
    dtrain__connection *end = &r->world->link->ends[0];
    const dtrain__hello hello = dtrain__hello_make(r);
    const uint64_t now = dtrain__now_ns(), most = now + DTRAIN__ANSWER_NS;
    const uint64_t until_ns = most < r->deadline_ns ? most : r->deadline_ns;
    const uint64_t left_us = (until_ns - (now < until_ns ? now : until_ns)) / 1000u + 1;
    dtrain__reply reply;
    size_t got = 0;
    struct timeval left; /* connect keeps the deadline of a send */
    left.tv_sec = (time_t)(left_us / 1000000u);
    left.tv_usec = (suseconds_t)(left_us % 1000000u);
    (void)getnameinfo(at->ai_addr, at->ai_addrlen, end->name, sizeof end->name, NULL, 0,
                      NI_NUMERICHOST);
    end->socket = dtrain__above_stdio(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (end->socket < 0) return dtrain__try_failed(r, "no socket: %s", strerror(errno));
    setsockopt(end->socket, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof left);
    setsockopt(end->socket, SOL_SOCKET, SO_RCVTIMEO, &left, sizeof left);
    if (connect(end->socket, at->ai_addr, at->ai_addrlen) != 0)
        return dtrain__try_failed(r, "%s: %s", end->name,
                                  strerror(errno == EINPROGRESS ? ETIMEDOUT : errno));
    if (!dtrain__send_whole(end->socket, &hello, sizeof hello))
        return dtrain__try_failed(r, "%s: %s", end->name, strerror(errno));
    for (ssize_t more = 1; got < sizeof reply && more && dtrain__now_ns() < until_ns;) {
        more = recv(end->socket, (char *)&reply + got, sizeof reply - got, 0);
        if (more > 0) got += (size_t)more;
        else if (more < 0 && !dtrain__try_again(errno)) break;
    }
    dtrain__socket_tune(end->socket);
    reply.why[sizeof reply.why - 1] = 0;
    if (got < sizeof reply)
        return dtrain__try_failed(r, "what listens at %s port %u does not answer as rank 0 does",
                                  end->name, r->place->port);
    const bool known = reply.proof == dtrain__proof(r, hello.proof, &reply, sizeof reply);
    if (!known || reply.result == DTRAIN__REPLY_OTHER_JOB) {
        dtrain__try_failed(r, "what listens at %s port %u %s", end->name, r->place->port,
                           known ? "is rank 0 of a job with other settings or data than this rank "
                                   "has; DTRAIN_JOB_KEY tells jobs apart"
                                 : "has another DTRAIN_JOB_KEY than this rank or belongs to "
                                   "another run");
        if (!known) r->until_ns = r->start_ns + DTRAIN__PATIENCE_NS;
        else if (!r->stranger)
            r->until_ns = dtrain__now_ns() + DTRAIN__OTHER_JOB_NS + DTRAIN__PATIENCE_NS;
        r->stranger = true;
        return false;
    }
    if (reply.result != DTRAIN_OK)
        (void)dtrain__abort_with(r->world, (dtrain_result)reply.result, "%s", reply.why);
    return true;
}

/* Call rank 0 at all its addresses until a call has a result: rank 0 can start later, and another
 * run can still listen at the port. */
static void dtrain__join_world(dtrain__rendezvous *r)
{
    struct addrinfo wanted;
    char port[16], text[DTRAIN__ERROR_BYTES];
    snprintf(port, sizeof port, "%u", r->place->port);
    memset(&wanted, 0, sizeof wanted);
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = AI_NUMERICSERV;
    for (;; (void)poll(NULL, 0, 50)) {
        struct addrinfo *found = NULL;
        bool settled = false;
        const int error = getaddrinfo(r->place->address, port, &wanted, &found);
        if (error)
            dtrain__try_failed(r, "the name cannot be resolved: %s%s",
                               error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error),
                               strchr(r->place->address, ':') ? "; the port goes into DTRAIN_PORT "
                                                                "or MASTER_PORT, not after it"
                                                              : "");
        for (const struct addrinfo *at = found; at && !settled; at = at->ai_next)
            settled = dtrain__call(r, at);
        if (found) freeaddrinfo(found);
        if (settled) return;
        const uint64_t now = dtrain__now_ns();
        const bool late = now >= r->deadline_ns || (r->stranger && now >= r->until_ns);
        const dtrain_result why = r->stranger ? DTRAIN_ERROR_MISMATCH : DTRAIN_ERROR_TIMEOUT;
        snprintf(text, sizeof text, "rank 0 was not found at %s port %u for %.1f s: %s",
                 r->place->address, r->place->port, 1e-9 * (double)(now - r->start_ns), r->problem);
        dtrain__meet_missing(r, late ? why : DTRAIN_OK, text);
        if (late) return;
    }
}

/* Connect all ranks of a world that another launcher has started: make this rank's control page,
 * link and connections. Then gather until all ranks have come. Rank 0 has the best sentence, so the
 * other ranks wait 2 s longer. An abort's code and sentence are the result of every rank. */
DTRAIN__PRIVATE dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place)
{
    const uint64_t timeout_ns = world->timeout_ns;
    dtrain__rendezvous r;
    DTRAIN__TRY(dtrain__map_region(0, 0, NULL, -1, &world->page));
    world->control = world->page.control;
    DTRAIN__TRY(dtrain__link_create(world));
    memset(&r, 0, sizeof r);
    r.world = world;
    r.place = place;
    r.start_ns = r.logged_ns = dtrain__now_ns();
    r.deadline_ns = r.start_ns + world->join_ns;
    if (world->rank) dtrain__join_world(&r);
    else dtrain__host_world(&r);
    const uint64_t now = dtrain__now_ns();
    world->timeout_ns = (r.deadline_ns > now ? r.deadline_ns - now : 0) + 2000000000u;
    dtrain_result result = dtrain_world_all_gather(world, NULL, 0, NULL);
    world->timeout_ns = timeout_ns;
    if (result == DTRAIN_OK) return DTRAIN_OK;
    const dtrain__abort_record *aborted = &world->control->aborted;
    const bool failed = dtrain__meet_failed(&r);
    if (failed) result = (dtrain_result)aborted->code;
    return dtrain_fail(result,
                       "rendezvous: %s; this process is rank %d of %d by the variables of %s",
                       failed ? aborted->text : dtrain__bare(dtrain_last_error()), world->rank,
                       world->size, place->family ? place->family : "the environment");
}
