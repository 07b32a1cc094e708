// vlm_cpu.c: the operations of the Device table in C, for any CPU. The reference device.
//
// Everything that sums works on vectors of 16 lanes, one order for all instruction sets: lane i adds
// elements i, i + 16, ...; the lanes are then added as a tree. AVX-512 holds such a vector in one
// register, AVX2 in two, anything else in what the compiler makes of it. Since each output element
// has lanes of its own and rows are only ever grouped, never split, the result does not depend on
// how many rows come together, nor on threads: these divide outputs, never sums.
#include "vlm.h"
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------------------
// Sixteen lanes

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
enum { LANES = 16 };

INLINE f32x16 v_set(float x) { return x - (f32x16){0}; }

INLINE f32x16 v_load(const float *p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void v_store(float *p, f32x16 v) { memcpy(p, &v, sizeof v); }

// a * b + c, rounded once.
INLINE f32x16 v_fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    union {
        f32x16 v;
        __m256 h[2];
    } x = {a}, y = {b}, z = {c};
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.v;
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Where mask (all ones or zeros a lane): a, else b.
INLINE f32x16 v_select(i32x16 mask, f32x16 a, f32x16 b) { return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b)); }

// The larger one; b when a is NaN, so keep the value that may be NaN in b.
INLINE f32x16 v_max(f32x16 a, f32x16 b) { return v_select(a > b, a, b); }

INLINE float v_sum(f32x16 v) {
    union {
        f32x16 v;
        f32x8 h[2];
    } a = {v};
    union {
        f32x8 v;
        f32x4 h[2];
    } b = {a.h[0] + a.h[1]};
    f32x4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float v_max_lane(f32x16 v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    return v[0];
}

static const i32x16 lane_index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// e^x to 2 ulp; 0 below -87, where the result would be subnormal; NaN stays NaN. Cody and Waite's
// reduction x = n ln 2 + r, then Taylor's polynomial on |r| <= ln 2 / 2.
INLINE f32x16 v_exp(f32x16 x) {
    const f32x16 magic = v_set(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low bits
    f32x16 clipped = v_select(x > 88.0f, v_set(88.0f), x);
    f32x16 t = v_fma(clipped, v_set(1.44269504f), magic);
    f32x16 n = t - magic;
    f32x16 r = v_fma(n, v_set(-0.693359375f), clipped);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    f32x16 p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    u32x16 exponent = ((u32x16)t - (u32x16)magic + 127) << 23;
    return v_select(x < -87.0f, (f32x16){0}, p * (f32x16)exponent);
}

// ---------------------------------------------------------------------------------------------
// Numbers in memory: f32 or bf16. `type` is a constant wherever these are inlined into a loop.

INLINE float bf16_to_f32(bf16 b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Nearest even; NaN stays NaN (the rounding would carry it into infinity).
INLINE bf16 f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
    return (bf16)((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

INLINE float get(const void *p, Dtype type, size_t i) {
    return type == F32 ? ((const float *)p)[i] : bf16_to_f32(((const bf16 *)p)[i]);
}

INLINE void put(void *p, Dtype type, size_t i, float f) {
    if (type == F32)
        ((float *)p)[i] = f;
    else
        ((bf16 *)p)[i] = f32_to_bf16(f);
}

INLINE const void *at(const void *p, Dtype type, size_t i) { return (const char *)p + i * (type == F32 ? 4 : 2); }

// Sixteen f16 numbers, all finite.
INLINE f32x16 v_load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#else
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    u16x16 h;
    memcpy(&h, p, sizeof h);
    u32x16 u = __builtin_convertvector(h, u32x16);
    f32x16 size = (f32x16)((u & 0x7fff) << 13) * 0x1p112f; // moves the exponent, subnormals included
    return (f32x16)((u32x16)size | (u & 0x8000) << 16);
#endif
}

// Waking the threads costs some microseconds. Below these numbers of elements and of multiply-adds one is faster.
enum { PARALLEL_WORK = 1 << 16, PARALLEL_MACS = 1 << 20 };

// ---------------------------------------------------------------------------------------------
// Memory

static void *cpu_reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void cpu_release(void *base, size_t bytes) { munmap(base, bytes); }

static void cpu_copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

// ---------------------------------------------------------------------------------------------
// embed, gather_rows

INLINE size_t tile_group_bytes(Dtype type) { return Q_ROWS * (type == Q8 ? Q_GROUP : Q_GROUP / 2); }

// Row `id` of a Q8 or Q4 matrix; where its numbers lie is written at "linear, quantised".
static void embed_quantised(float *out, const uint8_t *table, Dtype type, int id, int C) {
    int r = id % Q_ROWS, groups = (C + Q_GROUP - 1) / Q_GROUP;
    const uint8_t *tile = table + (size_t)(id / Q_ROWS) * tile_bytes(type, C);
    const uint16_t *scales = (const uint16_t *)(tile + (size_t)groups * tile_group_bytes(type));
    for (int c = 0; c < C; c++) {
        const uint8_t *group = tile + (size_t)(c / Q_GROUP) * tile_group_bytes(type);
        int k = c % Q_GROUP, four = 4 * r + k % 4, q;
        if (type == Q8)
            q = group[k / 4 * 64 + four] - 128;
        else
            q = (group[k / 8 * 64 + four] >> (k & 4) & 15) - 8;
        out[c] = (float)q * v_load_f16(scales + c / Q_GROUP * Q_ROWS)[r];
    }
}

static void cpu_embed(float *out, const void *table, Dtype type, const int32_t *ids, int T, int C) {
#pragma omp parallel for if ((size_t)T * C > PARALLEL_WORK)
    for (int t = 0; t < T; t++) {
        if (ids[t] < 0) continue;
        float *o = out + (size_t)t * C;
        if (type >= Q8) {
            embed_quantised(o, table, type, ids[t], C);
            continue;
        }
        const void *row = at(table, type, (size_t)ids[t] * C);
        if (type == F32)
            memcpy(o, row, (size_t)C * sizeof *o);
        else
            for (int c = 0; c < C; c++) o[c] = bf16_to_f32(((const bf16 *)row)[c]);
    }
}

static void cpu_gather_rows(void *dst, const void *src, const int32_t *index, int n, size_t row_bytes) {
#pragma omp parallel for if (n * row_bytes > PARALLEL_WORK)
    for (int i = 0; i < n; i++)
        if (index[i] >= 0)
            memcpy((char *)dst + i * row_bytes, (const char *)src + (size_t)index[i] * row_bytes, row_bytes);
}

// ---------------------------------------------------------------------------------------------
// rmsnorm

INLINE void rmsnorm_row(void *out, Dtype type, const float *x, const float *weight, float eps, int C) {
    f32x16 squares = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        f32x16 v = v_load(x + c);
        squares = v_fma(v, v, squares);
    }
    for (int i = 0; c + i < C; i++) squares[i] = fmaf(x[c + i], x[c + i], squares[i]);
    float scale = 1.0f / sqrtf(v_sum(squares) / C + eps);
    for (c = 0; c < C; c++) put(out, type, c, x[c] * scale * weight[c]);
}

static void cpu_rmsnorm(void *out, Dtype type, const float *x, const float *weight, float eps, int T, int C) {
#pragma omp parallel for if ((size_t)T * C > PARALLEL_WORK)
    for (int t = 0; t < T; t++) {
        const float *row = x + (size_t)t * C;
        void *o = (void *)at(out, type, (size_t)t * C);
        if (type == F32)
            rmsnorm_row(o, F32, row, weight, eps, C);
        else
            rmsnorm_row(o, BF16, row, weight, eps, C);
    }
}

// ---------------------------------------------------------------------------------------------
// linear
//
// One micro-kernel: `rows` rows of x times `cols` rows of w, both contiguous along K, in steps of 64 bytes. Each
// output has its own 16 lanes, so a tile of any shape adds in the same order: MR x NR where there are rows
// enough, 1 x MR NR for the rest and for decoding. Weights stay row-major: a decode step streams each byte once,
// a prefill reads a row once per TB rows of x, which stay in the second-level cache.

enum { TB = 64 };
#if defined(__AVX512F__)
enum { MR = 4, NR = 4 }; // 16 sums and 8 operands in 32 registers
#else
enum { MR = 2, NR = 2 }; // 4 sums of two registers and their operands in 16
#endif
enum { SUMS = MR * NR };

// 64 bytes of x times 64 bytes of w, added lane by lane: 16 products of f32, or 32 of bf16, where lane i
// adds element 2i + 1, then 2i, as the instruction vdpbf16ps does.
INLINE f32x16 dot_step(Dtype type, i32x16 x, i32x16 w, f32x16 sum) {
    if (type == F32) return v_fma((f32x16)x, (f32x16)w, sum);
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    const i32x16 upper = (i32x16){0} + (int32_t)0xffff0000;
    sum = v_fma((f32x16)(x & upper), (f32x16)(w & upper), sum);
    return v_fma((f32x16)(x << 16), (f32x16)(w << 16), sum);
#endif
}

INLINE i32x16 load_bytes(const void *p, size_t n) {
    i32x16 v = {0};
    memcpy(&v, p, n);
    return v;
}

typedef struct Linear { // the arguments of linear, for the tiles
    void *out;
    const char *x, *w;
    const float *bias;
    size_t row_bytes; // of x and w
    int N;
    Dtype type, out_type;
    bool accumulate;
} Linear;

// The lanes of all sums of a tile, each added as v_sum does it: halves of two vectors make one, until one is left.
INLINE void tile_sums(const f32x16 *s, float *out) {
    if ((int)SUMS != (int)LANES) {
        for (int i = 0; i < SUMS; i++) out[i] = v_sum(s[i]);
        return;
    }
#if defined(__clang__) || __GNUC__ >= 12
#define HALVES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HALVES(a, b, ...) __builtin_shuffle(a, b, (i32x16){__VA_ARGS__})
#endif
    f32x16 x[LANES / 2];
    for (int i = 0; i < 8; i++)
        x[i] = HALVES(s[2 * i], s[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               HALVES(s[2 * i], s[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        x[i] = HALVES(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               HALVES(x[2 * i], x[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        x[i] = HALVES(x[2 * i], x[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               HALVES(x[2 * i], x[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    v_store(out, HALVES(x[0], x[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                     HALVES(x[0], x[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#undef HALVES
}

INLINE void linear_tile(const Linear *a, Dtype type, int t, int n, int rows, int cols) {
    f32x16 sum[SUMS] = {0};
    const char *x[MR], *w[SUMS];
    for (int i = 0; i < rows; i++) x[i] = a->x + (size_t)(t + i) * a->row_bytes;
    for (int j = 0; j < cols; j++) w[j] = a->w + (size_t)(n + j) * a->row_bytes;
    size_t k = 0, whole = a->row_bytes / 64 * 64, rest = a->row_bytes - whole;
    for (; k < whole; k += 64) {
        i32x16 xv[MR];
        for (int i = 0; i < rows; i++) xv[i] = load_bytes(x[i] + k, 64);
        for (int j = 0; j < cols; j++) {
            i32x16 wv = load_bytes(w[j] + k, 64);
            for (int i = 0; i < rows; i++) sum[i * cols + j] = dot_step(type, xv[i], wv, sum[i * cols + j]);
        }
    }
    for (int i = 0; rest && i < rows; i++)
        for (int j = 0; j < cols; j++)
            sum[i * cols + j] =
                dot_step(type, load_bytes(x[i] + k, rest), load_bytes(w[j] + k, rest), sum[i * cols + j]);

    float y[SUMS];
    if (rows * cols == SUMS)
        tile_sums(sum, y);
    else
        for (int i = 0; i < rows * cols; i++) y[i] = v_sum(sum[i]);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            size_t o = (size_t)(t + i) * a->N + n + j;
            float v = y[i * cols + j] + (a->bias ? a->bias[n + j] : 0.0f);
            if (a->accumulate)
                ((float *)a->out)[o] += v;
            else if (a->out_type == F32)
                ((float *)a->out)[o] = v;
            else
                ((bf16 *)a->out)[o] = f32_to_bf16(v);
        }
}

// Rows t .. t_end of the outputs n .. n_end, of which there are at most SUMS.
INLINE void linear_block(const Linear *a, Dtype type, int t, int t_end, int n, int n_end) {
    for (; t + MR <= t_end; t += MR) {
        int j = n;
        for (; j + NR <= n_end; j += NR) linear_tile(a, type, t, j, MR, NR);
        for (; j < n_end; j++)
            for (int i = 0; i < MR; i++) linear_tile(a, type, t + i, j, 1, 1);
    }
    for (; t < t_end; t++)
        if (n_end - n == SUMS)
            linear_tile(a, type, t, n, 1, SUMS);
        else
            for (int j = n; j < n_end; j++) linear_tile(a, type, t, j, 1, 1);
}

static void linear_rows(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                        int N, int K, bool accumulate) {
    Linear a = {out, x, w, bias, (size_t)K * dtype_bytes(type), N, type, out_type, accumulate};
    int blocks = (N + SUMS - 1) / SUMS;
#pragma omp parallel if ((size_t)T * N * K > PARALLEL_MACS)
    for (int t = 0; t < T; t += TB) {
        int t_end = t + TB < T ? t + TB : T;
#pragma omp for schedule(static) nowait
        for (int b = 0; b < blocks; b++) {
            int n = b * SUMS, n_end = n + SUMS < N ? n + SUMS : N;
            if (type == F32)
                linear_block(&a, F32, t, t_end, n, n_end);
            else
                linear_block(&a, BF16, t, t_end, n, n_end);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// linear, quantised
//
// x is rounded as w is: to whole numbers, with a scale for each group of 64 along K. The 64 products of a group add up
// exactly, so their order is free; the groups' sums, times both scales, are then added in order, in f32.
//
// In the file a tile is 16 rows of w: for each group 16 (Q8) or 8 (Q4) vectors of 64 bytes, where lane r has four
// numbers of row r, so that one instruction adds 4 products to each of 16 outputs and no sum ever crosses lanes; then
// the groups' scales, 16 f16 each. That instruction multiplies unsigned by signed bytes: w is stored with 128 (Q8) or 8
// (Q4) added, and the sums start at -128 (-8) times the sum of x's group. A byte of Q4 has number k in its low half
// and k + 4 in its high one.
//
// QN tiles times QM rows have their sums in registers. QSLICE groups of the tiles stay in the first-level cache while
// all rows pass: a step of up to QT_ROWS rows reads each weight once, and one row alone streams them.

#if defined(__AVX512F__)
enum { QM = 3, QN = 4 };
#else
enum { QM = 4, QN = 1 };
#endif
enum { QSLICE = 8, QT_ROWS = 512 };

typedef struct XGroup { // 64 numbers of a row of x
    int8_t q[Q_GROUP];
    float scale;
    int32_t start; // what a sum of products with unsigned weights begins at
} XGroup;

// The rows of x of the product under way; of the longest rows that a model may have, 7 fit.
enum { X_GROUPS = (8 << 20) / sizeof(XGroup) };
static XGroup x_groups[X_GROUPS];

typedef struct Quantised { // the arguments of linear, for the tiles
    void *out;
    const uint8_t *w;
    const float *bias;
    int N, groups;
    size_t tile_bytes;
    Dtype type, out_type;
    bool accumulate;
} Quantised;

// Where x is not finite the scale is NaN, and so is every output of the row.
static void quantise_row(XGroup *out, Dtype type, const bf16 *x, int K) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    const f32x16 magic = v_set(12582912.0f); // rounds, as in v_exp
    for (int k = 0; k < K; k += Q_GROUP, out++) {
        float v[Q_GROUP] = {0};
        for (int i = 0; i < Q_GROUP && k + i < K; i++) v[i] = bf16_to_f32(x[k + i]);
        f32x16 most = {0}, wrong = {0};
        for (int i = 0; i < Q_GROUP; i += LANES) {
            f32x16 a = v_load(v + i);
            most = v_max((f32x16)((i32x16)a & 0x7fffffff), most);
            wrong = v_fma(a, (f32x16){0}, wrong);
        }
        float max = v_max_lane(most);
        f32x16 inverse = v_set(max > 0 ? 127 / max : 0);
        i32x16 sum = {0};
        for (int i = 0; i < Q_GROUP; i += LANES) {
            i8x16 q = __builtin_convertvector((i32x16)v_fma(v_load(v + i), inverse, magic) - (i32x16)magic, i8x16);
            memcpy(out->q + i, &q, sizeof q);
            sum += __builtin_convertvector(q, i32x16);
        }
        out->scale = max / 127 + v_sum(wrong);
        out->start = 0;
        for (int i = 0; i < LANES; i++) out->start -= sum[i] * (type == Q8 ? 128 : 8);
    }
}

// sum + four products in each lane: unsigned bytes of w times the four signed bytes at x.
INLINE i32x16 v_dot4(i32x16 sum, i32x16 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX2__) // even and odd bytes as 16-bit numbers: their products and the sum of two fit 32 bits
    union {
        i32x16 v;
        __m256i h[2];
    } a = {sum}, b = {w};
    __m256i odd = _mm256_srai_epi16(_mm256_set1_epi32(four), 8);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_set1_epi32(four), 8), 8);
    for (int i = 0; i < 2; i++) {
        __m256i w_even = _mm256_and_si256(b.h[i], _mm256_set1_epi16(255)), w_odd = _mm256_srli_epi16(b.h[i], 8);
        a.h[i] = _mm256_add_epi32(a.h[i], _mm256_madd_epi16(w_even, even));
        a.h[i] = _mm256_add_epi32(a.h[i], _mm256_madd_epi16(w_odd, odd));
    }
    return a.v;
#else                   // NEON has vusdotq_s32 for this
    u32x16 u = (u32x16)w;
    for (int i = 0; i < 4; i++) sum += (i32x16)(u >> 8 * i & 255) * x[i];
    return sum;
#endif
}

// Numbers 4 j .. 4 j + 3 of each row, from a group of a tile.
INLINE i32x16 tile_four(Dtype type, const uint8_t *group, int j) {
    if (type == Q8) return load_bytes(group + 64 * j, 64);
    i32x16 both = load_bytes(group + 64 * (j / 2), 64);
    return (j % 2 ? both >> 4 : both) & 0x0f0f0f0f;
}

// The groups g .. g_end of `tiles` tiles of w times `rows` rows of x, added to acc (rows, QN Q_ROWS).
INLINE void quantised_tile(const Quantised *a, Dtype type, const uint8_t *w, const XGroup *x, float *acc, int g,
                           int g_end, int rows, int tiles) {
    f32x16 sum[QM][QN];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < tiles; n++) sum[r][n] = v_load(acc + (r * QN + n) * Q_ROWS);
    for (; g < g_end; g++) {
        i32x16 dots[QM][QN];
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < tiles; n++) dots[r][n] = (i32x16){0} + x[(size_t)r * a->groups + g].start;
        const uint8_t *group = w + g * tile_group_bytes(type);
#pragma GCC unroll 16
        for (int j = 0; j < Q_GROUP / 4; j++) {
            i32x16 four[QN];
            for (int n = 0; n < tiles; n++) four[n] = tile_four(type, group + n * a->tile_bytes, j);
            for (int r = 0; r < rows; r++)
                for (int n = 0; n < tiles; n++)
                    dots[r][n] = v_dot4(dots[r][n], four[n], x[(size_t)r * a->groups + g].q + 4 * j);
        }
        const uint8_t *scales = w + a->groups * tile_group_bytes(type) + (size_t)g * Q_ROWS * 2;
        f32x16 scale[QN];
        for (int n = 0; n < tiles; n++) scale[n] = v_load_f16((const uint16_t *)(scales + n * a->tile_bytes));
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < tiles; n++)
                sum[r][n] = v_fma(__builtin_convertvector(dots[r][n], f32x16),
                                  scale[n] * x[(size_t)r * a->groups + g].scale, sum[r][n]);
    }
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < tiles; n++) v_store(acc + (r * QN + n) * Q_ROWS, sum[r][n]);
}

// All of T rows against `tiles` tiles. A remainder of 4 rows is 2 and 2.
INLINE void quantised_rows(const Quantised *a, Dtype type, const uint8_t *w, float *acc, int g, int g_end, int T,
                           int tiles) {
    for (int t = 0; t < T;) {
        const XGroup *x = x_groups + (size_t)t * a->groups;
        float *sums = acc + (size_t)t * QN * Q_ROWS;
        if (T - t >= QM && !(QM == 3 && T - t == 4))
            quantised_tile(a, type, w, x, sums, g, g_end, QM, tiles), t += QM;
        else if (T - t >= 2)
            quantised_tile(a, type, w, x, sums, g, g_end, 2, tiles), t += 2;
        else
            quantised_tile(a, type, w, x, sums, g, g_end, 1, tiles), t += 1;
    }
}

// Sums -> row t of out, columns n .. n_end.
static void quantised_result(const Quantised *a, const float *sums, int t, int n, int n_end) {
    for (size_t o = (size_t)t * a->N + n; n < n_end; n++, o++, sums++) {
        float y = *sums + (a->bias ? a->bias[n] : 0.0f);
        if (a->accumulate)
            ((float *)a->out)[o] += y;
        else
            put(a->out, a->out_type, o, y);
    }
}

// The outputs of QN tiles from n on, or of fewer at the end, for rows t .. t + T.
INLINE void quantised_block(const Quantised *a, Dtype type, int n, int t, int T) {
    float acc[QT_ROWS][QN * Q_ROWS];
    memset(acc, 0, T * sizeof *acc);
    int tiles = (a->N - n + Q_ROWS - 1) / Q_ROWS;
    const uint8_t *w = a->w + (size_t)(n / Q_ROWS) * a->tile_bytes;
    for (int g = 0; g < a->groups; g += QSLICE) {
        int g_end = g + QSLICE < a->groups ? g + QSLICE : a->groups;
        if (tiles >= QN)
            quantised_rows(a, type, w, acc[0], g, g_end, T, QN);
        else
            for (int i = 0; i < tiles; i++)
                quantised_rows(a, type, w + i * a->tile_bytes, acc[0] + i * Q_ROWS, g, g_end, T, 1);
    }
    int n_end = n + QN * Q_ROWS < a->N ? n + QN * Q_ROWS : a->N;
    for (int i = 0; i < T; i++) quantised_result(a, acc[i], t + i, n, n_end);
}

static void linear_quantised(void *out, Dtype out_type, const bf16 *x, const void *w, Dtype type, const float *bias,
                             int T, int N, int K, bool accumulate) {
    int groups = (K + Q_GROUP - 1) / Q_GROUP, room = X_GROUPS / groups, step = room < QT_ROWS ? room : QT_ROWS;
    Quantised a = {out, w, bias, N, groups, tile_bytes(type, K), type, out_type, accumulate};
    assert(step > 0);
    for (int t = 0; t < T; t += step) {
        int rows = t + step < T ? step : T - t;
#pragma omp parallel if ((size_t)rows * N * K > PARALLEL_MACS)
        {
#pragma omp for schedule(static)
            for (int i = 0; i < rows; i++)
                quantise_row(x_groups + (size_t)i * groups, type, x + (size_t)(t + i) * K, K);
#pragma omp for schedule(static) nowait
            for (int n = 0; n < N; n += QN * Q_ROWS)
                if (type == Q8)
                    quantised_block(&a, Q8, n, t, rows);
                else
                    quantised_block(&a, Q4, n, t, rows);
        }
    }
}

static void cpu_linear(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                       int N, int K, bool accumulate) {
    assert(!accumulate || out_type == F32);
    if (type >= Q8)
        linear_quantised(out, out_type, x, w, type, bias, T, N, K, accumulate);
    else
        linear_rows(out, out_type, x, w, type, bias, T, N, K, accumulate);
}

// ---------------------------------------------------------------------------------------------
// rope

// The angle is rounded to f32 before the cosine, as transformers does it, so that long positions agree.
static void cpu_rope_table(float *cos, float *sin, const int32_t *positions, int axes, const int32_t *axis,
                           const float *freq, int T, int half) {
#pragma omp parallel for if ((size_t)T * half > PARALLEL_WORK / 16)
    for (int t = 0; t < T; t++)
        for (int i = 0; i < half; i++) {
            float angle = (float)positions[(size_t)t * axes + axis[i]] * freq[i];
            cos[(size_t)t * half + i] = cosf(angle);
            sin[(size_t)t * half + i] = sinf(angle);
        }
}

INLINE void rope_head(void *x, Dtype type, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = get(x, type, i), b = get(x, type, i + half);
        put(x, type, i, a * cos[i] - b * sin[i]);
        put(x, type, i + half, b * cos[i] + a * sin[i]);
    }
}

static void cpu_rope(void *x, Dtype type, int stride, const float *cos, const float *sin, int T, int heads, int D) {
    int half = D / 2;
#pragma omp parallel for if ((size_t)T * heads * D > PARALLEL_WORK)
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++) {
            void *head = (void *)at(x, type, (size_t)t * stride + (size_t)h * D);
            if (type == F32)
                rope_head(head, F32, cos + (size_t)t * half, sin + (size_t)t * half, half);
            else
                rope_head(head, BF16, cos + (size_t)t * half, sin + (size_t)t * half, half);
        }
}

// ---------------------------------------------------------------------------------------------
// kv_store
//
// Inside a block: keys as (H_kv, D, KV_BLOCK), values as (H_kv, KV_BLOCK, D). With keys transposed the 16
// scores of a block are 16 lanes: no sum across lanes is ever needed.

static void cpu_kv_store(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v, int stride,
                         const int32_t *slot, int T, int H_kv, int D) {
    size_t e = dtype_bytes(type), values = (size_t)H_kv * D * KV_BLOCK;
#pragma omp parallel for if ((size_t)T * H_kv * D > PARALLEL_WORK)
    for (int t = 0; t < T; t++) {
        char *block = (char *)kv + (size_t)(slot[t] / KV_BLOCK) * block_bytes;
        int place = slot[t] % KV_BLOCK;
        for (int h = 0; h < H_kv; h++) {
            const char *key = at(k, type, (size_t)t * stride + (size_t)h * D);
            for (int d = 0; d < D; d++) memcpy(block + (((size_t)h * D + d) * KV_BLOCK + place) * e, key + d * e, e);
            memcpy(block + (values + ((size_t)h * KV_BLOCK + place) * D) * e,
                   at(v, type, (size_t)t * stride + (size_t)h * D), D * e);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Attention
//
// Both attentions are one loop: a tile of up to QT query rows of one head goes over the keys in chunks of
// 16, with the online softmax: a running maximum m, sum l and weighted values acc, rescaled when the
// maximum grows. Scores never leave the registers. Chunks begin at fixed key positions, so
// a row adds in the same order whatever else is in the tile.

enum { QT = 32, D_MAX = 256, ROWS = 4 }; // ROWS of a tile go together, to share each load of keys and values
static_assert((int)KV_BLOCK == (int)LANES, "a block of the cache is one chunk of keys");

typedef struct Tile {
    int rows, D, Dp; // Dp: D up to whole vectors
    float scale;
    int lo[QT], hi[QT]; // keys that each row may see
    float m[QT], l[QT];
    float q[QT][D_MAX], acc[QT][D_MAX];
    float keys[D_MAX][LANES], values[LANES][D_MAX]; // the chunk
} Tile;

static void tile_begin(Tile *t, int rows, int D) {
    t->rows = rows, t->D = D, t->Dp = (D + LANES - 1) / LANES * LANES;
    t->scale = 1.0f / sqrtf((float)D);
    for (int r = 0; r < rows; r++) {
        t->m[r] = -INFINITY, t->l[r] = 0;
        memset(t->acc[r], 0, t->Dp * sizeof(float));
    }
    for (int j = 0; j < LANES; j++) memset(t->values[j], 0, t->Dp * sizeof(float));
}

static void tile_query(Tile *t, int row, const void *q, Dtype type, int lo, int hi) {
    t->lo[row] = lo, t->hi[row] = hi;
    for (int d = 0; d < t->D; d++) t->q[row][d] = get(q, type, d);
}

// The scores of 16 keys for `n` rows, each as four sums over every fourth d: enough multiply-adds under way.
INLINE void tile_scores(const Tile *t, int row, int n, f32x16 *scores) {
    f32x16 s[ROWS][4] = {0};
    int d = 0;
    for (; d + 4 <= t->D; d += 4)
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < n; r++) s[r][i] = v_fma(v_set(t->q[row + r][d + i]), v_load(t->keys[d + i]), s[r][i]);
    for (int i = 0; d + i < t->D; i++)
        for (int r = 0; r < n; r++) s[r][i] = v_fma(v_set(t->q[row + r][d + i]), v_load(t->keys[d + i]), s[r][i]);
    for (int r = 0; r < n; r++) scores[r] = ((s[r][0] + s[r][1]) + (s[r][2] + s[r][3])) * t->scale;
}

// acc = acc * shrink + p values, `vectors` at a time.
INLINE void tile_mix(Tile *t, int row, int n, int d, int vectors, const float (*p)[LANES], const float *shrink) {
    f32x16 acc[ROWS][4];
    for (int r = 0; r < n; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = v_load(t->acc[row + r] + d + i * LANES) * shrink[r];
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < vectors; i++) {
            f32x16 value = v_load(t->values[j] + d + i * LANES);
            for (int r = 0; r < n; r++) acc[r][i] = v_fma(v_set(p[r][j]), value, acc[r][i]);
        }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < vectors; i++) v_store(t->acc[row + r] + d + i * LANES, acc[r][i]);
}

// Let `n` rows see the chunk of keys that begins at position `first`. A masked key has weight exactly 0, and its
// value is finite, so it adds nothing.
INLINE void tile_rows(Tile *t, int row, int n, int first) {
    f32x16 scores[ROWS];
    float p[ROWS][LANES], shrink[ROWS];
    tile_scores(t, row, n, scores);
    for (int r = 0; r < n; r++) {
        i32x16 key = lane_index + first;
        f32x16 s = v_select((key >= t->lo[row + r]) & (key < t->hi[row + r]), scores[r], v_set(-INFINITY));
        float before = t->m[row + r], m = v_max_lane(v_max(v_set(before), s));
        f32x16 weights = v_exp(s - m);
        shrink[r] = m == before ? 1 : v_exp(v_set(before - m))[0]; // v_exp(0) is exactly 1
        t->m[row + r] = m;
        t->l[row + r] = t->l[row + r] * shrink[r] + v_sum(weights);
        v_store(p[r], weights);
    }
    int d = 0;
    for (; d + 4 * LANES <= t->Dp; d += 4 * LANES) tile_mix(t, row, n, d, 4, p, shrink);
    for (; d < t->Dp; d += LANES) tile_mix(t, row, n, d, 1, p, shrink);
}

static bool tile_row_sees(const Tile *t, int row, int first) {
    return t->hi[row] > first && t->lo[row] < first + LANES;
}

static void tile_chunk(Tile *t, int first) {
    for (int r = 0; r < t->rows;) {
        int seeing = 0;
        while (seeing < ROWS && r + seeing < t->rows && tile_row_sees(t, r + seeing, first)) seeing++;
        if (seeing == ROWS)
            tile_rows(t, r, ROWS, first), r += ROWS;
        else if (seeing)
            tile_rows(t, r, 1, first), r++;
        else
            r++;
    }
}

static void tile_result(const Tile *t, int row, void *out, Dtype type) {
    for (int d = 0; d < t->D; d++) put(out, type, d, t->acc[row][d] / t->l[row]);
}

// Fill the chunk from a block of the cache. Places past `n` were never written: zero, for 0 * NaN is NaN.
INLINE void tile_load_block(Tile *t, const void *block, Dtype type, int h, int H_kv, int n) {
    int D = t->D;
    size_t keys = (size_t)h * D * KV_BLOCK, values = (size_t)H_kv * D * KV_BLOCK + keys;
    for (int d = 0; d < D; d++)
        for (int j = 0; j < KV_BLOCK; j++) t->keys[d][j] = get(block, type, keys + (size_t)d * KV_BLOCK + j);
    for (int j = 0; j < n; j++)
        for (int d = 0; d < D; d++) t->values[j][d] = get(block, type, values + (size_t)j * D + d);
    for (int j = n; j < KV_BLOCK; j++) memset(t->values[j], 0, t->Dp * sizeof(float));
}

// Tokens of a sequence whose queries share a tile: as many as fit with all heads of the group.
static int tokens_per_tile(int group) { return group >= QT ? 1 : QT / group; }

typedef struct Paged { // the arguments of attention_paged, for the tiles
    void *out;
    Dtype type;
    const void *q;
    int stride;
    const char *kv;
    size_t block_bytes;
    const int32_t *block_table;
    int table_stride;
    const int32_t *cu_seqlens, *kv_len;
    int B, H, H_kv, D, window;
} Paged;

// Query heads h_first .. h_first + heads, all reading key head h, of rows first .. last of sequence b.
INLINE void paged_tile(const Paged *a, Dtype type, int b, int h, int h_first, int heads, int first, int last) {
    Tile t;
    tile_begin(&t, (last - first) * heads, a->D);
    int lo = a->kv_len[b], hi = 0; // over all rows
    for (int r = 0; r < t.rows; r++) {
        int row = first + r / heads, head = h_first + r % heads;
        int end = a->kv_len[b] - a->cu_seqlens[b + 1] + row + 1;
        int begin = a->window > 0 && end > a->window ? end - a->window : 0;
        tile_query(&t, r, at(a->q, type, (size_t)row * a->stride + (size_t)head * a->D), type, begin, end);
        lo = begin < lo ? begin : lo, hi = end > hi ? end : hi;
    }
    const int32_t *table = a->block_table + (size_t)b * a->table_stride;
    for (int s = lo / KV_BLOCK * KV_BLOCK; s < hi; s += KV_BLOCK) {
        int n = hi - s < KV_BLOCK ? hi - s : KV_BLOCK;
        tile_load_block(&t, a->kv + (size_t)table[s / KV_BLOCK] * a->block_bytes, type, h, a->H_kv, n);
        tile_chunk(&t, s);
    }
    for (int r = 0; r < t.rows; r++) {
        size_t o = ((size_t)(first + r / heads) * a->H + h_first + r % heads) * a->D;
        tile_result(&t, r, (void *)at(a->out, type, o), type);
    }
}

// Tile i of all: over sequences, then rows, then key heads.
static void paged_item(const Paged *a, int i) {
    int group = a->H / a->H_kv, step = tokens_per_tile(group);
    int h = i % a->H_kv, tile = i / a->H_kv, b = 0;
    for (;; b++) {
        int tiles = (a->cu_seqlens[b + 1] - a->cu_seqlens[b] + step - 1) / step;
        if (tile < tiles) break;
        tile -= tiles;
    }
    int first = a->cu_seqlens[b] + tile * step, end = a->cu_seqlens[b + 1];
    int last = first + step < end ? first + step : end;
    for (int g = 0; g < group; g += QT) {
        int heads = group - g < QT ? group - g : QT;
        if (a->type == F32)
            paged_tile(a, F32, b, h, h * group + g, heads, first, last);
        else
            paged_tile(a, BF16, b, h, h * group + g, heads, first, last);
    }
}

static void cpu_attention_paged(void *out, Dtype type, const void *q, int stride, const void *kv, size_t block_bytes,
                                const int32_t *block_table, int table_stride, const int32_t *cu_seqlens,
                                const int32_t *kv_len, int B, int H, int H_kv, int D, int window) {
    assert(D <= D_MAX && H % H_kv == 0);
    Paged a = {out,        type,   q, stride, kv,   block_bytes, block_table, table_stride,
               cu_seqlens, kv_len, B, H,      H_kv, D,           window};
    int step = tokens_per_tile(H / H_kv), tiles = 0, longest = 0;
    for (int b = 0; b < B; b++) {
        tiles += (cu_seqlens[b + 1] - cu_seqlens[b] + step - 1) / step;
        longest = kv_len[b] > longest ? kv_len[b] : longest;
    }
#pragma omp parallel for schedule(dynamic) if ((size_t)cu_seqlens[B] * H * D * longest > PARALLEL_MACS)
    for (int i = 0; i < tiles * H_kv; i++) paged_item(&a, i);
}

// Fill the chunk from rows of qkv: transpose the keys, copy the values.
INLINE void tile_load_rows(Tile *t, const void *k, const void *v, Dtype type, size_t stride, int n) {
    for (int j = 0; j < n; j++)
        for (int d = 0; d < t->D; d++) {
            t->keys[d][j] = get(k, type, j * stride + d);
            t->values[j][d] = get(v, type, j * stride + d);
        }
    for (int j = n; j < LANES; j++) memset(t->values[j], 0, t->Dp * sizeof(float));
}

typedef struct Segments { // the arguments of attention_segments, for the tiles
    void *out;
    Dtype type;
    const void *qkv;
    int first, n, H, D;
} Segments;

// Rows from .. to of head h, in the segment of rows begin .. end.
INLINE void segment_tile(const Segments *a, Dtype type, int begin, int end, int from, int to, int h) {
    Tile t;
    size_t D = a->D, width = (size_t)a->H * D, stride = 3 * width;
    tile_begin(&t, to - from, a->D);
    memset(t.keys, 0, sizeof t.keys[0] * D);
    for (int r = from; r < to; r++)
        tile_query(&t, r - from, at(a->qkv, type, r * stride + h * D), type, 0, end - begin);
    for (int s = begin; s < end; s += LANES) {
        size_t head = s * stride + h * D;
        tile_load_rows(&t, at(a->qkv, type, head + width), at(a->qkv, type, head + 2 * width), type, stride,
                       end - s < LANES ? end - s : LANES);
        tile_chunk(&t, s - begin);
    }
    for (int r = from; r < to; r++)
        tile_result(&t, r - from, (void *)at(a->out, type, (r - a->first) * width + h * D), type);
}

static void cpu_attention_segments(void *out, Dtype type, const void *qkv, const int32_t *cu_seqlens, int segments,
                                   int first, int n, int H, int D) {
    assert(D <= D_MAX);
    Segments a = {out, type, qkv, first, n, H, D};
#pragma omp parallel
    for (int i = 0; i < segments; i++) {
        int begin = cu_seqlens[i], end = cu_seqlens[i + 1];
        int from = begin > first ? begin : first, to = end < first + n ? end : first + n;
        if (from >= to) continue;
        int tiles = (to - from + QT - 1) / QT;
#pragma omp for schedule(dynamic) nowait
        for (int j = 0; j < tiles * H; j++) {
            int row = from + j / H * QT, last = row + QT < to ? row + QT : to;
            if (type == F32)
                segment_tile(&a, F32, begin, end, row, last, j % H);
            else
                segment_tile(&a, BF16, begin, end, row, last, j % H);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// glu, gelu

INLINE void glu_row(void *out, const void *gate_up, Dtype type, int F) {
    for (int f = 0; f < F; f += LANES) {
        int n = F - f < LANES ? F - f : LANES;
        f32x16 gate = {0}, up = {0};
        for (int i = 0; i < n; i++) gate[i] = get(gate_up, type, f + i), up[i] = get(gate_up, type, F + f + i);
        f32x16 y = gate / (v_exp(-gate) + 1.0f) * up;
        for (int i = 0; i < n; i++) put(out, type, f + i, y[i]);
    }
}

static void cpu_glu(void *out, const void *gate_up, Dtype type, int T, int F) {
#pragma omp parallel for if ((size_t)T * F > PARALLEL_WORK / 8)
    for (int t = 0; t < T; t++) {
        void *o = (void *)at(out, type, (size_t)t * F);
        const void *in = at(gate_up, type, (size_t)t * 2 * F);
        if (type == F32)
            glu_row(o, in, F32, F);
        else
            glu_row(o, in, BF16, F);
    }
}

static void cpu_gelu(void *x, Dtype type, size_t n) {
#pragma omp parallel for if (n > PARALLEL_WORK / 16)
    for (size_t i = 0; i < n; i++) {
        float v = get(x, type, i);
        put(x, type, i, 0.5f * v * (1.0f + erff(v * 0.70710678f)));
    }
}

// ---------------------------------------------------------------------------------------------
// sample

INLINE f32x16 load_or(const float *p, int n, float other) {
    if (n >= LANES) return v_load(p);
    f32x16 v = v_set(other);
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}

static float row_max(const float *x, int V) {
    f32x16 m = v_set(-INFINITY);
    for (int i = 0; i < V; i += LANES) m = v_max(m, load_or(x + i, V - i, -INFINITY));
    return v_max_lane(m);
}

static int row_argmax(const float *x, int V) {
    float m = row_max(x, V);
    int i = 0;
    while (i < V - 1 && !(x[i] >= m)) i++;
    return i;
}

// Sum of the entries that are at least `floor`.
static float sum_from(const float *x, int V, float floor) {
    f32x16 sum = {0};
    for (int i = 0; i < V; i += LANES) {
        f32x16 v = load_or(x + i, V - i, -1);
        sum += v_select(v >= floor, v, (f32x16){0});
    }
    return v_sum(sum);
}

static int count_from(const float *x, int V, float floor) {
    int n = 0;
    for (int i = 0; i < V; i++) n += x[i] >= floor;
    return n;
}

// The largest floor in (0, 1] with enough(floor), found on the bits: floats above 0 sort like integers.
// No order among the candidates is ever made, so a device can do the same with sums only.
static float bisect_floor(const float *x, int V, float want, bool by_count) {
    uint32_t lo = 1, hi = 0x3f800000; // the smallest subnormal; 1.0, the weight of the most likely token
    while (lo < hi) {
        uint32_t mid = hi - (hi - lo) / 2;
        float floor;
        memcpy(&floor, &mid, 4);
        bool enough = by_count ? (float)count_from(x, V, floor) >= want : sum_from(x, V, floor) >= want;
        if (enough)
            lo = mid;
        else
            hi = mid - 1;
    }
    float floor;
    memcpy(&floor, &lo, 4);
    return floor;
}

static void drop_below(float *x, int V, float floor) {
    for (int i = 0; i < V; i++)
        if (x[i] < floor) x[i] = 0;
}

static void report_logprobs(Sampled *out, const float *x, int V, float max, float log_sum, int n) {
    for (int k = n; k < MAX_LOGPROBS; k++) out->top_id[k] = -1, out->top_logprob[k] = 0;
    for (int k = 0; k < n; k++) {
        int best = -1;
        for (int i = 0; i < V; i++) {
            bool after =
                k == 0 || x[i] < x[out->top_id[k - 1]] || (x[i] == x[out->top_id[k - 1]] && i > out->top_id[k - 1]);
            if (after && (best < 0 || x[i] > x[best])) best = i;
        }
        if (best < 0) best = k; // fewer than n numbers: NaN among the logits
        out->top_id[k] = best;
        out->top_logprob[k] = x[best] - max - log_sum;
    }
}

static void apply_penalties(float *x, const Sampling *how, const TokenCount *counts, int n) {
    for (int i = 0; i < n; i++) {
        float *l = &x[counts[i].id];
        *l = *l > 0 ? *l / how->repetition_penalty : *l * how->repetition_penalty;
        *l -= how->frequency_penalty * counts[i].count + (counts[i].count > 0 ? how->presence_penalty : 0);
    }
}

// Turn logits into weights relative to the most likely token, drop what top-k, top-p and min-p exclude, and draw.
static int draw(float *x, int V, const SampleRow *row) {
    const Sampling *how = &row->how;
    float max = row_max(x, V);
    for (int i = 0; i < V; i += LANES) {
        f32x16 w = v_exp((load_or(x + i, V - i, -INFINITY) - max) / how->temperature);
        for (int j = 0; j < LANES && i + j < V; j++) x[i + j] = w[j];
    }
    if (how->top_k > 0 && how->top_k < V) drop_below(x, V, bisect_floor(x, V, (float)how->top_k, true));
    if (how->top_p < 1) drop_below(x, V, bisect_floor(x, V, how->top_p * sum_from(x, V, 0), false));
    drop_below(x, V, how->min_p);
    int best = 0;
    float best_score = -1;
    for (int i = 0; i < V; i++) {
        if (!(x[i] > 0)) continue;
        float score = x[i] / -logf(sample_uniform(how->seed, row->step, i));
        if (score > best_score) best = i, best_score = score;
    }
    return best;
}

static void sample_row(Sampled *out, const float *logits, float *work, const SampleRow *row, const TokenCount *counts,
                       int V) {
    float max = row_max(logits, V);
    f32x16 sum = {0};
    for (int i = 0; i < V; i += LANES) sum += v_exp(load_or(logits + i, V - i, -INFINITY) - max);
    float log_sum = logf(v_sum(sum));
    report_logprobs(out, logits, V, max, log_sum, row->how.logprobs);

    const float *x = logits;
    if (row->n > 0 || row->how.temperature > 0) {
        memcpy(work, logits, (size_t)V * sizeof *work);
        apply_penalties(work, &row->how, counts + row->first, row->n);
        x = work;
    }
    out->id = row->how.temperature > 0 ? draw(work, V, row) : row_argmax(x, V);
    out->logprob = logits[out->id] - max - log_sum;
}

static void cpu_sample(Sampled *out, const float *logits, float *work, const SampleRow *rows, const TokenCount *counts,
                       int R, int V) {
#pragma omp parallel for schedule(dynamic) if ((size_t)R * V > PARALLEL_WORK)
    for (int r = 0; r < R; r++) sample_row(out + r, logits + (size_t)r * V, work + (size_t)r * V, rows + r, counts, V);
}

const Device device_cpu = {
    .name = "cpu",
    .unified = true,
    .quantised = true,
    .step_patches = 256,
    .reserve = cpu_reserve,
    .reserve_host = cpu_reserve,
    .release = cpu_release,
    .release_host = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .embed = cpu_embed,
    .gather_rows = cpu_gather_rows,
    .rmsnorm = cpu_rmsnorm,
    .linear = cpu_linear,
    .rope_table = cpu_rope_table,
    .rope = cpu_rope,
    .kv_store = cpu_kv_store,
    .attention_paged = cpu_attention_paged,
    .attention_segments = cpu_attention_segments,
    .glu = cpu_glu,
    .gelu = cpu_gelu,
    .sample = cpu_sample,
};
