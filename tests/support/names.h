/* names.h: names of tensors as models of Hugging Face have them, and pairs of names that differ in one byte. */
#ifndef DTRAIN_TEST_NAMES_H
#define DTRAIN_TEST_NAMES_H

#include <stdio.h>
#include <string.h>

enum {
    NAMES_BYTES = 512, /* of a name in a file of tensors, its 0 included */
    NAMES_HUGGING_FACE = 10,
    NAMES_ACCENTS = 4,
    NAMES_PAIRS = 7,
    NAMES_COUNT = NAMES_HUGGING_FACE + NAMES_ACCENTS + 2 * NAMES_PAIRS
};

/* Of 32 to 84 bytes; the last two differ only in the number of their layer. Events of a trace show all of them. */
static const char *const names_hugging_face[NAMES_HUGGING_FACE] = {
    "model.layers.10.self_attn.q_proj.weight",
    "transformer.h.11.mlp.c_fc.weight",
    "model.layers.27.post_attention_layernorm.weight",
    "model.layers.26.post_attention_layernorm.weight",
    "encoder.block.23.layer.1.DenseReluDense.wi_0.weight",
    "encoder.block.23.layer.1.DenseReluDense.wi_1.weight",
    "model.layers.3.mlp.experts.7.down_proj.weight",
    "bert.encoder.layer.11.attention.output.LayerNorm.weight",
    "base_model.model.model.layers.10.block_sparse_moe.experts.7.w1.lora_A.default.weight",
    "base_model.model.model.layers.11.block_sparse_moe.experts.7.w1.lora_A.default.weight"};

/* Write a name of `bytes` bytes of which byte `at` is that of `which`, 0 or 1, and all others are the same. */
static inline const char *names_of_pair(char name[NAMES_BYTES], size_t bytes, size_t at, int which)
{
    static const char text[] = "model.decoder.blocks.mixture_of_experts.feed_forward.low_rank_";
    for (size_t i = 0; i < bytes; i++) name[i] = text[i % (sizeof text - 1)];
    name[at] = (char)('3' + which);
    name[bytes] = 0;
    return name;
}

/* Write name i < NAMES_COUNT. All of them differ: names of Hugging Face, names that differ in accents or are cut in
 * them, and pairs that have their first 38, 40, 63, 100, 250 or 510 bytes in common, or all but their middle. */
static inline const char *names_all(int i, char name[NAMES_BYTES])
{
    static const size_t pairs[NAMES_PAIRS][2] = {{39, 38},   {41, 40},   {64, 63},  {101, 100},
                                                 {300, 250}, {511, 510}, {511, 200}};
    static const char *const accents[NAMES_ACCENTS] = {"mod\xc3\xa8"
                                                       "le.0",
                                                       "mod\xc3\xa9"
                                                       "le.0",
                                                       "couche.", "\xc3\xa9.couche"};
    const int accent = i - NAMES_HUGGING_FACE, pair = accent - NAMES_ACCENTS;
    if (pair >= 0) return names_of_pair(name, pairs[pair / 2][0], pairs[pair / 2][1], pair % 2);
    snprintf(name, NAMES_BYTES, "%s", accent < 0 ? names_hugging_face[i] : accents[accent]);
    for (int k = 0; accent > 1 && k < 60; k++) strcat(name, k % 3 ? "\xc3\xa9" : "\xe8\xaa\x9e");
    return name;
}

#endif /* DTRAIN_TEST_NAMES_H */
