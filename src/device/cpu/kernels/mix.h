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

/* Add four vectors at a time, and return how many elements that were. */
DTRAIN__HELPER int64_t DTRAIN__K(mix_fours)(const dtrain__mix_job *job, dtrain_dtype dtype,
                                            dtrain__v scale)
{
    const int64_t count = (int64_t)job->count, w = DTRAIN__W;
    const char *const *in = job->in;
    const int ins = job->in_count, outs = job->out_count;
    int64_t at = 0;
    for (; at + 4 * w <= count; at += 4 * w) {
        dtrain__v a = dtrain__vload_as(in[0], dtype, at, w);
        dtrain__v b = dtrain__vload_as(in[0], dtype, at + w, w);
        dtrain__v c = dtrain__vload_as(in[0], dtype, at + 2 * w, w);
        dtrain__v d = dtrain__vload_as(in[0], dtype, at + 3 * w, w);
        for (int i = 1; i < ins; i++) {
            a += dtrain__vload_as(in[i], dtype, at, w);
            b += dtrain__vload_as(in[i], dtype, at + w, w);
            c += dtrain__vload_as(in[i], dtype, at + 2 * w, w);
            d += dtrain__vload_as(in[i], dtype, at + 3 * w, w);
        }
        a *= scale, b *= scale, c *= scale, d *= scale;
        for (int i = 0; i < outs; i++) {
            char *out = job->out[i];
            dtrain__vstore_as(out, dtype, at, a, w);
            dtrain__vstore_as(out, dtype, at + w, b, w);
            dtrain__vstore_as(out, dtype, at + 2 * w, c, w);
            dtrain__vstore_as(out, dtype, at + 3 * w, d, w);
        }
    }
    return at;
}

/* Combine the elements from `at` on: sums of fp32 and bf16 are fast, other types and operations and
 * the last elements are not. */
DTRAIN__ROUTINE void DTRAIN__K(mix)(const dtrain__mix_job *job, int64_t at)
{
    const bool mean = job->op == DTRAIN_REDUCE_MEAN, sum = mean || job->op == DTRAIN_REDUCE_SUM;
    const dtrain__v scale = dtrain__vset(mean ? 1.0f / (float)job->in_count : 1.0f);
    if (DTRAIN__FAST && sum && !at) {
        if (job->dtype == DTRAIN_DTYPE_F32) at = DTRAIN__K(mix_fours)(job, DTRAIN_DTYPE_F32, scale);
        if (job->dtype == DTRAIN_DTYPE_BF16)
            at = DTRAIN__K(mix_fours)(job, DTRAIN_DTYPE_BF16, scale);
    }
#if DTRAIN__ISA == 3
    dtrain__mix_avx2(job, at);
#else
    const uint32_t op = sum ? (uint32_t)DTRAIN_REDUCE_SUM : job->op;
    for (const int64_t count = (int64_t)job->count; at < count; at += DTRAIN__W) {
        dtrain__v a = dtrain__vload_as(job->in[0], job->dtype, at, count - at);
        for (int i = 1; i < job->in_count; i++)
            a = DTRAIN__K(mix_step)(a, dtrain__vload_as(job->in[i], job->dtype, at, count - at),
                                    op);
        for (int i = 0; i < job->out_count; i++)
            dtrain__vstore_as(job->out[i], job->dtype, at, a * scale, count - at);
    }
#endif
}
