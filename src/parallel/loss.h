/* Losses over a tensor axis, for programs with a backward of their own
 *
 * Where the classifier of a model is cut by rows (parallel/cut.h), a rank has the logits of its own
 * part of the vocabulary. Softmax needs a row's largest logit and the sum of its exponentials,
 * nothing else of the other ranks: three floats a row travel in place of the logits.
 * examples/tensor_parallel.c is a complete program. A model on the tape calls dtrain_cross_entropy,
 * which does the same. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "comm/comm.h"

/* Zero is the default where one is written beside the field. Ranks may have different numbers of
 * columns; rows, classes, targets, smoothing and scale are the same on all of them. */
typedef struct dtrain_vocab_loss {
    int64_t rows, columns;  /* of the logits that are here */
    int64_t first_class;    /* column j here is class first_class + j */
    int64_t classes;        /* of all ranks together; columns of classes from here on are padding,
                               which takes no part and has gradient 0 */
    const float *logits;    /* (rows, columns), host memory */
    const int32_t *targets; /* (rows), a class of the whole vocabulary; -1 = ignored */
    float smoothing;        /* in [0, 1], spread over all classes as in dtrain_cross_entropy */
    float scale;            /* multiplies d_logits; 0 = 1 */
    double *loss;           /* the mean over targets that are not ignored, 0 if there are none; the
                               same on all ranks */
    float *d_logits;        /* (rows, columns): the gradient of *loss; may be logits; NULL = none */
} dtrain_vocab_loss;

/* Compute softmax cross-entropy, and its gradient, of logits whose classes are divided over the
 * ranks of `tensor`, each class on one of them (Shoeybi et al., "Megatron-LM", 2019, section 3: the
 * parallel cross-entropy of the output embedding). Collective over `tensor`; blocks. Two
 * all-reduces: of the largest logit of each row, then of its sum of exponentials and its target's
 * logit together, and with smoothing the sum of its logits. The gradient needs no more.
 *
 * A target that is no class, a class that two ranks have or none, and any other wrong argument is
 * an error, after which the communicator has failed. */
DTRAIN_API dtrain_result dtrain_vocab_cross_entropy(dtrain_comm *tensor,
                                                    const dtrain_vocab_loss *loss);
