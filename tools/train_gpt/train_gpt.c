/* train_gpt.c: trains a GPT on any text, data-parallel or sharded, over CPU cores or GPUs.
 *
 *   build:   make build/train_gpt
 *   run:     build/train_gpt                              (two ranks learn sums, byte by byte)
 *            build/train_gpt --data shakespeare.txt --ranks 2 --steps 2000 --log run.jsonl
 *            build/train_gpt --model gpt2 --seq 64 --data tokens.bin --ranks 1 --threads 2
 *            build/train_gpt --data shards --data-format u16 --workers 2   (a folder of files of nanoGPT)
 *            build/train_gpt --ranks 4 --tensor 2 --sequence-parallel   (two replicas of two ranks each)
 *            build/train_gpt --ranks 2 --pipeline 2 --accum 8   (each rank has half of the blocks)
 *            build/train_gpt --strategy auto --memory-limit 200 --auto-batch --global-batch 64
 *            build/train_gpt --import gpt2_124M.bin --tokenizer DIR --generate 100 --prompt "Hello"
 *   GPUs:    nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA tools/train_gpt/train_gpt.c \
 *            dtrain_cuda.cu -lcublasLt -o train_gpt
 *            (add -DDTRAIN_USE_NCCL -ldl for several GPUs that talk over NCCL)
 *            ./train_gpt --device cuda --precision bf16 --graph --model gpt2 --data tokens.bin
 *
 * What to expect: a progress line, the validation loss now and then, a table with loss, speed,
 * communication and memory, and a sample of what the model has learned to write. Of sums: how many
 * that it has not seen it gets right, and ten of them. --help lists all flags.
 *
 * --strategy changes where parameters, gradients and optimizer state live, and nothing else: model,
 * loop and losses are the same.
 *
 * How to read it: main() below -> tools/run/run.h (what is the same for every model: switches, checkpoints, restarts,
 * the loop) -> gpt.h (the model) -> sums.h (what it learns without --data) -> settings.h (its flags) -> job.h (its part
 * of a run) -> report.h and shown.h (what rank 0 prints) -> checks.h (what is refused before a rank starts) -> plain.h
 * (a run without a flag). A run needs nothing else. weights.h and llmc.h read and write a GPT-2 in other programs'
 * files, tokenizer.h and tokenizer_files.h its text, cache.h and generate.h make it write; tools/plan/plan.h is
 * --dry-run, --tune and --probe-links. */
#define RUN_NAME "train_gpt"
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "gpt.h"
#include "settings.h"
#include "job.h"
#include "report.h"
#include "checks.h"
#include "plain.h"
#include "tools/plan/plan.h"

static dtrain_result finish_gpt(dtrain_world *world, run_job *j)
{
    const gpt_run *own = own_part(j);
    const bool first = dtrain_world_rank(world) == 0;
    char elsewhere[1024] = "";
    dtrain_result result = DTRAIN_OK;
    if (j->stopped) return DTRAIN_OK;
    if (own->s->export_to) {
        TRY(export_or_spare(world, own->s, &own->model, j->strategy, elsewhere));
        if (first && !*elsewhere) say(stdout, "  exported             %s\n", own->s->export_to);
    }
    if (!own->s->sample) result = DTRAIN_OK;
    else if (own->s->sums && sums_fit(own->s->sums, own->s->seq) && !own->s->prompt)
        TRY(show_sums(world, j, first));
    else TRY(show_sample(world, j, first));
    if (first && own->s->sample) plain_end();
    if (*elsewhere) return dtrain_fail(DTRAIN_ERROR_FILE, "%s", elsewhere);
cleanup:
    return result;
}

static const run_program gpt_program = {.things = "tokens",
                                        .sample_name = "tokens/s",
                                        .own_bytes = sizeof(gpt_run),
                                        .least_batch = 1,
                                        .open_model = open_gpt,
                                        .set_batch = gpt_set_batch,
                                        .loss = gpt_loss,
                                        .next_batch = next_batch,
                                        .open_data = open_texts,
                                        .import = import_gpt,
                                        .validate = validate_gpt,
                                        .start = show_gpt,
                                        .finish = finish_gpt,
                                        .close = close_gpt,
                                        .check_outputs = check_export,
                                        .can_cut = true,
                                        .can_stage = true};

/* Export a model, or let it write: what every rank runs if there is nothing to train. */
static int use_model(dtrain_world *world, void *user)
{
    const bool first = dtrain_world_rank(world) == 0;
    gpt_run own;
    run_job j = new_job(&run_flags, &gpt_program, &own);
    dtrain_result result;
    (void)user;
    memset(&own, 0, sizeof own);
    TRY(same_flags(world));
    TRY(open_model(world, &j));
    if (own.s->export_to)
        TRY(export_weights(world, own.s, &own.model, j.strategy, own.s->export_to));
    if (own.s->export_to && first) say(stdout, "  exported             %s\n", own.s->export_to);
    if (own.s->generate) TRY(show_generated(world, &j, first));
cleanup:
    dtrain_tape_destroy(own.tape);
    close_job(&j);
    return end_rank(result);
}

int main(int argc, char **argv)
{
    take_descriptors();
    dtrain_launch_desc launch;
    settings *s = &flags;
    make_table();
    if (about(RUN_NAME, argc - 1, argv + 1, print_help)) return 0;
    if (read_flags(argc - 1, argv + 1)) return 2;
    if (import_sizes(s) || open_tokenizer(s) || apply_preset(s) || check_import(s)) return 2;
    s->run->command = join_words(argc, argv);
    if (trains(s) ? encode_data(s) || check_data(s) : check_model(s)) return 2;
    if (check_text(s) || check_sizes(s)) return 2;
    if (argc == 1) plain_begin(s, argv[0]);
    if (trains(s))
        return plans(s->run) ? plan_run(s->run, &gpt_program) : run_training(s->run, &gpt_program);
    if (check_run(s->run, &gpt_program, false) || check_outputs(s->run, &gpt_program, false) ||
        launch_desc(s->run, false, &launch))
        return 2;
    return launch_ranks(&launch, use_model, NULL);
}
