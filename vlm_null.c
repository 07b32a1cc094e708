// vlm_null.c: a Device that computes nothing. It counts what each operation would read, write and multiply, and
// advances a clock by a roofline. Two uses: the memory plan runs the worst step on it, and `vlm bench --device null`
// runs the true engine, at full scale, on hardware that is not there.
#include "vlm.h"
#include <string.h>
#include <sys/mman.h>

static struct {
    Roofline roofline;
    double seconds, bytes, flops;
    bool measuring;
} null = {.roofline = {"h100", 3.35e12, 989e12, 3.35e12 * 0.85, 989e12 * 0.6, 3e-6}};

// Peaks are the makers' figures: memory, and dense bf16 with f32 sums. Good kernels reach about 85% of the one and 60%
// of the other; 3 microseconds is the usual cost of an operation in a captured graph.
bool null_preset(const char *name, Roofline *r) {
    static const Roofline presets[] = {
        {.name = "h100", .peak_bandwidth = 3.35e12, .peak_flops = 989e12},
        {.name = "h200", .peak_bandwidth = 4.8e12, .peak_flops = 989e12},
        {.name = "rtx4090", .peak_bandwidth = 1.008e12, .peak_flops = 165e12},
    };
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        if (strcmp(name, presets[i].name)) continue;
        *r = presets[i];
        r->bandwidth = r->peak_bandwidth * 0.85, r->flops = r->peak_flops * 0.6, r->launch = 3e-6;
        return true;
    }
    return false;
}

void null_use(const Roofline *r) { null.roofline = *r; }
void null_measure(bool measuring) { null.measuring = measuring; }
static double null_clock(void) { return null.seconds; }
void null_work(double *bytes, double *flops) { *bytes = null.bytes, *flops = null.flops; }

static void work(double bytes, double flops) {
    const Roofline *r = &null.roofline;
    double memory = bytes / r->bandwidth, compute = flops / r->flops;
    null.seconds += r->launch + (memory > compute ? memory : compute);
    null.bytes += bytes, null.flops += flops;
}

// Addresses without memory behind them until they are touched, and only the step's small inputs ever are.
static void *null_reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void null_release(void *base, size_t bytes) { munmap(base, bytes); }

static void null_copy(void *dst, const void *src, size_t bytes) {
    if (!null.measuring) memcpy(dst, src, bytes);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

static void null_embed(float *out, const void *table, Dtype type, const int32_t *ids, int T, int C) {
    work((double)T * C * (4 + (double)matrix_bytes(type, Q_ROWS, C) / (Q_ROWS * C)), 0);
}

static void null_gather_rows(void *dst, const void *src, const int32_t *index, int n, size_t row_bytes) {
    work(2.0 * n * row_bytes, 0);
}

static void null_rmsnorm(void *out, Dtype type, const float *x, const float *weight, float eps, int T, int C) {
    work((double)T * C * (4 + dtype_bytes(type)), 0);
}

static void null_linear(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                        int N, int K, bool accumulate) {
    double operands = (double)matrix_bytes(type, N, K) + (double)T * K * dtype_bytes(compute_type(type));
    work(operands + (double)T * N * dtype_bytes(out_type) * (1 + accumulate), 2.0 * T * N * K);
}

static void null_rope_table(float *cos, float *sin, const int32_t *positions, int axes, const int32_t *axis,
                            const float *freq, int T, int half) {
    work(8.0 * T * half, 0);
}

static void null_rope(void *x, Dtype type, int stride, const float *cos, const float *sin, int T, int heads, int D) {
    work((double)T * heads * D * 2 * dtype_bytes(type), 0);
}

static void null_kv_store(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v, int stride,
                          const int32_t *slot, int T, int H_kv, int D) {
    work(4.0 * T * H_kv * D * dtype_bytes(type), 0);
}

// Each sequence's keys and values are read once; each query meets the keys before it.
static void null_attention_paged(void *out, Dtype type, const void *q, int stride, const void *kv, size_t block_bytes,
                                 const int32_t *block_table, int table_stride, const int32_t *cu_seqlens,
                                 const int32_t *kv_len, int B, int H, int H_kv, int D, int window) {
    double keys = 0, pairs = 0;
    for (int b = 0; b < B && !null.measuring; b++) {
        double n = cu_seqlens[b + 1] - cu_seqlens[b], S = kv_len[b];
        keys += S, pairs += n * (S - (n - 1) / 2);
    }
    work(keys * 2 * H_kv * D * dtype_bytes(type), 4 * pairs * H * D);
}

// Each row meets the keys of its segment; the segments that the rows lie in are read once.
static void null_attention_segments(void *out, Dtype type, const void *qkv, const int32_t *cu_seqlens, int segments,
                                    int first, int n, int H, int D) {
    double keys = 0, pairs = 0;
    for (int i = 0; i < segments && !null.measuring; i++) {
        int from = cu_seqlens[i] > first ? cu_seqlens[i] : first;
        int to = cu_seqlens[i + 1] < first + n ? cu_seqlens[i + 1] : first + n;
        double S = cu_seqlens[i + 1] - cu_seqlens[i];
        if (from < to) keys += S, pairs += (to - from) * S;
    }
    work((2 * n + 2 * keys) * H * D * dtype_bytes(type), 4 * pairs * H * D);
}

static void null_glu(void *out, const void *gate_up, Dtype type, int T, int F) {
    work((double)T * 3 * F * dtype_bytes(type), 0);
}

static void null_gelu(void *x, Dtype type, size_t n) { work(2.0 * n * dtype_bytes(type), 0); }

static void null_sample(Sampled *out, const float *logits, float *work_space, const SampleRow *rows,
                        const TokenCount *counts, int R, int V) {
    work(8.0 * R * V, 0);
}

#pragma GCC diagnostic pop

const Device device_null = {
    .name = "null",
    .unified = true,
    .quantised = true,
    .step_patches = 4096,
    .clock = null_clock,
    .reserve = null_reserve,
    .reserve_host = null_reserve,
    .release = null_release,
    .release_host = null_release,
    .upload = null_copy,
    .download = null_copy,
    .embed = null_embed,
    .gather_rows = null_gather_rows,
    .rmsnorm = null_rmsnorm,
    .linear = null_linear,
    .rope_table = null_rope_table,
    .rope = null_rope,
    .kv_store = null_kv_store,
    .attention_paged = null_attention_paged,
    .attention_segments = null_attention_segments,
    .glu = null_glu,
    .gelu = null_gelu,
    .sample = null_sample,
};
