/* dtrain.h: distributed deep-learning training for C. MIT license (file LICENSE).

   Do this in ONE C or C++ file, before any other include:

       #define DTRAIN_IMPLEMENTATION
       #include "dtrain.h"

   and include dtrain.h without the define wherever else it is needed. Build lines:

       cc  -O2 train.c -lm -lpthread                       built-in kernels, nothing else needed
       cc  -O2 -DDTRAIN_USE_CBLAS train.c -lopenblas -lm -lpthread        GEMM from a BLAS
       c++ -O2 -std=c++17 train.cpp -lpthread              the same file in a C++ program
       cc  -O2 -fPIC -shared train.c -o train.so -lm -lpthread         a shared object, see below
       mpicc -O2 -DDTRAIN_USE_MPI train.c -lm -lpthread                    ranks on several hosts
       nvcc -O3 -arch=native -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt   with NVIDIA GPUs

   Run lines. dtrain_launch forks the ranks, or takes the ranks that a launcher has started. A
   program whose ranks already run calls dtrain_world_join:

       ./a.out
       torchrun --no_python --nproc_per_node 4 ./a.out        mpirun -n 4 ./a.out
       srun -n 4 ./a.out          RANK=0 WORLD_SIZE=4 MASTER_ADDR=node0 ./a.out, and so on
       build/dtrain-run --nproc 4 build/train_gpt --steps 20    (restarts, logs, several nodes)

   The compiler makes kernels for AVX-512, AVX2 and scalars, and the program chooses at run time:
   -march=native is not needed. Linux; gcc 8, clang 10 or newer.

   A shared object contains the implementation, or links a dtrain.o compiled with -fPIC. Any program
   can load it by dlopen, and Python by ctypes; call dlclose after dtrain_launch has returned or
   dtrain_world_leave. RTLD_LOCAL gives each shared object its own copy; DTRAIN_STATIC hides a copy.

   ------------------------------------------------------------------------------------------------
   Contents: the source files, in the order of reading. The API comes first and ends with the part
   for authors of backends; the implementation follows and ends with the kernels.

       @contents@

   One training step, and the files that declare its functions:

       batch                                          train/data.h
       forward: gather, operations, release           strategy/strategy.h, tape/
       loss
       backward: gather, ready, release               tape/tape.h, strategy/strategy.h
         a bucket of gradients is full: reduce        comm/comm.h
       finish: every gradient is the mean             strategy/strategy.h
       gradient norm, unscaling, clipping             optim/scaler.h
       optimizer on this rank's shards                optim/optimizer.h
       publish the new parameters                     strategy/strategy.h
       record of the step                             train/trainer.h, monitor/metrics.h
       every so many steps: save a checkpoint         state/state.h, state/checkpoint.h

   ------------------------------------------------------------------------------------------------
   A complete program: a model with its own arrays and its own backward, on two ranks.

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
           dtrain_launch_desc desc = {.default_rank_count = 2};
           if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
           fprintf(stderr, "%s\n", dtrain_last_error());
           return 1;
       }

   With the tape, a model is only its forward function: examples/mlp.c; with the trainer:
   examples/gpt.c.

   ------------------------------------------------------------------------------------------------
   Glossary

   rank         one of the processes (or threads) that train together, numbered from 0. The world
                is all ranks of a run; the world size is their number.
   node         the ranks of one host, which reach each other faster than ranks of other hosts; or
                a group of ranks that counts as one node (dtrain_world_options.node_ranks).
   bucket       gradients laid end to end in memory, which one collective reduces.
   ready        said of a gradient that this backward pass has finished.
   shard        the part of the parameters, gradients or optimizer state that one rank keeps.
   ZeRO, FSDP   strategies that shard the optimizer state (ZeRO-1), the gradients too (ZeRO-2), the
                parameters too (ZeRO-3, fully sharded data parallel).
   unit         parameters that are used together, for example a transformer block. Sharded
                strategies gather and release one unit at a time.
   gather       to bring the parameters of a unit together on every rank; release frees them.
   publish      to copy updated shards to where the next forward pass reads them.
   buffer       a parameter without a gradient that an operation updates: a running average.
   micro-batch  the samples of one forward and backward pass; a step can accumulate several.
   mesh         the ranks as a grid (parallel/mesh.h). Ranks along the data axis have different
                samples. Ranks along the tensor axis share each layer of one model, ranks along the
                pipeline axis share its depth; both have the same samples.
   cut          how the tensor axis divides a parameter: by rows or by columns (parallel/cut.h).
   placement    how the tensor axis divides a tensor of the tape: whole, by columns or by rows.
                Operations pass it on.
   sequence parallelism   the tensor axis also divides rows where no layer is shared (norms,
                residual connections): less memory, the same bytes sent.
   stage        consecutive units of the model on one rank of the pipeline axis; a rank can have
                several stages, its chunks (parallel/pipeline.h).
   schedule     the order in which ranks run forward and backward passes of stages and micro-batches
                and send between them. (Of learning rates: dtrain_schedule_lr.)
   remote       said of an operation or tensor of another rank's stage: a shape without memory.
   tape         the record of the forward pass, which backward walks in reverse.
   arena        the memory of a forward pass, laid out the same way in every step.
   autocast     matrix products and attention in bf16 or fp16; norms, losses, weights stay fp32.
   recompute    to drop a unit's activations and compute them again in backward; also called
                activation checkpointing.
   checkpoint   the files from which a run resumes, on the same ranks or, resharded, on others
                (state/checkpoint.h).
   residual     the part of a gradient that compression has not sent yet; error feedback adds it to
                the next gradient.
   flight record   the last collectives of a rank; after a failure they show which rank was late,
                and in which call (comm/flight.c).

   Two ranks, two buckets; time runs to the right. Backward computes the gradients of the last
   parameters first, so their all-reduce runs while earlier layers still compute. All ranks launch
   buckets in this order, whatever the order in which gradients become ready:

       rank 0   forward | backward p6 | p5 p4      | p3 .. p0      | finish | optimizer
       rank 1   forward  | backward p6 | p5 p4      | p3 .. p0     | finish | optimizer
       comm                              [ p6 ]      [ p5 p4 ] ...   [ p3 .. p0 ]

   A bucket in memory; each gradient starts on a cache line. A rank owns one slice of every bucket:
   it sums this slice over all ranks, in rank order, and writes the mean to all ranks:

       rank 0's bucket  | p5 .......... pad | p4 ........ pad |
                        |<--- slice 0 --->|<--- slice 1 --->|      rank r reduces slice r
       rank 1's bucket  | p5 .......... pad | p4 ........ pad |

   A sharded unit: each rank keeps a shard. Gather lays the shards end to end in one of two slots;
   reduce-scatter brings each rank the mean gradient of its shard, which its optimizer updates:

       kept by rank      0: | shard 0 |    1: | shard 1 |    2: | shard 2 |
       in a slot, all       | weight ........ pad | bias . pad | norm . pad |  while it is used

   ------------------------------------------------------------------------------------------------
   Configuration

   At compile time, in the file with DTRAIN_IMPLEMENTATION (no public struct or prototype changes):
       DTRAIN_STATIC       all functions are static: a private copy
       DTRAIN_API          the linkage of public functions, if you define it
       DTRAIN_USE_CBLAS    fp32 GEMM through cblas_sgemm
       DTRAIN_USE_MPI      the communicator over MPI; build with mpicc
       DTRAIN_USE_CUDA     dtrain_device_ops_by_name knows "cuda"; link dtrain_cuda.cu, which calls
                           dtrain.h and therefore excludes DTRAIN_STATIC
       DTRAIN_CORE         only ring 1 of the four below
       DTRAIN_OMIT_STATE   leaves ring 2 out; DTRAIN_OMIT_MODELS leaves out ring 3,
                           DTRAIN_OMIT_MONITOR ring 4; any combination works
       DTRAIN_NATIVE       on x86 only the kernels of -march's instruction set: two thirds of the
                           compile time, for machines that have this instruction set
       DTRAIN_NO_SIMD      scalar kernels (slow; a reference)

   dtrain.h is four rings. A program without a ring compiles faster; the header still declares the
   functions of that ring, and the linker names each one that the program calls:
       1 core      world, launch, communicator, mesh, strategies, optimizers except Muon, and their
                   CPU kernels: for programs with their own arrays and backward
       2 state     state of a run, checkpoints, import and export
       3 models    tape, operations, their CPU kernels (matrix products too), Muon, runner of
                   pipelines, data, trainer
       4 monitor   metrics for terminal, JSON, TensorBoard and sinks like tools/prometheus.h; traces
   A CPU kernel of a missing ring returns DTRAIN_ERROR_UNSUPPORTED, as do Muon without ring 3 and a
   trace without ring 4.

   At run time: the desc structs. In set-up descs zero means the default written beside the field;
   hyper-parameter descs (optimizer, loss scaler) come from a *_defaults() function.
   tools/emulated_links.h emulates slow links on one machine. A run that fails or hangs writes the
   last calls of each rank to dtrain_world_options.flight_directory, or to the environment's
   DTRAIN_FLIGHT_DIRECTORY; build/flight (tools/flight) reads them.

   ------------------------------------------------------------------------------------------------
   Promises (each has a test)

   Same mathematics   N ranks on N shards of a batch give the gradients of one rank on the whole
                      batch, to rounding: also where shards or micro-batches differ in size or in
                      ignored targets, and where a rank's data ends early (dtrain_strategy_weight,
                      dtrain_strategy_join).
   Same bits          run after run, for any bucket size, with or without overlap, for any number
                      of threads, with gradients in buckets or copied; from any compiler, dialect
                      and -O (on one instruction set, without -ffast-math); and under DDP, ZERO1,
                      SHARD_GRAD_OP, FULL_SHARD and ZERO3 alike (HYBRID_SHARD and hierarchical
                      add node by node). With several micro-batches there are two orders of adding:
                      DDP and ZERO1 first sum the micro-batches of each rank, kinds that shard
                      gradients first sum the ranks of each micro-batch; DTRAIN_ACCUMULATION_LAST
                      makes all kinds add like DDP. With clipping, kinds add the norm in different
                      orders, in double: the float differs in about one step in 10^8. GPU kernels
                      use no floating-point atomics; only NCCL's sums depend on its algorithm.
   Any layout         a tensor axis gives the losses of one rank to rounding: it takes sums over
                      features in parts. A pipeline axis gives the bits of one rank that
                      accumulates the same micro-batches, under every schedule; with a weight tied
                      across stages, to rounding. Initial values and dropout masks depend on the
                      place in the whole tensor: any number of ranks draws the same bits.
   Whatever ranks do  ranks can differ in which gradients they have, in memory, in the order in
                      which gradients become ready and in the units that backward visits: the
                      result is right, or all ranks get an error.
   Memory             of parameters, gradients and optimizer state follows the table in
                      strategy/strategy.h, and is known before anything is allocated.
   No surprises       the library never exits, aborts, writes to stdout or installs signal handlers
                      (catch_signals asks for them). Every call that can fail returns a
                      dtrain_result and leaves a sentence in dtrain_last_error(). (A forked rank
                      ends by _exit after rank_main.) Local ranks read large messages from each
                      other's memory: where yama forbids this, each rank permits it to the
                      processes of its launcher (PR_SET_PTRACER).
   No hangs           every wait has a deadline (timeout_ms). A dead, stuck or disagreeing rank
                      becomes an error that names it on every other rank; a failed communicator
                      stays failed. Ranks of one host that wait for each other in different calls
                      learn so after a second, ranks of several hosts at the deadline; over NCCL
                      they learn only which rank is late.
   Nothing left       shared memory has no name; after success, failure or kill -9 no process,
                      segment, file descriptor or thread remains.
   Exact resume       N steps, save, load, M steps give the bits of N + M steps on as many ranks;
                      values and optimizer state also on any other number.
   Nothing half       a directory with a manifest is a whole checkpoint. A crash, a full disk or a
                      loss of power during a save leaves the earlier checkpoints intact.
   Steady state       after the first step only a save allocates, and all addresses repeat.
   Exact averages     sums are taken in fp32 in rank order and multiplied once by 1/N; where ranks
                      or micro-batches have different numbers of samples, once more, for the mean
                      over samples.
   Finite checks      look at exponent bits: -ffast-math does not disable them.

   Threads: a world and everything made from it belong to the thread of its rank.
   dtrain_last_error is per thread. Ownership: the creator destroys; destroy functions accept NULL.

   ------------------------------------------------------------------------------------------------
   Limits

   Ranks are processes or threads that dtrain_launch or another launcher starts, or that a program
   brings (dtrain_world_join); at most DTRAIN_MAX_RANKS. The local communicator connects the ranks
   of one host; several hosts need MPI (DTRAIN_USE_MPI, mpicc) on CPUs, dtrain_nccl.h on GPUs.
   Asynchronous collectives of the local communicator advance only inside dtrain calls.

   Stored parameters, gradients and optimizer state are fp32; activations are fp32 or, under
   autocast, bf16 or fp16; gathered parameters and gradients can travel as bf16 or fp16. A program
   with its own backward can keep its arrays in bf16 or fp16, or everything in fp64
   (dtrain_param.dtype).

   The tensor axis of a mesh divides layers of the tape and marked parameters. The pipeline axis
   needs DDP or ZERO1, and has no recorded steps (graph) and no gradients of inputs; the loss calls
   the same operations with the same shapes in each micro-batch, and an error of next_batch fails
   the step on all ranks.

   Library calls take at most 40 KiB of stack: 64 KiB are enough for a rank with modest functions.
   The C library takes more to look up a host name. Do not rename dtrain.h: it includes itself to
   compile kernels for several instruction sets. dtrain_cuda.cu and dtrain_nccl.h are compiled and
   tested by emulation, and have not yet run on a GPU. Ranks trust each other and their network: the
   rendezvous refuses strangers and a wrong DTRAIN_JOB_KEY, but nothing is encrypted, and nothing
   defends against a rank that writes into another rank's memory. */
