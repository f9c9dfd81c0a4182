/* tokenize.c: the tokenizer of tools/train_gpt for test_models.sh, which compares it with transformers.
 *
 *     tokenize PATH encode <text >ids        ids are 32-bit numbers of this machine
 *     tokenize PATH decode <ids >text */
#define _GNU_SOURCE 1
#include "dtrain.h"

#include "tools/train_gpt/tokenizer_files.h"

static int fail(void)
{
    fprintf(stderr, "tokenize: %s\n", dtrain_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    tokenizer t;
    token_list list = {NULL, 0, 0};
    char *input = NULL;
    size_t bytes = 0, wrong = 0;
    if (argc != 3) return 2;
    const bool encode = strcmp(argv[2], "encode") == 0;
    if (tokenizer_open(&t, argv[1]) != DTRAIN_OK) return tokenizer_close(&t), fail();
    if (read_file("/dev/stdin", &input, &bytes) != DTRAIN_OK) wrong = 1;
    else if (encode && tokenizer_encode(&t, input, bytes, &list) != DTRAIN_OK) wrong = 1;
    if (encode && !wrong && list.count > 0)
        wrong = fwrite(list.at, sizeof *list.at, list.count, stdout) != list.count;
    for (size_t i = 0; !encode && i + sizeof(int32_t) <= bytes; i += sizeof(int32_t)) {
        int32_t id;
        size_t length;
        memcpy(&id, input + i, sizeof id);
        const char *text = tokenizer_text(&t, id, &length);
        wrong += fwrite(text, 1, length, stdout) != length;
    }
    free(input);
    free(list.at);
    tokenizer_close(&t);
    return wrong ? fail() : 0;
}
