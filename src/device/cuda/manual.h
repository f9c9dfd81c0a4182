/* dtrain_cuda.cu: the CUDA device of dtrain, all GPU kernels. MIT license (file LICENSE).

   Packages: CUDA Toolkit 12 or newer, cuBLAS. Compile it beside a program that includes dtrain.h:

       nvcc -O3 -arch=native -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt -o train

   and give dtrain_cuda_device_ops() to dtrain_launch_desc.device_ops or to dtrain_device_create.

   Contents, the files that this one is joined from:

       @contents@

   Every operation has: shapes and bytes moved, the kernel, the launcher, and its entry in table.cuh.
   Results are a function of the inputs alone: no floating-point atomics anywhere.

   The file is also compiled by a C++ compiler for a CPU, with stand-ins for cuda_runtime.h and
   cublasLt.h (tests/cuda/emulation): that is how its kernels are tested where there is no GPU. */
