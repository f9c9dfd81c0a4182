/* test_cuda_checkpoint.c: checkpoints of runs on a GPU: state in device memory, in page-locked memory where it is
 * offloaded, master copies; saved blocking and in the background; a run goes on with the same bits, and what one
 * device saved another loads. On the emulated device streams run late: a copy that nobody waits for shows as a wrong
 * number. */
#include "test.h"
#include "dtrain.h"
#include "device_table.h"
#include "ranks.h"
#include "saved_run.h"

#include <dirent.h>

enum {
    O = DTRAIN_OFFLOAD_OPTIMIZER,
    OG = O | DTRAIN_OFFLOAD_GRADS,
    ALL = OG | DTRAIN_OFFLOAD_PARAMS
};

typedef struct gpu_case {
    const char *name;
    uint32_t kind, offload, tape_flags, compression;
    int ranks;
    bool background;
} gpu_case;

static const gpu_case cases[] = {
    {"ddp", DTRAIN_STRATEGY_DDP, 0, 0, 0, 1, true},
    {"ddp, offloaded optimizer", DTRAIN_STRATEGY_DDP, O, 0, 0, 2, true},
    {"ddp, top-k", DTRAIN_STRATEGY_DDP, 0, 0, DTRAIN_COMPRESSION_TOPK, 2, false},
    {"ddp, fp16", DTRAIN_STRATEGY_DDP, 0, DTRAIN_TAPE_F16, 0, 2, false},
    {"shard_grad_op, offloaded", DTRAIN_STRATEGY_SHARD_GRAD_OP, OG, 0, 0, 2, false},
    {"full_shard", DTRAIN_STRATEGY_FULL_SHARD, 0, DTRAIN_TAPE_BF16, 0, 3, true},
    {"full_shard, all offloaded", DTRAIN_STRATEGY_FULL_SHARD, ALL, 0, 0, 2, true},
    {"zero3, all offloaded", DTRAIN_STRATEGY_ZERO3, ALL, 0, 0, 2, false},
};

static saved_run *case_run(const gpu_case *c, bool gpu)
{
    saved_run *r = saved_new(c->ranks, c->kind);
    r->mode = DTRAIN_LAUNCH_PROCESSES;
    r->device = gpu ? dtrain_cuda_device_ops() : device_table("cpu");
    r->strategy.offload = gpu ? c->offload : 0;
    r->tape_flags = c->tape_flags;
    r->compression.kind = c->compression;
    r->compression.dense_steps = 1;
    r->compression.dense_below = 1;
    r->compression.topk_ratio = c->compression ? 0.05f : 0;
    r->background = c->background;
    r->dropout = 0.1f;
    r->steps = 4;
    return r;
}

static void test_resume(void)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const gpu_case *c = &cases[i];
        char folder[64] = "/tmp/dtrain_cuda_checkpoint_XXXXXX", command[128];
        if (!mkdtemp(folder)) exit(3);
        saved_run *whole = case_run(c, true), *first = case_run(c, true),
                  *second = case_run(c, true);
        first->steps = first->save_every = 2;
        first->save = second->load = folder;
        if (saved_go(whole, c->name) && saved_go(first, c->name) && saved_go(second, c->name))
            saved_compare(whole, second, 2, c->name);
        saved_run *cpu = case_run(c, false); /* the same, and nothing trained */
        cpu->load = folder;
        cpu->steps = 2;
        if (saved_go(cpu, c->name)) saved_compare_state(first, cpu, c->name, false);
        cpu->steps = cpu->save_every = 3;
        cpu->save = folder;
        first->load = folder;
        first->save = NULL;
        first->steps = 3;
        if (saved_go(cpu, c->name) && saved_go(first, c->name)) {
            CHECK_MSG(first->from[0] == 3, "%s: from step %lld", c->name,
                      (long long)first->from[0]);
            saved_compare_state(cpu, first, c->name, false);
        }
        snprintf(command, sizeof command, "rm -rf %s", folder);
        CHECK(system(command) == 0);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_resume);
    return test_summary();
}
