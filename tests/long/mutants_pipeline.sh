#!/bin/sh
# mutants_pipeline.sh [WORD]: do the tests of pipelines notice what is broken in schedules, messages, stages, tied
# weights, errors? Random programs over three axes (test_3d_programs) must fail for what makes wrong numbers,
# test_pipeline_faults for what an error should say or who should get one, two others for halves and long messages,
# test_circle for circles of waits.
# WORD: only the mutants whose words have it.
only=${1:-}
. tests/scripts/mutants.sh

arguments="--count 100"
prepare test_3d_programs
mutant "step: micro-batches are not averaged" train/pipeline_step.c 's/dtrain__micro_scale(trainer)/& * (float)trainer->desc.micro_batches/'
mutant "step: masks of the first micro-batch in all" train/pipeline_step.c 's/dtrain__pass_seed(trainer, (uint32_t)number)/dtrain__step_seed(trainer)/'
mutant "step: weights of earlier micro-batches are forgotten" strategy/samples.c '/_weigh_micro(/,/^}/s/strategy->weights += strategy->notes.weight;//'
mutant "step: gradients of earlier micro-batches alone are missing ones" tape/backward.c 's/if (tape->pass.more) dtrain__note_gradient(.*/if (tape->pass.more) continue;/'
mutant "step: an evaluation crosses as training did" train/pipeline_step.c 's/result = dtrain__line_survey(trainer, .made);/result = !pass->own ? DTRAIN_OK : dtrain__line_survey(trainer, \&made);/'
mutant "stage: gradients of nobody are not zeroed" tape/stage.c 's/result = dtrain__gradient_zeros(tape, \(.*\));/result = dtrain__gradient_open(tape, \1, \&(bool){false});/'
mutant "stage: what came back is not gone on with" tape/stage.c 's/x->tensor.producer->reached = true;/(void)x;/'
mutant "stage: inputs of the batch that was fetched last" tape/stage.c 's/    if (slot->batch == slot) {/    if (true) {/'
mutant "stage: tensors go to the next stage alone" tape/stage.c 's/c->last_stage <= stage ||/c->last_stage <= stage || c->stage < stage ||/'
mutant "runner: FORWARD does not wait for what it reads" parallel/runner.c 's/    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD .*/    if (false)/'
mutant "runner: BACKWARD does not wait for its gradient" parallel/runner.c 's/    if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD)/    if (false)/'
mutant "stage: parameters of stages before this rank's are here" strategy/stages.c 's/% map->ranks != map->rank;/% map->ranks > map->rank;/'
mutant "tie: the largest instead of the sum" strategy/ties.c 's/DTRAIN_REDUCE_SUM/DTRAIN_REDUCE_MAX/'
mutant "tie: each stage has its own" strategy/ties.c 's/    if (!bucket->tied) return DTRAIN_OK;/    return DTRAIN_OK;/'
mutant "norm: each stage counts a tied weight" strategy/norm.c 's/!= groups->pipeline_rank)/!= groups->pipeline_rank \&\& false)/'
mutant "norm: the last stage is not counted" strategy/norm.c 's/    const bool whole = layout->tensor_ranks > 1/    if (strategy->groups.pipeline_rank \&\& strategy->groups.pipeline_rank == strategy->groups.pipeline_ranks - 1) continue;\n&/'
mutant "loss: every stage's counts" strategy/view.c '/_loss_counts(/,/^}/s/return groups->pipeline_rank == .*/return true ||/'
mutant "read: from the first stage" strategy/values.c 's/if (strategy->groups.pipeline \&\& result == DTRAIN_OK)/if (false)/'

arguments=""
prepare test_stage_passes
mutant "halves: no first one where no input wants a gradient" tape/op.c 's/    const dtrain_result result = run ? /    if (op->half == DTRAIN_OP_HALF_INPUTS \&\& (!op->input_count || !op->inputs[0]->needs_grad)) return DTRAIN_OK;\n&/'
arguments="long"
prepare test_pipeline
mutant "messages: gradients are written to while they are sent" tape/stage.c 's/crossed->sent = crossed->tensor->gradient;/crossed->tensor->gradient->owners--;/'
arguments=""
prepare test_pipeline_faults
mutant "error: another stage" parallel/runner.c '/_run_place(/,/^}/s/action->chunk \* s->ranks + run->rank,/action->chunk * s->ranks + run->rank + 1,/'
mutant "error: another action" parallel/runner.c 's/names\[action->act\],/names[action->act % 3 + 1],/'
mutant "error: another micro-batch" parallel/runner.c '/_run_place(/,/^}/s/(int)action->micro_batch,/(int)action->micro_batch + 1,/'
mutant "error: without the place" parallel/runner.c 's/    result = dtrain__run_place(run, action, result);/    (void)action;/;s/    if (strncmp(stands, .*//'
mutant "error: data that ended is not named" train/trainer.c 's/return dtrain__pipeline_failed(trainer, result);/return result;/'
mutant "error: data that ended elsewhere passes" train/record.c 's/if (own\[DTRAIN__WORD_ENDED\] != other\[DTRAIN__WORD_ENDED\])/if (false)/;s/if (memcmp(own + DTRAIN__WORD_INPUTS, .* != 0)/if (false)/'
mutant "error: next_batch ends the data" train/micro_batch.c 's/if (result != DTRAIN_ERROR_END) return result;/if (result == DTRAIN_OK) return result;/'
mutant "settings: schedules differ" strategy/settings.c 's/ DTRAIN__OF(pipeline.kind, UINT),//'
mutant "settings: units differ" strategy/settings.c 's/const size_t listed = .*/const size_t listed = 0;/'
mutant "refused: kinds that gather" strategy/settings.c 's/{mesh.pipeline > 1 \&\& shards->grads,/{false,/'
mutant "refused: compression of a tie" strategy/ties.c 's/        if (strategy->desc.compression)/        if (false)/'
mutant "refused: other shapes" tape/stage.c 's/ crossing->count != x->count ||/ false ||/'
mutant "refused: a tensor of another stage" tape/stage.c 's/if (crossing->stage != made->stage ||/if (/'
mutant "refused: steps back" tape/tape.c 's/    else if (stages && stage < stages->at)/    else if (false)/'
mutant "refused: gradients of inputs" tape/stage.c 's/    if (x->needs_grad)/    if (false)/'
mutant "overflow: of the first stage is not seen" strategy/norm.c 's/    const bool whole = layout->tensor_ranks > 1/    if (strategy->groups.pipeline \&\& strategy->groups.pipeline_rank == 0) continue;\n&/'
mutant "stop: each rank for itself" train/record.c 's/record->stop_requested = .*/record->stop_requested = own[DTRAIN__WORD_STOP] > 0;/'
mutant "verify: copies of a tie may differ" strategy/compare.c 's/dtrain__compare_copies(strategy);/DTRAIN_OK;/'

arguments="failing"
prepare test_pipeline_runner
mutant "error: what waiting has left" parallel/runner.c 's/return dtrain__set_last_error(result, text);.*/return result;/'

arguments=""
prepare test_pipeline_options
mutant "step: a missing gradient is the end" train/pipeline_step.c 's/    DTRAIN__TRY(dtrain_strategy_finish(strategy));/    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain_strategy_finish(strategy)));/'
mutant "step: weights of a program's own do not count" train/pipeline_step.c 's/micro->weight = dtrain__notes_of(.*;/micro->weight = 1;/'
mutant "step: a weight is that of later micro-batches too" train/pipeline_step.c 's/    return dtrain_strategy_weight(strategy, 1);.*/    return DTRAIN_OK;/'
mutant "step: accumulate is the program's" train/pipeline_step.c 's/    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, false));.*//'
mutant "step: the last trainer says how many micro-batches" train/pipeline_step.c 's/    dtrain__notes_of(strategy)->pipelined = .*//;s/^    return dtrain__stages_create(/    if (trainer->desc.strategy) dtrain__notes_of(trainer->desc.strategy)->pipelined = trainer->desc.micro_batches > 1;\n&/'
mutant "step: every stage gives its weight" strategy/counts.c 's/if (strategy->groups.pipeline_rank)/if (false)/'
mutant "settings: trainers differ" train/create.c 's/    if (trainer->compared) return DTRAIN_OK;/    if (true) return DTRAIN_OK;/'
mutant "refused: Muon where it has a matrix alone" strategy/query.c 's/!strategy->layout.entries\[i\].whole/dtrain__shard_bucket(\&strategy->layout, i)/'
mutant "refused: an evaluation without next_batch" train/trainer.c 's/    DTRAIN__TRY(dtrain__check_fetches(&trainer->groups, call, next_batch));//'

arguments="--count 500"
prepare test_circle
mutant "circle: a new number at each look" comm/circle.c 's/if (!wait->number) dtrain__show_wait/dtrain__show_wait/'
mutant "circle: an all-gather has no number" comm/circle.c 's/work->op.sequence : world->gather_count/work->op.sequence : 0/'
mutant "circle: an all-gather that has begun has not" comm/circle.c 's/return world->gather_count >= sequence/return world->gather_count > sequence/'
mutant "circle: a call of a communicator that is gone" comm/circle.c 's/if (!comm) return false/if (!comm) return true/'
mutant "circle: a collective that has begun has not" comm/circle.c 's/return comm->sequence >= sequence/return comm->sequence > sequence/'
mutant "circle: a message to another rank" comm/circle.c 's/if (!work->op.sequence \&\& comm->base.world_ranks\[work->op.what.root\] == waiter \&\&/if (!work->op.sequence \&\&/'
mutant "circle: both send" comm/circle.c 's/            work->op.what.kind != dtrain__load(&other->kind))/            true)/'
mutant "circle: ranks of the communicator" comm/circle.c 's/comm->base.world_ranks\[work->op.what.root\] == waiter/work->op.what.root == waiter/'
mutant "circle: a message under way" comm/circle.c 's/            return true;/            return false;/'
mutant "circle: confirmed facts are written again" comm/circle.c 's/if (dtrain__load(fact) >> 1 == (n << 31 | m)) continue;//'
mutant "circle: facts of the awaited rank's older wait" comm/circle.c 's/dtrain__load(fact) >> 1 == (n << 31 | m)/dtrain__load(fact) >> 32 == n/'
mutant "circle: facts of the waiter's older wait" comm/circle.c 's/dtrain__load(fact) >> 1 == (n << 31 | m)/(dtrain__load(fact) >> 1 \& 0x7fffffffu) == m/'
mutant "circle: what has been heard is missing" comm/circle.c 's/ : !comm->transport->heard(\&comm->base, work->op.sequence, rank)/ : true/'
mutant "circle: a message of any rank" comm/circle.c 's/if (message ? rank != work->op.what.root : /if (message ? false : /'
mutant "circle: messages do not lag" comm/circle.c 's/? comm->transport->lags(\&comm->base, \&work->op, rank)/? true/'
mutant "circle: what is done is missing" comm/circle.c 's/work \&\& (work->done || (work->op.sequence/work \&\& (false || (work->op.sequence/'
mutant "circle: an older wait is confirmed" comm/circle.c 's/if (found\[i\] >> 32 != wait->number) found\[i\] = 0;//'
mutant "circle: no grace" comm/circle.c 's/ || (work \&\& wait->last_ns - wait->facts_ns < comm->transport->grace_ns)//'
mutant "circle: grace from the first fact on" comm/circle.c 's/if (sum != wait->facts) wait->facts_ns/if (!wait->facts) wait->facts_ns/'
mutant "circle: nothing is moved before" comm/circle.c 's/    if (work) dtrain__engine_advance(comm);//'
mutant "circle: moved before facts are read" comm/circle.c 's/    if (work) dtrain__engine_advance(comm);//;s/^    const int size = work/    if (work) dtrain__engine_advance(comm);\n&/'
mutant "circle: confirmed without a second look" comm/circle.c 's/ \&\& (!work || dtrain__waits_for(comm, work, i))//'
mutant "circle: another fact is confirmed" comm/circle.c 's/dtrain__store(at\[i\], found\[i\] | 1)/dtrain__store(at[i], dtrain__load(at[i]) | 1)/'
mutant "circle: of facts that nobody confirmed" comm/circle.c 's/if (!(fact \& 1) || /if (/'
mutant "circle: of waits that are over" comm/circle.c 's/ ends_after != waits\[reached\[at\]\] ||//'
mutant "circle: of waits that ended with errors" comm/circle.c 's/ || fact >> 32 != number) continue/) continue/;s/waits\[i\] = number/waits[i] = fact >> 32/'
mutant "circle: a long one" comm/circle.c 's/for (int i = 0; i < world->size; i++) {\n            const uint64_t fact = dtrain__load(&world->control->facts\[re/&/;s/if (i == world->rank) {/if (i == world->rank \&\& at + 1 >= count) {/'
mutant "circle: short waits" comm/circle.c 's/if (wait->waited_ns < world->long_wait_ns ||/if (/'
mutant "circle: at every poll" comm/circle.c 's/        wait->last_ns - wait->looked_ns < world->long_wait_ns \/ 512)/        false)/'
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
