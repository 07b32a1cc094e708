// test/engine: the scheduler, the block pool, the caches and the memory plan, on a real model file.
//
//   test_engine MODEL [SCHEDULES [SEED]]
//   test_engine MODEL soak PICTURES          so many different pictures, one after another: memory must stay flat
//
// Each request is first served alone. Then random schedules serve the same requests together, with random budgets,
// pools, threads, cancellations and cache states; every token id and log-probability must be the same, bit for bit,
// and after each step the pool's and caches' invariants must hold.
#include "check.h"
#include "vlm.h"
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------
// Allocations are counted while the guard is up: a step must make none. (Not under the sanitizers, which have
// allocators of their own.)

static const Device *dev = &device_cpu; // of all engines here
static bool guard_up;
static int guarded_allocations;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature) // clang's way to say it
#define SANITIZED (__has_feature(thread_sanitizer) || __has_feature(address_sanitizer))
#else
#define SANITIZED 0
#endif
#if !SANITIZED
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t n) {
    guarded_allocations += guard_up;
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size) {
    guarded_allocations += guard_up;
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n) {
    guarded_allocations += guard_up;
    return __libc_realloc(p, n);
}
#endif
#ifndef CUDA_ON_CPU
enum { EMULATED = false }; // the true CUDA driver keeps records of its own in malloc's memory
#else
enum { EMULATED = true };
// What vlm.cu asks of the CUDA runtime counts too. Not what the emulation keeps its own records in, by C++'s new.
void cuda_memory_call(void) { guarded_allocations += guard_up; }
#if !SANITIZED
void *_Znwm(size_t n) { return __libc_malloc(n); }
#endif
#endif

// ---------------------------------------------------------------------------------------------
// Requests: random ids and pictures of noise, seeded

static uint64_t seed;
static int random_int(int low, int high) { // both included
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return low + (int)((seed >> 33) % (uint64_t)(high - low + 1));
}

enum { N_REQUESTS = 14, N_IMAGES = 5 };

static Model *model;
static Image images[N_IMAGES];

typedef struct Case {
    Request request;
    const Image *pictures[4];
    int32_t *ids;
    TokenCount biases[3];
    int n_written; // the reference answer
    Sampled *written;
    Finish finish;
} Case;
static Case cases[N_REQUESTS];

static Image noise_image(int rows, int cols, int tag) { // of tokens
    int side = model->config.image.patch * model->config.image.merge;
    Image im = {.width = cols * side, .height = rows * side, .key = {(uint8_t)tag, 77}};
    im.pixels = malloc((size_t)im.width * im.height * 3);
    for (int i = 0; i < im.width * im.height * 3; i++) im.pixels[i] = (uint8_t)random_int(0, 255);
    return im;
}

static int32_t random_id(void) {
    int32_t id;
    do id = random_int(0, model->config.text.vocab - 1);
    while (id == model->config.image_token);
    return id;
}

static void case_make(Case *c, int n_text, int n_images, int max_tokens) {
    Ids ids = {0};
    if (n_images > (n_text + 1) / 3) n_images = (n_text + 1) / 3; // a picture after every third token
    for (int i = 0; i < n_text; i++) {
        ids_push(&ids, random_id());
        if (i % 3 != 1 || i / 3 >= n_images) continue;
        const Image *im = c->pictures[i / 3] = &images[random_int(0, N_IMAGES - 1)];
        for (int k = 0; k < image_tokens(im, &model->config.image); k++) ids_push(&ids, model->config.image_token);
    }
    c->ids = ids.data;
    c->request = (Request){
        .ids = c->ids,
        .n = (int)ids.n,
        .images = c->pictures,
        .n_images = n_images,
        .max_tokens = max_tokens,
        .sampling = {.temperature = random_int(0, 2) ? 0.8f : 0,
                     .top_p = random_int(0, 1) ? 0.9f : 1,
                     .repetition_penalty = random_int(0, 1) ? 1.1f : 1,
                     .top_k = random_int(0, 1) ? 20 : 0,
                     .logprobs = random_int(0, 3),
                     .seed = (uint64_t)random_int(0, 1000)},
    };
    c->request.salt[0] = (uint8_t)random_int(0, 2);
    int vocab = model->config.text.vocab, first = random_int(0, vocab - 3);
    for (int i = 0; i < 3; i++) c->biases[i] = (TokenCount){.id = first + i, .bias = (float)random_int(-4, 4)};
    c->request.biases = c->biases, c->request.n_biases = random_int(0, 1) ? 3 : 0;
}

// A picture in the middle of random text.
static void case_around(Case *c, int before, const Image *im, int after, int max_tokens) {
    Ids ids = {0};
    for (int i = 0; i < before; i++) ids_push(&ids, random_id());
    for (int i = 0; i < image_tokens(im, &model->config.image); i++) ids_push(&ids, model->config.image_token);
    for (int i = 0; i < after; i++) ids_push(&ids, random_id());
    *c = (Case){.ids = ids.data, .pictures = {im}};
    c->request = (Request){.ids = c->ids,
                           .n = (int)ids.n,
                           .images = c->pictures,
                           .n_images = 1,
                           .max_tokens = max_tokens,
                           .sampling = {.top_p = 1, .repetition_penalty = 1}};
}

// Run the engine until nothing is left, checking it after each step. False when it does not end.
static bool drain(Engine *e, int most_steps) {
    Error err = {0};
    for (int i = 0; i < most_steps; i++) {
        if (!engine_step(e)) return true;
        if (!check(engine_check(e, &err), "%s", err.message)) return false;
    }
    return false;
}

static bool idle(const Engine *e) {
    MemoryMap m;
    engine_map(e, &m);
    size_t sum = 0;
    for (int i = 0; i < N_OWNERS; i++) sum += m.owners[i].bytes;
    return m.blocks_held == 0 && m.slots_pinned == 0 && m.running == 0 && m.waiting == 0 && sum == m.total &&
           m.blocks_free + m.blocks_cached == m.blocks && m.owners[OWNER_ARENA].peak <= m.owners[OWNER_ARENA].bytes;
}

static Engine *open_engine(EngineOptions options) {
    Error err;
    Engine *e = engine_open(model, dev, &options, &err);
    if (e) return e;
    printf("FAIL %s\n", err.message);
    exit(1);
}

static void run_alone(Case *c) {
    Error err;
    Engine *e = open_engine((EngineOptions){.ctx = 1024});
    Sequence *s = engine_submit(e, &c->request, &err);
    if (!check(s != NULL, "submit alone: %s", s ? "" : err.message)) exit(1);
    check(drain(e, 5000), "a request alone does not end");
    c->n_written = s->n_tokens - s->n_prompt, c->finish = s->finish;
    c->written = malloc((c->n_written + 1) * sizeof *c->written);
    memcpy(c->written, s->sampled, c->n_written * sizeof *c->written);
    engine_release(e, s);
    check(idle(e), "after a request alone the engine is not idle");
    engine_close(e);
}

static bool same_answer(const Case *c, const Sequence *s) {
    return s->finish == c->finish && s->n_tokens - s->n_prompt == c->n_written &&
           !memcmp(s->sampled, c->written, c->n_written * sizeof *c->written);
}

// ---------------------------------------------------------------------------------------------
// Random schedules

static void run_schedule(int number) {
    Error err;
    EngineOptions o = {.ctx = 1024, .max_seqs = random_int(1, 7)};
    o.max_batch_tokens = o.max_seqs + (random_int(0, 1) ? random_int(1, 40) : random_int(1, 600));
    o.kv_blocks = 64 - random_int(0, 40); // the longest request needs 24
    o.max_pixels = random_int(0, 1) ? 64 * 784 : 0;
    o.step_patches = random_int(0, 1) ? random_int(1, 300) : 0;
    if (random_int(0, 1)) { // room for one picture of the largest size only
        MemoryMap m;
        engine_plan(&model->config, 0, dev, &o, &m, &err);
        o.image_cache = m.slots / 2 * m.slot_bytes;
    }
    omp_set_num_threads(random_int(1, 2));
    Engine *e = open_engine(o);
    Sequence *live[32] = {0};
    int which[32], n = 0, cancelled[32] = {0}, refused = 0;
    for (int step = 0, left = random_int(2, 30); left > 0; step++) {
        if (n < 32 && random_int(0, 3) == 0) {
            which[n] = random_int(0, N_REQUESTS - 1);
            live[n] = engine_submit(e, &cases[which[n]].request, &err);
            if (live[n])
                n++;
            else
                refused++; // needs more blocks or a larger picture than this engine has: said so, and nothing is left
            left--;
        }
        if (n && random_int(0, 20) == 0) {
            int i = random_int(0, n - 1);
            if (!live[i]->finish) engine_cancel(e, live[i]), cancelled[i] = 1;
        }
        if (random_int(0, 15) == 0) engine_flush(e);
        engine_step(e);
        if (!check(engine_check(e, &err), "schedule %d, step %d: %s", number, step, err.message)) break;
        if (n == 32) break;
    }
    check(drain(e, 100000), "schedule %d does not end", number);
    for (int i = 0; i < n; i++) {
        if (cancelled[i])
            check(live[i]->finish != FINISH_NONE, "schedule %d: a cancelled request goes on", number);
        else
            check(same_answer(&cases[which[i]], live[i]),
                  "schedule %d: request %d is not the same as alone (seqs %d, batch %d, blocks %d)", number, which[i],
                  o.max_seqs, o.max_batch_tokens, o.kv_blocks);
        engine_release(e, live[i]);
    }
    check(idle(e), "schedule %d: something is left behind", number);
    engine_close(e);
}

// ---------------------------------------------------------------------------------------------
// Particular promises

// The second time everything but the last tokens comes from the prefix cache, and the tower does not run.
static void test_prefix(void) {
    Error err;
    Engine *e = open_engine((EngineOptions){.ctx = 1024});
    Case *c = &cases[N_REQUESTS - 1]; // with pictures
    Sequence *cold = engine_submit(e, &c->request, &err);
    drain(e, 5000);
    Sequence *warm = engine_submit(e, &c->request, &err);
    drain(e, 5000);
    check(cold->cached_tokens == 0 && cold->vision_runs > 0, "cold: %d cached tokens, %d tower runs",
          cold->cached_tokens, cold->vision_runs);
    check(warm->cached_tokens == (c->request.n - 1) / KV_BLOCK * KV_BLOCK && warm->vision_runs == 0,
          "warm: %d cached tokens of %d, %d tower runs", warm->cached_tokens, c->request.n, warm->vision_runs);
    check(same_answer(c, warm), "the answer from the prefix cache differs");
    Request salted = c->request;
    salted.salt[5] ^= 1;
    Sequence *other = engine_submit(e, &salted, &err);
    drain(e, 5000);
    check(other->cached_tokens == 0 && other->vision_runs > 0, "another salt finds %d tokens, %d tower runs",
          other->cached_tokens, other->vision_runs);
    engine_release(e, cold), engine_release(e, warm), engine_release(e, other);
    // The same text with another picture of the same size must not find the first picture's keys.
    Image twin = noise_image(3, 4, 200), first = noise_image(3, 4, 201);
    Case a, b;
    case_around(&a, 2, &first, 58, 4);
    b = a;
    b.pictures[0] = &twin, b.request.images = b.pictures;
    Sequence *x = engine_submit(e, &a.request, &err);
    drain(e, 1000);
    Sequence *y = engine_submit(e, &b.request, &err);
    drain(e, 1000);
    check(y->cached_tokens == 0 && y->vision_runs == 1, "another picture finds %d tokens", y->cached_tokens);
    engine_release(e, x), engine_release(e, y);
    check(idle(e), "after the prefix test the engine is not idle");
    engine_close(e);
    free(a.ids), free(twin.pixels), free(first.pixels);
}

// Biases move a token to the front, or away, and nothing else.
static void test_biases(void) {
    Error err;
    Engine *e = open_engine((EngineOptions){.ctx = 256});
    int32_t prompt[] = {1, 2, 3};
    TokenCount up = {.id = 7, .bias = 100}, down = {.bias = -100}, bad = {.id = model->config.text.vocab};
    Request r = {.ids = prompt, .n = 3, .max_tokens = 4, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    Sequence *plain = engine_submit(e, &r, &err);
    drain(e, 100);
    r.biases = &up, r.n_biases = 1;
    Sequence *favoured = engine_submit(e, &r, &err);
    down.id = plain->sampled[0].id, r.biases = &down;
    Sequence *avoided = engine_submit(e, &r, &err);
    drain(e, 100);
    for (int i = 0; i < 4; i++)
        check(favoured->ids[3 + i] == 7, "a bias of 100, and token %d is %d", i, favoured->ids[3 + i]);
    check(avoided->ids[3] != down.id, "a bias of -100 does not keep token %d away", down.id);
    float moved = favoured->sampled[0].logprob;
    check(moved <= plain->sampled[0].logprob, "log-probabilities are told with the bias: %g", moved);
    r.biases = &bad;
    check(!engine_submit(e, &r, &err) && err.status == 400, "a bias of no token is taken");
    engine_release(e, plain), engine_release(e, favoured), engine_release(e, avoided);
    check(idle(e), "after the bias test the engine is not idle");
    engine_close(e);
}

// A flush forgets what nobody holds, and nothing else.
static void test_flush(void) {
    Error err;
    MemoryMap m;
    Engine *e = open_engine((EngineOptions){.ctx = 1024});
    Case *c = &cases[N_REQUESTS - 1]; // with pictures
    Sequence *done = engine_submit(e, &c->request, &err);
    drain(e, 5000);
    Sequence *going = engine_submit(e, &c->request, &err);
    engine_step(e);
    engine_flush(e);
    engine_map(e, &m);
    check(m.blocks_cached == 0 && (m.blocks_held > 0 || going->finish), "after a flush %d blocks are cached, %d held",
          m.blocks_cached, m.blocks_held);
    check(drain(e, 5000) && same_answer(c, going), "a flush changes an answer");
    engine_flush(e);
    engine_map(e, &m);
    check(m.blocks_free == m.blocks && m.slots_used == 0, "after a flush %d blocks of %d are free, %d slots used",
          m.blocks_free, m.blocks, m.slots_used);
    Sequence *cold = engine_submit(e, &c->request, &err);
    drain(e, 5000);
    check(cold->cached_tokens == 0 && cold->vision_runs > 0 && same_answer(c, cold), "after a flush %d are cached",
          cold->cached_tokens);
    engine_release(e, done), engine_release(e, going), engine_release(e, cold);
    engine_close(e);
}

// The worst legal step takes exactly what the plan says: first the largest picture alone, then a full batch.
static void test_plan_is_peak(void) {
    Error err;
    for (int large = 0; large < 2; large++) {
        int seqs = 4, budget = large ? 64 : 600; // the tower needs more, or the text does
        EngineOptions o = {.ctx = 1024, .max_seqs = seqs, .max_batch_tokens = budget, .max_pixels = large ? 0 : 3136};
        Engine *e = open_engine(o);
        MemoryMap m;
        ImageConfig c = *engine_image_config(e);
        Case cs[4] = {0};
        Image picture;
        int height, width;
        seed = 5;
        if (large) { // as many tokens as fit, or a strip as long as it can be, one token high
            image_fit(&c, 28, 5600, &height, &width, &err);
            int strip = width / 28, most = (int)(c.max_pixels / 784);
            picture = noise_image(1, most > strip ? most : strip, 9);
            case_around(&cs[0], 2, &picture, 6, 1);
            Sequence *s = engine_submit(e, &cs[0].request, &err);
            check(s && drain(e, 1000), "the largest picture: %s", s ? "does not end" : err.message);
            engine_release(e, s);
            free(cs[0].ids), free(picture.pixels);
        }
        Sequence *live[4];
        for (int i = 0; i < seqs; i++) { // all but the last decode when the last one's prompt fills the batch
            case_make(&cs[i], i < seqs - 1 ? 10 : budget - (seqs - 1), 0, 60);
            cs[i].request.sampling.temperature = 5;
            cs[i].request.sampling.top_k = 0, cs[i].request.sampling.top_p = 1;
            live[i] = engine_submit(e, &cs[i].request, &err);
            if (i == seqs - 2) engine_step(e);
        }
        engine_step(e);
        engine_map(e, &m);
        check(m.owners[OWNER_ARENA].peak == m.owners[OWNER_ARENA].bytes,
              "arena: planned %zu, peak %zu (large picture: %d)", m.owners[OWNER_ARENA].bytes,
              m.owners[OWNER_ARENA].peak, large);
        drain(e, 1000);
        for (int i = 0; i < seqs; i++) engine_release(e, live[i]), free(cs[i].ids);
        engine_close(e);
    }
}

// What is taken from the device and the host, in two calls, is what the plan says, to the byte.
static size_t reserved, reservations;

static void *counted_reserve(size_t bytes) {
    reserved += bytes, reservations++;
    return dev->reserve(bytes);
}

static void *counted_reserve_host(size_t bytes) {
    reserved += bytes, reservations++;
    return dev->reserve_host(bytes);
}

static void counted_release(void *base, size_t bytes) {
    reserved -= bytes, reservations--;
    dev->release(base, bytes);
}

static void counted_release_host(void *base, size_t bytes) {
    reserved -= bytes, reservations--;
    dev->release_host(base, bytes);
}

static void test_plan_is_taken(void) {
    Error err;
    MemoryMap plan, live;
    Device device = *dev;
    device.reserve = counted_reserve, device.reserve_host = counted_reserve_host;
    device.release = counted_release, device.release_host = counted_release_host;
    EngineOptions o = {.ctx = 512, .max_seqs = 3};
    size_t weights = model_weight_bytes(model, dev), in_place = dev->unified ? weights : 0;
    DeviceMemory before = {0}, after = {0};
    if (dev->memory) dev->memory(&before);
    check(engine_plan(&model->config, weights, &device, &o, &plan, &err), "plan: %s", err.message);
    Engine *e = engine_open(model, &device, &o, &err);
    engine_map(e, &live);
    check(reserved == plan.total - in_place && reservations == 2, "taken: %zu bytes in %zu calls, planned %zu",
          reserved, reservations, plan.total - in_place);
    const DeviceMemory *d = &live.driver;
    size_t ours = live.total - live.owners[OWNER_IO].bytes;
    check(d->total == (dev->memory ? d->context + ours + d->slack + d->available : 0),
          "the driver reports %zu bytes in use, the map has %zu for it and %zu for us", d->total - d->available,
          d->context + d->slack, ours);
    Sequence *s = engine_submit(e, &cases[N_REQUESTS - 1].request, &err);
    check(s && drain(e, 5000), "the request is not served");
    engine_release(e, s);
    check(reservations == 2, "a request took memory of the device: %zu calls", reservations);
    for (int i = 0; i < N_OWNERS; i++)
        check(live.owners[i].bytes == plan.owners[i].bytes, "%s: planned %zu, has %zu", live.owners[i].name,
              plan.owners[i].bytes, live.owners[i].bytes);
    engine_close(e);
    check(reserved == 0 && reservations == 0, "%zu bytes are not given back", reserved);
    if (dev->memory) dev->memory(&after);
    check(after.available == before.available, "of the device's memory %zu bytes are not given back",
          before.available - after.available);
}

static void test_no_allocation(void) {
    Error err;
    omp_set_num_threads(2);
    Engine *e = open_engine((EngineOptions){.ctx = 1024, .kv_blocks = 40, .max_batch_tokens = 60});
    MemoryMap before, after;
    engine_map(e, &before);
    Sequence *live[N_REQUESTS];
    for (int round = 0; round < 2; round++) { // the first starts the threads
        for (int i = 0; i < N_REQUESTS; i++) live[i] = engine_submit(e, &cases[i].request, &err);
        guard_up = round == 1;
        while (engine_step(e)) {}
        guard_up = false;
        for (int i = 0; i < N_REQUESTS; i++) engine_release(e, live[i]);
    }
    engine_map(e, &after);
    check(after.driver.available == before.driver.available, "steps took %zu bytes of the device's memory",
          before.driver.available - after.driver.available);
    check(guarded_allocations == 0 || (dev->memory && !EMULATED), "%d allocations in steps", guarded_allocations);
    engine_close(e);
}

// A picture in the tower never holds the others up: those who decode get a token every step, and a cancelled picture
// is gone within a step, with everything it had.
static void test_picture_work_is_shared(void) {
    Error err;
    Engine *e = open_engine((EngineOptions){.ctx = 1024, .step_patches = 8});
    Image large = noise_image(10, 10, 210);
    Case talk = {0}, look;
    case_make(&talk, 20, 0, 400);
    talk.request.sampling = (Sampling){.temperature = 3, .top_p = 1, .repetition_penalty = 1};
    case_around(&look, 2, &large, 8, 5);
    Sequence *a = engine_submit(e, &talk.request, &err), *b = engine_submit(e, &look.request, &err);
    engine_step(e);
    int steps = 0, before = a->n_tokens;
    while (b->n_tokens == b->n_prompt && !a->finish && steps < 1000) engine_step(e), steps++;
    check(steps > 5, "400 patches with 8 a step took %d steps", steps);
    check(a->n_tokens - before == steps || a->finish, "in %d steps of picture work %d tokens were decoded", steps,
          a->n_tokens - before);
    drain(e, 1000);
    engine_release(e, a), engine_release(e, b);
    look.request.salt[9] = 1; // another picture, to the cache
    Sequence *c = engine_submit(e, &look.request, &err);
    engine_step(e), engine_step(e);
    check(!c->finish && c->n_tokens == c->n_prompt, "the second picture is done at once");
    engine_cancel(e, c);
    engine_step(e);
    check(c->finish == FINISH_CANCELLED && idle(e), "a cancelled picture lives on");
    engine_release(e, c);
    Sequence *d = engine_submit(e, &look.request, &err);
    engine_step(e);
    engine_release(e, d); // without a cancel first
    engine_step(e);
    check(idle(e), "a released picture lives on");
    engine_close(e);
    free(talk.ids), free(look.ids), free(large.pixels);
}

// Loads that once stopped the engine: each picture takes the whole image cache, and the pool holds little more than one
// of the sequences. Whoever lacks blocks and whoever lacks room for its picture must not wait for each other for ever.
static void test_dead_ends(void) {
    Error err;
    MemoryMap m;
    int side = model->config.image.patch * model->config.image.merge;
    EngineOptions o = {.ctx = 512, .kv_blocks = 20, .max_batch_tokens = 64, .max_pixels = 64 * side * side};
    engine_plan(&model->config, 0, dev, &o, &m, &err);
    o.image_cache = m.slots / 2 * m.slot_bytes; // by default there is room for two
    Image late = noise_image(1, 82, 220), early = noise_image(1, 100, 221);
    for (int text = 160; text <= 230; text += 5) {
        Case a, b;
        Engine *e = open_engine(o);
        case_around(&a, text, &late, 3, 4), case_around(&b, 0, &early, 150, 4);
        Sequence *x = engine_submit(e, &a.request, &err), *y = engine_submit(e, &b.request, &err);
        bool ends = check(x && y, "submit: %s", err.message) && drain(e, 1000);
        check(ends && x->finish && y->finish && idle(e), "%d tokens of text, then a picture: the engine stops", text);
        engine_release(e, x), engine_release(e, y);
        engine_close(e);
        free(a.ids), free(b.ids);
    }
    free(late.pixels), free(early.pixels);
}

// What cannot be served is refused with the figures, and leaves nothing behind.
static void test_refusals(void) {
    Error err;
    Engine *e = open_engine((EngineOptions){.ctx = 128, .kv_blocks = 4});
    int32_t ids[200] = {0};
    Request r = {.ids = ids, .n = 200, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    check(!engine_submit(e, &r, &err) && strstr(err.message, "200") && strstr(err.message, "128"),
          "over the context: %s", err.message);
    r.n = 100;
    check(!engine_submit(e, &r, &err) && strstr(err.message, "100") && strstr(err.message, "64"), "over the pool: %s",
          err.message);
    r.n = 0;
    check(!engine_submit(e, &r, &err), "an empty prompt is taken");
    r.n = 3, ids[1] = -5;
    check(!engine_submit(e, &r, &err) && strstr(err.message, "-5"), "a bad id: %s", err.message);
    ids[1] = model->config.image_token;
    check(!engine_submit(e, &r, &err) && err.status == 400, "a placeholder without a picture is taken");
    ids[1] = 0;
    const Image *one = &images[1];
    r.images = &one, r.n_images = 1;
    check(!engine_submit(e, &r, &err) && err.status == 400, "a picture without a placeholder is taken");
    check(idle(e), "after refusals the engine is not idle");
    engine_close(e);
    EngineOptions small = {.ctx = 128, .memory = 1000};
    check(!engine_open(model, dev, &small, &err), "1000 bytes of memory are enough");
    size_t least = 0;
    const char *is = strstr(err.message, "too small: ");
    check(is && sscanf(is, "too small: %zu", &least) == 1, "the least is not named: %s", err.message);
    small.memory = least;
    Engine *fits = engine_open(model, dev, &small, &err);
    check(fits != NULL, "the least that was named does not work: %s", err.message);
    engine_close(fits);
    small.memory = least - 1;
    check(!engine_open(model, dev, &small, &err), "less than the least works");
}

static void test_context_end(void) {
    Error err;
    int n_eos = model->config.n_eos;
    model->config.n_eos = 0; // nothing else may end it
    Engine *e = open_engine((EngineOptions){.ctx = 64});
    model->config.n_eos = n_eos;
    int32_t ids[60];
    for (int i = 0; i < 60; i++) ids[i] = random_id();
    Request r = {.ids = ids, .n = 60, .sampling = {.temperature = 50, .top_p = 1, .repetition_penalty = 1, .seed = 3}};
    Sequence *s = engine_submit(e, &r, &err);
    drain(e, 100);
    check(s->finish == FINISH_LENGTH && s->n_tokens == 64, "at the context's end: finish %d with %d tokens", s->finish,
          s->n_tokens);
    engine_release(e, s);
    engine_close(e);
}

// Random weights of the model's shape: an engine runs on them, what it computes is finite, and they are the same
// however many threads made them.
static void test_random_weights(Dtype type) {
    Case c = {0};
    Sampled first[4];
    case_make(&c, 12, 1, 4);
    int threads = omp_get_max_threads();
    for (int again = 0; again < 2; again++) {
        Error err;
        omp_set_num_threads(again ? 3 : 1);
        Config config = model->config;
        config.n_eos = 0;
        config_retype(&config, type);
        Model *random = model_random(&config, &err);
        if (!check(random != NULL, "random %s: %s", dtype_name(type), err.message)) break;
        check(modelfile_bytes(random->file) == config_weight_bytes(&config), "random weights: of another size");
        Engine *e = engine_open(random, dev, &(EngineOptions){0}, &err);
        if (!check(e != NULL, "random %s: %s", dtype_name(type), err.message)) break;
        Sequence *q = engine_submit(e, &c.request, &err);
        while (engine_step(e)) {}
        for (int i = 0; i < 4; i++)
            check(q->sampled[i].logprob <= 0, "random %s: %g", dtype_name(type), q->sampled[i].logprob);
        if (!again) memcpy(first, q->sampled, sizeof first);
        check(!memcmp(first, q->sampled, sizeof first), "random %s: others with more threads", dtype_name(type));
        engine_release(e, q);
        engine_close(e);
        model_close(random);
    }
    omp_set_num_threads(threads);
    free(c.ids);
}

// ---------------------------------------------------------------------------------------------
// Soak: the reported leak. Each picture is new, goes through decoder, resizer, tower and language model, and leaves.

static size_t resident_bytes(void) {
    long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &total, &resident) != 2) resident = 0;
    if (f) fclose(f);
    return (size_t)resident * 4096;
}

// A BMP of noise: a format that can be written in a few lines. Returns its bytes.
static size_t noise_bmp(uint8_t *out, int width, int height) {
    int row = (width * 3 + 3) / 4 * 4, size = 54 + row * height;
    int32_t header[13] = {size, 0, 54, 40, width, height, 1 | 24 << 16, 0, row * height, 2835, 2835, 0, 0};
    out[0] = 'B', out[1] = 'M';
    memcpy(out + 2, header, sizeof header);
    for (int i = 54; i < size; i++) out[i] = (uint8_t)random_int(0, 255);
    return (size_t)size;
}

static void soak_one(Engine *e, Workspace *work, uint8_t *file, bool first) { // the first is the largest
    Error err;
    Case c = {0};
    size_t bytes = first ? noise_bmp(file, 250, 250) : noise_bmp(file, random_int(40, 250), random_int(40, 250));
    if (!check(image_load(engine_image_config(e), work, file, bytes, &images[0], &err), "soak: %s", err.message))
        exit(1);
    for (int i = 1; i < N_IMAGES; i++) images[i] = images[0];
    case_make(&c, 8, 1, 3);
    Sequence *s = engine_submit(e, &c.request, &err);
    if (random_int(0, 9) == 0) engine_step(e), engine_cancel(e, s);
    while (engine_step(e)) {}
    engine_release(e, s);
    image_free(&images[0]);
    free(c.ids);
}

static void soak(int pictures) {
    Engine *e = open_engine((EngineOptions){.ctx = 1024});
    Workspace work = {.size = image_workspace(engine_image_config(e))};
    work.base = malloc(work.size);
    uint8_t *file = malloc(1 << 20);
    size_t warm = 0, used[N_OWNERS];
    MemoryMap m;
    enum { WARM_UP = 400 }; // until every block of the pool has been touched once
    for (int i = 0; i < WARM_UP + pictures; i++) {
        soak_one(e, &work, file, i == 0);
        if (i + 1 != WARM_UP) continue;
        warm = resident_bytes();
        engine_map(e, &m);
        for (int k = 0; k < N_OWNERS; k++) used[k] = m.owners[k].used;
    }
    engine_map(e, &m);
    for (int k = 0; k < N_OWNERS;
         k++) // pictures of different sizes leave some slots more or fewer; nothing else may differ
        check(k == OWNER_IMAGES || k == OWNER_ARENA || m.owners[k].used == used[k], "soak: %s used %zu, then %zu",
              m.owners[k].name, used[k], m.owners[k].used);
    double grown = (double)resident_bytes() - (double)warm;
    check(idle(e), "soak: something is left behind");
    // A sanitizer holds on to what was freed, to see it used: then resident memory tells nothing.
    check(SANITIZED || grown < 512 << 10, "soak: %.0f bytes more are resident after %d pictures", grown, pictures);
    printf("%d different pictures after a warm-up of %d: resident memory %+.0f KB, %+.1f KB per 1,000\n", pictures,
           WARM_UP, grown / 1024, grown / 1.024 / pictures);
    free(file), free(work.base);
    engine_close(e);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return fprintf(stderr, "usage: test_engine MODEL [SCHEDULES [SEED [cuda]]] | MODEL soak PICTURES\n"), 2;
    Error err;
    model = model_open(argv[1], &err);
    if (!model) return fprintf(stderr, "%s\n", err.message), 1;
    if (argc > 3 && !strcmp(argv[2], "soak")) {
        soak(atoi(argv[3]));
        model_close(model);
        return check_end();
    }
    int schedules = argc > 2 ? atoi(argv[2]) : 100;
    uint64_t base = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
#ifdef HAVE_CUDA
    if (argc > 4 && !strcmp(argv[4], "cuda")) dev = &device_cuda;
#endif
    seed = base;
    int sizes[N_IMAGES][2] = {{2, 2}, {3, 5}, {8, 1}, {7, 8}, {1, 70}};
    for (int i = 0; i < N_IMAGES; i++) images[i] = noise_image(sizes[i][0], sizes[i][1], i);
    for (int i = 0; i < N_REQUESTS; i++) {
        case_make(&cases[i], i == 0 ? 1 : i == 1 ? 300 : random_int(2, 120), i < 4 ? 0 : i % 4, random_int(1, 40));
        run_alone(&cases[i]);
    }
    for (int i = 0; i < schedules && !failed; i++) {
        seed = base * 1000003 + i;
        run_schedule(i);
        if (failed) printf("FAIL seed %llu, schedule %d\n", (unsigned long long)base, i);
    }
    if (!failed) test_no_allocation(), test_plan_is_peak(), test_plan_is_taken();
    if (!failed && dev == &device_cpu) // what another device would only do more slowly
        test_biases(), test_flush(), test_refusals(), test_context_end(), test_prefix(), test_picture_work_is_shared(),
            test_dead_ends();
    if (!failed && dev == &device_cpu)
        for (Dtype type = F32; type <= Q4; type++) test_random_weights(type);
    for (int i = 0; i < N_IMAGES; i++) free(images[i].pixels);
    for (int i = 0; i < N_REQUESTS; i++) free(cases[i].ids), free(cases[i].written);
    model_close(model);
    return check_end();
}
