/* dtrain.h: distributed deep-learning training for C. Version 0.1.0, MIT license (file LICENSE).

   Do this in ONE C or C++ file, before any other include:

       #define DTRAIN_IMPLEMENTATION
       #include "dtrain.h"

   and include dtrain.h without the define wherever else it is needed. Build lines:

       cc  -O2 train.c -lm -lpthread                       built-in kernels, nothing else needed
       cc  -O2 -DDTRAIN_USE_CBLAS train.c -lopenblas -lm -lpthread        GEMM from a BLAS
       c++ -O2 -std=c++17 train.cpp -lpthread              the same file in a C++ program
       nvcc -O3 -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt        with NVIDIA GPUs

   Run lines: dtrain_launch forks the ranks, or joins those that a launcher has started:

       ./a.out
       torchrun --no_python --nproc_per_node 4 ./a.out        mpirun -n 4 ./a.out
       srun -n 4 ./a.out          RANK=0 WORLD_SIZE=4 MASTER_ADDR=node0 ./a.out, and so on

   Kernels for AVX-512, AVX2 and plain vectors are all compiled and the best is chosen at run time:
   -march=native is not needed. Linux, gcc 8 or clang 10 or newer.

   ------------------------------------------------------------------------------------------------
   [M1] Contents: API section [S08] has its implementation in [S28] = S08 + 20.

   manual                          API                                implementation
   [M0] recipe, build lines        [S01] results, version             [S20] platform
   [M1] contents                   [S02] logging, allocator           [S21] results, version
   [M2] a complete program         [S03] data types, random numbers   [S22] logging, allocator
   [M3] glossary, with drawings    [S04] device                       [S23] data types, random
   [M4] configuration              [S05] world, launch                [S24] device
   [M5] promises                   [S06] communicators                [S25] world, launch
   [M6] limits                     [S07] parameters, units, buckets   [S26] communicators
                                   [S08] strategies                   [S27] parameters, buckets
                                   [S09] memory                       [S28] strategies
                                   [S11] tape and tensors             [S29] sharded parameters
                                   [S12] operations                   [S31] tape and tensors
                                   [S14] loss scaling, clipping       [S32] operations
                                   [S15] optimizers, schedules        [S34] loss scaling, clipping
                                   [S16] data, samplers               [S35] optimizers, schedules
                                   [S17] trainer                      [S36] data, samplers
                                   [S19] metrics                      [S37] trainer
                                                                      [S39] metrics

   One step of training, in the order of the sections:

       batch [S16] -> tape forward [S11, S12], gather, release [S08] -> loss
             -> tape backward, gather, release, ready [S08] -> bucket [S07] -> reduce [S06]
             -> finish [S08] -> norm, unscale, clip [S14] -> optimizer on shards [S15]
             -> publish [S08] -> record [S17, S19]

   ------------------------------------------------------------------------------------------------
   [M2] A complete program: a model with its own arrays and its own backward, on two ranks.

       #define DTRAIN_IMPLEMENTATION
       #include "dtrain.h"

       static int train(dtrain_world *world, void *user)
       {
           float w = 0, w_grad = 0, x = (float)dtrain_world_rank(world) + 1; // its own data
           dtrain_param param = {.name = "w", .value = &w, .grad = &w_grad, .count = 1};
           dtrain_strategy *ddp;
           if (dtrain_strategy_create(world, &param, 1, NULL, &ddp) != DTRAIN_OK) return 1;
           for (int step = 0; step < 50; step++) {
               w_grad = 2 * (w * x - 3 * x) * x;                         // your backward
               if (dtrain_strategy_ready(ddp, 0) != DTRAIN_OK) return 1; // communication starts
               if (dtrain_strategy_finish(ddp) != DTRAIN_OK) return 1;   // mean over ranks
               w -= 0.1f * w_grad;                                       // your optimizer
           }
           if (dtrain_world_rank(world) == 0) printf("w = %.3f, expected 3\n", w);
           dtrain_strategy_destroy(ddp);
           return (void)user, 0;
       }

       int main(void)
       {
           dtrain_launch_desc desc = {.rank_count = 2};
           if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
           fprintf(stderr, "%s\n", dtrain_last_error());
           return 1;
       }

   With the tape the model is its forward function and nothing else: see examples/mlp.c and
   examples/train_gpt.c.

   ------------------------------------------------------------------------------------------------
   [M3] Glossary

   rank         one of the processes (or threads) that train together, numbered from 0.
   world        all ranks of a run; world size = how many.
   collective   a call that every rank of a communicator makes: all-reduce, barrier, ...
   DDP          distributed data parallel: every rank has the whole model and a part of the batch.
   shard        the part of parameters, gradients or optimizer state that one rank keeps.
   ZeRO, FSDP   strategies that shard: optimizer state (ZeRO-1), gradients too (ZeRO-2), parameters
                too (ZeRO-3, fully sharded data parallel).
   gather       to bring a unit's parameters together on every rank; release lets go of them.
   publish      to bring updated shards to where the next forward pass reads them.
   parameter    a named tensor of the model; its gradient has the same shape.
   unit         a group of parameters used together, a transformer block say: the grain in which
                sharded strategies gather and free parameters.
   bucket       a run of gradients, laid end to end, that is reduced by one collective.
   ready        a gradient to which this backward adds nothing more.
   micro-batch  the samples of one forward and backward; a step may accumulate several.
   tape         the record of the forward pass that backward walks in reverse.
   arena        the memory of a forward pass, laid out the same way every step.
   autocast     matrix products and attention in bf16 or fp16; norms, losses, weights stay fp32.
   loss scaling a factor on the loss that keeps fp16 gradients from vanishing; see [S14].
   checkpointing (of activations)   to drop a unit's activations and compute them again in backward.

   Two ranks, two buckets; time runs to the right. Backward makes the last parameters' gradients
   first, so their all-reduce runs while earlier layers still compute. Buckets are launched in this
   one order on every rank, whatever the order in which gradients become ready:

       rank 0   forward | backward p6 | p5 p4      | p3 .. p0      | finish | optimizer
       rank 1   forward  | backward p6 | p5 p4      | p3 .. p0     | finish | optimizer
       comm                              [ p6 ]      [ p5 p4 ] ...   [ p3 .. p0 ]

   A bucket in memory, each gradient starting on a cache line. A rank owns one slice of every
   bucket: it sums this slice over all ranks, in rank order, and writes the mean to all of them:

       rank 0's bucket  | p5 .......... pad | p4 ........ pad |
                        |<--- slice 0 --->|<--- slice 1 --->|      rank r reduces slice r
       rank 1's bucket  | p5 .......... pad | p4 ........ pad |

   A sharded unit: each rank keeps a slice; gather lays the slices end to end in one of two slots,
   reduce-scatter brings each rank the mean of its slice, which its optimizer updates:

       kept by rank      0: | slice 0 |    1: | slice 1 |    2: | slice 2 |
       in a slot, all       | weight ........ pad | bias . pad | norm . pad |  for one unit's time

   ------------------------------------------------------------------------------------------------
   [M4] Configuration

   Compile time, in the file with DTRAIN_IMPLEMENTATION (none changes a public struct or prototype):
       DTRAIN_STATIC       all functions are static: a private copy
       DTRAIN_API          the linkage of public functions, if you want your own
       DTRAIN_USE_CBLAS    fp32 GEMM through cblas_sgemm
       DTRAIN_USE_CUDA     dtrain_device_ops_by_name knows "cuda"; dtrain_cuda.cu must be linked
                           (and DTRAIN_STATIC is not possible: that file calls dtrain.h)
       DTRAIN_NO_SIMD      plain C loops instead of vector kernels (slow; a reference)

   Run time: the desc structs. In set-up descs zero means the default written beside the field; in
   hyper-parameter descs (strategy, optimizer) start from the *_defaults() function.

   ------------------------------------------------------------------------------------------------
   [M5] Promises (each has a test)

   Same mathematics   N ranks on N shards of a batch give the gradients of one rank on all of it,
                      to rounding.
   Same bits          run after run, for any bucket size, with or without overlap, for any number
                      of threads, with gradients in buckets or copied; and under DDP, ZERO1,
                      SHARD_GRAD_OP, FULL_SHARD and ZERO3 alike (HYBRID_SHARD adds node by node).
                      With clipping, kinds add up the norm in different orders, in double: it is
                      the same float but in rare cases (about one step in 10^8). GPU kernels use no
                      floating atomics; NCCL's sums alone depend on its choice of algorithm.
   Memory             of parameters, gradients and optimizer state follows the table in [S08], and
                      is known before anything is allocated [S09].
   No surprises       never exits, aborts, writes to stdout or installs signal handlers. Every
                      call that can fail returns a dtrain_result and leaves a sentence in
                      dtrain_last_error(). (A forked rank ends by _exit after rank_main.)
   No hangs           every wait has a deadline (timeout_ms). A dead, stuck or disagreeing rank
                      becomes an error with its name on every other rank; a failed communicator
                      stays failed.
   Nothing left       shared memory has no name; after success, failure or kill -9 no process,
                      segment, file descriptor or thread remains.
   Steady state       after the first step nothing is allocated and all addresses repeat.
   Exact averages     sums are taken in fp32 in rank order and multiplied once by 1/N.
   Finite checks      look at exponent bits: -ffast-math does not disable them.

   Threads: a world and everything made from it belong to the thread of its rank.
   dtrain_last_error is per thread. Ownership: who creates destroys; destroy functions accept NULL.

   ------------------------------------------------------------------------------------------------
   [M6] Limits

   Ranks are processes or threads started by dtrain_launch, or processes started by another
   launcher [S05]. The local communicator joins ranks of one host; ranks on several hosts need a
   communicator backend that crosses them (dtrain_nccl.h).

   Parameters, gradients and optimizer state are fp32 where they are kept; activations are fp32 or,
   under autocast, bf16 or fp16; gathered parameters and gradients may travel as either. At most
   DTRAIN_MAX_RANKS ranks. Asynchronous collectives of the local communicator advance inside dtrain
   calls, not in between.
   dtrain_cuda.cu and dtrain_nccl.h have been emulated and compiled, and not yet run on a GPU.
   The file must keep its name: it includes itself to compile its kernels for several
   instruction sets. Peers are trusted: a rank that writes into another's memory is not defended
   against.*/

#ifndef DTRAIN_H
#define DTRAIN_H

/* The implementation needs POSIX and Linux names, and libc fixes what it shows at the first system
 * include: so dtrain.h comes first in the file that defines DTRAIN_IMPLEMENTATION. */
#if defined(DTRAIN_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define DTRAIN_VERSION_MAJOR 0
#define DTRAIN_VERSION_MINOR 1
#define DTRAIN_VERSION_PATCH 0
#define DTRAIN_VERSION_STRING "0.1.0"

/* Linkage of every public function. Define DTRAIN_STATIC for a private copy in one file. */
#ifndef DTRAIN_API
#ifdef DTRAIN_STATIC
#define DTRAIN_API static
#else
#define DTRAIN_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================
 * [S01] Results, version
 * ==============================================================================================*/

/* One list makes the enum, the names and the sentences. */
#define DTRAIN_RESULT_LIST(X)                                                            \
    X(DTRAIN_OK, 0, "success")                                                           \
    X(DTRAIN_ERROR_ARGUMENT, -1, "an argument has a value the call cannot take")         \
    X(DTRAIN_ERROR_USAGE, -2, "the call is not allowed in this state")                   \
    X(DTRAIN_ERROR_UNSUPPORTED, -3, "this build or backend cannot do what was asked")    \
    X(DTRAIN_ERROR_MEMORY, -10, "memory could not be had")                               \
    X(DTRAIN_ERROR_SYSTEM, -11, "the operating system refused")                          \
    X(DTRAIN_ERROR_FILE, -12, "a file could not be read or written")                     \
    X(DTRAIN_ERROR_DATA, -13, "data does not have the expected form")                    \
    X(DTRAIN_ERROR_MISMATCH, -20, "ranks disagree about what they are doing")            \
    X(DTRAIN_ERROR_PEER, -21, "another rank died, failed or left")                       \
    X(DTRAIN_ERROR_TIMEOUT, -22, "a deadline passed")                                    \
    X(DTRAIN_ERROR_RANK_FAILED, -23, "a rank started by dtrain_launch did not end well") \
    X(DTRAIN_ERROR_NUMERIC, -30, "a number that must be finite is not")                  \
    X(DTRAIN_ERROR_INTERNAL, -40, "dtrain broke one of its own rules")

typedef enum dtrain_result {
#define DTRAIN_RESULT_ENUM(name, value, text) name = value,
    DTRAIN_RESULT_LIST(DTRAIN_RESULT_ENUM)
#undef DTRAIN_RESULT_ENUM
        DTRAIN_RESULT_FORCE_INT = 0x7fffffff
} dtrain_result;

/* "DTRAIN_ERROR_PEER" and its one-line meaning; both static strings, never NULL. */
DTRAIN_API const char *dtrain_result_name(dtrain_result result);
DTRAIN_API const char *dtrain_result_text(dtrain_result result);

/* The sentence left by the last failed call on this thread: which rank, which call, what was
 * expected, what was found, what to try. Valid until the next failing call on the same thread;
 * "" when nothing has failed yet. Like errno, it is not cleared by success. */
DTRAIN_API const char *dtrain_last_error(void);

/* For backends and callbacks: leaves this sentence for dtrain_last_error() and returns code. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
DTRAIN_API dtrain_result
dtrain_fail(dtrain_result code, const char *format, ...);

/* Version the implementation was compiled from, e.g. "0.1.0". */
DTRAIN_API const char *dtrain_version(void);

/* ================================================================================================
 * [S02] Logging, allocator
 * ==============================================================================================*/

typedef enum dtrain_log_level {
    DTRAIN_LOG_DEFAULT = 0, /* = DTRAIN_LOG_INFO */
    DTRAIN_LOG_ERROR = 1,
    DTRAIN_LOG_WARNING = 2,
    DTRAIN_LOG_INFO = 3,
    DTRAIN_LOG_DEBUG = 4
} dtrain_log_level;

/* Receives every message at or below the level in force. `text` is one line without '\n', valid
 * during the call. Called on the thread that has something to say. Without a callback, warnings
 * and errors of every rank and infos of rank 0 go to stderr. */
typedef void (*dtrain_log_fn)(void *user, dtrain_log_level level, int rank, const char *text);

/* Run-time allocator. All fields zero means malloc and free. `alloc` returns memory aligned for any
 * type or NULL; `free` receives the size that was asked for. Both may be called from several
 * threads. dtrain allocates at creation time only, never inside a training step. */
typedef struct dtrain_allocator {
    void *(*alloc)(void *user, size_t bytes);
    void (*free)(void *user, void *memory, size_t bytes);
    void *user;
} dtrain_allocator;

/* ================================================================================================
 * [S03] Data types, random numbers
 * ==============================================================================================*/

typedef enum dtrain_dtype {
    DTRAIN_DTYPE_NONE = 0,
    DTRAIN_F32 = 1,
    DTRAIN_BF16 = 2, /* the upper half of an fp32 */
    DTRAIN_F16 = 3,  /* IEEE 754 binary16 */
    DTRAIN_I32 = 4,
    DTRAIN_I64 = 5
} dtrain_dtype;

/* Bytes of one element, 0 for an unknown type; and its name ("f32"), "?" for an unknown type. */
DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype);
DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype);

/* Correctly rounded (nearest, ties to even) conversions. NaN stays NaN and keeps its sign, the
 * overflow of a finite number gives infinity, denormals are exact. */
DTRAIN_API uint16_t dtrain_f32_to_bf16(float value);
DTRAIN_API float dtrain_bf16_to_f32(uint16_t bits);
DTRAIN_API uint16_t dtrain_f32_to_f16(float value);
DTRAIN_API float dtrain_f16_to_f32(uint16_t bits);

/* True unless value is NaN or infinite; looks at exponent bits, so -ffast-math cannot remove it. */
DTRAIN_API bool dtrain_is_finite(float value);

/* Counter-based random numbers (Philox4x32-10; Salmon et al., "Parallel Random Numbers: As Easy as
 * 1, 2, 3", SC 2011): element `index` of stream (seed, stream) is a pure function of the three, so
 * any rank can draw any element of a tensor and gets the same bits. uniform: [0, 1); normal: N(0,
 * 1), |z| <= 6.77, from arithmetic and sqrt alone, so that the bits do not depend on a libm. */
DTRAIN_API void dtrain_philox(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t out[4]);
DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* ================================================================================================
 * [S04] Device
 *
 * A device is memory plus kernels. The CPU device below is built in and is the oracle for every
 * other one; dtrain_cuda.cu exports another table of the same form. Nothing above this section
 * knows which device it runs on.
 *
 * Order of calls: create once per rank; alloc, copy and kernels in any order; destroy. Kernels are
 * queued in order on the device's compute stream; synchronize waits for them and reports errors
 * that were not known at launch (a token outside the vocabulary, a lost device). On the CPU each
 * kernel is finished, and has reported, when it returns.
 *
 * All matrices are row-major; "rows" of activations are tokens. Activations are F32, BF16 or F16 as
 * a dtype in the arguments says (0 = F32); arithmetic inside a kernel is fp32. Weights, statistics
 * and losses are fp32. Gradients of parameters are always fp32, gradients of activations have the
 * dtype of the activation, and `accumulate` says whether a kernel adds to what is there (true) or
 * overwrites it (false: the old contents are not read and may be anything).
 * ==============================================================================================*/

typedef struct dtrain_device dtrain_device;
typedef struct dtrain_stream dtrain_stream; /* NULL = the compute stream */
typedef struct dtrain_event dtrain_event;
typedef struct dtrain_graph dtrain_graph;

/* Numbers that change from step to step, in device memory: kernels that are given their address
 * read them when they run, which is what makes a captured graph of a step replayable. */
typedef struct dtrain_step_scalars {
    uint64_t seed; /* added to the seed of dropout and of stochastic rounding */
    float lr, correction1, correction2, grad_scale;
    uint32_t skip;     /* non-zero: optimizers change nothing */
    uint32_t reserved; /* 0 */
} dtrain_step_scalars;

typedef enum dtrain_activation {
    DTRAIN_ACT_NONE = 0,
    DTRAIN_ACT_RELU = 1,
    DTRAIN_ACT_GELU = 2 /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the form GPT-2 uses */
} dtrain_activation;

#define DTRAIN_GEMM_TRANS_A 1u
#define DTRAIN_GEMM_TRANS_B 2u
/* C = (alpha op(A) op(B) + beta C) * activation'(aux): aux (m,n) is read, bias is not allowed. */
#define DTRAIN_GEMM_ACT_BACKWARD 4u
/* bias_grad (n) = column sums of C, after ACT_BACKWARD. Otherwise bias_grad (m) = row sums of
 * op(A): with A = d_y transposed that is the bias gradient beside the weight gradient. */
#define DTRAIN_GEMM_BIAS_GRAD_C 8u

/* C (m,n) = act(alpha op(A) (m,k) op(B) (k,n) + beta C + bias (n)), accumulated in fp32.
 * lda, ldb, ldc are elements between stored rows. beta == 0 does not read C. aux, if not NULL,
 * receives the value before the activation (dtype and ld of C): the backward pass needs it. */
typedef struct dtrain_gemm_args {
    uint32_t flags, activation;
    int64_t m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    dtrain_dtype a_dtype, b_dtype, c_dtype; /* each F32, BF16 or F16 */
    const float *bias;                      /* (n) or NULL */
    void *aux;                              /* (m,n) or NULL */
    float *bias_grad;                       /* see the flags; NULL: not wanted */
    bool accumulate_bias_grad;
} dtrain_gemm_args;

/* d_in = d_out * act'(x), where x is what the GEMM left in aux; and d_bias (n) = column sums of
 * d_in. d_in may be d_out; d_bias may be NULL; with DTRAIN_ACT_NONE x is not read and only d_bias
 * is made when d_in == d_out. RELU looks at x > 0 only, so x may be the layer's output. */
typedef struct dtrain_activation_backward_args {
    uint32_t activation;
    bool accumulate; /* of d_bias */
    int64_t rows, n;
    const void *x, *d_out; /* (rows,n) */
    void *d_in;            /* (rows,n) */
    float *d_bias;         /* (n) or NULL */
    dtrain_dtype dtype;    /* of x, d_out, d_in */
} dtrain_activation_backward_args;

/* s = x + residual (s = x without residual); y = (s - mean) * rstd * weight + bias over the last
 * axis (Ba et al., 2016). bias may be NULL. sum keeps s for backward and for the next residual; it
 * may be x, and is NULL exactly when residual is. */
typedef struct dtrain_layernorm_args {
    int64_t rows, n;
    float epsilon;
    const void *x;              /* (rows,n) */
    const float *weight, *bias; /* (n) */
    void *y;                    /* (rows,n) */
    float *mean, *rstd;         /* (rows) */
    const void *residual;       /* (rows,n) or NULL */
    void *sum;                  /* (rows,n) or NULL */
    dtrain_dtype x_dtype;       /* of x and sum */
    dtrain_dtype y_dtype;       /* of y and residual */
} dtrain_layernorm_args;

/* x is what was normalised: s above. d_residual receives the final d_x once more, as y_dtype. */
typedef struct dtrain_layernorm_backward_args {
    int64_t rows, n;
    bool accumulate_params, accumulate_x;
    const void *x;
    const float *weight, *mean, *rstd;
    const void *d_y;
    void *d_x;                /* (rows,n) or NULL: not wanted */
    float *d_weight, *d_bias; /* (n) or NULL: not wanted */
    void *d_residual;         /* (rows,n) or NULL; needs d_x */
    dtrain_dtype x_dtype;     /* of x and d_x */
    dtrain_dtype y_dtype;     /* of d_y and d_residual */
} dtrain_layernorm_backward_args;

/* y[row] = wte[token[row]] + wpe[row % sequence]; wpe may be NULL. A token outside [0, vocab) is
 * an error that names it; a device that learns of it late uses token 0 meanwhile. */
typedef struct dtrain_embedding_args {
    int64_t rows, sequence, n, vocab;
    const int32_t *tokens;  /* (rows) */
    const float *wte, *wpe; /* (vocab,n), (sequence or more,n) */
    void *y;                /* (rows,n) */
    dtrain_dtype dtype;     /* of y */
} dtrain_embedding_args;

/* Adds into d_wte and d_wpe: the caller zeroes them before the first use in a step. Either may be
 * NULL. Sums run in row order, so the result depends neither on the number of threads nor on
 * timing. */
typedef struct dtrain_embedding_backward_args {
    int64_t rows, sequence, n, vocab;
    const int32_t *tokens;
    const void *d_y;
    float *d_wte, *d_wpe;
    dtrain_dtype dtype; /* of d_y */
} dtrain_embedding_backward_args;

/* Multi-head attention without a T x T matrix: blocks of keys, online softmax (Milakov and
 * Gimelshein 2018; Dao et al., FlashAttention, 2022). qkv (batch*sequence, 3*n) holds q, k, v of
 * all heads side by side; head h owns columns [h*n/heads, (h+1)*n/heads) of each. Scores are
 * scaled by 1/sqrt(n/heads). lse (batch, heads, sequence) keeps log-sum-exp of each row. */
typedef struct dtrain_attention_args {
    int64_t batch, sequence, heads, n;
    bool causal;
    const void *qkv;
    void *y;            /* (batch*sequence, n) */
    float *lse;         /* (batch, heads, sequence) */
    dtrain_dtype dtype; /* of qkv and y */
} dtrain_attention_args;

typedef struct dtrain_attention_backward_args {
    int64_t batch, sequence, heads, n;
    bool causal;
    const void *qkv, *y;
    const float *lse;
    const void *d_y;
    void *d_qkv;        /* (batch*sequence, 3*n), overwritten */
    dtrain_dtype dtype; /* of qkv, y, d_y, d_qkv */
} dtrain_attention_backward_args;

/* loss[row] = log(sum(exp(logits[row]))) - logits[row][target[row]]; lse[row] kept for backward.
 * A target of -1 is ignored: loss and lse 0, no gradient. Other targets outside [0, n) are an
 * error; a device that learns of it late ignores the row meanwhile. With d_logits (it may be
 * logits) the gradient times scale is written in the same pass: logits are read once. */
typedef struct dtrain_cross_entropy_args {
    int64_t rows, n;
    const void *logits;     /* (rows,n) */
    const int32_t *targets; /* (rows) */
    float *loss, *lse;      /* (rows), (rows) */
    void *d_logits;         /* (rows,n) or NULL */
    float scale;
    dtrain_dtype dtype; /* of logits and d_logits */
} dtrain_cross_entropy_args;

/* d_logits = (softmax(logits) - onehot(target)) * scale * upstream[0]; d_logits may be logits
 * itself, which is how logits are stored once. upstream NULL = 1. */
typedef struct dtrain_cross_entropy_backward_args {
    int64_t rows, n;
    float scale;
    const void *logits;
    const int32_t *targets;
    const float *lse;
    void *d_logits;
    const float *upstream; /* (1) device memory, or NULL */
    dtrain_dtype dtype;    /* of logits and d_logits */
} dtrain_cross_entropy_backward_args;

/* y = a * x + b * y, or y = a * x when accumulate is false. x may be y. With broadcast x is one
 * element, used for all; and x NULL is the constant 1. */
typedef struct dtrain_axpby_args {
    int64_t count;
    bool accumulate;
    float a, b;
    const void *x;
    void *y;
    bool broadcast;
    dtrain_dtype dtype; /* of x and y */
} dtrain_axpby_args;

/* out = x + y elementwise; out may be either of them if it has its dtype. */
typedef struct dtrain_add_args {
    int64_t count;
    const void *x, *y;
    void *out;
    dtrain_dtype x_dtype; /* of x and out */
    dtrain_dtype y_dtype;
} dtrain_add_args;

/* y[i] = keep(i) ? x[i] / (1 - probability) : 0, keep from Philox (seed, stream, i): running the
 * same kernel on the gradient is the backward pass, so no mask is stored. y may be x. */
typedef struct dtrain_dropout_args {
    int64_t count;
    float probability;
    bool accumulate;
    uint64_t seed, stream;
    const void *x;
    void *y;
    const dtrain_step_scalars *scalars; /* device memory, or NULL: adds its seed */
    dtrain_dtype dtype;                 /* of x and y */
} dtrain_dropout_args;

/* total = scale * sum of x, or of x*x when squares; accumulated in double over fixed chunks in a
 * fixed order, so the bits do not depend on timing or threads. With accumulate it is added to
 * total[0]; out[0], if wanted, is total rounded to fp32. */
typedef struct dtrain_sum_args {
    int64_t count;
    bool squares, accumulate;
    double scale;
    const void *x;
    double *total;      /* (1) device memory, or NULL (then without accumulate) */
    float *out;         /* (1) device memory, or NULL */
    dtrain_dtype dtype; /* of x */
} dtrain_sum_args;

/* What becomes of a sum of squares, without the host: norm = sqrt(sum_squares[0]) * grad_scale;
 * scalars->grad_scale is multiplied by max_norm / (norm + 1e-6) where below 1 (max_norm <= 0:
 * never), and scalars->skip = 1 when the norm is not finite. */
typedef struct dtrain_clip_args {
    const double *sum_squares; /* (1) device memory */
    float max_norm;
    dtrain_step_scalars *scalars; /* device memory */
    float *norm;                  /* (1) device memory */
} dtrain_clip_args;

/* found[0] |= 1 when an element is NaN or infinite, by its exponent bits. */
typedef struct dtrain_finite_args {
    int64_t count;
    const void *x;
    dtrain_dtype dtype;
    uint32_t *found; /* (1) device memory */
} dtrain_finite_args;

typedef struct dtrain_convert_args {
    int64_t count;
    const void *x;
    void *y;
    dtrain_dtype x_dtype, y_dtype; /* F32, BF16, F16 */
} dtrain_convert_args;

/* One piece of what an optimizer updates. value is the fp32 master copy; low, if not NULL, receives
 * it in low_dtype: what the next forward pass reads. */
typedef struct dtrain_optimizer_tensor {
    int64_t count;
    float weight_decay;
    dtrain_dtype low_dtype; /* BF16 or F16, when low is given */
    float *value;
    const float *grad;
    float *m, *v; /* AdamW's moments; SGD: m is the momentum buffer, NULL when momentum is 0 */
    void *low;
} dtrain_optimizer_tensor;

/* AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), one fused pass over
 * all tensors:
 *   g = grad * grad_scale; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g
 *   value = value (1 - lr*weight_decay) - lr (m / correction1) / (sqrt(v / correction2) + epsilon)
 * with correction_i = 1 - b_i^step given by the caller. scalars, if given, replace lr, the
 * corrections and grad_scale, and can skip the step. stochastic_rounding rounds `low` up with the
 * probability of the discarded fraction, from Philox (seed, tensor, element); else to nearest. */
typedef struct dtrain_adamw_args {
    size_t tensor_count;
    const dtrain_optimizer_tensor *tensors; /* host memory */
    float lr, beta1, beta2, epsilon, correction1, correction2, grad_scale;
    bool stochastic_rounding;
    uint64_t seed;
    const dtrain_step_scalars *scalars; /* device memory, or NULL */
} dtrain_adamw_args;

/* SGD as PyTorch defines it, except that the decay is decoupled:
 *   g = grad * grad_scale; buf = momentum*buf + g (buf = g on the first step)
 *   value = value (1 - lr*weight_decay) - lr * (nesterov ? g + momentum*buf : buf) */
typedef struct dtrain_sgd_args {
    size_t tensor_count;
    const dtrain_optimizer_tensor *tensors; /* host memory */
    float lr, momentum, grad_scale;
    bool nesterov, first;
    bool stochastic_rounding;
    uint64_t seed;
    const dtrain_step_scalars *scalars; /* device memory, or NULL */
} dtrain_sgd_args;

/* The k elements of largest magnitude of x, or of residual + x with error feedback (Stich et al.,
 * "Sparsified SGD with Memory", 2018): residual += x; indices (k) ascending and values (k) are
 * taken out of it, that is, become zero there. Of equal magnitudes at the border the lowest indices
 * are taken, NaN counts as larger than everything: the result is a function of the input alone.
 * count < 2^31, 1 <= k <= count. */
typedef struct dtrain_topk_args {
    int64_t count, k;
    const float *x;   /* (count) */
    float *residual;  /* (count) or NULL */
    float *values;    /* (k) */
    int32_t *indices; /* (k) */
} dtrain_topk_args;

/* out[indices[i]] += scale * values[i]; indices of one call differ. One outside [0, count) is an
 * error. */
typedef struct dtrain_scatter_add_args {
    int64_t count, k;
    float scale;
    const float *values;    /* (k) */
    const int32_t *indices; /* (k) */
    float *out;             /* (count) */
} dtrain_scatter_add_args;

typedef enum dtrain_copy_kind {
    DTRAIN_COPY_HOST_TO_DEVICE = 1,
    DTRAIN_COPY_DEVICE_TO_HOST = 2, /* waits for the compute stream */
    DTRAIN_COPY_DEVICE_TO_DEVICE = 3
} dtrain_copy_kind;

/* What GEMM and attention may do to fp32 operands; those in BF16 or F16 are not affected. */
typedef enum dtrain_math {
    DTRAIN_MATH_DEFAULT = 0, /* = DTRAIN_MATH_FP32 */
    DTRAIN_MATH_FP32 = 1,
    DTRAIN_MATH_TF32 = 2, /* tensor cores with 10 bits of mantissa; CPU: an error */
    DTRAIN_MATH_BF16 = 3  /* tensor cores with 7 bits of mantissa; CPU: an error */
} dtrain_math;

typedef struct dtrain_device_desc {
    uint32_t thread_count; /* CPU: compute threads of this rank; 0 = 1 */
    uint32_t device_index; /* GPU: which one, modulo how many there are */
    uint32_t math;         /* dtrain_math */
    bool oversubscribed;   /* more threads than cores here: waiting threads must not spin */
    bool tune;             /* GPU: time the algorithms of a GEMM at its first use. Some per cent
                              faster; the bits may then differ from run to run */
    uint64_t memory_limit; /* bytes; what would go beyond is DTRAIN_ERROR_MEMORY. 0 = none */
    dtrain_allocator allocator;
} dtrain_device_desc;

typedef struct dtrain_device_info {
    char name[96];         /* "NVIDIA H200" */
    char id[48];           /* the same for two ranks exactly when they sit on one device */
    uint32_t index, count; /* which, of how many in this machine */
    uint32_t major, minor; /* compute capability */
    uint64_t memory_bytes, free_bytes;
} dtrain_device_info;

#define DTRAIN_DEVICE_ABI 2u

/* The entries from create to is_device_memory move data and order work; a stream of NULL is the
 * compute stream. Kernels go to the compute stream. */
typedef struct dtrain_device_ops {
    uint32_t abi;     /* DTRAIN_DEVICE_ABI */
    const char *name; /* "cpu", "cuda" */
    bool host_memory; /* true: device pointers can be read by the host */

    dtrain_result (*create)(const dtrain_device_desc *desc, dtrain_device *device);
    void (*destroy)(dtrain_device *device);
    dtrain_result (*query)(dtrain_device *device, dtrain_device_info *info);
    /* Waits for all streams of this device; device->while_waiting is called meanwhile. */
    dtrain_result (*synchronize)(dtrain_device *device);

    /* 64-byte aligned (256 on a GPU), contents undefined. copy from host memory has read it when it
     * returns. */
    dtrain_result (*alloc)(dtrain_device *device, size_t bytes, void **memory);
    void (*free)(dtrain_device *device, void *memory, size_t bytes);
    dtrain_result (*copy)(dtrain_device *device, void *to, const void *from, size_t bytes,
                          dtrain_copy_kind kind);
    dtrain_result (*zero)(dtrain_device *device, void *memory, size_t bytes);

    /* Page-locked host memory, and existing whole pages page-locked: what copy_async, which
     * only queues, reads and writes. */
    dtrain_result (*host_alloc)(dtrain_device *device, size_t bytes, void **memory);
    void (*host_free)(dtrain_device *device, void *memory, size_t bytes);
    dtrain_result (*host_register)(dtrain_device *device, void *memory, size_t bytes);
    void (*host_unregister)(dtrain_device *device, void *memory);
    dtrain_result (*copy_async)(dtrain_device *device, void *to, const void *from, size_t bytes,
                                dtrain_copy_kind kind, dtrain_stream *stream);

    dtrain_result (*stream_create)(dtrain_device *device, bool high_priority, dtrain_stream **out);
    void (*stream_destroy)(dtrain_device *device, dtrain_stream *stream);
    void *(*stream_native)(dtrain_device *device, dtrain_stream *stream); /* cudaStream_t */
    dtrain_result (*event_create)(dtrain_device *device, bool timing, dtrain_event **out);
    void (*event_destroy)(dtrain_device *device, dtrain_event *event);
    dtrain_result (*event_record)(dtrain_device *device, dtrain_event *event,
                                  dtrain_stream *stream);
    dtrain_result (*event_wait)(dtrain_device *device, dtrain_event *event, dtrain_stream *stream);
    dtrain_result (*event_query)(dtrain_device *device, dtrain_event *event, bool *done);
    /* Milliseconds between two events made with timing, both done. */
    dtrain_result (*event_elapsed)(dtrain_device *device, dtrain_event *begin, dtrain_event *end,
                                   float *milliseconds);
    bool (*is_device_memory)(dtrain_device *device, const void *memory);

    /* Between begin and end work on the compute stream, and on streams that wait for its events, is
     * recorded instead of run; launch runs it, any number of times. CPU: UNSUPPORTED. */
    dtrain_result (*graph_begin)(dtrain_device *device);
    dtrain_result (*graph_end)(dtrain_device *device, dtrain_graph **out);
    dtrain_result (*graph_launch)(dtrain_device *device, dtrain_graph *graph);
    void (*graph_destroy)(dtrain_device *device, dtrain_graph *graph);

    dtrain_result (*gemm)(dtrain_device *, const dtrain_gemm_args *);
    dtrain_result (*activation_backward)(dtrain_device *, const dtrain_activation_backward_args *);
    dtrain_result (*layernorm)(dtrain_device *, const dtrain_layernorm_args *);
    dtrain_result (*layernorm_backward)(dtrain_device *, const dtrain_layernorm_backward_args *);
    dtrain_result (*embedding)(dtrain_device *, const dtrain_embedding_args *);
    dtrain_result (*embedding_backward)(dtrain_device *, const dtrain_embedding_backward_args *);
    dtrain_result (*attention)(dtrain_device *, const dtrain_attention_args *);
    dtrain_result (*attention_backward)(dtrain_device *, const dtrain_attention_backward_args *);
    dtrain_result (*cross_entropy)(dtrain_device *, const dtrain_cross_entropy_args *);
    dtrain_result (*cross_entropy_backward)(dtrain_device *,
                                            const dtrain_cross_entropy_backward_args *);
    dtrain_result (*add)(dtrain_device *, const dtrain_add_args *);
    dtrain_result (*axpby)(dtrain_device *, const dtrain_axpby_args *);
    dtrain_result (*dropout)(dtrain_device *, const dtrain_dropout_args *);
    dtrain_result (*sum)(dtrain_device *, const dtrain_sum_args *);
    dtrain_result (*clip)(dtrain_device *, const dtrain_clip_args *);
    dtrain_result (*finite)(dtrain_device *, const dtrain_finite_args *);
    dtrain_result (*convert)(dtrain_device *, const dtrain_convert_args *);
    dtrain_result (*adamw)(dtrain_device *, const dtrain_adamw_args *);
    dtrain_result (*sgd)(dtrain_device *, const dtrain_sgd_args *);
    dtrain_result (*topk)(dtrain_device *, const dtrain_topk_args *);
    dtrain_result (*scatter_add)(dtrain_device *, const dtrain_scatter_add_args *);
} dtrain_device_ops;

struct dtrain_device {
    const dtrain_device_ops *ops;
    void *state;            /* the backend's own */
    size_t allocated_bytes; /* from alloc, not given back */
    size_t comm_bytes;      /* of communicators, beside those */
    size_t peak_bytes;      /* both together, at most so far */
    uint64_t limit_bytes;   /* for both together; 0 = none */
    /* Called again and again while the host waits for the device. A communicator whose kernels wait
     * for other ranks keeps its deadlines here: an error ends the wait. NULL = nothing. */
    dtrain_result (*while_waiting)(void *user);
    void *waiting_user;
};

/* The table of dtrain_cuda.cu: link that file to use it. */
extern const dtrain_device_ops *dtrain_cuda_device_ops(void);

/* The table for a name: "cpu", or "cuda" in a program that is compiled with DTRAIN_USE_CUDA and
 * links dtrain_cuda.cu. Any other is an error that says what to do. */
DTRAIN_API dtrain_result dtrain_device_ops_by_name(const char *name, const dtrain_device_ops **out);

/* The built-in tables. The plan device runs no kernel, copies nothing and hands out addresses
 * without memory: a model that is run on it reports through peak_bytes what it would need. The CPU
 * device's kernel scratch (GEMM packing, attention blocks) is allocated in the first step, less
 * than 2 MiB a thread for usual shapes, and not counted in allocated_bytes. */
DTRAIN_API const dtrain_device_ops *dtrain_cpu_device_ops(void);
DTRAIN_API const dtrain_device_ops *dtrain_plan_device_ops(void);

/* A device of one's own, without a world (tests, tools). ops NULL = CPU. */
DTRAIN_API dtrain_result dtrain_device_create(const dtrain_device_ops *ops,
                                              const dtrain_device_desc *desc, dtrain_device **out);
DTRAIN_API void dtrain_device_destroy(dtrain_device *device);

/* For the authors of devices and communicators. reserve is asked before memory is taken, and says
 * which limit it would break; count is told what was taken: bytes more than before on one of
 * device->allocated_bytes and comm_bytes, which it is given the address of. */
DTRAIN_API dtrain_result dtrain_device_reserve(dtrain_device *device, size_t bytes);
DTRAIN_API void dtrain_device_count(dtrain_device *device, size_t *counter, size_t bytes);

/* What the CPU device runs on: "avx512", "avx2", "generic", "scalar" or "cblas". The second is for
 * products of bf16 with bf16: "amx_bf16" or "avx512_bf16" where the compiler, the processor and the
 * system have them, else the first. */
DTRAIN_API const char *dtrain_cpu_kernel_name(void);
DTRAIN_API const char *dtrain_cpu_bf16_kernel_name(void);

/* ================================================================================================
 * [S05] World, launch
 *
 * A world says which rank this is, of how many. dtrain_launch is the one way in: it starts the
 * local ranks, hands each a world, watches over them and reports how they ended. Started by another
 * launcher as one rank of several, it joins them instead:
 *
 *     launcher        what is read, the first complete family wins
 *     any             DTRAIN_RANK DTRAIN_WORLD_SIZE [DTRAIN_LOCAL_RANK DTRAIN_LOCAL_SIZE]
 *     torchrun, ...   RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE] MASTER_ADDR MASTER_PORT
 *     Open MPI        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *     MPICH           PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
 *     srun            SLURM_PROCID SLURM_STEP_NUM_TASKS ..., where SLURM_STEP_ID is set
 *     Indexed Job     JOB_COMPLETION_INDEX with WORLD_SIZE or DTRAIN_WORLD_SIZE
 *     TrainJob        PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE: started once a node,
 *                     dtrain_launch forks the ranks of this node
 *
 * Ranks meet by TCP at rank 0's host: DTRAIN_MASTER_ADDR, else MASTER_ADDR (PET_MASTER_ADDR), else
 * what the launcher tells about its hosts. The port is DTRAIN_PORT, else DTRAIN_MASTER_PORT, else
 * MASTER_PORT (29500) + 100, because torchrun itself listens at MASTER_PORT. DTRAIN_JOB_KEY, the
 * same on all ranks, keeps others out: it is proved, not sent; the traffic is not encrypted, so the
 * network must be trusted. All this takes at most timeout_ms, and not more than five minutes.
 *
 * On one host, joined ranks share memory as forked ones do. A half or contradictory setting is an
 * error. A launcher that announces one rank is no launcher: dtrain_launch forks as its desc says.
 * ==============================================================================================*/

typedef struct dtrain_world dtrain_world;
typedef struct dtrain_comm dtrain_comm;
struct dtrain_comm_ops; /* [S06] */

typedef enum dtrain_launch_mode {
    DTRAIN_LAUNCH_PROCESSES = 0, /* fork: one process a rank */
    DTRAIN_LAUNCH_THREADS = 1    /* one thread a rank, for tests and race detectors */
} dtrain_launch_mode;

#define DTRAIN_MAX_RANKS 256

/* Zero means default. */
typedef struct dtrain_launch_desc {
    uint32_t rank_count;       /* of the world; 0 = the launcher's number, and without a launcher
                                  default_rank_count; at most DTRAIN_MAX_RANKS */
    uint32_t mode;             /* dtrain_launch_mode */
    uint32_t threads_per_rank; /* compute threads of a rank; 0 = cores / local ranks, at least 1 */
    uint32_t timeout_ms;       /* deadline of every wait for other ranks; 0 = 600000 */
    uint32_t grace_ms;         /* after the first failure the others get this long; 0 = 5000 */
    uint32_t log_level;        /* dtrain_log_level */
    size_t reserve_bytes;      /* shared address space per rank, committed only when touched;
                                    0 = the machine's memory */
    dtrain_log_fn log;         /* NULL = stderr */
    void *log_user;
    dtrain_allocator allocator;             /* zeros = malloc and free */
    const dtrain_device_ops *device_ops;    /* NULL = CPU */
    const struct dtrain_comm_ops *comm_ops; /* of the world's communicator; NULL = local, and with a
                                               GPU local through host memory */
    uint32_t math;                          /* dtrain_math, for the device */
    uint32_t default_rank_count;            /* see rank_count; 0 = 1 */
    bool tune;                              /* for the device: its desc says what it does */
    uint64_t memory_limit; /* bytes of a rank's device, communicator memory included: what would
                              go beyond is DTRAIN_ERROR_MEMORY, and what AUTO and automatic
                              batches keep to. 0 = none. Not in it: the process itself and scratch
                              of kernels */
} dtrain_launch_desc;

/* How the run ended. */
typedef struct dtrain_launch_info {
    uint32_t rank_count;
    int first_failed_rank; /* -1: none failed */
    int exit_code;         /* for main(): 0, the failed rank's return value, or 128 + signal */
    int signal;            /* that ended the first failed rank, or 0; or that was forwarded */
    double seconds;
} dtrain_launch_info;

/* A rank's main function. Its return value is the rank's exit code: 0 = success. */
typedef int (*dtrain_rank_fn)(dtrain_world *world, void *user);

/* Starts desc->rank_count ranks that each run rank_main, waits for all, returns DTRAIN_OK when all
 * returned 0. Otherwise DTRAIN_ERROR_RANK_FAILED, and dtrain_last_error() names the rank that
 * failed first and how. Ranks still running grace_ms after a failure are killed.
 *
 * Processes: call it before starting threads and before touching much memory (fork copies page
 * tables). Ranks end by _exit after flushing stdio: the parent's atexit handlers are not theirs.
 * SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 that reach the parent are forwarded to
 * every rank; no handler is installed, and the signal mask is restored before the call returns.
 * If the parent dies, the ranks die with it (Linux).
 * Threads: rank_main must not use non-constant globals; a rank that hangs cannot be killed.
 *
 * Joined ranks: rank_main runs in the calling process, which is one rank; the result is that rank's
 * own. Rank 0 returns when all ranks have ended, or grace_ms after a failure, and reports the first
 * failure of any. When a rank fails and TORCHELASTIC_ERROR_FILE is set, torchrun finds the sentence
 * there.
 *
 * desc and info may be NULL. */
DTRAIN_API dtrain_result dtrain_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                       void *user, dtrain_launch_info *info);

DTRAIN_API int dtrain_world_rank(const dtrain_world *world);
DTRAIN_API int dtrain_world_size(const dtrain_world *world);
/* This rank among those of its host (which GPU is its own), and the hosts, numbered in the order of
 * their lowest ranks. */
DTRAIN_API int dtrain_world_local_rank(const dtrain_world *world);
DTRAIN_API int dtrain_world_local_size(const dtrain_world *world);
DTRAIN_API int dtrain_world_node(const dtrain_world *world);
DTRAIN_API int dtrain_world_node_count(const dtrain_world *world);
DTRAIN_API dtrain_device *dtrain_world_device(dtrain_world *world);
DTRAIN_API dtrain_comm *dtrain_world_comm(dtrain_world *world); /* all ranks; owned by the world */
DTRAIN_API const dtrain_allocator *dtrain_world_allocator(const dtrain_world *world);
DTRAIN_API uint32_t dtrain_world_threads(const dtrain_world *world);
/* The deadline of every wait for other ranks. */
DTRAIN_API uint32_t dtrain_world_timeout_ms(const dtrain_world *world);

#define DTRAIN_EXCHANGE_BYTES 4096

/* all (size * bytes) = every rank's mine (bytes), in rank order. Collective and blocking, at most
 * until the deadline; every rank passes the same bytes, 0 being a barrier. For small things that
 * are told once (ids, addresses, verdicts): at most DTRAIN_EXCHANGE_BYTES a rank. Needs neither
 * communicator nor device. Another rank's failure is DTRAIN_ERROR_PEER; a failure of the exchange
 * itself is told to all ranks as by dtrain_world_report. */
DTRAIN_API dtrain_result dtrain_world_exchange(dtrain_world *world, const void *mine, size_t bytes,
                                               void *all);

/* Tells all ranks that this one has failed in a way they cannot see (a device lost, a library's
 * error): their waits, and this rank's own, end with DTRAIN_ERROR_PEER and this text. The first
 * report of a run stands, later ones are dropped. Never blocks. */
DTRAIN_API void dtrain_world_report(dtrain_world *world, dtrain_result code, const char *text);

/* Looks, without blocking, whether a rank has died, left or reported a failure: DTRAIN_OK, or
 * DTRAIN_ERROR_PEER with the sentence. Cheap enough for a polling loop. A rank that returned 0
 * counts as gone two seconds later: what it took part in may still be finishing here. */
DTRAIN_API dtrain_result dtrain_world_look(dtrain_world *world);

/* Sends one formatted line to the log. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
DTRAIN_API void
dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...);

/* What the operating system counts for this process now and at most so far: resident memory with
 * shared pages counted once (PSS now, high-water mark of RSS). 0 where unknown. */
DTRAIN_API void dtrain_process_memory(uint64_t *now_bytes, uint64_t *peak_bytes);

/* Seconds on the monotonic clock all deadlines and timings use. */
DTRAIN_API double dtrain_seconds(void);

/* ================================================================================================
 * [S06] Communicators
 *
 * A communicator is a group of ranks. Every collective is called by all its ranks in the same
 * order with the same count, dtype, operation and root; the `local` backend compares these on
 * every call and turns a difference into DTRAIN_ERROR_MISMATCH on all ranks.
 *
 * The last argument decides how a call ends: work == NULL blocks until it is done; otherwise it
 * returns at once and *work (NULL when there is nothing to wait for) must be given to
 * dtrain_work_wait exactly once. Until then the buffers
 * belong to the operation. Operations of one communicator are carried out in the order they were
 * started. The local backend has no progress thread (on a CPU it would steal the cores that
 * compute): operations advance inside any call on the world's communicators.
 *
 * send == recv (in place) is allowed wherever the sizes are equal, and for reduce-scatter and
 * all-gather when the small buffer is this rank's slice of the large one; other overlap is an
 * error.
 * Counts are elements; buffers need no alignment; count 0 is a synchronisation without data. A
 * buffer lies in host memory or in memory of the world's device; with device memory an operation
 * starts after the work queued on the compute stream before it, and dtrain_work_wait makes later
 * work on that stream wait for it.
 * fp32, bf16 and fp16 sums are accumulated in fp32 in rank order and rounded once, so the bits
 * depend neither on timing nor on how buffers were cut; integers wrap; min and max of anything and
 * NaN are NaN.
 *
 * After any error, a wrong argument included, the communicator has failed: every later call returns
 * the same error, and the other ranks get DTRAIN_ERROR_PEER instead of a sum without this rank.
 * ==============================================================================================*/

typedef struct dtrain_work dtrain_work;

typedef enum dtrain_reduce_op {
    DTRAIN_SUM = 1,
    DTRAIN_MEAN = 2, /* sum * (1 / ranks), one fp32 factor before the only rounding; no integers */
    DTRAIN_MIN = 3,
    DTRAIN_MAX = 4,
    DTRAIN_PROD = 5
} dtrain_reduce_op;

typedef enum dtrain_collective_kind {
    DTRAIN_ALL_REDUCE = 1,
    DTRAIN_REDUCE_SCATTER = 2,
    DTRAIN_ALL_GATHER = 3,
    DTRAIN_BROADCAST = 4,
    DTRAIN_REDUCE = 5,
    DTRAIN_BARRIER = 6,
    DTRAIN_SEND = 7,
    DTRAIN_RECV = 8,
    DTRAIN_SPLIT = 9
} dtrain_collective_kind;

/* recv (count) = op over ranks of send (count). */
DTRAIN_API dtrain_result dtrain_all_reduce(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                           dtrain_work **work);
/* recv (recv_count) = this rank's slice of the reduction of send (ranks * recv_count). */
DTRAIN_API dtrain_result dtrain_reduce_scatter(dtrain_comm *comm, const void *send, void *recv,
                                               size_t recv_count, dtrain_dtype dtype,
                                               dtrain_reduce_op op, dtrain_work **work);
/* recv (ranks * send_count) = all ranks' send (send_count), in rank order. */
DTRAIN_API dtrain_result dtrain_all_gather(dtrain_comm *comm, const void *send, void *recv,
                                           size_t send_count, dtrain_dtype dtype,
                                           dtrain_work **work);
/* buffer (count) of every rank = root's. */
DTRAIN_API dtrain_result dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count,
                                          dtrain_dtype dtype, int root, dtrain_work **work);
/* recv (count) on root = op over ranks of send (count); recv is ignored on other ranks. */
DTRAIN_API dtrain_result dtrain_reduce(dtrain_comm *comm, const void *send, void *recv,
                                       size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                       int root, dtrain_work **work);
/* Point to point: matched in order for each pair of ranks, apart from the collectives. Counts and
 * dtypes must agree. peer == own rank is an error. */
DTRAIN_API dtrain_result dtrain_send(dtrain_comm *comm, const void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
DTRAIN_API dtrain_result dtrain_recv(dtrain_comm *comm, void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
/* Returns when every rank has called it. */
DTRAIN_API dtrain_result dtrain_barrier(dtrain_comm *comm);

/* Waits until the operation is done, reports its result and gives the handle back. NULL is OK. */
DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work);
/* Advances the communicator without blocking and says whether the operation is done; the handle
 * still goes to dtrain_work_wait. */
DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done);

/* Ranks with the same color form a new communicator, ordered by key, then by rank here. A negative
 * color joins none: *out = NULL. Collective over comm. */
DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key,
                                           dtrain_comm **out);
/* Collective in spirit, local in effect: frees this rank's part. The world's communicator is not
 * destroyed by the host. Work in flight makes it an error. */
DTRAIN_API dtrain_result dtrain_comm_destroy(dtrain_comm *comm);

DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);
/* Rank in the world of a rank of this communicator. */
DTRAIN_API int dtrain_comm_world_rank(const dtrain_comm *comm, int rank);

/* Zeroed, 64-byte aligned memory of the world's device that collectives reach without a staging
 * copy where the backend can (shared memory, registered memory). Local call; freed with the size it
 * was asked with. Memory is checked against what the machine has left, so that a too large request
 * is an error and not a killed process. */
DTRAIN_API dtrain_result dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **out);
DTRAIN_API void dtrain_comm_free(dtrain_comm *comm, void *memory, size_t bytes);

/* What a communicator has done since it was made; differences give a step's share. */
typedef struct dtrain_comm_info {
    const char *backend;      /* "local", "staged", "nccl" */
    uint64_t operation_count; /* started */
    uint64_t payload_bytes;   /* of the buffers handed in */
    uint64_t wire_bytes;      /* this rank's share by the ring formula: all-reduce 2(n-1)/n, ... */
    uint64_t staged_bytes;    /* copied because a buffer was not from dtrain_comm_alloc */
    double inside_seconds; /* this thread spent in communicator calls: cannot compute meanwhile */
    double flight_seconds; /* at least one operation was under way */
} dtrain_comm_info;
DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info);

/* One operation as a backend sees it; the calls above check and fill it. */
typedef struct dtrain_collective {
    uint32_t kind; /* dtrain_collective_kind */
    dtrain_dtype dtype;
    uint32_t op;  /* dtrain_reduce_op, 0 where there is none */
    int root;     /* root or peer, -1 where there is none */
    size_t count; /* as the call names it: recv_count, send_count, count */
    const void *send;
    void *recv;
} dtrain_collective;

#define DTRAIN_COMM_ABI 2u

/* What all backends have in common; a backend's own struct begins with it. A backend that makes one
 * fills ops to world_ranks, and keeps in_flight and outstanding right. */
struct dtrain_comm {
    const struct dtrain_comm_ops *ops;
    dtrain_world *world;
    int rank, size;
    int *world_ranks;                            /* (size) */
    uint64_t in_flight;                          /* operations started and not finished */
    uint64_t outstanding;                        /* handles not given back */
    uint64_t inside_ns, flight_ns, flight_since; /* the callers' books */
    dtrain_comm_info info;
};

/* A backend's own begins with it. */
struct dtrain_work {
    dtrain_comm *comm;
};

/* A backend. create makes the world's communicator, collectively. start queues the operation and
 * never waits; test advances without blocking; wait blocks at most until the world's deadline and
 * gives the handle back. Where buffers are device memory, "done" means: in the order of the
 * device's compute stream. split is collective and exchanges the colors itself. fail marks the
 * communicator failed for all ranks, and returns the error that stands: an earlier one wins.
 * destroy is also called by the end of the world, then with operations in flight. */
typedef struct dtrain_comm_ops {
    uint32_t abi;
    const char *name;
    dtrain_result (*create)(dtrain_world *world, dtrain_comm **out);
    dtrain_result (*start)(dtrain_comm *comm, const dtrain_collective *what, dtrain_work **work);
    dtrain_result (*test)(dtrain_work *work, bool *done);
    dtrain_result (*wait)(dtrain_work *work);
    dtrain_result (*alloc)(dtrain_comm *comm, size_t bytes, void **out);
    void (*free)(dtrain_comm *comm, void *memory, size_t bytes);
    dtrain_result (*split)(dtrain_comm *comm, int color, int key, dtrain_comm **out);
    dtrain_result (*fail)(dtrain_comm *comm, dtrain_result code, const char *text);
    dtrain_result (*destroy)(dtrain_comm *comm);
} dtrain_comm_ops;

/* ================================================================================================
 * [S07] Parameters, units, buckets
 *
 * A model is an array of dtrain_param in forward order. The array belongs to the host and must
 * stay where it is until the strategy is destroyed.
 * ==============================================================================================*/

#define DTRAIN_PARAM_FROZEN 1u   /* no gradient, no optimizer state */
#define DTRAIN_PARAM_NO_DECAY 2u /* weight decay skips it; 1-D tensors are skipped anyway */

typedef enum dtrain_init {
    DTRAIN_INIT_ZERO = 0,
    DTRAIN_INIT_CONSTANT = 1, /* init_scale */
    DTRAIN_INIT_NORMAL = 2,   /* N(0, init_scale^2) */
    DTRAIN_INIT_UNIFORM = 3   /* [-init_scale, init_scale) */
} dtrain_init;

typedef struct dtrain_param {
    /* Filled by the host. */
    const char *name;              /* unique; kept by pointer */
    float *value;                  /* (count); NULL: the library owns it and initialises it */
    float *grad;                   /* (count); NULL: it lives inside a bucket and this becomes its
                                      address; the host's own is copied at ready and back */
    int64_t count;                 /* elements; 0 = product of shape. Both are completed in place */
    int64_t shape[4];              /* leading non-zero entries; all zero = 1-D of count */
    uint32_t unit;                 /* which unit (transformer block) it belongs to */
    uint32_t flags;                /* DTRAIN_PARAM_* */
    struct dtrain_param *alias_of; /* tied weights: shares value and grad of an earlier parameter */
    uint32_t init;                 /* dtrain_init, used when value is NULL */
    float init_scale;

    /* Filled by dtrain_strategy_create; the host reads, never writes. */
    struct dtrain_param *storage; /* itself, or the end of the alias chain */
    uint32_t index;               /* place in the array */
    uint32_t pending_uses;        /* the tape's count of backward contributions still to come */
    bool grad_written;            /* grad holds a part of this step's gradient: add to it; otherwise
                                     overwrite. Set by the tape and by ready, cleared by finish */
} dtrain_param;

/* ================================================================================================
 * [S08] Strategies
 *
 * A strategy says where parameters, gradients and optimizer state live across the ranks, and moves
 * them. A training loop written once runs under every kind by changing one field:
 *
 *     kind            parameters  gradients   optimizer   sent per step and rank, P = model
 *     DDP             whole       whole       whole       2(N-1)/N P   all-reduce
 *     ZERO1           whole       whole       1/N         2(N-1)/N P   reduce-scatter, all-gather
 *     SHARD_GRAD_OP   whole       1/N         1/N         2(N-1)/N P   the same (ZeRO-2)
 *     FULL_SHARD      1/N         1/N         1/N         3(N-1)/N P   all-gather twice (ZeRO-3,
 *                                                                      FSDP), reduce-scatter
 *     ZERO3           owner only  owner only  owner only  3(N-1)/N P   broadcasts, reduces
 *     HYBRID_SHARD    1/G         1/G         1/G         FULL_SHARD inside a node of G ranks,
 *                                                         all-reduce of 1/G across nodes
 *
 * (Li et al., "PyTorch Distributed", VLDB 2020; Rajbhandari et al., "ZeRO", SC 2020; Zhao et al.,
 * "PyTorch FSDP", VLDB 2023.) ZERO3 leaves tensors whole and gives every rank about as many
 * elements: what optimizers of whole matrices need.
 *
 * Hooks, called by the tape or by a program with its own backward:
 *
 *     gather(unit)    before a unit's forward, and before its backward: its parameters are whole
 *     release(unit)   after it
 *     ready(param)    this gradient is final for this backward
 *     finish()        the end of a backward: gradients, or this rank's shards of them, are the mean
 *     publish()       after this rank's shards were updated; dtrain_optimizer_step calls it
 *
 * Units are gathered in the order in which they appear in the array, in forward, and in the
 * opposite order in backward; the next one is fetched meanwhile. Kinds that keep parameters and
 * gradients whole (DDP, ZERO1) need no gather and no release. In SHARD_GRAD_OP and the kinds below
 * it param->grad is memory for one unit's backward, and only shards() shows reduced gradients; in
 * FULL_SHARD and below param->value is NULL outside gather and release.
 *
 * A tensor that several units use (tied weights) is registered once and has an alias in each other
 * unit: it stays whole from its first gather in a step to the update.
 * ==============================================================================================*/

typedef struct dtrain_strategy dtrain_strategy;

typedef enum dtrain_strategy_kind {
    DTRAIN_STRATEGY_DEFAULT = 0, /* = DTRAIN_DDP */
    DTRAIN_DDP = 1,
    DTRAIN_ZERO1 = 2,
    DTRAIN_SHARD_GRAD_OP = 3,
    DTRAIN_FULL_SHARD = 4,
    DTRAIN_ZERO3 = 5,
    DTRAIN_HYBRID_SHARD = 6,
    DTRAIN_STRATEGY_AUTO = 7, /* the least communication that fits; see [S09] */
    DTRAIN_NO_SHARD = DTRAIN_DDP
} dtrain_strategy_kind;

typedef enum dtrain_missing_gradient {
    DTRAIN_MISSING_ZERO = 0, /* counts as zero; named in one warning */
    DTRAIN_MISSING_ERROR = 1 /* finish fails and names it */
} dtrain_missing_gradient;

/* When gradients are reduced in a step of several micro-batches. */
typedef enum dtrain_accumulation {
    DTRAIN_ACCUMULATE_DEFAULT = 0,    /* LAST where gradients are whole anyway (DDP, ZERO1), else
                                      EVERY; HYBRID_SHARD: SHARD_EVERY */
    DTRAIN_ACCUMULATE_LAST = 1,       /* in the last backward only: least communication; every rank
                                      holds whole gradients */
    DTRAIN_ACCUMULATE_EVERY = 2,      /* in every backward: sharded gradients stay sharded. Not for
                                      ZERO1, which would pay for it and gain nothing */
    DTRAIN_ACCUMULATE_SHARD_EVERY = 3 /* HYBRID_SHARD: inside nodes in every backward, across nodes
                                         in the last */
} dtrain_accumulation;

/* Classes of memory kept in page-locked host memory instead of a GPU's (Ren et al., "ZeRO-Offload",
 * USENIX ATC 2021). With GRADS or PARAMS one rank alone counts as a shard that is everything. On a
 * device whose memory is the host's: UNSUPPORTED.
 *
 *     OPTIMIZER   state and a master copy of this rank's values, read from the device when the
 *                 optimizer is created; the update runs on the CPU, while gradients come and new
 *                 values go back
 *     GRADS       gradient shards; later micro-batches are added by the CPU. Needs OPTIMIZER and a
 *                 kind that shards gradients, not under DTRAIN_ACCUMULATE_LAST
 *     PARAMS      parameter shards: they are the master copy, and gather brings them to the device.
 *                 Needs OPTIMIZER and a kind that shards parameters
 *
 * dtrain_shard's pointers are host memory where the class is offloaded. */
#define DTRAIN_OFFLOAD_OPTIMIZER 1u
#define DTRAIN_OFFLOAD_GRADS 2u
#define DTRAIN_OFFLOAD_PARAMS 4u

typedef struct dtrain_strategy_desc {
    uint32_t kind;             /* dtrain_strategy_kind */
    uint32_t missing_gradient; /* dtrain_missing_gradient */
    uint32_t accumulation;     /* dtrain_accumulation */
    uint32_t param_dtype;      /* 0 = F32, or BF16, F16: what gathered parameters are rounded to and
                                  travel as, in kinds that shard them; shards stay fp32 */
    uint32_t reduce_dtype;     /* 0 = F32, or BF16, F16: what gradients travel as; sums are fp32 */
    uint32_t offload;          /* DTRAIN_OFFLOAD_* */
    uint32_t node_size;        /* HYBRID_SHARD: ranks that share one copy; 0 = those of a host */
    bool no_overlap;           /* communicate in finish and gather only; the bits are the same */
    bool reshard_after_forward; /* true: release frees a unit also between forward and backward */
    uint32_t kept_unit_count;   /* these units are kept then, whatever the field above says */
    const uint32_t *kept_units; /* (kept_unit_count), read in create */
    int64_t whole_below;        /* tensors with fewer elements are not sharded. 0: sharding small
                                  ones costs nothing, a unit travels in one piece */
    size_t first_bucket_bytes;  /* 1 MiB */
    size_t bucket_bytes;        /* 25 MiB; where gradients are sharded, a unit is a bucket */
    uint64_t memory_limit;      /* AUTO: bytes a rank may use; 0 = what is left of the launch's
                                   memory_limit, and without one 15/16 of what is free */
    uint64_t other_bytes;       /* AUTO: bytes of a rank beside the strategy's and the optimizer's:
                                  activations (dtrain_plan_activations), the process itself */
    uint32_t optimizer_states;  /* AUTO: fp32 tensors of optimizer state per parameter: AdamW 2 */
    uint64_t init_seed;         /* for parameters the library initialises */
    dtrain_comm *comm;          /* NULL = all ranks of the world */
} dtrain_strategy_desc;

DTRAIN_API dtrain_strategy_desc dtrain_strategy_defaults(void);

/* Collective. Compares the registration of all ranks (names, shapes, units, flags, initialisation
 * and the desc, except no_overlap where parameters are whole; a difference is
 * DTRAIN_ERROR_MISMATCH naming the first parameter that differs), allocates what the host left
 * NULL, initialises or broadcasts rank 0's values, plans the buckets. An error on one rank is an
 * error on all. desc NULL = defaults.
 *
 * Values the library initialises are drawn element by element from their place in the model: every
 * kind and world size starts from the same bits, and no rank ever holds the whole of a sharded
 * model. Kinds that shard parameters own them: value must be NULL. Values of the host's own are
 * copied to and from flat memory in ZERO1 and SHARD_GRAD_OP. */
DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out);
/* Local. Memory the library owns is freed and the params' pointers to it become NULL. With buckets
 * still in flight the communicator fails, so that the other ranks do not wait. */
DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy);

/* Before and after a unit's forward or backward: its parameters are whole in between. Collective
 * where parameters are sharded. A unit that is not due (a pass begins with the first, forward goes
 * to the next, backward to an earlier one) is an error that names the one that is. */
DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit);
DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit);

/* params[index]'s gradient is final for this backward; communication of its bucket may start.
 * Every trainable entry is marked once per backward, an alias and its target each. Marking one
 * twice between two finishes is an error that names it. Never blocks for other ranks. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index);

/* Ends a backward: handles parameters that were not marked, waits for all buckets; after a step's
 * last backward the gradients, or this rank's shards of them, hold the mean over the ranks.
 * DTRAIN_MISSING_ERROR costs one small all-reduce, so that all ranks fail together; the next step
 * may go on. */
DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy);

/* Gradient accumulation: true before every micro-batch but the last, false before the last (and
 * where there is only one). While true, finish leaves the step open and gradients add up, here or
 * in shards as desc.accumulation says (a host's own backward must add where param->grad_written,
 * the tape does it by itself). Changing it in the middle of a backward is an error. */
DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more);

/* What this rank's optimizer updates: flat fp32 slices, at most one of a parameter. For DDP every
 * trainable parameter, whole. After updating them (all ranks, or none) call publish. */
typedef struct dtrain_shard {
    const dtrain_param *param;
    int64_t offset; /* first element within the parameter */
    int64_t count;
    float *value;
    const float *grad;
} dtrain_shard;
DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count);

/* Collective. Brings updated shards to where the next forward reads them. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy);

typedef struct dtrain_strategy_info {
    dtrain_strategy_desc desc; /* as resolved: kind is never AUTO */
    const char *name;          /* "DTRAIN_FULL_SHARD" */
    size_t param_count, bucket_count, unit_count;
    int shard_ranks, replicas;                   /* N = shard_ranks * replicas */
    uint64_t trainable_elements, total_elements; /* aliases counted once */
    uint64_t value_bytes, grad_bytes; /* this rank's, whoever owns them; not what is offloaded */
    uint64_t host_bytes;              /* page-locked: shards that are offloaded, and their stages */
    uint64_t buffer_bytes; /* where units are gathered and reduced: constant over a run */
    uint64_t bucket_bytes; /* of one set of whole gradients, padding included */
    uint64_t step_bytes;   /* this rank sends in a step of one micro-batch, by the ring formula */
    uint64_t sync_count;   /* steps that were reduced */
    char reason[400];      /* AUTO: why this kind; empty otherwise */
} dtrain_strategy_info;
DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info);

DTRAIN_API dtrain_comm *dtrain_strategy_comm(dtrain_strategy *strategy);

/* host (count of the parameter) = its whole value, on every rank. Collective. */
DTRAIN_API dtrain_result dtrain_strategy_read(dtrain_strategy *strategy, size_t index, float *host);

/* Hashes the bits of every parameter and compares the hashes across ranks (collective): replicas
 * that drifted apart are DTRAIN_ERROR_MISMATCH naming rank and parameter. The hash is the same for
 * the same model under every kind. *hash may be NULL. */
DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash);

/* ================================================================================================
 * [S09] Memory
 *
 * The memory of a rank, by class, before anything is allocated: the strategy's own layout, counted
 * instead of made. With AUTO dtrain_strategy_create takes the first of
 *
 *     ZERO1, SHARD_GRAD_OP, HYBRID_SHARD (several nodes), FULL_SHARD         (one rank: DDP)
 *
 * that fits the limit: communication grows along the list and memory falls. None fits: an error
 * that says how much is missing and what would help.
 * ==============================================================================================*/

/* Bytes of one rank. */
typedef struct dtrain_memory {
    uint64_t params, grads, optimizer, activations, activation_grads;
    uint64_t buffers;   /* where a strategy gathers and reduces units */
    uint64_t workspace; /* the process itself: code, libc, communicator (0 where ranks are threads,
                           and on a GPU, whose memory is meant) */
    uint64_t total;
    uint64_t host; /* page-locked host memory of what is offloaded; not in any other field */
} dtrain_memory;

/* params, grads, buffers and optimizer (desc->optimizer_states) of the rank that needs most, and
 * their total. desc->kind is not AUTO; node_size 0 counts as rank_count. Local: needs no world;
 * completes count and shape of params in place. */
DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory);

/* ================================================================================================
 * [S11] Tape and tensors
 *
 * Eager reverse-mode differentiation. A model is a C function that calls the operations of [S12];
 * each runs at once and leaves a node on the tape. dtrain_tape_backward walks the nodes in reverse.
 * Tensors belong to the tape and live until the next dtrain_tape_begin: their memory comes from an
 * arena that is reset there, so that from the second step on nothing is allocated and every
 * address repeats.
 *
 * Errors stick: after the first, operations return NULL, accept NULL and do nothing, and
 * dtrain_tape_backward (or dtrain_tape_error) returns it, until the next dtrain_tape_begin. Model
 * code needs no checks.
 * ==============================================================================================*/

typedef struct dtrain_tape dtrain_tape;

typedef struct dtrain_tensor {
    uint32_t dtype; /* dtrain_dtype: F32, BF16 or F16 (autocast, dtrain_cast), or I32 for tokens */
    uint32_t ndim;
    int64_t shape[4];
    int64_t count;
    void *data;                   /* device memory; with checkpointing it may move, see there */
    void *grad;                   /* inside backward only; has the dtype of data */
    struct dtrain_node *producer; /* private; NULL for inputs */
    uint32_t pending_uses;        /* private */
    bool needs_grad, grad_written;
} dtrain_tensor;

#define DTRAIN_TAPE_NO_GRAD 1u /* inference: nothing is kept for backward, dropout is off */
/* Autocast: linear layers and attention read and write bf16 and add up in fp32; norms, losses and
 * the sums of residual connections stay fp32, as torch.autocast does. Parameters and their
 * gradients are fp32; a weight is rounded once per pass. */
#define DTRAIN_TAPE_BF16 2u
#define DTRAIN_TAPE_F16 4u /* the same with fp16, whose range asks for loss scaling [S14] */

/* Operations whose results activation checkpointing drops. The rest of them (sum, mean,
 * cross_entropy) make a few numbers and are always kept. */
#define DTRAIN_CHECKPOINT_LINEAR 1u
#define DTRAIN_CHECKPOINT_ATTENTION 2u
#define DTRAIN_CHECKPOINT_LAYERNORM 4u
#define DTRAIN_CHECKPOINT_ELEMENTWISE 8u /* add, scale, dropout, cast, embedding */
#define DTRAIN_CHECKPOINT_ALL 15u

/* strategy may be NULL: then gradients go where the params point (the first backward overwrites,
 * later ones add until the host clears grad_written) and nothing is communicated. device NULL = the
 * world's; with a device world may be NULL; the plan device makes a tape that only counts bytes. */
DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out);
DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape);

/* Starts a forward pass; tensors of the last one are gone. seed makes dropout's random numbers:
 * give another one for every micro-batch and rank. */
DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed);

/* loss must have one element. Its gradient starts as `scale` (1 / micro-batch count for
 * accumulation). Calls dtrain_strategy_ready as each parameter's gradient becomes final; the
 * caller calls dtrain_strategy_finish. Once per begin; no operations after it. */
DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale);

/* The error that sticks to the tape, DTRAIN_OK if none. */
DTRAIN_API dtrain_result dtrain_tape_error(const dtrain_tape *tape);

/* An input: host data (count elements, F32 or I32) is copied into the arena. requires_grad tensors
 * are for tests and host-side layers: their gradient can be read after backward. */
DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad);
/* Copies a tensor, or the gradient of an input, to host memory (count floats). */
DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *host);
DTRAIN_API dtrain_result dtrain_tensor_read_grad(dtrain_tape *tape, const dtrain_tensor *tensor,
                                                 float *host);

/* Everything after this mark belongs to unit `unit` until the next mark: forward gathers it and
 * releases the one before, backward the other way round; the last one stays gathered in between. */
DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit);

/* Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016):
 * results of the operations in `ops` (0 = ALL) are dropped in every n-th unit, counted in the order
 * of their marks, and made again when backward comes to that unit, by the same kernels from the
 * same numbers: losses and gradients keep their bits. every 1 = all units, 0 = off. From the next
 * dtrain_tape_begin on.
 *
 * What a later unit uses is kept. It has to be used in time: a unit's dropped results are there
 * until the next but one of such units begins; afterwards using or reading them is an error. The
 * same holds in a pass without gradients, which drops as much and makes nothing again. */
DTRAIN_API dtrain_result dtrain_tape_checkpoint(dtrain_tape *tape, uint32_t every, uint32_t ops);

typedef struct dtrain_tape_info {
    size_t node_count, tensor_count;
    size_t recomputed_count;    /* kernel calls that the last backward ran again */
    uint64_t activation_bytes;  /* arena and what checkpointing drops into, largest pass so far */
    uint64_t gradient_bytes;    /* pool of activation gradients */
    uint64_t block_allocations; /* device allocations so far: constant in the steady state */
} dtrain_tape_info;
DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info);

/* ================================================================================================
 * [S12] Operations
 *
 * Shapes: (..., n) is seen as (rows, n). Weights of linear layers are (out, in), as in PyTorch.
 * Every operation checks shapes and reports a difference in a sentence with both.
 * ==============================================================================================*/

/* y (rows, out) = act(x (rows, in) weight^T + bias); bias may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation);
/* Normalises the last axis, epsilon 1e-5; bias may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_param *weight, dtrain_param *bias);
/* sum = x + residual, and its layer normalisation, in one pass over memory; *sum (not NULL) is the
 * input of the next residual connection. */
DTRAIN_API dtrain_tensor *dtrain_add_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                               dtrain_tensor *residual, dtrain_param *weight,
                                               dtrain_param *bias, dtrain_tensor **sum);
/* tokens (batch, sequence) I32 -> (batch*sequence, n): token plus position embedding;
 * position may be NULL. */
DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position);

#define DTRAIN_CAUSAL 1u
/* qkv (batch*sequence, 3n) -> (batch*sequence, n): softmax(q k^T / sqrt(n/heads)) v per head. */
DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags);
DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y);
DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor);
/* x as F32, BF16 or F16; x itself when it is that already. Its gradient comes back in x's type.
 * This is how a model chooses the type of its output: dtrain_cast(tape, logits, DTRAIN_F32) in
 * front of the loss, say, where autocast would take softmax and gradient of narrow logits. */
DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype);
/* Zeroes each element with the given probability and scales the rest by 1 / (1 - probability). */
DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability);

/* Mean over rows of softmax cross-entropy; logits (rows, n), targets (rows) I32, -1 = ignored.
 * In backward the gradient overwrites the logits in place when nothing else reads them: behind a
 * linear classifier logits are stored once. Read them before backward. */
DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets);
DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x);  /* -> one element */
DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x); /* -> one element */

/* ================================================================================================
 * [S14] Loss scaling, clipping
 *
 * fp16 knows nothing below 6e-8, where many gradients are: the loss is multiplied by a scale before
 * backward, and the optimizer divides gradients by it on the way in (Micikevicius et al., "Mixed
 * Precision Training", ICLR 2018). The scale is found while training: a step whose gradients
 * overflow is skipped and lowers it, a long run of good ones raises it.
 *
 *     backward(loss, scaler.scale) -> finish -> dtrain_scaler_unscale
 *           -> unless found_inf: dtrain_optimizer_step(lr, grad_scale) -> dtrain_scaler_update
 *
 * Overflow is seen in the norm: a sum over every gradient of every rank, the same number on all of
 * them, and not finite exactly when a gradient is not. So all ranks step or skip together, and it
 * costs no collective.
 * ==============================================================================================*/

/* Start from dtrain_scaler_defaults(). */
typedef struct dtrain_scaler_desc {
    float initial_scale;      /* 65536 */
    float growth_factor;      /* 2 */
    float backoff_factor;     /* 0.5 */
    uint32_t growth_interval; /* 2000: good steps in a row before the scale grows */
    uint32_t hysteresis;      /* 1: every overflow lowers the scale, as in torch. n: the nth one
                                 since it grew and those that follow do, as in DeepSpeed */
    float minimum_scale;      /* 1: what would fall below is an error */
} dtrain_scaler_desc;

/* Plain data: copy it, save it, compare it. */
typedef struct dtrain_scaler {
    dtrain_scaler_desc desc;
    float scale;            /* of the next step's backward */
    uint32_t good_steps;    /* in a row, since the scale last grew or a step overflowed */
    uint32_t bad_left;      /* the scale falls at the overflow that finds 1 here */
    uint32_t bad_steps;     /* overflows in a row */
    uint64_t skipped_steps; /* overflows since init */
} dtrain_scaler;

DTRAIN_API dtrain_scaler_desc dtrain_scaler_defaults(void);
/* desc NULL = defaults. Nothing is allocated. */
DTRAIN_API dtrain_result dtrain_scaler_init(dtrain_scaler *scaler, const dtrain_scaler_desc *desc);
/* Once a step, after it was taken or skipped. With hysteresis 1 the scales are those of
 * torch.amp.GradScaler, to the bit; one that would grow to infinity stays, as there. A scale that
 * would fall below the minimum stays too, and is DTRAIN_ERROR_NUMERIC: something is wrong that no
 * scale mends. Local. */
DTRAIN_API dtrain_result dtrain_scaler_update(dtrain_scaler *scaler, bool found_inf);
/* dtrain_clip_grad_norm for gradients that are still scaled: norm is that of the unscaled ones,
 * grad_scale unscales and clips. found_inf: a gradient of some rank is inf or NaN (or the unscaled
 * norm is beyond fp32); take no step. Collective, the same on every rank. */
DTRAIN_API dtrain_result dtrain_scaler_unscale(const dtrain_scaler *scaler,
                                               dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *grad_scale, bool *found_inf);

/* L2 norm over all gradients of the model (tied weights once), and the factor that brings it to at
 * most max_norm: max_norm / (norm + 1e-6) when larger, else 1, as torch.nn.utils.clip_grad_norm_.
 * Nothing is scaled here: pass the factor to dtrain_optimizer_step. max_norm <= 0: no clipping,
 * scale = 1. Collective. A norm that is not finite is returned as it is, with scale 1. */
DTRAIN_API dtrain_result dtrain_clip_grad_norm(dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *scale);

/* ================================================================================================
 * [S15] Optimizers, schedules
 * ==============================================================================================*/

typedef struct dtrain_optimizer dtrain_optimizer;

typedef enum dtrain_optimizer_kind { DTRAIN_ADAMW = 1, DTRAIN_SGD = 2 } dtrain_optimizer_kind;

/* Hyper-parameters: 0 is meaningful, so start from dtrain_adamw_defaults or dtrain_sgd_defaults. */
typedef struct dtrain_optimizer_desc {
    uint32_t kind;
    float beta1, beta2, epsilon; /* AdamW: 0.9, 0.999, 1e-8 */
    float weight_decay;          /* decoupled; skips NO_DECAY and 1-D parameters. 0.01; SGD 0 */
    float momentum;              /* SGD: 0 */
    bool nesterov;
} dtrain_optimizer_desc;

DTRAIN_API dtrain_optimizer_desc dtrain_adamw_defaults(void);
DTRAIN_API dtrain_optimizer_desc dtrain_sgd_defaults(void);

/* State (fp32) is allocated for this rank's shards. desc is required. The strategy must outlive the
 * optimizer. With DTRAIN_OFFLOAD_OPTIMIZER the master copy is the host's: what else changes values
 * on the device is undone by the next step. */
DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out);
DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer);
/* One update; every gradient is multiplied by grad_scale on the way in; then the strategy publishes
 * it: collective where anything is sharded. A rate or scale that is not finite, or a negative rate,
 * is an error before anything is touched. */
DTRAIN_API dtrain_result dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr,
                                               float grad_scale);
DTRAIN_API uint64_t dtrain_optimizer_state_bytes(const dtrain_optimizer *optimizer);

typedef enum dtrain_schedule_kind {
    DTRAIN_SCHEDULE_CONSTANT = 0,
    DTRAIN_SCHEDULE_LINEAR = 1,
    DTRAIN_SCHEDULE_COSINE = 2
} dtrain_schedule_kind;

/* Steps count from 0. Warm-up: lr * (step + 1) / warmup_steps. Then from lr at warmup_steps to
 * min_lr at total_steps, along a line or half a cosine; min_lr after that. */
typedef struct dtrain_schedule {
    uint32_t kind;
    float lr, min_lr;
    int64_t warmup_steps, total_steps;
} dtrain_schedule;
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, int64_t step);

typedef enum dtrain_lr_scaling {
    DTRAIN_LR_SCALE_NONE = 0,
    DTRAIN_LR_SCALE_LINEAR = 1, /* lr * ranks (Goyal et al., 2017) */
    DTRAIN_LR_SCALE_SQRT = 2    /* lr * sqrt(ranks): for Adam (Malladi et al., 2022) */
} dtrain_lr_scaling;
DTRAIN_API float dtrain_scale_lr(float lr, int ranks, dtrain_lr_scaling rule);

/* ================================================================================================
 * [S16] Data, samplers
 * ==============================================================================================*/

/* The indices torch.utils.data.DistributedSampler gives one rank, bit-equal. */
typedef struct dtrain_sampler_desc {
    uint32_t rank, rank_count; /* rank_count 0 = 1 */
    int64_t item_count;
    uint64_t seed; /* low 32 bits of seed + epoch are used */
    bool shuffle, drop_last;
} dtrain_sampler_desc;
/* How many indices each rank gets per epoch; 0 after an argument error. */
DTRAIN_API int64_t dtrain_sampler_count(const dtrain_sampler_desc *desc);
/* Writes them for one epoch: indices (dtrain_sampler_count). scratch (item_count) int64. */
DTRAIN_API dtrain_result dtrain_sampler_indices(const dtrain_sampler_desc *desc, uint64_t epoch,
                                                int64_t *scratch, int64_t *indices);
/* torch.randperm on the CPU for n below 2^32 / 20. */
DTRAIN_API dtrain_result dtrain_randperm(uint64_t seed, int64_t n, int64_t *out);

typedef struct dtrain_dataset dtrain_dataset;

/* A stream of tokens: any file as bytes (vocabulary 256), or a llm.c .bin file (uint16 tokens,
 * magic 20240520 version 1; uint32 tokens, magic 20240801 version 7) whose header counts exactly
 * the tokens that are there. world may be NULL here and for loaders: one rank, malloc. */
typedef struct dtrain_dataset_desc {
    uint32_t format;     /* 0 = by magic: a .bin header, otherwise bytes; 1 = bytes; 2 = .bin */
    int64_t vocab_count; /* ids at or above are errors; 0 = 256 for bytes, 50257 for .bin */
    const char *path;
} dtrain_dataset_desc;
DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out);
DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset);
DTRAIN_API int64_t dtrain_dataset_token_count(const dtrain_dataset *dataset);
DTRAIN_API int64_t dtrain_dataset_vocab_count(const dtrain_dataset *dataset);
/* tokens (count) from position first. */
DTRAIN_API dtrain_result dtrain_dataset_read(dtrain_dataset *dataset, int64_t first, int64_t count,
                                             int32_t *tokens);

typedef struct dtrain_loader dtrain_loader;

/* Cuts n = token_count tokens from first_token on into windows of T = sequence + 1 and deals them
 * out. The whole state is one number: samples handed out so far by all ranks together. Sample k is
 * the same for every world size, so the same seed and global batch see the same data. An epoch has
 * (n - 1) / sequence windows in order, or max(1, n / sequence - 1) shuffled ones, whose borders
 * move from epoch to epoch. */
typedef struct dtrain_loader_desc {
    uint32_t batch;                   /* samples per call and rank */
    int64_t sequence;                 /* tokens per sample */
    int64_t first_token, token_count; /* 0, 0 = all */
    uint64_t seed;
    bool in_order; /* no shuffling: for evaluation */
    dtrain_dataset *dataset;
} dtrain_loader_desc;
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out);
DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader);
/* inputs and targets (batch, sequence): targets are inputs one token later. */
DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, int32_t *inputs,
                                            int32_t *targets);
DTRAIN_API int64_t dtrain_loader_sample_count(const dtrain_loader *loader); /* per epoch */
DTRAIN_API uint64_t dtrain_loader_position(const dtrain_loader *loader);
DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position);

/* ================================================================================================
 * [S17] Trainer
 *
 * The loop's glue; everything in it can be called directly instead:
 *
 *     for each micro-batch: accumulate(is another to come?) -> next_batch -> tape forward (loss)
 *                           -> tape backward -> finish
 *     unscale, clip -> optimizer at the schedule's lr -> one small all-gather for the record
 * ==============================================================================================*/

typedef struct dtrain_trainer dtrain_trainer;

/* Fills the host's own buffers with the next micro-batch. */
typedef dtrain_result (*dtrain_batch_fn)(void *user);
/* Builds the loss (one element, mean over the micro-batch) of what next_batch fetched. It must not
 * depend on data values: memory is planned by running it on the plan device. */
typedef dtrain_tensor *(*dtrain_loss_fn)(dtrain_tape *tape, void *user);

typedef struct dtrain_trainer_desc {
    uint32_t accumulation; /* micro-batches per step; 0 = 1 */
    uint32_t tokens;       /* (or samples) per micro-batch and rank, for throughput figures */
    float clip;            /* global gradient norm; 0 = off */
    uint32_t tape_flags;   /* DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16, or 0 */
    uint32_t checkpoint_every, checkpoint_ops; /* of dtrain_tape_checkpoint; 0 = off */
    dtrain_scaler_desc loss_scaling; /* all zero: dtrain_scaler_defaults() with DTRAIN_TAPE_F16,
                                        otherwise off */
    bool graph;    /* GPU: record the step once and replay it: no launch costs. See below */
    uint64_t seed; /* of dropout */
    dtrain_schedule schedule;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_batch_fn next_batch; /* NULL: loss fetches by itself; then memory cannot be planned */
    dtrain_loss_fn loss;
    void *user;
} dtrain_trainer_desc;

/* One step, the same on every rank except where noted. */
typedef struct dtrain_step_record {
    int64_t step;     /* from 0 */
    double loss;      /* mean over micro-batches and ranks */
    double val_loss;  /* NaN unless the host evaluated and set it */
    double grad_norm; /* before clipping */
    double lr;
    uint64_t tokens;          /* of all ranks since the start, after this step */
    double tokens_per_second; /* of all ranks, this step */
    double step_ms;           /* slowest rank */
    double comm_ms;           /* an operation was in flight; mean over ranks */
    double exposed_comm_ms;   /* of that, the rank could not compute; mean over ranks */
    uint64_t comm_bytes;      /* this rank sent, by the ring formula */
    double straggler_score;   /* slowest rank's compute time / median of ranks */
    double loss_scale;        /* of this step's backward; 0: no loss scaling */
    uint64_t skipped_steps;   /* since the start, this one included: gradients overflowed */
    int slowest_rank;
} dtrain_step_record;

/* With desc->graph the third step is recorded and later ones are replayed: the same kernels on the
 * same addresses, so loss is not called again. What it reads must come in through
 * dtrain_tape_input from buffers that stay where they are (next_batch fills them); what else it
 * does on the host happens once. The bits are those of a run without graph. Needs a device that can
 * record, next_batch, and collectives that work on its streams (one rank, or dtrain_nccl.h). Loss
 * scaling is refused: bf16 needs none. */
DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out);
DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer);
/* Collective. record may be NULL. A rank that is more than twice slower than the (lower) median for
 * ten steps running is named once in a warning. A gradient norm or loss that is not finite is
 * DTRAIN_ERROR_NUMERIC on all ranks, naming step and rank; no parameter has changed if it was the
 * gradient. With loss scaling such a gradient is no error: the step is skipped on all ranks,
 * parameters and optimizer state stay, and the scale falls until dtrain_scaler_update gives up. An
 * optimizer of NULL in the desc makes a trainer that only evaluates. */
DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record);
/* Mean loss without gradients over `batches` calls of next_batch, averaged over ranks. Collective.
 * next_batch and user may differ from training's; the loss function gets this user. */
DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss);
DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer);

/* Predicts the memory of activations, and with them the total, by running the loss forwards and
 * backwards on the plan device, where kernels do nothing. desc is that of the trainer to come: only
 * loss, user and the fields of the tape are read, so it can be asked before there is a strategy.
 * The loss reads its inputs, so their buffers must be there; what is in them does not matter. Under
 * autocast, parameters need their count or shape. Local. */
DTRAIN_API dtrain_result dtrain_plan_activations(dtrain_world *world,
                                                 const dtrain_trainer_desc *desc,
                                                 dtrain_memory *memory);

/* Predicts a step's memory: what strategy and optimizer hold and dtrain_plan_activations;
 * workspace is what the process held before the model came. Local; needs a next_batch. */
DTRAIN_API dtrain_result dtrain_trainer_plan_memory(dtrain_trainer *trainer, dtrain_memory *memory);

typedef struct dtrain_auto_batch_desc {
    uint32_t max_batch; /* 0 = 65536 */
    /* From here on the loss builds micro-batches of so many samples, with buffers of that size. */
    dtrain_result (*set_batch)(void *user, uint32_t batch);
    const dtrain_trainer_desc *trainer; /* as for dtrain_plan_activations */
    dtrain_param *params;
    size_t param_count;
    const dtrain_strategy_desc *strategy; /* that create will be given; NULL = defaults */
} dtrain_auto_batch_desc;

/* The largest micro-batch whose step fits, to be asked before anything of the model is allocated:
 *
 *     dtrain_strategy_plan + dtrain_plan_activations(batch) <= memory_limit - other_bytes
 *
 * with those two of the strategy's desc, as AUTO reads them. For AUTO itself the kind that needs
 * least counts, and dtrain_strategy_create then takes the first that leaves room for the batch.
 * The prediction is tried: every rank allocates and touches that much at the same time, and where
 * one cannot, all try an eighth less. Leaves set_batch called with the result. Collective, the same
 * answer on every rank. When not even one sample fits, DTRAIN_ERROR_MEMORY says how much is
 * missing. */
DTRAIN_API dtrain_result dtrain_auto_batch(dtrain_world *world, const dtrain_auto_batch_desc *desc,
                                           uint32_t *batch);

/* The largest micro-batch of at most `batch` samples, and the accumulation, with which
 * micro_batch * accumulation * ranks is global_batch. A global batch that ranks does not divide is
 * an error that names the nearest. Local. */
DTRAIN_API dtrain_result dtrain_accumulation_for(uint64_t global_batch, uint32_t batch, int ranks,
                                                 uint32_t *micro_batch, uint32_t *accumulation);

/* ================================================================================================
 * [S19] Metrics
 * ==============================================================================================*/

typedef struct dtrain_metrics dtrain_metrics;

typedef struct dtrain_metrics_desc {
    uint32_t progress_every; /* steps between lines when progress is no terminal; 0 = 10 */
    int64_t total_steps;     /* for percentage and time left; 0 = unknown */
    FILE *progress;          /* a live line on a terminal, plain lines otherwise; NULL = none */
    const char *jsonl_path;  /* one JSON object a step, NULL = none */
} dtrain_metrics_desc;

/* Rank 0 writes, the others do nothing. A log file that cannot be opened is an error; one that
 * later cannot be written is one warning, and training goes on. */
DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out);
/* Keys: step, loss, val_loss (when evaluated), grad_norm, lr, tokens, tokens_per_second, step_ms,
 * comm_ms, exposed_comm_ms, comm_bytes; with loss scaling loss_scale, skipped_steps. Numbers that
 * are not finite are written as null. */
DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record);

typedef struct dtrain_summary {
    int64_t steps;
    uint64_t tokens;
    double first_loss, last_loss, val_loss;   /* NaN where unknown */
    double seconds, tokens_per_second;        /* tokens_per_second: median of steps */
    double step_ms, comm_ms, exposed_comm_ms; /* medians */
    double scaling;                           /* (step - exposed) / step: an upper estimate */
    uint64_t comm_bytes;                      /* of all steps, this rank */
} dtrain_summary;
DTRAIN_API void dtrain_metrics_summary(const dtrain_metrics *metrics, dtrain_summary *summary);
/* Ends the progress line, writes a last JSON object with the summary and "final": true, closes the
 * file. Safe on NULL. DTRAIN_ERROR_FILE when lines were lost on the way. */
DTRAIN_API dtrain_result dtrain_metrics_destroy(dtrain_metrics *metrics);

#ifdef __cplusplus
}
#endif

#endif /* DTRAIN_H */

/* Readers of the API can stop here. */

#if defined(DTRAIN_IMPLEMENTATION) && !defined(DTRAIN__FIRST_HALF)
#define DTRAIN__FIRST_HALF

/* ================================================================================================
 * [S20] Platform
 * ==============================================================================================*/

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef DTRAIN_USE_CBLAS
#include <cblas.h>
#endif

#if !defined(CLOCK_MONOTONIC) || !defined(MAP_ANONYMOUS)
#error "dtrain.h must come before any system header where DTRAIN_IMPLEMENTATION is defined"
#endif

#define DTRAIN__CACHE_LINE 64

#if defined(__GNUC__)
#define DTRAIN_RESTRICT __restrict
#define DTRAIN__UNUSED \
    __attribute__((unused)) /* a helper that some switch leaves without a caller */
#define DTRAIN__THREAD_LOCAL __thread
#define DTRAIN__PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#error "dtrain.h needs gcc or clang: atomics, thread-local storage and vector types come from there"
#endif

/* Atomics: the __atomic builtins, because <stdatomic.h> is neither C99 nor C++. */
#define dtrain__load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define dtrain__store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define dtrain__fetch_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)

/* What a waiting core does between two looks at memory. */
static inline void dtrain__pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static uint64_t dtrain__now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

DTRAIN_API double dtrain_seconds(void) { return 1e-9 * (double)dtrain__now_ns(); }

static int64_t dtrain__min(int64_t a, int64_t b) { return a < b ? a : b; }
static DTRAIN__UNUSED int64_t dtrain__max(int64_t a, int64_t b) { return a > b ? a : b; }

/* ================================================================================================
 * [S21] Results, version
 *
 * The last error is thread-local, as errno is: ranks may be threads, and a rank's helper threads
 * hand their errors to the thread that asked. The rank is put in front of every sentence so that
 * the output of many ranks stays readable.
 * ==============================================================================================*/

static DTRAIN__THREAD_LOCAL char dtrain__error_text[1024];
static DTRAIN__THREAD_LOCAL int dtrain__thread_rank = -1; /* set by launch; -1 outside of a rank */

DTRAIN_API const char *dtrain_version(void) { return DTRAIN_VERSION_STRING; }
DTRAIN_API const char *dtrain_last_error(void) { return dtrain__error_text; }

DTRAIN_API const char *dtrain_result_name(dtrain_result result)
{
    switch (result) {
#define DTRAIN__NAME(name, value, text) \
    case name: return #name;
        DTRAIN_RESULT_LIST(DTRAIN__NAME)
#undef DTRAIN__NAME
    default: return "unknown result";
    }
}

DTRAIN_API const char *dtrain_result_text(dtrain_result result)
{
    switch (result) {
#define DTRAIN__TEXT(name, value, text) \
    case name: return text;
        DTRAIN_RESULT_LIST(DTRAIN__TEXT)
#undef DTRAIN__TEXT
    default: return "a number that is not a dtrain_result";
    }
}

/* Records the sentence and returns code, so that a check is one line:
 *     if (count < 0) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_x: count is %lld", ...);
 * The text may quote the last error: it is built aside first. */
DTRAIN_API dtrain_result dtrain_fail(dtrain_result code, const char *format, ...)
{
    char text[sizeof dtrain__error_text];
    int used = 0;
    if (dtrain__thread_rank >= 0)
        used = snprintf(text, sizeof text, "rank %d: ", dtrain__thread_rank);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, args);
    va_end(args);
    memcpy(dtrain__error_text, text, sizeof text);
    return code;
}

/* Propagates a failure; the sentence has been left already. */
#define DTRAIN__TRY(call)                                       \
    do {                                                        \
        dtrain_result dtrain__status = (call);                  \
        if (dtrain__status != DTRAIN_OK) return dtrain__status; \
    } while (0)

/* ================================================================================================
 * [S22] Logging, allocator, checked sizes
 * ==============================================================================================*/

/* Sizes that come from outside are multiplied and added here only. False on overflow. */
static bool dtrain__size_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static DTRAIN__UNUSED bool dtrain__size_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
/* Rounds up to a multiple of `unit`, a power of two; the caller knows that it cannot overflow. */
static size_t dtrain__round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) & ~(unit - 1);
}

static void *dtrain__default_alloc(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}
static void dtrain__default_free(void *user, void *memory, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(memory);
}

static dtrain_allocator dtrain__resolve_allocator(const dtrain_allocator *given)
{
    dtrain_allocator result;
    memset(&result, 0, sizeof result);
    if (given) result = *given;
    if (!result.alloc || !result.free) {
        result.alloc = dtrain__default_alloc;
        result.free = dtrain__default_free;
        result.user = NULL;
    }
    return result;
}

/* Zeroed memory for count items, or NULL with the last error set. count == 0 gives memory too, so
 * that NULL always means failure. */
static void *dtrain__alloc(const dtrain_allocator *allocator, size_t count, size_t item_bytes,
                           const char *what)
{
    size_t bytes;
    void *memory = NULL;
    if (dtrain__size_mul(count ? count : 1, item_bytes, &bytes))
        memory = allocator->alloc(allocator->user, bytes);
    if (!memory) {
        dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %s: %zu items of %zu bytes", what, count,
                    item_bytes);
        return NULL;
    }
    memset(memory, 0, bytes);
    return memory;
}
static void dtrain__free(const dtrain_allocator *allocator, void *memory, size_t count,
                         size_t item_bytes)
{
    if (memory) allocator->free(allocator->user, memory, (count ? count : 1) * item_bytes);
}

/* Where messages of a rank go; one per world. */
typedef struct dtrain__log_sink {
    dtrain_log_fn write;
    void *user;
    dtrain_log_level level;
    int rank; /* -1: the launcher */
} dtrain__log_sink;

static void dtrain__log_stderr(void *user, dtrain_log_level level, int rank, const char *text)
{
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    (void)user;
    if (level >= DTRAIN_LOG_INFO && rank > 0) return;
    if (rank < 0) fprintf(stderr, "dtrain %s: %s\n", names[level], text);
    else fprintf(stderr, "dtrain %s (rank %d): %s\n", names[level], rank, text);
}

static void dtrain__log_va(const dtrain__log_sink *sink, dtrain_log_level level, const char *format,
                           va_list args)
{
    char text[1024];
    dtrain_log_level limit = sink->level == DTRAIN_LOG_DEFAULT ? DTRAIN_LOG_INFO : sink->level;
    if (level > limit || level < DTRAIN_LOG_ERROR) return;
    vsnprintf(text, sizeof text, format, args);
    if (sink->write) sink->write(sink->user, level, sink->rank, text);
    else dtrain__log_stderr(NULL, level, sink->rank, text);
}

/* ================================================================================================
 * [S23] Data types, random numbers
 * ==============================================================================================*/

DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_F32:
    case DTRAIN_I32: return 4;
    case DTRAIN_BF16:
    case DTRAIN_F16: return 2;
    case DTRAIN_I64: return 8;
    case DTRAIN_DTYPE_NONE: break;
    }
    return 0;
}

DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_F32: return "f32";
    case DTRAIN_BF16: return "bf16";
    case DTRAIN_F16: return "f16";
    case DTRAIN_I32: return "i32";
    case DTRAIN_I64: return "i64";
    case DTRAIN_DTYPE_NONE: break;
    }
    return "?";
}

static uint32_t dtrain__f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float dtrain__f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

DTRAIN_API bool dtrain_is_finite(float value)
{
    return (dtrain__f32_bits(value) & 0x7f800000u) != 0x7f800000u;
}

/* Conversions are integer arithmetic on the bits: exact, independent of the rounding mode, of
 * flush-to-zero and of -ffast-math. Rounding to nearest even = add half of the last place kept,
 * less one when that place is even, and cut; a carry out of the mantissa raises the exponent as it
 * should. NaNs become quiet and keep the upper bits of their payload, as x86 and ARM hardware does:
 * the bulk conversions of [S24] give the same bits by other means. */

DTRAIN_API uint16_t dtrain_f32_to_bf16(float value)
{
    const uint32_t bits = dtrain__f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

DTRAIN_API float dtrain_bf16_to_f32(uint16_t bits)
{
    return dtrain__f32_from_bits((uint32_t)bits << 16);
}

/* A denormal result counts units of 2^-24: the mantissa (with its hidden bit) is shifted down by
 * 126 - exponent. Below 2^-25 everything rounds to zero. */
static uint32_t dtrain__f16_denormal(uint32_t magnitude)
{
    const uint32_t shift = 126u - (magnitude >> 23);
    if (shift > 24) return 0;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t half = 1u << (shift - 1);
    return (mantissa + half - 1u + (mantissa >> shift & 1u)) >> shift;
}

DTRAIN_API uint16_t dtrain_f32_to_f16(float value)
{
    const uint32_t bits = dtrain__f32_bits(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more */
    if (magnitude < 0x38800000u) return (uint16_t)(sign | dtrain__f16_denormal(magnitude));
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13); /* exponent bias 127 -> 15 */
}

DTRAIN_API float dtrain_f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) {
        const uint32_t quiet = mantissa ? 0x400000u : 0u;
        return dtrain__f32_from_bits(sign | 0x7f800000u | quiet | mantissa << 13);
    }
    if (exponent == 0) {
        if (mantissa == 0) return dtrain__f32_from_bits(sign);
        for (exponent = 1; !(mantissa & 0x400u); exponent--) mantissa <<= 1; /* may wrap: modular */
        mantissa &= 0x3ffu;
    }
    return dtrain__f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

/* ---- Philox4x32-10 -----------------------------------------------------------------------------
 *
 * Ten rounds of two 32 x 32 -> 64 bit products, keys stepped by Weyl constants. The 128-bit counter
 * is (stream, counter), the 64-bit key is the seed; one call gives four independent words:
 *
 *     element index i of a stream  =  word i % 4 of block i / 4 */

#define DTRAIN__PHILOX_M0 0xD2511F53u
#define DTRAIN__PHILOX_M1 0xCD9E8D57u
#define DTRAIN__PHILOX_W0 0x9E3779B9u
#define DTRAIN__PHILOX_W1 0xBB67AE85u

DTRAIN_API void dtrain_philox(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)DTRAIN__PHILOX_M0 * c0;
        const uint64_t p1 = (uint64_t)DTRAIN__PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += DTRAIN__PHILOX_W0;
        k1 += DTRAIN__PHILOX_W1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* 24 bits: every value is exact in fp32 and 1 is never reached. */
static float dtrain__uniform_from_bits(uint32_t bits)
{
    return (float)(bits >> 8) * (1.0f / 16777216.0f);
}

DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t block[4];
    dtrain_philox(seed, stream, index / 4, block);
    return dtrain__uniform_from_bits(block[index % 4]);
}

/* ---- Normal numbers ----------------------------------------------------------------------------
 *
 * Box and Muller (1958): from uniforms u in (0,1) and w in [0,1),
 *     sqrt(-2 ln u) cos(2 pi w)   and   sqrt(-2 ln u) sin(2 pi w)   are two independent N(0,1).
 * u = (word + 1/2) / 2^32 is never 0 or 1, so the result is finite and |z| <= 6.77.
 *
 * ln, sin and cos are short series in double instead of libm's, whose last bits differ between
 * machines: with +, -, *, / and sqrt of IEEE 754 alone the bits are the same everywhere (unless the
 * compiler is told to contract or reorder: then they agree to 1 ulp of fp32 in rare cases). */

/* ln x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt 2), ln m = 2 artanh((m-1)/(m+1)). */
static double dtrain__log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    const double s = (m - 1) / (m + 1), q = s * s; /* q <= 0.0295: 8 terms reach 1e-14 */
    double p = 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    return exponent * 0.69314718055994531 + 2 * s * (1 + q * p);
}

/* sin and cos of 2 pi turn: the nearest quarter turn is taken off (exact), |x| <= pi/4 remains. */
static void dtrain__sincos_turn(uint32_t turn, double *sine, double *cosine)
{
    const uint32_t quarter = (turn + 0x20000000u) >> 30;
    const int32_t rest = (int32_t)(turn - (quarter << 30)); /* modulo 2^32: in [-2^29, 2^29) */
    const double x = rest * (6.283185307179586 / 4294967296.0), q = x * x;
    double s = -1.0 / 39916800, c = 1.0 / 479001600; /* x^11 / 11!, x^12 / 12! */
    s = s * q + 1.0 / 362880;
    s = s * q - 1.0 / 5040;
    s = s * q + 1.0 / 120;
    s = s * q - 1.0 / 6;
    s = x + x * q * s;
    c = c * q - 1.0 / 3628800;
    c = c * q + 1.0 / 40320;
    c = c * q - 1.0 / 720;
    c = c * q + 1.0 / 24;
    c = c * q - 0.5;
    c = 1 + q * c;
    *sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    *cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
}

static void dtrain__normal_pair(uint32_t u, uint32_t turn, float out[2])
{
    double sine, cosine;
    const double radius = sqrt(-2 * dtrain__log(((double)u + 0.5) * (1.0 / 4294967296.0)));
    dtrain__sincos_turn(turn, &sine, &cosine);
    out[0] = (float)(radius * cosine);
    out[1] = (float)(radius * sine);
}

DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t block[4];
    float pair[2];
    dtrain_philox(seed, stream, index / 4, block);
    dtrain__normal_pair(block[index & 2], block[(index & 2) + 1], pair);
    return pair[index & 1];
}

/* out[i] = scale * normal(seed, stream, first + i): the same bits as one by one, but each block of
 * four is made once (about 15 ns an element). */
static void dtrain__random_normal_fill(uint64_t seed, uint64_t stream, uint64_t first,
                                       int64_t count, float scale, float *out)
{
    uint32_t block[4];
    float four[4];
    for (int64_t i = 0; i < count;) {
        const uint64_t index = first + (uint64_t)i;
        dtrain_philox(seed, stream, index / 4, block);
        dtrain__normal_pair(block[0], block[1], four);
        dtrain__normal_pair(block[2], block[3], four + 2);
        for (uint64_t word = index % 4; word < 4 && i < count; word++)
            out[i++] = scale * four[word];
    }
}

static void dtrain__random_uniform_fill(uint64_t seed, uint64_t stream, uint64_t first,
                                        int64_t count, float low, float width, float *out)
{
    uint32_t block[4];
    for (int64_t i = 0; i < count;) {
        const uint64_t index = first + (uint64_t)i;
        dtrain_philox(seed, stream, index / 4, block);
        for (uint64_t word = index % 4; word < 4 && i < count; word++)
            out[i++] = low + width * dtrain__uniform_from_bits(block[word]);
    }
}
/* ================================================================================================
 * [S24] Device
 *
 * The CPU device in six parts, each a review sitting:
 *     S24.1  pool         T threads that run one function together (T - 1 workers and the caller)
 *     S24.2  exp, tanh    instruction sets, and functions that vectorise in any of them
 *     S24.3  GEMM         C = act(alpha op(A) op(B) + beta C + bias), packed and register-tiled
 *     S24.4  kernels      everything else; the same text is compiled once per instruction set
 *     S24.5  attention    likewise
 *     S24.6  device       memory, launchers, the CPU table and the plan table
 * ==============================================================================================*/

/* ---- [S24.1] The pool -------------------------------------------------------------------------
 *
 * One generation number says which job is current; a worker has run jobs up to its own copy of it.
 *
 *   caller: write task, pending = T - 1, generation + 1 | run task(0) | wait until pending == 0
 *   worker: wait until generation differs from its copy | run task(i) | pending - 1
 *
 * Both waits spin for some 30 us, because training calls follow each other closely, and then sleep
 * on a condition variable. No wake-up is lost: the sleeper announces itself (asleep, caller_asleep)
 * and then looks again; the other side changes the state and then looks for sleepers. All four
 * accesses are sequentially consistent, so at least one of the two sees the other; and the sleeper
 * holds the lock from its announcement into the wait, so the signal, sent under that lock, cannot
 * fall between them.
 *
 * Threads do not survive fork: a rank makes its pool after it was forked. */

typedef void (*dtrain__task_fn)(void *ctx, int index, int count);

typedef struct dtrain__worker {
    struct dtrain__pool *pool;
    pthread_t thread;
    int index;
} dtrain__worker;

typedef struct dtrain__pool {
    dtrain_allocator allocator;
    int room;                  /* of workers */
    int thread_count;          /* workers and caller */
    int spins;                 /* pauses before sleeping; 0 when cores are oversubscribed */
    uint32_t generation;       /* atomic */
    int pending;               /* atomic: workers that have not finished the current job */
    int asleep, caller_asleep; /* atomic, written under lock */
    int busy;                  /* atomic: a job is running, nested calls run inline */
    int stop;                  /* published by generation, like task and ctx */
    dtrain__task_fn task;
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    dtrain__worker *workers;
} dtrain__pool;

static uint32_t dtrain__pool_await_job(dtrain__pool *pool, uint32_t seen)
{
    uint32_t now = seen;
    for (int i = 0; i < pool->spins && now == seen; i++) {
        dtrain__pause();
        now = __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE);
    }
    if (now != seen) return now;
    pthread_mutex_lock(&pool->lock);
    __atomic_add_fetch(&pool->asleep, 1, __ATOMIC_SEQ_CST);
    while ((now = __atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST)) == seen)
        pthread_cond_wait(&pool->work, &pool->lock);
    __atomic_sub_fetch(&pool->asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
    return now;
}

static void dtrain__pool_publish_job(dtrain__pool *pool)
{
    __atomic_store_n(&pool->pending, pool->thread_count - 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->asleep, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void dtrain__pool_finish_share(dtrain__pool *pool)
{
    if (__atomic_sub_fetch(&pool->pending, 1, __ATOMIC_SEQ_CST) != 0) return;
    if (!__atomic_load_n(&pool->caller_asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_signal(&pool->done);
    pthread_mutex_unlock(&pool->lock);
}

static void dtrain__pool_await_workers(dtrain__pool *pool)
{
    for (int i = 0; i < pool->spins; i++) {
        if (__atomic_load_n(&pool->pending, __ATOMIC_ACQUIRE) == 0) return;
        dtrain__pause();
    }
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->caller_asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool->pending, __ATOMIC_SEQ_CST) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    __atomic_store_n(&pool->caller_asleep, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
}

static void *dtrain__pool_worker(void *arg)
{
    dtrain__worker *self = (dtrain__worker *)arg;
    dtrain__pool *pool = self->pool;
    uint32_t seen = 0;
    for (;;) {
        seen = dtrain__pool_await_job(pool, seen);
        if (pool->stop) return NULL;
        pool->task(pool->ctx, self->index, pool->thread_count);
        dtrain__pool_finish_share(pool);
    }
}

/* Runs task(ctx, index, count) once for every index below count and returns when all are done;
 * index 0 is the calling thread. Without a pool, or from inside a task, count is 1. */
static void dtrain__parallel(dtrain__pool *pool, dtrain__task_fn task, void *ctx)
{
    if (!pool || pool->thread_count == 1 || __atomic_exchange_n(&pool->busy, 1, __ATOMIC_ACQUIRE)) {
        task(ctx, 0, 1);
        return;
    }
    pool->task = task;
    pool->ctx = ctx;
    dtrain__pool_publish_job(pool);
    task(ctx, 0, pool->thread_count);
    dtrain__pool_await_workers(pool);
    __atomic_store_n(&pool->busy, 0, __ATOMIC_RELEASE);
}

static void dtrain__pool_destroy(dtrain__pool *pool)
{
    if (!pool) return;
    pool->stop = 1;
    dtrain__pool_publish_job(pool);
    for (int i = 0; i < pool->thread_count - 1; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    dtrain__free(&pool->allocator, pool->workers, (size_t)pool->room, sizeof *pool->workers);
    dtrain_allocator allocator = pool->allocator;
    dtrain__free(&allocator, pool, 1, sizeof *pool);
}

/* Signals stay with the rank's own threads: a worker is created with all of them blocked. */
static int dtrain__pool_start(dtrain__pool *pool, int index)
{
    dtrain__worker *worker = &pool->workers[index - 1];
    sigset_t all, before;
    worker->pool = pool;
    worker->index = index;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&worker->thread, NULL, dtrain__pool_worker, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Returns 0, ENOMEM, or what pthread_create said. `oversubscribed`: threads would spin on a core
 * that another one needs, so they sleep at once. */
static int dtrain__pool_create(dtrain__pool **out, const dtrain_allocator *allocator,
                               int thread_count, int oversubscribed)
{
    dtrain_allocator memory = dtrain__resolve_allocator(allocator);
    *out = NULL;
    dtrain__pool *pool = (dtrain__pool *)dtrain__alloc(&memory, 1, sizeof *pool, "a thread pool");
    if (!pool) return ENOMEM;
    pool->allocator = memory;
    pool->room = thread_count;
    pool->workers = (dtrain__worker *)dtrain__alloc(&memory, (size_t)thread_count,
                                                    sizeof *pool->workers, "a thread pool");
    if (!pool->workers) {
        dtrain__free(&memory, pool, 1, sizeof *pool);
        return ENOMEM;
    }
    pool->spins = oversubscribed ? 0 : 1000;
    pool->thread_count = 1;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (int i = 1; i < thread_count; i++) {
        int error = dtrain__pool_start(pool, i);
        if (error) {
            dtrain__pool_destroy(pool);
            return error;
        }
        pool->thread_count = i + 1;
    }
    *out = pool;
    return 0;
}

/* ---- [S24.2] Instruction sets -----------------------------------------------------------------
 *
 * A header cannot count on -march=native, so every hot function exists once for each instruction
 * set and is chosen at run time. DTRAIN__TARGET(t) marks such a function: compile it for t whatever
 * the command line says. The optimisation attributes are gcc's: fused multiply-add is off there in
 * -std=c99, and so is the vectoriser under -O2 before version 12. clang does both by itself. The
 * target has to come before optimize, or gcc 12 forgets the latter.
 *
 * What the functions share is DTRAIN__INLINE code without a target, which becomes part of each. */

#if defined(__clang__)
#define DTRAIN__TARGET(t) __attribute__((target(t)))
#define DTRAIN__BASELINE
#elif defined(__GNUC__)
#define DTRAIN__FAST "O3", "fp-contract=fast", "no-trapping-math", "no-math-errno"
#define DTRAIN__TARGET(t) __attribute__((target(t), optimize(DTRAIN__FAST)))
#ifdef DTRAIN_NO_SIMD /* gcc 12 joins the two loads of B's row with two of the next: past its end */
#define DTRAIN__BASELINE __attribute__((optimize(DTRAIN__FAST, "no-tree-vectorize")))
#else
#define DTRAIN__BASELINE __attribute__((optimize(DTRAIN__FAST)))
#endif
#endif
#define DTRAIN__INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define DTRAIN__UNROLL_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define DTRAIN__UNROLL_TWICE _Pragma("GCC unroll 2")
#endif
#define DTRAIN__UNROLL_NOT

/* Vectors that may lie at any address. Without them a "vector" is a float: same code, plain C. */
#if defined(DTRAIN_NO_SIMD) || !(defined(__clang__) || __GNUC__ >= 8)
#define DTRAIN__VECTORS 0
#define DTRAIN__VECTOR_OF(n)
#else
#define DTRAIN__VECTORS 1
#define DTRAIN__VECTOR_OF(n) __attribute__((vector_size(4 * (n)), aligned(4), may_alias))
#endif

/* ---- [S24.2] exp and tanh ---------------------------------------------------------------------
 *
 * x = n ln2 + r with |r| <= ln2 / 2, and e^r - 1 = r + r^2/2! + ... + r^7/7!, whose first missing
 * term is below 5.2e-9: rounding dominates. ln2 is split in two so that n * ln2_high is exact.
 * Scalar and free of branches: a loop over dtrain__exp vectorises at the width of its function. */

/* NaN passes. One select instead of two: gcc threads the second one into a branch. */
DTRAIN__INLINE float dtrain__limit(float x, float limit)
{
    return __builtin_fabsf(x) > limit ? __builtin_copysignf(limit, x) : x;
}

/* e^r - 1 of the remainder; n comes out as well. */
DTRAIN__INLINE float dtrain__expm1_reduced(float x, int32_t *n)
{
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds, n in the low bits */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    *n = (int32_t)(bits - 0x4b400000u); /* of NaN too, where a cast to int would be undefined */
    float whole = (float)*n;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return p * (r * r) + r;
}

DTRAIN__INLINE float dtrain__power_of_two(int32_t n)
{
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* e^x within 1.5 ulp; overflows to infinity, underflows gradually to 0, NaN stays NaN. The scale is
 * applied in two halves because neither 2^128 nor 2^-149 fits the exponent field. */
DTRAIN__INLINE float dtrain__exp(float x)
{
    int32_t n;
    float p = dtrain__expm1_reduced(dtrain__limit(x, 104), &n);
    float scale = dtrain__power_of_two(n >> 1);
    return (p * scale + scale) * dtrain__power_of_two(n - (n >> 1));
}

/* tanh x = e / (e + 2) with e = e^(2x) - 1 = 2^n p + (2^n - 1), which is accurate around 0 as well.
 * From |x| = 10 on the result rounds to one. */
DTRAIN__INLINE float dtrain__tanh(float x)
{
    int32_t n;
    float p = dtrain__expm1_reduced(dtrain__limit(2 * x, 20), &n);
    float scale = dtrain__power_of_two(n);
    float e = p * scale + (scale - 1);
    return e / (e + 2);
}

/* x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), written as x / (1 + e^-2u): one exp, and
 * no cancellation for negative x. The limit keeps e^-2u finite: gcc divides through an approximate
 * reciprocal under -ffast-math, and that turns 1 / infinity into NaN. */
DTRAIN__INLINE float dtrain__gelu(float x)
{
    int32_t n;
    float u = 0.797884561f * (x + 0.044715f * (x * x * x));
    float p = dtrain__expm1_reduced(dtrain__limit(-2 * u, 80), &n);
    float scale = dtrain__power_of_two(n);
    return x / (1 + (p * scale + scale));
}

/* d/dx of x s with s = 1 / (1 + e^-2u): s + x s (1 - s) 2u'. Outside +-10 it is 0 or 1. */
DTRAIN__INLINE float dtrain__gelu_slope(float x)
{
    int32_t n;
    x = dtrain__limit(x, 10);
    float u = 0.797884561f * (x + 0.044715f * (x * x * x));
    float p = dtrain__expm1_reduced(dtrain__limit(-2 * u, 80), &n);
    float scale = dtrain__power_of_two(n);
    float e = p * scale + scale, s = 1 / (1 + e);
    return s + x * (s * (e * s)) * (1.595769122f * (1 + 0.134145f * (x * x)));
}

/* ---- [S24.3] Matrix multiplication ------------------------------------------------------------
 *
 * C is cut into rectangles, handed to the threads one by one. A rectangle is the work of one thread
 * with buffers of its own, over all of k in blocks of DTRAIN__KC (Goto and van de Geijn, "Anatomy
 * of high-performance matrix multiplication", 2008):
 *
 *          B block (kc, n)                for each block of k:
 *         +----+----+----+                  1. pack A (m, kc) into panels of `mr` rows       -> L2
 *      kc |    | j  |    |                  2. for each panel of `nr` columns of B:
 *         +----+----+----+                  3.   pack it                                     -> L1
 *  +----+ +----+----+----+                  4.   for each panel of A: a tile (mr, nr) of C
 *  |    | |    |    |    |                         stays in registers for kc steps,
 *  +----+ +----+----+----+                         C = alpha * tile + beta * C
 *  | i  | |    |tile|    |                  5.   after the last block, while the tile is in L1:
 *  +----+ +----+----+----+                         bias, activation, rounding
 *
 * A packed panel holds its `width` rows (or columns) side by side, k after k: element (r, p) is at
 * [p * width + r], so the kernel reads both panels from front to back.
 *
 * Every element of C is the same chain of operations wherever the rectangles are cut: k is never
 * split between threads and its blocks depend on k alone. So the bits do not depend on the threads.
 *
 * Packing costs a quarter of a cycle per element, more where it waits for memory, and is repeated
 * by each rectangle: 4 / m + 4 / n of the time and up. It pays even where the order in memory is
 * right: rows of B a power of two apart share a few cache sets and throw each other out of L1. */

enum {
    DTRAIN__KC = 384,  /* cells of k in a block: a panel of B takes 24 KiB of L1, 48 with AVX-512 */
    DTRAIN__MC = 264,  /* rows of a rectangle, 400 KiB of A; multiple of every mr but AMX's */
    DTRAIN__NC = 1536, /* columns of a rectangle; multiple of every nr */
    DTRAIN__MR_MAX = 32,
    DTRAIN__NR_MAX = 32
};

/* How to reach the elements of one operand: element (index, p), index counting rows of op(A) or
 * columns of op(B), p along k. */
typedef struct dtrain__operand {
    const void *data;
    dtrain_dtype dtype;
    int64_t ld;
    int along_k; /* neighbours in memory are neighbours in k */
} dtrain__operand;

typedef void (*dtrain__pack_fn)(float *panel, const dtrain__operand *x, int64_t index, int count,
                                int64_t p, int k);

/* A part of a matrix in memory. */
typedef struct dtrain__rectangle {
    void *data;
    dtrain_dtype dtype;
    int64_t ld;
    int rows, cols;
} dtrain__rectangle;

/* What an instruction set offers. A panel holds cells of 32 bits: an fp32 number, or two bf16 that
 * are neighbours in k. kernel: c (mr, nr) = alpha * a * b + beta * c over `cells`, a packed, b with
 * ldb cells from one k to the next. pack: `count` <= width indices from `index`, k steps from p.
 * finish: bias and activation on `rows` rows of nr elements. slope: c *= activation'(z), both
 * (mr, nr). load, store: between a rectangle and a tile with nr floats a row. begin, end: around
 * the work of a thread; may be NULL. */
typedef struct dtrain__isa {
    const char *name;
    int mr, nr;
    int pair;    /* elements in a cell: 1 (fp32) or 2 (bf16) */
    int unit;    /* a panel has a multiple of so many cells of k; what is too much is 0 */
    int packing; /* what packing an element costs, in multiply-adds */
    void (*kernel)(int64_t cells, const float *a, const float *b, int64_t ldb, float alpha,
                   float beta, float *c, int64_t ldc);
    dtrain__pack_fn pack_a, pack_b;
    void (*finish)(float *c, int64_t ldc, int rows, const float *bias, float *aux,
                   uint32_t activation);
    void (*slope)(float *c, const float *z, uint32_t activation);
    void (*load)(float *tile, const dtrain__rectangle *from);
    void (*store)(const dtrain__rectangle *to, const float *tile);
    void (*begin)(void);
    void (*end)(void);
} dtrain__isa;

static size_t dtrain__gemm_dtype_bytes(dtrain_dtype dtype) { return dtype == DTRAIN_F32 ? 4 : 2; }

static const void *dtrain__gemm_at(const void *data, dtrain_dtype dtype, int64_t index)
{
    return (const char *)data + index * (int64_t)dtrain__gemm_dtype_bytes(dtype);
}

/* ---- Half precision ----
 *
 * bf16 is shifts and adds, which vectorise in any target; fp16 has instructions since F16C, which
 * every processor with AVX2 has. The bits are those of [S23]. */

typedef void (*dtrain__f16_load_fn)(float *dst, const uint16_t *src, int64_t n);
typedef void (*dtrain__f16_store_fn)(uint16_t *dst, const float *src, int64_t n);

static DTRAIN__UNUSED void dtrain__f16_load_scalar(float *dst, const uint16_t *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dtrain_f16_to_f32(src[i]);
}

static DTRAIN__UNUSED void dtrain__f16_store_scalar(uint16_t *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dtrain_f32_to_f16(src[i]);
}

#if DTRAIN__VECTORS && defined(__x86_64__)
DTRAIN__TARGET("avx2,f16c")
static void dtrain__f16_load_f16c(float *dst, const uint16_t *src, int64_t n)
{
    for (; n >= 8; n -= 8, src += 8, dst += 8)
        _mm256_storeu_ps(dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src)));
    if (n <= 0) return;
    uint16_t tail[8] = {0};
    float wide[8];
    memcpy(tail, src, (size_t)n * sizeof *src);
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)tail)));
    memcpy(dst, wide, (size_t)n * sizeof *dst);
}

DTRAIN__TARGET("avx2,f16c")
static void dtrain__f16_store_f16c(uint16_t *dst, const float *src, int64_t n)
{
    for (; n >= 8; n -= 8, src += 8, dst += 8)
        _mm_storeu_si128((__m128i *)(void *)dst,
                         _mm256_cvtps_ph(_mm256_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT));
    if (n <= 0) return;
    uint16_t half[8];
    float tail[8] = {0};
    memcpy(tail, src, (size_t)n * sizeof *src);
    _mm_storeu_si128((__m128i *)(void *)half,
                     _mm256_cvtps_ph(_mm256_loadu_ps(tail), _MM_FROUND_TO_NEAREST_INT));
    memcpy(dst, half, (size_t)n * sizeof *dst);
}
#define DTRAIN__F16_OF_AVX f16c
#else
#define DTRAIN__F16_OF_AVX scalar
#endif

DTRAIN__INLINE void dtrain__gemm_load(float *dst, const void *src, dtrain_dtype dtype, int64_t n,
                                      dtrain__f16_load_fn f16_load)
{
    const uint16_t *half = (const uint16_t *)src;
    if (dtype == DTRAIN_F32) memcpy(dst, src, (size_t)n * sizeof(float));
    else if (dtype == DTRAIN_F16) f16_load(dst, half, n);
    else
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = (uint32_t)half[i] << 16;
            memcpy(dst + i, &bits, sizeof bits);
        }
}

DTRAIN__INLINE void dtrain__gemm_store(void *dst, dtrain_dtype dtype, const float *src, int64_t n,
                                       dtrain__f16_store_fn f16_store)
{
    uint16_t *half = (uint16_t *)dst;
    if (dtype == DTRAIN_F32) memcpy(dst, src, (size_t)n * sizeof(float));
    else if (dtype == DTRAIN_F16) f16_store(half, src, n);
    else
        for (int64_t i = 0; i < n; i++) {
            uint32_t x;
            memcpy(&x, src + i, sizeof x);
            const uint32_t nan = (x & 0x7fffffffu) > 0x7f800000u ? ~0u : 0;
            const uint32_t rounded = x + 0x7fffu + (x >> 16 & 1u);
            half[i] = (uint16_t)(((rounded & ~nan) | ((x | 0x400000u) & nan)) >> 16);
        }
}

/* Whole rows of a tile have a width that the compiler knows. */
DTRAIN__INLINE void dtrain__load_tile(float *tile, int nr, const dtrain__rectangle *from,
                                      dtrain__f16_load_fn f16_load)
{
    for (int r = 0; r < from->rows; r++, tile += nr) {
        const void *row = dtrain__gemm_at(from->data, from->dtype, r * from->ld);
        if (from->cols == nr) dtrain__gemm_load(tile, row, from->dtype, nr, f16_load);
        else dtrain__gemm_load(tile, row, from->dtype, from->cols, f16_load);
    }
}

DTRAIN__INLINE void dtrain__store_tile(const dtrain__rectangle *to, const float *tile, int nr,
                                       dtrain__f16_store_fn f16_store)
{
    for (int r = 0; r < to->rows; r++, tile += nr) {
        void *row = (void *)(uintptr_t)dtrain__gemm_at(to->data, to->dtype, r * to->ld);
        if (to->cols == nr) dtrain__gemm_store(row, to->dtype, tile, nr, f16_store);
        else dtrain__gemm_store(row, to->dtype, tile, to->cols, f16_store);
    }
}

/* ---- Packing ---- */

#if defined(__clang__)
#define DTRAIN__SHUFFLE __builtin_shufflevector
#else
typedef int32_t dtrain__order __attribute__((vector_size(16)));
#define DTRAIN__SHUFFLE(a, b, i, j, k, l) \
    __builtin_shuffle(a, b, __extension__(dtrain__order){i, j, k, l})
#endif

/* Four runs along k become k groups of four: out[p * width + r] = in[r][p]. */
DTRAIN__INLINE void dtrain__interleave4(float *out, int width, const float *const in[4], int k)
{
    int p = 0;
#if DTRAIN__VECTORS
    typedef float vec DTRAIN__VECTOR_OF(4);
    for (; p + 4 <= k; p += 4) {
        vec a = *(const vec *)(in[0] + p), b = *(const vec *)(in[1] + p);
        vec c = *(const vec *)(in[2] + p), d = *(const vec *)(in[3] + p);
        vec ab_low = DTRAIN__SHUFFLE(a, b, 0, 4, 1, 5);
        vec ab_high = DTRAIN__SHUFFLE(a, b, 2, 6, 3, 7);
        vec cd_low = DTRAIN__SHUFFLE(c, d, 0, 4, 1, 5);
        vec cd_high = DTRAIN__SHUFFLE(c, d, 2, 6, 3, 7);
        float *to = out + p * width;
        *(vec *)to = DTRAIN__SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
        *(vec *)(to + width) = DTRAIN__SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
        *(vec *)(to + 2 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
        *(vec *)(to + 3 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
    }
#endif
    for (; p < k; p++)
        for (int r = 0; r < 4; r++) out[p * width + r] = in[r][p];
}

/* The same for the last two rows of a panel whose width is not a multiple of four. */
DTRAIN__INLINE void dtrain__interleave2(float *out, int width, const float *const in[4], int k)
{
    for (int p = 0; p < k; p++) {
        out[p * width] = in[0][p];
        out[p * width + 1] = in[1][p];
    }
}

/* Rows beyond `count` repeat the last one: their products are never stored. */
DTRAIN__INLINE void dtrain__pack_runs(float *panel, int width, const dtrain__operand *x,
                                      int64_t index, int count, int64_t p, int k,
                                      dtrain__f16_load_fn f16_load)
{
    float converted[4][DTRAIN__KC];
    for (int r = 0; r < width; r += 4) {
        const float *in[4];
        for (int i = 0; i < 4; i++) {
            int64_t row = index + (r + i < count ? r + i : count - 1);
            const void *run = dtrain__gemm_at(x->data, x->dtype, row * x->ld + p);
            in[i] = (const float *)run;
            if (x->dtype == DTRAIN_F32) continue;
            dtrain__gemm_load(converted[i], run, x->dtype, k, f16_load);
            in[i] = converted[i];
        }
        if (r + 4 <= width) dtrain__interleave4(panel + r, width, in, k);
        else dtrain__interleave2(panel + r, width, in, k);
    }
}

/* Memory runs along the panel's width: one copy for each k. */
DTRAIN__INLINE void dtrain__pack_steps(float *panel, int width, const dtrain__operand *x,
                                       int64_t index, int count, int64_t p, int k,
                                       dtrain__f16_load_fn f16_load)
{
    const void *from = dtrain__gemm_at(x->data, x->dtype, p * x->ld + index);
    if (x->dtype == DTRAIN_F32 && count == width) {
        const float *step = (const float *)from;
        for (int i = 0; i < k; i++, step += x->ld, panel += width)
            memcpy(panel, step, (size_t)width * sizeof(float));
        return;
    }
    for (int i = 0; i < k; i++, panel += width) {
        if (count == width) dtrain__gemm_load(panel, from, x->dtype, width, f16_load);
        else dtrain__gemm_load(panel, from, x->dtype, count, f16_load);
        for (int r = count; r < width; r++) panel[r] = 0;
        from = dtrain__gemm_at(from, x->dtype, x->ld);
    }
}

DTRAIN__INLINE void dtrain__pack(float *panel, int width, const dtrain__operand *x, int64_t index,
                                 int count, int64_t p, int k, dtrain__f16_load_fn f16_load)
{
    if (x->along_k) dtrain__pack_runs(panel, width, x, index, count, p, k, f16_load);
    else dtrain__pack_steps(panel, width, x, index, count, p, k, f16_load);
}

DTRAIN__INLINE void dtrain__finish(float *c, int64_t ldc, int rows, int nr, const float *bias,
                                   float *aux, uint32_t activation)
{
    for (int r = 0; r < rows; r++, c += ldc) {
        if (bias)
            for (int j = 0; j < nr; j++) c[j] += bias[j];
        if (aux) memcpy(aux + r * ldc, c, (size_t)nr * sizeof(float));
        if (activation == DTRAIN_ACT_RELU)
            for (int j = 0; j < nr; j++) c[j] = c[j] < 0 ? 0 : c[j];
        else if (activation == DTRAIN_ACT_GELU)
            for (int j = 0; j < nr; j++) c[j] = dtrain__gelu(c[j]);
    }
}

DTRAIN__INLINE void dtrain__slope(float *c, const float *z, int count, uint32_t activation)
{
    if (activation == DTRAIN_ACT_RELU)
        for (int i = 0; i < count; i++) c[i] = z[i] > 0 ? c[i] : 0;
    else if (activation == DTRAIN_ACT_GELU)
        for (int i = 0; i < count; i++) c[i] *= dtrain__gelu_slope(z[i]);
}

/* ---- The kernel ----
 *
 * `rows` times two vectors of accumulators, each with a name of its own: as an array they would be
 * unrolled too late for the compiler to keep them in registers. Per step two loads of B and, for
 * each row, one broadcast of A and two multiply-adds. Unrolling hides the loop behind 12 of
 * them (5 % on Zen 3); with the 24 of AVX-512 it gains nothing and gcc 12 spills a vector. */

#define DTRAIN__ROWS4(DO) DO(0) DO(1) DO(2) DO(3)
#define DTRAIN__ROWS6(DO) DTRAIN__ROWS4(DO) DO(4) DO(5)
#define DTRAIN__ROWS8(DO) DTRAIN__ROWS6(DO) DO(6) DO(7)
#define DTRAIN__ROWS12(DO) DTRAIN__ROWS8(DO) DO(8) DO(9) DO(10) DO(11)

#define DTRAIN__ROW_ZERO(r)            \
    vec left##r = {0}, right##r = {0}; \
    __builtin_prefetch(c + r * ldc);
#define DTRAIN__ROW_STEP(r)   \
    left##r += a[r] * b_left; \
    right##r += a[r] * b_right;
#define DTRAIN__ROW_SET(r)                   \
    *(vec *)(c + r * ldc) = alpha * left##r; \
    *(vec *)(c + r * ldc + lanes) = alpha * right##r;
#define DTRAIN__ROW_ADD(r)                                                  \
    *(vec *)(c + r * ldc) = alpha * left##r + beta * *(vec *)(c + r * ldc); \
    *(vec *)(c + r * ldc + lanes) = alpha * right##r + beta * *(vec *)(c + r * ldc + lanes);

/* The functions of an instruction set but the kernel and the packing. */
#define DTRAIN__DEFINE_TILES(id, target, rows, nr, f16)                                        \
    target static void dtrain__finish_##id(float *c, int64_t ldc, int row_count,               \
                                           const float *bias, float *aux, uint32_t activation) \
    {                                                                                          \
        dtrain__finish(c, ldc, row_count, nr, bias, aux, activation);                          \
    }                                                                                          \
    target static void dtrain__slope_##id(float *c, const float *z, uint32_t activation)       \
    {                                                                                          \
        dtrain__slope(c, z, (rows) * (nr), activation);                                        \
    }                                                                                          \
    target static void dtrain__load_##id(float *tile, const dtrain__rectangle *from)           \
    {                                                                                          \
        dtrain__load_tile(tile, nr, from, dtrain__f16_load_##f16);                             \
    }                                                                                          \
    target static void dtrain__store_##id(const dtrain__rectangle *to, const float *tile)      \
    {                                                                                          \
        dtrain__store_tile(to, tile, nr, dtrain__f16_store_##f16);                             \
    }

#define DTRAIN__DEFINE_ISA(...) \
    DTRAIN__DEFINE_ISA2(__VA_ARGS__) /* expands f16 before it is glued */
#define DTRAIN__DEFINE_ISA2(id, target, vector_lanes, rows, unroll, f16)                           \
    target static void dtrain__kernel_##id(int64_t k, const float *a, const float *b, int64_t ldb, \
                                           float alpha, float beta, float *c, int64_t ldc)         \
    {                                                                                              \
        enum { lanes = vector_lanes };                                                             \
        typedef float vec DTRAIN__VECTOR_OF(lanes);                                                \
        DTRAIN__ROWS##rows(DTRAIN__ROW_ZERO) unroll for (; k > 0; k--, a += rows, b += ldb)        \
        {                                                                                          \
            vec b_left = *(const vec *)b, b_right = *(const vec *)(b + lanes);                     \
            DTRAIN__ROWS##rows(DTRAIN__ROW_STEP)                                                   \
        }                                                                                          \
        if (beta == 0) {                                                                           \
            DTRAIN__ROWS##rows(DTRAIN__ROW_SET)                                                    \
        } else {                                                                                   \
            DTRAIN__ROWS##rows(DTRAIN__ROW_ADD)                                                    \
        }                                                                                          \
    }                                                                                              \
    target static void dtrain__pack_a_##id(float *panel, const dtrain__operand *x, int64_t index,  \
                                           int count, int64_t p, int k)                            \
    {                                                                                              \
        dtrain__pack(panel, rows, x, index, count, p, k, dtrain__f16_load_##f16);                  \
    }                                                                                              \
    target static void dtrain__pack_b_##id(float *panel, const dtrain__operand *x, int64_t index,  \
                                           int count, int64_t p, int k)                            \
    {                                                                                              \
        dtrain__pack(panel, 2 * vector_lanes, x, index, count, p, k, dtrain__f16_load_##f16);      \
    }                                                                                              \
    DTRAIN__DEFINE_TILES(id, target, rows, 2 * vector_lanes, f16)                                  \
    static const dtrain__isa dtrain__isa_##id = {#id,                                              \
                                                 rows,                                             \
                                                 2 * vector_lanes,                                 \
                                                 1,                                                \
                                                 1,                                                \
                                                 4,                                                \
                                                 dtrain__kernel_##id,                              \
                                                 dtrain__pack_a_##id,                              \
                                                 dtrain__pack_b_##id,                              \
                                                 dtrain__finish_##id,                              \
                                                 dtrain__slope_##id,                               \
                                                 dtrain__load_##id,                                \
                                                 dtrain__store_##id,                               \
                                                 NULL,                                             \
                                                 NULL};

#if DTRAIN__VECTORS && (defined(__x86_64__) || defined(__i386__))
DTRAIN__DEFINE_ISA(avx512, DTRAIN__TARGET("avx512f,fma"), 16, 12, DTRAIN__UNROLL_NOT,
                   DTRAIN__F16_OF_AVX)
DTRAIN__DEFINE_ISA(avx2, DTRAIN__TARGET("avx2,fma"), 8, 6, DTRAIN__UNROLL_TWICE, DTRAIN__F16_OF_AVX)
#endif
#if DTRAIN__VECTORS && defined(__aarch64__)
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 4, 8, DTRAIN__UNROLL_NOT, scalar)
#elif DTRAIN__VECTORS
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 4, 4, DTRAIN__UNROLL_NOT, scalar)
#else
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 1, 4, DTRAIN__UNROLL_NOT, scalar)
#endif

/* ---- Pairs of bf16 ----
 *
 * Where both operands are bf16 a panel's cell holds two neighbours in k, and one instruction
 * multiplies and adds both: VDPBF16PS of AVX512_BF16, a lane of a vector; TDPBF16PS of AMX, a tile
 * of 16 x 16 sums at once. Products are exact and sums are fp32, rounded to nearest even; denormals
 * count as zero, in and out, whatever MXCSR says. The order of additions is the instruction's own,
 * so the bits differ between the two and from those of widened operands; on one machine they depend
 * on the row of A, the column of B and k alone, like those of the other kernels.
 *
 *     B, and A for VDPBF16PS               A for AMX: tiles of 16 rows x 16 cells,
 *     [cell][width], as above              [cell / 16][row / 16][16 rows][16 cells]
 *
 * An odd end of k, and for AMX what is missing to 16 cells, is filled with zeros on both sides.
 *
 * AMX has state that the system gives to processes that ask (arch_prctl; signal frames grow by
 * 8 KiB), and per thread a configuration: loaded when a thread starts work on a product and
 * released after it, so that nobody else's context switches carry tiles. */

#if DTRAIN__VECTORS && defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11) && !defined(__CUDACC__)
#define DTRAIN__PAIRS 1
#else
#define DTRAIN__PAIRS 0
#endif

#if DTRAIN__PAIRS
#include <cpuid.h>
#include <sys/syscall.h>

#define DTRAIN__ON_PAIRS \
    DTRAIN__TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#define DTRAIN__ON_AMX \
    DTRAIN__TARGET("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define DTRAIN__PAIRS_INLINE \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl")))

/* Full zero-masks: g++ warns of the undefined value that the plain intrinsic starts from. */
#define DTRAIN__LOW32(a, b) _mm512_maskz_unpacklo_epi32(0xffff, a, b)
#define DTRAIN__HIGH32(a, b) _mm512_maskz_unpackhi_epi32(0xffff, a, b)
#define DTRAIN__LOW64(a, b) _mm512_maskz_unpacklo_epi64(0xff, a, b)
#define DTRAIN__HIGH64(a, b) _mm512_maskz_unpackhi_epi64(0xff, a, b)
#define DTRAIN__LANES(a, b, which) _mm512_maskz_shuffle_i32x4(0xffff, a, b, which)

/* 16 x 16 cells: v[r] holds a row before and a column after. Within the four lanes of 128 bits
 * first, then the lanes. */
DTRAIN__PAIRS_INLINE void dtrain__transpose16(__m512i v[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = DTRAIN__LOW32(v[i], v[i + 1]);
        t[i + 1] = DTRAIN__HIGH32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* v[i + j], lane q: column 4 q + j of rows i ... i + 3 */
        v[i] = DTRAIN__LOW64(t[i], t[i + 2]);
        v[i + 1] = DTRAIN__HIGH64(t[i], t[i + 2]);
        v[i + 2] = DTRAIN__LOW64(t[i + 1], t[i + 3]);
        v[i + 3] = DTRAIN__HIGH64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even = DTRAIN__LANES(v[j], v[4 + j], 0x88);
        const __m512i odd = DTRAIN__LANES(v[j], v[4 + j], 0xdd);
        const __m512i even2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0x88);
        const __m512i odd2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0xdd);
        t[j] = DTRAIN__LANES(even, even2, 0x88);
        t[4 + j] = DTRAIN__LANES(odd, odd2, 0x88);
        t[8 + j] = DTRAIN__LANES(even, even2, 0xdd);
        t[12 + j] = DTRAIN__LANES(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; i++) v[i] = t[i];
}

DTRAIN__PAIRS_INLINE const uint16_t *dtrain__bf16_at(const dtrain__operand *x, int64_t row,
                                                     int64_t column)
{
    return (const uint16_t *)x->data + row * x->ld + column;
}

/* 16 cells of one run along k, of which the first `k` elements exist. */
DTRAIN__PAIRS_INLINE __m512i dtrain__cells_of_run(const uint16_t *run, int k)
{
    return k >= 32 ? _mm512_loadu_si512(run)
                   : _mm512_maskz_loadu_epi16(k > 0 ? (1u << k) - 1u : 0u, run);
}

/* One cell of each of 16 neighbours, of which the first `count` exist; k: steps left. */
DTRAIN__PAIRS_INLINE __m512i dtrain__cells_of_steps(const uint16_t *step, int64_t ld, int count,
                                                    int k)
{
    const __mmask16 some = (__mmask16)(count >= 16 ? 0xffffu : count > 0 ? (1u << count) - 1u : 0u);
    const __m512i first = _mm512_maskz_cvtepu16_epi32(
        0xffff, _mm256_maskz_loadu_epi16(k > 0 ? some : (__mmask16)0, step));
    if (k < 2) return first;
    const __m512i second =
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(some, step + ld));
    return _mm512_maskz_or_epi32(0xffff, first, _mm512_maskz_slli_epi32(0xffff, second, 16));
}

/* The 16 x 16 cells from index and p on: v[c] is cell c of 16 indices where `by_cell`, else v[r] is
 * 16 cells of index r. What the operand does not have, count indices and k steps, is 0. */
DTRAIN__PAIRS_INLINE void dtrain__cells(__m512i v[16], const dtrain__operand *x, int64_t index,
                                        int count, int64_t p, int k, int by_cell)
{
    if (x->along_k)
        for (int r = 0; r < 16; r++)
            v[r] = r < count ? dtrain__cells_of_run(dtrain__bf16_at(x, index + r, p), k)
                             : _mm512_setzero_si512();
    else
        for (int c = 0; c < 16; c++) {
            const int left = k - 2 * c;
            v[c] = left > 0 ? dtrain__cells_of_steps(dtrain__bf16_at(x, p + 2 * c, index), x->ld,
                                                     count, left)
                            : _mm512_setzero_si512();
        }
    if (x->along_k == by_cell) dtrain__transpose16(v);
}

/* Cells side by side, `cells` of them. */
DTRAIN__PAIRS_INLINE void dtrain__pack_by_cell(float *panel, int width, const dtrain__operand *x,
                                               int64_t index, int count, int64_t p, int k,
                                               int cells)
{
    for (int c = 0; c < cells; c += 16)
        for (int r = 0; r < width; r += 16) {
            const int lanes = width - r < 16 ? width - r : 16,
                      some = cells - c < 16 ? cells - c : 16;
            float *to = panel + c * width + r;
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p + 2 * c, k - 2 * c, 1);
            if (lanes == 16 && some == 16)
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * width, v[i]);
            else
                for (int i = 0; i < 16; i++)
                    if (i < some)
                        _mm512_mask_storeu_epi32(to + i * width, (__mmask16)((1u << lanes) - 1u),
                                                 v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 12, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    for (; k > 0; k -= 32, p += 32)
        for (int r = 0; r < 32; r += 16, panel += 256) {
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p, k, 0);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + i * 16, v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 31) / 32 * 16);
}

/* The kernel of AVX-512 with pairs for numbers. */
#define DTRAIN__PAIR_STEP(r)                                                         \
    {                                                                                \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(cells_a[r]);               \
        left##r = (vec)_mm512_dpbf16_ps((__m512)left##r, pair, (__m512bh)b_left);    \
        right##r = (vec)_mm512_dpbf16_ps((__m512)right##r, pair, (__m512bh)b_right); \
    }
DTRAIN__ON_PAIRS static void dtrain__kernel_vdpbf16(int64_t cells, const float *a, const float *b,
                                                    int64_t ldb, float alpha, float beta, float *c,
                                                    int64_t ldc)
{
    enum { lanes = 16 };
    typedef float vec DTRAIN__VECTOR_OF(16);
    typedef int32_t cell __attribute__((may_alias));
    DTRAIN__ROWS12(DTRAIN__ROW_ZERO)
    for (; cells > 0; cells--, a += 12, b += ldb) {
        const __m512i b_left = _mm512_loadu_si512(b), b_right = _mm512_loadu_si512(b + 16);
        const cell *cells_a = (const cell *)(const void *)a;
        DTRAIN__ROWS12(DTRAIN__PAIR_STEP)
    }
    if (beta == 0) {
        DTRAIN__ROWS12(DTRAIN__ROW_SET)
    } else {
        DTRAIN__ROWS12(DTRAIN__ROW_ADD)
    }
}

/* Eight tiles of 16 rows of 64 bytes: palette, start row, reserved, bytes of each, rows of each. */
static const uint8_t dtrain__amx_config[64] __attribute__((aligned(64))) = {
    1,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  0,  0, 0, 0, 0, 64, 0, 64, 0, 64, 0,
    64, 0, 64, 0, 64, 0,  64, 0,  64, 0,  0,  0,  0, 0, 0, 0, 0,  0, 0,  0, 0,  0,
    0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0,  0, 0,  0};

DTRAIN__ON_AMX static void dtrain__amx_begin(void) { _tile_loadconfig(dtrain__amx_config); }
DTRAIN__ON_AMX static void dtrain__amx_end(void) { _tile_release(); }

/* 32 x 32 of C in tiles 0 to 3. Without scaling the tiles start from C and end there. */
DTRAIN__ON_AMX static void dtrain__kernel_amx(int64_t cells, const float *a, const float *b,
                                              int64_t ldb, float alpha, float beta, float *c,
                                              int64_t ldc)
{
    const int64_t b_row = ldb * 4, c_row = ldc * 4;
    const bool plain = alpha == 1 && (beta == 0 || beta == 1);
    for (int r = 0; r < 32; r++) {
        __builtin_prefetch(c + r * ldc, 1);
        __builtin_prefetch(c + r * ldc + 16, 1);
    }
    if (plain && beta == 1) {
        _tile_loadd(0, c, c_row);
        _tile_loadd(1, c + 16, c_row);
        _tile_loadd(2, c + 16 * ldc, c_row);
        _tile_loadd(3, c + 16 * ldc + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; cells > 0; cells -= 16, a += 512, b += 16 * ldb) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, b_row);
        _tile_loadd(7, b + 16, b_row);
        _tile_loadd(5, a + 256, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[32 * 32] __attribute__((aligned(64)));
    float *to = plain ? c : sums;
    const int64_t ld = plain ? ldc : 32;
    _tile_stored(0, to, ld * 4);
    _tile_stored(1, to + 16, ld * 4);
    _tile_stored(2, to + 16 * ld, ld * 4);
    _tile_stored(3, to + 16 * ld + 16, ld * 4);
    if (plain) return;
    for (int r = 0; r < 32; r++, c += ldc)
        for (int j = 0; j < 32; j++)
            c[j] = alpha * sums[r * 32 + j] + (beta == 0 ? 0 : beta * c[j]);
}

DTRAIN__DEFINE_TILES(vdpbf16, DTRAIN__ON_PAIRS, 12, 32, f16c)
DTRAIN__DEFINE_TILES(amx, DTRAIN__ON_PAIRS, 32, 32, f16c)

static const dtrain__isa dtrain__isa_vdpbf16 = {"avx512_bf16",
                                                12,
                                                32,
                                                2,
                                                1,
                                                8,
                                                dtrain__kernel_vdpbf16,
                                                dtrain__pack_a_vdpbf16,
                                                dtrain__pack_b_vdpbf16,
                                                dtrain__finish_vdpbf16,
                                                dtrain__slope_vdpbf16,
                                                dtrain__load_vdpbf16,
                                                dtrain__store_vdpbf16,
                                                NULL,
                                                NULL};
static const dtrain__isa dtrain__isa_amx = {"amx_bf16",
                                            32,
                                            32,
                                            2,
                                            16,
                                            32,
                                            dtrain__kernel_amx,
                                            dtrain__pack_a_amx,
                                            dtrain__pack_b_amx,
                                            dtrain__finish_amx,
                                            dtrain__slope_amx,
                                            dtrain__load_amx,
                                            dtrain__store_amx,
                                            dtrain__amx_begin,
                                            dtrain__amx_end};

static bool dtrain__has_vdpbf16(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

/* The processor has tiles, the system saves them, and this process may use them: it asks for that
 * here, and again is harmless. The answer is no, for example, where alternative signal stacks are
 * too small for the larger frames. */
static bool dtrain__has_amx(void)
{
    enum { OSXSAVE = 1 << 27, TILE_AND_BF16 = 1 << 24 | 1 << 22, TILE_STATE = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!dtrain__has_vdpbf16() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILE_STATE) != TILE_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & TILE_AND_BF16) == TILE_AND_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif /* DTRAIN__PAIRS */

/* NULL: products of bf16 are computed in fp32. AMD starts a VDPBF16PS as often as a multiply-add;
 * Intel every other cycle or less, a quarter as often (62 against 130 GFLOP/s of the widened
 * product on Emerald Rapids), and has AMX. */
static const dtrain__isa *dtrain__pairs_select(void)
{
#if DTRAIN__PAIRS
    if (dtrain__has_amx()) return &dtrain__isa_amx;
    if (dtrain__has_vdpbf16() && __builtin_cpu_is("amd")) return &dtrain__isa_vdpbf16;
#endif
    return NULL;
}

/* The best one this machine runs. */
static const dtrain__isa *dtrain__isa_select(void)
{
#if DTRAIN__VECTORS && (defined(__x86_64__) || defined(__i386__))
    if (__builtin_cpu_supports("avx512f")) return &dtrain__isa_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &dtrain__isa_avx2;
#endif
    return &dtrain__isa_generic;
}

/* ---- The driver ---- */

/* One rank's buffers: allocated by the first call, enlarged when more threads or a half-precision C
 * ask for it, freed by dtrain__gemm_workspace_free. Zero-initialise; allocator, and isa with or
 * without pairs, may be preset. */
typedef struct dtrain__gemm_workspace {
    const dtrain_allocator *allocator; /* NULL = malloc */
    const dtrain__isa *isa;
    const dtrain__isa *pairs; /* for A and B in bf16; NULL beside an isa: they are widened */
    void *memory;
    size_t bytes;
} dtrain__gemm_workspace;

typedef struct dtrain__gemm_job {
    const dtrain_gemm_args *args;
    const dtrain__isa *isa;
    dtrain__operand a, b;
    int64_t k, k_step;      /* k is 0 when alpha is */
    int64_t m_most;         /* rows of a rectangle whose A fits the buffer */
    int64_t m_step, n_step; /* rectangle; multiples of mr and nr */
    int64_t rows, cols;     /* rectangles */
    int64_t next;           /* atomic: rectangles handed out */
    char *memory;
    size_t slot_bytes; /* one thread's part of memory */
    int needs_partial; /* C cannot hold sums between blocks of k */
} dtrain__gemm_job;

/* One block of k in one rectangle of C: where it lies and what the thread works with. */
typedef struct dtrain__gemm_pass {
    const dtrain__gemm_job *job;
    int64_t i0, i1, j0, j1;
    int64_t p;
    int k, cells; /* k in cells of the panels */
    int first, last;
    float *a_block, *b_panel, *partial;
} dtrain__gemm_pass;

static int64_t dtrain__gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t dtrain__gemm_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t dtrain__gemm_round(int64_t a, int64_t b) { return dtrain__gemm_ceil(a, b) * b; }

static dtrain__rectangle dtrain__rectangle_at(void *data, dtrain_dtype dtype, int64_t ld, int rows,
                                              int cols)
{
    dtrain__rectangle x;
    x.data = data;
    x.dtype = dtype;
    x.ld = ld;
    x.rows = rows;
    x.cols = cols;
    return x;
}

/* Bias, aux and activation, or the slope of a backward pass, on a tile; aux is a part of x->aux. */
static void dtrain__gemm_finish_copied(const dtrain__isa *isa, const dtrain_gemm_args *x, int64_t j,
                                       const dtrain__rectangle *aux, float *tile)
{
    float other[DTRAIN__MR_MAX * DTRAIN__NR_MAX], bias[DTRAIN__NR_MAX] = {0};
    if (x->flags & DTRAIN_GEMM_ACT_BACKWARD) {
        memset(other, 0, (size_t)(isa->mr * isa->nr) * sizeof *other);
        isa->load(other, aux);
        isa->slope(tile, other, x->activation);
        return;
    }
    if (x->bias) memcpy(bias, x->bias + j, (size_t)aux->cols * sizeof *bias);
    isa->finish(tile, isa->nr, aux->rows, x->bias ? bias : NULL, x->aux ? other : NULL,
                x->activation);
    if (x->aux) isa->store(aux, other);
}

/* A tile that is cut off by the edge, or that C stores in half precision, is computed in `tile`.
 * Rows of `tile` beyond the edge are computed and dropped. */
static void dtrain__gemm_copied_tile(const dtrain__gemm_pass *pass, int64_t i, int64_t j,
                                     const float *a, const float *b, int64_t ldb)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    const int rows = (int)dtrain__gemm_min(isa->mr, pass->i1 - i);
    const int cols = (int)dtrain__gemm_min(isa->nr, pass->j1 - j);
    const float beta = pass->first ? x->beta : 1;
    float tile[DTRAIN__MR_MAX * DTRAIN__NR_MAX];

    void *at = (void *)(uintptr_t)dtrain__gemm_at(x->c, x->c_dtype, i * x->ldc + j);
    const dtrain__rectangle c = dtrain__rectangle_at(at, x->c_dtype, x->ldc, rows, cols);
    const dtrain__rectangle partial =
        dtrain__rectangle_at(pass->partial + (i - pass->i0) * job->n_step + (j - pass->j0),
                             DTRAIN_F32, job->n_step, rows, cols);

    if (beta != 0) {
        memset(tile, 0, (size_t)(isa->mr * isa->nr) * sizeof *tile);
        isa->load(tile, job->needs_partial && !pass->first ? &partial : &c);
    }
    isa->kernel(pass->cells, a, b, ldb, x->alpha, beta, tile, isa->nr);
    if (pass->last) {
        at = x->aux;
        if (at) at = (void *)(uintptr_t)dtrain__gemm_at(at, x->c_dtype, i * x->ldc + j);
        const dtrain__rectangle aux = dtrain__rectangle_at(at, x->c_dtype, x->ldc, rows, cols);
        dtrain__gemm_finish_copied(isa, x, j, &aux, tile);
    }
    isa->store(job->needs_partial && !pass->last ? &partial : &c, tile);
}

static void dtrain__gemm_tile(const dtrain__gemm_pass *pass, int64_t i, int64_t j, const float *a,
                              const float *b, int64_t ldb)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    if (x->c_dtype != DTRAIN_F32 || pass->i1 - i < isa->mr || pass->j1 - j < isa->nr) {
        dtrain__gemm_copied_tile(pass, i, j, a, b, ldb);
        return;
    }
    int64_t at = i * x->ldc + j;
    float *c = (float *)x->c + at;
    isa->kernel(pass->cells, a, b, ldb, x->alpha, pass->first ? x->beta : 1, c, x->ldc);
    if (pass->last && (x->bias || x->aux || x->activation))
        isa->finish(c, x->ldc, isa->mr, x->bias ? x->bias + j : NULL,
                    x->aux ? (float *)x->aux + at : NULL, x->activation);
}

/* Where A is stored transposed, 16 cells of k at a time: their rows of memory stay in L1 while all
 * the panels take their few elements of each. */
static void dtrain__gemm_pack_a_block(const dtrain__gemm_pass *pass)
{
    const dtrain__gemm_job *job = pass->job;
    int mr = job->isa->mr;
    int chunk = job->a.along_k ? pass->k : 16 * job->isa->pair;
    for (int p = 0; p < pass->k; p += chunk) {
        int steps = pass->k - p < chunk ? pass->k - p : chunk;
        float *panel = pass->a_block + p / job->isa->pair * mr;
        for (int64_t i = pass->i0; i < pass->i1; i += mr, panel += mr * pass->cells)
            job->isa->pack_a(panel, &job->a, i, (int)dtrain__gemm_min(mr, pass->i1 - i),
                             pass->p + p, steps);
    }
}

static void dtrain__gemm_block(const dtrain__gemm_pass *pass)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain__isa *isa = job->isa;
    int mr = isa->mr, nr = isa->nr;
    /* Two panels of A do not repay a copy of B that lies in the right order already. */
    int in_place = !job->b.along_k && job->b.dtype == DTRAIN_F32 && pass->i1 - pass->i0 <= 2 * mr;
    dtrain__gemm_pack_a_block(pass);
    for (int64_t j = pass->j0; j < pass->j1; j += nr) {
        const float *b = pass->b_panel, *a = pass->a_block;
        int64_t ldb = nr;
        if (in_place && pass->j1 - j >= nr) {
            b = (const float *)job->b.data + pass->p * job->b.ld + j;
            ldb = job->b.ld;
        } else {
            isa->pack_b(pass->b_panel, &job->b, j, (int)dtrain__gemm_min(nr, pass->j1 - j), pass->p,
                        pass->k);
        }
        for (int64_t i = pass->i0; i < pass->i1; i += mr, a += mr * pass->cells)
            dtrain__gemm_tile(pass, i, j, a, b, ldb);
    }
}

static void dtrain__gemm_task(void *ctx, int index, int count)
{
    dtrain__gemm_job *job = (dtrain__gemm_job *)ctx;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    dtrain__gemm_pass pass;
    (void)count;
    memset(&pass, 0, sizeof pass);
    pass.job = job;
    pass.a_block = (float *)(void *)(job->memory + (size_t)index * job->slot_bytes);
    pass.b_panel = pass.a_block + DTRAIN__MC * DTRAIN__KC;
    pass.partial = pass.b_panel + DTRAIN__NR_MAX * DTRAIN__KC;
    if (isa->begin) isa->begin();
    for (;;) {
        int64_t at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (at >= job->rows * job->cols) break;
        pass.i0 = at % job->rows * job->m_step;
        pass.j0 = at / job->rows * job->n_step;
        pass.i1 = dtrain__gemm_min(pass.i0 + job->m_step, x->m);
        pass.j1 = dtrain__gemm_min(pass.j0 + job->n_step, x->n);
        pass.p = 0;
        do { /* once even for k == 0: beta, bias and activation remain */
            pass.k = (int)dtrain__gemm_min(job->k_step, job->k - pass.p);
            pass.cells = (int)dtrain__gemm_round(dtrain__gemm_ceil(pass.k, isa->pair), isa->unit);
            pass.first = pass.p == 0;
            pass.last = pass.p + pass.k == job->k;
            dtrain__gemm_block(&pass);
            pass.p += pass.k;
        } while (pass.p < job->k);
    }
    if (isa->end) isa->end();
}

/* Equal blocks of k, whole cells, and the rows of A that fit the buffer with them. */
static void dtrain__gemm_cut_k(dtrain__gemm_job *job)
{
    const int64_t most = DTRAIN__KC * job->isa->pair, mr = job->isa->mr;
    const int64_t whole = job->isa->pair * job->isa->unit;
    job->k_step = dtrain__gemm_ceil(job->k, dtrain__gemm_ceil(job->k, most) + (job->k == 0));
    job->k_step = dtrain__gemm_round(job->k_step, whole);
    job->needs_partial = job->args->c_dtype != DTRAIN_F32 && job->k > job->k_step;
    job->m_most = DTRAIN__MC / mr * mr;
    if (job->isa->pair == 1 || job->needs_partial || job->k == 0) return;
    /* Cheap products repay taller blocks, which pack B less often. */
    job->m_most = DTRAIN__MC * DTRAIN__KC / (job->k_step / job->isa->pair) / mr * mr;
    if (job->m_most > 4 * DTRAIN__MC / mr * mr) job->m_most = 4 * DTRAIN__MC / mr * mr;
}

/* Cuts C. Of the grids that fit the buffers and give every thread the same number of rectangles it
 * takes the one with the least work per thread: a rectangle's multiplications and packing. */
static void dtrain__gemm_cut(dtrain__gemm_job *job, int threads)
{
    int64_t m = job->args->m, n = job->args->n, mr = job->isa->mr, nr = job->isa->nr;
    int64_t best = INT64_MAX, fewest = dtrain__gemm_ceil(m, job->m_most);
    for (int64_t extra = 0; extra < threads; extra++) {
        int64_t m_step = dtrain__gemm_round(dtrain__gemm_ceil(m, fewest + extra), mr);
        int64_t rows = dtrain__gemm_ceil(m, m_step);
        int64_t cols = dtrain__gemm_ceil(n, DTRAIN__NC);
        while (rows * cols % threads && rows * cols < 8 * threads) cols++;
        int64_t n_step = dtrain__gemm_round(dtrain__gemm_ceil(n, cols), nr);
        cols = dtrain__gemm_ceil(n, n_step);
        int64_t rounds = dtrain__gemm_ceil(rows * cols, threads);
        int64_t cost = rounds * (m_step * n_step + job->isa->packing * (m_step + n_step));
        if (cost >= best) continue;
        best = cost;
        job->m_step = m_step;
        job->n_step = n_step;
        job->rows = rows;
        job->cols = cols;
    }
}

static void dtrain__gemm_workspace_free(dtrain__gemm_workspace *ws)
{
    dtrain_allocator allocator = dtrain__resolve_allocator(ws->allocator);
    dtrain__free(&allocator, ws->memory, ws->bytes, 1);
    ws->memory = NULL;
    ws->bytes = 0;
}

static int dtrain__gemm_reserve(dtrain__gemm_workspace *ws, dtrain__gemm_job *job, int threads)
{
    dtrain_allocator allocator = dtrain__resolve_allocator(ws->allocator);
    size_t floats = (DTRAIN__MC + DTRAIN__NR_MAX) * DTRAIN__KC;
    if (job->needs_partial) floats += DTRAIN__MC * DTRAIN__NC;
    job->slot_bytes = floats * sizeof(float);
    size_t bytes = job->slot_bytes * (size_t)threads + 64;
    if (bytes > ws->bytes) {
        dtrain__gemm_workspace_free(ws);
        ws->memory = dtrain__alloc(&allocator, bytes, 1, "the GEMM workspace");
        if (!ws->memory) return ENOMEM;
        ws->bytes = bytes;
    }
    job->memory = (char *)(((uintptr_t)ws->memory + 63) & ~(uintptr_t)63);
    return 0;
}

static void dtrain__gemm_select(dtrain__gemm_workspace *ws)
{
    if (ws->isa) return;
    ws->isa = dtrain__isa_select();
    ws->pairs = dtrain__pairs_select();
}

/* Returns 0 or ENOMEM. Called by one thread at a time for one workspace. */
DTRAIN__UNUSED static int dtrain__gemm(dtrain__pool *pool, dtrain__gemm_workspace *ws,
                                       const dtrain_gemm_args *args)
{
    dtrain__gemm_job job;
    if (args->m <= 0 || args->n <= 0) return 0;
    dtrain__gemm_select(ws);
    memset(&job, 0, sizeof job);
    job.args = args;
    job.isa = ws->isa;
    if (ws->pairs && args->a_dtype == DTRAIN_BF16 && args->b_dtype == DTRAIN_BF16)
        job.isa = ws->pairs;
    job.a.data = args->a;
    job.a.dtype = args->a_dtype;
    job.a.ld = args->lda;
    job.a.along_k = !(args->flags & DTRAIN_GEMM_TRANS_A);
    job.b.data = args->b;
    job.b.dtype = args->b_dtype;
    job.b.ld = args->ldb;
    job.b.along_k = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;

    job.k = args->alpha == 0 || args->k < 0 ? 0 : args->k;
    dtrain__gemm_cut_k(&job);

    /* Waking the others costs more than a quarter of a million multiply-adds. */
    int64_t tiny = 1 << 18;
    if (args->m * args->n <= tiny && args->m * args->n * job.k <= tiny) pool = NULL;
    int threads = pool ? pool->thread_count : 1;
    dtrain__gemm_cut(&job, threads);
    int error = dtrain__gemm_reserve(ws, &job, threads);
    if (error) return error;
    dtrain__parallel(pool, dtrain__gemm_task, &job);
    return 0;
}
/* ---- [S24.4] Kernels: how work is cut ---------------------------------------------------------
 *
 *     launcher (below)      checks what only it can see, cuts the work, wakes the pool
 *       -> dtrain__job        what is common to all threads of one kernel
 *         -> range function     the arithmetic on [begin, end), one per instruction set
 *
 * The bits of a result depend on the instruction set, never on the number of threads: a sum is
 * either taken by one thread alone (rows, columns, heads) or over chunks whose size follows from
 * the arguments, whose sums are then added in order. */

struct dtrain__job;
typedef void (*dtrain__range_fn)(struct dtrain__job *job, int64_t begin, int64_t end, int index);

typedef struct dtrain__job {
    const void *args; /* of the kernel */
    dtrain__range_fn range;
    int64_t total, unit;        /* [0, total) is cut at multiples of unit */
    bool dynamic;               /* items of unequal cost: handed out one by one */
    int64_t next;               /* atomic: items handed out */
    int64_t chunk, chunk_count; /* of ordered partial sums */
    float *scratch;
    int64_t slot; /* floats of scratch per thread */
    double *sums; /* (chunk_count) */
} dtrain__job;

typedef struct dtrain__kernels {
    const char *name;
    dtrain__range_fn activate, activation_backward;
    dtrain__range_fn layernorm, layernorm_backward, layernorm_params;
    dtrain__range_fn embedding, embedding_backward;
    dtrain__range_fn attention, attention_backward;
    dtrain__range_fn cross_entropy, cross_entropy_backward;
    dtrain__range_fn add, axpby, dropout, sum, convert, adamw, sgd;
} dtrain__kernels;

/* One tensor of an optimizer step, and the numbers of this step. One of adamw and sgd is set. */
typedef struct dtrain__update {
    const dtrain_adamw_args *adamw;
    const dtrain_sgd_args *sgd;
    const dtrain_optimizer_tensor *tensor;
    uint64_t stream; /* of stochastic rounding: the tensor's place in the list */
    uint64_t seed;
    bool stochastic;
    dtrain_step_scalars now;
} dtrain__update;

/* low = value, for elements [begin, end). */
static void dtrain__round_low(const dtrain__update *update, int64_t begin, int64_t end);

#define DTRAIN__ATTENTION_BLOCK 64 /* queries and keys of an attention block */
#define DTRAIN__SUM_CHUNKS 256
#define DTRAIN__LINE 16 /* floats of a cache line: threads do not share lines */

/* Elements below which waking threads costs more than it gives; tests set it to 0. */
#ifndef DTRAIN__SMALL
#define DTRAIN__SMALL 16384
#endif

/* Which part of a product of attention is not zero. */
enum {
    DTRAIN__FULL = 0,
    DTRAIN__C_UPPER = 1, /* C is wanted for column >= row only */
    DTRAIN__A_LOWER = 2, /* A is 0 for k > row */
    DTRAIN__A_UPPER = 3  /* A is 0 for k < row */
};

#define DTRAIN__STRING2(x) #x
#define DTRAIN__STRING(x) DTRAIN__STRING2(x)

/* The kernels below are compiled once per instruction set: the header includes itself with
 * DTRAIN__ISA set, and what such an inclusion sees is the part between the two rules only. */
#if defined(__x86_64__)
#define DTRAIN__ISA 3
#include "dtrain.h"
#undef DTRAIN__ISA
#define DTRAIN__ISA 2
#include "dtrain.h"
#undef DTRAIN__ISA
#endif
#define DTRAIN__ISA 1
#include "dtrain.h"
#undef DTRAIN__ISA
#define DTRAIN__ISA 0
#include "dtrain.h"
#undef DTRAIN__ISA

#endif /* first half of the implementation */

/* ----------------------------------------------------------------------------------------------*/
#ifdef DTRAIN__ISA

/* ---- [S24.4] Kernels: compiled once per instruction set ---------------------------------------
 *
 * The header includes itself with DTRAIN__ISA = 3 (AVX-512), 2 (AVX2 + FMA + F16C), 1 (four-lane
 * vector extensions: SSE2, NEON, ...) and 0 (plain C). Every name below that is a macro gets the
 * suffix of the instance, so the text reads like ordinary C and debuggers see ordinary functions.
 *
 * A kernel body works on the range [begin, end) of its job (elements, rows, columns or items, see
 * the launchers): the pool's threads take disjoint ranges. No sum crosses a range boundary, so the
 * bits do not depend on the number of threads. Explicit vectors instead of the auto-vectoriser:
 * gcc 12 at -O2 leaves loops of unknown length scalar.
 *
 * Tails: vload_n / vstore_n touch the first min(n, lanes) elements only, lanes beyond read as 0.
 * One well predicted branch per vector; every element goes through the same instructions, wherever
 * the ranges are cut. */

#define DTRAIN__GLUE2(name, suffix) name##_##suffix
#define DTRAIN__GLUE(name, suffix) DTRAIN__GLUE2(name, suffix)
#define DTRAIN__INSTANCE(name) DTRAIN__GLUE(name, DTRAIN__SUFFIX)

#if DTRAIN__ISA == 3
#define DTRAIN__SUFFIX avx512
#define DTRAIN__W 16
#define DTRAIN__ON __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#elif DTRAIN__ISA == 2
#define DTRAIN__SUFFIX avx2
#define DTRAIN__W 8
#define DTRAIN__ON __attribute__((target("avx2,fma,f16c")))
#elif DTRAIN__ISA == 1
#define DTRAIN__SUFFIX generic
#define DTRAIN__W 4
#define DTRAIN__ON
#else
#define DTRAIN__SUFFIX scalar
#define DTRAIN__W 1
#define DTRAIN__ON
#endif

#define dtrain__v DTRAIN__INSTANCE(dtrain__v)
#define dtrain__vi DTRAIN__INSTANCE(dtrain__vi)
#define dtrain__vu DTRAIN__INSTANCE(dtrain__vu)
#define dtrain__vd DTRAIN__INSTANCE(dtrain__vd)
#define dtrain__vset DTRAIN__INSTANCE(dtrain__vset)
#define dtrain__vfma DTRAIN__INSTANCE(dtrain__vfma)
#define dtrain__vmax DTRAIN__INSTANCE(dtrain__vmax)
#define dtrain__vmin DTRAIN__INSTANCE(dtrain__vmin)
#define dtrain__vsqrt DTRAIN__INSTANCE(dtrain__vsqrt)
#define dtrain__vround DTRAIN__INSTANCE(dtrain__vround)
#define dtrain__vtofloat DTRAIN__INSTANCE(dtrain__vtofloat)
#define dtrain__vbits DTRAIN__INSTANCE(dtrain__vbits)
#define dtrain__vfrombits DTRAIN__INSTANCE(dtrain__vfrombits)
#define dtrain__viota DTRAIN__INSTANCE(dtrain__viota)
#define dtrain__vless DTRAIN__INSTANCE(dtrain__vless)
#define dtrain__viless DTRAIN__INSTANCE(dtrain__viless)
#define dtrain__viset DTRAIN__INSTANCE(dtrain__viset)
#define dtrain__vkeep DTRAIN__INSTANCE(dtrain__vkeep)
#define dtrain__vselect DTRAIN__INSTANCE(dtrain__vselect)
#define dtrain__vload DTRAIN__INSTANCE(dtrain__vload)
#define dtrain__vstore DTRAIN__INSTANCE(dtrain__vstore)
#define dtrain__vload_n DTRAIN__INSTANCE(dtrain__vload_n)
#define dtrain__vstore_n DTRAIN__INSTANCE(dtrain__vstore_n)
#define dtrain__vpart_load DTRAIN__INSTANCE(dtrain__vpart_load)
#define dtrain__vpart_store DTRAIN__INSTANCE(dtrain__vpart_store)
#define dtrain__vfirst DTRAIN__INSTANCE(dtrain__vfirst)
#define dtrain__vsum DTRAIN__INSTANCE(dtrain__vsum)
#define dtrain__vtop DTRAIN__INSTANCE(dtrain__vtop)
#define dtrain__vexp DTRAIN__INSTANCE(dtrain__vexp)
#define dtrain__vgelu DTRAIN__INSTANCE(dtrain__vgelu)
#define dtrain__vgelu_slope DTRAIN__INSTANCE(dtrain__vgelu_slope)

/* Signatures: a helper is inlined into its caller, a kernel is called through the table. */
#define DTRAIN__VECTOR static inline __attribute__((always_inline, unused)) DTRAIN__ON
#define DTRAIN__KERNEL static DTRAIN__ON

/* ---- Vectors ----------------------------------------------------------------------------------*/

#if DTRAIN__W > 1
typedef float dtrain__v __attribute__((vector_size(4 * DTRAIN__W)));
typedef int32_t dtrain__vi __attribute__((vector_size(4 * DTRAIN__W)));
typedef float dtrain__vu __attribute__((vector_size(4 * DTRAIN__W), aligned(4), may_alias));
#else
typedef float dtrain__v, dtrain__vu;
typedef int32_t dtrain__vi;
#endif

DTRAIN__VECTOR dtrain__v dtrain__vload(const float *p) { return *(const dtrain__vu *)p; }

DTRAIN__VECTOR void dtrain__vstore(float *p, dtrain__v v) { *(dtrain__vu *)p = v; }

#if DTRAIN__W > 1
DTRAIN__VECTOR dtrain__vi dtrain__vbits(dtrain__v v) { return (dtrain__vi)v; }
DTRAIN__VECTOR dtrain__v dtrain__vfrombits(dtrain__vi v) { return (dtrain__v)v; }
DTRAIN__VECTOR dtrain__vi dtrain__vless(dtrain__v a, dtrain__v b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__vi dtrain__viless(dtrain__vi a, dtrain__vi b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__v dtrain__vtofloat(dtrain__vi v)
{
    return __builtin_convertvector(v, dtrain__v);
}
#else
DTRAIN__VECTOR dtrain__vi dtrain__vbits(dtrain__v v) { return (int32_t)dtrain__f32_bits(v); }
DTRAIN__VECTOR dtrain__v dtrain__vfrombits(dtrain__vi v)
{
    return dtrain__f32_from_bits((uint32_t)v);
}
DTRAIN__VECTOR dtrain__vi dtrain__vless(dtrain__v a, dtrain__v b) { return -(a < b); }
DTRAIN__VECTOR dtrain__vi dtrain__viless(dtrain__vi a, dtrain__vi b) { return -(a < b); }
DTRAIN__VECTOR dtrain__v dtrain__vtofloat(dtrain__vi v) { return (float)v; }
#endif

/* Masks are all ones or all zeros per lane. */
DTRAIN__VECTOR dtrain__v dtrain__vkeep(dtrain__v v, dtrain__vi mask)
{
    return dtrain__vfrombits(dtrain__vbits(v) & mask);
}

DTRAIN__VECTOR dtrain__v dtrain__vselect(dtrain__vi mask, dtrain__v yes, dtrain__v no)
{
    return dtrain__vfrombits((dtrain__vbits(yes) & mask) | (dtrain__vbits(no) & ~mask));
}

/* What the compilers do not make out of operators: fused multiply-add (-std=c99 forbids
 * contracting), broadcast, max and min with a known NaN rule (the second operand wins), rounding to
 * an integer. */
#if DTRAIN__ISA == 3
/* Full zero-masks where the plain intrinsic starts from an undefined value: g++ warns about
 * those. */
DTRAIN__VECTOR dtrain__v dtrain__vset(float x) { return (dtrain__v)_mm512_set1_ps(x); }
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x) { return (dtrain__vi)_mm512_set1_epi32(x); }
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return (dtrain__v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a)
{
    return (dtrain__v)_mm512_maskz_sqrt_ps(0xffff, (__m512)a);
}
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    return (dtrain__vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)a);
}
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    return (dtrain__v)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
}
#elif DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__v dtrain__vset(float x) { return (dtrain__v)_mm256_set1_ps(x); }
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x) { return (dtrain__vi)_mm256_set1_epi32(x); }
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return (dtrain__v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm256_max_ps((__m256)a, (__m256)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm256_min_ps((__m256)a, (__m256)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a) { return (dtrain__v)_mm256_sqrt_ps((__m256)a); }
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    return (dtrain__vi)_mm256_cvtps_epi32((__m256)a);
}
#else
DTRAIN__VECTOR dtrain__v dtrain__vset(float x)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = x;
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x)
{
    return dtrain__vbits(dtrain__vset(dtrain__f32_from_bits((uint32_t)x)));
}
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c) { return a * b + c; }
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return dtrain__vselect(dtrain__vless(b, a), a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return dtrain__vselect(dtrain__vless(a, b), a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, a);
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = sqrtf(lanes[i]);
    return dtrain__vload(lanes);
}
/* Halves go away from zero here: any of the two neighbours is good enough for exp. */
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    const dtrain__vi sign = dtrain__vbits(a) & dtrain__viset(INT32_MIN);
    const dtrain__v half = dtrain__vfrombits(dtrain__vbits(dtrain__vset(0.5f)) | sign);
#if DTRAIN__W > 1
    return __builtin_convertvector(a + half, dtrain__vi);
#else
    return a < 1e9f ? (int32_t)(a + half) : 0; /* NaN: any integer, but no undefined conversion */
#endif
}
#endif

DTRAIN__VECTOR dtrain__vi dtrain__viota(void)
{
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    dtrain__vi v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

/* The first n lanes of v, 0 in the others. */
DTRAIN__VECTOR dtrain__v dtrain__vfirst(dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W) return v;
    return dtrain__vkeep(v, dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n)));
}

#if DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    return (dtrain__v)_mm256_maskload_ps(p, (__m256i)mask);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    _mm256_maskstore_ps(p, (__m256i)mask, (__m256)v);
}
#elif DTRAIN__ISA < 2
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    float lanes[DTRAIN__W] = {0};
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) lanes[i] = p[i];
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) p[i] = lanes[i];
}
#endif

DTRAIN__VECTOR dtrain__v dtrain__vload_n(const float *p, int64_t n)
{
    return n >= DTRAIN__W ? dtrain__vload(p) : dtrain__vpart_load(p, n);
}

DTRAIN__VECTOR void dtrain__vstore_n(float *p, dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W) dtrain__vstore(p, v);
    else dtrain__vpart_store(p, v, n);
}

/* Sum and maximum over the lanes, always as the same tree. */
DTRAIN__VECTOR float dtrain__vsum(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int half = DTRAIN__W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

DTRAIN__VECTOR float dtrain__vtop(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    float top = lanes[0];
    for (int i = 1; i < DTRAIN__W; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

/* ---- exp, GELU ----------------------------------------------------------------------------------
 *
 * e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln2 / 2, and e^r = 1 + r + r^2 q(r), q of degree 4
 * fitted to 3e-9: within 1 ulp for |x| < 10, 4.5 near 87. The terms are paired (Estrin) instead of
 * chained (Horner): a loop of exps is bound by how far the core looks ahead, so the short chain
 * wins. Below -87.7 the clamp gives n = -127, whose scale is exactly 0 (a masked score must weigh
 * nothing); above 88 the result stays e^88, callers subtract a maximum first. NaN passes. */
DTRAIN__VECTOR dtrain__v dtrain__vexp(dtrain__v x)
{
    x = dtrain__vmin(dtrain__vset(88.0f), dtrain__vmax(dtrain__vset(-88.0f), x));
    const dtrain__vi n = dtrain__vround(x * dtrain__vset(1.44269504f));
    const dtrain__v whole = dtrain__vtofloat(n);
#if DTRAIN__ISA >= 2
    const dtrain__v r = dtrain__vfma(whole, dtrain__vset(-0.693147181f), x);
#else /* without a fused operation ln 2 is split, so that n * high is exact */
    const dtrain__v r =
        x - whole * dtrain__vset(0.693359375f) + whole * dtrain__vset(2.12194440e-4f);
#endif
    const dtrain__v square = r * r;
    dtrain__v high = dtrain__vfma(r, dtrain__vset(0.00836874792f), dtrain__vset(0.0416683909f));
    high = dtrain__vfma(square, dtrain__vset(0.00138145499f), high);
    const dtrain__v low = dtrain__vfma(r, dtrain__vset(0.166665204f), dtrain__vset(0.499999934f));
    const dtrain__v q = dtrain__vfma(high, square, low);
    const dtrain__v p = dtrain__vfma(q, square, r + dtrain__vset(1.0f));
    return p * dtrain__vfrombits((n + dtrain__viset(127)) << 23);
}

#define DTRAIN__GELU_A 0.797884561f /* sqrt(2/pi) */
#define DTRAIN__GELU_B 0.044715f

/* y = x/2 (1 + tanh u), u = A (x + B x^3), as x / (1 + e^-2u): no cancellation for negative x. */
DTRAIN__VECTOR dtrain__v dtrain__vgelu(dtrain__v x)
{
    const dtrain__v limit =
        dtrain__vset(11.0f); /* x^3 must not overflow; beyond it e^-2u is settled */
    const dtrain__v c = dtrain__vmin(limit, dtrain__vmax(-limit, x));
    const dtrain__v cubic = dtrain__vfma(c * c * c, dtrain__vset(DTRAIN__GELU_B), c);
    return x / (dtrain__vset(1.0f) + dtrain__vexp(cubic * dtrain__vset(-2 * DTRAIN__GELU_A)));
}

/* With q = e^-2u and w = 1 / (1 + q): dy/dx = w + x w (1 - w) 2u' = w (1 + x q w 2u'), where
 * u' = A (1 + 3 B x^2). The tails keep their relative accuracy; outside +-10 it is 0 or 1. */
DTRAIN__VECTOR dtrain__v dtrain__vgelu_slope(dtrain__v x)
{
    const dtrain__v limit = dtrain__vset(10.0f), one = dtrain__vset(1.0f);
    x = dtrain__vmin(limit, dtrain__vmax(-limit, x));
    const dtrain__v square = x * x;
    const dtrain__v cubic = dtrain__vfma(square * x, dtrain__vset(DTRAIN__GELU_B), x);
    const dtrain__v q = dtrain__vexp(cubic * dtrain__vset(-2 * DTRAIN__GELU_A));
    const dtrain__v w = one / (one + q);
    const dtrain__v slope = dtrain__vfma(square, dtrain__vset(6 * DTRAIN__GELU_A * DTRAIN__GELU_B),
                                         dtrain__vset(2 * DTRAIN__GELU_A));
    return w * dtrain__vfma(x * slope, q * w, one);
}

/* ---- Vectors in half precision ----------------------------------------------------------------
 *
 * bf16 is integer arithmetic on vectors, fp16 the F16C instructions or, without them, the scalar
 * functions of [S23]: the bits are the same. A tail goes through a buffer of full width. */

#define dtrain__vhalves DTRAIN__INSTANCE(dtrain__vhalves)
#define dtrain__vwords DTRAIN__INSTANCE(dtrain__vwords)
#define dtrain__to_bf16 DTRAIN__INSTANCE(dtrain__to_bf16)
#define dtrain__from_bf16 DTRAIN__INSTANCE(dtrain__from_bf16)
#define dtrain__to_f16 DTRAIN__INSTANCE(dtrain__to_f16)
#define dtrain__from_f16 DTRAIN__INSTANCE(dtrain__from_f16)
#if DTRAIN__ISA >= 2
typedef uint16_t dtrain__vhalves __attribute__((vector_size(2 * DTRAIN__W), aligned(2), may_alias));
typedef uint32_t dtrain__vwords __attribute__((vector_size(4 * DTRAIN__W)));

DTRAIN__VECTOR void dtrain__to_bf16(uint16_t *to, dtrain__v v)
{
    const dtrain__vwords x = (dtrain__vwords)v;
    const dtrain__vwords rounded = x + 0x7fffu + ((x >> 16) & 1u);
    const dtrain__vwords nan = (dtrain__vwords)((x & 0x7fffffffu) > 0x7f800000u);
    const dtrain__vwords bits = ((rounded & ~nan) | ((x | 0x400000u) & nan)) >> 16;
    *(dtrain__vhalves *)to = __builtin_convertvector(bits, dtrain__vhalves);
}

DTRAIN__VECTOR dtrain__v dtrain__from_bf16(const uint16_t *from)
{
    return (dtrain__v)(__builtin_convertvector(*(const dtrain__vhalves *)from, dtrain__vwords)
                       << 16);
}
#if DTRAIN__ISA == 3
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    _mm256_storeu_si256(
        (__m256i *)(void *)to,
        _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    return (dtrain__v)_mm512_maskz_cvtph_ps(
        0xffff, _mm256_loadu_si256((const __m256i *)(const void *)from));
}
#else
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    _mm_storeu_si128((__m128i *)(void *)to,
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    return (dtrain__v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}
#endif
#else
DTRAIN__VECTOR void dtrain__to_bf16(uint16_t *to, dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int i = 0; i < DTRAIN__W; i++) to[i] = dtrain_f32_to_bf16(lanes[i]);
}
DTRAIN__VECTOR dtrain__v dtrain__from_bf16(const uint16_t *from)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = dtrain_bf16_to_f32(from[i]);
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int i = 0; i < DTRAIN__W; i++) to[i] = dtrain_f32_to_f16(lanes[i]);
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = dtrain_f16_to_f32(from[i]);
    return dtrain__vload(lanes);
}
#endif

#define dtrain__vload_as DTRAIN__INSTANCE(dtrain__vload_as)
#define dtrain__vstore_as DTRAIN__INSTANCE(dtrain__vstore_as)

/* vload_n and vstore_n of elements from `at` on, of fp32, bf16 or fp16. */
DTRAIN__VECTOR dtrain__v dtrain__vload_as(const void *p, dtrain_dtype dtype, int64_t at, int64_t n)
{
    if (dtype == DTRAIN_F32) return dtrain__vload_n((const float *)p + at, n);
    const uint16_t *half = (const uint16_t *)p + at;
    uint16_t tail[DTRAIN__W] = {0};
    if (n < DTRAIN__W) {
        if (n > 0) memcpy(tail, half, (size_t)n * sizeof *half);
        half = tail;
    }
    return dtype == DTRAIN_BF16 ? dtrain__from_bf16(half) : dtrain__from_f16(half);
}

DTRAIN__VECTOR void dtrain__vstore_as(void *p, dtrain_dtype dtype, int64_t at, dtrain__v v,
                                      int64_t n)
{
    if (dtype == DTRAIN_F32) {
        dtrain__vstore_n((float *)p + at, v, n);
        return;
    }
    uint16_t tail[DTRAIN__W], *half = (uint16_t *)p + at, *to = n < DTRAIN__W ? tail : half;
    if (dtype == DTRAIN_BF16) dtrain__to_bf16(to, v);
    else dtrain__to_f16(to, v);
    if (n < DTRAIN__W) memcpy(half, tail, (size_t)n * sizeof *half);
}

/* ---- Elementwise: bandwidth is the limit, 8 to 28 bytes an element ----------------------------*/

#define dtrain__range_add DTRAIN__INSTANCE(dtrain__range_add)
DTRAIN__KERNEL void dtrain__range_add(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_add_args *args = (const dtrain_add_args *)job->args;
    const float *x = (const float *)args->x, *y = (const float *)args->y;
    float *out = (float *)args->out;
    (void)index;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        dtrain__vstore_n(out + i, dtrain__vload_n(x + i, n) + dtrain__vload_n(y + i, n), n);
    }
}

#define dtrain__range_axpby DTRAIN__INSTANCE(dtrain__range_axpby)
DTRAIN__KERNEL void dtrain__range_axpby(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_axpby_args *args = (const dtrain_axpby_args *)job->args;
    const bool constant = args->broadcast || !args->x;
    const float *x = (const float *)args->x;
    float *y = (float *)args->y;
    const dtrain__v a = dtrain__vset(constant && x ? args->a * x[0] : args->a);
    const dtrain__v b = dtrain__vset(args->b);
    (void)index;
    if (constant)
        for (int64_t i = begin; i < end; i += DTRAIN__W) {
            const int64_t n = end - i;
            const dtrain__v old = dtrain__vload_n(y + i, args->accumulate ? n : 0);
            dtrain__vstore_n(y + i, args->accumulate ? dtrain__vfma(b, old, a) : a, n);
        }
    else if (args->accumulate)
        for (int64_t i = begin; i < end; i += DTRAIN__W) {
            const int64_t n = end - i;
            const dtrain__v old = b * dtrain__vload_n(y + i, n);
            dtrain__vstore_n(y + i, dtrain__vfma(a, dtrain__vload_n(x + i, n), old), n);
        }
    else
        for (int64_t i = begin; i < end; i += DTRAIN__W) {
            const int64_t n = end - i;
            dtrain__vstore_n(y + i, a * dtrain__vload_n(x + i, n), n);
        }
}

/* The corrections are folded: lr / correction1 is one factor, and v is scaled under the root. */
#define dtrain__range_adamw DTRAIN__INSTANCE(dtrain__range_adamw)
DTRAIN__KERNEL void dtrain__range_adamw(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_adamw_args *a = update->adamw;
    const dtrain_optimizer_tensor *t = update->tensor;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v epsilon = dtrain__vset(a->epsilon);
    const dtrain__v beta1 = dtrain__vset(a->beta1), rest1 = dtrain__vset(1 - a->beta1);
    const dtrain__v beta2 = dtrain__vset(a->beta2), rest2 = dtrain__vset(1 - a->beta2);
    const dtrain__v decay = dtrain__vset(1 - update->now.lr * t->weight_decay);
    const dtrain__v step = dtrain__vset(update->now.lr / update->now.correction1);
    const dtrain__v correct2 = dtrain__vset(1 / update->now.correction2);
    (void)index;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
        const dtrain__v m = dtrain__vfma(rest1, g, beta1 * dtrain__vload_n(t->m + i, n));
        const dtrain__v v = dtrain__vfma(rest2 * g, g, beta2 * dtrain__vload_n(t->v + i, n));
        const dtrain__v root = dtrain__vsqrt(v * correct2) + epsilon;
        const dtrain__v old = dtrain__vload_n(t->value + i, n);
        dtrain__vstore_n(t->m + i, m, n);
        dtrain__vstore_n(t->v + i, v, n);
        dtrain__vstore_n(t->value + i, old * decay - step * m / root, n);
    }
    if (t->low) dtrain__round_low(update, begin, end);
}

#define dtrain__range_sgd DTRAIN__INSTANCE(dtrain__range_sgd)
DTRAIN__KERNEL void dtrain__range_sgd(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_sgd_args *a = update->sgd;
    const dtrain_optimizer_tensor *t = update->tensor;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v momentum = dtrain__vset(a->momentum), lr = dtrain__vset(update->now.lr);
    const dtrain__v decay = dtrain__vset(1 - update->now.lr * t->weight_decay);
    float *buffer = t->m;
    (void)index;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
        if (buffer) {
            dtrain__v b = g;
            if (!a->first) b = dtrain__vfma(momentum, dtrain__vload_n(buffer + i, n), g);
            dtrain__vstore_n(buffer + i, b, n);
            g = a->nesterov ? dtrain__vfma(momentum, b, g) : b;
        }
        dtrain__vstore_n(t->value + i, dtrain__vload_n(t->value + i, n) * decay - lr * g, n);
    }
    if (t->low) dtrain__round_low(update, begin, end);
}

/* ---- Sums: chunk c of the job covers [c, c+1) * job->chunk elements ---------------------------
 *
 * Accumulated in double, half a vector of floats at a time; two accumulators hide the latency. */
#define DTRAIN__H (DTRAIN__W > 1 ? DTRAIN__W / 2 : 1)
#define dtrain__vhalf DTRAIN__INSTANCE(dtrain__vhalf)
#define dtrain__vwiden DTRAIN__INSTANCE(dtrain__vwiden)
#if DTRAIN__W > 1
typedef float dtrain__vhalf __attribute__((vector_size(2 * DTRAIN__W), aligned(4), may_alias));
typedef double dtrain__vd __attribute__((vector_size(4 * DTRAIN__W)));
DTRAIN__VECTOR dtrain__vd dtrain__vwiden(const float *p)
{
    return __builtin_convertvector(*(const dtrain__vhalf *)p, dtrain__vd);
}
#else
typedef double dtrain__vd;
DTRAIN__VECTOR dtrain__vd dtrain__vwiden(const float *p) { return (double)*p; }
#endif

#define dtrain__sum_chunk DTRAIN__INSTANCE(dtrain__sum_chunk)
DTRAIN__KERNEL double dtrain__sum_chunk(const float *x, int64_t count, bool squares)
{
    dtrain__vd even, odd;
    double lanes[DTRAIN__H], total = 0;
    int64_t i = 0;
    memset(&even, 0, sizeof even);
    odd = even;
    if (squares)
        for (; i + 2 * DTRAIN__H <= count; i += 2 * DTRAIN__H) {
            const dtrain__vd a = dtrain__vwiden(x + i), b = dtrain__vwiden(x + i + DTRAIN__H);
            even += a * a;
            odd += b * b;
        }
    else
        for (; i + 2 * DTRAIN__H <= count; i += 2 * DTRAIN__H) {
            even += dtrain__vwiden(x + i);
            odd += dtrain__vwiden(x + i + DTRAIN__H);
        }
    even += odd;
    memcpy(lanes, &even, sizeof lanes);
    for (int lane = 0; lane < DTRAIN__H; lane++) total += lanes[lane];
    for (; i < count; i++) total += squares ? (double)x[i] * (double)x[i] : (double)x[i];
    return total;
}

#define dtrain__range_sum DTRAIN__INSTANCE(dtrain__range_sum)
DTRAIN__KERNEL void dtrain__range_sum(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_sum_args *a = (const dtrain_sum_args *)job->args;
    (void)index;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk;
        const int64_t count = a->count - first < job->chunk ? a->count - first : job->chunk;
        job->sums[chunk] = dtrain__sum_chunk((const float *)a->x + first, count, a->squares);
    }
}

/* ---- Conversions ------------------------------------------------------------------------------*/

#define dtrain__to_half DTRAIN__INSTANCE(dtrain__to_half)
#define dtrain__from_half DTRAIN__INSTANCE(dtrain__from_half)
/* Without vector code for a whole row: count elements, either direction. */
DTRAIN__KERNEL void dtrain__to_half(uint16_t *to, const float *from, int64_t count,
                                    dtrain_dtype dtype)
{
    uint16_t tail[DTRAIN__W];
    int64_t i = 0;
    if (dtype == DTRAIN_BF16)
        for (; i + DTRAIN__W <= count; i += DTRAIN__W)
            dtrain__to_bf16(to + i, dtrain__vload(from + i));
    else
        for (; i + DTRAIN__W <= count; i += DTRAIN__W)
            dtrain__to_f16(to + i, dtrain__vload(from + i));
    if (i == count) return;
    const dtrain__v rest = dtrain__vload_n(from + i, count - i);
    if (dtype == DTRAIN_BF16) dtrain__to_bf16(tail, rest);
    else dtrain__to_f16(tail, rest);
    memcpy(to + i, tail, (size_t)(count - i) * sizeof *to);
}

DTRAIN__KERNEL void dtrain__from_half(float *to, const uint16_t *from, int64_t count,
                                      dtrain_dtype dtype)
{
    uint16_t tail[DTRAIN__W] = {0};
    int64_t i = 0;
    if (dtype == DTRAIN_BF16)
        for (; i + DTRAIN__W <= count; i += DTRAIN__W)
            dtrain__vstore(to + i, dtrain__from_bf16(from + i));
    else
        for (; i + DTRAIN__W <= count; i += DTRAIN__W)
            dtrain__vstore(to + i, dtrain__from_f16(from + i));
    if (i == count) return;
    memcpy(tail, from + i, (size_t)(count - i) * sizeof *from);
    dtrain__vstore_n(
        to + i, dtype == DTRAIN_BF16 ? dtrain__from_bf16(tail) : dtrain__from_f16(tail), count - i);
}

#define dtrain__range_convert DTRAIN__INSTANCE(dtrain__range_convert)
DTRAIN__KERNEL void dtrain__range_convert(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_convert_args *a = (const dtrain_convert_args *)job->args;
    const size_t x_bytes = dtrain_dtype_bytes(a->x_dtype), y_bytes = dtrain_dtype_bytes(a->y_dtype);
    const char *x = (const char *)a->x + (size_t)begin * x_bytes;
    char *y = (char *)a->y + (size_t)begin * y_bytes;
    float between[256];
    (void)index;
    if (a->x_dtype == a->y_dtype) memmove(y, x, (size_t)(end - begin) * x_bytes);
    else if (a->x_dtype == DTRAIN_F32)
        dtrain__to_half((uint16_t *)(void *)y, (const float *)(const void *)x, end - begin,
                        a->y_dtype);
    else if (a->y_dtype == DTRAIN_F32)
        dtrain__from_half((float *)(void *)y, (const uint16_t *)(const void *)x, end - begin,
                          a->x_dtype);
    else
        for (int64_t i = begin; i < end; i += 256, x += 512, y += 512) {
            const int64_t n = end - i < 256 ? end - i : 256;
            dtrain__from_half(between, (const uint16_t *)(const void *)x, n, a->x_dtype);
            dtrain__to_half((uint16_t *)(void *)y, between, n, a->y_dtype);
        }
}

/* ---- Dropout: ranges are multiples of 16, so that no block of Philox is split -----------------
 *
 * H counters at a time, each 32-bit word in a 64-bit lane, because x86 multiplies 32 x 32 -> 64
 * there. High halves carry rubbish between rounds: the multiplier ignores them. */

#define dtrain__vq DTRAIN__INSTANCE(dtrain__vq)
#define dtrain__vwide DTRAIN__INSTANCE(dtrain__vwide)
#define dtrain__vmerge DTRAIN__INSTANCE(dtrain__vmerge)
#define dtrain__vphilox DTRAIN__INSTANCE(dtrain__vphilox)
#if DTRAIN__W > 1
typedef uint64_t dtrain__vq __attribute__((vector_size(4 * DTRAIN__W)));

DTRAIN__VECTOR dtrain__vq dtrain__vwide(dtrain__vq a, uint32_t b)
{
#if DTRAIN__ISA == 3
    return (dtrain__vq)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64((int64_t)b));
#elif DTRAIN__ISA == 2
    return (dtrain__vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((int64_t)b));
#else
    return (a & (uint64_t)0xffffffffu) * (uint64_t)b;
#endif
}

/* words = a0 b0 a1 b1 ... in 64-bit lanes. */
DTRAIN__VECTOR void dtrain__vmerge(dtrain__vq a, dtrain__vq b, uint32_t *words)
{
#if DTRAIN__ISA == 3
    const __m512i low = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i high = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    _mm512_storeu_si512(words, _mm512_permutex2var_epi64((__m512i)a, low, (__m512i)b));
    _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64((__m512i)a, high, (__m512i)b));
#elif DTRAIN__ISA == 2
    const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b); /* a0 b0 a2 b2 */
    const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);  /* a1 b1 a3 b3 */
    __m256i *to = (__m256i *)(void *)words;
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
#else
    for (int j = 0; j < DTRAIN__H; j++) {
        const uint64_t pair[2] = {a[j], b[j]};
        memcpy(words + 4 * j, pair, sizeof pair);
    }
#endif
}

/* words[4 j + w] = word w of block counter + j, for j < H. A 64-bit lane holds two
 * neighbouring words, the low half first. */
DTRAIN__VECTOR void dtrain__vphilox(uint64_t seed, uint64_t stream, uint64_t counter,
                                    uint32_t *words)
{
    static const uint64_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint64_t half = 0xffffffffu;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    dtrain__vq c0;
    memcpy(&c0, lanes, sizeof c0);
    dtrain__vq c2 = (c0 ^ c0) + stream, c3 = c2 >> 32;
    c0 += counter;
    dtrain__vq c1 = c0 >> 32;
    for (int round = 0; round < 10; round++) {
        const dtrain__vq p0 = dtrain__vwide(c0, DTRAIN__PHILOX_M0);
        const dtrain__vq p1 = dtrain__vwide(c2, DTRAIN__PHILOX_M1);
        c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
        c3 = p0;
        k0 += DTRAIN__PHILOX_W0;
        k1 += DTRAIN__PHILOX_W1;
    }
    dtrain__vmerge((c0 & half) | (c1 << 32), (c2 & half) | (c3 << 32), words);
}
#else
DTRAIN__VECTOR void dtrain__vphilox(uint64_t seed, uint64_t stream, uint64_t counter,
                                    uint32_t *words)
{
    dtrain_philox(seed, stream, counter, words);
}
#endif

#define dtrain__range_dropout DTRAIN__INSTANCE(dtrain__range_dropout)
DTRAIN__KERNEL void dtrain__range_dropout(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_dropout_args *a = (const dtrain_dropout_args *)job->args;
    /* uniform >= probability, asked of the 24-bit integers. */
    const double least = ceil((double)a->probability * 16777216.0);
    const int32_t threshold = least < 16777216.0 ? (int32_t)least : 16777216;
    const float scale = a->probability < 1 ? 1 / (1 - a->probability) : 0;
    const uint64_t seed = a->seed + (a->scalars ? a->scalars->seed : 0);
    const float *x = (const float *)a->x;
    uint32_t words[4 * DTRAIN__H];
    (void)index;
    for (int64_t i = begin; i < end; i += 4 * DTRAIN__H) {
        dtrain__vphilox(seed, a->stream, (uint64_t)i / 4, words);
        for (int j = 0; j < 4 * DTRAIN__H && i + j < end; j += DTRAIN__W) {
            const int64_t n = end - i - j;
            float *y = (float *)a->y + i + j;
            dtrain__vi u;
            memcpy(&u, words + j, sizeof u);
            u = (u >> 8) & dtrain__viset(0xffffff); /* the 24 bits of dtrain_random_uniform */
            const dtrain__vi dropped = dtrain__viless(u, dtrain__viset(threshold));
            dtrain__v kept = dtrain__vset(scale) * dtrain__vload_n(x + i + j, n);
            kept = dtrain__vkeep(kept, ~dropped);
            if (a->accumulate) kept += dtrain__vload_n(y, n);
            dtrain__vstore_n(y, kept, n);
        }
    }
}

/* ---- Layernorm ----------------------------------------------------------------------------------
 *
 * A row stays in L1 between its passes: memory is read once and written once. */

#define dtrain__row_sum DTRAIN__INSTANCE(dtrain__row_sum)
#define dtrain__row_spread DTRAIN__INSTANCE(dtrain__row_spread)

/* Four accumulators, because one would wait for itself. */
DTRAIN__KERNEL float dtrain__row_sum(const float *x, int64_t n)
{
    dtrain__v a = dtrain__vset(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DTRAIN__W <= n; i += 4 * DTRAIN__W) {
        a += dtrain__vload(x + i);
        b += dtrain__vload(x + i + DTRAIN__W);
        c += dtrain__vload(x + i + 2 * DTRAIN__W);
        d += dtrain__vload(x + i + 3 * DTRAIN__W);
    }
    for (; i < n; i += DTRAIN__W) a += dtrain__vload_n(x + i, n - i);
    return dtrain__vsum((a + b) + (c + d));
}

/* Sum of (x - mean)^2. */
DTRAIN__KERNEL float dtrain__row_spread(const float *x, int64_t n, float mean)
{
    const dtrain__v m = dtrain__vset(mean);
    dtrain__v a = dtrain__vset(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DTRAIN__W <= n; i += 4 * DTRAIN__W) {
        const dtrain__v e = dtrain__vload(x + i) - m, f = dtrain__vload(x + i + DTRAIN__W) - m;
        const dtrain__v g = dtrain__vload(x + i + 2 * DTRAIN__W) - m;
        const dtrain__v h = dtrain__vload(x + i + 3 * DTRAIN__W) - m;
        a = dtrain__vfma(e, e, a);
        b = dtrain__vfma(f, f, b);
        c = dtrain__vfma(g, g, c);
        d = dtrain__vfma(h, h, d);
    }
    for (; i < n; i += DTRAIN__W) {
        const dtrain__v e = dtrain__vfirst(dtrain__vload_n(x + i, n - i) - m, n - i);
        a = dtrain__vfma(e, e, a);
    }
    return dtrain__vsum((a + b) + (c + d));
}

/* sum = x + residual of one row; returns it. */
#define dtrain__row_add DTRAIN__INSTANCE(dtrain__row_add)
DTRAIN__KERNEL const float *dtrain__row_add(const dtrain_layernorm_args *a, int64_t row)
{
    const float *x = (const float *)a->x + row * a->n;
    const float *residual = (const float *)a->residual + row * a->n;
    float *sum = (float *)a->sum + row * a->n;
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t n = a->n - i;
        dtrain__vstore_n(sum + i, dtrain__vload_n(x + i, n) + dtrain__vload_n(residual + i, n), n);
    }
    return sum;
}

#define dtrain__range_layernorm DTRAIN__INSTANCE(dtrain__range_layernorm)
DTRAIN__KERNEL void dtrain__range_layernorm(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_layernorm_args *a = (const dtrain_layernorm_args *)job->args;
    (void)index;
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)a->x + row * a->n;
        float *y = (float *)a->y + row * a->n;
        if (a->residual) x = dtrain__row_add(a, row);
        const float mean = dtrain__row_sum(x, a->n) / (float)a->n;
        const float variance = dtrain__row_spread(x, a->n, mean) / (float)a->n;
        const float rstd = 1 / sqrtf(variance + a->epsilon);
        const dtrain__v m = dtrain__vset(mean), r = dtrain__vset(rstd);
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            const dtrain__v normal = (dtrain__vload_n(x + i, n) - m) * r;
            __builtin_prefetch(x + a->n + i); /* the next row, while this one keeps the core busy */
            const dtrain__v bias = a->bias ? dtrain__vload_n(a->bias + i, n) : dtrain__vset(0);
            dtrain__vstore_n(y + i, dtrain__vfma(normal, dtrain__vload_n(a->weight + i, n), bias),
                             n);
        }
        a->mean[row] = mean;
        a->rstd[row] = rstd;
    }
}

/* With h = (x - mean) rstd and g = d_y weight (Ba et al., 2016):
 *     d_weight += d_y h      d_bias += d_y      d_x = rstd (g - mean(g) - h mean(g h))
 * First pass over a row: the two means and the parameter sums of this chunk of rows (n floats each,
 * in L1 or L2). Second pass: d_x. */
#define dtrain__layernorm_sums DTRAIN__INSTANCE(dtrain__layernorm_sums)
DTRAIN__KERNEL void dtrain__layernorm_sums(const dtrain_layernorm_backward_args *a, int64_t row,
                                           float *weight_sum, float means[2])
{
    const float *x = (const float *)a->x + row * a->n;
    const float *d_y = (const float *)a->d_y + row * a->n;
    const dtrain__v m = dtrain__vset(a->mean[row]), r = dtrain__vset(a->rstd[row]);
    float *bias_sum = weight_sum + a->n;
    dtrain__v g_sum = dtrain__vset(0), gh_sum = g_sum;
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t n = a->n - i;
        const dtrain__v d = dtrain__vload_n(d_y + i, n);
        const dtrain__v h = (dtrain__vload_n(x + i, n) - m) * r;
        const dtrain__v g = d * dtrain__vload_n(a->weight + i, n);
        g_sum += g;
        gh_sum = dtrain__vfma(g, h, gh_sum);
        dtrain__vstore_n(weight_sum + i, dtrain__vfma(d, h, dtrain__vload_n(weight_sum + i, n)), n);
        dtrain__vstore_n(bias_sum + i, dtrain__vload_n(bias_sum + i, n) + d, n);
    }
    means[0] = dtrain__vsum(g_sum) / (float)a->n;
    means[1] = dtrain__vsum(gh_sum) / (float)a->n;
}

#define dtrain__layernorm_slope DTRAIN__INSTANCE(dtrain__layernorm_slope)
DTRAIN__KERNEL void dtrain__layernorm_slope(const dtrain_layernorm_backward_args *a, int64_t row,
                                            const float means[2])
{
    const float *x = (const float *)a->x + row * a->n;
    const float *d_y = (const float *)a->d_y + row * a->n;
    float *d_x = (float *)a->d_x + row * a->n;
    const dtrain__v m = dtrain__vset(a->mean[row]), r = dtrain__vset(a->rstd[row]);
    const dtrain__v g_mean = dtrain__vset(means[0]), gh_mean = dtrain__vset(means[1]);
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t n = a->n - i;
        const dtrain__v h = (dtrain__vload_n(x + i, n) - m) * r;
        const dtrain__v g = dtrain__vload_n(d_y + i, n) * dtrain__vload_n(a->weight + i, n);
        dtrain__v slope = r * (g - g_mean - h * gh_mean);
        if (a->accumulate_x) slope += dtrain__vload_n(d_x + i, n);
        dtrain__vstore_n(d_x + i, slope, n);
    }
}

/* Range: chunks of job->chunk rows; chunk c leaves its sums in scratch[2 n c ...]. */
#define dtrain__range_layernorm_backward DTRAIN__INSTANCE(dtrain__range_layernorm_backward)
DTRAIN__KERNEL void dtrain__range_layernorm_backward(dtrain__job *job, int64_t begin, int64_t end,
                                                     int index)
{
    const dtrain_layernorm_backward_args *a = (const dtrain_layernorm_backward_args *)job->args;
    float means[2];
    (void)index;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk;
        const int64_t last = first + job->chunk < a->rows ? first + job->chunk : a->rows;
        float *sums = job->scratch + chunk * 2 * a->n;
        memset(sums, 0, (size_t)(2 * a->n) * sizeof *sums);
        for (int64_t row = first; row < last; row++) {
            dtrain__layernorm_sums(a, row, sums, means);
            if (a->d_x) dtrain__layernorm_slope(a, row, means);
        }
    }
}

/* Range: columns. Adds the chunks' sums up in order; job->total chunks. */
#define dtrain__range_layernorm_params DTRAIN__INSTANCE(dtrain__range_layernorm_params)
DTRAIN__KERNEL void dtrain__range_layernorm_params(dtrain__job *job, int64_t begin, int64_t end,
                                                   int index)
{
    const dtrain_layernorm_backward_args *a = (const dtrain_layernorm_backward_args *)job->args;
    float *const out[2] = {a->d_weight, a->d_bias};
    (void)index;
    for (int which = 0; which < 2; which++) {
        if (!out[which]) continue;
        for (int64_t i = begin; i < end; i += DTRAIN__W) {
            const int64_t n = end - i;
            const float *sums = job->scratch + which * a->n + i;
            dtrain__v sum = dtrain__vset(0);
            for (int64_t chunk = 0; chunk < job->chunk_count; chunk++, sums += 2 * a->n)
                sum += dtrain__vload_n(sums, n);
            if (a->accumulate_params) sum += dtrain__vload_n(out[which] + i, n);
            dtrain__vstore_n(out[which] + i, sum, n);
        }
    }
}

/* ---- Activation -------------------------------------------------------------------------------*/

#define dtrain__vactivate DTRAIN__INSTANCE(dtrain__vactivate)
DTRAIN__VECTOR dtrain__v dtrain__vactivate(uint32_t activation, dtrain__v x)
{
    if (activation == DTRAIN_ACT_GELU) return dtrain__vgelu(x);
    if (activation == DTRAIN_ACT_RELU) return dtrain__vmax(dtrain__vset(0), x);
    return x;
}

/* d_out * act'(x); the slope of relu at 0 is 0. */
#define dtrain__vdeactivate DTRAIN__INSTANCE(dtrain__vdeactivate)
DTRAIN__VECTOR dtrain__v dtrain__vdeactivate(uint32_t activation, dtrain__v x, dtrain__v d_out)
{
    if (activation == DTRAIN_ACT_GELU) return d_out * dtrain__vgelu_slope(x);
    if (activation == DTRAIN_ACT_RELU)
        return dtrain__vkeep(d_out, dtrain__vless(dtrain__vset(0), x));
    return d_out;
}

/* Range: columns, so that each column's sum is one chain over all rows. Row by row, with the sums
 * in L1: several rows at once would save a few loads but walk addresses that share a cache set. */
#define dtrain__activation_backward_as DTRAIN__INSTANCE(dtrain__activation_backward_as)
DTRAIN__VECTOR void dtrain__activation_backward_as(const dtrain_activation_backward_args *a,
                                                   int64_t begin, int64_t end, dtrain_dtype dtype)
{
    const bool store = a->activation != DTRAIN_ACT_NONE || a->d_in != a->d_out;
    if (a->d_bias && !a->accumulate)
        memset(a->d_bias + begin, 0, (size_t)(end - begin) * sizeof *a->d_bias);
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t j = begin; j < end; j += DTRAIN__W) {
            const int64_t at = row * a->n + j, n = end - j;
            dtrain__v d = dtrain__vload_as(a->d_out, dtype, at, n);
            if (a->activation != DTRAIN_ACT_NONE)
                d = dtrain__vdeactivate(a->activation, dtrain__vload_as(a->x, dtype, at, n), d);
            if (store) dtrain__vstore_as(a->d_in, dtype, at, d, n);
            if (a->d_bias)
                dtrain__vstore_n(a->d_bias + j, dtrain__vload_n(a->d_bias + j, n) + d, n);
        }
}

#define dtrain__range_activation_backward DTRAIN__INSTANCE(dtrain__range_activation_backward)
DTRAIN__KERNEL void dtrain__range_activation_backward(dtrain__job *job, int64_t begin, int64_t end,
                                                      int index)
{
    const dtrain_activation_backward_args *a = (const dtrain_activation_backward_args *)job->args;
    (void)index;
    if (a->dtype == DTRAIN_BF16 || a->dtype == DTRAIN_F16)
        dtrain__activation_backward_as(a, begin, end, a->dtype);
    else dtrain__activation_backward_as(a, begin, end, DTRAIN_F32);
}

/* Range: rows of C. What a foreign GEMM leaves to do: bias, aux, activation. */
#define dtrain__range_activate DTRAIN__INSTANCE(dtrain__range_activate)
DTRAIN__KERNEL void dtrain__range_activate(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_gemm_args *a = (const dtrain_gemm_args *)job->args;
    (void)index;
    for (int64_t row = begin; row < end; row++) {
        float *c = (float *)a->c + row * a->ldc;
        for (int64_t j = 0; j < a->n; j += DTRAIN__W) {
            const int64_t n = a->n - j;
            dtrain__v x = dtrain__vload_n(c + j, n);
            if (a->bias) x += dtrain__vload_n(a->bias + j, n);
            if (a->aux) dtrain__vstore_n((float *)a->aux + row * a->ldc + j, x, n);
            dtrain__vstore_n(c + j, dtrain__vactivate(a->activation, x), n);
        }
    }
}

/* ---- Embedding --------------------------------------------------------------------------------*/

#define dtrain__range_embedding DTRAIN__INSTANCE(dtrain__range_embedding)
DTRAIN__KERNEL void dtrain__range_embedding(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_embedding_args *a = (const dtrain_embedding_args *)job->args;
    (void)index;
    for (int64_t row = begin; row < end; row++) {
        const float *token = a->wte + a->tokens[row] * a->n;
        const float *place = a->wpe ? a->wpe + row % a->sequence * a->n : NULL;
        float *y = (float *)a->y + row * a->n;
        for (int64_t j = 0; j < a->n; j += DTRAIN__W) {
            const int64_t n = a->n - j;
            dtrain__v v = dtrain__vload_n(token + j, n);
            if (place) v += dtrain__vload_n(place + j, n);
            dtrain__vstore_n(y + j, v, n);
        }
    }
}

/* Range: columns. Each thread walks all rows, so two tokens that are equal meet in row order. */
#define dtrain__range_embedding_backward DTRAIN__INSTANCE(dtrain__range_embedding_backward)
DTRAIN__KERNEL void dtrain__range_embedding_backward(dtrain__job *job, int64_t begin, int64_t end,
                                                     int index)
{
    const dtrain_embedding_backward_args *a = (const dtrain_embedding_backward_args *)job->args;
    (void)index;
    for (int64_t row = 0; row < a->rows; row++) {
        const float *d_y = (const float *)a->d_y + row * a->n;
        float *token = a->d_wte ? a->d_wte + a->tokens[row] * a->n : NULL;
        float *place = a->d_wpe ? a->d_wpe + row % a->sequence * a->n : NULL;
        for (int64_t j = begin; j < end; j += DTRAIN__W) {
            const int64_t n = end - j;
            const dtrain__v d = dtrain__vload_n(d_y + j, n);
            if (token) dtrain__vstore_n(token + j, dtrain__vload_n(token + j, n) + d, n);
            if (place) dtrain__vstore_n(place + j, dtrain__vload_n(place + j, n) + d, n);
        }
    }
}

/* ---- Cross-entropy ------------------------------------------------------------------------------
 *
 * A row of logits (200 KB for GPT-2) is read from memory once: blocks of 2048 stay in L1 for their
 * maximum and their sum of exponentials; a new maximum rescales the sum so far. One exp per
 * logit. */

/* Maximum of count floats, not below `top`. */
#define dtrain__row_top DTRAIN__INSTANCE(dtrain__row_top)
DTRAIN__KERNEL float dtrain__row_top(const float *x, int64_t count, float top)
{
    dtrain__v a = dtrain__vset(top), b = a;
    int64_t i = 0;
    for (; i + 2 * DTRAIN__W <= count; i += 2 * DTRAIN__W) {
        a = dtrain__vmax(dtrain__vload(x + i), a);
        b = dtrain__vmax(dtrain__vload(x + i + DTRAIN__W), b);
    }
    top = dtrain__vtop(dtrain__vmax(a, b));
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    return top;
}

#define dtrain__row_exp_sum DTRAIN__INSTANCE(dtrain__row_exp_sum)
DTRAIN__KERNEL float dtrain__row_exp_sum(const float *x, int64_t count, float top)
{
    const dtrain__v t = dtrain__vset(top);
    dtrain__v a = dtrain__vset(0), b = a;
    int64_t i = 0;
    for (; i + 2 * DTRAIN__W <= count; i += 2 * DTRAIN__W) {
        a += dtrain__vexp(dtrain__vload(x + i) - t);
        b += dtrain__vexp(dtrain__vload(x + i + DTRAIN__W) - t);
    }
    for (; i < count; i += DTRAIN__W) {
        const int64_t n = count - i;
        a += dtrain__vfirst(dtrain__vexp(dtrain__vload_n(x + i, n) - t), n);
    }
    return dtrain__vsum(a + b);
}

#define dtrain__range_cross_entropy DTRAIN__INSTANCE(dtrain__range_cross_entropy)
DTRAIN__KERNEL void dtrain__range_cross_entropy(dtrain__job *job, int64_t begin, int64_t end,
                                                int index)
{
    const dtrain_cross_entropy_args *a = (const dtrain_cross_entropy_args *)job->args;
    (void)index;
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)a->logits + row * a->n;
        double sum = 0;
        float top = -FLT_MAX;
        if (a->targets[row] == -1) {
            a->loss[row] = a->lse[row] = 0;
            continue;
        }
        for (int64_t i = 0; i < a->n; i += 2048) {
            const int64_t count = a->n - i < 2048 ? a->n - i : 2048;
            const float higher = dtrain__row_top(x + i, count, top);
            if (higher > top) sum *= exp((double)top - (double)higher);
            top = higher;
            sum += (double)dtrain__row_exp_sum(x + i, count, top);
        }
        const double lse = (double)top + log(sum);
        a->lse[row] = (float)lse;
        a->loss[row] = (float)(lse - (double)x[a->targets[row]]);
    }
}

#define dtrain__range_cross_entropy_backward DTRAIN__INSTANCE(dtrain__range_cross_entropy_backward)
DTRAIN__KERNEL void dtrain__range_cross_entropy_backward(dtrain__job *job, int64_t begin,
                                                         int64_t end, int index)
{
    const dtrain_cross_entropy_backward_args *a =
        (const dtrain_cross_entropy_backward_args *)job->args;
    const float factor = a->upstream ? a->scale * a->upstream[0] : a->scale;
    const dtrain__v scale = dtrain__vset(factor);
    (void)index;
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)a->logits + row * a->n;
        float *d = (float *)a->d_logits + row * a->n;
        const dtrain__v lse = dtrain__vset(a->lse[row]);
        if (a->targets[row] == -1) {
            memset(d, 0, (size_t)a->n * sizeof *d);
            continue;
        }
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            dtrain__vstore_n(d + i, dtrain__vexp(dtrain__vload_n(x + i, n) - lse) * scale, n);
        }
        d[a->targets[row]] -= factor;
    }
}

/* ---- [S24.5] Attention: compiled once per instruction set -------------------------------------
 *
 * One item is one head of one sequence (and, forward, one block of 64 queries). Blocks of 64 keys
 * pass by; what a block of queries needs stays in L1 and L2. Scores are kept transposed, keys x
 * queries:
 *
 *             queries ->             - the softmax of a query runs down a column: 8 or 16 queries
 *        keys +---------+              advance in the lanes of one vector, nothing is summed
 *         |   |  S^T    |              across lanes;
 *         v   |  \      |            - only the queries' side is transposed, once per block of
 *             |    \    |              queries, and K is read where it lies.
 *             +---------+   causal: the part below the diagonal (key > query) is never computed,
 *                           tile by tile, and blocks that are all below it are skipped.
 *
 * All products are C (m,n) (+)= A (m,k) B (k,n) with B rows contiguous and n padded to two vectors;
 * A is read by broadcasts, so a transposed A costs nothing. Head dimensions are padded with zeros.
 *
 *     forward                        backward, from S and the log-sum-exp (Dao et al., 2022)
 *     S^T = K (s Q)^T                S^T = K (s Q)^T        P^T = exp(S^T - lse)
 *     P^T = exp(S^T - top)           dP^T = V dO^T          dS^T = P^T (dP^T - rowsum(dO O))
 *     O += P V                       dV += P^T dO    dK += dS^T (s Q)    dQ += s dS K
 *
 * with s = 1/sqrt(d). Flops: 4 d per (query, key) forward, 10 d backward. */

#define DTRAIN__N (2 * DTRAIN__W) /* columns of a tile */

/* The micro-kernel: six rows by two vectors in twelve registers, each with a name of its own,
 * because compilers do not keep arrays of vectors in registers. With fewer rows the last one is
 * repeated and not stored. */
#define DTRAIN__SIX(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define DTRAIN__TILE_BEGIN(r)                                \
    dtrain__v left##r = dtrain__vset(0), right##r = left##r; \
    const float *a##r = a + ((r) < rows ? (r) : rows - 1) * a_row;
#define DTRAIN__TILE_STEP(r)                           \
    do {                                               \
        const dtrain__v x = dtrain__vset(a##r[at]);    \
        left##r = dtrain__vfma(x, b_left, left##r);    \
        right##r = dtrain__vfma(x, b_right, right##r); \
    } while (0);
#define DTRAIN__TILE_END(r)                            \
    if ((r) < rows) {                                  \
        float *to = c + (r)*c_row;                     \
        if (accumulate) {                              \
            left##r += dtrain__vload(to);              \
            right##r += dtrain__vload(to + DTRAIN__W); \
        }                                              \
        dtrain__vstore(to, left##r);                   \
        dtrain__vstore(to + DTRAIN__W, right##r);      \
    }

#define dtrain__tile DTRAIN__INSTANCE(dtrain__tile)
DTRAIN__KERNEL void dtrain__tile(int64_t rows, int64_t k, const float *a, int64_t a_row,
                                 int64_t a_step, const float *b, int64_t b_row, float *c,
                                 int64_t c_row, bool accumulate)
{
    DTRAIN__SIX(DTRAIN__TILE_BEGIN)
    for (int64_t at = 0, end = k * a_step; at < end; at += a_step, b += b_row) {
        const dtrain__v b_left = dtrain__vload(b), b_right = dtrain__vload(b + DTRAIN__W);
        DTRAIN__SIX(DTRAIN__TILE_STEP)
    }
    DTRAIN__SIX(DTRAIN__TILE_END)
}

/* C (m,n) (+)= A (m,k) B (k,n); element (i,p) of A is a[i a_row + p a_step]. */
#define dtrain__product DTRAIN__INSTANCE(dtrain__product)
DTRAIN__KERNEL void dtrain__product(int shape, int64_t m, int64_t n, int64_t k, const float *a,
                                    int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                                    float *c, int64_t c_row, bool accumulate)
{
    for (int64_t i = 0; i < m; i += 6) {
        const int64_t rows = m - i < 6 ? m - i : 6;
        const int64_t j0 = shape == DTRAIN__C_UPPER ? i / DTRAIN__N * DTRAIN__N : 0;
        const int64_t p0 = shape == DTRAIN__A_UPPER ? i : 0;
        const int64_t p1 = shape == DTRAIN__A_LOWER && i + rows < k ? i + rows : k;
        for (int64_t j = j0; j < n; j += DTRAIN__N)
            dtrain__tile(rows, p1 - p0, a + i * a_row + p0 * a_step, a_row, a_step,
                         b + p0 * b_row + j, b_row, c + i * c_row + j, c_row, accumulate);
    }
}

/* to (padded, width) = scale * from (rows, d), zeros around it. width is d rounded up to
 * vectors. */
#define dtrain__pack_rows DTRAIN__INSTANCE(dtrain__pack_rows)
DTRAIN__KERNEL void dtrain__pack_rows(float *to, int64_t width, int64_t padded, const float *from,
                                      int64_t stride, int64_t rows, int64_t d, float scale)
{
    const dtrain__v s = dtrain__vset(scale);
    for (int64_t r = 0; r < padded; r++, to += width, from += stride)
        for (int64_t j = 0; j < width; j += DTRAIN__W) {
            const bool inside = r < rows && j < d;
            dtrain__vstore(to + j, inside ? s * dtrain__vload_n(from + j, d - j) : dtrain__vset(0));
        }
}

/* to (width, 64) = transpose of from (padded, width). Eight by eight in registers. */
#define dtrain__transpose DTRAIN__INSTANCE(dtrain__transpose)
#if DTRAIN__ISA >= 2
DTRAIN__KERNEL void dtrain__transpose(float *to, const float *from, int64_t width, int64_t padded)
{
    for (int64_t r = 0; r < padded; r += 8)
        for (int64_t j = 0; j < width; j += 8) {
            const float *in = from + r * width + j;
            float *out = to + j * DTRAIN__ATTENTION_BLOCK + r;
            __m256 x[8], y[8];
            for (int i = 0; i < 8; i += 2) { /* pairs of rows: a0 b0 a1 b1 | a4 b4 a5 b5, ... */
                const __m256 a = _mm256_loadu_ps(in + i * width);
                const __m256 b = _mm256_loadu_ps(in + (i + 1) * width);
                x[i] = _mm256_unpacklo_ps(a, b);
                x[i + 1] = _mm256_unpackhi_ps(a, b);
            }
            for (int i = 0; i < 8;
                 i += 4) { /* four rows: column 0 | column 4, 1 | 5, 2 | 6, 3 | 7 */
                y[i] = _mm256_shuffle_ps(x[i], x[i + 2], 0x44);
                y[i + 1] = _mm256_shuffle_ps(x[i], x[i + 2], 0xee);
                y[i + 2] = _mm256_shuffle_ps(x[i + 1], x[i + 3], 0x44);
                y[i + 3] = _mm256_shuffle_ps(x[i + 1], x[i + 3], 0xee);
            }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(out + i * DTRAIN__ATTENTION_BLOCK,
                                 _mm256_permute2f128_ps(y[i], y[i + 4], 0x20));
                _mm256_storeu_ps(out + (i + 4) * DTRAIN__ATTENTION_BLOCK,
                                 _mm256_permute2f128_ps(y[i], y[i + 4], 0x31));
            }
        }
}
#else
DTRAIN__KERNEL void dtrain__transpose(float *to, const float *from, int64_t width, int64_t padded)
{
    for (int64_t r = 0; r < padded; r++)
        for (int64_t j = 0; j < width; j++)
            to[j * DTRAIN__ATTENTION_BLOCK + r] = from[r * width + j];
}
#endif

/* What one item works on. q, k, v, y, d_y, d_qkv begin at the head's columns of the sequence's
 * first row; the rest is scratch of this thread. */
#define dtrain__head DTRAIN__INSTANCE(dtrain__head)
typedef struct dtrain__head {
    int64_t sequence, d, width, stride, y_stride; /* width: d rounded up to a tile */
    bool causal;
    float scale;
    const float *q, *k, *v, *y, *d_y;
    float *queries, *queries_t; /* (64, width), (width, 64): scaled, and transposed */
    float *keys;                /* (64, width): K, or V in the forward pass */
    float *scores;              /* (64 keys, 64 queries) */
    float *out;                 /* (64, width): O forward, dQ backward */
    float *top, *sum, *factor;  /* (64): running maximum and sum, rescaling of O */
    float *d_out, *d_out_t;     /* (64, width), (width, 64) */
    float *slopes;              /* (64, 64): dS^T */
    float *delta, *lse;         /* (64): rowsum(dO O) */
    float *d_keys, *d_values;   /* (sequence rounded up to 64, width) */
} dtrain__head;

#define dtrain__head_open DTRAIN__INSTANCE(dtrain__head_open)
DTRAIN__KERNEL float *dtrain__head_open(dtrain__head *h, const dtrain_attention_args *a,
                                        int64_t item, float *scratch)
{
    const int64_t d = a->n / a->heads, batch = item / a->heads, column = item % a->heads * d;
    const int64_t row = batch * a->sequence;
    h->sequence = a->sequence;
    h->d = d;
    h->width = (d + DTRAIN__N - 1) / DTRAIN__N * DTRAIN__N;
    h->stride = 3 * a->n;
    h->y_stride = a->n;
    h->causal = a->causal;
    h->scale = 1 / sqrtf((float)d);
    h->q = (const float *)a->qkv + row * h->stride + column;
    h->k = h->q + a->n;
    h->v = h->k + a->n;
    h->queries = scratch;
    h->queries_t = h->queries + DTRAIN__ATTENTION_BLOCK * h->width;
    h->keys = h->queries_t + DTRAIN__ATTENTION_BLOCK * h->width;
    h->out = h->keys + DTRAIN__ATTENTION_BLOCK * h->width;
    h->scores = h->out + DTRAIN__ATTENTION_BLOCK * h->width;
    h->top = h->scores + DTRAIN__ATTENTION_BLOCK * DTRAIN__ATTENTION_BLOCK;
    h->sum = h->top + DTRAIN__ATTENTION_BLOCK;
    h->factor = h->sum + DTRAIN__ATTENTION_BLOCK;
    return h->factor + DTRAIN__ATTENTION_BLOCK;
}

#define dtrain__padded DTRAIN__INSTANCE(dtrain__padded)
DTRAIN__VECTOR int64_t dtrain__padded(int64_t rows)
{
    return (rows + DTRAIN__N - 1) / DTRAIN__N * DTRAIN__N;
}

/* Keys that the queries [c, c + W) of a block see; on the diagonal, key j and query j are the same
 * position. The masked rest of these scores is -FLT_MAX, whose exp is 0. */
#define dtrain__mask_column DTRAIN__INSTANCE(dtrain__mask_column)
DTRAIN__VECTOR int64_t dtrain__mask_column(float *scores, int64_t c, int64_t keys, bool diagonal)
{
    const dtrain__vi query = dtrain__viota() + dtrain__viset((int32_t)c);
    if (!diagonal) return keys;
    const int64_t end = c + DTRAIN__W < keys ? c + DTRAIN__W : keys;
    for (int64_t key = c + 1; key < end; key++) {
        float *at = scores + key * DTRAIN__ATTENTION_BLOCK + c;
        const dtrain__vi hidden = dtrain__viless(query, dtrain__viset((int32_t)key));
        dtrain__vstore(at, dtrain__vselect(hidden, dtrain__vset(-FLT_MAX), dtrain__vload(at)));
    }
    return end;
}

/* Products that use the result skip zeros by tiles of six: five more rows must be 0. */
#define dtrain__clear_below DTRAIN__INSTANCE(dtrain__clear_below)
DTRAIN__VECTOR void dtrain__clear_below(float *scores, int64_t c, int64_t seen, int64_t keys)
{
    for (int64_t key = seen; key < keys && key < seen + 5; key++)
        dtrain__vstore(scores + key * DTRAIN__ATTENTION_BLOCK + c, dtrain__vset(0));
}

/* Online softmax (Milakov and Gimelshein, 2018): scores become exp(S - top) with the maximum of all
 * keys so far; sum and what O holds already are rescaled by factor = exp(old top - top). */
#define dtrain__softmax_block DTRAIN__INSTANCE(dtrain__softmax_block)
DTRAIN__KERNEL void dtrain__softmax_block(const dtrain__head *h, int64_t queries, int64_t keys,
                                          bool diagonal)
{
    for (int64_t c = 0; c < queries; c += DTRAIN__W) {
        const int64_t seen = dtrain__mask_column(h->scores, c, keys, diagonal);
        const dtrain__v old = dtrain__vload(h->top + c);
        dtrain__v top = old, sum = dtrain__vset(0);
        float *s = h->scores + c;
        for (int64_t key = 0; key < seen; key++)
            top = dtrain__vmax(top, dtrain__vload(s + key * DTRAIN__ATTENTION_BLOCK));
        for (int64_t key = 0; key < seen; key++) {
            const dtrain__v p =
                dtrain__vexp(dtrain__vload(s + key * DTRAIN__ATTENTION_BLOCK) - top);
            dtrain__vstore(s + key * DTRAIN__ATTENTION_BLOCK, p);
            sum += p;
        }
        dtrain__clear_below(h->scores, c, seen, keys);
        const dtrain__v factor = dtrain__vexp(old - top);
        dtrain__vstore(h->factor + c, factor);
        dtrain__vstore(h->top + c, top);
        dtrain__vstore(h->sum + c, dtrain__vfma(dtrain__vload(h->sum + c), factor, sum));
    }
}

#define dtrain__scale_rows DTRAIN__INSTANCE(dtrain__scale_rows)
DTRAIN__KERNEL void dtrain__scale_rows(float *x, int64_t rows, int64_t width, const float *factor)
{
    for (int64_t r = 0; r < rows; r++, x += width) {
        const dtrain__v f = dtrain__vset(factor[r]);
        if (factor[r] == 1) continue;
        for (int64_t j = 0; j < width; j += DTRAIN__W)
            dtrain__vstore(x + j, dtrain__vload(x + j) * f);
    }
}

/* Item: one block of queries of one head; the long ones come first. */
#define dtrain__range_attention DTRAIN__INSTANCE(dtrain__range_attention)
DTRAIN__KERNEL void dtrain__range_attention(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_attention_args *a = (const dtrain_attention_args *)job->args;
    const int64_t head_count = a->batch * a->heads;
    const int64_t blocks = (a->sequence + DTRAIN__ATTENTION_BLOCK - 1) / DTRAIN__ATTENTION_BLOCK;
    for (int64_t item = begin; item < end; item++) {
        dtrain__head h;
        const int64_t head = item % head_count, batch = head / a->heads;
        const int64_t q0 = (blocks - 1 - item / head_count) * DTRAIN__ATTENTION_BLOCK;
        const int64_t left = a->sequence - q0,
                      m = left < DTRAIN__ATTENTION_BLOCK ? left : DTRAIN__ATTENTION_BLOCK;
        const int64_t limit = a->causal ? q0 + m : a->sequence;
        dtrain__head_open(&h, a, head, job->scratch + index * job->slot);
        dtrain__pack_rows(h.queries, h.width, dtrain__padded(m), h.q + q0 * h.stride, h.stride, m,
                          h.d, h.scale);
        dtrain__transpose(h.queries_t, h.queries, h.width, dtrain__padded(m));
        for (int i = 0; i < DTRAIN__ATTENTION_BLOCK; i++) {
            h.top[i] = -FLT_MAX;
            h.sum[i] = 0;
        }
        for (int64_t k0 = 0; k0 < limit; k0 += DTRAIN__ATTENTION_BLOCK) {
            const int64_t keys =
                limit - k0 < DTRAIN__ATTENTION_BLOCK ? limit - k0 : DTRAIN__ATTENTION_BLOCK;
            const bool diagonal = a->causal && k0 == q0;
            dtrain__product(diagonal ? DTRAIN__C_UPPER : DTRAIN__FULL, keys, dtrain__padded(m), h.d,
                            h.k + k0 * h.stride, h.stride, 1, h.queries_t, DTRAIN__ATTENTION_BLOCK,
                            h.scores, DTRAIN__ATTENTION_BLOCK, false);
            dtrain__softmax_block(&h, m, keys, diagonal);
            if (k0 > 0) dtrain__scale_rows(h.out, m, h.width, h.factor);
            dtrain__pack_rows(h.keys, h.width, keys, h.v + k0 * h.stride, h.stride, keys, h.d, 1);
            dtrain__product(diagonal ? DTRAIN__A_LOWER : DTRAIN__FULL, m, h.width, keys, h.scores,
                            1, DTRAIN__ATTENTION_BLOCK, h.keys, h.width, h.out, h.width, k0 > 0);
        }
        for (int64_t r = 0; r < m; r++) {
            const int64_t row = batch * a->sequence + q0 + r;
            float *y = (float *)a->y + row * a->n + head % a->heads * h.d;
            const dtrain__v inverse = dtrain__vset(1 / h.sum[r]);
            for (int64_t j = 0; j < h.d; j += DTRAIN__W)
                dtrain__vstore_n(y + j, dtrain__vload(h.out + r * h.width + j) * inverse, h.d - j);
            a->lse[head * a->sequence + q0 + r] = h.top[r] + logf(h.sum[r]);
        }
    }
}

/* ---- Backward ---- */

/* The queries' side of one block: scaled Q, dO, their transposes, lse and rowsum(dO O). */
#define dtrain__open_queries DTRAIN__INSTANCE(dtrain__open_queries)
DTRAIN__KERNEL void dtrain__open_queries(const dtrain__head *h, int64_t q0, int64_t m,
                                         const float *lse)
{
    const int64_t padded = dtrain__padded(m);
    dtrain__pack_rows(h->queries, h->width, padded, h->q + q0 * h->stride, h->stride, m, h->d,
                      h->scale);
    dtrain__pack_rows(h->d_out, h->width, padded, h->d_y + q0 * h->y_stride, h->y_stride, m, h->d,
                      1);
    dtrain__transpose(h->queries_t, h->queries, h->width, padded);
    dtrain__transpose(h->d_out_t, h->d_out, h->width, padded);
    for (int64_t r = 0; r < DTRAIN__ATTENTION_BLOCK; r++) {
        dtrain__v delta = dtrain__vset(0);
        for (int64_t j = 0; r < m && j < h->d; j += DTRAIN__W)
            delta =
                dtrain__vfma(dtrain__vload(h->d_out + r * h->width + j),
                             dtrain__vload_n(h->y + (q0 + r) * h->y_stride + j, h->d - j), delta);
        h->delta[r] = dtrain__vsum(delta);
        h->lse[r] = r < m ? lse[q0 + r] : FLT_MAX; /* padding: exp(0 - FLT_MAX) = 0 */
    }
}

/* scores = P^T = exp(S^T - lse); slopes = dS^T = P^T (dP^T - delta). */
#define dtrain__softmax_slopes DTRAIN__INSTANCE(dtrain__softmax_slopes)
DTRAIN__KERNEL void dtrain__softmax_slopes(const dtrain__head *h, int64_t queries, int64_t keys,
                                           bool diagonal)
{
    for (int64_t c = 0; c < queries; c += DTRAIN__W) {
        const int64_t seen = dtrain__mask_column(h->scores, c, keys, diagonal);
        const dtrain__v lse = dtrain__vload(h->lse + c), delta = dtrain__vload(h->delta + c);
        float *s = h->scores + c, *g = h->slopes + c;
        for (int64_t key = 0; key < seen;
             key++, s += DTRAIN__ATTENTION_BLOCK, g += DTRAIN__ATTENTION_BLOCK) {
            const dtrain__v p = dtrain__vexp(dtrain__vload(s) - lse);
            dtrain__vstore(s, p);
            dtrain__vstore(g, p * (dtrain__vload(g) - delta));
        }
        dtrain__clear_below(h->scores, c, seen, keys);
        dtrain__clear_below(h->slopes, c, seen, keys);
    }
}

/* One block of keys against the open block of queries: five products. */
#define dtrain__attend_backward DTRAIN__INSTANCE(dtrain__attend_backward)
DTRAIN__KERNEL void dtrain__attend_backward(const dtrain__head *h, int64_t m, int64_t k0,
                                            int64_t keys, bool diagonal, bool first_keys)
{
    const int64_t b = DTRAIN__ATTENTION_BLOCK, n = dtrain__padded(m);
    const int inner = diagonal ? DTRAIN__C_UPPER : DTRAIN__FULL;
    const int over_queries = diagonal ? DTRAIN__A_UPPER : DTRAIN__FULL;
    const int over_keys = diagonal ? DTRAIN__A_LOWER : DTRAIN__FULL;
    dtrain__pack_rows(h->keys, h->width, keys, h->k + k0 * h->stride, h->stride, keys, h->d, 1);
    dtrain__product(inner, keys, n, h->d, h->keys, h->width, 1, h->queries_t, b, h->scores, b,
                    false);
    dtrain__product(inner, keys, n, h->d, h->v + k0 * h->stride, h->stride, 1, h->d_out_t, b,
                    h->slopes, b, false);
    dtrain__softmax_slopes(h, m, keys, diagonal);
    dtrain__product(over_queries, keys, h->width, m, h->scores, b, 1, h->d_out, h->width,
                    h->d_values + k0 * h->width, h->width, true);
    dtrain__product(over_queries, keys, h->width, m, h->slopes, b, 1, h->queries, h->width,
                    h->d_keys + k0 * h->width, h->width, true);
    dtrain__product(over_keys, m, h->width, keys, h->slopes, 1, b, h->keys, h->width, h->out,
                    h->width, !first_keys);
}

/* to (rows, d) = scale * from (rows, width). */
#define dtrain__unpack_rows DTRAIN__INSTANCE(dtrain__unpack_rows)
DTRAIN__KERNEL void dtrain__unpack_rows(float *to, int64_t stride, const float *from, int64_t width,
                                        int64_t rows, int64_t d, float scale)
{
    const dtrain__v s = dtrain__vset(scale);
    for (int64_t r = 0; r < rows; r++, to += stride, from += width)
        for (int64_t j = 0; j < d; j += DTRAIN__W)
            dtrain__vstore_n(to + j, dtrain__vload(from + j) * s, d - j);
}

/* Item: one head of one sequence, so that no two threads write one element. */
#define dtrain__range_attention_backward DTRAIN__INSTANCE(dtrain__range_attention_backward)
DTRAIN__KERNEL void dtrain__range_attention_backward(dtrain__job *job, int64_t begin, int64_t end,
                                                     int index)
{
    const dtrain_attention_backward_args *a = (const dtrain_attention_backward_args *)job->args;
    dtrain_attention_args forward;
    memset(&forward, 0, sizeof forward);
    forward.sequence = a->sequence;
    forward.heads = a->heads;
    forward.n = a->n;
    forward.causal = a->causal;
    forward.qkv = a->qkv;
    for (int64_t item = begin; item < end; item++) {
        dtrain__head h;
        float *scratch = dtrain__head_open(&h, &forward, item, job->scratch + index * job->slot);
        const int64_t at = item / a->heads * a->sequence * a->n + item % a->heads * h.d;
        const int64_t rounded = (a->sequence + DTRAIN__ATTENTION_BLOCK - 1) /
                                DTRAIN__ATTENTION_BLOCK * DTRAIN__ATTENTION_BLOCK;
        float *d_q = (float *)a->d_qkv + (h.q - (const float *)a->qkv);
        h.y = (const float *)a->y + at;
        h.d_y = (const float *)a->d_y + at;
        h.d_out = scratch;
        h.d_out_t = h.d_out + DTRAIN__ATTENTION_BLOCK * h.width;
        h.slopes = h.d_out_t + DTRAIN__ATTENTION_BLOCK * h.width;
        h.delta = h.slopes + DTRAIN__ATTENTION_BLOCK * DTRAIN__ATTENTION_BLOCK;
        h.lse = h.delta + DTRAIN__ATTENTION_BLOCK;
        h.d_keys = h.lse + DTRAIN__ATTENTION_BLOCK;
        h.d_values = h.d_keys + rounded * h.width;
        memset(h.d_keys, 0, (size_t)(2 * rounded * h.width) * sizeof(float));
        for (int64_t q0 = 0; q0 < a->sequence; q0 += DTRAIN__ATTENTION_BLOCK) {
            const int64_t left = a->sequence - q0,
                          m = left < DTRAIN__ATTENTION_BLOCK ? left : DTRAIN__ATTENTION_BLOCK;
            const int64_t limit = a->causal ? q0 + m : a->sequence;
            dtrain__open_queries(&h, q0, m, a->lse + item * a->sequence);
            for (int64_t k0 = 0; k0 < limit; k0 += DTRAIN__ATTENTION_BLOCK) {
                const int64_t keys =
                    limit - k0 < DTRAIN__ATTENTION_BLOCK ? limit - k0 : DTRAIN__ATTENTION_BLOCK;
                dtrain__attend_backward(&h, m, k0, keys, a->causal && k0 == q0, k0 == 0);
            }
            dtrain__unpack_rows(d_q + q0 * h.stride, h.stride, h.out, h.width, m, h.d, h.scale);
        }
        dtrain__unpack_rows(d_q + a->n, h.stride, h.d_keys, h.width, a->sequence, h.d, 1);
        dtrain__unpack_rows(d_q + 2 * a->n, h.stride, h.d_values, h.width, a->sequence, h.d, 1);
    }
}

/* ---- The table of this instance ---------------------------------------------------------------*/

static const dtrain__kernels DTRAIN__INSTANCE(dtrain__kernels) = {
    DTRAIN__STRING(DTRAIN__SUFFIX),
    dtrain__range_activate,
    dtrain__range_activation_backward,
    dtrain__range_layernorm,
    dtrain__range_layernorm_backward,
    dtrain__range_layernorm_params,
    dtrain__range_embedding,
    dtrain__range_embedding_backward,
    dtrain__range_attention,
    dtrain__range_attention_backward,
    dtrain__range_cross_entropy,
    dtrain__range_cross_entropy_backward,
    dtrain__range_add,
    dtrain__range_axpby,
    dtrain__range_dropout,
    dtrain__range_sum,
    dtrain__range_convert,
    dtrain__range_adamw,
    dtrain__range_sgd,
};

#undef DTRAIN__SUFFIX
#undef DTRAIN__W
#undef DTRAIN__ON

#endif /* DTRAIN__ISA */
/* ----------------------------------------------------------------------------------------------*/

#if defined(DTRAIN_IMPLEMENTATION) && !defined(DTRAIN__ISA) && !defined(DTRAIN__SECOND_HALF)
#define DTRAIN__SECOND_HALF

static const dtrain__kernels *dtrain__kernels_select(void)
{
#if defined(DTRAIN_NO_SIMD)
    return &dtrain__kernels_scalar;
#else
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &dtrain__kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &dtrain__kernels_avx2; /* F16C came two generations earlier */
#endif
    return &dtrain__kernels_generic;
#endif
}

DTRAIN_API const char *dtrain_cpu_kernel_name(void)
{
#ifdef DTRAIN_USE_CBLAS
    return "cblas";
#else
    return dtrain__kernels_select()->name;
#endif
}

DTRAIN_API const char *dtrain_cpu_bf16_kernel_name(void)
{
    const dtrain__isa *pairs = dtrain__pairs_select();
    return pairs ? pairs->name : dtrain_cpu_kernel_name();
}

/* ---- [S24.6] The CPU device: state and memory -----------------------------------------------*/

#define DTRAIN__WIDE 4 /* operands of one operation that may have to be widened */

typedef struct dtrain__cpu {
    dtrain_allocator allocator;
    dtrain__pool *pool;
    int thread_count;
    const dtrain__kernels *kernels;
    dtrain__gemm_workspace gemm;
    float *scratch; /* of attention, layernorm backward, cblas; grows in the first step */
    size_t scratch_bytes;
    double sums[DTRAIN__SUM_CHUNKS];
    float *wide[DTRAIN__WIDE]; /* half-precision operands in fp32; they grow in the first step */
    size_t wide_bytes[DTRAIN__WIDE];
} dtrain__cpu;

/* 64-byte aligned memory from an allocator that aligns for any type: the block's own address is
 * kept in the bytes before the memory that is handed out. */
#define DTRAIN__ALIGN_EXTRA (63 + sizeof(void *))

static int64_t dtrain__multiple(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Asks for 2 MiB pages where the kernel gives them on request: matrices walk many pages at once,
 * and first touch is some ten times faster. A refusal changes nothing. */
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

/* At least `floats` of scratch in job->scratch. Contents do not survive. */
static dtrain_result dtrain__cpu_scratch(dtrain__cpu *cpu, dtrain__job *job, int64_t floats)
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
    job->scratch = cpu->scratch;
    return DTRAIN_OK;
}

static void dtrain__cpu_destroy(dtrain_device *device)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    if (!cpu) return;
    const dtrain_allocator allocator = cpu->allocator;
    dtrain__pool_destroy(cpu->pool);
    dtrain__gemm_workspace_free(&cpu->gemm);
    dtrain__aligned_free(&allocator, cpu->scratch, cpu->scratch_bytes);
    for (int i = 0; i < DTRAIN__WIDE; i++)
        dtrain__aligned_free(&allocator, cpu->wide[i], cpu->wide_bytes[i]);
    dtrain__free(&allocator, cpu, 1, sizeof *cpu);
    device->state = NULL;
}

static dtrain_result dtrain__cpu_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    const int threads = desc->thread_count ? (int)desc->thread_count : 1;
    const dtrain_allocator allocator = dtrain__resolve_allocator(&desc->allocator);
    device->state = NULL;
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
    cpu->gemm.allocator = &cpu->allocator;
    cpu->thread_count = threads;
    cpu->kernels = dtrain__kernels_select();
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

static dtrain_result dtrain__cpu_synchronize(dtrain_device *device)
{
    (void)device;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_device_reserve(dtrain_device *device, size_t bytes)
{
    const uint64_t used = (uint64_t)device->allocated_bytes + device->comm_bytes;
    if (!device->limit_bytes ||
        (used <= device->limit_bytes && bytes <= device->limit_bytes - used))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "memory limit: %llu bytes asked for beside %llu in use, and the limit of "
                       "this rank is %llu; a strategy that shards more, activation checkpointing, "
                       "a smaller batch or a higher memory_limit would help",
                       (unsigned long long)bytes, (unsigned long long)used,
                       (unsigned long long)device->limit_bytes);
}

DTRAIN_API void dtrain_device_count(dtrain_device *device, size_t *counter, size_t bytes)
{
    *counter += bytes;
    const size_t used = device->allocated_bytes + device->comm_bytes;
    if (used > device->peak_bytes) device->peak_bytes = used;
}

static dtrain_result dtrain__cpu_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    *memory = NULL;
    DTRAIN__TRY(dtrain_device_reserve(device, bytes));
    *memory = dtrain__aligned_alloc(&cpu->allocator, bytes);
    if (!*memory)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "no memory for %llu bytes on the CPU device, which holds %llu already",
                           (unsigned long long)bytes, (unsigned long long)device->allocated_bytes);
    dtrain_device_count(device, &device->allocated_bytes, bytes);
    return DTRAIN_OK;
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

static dtrain_result dtrain__cpu_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    if (bytes) memset(memory, 0, bytes);
    return DTRAIN_OK;
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

static dtrain__job dtrain__job_make(const void *args, int64_t total, int64_t unit)
{
    dtrain__job job;
    memset(&job, 0, sizeof job);
    job.args = args;
    job.total = total;
    job.unit = unit;
    return job;
}

/* `elements` is the work's size: a small job stays on the calling thread. */
static dtrain_result dtrain__job_run(dtrain__cpu *cpu, dtrain__job *job, dtrain__range_fn range,
                                     int64_t elements)
{
    job->range = range;
    dtrain__parallel(elements > DTRAIN__SMALL ? cpu->pool : NULL, dtrain__job_task, job);
    return DTRAIN_OK;
}

/* Each element by itself, cut at cache lines. */
static dtrain_result dtrain__cpu_elementwise(dtrain_device *device, const void *args, int64_t count,
                                             dtrain__range_fn range)
{
    dtrain__job job = dtrain__job_make(args, count, DTRAIN__LINE);
    return dtrain__job_run((dtrain__cpu *)device->state, &job, range, count);
}

static const dtrain__kernels *dtrain__cpu_kernels(dtrain_device *device)
{
    return ((dtrain__cpu *)device->state)->kernels;
}

static dtrain_allocator dtrain__cpu_allocator(const dtrain_device *device)
{
    return ((const dtrain__cpu *)device->state)->allocator;
}

/* ---- Matrix multiplication --------------------------------------------------------------------*/

/* With an external library only products that the processor multiplies in bf16 stay here. */
static bool dtrain__is_built_in(dtrain__cpu *cpu, const dtrain_gemm_args *args)
{
#ifdef DTRAIN_USE_CBLAS
    dtrain__gemm_select(&cpu->gemm);
    return cpu->gemm.pairs && args->a_dtype == DTRAIN_BF16 && args->b_dtype == DTRAIN_BF16;
#else
    (void)cpu;
    (void)args;
    return true;
#endif
}

static dtrain_result dtrain__built_in_product(dtrain__cpu *cpu, const dtrain_gemm_args *args)
{
    if (dtrain__gemm(cpu->pool, &cpu->gemm, args) != 0)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the packing buffers of a GEMM");
    return DTRAIN_OK;
}

#ifdef DTRAIN_USE_CBLAS

/* A copy of a (rows, columns) matrix as fp32, or back; both with leading dimension ld. */
static void dtrain__cpu_convert_matrix(dtrain__cpu *cpu, const void *x, dtrain_dtype x_dtype,
                                       void *y, dtrain_dtype y_dtype, int64_t rows, int64_t columns,
                                       int64_t ld)
{
    for (int64_t row = 0; row < rows; row++) {
        dtrain_convert_args args;
        args.count = columns;
        args.x = (const char *)x + (size_t)(row * ld) * dtrain_dtype_bytes(x_dtype);
        args.y = (char *)y + (size_t)(row * ld) * dtrain_dtype_bytes(y_dtype);
        args.x_dtype = x_dtype;
        args.y_dtype = y_dtype;
        dtrain__job job = dtrain__job_make(&args, columns, DTRAIN__LINE);
        dtrain__job_run(cpu, &job, cpu->kernels->convert, columns);
    }
}

/* The library multiplies fp32; operands in half precision are converted through the scratch; bias,
 * aux and activation follow in a second pass over C. */
static dtrain_result dtrain__cpu_product(dtrain_device *device, const dtrain_gemm_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0;
    const bool trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int64_t a_rows = trans_a ? args->k : args->m, b_rows = trans_b ? args->n : args->k;
    const int64_t a_size = args->a_dtype == DTRAIN_F32 ? 0 : a_rows * args->lda;
    const int64_t b_size = args->b_dtype == DTRAIN_F32 ? 0 : b_rows * args->ldb;
    const int64_t c_size = args->c_dtype == DTRAIN_F32 ? 0 : args->m * args->ldc;
    dtrain_gemm_args plain = *args;
    if (args->m <= 0 || args->n <= 0) return DTRAIN_OK;
    if (dtrain__is_built_in(cpu, args)) return dtrain__built_in_product(cpu, args);
    if (args->m > INT_MAX || args->n > INT_MAX || args->k > INT_MAX || args->lda > INT_MAX ||
        args->ldb > INT_MAX || args->ldc > INT_MAX)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "cblas takes dimensions up to %d", INT_MAX);
    dtrain__job job = dtrain__job_make(&plain, args->m, 1);
    const dtrain_result result = dtrain__cpu_scratch(cpu, &job, a_size + b_size + c_size);
    if (result != DTRAIN_OK) return result;
    if (a_size) {
        plain.a = job.scratch;
        dtrain__cpu_convert_matrix(cpu, args->a, args->a_dtype, job.scratch, DTRAIN_F32, a_rows,
                                   trans_a ? args->m : args->k, args->lda);
    }
    if (b_size) {
        plain.b = job.scratch + a_size;
        dtrain__cpu_convert_matrix(cpu, args->b, args->b_dtype, job.scratch + a_size, DTRAIN_F32,
                                   b_rows, trans_b ? args->k : args->n, args->ldb);
    }
    if (c_size) {
        plain.c = job.scratch + a_size + b_size;
        if (args->beta != 0)
            dtrain__cpu_convert_matrix(cpu, args->c, args->c_dtype, plain.c, DTRAIN_F32, args->m,
                                       args->n, args->ldc);
    }
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans,
                trans_b ? CblasTrans : CblasNoTrans, (int)args->m, (int)args->n, (int)args->k,
                args->alpha, (const float *)plain.a, (int)args->lda, (const float *)plain.b,
                (int)args->ldb, args->beta, (float *)plain.c, (int)args->ldc);
    if (args->bias || args->aux || args->activation != DTRAIN_ACT_NONE)
        dtrain__job_run(cpu, &job, cpu->kernels->activate, args->m * args->n);
    if (c_size)
        dtrain__cpu_convert_matrix(cpu, plain.c, DTRAIN_F32, args->c, args->c_dtype, args->m,
                                   args->n, args->ldc);
    return DTRAIN_OK;
}

#else

static dtrain_result dtrain__cpu_product(dtrain_device *device, const dtrain_gemm_args *args)
{
    return dtrain__built_in_product((dtrain__cpu *)device->state, args);
}

#endif

/* ---- Half precision -----------------------------------------------------------------------------
 *
 * Kernels compute in fp32 on fp32. Operands in BF16 or F16 are widened into buffers of the device
 * first, and results are rounded back once at the end: exact, and the price is two more passes.
 *
 *     dtrain__wide_list w = dtrain__wide_begin(device);
 *     args.x = dtrain__wide(&w, args.x, args.dtype, count, DTRAIN__READ);
 *     ... run on args ...
 *     return dtrain__wide_end(&w, result);
 *
 * A buffer that appears twice, as input and output in place, is one buffer here too. GEMM and the
 * activation's backward pass, the largest of all, read and write half precision themselves. */

enum { DTRAIN__READ = 1, DTRAIN__WRITE = 2 };

typedef struct dtrain__wide_item {
    void *narrow;
    float *wide;
    int64_t count;
    dtrain_dtype dtype;
    int access;
} dtrain__wide_item;

typedef struct dtrain__wide_list {
    dtrain__cpu *cpu;
    dtrain__wide_item items[DTRAIN__WIDE];
    int count;
    dtrain_result result;
} dtrain__wide_list;

static dtrain__wide_list dtrain__wide_begin(dtrain_device *device)
{
    dtrain__wide_list list;
    memset(&list, 0, sizeof list);
    list.cpu = (dtrain__cpu *)device->state;
    return list;
}

static bool dtrain__is_f32(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F32 || dtype == DTRAIN_DTYPE_NONE;
}

static dtrain_result dtrain__check_dtype(dtrain_dtype dtype)
{
    if (dtrain__is_f32(dtype) || dtype == DTRAIN_BF16 || dtype == DTRAIN_F16) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "activations of type %s: expected f32, bf16 or f16",
                       dtrain_dtype_name(dtype));
}

static void dtrain__cpu_convert_run(dtrain__cpu *cpu, const void *x, dtrain_dtype x_dtype, void *y,
                                    dtrain_dtype y_dtype, int64_t count)
{
    dtrain_convert_args args = {count, x, y, x_dtype, y_dtype};
    dtrain__job job = dtrain__job_make(&args, count, DTRAIN__LINE);
    dtrain__job_run(cpu, &job, cpu->kernels->convert, count);
}

static bool dtrain__wide_grow(dtrain__wide_list *list, int slot, size_t bytes)
{
    dtrain__cpu *cpu = list->cpu;
    if (bytes <= cpu->wide_bytes[slot]) return true;
    dtrain__aligned_free(&cpu->allocator, cpu->wide[slot], cpu->wide_bytes[slot]);
    cpu->wide_bytes[slot] = 0;
    cpu->wide[slot] = (float *)dtrain__aligned_alloc(&cpu->allocator, bytes);
    if (cpu->wide[slot]) cpu->wide_bytes[slot] = bytes;
    else
        list->result = dtrain_fail(DTRAIN_ERROR_MEMORY,
                                   "no memory for %zu bytes to widen half precision", bytes);
    return cpu->wide[slot] != NULL;
}

/* x (count) as fp32; x itself when it is. NULL stays NULL, and is also the answer to an error. */
static float *dtrain__wide(dtrain__wide_list *list, const void *x, dtrain_dtype dtype,
                           int64_t count, int access)
{
    if (!x || dtrain__is_f32(dtype) || list->result != DTRAIN_OK) return (float *)(uintptr_t)x;
    list->result = dtrain__check_dtype(dtype);
    if (list->result != DTRAIN_OK) return NULL;
    for (int i = 0; i < list->count; i++)
        if (list->items[i].narrow == x && list->items[i].count == count) {
            list->items[i].access |= access;
            return list->items[i].wide;
        }
    if (!dtrain__wide_grow(list, list->count, (size_t)count * sizeof(float))) return NULL;
    dtrain__wide_item *item = &list->items[list->count];
    item->narrow = (void *)(uintptr_t)x;
    item->wide = list->cpu->wide[list->count++];
    item->count = count;
    item->dtype = dtype;
    item->access = access;
    if (access & DTRAIN__READ)
        dtrain__cpu_convert_run(list->cpu, x, dtype, item->wide, DTRAIN_F32, count);
    return item->wide;
}

static dtrain_result dtrain__wide_end(dtrain__wide_list *list, dtrain_result result)
{
    if (list->result != DTRAIN_OK || result != DTRAIN_OK)
        return list->result != DTRAIN_OK ? list->result : result;
    for (int i = 0; i < list->count; i++) {
        const dtrain__wide_item *item = &list->items[i];
        if (item->access & DTRAIN__WRITE)
            dtrain__cpu_convert_run(list->cpu, item->wide, DTRAIN_F32, item->narrow, item->dtype,
                                    item->count);
    }
    return DTRAIN_OK;
}

/* Runs an elementwise kernel on arguments that have been widened. */
static dtrain_result dtrain__wide_elementwise(dtrain__wide_list *list, const void *args,
                                              int64_t count, dtrain__range_fn range)
{
    if (list->result != DTRAIN_OK) return list->result;
    dtrain__job job = dtrain__job_make(args, count, DTRAIN__LINE);
    return dtrain__wide_end(list, dtrain__job_run(list->cpu, &job, range, count));
}

/* ---- Activation, backward ---------------------------------------------------------------------*/

static dtrain_result dtrain__cpu_activation_backward(dtrain_device *device,
                                                     const dtrain_activation_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain_activation_backward_args all = *args;
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    if (!args->d_bias) { /* no column sums: one long row */
        all.n = args->rows * args->n;
        all.rows = 1;
    }
    dtrain__job job = dtrain__job_make(&all, all.n, DTRAIN__LINE);
    return dtrain__job_run(cpu, &job, cpu->kernels->activation_backward, args->rows * args->n);
}

/* ---- Matrix multiplication: bias gradients and backward epilogues -----------------------------*/

static void dtrain__row_sums(const dtrain_gemm_args *args, const float *a)
{
    for (int64_t i = 0; i < args->m; i++) {
        float sum = args->accumulate_bias_grad ? args->bias_grad[i] : 0;
        for (int64_t k = 0; k < args->k; k++) sum += a[i * args->lda + k];
        args->bias_grad[i] = sum;
    }
}

static dtrain_result dtrain__check_gemm(const dtrain_gemm_args *args)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = args->bias_grad && (args->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    if (backward && (!args->aux || args->bias))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: DTRAIN_GEMM_ACT_BACKWARD needs aux and takes no bias");
    if ((backward || of_c) && args->ldc != args->n)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: ldc is %lld; a backward epilogue needs ldc == n (%lld)",
                           (long long)args->ldc, (long long)args->n);
    if (args->bias_grad && !of_c && (args->flags & DTRAIN_GEMM_TRANS_A) && args->lda != args->m)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: lda is %lld; a bias gradient needs lda == m (%lld)",
                           (long long)args->lda, (long long)args->m);
    return DTRAIN_OK;
}

/* A second pass over C: slopes (z, or NULL: none) and column sums. */
static dtrain_result dtrain__gemm_after(dtrain_device *device, const dtrain_gemm_args *args,
                                        uint32_t activation, const void *z, float *bias_grad)
{
    const dtrain_activation_backward_args after = {z ? activation : (uint32_t)DTRAIN_ACT_NONE,
                                                   args->accumulate_bias_grad,
                                                   args->m,
                                                   args->n,
                                                   z,
                                                   args->c,
                                                   args->c,
                                                   bias_grad,
                                                   args->c_dtype};
    return dtrain__cpu_activation_backward(device, &after);
}

/* bias_grad (m) = row sums of op(A): column sums of what is stored, where it is transposed. */
static dtrain_result dtrain__gemm_bias_grad(dtrain_device *device, dtrain__wide_list *list,
                                            const dtrain_gemm_args *args)
{
    if (args->flags & DTRAIN_GEMM_TRANS_A) {
        const dtrain_activation_backward_args sums = {
            DTRAIN_ACT_NONE, args->accumulate_bias_grad, args->k,         args->m,      NULL,
            args->a,         (void *)(uintptr_t)args->a, args->bias_grad, args->a_dtype};
        return dtrain__cpu_activation_backward(device, &sums);
    }
    const float *a = dtrain__wide(list, args->a, args->a_dtype, args->m * args->lda, DTRAIN__READ);
    if (list->result == DTRAIN_OK) dtrain__row_sums(args, a);
    return list->result;
}

/* The product by dtrain__cpu_product; what needs a second pass over C or A follows. The built-in
 * GEMM finishes the tiles of a C in half precision by itself, slopes included; others compute such
 * a C, and aux, in fp32. */
static dtrain_result dtrain__cpu_gemm(dtrain_device *device, const dtrain_gemm_args *args)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = args->bias_grad && (args->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    const bool half = !dtrain__is_f32(args->c_dtype);
    const bool finished = half && dtrain__is_built_in((dtrain__cpu *)device->state, args);
    if (!backward && !args->bias_grad && (!args->aux || !half || finished))
        return dtrain__cpu_product(device, args);
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_gemm_args plain = *args;
    DTRAIN__TRY(dtrain__check_gemm(args));
    if (!finished) {
        const int c_access = DTRAIN__WRITE | (args->beta != 0 ? DTRAIN__READ : 0);
        plain.c = dtrain__wide(&w, args->c, args->c_dtype, args->m * args->ldc, c_access);
        plain.aux = dtrain__wide(&w, args->aux, args->c_dtype, args->m * args->ldc,
                                 backward ? DTRAIN__READ : DTRAIN__WRITE);
        plain.c_dtype = DTRAIN_F32;
    }
    const void *z = backward && !finished ? plain.aux : NULL;
    if (z) {
        plain.flags &= ~DTRAIN_GEMM_ACT_BACKWARD;
        plain.activation = DTRAIN_ACT_NONE;
        plain.aux = NULL;
    }
    if (w.result == DTRAIN_OK) w.result = dtrain__cpu_product(device, &plain);
    if ((z || of_c) && w.result == DTRAIN_OK)
        w.result =
            dtrain__gemm_after(device, &plain, args->activation, z, of_c ? args->bias_grad : NULL);
    if (args->bias_grad && !of_c && w.result == DTRAIN_OK)
        w.result = dtrain__gemm_bias_grad(device, &w, args);
    return dtrain__wide_end(&w, w.result);
}

/* ---- Kernels ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__cpu_layernorm(dtrain_device *device, const dtrain_layernorm_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_layernorm_args wide = *args;
    const int64_t count = args->rows * args->n;
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together or not at all");
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, count, DTRAIN__READ);
    wide.sum = dtrain__wide(&w, args->sum, args->x_dtype, count, DTRAIN__WRITE);
    wide.residual = dtrain__wide(&w, args->residual, args->y_dtype, count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->y_dtype, count, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(&w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->layernorm, count));
}

/* Chunks of 32 rows or, beyond 2048 rows, 64 chunks: what adding up costs stays small. */
static dtrain_result dtrain__layernorm_backward_run(dtrain__cpu *cpu,
                                                    const dtrain_layernorm_backward_args *args)
{
    const int64_t chunk = args->rows > 2048 ? (args->rows + 63) / 64 : 32;
    const int64_t chunk_count = (args->rows + chunk - 1) / chunk;
    dtrain__job job = dtrain__job_make(args, chunk_count, 1);
    job.chunk = chunk;
    job.chunk_count = chunk_count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, chunk_count * 2 * args->n));
    dtrain__job_run(cpu, &job, cpu->kernels->layernorm_backward, args->rows * args->n);
    job.total = args->n;
    job.unit = DTRAIN__LINE;
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm_params, chunk_count * 2 * args->n);
}

static dtrain_result dtrain__cpu_layernorm_backward(dtrain_device *device,
                                                    const dtrain_layernorm_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_layernorm_backward_args wide = *args;
    const int64_t count = args->rows * args->n;
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "layernorm backward: d_residual needs d_x");
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, count, DTRAIN__READ);
    wide.d_y = dtrain__wide(&w, args->d_y, args->y_dtype, count, DTRAIN__READ);
    wide.d_x = dtrain__wide(&w, args->d_x, args->x_dtype, count,
                            DTRAIN__WRITE | (args->accumulate_x ? DTRAIN__READ : 0));
    if (w.result == DTRAIN_OK) w.result = dtrain__layernorm_backward_run(w.cpu, &wide);
    if (w.result == DTRAIN_OK && args->d_residual)
        dtrain__cpu_convert_run(w.cpu, wide.d_x, DTRAIN_F32, args->d_residual,
                                dtrain__is_f32(args->y_dtype) ? DTRAIN_F32 : args->y_dtype, count);
    return dtrain__wide_end(&w, w.result);
}

static dtrain_result dtrain__check_tokens(const int32_t *tokens, int64_t rows, int64_t vocab)
{
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= vocab)
            return dtrain_fail(DTRAIN_ERROR_DATA, "token %ld at row %lld is outside [0, %lld)",
                               (long)tokens[row], (long long)row, (long long)vocab);
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_targets(const int32_t *targets, int64_t rows, int64_t n)
{
    for (int64_t row = 0; row < rows; row++)
        if (targets[row] < -1 || targets[row] >= n)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "target %ld at row %lld is outside [0, %lld) and not -1 (ignored)",
                               (long)targets[row], (long long)row, (long long)n);
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_embedding(dtrain_device *device, const dtrain_embedding_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_embedding_args wide = *args;
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->rows * args->n, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->embedding, args->rows * args->n));
}

static dtrain_result dtrain__cpu_embedding_backward(dtrain_device *device,
                                                    const dtrain_embedding_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_embedding_backward_args wide = *args;
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    wide.d_y = dtrain__wide(&w, args->d_y, args->dtype, args->rows * args->n, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->n, DTRAIN__LINE);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->embedding_backward, args->rows * args->n));
}

/* Floats of dtrain__head's buffers, with the head dimension rounded up for the widest vectors. */
static int64_t dtrain__attention_slot(int64_t n, int64_t heads, int64_t sequence, bool backward)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, width = dtrain__multiple(n / heads, 32);
    int64_t floats = 4 * block * width + block * block + 3 * block;
    if (backward) {
        floats += 2 * block * width + block * block + 2 * block;
        floats += 2 * dtrain__multiple(sequence, block) * width;
    }
    return dtrain__multiple(floats, DTRAIN__LINE);
}

static dtrain_result dtrain__check_heads(int64_t n, int64_t heads)
{
    if (heads > 0 && n > 0 && n % heads == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "attention: %lld columns cannot be cut into %lld heads", (long long)n,
                       (long long)heads);
}

static dtrain_result dtrain__cpu_attention(dtrain_device *device, const dtrain_attention_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_attention_args wide = *args;
    const int64_t blocks = (args->sequence + DTRAIN__ATTENTION_BLOCK - 1) / DTRAIN__ATTENTION_BLOCK;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(&wide, args->batch * args->heads * blocks, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    wide.qkv = dtrain__wide(&w, args->qkv, args->dtype, 3 * count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, count, DTRAIN__WRITE);
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, false);
    if (w.result == DTRAIN_OK)
        w.result = dtrain__cpu_scratch(w.cpu, &job, job.slot * w.cpu->thread_count);
    if (w.result == DTRAIN_OK) dtrain__job_run(w.cpu, &job, w.cpu->kernels->attention, 8 * count);
    return dtrain__wide_end(&w, w.result);
}

static dtrain_result dtrain__cpu_attention_backward(dtrain_device *device,
                                                    const dtrain_attention_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_attention_backward_args wide = *args;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(&wide, args->batch * args->heads, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    wide.qkv = dtrain__wide(&w, args->qkv, args->dtype, 3 * count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, count, DTRAIN__READ);
    wide.d_y = dtrain__wide(&w, args->d_y, args->dtype, count, DTRAIN__READ);
    wide.d_qkv = dtrain__wide(&w, args->d_qkv, args->dtype, 3 * count, DTRAIN__WRITE);
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, true);
    if (w.result == DTRAIN_OK)
        w.result = dtrain__cpu_scratch(w.cpu, &job, job.slot * w.cpu->thread_count);
    if (w.result == DTRAIN_OK)
        dtrain__job_run(w.cpu, &job, w.cpu->kernels->attention_backward, 16 * count);
    return dtrain__wide_end(&w, w.result);
}

static dtrain_result
dtrain__cpu_cross_entropy_backward(dtrain_device *device,
                                   const dtrain_cross_entropy_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_cross_entropy_backward_args wide = *args;
    const int64_t count = args->rows * args->n;
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    wide.logits = dtrain__wide(&w, args->logits, args->dtype, count, DTRAIN__READ);
    wide.d_logits = dtrain__wide(&w, args->d_logits, args->dtype, count, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->cross_entropy_backward, count));
}

static dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                               const dtrain_cross_entropy_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_cross_entropy_args wide = *args;
    const int64_t count = args->rows * args->n;
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    wide.logits = dtrain__wide(&w, args->logits, args->dtype, count, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    dtrain__job_run(w.cpu, &job, w.cpu->kernels->cross_entropy, count);
    if (!args->d_logits) return DTRAIN_OK;
    const dtrain_cross_entropy_backward_args backward = {
        args->rows, args->n,        args->scale, args->logits, args->targets,
        args->lse,  args->d_logits, NULL,        args->dtype};
    return dtrain__cpu_cross_entropy_backward(device, &backward);
}

static dtrain_result dtrain__cpu_add(dtrain_device *device, const dtrain_add_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_add_args wide = *args;
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->y_dtype, args->count, DTRAIN__READ);
    wide.out = dtrain__wide(&w, args->out, args->x_dtype, args->count, DTRAIN__WRITE);
    return dtrain__wide_elementwise(&w, &wide, args->count, w.cpu->kernels->add);
}

static dtrain_result dtrain__cpu_axpby(dtrain_device *device, const dtrain_axpby_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_axpby_args wide = *args;
    wide.x =
        dtrain__wide(&w, args->x, args->dtype, args->broadcast ? 1 : args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->count,
                          DTRAIN__WRITE | (args->accumulate ? DTRAIN__READ : 0));
    return dtrain__wide_elementwise(&w, &wide, args->count, w.cpu->kernels->axpby);
}

static dtrain_result dtrain__cpu_dropout(dtrain_device *device, const dtrain_dropout_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_dropout_args wide = *args;
    wide.x = dtrain__wide(&w, args->x, args->dtype, args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->count,
                          DTRAIN__WRITE | (args->accumulate ? DTRAIN__READ : 0));
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->count, 2 * DTRAIN__LINE); /* a Philox vector */
    return dtrain__wide_end(&w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->dropout, args->count));
}

static dtrain_result dtrain__cpu_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_sum_args wide = *args;
    const int64_t share = (args->count + DTRAIN__SUM_CHUNKS - 1) / DTRAIN__SUM_CHUNKS;
    const int64_t chunk = share > 4096 ? dtrain__multiple(share, 4096) : 4096;
    wide.x = dtrain__wide(&w, args->x, args->dtype, args->count, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, (args->count + chunk - 1) / chunk, 1);
    double sum = 0;
    job.chunk = chunk;
    job.sums = w.cpu->sums;
    dtrain__job_run(w.cpu, &job, w.cpu->kernels->sum, args->count);
    for (int64_t i = 0; i < job.total; i++) sum += w.cpu->sums[i];
    sum *= args->scale;
    if (args->accumulate) sum += args->total[0];
    if (args->total) args->total[0] = sum;
    if (args->out) args->out[0] = (float)sum;
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_clip(dtrain_device *device, const dtrain_clip_args *args)
{
    const double norm = sqrt(args->sum_squares[0]) * (double)args->scalars->grad_scale;
    const double factor = (double)args->max_norm / (norm + 1e-6);
    (void)device;
    args->norm[0] = (float)norm;
    if (!dtrain_is_finite(args->norm[0])) args->scalars->skip = 1;
    else if (args->max_norm > 0 && factor < 1) args->scalars->grad_scale *= (float)factor;
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_finite(dtrain_device *device, const dtrain_finite_args *args)
{
    const bool wide = dtrain__is_f32(args->dtype);
    const uint32_t exponent = wide ? 0x7f800000u : args->dtype == DTRAIN_BF16 ? 0x7f80u : 0x7c00u;
    const char *x = (const char *)args->x;
    uint32_t found = 0;
    (void)device;
    if (!wide && args->dtype != DTRAIN_BF16 && args->dtype != DTRAIN_F16)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "finite: %s has no infinity",
                           dtrain_dtype_name(args->dtype));
    for (int64_t i = 0; i < args->count; i++) {
        uint32_t bits = 0;
        uint16_t half;
        if (wide) memcpy(&bits, x + (size_t)i * sizeof bits, sizeof bits);
        else {
            memcpy(&half, x + (size_t)i * sizeof half, sizeof half);
            bits = half;
        }
        found |= (bits & exponent) == exponent;
    }
    args->found[0] |= found;
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_convert(dtrain_device *device, const dtrain_convert_args *args)
{
    const dtrain_dtype low = args->x_dtype < args->y_dtype ? args->x_dtype : args->y_dtype;
    const dtrain_dtype high = args->x_dtype < args->y_dtype ? args->y_dtype : args->x_dtype;
    if (low < DTRAIN_F32 || high > DTRAIN_F16)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "cannot convert %s to %s",
                           dtrain_dtype_name(args->x_dtype), dtrain_dtype_name(args->y_dtype));
    return dtrain__cpu_elementwise(device, args, args->count, dtrain__cpu_kernels(device)->convert);
}

/* ---- Optimizers -------------------------------------------------------------------------------*/

/* The fraction that rounding would discard, against as many random bits: up with exactly its
 * probability. fp16 discards 13 bits where it is normal; below that it rounds to nearest. */
static uint16_t dtrain__round_random(float value, dtrain_dtype dtype, uint32_t random)
{
    const uint32_t bits = dtrain__f32_bits(value), magnitude = bits & 0x7fffffffu;
    const uint32_t discarded = dtype == DTRAIN_BF16 ? 0xffffu : 0x1fffu;
    const uint32_t smallest = dtype == DTRAIN_BF16 ? 0 : 0x38800000u; /* 2^-14 */
    float up;
    if (magnitude >= 0x7f800000u || magnitude < smallest)
        return dtype == DTRAIN_BF16 ? dtrain_f32_to_bf16(value) : dtrain_f32_to_f16(value);
    const uint32_t raised = (bits + (random & discarded)) & ~discarded;
    memcpy(&up, &raised, sizeof up);
    return dtype == DTRAIN_BF16 ? (uint16_t)(raised >> 16) : dtrain_f32_to_f16(up);
}

static void dtrain__round_low(const dtrain__update *update, int64_t begin, int64_t end)
{
    const dtrain_optimizer_tensor *t = update->tensor;
    uint16_t *low = (uint16_t *)t->low;
    uint32_t words[4];
    if (!update->stochastic) {
        dtrain_convert_args args = {end, t->value, t->low, DTRAIN_F32, t->low_dtype};
        dtrain__job job = dtrain__job_make(&args, end, 1);
        dtrain__kernels_select()->convert(&job, begin, end, 0);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        if (i == begin || i % 4 == 0)
            dtrain_philox(update->seed + update->now.seed, update->stream, (uint64_t)i / 4, words);
        low[i] = dtrain__round_random(t->value[i], t->low_dtype, words[i % 4]);
    }
}

static dtrain_result dtrain__cpu_update(dtrain_device *device, dtrain__update *update,
                                        size_t tensor_count, const dtrain_optimizer_tensor *tensors,
                                        const dtrain_step_scalars *scalars, dtrain__range_fn range)
{
    if (scalars) update->now = *scalars;
    for (size_t i = 0; i < tensor_count && !update->now.skip; i++) {
        update->tensor = &tensors[i];
        update->stream = i;
        DTRAIN__TRY(dtrain__cpu_elementwise(device, update, tensors[i].count, range));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_adamw(dtrain_device *device, const dtrain_adamw_args *args)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.adamw = args;
    update.seed = args->seed;
    update.stochastic = args->stochastic_rounding;
    update.now.lr = args->lr;
    update.now.correction1 = args->correction1;
    update.now.correction2 = args->correction2;
    update.now.grad_scale = args->grad_scale;
    return dtrain__cpu_update(device, &update, args->tensor_count, args->tensors, args->scalars,
                              dtrain__cpu_kernels(device)->adamw);
}

static dtrain_result dtrain__cpu_sgd(dtrain_device *device, const dtrain_sgd_args *args)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.sgd = args;
    update.seed = args->seed;
    update.stochastic = args->stochastic_rounding;
    update.now.lr = args->lr;
    update.now.grad_scale = args->grad_scale;
    return dtrain__cpu_update(device, &update, args->tensor_count, args->tensors, args->scalars,
                              dtrain__cpu_kernels(device)->sgd);
}

/* ---- Sparse gradients -------------------------------------------------------------------------*/

/* Magnitudes order like their bits; every NaN is the largest. */
static uint32_t dtrain__magnitude(float value)
{
    const uint32_t bits = dtrain__f32_bits(value) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

/* The bin, counted from the top, in which the `wanted`-th largest falls; *wanted becomes its place
 * inside the bin. */
static uint32_t dtrain__boundary(const uint32_t *bins, uint32_t bin_count, int64_t *wanted)
{
    uint32_t bin = bin_count - 1;
    for (; *wanted > (int64_t)bins[bin]; bin--) *wanted -= bins[bin];
    return bin;
}

/* Two histograms, of the upper 16 and the lower 15 bits of the magnitude, give the k-th largest
 * exactly; then one pass takes what lies above it and the first of its equals. */
static dtrain_result dtrain__cpu_topk(dtrain_device *device, const dtrain_topk_args *args)
{
    dtrain__job job = dtrain__job_make(args, args->count, 1);
    const float *x = args->residual ? args->residual : args->x;
    int64_t equals = args->k, taken = 0;
    if (args->count > INT32_MAX || args->k < 1 || args->k > args->count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "topk: k is %lld of %lld; expected 1 to count, below 2^31",
                           (long long)args->k, (long long)args->count);
    DTRAIN__TRY(dtrain__cpu_scratch((dtrain__cpu *)device->state, &job, 65536));
    uint32_t *bins = (uint32_t *)(void *)job.scratch;
    memset(bins, 0, 65536 * sizeof *bins);
    for (int64_t i = 0; i < args->count; i++) {
        if (args->residual) args->residual[i] += args->x[i];
        bins[dtrain__magnitude(x[i]) >> 15]++;
    }
    const uint32_t high = dtrain__boundary(bins, 65536, &equals);
    memset(bins, 0, 32768 * sizeof *bins);
    for (int64_t i = 0; i < args->count; i++) {
        const uint32_t m = dtrain__magnitude(x[i]);
        if (m >> 15 == high) bins[m & 0x7fffu]++;
    }
    const uint32_t border = high << 15 | dtrain__boundary(bins, 32768, &equals);
    for (int64_t i = 0; i < args->count && taken < args->k; i++) {
        const uint32_t m = dtrain__magnitude(x[i]);
        if (m < border || (m == border && equals-- <= 0)) continue;
        args->indices[taken] = (int32_t)i;
        args->values[taken++] = x[i];
        if (args->residual) args->residual[i] = 0;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__cpu_scatter_add(dtrain_device *device,
                                             const dtrain_scatter_add_args *args)
{
    (void)device;
    for (int64_t i = 0; i < args->k; i++)
        if (args->indices[i] < 0 || args->indices[i] >= args->count)
            return dtrain_fail(DTRAIN_ERROR_DATA, "index %ld at place %lld is outside [0, %lld)",
                               (long)args->indices[i], (long long)i, (long long)args->count);
    for (int64_t i = 0; i < args->k; i++)
        args->out[args->indices[i]] += args->scale * args->values[i];
    return DTRAIN_OK;
}

/* ---- Streams, events, pinned memory: everything is done when the call returns -----------------*/

static dtrain_result dtrain__cpu_query(dtrain_device *device, dtrain_device_info *info)
{
    (void)device;
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "CPU (%s)", dtrain_cpu_kernel_name());
    snprintf(info->id, sizeof info->id, "cpu");
    info->count = 1;
    const long page = sysconf(_SC_PAGESIZE);
    const long pages = sysconf(_SC_PHYS_PAGES), free_pages = sysconf(_SC_AVPHYS_PAGES);
    info->memory_bytes = pages > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    info->free_bytes = free_pages > 0 ? (uint64_t)free_pages * (uint64_t)page : 0;
    return DTRAIN_OK;
}

/* Like alloc, but it is not the model's: not counted. */
static dtrain_result dtrain__cpu_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    *memory = dtrain__aligned_alloc(&allocator, bytes);
    return *memory ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes", bytes);
}
static void dtrain__cpu_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    dtrain__aligned_free(&allocator, memory, bytes);
}

static dtrain_result dtrain__cpu_host_register(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}
static void dtrain__cpu_host_unregister(dtrain_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

static dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to, const void *from,
                                            size_t bytes, dtrain_copy_kind kind,
                                            dtrain_stream *stream)
{
    (void)stream;
    return device->ops->copy(device, to, from, bytes, kind);
}

/* A stream has no state: any address will do, and the table itself is one. */
static dtrain_result dtrain__cpu_stream_create(dtrain_device *device, bool high_priority,
                                               dtrain_stream **out)
{
    (void)high_priority;
    *out = (dtrain_stream *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
static void dtrain__cpu_stream_destroy(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
}
static void *dtrain__cpu_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
    return NULL;
}

struct dtrain_event {
    uint64_t recorded_ns;
};

static dtrain_result dtrain__cpu_event_create(dtrain_device *device, bool timing,
                                              dtrain_event **out)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    (void)timing;
    *out = (dtrain_event *)dtrain__alloc(&allocator, 1, sizeof **out, "an event");
    return *out ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}
static void dtrain__cpu_event_destroy(dtrain_device *device, dtrain_event *event)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    dtrain__free(&allocator, event, 1, sizeof *event);
}
static dtrain_result dtrain__cpu_event_record(dtrain_device *device, dtrain_event *event,
                                              dtrain_stream *stream)
{
    (void)device;
    (void)stream;
    event->recorded_ns = dtrain__now_ns();
    return DTRAIN_OK;
}
static dtrain_result dtrain__cpu_event_wait(dtrain_device *device, dtrain_event *event,
                                            dtrain_stream *stream)
{
    (void)device;
    (void)event;
    (void)stream;
    return DTRAIN_OK;
}
static dtrain_result dtrain__cpu_event_query(dtrain_device *device, dtrain_event *event, bool *done)
{
    (void)device;
    (void)event;
    *done = true;
    return DTRAIN_OK;
}
static dtrain_result dtrain__cpu_event_elapsed(dtrain_device *device, dtrain_event *begin,
                                               dtrain_event *end, float *milliseconds)
{
    (void)device;
    *milliseconds = (float)(1e-6 * (double)(end->recorded_ns - begin->recorded_ns));
    return DTRAIN_OK;
}
static bool dtrain__cpu_is_device_memory(dtrain_device *device, const void *memory)
{
    (void)device;
    (void)memory;
    return false; /* host memory, all of it */
}

static dtrain_result dtrain__no_graphs(const dtrain_device *device)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the %s device cannot record graphs",
                       device->ops->name);
}
static dtrain_result dtrain__cpu_graph_begin(dtrain_device *device)
{
    return dtrain__no_graphs(device);
}
static dtrain_result dtrain__cpu_graph_end(dtrain_device *device, dtrain_graph **out)
{
    *out = NULL;
    return dtrain__no_graphs(device);
}
static dtrain_result dtrain__cpu_graph_launch(dtrain_device *device, dtrain_graph *graph)
{
    (void)graph;
    return dtrain__no_graphs(device);
}
static void dtrain__cpu_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    (void)device;
    (void)graph;
}

/* Every kernel in the table's order. */
/* clang-format off */
#define DTRAIN__KERNEL_LIST(X)                                                               \
    X(gemm) X(activation_backward) X(layernorm) X(layernorm_backward)                        \
    X(embedding) X(embedding_backward) X(attention) X(attention_backward)                    \
    X(cross_entropy) X(cross_entropy_backward) X(add) X(axpby) X(dropout)                    \
    X(sum) X(clip) X(finite) X(convert) X(adamw) X(sgd) X(topk) X(scatter_add)
/* clang-format on */

DTRAIN_API const dtrain_device_ops *dtrain_cpu_device_ops(void)
{
#define DTRAIN__CPU_ENTRY(op) dtrain__cpu_##op,
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "cpu",
                                          true,
                                          dtrain__cpu_create,
                                          dtrain__cpu_destroy,
                                          dtrain__cpu_query,
                                          dtrain__cpu_synchronize,
                                          dtrain__cpu_alloc,
                                          dtrain__cpu_free,
                                          dtrain__cpu_copy,
                                          dtrain__cpu_zero,
                                          dtrain__cpu_host_alloc,
                                          dtrain__cpu_host_free,
                                          dtrain__cpu_host_register,
                                          dtrain__cpu_host_unregister,
                                          dtrain__cpu_copy_async,
                                          dtrain__cpu_stream_create,
                                          dtrain__cpu_stream_destroy,
                                          dtrain__cpu_stream_native,
                                          dtrain__cpu_event_create,
                                          dtrain__cpu_event_destroy,
                                          dtrain__cpu_event_record,
                                          dtrain__cpu_event_wait,
                                          dtrain__cpu_event_query,
                                          dtrain__cpu_event_elapsed,
                                          dtrain__cpu_is_device_memory,
                                          dtrain__cpu_graph_begin,
                                          dtrain__cpu_graph_end,
                                          dtrain__cpu_graph_launch,
                                          dtrain__cpu_graph_destroy,
                                          DTRAIN__KERNEL_LIST(DTRAIN__CPU_ENTRY)};
    return &ops;
}

/* ---- The plan device --------------------------------------------------------------------------
 *
 * Addresses without memory: an allocation is a step of a counter that lives in device->state
 * itself. Kernels do nothing, so a model runs at the speed of its bookkeeping and peak_bytes is the
 * answer. Streams and events are the CPU's or nothing. */

static dtrain_result dtrain__plan_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    (void)desc;
    device->state = (void *)(uintptr_t)4096;
    return DTRAIN_OK;
}

static void dtrain__plan_destroy(dtrain_device *device) { device->state = NULL; }

static dtrain_result dtrain__plan_query(dtrain_device *device, dtrain_device_info *info)
{
    (void)device;
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "plan");
    snprintf(info->id, sizeof info->id, "plan");
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    const uintptr_t at = (uintptr_t)device->state;
    *memory = NULL;
    if (bytes > UINTPTR_MAX - at - 128)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no addresses left for %llu bytes",
                           (unsigned long long)bytes);
    DTRAIN__TRY(dtrain_device_reserve(device, bytes));
    *memory = (void *)at;
    device->state = (void *)(at + ((uintptr_t)bytes + 64) / 64 * 64); /* 0 bytes move it as well */
    dtrain_device_count(device, &device->allocated_bytes, bytes);
    return DTRAIN_OK;
}

static void dtrain__plan_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (memory) device->allocated_bytes -= bytes;
}

static dtrain_result dtrain__plan_copy(dtrain_device *device, void *to, const void *from,
                                       size_t bytes, dtrain_copy_kind kind)
{
    (void)device;
    (void)to;
    (void)from;
    (void)bytes;
    (void)kind;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the %s device has no %zu bytes of host memory",
                       device->ops->name, bytes);
}

static dtrain_result dtrain__plan_event_create(dtrain_device *device, bool timing,
                                               dtrain_event **out)
{
    (void)timing;
    *out = (dtrain_event *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
static void dtrain__plan_event_destroy(dtrain_device *device, dtrain_event *event)
{
    (void)device;
    (void)event;
}
static dtrain_result dtrain__plan_event_record(dtrain_device *device, dtrain_event *event,
                                               dtrain_stream *stream)
{
    return dtrain__cpu_event_wait(device, event, stream); /* also does nothing */
}
static dtrain_result dtrain__plan_event_elapsed(dtrain_device *device, dtrain_event *begin,
                                                dtrain_event *end, float *milliseconds)
{
    (void)device;
    (void)begin;
    (void)end;
    *milliseconds = 0;
    return DTRAIN_OK;
}

#define DTRAIN__PLAN_KERNEL(op)                                                                   \
    static dtrain_result dtrain__plan_##op(dtrain_device *device, const dtrain_##op##_args *args) \
    {                                                                                             \
        (void)device;                                                                             \
        (void)args;                                                                               \
        return DTRAIN_OK;                                                                         \
    }
DTRAIN__KERNEL_LIST(DTRAIN__PLAN_KERNEL)

DTRAIN_API const dtrain_device_ops *dtrain_plan_device_ops(void)
{
#define DTRAIN__PLAN_ENTRY(op) dtrain__plan_##op,
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "plan",
                                          false,
                                          dtrain__plan_create,
                                          dtrain__plan_destroy,
                                          dtrain__plan_query,
                                          dtrain__cpu_synchronize,
                                          dtrain__plan_alloc,
                                          dtrain__plan_free,
                                          dtrain__plan_copy,
                                          dtrain__plan_zero,
                                          dtrain__plan_host_alloc,
                                          dtrain__plan_free,
                                          dtrain__cpu_host_register,
                                          dtrain__cpu_host_unregister,
                                          dtrain__cpu_copy_async,
                                          dtrain__cpu_stream_create,
                                          dtrain__cpu_stream_destroy,
                                          dtrain__cpu_stream_native,
                                          dtrain__plan_event_create,
                                          dtrain__plan_event_destroy,
                                          dtrain__plan_event_record,
                                          dtrain__cpu_event_wait,
                                          dtrain__cpu_event_query,
                                          dtrain__plan_event_elapsed,
                                          dtrain__cpu_is_device_memory,
                                          dtrain__cpu_graph_begin,
                                          dtrain__cpu_graph_end,
                                          dtrain__cpu_graph_launch,
                                          dtrain__cpu_graph_destroy,
                                          DTRAIN__KERNEL_LIST(DTRAIN__PLAN_ENTRY)};
    return &ops;
}

DTRAIN_API dtrain_result dtrain_device_ops_by_name(const char *name, const dtrain_device_ops **out)
{
    if (!name || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_device_ops_by_name: %s is NULL",
                           name ? "out" : "name");
    *out = strcmp(name, "cpu") == 0 ? dtrain_cpu_device_ops() : NULL;
#ifdef DTRAIN_USE_CUDA
    if (strcmp(name, "cuda") == 0) *out = dtrain_cuda_device_ops();
#else
    if (strcmp(name, "cuda") == 0)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program was built without CUDA: compile it with "
                           "-DDTRAIN_USE_CUDA and link dtrain_cuda.cu (make cuda)");
#endif
    if (*out) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "\"%s\" is no device; expected cpu or cuda", name);
}

/* ---- A device of one's own --------------------------------------------------------------------*/

/* The allocator is kept behind the public part: backends need not. */
typedef struct dtrain__owned_device {
    dtrain_device device;
    dtrain_allocator allocator;
} dtrain__owned_device;

DTRAIN_API dtrain_result dtrain_device_create(const dtrain_device_ops *ops,
                                              const dtrain_device_desc *desc, dtrain_device **out)
{
    dtrain_device_desc defaults;
    memset(&defaults, 0, sizeof defaults);
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_device_create: out is NULL");
    *out = NULL;
    if (!desc) desc = &defaults;
    if (!ops) ops = dtrain_cpu_device_ops();
    if (ops->abi != DTRAIN_DEVICE_ABI)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "device table has ABI %u, this dtrain.h expects %u: rebuild the backend",
                           (unsigned)ops->abi, (unsigned)DTRAIN_DEVICE_ABI);
    const dtrain_allocator allocator = dtrain__resolve_allocator(&desc->allocator);
    dtrain__owned_device *owned =
        (dtrain__owned_device *)dtrain__alloc(&allocator, 1, sizeof *owned, "a device");
    if (!owned) return DTRAIN_ERROR_MEMORY;
    owned->allocator = allocator;
    owned->device.ops = ops;
    owned->device.limit_bytes = desc->memory_limit;
    const dtrain_result result = ops->create(desc, &owned->device);
    if (result != DTRAIN_OK) {
        dtrain__free(&allocator, owned, 1, sizeof *owned);
        return result;
    }
    *out = &owned->device;
    return DTRAIN_OK;
}

/* Whether the host can read it. Parameters of a host program may lie on either side. */
static bool dtrain__on_host(dtrain_device *device, const void *memory)
{
    return device->ops->host_memory || !device->ops->is_device_memory(device, memory);
}

/* Wherever the two lie. */
static dtrain_result dtrain__copy_any(dtrain_device *device, void *to, const void *from,
                                      size_t bytes)
{
    const bool from_host = !device->ops->host_memory && dtrain__on_host(device, from);
    const bool to_host = !device->ops->host_memory && dtrain__on_host(device, to);
    if (from_host && to_host) {
        if (bytes) memmove(to, from, bytes);
        return DTRAIN_OK;
    }
    return device->ops->copy(device, to, from, bytes,
                             from_host ? DTRAIN_COPY_HOST_TO_DEVICE
                             : to_host ? DTRAIN_COPY_DEVICE_TO_HOST
                                       : DTRAIN_COPY_DEVICE_TO_DEVICE);
}

DTRAIN_API void dtrain_device_destroy(dtrain_device *device)
{
    dtrain__owned_device *owned = (dtrain__owned_device *)(void *)device;
    if (!device) return;
    const dtrain_allocator allocator = owned->allocator;
    device->ops->destroy(device);
    dtrain__free(&allocator, owned, 1, sizeof *owned);
}

/* ================================================================================================
 * [S25] World, launch
 *
 * First how ranks end, wait, exchange and share memory; then [S25.1] a keyed hash, [S25.2] what
 * launchers say in the environment, [S25.3] the link between ranks of a launcher, [S25.4] how they
 * meet, [S25.5] how they come to share memory, [S25.6] a rank's life and dtrain_launch.
 *
 * One anonymous shared mapping, made before the first fork, is all that ranks have in common. It
 * has no name, so nothing can be left behind and /dev/shm's size does not matter; every rank sees
 * it at the same address, so pointers into it can be handed around:
 *
 *     | control: first failure, how each rank ended | arena of rank 0 | ... | arena of rank N-1 |
 *
 * Pages are committed when touched. Each rank hands out its own arena and keeps the book in private
 * memory: no lock is shared, so no rank can die holding one.
 *
 * The launcher installs no signal handler. It blocks SIGCHLD and the signals it forwards and sleeps
 * in sigtimedwait; a rank's death is in the control page some 100 us after it happened, where the
 * waiting ranks see it. Invariant: whatever happens, every rank that was started has been reaped
 * when dtrain_launch returns.
 * ==============================================================================================*/

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* an older kernel takes the address as a hint */
#endif

typedef enum dtrain__end {
    DTRAIN__RUNNING = 0,
    DTRAIN__LEFT = 1,     /* rank_main returned 0 */
    DTRAIN__RETURNED = 2, /* something else */
    DTRAIN__SIGNALED = 3,
    DTRAIN__UNSTARTED = 4, /* its world could not be made */
    DTRAIN__STOPPED = 5,   /* killed by the launcher after the grace period */
    DTRAIN__LOST = 6       /* its connection closed without a word */
} dtrain__end;

/* How one rank ended. Written once: by the rank itself, or by the launcher when it could not. */
typedef struct dtrain__fate {
    uint32_t how;      /* atomic, stored last: dtrain__end */
    int32_t value;     /* return value or signal */
    uint64_t ended_ns; /* when this was written */
    char error[496];   /* the rank's last error, when it did not end well */
} dtrain__fate;

/* What a rank says in dtrain_world_exchange, the n-th time in half n % 2. Two halves are enough: a
 * rank posts n + 2 after it has seen all posts n + 1, and each of those was written by a rank that
 * had read all posts n. */
typedef struct dtrain__post {
    uint64_t sequence; /* atomic, stored last: exchanges posted so far */
    uint64_t bytes[2];
    char data[2][DTRAIN_EXCHANGE_BYTES];
} dtrain__post;

typedef struct dtrain__report {
    uint32_t state; /* atomic: 0 none, 1 being written, 2 stands */
    int32_t rank, code;
    char text[500];
} dtrain__report;

typedef struct dtrain__control {
    uint32_t first_failed; /* atomic: 1 + rank of the first failure, 0 = none */
    uint32_t ended_count;  /* atomic: fates written */
    uint64_t promised;     /* atomic: bytes handed out by all arenas */
    uint64_t free_at_start;
    char *arenas; /* all of them */
    size_t arena_bytes;
    dtrain__report report;
    dtrain__fate fates[DTRAIN_MAX_RANKS];
    dtrain__post posts[DTRAIN_MAX_RANKS];
} dtrain__control;

/* A control page with or without arenas behind it, as it was mapped. */
typedef struct dtrain__region {
    dtrain__control *control;
    size_t bytes;
} dtrain__region;

/* Memory handed out by an arena. What lies between two of these is free: nothing to coalesce. */
typedef struct dtrain__range {
    size_t begin, end; /* whole pages, from the start of the arena */
} dtrain__range;

typedef struct dtrain__part dtrain__part; /* of a communicator, see [S26] */

struct dtrain_world {
    int rank, size;
    int local_rank, local_size, node, node_count;
    uint32_t threads;
    bool oversubscribed; /* more threads than cores: waiting must not spin */
    pid_t launcher;      /* the process that forked this rank, or 0 */
    uint64_t base_bytes; /* the process before the model; 0 in threads mode: it is everybody's */
    uint64_t timeout_ns;
    dtrain__control *control;
    struct dtrain__link *link; /* to ranks that a launcher has started, see [S25.3]; or NULL */
    dtrain__region page;       /* with a link: where control is */
    char no_region[200];       /* with a link: why the ranks of one host share no memory */
    uint32_t *mine;            /* reads 0 in a process forked by a rank */
    dtrain__range *ranges;     /* (range_count), sorted */
    size_t range_count, range_room;
    dtrain_allocator allocator;
    dtrain__log_sink log;
    dtrain_device *device;
    const struct dtrain_comm_ops *comm_ops; /* asked for; NULL: local */
    uint32_t math;
    bool tune;
    dtrain_comm *comm; /* all ranks */
    uint64_t exchange_count;
    struct dtrain__local_comm *locals;  /* this rank's communicators, newest first */
    struct dtrain__staged_comm *staged; /* those for device memory */
    dtrain__part *retired; /* of communicators that this rank has destroyed and others still use */
};

/* The world's communicator comes from [S26]. */
static dtrain_result dtrain__world_comm_create(dtrain_world *world);
static void dtrain__world_comm_end(dtrain_world *world);

/* The link comes from [S25.3]; all of these do nothing when there is none. */
static void dtrain__link_look(dtrain_world *world);
static void dtrain__link_news(dtrain_world *world);
static void dtrain__link_pump(dtrain_world *world, int nap_ms);
static bool dtrain__is_remote(const dtrain_world *world);
static bool dtrain__link_all_told(const dtrain_world *world);

DTRAIN_API int dtrain_world_rank(const dtrain_world *world) { return world ? world->rank : -1; }
DTRAIN_API int dtrain_world_size(const dtrain_world *world) { return world ? world->size : 0; }
DTRAIN_API int dtrain_world_local_rank(const dtrain_world *world)
{
    return world ? world->local_rank : -1;
}
DTRAIN_API int dtrain_world_local_size(const dtrain_world *world)
{
    return world ? world->local_size : 0;
}
DTRAIN_API int dtrain_world_node(const dtrain_world *world) { return world ? world->node : -1; }
DTRAIN_API int dtrain_world_node_count(const dtrain_world *world)
{
    return world ? world->node_count : 0;
}
DTRAIN_API dtrain_device *dtrain_world_device(dtrain_world *world)
{
    return world ? world->device : NULL;
}
DTRAIN_API dtrain_comm *dtrain_world_comm(dtrain_world *world)
{
    return world ? world->comm : NULL;
}
DTRAIN_API const dtrain_allocator *dtrain_world_allocator(const dtrain_world *world)
{
    return world ? &world->allocator : NULL;
}
DTRAIN_API uint32_t dtrain_world_threads(const dtrain_world *world)
{
    return world ? world->threads : 0;
}
DTRAIN_API uint32_t dtrain_world_timeout_ms(const dtrain_world *world)
{
    return world ? (uint32_t)(world->timeout_ns / 1000000u) : 0;
}

DTRAIN_API void dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...)
{
    if (!world || !format) return;
    va_list args;
    va_start(args, format);
    dtrain__log_va(&world->log, level, format, args);
    va_end(args);
}

/* ---- How ranks end ----------------------------------------------------------------------------*/

static const char *dtrain__signal_name(int number)
{
    switch (number) {
    case SIGHUP: return "SIGHUP";
    case SIGINT: return "SIGINT";
    case SIGQUIT: return "SIGQUIT";
    case SIGILL: return "SIGILL, an illegal instruction";
    case SIGABRT: return "SIGABRT, abort() or a failed assert";
    case SIGBUS: return "SIGBUS, memory or a mapped file that is not there";
    case SIGFPE: return "SIGFPE, an integer division by zero";
    case SIGKILL: return "SIGKILL; it may have run out of memory";
    case SIGSEGV: return "SIGSEGV, an invalid memory access";
    case SIGPIPE: return "SIGPIPE, its output was closed";
    case SIGTERM: return "SIGTERM";
    default: return "see kill -l";
    }
}

static void dtrain__describe_end(const dtrain__control *control, int rank, char *text, size_t room)
{
    const dtrain__fate *fate = &control->fates[rank];
    switch (dtrain__load(&fate->how)) {
    case DTRAIN__LEFT: snprintf(text, room, "rank %d left (returned 0)", rank); break;
    case DTRAIN__RETURNED: snprintf(text, room, "rank %d returned %d", rank, fate->value); break;
    case DTRAIN__SIGNALED:
        snprintf(text, room, "rank %d was killed by signal %d (%s)", rank, fate->value,
                 dtrain__signal_name(fate->value));
        break;
    case DTRAIN__UNSTARTED: snprintf(text, room, "rank %d could not start", rank); break;
    case DTRAIN__STOPPED:
        snprintf(text, room, "rank %d was killed by the launcher: it did not end in time", rank);
        break;
    case DTRAIN__LOST:
        snprintf(text, room,
                 "rank %d is gone: its connection closed without a word; it exited, crashed or was "
                 "killed, or its host is lost",
                 rank);
        break;
    default: snprintf(text, room, "rank %d is running", rank); break;
    }
}

/* An error sentence without the "rank 3: " that dtrain__fail will put in front of it again. */
static const char *dtrain__bare(const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain__thread_rank);
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}

static void dtrain__record_end(dtrain__control *control, int rank, dtrain__end how, int value,
                               const char *error)
{
    dtrain__fate *fate = &control->fates[rank];
    uint32_t none = 0;
    fate->value = value;
    fate->ended_ns = dtrain__now_ns();
    snprintf(fate->error, sizeof fate->error, "%s", dtrain__bare(error));
    dtrain__store(&fate->how, (uint32_t)how);
    dtrain__fetch_add(&control->ended_count, 1u);
    if (how == DTRAIN__LEFT) return;
    __atomic_compare_exchange_n(&control->first_failed, &none, (uint32_t)rank + 1u, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Several ranks may notice it at once: nothing is written but the word itself. */
static void dtrain__record_lost(dtrain__control *control, int rank)
{
    uint32_t running = DTRAIN__RUNNING, none = 0;
    if (!__atomic_compare_exchange_n(&control->fates[rank].how, &running, (uint32_t)DTRAIN__LOST,
                                     false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    dtrain__fetch_add(&control->ended_count, 1u);
    __atomic_compare_exchange_n(&control->first_failed, &none, (uint32_t)rank + 1u, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* The first report stands. Ranks whose deadlines end together report together: who comes second
 * returns when the first one can be read, so that a look behind the call finds it. Its writer may
 * have been killed in the middle; hence the limit. */
static void dtrain__record_report(dtrain__control *control, int rank, dtrain_result code,
                                  const char *text)
{
    dtrain__report *report = &control->report;
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&report->state, &none, 1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        const uint64_t begin = dtrain__now_ns();
        while (dtrain__load(&report->state) != 2 && dtrain__now_ns() - begin < 100000000u)
            sched_yield();
        return;
    }
    report->rank = rank;
    report->code = (int32_t)code;
    snprintf(report->text, sizeof report->text, "%s", text);
    dtrain__store(&report->state, 2);
}

/* ---- Waiting ------------------------------------------------------------------------------------
 *
 *     dtrain__wait wait = dtrain__wait_begin();
 *     while (!ready()) DTRAIN__TRY(dtrain__wait_turn(world, &wait));
 *
 * A turn is a pause while every thread has a core of its own, and a yield otherwise: the rank
 * waited for may be the one that this core should run (a 4-rank barrier on 2 cores takes 3 us with
 * sched_yield, 67 us with 2000 pauses first, 100 us and more with futexes). After some 20 us waits
 * yield everywhere: on a machine that also does other work the peer may be waiting for a core. The
 * clock and the failure record are looked at between yields, and only then a turn can fail;
 * wait.looked tells the caller to make its own rarer checks.
 *
 * Only time in which this rank could look counts towards the deadline: a job that was suspended as
 * a whole and resumed an hour later does not time out. */

#define DTRAIN__SPIN_TURNS \
    32u /* some 2 us of pauses, then yield: the peer may have lost its core */
#define DTRAIN__YIELDS_PER_LOOK 32u /* 10 us on an idle machine */

typedef struct dtrain__wait {
    uint32_t turns, yields; /* turns stop at SPIN_TURNS, yields may wrap */
    bool looked;
    uint64_t last_ns, waited_ns; /* last look at the clock, time waited so far */
} dtrain__wait;

static dtrain__wait dtrain__wait_begin(void)
{
    dtrain__wait wait;
    memset(&wait, 0, sizeof wait);
    return wait;
}

/* Has a rank failed or reported a failure? */
static dtrain_result dtrain__trouble(const dtrain_world *world)
{
    const dtrain__control *control = world->control;
    const uint32_t failed = dtrain__load(&control->first_failed);
    char text[160];
    if (dtrain__load(&control->report.state) == 2)
        return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d reported %s: %s", control->report.rank,
                           dtrain_result_name((dtrain_result)control->report.code),
                           control->report.text);
    if (!failed) return DTRAIN_OK;
    dtrain__describe_end(control, (int)failed - 1, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "%s", text);
}

/* TIMEOUT without a sentence (the caller knows what it was waiting for), PEER with one. */
static dtrain_result dtrain__wait_look(dtrain_world *world, dtrain__wait *wait)
{
    const uint64_t now = dtrain__now_ns(), longest_gap = 1000000000u;
    const uint64_t gap = wait->last_ns ? now - wait->last_ns : 0;
    wait->last_ns = now;
    wait->waited_ns += gap < longest_gap ? gap : longest_gap;
    wait->looked = true;
    dtrain__link_look(world);
    DTRAIN__TRY(dtrain__trouble(world));
    if (wait->waited_ns > 100000000u && world->launcher && getppid() != world->launcher)
        return dtrain_fail(DTRAIN_ERROR_PEER, "the process that launched the ranks is gone");
    return wait->waited_ns >= world->timeout_ns ? DTRAIN_ERROR_TIMEOUT : DTRAIN_OK;
}

static dtrain_result dtrain__wait_turn(dtrain_world *world, dtrain__wait *wait)
{
    wait->looked = false;
    if (!world->oversubscribed && wait->turns < DTRAIN__SPIN_TURNS) {
        wait->turns++;
        dtrain__pause();
        return DTRAIN_OK;
    }
    sched_yield();
    return ++wait->yields % DTRAIN__YIELDS_PER_LOOK ? DTRAIN_OK : dtrain__wait_look(world, wait);
}

/* A rank that forks by itself has a child with the same pointers and none of the rights.
 * MADV_WIPEONFORK makes the flag read 0 there, so the check is one load and no getpid. */
static dtrain_result dtrain__world_check(const dtrain_world *world, const char *call)
{
    if (world->mine && *world->mine) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: called in a process that a rank has forked; only the rank itself can",
                       call);
}

/* ---- Exchange, report, look ---------------------------------------------------------------------
 *
 * The control page is the one place where ranks tell each other how they are. */

DTRAIN_API void dtrain_world_report(dtrain_world *world, dtrain_result code, const char *text)
{
    if (!world || dtrain__world_check(world, "dtrain_world_report") != DTRAIN_OK) return;
    dtrain__record_report(world->control, world->rank, code, text ? dtrain__bare(text) : "");
    dtrain__link_news(world);
}

/* The first rank that has left (returned 0) at least `age_ns` ago, -1 if there is none. */
static int dtrain__who_left(const dtrain_world *world, uint64_t age_ns)
{
    const dtrain__control *control = world->control;
    if (!dtrain__load(&control->ended_count)) return -1;
    const uint64_t now = dtrain__now_ns();
    for (int i = 0; i < world->size; i++)
        if (dtrain__load(&control->fates[i].how) == DTRAIN__LEFT &&
            now - control->fates[i].ended_ns >= age_ns)
            return i;
    return -1;
}

DTRAIN_API dtrain_result dtrain_world_look(dtrain_world *world)
{
    if (!world) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_look: world is NULL");
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_look"));
    dtrain__link_look(world);
    DTRAIN__TRY(dtrain__trouble(world));
    const int left = dtrain__who_left(world, 2000000000u);
    return left < 0 ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_PEER, "rank %d left (returned 0)", left);
}

DTRAIN__PRINTF(3, 4)
static dtrain_result dtrain__exchange_fail(dtrain_world *world, dtrain_result code,
                                           const char *format, ...)
{
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dtrain_world_report(world, code, text);
    return dtrain_fail(code, "%s", text);
}

/* What has to come over the network is slept for. */
static dtrain_result dtrain__exchange_turn(dtrain_world *world, dtrain__wait *wait)
{
    if (!dtrain__is_remote(world)) return dtrain__wait_turn(world, wait);
    dtrain__link_pump(world, 5);
    return dtrain__wait_look(world, wait);
}

/* Waits until `rank` has posted for the `sequence`-th time. Whether it has left is asked before its
 * post is looked at for the last time: what it posted before leaving counts. */
static dtrain_result dtrain__await_post(dtrain_world *world, int rank, uint64_t sequence,
                                        dtrain__wait *wait)
{
    const dtrain__post *post = &world->control->posts[rank];
    while (dtrain__load(&post->sequence) < sequence) {
        const dtrain_result turn = dtrain__exchange_turn(world, wait);
        if (!wait->looked) continue;
        const bool left = dtrain__load(&world->control->fates[rank].how) == DTRAIN__LEFT;
        if (dtrain__load(&post->sequence) >= sequence) break;
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (left)
            return dtrain__exchange_fail(
                world, DTRAIN_ERROR_PEER,
                "rank %d left (returned 0) while rank %d waits in dtrain_world_exchange", rank,
                world->rank);
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain__exchange_fail(world, turn,
                                         "dtrain_world_exchange: rank %d waited %.1f s for rank %d",
                                         world->rank, 1e-9 * (double)world->timeout_ns, rank);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_world_exchange(dtrain_world *world, const void *mine, size_t bytes,
                                               void *all)
{
    dtrain__wait wait = dtrain__wait_begin();
    if (!world || bytes > DTRAIN_EXCHANGE_BYTES || (bytes && (!mine || !all)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_world_exchange: world or a buffer is NULL, or %zu bytes are "
                           "more than %d",
                           bytes, DTRAIN_EXCHANGE_BYTES);
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_exchange"));
    DTRAIN__TRY(dtrain__trouble(world));
    const uint64_t sequence = ++world->exchange_count;
    const size_t half = sequence % 2;
    dtrain__post *posts = world->control->posts;
    posts[world->rank].bytes[half] = bytes;
    if (bytes) memcpy(posts[world->rank].data[half], mine, bytes);
    dtrain__store(&posts[world->rank].sequence, sequence);
    dtrain__link_news(world);
    for (int i = 0; i < world->size; i++) {
        DTRAIN__TRY(dtrain__await_post(world, i, sequence, &wait));
        if (posts[i].bytes[half] != bytes)
            return dtrain__exchange_fail(
                world, DTRAIN_ERROR_MISMATCH,
                "dtrain_world_exchange: rank %d passes %llu bytes, rank %d passes %zu", i,
                (unsigned long long)posts[i].bytes[half], world->rank, bytes);
        if (bytes) memcpy((char *)all + (size_t)i * bytes, posts[i].data[half], bytes);
    }
    while (!dtrain__link_all_told(world)) { /* the caller may not look here again for long */
        const dtrain_result turn = dtrain__exchange_turn(world, &wait);
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain__exchange_fail(world, turn,
                                         "dtrain_world_exchange: rank %d could not tell the others "
                                         "in %.1f s: a rank does not read",
                                         world->rank, 1e-9 * (double)world->timeout_ns);
    }
    return DTRAIN_OK;
}

/* ---- Shared memory ----------------------------------------------------------------------------*/

static size_t dtrain__page_bytes(void)
{
    const long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* The number behind `key` at the start of a line of a small text file; UINT64_MAX when there is
 * none (no file, no line, "max"). */
static uint64_t dtrain__read_number(const char *path, const char *key)
{
    char text[8192];
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return UINT64_MAX;
    const ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    text[got > 0 ? got : 0] = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, key, strlen(key)) != 0) continue;
        char *end;
        const char *digits = line + strlen(key);
        const unsigned long long number = strtoull(digits, &end, 10);
        return end == digits ? UINT64_MAX : number;
    }
    return UINT64_MAX;
}

/* What could be touched now without swapping or being killed: the machine's estimate and, in a
 * container (cgroup v2), its limit. File cache counts as free: it goes when memory is needed. */
static uint64_t dtrain__free_memory(void)
{
    uint64_t bytes = dtrain__read_number("/proc/meminfo", "MemAvailable:");
    if (bytes <= UINT64_MAX / 1024) bytes *= 1024;
    const uint64_t limit = dtrain__read_number("/sys/fs/cgroup/memory.max", "");
    const uint64_t used = dtrain__read_number("/sys/fs/cgroup/memory.current", "");
    if (limit == UINT64_MAX || used == UINT64_MAX) return bytes;
    const uint64_t active = dtrain__read_number("/sys/fs/cgroup/memory.stat", "active_file ");
    const uint64_t inactive = dtrain__read_number("/sys/fs/cgroup/memory.stat", "inactive_file ");
    uint64_t rest = limit > used ? limit - used : 0;
    if (active != UINT64_MAX && inactive != UINT64_MAX) rest += active + inactive;
    return rest < bytes ? rest : bytes;
}

DTRAIN_API void dtrain_process_memory(uint64_t *now_bytes, uint64_t *peak_bytes)
{
    const uint64_t now = now_bytes ? dtrain__read_number("/proc/self/smaps_rollup", "Pss:") : 0;
    const uint64_t peak = peak_bytes ? dtrain__read_number("/proc/self/status", "VmHWM:") : 0;
    if (now_bytes) *now_bytes = now == UINT64_MAX ? 0 : now * 1024;
    if (peak_bytes) *peak_bytes = peak == UINT64_MAX ? 0 : peak * 1024;
}

/* A core file of the whole reserve helps nobody. */
static void dtrain__no_dump(void *memory, size_t bytes)
{
#ifdef MADV_DONTDUMP
    madvise(memory, bytes, MADV_DONTDUMP);
#else
    (void)memory, (void)bytes;
#endif
}

/* A control page that has no arenas. */
static dtrain_result dtrain__map_page(dtrain__region *region)
{
    const size_t bytes = dtrain__round_up(sizeof(dtrain__control), dtrain__page_bytes());
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "dtrain_launch: %zu bytes could not be mapped: %s",
                           bytes, strerror(errno));
    region->control = (dtrain__control *)memory;
    region->bytes = bytes;
    return DTRAIN_OK;
}

/* Anonymous memory or, file >= 0, a file made that large; MAP_FAILED with errno. A file above the
 * limit of `ulimit -f` would be answered with a signal. */
static void *dtrain__map_bytes(void *hint, size_t bytes, int file)
{
    struct rlimit limit;
    int flags = MAP_SHARED | MAP_NORESERVE;
    if (file < 0) flags |= MAP_ANONYMOUS;
    else if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && (uint64_t)limit.rlim_cur < bytes) {
        errno = EFBIG;
        return MAP_FAILED;
    } else if (ftruncate(file, (off_t)bytes) != 0) return MAP_FAILED;
    return mmap(hint, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
}

/* Address space, not memory: `given` bytes per rank or, 0, as much as the machine has. Where that
 * much cannot be had (ulimit -v, strict overcommit, valgrind) the default halves down to 64 MiB; an
 * explicit size does not. */
static dtrain_result dtrain__map_region(size_t given, uint32_t ranks, void *hint, int file,
                                        dtrain__region *region)
{
    const size_t page = dtrain__page_bytes(), least = (size_t)64 << 20;
    const size_t control = dtrain__round_up(sizeof(dtrain__control), page);
    const long pages = sysconf(_SC_PHYS_PAGES);
    size_t arena = given ? given : pages > 0 ? (size_t)pages * page : least, bytes = 0;
    for (;; arena /= 2) {
        if (arena < least && !given) arena = least;
        void *memory = MAP_FAILED;
        if (arena <= SIZE_MAX / 2) arena = dtrain__round_up(arena, page);
        if (dtrain__size_mul(arena, ranks, &bytes) && bytes <= SIZE_MAX / 2)
            memory = dtrain__map_bytes(hint, bytes += control, file);
        if (memory != MAP_FAILED) {
            region->control = (dtrain__control *)memory;
            region->bytes = bytes;
            region->control->arenas = (char *)memory + control;
            region->control->arena_bytes = arena;
            region->control->free_at_start = dtrain__free_memory();
            dtrain__no_dump(memory, bytes);
            return DTRAIN_OK;
        }
        if (given || arena == least)
            return dtrain_fail(DTRAIN_ERROR_MEMORY,
                               "dtrain_launch: %u times %zu bytes of address space could not be "
                               "reserved: %s; lower reserve_bytes or raise ulimit -v",
                               ranks, arena, strerror(errno));
    }
}

static char *dtrain__arena(const dtrain__control *control, int rank)
{
    return control->arenas + (size_t)rank * control->arena_bytes;
}

/* Every byte of it can be read and written by every rank, at this address. */
static bool dtrain__is_shared(const dtrain_world *world, const void *memory, size_t bytes)
{
    const uintptr_t begin = (uintptr_t)world->control->arenas, at = (uintptr_t)memory;
    const size_t all = (size_t)world->size * world->control->arena_bytes;
    return at >= begin && at - begin <= all && bytes <= all - (at - begin);
}

/* Pages are promised now and committed when touched: so all promises together must fit in what was
 * free at the start (or is free now, if that is more), or some rank would be killed later. */
static dtrain_result dtrain__promise(dtrain__control *control, size_t bytes)
{
    const uint64_t now = dtrain__free_memory();
    const uint64_t free_bytes = now > control->free_at_start ? now : control->free_at_start;
    const uint64_t promised = dtrain__fetch_add(&control->promised, (uint64_t)bytes);
    if (bytes <= now && promised + bytes <= free_bytes) return DTRAIN_OK;
    __atomic_fetch_sub(&control->promised, (uint64_t)bytes, __ATOMIC_ACQ_REL);
    return dtrain_fail(
        DTRAIN_ERROR_MEMORY,
        "shared memory: %zu bytes needed, %llu free (%llu promised to ranks so far); "
        "use a smaller model, more accumulation steps or another machine",
        bytes, (unsigned long long)now, (unsigned long long)promised);
}

static dtrain_result dtrain__ranges_grow(dtrain_world *world)
{
    const size_t room = world->range_room ? 2 * world->range_room : 64;
    dtrain__range *grown = (dtrain__range *)dtrain__alloc(&world->allocator, room, sizeof *grown,
                                                          "the book of shared memory");
    if (!grown) return DTRAIN_ERROR_MEMORY;
    if (world->range_count) memcpy(grown, world->ranges, world->range_count * sizeof *grown);
    dtrain__free(&world->allocator, world->ranges, world->range_room, sizeof *grown);
    world->ranges = grown;
    world->range_room = room;
    return DTRAIN_OK;
}

/* Whose memory the arena is: the CPU's. A GPU's ranks have only images in it. */
static dtrain_device *dtrain__arena_device(const dtrain_world *world)
{
    return world->device && world->device->ops->host_memory ? world->device : NULL;
}

/* Zeroed whole pages of this rank's arena, first fit. */
static dtrain_result dtrain__shared_alloc(dtrain_world *world, size_t bytes, void **out)
{
    const size_t page = dtrain__page_bytes(), all = world->control->arena_bytes;
    *out = NULL;
    if (bytes > all)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "shared memory: %zu bytes needed, %zu reserved per rank; raise "
                           "reserve_bytes of dtrain_launch_desc",
                           bytes, all);
    bytes = dtrain__round_up(bytes ? bytes : 1, page);
    dtrain_device *device = dtrain__arena_device(world);
    if (device) DTRAIN__TRY(dtrain_device_reserve(device, bytes));
    if (world->range_count == world->range_room) DTRAIN__TRY(dtrain__ranges_grow(world));
    size_t at = 0, i = 0;
    for (; i < world->range_count && world->ranges[i].begin - at < bytes; i++)
        at = world->ranges[i].end;
    if (bytes > all - at)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "shared memory: no %zu bytes left of the %zu reserved per rank; raise "
                           "reserve_bytes of dtrain_launch_desc",
                           bytes, all);
    DTRAIN__TRY(dtrain__promise(world->control, bytes));
    memmove(world->ranges + i + 1, world->ranges + i,
            (world->range_count - i) * sizeof *world->ranges);
    world->ranges[i].begin = at;
    world->ranges[i].end = at + bytes;
    world->range_count++;
    if (device) dtrain_device_count(device, &device->comm_bytes, bytes);
    *out = dtrain__arena(world->control, world->rank) + at;
    return DTRAIN_OK;
}

/* Gives the pages back at once: memory handed out next reads as zero without being cleared. Memory
 * that is not ours is left alone. */
static void dtrain__shared_free(dtrain_world *world, void *memory)
{
    char *arena = dtrain__arena(world->control, world->rank);
    for (size_t i = 0; memory && i < world->range_count; i++) {
        const dtrain__range range = world->ranges[i];
        if (arena + range.begin != memory) continue;
        if (madvise(memory, range.end - range.begin, MADV_REMOVE) != 0)
            memset(memory, 0, range.end - range.begin);
        __atomic_fetch_sub(&world->control->promised, (uint64_t)(range.end - range.begin),
                           __ATOMIC_ACQ_REL);
        if (dtrain__arena_device(world)) world->device->comm_bytes -= range.end - range.begin;
        world->range_count--;
        memmove(world->ranges + i, world->ranges + i + 1,
                (world->range_count - i) * sizeof *world->ranges);
        return;
    }
}

/* ---- [S25.1] A keyed hash -----------------------------------------------------------------------
 *
 * SipHash-2-4 of Aumasson and Bernstein (2012): who does not know the 128 bits of key can neither
 * make nor predict the 64 bits of the result. */

static inline uint64_t dtrain__rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

static void dtrain__sip_round(uint64_t v[4])
{
    v[0] += v[1], v[2] += v[3];
    v[1] = dtrain__rotate(v[1], 13) ^ v[0], v[3] = dtrain__rotate(v[3], 16) ^ v[2];
    v[0] = dtrain__rotate(v[0], 32);
    v[2] += v[1], v[0] += v[3];
    v[1] = dtrain__rotate(v[1], 17) ^ v[2], v[3] = dtrain__rotate(v[3], 21) ^ v[0];
    v[2] = dtrain__rotate(v[2], 32);
}

static uint64_t dtrain__siphash(const uint64_t key[2], const void *data, size_t bytes)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                     key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
    const unsigned char *at = (const unsigned char *)data;
    for (size_t done = 0; done <= bytes; done += 8) { /* the last word holds the rest and length */
        const size_t rest = bytes - done;
        uint64_t word = rest < 8 ? (uint64_t)bytes << 56 : 0;
        for (size_t i = 0; i < (rest < 8 ? rest : 8); i++)
            word |= (uint64_t)at[done + i] << (8 * i);
        v[3] ^= word;
        dtrain__sip_round(v);
        dtrain__sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++) dtrain__sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* ---- [S25.2] The launch environment -------------------------------------------------------------
 *
 * Launchers tell a process its rank in environment variables, each in its own. A family is taken as
 * a whole, the first complete one wins:
 *
 *     DTRAIN_RANK, DTRAIN_WORLD_SIZE            ours: any launcher that can set variables
 *     RANK, WORLD_SIZE                          torchrun and its kin, PyTorchJob
 *     OMPI_COMM_WORLD_RANK, _SIZE               Open MPI
 *     PMI_RANK, PMI_SIZE                        MPICH and its kin
 *     SLURM_PROCID, SLURM_STEP_NUM_TASKS        srun. The sbatch shell has most SLURM variables but
 *                                               no SLURM_STEP_ID: there, nobody else comes
 *     JOB_COMPLETION_INDEX, *WORLD_SIZE         Kubernetes Indexed Job, which does not say how many
 *     PET_NNODES, PET_NODE_RANK, ...            Kubeflow TrainJob: one process a node, and we are
 *                                               the launcher of the node's ranks
 *
 * This part is a pure function of the environment; dtrain_launch hands it getenv. */

typedef const char *(*dtrain__lookup_fn)(void *user, const char *name);

typedef struct dtrain__environment {
    dtrain__lookup_fn lookup;
    void *user;
} dtrain__environment;

/* What it says. */
typedef struct dtrain__placement {
    const char *family;         /* NULL: no launcher, or one that started a world of one */
    int rank, size;             /* forks > 0: of the node's first rank */
    int local_rank, local_size; /* -1, 0: not said */
    int forks;                  /* ranks this process has to start; 0: it is a rank itself */
    char address[256];          /* of rank 0; "": the world is on one node that we fork */
    uint32_t port;              /* of the control plane */
    uint64_t key[2];            /* tells this run from others, see [S25.4] */
} dtrain__placement;

#define DTRAIN__DEFAULT_PORT 29500u
#define DTRAIN__PORT_OFFSET 100u /* torchrun's own store listens on MASTER_PORT itself */

/* NULL when unset; empty counts as unset. */
static const char *dtrain__env_text(const dtrain__environment *env, const char *name)
{
    const char *text = name ? env->lookup(env->user, name) : NULL;
    return text && text[0] ? text : NULL;
}

/* *found says whether it is set. At most nine digits, no sign, no blank. */
static dtrain_result dtrain__env_number(const dtrain__environment *env, const char *name,
                                        bool *found, int *value)
{
    const char *text = dtrain__env_text(env, name);
    *found = text != NULL;
    if (!text) return DTRAIN_OK;
    const size_t digits = strspn(text, "0123456789");
    if (text[digits] || digits > 9)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: %s=\"%.60s\" in the environment is not a plain decimal "
                           "number of at most nine digits; unset it or set it right",
                           name, text);
    *value = (int)strtol(text, NULL, 10);
    return DTRAIN_OK;
}

typedef struct dtrain__family {
    const char *name, *rank, *size, *local_rank, *local_size;
    const char *run[2]; /* variables that name the run */
} dtrain__family;

static const dtrain__family dtrain__families[] = {
    {"DTRAIN_RANK",
     "DTRAIN_RANK",
     "DTRAIN_WORLD_SIZE",
     "DTRAIN_LOCAL_RANK",
     "DTRAIN_LOCAL_SIZE",
     {NULL, NULL}},
    {"torchrun",
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE", NULL}},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", {NULL, NULL}},
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     NULL,
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"Indexed Job", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL, NULL, {NULL, NULL}},
    {"PET", "PET_NODE_RANK", "PET_NNODES", NULL, NULL, {NULL, NULL}},
};
enum {
    DTRAIN__OURS,
    DTRAIN__TORCHRUN,
    DTRAIN__OPEN_MPI,
    DTRAIN__MPICH,
    DTRAIN__SLURM,
    DTRAIN__INDEXED,
    DTRAIN__PET,
    DTRAIN__FAMILIES
};

/* "RANK=5" beside "WORLD_SIZE=1": a pair that cannot be. */
static dtrain_result dtrain__env_conflict(const char *a, int a_value, const char *b, int b_value,
                                          const char *rule)
{
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: %s=%d with %s=%d in the environment makes no sense: %s", a,
                       a_value, b, b_value, rule);
}

/* Rank and size of one family; *found when both are there. Half a family is an error, except that a
 * lone world size may belong to an Indexed Job. */
static dtrain_result dtrain__env_pair(const dtrain__environment *env, const char *rank_name,
                                      const char *size_name, bool size_alone, bool *found,
                                      dtrain__placement *out)
{
    bool has_rank, has_size;
    *found = false;
    DTRAIN__TRY(dtrain__env_number(env, rank_name, &has_rank, &out->rank));
    DTRAIN__TRY(dtrain__env_number(env, size_name, &has_size, &out->size));
    if (!has_rank && (!has_size || size_alone)) return DTRAIN_OK;
    if (has_rank != has_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: %s=%d is in the environment and %s is not; a launcher "
                           "sets both: set %s too or unset %s",
                           has_rank ? rank_name : size_name, has_rank ? out->rank : out->size,
                           has_rank ? size_name : rank_name, has_rank ? size_name : rank_name,
                           has_rank ? rank_name : size_name);
    if (out->rank >= out->size)
        return dtrain__env_conflict(rank_name, out->rank, size_name, out->size,
                                    "ranks go from 0 to the world size less one");
    *found = true;
    return DTRAIN_OK;
}

static dtrain_result dtrain__env_local(const dtrain__environment *env, const dtrain__family *family,
                                       dtrain__placement *out)
{
    bool has_rank, has_size;
    out->local_rank = -1;
    out->local_size = 0;
    DTRAIN__TRY(dtrain__env_number(env, family->local_rank, &has_rank, &out->local_rank));
    DTRAIN__TRY(dtrain__env_number(env, family->local_size, &has_size, &out->local_size));
    if (has_size && (out->local_size == 0 || out->local_size > out->size))
        return dtrain__env_conflict(family->local_size, out->local_size, family->size, out->size,
                                    "a node has from 1 to world size ranks");
    if (has_rank && has_size && out->local_rank >= out->local_size)
        return dtrain__env_conflict(family->local_rank, out->local_rank, family->local_size,
                                    out->local_size,
                                    "local ranks go from 0 to local size less one");
    if (has_rank && out->local_rank >= out->size)
        return dtrain__env_conflict(family->local_rank, out->local_rank, family->size, out->size,
                                    "a local rank is below the world size");
    return DTRAIN_OK;
}

/* RANK beside another launcher's variables that say something else: usually inherited by the shell
 * that ran mpirun. Under torchrun they describe the node on which srun or mpirun put the agent. */
static dtrain_result dtrain__env_disagreement(const dtrain__environment *env,
                                              const dtrain__placement *taken)
{
    const dtrain__family *mine = &dtrain__families[DTRAIN__TORCHRUN];
    if (dtrain__env_text(env, "TORCHELASTIC_RUN_ID")) return DTRAIN_OK;
    for (int i = DTRAIN__OPEN_MPI; i <= DTRAIN__MPICH; i++) {
        const dtrain__family *other = &dtrain__families[i];
        dtrain__placement said;
        bool found;
        DTRAIN__TRY(dtrain__env_pair(env, other->rank, other->size, false, &found, &said));
        if (!found || (said.rank == taken->rank && said.size == taken->size)) continue;
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_launch: the environment has %s=%d, %s=%d and also %s=%d, %s=%d; unset those "
            "that do not come from the launcher of this run",
            mine->rank, taken->rank, mine->size, taken->size, other->rank, said.rank, other->size,
            said.size);
    }
    return DTRAIN_OK;
}

/* ---- Slurm's lists ----------------------------------------------------------------------------*/

#define DTRAIN__HOSTS_MOST 1000000

/* One bracket, "001-003,7]": how many numbers it stands for, -1 when malformed; number `index` of
 * them, zeros kept, goes to `out` (room 16). *end is set behind the bracket. */
static int64_t dtrain__bracket(const char *text, int64_t index, char *out, const char **end)
{
    int64_t count = 0;
    do {
        const size_t width = strspn(text, "0123456789");
        if (!width || width > 9) return -1;
        const int64_t low = strtol(text, NULL, 10);
        int64_t high = low;
        text += width;
        if (*text == '-') {
            const size_t digits = strspn(++text, "0123456789");
            if (!digits || digits > 9) return -1;
            high = strtol(text, NULL, 10);
            text += digits;
        }
        if (high < low || high - low >= DTRAIN__HOSTS_MOST) return -1;
        if (index >= count && index - count <= high - low)
            snprintf(out, 16, "%0*d", (int)width, (int)(low + index - count));
        count += high - low + 1;
    } while (*text++ == ',' && count <= DTRAIN__HOSTS_MOST);
    *end = text;
    return text[-1] == ']' ? count : -1;
}

/* How many names one entry stands for, "rack[1-2]-n[08-10]": six; up to a comma or the end. */
static int64_t dtrain__host_count(const char *entry, const char **end)
{
    int64_t count = 1;
    char ignored[16];
    while (*entry && *entry != ',') {
        if (*entry == ']') return -1;
        if (*entry++ != '[') continue;
        const int64_t numbers = dtrain__bracket(entry, -1, ignored, &entry);
        if (numbers < 0 || count * numbers > DTRAIN__HOSTS_MOST) return -1;
        count *= numbers;
    }
    *end = entry;
    return count;
}

/* Name number `index` of one entry that host_count has found well-formed; the last bracket runs
 * fastest. False when it does not fit. */
static bool dtrain__host_write(const char *entry, int64_t index, char *out, size_t room)
{
    size_t used = 0;
    const char *end;
    while (*entry && *entry != ',' && used + 17 < room) {
        if (*entry != '[') {
            out[used++] = *entry++;
            continue;
        }
        char number[16];
        (void)dtrain__bracket(entry + 1, -1, number, &end);
        const int64_t faster = dtrain__host_count(end, &end);
        (void)dtrain__bracket(entry + 1, index / faster, number, &entry);
        index %= faster;
        used += (size_t)snprintf(out + used, room - used, "%s", number);
    }
    out[used] = 0;
    return used > 0 && (!*entry || *entry == ',');
}

/* Host number `index` of a list like "node[001-003,7],gpu[1-2]". False when the list is malformed
 * or has no such host. */
static bool dtrain__host_of_list(const char *list, int64_t index, char *out, size_t room)
{
    while (*list) {
        const char *end;
        const int64_t count = dtrain__host_count(list, &end);
        if (count < 0 || end == list) return false;
        if (index < count) return dtrain__host_write(list, index, out, room);
        index -= count;
        list = *end ? end + 1 : end;
    }
    return false;
}

/* Tasks of node number `node` in a list like "2(x3),1"; 0 when it cannot be told. */
static int dtrain__tasks_of_list(const char *list, int node)
{
    while (list && *list) {
        char *end;
        const long tasks = strtol(list, &end, 10);
        long repeat = 1;
        if (end == list || tasks < 1 || tasks > DTRAIN__HOSTS_MOST) return 0;
        if (end[0] == '(' && end[1] == 'x') {
            repeat = strtol(end + 2, &end, 10);
            if (repeat < 1 || *end++ != ')') return 0;
        }
        if (node < repeat) return (int)tasks;
        node -= (int)repeat;
        if (*end && *end != ',') return 0;
        list = *end ? end + 1 : end;
    }
    return 0;
}

/* ---- Families that need more than a pair ------------------------------------------------------*/

static dtrain_result dtrain__env_slurm(const dtrain__environment *env, bool *found,
                                       dtrain__placement *out)
{
    const dtrain__family *family = &dtrain__families[DTRAIN__SLURM];
    const char *size_name =
        dtrain__env_text(env, family->size) ? family->size : "SLURM_NTASKS"; /* before 20.11 */
    const char *hosts = dtrain__env_text(env, "SLURM_STEP_NODELIST");
    bool has_node;
    int node = 0;
    *found = false;
    if (!dtrain__env_text(env, "SLURM_STEP_ID")) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_pair(env, family->rank, size_name, false, found, out));
    if (!*found) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_local(env, family, out));
    DTRAIN__TRY(dtrain__env_number(env, "SLURM_NODEID", &has_node, &node));
    const char *tasks = dtrain__env_text(env, "SLURM_STEP_TASKS_PER_NODE");
    if (has_node && tasks) out->local_size = dtrain__tasks_of_list(tasks, node);
    if (out->local_size > out->size || out->local_size <= out->local_rank) out->local_size = 0;
    if (dtrain__env_text(env, "DTRAIN_MASTER_ADDR") || dtrain__env_text(env, "MASTER_ADDR"))
        return DTRAIN_OK; /* said otherwise */
    if (hosts && !dtrain__host_of_list(hosts, 0, out->address, sizeof out->address))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: SLURM_STEP_NODELIST=\"%.100s\" is not a host list; set "
                           "DTRAIN_MASTER_ADDR to the host of rank 0",
                           hosts);
    return DTRAIN_OK;
}

/* The pod's own name is <job>-<index>; with setHostnameAsFQDN the domain of the service is behind
 * it, and so the name of pod 0 is known. */
static dtrain_result dtrain__env_indexed(const dtrain__environment *env, bool *found,
                                         dtrain__placement *out)
{
    const char *index_name = dtrain__families[DTRAIN__INDEXED].rank;
    const bool ours = dtrain__env_text(env, "DTRAIN_WORLD_SIZE") != NULL;
    const char *size_name = ours ? "DTRAIN_WORLD_SIZE" : "WORLD_SIZE";
    *found = false;
    if (!dtrain__env_text(env, size_name)) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_pair(env, index_name, size_name, true, found, out));
    const char *host = dtrain__env_text(env, "HOSTNAME");
    const char *domain = host ? strchr(host, '.') : NULL;
    char ending[16];
    if (!*found || !domain) return DTRAIN_OK;
    const size_t tail = (size_t)snprintf(ending, sizeof ending, "-%d", out->rank);
    const size_t name = (size_t)(domain - host);
    if (name > tail && strncmp(domain - tail, ending, tail) == 0 &&
        strlen(host) + 2 < sizeof out->address)
        snprintf(out->address, sizeof out->address, "%.*s-0%s", (int)(name - tail), host, domain);
    return DTRAIN_OK;
}

/* PET_ is torchrun's prefix for its own flags: whoever sets these wants one launcher a node. */
static dtrain_result dtrain__env_pet(const dtrain__environment *env, bool *found,
                                     dtrain__placement *out)
{
    int nodes = 1, node = 0, forks = 1;
    bool has_nodes, has_node, has_forks;
    const char *count = dtrain__env_text(env, "PET_NPROC_PER_NODE");
    if (count &&
        (strcmp(count, "auto") == 0 || strcmp(count, "gpu") == 0 || strcmp(count, "cpu") == 0))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: PET_NPROC_PER_NODE=\"%s\" leaves the number of ranks "
                           "open; set it to the ranks per node",
                           count);
    DTRAIN__TRY(dtrain__env_number(env, "PET_NNODES", &has_nodes, &nodes));
    DTRAIN__TRY(dtrain__env_number(env, "PET_NODE_RANK", &has_node, &node));
    DTRAIN__TRY(dtrain__env_number(env, "PET_NPROC_PER_NODE", &has_forks, &forks));
    *found = has_nodes || has_node || has_forks;
    if (!*found) return DTRAIN_OK;
    if (has_node && !has_nodes)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: PET_NODE_RANK=%d is in the environment and PET_NNODES "
                           "is not; set both or neither",
                           node);
    if (nodes > 1 && !has_node)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: PET_NNODES=%d is in the environment and PET_NODE_RANK "
                           "is not; set both or neither",
                           nodes);
    if (node >= nodes)
        return dtrain__env_conflict("PET_NODE_RANK", node, "PET_NNODES", nodes,
                                    "nodes go from 0 to their number less one");
    if (!forks || nodes > DTRAIN_MAX_RANKS || forks > DTRAIN_MAX_RANKS / nodes)
        return dtrain__env_conflict("PET_NNODES", nodes, "PET_NPROC_PER_NODE", forks,
                                    "their product is from 1 to DTRAIN_MAX_RANKS");
    out->forks = forks;
    out->size = nodes * forks;
    out->rank = node * forks;
    out->local_size = forks;
    return DTRAIN_OK;
}

/* ---- Where to meet ----------------------------------------------------------------------------*/

static dtrain_result dtrain__env_port_number(const dtrain__environment *env, const char *name,
                                             bool *found, int *port)
{
    DTRAIN__TRY(dtrain__env_number(env, name, found, port));
    if (!*found || (*port >= 1 && *port <= 65535)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: %s=%d in the environment is not a port, expected 1 to 65535",
                       name, *port);
}

/* DTRAIN_PORT and DTRAIN_MASTER_PORT are the port itself; a launcher's port is its own, we use the
 * one DTRAIN__PORT_OFFSET above (below, at the end of the range). */
static dtrain_result dtrain__env_port(const dtrain__environment *env, const char *theirs,
                                      dtrain__placement *out)
{
    bool found;
    int port = (int)DTRAIN__DEFAULT_PORT;
    DTRAIN__TRY(dtrain__env_port_number(env, "DTRAIN_PORT", &found, &port));
    if (!found) DTRAIN__TRY(dtrain__env_port_number(env, "DTRAIN_MASTER_PORT", &found, &port));
    if (!found) {
        DTRAIN__TRY(dtrain__env_port_number(env, theirs, &found, &port));
        const int offset = (int)DTRAIN__PORT_OFFSET;
        port += port + offset <= 65535 ? offset : -offset;
    }
    out->port = (uint32_t)port;
    return DTRAIN_OK;
}

static dtrain_result dtrain__env_meeting(const dtrain__environment *env, int family,
                                         dtrain__placement *out)
{
    const bool pet = family == DTRAIN__PET;
    const char *ours = dtrain__env_text(env, "DTRAIN_MASTER_ADDR");
    const char *theirs = dtrain__env_text(env, pet ? "PET_MASTER_ADDR" : "MASTER_ADDR");
    const char *address = ours ? ours : family == DTRAIN__OURS ? NULL : theirs;
    DTRAIN__TRY(dtrain__env_port(env, pet ? "PET_MASTER_PORT" : "MASTER_PORT", out));
    if (address && strlen(address) >= sizeof out->address)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: the address of rank 0 has %zu characters, at most %zu "
                           "are possible",
                           strlen(address), sizeof out->address - 1);
    if (address) snprintf(out->address, sizeof out->address, "%s", address);
    else if (out->local_size == out->size) snprintf(out->address, sizeof out->address, "127.0.0.1");
    if (out->address[0]) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "dtrain_launch: %s=%d in the environment, and not where rank 0 is; set %s to rank 0's host",
        dtrain__families[family].size, pet ? out->size / out->forks : out->size,
        pet                      ? "PET_MASTER_ADDR"
        : family == DTRAIN__OURS ? "DTRAIN_MASTER_ADDR"
                                 : "MASTER_ADDR");
}

/* DTRAIN_JOB_KEY, a secret; else what the launcher calls this run, which at least keeps two runs
 * apart that meet at one port. */
static void dtrain__env_key(const dtrain__environment *env, const dtrain__family *family,
                            dtrain__placement *out)
{
    const char *secret = dtrain__env_text(env, "DTRAIN_JOB_KEY");
    const char *run = secret ? secret : dtrain__env_text(env, family->run[0]);
    const char *part = secret ? NULL : dtrain__env_text(env, family->run[1]);
    for (uint64_t i = 0; i < 2; i++) {
        const uint64_t plain[2] = {i, secret ? 1u : 0u};
        const uint64_t chain[2] = {dtrain__siphash(plain, run, run ? strlen(run) : 0), i};
        out->key[i] = dtrain__siphash(chain, part, part ? strlen(part) : 0);
    }
}

/* The whole of it. A world of one is no launcher's business: dtrain_launch then does what its desc
 * says, as if nothing were set. */
static dtrain_result dtrain__recognise(const dtrain__environment *env, dtrain__placement *out)
{
    const bool indexed = dtrain__env_text(env, "JOB_COMPLETION_INDEX") != NULL;
    bool found = false;
    int i = 0;
    memset(out, 0, sizeof *out);
    for (; i < DTRAIN__FAMILIES; i++) {
        const dtrain__family *family = &dtrain__families[i];
        out->local_rank = -1;
        if (i == DTRAIN__SLURM) DTRAIN__TRY(dtrain__env_slurm(env, &found, out));
        else if (i == DTRAIN__INDEXED) DTRAIN__TRY(dtrain__env_indexed(env, &found, out));
        else if (i == DTRAIN__PET) DTRAIN__TRY(dtrain__env_pet(env, &found, out));
        else {
            const bool size_alone = indexed && i <= DTRAIN__TORCHRUN;
            DTRAIN__TRY(dtrain__env_pair(env, family->rank, family->size, size_alone, &found, out));
            if (found) DTRAIN__TRY(dtrain__env_local(env, family, out));
        }
        if (found) break;
    }
    if (found && i == DTRAIN__TORCHRUN) DTRAIN__TRY(dtrain__env_disagreement(env, out));
    if (!found || out->size == 1) {
        memset(out, 0, sizeof *out);
        out->size = 1;
        return DTRAIN_OK;
    }
    if (out->size > DTRAIN_MAX_RANKS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: %s=%d in the environment, at most %d ranks are possible",
                           dtrain__families[i].size, out->size, DTRAIN_MAX_RANKS);
    out->family = dtrain__families[i].name;
    dtrain__env_key(env, &dtrain__families[i], out);
    return out->forks == out->size ? DTRAIN_OK : dtrain__env_meeting(env, i, out);
}

static const char *dtrain__getenv(void *user, const char *name)
{
    (void)user;
    return getenv(name);
}

/* ---- [S25.3] The link ---------------------------------------------------------------------------
 *
 * Ranks that a launcher has started are connected as a star: each has one TCP connection to rank 0,
 * which passes on what it hears. What travels is the control page: a rank's post, its fate and the
 * report, written into the sender's page first and then told to the others, whose page follows.
 *
 *     rank 1 ----+
 *     rank 2 ----+---- rank 0      a frame: | dtrain__frame, 32 bytes | 0 to 4096 bytes |
 *     rank 3 ----+
 *
 * Nothing is queued: each connection remembers what it has told, and the next frame is made from
 * the page when the last one is out. A post cannot be overwritten before it is told to everybody,
 * because its rank must hear everybody's answer to the next one first.
 *
 * When all ranks are on one host they move to one shared page [S25.5]. From then on the link is
 * silent and serves to notice the death of a rank only: its connection closes, rank 0 sees it and
 * writes it into the page. Keepalive does the same for a host that is lost.
 *
 * No thread: sockets are looked at from inside waits and dtrain_world_look. Frames come from ranks
 * that have proved to know the key [S25.4]; they are checked all the same, and a rank that sends
 * nonsense is cut off. */

#define DTRAIN__FRAME_MAGIC 0x4c4b5444u /* "DTKL" */

typedef enum dtrain__frame_kind {
    DTRAIN__HELLO = 1, /* the first four belong to the rendezvous */
    DTRAIN__CHALLENGE = 2,
    DTRAIN__JOIN = 3,
    DTRAIN__BEGIN = 4,
    DTRAIN__REFUSED = 5, /* value: dtrain_result; a sentence */
    DTRAIN__POST = 6,    /* number: sequence; data */
    DTRAIN__FATE = 7,    /* number: dtrain__end; value: as in the fate; error */
    DTRAIN__REPORT = 8   /* value: dtrain_result; text */
} dtrain__frame_kind;

typedef struct dtrain__frame {
    uint32_t magic, kind;
    int32_t rank; /* whom it is about */
    int32_t value;
    uint64_t number;
    uint32_t bytes; /* that follow */
    uint32_t unused;
} dtrain__frame;

#define DTRAIN__FRAME_ROOM (sizeof(dtrain__frame) + DTRAIN_EXCHANGE_BYTES)

typedef struct dtrain__connection {
    int socket;          /* -1: closed */
    int rank;            /* of the other end; -1: not known yet */
    uint32_t stage;      /* of the rendezvous */
    uint64_t opened_ns;  /* when it was accepted */
    uint64_t nonce[2];   /* the other end's and ours */
    char name[96];       /* "10.0.0.7 port 4711", for messages */
    uint64_t *told;      /* (size) posts told */
    uint32_t *told_fate; /* (size) */
    bool told_report;
    size_t in_bytes, out_begin, out_end;
    char in[DTRAIN__FRAME_ROOM], out[DTRAIN__FRAME_ROOM];
} dtrain__connection;

typedef struct dtrain__link {
    int count;   /* connections: the world's size on rank 0 (the first one unused), 1 elsewhere */
    bool shared; /* the page is shared: nothing is told */
    uint64_t looked_ns;       /* at the sockets */
    uint64_t news;            /* changes of the page ... */
    uint64_t all_told;        /* ... up to which everything is told and sent */
    bool met;                 /* the rendezvous is over: the others know this rank */
    dtrain__connection *ends; /* (count) */
    struct pollfd *polls;     /* (count) */
    uint64_t *told;           /* (count, size) */
    uint32_t *told_fate;      /* (count, size) */
} dtrain__link;

static void dtrain__close(dtrain__connection *end)
{
    if (end->socket >= 0) close(end->socket);
    end->socket = -1;
}

static void dtrain__link_destroy(dtrain_world *world)
{
    dtrain__link *link = world->link;
    if (!link) return;
    const size_t count = (size_t)link->count, table = count * (size_t)world->size;
    for (size_t i = 0; link->ends && i < count; i++) dtrain__close(&link->ends[i]);
    dtrain__free(&world->allocator, link->told_fate, table, sizeof *link->told_fate);
    dtrain__free(&world->allocator, link->told, table, sizeof *link->told);
    dtrain__free(&world->allocator, link->polls, count, sizeof *link->polls);
    dtrain__free(&world->allocator, link->ends, count, sizeof *link->ends);
    dtrain__free(&world->allocator, link, 1, sizeof *link);
    world->link = NULL;
}

static dtrain_result dtrain__link_create(dtrain_world *world)
{
    const size_t size = (size_t)world->size, count = world->rank ? 1 : size;
    dtrain__link *link =
        (dtrain__link *)dtrain__alloc(&world->allocator, 1, sizeof *link, "a control plane");
    if (!link) return DTRAIN_ERROR_MEMORY;
    world->link = link;
    link->count = (int)count;
    link->ends = (dtrain__connection *)dtrain__alloc(&world->allocator, count, sizeof *link->ends,
                                                     "control connections");
    link->polls = (struct pollfd *)dtrain__alloc(&world->allocator, count, sizeof *link->polls,
                                                 "control connections");
    link->told = (uint64_t *)dtrain__alloc(&world->allocator, count * size, sizeof *link->told,
                                           "control connections");
    link->told_fate = (uint32_t *)dtrain__alloc(&world->allocator, count * size,
                                                sizeof *link->told_fate, "control connections");
    for (size_t i = 0; link->ends && i < count; i++) link->ends[i].socket = -1;
    if (!link->ends || !link->polls || !link->told || !link->told_fate) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        link->ends[i].rank = (int)i; /* on ranks other than 0: rank 0 */
        link->ends[i].told = link->told + i * size;
        link->ends[i].told_fate = link->told_fate + i * size;
    }
    return DTRAIN_OK;
}

/* ---- Frames in and out ------------------------------------------------------------------------*/

/* There is room: nothing else is on its way out. */
static void dtrain__frame_put(dtrain__connection *end, dtrain__frame_kind kind, int rank, int value,
                              uint64_t number, const void *data, size_t bytes)
{
    dtrain__frame frame;
    memset(&frame, 0, sizeof frame);
    frame.magic = DTRAIN__FRAME_MAGIC;
    frame.kind = (uint32_t)kind;
    frame.rank = rank;
    frame.value = value;
    frame.number = number;
    frame.bytes = (uint32_t)bytes;
    memcpy(end->out, &frame, sizeof frame);
    if (bytes) memcpy(end->out + sizeof frame, data, bytes);
    end->out_begin = 0;
    end->out_end = sizeof frame + bytes;
}

/* Sends what can be sent now; true when everything is out. On a broken connection it is dropped:
 * the next look at the socket finds that it is broken. */
static bool dtrain__flush(dtrain__connection *end)
{
    while (end->out_begin < end->out_end) {
        const ssize_t sent = send(end->socket, end->out + end->out_begin,
                                  end->out_end - end->out_begin, MSG_NOSIGNAL);
        if (sent > 0) end->out_begin += (size_t)sent;
        else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
        else if (sent == 0 || errno != EINTR) end->out_begin = end->out_end;
    }
    return true;
}

/* Reads once what is there; false when the other end has closed or failed. */
static bool dtrain__receive(dtrain__connection *end)
{
    const ssize_t got =
        recv(end->socket, end->in + end->in_bytes, sizeof end->in - end->in_bytes, 0);
    if (got > 0) end->in_bytes += (size_t)got;
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

/* The frame at the start of what was received: 1 there is one, 0 not all of it yet, -1 nonsense. */
static int dtrain__frame_get(const dtrain__connection *end, dtrain__frame *frame)
{
    const uint32_t magic = DTRAIN__FRAME_MAGIC;
    const size_t seen = end->in_bytes < sizeof magic ? end->in_bytes : sizeof magic;
    if (memcmp(end->in, &magic, seen) != 0) return -1;
    if (end->in_bytes < sizeof *frame) return 0;
    memcpy(frame, end->in, sizeof *frame);
    if (frame->bytes > DTRAIN_EXCHANGE_BYTES) return -1;
    return end->in_bytes >= sizeof *frame + frame->bytes;
}

static void dtrain__frame_drop(dtrain__connection *end, const dtrain__frame *frame)
{
    const size_t bytes = sizeof *frame + frame->bytes;
    end->in_bytes -= bytes;
    memmove(end->in, end->in + bytes, end->in_bytes);
}

/* The text that a frame carries, ended by a zero. */
static void dtrain__frame_text(const dtrain__frame *frame, const char *data, char *text,
                               size_t room)
{
    const size_t length = frame->bytes < room ? frame->bytes : room - 1;
    memcpy(text, data, length);
    text[length] = 0;
}

/* Brings this page up to what the frame says; false when it makes no sense. */
static bool dtrain__frame_apply(dtrain_world *world, const dtrain__connection *end,
                                const dtrain__frame *frame, const char *data)
{
    dtrain__control *control = world->control;
    const int rank = frame->rank;
    char text[496];
    if (rank < 0 || rank >= world->size || rank == world->rank) return false;
    if (world->rank == 0 && rank != end->rank) return false; /* only rank 0 passes on */
    dtrain__frame_text(frame, data, text, sizeof text);
    switch (frame->kind) {
    case DTRAIN__POST: {
        dtrain__post *post = &control->posts[rank];
        if (world->link->shared || frame->number != post->sequence + 1) return false;
        post->bytes[frame->number % 2] = frame->bytes;
        memcpy(post->data[frame->number % 2], data, frame->bytes);
        dtrain__store(&post->sequence, frame->number);
        return true;
    }
    case DTRAIN__FATE:
        if (frame->number < DTRAIN__LEFT || frame->number > DTRAIN__LOST) return false;
        if (dtrain__load(&control->fates[rank].how) == DTRAIN__RUNNING)
            dtrain__record_end(control, rank, (dtrain__end)frame->number, frame->value, text);
        return true;
    case DTRAIN__REPORT:
        dtrain__record_report(control, rank, (dtrain_result)frame->value, text);
        return true;
    default: return false;
    }
}

/* ---- Telling ----------------------------------------------------------------------------------*/

/* Puts the next thing that this end has not been told about `rank` into its way out. */
static bool dtrain__tell_rank(const dtrain_world *world, dtrain__connection *end, int rank)
{
    const dtrain__control *control = world->control;
    const dtrain__post *post = &control->posts[rank];
    const dtrain__fate *fate = &control->fates[rank];
    if (end->told[rank] < dtrain__load(&post->sequence)) {
        const uint64_t number = ++end->told[rank];
        dtrain__frame_put(end, DTRAIN__POST, rank, 0, number, post->data[number % 2],
                          (size_t)post->bytes[number % 2]);
        return true;
    }
    const uint32_t how = dtrain__load(&fate->how);
    if (end->told_fate[rank] || how == DTRAIN__RUNNING) return false;
    end->told_fate[rank] = 1;
    dtrain__frame_put(end, DTRAIN__FATE, rank, fate->value, how, fate->error, strlen(fate->error));
    return true;
}

/* Rank 0 tells an end about all other ranks; the others tell rank 0 about themselves. */
static bool dtrain__tell_next(const dtrain_world *world, dtrain__connection *end)
{
    const dtrain__report *report = &world->control->report;
    if (!end->told_report && dtrain__load(&report->state) == 2) {
        end->told_report = true;
        const bool due = world->rank ? report->rank == world->rank : report->rank != end->rank;
        if (due) {
            dtrain__frame_put(end, DTRAIN__REPORT, report->rank, report->code, 0, report->text,
                              strlen(report->text));
            return true;
        }
    }
    if (world->rank) return dtrain__tell_rank(world, end, world->rank);
    for (int i = 0; i < world->size; i++)
        if (i != end->rank && dtrain__tell_rank(world, end, i)) return true;
    return false;
}

/* Tells everybody what there is to tell, as far as the sockets take it. */
static void dtrain__link_tell(dtrain_world *world)
{
    dtrain__link *link = world->link;
    const uint64_t news = link->news;
    bool all = true;
    if (link->shared || link->all_told == news) return;
    for (int i = 0; i < link->count; i++) {
        dtrain__connection *end = &link->ends[i];
        while (end->socket >= 0 && dtrain__flush(end))
            if (!dtrain__tell_next(world, end)) break;
        if (end->socket >= 0 && end->out_begin < end->out_end) all = false;
    }
    if (all) link->all_told = news;
}

/* The page has changed here. */
static void dtrain__link_news(dtrain_world *world)
{
    if (!world->link) return;
    world->link->news++;
    dtrain__link_tell(world);
}

/* ---- Listening --------------------------------------------------------------------------------*/

/* The connection is gone. A rank that left or failed has said so first, here or in the page. */
static void dtrain__link_lost(dtrain_world *world, dtrain__connection *end)
{
    dtrain__close(end);
    if (dtrain__load(&world->control->fates[end->rank].how) != DTRAIN__RUNNING) return;
    dtrain__record_lost(world->control, end->rank);
    world->link->news++;
}

static void dtrain__link_hear(dtrain_world *world, dtrain__connection *end)
{
    dtrain__frame frame;
    int there = 0;
    const bool open = dtrain__receive(end);
    while (end->socket >= 0 && (there = dtrain__frame_get(end, &frame)) == 1) {
        if (!dtrain__frame_apply(world, end, &frame, end->in + sizeof frame)) break;
        dtrain__frame_drop(end, &frame);
        world->link->news++;
    }
    if (there)
        dtrain_log(world, DTRAIN_LOG_ERROR,
                   "rank %d (%s) sent a frame that makes no sense; it is "
                   "cut off",
                   end->rank, end->name);
    if (there || !open) dtrain__link_lost(world, end);
}

/* Looks at all sockets, waiting up to nap_ms for something to happen. */
static void dtrain__link_pump(dtrain_world *world, int nap_ms)
{
    dtrain__link *link = world->link;
    dtrain__link_tell(world);
    for (int i = 0; i < link->count; i++) {
        const dtrain__connection *end = &link->ends[i];
        link->polls[i].fd = end->socket; /* -1 is passed over */
        link->polls[i].events = POLLIN;
        if (end->out_begin < end->out_end) link->polls[i].events = POLLIN | POLLOUT;
        link->polls[i].revents = 0;
    }
    const int ready = poll(link->polls, (nfds_t)link->count, nap_ms);
    for (int i = 0; ready > 0 && i < link->count; i++)
        if (link->polls[i].revents & ~POLLOUT && link->ends[i].socket >= 0)
            dtrain__link_hear(world, &link->ends[i]);
    dtrain__link_tell(world);
}

/* From inside waits: a look costs some microseconds, so one a millisecond. */
static void dtrain__link_look(dtrain_world *world)
{
    const uint64_t now = dtrain__now_ns();
    if (!world->link || now - world->link->looked_ns < 1000000u) return;
    world->link->looked_ns = now;
    dtrain__link_pump(world, 0);
}

static bool dtrain__link_all_told(const dtrain_world *world)
{
    return !dtrain__is_remote(world) || world->link->all_told == world->link->news;
}

/* The page is this rank's alone: what is to be waited for comes through the sockets. */
static bool dtrain__is_remote(const dtrain_world *world)
{
    return world->link && !world->link->shared;
}

/* ---- [S25.4] The rendezvous ---------------------------------------------------------------------
 *
 *     rank r                                             rank 0, listening
 *     HELLO: protocol, a random number        ->
 *                                             <-         CHALLENGE: a random number, proof
 *     JOIN: rank, size, version, host, proof  ->         checked, kept; others are waited for
 *                                             <-         BEGIN, when all are there, or REFUSED
 *
 * A proof is the keyed hash of both random numbers, so the key itself never travels and an old
 * proof is worth nothing. This keeps out what comes by mistake or from someone who does not know
 * the key: another run, a port scanner, another user. It does not hide what is sent and does not
 * protect a connection that stands: who can read or change the traffic must be kept away by the
 * network; and a short key can be guessed by who has read a proof.
 *
 * Who speaks another protocol or does not know the key is turned away and the run goes on waiting:
 * a stranger must not be able to end it. Ranks that know the key and contradict each other (world
 * size, version, the same rank twice) end the run on all ranks, with both values in the sentence.
 *
 * Rank 0 never waits for one guest: each has ten seconds to say all it has to say. */

#define DTRAIN__PROTOCOL 1u
#define DTRAIN__GUESTS 64             /* at once; further ones wait in the kernel's backlog */
#define DTRAIN__GUEST_NS 10000000000u /* for the whole handshake */
#define DTRAIN__TELL_NS 3000000000u   /* after a failure, for those who have yet to come */
#define DTRAIN__RENDEZVOUS_MS 300000u /* and not more than timeout_ms */

enum { DTRAIN__GREETED = 0, DTRAIN__CHALLENGED = 1, DTRAIN__LEAVING = 2 }; /* stages of a guest */

/* What a rank says about itself; begins with the proof, which covers the rest. */
typedef struct dtrain__card {
    uint64_t proof, layout;
    int32_t rank, size, pid, unused;
    char version[24], host[72];
} dtrain__card;

typedef struct dtrain__rendezvous {
    dtrain_world *world;
    const dtrain__placement *place;
    uint64_t start_ns, deadline_ns, said_ns;
    int listener;
    dtrain__connection *guests; /* (GUESTS) */
    int32_t *pids;              /* (size) of the ranks that are here */
    int here;                   /* without rank 0 */
    int told;                   /* of a failure */
    int strangers;
    char stranger[200]; /* the last one, and why it was turned away */
    dtrain_result result;
    char why[400];
} dtrain__rendezvous;

static uint64_t dtrain__random(void)
{
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        number ^= dtrain__now_ns() ^ (uint64_t)getpid() << 48;
    return number;
}

/* The first word says who proves: an answer cannot be sent back as one's own. */
static uint64_t dtrain__prove(const dtrain__placement *place, const uint64_t nonce[2],
                              const dtrain__card *card)
{
    unsigned char text[24 + sizeof *card];
    const uint64_t head[3] = {card ? 2u : 1u, nonce[0], nonce[1]};
    memset(text, 0, sizeof text);
    memcpy(text, head, sizeof head);
    if (card) memcpy(text + sizeof head, card, sizeof *card);
    memset(text + sizeof head, 0, sizeof card->proof);
    return dtrain__siphash(place->key, text, sizeof text);
}

/* What must be equal for ranks to share memory and frames. */
static uint64_t dtrain__struct_layout(void)
{
    const uint64_t none[2] = {0, 0};
    const uint64_t sizes[4] = {sizeof(dtrain__control), sizeof(dtrain__fate), sizeof(dtrain__card),
                               sizeof(void *)};
    return dtrain__siphash(none, sizes, sizeof sizes);
}

static void dtrain__card_make(const dtrain__rendezvous *r, const uint64_t nonce[2],
                              dtrain__card *card)
{
    memset(card, 0, sizeof *card);
    card->layout = dtrain__struct_layout();
    card->rank = r->world->rank;
    card->size = r->world->size;
    card->pid = (int32_t)getpid();
    snprintf(card->version, sizeof card->version, "%s", DTRAIN_VERSION_STRING);
    if (gethostname(card->host, sizeof card->host - 1) != 0) card->host[0] = 0;
    card->proof = dtrain__prove(r->place, nonce, card);
}

/* The first failure stands. */
DTRAIN__PRINTF(3, 4)
static dtrain_result dtrain__meet_fail(dtrain__rendezvous *r, dtrain_result code,
                                       const char *format, ...)
{
    va_list args;
    if (r->result != DTRAIN_OK) return r->result;
    va_start(args, format);
    vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return r->result = code;
}

/* ---- Sockets ----------------------------------------------------------------------------------*/

static void dtrain__name_address(const struct sockaddr *address, socklen_t length, char *text,
                                 size_t room)
{
    char host[64], port[16];
    if (getnameinfo(address, length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        snprintf(text, room, "an unknown address");
    else snprintf(text, room, "%s port %s", host, port);
}

/* Small frames at once; a host that is gone is noticed after some 30 s, with traffic or without. */
static void dtrain__socket_tune(int socket)
{
    const int on = 1, idle_s = 10, between_s = 5, probes = 4, unanswered_ms = 30000;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

/* All addresses of rank 0's host; NULL with r->stranger telling why. "[::1]" is "::1". */
static struct addrinfo *dtrain__resolve(dtrain__rendezvous *r)
{
    struct addrinfo wanted, *found = NULL;
    char host[sizeof r->place->address], port[16];
    const char *from = r->place->address;
    const size_t length = strlen(from);
    const bool bracketed = length > 2 && from[0] == '[' && from[length - 1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(bracketed ? length - 2 : length), from + bracketed);
    snprintf(port, sizeof port, "%u", r->place->port);
    memset(&wanted, 0, sizeof wanted);
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = AI_NUMERICSERV;
    const int error = getaddrinfo(host, port, &wanted, &found);
    if (!error) return found;
    snprintf(r->stranger, sizeof r->stranger, "the name cannot be resolved: %s",
             gai_strerror(error));
    return NULL;
}

static bool dtrain__meet_nap(const dtrain__rendezvous *r, int ms)
{
    const uint64_t now = dtrain__now_ns();
    if (now >= r->deadline_ns) return false;
    const uint64_t left = (r->deadline_ns - now) / 1000000u + 1;
    (void)poll(NULL, 0, left < (uint64_t)ms ? (int)left : ms);
    return true;
}

/* ---- Rank 0 -----------------------------------------------------------------------------------*/

/* True when done with it, well or not. */
static bool dtrain__listen_at(dtrain__rendezvous *r, const struct sockaddr *address,
                              socklen_t length)
{
    const int on = 1, off = 0;
    char name[96];
    const int listener = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return false;
    dtrain__name_address(address, length, name, sizeof name);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->sa_family == AF_INET6) /* :: answers for IPv4 too */
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(listener, address, length) == 0 && listen(listener, SOMAXCONN) == 0) {
        r->listener = listener;
        return true;
    }
    const int error = errno;
    close(listener);
    if (error == EADDRNOTAVAIL) return false;
    dtrain__meet_fail(r, DTRAIN_ERROR_SYSTEM,
                      "rank 0 cannot listen at %s: %s; is another run there? Set DTRAIN_PORT, the "
                      "same on all ranks, to a free port",
                      name, strerror(error));
    return true;
}

/* Many systems give their own name a loopback address, which other hosts cannot call. */
static bool dtrain__is_alias(const char *host, const struct sockaddr *address)
{
    const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
    char number[sizeof(struct in6_addr)];
    const bool loopback = address->sa_family == AF_INET ? ntohl(four->sin_addr.s_addr) >> 24 == 127
                                                        : IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
    return loopback && strcmp(host, "localhost") != 0 && host[0] != '[' &&
           inet_pton(AF_INET, host, number) != 1 && inet_pton(AF_INET6, host, number) != 1;
}

/* At all addresses, both families where there are two. */
static bool dtrain__listen_everywhere(dtrain__rendezvous *r)
{
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    memset(&six, 0, sizeof six);
    memset(&four, 0, sizeof four);
    six.sin6_family = AF_INET6;
    four.sin_family = AF_INET;
    six.sin6_port = four.sin_port = htons((uint16_t)r->place->port);
    dtrain_log(r->world, DTRAIN_LOG_INFO,
               "%s leads to no address of this host that others can call: rank 0 listens at all",
               r->place->address);
    return dtrain__listen_at(r, (const struct sockaddr *)(const void *)&six, sizeof six) ||
           dtrain__listen_at(r, (const struct sockaddr *)(const void *)&four, sizeof four);
}

/* At the address the others will call, so that nothing else is opened. */
static dtrain_result dtrain__listen(dtrain__rendezvous *r)
{
    struct addrinfo *found = dtrain__resolve(r);
    while (!found && dtrain__meet_nap(r, 500)) found = dtrain__resolve(r);
    if (!found)
        return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT, "rank 0's address %s: %s",
                                 r->place->address, r->stranger);
    bool done = false;
    for (const struct addrinfo *at = found; at && !done; at = at->ai_next)
        if (!dtrain__is_alias(r->place->address, at->ai_addr))
            done = dtrain__listen_at(r, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
    if (!done && !dtrain__listen_everywhere(r))
        dtrain__meet_fail(r, DTRAIN_ERROR_SYSTEM, "rank 0 has no socket: %s", strerror(errno));
    return r->result;
}

/* Said and closed in this order, or the other end might lose the sentence. */
static void dtrain__refuse(dtrain__connection *end, dtrain_result code, const char *text)
{
    if (end->socket < 0 || end->stage == DTRAIN__LEAVING) return;
    dtrain__frame_put(end, DTRAIN__REFUSED, 0, code, 0, text, strlen(text));
    (void)dtrain__flush(end);
    shutdown(end->socket, SHUT_WR);
    end->stage = DTRAIN__LEAVING;
}

static void dtrain__turn_away(dtrain__rendezvous *r, dtrain__connection *guest, dtrain_result code,
                              const char *why)
{
    snprintf(r->stranger, sizeof r->stranger, "%s %s", guest->name, why);
    if (r->strangers++ == 0)
        dtrain_log(
            r->world, DTRAIN_LOG_WARNING,
            "rendezvous: a connection from %s was turned away (only the first one is logged)",
            r->stranger);
    if (code == DTRAIN_OK) dtrain__close(guest);
    else dtrain__refuse(guest, code, why);
}

static void dtrain__hear_hello(dtrain__rendezvous *r, dtrain__connection *guest,
                               const dtrain__frame *frame, const char *data)
{
    if (frame->kind != DTRAIN__HELLO || frame->bytes != sizeof guest->nonce[0]) {
        dtrain__turn_away(r, guest, DTRAIN_OK, "does not begin as a rank does");
    } else if (frame->number != DTRAIN__PROTOCOL) {
        dtrain__turn_away(r, guest, DTRAIN_ERROR_MISMATCH,
                          "speaks another protocol: all ranks need the same version of dtrain");
    } else {
        memcpy(&guest->nonce[0], data, sizeof guest->nonce[0]);
        guest->nonce[1] = dtrain__random();
        const uint64_t proof = dtrain__prove(r->place, guest->nonce, NULL);
        dtrain__frame_put(guest, DTRAIN__CHALLENGE, 0, 0, guest->nonce[1], &proof, sizeof proof);
        (void)dtrain__flush(guest);
        guest->stage = DTRAIN__CHALLENGED;
    }
}

/* The rank has shown that it belongs to this run; now it has to fit in. */
static dtrain_result dtrain__check_card(dtrain__rendezvous *r, const dtrain__connection *guest,
                                        const dtrain__card *card)
{
    const dtrain_world *world = r->world;
    if (strcmp(card->version, DTRAIN_VERSION_STRING) != 0 ||
        card->layout != dtrain__struct_layout())
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) was built with another dtrain, version %s; "
                                 "rank 0 has %s: start the same program on all ranks",
                                 card->rank, card->host, card->pid, card->version,
                                 DTRAIN_VERSION_STRING);
    if (card->size != world->size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d (%s, pid %d) has world size %d, rank 0 has world size %d",
                                 card->rank, card->host, card->pid, card->size, world->size);
    if (card->rank < 0 || card->rank >= world->size)
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "a rank %d joins (%s, pid %d) in a world of %d", card->rank,
                                 card->host, card->pid, world->size);
    if (r->pids[card->rank])
        return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH,
                                 "rank %d was started twice: as pid %d from %s and as pid %d from "
                                 "%s",
                                 card->rank, r->pids[card->rank],
                                 card->rank ? world->link->ends[card->rank].name : "rank 0's host",
                                 card->pid, guest->name);
    return DTRAIN_OK;
}

static void dtrain__hear_join(dtrain__rendezvous *r, dtrain__connection *guest,
                              const dtrain__frame *frame, const char *data)
{
    dtrain__card card;
    if (frame->kind == DTRAIN__JOIN && frame->bytes == sizeof card)
        memcpy(&card, data, sizeof card);
    else memset(&card, 0, sizeof card);
    card.version[sizeof card.version - 1] = card.host[sizeof card.host - 1] = 0;
    if (frame->kind != DTRAIN__JOIN || frame->bytes != sizeof card ||
        card.proof != dtrain__prove(r->place, guest->nonce, &card)) {
        dtrain__turn_away(r, guest, DTRAIN_ERROR_MISMATCH,
                          "has another DTRAIN_JOB_KEY than rank 0 or belongs to another run");
        return;
    }
    dtrain__frame_drop(guest, frame);
    if (r->result != DTRAIN_OK || dtrain__check_card(r, guest, &card) != DTRAIN_OK) {
        dtrain__refuse(guest, r->result, r->why);
        r->told++;
        return;
    }
    dtrain__connection *seat = &r->world->link->ends[card.rank];
    seat->socket = guest->socket;
    seat->in_bytes = guest->in_bytes;
    memcpy(seat->in, guest->in, guest->in_bytes);
    memcpy(seat->name, guest->name, sizeof seat->name);
    guest->socket = -1;
    r->pids[card.rank] = card.pid ? card.pid : -1;
    r->here++;
}

static void dtrain__hear_guest(dtrain__rendezvous *r, dtrain__connection *guest)
{
    dtrain__frame frame;
    const bool open = dtrain__receive(guest);
    if (guest->stage == DTRAIN__LEAVING) guest->in_bytes = 0;
    const int there = guest->stage == DTRAIN__LEAVING ? 0 : dtrain__frame_get(guest, &frame);
    if (there < 0) {
        dtrain__turn_away(r, guest, DTRAIN_OK, "does not begin as a rank does");
    } else if (there && guest->stage == DTRAIN__CHALLENGED) {
        dtrain__hear_join(r, guest, &frame, guest->in + sizeof frame);
    } else if (there) {
        dtrain__hear_hello(r, guest, &frame, guest->in + sizeof frame);
        if (guest->stage == DTRAIN__CHALLENGED) dtrain__frame_drop(guest, &frame);
    }
    if (!open) dtrain__close(guest);
}

static void dtrain__admit(dtrain__rendezvous *r)
{
    for (int i = 0; i < DTRAIN__GUESTS; i++) {
        dtrain__connection *guest = &r->guests[i];
        struct sockaddr_storage address;
        struct sockaddr *from = (struct sockaddr *)(void *)&address;
        socklen_t length = sizeof address;
        if (guest->socket >= 0) continue;
        const int socket = accept(r->listener, from, &length); /* accept4 may be hidden */
        if (socket < 0) return;
        fcntl(socket, F_SETFD, FD_CLOEXEC);
        fcntl(socket, F_SETFL, O_NONBLOCK);
        memset(guest, 0, sizeof *guest);
        guest->socket = socket;
        guest->rank = -1;
        guest->opened_ns = dtrain__now_ns();
        dtrain__socket_tune(socket);
        dtrain__name_address(from, length, guest->name, sizeof guest->name);
    }
}

/* "2, 5 and 7" */
static void dtrain__missing_ranks(const dtrain__rendezvous *r, char *text, size_t room)
{
    size_t used = 0;
    int left = r->world->size - 1 - r->here;
    text[0] = 0;
    for (int i = 1; i < r->world->size && used + 24 < room; i++) {
        if (r->pids[i]) continue;
        left--;
        used += (size_t)snprintf(text + used, room - used, "%s%d",
                                 used ? left ? ", " : " and " : "", i);
    }
    if (left) snprintf(text + used, room - used, " and %d more", left);
}

static void dtrain__meet_clock(dtrain__rendezvous *r)
{
    const uint64_t now = dtrain__now_ns();
    char missing[160];
    for (int i = 0; i < DTRAIN__GUESTS; i++)
        if (r->guests[i].socket >= 0 && now - r->guests[i].opened_ns > DTRAIN__GUEST_NS)
            dtrain__turn_away(r, &r->guests[i], DTRAIN_OK, "did not say in time what it wants");
    if (now < r->deadline_ns && now - r->said_ns < 10000000000u) return;
    r->said_ns = now;
    dtrain__missing_ranks(r, missing, sizeof missing);
    if (now < r->deadline_ns)
        dtrain_log(r->world, DTRAIN_LOG_INFO, "rank 0 waits at %s port %u for rank %s of %d",
                   r->place->address, r->place->port, missing, r->world->size);
    else
        dtrain__meet_fail(
            r, DTRAIN_ERROR_TIMEOUT,
            "rank 0 waited %.1f s at %s port %u, and of %d ranks these have not come: "
            "%s%s%s",
            1e-9 * (double)(now - r->start_ns), r->place->address, r->place->port, r->world->size,
            missing, r->strangers ? "; last turned away: " : "", r->strangers ? r->stranger : "");
}

/* One round: whoever has something to say is heard, nobody is waited for. */
static void dtrain__meet_round(dtrain__rendezvous *r)
{
    struct pollfd polls[1 + DTRAIN__GUESTS + DTRAIN_MAX_RANKS];
    dtrain__connection *ends[1 + DTRAIN__GUESTS + DTRAIN_MAX_RANKS];
    const int seats = 1 + DTRAIN__GUESTS, count = seats + r->world->size;
    bool room = false;
    for (int i = 1; i < count; i++) {
        ends[i] = i < seats ? &r->guests[i - 1] : &r->world->link->ends[i - seats];
        polls[i].fd = ends[i]->socket;
        polls[i].events = POLLIN;
        if (i < seats && polls[i].fd < 0) room = true;
    }
    polls[0].fd = room ? r->listener : -1;
    polls[0].events = POLLIN;
    const int ready = poll(polls, (nfds_t)count, 100);
    for (int i = 1; ready > 0 && i < count; i++) {
        if (!polls[i].revents) continue;
        if (i < seats) {
            dtrain__hear_guest(r, ends[i]);
            continue;
        }
        dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank %d (%s) left before all ranks had come",
                          i - seats, ends[i]->name);
        dtrain__close(ends[i]);
        r->told++;
    }
    if (ready > 0 && polls[0].revents) dtrain__admit(r);
    dtrain__meet_clock(r);
}

/* Ranks that are here learn how it ended, and go when it failed. */
static void dtrain__tell_seats(dtrain__rendezvous *r)
{
    for (int i = 1; i < r->world->size; i++) {
        dtrain__connection *end = &r->world->link->ends[i];
        if (end->socket < 0) continue;
        if (r->result == DTRAIN_OK) {
            dtrain__frame_put(end, DTRAIN__BEGIN, 0, 0, 0, NULL, 0);
            (void)dtrain__flush(end); /* the first bytes in an empty buffer: they fit */
        } else {
            dtrain__refuse(end, r->result, r->why);
            dtrain__close(end);
            r->told++;
        }
    }
}

/* Waits for all ranks; after a failure a little longer, for those who have yet to come and hear of
 * it. */
static void dtrain__meet_all(dtrain__rendezvous *r)
{
    while (r->result == DTRAIN_OK && r->here + 1 < r->world->size) dtrain__meet_round(r);
    dtrain__tell_seats(r);
    const uint64_t now = dtrain__now_ns(), most = now + DTRAIN__TELL_NS;
    const uint64_t end_ns = most < r->deadline_ns ? most : r->deadline_ns;
    while (r->result != DTRAIN_OK && r->told + 1 < r->world->size && dtrain__now_ns() < end_ns)
        dtrain__meet_round(r);
}

static dtrain_result dtrain__host_world(dtrain__rendezvous *r)
{
    const dtrain_allocator *allocator = &r->world->allocator;
    const size_t size = (size_t)r->world->size;
    r->guests = (dtrain__connection *)dtrain__alloc(allocator, DTRAIN__GUESTS, sizeof *r->guests,
                                                    "guests of the rendezvous");
    r->pids = (int32_t *)dtrain__alloc(allocator, size, sizeof *r->pids, "the list of ranks");
    if (!r->guests || !r->pids) {
        dtrain__meet_fail(r, DTRAIN_ERROR_MEMORY, "no memory for the rendezvous");
    } else {
        r->pids[0] = (int32_t)getpid();
        for (int i = 0; i < DTRAIN__GUESTS; i++) r->guests[i].socket = -1;
        if (dtrain__listen(r) == DTRAIN_OK) dtrain__meet_all(r);
        for (int i = 0; i < DTRAIN__GUESTS; i++) dtrain__close(&r->guests[i]);
        if (r->listener >= 0) close(r->listener);
    }
    dtrain__free(allocator, r->pids, size, sizeof *r->pids);
    dtrain__free(allocator, r->guests, DTRAIN__GUESTS, sizeof *r->guests);
    return r->result;
}

/* ---- The other ranks --------------------------------------------------------------------------*/

/* What was wrong with the last try; it may get better until the deadline. */
DTRAIN__PRINTF(2, 3)
static bool dtrain__try_again(dtrain__rendezvous *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->stranger, sizeof r->stranger, format, args);
    va_end(args);
    dtrain__close(&r->world->link->ends[0]);
    return false;
}

/* The next frame from rank 0, at most until `until_ns`: 1; 0 none came; -1 closed or nonsense. */
static int dtrain__await_frame(dtrain__connection *end, uint64_t until_ns, dtrain__frame *frame)
{
    for (;;) {
        const int there = dtrain__frame_get(end, frame);
        const uint64_t now = dtrain__now_ns();
        struct pollfd one;
        if (there) return there;
        if (now >= until_ns) return 0;
        one.fd = end->socket;
        one.events = POLLIN;
        const int ready =
            poll(&one, 1, (int)dtrain__min((int64_t)(until_ns - now) / 1000000 + 1, 1000));
        if (ready > 0 && !dtrain__receive(end)) return -1;
    }
}

static bool dtrain__dial(dtrain__rendezvous *r, const struct addrinfo *at, uint64_t until_ns)
{
    dtrain__connection *end = &r->world->link->ends[0];
    int error = 0;
    socklen_t length = sizeof error;
    struct pollfd one;
    end->in_bytes = end->out_begin = end->out_end = 0;
    dtrain__name_address(at->ai_addr, at->ai_addrlen, end->name, sizeof end->name);
    end->socket = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (end->socket < 0) return dtrain__try_again(r, "no socket: %s", strerror(errno));
    dtrain__socket_tune(end->socket);
    if (connect(end->socket, at->ai_addr, at->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return dtrain__try_again(r, "%s: %s", end->name, strerror(errno));
    one.fd = end->socket;
    one.events = POLLOUT;
    while (poll(&one, 1, 100) <= 0)
        if (dtrain__now_ns() >= until_ns)
            return dtrain__try_again(r, "%s does not answer", end->name);
    if (getsockopt(end->socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    return error ? dtrain__try_again(r, "%s: %s", end->name, strerror(error)) : true;
}

/* The handshake up to JOIN; true when rank 0 has what it needs. */
static bool dtrain__introduce(dtrain__rendezvous *r, uint64_t until_ns, bool *stranger)
{
    dtrain__connection *end = &r->world->link->ends[0];
    const uint64_t mine = dtrain__random();
    dtrain__frame frame;
    dtrain__card card;
    uint64_t proof;
    dtrain__frame_put(end, DTRAIN__HELLO, r->world->rank, 0, DTRAIN__PROTOCOL, &mine, sizeof mine);
    (void)dtrain__flush(end);
    const int there = dtrain__await_frame(end, until_ns, &frame);
    const char *data = end->in + sizeof frame;
    if (there == 1 && frame.kind == DTRAIN__REFUSED)
        return true; /* it is read again by who waits for BEGIN */
    if (there != 1 || frame.kind != DTRAIN__CHALLENGE || frame.bytes != sizeof proof)
        return dtrain__try_again(r, "what listens at %s does not answer as rank 0 does", end->name);
    memcpy(&proof, data, sizeof proof);
    end->nonce[0] = mine;
    end->nonce[1] = frame.number;
    dtrain__frame_drop(end, &frame);
    *stranger = proof != dtrain__prove(r->place, end->nonce, NULL);
    dtrain__card_make(r, end->nonce, &card);
    if (*stranger) dtrain__frame_put(end, DTRAIN__REFUSED, r->world->rank, 0, 0, NULL, 0);
    else dtrain__frame_put(end, DTRAIN__JOIN, r->world->rank, 0, 0, &card, sizeof card);
    (void)dtrain__flush(end);
    if (*stranger)
        return dtrain__try_again(r,
                                 "what listens at %s has another DTRAIN_JOB_KEY than this rank "
                                 "or belongs to another run",
                                 end->name);
    return true;
}

/* Rank 0 has this rank's card: now the others have to come. */
static dtrain_result dtrain__await_begin(dtrain__rendezvous *r)
{
    dtrain__connection *end = &r->world->link->ends[0];
    dtrain__frame frame;
    char text[400];
    const uint64_t slack = 2000000000u; /* rank 0's own deadline has the better sentence */
    const int there = dtrain__await_frame(end, r->deadline_ns + slack, &frame);
    if (there == 1 && frame.kind == DTRAIN__BEGIN) {
        dtrain__frame_drop(end, &frame);
        return DTRAIN_OK;
    }
    if (there == 1 && frame.kind == DTRAIN__REFUSED) {
        dtrain__frame_text(&frame, end->in + sizeof frame, text, sizeof text);
        return dtrain__meet_fail(r, (dtrain_result)frame.value, "%s", text);
    }
    if (there)
        return dtrain__meet_fail(r, DTRAIN_ERROR_PEER, "rank 0 (%s) left before all ranks had come",
                                 end->name);
    return dtrain__meet_fail(r, DTRAIN_ERROR_TIMEOUT,
                             "rank 0 (%s) has been waiting %.1f s for other ranks", end->name,
                             1e-9 * (double)(dtrain__now_ns() - r->start_ns));
}

/* Calls rank 0 at all its addresses until it answers. It may not have started yet; something else
 * may still be at its port: a run that just ends is given five seconds to go. */
static dtrain_result dtrain__join_world(dtrain__rendezvous *r)
{
    char other_run[sizeof r->stranger] = "";
    uint64_t patience_ns = 0;
    bool joined = false;
    while (!joined) {
        bool stranger = false;
        struct addrinfo *found = dtrain__resolve(r);
        for (const struct addrinfo *at = found; at && !joined; at = at->ai_next) {
            const uint64_t most = dtrain__now_ns() + DTRAIN__GUEST_NS;
            const uint64_t until = most < r->deadline_ns ? most : r->deadline_ns;
            joined = dtrain__dial(r, at, until) && dtrain__introduce(r, until, &stranger);
        }
        if (found) freeaddrinfo(found);
        const uint64_t now = dtrain__now_ns();
        if (joined) break;
        if (stranger) memcpy(other_run, r->stranger, sizeof other_run);
        if (stranger && !patience_ns) patience_ns = now + 5000000000u;
        if (stranger && now >= patience_ns)
            return dtrain__meet_fail(r, DTRAIN_ERROR_MISMATCH, "%s", other_run);
        if (!dtrain__meet_nap(r, stranger ? 500 : 50))
            return dtrain__meet_fail(r, patience_ns ? DTRAIN_ERROR_MISMATCH : DTRAIN_ERROR_TIMEOUT,
                                     "rank 0 was not found at %s port %u for %.1f s: %s",
                                     r->place->address, r->place->port,
                                     1e-9 * (double)(now - r->start_ns),
                                     patience_ns ? other_run : r->stranger);
    }
    return dtrain__await_begin(r);
}

static dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place)
{
    dtrain__rendezvous r;
    memset(&r, 0, sizeof r);
    const uint64_t most = (uint64_t)DTRAIN__RENDEZVOUS_MS * 1000000u;
    r.world = world;
    r.place = place;
    r.listener = -1;
    r.start_ns = r.said_ns = dtrain__now_ns();
    r.deadline_ns = r.start_ns + (world->timeout_ns < most ? world->timeout_ns : most);
    if ((world->rank ? dtrain__join_world(&r) : dtrain__host_world(&r)) == DTRAIN_OK)
        return DTRAIN_OK;
    return dtrain_fail(r.result, "rendezvous: %s", r.why);
}

/* ---- [S25.5] One host: one page -----------------------------------------------------------------
 *
 * Ranks that find themselves on one host share memory as forked ranks do. Rank 0 makes a file
 * without a name (memfd) and tells the others where it has mapped it; they open it through
 * /proc/<pid>/fd and map it at the same address, or all try again with another one. It is gone when
 * the last of them has ended, however that was. */

/* The same for ranks that can see each other's processes and memory. */
static uint64_t dtrain__host_id(void)
{
    static const char *const spaces[] = {"/proc/self/ns/net", "/proc/self/ns/pid"};
    const uint64_t none[2] = {0, 0};
    char text[512];
    memset(text, 0, sizeof text);
    if (gethostname(text, 255) != 0) text[0] = 0;
    const int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, text + 256, 64) < 0) text[256] = 0;
    if (file >= 0) close(file);
    for (int i = 0; i < 2; i++)
        if (readlink(spaces[i], text + 320 + 96 * i, 95) < 0) text[320 + 96 * i] = 0;
    return dtrain__siphash(none, text, sizeof text);
}

/* Which ranks are neighbours. What the launcher said about local ranks stands. */
static dtrain_result dtrain__find_hosts(dtrain_world *world, const dtrain__placement *place)
{
    const uint64_t mine = dtrain__host_id();
    uint64_t all[DTRAIN_MAX_RANKS];
    int local_rank = 0, local_size = 0, hosts = 0;
    DTRAIN__TRY(dtrain_world_exchange(world, &mine, sizeof mine, all));
    for (int i = 0; i < world->size; i++) {
        int first = 0;
        while (all[first] != all[i]) first++;
        if (all[i] == mine && first == i) world->node = hosts;
        local_rank += i < world->rank && all[i] == mine;
        local_size += all[i] == mine;
        hosts += first == i;
    }
    world->node_count = hosts;
    if (place->forks) local_rank = world->rank - place->rank;
    else if (place->local_rank >= 0) local_rank = place->local_rank;
    world->local_rank = local_rank;
    world->local_size = place->local_size > 0 ? place->local_size : local_size;
    return DTRAIN_OK;
}

/* Where rank 0 has put the region. */
typedef struct dtrain__offer {
    uint64_t address, bytes, device, inode;
    int32_t pid, file; /* file < 0: rank 0 could not make it */
} dtrain__offer;

typedef struct dtrain__answer {
    int32_t good;
    char why[180];
} dtrain__answer;

/* Far from where programs, libraries and stacks are put, and from the shadows of sanitizers. */
static void *dtrain__region_hint(int attempt)
{
    static const uintptr_t places[] = {0x210000000000u, 0x410000000000u, 0x7a0000000000u};
    return attempt < 3 ? (void *)places[attempt] : NULL;
}

static dtrain_result dtrain__offer_region(dtrain_world *world, size_t reserve_bytes, int attempt,
                                          dtrain__region *region, dtrain__offer *offer)
{
    struct stat status;
    memset(offer, 0, sizeof *offer);
    offer->file = (int)syscall(SYS_memfd_create, "dtrain", 1u /* MFD_CLOEXEC; libc may hide it */);
    if (offer->file < 0)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "memfd_create: %s", strerror(errno));
    const dtrain_result result = dtrain__map_region(
        reserve_bytes, (uint32_t)world->size, dtrain__region_hint(attempt), offer->file, region);
    if (result != DTRAIN_OK || fstat(offer->file, &status) != 0) {
        close(offer->file);
        offer->file = -1;
        return result != DTRAIN_OK ? result
                                   : dtrain_fail(DTRAIN_ERROR_SYSTEM, "fstat: %s", strerror(errno));
    }
    offer->address = (uint64_t)(uintptr_t)region->control;
    offer->bytes = region->bytes;
    offer->device = (uint64_t)status.st_dev;
    offer->inode = (uint64_t)status.st_ino;
    offer->pid = (int32_t)getpid();
    return DTRAIN_OK;
}

/* The file must be the one that was meant: the process may have gone, its number be another's. */
static dtrain_result dtrain__accept_region(const dtrain__offer *offer, dtrain__region *region)
{
    char path[64];
    struct stat status;
    void *const wanted = (void *)(uintptr_t)offer->address;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", offer->pid, offer->file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s: %s", path, strerror(errno));
    if (fstat(file, &status) != 0 || (uint64_t)status.st_dev != offer->device ||
        (uint64_t)status.st_ino != offer->inode || (uint64_t)status.st_size != offer->bytes) {
        close(file);
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s is not the file that rank 0 has made", path);
    }
    void *memory = mmap(wanted, (size_t)offer->bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, file, 0);
    const int error = errno;
    close(file);
    if (memory != MAP_FAILED && memory != wanted) munmap(memory, (size_t)offer->bytes);
    if (memory != wanted)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "%llu bytes at %p are not free here: %s",
                           (unsigned long long)offer->bytes, wanted,
                           memory == MAP_FAILED ? strerror(error) : "other memory is there");
    dtrain__no_dump(memory, (size_t)offer->bytes);
    region->control = (dtrain__control *)memory;
    region->bytes = (size_t)offer->bytes;
    return DTRAIN_OK;
}

/* One attempt of all ranks; *good says whether everybody has the region, which then is open to all.
 * An error is the failure of the exchange itself. */
static dtrain_result dtrain__try_region(dtrain_world *world, size_t reserve_bytes, int attempt,
                                        dtrain__region *region, bool *good)
{
    dtrain__offer offer, offers[DTRAIN_MAX_RANKS];
    dtrain__answer mine, answers[DTRAIN_MAX_RANKS];
    dtrain_result result = DTRAIN_OK;
    memset(&offer, 0, sizeof offer);
    memset(&mine, 0, sizeof mine);
    memset(region, 0, sizeof *region);
    offer.file = -1;
    if (world->rank == 0)
        result = dtrain__offer_region(world, reserve_bytes, attempt, region, &offer);
    dtrain_result told = dtrain_world_exchange(world, &offer, sizeof offer, offers);
    if (told == DTRAIN_OK) {
        if (world->rank && offers[0].file >= 0) result = dtrain__accept_region(&offers[0], region);
        mine.good = result == DTRAIN_OK && offers[0].file >= 0;
        if (result != DTRAIN_OK)
            snprintf(mine.why, sizeof mine.why, "%.179s", dtrain__bare(dtrain__error_text));
        told = dtrain_world_exchange(world, &mine, sizeof mine, answers);
    }
    if (offer.file >= 0) close(offer.file);
    *good = told == DTRAIN_OK;
    for (int i = world->size - 1; i >= 0 && told == DTRAIN_OK; i--) {
        if (answers[i].good) continue;
        *good = false;
        answers[i].why[sizeof answers[i].why - 1] = 0;
        if (answers[i].why[0])
            snprintf(world->no_region, sizeof world->no_region, "rank %d: %s", i, answers[i].why);
    }
    if (!*good && region->control) munmap(region->control, region->bytes);
    return told;
}

/* From here on the page is everybody's. Without a region the ranks go on as on several hosts. */
static dtrain_result dtrain__share_region(dtrain_world *world, size_t reserve_bytes)
{
    bool good = false;
    for (int attempt = 0; attempt < 6 && !good; attempt++) {
        dtrain__region region;
        DTRAIN__TRY(dtrain__try_region(world, reserve_bytes, attempt, &region, &good));
        if (!good) continue;
        munmap(world->page.control, world->page.bytes);
        world->page = region;
        world->control = region.control;
        world->exchange_count = 0;
        world->link->shared = true;
    }
    return DTRAIN_OK;
}

/* All that a launched rank does before it is a rank like any other. */
static dtrain_result dtrain__world_join(dtrain_world *world, const dtrain__placement *place,
                                        size_t reserve_bytes)
{
    DTRAIN__TRY(dtrain__map_page(&world->page));
    world->control = world->page.control;
    DTRAIN__TRY(dtrain__link_create(world));
    DTRAIN__TRY(dtrain__meet(world, place));
    world->link->met = true;
    DTRAIN__TRY(dtrain__find_hosts(world, place));
    return world->node_count == 1 ? dtrain__share_region(world, reserve_bytes) : DTRAIN_OK;
}

/* The end of a launched rank: the others learn how it was. Rank 0 stays until all have ended, as
 * the parent of forked ranks does, or until the grace period after a failure is over: through it
 * the others hear of each other. */
static void dtrain__world_leave(dtrain_world *world, uint32_t grace_ms)
{
    uint64_t end_ns = 0, now;
    bool all = false;
    dtrain__link_news(world);
    while (!all) {
        dtrain__link_pump(world, 20);
        now = dtrain__now_ns();
        if (!end_ns && (world->rank || dtrain__trouble(world) != DTRAIN_OK))
            end_ns = now + (uint64_t)grace_ms * 1000000u;
        all = dtrain__link_all_told(world);
        for (int i = 0; i < world->size && world->rank == 0; i++)
            all = all && dtrain__load(&world->control->fates[i].how) != DTRAIN__RUNNING;
        if (end_ns && now >= end_ns) break;
    }
}

/* ---- [S25.6] A rank ---------------------------------------------------------------------------*/

typedef struct dtrain__launch {
    dtrain_launch_desc desc; /* resolved */
    dtrain_rank_fn rank_main;
    void *user;
    dtrain__placement place; /* rank: the first one here; size: the world's */
    bool joins;              /* a world that another launcher has started ... */
    bool here;               /* ... of which this process is one rank */
    dtrain_result joined;    /* here: how that went */
    dtrain__region region;
    dtrain__control *control; /* the region's */
    uint32_t cores;
    uint64_t start_ns, kill_ns;   /* kill_ns: the end of the grace period, 0 = no failure yet */
    pid_t launcher;               /* that forks; 0 when nobody does */
    pid_t pids[DTRAIN_MAX_RANKS]; /* 0: not started, or reaped */
    int live;                     /* processes to reap */
    int forwarded, stop_count;    /* last signal passed on; how often we were asked to stop */
    bool foreign_child;           /* a SIGCHLD that was not about a rank */
    sigset_t watched, old_mask;
    uint32_t gate; /* atomic, threads mode: 0 wait, 1 go, 2 go home */
} dtrain__launch;

static uint32_t dtrain__cores(void)
{
#ifdef CPU_COUNT /* hidden when a system header came before _GNU_SOURCE was defined */
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
#endif
    const long count = sysconf(_SC_NPROCESSORS_ONLN); /* more cores than cpu_set_t can hold */
    return count > 0 ? (uint32_t)count : 1;
}

static void dtrain__world_destroy(dtrain_world *world)
{
    if (!world) return;
    const dtrain_allocator allocator = world->allocator;
    dtrain__world_comm_end(world);
    dtrain_device_destroy(world->device);
    dtrain__link_destroy(world);
    if (world->page.control) munmap(world->page.control, world->page.bytes);
    if (world->mine) munmap(world->mine, dtrain__page_bytes());
    dtrain__free(&allocator, world->ranges, world->range_room, sizeof *world->ranges);
    dtrain__free(&allocator, world, 1, sizeof *world);
}

static dtrain_result dtrain__world_mark(dtrain_world *world)
{
    void *page = mmap(NULL, dtrain__page_bytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "a page of memory could not be mapped: %s",
                           strerror(errno));
    world->mine = (uint32_t *)page;
    *world->mine = 1;
#ifdef MADV_WIPEONFORK
    madvise(page, dtrain__page_bytes(),
            MADV_WIPEONFORK); /* an old kernel: the check is then idle */
#endif
    return DTRAIN_OK;
}

static dtrain_result dtrain__world_parts(dtrain_world *world, const dtrain__launch *launch)
{
    const dtrain_launch_desc *desc = &launch->desc;
    dtrain_device_desc device;
    DTRAIN__TRY(dtrain__world_mark(world));
    if (launch->joins) DTRAIN__TRY(dtrain__world_join(world, &launch->place, desc->reserve_bytes));
    if (!world->threads) world->threads = launch->cores / (uint32_t)world->local_size;
    if (!world->threads) world->threads = 1;
    world->oversubscribed = (uint64_t)world->local_size * world->threads > launch->cores;
    memset(&device, 0, sizeof device);
    device.thread_count = world->threads;
    device.device_index = (uint32_t)world->local_rank;
    device.oversubscribed = world->oversubscribed;
    device.math = world->math;
    device.tune = world->tune;
    device.memory_limit = desc->memory_limit;
    device.allocator = world->allocator;
    DTRAIN__TRY(dtrain_device_create(desc->device_ops, &device, &world->device));
    DTRAIN__TRY(dtrain__world_comm_create(world));
    if (desc->mode == DTRAIN_LAUNCH_PROCESSES) dtrain_process_memory(&world->base_bytes, NULL);
    return DTRAIN_OK;
}

/* *out may be half a world when it fails: what it has goes with dtrain__world_destroy. */
static dtrain_result dtrain__world_create(const dtrain__launch *launch, int rank,
                                          dtrain_world **out)
{
    const dtrain_launch_desc *desc = &launch->desc;
    dtrain_world *world =
        (dtrain_world *)dtrain__alloc(&desc->allocator, 1, sizeof *world, "a world");
    *out = world;
    if (!world) return DTRAIN_ERROR_MEMORY;
    world->rank = rank;
    world->size = launch->place.size;
    world->local_rank = rank;
    world->local_size = world->size;
    world->node_count = 1;
    world->comm_ops = desc->comm_ops;
    world->math = desc->math;
    world->tune = desc->tune;
    world->threads = desc->threads_per_rank;
    world->launcher = launch->launcher;
    world->timeout_ns = (uint64_t)desc->timeout_ms * 1000000u;
    world->control = launch->control;
    world->allocator = desc->allocator;
    world->log.write = desc->log;
    world->log.user = desc->log_user;
    world->log.level = (dtrain_log_level)desc->log_level;
    world->log.rank = rank;
    return dtrain__world_parts(world, launch);
}

/* Where the others see how this rank ended: in the world's page; and, when it has joined a world of
 * another launcher, dtrain_launch sees it in the launch's own. What rank 0 knows of the others, and
 * a failed rank of why, goes along. */
static void dtrain__rank_end(dtrain__launch *launch, dtrain_world *world, int rank, dtrain__end how,
                             int code)
{
    char error[sizeof dtrain__error_text];
    snprintf(error, sizeof error, "%s", code ? dtrain__error_text : "");
    const bool met = launch->joins && world && world->link && world->link->met;
    if (!met || !launch->here) dtrain__record_end(launch->control, rank, how, code, error);
    if (!met) return;
    dtrain__record_end(world->control, rank, how, code, error);
    dtrain__world_leave(world, launch->desc.grace_ms);
    if (!launch->here || (rank && !code)) return;
    memcpy(launch->control->fates, world->control->fates, sizeof world->control->fates);
    launch->control->first_failed = dtrain__load(&world->control->first_failed);
}

/* All of a rank's life, in a process or a thread of its own. */
static int dtrain__rank_run(dtrain__launch *launch, int index)
{
    const int rank = launch->place.rank + index;
    int code = 1;
    dtrain__end how = DTRAIN__UNSTARTED;
    dtrain_world *world = NULL;
    dtrain__thread_rank = rank;
    dtrain__error_text[0] = 0;
    const dtrain_result created = dtrain__world_create(launch, rank, &world);
    if (created == DTRAIN_OK) {
        code = launch->rank_main(world, launch->user);
        how = code ? DTRAIN__RETURNED : DTRAIN__LEFT;
    }
    if (launch->here) launch->joined = created;
    dtrain__rank_end(launch, world, rank, how, code);
    dtrain__world_destroy(world);
    dtrain__thread_rank = -1;
    return code;
}

/* An exit status has eight bits; 256 must not look like success. */
static int dtrain__exit_code(int value) { return value == 0 || (value & 255) ? value & 255 : 1; }

/* ---- Ranks as processes -----------------------------------------------------------------------*/

static const int dtrain__forwarded_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
#define DTRAIN__FORWARDED (sizeof dtrain__forwarded_signals / sizeof dtrain__forwarded_signals[0])

static void dtrain__signal_ranks(dtrain__launch *launch, int number)
{
    for (uint32_t i = 0; i < launch->desc.rank_count; i++)
        if (launch->pids[i] > 0) kill(launch->pids[i], number);
}

/* What waitpid said about one rank. A rank that returned has left its own, better record. */
static void dtrain__reaped(dtrain__launch *launch, int index, int status)
{
    const int rank = launch->place.rank + index;
    const uint32_t known = dtrain__load(&launch->control->fates[rank].how);
    launch->pids[index] = 0;
    launch->live--;
    if (WIFSIGNALED(status)) {
        const bool ours = WTERMSIG(status) == SIGKILL && launch->kill_ns == 1;
        if (known == DTRAIN__RETURNED || known == DTRAIN__UNSTARTED) return;
        dtrain__record_end(launch->control, rank, ours ? DTRAIN__STOPPED : DTRAIN__SIGNALED,
                           WTERMSIG(status), "");
    } else if (known == DTRAIN__RUNNING) { /* exit() inside of rank_main */
        const int code = WEXITSTATUS(status);
        dtrain__record_end(launch->control, rank, code ? DTRAIN__RETURNED : DTRAIN__LEFT, code, "");
    }
}

static void dtrain__reap(dtrain__launch *launch)
{
    for (uint32_t i = 0; i < launch->desc.rank_count; i++) {
        int status = 0;
        if (launch->pids[i] <= 0) continue;
        const pid_t pid = waitpid(launch->pids[i], &status, WNOHANG);
        if (pid == launch->pids[i]) dtrain__reaped(launch, (int)i, status);
        else if (pid < 0 && errno == ECHILD) /* another thread of the host has reaped it */
            dtrain__reaped(launch, (int)i, 0);
    }
}

/* Typed at a terminal, a signal has reached the whole process group: ranks must not get it twice.
 * The second request to stop is obeyed without asking the ranks. */
static void dtrain__forward(dtrain__launch *launch, int number, bool from_terminal)
{
    const bool stop = number != SIGUSR1 && number != SIGUSR2;
    if (!from_terminal) dtrain__signal_ranks(launch, number);
    if (!stop) return;
    launch->forwarded = number;
    if (++launch->stop_count < 2) return;
    launch->kill_ns = 1;
    dtrain__signal_ranks(launch, SIGKILL);
}

/* SIGCHLD wakes us; the nap only matters when another thread of the host swallowed it. */
static void dtrain__watch(dtrain__launch *launch)
{
    struct timespec nap;
    nap.tv_sec = 0;
    nap.tv_nsec = 50000000;
    while (launch->live > 0) {
        siginfo_t what;
        const int number = sigtimedwait(&launch->watched, &what, &nap);
        dtrain__reap(launch);
        if (number > 0 && number != SIGCHLD)
            dtrain__forward(launch, number, what.si_code > 0 && number != SIGHUP);
        const uint64_t now = dtrain__now_ns();
        if (!launch->kill_ns && dtrain__load(&launch->control->first_failed))
            launch->kill_ns = now + (uint64_t)launch->desc.grace_ms * 1000000u;
        if (launch->kill_ns && now >= launch->kill_ns) {
            launch->kill_ns = 1; /* stays in the past, and says that the grace is over */
            dtrain__signal_ranks(launch, SIGKILL);
        }
    }
}

/* Never returns. The launcher's death must not leave ranks behind; it may have died already before
 * prctl, which the second look sees. */
static void dtrain__child(dtrain__launch *launch, int index)
{
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != launch->launcher) _exit(1);
    pthread_sigmask(SIG_SETMASK, &launch->old_mask, NULL);
    const int code = dtrain__rank_run(launch, index);
    fflush(NULL);
    _exit(dtrain__exit_code(code));
}

static dtrain_result dtrain__fork_failed(dtrain__launch *launch, int index, int error)
{
    struct rlimit limit;
    launch->kill_ns = 1;
    dtrain__signal_ranks(launch, SIGKILL);
    dtrain__watch(launch);
    if (getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) limit.rlim_cur = 0;
    return dtrain_fail(
        DTRAIN_ERROR_SYSTEM,
        "dtrain_launch: rank %d of %u could not be forked: %s (process limit, ulimit "
        "-u: %llu, 0 = none; also look at memory and the container's pids limit)",
        launch->place.rank + index, (uint32_t)launch->place.size, strerror(error),
        (unsigned long long)limit.rlim_cur);
}

static dtrain_result dtrain__fork_all(dtrain__launch *launch)
{
    for (int i = 0; i < (int)launch->desc.rank_count; i++) {
        const pid_t pid = fork();
        if (pid == 0) dtrain__child(launch, i);
        if (pid < 0) return dtrain__fork_failed(launch, i, errno);
        launch->pids[i] = pid;
        launch->live++;
    }
    dtrain__watch(launch);
    return DTRAIN_OK;
}

/* A host that ignores SIGCHLD has no exit statuses to wait for: the default disposition is put in
 * place while ranks run. Our last SIGCHLD is taken off the queue, or a handler of the host's would
 * wait for a child that is gone; one that was about another child is raised again. */
static dtrain_result dtrain__launch_processes(dtrain__launch *launch)
{
    struct sigaction found, plain;
    sigset_t only_child;
    struct timespec no_time;
    siginfo_t what;
    memset(&plain, 0, sizeof plain);
    memset(&no_time, 0, sizeof no_time);
    plain.sa_handler = SIG_DFL;
    sigemptyset(&only_child);
    sigaddset(&only_child, SIGCHLD);
    launch->watched = only_child;
    for (size_t i = 0; i < DTRAIN__FORWARDED; i++)
        sigaddset(&launch->watched, dtrain__forwarded_signals[i]);
    sigaction(SIGCHLD, NULL, &found);
    const bool deaf = found.sa_handler == SIG_IGN || (found.sa_flags & SA_NOCLDWAIT);
    pthread_sigmask(SIG_BLOCK, &launch->watched, &launch->old_mask);
    const bool was_pending = sigtimedwait(&only_child, &what, &no_time) == SIGCHLD;
    if (deaf) sigaction(SIGCHLD, &plain, NULL);

    fflush(NULL); /* or each rank would write what is in the buffers now once more */
    const dtrain_result result = dtrain__fork_all(launch);

    while (sigtimedwait(&only_child, &what, &no_time) == SIGCHLD) continue;
    if (deaf) sigaction(SIGCHLD, &found, NULL);
    if (was_pending) kill(getpid(), SIGCHLD);
    pthread_sigmask(SIG_SETMASK, &launch->old_mask, NULL);
    return result;
}

/* ---- Ranks as threads -------------------------------------------------------------------------*/

typedef struct dtrain__rank_thread {
    dtrain__launch *launch;
    int rank;
    pthread_t thread;
} dtrain__rank_thread;

static void *dtrain__thread_main(void *argument)
{
    dtrain__rank_thread *self = (dtrain__rank_thread *)argument;
    uint32_t gate;
    while ((gate = dtrain__load(&self->launch->gate)) == 0) sched_yield();
    if (gate == 1) dtrain__rank_run(self->launch, self->rank);
    return NULL;
}

/* No rank runs before all threads are there: a thread cannot be killed when a later one is
 * refused. */
static dtrain_result dtrain__launch_threads(dtrain__launch *launch)
{
    dtrain__rank_thread threads[DTRAIN_MAX_RANKS];
    const int count = (int)launch->desc.rank_count;
    int started = 0, error = 0;
    for (; started < count && !error; started += !error) {
        threads[started].launch = launch;
        threads[started].rank = started;
        error =
            pthread_create(&threads[started].thread, NULL, dtrain__thread_main, &threads[started]);
    }
    dtrain__store(&launch->gate, error ? 2u : 1u);
    for (int i = 0; i < started; i++) pthread_join(threads[i].thread, NULL);
    if (!error) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                       "dtrain_launch: thread of rank %d of %d could not be made: %s", started,
                       count, strerror(error));
}

/* ---- dtrain_launch ----------------------------------------------------------------------------*/

/* Who starts the ranks: this call, another launcher, or this call on its node. */
static dtrain_result dtrain__settle(dtrain__launch *launch)
{
    const dtrain__environment env = {dtrain__getenv, NULL};
    dtrain_launch_desc *desc = &launch->desc;
    dtrain__placement *place = &launch->place;
    DTRAIN__TRY(dtrain__recognise(&env, place));
    if (!place->family) {
        if (!desc->rank_count) desc->rank_count = desc->default_rank_count;
        if (!desc->rank_count) desc->rank_count = 1;
        place->size = (int)desc->rank_count;
        return DTRAIN_OK;
    }
    if (desc->rank_count && (int)desc->rank_count != place->size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: rank_count is %u, and the environment (%s) announces "
                           "%d ranks; set rank_count to 0 or to the launcher's number",
                           desc->rank_count, place->family, place->size);
    launch->joins = place->forks != place->size;
    launch->here = launch->joins && !place->forks;
    if (launch->joins && desc->mode == DTRAIN_LAUNCH_THREADS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: mode is DTRAIN_LAUNCH_THREADS, and the environment (%s) "
                           "announces %d ranks in processes; use DTRAIN_LAUNCH_PROCESSES",
                           place->family, place->size);
    desc->rank_count = place->forks ? (uint32_t)place->forks : 1;
    return DTRAIN_OK;
}

static dtrain_result dtrain__resolve_launch(dtrain__launch *launch, const dtrain_launch_desc *given)
{
    dtrain_launch_desc *desc = &launch->desc;
    if (given) *desc = *given;
    if (desc->rank_count > DTRAIN_MAX_RANKS || desc->default_rank_count > DTRAIN_MAX_RANKS)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "dtrain_launch: rank_count is %u, at most %d are possible",
            desc->rank_count ? desc->rank_count : desc->default_rank_count, DTRAIN_MAX_RANKS);
    if (desc->mode > DTRAIN_LAUNCH_THREADS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: mode is %u, expected 0 (processes) or "
                           "1 (threads)",
                           desc->mode);
    if (desc->log_level > DTRAIN_LOG_DEBUG || desc->threads_per_rank > 4096)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: log_level is %u (0 to 4 expected), "
                           "threads_per_rank %u (0 to 4096 expected)",
                           desc->log_level, desc->threads_per_rank);
    DTRAIN__TRY(dtrain__settle(launch));
    launch->cores = dtrain__cores();
    if (!desc->timeout_ms) desc->timeout_ms = 600000;
    if (!desc->grace_ms) desc->grace_ms = 5000;
    desc->allocator = dtrain__resolve_allocator(&desc->allocator);
    launch->launcher = desc->mode == DTRAIN_LAUNCH_PROCESSES && !launch->here ? getpid() : 0;
    return DTRAIN_OK;
}

/* Turns the fates of all ranks into one result, one sentence and the info. */
static dtrain_result dtrain__conclude(dtrain__launch *launch, dtrain_launch_info *info)
{
    dtrain__control *control = launch->control;
    const int first = (int)dtrain__load(&control->first_failed) - 1;
    int others = 0;
    char how[200], stopped[128] = "", too[64] = "";
    info->signal = launch->forwarded;
    if (first < 0) return DTRAIN_OK;
    const dtrain__fate *fate = &control->fates[first];
    const bool killed = fate->how == DTRAIN__SIGNALED || fate->how == DTRAIN__STOPPED;
    const dtrain__fate *own = &control->fates[launch->here ? launch->place.rank : first];
    for (int i = 0; i < launch->place.size; i++)
        others += i != first && control->fates[i].how > DTRAIN__LEFT;
    info->first_failed_rank = first;
    if (killed) info->signal = fate->value;
    info->exit_code = killed ? 128 + fate->value : dtrain__exit_code(fate->value);
    if (fate->how == DTRAIN__LOST) info->exit_code = 1;
    if (own->how == DTRAIN__RETURNED) info->exit_code = dtrain__exit_code(own->value);
    dtrain__describe_end(control, first, how, sizeof how);
    if (launch->forwarded)
        snprintf(stopped, sizeof stopped, "; the run was stopped by signal %d (%s)",
                 launch->forwarded, dtrain__signal_name(launch->forwarded));
    if (others)
        snprintf(too, sizeof too, "; %d other%s failed after it", others, others > 1 ? "s" : "");
    return dtrain_fail(DTRAIN_ERROR_RANK_FAILED, "%s, %.1f s after the start%s%s%s%s", how,
                       info->seconds, stopped, too, fate->error[0] ? "; its last error: " : "",
                       fate->error);
}

static dtrain_result dtrain__launch_all(dtrain__launch *launch, dtrain_launch_info *info)
{
    dtrain_result result = DTRAIN_OK;
    DTRAIN__TRY(launch->joins
                    ? dtrain__map_page(&launch->region)
                    : dtrain__map_region(launch->desc.reserve_bytes, launch->desc.rank_count, NULL,
                                         -1, &launch->region));
    launch->control = launch->region.control;
    info->rank_count = (uint32_t)launch->place.size;
    if (launch->here) (void)dtrain__rank_run(launch, 0);
    else if (launch->launcher) result = dtrain__launch_processes(launch);
    else result = dtrain__launch_threads(launch);
    info->seconds = 1e-9 * (double)(dtrain__now_ns() - launch->start_ns);
    if (result == DTRAIN_OK) {
        info->exit_code = 0;
        result = dtrain__conclude(launch, info);
    }
    if (launch->joined != DTRAIN_OK) /* this rank never ran: its own sentence says it best */
        result =
            dtrain_fail(launch->joined, "%s", launch->control->fates[launch->place.rank].error);
    munmap(launch->region.control, launch->region.bytes);
    return result;
}

/* torchrun reports what stands in this file as the root cause. */
static void dtrain__write_error_file(const char *text)
{
    const char *path = getenv("TORCHELASTIC_ERROR_FILE");
    FILE *file = path && path[0] ? fopen(path, "we") : NULL;
    if (!file) return;
    fprintf(file, "{\"message\": {\"message\": \"");
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') fprintf(file, "\\%c", c);
        else if (c < 32 || c > 126) fprintf(file, "\\u%04x", c);
        else fputc(c, file);
    }
    fprintf(file, "\", \"extraInfo\": {\"timestamp\": \"%lld\"}}}\n", (long long)time(NULL));
    fclose(file);
}

DTRAIN_API dtrain_result dtrain_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                       void *user, dtrain_launch_info *info)
{
    dtrain__launch launch;
    dtrain_launch_info ignored;
    if (!info) info = &ignored;
    memset(&launch, 0, sizeof launch);
    memset(info, 0, sizeof *info);
    info->first_failed_rank = -1;
    info->exit_code = 1;
    if (!rank_main) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch: rank_main is NULL");
    if (dtrain__thread_rank >= 0)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_launch: called by a rank; launch once, from main");
    launch.rank_main = rank_main;
    launch.user = user;
    launch.start_ns = dtrain__now_ns();
    dtrain_result result = dtrain__resolve_launch(&launch, desc);
    if (result == DTRAIN_OK) result = dtrain__launch_all(&launch, info);
    if (result != DTRAIN_OK) dtrain__write_error_file(dtrain__error_text);
    return result;
}

/* ================================================================================================
 * [S26] Communicators
 *
 * Above: the public calls check their arguments, keep the books and hand a dtrain_collective to the
 * backend. Below: the `local` backend for ranks of one machine, [S26.4] the one that brings device
 * memory to it, [S26.5] the choice between backends.
 *
 * Each rank owns one "part" of a communicator in shared memory and is the only one to write it:
 *
 *     part of rank r   | failure | stage, channels | slot 0 | slot 1 | ... | slot Q-1 |
 *     slot s % Q       | progress = (s, stage) | fingerprint, pointers of operation s | payload |
 *
 * An operation is a ladder of stages. "To reach" a stage is to store it in one's slot (release); to
 * go on, a rank looks until all ranks have reached it (acquire). Stage 1 says what is being called;
 * when all are there and agree, one of three paths is taken, the same on every rank:
 *
 *     small    the data came along in the slots: every rank computes its own result, done
 *     direct   all buffers are in shared memory: rank r computes slice r of everybody's result and
 *              reaches stage 2; when all have, done. No copy, no temporary
 *     staged   otherwise: chunk c goes into half c % 2 of one's stage, stage c + 2 is reached; when
 *              all have, every rank computes its own result from the stages
 *
 * All three add in rank order in fp32 and round once, so the bits do not tell which one ran.
 * ==============================================================================================*/

typedef struct dtrain__kind {
    const char *call, *name;
    bool reduces, rooted;
} dtrain__kind;

static const dtrain__kind dtrain__kinds[] = {
    {"?", "?", false, false},
    {"dtrain_all_reduce", "all-reduce", true, false},
    {"dtrain_reduce_scatter", "reduce-scatter", true, false},
    {"dtrain_all_gather", "all-gather", false, false},
    {"dtrain_broadcast", "broadcast", false, true},
    {"dtrain_reduce", "reduce", true, true},
    {"dtrain_barrier", "barrier", false, false},
    {"dtrain_send", "send", false, true},
    {"dtrain_recv", "recv", false, true},
    {"dtrain_comm_split", "split", false, false},
};

/* "all-reduce sum f32 count 100", for messages. */
static void dtrain__describe(const dtrain_collective *what, char *text, size_t room)
{
    static const char *const ops[] = {"", " sum", " mean", " min", " max", " prod"};
    char root[32] = "";
    const dtrain__kind *kind = &dtrain__kinds[what->kind <= DTRAIN_SPLIT ? what->kind : 0];
    if (kind->rooted)
        snprintf(root, sizeof root, " %s %d", what->kind < DTRAIN_SEND ? "root" : "peer",
                 what->root);
    if (what->kind == DTRAIN_BARRIER || what->kind == DTRAIN_SPLIT)
        snprintf(text, room, "%s", kind->name);
    else
        snprintf(text, room, "%s%s %s count %zu%s", kind->name,
                 ops[what->op <= DTRAIN_PROD ? what->op : 0], dtrain_dtype_name(what->dtype),
                 what->count, root);
}

/* Elements of the send and the receive buffer: one of them is `size` times larger in the two calls
 * that cut or join slices. */
static size_t dtrain__send_count(const dtrain_collective *what, int size)
{
    return what->kind == DTRAIN_REDUCE_SCATTER ? what->count * (size_t)size : what->count;
}
static size_t dtrain__recv_count(const dtrain_collective *what, int size)
{
    const bool joins = what->kind == DTRAIN_ALL_GATHER || what->kind == DTRAIN_SPLIT;
    return joins ? what->count * (size_t)size : what->count;
}

/* ---- Checks -----------------------------------------------------------------------------------*/

/* In place is allowed; a shifted overlap would overwrite what is still to be read. */
static dtrain_result dtrain__check_overlap(const dtrain_comm *comm, const dtrain_collective *what,
                                           size_t unit)
{
    const uintptr_t send = (uintptr_t)what->send, recv = (uintptr_t)what->recv;
    const size_t send_bytes = dtrain__send_count(what, comm->size) * unit;
    const size_t recv_bytes = dtrain__recv_count(what, comm->size) * unit;
    const size_t slice = (size_t)comm->rank * what->count * unit;
    bool in_place = send == recv;
    if (what->kind == DTRAIN_ALL_GATHER) in_place = send == recv + slice;
    if (what->kind == DTRAIN_REDUCE_SCATTER) in_place = recv == send + slice;
    if (in_place || send >= recv + recv_bytes || recv >= send + send_bytes) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: send and recv overlap; use one buffer in place or two separate ones",
                       dtrain__kinds[what->kind].call);
}

static dtrain_result dtrain__check_buffers(const dtrain_comm *comm, const dtrain_collective *what)
{
    const char *call = dtrain__kinds[what->kind].call;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool reads = what->kind != DTRAIN_RECV;
    const bool writes =
        what->kind != DTRAIN_SEND && (what->kind != DTRAIN_REDUCE || what->root == comm->rank);
    size_t bytes;
    if (!dtrain__size_mul(what->count, unit * (size_t)comm->size, &bytes) || bytes > SIZE_MAX / 2)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: count %zu times %d ranks is more than memory can hold", call,
                           what->count, comm->size);
    if (what->count && reads && !what->send)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the buffer to send is NULL and count is %zu",
                           call, what->count);
    if (what->count && writes && !what->recv)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the buffer to receive is NULL and count is %zu", call, what->count);
    return reads && writes && what->count ? dtrain__check_overlap(comm, what, unit) : DTRAIN_OK;
}

static dtrain_result dtrain__check_collective(const dtrain_comm *comm,
                                              const dtrain_collective *what)
{
    const dtrain__kind *kind = &dtrain__kinds[what->kind];
    if (what->kind == DTRAIN_BARRIER) return DTRAIN_OK;
    if (!dtrain_dtype_bytes(what->dtype))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %d is not a dtrain_dtype", kind->call,
                           (int)what->dtype);
    if (kind->reduces && (what->op < DTRAIN_SUM || what->op > DTRAIN_PROD))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_reduce_op", kind->call,
                           what->op);
    if (what->op == DTRAIN_MEAN && (what->dtype == DTRAIN_I32 || what->dtype == DTRAIN_I64))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: DTRAIN_MEAN of %s would have to round; sum and divide", kind->call,
                           dtrain_dtype_name(what->dtype));
    if (kind->rooted && (what->root < 0 || what->root >= comm->size))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: rank %d does not exist, expected 0 to %d",
                           kind->call, what->root, comm->size - 1);
    if (what->kind >= DTRAIN_SEND && what->root == comm->rank)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: peer %d is this rank itself", kind->call,
                           what->root);
    return dtrain__check_buffers(comm, what);
}

/* ---- [S26.1] Books --------------------------------------------------------------------------*/

/* This rank's share of the traffic as rings would make it, the usual figure for comparing
 * systems. */
static uint64_t dtrain__wire_bytes(const dtrain_collective *what, int size)
{
    const uint64_t bytes = (uint64_t)what->count * dtrain_dtype_bytes(what->dtype);
    const uint64_t n = (uint64_t)size;
    switch (what->kind) {
    case DTRAIN_ALL_REDUCE: return 2 * (bytes / n * (n - 1) + bytes % n * (n - 1) / n);
    case DTRAIN_BROADCAST:
    case DTRAIN_REDUCE: return bytes / n * (n - 1) + bytes % n * (n - 1) / n;
    case DTRAIN_REDUCE_SCATTER:
    case DTRAIN_ALL_GATHER: return bytes * (n - 1);
    case DTRAIN_SEND: return bytes;
    default: return 0;
    }
}

static void dtrain__count_operation(dtrain_comm *comm, const dtrain_collective *what, uint64_t now)
{
    const size_t elements =
        what->kind == DTRAIN_RECV ? what->count : dtrain__send_count(what, comm->size);
    comm->info.operation_count++;
    comm->info.payload_bytes += (uint64_t)elements * dtrain_dtype_bytes(what->dtype);
    comm->info.wire_bytes += dtrain__wire_bytes(what, comm->size);
    if (!comm->flight_since) comm->flight_since = now;
}

/* `now` is the end of the time in flight, if nothing is in flight any more. */
static void dtrain__comm_landed(dtrain_comm *comm, uint64_t now)
{
    if (comm->in_flight || !comm->flight_since) return;
    comm->flight_ns += now - comm->flight_since;
    comm->flight_since = 0;
}

/* Every public call that may work or wait ends here: two looks at the clock per call. */
static void dtrain__comm_leave(dtrain_comm *comm, uint64_t entered)
{
    const uint64_t now = dtrain__now_ns();
    comm->inside_ns += now - entered;
    dtrain__comm_landed(comm, now);
}

DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!comm) return;
    uint64_t flight = comm->flight_ns;
    if (comm->flight_since) flight += dtrain__now_ns() - comm->flight_since;
    *info = comm->info;
    info->backend = comm->ops->name;
    info->inside_seconds = 1e-9 * (double)comm->inside_ns;
    info->flight_seconds = 1e-9 * (double)flight;
}

/* ---- Public calls -----------------------------------------------------------------------------*/

static dtrain_result dtrain__comm_usable(const dtrain_comm *comm, const char *call)
{
    if (!comm) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the communicator is NULL", call);
    return dtrain__world_check(comm->world, call);
}

/* A rank that made a mistake in its arguments has missed an operation the others count on. Were it
 * allowed to go on, its next call could be taken for this one: so the communicator fails. */
static dtrain_result dtrain__run(dtrain_comm *comm, uint32_t kind, const void *send, void *recv,
                                 size_t count, dtrain_dtype dtype, uint32_t op, int root,
                                 dtrain_work **work)
{
    dtrain_collective what;
    dtrain_work *started = NULL;
    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.dtype = dtype;
    what.op = op;
    what.root = root;
    what.count = count;
    what.send = send;
    what.recv = recv;
    if (work) *work = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, dtrain__kinds[kind].call));
    const uint64_t entered = dtrain__now_ns();
    dtrain_result result = dtrain__check_collective(comm, &what);
    if (result != DTRAIN_OK) {
        result = comm->ops->fail(comm, result, dtrain__error_text);
    } else {
        dtrain__count_operation(comm, &what, entered);
        result = comm->ops->start(comm, &what, &started);
        if (result == DTRAIN_OK && work) *work = started;
        else if (result == DTRAIN_OK && started) result = comm->ops->wait(started);
    }
    dtrain__comm_leave(comm, entered);
    return result;
}

DTRAIN_API dtrain_result dtrain_all_reduce(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                           dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_ALL_REDUCE, send, recv, count, dtype, (uint32_t)op, -1, work);
}

DTRAIN_API dtrain_result dtrain_reduce_scatter(dtrain_comm *comm, const void *send, void *recv,
                                               size_t recv_count, dtrain_dtype dtype,
                                               dtrain_reduce_op op, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_REDUCE_SCATTER, send, recv, recv_count, dtype, (uint32_t)op, -1,
                       work);
}

DTRAIN_API dtrain_result dtrain_all_gather(dtrain_comm *comm, const void *send, void *recv,
                                           size_t send_count, dtrain_dtype dtype,
                                           dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_ALL_GATHER, send, recv, send_count, dtype, 0, -1, work);
}

DTRAIN_API dtrain_result dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count,
                                          dtrain_dtype dtype, int root, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_BROADCAST, buffer, buffer, count, dtype, 0, root, work);
}

DTRAIN_API dtrain_result dtrain_reduce(dtrain_comm *comm, const void *send, void *recv,
                                       size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                       int root, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_REDUCE, send, recv, count, dtype, (uint32_t)op, root, work);
}

DTRAIN_API dtrain_result dtrain_send(dtrain_comm *comm, const void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_SEND, buffer, NULL, count, dtype, 0, peer, work);
}

DTRAIN_API dtrain_result dtrain_recv(dtrain_comm *comm, void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_RECV, NULL, buffer, count, dtype, 0, peer, work);
}

DTRAIN_API dtrain_result dtrain_barrier(dtrain_comm *comm)
{
    return dtrain__run(comm, DTRAIN_BARRIER, NULL, NULL, 0, DTRAIN_DTYPE_NONE, 0, -1, NULL);
}

DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work)
{
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_wait"));
    const uint64_t entered = dtrain__now_ns();
    const dtrain_result result = comm->ops->wait(work);
    dtrain__comm_leave(comm, entered);
    return result;
}

DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done)
{
    if (!done) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_work_test: done is NULL");
    *done = true;
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_test"));
    const uint64_t entered = dtrain__now_ns();
    const dtrain_result result = comm->ops->test(work, done);
    dtrain__comm_leave(comm, entered);
    return result;
}

DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_split: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_comm_split"));
    return comm->ops->split(comm, color, key, out);
}

DTRAIN_API dtrain_result dtrain_comm_destroy(dtrain_comm *comm)
{
    if (!comm) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__world_check(comm->world, "dtrain_comm_destroy"));
    if (comm == comm->world->comm)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_comm_destroy: the world's communicator ends with it");
    if (comm->outstanding)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_comm_destroy: %llu operations have not been given to dtrain_work_wait",
            (unsigned long long)comm->outstanding);
    return comm->ops->destroy(comm);
}

DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm) { return comm ? comm->rank : -1; }
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm) { return comm ? comm->size : 0; }
DTRAIN_API int dtrain_comm_world_rank(const dtrain_comm *comm, int rank)
{
    return comm && rank >= 0 && rank < comm->size ? comm->world_ranks[rank] : -1;
}

DTRAIN_API dtrain_result dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_alloc: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_comm_alloc"));
    return comm->ops->alloc(comm, bytes, out);
}

DTRAIN_API void dtrain_comm_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    if (!comm || !memory || dtrain__world_check(comm->world, "dtrain_comm_free") != DTRAIN_OK)
        return;
    comm->ops->free(comm, memory, bytes);
}

/* ---- Reductions ---------------------------------------------------------------------------------
 *
 * in_count inputs are combined, element by element and in order, into out_count equal outputs; an
 * output may be one of the inputs. Every input is read once and every output written once: fp32
 * sums stay in registers on the way, everything else in a block of 1024 elements in the L1 cache.
 *
 * Written once on vectors of 32 bytes and compiled twice: for AVX2, and for what the command
 * line says (pairs of SSE2 or NEON registers). gcc -O2 vectorises no loop of unknown length by
 * itself. */

#define DTRAIN__MIX_BLOCK 1024u
#define DTRAIN__MIX static inline __attribute__((always_inline))

typedef float dtrain__mix_f __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint32_t dtrain__mix_u __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint64_t dtrain__mix_l __attribute__((vector_size(32), aligned(1), may_alias));

typedef union dtrain__mix_block {
    float f[DTRAIN__MIX_BLOCK];
    uint32_t u[DTRAIN__MIX_BLOCK];
    uint64_t l[DTRAIN__MIX_BLOCK];
} dtrain__mix_block;

/* acc = acc OP x; x need not be aligned. */
#define DTRAIN__MIX_LOOP(T, V, OP)                                       \
    do {                                                                 \
        const size_t lanes = sizeof(V) / sizeof(T);                      \
        for (; i + lanes <= count; i += lanes) {                         \
            V *to = (V *)(void *)(acc + i);                              \
            *to = *to OP(*(const V *)(const void *)(x + i * sizeof(T))); \
        }                                                                \
        for (; i < count; i++) {                                         \
            T one;                                                       \
            memcpy(&one, x + i * sizeof one, sizeof one);                \
            acc[i] = acc[i] OP one;                                      \
        }                                                                \
    } while (0)

DTRAIN__MIX bool dtrain__mix_is_nan(float value)
{
    return (dtrain__f32_bits(value) & 0x7fffffffu) > 0x7f800000u; /* survives -ffast-math */
}

/* NaN wins, the first one; of equal numbers (+0 and -0) the lower rank's. */
DTRAIN__MIX void dtrain__mix_f32(float *acc, const char *x, size_t count, uint32_t op)
{
    size_t i = 0;
    if (op == DTRAIN_SUM || op == DTRAIN_MEAN) DTRAIN__MIX_LOOP(float, dtrain__mix_f, +);
    if (op == DTRAIN_PROD) DTRAIN__MIX_LOOP(float, dtrain__mix_f, *);
    for (; i < count; i++) {
        float one;
        memcpy(&one, x + i * sizeof one, sizeof one);
        const bool better = op == DTRAIN_MIN ? one < acc[i] : one > acc[i];
        if (!dtrain__mix_is_nan(acc[i]) && (dtrain__mix_is_nan(one) || better)) acc[i] = one;
    }
}

/* Unsigned arithmetic: integers wrap, and overflow is defined. */
#define DTRAIN__MIX_INTEGERS(name, U, S, V)                                               \
    DTRAIN__MIX void name(U *acc, const char *x, size_t count, uint32_t op)               \
    {                                                                                     \
        size_t i = 0;                                                                     \
        if (op == DTRAIN_SUM) DTRAIN__MIX_LOOP(U, V, +);                                  \
        if (op == DTRAIN_PROD) DTRAIN__MIX_LOOP(U, V, *);                                 \
        for (; i < count; i++) {                                                          \
            U one;                                                                        \
            memcpy(&one, x + i * sizeof one, sizeof one);                                 \
            if (op == DTRAIN_MIN ? (S)one < (S)acc[i] : (S)one > (S)acc[i]) acc[i] = one; \
        }                                                                                 \
    }
DTRAIN__MIX_INTEGERS(dtrain__mix_i32, uint32_t, int32_t, dtrain__mix_u)
DTRAIN__MIX_INTEGERS(dtrain__mix_i64, uint64_t, int64_t, dtrain__mix_l)

/* Half precision goes through the CPU device's conversion kernel, which wants even addresses. */
static void dtrain__mix_convert(const void *x, dtrain_dtype x_dtype, void *y, dtrain_dtype y_dtype,
                                size_t count)
{
    dtrain_convert_args args;
    dtrain__job job;
    memset(&args, 0, sizeof args);
    memset(&job, 0, sizeof job);
    args.count = (int64_t)count;
    args.x = x;
    args.y = y;
    args.x_dtype = x_dtype;
    args.y_dtype = y_dtype;
    job.args = &args;
    dtrain__kernels_select()->convert(&job, 0, args.count, 0);
}

static void dtrain__mix_widen(float *to, const char *from, size_t count, dtrain_dtype dtype)
{
    uint16_t bits[DTRAIN__MIX_BLOCK];
    memcpy(bits, from, count * sizeof *bits);
    dtrain__mix_convert(bits, dtype, to, DTRAIN_F32, count);
}

DTRAIN__MIX void dtrain__mix(dtrain__mix_block *acc, const char *x, size_t count,
                             dtrain_dtype dtype, uint32_t op)
{
    float wide[DTRAIN__MIX_BLOCK];
    switch (dtype) {
    case DTRAIN_F32: dtrain__mix_f32(acc->f, x, count, op); break;
    case DTRAIN_I32: dtrain__mix_i32(acc->u, x, count, op); break;
    case DTRAIN_I64: dtrain__mix_i64(acc->l, x, count, op); break;
    default:
        dtrain__mix_widen(wide, x, count, dtype);
        dtrain__mix_f32(acc->f, (const char *)wide, count, op);
        break;
    }
}

typedef struct dtrain__mix_job {
    const char *const *in; /* (in_count) */
    char *const *out;      /* (out_count) */
    int in_count, out_count;
    size_t count; /* elements */
    dtrain_dtype dtype;
    uint32_t op;
} dtrain__mix_job;

/* Any dtype and operation, elements [first, count). */
DTRAIN__MIX void dtrain__mix_blocks(const dtrain__mix_job *job, size_t first)
{
    const size_t unit = dtrain_dtype_bytes(job->dtype);
    const bool half = job->dtype == DTRAIN_BF16 || job->dtype == DTRAIN_F16;
    const float scale = 1.0f / (float)job->in_count;
    dtrain__mix_block acc;
    uint16_t bits[DTRAIN__MIX_BLOCK];
    const void *result = half ? (const void *)bits : &acc;
    for (size_t at = first; at < job->count; at += DTRAIN__MIX_BLOCK) {
        const size_t rest = job->count - at,
                     m = rest < DTRAIN__MIX_BLOCK ? rest : DTRAIN__MIX_BLOCK;
        if (half) dtrain__mix_widen(acc.f, job->in[0] + at * unit, m, job->dtype);
        else memcpy(&acc, job->in[0] + at * unit, m * unit);
        for (int i = 1; i < job->in_count; i++)
            dtrain__mix(&acc, job->in[i] + at * unit, m, job->dtype, job->op);
        if (job->op == DTRAIN_MEAN)
            for (size_t i = 0; i < m; i++) acc.f[i] *= scale;
        if (half) dtrain__mix_convert(acc.f, DTRAIN_F32, bits, job->dtype, m);
        for (int i = 0; i < job->out_count; i++) memcpy(job->out[i] + at * unit, result, m * unit);
    }
}

/* fp32 sums and means, 128 bytes at a time in registers; returns how many elements are done. The
 * compiler has to reload the pointers after every store, which could have changed them: that is
 * noticed only while everything is in L1, so two inputs and two outputs, the case of two ranks,
 * have theirs in locals. */
DTRAIN__MIX size_t dtrain__mix_sums(const dtrain__mix_job *job)
{
    const int in_count = job->in_count, out_count = job->out_count;
    const float scale = job->op == DTRAIN_MEAN ? 1.0f / (float)in_count : 1.0f;
    const bool two = in_count == 2 && out_count == 2;
    const char *const *in = job->in, *in0 = in[0], *in1 = in[1];
    char *const *out = job->out, *out0 = out[0], *out1 = two ? out[1] : NULL;
    const size_t end = job->count / 32 * 32;
    for (size_t at = 0; at < end; at += 32) {
        const dtrain__mix_f *x = (const dtrain__mix_f *)(const void *)(in0 + 4 * at);
        const dtrain__mix_f *z = (const dtrain__mix_f *)(const void *)(in1 + 4 * at);
        dtrain__mix_f *y = (dtrain__mix_f *)(void *)(out0 + 4 * at);
        dtrain__mix_f a = x[0] + z[0], b = x[1] + z[1], c = x[2] + z[2], d = x[3] + z[3];
        for (int i = 2; i < in_count; i++) {
            x = (const dtrain__mix_f *)(const void *)(in[i] + 4 * at);
            a += x[0], b += x[1], c += x[2], d += x[3];
        }
        a *= scale, b *= scale, c *= scale, d *= scale; /* times 1 changes no bit */
        y[0] = a, y[1] = b, y[2] = c, y[3] = d;
        if (two) {
            y = (dtrain__mix_f *)(void *)(out1 + 4 * at);
            y[0] = a, y[1] = b, y[2] = c, y[3] = d;
            continue;
        }
        for (int i = 1; i < out_count; i++) {
            y = (dtrain__mix_f *)(void *)(out[i] + 4 * at);
            y[0] = a, y[1] = b, y[2] = c, y[3] = d;
        }
    }
    return end;
}

DTRAIN__MIX void dtrain__mix_run(const dtrain__mix_job *job)
{
    const bool sums = job->dtype == DTRAIN_F32 && (job->op == DTRAIN_SUM || job->op == DTRAIN_MEAN);
    dtrain__mix_blocks(job, sums ? dtrain__mix_sums(job) : 0);
}

static void dtrain__mix_plain(const dtrain__mix_job *job) { dtrain__mix_run(job); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void dtrain__mix_avx2(const dtrain__mix_job *job)
{
    dtrain__mix_run(job);
}
#endif

static void dtrain__combine(const dtrain_collective *what, const char *const *in, int in_count,
                            char *const *out, int out_count, size_t count)
{
    const size_t bytes = count * dtrain_dtype_bytes(what->dtype);
    dtrain__mix_job job;
    if (in_count == 1) { /* a copy: exact for every dtype */
        for (int i = 0; i < out_count; i++)
            if (out[i] != in[0]) memcpy(out[i], in[0], bytes);
        return;
    }
    job.in = in;
    job.out = out;
    job.in_count = in_count;
    job.out_count = out_count;
    job.count = count;
    job.dtype = what->dtype;
    job.op = what->op;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        dtrain__mix_avx2(&job);
        return;
    }
#endif
    dtrain__mix_plain(&job);
}

/* ---- [S26.2] The local backend: shared structures ---------------------------------------------
 *
 * Why a slot may be used again after 2 W operations without asking: a rank starts operation t only
 * after it has finished t - W. It finished it after it saw every rank at stage 1 of t - W; and
 * those ranks started t - W only after they had finished t - 2W, that is, after their last look at
 * its slots and payloads. So with 2 W slots nobody can still be reading what operation t
 * overwrites. */

#define DTRAIN__WINDOW 32u /* W: collectives of one rank under way at once */
#define DTRAIN__SLOTS (2 * DTRAIN__WINDOW)
#define DTRAIN__SMALL_BYTES 4096u                     /* data that travels inside a slot ... */
#define DTRAIN__SMALL_TOTAL (8 * DTRAIN__SMALL_BYTES) /* ... and what one rank reads of all slots */
#define DTRAIN__CHUNK_BYTES ((size_t)128 << 10) /* half a stage: two ranks' stages stay in L2 */
#define DTRAIN__CELL_BYTES ((size_t)32 << 10)
#define DTRAIN__CELLS 4u
#define DTRAIN__STAGE_BITS 24 /* progress = sequence << 24 | stage */

/* Written by its rank only; 65 cache lines, so that slots spread over the sets of a cache. */
typedef struct dtrain__slot {
    uint64_t progress; /* atomic; only grows */
    uint64_t count;
    const char *send;
    char *recv;
    uint32_t kind, dtype, op;
    int32_t root;
    uint32_t direct; /* the other ranks can reach these buffers */
    uint32_t unused[3];
    char payload[DTRAIN__SMALL_BYTES];
} dtrain__slot;

/* Messages of one ordered pair of ranks, cut in cells. head - tail cells are filled. */
typedef struct dtrain__cell {
    uint64_t count; /* of the whole message */
    uint32_t dtype;
    uint32_t unused[13];
    char data[DTRAIN__CELL_BYTES];
} dtrain__cell;

typedef struct dtrain__channel {
    uint64_t head; /* atomic, the sender's */
    uint64_t head_line[7];
    uint64_t tail; /* atomic, the receiver's */
    uint64_t tail_line[7];
    dtrain__cell cells[DTRAIN__CELLS];
} dtrain__channel;

/* What one rank shows the others; all zero is the valid beginning. */
struct dtrain__part {
    uint32_t failure;     /* atomic, of the first part only: 0 none, 1 being written, 2 stands */
    int32_t failure_code; /* dtrain_result, as the rank that found it returns it */
    int32_t failure_rank;
    uint32_t departed;  /* atomic: ranks that have destroyed the communicator ... */
    uint32_t size;      /* ... out of so many */
    char *stage;        /* 2 chunks, made when first needed */
    dtrain__part *next; /* among this rank's retired parts */
    char failure_text[480];
    dtrain__channel *channels[DTRAIN_MAX_RANKS]; /* atomic; to each rank, made by the first send */
    dtrain__slot slots[DTRAIN__SLOTS];
};

typedef struct dtrain__local_work {
    dtrain_work base;
    struct dtrain__local_work *next; /* in the queue, or among the idle */
    dtrain_collective what;
    uint64_t sequence;     /* collectives: from 1, the same on all ranks; messages: 0 */
    uint32_t stage, final; /* reached; 0 = not shown to the others yet. final 0 = path not chosen */
    int seen;              /* ranks below it have reached `stage` */
    bool done;
    size_t moved; /* messages: bytes */
} dtrain__local_work;

typedef struct dtrain__work_block {
    struct dtrain__work_block *next;
    dtrain__local_work works[DTRAIN__WINDOW];
} dtrain__work_block;

typedef struct dtrain__local_comm {
    dtrain_comm base;
    struct dtrain__local_comm *next; /* in the world's list */
    dtrain__part **parts;            /* (size) */
    bool failed;
    uint64_t sequence;                      /* of the collective started last */
    dtrain__local_work *queue, **queue_end; /* not done, in the order of their start */
    dtrain__local_work *idle;
    dtrain__work_block *blocks; /* one is enough unless very many handles are kept open */
} dtrain__local_comm;

static dtrain__slot *dtrain__slot_of(const dtrain__local_comm *comm, int rank, uint64_t sequence)
{
    return &comm->parts[rank]->slots[sequence % DTRAIN__SLOTS];
}

/* ---- Failure ------------------------------------------------------------------------------------
 *
 * The first rank that finds something wrong writes it into the first part; everybody returns
 * that. */

/* Whether the sentence is there. The rank that was to write it may have died between its two
 * stores: then the record of deaths, which is some 100 us behind, names it. */
static bool dtrain__sentence_is_there(const dtrain__local_comm *comm)
{
    const uint32_t *failed = &comm->base.world->control->first_failed;
    for (int i = 0; i < 100000; i++) {
        if (dtrain__load(&comm->parts[0]->failure) == 2) return true;
        if (dtrain__load(failed)) return dtrain__load(&comm->parts[0]->failure) == 2;
        sched_yield();
    }
    return false;
}

static dtrain_result dtrain__died_speaking(const dtrain_world *world)
{
    char text[160] = "a rank died while it was saying why it gave up";
    const uint32_t failed = dtrain__load(&world->control->first_failed);
    if (failed) dtrain__describe_end(world->control, (int)failed - 1, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "%s", text);
}

static dtrain_result dtrain__local_standing(dtrain__local_comm *comm)
{
    const dtrain__part *part = comm->parts[0];
    comm->failed = true;
    comm->queue = NULL; /* nothing in flight will be finished */
    comm->queue_end = &comm->queue;
    comm->base.in_flight = 0;
    if (!dtrain__sentence_is_there(comm)) return dtrain__died_speaking(comm->base.world);
    const dtrain_result code = (dtrain_result)part->failure_code;
    const bool everybodys = code == DTRAIN_ERROR_MISMATCH || code == DTRAIN_ERROR_TIMEOUT ||
                            code == DTRAIN_ERROR_PEER || part->failure_rank == comm->base.rank;
    if (everybodys) return dtrain_fail(code, "%s", part->failure_text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d had to give up: %s",
                       comm->base.world_ranks[part->failure_rank], part->failure_text);
}

static dtrain_result dtrain__local_fail(dtrain_comm *base, dtrain_result code, const char *text)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain__part *part = comm->parts[0];
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(&part->failure, &none, 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
        part->failure_code = (int32_t)code;
        part->failure_rank = base->rank;
        snprintf(part->failure_text, sizeof part->failure_text, "%s", dtrain__bare(text));
        dtrain__store(&part->failure, 2);
    }
    return dtrain__local_standing(comm);
}

DTRAIN__PRINTF(3, 4)
static dtrain_result dtrain__local_failf(dtrain__local_comm *comm, dtrain_result code,
                                         const char *format, ...)
{
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dtrain__local_fail(&comm->base, code, text);
}

/* ---- Collectives ------------------------------------------------------------------------------*/

static void dtrain__slot_what(const dtrain__slot *slot, dtrain_collective *what)
{
    memset(what, 0, sizeof *what);
    what->kind = slot->kind;
    what->dtype = (dtrain_dtype)slot->dtype;
    what->op = slot->op;
    what->root = slot->root;
    what->count = (size_t)slot->count;
}

/* Compares what another rank calls with what this rank calls. */
static dtrain_result dtrain__compare(dtrain__local_comm *comm, const dtrain__local_work *work,
                                     int rank)
{
    const dtrain__slot *slot = dtrain__slot_of(comm, rank, work->sequence);
    const dtrain_collective *mine = &work->what;
    dtrain_collective theirs;
    char a[80], b[80];
    if (slot->kind == mine->kind && slot->dtype == (uint32_t)mine->dtype && slot->op == mine->op &&
        slot->root == mine->root && slot->count == mine->count)
        return DTRAIN_OK;
    dtrain__slot_what(slot, &theirs);
    const bool first = rank < comm->base.rank;
    dtrain__describe(first ? &theirs : mine, a, sizeof a);
    dtrain__describe(first ? mine : &theirs, b, sizeof b);
    const int me = comm->base.world_ranks[comm->base.rank], other = comm->base.world_ranks[rank];
    return dtrain__local_failf(comm, DTRAIN_ERROR_MISMATCH,
                               "collective #%llu differs: rank %d called %s, rank %d called %s",
                               (unsigned long long)work->sequence, first ? other : me, a,
                               first ? me : other, b);
}

static bool dtrain__reached(const dtrain__local_comm *comm, const dtrain__local_work *work,
                            int rank)
{
    const uint64_t goal = work->sequence << DTRAIN__STAGE_BITS | work->stage;
    return dtrain__load(&dtrain__slot_of(comm, rank, work->sequence)->progress) >= goal;
}

static bool dtrain__all_reached(const dtrain__local_comm *comm, dtrain__local_work *work)
{
    while (work->seen < comm->base.size && dtrain__reached(comm, work, work->seen)) work->seen++;
    return work->seen == comm->base.size;
}

static void dtrain__reach(const dtrain__local_comm *comm, dtrain__local_work *work, uint32_t stage)
{
    work->stage = stage;
    work->seen = 0;
    dtrain__store(&dtrain__slot_of(comm, comm->base.rank, work->sequence)->progress,
                  work->sequence << DTRAIN__STAGE_BITS | stage);
}

static bool dtrain__is_small(const dtrain_collective *what, int size)
{
    const size_t bytes = dtrain__send_count(what, size) * dtrain_dtype_bytes(what->dtype);
    return bytes <= DTRAIN__SMALL_BYTES && bytes * (size_t)size <= DTRAIN__SMALL_TOTAL;
}

/* The buffers that other ranks would touch on the direct path are where they can touch them. */
static bool dtrain__is_direct(const dtrain_comm *comm, const dtrain_collective *what)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool given = what->kind == DTRAIN_ALL_REDUCE || what->kind == DTRAIN_BROADCAST ||
                       (what->kind == DTRAIN_REDUCE && what->root == comm->rank);
    if (comm->size == 1) return true;
    return dtrain__is_shared(comm->world, what->send,
                             dtrain__send_count(what, comm->size) * unit) &&
           (!given || dtrain__is_shared(comm->world, what->recv, what->count * unit));
}

/* Stage 1: what this rank calls, with the data when it is small. */
static void dtrain__show(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    dtrain__slot *slot = dtrain__slot_of(comm, comm->base.rank, work->sequence);
    const size_t bytes =
        dtrain__send_count(what, comm->base.size) * dtrain_dtype_bytes(what->dtype);
    const bool gives = what->kind != DTRAIN_BROADCAST || what->root == comm->base.rank;
    slot->count = what->count;
    slot->send = (const char *)what->send;
    slot->recv = (char *)what->recv;
    slot->kind = what->kind;
    slot->dtype = (uint32_t)what->dtype;
    slot->op = what->op;
    slot->root = what->root;
    slot->direct = dtrain__is_direct(&comm->base, what);
    if (bytes && gives && dtrain__is_small(what, comm->base.size))
        memcpy(slot->payload, what->send, bytes);
    dtrain__reach(comm, work, 1);
}

/* Elements [first, first + count) of this rank's own result from everybody's input, in (size). */
static void dtrain__pull(const dtrain__local_comm *comm, const dtrain_collective *what,
                         const char *const *in, size_t first, size_t count)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->base.size, rank = comm->base.rank;
    if (!count) return; /* a barrier has no buffers; a reduction has no recv but at the root */
    char *out = what->recv ? (char *)what->recv + first * unit : NULL;
    switch (what->kind) {
    case DTRAIN_REDUCE:
        if (rank != what->root) break;
        /* fall through */
    case DTRAIN_ALL_REDUCE:
    case DTRAIN_REDUCE_SCATTER: dtrain__combine(what, in, size, &out, 1, count); break;
    case DTRAIN_BROADCAST:
        if (rank != what->root) memcpy(out, in[what->root], count * unit);
        break;
    default: /* all-gather, split */
        for (int i = 0; i < size; i++, out += what->count * unit)
            if (out != in[i]) memcpy(out, in[i], count * unit);
        break;
    }
}

static void dtrain__small_path(const dtrain__local_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const char *in[DTRAIN_MAX_RANKS];
    const size_t slice =
        what->kind == DTRAIN_REDUCE_SCATTER ? (size_t)comm->base.rank * what->count : 0;
    for (int i = 0; i < comm->base.size; i++)
        in[i] = dtrain__slot_of(comm, i, work->sequence)->payload +
                slice * dtrain_dtype_bytes(what->dtype);
    dtrain__pull(comm, what, in, 0, what->count);
}

/* Slice `rank` of count elements, cut at multiples of 64 bytes so that no two ranks write one
 * line. */
static void dtrain__slice(size_t count, size_t unit, int size, int rank, size_t *first,
                          size_t *length)
{
    const size_t step = DTRAIN__CACHE_LINE / unit, steps = count / step + (count % step != 0);
    const size_t each = steps / (size_t)size, more = steps % (size_t)size, r = (size_t)rank;
    const size_t begin = (each * r + (r < more ? r : more)) * step;
    const size_t end = begin + (each + (r < more)) * step;
    *first = begin < count ? begin : count;
    *length = (end < count ? end : count) - *first;
}

static void dtrain__direct_path(const dtrain__local_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->base.size, rank = comm->base.rank;
    const bool sliced = what->kind == DTRAIN_ALL_REDUCE || what->kind == DTRAIN_REDUCE ||
                        what->kind == DTRAIN_BROADCAST;
    const char *in[DTRAIN_MAX_RANKS];
    char *out[DTRAIN_MAX_RANKS];
    size_t first = 0, length = what->count;
    int outs = 0;
    if (sliced) dtrain__slice(what->count, unit, size, rank, &first, &length);
    else if (what->kind == DTRAIN_REDUCE_SCATTER) first = (size_t)rank * what->count;
    for (int i = 0; i < size; i++) {
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->sequence);
        in[i] = slot->send + first * unit;
        const bool receives =
            what->kind == DTRAIN_ALL_REDUCE || (what->kind == DTRAIN_REDUCE) == (i == what->root);
        if (sliced && receives) out[outs++] = slot->recv + first * unit;
    }
    if (!sliced) dtrain__pull(comm, what, in, 0, length);
    else if (what->kind == DTRAIN_BROADCAST)
        dtrain__combine(what, in + what->root, 1, out, outs, length);
    else dtrain__combine(what, in, size, out, outs, length);
}

/* ---- The staged path ----------------------------------------------------------------------------
 *
 *     chunk c    copy in -> reach c + 2 -> all there -> pull -> copy c + 1 in -> reach c + 3
 *
 * Chunk c + 1 goes into the half that held chunk c - 1. All ranks have pulled that one: they
 * reached stage c + 2, which comes after their pull of c - 1. The last stage, chunks + 2, says that
 * all have pulled everything and the stages are free for the next operation, so only the oldest one
 * in flight uses them. */

static size_t dtrain__chunk_count(const dtrain__local_comm *comm, const dtrain_collective *what)
{
    const size_t pieces = what->kind == DTRAIN_REDUCE_SCATTER ? (size_t)comm->base.size : 1;
    return DTRAIN__CHUNK_BYTES / dtrain_dtype_bytes(what->dtype) / pieces;
}

/* Copies chunk c of this rank's input into its stage: one piece, or one for each rank's slice. */
static dtrain_result dtrain__stage_in(dtrain__local_comm *comm, const dtrain_collective *what,
                                      size_t c)
{
    dtrain__part *part = comm->parts[comm->base.rank];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t pieces = dtrain__send_count(what, comm->base.size) / what->count;
    if (what->kind == DTRAIN_BROADCAST && what->root != comm->base.rank) return DTRAIN_OK;
    if (!part->stage) {
        void *stage;
        if (dtrain__shared_alloc(comm->base.world, 2 * DTRAIN__CHUNK_BYTES, &stage) != DTRAIN_OK)
            return dtrain__local_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain__error_text);
        part->stage = (char *)stage;
    }
    char *half = part->stage + c % 2 * DTRAIN__CHUNK_BYTES;
    for (size_t i = 0; i < pieces; i++)
        memcpy(half + i * chunk * unit,
               (const char *)what->send + (i * what->count + c * chunk) * unit, length * unit);
    comm->base.info.staged_bytes += pieces * length * unit;
    return DTRAIN_OK;
}

static void dtrain__stage_out(dtrain__local_comm *comm, const dtrain_collective *what, size_t c)
{
    const char *in[DTRAIN_MAX_RANKS];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t slice = what->kind == DTRAIN_REDUCE_SCATTER ? (size_t)comm->base.rank * chunk : 0;
    for (int i = 0; i < comm->base.size; i++) {
        const char *stage = comm->parts[i]->stage; /* NULL on ranks that give nothing */
        in[i] = stage ? stage + c % 2 * DTRAIN__CHUNK_BYTES + slice * unit : NULL;
    }
    dtrain__pull(comm, what, in, c * chunk, length);
}

/* ---- The engine -------------------------------------------------------------------------------*/

/* All ranks have shown what they call: they must agree; then the path follows from what they
 * showed. */
static dtrain_result dtrain__choose_path(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const bool small = dtrain__is_small(what, comm->base.size);
    bool direct = true;
    for (int i = 0; i < comm->base.size; i++) {
        DTRAIN__TRY(dtrain__compare(comm, work, i));
        direct = direct && dtrain__slot_of(comm, i, work->sequence)->direct;
    }
    /* A rank that gave up has taken its buffers back; what it left in a slot is still good. */
    if (!small && dtrain__load(&comm->parts[0]->failure))
        return dtrain__local_fail(&comm->base, DTRAIN_OK, "");
    const size_t chunk = what->count ? dtrain__chunk_count(comm, what) : 1;
    if (small) work->final = 1;
    else if (direct) work->final = 2;
    else work->final = (uint32_t)((what->count + chunk - 1) / chunk) + 2;
    return DTRAIN_OK;
}

/* Moves one collective as far as it goes without waiting; true when it is done. */
static bool dtrain__collective_move(dtrain__local_comm *comm, dtrain__local_work *work,
                                    uint64_t oldest)
{
    const dtrain_collective *what = &work->what;
    if (work->stage == 0) {
        if (work->sequence - oldest >= DTRAIN__WINDOW) return false;
        dtrain__show(comm, work);
    }
    while (dtrain__all_reached(comm, work)) {
        if (!work->final && dtrain__choose_path(comm, work) != DTRAIN_OK) return false;
        if (work->stage == 1 && work->final == 1) dtrain__small_path(comm, work);
        if (work->stage == work->final) return true;
        if (work->final == 2) {
            dtrain__direct_path(comm, work);
        } else {
            if (work->sequence != oldest) return false;
            if (work->stage > 1) dtrain__stage_out(comm, what, work->stage - 2);
            if (work->stage + 1 < work->final &&
                dtrain__stage_in(comm, what, work->stage - 1) != DTRAIN_OK)
                return false;
        }
        dtrain__reach(comm, work, work->stage + 1);
    }
    return false;
}

/* ---- Messages ---------------------------------------------------------------------------------*/

/* Messages between two ranks in one direction go one after the other. */
static bool dtrain__message_first(const dtrain__local_comm *comm, const dtrain__local_work *work)
{
    const dtrain__local_work *other = comm->queue;
    while (other != work &&
           (other->what.kind != work->what.kind || other->what.root != work->what.root))
        other = other->next;
    return other == work;
}

static dtrain__channel *dtrain__channel_of(const dtrain__local_comm *comm,
                                           const dtrain_collective *what)
{
    const int from = what->kind == DTRAIN_SEND ? comm->base.rank : what->root;
    const int to = what->kind == DTRAIN_SEND ? what->root : comm->base.rank;
    return dtrain__load(&comm->parts[from]->channels[to]);
}

/* The other side has to do something first. */
static bool dtrain__message_stuck(const dtrain__local_comm *comm, const dtrain_collective *what)
{
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    if (!channel) return what->kind == DTRAIN_RECV;
    const uint64_t filled = dtrain__load(&channel->head) - dtrain__load(&channel->tail);
    return filled == (what->kind == DTRAIN_SEND ? DTRAIN__CELLS : 0u);
}

static dtrain_result dtrain__channel_make(dtrain__local_comm *comm, int to)
{
    void *memory;
    if (dtrain__shared_alloc(comm->base.world, sizeof(dtrain__channel), &memory) != DTRAIN_OK)
        return dtrain__local_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain__error_text);
    dtrain__store(&comm->parts[comm->base.rank]->channels[to], (dtrain__channel *)memory);
    return DTRAIN_OK;
}

static dtrain_result dtrain__message_differs(dtrain__local_comm *comm,
                                             const dtrain_collective *what,
                                             const dtrain__cell *cell)
{
    const int *world = comm->base.world_ranks;
    return dtrain__local_failf(
        comm, DTRAIN_ERROR_MISMATCH,
        "message differs: rank %d sent %s count %llu, rank %d receives %s count %zu",
        world[what->root], dtrain_dtype_name((dtrain_dtype)cell->dtype),
        (unsigned long long)cell->count, world[comm->base.rank], dtrain_dtype_name(what->dtype),
        what->count);
}

/* One cell further; an empty message is one empty cell. */
static dtrain_result dtrain__message_cell(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    const bool sends = what->kind == DTRAIN_SEND;
    uint64_t *mine = sends ? &channel->head : &channel->tail;
    dtrain__cell *cell = &channel->cells[*mine % DTRAIN__CELLS];
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype), rest = bytes - work->moved;
    const size_t length = rest < DTRAIN__CELL_BYTES ? rest : DTRAIN__CELL_BYTES;
    if (sends) {
        cell->count = what->count;
        cell->dtype = (uint32_t)what->dtype;
        if (length) memcpy(cell->data, (const char *)what->send + work->moved, length);
    } else {
        if (cell->count != what->count || cell->dtype != (uint32_t)what->dtype)
            return dtrain__message_differs(comm, what, cell);
        if (length) memcpy((char *)what->recv + work->moved, cell->data, length);
    }
    dtrain__store(mine, *mine + 1);
    comm->base.info.staged_bytes += length;
    work->moved += length;
    work->done = work->moved == bytes;
    return DTRAIN_OK;
}

static bool dtrain__message_move(dtrain__local_comm *comm, dtrain__local_work *work)
{
    if (!dtrain__message_first(comm, work)) return false;
    if (work->what.kind == DTRAIN_SEND && !dtrain__channel_of(comm, &work->what) &&
        dtrain__channel_make(comm, work->what.root) != DTRAIN_OK)
        return false;
    while (!work->done && !dtrain__message_stuck(comm, &work->what))
        if (dtrain__message_cell(comm, work) != DTRAIN_OK) return false;
    return work->done;
}

/* ---- Start, test, wait ------------------------------------------------------------------------*/

/* Moves everything in flight, oldest first. The host's threads do all the work, here. */
static void dtrain__local_advance(dtrain__local_comm *comm)
{
    uint64_t oldest = 0; /* sequence of the first collective that is not done */
    dtrain__local_work **link = &comm->queue;
    while (*link) {
        dtrain__local_work *work = *link;
        if (!oldest) oldest = work->sequence;
        const bool done = work->sequence ? dtrain__collective_move(comm, work, oldest)
                                         : dtrain__message_move(comm, work);
        if (comm->failed) return;
        if (!done) {
            link = &work->next;
            continue;
        }
        work->done = true;
        *link = work->next;
        if (!*link) comm->queue_end = link;
        comm->base.in_flight--;
        if (oldest == work->sequence) oldest = 0;
    }
}

/* A rank that waits in one communicator keeps the others going: two ranks may wait for the same two
 * operations in opposite order, each in the communicator that the other one advances last. */
static void dtrain__local_advance_all(dtrain__local_comm *comm)
{
    dtrain__local_advance(comm);
    for (dtrain__local_comm *other = comm->base.world->locals; other; other = other->next) {
        if (other == comm || !other->queue) continue;
        dtrain__local_advance(other);
        if (!other->queue) dtrain__comm_landed(&other->base, dtrain__now_ns());
    }
}

/* The sequence number of a rank's latest collective, for messages. */
static uint64_t dtrain__last_sequence(const dtrain__local_comm *comm, int rank)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < DTRAIN__SLOTS; i++) {
        const uint64_t progress = dtrain__load(&comm->parts[rank]->slots[i].progress);
        if (progress >> DTRAIN__STAGE_BITS > last) last = progress >> DTRAIN__STAGE_BITS;
    }
    return last;
}

/* What keeps `work` from being done: an older collective, maybe. */
static const dtrain__local_work *dtrain__blocking(const dtrain__local_comm *comm,
                                                  const dtrain__local_work *work)
{
    const dtrain__local_work *first = work->sequence ? comm->queue : work;
    while (first != work && !first->sequence) first = first->next;
    return first;
}

static bool dtrain__waits_for(const dtrain__local_comm *comm, const dtrain__local_work *work,
                              int rank)
{
    if (work->sequence) return !dtrain__reached(comm, work, rank);
    return rank == work->what.root && dtrain__message_stuck(comm, &work->what);
}

/* "collective #17 (all-reduce sum f32 count 4)" */
static void dtrain__name_work(const dtrain__local_work *work, char *text, size_t room)
{
    char what[80];
    dtrain__describe(&work->what, what, sizeof what);
    if (!work->sequence) snprintf(text, room, "%s", what);
    else snprintf(text, room, "collective #%llu (%s)", (unsigned long long)work->sequence, what);
}

/* The rarer checks of a wait: has another rank failed the communicator, called something else,
 * left? How it ended is read before its progress: what it did before leaving counts. */
static dtrain_result dtrain__local_trouble(dtrain__local_comm *comm,
                                           const dtrain__local_work *waited)
{
    const dtrain__local_work *work = dtrain__blocking(comm, waited);
    const int *world = comm->base.world_ranks;
    char name[128];
    if (dtrain__load(&comm->parts[0]->failure))
        return dtrain__local_fail(&comm->base, DTRAIN_OK, "");
    for (int i = 0; i < comm->base.size; i++) {
        const uint32_t how = dtrain__load(&comm->base.world->control->fates[world[i]].how);
        if (!dtrain__waits_for(comm, work, i)) {
            if (work->sequence && work->stage == 1) DTRAIN__TRY(dtrain__compare(comm, work, i));
            continue;
        }
        if (how != DTRAIN__LEFT) continue;
        dtrain__name_work(work, name, sizeof name);
        return dtrain__local_failf(
            comm, DTRAIN_ERROR_PEER,
            "rank %d left (returned 0) after its collective #%llu while rank %d waits in %s",
            world[i], (unsigned long long)dtrain__last_sequence(comm, i), world[comm->base.rank],
            name);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__local_timeout(dtrain__local_comm *comm,
                                           const dtrain__local_work *waited)
{
    const dtrain__local_work *work = dtrain__blocking(comm, waited);
    char name[128], list[200] = "";
    size_t used = 0;
    dtrain__name_work(work, name, sizeof name);
    for (int i = 0; i < comm->base.size && used + 48 < sizeof list; i++) {
        if (!dtrain__waits_for(comm, work, i)) continue;
        const unsigned long long last = (unsigned long long)dtrain__last_sequence(comm, i);
        used += (size_t)snprintf(
            list + used, sizeof list - used, "%srank %d (%s #%llu)", used ? ", " : "",
            comm->base.world_ranks[i],
            work->sequence && last >= work->sequence ? "stuck in" : "its last was", last);
    }
    return dtrain__local_failf(
        comm, DTRAIN_ERROR_TIMEOUT,
        "%s: rank %d waited %.1f s for %s; if they are only slow, raise timeout_ms", name,
        comm->base.world_ranks[comm->base.rank], 1e-9 * (double)comm->base.world->timeout_ns, list);
}

static dtrain_result dtrain__local_more_works(dtrain__local_comm *comm)
{
    dtrain__work_block *block = (dtrain__work_block *)dtrain__alloc(
        &comm->base.world->allocator, 1, sizeof *block, "operations in flight");
    if (!block) return DTRAIN_ERROR_MEMORY;
    block->next = comm->blocks;
    comm->blocks = block;
    for (uint32_t i = 0; i < DTRAIN__WINDOW; i++) {
        block->works[i].next = comm->idle;
        comm->idle = &block->works[i];
    }
    return DTRAIN_OK;
}

static void dtrain__local_recycle(dtrain__local_comm *comm, dtrain__local_work *work)
{
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
}

static dtrain_result dtrain__local_start(dtrain_comm *base, const dtrain_collective *what,
                                         dtrain_work **out)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    if (comm->failed) return dtrain__local_standing(comm);
    if (!comm->idle && dtrain__local_more_works(comm) != DTRAIN_OK)
        return dtrain__local_fail(base, DTRAIN_ERROR_MEMORY, dtrain__error_text);
    dtrain__local_work *work = comm->idle;
    comm->idle = work->next;
    memset(work, 0, sizeof *work);
    work->base.comm = base;
    work->what = *what;
    if (what->kind != DTRAIN_SEND && what->kind != DTRAIN_RECV) work->sequence = ++comm->sequence;
    *comm->queue_end = work;
    comm->queue_end = &work->next;
    base->outstanding++;
    base->in_flight++;
    dtrain__local_advance(comm);
    *out = &work->base;
    if (!comm->failed) return DTRAIN_OK;
    dtrain__local_recycle(comm, work);
    return dtrain__local_standing(comm);
}

/* The rarer half of a wait, after dtrain__wait_look said `turn`. A peer's death has a sentence
 * already, which becomes the communicator's. Before anything is given up, what the others did until
 * they failed or left is looked at once more: it may be all that was needed. */
static void dtrain__local_look(dtrain__local_comm *comm, const dtrain__local_work *work,
                               dtrain_result turn)
{
    if (turn != DTRAIN_OK || dtrain__load(&comm->parts[0]->failure)) dtrain__local_advance(comm);
    if (work->done || comm->failed) return;
    if (turn == DTRAIN_ERROR_PEER) (void)dtrain__local_fail(&comm->base, turn, dtrain__error_text);
    else if (dtrain__local_trouble(comm, work) == DTRAIN_OK && turn == DTRAIN_ERROR_TIMEOUT)
        (void)dtrain__local_timeout(comm, work);
}

static dtrain_result dtrain__local_wait(dtrain_work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    dtrain__local_comm *comm = (dtrain__local_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    while (!work->done && !comm->failed) {
        dtrain__local_advance_all(comm);
        if (work->done || comm->failed) break;
        const dtrain_result turn = dtrain__wait_turn(comm->base.world, &wait);
        if (wait.looked) dtrain__local_look(comm, work, turn); /* may set failed */
    }
    const dtrain_result result = work->done ? DTRAIN_OK : dtrain__local_standing(comm);
    dtrain__local_recycle(comm, work);
    return result;
}

static dtrain_result dtrain__local_test(dtrain_work *base, bool *done)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    dtrain__local_comm *comm = (dtrain__local_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    if (!work->done && !comm->failed) dtrain__local_advance_all(comm);
    if (!work->done && !comm->failed)
        dtrain__local_look(comm, work, dtrain__wait_look(comm->base.world, &wait));
    *done = work->done || comm->failed;
    return work->done || !comm->failed ? DTRAIN_OK : dtrain__local_standing(comm);
}

/* ---- Making and ending a communicator ---------------------------------------------------------*/

static dtrain_result dtrain__local_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    return dtrain__shared_alloc(comm->world, bytes, out);
}
static void dtrain__local_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    (void)bytes;
    dtrain__shared_free(comm->world, memory);
}

/* Private memory only; this rank's part is left to those who may still read it. */
static void dtrain__local_release(dtrain__local_comm *comm)
{
    const dtrain_allocator *allocator = &comm->base.world->allocator;
    const size_t size = (size_t)comm->base.size;
    dtrain__local_comm **link = &comm->base.world->locals;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->blocks) {
        dtrain__work_block *block = comm->blocks;
        comm->blocks = block->next;
        dtrain__free(allocator, block, 1, sizeof *block);
    }
    dtrain__free(allocator, comm->parts, size, sizeof *comm->parts);
    dtrain__free(allocator, comm->base.world_ranks, size, sizeof *comm->base.world_ranks);
    dtrain__free(allocator, comm, 1, sizeof *comm);
}

/* The end of a rank. Operations in flight are dropped: nobody here waits for them any more, and
 * ranks that wait for this one learn that it left. */
static void dtrain__local_end(dtrain_world *world)
{
    while (world->locals) dtrain__local_release(world->locals);
}

/* A part outlives its rank's communicator while another member may still read its payloads. */
static void dtrain__sweep_retired(dtrain_world *world)
{
    dtrain__part **link = &world->retired;
    while (*link) {
        dtrain__part *part = *link;
        if (dtrain__load(&part->departed) < part->size) {
            link = &part->next;
            continue;
        }
        *link = part->next;
        for (int i = 0; i < DTRAIN_MAX_RANKS; i++) dtrain__shared_free(world, part->channels[i]);
        dtrain__shared_free(world, part->stage);
        dtrain__shared_free(world, part);
    }
}

static dtrain_result dtrain__local_destroy(dtrain_comm *base)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->world;
    dtrain__part *part = comm->parts[base->rank];
    part->next = world->retired;
    world->retired = part;
    for (int i = 0; i < base->size; i++) dtrain__fetch_add(&comm->parts[i]->departed, 1u);
    dtrain__local_release(comm);
    dtrain__sweep_retired(world);
    return DTRAIN_OK;
}

static dtrain_result dtrain__local_world_comm(dtrain_world *world, dtrain_comm **out);
static dtrain_result dtrain__local_split(dtrain_comm *parent, int color, int key,
                                         dtrain_comm **out);

static const dtrain_comm_ops dtrain__local_ops = {DTRAIN_COMM_ABI,          "local",
                                                  dtrain__local_world_comm, dtrain__local_start,
                                                  dtrain__local_test,       dtrain__local_wait,
                                                  dtrain__local_alloc,      dtrain__local_free,
                                                  dtrain__local_split,      dtrain__local_fail,
                                                  dtrain__local_destroy};

/* This rank's half of a communicator of `size` ranks; its part is made, the others' are not
 * known. */
static dtrain_result dtrain__local_make(dtrain_world *world, int size, int rank,
                                        dtrain__local_comm **out)
{
    const dtrain_allocator *allocator = &world->allocator;
    void *part = NULL;
    dtrain__sweep_retired(world);
    *out = (dtrain__local_comm *)dtrain__alloc(allocator, 1, sizeof **out, "a communicator");
    if (!*out) return DTRAIN_ERROR_MEMORY;
    dtrain__local_comm *comm = *out;
    comm->base.ops = &dtrain__local_ops;
    comm->base.world = world;
    comm->base.size = size;
    comm->base.rank = rank;
    comm->queue_end = &comm->queue;
    comm->next = world->locals;
    world->locals = comm;
    comm->base.world_ranks =
        (int *)dtrain__alloc(allocator, (size_t)size, sizeof(int), "a table of ranks");
    if (comm->base.world_ranks)
        comm->parts = (dtrain__part **)dtrain__alloc(allocator, (size_t)size, sizeof *comm->parts,
                                                     "a table of ranks");
    if (comm->parts && dtrain__local_more_works(comm) == DTRAIN_OK &&
        dtrain__shared_alloc(world, sizeof(dtrain__part), &part) == DTRAIN_OK) {
        comm->parts[rank] = (dtrain__part *)part;
        comm->parts[rank]->size = (uint32_t)size;
        return DTRAIN_OK;
    }
    dtrain__local_release(comm);
    *out = NULL;
    return DTRAIN_ERROR_MEMORY;
}

/* The first thing in each arena is the rank's part: nothing has to be exchanged, and zeroed memory
 * is a rank that has not started yet. */
static dtrain_result dtrain__local_world_comm(dtrain_world *world, dtrain_comm **out)
{
    dtrain__local_comm *comm;
    if (!world->control->arenas)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "dtrain_launch: %d ranks on %d host%s share no memory%s%s%s; the local communicator "
            "needs that, between hosts set comm_ops to one that crosses them: NCCL on GPUs",
            world->size, world->node_count, world->node_count == 1 ? "" : "s",
            world->no_region[0] ? " (" : "", world->no_region, world->no_region[0] ? ")" : "");
    DTRAIN__TRY(dtrain__local_make(world, world->size, world->rank, &comm));
    for (int i = 0; i < world->size; i++) {
        comm->base.world_ranks[i] = i;
        comm->parts[i] = (dtrain__part *)(void *)dtrain__arena(world->control, i);
    }
    *out = &comm->base;
    return DTRAIN_OK;
}

/* Ranks of `mine`'s color in the new order: by key, then by old rank. Writes their old ranks. */
static int dtrain__split_members(int64_t (*all)[2], int size, int mine, int *members)
{
    int count = 0;
    for (int i = 0; i < size; i++) {
        if (all[i][0] != all[mine][0]) continue;
        int at = count++;
        for (; at > 0 && all[members[at - 1]][1] > all[i][1]; at--) members[at] = members[at - 1];
        members[at] = i;
    }
    return count;
}

/* Two exchanges: colors and keys; then where each rank's part is, or that it has none, in which
 * case no rank gets a communicator: half a group would wait for ever. */
static dtrain_result dtrain__local_split(dtrain_comm *parent, int color, int key, dtrain_comm **out)
{
    int64_t mine[2] = {color < 0 ? -1 : color, key}, all[DTRAIN_MAX_RANKS][2],
            parts[DTRAIN_MAX_RANKS];
    int members[DTRAIN_MAX_RANKS], rank = 0, lacking = -1;
    dtrain__local_comm *comm = NULL;
    DTRAIN__TRY(dtrain__run(parent, DTRAIN_SPLIT, mine, all, 2, DTRAIN_I64, 0, -1, NULL));
    const int size = dtrain__split_members(all, parent->size, parent->rank, members);
    while (members[rank] != parent->rank) rank++;
    if (color >= 0) (void)dtrain__local_make(parent->world, size, rank, &comm);
    int64_t part = color < 0 ? 1 : comm ? (int64_t)(intptr_t)comm->parts[rank] : 0;
    const dtrain_result shared =
        dtrain__run(parent, DTRAIN_SPLIT, &part, parts, 1, DTRAIN_I64, 0, -1, NULL);
    for (int i = 0; i < parent->size && shared == DTRAIN_OK; i++)
        if (!parts[i]) lacking = i;
    if (shared != DTRAIN_OK || lacking >= 0) {
        if (comm) dtrain__shared_free(parent->world, comm->parts[rank]);
        if (comm) dtrain__local_release(comm);
        if (shared != DTRAIN_OK) return shared;
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "dtrain_comm_split: rank %d has no memory for its part",
                           parent->world_ranks[lacking]);
    }
    for (int i = 0; comm && i < size; i++) {
        comm->parts[i] = (dtrain__part *)(intptr_t)parts[members[i]];
        comm->base.world_ranks[i] = parent->world_ranks[members[i]];
    }
    *out = comm ? &comm->base : NULL;
    return DTRAIN_OK;
}

/* ---- [S26.4] Device buffers: the staged backend -----------------------------------------------
 *
 * Ranks that share a GPU, or have GPUs and no NCCL, meet in the local backend all the same: what is
 * in device memory is copied through page-locked shared memory on the way in and out.
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                                     local operation
 *
 * Memory from dtrain_comm_alloc is device memory with a twin in the shared arena, its image at the
 * same offsets; other device memory gets an image of its operation's own. Operations enter the
 * local backend in the order they were started, each when its copy has landed. */

typedef struct dtrain__twin {
    struct dtrain__twin *next;
    char *device, *image;
    size_t bytes;
} dtrain__twin;

enum { DTRAIN__COPYING_IN, DTRAIN__MEETING, DTRAIN__COPIED_OUT };

typedef struct dtrain__staged_work {
    dtrain_work base;
    struct dtrain__staged_work *next, *next_made; /* in the queue or idle; of all */
    dtrain_collective what;                       /* as called */
    dtrain_collective image;                      /* what the local backend does */
    dtrain_event *computed, *copied;
    dtrain_work *inner;
    char *stage[2]; /* images of buffers that have no twin: send, recv; they grow */
    size_t stage_bytes[2];
    int state; /* DTRAIN__COPYING_IN ... */
} dtrain__staged_work;

typedef struct dtrain__staged_comm {
    dtrain_comm base;
    struct dtrain__staged_comm *next; /* in the world's list */
    dtrain_comm *inner;               /* local */
    dtrain_device *device;
    dtrain_stream *stream; /* of copies */
    dtrain__twin *twins;
    dtrain__staged_work *queue; /* not copied out yet, in the order of their start */
    dtrain__staged_work *idle, *made;
    bool failed;
} dtrain__staged_comm;

/* Page-locked memory that every rank of the machine can read. */
static dtrain_result dtrain__image_alloc(dtrain__staged_comm *comm, size_t bytes, char **out)
{
    void *memory;
    DTRAIN__TRY(comm->inner->ops->alloc(comm->inner, bytes, &memory));
    const size_t pages = dtrain__round_up(bytes ? bytes : 1, dtrain__page_bytes());
    const dtrain_result result = comm->device->ops->host_register(comm->device, memory, pages);
    if (result == DTRAIN_OK) *out = (char *)memory;
    else comm->inner->ops->free(comm->inner, memory, bytes);
    return result;
}

static void dtrain__image_free(dtrain__staged_comm *comm, char *memory, size_t bytes)
{
    if (!memory) return;
    comm->device->ops->host_unregister(comm->device, memory);
    comm->inner->ops->free(comm->inner, memory, bytes);
}

static dtrain_result dtrain__staged_alloc(dtrain_comm *base, size_t bytes, void **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    const dtrain_allocator *allocator = &base->world->allocator;
    void *memory = NULL;
    dtrain__twin *twin =
        (dtrain__twin *)dtrain__alloc(allocator, 1, sizeof *twin, "communicator memory");
    if (!twin) return DTRAIN_ERROR_MEMORY;
    twin->bytes = bytes;
    dtrain_result result = comm->device->ops->alloc(comm->device, bytes, &memory);
    if (result == DTRAIN_OK) result = comm->device->ops->zero(comm->device, memory, bytes);
    if (result == DTRAIN_OK) result = dtrain__image_alloc(comm, bytes, &twin->image);
    if (result != DTRAIN_OK) {
        if (memory) comm->device->ops->free(comm->device, memory, bytes);
        dtrain__free(allocator, twin, 1, sizeof *twin);
        return result;
    }
    twin->device = (char *)memory;
    twin->next = comm->twins;
    comm->twins = twin;
    *out = memory;
    return DTRAIN_OK;
}

static void dtrain__staged_free(dtrain_comm *base, void *memory, size_t bytes)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    (void)bytes; /* the twin knows */
    for (dtrain__twin **link = &comm->twins; *link; link = &(*link)->next) {
        dtrain__twin *twin = *link;
        if (twin->device != memory) continue;
        *link = twin->next;
        comm->device->ops->free(comm->device, memory, twin->bytes);
        dtrain__image_free(comm, twin->image, twin->bytes);
        dtrain__free(&base->world->allocator, twin, 1, sizeof *twin);
        return;
    }
}

/* ---- Images of an operation's buffers ---------------------------------------------------------*/

static char *dtrain__twin_image(const dtrain__staged_comm *comm, const void *memory)
{
    const uintptr_t at = (uintptr_t)memory;
    for (const dtrain__twin *twin = comm->twins; twin; twin = twin->next) {
        const uintptr_t begin = (uintptr_t)twin->device;
        if (at >= begin && at - begin < twin->bytes) return twin->image + (at - begin);
    }
    return NULL;
}

/* Host memory is its own image. */
static dtrain_result dtrain__image_of(dtrain__staged_comm *comm, dtrain__staged_work *work,
                                      int which, const void *memory, size_t bytes, char **out)
{
    const bool on_device = memory && comm->device->ops->is_device_memory(comm->device, memory);
    *out = on_device ? dtrain__twin_image(comm, memory) : (char *)(uintptr_t)memory;
    if (*out || !memory) return DTRAIN_OK;
    if (bytes > work->stage_bytes[which]) {
        /* a copy out of the smaller one may still be queued */
        DTRAIN__TRY(comm->device->ops->synchronize(comm->device));
        dtrain__image_free(comm, work->stage[which], work->stage_bytes[which]);
        work->stage[which] = NULL;
        work->stage_bytes[which] = 0;
        DTRAIN__TRY(dtrain__image_alloc(comm, bytes, &work->stage[which]));
        work->stage_bytes[which] = bytes;
    }
    *out = work->stage[which];
    return DTRAIN_OK;
}

/* In place, the smaller buffer lies inside the larger one: so must its image. */
static dtrain_result dtrain__images(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_collective *what = &work->what;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const size_t send_bytes = dtrain__send_count(what, comm->base.size) * unit;
    const size_t recv_bytes = dtrain__recv_count(what, comm->base.size) * unit;
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    char *send = NULL, *recv = NULL;
    if (what->recv && from >= to && from + send_bytes <= to + recv_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, work, 1, what->recv, recv_bytes, &recv));
        send = recv ? recv + (from - to) : NULL;
    } else if (what->send && to >= from && to + recv_bytes <= from + send_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, work, 0, what->send, send_bytes, &send));
        recv = send ? send + (to - from) : NULL;
    } else {
        DTRAIN__TRY(dtrain__image_of(comm, work, 0, what->send, send_bytes, &send));
        DTRAIN__TRY(dtrain__image_of(comm, work, 1, what->recv, recv_bytes, &recv));
    }
    work->image = *what;
    work->image.send = send;
    work->image.recv = recv;
    return DTRAIN_OK;
}

/* ---- Progress ---------------------------------------------------------------------------------*/

static bool dtrain__staged_reads(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_RECV || what->kind == DTRAIN_BARRIER) return false;
    return what->kind != DTRAIN_BROADCAST || what->root == comm->rank;
}
static bool dtrain__staged_writes(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_SEND || what->kind == DTRAIN_BARRIER) return false;
    if (what->kind == DTRAIN_BROADCAST) return what->root != comm->rank;
    return what->kind != DTRAIN_REDUCE || what->root == comm->rank;
}

/* The copy stream takes its turn after everything that compute has queued so far. */
static dtrain_result dtrain__staged_copy_in(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    const size_t bytes =
        dtrain__send_count(&work->what, comm->base.size) * dtrain_dtype_bytes(work->what.dtype);
    DTRAIN__TRY(ops->event_record(comm->device, work->computed, NULL));
    DTRAIN__TRY(ops->event_wait(comm->device, work->computed, comm->stream));
    if (dtrain__staged_reads(&comm->base, &work->what) && work->image.send != work->what.send) {
        DTRAIN__TRY(ops->copy_async(comm->device, (void *)(uintptr_t)work->image.send,
                                    work->what.send, bytes, DTRAIN_COPY_DEVICE_TO_HOST,
                                    comm->stream));
        comm->base.info.staged_bytes += bytes;
    }
    return ops->event_record(comm->device, work->copied, comm->stream);
}

static dtrain_result dtrain__staged_copy_out(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    const size_t bytes =
        dtrain__recv_count(&work->what, comm->base.size) * dtrain_dtype_bytes(work->what.dtype);
    if (dtrain__staged_writes(&comm->base, &work->what) && work->image.recv != work->what.recv) {
        DTRAIN__TRY(ops->copy_async(comm->device, work->what.recv, work->image.recv, bytes,
                                    DTRAIN_COPY_HOST_TO_DEVICE, comm->stream));
        comm->base.info.staged_bytes += bytes;
    }
    return ops->event_record(comm->device, work->copied, comm->stream);
}

/* Nothing in flight will be finished. */
static dtrain_result dtrain__staged_fail(dtrain_comm *base, dtrain_result code, const char *text)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    comm->failed = true;
    comm->queue = NULL;
    base->in_flight = 0;
    return comm->inner->ops->fail(comm->inner, code, text);
}

static dtrain_result dtrain__staged_standing(dtrain__staged_comm *comm)
{
    return dtrain__staged_fail(&comm->base, DTRAIN_ERROR_PEER, "the communicator has failed");
}

/* Waits for the local operation (which knows whom to name when it takes too long) and starts the
 * way back; the work leaves the queue. */
static dtrain_result dtrain__staged_leave(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__staged_work **link = &comm->queue;
    dtrain_work *inner = work->inner;
    work->inner = NULL;
    DTRAIN__TRY(comm->inner->ops->wait(inner));
    DTRAIN__TRY(dtrain__staged_copy_out(comm, work));
    while (*link != work) link = &(*link)->next;
    *link = work->next;
    work->state = DTRAIN__COPIED_OUT;
    comm->base.in_flight--;
    return DTRAIN_OK;
}

/* As far as one operation can go without waiting; *entered says whether the next may follow. */
static dtrain_result dtrain__staged_move(dtrain__staged_comm *comm, dtrain__staged_work *work,
                                         bool *entered)
{
    bool done;
    if (work->state == DTRAIN__COPYING_IN) {
        *entered = false;
        DTRAIN__TRY(comm->device->ops->event_query(comm->device, work->copied, &done));
        if (!done) return DTRAIN_OK;
        DTRAIN__TRY(comm->inner->ops->start(comm->inner, &work->image, &work->inner));
        work->state = DTRAIN__MEETING;
    }
    *entered = true;
    DTRAIN__TRY(comm->inner->ops->test(work->inner, &done));
    return done ? dtrain__staged_leave(comm, work) : DTRAIN_OK;
}

/* The first error ends all operations. */
static dtrain_result dtrain__staged_advance(dtrain__staged_comm *comm)
{
    bool entered = true;
    for (dtrain__staged_work *work = comm->queue, *next; work && entered; work = next) {
        next = work->next;
        const dtrain_result result = dtrain__staged_move(comm, work, &entered);
        if (result != DTRAIN_OK)
            return dtrain__staged_fail(&comm->base, result, dtrain__error_text);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__staged_advance_all(dtrain__staged_comm *waiting)
{
    dtrain__staged_comm *comm = waiting->base.world->staged;
    for (; comm; comm = comm->next)
        if (comm != waiting && comm->queue) dtrain__staged_advance(comm); /* keeps its own error */
    return waiting->failed ? dtrain__staged_standing(waiting) : dtrain__staged_advance(waiting);
}

/* ---- Operations -------------------------------------------------------------------------------*/

static void dtrain__staged_work_destroy(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    for (int i = 0; i < 2; i++) dtrain__image_free(comm, work->stage[i], work->stage_bytes[i]);
    if (work->computed) ops->event_destroy(comm->device, work->computed);
    if (work->copied) ops->event_destroy(comm->device, work->copied);
    dtrain__free(&comm->base.world->allocator, work, 1, sizeof *work);
}

static dtrain__staged_work *dtrain__staged_work_make(dtrain__staged_comm *comm)
{
    const dtrain_device_ops *ops = comm->device->ops;
    dtrain__staged_work *work = (dtrain__staged_work *)dtrain__alloc(
        &comm->base.world->allocator, 1, sizeof *work, "an operation");
    if (!work) return NULL;
    work->base.comm = &comm->base;
    if (ops->event_create(comm->device, false, &work->computed) != DTRAIN_OK ||
        ops->event_create(comm->device, false, &work->copied) != DTRAIN_OK) {
        dtrain__staged_work_destroy(comm, work);
        return NULL;
    }
    work->next_made = comm->made;
    comm->made = work;
    return work;
}

static dtrain_result dtrain__staged_enqueue(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__staged_work **link = &comm->queue;
    work->next = NULL;
    work->inner = NULL;
    work->state = DTRAIN__COPYING_IN;
    DTRAIN__TRY(dtrain__images(comm, work));
    DTRAIN__TRY(dtrain__staged_copy_in(comm, work));
    while (*link) link = &(*link)->next;
    *link = work;
    comm->base.in_flight++;
    return DTRAIN_OK;
}

/* One rank: the result is what it sends. There is no handle to wait for: the copy, if any, is on
 * the compute stream. */
static dtrain_result dtrain__staged_alone(dtrain__staged_comm *comm, const dtrain_collective *what,
                                          dtrain_work **out)
{
    dtrain_device *device = comm->device;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    *out = NULL;
    if (what->send == what->recv || bytes == 0) return DTRAIN_OK;
    const bool from = device->ops->is_device_memory(device, what->send);
    const bool to = device->ops->is_device_memory(device, what->recv);
    if (!from && !to) memcpy(what->recv, what->send, bytes);
    if (!from && !to) return DTRAIN_OK;
    return device->ops->copy(device, what->recv, what->send, bytes,
                             from && to ? DTRAIN_COPY_DEVICE_TO_DEVICE
                             : from     ? DTRAIN_COPY_DEVICE_TO_HOST
                                        : DTRAIN_COPY_HOST_TO_DEVICE);
}

static dtrain_result dtrain__staged_start(dtrain_comm *base, const dtrain_collective *what,
                                          dtrain_work **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    if (comm->failed) return dtrain__staged_standing(comm);
    if (base->size == 1) return dtrain__staged_alone(comm, what, out);
    dtrain__staged_work *work = comm->idle ? comm->idle : dtrain__staged_work_make(comm);
    if (!work) return dtrain__staged_fail(base, DTRAIN_ERROR_MEMORY, dtrain__error_text);
    if (work == comm->idle) comm->idle = work->next;
    work->what = *what;
    const dtrain_result result = dtrain__staged_enqueue(comm, work);
    if (result != DTRAIN_OK) {
        work->next = comm->idle;
        comm->idle = work;
        return dtrain__staged_fail(base, result, dtrain__error_text);
    }
    base->outstanding++;
    *out = &work->base;
    return DTRAIN_OK;
}

static dtrain_result dtrain__staged_arrive(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__wait wait = dtrain__wait_begin();
    for (;;) {
        DTRAIN__TRY(dtrain__staged_advance_all(comm));
        if (work->state != DTRAIN__COPYING_IN) break;
        /* a dead rank is the local backend's to report */
        if (dtrain__wait_turn(comm->base.world, &wait) == DTRAIN_ERROR_TIMEOUT)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the device did not finish the work before a collective in %.1f s",
                               1e-9 * (double)comm->base.world->timeout_ns);
    }
    if (work->state == DTRAIN__MEETING) DTRAIN__TRY(dtrain__staged_leave(comm, work));
    return comm->device->ops->event_wait(comm->device, work->copied, NULL);
}

static dtrain_result dtrain__staged_wait(dtrain_work *base)
{
    dtrain__staged_work *work = (dtrain__staged_work *)base;
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base->comm;
    dtrain_result result = dtrain__staged_arrive(comm, work);
    if (result != DTRAIN_OK) {
        result = dtrain__staged_fail(&comm->base, result, dtrain__error_text);
        if (work->inner) comm->inner->ops->wait(work->inner); /* gives the handle back */
    }
    work->inner = NULL;
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
    return result;
}

static dtrain_result dtrain__staged_test(dtrain_work *base, bool *done)
{
    dtrain__staged_work *work = (dtrain__staged_work *)base;
    const dtrain_result result = dtrain__staged_advance_all((dtrain__staged_comm *)work->base.comm);
    *done = result != DTRAIN_OK || work->state == DTRAIN__COPIED_OUT;
    return result;
}

/* ---- Life -------------------------------------------------------------------------------------*/

static void dtrain__staged_release(dtrain__staged_comm *comm)
{
    dtrain_world *world = comm->base.world;
    const dtrain_allocator allocator = world->allocator;
    dtrain__staged_comm **link = &world->staged;
    comm->device->ops->synchronize(comm->device); /* copies into memory that goes away */
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->made) {
        dtrain__staged_work *work = comm->made;
        comm->made = work->next_made;
        dtrain__staged_work_destroy(comm, work);
    }
    while (comm->twins) dtrain__staged_free(&comm->base, comm->twins->device, comm->twins->bytes);
    if (comm->stream) comm->device->ops->stream_destroy(comm->device, comm->stream);
    dtrain__free(&allocator, comm, 1, sizeof *comm);
}

static dtrain_result dtrain__staged_destroy(dtrain_comm *base)
{
    dtrain_comm *inner = ((dtrain__staged_comm *)base)->inner;
    dtrain__staged_release((dtrain__staged_comm *)base);
    return inner->ops->destroy(inner);
}

static dtrain_result dtrain__staged_create(dtrain_world *world, dtrain_comm **out);
static dtrain_result dtrain__staged_split(dtrain_comm *base, int color, int key, dtrain_comm **out);

static const dtrain_comm_ops dtrain__staged_ops = {DTRAIN_COMM_ABI,       "staged",
                                                   dtrain__staged_create, dtrain__staged_start,
                                                   dtrain__staged_test,   dtrain__staged_wait,
                                                   dtrain__staged_alloc,  dtrain__staged_free,
                                                   dtrain__staged_split,  dtrain__staged_fail,
                                                   dtrain__staged_destroy};

static dtrain_result dtrain__staged_wrap(dtrain_world *world, dtrain_comm *inner, dtrain_comm **out)
{
    dtrain__staged_comm *comm =
        (dtrain__staged_comm *)dtrain__alloc(&world->allocator, 1, sizeof *comm, "a communicator");
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->base.ops = &dtrain__staged_ops;
    comm->base.world = world;
    comm->base.rank = inner->rank;
    comm->base.size = inner->size;
    comm->base.world_ranks = inner->world_ranks;
    comm->inner = inner;
    comm->device = world->device;
    comm->next = world->staged;
    world->staged = comm;
    const dtrain_result result =
        comm->device->ops->stream_create(comm->device, true, &comm->stream);
    if (result == DTRAIN_OK) *out = &comm->base;
    else dtrain__staged_release(comm);
    return result;
}

static dtrain_result dtrain__staged_create(dtrain_world *world, dtrain_comm **out)
{
    dtrain_comm *inner;
    DTRAIN__TRY(dtrain__local_world_comm(world, &inner));
    return dtrain__staged_wrap(world, inner, out);
}

static dtrain_result dtrain__staged_split(dtrain_comm *base, int color, int key, dtrain_comm **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    dtrain_comm *inner;
    DTRAIN__TRY(comm->inner->ops->split(comm->inner, color, key, &inner));
    *out = NULL;
    return inner ? dtrain__staged_wrap(base->world, inner, out) : DTRAIN_OK;
}

/* ---- [S26.5] Which backend --------------------------------------------------------------------
 *
 *     memory of the device is the host's        local, or the one that was asked for
 *     one device a rank, backend asked for      that one
 *     otherwise, on one machine                 staged, with a line in the log that says why
 */

/* Two ranks that sit on one device, as this node's index and the device's id tell; -1: none. */
static dtrain_result dtrain__shared_device(dtrain_world *world, int pair[2])
{
    typedef struct place {
        dtrain_device_info info;
        int node;
    } place;
    place mine;
    memset(&mine, 0, sizeof mine);
    pair[0] = pair[1] = -1;
    DTRAIN__TRY(world->device->ops->query(world->device, &mine.info));
    mine.node = world->node;
    place *all = (place *)dtrain__alloc(&world->allocator, (size_t)world->size, sizeof *all,
                                        "a table of devices");
    if (!all) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = dtrain_world_exchange(world, &mine, sizeof mine, all);
    for (int i = 0; result == DTRAIN_OK && i < world->size && pair[0] < 0; i++)
        for (int k = 0; k < i && pair[0] < 0; k++)
            if (all[i].node == all[k].node && strcmp(all[i].info.id, all[k].info.id) == 0)
                pair[0] = k, pair[1] = i;
    dtrain__free(&world->allocator, all, (size_t)world->size, sizeof *all);
    return result;
}

static dtrain_result dtrain__no_shared_memory(const dtrain_world *world, const char *advice)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_launch: %d ranks on %d hosts share no memory%s%s%s; %s", world->size,
                       world->node_count, world->no_region[0] ? " (" : "", world->no_region,
                       world->no_region[0] ? ")" : "", advice);
}

static dtrain_result dtrain__device_comm_create(dtrain_world *world)
{
    dtrain_device_info info;
    int pair[2] = {-1, -1};
    DTRAIN__TRY(dtrain__shared_device(world, pair));
    if (world->comm_ops && pair[0] < 0) return world->comm_ops->create(world, &world->comm);
    if (!world->control->arenas)
        return dtrain__no_shared_memory(
            world, pair[0] < 0 ? "give a communicator that crosses hosts: comm_ops, dtrain_nccl.h"
                               : "two ranks sit on one device: start fewer ranks on each host");
    if (world->rank == 0 && pair[0] >= 0) {
        DTRAIN__TRY(world->device->ops->query(world->device, &info));
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "ranks %d and %d share one device (%s of %u): collectives go through host "
                   "memory",
                   pair[0], pair[1], info.name, info.count);
    } else if (world->rank == 0 && world->size > 1) {
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "no comm_ops given: collectives between %d devices go through host memory; "
                   "dtrain_nccl.h has a faster way",
                   world->size);
    }
    return dtrain__staged_create(world, &world->comm);
}

/* The one place where it is decided which backend makes the world's communicator. */
static dtrain_result dtrain__world_comm_create(dtrain_world *world)
{
    if (world->comm_ops && world->comm_ops->abi != DTRAIN_COMM_ABI)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "communicator table has ABI %u, this dtrain.h expects %u: rebuild it",
                           (unsigned)world->comm_ops->abi, (unsigned)DTRAIN_COMM_ABI);
    if (!world->device->ops->host_memory) return dtrain__device_comm_create(world);
    if (world->comm_ops) return world->comm_ops->create(world, &world->comm);
    if (!world->control->arenas)
        return dtrain__no_shared_memory(world, "the local communicator works on one host, a "
                                               "transport between hosts is needed: NCCL on GPUs");
    return dtrain__local_world_comm(world, &world->comm);
}

/* At the end of the world, whatever is in flight. Communicators of other backends that the host has
 * not destroyed are the host's loss. */
static void dtrain__world_comm_end(dtrain_world *world)
{
    dtrain_comm *comm = world->comm;
    const bool given = comm && world->comm_ops && comm->ops == world->comm_ops;
    while (world->staged) dtrain__staged_release(world->staged); /* comm may be one of them */
    if (given) comm->ops->destroy(comm);
    dtrain__local_end(world);
}

/* ================================================================================================
 * [S27] Parameters, units, buckets
 *
 * Registration turns the host's array into three tables: what each entry is (dtrain__entry), which
 * gradients travel together (dtrain__bucket), and what all ranks must have in common (a line of
 * text per parameter, compared by hash).
 *
 *     params    0 wte    1 w1     2 b1     3 head          registration = forward order
 *     storage   0        1        2        0               head is an alias of wte
 *
 *     gradient region, one allocation, cut in buckets in launch order:
 *         | b1 ... pad | w1 ........ pad |  | wte .................... pad |
 *         |<---- bucket 0 (capped) ----->|  |<---------- bucket 1 -------->|
 *
 * Gradients become final in reverse forward order, so buckets are filled from the last parameter to
 * the first. A tied gradient is final when its last use, the first entry of the group, is done: it
 * travels at that entry's place. Every gradient starts on a cache line; padding is zero and stays
 * zero under the mean, so it costs bytes but never bits.
 * ==============================================================================================*/

typedef struct dtrain__entry {
    uint32_t bucket;       /* of its storage, or NONE */
    uint32_t unit;         /* storages: place of their unit, NONE when several units use them */
    uint32_t uses;         /* storages: trainable entries that share this gradient ... */
    uint32_t pending;      /* ... and how many of them are not yet marked in this backward */
    int64_t offset;        /* storages: first element within the bucket */
    float *place;          /* storages whose whole value the library owns */
    bool trainable, whole; /* whole: never sharded */
    bool marked;           /* ready was called in this backward */
    bool seen;             /* ready was called in this step */
    bool warned;           /* its missing gradient has been reported */
    bool lends_value, lends_grad; /* the library filled in the pointer and takes it away again */
} dtrain__entry;

typedef struct dtrain__bucket {
    uint32_t unit; /* place of the unit that it is, or NONE */
    bool trainable, sharded;
    bool slotted;  /* its values share memory with every other unit's */
    bool work;     /* its gradients are made in one place and kept, as shards, in another */
    int64_t count; /* elements, padding included */
    int64_t shard_first, shard_count; /* this rank's; of whole buckets everything */
    uint32_t first_param, last_param; /* all whose storage is in it lie between them */
    int64_t *cuts;                    /* (ranks + 1) ZERO3: first element of each rank's run */
    uint32_t uses, pending;           /* as in dtrain__entry, of all gradients inside */
    uint32_t stage, presence;         /* of its gradients on their way; of its gathered values */
    float *values, *grads;            /* (count) */
    float *value_shard, *grad_shard;  /* (shard_count) */
    uint16_t *low_values, *low_grads; /* (count) in param_dtype, reduce_dtype; NULL for fp32 */
} dtrain__bucket;

/* A frozen target freezes its aliases; a frozen alias only gives up its own contribution. */
static bool dtrain__is_trainable(const dtrain_param *p)
{
    return !((p->flags | p->storage->flags) & DTRAIN_PARAM_FROZEN);
}

static int dtrain__param_dims(const dtrain_param *p)
{
    int dims = 0;
    while (dims < 4 && p->shape[dims]) dims++;
    return dims;
}

/* ---- Hashes -----------------------------------------------------------------------------------*/

#define DTRAIN__FNV_BASIS 0xcbf29ce484222325u

/* FNV-1a (Fowler, Noll, Vo), 64 bits. */
static uint64_t dtrain__fnv1a(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* ---- Checking what the host registered --------------------------------------------------------*/

DTRAIN__PRINTF(3, 4)
static dtrain_result dtrain__param_fail(const dtrain_param *p, size_t index, const char *format,
                                        ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_strategy_create: parameter %zu (\"%.100s\"): %s", index,
                       p->name ? p->name : "", text);
}

/* Makes count and shape agree; either may have been left to the other. */
static dtrain_result dtrain__resolve_shape(dtrain_param *p, size_t index)
{
    const int dims = dtrain__param_dims(p);
    size_t product = 1, bytes;
    if (p->count < 0) return dtrain__param_fail(p, index, "count is %lld", (long long)p->count);
    for (int d = 0; d < 4; d++) {
        if (p->shape[d] < 0 || (d >= dims && p->shape[d]))
            return dtrain__param_fail(p, index,
                                      "shape (%lld, %lld, %lld, %lld) must be positive sizes "
                                      "followed by zeros",
                                      (long long)p->shape[0], (long long)p->shape[1],
                                      (long long)p->shape[2], (long long)p->shape[3]);
        if (d < dims && !dtrain__size_mul(product, (size_t)p->shape[d], &product))
            return dtrain__param_fail(p, index, "the product of its shape overflows");
    }
    if (dims == 0) p->shape[0] = p->count;
    else if (p->count == 0 && product <= INT64_MAX) p->count = (int64_t)product;
    if (dims && (size_t)p->count != product)
        return dtrain__param_fail(p, index, "count is %lld, its shape has %zu elements",
                                  (long long)p->count, product);
    if (!dtrain__size_mul((size_t)p->count, sizeof(float), &bytes) || bytes > SIZE_MAX / 4)
        return dtrain__param_fail(p, index, "%lld elements are more than memory can hold",
                                  (long long)p->count);
    return DTRAIN_OK;
}

/* The storage of an alias is that of an earlier entry: chains end, and are resolved in one
 * pass. An alias without a shape takes its target's. */
static dtrain_result dtrain__resolve_alias(dtrain_param *params, size_t index)
{
    dtrain_param *p = &params[index];
    const uintptr_t distance = (uintptr_t)p->alias_of - (uintptr_t)params;
    if (distance % sizeof *p || distance / sizeof *p >= index)
        return dtrain__param_fail(p, index,
                                  "alias_of must point to an earlier entry of the same array");
    dtrain_param *storage = p->alias_of->storage;
    if (p->count == 0 && p->shape[0] == 0) {
        p->count = storage->count;
        memcpy(p->shape, storage->shape, sizeof p->shape);
    }
    if (p->count != storage->count)
        return dtrain__param_fail(
            p, index, "it has %lld elements, \"%.100s\" that it is an alias of has %lld",
            (long long)p->count, storage->name, (long long)storage->count);
    if ((p->value && p->value != storage->value) || (p->grad && p->grad != storage->grad))
        return dtrain__param_fail(p, index,
                                  "an alias shares value and grad of its target: leave its "
                                  "own pointers NULL");
    p->storage = storage;
    return DTRAIN_OK;
}

/* Quadratic, once, over 64-bit hashes: a thousand parameters take a millisecond. */
static dtrain_result dtrain__check_names(const dtrain_param *params, size_t count, uint64_t *hashes)
{
    for (size_t i = 0; i < count; i++) {
        hashes[i] = dtrain__fnv1a(DTRAIN__FNV_BASIS, params[i].name, strlen(params[i].name));
        for (size_t k = 0; k < i; k++)
            if (hashes[k] == hashes[i] && strcmp(params[k].name, params[i].name) == 0)
                return dtrain__param_fail(&params[i], i, "parameter %zu has the same name", k);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__resolve_params(dtrain_param *params, size_t count, uint64_t *hashes)
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        dtrain_param *p = &params[i];
        if (!p->name || !*p->name) return dtrain__param_fail(p, i, "it needs a name");
        if (p->flags & ~(DTRAIN_PARAM_FROZEN | DTRAIN_PARAM_NO_DECAY))
            return dtrain__param_fail(p, i, "flags 0x%x has bits that mean nothing",
                                      (unsigned)p->flags);
        if (p->init > DTRAIN_INIT_UNIFORM)
            return dtrain__param_fail(p, i, "init %u is not a dtrain_init", (unsigned)p->init);
        DTRAIN__TRY(dtrain__resolve_shape(p, i));
        p->storage = p;
        p->index = (uint32_t)i;
        p->pending_uses = 0;
        p->grad_written = false;
        if (p->alias_of) DTRAIN__TRY(dtrain__resolve_alias(params, i));
        const size_t bytes = dtrain__round_up((size_t)p->count * sizeof(float), DTRAIN__CACHE_LINE);
        if (!dtrain__size_add(total, bytes, &total) || total > SIZE_MAX / 4)
            return dtrain__param_fail(p, i, "with it the model is larger than memory can hold");
    }
    return dtrain__check_names(params, count, hashes);
}

/* ---- Ranks agree ------------------------------------------------------------------------------
 *
 * A call that fails on one rank only would leave the others waiting in its next collective. Calls
 * that do local work in between therefore bring its outcome here: all ranks leave with success, or
 * all with an error, and the communicator is as good as before. */

typedef struct dtrain__verdict {
    int32_t code;
    char text[sizeof dtrain__error_text];
} dtrain__verdict;

static dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine)
{
    dtrain__verdict verdict;
    int32_t first = mine == DTRAIN_OK ? INT32_MAX : (int32_t)dtrain_comm_rank(comm);
    if (dtrain_comm_size(comm) == 1) return mine;
    memset(&verdict, 0, sizeof verdict);
    verdict.code = (int32_t)mine;
    snprintf(verdict.text, sizeof verdict.text, "%s", dtrain__bare(dtrain__error_text));
    DTRAIN__TRY(dtrain_all_reduce(comm, &first, &first, 1, DTRAIN_I32, DTRAIN_MIN, NULL));
    if (first == INT32_MAX) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_broadcast(comm, &verdict, sizeof verdict / 4, DTRAIN_I32, (int)first, NULL));
    if (mine != DTRAIN_OK) return mine; /* one's own sentence is still the last error */
    return dtrain_fail((dtrain_result)verdict.code, "rank %d failed: %s",
                       dtrain_comm_world_rank(comm, (int)first), verdict.text);
}

/* One small all-reduce without memory for all ranks' values: since ~ reverses the order, the
 * maximum of the complements is the complement of the minimum. */
static dtrain_result dtrain__is_common(dtrain_comm *comm, uint64_t value, bool *common)
{
    int64_t pair[2] = {(int64_t)value, (int64_t)~value};
    *common = true;
    if (dtrain_comm_size(comm) == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_reduce(comm, pair, pair, 2, DTRAIN_I64, DTRAIN_MAX, NULL));
    *common = pair[0] == ~pair[1];
    return DTRAIN_OK;
}

/* Of values that differ: the first rank that has what most have (a tie goes to the lower
 * rank), and the first that has something else. gathered (size) is scratch. */
static dtrain_result dtrain__odd_rank(dtrain_comm *comm, uint64_t value, int64_t *gathered,
                                      int *usual, int *odd)
{
    const int size = dtrain_comm_size(comm);
    const int64_t mine = (int64_t)value;
    int most = 0;
    DTRAIN__TRY(dtrain_all_gather(comm, &mine, gathered, 1, DTRAIN_I64, NULL));
    *usual = *odd = 0;
    for (int i = 0; i < size; i++) {
        int same = 0;
        for (int k = 0; k < size; k++) same += gathered[k] == gathered[i];
        if (same > most) *usual = i;
        if (same > most) most = same;
    }
    while (*odd < size - 1 && gathered[*odd] == gathered[*usual]) ++*odd;
    return DTRAIN_OK;
}

/* ---- All ranks must have registered the same --------------------------------------------------*/

typedef struct dtrain__registration {
    const dtrain_param *params;
    size_t count;
    char settings[340]; /* of the strategy */
} dtrain__registration;

#define DTRAIN__LINE_BYTES 384

/* Line 0 is the settings, line i + 1 parameter i. What is compared is what is shown. */
static void dtrain__registration_line(const dtrain__registration *mine, size_t line, char *text)
{
    const size_t room = DTRAIN__LINE_BYTES;
    char origin[64];
    memset(text, 0, room);
    if (line == 0 || line > mine->count) {
        if (line == 0) snprintf(text, room, "%s", mine->settings);
        else snprintf(text, room, "only %zu parameters", mine->count);
        return;
    }
    const dtrain_param *p = &mine->params[line - 1];
    if (p->alias_of)
        snprintf(origin, sizeof origin, "alias of %zu", (size_t)(p->alias_of - mine->params));
    else if (p->value) snprintf(origin, sizeof origin, "values from the host");
    else
        snprintf(origin, sizeof origin, "init %u scale %.9g", (unsigned)p->init,
                 (double)p->init_scale);
    snprintf(text, room, "\"%.150s\" shape (%lld, %lld, %lld, %lld) unit %u flags 0x%x, %s",
             p->name, (long long)p->shape[0], (long long)p->shape[1], (long long)p->shape[2],
             (long long)p->shape[3], (unsigned)p->unit, (unsigned)p->flags, origin);
}

static uint64_t dtrain__registration_hash(const dtrain__registration *mine, size_t line)
{
    char text[DTRAIN__LINE_BYTES];
    dtrain__registration_line(mine, line, text);
    const uint64_t hash = dtrain__fnv1a(DTRAIN__FNV_BASIS, text, strlen(text));
    if (line == 0 || line > mine->count) return hash;
    const char *name = mine->params[line - 1].name; /* the line may have cut it */
    return dtrain__fnv1a(hash, name, strlen(name));
}

static dtrain_result dtrain__registration_differs(dtrain_comm *comm,
                                                  const dtrain__registration *mine, size_t line,
                                                  int64_t *gathered)
{
    char usual_text[DTRAIN__LINE_BYTES], odd_text[DTRAIN__LINE_BYTES], what[48] = "the desc";
    int usual, odd;
    dtrain__registration_line(mine, line, usual_text);
    dtrain__registration_line(mine, line, odd_text);
    DTRAIN__TRY(
        dtrain__odd_rank(comm, dtrain__registration_hash(mine, line), gathered, &usual, &odd));
    DTRAIN__TRY(
        dtrain_broadcast(comm, usual_text, DTRAIN__LINE_BYTES / 4, DTRAIN_I32, usual, NULL));
    DTRAIN__TRY(dtrain_broadcast(comm, odd_text, DTRAIN__LINE_BYTES / 4, DTRAIN_I32, odd, NULL));
    if (line) snprintf(what, sizeof what, "parameter %zu", line - 1);
    return dtrain_fail(
        DTRAIN_ERROR_MISMATCH,
        "dtrain_strategy_create: %s differs: rank %d has %s; rank %d has %s; register "
        "the same on every rank",
        what, dtrain_comm_world_rank(comm, usual), usual_text, dtrain_comm_world_rank(comm, odd),
        odd_text);
}

/* One hash of everything when all is well; otherwise line by line, up to the first that
 * differs. The outcome of each step is the same on all ranks, so they stay in step, and no
 * memory is needed. */
static dtrain_result
dtrain__registration_compare(dtrain_comm *comm, const dtrain__registration *mine, int64_t *gathered)
{
    int64_t lines = (int64_t)mine->count + 1;
    uint64_t all = DTRAIN__FNV_BASIS;
    bool common;
    for (size_t line = 0; line <= mine->count; line++) {
        const uint64_t hash = dtrain__registration_hash(mine, line);
        all = dtrain__fnv1a(all, &hash, sizeof hash);
    }
    DTRAIN__TRY(dtrain__is_common(comm, all, &common));
    if (common) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_reduce(comm, &lines, &lines, 1, DTRAIN_I64, DTRAIN_MAX, NULL));
    for (size_t line = 0; line < (size_t)lines; line++) {
        DTRAIN__TRY(dtrain__is_common(comm, dtrain__registration_hash(mine, line), &common));
        if (!common) return dtrain__registration_differs(comm, mine, line, gathered);
    }
    return dtrain_fail(DTRAIN_ERROR_INTERNAL,
                       "dtrain_strategy_create: registrations differ, but no line does");
}

/* ---- The layout -------------------------------------------------------------------------------
 *
 * Which parameters travel together, and who keeps what of them: a pure function of what all ranks
 * have in common. They need not exchange it, and a plan or a simulator can make one without ranks.
 *
 * What a kind shards decides the rest:                                   state  grads  params
 *     DDP: buckets by size, last parameter first, everything whole       -      -      -
 *     ZERO1: the same buckets, each cut in one slice a rank              1/N    -      -
 *     SHARD_GRAD_OP and below: a bucket is a unit; its gradients are     1/N    1/N    -
 *     made in one of two buffers that take turns ("work"), and what
 *     is reduced of them is kept apart, in shards
 *     FULL_SHARD, HYBRID_SHARD: values are gathered into two more        1/N    1/N    1/N
 *     buffers that take turns ("slots"); unit u uses number u % 2, so
 *     that its addresses are the same whenever it is there
 *     ZERO3: slices end where tensors end                                owner  owner  owner
 *
 *     unit u's bucket | tensor a ..... pad | tensor b .... pad | c | pad |
 *     FULL_SHARD      |<-- rank 0 -->|<-- rank 1 -->|<-- rank 2 -------->|     equal slices
 *     ZERO3           |<----- rank 0 ----->|<----- rank 2 ---->|<rank 1->|     tensors by owner
 *
 * Buckets are launched in their order: units from the last to the first, then what several units
 * share, then what is whole. Frozen parameters of sharded units have buckets of their own, which
 * are gathered and never reduced. */

typedef struct dtrain__traits {
    uint32_t kind;
    const char *name;
    bool state, grads, params; /* what it shards */
    bool owners;               /* slices are whole tensors */
} dtrain__traits;

static const dtrain__traits dtrain__kinds_of_strategy[] = {
    {DTRAIN_DDP, "DTRAIN_DDP", false, false, false, false},
    {DTRAIN_ZERO1, "DTRAIN_ZERO1", true, false, false, false},
    {DTRAIN_SHARD_GRAD_OP, "DTRAIN_SHARD_GRAD_OP", true, true, false, false},
    {DTRAIN_FULL_SHARD, "DTRAIN_FULL_SHARD", true, true, true, false},
    {DTRAIN_ZERO3, "DTRAIN_ZERO3", true, true, true, true},
    {DTRAIN_HYBRID_SHARD, "DTRAIN_HYBRID_SHARD", true, true, true, false},
};

static const dtrain__traits *dtrain__traits_of(uint32_t kind)
{
    const size_t count = sizeof dtrain__kinds_of_strategy / sizeof dtrain__kinds_of_strategy[0];
    for (size_t i = 0; i < count; i++)
        if (dtrain__kinds_of_strategy[i].kind == kind) return &dtrain__kinds_of_strategy[i];
    return NULL;
}

#define DTRAIN__NONE UINT32_MAX

/* In registration order of their first parameters. */
typedef struct dtrain__unit {
    uint32_t id;                /* dtrain_param.unit */
    uint32_t trainable, frozen; /* its buckets, or NONE */
    bool kept;                  /* has memory of its own: stays gathered until publish */
} dtrain__unit;

enum { DTRAIN__VALUES, DTRAIN__GRADS, DTRAIN__BUFFERS, DTRAIN__HOST, DTRAIN__CLASSES };

typedef struct dtrain__layout {
    const dtrain_param *params;
    size_t count;
    const dtrain_strategy_desc *desc; /* resolved */
    const dtrain__traits *traits;
    int ranks, rank;         /* of those that share one copy of the model */
    bool shards;             /* a kind that shards, and more than one rank or a shard offloaded */
    bool slots;              /* values are gathered */
    bool work;               /* gradients of a unit are made in alternating buffers */
    bool host_values;        /* value shards are in host memory */
    bool host_grads;         /* gradient shards are in host memory */
    float *landing[2];       /* host memory for what is added to them, of the longest shard */
    dtrain__entry *entries;  /* (count) */
    dtrain__bucket *buckets; /* (count), bucket_count in use */
    dtrain__unit *units;     /* (count), unit_count in use */
    uint32_t *owners;        /* (count) ZERO3: of each storage */
    int64_t *cuts;           /* (count, ranks + 1) ZERO3: where each rank's run begins */
    size_t bucket_count, unit_count;
    dtrain__unit shared;           /* the buckets of what several units use */
    float *work_grads[2];          /* where units' gradients are made, in turns */
    char *memory[DTRAIN__CLASSES]; /* NULL while bytes are only counted */
    size_t bytes[DTRAIN__CLASSES];
} dtrain__layout;

static int64_t dtrain__padded(int64_t count)
{
    return (int64_t)(dtrain__round_up((size_t)count * sizeof(float), DTRAIN__CACHE_LINE) /
                     sizeof(float));
}

/* Place of a unit in the order; a new one gets the next place. */
static uint32_t dtrain__unit_index(dtrain__layout *layout, uint32_t id)
{
    for (size_t i = layout->unit_count; i-- > 0;)
        if (layout->units[i].id == id) return (uint32_t)i;
    dtrain__unit *unit = &layout->units[layout->unit_count];
    unit->id = id;
    unit->trainable = unit->frozen = DTRAIN__NONE;
    unit->kept = !layout->desc->reshard_after_forward;
    for (uint32_t i = 0; i < layout->desc->kept_unit_count; i++)
        if (layout->desc->kept_units[i] == id) unit->kept = true;
    return (uint32_t)layout->unit_count++;
}

/* Which unit each storage is part of, NONE for one that several use; who is trainable. */
static void dtrain__lay_units(dtrain__layout *layout)
{
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i], *storage = &layout->entries[p->storage->index];
        const uint32_t unit = dtrain__unit_index(layout, p->unit);
        entry->trainable = dtrain__is_trainable(p);
        entry->bucket = DTRAIN__NONE;
        if (p->storage == p) entry->unit = unit;
        else if (storage->unit != unit) storage->unit = DTRAIN__NONE;
        entry->whole = !layout->shards || p->count < layout->desc->whole_below;
    }
}

/* The largest tensors first, each to the rank that has least: greedy, at most 4/3 of the best
 * balance (Graham, "Bounds on multiprocessing timing anomalies", 1969). order (count) and
 * load (ranks) are scratch. */
static void dtrain__lay_owners(dtrain__layout *layout, uint32_t *order, int64_t *load)
{
    size_t count = 0;
    memset(load, 0, (size_t)layout->ranks * sizeof *load);
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        size_t at = count;
        if (p->storage != p || layout->entries[i].whole) continue;
        for (; at > 0 && layout->params[order[at - 1]].count < p->count; at--)
            order[at] = order[at - 1];
        order[at] = (uint32_t)i;
        count++;
    }
    for (size_t k = 0; k < count; k++) {
        int least = 0;
        for (int r = 1; r < layout->ranks; r++)
            if (load[r] < load[least]) least = r;
        layout->owners[order[k]] = (uint32_t)least;
        load[least] += dtrain__padded(layout->params[order[k]].count);
    }
}

/* first_run: the first rank that owns something of it. */
static dtrain__bucket *dtrain__bucket_new(dtrain__layout *layout, uint32_t unit, bool trainable,
                                          bool sharded, int first_run)
{
    dtrain__bucket *bucket = &layout->buckets[layout->bucket_count];
    memset(bucket, 0, sizeof *bucket);
    bucket->unit = unit;
    bucket->trainable = trainable;
    bucket->sharded = sharded;
    bucket->first_param = DTRAIN__NONE;
    if (sharded && layout->cuts)
        bucket->cuts = layout->cuts + layout->bucket_count * ((size_t)layout->ranks + 1);
    for (int r = 0; bucket->cuts && r <= first_run; r++) bucket->cuts[r] = 0;
    layout->bucket_count++;
    return bucket;
}

static void dtrain__bucket_add(dtrain__layout *layout, dtrain__bucket *bucket, size_t index)
{
    dtrain__entry *entry = &layout->entries[index];
    entry->bucket = (uint32_t)(bucket - layout->buckets);
    entry->offset = bucket->count;
    bucket->count += dtrain__padded(layout->params[index].count);
}

/* Slices of equal length, or cuts where owners change: who keeps what. */
static void dtrain__bucket_cut(const dtrain__layout *layout, dtrain__bucket *bucket)
{
    const int64_t ranks = layout->ranks;
    bucket->shard_first = 0;
    bucket->shard_count = bucket->count;
    if (!bucket->sharded) return;
    if (bucket->cuts) {
        bucket->shard_first = bucket->cuts[layout->rank];
        bucket->shard_count = bucket->cuts[layout->rank + 1] - bucket->shard_first;
        return;
    }
    bucket->shard_count = dtrain__padded((bucket->count + ranks - 1) / ranks);
    bucket->count = bucket->shard_count * ranks;
    bucket->shard_first = bucket->shard_count * layout->rank;
}

/* The bucket of a unit's trainable or frozen tensors (unit NONE: of those that several units use);
 * NONE if there are none. */
static uint32_t dtrain__lay_bucket(dtrain__layout *layout, uint32_t unit, bool trainable)
{
    const int runs = layout->owners ? layout->ranks : 1;
    dtrain__bucket *bucket = NULL;
    for (int r = 0; r < runs; r++) {
        if (bucket && bucket->cuts) bucket->cuts[r] = bucket->count;
        for (size_t i = 0; i < layout->count; i++) {
            const dtrain__entry *entry = &layout->entries[i];
            if (layout->params[i].storage != &layout->params[i] || entry->whole) continue;
            if (entry->unit != unit || entry->trainable != trainable) continue;
            if (layout->owners && layout->owners[i] != (uint32_t)r) continue;
            if (!bucket) bucket = dtrain__bucket_new(layout, unit, trainable, true, r);
            dtrain__bucket_add(layout, bucket, i);
        }
    }
    if (!bucket) return DTRAIN__NONE;
    if (bucket->cuts) bucket->cuts[runs] = bucket->count;
    dtrain__bucket_cut(layout, bucket);
    return (uint32_t)(bucket - layout->buckets);
}

/* Where a unit is a bucket. */
static void dtrain__lay_unit_buckets(dtrain__layout *layout)
{
    for (size_t u = layout->unit_count; u-- > 0;) {
        dtrain__unit *unit = &layout->units[u];
        unit->trainable = dtrain__lay_bucket(layout, (uint32_t)u, true);
        if (layout->slots) unit->frozen = dtrain__lay_bucket(layout, (uint32_t)u, false);
    }
    layout->shared.trainable = dtrain__lay_bucket(layout, DTRAIN__NONE, true);
    if (layout->slots) layout->shared.frozen = dtrain__lay_bucket(layout, DTRAIN__NONE, false);
}

/* Last parameter first, up to a cap; a bucket exceeds it only when a single gradient does. A tied
 * gradient is final when its last use, the first entry of the group, is done: it travels at that
 * entry's place. */
static void dtrain__lay_size_buckets(dtrain__layout *layout, bool sharded)
{
    const size_t first = layout->bucket_count;
    dtrain__bucket *last = NULL;
    for (size_t i = layout->count; i-- > 0;) {
        const dtrain__entry *entry = &layout->entries[i];
        if (layout->params[i].storage != &layout->params[i] || !entry->trainable) continue;
        if (entry->whole == sharded) continue;
        const size_t cap = layout->bucket_count == first + 1 ? layout->desc->first_bucket_bytes
                                                             : layout->desc->bucket_bytes;
        const size_t limit = cap / sizeof(float);
        const int64_t length = dtrain__padded(layout->params[i].count);
        if (!last || (last->count && (size_t)(last->count + length) > limit)) {
            if (last) dtrain__bucket_cut(layout, last);
            last = dtrain__bucket_new(layout, DTRAIN__NONE, true, sharded, 0);
        }
        dtrain__bucket_add(layout, last, i);
    }
    if (last) dtrain__bucket_cut(layout, last);
}

/* Fills entries, buckets and units, all zeroed by the caller. */
static void dtrain__lay_out(dtrain__layout *layout)
{
    layout->shared.trainable = layout->shared.frozen = DTRAIN__NONE;
    dtrain__lay_units(layout);
    if (layout->owners) /* cuts are scratch until they are filled */
        dtrain__lay_owners(layout, (uint32_t *)(void *)(layout->cuts + layout->ranks),
                           layout->cuts);
    if (layout->traits->grads) dtrain__lay_unit_buckets(layout);
    else dtrain__lay_size_buckets(layout, true);
    dtrain__lay_size_buckets(layout, false);
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i], *storage = &layout->entries[p->storage->index];
        entry->bucket = storage->bucket;
        if (entry->bucket == DTRAIN__NONE) continue;
        dtrain__bucket *bucket = &layout->buckets[entry->bucket];
        if (i < bucket->first_param) bucket->first_param = (uint32_t)i;
        bucket->last_param = (uint32_t)i;
        if (!entry->trainable) continue;
        storage->uses++;
        bucket->uses++;
    }
}

/* A tensor in no sharded bucket: every rank has all of it. */
static bool dtrain__value_is_whole(const dtrain__layout *layout, const dtrain__entry *entry)
{
    return entry->bucket == DTRAIN__NONE || !layout->buckets[entry->bucket].sharded;
}

/* ---- Memory of a layout ------------------------------------------------------------------------
 *
 * Three blocks: values, gradients, buffers; and a fourth in host memory for what is offloaded. Laid
 * out twice by the same code: counted, then, when the blocks are there, cut into pieces. */

static void *dtrain__carve(dtrain__layout *layout, int block, int64_t count, size_t unit_bytes)
{
    char *memory = layout->memory[block];
    void *piece = memory ? memory + layout->bytes[block] : NULL;
    layout->bytes[block] += dtrain__round_up((size_t)count * unit_bytes, DTRAIN__CACHE_LINE);
    return piece;
}

static float *dtrain__after(float *at, int64_t count) { return at ? at + count : NULL; }
static uint16_t *dtrain__low_after(uint16_t *at, int64_t count) { return at ? at + count : NULL; }

static int64_t dtrain__bucket_length(const dtrain__layout *layout, uint32_t bucket)
{
    return bucket == DTRAIN__NONE ? 0 : layout->buckets[bucket].count;
}

/* The buffers that take turns, one pair of each sort. */
typedef struct dtrain__turns {
    float *values[2], *grads[2];
    uint16_t *low_values[2], *low_grads[2];
} dtrain__turns;

static dtrain__turns dtrain__lay_turns(dtrain__layout *layout)
{
    const bool low_values = layout->desc->param_dtype != DTRAIN_F32;
    const bool low_grads = layout->desc->reduce_dtype != DTRAIN_F32;
    int64_t values = 0, grads = 0;
    dtrain__turns turns;
    memset(&turns, 0, sizeof turns);
    for (size_t u = 0; u < layout->unit_count; u++) {
        const dtrain__unit *unit = &layout->units[u];
        const int64_t trainable = dtrain__bucket_length(layout, unit->trainable);
        const int64_t both = trainable + dtrain__bucket_length(layout, unit->frozen);
        if (layout->slots && !unit->kept && both > values) values = both;
        if (layout->work && trainable > grads) grads = trainable;
    }
    for (int i = 0; i < 2; i++) {
        turns.values[i] = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, values, 4);
        turns.grads[i] = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, grads, 4);
        if (low_values)
            turns.low_values[i] = (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, values, 2);
        if (low_grads)
            turns.low_grads[i] = (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, grads, 2);
    }
    return turns;
}

static void dtrain__lay_values(dtrain__layout *layout, dtrain__bucket *bucket,
                               const dtrain__turns *turns)
{
    const bool low = layout->desc->param_dtype != DTRAIN_F32;
    if (!bucket->sharded) return;
    if (!layout->slots) {
        bucket->values = (float *)dtrain__carve(layout, DTRAIN__VALUES, bucket->count, 4);
        bucket->value_shard = dtrain__after(bucket->values, bucket->shard_first);
        return;
    }
    bucket->value_shard = (float *)dtrain__carve(
        layout, layout->host_values ? DTRAIN__HOST : DTRAIN__VALUES, bucket->shard_count, 4);
    if (bucket->unit == DTRAIN__NONE || layout->units[bucket->unit].kept) {
        bucket->values = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 4);
        if (low)
            bucket->low_values =
                (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 2);
        return;
    }
    const dtrain__unit *unit = &layout->units[bucket->unit];
    const int64_t first = bucket->trainable ? 0 : dtrain__bucket_length(layout, unit->trainable);
    bucket->slotted = true;
    bucket->values = dtrain__after(turns->values[bucket->unit & 1], first);
    bucket->low_values = dtrain__low_after(turns->low_values[bucket->unit & 1], first);
}

static void dtrain__lay_grads(dtrain__layout *layout, dtrain__bucket *bucket,
                              const dtrain__turns *turns)
{
    const bool low = layout->desc->reduce_dtype != DTRAIN_F32;
    const bool work = layout->work && bucket->sharded;
    if (!bucket->trainable) return;
    if (work && bucket->unit != DTRAIN__NONE) {
        bucket->grads = turns->grads[bucket->unit & 1];
        bucket->low_grads = turns->low_grads[bucket->unit & 1];
    } else {
        const int block = work ? DTRAIN__BUFFERS : DTRAIN__GRADS;
        bucket->grads = (float *)dtrain__carve(layout, block, bucket->count, 4);
        if (low)
            bucket->low_grads =
                (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 2);
    }
    bucket->work = work;
    bucket->grad_shard =
        work ? (float *)dtrain__carve(layout, layout->host_grads ? DTRAIN__HOST : DTRAIN__GRADS,
                                      bucket->shard_count, 4)
             : dtrain__after(bucket->grads, bucket->shard_first);
}

static void dtrain__lay_landings(dtrain__layout *layout)
{
    int64_t longest = 0;
    for (size_t b = 0; b < layout->bucket_count && layout->host_grads; b++)
        if (layout->buckets[b].work) longest = dtrain__max(longest, layout->buckets[b].shard_count);
    for (int i = 0; i < 2; i++)
        layout->landing[i] = (float *)dtrain__carve(layout, DTRAIN__HOST, longest, 4);
}

/* Whole values the library owns lie in registration order behind those of buckets. */
static void dtrain__lay_memory(dtrain__layout *layout)
{
    for (int block = 0; block < DTRAIN__CLASSES; block++) layout->bytes[block] = 0;
    const dtrain__turns turns = dtrain__lay_turns(layout);
    memcpy(layout->work_grads, turns.grads, sizeof turns.grads);
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__lay_values(layout, &layout->buckets[b], &turns);
        dtrain__lay_grads(layout, &layout->buckets[b], &turns);
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i];
        if (p->storage != p || !dtrain__value_is_whole(layout, entry)) continue;
        if (!p->value || entry->lends_value)
            entry->place = (float *)dtrain__carve(layout, DTRAIN__VALUES, p->count, 4);
    }
    dtrain__lay_landings(layout);
}

/* The part of storage i that this rank updates; false if there is none. */
static bool dtrain__piece(const dtrain__layout *layout, size_t i, int64_t *offset, int64_t *count)
{
    const dtrain_param *p = &layout->params[i];
    const dtrain__entry *entry = &layout->entries[i];
    *offset = 0;
    *count = p->count;
    if (p->storage != p || !entry->trainable) return false;
    const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    if (!bucket->sharded) return true;
    const int64_t low = dtrain__max(entry->offset, bucket->shard_first);
    const int64_t high =
        dtrain__min(entry->offset + p->count, bucket->shard_first + bucket->shard_count);
    *offset = low - entry->offset;
    *count = high - low;
    return *count > 0;
}

/* What this rank holds on the device, whoever allocated it. */
static void dtrain__layout_bytes(const dtrain__layout *layout, uint64_t *values, uint64_t *grads)
{
    *values = *grads = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        const uint64_t whole = (uint64_t)bucket->count * 4,
                       shard = (uint64_t)bucket->shard_count * 4;
        const bool host_grads = layout->host_grads && bucket->work;
        if (bucket->sharded && !layout->host_values) *values += layout->slots ? shard : whole;
        if (bucket->trainable && !host_grads) *grads += bucket->work ? shard : whole;
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        if (p->storage != p) continue;
        const bool hosts = p->value && !entry->lends_value;
        if (dtrain__value_is_whole(layout, entry) || hosts) *values += (uint64_t)p->count * 4;
        if (entry->trainable && p->grad && !entry->lends_grad) *grads += (uint64_t)p->count * 4;
    }
}

/* ---- Values and gradients ---------------------------------------------------------------------*/

/* Elements [first, first + count) of parameter p, each a function of (seed, parameter,
 * element) only: the same on every rank, for any slicing. */
static void dtrain__init_block(const dtrain_param *p, uint64_t seed, int64_t first, int64_t count,
                               float *out)
{
    const float scale = p->init_scale;
    switch (p->init) {
    case DTRAIN_INIT_NORMAL:
        dtrain__random_normal_fill(seed, p->index, (uint64_t)first, count, scale, out);
        break;
    case DTRAIN_INIT_UNIFORM:
        dtrain__random_uniform_fill(seed, p->index, (uint64_t)first, count, -scale, 2 * scale, out);
        break;
    default:
        for (int64_t i = 0; i < count; i++) out[i] = p->init == DTRAIN_INIT_CONSTANT ? scale : 0.0f;
        break;
    }
}

#define DTRAIN__STAGING_COUNT 4096 /* elements; on the stack, so that nothing can fail */

/* value (count) = elements [first, first + count) of parameter p. */
static dtrain_result dtrain__init_param(dtrain_device *device, const dtrain_param *p, uint64_t seed,
                                        int64_t first, int64_t count, float *value)
{
    float staging[DTRAIN__STAGING_COUNT];
    if (dtrain__on_host(device, value)) {
        dtrain__init_block(p, seed, first, count, value);
        return DTRAIN_OK;
    }
    for (int64_t at = 0; at < count; at += DTRAIN__STAGING_COUNT) {
        const int64_t some = dtrain__min(DTRAIN__STAGING_COUNT, count - at);
        dtrain__init_block(p, seed, first + at, some, staging);
        DTRAIN__TRY(device->ops->copy(device, value + at, staging, (size_t)some * sizeof(float),
                                      DTRAIN_COPY_HOST_TO_DEVICE));
    }
    return DTRAIN_OK;
}

/* Rank 0's values of what the host owns. */
static dtrain_result dtrain__broadcast_values(dtrain_comm *comm, const dtrain_param *params,
                                              size_t count, const dtrain__entry *entries)
{
    if (dtrain_comm_size(comm) == 1) return DTRAIN_OK;
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *p = &params[i];
        if (p->storage != p || entries[i].lends_value || p->count == 0) continue;
        DTRAIN__TRY(dtrain_broadcast(comm, p->value, (size_t)p->count, DTRAIN_F32, 0, NULL));
    }
    return DTRAIN_OK;
}

/* A step of the hash takes eight bytes and is a bijection, so one changed word always changes the
 * result; the shift brings the upper half down, where a product alone would never carry it. */
static uint64_t dtrain__hash_floats(uint64_t hash, const float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += 2) {
        uint64_t word = 0;
        memcpy(&word, x + i, (size_t)dtrain__min(2, count - i) * sizeof(float));
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

static dtrain_result dtrain__hash_param(dtrain_device *device, const dtrain_param *p,
                                        uint64_t *hash)
{
    const dtrain_device_ops *ops = device->ops;
    float staging[DTRAIN__STAGING_COUNT];
    *hash = DTRAIN__FNV_BASIS;
    if (dtrain__on_host(device, p->value)) {
        *hash = dtrain__hash_floats(*hash, p->value, p->count);
        return DTRAIN_OK;
    }
    for (int64_t at = 0; at < p->count; at += DTRAIN__STAGING_COUNT) {
        const int64_t count = dtrain__min(DTRAIN__STAGING_COUNT, p->count - at);
        DTRAIN__TRY(ops->copy(device, staging, p->value + at, (size_t)count * sizeof(float),
                              DTRAIN_COPY_DEVICE_TO_HOST));
        *hash = dtrain__hash_floats(*hash, staging, count);
    }
    return DTRAIN_OK;
}

/* Names at most eight parameters that ready has not seen in this step; returns how many there
 * are. An empty tensor misses nothing. only_new: leave out those that were named before. */
static size_t dtrain__list_missing(const dtrain_param *params, size_t param_count,
                                   dtrain__entry *entries, bool only_new, char *text, size_t room)
{
    size_t count = 0, used = 0;
    text[0] = 0;
    for (size_t i = 0; i < param_count; i++) {
        dtrain__entry *entry = &entries[i];
        if (!entry->trainable || entry->seen || !params[i].count) continue;
        if (only_new && entry->warned) continue;
        entry->warned = true;
        if (count++ < 8 && used < room)
            used += (size_t)snprintf(text + used, room - used, "%s\"%.60s\"", used ? ", " : "",
                                     params[i].name);
    }
    if (count > 8 && used < room) snprintf(text + used, room - used, " and %zu more", count - 8);
    return count;
}

/* ================================================================================================
 * [S28] Strategies
 *
 * The books are the same for every kind: which gradients are marked, which buckets are complete.
 * What the kinds differ in is in the layout [S27] (where values, gradients and shards are) and in
 * three places here and in [S29]: how a bucket is reduced, what publish does, what gather does.
 *
 *     ready(p)     mark p; copy its gradient into the bucket if the host owns it
 *                  launch complete buckets, in bucket order; give the communicator a turn
 *     finish()     fill what was not marked; launch the rest, in the same order; wait; copy back
 *
 *     reducing     whole          all-reduce in place
 *     a bucket     sharded        reduce-scatter to the shard (ZERO3: one reduce an owner)
 *                  several nodes  then all-reduce of the shard with the same shard of other nodes
 *
 * Why it cannot deadlock: the collectives of a backward are buckets 0, 1, 2, ... on every rank, in
 * whatever order it calls ready, and starting one never waits. A bucket that is complete too early
 * waits for those before it.
 *
 * Why the bits depend neither on the kind nor on overlap, bucket size or copying: each element is
 * the sum over the ranks, in rank order, times 1/N, wherever it lies. (Between nodes the order is
 * another: HYBRID_SHARD has its own bits.)
 *
 * What grad_written means: the storage's grad holds a part of this step's gradient. The tape sets
 * it at the first write, ready sets it for hosts with their own backward, finish clears it when the
 * gradient has been moved on. A gradient that was not written in the whole step counts as zero.
 * ==============================================================================================*/

enum { DTRAIN__REDUCE_IDLE, DTRAIN__REDUCE_SHARD, DTRAIN__REDUCE_REPLICAS, DTRAIN__REDUCED };

/* Between a GPU and what is offloaded. The events are those of gradients: during a backward of
 * shards that arrive in a landing, during an update of chunks that arrive in a stage. */
typedef struct dtrain__offload {
    dtrain_device *cpu;        /* whose kernels compute there; NULL: nothing is offloaded */
    dtrain_stream *down, *up;  /* of copies to the host, and to the device */
    dtrain_event *order;       /* from one stream to another */
    dtrain_event *arrived[2];  /* on the host */
    dtrain__bucket *landed[2]; /* whose shard the landing will be added to; NULL: it is free */
    uint32_t turn;             /* landing to be used next */
} dtrain__offload;

struct dtrain_strategy {
    const dtrain__traits *traits;
    dtrain_world *world;
    dtrain_device *device;
    dtrain_comm *comm;         /* all ranks */
    dtrain_comm *shard_comm;   /* those that share one copy; NULL: every rank has everything */
    dtrain_comm *replica_comm; /* HYBRID_SHARD: those with the same shard; NULL elsewhere */
    dtrain_allocator allocator;
    dtrain_strategy_desc desc; /* resolved */
    dtrain_param *params;      /* the host's */
    size_t param_count;
    dtrain__layout layout;
    size_t block_bytes[DTRAIN__CLASSES]; /* allocated */
    dtrain_work **works;  /* (bucket_count, 2 * works_per_bucket): of reduces and of gathers */
    dtrain_shard *shards; /* (param_count), shard_count in use */
    bool *counted;        /* (param_count): this rank's share of the norm, see clipping */
    int64_t *gathered;    /* (ranks): scratch */
    double *sum_squares;  /* (1) device memory: of the gradients, for clipping */
    dtrain__offload offload;
    size_t works_per_bucket, shard_count;
    size_t launched, oldest; /* buckets below launched are started; those below oldest are done */
    size_t marked_count;     /* in this backward */
    bool more;               /* micro-batches of this step follow */
    bool accumulated;        /* shards hold the sum of earlier micro-batches */
    uint64_t sync_count;
    uint32_t working[2]; /* unit whose gradients are in the alternating buffers, or NONE */
    uint32_t slots[2];   /* unit whose values are in the slot, or NONE */
    uint32_t position;   /* unit gathered last, NONE before a pass */
    char reason[400];
    dtrain_result failure; /* of the communicator or the device: stands until destroy */
    char failure_text[sizeof dtrain__error_text];
};

#define DTRAIN__FIRST_BUCKET_BYTES ((size_t)1 << 20)
#define DTRAIN__BUCKET_BYTES ((size_t)25 << 20)

/* ---- Settings ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_strategy_desc dtrain_strategy_defaults(void)
{
    dtrain_strategy_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_DDP;
    desc.reshard_after_forward = true;
    desc.optimizer_states = 2;
    desc.first_bucket_bytes = DTRAIN__FIRST_BUCKET_BYTES;
    desc.bucket_bytes = DTRAIN__BUCKET_BYTES;
    return desc;
}

static bool dtrain__is_float_dtype(uint32_t dtype)
{
    return dtype == DTRAIN_F32 || dtype == DTRAIN_BF16 || dtype == DTRAIN_F16;
}

/* Fields that stand by themselves. */
static dtrain_result dtrain__check_fields(const dtrain_strategy_desc *desc)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->missing_gradient > DTRAIN_MISSING_ERROR)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_missing_gradient", call,
                           (unsigned)desc->missing_gradient);
    if (desc->accumulation > DTRAIN_ACCUMULATE_SHARD_EVERY)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_accumulation", call,
                           (unsigned)desc->accumulation);
    if (!dtrain__is_float_dtype(desc->param_dtype) || !dtrain__is_float_dtype(desc->reduce_dtype))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: param_dtype is %s and reduce_dtype %s; expected f32, bf16 or f16",
                           call, dtrain_dtype_name((dtrain_dtype)desc->param_dtype),
                           dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype));
    if (desc->kept_unit_count && !desc->kept_units)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: kept_unit_count is %u, kept_units is NULL",
                           call, desc->kept_unit_count);
    if (desc->whole_below < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: whole_below is %lld", call,
                           (long long)desc->whole_below);
    if (desc->offload >= 2 * DTRAIN_OFFLOAD_PARAMS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: offload 0x%x has bits that mean nothing",
                           call, (unsigned)desc->offload);
    if (desc->kind > DTRAIN_STRATEGY_AUTO)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: %u is not a dtrain_strategy_kind; DTRAIN_DDP is %u", call,
                           (unsigned)desc->kind, (unsigned)DTRAIN_DDP);
    return DTRAIN_OK;
}

/* What is left to the default, in a desc whose kind is known. */
static void dtrain__resolve_accumulation(dtrain_strategy_desc *desc, const dtrain__traits *traits)
{
    if (desc->accumulation) return;
    if (!traits->grads) desc->accumulation = DTRAIN_ACCUMULATE_LAST;
    else if (traits->kind == DTRAIN_HYBRID_SHARD)
        desc->accumulation = DTRAIN_ACCUMULATE_SHARD_EVERY;
    else desc->accumulation = DTRAIN_ACCUMULATE_EVERY;
}

/* What is in host memory is updated there, whatever the kind. */
static dtrain_result dtrain__check_classes(const dtrain_strategy_desc *desc)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->offload && !(desc->offload & DTRAIN_OFFLOAD_OPTIMIZER))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: offload has DTRAIN_OFFLOAD_GRADS or DTRAIN_OFFLOAD_PARAMS without "
                           "DTRAIN_OFFLOAD_OPTIMIZER: what is in host memory is updated there; add "
                           "it",
                           call);
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_offload(const dtrain_strategy_desc *desc,
                                           const dtrain__traits *traits)
{
    const char *const call = "dtrain_strategy_create";
    DTRAIN__TRY(dtrain__check_classes(desc));
    if ((desc->offload & DTRAIN_OFFLOAD_PARAMS) && !traits->params)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%s: DTRAIN_OFFLOAD_PARAMS: %s needs whole parameters on the device; use "
            "DTRAIN_FULL_SHARD, DTRAIN_ZERO3 or DTRAIN_HYBRID_SHARD",
            call, traits->name);
    if (!(desc->offload & DTRAIN_OFFLOAD_GRADS)) return DTRAIN_OK;
    if (!traits->grads)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: DTRAIN_OFFLOAD_GRADS: %s keeps whole gradients on the device; use "
                           "DTRAIN_SHARD_GRAD_OP or a kind below it",
                           call, traits->name);
    if (desc->accumulation == DTRAIN_ACCUMULATE_LAST)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: DTRAIN_OFFLOAD_GRADS: DTRAIN_ACCUMULATE_LAST keeps whole gradients "
                           "on the device; use DTRAIN_ACCUMULATE_EVERY",
                           call);
    return DTRAIN_OK;
}

/* Fields that not every kind can honour: a clear error, never a silent downgrade. */
static dtrain_result dtrain__check_combination(const dtrain_strategy_desc *desc,
                                               const dtrain__traits *traits)
{
    const char *const call = "dtrain_strategy_create";
    if (desc->accumulation == DTRAIN_ACCUMULATE_EVERY && traits->state && !traits->grads)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: %s keeps whole gradients, so reducing them in every micro-batch "
                           "would cost time and save no memory; use DTRAIN_ACCUMULATE_LAST, or "
                           "DTRAIN_SHARD_GRAD_OP",
                           call, traits->name);
    if (desc->accumulation == DTRAIN_ACCUMULATE_SHARD_EVERY && traits->kind != DTRAIN_HYBRID_SHARD)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: DTRAIN_ACCUMULATE_SHARD_EVERY needs two levels of ranks, which %s "
                           "does not have; use DTRAIN_HYBRID_SHARD",
                           call, traits->name);
    if (desc->param_dtype != DTRAIN_F32 && !traits->params)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: param_dtype %s: %s keeps parameters whole, in fp32; autocast of "
                           "the tape rounds them where they are used",
                           call, dtrain_dtype_name((dtrain_dtype)desc->param_dtype), traits->name);
    if (desc->node_size && traits->kind != DTRAIN_HYBRID_SHARD)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: node_size is %u, which means something to DTRAIN_HYBRID_SHARD "
                           "only, not to %s",
                           call, desc->node_size, traits->name);
    if ((!desc->reshard_after_forward || desc->kept_unit_count) && !traits->params)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: reshard_after_forward is false or units are to be kept, but %s "
                           "never shards parameters",
                           call, traits->name);
    if (desc->whole_below && !traits->state)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: whole_below is %lld, but %s shards nothing", call,
                           (long long)desc->whole_below, traits->name);
    return dtrain__check_offload(desc, traits);
}

/* Zeros become defaults. */
static void dtrain__resolve_zeros(dtrain_strategy_desc *desc)
{
    if (desc->kind == DTRAIN_STRATEGY_DEFAULT) desc->kind = DTRAIN_DDP;
    if (!desc->param_dtype) desc->param_dtype = DTRAIN_F32;
    if (!desc->reduce_dtype) desc->reduce_dtype = DTRAIN_F32;
    if (!desc->first_bucket_bytes) desc->first_bucket_bytes = DTRAIN__FIRST_BUCKET_BYTES;
    if (!desc->bucket_bytes) desc->bucket_bytes = DTRAIN__BUCKET_BYTES;
}

static dtrain_result dtrain__strategy_resolve(dtrain_strategy *strategy,
                                              const dtrain_strategy_desc *given)
{
    strategy->desc = given ? *given : dtrain_strategy_defaults();
    strategy->desc.comm = strategy->comm;
    dtrain__resolve_zeros(&strategy->desc);
    DTRAIN__TRY(dtrain__check_fields(&strategy->desc));
    if (strategy->desc.offload && strategy->device->ops->host_memory)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_strategy_create: offload is 0x%x, but the memory of the %s "
                           "device is the host's: what a GPU would be relieved of is on the CPU "
                           "already; use 0",
                           (unsigned)strategy->desc.offload, strategy->device->ops->name);
    return dtrain__check_classes(&strategy->desc);
}

/* Settings that decide which collectives a step makes and in which order, or what values it starts
 * from. Ranks may differ in who owns the gradients, and in no_overlap where nothing is gathered: a
 * unit that is fetched ahead comes before the gradients of the one after it. */
static dtrain_result dtrain__strategy_compare(dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const dtrain__traits *traits = dtrain__traits_of(desc->kind);
    const size_t kept_bytes = (size_t)desc->kept_unit_count * sizeof *desc->kept_units;
    const bool ahead = (!traits || traits->params) && !desc->no_overlap;
    dtrain__registration mine;
    memset(&mine, 0, sizeof mine);
    mine.params = strategy->params;
    mine.count = strategy->param_count;
    snprintf(mine.settings, sizeof mine.settings,
             "kind %s, missing_gradient %u, accumulation %u, param_dtype %s, reduce_dtype %s, "
             "offload %u, node_size %u, reshard_after_forward %d, kept units %08x, whole_below "
             "%lld, buckets of %zu and %zu bytes, init_seed %llu, fetches ahead %d",
             traits ? traits->name : "DTRAIN_STRATEGY_AUTO", (unsigned)desc->missing_gradient,
             (unsigned)desc->accumulation, dtrain_dtype_name((dtrain_dtype)desc->param_dtype),
             dtrain_dtype_name((dtrain_dtype)desc->reduce_dtype), (unsigned)desc->offload,
             (unsigned)desc->node_size, desc->reshard_after_forward,
             (unsigned)dtrain__fnv1a(DTRAIN__FNV_BASIS, desc->kept_units, kept_bytes),
             (long long)desc->whole_below, desc->first_bucket_bytes, desc->bucket_bytes,
             (unsigned long long)desc->init_seed, ahead);
    return dtrain__registration_compare(strategy->comm, &mine, strategy->gathered);
}

/* ---- Creation ---------------------------------------------------------------------------------
 *
 * 1. local: check the array and the desc                        -> agree
 * 2. compare the registration of all ranks
 * 3. AUTO: choose; HYBRID_SHARD: split the ranks; check what the kind can do
 * 4. local: lay out, allocate, initialise                       -> agree
 * 5. broadcast rank 0's values of parameters the host owns; publish */

static dtrain_result dtrain__strategy_register(dtrain_strategy *strategy,
                                               const dtrain_strategy_desc *desc)
{
    const size_t count = strategy->param_count;
    if (!strategy->params && count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_create: params is NULL, param_count is %zu", count);
    if (count > UINT32_MAX - 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_create: %zu parameters are too many", count);
    DTRAIN__TRY(dtrain__strategy_resolve(strategy, desc));
    strategy->gathered =
        (int64_t *)dtrain__alloc(&strategy->allocator, (size_t)dtrain_comm_size(strategy->comm),
                                 sizeof *strategy->gathered, "gathered hashes");
    if (!strategy->gathered) return DTRAIN_ERROR_MEMORY;
    uint64_t *hashes =
        (uint64_t *)dtrain__alloc(&strategy->allocator, count, sizeof *hashes, "name hashes");
    if (!hashes) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = dtrain__resolve_params(strategy->params, count, hashes);
    dtrain__free(&strategy->allocator, hashes, count, sizeof *hashes);
    return result;
}

/* HYBRID_SHARD: consecutive ranks are one node. */
static dtrain_result dtrain__check_node_size(dtrain_strategy *strategy)
{
    dtrain_strategy_desc *desc = &strategy->desc;
    const char *const call = "dtrain_strategy_create";
    const int ranks = dtrain_comm_size(strategy->comm);
    if (desc->node_size == 0) {
        if (dtrain_world_node_count(strategy->world) == 1 && ranks > 1)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: DTRAIN_HYBRID_SHARD shards inside a node and replicates across "
                               "nodes, but all ranks are on one; set node_size, or use "
                               "DTRAIN_FULL_SHARD",
                               call);
        desc->node_size = (uint32_t)dtrain_world_local_size(strategy->world);
    }
    if (desc->node_size > (uint32_t)ranks || (uint32_t)ranks % desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: node_size %u does not divide %d ranks; every node must have as "
                           "many",
                           call, desc->node_size, ranks);
    return DTRAIN_OK;
}

static dtrain_result dtrain__strategy_split(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->comm), rank = dtrain_comm_rank(strategy->comm);
    if (!strategy->traits->state) return DTRAIN_OK;
    if (strategy->traits->kind != DTRAIN_HYBRID_SHARD) {
        const uint32_t shards = DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS;
        if (ranks > 1 || (strategy->desc.offload & shards)) strategy->shard_comm = strategy->comm;
        return DTRAIN_OK;
    }
    DTRAIN__TRY(dtrain__check_node_size(strategy)); /* the same on every rank */
    const int size = (int)strategy->desc.node_size;
    dtrain_comm *node, *across;
    DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank / size, rank, &node));
    strategy->shard_comm = node;
    DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank % size, rank, &across));
    strategy->replica_comm = across;
    return DTRAIN_OK;
}

/* The tables of a layout, zeroed; what there is of them is freed by _free also after an error. */
static dtrain_result dtrain__layout_make(dtrain__layout *layout, const dtrain_allocator *a,
                                         const dtrain_param *params, size_t count,
                                         const dtrain_strategy_desc *desc, int ranks, int rank)
{
    const size_t cuts = (size_t)ranks + 1;
    memset(layout, 0, sizeof *layout);
    layout->params = params;
    layout->count = count;
    layout->desc = desc;
    layout->traits = dtrain__traits_of(desc->kind);
    layout->ranks = ranks;
    layout->rank = rank;
    layout->host_values = layout->traits->params && (desc->offload & DTRAIN_OFFLOAD_PARAMS);
    layout->host_grads = layout->traits->grads && (desc->offload & DTRAIN_OFFLOAD_GRADS);
    layout->slots = layout->traits->params && (ranks > 1 || layout->host_values);
    layout->work = layout->traits->grads && (ranks > 1 || layout->host_grads) &&
                   desc->accumulation != DTRAIN_ACCUMULATE_LAST;
    layout->shards = layout->traits->state && (ranks > 1 || layout->slots || layout->work);
    layout->entries =
        (dtrain__entry *)dtrain__alloc(a, count, sizeof *layout->entries, "parameter entries");
    layout->buckets = (dtrain__bucket *)dtrain__alloc(a, count, sizeof *layout->buckets, "buckets");
    layout->units = (dtrain__unit *)dtrain__alloc(a, count, sizeof *layout->units, "units");
    if (!layout->entries || !layout->buckets || !layout->units) return DTRAIN_ERROR_MEMORY;
    if (layout->shards && layout->traits->owners) {
        layout->owners =
            (uint32_t *)dtrain__alloc(a, count, sizeof *layout->owners, "owners of parameters");
        layout->cuts = (int64_t *)dtrain__alloc(a, count, cuts * sizeof *layout->cuts, "cuts");
        if (!layout->owners || !layout->cuts) return DTRAIN_ERROR_MEMORY;
    }
    dtrain__lay_out(layout);
    return DTRAIN_OK;
}

static void dtrain__layout_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    const size_t cuts = (size_t)layout->ranks + 1;
    dtrain__free(a, layout->cuts, layout->count, cuts * sizeof *layout->cuts);
    dtrain__free(a, layout->owners, layout->count, sizeof *layout->owners);
    dtrain__free(a, layout->units, layout->count, sizeof *layout->units);
    dtrain__free(a, layout->buckets, layout->count, sizeof *layout->buckets);
    dtrain__free(a, layout->entries, layout->count, sizeof *layout->entries);
}

static dtrain_result dtrain__strategy_tables(dtrain_strategy *strategy)
{
    const dtrain_allocator *a = &strategy->allocator;
    const size_t count = strategy->param_count;
    dtrain_comm *shared = strategy->shard_comm;
    DTRAIN__TRY(dtrain__layout_make(&strategy->layout, a, strategy->params, count, &strategy->desc,
                                    shared ? dtrain_comm_size(shared) : 1,
                                    shared ? dtrain_comm_rank(shared) : 0));
    strategy->works_per_bucket = strategy->layout.owners ? (size_t)strategy->layout.ranks : 1;
    strategy->works = (dtrain_work **)dtrain__alloc(
        a, count, 2 * strategy->works_per_bucket * sizeof *strategy->works, "handles");
    strategy->shards = (dtrain_shard *)dtrain__alloc(a, count, sizeof *strategy->shards, "shards");
    strategy->counted = (bool *)dtrain__alloc(a, count, sizeof *strategy->counted, "shards");
    return strategy->works && strategy->shards && strategy->counted ? DTRAIN_OK
                                                                    : DTRAIN_ERROR_MEMORY;
}

/* The state between two backwards, and between two steps. Work buffers have been emptied: the next
 * backward overwrites them. Whole gradients go on until the step ends. */
static void dtrain__strategy_rewind(dtrain_strategy *strategy, bool step_done)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket =
            entry->bucket == DTRAIN__NONE ? NULL : &layout->buckets[entry->bucket];
        entry->marked = false;
        if (step_done) entry->seen = false;
        entry->pending = entry->uses;
        if (step_done || (bucket && bucket->work)) strategy->params[i].grad_written = false;
    }
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].pending = layout->buckets[b].uses;
        layout->buckets[b].stage = DTRAIN__REDUCE_IDLE;
    }
    strategy->launched = strategy->oldest = strategy->marked_count = 0;
    strategy->working[0] = strategy->working[1] = DTRAIN__NONE;
    strategy->accumulated = !step_done;
}

/* Points params at memory of the library; aliases follow their storage. Values of gathered units
 * have no address until gather. */
static void dtrain__lend(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_param *p = &strategy->params[i], *storage = p->storage;
        dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket =
            entry->bucket == DTRAIN__NONE ? NULL : &layout->buckets[entry->bucket];
        if (!p->value) {
            entry->lends_value = true;
            if (storage != p) p->value = storage->value;
            else if (dtrain__value_is_whole(layout, entry)) p->value = entry->place;
            else if (!layout->slots) p->value = bucket->values + entry->offset;
        }
        if (!p->grad && entry->trainable) {
            entry->lends_grad = true;
            p->grad = storage != p ? storage->grad : bucket->grads + entry->offset;
        }
    }
}

static void dtrain__list_shards(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    strategy->shard_count = 0;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        int64_t offset, count;
        if (!dtrain__piece(layout, i, &offset, &count)) continue;
        const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
        const int64_t at = entry->offset + offset - bucket->shard_first;
        dtrain_shard *shard = &strategy->shards[strategy->shard_count];
        strategy->counted[strategy->shard_count++] = bucket->sharded || layout->rank == 0;
        shard->param = p;
        shard->offset = offset;
        shard->count = count;
        shard->value = bucket->sharded ? bucket->value_shard + at : p->value;
        shard->grad = bucket->sharded ? bucket->grad_shard + at : p->grad;
    }
}

/* A line more than is needed: also an empty tensor, or the only tensor of a model, gets an address
 * of its own. What other ranks read is memory of the communicator; padding is zero. */
static dtrain_result dtrain__strategy_memory(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    const dtrain_device_ops *ops = strategy->device->ops;
    void *memory;
    dtrain__lay_memory(layout);
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        const size_t bytes = layout->bytes[block] + DTRAIN__CACHE_LINE;
        if (block >= DTRAIN__BUFFERS && !layout->bytes[block]) continue;
        if (block == DTRAIN__HOST) DTRAIN__TRY(ops->host_alloc(strategy->device, bytes, &memory));
        else if (block == DTRAIN__VALUES && !layout->shards)
            DTRAIN__TRY(ops->alloc(strategy->device, bytes, &memory));
        else DTRAIN__TRY(dtrain_comm_alloc(strategy->comm, bytes, &memory));
        if (block == DTRAIN__HOST) memset(memory, 0, bytes);
        layout->memory[block] = (char *)memory;
        strategy->block_bytes[block] = bytes;
    }
    DTRAIN__TRY(ops->alloc(strategy->device, sizeof(double), &memory));
    strategy->sum_squares = (double *)memory;
    dtrain__lay_memory(layout);
    dtrain__lend(strategy);
    dtrain__list_shards(strategy);
    dtrain__strategy_rewind(strategy, true);
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_kept_units(const dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (uint32_t i = 0; i < strategy->desc.kept_unit_count; i++) {
        const uint32_t id = strategy->desc.kept_units[i];
        size_t u = 0;
        while (u < layout->unit_count && layout->units[u].id != id) u++;
        if (u == layout->unit_count)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_strategy_create: kept_units has unit %u, to which no "
                               "parameter belongs",
                               id);
    }
    return DTRAIN_OK;
}

/* Kinds that shard parameters have nowhere to put a host's whole array. */
static dtrain_result dtrain__check_ownership(const dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count && layout->slots; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (p->value && !dtrain__value_is_whole(layout, &layout->entries[i]))
            return dtrain__param_fail(p, i,
                                      "its value is the host's, but %s shards parameters and has "
                                      "to own them: leave value NULL and give it an init",
                                      strategy->traits->name);
    }
    return DTRAIN_OK;
}

/* Of storage i: everything, or this rank's part of a sharded bucket. */
static dtrain_result dtrain__init_values(dtrain_strategy *strategy, size_t i)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain_param *p = &strategy->params[i];
    const dtrain__entry *entry = &layout->entries[i];
    const uint64_t seed = strategy->desc.init_seed;
    if (p->storage != p || !entry->lends_value) return DTRAIN_OK;
    if (dtrain__value_is_whole(layout, entry))
        return dtrain__init_param(strategy->device, p, seed, 0, p->count, p->value);
    const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    const int64_t low = dtrain__max(entry->offset, bucket->shard_first);
    const int64_t high =
        dtrain__min(entry->offset + p->count, bucket->shard_first + bucket->shard_count);
    if (high <= low) return DTRAIN_OK;
    return dtrain__init_param(strategy->device, p, seed, low - entry->offset, high - low,
                              bucket->value_shard + (low - bucket->shard_first));
}

static dtrain_result dtrain__offload_open(dtrain_strategy *strategy);
static void dtrain__offload_close(dtrain_strategy *strategy);

static dtrain_result dtrain__strategy_prepare(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_tables(strategy));
    DTRAIN__TRY(dtrain__check_kept_units(strategy));
    DTRAIN__TRY(dtrain__check_ownership(strategy));
    DTRAIN__TRY(dtrain__offload_open(strategy));
    DTRAIN__TRY(dtrain__strategy_memory(strategy));
    for (size_t i = 0; i < strategy->param_count; i++)
        DTRAIN__TRY(dtrain__init_values(strategy, i));
    return DTRAIN_OK;
}

/* ZERO1 and SHARD_GRAD_OP with arrays of the host: between them and the flat buckets. */
static dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        if (p->storage != p || entry->lends_value || dtrain__value_is_whole(layout, entry))
            continue;
        float *place = layout->buckets[entry->bucket].values + entry->offset;
        DTRAIN__TRY(dtrain__copy_any(strategy->device, to_host ? p->value : place,
                                     to_host ? place : p->value, (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* *out is set before anything can fail, so that the caller destroys what there is of it. */
static dtrain_result dtrain__strategy_begin(dtrain_world *world, dtrain_param *params,
                                            size_t param_count, const dtrain_strategy_desc *desc,
                                            dtrain_comm *comm, dtrain_strategy **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_create: out is NULL");
    const dtrain_allocator *allocator = dtrain_world_allocator(world);
    dtrain_strategy *strategy =
        (dtrain_strategy *)dtrain__alloc(allocator, 1, sizeof *strategy, "a strategy");
    *out = strategy;
    if (!strategy) return DTRAIN_ERROR_MEMORY;
    strategy->world = world;
    strategy->device = dtrain_world_device(world);
    strategy->comm = comm;
    strategy->allocator = *allocator;
    strategy->params = params;
    strategy->param_count = param_count;
    return dtrain__strategy_register(strategy, desc);
}

static dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy); /* AUTO: [S29] */

static dtrain_result dtrain__strategy_complete(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_compare(strategy));
    DTRAIN__TRY(dtrain__strategy_choose(strategy));
    strategy->traits = dtrain__traits_of(strategy->desc.kind);
    dtrain__resolve_accumulation(&strategy->desc, strategy->traits);
    DTRAIN__TRY(dtrain__check_combination(&strategy->desc, strategy->traits));
    DTRAIN__TRY(dtrain__strategy_split(strategy));
    DTRAIN__TRY(dtrain__agree(strategy->comm, dtrain__strategy_prepare(strategy)));
    DTRAIN__TRY(dtrain__broadcast_values(strategy->comm, strategy->params, strategy->param_count,
                                         strategy->layout.entries));
    DTRAIN__TRY(dtrain__copy_host_values(strategy, false));
    strategy->desc.kept_units = NULL; /* the caller's, and read */
    strategy->desc.kept_unit_count = 0;
    return dtrain_strategy_publish(strategy);
}

DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out)
{
    if (out) *out = NULL;
    if (!world) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_create: world is NULL");
    dtrain_comm *comm = desc && desc->comm ? desc->comm : dtrain_world_comm(world);
    dtrain_result result = dtrain__strategy_begin(world, params, param_count, desc, comm, out);
    result = dtrain__agree(comm, result);
    if (result == DTRAIN_OK) result = dtrain__strategy_complete(*out);
    if (result == DTRAIN_OK || !out) return result;
    dtrain_strategy_destroy(*out);
    *out = NULL;
    return result;
}

/* ---- Handles ----------------------------------------------------------------------------------*/

/* Of bucket b's reduces (gather false) or gathers, works_per_bucket of them. */
static dtrain_work **dtrain__works(const dtrain_strategy *strategy, size_t b, bool gather)
{
    const size_t per = strategy->works_per_bucket;
    return strategy->works + (2 * b + (gather ? 1 : 0)) * per;
}

/* Every handle goes back, also after an error: waiting on a failed communicator returns at once. */
static dtrain_result dtrain__wait_works(const dtrain_strategy *strategy, dtrain_work **works)
{
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->works_per_bucket; i++) {
        const dtrain_result one = dtrain_work_wait(works[i]);
        works[i] = NULL;
        if (result == DTRAIN_OK) result = one;
    }
    return result;
}

static dtrain_result dtrain__test_works(const dtrain_strategy *strategy, dtrain_work **works,
                                        bool *done)
{
    *done = true;
    for (size_t i = 0; i < strategy->works_per_bucket && *done; i++)
        if (works[i]) DTRAIN__TRY(dtrain_work_test(works[i], done));
    return DTRAIN_OK;
}

/* ---- Life -------------------------------------------------------------------------------------*/

/* Gradients in flight are also read and written by other ranks, and those expect the rest of the
 * step: the communicator fails, which they hear of at once. Why this rank gave up is more
 * interesting than this consequence: its last error stays. A unit that is only being fetched ahead
 * is waited for: nothing is missing, and nobody need fail. */
static void dtrain__strategy_abandon(dtrain_strategy *strategy)
{
    char text[sizeof dtrain__error_text];
    size_t flights = 0;
    for (size_t b = 0; b < strategy->layout.bucket_count; b++)
        for (size_t i = 0; i < strategy->works_per_bucket; i++)
            flights += dtrain__works(strategy, b, false)[i] != NULL;
    memcpy(text, dtrain__error_text, sizeof text);
    if (flights)
        strategy->comm->ops->fail(strategy->comm, DTRAIN_ERROR_USAGE,
                                  "dtrain_strategy_destroy: called between ready and finish, with "
                                  "gradients in flight");
    for (size_t b = 0; b < strategy->layout.bucket_count; b++) {
        dtrain__wait_works(strategy, dtrain__works(strategy, b, false));
        dtrain__wait_works(strategy, dtrain__works(strategy, b, true));
    }
    if (text[0]) memcpy(dtrain__error_text, text, sizeof text);
}

static void dtrain__strategy_free_blocks(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = strategy->device;
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        const size_t bytes = strategy->block_bytes[block];
        if (!layout->memory[block]) continue;
        if (block == DTRAIN__HOST) device->ops->host_free(device, layout->memory[block], bytes);
        else if (block == DTRAIN__VALUES && !layout->shards)
            device->ops->free(device, layout->memory[block], bytes);
        else dtrain_comm_free(strategy->comm, layout->memory[block], bytes);
    }
    if (strategy->sum_squares) device->ops->free(device, strategy->sum_squares, sizeof(double));
}

DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy)
{
    if (!strategy) return;
    const dtrain_allocator a = strategy->allocator;
    const size_t count = strategy->param_count;
    if (strategy->works) dtrain__strategy_abandon(strategy);
    for (size_t i = 0; strategy->layout.entries && i < count; i++) {
        if (strategy->layout.entries[i].lends_value) strategy->params[i].value = NULL;
        if (strategy->layout.entries[i].lends_grad) strategy->params[i].grad = NULL;
    }
    dtrain__offload_close(strategy);
    dtrain__strategy_free_blocks(strategy);
    dtrain__free(&a, strategy->gathered, (size_t)dtrain_comm_size(strategy->comm),
                 sizeof *strategy->gathered);
    dtrain__free(&a, strategy->counted, count, sizeof *strategy->counted);
    dtrain__free(&a, strategy->shards, count, sizeof *strategy->shards);
    dtrain__free(&a, strategy->works, count,
                 2 * strategy->works_per_bucket * sizeof *strategy->works);
    dtrain__layout_free(&strategy->layout, &a);
    if (strategy->replica_comm) dtrain_comm_destroy(strategy->replica_comm);
    if (strategy->shard_comm && strategy->shard_comm != strategy->comm)
        dtrain_comm_destroy(strategy->shard_comm);
    dtrain__free(&a, strategy, 1, sizeof *strategy);
}

static dtrain_result dtrain__strategy_usable(const dtrain_strategy *strategy, const char *call)
{
    if (!strategy) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: strategy is NULL", call);
    if (strategy->failure == DTRAIN_OK) return DTRAIN_OK;
    return dtrain_fail(strategy->failure, "%s", strategy->failure_text);
}

/* Communicator and device do not recover, and some gradients are averaged while others are not:
 * the error stands. The communicator fails with it, for the other ranks count on this one; when the
 * error came from there, it is what fail returns. */
static dtrain_result dtrain__strategy_keep(dtrain_strategy *strategy, dtrain_result result)
{
    if (result == DTRAIN_OK || strategy->failure != DTRAIN_OK) return result;
    strategy->failure = strategy->comm->ops->fail(strategy->comm, result, dtrain__error_text);
    snprintf(strategy->failure_text, sizeof strategy->failure_text, "%s",
             dtrain__bare(dtrain__error_text));
    return strategy->failure;
}

/* ---- Offload ----------------------------------------------------------------------------------
 *
 *     compute   .. backward 2 . reduce . backward 1 . reduce . backward 0 .... | finish
 *     down                            | shard of 2 -> host   | shard of 1 -> host ...
 *     CPU                             (add it, in later micro-batches)          | norm | update
 *
 * A copy to the host is queued behind what compute has queued, and compute waits for it before the
 * buffer it reads is made anew. A shard of a later micro-batch comes to one of two landings and is
 * added when that landing is wanted again, or at the end of the backward. */

/* Work queued on `later` from now on comes after all that is queued on `earlier` so far. */
static dtrain_result dtrain__stream_follow(dtrain_strategy *strategy, dtrain_stream *later,
                                           dtrain_stream *earlier)
{
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(device->ops->event_record(device, strategy->offload.order, earlier));
    return device->ops->event_wait(device, strategy->offload.order, later);
}

/* Holds the host up until the event has happened. A dead rank is the communicator's to report. */
static dtrain_result dtrain__event_await(const dtrain_strategy *strategy, dtrain_event *event)
{
    dtrain_device *device = strategy->device;
    dtrain__wait wait = dtrain__wait_begin();
    for (;;) {
        bool done;
        DTRAIN__TRY(device->ops->event_query(device, event, &done));
        if (done) return DTRAIN_OK;
        if (device->while_waiting) DTRAIN__TRY(device->while_waiting(device->waiting_user));
        if (dtrain__wait_turn(strategy->world, &wait) == DTRAIN_ERROR_TIMEOUT)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the device did not finish the work before a copy to the host in "
                               "%.1f s",
                               1e-9 * (double)strategy->world->timeout_ns);
    }
}

static dtrain_result dtrain__offload_open(dtrain_strategy *strategy)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    dtrain_device_desc cpu;
    if (!strategy->desc.offload) return DTRAIN_OK;
    memset(&cpu, 0, sizeof cpu);
    cpu.thread_count = dtrain_world_threads(strategy->world);
    cpu.oversubscribed = strategy->world->oversubscribed;
    cpu.allocator = strategy->allocator;
    DTRAIN__TRY(dtrain_device_create(dtrain_cpu_device_ops(), &cpu, &offload->cpu));
    DTRAIN__TRY(device->ops->stream_create(device, false, &offload->down));
    DTRAIN__TRY(device->ops->stream_create(device, false, &offload->up));
    DTRAIN__TRY(device->ops->event_create(device, false, &offload->order));
    for (int i = 0; i < 2; i++)
        DTRAIN__TRY(device->ops->event_create(device, false, &offload->arrived[i]));
    return DTRAIN_OK;
}

/* Copies still queued use the memory that is freed next. */
static void dtrain__offload_close(dtrain_strategy *strategy)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    if (!offload->cpu) return;
    device->ops->synchronize(device);
    for (int i = 0; i < 2; i++)
        if (offload->arrived[i]) device->ops->event_destroy(device, offload->arrived[i]);
    if (offload->order) device->ops->event_destroy(device, offload->order);
    if (offload->up) device->ops->stream_destroy(device, offload->up);
    if (offload->down) device->ops->stream_destroy(device, offload->down);
    dtrain_device_destroy(offload->cpu);
    offload->cpu = NULL;
}

/* Adds what has arrived in a landing to the shard that it is of. */
static dtrain_result dtrain__landing_clear(dtrain_strategy *strategy, uint32_t i)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain__bucket *bucket = offload->landed[i];
    if (!bucket) return DTRAIN_OK;
    dtrain_add_args add = {bucket->shard_count, bucket->grad_shard, strategy->layout.landing[i],
                           bucket->grad_shard,  DTRAIN_F32,         DTRAIN_F32};
    offload->landed[i] = NULL;
    DTRAIN__TRY(dtrain__event_await(strategy, offload->arrived[i]));
    return offload->cpu->ops->add(offload->cpu, &add);
}

/* shard (shard_count, host memory) = or += result (device memory), soon. */
static dtrain_result dtrain__shard_to_host(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                           const float *result, bool accumulate)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    const uint32_t i = offload->turn;
    const size_t bytes = (size_t)bucket->shard_count * sizeof(float);
    if (bytes == 0) return DTRAIN_OK;
    if (accumulate) DTRAIN__TRY(dtrain__landing_clear(strategy, i));
    float *to = accumulate ? strategy->layout.landing[i] : bucket->grad_shard;
    DTRAIN__TRY(dtrain__stream_follow(strategy, offload->down, NULL));
    DTRAIN__TRY(device->ops->copy_async(device, to, result, bytes, DTRAIN_COPY_DEVICE_TO_HOST,
                                        offload->down));
    if (!accumulate) return DTRAIN_OK;
    offload->landed[i] = bucket;
    offload->turn = 1 - i;
    return device->ops->event_record(device, offload->arrived[i], offload->down);
}

/* The end of a backward: the buffers are free, and after the last one the shards are complete. */
static dtrain_result dtrain__shards_settle(dtrain_strategy *strategy)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    if (!strategy->layout.host_grads) return DTRAIN_OK;
    for (uint32_t i = 0; i < 2; i++) DTRAIN__TRY(dtrain__landing_clear(strategy, i));
    DTRAIN__TRY(dtrain__stream_follow(strategy, NULL, offload->down));
    if (strategy->more) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->event_record(device, offload->arrived[0], offload->down));
    return dtrain__event_await(strategy, offload->arrived[0]);
}

/* ---- Reducing a bucket ------------------------------------------------------------------------
 *
 *     gradients --(reduce_dtype)--> wire -> collective -> result -> shard
 *
 * The result of a first or only micro-batch goes straight to the shard; that of a later one, or for
 * a shard in host memory, replaces this rank's slice of the buffer the gradients were made in, and
 * is added or copied from there. */

/* Where the fp32 result of this backward is to be. */
static float *dtrain__reduce_target(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    if (bucket->work && (strategy->accumulated || strategy->layout.host_grads))
        return bucket->grads + bucket->shard_first;
    return bucket->grad_shard;
}

static dtrain_result dtrain__convert(dtrain_strategy *strategy, int64_t count, const void *x,
                                     uint32_t x_dtype, void *y, uint32_t y_dtype)
{
    dtrain_convert_args args = {count, x, y, (dtrain_dtype)x_dtype, (dtrain_dtype)y_dtype};
    if (count == 0) return DTRAIN_OK;
    return strategy->device->ops->convert(strategy->device, &args);
}

static bool dtrain__reduces_low(const dtrain_strategy *strategy)
{
    return strategy->desc.reduce_dtype != DTRAIN_F32;
}

/* With several nodes the mean is not made here: sums first, and one factor at the end. */
static dtrain_result dtrain__reduce_start(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    const bool low = dtrain__reduces_low(strategy);
    const size_t unit = dtrain_dtype_bytes(dtype);
    const dtrain_reduce_op op =
        bucket->sharded && strategy->replica_comm ? DTRAIN_SUM : DTRAIN_MEAN;
    dtrain_work **works = dtrain__works(strategy, b, false);
    bucket->stage = DTRAIN__REDUCE_SHARD;
    if (dtrain_comm_size(strategy->comm) == 1) return DTRAIN_OK; /* its mean is what it has */
    if (low)
        DTRAIN__TRY(dtrain__convert(strategy, bucket->count, bucket->grads, DTRAIN_F32,
                                    bucket->low_grads, dtype));
    char *send = low ? (char *)bucket->low_grads : (char *)bucket->grads;
    if (!bucket->sharded)
        return dtrain_all_reduce(strategy->comm, send, send, (size_t)bucket->count, dtype, op,
                                 works);
    char *own = low ? send + (size_t)bucket->shard_first * unit
                    : (char *)dtrain__reduce_target(strategy, bucket);
    if (!bucket->cuts)
        return dtrain_reduce_scatter(strategy->shard_comm, send, own, (size_t)bucket->shard_count,
                                     dtype, op, works);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        DTRAIN__TRY(dtrain_reduce(strategy->shard_comm, send + (size_t)first * unit,
                                  r == strategy->layout.rank ? own : NULL, (size_t)count, dtype, op,
                                  r, &works[r]));
    }
    return DTRAIN_OK;
}

/* shard += result of a later micro-batch; in host memory also shard = result of the first. */
static dtrain_result dtrain__accumulate_shard(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const float *result = dtrain__reduce_target(strategy, bucket);
    dtrain_add_args add = {bucket->shard_count, bucket->grad_shard, result,
                           bucket->grad_shard,  DTRAIN_F32,         DTRAIN_F32};
    if (result == bucket->grad_shard || bucket->shard_count == 0) return DTRAIN_OK;
    if (strategy->layout.host_grads)
        return dtrain__shard_to_host(strategy, bucket, result, strategy->accumulated);
    return strategy->device->ops->add(strategy->device, &add);
}

/* HYBRID_SHARD: what the micro-batches have summed up, on the device, for the other nodes. A shard
 * in host memory comes back for it. */
static dtrain_result dtrain__sum_for_replicas(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              float **sum)
{
    dtrain_device *device = strategy->device;
    *sum = bucket->grad_shard;
    if (!strategy->layout.host_grads) return dtrain__accumulate_shard(strategy, bucket);
    *sum = dtrain__reduce_target(strategy, bucket);
    if (!strategy->accumulated) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__accumulate_shard(strategy, bucket));
    for (uint32_t i = 0; i < 2; i++)
        if (strategy->offload.landed[i] == bucket) DTRAIN__TRY(dtrain__landing_clear(strategy, i));
    return device->ops->copy_async(device, *sum, bucket->grad_shard,
                                   (size_t)bucket->shard_count * sizeof(float),
                                   DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* HYBRID_SHARD: x (shard_count) is one node's sum; all nodes' replaces it. */
static dtrain_result dtrain__replicas_start(dtrain_strategy *strategy, size_t b, float *x)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    void *wire = x;
    bucket->stage = DTRAIN__REDUCE_REPLICAS;
    if (dtrain__reduces_low(strategy)) {
        wire = bucket->low_grads + bucket->shard_first;
        DTRAIN__TRY(dtrain__convert(strategy, bucket->shard_count, x, DTRAIN_F32, wire, dtype));
    }
    return dtrain_all_reduce(strategy->replica_comm, wire, wire, (size_t)bucket->shard_count, dtype,
                             DTRAIN_SUM, dtrain__works(strategy, b, false));
}

static dtrain_result dtrain__replicas_end(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                          float *x)
{
    const float factor = 1.0f / (float)dtrain_comm_size(strategy->comm);
    if (dtrain__reduces_low(strategy))
        DTRAIN__TRY(dtrain__convert(strategy, bucket->shard_count,
                                    bucket->low_grads + bucket->shard_first,
                                    strategy->desc.reduce_dtype, x, DTRAIN_F32));
    dtrain_axpby_args mean = {bucket->shard_count, false, factor, 0, x, x, false, DTRAIN_F32};
    if (bucket->shard_count == 0) return DTRAIN_OK;
    return strategy->device->ops->axpby(strategy->device, &mean);
}

/* The collective of a stage is done: what follows it. Across nodes either every micro-batch's sum
 * travels, or what the shard has gathered up to the last. */
static dtrain_result dtrain__reduce_next(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATE_SHARD_EVERY;
    float *result = dtrain__reduce_target(strategy, bucket), *sum;
    const bool across = strategy->replica_comm && bucket->sharded;
    const bool on_host = strategy->layout.host_grads && bucket->work;
    if (bucket->stage == DTRAIN__REDUCE_REPLICAS) {
        sum = every || on_host ? result : bucket->grad_shard;
        DTRAIN__TRY(dtrain__replicas_end(strategy, bucket, sum));
        bucket->stage = DTRAIN__REDUCED;
        if (every) return dtrain__accumulate_shard(strategy, bucket);
        return on_host ? dtrain__shard_to_host(strategy, bucket, sum, false) : DTRAIN_OK;
    }
    if (dtrain__reduces_low(strategy) && dtrain_comm_size(strategy->comm) > 1) {
        const uint16_t *wire = bucket->low_grads;
        if (bucket->sharded) wire += bucket->shard_first;
        DTRAIN__TRY(dtrain__convert(strategy, bucket->shard_count, wire,
                                    strategy->desc.reduce_dtype, result, DTRAIN_F32));
    }
    if (across && every) return dtrain__replicas_start(strategy, b, result);
    if (across && !strategy->more) {
        DTRAIN__TRY(dtrain__sum_for_replicas(strategy, bucket, &sum));
        return dtrain__replicas_start(strategy, b, sum);
    }
    bucket->stage = DTRAIN__REDUCED;
    return dtrain__accumulate_shard(strategy, bucket);
}

/* Moves a launched bucket on, waiting for it or not. Between nodes a second collective follows, and
 * all ranks must start it at the same place among the others: in gather or finish, and not because
 * the first happens to be done. NCCL runs them in that order, and ranks would wait in a circle. */
static dtrain_result dtrain__reduce_turn(dtrain_strategy *strategy, size_t b, bool wait, bool *done)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    dtrain_work **works = dtrain__works(strategy, b, false);
    *done = true;
    while (bucket->stage != DTRAIN__REDUCED) {
        if (!wait) DTRAIN__TRY(dtrain__test_works(strategy, works, done));
        if (!wait && strategy->replica_comm) *done = false;
        if (!*done) return DTRAIN_OK;
        DTRAIN__TRY(dtrain__wait_works(strategy, works));
        DTRAIN__TRY(dtrain__reduce_next(strategy, b));
    }
    return DTRAIN_OK;
}

/* Buckets are finished in their order too: a second stage is a collective like any other. */
static dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end)
{
    bool done;
    for (; strategy->oldest < end; strategy->oldest++)
        DTRAIN__TRY(dtrain__reduce_turn(strategy, strategy->oldest, true, &done));
    return DTRAIN_OK;
}

/* ---- A backward -------------------------------------------------------------------------------*/

/* Between a storage's own gradient and its place in the bucket; nothing to do when it lives
 * there. */
static dtrain_result dtrain__move_grad(dtrain_strategy *strategy, const dtrain_param *storage,
                                       bool back)
{
    const dtrain__entry *entry = &strategy->layout.entries[storage->index];
    float *place = strategy->layout.buckets[entry->bucket].grads + entry->offset;
    const size_t bytes = (size_t)storage->count * sizeof(float);
    if (storage->grad == place || bytes == 0) return DTRAIN_OK;
    return dtrain__copy_any(strategy->device, back ? storage->grad : place,
                            back ? place : storage->grad, bytes);
}

/* Empties the buffers of bucket b's gradients. What travels between nodes may be under way still
 * where it is the shard that travels. */
static dtrain_result dtrain__vacate_work(dtrain_strategy *strategy, size_t b)
{
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATE_SHARD_EVERY;
    const bool on_host = strategy->layout.host_grads;
    if (!strategy->replica_comm || on_host || dtrain__reduces_low(strategy) ||
        (every && strategy->accumulated)) {
        DTRAIN__TRY(dtrain__reduce_until(strategy, b + 1));
        return on_host ? dtrain__stream_follow(strategy, NULL, strategy->offload.down) : DTRAIN_OK;
    }
    for (size_t i = strategy->oldest; i <= b; i++) {
        if (strategy->layout.buckets[i].stage != DTRAIN__REDUCE_SHARD) continue;
        DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, i, false)));
        DTRAIN__TRY(dtrain__reduce_next(strategy, i));
    }
    return DTRAIN_OK;
}

/* Makes the alternating buffer of a unit's gradients free for them: what the unit before the last
 * left there has been reduced. A unit without gradients leaves it to whose it is. */
static dtrain_result dtrain__claim_work(dtrain_strategy *strategy, uint32_t unit)
{
    if (!strategy->layout.work || unit == DTRAIN__NONE) return DTRAIN_OK;
    if (strategy->layout.units[unit].trainable == DTRAIN__NONE) return DTRAIN_OK;
    uint32_t *working = &strategy->working[unit & 1];
    const uint32_t before = *working;
    *working = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    const uint32_t bucket = strategy->layout.units[before].trainable;
    if (bucket >= strategy->launched) return DTRAIN_OK; /* from forward: there is nothing in it */
    return dtrain__vacate_work(strategy, bucket);
}

/* In bucket order, up to the first that still waits for a gradient. Frozen buckets have no
 * gradients. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy)
{
    for (; strategy->launched < strategy->layout.bucket_count; strategy->launched++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[strategy->launched];
        if (bucket->pending) break;
        if (bucket->trainable) DTRAIN__TRY(dtrain__reduce_start(strategy, strategy->launched));
        else bucket->stage = DTRAIN__REDUCED;
    }
    return DTRAIN_OK;
}

/* One turn for the communicator per ready call: without a progress thread, buckets move only
 * then. It costs two looks at the clock and one cache line per rank when there is nothing to
 * do; ready calls are a layer's backward apart. */
static dtrain_result dtrain__progress(dtrain_strategy *strategy)
{
    bool done = true;
    while (strategy->oldest < strategy->launched) {
        DTRAIN__TRY(dtrain__reduce_turn(strategy, strategy->oldest, false, &done));
        if (!done) break;
        strategy->oldest++;
    }
    return DTRAIN_OK;
}

/* Constant time: three counters tell what became final, no list is searched. */
static dtrain_result dtrain__mark(dtrain_strategy *strategy, size_t index)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_param *storage = strategy->params[index].storage;
    dtrain__entry *entry = &layout->entries[index], *place = &layout->entries[storage->index];
    dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    if (bucket->work && bucket->unit != DTRAIN__NONE &&
        strategy->working[bucket->unit & 1] != bucket->unit)
        DTRAIN__TRY(dtrain__claim_work(strategy, bucket->unit));
    entry->marked = true;
    strategy->marked_count++;
    bucket->pending--;
    if (--place->pending == 0) DTRAIN__TRY(dtrain__move_grad(strategy, storage, false));
    if (!strategy->desc.no_overlap) DTRAIN__TRY(dtrain__launch_buckets(strategy));
    return dtrain__progress(strategy);
}

/* True while gradients only add up on this rank. */
static bool dtrain__only_adds(const dtrain_strategy *strategy)
{
    return strategy->more && strategy->desc.accumulation == DTRAIN_ACCUMULATE_LAST;
}

/* While gradients only add up, nothing tells where one backward ends and the next begins: marks
 * are not kept. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_ready"));
    if (index >= strategy->param_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_ready: index %zu, there are %zu parameters", index,
                           strategy->param_count);
    dtrain__entry *entry = &strategy->layout.entries[index];
    if (!entry->trainable)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_strategy_ready: parameter %zu (\"%.100s\") is frozen", index,
                           strategy->params[index].name);
    if (entry->marked)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_ready: parameter %zu (\"%.100s\") is marked twice in one "
            "backward; call dtrain_strategy_finish between two",
            index, strategy->params[index].name);
    entry->seen = true;
    strategy->params[index].storage->grad_written = true;
    if (dtrain__only_adds(strategy)) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__mark(strategy, index));
}

DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_accumulate"));
    if (more != strategy->more && strategy->marked_count)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_accumulate: %zu parameters of this backward are already marked; "
            "call it before a backward, and dtrain_strategy_finish after each",
            strategy->marked_count);
    strategy->more = more;
    return DTRAIN_OK;
}

/* ---- The end of a backward --------------------------------------------------------------------*/

/* Does one of the alternating buffers hold gradients that have not been launched? */
static bool dtrain__work_is_live(const dtrain_strategy *strategy, uint32_t turn)
{
    const dtrain__layout *layout = &strategy->layout;
    const uint32_t unit = strategy->working[turn];
    const uint32_t b = unit == DTRAIN__NONE ? DTRAIN__NONE : layout->units[unit].trainable;
    if (b == DTRAIN__NONE || b < strategy->launched) return false;
    for (uint32_t i = layout->buckets[b].first_param; i <= layout->buckets[b].last_param; i++)
        if (layout->entries[i].bucket == b && strategy->params[i].grad_written) return true;
    return false;
}

/* A unit behind the one in which this backward has begun is not visited, and reduced all the same,
 * as zeros. Its own buffer holds gradients of the visited unit: it borrows the other, and gives it
 * back at once. */
static dtrain_result dtrain__reduce_unvisited(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const uint32_t index = (uint32_t)(bucket - strategy->layout.buckets);
    const uint32_t other = (bucket->unit & 1) ^ 1;
    float *own = bucket->grads;
    if (dtrain__work_is_live(strategy, other))
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_strategy_gather: two units have gradients and unit %u, behind "
                           "them, has none; gather units in the order of backward",
                           strategy->layout.units[bucket->unit].id);
    DTRAIN__TRY(dtrain__reduce_until(strategy, index)); /* whoever has used it */
    strategy->working[other] = DTRAIN__NONE;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++)
        if (strategy->layout.entries[i].bucket == index) strategy->layout.entries[i].pending = 0;
    bucket->pending = 0;
    bucket->grads = strategy->layout.work_grads[other];
    dtrain_result result = strategy->device->ops->zero(strategy->device, bucket->grads,
                                                       (size_t)bucket->count * sizeof(float));
    if (result == DTRAIN_OK) result = dtrain__reduce_start(strategy, index);
    strategy->launched = (size_t)index + 1;
    if (result == DTRAIN_OK) result = dtrain__reduce_until(strategy, strategy->launched);
    bucket->grads = own;
    return result;
}

/* Gradients of a bucket that wait for a mark: what an earlier micro-batch or another use has left
 * counts, the rest is zero. */
static dtrain_result dtrain__settle_bucket(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain__layout *layout = &strategy->layout;
    const uint32_t index = (uint32_t)(bucket - layout->buckets);
    if (bucket->pending == 0) return DTRAIN_OK;
    if (bucket->work && bucket->unit != DTRAIN__NONE &&
        strategy->working[bucket->unit & 1] != bucket->unit &&
        dtrain__work_is_live(strategy, bucket->unit & 1))
        return dtrain__reduce_unvisited(strategy, bucket);
    if (bucket->work) DTRAIN__TRY(dtrain__claim_work(strategy, bucket->unit));
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain__entry *entry = &layout->entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->pending || entry->bucket != index) continue;
        if (p->grad_written) DTRAIN__TRY(dtrain__move_grad(strategy, p, false));
        else
            DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads + entry->offset,
                                                    (size_t)p->count * sizeof(float)));
        entry->pending = 0;
    }
    bucket->pending = 0;
    return DTRAIN_OK;
}

/* Settles and launches buckets up to `end`, one by one: a buffer is zeroed for the next only when
 * the one before it has been launched. */
static dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end)
{
    while (strategy->launched < end) {
        DTRAIN__TRY(dtrain__settle_bucket(strategy, &strategy->layout.buckets[strategy->launched]));
        DTRAIN__TRY(dtrain__launch_buckets(strategy));
    }
    return DTRAIN_OK;
}

/* All buckets have been launched: whatever this rank lacks, the others are not left waiting. */
static dtrain_result dtrain__report_missing(dtrain_strategy *strategy)
{
    char names[640];
    dtrain_result result = DTRAIN_OK;
    const bool strict = strategy->desc.missing_gradient == DTRAIN_MISSING_ERROR;
    const size_t count =
        dtrain__list_missing(strategy->params, strategy->param_count, strategy->layout.entries,
                             !strict, names, sizeof names);
    if (!strict) {
        if (count)
            dtrain_log(strategy->world, DTRAIN_LOG_WARNING,
                       "dtrain_strategy_finish: no gradient from this backward, zero is used: %s",
                       names);
        return DTRAIN_OK;
    }
    if (count)
        result = dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_finish: no gradient from this backward: %s; mark them with "
            "dtrain_strategy_ready, or set DTRAIN_PARAM_FROZEN",
            names);
    return dtrain__agree(strategy->comm, result);
}

/* Whole gradients go back to the arrays of a host that has its own. */
static dtrain_result dtrain__return_grads(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_param *p = strategy->shards[i].param;
        if (layout->buckets[layout->entries[p->index].bucket].sharded) continue;
        DTRAIN__TRY(dtrain__move_grad(strategy, p, true));
    }
    return DTRAIN_OK;
}

static void dtrain__forget_units(dtrain_strategy *strategy); /* [S29] */
static dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy);

/* The order matters: everything is launched before ranks exchange what is missing, and waited for
 * before anything is reported. So a step that fails for a missing gradient has made the same
 * collectives as one that succeeds, and the next step finds all ranks at the same place. */
DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy)
{
    dtrain_result missing = DTRAIN_OK;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_finish"));
    if (dtrain__only_adds(strategy)) return DTRAIN_OK;
    const size_t count = strategy->layout.bucket_count;
    const bool last = !strategy->more;
    dtrain_result result = dtrain__close_buckets(strategy, count);
    if (result == DTRAIN_OK && last) missing = dtrain__report_missing(strategy);
    if (result == DTRAIN_OK) result = dtrain__reduce_until(strategy, count);
    if (result == DTRAIN_OK) result = dtrain__shards_settle(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__return_grads(strategy);
    /* units fetched ahead and not used: they read the shards that will be updated */
    if (result == DTRAIN_OK && last) result = dtrain__settle_gathers(strategy);
    if (result != DTRAIN_OK) return dtrain__strategy_keep(strategy, result);
    dtrain__strategy_rewind(strategy, last);
    if (missing == DTRAIN_OK && last) strategy->sync_count++;
    return missing;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* ZERO1 and SHARD_GRAD_OP: every rank's slice of a bucket to all. */
static dtrain_result dtrain__gather_slices(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        if (!bucket->sharded) continue;
        DTRAIN__TRY(dtrain_all_gather(strategy->shard_comm, bucket->value_shard, bucket->values,
                                      (size_t)bucket->shard_count, DTRAIN_F32,
                                      dtrain__works(strategy, b, true)));
    }
    for (size_t b = 0; b < layout->bucket_count; b++)
        DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, b, true)));
    return dtrain__copy_host_values(strategy, true);
}

DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_publish"));
    if (!strategy->layout.shards) return DTRAIN_OK;
    if (!strategy->layout.slots)
        return dtrain__strategy_keep(strategy, dtrain__gather_slices(strategy));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__settle_gathers(strategy)));
    dtrain__forget_units(strategy);
    return DTRAIN_OK;
}

/* ---- Queries ----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count)
{
    if (shards) *shards = NULL;
    if (count) *count = 0;
    if (!strategy || !shards || !count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_shards: %s is NULL",
                           !strategy ? "strategy"
                           : !shards ? "shards"
                                     : "count");
    *shards = strategy->shards;
    *count = strategy->shard_count;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_comm *dtrain_strategy_comm(dtrain_strategy *strategy)
{
    return strategy ? strategy->comm : NULL;
}

/* The books of all its communicators together. */
static void dtrain__strategy_comm_info(const dtrain_strategy *strategy, dtrain_comm_info *info)
{
    dtrain_comm *more[2] = {strategy->replica_comm, strategy->shard_comm};
    dtrain_comm_query(strategy->comm, info);
    for (int i = 0; i < 2; i++) {
        dtrain_comm_info one;
        if (!more[i] || more[i] == strategy->comm) continue;
        dtrain_comm_query(more[i], &one);
        info->operation_count += one.operation_count;
        info->payload_bytes += one.payload_bytes;
        info->wire_bytes += one.wire_bytes;
        info->staged_bytes += one.staged_bytes;
        info->inside_seconds += one.inside_seconds;
        info->flight_seconds += one.flight_seconds;
    }
}

/* ================================================================================================
 * [S29] Sharded parameters
 *
 * A unit's life in a step, in kinds that shard parameters; two slots, one being used while the
 * other is filled:
 *
 *     forward    gather 0    gather 1    gather 2    gather 3   | backward  gather 2   gather 1 ...
 *     slot 0     [ 0 used ]  [ 2 coming ][ 2 used ] . . . . . . |. . . . .  [ 2 used ] [ 0 coming ]
 *     slot 1     [ 1 coming ][ 1 used ]  [ 3 coming ][ 3 used . | used ]    [ 1 coming][ 1 used ]
 *
 * Unit u lives in slot u % 2, so its addresses are the same whenever it is there, and what the tape
 * has recorded stays right. Memory is constant: two units, however deep the model. What is still in
 * a slot is not fetched again (units 3 and 2 at the turn above).
 *
 * Why a slot may be overwritten: gather(u) comes after release(u - 1), and fetches ahead only into
 * that unit's slot. On a device with streams a collective starts behind the work queued before it.
 *
 * Units must be gathered in order because every rank has to start the same collectives: a rank that
 * went another way would get another unit's numbers when the sizes happen to agree. So the order is
 * checked on each rank, and a violation is an error instead of wrong weights.
 * ==============================================================================================*/

enum { DTRAIN__ABSENT, DTRAIN__COMING, DTRAIN__HERE };

/* ---- One bucket -------------------------------------------------------------------------------*/

/* A shard in host memory to its place in the slot, where *shard then is; behind those that used the
 * slot, and before the collective. */
static dtrain_result dtrain__shard_to_slot(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                           const float **shard)
{
    float *place = bucket->values + bucket->shard_first;
    *shard = place;
    return strategy->device->ops->copy_async(strategy->device, place, bucket->value_shard,
                                             (size_t)bucket->shard_count * sizeof(float),
                                             DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* Starts bringing a bucket's values together, as dtype. */
static dtrain_result dtrain__gather_start(dtrain_strategy *strategy, size_t b, dtrain_dtype dtype)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const size_t unit = dtrain_dtype_bytes(dtype);
    const bool low = dtype != DTRAIN_F32;
    dtrain_work **works = dtrain__works(strategy, b, true);
    char *whole = low ? (char *)bucket->low_values : (char *)bucket->values;
    char *own = whole + (size_t)bucket->shard_first * unit;
    const float *shard = bucket->value_shard;
    bucket->presence = DTRAIN__COMING;
    if (layout->host_values) DTRAIN__TRY(dtrain__shard_to_slot(strategy, bucket, &shard));
    if (low)
        DTRAIN__TRY(dtrain__convert(strategy, bucket->shard_count, shard, DTRAIN_F32, own, dtype));
    if (!bucket->cuts)
        return dtrain_all_gather(strategy->shard_comm,
                                 low ? (const void *)own : (const void *)shard, whole,
                                 (size_t)bucket->shard_count, dtype, works);
    if (!low && bucket->shard_count && shard == bucket->value_shard)
        DTRAIN__TRY(strategy->device->ops->copy(strategy->device, own, shard,
                                                (size_t)bucket->shard_count * unit,
                                                DTRAIN_COPY_DEVICE_TO_DEVICE));
    for (int r = 0; r < layout->ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        DTRAIN__TRY(dtrain_broadcast(strategy->shard_comm, whole + (size_t)first * unit,
                                     (size_t)count, dtype, r, &works[r]));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__gather_end(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (bucket->presence != DTRAIN__COMING) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, b, true)));
    bucket->presence = DTRAIN__HERE;
    if (strategy->desc.param_dtype == DTRAIN_F32) return DTRAIN_OK;
    return dtrain__convert(strategy, bucket->count, bucket->low_values, strategy->desc.param_dtype,
                           bucket->values, DTRAIN_F32);
}

/* Points the parameters of a bucket at its values, or at nothing. */
static void dtrain__show_values(dtrain_strategy *strategy, uint32_t b, bool here)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__bucket *bucket = &layout->buckets[b];
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain_param *p = &strategy->params[i];
        const dtrain__entry *storage = &layout->entries[p->storage->index];
        if (storage->bucket != b) continue;
        p->value = here ? bucket->values + storage->offset : NULL;
    }
}

static dtrain_result dtrain__evict(dtrain_strategy *strategy, uint32_t b)
{
    if (b == DTRAIN__NONE) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gather_end(strategy, b));
    dtrain__show_values(strategy, b, false);
    strategy->layout.buckets[b].presence = DTRAIN__ABSENT;
    return DTRAIN_OK;
}

/* Whoever else is in the unit's slot has to go. */
static dtrain_result dtrain__claim_slot(dtrain_strategy *strategy, uint32_t unit)
{
    const uint32_t before = strategy->slots[unit & 1];
    strategy->slots[unit & 1] = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__evict(strategy, strategy->layout.units[before].trainable));
    return dtrain__evict(strategy, strategy->layout.units[before].frozen);
}

static dtrain_result dtrain__fetch(dtrain_strategy *strategy, uint32_t b)
{
    if (b == DTRAIN__NONE) return DTRAIN_OK;
    const dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (bucket->presence != DTRAIN__ABSENT) return DTRAIN_OK;
    if (bucket->slotted) DTRAIN__TRY(dtrain__claim_slot(strategy, bucket->unit));
    return dtrain__gather_start(strategy, b, (dtrain_dtype)strategy->desc.param_dtype);
}

static dtrain_result dtrain__need(dtrain_strategy *strategy, uint32_t b)
{
    if (b == DTRAIN__NONE) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__fetch(strategy, b));
    DTRAIN__TRY(dtrain__gather_end(strategy, b));
    dtrain__show_values(strategy, b, true);
    return DTRAIN_OK;
}

/* After publish: what was gathered is not what the shards hold any more. */
static void dtrain__forget_units(dtrain_strategy *strategy)
{
    for (uint32_t b = 0; b < strategy->layout.bucket_count; b++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[b];
        if (!bucket->sharded) continue;
        dtrain__show_values(strategy, b, false);
        bucket->presence = DTRAIN__ABSENT;
    }
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
}

static dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy)
{
    for (size_t b = 0; b < strategy->layout.bucket_count; b++)
        DTRAIN__TRY(dtrain__gather_end(strategy, b));
    return DTRAIN_OK;
}

/* ---- Hooks ------------------------------------------------------------------------------------*/

/* Hosts walk from one neighbour to the next: looking there first makes it constant time. */
static uint32_t dtrain__find_unit(const dtrain_strategy *strategy, uint32_t id)
{
    const dtrain__layout *layout = &strategy->layout;
    const uint32_t count = (uint32_t)layout->unit_count;
    const uint32_t from =
        strategy->position == DTRAIN__NONE || strategy->position == 0 ? 0 : strategy->position - 1;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = (from + i) % count;
        if (layout->units[at].id == id) return at;
    }
    return DTRAIN__NONE;
}

/* A pass begins with the first unit and goes on to the next; a backward goes back, and may step
 * over units that no gradient reaches. */
static dtrain_result dtrain__check_order(const dtrain_strategy *strategy, uint32_t at, uint32_t id)
{
    const dtrain__unit *units = strategy->layout.units;
    const uint32_t last = strategy->position;
    char due[96];
    if (at == DTRAIN__NONE)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_gather: no parameter belongs to unit %u", id);
    if (at == 0) return DTRAIN_OK;
    if (last != DTRAIN__NONE && at <= last + 1) return DTRAIN_OK;
    snprintf(due, sizeof due, "unit %u%s", units[last == DTRAIN__NONE ? 0 : last + 1].id,
             last == DTRAIN__NONE ? ", the first" : " in forward, an earlier one in backward");
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "dtrain_strategy_gather: unit %u is not due; due is %s. Units are gathered "
                       "in the order in which their first parameters are registered, and "
                       "backwards in backward",
                       id, due);
}

/* Both buckets are under way before either is waited for. */
static dtrain_result dtrain__need_unit(dtrain_strategy *strategy, const dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__fetch(strategy, unit->trainable));
    DTRAIN__TRY(dtrain__fetch(strategy, unit->frozen));
    DTRAIN__TRY(dtrain__need(strategy, unit->trainable));
    return dtrain__need(strategy, unit->frozen);
}

static dtrain_result dtrain__fetch_next(dtrain_strategy *strategy, uint32_t at, bool backward)
{
    const uint32_t next = backward ? at - 1 : at + 1;
    if (strategy->desc.no_overlap || (backward && at == 0)) return DTRAIN_OK;
    if (next >= strategy->layout.unit_count) return DTRAIN_OK;
    const dtrain__unit *unit = &strategy->layout.units[next];
    DTRAIN__TRY(dtrain__fetch(strategy, unit->trainable));
    return dtrain__fetch(strategy, unit->frozen);
}

/* In backward all units behind this one are finished: their gradients are closed, in the same order
 * on every rank. */
static dtrain_result dtrain__gather(dtrain_strategy *strategy, uint32_t id)
{
    dtrain__layout *layout = &strategy->layout;
    const uint32_t at = dtrain__find_unit(strategy, id), last = strategy->position;
    const bool backward = strategy->marked_count > 0 || (last != DTRAIN__NONE && at < last && at);
    DTRAIN__TRY(dtrain__check_order(strategy, at, id));
    if (layout->work && strategy->marked_count && layout->units[at].trainable != DTRAIN__NONE)
        DTRAIN__TRY(dtrain__close_buckets(strategy, layout->units[at].trainable));
    DTRAIN__TRY(dtrain__claim_work(strategy, at));
    strategy->position = at;
    if (!layout->slots) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__need_unit(strategy, &layout->shared)); /* stays until publish */
    DTRAIN__TRY(dtrain__need_unit(strategy, &layout->units[at]));
    return dtrain__fetch_next(strategy, at, backward);
}

DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_gather"));
    if (!strategy->layout.slots && !strategy->layout.work) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__gather(strategy, unit));
}

/* The values stay where they are until the slot is wanted; only the pointers go, so that use after
 * release is noticed. */
DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_release"));
    if (!strategy->layout.slots) return DTRAIN_OK;
    const uint32_t at = dtrain__find_unit(strategy, unit);
    if (at == DTRAIN__NONE)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_release: no parameter belongs to unit %u", unit);
    const dtrain__unit *u = &strategy->layout.units[at];
    if (u->trainable != DTRAIN__NONE) dtrain__show_values(strategy, u->trainable, false);
    if (u->frozen != DTRAIN__NONE) dtrain__show_values(strategy, u->frozen, false);
    return DTRAIN_OK;
}

/* A gathered parameter in the type it travelled in, for the tape; NULL if there is none. */
static const void *dtrain__strategy_low(const dtrain_strategy *strategy,
                                        const dtrain_param *storage, dtrain_dtype dtype)
{
    if (!strategy || !strategy->layout.slots || strategy->desc.param_dtype != (uint32_t)dtype)
        return NULL;
    const dtrain__entry *entry = &strategy->layout.entries[storage->index];
    if (dtrain__value_is_whole(&strategy->layout, entry)) return NULL;
    const dtrain__bucket *bucket = &strategy->layout.buckets[entry->bucket];
    if (bucket->presence != DTRAIN__HERE) return NULL;
    return bucket->low_values + entry->offset;
}

/* ---- Whole parameters -------------------------------------------------------------------------*/

/* A bucket's values as the shards have them. Where units travel rounded, what lies in a slot is not
 * that: it is brought in fp32, and forgotten afterwards. */
static dtrain_result dtrain__gather_exact(dtrain_strategy *strategy, uint32_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (strategy->desc.param_dtype != DTRAIN_F32) {
        DTRAIN__TRY(dtrain__evict(strategy, b));
        if (bucket->slotted) DTRAIN__TRY(dtrain__claim_slot(strategy, bucket->unit));
        DTRAIN__TRY(dtrain__gather_start(strategy, b, DTRAIN_F32));
        bucket->presence = DTRAIN__ABSENT;
        return dtrain__wait_works(strategy, dtrain__works(strategy, b, true));
    }
    DTRAIN__TRY(dtrain__fetch(strategy, b));
    return dtrain__gather_end(strategy, b);
}

/* Storage i with its value whole, wherever it has to be brought from. */
static dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i, dtrain_param *whole)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__entry *entry = &layout->entries[i];
    *whole = strategy->params[i];
    if (!layout->slots || dtrain__value_is_whole(layout, entry)) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gather_exact(strategy, entry->bucket));
    whole->value = layout->buckets[entry->bucket].values + entry->offset;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_read(dtrain_strategy *strategy, size_t index, float *host)
{
    dtrain_param whole;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_read"));
    if (index >= strategy->param_count || !host)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_read: %s (index %zu of %zu parameters)",
            host ? "no such parameter" : "host is NULL", index, strategy->param_count);
    const size_t storage = strategy->params[index].storage->index;
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, storage, &whole)));
    return dtrain__copy_any(strategy->device, host, whole.value,
                            (size_t)whole.count * sizeof(float));
}

/* The hash of everything differs somewhere: parameter by parameter, up to the first. */
static dtrain_result dtrain__name_drift(dtrain_strategy *strategy)
{
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_param whole;
        uint64_t hash;
        int usual, odd;
        bool common;
        if (strategy->params[i].storage != &strategy->params[i]) continue;
        DTRAIN__TRY(dtrain__whole_param(strategy, i, &whole));
        DTRAIN__TRY(dtrain__hash_param(strategy->device, &whole, &hash));
        DTRAIN__TRY(dtrain__is_common(strategy->comm, hash, &common));
        if (common) continue;
        DTRAIN__TRY(dtrain__odd_rank(strategy->comm, hash, strategy->gathered, &usual, &odd));
        return dtrain_fail(
            DTRAIN_ERROR_MISMATCH,
            "dtrain_strategy_verify: the values of parameter %zu (\"%.100s\") on rank %d "
            "are not those of rank %d; every rank must make the same updates",
            i, whole.name, dtrain_comm_world_rank(strategy->comm, odd),
            dtrain_comm_world_rank(strategy->comm, usual));
    }
    return dtrain_fail(DTRAIN_ERROR_INTERNAL,
                       "dtrain_strategy_verify: hashes differ, but no parameter's does");
}

DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash)
{
    uint64_t all = DTRAIN__FNV_BASIS;
    bool common;
    if (hash) *hash = 0;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_verify"));
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_param whole;
        uint64_t one;
        if (strategy->params[i].storage != &strategy->params[i]) continue;
        DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, i, &whole)));
        DTRAIN__TRY(dtrain__hash_param(strategy->device, &whole, &one));
        all = dtrain__fnv1a(all, &one, sizeof one);
    }
    DTRAIN__TRY(dtrain__is_common(strategy->comm, all, &common));
    if (!common) return dtrain__name_drift(strategy);
    if (hash) *hash = all;
    return DTRAIN_OK;
}

/* ---- What a step sends ------------------------------------------------------------------------*/

static uint64_t dtrain__wire(uint32_t kind, int64_t count, uint32_t dtype, int ranks)
{
    dtrain_collective what;
    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.dtype = (dtrain_dtype)dtype;
    what.count = (size_t)count;
    return dtrain__wire_bytes(&what, ranks);
}

/* Once every owner's run, or once everything. */
static uint64_t dtrain__sliced_wire(const dtrain__layout *layout, const dtrain__bucket *bucket,
                                    bool reduce, uint32_t dtype)
{
    uint64_t bytes = 0;
    if (!bucket->cuts)
        return dtrain__wire(reduce ? DTRAIN_REDUCE_SCATTER : DTRAIN_ALL_GATHER, bucket->shard_count,
                            dtype, layout->ranks);
    for (int r = 0; r < layout->ranks; r++)
        bytes += dtrain__wire(reduce ? DTRAIN_REDUCE : DTRAIN_BROADCAST,
                              bucket->cuts[r + 1] - bucket->cuts[r], dtype, layout->ranks);
    return bytes;
}

/* Is a unit still in its slot when backward comes to it? */
static bool dtrain__stays(const dtrain__layout *layout, uint32_t unit)
{
    if (unit == DTRAIN__NONE || layout->units[unit].kept) return true;
    for (uint32_t later = unit + 2; later < layout->unit_count; later += 2) {
        const dtrain__unit *u = &layout->units[later];
        if (!u->kept && (u->trainable != DTRAIN__NONE || u->frozen != DTRAIN__NONE)) return false;
    }
    return true;
}

/* By the ring formula, in a step of one micro-batch. ranks: of the whole world. */
static uint64_t dtrain__step_bytes(const dtrain__layout *layout, int ranks)
{
    const uint32_t values = layout->desc->param_dtype, grads = layout->desc->reduce_dtype;
    const int replicas = ranks / layout->ranks;
    uint64_t bytes = 0;
    if (ranks == 1) return 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        if (!bucket->sharded) {
            bytes += dtrain__wire(DTRAIN_ALL_REDUCE, bucket->count, grads, ranks);
            continue;
        }
        if (bucket->trainable) bytes += dtrain__sliced_wire(layout, bucket, true, grads);
        if (bucket->trainable && layout->traits->kind == DTRAIN_HYBRID_SHARD)
            bytes += dtrain__wire(DTRAIN_ALL_REDUCE, bucket->shard_count, grads, replicas);
        const uint64_t gather = dtrain__sliced_wire(layout, bucket, false, values);
        bytes += gather;
        if (layout->slots && !dtrain__stays(layout, bucket->unit)) bytes += gather;
    }
    return bytes;
}

DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!strategy) return;
    const dtrain__layout *layout = &strategy->layout;
    const int ranks = dtrain_comm_size(strategy->comm);
    info->desc = strategy->desc;
    info->name = strategy->traits->name;
    info->param_count = strategy->param_count;
    info->bucket_count = layout->bucket_count;
    info->unit_count = layout->unit_count;
    info->shard_ranks = layout->ranks;
    info->replicas = ranks / layout->ranks;
    info->sync_count = strategy->sync_count;
    info->buffer_bytes = layout->bytes[DTRAIN__BUFFERS];
    info->host_bytes = layout->bytes[DTRAIN__HOST];
    info->step_bytes = dtrain__step_bytes(layout, ranks);
    dtrain__layout_bytes(layout, &info->value_bytes, &info->grad_bytes);
    for (size_t b = 0; b < layout->bucket_count; b++)
        if (layout->buckets[b].trainable)
            info->bucket_bytes += (uint64_t)layout->buckets[b].count * sizeof(float);
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (p->storage != p) continue;
        info->total_elements += (uint64_t)p->count;
        if (layout->entries[i].trainable) info->trainable_elements += (uint64_t)p->count;
    }
    memcpy(info->reason, strategy->reason, sizeof info->reason);
}

/* ---- Planning ---------------------------------------------------------------------------------*/

#define DTRAIN__PIECE ((int64_t)1 << 18) /* elements of one turn of an update in host memory */

/* Page-locked memory of an optimizer that works there: states, master copies of values that are on
 * the device, and two stages for gradients that are; *stage: elements of one. */
static uint64_t dtrain__offloaded_state(const dtrain__layout *layout, size_t states, int64_t *stage)
{
    uint64_t bytes = 0;
    *stage = 0;
    for (size_t i = 0; i < layout->count; i++) {
        int64_t offset, count;
        if (!dtrain__piece(layout, i, &offset, &count)) continue;
        const dtrain__bucket *bucket = &layout->buckets[layout->entries[i].bucket];
        const bool master = !(layout->host_values && bucket->sharded);
        const int64_t some = dtrain__min(dtrain__padded(count), DTRAIN__PIECE);
        bytes += (uint64_t)dtrain__padded(count) * sizeof(float) * (states + (master ? 1 : 0));
        if (!(layout->host_grads && bucket->work)) *stage = dtrain__max(*stage, some);
    }
    return bytes + 2 * (uint64_t)*stage * sizeof(float);
}

/* fp32 optimizer state of this rank's pieces, as the optimizer will pad them. */
static uint64_t dtrain__layout_state(const dtrain__layout *layout)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < layout->count; i++) {
        int64_t offset, count;
        if (dtrain__piece(layout, i, &offset, &count))
            bytes += (uint64_t)dtrain__padded(count) * sizeof(float);
    }
    return bytes * layout->desc->optimizer_states;
}

/* Of one kind, for the rank that holds most; params are resolved. */
static dtrain_result dtrain__plan_kind(const dtrain_allocator *a, const dtrain_param *params,
                                       size_t count, dtrain_strategy_desc desc, uint32_t kind,
                                       int ranks, dtrain_memory *memory, uint64_t *step_bytes)
{
    desc.kind = kind;
    const dtrain__traits *traits = dtrain__traits_of(kind);
    const int shard_ranks = !traits->state                                  ? 1
                            : kind == DTRAIN_HYBRID_SHARD && desc.node_size ? (int)desc.node_size
                                                                            : ranks;
    dtrain__resolve_accumulation(&desc, traits);
    memset(memory, 0, sizeof *memory);
    if (step_bytes) *step_bytes = 0;
    for (int rank = 0; rank < (traits->owners ? shard_ranks : 1); rank++) {
        dtrain__layout layout;
        dtrain_memory one;
        dtrain_result result =
            dtrain__layout_make(&layout, a, params, count, &desc, shard_ranks, rank);
        memset(&one, 0, sizeof one);
        if (result == DTRAIN_OK) {
            int64_t stage;
            dtrain__lay_memory(&layout);
            dtrain__layout_bytes(&layout, &one.params, &one.grads);
            one.buffers = layout.bytes[DTRAIN__BUFFERS];
            one.host = layout.bytes[DTRAIN__HOST];
            if (desc.offload)
                one.host += dtrain__offloaded_state(&layout, desc.optimizer_states, &stage);
            else one.optimizer = dtrain__layout_state(&layout);
            one.total = one.params + one.grads + one.buffers + one.optimizer;
            if (step_bytes) *step_bytes = dtrain__step_bytes(&layout, ranks);
        }
        dtrain__layout_free(&layout, a);
        DTRAIN__TRY(result);
        const uint64_t host = one.host > memory->host ? one.host : memory->host;
        if (one.total >= memory->total) *memory = one;
        memory->host = host;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory)
{
    const char *const call = "dtrain_strategy_plan";
    const dtrain_allocator a = dtrain__resolve_allocator(NULL);
    if (!params || !desc || !memory || rank_count < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: params, desc or memory is NULL, or rank_count (%d) is below 1",
                           call, rank_count);
    dtrain_strategy_desc resolved = *desc;
    dtrain__resolve_zeros(&resolved);
    const dtrain__traits *traits = dtrain__traits_of(resolved.kind);
    if (!traits)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: kind %u is not one that can be planned",
                           call, (unsigned)desc->kind);
    DTRAIN__TRY(dtrain__check_fields(&resolved));
    DTRAIN__TRY(dtrain__check_combination(&resolved, traits));
    if (desc->node_size && rank_count % (int)desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: node_size %u does not divide %d ranks", call,
                           desc->node_size, rank_count);
    uint64_t *hashes = (uint64_t *)dtrain__alloc(&a, param_count, sizeof *hashes, "name hashes");
    if (!hashes) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__resolve_params(params, param_count, hashes);
    dtrain__free(&a, hashes, param_count, sizeof *hashes);
    if (result == DTRAIN_OK)
        result = dtrain__plan_kind(&a, params, param_count, resolved, resolved.kind, rank_count,
                                   memory, NULL);
    return result;
}

/* ---- AUTO -------------------------------------------------------------------------------------*/

/* What a plan does not count: whole pages, stages of further communicators, a trainer's scalars. */
#define DTRAIN__UNPLANNED_BYTES ((uint64_t)1 << 20)

/* What this rank may use from here on. Of memory that nobody has limited a sixteenth stays free:
 * for scratch of kernels and for others on the machine. */
static dtrain_result dtrain__memory_left(dtrain_world *world, uint64_t limit, uint64_t *left)
{
    dtrain_device *device = world->device;
    const uint64_t used = (uint64_t)device->allocated_bytes + device->comm_bytes;
    dtrain_device_info info;
    *left = limit;
    if (limit) return DTRAIN_OK;
    if (device->limit_bytes) {
        *left = device->limit_bytes > used + DTRAIN__UNPLANNED_BYTES
                    ? device->limit_bytes - used - DTRAIN__UNPLANNED_BYTES
                    : 0;
    } else if (device->ops->host_memory) {
        *left = dtrain__free_memory() / 16 * 15 / (uint64_t)world->local_size;
    } else {
        DTRAIN__TRY(device->ops->query(device, &info));
        *left = info.free_bytes / 16 * 15;
    }
    return DTRAIN_OK;
}

/* That, less what is used beside the strategy; negative when that alone is too much. The rank that
 * has least decides for all: the choice must be one. */
static dtrain_result dtrain__auto_limit(dtrain_world *world, const dtrain_strategy_desc *desc,
                                        dtrain_comm *comm, int64_t *left)
{
    uint64_t have;
    DTRAIN__TRY(dtrain__agree(comm, dtrain__memory_left(world, desc->memory_limit, &have)));
    *left = (int64_t)(have < INT64_MAX ? have : INT64_MAX) -
            (int64_t)(desc->other_bytes < INT64_MAX ? desc->other_bytes : INT64_MAX);
    return dtrain_all_reduce(comm, left, left, 1, DTRAIN_I64, DTRAIN_MIN, NULL);
}

static double dtrain__mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

static dtrain_result dtrain__auto_fails(const dtrain_strategy *strategy, uint64_t least,
                                        int64_t left)
{
    return dtrain_fail(
        DTRAIN_ERROR_MEMORY,
        "dtrain_strategy_create: no strategy fits: the smallest needs %.1f MiB a rank for "
        "parameters, gradients, optimizer and buffers, and %.1f MiB are left for them beside %.1f "
        "MiB of activations and the rest: %.1f MiB are missing. More ranks, activation "
        "checkpointing, a smaller batch or, on a GPU, offload would help",
        dtrain__mib(least), dtrain__mib(left > 0 ? (uint64_t)left : 0),
        dtrain__mib(strategy->desc.other_bytes), dtrain__mib((uint64_t)((int64_t)least - left)));
}

static const uint32_t dtrain__auto_order[] = {DTRAIN_DDP, DTRAIN_ZERO1, DTRAIN_SHARD_GRAD_OP,
                                              DTRAIN_HYBRID_SHARD, DTRAIN_FULL_SHARD};
enum { DTRAIN__AUTO_KINDS = sizeof dtrain__auto_order / sizeof *dtrain__auto_order };

/* Makes desc that of AUTO's i-th candidate; false: these ranks or the rest of desc exclude it. */
static bool dtrain__auto_candidate(const dtrain_world *world, int ranks, size_t i,
                                   dtrain_strategy_desc *desc)
{
    const uint32_t kind = dtrain__auto_order[i];
    const int nodes = dtrain_world_node_count(world), node_size = dtrain_world_local_size(world);
    const uint32_t alone = desc->offload & DTRAIN_OFFLOAD_PARAMS  ? DTRAIN_FULL_SHARD
                           : desc->offload & DTRAIN_OFFLOAD_GRADS ? DTRAIN_SHARD_GRAD_OP
                                                                  : DTRAIN_DDP;
    if (ranks == 1 ? kind != alone : kind == DTRAIN_DDP) return false;
    if (kind == DTRAIN_HYBRID_SHARD && (nodes == 1 || nodes * node_size != ranks)) return false;
    if (kind == DTRAIN_HYBRID_SHARD) desc->node_size = (uint32_t)node_size;
    desc->kind = kind;
    return dtrain__check_combination(desc, dtrain__traits_of(kind)) == DTRAIN_OK;
}

static dtrain_result dtrain__auto_excluded(int ranks)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_strategy_create: DTRAIN_STRATEGY_AUTO: none of the kinds that it "
                       "chooses from with %d ranks takes the rest of the desc; name a kind to hear "
                       "why not",
                       ranks);
}

/* Of a strategy that is not there yet; of AUTO's candidates, the least that one of them needs. */
static dtrain_result dtrain__strategy_needs(dtrain_world *world, dtrain_param *params, size_t count,
                                            const dtrain_strategy_desc *given, int ranks,
                                            uint64_t *bytes)
{
    const bool choose = given->kind == DTRAIN_STRATEGY_AUTO;
    *bytes = UINT64_MAX;
    for (size_t i = 0; i < (choose ? (size_t)DTRAIN__AUTO_KINDS : 1); i++) {
        dtrain_strategy_desc desc = *given;
        dtrain_memory memory;
        if (choose && !dtrain__auto_candidate(world, ranks, i, &desc)) continue;
        if (desc.kind == DTRAIN_HYBRID_SHARD && !desc.node_size)
            desc.node_size = (uint32_t)dtrain_world_local_size(world);
        DTRAIN__TRY(dtrain_strategy_plan(params, count, &desc, ranks, &memory));
        if (memory.total < *bytes) *bytes = memory.total;
    }
    return *bytes == UINT64_MAX ? dtrain__auto_excluded(ranks) : DTRAIN_OK;
}

/* The first that fits of those that send least. What the candidate before it was short of is the
 * reason. */
static dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->comm);
    int64_t left;
    uint64_t least = INT64_MAX;
    char before[160] = "";
    if (strategy->desc.kind != DTRAIN_STRATEGY_AUTO) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__auto_limit(strategy->world, &strategy->desc, strategy->comm, &left));
    const uint64_t limit = left > 0 ? (uint64_t)left : 0;
    for (size_t i = 0; i < DTRAIN__AUTO_KINDS; i++) {
        const uint32_t kind = dtrain__auto_order[i];
        dtrain_strategy_desc desc = strategy->desc;
        dtrain_memory memory;
        uint64_t step_bytes;
        if (!dtrain__auto_candidate(strategy->world, ranks, i, &desc)) continue;
        DTRAIN__TRY(
            dtrain__agree(strategy->comm, dtrain__plan_kind(&strategy->allocator, strategy->params,
                                                            strategy->param_count, desc, kind,
                                                            ranks, &memory, &step_bytes)));
        const char *name = dtrain__traits_of(kind)->name;
        if (memory.total < least) least = memory.total;
        if (memory.total > limit) {
            snprintf(before, sizeof before, "; %s would need %.1f MiB", name,
                     dtrain__mib(memory.total));
            continue;
        }
        snprintf(strategy->reason, sizeof strategy->reason,
                 "%s: %.1f MiB a rank (parameters %.1f, gradients %.1f, optimizer %.1f, buffers "
                 "%.1f) of %.1f MiB, and %.1f MiB sent a step%s",
                 name, dtrain__mib(memory.total), dtrain__mib(memory.params),
                 dtrain__mib(memory.grads), dtrain__mib(memory.optimizer),
                 dtrain__mib(memory.buffers), dtrain__mib(limit), dtrain__mib(step_bytes), before);
        strategy->desc.kind = kind;
        strategy->desc.node_size = desc.node_size;
        return DTRAIN_OK;
    }
    if (least == INT64_MAX) return dtrain__auto_excluded(ranks);
    return dtrain__auto_fails(strategy, least, left);
}

/* ================================================================================================
 * [S31] Tape and tensors
 *
 * Where things live during a step, and who gives them back:
 *
 *     host arena      tensors, nodes                       until the next begin
 *     data arena      every forward value                  until the next begin
 *     two regions     values that checkpointing drops      until the next but one unit that drops
 *     gradient pool   gradients of forward values          from the first contribution until their
 *                                                          producer's backward has run
 *     params          values and gradients                 not the tape's
 *
 * Arenas are rewound, never freed, and the pool is keyed by exact size: a pass that asks for what
 * the last one asked for allocates nothing and gets the same addresses. That also makes memory
 * predictable: the plan device runs this very code and only its allocations do nothing.
 *
 * Backward is one walk in reverse. Nodes are recorded after the nodes that made their inputs, so
 * when the walk reaches a node every use of its output has contributed: the gradient is complete,
 * is spent, and its buffer goes back. A handful of buffers serves a model of any depth.
 * ==============================================================================================*/

#define DTRAIN__FEED_ITEMS 16          /* inputs of a pass that can be replayed */
#define DTRAIN__TAPE_HOST_BYTES 65536u /* of a chunk of nodes and tensors: some hundred */

typedef struct dtrain__chunk {
    struct dtrain__chunk *next;
    char *memory;
    size_t bytes;
    uint32_t owners; /* gradient pool only: tensors whose gradient this is; 0 = free */
    bool in_region;  /* a gradient on top of a dropped value: gone with it, not to be handed on */
} dtrain__chunk;

/* Chunks in the order they were made; memory is handed out by moving forward through them. A pass
 * that asks for a part of what an earlier one asked for (an evaluation after a training step) is
 * never further along than that one was, so it finds room everywhere.
 *
 * A chunk of device memory has exactly the size of the request it was made for: nothing is lost at
 * its end, and a few hundred allocations in the first step are soon forgotten. */
typedef struct dtrain__bump {
    dtrain_device *device; /* NULL: host memory */
    dtrain__chunk *first;
    dtrain__chunk **at; /* the link to the chunk in use */
    size_t used;        /* bytes of that chunk */
} dtrain__bump;

/* A kernel of any kind. */
typedef dtrain_result (*dtrain__kernel_fn)(dtrain_device *device, const void *args);

/* A kernel call whose results were dropped. */
typedef struct dtrain__call {
    struct dtrain__call *next; /* made before this one, until the segment is run again */
    dtrain__kernel_fn kernel;
    const void *args;
    const struct dtrain_node *node;
} dtrain__call;

/* What is recorded between two marks in a unit that drops results. */
typedef struct dtrain__tape_segment {
    int64_t unit;
    uint32_t region;
    dtrain__call *calls; /* the last one first */
    const struct dtrain__tape_segment
        *successor; /* the first to overwrite the results; NULL: intact */
} dtrain__tape_segment;

/* One executed operation. The arguments of its forward kernel hold all that its backward needs. */
typedef struct dtrain_node {
    struct dtrain_node *previous; /* recorded before this one */
    const char *name;             /* of the public function */
    dtrain_result (*backward)(dtrain_tape *tape, struct dtrain_node *node);
    dtrain_tensor *in[2], *out;
    dtrain_param *param[2];
    const struct dtrain_node *sum; /* layernorm of a sum: its node, whose value this kernel makes */
    dtrain__tape_segment *segment; /* NULL: this unit drops nothing */
    int64_t unit;                  /* -1: before the first mark */
    uint32_t mark;                 /* how many marks came before it */
    bool dropped;                  /* its results are in the segment's region */
    bool needs_grad;               /* some input or parameter does, and the tape records */
    bool reads_input;              /* backward looks at in[0]->data */
    bool reads_output;             /* backward looks at out->data: nobody may overwrite it */
    bool reads_rest;               /* backward looks at other results of the forward kernels */
    bool grad_is_inner; /* linear: out->grad is already that of the value before the activation */
    bool residual_done; /* add: in[1] has had its share */
    bool reached;       /* by the gradient of this backward's loss */
    float factor;       /* of scale, sum, mean and cross-entropy: d out / d kernel result */
    union {
        dtrain_gemm_args linear;
        dtrain_layernorm_args layernorm;
        dtrain_embedding_args embedding;
        dtrain_attention_args attention;
        dtrain_dropout_args dropout;
        dtrain_cross_entropy_args cross_entropy;
    } forward;
} dtrain_node;

/* A tensor and what only the tape knows of it: every dtrain_tensor is the first member of one. */
typedef struct dtrain__tape_tensor {
    dtrain_tensor tensor;
    dtrain__chunk *gradient;       /* what tensor.grad points into */
    int64_t valid_count;           /* of I32 inputs: entries that are not -1 */
    dtrain__tape_segment *segment; /* in whose region it was made; NULL: in the data arena */
    bool kept;                     /* tensor.data is a copy in the data arena */
    bool wanted; /* while its segment is run again: somebody will read the original */
} dtrain__tape_tensor;

/* Inputs of a pass that will be replayed: each goes through page-locked memory of its own, which
 * the next step can fill while nobody calls the model. */
typedef struct dtrain__feed_item {
    const void *host; /* the caller's buffer */
    void *pinned;
    size_t bytes;
    dtrain_dtype dtype;
    int64_t valid_count; /* of I32: in the recorded pass */
} dtrain__feed_item;

typedef struct dtrain__feed {
    dtrain__feed_item items[DTRAIN__FEED_ITEMS];
    size_t count, next; /* known; the next input of this pass */
    bool filled;        /* pinned holds this pass's data already */
} dtrain__feed;

/* A weight in the type of autocast, made at its first use in a pass. The key is the parameter and
 * not its address: a strategy that gathers units may have several weights there in turn. */
typedef struct dtrain__cast {
    struct dtrain__cast *next;
    const dtrain_param *storage;
    const void *low;
} dtrain__cast;

/* Where segments put what they drop, one after the other. */
typedef struct dtrain__tape_region {
    dtrain__bump memory;
    dtrain__tape_segment *owner;
} dtrain__tape_region;

enum { DTRAIN__TAPE_IDLE, DTRAIN__TAPE_FORWARD, DTRAIN__TAPE_DONE };

struct dtrain_tape {
    dtrain_strategy *strategy;
    dtrain_device *device;
    dtrain_allocator allocator;
    bool planning; /* on the plan device: params and strategy are left alone */

    dtrain__bump host, data;
    dtrain__tape_region regions[2];
    dtrain__chunk *gradients; /* the pool */
    uint64_t activation_bytes, gradient_bytes, allocation_count;

    dtrain_node *last;
    size_t node_count, tensor_count;
    uint32_t state, flags;
    uint64_t seed, dropout_count;
    int64_t unit;                              /* gathered now; -1 = none */
    uint32_t checkpoint_every, checkpoint_ops; /* as set last ... */
    uint32_t every, dropped_ops;               /* ... and in this pass */
    uint32_t mark_count, segment_count;        /* of this pass */
    dtrain__tape_segment *segment;             /* the one that is recorded now; NULL: none */
    size_t recomputed_count;
    const dtrain_step_scalars *scalars; /* NULL, or where a replayed step finds its seed */
    dtrain__feed *feed;                 /* NULL, or how inputs of a replayed step come in */
    dtrain_dtype cast;                  /* of matrix multiplications: F32, or that of autocast */
    dtrain__cast *casts;                /* weights rounded in this pass */

    dtrain_result error;
    char error_text[sizeof dtrain__error_text];
};

/* ---- Errors ------------------------------------------------------------------------------------
 *
 * The sentence is kept with the code: by the time somebody asks, other calls on this thread may
 * have left theirs in the thread's last error. */

static dtrain_result dtrain__tape_stick(dtrain_tape *tape, dtrain_result result)
{
    if (result != DTRAIN_OK && tape->error == DTRAIN_OK) {
        tape->error = result;
        memcpy(tape->error_text, dtrain__error_text, sizeof tape->error_text);
    }
    return result;
}

/* A new error that sticks. Always NULL: an operation ends by returning it. */
DTRAIN__PRINTF(3, 4)
static dtrain_tensor *dtrain__tape_fail(dtrain_tape *tape, dtrain_result code, const char *format,
                                        ...)
{
    char text[sizeof dtrain__error_text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dtrain__tape_stick(tape, dtrain_fail(code, "%s", text));
    return NULL;
}

DTRAIN_API dtrain_result dtrain_tape_error(const dtrain_tape *tape)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_error: tape is NULL");
    if (tape->error != DTRAIN_OK)
        memcpy(dtrain__error_text, tape->error_text, sizeof tape->error_text);
    return tape->error;
}

/* ---- Memory ----------------------------------------------------------------------------------*/

static void dtrain__chunks_destroy(dtrain_tape *tape, dtrain_device *device, dtrain__chunk *chunk)
{
    while (chunk) {
        dtrain__chunk *next = chunk->next;
        if (chunk->memory && device) device->ops->free(device, chunk->memory, chunk->bytes);
        else dtrain__free(&tape->allocator, chunk->memory, 1, chunk->bytes);
        dtrain__free(&tape->allocator, chunk, 1, sizeof *chunk);
        chunk = next;
    }
}

/* device NULL: host memory. NULL when there is none; the error sticks. */
static dtrain__chunk *dtrain__chunk_create(dtrain_tape *tape, dtrain_device *device, size_t bytes)
{
    const dtrain_allocator *host = &tape->allocator;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    void *memory = NULL;
    dtrain__chunk *chunk = (dtrain__chunk *)dtrain__alloc(host, 1, sizeof *chunk, "the tape");
    if (chunk && device) result = device->ops->alloc(device, bytes, &memory);
    else if (chunk) memory = dtrain__alloc(host, 1, bytes, "nodes of the tape");
    if (memory) {
        chunk->bytes = bytes;
        chunk->memory = (char *)memory;
        if (device) tape->allocation_count++;
        return chunk;
    }
    dtrain__tape_stick(tape, result);
    dtrain__chunks_destroy(tape, device, chunk);
    return NULL;
}

static void dtrain__bump_rewind(dtrain__bump *arena)
{
    arena->at = &arena->first;
    arena->used = 0;
}

static void *dtrain__bump_take(dtrain_tape *tape, dtrain__bump *arena, size_t bytes)
{
    bytes = dtrain__round_up(bytes, DTRAIN__CACHE_LINE);
    while (*arena->at && (*arena->at)->bytes - arena->used < bytes) {
        arena->at = &(*arena->at)->next;
        arena->used = 0;
    }
    if (!*arena->at) {
        size_t chunk_bytes = arena->device ? bytes : DTRAIN__TAPE_HOST_BYTES;
        *arena->at = dtrain__chunk_create(tape, arena->device, chunk_bytes);
        if (!*arena->at) return NULL;
        if (arena->device) tape->activation_bytes += chunk_bytes;
    }
    void *memory = (*arena->at)->memory + arena->used;
    arena->used += bytes;
    return memory;
}

/* A zeroed node or tensor. */
static void *dtrain__take_host(dtrain_tape *tape, size_t bytes)
{
    void *memory = dtrain__bump_take(tape, &tape->host, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* Device memory for count values of this pass, contents undefined: results of the node, or what
 * stays until the next begin when node is NULL. */
static void *dtrain__take_data(dtrain_tape *tape, const dtrain_node *node, int64_t count,
                               uint32_t dtype)
{
    const bool dropped = node && node->dropped;
    dtrain__bump *arena = dropped ? &tape->regions[node->segment->region].memory : &tape->data;
    size_t bytes;
    if (!dtrain__size_mul((size_t)count, dtrain_dtype_bytes((dtrain_dtype)dtype), &bytes) ||
        bytes > PTRDIFF_MAX) {
        dtrain__tape_fail(tape, DTRAIN_ERROR_MEMORY,
                          "a tensor of %lld elements is more than this machine can address",
                          (long long)count);
        return NULL;
    }
    return dtrain__bump_take(tape, arena, bytes);
}

/* A tensor of this pass, the node's result or (NULL) an input; NULL after an error, which sticks.
 */
static dtrain_tensor *dtrain__tensor_new(dtrain_tape *tape, const dtrain_node *node,
                                         dtrain_dtype dtype, uint32_t ndim, const int64_t *shape)
{
    dtrain_tensor *tensor = (dtrain_tensor *)dtrain__take_host(tape, sizeof(dtrain__tape_tensor));
    if (!tensor) return NULL;
    size_t count = 1;
    for (uint32_t i = 0; i < ndim; i++) {
        /* what overflows is left at the largest count, which take_data refuses */
        if (!dtrain__size_mul(count, (size_t)shape[i], &count)) count = PTRDIFF_MAX;
        if (count > PTRDIFF_MAX) count = PTRDIFF_MAX;
        tensor->shape[i] = shape[i];
    }
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    tensor->count = (int64_t)count;
    tensor->data = dtrain__take_data(tape, node, tensor->count, dtype);
    if (node && node->dropped) ((dtrain__tape_tensor *)tensor)->segment = node->segment;
    tape->tensor_count++;
    return tensor->data ? tensor : NULL;
}

static bool dtrain__is_float(const dtrain_tensor *x)
{
    return x->dtype == DTRAIN_F32 || x->dtype == DTRAIN_BF16 || x->dtype == DTRAIN_F16;
}

/* ---- Gradients of tensors ----------------------------------------------------------------------
 *
 * The first contribution overwrites, later ones add. An operation that only hands its gradient on
 * (add) makes the buffer shared instead of copying it; who wants to write into a shared buffer
 * makes a copy first. In a residual network
 *
 *     y = add(x, f(x)):   d y becomes d x and d f(x) at no cost; f's backward reads it and lets go,
 *                         and by the time it adds its own share to d x that is the only owner */

static size_t dtrain__tensor_bytes(const dtrain_tensor *x)
{
    return (size_t)x->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
}

static dtrain__chunk *dtrain__gradient_take(dtrain_tape *tape, const dtrain_tensor *x)
{
    size_t bytes = dtrain__round_up(dtrain__tensor_bytes(x), DTRAIN__CACHE_LINE);
    dtrain__chunk *chunk = tape->gradients;
    while (chunk && (chunk->owners || chunk->bytes != bytes)) chunk = chunk->next;
    if (!chunk) {
        chunk = dtrain__chunk_create(tape, tape->device, bytes);
        if (!chunk) return NULL;
        chunk->next = tape->gradients;
        tape->gradients = chunk;
        tape->gradient_bytes += bytes;
    }
    chunk->owners = 1;
    return chunk;
}

static void dtrain__gradient_set(dtrain_tensor *x, dtrain__chunk *chunk)
{
    ((dtrain__tape_tensor *)x)->gradient = chunk;
    x->grad = chunk ? chunk->memory : NULL;
    x->grad_written = chunk != NULL;
}

static void dtrain__gradient_drop(dtrain_tensor *x)
{
    dtrain__chunk *chunk = ((dtrain__tape_tensor *)x)->gradient;
    if (chunk) chunk->owners--;
    dtrain__gradient_set(x, NULL);
}

/* Makes x the only owner of its gradient, so that it can be written in place. */
static dtrain_result dtrain__gradient_own(dtrain_tape *tape, dtrain_tensor *x)
{
    dtrain__chunk *shared = ((dtrain__tape_tensor *)x)->gradient, *own;
    if (shared->owners == 1) return DTRAIN_OK;
    own = dtrain__gradient_take(tape, x);
    if (!own) return tape->error;
    shared->owners--;
    dtrain__gradient_set(x, own);
    return tape->device->ops->copy(tape->device, own->memory, shared->memory,
                                   dtrain__tensor_bytes(x), DTRAIN_COPY_DEVICE_TO_DEVICE);
}

/* x->grad is ready for one contribution; *accumulate tells the kernel whether to add. */
static dtrain_result dtrain__gradient_open(dtrain_tape *tape, dtrain_tensor *x, bool *accumulate)
{
    *accumulate = x->grad_written;
    if (x->grad_written) return dtrain__gradient_own(tape, x);
    dtrain__gradient_set(x, dtrain__gradient_take(tape, x));
    return x->grad ? DTRAIN_OK : tape->error;
}

/* The same for kernels that can only overwrite: x->grad is a fresh buffer, and what x had is put
 * aside in *earlier; gradient_merge adds it when the kernel has run. */
static dtrain_result dtrain__gradient_fresh(dtrain_tape *tape, dtrain_tensor *x,
                                            dtrain__chunk **earlier)
{
    bool accumulate;
    *earlier = ((dtrain__tape_tensor *)x)->gradient;
    dtrain__gradient_set(x, NULL);
    return dtrain__gradient_open(tape, x, &accumulate);
}

static dtrain_result dtrain__gradient_merge(dtrain_tape *tape, dtrain_tensor *x,
                                            dtrain__chunk *earlier)
{
    if (!earlier) return DTRAIN_OK;
    const dtrain_dtype dtype = (dtrain_dtype)x->dtype;
    dtrain_add_args args = {x->count, x->grad, earlier->memory, x->grad, dtype, dtype};
    earlier->owners--;
    return tape->device->ops->add(tape->device, &args);
}

/* x's gradient += from's gradient, by sharing the buffer when x has none yet and the same type. */
static dtrain_result dtrain__gradient_pass(dtrain_tape *tape, const dtrain_tensor *from,
                                           dtrain_tensor *x)
{
    const dtrain_dtype from_dtype = (dtrain_dtype)from->dtype, x_dtype = (dtrain_dtype)x->dtype;
    dtrain__chunk *chunk = ((const dtrain__tape_tensor *)from)->gradient;
    bool accumulate;
    if (!x->grad_written && from_dtype == x_dtype && !chunk->in_region) {
        chunk->owners++;
        dtrain__gradient_set(x, chunk);
        return DTRAIN_OK;
    }
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    if (!accumulate && from_dtype == x_dtype)
        return tape->device->ops->copy(tape->device, x->grad, from->grad, dtrain__tensor_bytes(x),
                                       DTRAIN_COPY_DEVICE_TO_DEVICE);
    if (!accumulate) {
        dtrain_convert_args convert = {x->count, from->grad, x->grad, from_dtype, x_dtype};
        return tape->device->ops->convert(tape->device, &convert);
    }
    dtrain_add_args args = {x->count, x->grad, from->grad, x->grad, x_dtype, from_dtype};
    return tape->device->ops->add(tape->device, &args);
}

/* ---- Parameters ------------------------------------------------------------------------------*/

/* Where value and gradient are: the end of the alias chain. A strategy has looked it up already. */
static dtrain_param *dtrain__param_storage(dtrain_param *p)
{
    if (p->storage) return p->storage;
    while (p->alias_of) p = p->alias_of;
    return p;
}

/* Whether p gets a gradient in this pass. A plan may be made before gradients are allocated: there
 * only the flag counts. */
static bool dtrain__param_trainable(const dtrain_tape *tape, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    if (tape->flags & DTRAIN_TAPE_NO_GRAD) return false;
    if ((p->flags | storage->flags) & DTRAIN_PARAM_FROZEN) return false;
    return tape->planning || tape->strategy || storage->grad;
}

/* Where node's backward writes the gradient of param[i], and whether it has to add; NULL when none
 * is wanted. Whoever asks must write: the gradient counts as written from here on. */
static float *dtrain__param_grad(const dtrain_tape *tape, const dtrain_node *node, int i,
                                 bool *accumulate)
{
    *accumulate = false;
    if (!node->param[i] || !dtrain__param_trainable(tape, node->param[i])) return NULL;
    dtrain_param *storage = dtrain__param_storage(node->param[i]);
    *accumulate = storage->grad_written;
    if (!tape->planning) storage->grad_written = true;
    return storage->grad;
}

/* ---- Life of a tape --------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: out is NULL");
    *out = NULL;
    if (!world && !device)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: world and device are both "
                                                  "NULL; a tape needs a device to run on");
    dtrain_allocator allocator =
        dtrain__resolve_allocator(world ? dtrain_world_allocator(world) : NULL);
    dtrain_tape *tape = (dtrain_tape *)dtrain__alloc(&allocator, 1, sizeof *tape, "a tape");
    if (!tape) return DTRAIN_ERROR_MEMORY;
    tape->allocator = allocator;
    tape->strategy = strategy;
    tape->device = device ? device : dtrain_world_device(world);
    tape->planning = tape->device->ops == dtrain_plan_device_ops();
    tape->data.device = tape->device;
    for (int i = 0; i < 2; i++) tape->regions[i].memory.device = tape->device;
    tape->unit = -1;
    *out = tape;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape)
{
    if (!tape) return;
    dtrain__chunks_destroy(tape, tape->device, tape->data.first);
    for (int i = 0; i < 2; i++)
        dtrain__chunks_destroy(tape, tape->device, tape->regions[i].memory.first);
    dtrain__chunks_destroy(tape, tape->device, tape->gradients);
    dtrain__chunks_destroy(tape, NULL, tape->host.first);
    dtrain_allocator allocator = tape->allocator;
    dtrain__free(&allocator, tape, 1, sizeof *tape);
}

/* Lets go of the unit that is gathered and gathers another; -1 = none. Releasing comes first: two
 * whole units at once would double what a sharded strategy keeps in memory. */
static dtrain_result dtrain__tape_enter(dtrain_tape *tape, int64_t unit)
{
    int64_t before = tape->unit;
    if (unit == before) return DTRAIN_OK;
    tape->unit = unit;
    if (tape->planning || !tape->strategy) return DTRAIN_OK;
    if (before >= 0) DTRAIN__TRY(dtrain_strategy_release(tape->strategy, (uint32_t)before));
    return unit >= 0 ? dtrain_strategy_gather(tape->strategy, (uint32_t)unit) : DTRAIN_OK;
}

/* ---- Activation checkpointing ------------------------------------------------------------------
 *
 * In a unit that drops results these do not go to the data arena but to one of two regions, which
 * such units use in turn; each kernel call is noted. Units 1 to 4, in regions A and B:
 *
 *     forward      1 -> A     2 -> B     3 -> A     4 -> B
 *     backward     4 is in B, 3 is in A     2 again -> B     1 again -> A
 *
 * When backward enters a unit that has been overwritten, its calls run again in their order: the
 * same kernels on the same addresses and the same random streams, so the same bits, and no pointer
 * anywhere has to change. Calls whose results nobody will read are left out: the last product of a
 * transformer block, a third of its multiplications, is read by the next block only.
 *
 * That copy is made when an operation of a later unit takes the tensor. Its own unit is still
 * intact then, for the one that follows writes to the other region; and from there on tensor->data
 * is the copy, in the data arena, for everyone. The calls of its own unit keep their address. */

static void dtrain__segments_forget(dtrain_tape *tape)
{
    tape->every = tape->checkpoint_every;
    tape->dropped_ops = tape->checkpoint_ops;
    tape->mark_count = tape->segment_count = 0;
    tape->recomputed_count = 0;
    tape->segment = NULL;
    tape->regions[0].owner = tape->regions[1].owner = NULL;
}

static void dtrain__region_take(dtrain_tape *tape, dtrain__tape_segment *segment)
{
    dtrain__tape_region *region = &tape->regions[segment->region];
    if (region->owner && !region->owner->successor) region->owner->successor = segment;
    region->owner = segment;
}

/* After a mark: what follows is a segment, if this unit drops results. */
static void dtrain__segment_begin(dtrain_tape *tape)
{
    const uint32_t every = tape->every, mark = tape->mark_count++;
    tape->segment = NULL;
    if (tape->error != DTRAIN_OK || every == 0 || mark % every != every - 1) return;
    dtrain__tape_segment *segment =
        (dtrain__tape_segment *)dtrain__take_host(tape, sizeof *segment);
    if (!segment) return;
    segment->unit = tape->unit;
    segment->region = tape->segment_count++ % 2;
    dtrain__region_take(tape, segment);
    dtrain__bump_rewind(&tape->regions[segment->region].memory);
    tape->segment = segment;
}

static dtrain_result dtrain__check_intact(const dtrain_tensor *x, const char *call)
{
    const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || !made->segment->successor) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_USAGE,
        "%s: a tensor made in unit %lld is needed after unit %lld has overwritten it: activation "
        "checkpointing keeps it until then only; use it in the unit that follows its own (a "
        "dtrain_scale by 1 hands it on), or drop less with dtrain_tape_checkpoint",
        call, (long long)made->segment->unit, (long long)made->segment->successor->unit);
}

/* Before a use outside of the segment that is recorded now: x->data is there until the next begin.
 */
static dtrain_result dtrain__tensor_keep(dtrain_tape *tape, dtrain_tensor *x, const char *call)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || made->segment == tape->segment) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_intact(x, call));
    void *copy = dtrain__take_data(tape, NULL, x->count, x->dtype);
    if (!copy) return tape->error;
    DTRAIN__TRY(tape->device->ops->copy(tape->device, copy, x->data, dtrain__tensor_bytes(x),
                                        DTRAIN_COPY_DEVICE_TO_DEVICE));
    x->data = copy;
    made->kept = true;
    return DTRAIN_OK;
}

/* Runs a kernel of the node, and notes the call if its results are dropped. */
static dtrain_result dtrain__run_kernel(dtrain_tape *tape, const dtrain_node *node,
                                        dtrain__kernel_fn kernel, const void *args,
                                        size_t args_bytes)
{
    if (node->dropped && !(tape->flags & DTRAIN_TAPE_NO_GRAD)) {
        dtrain__call *call = (dtrain__call *)dtrain__take_host(tape, sizeof *call);
        void *copy = dtrain__take_host(tape, args_bytes);
        if (!call || !copy) return tape->error;
        memcpy(copy, args, args_bytes);
        call->kernel = kernel;
        call->args = copy;
        call->node = node;
        call->next = node->segment->calls;
        node->segment->calls = call;
    }
    return kernel(tape->device, args);
}

/* The value of x will be read at the address at which the segment made it. */
static void dtrain__want(const dtrain__tape_segment *segment, dtrain_tensor *x)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (x && made->segment == segment) made->wanted = true;
}

static bool dtrain__is_wanted(const dtrain_tensor *x)
{
    return ((const dtrain__tape_tensor *)x)->wanted;
}

/* What the backward functions of the segment will read; node is the last that has one to run. */
static void dtrain__want_backward(const dtrain__tape_segment *segment, const dtrain_node *node)
{
    for (; node && node->segment == segment; node = node->previous) {
        if (!node->reached) continue;
        if (node->reads_input) dtrain__want(segment, node->in[0]);
        if (node->reads_output) dtrain__want(segment, node->out);
    }
}

/* Makes the segment's values again as far as backward needs them, if they are gone. */
static dtrain_result dtrain__segment_again(dtrain_tape *tape, const dtrain_node *node)
{
    dtrain__tape_segment *segment = node->segment;
    dtrain__call *call, *before, *first = NULL;
    if (!segment || !segment->successor) return DTRAIN_OK;
    if (tape->regions[segment->region].owner == segment) return DTRAIN_OK; /* done already */
    dtrain__region_take(tape, segment);
    dtrain__want_backward(segment, node);
    for (call = segment->calls; call; call = before) {
        const dtrain_node *made_by = call->node, *sum = made_by->sum;
        before = call->next;
        if (!(made_by->reached && made_by->reads_rest) && !dtrain__is_wanted(made_by->out) &&
            !(sum && dtrain__is_wanted(sum->out)))
            continue;
        for (int i = 0; i < 2; i++) {
            dtrain__want(segment, made_by->in[i]);
            if (sum) dtrain__want(segment, sum->in[i]);
        }
        call->next = first;
        first = call;
    }
    for (call = first; call; call = call->next, tape->recomputed_count++)
        DTRAIN__TRY(call->kernel(tape->device, call->args));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tape_checkpoint(dtrain_tape *tape, uint32_t every, uint32_t ops)
{
    const char *const call = "dtrain_tape_checkpoint";
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (ops & ~DTRAIN_CHECKPOINT_ALL)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: unknown operations %#x", call, ops);
    tape->checkpoint_every = every;
    tape->checkpoint_ops = ops ? ops : DTRAIN_CHECKPOINT_ALL;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit)
{
    if (!tape || tape->error != DTRAIN_OK) return;
    if (tape->state != DTRAIN__TAPE_FORWARD)
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "dtrain_tape_unit: no pass is under way; call dtrain_tape_begin first");
    else if (unit != tape->unit) {
        dtrain__tape_stick(tape, dtrain__tape_enter(tape, unit));
        dtrain__segment_begin(tape);
    }
}

static dtrain_result dtrain__flags_check(uint32_t flags)
{
    const uint32_t low = DTRAIN_TAPE_BF16 | DTRAIN_TAPE_F16;
    if (flags & ~(DTRAIN_TAPE_NO_GRAD | low))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_begin: unknown flags %#x", flags);
    if ((flags & low) == low)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_tape_begin: flags %#x ask for autocast to bf16 and to f16; a "
                           "pass has one of them",
                           flags);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_begin: tape is NULL");
    tape->error = DTRAIN_OK;
    dtrain__bump_rewind(&tape->host);
    dtrain__bump_rewind(&tape->data);
    dtrain__segments_forget(tape);
    for (dtrain__chunk *chunk = tape->gradients; chunk; chunk = chunk->next) chunk->owners = 0;
    tape->last = NULL;
    tape->node_count = tape->tensor_count = 0;
    tape->flags = flags;
    tape->seed = seed;
    tape->dropout_count = 0;
    tape->state = DTRAIN__TAPE_FORWARD;
    tape->cast = flags & DTRAIN_TAPE_BF16  ? DTRAIN_BF16
                 : flags & DTRAIN_TAPE_F16 ? DTRAIN_F16
                                           : DTRAIN_F32;
    tape->casts = NULL;
    dtrain_result result = dtrain__flags_check(flags);
    return dtrain__tape_stick(tape, result ? result : dtrain__tape_enter(tape, -1));
}

/* Why no tensor can be made now, as an error that sticks; DTRAIN_OK if it can. */
static dtrain_result dtrain__tape_check(dtrain_tape *tape, const char *call)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (tape->error != DTRAIN_OK) return tape->error;
    if (tape->state == DTRAIN__TAPE_FORWARD) return DTRAIN_OK;
    const char *why = tape->state == DTRAIN__TAPE_IDLE ? "no pass is under way"
                                                       : "this pass has had its backward";
    dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE, "%s: %s; call dtrain_tape_begin first", call, why);
    return tape->error;
}

static dtrain_result dtrain__input_check(dtrain_dtype dtype, uint32_t ndim, const int64_t *shape,
                                         const void *host, bool requires_grad)
{
    const char *const call = "dtrain_tape_input";
    if (dtype != DTRAIN_F32 && dtype != DTRAIN_I32)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: dtype is %s, not f32 or i32", call,
                           dtrain_dtype_name(dtype));
    if (dtype == DTRAIN_I32 && requires_grad)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: i32 has no gradient", call);
    if (!shape || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call, shape ? "host" : "shape");
    if (ndim < 1 || ndim > 4)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u axes, not 1 to 4", call, ndim);
    for (uint32_t i = 0; i < ndim; i++)
        if (shape[i] < 1)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: axis %u has length %lld", call, i,
                               (long long)shape[i]);
    return DTRAIN_OK;
}

static int64_t dtrain__count_valid(const void *host, int64_t count)
{
    const int32_t *entries = (const int32_t *)host;
    int64_t valid = 0;
    for (int64_t i = 0; i < count; i++) valid += entries[i] != -1;
    return valid;
}

/* The caller's data goes to the input's page-locked place, if it is not there yet, and from there
 * to the device when the stream comes to it. *host becomes that place. */
static dtrain_result dtrain__feed_take(dtrain_tape *tape, const dtrain_tensor *x, const void **host)
{
    dtrain__feed *feed = tape->feed;
    dtrain__feed_item *item = &feed->items[feed->next];
    const size_t bytes = (size_t)x->count * 4;
    if (feed->next == DTRAIN__FEED_ITEMS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_tape_input: a pass that is replayed has at most %d inputs",
                           DTRAIN__FEED_ITEMS);
    if (feed->next == feed->count) {
        DTRAIN__TRY(tape->device->ops->host_alloc(tape->device, bytes, &item->pinned));
        item->bytes = bytes;
        item->dtype = (dtrain_dtype)x->dtype;
        feed->count++;
    } else if (item->bytes != bytes || item->dtype != (dtrain_dtype)x->dtype) {
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_input: input %zu has %zu bytes and had %zu in an earlier "
                           "step; a step that is replayed must repeat its shapes",
                           feed->next + 1, bytes, item->bytes);
    }
    if (!feed->filled) memcpy(item->pinned, *host, bytes);
    item->host = *host;
    if (item->dtype == DTRAIN_I32) item->valid_count = dtrain__count_valid(item->pinned, x->count);
    *host = item->pinned;
    feed->next++;
    return tape->device->ops->copy_async(tape->device, x->data, item->pinned, bytes,
                                         DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad)
{
    if (dtrain__tape_check(tape, "dtrain_tape_input") != DTRAIN_OK) return NULL;
    if (dtrain__tape_stick(tape, dtrain__input_check(dtype, ndim, shape, host, requires_grad)))
        return NULL;
    dtrain_tensor *x = dtrain__tensor_new(tape, NULL, dtype, ndim, shape);
    if (!x) return NULL;
    x->needs_grad = requires_grad && !(tape->flags & DTRAIN_TAPE_NO_GRAD);
    const size_t bytes = (size_t)x->count * 4;
    dtrain_result result;
    if (tape->feed) result = dtrain__feed_take(tape, x, &host);
    else
        result =
            tape->device->ops->copy(tape->device, x->data, host, bytes, DTRAIN_COPY_HOST_TO_DEVICE);
    /* counted here because only here are they in host memory */
    if (dtype == DTRAIN_I32 && result == DTRAIN_OK)
        ((dtrain__tape_tensor *)x)->valid_count = dtrain__count_valid(host, x->count);
    return dtrain__tape_stick(tape, result) == DTRAIN_OK ? x : NULL;
}

/* ---- Reading ---------------------------------------------------------------------------------*/

static dtrain_result dtrain__read_check(dtrain_tape *tape, const dtrain_tensor *tensor,
                                        const float *host, const char *call)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    DTRAIN__TRY(dtrain_tape_error(tape)); /* the likely reason why tensor is NULL */
    if (!tensor || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call,
                           tensor ? "host" : "tensor");
    if (!dtrain__is_float(tensor))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the tensor is %s, not f32", call,
                           dtrain_dtype_name((dtrain_dtype)tensor->dtype));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *host)
{
    const char *const call = "dtrain_tensor_read";
    DTRAIN__TRY(dtrain__read_check(tape, tensor, host, call));
    DTRAIN__TRY(dtrain__check_intact(tensor, call));
    DTRAIN__TRY(tape->device->ops->copy(tape->device, host, tensor->data,
                                        dtrain__tensor_bytes(tensor), DTRAIN_COPY_DEVICE_TO_HOST));
    if (tensor->dtype == DTRAIN_F32) return DTRAIN_OK;
    for (int64_t i = tensor->count - 1; i >= 0; i--) { /* in place, from the end */
        uint16_t bits;
        memcpy(&bits, (const char *)host + (size_t)i * sizeof bits, sizeof bits);
        host[i] = tensor->dtype == DTRAIN_BF16 ? dtrain_bf16_to_f32(bits) : dtrain_f16_to_f32(bits);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tensor_read_grad(dtrain_tape *tape, const dtrain_tensor *tensor,
                                                 float *host)
{
    DTRAIN__TRY(dtrain__read_check(tape, tensor, host, "dtrain_tensor_read_grad"));
    if (tensor->producer || !tensor->needs_grad)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_tensor_read_grad: only inputs made with "
                                               "requires_grad keep their gradient");
    if (tape->state != DTRAIN__TAPE_DONE)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tensor_read_grad: dtrain_tape_backward has not run");
    size_t bytes = (size_t)tensor->count * sizeof(float);
    if (!tensor->grad) { /* the loss does not depend on it */
        memset(host, 0, bytes);
        return DTRAIN_OK;
    }
    return tape->device->ops->copy(tape->device, host, tensor->grad, bytes,
                                   DTRAIN_COPY_DEVICE_TO_HOST);
}

DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info)
{
    memset(info, 0, sizeof *info);
    if (!tape) return;
    info->node_count = tape->node_count;
    info->tensor_count = tape->tensor_count;
    info->recomputed_count = tape->recomputed_count;
    info->activation_bytes = tape->activation_bytes;
    info->gradient_bytes = tape->gradient_bytes;
    info->block_allocations = tape->allocation_count;
}

/* ---- Backward ----------------------------------------------------------------------------------
 *
 * 1. mark the nodes between the trainable leaves and the loss, and count how often each parameter
 *    will get a contribution; alias and target are counted apart, as the strategy registered them
 * 2. in reverse order: enter the node's unit, make its values again if they were dropped, run its
 *    backward, give its output's gradient back, tell the strategy about parameters that have had
 *    their last contribution */

static void dtrain__mark_reached(dtrain_tape *tape, dtrain_tensor *loss)
{
    dtrain_node *node;
    if (loss->producer) loss->producer->reached = true;
    for (node = tape->last; node; node = node->previous) {
        if (!node->reached) continue;
        for (int i = 0; i < 2; i++) {
            dtrain_tensor *x = node->in[i];
            if (x && x->needs_grad && x->producer) x->producer->reached = true;
            /* a backward that failed half-way leaves a count behind */
            if (node->param[i] && !tape->planning) node->param[i]->pending_uses = 0;
        }
    }
    if (tape->planning) return;
    for (node = tape->last; node; node = node->previous)
        for (int i = 0; i < 2; i++)
            if (node->reached && node->param[i]) node->param[i]->pending_uses++;
}

static dtrain_result dtrain__backward_node(dtrain_tape *tape, dtrain_node *node)
{
    DTRAIN__TRY(dtrain__tape_enter(tape, node->unit));
    DTRAIN__TRY(dtrain__segment_again(tape, node));
    DTRAIN__TRY(node->backward(tape, node));
    dtrain__gradient_drop(node->out);
    for (int i = 0; i < 2 && !tape->planning; i++) {
        dtrain_param *p = node->param[i];
        if (!p || --p->pending_uses > 0 || !tape->strategy || !dtrain__param_trainable(tape, p))
            continue;
        DTRAIN__TRY(dtrain_strategy_ready(tape->strategy, p->index));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__backward_run(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    bool accumulate;
    tape->segment = NULL;
    DTRAIN__TRY(dtrain__tensor_keep(tape, loss, "dtrain_tape_backward"));
    dtrain__mark_reached(tape, loss);
    DTRAIN__TRY(dtrain__gradient_open(tape, loss, &accumulate));
    dtrain_axpby_args seed = {1, false, scale, 0, NULL, loss->grad, false, DTRAIN_F32};
    DTRAIN__TRY(tape->device->ops->axpby(tape->device, &seed));
    for (dtrain_node *node = tape->last; node; node = node->previous)
        if (node->reached) DTRAIN__TRY(dtrain__backward_node(tape, node));
    return dtrain__tape_enter(tape, -1);
}

DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    const char *const call = "dtrain_tape_backward";
    dtrain_result result = dtrain__tape_check(tape, call);
    if (result != DTRAIN_OK) return tape ? dtrain_tape_error(tape) : result;
    if (tape->flags & DTRAIN_TAPE_NO_GRAD)
        result = dtrain_fail(DTRAIN_ERROR_USAGE, "%s: the pass was begun with DTRAIN_TAPE_NO_GRAD",
                             call);
    else if (!loss) result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: loss is NULL", call);
    else if (loss->count != 1)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "%s: the loss has %lld elements, not one; use dtrain_mean or "
                             "dtrain_sum",
                             call, (long long)loss->count);
    else if (!loss->needs_grad)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: the loss depends on no trainable parameter "
                             "and no input with requires_grad",
                             call);
    else result = dtrain__backward_run(tape, loss, scale);
    tape->state = DTRAIN__TAPE_DONE;
    return dtrain__tape_stick(tape, result);
}
/* ================================================================================================
 * [S32] Operations
 *
 * Every operation has the same steps, and its own arguments:
 *
 *     node = dtrain__op(...)               NULL after an error: the operation does nothing
 *     dtrain__check_input, _check_param    the sentence says what differs from what
 *     fill node->forward                   memory from dtrain__output and dtrain__take_data
 *     if (tape->error) return NULL         one look for all allocations above
 *     return dtrain__record(tape, node, dtrain__run_kernel(tape, node, kernel, arguments))
 *
 * Its backward reads node->forward and node->out->grad and contributes to the gradients of inputs
 * and parameters. What a node keeps alive until then, beside its parameters:
 *
 *     linear          x; with GELU the value before it, with ReLU the output
 *     layernorm       x, mean and rstd of each row
 *     embedding       tokens
 *     attention       qkv, y, log-sum-exp of each row and head
 *     cross_entropy   logits, targets, log-sum-exp of each row
 *     add, scale, cast, dropout, sum, mean: nothing
 *
 * node->reads_input, reads_output and reads_rest say the same to activation checkpointing.
 * ==============================================================================================*/

#define DTRAIN__CALL(op)                                                            \
    static dtrain_result dtrain__call_##op(dtrain_device *device, const void *args) \
    {                                                                               \
        return device->ops->op(device, (const dtrain_##op##_args *)args);           \
    }
DTRAIN__CALL(gemm)
DTRAIN__CALL(layernorm)
DTRAIN__CALL(embedding)
DTRAIN__CALL(attention)
DTRAIN__CALL(add)
DTRAIN__CALL(axpby)
DTRAIN__CALL(dropout)
DTRAIN__CALL(convert)
#undef DTRAIN__CALL

/* A node for one call. Without gradients too: the kernel's arguments have to be somewhere, and it
 * costs nothing but a little host memory until the next begin. kind is the operation's
 * DTRAIN_CHECKPOINT bit, 0 if its results are always kept. */
static dtrain_node *dtrain__op(dtrain_tape *tape, const char *name, uint32_t kind,
                               dtrain_result (*backward)(dtrain_tape *, dtrain_node *),
                               dtrain_tensor *first, dtrain_tensor *second)
{
    if (dtrain__tape_check(tape, name) != DTRAIN_OK) return NULL;
    dtrain_node *node = (dtrain_node *)dtrain__take_host(tape, sizeof *node);
    if (!node) return NULL;
    node->name = name;
    node->backward = backward;
    node->in[0] = first;
    node->in[1] = second;
    node->unit = tape->unit;
    node->mark = tape->mark_count;
    node->segment = tape->segment;
    node->dropped = tape->segment && (tape->dropped_ops & kind);
    return node;
}

/* ---- Checks ----------------------------------------------------------------------------------*/

typedef struct dtrain__text {
    char text[96];
} dtrain__text;

/* "(6, 16)", with "any" for -1. Written to *to, so that one sentence can have several. */
static const char *dtrain__shape_text(uint32_t ndim, const int64_t *shape, dtrain__text *to)
{
    size_t used = 0;
    for (uint32_t i = 0; i < ndim; i++) {
        char length[24] = "any";
        if (shape[i] >= 0) snprintf(length, sizeof length, "%lld", (long long)shape[i]);
        used += (size_t)snprintf(to->text + used, sizeof to->text - used, "%s%s", i ? ", " : "(",
                                 length); /* 4 axes of 19 digits fit */
    }
    snprintf(to->text + used, sizeof to->text - used, ")");
    return to->text;
}

/* Input i is there, of this type (for F32 any type of float) and stays where it is as long as the
 * node needs it. A gradient that it needs makes the node need one. */
static bool dtrain__check_input(dtrain_tape *tape, dtrain_node *node, int i, dtrain_dtype dtype)
{
    dtrain_tensor *x = node->in[i];
    if (x && (dtype == DTRAIN_F32 ? dtrain__is_float(x) : x->dtype == (uint32_t)dtype)) {
        if (x->needs_grad) node->needs_grad = true;
        return dtrain__tape_stick(tape, dtrain__tensor_keep(tape, x, node->name)) == DTRAIN_OK;
    }
    const char *found = x ? dtrain_dtype_name((dtrain_dtype)x->dtype) : "NULL";
    dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: input %d is %s, expected %s", node->name,
                      i + 1, found, dtrain_dtype_name(dtype));
    return false;
}

/* The axes of a parameter: all zero means one axis of count, and for an alias its target's. */
static uint32_t dtrain__param_shape(dtrain_param *p, int64_t shape[4])
{
    const dtrain_param *from = p->shape[0] || p->count ? p : dtrain__param_storage(p);
    uint32_t ndim = 0;
    memcpy(shape, from->shape, sizeof from->shape);
    while (ndim < 4 && shape[ndim] != 0) ndim++;
    if (ndim > 0) return ndim;
    shape[0] = from->count;
    return 1;
}

static int64_t dtrain__param_rows(dtrain_param *p)
{
    int64_t shape[4];
    dtrain__param_shape(p, shape);
    return shape[0];
}

static const char *dtrain__param_name(const dtrain_param *p) { return p->name ? p->name : "?"; }

static bool dtrain__check_shape(dtrain_tape *tape, const dtrain_node *node, dtrain_param *p,
                                uint32_t ndim, const int64_t *expected)
{
    int64_t shape[4];
    dtrain__text found_text, expected_text, input_text;
    uint32_t found = dtrain__param_shape(p, shape);
    bool same = found == ndim;
    for (uint32_t i = 0; same && i < ndim; i++) same = expected[i] < 0 || expected[i] == shape[i];
    if (same) return true;
    const dtrain_tensor *x = node->in[0];
    dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: parameter %s is %s where input %s needs %s",
                      node->name, dtrain__param_name(p),
                      dtrain__shape_text(found, shape, &found_text),
                      dtrain__shape_text(x->ndim, x->shape, &input_text),
                      dtrain__shape_text(ndim, expected, &expected_text));
    return false;
}

/* A sharded strategy has values of the gathered unit only. */
static bool dtrain__check_value(dtrain_tape *tape, const dtrain_node *node, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    const char *name = dtrain__param_name(p);
    const bool foreign = tape->strategy && !p->storage;
    if (storage->value && !foreign) return true;
    if (foreign || !tape->strategy)
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "%s: parameter %s %s; give it to dtrain_strategy_create first",
                          node->name, name, foreign ? "belongs to no strategy" : "has no value");
    else if (tape->unit < 0)
        dtrain__tape_fail(
            tape, DTRAIN_ERROR_USAGE,
            "%s: parameter \"%s\" belongs to unit %u, and no unit is gathered; mark it "
            "with dtrain_tape_unit",
            node->name, name, p->unit);
    else
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "%s: parameter \"%s\" belongs to unit %u, and unit %lld is gathered; "
                          "register an alias of it in each other unit that uses it",
                          node->name, name, p->unit, (long long)tape->unit);
    return false;
}

/* Parameter i of the node is p, has a value and the shape (rows, columns), or (rows) when columns
 * is 0; -1 takes any length. */
static bool dtrain__check_param(dtrain_tape *tape, dtrain_node *node, int i, dtrain_param *p,
                                int64_t rows, int64_t columns)
{
    const int64_t expected[2] = {rows, columns};
    node->param[i] = p;
    if (!p) {
        dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: parameter %d is NULL", node->name,
                          i + 1);
        return false;
    }
    if (!dtrain__check_shape(tape, node, p, columns ? 2 : 1, expected)) return false;
    if (!tape->planning && !dtrain__check_value(tape, node, p)) return false;
    if (dtrain__param_trainable(tape, p)) node->needs_grad = true;
    return true;
}

static float *dtrain__param_value(dtrain_param *p)
{
    return p ? dtrain__param_storage(p)->value : NULL;
}

/* ---- Results ----------------------------------------------------------------------------------*/

/* Output of the node: x's shape with n in the last axis. NULL after an error. */
static void *dtrain__output(dtrain_tape *tape, dtrain_node *node, const dtrain_tensor *x, int64_t n,
                            uint32_t dtype)
{
    int64_t shape[4];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    node->out = dtrain__tensor_new(tape, node, (dtrain_dtype)dtype, x->ndim, shape);
    return node->out ? node->out->data : NULL;
}

static float *dtrain__take_floats(dtrain_tape *tape, const dtrain_node *node, int64_t count)
{
    return (float *)dtrain__take_data(tape, node, count, DTRAIN_F32);
}

/* count values in another type, to stay until the next begin; themselves when they have it. NULL
 * after an error. */
static const void *dtrain__cast_to(dtrain_tape *tape, const void *values, uint32_t from,
                                   dtrain_dtype to, int64_t count)
{
    if (from == (uint32_t)to) return values;
    void *made = dtrain__take_data(tape, NULL, count, to);
    dtrain_convert_args args = {count, values, made, (dtrain_dtype)from, to};
    if (!made || dtrain__tape_stick(tape, tape->device->ops->convert(tape->device, &args)))
        return NULL;
    return made;
}

/* The node's input in the type of autocast: a result of the node like others. */
static const void *dtrain__cast_input(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_tensor *x = node->in[0];
    if (x->dtype == (uint32_t)tape->cast) return x->data;
    void *made = dtrain__take_data(tape, node, x->count, tape->cast);
    dtrain_convert_args args = {x->count, x->data, made, (dtrain_dtype)x->dtype, tape->cast};
    node->reads_rest = true;
    if (!made || dtrain__tape_stick(tape, dtrain__run_kernel(tape, node, dtrain__call_convert,
                                                             &args, sizeof args)))
        return NULL;
    return made;
}

/* A weight in the type of autocast: the strategy's copy, or rounded at its first use in this pass.
 * The copy is no result of a node: other units may use it too. */
static const void *dtrain__cast_weight(dtrain_tape *tape, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    if (tape->cast == DTRAIN_F32) return storage->value;
    const void *low =
        tape->strategy ? dtrain__strategy_low(tape->strategy, storage, tape->cast) : NULL;
    if (low) return low;
    for (dtrain__cast *cast = tape->casts; cast; cast = cast->next)
        if (cast->storage == storage) return cast->low;
    dtrain__cast *cast = (dtrain__cast *)dtrain__take_host(tape, sizeof *cast);
    if (!cast) return NULL;
    cast->storage = storage;
    cast->low = dtrain__cast_to(tape, storage->value, DTRAIN_F32, tape->cast, storage->count);
    cast->next = tape->casts;
    tape->casts = cast;
    return cast->low;
}

/* Ends an operation: the node goes on the tape if a gradient will have to pass through it. Uses are
 * counted for in-place backwards, which must know that nobody else will look at an input. */
static dtrain_tensor *dtrain__record(dtrain_tape *tape, dtrain_node *node, dtrain_result kernel)
{
    if (dtrain__tape_stick(tape, kernel) != DTRAIN_OK) return NULL;
    if (!node->needs_grad) return node->out;
    node->out->producer = node;
    node->out->needs_grad = true;
    for (int i = 0; i < 2; i++)
        if (node->in[i]) node->in[i]->pending_uses++;
    node->previous = tape->last;
    tape->last = node;
    tape->node_count++;
    return node->out;
}

static int64_t dtrain__last_axis(const dtrain_tensor *x) { return x->shape[x->ndim - 1]; }
static dtrain_dtype dtrain__dtype(const dtrain_tensor *x) { return (dtrain_dtype)x->dtype; }

/* ---- Linear -----------------------------------------------------------------------------------*/

/* With z = x weight^T + bias and y = act(z):
 *
 *     d_z = d_y act'(z)   d_bias += column sums of d_z   d_weight += d_z^T x   d_x += d_z weight
 *
 * d_z overwrites d_y, which nobody needs any more. d_x comes last: it is what the next backward
 * reads, so it should be the freshest in the cache. Where x is itself a linear layer's activated
 * output and has no other use, the product that makes d_x multiplies by that activation's
 * derivative and adds up that layer's bias gradient while it is at it: two passes less there. */

/* The layer that made x, if this product may finish its activation's backward. Both must be of the
 * same visit to a unit: gradients of another may not be touched, and its values may be gone. */
static dtrain_node *dtrain__inner_layer(const dtrain_node *node, const dtrain_tensor *x)
{
    dtrain_node *inner = x->producer;
    const bool fits = inner && inner->backward == node->backward && inner->mark == node->mark &&
                      inner->forward.linear.activation == DTRAIN_ACT_GELU && x->pending_uses == 1 &&
                      !x->grad_written;
    return fits ? inner : NULL;
}

/* d_x (rows,in) = d_z (rows,out) weight (out,in), with gemm.a = d_z. */
static dtrain_result dtrain__linear_backward_x(dtrain_tape *tape, dtrain_node *node,
                                               dtrain_gemm_args gemm)
{
    const dtrain_gemm_args *forward = &node->forward.linear;
    dtrain_tensor *x = node->in[0];
    dtrain_node *inner = dtrain__inner_layer(node, x);
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    gemm.flags = 0;
    gemm.m = forward->m, gemm.n = forward->k, gemm.k = forward->n;
    gemm.b = forward->b, gemm.ldb = forward->k;
    gemm.c = x->grad, gemm.ldc = forward->k;
    gemm.c_dtype = dtrain__dtype(x);
    gemm.beta = accumulate ? 1.0f : 0.0f;
    gemm.bias_grad = NULL;
    if (inner) {
        gemm.flags = DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C;
        gemm.activation = inner->forward.linear.activation;
        gemm.aux = inner->forward.linear.aux;
        gemm.bias_grad = dtrain__param_grad(tape, inner, 1, &gemm.accumulate_bias_grad);
        inner->grad_is_inner = true;
    }
    return tape->device->ops->gemm(tape->device, &gemm);
}

static dtrain_result dtrain__linear_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_gemm_args *forward = &node->forward.linear;
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_tensor *y = node->out;
    const bool activated = forward->activation != DTRAIN_ACT_NONE && !node->grad_is_inner;
    bool add_weight, add_bias = false;
    float *d_weight = dtrain__param_grad(tape, node, 0, &add_weight), *d_bias = NULL;
    dtrain_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    if (!node->grad_is_inner) d_bias = dtrain__param_grad(tape, node, 1, &add_bias);

    if (activated) DTRAIN__TRY(dtrain__gradient_own(tape, y));
    if (activated || (d_bias && !d_weight)) {
        /* max(0, z) is positive where z is: for ReLU the output serves as well as z */
        const void *z = forward->aux ? forward->aux : forward->c;
        dtrain_activation_backward_args args = {activated ? forward->activation
                                                          : (uint32_t)DTRAIN_ACT_NONE,
                                                add_bias,
                                                forward->m,
                                                forward->n,
                                                z,
                                                y->grad,
                                                y->grad,
                                                d_bias,
                                                forward->c_dtype};
        DTRAIN__TRY(ops->activation_backward(tape->device, &args));
        d_bias = NULL;
    }
    gemm.alpha = 1;
    gemm.a = y->grad;
    gemm.lda = forward->n;
    gemm.a_dtype = forward->c_dtype;
    gemm.b_dtype = forward->a_dtype;
    if (d_weight) { /* (out,in) = d_z^T (out,rows) x (rows,in); d_bias: rows of d_z^T added up */
        gemm.flags = DTRAIN_GEMM_TRANS_A;
        gemm.m = forward->n, gemm.n = forward->k, gemm.k = forward->m;
        gemm.b = forward->a, gemm.ldb = forward->k;
        gemm.c = d_weight, gemm.ldc = forward->k;
        gemm.c_dtype = DTRAIN_F32;
        gemm.beta = add_weight ? 1.0f : 0.0f;
        gemm.bias_grad = d_bias;
        gemm.accumulate_bias_grad = add_bias;
        DTRAIN__TRY(ops->gemm(tape->device, &gemm));
    }
    return node->in[0]->needs_grad ? dtrain__linear_backward_x(tape, node, gemm) : DTRAIN_OK;
}

DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_linear", DTRAIN_CHECKPOINT_LINEAR,
                                   dtrain__linear_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    const int64_t in = dtrain__last_axis(x), rows = x->count / in;
    if (!dtrain__check_param(tape, node, 0, weight, -1, in)) return NULL;
    const int64_t out = dtrain__param_rows(weight);
    if (bias && !dtrain__check_param(tape, node, 1, bias, out, 0)) return NULL;
    if ((uint32_t)activation > DTRAIN_ACT_GELU)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_linear: unknown activation %d", (int)activation);

    dtrain_gemm_args *args = &node->forward.linear;
    args->flags = DTRAIN_GEMM_TRANS_B;
    args->activation = activation;
    args->m = rows, args->n = out, args->k = in;
    args->alpha = 1;
    args->a = dtrain__cast_input(tape, node), args->lda = in;
    args->b = dtrain__cast_weight(tape, weight), args->ldb = in;
    args->c = dtrain__output(tape, node, x, out, tape->cast), args->ldc = out;
    args->a_dtype = args->b_dtype = args->c_dtype = tape->cast;
    args->bias = dtrain__param_value(bias);
    if (activation == DTRAIN_ACT_GELU && node->needs_grad)
        args->aux = dtrain__take_data(tape, node, rows * out, tape->cast);
    node->reads_input = true;
    node->reads_output = activation == DTRAIN_ACT_RELU;
    if (args->aux) node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_gemm, args, sizeof *args));
}

/* ---- Layer normalisation ----------------------------------------------------------------------*/

/* With h = (x - mean) rstd, rows of n elements, and d_h = d_y weight:
 *
 *     d_weight += sum of d_y h over rows     d_bias += sum of d_y over rows
 *     d_x += rstd (d_h - mean(d_h) - h mean(d_h h))
 *
 * Behind add_layernorm x is a sum, whose gradient is complete here: this was the first node to use
 * it. Its narrower summand gets a rounded copy while the values are at hand. */
static dtrain_result dtrain__layernorm_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_layernorm_args *forward = &node->forward.layernorm;
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_tensor *x = node->in[0];
    bool add_weight, add_bias;
    dtrain_layernorm_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.n = forward->n;
    args.x = x->data;
    args.weight = forward->weight;
    args.mean = forward->mean;
    args.rstd = forward->rstd;
    args.d_y = node->out->grad;
    args.x_dtype = forward->x_dtype;
    args.y_dtype = forward->y_dtype;
    args.d_weight = dtrain__param_grad(tape, node, 0, &add_weight);
    args.d_bias = dtrain__param_grad(tape, node, 1, &add_bias);
    args.accumulate_params = add_weight || add_bias;
    /* the kernel has one flag for both: if only one has a gradient already, the other adds to 0 */
    if (args.d_weight && args.d_bias && add_weight != add_bias)
        DTRAIN__TRY(ops->zero(tape->device, add_weight ? args.d_bias : args.d_weight,
                              (size_t)args.n * sizeof(float)));
    if (x->needs_grad) DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate_x));
    args.d_x = x->grad;
    if (forward->residual && x->needs_grad) {
        dtrain_node *sum = x->producer;
        dtrain_tensor *residual = sum->in[1];
        if (residual->needs_grad && !residual->grad_written && residual->dtype != x->dtype) {
            bool accumulate;
            DTRAIN__TRY(dtrain__gradient_open(tape, residual, &accumulate));
            args.d_residual = residual->grad;
            sum->residual_done = true;
        }
    }
    return ops->layernorm_backward(tape->device, &args);
}

/* Of x, or of x + residual, which then becomes sum->data. */
static dtrain_tensor *dtrain__layernorm(dtrain_tape *tape, const char *name, dtrain_tensor *x,
                                        dtrain_param *weight, dtrain_param *bias,
                                        const dtrain_node *sum)
{
    dtrain_node *node =
        dtrain__op(tape, name, DTRAIN_CHECKPOINT_LAYERNORM, dtrain__layernorm_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    const int64_t n = dtrain__last_axis(x), rows = x->count / n;
    if (!dtrain__check_param(tape, node, 0, weight, n, 0)) return NULL;
    if (bias && !dtrain__check_param(tape, node, 1, bias, n, 0)) return NULL;

    dtrain_layernorm_args *args = &node->forward.layernorm;
    args->rows = rows;
    args->n = n;
    args->epsilon = 1e-5f;
    args->x = sum ? sum->in[0]->data : x->data;
    args->weight = dtrain__param_value(weight);
    args->bias = dtrain__param_value(bias);
    args->y = dtrain__output(tape, node, x, n, tape->cast);
    args->mean = dtrain__take_floats(tape, node, rows);
    args->rstd = dtrain__take_floats(tape, node, rows);
    args->residual = sum ? sum->in[1]->data : NULL;
    args->sum = sum ? x->data : NULL;
    args->x_dtype = dtrain__dtype(x);
    args->y_dtype = tape->cast;
    node->sum = sum;
    node->reads_input = node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_layernorm, args, sizeof *args));
}

DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_param *weight, dtrain_param *bias)
{
    return dtrain__layernorm(tape, "dtrain_layernorm", x, weight, bias, NULL);
}

/* ---- Embedding --------------------------------------------------------------------------------*/

/* d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the others have to become zero first. */
static dtrain_result dtrain__embedding_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_embedding_args *forward = &node->forward.embedding;
    const dtrain_device_ops *ops = tape->device->ops;
    float *grad[2];
    for (int i = 0; i < 2; i++) {
        bool add;
        grad[i] = dtrain__param_grad(tape, node, i, &add);
        if (!grad[i] || add) continue;
        size_t rows = (size_t)dtrain__param_rows(node->param[i]);
        DTRAIN__TRY(ops->zero(tape->device, grad[i], rows * (size_t)forward->n * sizeof(float)));
    }
    dtrain_embedding_backward_args args = {forward->rows,  forward->sequence, forward->n,
                                           forward->vocab, forward->tokens,   node->out->grad,
                                           grad[0],        grad[1],           DTRAIN_F32};
    return ops->embedding_backward(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_embedding", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__embedding_backward, tokens, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_I32)) return NULL;
    if (!dtrain__check_param(tape, node, 0, token, -1, -1)) return NULL;
    int64_t token_shape[4];
    dtrain__param_shape(token, token_shape);
    const int64_t n = token_shape[1], sequence = dtrain__last_axis(tokens), rows = tokens->count;
    if (position && !dtrain__check_param(tape, node, 1, position, -1, n)) return NULL;
    if (position && dtrain__param_rows(position) < sequence)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_embedding: parameter %s has %lld positions, the tokens "
                                 "%lld",
                                 dtrain__param_name(position),
                                 (long long)dtrain__param_rows(position), (long long)sequence);

    const int64_t shape[2] = {rows, n};
    node->out = dtrain__tensor_new(tape, node, DTRAIN_F32, 2, shape);
    if (!node->out) return NULL;
    dtrain_embedding_args *args = &node->forward.embedding;
    args->rows = rows;
    args->sequence = sequence;
    args->n = n;
    args->vocab = token_shape[0];
    args->tokens = (const int32_t *)tokens->data;
    args->wte = dtrain__param_value(token);
    args->wpe = dtrain__param_value(position);
    args->y = node->out->data;
    args->dtype = DTRAIN_F32;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_embedding, args, sizeof *args));
}

/* ---- Attention --------------------------------------------------------------------------------*/

/* With p = softmax(q k^T / sqrt(d)), made again block by block from q, k and lse:
 *
 *     d_v = p^T d_y   d_p = d_y v^T   d_s = p (d_p - d_y . y)   d_q = d_s k   d_k = d_s^T q */
static dtrain_result dtrain__attention_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_attention_args *forward = &node->forward.attention;
    dtrain_tensor *qkv = node->in[0];
    dtrain__chunk *earlier;
    DTRAIN__TRY(dtrain__gradient_fresh(tape, qkv, &earlier));
    dtrain_attention_backward_args args = {forward->batch, forward->sequence, forward->heads,
                                           forward->n,     forward->causal,   forward->qkv,
                                           forward->y,     forward->lse,      node->out->grad,
                                           qkv->grad,      forward->dtype};
    DTRAIN__TRY(tape->device->ops->attention_backward(tape->device, &args));
    return dtrain__gradient_merge(tape, qkv, earlier);
}

DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_attention", DTRAIN_CHECKPOINT_ATTENTION,
                                   dtrain__attention_backward, qkv, NULL);
    dtrain__text text;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    const int64_t width = dtrain__last_axis(qkv), rows = qkv->count / width, n = width / 3;
    if (flags & ~DTRAIN_CAUSAL)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_attention: unknown flags %#x",
                                 flags);
    if (sequence < 1 || rows % sequence || heads < 1 || width % 3 || n % heads)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_attention: qkv %s does not divide into sequences of %lld "
                                 "rows and 3 x %lld heads",
                                 dtrain__shape_text(qkv->ndim, qkv->shape, &text),
                                 (long long)sequence, (long long)heads);

    dtrain_attention_args *args = &node->forward.attention;
    args->batch = rows / sequence;
    args->sequence = sequence;
    args->heads = heads;
    args->n = n;
    args->causal = (flags & DTRAIN_CAUSAL) != 0;
    args->qkv = qkv->data;
    args->dtype = dtrain__dtype(qkv);
    args->y = dtrain__output(tape, node, qkv, n, qkv->dtype);
    args->lse = dtrain__take_floats(tape, node, rows * heads);
    node->reads_input = node->reads_output = node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_attention, args, sizeof *args));
}

/* ---- Elementwise ------------------------------------------------------------------------------*/

/* Both inputs share the gradient of the sum until one of them has more to add. The sum has the
 * wider type of the two, x's when they are as wide. */
static dtrain_result dtrain__add_backward(dtrain_tape *tape, dtrain_node *node)
{
    for (int i = 0; i < (node->residual_done ? 1 : 2); i++)
        if (node->in[i]->needs_grad)
            DTRAIN__TRY(dtrain__gradient_pass(tape, node->out, node->in[i]));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y)
{
    dtrain_node *node =
        dtrain__op(tape, "dtrain_add", DTRAIN_CHECKPOINT_ELEMENTWISE, dtrain__add_backward, x, y);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_F32)) return NULL;
    if (x->count != y->count || dtrain__last_axis(x) != dtrain__last_axis(y))
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_add: %s and %s differ",
                                 dtrain__shape_text(x->ndim, x->shape, &left),
                                 dtrain__shape_text(y->ndim, y->shape, &right));
    const dtrain_tensor *wide = y->dtype == DTRAIN_F32 ? y : x, *other = wide == y ? x : y;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), wide->dtype);
    if (!out) return NULL;
    dtrain_add_args args = {x->count, wide->data,          other->data,
                            out,      dtrain__dtype(wide), dtrain__dtype(other)};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_add, &args, sizeof args));
}

/* The sum is a node of its own, whose kernel is part of the normalisation's: what only fuses the
 * passes over memory need not tie two gradients together. It is dropped when that is. */
DTRAIN_API dtrain_tensor *dtrain_add_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                               dtrain_tensor *residual, dtrain_param *weight,
                                               dtrain_param *bias, dtrain_tensor **sum)
{
    const char *const name = "dtrain_add_layernorm";
    dtrain_node *node =
        dtrain__op(tape, name, DTRAIN_CHECKPOINT_LAYERNORM, dtrain__add_backward, x, residual);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_F32)) return NULL;
    if (!sum) return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: sum is NULL", name);
    if (x->count != residual->count || dtrain__last_axis(x) != dtrain__last_axis(residual))
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: %s and %s differ", name,
                                 dtrain__shape_text(x->ndim, x->shape, &left),
                                 dtrain__shape_text(residual->ndim, residual->shape, &right));
    if (residual->dtype != (uint32_t)tape->cast) { /* not what the fused kernel takes */
        *sum = dtrain_add(tape, x, residual);
        return dtrain_layernorm(tape, *sum, weight, bias);
    }
    if (!dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype)) return NULL;
    *sum = dtrain__record(tape, node, DTRAIN_OK);
    return dtrain__layernorm(tape, name, *sum, weight, bias, node);
}

/* d_x += factor d_y */
static dtrain_result dtrain__scale_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    dtrain_axpby_args args = {x->count,        false, node->factor, 1,
                              node->out->grad, NULL,  false,        dtrain__dtype(x)};
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.y = x->grad;
    return tape->device->ops->axpby(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_scale", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__scale_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    node->factor = factor;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype);
    if (!out) return NULL;
    dtrain_axpby_args args = {x->count, false, factor, 0, x->data, out, false, dtrain__dtype(x)};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_axpby, &args, sizeof args));
}

static dtrain_result dtrain__cast_backward(dtrain_tape *tape, dtrain_node *node)
{
    return dtrain__gradient_pass(tape, node->out, node->in[0]);
}

DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_cast", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__cast_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    if (dtype != DTRAIN_F32 && dtype != DTRAIN_BF16 && dtype != DTRAIN_F16)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_cast: dtype is %s, expected f32, bf16 or f16",
                                 dtrain_dtype_name(dtype));
    if (dtrain__dtype(x) == dtype) return x;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), dtype);
    if (!out) return NULL;
    dtrain_convert_args args = {x->count, x->data, out, dtrain__dtype(x), dtype};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_convert, &args, sizeof args));
}

/* Keeping is a function of (seed, stream, i): the forward kernel is its own backward. */
static dtrain_result dtrain__dropout_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    dtrain_dropout_args args = node->forward.dropout;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.x = node->out->grad;
    args.y = x->grad;
    return tape->device->ops->dropout(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_dropout", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__dropout_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    if (!(probability >= 0 && probability < 1)) /* so written that NaN is refused */
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_dropout: probability is %g, not in [0, 1)",
                                 (double)probability);
    if (probability == 0 || (tape->flags & DTRAIN_TAPE_NO_GRAD)) return x;
    dtrain_dropout_args *args = &node->forward.dropout;
    args->count = x->count;
    args->probability = probability;
    args->seed = tape->seed;
    args->stream = tape->dropout_count++; /* other numbers for each dropout of the pass */
    args->scalars = tape->scalars;
    args->dtype = dtrain__dtype(x);
    args->x = x->data;
    args->y = dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype);
    if (!args->y) return NULL;
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_dropout, args, sizeof *args));
}

/* ---- One-element results ----------------------------------------------------------------------*/

/* factor * sum of x (count), as the node's output (1); added up in double: a float sum over many
 * rows would lose digits of the loss. */
static dtrain_tensor *dtrain__sum_to_output(dtrain_tape *tape, dtrain_node *node, const void *x,
                                            uint32_t dtype, int64_t count)
{
    const int64_t shape[1] = {1};
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    node->out = dtrain__tensor_new(tape, node, DTRAIN_F32, 1, shape);
    if (!node->out) return NULL;
    args.count = count;
    args.scale = (double)node->factor;
    args.x = x;
    args.dtype = (dtrain_dtype)dtype;
    args.out = (float *)node->out->data;
    return dtrain__record(tape, node, tape->device->ops->sum(tape->device, &args));
}

/* Every element gets the same gradient. Where x has a type of its own that is rounded once, after
 * the factor: a scaled loss may be beyond fp16 while its mean is not. */
static dtrain_result dtrain__sum_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_axpby_args args = {x->count,        false,   node->factor, 1,
                              node->out->grad, x->grad, true,         dtrain__dtype(x)};
    if (x->dtype != DTRAIN_F32) {
        float *scaled = dtrain__take_floats(tape, NULL, 1);
        dtrain_axpby_args one = {1, false, node->factor, 0, args.x, scaled, false, DTRAIN_F32};
        if (!scaled) return tape->error;
        DTRAIN__TRY(ops->axpby(tape->device, &one));
        args.a = 1;
        args.x = dtrain__cast_to(tape, scaled, DTRAIN_F32, args.dtype, 1);
        DTRAIN__TRY(tape->error);
    }
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.y = x->grad;
    return ops->axpby(tape->device, &args);
}

static dtrain_tensor *dtrain__sum(dtrain_tape *tape, const char *name, dtrain_tensor *x, bool mean)
{
    dtrain_node *node = dtrain__op(tape, name, 0, dtrain__sum_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    node->factor = mean ? 1.0f / (float)x->count : 1.0f;
    return dtrain__sum_to_output(tape, node, x->data, x->dtype, x->count);
}

DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain__sum(tape, "dtrain_sum", x, false);
}

DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain__sum(tape, "dtrain_mean", x, true);
}

/* ---- Cross-entropy ----------------------------------------------------------------------------*/

/* d_logits = (softmax(logits) - onehot(target)) * upstream / valid targets.
 *
 * Logits are by far the largest value of a language model, (rows, vocabulary). When this is their
 * only use and the operation that made them does not look at them in its own backward, they are
 * dead once d_logits is known: it is written over them, and there is no second buffer of that size.
 * The block that says so belongs to no pool: it goes with the nodes of the pass. */
static dtrain_result dtrain__cross_entropy_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_cross_entropy_args *forward = &node->forward.cross_entropy;
    dtrain_tensor *logits = node->in[0];
    dtrain__chunk *earlier = NULL;
    if (logits->producer && !logits->producer->reads_output && logits->pending_uses == 1) {
        dtrain__chunk *in_place = (dtrain__chunk *)dtrain__take_host(tape, sizeof *in_place);
        if (!in_place) return tape->error;
        const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)logits;
        in_place->memory = (char *)logits->data;
        in_place->owners = 1;
        in_place->in_region = made->segment && !made->kept;
        dtrain__gradient_set(logits, in_place);
    } else {
        DTRAIN__TRY(dtrain__gradient_fresh(tape, logits, &earlier));
    }
    dtrain_cross_entropy_backward_args args = {
        forward->rows,    forward->n,   node->factor, forward->logits,
        forward->targets, forward->lse, logits->grad, (const float *)node->out->grad,
        forward->dtype};
    DTRAIN__TRY(tape->device->ops->cross_entropy_backward(tape->device, &args));
    return dtrain__gradient_merge(tape, logits, earlier);
}

DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_cross_entropy", 0, dtrain__cross_entropy_backward,
                                   logits, targets);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_I32)) return NULL;
    const int64_t n = dtrain__last_axis(logits), rows = logits->count / n;
    if (targets->count != rows)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_cross_entropy: logits %s have %lld rows, targets are %s",
                                 dtrain__shape_text(logits->ndim, logits->shape, &left),
                                 (long long)rows,
                                 dtrain__shape_text(targets->ndim, targets->shape, &right));

    const int64_t valid = ((const dtrain__tape_tensor *)targets)->valid_count;
    dtrain_cross_entropy_args *args = &node->forward.cross_entropy;
    args->rows = rows;
    args->n = n;
    args->logits = logits->data;
    args->dtype = dtrain__dtype(logits);
    args->targets = (const int32_t *)targets->data;
    args->loss = dtrain__take_floats(tape, node, rows);
    args->lse = dtrain__take_floats(tape, node, rows);
    node->reads_input = true;
    if (tape->error != DTRAIN_OK) return NULL;
    node->factor = valid ? 1.0f / (float)valid : 0.0f; /* nothing counts: the loss is 0 */
    dtrain_result result = tape->device->ops->cross_entropy(tape->device, args);
    if (dtrain__tape_stick(tape, result) != DTRAIN_OK) return NULL;
    return dtrain__sum_to_output(tape, node, args->loss, DTRAIN_F32, rows);
}

/* ================================================================================================
 * [S34] Loss scaling, clipping
 *
 * The norm is one number from all shards, added in double in registration order: the same bits on
 * every rank that has the same gradients. Nothing is scaled here; the optimizer multiplies by a
 * factor on its way through the gradients anyway, so unscaling and clipping together cost one read
 * of them:
 *
 *     norm = sqrt(sum over all ranks' shards of grad^2) / scale        grad_scale = clip / scale
 *
 * That read finds overflows as well. The square of an fp32 number is far inside double's range, and
 * so is the sum of as many as fit in a memory: the norm is not finite exactly when some gradient,
 * on whatever rank, is not. Replicas of a shard hold the same averaged bits; ranks with different
 * shards have exchanged their sums: the verdict is the same everywhere without asking anybody.
 * ==============================================================================================*/

/* Offloaded gradients are shards in page-locked memory; what is whole stays on the device. */
static bool dtrain__grad_on_host(const dtrain_strategy *strategy, const dtrain_shard *shard)
{
    const dtrain__layout *layout = &strategy->layout;
    return layout->host_grads && layout->buckets[layout->entries[shard->param->index].bucket].work;
}

/* Of the shards in host memory, or of the others: on the device that is nearer to them, where total
 * (1) is. */
static dtrain_result dtrain__add_squares(dtrain_strategy *strategy, bool on_host, double *total)
{
    dtrain_device *device = on_host ? strategy->offload.cpu : strategy->device;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        dtrain_sum_args args;
        if (dtrain__grad_on_host(strategy, &strategy->shards[i]) != on_host) continue;
        memset(&args, 0, sizeof args);
        args.count = strategy->shards[i].count;
        args.squares = true;
        args.accumulate = true;
        args.scale = 1;
        args.x = strategy->shards[i].grad;
        args.total = total;
        if (args.count && strategy->counted[i]) DTRAIN__TRY(device->ops->sum(device, &args));
    }
    return DTRAIN_OK;
}

/* Left in strategy->sum_squares, device memory, without those in host memory; nobody waits. What
 * every rank of a sharded strategy holds a copy of is added by one of them. */
static dtrain_result dtrain__sum_squares(dtrain_strategy *strategy)
{
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(device->ops->zero(device, strategy->sum_squares, sizeof(double)));
    return dtrain__add_squares(strategy, false, strategy->sum_squares);
}

/* Ranks with different shards exchange their sums and add them in rank order: a sum of doubles
 * made by the communicator would not be exact. */
static dtrain_result dtrain__global_sum(dtrain_strategy *strategy, double *total)
{
    dtrain_comm *comm = strategy->shard_comm;
    int64_t bits;
    if (!comm) return DTRAIN_OK;
    memcpy(&bits, total, sizeof bits);
    DTRAIN__TRY(dtrain_all_gather(comm, &bits, strategy->gathered, 1, DTRAIN_I64, NULL));
    *total = 0;
    for (int i = 0; i < dtrain_comm_size(comm); i++) {
        double one;
        memcpy(&one, &strategy->gathered[i], sizeof one);
        *total += one;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__grad_norm(dtrain_strategy *strategy, double *norm)
{
    dtrain_device *device = strategy->device;
    double total;
    DTRAIN__TRY(dtrain__sum_squares(strategy));
    DTRAIN__TRY(device->ops->copy(device, &total, strategy->sum_squares, sizeof total,
                                  DTRAIN_COPY_DEVICE_TO_HOST));
    if (strategy->layout.host_grads) DTRAIN__TRY(dtrain__add_squares(strategy, true, &total));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__global_sum(strategy, &total)));
    *norm = sqrt(total);
    return DTRAIN_OK;
}

static float dtrain__clip_factor(float norm, float max_norm)
{
    if (!dtrain_is_finite(norm) || !(max_norm > 0)) return 1;
    const float factor = max_norm / (norm + 1e-6f);
    return factor < 1 ? factor : 1; /* torch clamps it too */
}

DTRAIN_API dtrain_result dtrain_clip_grad_norm(dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *scale)
{
    double found;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_clip_grad_norm"));
    if (!norm || !scale)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_clip_grad_norm: %s is NULL",
                           norm ? "scale" : "norm");
    DTRAIN__TRY(dtrain__grad_norm(strategy, &found));
    *norm = (float)found;
    *scale = dtrain__clip_factor(*norm, max_norm);
    return DTRAIN_OK;
}

/* ---- Loss scaling -----------------------------------------------------------------------------*/

DTRAIN_API dtrain_scaler_desc dtrain_scaler_defaults(void)
{
    dtrain_scaler_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.initial_scale = 65536;
    desc.growth_factor = 2;
    desc.backoff_factor = 0.5f;
    desc.growth_interval = 2000;
    desc.hysteresis = 1;
    desc.minimum_scale = 1;
    return desc;
}

/* The reciprocal of a denormal may be infinite: the minimum is at least the least normal number. */
static dtrain_result dtrain__check_scaler(const dtrain_scaler_desc *desc)
{
    const char *wrong = NULL;
    if (!dtrain_is_finite(desc->minimum_scale) || desc->minimum_scale < FLT_MIN)
        wrong = "minimum_scale >= 1.18e-38";
    if (!dtrain_is_finite(desc->initial_scale) || desc->initial_scale < desc->minimum_scale)
        wrong = "a finite initial_scale >= minimum_scale";
    if (!dtrain_is_finite(desc->growth_factor) || desc->growth_factor <= 1)
        wrong = "a finite growth_factor > 1";
    if (!dtrain_is_finite(desc->backoff_factor) || desc->backoff_factor <= 0 ||
        desc->backoff_factor >= 1)
        wrong = "0 < backoff_factor < 1";
    if (!desc->growth_interval) wrong = "growth_interval >= 1";
    if (!desc->hysteresis) wrong = "hysteresis >= 1";
    if (!wrong) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_scaler_init: expected %s; found initial_scale %g, growth_factor %g, "
                       "backoff_factor %g, growth_interval %u, hysteresis %u, minimum_scale %g; "
                       "start from dtrain_scaler_defaults()",
                       wrong, (double)desc->initial_scale, (double)desc->growth_factor,
                       (double)desc->backoff_factor, (unsigned)desc->growth_interval,
                       (unsigned)desc->hysteresis, (double)desc->minimum_scale);
}

DTRAIN_API dtrain_result dtrain_scaler_init(dtrain_scaler *scaler, const dtrain_scaler_desc *desc)
{
    if (!scaler) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_scaler_init: scaler is NULL");
    memset(scaler, 0, sizeof *scaler);
    const dtrain_scaler_desc resolved = desc ? *desc : dtrain_scaler_defaults();
    DTRAIN__TRY(dtrain__check_scaler(&resolved));
    scaler->desc = resolved;
    scaler->scale = resolved.initial_scale;
    scaler->bad_left = resolved.hysteresis;
    return DTRAIN_OK;
}

static dtrain_result dtrain__scaler_usable(const dtrain_scaler *scaler, const char *call)
{
    if (scaler && scaler->scale > 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: scaler is %s", call,
                       scaler ? "not initialised; call dtrain_scaler_init first" : "NULL");
}

DTRAIN_API dtrain_result dtrain_scaler_unscale(const dtrain_scaler *scaler,
                                               dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *grad_scale, bool *found_inf)
{
    const char *const call = "dtrain_scaler_unscale";
    double scaled;
    DTRAIN__TRY(dtrain__scaler_usable(scaler, call));
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (!norm || !grad_scale || !found_inf)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call,
                           !norm         ? "norm"
                           : !grad_scale ? "grad_scale"
                                         : "found_inf");
    DTRAIN__TRY(dtrain__grad_norm(strategy, &scaled));
    *norm = (float)(scaled / (double)scaler->scale);
    *found_inf = !dtrain_is_finite(*norm);
    *grad_scale = dtrain__clip_factor(*norm, max_norm) / scaler->scale;
    return DTRAIN_OK;
}

static void dtrain__scaler_good(dtrain_scaler *scaler)
{
    const dtrain_scaler_desc *desc = &scaler->desc;
    scaler->bad_steps = 0;
    scaler->good_steps++;
    if (scaler->good_steps < desc->growth_interval) return;
    const float grown = scaler->scale * desc->growth_factor;
    if (dtrain_is_finite(grown)) scaler->scale = grown;
    scaler->good_steps = 0;
    scaler->bad_left = desc->hysteresis;
}

DTRAIN_API dtrain_result dtrain_scaler_update(dtrain_scaler *scaler, bool found_inf)
{
    DTRAIN__TRY(dtrain__scaler_usable(scaler, "dtrain_scaler_update"));
    if (!found_inf) {
        dtrain__scaler_good(scaler);
        return DTRAIN_OK;
    }
    scaler->good_steps = 0;
    scaler->bad_steps++;
    scaler->skipped_steps++;
    if (scaler->bad_left > 1) {
        scaler->bad_left--;
        return DTRAIN_OK;
    }
    const float lower = scaler->scale * scaler->desc.backoff_factor;
    if (lower >= scaler->desc.minimum_scale) {
        scaler->scale = lower;
        return DTRAIN_OK;
    }
    return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                       "dtrain_scaler_update: expected finite gradients at a loss scale of %g, "
                       "found overflows in %u steps running, and a smaller scale would be below "
                       "minimum_scale %g; lower the learning rate, clip gradients, look at the "
                       "data, or train in bf16, which needs no scale",
                       (double)scaler->scale, (unsigned)scaler->bad_steps,
                       (double)scaler->desc.minimum_scale);
}

/* ================================================================================================
 * [S35] Optimizers, schedules
 *
 * One fused kernel per shard reads gradient and state once and writes value and state once. State
 * is for this rank's shards only, one block, made at creation:
 *
 *     AdamW   | m of shard 0 .. pad | v of shard 0 .. pad | m of shard 1 ...
 *     SGD     | buffer of shard 0 .. pad | buffer of shard 1 ...       (nothing without momentum)
 *
 * Offloaded, the block is page-locked host memory, each shard's master copy comes before its state,
 * two stages for gradients before everything, and the update goes in chunks:
 *
 *     down    | grad 0 | grad 1 | grad 2      | ...        into stage 0, 1, 0, ...
 *     CPU              | update 0 | update 1  | update 2
 *     up                          | value 0   | value 1 ...
 *
 * Values and gradients that are in host memory themselves are used where they are.
 * ==============================================================================================*/

struct dtrain_optimizer {
    dtrain_optimizer_desc desc;
    dtrain_allocator allocator;
    dtrain_device *device;
    const dtrain_shard *shards; /* (shard_count), the strategy's */
    size_t shard_count;
    dtrain_strategy *strategy;
    dtrain_optimizer_tensor *tensors; /* (tensor_count), of (shard_count): shards not empty */
    size_t tensor_count;
    float *state;
    size_t state_bytes; /* of moments and buffers alone, wherever they are */
    float *host;        /* offloaded: the block that state is in ... */
    size_t host_bytes;
    int64_t stage; /* ... and elements of a stage, two of which it begins with */
    uint64_t step_count;
};

DTRAIN_API dtrain_optimizer_desc dtrain_adamw_defaults(void)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_ADAMW;
    desc.beta1 = 0.9f;
    desc.beta2 = 0.999f;
    desc.epsilon = 1e-8f;
    desc.weight_decay = 0.01f;
    return desc;
}

DTRAIN_API dtrain_optimizer_desc dtrain_sgd_defaults(void)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_SGD;
    return desc;
}

/* Comparisons are written so that NaN fails them. */
static dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc)
{
    const char *wrong = NULL;
    if (desc->kind != DTRAIN_ADAMW && desc->kind != DTRAIN_SGD)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_create: kind %u is not a dtrain_optimizer_kind; start from "
            "dtrain_adamw_defaults() or dtrain_sgd_defaults()",
            (unsigned)desc->kind);
    if (!(desc->weight_decay >= 0 && dtrain_is_finite(desc->weight_decay)))
        wrong = "weight_decay >= 0";
    if (desc->kind == DTRAIN_ADAMW) {
        if (!(desc->beta1 >= 0 && desc->beta1 < 1)) wrong = "0 <= beta1 < 1";
        if (!(desc->beta2 >= 0 && desc->beta2 < 1)) wrong = "0 <= beta2 < 1";
        if (!(desc->epsilon >= 0 && dtrain_is_finite(desc->epsilon))) wrong = "epsilon >= 0";
    } else {
        if (!(desc->momentum >= 0 && dtrain_is_finite(desc->momentum))) wrong = "momentum >= 0";
        if (desc->nesterov && desc->momentum == 0) wrong = "momentum > 0 with nesterov";
    }
    if (!wrong) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_optimizer_create: expected %s; found beta1 %g, beta2 "
                       "%g, epsilon %g, weight_decay %g, momentum %g",
                       wrong, (double)desc->beta1, (double)desc->beta2, (double)desc->epsilon,
                       (double)desc->weight_decay, (double)desc->momentum);
}

/* State tensors per shard. */
static size_t dtrain__state_tensors(const dtrain_optimizer_desc *desc)
{
    if (desc->kind == DTRAIN_ADAMW) return 2;
    return desc->momentum > 0 ? 1 : 0;
}

static dtrain_result dtrain__offload_state(dtrain_optimizer *optimizer, size_t state_bytes)
{
    dtrain_device *device = optimizer->device;
    const size_t states = dtrain__state_tensors(&optimizer->desc);
    void *memory;
    const size_t bytes =
        (size_t)dtrain__offloaded_state(&optimizer->strategy->layout, states, &optimizer->stage);
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->host_alloc(device, bytes, &memory));
    memset(memory, 0, bytes);
    optimizer->host = (float *)memory;
    optimizer->host_bytes = bytes;
    optimizer->state = optimizer->host + 2 * optimizer->stage;
    optimizer->state_bytes = state_bytes;
    return DTRAIN_OK;
}

/* The products cannot overflow: a quarter of the address space holds the values, [S27] saw to
 * it. */
static dtrain_result dtrain__optimizer_state(dtrain_optimizer *optimizer)
{
    dtrain_device *device = optimizer->device;
    void *memory;
    size_t bytes = 0;
    for (size_t i = 0; i < optimizer->shard_count; i++)
        bytes += (size_t)dtrain__padded(optimizer->shards[i].count) * sizeof(float);
    bytes *= dtrain__state_tensors(&optimizer->desc);
    if (optimizer->strategy->offload.cpu) return dtrain__offload_state(optimizer, bytes);
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->alloc(device, bytes, &memory));
    optimizer->state = (float *)memory;
    optimizer->state_bytes = bytes;
    return device->ops->zero(device, memory, bytes);
}

/* Biases and the scales of norms are 1-D: pulling them to zero does not regularise anything. */
static float dtrain__decay_of(const dtrain_optimizer *optimizer, const dtrain_param *p)
{
    const bool skipped = (p->flags & DTRAIN_PARAM_NO_DECAY) || dtrain__param_dims(p) < 2;
    return skipped ? 0.0f : optimizer->desc.weight_decay;
}

/* Offloaded values on the device get a master copy at *place, which moves on. */
static dtrain_result dtrain__take_master(dtrain_optimizer *optimizer,
                                         dtrain_optimizer_tensor *tensor, float **place)
{
    dtrain_device *device = optimizer->device;
    if (!optimizer->host || dtrain__on_host(device, tensor->value)) return DTRAIN_OK;
    float *value = tensor->value;
    tensor->value = *place;
    *place += dtrain__padded(tensor->count);
    return device->ops->copy(device, tensor->value, value, (size_t)tensor->count * sizeof(float),
                             DTRAIN_COPY_DEVICE_TO_HOST);
}

/* The optimizer's view of the shards; addresses do not change any more. */
static dtrain_result dtrain__optimizer_tensors(dtrain_optimizer *optimizer)
{
    const size_t states = dtrain__state_tensors(&optimizer->desc);
    float *state = optimizer->state;
    optimizer->tensors = (dtrain_optimizer_tensor *)dtrain__alloc(
        &optimizer->allocator, optimizer->shard_count, sizeof *optimizer->tensors, "an optimizer");
    if (!optimizer->tensors) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < optimizer->shard_count; i++) {
        const dtrain_shard *shard = &optimizer->shards[i];
        if (shard->count == 0) continue;
        dtrain_optimizer_tensor *tensor = &optimizer->tensors[optimizer->tensor_count++];
        tensor->count = shard->count;
        tensor->weight_decay = dtrain__decay_of(optimizer, shard->param);
        tensor->value = shard->value;
        tensor->grad = shard->grad;
        DTRAIN__TRY(dtrain__take_master(optimizer, tensor, &state));
        if (states > 0) tensor->m = state;
        if (states > 1) tensor->v = state + dtrain__padded(shard->count);
        if (state) state += states * (size_t)dtrain__padded(shard->count);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out)
{
    const dtrain_shard *shards;
    size_t shard_count;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_create: out is NULL");
    *out = NULL;
    if (!world || !strategy || !desc)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_create: %s is NULL",
                           !world      ? "world"
                           : !strategy ? "strategy"
                                       : "desc");
    DTRAIN__TRY(dtrain__check_optimizer(desc));
    DTRAIN__TRY(dtrain_strategy_shards(strategy, &shards, &shard_count));
    const dtrain_allocator *allocator = dtrain_world_allocator(world);
    dtrain_optimizer *optimizer =
        (dtrain_optimizer *)dtrain__alloc(allocator, 1, sizeof *optimizer, "an optimizer");
    if (!optimizer) return DTRAIN_ERROR_MEMORY;
    optimizer->desc = *desc;
    optimizer->allocator = *allocator;
    optimizer->device = dtrain_world_device(world);
    optimizer->strategy = strategy;
    optimizer->shards = shards;
    optimizer->shard_count = shard_count;
    dtrain_result result = dtrain__optimizer_state(optimizer);
    if (result == DTRAIN_OK) result = dtrain__optimizer_tensors(optimizer);
    if (result == DTRAIN_OK) *out = optimizer;
    else dtrain_optimizer_destroy(optimizer);
    return result;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (!optimizer) return;
    const dtrain_allocator allocator = optimizer->allocator;
    dtrain_device *device = optimizer->device;
    if (optimizer->host) {
        device->ops->synchronize(device); /* new values may still be on their way */
        device->ops->host_free(device, optimizer->host, optimizer->host_bytes);
    } else if (optimizer->state)
        device->ops->free(device, optimizer->state, optimizer->state_bytes);
    dtrain__free(&allocator, optimizer->tensors, optimizer->shard_count,
                 sizeof *optimizer->tensors);
    dtrain__free(&allocator, optimizer, 1, sizeof *optimizer);
}

DTRAIN_API uint64_t dtrain_optimizer_state_bytes(const dtrain_optimizer *optimizer)
{
    return optimizer ? optimizer->state_bytes : 0;
}

/* What changes from step to step, for the step that comes next. */
static dtrain_step_scalars dtrain__optimizer_scalars(const dtrain_optimizer *optimizer, float lr,
                                                     float grad_scale)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    const double step = (double)(optimizer->step_count + 1);
    dtrain_step_scalars scalars;
    memset(&scalars, 0, sizeof scalars);
    scalars.lr = lr;
    scalars.grad_scale = grad_scale;
    /* in double: in fp32, 1 - 0.999 has lost three digits already at step 1 */
    scalars.correction1 = (float)(1 - pow((double)desc->beta1, step));
    scalars.correction2 = (float)(1 - pow((double)desc->beta2, step));
    return scalars;
}

/* The update with the scalars given, or with those that `device_scalars` holds when it runs. The
 * first step of SGD fills the buffer with the gradient itself, as torch does. */
static dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer,
                                              dtrain_device *device,
                                              const dtrain_optimizer_tensor *tensors, size_t count,
                                              const dtrain_step_scalars *now,
                                              const dtrain_step_scalars *device_scalars)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    if (desc->kind == DTRAIN_ADAMW) {
        dtrain_adamw_args args;
        memset(&args, 0, sizeof args);
        args.tensor_count = count;
        args.tensors = tensors;
        args.lr = now->lr;
        args.beta1 = desc->beta1;
        args.beta2 = desc->beta2;
        args.epsilon = desc->epsilon;
        args.correction1 = now->correction1;
        args.correction2 = now->correction2;
        args.grad_scale = now->grad_scale;
        args.scalars = device_scalars;
        return device->ops->adamw(device, &args);
    }
    dtrain_sgd_args args;
    memset(&args, 0, sizeof args);
    args.tensor_count = count;
    args.tensors = tensors;
    args.lr = now->lr;
    args.momentum = desc->momentum;
    args.grad_scale = now->grad_scale;
    args.nesterov = desc->nesterov;
    args.first = optimizer->step_count == 0;
    args.scalars = device_scalars;
    return device->ops->sgd(device, &args);
}

static dtrain_result dtrain__optimizer_run(dtrain_optimizer *optimizer,
                                           const dtrain_step_scalars *now,
                                           const dtrain_step_scalars *device_scalars)
{
    return dtrain__optimizer_update(optimizer, optimizer->device, optimizer->tensors,
                                    optimizer->tensor_count, now, device_scalars);
}

/* ---- The update in host memory ----------------------------------------------------------------*/

/* A part of one shard; begins as zeros. */
typedef struct dtrain__update_piece {
    size_t shard, tensor; /* next to be looked at */
    int64_t next;         /* first element of it after this chunk */
    const float *grad;    /* of this chunk, where the strategy keeps it */
    float *value;
    dtrain_optimizer_tensor part; /* this chunk, in host memory but for the gradient */
} dtrain__update_piece;

/* False behind the last. Empty shards have no tensor. */
static bool dtrain__piece_next(const dtrain_optimizer *optimizer, dtrain__update_piece *chunk)
{
    while (chunk->shard < optimizer->shard_count) {
        const dtrain_shard *shard = &optimizer->shards[chunk->shard];
        const int64_t first = chunk->next, left = shard->count - first;
        if (left == 0) {
            chunk->tensor += shard->count > 0;
            chunk->shard++;
            chunk->next = 0;
            continue;
        }
        chunk->part = optimizer->tensors[chunk->tensor];
        chunk->part.count = dtrain__min(left, DTRAIN__PIECE);
        chunk->part.value += first;
        chunk->part.m = dtrain__after(chunk->part.m, first);
        chunk->part.v = dtrain__after(chunk->part.v, first);
        chunk->grad = shard->grad + first;
        chunk->value = shard->value + first;
        chunk->next += chunk->part.count;
        return true;
    }
    return false;
}

/* Its gradient to stage i, or nothing where it is in host memory; then the event. */
static dtrain_result dtrain__piece_down(const dtrain_optimizer *optimizer,
                                        dtrain__update_piece *chunk, size_t i)
{
    dtrain_device *device = optimizer->device;
    const dtrain__offload *offload = &optimizer->strategy->offload;
    chunk->part.grad = chunk->grad;
    if (!dtrain__on_host(device, chunk->grad)) {
        float *stage = optimizer->host + (i & 1) * (size_t)optimizer->stage;
        chunk->part.grad = stage;
        DTRAIN__TRY(device->ops->copy_async(device, stage, chunk->grad,
                                            (size_t)chunk->part.count * sizeof(float),
                                            DTRAIN_COPY_DEVICE_TO_HOST, offload->down));
    }
    return device->ops->event_record(device, offload->arrived[i & 1], offload->down);
}

static dtrain_result dtrain__piece_up(const dtrain_optimizer *optimizer,
                                      const dtrain__update_piece *chunk)
{
    dtrain_device *device = optimizer->device;
    if (chunk->value == chunk->part.value) return DTRAIN_OK; /* gather brings it */
    return device->ops->copy_async(device, chunk->value, chunk->part.value,
                                   (size_t)chunk->part.count * sizeof(float),
                                   DTRAIN_COPY_HOST_TO_DEVICE, optimizer->strategy->offload.up);
}

/* Every event is behind what compute had queued: when the first has happened, nobody reads old
 * values any more, neither from the device nor from the master copies. A stage is filled again when
 * the chunk that it held is done. */
static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer,
                                            const dtrain_step_scalars *now)
{
    dtrain_strategy *strategy = optimizer->strategy;
    const dtrain__offload *offload = &strategy->offload;
    dtrain__update_piece chunks[2]; /* one being updated, one on its way */
    memset(chunks, 0, sizeof chunks);
    DTRAIN__TRY(dtrain__stream_follow(strategy, offload->down, NULL));
    bool any = dtrain__piece_next(optimizer, &chunks[0]);
    if (any) DTRAIN__TRY(dtrain__piece_down(optimizer, &chunks[0], 0));
    for (size_t i = 0; any; i++) {
        dtrain__update_piece *chunk = &chunks[i & 1], *ahead = &chunks[1 - (i & 1)];
        *ahead = *chunk;
        any = dtrain__piece_next(optimizer, ahead);
        if (any) DTRAIN__TRY(dtrain__piece_down(optimizer, ahead, i + 1));
        DTRAIN__TRY(dtrain__event_await(strategy, offload->arrived[i & 1]));
        DTRAIN__TRY(dtrain__optimizer_update(optimizer, offload->cpu, &chunk->part, 1, now, NULL));
        DTRAIN__TRY(dtrain__piece_up(optimizer, chunk));
    }
    return dtrain__stream_follow(strategy, NULL, offload->up);
}

/* A rate or scale that is not finite would destroy every parameter in one pass: it is refused
 * before the first is touched. Empty shards have no state and take no step. */
DTRAIN_API dtrain_result dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr,
                                               float grad_scale)
{
    if (!optimizer)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_step: optimizer is NULL");
    if (!dtrain_is_finite(lr) || lr < 0 || !dtrain_is_finite(grad_scale))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_step: expected a finite lr >= 0 and a finite grad_scale, found "
            "%g and %g; the parameters are as they were",
            (double)lr, (double)grad_scale);
    const dtrain_step_scalars now = dtrain__optimizer_scalars(optimizer, lr, grad_scale);
    if (optimizer->strategy->offload.cpu)
        DTRAIN__TRY(
            dtrain__strategy_keep(optimizer->strategy, dtrain__update_on_host(optimizer, &now)));
    else DTRAIN__TRY(dtrain__optimizer_run(optimizer, &now, NULL));
    optimizer->step_count++;
    return dtrain_strategy_publish(optimizer->strategy);
}

/* ---- Learning rates ---------------------------------------------------------------------------*/

/* In double, rounded once: the same number whatever machine or world size asks. */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, int64_t step)
{
    if (!schedule) return 0;
    const double lr = (double)schedule->lr, low = (double)schedule->min_lr;
    const int64_t warmup = schedule->warmup_steps, total = schedule->total_steps;
    if (step < 0) step = 0;
    if (step < warmup) return (float)(lr * ((double)step + 1) / (double)warmup);
    if (schedule->kind != DTRAIN_SCHEDULE_LINEAR && schedule->kind != DTRAIN_SCHEDULE_COSINE)
        return schedule->lr;
    if (step >= total) return schedule->min_lr;
    const double done = (double)(step - warmup) / (double)(total - warmup);
    if (schedule->kind == DTRAIN_SCHEDULE_LINEAR) return (float)(lr + (low - lr) * done);
    return (float)(low + (lr - low) * 0.5 * (1 + cos(3.14159265358979323846 * done)));
}

DTRAIN_API float dtrain_scale_lr(float lr, int ranks, dtrain_lr_scaling rule)
{
    if (ranks < 1) ranks = 1;
    if (rule == DTRAIN_LR_SCALE_LINEAR) return lr * (float)ranks;
    if (rule == DTRAIN_LR_SCALE_SQRT) return (float)((double)lr * sqrt((double)ranks));
    return lr;
}

/* ================================================================================================
 * [S36] Data, samplers
 *
 * Three layers: which index comes when (sampler), what a file holds (dataset), which tokens make a
 * sample (loader).
 *
 * The shuffle is Mersenne Twister (Matsumoto and Nishimura, 1998) plus the swap loop of
 * torch.randperm, its modulo bias included: the order is PyTorch's, number by number.
 *
 * Files are read with pread into a small buffer, never mapped: a file that is truncated under us is
 * then a short read, which is a sentence, and not a SIGBUS, which is a dead rank.
 *
 * The loader cuts the stream into windows that share one border token (target of one, input of the
 * next). When shuffling, the grid moves by a new shift every epoch, so that a token is not always
 * seen behind the same context:
 *
 *     tokens   |. . .|o o o o|o o o o|o o o o|. .|        sequence = 4, shift = 3, three windows
 *               shift  0       1       2    +1 target
 *
 *     sample k of the run = window order[k % windows] of epoch k / windows
 *     rank r of R, batch B, position P:  samples P + i R + r for i < B, then P += B R
 *
 * A sample depends on k alone, so the world size only changes who reads it, and P is all there is
 * to save. Windows per epoch: (tokens - 1) / sequence in order; shuffled, one fewer at least, so
 * that every shift in [0, sequence) leaves them room (but never fewer than one).
 * ==============================================================================================*/

/* The generator yields 32-bit numbers; from here on torch takes another algorithm. */
#define DTRAIN__RANDPERM_LIMIT (INT64_C(0xffffffff) / 20)

#define DTRAIN__MT_COUNT 624

typedef struct dtrain__mt19937 {
    uint32_t state[DTRAIN__MT_COUNT];
    uint32_t next; /* first number not handed out */
} dtrain__mt19937;

static void dtrain__mt_seed(dtrain__mt19937 *mt, uint32_t seed)
{
    mt->state[0] = seed;
    for (uint32_t i = 1; i < DTRAIN__MT_COUNT; i++) {
        uint32_t before = mt->state[i - 1];
        mt->state[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    mt->next = DTRAIN__MT_COUNT;
}

/* Word i becomes a mix of words i, i + 1 and i + 397, all modulo 624 and in place: the words that
 * wrap around are the ones renewed in this same pass, as the definition has it. */
static void dtrain__mt_renew(dtrain__mt19937 *mt)
{
    uint32_t *s = mt->state;
    for (uint32_t i = 0; i < DTRAIN__MT_COUNT; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % DTRAIN__MT_COUNT] & 0x7fffffffu);
        s[i] = s[(i + 397) % DTRAIN__MT_COUNT] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
    }
    mt->next = 0;
}

static uint32_t dtrain__mt_draw(dtrain__mt19937 *mt)
{
    if (mt->next == DTRAIN__MT_COUNT) dtrain__mt_renew(mt);
    uint32_t y = mt->state[mt->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

DTRAIN_API dtrain_result dtrain_randperm(uint64_t seed, int64_t n, int64_t *out)
{
    dtrain__mt19937 mt;
    if (n < 0 || n >= DTRAIN__RANDPERM_LIMIT || (n > 0 && !out))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_randperm: n is %lld, expected 0 to %lld and a buffer for them",
                           (long long)n, (long long)DTRAIN__RANDPERM_LIMIT - 1);
    for (int64_t i = 0; i < n; i++) out[i] = i;
    dtrain__mt_seed(&mt, (uint32_t)seed);
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t j = i + (int64_t)(dtrain__mt_draw(&mt) % (uint32_t)(n - i));
        int64_t swapped = out[i];
        out[i] = out[j];
        out[j] = swapped;
    }
    return DTRAIN_OK;
}

/* ---- sampler ---- */

static dtrain_result dtrain__sampler_check(const dtrain_sampler_desc *desc, const char *call)
{
    if (!desc) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: desc is NULL", call);
    uint32_t ranks = desc->rank_count ? desc->rank_count : 1;
    if (desc->rank >= ranks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: rank is %u, expected 0 to %u", call,
                           (unsigned)desc->rank, (unsigned)(ranks - 1));
    if (desc->item_count < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: item_count is %lld, expected 0 or more",
                           call, (long long)desc->item_count);
    return DTRAIN_OK;
}

/* ceil(items / ranks), or the whole division when the rest is dropped. Division first: items +
 * ranks - 1 could overflow. */
DTRAIN_API int64_t dtrain_sampler_count(const dtrain_sampler_desc *desc)
{
    if (dtrain__sampler_check(desc, "dtrain_sampler_count") != DTRAIN_OK) return 0;
    int64_t ranks = desc->rank_count ? desc->rank_count : 1;
    bool padded = desc->item_count % ranks != 0 && !desc->drop_last;
    return desc->item_count / ranks + (padded ? 1 : 0);
}

DTRAIN_API dtrain_result dtrain_sampler_indices(const dtrain_sampler_desc *desc, uint64_t epoch,
                                                int64_t *scratch, int64_t *indices)
{
    DTRAIN__TRY(dtrain__sampler_check(desc, "dtrain_sampler_indices"));
    int64_t count = dtrain_sampler_count(desc);
    if (count == 0) return DTRAIN_OK;
    if (!indices || (desc->shuffle && !scratch))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "dtrain_sampler_indices: %s is NULL, expected %lld numbers",
            indices ? "scratch" : "indices", (long long)(indices ? desc->item_count : count));
    if (desc->shuffle) DTRAIN__TRY(dtrain_randperm(desc->seed + epoch, desc->item_count, scratch));

    /* Padding repeats the order from its start, as often as it takes: position p is p mod n.
     * Unsigned, because the padded end may lie past INT64_MAX. */
    uint64_t ranks = desc->rank_count ? desc->rank_count : 1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t place = ((uint64_t)i * ranks + desc->rank) % (uint64_t)desc->item_count;
        indices[i] = desc->shuffle ? scratch[place] : (int64_t)place;
    }
    return DTRAIN_OK;
}

/* ---- dataset ---- */

#define DTRAIN__FORMAT_BYTES 1u
#define DTRAIN__FORMAT_BIN 2u
#define DTRAIN__BIN_HEADER 1024 /* 256 int32, little endian: magic, version, token count, 0 ... */
#define DTRAIN__BIN_MAGIC_U16 20240520u
#define DTRAIN__BIN_MAGIC_U32 20240801u

struct dtrain_dataset {
    dtrain_allocator allocator;
    char *path; /* a copy: errors name it long after open */
    size_t path_bytes;
    int file;
    uint32_t token_bytes; /* 1, 2, 4 */
    int64_t file_bytes, header_bytes, token_count, vocab_count;
};

/* Little-endian number of `width` bytes, whatever the host's order. */
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width)
{
    uint32_t value = 0;
    for (uint32_t i = 0; i < width; i++) value |= (uint32_t)bytes[i] << (8 * i);
    return value;
}

/* All `bytes` at `offset`, or an error. A read may be short or interrupted at any time; only 0 is
 * the end of the file, and there the file must have shrunk, because offsets were checked. */
static dtrain_result dtrain__dataset_pread(const dtrain_dataset *dataset, int64_t offset,
                                           unsigned char *buffer, size_t bytes)
{
    while (bytes > 0) {
        ssize_t got = pread(dataset->file, buffer, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be read at byte %lld: %s",
                               dataset->path, (long long)offset, strerror(errno));
        if (got == 0)
            return dtrain_fail(DTRAIN_ERROR_FILE,
                               "%s ended at byte %lld, but had %lld bytes when it was opened: was "
                               "it truncated or written again during the run?",
                               dataset->path, (long long)offset, (long long)dataset->file_bytes);
        buffer += got;
        bytes -= (size_t)got;
        offset += got;
    }
    return DTRAIN_OK;
}

static const char *dtrain__file_kind(mode_t mode)
{
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Opens the file and learns its size. Without O_NONBLOCK a pipe would wait for its writer here. */
static dtrain_result dtrain__dataset_file(dtrain_dataset *dataset)
{
    struct stat info;
    dataset->file = open(dataset->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (dataset->file < 0 || fstat(dataset->file, &info) != 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                           dataset->path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: %s is %s, expected a regular file", dataset->path,
                           dtrain__file_kind(info.st_mode));
    if (info.st_size == 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is empty, expected at least one token",
                           dataset->path);
    dataset->file_bytes = (int64_t)info.st_size;
    return DTRAIN_OK;
}

static dtrain_result dtrain__dataset_wrong_magic(const dtrain_dataset *dataset,
                                                 const unsigned char *head)
{
    char text[5] = "....";
    for (int i = 0; i < 4; i++)
        if (head[i] >= ' ' && head[i] < 127) text[i] = (char)head[i];
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s is no llm.c token file: expected magic %u or %u, "
                       "found %u (\"%s\"); use format 1 for plain bytes, and note that nanoGPT's "
                       ".bin files lack the header",
                       dataset->path, DTRAIN__BIN_MAGIC_U16, DTRAIN__BIN_MAGIC_U32,
                       (unsigned)dtrain__le(head, 4), text);
}

/* Checks a .bin header against the file. The count must fit exactly, as llm.c demands: a longer
 * file is as suspect as a shorter one (two files glued together, a count that overflowed). */
static dtrain_result dtrain__dataset_bin(dtrain_dataset *dataset, const unsigned char *head)
{
    bool narrow = dtrain__le(head, 4) == DTRAIN__BIN_MAGIC_U16;
    uint32_t expected = narrow ? 1 : 7, version = dtrain__le(head + 4, 4);
    int64_t count = (int32_t)dtrain__le(head + 8, 4);
    int64_t token_bytes = narrow ? 2 : 4;
    if (version != expected)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has header version %u, expected %u",
                           dataset->path, (unsigned)version, (unsigned)expected);
    if (count <= 0 || DTRAIN__BIN_HEADER + count * token_bytes != dataset->file_bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s announces %lld tokens, which makes %lld "
                           "bytes, but has %lld: is it cut off?",
                           dataset->path, (long long)count,
                           (long long)(DTRAIN__BIN_HEADER + count * token_bytes),
                           (long long)dataset->file_bytes);
    dataset->token_bytes = (uint32_t)token_bytes;
    dataset->header_bytes = DTRAIN__BIN_HEADER;
    dataset->token_count = count;
    return DTRAIN_OK;
}

/* Decides what the file is. Format 0 goes by the magic, which no text begins with. */
static dtrain_result dtrain__dataset_format(dtrain_dataset *dataset, uint32_t format)
{
    unsigned char head[DTRAIN__BIN_HEADER] = {0};
    size_t have = (size_t)dtrain__min(dataset->file_bytes, DTRAIN__BIN_HEADER);
    DTRAIN__TRY(dtrain__dataset_pread(dataset, 0, head, have));
    uint32_t magic = dtrain__le(head, 4);
    bool is_bin = magic == DTRAIN__BIN_MAGIC_U16 || magic == DTRAIN__BIN_MAGIC_U32;
    if (format == DTRAIN__FORMAT_BYTES || (format == 0 && !is_bin)) {
        dataset->token_bytes = 1;
        dataset->token_count = dataset->file_bytes;
        return DTRAIN_OK;
    }
    if (!is_bin && have >= 4) return dtrain__dataset_wrong_magic(dataset, head);
    if (have < DTRAIN__BIN_HEADER)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has %zu bytes, expected a llm.c header of %d",
                           dataset->path, have, DTRAIN__BIN_HEADER);
    return dtrain__dataset_bin(dataset, head);
}

static dtrain_result dtrain__dataset_check(const dtrain_dataset_desc *desc)
{
    const int64_t most = INT64_C(1) << 31; /* ids are handed out as int32 */
    if (!desc || !desc->path || !desc->path[0])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_dataset_open: no path is given");
    if (desc->format > DTRAIN__FORMAT_BIN)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: format is %u, expected 0 (by magic), 1 (bytes) "
                           "or 2 (.bin)",
                           (unsigned)desc->format);
    if (desc->vocab_count < 0 || desc->vocab_count > most)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: vocab_count is %lld, expected 0 to %lld",
                           (long long)desc->vocab_count, (long long)most);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_dataset_open: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__dataset_check(desc));
    dtrain_allocator allocator =
        dtrain__resolve_allocator(world ? dtrain_world_allocator(world) : NULL);
    dtrain_dataset *dataset =
        (dtrain_dataset *)dtrain__alloc(&allocator, 1, sizeof *dataset, "a dataset");
    if (!dataset) return DTRAIN_ERROR_MEMORY;
    dataset->allocator = allocator;
    dataset->file = -1;
    dataset->path_bytes = strlen(desc->path) + 1;
    dataset->path = (char *)dtrain__alloc(&allocator, dataset->path_bytes, 1, "a dataset's path");

    dtrain_result result = dataset->path ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) memcpy(dataset->path, desc->path, dataset->path_bytes);
    if (result == DTRAIN_OK) result = dtrain__dataset_file(dataset);
    if (result == DTRAIN_OK) result = dtrain__dataset_format(dataset, desc->format);
    if (result != DTRAIN_OK) {
        dtrain_dataset_close(dataset);
        return result;
    }
    dataset->vocab_count = desc->vocab_count          ? desc->vocab_count
                           : dataset->token_bytes > 1 ? 50257
                                                      : 256;
    *out = dataset;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset)
{
    if (!dataset) return;
    dtrain_allocator allocator = dataset->allocator;
    if (dataset->file >= 0) close(dataset->file);
    dtrain__free(&allocator, dataset->path, dataset->path_bytes, 1);
    dtrain__free(&allocator, dataset, 1, sizeof *dataset);
}

DTRAIN_API int64_t dtrain_dataset_token_count(const dtrain_dataset *dataset)
{
    return dataset ? dataset->token_count : 0;
}

DTRAIN_API int64_t dtrain_dataset_vocab_count(const dtrain_dataset *dataset)
{
    return dataset ? dataset->vocab_count : 0;
}

/* `count` tokens, 2048 at most, so that the widest fit the buffer. Every id is checked here, on
 * use, because checking a file of 100 GB at open would take minutes. */
static dtrain_result dtrain__dataset_read_some(const dtrain_dataset *dataset, int64_t first,
                                               int64_t count, int32_t *tokens)
{
    unsigned char raw[8192];
    uint32_t width = dataset->token_bytes;
    DTRAIN__TRY(dtrain__dataset_pread(dataset, dataset->header_bytes + first * width, raw,
                                      (size_t)count * width));
    for (int64_t i = 0; i < count; i++) {
        uint32_t id = dtrain__le(raw + i * width, width);
        if ((int64_t)id >= dataset->vocab_count)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "%s: token %lld has id %u, but the vocabulary has %lld: was the "
                               "file made by another tokenizer?",
                               dataset->path, (long long)(first + i), (unsigned)id,
                               (long long)dataset->vocab_count);
        tokens[i] = (int32_t)id;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_dataset_read(dtrain_dataset *dataset, int64_t first, int64_t count,
                                             int32_t *tokens)
{
    if (!dataset || count < 0 || (count > 0 && !tokens))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: dataset or tokens is NULL, or count is negative");
    if (first < 0 || first > dataset->token_count - count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)count, (long long)first, dataset->path,
                           (long long)dataset->token_count);
    for (int64_t done = 0; done < count;) {
        int64_t some = dtrain__min(count - done, 2048);
        DTRAIN__TRY(dtrain__dataset_read_some(dataset, first + done, some, tokens + done));
        done += some;
    }
    return DTRAIN_OK;
}

/* ---- loader ---- */

#define DTRAIN__STREAM_LOADER UINT64_C(0x6c6f61646572) /* Philox stream of the shifts */

struct dtrain_loader {
    dtrain_allocator allocator;
    dtrain_loader_desc desc; /* token_count resolved */
    uint64_t rank, ranks;
    uint64_t position;    /* samples handed out by all ranks */
    int64_t window_count; /* per epoch */
    int64_t shift_count;  /* shifts to choose from */
    int32_t *window;      /* (sequence + 1) */

    /* The epoch that `order` and `shift` belong to; both stay 0 when in_order. */
    bool entered;
    uint64_t epoch;
    int64_t shift;
    int64_t *order; /* (window_count) */
};

/* Checks the desc and resolves token_count. Written with subtractions only: nothing overflows. */
static dtrain_result dtrain__loader_check(dtrain_loader_desc *desc)
{
    if (!desc->dataset || desc->batch == 0 || desc->sequence <= 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: expected a dataset and batch and sequence of at "
                           "least 1, found %s, %u and %lld",
                           desc->dataset ? "one" : "none", (unsigned)desc->batch,
                           (long long)desc->sequence);
    int64_t have = desc->dataset->token_count;
    if (desc->first_token < 0 || desc->first_token > have || desc->token_count < 0 ||
        desc->token_count > have - desc->first_token)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)desc->token_count, (long long)desc->first_token,
                           desc->dataset->path, (long long)have);
    if (desc->token_count == 0) desc->token_count = have - desc->first_token;
    if (desc->token_count <= desc->sequence)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_loader_create: %s has %lld tokens here, but a window of "
                           "%lld + 1 needs %llu: use a shorter sequence or a larger file",
                           desc->dataset->path, (long long)desc->token_count,
                           (long long)desc->sequence, (unsigned long long)desc->sequence + 1);
    return DTRAIN_OK;
}

/* How the span is cut; the rule in the banner. */
static dtrain_result dtrain__loader_plan(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    int64_t fit = (desc->token_count - 1) / desc->sequence;
    loader->window_count =
        desc->in_order ? fit : dtrain__max(1, desc->token_count / desc->sequence - 1);
    loader->shift_count =
        dtrain__min(desc->sequence, desc->token_count - loader->window_count * desc->sequence);
    if (!desc->in_order && loader->window_count >= DTRAIN__RANDPERM_LIMIT)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_loader_create: %lld windows of %lld tokens cannot be shuffled, "
                           "expected fewer than %lld: use a longer sequence or a part of the file",
                           (long long)loader->window_count, (long long)desc->sequence,
                           (long long)DTRAIN__RANDPERM_LIMIT);
    return DTRAIN_OK;
}

static dtrain_result dtrain__loader_alloc(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    loader->window = (int32_t *)dtrain__alloc(&loader->allocator, (size_t)desc->sequence + 1,
                                              sizeof *loader->window, "a loader's window");
    if (!loader->window) return DTRAIN_ERROR_MEMORY;
    if (desc->in_order) return DTRAIN_OK;
    loader->order = (int64_t *)dtrain__alloc(&loader->allocator, (size_t)loader->window_count,
                                             sizeof *loader->order, "a loader's order");
    /* The permutation is made anew every epoch, in the same memory. */
    return loader->order ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out)
{
    if (!out || !desc)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loader_create: desc or out is NULL");
    *out = NULL;
    dtrain_loader_desc resolved = *desc;
    DTRAIN__TRY(dtrain__loader_check(&resolved));
    dtrain_allocator allocator =
        dtrain__resolve_allocator(world ? dtrain_world_allocator(world) : NULL);
    dtrain_loader *loader =
        (dtrain_loader *)dtrain__alloc(&allocator, 1, sizeof *loader, "a loader");
    if (!loader) return DTRAIN_ERROR_MEMORY;
    loader->allocator = allocator;
    loader->desc = resolved;
    loader->rank = world ? (uint64_t)dtrain_world_rank(world) : 0;
    loader->ranks = world ? (uint64_t)dtrain_world_size(world) : 1;
    dtrain_result result = dtrain__loader_plan(loader);
    if (result == DTRAIN_OK) result = dtrain__loader_alloc(loader);
    if (result != DTRAIN_OK) {
        dtrain_loader_destroy(loader);
        return result;
    }
    *out = loader;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader)
{
    if (!loader) return;
    dtrain_allocator allocator = loader->allocator;
    dtrain__free(&allocator, loader->window, (size_t)loader->desc.sequence + 1,
                 sizeof *loader->window);
    dtrain__free(&allocator, loader->order, (size_t)loader->window_count, sizeof *loader->order);
    dtrain__free(&allocator, loader, 1, sizeof *loader);
}

/* Makes order and shift those of `epoch`: O(windows), once per epoch. Samples of a batch come with
 * growing k, so a batch across a border enters each epoch once. */
static dtrain_result dtrain__loader_enter(dtrain_loader *loader, uint64_t epoch)
{
    uint32_t random[4];
    if (loader->desc.in_order || (loader->entered && loader->epoch == epoch)) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_randperm(loader->desc.seed + epoch, loader->window_count, loader->order));
    dtrain_philox(loader->desc.seed, DTRAIN__STREAM_LOADER, epoch, random);
    uint64_t wide = (uint64_t)random[1] << 32 | random[0];
    loader->shift = (int64_t)(wide % (uint64_t)loader->shift_count);
    loader->epoch = epoch;
    loader->entered = true;
    return DTRAIN_OK;
}

/* Fills `window` with sample k of the run. Inputs and targets are both cut from it, so a window is
 * read once although its tokens are used twice. */
static dtrain_result dtrain__loader_sample(dtrain_loader *loader, uint64_t sample)
{
    uint64_t windows = (uint64_t)loader->window_count;
    DTRAIN__TRY(dtrain__loader_enter(loader, sample / windows));
    uint64_t place = sample % windows;
    int64_t index = loader->desc.in_order ? (int64_t)place : loader->order[place];
    int64_t first = loader->desc.first_token + loader->shift + index * loader->desc.sequence;
    return dtrain_dataset_read(loader->desc.dataset, first, loader->desc.sequence + 1,
                               loader->window);
}

DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, int32_t *inputs,
                                            int32_t *targets)
{
    if (!loader || !inputs || !targets)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_next: loader, inputs or targets is NULL");
    size_t row = (size_t)loader->desc.sequence;
    for (uint32_t i = 0; i < loader->desc.batch; i++) {
        uint64_t sample = loader->position + i * loader->ranks + loader->rank;
        DTRAIN__TRY(dtrain__loader_sample(loader, sample));
        memcpy(inputs + i * row, loader->window, row * sizeof *inputs);
        memcpy(targets + i * row, loader->window + 1, row * sizeof *targets);
    }
    /* Only now: a call that failed can be repeated. */
    loader->position += loader->desc.batch * loader->ranks;
    return DTRAIN_OK;
}

DTRAIN_API int64_t dtrain_loader_sample_count(const dtrain_loader *loader)
{
    return loader ? loader->window_count : 0;
}

DTRAIN_API uint64_t dtrain_loader_position(const dtrain_loader *loader)
{
    return loader ? loader->position : 0;
}

DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position)
{
    if (loader) loader->position = position;
}

/* ================================================================================================
 * [S37] Trainer
 *
 *     micro-batches: next_batch, loss, backward, finish | norm | optimizer | all-gather of 4 words
 *     |<----------------------- step time ------------------------------->|
 *
 * The all-gather carries every rank's loss and times. It comes last so that the times are whole,
 * and because all ranks then judge the same numbers: a loss that is not finite is the same error
 * on all of them. The parameters are safe without waiting for it: the norm of the averaged
 * gradient is the same everywhere, a NaN of any rank is in it, and then no rank updates or
 * publishes. With loss scaling that is a skipped step, unless a loss was not finite either.
 *
 * Whose time is it? A rank computes, or it is inside the communicator. A fast rank waits there for
 * a slow one, so a straggler shows in the others' exposed time, and in its own compute time
 * (step - exposed): that is what ranks are compared by. What ranks wait for each other in the
 * record's own all-gather is in no figure.
 * ==============================================================================================*/

/* What a rank tells the others each step. */
enum {
    DTRAIN__WORD_LOSS,
    DTRAIN__WORD_STEP,
    DTRAIN__WORD_COMM,
    DTRAIN__WORD_EXPOSED,
    DTRAIN__WORD_COUNT
};
#define DTRAIN__WORDS_BYTES (DTRAIN__WORD_COUNT * sizeof(float))

#define DTRAIN__SLOW_SCORE 2.0 /* a straggler's compute time against the median's ... */
#define DTRAIN__SLOW_STEPS 10  /* ... for so many steps running */

#define DTRAIN__STREAM_DROPOUT (UINT64_C(0x64726f70) << 32) /* + rank: Philox stream of seeds */

struct dtrain_trainer {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_trainer_desc desc; /* resolved */
    dtrain_tape *tape;
    dtrain_scaler scaler; /* in use when scaling */
    bool scaling;
    dtrain_comm *comm; /* the strategy's */
    int rank, ranks;   /* in it */
    int64_t step;
    float *words;    /* (ranks, WORD_COUNT), host memory: gathered in place */
    double *compute; /* (ranks) seconds, for the median */
    int slow_rank;   /* slowest of the last step, and for how many steps it has been a straggler */
    int slow_steps;
    bool *named;                 /* (ranks) warned about already */
    struct dtrain__queue *queue; /* NULL: the host waits in the middle of a step */
};

/* A bit pattern instead of NAN: it survives -ffast-math. */
static double dtrain__nan(void)
{
    const uint64_t bits = UINT64_C(0x7ff8000000000000);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- a step without the host: what it needs ---------------------------------------------------
 *
 * A whole step is queued on the device before the host looks at any of its results. That is what
 * a graph can record:
 *
 *     pinned            device                                                      pinned
 *     inputs, scalars -> passes -> collectives -> norm -> clip, skip -> optimizer -> losses, norm
 *
 * Every number that changes from step to step is in `scalars`; every input comes through a feed. */

typedef struct dtrain__queue {
    dtrain_device *device;
    dtrain__feed *feeds;          /* (accumulation): one a micro-batch */
    dtrain_step_scalars *scalars; /* device memory; norm (1) lies behind it */
    dtrain_step_scalars *now;     /* page-locked: what scalars will be */
    float *results;               /* page-locked (accumulation + 1): losses, norm */
    dtrain_graph *graph;          /* NULL: not recorded yet */
    int64_t steps;                /* queued or replayed */
} dtrain__queue;

static float *dtrain__queue_norm(const dtrain__queue *queue)
{
    return (float *)(void *)(queue->scalars + 1);
}

static size_t dtrain__results_bytes(const dtrain_trainer *trainer)
{
    return ((size_t)trainer->desc.accumulation + 1) * sizeof(float);
}

static void dtrain__queue_destroy(dtrain_trainer *trainer)
{
    dtrain__queue *queue = trainer->queue;
    if (!queue) return;
    const dtrain_device_ops *ops = queue->device->ops;
    ops->synchronize(queue->device);
    if (queue->graph) ops->graph_destroy(queue->device, queue->graph);
    for (uint32_t m = 0; queue->feeds && m < trainer->desc.accumulation; m++)
        for (size_t i = 0; i < queue->feeds[m].count; i++)
            ops->host_free(queue->device, queue->feeds[m].items[i].pinned,
                           queue->feeds[m].items[i].bytes);
    if (queue->scalars) ops->free(queue->device, queue->scalars, 2 * sizeof *queue->scalars);
    if (queue->now) ops->host_free(queue->device, queue->now, sizeof *queue->now);
    if (queue->results)
        ops->host_free(queue->device, queue->results, dtrain__results_bytes(trainer));
    dtrain__free(&trainer->allocator, queue->feeds, trainer->desc.accumulation,
                 sizeof *queue->feeds);
    dtrain__free(&trainer->allocator, queue, 1, sizeof *queue);
    trainer->queue = NULL;
}

static dtrain_result dtrain__queue_check(const dtrain_trainer *trainer)
{
    const char *missing = NULL;
    dtrain_comm_info comm;
    dtrain_comm_query(trainer->comm, &comm);
    if (trainer->scaling)
        missing = "no loss scaling: whether to step is decided on the host; use DTRAIN_TAPE_BF16, "
                  "which needs no scale, or graph = false";
    else if (dtrain_world_device(trainer->world)->ops->host_memory)
        missing = "a device that can record (the CPU's cannot)";
    else if (!trainer->desc.next_batch) missing = "next_batch";
    else if (!trainer->desc.optimizer) missing = "an optimizer";
    else if (trainer->desc.strategy->desc.offload)
        missing = "everything on the device: an offloaded update runs on the host";
    else if (trainer->desc.strategy->shard_comm) missing = "a strategy of whole parameters";
    else if (trainer->desc.strategy->desc.missing_gradient == DTRAIN_MISSING_ERROR)
        missing = "DTRAIN_MISSING_ZERO: the other setting asks all ranks in every step";
    else if (trainer->ranks > 1 && strcmp(comm.backend, "nccl") != 0)
        missing = "collectives on the device (dtrain_nccl.h): those here go through the host";
    if (!missing) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "dtrain_trainer_create: graph needs %s", missing);
}

static dtrain_result dtrain__queue_create(dtrain_trainer *trainer)
{
    void *memory;
    DTRAIN__TRY(dtrain__queue_check(trainer));
    dtrain__queue *queue = trainer->queue =
        (dtrain__queue *)dtrain__alloc(&trainer->allocator, 1, sizeof *queue, "a queued step");
    if (!queue) return DTRAIN_ERROR_MEMORY;
    dtrain_device *device = queue->device = dtrain_world_device(trainer->world);
    queue->feeds =
        (dtrain__feed *)dtrain__alloc(&trainer->allocator, trainer->desc.accumulation,
                                      sizeof *queue->feeds, "the inputs of a queued step");
    if (!queue->feeds) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(device->ops->alloc(device, 2 * sizeof *queue->scalars, &memory));
    queue->scalars = (dtrain_step_scalars *)memory;
    DTRAIN__TRY(device->ops->host_alloc(device, sizeof *queue->now, &memory));
    queue->now = (dtrain_step_scalars *)memory;
    DTRAIN__TRY(device->ops->host_alloc(device, dtrain__results_bytes(trainer), &memory));
    queue->results = (float *)memory;
    return DTRAIN_OK;
}

/* ---- creation ---- */

static dtrain_result dtrain__trainer_alloc(dtrain_trainer *trainer)
{
    size_t ranks = (size_t)trainer->ranks;
    DTRAIN__TRY(dtrain_tape_create(trainer->world, trainer->desc.strategy, NULL, &trainer->tape));
    DTRAIN__TRY(dtrain_tape_checkpoint(trainer->tape, trainer->desc.checkpoint_every,
                                       trainer->desc.checkpoint_ops));
    trainer->words = (float *)dtrain__alloc(&trainer->allocator, ranks, DTRAIN__WORDS_BYTES,
                                            "a trainer's words");
    trainer->compute = (double *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->compute,
                                               "a trainer's times");
    trainer->named =
        (bool *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->named, "a trainer");
    return trainer->words && trainer->compute && trainer->named ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static dtrain_result dtrain__check_trainer(const dtrain_trainer_desc *desc)
{
    const uint32_t flags = desc->tape_flags;
    if (!desc->strategy || !desc->loss)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_trainer_create: desc has no %s",
                           desc->strategy ? "loss" : "strategy");
    if (flags == 0 || flags == DTRAIN_TAPE_BF16 || flags == DTRAIN_TAPE_F16) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_trainer_create: tape_flags is %#x, expected 0, DTRAIN_TAPE_BF16 or "
                       "DTRAIN_TAPE_F16",
                       flags);
}

static dtrain_result dtrain__trainer_scaling(dtrain_trainer *trainer)
{
    dtrain_scaler_desc *desc = &trainer->desc.loss_scaling;
    const bool given = desc->initial_scale != 0 || desc->growth_factor != 0 ||
                       desc->backoff_factor != 0 || desc->growth_interval || desc->hysteresis ||
                       desc->minimum_scale != 0;
    trainer->scaling = given || (trainer->desc.tape_flags & DTRAIN_TAPE_F16);
    if (!trainer->scaling) return DTRAIN_OK;
    if (!given) *desc = dtrain_scaler_defaults();
    return dtrain_scaler_init(&trainer->scaler, desc);
}

DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out)
{
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_create: world, desc or out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__check_trainer(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(dtrain_world_allocator(world));
    dtrain_trainer *trainer =
        (dtrain_trainer *)dtrain__alloc(&allocator, 1, sizeof *trainer, "a trainer");
    if (!trainer) return DTRAIN_ERROR_MEMORY;
    trainer->allocator = allocator;
    trainer->world = world;
    trainer->desc = *desc;
    if (trainer->desc.accumulation == 0) trainer->desc.accumulation = 1;
    trainer->comm = dtrain_strategy_comm(desc->strategy);
    trainer->rank = dtrain_comm_rank(trainer->comm);
    trainer->ranks = dtrain_comm_size(trainer->comm);
    trainer->slow_rank = -1;
    dtrain_result result = dtrain__trainer_alloc(trainer);
    if (result == DTRAIN_OK) result = dtrain__trainer_scaling(trainer);
    if (result == DTRAIN_OK && desc->graph) result = dtrain__queue_create(trainer);
    if (result != DTRAIN_OK) {
        dtrain_trainer_destroy(trainer);
        return result;
    }
    *out = trainer;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer)
{
    if (!trainer) return;
    dtrain_allocator allocator = trainer->allocator;
    size_t ranks = (size_t)trainer->ranks;
    dtrain__queue_destroy(trainer);
    dtrain_tape_destroy(trainer->tape);
    dtrain__free(&allocator, trainer->words, ranks, DTRAIN__WORDS_BYTES);
    dtrain__free(&allocator, trainer->compute, ranks, sizeof *trainer->compute);
    dtrain__free(&allocator, trainer->named, ranks, sizeof *trainer->named);
    dtrain__free(&allocator, trainer, 1, sizeof *trainer);
}

DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer)
{
    return trainer ? trainer->tape : NULL;
}

/* ---- what ranks tell each other ---- */

/* This rank's words go into its slot; afterwards every rank has the same `words`. Gathered in
 * place, and nothing is allocated per step. */
static dtrain_result dtrain__trainer_exchange(dtrain_trainer *trainer, const float *own)
{
    float *slot = trainer->words + trainer->rank * DTRAIN__WORD_COUNT;
    memcpy(slot, own, DTRAIN__WORDS_BYTES);
    return dtrain_all_gather(trainer->comm, slot, trainer->words, DTRAIN__WORD_COUNT, DTRAIN_F32,
                             NULL);
}

static float dtrain__trainer_word(const dtrain_trainer *trainer, int rank, int word)
{
    return trainer->words[rank * DTRAIN__WORD_COUNT + word];
}

/* Over ranks, in rank order: the same bits everywhere. */
static double dtrain__trainer_mean(const dtrain_trainer *trainer, int word)
{
    double sum = 0;
    for (int r = 0; r < trainer->ranks; r++) sum += (double)dtrain__trainer_word(trainer, r, word);
    return sum / trainer->ranks;
}

/* ---- one step ---- */

/* Random numbers of dropout must differ between steps, micro-batches and ranks, and a run that is
 * repeated must repeat them. A pass uses the sum of both: the first changes from step to step, the
 * second is the same in all. */
static uint64_t dtrain__step_seed(const dtrain_trainer *trainer)
{
    uint32_t random[4];
    uint64_t stream = DTRAIN__STREAM_DROPOUT + (uint64_t)trainer->rank;
    dtrain_philox(trainer->desc.seed, stream, (uint64_t)trainer->step, random);
    return (uint64_t)random[1] << 32 | random[0];
}
static uint64_t dtrain__micro_seed(uint32_t micro)
{
    return UINT64_C(0x9e3779b97f4a7c15) * micro; /* an odd factor: no two are equal */
}

/* What the loss's gradient starts as. A power of two as scale changes no bit of the update. */
static float dtrain__backward_scale(const dtrain_trainer *trainer)
{
    const float scale = trainer->scaling ? trainer->scaler.scale : 1;
    return scale / (float)trainer->desc.accumulation;
}

/* One micro-batch. The loss is read after backward and finish: a device with a queue works through
 * all of it before the host waits. A tape error (a NULL tensor) comes out of backward. */
static dtrain_result dtrain__trainer_micro(dtrain_trainer *trainer, uint32_t micro,
                                           double *loss_sum)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    float loss = 0;
    DTRAIN__TRY(dtrain_strategy_accumulate(desc->strategy, micro + 1 < desc->accumulation));
    if (desc->next_batch) DTRAIN__TRY(desc->next_batch(desc->user));
    DTRAIN__TRY(dtrain_tape_begin(trainer->tape, desc->tape_flags,
                                  dtrain__step_seed(trainer) + dtrain__micro_seed(micro)));
    dtrain_tensor *tensor = desc->loss(trainer->tape, desc->user);
    DTRAIN__TRY(dtrain_tape_backward(trainer->tape, tensor, dtrain__backward_scale(trainer)));
    DTRAIN__TRY(dtrain_strategy_finish(desc->strategy));
    DTRAIN__TRY(dtrain_tensor_read(trainer->tape, tensor, &loss));
    *loss_sum += (double)loss;
    return DTRAIN_OK;
}

/* Micro-batches, norm, update. Fills loss, grad_norm and lr. */
static dtrain_result dtrain__trainer_update(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    float norm = 0, scale = 1, lr = dtrain_schedule_lr(&desc->schedule, trainer->step);
    double loss_sum = 0;
    bool found_inf;
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        DTRAIN__TRY(dtrain__trainer_micro(trainer, micro, &loss_sum));
    if (trainer->scaling)
        DTRAIN__TRY(dtrain_scaler_unscale(&trainer->scaler, desc->strategy, desc->clip, &norm,
                                          &scale, &found_inf));
    else DTRAIN__TRY(dtrain_clip_grad_norm(desc->strategy, desc->clip, &norm, &scale));
    if (dtrain_is_finite(norm)) DTRAIN__TRY(dtrain_optimizer_step(desc->optimizer, lr, scale));
    record->loss = loss_sum / desc->accumulation;
    record->grad_norm = (double)norm;
    record->lr = (double)lr;
    return DTRAIN_OK;
}

/* ---- a step without the host: how it runs ---- */

static dtrain_result dtrain__queue_micro(dtrain_trainer *trainer, uint32_t micro)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain__feed *feed = &queue->feeds[micro];
    DTRAIN__TRY(dtrain_strategy_accumulate(desc->strategy, micro + 1 < desc->accumulation));
    if (!feed->filled) DTRAIN__TRY(desc->next_batch(desc->user));
    feed->next = 0;
    trainer->tape->feed = feed;
    trainer->tape->scalars = queue->scalars;
    dtrain_result result =
        dtrain_tape_begin(trainer->tape, desc->tape_flags, dtrain__micro_seed(micro));
    dtrain_tensor *loss = NULL;
    if (result == DTRAIN_OK) {
        loss = desc->loss(trainer->tape, desc->user);
        result = dtrain_tape_backward(trainer->tape, loss, dtrain__backward_scale(trainer));
    }
    if (result == DTRAIN_OK) result = dtrain_strategy_finish(desc->strategy);
    trainer->tape->feed = NULL;
    trainer->tape->scalars = NULL;
    feed->filled = false;
    DTRAIN__TRY(result);
    return queue->device->ops->copy_async(queue->device, queue->results + micro, loss->data,
                                          sizeof(float), DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

/* The same calls in the same order whether the device runs or records them. */
static dtrain_result dtrain__queue_all(dtrain_trainer *trainer)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = queue->device;
    dtrain_clip_args clip = {desc->strategy->sum_squares, desc->clip, queue->scalars,
                             dtrain__queue_norm(queue)};
    DTRAIN__TRY(device->ops->copy_async(device, queue->scalars, queue->now, sizeof *queue->now,
                                        DTRAIN_COPY_HOST_TO_DEVICE, NULL));
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        DTRAIN__TRY(dtrain__queue_micro(trainer, micro));
    DTRAIN__TRY(dtrain__sum_squares(desc->strategy));
    DTRAIN__TRY(device->ops->clip(device, &clip));
    DTRAIN__TRY(dtrain__optimizer_run(desc->optimizer, queue->now, queue->scalars));
    return device->ops->copy_async(device, queue->results + desc->accumulation, clip.norm,
                                   sizeof(float), DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

/* From the second step on the inputs are known and can be fetched before anything is queued. False
 * in *same: targets are ignored in another number of places, and the recorded loss would divide by
 * the wrong count. */
static dtrain_result dtrain__queue_fill(dtrain_trainer *trainer, bool *same)
{
    *same = true;
    for (uint32_t micro = 0; micro < trainer->desc.accumulation; micro++) {
        dtrain__feed *feed = &trainer->queue->feeds[micro];
        DTRAIN__TRY(trainer->desc.next_batch(trainer->desc.user));
        for (size_t i = 0; i < feed->count; i++) {
            const dtrain__feed_item *item = &feed->items[i];
            memcpy(item->pinned, item->host, item->bytes);
            if (item->dtype == DTRAIN_I32 &&
                item->valid_count != dtrain__count_valid(item->host, (int64_t)item->bytes / 4))
                *same = false;
        }
        feed->filled = true;
    }
    return DTRAIN_OK;
}

/* Two steps run as they are queued: memory is allocated, kernels are chosen. The third is
 * recorded, and then it is run like those after it. */
static dtrain_result dtrain__queue_run(dtrain_trainer *trainer)
{
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = queue->device;
    bool same = true;
    if (queue->steps > 0) DTRAIN__TRY(dtrain__queue_fill(trainer, &same));
    if (queue->graph && !same) {
        device->ops->graph_destroy(device, queue->graph);
        queue->graph = NULL;
    }
    if (queue->steps < 2) return dtrain__queue_all(trainer);
    if (!queue->graph) {
        DTRAIN__TRY(device->ops->graph_begin(device));
        const dtrain_result result = dtrain__queue_all(trainer);
        const dtrain_result ended = device->ops->graph_end(device, &queue->graph);
        DTRAIN__TRY(result);
        DTRAIN__TRY(ended);
    }
    return device->ops->graph_launch(device, queue->graph);
}

static dtrain_result dtrain__queue_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    const float lr = dtrain_schedule_lr(&desc->schedule, trainer->step);
    double loss_sum = 0;
    *queue->now = dtrain__optimizer_scalars(desc->optimizer, lr, 1);
    queue->now->seed = dtrain__step_seed(trainer);
    DTRAIN__TRY(dtrain__queue_run(trainer));
    DTRAIN__TRY(queue->device->ops->synchronize(queue->device));
    queue->steps++;
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        loss_sum += (double)queue->results[micro];
    record->loss = loss_sum / desc->accumulation;
    record->grad_norm = (double)queue->results[desc->accumulation];
    record->lr = (double)lr;
    if (dtrain_is_finite(queue->results[desc->accumulation])) desc->optimizer->step_count++;
    return DTRAIN_OK;
}

/* After the exchange: the same verdict on every rank. */
static dtrain_result dtrain__trainer_judge(const dtrain_trainer *trainer, float norm)
{
    const char *advice = "lower the learning rate, clip gradients or look at the data";
    for (int r = 0; r < trainer->ranks; r++) {
        float loss = dtrain__trainer_word(trainer, r, DTRAIN__WORD_LOSS);
        if (!dtrain_is_finite(loss))
            return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                               "dtrain_trainer_step: at step %lld the loss of rank %d is %g: %s",
                               (long long)trainer->step, dtrain_comm_world_rank(trainer->comm, r),
                               (double)loss, advice);
    }
    if (!dtrain_is_finite(norm) && !trainer->scaling)
        return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                           "dtrain_trainer_step: at step %lld the gradient's norm is %g although "
                           "every loss is finite: %s",
                           (long long)trainer->step, (double)norm, advice);
    return DTRAIN_OK;
}

/* After the verdict, and from the same numbers on every rank: all scales move alike. */
static dtrain_result dtrain__trainer_rescale(dtrain_trainer *trainer, dtrain_step_record *record)
{
    dtrain_scaler *scaler = &trainer->scaler;
    if (!trainer->scaling) return DTRAIN_OK;
    record->loss_scale = (double)scaler->scale;
    DTRAIN__TRY(dtrain_scaler_update(scaler, !dtrain_is_finite((float)record->grad_norm)));
    record->skipped_steps = scaler->skipped_steps;
    return DTRAIN_OK;
}

static double dtrain__trainer_compute(const dtrain_trainer *trainer, int rank)
{
    return (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_STEP) -
           (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_EXPOSED);
}

/* Finds the slowest rank and its score, and counts for how long it has been a straggler. Of an even
 * number of ranks the lower median counts: the mean of the middle two would keep one slow rank of
 * two below a score of 2 for ever. */
static void dtrain__straggler_count(dtrain_trainer *trainer, dtrain_step_record *record)
{
    int slowest = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        double seconds = dtrain__trainer_compute(trainer, r);
        if (seconds > dtrain__trainer_compute(trainer, slowest)) slowest = r;
        int at = r; /* insertion sort: few ranks, and no allocation */
        for (; at > 0 && trainer->compute[at - 1] > seconds; at--)
            trainer->compute[at] = trainer->compute[at - 1];
        trainer->compute[at] = seconds;
    }
    double median = trainer->compute[(trainer->ranks - 1) / 2];
    double most = trainer->compute[trainer->ranks - 1];
    record->straggler_score = median > 0 ? most / median : 1;
    if (record->straggler_score <= DTRAIN__SLOW_SCORE) trainer->slow_steps = 0;
    else trainer->slow_steps = slowest == trainer->slow_rank ? trainer->slow_steps + 1 : 1;
    trainer->slow_rank = slowest;
}

/* Names a lasting straggler, once. Every rank comes to the same end here, rank 0 says it. */
static void dtrain__straggler_warn(dtrain_trainer *trainer, const dtrain_step_record *record)
{
    if (trainer->slow_steps < DTRAIN__SLOW_STEPS || trainer->named[trainer->slow_rank]) return;
    trainer->named[trainer->slow_rank] = true;
    if (trainer->rank == 0)
        dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                   "rank %d is a straggler: it has computed more than twice as long as the median "
                   "rank for %d steps running (%.1f times in step %lld), and all ranks wait for it",
                   record->slowest_rank, DTRAIN__SLOW_STEPS, record->straggler_score,
                   (long long)record->step);
}

/* The rest of the record, from the words of all ranks. */
static void dtrain__trainer_record(dtrain_trainer *trainer, dtrain_step_record *record)
{
    double seconds = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        double own = (double)dtrain__trainer_word(trainer, r, DTRAIN__WORD_STEP);
        if (own > seconds) seconds = own;
    }
    uint64_t tokens =
        (uint64_t)trainer->desc.tokens * trainer->desc.accumulation * (uint64_t)trainer->ranks;
    record->step = trainer->step;
    record->loss = dtrain__trainer_mean(trainer, DTRAIN__WORD_LOSS);
    record->val_loss = dtrain__nan();
    record->tokens = tokens * (uint64_t)(trainer->step + 1);
    record->tokens_per_second = seconds > 0 ? (double)tokens / seconds : 0;
    record->step_ms = 1e3 * seconds;
    record->comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_COMM);
    record->exposed_comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_EXPOSED);
    dtrain__straggler_count(trainer, record);
    record->slowest_rank = dtrain_comm_world_rank(trainer->comm, trainer->slow_rank);
}

DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    if (!trainer || !trainer->desc.optimizer)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_trainer_step: there is no %s",
                           trainer ? "optimizer: this trainer can only evaluate" : "trainer");
    dtrain_step_record full;
    dtrain_comm_info before, after;
    float own[DTRAIN__WORD_COUNT];
    memset(&full, 0, sizeof full);
    dtrain__strategy_comm_info(trainer->desc.strategy, &before);
    double start = dtrain_seconds();
    if (trainer->queue) DTRAIN__TRY(dtrain__queue_step(trainer, &full));
    else DTRAIN__TRY(dtrain__trainer_update(trainer, &full));
    own[DTRAIN__WORD_STEP] = (float)(dtrain_seconds() - start);
    dtrain__strategy_comm_info(trainer->desc.strategy, &after);

    /* Time inside can exceed time in flight by the cost of the calls: exposed stays a part. */
    double exposed = after.inside_seconds - before.inside_seconds;
    double flight = after.flight_seconds - before.flight_seconds;
    own[DTRAIN__WORD_LOSS] = (float)full.loss;
    own[DTRAIN__WORD_EXPOSED] = (float)exposed;
    own[DTRAIN__WORD_COMM] = (float)(flight > exposed ? flight : exposed);
    DTRAIN__TRY(dtrain__trainer_exchange(trainer, own));
    DTRAIN__TRY(dtrain__trainer_judge(trainer, (float)full.grad_norm));
    DTRAIN__TRY(dtrain__trainer_rescale(trainer, &full));

    full.comm_bytes = after.wire_bytes - before.wire_bytes;
    dtrain__trainer_record(trainer, &full);
    dtrain__straggler_warn(trainer, &full);
    trainer->step++;
    if (record) *record = full;
    return DTRAIN_OK;
}

/* ---- evaluation ---- */

DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss)
{
    if (!trainer || !loss || batches <= 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_evaluate: trainer or loss is NULL, or batches (%lld) "
                           "is less than 1",
                           (long long)batches);
    double sum = 0;
    for (int64_t i = 0; i < batches; i++) {
        float one = 0;
        if (next_batch) DTRAIN__TRY(next_batch(user));
        DTRAIN__TRY(
            dtrain_tape_begin(trainer->tape, trainer->desc.tape_flags | DTRAIN_TAPE_NO_GRAD, 0));
        dtrain_tensor *tensor = trainer->desc.loss(trainer->tape, user);
        DTRAIN__TRY(dtrain_tape_error(trainer->tape));
        DTRAIN__TRY(dtrain_tensor_read(trainer->tape, tensor, &one));
        sum += (double)one;
    }
    float own[DTRAIN__WORD_COUNT] = {0};
    own[DTRAIN__WORD_LOSS] = (float)(sum / (double)batches);
    DTRAIN__TRY(dtrain__trainer_exchange(trainer, own));
    *loss = dtrain__trainer_mean(trainer, DTRAIN__WORD_LOSS);
    return DTRAIN_OK;
}

/* ---- memory ---- */

/* Runs the loss forwards and backwards where kernels do nothing: the tape counts all the same. It
 * gets no strategy, because `ready` would start communication: a plan is one rank's own affair. On
 * the plan device the tape leaves the parameters' bookkeeping alone as well. */
static dtrain_result dtrain__plan_tape(dtrain_world *world, const dtrain_trainer_desc *desc,
                                       dtrain_device *device, dtrain_tape_info *info)
{
    dtrain_tape *tape;
    DTRAIN__TRY(dtrain_tape_create(world, NULL, device, &tape));
    dtrain_result result =
        dtrain_tape_checkpoint(tape, desc->checkpoint_every, desc->checkpoint_ops);
    if (result == DTRAIN_OK) result = dtrain_tape_begin(tape, desc->tape_flags, 0);
    if (result == DTRAIN_OK) result = dtrain_tape_backward(tape, desc->loss(tape, desc->user), 1);
    dtrain_tape_query(tape, info);
    dtrain_tape_destroy(tape);
    return result;
}

DTRAIN_API dtrain_result dtrain_plan_activations(dtrain_world *world,
                                                 const dtrain_trainer_desc *desc,
                                                 dtrain_memory *memory)
{
    dtrain_device_desc plan;
    dtrain_device *device;
    dtrain_tape_info tape;
    if (!world || !desc || !desc->loss || !memory)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_plan_activations: world, desc, its loss or memory is NULL");
    memset(&plan, 0, sizeof plan);
    memset(memory, 0, sizeof *memory);
    plan.allocator = *dtrain_world_allocator(world);
    DTRAIN__TRY(dtrain_device_create(dtrain_plan_device_ops(), &plan, &device));
    const dtrain_result result = dtrain__plan_tape(world, desc, device, &tape);
    dtrain_device_destroy(device);
    DTRAIN__TRY(result);
    memory->activations = tape.activation_bytes;
    memory->activation_grads = tape.gradient_bytes;
    memory->total = memory->activations + memory->activation_grads;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_trainer_plan_memory(dtrain_trainer *trainer, dtrain_memory *memory)
{
    dtrain_strategy_info strategy;
    if (!trainer || !memory)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_plan_memory: trainer or memory is NULL");
    if (!trainer->desc.next_batch)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_plan_memory: the loss fetches its own batches and "
                           "cannot be run without spending one: give the trainer a next_batch");
    DTRAIN__TRY(dtrain_plan_activations(trainer->world, &trainer->desc, memory));
    dtrain_strategy_query(trainer->desc.strategy, &strategy);
    memory->params = strategy.value_bytes;
    memory->grads = strategy.grad_bytes;
    memory->buffers = strategy.buffer_bytes;
    memory->host = strategy.host_bytes;
    if (trainer->desc.optimizer && strategy.desc.offload)
        memory->host += trainer->desc.optimizer->host_bytes;
    else if (trainer->desc.optimizer)
        memory->optimizer = dtrain_optimizer_state_bytes(trainer->desc.optimizer);
    if (trainer->tape->device->ops->host_memory) memory->workspace = trainer->world->base_bytes;
    memory->total +=
        memory->params + memory->grads + memory->optimizer + memory->buffers + memory->workspace;
    return DTRAIN_OK;
}

/* ---- automatic batch ----
 *
 * 1. Each rank searches the largest batch its own memory has room for: doubling, then halving the
 *    interval. A plan is bookkeeping only, some twenty of them take milliseconds.
 * 2. The least of all ranks is tried: allocated, touched and held by all of them until all have
 *    said how it went. Ranks of one host share its memory, so one after the other proves nothing.
 * 3. Where a rank has failed, all go on with less. */

typedef struct dtrain__batch_plan {
    dtrain_world *world;
    const dtrain_auto_batch_desc *desc;
    dtrain_strategy_desc strategy;
    dtrain_comm *comm;
    uint64_t fixed; /* bytes of strategy and optimizer */
    int64_t limit;  /* of those and activations */
} dtrain__batch_plan;

/* Bytes of activations. */
static dtrain_result dtrain__batch_needs(const dtrain__batch_plan *plan, uint32_t batch,
                                         uint64_t *bytes)
{
    dtrain_memory memory;
    const dtrain_trainer_desc *trainer = plan->desc->trainer;
    DTRAIN__TRY(plan->desc->set_batch(trainer->user, batch));
    DTRAIN__TRY(dtrain_plan_activations(plan->world, trainer, &memory));
    *bytes = memory.total;
    return DTRAIN_OK;
}

/* What cannot even be planned, for want of addresses or of the host's buffers, does not fit. */
static dtrain_result dtrain__batch_fits(const dtrain__batch_plan *plan, uint32_t batch, bool *fits)
{
    uint64_t bytes = 0;
    const dtrain_result result = dtrain__batch_needs(plan, batch, &bytes);
    *fits = result == DTRAIN_OK && bytes <= INT64_MAX - plan->fixed &&
            (int64_t)(plan->fixed + bytes) <= plan->limit;
    return result == DTRAIN_ERROR_MEMORY ? DTRAIN_OK : result;
}

/* 0: not even one sample. */
static dtrain_result dtrain__batch_search(const dtrain__batch_plan *plan, uint32_t *batch)
{
    uint32_t fits = 0, fails = (plan->desc->max_batch ? plan->desc->max_batch : 65536) + 1;
    while (fails - fits > 1) {
        uint32_t next = fits + (fails - fits) / 2;
        bool good;
        if (fits == 0) next = 1;
        else if (next / 2 >= fits) next = 2 * fits;
        DTRAIN__TRY(dtrain__batch_fits(plan, next, &good));
        if (good) fits = next;
        else fails = next;
    }
    *batch = fits;
    return DTRAIN_OK;
}

static dtrain_result dtrain__batch_none(const dtrain__batch_plan *plan)
{
    uint64_t one;
    DTRAIN__TRY(dtrain__batch_needs(plan, 1, &one));
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "dtrain_auto_batch: not even one sample fits: %.1f MiB a rank for "
                       "parameters, gradients, optimizer and buffers and %.1f MiB of activations, "
                       "of %.1f MiB: %.1f MiB are missing. A strategy that shards more, more "
                       "ranks, activation checkpointing or, on a GPU, offload would help",
                       dtrain__mib(plan->fixed), dtrain__mib(one),
                       dtrain__mib(plan->limit > 0 ? (uint64_t)plan->limit : 0),
                       dtrain__mib((uint64_t)((int64_t)(plan->fixed + one) - plan->limit)));
}

/* Allocates and touches what a step needs; what is there of it stays until the caller frees it. */
static dtrain_result dtrain__batch_hold(const dtrain__batch_plan *plan, uint32_t batch,
                                        uint64_t bytes[2], void *held[2])
{
    dtrain_device *device = plan->world->device;
    held[0] = held[1] = NULL;
    bytes[0] = plan->fixed;
    DTRAIN__TRY(dtrain__batch_needs(plan, batch, &bytes[1]));
    for (int i = 0; i < 2; i++) {
        if (bytes[i] > SIZE_MAX / 2)
            return dtrain_fail(DTRAIN_ERROR_MEMORY,
                               "dtrain_auto_batch: %llu bytes are more than "
                               "can be addressed",
                               (unsigned long long)bytes[i]);
        DTRAIN__TRY(device->ops->alloc(device, (size_t)bytes[i], &held[i]));
        DTRAIN__TRY(device->ops->zero(device, held[i], (size_t)bytes[i]));
    }
    return device->ops->synchronize(device);
}

/* Collective: whether every rank could. */
static dtrain_result dtrain__batch_trial(const dtrain__batch_plan *plan, uint32_t batch, bool *good)
{
    dtrain_device *device = plan->world->device;
    uint64_t bytes[2];
    void *held[2];
    const dtrain_result mine = dtrain__batch_hold(plan, batch, bytes, held);
    int32_t well = mine == DTRAIN_OK;
    const dtrain_result told =
        dtrain_all_reduce(plan->comm, &well, &well, 1, DTRAIN_I32, DTRAIN_MIN, NULL);
    for (int i = 0; i < 2; i++)
        if (held[i]) device->ops->free(device, held[i], (size_t)bytes[i]);
    *good = well != 0;
    DTRAIN__TRY(told);
    return dtrain__agree(plan->comm, mine == DTRAIN_ERROR_MEMORY ? DTRAIN_OK : mine);
}

static dtrain_result dtrain__batch_check(dtrain_world *world, const dtrain_auto_batch_desc *desc,
                                         const uint32_t *batch)
{
    const char *missing = !world                        ? "world is NULL"
                          : !desc                       ? "desc is NULL"
                          : !batch                      ? "batch is NULL"
                          : !desc->set_batch            ? "desc has no set_batch"
                          : !desc->trainer              ? "desc has no trainer"
                          : !desc->trainer->loss        ? "desc's trainer has no loss"
                          : !desc->params               ? "desc has no params"
                          : desc->max_batch > INT32_MAX ? "max_batch is above 2^31 - 1"
                                                        : NULL;
    if (!missing) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_auto_batch: %s", missing);
}

DTRAIN_API dtrain_result dtrain_auto_batch(dtrain_world *world, const dtrain_auto_batch_desc *desc,
                                           uint32_t *batch)
{
    dtrain__batch_plan plan;
    uint32_t found = 0;
    bool good = false;
    DTRAIN__TRY(dtrain__batch_check(world, desc, batch));
    memset(&plan, 0, sizeof plan);
    plan.world = world;
    plan.desc = desc;
    plan.strategy = desc->strategy ? *desc->strategy : dtrain_strategy_defaults();
    plan.comm = plan.strategy.comm ? plan.strategy.comm : dtrain_world_comm(world);
    dtrain_result mine =
        dtrain__strategy_needs(world, desc->params, desc->param_count, &plan.strategy,
                               dtrain_comm_size(plan.comm), &plan.fixed);
    DTRAIN__TRY(dtrain__agree(plan.comm, mine));
    DTRAIN__TRY(dtrain__auto_limit(world, &plan.strategy, plan.comm, &plan.limit));
    mine = dtrain__batch_search(&plan, &found);
    if (mine == DTRAIN_OK && found == 0) mine = dtrain__batch_none(&plan);
    DTRAIN__TRY(dtrain__agree(plan.comm, mine));
    int32_t least = (int32_t)found;
    DTRAIN__TRY(dtrain_all_reduce(plan.comm, &least, &least, 1, DTRAIN_I32, DTRAIN_MIN, NULL));
    for (; least > 0; least -= (least + 7) / 8) {
        DTRAIN__TRY(dtrain__batch_trial(&plan, (uint32_t)least, &good));
        if (good) break;
    }
    if (!good)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "dtrain_auto_batch: %.1f MiB a rank should be there, but not every rank "
                           "could allocate what one sample needs: set memory_limit to less, or end "
                           "what else uses the device",
                           dtrain__mib((uint64_t)plan.limit));
    *batch = (uint32_t)least;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_accumulation_for(uint64_t global_batch, uint32_t batch, int ranks,
                                                 uint32_t *micro_batch, uint32_t *accumulation)
{
    const char *const call = "dtrain_accumulation_for";
    if (!global_batch || !batch || ranks < 1 || !micro_batch || !accumulation)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: global_batch (%llu), batch (%u) or ranks (%d) is below 1, or a "
                           "result's address is NULL",
                           call, (unsigned long long)global_batch, batch, ranks);
    const uint64_t own = global_batch / (uint64_t)ranks, below = own * (uint64_t)ranks;
    if (below != global_batch)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: a global batch of %llu cannot be shared by %d ranks; the nearest "
                           "that can is %llu",
                           call, (unsigned long long)global_batch, ranks,
                           (unsigned long long)(!below || global_batch - below > (uint64_t)ranks / 2
                                                    ? below + (uint64_t)ranks
                                                    : below));
    uint64_t micro = own < batch ? own : batch;
    while (own % micro) micro--;
    if (own / micro > UINT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %llu micro-batches of %llu samples are more than an accumulation "
                           "can be",
                           call, (unsigned long long)(own / micro), (unsigned long long)micro);
    *micro_batch = (uint32_t)micro;
    *accumulation = (uint32_t)(own / micro);
    return DTRAIN_OK;
}

/* ================================================================================================
 * [S39] Metrics
 *
 * One record a step goes three ways: to a person (one live line on a terminal, a table elsewhere),
 * to a program (JSON lines), and into the summary. People are shown steps done, 1 to total; the
 * file has the record's step, from 0.
 *
 * Nothing here may stop a training: only opening the file can fail. A line that cannot be written
 * is counted, the first one is a warning, and dtrain_metrics_destroy tells how many were lost.
 *
 * Medians are over the last 1024 steps: fixed memory, however long the run. A step costs one line
 * built on the stack, one write(2) for the file and at most ten redraws a second.
 * ==============================================================================================*/

#include <sys/ioctl.h> /* TIOCGWINSZ: the width of the terminal */

#define DTRAIN__RECENT 1024 /* steps that medians look back on */

enum {
    DTRAIN__RECENT_RATE,
    DTRAIN__RECENT_STEP,
    DTRAIN__RECENT_COMM,
    DTRAIN__RECENT_EXPOSED,
    DTRAIN__RECENT_KINDS
};

struct dtrain_metrics {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_metrics_desc desc; /* resolved; what this rank does not write is NULL */
    char *path;               /* a copy of jsonl_path */
    size_t path_bytes;
    int file;  /* -1: none */
    bool torn; /* the last write ended inside a line */
    uint64_t lost_lines, lines;
    bool terminal;
    double started;   /* when the first step began */
    double redraw_at; /* the live line rests until then */
    dtrain_step_record last;
    dtrain_summary summary; /* running; medians are made on request */
    double recent[DTRAIN__RECENT_KINDS][DTRAIN__RECENT];
};

/* Looks at the exponent bits, as dtrain_is_finite does. */
static bool dtrain__is_finite_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* ---- lines ---- */

/* Text of one line. What does not fit is cut, which no line here comes near. */
typedef struct dtrain__line {
    size_t used;
    char text[1024];
} dtrain__line;

DTRAIN__PRINTF(2, 3)
static void dtrain__line_add(dtrain__line *line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t room = sizeof line->text - line->used;
    int length = vsnprintf(line->text + line->used, room, format, args);
    va_end(args);
    if (length > 0) line->used += (size_t)dtrain__min(length, (int64_t)room - 1);
}

/* `, "key": value`, null when not finite. The host may have chosen a locale with a decimal comma;
 * JSON has only the point. */
static void dtrain__line_number(dtrain__line *line, const char *key, double value)
{
    dtrain__line_add(line, ", \"%s\": ", key);
    size_t first = line->used;
    if (dtrain__is_finite_double(value)) dtrain__line_add(line, "%.9g", value);
    else dtrain__line_add(line, "null");
    for (size_t i = first; i < line->used; i++)
        if (line->text[i] == ',') line->text[i] = '.';
}

static void dtrain__line_integer(dtrain__line *line, const char *key, uint64_t value)
{
    dtrain__line_add(line, ", \"%s\": %llu", key, (unsigned long long)value);
}

/* "950", "41.2k", "1.30M" */
static void dtrain__line_rate(dtrain__line *line, double value)
{
    if (value < 1e3) dtrain__line_add(line, "%.0f", value);
    else if (value < 1e6) dtrain__line_add(line, "%.1fk", value * 1e-3);
    else if (value < 1e9) dtrain__line_add(line, "%.2fM", value * 1e-6);
    else dtrain__line_add(line, "%.2fG", value * 1e-9);
}

/* "0:12", "1:02:03", "-" when unknown */
static void dtrain__line_duration(dtrain__line *line, double seconds)
{
    if (!(seconds >= 0) || seconds > 1e9) {
        dtrain__line_add(line, "-");
        return;
    }
    long long whole = (long long)(seconds + 0.5);
    if (whole >= 3600)
        dtrain__line_add(line, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
    else dtrain__line_add(line, "%lld:%02lld", whole / 60, whole % 60);
}

/* ---- the file ---- */

/* Writes the line and its '\n'. text[0] is a spare '\n': after a write that stopped inside a line
 * (a full disk) it is sent too, so that the torn piece spoils no line but itself. */
static void dtrain__metrics_write(dtrain_metrics *metrics, dtrain__line *line)
{
    dtrain__line_add(line, "}\n");
    const char *next = metrics->torn ? line->text : line->text + 1;
    size_t left = (size_t)(line->text + line->used - next);
    metrics->lines++;
    while (left > 0) {
        ssize_t wrote = write(metrics->file, next, left);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) break;
        next += wrote;
        left -= (size_t)wrote;
        metrics->torn = left > 0;
    }
    if (left > 0 && metrics->lost_lines++ == 0)
        dtrain_log(metrics->world, DTRAIN_LOG_WARNING,
                   "the log file %s cannot be written: %s; training goes on without its lines",
                   metrics->path, strerror(errno));
}

static void dtrain__metrics_json(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    dtrain__line line;
    line.used = 0;
    dtrain__line_add(&line, "\n{\"step\": %lld", (long long)record->step);
    dtrain__line_number(&line, "loss", record->loss);
    if (dtrain__is_finite_double(record->val_loss))
        dtrain__line_number(&line, "val_loss", record->val_loss);
    dtrain__line_number(&line, "grad_norm", record->grad_norm);
    dtrain__line_number(&line, "lr", record->lr);
    dtrain__line_integer(&line, "tokens", record->tokens);
    dtrain__line_number(&line, "tokens_per_second", record->tokens_per_second);
    dtrain__line_number(&line, "step_ms", record->step_ms);
    dtrain__line_number(&line, "comm_ms", record->comm_ms);
    dtrain__line_number(&line, "exposed_comm_ms", record->exposed_comm_ms);
    dtrain__line_integer(&line, "comm_bytes", record->comm_bytes);
    if (record->loss_scale > 0) {
        dtrain__line_number(&line, "loss_scale", record->loss_scale);
        dtrain__line_integer(&line, "skipped_steps", record->skipped_steps);
    }
    dtrain__metrics_write(metrics, &line);
}

/* The last line: what a benchmark script reads with `tail -1`. */
static void dtrain__metrics_json_final(dtrain_metrics *metrics)
{
    dtrain__line line;
    dtrain_summary s;
    line.used = 0;
    dtrain_metrics_summary(metrics, &s);
    if (s.steps)
        dtrain__line_add(&line, "\n{\"final\": true, \"step\": %lld",
                         (long long)metrics->last.step);
    else dtrain__line_add(&line, "\n{\"final\": true, \"step\": null");
    dtrain__line_number(&line, "loss", s.last_loss);
    if (dtrain__is_finite_double(s.val_loss)) dtrain__line_number(&line, "val_loss", s.val_loss);
    dtrain__line_integer(&line, "steps", (uint64_t)s.steps);
    dtrain__line_integer(&line, "tokens", s.tokens);
    dtrain__line_number(&line, "first_loss", s.first_loss);
    dtrain__line_number(&line, "last_loss", s.last_loss);
    dtrain__line_number(&line, "seconds", s.seconds);
    dtrain__line_number(&line, "tokens_per_second", s.tokens_per_second);
    dtrain__line_number(&line, "step_ms", s.step_ms);
    dtrain__line_number(&line, "comm_ms", s.comm_ms);
    dtrain__line_number(&line, "exposed_comm_ms", s.exposed_comm_ms);
    dtrain__line_number(&line, "scaling", s.scaling);
    dtrain__line_integer(&line, "comm_bytes", s.comm_bytes);
    dtrain__metrics_write(metrics, &line);
}

/* ---- progress ---- */

/* Seconds until total_steps at the pace so far; negative when unknown. */
static double dtrain__metrics_left(const dtrain_metrics *metrics)
{
    int64_t left = metrics->desc.total_steps - (metrics->last.step + 1);
    if (metrics->desc.total_steps <= 0 || left < 0) return -1;
    return metrics->summary.seconds / (double)metrics->summary.steps * (double)left;
}

static void dtrain__line_bar(dtrain__line *line, int64_t done, int64_t total)
{
    char bar[] = "[          ]";
    const int64_t width = (int64_t)sizeof bar - 3;
    double share = (double)done / (double)total;
    int64_t filled = share >= 1 ? width : (int64_t)(share * (double)width);
    for (int64_t i = 0; i < filled; i++) bar[1 + i] = '=';
    if (filled < width) bar[1 + filled] = '>';
    dtrain__line_add(line, "/%lld %s", (long long)total, bar);
}

/* The most wanted comes first: narrow terminals cut the end off. */
static void dtrain__progress_text(const dtrain_metrics *metrics, dtrain__line *line)
{
    const dtrain_step_record *r = &metrics->last;
    line->used = 0;
    dtrain__line_add(line, "step %lld", (long long)r->step + 1);
    if (metrics->desc.total_steps > 0)
        dtrain__line_bar(line, r->step + 1, metrics->desc.total_steps);
    dtrain__line_add(line, " loss %.4f  |g| %.3g  lr %.1e  ", r->loss, r->grad_norm, r->lr);
    dtrain__line_rate(line, r->tokens_per_second);
    dtrain__line_add(line, " tok/s  %.1f ms", r->step_ms);
    double left = dtrain__metrics_left(metrics);
    if (left >= 0) {
        dtrain__line_add(line, "  eta ");
        dtrain__line_duration(line, left);
    }
    if (dtrain_world_size(metrics->world) > 1)
        dtrain__line_add(line, "  comm %.1f ms (%.1f exposed)", r->comm_ms, r->exposed_comm_ms);
}

/* Redraws the live line. A line wider than the terminal would wrap, and '\r' comes back over one
 * row only: it is cut. */
static void dtrain__progress_draw(dtrain_metrics *metrics)
{
    dtrain__line line;
    struct winsize size;
    dtrain__progress_text(metrics, &line);
    int64_t columns = 0;
    if (ioctl(fileno(metrics->desc.progress), TIOCGWINSZ, &size) == 0) columns = size.ws_col;
    if (columns > 1) line.used = (size_t)dtrain__min((int64_t)line.used, columns - 1);
    fprintf(metrics->desc.progress, "\r%.*s\033[K", (int)line.used, line.text);
    fflush(metrics->desc.progress);
}

static void dtrain__progress_live(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    double now = dtrain_seconds();
    bool evaluated = dtrain__is_finite_double(r->val_loss);
    if (evaluated) /* stays on the screen, the live line goes on below */
        fprintf(metrics->desc.progress, "\r\033[Kstep %lld  loss %.4f  val_loss %.4f\n",
                (long long)r->step + 1, r->loss, r->val_loss);
    if (!evaluated && now < metrics->redraw_at) return;
    metrics->redraw_at = now + 0.1;
    dtrain__progress_draw(metrics);
}

/* One row of the table; every column is one word, so that awk and sort can read it as well. */
static void dtrain__progress_row(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    dtrain__line rate, left, val;
    rate.used = left.used = val.used = 0;
    dtrain__line_rate(&rate, r->tokens_per_second);
    dtrain__line_duration(&left, dtrain__metrics_left(metrics));
    if (dtrain__is_finite_double(r->val_loss)) dtrain__line_add(&val, "%.4f", r->val_loss);
    else dtrain__line_add(&val, "-");
    if (metrics->summary.steps == 1)
        fprintf(metrics->desc.progress, "%8s %9s %9s %9s %9s %8s %9s %8s %8s %8s\n", "step", "loss",
                "val_loss", "grad_norm", "lr", "tok/s", "step_ms", "comm_ms", "exposed", "eta");
    fprintf(metrics->desc.progress, "%8lld %9.4f %9s %9.3g %9.2e %8s %9.2f %8.2f %8.2f %8s\n",
            (long long)r->step + 1, r->loss, val.text, r->grad_norm, r->lr, rate.text, r->step_ms,
            r->comm_ms, r->exposed_comm_ms, left.text);
    fflush(metrics->desc.progress);
}

static void dtrain__progress_table(dtrain_metrics *metrics)
{
    int64_t done = metrics->last.step + 1;
    if (metrics->summary.steps == 1 || done % metrics->desc.progress_every == 0 ||
        done == metrics->desc.total_steps || dtrain__is_finite_double(metrics->last.val_loss))
        dtrain__progress_row(metrics);
}

/* ---- public calls ---- */

static dtrain_result dtrain__metrics_open(dtrain_metrics *metrics)
{
    const char *path = metrics->desc.jsonl_path;
    if (!path) return DTRAIN_OK;
    metrics->path_bytes = strlen(path) + 1;
    metrics->path = (char *)dtrain__alloc(&metrics->allocator, metrics->path_bytes, 1, "a path");
    if (!metrics->path) return DTRAIN_ERROR_MEMORY;
    memcpy(metrics->path, path, metrics->path_bytes);
    metrics->file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY, 0666);
    if (metrics->file < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_metrics_create: the log file %s cannot be opened: %s", path,
                           strerror(errno));
    return DTRAIN_OK;
}

static void dtrain__metrics_free(dtrain_metrics *metrics)
{
    dtrain_allocator allocator = metrics->allocator;
    dtrain__free(&allocator, metrics->path, metrics->path_bytes, 1);
    dtrain__free(&allocator, metrics, 1, sizeof *metrics);
}

DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out)
{
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: world, desc or out is NULL");
    *out = NULL;
    dtrain_allocator allocator = dtrain__resolve_allocator(dtrain_world_allocator(world));
    dtrain_metrics *metrics =
        (dtrain_metrics *)dtrain__alloc(&allocator, 1, sizeof *metrics, "metrics");
    if (!metrics) return DTRAIN_ERROR_MEMORY;
    metrics->allocator = allocator;
    metrics->world = world;
    metrics->desc = *desc;
    metrics->file = -1;
    if (metrics->desc.progress_every == 0) metrics->desc.progress_every = 10;
    if (dtrain_world_rank(world) != 0) {
        metrics->desc.progress = NULL;
        metrics->desc.jsonl_path = NULL;
    }
    FILE *progress = metrics->desc.progress;
    metrics->terminal = progress && fileno(progress) >= 0 && isatty(fileno(progress));
    metrics->summary.first_loss = metrics->summary.last_loss = dtrain__nan();
    metrics->summary.val_loss = dtrain__nan();
    dtrain_result result = dtrain__metrics_open(metrics);
    if (result != DTRAIN_OK) {
        dtrain__metrics_free(metrics);
        return result;
    }
    *out = metrics;
    return DTRAIN_OK;
}

/* Every rank keeps the books, so that a summary can be asked for anywhere. The clock starts one
 * step before the first record: that step has been paid for as well. */
static void dtrain__metrics_count(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    dtrain_summary *s = &metrics->summary;
    double now = dtrain_seconds();
    if (s->steps == 0) {
        s->first_loss = record->loss;
        metrics->started = now - 1e-3 * record->step_ms;
    }
    int64_t slot = s->steps % DTRAIN__RECENT;
    metrics->recent[DTRAIN__RECENT_RATE][slot] = record->tokens_per_second;
    metrics->recent[DTRAIN__RECENT_STEP][slot] = record->step_ms;
    metrics->recent[DTRAIN__RECENT_COMM][slot] = record->comm_ms;
    metrics->recent[DTRAIN__RECENT_EXPOSED][slot] = record->exposed_comm_ms;
    s->steps++;
    s->last_loss = record->loss;
    if (dtrain__is_finite_double(record->val_loss)) s->val_loss = record->val_loss;
    s->tokens = record->tokens;
    s->comm_bytes += record->comm_bytes;
    s->seconds = now - metrics->started;
    metrics->last = *record;
}

DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record)
{
    if (!metrics || !record)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_metrics_step: metrics or record is NULL");
    dtrain__metrics_count(metrics, record);
    if (metrics->file >= 0) dtrain__metrics_json(metrics, record);
    if (!metrics->desc.progress) return DTRAIN_OK;
    if (metrics->terminal) dtrain__progress_live(metrics);
    else dtrain__progress_table(metrics);
    return DTRAIN_OK;
}

static int dtrain__compare_doubles(const void *a, const void *b)
{
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* Median of the finite ones of `count` values (at most DTRAIN__RECENT), NaN when there are none. */
static double dtrain__median(const double *values, int64_t count)
{
    double sorted[DTRAIN__RECENT];
    size_t n = 0;
    for (int64_t i = 0; i < count; i++)
        if (dtrain__is_finite_double(values[i])) sorted[n++] = values[i];
    if (n == 0) return dtrain__nan();
    qsort(sorted, n, sizeof *sorted, dtrain__compare_doubles);
    return 0.5 * (sorted[(n - 1) / 2] + sorted[n / 2]);
}

DTRAIN_API void dtrain_metrics_summary(const dtrain_metrics *metrics, dtrain_summary *summary)
{
    if (!summary) return;
    memset(summary, 0, sizeof *summary);
    if (!metrics) return;
    int64_t count = dtrain__min(metrics->summary.steps, DTRAIN__RECENT);
    *summary = metrics->summary;
    summary->tokens_per_second = dtrain__median(metrics->recent[DTRAIN__RECENT_RATE], count);
    summary->step_ms = dtrain__median(metrics->recent[DTRAIN__RECENT_STEP], count);
    summary->comm_ms = dtrain__median(metrics->recent[DTRAIN__RECENT_COMM], count);
    summary->exposed_comm_ms = dtrain__median(metrics->recent[DTRAIN__RECENT_EXPOSED], count);
    summary->scaling = summary->step_ms > 0
                           ? (summary->step_ms - summary->exposed_comm_ms) / summary->step_ms
                           : dtrain__nan();
}

DTRAIN_API dtrain_result dtrain_metrics_destroy(dtrain_metrics *metrics)
{
    if (!metrics) return DTRAIN_OK;
    dtrain_result result = DTRAIN_OK;
    if (metrics->terminal && metrics->summary.steps > 0) {
        dtrain__progress_draw(metrics); /* the rate limit may have kept the last step back */
        fprintf(metrics->desc.progress, "\n");
        fflush(metrics->desc.progress);
    }
    if (metrics->file >= 0) {
        dtrain__metrics_json_final(metrics);
        /* Network file systems report a failed write here. */
        bool closed = close(metrics->file) == 0 || errno == EINTR;
        if (metrics->lost_lines || !closed)
            result = dtrain_fail(DTRAIN_ERROR_FILE,
                                 "dtrain_metrics_destroy: %llu of %llu lines of the log file %s "
                                 "could not be written%s",
                                 (unsigned long long)metrics->lost_lines,
                                 (unsigned long long)metrics->lines, metrics->path,
                                 closed ? "" : ", and closing it failed");
    }
    dtrain__metrics_free(metrics);
    return result;
}
#endif /* DTRAIN_IMPLEMENTATION */
