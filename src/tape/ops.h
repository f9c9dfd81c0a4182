/* Operations
 *
 * Shapes: (..., n) is seen as (rows, n). Weights of linear layers are (out, in), as in PyTorch.
 * Every operation checks shapes and reports a difference in a sentence with both. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "strategy/params.h"
#include "tape/tape.h"
#include "device/device.h"

/* y (rows, out) = act(x (rows, in) weight^T + bias); bias may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation);
/* Normalises the last axis, epsilon 1e-5; bias may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_param *weight, dtrain_param *bias);
/* sum = x + residual, and its layer normalisation, in one pass over memory; *sum (not NULL) is the
 * input of the next residual connection. */
DTRAIN_API dtrain_tensor *dtrain_add_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                               dtrain_tensor *residual, dtrain_param *weight,
                                               dtrain_param *bias, dtrain_tensor **sum);
/* tokens (batch, sequence) I32 -> (batch*sequence, n): token plus position embedding;
 * position may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position);

#define DTRAIN_ATTENTION_CAUSAL 1u
/* qkv (batch*sequence, 3n) -> (batch*sequence, n): softmax(q k^T / sqrt(n/heads)) v per head. */
DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags);
DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y);
DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor);
/* x as F32, BF16 or F16; x itself when it is that already. Its gradient comes back in x's type.
 * This is how a model chooses the type of its output: dtrain_cast(tape, logits, DTRAIN_DTYPE_F32) in
 * front of the loss, say, where autocast would take softmax and gradient of narrow logits. */
DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype);
/* Zeroes each element with the given probability and scales the rest by 1 / (1 - probability). */
DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability);

/* Mean over rows of softmax cross-entropy; logits (rows, n), targets (rows) I32, -1 = ignored.
 * In backward the gradient overwrites the logits in place when nothing else reads them: behind a
 * linear classifier logits are stored once. Read them before backward. */
DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets);
DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x);  /* -> one element */
DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x); /* -> one element */
