/* Attention, rotary position embedding, softmax
 *
 * Heads are independent of each other. A tensor axis (parallel/mesh.h) cuts rows into whole heads:
 * heads of queries with their heads of keys and values. Attention and rotary turn the model's
 * numbers of heads into this rank's:
 *
 *     q0 q1 q2 q3 | k0 k1 | v0 v1     of 2 ranks the first has q0 q1 k0 v0, the second q2 q3 k1 v1
 *
 * Nothing is sent, and a head has the bits of one rank. Kept until backward:
 *
 *     attention       q, k, v, mask, key lengths, y, log-sum-exp of each row and head
 *     rotary          nothing
 *     softmax         y */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* ---- Attention
 *
 * With p = softmax(q k^T / sqrt(d) + mask), made again block by block from q, k, the mask and lse:
 *
 *     d_v = p^T d_y   d_p = d_y v^T   d_s = p (d_p - d_y . y)   d_q = d_s k   d_k = d_s^T q
 *
 * d_k and d_v are sums over the heads of queries that share the head. Inputs of the operation: q or
 * packed rows, key lengths (optional), k and v unless packed, a mask (optional). */

typedef struct dtrain__attention {
    dtrain_attention_args args;
    uint32_t lengths, k, v, mask; /* numbers of these inputs; 0 = none */
    int64_t heads, first_head;    /* all heads of queries, and this rank's first head */
} dtrain__attention;

/* Find the heads in a run of a row's columns: some of `heads` heads of d columns, which begin at
 * column `begin` of the whole row. */
static dtrain_result dtrain__heads_of(const dtrain_op *op, uint32_t input, uint32_t run,
                                      int64_t begin, int64_t heads, int64_t d, int64_t *first,
                                      int64_t *count)
{
    const dtrain__share *part = dtrain__tensor_share(op->inputs[input]);
    const int64_t from = part->first[run], past = from + part->length[run];
    *first = (from - begin) / d;
    *count = (past - from) / d;
    if (from >= begin && past <= begin + heads * d && (from - begin) % d == 0 &&
        (past - from) % d == 0)
        return DTRAIN_OK;
    return dtrain__refuse(op,
                          "the columns %lld to %lld of input %u are not whole heads of %lld "
                          "columns; give the weight that made them a component for each of q, k "
                          "and v, and as cut.parts the number of heads (of keys, where queries "
                          "share them)",
                          (long long)from, (long long)past - 1, input + 1, (long long)d);
}

/* Check the placements of the inputs; if columns are cut, reduce the numbers of heads to this
 * rank's. */
static dtrain_result dtrain__attention_here(const dtrain_op *op, dtrain__attention *x)
{
    dtrain_attention_args *args = &x->args;
    const uint32_t inputs[3] = {0, x->k, x->v};
    const int64_t heads = args->heads, kv_heads = args->kv_heads, group = heads / kv_heads;
    const int64_t of[3] = {heads, kv_heads, kv_heads}, all = heads + 2 * kv_heads;
    const dtrain__share *row = dtrain__tensor_share(op->inputs[0]);
    const bool cut = op->inputs[0]->placement == DTRAIN_PLACEMENT_COLUMNS;
    int64_t first[3], count[3], begin = 0;
    x->heads = heads;
    for (uint32_t i = 0; i < op->input_count; i++) {
        const bool beside = i && (i == x->lengths || i == x->mask);
        if (op->inputs[i]->placement !=
            (uint32_t)(cut && !beside ? DTRAIN_PLACEMENT_COLUMNS : DTRAIN_PLACEMENT_WHOLE))
            return dtrain__refuse(op,
                                  "expected q, k and v all whole or all cut by columns, and the "
                                  "others whole; dtrain_place converts them");
    }
    if (!cut) return DTRAIN_OK;
    const int64_t d = row->whole / (x->k ? heads : all);
    for (uint32_t i = 0; i < 3; i++) {
        const dtrain__share *part = dtrain__tensor_share(op->inputs[inputs[i]]);
        const int64_t whole = (x->k ? of[i] : all) * d;
        if (part->whole != whole || part->runs != (x->k ? 1u : 3u))
            return dtrain__refuse(op,
                                  "expected input %u cut out of %lld columns (heads of %lld) in "
                                  "%s",
                                  inputs[i] + 1, (long long)whole, (long long)d,
                                  x->k ? "one component" : "three components");
        DTRAIN__TRY(
            dtrain__heads_of(op, inputs[i], x->k ? 0 : i, begin, of[i], d, &first[i], &count[i]));
        if (!x->k) begin += of[i] * d;
    }
    for (uint32_t i = 1; i < 3; i++)
        if (first[i] * group != first[0] || count[i] * group != count[0])
            return dtrain__refuse(op,
                                  "this rank has the heads %lld to %lld of q and %lld to %lld of "
                                  "%s, which %lld heads of q share each; cut both into %lld parts "
                                  "(cut.parts)",
                                  (long long)first[0], (long long)(first[0] + count[0] - 1),
                                  (long long)first[i], (long long)(first[i] + count[i] - 1),
                                  i == 1 ? "k" : "v", (long long)group, (long long)kv_heads);
    args->heads = count[0];
    args->kv_heads = count[1];
    x->first_head = first[0];
    return DTRAIN_OK;
}

/* Take the key lengths and the mask, whose leading axes can be missing. */
static dtrain_result dtrain__attention_hidden(const dtrain_op *op, dtrain__attention *x)
{
    dtrain_attention_args *args = &x->args;
    const dtrain_tensor *lengths = op->inputs[x->lengths], *mask = op->inputs[x->mask];
    const int64_t full[4] = {args->batch, x->heads, args->queries, args->keys};
    int64_t shape[4] = {1, 1, 1, 1};
    char text[DTRAIN__SHAPE_TEXT];
    if (x->lengths && lengths->count != args->batch)
        return dtrain__refuse(op, "%lld key lengths for a batch of %lld", (long long)lengths->count,
                              (long long)args->batch);
    if (x->lengths) args->key_lengths = (const int32_t *)op->input_data[x->lengths];
    if (!x->mask) return DTRAIN_OK;
    if (mask->dtype != DTRAIN_DTYPE_F32 || mask->needs_grad)
        return dtrain__refuse(op, "expected a mask of f32, which gets no gradient%s",
                              mask->needs_grad ? " and may not want one" : "");
    memcpy(shape + 4 - mask->ndim, mask->shape, mask->ndim * sizeof *shape);
    if (shape[3] != full[3] || shape[2] != full[2] || (shape[1] != 1 && shape[1] != full[1]) ||
        (shape[0] != 1 && shape[0] != full[0]))
        return dtrain__refuse(op,
                              "expected a mask of (batch, heads, queries, keys) = %s, where batch "
                              "and heads may be 1 or left out",
                              dtrain__shape_text(full, text));
    if (shape[1] > 1) args->mask_head_step = args->queries * args->keys;
    if (shape[0] > 1) args->mask_batch_step = shape[1] * args->queries * args->keys;
    args->mask = (const float *)op->input_data[x->mask] + x->first_head * args->mask_head_step;
    return DTRAIN_OK;
}

static dtrain_result dtrain__attention_prepare(dtrain_op *op)
{
    dtrain__attention *x = (dtrain__attention *)op->args;
    dtrain_attention_args *args = &x->args;
    const dtrain_tensor *q = op->inputs[0];
    const uint32_t inputs[3] = {0, x->k, x->v};
    const int64_t width = q->shape[q->ndim - 1];
    const void *address[3];
    int64_t stride[3], begin = 0;
    if (args->heads < 1 || args->kv_heads < 1 || args->heads % args->kv_heads)
        return dtrain__refuse(op, "%lld heads of queries cannot share %lld of keys equally",
                              (long long)args->heads, (long long)args->kv_heads);
    if (args->queries < 1 || args->keys < 1)
        return dtrain__refuse(op, "a sequence of %lld queries and %lld keys, expected at least one",
                              (long long)args->queries, (long long)args->keys);
    DTRAIN__TRY(dtrain__attention_here(op, x));
    const int64_t heads[3] = {args->heads, args->kv_heads, args->kv_heads};
    const int64_t all = heads[0] + (x->k ? 0 : 2 * heads[1]);
    bool good = width % all == 0 && (x->k || args->keys == args->queries);
    args->dtype = (dtrain_dtype)q->dtype;
    args->batch = q->count / width / args->queries;
    args->d = width / all;
    for (uint32_t i = 0; i < 3; i++) { /* packed rows hold q, k, v side by side */
        const dtrain_tensor *rows = op->inputs[inputs[i]];
        const int64_t count = args->batch * (i ? args->keys : args->queries);
        stride[i] = rows->shape[rows->ndim - 1];
        good = good && rows->dtype == q->dtype && rows->count == count * stride[i] &&
               (!x->k || stride[i] == heads[i] * args->d);
        address[i] = (const char *)op->input_data[inputs[i]] +
                     (size_t)begin * dtrain_dtype_bytes(args->dtype);
        if (!x->k) begin += heads[i] * args->d;
    }
    if (!good)
        return dtrain__refuse(op,
                              "expected sequences of %lld rows of %lld heads of q, and of %lld "
                              "rows of %lld heads of k and v, %s, of one head size and type (see "
                              "dtrain_cast)",
                              (long long)args->queries, (long long)heads[0], (long long)args->keys,
                              (long long)heads[1], x->k ? "each whole" : "side by side");
    args->q = address[0], args->q_stride = stride[0];
    args->k = address[1], args->k_stride = stride[1];
    args->v = address[2], args->v_stride = stride[2];
    DTRAIN__TRY(dtrain__attention_hidden(op, x));
    dtrain__output_like(op, q, args->heads * args->d, args->dtype);
    if (q->placement == DTRAIN_PLACEMENT_COLUMNS) {
        /* this rank's heads of queries */
        const dtrain__share part = dtrain__component_of(op, q, x->heads * args->d);
        dtrain__place_as(op->outputs[0], DTRAIN_PLACEMENT_COLUMNS, &part);
    }
    args->y = op->output_data[0];
    const int64_t sums = args->batch * args->heads * args->queries;
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, sums);
    args->lse_rest = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, sums);
    return DTRAIN_OK;
}

/* Count two products of d elements, scores and values, for each query and each key that it sees. */
static double dtrain__attention_flops(const dtrain_attention_args *args)
{
    const double keys = (double)args->keys, queries = (double)args->queries;
    double pairs = queries * keys;
    if (args->causal && queries <= keys) pairs = queries * (queries + 1) / 2;
    else if (args->causal) pairs = keys * (keys + 1) / 2 + (queries - keys) * keys;
    return 4.0 * (double)args->batch * (double)args->heads * (double)args->d * pairs;
}

static dtrain_result dtrain__attention_forward(dtrain_op *op)
{
    const dtrain_attention_args *args = &((const dtrain__attention *)op->args)->args;
    op->tape->flops += dtrain__attention_flops(args);
    return op->device->ops->attention(op->device, args);
}

/* Run the backward kernel, which can only overwrite. */
static dtrain_result dtrain__attention_backward(dtrain_op *op)
{
    const dtrain__attention *x = (const dtrain__attention *)op->args;
    dtrain_attention_backward_args args;
    memset(&args, 0, sizeof args);
    args.forward = x->args;
    args.d_y = op->outputs[0]->grad;
    args.d_q = dtrain_op_input_grad(op, 0, NULL);
    if (x->k) {
        args.d_k = dtrain_op_input_grad(op, x->k, NULL);
        args.d_v = dtrain_op_input_grad(op, x->v, NULL);
    }
    DTRAIN__TRY(op->tape->error);
    if (!x->k) {
        args.d_k = (char *)args.d_q + ((const char *)x->args.k - (const char *)x->args.q);
        args.d_v = (char *)args.d_q + ((const char *)x->args.v - (const char *)x->args.q);
    }
    /* five products: scores again, d_v, d_scores, d_q, d_k */
    op->tape->flops += 2.5 * dtrain__attention_flops(&x->args);
    return op->device->ops->attention_backward(op->device, &args);
}

DTRAIN__OP(attention, attention,
           DTRAIN_OP_READS_INPUTS | DTRAIN_OP_READS_OUTPUTS | DTRAIN__OP_COUNTS,
           DTRAIN_RECOMPUTE_ATTENTION, 0, DTRAIN__OP_PLACES, false)

/* With key lengths as input 1. */
DTRAIN__OP_NAMED(attention_lengths, "dtrain_attention", attention,
                 DTRAIN_OP_READS_INPUTS | DTRAIN_OP_READS_OUTPUTS | DTRAIN__OP_COUNTS,
                 DTRAIN_RECOMPUTE_ATTENTION, 1u << 1, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *q, dtrain_tensor *k,
                                           dtrain_tensor *v, const dtrain_attention_desc *desc)
{
    dtrain__attention args;
    dtrain_tensor *inputs[5] = {q};
    uint32_t count = 1;
    dtrain_attention_desc own;
    memset(&args, 0, sizeof args);
    desc = (const dtrain_attention_desc *)dtrain__tape_take(tape, DTRAIN__ABI_attention_desc, desc,
                                                            &own);
    if (desc) { /* otherwise prepare refuses the number of heads */
        args.args.causal = desc->causal;
        args.args.heads = desc->heads;
        args.args.kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
        args.args.queries = desc->sequence;
        args.args.keys = desc->key_sequence ? desc->key_sequence : desc->sequence;
    }
    if (desc && desc->key_lengths) inputs[args.lengths = count++] = desc->key_lengths;
    /* The backward kernel writes three gradients at once: copy a tensor that occurs twice, v first,
     * so that its gradients are added in the order q, k, v. */
    if (v && v->needs_grad && (v == q || v == k)) v = dtrain_scale(tape, v, 1);
    if (k && k->needs_grad && k == q) k = dtrain_scale(tape, k, 1);
    if (k || v) { /* the operation refuses NULL for only one of them */
        inputs[args.k = count++] = k;
        inputs[args.v = count++] = v;
    }
    if (desc && desc->mask) inputs[args.mask = count++] = desc->mask;
    return dtrain_tape_apply(tape,
                             args.lengths ? &dtrain__attention_lengths_op : &dtrain__attention_op,
                             inputs, count, NULL, 0, &args, sizeof args);
}

/* ---- Rotary position embedding
 *
 * A rotation is orthogonal: the gradient is turned back by the same angles. */

static dtrain_result dtrain__rotary_prepare(dtrain_op *op)
{
    dtrain_rotary_args *args = (dtrain_rotary_args *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    const bool cut = x->placement == DTRAIN_PLACEMENT_COLUMNS;
    const int64_t width = cut ? dtrain__tensor_share(x)->whole : x->shape[x->ndim - 1];
    if (x->placement == DTRAIN_PLACEMENT_ROWS)
        return dtrain__refuse(op, "expected input 1 whole, or cut by columns; dtrain_place "
                                  "converts it");
    args->rows = x->count / x->shape[x->ndim - 1];
    if (args->sequence < 1 || args->rows % args->sequence || args->heads < 1 ||
        width % (2 * args->heads))
        return dtrain__refuse(op, "expected sequences of %lld rows and %lld heads of an even size",
                              (long long)args->sequence, (long long)args->heads);
    if (args->rotated < 0 || args->rotated > args->heads || !(args->theta > 0))
        return dtrain__refuse(op,
                              "%lld of %lld heads with theta %g, expected at most all heads and a "
                              "theta above 0",
                              (long long)args->rotated, (long long)args->heads,
                              (double)args->theta);
    if (!args->rotated) args->rotated = args->heads;
    args->d = width / args->heads;
    int64_t heads = 0, rotated = 0; /* on this rank; each run begins with turned heads */
    for (uint32_t run = 0; cut && run < dtrain__tensor_share(x)->runs; run++) {
        int64_t first, count;
        DTRAIN__TRY(dtrain__heads_of(op, 0, run, 0, args->heads, args->d, &first, &count));
        heads += count;
        rotated += dtrain__max(0, args->rotated - first < count ? args->rotated - first : count);
    }
    if (cut) {
        args->heads = heads;
        args->rotated = rotated;
    }
    args->dtype = (dtrain_dtype)x->dtype;
    dtrain_op_output(op, args->dtype, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->y = op->output_data[0];
    return DTRAIN_OK;
}

DTRAIN__OP_FORWARD(rotary)

static dtrain_result dtrain__rotary_backward(dtrain_op *op)
{
    dtrain_rotary_args args = *(const dtrain_rotary_args *)op->args;
    args.inverse = true;
    args.x = op->outputs[0]->grad;
    args.y = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.y) return op->tape->error;
    return op->device->ops->rotary(op->device, &args);
}

DTRAIN__OP(rotary, rotary, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_rotary(dtrain_tape *tape, dtrain_tensor *x, int64_t sequence,
                                        int64_t heads, int64_t rotated, float theta)
{
    dtrain_rotary_args args;
    memset(&args, 0, sizeof args);
    args.sequence = sequence;
    args.heads = heads;
    args.rotated = rotated;
    args.theta = theta;
    return dtrain_tape_apply(tape, &dtrain__rotary_op, &x, 1, NULL, 0, &args, sizeof args);
}

/* ---- Softmax ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__softmax_prepare(dtrain_op *op)
{
    dtrain_softmax_args *args = (dtrain_softmax_args *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    args->n = x->shape[x->ndim - 1];
    args->rows = x->count / args->n;
    args->dtype = (dtrain_dtype)x->dtype;
    dtrain_op_output(op, args->dtype, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->y = op->output_data[0];
    return DTRAIN_OK;
}

DTRAIN__OP_FORWARD(softmax)

static dtrain_result dtrain__softmax_backward(dtrain_op *op)
{
    dtrain_softmax_args args = *(const dtrain_softmax_args *)op->args;
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.d_x) return op->tape->error;
    args.d_y = op->outputs[0]->grad;
    return op->device->ops->softmax_backward(op->device, &args);
}

DTRAIN__OP(softmax, softmax, DTRAIN_OP_READS_OUTPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0,
           DTRAIN_OP_TAKES_ROWS, false)

DTRAIN_API dtrain_tensor *dtrain_softmax(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain_tape_apply(tape, &dtrain__softmax_op, &x, 1, NULL, 0, NULL,
                             sizeof(dtrain_softmax_args));
}
