// cuda_on_cpu.h: enough of CUDA to run vlm.cu as plain C++ on a machine without a GPU, and to find its faults there.
//
//     g++ -x c++ -DCUDA_ON_CPU -include test/cuda_on_cpu.h -fno-strict-aliasing ... vlm.cu
//
// The model. A block's threads are fibers: each has a stack, and runs until it waits for others. The scheduler below
// goes round the fibers that can run; when none can, it looks what they wait for. A warp operation (shuffle, vote, mma,
// __syncwarp) happens once all lanes of its mask have come to it; __syncthreads ends once all threads have. Blocks run
// one after the other, on one thread of the host. A stream is a list of things to do, done when the host synchronises:
// so whoever forgets to, sees the old bytes.
//
// What it finds, with a line that says who and where, and exit status 86:
//   barrier and warp divergence (threads that wait at different places, or for one that has left), shuffles from lanes
//   outside the mask, launches over a limit, copies that leave an allocation or are misaligned, host pointers given to
//   kernels, device memory touched by the host (it is closed to it, by mprotect), addresses outside an allocation.
// By the values that come out: shared and device memory begin as NaN. Copies with cp.async land at once or as late as
// they may, and threads, warps and blocks run in another order, by the seed in CUDA_ON_CPU_SEED (0: in order).
// With AddressSanitizer and UBSan: shared memory overrun, array bounds, misaligned vector loads.
// With CUDA_ON_CPU_RACES (compile with -fsanitize=thread, link with test/cuda/races.c instead): two threads that touch
// the same bytes of shared or device memory, one writing, without a barrier between them, whatever the order was.
//
// Not modelled: time, bank conflicts, weak memory order, the rounding inside a tensor core (here: exact, rounded once).
#pragma once
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// ---------------------------------------------------------------------------------------------
// The language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

static dim3 threadIdx, blockIdx, blockDim, gridDim; // of the fiber that runs: the scheduler sets them

using std::max;
using std::min;
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <typename To, typename From> static inline To cuda_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(uint32_t u) { return cuda_bits<float>(u); }
static inline uint32_t __float_as_uint(float f) { return cuda_bits<uint32_t>(f); }

// Byte i of the result is the byte of y:x that nibble i of `selector` names.
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

// To nearest even; NaN becomes the one NaN that the hardware makes.
static inline uint32_t cuda_round_bf16(float f) {
    uint32_t u = __float_as_uint(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// ---------------------------------------------------------------------------------------------
// Faults

struct CudaState;
enum CudaWait { READY, AT_BARRIER, AT_WARP, LEFT };
enum CudaOp { WARP_SYNC, SHUFFLE, BALLOT, MMA };

struct CudaCopy {
    void *to;
    const void *from;
    int bytes, group;
    bool valid;
};

// A thread of the block that runs.
struct CudaThread {
    void *sp;    // its stack pointer while it waits
    char *stack; // lowest address
    void *fake;  // AddressSanitizer's record of it
    CudaWait wait;
    CudaOp op; // for AT_WARP: what, among whom, with what
    unsigned mask;
    const void *in[3];
    void *out;
    int from; // lane that a shuffle reads
    const char *file;
    int line;
    int group; // number of the cp.async group being filled
    std::vector<CudaCopy> copies;
    uint32_t barriers, warp_barriers; // passed, for the race detector
};

struct CudaAllocation {
    char *base;
    size_t bytes, mapped;
    bool device;
};

typedef int cudaError_t;
typedef struct CudaState *cudaStream_t;
typedef int *cudaEvent_t;

static struct CudaState {
    std::vector<CudaThread> threads;
    std::vector<char *> stacks; // of thread 0, 1, ...: kept from block to block
    int now = -1;               // the thread that runs, -1: the host or the scheduler
    void *scheduler_sp, *scheduler_fake;
    const void *host_stack;
    size_t host_stack_bytes;
    const std::function<void()> *body;
    char *shared;
    size_t shared_bytes;
    uint64_t random = 1;
    int seed;
    bool started, launched;
    uint32_t launch, block; // how many so far
    std::vector<std::function<void()>> queue;
    std::vector<CudaAllocation> allocations;
    std::set<const void *> large_shared; // kernels that asked for more than 48 KB
} cuda_state;

[[noreturn]] static void cuda_fault(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int n = dprintf(2, "cuda_on_cpu: %s", text);
    if (cuda_state.now >= 0)
        n = dprintf(2, " (block %u,%u, thread %d of %zu)", blockIdx.x, blockIdx.y, cuda_state.now,
                    cuda_state.threads.size());
    n = dprintf(2, "\n");
    _exit(n > 0 ? 86 : 87);
}

static inline uint32_t cuda_random() { // 0 for seed 0
    if (!cuda_state.seed) return 0;
    cuda_state.random = cuda_state.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(cuda_state.random >> 33);
}

// ---------------------------------------------------------------------------------------------
// Races: test/cuda/races.c, if it takes part

#ifdef CUDA_ON_CPU_RACES
extern "C" {
void cuda_races_now(int thread, uint32_t launch, uint32_t block, uint32_t barriers, uint32_t warp_barriers);
void cuda_races_watch(const void *base, size_t bytes, int device);
void cuda_races_touch(const void *p, size_t bytes, int write);
extern const char __executable_start;
void cuda_races_fault(const char *memory, const char *how, int other, const void *pc) {
    cuda_fault("race on %s memory: %s, the earlier by thread %d; addr2line: %#lx", memory, how, other,
               (unsigned long)((const char *)pc - &__executable_start));
}
}
#else
static inline void cuda_races_now(int, uint32_t, uint32_t, uint32_t, uint32_t) {}
static inline void cuda_races_watch(const void *, size_t, int) {}
static inline void cuda_races_touch(const void *, size_t, int) {}
#endif

// ---------------------------------------------------------------------------------------------
// Fibers: cuda_switch(&mine, other) saves the registers that a call must keep on this stack and goes on with the other.

static constexpr size_t CUDA_STACK = 256 << 10;
extern "C" void cuda_switch(void **save, void *load);
#if defined(__x86_64__)
asm(".text\n.globl cuda_switch\ncuda_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
enum { CUDA_SAVED = 6 }; // words below the return address
#elif defined(__aarch64__)
asm(".text\n.globl cuda_switch\ncuda_switch:\n"
    "sub sp, sp, #160\n stp d8, d9, [sp]\n stp d10, d11, [sp, #16]\n stp d12, d13, [sp, #32]\n"
    "stp d14, d15, [sp, #48]\n stp x19, x20, [sp, #64]\n stp x21, x22, [sp, #80]\n stp x23, x24, [sp, #96]\n"
    "stp x25, x26, [sp, #112]\n stp x27, x28, [sp, #128]\n stp x29, x30, [sp, #144]\n"
    "mov x2, sp\n str x2, [x0]\n mov sp, x1\n"
    "ldp d8, d9, [sp]\n ldp d10, d11, [sp, #16]\n ldp d12, d13, [sp, #32]\n ldp d14, d15, [sp, #48]\n"
    "ldp x19, x20, [sp, #64]\n ldp x21, x22, [sp, #80]\n ldp x23, x24, [sp, #96]\n ldp x25, x26, [sp, #112]\n"
    "ldp x27, x28, [sp, #128]\n ldp x29, x30, [sp, #144]\n add sp, sp, #160\n ret\n");
enum { CUDA_SAVED = 19 };
#else
#error "cuda_switch() wants a few lines of assembly for this processor"
#endif

// From the scheduler to thread `t`, and back. AddressSanitizer is told of each change of stacks.
static void cuda_resume(int t) {
    CudaState &c = cuda_state;
    c.now = t, threadIdx = dim3(t, 0, 0);
    cuda_races_now(t, c.launch, c.block, c.threads[t].barriers, c.threads[t].warp_barriers);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&c.scheduler_fake, c.threads[t].stack, CUDA_STACK);
#endif
    cuda_switch(&c.scheduler_sp, c.threads[t].sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(c.scheduler_fake, NULL, NULL);
#endif
    c.now = -1;
    cuda_races_now(-1, 0, 0, 0, 0);
}

static void cuda_yield() {
    CudaState &c = cuda_state;
    CudaThread &t = c.threads[c.now];
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(t.wait == LEFT ? NULL : &t.fake, c.host_stack, c.host_stack_bytes);
#endif
    cuda_switch(&t.sp, c.scheduler_sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(t.fake, &c.host_stack, &c.host_stack_bytes);
#endif
}

static void cuda_thread_main() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, &cuda_state.host_stack, &cuda_state.host_stack_bytes);
#endif
    (*cuda_state.body)();
    cuda_state.threads[cuda_state.now].wait = LEFT;
    cuda_yield();
    abort();
}

static void cuda_thread_begin(CudaThread &t, size_t number) {
    auto &stacks = cuda_state.stacks;
    while (stacks.size() <= number) {
        void *p = mmap(NULL, CUDA_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) cuda_fault("no memory for stacks");
        mprotect(p, 4096, PROT_NONE); // an overflow stops here
        stacks.push_back((char *)p);
    }
    t.stack = stacks[number];
    void **top = (void **)(t.stack + CUDA_STACK);
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(t.stack + 4096, CUDA_STACK - 4096);
#endif
#if defined(__x86_64__)
    top[-1] = NULL, top[-2] = (void *)cuda_thread_main; // as after a call: 8 below a multiple of 16
    t.sp = top - 2 - CUDA_SAVED;
#else
    top[-1] = (void *)cuda_thread_main; // x30
    t.sp = top - 1 - CUDA_SAVED;
#endif
    t.wait = READY, t.group = 0, t.barriers = t.warp_barriers = 0;
    t.copies.clear();
}

// ---------------------------------------------------------------------------------------------
// Barriers and warp operations

static void cuda_wait(CudaWait wait, const char *file, int line) {
    CudaThread &t = cuda_state.threads[cuda_state.now];
    t.wait = wait, t.file = file, t.line = line;
    cuda_yield();
}

static inline void __syncthreads(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    cuda_wait(AT_BARRIER, file, line);
}

static CudaThread &cuda_warp_op(CudaOp op, unsigned mask, const char *file, int line) {
    CudaThread &t = cuda_state.threads[cuda_state.now];
    if (!(mask >> cuda_state.now % 32 & 1)) cuda_fault("%s:%d: a lane outside the mask %08x", file, line, mask);
    t.op = op, t.mask = mask;
    return t;
}

static inline void __syncwarp(unsigned mask = ~0u, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    cuda_warp_op(WARP_SYNC, mask, file, line);
    cuda_wait(AT_WARP, file, line);
}

template <typename T> static T cuda_shuffle(unsigned mask, T v, int from, const char *file, int line) {
    static_assert(sizeof(T) <= 8);
    uint64_t in = 0, out = 0;
    memcpy(&in, &v, sizeof v);
    CudaThread &t = cuda_warp_op(SHUFFLE, mask, file, line);
    if (!(mask >> from & 1)) cuda_fault("%s:%d: shuffle from lane %d outside the mask %08x", file, line, from, mask);
    t.in[0] = &in, t.out = &out, t.from = from;
    cuda_wait(AT_WARP, file, line);
    memcpy(&v, &out, sizeof v);
    return v;
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T v, int lane, const char *file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
    return cuda_shuffle(mask, v, lane & 31, file, line);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T v, int bits, const char *file = __builtin_FILE(),
                                int line = __builtin_LINE()) {
    return cuda_shuffle(mask, v, (cuda_state.now ^ bits) & 31, file, line);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T v, int d, const char *file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
    int lane = cuda_state.now % 32;
    return cuda_shuffle(mask, v, lane >= d ? lane - d : lane, file, line);
}
static inline unsigned __ballot_sync(unsigned mask, bool vote, const char *file = __builtin_FILE(),
                                     int line = __builtin_LINE()) {
    unsigned out;
    CudaThread &t = cuda_warp_op(BALLOT, mask, file, line);
    t.in[0] = &vote, t.out = &out;
    cuda_wait(AT_WARP, file, line);
    return out;
}

// c += a b. The layout is that of the PTX ISA's figures "Matrix fragments for mma.m16n8k16": test/cuda/
// holds it against CuTe's.
static inline void cuda_mma_16816(float c[4], const uint32_t a[4], const uint32_t b[2],
                                  const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    CudaThread &t = cuda_warp_op(MMA, ~0u, file, line);
    t.in[0] = a, t.in[1] = b, t.out = c;
    cuda_wait(AT_WARP, file, line);
}

static float cuda_bf16_of(const void *registers, int i) {
    uint32_t word = ((const uint32_t *)registers)[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

static void cuda_do_mma(CudaThread *warp) {
    static float a[16][16], b[8][16];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; i++) {
            int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
            a[row][in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = cuda_bf16_of(warp[lane].in[0], i);
        }
        for (int i = 0; i < 4; i++)
            b[group][in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)] = cuda_bf16_of(warp[lane].in[1], i);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = (lane >> 2) + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + (i & 1);
            double sum = ((float *)warp[lane].out)[i];
            for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[column][k];
            ((float *)warp[lane].out)[i] = (float)sum;
        }
}

static void cuda_do_warp(CudaThread *warp, unsigned mask, CudaOp op) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && op == BALLOT) votes |= (unsigned)*(const bool *)warp[i].in[0] << i;
    if (op == MMA) cuda_do_mma(warp);
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (op == SHUFFLE) memcpy(warp[i].out, warp[warp[i].from].in[0], 8);
        if (op == BALLOT) *(unsigned *)warp[i].out = votes;
        warp[i].wait = READY, warp[i].warp_barriers += op == WARP_SYNC;
    }
}

// If a warp operation of this warp has all its lanes, do it. Otherwise false, and in `missing` a lane that is waited
// for.
static bool cuda_try_warp(CudaThread *warp, int n, int *waiting, int *missing) {
    for (int i = 0; i < n; i++) {
        CudaThread &t = warp[i];
        if (t.wait != AT_WARP) continue;
        bool all = true;
        for (int j = 0; j < 32 && all; j++)
            if (t.mask >> j & 1)
                if (j >= n || warp[j].wait != AT_WARP || warp[j].op != t.op || warp[j].line != t.line ||
                    warp[j].mask != t.mask)
                    all = false, *waiting = i, *missing = j;
        if (all) return cuda_do_warp(warp, t.mask, t.op), true;
    }
    return false;
}

static const char *cuda_where(const CudaThread &t) {
    static char text[2][160];
    static int which;
    which ^= 1;
    if (t.wait == LEFT)
        snprintf(text[which], sizeof text[0], "has left the kernel");
    else
        snprintf(text[which], sizeof text[0], "is at %s:%d", t.file, t.line);
    return text[which];
}

// ---------------------------------------------------------------------------------------------
// The scheduler

// Nobody can run: let all threads through the barrier, or say why they cannot go on.
static void cuda_release_barrier(std::vector<CudaThread> &threads) {
    int first = -1;
    for (size_t i = 0; i < threads.size(); i++)
        if (threads[i].wait == AT_BARRIER && first < 0) first = (int)i;
    for (size_t i = 0; i < threads.size() && first >= 0; i++)
        if (threads[i].wait != AT_BARRIER || threads[i].line != threads[first].line)
            cuda_fault("__syncthreads divergence: thread %d %s, thread %zu %s", first, cuda_where(threads[first]), i,
                       cuda_where(threads[i]));
    for (CudaThread &t : threads) t.wait = READY, t.barriers++;
}

static bool cuda_round(std::vector<CudaThread> &threads) { // false: all have left
    int n = (int)threads.size(), left = 0, waiting = -1, missing = -1, stuck = -1;
    bool ran = false;
    uint32_t start = cuda_random() % n, step = cuda_random() % 2 ? n - 1 : 1, flip = cuda_random() % 32;
    for (int i = 0; i < n; i++) {
        int t = (int)((start + (uint64_t)i * step) % n);
        if ((int)(t ^ flip) < n && n % 32 == 0) t ^= flip;
        if (threads[t].wait == READY) cuda_resume(t), ran = true;
    }
    for (int w = 0; w < n; w += 32)
        while (cuda_try_warp(&threads[w], min(32, n - w), &waiting, &missing)) ran = true;
    for (int i = 0; i < n; i++) left += threads[i].wait == LEFT, stuck = threads[i].wait == AT_WARP ? i : stuck;
    if (left == n) return false;
    if (ran) return true;
    if (stuck >= 0) {
        int w = stuck / 32 * 32;
        cuda_try_warp(&threads[w], min(32, n - w), &waiting, &missing);
        if (w + missing >= n)
            cuda_fault("%s:%d: the mask has lanes that the block lacks", threads[stuck].file, threads[stuck].line);
        cuda_fault("warp divergence: lane %d %s, lane %d %s", waiting, cuda_where(threads[w + waiting]), missing,
                   cuda_where(threads[w + missing]));
    }
    cuda_release_barrier(threads);
    return true;
}

static void cuda_run_block(unsigned threads) {
    CudaState &c = cuda_state;
    c.threads.resize(threads);
    // Exactly as long as asked for, so that AddressSanitizer sees the byte behind it.
    c.shared = c.shared_bytes ? (char *)aligned_alloc(128, (c.shared_bytes + 127) / 128 * 128) : NULL;
    if (c.shared) memset(c.shared, 0xff, c.shared_bytes);
#ifdef __SANITIZE_ADDRESS__
    if (c.shared) __asan_poison_memory_region(c.shared + c.shared_bytes, (128 - c.shared_bytes % 128) % 128);
#endif
    if (c.shared) cuda_races_watch(c.shared, c.shared_bytes, 0);
    c.block++;
    for (unsigned i = 0; i < threads; i++) cuda_thread_begin(c.threads[i], i);
    while (cuda_round(c.threads)) {}
    if (c.shared) cuda_races_watch(c.shared, 0, 0);
#ifdef __SANITIZE_ADDRESS__
    if (c.shared) __asan_unpoison_memory_region(c.shared, (c.shared_bytes + 127) / 128 * 128);
#endif
    free(c.shared);
}

static void cuda_run_grid(dim3 grid, unsigned threads, size_t shared, const std::function<void()> &body) {
    CudaState &c = cuda_state;
    uint64_t blocks = (uint64_t)grid.x * grid.y, start = cuda_random() % blocks;
    c.launch++, c.body = &body, c.shared_bytes = shared, gridDim = grid, blockDim = dim3(threads);
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t b = (start + i) % blocks;
        blockIdx = dim3((unsigned)(b % grid.x), (unsigned)(b / grid.x));
        cuda_run_block(threads);
    }
}

static inline void *cuda_shared_memory(size_t bytes) {
    if (bytes > cuda_state.shared_bytes)
        cuda_fault("the kernel uses %zu bytes of shared memory, its launch gave %zu", bytes, cuda_state.shared_bytes);
    return cuda_state.shared;
}

// Blocks and threads are never at the same time here: a sum is enough.
template <typename T> __attribute__((no_sanitize_thread)) static inline T atomicAdd(T *p, T v) {
    T before = *p;
    *p = before + v;
    return before;
}

// ---------------------------------------------------------------------------------------------
// Device memory: closed to the host except while the stream's work is done

enum { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaEventDisableTiming };

// The driver takes memory too: for its context, for the program's code (when a kernel is first launched, or at once if
// CUDA_MODULE_LOADING says EAGER), and to the end of an allocation's last page.
static constexpr size_t CUDA_TOTAL = (size_t)512 << 20, CUDA_CONTEXT = 30 << 20, CUDA_CODE = 7 << 20,
                        CUDA_PAGE = 2 << 20;

static void cuda_segv(int, siginfo_t *info, void *) {
    for (const CudaAllocation &a : cuda_state.allocations)
        if ((char *)info->si_addr >= a.base && (char *)info->si_addr < a.base + a.mapped) {
            if (cuda_state.now >= 0) cuda_fault("an address behind an allocation");
            cuda_fault("the host touches device memory");
        }
    cuda_fault("no such address: %p", info->si_addr);
}

static void cuda_begin() {
    CudaState &c = cuda_state;
    if (c.started) return;
    const char *seed = getenv("CUDA_ON_CPU_SEED");
    c.started = true, c.seed = seed ? atoi(seed) : 0, c.random += c.seed;
    static char stack[1 << 16];
    stack_t alternative = {};
    alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, NULL);
    struct sigaction act = {};
    act.sa_sigaction = cuda_segv, act.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &act, NULL);
}

static void cuda_open_memory(int protection) {
    for (const CudaAllocation &a : cuda_state.allocations)
        if (a.device) mprotect(a.base, a.mapped - 4096, protection);
}

// Called by all calls that take memory or give it back. Weak: a test puts its own in the place, to count them.
extern "C" __attribute__((weak)) void cuda_memory_call() {}

static inline cudaError_t cudaMalloc(void **p, size_t bytes) {
    cuda_begin();
    cuda_memory_call();
    size_t mapped = (bytes + 4095) / 4096 * 4096 + 4096; // and a page that nobody may touch
    char *base = (char *)mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
    memset(base, 0xff, bytes);
    mprotect(base, mapped, PROT_NONE);
    cuda_state.allocations.push_back({base, bytes, mapped, true});
    cuda_races_watch(base, bytes, 1);
    *p = base;
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *p) {
    cuda_memory_call();
    auto &all = cuda_state.allocations;
    for (size_t i = 0; i < all.size(); i++)
        if (all[i].base == p) {
            cuda_races_watch(all[i].base, 0, 1);
            munmap(all[i].base, all[i].mapped);
            all.erase(all.begin() + i);
            return cudaSuccess;
        }
    cuda_fault("cudaFree of %p, which cudaMalloc did not give", p);
}

static inline cudaError_t cudaMallocHost(void **p, size_t bytes) {
    cuda_begin();
    cuda_memory_call();
    *p = malloc(bytes);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaFreeHost(void *p) {
    cuda_memory_call();
    free(p);
    return cudaSuccess;
}

static bool cuda_is_device(const void *p, size_t bytes) {
    for (const CudaAllocation &a : cuda_state.allocations)
        if ((const char *)p >= a.base && (const char *)p + bytes <= a.base + a.bytes) return true;
    return false;
}

// ---------------------------------------------------------------------------------------------
// Streams

static void cuda_drain() {
    CudaState &c = cuda_state;
    if (c.queue.empty()) return;
    cuda_open_memory(PROT_READ | PROT_WRITE);
    for (auto &work : c.queue) work();
    c.queue.clear();
    cuda_open_memory(PROT_NONE);
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    const void *device = kind == cudaMemcpyHostToDevice ? to : from, *host = kind == cudaMemcpyHostToDevice ? from : to;
    if (bytes && !cuda_is_device(device, bytes))
        cuda_fault("a copy of %zu bytes leaves device memory at %p", bytes, device);
    if (cuda_is_device(host, 1)) cuda_fault("the host's end of a copy is device memory");
    cuda_state.queue.push_back([=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}

// Pointers among a kernel's arguments are the device's, or NULL.
template <typename T> static void cuda_check_argument(T) {}
template <typename T> static void cuda_check_argument(T *p) {
    if (p && !cuda_is_device(p, 1)) cuda_fault("a kernel's argument %p is no device memory", (const void *)p);
}

template <typename... Params, typename... Args>
static void cuda_launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared, Args... args) {
    if (!grid.x || !grid.y || grid.x > 0x7fffffffu || grid.y > 65535)
        cuda_fault("a grid of %u x %u blocks", grid.x, grid.y);
    if (!threads || threads > 1024) cuda_fault("a block of %u threads", threads);
    size_t limit = cuda_state.large_shared.count((const void *)kernel) ? 227 << 10 : 48 << 10;
    if (shared > limit) cuda_fault("%zu bytes of shared memory, over the %zu that this kernel may have", shared, limit);
    (cuda_check_argument(args), ...);
    cuda_state.launched = true;
    cuda_state.queue.push_back([=] { cuda_run_grid(grid, threads, shared, [=] { kernel(args...); }); });
}

static inline cudaError_t cudaFuncSetAttribute(const void *kernel, int, size_t bytes) {
    if (bytes > 227 << 10) cuda_fault("%zu bytes of shared memory", bytes);
    cuda_state.large_shared.insert(kernel);
    return cudaSuccess;
}

template <typename Kernel>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel, int, size_t) {
    return *blocks = 2, cudaSuccess;
}
static inline cudaError_t cudaStreamCreate(cudaStream_t *s) { return *s = &cuda_state, cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cuda_drain(), cudaSuccess; }
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, int) { return cudaSuccess; }
static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cuda_drain(), cudaSuccess; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
static inline cudaError_t cudaGetDeviceCount(int *n) { return *n = 1, cudaSuccess; }
static inline cudaError_t cudaDeviceGetAttribute(int *value, int which, int) {
    *value = which == cudaDevAttrMultiProcessorCount ? 2 : which == cudaDevAttrComputeCapabilityMajor ? 8 : 0;
    return cudaSuccess;
}
static inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    const char *loading = getenv("CUDA_MODULE_LOADING");
    bool code = cuda_state.launched || (loading && !strcmp(loading, "EAGER"));
    *total = CUDA_TOTAL, *available = CUDA_TOTAL - CUDA_CONTEXT - (code ? CUDA_CODE : 0);
    for (const CudaAllocation &a : cuda_state.allocations)
        *available -= (a.bytes + CUDA_PAGE - 1) / CUDA_PAGE * CUDA_PAGE;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------
// cp.async: odd seeds land copies as late as they may, others at once

static void cuda_land(const CudaCopy &c) {
    if (c.valid)
        memcpy(c.to, c.from, c.bytes);
    else
        memset(c.to, 0, c.bytes);
}

static inline void cuda_prefetch(const void *p) {
    if (!cuda_is_device(p, 1)) cuda_fault("a prefetch from outside device memory");
}

static inline void cuda_copy_async(void *to, const void *from, int bytes, bool valid) {
    CudaThread &t = cuda_state.threads[cuda_state.now];
    CudaState &c = cuda_state;
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) cuda_fault("a misaligned cp.async of %d bytes", bytes);
    if ((char *)to < c.shared || (char *)to + bytes > c.shared + c.shared_bytes)
        cuda_fault("cp.async past shared memory");
    if (valid && !cuda_is_device(from, bytes)) cuda_fault("cp.async from outside device memory");
    cuda_races_touch(to, bytes, 1);
    if (valid) cuda_races_touch(from, bytes, 0);
    if (c.seed % 2)
        t.copies.push_back({to, from, bytes, t.group, valid});
    else
        cuda_land({to, from, bytes, 0, valid});
}

static inline void cuda_copy_commit() { cuda_state.threads[cuda_state.now].group++; }

static inline void cuda_copy_wait(int pending) {
    CudaThread &t = cuda_state.threads[cuda_state.now];
    size_t n = 0;
    while (n < t.copies.size() && t.copies[n].group < t.group - pending) cuda_land(t.copies[n++]);
    t.copies.erase(t.copies.begin(), t.copies.begin() + n);
}
