/* Muon: the element-wise stages of a step, see optim/muon.c */

DTRAIN__KERNEL(muon)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_muon_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const float lr = update->now.lr, scale = lr * a->scale;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v momentum = dtrain__vset(a->momentum);
    const dtrain__v decay = dtrain__vset(1 - lr * t->weight_decay), step = dtrain__vset(-scale);
    const dtrain__v inverse = dtrain__vset(update->inverse);
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        float *x = a->x + i;
        if (a->stage == DTRAIN_MUON_MOMENTUM) {
            const dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
            const dtrain__v m = dtrain__vfma(momentum, dtrain__vload_n(t->m + i, n), g);
            dtrain__vstore_n(t->m + i, m, n);
            dtrain__vstore_n(x, a->nesterov ? dtrain__vfma(momentum, m, g) : m, n);
        } else if (a->stage == DTRAIN_MUON_NORMALIZE) {
            dtrain__vstore_n(x, dtrain__vload_n(x, n) * inverse, n);
        } else {
            const dtrain__v old = dtrain__vload_n(t->value + i, n) * decay;
            dtrain__vstore_n(t->value + i, dtrain__vfma(step, dtrain__vload_n(x, n), old), n);
        }
    }
}
