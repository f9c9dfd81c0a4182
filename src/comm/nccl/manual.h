/* dtrain_nccl.h: dtrain's communicator over NCCL (2.15 or newer), for ranks with a GPU each.

   Do this in ONE C or C++ file, before any other include:

       #define DTRAIN_NCCL_IMPLEMENTATION
       #include "dtrain_nccl.h"

   It may be the file with DTRAIN_IMPLEMENTATION or another one. Then

       dtrain_launch_desc desc = {.rank_count = 8};
       desc.device_ops = dtrain_cuda_device_ops();
       desc.comm_ops = dtrain_nccl_comm_ops();

       cc -O2 train.c dtrain_cuda.o -I/usr/local/cuda/include -L/usr/local/cuda/lib64 \
          -lcudart -lcublasLt -lstdc++ -lm -lpthread -ldl

   A program that has joined (dtrain_world_join) sets comm_ops in dtrain_join_desc, and can hand in
   its own communicator or unique id there as comm_given: see dtrain_nccl_given.

   libnccl.so.2 is opened when the first world asks for it: a program built with this file starts on
   machines without NCCL too, and reports that NCCL is missing only when it is needed.

   Contents, the files that this one is joined from:

       @contents@

   Compile time, in the file with DTRAIN_NCCL_IMPLEMENTATION:
       DTRAIN_NCCL_LIBRARY    "libnccl.so.2", the name or path that is opened
       DTRAIN_NCCL_LINKED     link NCCL (-lnccl, or libnccl_static.a) instead of opening it

   Differences from the local communicator
       Order     Send and receive keep their place among the collectives: two ranks must start
                 theirs in an order that fits, as with any NCCL program. Sends and receives that
                 are started one after the other, and waited for later, are launched by the first
                 dtrain_work_wait, dtrain_work_test or collective. As many sends as receives become
                 one NCCL group: an exchange cannot deadlock, in whatever order its messages are
                 started. Otherwise messages keep their order, as if each were waited for before the
                 next, but for a send and a receive that run side by side.
       Streams   Operations run in the order of their starts, on one stream. From NCCL 2.26 on the
                 tensor axis of a mesh has a second stream, so that its sums, which the next layer
                 waits for, do not queue after gradients of the data axis. It needs
                 NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment, which is the program's to set; a
                 host says by dtrain_nccl_given.launch_ordered that it has. Two communicators at
                 once cannot deadlock where kernels start in the order of the host's calls. Without
                 it there is one stream.
       Bits      NCCL decides in which order it adds, and bf16 and fp16 are rounded on the way: bits
                 may differ from the local communicator's and from one number of ranks to another.
                 DTRAIN_REDUCE_MEAN is the sum, then times 1/N in fp32: ncclAvg would round 1/N
                 first.
       Buffers   must be aligned to their elements. Those of the host are staged through pinned
                 memory and waiting for them stops the host: meant for small records and initial
                 values. Memory from dtrain_comm_alloc is fastest.
       Mistakes  Operations are not compared across ranks in advance: a difference shows as a
                 timeout, and the error names the collective on both sides. In an all-to-all, which
                 is sends and receives, NCCL itself does not compare counts: they must agree.

   Failure. NCCL has no deadline and sees neither a killed neighbour nor a stuck one. Here
   nothing waits without polling (1) the world's deadline, (2) NCCL's asynchronous error, (3) the
   control plane, which knows the ranks that died and those that reported a failure: in the calls
   of comm/comm.h and, through dtrain_device.while_waiting, while the host waits for the GPU. The
   first failure is sent to all ranks, every NCCL communicator of this rank's world is aborted,
   which ends kernels that spin, and every later call returns the same error. Contents of buffers
   in aborted operations are undefined. Captured graphs end with the first failure, because NCCL
   waits for those that contain its collectives: launching one is an error then. Graphs that a host
   has captured itself are destroyed by the host, before it leaves the world. For the same reason a
   communicator of dtrain_comm_split is destroyed after the graphs that use it. */
