// cuda_peak: what a GPU reaches by itself, to measure vlm.cu against. Prints two numbers: bytes a second, read and
// written, of the driver's own copy; and operations a second of mma.sync m16n8k16 on bf16, out of registers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

constexpr int THREADS = 256, BLOCKS_EACH = 2, CHAINS = 8, ROUNDS = 1 << 14;

static void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "cuda_peak: %s\n", cudaGetErrorString(status));
    exit(1);
}

// Each warp keeps CHAINS independent sums under way: more than the instruction's latency needs.
__global__ void __launch_bounds__(THREADS) multiply(float *out) {
    float c[CHAINS][4] = {};
    uint32_t x = 0x3d803d80u + threadIdx.x; // bf16 numbers of about 1/16
    for (int round = 0; round < ROUNDS; round++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, "
                         "{%0,%1,%2,%3};"
                         : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                         : "r"(x));
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

// The shortest of some runs, in seconds.
template <typename Run> static double seconds(Run run) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
    float best = 1e30f;
    for (int i = 0; i < 6; i++) {
        float ms;
        check(cudaEventRecord(begin));
        run();
        check(cudaEventRecord(end));
        check(cudaEventSynchronize(end));
        check(cudaEventElapsedTime(&ms, begin, end));
        best = ms < best ? ms : best;
    }
    return best / 1e3;
}

int main() {
    size_t half = (size_t)2 << 30;
    char *memory;
    int processors;
    check(cudaMalloc(&memory, 2 * half));
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    double copy = seconds([&] { check(cudaMemcpyAsync(memory, memory + half, half, cudaMemcpyDeviceToDevice)); });
    int blocks = processors * BLOCKS_EACH;
    double products = seconds([&] { multiply<<<blocks, THREADS>>>((float *)memory); });
    check(cudaGetLastError());
    double operations = 2.0 * 16 * 8 * 16 * CHAINS * ROUNDS * (THREADS / 32) * blocks;
    printf("%.4g %.4g\n", 2 * half / copy, operations / products);
}
