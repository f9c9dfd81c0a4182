/* dtrain_cuda.cu: the CUDA device of dtrain, all GPU kernels. MIT license (file LICENSE).

   Packages: CUDA Toolkit 12 or newer, cuBLAS. Compile it beside a program that includes dtrain.h:

       nvcc -O3 -arch=native -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt -o train

   and give dtrain_cuda_device_ops() to dtrain_launch_desc.device_ops or to dtrain_device_create.

   Contents: the source files.

       @contents@

   In a program with its own CUDA code (dtrain_world_join, or dtrain_device_desc) the device is the
   current device of the calling thread, and must be current in every later call. If the program
   gives a stream (its default stream: cudaStreamLegacy), kernels and copies are queued on it: they
   run after earlier work of the program on that stream, and before later work. Events order other
   streams of dtrain with it. The stream outlives the device. Device, flags and context are never
   changed or reset. A call of dtrain can overwrite an error that the program has not read by
   cudaGetLastError, and leaves none.

   Graphs. A program can capture its stream around dtrain_strategy_gather, _ready, _release, _finish
   and dtrain_optimizer_step, after one whole step without a capture. This needs NCCL for several
   ranks, parameters and gradients in device memory, no offload, no compression, and no
   DTRAIN_MISSING_GRADIENT_ERROR. The learning rate is recorded; AdamW's update is called after each
   launch instead, because its bias corrections change. A call that cannot be captured returns
   DTRAIN_ERROR_UNSUPPORTED before anything is queued, and the capture continues. Destroy graphs
   before the strategy. cudaStreamSynchronize has no deadline for a collective;
   device->ops->synchronize(device) has one.

   The source of an operation has this order: a comment with shapes and bytes moved, the kernel, the
   launcher, and its entry in table.cuh. Results depend only on the inputs: there are no
   floating-point atomics.

   A C++ compiler for a CPU also compiles the file, with stand-ins for cuda_runtime.h and cublasLt.h
   (tests/cuda/emulation): tests run its kernels without a GPU.

   Speed. The floor of a kernel is the time of its limiting resource: the bytes in its comment at
   the bandwidth of a plain copy, or its flops at the peak of the tensor cores for dense bf16. The
   expected share of the floor is a guess for large inputs, made before any run, for a measurement
   to contradict; launches limit small inputs, 2 to 5 microseconds each. bench/bench_kernels
   measures all kernels but muon, convolution and pooling. Nothing is measured yet: no hardware.

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

   The tensor-core peak of Hopper is wgmma's; these kernels use mma.sync, which runs from Ampere on
   and is said to reach 60 to 65 % of it. */
