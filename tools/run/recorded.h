/* recorded.h: the switches that a run writes down. Checkpoints record those that change what it computes: whoever goes
 * on with other ones is told. Where ranks, strategy and files are does not change it. */
#ifndef RUN_RECORDED_H
#define RUN_RECORDED_H

#include "tools/run/settings.h"

static const char *const recorded[] = {
    "--data",
    "--global-batch",
    "--seed",
    "--steps",
    "--optimizer",
    "--lr",
    "--muon-lr",
    "--min-lr",
    "--warmup",
    "--schedule",
    "--lr-scaling",
    "--weight-decay",
    "--beta2",
    "--variance-steps",
    "--clip",
    "--precision",
    "--compression",
    "--topk-ratio",
    "--topk-momentum",
    /* of one program or another: */
    "--data-format",
    "--tokenizer",
    "--val-split",
    "--seq",
    "--dropout",
    "--epochs",
    "--sync-batchnorm",
};

enum { RECORDED = sizeof recorded / sizeof *recorded, RECORDED_BYTES = 256 };

/* Pairs for dtrain_state_desc.settings. */
typedef struct run_record {
    const char *pairs[2 * RECORDED + 1];
    char texts[RECORDED][RECORDED_BYTES];
} run_record;

/* Write what is in force; samples: of a step of all ranks. */
static void record_settings(run_record *record, int64_t samples)
{
    char text[CONFIG_VALUE];
    int count = 0;
    for (int i = 0; i < RECORDED; i++) {
        const int at = flags_find(flag_table, flag_count, recorded[i]);
        if (at < 0) continue;
        if (!config__value(&flag_table[at], text, sizeof text)) *text = 0;
        if (strcmp(recorded[i], "--global-batch") == 0)
            snprintf(text, sizeof text, "%lld", (long long)samples);
        snprintf(record->texts[count], RECORDED_BYTES, "%.*s", RECORDED_BYTES - 1, text);
        record->pairs[2 * count] = recorded[i];
        record->pairs[2 * count + 1] = record->texts[count];
        count++;
    }
    record->pairs[2 * count] = NULL;
}

/* The flags that TensorBoard's table of hyper-parameters shows, of one program or another. */
static const char *const hyper_parameters[] = {
    "--model",       "--optimizer", "--lr",           "--weight-decay", "--schedule",
    "--batch",       "--accum",     "--global-batch", "--strategy",     "--precision",
    "--compression", "--ranks",     "--seed"};

#endif /* RUN_RECORDED_H */
