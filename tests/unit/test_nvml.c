/* test_nvml.c: tools/nvml.h over a library that stands for NVML: what ranks answer and what becomes of it in records,
 * in JSON lines and in a file for Prometheus; GPUs that fail, ranks without one, records without room.
 *
 *     make build/tests/test_nvml && build/tests/test_nvml */
#include "test.h"
#include "dtrain.h"
#include "tools/nvml.h"
#include "tools/prometheus.h"
#include "files.h"
#include "warned_ranks.h"
#include <unistd.h>

static char stub[2][600]; /* the library that stands for NVML, of today and of before */

enum { MOST = 4, STEPS = 6 };

typedef struct run {
    uint32_t every_ms;
    int without, full;       /* a rank without NVML, and added figures; -1, 0: none */
    char reasons[MOST][200]; /* of each rank */
    dtrain_step_record records[MOST][STEPS];      /* of each rank: steps of 10 ms */
    float asked[MOST][STEPS][MOST][NVML_FIGURES]; /* what each rank knew of all after each step */
    dtrain_result result;                         /* of the last nvml_step */
} run;

static int rank_main(dtrain_world *world, void *user)
{
    run *t = (run *)user;
    const int rank = dtrain_world_rank(world);
    nvml n;
    CHECK(nvml_open(world, t->every_ms, &n) == DTRAIN_OK);
    if (rank == t->without) {
        n.device = NULL; /* as on a host without a driver */
        snprintf(n.reason, sizeof n.reason, "there is none");
    }
    for (int step = 0; step < STEPS; step++) {
        dtrain_step_record *r = &t->records[rank][step];
        r->step = step + 1;
        r->figure_count = 0;
        CHECK(dtrain_record_add(r, "time/step_ms", "ms", 10) == DTRAIN_OK);
        for (int i = 0; i < t->full; i++) CHECK(dtrain_record_add(r, "a", "", 1) == DTRAIN_OK);
        t->result = nvml_step(&n, r);
        if (t->full < DTRAIN_RECORD_FIGURES - NVML_FIGURES) CHECK(t->result == DTRAIN_OK);
        if (n.ranks)
            memcpy(t->asked[rank][step], n.answers, (size_t)n.ranks * NVML_FIGURES * sizeof(float));
    }
    snprintf(t->reasons[rank], sizeof t->reasons[rank], "%s", n.reason);
    nvml_close(&n);
    nvml_close(&n);
    return 0;
}

static void gpus(const char *answers, const char *library, run *t, uint32_t ranks)
{
    memset(t->records, 0, sizeof t->records);
    setenv("NVML_STUB", answers, 1);
    setenv("DTRAIN_NVML", library, 1);
    warnings = 0;
    CHECK_MSG(with_ranks(ranks, DTRAIN_LAUNCH_THREADS, NULL, rank_main, t) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

static run t;
static const dtrain_step_record *const last = &t.records[0][STEPS - 1];

/* All ranks know all answers and add the same: means, maxima, the union of bits, sums. */
static void test_ranks(void)
{
    gpus("", stub[0], &t, 3);
    for (int rank = 0; rank < 3; rank++)
        for (int step = 0; step < STEPS; step++) {
            const dtrain_step_record *r = &t.records[rank][step];
            for (int of = 0; of < 3; of++) {
                const float *got = t.asked[rank][step][of];
                CHECK_CLOSE((double)got[NVML_UTILIZATION], 0.5 + 0.01 * of, 1e-6);
                CHECK_CLOSE((double)got[NVML_MEMORY], 1073741824.0 + 1048576.0 * of, 0);
                CHECK_CLOSE((double)got[NVML_CLOCK], 1e6 * (1980 + of), 1e-6);
                CHECK_CLOSE((double)got[NVML_POWER], 350.5 + of, 1e-6);
                CHECK((double)got[NVML_HEAT] == 60 + of && (int)got[NVML_THROTTLE] == 1 << of);
                CHECK((double)got[NVML_ECC] == 3 + of);
            }
            CHECK_CLOSE(dtrain_record_value(r, "gpu_utilization"), 0.51, 1e-6);
            CHECK(dtrain_record_value(r, "gpu_memory_bytes") == 1073741824.0 + 2 * 1048576.0);
            CHECK_CLOSE(dtrain_record_value(r, "gpu_clock_hz"), 1981e6, 1e-3);
            CHECK_CLOSE(dtrain_record_value(r, "gpu_power_watts"), 351.5, 1e-6);
            CHECK(dtrain_record_value(r, "gpu_temperature_celsius") == 62);
            CHECK(dtrain_record_value(r, "gpu_throttle") == (1 | 2 | 4) &&
                  dtrain_record_value(r, "gpu_ecc_errors") == 12);
        }
    CHECK(!t.reasons[0][0] && warnings == 0);
}

/* What a GPU, a library or a rank cannot tell is unknown; the rest is there. */
static void test_unknown(void)
{
    gpus("utilization=3,ecc=3,reasons=4", stub[0], &t, 1);
    CHECK(isnan(dtrain_record_value(last, "gpu_utilization")) &&
          isnan(dtrain_record_value(last, "gpu_ecc_errors")));
    CHECK(isnan(dtrain_record_value(last, "gpu_throttle")) &&
          dtrain_record_value(last, "gpu_temperature_celsius") == 60);
    CHECK(warnings == 0);
    gpus("", stub[1], &t, 1); /* functions that an old library lacks, and one by its old name */
    CHECK(dtrain_record_value(last, "gpu_throttle") == 1 &&
          isnan(dtrain_record_value(last, "gpu_power_watts")));
    t.without = 1;
    gpus("", stub[0], &t, 3);
    CHECK(dtrain_record_value(last, "gpu_ecc_errors") == 3 + 5 &&
          isnan(t.asked[0][STEPS - 1][1][NVML_ECC]));
    CHECK_CLOSE(dtrain_record_value(last, "gpu_power_watts"), 351.5, 1e-6);
    t.without = -1;
}

/* Questions are asked when the steps have taken as long: at 25 ms those of 10 ms numbered 1, 4. */
static void test_pauses(void)
{
    t.every_ms = 25;
    gpus("power=15", stub[0], &t, 2); /* a lost GPU is not asked again: then it is unknown */
    for (int step = 0; step < STEPS; step++)
        CHECK_MSG(isnan(dtrain_record_value(&t.records[1][step], "gpu_temperature_celsius")) ==
                      (step >= 3),
                  "step %d", step + 1);
    t.every_ms = 0;
    gpus("power=15", stub[0], &t, 1);
    CHECK(!isnan(dtrain_record_value(&t.records[0][0], "gpu_throttle")));
    CHECK(isnan(dtrain_record_value(&t.records[0][1], "gpu_throttle")));
    CHECK_MSG(warnings == 1 && strstr(t.reasons[0], "lost"), "%d warnings, %s", warnings,
              t.reasons[0]);
}

static void test_reasons(void)
{
    gpus("init=9", stub[0], &t, 1);
    CHECK_MSG(strstr(t.reasons[0], "cannot be started (its error 9)"), "%s", t.reasons[0]);
    gpus("find=2", stub[0], &t, 1);
    CHECK_MSG(strstr(t.reasons[0], "does not know this rank's GPU (its error 2)"), "%s",
              t.reasons[0]);
    gpus("", "/nowhere/libnvidia-ml.so.1", &t, 1);
    CHECK_MSG(strstr(t.reasons[0], "/nowhere/libnvidia-ml.so.1"), "%s", t.reasons[0]);
    gpus("", "", &t, 2);
    CHECK_MSG(strstr(t.reasons[1], "compute on the CPU"), "%s", t.reasons[1]);
    CHECK(warnings == 0 && last->figure_count == 1);
}

/* The program's figures stay; a record that has no room is an error that names what is left out. */
static void test_room(void)
{
    t.full = DTRAIN_RECORD_FIGURES - NVML_FIGURES - 1;
    gpus("", stub[0], &t, 1);
    CHECK(dtrain_record_value(last, "a") == 1 && dtrain_record_value(last, "gpu_ecc_errors") == 3);
    t.full++;
    gpus("", stub[0], &t, 1);
    CHECK(t.result == DTRAIN_ERROR_ARGUMENT);
    t.full = 0;
}

/* Rank 0's files have the figures, and Prometheus's the share of each rank. */
static int written_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_step_record r;
    prometheus file;
    nvml n;
    (void)user;
    memset(&desc, 0, sizeof desc), memset(&r, 0, sizeof r), memset(&file, 0, sizeof file);
    file.path = path_of("gpus.prom");
    file.share = nvml_share, file.user = &n;
    const dtrain_metrics_sink sink = prometheus_sink(&file);
    desc.jsonl_path = path_of("gpus.jsonl");
    desc.sinks = &sink, desc.sink_count = 1;
    r.step = 1, r.ranks = dtrain_world_size(world);
    CHECK(dtrain_record_add(&r, "time/step_ms", "ms", 10) == DTRAIN_OK);
    CHECK(nvml_open(world, 1000, &n) == DTRAIN_OK && nvml_step(&n, &r) == DTRAIN_OK);
    CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK);
    CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    nvml_close(&n);
    return 0;
}

static bool file_has(const char *path, const char *text)
{
    static char all[60000];
    FILE *file = fopen(path, "r");
    all[file ? fread(all, 1, sizeof all - 1, file) : 0] = 0;
    if (file) fclose(file);
    return CHECK_MSG(strstr(all, text), "%s is not in %s:\n%s", text, path, all);
}

static void test_files(void)
{
    setenv("NVML_STUB", "", 1);
    setenv("DTRAIN_NVML", stub[0], 1);
    CHECK_MSG(with_ranks(2, DTRAIN_LAUNCH_THREADS, NULL, written_rank, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
    file_has(path_of("gpus.jsonl"), "\"gpu_temperature_celsius\": 61,");
    file_has(path_of("gpus.prom"), "\ndtrain_gpu_power_watts{run=\"dtrain\"} 351\n");
    file_has(path_of("gpus.prom"),
             "\ndtrain_rank_gpu_power_watts{run=\"dtrain\",rank=\"0\"} 350.5\n"
             "dtrain_rank_gpu_power_watts{run=\"dtrain\",rank=\"1\"} 351.5\n");
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    t.without = -1;
    const ssize_t length = readlink("/proc/self/exe", stub[0], sizeof stub[0] - 32);
    char *slash = length > 0 ? strrchr(stub[0], '/') : NULL;
    if (slash) *slash = 0;
    snprintf(stub[1], sizeof stub[1], "%.500s/nvml_old.so", stub[0]);
    snprintf(stub[0] + strlen(stub[0]), 32, "/nvml_stub.so");
    if (!files_begin("test_nvml")) return 1;
    if (access(stub[0], R_OK) == 0) {
        RUN(test_ranks);
        RUN(test_unknown);
        RUN(test_pauses);
        RUN(test_reasons);
        RUN(test_room);
        RUN(test_files);
    } else SKIP(test_ranks, "nvml_stub.so is not beside this program");
    return test_summary() + !files_end();
}
