// cuda_bench: the operations of a device one by one, timed at the shapes of Qwen2.5-VL 3B and 7B, as the rows of a
// Markdown table. Whole stages are timed by `vlm bench`.
//
//   cuda_bench DEVICE BYTES COPY PEAK     BYTES of memory to use: weights cycle through them, past any cache;
//                                         COPY bytes, PEAK operations a second are the limits (cuda_peak prints them)
#include "vlm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const Device *const devices[] = {
    &device_cpu,
#ifdef HAVE_CUDA
    &device_cuda,
#endif
};
static const Device *dev;
static char *pool, *weights; // activations; then weights
static size_t weight_room, weight_at;
static double copy_rate, peak_rate;

enum { ACTIVATIONS = 1 << 30, CHUNK = 1 << 24 };

typedef struct Shape {
    const char *name;
    int hidden, ff, heads, kv_heads, vocab, layers;
} Shape;
static const Shape shapes[] = {{"3B", 2048, 11008, 16, 2, 151936, 36}, {"7B", 3584, 18944, 28, 4, 152064, 28}};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void finish(void) {
    int32_t word;
    dev->download(&word, pool, sizeof word);
}

// Seconds of one call: enough calls for a fifth of a second, after two that do not count.
static double seconds(void (*run)(const void *), const void *arg) {
    run(arg), run(arg), finish();
    for (int n = 1;; n *= 2) {
        double start = now();
        for (int i = 0; i < n; i++) run(arg);
        finish();
        double t = now() - start;
        if (t > 0.2) return t / n;
    }
}

static void row(const char *what, const char *shape, double t, double bytes, double flops) {
    printf("| %-34s | %-4s | %10.1f | %8.0f | %5.1f%% | %7.1f | %5.1f%% |\n", what, shape, t * 1e6, bytes / t / 1e9,
           100 * bytes / t / copy_rate, flops / t / 1e12, 100 * flops / t / peak_rate);
    fflush(stdout);
}

// The next `bytes` of weights: not those of the last call, which a cache may still hold.
static void *next_weights(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (weight_at + bytes > weight_room) weight_at = 0;
    void *w = weights + weight_at;
    weight_at += bytes;
    return w;
}

// ---------------------------------------------------------------------------------------------
// What is timed

static const int32_t *copy_index;
static void run_copy(const void *n) {
    dev->gather_rows(weights, weights + weight_room / 2, copy_index, *(const int *)n, CHUNK);
}

// The shortest operation: what a launch costs when many follow each other.
static void run_least(const void *n) { dev->gather_rows(weights, weights + CHUNK, copy_index, *(const int *)n, 16); }

typedef struct Product {
    int T, N, K;
    bool accumulate;
} Product;

static void run_product(const void *arg) {
    const Product *p = arg;
    void *x = pool + 4096, *out = pool + ACTIVATIONS / 2;
    dev->linear(out, p->accumulate ? F32 : BF16, x, next_weights((size_t)p->N * p->K * 2), BF16, NULL, p->T, p->N, p->K,
                p->accumulate);
}

static double product_bytes(const Product *p) { return 2.0 * ((double)p->N * p->K + (double)p->T * (p->N + p->K)); }
static double product_flops(const Product *p) { return 2.0 * p->T * p->N * p->K; }

typedef struct Attend {
    Shape s;
    int B, queries, keys;
    const int32_t *table, *cu, *len;
} Attend;

static void run_attend(const void *arg) {
    const Attend *a = arg;
    size_t block = (size_t)2 * KV_BLOCK * a->s.kv_heads * 128 * 2;
    dev->attention_paged(pool + ACTIVATIONS / 2, BF16, pool + 4096, (a->s.heads + 2 * a->s.kv_heads) * 128, weights,
                         block, a->table, (a->keys + KV_BLOCK - 1) / KV_BLOCK, a->cu, a->len, a->B, a->s.heads,
                         a->s.kv_heads, 128, 0);
}

static const int32_t *segments;
static void run_segments(const void *P) {
    dev->attention_segments(pool + ACTIVATIONS / 2, BF16, weights, segments, 1, 0, *(const int *)P, 16, 80);
}

static void *ints(size_t *at, const int32_t *v, size_t n) {
    void *p = pool + ACTIVATIONS / 4 * 3 + *at;
    dev->upload(p, v, n * sizeof *v);
    *at += (n * sizeof *v + 255) / 256 * 256;
    return p;
}

static void time_products(const Shape *s) {
    int C = s->hidden, F = s->ff, qkv = (s->heads + 2 * s->kv_heads) * 128;
    const int T[] = {1, 8, 32, 512, 2048};
    for (size_t i = 0; i < sizeof T / sizeof *T; i++) {
        Product p[] = {
            {T[i], qkv, C, false}, {T[i], C, s->heads * 128, true}, {T[i], 2 * F, C, false}, {T[i], C, F, true}};
        const char *names[] = {"qkv", "out", "gate, up", "down"};
        for (int k = 0; k < 4; k++) {
            char what[64];
            snprintf(what, sizeof what, "linear %s, T=%d", names[k], T[i]);
            row(what, s->name, seconds(run_product, &p[k]), product_bytes(&p[k]), product_flops(&p[k]));
        }
    }
    Product head = {1, s->vocab, C, false};
    row("linear head, T=1", s->name, seconds(run_product, &head), product_bytes(&head), product_flops(&head));
}

static void time_attention(const Shape *s) {
    const int cases[][3] = {{1, 1, 4096}, {16, 1, 4096}, {1, 512, 4096}, {1, 2048, 2048}}; // B, queries, keys
    for (int i = 0; i < 4; i++) {
        int B = cases[i][0], queries = cases[i][1], keys = cases[i][2], stride = keys / KV_BLOCK;
        size_t at = 0;
        int32_t *table = malloc((size_t)B * stride * 4), cu[17] = {0}, len[16];
        for (int b = 0; b < B * stride; b++) table[b] = (int32_t)((b * 7919LL) % (B * stride));
        for (int b = 0; b < B; b++) cu[b + 1] = cu[b] + queries, len[b] = keys;
        Attend a = {
            *s, B, queries, keys, ints(&at, table, (size_t)B * stride), ints(&at, cu, B + 1), ints(&at, len, B)};
        double bytes = (double)B * keys * s->kv_heads * 128 * 4;
        double seen = queries == 1 ? keys : keys - queries / 2.0, flops = 4.0 * B * queries * seen * s->heads * 128;
        char what[64];
        snprintf(what, sizeof what, "attention_paged B=%d T=%d S=%d", B, queries, keys);
        row(what, s->name, seconds(run_attend, &a), bytes, flops);
        free(table);
    }
}

static void time_vision(void) {
    size_t at = 0;
    int P = 4096, whole[2] = {0, P};
    segments = ints(&at, whole, 2);
    Product p[] = {{P, 3840, 1280, false}, {P, 1280, 1280, true}, {P, 6840, 1280, false}, {P, 1280, 3420, true}};
    const char *names[] = {"vision qkv", "vision proj", "vision gate, up", "vision down (K = 3420)"};
    for (int k = 0; k < 4; k++)
        row(names[k], "both", seconds(run_product, &p[k]), product_bytes(&p[k]), product_flops(&p[k]));
    row("attention_segments P=4096", "both", seconds(run_segments, &P), 2.0 * P * 5120, 4.0 * P * P * 1280);
}

int main(int argc, char **argv) {
    for (size_t i = 0; argc > 1 && i < sizeof devices / sizeof *devices; i++)
        if (!strcmp(argv[1], devices[i]->name)) dev = devices[i];
    if (!dev || argc != 5) return fprintf(stderr, "usage: cuda_bench DEVICE BYTES COPY PEAK\n"), 2;
    Error err;
    if (dev->start && !dev->start(&err)) return fprintf(stderr, "vlm: %s\n", err.message), 1;
    copy_rate = atof(argv[3]), peak_rate = atof(argv[4]);
    weight_room = strtoull(argv[2], NULL, 0) / CHUNK / 2 * 2 * CHUNK;
    pool = dev->reserve(ACTIVATIONS + weight_room + dev->scratch);
    void *staging = dev->staging ? dev->reserve_host(dev->staging) : NULL;
    if (!pool || (dev->staging && !staging) || weight_room < (size_t)2 << 30)
        return fprintf(stderr, "no memory: give at least 2 GB\n"), 1;
    weights = pool + ACTIVATIONS;
    uint16_t *noise = malloc(CHUNK); // bf16 numbers of either sign about 1/8: the speed of a GPU depends on them
    for (int i = 0; i < CHUNK / 2; i++) noise[i] = (uint16_t)(0x3d80 + rand() % 256 + rand() % 2 * 0x8000);
    for (size_t at = 0; at < ACTIVATIONS + weight_room; at += CHUNK) dev->upload(pool + at, noise, CHUNK);

    size_t at = 0;
    unsigned n = (unsigned)(weight_room / 2 / CHUNK);
    int32_t *index = malloc((size_t)n * sizeof *index);
    for (unsigned i = 0; i < n; i++) index[i] = (int32_t)i;
    copy_index = ints(&at, index, n);
    printf("| operation                          | size |         us |     GB/s | of copy | TFLOP/s | of peak |\n"
           "|---|---|---|---|---|---|---|\n");
    unsigned one = 1;
    row("gather_rows, large", "", seconds(run_copy, &n), 2.0 * n * CHUNK, 0);
    row("gather_rows of 16 bytes: a launch", "", seconds(run_least, &one), 32, 0);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) time_products(&shapes[i]), time_attention(&shapes[i]);
    time_vision();
    dev->release(pool, ACTIVATIONS + weight_room + dev->scratch);
    if (staging) dev->release_host(staging, dev->staging);
    free(noise), free(index);
    return 0;
}
