/* gpt.c: a GPT of about 0.8 million parameters learns a text byte by byte, with the trainer: model
 * (gpt_model.h), data (text.h) and settings are the program's, the training step is the library's.
 *
 *   build:   cc -O2 -I. examples/gpt.c -o gpt -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/gpt.c dtrain_cuda.cu -lcublasLt -o gpt
 *   run:     ./gpt                                   two ranks learn lines that the program makes
 *            ./gpt --data shakespeare.txt --ranks 4 --strategy full_shard --precision bf16
 *            ./gpt --ranks 2 --tensor 2                two ranks share each layer
 *            ./gpt --device cuda --ranks 1 --precision bf16 --batch 64
 *   flags:   --data FILE  --ranks N  --device cpu|cuda  --steps N  --batch N (samples of a rank)
 *            --lr NUMBER  --precision fp32|bf16|fp16
 *            --strategy ddp|zero1|shard_grad_op|full_shard|zero3
 *            --tensor N (ranks that share every layer of a replica)
 *   expect, in some ten seconds on two cores of an Intel Xeon:
 *     step      loss  val_loss grad_norm        lr    tok/s   step_ms  comm_ms  exposed  data_ms      eta  done
 *        1    5.5287         -     8.727  1.00e-04     8.5k    107.11    14.92     6.90    0.023     0:31    0%
 *       30    1.3987         -     1.025  2.00e-03    17.5k     43.80     8.28     1.38    0.004     0:17   10%
 *     ...
 *
 * It ends with a held-out loss near 0.19 and a sample, in which most lines are right: "seventeen comes
 * before eighteen." The last digits depend on the processor's instruction set.
 *
 * --strategy changes where parameters, gradients and AdamW's state live, and nothing else: the
 * losses are the same. --tensor divides the parameters with a mark (`cut`) in their table over so many
 * ranks, and the other ranks are replicas: the model's text stays the same, and the losses differ only
 * by rounding. tools/train_gpt is the same program with everything that can be set. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/gpt_model.h"

#include <ctype.h>

enum { SAMPLE = 300 };

typedef struct settings {
    const char *data;
    uint32_t kind, tape_flags;
    int tensor;
    long batch, steps;
    float lr;
} settings;

/* Draw bytes after a newline, each from a forward pass over the bytes before it. All ranks draw the
 * same bytes, because all ranks gather sharded parameters and logits together. */
static int sample(dtrain_tape *t, model *m, uint32_t tape_flags, bool print)
{
    static float logits[SEQ * VOCAB];
    int32_t window[SEQ] = {'\n'};
    int length = 1;
    for (int i = 0; i < SAMPLE; i++) {
        CHECK(dtrain_tape_begin(t, tape_flags | DTRAIN_TAPE_NO_GRAD, 0));
        dtrain_tensor *all = dtrain_place(t, forward(t, m, window, 1), DTRAIN_PLACEMENT_WHOLE);
        CHECK(dtrain_tensor_read(t, all, logits, NULL));
        const float *last = logits + (length - 1) * VOCAB;
        double sum = 0, below = 0;
        int32_t byte = 0; /* drawn from softmax(last / 0.8) */
        for (int v = 0; v < VOCAB; v++) sum += exp(last[v] / 0.8);
        const double pick = sum * dtrain_random_uniform(1, 0, (uint64_t)i);
        for (; byte < VOCAB - 1; byte++) {
            below += exp(last[byte] / 0.8);
            if (pick < below) break;
        }
        if (print) putchar(isprint(byte) || byte == '\n' ? byte : '?');
        if (length == SEQ) memmove(window, window + 1, (size_t)--length * sizeof *window);
        window[length++] = byte;
    }
    if (print) printf("\n");
    return 0;
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const settings *s = user;
    const bool first = dtrain_world_rank(world) == 0;
    const size_t tokens = (size_t)s->batch * SEQ;
    model m;
    batch learn = {.m = &m}, held_out;
    dtrain_mesh *mesh;
    dtrain_dataset *text;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;

    const dtrain_mesh_desc axes = {.tensor = s->tensor}; /* the rest is the data axis */
    CHECK(dtrain_mesh_create(world, &axes, &mesh));
    CHECK(open_text(world, s->data, DTRAIN_DATA_BYTES, 0, &text));
    dtrain_dataset_info info;
    dtrain_dataset_query(text, &info);
    const int64_t all = info.item_count, part = all - all / 10;
    dtrain_loader_desc window = {.dataset = text,
                                 .batch = (uint32_t)s->batch,
                                 .sequence = SEQ,
                                 .item_count = part,
                                 .mesh = mesh};
    declare_model(&m);
    CHECK(open_windows(world, &window, &learn.text));
    held_out = learn; /* the last tenth of the text, through the same two arrays */
    window.first_item = part;
    window.item_count = all - part;
    window.sample_limit = 20 * s->batch; /* then it ends: the loss does not depend on the ranks */
    CHECK(dtrain_loader_create(world, &window, &held_out.text.loader));

    dtrain_strategy_desc where = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    where.kind = s->kind;
    where.mesh = mesh;
    adamw.beta2 = 0.99f;
    adamw.weight_decay = 0.1f;
    CHECK(dtrain_strategy_create(world, m.params, PARAMS, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_trainer_desc how = {.tokens = (uint32_t)tokens,
                                     .clip = 1,
                                     .tape_flags = s->tape_flags,
                                     .schedule = {.kind = DTRAIN_SCHEDULE_COSINE,
                                                  .lr = s->lr,
                                                  .min_lr = s->lr / 10,
                                                  .warmup_steps = s->steps / 15,
                                                  .total_steps = s->steps},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &learn};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    const dtrain_metrics_desc show = {.total_steps = s->steps,
                                      .progress = stdout,
                                      .progress_every = (uint32_t)(s->steps + 9) / 10};
    CHECK(dtrain_metrics_create(world, &show, &metrics));

    for (long step = 1; step <= s->steps; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (step == s->steps)
            CHECK(dtrain_trainer_evaluate(trainer, next_batch, &held_out, DTRAIN_UNTIL_END,
                                          &record.val_loss));
        CHECK(dtrain_metrics_step(metrics, &record));
    }
    dtrain_metrics_info run;
    dtrain_metrics_query(metrics, &run);
    CHECK(dtrain_metrics_finish(metrics));
    dtrain_metrics_destroy(metrics);
    if (first)
        printf("\nheld-out loss %.3f, %.0f tokens/s; a sample:\n", run.summary.val_loss,
               run.summary.tokens_per_second);
    if (sample(dtrain_trainer_tape(trainer), &m, s->tape_flags, first)) return 1;

    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(held_out.text.loader);
    close_windows(&learn.text);
    dtrain_dataset_close(text);
    dtrain_mesh_destroy(mesh);
    return 0;
}

int main(int argc, char **argv)
{
    enum { DATA, RANKS, DEVICE, STEPS, BATCH, LR, PRECISION, STRATEGY, TENSOR, FLAGS };
    static const char *const flags[] = {"--data",   "--ranks", "--device",    "--steps",
                                        "--batch",  "--lr",    "--precision", "--strategy",
                                        "--tensor", NULL};
    static const char *const precisions[] = {"fp32", "bf16", "fp16", NULL};
    static const uint32_t autocast[] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    static const char *const kinds[] = {"ddp",        "zero1", "shard_grad_op",
                                        "full_shard", "zero3", NULL};
    const char *value[FLAGS] = {NULL, NULL, "cpu", "300", "6", "2e-3", "fp32", "ddp", "1"};
    if (!read_flags("gpt", argc, argv, flags, value)) return 2;
    const int precision = find("gpt", "--precision", value[PRECISION], precisions);
    const int kind = find("gpt", "--strategy", value[STRATEGY], kinds);
    if (precision < 0 || kind < 0) return 2;
    settings s = {.data = value[DATA],
                  .kind = (uint32_t)kind + DTRAIN_STRATEGY_DDP,
                  .tape_flags = autocast[precision],
                  .tensor = (int)strtol(value[TENSOR], NULL, 10),
                  .batch = strtol(value[BATCH], NULL, 10),
                  .steps = strtol(value[STEPS], NULL, 10),
                  .lr = strtof(value[LR], NULL)};
    /* Without --ranks: the number of torchrun, mpirun or srun, and without a launcher two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (value[RANKS]) desc.rank_count = (uint32_t)strtoul(value[RANKS], NULL, 10);
    if ((value[RANKS] && !desc.rank_count) || s.tensor < 1 || s.steps < 1 || s.batch < 1 ||
        s.batch > 1000000 || !(s.lr > 0)) {
        fprintf(stderr, "gpt: --ranks, --tensor, --steps, --batch and --lr take positive numbers, "
                        "and --batch at most a million\n");
        return 2;
    }
    if (dtrain_device_ops_by_name(value[DEVICE], &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, train, &s, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "gpt: %s\n", dtrain_last_error());
    return 1;
}
