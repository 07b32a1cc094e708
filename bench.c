// bench.c: how fast it is, and why. Stages (pictures, prompts, sequences that write together) go through the true
// engine and are held against what the machine can do and against what the null device counts that they must do. Loads
// are a closed loop of clients, each with one request at a time; with a published shape on the null device their clock
// is a roofline's.
#include "vlm.h"
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

// ---------------------------------------------------------------------------------------------
// A device that watches another: the same table, with a stop watch and the null device's count around each operation.
// Over the null device it says what a stage must move and compute, over another one where the time goes.

typedef enum Number { AS_F32, AS_BF16, AS_INT8, N_NUMBERS } Number; // what a product is computed in

typedef struct Op {
    char name[32]; // "linear 9728x896": outputs, inputs
    Number number;
    double calls, seconds, bytes, flops;
} Op;

enum { MAX_OPS = 40 };

typedef struct Ops {
    Op list[MAX_OPS];
    int n;
} Ops;

static struct {
    const Device *inner;
    void *base; // of the device's memory
    double start, bytes, flops, sign;
    Ops ops;
} watch = {.sign = 1};

static double seconds_now(const Device *d) {
    if (d->clock) return d->clock();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Wait for what the device was told to do. Only those with a memory of their own lag behind.
static void watch_wait(void) {
    int32_t word;
    if (!watch.inner->unified) watch.inner->download(&word, watch.base, sizeof word);
}

static void watch_begin(void) {
    null_work(&watch.bytes, &watch.flops);
    watch.start = seconds_now(watch.inner);
}

// The entry of a name, made where there is none.
static Op *op_find(Ops *ops, const char *name) {
    int i = 0;
    while (i < ops->n && strcmp(ops->list[i].name, name)) i++;
    assert(i < MAX_OPS);
    if (i == ops->n) snprintf(ops->list[ops->n++].name, sizeof ops->list->name, "%s", name);
    return &ops->list[i];
}

static void watch_end(const char *name, Dtype type) {
    watch_wait();
    double now = seconds_now(watch.inner), bytes, flops;
    null_work(&bytes, &flops);
    Op *op = op_find(&watch.ops, name);
    op->number = type == F32 ? AS_F32 : type == BF16 ? AS_BF16 : AS_INT8;
    op->calls += watch.sign, op->seconds += watch.sign * (now - watch.start);
    op->bytes += watch.sign * (bytes - watch.bytes), op->flops += watch.sign * (flops - watch.flops);
}

static void *watch_reserve(size_t bytes) { return watch.base = watch.inner->reserve(bytes); }

static void watch_upload(void *dst, const void *src, size_t bytes) {
    watch_begin();
    watch.inner->upload(dst, src, bytes);
    watch_end("upload", F32);
}

static void watch_download(void *dst, const void *src, size_t bytes) {
    watch_begin();
    watch.inner->download(dst, src, bytes);
    watch_end("download", F32);
}

static void watch_embed(float *out, const void *table, Dtype type, const int32_t *ids, int T, int C) {
    watch_begin();
    watch.inner->embed(out, table, type, ids, T, C);
    watch_end("embed", type);
}

static void watch_gather_rows(void *dst, const void *src, const int32_t *index, int n, size_t row_bytes) {
    watch_begin();
    watch.inner->gather_rows(dst, src, index, n, row_bytes);
    watch_end("gather_rows", F32);
}

static void watch_rmsnorm(void *out, Dtype type, const float *x, const float *weight, float eps, int T, int C) {
    watch_begin();
    watch.inner->rmsnorm(out, type, x, weight, eps, T, C);
    watch_end("rmsnorm", type);
}

static void watch_linear(void *out, Dtype out_type, const void *x, const void *w, Dtype type, const float *bias, int T,
                         int N, int K, bool accumulate) {
    char name[sizeof((Op *)0)->name];
    snprintf(name, sizeof name, "linear %dx%d", N, K);
    watch_begin();
    watch.inner->linear(out, out_type, x, w, type, bias, T, N, K, accumulate);
    watch_end(name, type);
}

static void watch_rope_table(float *cos, float *sin, const int32_t *positions, int axes, const int32_t *axis,
                             const float *freq, int T, int half) {
    watch_begin();
    watch.inner->rope_table(cos, sin, positions, axes, axis, freq, T, half);
    watch_end("rope_table", F32);
}

static void watch_rope(void *x, Dtype type, int stride, const float *cos, const float *sin, int T, int heads, int D) {
    watch_begin();
    watch.inner->rope(x, type, stride, cos, sin, T, heads, D);
    watch_end("rope", type);
}

static void watch_kv_store(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v, int stride,
                           const int32_t *slot, int T, int H_kv, int D) {
    watch_begin();
    watch.inner->kv_store(kv, block_bytes, type, k, v, stride, slot, T, H_kv, D);
    watch_end("kv_store", type);
}

static void watch_attention_paged(void *out, Dtype type, const void *q, int stride, const void *kv, size_t block_bytes,
                                  const int32_t *block_table, int table_stride, const int32_t *cu_seqlens,
                                  const int32_t *kv_len, int B, int H, int H_kv, int D, int window) {
    watch_begin();
    watch.inner->attention_paged(out, type, q, stride, kv, block_bytes, block_table, table_stride, cu_seqlens, kv_len,
                                 B, H, H_kv, D, window);
    watch_end("attention_paged", type);
}

static void watch_attention_segments(void *out, Dtype type, const void *qkv, const int32_t *cu_seqlens, int segments,
                                     int first, int n, int H, int D) {
    watch_begin();
    watch.inner->attention_segments(out, type, qkv, cu_seqlens, segments, first, n, H, D);
    watch_end(segments > 1 ? "attention_segments windows" : "attention_segments whole", type);
}

static void watch_glu(void *out, const void *gate_up, Dtype type, int T, int F) {
    watch_begin();
    watch.inner->glu(out, gate_up, type, T, F);
    watch_end("glu", type);
}

static void watch_gelu(void *x, Dtype type, size_t n) {
    watch_begin();
    watch.inner->gelu(x, type, n);
    watch_end("gelu", type);
}

static void watch_sample(Sampled *out, const float *logits, float *work, const SampleRow *rows,
                         const TokenCount *counts, int R, int V) {
    watch_begin();
    watch.inner->sample(out, logits, work, rows, counts, R, V);
    watch_end("sample", F32);
}

// `inner`, watched; only where its memory is unless all operations are.
static Device watch_device(const Device *inner, bool operations) {
    Device d = *inner;
    watch.inner = inner;
    d.reserve = watch_reserve;
    if (!operations) return d;
    d.upload = watch_upload, d.download = watch_download;
    d.embed = watch_embed, d.gather_rows = watch_gather_rows, d.rmsnorm = watch_rmsnorm, d.linear = watch_linear;
    d.rope_table = watch_rope_table, d.rope = watch_rope, d.kv_store = watch_kv_store;
    d.attention_paged = watch_attention_paged, d.attention_segments = watch_attention_segments;
    d.glu = watch_glu, d.gelu = watch_gelu, d.sample = watch_sample;
    return d;
}

// ---------------------------------------------------------------------------------------------
// What the machine can do: the limits that every figure is held against. Measured with as many threads as the engine
// uses, in the instructions that its kernels could use, each with nothing else to do. The best of some tries: a limit.

typedef struct Limits {
    double read;            // bytes a second from memory; 0: not known
    double peak[N_NUMBERS]; // operations a second, two for a multiply-add; 0: not known
    double round_trip;      // seconds for a line of memory from one thread to another and back; 0: not known
} Limits;

// A thread's share of `bytes`, read once.
static uint64_t read_through(const char *buffer, size_t bytes) {
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    u64x8 sum[8] = {0};
    for (const u64x8 *p = (const u64x8 *)buffer, *end = p + bytes / sizeof *p; p + 8 <= end; p += 8)
        for (int i = 0; i < 8; i++) sum[i] += p[i];
    u64x8 all = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    return all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
}

// Far more memory than caches hold, in large pages where there are such, so that page tables cost nothing.
static double measure_read(void) {
    size_t bytes = (size_t)1 << 29;
    char *buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) return 0;
#ifdef MADV_HUGEPAGE
    madvise(buffer, bytes, MADV_HUGEPAGE);
#endif
    double best = 0;
    volatile uint64_t sink = 0;
    for (int again = 0; again < 6; again++) { // the first only makes the pages
        double start = seconds_now(&device_cpu);
#pragma omp parallel
        {
            size_t part = bytes / omp_get_num_threads() / 4096 * 4096;
            char *mine = buffer + part * omp_get_thread_num();
            if (!again) memset(mine, 1, part);
            sink += read_through(mine, part);
        }
        double rate = bytes / (seconds_now(&device_cpu) - start);
        if (again && rate > best) best = rate;
    }
    munmap(buffer, bytes);
    return best;
}

// A line that two threads write in turns: how far apart their cores are. Each operation's threads meet this way, and
// cores that are far apart may have a link to memory each. Not known where the two share a core: they stop waiting.
static double measure_round_trip(void) {
    enum { TRIPS = 1000, PATIENCE = 1 << 20 };
    static _Alignas(128) atomic_int line;
    double best = INFINITY;
    if (omp_get_max_threads() < 2) return 0;
    for (int again = 0; again < 5; again++) {
        double start = seconds_now(&device_cpu);
        atomic_store(&line, 0);
#pragma omp parallel num_threads(2)
        for (int turn = omp_get_thread_num(); turn < 2 * TRIPS; turn += 2) {
            int left = PATIENCE;
            while (atomic_load(&line) != turn && left) left--;
            if (!left) break;
            atomic_store(&line, turn + 1);
        }
        if (atomic_load(&line) == 2 * TRIPS) best = fmin(best, (seconds_now(&device_cpu) - start) / TRIPS);
    }
    return best < INFINITY ? best : 0;
}

// Twelve chains of one instruction, each waiting for itself only: enough to fill the units of any core so far. Whole
// registers by name, because compilers would share the chains, and because what the machine has is known when it runs.
typedef enum Chain { PLAIN, AVX2_F32, AVX2_INT8, AVX512_F32, AVX512_BF16, AVX512_INT8 } Chain;
enum { CHAINS = 12, LINKS = 1 << 20 };

static void run_chains(Chain chain) {
#if defined(__x86_64__)
#define CHAINS_OF(step)                                                                                                \
    __asm__ volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n" step "\n.endr" ::                                            \
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
                           "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
    if (chain != PLAIN) CHAINS_OF("vpxor %%ymm\\r,%%ymm\\r,%%ymm\\r\n vpxor %%ymm15,%%ymm15,%%ymm15");
    for (int n = 0; n < LINKS; n++) switch (chain) {
        case PLAIN: break;
        case AVX2_F32: CHAINS_OF("vfmadd231ps %%ymm15,%%ymm15,%%ymm\\r"); break;
        case AVX2_INT8: // no dot product of bytes: pairs to 16 bits, pairs of those to 32, and the sum
            CHAINS_OF("vpmaddubsw %%ymm15,%%ymm15,%%ymm12\n vpmaddwd %%ymm15,%%ymm12,%%ymm12\n"
                      "vpaddd %%ymm12,%%ymm\\r,%%ymm\\r");
            break;
        case AVX512_F32: CHAINS_OF("vfmadd231ps %%zmm15,%%zmm15,%%zmm\\r"); break;
        case AVX512_BF16: CHAINS_OF("vdpbf16ps %%zmm15,%%zmm15,%%zmm\\r"); break;
        case AVX512_INT8: CHAINS_OF("vpdpbusd %%zmm15,%%zmm15,%%zmm\\r"); break;
        }
#undef CHAINS_OF
#endif
    if (chain != PLAIN) return;
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x4 sum[CHAINS], x = {0};
    for (int i = 0; i < CHAINS; i++) sum[i] = x + (float)i;
    for (int n = 0; n < LINKS; n++) {
        __asm__ volatile("" : "+m"(x)); // may have changed
        for (int i = 0; i < CHAINS; i++)
            for (int k = 0; k < 4; k++) sum[i][k] = fmaf(x[k], x[k], sum[i][k]);
    }
    __asm__ volatile("" : : "m"(sum)); // is looked at
}

// Operations a second of all threads together, `each` a link.
static double measure_chains(Chain chain, int each) {
    double best = 0;
    for (int again = 0; again < 5; again++) {
        double start = seconds_now(&device_cpu);
        int threads = 0;
#pragma omp parallel reduction(+ : threads)
        run_chains(chain), threads++;
        double seconds = seconds_now(&device_cpu) - start;
        best = fmax(best, (double)each * CHAINS * LINKS * threads / seconds);
    }
    return best;
}

// What has no instruction of its own is computed in f32.
static Limits measure_limits(void) {
    Limits l = {.read = measure_read(), .round_trip = measure_round_trip()};
    double *p = l.peak;
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f");
    if (avx2) p[AS_F32] = measure_chains(AVX2_F32, 2 * 8), p[AS_INT8] = measure_chains(AVX2_INT8, 2 * 32);
    if (avx512) p[AS_F32] = measure_chains(AVX512_F32, 2 * 16);
    if (__builtin_cpu_supports("avx512bf16")) p[AS_BF16] = measure_chains(AVX512_BF16, 2 * 32);
    if (__builtin_cpu_supports("avx512vnni")) p[AS_INT8] = measure_chains(AVX512_INT8, 2 * 64);
#endif
    if (!p[AS_F32]) p[AS_F32] = measure_chains(PLAIN, 2 * 4);
    for (int i = 0; i < N_NUMBERS; i++) p[i] = fmax(p[i], p[AS_F32]);
    return l;
}

// ---------------------------------------------------------------------------------------------
// What requests are made of

// A picture of the size that one of width x height is resized to. Only a device that computes needs pixels: noise.
static bool picture_make(const ImageConfig *config, const Device *device, int width, int height, int number, Image *out,
                         Error *err) {
    *out = (Image){.source_width = width, .source_height = height};
    if (!image_fit(config, height, width, &out->height, &out->width, err)) return false;
    memcpy(out->key, &number, sizeof number);
    if (device == &device_null) return true;
    size_t n = (size_t)out->width * out->height * 3;
    out->pixels = malloc(n);
    if (!out->pixels) return fail(err, 500, "out of memory for a picture of %zu bytes", n);
    for (size_t i = 0; i < n; i++) out->pixels[i] = (uint8_t)(sample_uniform(1, (uint64_t)number, (uint32_t)i) * 256);
    return true;
}

// New ids that are no placeholder.
static void ids_push_random(Ids *ids, const Config *config, int number, int n) {
    for (int i = 0; i < n; i++) {
        int32_t id = (int32_t)(sample_uniform(2, (uint64_t)number, (uint32_t)i) * config->text.vocab);
        ids_push(ids, id == config->image_token ? id - 1 : id);
    }
}

// ---------------------------------------------------------------------------------------------
// Stages, run through the engine with true requests

enum { MAX_STAGES = 32, MAX_REPEAT = 100, WARM_TOKENS = 64, DECODE_PROMPT = 64, DECODE_STEPS = 32, WARM_SIDE = 112 };
typedef enum Kind { VISION, PREFILL, DECODE } Kind;
static const char *const kinds[] = {"vision", "prefill", "decode"};

typedef struct Stage {
    Kind kind;
    int size;   // pixels a side, tokens, sequences
    int tokens; // of a repetition
    int n;      // repetitions done
    double seconds[MAX_REPEAT];
    Ops ops;        // of all of them: time if they were watched, counts from the null device
    double patches; // seconds of laying out a picture's patches, part of a repetition
    double read;    // the limit of reading, from before and after it; 0: the one of all stages
    Error err;      // why it could not run
} Stage;

// One run of all stages on a device.
typedef struct Pass {
    const Model *model;
    const Device *device; // as the engine sees it
    const Device *inner;  // the one that computes
    EngineOptions options;
    int repeat;
    bool measure; // the limits beside the stages
    Stage *stages;
    int n_stages;
    Engine *engine;
    int n_requests;
} Pass;

static bool stages_parse(const char *list, Stage *stages, int *n, Error *err) {
    char copy[512];
    if (strlen(list) >= sizeof copy) return fail(err, 400, "--stages is over %zu characters long", sizeof copy - 1);
    strcpy(copy, list);
    *n = 0;
    for (char *save, *part = strtok_r(copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        static const int least[] = {WARM_SIDE, 1, 1}, most[] = {8192, 1 << 20, 4096};
        Stage s = {.kind = VISION};
        int used = 0;
        bool ok = false;
        for (; !ok && s.kind <= DECODE; s.kind += !ok) {
            size_t k = strlen(kinds[s.kind]);
            ok = !strncmp(part, kinds[s.kind], k) && sscanf(part + k, "=%d%n", &s.size, &used) == 1 && !part[k + used];
        }
        if (!ok) return fail(err, 400, "--stages: '%s' is not vision=PIXELS, prefill=TOKENS or decode=SEQUENCES", part);
        if (s.size < least[s.kind] || s.size > most[s.kind])
            return fail(err, 400, "--stages: %s=%d is out of range: from %d to %d", kinds[s.kind], s.size,
                        least[s.kind], most[s.kind]);
        if (*n == MAX_STAGES) return fail(err, 400, "--stages: more than %d", MAX_STAGES);
        stages[(*n)++] = s;
    }
    return *n > 0 || fail(err, 400, "--stages names none");
}

// The pass's next request: a picture (or none), then `tokens` new ids. Each has a salt of its own: no cache knows it.
static Sequence *pass_submit(Pass *p, const Image *image, int tokens, int max_tokens, Error *err) {
    Request r = {.max_tokens = max_tokens, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    Ids ids = {0};
    for (int i = 0; image && i < image_tokens(image, &p->model->config.image); i++)
        ids_push(&ids, p->model->config.image_token);
    ids_push_random(&ids, &p->model->config, ++p->n_requests, tokens);
    memcpy(r.salt, &p->n_requests, sizeof p->n_requests);
    if (image) r.images = &image, r.n_images = 1;
    r.ids = ids.data, r.n = (int)ids.n;
    Sequence *q = engine_submit(p->engine, &r, err);
    free(ids.data);
    return q;
}

static double pass_now(void) {
    watch_wait();
    return seconds_now(watch.inner);
}

// A picture through the tower. The step that ends it also begins with the prompt, which `max_batch_tokens` keeps to
// two tokens; the next step does only that much, so what it takes is taken off.
static bool vision_once(Pass *p, Stage *s, const Image *image, double *seconds) {
    Sequence *q = pass_submit(p, image, 1, 1, &s->err);
    if (!q) return false;
    double start = pass_now();
    while (q->vision_seconds == 0) engine_step(p->engine);
    double ready = pass_now();
    watch.sign = -1;
    engine_step(p->engine);
    watch.sign = 1;
    *seconds = (ready - start) - (pass_now() - ready);
    engine_release(p->engine, q);
    return true;
}

// Seconds of laying out a picture's patches, which the engine does in the same chunks. The best of three.
static double patches_seconds(const Pass *p, const Image *image) {
    const ImageConfig *c = &p->model->config.image;
    Dtype type = p->model->config.type;
    int P = image_patches(image, c), chunk = P < 1024 ? P : 1024;
    size_t bytes = (size_t)chunk * 3 * c->temporal * c->patch * c->patch * dtype_bytes(type);
    void *out = calloc(1, bytes);
    double best = INFINITY;
    for (int again = 0; out && again < 3; again++) {
        double start = seconds_now(p->inner);
        for (int i = 0; i + chunk <= P; i += chunk) image_fill_patches(image, c, NULL, chunk, type, out);
        best = fmin(best, (seconds_now(p->inner) - start) * P / (P / chunk * chunk));
    }
    free(out);
    return out ? best : 0;
}

static bool vision_run(Pass *p, Stage *s) {
    const ImageConfig *c = engine_image_config(p->engine);
    Image image;
    if ((int64_t)s->size * s->size > c->max_pixels)
        return fail(&s->err, 413, "pictures are made smaller here, to %" PRId64 " pixels: see --max-pixels and --ctx",
                    c->max_pixels);
    if (!picture_make(c, p->inner, s->size, s->size, 0, &image, &s->err)) return false;
    s->tokens = image_tokens(&image, c);
    for (bool ok = true; ok && s->n < p->repeat; s->n += ok) ok = vision_once(p, s, &image, &s->seconds[s->n]);
    if (image.pixels) s->patches = patches_seconds(p, &image);
    image_free(&image);
    return s->n == p->repeat;
}

// A prompt until its first token.
static bool prefill_run(Pass *p, Stage *s) {
    for (s->tokens = s->size; s->n < p->repeat; s->n++) {
        Sequence *q = pass_submit(p, NULL, s->size, 1, &s->err);
        if (!q) return false;
        double start = pass_now();
        while (!q->finish) engine_step(p->engine);
        s->seconds[s->n] = pass_now() - start;
        engine_release(p->engine, q);
    }
    return true;
}

// Tokens that `n` sequences have written; -1: one of them waits or has ended.
static int64_t decode_written(Sequence **q, int n) {
    int64_t written = 0;
    for (int i = 0; i < n; i++) {
        int own = q[i]->n_tokens - q[i]->n_prompt;
        if (!own || q[i]->finish) return -1;
        written += own;
    }
    return written;
}

// Sequences that all write a token in each step. They go on from one repetition to the next.
static bool decode_repeat(Pass *p, Stage *s, Sequence **q) {
    MemoryMap m;
    for (int i = 0; i < s->size; i++)
        if (!(q[i] = pass_submit(p, NULL, DECODE_PROMPT, 0, &s->err))) return false;
    for (int i = 0; decode_written(q, s->size) < 0 && i < 2 * s->size + DECODE_PROMPT; i++) engine_step(p->engine);
    // What a virtual machine lets one read may double or halve within minutes, and decoding is held against just that.
    double before_all = p->measure ? measure_read() : 0;
    for (watch.ops = (Ops){0}, s->tokens = s->size * DECODE_STEPS; s->n < p->repeat; s->n++) {
        int64_t before = decode_written(q, s->size);
        double start = pass_now();
        for (int i = 0; before >= 0 && i < DECODE_STEPS; i++) engine_step(p->engine);
        s->seconds[s->n] = pass_now() - start;
        engine_map(p->engine, &m);
        if (before < 0 || decode_written(q, s->size) != before + s->tokens)
            return fail(&s->err, 413, "%d sequences of %d tokens do not run together in %d blocks: see --kv-blocks",
                        s->size, DECODE_PROMPT + DECODE_STEPS * p->repeat, m.blocks);
    }
    double after_all = before_all > 0 ? measure_read() : 0;
    s->read = after_all > 0 ? (before_all + after_all) / 2 : 0;
    return true;
}

static bool decode_run(Pass *p, Stage *s) {
    const EngineOptions *o = engine_options(p->engine);
    int longest = DECODE_PROMPT + DECODE_STEPS * p->repeat + 2 * s->size;
    if (s->size > o->max_seqs) return fail(&s->err, 413, "--max-seqs lets %d sequences run together", o->max_seqs);
    if (longest > o->ctx)
        return fail(&s->err, 413, "needs a context of %d tokens, there are %d: lower --repeat", longest, o->ctx);
    Sequence **q = calloc((size_t)s->size, sizeof(Sequence *));
    bool ok = q ? decode_repeat(p, s, q) : fail(&s->err, 500, "out of memory for %d sequences", s->size);
    for (int i = 0; q && i < s->size; i++) engine_release(p->engine, q[i]);
    free(q);
    return ok;
}

// Touch the weights and the engine's memory: pages come when they are first used.
static void pass_warm(Pass *p, bool vision) {
    Stage warm = {.size = vision ? WARM_SIDE : WARM_TOKENS};
    Pass once = *p;
    once.repeat = 1;
    if (vision)
        vision_run(&once, &warm);
    else
        prefill_run(&once, &warm);
    p->n_requests = once.n_requests; // what cannot run here says so later
}

// The stages of pictures, or those of text, in an engine that suits them.
static bool pass_half(Pass *p, bool vision, Error *err) {
    EngineOptions o = p->options;
    bool any = false;
    int together = 1;
    for (int i = 0; i < p->n_stages; i++) {
        const Stage *s = &p->stages[i];
        any |= (s->kind == VISION) == vision;
        if (s->kind == DECODE && s->size > together) together = s->size;
    }
    if (!any) return true;
    if (vision)
        o.max_seqs = 1, o.max_batch_tokens = 2;
    else if (!o.max_seqs)
        o.max_seqs = together;
    p->engine = engine_open(p->model, p->device, &o, err);
    if (!p->engine) return false;
    pass_warm(p, vision);
    for (int i = 0; i < p->n_stages; i++) {
        Stage *s = &p->stages[i];
        if ((s->kind == VISION) != vision) continue;
        watch.ops = (Ops){0};
        (s->kind == VISION ? vision_run : s->kind == PREFILL ? prefill_run : decode_run)(p, s);
        s->ops = watch.ops;
    }
    engine_close(p->engine);
    return true;
}

// ---------------------------------------------------------------------------------------------
// What came of it

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Counts from the null device's run; with `profile` what was watched, and what is left: the engine's own work.
static void stage_count(Stage *s, const Stage *counted, bool profile) {
    Ops timed = s->ops, ops = {0};
    double rest = 0;
    for (int i = 0; i < s->n; i++) rest += s->seconds[i];
    for (int i = 0; i < counted->ops.n; i++) {
        const Op *c = &counted->ops.list[i];
        if (c->calls < 0.5) continue; // a text step's, taken off again
        Op *op = op_find(&ops, c->name);
        *op = *c;
        op->seconds = profile ? op_find(&timed, c->name)->seconds : 0;
        rest -= op->seconds;
    }
    if (profile && s->patches > 0) op_find(&ops, "patches")->seconds = s->patches * s->n;
    if (profile) op_find(&ops, "engine")->seconds = fmax(0, rest - s->patches * s->n); // patches were timed apart
    s->ops = ops;
}

static json_t *ops_json(const Stage *s) {
    json_t *list = json_array();
    for (int i = 0; i < s->ops.n; i++) {
        const Op *op = &s->ops.list[i];
        json_array_append_new(list, json_pack("{s:s, s:f, s:f, s:f, s:f}", "name", op->name, "calls", op->calls / s->n,
                                              "seconds", op->seconds / s->n, "bytes", op->bytes / s->n, "flops",
                                              op->flops / s->n));
    }
    return list;
}

static void put_share(json_t *o, const char *name, double x) {
    json_object_set_new(o, name, x > 0 ? json_real(x) : json_null());
}

static json_t *stage_json(const Stage *s, const Limits *l, bool profile) {
    json_t *o = json_pack("{s:s, s:i}", "stage", kinds[s->kind], "size", s->size);
    if (s->err.status) {
        json_object_set_new(o, "error", json_string(s->err.message));
        return o;
    }
    double sorted[MAX_REPEAT], bytes = 0, flops = 0, least = 0;
    json_t *seconds = json_array();
    for (int i = 0; i < s->n; i++) json_array_append_new(seconds, json_real(sorted[i] = s->seconds[i]));
    qsort(sorted, (size_t)s->n, sizeof *sorted, by_size);
    double median = (sorted[s->n / 2] + sorted[(s->n - 1) / 2]) / 2;
    for (int i = 0; i < s->ops.n; i++) {
        const Op *op = &s->ops.list[i];
        bytes += op->bytes / s->n, flops += op->flops / s->n;
        if (op->flops > 0) least += l->peak[op->number] > 0 ? op->flops / s->n / l->peak[op->number] : NAN;
    }
    json_object_update_new(o,
                           json_pack("{s:i, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "tokens", s->tokens, "runs",
                                     seconds, "seconds", median, "spread", (sorted[s->n - 1] - sorted[0]) / 2 / median,
                                     "tokens_per_second", s->tokens / median, "bytes", bytes, "flops", flops,
                                     "bytes_per_second", bytes / median, "flops_per_second", flops / median));
    double read = s->read > 0 ? s->read : l->read;
    put_share(o, "read_limit", read);
    put_share(o, "of_read", read > 0 ? bytes / median / read : 0);
    put_share(o, "of_peak", least / median);
    if (profile) json_object_set_new(o, "operations", ops_json(s));
    return o;
}

static double number_of(const json_t *o, const char *name) { return json_number_value(json_object_get(o, name)); }

static void stage_print(const json_t *o, bool profile) {
    const char *error = json_string_value(json_object_get(o, "error"));
    printf("  %-8s%5.0f", json_string_value(json_object_get(o, "stage")), number_of(o, "size"));
    if (error) {
        printf("   %s\n", error);
        return;
    }
    char read[16] = "-", peak[16] = "-";
    if (json_is_real(json_object_get(o, "of_read")))
        snprintf(read, sizeof read, "%.0f%%", 100 * number_of(o, "of_read"));
    if (json_is_real(json_object_get(o, "of_peak")))
        snprintf(peak, sizeof peak, "%.0f%%", 100 * number_of(o, "of_peak"));
    printf("%8.0f%11.4f%7.1f%%%11.1f%9.1f%9s%10.0f%9s\n", number_of(o, "tokens"), number_of(o, "seconds"),
           100 * number_of(o, "spread"), number_of(o, "tokens_per_second"), number_of(o, "bytes_per_second") / 1e9,
           read, number_of(o, "flops_per_second") / 1e9, peak);
    size_t i;
    json_t *op;
    if (profile) json_array_foreach(json_object_get(o, "operations"), i, op) {
            double seconds = number_of(op, "seconds");
            printf("      %-28s%7.0f calls%11.4f s%6.1f%%%9.1f GB/s%9.0f GFLOP/s\n",
                   json_string_value(json_object_get(op, "name")), number_of(op, "calls"), seconds,
                   100 * seconds / number_of(o, "seconds"), number_of(op, "bytes") / seconds / 1e9,
                   number_of(op, "flops") / seconds / 1e9);
        }
}

static json_t *bench_json(const Pass *p, const Limits *l, bool profile) {
    json_t *stages = json_array(), *limits = json_object();
    for (int i = 0; i < p->n_stages; i++) json_array_append_new(stages, stage_json(&p->stages[i], l, profile));
    put_share(limits, "read", l->read), put_share(limits, "f32", l->peak[AS_F32]);
    put_share(limits, "bf16", l->peak[AS_BF16]), put_share(limits, "int8", l->peak[AS_INT8]);
    put_share(limits, "round_trip_ns", l->round_trip * 1e9);
    size_t weights = p->model->file ? modelfile_bytes(p->model->file) : config_weight_bytes(&p->model->config);
    return json_pack("{s:s, s:i, s:s, s:I, s:o, s:o}", "device", p->inner->name, "threads", omp_get_max_threads(),
                     "type", dtype_name(p->model->config.text_type), "weights", (json_int_t)weights, "limits", limits,
                     "stages", stages);
}

static void bench_print(const json_t *o, const Limits *l, bool profile) {
    printf("device %s, %.0f threads, %s weights of %.2f GB\n", json_string_value(json_object_get(o, "device")),
           number_of(o, "threads"), json_string_value(json_object_get(o, "type")), number_of(o, "weights") / 1e9);
    if (l->read > 0) printf("limits: %.1f GB/s read (measured again for decoding)", l->read / 1e9);
    static const char *const names[] = {"f32", "bf16", "int8"};
    for (int i = 0; i < N_NUMBERS; i++)
        if (l->peak[i] > 0) printf(", %.0f G%s/s %s", l->peak[i] / 1e9, i == AS_INT8 ? "OP" : "FLOP", names[i]);
    if (l->round_trip > 0) printf(", %.0f ns from one thread to another and back", l->round_trip * 1e9);
    printf("%s\n  %-13s%8s%11s%8s%11s%9s%9s%10s%9s\n", l->read > 0 ? "\n" : "", "stage", "tokens", "seconds", "spread",
           "tokens/s", "GB/s", "of read", "GFLOP/s", "of peak");
    size_t i;
    json_t *stage;
    json_array_foreach(json_object_get(o, "stages"), i, stage) stage_print(stage, profile);
}

// Run all stages on the device, then on the null device, which counts.
bool bench_stages(const Model *model, const Device *device, const EngineOptions *options, const BenchOptions *bench,
                  Error *err) {
    static const char *const usual =
        "vision=224,vision=448,vision=1024,prefill=512,prefill=2048,decode=1,decode=8,decode=32";
    Model endless = *model;
    endless.config.n_eos = 0; // random ids end nothing
    Stage *timed = calloc(2 * MAX_STAGES, sizeof *timed), *counted = timed + MAX_STAGES;
    if (!timed) return fail(err, 500, "out of memory for the stages");
    Pass p = {.model = &endless, .inner = device, .options = *options, .repeat = bench->repeat, .stages = timed};
    bool ok = stages_parse(bench->stages ? bench->stages : usual, timed, &p.n_stages, err);
    Limits limits = {0};
    if (ok && bench->roofline)
        limits = (Limits){.read = bench->roofline->peak_bandwidth, .peak[AS_BF16] = bench->roofline->peak_flops};
    p.measure = ok && !bench->roofline && device == &device_cpu;
    if (p.measure) limits = measure_limits();
    memcpy(counted, timed, MAX_STAGES * sizeof *timed);
    Device watched = watch_device(device, bench->profile);
    p.device = &watched;
    ok = ok && pass_half(&p, true, err) && pass_half(&p, false, err);

    Pass count = p;
    count.measure = false;
    Device counter = watch_device(&device_null, true);
    count.device = &counter, count.inner = &device_null, count.stages = counted;
    ok = ok && pass_half(&count, true, err) && pass_half(&count, false, err);
    for (int i = 0; ok && i < p.n_stages; i++) stage_count(&timed[i], &counted[i], bench->profile);
    if (ok) {
        json_t *out = bench_json(&p, &limits, bench->profile);
        if (bench->json)
            json_dumpf(out, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6)), putchar('\n');
        else
            bench_print(out, &limits, bench->profile);
        json_decref(out);
    }
    free(timed);
    return ok;
}

// ---------------------------------------------------------------------------------------------
// Loads

typedef struct Load {
    int width, height; // of each request's picture; 0: none
    int concurrency, requests, prompt, output;
} Load;

typedef struct Client {
    Sequence *seq;
    Image image;
    const Image *images[1];
} Client;

typedef struct Run {
    const Model *model;
    const Device *device;
    Engine *engine;
    Load load;
    Client *clients;
    double *first_token; // (requests): seconds from submission
    int submitted, done, most_waiting;
    int64_t tokens, image_tokens;
    double seconds;
} Run;

static bool load_parse(const char *text, Load *l, Error *err) {
    *l = (Load){.concurrency = 1, .requests = 16, .prompt = 64, .output = 64};
    char copy[256];
    if (strlen(text) >= sizeof copy) return fail(err, 400, "--load is over %zu characters long", sizeof copy - 1);
    strcpy(copy, text);
    for (char *save, *part = strtok_r(copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        int used = 0;
        bool ok = sscanf(part, "images=%dx%d%n", &l->width, &l->height, &used) == 2 ||
                  sscanf(part, "concurrency=%d%n", &l->concurrency, &used) == 1 ||
                  sscanf(part, "requests=%d%n", &l->requests, &used) == 1 ||
                  sscanf(part, "prompt=%d%n", &l->prompt, &used) == 1 ||
                  sscanf(part, "output=%d%n", &l->output, &used) == 1;
        if (!ok || part[used])
            return fail(err, 400, "--load: '%s' is not images=WxH, concurrency=N, requests=N, prompt=N or output=N",
                        part);
    }
    bool fits = l->width >= 0 && l->height >= 0 && l->concurrency >= 1 && l->concurrency <= 4096 && l->requests >= 1 &&
                l->requests <= 10000000 && l->prompt >= 1 && l->prompt <= 1 << 20 && l->output >= 1 &&
                l->output <= 1 << 20;
    return fits || fail(err, 400,
                        "--load: a number is out of range (concurrency to 4096, requests to 10000000, prompt and "
                        "output from 1 to 1048576)");
}

// The next request of a client: a picture, then new ids.
static bool client_submit(Run *r, Client *c, Error *err) {
    const Config *config = &r->model->config;
    Ids ids = {0};
    Request request = {
        .max_tokens = r->load.output,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .temperature = 1, .seed = (uint64_t)r->submitted}};
    if (r->load.width) {
        const ImageConfig *ic = engine_image_config(r->engine);
        if (!picture_make(ic, r->device, r->load.width, r->load.height, r->submitted, &c->image, err)) return false;
        c->images[0] = &c->image;
        request.images = c->images, request.n_images = 1;
        for (int i = 0; i < image_tokens(&c->image, &config->image); i++) ids_push(&ids, config->image_token);
    }
    ids_push_random(&ids, config, r->submitted, r->load.prompt);
    request.ids = ids.data, request.n = (int)ids.n;
    c->seq = engine_submit(r->engine, &request, err);
    free(ids.data);
    r->submitted++;
    return c->seq != NULL;
}

static void client_finish(Run *r, Client *c) {
    Sequence *q = c->seq;
    r->first_token[r->done++] = q->t_first - q->t_submit;
    r->tokens += q->n_tokens - q->n_prompt;
    r->image_tokens += q->image_tokens;
    engine_release(r->engine, q);
    free(c->image.pixels);
    *c = (Client){0};
}

static bool run_load(Run *r, Error *err) {
    const Load *l = &r->load;
    double start = seconds_now(r->device);
    while (r->done < l->requests) {
        MemoryMap m;
        for (int i = 0; i < l->concurrency && r->submitted < l->requests; i++)
            if (!r->clients[i].seq && !client_submit(r, &r->clients[i], err)) return false;
        engine_step(r->engine);
        engine_map(r->engine, &m);
        if (m.waiting > r->most_waiting) r->most_waiting = m.waiting;
        for (int i = 0; i < l->concurrency; i++)
            if (r->clients[i].seq && r->clients[i].seq->finish) client_finish(r, &r->clients[i]);
    }
    r->seconds = seconds_now(r->device) - start;
    return true;
}

static json_t *run_json(Run *r) {
    MemoryMap m;
    engine_map(r->engine, &m);
    qsort(r->first_token, r->done, sizeof *r->first_token, by_size);
    json_t *peaks = json_object();
    for (int i = 0; i < N_OWNERS; i++)
        json_object_set_new(
            peaks, m.owners[i].name,
            json_pack("{s:I, s:I}", "plan", (json_int_t)m.owners[i].bytes, "peak", (json_int_t)m.owners[i].peak));
    return json_pack("{s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:i, s:i, s:i, s:o}", "device", r->device->name,
                     "requests", r->done, "seconds", r->seconds, "requests_per_second", r->done / r->seconds,
                     "tokens_per_second", r->tokens / r->seconds, "image_tokens_per_second",
                     r->image_tokens / r->seconds, "first_token_p50", r->first_token[r->done / 2], "first_token_p99",
                     r->first_token[r->done * 99 / 100], "preemptions", (json_int_t)m.preemptions, "most_waiting",
                     r->most_waiting, "kv_blocks", m.blocks, "kv_blocks_left", m.blocks_free + m.blocks_cached,
                     "memory", peaks);
}

static void run_print(const json_t *o, const Load *l) {
    const char *name;
    json_t *v;
    printf("%d requests, %d at a time, %d prompt tokens and ", l->requests, l->concurrency, l->prompt);
    if (l->width)
        printf("a new picture of %d x %d each, ", l->width, l->height);
    else
        printf("no picture, ");
    printf("%d tokens written\n\n", l->output);
    json_object_foreach((json_t *)o, name, v) {
        if (json_is_integer(v))
            printf("  %-24s %12" JSON_INTEGER_FORMAT "\n", name, json_integer_value(v));
        else if (json_is_real(v))
            printf("  %-24s %12.3f\n", name, json_real_value(v));
    }
    printf("\n  %-10s %14s %14s\n", "owner", "plan", "peak");
    json_object_foreach(json_object_get(o, "memory"), name, v)
        printf("  %-10s %14" JSON_INTEGER_FORMAT " %14" JSON_INTEGER_FORMAT "\n", name,
               json_integer_value(json_object_get(v, "plan")), json_integer_value(json_object_get(v, "peak")));
}

bool bench_load(const Model *model, const Device *device, const EngineOptions *options, const char *load, bool json,
                Error *err) {
    Run r = {.model = model, .device = device};
    if (!load_parse(load, &r.load, err)) return false;
    EngineOptions o = *options;
    if (!o.max_seqs) o.max_seqs = r.load.concurrency;
    r.engine = engine_open(model, device, &o, err);
    if (!r.engine) return false;
    r.clients = calloc((size_t)r.load.concurrency, sizeof *r.clients);
    r.first_token = calloc((size_t)r.load.requests, sizeof *r.first_token);
    bool ok =
        r.clients && r.first_token ? run_load(&r, err) : fail(err, 500, "out of memory for the load's bookkeeping");
    if (ok) {
        json_t *out = run_json(&r);
        if (json)
            json_dumpf(out, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6)), putchar('\n');
        else
            run_print(out, &r.load);
        json_decref(out);
    }
    for (int i = 0; r.clients && i < r.load.concurrency; i++) {
        engine_release(r.engine, r.clients[i].seq);
        free(r.clients[i].image.pixels);
    }
    free(r.clients), free(r.first_token);
    engine_close(r.engine);
    return ok;
}
