/* dtrain_cuda.cu: the CUDA device of dtrain, all GPU kernels. MIT license (file LICENSE).

   Packages: CUDA Toolkit 12 or newer, cuBLAS. Compile it beside a program that includes dtrain.h:

       nvcc -O3 -arch=native -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt -o train

   and give dtrain_cuda_device_ops() to dtrain_launch_desc.device_ops or to dtrain_device_create.

   Contents, the files that this one is joined from:

       @contents@

   In a program that has CUDA of its own (dtrain_world_join, or dtrain_device_desc) the device is
   the one that is current on the calling thread, and has to be current in every later call. Kernels
   and copies are queued on the host's stream, if it hands one in (its default stream:
   cudaStreamLegacy): they run after what the host has queued there, and before what it queues
   later. Other streams of dtrain are ordered with it by events. The stream outlives the device.
   Device, flags and context are never changed or reset. An error that the host has not read by
   cudaGetLastError can be overwritten by a call of dtrain, which leaves none.

   Graphs. A host can capture its stream around dtrain_strategy_gather, _ready, _release, _finish
   and dtrain_optimizer_step, after one whole step without a capture. It needs NCCL where there are
   several ranks, parameters and gradients in device memory, no offload, compression or
   DTRAIN_MISSING_GRADIENT_ERROR. A rate is recorded as it is; AdamW's update is called after each
   launch instead, because its corrections of bias change. What cannot be captured is refused with
   DTRAIN_ERROR_UNSUPPORTED before anything is queued, and the capture continues. Destroy graphs
   before the strategy. A host that waits by cudaStreamSynchronize for a collective has no deadline:
   device->ops->synchronize(device) has.

   An operation is written in this order: a comment with shapes and bytes moved, the kernel, the
   launcher, and its entry in table.cuh. Results are a function of the inputs alone: no
   floating-point atomics anywhere.

   The file is also compiled by a C++ compiler for a CPU, with stand-ins for cuda_runtime.h and
   cublasLt.h (tests/cuda/emulation): so its kernels are tested where there is no GPU.

   Speed. The floor of a kernel is the time that its limiting resource needs: the bytes that its
   comment counts at the bandwidth of a plain copy, or its flops at the peak of the tensor cores for
   dense bf16. The expected share of the floor is a guess on large inputs, made before any run and
   written down so that a measurement can contradict it; small inputs are limited by the launches,
   2 to 5 microseconds each. bench/bench_kernels measures all but muon, convolution
   and pooling. Measured: nothing, no hardware yet.

       kernels                          limiting resource                expected    measured
       add, axpby, convert, activation  memory bandwidth                 90 %        not measured
       dropout                          memory, integer units (Philox)   75 %        not measured
       sum, column sums                 memory bandwidth                 90 %        not measured
       adamw, sgd, lion, muon           memory bandwidth                 90 %        not measured
       gemm, fused or bare              tensor cores (cublasLt)          75 %        not measured
       gemm epilogue kernel             memory bandwidth                 85 %        not measured
       layernorm                        memory bandwidth                 85 %        not measured
       layernorm backward               memory, shared memory            70 %        not measured
       embedding                        memory bandwidth                 80 %        not measured
       embedding backward               memory latency (sort, gather)    40 %        not measured
       cross-entropy                    memory bandwidth                 85 %        not measured
       attention, flash, forward        tensor cores through mma.sync    30 %        not measured
       attention, flash, backward       tensor cores, registers          25 %        not measured
       attention by batched GEMM        memory and L2 cache (scores)     50 %        not measured
       top-k                            memory bandwidth                 75 %        not measured
       scatter-add                      memory, 32-byte sectors          60 %        not measured
       conv2d, conv2d backward          fp32 units, shared memory        30 %        not measured
       pooling                          memory bandwidth                 60 %        not measured

   The tensor-core peak of Hopper is that of wgmma; mma.sync, which these kernels use because it
   runs from Ampere on, is said to reach 60 to 65 % of it. */
