// cuda_faults: kernels with one fault each, to show that cuda_on_cpu.h finds it; and `layout`, which multiplies given
// fragments, so that a test can hold their layout against another source.
//
//   cuda_faults NAME     exit status 86 and a line on stderr when the fault is found, 0 when it goes unseen
#include "test/cuda_on_cpu.h"

static const int N = 64; // threads of a block here
static float *memory;    // 1024 floats of the device

struct Cells {
    float v[N];
};

static Cells &cells() { return *(Cells *)cuda_shared_memory(sizeof(Cells)); }

// ---------------------------------------------------------------------------------------------
// Found by the scheduler and the checks

static void barrier_divergence(float *) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}
static void barrier_exit(float *) {
    if (threadIdx.x == 5) return;
    __syncthreads();
}
static void warp_divergence(float *) {
    if (threadIdx.x % 2)
        __syncwarp();
    else
        __shfl_sync(~0u, 1, 0);
}
static void warp_exit(float *p) {
    if (threadIdx.x == 40) return;
    p[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
}
static void shuffle_mask(float *p) { p[threadIdx.x] = threadIdx.x < 8 ? __shfl_sync(0xffu, 1.0f, 9) : 0; }
static void shared_room(float *p) { p[0] = ((Cells *)cuda_shared_memory(sizeof(Cells) * 2))->v[0]; }
static void copy_misaligned(float *p) { cuda_copy_async(&cells().v[1], p + 1, 16, true); }
static void past_allocation(float *p) { p[(32 << 20) / 4 + threadIdx.x] = 1; }
static void nothing(float *) {}

// ---------------------------------------------------------------------------------------------
// Found by the values, in some order of threads or with copies that land late: sum() is 2016 in a correct program

static void missing_barrier(float *p) { // reads what another thread writes
    cells().v[threadIdx.x] = (float)threadIdx.x;
    p[threadIdx.x] = cells().v[N - 1 - threadIdx.x];
}
static void not_waited(float *p) { // reads a cp.async's bytes without waiting for it
    if (threadIdx.x % 4 == 0) cuda_copy_async(&cells().v[threadIdx.x], p + N + threadIdx.x, 16, true);
    cuda_copy_commit();
    __syncthreads();
    p[threadIdx.x] = cells().v[threadIdx.x];
}
static void uninitialised_shared(float *p) { p[threadIdx.x] = threadIdx.x == 7 ? cells().v[7] : (float)threadIdx.x; }
static void uninitialised_device(float *p) { p[threadIdx.x] = threadIdx.x == 7 ? p[512] : (float)threadIdx.x; }

// ---------------------------------------------------------------------------------------------
// Found by the race detector, though the values are right in this order of threads and blocks

static void late_barrier(float *p) { // writes again what others may still be reading
    cells().v[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    p[threadIdx.x] = cells().v[threadIdx.x ^ 32];
    if (threadIdx.x >= 32) cells().v[threadIdx.x] = 0;
}
static void block_race(float *p) { p[threadIdx.x] = (float)threadIdx.x; } // both blocks write

static void none(float *p) { // a program without a fault, with a little of everything
    if (threadIdx.x % 4 == 0) cuda_copy_async(&cells().v[threadIdx.x], p + N + threadIdx.x, 16, true);
    cuda_copy_commit();
    cuda_copy_wait(0);
    __syncthreads();
    float v = cells().v[threadIdx.x ^ 1];
    __syncthreads();
    cells().v[threadIdx.x] = v;
    __syncwarp();
    v = __shfl_xor_sync(~0u, cells().v[threadIdx.x ^ 1], 0);
    if (blockIdx.x == 0) p[threadIdx.x] = v;
}

// ---------------------------------------------------------------------------------------------
// Found by the sanitizers

static void shared_overrun(float *p) {
    float *v = cells().v;
    v[threadIdx.x + 1] = p[0];
}
static void misaligned_vector(float *p) { *(volatile uint32_t *)p = ((const uint4 *)(p + 1))->x; }

static double sum() {
    static float host[N];
    double total = 0;
    cudaMemcpyAsync(host, memory, sizeof host, cudaMemcpyDeviceToHost, NULL);
    cudaStreamSynchronize(NULL);
    for (int i = 0; i < N; i++) total += host[i];
    return total;
}

static int run(void (*kernel)(float *), size_t shared) {
    cuda_launch(kernel, 2, N, shared, memory);
    double total = sum();
    if (total == 2016) return 0;
    fprintf(stderr, "cuda_on_cpu: the values are wrong: their sum is %g\n", total);
    return 86;
}

static int host_fault(const char *name) {
    static float host[N];
    if (!strcmp(name, "host-touches")) return (int)memory[0];
    if (!strcmp(name, "host-argument")) return run(nothing, 0), 0; // reached with memory == host, below
    if (!strcmp(name, "too-many-threads")) cuda_launch(nothing, 1, 2048, 0, memory);
    if (!strcmp(name, "too-many-blocks")) cuda_launch(nothing, dim3(1, 70000), 32, 0, memory);
    if (!strcmp(name, "too-much-shared")) cuda_launch(nothing, 1, 32, 64 << 10, memory);
    if (!strcmp(name, "copy-too-long")) cudaMemcpyAsync(memory, host, (size_t)1 << 40, cudaMemcpyHostToDevice, NULL);
    if (!strcmp(name, "no-synchronise")) { // the host reads before the copy has been made
        cudaMemcpyAsync(host, memory, sizeof host, cudaMemcpyDeviceToHost, NULL);
        if (host[N - 1] != N - 1) return fprintf(stderr, "cuda_on_cpu: the values are wrong\n"), 86;
    }
    return 0;
}

static int layout() {
    static uint32_t a[32][4], b[32][2];
    static float c[32][4];
    for (auto &lane : a)
        for (uint32_t &word : lane)
            if (scanf("%x", &word) != 1) return 2;
    for (auto &lane : b)
        for (uint32_t &word : lane)
            if (scanf("%x", &word) != 1) return 2;
    cuda_launch(
        +[](float *) { cuda_mma_16816(c[threadIdx.x], a[threadIdx.x], b[threadIdx.x]); }, 1, 32, 0, memory);
    cudaStreamSynchronize(NULL);
    for (auto &lane : c) printf("%g %g %g %g\n", lane[0], lane[1], lane[2], lane[3]);
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*kernel)(float *);
        size_t shared;
    } faults[] = {
        {"barrier-divergence", barrier_divergence, 0},
        {"barrier-exit", barrier_exit, 0},
        {"warp-divergence", warp_divergence, 0},
        {"warp-exit", warp_exit, 0},
        {"shuffle-mask", shuffle_mask, 0},
        {"shared-room", shared_room, sizeof(Cells)},
        {"copy-misaligned", copy_misaligned, sizeof(Cells)},
        {"past-allocation", past_allocation, 0},
        {"missing-barrier", missing_barrier, sizeof(Cells)},
        {"missing-wait", not_waited, sizeof(Cells)},
        {"uninitialised-shared", uninitialised_shared, sizeof(Cells)},
        {"uninitialised-device", uninitialised_device, 0},
        {"late-barrier", late_barrier, sizeof(Cells)},
        {"block-race", block_race, 0},
        {"none", none, sizeof(Cells)},
        {"shared-overrun", shared_overrun, sizeof(Cells)},
        {"misaligned-vector", misaligned_vector, 0},
    };
    static float host[2 * N];
    if (argc != 2) return 2;
    cudaMalloc((void **)&memory, 4096);
    if (!strcmp(argv[1], "layout")) return layout();
    for (int i = 0; i < 2 * N; i++) host[i] = (float)(i % N);
    cudaMemcpyAsync(memory, host, sizeof host, cudaMemcpyHostToDevice, NULL);
    cudaStreamSynchronize(NULL);
    for (auto &fault : faults)
        if (!strcmp(argv[1], fault.name)) return run(fault.kernel, fault.shared);
    if (!strcmp(argv[1], "host-argument")) memory = host;
    return host_fault(argv[1]);
}
