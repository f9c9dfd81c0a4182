/* test_checkpoint.c: what is saved is loaded: exactly when a run goes on as it was, resharded under any other number
 * of ranks, strategy and precision; retention, locks, damage, refusals. Faults of the disk: test_storage_faults.c. */
#include "test.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"

static char folder[64];

static void folder_make(void)
{
    snprintf(folder, sizeof folder, "/tmp/dtrain_checkpoint_XXXXXX");
    if (!mkdtemp(folder)) exit(3);
}

static void shell(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    CHECK_MSG(system(command) == 0, "%s", command);
}

static void folder_remove(void) { shell("rm -rf %s", folder); }

/* ---- exact resume ---- */

typedef struct variant {
    const char *name;
    uint32_t kind;
    int ranks;
    uint32_t micro, tape_flags, param_dtype, reduce_dtype, compression;
    bool sgd, background, hierarchical;
    float dropout;
    bool muon; /* and Lion, in groups */
} variant;

static saved_run *variant_run(const variant *v)
{
    saved_run *r = saved_new(v->ranks, v->kind);
    r->micro = v->micro ? v->micro : 1;
    r->tape_flags = v->tape_flags;
    r->strategy.param_dtype = v->param_dtype;
    r->strategy.reduce_dtype = v->reduce_dtype;
    r->strategy.hierarchical = v->hierarchical;
    if (v->hierarchical || v->kind == DTRAIN_STRATEGY_HYBRID_SHARD) r->strategy.node_size = 2;
    r->compression.kind = v->compression;
    r->compression.dense_steps = 2;
    r->compression.dense_below = 1;
    r->compression.topk_ratio = 0.05f;
    r->sgd = v->sgd;
    r->muon = v->muon;
    r->momentum = 0.9f;
    r->background = v->background;
    r->dropout = v->dropout;
    if (v->compression == DTRAIN_COMPRESSION_TOPK) {
        r->compression.topk_momentum = v->sgd ? 0.5f : 0;
        r->momentum = 0;
        r->compression.warmup_steps = 4;
    }
    return r;
}

/* N + M steps, and N steps, save, load, M steps: the same bits. */
static void resume(const variant *v)
{
    char what[200];
    snprintf(what, sizeof what, "%s, %d ranks", v->name, v->ranks);
    folder_make();
    saved_run *whole = variant_run(v), *first = variant_run(v), *second = variant_run(v);
    first->steps = first->save_every = 3;
    first->save = second->load = folder;
    if (saved_go(whole, what) && saved_go(first, what) && saved_go(second, what)) {
        CHECK_MSG(second->from[0] == 3, "%s: resumed at %lld", what, (long long)second->from[0]);
        CHECK_MSG(!second->loaded[0].note[0], "%s: %s", what, second->loaded[0].note);
        saved_compare(whole, second, 3, what);
    }
    folder_remove();
}

static void test_resume(void)
{
    static const variant list[] = {
        {"ddp", DTRAIN_STRATEGY_DDP, 1, 1, 0, 0, 0, 0, false, false, false, 0, false},
        {"ddp", DTRAIN_STRATEGY_DDP, 2, 3, 0, 0, 0, 0, false, true, false, 0.1f, false},
        {"ddp, fp16", DTRAIN_STRATEGY_DDP, 2, 1, DTRAIN_TAPE_F16, 0, 0, 0, false, true, false, 0.1f,
         false},
        {"ddp, sgd", DTRAIN_STRATEGY_DDP, 3, 2, 0, 0, 0, 0, true, false, false, 0.1f, false},
        {"ddp, bf16 on the wire", DTRAIN_STRATEGY_DDP, 4, 1, DTRAIN_TAPE_BF16, 0, DTRAIN_DTYPE_BF16,
         0, false, true, false, 0.1f, false},
        {"ddp, hierarchical", DTRAIN_STRATEGY_DDP, 4, 1, 0, 0, 0, 0, false, false, true, 0, false},
        {"ddp, top-k", DTRAIN_STRATEGY_DDP, 3, 2, 0, 0, 0, DTRAIN_COMPRESSION_TOPK, false, true,
         false, 0.1f, false},
        {"ddp, top-k with momentum", DTRAIN_STRATEGY_DDP, 2, 1, 0, 0, 0, DTRAIN_COMPRESSION_TOPK,
         true, false, false, 0, false},
        {"ddp, top-k, hierarchical", DTRAIN_STRATEGY_DDP, 4, 1, 0, 0, 0, DTRAIN_COMPRESSION_TOPK,
         false, false, true, 0, false},
        {"zero1", DTRAIN_STRATEGY_ZERO1, 3, 2, 0, 0, 0, 0, false, false, false, 0.1f, false},
        {"shard_grad_op", DTRAIN_STRATEGY_SHARD_GRAD_OP, 3, 2, 0, 0, 0, 0, false, true, false, 0.1f,
         false},
        {"full_shard", DTRAIN_STRATEGY_FULL_SHARD, 3, 2, 0, 0, 0, 0, false, true, false, 0.1f,
         false},
        {"full_shard, bf16", DTRAIN_STRATEGY_FULL_SHARD, 2, 1, DTRAIN_TAPE_BF16, DTRAIN_DTYPE_BF16,
         DTRAIN_DTYPE_BF16, 0, false, false, false, 0.1f, false},
        {"full_shard, fp16", DTRAIN_STRATEGY_FULL_SHARD, 4, 2, DTRAIN_TAPE_F16, 0, 0, 0, false,
         true, false, 0.1f, false},
        {"zero3", DTRAIN_STRATEGY_ZERO3, 3, 2, 0, 0, 0, 0, true, false, false, 0.1f, false},
        {"zero3", DTRAIN_STRATEGY_ZERO3, 8, 1, 0, 0, 0, 0, false, true, false, 0.1f, false},
        {"ddp, muon and lion", DTRAIN_STRATEGY_DDP, 2, 2, 0, 0, 0, 0, false, false, false, 0.1f,
         true},
        {"zero3, muon and lion", DTRAIN_STRATEGY_ZERO3, 3, 1, DTRAIN_TAPE_BF16, 0, 0, 0, true, true,
         false, 0.1f, true},
        {"hybrid_shard", DTRAIN_STRATEGY_HYBRID_SHARD, 4, 2, 0, 0, 0, 0, false, true, false, 0.1f,
         false},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) resume(&list[i]);
}

/* ---- resharding ---- */

/* Save at step 3 as `from`, load as `to` and look at the state, before any further step. */
static void reshard(const variant *from, const variant *to, const char *how)
{
    char what[200];
    snprintf(what, sizeof what, "%s on %d ranks to %s on %d (%s)", from->name, from->ranks,
             to->name, to->ranks, how);
    folder_make();
    saved_run *first = variant_run(from), *second = variant_run(to);
    first->steps = first->save_every = second->steps = 3;
    first->save = second->load = folder;
    if (saved_go(first, what) && saved_go(second, what)) {
        CHECK_MSG(second->loaded[0].ranks == from->ranks && second->from[0] == 3,
                  "%s: %d ranks, step %lld", what, second->loaded[0].ranks,
                  (long long)second->from[0]);
        CHECK_MSG(first->hash[0] == second->hash[0], "%s: parameters differ", what);
        saved_compare_state(first, second, what, false);
        for (int i = 0; i < 16; i++)
            CHECK_MSG(
                first->tape_flags != second->tape_flags || first->scalars[i] == second->scalars[i],
                "%s: scalar %d is %llu and %llu", what, i, (unsigned long long)first->scalars[i],
                (unsigned long long)second->scalars[i]);
    }
    folder_remove();
    munmap(first, sizeof *first);
    munmap(second, sizeof *second);
}

static void test_reshard(void)
{
    static const variant list[] = {
        {"ddp", DTRAIN_STRATEGY_DDP, 1, 1, 0, 0, 0, 0, false, false, false, 0, false},
        {"zero1", DTRAIN_STRATEGY_ZERO1, 2, 1, 0, 0, 0, 0, false, true, false, 0, false},
        {"shard_grad_op", DTRAIN_STRATEGY_SHARD_GRAD_OP, 3, 1, 0, 0, 0, 0, false, false, false, 0,
         false},
        {"full_shard", DTRAIN_STRATEGY_FULL_SHARD, 4, 1, 0, 0, 0, 0, false, true, false, 0, false},
        {"full_shard, bf16", DTRAIN_STRATEGY_FULL_SHARD, 5, 1, DTRAIN_TAPE_BF16, DTRAIN_DTYPE_BF16,
         0, 0, false, false, false, 0, false},
        {"zero3", DTRAIN_STRATEGY_ZERO3, 8, 1, 0, 0, 0, 0, false, false, false, 0, false},
        {"hybrid_shard", DTRAIN_STRATEGY_HYBRID_SHARD, 6, 1, 0, 0, 0, 0, false, true, false, 0,
         false},
        {"zero1, hierarchical", DTRAIN_STRATEGY_ZERO1, 4, 1, 0, 0, 0, 0, false, false, true, 0,
         false},
    };
    const size_t count = sizeof list / sizeof list[0];
    for (size_t a = 0; a < count; a++)
        for (size_t b = 0; b < count; b++)
            if (test_full() || a == b || (a + b) % 3 == 0) reshard(&list[a], &list[b], "AdamW");
    const variant owners = {
        "zero3, muon", DTRAIN_STRATEGY_ZERO3, 3, 1, 0, 0, 0, 0, false, false, false, 0, true};
    const variant whole = {
        "ddp, muon", DTRAIN_STRATEGY_DDP, 2, 1, 0, 0, 0, 0, false, false, false, 0, true};
    reshard(&owners, &whole, "groups");
    reshard(&whole, &owners, "groups");
}

/* Residuals that cannot be taken as they are: the mean over the ranks that saved them, zeros between nodes, left out
 * where there are none. */
static void test_residuals(void)
{
    variant topk = {"top-k", DTRAIN_STRATEGY_DDP,     3,    1,     0,     0,
                    0,       DTRAIN_COMPRESSION_TOPK, true, false, false, 0,
                    false};
    folder_make();
    saved_run *first = variant_run(&topk);
    first->steps = first->save_every = 4;
    first->save = folder;
    if (!saved_go(first, "top-k")) return;
    static const struct {
        int ranks;
        bool hierarchical, compressed;
        const char *says;
    } list[] = {{2, false, true, "the mean over"},
                {4, true, true, "begins anew: residual (of nodes)"},
                {3, false, false, "left out"},
                {3, false, true, ""}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        variant v = topk;
        int compared = 0;
        v.ranks = list[i].ranks;
        v.hierarchical = list[i].hierarchical;
        if (!list[i].compressed) v.compression = 0;
        saved_run *second = variant_run(&v);
        if (!list[i].compressed) second->momentum = 0;
        second->steps = 4;
        second->load = folder;
        if (!saved_go(second, list[i].says)) continue;
        CHECK_MSG(list[i].says[0] ? strstr(second->loaded[1].note, list[i].says) != NULL
                                  : !second->loaded[1].note[0],
                  "\"%s\", expected \"%s\"", second->loaded[1].note, list[i].says);
        for (size_t t = 0; t < second->tensor_count && i == 0; t++) {
            size_t f = 0;
            if (second->tensors[t].kind != DTRAIN_STATE_RESIDUAL &&
                second->tensors[t].kind != DTRAIN_STATE_VELOCITY)
                continue;
            while (first->tensors[f].kind != second->tensors[t].kind ||
                   strcmp(first->tensors[f].name, second->tensors[t].name) != 0)
                f++;
            const uint64_t bytes = first->tensors[f].bytes;
            for (uint64_t e = 0; e < bytes / 4; e++) {
                float sum = 0, one, got[2];
                const float third = 1.0f / 3;
                for (int r = 0; r < 3; r++) {
                    memcpy(&one, first->image + first->tensors[f].at + (uint64_t)r * bytes + 4 * e,
                           4);
                    sum += third * one;
                }
                for (int r = 0; r < 2; r++)
                    memcpy(&got[r],
                           second->image + second->tensors[t].at + (uint64_t)r * bytes + 4 * e, 4);
                compared += sum != 0;
                CHECK(memcmp(&got[0], &sum, 4) == 0 && memcmp(&got[1], &sum, 4) == 0);
            }
        }
        CHECK(i || compared > 100);
    }
    folder_remove();
}

/* Other precision, values alone, a model that has changed: what is carried, and what is said. */
static void test_does_not_fit(void)
{
    variant v = {"ddp", DTRAIN_STRATEGY_DDP, 2, 1, 0, 0, 0, 0, false, false, false, 0, false};
    folder_make();
    saved_run *first = variant_run(&v);
    first->steps = first->save_every = 2;
    first->save = folder;
    saved_go(first, "first");

    v.tape_flags = DTRAIN_TAPE_F16; /* there was no loss scale */
    saved_run *half = variant_run(&v);
    half->steps = 2;
    half->load = folder;
    if (saved_go(half, "fp16"))
        CHECK(strstr(half->loaded[0].note, "begins anew: scalar \"scaler.scale\""));
    v.tape_flags = 0;

    v.sgd = true; /* there is no momentum in it */
    saved_run *other = variant_run(&v);
    other->steps = 2;
    other->load = folder;
    CHECK(saved_launch(other) != DTRAIN_OK);
    CHECK_MSG(strstr(other->error[0], "missing in it: momentum \"model.embed_tokens.weight\"") &&
                  strstr(other->error[1], "missing in it"),
              "%s", other->error[0]);
    other->how.partial = true;
    if (saved_go(other, "partial")) CHECK(strstr(other->loaded[0].note, "missing in it: momentum"));
    other->how.partial = false;
    other->how.values_only = true;
    if (saved_go(other, "values only")) {
        CHECK(other->hash[0] == first->hash[0] && !other->loaded[0].note[0]);
        CHECK(other->scalars[0] == 0); /* steps of the optimizer */
    }
    folder_remove();
}

/* ---- what stays in a directory ---- */

/* What no shape shows is compared: of the model it must be the same, of the run it is said. */
static void test_settings(void)
{
    static const char *const model[] = {"heads", "4", "activation", "gelu", NULL};
    static const char *const other[] = {"heads", "8", "activation", "gelu", "epsilon", "1", NULL};
    static const char *const run[] = {"seed", "1", "data", "a \"b\" \\ \xc3\xa9\n",
                                      "old",  "",  NULL};
    static const char *const later[] = {"seed", "2", "new", "3", "old", "5", NULL};
    static const struct {
        const char *const *model, *const *settings, *says;
        bool partial, values_only, fails;
    } list[] = {
        {model, run, NULL, false, false, false},
        {NULL, NULL, NULL, false, false, false},
        {other, run, "of another model: heads was 4 and is 8", false, false, true},
        {other, run, "of another model: heads was 4 and is 8", false, true, true},
        {other, run, "heads was 4 and is 8", true, false, false},
        {model, later, "seed was 1 and is 2, old was not given and is 5", false, false, false},
        {model, later, NULL, false, true, false},
    };
    variant v = {"ddp", DTRAIN_STRATEGY_DDP, 2, 1, 0, 0, 0, 0, false, true, false, 0, false};
    saved_run *r;
    folder_make();
    r = variant_run(&v);
    r->steps = r->save_every = 2;
    r->save = folder;
    r->model = model, r->settings = run;
    saved_go(r, "settings");
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        r = variant_run(&v);
        r->steps = 2;
        r->load = folder;
        r->model = list[i].model, r->settings = list[i].settings;
        r->how.partial = list[i].partial, r->how.values_only = list[i].values_only;
        saved_launch(r);
        const char *found = list[i].fails ? r->error[1] : r->loaded[1].note;
        CHECK_MSG((r->ended[1] == DTRAIN_OK) == !list[i].fails, "%zu: %s", i, r->error[1]);
        CHECK_MSG(list[i].says ? strstr(found, list[i].says) != NULL : !*found, "%zu: %s", i,
                  found);
    }
    folder_remove();
}

/* No optimizer goes on with another's state without a word. */
static void test_other_optimizers(void)
{
    static const char *const missing[4] = {"missing in it: exp_avg \"", "missing in it: lion \"",
                                           "missing in it: momentum \"", NULL};
    static const char *const kept[3] = {"left out: exp_avg, exp_avg_sq", "left out: lion",
                                        "left out: momentum"};
    variant v = {"ddp", DTRAIN_STRATEGY_DDP, 2, 1, 0, 0, 0, 0, false, true, false, 0, false};
    for (int from = 0; from < 4; from++) { /* AdamW, Lion, SGD, SGD without momentum */
        folder_make();
        for (int to = -1; to < 4; to++) {
            const int kind = to < 0 ? from : to;
            saved_run *r = variant_run(&v);
            r->steps = 2;
            r->save_every = to < 0 ? 2 : 0;
            if (to < 0) r->save = folder;
            else r->load = folder;
            r->lion = kind == 1, r->sgd = kind >= 2, r->momentum = kind == 2 ? 0.9f : 0;
            saved_launch(r);
            const bool goes = to < 0 || to == from || to == 3;
            CHECK_MSG((r->ended[0] == DTRAIN_OK) == goes, "%d to %d: %s", from, to, r->error[0]);
            if (!goes)
                CHECK_MSG(strstr(r->error[0], missing[to]), "%d to %d: %s", from, to, r->error[0]);
            if (to == 3 && from < 3)
                CHECK_MSG(strstr(r->loaded[0].note, kept[from]), "%d to %d: %s", from, to,
                          r->loaded[0].note);
        }
        folder_remove();
    }
}

static int steps_of(int64_t *steps, int room)
{
    struct dirent **names;
    const int count = scandir(folder, &names, NULL, alphasort);
    int found = 0;
    for (int i = 0; i < count; i++) {
        long long step;
        char rest[8] = "";
        if (strlen(names[i]->d_name) == 17 &&
            sscanf(names[i]->d_name, "step-%lld%7s", &step, rest) == 1 && found < room)
            steps[found++] = step;
        CHECK_MSG(!strstr(names[i]->d_name, ".tmp") && !strstr(names[i]->d_name, ".old") &&
                      !strstr(names[i]->d_name, "probe"),
                  "%s is left", names[i]->d_name);
        free(names[i]);
    }
    free(names);
    return found;
}

static void check_steps(const char *what, const int64_t *expected, int count)
{
    int64_t steps[40];
    const int found = steps_of(steps, 40);
    char text[200] = "";
    for (int i = 0; i < found; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), " %lld", (long long)steps[i]);
    CHECK_MSG(found == count && memcmp(steps, expected, (size_t)count * sizeof *steps) == 0,
              "%s: there are%s", what, text);
}

static void test_retention(void)
{
    static const int64_t last[] = {8, 9, 10}, two[] = {9, 10},
                         all[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    variant v = {"zero1", DTRAIN_STRATEGY_ZERO1, 2, 1, 0, 0, 0, 0, false, true, false, 0, false};
    for (int i = 0; i < 4; i++) {
        folder_make();
        saved_run *r = variant_run(&v);
        r->steps = 10;
        r->save_every = 1;
        r->save = folder;
        if (i == 1) r->keep.keep = 2;
        if (i == 2) r->keep.keep = DTRAIN_KEEP_ALL;
        if (i == 3) r->keep.keep = 1, r->keep.keep_best = 2;
        saved_go(r, "retention");
        if (i == 0) check_steps("default", last, 3);
        if (i == 1) check_steps("two", two, 2);
        if (i == 2) check_steps("all", all, 10);
        if (i == 3) { /* the best two so far at any time, and the last: the rest by a naive rule */
            bool kept[11] = {false};
            for (int step = 1; step <= 10; step++) {
                kept[step] = true;
                for (int old = 1; old < step; old++) {
                    int better = 0;
                    for (int k = 1; k <= step; k++)
                        if (kept[k] && k != old)
                            better += r->records[0][k - 1].loss < r->records[0][old - 1].loss;
                    if (kept[old] && better >= 2) kept[old] = false;
                }
            }
            int64_t expected[11];
            int count = 0;
            for (int step = 1; step <= 10; step++)
                if (kept[step]) expected[count++] = step;
            check_steps("best", expected, count);
        }
        CHECK(r->info[0].saved == 10 && r->info[0].last_step == 10 && r->info[1].failed == 0);
        shell("grep -qx step-000000000010 %s/latest", folder);
        folder_remove();
    }
}

/* Files of others are not touched, and a directory with one in it stays. */
static void test_foreign_files(void)
{
    static const int64_t expected[] = {1, 3, 4};
    variant v = {"ddp", DTRAIN_STRATEGY_DDP, 1, 1, 0, 0, 0, 0, false, false, false, 0, false};
    folder_make();
    saved_run *r = variant_run(&v);
    r->keep.keep = 2;
    r->steps = 1;
    r->save_every = 1;
    r->save = folder;
    saved_go(r, "first");
    shell("echo mine > %s/step-000000000001/notes.txt; mkdir %s/step-000000000007.tmp %s/step-1 "
          "%s/step-000000000002.x;"
          "echo mine > %s/step-000000000007.tmp/model-0.safetensors.bak",
          folder, folder, folder, folder, folder);
    r->load = folder;
    r->steps = 4;
    CHECK(saved_launch(r) != DTRAIN_OK); /* what is left of step 7 is not ours to remove */
    CHECK_MSG(strstr(r->error[0], "files in it that no checkpoint has"), "%s", r->error[0]);
    shell("rm -r %s/step-000000000007.tmp", folder);
    saved_go(r, "second");
    check_steps("foreign", expected, 3);
    shell("test -f %s/step-000000000001/notes.txt && test -d %s/step-1 && test -d "
          "%s/step-000000000002.x",
          folder, folder, folder);
    folder_remove();
}

/* ---- one history ---- */

static saved_run *part_of_run(int steps, const char *load)
{
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_ZERO1);
    r->steps = steps;
    r->save_every = 1;
    r->save = folder;
    r->load = load;
    return r;
}

/* Another run is refused, or sets aside what is there; one that goes back leaves later steps behind, whatever their
 * numbers; nothing that was set aside is removed, or taken for the newest. */
static void test_history(void)
{
    static const int64_t first[] = {3, 4, 5}, back[] = {2, 3}, anew[] = {1};
    char path[128];
    folder_make();
    saved_run *r = part_of_run(5, NULL);
    saved_go(r, "a run");
    const uint64_t hash = r->hash[0];
    check_steps("a run", first, 3);

    saved_run *other = part_of_run(1, NULL);
    CHECK(saved_launch(other) == DTRAIN_ERROR_RANK_FAILED && other->ended[1] == DTRAIN_ERROR_DATA);
    CHECK_MSG(strstr(other->error[0], "of another run, the newest of step 5"), "%s",
              other->error[0]);
    check_steps("refused", first, 3);
    other->load = folder; /* its values alone are no history */
    other->how.values_only = true;
    CHECK(saved_launch(other) != DTRAIN_OK && other->ended[0] == DTRAIN_ERROR_DATA);

    snprintf(path, sizeof path, "%s/step-000000000003", folder);
    r = part_of_run(3, path); /* goes back, and ends before it saves */
    saved_go(r, "back");
    shell("grep -qx step-000000000003 %s/latest", folder);
    r->load = folder;
    r->keep.keep = 1;
    r->steps = 4;
    if (saved_go(r, "and on from there")) CHECK(r->from[0] == 3 && r->from[1] == 3);
    shell("cd %s && test \"$(echo step-* aside-*/*)\" = 'step-000000000004 "
          "aside-1/step-000000000004 aside-1/step-000000000005'",
          folder);
    snprintf(path, sizeof path, "%s/aside-1/step-000000000005", folder);
    r = part_of_run(5, path); /* what was set aside is a checkpoint, of this run */
    r->save = NULL;
    if (saved_go(r, "aside")) CHECK(r->from[0] == 5 && r->hash[0] == hash);

    r = part_of_run(1, NULL);
    r->keep.set_aside = true;
    saved_go(r, "anew");
    check_steps("anew", anew, 1);
    shell("test -d %s/aside-2/step-000000000004", folder);
    r->load = folder;
    r->steps = 3;
    r->keep.keep = 2;
    if (saved_go(r, "on, with nothing to set aside")) CHECK(r->from[0] == 1);
    check_steps("anew", back, 2);
    shell("test ! -e %s/aside-3", folder);
    folder_remove();
}

static unsigned crc_of(const char *bytes, size_t count)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < count; i++) {
        crc ^= (unsigned char)bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* Replace everything from one text up to another in the manifest of step 2, and seal it. From a
 * '#' on, bytes of the first text are any. */
static void edit_manifest(const char *begin, const char *end, const char *instead)
{
    const size_t length = strlen(instead);
    static char text[1 << 20];
    char path[128];
    snprintf(path, sizeof path, "%s/step-000000000002/manifest.json", folder);
    FILE *file = fopen(path, "r");
    if (!CHECK(file != NULL)) return;
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    const size_t hash = strcspn(begin, "#"), skipped = strlen(begin);
    char *from = text;
    while (from && memcmp(from, begin, hash) != 0) from = strchr(from + 1, begin[0]);
    char *to = from ? strstr(from + skipped, end) : NULL;
    if (!CHECK(to && bytes > 24 && bytes + length < sizeof text)) return;
    memmove(from + length, to, (size_t)(text + bytes - to));
    memcpy(from, instead, length);
    bytes -= (size_t)(to - from) - length + 24; /* of the seal */
    file = fopen(path, "w");
    if (!CHECK(file != NULL)) return;
    fwrite(text, 1, bytes, file);
    fprintf(file, ", \"crc32c\": \"%08x\"}\n", crc_of(text, bytes));
    fclose(file);
}

/* A checkpoint that does not say which run it continues. */
static void test_without_run(void)
{
    static const int64_t steps[] = {2, 3, 4};
    folder_make();
    saved_run *r = part_of_run(2, NULL);
    saved_go(r, "an old run");
    shell("rm -r %s/step-000000000001", folder);
    edit_manifest("\"run\"", "\"config\"", "");
    CHECK(saved_launch(r) != DTRAIN_OK && r->ended[0] == DTRAIN_ERROR_DATA);
    for (r = part_of_run(3, folder); r->steps < 5; r->steps++)
        if (saved_go(r, "goes on")) CHECK(r->from[0] == r->steps - 1 && !r->loaded[0].note[0]);
    check_steps("goes on", steps, 3);
    folder_remove();
}

/* A manifest of another version of the format is refused: nothing else is read of it. */
static void test_other_version(void)
{
    for (int version = 2; version <= 4; version++) {
        char instead[20];
        folder_make();
        saved_run *r = part_of_run(2, NULL);
        saved_go(r, "version 3");
        shell("rm -r %s/step-000000000001", folder);
        snprintf(instead, sizeof instead, "\"version\": %d", version);
        edit_manifest("\"version\"", ", \"library\"", instead);
        r = part_of_run(3, folder);
        if (version == 3) CHECK(saved_go(r, "the same version") && r->from[0] == 2);
        else
            CHECK_MSG(saved_launch(r) != DTRAIN_OK && strstr(r->error[0], "it has version ") &&
                          strstr(r->error[0], "reads version 3"),
                      "version %d: %s", version, r->error[0]);
        folder_remove();
    }
}

/* Read a file of tensors of the only rank at step 2, and return the bytes of its header. */
static size_t read_tensors(const char *name, char *text, size_t room, size_t *bytes)
{
    char path[128];
    snprintf(path, sizeof path, "%s/step-000000000002/%s-00000.safetensors", folder, name);
    FILE *file = fopen(path, "r");
    *bytes = file ? fread(text, 1, room, file) : 0;
    if (file) fclose(file);
    return CHECK(*bytes > 8) ? (unsigned char)text[0] + 256u * (unsigned char)text[1] : 0;
}

/* Give a number of the only rank at step 2 another value, with its checksums. */
static void edit_scalar(const char *name, uint64_t value)
{
    static char model[1 << 16], state[1 << 16];
    char path[128], headers[64], text[128];
    size_t model_bytes, bytes;
    const size_t model_header = read_tensors("model", model, sizeof model, &model_bytes);
    const size_t header = read_tensors("state", state, sizeof state - 1, &bytes);
    snprintf(text, sizeof text, "\"scalar.%s\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[",
             name);
    const char *at = strstr(state + 8, text);
    if (!CHECK(at != NULL)) return;
    memcpy(state + 8 + header + atoll(at + strlen(text)), &value, sizeof value);
    snprintf(text, sizeof text, "\"piece:scalar.%s\":\"10 0 1 0 0 0 0 0 0 0 1 0 0 0 0 1 ", name);
    char *digits = strstr(state + 8, text);
    if (!CHECK(digits != NULL)) return;
    snprintf(path, sizeof path, "%08x", crc_of((const char *)&value, sizeof value));
    memcpy(digits + strlen(text), path, 8);
    snprintf(path, sizeof path, "%s/step-000000000002/state-00000.safetensors", folder);
    FILE *file = fopen(path, "w");
    if (!CHECK(file != NULL)) return;
    fwrite(state, 1, bytes, file);
    fclose(file);
    snprintf(headers, sizeof headers, "\"headers\": \"%08x%08x", crc_of(model + 8, model_header),
             crc_of(state + 8, header));
    edit_manifest("\"headers\": \"################", "", headers);
}

/* Steps and counts of a file to which nothing can be added, and a loss scale that is none, are refused on every rank;
 * all below that is loaded, and trained and saved from. */
static void test_large_numbers(void)
{
    static const struct {
        const char *name;
        uint64_t value;
        const char *words; /* NULL: it is loaded */
    } edits[] = {{"step", 9223372036854775807u, "step 9223372036854775807"},
                 {"step", 2305843009213693952u, "step 2305843009213693952"},
                 {"optimizer.step", 9223372036854775807u, "optimizer.step is 9223372036854775807"},
                 {"trainer.step", 9223372036854775807u, "trainer.step is 9223372036854775807"},
                 {"trainer.step", UINT64_MAX, "trainer.step is 18446744073709551615"},
                 {"trainer.step", 2305843009213693951u, NULL},
                 {"trainer.seed", UINT64_MAX, NULL},
                 {"trainer.tokens", UINT64_MAX, "trainer.tokens is 18446744073709551615"}};
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char instead[96];
        folder_make();
        saved_run *r = part_of_run(2, NULL);
        r->ranks = 1;
        saved_go(r, "large numbers");
        shell("rm -r %s/step-000000000001", folder);
        snprintf(instead, sizeof instead, "\"step\": %llu", (unsigned long long)edits[i].value);
        if (i < 2) edit_manifest("\"step\"", ", ", instead);
        else edit_scalar(edits[i].name, edits[i].value);
        r = part_of_run(3, folder);
        if (edits[i].words)
            CHECK_MSG(saved_launch(r) != DTRAIN_OK && r->ended[1] == DTRAIN_ERROR_DATA &&
                          strstr(r->error[0], edits[i].words),
                      "edit %zu: %s", i, r->error[0]);
        else CHECK_MSG(saved_go(r, "goes on") && r->from[0] == 2, "edit %zu", i);
        folder_remove();
    }
}

/* Every byte of a piece's description is another one, and the checksums are right: no value of it is taken. */
static void test_descriptions(void)
{
    static char text[1 << 16];
    char path[128], headers[64];
    folder_make();
    saved_run *r = part_of_run(2, NULL);
    r->ranks = 1;
    saved_go(r, "descriptions");
    shell("rm -r %s/step-000000000001", folder);
    snprintf(path, sizeof path, "%s/step-000000000002/model-00000.safetensors", folder);
    FILE *file = fopen(path, "r+");
    if (!CHECK(file != NULL)) return;
    size_t bytes;
    const size_t header = read_tensors("model", text, sizeof text - 1, &bytes);
    char *at = strstr(text + 8, "\"piece:"), *end;
    if (CHECK(header + 8 <= bytes && at && (at = strstr(at, "\":\"")) != NULL)) {
        for (at += 3, end = strchr(at, '"'); at < end; at++) {
            const char was = *at;
            *at = was == '9' ? '8' : '9';
            rewind(file);
            fwrite(text, 1, bytes, file);
            fflush(file);
            snprintf(headers, sizeof headers, "\"headers\": \"%08x", crc_of(text + 8, header));
            edit_manifest("\"headers\": \"########", "", headers);
            saved_run *again = part_of_run(3, folder);
            again->ranks = 1;
            CHECK_MSG(saved_launch(again) != DTRAIN_OK && again->ended[0] == DTRAIN_ERROR_DATA &&
                          !strstr(again->error[0], "its header does"),
                      "byte %d of a description: %s", (int)(end - at), again->error[0]);
            munmap(again, sizeof *again);
            *at = was;
        }
    }
    fclose(file);
    folder_remove();
}

/* ---- small stacks ---- */

/* A host's stack of 64 KiB, less what its own functions take; sanitizers and -O0 need a larger one. */
#if defined __OPTIMIZE__ && !RANKS_SANITIZED
enum { SMALL_STACK = 40 << 10 };
#else
enum { SMALL_STACK = 512 << 10 };
#endif

static void *small_stack_run(void *argument)
{
    saved_run *r = (saved_run *)argument;
    for (r->steps = 2; r->steps <= 4; r->steps += 2) {
        saved_go(r, "a small stack");
        r->load = folder;
    }
    return NULL;
}

/* Hosts have threads with small stacks, and limits (ulimit -s). Ranks that are forked from such a thread, ranks
 * that are threads, and the library's own threads train, save in the background and load. */
static void test_small_stacks(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_FULL_SHARD};
    pthread_attr_t before, attributes;
    pthread_t thread;
    pthread_getattr_default_np(&before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, SMALL_STACK);
    if (!CHECK(pthread_setattr_default_np(&attributes) == 0)) return;
    for (int i = 0; i < 4; i++) {
        folder_make();
        saved_run *r = saved_new(2, kinds[i / 2]);
        r->mode = i % 2 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
        r->save_every = 2;
        r->save = folder;
        r->background = true;
        if (CHECK(pthread_create(&thread, NULL, small_stack_run, r) == 0))
            pthread_join(thread, NULL);
        CHECK(r->from[1] == 2);
        folder_remove();
    }
    pthread_setattr_default_np(&before);
    pthread_attr_destroy(&attributes);
    pthread_attr_destroy(&before);
}

/* ---- two runs, and directories that will not do ---- */

/* Wait until the other run has been refused, at most ten seconds. */
static int await_other(dtrain_world *world, saved_run *r, int64_t step)
{
    char path[128];
    if (step == 1 && dtrain_world_rank(world) == 0) shell("touch %s/begun", r->save);
    snprintf(path, sizeof path, "%s/done", r->save);
    for (int i = 0; step == 1 && i < 1000 && access(path, F_OK) != 0; i++) ranks_sleep_us(10000);
    return 0;
}

static void test_lock(void)
{
    folder_make();
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_DDP), *other = saved_new(1, DTRAIN_STRATEGY_DDP);
    r->steps = r->save_every = 2;
    r->save = other->save = folder;
    r->during = await_other;
    other->steps = 1;
    pid_t child = fork();
    if (child == 0) {
        char path[128];
        snprintf(path, sizeof path, "%s/begun", folder);
        for (int i = 0; i < 1000 && access(path, F_OK) != 0; i++) ranks_sleep_us(10000);
        const bool refused = saved_launch(other) != DTRAIN_OK &&
                             strstr(other->error[0], "another run saves") != NULL;
        shell("touch %s/done", folder);
        _exit(refused ? 0 : 1);
    }
    dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_PROCESSES);
    CHECK(dtrain_launch(&desc, saved_main, r, NULL) == DTRAIN_OK);
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_MSG(status == 0, "the second run: %s", other->error[0]);
    r->during = NULL;
    r->load = folder;
    r->steps = 4;
    saved_go(r, "after it"); /* the lock is free again */
    r->mode = DTRAIN_LAUNCH_PROCESSES;
    r->steps = 6;
    saved_go(r, "and again"); /* also with forked ranks */
    folder_remove();
}

static void test_directories(void)
{
    char path[200];
    folder_make();
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_DDP);
    r->steps = r->save_every = 1;
    r->save = path;
    shell("echo x > %s/file", folder);
    snprintf(path, sizeof path, "%s/file/b", folder);
    CHECK(saved_launch(r) != DTRAIN_OK && strstr(r->error[0], "cannot be made"));
    snprintf(path, sizeof path, "%s//a/b/", folder);
    saved_go(r, "made");
    shell("test -f %s/a/b/step-000000000001/manifest.json", folder);
    snprintf(path, sizeof path, "%s/file", folder);
    CHECK(saved_launch(r) != DTRAIN_OK && strstr(r->error[0], "cannot be"));
    r->save = NULL;
    r->load = path;
    CHECK(saved_launch(r) != DTRAIN_OK && r->ended[1] == DTRAIN_ERROR_FILE);
    snprintf(path, sizeof path, "%s/none", folder);
    CHECK(saved_launch(r) != DTRAIN_OK && r->ended[0] == DTRAIN_ERROR_NOT_FOUND &&
          r->loaded[0].step == -1);
    shell("mkdir %s/none", folder);
    CHECK(saved_launch(r) != DTRAIN_OK && r->ended[1] == DTRAIN_ERROR_NOT_FOUND &&
          strstr(r->error[1], "there is no checkpoint in"));
    shell("cd %s/a/b/step-000000000001 && rm manifest.json", folder); /* what was there is lost */
    snprintf(path, sizeof path, "%s/a/b/step-000000000001", folder);
    CHECK_MSG(saved_launch(r) != DTRAIN_OK && r->ended[0] == DTRAIN_ERROR_DATA &&
                  strstr(r->error[1], "no manifest.json"),
              "%s", r->error[1]);
    folder_remove();
}

/* The directory, a new one below it, a checkpoint and a shard are reached by symbolic links; what is removed by such a
 * name is ours alone. */
static void test_links(void)
{
    char path[200];
    folder_make();
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_ZERO1);
    r->save_every = 1;
    r->keep.keep = 2;
    r->save = r->load = path;
    shell("mkdir %s/real && ln -s real %s/link && ln -s . %s/real/here", folder, folder, folder);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, i ? "%s/link/here/new/" : "%s/link", folder);
        r->load = NULL;
        r->steps = 2;
        if (!saved_go(r, path)) continue;
        CHECK(r->info[0].saved == 2 && r->info[1].failed == 0);
        shell("cd %s && mkdir elsewhere && mv step-000000000001 elsewhere/one && "
              "ln -s elsewhere/one step-000000000001 && cd step-000000000002 && "
              "mv model-00000.safetensors ../elsewhere/shard && "
              "ln -s ../elsewhere/shard model-00000.safetensors",
              path);
        r->load = path;
        r->steps = 4;
        if (saved_go(r, path)) CHECK(r->from[0] == 2 && r->info[0].saved == 2);
        shell("cd %s && test \"$(echo step-*)\" = 'step-000000000003 step-000000000004' && "
              "test -f elsewhere/shard",
              path);
    }
    folder_remove();
}

/* Rank 0 removes the directory before step 3; before step 6, when step 4 is saved, it is there again, and locked. */
static int removes_directory(dtrain_world *world, saved_run *r, int64_t step)
{
    char lock[300];
    if (step != 2 && step != 5) return 0;
    if (dtrain_world_all_gather(world, NULL, 0, NULL) != DTRAIN_OK) return 1;
    if (dtrain_world_rank(world) == 0) {
        snprintf(lock, sizeof lock, "%s/lock", r->save);
        const int file = open(lock, O_RDWR | O_CLOEXEC);
        CHECK_MSG(file >= 0 && flock(file, LOCK_EX | LOCK_NB) != 0, "step %d: no lock", (int)step);
        if (file >= 0) close(file);
        if (step == 2) shell("mv %s %s.gone", r->save, r->save);
    }
    return dtrain_world_all_gather(world, NULL, 0, NULL) != DTRAIN_OK;
}

static void test_removed_directory(void)
{
    for (int background = 0; background < 2; background++) {
        saved_run *r = saved_new(2, DTRAIN_STRATEGY_ZERO1);
        char path[256];
        folder_make();
        snprintf(path, sizeof path, "%s/runs/a", folder);
        r->steps = 8;
        r->save_every = 2;
        r->save = path;
        r->background = background;
        r->keep.failures = 1; /* of the save that may be under way */
        r->during = removes_directory;
        saved_go(r, "removed");
        shell("test -f %s/step-000000000004/manifest.json", path);
        shell("test -f %s/step-000000000008/manifest.json", path);
        folder_remove();
        munmap(r, sizeof *r);
    }
}

/* ---- damage ---- */

/* Damage the newest of two checkpoints: it is passed over, with a warning and a note; by its own path it is an error
 * that names the file. */
static void test_damage(void)
{
    static const char *const damages[][2] = {
        {"truncate -s -1 $N/model-00000.safetensors", "model-00000.safetensors"},
        {"truncate -s 0 $N/state-00001.safetensors", "state-00001.safetensors"},
        {"rm $N/model-00001.safetensors", "model-00001.safetensors"},
        {"printf x | dd of=$N/model-00000.safetensors bs=1 seek=1500 conv=notrunc 2>/dev/null",
         "its header does not have"},
        {"printf '\\377' | dd of=$N/model-00000.safetensors bs=1 conv=notrunc 2>/dev/null "
         "seek=$(($(stat -c %s $N/model-00000.safetensors) - 2))",
         "is damaged"},
        {"printf x | dd of=$N/manifest.json bs=1 seek=300 conv=notrunc 2>/dev/null",
         "manifest.json"},
        {"truncate -s -5 $N/manifest.json", "manifest.json"},
        {"truncate -s 10 $N/manifest.json", "manifest.json"},
        {"truncate -s 0 $N/manifest.json", "manifest.json"},
        {"rm $N/manifest.json", ""},
        {"rm $N/state-00000.safetensors; ln -s x $N/state-00000.safetensors", "state-00000"},
        {"sed -i 's/\"version\": 3/\"version\": 4/' $N/manifest.json", "manifest.json"},
        {"cp $O/manifest.json $N/manifest.json", ""}};
    variant v = {"zero1", DTRAIN_STRATEGY_ZERO1, 2, 1, 0, 0, 0, 0, false, false, false, 0, false};
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        char newest[128];
        folder_make();
        saved_run *r = variant_run(&v), *again = variant_run(&v);
        r->steps = 4;
        r->save_every = 2;
        r->save = again->load = folder;
        again->steps = 2;
        saved_go(r, "two checkpoints");
        shell("N=%s/step-000000000004; O=%s/step-000000000002; %s", folder, folder, damages[i][0]);
        if (saved_go(again, damages[i][0])) {
            CHECK_MSG(again->from[0] == 2 && again->from[1] == 2, "%s: resumed at %lld",
                      damages[i][0], (long long)again->from[0]);
            CHECK_MSG(strstr(again->loaded[0].note, "passed over") &&
                          strstr(again->loaded[0].note, damages[i][1]),
                      "%s: %s", damages[i][0], again->loaded[0].note);
        }
        snprintf(newest, sizeof newest, "%s/step-000000000004", folder);
        again->load = newest;
        CHECK_MSG(saved_launch(again) != DTRAIN_OK && strstr(again->error[0], damages[i][1]),
                  "%s: %s", damages[i][0], again->error[0]);
        folder_remove();
    }
}

/* Fail to load what is damaged behind its values: nothing goes on with the mixture, until a whole load mends it. */
static int torn_main(dtrain_world *world, void *user)
{
    saved_rank *s = (saved_rank *)calloc(1, sizeof *s);
    dtrain_load_desc part = {0};
    dtrain_step_record record;
    char good[128];
    if (!s) return 3;
    s->r = (saved_run *)user;
    s->rank = dtrain_world_rank(world);
    part.values_only = true;
    snprintf(good, sizeof good, "%s/good", folder);
    CHECK(saved_create(world, s) == DTRAIN_OK);
    CHECK(dtrain_checkpoint_load(s->state, folder, NULL, NULL) == DTRAIN_ERROR_DATA);
    CHECK(dtrain_trainer_step(s->trainer, &record) == DTRAIN_ERROR_USAGE);
    CHECK_MSG(strstr(dtrain_last_error(), "replaced a part of the values"), "%s",
              dtrain_last_error());
    CHECK(dtrain_checkpoint_load(s->state, good, &part, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(dtrain_checkpoint_load(s->state, "/none", NULL, NULL) == DTRAIN_ERROR_NOT_FOUND);
    CHECK(dtrain_checkpoint_load(s->state, good, &part, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(dtrain_checkpoint_load(s->state, good, NULL, NULL) == DTRAIN_OK);
    CHECK(dtrain_trainer_step(s->trainer, &record) == DTRAIN_OK);
    saved_free(s);
    return 0;
}

static void test_torn(void)
{
    folder_make();
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_ZERO1);
    r->steps = 4;
    r->save_every = 2;
    r->save = folder;
    if (saved_go(r, "two checkpoints")) {
        shell("cd %s && cp -r step-000000000002 good && for step in step-*; do "
              "cd $step && printf '\\377' | dd of=state-00001.safetensors bs=1 conv=notrunc "
              "seek=$(($(stat -c %%s state-00001.safetensors) - 1)) 2>/dev/null; cd ..; done",
              folder);
        const dtrain_launch_desc desc = ranks_desc(2, r->mode);
        CHECK_MSG(ranks_launch(&desc, torn_main, r, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    }
    folder_remove();
}

/* Other ranks than those that saved an array of the program's own, or another array: load says so. */
static void test_own_arrays(void)
{
    static const struct {
        int ranks, width;
        const char *says;
    } list[] = {{2, 3, ""},
                {3, 3, "begins anew: host \"mine\" of ranks from 2 on"},
                {1, 3, "left out: host \"mine\" of ranks from 1 on"},
                {2, 2, "begins anew: host \"mine\""},
                {2, 0, "left out: host \"mine\""}};
    saved_run *r = saved_new(2, DTRAIN_STRATEGY_DDP);
    folder_make();
    r->steps = r->save_every = 2;
    r->save = folder;
    if (!saved_go(r, "arrays")) return;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        saved_run *again = saved_new(list[i].ranks, DTRAIN_STRATEGY_DDP);
        again->steps = 2;
        again->load = folder;
        again->mine = list[i].width == 3 ? 0 : list[i].width ? list[i].width : -1;
        if (!saved_go(again, list[i].says)) continue;
        const char *note = again->loaded[0].note;
        CHECK_MSG(list[i].says[0] ? strstr(note, list[i].says) != NULL : !note[0],
                  "\"%s\", expected \"%s\"", note, list[i].says);
        munmap(again, sizeof *again);
    }
    folder_remove();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_resume);
    RUN(test_reshard);
    RUN(test_residuals);
    RUN(test_does_not_fit);
    RUN(test_settings);
    RUN(test_other_optimizers);
    RUN(test_retention);
    RUN(test_foreign_files);
    RUN(test_history);
    RUN(test_without_run);
    RUN(test_other_version);
    RUN(test_large_numbers);
    RUN(test_descriptions);
    RUN(test_small_stacks);
    RUN(test_lock);
    RUN(test_directories);
    RUN(test_links);
    RUN(test_removed_directory);
    RUN(test_damage);
    RUN(test_torn);
    RUN(test_own_arrays);
    return test_summary();
}
