/* packed_attention.h: attention of rows that hold q, k and v of all heads side by side: on a tape, and the arguments of
 * the kernels. */
#ifndef PACKED_ATTENTION_H
#define PACKED_ATTENTION_H

#include "dtrain.h"
#include "test.h"

static inline dtrain_tensor *causal_attention(dtrain_tape *tape, dtrain_tensor *qkv,
                                              int64_t sequence, int64_t heads)
{
    const dtrain_attention_desc desc = {.sequence = sequence, .heads = heads, .causal = true};
    return dtrain_attention(tape, qkv, NULL, NULL, &desc);
}

typedef struct packed_shape {
    int64_t batch, sequence, heads, kv_heads, d;
    bool causal;
    dtrain_dtype dtype;
} packed_shape;

/* Where q (part 0), k (1) and v (2) begin. */
static inline void *packed_part(const packed_shape *s, const void *qkv, int64_t part)
{
    const int64_t columns = part ? s->heads + (part - 1) * s->kv_heads : 0;
    const size_t bytes = (size_t)(columns * s->d) * dtrain_dtype_bytes(s->dtype);
    return qkv ? (char *)(uintptr_t)qkv + bytes : NULL;
}

static inline dtrain_attention_args packed_attention(packed_shape s, const void *qkv, void *y,
                                                     void *lse)
{
    dtrain_attention_args args;
    memset(&args, 0, sizeof args);
    args.batch = s.batch;
    args.queries = args.keys = s.sequence;
    args.heads = s.heads, args.kv_heads = s.kv_heads, args.d = s.d;
    args.causal = s.causal;
    args.dtype = s.dtype;
    args.q = qkv, args.k = packed_part(&s, qkv, 1), args.v = packed_part(&s, qkv, 2);
    args.q_stride = args.k_stride = args.v_stride = (s.heads + 2 * s.kv_heads) * s.d;
    args.y = y;
    args.lse = (float *)lse;
    return args;
}

static inline dtrain_attention_backward_args
packed_attention_backward(packed_shape s, const void *qkv, const void *y, const void *lse,
                          const void *d_y, void *d_qkv)
{
    dtrain_attention_backward_args args;
    memset(&args, 0, sizeof args);
    args.forward = packed_attention(s, qkv, (void *)(uintptr_t)y, (void *)(uintptr_t)lse);
    args.d_y = d_y;
    args.d_q = d_qkv, args.d_k = packed_part(&s, d_qkv, 1), args.d_v = packed_part(&s, d_qkv, 2);
    return args;
}

#endif
