/* Sums over ranks
 *
 * in_count inputs are combined, element by element and in order, into out_count equal outputs; an
 * output can be one of the inputs. Every input is read once and every output written once: sums
 * stay in registers. Halves are widened, combined in fp32 and rounded once. */

/* Combine two vectors. The first NaN wins; of equal numbers (+0 and -0) the lower rank's wins. */
DTRAIN__HELPER dtrain__v DTRAIN__K(mix_step)(dtrain__v sum, dtrain__v x, uint32_t op)
{
    const dtrain__vi magnitude = dtrain__viset(INT32_MAX), infinity = dtrain__viset(0x7f800000);
    if (op == DTRAIN_REDUCE_SUM) return sum + x;
    if (op == DTRAIN_REDUCE_PROD) return sum * x;
    const dtrain__vi better =
        op == DTRAIN_REDUCE_MIN ? DTRAIN__K(vless)(x, sum) : DTRAIN__K(vless)(sum, x);
    const dtrain__vi x_nan = dtrain__viless(infinity, dtrain__vbits(x) & magnitude);
    const dtrain__vi nan = dtrain__viless(infinity, dtrain__vbits(sum) & magnitude);
    return DTRAIN__K(vselect)((better | x_nan) & ~nan, x, sum);
}

/* Combine all elements: with `fast` four vectors at a time, then one. */
DTRAIN__HELPER void DTRAIN__K(mix_as)(const dtrain__mix_job *job, dtrain_dtype dtype, uint32_t op,
                                      bool fast)
{
    const int64_t count = (int64_t)job->count, w = DTRAIN__W;
    const bool mean = job->op == DTRAIN_REDUCE_MEAN;
    const dtrain__v scale = dtrain__vset(1.0f / (float)job->in_count);
    const char *const *in = job->in;
    int64_t at = 0;
    for (; fast && at + 4 * w <= count; at += 4 * w) {
        dtrain__v a = dtrain__vload_as(in[0], dtype, at, w);
        dtrain__v b = dtrain__vload_as(in[0], dtype, at + w, w);
        dtrain__v c = dtrain__vload_as(in[0], dtype, at + 2 * w, w);
        dtrain__v d = dtrain__vload_as(in[0], dtype, at + 3 * w, w);
        for (int i = 1; i < job->in_count; i++) {
            a = DTRAIN__K(mix_step)(a, dtrain__vload_as(in[i], dtype, at, w), op);
            b = DTRAIN__K(mix_step)(b, dtrain__vload_as(in[i], dtype, at + w, w), op);
            c = DTRAIN__K(mix_step)(c, dtrain__vload_as(in[i], dtype, at + 2 * w, w), op);
            d = DTRAIN__K(mix_step)(d, dtrain__vload_as(in[i], dtype, at + 3 * w, w), op);
        }
        for (int i = 0; i < job->out_count; i++) {
            dtrain__vstore_as(job->out[i], dtype, at, mean ? a * scale : a, w);
            dtrain__vstore_as(job->out[i], dtype, at + w, mean ? b * scale : b, w);
            dtrain__vstore_as(job->out[i], dtype, at + 2 * w, mean ? c * scale : c, w);
            dtrain__vstore_as(job->out[i], dtype, at + 3 * w, mean ? d * scale : d, w);
        }
    }
    for (; at < count; at += w) {
        dtrain__v a = dtrain__vload_as(in[0], dtype, at, count - at);
        for (int i = 1; i < job->in_count; i++)
            a = DTRAIN__K(mix_step)(a, dtrain__vload_as(in[i], dtype, at, count - at), op);
        for (int i = 0; i < job->out_count; i++)
            dtrain__vstore_as(job->out[i], dtype, at, mean ? a * scale : a, count - at);
    }
}

DTRAIN__ROUTINE void DTRAIN__K(mix)(const dtrain__mix_job *job)
{
    const bool sum = job->op == DTRAIN_REDUCE_SUM || job->op == DTRAIN_REDUCE_MEAN;
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, bf16 = DTRAIN_DTYPE_BF16;
    const uint32_t op = sum ? (uint32_t)DTRAIN_REDUCE_SUM : job->op;
    if (DTRAIN__FAST && sum && job->dtype == f32) DTRAIN__K(mix_as)(job, f32, op, true);
    else if (DTRAIN__FAST && sum && job->dtype == bf16) DTRAIN__K(mix_as)(job, bf16, op, true);
#if DTRAIN__ISA == 3
    else dtrain__mix_avx2(job); /* other types and operations are rare */
#else
    else DTRAIN__K(mix_as)(job, job->dtype, op, false);
#endif
}
