/* operations.c: attention written from single operations, with a gate, checked twice: its output
 * against dtrain_attention, its gradients against finite differences.
 *
 *   build:   cc -O2 -I. examples/operations.c -o operations -lm -lpthread
 *   run:     ./operations
 *   expect:  attention by hand differs from dtrain_attention by 0.0000
 *            gradients agree with finite differences to 0.0000
 *
 * An operation takes tensors and returns a new one; the tape keeps what backward needs. Dropout, a
 * mask or another score is one more line in attention() below. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>

enum { BATCH = 2, TIME = 5, HEADS = 2, HEAD = 4 };
enum { WIDTH = HEADS * HEAD, ROWS = BATCH * TIME, SIZE = ROWS * WIDTH };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Split (batch*time, heads*head) into heads, with the axes in the given order. */
static dtrain_tensor *heads(dtrain_tape *tape, dtrain_tensor *x, const uint32_t order[4])
{
    const int64_t split[4] = {BATCH, TIME, HEADS, HEAD};
    return dtrain_permute(tape, dtrain_reshape(tape, x, 4, split), order);
}

/* softmax(q k^T / sqrt(head)) v in each head; the result has the shape of q. */
static dtrain_tensor *attention(dtrain_tape *tape, dtrain_tensor *q, dtrain_tensor *k,
                                dtrain_tensor *v)
{
    const uint32_t rows[4] = {0, 2, 1, 3},
                   columns[4] = {0, 2, 3, 1}; /* (b, h, t, d), (b, h, d, t) */
    const int64_t joined[2] = {-1, WIDTH};    /* -1: what is left */
    dtrain_tensor *scores = dtrain_matmul(tape, heads(tape, q, rows), heads(tape, k, columns));
    dtrain_tensor *weights = dtrain_softmax(tape, dtrain_scale(tape, scores, 1 / sqrtf(HEAD)));
    dtrain_tensor *y = dtrain_matmul(tape, weights, heads(tape, v, rows));
    return dtrain_reshape(tape, dtrain_permute(tape, y, rows), 2, joined);
}

/* Return the loss of four inputs (rows, width): q, k, v and a gate. *apart receives the mean square of
 * the difference between both attentions. An error sticks to the tape: no call needs a check. */
static dtrain_tensor *run(dtrain_tape *tape, const float *values, dtrain_tensor **x,
                          dtrain_tensor **apart)
{
    const int64_t shape[2] = {ROWS, WIDTH};
    const dtrain_attention_desc desc = {.sequence = TIME, .heads = HEADS};
    float labels[SIZE];
    for (int i = 0; i < SIZE; i++) labels[i] = (float)(i % 2);
    dtrain_tape_begin(tape, 0, 0);
    for (int i = 0; i < 4; i++)
        x[i] = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, values + i * SIZE, true);
    dtrain_tensor *target = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, labels, false);
    dtrain_tensor *y = attention(tape, x[0], x[1], x[2]);
    *apart = dtrain_mse_loss(tape, y, dtrain_attention(tape, x[0], x[1], x[2], &desc));
    y = dtrain_multiply(tape, y, dtrain_activate(tape, x[3], DTRAIN_ACTIVATION_SILU));
    dtrain_tensor *size = dtrain_mean(tape, dtrain_multiply(tape, y, y)); /* large outputs cost */
    return dtrain_add(tape, dtrain_bce_with_logits_loss(tape, y, target),
                      dtrain_scale(tape, size, 0.1f));
}

static int check(dtrain_tape *tape)
{
    float values[4 * SIZE], grad[4 * SIZE], up, down, difference, worst = 0;
    dtrain_tensor *x[4], *apart;
    for (uint64_t i = 0; i < 4 * SIZE; i++) values[i] = dtrain_random_normal(1, 0, i);
    dtrain_tensor *loss = run(tape, values, x, &apart);
    CHECK(dtrain_tensor_read(tape, apart, &difference, NULL));
    CHECK(dtrain_tape_backward(tape, loss, 1));
    for (int i = 0; i < 4; i++) CHECK(dtrain_tensor_read(tape, x[i], NULL, grad + i * SIZE));
    for (int i = 0; i < 4 * SIZE; i++) {
        const float middle = values[i];
        values[i] = middle + 1e-2f;
        CHECK(dtrain_tensor_read(tape, run(tape, values, x, &apart), &up, NULL));
        values[i] = middle - 1e-2f;
        CHECK(dtrain_tensor_read(tape, run(tape, values, x, &apart), &down, NULL));
        values[i] = middle;
        worst = fmaxf(worst, fabsf((up - down) / 2e-2f - grad[i]));
    }
    printf("attention by hand differs from dtrain_attention by %.4f\n", sqrt((double)difference));
    printf("gradients agree with finite differences to %.4f\n", (double)worst);
    if (difference < 1e-10f && worst < 1e-3f) return 0;
    return dtrain_fail(DTRAIN_ERROR_NUMERIC, "they do not agree");
}

int main(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    int result = dtrain_device_create(NULL, NULL, &device);
    if (result == DTRAIN_OK) result = dtrain_tape_create(NULL, NULL, device, &tape);
    if (result == DTRAIN_OK) result = check(tape);
    if (result) fprintf(stderr, "operations: %s\n", dtrain_last_error());
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    return result != 0;
}
