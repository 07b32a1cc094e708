// Fuzzer's entry for request.c: what a stranger sends as JSON, and what a model may write while tools and stop strings
// are looked for. The input is a body, then (after a zero byte) the text of an answer.
//   make fuzz, or: build/fuzz/fuzz_json -max_total_time=600 CORPUS
// Run it in the project's folder: its tokenizer is that of tiny/tiny.vlm.
#include "request.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define EXPECT(what)                                                                                                   \
    do {                                                                                                               \
        if (!(what)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what), abort();                       \
    } while (0)

static Model *model;
static int32_t byte_id[256];

static void open_model(void) {
    Error err = {0};
    if (!(model = model_open("tiny/tiny.vlm", &err))) fprintf(stderr, "%s\n", err.message), abort();
    for (int32_t id = tokenizer_vocab(model->tokenizer) - 1; id >= 0; id--) {
        size_t n;
        const char *bytes = tokenizer_bytes(model->tokenizer, id, &n);
        if (n == 1) byte_id[(uint8_t)*bytes] = id;
    }
}

// A refusal: a status of its own, and a message that can be sent on.
static bool refused(const Error *err) {
    EXPECT(err->status == 400 || err->status == 413);
    EXPECT(strlen(err->message) > 3 && strlen(err->message) < sizeof err->message);
    return false;
}

static bool no_fetch(PictureSource *source, const char *url, Picture *picture, Error *err) {
    (void)source, (void)url, (void)picture;
    return fail(err, 400, "no such picture");
}

static bool probe(PictureSource *source, Picture **pictures, int n, Error *err) {
    EXPECT(n <= source->most);
    for (int i = 0; i < n; i++)
        if (!picture_probe(pictures[i], err)) return false;
    return true;
}

// What answer_next() hands out, joined: text, and the calls.
typedef struct Joined {
    Text text;
    json_t *calls;
} Joined;

static void drain(Answer *a, Joined *out) {
    Piece piece;
    while (answer_next(a, &piece)) {
        if (!piece.call) {
            EXPECT(piece.n);
            text_add(&out->text, piece.text, piece.n);
            continue;
        }
        json_t *arguments = json_object_get(json_object_get(piece.call, "function"), "arguments");
        json_t *object = json_loadb(json_string_value(arguments), json_string_length(arguments), JSON_ALLOW_NUL, NULL);
        EXPECT(json_is_object(object));
        json_decref(object);
        json_array_append_new(out->calls, piece.call);
    }
}

// The answer read in steps of `step` tokens, as a stream does, or at once (0).
static Joined answered(const Generation *g, const char *begun, size_t n_begun, Sequence *seq, int step) {
    Answer a = {.seq = seq, .seed = 7, .how = g, .begun = n_begun};
    Joined out = {.calls = json_array()};
    text_add(&a.text, begun, n_begun);
    text_add(&out.text, "", 0);
    int n = seq->n_tokens - seq->n_prompt;
    for (int at = step; step && at < n && !a.finished; at += step) {
        answer_read(&a, model->tokenizer, at, false);
        drain(&a, &out);
    }
    if (!a.finished) answer_read(&a, model->tokenizer, n, true);
    drain(&a, &out);
    EXPECT(a.at <= a.text.n && answer_finish(&a));
    for (int i = 0; i < g->n_stops && !a.calls; i++)
        EXPECT(a.text.n <= n_begun ||
               !memmem(a.text.data + n_begun, a.text.n - n_begun, g->stops[i].text, g->stops[i].n));
    free(a.text.data);
    return out;
}

// The same text and calls, whether they are read token by token or at once.
static void check_answer(const Generation *g, const Text *begun, const uint8_t *text, size_t n) {
    int32_t *ids = malloc((n + 1) * sizeof *ids);
    for (size_t i = 0; i < n; i++) ids[i] = byte_id[text[i]];
    Sequence seq = {.n_tokens = (int)n, .ids = ids, .finish = FINISH_STOP};
    const char *start = begun->data ? begun->data : "";
    Joined whole = answered(g, start, begun->n, &seq, 0);
    for (int step = 1; step < 8; step += 3) {
        Joined parts = answered(g, start, begun->n, &seq, step);
        EXPECT(parts.text.n == whole.text.n && !memcmp(parts.text.data, whole.text.data, whole.text.n));
        EXPECT(json_equal(parts.calls, whole.calls));
        json_decref(parts.calls);
        free(parts.text.data);
    }
    json_t *as_json = json_stringn(whole.text.data, whole.text.n); // NULL when it is no UTF-8
    EXPECT(as_json);
    json_decref(as_json);
    json_decref(whole.calls);
    free(whole.text.data);
    free(ids);
}

static void check_body(json_t *body, bool text, const uint8_t *answer, size_t n) {
    PictureSource source = {.config = &model->config.image, .most = 4, .fetch = no_fetch, .decode = probe};
    Generation g = {0};
    Conversation c = {0};
    Text begun = {0};
    Error err = {0};
    bool ok = generation_read(&g, body, text, false, model->tokenizer, &err) || refused(&err);
    if (ok) {
        EXPECT(g.n >= 1 && g.n <= MAX_N && g.n_stops <= MAX_STOPS && g.n_biases <= MAX_BIASES && g.max_tokens >= 0);
        EXPECT(g.sampling.temperature >= 0 && g.sampling.temperature <= 2 && g.sampling.top_k >= 0);
    }
    if (ok && !text)
        ok = conversation_read(&c, &source, model->tokenizer, json_object_get(body, "messages"), &g.tools, &begun,
                               &err) ||
             refused(&err);
    if (ok) check_answer(&g, &begun, answer, n);
    free(begun.data);
    conversation_free(&c);
    generation_free(&g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (!model) open_model();
    const uint8_t *zero = n ? memchr(data, 0, n) : NULL;
    size_t n_body = zero ? (size_t)(zero - data) : n, n_answer = zero ? n - n_body - 1 : 0;
    char *bytes = malloc(n_body + !n_body); // its own block: the sanitizer sees a read past it
    memcpy(bytes, data, n_body);
    Error err = {0};
    json_t *body = json_read(bytes, n_body, &err);
    if (!body) refused(&err);
    for (int text = 0; body && text < 2; text++) check_body(body, text, zero ? zero + 1 : data, n_answer);
    json_decref(body);
    free(bytes);
    return 0;
}
