/* dtrain_nccl.h: dtrain's communicator over NCCL (2.15 or newer), for ranks with one GPU each.

   Do this in ONE C or C++ file, before any other include:

       #define DTRAIN_NCCL_IMPLEMENTATION
       #include "dtrain_nccl.h"

   This file can also define DTRAIN_IMPLEMENTATION. Then

       dtrain_launch_desc desc = {.rank_count = 8};
       desc.device_ops = dtrain_cuda_device_ops();
       desc.comm_ops = dtrain_nccl_comm_ops();

       cc -O2 train.c dtrain_cuda.o -I/usr/local/cuda/include -L/usr/local/cuda/lib64 \
          -lcudart -lcublasLt -lstdc++ -lm -lpthread -ldl

   A program that calls dtrain_world_join sets comm_ops in dtrain_join_desc. Its comm_given can pass
   an NCCL communicator or a unique id of the program: see dtrain_nccl_given.

   The first world that needs libnccl.so.2 opens it. So the program also starts on machines without
   NCCL, and reports that NCCL is missing only when it needs NCCL.

   Contents, the files that are joined to this file:

       @contents@

   Compile time, in the file with DTRAIN_NCCL_IMPLEMENTATION:
       DTRAIN_NCCL_LIBRARY    name or path of the library to open; "libnccl.so.2"
       DTRAIN_NCCL_LINKED     link NCCL (-lnccl, or libnccl_static.a) instead of opening it

   Differences from the local communicator
       Order     Sends and receives keep their order among the collectives: as in any NCCL program,
                 both ranks must start them in matching order. Consecutive sends and receives are
                 collected. The next dtrain_work_wait, dtrain_work_test or collective launches
                 them. If there are as many sends as receives, they become one NCCL group: such an
                 exchange cannot deadlock, whatever the order of its messages. Otherwise they are
                 launched in their order, and a second send to, or receive from, the same rank
                 begins a new group.
       Streams   Operations run in the order in which they were started, on one stream. From NCCL
                 2.26 on, the tensor axis of a mesh can have a second stream: the next layer waits
                 for sums of this axis, which then do not queue after gradients of the data axis.
                 It needs kernels that start in the order of the host's calls; otherwise two
                 communicators can deadlock. So there is a second stream only if the program has set
                 NCCL_LAUNCH_ORDER_IMPLICIT=1 in its environment. A guest reads no environment: its
                 host sets dtrain_nccl_given.launch_ordered.
       Bits      NCCL chooses the order of additions, and rounds partial sums of bf16 and fp16. So
                 bits can differ from the local communicator's, and between world sizes.
                 DTRAIN_REDUCE_MEAN is the sum, multiplied by 1/N in fp32; ncclAvg would round 1/N
                 first.
       Buffers   must be aligned to their elements. Host buffers are staged through pinned memory,
                 and the host blocks until they are done: use them for small records and initial
                 values. Memory from dtrain_comm_alloc is fastest.
       Mistakes  Ranks do not compare operations in advance: a mismatch ends in a timeout, and the
                 error names the collective on both sides. An all-to-all consists of sends and
                 receives: NCCL does not compare their counts, which must agree.

   Failure. NCCL has no deadline and notices neither a killed nor a stuck peer. So every wait polls
   (1) the world's deadline, (2) NCCL's asynchronous error, and (3) the control plane, which knows
   the ranks that died or reported a failure. This includes the host's waits for the GPU, through
   dtrain_device.while_waiting. The first failure is sent to all ranks. Every NCCL communicator of
   the world is aborted, which ends spinning kernels; every later call returns the same error.
   Buffers of aborted operations have undefined contents. The failure also drops captured graphs,
   because ncclCommAbort waits for graphs with its collectives: launching one is then an error.
   A host destroys the graphs that it captured itself, before it leaves the world. For the same
   reason, destroy a communicator of dtrain_comm_split only after the graphs that use it. */
