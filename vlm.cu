// vlm.cu: the operations of the Device table in CUDA, for compute capability 8.0 and up. The fast device.
//
// Matrix products of bf16 run on the tensor cores through one instruction, mma.sync m16n8k16, and one way to feed it.
// A lane (g = lane / 4, q = lane % 4) loads 16 bytes, elements 8q .. 8q + 7, of row g of 32 elements along K (a
// "slab"). The instruction wants elements 2q, 2q + 1, 2q + 8, 2q + 9 of row g; but a sum over K may number its terms as
// it likes if both operands do so alike, and thus four lanes' 16 bytes are the fragments of two instructions as they
// lie. So a decode step feeds the tensor cores straight from global memory with 128-bit loads, and a prefill reads the
// same 16 bytes from shared memory, without bank conflicts and without ldmatrix. Both run the same instructions in the
// same order for an output element, hence the same bits: K is cut in slices, which are summed slice by slice; decode
// gives each warp a slice, prefill loops over them.
//
// Shared memory of a kernel is a struct, whose size its launch passes. Where a product and a sum are fused is written
// (fmaf); the compiler is told not to choose (-fmad=false). Inline assembly is confined to the first section, whose
// #ifdef branches are all that running on a CPU (test/cuda_on_cpu.h) needs.
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef CUDA_ON_CPU
#include "test/cuda_on_cpu.h"
#else
#include <cuda_runtime.h>
#endif
#include "vlm.h"

// ---------------------------------------------------------------------------------------------
// What CUDA C++ has no name for

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// c += a b: c 16 x 8 of f32, a 16 x 16, b 16 x 8 of bf16, two to a register. Lane (g, q) holds
//   a[0], a[2]: row g, columns 2q, 2q+1 and 2q+8, 2q+9     a[1], a[3]: the same of row g + 8
//   b[0], b[1]: column g, rows 2q, 2q+1 and 2q+8, 2q+9     c[0..1], c[2..3]: rows g, g + 8, columns 2q, 2q+1
__device__ __forceinline__ void mma_16816(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef CUDA_ON_CPU
    cuda_mma_16816(c, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two floats rounded to bf16, to nearest even, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef CUDA_ON_CPU
    return cuda_round_bf16(low) | (uint32_t)cuda_round_bf16(high) << 16;
#else
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#endif
}

// 16 bytes that nobody writes meanwhile; `once`: nor reads again, so they need no place in L1. Volatile: a kernel that
// begins many loads before it uses the first means it.
template <bool ONCE> __device__ __forceinline__ uint4 load16(const void *p) {
#ifdef CUDA_ON_CPU
    return *(const uint4 *)p;
#else
    uint4 v;
    if (ONCE)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
    else
        asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#endif
}

// Let the line of `p` come into L2, and wait for nothing.
__device__ __forceinline__ void prefetch(const void *p) {
#ifdef CUDA_ON_CPU
    cuda_prefetch(p);
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Begin to copy BYTES (16 or 8) from global to shared memory, past the registers; zeros if not `valid`.
template <int BYTES> __device__ __forceinline__ void copy_async(void *shared, const void *global, bool valid) {
#ifdef CUDA_ON_CPU
    cuda_copy_async(shared, global, BYTES, valid);
#else
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared), n = valid ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(n) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(n) : "memory");
#endif
}

// The copies begun since the last call make a group.
__device__ __forceinline__ void copy_commit() {
#ifdef CUDA_ON_CPU
    cuda_copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING groups of this thread are under way.
template <int PENDING> __device__ __forceinline__ void copy_wait() {
#ifdef CUDA_ON_CPU
    cuda_copy_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

template <typename S> __device__ __forceinline__ S &shared_memory() {
#ifdef CUDA_ON_CPU
    return *(S *)cuda_shared_memory(sizeof(S));
#else
    extern __shared__ uint4 memory[];
    return *(S *)memory;
#endif
}

// ---------------------------------------------------------------------------------------------
// The device's state, and launching

constexpr size_t STAGING = 8 << 20, SCRATCH = 32 << 20;

static struct Gpu {
    cudaStream_t stream; // everything goes through it, in order
    int processors;
    size_t held;              // bytes in use before we reserved any: CUDA's context, the code, other programs
    float *scratch;           // (SCRATCH bytes), behind the reserved memory: partial results of split attention
    char *staging;            // two page-locked halves of STAGING bytes that uploads pass through
    int half;                 // the one being filled
    size_t filled;            // bytes of it
    cudaEvent_t half_read[2]; // all copies out of the half are done
} gpu;

static void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "vlm: cuda: %s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

template <typename... Params, typename... Args>
static void launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
    if (grid.x == 0 || grid.y == 0) return;
#ifdef CUDA_ON_CPU
    cuda_launch(kernel, grid, threads, shared, args...);
#else
    kernel<<<grid, threads, shared, gpu.stream>>>(args...);
#endif
    check(cudaGetLastError(), "launch");
}

// Blocks of a kernel that the GPU runs at the same time.
template <typename... Params> static int resident(void (*kernel)(Params...), int threads, size_t shared) {
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared), "occupancy");
    return blocks * gpu.processors;
}

__host__ __device__ constexpr int div_up(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

static bool aligned(size_t bytes, const void *p, size_t a, size_t b) { return ((uintptr_t)p | a | b) % bytes == 0; }

// ---------------------------------------------------------------------------------------------
// Numbers: f32 or bf16 in memory, f32 in registers

__device__ __forceinline__ float to_f32(float f) { return f; }
__device__ __forceinline__ float to_f32(bf16 b) { return __uint_as_float((uint32_t)b << 16); }
__device__ __forceinline__ void put(float *p, float f) { *p = f; }
__device__ __forceinline__ void put(bf16 *p, float f) { *p = (bf16)pack_bf16(f, 0); }

// N neighbouring elements, moved by one instruction.
template <typename E, int N> struct alignas(sizeof(E) * N) Vec { E v[N]; };

// Sums and maxima over a warp by a butterfly: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float v) {
    for (int d = WARP / 2; d; d /= 2) v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int d = WARP / 2; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}

// Over a block, by way of `cells` (one a warp) of shared memory. All threads of the block call it.
__device__ __forceinline__ float block_sum(float v, float *cells) {
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    v = warp_sum(v);
    if (lane == 0) cells[threadIdx.x / WARP] = v;
    __syncthreads();
    v = warp_sum(lane < warps ? cells[lane] : 0);
    __syncthreads();
    return v;
}

// ---------------------------------------------------------------------------------------------
// Memory

static bool cuda_start(Error *err) {
    if (gpu.stream) return true;
    int n = 0;
    cudaError_t status = cudaGetDeviceCount(&n);
    if (status != cudaSuccess || n == 0)
        return fail(err, 500, "--device cuda: no GPU that CUDA can use (%s): use --device cpu",
                    status == cudaSuccess ? "none found" : cudaGetErrorString(status));
    size_t available, total;
    check(cudaDeviceGetAttribute(&gpu.processors, cudaDevAttrMultiProcessorCount, 0), "device");
    check(cudaStreamCreate(&gpu.stream), "stream");
    check(cudaMallocHost((void **)&gpu.staging, 2 * STAGING), "page-locked memory");
    for (int i = 0; i < 2; i++) check(cudaEventCreate(&gpu.half_read[i]), "event");
    check(cudaMemGetInfo(&available, &total), "memory");
    gpu.held = total - available;
    return true;
}

// Bytes that reserve() can give, and bytes in use beside them: CUDA's context, our code, what other programs have, and
// our scratch. What reserve() was asked for, these and what is free are together what the driver reports as total.
static void cuda_memory(size_t *available, size_t *held) {
    size_t free_bytes, total;
    check(cudaMemGetInfo(&free_bytes, &total), "memory");
    *available = free_bytes > SCRATCH ? free_bytes - SCRATCH : 0;
    *held = gpu.held + SCRATCH;
}

static void *cuda_reserve(size_t bytes) {
    Error err;
    void *base;
    if (!cuda_start(&err)) return NULL;
    size_t room = (bytes + 255) / 256 * 256;
    if (cudaMalloc(&base, room + SCRATCH) != cudaSuccess) return cudaGetLastError(), (void *)NULL;
    gpu.scratch = (float *)((char *)base + room);
    return base;
}

static void cuda_release(void *base, size_t) {
    check(cudaStreamSynchronize(gpu.stream), "finish");
    check(cudaFree(base), "free");
}

static void *cuda_reserve_host(size_t bytes) {
    void *p;
    if (cudaMallocHost(&p, bytes) != cudaSuccess) return cudaGetLastError(), (void *)NULL;
    return p;
}

static void cuda_release_host(void *base, size_t) { check(cudaFreeHost(base), "free"); }

// On return `src` has been read, and what is launched next finds the bytes at `dst`: the copy is in the stream. Small
// ones fill a staging half together; the host waits only for a half that is still being read.
static void cuda_upload(void *dst, const void *src, size_t bytes) {
    while (bytes > 0) {
        if (gpu.filled == STAGING) {
            check(cudaEventRecord(gpu.half_read[gpu.half], gpu.stream), "upload");
            gpu.half ^= 1, gpu.filled = 0;
            check(cudaEventSynchronize(gpu.half_read[gpu.half]), "upload");
        }
        size_t n = bytes < STAGING - gpu.filled ? bytes : STAGING - gpu.filled;
        char *stage = gpu.staging + (size_t)gpu.half * STAGING + gpu.filled;
        memcpy(stage, src, n);
        check(cudaMemcpyAsync(dst, stage, n, cudaMemcpyHostToDevice, gpu.stream), "upload");
        gpu.filled += n, bytes -= n;
        dst = (char *)dst + n, src = (const char *)src + n;
    }
}

static void cuda_download(void *dst, const void *src, size_t bytes) {
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, gpu.stream), "download");
    check(cudaStreamSynchronize(gpu.stream), "step"); // an error of any kernel since the last one shows here
}

// ---------------------------------------------------------------------------------------------
// embed, gather_rows

// Block: a row; neighbouring threads, neighbouring elements. T C (4 + width) bytes, no flops: memory. Not measured yet.
template <typename E> __global__ void embed_row(float *out, const E *table, const int32_t *ids, int C) {
    int id = ids[blockIdx.x];
    if (id < 0) return;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        out[(size_t)blockIdx.x * C + c] = to_f32(table[(size_t)id * C + c]);
}

static void cuda_embed(float *out, const void *table, Dtype type, const int32_t *ids, int T, int C) {
    if (type == F32)
        launch(embed_row<float>, T, 256, 0, out, (const float *)table, ids, C);
    else
        launch(embed_row<bf16>, T, 256, 0, out, (const bf16 *)table, ids, C);
}

// Block: a row, in words as wide as its size allows. 2 n row_bytes bytes: memory. Not measured yet.
template <typename Word> __global__ void gather_row(Word *dst, const Word *src, const int32_t *index, size_t words) {
    int from = index[blockIdx.x];
    if (from < 0) return;
    for (size_t w = threadIdx.x; w < words; w += blockDim.x) dst[blockIdx.x * words + w] = src[from * words + w];
}

static void cuda_gather_rows(void *dst, const void *src, const int32_t *index, int n, size_t row_bytes) {
    if (aligned(16, dst, (size_t)src, row_bytes))
        launch(gather_row<uint4>, n, 256, 0, (uint4 *)dst, (const uint4 *)src, index, row_bytes / 16);
    else if (aligned(4, dst, (size_t)src, row_bytes))
        launch(gather_row<uint32_t>, n, 256, 0, (uint32_t *)dst, (const uint32_t *)src, index, row_bytes / 4);
    else
        launch(gather_row<uint8_t>, n, 256, 0, (uint8_t *)dst, (const uint8_t *)src, index, row_bytes);
}

// ---------------------------------------------------------------------------------------------
// rmsnorm

struct NormShared {
    float cells[WARP];
};

// Block: a row; thread i sums the squares of elements i, i + threads, ...; the second reading comes out of L1.
// T C (4 + width) bytes, 4 T C flops: memory, or the launch when T is small. Not measured yet.
template <typename E> __global__ void rmsnorm_row(E *out, const float *x, const float *weight, float eps, int C) {
    NormShared &s = shared_memory<NormShared>();
    size_t row = (size_t)blockIdx.x * C;
    float squares = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) squares = fmaf(x[row + c], x[row + c], squares);
    float scale = 1.0f / sqrtf(block_sum(squares, s.cells) / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x) put(&out[row + c], x[row + c] * scale * weight[c]);
}

static void cuda_rmsnorm(void *out, Dtype type, const float *x, const float *weight, float eps, int T, int C) {
    int warps = div_up(C, 4 * WARP), threads = (warps < 32 ? warps : 32) * WARP; // by C alone: it sets the order
    if (type == F32)
        launch(rmsnorm_row<float>, T, threads, sizeof(NormShared), (float *)out, x, weight, eps, C);
    else
        launch(rmsnorm_row<bf16>, T, threads, sizeof(NormShared), (bf16 *)out, x, weight, eps, C);
}

// ---------------------------------------------------------------------------------------------
// linear
//
// K is cut in at most SLICES slices of whole steps of STEP elements. out = ((0 + slice 0) + slice 1) + ... + bias.

constexpr int SLAB = 32, STEP = 2 * SLAB, SLICES = 8;

struct Linear { // the arguments of linear, for the kernels
    void *out;
    Dtype out_type;
    const void *x, *w;
    const float *bias;
    int T, N, K, slice; // slice: elements of K, a multiple of STEP
    bool accumulate;
};

// Eight elements of bf16, k .. k + 7, of a row; zeros past its end. Rows begin at multiples of 16 bytes if K is a
// multiple of 8, which ALIGNED says; of 8 bytes if it is a multiple of 4.
template <bool ALIGNED, bool ONCE> __device__ __forceinline__ uint4 load8(const bf16 *row, int k, int K) {
    if (ALIGNED) { // always a load: a branch here would keep the loads after it waiting
        uint4 v = load16<ONCE>(row + (k < K ? k : 0));
        return k < K ? v : make_uint4(0, 0, 0, 0);
    }
    if (K % 4 == 0) {
        uint2 zero = make_uint2(0, 0);
        uint2 a = k < K ? *(const uint2 *)(row + k) : zero, b = k + 4 < K ? *(const uint2 *)(row + k + 4) : zero;
        return make_uint4(a.x, a.y, b.x, b.y);
    }
    uint32_t v[8];
    for (int i = 0; i < 8; i++) v[i] = k + i < K ? row[k + i] : 0;
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

// One slab: c += a b^T over 32 elements of K. Lane (g, q) gives elements 8q .. 8q + 7 of rows g and g + 8 of a and of
// row g of b.
__device__ __forceinline__ void mma_slab(float c[4], uint4 a, uint4 a8, uint4 b) {
    uint32_t first_a[4] = {a.x, a8.x, a.y, a8.y}, first_b[2] = {b.x, b.y};
    uint32_t second_a[4] = {a.z, a8.z, a.w, a8.w}, second_b[2] = {b.z, b.w};
    mma_16816(c, first_a, first_b);
    mma_16816(c, second_a, second_b);
}

__device__ __forceinline__ void linear_put(const Linear &a, int t, int n, float sum) {
    size_t o = (size_t)t * a.N + n;
    if (a.bias) sum += a.bias[n];
    if (a.accumulate) sum += ((float *)a.out)[o];
    if (a.out_type == F32)
        ((float *)a.out)[o] = sum;
    else
        put(&((bf16 *)a.out)[o], sum);
}

constexpr int DEPTH = 4; // slabs that a warp has under way

// A lane's part of DEPTH slabs: of two rows of weights and NT of x. Past the end: zeros, which add nothing.
template <int NT, bool ALIGNED> struct Pieces {
    uint4 w[DEPTH][2], x[DEPTH][NT];
    __device__ __forceinline__ void load(const bf16 *const w_rows[2], const bf16 *const x_rows[NT], int k, int end) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            for (int h = 0; h < 2; h++) w[i][h] = load8<ALIGNED, true>(w_rows[h], k + i * SLAB, end);
            for (int j = 0; j < NT; j++) x[i][j] = load8<ALIGNED, false>(x_rows[j], k + i * SLAB, end);
        }
    }
};

template <int NT> struct RowsShared {
    float sum[SLICES][8 * NT][16]; // of each slice
};

// Few rows (decode), T <= 8 NT. Block: 16 outputs; warp: a slice of K; lane (g, q): 16-byte pieces of weight rows g and
// g + 8, 8 of them under way (32 KB a block), and of NT rows of x, which come out of L1 and L2. The products are on
// the tensor cores, where 8 rows cost what one does. Shared: 4 NT KB. 2 N K bytes, 2 T N K flops: memory. Not measured
// yet.
template <int NT, bool ALIGNED> __global__ void __launch_bounds__(SLICES *WARP) linear_rows(Linear a) {
    RowsShared<NT> &s = shared_memory<RowsShared<NT>>();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, q = lane % 4, n0 = blockIdx.x * 16;
    const bf16 *w[2], *x[NT]; // rows past the end are the last one again; their results are not stored
    for (int i = 0; i < 2; i++) w[i] = (const bf16 *)a.w + (size_t)min(n0 + g + 8 * i, a.N - 1) * a.K;
    for (int j = 0; j < NT; j++) x[j] = (const bf16 *)a.x + (size_t)min(8 * j + g, a.T - 1) * a.K;

    float c[NT][4] = {};
    int k = warp * a.slice, end = min(k + a.slice, a.K);
    Pieces<NT, ALIGNED> now, next; // what is multiplied, and what is under way
    if (k < end) now.load(w, x, k + 8 * q, end);
    for (; k < end; k += DEPTH * SLAB, now = next) {
        next.load(w, x, k + DEPTH * SLAB + 8 * q, end);
        for (int i = 0; i < DEPTH; i++)
            for (int j = 0; j < NT; j++) mma_slab(c[j], now.w[i][0], now.w[i][1], now.x[i][j]);
    }
    for (int j = 0; j < NT; j++)
        for (int i = 0; i < 4; i++) s.sum[warp][8 * j + 2 * q + i % 2][g + i / 2 * 8] = c[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * NT * 16; i += blockDim.x) {
        int t = i / 16, n = i % 16;
        float total = 0;
        for (int slice = 0; slice * a.slice < a.K; slice++) total += s.sum[slice][t][n];
        if (t < a.T && n0 + n < a.N) linear_put(a, t, n0 + n, total);
    }
}

constexpr int STAGES = 3, TILE_WARPS = 8;

// A block's tile: 2 MT 16 outputs x 4 NT 8 rows of x. In a stage, slab by slab, the slab's 64 bytes of each row are
// neighbours: eight lanes' 16 bytes fill the 32 banks. Odd slabs swap the rows of a pair, so that the copies into both
// slabs fill them too.
template <int MT, int NT> struct TileShared {
    static constexpr int N = 2 * MT * 16, T = 4 * NT * 8, ROWS = N + T;
    union {
        uint4 stage[STAGES][2][ROWS][4];
        float sum[T][N + 1];
    };
};

// Put elements k .. k + 7 of a row on their way to shared memory.
template <bool ALIGNED> __device__ __forceinline__ void stage8(uint4 *shared, const bf16 *row, int k, int K) {
    if (ALIGNED)
        copy_async<16>(shared, k < K ? row + k : row, k < K);
    else if (K % 4 == 0)
        for (int i = 0; i < 2; i++)
            copy_async<8>((uint2 *)shared + i, k + 4 * i < K ? row + k + 4 * i : row, k + 4 * i < K);
    else
        *shared = load8<false, false>(row, k, K);
}

// All threads bring the step of K that begins at k. A thread's pieces: 16 bytes of every 32nd row, so that eight
// threads read 128 bytes of a row together.
template <int MT, int NT, bool ALIGNED>
__device__ __forceinline__ void tile_fill(TileShared<MT, NT> &s, const Linear &a, int stage, int n0, int t0, int k) {
    typedef TileShared<MT, NT> S;
    int piece = threadIdx.x % 8, slab = piece / 4, first = threadIdx.x / 8, at = k + 8 * piece;
    auto place = [&](int r) { return &s.stage[stage][slab][r ^ slab][piece % 4]; };
    if (k < a.K) {
#pragma unroll
        for (int r = first; r < S::N; r += TILE_WARPS * WARP / 8)
            stage8<ALIGNED>(place(r), (const bf16 *)a.w + (size_t)min(n0 + r, a.N - 1) * a.K, at, a.K);
#pragma unroll
        for (int r = first; r < S::T; r += TILE_WARPS * WARP / 8)
            stage8<ALIGNED>(place(S::N + r), (const bf16 *)a.x + (size_t)min(t0 + r, a.T - 1) * a.K, at, a.K);
    }
    copy_commit();
}

// Many rows (prefill, vision). Block: a tile of 32 MT outputs x 32 NT rows; warp: 16 MT outputs x 8 NT rows of it. K
// goes by in steps of 64 through STAGES stages filled by asynchronous copies. Shared: 96 KB for 128 x 128. At least
// (N + T) K 2 bytes, 2 T N K flops: the tensor cores. Not measured yet.
template <int MT, int NT, bool ALIGNED> __global__ void __launch_bounds__(TILE_WARPS *WARP) linear_tile(Linear a) {
    typedef TileShared<MT, NT> S;
    S &s = shared_memory<S>();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, q = lane % 4;
    int n0 = blockIdx.x * S::N, t0 = blockIdx.y * S::T, wn = warp % 2 * MT * 16, wt = warp / 2 * NT * 8;
    float c[MT][NT][4] = {}, total[MT][NT][4] = {};
    for (int i = 0; i < STAGES - 1; i++) tile_fill<MT, NT, ALIGNED>(s, a, i, n0, t0, i * STEP);
    for (int k = 0, step = 0; k < a.K; k += STEP, step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // the step has arrived for all, and all have done with the stage that is filled next
        tile_fill<MT, NT, ALIGNED>(s, a, (step + STAGES - 1) % STAGES, n0, t0, k + (STAGES - 1) * STEP);
        for (int slab = 0; slab < 2; slab++) {
            uint4(*rows)[4] = s.stage[step % STAGES][slab];
            uint4 w[MT][2], x[NT];
            for (int i = 0; i < MT; i++)
                for (int h = 0; h < 2; h++) w[i][h] = rows[(wn + 16 * i + 8 * h + g) ^ slab][q];
            for (int j = 0; j < NT; j++) x[j] = rows[(S::N + wt + 8 * j + g) ^ slab][q];
            for (int i = 0; i < MT; i++)
                for (int j = 0; j < NT; j++) mma_slab(c[i][j], w[i][0], w[i][1], x[j]);
        }
        if ((k + STEP) % a.slice == 0 || k + STEP >= a.K) // the slice ends
            for (int i = 0; i < MT; i++)
                for (int j = 0; j < NT; j++)
                    for (int e = 0; e < 4; e++) total[i][j][e] += c[i][j][e], c[i][j][e] = 0;
    }
    copy_wait<0>();
    __syncthreads(); // the stages become room for the sums, from where rows are written whole
    for (int i = 0; i < MT; i++)
        for (int j = 0; j < NT; j++)
            for (int e = 0; e < 4; e++) s.sum[wt + 8 * j + 2 * q + e % 2][wn + 16 * i + g + e / 2 * 8] = total[i][j][e];
    __syncthreads();
    for (int i = threadIdx.x; i < S::T * S::N; i += blockDim.x) {
        int t = t0 + i / S::N, n = n0 + i % S::N;
        if (t < a.T && n < a.N) linear_put(a, t, n, s.sum[i / S::N][i % S::N]);
    }
}

constexpr int EXACT_N = WARP, EXACT_T = SLICES; // in the end a warp adds up a row

struct ExactShared {
    union {
        struct {
            float w[EXACT_N][SLAB + 1], x[EXACT_T][SLAB];
        } warp[SLICES];
        float sum[SLICES][EXACT_T][EXACT_N];
    };
};

// f32, the reference: any number of rows. Block: 32 outputs x 8 rows; warp: a slice of K; lane: an output, whose terms
// it adds one by one. Shared: 41 KB. 4 N K T / 8 bytes, 2 T N K flops: shared memory's bandwidth. Not measured yet.
__global__ void __launch_bounds__(SLICES *WARP) linear_exact(Linear a) {
    ExactShared &s = shared_memory<ExactShared>();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n0 = blockIdx.x * EXACT_N, t0 = blockIdx.y * EXACT_T;
    auto &tile = s.warp[warp];
    float c[EXACT_T] = {};
    int end = min((warp + 1) * a.slice, a.K);
    for (int k = warp * a.slice; k < end; k += SLAB) {
        bool inside = k + lane < a.K;
        for (int i = 0; i < EXACT_N; i++)
            tile.w[i][lane] = inside ? ((const float *)a.w)[(size_t)min(n0 + i, a.N - 1) * a.K + k + lane] : 0;
        for (int t = 0; t < EXACT_T; t++)
            tile.x[t][lane] = inside ? ((const float *)a.x)[(size_t)min(t0 + t, a.T - 1) * a.K + k + lane] : 0;
        __syncwarp();
        for (int i = 0; i < SLAB; i++)
            for (int t = 0; t < EXACT_T; t++) c[t] = fmaf(tile.x[t][i], tile.w[lane][i], c[t]);
        __syncwarp();
    }
    __syncthreads(); // the tiles become room for the sums
    for (int t = 0; t < EXACT_T; t++) s.sum[warp][t][lane] = c[t];
    __syncthreads();
    float total = 0;
    for (int slice = 0; slice * a.slice < a.K; slice++) total += s.sum[slice][warp][lane];
    if (t0 + warp < a.T && n0 + lane < a.N) linear_put(a, t0 + warp, n0 + lane, total);
}

template <int NT> static void launch_rows(const Linear &a) {
    int blocks = div_up(a.N, 16), threads = SLICES * WARP;
    if (a.K % 8 == 0)
        launch(linear_rows<NT, true>, blocks, threads, sizeof(RowsShared<NT>), a);
    else
        launch(linear_rows<NT, false>, blocks, threads, sizeof(RowsShared<NT>), a);
}

template <int MT, int NT> static void launch_tiles(const Linear &a) {
    typedef TileShared<MT, NT> S;
    auto kernel = a.K % 8 == 0 ? linear_tile<MT, NT, true> : linear_tile<MT, NT, false>;
    check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S)), "shared");
    launch(kernel, dim3(div_up(a.N, S::N), div_up(a.T, S::T)), TILE_WARPS * WARP, sizeof(S), a);
}

static void cuda_linear(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                        int N, int K, bool accumulate) {
    int slice = div_up(div_up(K, STEP), SLICES) * STEP;
    Linear a = {out, out_type, x, w, bias, T, N, K, slice, accumulate};
    int64_t large = (int64_t)div_up(N, 128) * div_up(T, 128); // tiles, if they are large: the cheapest in bytes
    if (type == F32)
        launch(linear_exact, dim3(div_up(N, EXACT_N), div_up(T, EXACT_T)), SLICES * WARP, sizeof(ExactShared), a);
    else if (T <= 8)
        launch_rows<1>(a);
    else if (T <= 16)
        launch_rows<2>(a);
    else if (T <= 32)
        launch_rows<4>(a);
    else if (large < gpu.processors)
        launch_tiles<2, 2>(a);
    else
        launch_tiles<4, 4>(a);
}

// ---------------------------------------------------------------------------------------------
// rope

// Thread: an angle, rounded to f32 before the cosine, as transformers does it. T half (8 + 4 / half) bytes; sines of
// large arguments take hundreds of instructions, once a step. Not measured yet.
__global__ void rope_angles(float *cos, float *sin, const int32_t *positions, int axes, const int32_t *axis,
                            const float *freq, int T, int half) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)T * half) return;
    int t = (int)(i / half), pair = (int)(i % half);
    float angle = (float)positions[(size_t)t * axes + axis[pair]] * freq[pair];
    cos[i] = cosf(angle);
    sin[i] = sinf(angle);
}

static void cuda_rope_table(float *cos, float *sin, const int32_t *positions, int axes, const int32_t *axis,
                            const float *freq, int T, int half) {
    launch(rope_angles, div_up((int64_t)T * half, 256), 256, 0, cos, sin, positions, axes, axis, freq, T, half);
}

// Thread: a pair of a head of a row; neighbours, neighbouring pairs. 2 T heads D width bytes: memory. Not measured yet.
template <typename E>
__global__ void rope_pairs(E *x, int stride, const float *cos, const float *sin, int T, int heads, int half) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)T * heads * half) return;
    int pair = (int)(i % half), head = (int)(i / half % heads), t = (int)(i / half / heads);
    E *p = x + (size_t)t * stride + (size_t)head * 2 * half + pair;
    float a = to_f32(p[0]), b = to_f32(p[half]);
    float c = cos[(size_t)t * half + pair], s = sin[(size_t)t * half + pair];
    put(&p[0], a * c - b * s);
    put(&p[half], b * c + a * s);
}

static void cuda_rope(void *x, Dtype type, int stride, const float *cos, const float *sin, int T, int heads, int D) {
    int blocks = div_up((int64_t)T * heads * (D / 2), 256);
    if (type == F32)
        launch(rope_pairs<float>, blocks, 256, 0, (float *)x, stride, cos, sin, T, heads, D / 2);
    else
        launch(rope_pairs<bf16>, blocks, 256, 0, (bf16 *)x, stride, cos, sin, T, heads, D / 2);
}

// ---------------------------------------------------------------------------------------------
// kv_store
//
// Inside a block: keys, then values, both as (H_kv, KV_BLOCK, D). A head's rows of a block are neighbours: 4 KB to read
// at a time with D = 128.

// Thread: a word of a key and of its value. 4 T H_kv D width bytes: memory. Not measured yet.
template <typename Word>
__global__ void kv_words(char *kv, size_t block_bytes, const Word *k, const Word *v, int stride, const int32_t *slot,
                         int T, int H_kv, int words) { // `stride` and `words` of a head in Words
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)T * H_kv * words) return;
    int w = (int)(i % words), h = (int)(i / words % H_kv), t = (int)(i / words / H_kv);
    Word *block = (Word *)(kv + slot[t] / KV_BLOCK * block_bytes);
    size_t from = (size_t)t * stride + (size_t)h * words + w;
    size_t to = ((size_t)h * KV_BLOCK + slot[t] % KV_BLOCK) * words + w;
    block[to] = k[from];
    block[(size_t)H_kv * KV_BLOCK * words + to] = v[from];
}

template <typename Word>
static void launch_kv(void *kv, size_t block_bytes, const void *k, const void *v, size_t stride, const int32_t *slot,
                      int T, int H_kv, size_t head) { // bytes
    int words = (int)(head / sizeof(Word));
    launch(kv_words<Word>, div_up((int64_t)T * H_kv * words, 256), 256, 0, (char *)kv, block_bytes, (const Word *)k,
           (const Word *)v, (int)(stride / sizeof(Word)), slot, T, H_kv, words);
}

static void cuda_kv_store(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v, int stride,
                          const int32_t *slot, int T, int H_kv, int D) {
    size_t width = type == F32 ? 4 : 2, row = stride * width, head = D * width;
    if (aligned(16, kv, (size_t)k | (size_t)v, block_bytes | row | head))
        launch_kv<uint4>(kv, block_bytes, k, v, row, slot, T, H_kv, head);
    else
        launch_kv<uint16_t>(kv, block_bytes, k, v, row, slot, T, H_kv, head);
}

// ---------------------------------------------------------------------------------------------
// Attention: the work
//
// Both attentions, prefill and decode, are the same kernel. A tile is up to 16 query rows that read one key head: all
// heads of its group for one token or several, the rows of a tensor core's operand. Keys go by in spans of 64, at fixed
// positions: a span's scores, its maximum, weights and weighted values are computed afresh and then merged into the
// totals, in order. So a span's result does not depend on who computes it, and when a sequence has one tile only
// (decode), its spans are spread over warps, whose results a second kernel merges in the same order to the same bits.
//
// A launch does not know how many rows or keys there are (that is on the device): a fixed number of warps walk over
// the items of all sequences. So a captured launch would serve any step.

constexpr int TILE_ROWS = 16, SPAN = 64, ATTEND_WARPS = 4;

struct Attention { // the arguments of both attentions, for the kernels
    void *out;
    const void *q, *kv;
    int q_stride;
    const int32_t *block_table; // NULL: keys are rows like the queries (segments)
    int table_stride;
    int key_mask;                       // the bits of a key that say where in its block it is; all for segments
    int block, token, head, value;      // rows of D elements from a block, key, head to the next, and from a key to its
                                        // value: 32 bits reach 500 GB, in half the registers of a pointer
    const int32_t *cu_seqlens, *kv_len; // kv_len NULL: not causal, the keys are the rows
    int q_first, q_n;                   // rows that ask; the first is row 0 of out
    int B, H, H_kv, D, window;
    int group =
        0; // query heads of a key head: they make group_tiles tiles, of group_heads heads and tile_tokens tokens
    int group_tiles = 0, group_heads = 0, tile_tokens = 0;
    float *partial = NULL; // results of spans, slot by slot, each of tile rows x (D values, maximum, sum); NULL: none
    int slots = 0;
};

struct Rows {               // of a sequence or segment
    int begin, first, n;    // row of a segment's key 0; rows that ask: first .. first + n
    int keys, tiles, spans; // its keys; tiles of a key head; spans of keys
};

__device__ __forceinline__ Rows rows_of(const Attention &a, int b) {
    Rows s;
    int begin = a.cu_seqlens[b], end = a.cu_seqlens[b + 1];
    s.begin = a.block_table ? 0 : begin, s.first = max(begin, a.q_first);
    s.keys = a.kv_len ? a.kv_len[b] : end - begin;
    s.n = max(0, min(end, a.q_first + a.q_n) - s.first);
    s.tiles = div_up(s.n, a.tile_tokens), s.spans = div_up(s.keys, SPAN);
    return s;
}

enum Want { TILES, ROWS, MERGES }; // items: tiles or their spans; rows of one head; such rows that must be merged

struct Item {
    int b, part, slot; // of sequence b; slot: where the results of its spans begin, or -1
};

// A warp's place in the list of all items. It only moves forward: 32 sequences a step.
struct Walk {
    int next;               // the item to find next
    int base, items, slots; // the first sequence of the 32, and what those before it have
};

__device__ __forceinline__ int warp_scan(int v) {
    for (int d = 1; d < WARP; d *= 2) {
        int before = __shfl_up_sync(ALL_LANES, v, d);
        if ((int)(threadIdx.x % WARP) >= d) v += before;
    }
    return v;
}

// Find the next item of this warp, one of all the grid's; false when there is none. A sequence's spans are split while
// there are slots for their results.
template <Want WANT> __device__ bool walk_to(Walk &w, const Attention &a, Item &item) {
    for (; w.base < a.B; w.base += WARP) {
        int b = w.base + threadIdx.x % WARP, units = a.H_kv * a.group_tiles, items = 0, slots = 0;
        Rows s = {};
        if (b < a.B) s = rows_of(a, b);
        if (a.partial && s.tiles == 1 && s.spans > 1) slots = units * s.spans;
        int slots_end = warp_scan(slots), slot = w.slots + slots_end - slots;
        bool split = slots > 0 && slot + slots <= a.slots;
        if (WANT == TILES) items = units * (split ? s.spans : s.tiles);
        if (WANT == ROWS || (WANT == MERGES && split)) items = s.n * a.H;
        int items_end = warp_scan(items), total = __shfl_sync(ALL_LANES, items_end, WARP - 1);
        if (w.next < w.items + total) {
            int lane = __popc(__ballot_sync(ALL_LANES, w.items + items_end <= w.next));
            item.b = w.base + lane;
            item.part = w.next - w.items - __shfl_sync(ALL_LANES, items_end - items, lane);
            item.slot = __shfl_sync(ALL_LANES, split ? slot : -1, lane);
            w.next += gridDim.x * ATTEND_WARPS;
            return true;
        }
        w.items += total, w.slots += __shfl_sync(ALL_LANES, slots_end, WARP - 1);
    }
    return false;
}

// Keys lo .. hi that row `token` of a sequence sees.
__device__ __forceinline__ void visible(const Attention &a, const Rows &s, int token, int &lo, int &hi) {
    hi = a.kv_len ? s.keys - s.n + token + 1 : s.keys;
    lo = a.window > 0 && hi > a.window ? hi - a.window : 0;
}

// The KV block that holds a key; 0 for segments, which have none.
__device__ __forceinline__ int block_of(const Attention &a, int b, int key) {
    return a.block_table ? a.block_table[(int64_t)b * a.table_stride + key / KV_BLOCK] : 0;
}

// Rows of D elements from a.kv to a key of head h; its value is a.value more.
__device__ __forceinline__ int place_of(const Attention &a, int block, int begin, int h, int key) {
    return block * a.block + h * a.head + (begin + (key & a.key_mask)) * a.token;
}

__device__ __forceinline__ float *slot_row(const Attention &a, int slot, int row) {
    return a.partial + ((size_t)slot * a.tile_tokens * a.group_heads + row) * (a.D + 2);
}

// Totals and a span's result, scaled to the larger maximum. Both kernels merge with these.
__device__ __forceinline__ float merge(float total, float shrink, float part, float scale) {
    return fmaf(total, shrink, part * scale);
}

// e^(score - m) as a power of two: `unit` is log2(e) / sqrt(D).
__device__ __forceinline__ float weight_of(float score, float m, float unit) { return exp2f((score - m) * unit); }

__device__ __forceinline__ float weight_unit(int D) { return 1.44269504f / sqrtf((float)D); }

// ---------------------------------------------------------------------------------------------
// Attention on the tensor cores: bf16, heads of 32, 64, 80 and 128

struct Tile {
    int b, begin, h;        // sequence; row of a segment's key 0; key head
    int first, heads, rows; // query row r is row first + r / heads, head head0 + r % heads
    int head0, see;         // row 0 sees keys below `see`; causal: each token after it one more
    int lo, hi;             // keys that any of the rows sees
    int span, spans_end;    // spans to go over
    int slot;               // where the result goes, or -1: out
};

__device__ Tile tile_of(const Attention &a, const Item &item) {
    Rows s = rows_of(a, item.b);
    int per_unit = item.slot < 0 ? s.tiles : s.spans;
    int unit = item.part / per_unit, part = item.part % per_unit, g0 = unit % a.group_tiles * TILE_ROWS;
    int token = item.slot < 0 ? (s.tiles - 1 - part) * a.tile_tokens : 0; // those that see most first
    int tokens = min(a.tile_tokens, s.n - token), ignored;
    Tile t;
    t.b = item.b, t.begin = s.begin, t.h = unit / a.group_tiles;
    t.heads = min(TILE_ROWS, a.group - g0), t.rows = tokens * t.heads;
    t.first = s.first + token, t.head0 = t.h * a.group + g0;
    visible(a, s, token, t.lo, t.see);
    visible(a, s, token + tokens - 1, ignored, t.hi);
    t.span = item.slot < 0 ? t.lo / SPAN : part, t.spans_end = item.slot < 0 ? div_up(t.hi, SPAN) : part + 1;
    t.slot = item.slot < 0 ? -1 : item.slot + item.part;
    return t;
}

// What a warp holds of a tile, for head size D. Products with values go by groups of 8 VD columns: a lane loads VD
// neighbouring values of a key, so that column g of the group's matrix j is element VD g + j.
template <int D> struct Mix {
    static constexpr int SLABS = (D + SLAB - 1) / SLAB, VD = D == 64 ? 8 : D % 32 == 0 ? 4 : 2;
    static constexpr int GROUPS = D / (8 * VD);
    int q[2];         // rows g, g + 8, in pieces of 16 bytes from a.q: read again for each span, for registers are dear
    int lo[2], hi[2]; // keys that they see; a row past the tile's end sees none
    float total[GROUPS][VD][4]; // weighted values
    float m[2], l[2];           // maximum score, sum of weights
};

// What waits in shared memory because the registers are full, a warp's own.
struct TilesShared {
    struct {
        uint4 high[SPAN / 16][WARP], low[SPAN / 16][WARP]; // a span's weights, until its values come
        Walk walk;
        Tile tile;
    } warp[ATTEND_WARPS];
};

template <int D> __device__ __forceinline__ Mix<D> mix_begin(const Attention &a, const Tile &t) {
    Mix<D> x = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = threadIdx.x % WARP / 4 + 8 * r, token = row / t.heads, see = t.see + (a.kv_len ? token : 0);
        bool any = row < t.rows;
        x.lo[r] = a.window > 0 && see > a.window ? see - a.window : 0, x.hi[r] = any ? see : 0;
        int64_t q = (t.first + (any ? token : 0)) * (int64_t)a.q_stride + (t.head0 + (any ? row % t.heads : 0)) * D;
        x.q[r] = (int)(q / 8);
        x.m[r] = -INFINITY;
    }
    return x;
}

// 16 bytes of a row of D elements, zeros past its end (D = 80 ends within a slab).
template <int D> __device__ __forceinline__ uint4 load_slab(const bf16 *row, int slab, int q) {
    int d = slab * SLAB + 8 * q;
    return D % SLAB == 0 || d < D ? *(const uint4 *)(row + d) : make_uint4(0, 0, 0, 0);
}

// Where the keys of a span are. A lane knows the rows of keys `lane` and `lane + 32`, and others ask it, again for each
// group of values: for the rows of all keys that a lane reads there are no registers.
struct Span {
    int first, row[SPAN / WARP];
};

// All lookups at once, and all 32 KB (D = 128) called for. A key that no row of the tile sees becomes the nearest one
// that some row does: it has been written, so that its value is a number, and its weight will be 0.
template <int D> __device__ __forceinline__ Span span_begin(const Attention &a, const Tile &t, int first) {
    constexpr int LINE = 64; // elements
    Span s = {first, {}};
#pragma unroll
    for (int i = 0; i < SPAN / WARP; i++) {
        int key = max(t.lo, min(first + i * WARP + (int)threadIdx.x % WARP, t.hi - 1));
        s.row[i] = place_of(a, block_of(a, t.b, key), t.begin, t.h, key);
        const bf16 *k = (const bf16 *)a.kv + (int64_t)s.row[i] * D;
        for (int d = 0; d < D; d += LINE) prefetch(k + d), prefetch(k + (int64_t)a.value * D + d);
    }
    return s;
}

// The row of key 16 i + n of the span.
__device__ __forceinline__ int span_row(const Span &s, int i, int n) {
    return __shfl_sync(ALL_LANES, s.row[i / 2], i % 2 * 16 + n);
}

// Scores of the keys 8 i + 2q, + 1 of the span, rows g and g + 8, in s[i].
template <int D>
__device__ __forceinline__ void span_scores(float s[SPAN / 8][4], const Mix<D> &x, const Attention &a,
                                            const Span &span) {
    int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    int key[SPAN / 8];
#pragma unroll
    for (int i = 0; i < SPAN / 8; i++) {
        key[i] = span_row(span, i / 2, i % 2 * 8 + g);
        for (int e = 0; e < 4; e++) s[i][e] = 0;
    }
#pragma unroll 1 // 8 loads at a time: for more there are no registers
    for (int slab = 0; slab < Mix<D>::SLABS; slab++) {
        uint4 low = load_slab<D>((const bf16 *)a.q + (int64_t)x.q[0] * 8, slab, q);
        uint4 high = load_slab<D>((const bf16 *)a.q + (int64_t)x.q[1] * 8, slab, q);
#pragma unroll
        for (int i = 0; i < SPAN / 8; i++)
            mma_slab(s[i], low, high, load_slab<D>((const bf16 *)a.kv + (int64_t)key[i] * D, slab, q));
    }
}

// Scores to weights, in place; what the row's totals and this span's values are to be scaled by. A row that sees none
// of the keys keeps its totals as they are.
template <int D>
__device__ __forceinline__ void span_weights(float s[SPAN / 8][4], Mix<D> &x, int first, float shrink[2],
                                             float scale[2]) {
    const float unit = weight_unit(D);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = -INFINITY, l = 0;
#pragma unroll
        for (int i = 0; i < SPAN / 4; i++) {
            int key = first + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            float &score = s[i / 2][2 * r + i % 2];
            if (key < x.lo[r] || key >= x.hi[r]) score = -INFINITY;
            m = fmaxf(m, score);
        }
        for (int d = 1; d < 4; d *= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, d));
        bool none = m == -INFINITY;
#pragma unroll
        for (int i = 0; i < SPAN / 4; i++) {
            float &p = s[i / 2][2 * r + i % 2];
            p = weight_of(p, none ? 0 : m, unit);
            l += p;
        }
        for (int d = 1; d < 4; d *= 2) l += __shfl_xor_sync(ALL_LANES, l, d);
        float larger = fmaxf(x.m[r], m);
        shrink[r] = none ? 1 : weight_of(x.m[r], larger, unit), scale[r] = none ? 0 : weight_of(m, larger, unit);
        x.m[r] = larger;
        if (!none) x.l[r] = merge(x.l[r], shrink[r], l, scale[r]);
    }
}

// Weights of 16 keys as the first operand of a product, as they lie. Each is the sum of two bf16 numbers, so that the
// products keep 16 bits of it: rounded to one, the results would differ from the CPU's by a bf16 rounding.
__device__ __forceinline__ void weight_operands(uint4 &high, uint4 &low, const float s[2][4]) {
    uint32_t h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a = s[i / 2][i % 2 * 2], b = s[i / 2][i % 2 * 2 + 1];
        h[i] = pack_bf16(a, b);
        l[i] = pack_bf16(a - __uint_as_float(h[i] << 16), b - __uint_as_float(h[i] & 0xffff0000u));
    }
    high = make_uint4(h[0], h[1], h[2], h[3]), low = make_uint4(l[0], l[1], l[2], l[3]);
}

// Add the span's weighted values to the totals. A lane's four keys of 16 are those whose weights it holds: 2q, 2q + 1,
// 2q + 8, 2q + 9; __byte_perm pairs the same element of two of them.
template <int D>
__device__ __forceinline__ void span_values(float s[SPAN / 8][4], Mix<D> &x, const Attention &a, const Span &span,
                                            const float shrink[2], const float scale[2]) {
    constexpr int VD = Mix<D>::VD, KEYS = 16;
    typedef Vec<uint32_t, VD / 2> Words;
    int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    auto &mine = shared_memory<TilesShared>().warp[threadIdx.x / WARP];
#pragma unroll
    for (int i = 0; i < SPAN / KEYS; i++) weight_operands(mine.high[i][lane], mine.low[i][lane], s + 2 * i);
    __syncwarp();
#pragma unroll
    for (int group = 0; group < Mix<D>::GROUPS; group++) {
        float c[VD][4] = {};
#pragma unroll
        for (int i = 0; i < SPAN / KEYS; i++) {
            uint4 h = mine.high[i][lane], l = mine.low[i][lane];
            uint32_t upper[4] = {h.x, h.y, h.z, h.w}, lower[4] = {l.x, l.y, l.z, l.w};
            Words v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int row = span_row(span, i, 2 * q + k % 2 + k / 2 * 8) + a.value;
                v[k] = *(const Words *)((const bf16 *)a.kv + (int64_t)row * D + group * 8 * VD + g * VD);
            }
#pragma unroll
            for (int j = 0; j < VD; j++) {
                uint32_t halves = j % 2 ? 0x7632 : 0x5410; // the upper or the lower halves of two words
                uint32_t b[2] = {__byte_perm(v[0].v[j / 2], v[1].v[j / 2], halves),
                                 __byte_perm(v[2].v[j / 2], v[3].v[j / 2], halves)};
                mma_16816(c[j], upper, b);
                mma_16816(c[j], lower, b);
            }
        }
#pragma unroll
        for (int j = 0; j < VD; j++)
            for (int e = 0; e < 4; e++)
                if (scale[e / 2] != 0 || shrink[e / 2] != 1)
                    x.total[group][j][e] = merge(x.total[group][j][e], shrink[e / 2], c[j][e], scale[e / 2]);
    }
}

// The lane's columns of a group, VD (2q + c) + j, are 2 VD neighbours.
template <int D> __device__ void tile_store(const Mix<D> &x, const Attention &a, const Tile &t) {
    constexpr int VD = Mix<D>::VD;
    int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    for (int r = 0; r < 2; r++) {
        if (g + 8 * r >= t.rows) continue;
        float *slot = t.slot < 0 ? NULL : slot_row(a, t.slot, g + 8 * r);
        int row = g + 8 * r, token = t.first - a.q_first + row / t.heads, head = t.head0 + row % t.heads;
        bf16 *out = (bf16 *)a.out + ((size_t)token * a.H + head) * D;
        for (int group = 0; group < Mix<D>::GROUPS; group++) {
            int d = group * 8 * VD + 2 * q * VD;
            Vec<uint32_t, VD> words;
            for (int i = 0; i < 2 * VD; i += 2) {
                float u = x.total[group][i % VD][2 * r + i / VD], v = x.total[group][i % VD + 1][2 * r + i / VD];
                words.v[i / 2] = pack_bf16(u / x.l[r], v / x.l[r]);
                if (slot) slot[d + i] = u, slot[d + i + 1] = v;
            }
            if (!slot) *(Vec<uint32_t, VD> *)(out + d) = words;
        }
        if (slot && q == 0) slot[D] = x.m[r], slot[D + 1] = x.l[r];
    }
}

// Warp: a tile of 16 query rows over all its spans, or one span of it. Shared: 17 KB. Neighbouring warps
// take neighbouring tiles of a key head, whose keys and values they find in L1. Decode: 4 S H_kv D bytes, memory, 32 KB
// of keys and values a span under way. Prefill: 6 T S H D flops (the weights count twice), tensor cores. Not measured
// yet.
template <int D> __global__ void __launch_bounds__(ATTEND_WARPS *WARP) attend_tiles(Attention a) {
    auto &mine = shared_memory<TilesShared>().warp[threadIdx.x / WARP];
    Walk walk = {};
    Item item;
    walk.next = blockIdx.x * ATTEND_WARPS + threadIdx.x / WARP;
    while (walk_to<TILES>(walk, a, item)) {
        if (threadIdx.x % WARP == 0) mine.walk = walk, mine.tile = tile_of(a, item);
        __syncwarp();
        Mix<D> x = mix_begin<D>(a, mine.tile);
        for (int n = mine.tile.span; n < mine.tile.spans_end; n++) {
            float s[SPAN / 8][4], shrink[2], scale[2];
            Span span = span_begin<D>(a, mine.tile, n * SPAN);
            span_scores(s, x, a, span);
            span_weights(s, x, span.first, shrink, scale);
            span_values(s, x, a, span, shrink, scale);
        }
        tile_store(x, a, mine.tile);
        walk = mine.walk;
        __syncwarp();
    }
}

// Warp: one head of one token, whose spans' results it merges in order; lane: every 32nd element. 4 S H (D + 2) / 64
// bytes, out of L2: the launch. Not measured yet.
__global__ void __launch_bounds__(ATTEND_WARPS *WARP) attend_merge(Attention a) {
    Walk walk = {};
    Item item;
    int lane = threadIdx.x % WARP;
    walk.next = blockIdx.x * ATTEND_WARPS + threadIdx.x / WARP;
    const float unit = weight_unit(a.D);
    while (walk_to<MERGES>(walk, a, item)) {
        Rows s = rows_of(a, item.b);
        int token = item.part / a.H, head = item.part % a.H;
        int unit_index = head / a.group * a.group_tiles + head % a.group / TILE_ROWS;
        int heads = min(TILE_ROWS, a.group - head % a.group / TILE_ROWS * TILE_ROWS);
        int row = token * heads + head % a.group % TILE_ROWS;
        float m = -INFINITY, l = 0, total[4] = {};
        for (int span = 0; span < s.spans; span++) {
            const float *part = slot_row(a, item.slot + unit_index * s.spans + span, row);
            if (part[a.D] == -INFINITY) continue;
            float larger = fmaxf(m, part[a.D]);
            float shrink = weight_of(m, larger, unit), scale = weight_of(part[a.D], larger, unit);
            m = larger, l = merge(l, shrink, part[a.D + 1], scale);
            for (int d = lane, k = 0; d < a.D; d += WARP, k++) total[k] = merge(total[k], shrink, part[d], scale);
        }
        bf16 *out = (bf16 *)a.out + ((size_t)(s.first - a.q_first + token) * a.H + head) * a.D;
        for (int d = lane, k = 0; d < a.D; d += WARP, k++) put(&out[d], total[k] / l);
    }
}

// ---------------------------------------------------------------------------------------------
// Attention without tensor cores: f32, the reference, and head sizes that the others do not take

constexpr int EXACT_D = 8 * WARP; // the largest head

// Warp: one head of one row. 32 keys at a time from fixed positions: lane, a key, whose score it adds term by term;
// then lane, every 32nd element of the weighted values. Every row reads its keys and values again, out of L1 and L2:
// their bandwidth. Not measured yet.
template <typename E> __global__ void __launch_bounds__(ATTEND_WARPS *WARP) attend_exact(Attention a) {
    Walk walk = {};
    Item item;
    int lane = threadIdx.x % WARP, lo, hi;
    walk.next = blockIdx.x * ATTEND_WARPS + threadIdx.x / WARP;
    const float scale = 1.0f / sqrtf((float)a.D);
    while (walk_to<ROWS>(walk, a, item)) {
        Rows s = rows_of(a, item.b);
        int token = item.part / a.H, head = item.part % a.H, h = head / a.group;
        const E *q = (const E *)a.q + (size_t)(s.first + token) * a.q_stride + (size_t)head * a.D;
        visible(a, s, token, lo, hi);
        float m = -INFINITY, l = 0, total[EXACT_D / WARP] = {};
        for (int first = lo / WARP * WARP; first < hi; first += WARP) {
            int key = first + lane, near = max(lo, min(key, hi - 1));
            const E *k = (const E *)a.kv + (int64_t)place_of(a, block_of(a, item.b, near), s.begin, h, near) * a.D;
            float score = 0;
            for (int d = 0; d < a.D; d++) score = fmaf(to_f32(q[d]), to_f32(k[d]), score);
            score = key == near ? score * scale : -INFINITY;
            float before = m;
            m = fmaxf(m, warp_max(score));
            float weight = expf(score - m), shrink = expf(before - m);
            l = l * shrink + warp_sum(weight);
            for (int n = 0; n < EXACT_D / WARP; n++) total[n] *= shrink;
#pragma unroll 1
            for (int j = 0; j < WARP; j++) {
                float w = __shfl_sync(ALL_LANES, weight, j);
                int from = max(lo, min(first + j, hi - 1));
                int row = place_of(a, block_of(a, item.b, from), s.begin, h, from) + a.value;
                const E *v = (const E *)a.kv + (int64_t)row * a.D;
#pragma unroll
                for (int n = 0; n < EXACT_D / WARP; n++)
                    if (lane + n * WARP < a.D) total[n] = fmaf(w, to_f32(v[lane + n * WARP]), total[n]);
            }
        }
        E *out = (E *)a.out + ((size_t)(s.first - a.q_first + token) * a.H + head) * a.D;
#pragma unroll
        for (int n = 0; n < EXACT_D / WARP; n++)
            if (lane + n * WARP < a.D) put(&out[lane + n * WARP], total[n] / l);
    }
}

static bool attend_on_tensor_cores(const Attention &a, Dtype type) {
    bool size = a.D == 32 || a.D == 64 || a.D == 80 || a.D == 128;
    return type == BF16 && size && aligned(16, a.q, (size_t)a.kv, a.q_stride * sizeof(bf16));
}

// As many blocks as run at once walk over all the items.
static void launch_walk(void (*kernel)(Attention), size_t shared, const Attention &a) {
    constexpr int threads = ATTEND_WARPS * WARP;
    launch(kernel, resident(kernel, threads, shared), threads, shared, a);
}

static void attend(Attention a, Dtype type) {
    assert(a.H % a.H_kv == 0 && a.D <= EXACT_D);
    a.group = a.H / a.H_kv, a.group_tiles = div_up(a.group, TILE_ROWS);
    a.group_heads = a.group < TILE_ROWS ? a.group : TILE_ROWS, a.tile_tokens = TILE_ROWS / a.group_heads;
    if (!attend_on_tensor_cores(a, type)) {
        launch_walk(type == F32 ? attend_exact<float> : attend_exact<bf16>, 0, a);
        return;
    }
    a.partial = a.kv_len ? gpu.scratch : NULL;
    a.slots = (int)(SCRATCH / (a.tile_tokens * a.group_heads * (a.D + 2) * sizeof(float)));
    launch_walk(a.D == 32   ? attend_tiles<32>
                : a.D == 64 ? attend_tiles<64>
                : a.D == 80 ? attend_tiles<80>
                            : attend_tiles<128>,
                sizeof(TilesShared), a);
    if (a.partial) launch_walk(attend_merge, 0, a);
}

static void cuda_attention_paged(void *out, Dtype type, const void *q, int stride, const void *kv, size_t block_bytes,
                                 const int32_t *block_table, int table_stride, const int32_t *cu_seqlens,
                                 const int32_t *kv_len, int B, int H, int H_kv, int D, int window) {
    size_t row_bytes = D * (type == F32 ? 4 : 2);
    assert(block_bytes % row_bytes == 0);
    attend({.out = out,
            .q = q,
            .kv = kv,
            .q_stride = stride,
            .block_table = block_table,
            .table_stride = table_stride,
            .key_mask = KV_BLOCK - 1,
            .block = (int)(block_bytes / row_bytes),
            .token = 1,
            .head = KV_BLOCK,
            .value = H_kv * KV_BLOCK,
            .cu_seqlens = cu_seqlens,
            .kv_len = kv_len,
            .q_first = 0,
            .q_n = 1 << 30,
            .B = B,
            .H = H,
            .H_kv = H_kv,
            .D = D,
            .window = window},
           type);
}

static void cuda_attention_segments(void *out, Dtype type, const void *qkv, const int32_t *cu_seqlens, int segments,
                                    int first, int n, int H, int D) {
    size_t width = type == F32 ? 4 : 2, row = (size_t)H * D;
    attend({.out = out,
            .q = qkv,
            .kv = (const char *)qkv + row * width,
            .q_stride = (int)(3 * row),
            .block_table = NULL,
            .table_stride = 0,
            .key_mask = -1,
            .block = 0,
            .token = 3 * H,
            .head = 1,
            .value = H,
            .cu_seqlens = cu_seqlens,
            .kv_len = NULL,
            .q_first = first,
            .q_n = n,
            .B = segments,
            .H = H,
            .H_kv = H,
            .D = D,
            .window = 0},
           type);
}

// ---------------------------------------------------------------------------------------------
// glu, gelu

// Thread: N neighbouring elements of a row. 3 T F width bytes: memory. Not measured yet.
template <typename E, int N> __global__ void glu_pieces(E *out, const E *gate_up, int T, int F) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N, t = i / F, f = i % F;
    if (t >= T) return;
    Vec<E, N> gate = *(const Vec<E, N> *)&gate_up[t * 2 * F + f],
              up = *(const Vec<E, N> *)&gate_up[(t * 2 + 1) * F + f];
    for (int j = 0; j < N; j++) {
        float x = to_f32(gate.v[j]);
        put(&gate.v[j], x / (expf(-x) + 1.0f) * to_f32(up.v[j]));
    }
    *(Vec<E, N> *)&out[i] = gate;
}

template <typename E, int N> static void launch_glu(void *out, const void *gate_up, int T, int F) {
    launch(glu_pieces<E, N>, div_up((int64_t)T * F / N, 256), 256, 0, (E *)out, (const E *)gate_up, T, F);
}

static void cuda_glu(void *out, const void *gate_up, Dtype type, int T, int F) {
    if (type == F32)
        F % 4 == 0 ? launch_glu<float, 4>(out, gate_up, T, F) : launch_glu<float, 1>(out, gate_up, T, F);
    else if (F % 8 == 0)
        launch_glu<bf16, 8>(out, gate_up, T, F);
    else
        F % 4 == 0 ? launch_glu<bf16, 4>(out, gate_up, T, F) : launch_glu<bf16, 1>(out, gate_up, T, F);
}

// Thread: N neighbouring elements. 2 n width bytes: memory. Not measured yet.
template <typename E, int N> __global__ void gelu_pieces(E *x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    Vec<E, N> v = *(const Vec<E, N> *)&x[i];
    for (int j = 0; j < N; j++) {
        float f = to_f32(v.v[j]);
        put(&v.v[j], 0.5f * f * (1.0f + erff(f * 0.70710678f)));
    }
    *(Vec<E, N> *)&x[i] = v;
}

template <typename E, int N> static void launch_gelu(void *x, size_t n) {
    launch(gelu_pieces<E, N>, div_up(n / N, 256), 256, 0, (E *)x, n);
}

static void cuda_gelu(void *x, Dtype type, size_t n) {
    if (type == F32)
        n % 4 == 0 ? launch_gelu<float, 4>(x, n) : launch_gelu<float, 1>(x, n);
    else
        n % 8 == 0 ? launch_gelu<bf16, 8>(x, n) : launch_gelu<bf16, 1>(x, n);
}

// ---------------------------------------------------------------------------------------------
// sample

struct Best {
    float score;
    int id; // NOBODY: none
};
constexpr int NOBODY = 0x7fffffff, DIGIT = 10, BINS = 1 << DIGIT;

struct SampleShared {
    float cells[WARP];
    Best best[WARP];
    unsigned long long bins[BINS], sum; // of weights in units of 2^-40, or of counts: whole numbers add in any order
    int digit;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

__device__ __forceinline__ Best warp_best(Best v) {
    for (int d = WARP / 2; d; d /= 2) {
        Best other = {__shfl_xor_sync(ALL_LANES, v.score, d), __shfl_xor_sync(ALL_LANES, v.id, d)};
        v = better(v, other);
    }
    return v;
}

// The best of all threads' candidates: the largest score, the lowest id among equals.
__device__ Best block_best(SampleShared &s, Best v) {
    int lane = threadIdx.x % WARP;
    v = warp_best(v);
    if (lane == 0) s.best[threadIdx.x / WARP] = v;
    __syncthreads();
    v = warp_best(lane < (int)blockDim.x / WARP ? s.best[lane] : Best{-INFINITY, NOBODY});
    __syncthreads();
    return v;
}

// The largest entry that comes after `last` in falling order. NaN is none.
__device__ Best next_best(SampleShared &s, const float *x, int V, Best last) {
    Best best = {-INFINITY, NOBODY};
    for (int i = threadIdx.x; i < V; i += blockDim.x)
        if (x[i] < last.score || (x[i] == last.score && i > last.id)) best = better(best, Best{x[i], i});
    return block_best(s, best);
}

// Warp 0: the highest digit with `want` in the bins from it up, or -1; `want` less what is above it.
__device__ void find_digit(SampleShared &s, unsigned long long &want) {
    constexpr int EACH = BINS / WARP;
    int lane = threadIdx.x % WARP;
    unsigned long long mine = 0, upto;
    for (int i = 0; i < EACH; i++) mine += s.bins[BINS - 1 - lane * EACH - i];
    upto = mine;
    for (int d = 1; d < WARP; d *= 2) {
        unsigned long long above = __shfl_up_sync(ALL_LANES, upto, d);
        if (lane >= d) upto += above;
    }
    int owner = __popc(__ballot_sync(ALL_LANES, upto < want));
    if (lane == 0) s.digit = -1;
    __syncwarp();
    if (lane == owner) {
        unsigned long long sum = upto - mine;
        int bin = BINS - 1 - lane * EACH;
        while (sum + s.bins[bin] < want) sum += s.bins[bin--];
        s.digit = bin, s.sum = want - sum;
    }
}

__device__ __forceinline__ unsigned long long units(float weight) { return (unsigned long long)(weight * 0x1p40f); }

// The largest floor such that the weights from it up, of those that are at least `from`, sum to `want` (by_count: are
// as many); 0 if all together do not. Three digits of the bits of a float in (0, 1], which sort like integers.
__device__ float find_floor(SampleShared &s, const float *x, int V, float from, unsigned long long want,
                            bool by_count) {
    uint32_t found = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < V; i += blockDim.x) {
            uint32_t bits = __float_as_uint(x[i]);
            if (x[i] > 0 && x[i] >= from && bits >> shift >> DIGIT == found)
                atomicAdd(&s.bins[bits >> shift & (BINS - 1)], by_count ? 1 : units(x[i]));
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(s, want);
        __syncthreads();
        int digit = s.digit;
        want = s.sum;
        __syncthreads();
        if (digit < 0) return 0;
        found = found << DIGIT | digit;
    }
    return __uint_as_float(found);
}

__device__ unsigned long long sum_units(SampleShared &s, const float *x, int V, float from) {
    unsigned long long sum = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x)
        if (x[i] >= from) sum += units(x[i]);
    if (threadIdx.x == 0) s.sum = 0;
    __syncthreads();
    atomicAdd(&s.sum, sum);
    __syncthreads();
    sum = s.sum;
    __syncthreads();
    return sum;
}

// Logits to weights relative to the most likely token, in place; what top-k, top-p and min-p leave; a draw from it.
__device__ Best draw(SampleShared &s, float *x, int V, const SampleRow &row) {
    float max = next_best(s, x, V, Best{INFINITY, -1}).score, from = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x) x[i] = expf((x[i] - max) / row.how.temperature);
    __syncthreads();
    if (row.how.top_k > 0 && row.how.top_k < V) from = find_floor(s, x, V, 0, row.how.top_k, true);
    if (row.how.top_p < 1) {
        double want = ceil(row.how.top_p * (double)sum_units(s, x, V, from));
        from = fmaxf(from, find_floor(s, x, V, from, want < 1 ? 1 : (unsigned long long)want, false));
    }
    float floor = fmaxf(row.how.min_p, from);
    Best best = {-1, NOBODY};
    for (int i = threadIdx.x; i < V; i += blockDim.x)
        if (x[i] > 0 && x[i] >= floor)
            best = better(best, Best{x[i] / -logf(sample_uniform(row.how.seed, row.step, i)), i});
    return block_best(s, best);
}

// The row with its penalties, in `work`.
__device__ void apply_penalties(float *work, const float *x, int V, const SampleRow &row, const TokenCount *counts) {
    for (int i = threadIdx.x; i < V; i += blockDim.x) work[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < row.n; i += blockDim.x) {
        TokenCount c = counts[row.first + i];
        float l = work[c.id];
        l = l > 0 ? l / row.how.repetition_penalty : l * row.how.repetition_penalty;
        work[c.id] = l - (row.how.frequency_penalty * c.count + (c.count > 0 ? row.how.presence_penalty : 0));
    }
    __syncthreads();
}

// Block: a row. 2 readings for the most likely token; 12 V floats read or written for a draw with top-k and top-p, out
// of L2: what one SM reads. Shared: 9 KB. Not measured yet.
__global__ void sample_row(Sampled *out, const float *logits, float *work, const SampleRow *rows,
                           const TokenCount *counts, int V) {
    SampleShared &s = shared_memory<SampleShared>();
    const SampleRow row = rows[blockIdx.x];
    const float *x = logits + (size_t)blockIdx.x * V;
    float *y = work + (size_t)blockIdx.x * V, sum = 0;
    Best top = next_best(s, x, V, Best{INFINITY, -1}), last = top, best = top;
    for (int i = threadIdx.x; i < V; i += blockDim.x) sum += expf(x[i] - top.score);
    float log_sum = logf(block_sum(sum, s.cells));

    Sampled *o = out + blockIdx.x;
    for (int k = 0; k < MAX_LOGPROBS; k++) {
        if (k > 0 && k < row.how.logprobs) last = next_best(s, x, V, last);
        bool asked = k < row.how.logprobs, any = last.id != NOBODY; // none left: NaN among the logits
        if (threadIdx.x == 0) {
            o->top_id[k] = !asked ? -1 : any ? last.id : min(k, V - 1);
            o->top_logprob[k] = !asked ? 0 : any ? last.score - top.score - log_sum : nanf("");
        }
    }
    if (row.n > 0 || row.how.temperature > 0) {
        apply_penalties(y, x, V, row, counts);
        best = row.how.temperature > 0 ? draw(s, y, V, row) : next_best(s, y, V, Best{INFINITY, -1});
    }
    if (threadIdx.x == 0) {
        o->id = best.id == NOBODY ? 0 : best.id;
        o->logprob = x[o->id] - top.score - log_sum;
    }
}

static void cuda_sample(Sampled *out, const float *logits, float *work, const SampleRow *rows, const TokenCount *counts,
                        int R, int V) {
    int warps = div_up(V, 4 * WARP), threads = (warps < 32 ? warps : 32) * WARP; // by V alone: it sets the order
    launch(sample_row, R, threads, sizeof(SampleShared), out, logits, work, rows, counts, V);
}

const Device device_cuda = {
    .name = "cuda",
    .unified = false,
    .quantised = false,
    .step_patches = 8192,
    .clock = NULL,
    .start = cuda_start,
    .memory = cuda_memory,
    .reserve = cuda_reserve,
    .reserve_host = cuda_reserve_host,
    .release = cuda_release,
    .release_host = cuda_release_host,
    .upload = cuda_upload,
    .download = cuda_download,
    .embed = cuda_embed,
    .gather_rows = cuda_gather_rows,
    .rmsnorm = cuda_rmsnorm,
    .linear = cuda_linear,
    .rope_table = cuda_rope_table,
    .rope = cuda_rope,
    .kv_store = cuda_kv_store,
    .attention_paged = cuda_attention_paged,
    .attention_segments = cuda_attention_segments,
    .glu = cuda_glu,
    .gelu = cuda_gelu,
    .sample = cuda_sample,
};
