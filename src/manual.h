/* dtrain.h: distributed deep-learning training for C. Version 0.2.0, MIT license (file LICENSE).

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

   Run lines: dtrain_launch forks the ranks, or joins those that a launcher has started (ranks that
   a program has already: dtrain_world_join):

       ./a.out
       torchrun --no_python --nproc_per_node 4 ./a.out        mpirun -n 4 ./a.out
       srun -n 4 ./a.out          RANK=0 WORLD_SIZE=4 MASTER_ADDR=node0 ./a.out, and so on
       build/dtrain-run --nproc 4 build/train_gpt --steps 20    (restarts, logs, several nodes)

   Kernels for AVX-512, AVX2 and plain vectors are all compiled and the best is chosen at run time:
   -march=native is not needed. Linux, gcc 8 or clang 10 or newer.

   A shared object has the implementation in it, or links a dtrain.o that was compiled with -fPIC.
   dlopen loads it into any program, Python's ctypes too; dlclose comes after dtrain_launch or
   dtrain_world_leave. With RTLD_LOCAL, several have their own copies; DTRAIN_STATIC hides one.

   ------------------------------------------------------------------------------------------------
   Contents: the files that this one is joined from, in the order of reading. First the API, in
   which what authors of backends need comes last; then the implementation, its kernels last.

       @contents@

   One step of training, and the files of the API that its stations are in:

       batch                                          train/data.h
       forward: gather, operations, release           strategy/strategy.h, tape/
       loss
       backward: gather, ready, release               tape/tape.h, strategy/strategy.h
         a bucket of gradients is full: reduce        comm/comm.h
       finish: every gradient is the mean             strategy/strategy.h
       norm, factor that unscales and clips           optim/scaler.h
       optimizer on this rank's shards                optim/optimizer.h
       publish the new parameters                     strategy/strategy.h
       record                                         train/trainer.h, monitor/metrics.h
       now and then: save all that must survive       state/state.h, state/checkpoint.h

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

   With the tape the model is its forward function and nothing else: see examples/mlp.c, and
   examples/gpt.c with the trainer.

   ------------------------------------------------------------------------------------------------
   Glossary

   rank         one of the processes (or threads) that train together, numbered from 0.
   world        all ranks of a run; world size = how many.
   node         the ranks of one host, which reach each other faster than those of other hosts; or
                a group of ranks that counts as one (dtrain_world_options.node_ranks).
   restart      to start all ranks of a run again after one has failed; progress is a step that the
                ranks can go on behind, a crash loop is restarts without any.
   flight record   the last collectives of a rank, kept so that one can see after a failure who was
                behind, in which call; comm/flight.c.
   collective   a call that every rank of a communicator makes: all-reduce, barrier, ...
   DDP          distributed data parallel: every rank has the whole model and a part of the batch.
   buffer       a parameter that no gradient changes but an operation does: running averages.
   shard        the part of parameters, gradients or optimizer state that one rank keeps.
   ZeRO, FSDP   strategies that shard: optimizer state (ZeRO-1), gradients too (ZeRO-2), parameters
                too (ZeRO-3, fully sharded data parallel).
   gather       to bring a unit's parameters together on every rank; release lets go of them.
   publish      to bring updated shards to where the next forward pass reads them.
   parameter    a named tensor of the model; its gradient has the same shape.
   mesh         ranks in a grid (parallel/mesh.h): along its data axis they have other samples;
                along its tensor axis they share each layer of one copy of the model, along its
                pipeline axis that copy's depth, and the samples along both.
   cut          how the tensor axis may divide a parameter: by rows or by columns (parallel/cut.h).
   placement    how a tensor of the tape lies over the tensor axis: whole, its columns or its rows
                cut; operations carry it on.
   sequence parallelism   the tensor axis divides rows, too, where no layer is shared (norms,
                residual connections): less memory, the same bytes sent.
   stage        what a rank of the mesh's pipeline axis has of the model: units that follow each
                other; a rank may have several, its chunks (parallel/pipeline.h).
   schedule     the order in which ranks run forward and backward of stages and micro-batches, and
                send between them (of learning rates: dtrain_schedule_lr).
   bubble       the time in which a rank waits for other stages.
   remote       an operation or tensor of another stage: it has a shape, and no memory or work.
   unit         a group of parameters used together, a transformer block say: the grain in which
                sharded strategies gather and free parameters.
   bucket       a run of gradients, laid end to end, that is reduced by one collective.
   ready        a gradient to which this backward adds nothing more.
   micro-batch  the samples of one forward and backward; a step may accumulate several.
   tape         the record of the forward pass that backward walks in reverse.
   arena        the memory of a forward pass, laid out the same way every step.
   autocast     matrix products and attention in bf16 or fp16; norms, losses, weights stay fp32.
   checkpoint   everything of a run that must survive it, on the disk (state/checkpoint.h); to
                resume is to go on from one, to reshard is to do so on other ranks.
   compression  to send less than a gradient; what is left out stays in the residual.
   residual     what this rank has not sent yet; error feedback adds it to the next gradient.
   loss scaling a factor on the loss that keeps fp16 gradients from vanishing; see optim/scaler.h.
   recompute    to drop a unit's activations and compute them again in backward; other libraries
                call it activation checkpointing.

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

   A sharded unit: each rank keeps a shard; gather lays the shards end to end in one of two slots,
   reduce-scatter brings each rank the mean of its shard, which its optimizer updates:

       kept by rank      0: | shard 0 |    1: | shard 1 |    2: | shard 2 |
       in a slot, all       | weight ........ pad | bias . pad | norm . pad |  for one unit's time

   ------------------------------------------------------------------------------------------------
   Configuration

   Compile time, in the file with DTRAIN_IMPLEMENTATION (none changes a public struct or prototype):
       DTRAIN_STATIC       all functions are static: a private copy
       DTRAIN_API          the linkage of public functions, if you want your own
       DTRAIN_USE_CBLAS    fp32 GEMM through cblas_sgemm
       DTRAIN_USE_MPI      the communicator over MPI; build with mpicc
       DTRAIN_USE_CUDA     dtrain_device_ops_by_name knows "cuda"; dtrain_cuda.cu must be linked
                           (and DTRAIN_STATIC is not possible: that file calls dtrain.h)
       DTRAIN_CORE         only ring 1 of the four below
       DTRAIN_OMIT_STATE   everything but ring 2; also DTRAIN_OMIT_MODELS (3), DTRAIN_OMIT_MONITOR
                           (4), in any combination
       DTRAIN_NATIVE       on x86 only the kernels of the instruction set that -march names, for who
                           compiles often: two thirds of the time; for machines that have it
       DTRAIN_NO_SIMD      kernels of one lane instead of vectors (slow; a reference)

   dtrain.h is four rings. A program without a ring compiles faster; the header still declares the
   functions of that ring, and the linker names those that the program calls:
       1 core      world, launch, communicator, mesh, strategies, optimizers but Muon, and their CPU
                   kernels: for programs with their own arrays and backward
       2 state     what must survive a run, checkpoints, import and export
       3 models    tape, operations and their CPU kernels (products of matrices among them), Muon,
                   pipelines' runner, data, trainer
       4 monitor   metrics for terminal, JSON, TensorBoard, sinks as tools/prometheus.h; traces
   A CPU kernel of a ring that is left out returns DTRAIN_ERROR_UNSUPPORTED. So do an optimizer with
   Muon without ring 3, and a rank without ring 4 whose launch asks for a trace.

   Run time: the desc structs. In set-up descs zero means the default written beside the field; in
   hyper-parameter descs (optimizer, loss scaler) start from the *_defaults() function. A cluster of
   slow links on one machine, to measure or to learn with: tools/emulated_links.h. A run that fails
   or hangs can leave what each rank called last: dtrain_world_options.flight_directory, or
   DTRAIN_FLIGHT_DIRECTORY in the environment; build/flight (tools/flight) reads it.

   ------------------------------------------------------------------------------------------------
   Promises (each has a test)

   Same mathematics   N ranks on N shards of a batch give the gradients of one rank on all of it,
                      to rounding: also where shards or micro-batches differ in size, in how many
                      targets are ignored, or a rank's data ends earlier (dtrain_strategy_weight,
                      dtrain_strategy_join).
   Same bits          run after run, for any bucket size, with or without overlap, for any number
                      of threads, with gradients in buckets or copied; from any compiler, dialect
                      and -O (on one instruction set, without -ffast-math); and under DDP, ZERO1,
                      SHARD_GRAD_OP, FULL_SHARD and ZERO3 alike (HYBRID_SHARD and hierarchical
                      add node by node). With several micro-batches there are two orders of adding
                      up: DDP and ZERO1 sum each rank's micro-batches first, kinds that shard
                      gradients the ranks of each micro-batch first; DTRAIN_ACCUMULATION_LAST makes
                      all do as DDP.
                      With clipping, kinds add up the norm in different orders, in double: it is
                      the same float but in rare cases (about one step in 10^8). GPU kernels use no
                      floating atomics; NCCL's sums alone depend on its choice of algorithm.
   Any layout         a tensor axis gives the losses of one rank to rounding: a sum over features is
                      taken in parts there. A pipeline axis gives the bits of one rank that
                      accumulates the same micro-batches, under every schedule; with a weight tied
                      across stages, to rounding. Initial values and dropout masks are drawn by
                      place in the whole, and are the same bits for any number of ranks.
   Whatever ranks do  they may differ in which gradients they have and in whose memory, in the order
                      in which they become ready, in the units that backward comes to: the result
                      is right, or all ranks get an error.
   Memory             of parameters, gradients and optimizer state follows the table in
                      strategy/strategy.h, and is known before anything is allocated.
   No surprises       never exits, aborts, writes to stdout or installs signal handlers (but those
                      that catch_signals asks for). Every call that can fail returns a
                      dtrain_result and leaves a sentence in dtrain_last_error(). (A forked rank
                      ends by _exit after rank_main.) Local ranks read each other's large messages:
                      where yama guards memory, each allows that to the processes of its launcher
                      (PR_SET_PTRACER).
   No hangs           every wait has a deadline (timeout_ms). A dead, stuck or disagreeing rank
                      becomes an error with its name on every other rank; a failed communicator
                      stays failed. Ranks that wait for each other, each in another call, hear so at
                      the deadline; over NCCL they hear only who is late.
   Nothing left       shared memory has no name; after success, failure or kill -9 no process,
                      segment, file descriptor or thread remains.
   Exact resume       N steps, save, load, M steps have the bits of N + M steps, in as many ranks;
                      values and optimizer state also under any others.
   Nothing half       what has a manifest is a whole checkpoint. A crash, a full disk or a loss of
                      power while saving leaves those that were there.
   Steady state       after the first step nothing is allocated, but by a save, and all addresses
                      repeat.
   Exact averages     sums are taken in fp32 in rank order and multiplied once by 1/N; where the
                      samples of ranks or micro-batches differ in number, once more, to be the mean
                      over samples.
   Finite checks      look at exponent bits: -ffast-math does not disable them.

   Threads: a world and everything made from it belong to the thread of its rank.
   dtrain_last_error is per thread. Ownership: who creates destroys; destroy functions accept NULL.

   ------------------------------------------------------------------------------------------------
   Limits

   Ranks are processes or threads started by dtrain_launch, by another launcher, or by a program
   that joins (dtrain_world_join). The local communicator connects ranks of one host; several hosts
   need MPI (DTRAIN_USE_MPI, mpicc) on CPUs, dtrain_nccl.h on GPUs.

   Parameters, gradients and optimizer state are fp32 where they are kept; activations are fp32 or,
   under autocast, bf16 or fp16; gathered parameters and gradients may travel as either, and a
   program with a backward pass may have its arrays in either, or everything in fp64
   (dtrain_param.dtype). At most
   DTRAIN_MAX_RANKS ranks. Asynchronous collectives of the local communicator advance inside dtrain
   calls, not in between. The tensor axis of a mesh divides the layers of the tape and parameters
   that are marked. The pipeline axis is for DDP and ZERO1, without recorded steps (graph) and
   without gradients of inputs; the loss calls the same operations, of the same shapes, in each
   micro-batch, and an error of next_batch there fails the step on all ranks. Calls of the library
   take at most 40 KiB of the stack: 64 KiB are enough for a rank whose own functions are modest.
   The C library takes more where it looks up a host's name.
   dtrain_cuda.cu and dtrain_nccl.h have been emulated and compiled, and not yet run on a GPU.
   The file must keep its name: it includes itself to compile its kernels for several
   instruction sets. Ranks trust each other and their network: strangers and a wrong DTRAIN_JOB_KEY
   are refused when ranks meet; nothing is encrypted, and a rank that writes into another's memory
   is not defended against. */
