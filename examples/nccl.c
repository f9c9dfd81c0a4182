/* nccl.c: data-parallel training on many GPUs over NCCL: one rank for each GPU, gradients in device
 * memory, reduced there while backward still runs.
 *
 *   build:   cc -O2 -I. examples/nccl.c -o nccl -lm -lpthread
 *            (no GPU: the same program on CPU ranks, over the local communicator)
 *   GPUs:    nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA -DDTRAIN_USE_NCCL examples/nccl.c \
 *            dtrain_cuda.cu -lcublasLt -ldl -o nccl
 *   run:     ./nccl 8                                        eight GPUs of this machine
 *            torchrun --no_python --nproc_per_node 8 ./nccl  the same; --nnodes for several hosts
 *   expect of ./nccl, built without a GPU (no run on GPUs has been recorded yet):
 *     built without DTRAIN_USE_CUDA and DTRAIN_USE_NCCL: this run is on the CPU
 *     2 ranks on device "cpu", communicator "local"
 *     step  40  loss 0.5159
 *     step  80  loss 0.4259
 *     step 120  loss 0.3969
 *     step 160  loss 0.2391
 *     step 200  loss 0.2075
 *     all ranks ended with the same parameters
 *
 * main chooses the device and the communicator, two lines; nothing else in the program knows them.
 * The model is written on the tape, whose kernels run where the parameters are. To use
 * your own kernels instead, see ddp.c: value and grad can be device addresses. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#ifdef DTRAIN_USE_NCCL
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h" /* opens libnccl.so.2 when the ranks start; needs nccl.h to compile */
#endif

#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 128, IN = 16, HIDDEN = 256, CLASSES = 4, STEPS = 200 };

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Draw x (BATCH, IN) uniformly; the label counts the positive ones among the first three. Other
 * samples on every rank. */
static void draw_batch(int rank, int step, float x[BATCH][IN], int32_t labels[BATCH])
{
    uint64_t at = (uint64_t)step * BATCH * IN;
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < IN; i++)
            x[b][i] = 2 * dtrain_random_uniform(1, (uint64_t)rank, at++) - 1;
        labels[b] = 0;
        for (int i = 0; i < CLASSES - 1; i++) labels[b] += x[b][i] > 0;
    }
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    const int64_t shape[2] = {BATCH, IN};
    float x[BATCH][IN];
    int32_t labels[BATCH];
    /* No addresses: the library keeps values on the device, and gradients in buckets of memory that
     * NCCL has registered. */
    const uint32_t uniform = DTRAIN_INIT_UNIFORM;
    dtrain_param p[] = {
        {.name = "w1", .shape = {HIDDEN, IN}, .init = uniform, .init_scale = 0.6f},
        {.name = "b1", .shape = {HIDDEN}}, /* starts at zero */
        {.name = "w2", .shape = {HIDDEN, HIDDEN}, .init = uniform, .init_scale = 0.15f},
        {.name = "b2", .shape = {HIDDEN}},
        {.name = "w3", .shape = {CLASSES, HIDDEN}, .init = uniform, .init_scale = 0.1f},
        {.name = "b3", .shape = {CLASSES}},
    };
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    dtrain_comm_info comm;
    (void)user;
    CHECK(dtrain_strategy_create(world, p, sizeof p / sizeof p[0], NULL, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));
    dtrain_comm_query(dtrain_world_comm(world), &comm);
    if (rank == 0)
        printf("%d ranks on device \"%s\", communicator \"%s\"\n", dtrain_world_size(world),
               dtrain_world_device(world)->ops->name, comm.backend);

    for (int step = 1; step <= STEPS; step++) {
        draw_batch(rank, step, x, labels);
        CHECK(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *h = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
        h = dtrain_linear(tape, h, &p[0], &p[1], DTRAIN_ACTIVATION_RELU);
        h = dtrain_linear(tape, h, &p[2], &p[3], DTRAIN_ACTIVATION_RELU);
        h = dtrain_linear(tape, h, &p[4], &p[5], DTRAIN_ACTIVATION_NONE);
        dtrain_tensor *loss = dtrain_cross_entropy(
            tape, h, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, labels, false), 0, 0);
        CHECK(dtrain_tape_backward(tape, loss, 1)); /* all-reduces run on a separate stream */
        CHECK(dtrain_strategy_finish(strategy)); /* the device waits for them, the host does not */
        CHECK(dtrain_optimizer_step(optimizer, 2e-3f, 1));

        if (step % 40) continue; /* reading a tensor makes the host wait for the device */
        float mean;
        CHECK(dtrain_tensor_read(tape, loss, &mean, NULL));
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &mean, &mean, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (rank == 0) printf("step %3d  loss %.4f\n", step, mean);
    }
    CHECK(dtrain_strategy_verify(strategy, NULL)); /* fails unless all ranks have the same bits */
    if (rank == 0) printf("all ranks ended with the same parameters\n");
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

int main(int argc, char **argv)
{
    /* Under torchrun or srun the launcher's number of ranks counts, else these two. NCCL wants a
     * GPU for each rank; rank r of a machine takes GPU r. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: nccl [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
#if defined(DTRAIN_USE_CUDA) && defined(DTRAIN_USE_NCCL)
    desc.device_ops = dtrain_cuda_device_ops();
    desc.comm_ops = dtrain_nccl_comm_ops();
#else
    printf("built without DTRAIN_USE_CUDA and DTRAIN_USE_NCCL: this run is on the CPU\n");
#endif
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "nccl: %s\n", dtrain_last_error());
    return 1;
}
