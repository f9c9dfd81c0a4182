/* report.h: what rank 0 prints of any run: the machine, the plan and what it goes on from before the first step, and
 * the table behind the last. */
#ifndef RUN_REPORT_H
#define RUN_REPORT_H

#include "tools/run/job.h"
#include "tools/process_memory.h"

static double mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

/* Return the ending of a noun behind a number. */
static const char *plural(int64_t count) { return count == 1 ? "" : "s"; }

static void show_device(const run_settings *s, dtrain_world *world)
{
    dtrain_device *device = dtrain_world_device(world);
    dtrain_device_info gpu;
    dtrain_comm_info comm;
    int ranks = dtrain_world_size(world);
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    uint32_t threads = info.threads;
    printf("dtrain %s    %d rank%s ", DTRAIN_VERSION_STRING, ranks, plural(ranks));
    if (dtrain_device_query(device, &gpu) != DTRAIN_OK) return;
    if (device->ops->host_memory) {
        printf("x %u thread%s on the cpu (%s kernels)\n", threads, plural(threads), gpu.kernels);
        if (widens(device, s))
            printf("note    %s gains nothing on this cpu%s: operands are widened for each product, "
                   "so that a step takes "
                   "up to 1.4 times that of fp32, and weights have rounded copies\n",
                   precisions[s->precision], s->precision == BF16 ? ", which has no AMX" : "");
        return;
    }
    dtrain_comm_query(dtrain_world_comm(world), &comm);
    printf("on %u %s (kernels for sm_%u), %s%s, collectives: %s\n", gpu.count, gpu.name,
           gpu.code_version, precisions[s->precision], s->graph ? ", graph" : "", comm.backend);
}

/* Say how the ranks divide the model and the samples. */
static void show_mesh(const run_job *j)
{
    dtrain_mesh_info mesh;
    dtrain_mesh_query(j->mesh, &mesh);
    if (!j->mesh) return;
    printf("mesh    tensor %d x ", mesh.tensor);
    if (mesh.pipeline > 1) printf("pipeline %d x ", mesh.pipeline);
    printf("data %d: ", mesh.data);
    if (mesh.tensor > 1) printf("%d ranks share every layer of a replica, ", mesh.tensor);
    if (mesh.pipeline > 1) printf("%d have its stages, ", mesh.pipeline);
    printf("%d replica%s average%s gradients%s\n", mesh.data, plural(mesh.data),
           mesh.data == 1 ? "s" : "", mesh.sequence_parallel ? "; sequence-parallel" : "");
    if (mesh.pipeline == 1) return;
    printf("stages  have %u", j->line.units[0]);
    for (int stage = 1; stage < stage_count(j->s); stage++) printf(", %u", j->line.units[stage]);
    printf(" units%s\n", j->stage_units ? ", by their cost" : "");
}

/* Print the gradient memory of a rank for each mode of accumulation that the strategy has. */
static void show_accumulation(const run_job *j, const dtrain_strategy_info *info, int ranks)
{
    dtrain_strategy_desc desc = info->desc;
    dtrain_memory memory;
    dtrain_param *params = copy_params(j);
    printf("accum   gradients are reduced in mode %s; MiB of gradients:",
           accum_modes[info->desc.accumulation]);
    for (desc.accumulation = DTRAIN_ACCUMULATION_LAST;
         params && desc.accumulation <= DTRAIN_ACCUMULATION_SHARD_EVERY; desc.accumulation++)
        if (dtrain_strategy_plan(params, j->param_count, &desc, ranks * (int)model_ranks(j->s),
                                 &memory) == DTRAIN_OK)
            printf(" %s %.1f", accum_modes[desc.accumulation], mib(memory.grads));
    free(params);
    printf("\n");
}

/* The gradients that a rank has: of a mesh those of its part of the model. */
static double elements_here(const run_job *j)
{
    double sum = 0;
    for (size_t i = 0; i < j->param_count; i++) {
        const dtrain_param *p = &j->params[i];
        if (!p->alias_of && !(p->flags & DTRAIN_PARAM_FROZEN)) sum += (double)p->count;
    }
    return sum;
}

/* The bytes that a rank would send to reduce fp32 gradients once, by the ring formula. ranks: those that average. */
static double dense_bytes(const run_job *j, int ranks)
{
    return 8.0 * elements_here(j) * (ranks - 1) / ranks;
}

/* Write "top-k 0.01, hierarchical", or nothing for plain DDP. */
static void describe_compression(const dtrain_strategy_desc *desc, char *text, size_t room)
{
    const dtrain_compression_desc *how = desc->compression;
    *text = 0;
    if (how && how->kind == DTRAIN_COMPRESSION_TOPK)
        snprintf(text, room, "top-k %g", (double)how->topk_ratio);
    if (how && how->no_error_feedback)
        snprintf(text + strlen(text), room - strlen(text), " without error feedback");
    if (desc->hierarchical)
        snprintf(text + strlen(text), room - strlen(text), "%shierarchical", *text ? ", " : "");
}

static unsigned long long dense_steps(const dtrain_compression_desc *how)
{
    return how->dense_steps == DTRAIN_DENSE_STEPS_NONE ? 0 : how->dense_steps;
}

static void show_links(const run_job *j, const dtrain_strategy_info *info, int ranks)
{
    const run_settings *s = j->s;
    const int all = ranks * (int)model_ranks(s), node_ranks = (int)s->emulation.node_ranks;
    const dtrain_strategy_desc *desc = &info->desc;
    const int nodes = node_ranks ? all / node_ranks : 0;
    char text[128];
    describe_compression(desc, text, sizeof text);
    if (*text) printf("reduce  %s", text);
    if (desc->compression)
        printf(", after %llu dense steps and %llu of warm-up; keeps %.1f MiB of state",
               dense_steps(desc->compression), (unsigned long long)desc->compression->warmup_steps,
               mib(info->state_bytes));
    if (*text) printf("\n");
    if (node_ranks)
        printf("cluster emulated: %d node%s x %d rank%s, %g Gb/s and %g us between nodes\n", nodes,
               plural(nodes), node_ranks, plural(node_ranks), s->emulation.gigabits_per_second,
               s->emulation.latency_us);
}

/* ranks: those that average gradients. */
static void show_strategy(const run_job *j, int ranks)
{
    const dtrain_memory *m = &j->memory;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    show_mesh(j);
    printf("strategy %s: %d shard%s x %d replica%s, gradients in %zu bucket%s\n", info.name,
           info.shard_ranks, plural(info.shard_ranks), info.replicas, plural(info.replicas),
           info.bucket_count, plural((int64_t)info.bucket_count));
    show_links(j, &info, ranks);
    if (info.reason[0]) say(stdout, "auto    %s\n", info.reason);
    if (j->accum > 1) show_accumulation(j, &info, ranks);
    printf("memory  a rank will need %.1f MiB: parameters %.1f, gradients %.1f, optimizer %.1f, "
           "buffers "
           "%.1f, activations %.1f + %.1f, workspace %.1f, snapshot %.1f\n",
           mib(m->total), mib(m->params), mib(m->grads), mib(m->optimizer), mib(m->buffers),
           mib(m->activations), mib(m->activation_grads), mib(m->workspace),
           mib(j->snapshot_bytes));
    if (m->host) printf("offload %.1f MiB of host memory a rank\n", mib(m->host));
    printf("\n");
}

/* Say what a run goes on from, and what of it was cut anew. */
static void show_resumed(const run_job *j, int ranks)
{
    const dtrain_load_info *from = &j->resumed;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    if (from->step < 0) return;
    say(stdout, "resume  step %lld from %s: %llu parameters, %.1f MiB read by rank 0 in %.2f s\n",
        (long long)from->step, from->path, (unsigned long long)from->values, mib(from->bytes),
        from->seconds);
    if (from->ranks != ranks || strcmp(from->strategy, info.name) != 0)
        say(stdout, "        saved by %d rank%s of %s, resharded to %d of %s\n", from->ranks,
            plural(from->ranks), from->strategy, ranks, info.name);
    if (from->note[0]) say(stdout, "        %s\n", from->note);
    if (strstr(from->note, "--seed was"))
        printf("        the order of data and dropout stay with the old --seed\n");
}

/* Print what was sent, averaged over all steps, those without compression included. ranks: those that average
 * gradients. */
static void show_sent(const run_job *j, const dtrain_strategy_info *info,
                      const dtrain_summary *summary, int ranks)
{
    const run_settings *s = j->s;
    const double steps = (double)(summary->steps ? summary->steps : 1);
    const double sent =
        (double)(summary->comm_bytes - summary->tensor_bytes - summary->pipeline_bytes) / steps;
    char text[128];
    describe_compression(&info->desc, text, sizeof text);
    if (info->desc.compression)
        printf("  compression          %10.1fx  fewer bytes than fp32 gradients: %.3f MiB sent a "
               "step, not %.3f; %s\n",
               sent > 0 ? dense_bytes(j, ranks) / sent : 1, sent / 1048576,
               dense_bytes(j, ranks) / 1048576, text);
    if (s->emulation.node_ranks)
        printf("  cluster              %10d   emulated nodes of %u ranks, %g Gb/s, %g us: times "
               "are of this cluster\n",
               ranks * (int)model_ranks(s) / (int)s->emulation.node_ranks, s->emulation.node_ranks,
               s->emulation.gigabits_per_second, s->emulation.latency_us);
}

/* Print how many products a GPU computes by slower kernels than cublasLt's; there should be none. */
static void show_slow_gemms(dtrain_world *world)
{
    dtrain_device_info gpu;
    if (dtrain_device_query(dtrain_world_device(world), &gpu) != DTRAIN_OK || !gpu.code_version)
        return;
    printf("  slow products        %10u   kinds that cublasLt did not compute as asked\n",
           gpu.slow_gemms);
}

static void show_saved(const run_job *j)
{
    dtrain_checkpoint_info saved;
    dtrain_checkpoint_query(j->checkpoint, &saved);
    if (!saved.saved) return;
    printf("  checkpoints          %10llu   the last of step %lld: it held training up for %.0f "
           "ms, and was written in %.0f ms\n",
           (unsigned long long)saved.saved, (long long)saved.last_step, 1e3 * saved.stall_seconds,
           1e3 * saved.write_seconds);
}

/* Return what share of a step `ms` is, in per cent. */
static double share(const dtrain_summary *summary, double ms)
{
    return summary->step_ms > 0 ? 100 * ms / summary->step_ms : 0;
}

/* Print the times of a step: means, whose shares can be compared, because waits are rare and long. The rate is that of
 * the steps' time, without evaluations. */
static void show_times(const run_job *j, const dtrain_summary *summary)
{
    const double steps = (double)summary->steps;
    printf("  %s             %10.0f   mean of the steps; %.1f s in all\n", j->program->sample_name,
           summary->tokens_per_second, summary->seconds);
    printf("  step                 %10.2f ms  mean; the shares below are of it\n",
           summary->step_ms);
    printf("  communication        %10.2f ms in flight, %.2f ms exposed: %.1f %%; %.1f MiB sent a "
           "step\n",
           summary->comm_ms, summary->exposed_comm_ms, share(summary, summary->exposed_comm_ms),
           mib(summary->comm_bytes) / steps);
    if (j->sent)
        printf("  last step            %10llu bytes sent by rank 0%s\n",
               (unsigned long long)j->sent, j->mesh ? " over the data axis" : "");
    if (summary->tensor_bytes)
        printf("  tensor axis          %10.1f MiB of these sent a step, in every layer\n",
               mib(summary->tensor_bytes) / steps);
    if (summary->pipeline_bytes)
        printf(
            "  pipeline axis        %10.1f MiB of these sent a step; bubble %.2f ms, %.1f %%, mean "
            "of ranks\n",
            mib(summary->pipeline_bytes) / steps, summary->bubble_ms,
            share(summary, summary->bubble_ms));
    printf("  data                 %10.3f ms  in wait for batches: %.2f %%\n", summary->data_ms,
           share(summary, summary->data_ms));
}

/* Print the memory of rank 0: on a CPU what its process has, and everywhere what the library holds for the model. */
static void show_memory(dtrain_world *world, const run_job *j)
{
    const dtrain_device *device = dtrain_world_device(world);
    const double planned = mib(j->memory.total);
    uint64_t now, peak;
    if (device->ops->host_memory) {
        process_memory(&now, &peak);
        printf("  process memory       %10.1f MiB in rank 0, %.1f at its peak, %.1f predicted\n",
               mib(now), mib(peak), planned);
    }
    printf("  library memory       %10.1f MiB in rank 0 at its peak", mib(device->peak_bytes));
    if (!device->ops->host_memory) printf(", %.1f predicted", planned);
    if (j->s->memory_limit) printf(", of --memory-limit %ld", j->s->memory_limit);
    printf(": what dtrain holds for the model; program, data and scratch of kernels are not in "
           "it\n");
}

/* Say where a run ends that a signal has stopped, and what becomes of it. */
static void show_stopped(const run_job *j)
{
    printf("\nstopped by a signal, as asked, after step %lld of %lld", (long long)j->stopped_at,
           (long long)j->steps);
    if (j->saved)
        say(stdout, "; saved in %s: the same command with --resume auto goes on\n",
            j->s->checkpoints);
    else if (j->checkpoint) printf("; it could not be saved\n");
    else printf("; with --checkpoint DIR it would be saved, to go on from here\n");
}

static void show_end(dtrain_world *world, const run_job *j, const dtrain_summary *summary)
{
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    if (!summary->steps) {
        printf("\n  nothing was left to do: all %lld steps were made before\n",
               (long long)j->steps);
        return;
    }
    printf("\n  loss                 %10.4f   from %.4f, over %lld step%s and %.2f M %s\n",
           summary->last_loss, summary->first_loss, (long long)summary->steps,
           plural(summary->steps), 1e-6 * (double)summary->tokens, j->program->things);
    if (isfinite(summary->val_loss)) printf("  validation loss      %10.4f", summary->val_loss);
    if (isfinite(summary->val_loss) && strcmp(j->program->things, "tokens") == 0)
        printf("   perplexity %.2f", exp(summary->val_loss));
    if (isfinite(summary->val_loss)) printf("\n");
    show_times(j, summary);
    show_sent(j, &info, summary, job_ranks(world, j));
    printf("  scaling              %10.1f %%  of %d rank%s at most: only exposed communication "
           "counts\n",
           100 * summary->scaling, dtrain_world_size(world), plural(dtrain_world_size(world)));
    show_memory(world, j);
    show_slow_gemms(world);
    if (j->checkpoint) show_saved(j);
    if (j->stopped) show_stopped(j);
}

#endif /* RUN_REPORT_H */
