#!/bin/sh
# mutants_tensor.sh [WORD]: do random programs notice an operation that is broken on the tensor axis? Each mutant is
# one line of src/ changed: a sum that is left out, doubled or made a mean, a part that begins elsewhere, something
# counted by every rank. Its file is compiled and linked before the library, and test_tensor_programs must fail. WORD:
# only the mutants whose words have it.
only=${1:-}
. tests/scripts/mutants.sh

cut='((const dtrain__linear *)op->args)->cut'
t='(float)op->tape->groups.tensor_ranks'

arguments="--count 400"
prepare test_tensor_programs
mutant "linear: the sum of y is left out" tape/linear.c 's/sum_values(op, gemm.c, gemm.m/sum_values(op, gemm.c, 0 * gemm.m/'
mutant "linear: the sum of y is doubled" tape/linear.c '/_linear_forward(/,/^}/s/gemm.aux = NULL;/& gemm.alpha = 2;/'
mutant "linear: the sum of y is a mean" tape/linear.c "/_linear_forward(/,/^}/s/gemm.aux = NULL;/& gemm.alpha = 1 \/ $t;/"
mutant "linear: the bias is added by each rank" tape/linear.c 's/    gemm.bias = NULL;//'
mutant "linear: no activation behind the sum" tape/linear.c 's/    return op->device->ops->bias(op->device, &gemm);/    gemm.activation = 0;\n&/'
mutant "linear: the value before the activation is not kept" tape/linear.c 's/    return op->device->ops->bias(op->device, &gemm);/    gemm.aux = NULL;\n&/'
mutant "linear: the sum of d_x is left out" tape/linear.c 's/sum_values(op, product, x->count/sum_values(op, product, 0/'
mutant "linear: the sum of d_x is doubled" tape/linear.c "/_linear_input_grad(/,/^}/s/gemm.alpha = 1;/gemm.alpha = $cut == DTRAIN_CUT_ROWS ? 2 : 1;/"
mutant "linear: the sum of d_x is a mean" tape/linear.c "/_linear_input_grad(/,/^}/s/gemm.alpha = 1;/gemm.alpha = $cut == DTRAIN_CUT_ROWS ? 1 \/ $t : 1;/"
mutant "linear: d_x of columns is doubled" tape/linear.c "/_linear_input_grad(/,/^}/s/gemm.alpha = 1;/gemm.alpha = $cut == DTRAIN_CUT_COLUMNS ? 2 : 1;/"
mutant "linear: d_weight of a cut weight is doubled" tape/linear.c "/_linear_weight_grad(/,/^}/s/gemm->alpha = 1;/gemm->alpha = $cut ? 2 : 1;/"
mutant "linear: d_weight of a cut weight is a mean" tape/linear.c "/_linear_weight_grad(/,/^}/s/gemm->alpha = 1;/gemm->alpha = $cut ? 1 \/ $t : 1;/"
mutant "linear: d_weight is not added to" tape/linear.c 's/weight.beta = add ? 1.0f : 0.0f/weight.beta = 0.0f/'
mutant "linear: d_bias of rows is that of all rows on each rank" tape/linear.c 's/(weighs \&\& !layer->scatters)/weighs/'
mutant "linear: d_x is not added to what is there" tape/linear.c 's/if (add) DTRAIN__TRY(dtrain__tape_add/if (false) DTRAIN__TRY(dtrain__tape_add/'
mutant "linear: earlier gradients of x are summed again" tape/linear.c 's/if (add || layer->gathers) {/if (layer->gathers) {/'
mutant "linear: d_x beside the rows that are here" tape/linear.c 's/sum += (size_t)dtrain__tensor_share(x)->first\[0\] \* row;/sum += 0;/'
mutant "linear: another input's columns are taken" tape/linear.c 's/        \*part = dtrain__cut_part(op, &weight.cut,/        weight_cut_none(\&weight); *part = dtrain__cut_part(op, \&weight.cut,/;s/^static dtrain_result dtrain__linear_place/static void weight_cut_none(const dtrain__share *w) { ((dtrain__share *)(uintptr_t)w)->cut.components = 1; }\n&/'
mutant "exchange: rows are scattered without a sum" tape/place.c '/_scatter_rows(/,/^}/s/DTRAIN_REDUCE_SUM/DTRAIN_REDUCE_MAX/'
mutant "exchange: values are not summed" tape/place.c '/_sum_values(/,/^}/s/DTRAIN_REDUCE_SUM/DTRAIN_REDUCE_MAX/'
mutant "exchange: uneven rows stand one too early" tape/place.c '/_gather_rows(/,/^}/s/of.first\[i\] \* row/(of.first[i] ? of.first[i] - 1 : 0) * row/'
mutant "place: columns in the order of ranks, not of components" tape/place.c '/_gather_rows(/,/^}/s/of.first\[i\] \* row/(dtrain__cut_part(op, cut, rows, 0).count * r + (int64_t)i * of.length[0]) * row/'
mutant "place: earlier gradients are lost" tape/place.c 's/    if (add) beside/    if (false) beside/'
mutant "place: what was there is not added" tape/place.c 's/    if (beside)$/    if (false)/'
mutant "place: only the first rank transposes its columns" tape/place.c 's/DTRAIN__TRY(dtrain__turn(op, x, n, x_rows, scratch->memory));/if (!gathers || op->tape->groups.tensor_rank == 0) &/'
mutant "place: the first rows or columns instead of one's own" tape/place.c '/_place_move(/,/^}/s/part.first\[i\] \* row/(part.first[i] - part.first[0]) * row/'
mutant "embedding: the sum is left out" tape/embedding.c 's/sum_values(op, args.y, args.rows/sum_values(op, args.y, 0 * args.rows/'
mutant "embedding: each rank adds the positions" tape/embedding.c 's/    if (op->tape->groups.tensor_rank > 0) args.wpe = NULL;//'
mutant "embedding: each rank has the first tokens" tape/embedding.c 's/args->first_token = table.first\[0\]/args->first_token = 0/'
mutant "embedding: positions of the first rows" tape/embedding.c 's/args->first_row = layer->first_row;//'
mutant "embedding: tokens of the first rows" tape/embedding.c 's/args->tokens += layer->first_row;//'
mutant "embedding: d_table of the rows that are here" tape/embedding.c 's/    args.d_y = all->memory;/    args.d_y = op->outputs[0]->grad; args.rows = layer->rows;/'
mutant "embedding: d_position of all rows on each rank" tape/embedding.c 's/        dtrain__embedding_own_rows(layer, &args);/        args.rows = layer->rows;/'
mutant "cross-entropy: the sums are left out" tape/cross_entropy.c 's/args.smoothing > 0 ? 3 : 2) \* rows,/0) * rows,/'
mutant "cross-entropy: the sum of smoothing is left out" tape/cross_entropy.c 's/(args.smoothing > 0 ? 3 : 2) \* rows,/2 * rows,/'
mutant "cross-entropy: sums are largest values" tape/cross_entropy.c 's/dtrain__sum_values(op, args.parts + rows, (args.smoothing > 0 ? 3 : 2) \* rows,/dtrain_all_reduce(op->tape->groups.tensor, args.parts + rows, args.parts + rows, (size_t)((args.smoothing > 0 ? 3 : 2) * rows), DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL)); DTRAIN__TRY(dtrain__sum_values(op, args.parts, 0,/'
mutant "cross-entropy: a largest value of one's own" tape/cross_entropy.c 's/(size_t)rows, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX/0, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX/'
mutant "cross-entropy: exponentials are not scaled anew" tape/cross_entropy.c '/DTRAIN__TRY(dtrain_work_wait(work));/,/sum_values/s/DTRAIN__TRY(ops->cross_entropy_finish(op->device, &args));//'
mutant "cross-entropy: losses of rows are not summed" tape/cross_entropy.c 's/!= DTRAIN_PLACEMENT_ROWS) return DTRAIN_OK;$/<= DTRAIN_PLACEMENT_ROWS) return DTRAIN_OK;/'
mutant "cross-entropy: targets of the first rows" tape/cross_entropy.c 's/args->targets += part->first\[0\];/(void)args;/'
mutant "cross-entropy: padding counts" tape/cross_entropy.c 's/args->whole_classes - args->first_class;/args->n;/'
mutant "cross-entropy: each rank has the first classes" tape/cross_entropy.c 's/args->first_class = part->first\[0\]/args->first_class = 0/'
mutant "attention: the mask of the first heads" tape/attention.c 's/ + x->first_head \* args->mask_head_step//'
mutant "attention: heads of keys by the number of all" tape/attention.c 's/    args->kv_heads = count\[1\];/    args->kv_heads = count[0];/'
mutant "rotary: values are turned, too" tape/attention.c 's/    args->rotated = rotated;/    args->rotated = heads;/'
mutant "dropout: masks of the first rows" tape/elementwise.c 's/of->first = part->first\[0\] \* of->n;/of->first = 0;/'
mutant "dropout: masks of the first columns" tape/elementwise.c 's/column = part->first\[i\];/column = i ? part->first[i] : 0;/'
mutant "dropout: masks of the part" tape/elementwise.c 's/of->whole_n = part->whole;/of->whole_n = of->n;/'
mutant "backward: gradients of whole tensors count on each rank" tape/backward.c 's/if (groups->sequence_parallel \&\& groups->tensor_rank/if (false \&\& groups->tensor_rank/'
mutant "backward: what does not count is left in place" tape/backward.c 's/    if (!\*accumulate)$/    if (false)/'
mutant "strategy: gradients of rows are not summed" strategy/tensor.c '/_tensor_begin(/,/^}/s/DTRAIN_REDUCE_SUM/DTRAIN_REDUCE_MAX/'
mutant "strategy: sums are not unpacked" strategy/tensor.c 's/return dtrain__tensor_pack(strategy, bucket, true);/return DTRAIN_OK;/'
mutant "strategy: sums in a mean" strategy/tensor.c 's/    packed += dtrain__padded(count);/    for (int64_t k = 0; k < count \&\& !back; k++) packed[k] \/= 2;\n&/'
mutant "norm: each rank counts what is whole" strategy/norm.c 's/: whole \&\& groups->tensor_rank)/: false)/'
mutant "norm: the first rank counts what is cut" strategy/norm.c 's/: whole \&\& groups->tensor_rank)/: groups->tensor_rank)/'
mutant "weights: the unit is that of one's own axis" strategy/counts.c 's/weighing = ranks \/ groups->pipeline_ranks/weighing = layout->all/'
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
