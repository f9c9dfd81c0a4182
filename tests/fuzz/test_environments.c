/* test_environments.c: random environments of launchers, and what dtrain_launch_plan says of them, against rules that
 * are written down here once more and plainly: which family is taken, ignored or refused.
 *
 *     build/tests/test_environments                 50 new seeds; with DTRAIN_TEST_FULL=1 5 seconds of them
 *     build/tests/test_environments --seed 77       the hundred environments of this one, in words
 *
 * In every environment each family is absent, whole, half, of one rank or malformed, at random. */
#include "test.h"

#include "dtrain.h"
#include "seeds.h"

enum { OURS, TORCHRUN, OPEN_MPI, SLURM, MPICH, INDEXED, PET, FAMILIES };
typedef enum verdict { TAKEN, REFUSED, IGNORED } verdict;

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

/* ---- */

static bool complain(uint64_t seed, const char *what)
{
    extern char **environ;
    printf("  FAIL seed %llu: %s\n", (unsigned long long)seed, what);
    for (char **word = environ; *word; word++) printf("       %s\n", *word);
    printf("       the library says: %s\n", dtrain_last_error());
    return false;
}

/* Tell whether a sentence names a variable that the family's reader looks at. */
static bool names_family(int family)
{
    static const char *const others[FAMILIES][2] = {[TORCHRUN] = {"OMPI_COMM_WORLD", "PMI_"},
                                                    [SLURM] = {"PMI_", NULL},
                                                    [INDEXED] = {"WORLD_SIZE", NULL},
                                                    [PET] = {"PET_NPROC_PER_NODE", NULL}};
    const char *said = dtrain_last_error();
    bool named = strstr(said, ranks[family]) || (sizes[family] && strstr(said, sizes[family]));
    for (int i = 0; i < 2; i++)
        named = named || (others[family][i] && strstr(said, others[family][i]));
    return named && strstr(said, "the environment");
}

static bool run_environment(uint64_t seed, bool words)
{
    int rank = 0, size = 1, end = FAMILIES;
    verdict final = IGNORED;
    char announced[60];
    dtrain_launch_place place;
    dtrain_launch_desc wrong;
    state = seed * 2654435761u + 12345;
    make_environment();
    for (int i = 0; i < FAMILIES && final == IGNORED; i++) final = judge(i, &rank, &size), end = i;
    if (final == IGNORED || (final == TAKEN && size == 1)) final = IGNORED, rank = 0, size = 1;
    const dtrain_result result = dtrain_launch_plan(NULL, &place);
    if (words)
        printf("%s: rank %d of %d, %s\n", final == IGNORED ? "no launcher" : names[end],
               place.first_rank, place.rank_count, result == DTRAIN_OK ? "" : dtrain_last_error());
    if ((result == DTRAIN_OK) != (final != REFUSED)) return complain(seed, "the result");
    if (strstr(dtrain_last_error(), "verysecret")) return complain(seed, "the key is shown");
    if (final == REFUSED && !names_family(end)) return complain(seed, "no reason");
    if (place.rank_count != (final == REFUSED ? 0 : size))
        return complain(seed, "the number of ranks");
    if (final == TAKEN && end < PET && (place.first_rank != rank || place.started_count != 1))
        return complain(seed, "the place of a rank");
    if (final == TAKEN && place.first_rank != rank) return complain(seed, "the first rank");
    if (final != TAKEN) return true;
    /* the family that was taken is named when the desc contradicts it */
    memset(&wrong, 0, sizeof wrong);
    wrong.rank_count = (uint32_t)size + 1;
    snprintf(announced, sizeof announced, "the environment (%s) announces %d", names[end], size);
    if (dtrain_launch_plan(&wrong, &place) != DTRAIN_ERROR_ARGUMENT ||
        !strstr(dtrain_last_error(), announced))
        return complain(seed, announced);
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
