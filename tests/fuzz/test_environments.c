/* test_environments.c: random environments of launchers, and what dtrain_launch_explain says of them, against rules
 * that are written down here once more and plainly: which family is taken, ignored or refused.
 *
 *     build/tests/test_environments                 50 new seeds; with DTRAIN_TEST_FULL=1 5 seconds of them
 *     build/tests/test_environments --seed 77       the hundred environments of this one, in words
 *
 * In every environment each family is absent, whole, half, of one rank or malformed, at random. */
#include "test.h"

#include "dtrain.h"
#include "seeds.h"

enum { OURS, TORCHRUN, OPEN_MPI, SLURM, MPICH, INDEXED, PET, FAMILIES };
typedef enum verdict { UNSET, TAKEN, REFUSED, IGNORED } verdict;

static const char *const names[] = {"DTRAIN_RANK", "torchrun",    "Open MPI", "Slurm",
                                    "MPICH",       "Indexed Job", "PET"};
static const char *const ranks[] = {"DTRAIN_RANK",  "RANK",     "OMPI_COMM_WORLD_RANK",
                                    "SLURM_PROCID", "PMI_RANK", "JOB_COMPLETION_INDEX",
                                    "PET_NODE_RANK"};
static const char *const sizes[] = {"DTRAIN_WORLD_SIZE",
                                    "WORLD_SIZE",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "SLURM_STEP_NUM_TASKS",
                                    "PMI_SIZE",
                                    NULL,
                                    "PET_NNODES"};

static uint64_t state;
static int below(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static void set(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void make_environment(void)
{
    const int size = 2 + below(4), rank = below(size);
    clearenv();
    setenv("DTRAIN_MASTER_ADDR", "some.host", 1);
    for (int i = 0; i < FAMILIES; i++) {
        const int kind = below(14) - 5;
        const bool same = below(3) > 0; /* as the other families, most of the time */
        const int n = same ? size : 2 + below(4), r = same ? rank : below(n);
        if (kind < 4) continue;
        if (kind != 5) set(ranks[i], kind == 7 ? 0 : r);
        if (kind != 6 && sizes[i]) set(sizes[i], kind == 7 ? 1 : n);
        if (kind == 8) setenv(below(2) && sizes[i] ? sizes[i] : ranks[i], below(2) ? "x" : "9", 1);
    }
    if (below(2)) setenv("SLURM_STEP_ID", "0", 1);
    if (below(4) == 0) setenv("TORCHELASTIC_RUN_ID", "run", 1);
    if (below(4) == 0) set("PET_NPROC_PER_NODE", 1 + below(3));
    if (below(2)) setenv("DTRAIN_JOB_KEY", "verysecret", 1);
    if (below(8) == 0) setenv(ranks[below(FAMILIES)], "", 1); /* empty is unset */
}

/* ---- The rules again ---- */

static const char *text_of(const char *name)
{
    const char *text = name ? getenv(name) : NULL;
    return text && text[0] ? text : NULL;
}

typedef struct pair {
    bool rank_set, size_set, wrong, whole;
    int rank, size;
} pair;

static pair pair_of(const char *rank, const char *size, bool lone_size)
{
    pair p = {text_of(rank) != NULL, text_of(size) != NULL, false, false, 0, 0};
    const char *r = p.rank_set ? text_of(rank) : "0", *s = p.size_set ? text_of(size) : "0";
    p.wrong = *r < '0' || *r > '9' || *s < '0' || *s > '9';
    p.rank = atoi(r);
    p.size = atoi(s);
    if (p.rank_set != p.size_set && !(p.size_set && lone_size)) p.wrong = true;
    p.whole = p.rank_set && p.size_set && !p.wrong;
    if (p.whole && p.rank >= p.size) p.wrong = true;
    return p;
}

/* Judge one family by itself: REFUSED, TAKEN (whole), or IGNORED, and its rank and size. */
static verdict judge(int family, int *rank, int *size)
{
    const bool indexed = text_of(ranks[INDEXED]) != NULL;
    const pair p = pair_of(ranks[family], sizes[family], indexed && family <= TORCHRUN);
    const pair mpi = pair_of(ranks[OPEN_MPI], sizes[OPEN_MPI], false);
    const pair pmi = pair_of(ranks[MPICH], sizes[MPICH], false);
    *rank = p.rank, *size = p.size;
    if (family == INDEXED) {
        const char *of = text_of(sizes[OURS]) ? sizes[OURS] : sizes[TORCHRUN];
        const pair job = pair_of(ranks[INDEXED], of, true);
        *rank = job.rank, *size = job.size;
        if (!text_of(of)) return IGNORED;
        return job.wrong ? REFUSED : job.whole ? TAKEN : IGNORED;
    }
    if (family == SLURM && !text_of("SLURM_STEP_ID")) return IGNORED;
    if (p.wrong) return REFUSED;
    if (family == SLURM) {
        if (pmi.wrong) return REFUSED;
        if (pmi.whole && (pmi.rank != p.rank || pmi.size != p.size)) return IGNORED;
    }
    if (family == PET) {
        const int forks = text_of("PET_NPROC_PER_NODE") ? atoi(text_of("PET_NPROC_PER_NODE")) : 1;
        if (!p.whole && !text_of("PET_NPROC_PER_NODE")) return IGNORED;
        *rank = p.rank * forks;
        *size = (p.whole ? p.size : 1) * forks;
        return TAKEN;
    }
    if (!p.whole) return IGNORED;
    if (family == TORCHRUN && !text_of("TORCHELASTIC_RUN_ID")) {
        const pair *const others[] = {&mpi, &pmi};
        for (int i = 0; i < 2; i++)
            if (others[i]->wrong ||
                (others[i]->whole && (others[i]->rank != p.rank || others[i]->size != p.size)))
                return REFUSED;
    }
    return TAKEN;
}

static bool is_set(int family)
{
    bool set = text_of(ranks[family]) || (family != INDEXED && text_of(sizes[family]));
    if (family == TORCHRUN) set = set || text_of("TORCHELASTIC_RUN_ID");
    if (family == SLURM) set = set || text_of("SLURM_STEP_ID");
    if (family == PET) set = set || text_of("PET_NPROC_PER_NODE");
    return set;
}

/* ---- */

static bool complain(uint64_t seed, const char *what, const char *text)
{
    extern char **environ;
    printf("  FAIL seed %llu: %s\n", (unsigned long long)seed, what);
    for (char **word = environ; *word; word++) printf("       %s\n", *word);
    printf("%s", text);
    return false;
}

static bool line_says(const char *text, const char *word, const char *what)
{
    char start[80];
    snprintf(start, sizeof start, "%-14s %s", word, what);
    for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (strncmp(line, start, strlen(start)) == 0) return true;
    return false;
}

static bool run_environment(uint64_t seed, bool words)
{
    static const char *const says[] = {"", "taken:", "refused:", "ignored,"};
    char text[8192], part[300], expected[80];
    int rank = 0, size = 1, r, s, end = FAMILIES;
    verdict verdicts[FAMILIES], final = IGNORED;
    state = seed * 2654435761u + 12345;
    make_environment();
    for (int i = 0; i < FAMILIES; i++) {
        verdicts[i] = i < end ? judge(i, &r, &s) : IGNORED;
        if (i < end && verdicts[i] != IGNORED) final = verdicts[i], end = i, rank = r, size = s;
        if (verdicts[i] == TAKEN && size == 1) verdicts[i] = IGNORED;
        if (!is_set(i)) verdicts[i] = UNSET;
    }
    dtrain_launch_place place;
    const dtrain_result result = dtrain_launch_explain(NULL, text, sizeof text, &place);
    if (words) printf("%s", text);
    if ((result == DTRAIN_OK) != (final != REFUSED)) return complain(seed, "the result", text);
    if (strstr(text, "verysecret")) return complain(seed, "the key is shown", text);
    for (int i = 0; i < FAMILIES; i++) {
        const bool said = line_says(text, names[i], says[verdicts[i]]);
        if (said != (verdicts[i] != UNSET)) return complain(seed, names[i], text);
        if (verdicts[i] == UNSET || !text_of(ranks[i])) continue;
        snprintf(expected, sizeof expected, " %s=%s", ranks[i], text_of(ranks[i]));
        if (!strstr(text, expected)) return complain(seed, expected, text);
    }
    if (final == REFUSED && !strstr(text, "\nrefused  ")) return complain(seed, "no reason", text);
    if (final == TAKEN && size > 1 && end < PET) {
        snprintf(expected, sizeof expected, "this process is rank %d of %d,", rank, size);
        if (!line_says(text, "ranks", expected)) return complain(seed, expected, text);
        if (place.first_rank != rank || place.started_count != 1)
            return complain(seed, "the place of a rank", text);
    }
    if (place.rank_count != (final == REFUSED ? 0 : final == TAKEN ? size : 1))
        return complain(seed, "the number of ranks", text);
    if (final == IGNORED && !line_says(text, "ranks", "this process starts all 1,"))
        return complain(seed, "no launcher", text);
    const size_t room = 1 + (size_t)below((int)sizeof part);
    if (dtrain_launch_explain(NULL, part, room, NULL) != result || strlen(part) >= room ||
        strncmp(part, text, strlen(part)) != 0)
        return complain(seed, "cut", part);
    return true;
}

/* A seed is a hundred environments, which take as long as one launch. */
static bool run_seed(uint64_t seed, bool words)
{
    bool right = true;
    for (uint64_t i = 0; i < 100; i++) right = run_environment(seed * 100 + i, words) && right;
    return right;
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 50, 5);
    return seeds_run(&s, NULL, 0, run_seed);
}
