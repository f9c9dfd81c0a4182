/* test_kernels.c: random arguments for the kernels of operations (random_kernels.h), for every instruction set, with 1
 * to 4 threads, which must leave the same bits.
 *
 *     build/tests/test_kernels                    110 new seeds;
 *                                                 with DTRAIN_TEST_FULL=1 20 seconds of them
 *     build/tests/test_kernels --seed 77          this one; --count N, --seconds N: more of them */
#define DTRAIN__SMALL (-1) /* threads share even the smallest job */
#include "device/cpu/cpu.c"
#include "instances.h"
#include "dtrain.h"

#include "test.h"
#include "random_kernels.h"
#include "seeds.h"

enum { THREADS = 4 };
static dtrain_device *devices[INSTANCES][THREADS], *naive;
static const dtrain__kernels *instances[INSTANCES];
static int instance_count;

static void open_devices(void)
{
    instance_count = instances_find(instances);
    CHECK(dtrain_device_create(naive_device_ops(), NULL, &naive) == DTRAIN_OK);
    for (int i = 0; i < instance_count; i++)
        for (uint32_t t = 0; t < THREADS; t++) {
            dtrain_device_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.thread_count = t + 1;
            desc.oversubscribed = true;
            if (dtrain_device_create(NULL, &desc, &devices[i][t]) != DTRAIN_OK) exit(1);
            ((dtrain__cpu *)devices[i][t]->state)->kernels = instances[i];
            ((dtrain__cpu *)devices[i][t]->state)->isa = instances[i]->gemm;
        }
}

/* Compare one number of threads, another for each seed, with the naive device, and the bits of all. */
static bool run_seed(uint64_t seed, bool words)
{
    for (int i = 0; i < instance_count; i++) {
        bool good;
        uint64_t first = 0;
        kernel_case(devices[i][seed % THREADS], naive, seed, &good);
        for (int t = 0; t < THREADS && good; t++) {
            const uint64_t hash = kernel_case(devices[i][t], NULL, seed, &good);
            if (words)
                printf("  seed %llu, %s, %d threads: %s, bits %016llx\n", (unsigned long long)seed,
                       instances[i]->name, t + 1, kernels.what, (unsigned long long)hash);
            if (t == 0) first = hash;
            if (hash != first) printf("  other bits with %d threads\n", t + 1), good = false;
        }
        if (good) continue;
        printf("  FAIL seed %llu, %s: %s\n", (unsigned long long)seed, instances[i]->name,
               kernels.what);
        return false;
    }
    return true;
}

static const uint64_t failed_once[] = {55625244 /* 3000 terms of a softmax, in one lane */};

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 110, 20);
    test_begin(1, argv);
    open_devices();
    const int failed =
        seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
    for (int i = 0; i < instance_count; i++)
        for (int t = 0; t < THREADS; t++) dtrain_device_destroy(devices[i][t]);
    dtrain_device_destroy(naive);
    return failed;
}
