// vlm_cpu.c: the operations of the Device table in C, for any CPU. The reference device.
//
// Everything works on vectors as wide as the instruction set has them: AVX-512, AVX2, or what the compiler makes of
// four lanes. The Makefile builds this file once for each set, and vlm_cpu_pick.c chooses when the program starts.
// Within one set rows are only ever grouped, never split, and threads divide outputs, never sums: so a result does not
// depend on how many rows come together, nor on the threads.
#include "vlm.h"
#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------------------
// Vectors: a register of the instruction set, whatever its width

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES))); // bf16 or f16
typedef int8_t vb __attribute__((vector_size(LANES)));

#if defined(__AVX512F__)
static const vi lane_index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
static const vi lane_index = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const vi lane_index = {0, 1, 2, 3};
#endif

// Lane i is lane from[i] of a, or from[i] - LANES of b. `from` is a constant: gcc finds the instruction for it, clang
// does not.
INLINE vi v_shuffle(vi a, vi b, vi from) {
#if !defined(__clang__)
    return __builtin_shuffle(a, b, from);
#elif defined(__AVX512F__)
    return (vi)_mm512_permutex2var_epi32((__m512i)a, (__m512i)from, (__m512i)b);
#elif defined(__AVX2__)
    vi of_a = (vi)_mm256_permutevar8x32_epi32((__m256i)a, (__m256i)from);
    vi of_b = (vi)_mm256_permutevar8x32_epi32((__m256i)b, (__m256i)from);
    vi first = from < LANES;
    return (first & of_a) | (~first & of_b);
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return v;
#endif
}

INLINE vf v_rotate(vf v, int n) { return (vf)v_shuffle((vi)v, (vi)v, (lane_index + n) & (LANES - 1)); }

INLINE vf v_set(float x) { return x - (vf){0}; }

INLINE vf v_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

// a * b + c, rounded once where the machine can.
INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__x86_64__) // without the instruction, fmaf is a call
    return a * b + c;
#else                     // NEON has it as vfmaq_f32, and the compiler knows
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Where mask (all ones or zeros a lane): a, else b.
INLINE vf v_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

// The larger one; b when a is NaN, so keep the value that may be NaN in b.
INLINE vf v_max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_select(a > b, a, b);
#endif
}

// The smaller one; b when a is NaN.
INLINE vf v_min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return v_select(a < b, a, b);
#endif
}

// All lanes, halves first.
INLINE float v_sum(vf v) {
    for (int half = LANES / 2; half; half /= 2) v += v_rotate(v, half);
    return v[0];
}

INLINE float v_max_lane(vf v) {
    for (int half = LANES / 2; half; half /= 2) v = v_max(v, v_rotate(v, half));
    return v[0];
}

// e^x to 2 ulp; 0 below -87, where the result would be subnormal; NaN stays NaN. Cody and Waite's
// reduction x = n ln 2 + r, then Taylor's polynomial on |r| <= ln 2 / 2.
INLINE vf v_exp(vf x) {
    const vf magic = v_set(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf clipped = v_min(v_set(88.0f), x);
    vf t = v_fma(clipped, v_set(1.44269504f), magic);
    vf n = t - magic;
    vf r = v_fma(n, v_set(-0.693359375f), clipped);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
#if defined(__AVX512F__)
    p = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    p *= (vf)(((vu)t - (vu)magic + 127) << 23);
#endif
    return v_select(x < -87.0f, (vf){0}, p);
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

INLINE size_t width(Dtype type) { return type == F32 ? 4 : 2; }

INLINE float get(const void *p, Dtype type, size_t i) {
    return type == F32 ? ((const float *)p)[i] : bf16_to_f32(((const bf16 *)p)[i]);
}

INLINE void put(void *p, Dtype type, size_t i, float f) {
    if (type == F32)
        ((float *)p)[i] = f;
    else
        ((bf16 *)p)[i] = f32_to_bf16(f);
}

INLINE vu v_widen(vh h) {
#if defined(__AVX512F__) // gcc makes two halves of it
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}

// LANES numbers from p[i] on.
INLINE vf v_get(const void *p, Dtype type, size_t i) {
    if (type == F32) return v_load((const float *)p + i);
    vh b;
    memcpy(&b, (const bf16 *)p + i, sizeof b);
    return (vf)(v_widen(b) << 16);
}

INLINE void v_put(void *p, Dtype type, size_t i, vf v) {
    if (type == F32) {
        v_store((float *)p + i, v);
        return;
    }
#if defined(__AVX512BF16__) // one instruction; it takes subnormal numbers for 0
    __m256bh b = _mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = u >> 16 | 0x40;
    vi nan = v != v;
    vh b = __builtin_convertvector((rounded & ~(vu)nan) | (quiet & (vu)nan), vh);
#endif
    memcpy((bf16 *)p + i, &b, sizeof b);
}

INLINE const void *at(const void *p, Dtype type, size_t i) { return (const char *)p + i * width(type); }

// LANES f16 numbers, all finite.
INLINE vf v_load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    vu u = v_widen(h);
    vf size = (vf)((u & 0x7fff) << 13) * 0x1p112f; // moves the exponent, subnormals included
    return (vf)((vu)size | (u & 0x8000) << 16);
#endif
}

// Waking the threads costs some microseconds. Below these numbers of elements and of multiply-adds one is faster.
enum { PARALLEL_WORK = 1 << 16, PARALLEL_MACS = 1 << 18 };

// ---------------------------------------------------------------------------------------------
// Memory

enum { SCRATCH = 8 << 20 };
static void *scratch; // the last SCRATCH bytes of what is reserved: rows of a product that it cannot read in place

static void *cpu_reserve_host(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE); // where the system has large pages: fewer misses of the address cache
    return p;
}

static void *cpu_reserve(size_t bytes) {
    void *p = cpu_reserve_host(bytes);
    if (p) scratch = (char *)p + (bytes - SCRATCH) / 64 * 64;
    return p;
}

static void cpu_release(void *base, size_t bytes) { munmap(base, bytes); }

static void cpu_copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

// ---------------------------------------------------------------------------------------------
// embed, gather_rows

// The numbers of group g of a tile of Q8 or Q4, and its scales. What lies where is written at "linear".
INLINE size_t group_bytes(Dtype type) { return type == Q4 ? Q_ROWS * 32 : Q_ROWS * 64; }

INLINE const char *group_numbers(Dtype type, const char *tile, int g) {
    return tile + g / 2 * (64 + 2 * group_bytes(type)) + 64 + g % 2 * group_bytes(type);
}

INLINE const char *group_scales(Dtype type, const char *tile, int g) {
    return tile + g / 2 * (64 + 2 * group_bytes(type)) + g % 2 * Q_ROWS * 2;
}

// Row `id` of a Q8 or Q4 matrix.
static void embed_quantised(float *out, const char *table, Dtype type, int id, int C) {
    int r = id % Q_ROWS;
    const char *tile = table + (size_t)(id / Q_ROWS) * tile_bytes(type, C);
    for (int c = 0; c < C; c++) {
        const uint8_t *group = (const uint8_t *)group_numbers(type, tile, c / Q_GROUP);
        const uint16_t *scales = (const uint16_t *)group_scales(type, tile, c / Q_GROUP);
        int k = c % Q_GROUP, four = 4 * r + k % 4, q;
        if (type == Q8)
            q = group[k / 4 * 64 + four] - 128;
        else
            q = (group[k / 8 * 64 + four] >> (k & 4) & 15) - 8;
        out[c] = (float)q * v_load_f16(scales + r / LANES * LANES)[r % LANES];
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
    vf squares = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        vf v = v_load(x + c);
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
// A vector is 64 bytes: 16 lanes of one f32, two bf16 or four bytes. One instruction multiplies two vectors and adds
// the products to 16 sums. w has one of two layouts, and each its micro-kernel. In both an output depends on K only,
// not on how many rows or outputs are computed together.
//
// Rows (F32, BF16), as a checkpoint has them. Vectors run along rows of w and x, so an output has 16 sums. At the end
// of a slice of SLICE bytes these are added, halves first, and slices are added in order.
//
// Tiles (Q8, Q4) of 16 rows, for the scale that every group of 64 numbers of a row has: a vector is four numbers of
// each row and meets the same four of a row of x, so an output is a lane, and one multiplication scales 16 of them. A
// tile holds for each pair of groups a line of their scales, 2 x 16 in f16, and 16 (Q8) or 8 (Q4) vectors of each. A
// group's products are whole numbers and add up exactly; groups, times the scales of w and x, are added in order. The
// instruction multiplies unsigned by signed bytes: w is stored with 128 (Q8) or 8 (Q4) added, and a group's sums start
// at -128 (-8) times the sum of x's numbers. A byte of Q4 has number k in its low half and k + 4 in its high one.
//
// RW rows, or QN tiles, times RX rows of x have their sums in registers. The weights of that many outputs, SLICE bytes
// or QSLICE groups of them (or tiles of up to WHOLE groups whole), stay in the caches next to the core while up to
// XROWS rows (tiles: all) pass. So MAX_ROWS rows, or as many as the scratch holds, read each weight from memory once,
// and one row alone streams them.

#if defined(__AVX512F__)
enum { RW = 4, QN = 4, RX = 4 }; // 16 sums, 4 vectors of w and one of x in 32 registers
#elif defined(__AVX2__)
enum { RW = 2, QN = 1, RX = 4 }; // 8 sums, and what takes bf16 and bytes apart, in 16
#else
enum { RW = 2, QN = 1, RX = 2 };
#endif
enum { PARTS = Q_ROWS / LANES, QV = QN * PARTS }; // registers for a vector; for those of QN tiles
enum { BLOCK = 64, SLICE = 2048, XROWS = 64, QSLICE = 4, WHOLE = 16, MAX_ROWS = 512 };
enum { LEAD = 8192 }; // bytes from what a lone row multiplies to what it asks for: enough to keep the memory busy

typedef struct XGroup { // a group of a row of x: 64 bytes of numbers
    int8_t bytes[64];
    float scale;
    int32_t start; // what a sum of products with unsigned weights begins at
} XGroup;

typedef struct Linear { // the arguments of linear
    void *out;
    const char *w;
    const float *bias;
    int N;
    size_t row_bytes; // of w: F32 and BF16
    const char *rows; // of x, each at a multiple of x_bytes: F32 and BF16
    size_t x_bytes;
    size_t tile_bytes; // of w: Q8 and Q4
    XGroup *groups;    // of x, n_groups a row
    int n_groups;
    Dtype out_type;
    bool accumulate;
} Linear;

INLINE vi load_vector(const void *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Its first `bytes`, then zeros.
INLINE vi load_part(const void *p, size_t bytes) {
    if (bytes >= sizeof(vi)) return load_vector(p);
#if defined(__AVX512BW__)
    return (vi)_mm512_maskz_loadu_epi8(((__mmask64)1 << bytes) - 1, p);
#else
    vi v = {0};
    memcpy(&v, p, bytes);
    return v;
#endif
}

// Four bytes in every lane.
INLINE vi load_four(const void *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (vi){0} + four;
}

// sum + the products of w's numbers in each lane with x's: one f32, or two bf16, the second first, as the instruction
// has it.
INLINE vf dot_floats(Dtype type, vf sum, vi w, vi x) {
    if (type == F32) return v_fma((vf)x, (vf)w, sum);
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    const vi upper = (vi){0} + (int32_t)0xffff0000;
    sum = v_fma((vf)(x & upper), (vf)(w & upper), sum);
    return v_fma((vf)(x << 16), (vf)(w << 16), sum);
#endif
}

// The same with four bytes in each lane, w's unsigned and x's signed.
INLINE vi dot_bytes(vi sum, vi w, vi x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__) // even and odd bytes as 16-bit numbers: their products and the sum of two fit 32 bits
    __m256i x_odd = _mm256_srai_epi16((__m256i)x, 8), x_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
    __m256i w_odd = _mm256_srli_epi16((__m256i)w, 8), w_even = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255));
    __m256i even = _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(w_even, x_even));
    return (vi)_mm256_add_epi32(even, _mm256_madd_epi16(w_odd, x_odd));
#else                   // NEON has vusdotq_s32 for this
    for (int shift = 0; shift < 32; shift += 8) sum += (vi)((vu)w >> shift & 255) * (x << (24 - shift) >> 24);
    return sum;
#endif
}

// Lane i of the first n: the lanes of v[i], added up as v_sum does. n is a power of two, at most LANES. Each round
// halves the vectors, and the lanes that belong together; when one is left, it meets itself.
INLINE vf v_sum_each(vf *v, int n) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2, n = (n + 1) / 2) {
        const vi place = lane_index & (LANES / 2 - 1);
        const vi lower = (place & (half - 1)) + (place & -half) * 2 + (lane_index & LANES / 2) * 2;
        for (int i = 0; i < (n + 1) / 2; i++) {
            vi a = (vi)v[2 * i], b = (vi)v[n > 1 ? 2 * i + 1 : 0];
            v[i] = (vf)v_shuffle(a, b, lower) + (vf)v_shuffle(a, b, lower + half);
        }
    }
    return v[0];
}

// The vectors at byte k of R rows of w times those of T rows of x. Of a row's last one `left` bytes are its own.
INLINE void rows_step(Dtype type, vf *sum, const char *const *w, const char *const *x, size_t k, size_t left, int R,
                      int T) {
    vi v[RW];
    for (int r = 0; r < R; r++) v[r] = load_part(w[r] + k, left);
    for (int t = 0; t < T; t++) {
        vi u = load_part(x[t] + k, left);
        for (int r = 0; r < R; r++) sum[t * R + r] = dot_floats(type, sum[t * R + r], v[r], u);
    }
}

typedef struct Ask { // for weights that come later: n vectors in each step, at most 4, `apart`; `step` on with each
    const char *at;
    size_t step, apart;
    int n;
} Ask;

// Into the first-level cache, past the others where the processor can: a weight is met there once, or, by more than
// XROWS rows, so slowly that it costs nothing to read it again.
INLINE void ask_once(const char *at) { __builtin_prefetch(at, 0, 0); }

INLINE void ask_for(const Ask *ask) {
    if (ask->n > 0) ask_once(ask->at);
    if (ask->n > 1) ask_once(ask->at + ask->apart);
    if (ask->n > 2) ask_once(ask->at + 2 * ask->apart);
    if (ask->n > 3) ask_once(ask->at + 3 * ask->apart);
}

// Weights of tiles: more than one row of x, or tile beside tile, meets them later than that cache remembers.
INLINE void ask_tile(const char *at, bool alone) {
    if (alone)
        ask_once(at);
    else
        __builtin_prefetch(at);
}

// What a tile of R rows at w asks for while it meets rows t.. of T of x. A lone row's w comes in the order of memory.
// Else the tiles of x share the asking evenly, for memory works best without pause: of short rows, which follow one
// another, for those from one and a half tiles on; of longer ones for the next tile's slices, side by side, where two
// tiles of x do best if both ask for all.
INLINE Ask rows_ask(const char *w, size_t row_bytes, int R, int t, int T) {
    if (T == 1) return (Ask){w + LEAD, 64, 64, 1};
    bool wide = row_bytes > SLICE;
    int tiles = ((T < XROWS ? T : XROWS) + RX - 1) / RX, every = tiles > R ? tiles / R : 1;
    int n = (R + tiles - 1) / tiles, r = t / RX / every * n;
    if (wide && tiles == 2) n = R, r = 0;
    if (t / RX % every > 0 || r >= R) return (Ask){.at = w};
    if (wide) return (Ask){w + (R + r) * row_bytes, 64, row_bytes, n};
    return (Ask){w + (R + R / 2 + r) * row_bytes, (size_t)n * 64, 64, n};
}

// `bytes` of R rows of w times those of T rows of x, added to sums. As many parts of a vector go together as have their
// sums in registers.
INLINE void rows_dot(Dtype type, const char *const *w, const char *const *x, size_t bytes, Ask ask, float *sums, int R,
                     int T) {
    const size_t some = RX / T < PARTS ? RX / T : PARTS, n = T * R;
    vf each[PARTS * RX * RW];
    for (size_t part = 0; part < PARTS; part += some) {
        vf sum[RX * RW] = {0};
        size_t k = part * sizeof(vi);
        for (; k + some * sizeof(vi) <= bytes; k += 64, ask.at += ask.step) {
            if (part == 0) ask_for(&ask);
            for (size_t p = 0; p < some; p++) rows_step(type, sum + p * n, w, x, k + p * sizeof(vi), sizeof(vi), R, T);
        }
        for (size_t p = 0; p < some; p++, k += sizeof(vi))
            if (k < bytes) rows_step(type, sum + p * n, w, x, k, bytes - k, R, T);
        for (size_t i = 0; i < some * n; i++) each[part * n + i] = sum[i];
    }
    for (size_t half = PARTS / 2 * n; half >= n; half /= 2)
        for (size_t i = 0; i < half; i++) each[i] += each[i + half];
    float all[LANES];
    v_store(all, v_sum_each(each, n));
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) sums[t * BLOCK + r] += all[t * R + r];
}

// The slice from byte k on of R rows of w, from n on, times rows first .. last of x, of T.
INLINE void rows_pass(const Linear *a, Dtype type, float *sums, int n, size_t k, int first, int last, int R, int T) {
    size_t bytes = a->row_bytes - k < SLICE ? a->row_bytes - k : SLICE;
    const char *w[RW], *x[RX];
    for (int r = 0; r < R; r++) w[r] = a->w + (n + r < a->N ? n + r : a->N - 1) * a->row_bytes + k;
    for (int t = first, rows = RX; t < last; t += rows) {
        while (rows > last - t) rows /= 2;
        for (int r = 0; r < rows; r++) x[r] = a->rows + (t + r) * a->x_bytes + k;
        Ask ask = rows_ask(w[0], a->row_bytes, R, t, T);
        float *out = sums + t * BLOCK;
        if (rows == 4)
            rows_dot(type, w, x, bytes, ask, out, R, RX);
        else if (rows == 2)
            rows_dot(type, w, x, bytes, ask, out, R, 2);
        else
            rows_dot(type, w, x, bytes, ask, out, R, 1);
    }
}

// Outputs of BLOCK rows of w from n on, for T rows of x. A lone row goes through w's rows one by one, which is the
// order of memory.
INLINE void rows_block(const Linear *a, Dtype type, float *sums, int n, int T) {
    int outputs = a->N - n < BLOCK ? a->N - n : BLOCK;
    for (int i = 0; T == 1 && i < outputs; i++)
        for (size_t k = 0; k < a->row_bytes; k += SLICE) rows_pass(a, type, sums + i, n + i, k, 0, 1, 1, 1);
    for (size_t k = 0; T > 1 && k < a->row_bytes; k += SLICE)
        for (int first = 0; first < T; first += XROWS)
            for (int i = 0; i < outputs; i += RW)
                rows_pass(a, type, sums + i, n + i, k, first, T - first < XROWS ? T : first + XROWS, RW, T);
}

// A group of x is rounded as w is, to 127 steps. Where it is not finite the scale is NaN, and so is every output of the
// row.
INLINE void quantise_group(XGroup *out, Dtype type, const bf16 *x) {
    const vf magic = v_set(12582912.0f); // rounds, as in v_exp
    vf v[Q_GROUP / LANES], most = {0}, wrong = {0};
    for (int i = 0; i < Q_GROUP / LANES; i++) {
        v[i] = v_get(x, BF16, i * LANES);
        most = v_max((vf)((vi)v[i] & 0x7fffffff), most);
        wrong = v_fma(v[i], (vf){0}, wrong);
    }
    float max = v_max_lane(most);
    vf inverse = v_set(max > 0 ? 127 / max : 0);
    vi sum = {0};
    for (int i = 0; i < Q_GROUP / LANES; i++) {
        vi whole = (vi)v_fma(v[i], inverse, magic) - (vi)magic;
        vb q = __builtin_convertvector(whole, vb);
        memcpy(out->bytes + i * LANES, &q, sizeof q);
        sum += whole << 24 >> 24; // the byte: not what it was made of where that is not finite
    }
    out->scale = max / 127 + v_sum(wrong);
    out->start = (type == Q8 ? -128 : -8) * (int)v_sum(__builtin_convertvector(sum, vf)); // whole, so exact
}

static void quantise_row(XGroup *out, Dtype type, const bf16 *x, int K) {
    int k = 0;
    for (; k + Q_GROUP <= K; k += Q_GROUP) quantise_group(out++, type, x + k);
    if (k == K) return;
    bf16 rest[Q_GROUP] = {0};
    memcpy(rest, x + k, (K - k) * sizeof *x);
    quantise_group(out, type, rest);
}

// Part `part` of vector j of a group.
INLINE vi tile_vector(Dtype type, const char *group, int j, int part) {
    if (type != Q4) return load_vector(group + 64 * j + part * sizeof(vi));
    vi both = load_vector(group + 64 * (j / 2) + part * sizeof(vi));
    return (j % 2 ? both >> 4 : both) & 0x0f0f0f0f;
}

// n groups, from an even one at w on, of `tiles` tiles that are `stride` apart, times those of T rows of x, added to
// sums. What lies `ahead` is asked for, unless that is 0.
INLINE void tiles_dot(Dtype type, const char *w, size_t stride, const XGroup *const *x, int n, size_t ahead,
                      float *sums, int T, int tiles) {
    int vectors = tiles * PARTS; // vector i is part i % PARTS of tile i / PARTS
    const size_t bytes = group_bytes(type);
    for (int g = 0; g < n; g++) {
        const char *scales = group_scales(type, w, g), *group = group_numbers(type, w, g);
        for (int i = 0; ahead && g % 2 == 0 && i < tiles; i++) ask_tile(scales + i * stride + ahead, T * tiles == 1);
        vi dots[RX][QV];
        for (int t = 0; t < T; t++)
            for (int i = 0; i < vectors; i++) dots[t][i] = (vi){0} + x[t][g].start;
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            for (int i = 0; ahead && j % (1024 / bytes) == 0 && i < tiles; i++)
                ask_tile(group + i * stride + ahead + j * bytes / 16, T * tiles == 1);
            vi v[QV];
            for (int i = 0; i < vectors; i++) v[i] = tile_vector(type, group + i / PARTS * stride, j, i % PARTS);
            for (int t = 0; t < T; t++) {
                vi four = load_four(x[t][g].bytes + 4 * j);
                for (int i = 0; i < vectors; i++) dots[t][i] = dot_bytes(dots[t][i], v[i], four);
            }
        }
        for (int i = 0; i < vectors; i++) {
            vf scale = v_load_f16((const uint16_t *)(scales + i / PARTS * stride) + i % PARTS * LANES);
            for (int t = 0; t < T; t++) {
                float *to = sums + t * BLOCK + i * LANES;
                v_store(to, v_fma(__builtin_convertvector(dots[t][i], vf), scale * x[t][g].scale, v_load(to)));
            }
        }
    }
}

// Outputs of BLOCK rows of w from n on, for T rows of x. A lone row goes through tiles one by one, which is the order
// of memory; Q8 takes so little work a byte that with AVX-512 the core's own foresight is enough.
INLINE void tiles_block(const Linear *a, Dtype type, float *sums, int n, int T) {
    bool alone = T == 1;
    size_t stride = a->tile_bytes;
    int slice = alone || a->n_groups <= WHOLE ? a->n_groups : QSLICE;
    for (int i = 0, tiles = alone ? 1 : QN; i < BLOCK && n + i < a->N; i += tiles * Q_ROWS) {
        if (n + i + QN * Q_ROWS > a->N) tiles = 1;
        const char *tile = a->w + (n + i) / Q_ROWS * stride;
        for (int g = 0; g < a->n_groups; g += slice) {
            int count = a->n_groups - g < slice ? a->n_groups - g : slice;
            const char *w = group_scales(type, tile, g);
            size_t next = g + slice < a->n_groups ? group_scales(type, w, slice) - w : tile + tiles * stride - w;
            const bool foresees = type == Q8 && LANES == 16;
            if (alone) next = LEAD;
            for (int t = 0, rows = RX; t < T; t += rows) {
                const XGroup *x[RX];
                while (rows > T - t) rows /= 2;
                for (int r = 0; r < rows; r++) x[r] = a->groups + (size_t)(t + r) * a->n_groups + g;
                size_t ahead = t < 2 * RX ? next : 0; // the first rows ask for all
                float *out = sums + t * BLOCK + i;
                if (tiles < QN || alone)
                    for (int r = 0; r < rows; r++)
                        tiles_dot(type, w, stride, x + r, count, foresees ? 0 : ahead, out + r * BLOCK, 1, 1);
                else if (rows == 4)
                    tiles_dot(type, w, stride, x, count, ahead, out, RX, QN);
                else if (rows == 2)
                    tiles_dot(type, w, stride, x, count, ahead, out, 2, QN);
                else
                    tiles_dot(type, w, stride, x, count, ahead, out, 1, QN);
            }
        }
    }
}

// LANES sums -> row t of out, columns n on, `count` of them.
INLINE void linear_result(const Linear *a, vf y, int t, int n, int count) {
    size_t o = (size_t)t * a->N + n;
    float part[LANES];
    for (int i = 0; count < LANES && i < LANES; i++) part[i] = a->bias && i < count ? a->bias[n + i] : 0;
    if (a->bias) y += count < LANES ? v_load(part) : v_load(a->bias + n);
    if (count == LANES) {
        if (a->accumulate) y += v_get(a->out, F32, o);
        v_put(a->out, a->out_type, o, y);
    } else
        for (int i = 0; i < count; i++) {
            float before = a->accumulate ? ((float *)a->out)[o + i] : 0;
            put(a->out, a->out_type, o + i, a->accumulate ? before + y[i] : y[i]);
        }
}

INLINE void linear_block(const Linear *a, Dtype type, int n, int t, int T) {
    float sums[MAX_ROWS][BLOCK];
    memset(sums, 0, T * sizeof *sums);
    if (type < Q8)
        rows_block(a, type, sums[0], n, T);
    else
        tiles_block(a, type, sums[0], n, T);
    int outputs = a->N - n < BLOCK ? a->N - n : BLOCK;
    for (int i = 0; i < T; i++)
        for (int j = 0; j < outputs; j += LANES)
            linear_result(a, v_load(sums[i] + j), t + i, n + j, outputs - j < LANES ? outputs - j : LANES);
}

// What the micro-kernels read of row t of x, at place i of the scratch.
static void prepare_row(const Linear *a, Dtype type, const void *x, int t, int i, int K) {
    if (type >= Q8)
        quantise_row(a->groups + (size_t)i * a->n_groups, type, (const bf16 *)x + (size_t)t * K, K);
    else
        memcpy((char *)scratch + i * a->x_bytes, (const char *)x + t * a->row_bytes, a->row_bytes);
}

static void cpu_linear(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                       int N, int K, bool accumulate) {
    assert(!accumulate || out_type == F32);
    bool quantised = type >= Q8;
    Linear a = {.out = out, .w = w, .bias = bias, .N = N, .out_type = out_type, .accumulate = accumulate};
    if (quantised)
        a.groups = scratch, a.n_groups = (K + Q_GROUP - 1) / Q_GROUP, a.tile_bytes = tile_bytes(type, K);
    else
        a.row_bytes = K * width(type), a.x_bytes = (a.row_bytes + 63) / 64 * 64;
    bool in_place = !quantised && a.row_bytes == a.x_bytes;
    size_t room = SCRATCH / (quantised ? a.n_groups * sizeof(XGroup) : a.x_bytes); // of the longest rows one fits
    int step = in_place || room > MAX_ROWS ? MAX_ROWS : (int)room;
    assert(step > 0);
    for (int t = 0; t < T; t += step) {
        int rows = t + step < T ? step : T - t;
        a.rows = in_place ? (const char *)x + t * a.row_bytes : scratch;
#pragma omp parallel if ((size_t)rows * N * K > PARALLEL_MACS)
        {
            if (!in_place) {
#pragma omp for schedule(static)
                for (int i = 0; i < rows; i++) prepare_row(&a, type, x, t + i, i, K);
            }
#pragma omp for schedule(static)
            for (int n = 0; n < N; n += BLOCK) switch (type) {
                case F32: linear_block(&a, F32, n, t, rows); break;
                case BF16: linear_block(&a, BF16, n, t, rows); break;
                case Q8: linear_block(&a, Q8, n, t, rows); break;
                case Q4: linear_block(&a, Q4, n, t, rows); break;
                }
        }
    }
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
// Inside a block: keys as (H_kv, D, KV_BLOCK), values as (H_kv, KV_BLOCK, D). Keys are turned as Q8's rows are in a
// tile, four bytes at a time (a pair of bf16): the 16 scores of a block are 16 lanes, and no sum across lanes is ever
// needed.

static void cpu_kv_store(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v, int stride,
                         const int32_t *slot, int T, int H_kv, int D) {
    size_t row = D * width(type), values = H_kv * row * KV_BLOCK;
    assert(row % 4 == 0);
#pragma omp parallel for if ((size_t)T * H_kv * D > PARALLEL_WORK)
    for (int t = 0; t < T; t++) {
        char *block = (char *)kv + (size_t)(slot[t] / KV_BLOCK) * block_bytes;
        int place = slot[t] % KV_BLOCK;
        for (int h = 0; h < H_kv; h++) {
            const char *key = at(k, type, (size_t)t * stride + (size_t)h * D);
            char *keys = block + h * row * KV_BLOCK + place * 4;
            for (size_t u = 0; u < row; u += 4) memcpy(keys + u * KV_BLOCK, key + u, 4);
            memcpy(block + values + ((size_t)h * KV_BLOCK + place) * row,
                   at(v, type, (size_t)t * stride + (size_t)h * D), row);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Attention
//
// Both attentions are one loop: a tile of up to QT query rows of one head goes over the keys in chunks of 64, with
// the online softmax: a running maximum m, sum l and weighted values acc, rescaled when the maximum grows. Scores are
// products like linear's, of turned keys, and never leave the registers; weights stay f32, and so do values where they
// are weighted. Chunks begin at fixed key positions, so a row adds in the same order whatever else is in the tile.

enum { QT = 64, D_MAX = 256, CHUNK = 64, BLOCKS = CHUNK / KV_BLOCK, KEYS = CHUNK / LANES }; // KEYS: vectors of keys
#if defined(__AVX512F__)
enum { ROWS = 4, MIX = 4 }; // rows of a tile go together, to share each load of keys and of MIX vectors of values
#else
enum { ROWS = 1, MIX = 8 };
#endif
static_assert((int)KV_BLOCK == (int)Q_ROWS, "a block of the cache is as wide as a tile");

// Keys and values that come next, in runs of `bytes`: each row of the tile at work asks for some of their lines, for
// loads alone would wait for each block where few rows share it.
typedef struct Coming {
    const char *runs[2 * BLOCKS];
    size_t bytes, asked, each; // of a run; lines so far, and for each row
    int n;
} Coming;

INLINE void ask_coming(Coming *c, int rows) {
    size_t lines = c->bytes / 64, end = c->asked + rows * c->each;
    for (; c->asked < end && c->asked < c->n * lines; c->asked++)
        __builtin_prefetch(c->runs[c->asked / lines] + c->asked % lines * 64);
}

typedef struct Tile {
    float acc[QT * D_MAX];       // (rows, Dp)
    float values[CHUNK * D_MAX]; // (CHUNK, Dp)
    vf l[QT];                    // in lanes: added up at the end
    float m[QT];
    int lo[QT], hi[QT]; // keys that each row may see
    const char *q[QT];
    const char *keys[BLOCKS]; // of the chunk, turned
    Coming coming;
    int rows, D, Dp; // Dp: D up to whole vectors
    float scale;
} Tile;

static void tile_begin(Tile *t, int rows, int D) {
    t->rows = rows, t->D = D, t->Dp = (D + LANES - 1) / LANES * LANES;
    t->scale = 1.0f / sqrtf((float)D);
    t->coming = (Coming){0};
    for (int r = 0; r < rows; r++) t->m[r] = -INFINITY, t->l[r] = (vf){0};
    memset(t->acc, 0, (size_t)rows * t->Dp * sizeof(float));
}

INLINE void tile_query(Tile *t, int row, const void *q, int lo, int hi) {
    t->lo[row] = lo, t->hi[row] = hi, t->q[row] = q;
}

// The scores of the chunk's keys for `n` rows. In f32, the reference, as four sums over every fourth number: sharp
// attention makes much of a rounding error.
INLINE void tile_scores(const Tile *t, Dtype type, int row, int n, vf scores[ROWS][KEYS]) {
    size_t bytes = t->D * width(type), sums = type == F32 ? 4 : 1;
    for (size_t first = 0; first < 4 * sums; first += 4) {
        vf s[ROWS][KEYS] = {0};
#pragma GCC unroll 4
        for (size_t u = first; u < bytes; u += 4 * sums) {
            vi key[KEYS];
            for (int b = 0; b < KEYS; b++)
                key[b] = load_vector(t->keys[b / PARTS] + u * KV_BLOCK + b % PARTS * sizeof(vi));
            for (int r = 0; r < n; r++)
                for (int b = 0; b < KEYS; b++)
                    s[r][b] = dot_floats(type, s[r][b], key[b], load_four(t->q[row + r] + u));
        }
        for (int r = 0; r < n; r++)
            for (int b = 0; b < KEYS; b++) scores[r][b] = first ? scores[r][b] + s[r][b] : s[r][b];
    }
    for (int r = 0; r < n; r++)
        for (int b = 0; b < KEYS; b++) scores[r][b] *= t->scale;
}

// acc = acc * shrink + p values, `vectors` at a time, for the first `keys` of the chunk: the others' weights are 0.
INLINE void tile_mix(Tile *t, int row, int n, int d, int vectors, const float (*p)[CHUNK], const float *shrink,
                     int keys) {
    vf acc[ROWS][MIX + 1];
    float *to = t->acc + (size_t)row * t->Dp + d;
    for (int r = 0; r < n; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = v_load(to + r * t->Dp + i * LANES) * shrink[r];
    for (int j = 0; j < keys; j++) {
        vf weight[ROWS];
        for (int r = 0; r < n; r++) weight[r] = v_set(p[r][j]);
        for (int i = 0; i < vectors; i++) {
            vf value = v_load(t->values + (size_t)j * t->Dp + d + i * LANES);
            for (int r = 0; r < n; r++) acc[r][i] = v_fma(weight[r], value, acc[r][i]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < vectors; i++) v_store(to + r * t->Dp + i * LANES, acc[r][i]);
}

// A row's scores -> weights p and what its sums shrink by. A masked key has weight exactly 0, so it adds nothing,
// unless the model overflows and its value is not finite.
INLINE float tile_weights(Tile *t, int row, int first, vf s[KEYS], float *p) {
    vf most = v_set(t->m[row]);
    bool whole = t->lo[row] <= first && t->hi[row] >= first + CHUNK;
    for (int b = 0; b < KEYS; b++) {
        vi key = lane_index + (first + b * LANES);
        if (!whole) s[b] = v_select((key >= t->lo[row]) & (key < t->hi[row]), s[b], v_set(-INFINITY));
        most = v_max(most, s[b]);
    }
    float before = t->m[row], m = v_max_lane(most), shrink = 1; // v_exp(0) is exactly 1
    if (m != before) shrink = v_exp(v_set(before - m))[0];
    vf l = t->l[row] * shrink;
    for (int b = 0; b < KEYS; b++) {
        vf weights = v_exp(s[b] - m);
        v_store(p + b * LANES, weights);
        l += weights;
    }
    t->m[row] = m, t->l[row] = l;
    return shrink;
}

// Let `n` rows see the chunk, which begins at position `first` and has `keys` keys.
INLINE void tile_rows(Tile *t, Dtype type, int row, int n, int first, int keys) {
    vf scores[ROWS][KEYS];
    float p[ROWS][CHUNK], shrink[ROWS];
    ask_coming(&t->coming, n);
    tile_scores(t, type, row, n, scores);
    ask_coming(&t->coming, n);
    for (int r = 0; r < n; r++) shrink[r] = tile_weights(t, row + r, first, scores[r], p[r]);
    int d = 0;
    if ((int)MIX == 4 && t->Dp == 5 * LANES) // the vision tower's 80
        tile_mix(t, row, n, 0, 5, p, shrink, keys), d = t->Dp;
    for (; d + MIX * LANES <= t->Dp; d += MIX * LANES) tile_mix(t, row, n, d, MIX, p, shrink, keys);
    for (; d < t->Dp; d += LANES) tile_mix(t, row, n, d, 1, p, shrink, keys);
}

static bool tile_row_sees(const Tile *t, int row, int first) {
    return t->hi[row] > first && t->lo[row] < first + CHUNK;
}

INLINE void tile_chunk(Tile *t, Dtype type, int first, int keys) {
    for (int r = 0; r < t->rows;) {
        int seeing = 0;
        while (seeing < ROWS && r + seeing < t->rows && tile_row_sees(t, r + seeing, first)) seeing++;
        if (seeing == ROWS)
            tile_rows(t, type, r, ROWS, first, keys), r += ROWS;
        else if ((int)ROWS > 2 && seeing >= 2)
            tile_rows(t, type, r, 2, first, keys), r += 2;
        else if (seeing)
            tile_rows(t, type, r, 1, first, keys), r++;
        else
            r++;
    }
}

INLINE void tile_result(const Tile *t, int row, void *out, Dtype type) {
    const float *acc = t->acc + (size_t)row * t->Dp;
    float l = v_sum(t->l[row]);
    int d = 0;
    for (; d + LANES <= t->D; d += LANES) v_put(out, type, d, v_load(acc + d) / l);
    for (; d < t->D; d++) put(out, type, d, acc[d] / l);
}

// `n` rows of D numbers, `stride` apart -> values from row j of the chunk on, as f32.
INLINE void tile_values(Tile *t, int j, const void *v, Dtype type, size_t stride, int n) {
    for (int i = 0; i < n; i++) {
        float *to = t->values + (size_t)(j + i) * t->Dp;
        int d = 0;
        for (; d + LANES <= t->D; d += LANES) v_store(to + d, v_get(v, type, i * stride + d));
        for (; d < t->D; d++) to[d] = get(v, type, i * stride + d);
        for (; d < t->Dp; d++) to[d] = 0;
    }
}

// The chunk from blocks of the cache: n keys. Where keys were never written their scores are masked.
INLINE void tile_load_blocks(Tile *t, const char *kv, size_t block_bytes, const int32_t *blocks, Dtype type, int h,
                             int H_kv, int n) {
    size_t head = (size_t)h * t->D * KV_BLOCK, values = (size_t)H_kv * t->D * KV_BLOCK + head;
    for (int b = 0; b < BLOCKS; b++) {
        int here = n - b * KV_BLOCK < KV_BLOCK ? n - b * KV_BLOCK : KV_BLOCK;
        const char *block = kv + (size_t)blocks[here > 0 ? b : 0] * block_bytes;
        t->keys[b] = at(block, type, head);
        tile_values(t, b * KV_BLOCK, at(block, type, values), type, t->D, here);
    }
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

// Query rows first .. last of sequence b, of the heads that read key head h. They see keys lo .. hi.
typedef struct Item {
    int b, h, first, last, lo, hi;
} Item;

// The first key that a row sees whose own is the one before `end`.
INLINE int first_key(const Paged *a, int end) { return a->window > 0 && end > a->window ? end - a->window : 0; }

// Item i of all: over sequences, then rows, then key heads. Past the last one it sees no keys.
static Item paged_find(const Paged *a, int i) {
    int step = tokens_per_tile(a->H / a->H_kv), tile = i / a->H_kv;
    for (int b = 0; b < a->B; b++) {
        int first = a->cu_seqlens[b] + tile * step, end = a->cu_seqlens[b + 1];
        if (first < end) {
            int last = first + step < end ? first + step : end, before = a->kv_len[b] - end;
            return (Item){b, i % a->H_kv, first, last, first_key(a, before + first + 1), before + last};
        }
        tile -= (end - a->cu_seqlens[b] + step - 1) / step;
    }
    return (Item){0};
}

// What comes next is the chunk of an item's keys from s on. `rows` will ask for it, twice each.
INLINE void paged_coming(Coming *c, const Paged *a, const Item *item, int s, int rows) {
    const int32_t *table = a->block_table + (size_t)item->b * a->table_stride;
    c->bytes = (size_t)a->D * KV_BLOCK * width(a->type), c->n = 0, c->asked = 0;
    for (int k = s; k < item->hi && k < s + CHUNK; k += KV_BLOCK) {
        const char *keys = a->kv + table[k / KV_BLOCK] * a->block_bytes + item->h * c->bytes;
        c->runs[c->n++] = keys;
        c->runs[c->n++] = keys + a->H_kv * c->bytes; // the values
    }
    c->each = c->n * c->bytes / 64 / (2 * rows) + 1;
}

// Query heads h_first .. h_first + heads of an item, and the item that follows.
INLINE void paged_tile(const Paged *a, Dtype type, const Item *item, const Item *next, int h_first, int heads) {
    Tile t;
    tile_begin(&t, (item->last - item->first) * heads, a->D);
    for (int r = 0; r < t.rows; r++) {
        int row = item->first + r / heads, head = h_first + r % heads, end = item->hi - (item->last - row) + 1;
        const void *q = at(a->q, type, (size_t)row * a->stride + (size_t)head * a->D);
        tile_query(&t, r, q, first_key(a, end), end);
    }
    const int32_t *table = a->block_table + (size_t)item->b * a->table_stride;
    for (int s = item->lo / CHUNK * CHUNK; s < item->hi; s += CHUNK) {
        int n = item->hi - s < CHUNK ? item->hi - s : CHUNK;
        if (s + CHUNK < item->hi)
            paged_coming(&t.coming, a, item, s + CHUNK, t.rows);
        else
            paged_coming(&t.coming, a, next, next->lo / CHUNK * CHUNK, t.rows);
        tile_load_blocks(&t, a->kv, a->block_bytes, table + s / KV_BLOCK, type, item->h, a->H_kv, n);
        tile_chunk(&t, type, s, n);
    }
    for (int r = 0; r < t.rows; r++) {
        size_t o = ((size_t)(item->first + r / heads) * a->H + h_first + r % heads) * a->D;
        tile_result(&t, r, (void *)at(a->out, type, o), type);
    }
}

static void paged_item(const Paged *a, const Item *item, const Item *next) {
    int group = a->H / a->H_kv;
    for (int g = 0; g < group; g += QT) {
        int heads = group - g < QT ? group - g : QT, head = item->h * group + g;
        if (a->type == F32)
            paged_tile(a, F32, item, g + QT < group ? item : next, head, heads);
        else
            paged_tile(a, BF16, item, g + QT < group ? item : next, head, heads);
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
#pragma omp parallel for schedule(dynamic) if ((size_t)cu_seqlens[B] * H * D * longest > PARALLEL_WORK)
    for (int i = 0; i < tiles * H_kv; i++) { // a thread's next item is most likely the one after all threads'
        Item item = paged_find(&a, i), next = paged_find(&a, i + omp_get_num_threads());
        paged_item(&a, &item, &next);
    }
}

// LANES vectors become LANES others: lane i of vector j is lane j of vector i. First the 4 x 4 numbers in each quarter
// (of 16 bytes) of four vectors change places, then the quarters: quarter q of a[4 i + k] goes to vector 4 q + k, place
// i.
INLINE void transpose(vi *v) {
    const vi quarter = lane_index & ~3, odd = lane_index & 1, high = (lane_index & 2) >> 1;
    const vi ones = quarter + high + odd * LANES, twos = quarter + odd + high * LANES; // low numbers, low pairs of both
    vi a[LANES];
    for (int i = 0; i < LANES; i += 4) {
        vi x = v_shuffle(v[i], v[i + 1], ones), y = v_shuffle(v[i + 2], v[i + 3], ones);
        a[i] = v_shuffle(x, y, twos), a[i + 1] = v_shuffle(x, y, twos + 2);
        x = v_shuffle(v[i], v[i + 1], ones + 2), y = v_shuffle(v[i + 2], v[i + 3], ones + 2);
        a[i + 2] = v_shuffle(x, y, twos), a[i + 3] = v_shuffle(x, y, twos + 2);
    }
#if defined(__AVX512F__)
    const vi even = (lane_index & 3) + (lane_index & 4) * 2 + (lane_index & 8) / 8 * LANES; // quarters 0 and 2 of both
    for (int k = 0; k < 4; k++) {
        vi x = v_shuffle(a[k], a[4 + k], even), y = v_shuffle(a[8 + k], a[12 + k], even);
        v[k] = v_shuffle(x, y, even), v[8 + k] = v_shuffle(x, y, even + 4);
        x = v_shuffle(a[k], a[4 + k], even + 4), y = v_shuffle(a[8 + k], a[12 + k], even + 4);
        v[4 + k] = v_shuffle(x, y, even), v[12 + k] = v_shuffle(x, y, even + 4);
    }
#elif defined(__AVX2__)
    const vi first = lane_index + (lane_index & 4) / 4 * (LANES - 4); // quarter 0 of both
    for (int k = 0; k < 4; k++)
        v[k] = v_shuffle(a[k], a[4 + k], first), v[4 + k] = v_shuffle(a[k], a[4 + k], first + 4);
#else
    memcpy(v, a, sizeof a);
#endif
}

// 64 bytes of each of 16 rows -> lane r of vector j is number j, of four bytes, of row r.
INLINE void turn_group(char *group, const char *w, size_t row_bytes) {
    for (int r = 0; r < KV_BLOCK; r += LANES)
        for (int j = 0; j < 16; j += LANES) {
            vi v[LANES];
            for (int i = 0; i < LANES; i++) v[i] = load_vector(w + (r + i) * row_bytes + 4 * j);
            transpose(v);
            for (int i = 0; i < LANES; i++) memcpy(group + 64 * (j + i) + 4 * r, &v[i], sizeof v[i]);
        }
}

// `bytes` of each of `rows` rows, turned; filled up with zeros at the edges.
static void turn_rows(char *turned, const char *w, size_t row_bytes, int rows, size_t bytes) {
    for (size_t k = 0; k < bytes; k += 64, w += 64, turned += 64 * KV_BLOCK) {
        if (rows < KV_BLOCK || bytes - k < 64) {
            char part[KV_BLOCK][64] = {0};
            for (int r = 0; r < rows; r++) memcpy(part[r], w + r * row_bytes, bytes - k < 64 ? bytes - k : 64);
            turn_group(turned, part[0], 64);
        } else
            turn_group(turned, w, row_bytes);
    }
}

typedef struct Segments { // the arguments of attention_segments, for the tiles
    void *out;
    Dtype type;
    const void *qkv;
    int first, H, D;
} Segments;

// Rows from .. to of head h, in the segment of rows begin .. end.
INLINE void segment_tile(const Segments *a, Dtype type, int begin, int end, int from, int to, int h) {
    Tile t;
    char made[BLOCKS][D_MAX * 4 * KV_BLOCK] __attribute__((aligned(64)));
    size_t D = a->D, across = (size_t)a->H * D, stride = 3 * across, e = width(type);
    tile_begin(&t, to - from, a->D);
    for (int r = from; r < to; r++) tile_query(&t, r - from, at(a->qkv, type, r * stride + h * D), 0, end - begin);
    for (int s = begin; s < end; s += CHUNK) {
        int n = end - s < CHUNK ? end - s : CHUNK;
        const char *keys = at(a->qkv, type, s * stride + across + h * D);
        for (int b = 0; b < BLOCKS; b++) {
            int here = n - b * KV_BLOCK < KV_BLOCK ? n - b * KV_BLOCK : KV_BLOCK;
            if (here > 0) turn_rows(made[b], keys + b * KV_BLOCK * stride * e, stride * e, here, D * e);
            t.keys[b] = made[here > 0 ? b : 0];
        }
        tile_values(&t, 0, at(a->qkv, type, s * stride + 2 * across + h * D), type, stride, n);
        tile_chunk(&t, type, s - begin, n);
    }
    for (int r = from; r < to; r++)
        tile_result(&t, r - from, (void *)at(a->out, type, (r - a->first) * across + h * D), type);
}

static void cpu_attention_segments(void *out, Dtype type, const void *qkv, const int32_t *cu_seqlens, int segments,
                                   int first, int n, int H, int D) {
    assert(D <= D_MAX);
    Segments a = {out, type, qkv, first, H, D};
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

INLINE vf v_glu(vf gate, vf up) { return gate / (v_exp(-gate) + 1.0f) * up; }

INLINE void glu_row(void *out, const void *gate_up, Dtype type, int F) {
    int f = 0;
    for (; f + LANES <= F; f += LANES) v_put(out, type, f, v_glu(v_get(gate_up, type, f), v_get(gate_up, type, F + f)));
    vf gate = {0}, up = {0};
    for (int i = 0; f + i < F; i++) gate[i] = get(gate_up, type, f + i), up[i] = get(gate_up, type, F + f + i);
    vf y = v_glu(gate, up);
    for (int i = 0; f + i < F; i++) put(out, type, f + i, y[i]);
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

INLINE vf load_or(const float *p, int n, float other) {
    if (n >= LANES) return v_load(p);
    vf v = v_set(other);
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}

// The largest of the numbers; -inf where all are NaN. Rows of logits are long: four vectors at a time, so that none
// waits for the one before.
static float row_max(const float *x, int V) {
    vf m[4];
    for (int k = 0; k < 4; k++) m[k] = v_set(-INFINITY);
    int i = 0;
    for (; i + 4 * LANES <= V; i += 4 * LANES)
        for (int k = 0; k < 4; k++) m[k] = v_max(v_load(x + i + k * LANES), m[k]);
    for (; i < V; i += LANES) m[0] = v_max(load_or(x + i, V - i, -INFINITY), m[0]);
    return v_max_lane(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])));
}

// Most of a row's numbers do not matter to what follows: a run in which none does is passed over by vectors.
enum { RUN = 64 };

INLINE bool run_has(const float *x, float floor) {
    int has = 0;
    for (int i = 0; i < RUN; i++) has |= x[i] >= floor;
    return has;
}

// The first number from x[i] on that is at least `floor`; V: there is none.
static int next_from(const float *x, int i, int V, float floor) {
    for (; i < V; i++) {
        while (i % RUN == 0 && i + RUN <= V && !run_has(x + i, floor)) i += RUN;
        if (i < V && x[i] >= floor) return i;
    }
    return V;
}

INLINE vf v_from(vf v, float floor) { return v_select(v >= floor, v, (vf){0}); }

typedef struct Mass {
    float count, sum; // whole numbers up to 2^24 are exact
} Mass;

// Of the n numbers those that are at least `floor`.
static Mass mass_from(const float *x, int n, float floor) {
    vf sum[4] = {0};
    vi count[4] = {0};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            vf v = v_load(x + i + k * LANES);
            sum[k] += v_from(v, floor), count[k] -= v >= floor;
        }
    for (; i < n; i += LANES) {
        vf v = load_or(x + i, n - i, -1);
        sum[0] += v_from(v, floor), count[0] -= v >= floor;
    }
    vi counts = (count[0] + count[1]) + (count[2] + count[3]);
    return (Mass){v_sum(__builtin_convertvector(counts, vf)), v_sum((sum[0] + sum[1]) + (sum[2] + sum[3]))};
}

INLINE float f32_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// The largest floor in (0, 1] from which on there are as many numbers, and as much in sum, as wanted, found on the
// bits: floats above 0 sort like integers. No order among the candidates is ever made, so a device can do the same with
// sums only. Once few are left between the bounds, only these are looked at.
static float bisect_floor(const float *x, int V, Mass want) {
    enum { FEW = 1024 };
    float few[FEW];
    uint32_t lo = 1, hi = 0x3f800000; // the smallest subnormal; 1.0, the weight of the most likely token
    Mass from = mass_from(x, V, f32_of(lo)), past = {0, 0}, left = {0, 0}; // from lo on; past hi; past all of the few
    while (lo < hi) {
        if (x != few && from.count - past.count <= FEW) {
            int n = 0;
            for (int i = 0; (i = next_from(x, i, V, f32_of(lo))) < V; i++)
                if (x[i] <= f32_of(hi)) few[n++] = x[i];
            x = few, V = n, left = past;
        }
        uint32_t mid = hi - (hi - lo) / 2;
        Mass m = mass_from(x, V, f32_of(mid));
        m.count += left.count, m.sum += left.sum;
        if (m.count >= want.count && m.sum >= want.sum)
            lo = mid, from = m;
        else
            hi = mid - 1, past = m;
    }
    return f32_of(lo);
}

static void drop_below(float *x, int V, float floor) {
    for (int i = 0; i < V; i++)
        if (x[i] < floor) x[i] = 0;
}

// The n largest logits, the first among equals first. Where NaN leaves fewer, others stand in.
static void report_logprobs(Sampled *out, const float *x, int V, float max, float log_sum, int n) {
    int *top = out->top_id, found = 0;
    for (int i = 0; n > 0 && (i = next_from(x, i, V, found < n ? -INFINITY : x[top[n - 1]])) < V; i++) {
        int k = found < n ? found++ : n; // where it belongs; the last one of n makes room
        for (; k > 0 && x[i] > x[top[k - 1]]; k--)
            if (k < n) top[k] = top[k - 1];
        if (k < n) top[k] = i;
    }
    for (int k = 0; k < MAX_LOGPROBS; k++) {
        if (k >= found) top[k] = k >= n ? -1 : k < V ? k : V - 1;
        out->top_logprob[k] = k < n ? x[top[k]] - max - log_sum : 0;
    }
}

static void apply_penalties(float *x, const Sampling *how, const TokenCount *counts, int n) {
    for (int i = 0; i < n; i++) {
        float *l = &x[counts[i].id];
        if (counts[i].seen) *l = *l > 0 ? *l / how->repetition_penalty : *l * how->repetition_penalty;
        *l -= how->frequency_penalty * counts[i].count + (counts[i].count > 0 ? how->presence_penalty : 0);
        *l += counts[i].bias;
    }
}

// Whether a number of a run, the weight of `id` and those that follow it, may score more than `best`: -log u is at
// least 1 - u.
INLINE bool run_may_win(const float *x, const SampleRow *row, int id, float best) {
    if (!run_has(x, f32_of(1))) return false;
    int may = 0;
    for (int i = 0; i < RUN; i++) {
        float u = sample_uniform(row->how.seed, row->step, id + i);
        may |= x[i] * 1.0001f >= (1 - u) * best;
    }
    return may;
}

// Turn logits into weights relative to the most likely token, drop what top-k, top-p and min-p exclude, and draw.
static int draw(float *x, int V, const SampleRow *row, float max) {
    const Sampling *how = &row->how;
    float part[LANES];
    for (int i = 0; i < V; i += LANES) {
        v_store(part, v_exp((load_or(x + i, V - i, -INFINITY) - max) / how->temperature));
        memcpy(x + i, part, (V - i < LANES ? V - i : LANES) * sizeof *x);
    }
    if (how->top_k > 0 && how->top_k < V) drop_below(x, V, bisect_floor(x, V, (Mass){how->top_k, 0}));
    if (how->top_p < 1) drop_below(x, V, bisect_floor(x, V, (Mass){0, how->top_p * mass_from(x, V, 0).sum}));
    drop_below(x, V, how->min_p);
    int best = 0;
    float best_score = -1;
    for (int i = 0; i < V; i++) {
        while (i % RUN == 0 && i + RUN <= V && !run_may_win(x + i, row, i, best_score)) i += RUN;
        if (i == V || !(x[i] > 0)) continue;
        float score = x[i] / -logf(sample_uniform(how->seed, row->step, i));
        if (score > best_score) best = i, best_score = score;
    }
    return best;
}

static void sample_row(Sampled *out, const float *logits, float *work, const SampleRow *row, const TokenCount *counts,
                       int V) {
    float max = row_max(logits, V), most = max;
    vf sum = {0};
    for (int i = 0; i < V; i += LANES) sum += v_exp(load_or(logits + i, V - i, -INFINITY) - max);
    float log_sum = logf(v_sum(sum));
    report_logprobs(out, logits, V, max, log_sum, row->how.logprobs);

    const float *x = logits;
    if (row->n > 0 || row->how.temperature > 0) {
        memcpy(work, logits, (size_t)V * sizeof *work);
        apply_penalties(work, &row->how, counts + row->first, row->n);
        x = work, most = row_max(work, V);
    }
    if (row->how.temperature > 0)
        out->id = draw(work, V, row, most);
    else
        out->id = next_from(x, 0, V - 1, most); // the last one if all are NaN
    out->logprob = logits[out->id] - max - log_sum;
}

static void cpu_sample(Sampled *out, const float *logits, float *work, const SampleRow *rows, const TokenCount *counts,
                       int R, int V) {
#pragma omp parallel for schedule(dynamic) if ((size_t)R * V > PARALLEL_WORK)
    for (int r = 0; r < R; r++) sample_row(out + r, logits + (size_t)r * V, work + (size_t)r * V, rows + r, counts, V);
}

#ifndef DEVICE_CPU
#define DEVICE_CPU device_cpu // built once and alone
#endif

Device DEVICE_CPU = {
    .name = "cpu",
    .unified = true,
    .quantised = true,
    .step_patches = 256,
    .scratch = SCRATCH,
    .reserve = cpu_reserve,
    .reserve_host = cpu_reserve_host,
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
