/* The CPU device: state, memory, table. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/cpu/pool_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

DTRAIN__PRIVATE int64_t dtrain__multiple(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Ask for 2 MiB pages: matrices use many pages at once, and first touch is about ten times faster.
 * A refusal changes nothing. */
static void dtrain__advise_huge(char *memory, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    const size_t huge = (size_t)2 << 20;
    char *begin = memory + (size_t)(-(uintptr_t)memory & (huge - 1));
    if (bytes < 2 * huge || (size_t)(memory + bytes - begin) < huge) return;
    madvise(begin, (size_t)(memory + bytes - begin) & ~(huge - 1), MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

/* 64-byte aligned memory from an allocator that aligns for any type: the bytes before the returned
 * memory hold the address of the block. */
#define DTRAIN__ALIGN_EXTRA (63 + sizeof(void *))

static void *dtrain__aligned_alloc(const dtrain_allocator *allocator, size_t bytes)
{
    if (bytes > SIZE_MAX - DTRAIN__ALIGN_EXTRA) return NULL;
    char *block = (char *)allocator->alloc(allocator->user, bytes + DTRAIN__ALIGN_EXTRA);
    if (!block) return NULL;
    dtrain__advise_huge(block, bytes);
    char *memory = block + sizeof(void *);
    memory += (size_t)(-(uintptr_t)memory & 63);
    memcpy(memory - sizeof(void *), &block, sizeof block);
    return memory;
}

static void dtrain__aligned_free(const dtrain_allocator *allocator, void *memory, size_t bytes)
{
    void *block;
    if (!memory) return;
    memcpy(&block, (char *)memory - sizeof(void *), sizeof block);
    allocator->free(allocator->user, block, bytes + DTRAIN__ALIGN_EXTRA);
}

/* Get at least `floats` of scratch, 64-byte aligned, contents undefined. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_scratch(dtrain__cpu *cpu, int64_t floats, float **out)
{
    const size_t bytes = (size_t)floats * sizeof(float);
    if ((uint64_t)floats > SIZE_MAX / (4 * sizeof(float)))
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "a CPU kernel's scratch of %lld floats is too large", (long long)floats);
    if (bytes > cpu->scratch_bytes) {
        dtrain__aligned_free(&cpu->allocator, cpu->scratch, cpu->scratch_bytes);
        cpu->scratch_bytes = 0;
        cpu->scratch = (float *)dtrain__aligned_alloc(&cpu->allocator, bytes);
        if (!cpu->scratch)
            return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %lld bytes of kernel scratch",
                               (long long)bytes);
        cpu->scratch_bytes = bytes;
    }
    *out = cpu->scratch;
    return DTRAIN_OK;
}

static void dtrain__cpu_destroy(dtrain_device *device)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const dtrain_allocator allocator = cpu->allocator;
    dtrain__pool_destroy(cpu->pool);
    dtrain__aligned_free(&allocator, cpu->scratch, cpu->scratch_bytes);
    dtrain__free(&allocator, cpu, 1, sizeof *cpu);
}

static dtrain_result dtrain__cpu_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    const int threads = desc->thread_count ? (int)desc->thread_count : 1;
    const dtrain_allocator allocator = dtrain__resolve_allocator(&desc->allocator);
    if (threads < 1 || threads > 1024)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "thread_count is %u, expected 1 to 1024",
                           (unsigned)desc->thread_count);
    if (desc->math > DTRAIN_MATH_FP32)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the CPU device has no tensor cores: math is %u, expected %u (fp32)",
                           (unsigned)desc->math, (unsigned)DTRAIN_MATH_FP32);
    dtrain__cpu *cpu = (dtrain__cpu *)dtrain__alloc(&allocator, 1, sizeof *cpu, "a CPU device");
    if (!cpu) return DTRAIN_ERROR_MEMORY;
    cpu->allocator = allocator;
    cpu->thread_count = threads;
    cpu->kernels = dtrain__kernels_select();
    cpu->isa = cpu->kernels->gemm;
    cpu->pairs = dtrain__pairs_select();
    if (threads > 1) {
        const int error =
            dtrain__pool_create(&cpu->pool, &allocator, threads, desc->oversubscribed);
        if (error) {
            dtrain__free(&allocator, cpu, 1, sizeof *cpu);
            return dtrain_fail(error == ENOMEM ? DTRAIN_ERROR_MEMORY : DTRAIN_ERROR_SYSTEM,
                               "could not start %d compute threads: %s", threads, strerror(error));
        }
    }
    device->state = cpu;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_synchronize(dtrain_device *device)
{
    (void)device;
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    *memory = NULL;
    DTRAIN__TRY(dtrain_device_account(device, &device->allocated_bytes, bytes));
    *memory = dtrain__aligned_alloc(&cpu->allocator, bytes);
    if (*memory) return DTRAIN_OK;
    device->allocated_bytes -= bytes;
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "no memory for %llu bytes on the CPU device, which holds %llu already",
                       (unsigned long long)bytes, (unsigned long long)device->allocated_bytes);
}

static void dtrain__cpu_free(dtrain_device *device, void *memory, size_t bytes)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    if (!memory) return;
    dtrain__aligned_free(&cpu->allocator, memory, bytes);
    device->allocated_bytes -= bytes;
}

static dtrain_result dtrain__cpu_copy(dtrain_device *device, void *to, const void *from,
                                      size_t bytes, dtrain_copy_kind kind)
{
    (void)device;
    (void)kind;
    if (bytes) memmove(to, from, bytes);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to,
                                                     const void *from, size_t bytes,
                                                     dtrain_copy_kind kind, dtrain_stream *stream)
{
    (void)stream;
    return device->ops->copy(device, to, from, bytes, kind);
}

static dtrain_result dtrain__cpu_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    if (bytes) memset(memory, 0, bytes);
    return DTRAIN_OK;
}

/* Like alloc, but not counted. */
static dtrain_result dtrain__cpu_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = dtrain__aligned_alloc(&((dtrain__cpu *)device->state)->allocator, bytes);
    return *memory ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes", bytes);
}

static void dtrain__cpu_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    dtrain__aligned_free(&((dtrain__cpu *)device->state)->allocator, memory, bytes);
}

static dtrain_result dtrain__cpu_query(dtrain_device *device, dtrain_device_info *info)
{
    const dtrain__cpu *cpu = (const dtrain__cpu *)device->state;
    const long page = sysconf(_SC_PAGESIZE);
    const long pages = sysconf(_SC_PHYS_PAGES), free_pages = sysconf(_SC_AVPHYS_PAGES);
#ifdef DTRAIN_USE_CBLAS
    const char *name = "cblas";
#else
    const char *name = cpu->kernels->name;
#endif
    snprintf(info->name, sizeof info->name, "CPU (%s)", name);
    snprintf(info->kernels, sizeof info->kernels, "%s", name);
    snprintf(info->bf16_kernels, sizeof info->bf16_kernels, "%s",
             cpu->pairs ? cpu->pairs->name : name);
    info->count = 1;
    info->memory_bytes = pages > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    info->free_bytes = free_pages > 0 ? (uint64_t)free_pages * (uint64_t)page : 0;
    return DTRAIN_OK;
}

#if !DTRAIN__MODELS
#define DTRAIN__CPU_LAYER(op)                                                                 \
    DTRAIN__PRIVATE dtrain_result dtrain__cpu_##op(dtrain_device *device,                     \
                                                   const dtrain_##op##_args *args)            \
    {                                                                                         \
        (void)args;                                                                           \
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,                                          \
                           "%s device: the kernel " #op " belongs to models, which this "     \
                           "program leaves out: compile dtrain.h without DTRAIN_OMIT_MODELS " \
                           "and DTRAIN_CORE",                                                 \
                           device->ops->name);                                                \
    }
#define DTRAIN__CPU_BASE(op)
DTRAIN__KERNEL_LIST(DTRAIN__CPU_BASE, DTRAIN__CPU_LAYER)
#endif

/* Streams, events and pinned memory: all work is done when a call returns. */
DTRAIN__PRIVATE const dtrain_device_ops *dtrain__cpu_device_ops(void)
{
#define DTRAIN__CPU_ENTRY(op) dtrain__cpu_##op,
    static const dtrain_device_ops ops = DTRAIN__HOST_TABLE(
        cpu, true, dtrain__cpu_query, dtrain__cpu_host_free, NULL, DTRAIN__CPU_ENTRY);
#undef DTRAIN__CPU_ENTRY
    return &ops;
}

/* ---- Launching --------------------------------------------------------------------------------*/

static void dtrain__job_task(void *ctx, int index, int count)
{
    dtrain__job *job = (dtrain__job *)ctx;
    if (job->dynamic) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
            if (item >= job->total) return;
            job->range(job, item, item + 1, index);
        }
    }
    const int64_t units = (job->total + job->unit - 1) / job->unit;
    const int64_t begin = units * index / count * job->unit;
    const int64_t end = units * (index + 1) / count * job->unit;
    if (begin < job->total) job->range(job, begin, end < job->total ? end : job->total, index);
}

DTRAIN__PRIVATE dtrain__job dtrain__job_make(const void *args, int64_t total, int64_t unit,
                                             dtrain_dtype dtype)
{
    dtrain__job job;
    memset(&job, 0, sizeof job);
    job.args = args;
    job.dtype = dtype;
    job.total = total;
    job.unit = unit;
    return job;
}

/* Run a kernel; `elements` is the work's size: a small job stays on the calling thread. */
DTRAIN__PRIVATE dtrain_result dtrain__job_run(dtrain__cpu *cpu, dtrain__job *job,
                                              dtrain__range_fn range, int64_t elements)
{
    if (job->dtype > DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "activations of type %s: expected f32, bf16 or f16",
                           dtrain_dtype_name(job->dtype));
    job->range = range;
    dtrain__parallel(elements > DTRAIN__SMALL ? cpu->pool : NULL, dtrain__job_task, job);
    return DTRAIN_OK;
}
