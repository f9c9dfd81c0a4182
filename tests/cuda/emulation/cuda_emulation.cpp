/* cuda_emulation.cpp: a CUDA device made of one CPU thread. See cuda_emulation.h.
 *
 * Contents
 *   [1] Fibers         stacks that kernels' threads block on
 *   [2] Blocks         the threads of a block take turns; barriers; divergence
 *   [3] Warps          shuffles, votes, mma, ldmatrix, cp.async
 *   [4] Device         state, faults, errors
 *   [5] Memory         allocations are known, copies are checked
 *   [6] Streams        queues that run late; events
 *   [7] Graphs         capture and replay
 *   [8] Launch         and what the runtime tells of kernels
 *   [9] cublasLt       products with epilogues
 *
 * One mutex guards everything, kernels included: the static arrays behind __shared__ exist once. */
#include "cuda_runtime.h"
#include "nvtx3/nvToolsExt.h"
#include "cublasLt.h"
#include "cuda_emulation.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __ELF__
#include <elf.h>
#include <link.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned char *dtrain_emulation_dynamic_shared;

namespace
{
char message[512];
bool quiet;

/* Keeps the explanation of a failure and prints it. */
__attribute__((format(printf, 1, 2))) void explain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (!quiet) fprintf(stderr, "cuda emulation: %s\n", message);
}
} // namespace

/* ==== [1] Fibers ====
 * A fiber is a stack and a saved stack pointer. Switching costs about 20 ns with the assembly below
 * and ten times that with ucontext, which changes the signal mask. */

#if defined(__ELF__) && (defined(__x86_64__) || defined(__aarch64__)) && \
    !defined(DTRAIN_EMULATION_UCONTEXT)
#define EMULATION_ASSEMBLY 1
extern "C" void dtrain_emulation_switch(void **save, void *load);
#else
#include <ucontext.h>
#endif

#if defined(EMULATION_ASSEMBLY) && defined(__x86_64__)
static const size_t switch_frame = 6 * 8; /* what the switch saves below the return address */
__asm__(".text\n"
        ".globl dtrain_emulation_switch\n"
        ".type dtrain_emulation_switch,@function\n"
        "dtrain_emulation_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size dtrain_emulation_switch,.-dtrain_emulation_switch\n");
#elif defined(EMULATION_ASSEMBLY)
static const size_t switch_frame = 160;
__asm__(".text\n"
        ".globl dtrain_emulation_switch\n"
        ".type dtrain_emulation_switch,%function\n"
        "dtrain_emulation_switch:\n"
        "  sub sp, sp, #160\n"
        "  stp x29, x30, [sp, #0]\n  stp x19, x20, [sp, #16]\n  stp x21, x22, [sp, #32]\n"
        "  stp x23, x24, [sp, #48]\n  stp x25, x26, [sp, #64]\n  stp x27, x28, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n"
        "  mov sp, x1\n"
        "  ldp x29, x30, [sp, #0]\n  ldp x19, x20, [sp, #16]\n  ldp x21, x22, [sp, #32]\n"
        "  ldp x23, x24, [sp, #48]\n  ldp x25, x26, [sp, #64]\n  ldp x27, x28, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".size dtrain_emulation_switch,.-dtrain_emulation_switch\n");
#endif

namespace
{
struct fiber {
#ifdef EMULATION_ASSEMBLY
    void *stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    char *mapping = nullptr;         /* guard page, then the stack */
    const void *stack_low = nullptr; /* AddressSanitizer wants to know the bounds of stacks */
    size_t stack_bytes = 0;
    void *fake_stack = nullptr; /* AddressSanitizer's */
    void *race_state = nullptr; /* ThreadSanitizer's */
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const size_t stack_size = 512 * 1024;
#else
const size_t stack_size = 128 * 1024;
#endif
const size_t guard_size = 64 * 1024; /* at least a page everywhere */

fiber home; /* the host thread that runs a kernel */
fiber *running = &home;
fiber *previous; /* who switched to the running fiber */
/* Like all containers here never destroyed: threads may outlive main, and leak checkers look later. */
std::vector<fiber *> &all_fibers = *new std::vector<fiber *>;
std::vector<fiber *> &free_fibers = *new std::vector<fiber *>;
void run_threads();

/* The first half of the switch is done; tell the sanitizers. */
void arrived()
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(running->fake_stack, &previous->stack_low,
                                    &previous->stack_bytes);
#endif
}

void switch_to(fiber *to)
{
    fiber *from = running;
    previous = from;
    running = to;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack_low, to->stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to->race_state, 0);
#endif
#ifdef EMULATION_ASSEMBLY
    dtrain_emulation_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
    arrived();
}

void fiber_main()
{
    arrived();
    run_threads();
    abort(); /* run_threads does not return */
}

fiber *create_fiber()
{
    fiber *f = new fiber;
    void *mapping = mmap(nullptr, guard_size + stack_size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED || mprotect(mapping, guard_size, PROT_NONE) != 0) {
        fprintf(stderr, "cuda emulation: no memory for the stack of a thread\n");
        abort();
    }
    f->mapping = static_cast<char *>(mapping);
    f->stack_low = f->mapping + guard_size;
    f->stack_bytes = stack_size;
    /* The tops are spread over the cache's sets: 32 lanes work at the same depth of their stacks. */
    char *top = f->mapping + guard_size + stack_size - (all_fibers.size() % 16) * 256;
#if defined(EMULATION_ASSEMBLY) && defined(__x86_64__)
    void **slots = reinterpret_cast<void **>(top - 16); /* as if fiber_main had been called */
    slots[0] = reinterpret_cast<void *>(fiber_main);
    f->stack_pointer = top - 16 - switch_frame;
#elif defined(EMULATION_ASSEMBLY)
    reinterpret_cast<void **>(top - switch_frame)[1] = reinterpret_cast<void *>(fiber_main);
    f->stack_pointer = top - switch_frame;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->mapping + guard_size;
    f->context.uc_stack.ss_size = size_t(top - (f->mapping + guard_size));
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
#endif
#ifdef __SANITIZE_THREAD__
    f->race_state = __tsan_create_fiber(0);
#endif
    all_fibers.push_back(f);
    return f;
}

fiber *take_fiber()
{
    if (free_fibers.empty()) return create_fiber();
    fiber *f = free_fibers.back();
    free_fibers.pop_back();
    return f;
}

/* After a failed kernel: nobody returns to the stacks of its threads. */
void destroy_fibers()
{
    for (fiber *f : all_fibers) {
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(f->mapping + guard_size, stack_size);
#endif
#ifdef __SANITIZE_THREAD__
        __tsan_destroy_fiber(f->race_state);
#endif
        munmap(f->mapping, guard_size + stack_size);
        delete f;
    }
    all_fibers.clear();
    free_fibers.clear();
}
} // namespace

/* ==== [2] Blocks ====
 * A worker fiber starts the threads of a block one after another as plain calls. A thread that waits
 * keeps the fiber, and another worker goes on. So a kernel without barriers costs a call a thread.
 *
 * Ready threads go before new ones, and the lanes of a warp that met go first of all: a warp runs as
 * far as it can before the next one starts. That is the interleaving that a missing block barrier
 * likes least. */

/* Names of static functions are in the symbol table of the program's file only. */
static std::string kernel_name(const void *kernel)
{
    char text[32];
    snprintf(text, sizeof text, "kernel at %p", kernel);
    std::string name = text;
#ifdef __ELF__
    Dl_info info;
    struct stat file_info;
    if (!dladdr(kernel, &info)) return name;
    int file = open("/proc/self/exe", O_RDONLY);
    if (file < 0 || fstat(file, &file_info) != 0) return name;
    size_t bytes = size_t(file_info.st_size);
    void *mapping = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (mapping == MAP_FAILED) return name;
    const char *image = static_cast<const char *>(mapping);
    const ElfW(Ehdr) *header = reinterpret_cast<const ElfW(Ehdr) *>(image);
    const ElfW(Shdr) *sections = reinterpret_cast<const ElfW(Shdr) *>(image + header->e_shoff);
    uintptr_t base = header->e_type == ET_DYN ? uintptr_t(info.dli_fbase) : 0;
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const ElfW(Sym) *symbols =
            reinterpret_cast<const ElfW(Sym) *>(image + sections[s].sh_offset);
        const char *strings = image + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            if ((symbols[i].st_info & 15) != STT_FUNC) continue;
            if (base + symbols[i].st_value != uintptr_t(kernel)) continue;
            int status;
            char *readable = abi::__cxa_demangle(strings + symbols[i].st_name, 0, 0, &status);
            name = readable ? readable : strings + symbols[i].st_name;
            free(readable);
        }
    }
    munmap(mapping, bytes);
#endif
    return name;
}

#ifdef __ELF__
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_dtrain_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_dtrain_shared[];
#endif

namespace
{
struct pending_copy {
    void *to;
    const void *from; /* NULL: zeros */
    unsigned group;
};

struct cuda_thread {
    uint3 index;
    unsigned linear;
    fiber *stack;
    cuda_thread *next;
    std::vector<pending_copy> copies;
    unsigned copy_group;
};

struct thread_list {
    cuda_thread *head = nullptr, *tail = nullptr;
    void push(cuda_thread *t)
    {
        t->next = nullptr;
        if (tail) tail->next = t;
        else head = t;
        tail = t;
    }
    cuda_thread *pop()
    {
        cuda_thread *t = head;
        head = t->next;
        if (!head) tail = nullptr;
        return t;
    }
    /* Puts all of first before this list. */
    void prepend(thread_list &first)
    {
        if (!first.head) return;
        first.tail->next = head;
        head = first.head;
        if (!tail) tail = first.tail;
        first = thread_list();
    }
};

/* The lanes of one mask that have come to one warp function. */
struct meeting {
    unsigned mask, arrived;
    int line;
    const char *name;
    thread_list lanes;
};
struct warp_state {
    void *slots[32]; /* what each waiting lane brought: a pointer into its own stack */
    std::vector<meeting> meetings;
};

const unsigned max_threads = 1024;

/* The one kernel that is running. */
struct grid_state {
    const void *kernel;
    const std::function<void()> *body;
    size_t shared_bytes;
    uint64_t blocks, next_block;
    std::vector<uint64_t> block_order; /* empty: in order of the index */
    bool blocks_reversed;
    std::vector<unsigned> thread_order; /* a permutation; warps stay together */
    std::vector<cuda_thread> threads;
    warp_state warps[max_threads / 32];
    unsigned count, started, live;
    thread_list ready, polling; /* polling: go on when nobody else can */
    thread_list waiting;        /* at the block barrier */
    unsigned waiting_count;
    int waiting_line;
    dtrain_emulation_vote vote, result;
    uint64_t polls;
    cuda_thread *current;
    cudaError_t error;
};
grid_state &grid = *new grid_state();

struct {
    int order = DTRAIN_EMULATION_FORWARD;
    uint64_t seed = 0;
} turns;

uint64_t next_random()
{
    uint64_t x = turns.seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
template <class T> void shuffle_items(T *items, size_t count)
{
    for (size_t i = count; i > 1; i--) std::swap(items[i - 1], items[next_random() % i]);
}

/* Ends the kernel: control goes back to the host and none of the kernel's stacks is used again. */
__attribute__((format(printf, 2, 3), noreturn)) void fail_kernel(cudaError_t error,
                                                                 const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (running == &home) {
        fprintf(stderr, "cuda emulation: device code called on the host: %s\n", text);
        abort();
    }
    explain("%s, block (%u,%u,%u): %s", kernel_name(grid.kernel).c_str(), blockIdx.x, blockIdx.y,
            blockIdx.z, text);
    grid.error = error;
    switch_to(&home);
    abort(); /* not reached */
}

/* Nobody can go on: says who waits where. (No objects here: this stack is never unwound.) */
[[noreturn]] void fail_diverged()
{
    char text[200];
    size_t used = 0;
    unsigned waiting = grid.waiting_count;
    text[0] = 0;
    if (grid.waiting_count)
        used = size_t(snprintf(text, sizeof text, " %u wait at the barrier of line %d,",
                               grid.waiting_count, grid.waiting_line));
    for (unsigned w = 0; w * 32 < grid.count; w++)
        for (const meeting &m : grid.warps[w].meetings) {
            waiting += unsigned(__builtin_popcount(m.arrived));
            if (used < sizeof text / 2)
                used += size_t(snprintf(text + used, sizeof text - used,
                                        " lanes %#x of warp %u (mask %#x) wait in %s of line %d,",
                                        m.arrived, w, m.mask, m.name, m.line));
        }
    fail_kernel(cudaErrorLaunchFailure, "threads have diverged:%s %u of %u have ended", text,
                grid.count - waiting, grid.count);
}

/* The current thread waits; its list entry is made. */
void suspend()
{
    cuda_thread *me = grid.current;
    me->stack = running;
    if (grid.ready.head) {
        cuda_thread *next = grid.ready.pop();
        if (next != me) switch_to(next->stack);
    } else if (grid.started < grid.count) {
        switch_to(take_fiber());
    } else if (grid.polling.head) {
        cuda_thread *next = grid.polling.pop();
        if (next != me) switch_to(next->stack);
    } else {
        fail_diverged();
    }
    grid.current = me;
    threadIdx = me->index;
}

/* All live threads have come. */
void release_barrier()
{
    grid.result = grid.vote;
    grid.vote = dtrain_emulation_vote{0, 0};
    grid.waiting_count = 0;
    grid.ready.prepend(grid.waiting);
}

/* Not memset: under AddressSanitizer the section has red zones, which memset must not touch. */
__attribute__((no_sanitize("address"))) void fill_shared()
{
#ifdef __ELF__
#ifdef __SANITIZE_ADDRESS__
    for (volatile unsigned char *p = __start_dtrain_shared; p < __stop_dtrain_shared; p++)
        *p = 0xff;
#else
    if (__start_dtrain_shared)
        memset(__start_dtrain_shared, 0xff, size_t(__stop_dtrain_shared - __start_dtrain_shared));
#endif
#endif
    if (grid.shared_bytes) memset(dtrain_emulation_dynamic_shared, 0xff, grid.shared_bytes);
}

const unsigned char canary = 0xff; /* what is read there is NaN */
const size_t canary_bytes = 64;
void check_canary()
{
    for (size_t i = 0; i < canary_bytes; i++)
        if (dtrain_emulation_dynamic_shared[grid.shared_bytes + i] != canary)
            fail_kernel(cudaErrorIllegalAddress,
                        "a write %zu bytes behind the %zu bytes of dynamic shared memory", i,
                        grid.shared_bytes);
}

bool start_block()
{
    if (grid.next_block == grid.blocks) return false;
    uint64_t index = grid.next_block++;
    if (grid.blocks_reversed) index = grid.blocks - 1 - index;
    if (!grid.block_order.empty()) index = grid.block_order[index];
    blockIdx.x = unsigned(index % gridDim.x);
    blockIdx.y = unsigned(index / gridDim.x % gridDim.y);
    blockIdx.z = unsigned(index / gridDim.x / gridDim.y);
    grid.started = 0;
    grid.live = grid.count;
    grid.polls = 0;
    fill_shared();
    return true;
}

/* What a worker fiber does, launch after launch. */
void run_threads()
{
    for (;;) {
        if (grid.ready.head) {
            free_fibers.push_back(running);
            switch_to(grid.ready.pop()->stack);
        } else if (grid.started < grid.count) {
            cuda_thread *t = &grid.threads[grid.thread_order[grid.started++]];
            t->copies.clear();
            t->copy_group = 0;
            grid.current = t;
            threadIdx = t->index;
            (*grid.body)();
            grid.live--;
            if (grid.live && grid.waiting_count == grid.live) release_barrier();
        } else if (grid.polling.head) {
            free_fibers.push_back(running);
            switch_to(grid.polling.pop()->stack);
        } else if (grid.live) {
            fail_diverged();
        } else {
            if (grid.shared_bytes) check_canary();
            if (!start_block()) {
                free_fibers.push_back(running);
                switch_to(&home);
            }
        }
    }
}

void set_turns()
{
    grid.blocks_reversed = turns.order == DTRAIN_EMULATION_REVERSE;
    grid.block_order.clear();
    grid.thread_order.resize(grid.count);
    for (unsigned i = 0; i < grid.count; i++)
        grid.thread_order[i] = turns.order == DTRAIN_EMULATION_REVERSE ? grid.count - 1 - i : i;
    if (turns.order != DTRAIN_EMULATION_SHUFFLED) return;
    grid.block_order.resize(grid.blocks);
    for (uint64_t i = 0; i < grid.blocks; i++) grid.block_order[i] = i;
    shuffle_items(grid.block_order.data(), grid.blocks);
    unsigned warps[max_threads / 32], warp_count = (grid.count + 31) / 32, filled = 0;
    for (unsigned w = 0; w < warp_count; w++) warps[w] = w;
    shuffle_items(warps, warp_count);
    for (unsigned w = 0; w < warp_count; w++) {
        unsigned first = warps[w] * 32, lanes = grid.count - first < 32 ? grid.count - first : 32;
        for (unsigned i = 0; i < lanes; i++) grid.thread_order[filled + i] = first + i;
        shuffle_items(&grid.thread_order[filled], lanes);
        filled += lanes;
    }
}

cudaError_t run_grid(const void *kernel, dim3 blocks, dim3 threads, size_t shared_bytes,
                     const std::function<void()> &body)
{
    grid.kernel = kernel;
    grid.body = &body;
    grid.shared_bytes = shared_bytes;
    gridDim = blocks;
    blockDim = threads;
    grid.blocks = uint64_t(blocks.x) * blocks.y * blocks.z;
    grid.next_block = 0;
    grid.count = threads.x * threads.y * threads.z;
    grid.error = cudaSuccess;
    grid.ready = grid.polling = grid.waiting = thread_list();
    grid.waiting_count = 0;
    grid.vote = dtrain_emulation_vote{0, 0};
    for (warp_state &w : grid.warps) w.meetings.clear();
    if (grid.threads.empty()) grid.threads.resize(max_threads);
    for (unsigned i = 0; i < grid.count; i++) {
        grid.threads[i].linear = i;
        grid.threads[i].index =
            uint3{i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    }
    set_turns();
    void *shared = nullptr;
    if (posix_memalign(&shared, 1024, shared_bytes + canary_bytes) != 0)
        return cudaErrorMemoryAllocation;
    dtrain_emulation_dynamic_shared = static_cast<unsigned char *>(shared);
    memset(dtrain_emulation_dynamic_shared + shared_bytes, canary, canary_bytes);
#ifdef __SANITIZE_THREAD__
    home.race_state = __tsan_get_current_fiber();
#endif
    start_block();
    switch_to(take_fiber());
    grid.current = nullptr;
    if (grid.error) destroy_fibers();
    free(shared);
    dtrain_emulation_dynamic_shared = nullptr;
    return grid.error;
}
} // namespace

dtrain_emulation_vote dtrain_emulation_barrier(int predicate, int line)
{
    if (grid.waiting_count && grid.waiting_line != line)
        fail_kernel(cudaErrorLaunchFailure,
                    "threads have diverged: %u wait at the barrier of line %d, thread (%u,%u,%u) "
                    "came to that of line %d",
                    grid.waiting_count, grid.waiting_line, threadIdx.x, threadIdx.y, threadIdx.z,
                    line);
    grid.waiting_line = line;
    grid.vote.threads++;
    grid.vote.votes += predicate != 0;
    grid.waiting.push(grid.current);
    if (++grid.waiting_count == grid.live) release_barrier();
    suspend();
    return grid.result;
}

/* A thread that polls a flag lets the others of its block set it. */
void dtrain_emulation_yield(void)
{
    if (++grid.polls > 20000000)
        fail_kernel(cudaErrorLaunchTimeout, "polls for what never comes (blocks run one by one)");
    grid.polling.push(grid.current);
    suspend();
}

void dtrain_emulation_trap(int line)
{
    fail_kernel(cudaErrorLaunchFailure, "__trap() in line %d, thread (%u,%u,%u)", line, threadIdx.x,
                threadIdx.y, threadIdx.z);
}

long long dtrain_emulation_clock(void)
{
    return std::chrono::steady_clock::now().time_since_epoch().count();
}

/* ==== [3] Warps ====
 * A lane brings a pointer to what it has on its stack and waits. The last lane of the mask to come
 * carries out the operation for all. */

namespace
{
/* slots[l] is NULL for lanes outside the mask (and for those that a short block does not have). */
typedef void (*warp_operation)(void *const *slots, unsigned lanes);

unsigned lane_index() { return grid.current->linear % 32; }

void meet(unsigned mask, int line, const char *name, void *slot, warp_operation operation)
{
    unsigned lane = lane_index(), first = grid.current->linear - lane;
    unsigned existing = grid.count - first >= 32 ? ~0u : (1u << (grid.count - first)) - 1;
    warp_state &warp = grid.warps[first / 32];
    meeting *m = nullptr;
    if (!(mask >> lane & 1))
        fail_kernel(cudaErrorLaunchFailure,
                    "lane %u calls %s of line %d with mask %#x without itself", lane, name, line,
                    mask);
    for (meeting &other : warp.meetings)
        if (other.mask == mask) m = &other;
    if (!m) {
        warp.meetings.push_back(meeting{mask, 0, line, name, thread_list()});
        m = &warp.meetings.back();
    }
    if (m->line != line)
        fail_kernel(
            cudaErrorLaunchFailure,
            "lanes of warp %u have diverged: lanes %#x wait in %s of line %d, lane %u came to "
            "%s of line %d",
            first / 32, m->arrived, m->name, m->line, lane, name, line);
    m->arrived |= 1u << lane;
    m->lanes.push(grid.current);
    warp.slots[lane] = slot;
    if (m->arrived == (mask & existing)) {
        void *slots[32];
        for (unsigned l = 0; l < 32; l++) slots[l] = m->arrived >> l & 1 ? warp.slots[l] : nullptr;
        if (operation) operation(slots, m->arrived);
        grid.ready.prepend(m->lanes);
        *m = warp.meetings.back();
        warp.meetings.pop_back();
    }
    suspend();
}

void need_whole_warp(const char *name, int line)
{
    if (grid.count - (grid.current->linear - lane_index()) < 32)
        fail_kernel(cudaErrorLaunchFailure, "%s of line %d in a warp of fewer than 32 threads",
                    name, line);
}

struct shuffle_slot {
    uint64_t bits, result;
    unsigned source;
};
void carry_out_shuffle(void *const *slots, unsigned)
{
    for (int l = 0; l < 32; l++) {
        shuffle_slot *mine = static_cast<shuffle_slot *>(slots[l]);
        if (!mine) continue;
        const shuffle_slot *source = static_cast<const shuffle_slot *>(slots[mine->source]);
        mine->result = source ? source->bits : ~uint64_t(0); /* undefined on a device: NaN here */
    }
}

struct ballot_slot {
    unsigned predicate, result;
};
void carry_out_ballot(void *const *slots, unsigned)
{
    unsigned votes = 0;
    for (int l = 0; l < 32; l++)
        if (slots[l] && static_cast<ballot_slot *>(slots[l])->predicate) votes |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (slots[l]) static_cast<ballot_slot *>(slots[l])->result = votes;
}

struct reduce_slot {
    int mode;
    int64_t value, result;
};
void carry_out_reduce(void *const *slots, unsigned lanes)
{
    const reduce_slot *first = static_cast<reduce_slot *>(slots[__builtin_ctz(lanes)]);
    int64_t total = first->mode == DTRAIN_EMULATION_SUM ? 0 : first->value;
    for (int l = 0; l < 32; l++) {
        if (!slots[l]) continue;
        int64_t value = static_cast<reduce_slot *>(slots[l])->value;
        if (first->mode == DTRAIN_EMULATION_SUM) total += value;
        else if (first->mode == DTRAIN_EMULATION_MIN ? value < total : value > total) total = value;
    }
    for (int l = 0; l < 32; l++)
        if (slots[l]) static_cast<reduce_slot *>(slots[l])->result = total;
}

float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
float float_of_bf16(uint16_t x) { return float_of_bits(uint32_t(x) << 16); }
float float_of_fp16(uint16_t h)
{
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf(float(fraction), -24);
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}
float float_of_half(uint32_t word, int which, bool bf16)
{
    uint16_t half = uint16_t(word >> (16 * which));
    return bf16 ? float_of_bf16(half) : float_of_fp16(half);
}

struct mma_slot {
    float *d;
    const uint32_t *a, *b;
    bool bf16;
};

/* d (16x8 over the warp) += A B; a[row][k], b[column][k]. Lane 4 g + t holds of d: (g, 2t), (g, 2t+1),
 * (g+8, 2t), (g+8, 2t+1). */
void multiply_fragments(void *const *slots, const float a[16][16], const float b[8][16], int depth)
{
    for (int l = 0; l < 32; l++) {
        mma_slot *lane = static_cast<mma_slot *>(slots[l]);
        for (int i = 0; i < 4; i++) {
            int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            float sum = 0;
            for (int k = 0; k < depth; k++) sum += a[row][k] * b[column][k];
            lane->d[i] += sum;
        }
    }
}

/* Of A lane 4 g + t holds in register r: row g + 8 (r % 2), columns 2t and 2t+1, + 8 (r / 2); of B
 * in register r: rows 2t and 2t+1, + 8 r, column g. */
void carry_out_mma_16816(void *const *slots, unsigned)
{
    float a[16][16], b[8][16];
    for (int l = 0; l < 32; l++) {
        const mma_slot *lane = static_cast<const mma_slot *>(slots[l]);
        int g = l / 4, t = l % 4;
        for (int half = 0; half < 2; half++) {
            for (int r = 0; r < 4; r++)
                a[g + r % 2 * 8][2 * t + half + r / 2 * 8] =
                    float_of_half(lane->a[r], half, lane->bf16);
            for (int r = 0; r < 2; r++)
                b[g][2 * t + half + r * 8] = float_of_half(lane->b[r], half, lane->bf16);
        }
    }
    multiply_fragments(slots, a, b, 16);
}

/* Of A lane 4 g + t holds in register r: row g + 8 (r % 2), column t + 4 (r / 2); of B in register r:
 * row t + 4 r, column g. */
void carry_out_mma_1688(void *const *slots, unsigned)
{
    float a[16][16], b[8][16];
    for (int l = 0; l < 32; l++) {
        const mma_slot *lane = static_cast<const mma_slot *>(slots[l]);
        int g = l / 4, t = l % 4;
        for (int r = 0; r < 4; r++)
            a[g + r % 2 * 8][t + r / 2 * 4] = float_of_bits(lane->a[r] & 0xffffe000u);
        for (int r = 0; r < 2; r++) b[g][t + r * 4] = float_of_bits(lane->b[r] & 0xffffe000u);
    }
    multiply_fragments(slots, a, b, 8);
}

struct ldmatrix_slot {
    uint32_t *r;
    int count;
    bool transposed;
    const unsigned char *row;
};

/* Lane l receives of matrix i the elements (l/4, 2(l%4)) and the one right of it; transposed:
 * (2(l%4), l/4) and the one below it. */
void carry_out_ldmatrix(void *const *slots, unsigned)
{
    for (int l = 0; l < 32; l++) {
        ldmatrix_slot *lane = static_cast<ldmatrix_slot *>(slots[l]);
        for (int i = 0; i < lane->count; i++) {
            uint16_t pair[2];
            for (int half = 0; half < 2; half++) {
                int row = l / 4, column = l % 4 * 2 + half;
                if (lane->transposed) std::swap(row, column);
                const ldmatrix_slot *owner = static_cast<ldmatrix_slot *>(slots[8 * i + row]);
                memcpy(&pair[half], owner->row + 2 * column, 2);
            }
            lane->r[i] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
        }
    }
}

bool is_shared(const void *pointer, size_t bytes)
{
    const unsigned char *p = static_cast<const unsigned char *>(pointer);
    const unsigned char *dynamic = dtrain_emulation_dynamic_shared;
    if (p >= dynamic && p + bytes <= dynamic + grid.shared_bytes) return true;
#ifdef __ELF__
    return p >= __start_dtrain_shared && p + bytes <= __stop_dtrain_shared;
#else
    return true;
#endif
}

void check_shared(const char *name, const void *pointer, int line)
{
    if (uintptr_t(pointer) % 16)
        fail_kernel(cudaErrorMisalignedAddress, "%s of line %d: %p is not a multiple of 16", name,
                    line, pointer);
    if (!is_shared(pointer, 16))
        fail_kernel(cudaErrorIllegalAddress, "%s of line %d: %p is not in shared memory", name,
                    line, pointer);
}
} // namespace

void dtrain_emulation_warp_barrier(unsigned mask, int line)
{
    meet(mask, line, "__syncwarp", nullptr, nullptr);
}

uint64_t dtrain_emulation_shuffle(int mode, unsigned mask, uint64_t bits, int operand, int width,
                                  int line)
{
    int lane = int(lane_index()), first = lane & ~(width - 1), source = 0;
    bool inside;
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail_kernel(cudaErrorLaunchFailure, "a shuffle of width %d in line %d", width, line);
    if (mode == DTRAIN_EMULATION_UP) source = lane - operand;
    else if (mode == DTRAIN_EMULATION_DOWN) source = lane + operand;
    else if (mode == DTRAIN_EMULATION_XOR) source = lane ^ operand;
    else source = first + (operand & (width - 1));
    inside = source < first + width && (source >= first || mode == DTRAIN_EMULATION_XOR);
    shuffle_slot slot = {bits, 0, unsigned(inside && source >= 0 ? source : lane)};
    meet(mask, line, "a shuffle", &slot, carry_out_shuffle);
    return slot.result;
}

unsigned dtrain_emulation_ballot(unsigned mask, int predicate, int line)
{
    ballot_slot slot = {predicate != 0, 0};
    meet(mask, line, "a vote", &slot, carry_out_ballot);
    return slot.result;
}

int64_t dtrain_emulation_reduce(int mode, unsigned mask, int64_t value, int line)
{
    reduce_slot slot = {mode, value, 0};
    meet(mask, line, "a reduction", &slot, carry_out_reduce);
    return slot.result;
}

void dtrain_emulation_mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16,
                                int line)
{
    need_whole_warp("mma", line);
    mma_slot slot = {d, a, b, bf16};
    meet(~0u, line, "mma", &slot, carry_out_mma_16816);
}

void dtrain_emulation_mma_1688_tf32(float d[4], const uint32_t a[4], const uint32_t b[2], int line)
{
    need_whole_warp("mma", line);
    mma_slot slot = {d, a, b, false};
    meet(~0u, line, "mma", &slot, carry_out_mma_1688);
}

void dtrain_emulation_ldmatrix(uint32_t *r, int count, bool transposed, const void *row, int line)
{
    ldmatrix_slot slot = {r, count, transposed, static_cast<const unsigned char *>(row)};
    if (count != 1 && count != 2 && count != 4)
        fail_kernel(cudaErrorLaunchFailure, "ldmatrix of %d matrices in line %d", count, line);
    need_whole_warp("ldmatrix", line);
    if (int(lane_index()) < 8 * count) check_shared("ldmatrix", row, line);
    meet(~0u, line, "ldmatrix", &slot, carry_out_ldmatrix);
}

void dtrain_emulation_cp_async_16(void *shared, const void *global, int bytes, int line)
{
    cuda_thread *t = grid.current;
    check_shared("cp.async", shared, line);
    if (bytes != 16 && bytes != 0)
        fail_kernel(cudaErrorLaunchFailure, "cp.async of %d bytes in line %d", bytes, line);
    if (bytes && uintptr_t(global) % 16)
        fail_kernel(cudaErrorMisalignedAddress, "cp.async of line %d: %p is not a multiple of 16",
                    line, global);
    memset(shared, 0xff, 16); /* from now on until the wait nobody may read it */
    t->copies.push_back(pending_copy{shared, bytes ? global : nullptr, t->copy_group});
}

void dtrain_emulation_cp_async_commit(void) { grid.current->copy_group++; }

void dtrain_emulation_cp_async_wait(int groups_left)
{
    cuda_thread *t = grid.current;
    size_t kept = 0;
    for (const pending_copy &copy : t->copies) {
        bool wait = int64_t(copy.group) + groups_left < int64_t(t->copy_group);
        if (!wait) t->copies[kept++] = copy;
        else if (copy.from) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    }
    t->copies.resize(kept);
}

/* ==== [4] Device ==== */

namespace
{
/* A place in a queue: everything up to it has run when done >= count. */
struct point {
    CUstream_st *stream = nullptr;
    uint64_t count = 0;
};
struct operation {
    std::function<bool()> run; /* called until it returns true */
    point after;               /* something in another stream that must have run */
    std::vector<point> also_after;
    bool of_event = false; /* touches no memory */
};
struct capture;
} // namespace

struct CUstream_st {
    int device = 0, priority = 0;
    bool alive = true, blocking = true, busy = false;
    std::deque<operation> queue;
    uint64_t queued = 0, done = 0;
    int polls = 0;
    std::shared_ptr<capture> capturing;
    std::vector<size_t> frontier; /* capturing: the nodes that the next node depends on */
};
struct CUevent_st {
    int device = 0;
    bool timed = true;
    point recorded;
    std::shared_ptr<double> milliseconds; /* written when the record runs */
    int polls = 0;
    std::shared_ptr<capture> captured;
    std::vector<size_t> frontier;
};
struct CUgraph_st {
    struct node {
        std::function<bool()> run; /* copied for each launch, with the state in it */
        std::vector<size_t> after;
    };
    std::vector<node> nodes;
    std::vector<std::shared_ptr<void>> held; /* released with the last copy */
};
struct CUgraphExec_st {
    std::shared_ptr<const CUgraph_st> graph;
};

namespace
{
struct capture {
    CUgraph_st graph;
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool invalid, ended;
    std::set<CUstream_st *> members;
};

enum memory_kind { DEVICE_MEMORY, PINNED_MEMORY, REGISTERED_MEMORY };
struct allocation {
    size_t bytes;
    memory_kind kind;
    int device;
};

const int max_devices = 16;
struct device_state {
    cudaError_t lost = cudaSuccess; /* sticky */
    CUstream_st legacy;             /* stream 0 */
    uint64_t bytes_alive = 0;
};

/* Everything the emulation knows; made on first use and never destroyed, so that the end of a program
 * may still free things in any order. */
struct machine_state {
    device_state devices[max_devices];
    int device_count = 1, major = 9, minor = 0, code_version = 0; /* 0: that of the device */
    uint64_t total_memory = uint64_t(8) << 30;
    int64_t memory_left = -1;
    bool eager = false;
    int64_t faults[DTRAIN_EMULATION_FAULT_COUNT] = {};
    dtrain_emulation_counters counters = {};
    std::map<uintptr_t, allocation> memory;
    std::set<CUstream_st *> streams; /* destroyed ones stay: points refer to them */
    std::set<CUevent_st *> events;
    std::set<CUgraph_st *> graphs;
    std::set<CUgraphExec_st *> executables;
    std::map<const void *, int> dynamic_limits;     /* cudaFuncSetAttribute */
    std::vector<std::shared_ptr<capture>> captures; /* that have begun and not ended */
    machine_state()
    {
        for (int i = 0; i < max_devices; i++) devices[i].legacy.device = i;
    }
};
machine_state &machine()
{
    static machine_state *state = new machine_state;
    return *state;
}

std::mutex lock;
/* A stream is not busy any more. */
std::condition_variable_any &progress = *new std::condition_variable_any;
thread_local int current_device;
thread_local cudaError_t last_error;
thread_local bool in_host_function;

/* What __shared__ arrays of a kernel take counts too. How much that is an emulation of the source does not know: a
 * KiB stands for it. */
const size_t shared_static = 1024;
const size_t shared_default = 48 * 1024 - shared_static;
size_t shared_limit()
{
    int capability = 10 * machine().major + machine().minor;
    if (capability >= 90) return 227 * 1024;
    if (capability == 80 || capability == 87) return 163 * 1024;
    if (capability >= 86) return 99 * 1024;
    return 64 * 1024;
}

/* Counts a fault down; true when its turn has come. */
bool strikes(dtrain_emulation_fault fault)
{
    int64_t &left = machine().faults[fault];
    return left > 0 && --left == 0;
}

cudaError_t driver_error()
{
    if (machine().faults[DTRAIN_EMULATION_NO_DRIVER]) return cudaErrorInsufficientDriver;
    if (machine().device_count == 0) return cudaErrorNoDevice;
    return cudaSuccess;
}

cudaError_t remember(cudaError_t error)
{
    if (error) last_error = error;
    return error;
}

device_state &this_device() { return machine().devices[current_device]; }

/* Every call of the runtime that needs a device goes through here. A failure of the device that shows
 * while the call waits is the call's result. */
template <class Body> cudaError_t runtime_call(Body body)
{
    std::lock_guard<std::mutex> hold(lock);
    cudaError_t error = driver_error();
    if (!error && in_host_function) error = cudaErrorNotPermitted;
    if (!error) error = this_device().lost;
    if (!error) error = body();
    if (!error) error = this_device().lost;
    return remember(error);
}

cudaError_t refuse(cudaError_t error, const char *text)
{
    explain("%s", text);
    return error;
}
} // namespace

extern "C" {
cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

/* A lost device stays lost: its error cannot be cleared. */
cudaError_t cudaPeekAtLastError(void)
{
    std::lock_guard<std::mutex> hold(lock);
    return this_device().lost ? this_device().lost : last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
#define DTRAIN_EMULATION_NAME(name, value, text) \
    case name: return #name;
        DTRAIN_EMULATION_ERRORS(DTRAIN_EMULATION_NAME)
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
#define DTRAIN_EMULATION_TEXT(name, value, text) \
    case name: return text;
        DTRAIN_EMULATION_ERRORS(DTRAIN_EMULATION_TEXT)
    }
    return "unrecognized error code";
}

cudaError_t cudaDriverGetVersion(int *version)
{
    std::lock_guard<std::mutex> hold(lock);
    *version = machine().faults[DTRAIN_EMULATION_NO_DRIVER] ? 0 : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    std::lock_guard<std::mutex> hold(lock);
    cudaError_t error = driver_error();
    *count = error ? 0 : machine().device_count;
    return remember(error);
}

cudaError_t cudaSetDevice(int device)
{
    std::lock_guard<std::mutex> hold(lock);
    cudaError_t error = driver_error();
    if (!error && (device < 0 || device >= machine().device_count)) error = cudaErrorInvalidDevice;
    if (!error) current_device = device;
    return remember(error);
}

cudaError_t cudaGetDevice(int *device)
{
    std::lock_guard<std::mutex> hold(lock);
    *device = current_device;
    return remember(driver_error());
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    std::lock_guard<std::mutex> hold(lock);
    const machine_state &m = machine();
    if (driver_error()) return remember(driver_error());
    if (device < 0 || device >= m.device_count) return remember(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Emulated CUDA device %d", device);
    memcpy(p->uuid.bytes, "dtrain emulated", 16);
    p->uuid.bytes[15] = char(device);
    p->totalGlobalMem = m.total_memory;
    p->sharedMemPerBlock = shared_default;
    p->sharedMemPerBlockOptin = shared_limit();
    p->sharedMemPerMultiprocessor = shared_limit() + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = int(max_threads);
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = int(max_threads);
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = m.major;
    p->minor = m.minor;
    p->multiProcessorCount = 4;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    p->streamPrioritiesSupported = p->hostRegisterSupported = 1;
    p->pciBusID = 0x10 + device;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (error) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrClockRate: *value = 1500000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrIntegrated: *value = p.integrated; break;
    case cudaDevAttrCanMapHostMemory: *value = p.canMapHostMemory; break;
    case cudaDevAttrConcurrentKernels: *value = p.concurrentKernels; break;
    case cudaDevAttrEccEnabled: *value = p.ECCEnabled; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrPciDeviceId: *value = p.pciDeviceID; break;
    case cudaDevAttrPciDomainId: *value = p.pciDomainID; break;
    case cudaDevAttrMemoryClockRate: *value = 2600000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrUnifiedAddressing: *value = p.unifiedAddressing; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrStreamPrioritiesSupported: *value = p.streamPrioritiesSupported; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = int(p.sharedMemPerMultiprocessor);
        break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrHostRegisterSupported: *value = p.hostRegisterSupported; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrIpcEventSupport: *value = 0; break;
    default: return remember(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return runtime_call([&] {
        *least = 0;
        *greatest = -5;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    return runtime_call([&] {
        if (device < 0 || device >= machine().device_count) return cudaErrorInvalidDevice;
        if (bytes < 13) return cudaErrorInvalidValue;
        snprintf(text, size_t(bytes), "0000:%02X:00.0", unsigned(0x10 + device));
        return cudaSuccess;
    });
}
} // extern "C"

/* ==== [5] Memory ==== */

namespace
{
/* The allocation that holds all of [pointer, pointer + bytes), or NULL. */
const allocation *find_memory(const void *pointer, size_t bytes)
{
    std::map<uintptr_t, allocation> &memory = machine().memory;
    uintptr_t address = uintptr_t(pointer);
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return nullptr;
    --next;
    if (address - next->first >= next->second.bytes) return nullptr; /* its end may be another's */
    return bytes <= next->second.bytes - (address - next->first) ? &next->second : nullptr;
}
bool is_device(const void *pointer, size_t bytes)
{
    const allocation *a = find_memory(pointer, bytes);
    return a && a->kind == DEVICE_MEMORY;
}

/* Kernels and copy engines may read and write it: device memory, or pinned host memory. */
bool is_known(const void *pointer, size_t bytes) { return find_memory(pointer, bytes) != nullptr; }

CUstream_st *find_stream(cudaStream_t stream);
void enqueue(CUstream_st *stream, std::function<void()> run);
void run_until(CUstream_st *stream, uint64_t count);
void run_device(int device);
bool forbidden_while_capturing();

cudaError_t allocate(void **pointer, size_t bytes, memory_kind kind)
{
    machine_state &m = machine();
    void *memory = nullptr;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
    if (strikes(DTRAIN_EMULATION_FAIL_ALLOCATION)) return cudaErrorMemoryAllocation;
    if (kind == DEVICE_MEMORY) {
        if (bytes > m.total_memory - this_device().bytes_alive) return cudaErrorMemoryAllocation;
        if (m.memory_left >= 0 && bytes > uint64_t(m.memory_left)) return cudaErrorMemoryAllocation;
    }
    if (posix_memalign(&memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    memset(memory, 0xff, bytes);
    m.memory[uintptr_t(memory)] = allocation{bytes, kind, current_device};
    m.counters.allocations++;
    if (kind == DEVICE_MEMORY) {
        if (m.memory_left >= 0) m.memory_left -= int64_t(bytes);
        this_device().bytes_alive += bytes;
        m.counters.allocations_alive++;
        m.counters.bytes_alive += int64_t(bytes);
        if (m.counters.bytes_alive > m.counters.peak_bytes)
            m.counters.peak_bytes = m.counters.bytes_alive;
    } else {
        m.counters.pinned_alive++;
    }
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t release(void *pointer, memory_kind kind)
{
    machine_state &m = machine();
    if (!pointer) return cudaSuccess;
    auto found = m.memory.find(uintptr_t(pointer));
    if (found == m.memory.end() || found->second.kind != kind)
        return refuse(cudaErrorInvalidValue,
                      "a pointer to free is not what such a call has returned");
    if (forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
    run_device(found->second.device); /* as cudaFree does */
    allocation freed = found->second;
    m.memory.erase(found);
    if (kind == DEVICE_MEMORY) {
        m.devices[freed.device].bytes_alive -= freed.bytes;
        m.counters.allocations_alive--;
        m.counters.bytes_alive -= int64_t(freed.bytes);
        if (m.memory_left >= 0) m.memory_left += int64_t(freed.bytes);
    } else {
        m.counters.pinned_alive--;
    }
    if (kind != REGISTERED_MEMORY) free(pointer);
    return cudaSuccess;
}

cudaError_t check_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (unsigned(kind) > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (bytes == 0) return cudaSuccess;
    if (!to || !from) return refuse(cudaErrorInvalidValue, "a copy from or to NULL");
    if (kind == cudaMemcpyDefault) {
        to_device = is_device(to, 0);
        from_device = is_device(from, 0);
    }
    if (to_device != is_device(to, 0) || (to_device && !is_device(to, bytes)))
        return refuse(cudaErrorInvalidValue, to_device ? "a copy's target is not in device memory"
                                                       : "a copy's target is not in host memory");
    if (from_device != is_device(from, 0) || (from_device && !is_device(from, bytes)))
        return refuse(cudaErrorInvalidValue, from_device ? "a copy's source is not in device memory"
                                                         : "a copy's source is not in host memory");
    return cudaSuccess;
}

/* As the device does: pageable memory is read before the call returns and written before it returns,
 * pinned and device memory when the stream comes to it. */
cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle,
                 bool wait)
{
    CUstream_st *stream = find_stream(handle);
    cudaError_t error = check_copy(to, from, bytes, kind);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (error) return error;
    if (bytes == 0) return cudaSuccess;
    if (wait && forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
    std::shared_ptr<std::vector<char>> staged;
    if (!stream->capturing && !is_known(from, bytes)) {
        const char *bytes_from = static_cast<const char *>(from);
        staged = std::make_shared<std::vector<char>>(bytes_from, bytes_from + bytes);
    }
    enqueue(stream, [=] {
        machine().counters.copies++;
        machine().counters.copied_bytes += int64_t(bytes);
        memmove(to, staged ? staged->data() : from, bytes);
    });
    if (!stream->capturing && (wait || !is_known(to, bytes))) {
        machine().counters.host_syncs++;
        run_until(stream, stream->queued);
    }
    return cudaSuccess;
}

cudaError_t set(void *pointer, int value, size_t bytes, cudaStream_t handle)
{
    CUstream_st *stream = find_stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (bytes == 0) return cudaSuccess;
    if (!is_known(pointer, bytes))
        return refuse(cudaErrorInvalidValue, "a range to set is not in device memory");
    enqueue(stream, [=] { memset(pointer, value, bytes); });
    return cudaSuccess;
}
} // namespace

extern "C" {
cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    return runtime_call([&] { return allocate(pointer, bytes, DEVICE_MEMORY); });
}
cudaError_t cudaFree(void *pointer)
{
    return runtime_call([&] { return release(pointer, DEVICE_MEMORY); });
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return runtime_call([&] { return allocate(pointer, bytes, PINNED_MEMORY); });
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    if (flags > 7) return remember(cudaErrorInvalidValue);
    return cudaMallocHost(pointer, bytes);
}
cudaError_t cudaFreeHost(void *pointer)
{
    return runtime_call([&] { return release(pointer, PINNED_MEMORY); });
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    return runtime_call([&] {
        if (!pointer || !bytes || flags > 15) return cudaErrorInvalidValue;
        auto next = machine().memory.lower_bound(uintptr_t(pointer));
        bool overlaps = next != machine().memory.end() && next->first < uintptr_t(pointer) + bytes;
        if (overlaps || is_known(pointer, 1)) return cudaErrorHostMemoryAlreadyRegistered;
        machine().memory[uintptr_t(pointer)] = allocation{bytes, REGISTERED_MEMORY, current_device};
        machine().counters.pinned_alive++;
        return cudaSuccess;
    });
}
cudaError_t cudaHostUnregister(void *pointer)
{
    return runtime_call([&] {
        auto found = machine().memory.find(uintptr_t(pointer));
        if (found == machine().memory.end() || found->second.kind != REGISTERED_MEMORY)
            return cudaErrorHostMemoryNotRegistered;
        return release(pointer, REGISTERED_MEMORY);
    });
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned int flags)
{
    return runtime_call([&] {
        const allocation *a = find_memory(host_pointer, 1);
        if (flags || !a || a->kind == DEVICE_MEMORY) return cudaErrorInvalidValue;
        *device_pointer = host_pointer;
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    return runtime_call([&] {
        const allocation *a = find_memory(pointer, 1);
        void *p = const_cast<void *>(pointer);
        if (!a) *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, p};
        else if (a->kind == DEVICE_MEMORY)
            *attributes = {cudaMemoryTypeDevice, a->device, p, nullptr};
        else *attributes = {cudaMemoryTypeHost, a->device, p, p};
        return cudaSuccess;
    });
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    return runtime_call([&] {
        machine_state &m = machine();
        *total_bytes = m.total_memory;
        *free_bytes = m.total_memory - this_device().bytes_alive;
        if (m.memory_left >= 0 && *free_bytes > uint64_t(m.memory_left))
            *free_bytes = uint64_t(m.memory_left);
        return cudaSuccess;
    });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return runtime_call([&] { return copy(to, from, bytes, kind, nullptr, true); });
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return runtime_call([&] { return copy(to, from, bytes, kind, stream, false); });
}
cudaError_t cudaMemset(void *pointer, int value, size_t bytes)
{
    return runtime_call([&] { return set(pointer, value, bytes, nullptr); });
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream)
{
    return runtime_call([&] { return set(pointer, value, bytes, stream); });
}
} // extern "C"

/* ==== [6] Streams ====
 * An operation runs when somebody waits for it or for something that follows it; by then everything
 * that it was ordered after has run, and as little else as possible. Dependencies point to what was
 * queued earlier, so that following them ends. */

namespace
{
const size_t max_queued = 1024; /* a device's queues are not endless either */
const int polls_before_progress = 3;

/* NULL: no such stream. */
CUstream_st *find_stream(cudaStream_t stream)
{
    if (!stream || stream == cudaStreamLegacy) return &this_device().legacy;
    if (!machine().streams.count(stream) || !stream->alive) return nullptr;
    return stream;
}

std::vector<CUstream_st *> device_streams(int device)
{
    std::vector<CUstream_st *> found(1, &machine().devices[device].legacy);
    for (CUstream_st *s : machine().streams)
        if (s->device == device && s->alive) found.push_back(s);
    return found;
}

/* As far as it goes; true when the stream has done `count`. A busy stream is another thread's, in a host
 * function, which runs without the lock. */
bool advance(CUstream_st *stream, uint64_t count)
{
    while (stream->done < count) {
        if (stream->busy) return false;
        operation &next = stream->queue.front();
        stream->busy = true;
        bool done = !next.after.stream || advance(next.after.stream, next.after.count);
        for (const point &p : next.also_after) done = done && advance(p.stream, p.count);
        if (done && next.run && !machine().devices[stream->device].lost) done = next.run();
        stream->busy = false;
        if (!done) return false;
        stream->queue.pop_front();
        stream->polls = 0;
        stream->done++;
        progress.notify_all();
    }
    return true;
}

/* While an operation waits for what only a peer can do, the other streams of the device go on. */
bool advance_device(CUstream_st *stream, uint64_t count)
{
    if (advance(stream, count)) return true;
    for (CUstream_st *s : device_streams(stream->device)) advance(s, s->queued);
    return stream->done >= count;
}

void run_until(CUstream_st *stream, uint64_t count)
{
    while (!advance_device(stream, count))
        progress.wait_for(lock, std::chrono::microseconds(50)); /* other threads may be the peers */
}

void run_device(int device)
{
    std::vector<CUstream_st *> streams = device_streams(device);
    if (turns.order == DTRAIN_EMULATION_REVERSE) std::reverse(streams.begin(), streams.end());
    if (turns.order == DTRAIN_EMULATION_SHUFFLED) shuffle_items(streams.data(), streams.size());
    for (CUstream_st *s : streams) run_until(s, s->queued);
}

void push(CUstream_st *stream, operation next)
{
    CUstream_st *legacy = &machine().devices[stream->device].legacy;
    if (stream == legacy) {
        for (CUstream_st *s : device_streams(stream->device))
            if (s != legacy && s->blocking && s->done < s->queued)
                next.also_after.push_back(point{s, s->queued});
    } else if (stream->blocking && legacy->done < legacy->queued) {
        next.also_after.push_back(point{legacy, legacy->queued});
    }
    stream->queue.push_back(std::move(next));
    stream->queued++;
    if (machine().eager) advance(stream, stream->queued);
    else if (stream->queue.size() > max_queued) run_until(stream, stream->done + 1);
}

void enqueue_step(CUstream_st *stream, std::function<bool()> run)
{
    if (stream->capturing) {
        std::vector<CUgraph_st::node> &nodes = stream->capturing->graph.nodes;
        nodes.push_back(CUgraph_st::node{std::move(run), stream->frontier});
        stream->frontier.assign(1, nodes.size() - 1);
        return;
    }
    operation next;
    next.run = std::move(run);
    push(stream, std::move(next));
}

void enqueue(CUstream_st *stream, std::function<void()> run)
{
    enqueue_step(stream, [run = std::move(run)] {
        run();
        return true;
    });
}

double now_milliseconds()
{
    return std::chrono::duration<double, std::milli>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

/* A call that is not allowed while somebody captures: in global mode nobody may make it, in
 * thread-local mode not the capturing thread. Such a call spoils the capture. */
bool forbidden_while_capturing()
{
    bool forbidden = false;
    for (const std::shared_ptr<capture> &c : machine().captures) {
        if (c->mode == cudaStreamCaptureModeRelaxed) continue;
        if (c->mode == cudaStreamCaptureModeThreadLocal && c->thread != std::this_thread::get_id())
            continue;
        c->invalid = forbidden = true;
    }
    if (forbidden) explain("a call that is not allowed while a stream is being captured");
    return forbidden;
}

cudaError_t spoil(CUstream_st *stream)
{
    stream->capturing->invalid = true;
    return refuse(cudaErrorStreamCaptureUnsupported, "a captured stream is waited for");
}

cudaError_t create_stream(cudaStream_t *stream, unsigned int flags, int priority)
{
    if (flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    CUstream_st *s = new CUstream_st;
    s->device = current_device;
    s->priority = priority;
    s->blocking = !(flags & cudaStreamNonBlocking);
    machine().streams.insert(s);
    machine().counters.streams_alive++;
    *stream = s;
    return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t event, cudaStream_t handle)
{
    CUstream_st *stream = find_stream(handle);
    if (!stream || !machine().events.count(event) || event->device != stream->device)
        return cudaErrorInvalidResourceHandle;
    event->captured = stream->capturing;
    event->frontier = stream->frontier;
    event->polls = 0;
    if (stream->capturing) return cudaSuccess;
    std::shared_ptr<double> time = std::make_shared<double>(0);
    event->milliseconds = time;
    event->recorded = point{stream, stream->queued + 1};
    operation next;
    next.of_event = true;
    next.run = [time] {
        *time = now_milliseconds();
        return true;
    };
    push(stream, std::move(next));
    return cudaSuccess;
}

cudaError_t wait_captured(CUstream_st *stream, cudaEvent_t event)
{
    if (!event->captured) {
        stream->capturing->invalid = true;
        return refuse(cudaErrorStreamCaptureIsolation,
                      "a captured stream waits for an event that was not captured");
    }
    if (event->captured->ended) return cudaErrorCapturedEvent;
    if (stream->capturing && stream->capturing != event->captured)
        return cudaErrorStreamCaptureMerge;
    if (!stream->capturing) {
        stream->capturing = event->captured;
        stream->capturing->members.insert(stream);
        stream->frontier.clear();
    }
    stream->frontier.insert(stream->frontier.end(), event->frontier.begin(), event->frontier.end());
    return cudaSuccess;
}

cudaError_t wait_event(cudaStream_t handle, cudaEvent_t event, unsigned int flags)
{
    CUstream_st *stream = find_stream(handle);
    if (!stream || !machine().events.count(event)) return cudaErrorInvalidResourceHandle;
    if (flags) return cudaErrorInvalidValue;
    if (stream->capturing || event->captured) return wait_captured(stream, event);
    if (!event->recorded.stream) return cudaSuccess; /* never recorded: nothing to wait for */
    operation next;
    next.of_event = true;
    next.after = event->recorded;
    push(stream, std::move(next));
    return cudaSuccess;
}

cudaError_t query(CUstream_st *stream, uint64_t count, int *polls)
{
    if (stream->done >= count) return cudaSuccess;
    if (++*polls < polls_before_progress) return cudaErrorNotReady;
    return advance_device(stream, count) ? cudaSuccess : cudaErrorNotReady;
}
} // namespace

extern "C" {
cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return runtime_call([&] { return create_stream(stream, cudaStreamDefault, 0); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return runtime_call([&] { return create_stream(stream, flags, 0); });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    return runtime_call([&] { return create_stream(stream, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return runtime_call([&] {
        if (!stream || !find_stream(stream)) return cudaErrorInvalidResourceHandle;
        if (stream->capturing) return spoil(stream);
        run_until(stream, stream->queued);
        stream->alive = false;
        machine().counters.streams_alive--;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        if (s->capturing) return spoil(s);
        machine().counters.host_syncs++;
        run_until(s, s->queued);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        if (s->capturing) return spoil(s);
        return query(s, s->queued, &s->polls);
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    return runtime_call([&] { return wait_event(stream, event, flags); });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user_data)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        if (!function) return cudaErrorInvalidValue;
        enqueue(s, [=] {
            lock.unlock(); /* it may take a mutex that another thread holds while it calls us */
            in_host_function = true;
            function(user_data);
            in_host_function = false;
            lock.lock();
        });
        return cudaSuccess;
    });
}

bool dtrain_emulation_enqueue_step(cudaStream_t stream, bool (*step)(void *), const void *state,
                                   size_t bytes)
{
    const char *from = static_cast<const char *>(state);
    std::vector<char> copy(from, from + bytes);
    return runtime_call([&] {
               CUstream_st *s = find_stream(stream);
               if (!s) return cudaErrorInvalidResourceHandle;
               enqueue_step(s, [step, copy]() mutable { return step(copy.data()); });
               return cudaSuccess;
           }) == cudaSuccess;
}

bool dtrain_emulation_retain(cudaStream_t stream, void (*release)(void *), void *user)
{
    bool captured = false;
    runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        captured = s && s->capturing;
        if (captured) s->capturing->graph.held.emplace_back(user, release);
        return cudaSuccess;
    });
    return captured;
}

int64_t dtrain_emulation_advance(void)
{
    int64_t queued = 0;
    runtime_call([&] {
        for (CUstream_st *s : device_streams(current_device)) {
            for (const operation &o : s->queue) queued += !o.of_event;
            advance(s, s->queued);
        }
        return cudaSuccess;
    });
    return queued;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return runtime_call([&] {
        if (forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
        machine().counters.host_syncs++;
        run_device(current_device);
        return cudaSuccess;
    });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    return runtime_call([&] {
        if (flags & ~unsigned(cudaEventBlockingSync | cudaEventDisableTiming))
            return cudaErrorInvalidValue;
        *event = new CUevent_st;
        (*event)->device = current_device;
        (*event)->timed = !(flags & cudaEventDisableTiming);
        machine().events.insert(*event);
        machine().counters.events_alive++;
        return cudaSuccess;
    });
}
cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return runtime_call([&] {
        if (!machine().events.erase(event)) return cudaErrorInvalidResourceHandle;
        machine().counters.events_alive--;
        delete event;
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return runtime_call([&] { return record_event(event, stream); });
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return runtime_call([&] {
        if (!machine().events.count(event)) return cudaErrorInvalidResourceHandle;
        if (event->captured) return cudaErrorCapturedEvent;
        if (forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
        if (!event->recorded.stream) return cudaSuccess;
        return query(event->recorded.stream, event->recorded.count, &event->polls);
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return runtime_call([&] {
        if (!machine().events.count(event)) return cudaErrorInvalidResourceHandle;
        if (event->captured) return cudaErrorCapturedEvent;
        if (forbidden_while_capturing()) return cudaErrorStreamCaptureUnsupported;
        machine().counters.host_syncs++;
        if (event->recorded.stream) run_until(event->recorded.stream, event->recorded.count);
        return cudaSuccess;
    });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return runtime_call([&] {
        for (cudaEvent_t e : {start, end})
            if (!machine().events.count(e) || !e->timed || !e->recorded.stream)
                return cudaErrorInvalidResourceHandle;
        for (cudaEvent_t e : {start, end})
            if (e->recorded.stream->done < e->recorded.count) return cudaErrorNotReady;
        *milliseconds = float(*end->milliseconds - *start->milliseconds);
        return cudaSuccess;
    });
}
} // extern "C"

/* ==== [7] Graphs ====
 * Captured operations become nodes that depend on what their stream did before and on the events it
 * waited for. Replay picks among the nodes that may run by the chosen order, not by the order of the
 * capture: a missing event wait shows. */

namespace
{
/* One launch of a graph. */
struct graph_run {
    bool begun = false;
    CUgraph_st graph; /* a copy: what steps keep in their state is of this launch */
    std::vector<size_t> missing, ready;
    std::vector<std::vector<size_t>> followers;
};

void begin_run(graph_run &r, const CUgraph_st &graph)
{
    size_t count = graph.nodes.size();
    machine().counters.graph_launches++;
    r.begun = true;
    r.graph = graph;
    r.missing.resize(count);
    r.followers.resize(count);
    for (size_t i = 0; i < count; i++) {
        r.missing[i] = graph.nodes[i].after.size();
        for (size_t dependency : graph.nodes[i].after) r.followers[dependency].push_back(i);
        if (!r.missing[i]) r.ready.push_back(i);
    }
}

/* Every node that can run now; true when all have run. */
bool replay(graph_run &r, int device)
{
    std::vector<size_t> &ready = r.ready, unfinished;
    while (!ready.empty() && !machine().devices[device].lost) {
        size_t pick = 0; /* the lowest index */
        for (size_t i = 1; i < ready.size(); i++)
            if ((ready[i] < ready[pick]) == (turns.order == DTRAIN_EMULATION_FORWARD)) pick = i;
        if (turns.order == DTRAIN_EMULATION_SHUFFLED) pick = next_random() % ready.size();
        size_t node = ready[pick];
        ready.erase(ready.begin() + long(pick));
        if (!r.graph.nodes[node].run()) {
            unfinished.push_back(node);
            continue;
        }
        for (size_t follower : r.followers[node])
            if (--r.missing[follower] == 0) ready.push_back(follower);
    }
    ready.insert(ready.end(), unfinished.begin(), unfinished.end());
    return ready.empty() || machine().devices[device].lost;
}

/* Whether the captured stream, at its end, comes after every node. */
bool is_joined(const CUgraph_st &graph, const std::vector<size_t> &frontier)
{
    std::vector<bool> reached(graph.nodes.size(), false);
    for (size_t i : frontier) reached[i] = true;
    for (size_t i = graph.nodes.size(); i-- > 0;)
        if (!reached[i]) return false; /* nodes depend on lower ones only */
        else
            for (size_t dependency : graph.nodes[i].after) reached[dependency] = true;
    return true;
}

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode)
{
    CUstream_st *stream = find_stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream == &this_device().legacy) return cudaErrorStreamCaptureUnsupported;
    if (stream->capturing) return cudaErrorIllegalState;
    stream->capturing = std::make_shared<capture>();
    stream->capturing->origin = stream;
    stream->capturing->mode = mode;
    stream->capturing->thread = std::this_thread::get_id();
    stream->capturing->invalid = stream->capturing->ended = false;
    stream->capturing->members.insert(stream);
    stream->frontier.clear();
    machine().captures.push_back(stream->capturing);
    return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t handle, cudaGraph_t *graph)
{
    CUstream_st *stream = find_stream(handle);
    machine_state &m = machine();
    *graph = nullptr;
    if (!stream) return cudaErrorInvalidResourceHandle;
    std::shared_ptr<capture> c = stream->capturing;
    if (!c) return cudaErrorIllegalState;
    if (c->origin != stream) return cudaErrorStreamCaptureUnmatched;
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
        return cudaErrorStreamCaptureWrongThread;
    bool joined = is_joined(c->graph, stream->frontier);
    c->ended = true;
    for (CUstream_st *s : c->members) {
        s->capturing.reset();
        s->frontier.clear();
    }
    m.captures.erase(std::find(m.captures.begin(), m.captures.end(), c));
    std::vector<std::shared_ptr<void>> held; /* events of the capture live on, and it with them */
    held.swap(c->graph.held);
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined)
        return refuse(cudaErrorStreamCaptureUnjoined,
                      "a stream that joined the capture was not waited for");
    *graph = new CUgraph_st(c->graph);
    (*graph)->held = std::move(held);
    m.graphs.insert(*graph);
    m.counters.graphs_alive++;
    return cudaSuccess;
}
} // namespace

extern "C" {
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return runtime_call([&] { return begin_capture(stream, mode); });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    return runtime_call([&] { return end_capture(stream, graph); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        if (!s->capturing) *status = cudaStreamCaptureStatusNone;
        else if (s->capturing->invalid) *status = cudaStreamCaptureStatusInvalidated;
        else *status = cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long flags)
{
    return runtime_call([&] {
        *executable = nullptr;
        if (!machine().graphs.count(graph) || flags) return cudaErrorInvalidValue;
        *executable = new CUgraphExec_st{std::make_shared<const CUgraph_st>(*graph)};
        machine().executables.insert(*executable);
        machine().counters.graphs_alive++;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s || !machine().executables.count(executable)) return cudaErrorInvalidResourceHandle;
        std::shared_ptr<const CUgraph_st> graph = executable->graph;
        int device = s->device;
        enqueue_step(s, [graph, device, run = graph_run()]() mutable {
            if (!run.begun) begin_run(run, *graph);
            return replay(run, device);
        });
        return cudaSuccess;
    });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    return runtime_call([&] {
        if (!machine().executables.erase(executable)) return cudaErrorInvalidValue;
        machine().counters.graphs_alive--;
        delete executable;
        return cudaSuccess;
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    return runtime_call([&] {
        if (!machine().graphs.erase(graph)) return cudaErrorInvalidValue;
        machine().counters.graphs_alive--;
        delete graph;
        return cudaSuccess;
    });
}
} // extern "C"

/* ==== [8] Launch ==== */

namespace
{
cudaError_t check_launch(const void *kernel, dim3 grid_size, dim3 block, size_t shared_bytes)
{
    std::map<const void *, int> &limits = machine().dynamic_limits;
    size_t limit = limits.count(kernel) ? size_t(limits[kernel]) : shared_default;
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (machine().faults[DTRAIN_EMULATION_NO_KERNEL_IMAGE]) return cudaErrorNoKernelImageForDevice;
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > max_threads || block.z > 64)
        return refuse(cudaErrorInvalidConfiguration, "a block has 1 to 1024 threads");
    if (grid_size.x == 0 || grid_size.y == 0 || grid_size.z == 0 || grid_size.x > 0x7fffffffu ||
        grid_size.y > 65535 || grid_size.z > 65535)
        return refuse(cudaErrorInvalidConfiguration,
                      "a grid has 1 to 2^31-1, 1 to 65535 and 1 to 65535 blocks");
    if (shared_bytes > limit)
        return refuse(cudaErrorInvalidValue, "more dynamic shared memory than the kernel may use: "
                                             "cudaFuncSetAttribute raises the limit of 48 KiB");
    return cudaSuccess;
}
} // namespace

cudaError_t dtrain_emulation_launch_body(const void *kernel, dim3 grid_size, dim3 block,
                                         size_t shared_bytes, cudaStream_t stream,
                                         std::function<void()> thread_body)
{
    return runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        cudaError_t error = check_launch(kernel, grid_size, block, shared_bytes);
        if (error) return error;
        int device = s->device;
        enqueue(s, [=, body = std::move(thread_body)] {
            machine().counters.kernels++;
            cudaError_t failure = strikes(DTRAIN_EMULATION_LOSE_DEVICE)
                                      ? cudaErrorLaunchFailure
                                      : run_grid(kernel, grid_size, block, shared_bytes, body);
            if (failure) machine().devices[device].lost = failure;
        });
        return cudaSuccess;
    });
}

extern "C" {
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    return runtime_call([&] {
        if (!kernel) return cudaErrorInvalidDeviceFunction;
        if (machine().faults[DTRAIN_EMULATION_NO_KERNEL_IMAGE])
            return cudaErrorNoKernelImageForDevice;
        if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
            return value < -1 || value > 100 ? cudaErrorInvalidValue : cudaSuccess;
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
            size_t(value) > shared_limit())
            return cudaErrorInvalidValue;
        machine().dynamic_limits[kernel] = value;
        return cudaSuccess;
    });
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    return runtime_call([&] {
        std::map<const void *, int> &limits = machine().dynamic_limits;
        if (!kernel) return cudaErrorInvalidDeviceFunction;
        if (machine().faults[DTRAIN_EMULATION_NO_KERNEL_IMAGE])
            return cudaErrorNoKernelImageForDevice;
        memset(attributes, 0, sizeof *attributes);
        attributes->maxThreadsPerBlock = int(max_threads);
        attributes->numRegs = 32;
        attributes->ptxVersion = attributes->binaryVersion =
            machine().code_version ? machine().code_version
                                   : 10 * machine().major + machine().minor;
        attributes->maxDynamicSharedSizeBytes =
            limits.count(kernel) ? limits[kernel] : int(shared_default);
        return cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel,
                                                          int block_size, size_t dynamic_bytes)
{
    return runtime_call([&] {
        if (!kernel) return cudaErrorInvalidDeviceFunction;
        if (block_size < 1 || block_size > int(max_threads)) return cudaErrorInvalidValue;
        int by_threads = 2048 / ((block_size + 31) / 32 * 32);
        int by_memory = int((shared_limit() + 1024) / (dynamic_bytes + 1024));
        *blocks = by_threads < by_memory ? by_threads : by_memory;
        if (*blocks > 32) *blocks = 32;
        return cudaSuccess;
    });
}

/* ---- What tests ask for ---- */

void dtrain_emulation_set_order(int order, uint64_t seed)
{
    std::lock_guard<std::mutex> hold(lock);
    turns.order = order;
    turns.seed = seed;
}
void dtrain_emulation_set_eager(int eager)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().eager = eager != 0;
}
void dtrain_emulation_set_quiet(int value)
{
    std::lock_guard<std::mutex> hold(lock);
    quiet = value != 0;
}
const char *dtrain_emulation_message(void) { return message; }
void dtrain_emulation_set_device_count(int count)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().device_count = count < max_devices ? count : max_devices;
}
void dtrain_emulation_set_capability(int major, int minor)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().major = major;
    machine().minor = minor;
}
void dtrain_emulation_set_code_version(int version)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().code_version = version;
}
void dtrain_emulation_set_total_memory(uint64_t bytes)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().total_memory = bytes;
}
void dtrain_emulation_set_memory_left(int64_t bytes)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().memory_left = bytes;
}
void dtrain_emulation_inject(dtrain_emulation_fault fault, int64_t n)
{
    std::lock_guard<std::mutex> hold(lock);
    machine().faults[fault] = n;
}

void dtrain_emulation_reset(void)
{
    std::lock_guard<std::mutex> hold(lock);
    machine_state &m = machine();
    machine_state fresh;
    m.device_count = fresh.device_count;
    m.major = fresh.major;
    m.minor = fresh.minor;
    m.code_version = fresh.code_version;
    m.total_memory = fresh.total_memory;
    m.memory_left = fresh.memory_left;
    m.eager = fresh.eager;
    memset(m.faults, 0, sizeof m.faults);
    for (device_state &device : m.devices) device.lost = cudaSuccess;
    turns.order = DTRAIN_EMULATION_FORWARD;
    turns.seed = 0;
    quiet = false;
    message[0] = 0;
    last_error = cudaSuccess;
}

void dtrain_emulation_get_counters(dtrain_emulation_counters *counters)
{
    std::lock_guard<std::mutex> hold(lock);
    machine_state &m = machine();
    *counters = m.counters;
    counters->operations_queued = 0;
    for (int d = 0; d < m.device_count; d++)
        for (CUstream_st *s : device_streams(d))
            counters->operations_queued += int64_t(s->queue.size());
}
} // extern "C"

/* ==== [9] cublasLt ==== */

struct cublasLtContext {
    int device;
};
struct dtrain_emulation_matmul {
    int32_t compute = CUBLAS_COMPUTE_32F, scale = CUDA_R_32F,
            pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N, trans_c = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t bias_stride = 0, aux_ld = 0, aux_stride = 0;
    int32_t sm_count = 0, aux_type = -1, bias_type = -1;
    int8_t fast_accumulation = 0;
};
struct dtrain_emulation_layout {
    uint32_t type = 0;
    int32_t order = CUBLASLT_ORDER_COL, batch = 1;
    uint64_t rows = 0, columns = 0;
    int64_t ld = 0, stride = 0;
};
struct dtrain_emulation_preference {
    uint64_t workspace = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment[4] = {256, 256, 256, 256}; /* promised for A, B, C, D */
};

namespace
{
typedef dtrain_emulation_matmul matmul_desc;
typedef dtrain_emulation_layout layout_desc;

struct attribute {
    int number;
    size_t offset, bytes;
};
#define EMULATION_FIELD(number, type, field)               \
    {                                                      \
        number, offsetof(type, field), sizeof(type::field) \
    }
const attribute matmul_attributes[] = {
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, matmul_desc, compute),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, matmul_desc, scale),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, matmul_desc, pointer_mode),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_TRANSA, matmul_desc, trans_a),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_TRANSB, matmul_desc, trans_b),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_TRANSC, matmul_desc, trans_c),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, matmul_desc, epilogue),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, matmul_desc, bias),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, matmul_desc, bias_stride),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matmul_desc, aux),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, matmul_desc, aux_ld),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, matmul_desc, aux_stride),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, matmul_desc, sm_count),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, matmul_desc, aux_type),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_FAST_ACCUM, matmul_desc, fast_accumulation),
    EMULATION_FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, matmul_desc, bias_type),
};
const attribute layout_attributes[] = {
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, layout_desc, type),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, layout_desc, order),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, layout_desc, rows),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, layout_desc, columns),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_LD, layout_desc, ld),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, layout_desc, batch),
    EMULATION_FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout_desc, stride),
};
const attribute preference_attributes[] = {
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, dtrain_emulation_preference,
                    reductions),
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, dtrain_emulation_preference,
                    workspace),
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, dtrain_emulation_preference,
                    alignment[0]),
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, dtrain_emulation_preference,
                    alignment[1]),
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, dtrain_emulation_preference,
                    alignment[2]),
    EMULATION_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, dtrain_emulation_preference,
                    alignment[3]),
};

template <size_t N>
cublasStatus_t set_attribute(const attribute (&table)[N], void *object, int number,
                             const void *value, size_t bytes)
{
    for (const attribute &a : table) {
        if (a.number != number) continue;
        if (!object || !value || bytes != a.bytes) return CUBLAS_STATUS_INVALID_VALUE;
        memcpy(static_cast<char *>(object) + a.offset, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
template <size_t N>
cublasStatus_t get_attribute(const attribute (&table)[N], const void *object, int number,
                             void *value, size_t bytes, size_t *written)
{
    for (const attribute &a : table) {
        if (a.number != number) continue;
        if (!object || (bytes ? !value || bytes != a.bytes : !written))
            return CUBLAS_STATUS_INVALID_VALUE;
        if (bytes) memcpy(value, static_cast<const char *>(object) + a.offset, bytes);
        if (written) *written = a.bytes;
        return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

template <class T> cublasStatus_t create_object(T **object)
{
    std::lock_guard<std::mutex> hold(lock);
    if (!object) return CUBLAS_STATUS_INVALID_VALUE;
    *object = new T();
    machine().counters.cublas_alive++;
    return CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t destroy_object(T *object)
{
    std::lock_guard<std::mutex> hold(lock);
    if (object) machine().counters.cublas_alive--;
    delete object;
    return CUBLAS_STATUS_SUCCESS;
}

/* One product, as it was when cublasLtMatmul was called. */
struct product {
    matmul_desc desc;
    layout_desc a, b, c, d;
    const void *a_data, *b_data, *c_data;
    void *d_data;
    float alpha, beta;
    const void *device_alpha, *device_beta; /* used instead in device pointer mode */
    void *workspace;
    size_t workspace_bytes;
    uint64_t m() const { return d.rows; }
    uint64_t n() const { return d.columns; }
    uint64_t k() const { return desc.trans_a ? a.rows : a.columns; }
};

size_t type_bytes(uint32_t type) { return type == CUDA_R_32F ? 4 : 2; }
bool has_aux(const matmul_desc &desc) { return (desc.epilogue & 128) != 0; }
bool has_relu_mask(const matmul_desc &desc) { return has_aux(desc) && (desc.epilogue & (2 | 8)); }
bool has_bias(const matmul_desc &desc) { return (desc.epilogue & (4 | 16 | 256 | 512)) != 0; }

/* Who asks for an algorithm expects a refusal: nothing is printed then. */
bool only_asking = false;

cublasStatus_t unsupported(const char *text)
{
    if (!only_asking) explain("cublasLt: %s", text);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t invalid(const char *text)
{
    explain("cublasLt: %s", text);
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t check_types(const product &p)
{
    uint32_t in = p.a.type, out = p.d.type;
    bool fast = p.desc.compute == CUBLAS_COMPUTE_32F_FAST_16F ||
                p.desc.compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
                p.desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!fast && p.desc.compute != CUBLAS_COMPUTE_32F &&
        p.desc.compute != CUBLAS_COMPUTE_32F_PEDANTIC)
        return unsupported("unknown compute type");
    for (const layout_desc *l : {&p.a, &p.b, &p.c, &p.d}) {
        if (l->type != CUDA_R_32F && l->type != CUDA_R_16F && l->type != CUDA_R_16BF)
            return unsupported("types are fp32, fp16 and bf16");
        if (l->order != CUBLASLT_ORDER_COL) return unsupported("matrices are column-major");
    }
    if (p.desc.scale != CUDA_R_32F) return unsupported("the scale type is fp32");
    if (p.b.type != in || p.c.type != out || (out != in && out != CUDA_R_32F))
        return unsupported("A and B have one type, C and D have that type or fp32");
    if (fast && in != CUDA_R_32F) return unsupported("fast compute types are for fp32 matrices");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_shapes(const product &p)
{
    bool ta = p.desc.trans_a != CUBLAS_OP_N, tb = p.desc.trans_b != CUBLAS_OP_N;
    if (unsigned(p.desc.trans_a) > 2 || unsigned(p.desc.trans_b) > 2)
        return invalid("unknown transpose");
    if (p.desc.trans_c != CUBLAS_OP_N) return unsupported("C is not transposed");
    if ((ta ? p.a.columns : p.a.rows) != p.m() || (tb ? p.b.rows : p.b.columns) != p.n() ||
        (tb ? p.b.columns : p.b.rows) != p.k() || p.c.rows != p.m() || p.c.columns != p.n())
        return invalid("the shapes of A, B, C and D do not fit together");
    if (p.m() == 0 || p.n() == 0 || p.k() == 0) return invalid("an empty matrix");
    for (const layout_desc *l : {&p.a, &p.b, &p.c, &p.d}) {
        if (l->ld < int64_t(l->rows)) return invalid("a leading dimension below the rows");
        if (l->batch < 1 || l->batch != p.d.batch) return invalid("different batch counts");
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* What the documentation asks of epilogues: 16-byte alignment, and with an auxiliary matrix of 16-bit
 * elements sizes in multiples of 8. */
cublasStatus_t check_epilogue(const product &p)
{
    static const uint32_t known[] = {1,  2,  4,   6,   130, 134, 136, 152,
                                     32, 36, 160, 164, 192, 208, 256, 512};
    const matmul_desc &desc = p.desc;
    if (std::find(std::begin(known), std::end(known), desc.epilogue) == std::end(known))
        return unsupported("unknown epilogue");
    if (desc.epilogue >= 256 && p.d.batch > 1)
        return unsupported("bias gradients of A or B are for single products");
    if (has_bias(desc) && desc.bias_type >= 0 && uint32_t(desc.bias_type) != p.d.type)
        return unsupported("the bias has D's type");
    if (has_bias(desc) && uintptr_t(desc.bias) % 16)
        return unsupported("the bias is not 16-byte aligned");
    if (!has_aux(desc)) return CUBLAS_STATUS_SUCCESS;
    if (uintptr_t(desc.aux) % 16) return unsupported("the auxiliary matrix is not 16-byte aligned");
    if (desc.aux_ld < int64_t(p.m())) return invalid("the auxiliary leading dimension is below m");
    if (desc.aux_ld % (has_relu_mask(desc) ? 128 : 8))
        return unsupported("the auxiliary leading dimension is not a multiple of 8 (ReLU: 128)");
    if (desc.aux_type >= 0 && uint32_t(desc.aux_type) != p.d.type)
        return unsupported("the auxiliary matrix has D's type");
    if (type_bytes(p.a.type) == 2) {
        if (p.m() % 8 || p.n() % 8 || p.k() % 8)
            return unsupported("with an auxiliary matrix m, n and k are multiples of 8");
        for (const layout_desc *l : {&p.a, &p.b, &p.c, &p.d})
            if (l->ld % 8)
                return unsupported(
                    "with an auxiliary matrix leading dimensions are multiples of 8");
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_product(const product &p)
{
    cublasStatus_t status = check_types(p);
    if (!status) status = check_shapes(p);
    if (!status) status = check_epilogue(p);
    return status;
}

/* An algorithm is good for one problem: data = {problem, workspace, alignments of A to D, place in
 * the list of proposals}. */
uint64_t problem_number(const product &p)
{
    uint64_t parts[] = {p.m(),
                        p.n(),
                        p.k(),
                        uint64_t(p.d.batch),
                        uint64_t(p.a.ld),
                        uint64_t(p.b.ld),
                        uint64_t(p.c.ld),
                        uint64_t(p.d.ld),
                        p.a.type,
                        p.d.type,
                        p.desc.epilogue,
                        uint64_t(p.desc.trans_a),
                        uint64_t(p.desc.trans_b),
                        uint64_t(p.desc.compute)};
    uint64_t number = 1469598103934665603u;
    for (uint64_t part : parts) number = (number ^ part) * 1099511628211u;
    return number;
}

cublasStatus_t check_algorithm(const product &p, const cublasLtMatmulAlgo_t *algo)
{
    const void *pointers[4] = {p.a_data, p.b_data, p.c_data, p.d_data};
    if (algo && algo->data[0] != problem_number(p))
        return invalid("the algorithm was found for another problem");
    for (int i = 0; i < 4; i++) {
        size_t alignment = algo ? algo->data[2 + i] : type_bytes(i < 2 ? p.a.type : p.d.type);
        if (p.desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && alignment < 16) alignment = 16;
        if (alignment && uintptr_t(pointers[i]) % alignment)
            return unsupported("a matrix is less aligned than the algorithm was told (or than "
                               "epilogues need: 16 bytes)");
    }
    if (algo && algo->data[1] > p.workspace_bytes) return invalid("the workspace is too small");
    if (algo && algo->data[1] && uintptr_t(p.workspace) % 16)
        return invalid("the workspace is not aligned");
    return CUBLAS_STATUS_SUCCESS;
}

uint16_t bf16_of_float(float x)
{
    uint32_t bits = dtrain_emulation_bits<uint32_t>(x);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
uint16_t fp16_of_float(float x)
{
    uint32_t bits = dtrain_emulation_bits<uint32_t>(x), sign = bits >> 16 & 0x8000,
             size = bits & 0x7fffffff;
    if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00); /* 65520 and more: infinity */
    if (size < 0x38800000) return uint16_t(sign | uint32_t(lrintf(ldexpf(fabsf(x), 24))));
    return uint16_t(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10)));
}
float load_value(const void *data, int64_t index, uint32_t type)
{
    if (type == CUDA_R_32F) return static_cast<const float *>(data)[index];
    uint16_t half = static_cast<const uint16_t *>(data)[index];
    return type == CUDA_R_16BF ? float_of_bf16(half) : float_of_fp16(half);
}
void store_value(void *data, int64_t index, uint32_t type, float x)
{
    if (type == CUDA_R_32F) static_cast<float *>(data)[index] = x;
    else
        static_cast<uint16_t *>(data)[index] =
            type == CUDA_R_16BF ? bf16_of_float(x) : fp16_of_float(x);
}
float round_input(float x, int32_t compute)
{
    if (compute == CUBLAS_COMPUTE_32F_FAST_16BF) return float_of_bf16(bf16_of_float(x));
    if (compute == CUBLAS_COMPUTE_32F_FAST_16F) return float_of_fp16(fp16_of_float(x));
    if (compute == CUBLAS_COMPUTE_32F_FAST_TF32)
        return float_of_bits((dtrain_emulation_bits<uint32_t>(x) + 0x1000) & 0xffffe000u);
    return x;
}

float gelu(float x)
{
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * x * (1 + t);
}
float gelu_slope(float x)
{
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

/* op(X), rows contiguous in each column, as double. */
std::vector<double> load_matrix(const void *data, const layout_desc &l, bool transposed,
                                int64_t batch, int32_t compute)
{
    int64_t rows = int64_t(transposed ? l.columns : l.rows);
    int64_t columns = int64_t(transposed ? l.rows : l.columns);
    std::vector<double> x(size_t(rows * columns));
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = 0; i < rows; i++) {
            int64_t index = batch * l.stride + (transposed ? j + i * l.ld : i + j * l.ld);
            x[size_t(i + j * rows)] = round_input(load_value(data, index, l.type), compute);
        }
    return x;
}

/* v = alpha AB + beta C at row i, column j; what D gets. aux is of this batch. */
float apply_epilogue(const product &p, float v, int64_t i, int64_t j, int64_t batch)
{
    const matmul_desc &desc = p.desc;
    int64_t at = batch * desc.aux_stride + i + j * desc.aux_ld;
    if (desc.epilogue & 4) v += load_value(desc.bias, batch * desc.bias_stride + i, p.d.type);
    if (has_relu_mask(desc)) {
        unsigned char *byte = static_cast<unsigned char *>(desc.aux) + at / 8;
        int bit = 1 << at % 8;
        if (desc.epilogue & 8) return *byte & bit ? v : 0;
        *byte = static_cast<unsigned char>((*byte & ~bit) | (v > 0 ? bit : 0));
    } else if (desc.epilogue & 64) {
        return v * gelu_slope(load_value(desc.aux, at, p.d.type));
    } else if (has_aux(desc)) {
        store_value(desc.aux, at, p.d.type, v);
    }
    if (desc.epilogue & 2) return v > 0 ? v : 0;
    if (desc.epilogue & 32) return gelu(v);
    return v;
}

void multiply_batch(const product &p, int64_t batch)
{
    const matmul_desc &desc = p.desc;
    int64_t m = int64_t(p.m()), n = int64_t(p.n()), k = int64_t(p.k());
    std::vector<double> a = load_matrix(p.a_data, p.a, desc.trans_a != 0, batch, desc.compute);
    std::vector<double> b = load_matrix(p.b_data, p.b, desc.trans_b != 0, batch, desc.compute);
    std::vector<double> column(static_cast<size_t>(m)), gradient(size_t(m > n ? m : n), 0.0);
    float alpha = p.device_alpha ? *static_cast<const float *>(p.device_alpha) : p.alpha;
    float beta = p.device_beta ? *static_cast<const float *>(p.device_beta) : p.beta;
    for (int64_t j = 0; j < n; j++) {
        std::fill(column.begin(), column.end(), 0.0);
        for (int64_t t = 0; t < k; t++) {
            double factor = b[size_t(t + j * k)];
            for (int64_t i = 0; i < m; i++) column[size_t(i)] += a[size_t(i + t * m)] * factor;
        }
        for (int64_t i = 0; i < m; i++) {
            float v = alpha * float(column[size_t(i)]);
            if (beta != 0)
                v += beta * load_value(p.c_data, batch * p.c.stride + i + j * p.c.ld, p.c.type);
            v = apply_epilogue(p, v, i, j, batch);
            if (desc.epilogue & 16) gradient[size_t(i)] += v;
            store_value(p.d_data, batch * p.d.stride + i + j * p.d.ld, p.d.type, v);
        }
    }
    if (!(desc.epilogue & (16 | 256 | 512))) return;
    for (int64_t t = 0; t < k; t++) {
        for (int64_t i = 0; i < m && desc.epilogue & 256; i++)
            gradient[size_t(i)] += a[size_t(i + t * m)];
        for (int64_t j = 0; j < n && desc.epilogue & 512; j++)
            gradient[size_t(j)] += b[size_t(t + j * k)];
    }
    for (int64_t i = 0; i < (desc.epilogue & 512 ? n : m); i++)
        store_value(desc.bias, batch * desc.bias_stride + i, p.d.type, float(gradient[size_t(i)]));
}

bool matrix_is_known(const void *data, const layout_desc &l)
{
    int64_t elements = (l.batch - 1) * l.stride + int64_t(l.columns - 1) * l.ld + int64_t(l.rows);
    return is_known(data, size_t(elements) * type_bytes(l.type));
}

cudaError_t run_product(const product &p)
{
    const matmul_desc &desc = p.desc;
    size_t bias_count =
        size_t((p.d.batch - 1) * desc.bias_stride) + (desc.epilogue & 512 ? p.n() : p.m());
    size_t aux_count =
        size_t((p.d.batch - 1) * desc.aux_stride + int64_t(p.n() - 1) * desc.aux_ld) + p.m();
    size_t aux_bytes = has_relu_mask(desc) ? (aux_count + 7) / 8 : aux_count * type_bytes(p.d.type);
    bool known = matrix_is_known(p.a_data, p.a) && matrix_is_known(p.b_data, p.b) &&
                 matrix_is_known(p.d_data, p.d) && (!p.c_data || matrix_is_known(p.c_data, p.c)) &&
                 (!has_bias(desc) || is_known(desc.bias, bias_count * type_bytes(p.d.type))) &&
                 (!has_aux(desc) || is_known(desc.aux, aux_bytes)) &&
                 (!p.workspace_bytes || is_known(p.workspace, p.workspace_bytes));
    if (!known)
        return refuse(cudaErrorIllegalAddress, "cublasLtMatmul: a matrix, vector or the workspace "
                                               "reaches beyond its allocation");
    if (p.workspace_bytes) memset(p.workspace, 0xff, p.workspace_bytes);
    for (int64_t batch = 0; batch < p.d.batch; batch++) multiply_batch(p, batch);
    return cudaSuccess;
}

/* The first algorithm offered stands for one that splits k and adds up partial results in a workspace
 * of this size; the second needs none. */
const uint64_t split_workspace = 32768;
} // namespace

extern "C" {
const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}
const char *cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    cudaError_t error = runtime_call([] { return cudaSuccess; });
    if (error) return CUBLAS_STATUS_NOT_INITIALIZED;
    return create_object(handle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy_object(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    cublasStatus_t status = create_object(desc);
    if (status) return status;
    (*desc)->compute = compute;
    (*desc)->scale = scale;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroy_object(desc); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    return set_attribute(matmul_attributes, desc, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, void *value,
                                              size_t bytes, size_t *written)
{
    return get_attribute(matmul_attributes, desc, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld)
{
    cublasStatus_t status = create_object(layout);
    if (status) return status;
    (*layout)->type = type;
    (*layout)->rows = rows;
    (*layout)->columns = columns;
    (*layout)->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    return destroy_object(layout);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes)
{
    return set_attribute(layout_attributes, layout, attribute, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                void *value, size_t bytes, size_t *written)
{
    return get_attribute(layout_attributes, layout, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    return create_object(preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    return destroy_object(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    return set_attribute(preference_attributes, preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    std::lock_guard<std::mutex> hold(lock);
    if (!handle || !desc || !a || !b || !c || !d || !preference || requested < 1 || !results ||
        !found)
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    machine().counters.heuristics++;
    if (machine().faults[DTRAIN_EMULATION_NO_HEURISTIC]) return CUBLAS_STATUS_NOT_SUPPORTED;
    product p = {};
    p.desc = *desc;
    p.a = *a, p.b = *b, p.c = *c, p.d = *d;
    only_asking = true;
    cublasStatus_t status = check_product(p);
    for (uint32_t alignment : preference->alignment)
        if (!status && desc->epilogue != CUBLASLT_EPILOGUE_DEFAULT && alignment < 16)
            status = unsupported("epilogues need matrices of 16-byte alignment");
    only_asking = false;
    if (status) return status;
    for (int i = 0; i < 2 && *found < requested; i++) {
        const int64_t asked = machine().faults[DTRAIN_EMULATION_WORKSPACE];
        uint64_t workspace = i > 0 ? 0 : asked ? uint64_t(asked) : split_workspace;
        if (workspace > preference->workspace) continue;
        if (i == 0 && !(preference->reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) continue;
        cublasLtMatmulHeuristicResult_t &result = results[(*found)++];
        memset(&result, 0, sizeof result);
        result.algo.data[0] = problem_number(p);
        result.algo.data[1] = result.workspaceSize = workspace;
        for (int x = 0; x < 4; x++) result.algo.data[2 + x] = preference->alignment[x];
        result.algo.data[6] = uint64_t(i);
        result.state = CUBLAS_STATUS_SUCCESS;
        result.wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (!handle || !desc || !a_layout || !b_layout || !c_layout || !d_layout || !alpha || !beta ||
        !a || !b || !d)
        return CUBLAS_STATUS_INVALID_VALUE;
    cudaError_t error = runtime_call([&] {
        CUstream_st *s = find_stream(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        bool on_device = desc->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
        product p = {*desc, *a_layout, *b_layout, *c_layout, *d_layout,
                     a,     b,         c,         d,         0,
                     0,     nullptr,   nullptr,   workspace, algo ? size_t(algo->data[1]) : 0};
        if (on_device) p.device_alpha = alpha, p.device_beta = beta;
        else
            p.alpha = *static_cast<const float *>(alpha),
            p.beta = *static_cast<const float *>(beta);
        status = check_product(p);
        product offered = p;
        offered.workspace_bytes = workspace_bytes;
        if (!status) status = check_algorithm(offered, algo);
        if (!status && (on_device || p.beta != 0) && !c) status = invalid("C is NULL");
        if (!status && (d == a || d == b)) status = invalid("D is A or B");
        if (!status && ((has_bias(p.desc) && !p.desc.bias) || (has_aux(p.desc) && !p.desc.aux)))
            status = invalid("the epilogue's bias or auxiliary pointer is NULL");
        if (!status && algo &&
            algo->data[6] < uint64_t(machine().faults[DTRAIN_EMULATION_REFUSE_MATMUL])) {
            machine().counters.refused_matmuls++;
            status = unsupported("the algorithm that was proposed is refused, as asked for");
        }
        if (!status && strikes(DTRAIN_EMULATION_FAIL_MATMUL))
            status = CUBLAS_STATUS_EXECUTION_FAILED;
        if (status) return cudaSuccess;
        int device = s->device;
        enqueue(s, [p, device] {
            machine().counters.matmuls++;
            machine().devices[device].lost = run_product(p);
        });
        return cudaSuccess;
    });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : status;
}

int nvtxRangePushA(const char *name)
{
    std::lock_guard<std::mutex> hold(lock);
    if (!name || !name[0]) return -1;
    machine().counters.ranges++;
    return int(machine().counters.open_ranges++);
}

int nvtxRangePop(void)
{
    std::lock_guard<std::mutex> hold(lock);
    return int(--machine().counters.open_ranges);
}
} // extern "C"
