// test/ops: every operation of a Device against plain double-precision loops, at awkward sizes, in f32 and bf16; and
// the rule of arithmetic: rows computed together == rows computed alone, bit for bit. Passing it is what "ported"
// means.
//
//   test_ops [cpu|cuda]      prints a line per operation that fails, and the counts
#include "check.h"
#include "vlm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const Device *const devices[] = {
    &device_cpu,
#ifdef HAVE_CUDA
    &device_cuda,
#endif
};
static const Device *dev;
// ---------------------------------------------------------------------------------------------
// Numbers, and arrays that live on the device with a host copy in double

static uint64_t seed = 1;
static double uniform(void) { // in [-1, 1)
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(seed >> 32) / 2147483648.0;
}

static bf16 round_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (bf16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float widen(bf16 b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// All arrays of a case come from one reservation, as in the engine; guard bytes between them must survive.
enum { POOL = 64 << 20, GUARD = 256 };
static char *pool;
static size_t pool_used;

static void *take(size_t bytes) {
    static const char guard[GUARD] = {0x55};
    size_t at = pool_used, end = at + (bytes + 255) / 256 * 256;
    pool_used = end + GUARD;
    if (pool_used > POOL) abort();
    dev->upload(pool + end, guard, GUARD);
    return pool + at;
}

typedef struct Array {
    void *dev;
    Dtype type;
    size_t n;
    double *host;
} Array;

// Random numbers of about the given scale, exactly as the device's type holds them.
static Array array(Dtype type, size_t n, double scale) {
    Array a = {take(n * dtype_bytes(type)), type, n, malloc((n + 1) * sizeof(double))};
    void *raw = malloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++) {
        float f = (float)(uniform() * scale);
        if (type == F32)
            ((float *)raw)[i] = f, a.host[i] = f;
        else
            ((bf16 *)raw)[i] = round_bf16(f), a.host[i] = widen(((bf16 *)raw)[i]);
    }
    dev->upload(a.dev, raw, n * dtype_bytes(type));
    free(raw);
    return a;
}

// A random Q8 or Q4 matrix in tiles, as docs/format.md says, and what it stands for in host[]. Scales are of all
// signs, from 1/1024 to 1.
static Array quantised(Dtype type, int N, int K) {
    size_t bytes = matrix_bytes(type, N, K), group = type == Q8 ? 1024 : 512;
    Array a = {take(bytes), type, (size_t)N * K, malloc(((size_t)N * K + 1) * sizeof(double))};
    uint8_t *raw = malloc(bytes);
    memset(raw, type == Q8 ? 0x80 : 0x88, bytes); // zero
    for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) {
            uint8_t *pair = raw + n / 16 * tile_bytes(type, K) + k / 128 * pair_bytes(type);
            uint8_t *at = pair + 64 + k / 64 % 2 * group + n % 16 * 4 + k % 4;
            uint16_t *half = (uint16_t *)pair + k / 64 % 2 * 16 + n % 16;
            int exponent = (n * 7 + k / 64) % 10 + 1, fraction = (n * 37 + k / 64 * 11) % 1024; // of the f16
            double scale = ldexp(1 + fraction / 1024.0, -exponent) * (n % 3 ? 1 : -1);
            *half = (uint16_t)((15 - exponent) << 10 | fraction | (n % 3 ? 0 : 0x8000));
            int q = type == Q8 ? (int)floor(uniform() * 127.49 + 0.5) : (int)floor(uniform() * 8);
            if (type == Q8)
                at[k % 64 / 4 * 64] = (uint8_t)(q + 128);
            else { // number k of the group and number k + 4 share a byte
                uint8_t *both = at + k % 64 / 8 * 64;
                *both = (uint8_t)(k & 4 ? (*both & 0x0f) | (q + 8) << 4 : (*both & 0xf0) | (q + 8));
            }
            a.host[(size_t)n * K + k] = q * scale;
        }
    dev->upload(a.dev, raw, bytes);
    free(raw);
    return a;
}

static void *ints(const int32_t *v, int n) {
    void *p = take(n * sizeof *v);
    dev->upload(p, v, n * sizeof *v);
    return p;
}

static void *fetch_raw(const void *p, size_t bytes) {
    void *raw = malloc(bytes + 1);
    dev->download(raw, p, bytes);
    return raw;
}

static void fetch(double *out, const void *p, Dtype type, size_t n) {
    void *raw = fetch_raw(p, n * dtype_bytes(type));
    for (size_t i = 0; i < n; i++) out[i] = type == F32 ? ((float *)raw)[i] : widen(((bf16 *)raw)[i]);
    free(raw);
}

static void reset(Array *arrays, int n) {
    for (int i = 0; i < n; i++) free(arrays[i].host);
    pool_used = 0;
}

// Every element within `tolerance` of the reference, relative to the largest magnitude of the reference; a bf16
// result may also be off by its own rounding. NaN fails.
static void compare(const char *what, const void *got, Dtype type, const double *want, size_t n, double tolerance) {
    double *have = malloc((n + 1) * sizeof *have), scale = 1e-30, worst = 0;
    size_t where = 0;
    fetch(have, got, type, n);
    for (size_t i = 0; i < n; i++) scale = fmax(scale, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        double err = fabs(have[i] - want[i]) - (type == BF16 ? fabs(want[i]) / 256 : 0);
        if (!(err <= worst)) worst = err, where = i;
    }
    check(worst <= tolerance * scale, "%s: element %zu is %g, wanted %g (scale %g, tolerance %g)", what, where,
          have[where], want[where], scale, tolerance);
    free(have);
}

static void same(const char *what, const void *a, const void *b, size_t bytes) {
    void *x = fetch_raw(a, bytes), *y = fetch_raw(b, bytes);
    check(!memcmp(x, y, bytes), "%s: rows alone differ from rows together", what);
    free(x), free(y);
}

// An f32 sum of n terms in 16 lanes errs by at most about (n / 16 + 5) roundings; 2^-24 each.
static double sum_tolerance(int n) { return (n / 16 + 8) * 6e-8; }

static void *row_of(const void *p, Dtype type, size_t i) { return (char *)p + i * dtype_bytes(type); }

// ---------------------------------------------------------------------------------------------
// One function per operation

static void test_embed(Dtype type) {
    enum { V = 37, C = 145, T = 11 };
    Array table = type >= Q8 ? quantised(type, V, C) : array(type, V * C, 1), out = array(F32, T * C, 1);
    int32_t ids[T] = {0, 36, 5, -1, 5, 17, -1, 1, 2, 3, 36};
    dev->embed(out.dev, table.dev, type, ints(ids, T), T, C);
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C && ids[t] >= 0; c++) out.host[t * C + c] = table.host[ids[t] * C + c];
    compare("embed", out.dev, F32, out.host, T * C, 0);
    reset((Array[]){table, out}, 2);
}

static void test_gather_rows(void) {
    enum { N = 9, M = 21, C = 33 };
    Array src = array(F32, M * C, 1), dst = array(F32, N * C, 1);
    int32_t index[N] = {20, 0, -1, 7, 7, 3, -1, 19, 1};
    dev->gather_rows(dst.dev, src.dev, ints(index, N), N, C * sizeof(float));
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C && index[i] >= 0; c++) dst.host[i * C + c] = src.host[index[i] * C + c];
    compare("gather_rows", dst.dev, F32, dst.host, N * C, 0);
    reset((Array[]){src, dst}, 2);
}

static void test_rmsnorm(Dtype type, int T, int C) {
    Array x = array(F32, (size_t)T * C, 3), w = array(F32, C, 1.5), out = array(type, (size_t)T * C, 1);
    for (int t = 0; t < T; t++) {
        double squares = 0;
        for (int c = 0; c < C; c++) squares += x.host[t * C + c] * x.host[t * C + c];
        for (int c = 0; c < C; c++) out.host[t * C + c] = x.host[t * C + c] / sqrt(squares / C + 1e-5) * w.host[c];
    }
    dev->rmsnorm(out.dev, type, x.dev, w.dev, 1e-5f, T, C);
    compare("rmsnorm", out.dev, type, out.host, (size_t)T * C, sum_tolerance(C));
    void *alone = take(C * dtype_bytes(type));
    dev->rmsnorm(alone, type, (float *)x.dev + (size_t)(T - 1) * C, w.dev, 1e-5f, 1, C);
    same("rmsnorm", alone, row_of(out.dev, type, (size_t)(T - 1) * C), C * dtype_bytes(type));
    reset((Array[]){x, w, out}, 3);
}

static void test_linear(Dtype type, Dtype out_type, int T, int N, int K, bool bias, bool accumulate) {
    char what[96];
    snprintf(what, sizeof what, "linear %s T=%d N=%d K=%d%s", type == F32 ? "f32" : "bf16", T, N, K,
             accumulate ? " +=" : "");
    Array x = array(type, (size_t)T * K, 1), w = array(type, (size_t)N * K, 1), b = array(F32, N, 1);
    Array out = array(out_type, (size_t)T * N, accumulate ? 1 : 0);
    void *before = take((size_t)N * dtype_bytes(out_type)),
         *raw = fetch_raw(row_of(out.dev, out_type, (size_t)(T - 1) * N), N * dtype_bytes(out_type));
    dev->upload(before, raw, N * dtype_bytes(out_type));
    free(raw);
    double magnitude = 0, scale = 1e-30;
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++) {
            double sum = accumulate ? out.host[(size_t)t * N + n] : 0, size = fabs(sum);
            for (int k = 0; k < K; k++) {
                double term = x.host[(size_t)t * K + k] * w.host[(size_t)n * K + k];
                sum += term, size += fabs(term);
            }
            if (bias) sum += b.host[n], size += fabs(b.host[n]);
            out.host[(size_t)t * N + n] = sum;
            magnitude = fmax(magnitude, size), scale = fmax(scale, fabs(sum));
        }
    const float *bd = bias ? b.dev : NULL;
    dev->linear(out.dev, out_type, x.dev, w.dev, type, bd, T, N, K, accumulate);
    compare(what, out.dev, out_type, out.host, (size_t)T * N, sum_tolerance(K) * magnitude / scale);
    dev->linear(before, out_type, row_of(x.dev, type, (size_t)(T - 1) * K), w.dev, type, bd, 1, N, K, accumulate);
    same(what, before, row_of(out.dev, out_type, (size_t)(T - 1) * N), N * dtype_bytes(out_type));
    reset((Array[]){x, w, b, out}, 4);
}

// As test_linear, with w in 8 or 4 bits. `exact`: x is of numbers that rounding to 8 bits leaves as they are, so
// nothing but the f32 sum of the groups may err. Otherwise each x may be off by half a step of its group, which is at
// most its largest number over 127.
static void test_quantised(Dtype type, Dtype out_type, int T, int N, int K, bool bias, bool accumulate, bool exact) {
    char what[96];
    snprintf(what, sizeof what, "linear %s T=%d N=%d K=%d%s%s", dtype_name(type), T, N, K, accumulate ? " +=" : "",
             exact ? " exact" : "");
    Array x = array(BF16, (size_t)T * K, 1), w = quantised(type, N, K), b = array(F32, N, 1);
    bf16 *raw = fetch_raw(x.dev, (size_t)T * K * 2);
    for (size_t i = 0; exact && i < (size_t)T * K; i++) {
        x.host[i] = (i % K % Q_GROUP == i / K % 7 ? 127 : floor(x.host[i] * 127 + 0.5)) / 128; // a 127 in each group
        raw[i] = round_bf16((float)x.host[i]);
    }
    dev->upload(x.dev, raw, (size_t)T * K * 2);
    free(raw);
    Array out = array(out_type, (size_t)T * N, accumulate ? 1 : 0);
    size_t row = (size_t)N * dtype_bytes(out_type);
    void *before = take(row), *last = fetch_raw(row_of(out.dev, out_type, (size_t)(T - 1) * N), row);
    dev->upload(before, last, row);
    free(last);
    double *bound = calloc((size_t)T * N, sizeof *bound);
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++) {
            double sum = accumulate ? out.host[(size_t)t * N + n] : 0, size = fabs(sum), most = 0;
            for (int k = 0; k < K; k++) {
                double *v = &x.host[(size_t)t * K + k], weight = w.host[(size_t)n * K + k];
                for (int i = 0; k % Q_GROUP == 0 && i < Q_GROUP && k + i < K; i++)
                    most = fmax(i ? most : 0, fabs(v[i]));
                sum += *v * weight, size += fabs(*v * weight);
                if (!exact) bound[(size_t)t * N + n] += most / 127 / 2 * 1.0001 * fabs(weight);
            }
            if (bias) sum += b.host[n], size += fabs(b.host[n]);
            out.host[(size_t)t * N + n] = sum;
            bound[(size_t)t * N + n] += size * (K / Q_GROUP + 8) * 6e-8; // a sum over the groups, and its scales
            if (out_type == BF16) bound[(size_t)t * N + n] += fabs(sum) / 256;
        }
    const float *bd = bias ? b.dev : NULL;
    dev->linear(out.dev, out_type, x.dev, w.dev, type, bd, T, N, K, accumulate);
    double *have = malloc(((size_t)T * N + 1) * sizeof *have);
    fetch(have, out.dev, out_type, (size_t)T * N);
    size_t wrong = 0, where = 0;
    for (size_t i = 0; i < (size_t)T * N; i++)
        if (!(fabs(have[i] - out.host[i]) <= bound[i])) wrong++, where = i;
    check(!wrong, "%s: %zu elements are off, the last is %zu: %g, wanted %g to %g", what, wrong, where, have[where],
          out.host[where], bound[where]);
    dev->linear(before, out_type, row_of(x.dev, BF16, (size_t)(T - 1) * K), w.dev, type, bd, 1, N, K, accumulate);
    same(what, before, row_of(out.dev, out_type, (size_t)(T - 1) * N), row);
    free(bound), free(have);
    reset((Array[]){x, w, b, out}, 4);
}

// A number that is none in x must show in its own row, and in no other.
static void test_quantised_nan(Dtype type) {
    enum { T = 5, N = 20, K = 200 };
    Array x = array(BF16, T * K, 1), w = quantised(type, N, K);
    bf16 *raw = fetch_raw(x.dev, T * K * 2);
    raw[2 * K + 77] = 0x7fc0, raw[3 * K + 199] = 0x7f80; // NaN, infinity
    dev->upload(x.dev, raw, T * K * 2);
    free(raw);
    void *out = take(T * N * 4);
    double have[T * N];
    dev->linear(out, F32, x.dev, w.dev, type, NULL, T, N, K, false);
    fetch(have, out, F32, T * N);
    for (int i = 0; i < T * N; i++)
        check(isfinite(have[i]) == (i / N != 2 && i / N != 3), "linear %s: row %d of x gives %g", dtype_name(type),
              i / N, have[i]);
    reset((Array[]){x, w}, 2);
}

static void test_quantised_all(Dtype type) {
    test_embed(type);
    test_quantised_nan(type);
    for (int exact = 0; exact < 2; exact++) {
        test_quantised(type, F32, 1, 1, 1, false, false, exact),
            test_quantised(type, BF16, 5, 7, 33, true, false, exact);
        test_quantised(type, F32, 9, 18, 1176, false, false, exact);
        test_quantised(type, F32, 67, 35, 100, true, true, exact);
        test_quantised(type, BF16, 130, 64, 256, true, false, exact);
        test_quantised(type, F32, 3, 640, 192, false, true, exact);
        test_quantised(type, F32, 4, 80, 640, true, false, exact);
        test_quantised(type, F32, 2, 113, 3000, true, true, exact);
        test_quantised(type, F32, 8, 200, 1100, true, false, exact);
        test_quantised(type, BF16, 517, 70, 128, false, false, exact);
        test_quantised(type, F32, 3, 17, 300000, false, false,
                       exact); // more groups than the CPU's scratch has for 9 rows
    }
}

static void test_rope(Dtype type, int T, int heads, int D, int axes) {
    enum { MAX = 128 };
    int stride = heads * D + 8, half = D / 2;
    Array x = array(type, (size_t)T * stride, 2), freq = array(F32, half, 1);
    int32_t positions[3 * MAX], axis[MAX];
    for (int i = 0; i < axes * T; i++) positions[i] = (int32_t)(uniform() * 500 + 500);
    for (int i = 0; i < half; i++) axis[i] = i * axes / half;
    float *cos_dev = take((size_t)T * half * 4), *sin_dev = take((size_t)T * half * 4);
    dev->rope_table(cos_dev, sin_dev, ints(positions, axes * T), axes, ints(axis, half), freq.dev, T, half);
    Array c = array(F32, (size_t)T * half, 1), s = array(F32, (size_t)T * half, 1);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < half; i++) {
            float angle = (float)positions[t * axes + axis[i]] * (float)freq.host[i];
            c.host[t * half + i] = cos(angle), s.host[t * half + i] = sin(angle);
        }
    compare("rope_table cos", cos_dev, F32, c.host, (size_t)T * half, 2e-7);
    compare("rope_table sin", sin_dev, F32, s.host, (size_t)T * half, 2e-7);
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < half; i++) {
                double *a = &x.host[(size_t)t * stride + h * D + i], *b = a + half, u = *a, v = *b;
                *a = u * c.host[t * half + i] - v * s.host[t * half + i];
                *b = v * c.host[t * half + i] + u * s.host[t * half + i];
            }
    dev->rope(x.dev, type, stride, cos_dev, sin_dev, T, heads, D);
    compare("rope", x.dev, type, x.host, (size_t)T * stride, 1e-6);
    reset((Array[]){x, freq, c, s}, 4);
}

static void softmax_mix(double *out, const double *scores, const double *v, size_t stride, int n, int D) {
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) max = fmax(max, scores[j]);
    for (int d = 0; d < D; d++) out[d] = 0;
    for (int j = 0; j < n; j++) {
        double p = exp(scores[j] - max);
        sum += p;
        for (int d = 0; d < D; d++) out[d] += p * v[j * stride + d];
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
}

// Sequences of `lengths` with all their tokens in the cache; the last `queries` of each ask. Blocks are scattered,
// and unwritten places are NaN: nobody may read them into a result.
static void test_attention_paged(Dtype type, int B, const int *lengths, const int *queries, int H, int H_kv, int D,
                                 int window) {
    enum { MAX_S = 400, MAX_BLOCKS = 128 };
    int stride = (H + 2 * H_kv) * D, table_stride = 32, next = 3;
    size_t block_bytes = (size_t)2 * KV_BLOCK * H_kv * D * dtype_bytes(type) * 2; // two layers: ours is the second
    char *kv = take(MAX_BLOCKS * block_bytes);
    char *nan = malloc(MAX_BLOCKS * block_bytes);
    memset(nan, 0xff, MAX_BLOCKS * block_bytes);
    dev->upload(kv, nan, MAX_BLOCKS * block_bytes);
    free(nan);
    kv += block_bytes / 2;
    int32_t table[8 * 32] = {0}, cu[9] = {0}, kv_len[8], slot[MAX_S];
    Array rows[8], q = array(type, 0, 1), all = {0};
    int T = 0;
    for (int b = 0; b < B; b++) {
        rows[b] = array(type, (size_t)lengths[b] * stride, 2);
        for (int i = 0; i * KV_BLOCK < lengths[b]; i++)
            table[b * table_stride + i] = next = (next * 5 + 7) % MAX_BLOCKS;
        for (int s = 0; s < lengths[b]; s++) slot[s] = table[b * table_stride + s / KV_BLOCK] * KV_BLOCK + s % KV_BLOCK;
        dev->kv_store(kv, block_bytes, type, row_of(rows[b].dev, type, H * D),
                      row_of(rows[b].dev, type, (H + H_kv) * D), stride, ints(slot, lengths[b]), lengths[b], H_kv, D);
        T += queries[b];
        cu[b + 1] = T, kv_len[b] = lengths[b];
    }
    all = array(type, (size_t)T * stride, 1);
    double *want = malloc((size_t)T * H * D * sizeof *want), scores[MAX_S];
    void *raw = malloc((size_t)T * stride * 4);
    for (int b = 0; b < B; b++)
        for (int r = 0; r < queries[b]; r++) {
            int s = lengths[b] - queries[b] + r, lo = window && s + 1 > window ? s + 1 - window : 0;
            void *row = fetch_raw(row_of(rows[b].dev, type, (size_t)s * stride), stride * dtype_bytes(type));
            memcpy((char *)raw + (size_t)(cu[b] + r) * stride * dtype_bytes(type), row, stride * dtype_bytes(type));
            free(row);
            for (int h = 0; h < H; h++) {
                int key = (H + h / (H / H_kv)) * D, value = key + H_kv * D;
                for (int j = lo; j <= s; j++) {
                    scores[j - lo] = 0;
                    for (int d = 0; d < D; d++)
                        scores[j - lo] +=
                            rows[b].host[(size_t)s * stride + h * D + d] * rows[b].host[(size_t)j * stride + key + d];
                    scores[j - lo] /= sqrt(D);
                }
                softmax_mix(&want[((size_t)(cu[b] + r) * H + h) * D], scores,
                            &rows[b].host[(size_t)lo * stride + value], stride, s + 1 - lo, D);
            }
        }
    dev->upload(all.dev, raw, (size_t)T * stride * dtype_bytes(type));
    free(raw);
    char what[96];
    snprintf(what, sizeof what, "attention_paged %s B=%d H=%d/%d D=%d window=%d", type == F32 ? "f32" : "bf16", B, H,
             H_kv, D, window);
    void *out = take((size_t)T * H * D * dtype_bytes(type)), *alone = take((size_t)H * D * dtype_bytes(type));
    const int32_t *table_dev = ints(table, B * table_stride);
    dev->attention_paged(out, type, all.dev, stride, kv, block_bytes, table_dev, table_stride, ints(cu, B + 1),
                         ints(kv_len, B), B, H, H_kv, D, window);
    compare(what, out, type, want, (size_t)T * H * D, 4e-6);
    for (int b = 0; b < B; b++) { // its first query, alone in a batch and with the cache only up to itself
        int32_t one[2] = {0, 1}, len = lengths[b] - queries[b] + 1;
        dev->attention_paged(alone, type, row_of(all.dev, type, (size_t)cu[b] * stride), stride, kv, block_bytes,
                             table_dev + b * table_stride, table_stride, ints(one, 2), ints(&len, 1), 1, H, H_kv, D,
                             window);
        same(what, alone, row_of(out, type, (size_t)cu[b] * H * D), (size_t)H * D * dtype_bytes(type));
    }
    free(want);
    for (int b = 0; b < B; b++) free(rows[b].host);
    reset((Array[]){q, all}, 2);
}

static void test_attention_segments(Dtype type, int segments, const int *lengths, int H, int D) {
    enum { MAX = 400 };
    int32_t cu[9] = {0};
    for (int i = 0; i < segments; i++) cu[i + 1] = cu[i] + lengths[i];
    int P = cu[segments], stride = 3 * H * D;
    Array qkv = array(type, (size_t)P * stride, 2), out = array(type, (size_t)P * H * D, 1);
    double scores[MAX];
    for (int i = 0; i < segments; i++)
        for (int r = cu[i]; r < cu[i + 1]; r++)
            for (int h = 0; h < H; h++) {
                for (int j = cu[i]; j < cu[i + 1]; j++) {
                    scores[j - cu[i]] = 0;
                    for (int d = 0; d < D; d++)
                        scores[j - cu[i]] +=
                            qkv.host[(size_t)r * stride + h * D + d] * qkv.host[(size_t)j * stride + (H + h) * D + d];
                    scores[j - cu[i]] /= sqrt(D);
                }
                softmax_mix(&out.host[((size_t)r * H + h) * D], scores,
                            &qkv.host[(size_t)cu[i] * stride + (2 * H + h) * D], stride, lengths[i], D);
            }
    char what[96];
    snprintf(what, sizeof what, "attention_segments %s H=%d D=%d", type == F32 ? "f32" : "bf16", H, D);
    dev->attention_segments(out.dev, type, qkv.dev, ints(cu, segments + 1), segments, 0, P, H, D);
    compare(what, out.dev, type, out.host, (size_t)P * H * D, 4e-6);
    int first = P / 3, n = (P - first + 1) / 2; // rows from the middle, across segments
    void *some = take((size_t)n * H * D * dtype_bytes(type));
    dev->attention_segments(some, type, qkv.dev, ints(cu, segments + 1), segments, first, n, H, D);
    same(what, some, row_of(out.dev, type, (size_t)first * H * D), (size_t)n * H * D * dtype_bytes(type));
    reset((Array[]){qkv, out}, 2);
}

static void test_glu_gelu(Dtype type, int T, int F) {
    Array in = array(type, (size_t)T * 2 * F, 8), out = array(type, (size_t)T * F, 1),
          g = array(type, (size_t)T * F, 4);
    for (int t = 0; t < T; t++)
        for (int f = 0; f < F; f++) {
            double gate = in.host[(size_t)t * 2 * F + f];
            out.host[(size_t)t * F + f] = gate / (1 + exp(-gate)) * in.host[(size_t)t * 2 * F + F + f];
        }
    dev->glu(out.dev, in.dev, type, T, F);
    compare("glu", out.dev, type, out.host, (size_t)T * F, 1e-6);
    for (size_t i = 0; i < g.n; i++) g.host[i] = g.host[i] / 2 * (1 + erf(g.host[i] / sqrt(2)));
    dev->gelu(g.dev, type, g.n);
    compare("gelu", g.dev, type, g.host, g.n, 1e-6);
    reset((Array[]){in, out, g}, 3);
}

// ---------------------------------------------------------------------------------------------
// sample: the definition, on a sorted list

typedef struct Choice {
    double w;
    int id;
} Choice;

static int by_weight(const void *a, const void *b) {
    const Choice *x = a, *y = b;
    if (x->w != y->w) return x->w > y->w ? -1 : 1;
    return x->id - y->id;
}

static int reference_draw(const double *logits, int V, const SampleRow *row) {
    Choice *c = malloc(V * sizeof *c);
    double total = 0, run = 0, max = -INFINITY;
    for (int i = 0; i < V; i++) max = fmax(max, logits[i]);
    for (int i = 0; i < V; i++) c[i] = (Choice){exp((logits[i] - max) / row->how.temperature), i};
    qsort(c, V, sizeof *c, by_weight);
    int n = row->how.top_k > 0 && row->how.top_k < V ? row->how.top_k : V, best = c[0].id;
    for (int i = 0; i < n; i++) total += c[i].w;
    int keep = 0;
    while (keep < n && (keep == 0 || run < row->how.top_p * total)) run += c[keep++].w;
    double best_score = -1;
    for (int i = 0; i < keep; i++) {
        if (c[i].w < row->how.min_p) continue;
        double score = c[i].w / -log(sample_uniform(row->how.seed, row->step, c[i].id));
        if (score > best_score) best_score = score, best = c[i].id;
    }
    free(c);
    return best;
}

static void reference_penalties(double *logits, const Sampling *how, const TokenCount *counts, int n) {
    for (int i = 0; i < n; i++) {
        double *l = &logits[counts[i].id];
        if (counts[i].seen) *l = *l > 0 ? *l / how->repetition_penalty : *l * how->repetition_penalty;
        *l -= how->frequency_penalty * counts[i].count + (counts[i].count ? how->presence_penalty : 0);
        *l += counts[i].bias;
    }
}

// The alternatives must be the n largest numbers of a row, the lowest id first among equals.
static void check_alternatives(const Sampled *got, const double *logits, int V, int n) {
    Choice *c = malloc(V * sizeof *c);
    int numbers = 0;
    for (int i = 0; i < V; i++)
        if (!isnan(logits[i])) c[numbers++] = (Choice){logits[i], i};
    qsort(c, numbers, sizeof *c, by_weight);
    for (int k = 0; k < MAX_LOGPROBS; k++) {
        int want = k >= n ? -1 : c[k].id;
        check(got->top_id[k] == want, "sample V=%d: alternative %d is %d, wanted %d", V, k, got->top_id[k], want);
    }
    free(c);
}

// Rows where what is looked for stands at an edge: most logits are equal, and only a few matter.
static void test_sample_edges(void) {
    enum { V = 333, R = 6, N = MAX_LOGPROBS };
    static float logits[R][V];
    static SampleRow rows[R];
    const int largest[R] = {0, 63, 64, V - 1, 200, 3};
    double host[V];
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < V; i++) logits[r][i] = r < 4 ? 0 : (float)(i * 7 % 10);
        for (int i = 64; r == 5 && i < V; i++) logits[r][i] = NAN;
        logits[r][largest[r]] = 20;
        rows[r] = (SampleRow){.how = {.top_p = 1, .repetition_penalty = 1, .logprobs = N - r}};
    }
    void *rows_dev = take(sizeof rows), *logits_dev = take(sizeof logits), *work = take(sizeof logits),
         *out = take(R * sizeof(Sampled));
    dev->upload(rows_dev, rows, sizeof rows);
    dev->upload(logits_dev, logits, sizeof logits);
    dev->sample(out, logits_dev, work, rows_dev, NULL, R, V);
    Sampled *got = fetch_raw(out, R * sizeof *got);
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < V; i++) host[i] = logits[r][i];
        check(got[r].id == largest[r], "sample edges row %d: %d, wanted %d", r, got[r].id, largest[r]);
        check_alternatives(&got[r], host, V, rows[r].how.logprobs);
    }
    free(got);
    pool_used = 0;
}

static void test_sample(int V) {
    enum { R = 48 };
    Array logits = array(F32, (size_t)R * V, 6);
    SampleRow rows[R] = {0};
    TokenCount counts[] = {
        {0, 0, true, 0}, {3, 1, true, 0}, {7, 5, true, -1.5f}, {V - 1, 2, true, 0}, {5, 0, false, 2}};
    for (int r = 0; r < R; r++) {
        Sampling *s = &rows[r].how;
        *s = (Sampling){.temperature = r % 4 ? 0.3f * (r % 5 + 1) : 0,
                        .top_p = r % 3 ? 1 : 0.7f,
                        .min_p = r % 7 ? 0 : 0.05f,
                        .repetition_penalty = r % 2 ? 1 : 1.3f,
                        .frequency_penalty = r % 2 ? 0 : 0.2f,
                        .presence_penalty = r % 2 ? 0 : 0.5f,
                        .top_k = r % 5 ? 0 : 1 + r % 9,
                        .logprobs = r % 6 * 4,
                        .seed = 1000 + r / 2};
        rows[r].step = r * 3;
        if (r % 2 == 0) rows[r].first = 0, rows[r].n = 5;
    }
    float *work = take((size_t)R * V * 4);
    Sampled *out = take(R * sizeof *out), *alone = take(sizeof *out);
    void *rows_dev = take(sizeof rows), *counts_dev = take(sizeof counts);
    dev->upload(rows_dev, rows, sizeof rows);
    dev->upload(counts_dev, counts, sizeof counts);
    dev->sample(out, logits.dev, work, rows_dev, counts_dev, R, V);
    Sampled *got = fetch_raw(out, R * sizeof *out);
    for (int r = 0; r < R; r++) {
        double *l = logits.host + (size_t)r * V, max = -INFINITY, sum = 0;
        for (int i = 0; i < V; i++) max = fmax(max, l[i]);
        for (int i = 0; i < V; i++) sum += exp(l[i] - max);
        double raw = l[got[r].id] - max - log(sum), before = INFINITY;
        check(fabs(got[r].logprob - raw) < 2e-5, "sample row %d: log-probability %g, wanted %g", r, got[r].logprob,
              raw);
        for (int k = 0; k < rows[r].how.logprobs; k++) {
            check(got[r].top_logprob[k] <= before &&
                      fabs(got[r].top_logprob[k] - (l[got[r].top_id[k]] - max - log(sum))) < 2e-5,
                  "sample row %d: alternative %d", r, k);
            before = got[r].top_logprob[k];
        }
        check_alternatives(&got[r], l, V, rows[r].how.logprobs);
        reference_penalties(l, &rows[r].how, counts, rows[r].n);
        int want = 0;
        if (rows[r].how.temperature > 0)
            want = reference_draw(l, V, &rows[r]);
        else
            for (int i = 1; i < V; i++) want = l[i] > l[want] ? i : want;
        check(got[r].id == want, "sample row %d of V=%d: %d, wanted %d", r, V, got[r].id, want);
        dev->sample(alone, (float *)logits.dev + (size_t)r * V, work, (SampleRow *)rows_dev + r, counts_dev, 1, V);
        same("sample", alone, out + r, sizeof *out);
    }
    free(got);
    reset((Array[]){logits}, 1);
}

// Weights so even that every token kept may win: keeping too many or too few shows in some of the draws.
static void test_sample_floors(int V) {
    enum { R = 96 };
    const int top_k[] = {2, 4, 9, 30, 100, 700, 1500, V - 1};
    const float top_p[] = {1e-9f, 1e-4f, 5e-4f, 0.01f, 0.05f, 0.2f, 0.6f, 0.98f};
    Array logits = array(F32, V, 6);
    SampleRow rows[R] = {0};
    for (int r = 0; r < R; r++) {
        Sampling *s = &rows[r].how;
        *s = (Sampling){.temperature = 5, .top_p = 1, .repetition_penalty = 1, .seed = r};
        if (r % 3 != 1) s->top_k = top_k[r / 3 % 8];
        if (r % 3 != 0) s->top_p = top_p[r / 3 % 8];
    }
    float *work = take((size_t)V * 4);
    Sampled *out = take(sizeof *out);
    SampleRow *rows_dev = take(sizeof rows);
    dev->upload(rows_dev, rows, sizeof rows);
    for (int r = 0; r < R; r++) {
        dev->sample(out, logits.dev, work, rows_dev + r, NULL, 1, V);
        Sampled *got = fetch_raw(out, sizeof *out);
        int want = reference_draw(logits.host, V, &rows[r]);
        check(got->id == want, "sample V=%d top_k=%d top_p=%g: %d, wanted %d", V, rows[r].how.top_k, rows[r].how.top_p,
              got->id, want);
        free(got);
    }
    reset((Array[]){logits}, 1);
}

// Over many draws the frequencies follow the probabilities: chi-squared with 4 degrees of freedom.
static void test_sample_frequencies(void) {
    enum { V = 5, N = 20000 };
    static SampleRow rows[N];
    static float logits[N][V];
    static Sampled got[N];
    const double p[V] = {0.4, 0.3, 0.2, 0.07, 0.03};
    for (int i = 0; i < N; i++) {
        rows[i] = (SampleRow){.how = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 5}, .step = i};
        for (int v = 0; v < V; v++) logits[i][v] = (float)log(p[v]);
    }
    void *rows_dev = take(sizeof rows), *logits_dev = take(sizeof logits), *work = take(sizeof logits),
         *out = take(sizeof got);
    dev->upload(rows_dev, rows, sizeof rows);
    dev->upload(logits_dev, logits, sizeof logits);
    dev->sample(out, logits_dev, work, rows_dev, NULL, N, V);
    dev->download(got, out, sizeof got);
    double count[V] = {0}, chi = 0;
    for (int i = 0; i < N; i++) count[got[i].id]++;
    for (int v = 0; v < V; v++) chi += (count[v] - N * p[v]) * (count[v] - N * p[v]) / (N * p[v]);
    check(chi < 18.5, "sample frequencies: chi-squared %g, under 18.5 in 999 of 1000 seeds", chi); // the seed is fixed
    pool_used = 0;
}

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof devices / sizeof *devices && !dev; i++)
        if (argc < 2 || !strcmp(argv[1], devices[i]->name)) dev = devices[i];
    if (!dev) return fprintf(stderr, "no device %s in this build\n", argv[1]), 2;
    bool few = argc > 2 && !strcmp(argv[2], "few"); // for checkers that take a hundred times as long
    Error err;
    if (dev->start && !dev->start(&err)) return fprintf(stderr, "vlm: %s\n", err.message), 1;
    pool = dev->reserve(POOL + dev->scratch);
    void *staging = dev->staging ? dev->reserve_host(dev->staging) : NULL;
    if (!pool || (dev->staging && !staging)) return fprintf(stderr, "no memory\n"), 1;
    for (Dtype type = few ? BF16 : F32; type <= BF16; type++) {
        test_embed(type);
        test_rmsnorm(type, 7, 192), test_rmsnorm(type, 3, 45), test_rmsnorm(type, 1, 5), test_rmsnorm(type, 300, 257);
        test_linear(type, F32, 1, 1, 1, false, false), test_linear(type, type, 5, 7, 33, true, false);
        test_linear(type, F32, 9, 18, 1176, false, false), test_linear(type, F32, 67, 35, 100, true, true);
        test_linear(type, type, 130, 64, 256, true, false), test_linear(type, F32, 3, 640, 192, false, true);
        test_linear(type, F32, 4, 5, 31, true, false), test_linear(type, F32, 2, 3, 3000, true, true);
        test_linear(type, F32, 27, 40, 520, true, false), test_linear(type, F32, 40, 20, 1100, true, false);
        test_rope(type, 9, 3, 32, 3), test_rope(type, 33, 1, 4, 2), test_rope(type, 5, 2, 80, 2);
        test_attention_paged(type, 1, (int[]){1}, (int[]){1}, 1, 1, 8, 0);
        test_attention_paged(type, 3, (int[]){17, 100, 33}, (int[]){1, 100, 5}, 6, 2, 32, 0);
        test_attention_paged(type, 2, (int[]){300, 16}, (int[]){1, 16}, 4, 4, 20, 0);
        test_attention_paged(type, 2, (int[]){70, 131}, (int[]){70, 3}, 40, 1, 128, 0);
        test_attention_paged(type, 2, (int[]){90, 131}, (int[]){90, 3}, 4, 2, 64, 40);
        test_attention_paged(type, 1, (int[]){113}, (int[]){10}, 4, 2, 64, 41); // the first row's keys begin at 63
        test_attention_paged(type, 2, (int[]){20, 70}, (int[]){3, 1}, 130, 2, 8, 0);
        test_attention_paged(type, 2, (int[]){65, 200}, (int[]){2, 1}, 14, 2, 128, 0);
        test_attention_paged(type, 1, (int[]){300}, (int[]){40}, 4, 2, 80, 0);
        test_attention_segments(type, 1, (int[]){1}, 1, 4), test_attention_segments(type, 3, (int[]){64, 32, 4}, 4, 32);
        test_attention_segments(type, 2, (int[]){100, 37}, 3, 20),
            test_attention_segments(type, 1, (int[]){333}, 2, 80);
        test_glu_gelu(type, 3, 17), test_glu_gelu(type, 40, 512);
    }
    for (Dtype type = Q8; dev->quantised && type <= Q4; type++) test_quantised_all(type);
    test_gather_rows();
    test_sample_edges();
    test_sample(640);
    if (!few) test_sample(33), test_sample(30011), test_sample_floors(1100), test_sample_floors(30011);
    if (!few) test_sample_frequencies();
    dev->release(pool, POOL + dev->scratch);
    if (staging) dev->release_host(staging, dev->staging);
    return check_end();
}
