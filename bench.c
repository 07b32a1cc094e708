// bench.c: loads. A closed loop of clients, each with one request at a time, against an engine: the true one with a
// model file, or one with a published shape on the null device, whose clock is a roofline's.
#include "vlm.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

static double seconds_now(const Device *d) {
    if (d->clock) return d->clock();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

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

// A picture of the size that the load's would be resized to. Only a device that computes needs pixels: noise.
static bool picture_make(const Run *r, int number, Image *out, Error *err) {
    *out = (Image){.source_width = r->load.width, .source_height = r->load.height};
    if (!image_fit(engine_image_config(r->engine), r->load.height, r->load.width, &out->height, &out->width, err))
        return false;
    memcpy(out->key, &number, sizeof number);
    if (r->device == &device_null) return true;
    size_t n = (size_t)out->width * out->height * 3;
    out->pixels = malloc(n);
    if (!out->pixels) return fail(err, 500, "out of memory for a picture of %zu bytes", n);
    for (size_t i = 0; i < n; i++) out->pixels[i] = (uint8_t)(sample_uniform(1, (uint64_t)number, (uint32_t)i) * 256);
    return true;
}

// The next request of a client: a picture, then new ids that are no placeholder and end no answer.
static bool client_submit(Run *r, Client *c, Error *err) {
    const Config *config = &r->model->config;
    Ids ids = {0};
    Request request = {
        .max_tokens = r->load.output,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .temperature = 1, .seed = (uint64_t)r->submitted}};
    if (r->load.width) {
        if (!picture_make(r, r->submitted, &c->image, err)) return false;
        c->images[0] = &c->image;
        request.images = c->images, request.n_images = 1;
        for (int i = 0; i < image_tokens(&c->image, &config->image); i++) ids_push(&ids, config->image_token);
    }
    for (int i = 0; i < r->load.prompt; i++) {
        int32_t id = (int32_t)(sample_uniform(2, (uint64_t)r->submitted, (uint32_t)i) * config->text.vocab);
        ids_push(&ids, id == config->image_token ? id - 1 : id);
    }
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

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
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
