/* Sizes of structs, for a library that is compiled separately from its program
 *
 * A program that is compiled with one dtrain.h can run with the shared library of another version.
 * It passes &dtrain_header_abi in dtrain_launch_desc.abi or dtrain_join_desc.abi:
 *
 *     GROWS    later versions may append fields, never in the padding at the end. A field unknown
 *              to the program is zero, the default. A field unknown to the library is an error
 *              unless it is zero. The library fills only fields of an info that the program knows.
 *              Calls without a world (dtrain_strategy_plan, a mesh for plans) use only the fields
 *              of the first version
 *     FIXED    never grows: the struct is in arrays or other structs, is returned, or belongs to
 *              calls without a world, such as dtrain_device_create. If a program's struct has
 *              another size, the error names it
 *
 * Tables of backends have a version in their first field instead. Entries are appended, never moved
 * or removed. The numbers are sizes in the first version. */

#pragma once

#include "core/api.h"

/* clang-format off */
#define DTRAIN_ABI_LIST(GROWS, FIXED) \
    GROWS(launch_desc, options, 200) GROWS(join_desc, options, 192) \
    GROWS(launch_info, restart_count, 28) GROWS(launch_place, restart_count, 20) \
    GROWS(world_info, comm_given, 72) GROWS(mesh_desc, rank, 32) \
    GROWS(mesh_info, sequence_parallel, 33) \
    GROWS(strategy_desc, compression, 120) GROWS(strategy_info, reason, 800) \
    GROWS(compression_desc, hook, 56) GROWS(optimizer_info, scratch_bytes, 32) \
    GROWS(state_desc, comm, 80) GROWS(checkpoint_desc, state, 48) \
    GROWS(checkpoint_info, snapshot_bytes, 56) GROWS(load_desc, storage, 16) \
    GROWS(load_info, note, 1192) GROWS(export_desc, storage, 24) GROWS(import_desc, storage, 40) \
    GROWS(import_info, note, 624) GROWS(dataset_desc, user, 64) GROWS(loader_desc, user, 112) \
    GROWS(loader_info, batch_samples, 20) GROWS(tape_info, error, 60) \
    GROWS(batch_norm_desc, comm, 48) GROWS(attention_desc, mask, 56) \
    GROWS(conv2d_desc, groups, 56) GROWS(pool2d_desc, padding, 56) GROWS(trainer_desc, mesh, 224) \
    GROWS(metrics_desc, sink_count, 120) GROWS(metrics_info, no_plan, 232) FIXED(allocator, 24) \
    FIXED(trace_desc, 40) FIXED(device_desc, 56) FIXED(device_info, 224) FIXED(cut, 48) \
    FIXED(param, 208) FIXED(shard, 56) FIXED(memory, 72) FIXED(comm_info, 160) \
    FIXED(loss_scaler, 24) FIXED(schedule, 104) FIXED(optimizer_desc, 64) \
    FIXED(pipeline_desc, 16) FIXED(pipeline_action, 24) FIXED(pipeline_schedule, 48) \
    FIXED(pipeline_costs, 32) FIXED(pipeline_part, 24) FIXED(pipeline_work, 24) FIXED(piece, 80) \
    FIXED(state_tensor, 160) FIXED(state_item, 152) FIXED(storage, 88) FIXED(export_name, 24) \
    FIXED(dataset_info, 72) FIXED(sample, 32) FIXED(tensor, 96) FIXED(step_record, 3160) \
    FIXED(batch_search, 48) FIXED(summary, 136) FIXED(figure, 32) FIXED(histogram, 96) \
    FIXED(metrics_sample, 72) FIXED(metrics_sink, 32) FIXED(metrics_sink_info, 32) \
    FIXED(hook_tensor, 56) FIXED(hook_bucket, 96) FIXED(comm_hook_desc, 56) FIXED(op, 608) \
    FIXED(op_desc, 56)
/* clang-format on */

#define DTRAIN_ABI_ONE(...) +1

/* Bytes of each struct of the list; of a GROWS struct, up to the end of its last field. */
typedef struct dtrain_abi {
    uint32_t count; /* entries that follow; 0 = program and library are compiled together */
    uint32_t bytes[0 DTRAIN_ABI_LIST(DTRAIN_ABI_ONE, DTRAIN_ABI_ONE)];
} dtrain_abi;
