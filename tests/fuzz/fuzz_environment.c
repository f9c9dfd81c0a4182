/* fuzz_environment.c: what launchers say in the environment, host lists included, in hostile words.
 *
 *     make fuzzers && build/fuzz/fuzz_environment -max_total_time=30
 *
 * A line of the input is one variable: its first byte chooses the name, the rest is the value. Wrong is: a crash, a
 * sanitizer report, a place outside its world, or a refusal without a sentence. */
#include "src/launch/environment.c"

static const char *const names[] = {"DTRAIN_RANK",
                                    "DTRAIN_WORLD_SIZE",
                                    "DTRAIN_LOCAL_RANK",
                                    "DTRAIN_LOCAL_SIZE",
                                    "DTRAIN_MASTER_ADDR",
                                    "DTRAIN_PORT",
                                    "DTRAIN_JOB_KEY",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_RESTART_COUNT",
                                    "GROUP_RANK",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "PMIX_NAMESPACE",
                                    "SLURM_PROCID",
                                    "SLURM_NTASKS",
                                    "SLURM_STEP_NUM_TASKS",
                                    "SLURM_LOCALID",
                                    "SLURM_JOB_ID",
                                    "SLURM_STEP_ID",
                                    "SLURM_NODELIST",
                                    "SLURM_JOB_NODELIST",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_STEP_TASKS_PER_NODE",
                                    "SLURM_LAUNCH_NODE_IPADDR",
                                    "PMI_RANK",
                                    "PMI_SIZE",
                                    "MPI_LOCALRANKID",
                                    "MPI_LOCALNRANKS",
                                    "JOB_COMPLETION_INDEX",
                                    "PET_NODE_RANK",
                                    "PET_NNODES",
                                    "PET_NPROC_PER_NODE",
                                    "PET_MASTER_ADDR",
                                    "PET_MASTER_PORT",
                                    "HOSTNAME",
                                    "SLURM_RESTART_COUNT"};
enum { NAMES = sizeof names / sizeof *names };

static char values[NAMES][512];

static char *look_up(const char *name)
{
    for (int i = 0; i < NAMES; i++)
        if (strcmp(names[i], name) == 0) return values[i][0] ? values[i] : NULL;
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dtrain__placement place;
    memset(values, 0, sizeof values);
    for (size_t at = 0; at < size;) {
        const uint8_t *end = (const uint8_t *)memchr(data + at, '\n', size - at);
        const size_t length = (end ? (size_t)(end - data) : size) - at;
        if (length > 1 && length < sizeof values[0])
            memcpy(values[data[at] % NAMES], data + at + 1, length - 1);
        at += length + 1;
    }
    dtrain_fail(DTRAIN_OK, "%s", "");
    if (dtrain__recognise(look_up, &place) != DTRAIN_OK) {
        if (strlen(dtrain_last_error()) < 20) abort();
        return 0;
    }
    if (place.size < 1 || place.size > DTRAIN_MAX_RANKS || place.rank < 0 ||
        place.rank >= place.size)
        abort();
    if (place.forks < 0 || place.rank + place.forks > place.size) abort();
    if (place.family && place.forks != place.size &&
        (!place.address[0] || !place.port || place.port > 65535))
        abort();
    if (!memchr(place.address, 0, sizeof place.address)) abort();
    return 0;
}
