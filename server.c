// server.c: the OpenAI-compatible HTTP server. No tensor in sight.
//
//   connection threads (libmicrohttpd, one for each client)
//     head -> route, key, limits -> body -> JSON -> pictures fetched and decoded -> prompt
//        |                                                                           |
//        |        tasks: submit, release, map, flush                                 v
//   engine thread (the one that called serve()):  tasks -> step -> tokens out -> tasks -> step ...
//        |
//        v
//     connection thread: tokens -> text -> one reply, or a stream of them
//
//   housekeeper: signals, and clients that are too slow
//
// One lock guards all that threads share; it is free while the engine computes. Memory that requests take is drawn from
// budgets, and who finds one empty waits in line: for the bodies' before reading, so that the client's system keeps
// the bytes, and for the pictures' before decoding. Budgets are taken in that order, so nobody waits in a circle.
#include "request.h"
#include <curl/curl.h>
#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    SMALL_BODY = 256 << 10, // bytes of a body that every connection may have, whatever the budget
    HEAD_MEMORY = 64 << 10, // of a connection in libmicrohttpd: its head, notes on it, and buffers
    THREAD_STACK = 1 << 20, // of a connection's thread
    LOOK_MS = 20,           // how often a thread that waits looks whether its client is still there
    FETCHES = 8,            // fetched bytes kept at a time, in units of the largest picture
    KEPT_STEPS = 256,       // for the page's timeline
    BODY_RATE = 16 << 10,   // bytes a second that a body must come with, after the idle time;
    HURRY_RATE = 1 << 20,   // after HURRY_SECONDS, while others wait for the memory
    HURRY_SECONDS = 5,
    TEXT_PER_TOKEN = 16, // bytes of text that a token of the context is taken to hold, at most
    LOGPROB_BYTES = 700, // of a log-probability, while a reply is made
    N_BUCKETS = 14,
};

// ---------------------------------------------------------------------------------------------
// What is shared

// Bytes that requests take from and give back to, first come, first served.
typedef struct Waiter {
    struct Waiter *next;
} Waiter;

typedef struct Budget {
    size_t size, used;
    Waiter *first, *last;
} Budget;

typedef struct Server Server;

// Something that the engine's thread does between two steps.
typedef struct Task {
    void (*run)(Server *server, void *argument);
    void *argument;
    bool done;
    struct Task *next;
} Task;

// One sequence in the engine. `published`, `finished` and `cancel` are guarded by the lock, seq's own fields are the
// engine thread's until `finished`, but for the tokens below `published`.
typedef struct Job {
    Sequence *seq;
    int published;
    bool finished, cancel;
    double arrived, latest; // seconds: the request, the latest token
    pthread_cond_t *news;   // its request's
    struct Job *next;
} Job;

typedef struct Histogram {
    const char *name, *help;
    const double *bounds; // (N_BUCKETS)
    int64_t counts[N_BUCKETS + 1];
    double sum;
} Histogram;

typedef struct Metrics {
    Histogram first_token, between_tokens, whole;
    int64_t prompt_tokens, generated_tokens, finished[3]; // by Finish: stop, length, cancelled
    int64_t http[600];                                    // by status
} Metrics;

// A client's connection, as the housekeeper sees it.
typedef enum Stage { STAGE_HEAD, STAGE_BODY, STAGE_WORK, STAGE_IDLE } Stage;
typedef struct Client {
    int fd;
    Stage stage;
    double since; // when the stage began
    size_t received;
    struct Client *before, *next;
} Client;

struct Server {
    const ServeOptions *options;
    const Model *model;
    Engine *engine;
    Workspace *work; // of the pictures; whoever decodes holds `decoding`
    pthread_mutex_t decoding;
    struct MHD_Daemon *daemon;
    char name[128], fingerprint[16];
    FetchRules fetch;
    char media_dir[PATH_MAX]; // resolved; "": none
    int room;                 // tokens that a sequence may have
    size_t most_text;         // bytes of a prompt's text
    size_t token_bytes, row_bytes;
    double started;
    time_t created;

    pthread_mutex_t lock;
    pthread_cond_t engine_wake, task_done, budget_freed;
    Task *tasks, *last_task;
    Job *jobs; // in the engine
    Budget bodies, pictures, fetched;
    Client *clients;
    int calls; // requests in work
    bool draining, closed, aborting, ended;
    StepRecord steps[KEPT_STEPS];
    Metrics metrics;
};

static const double latency_bounds[N_BUCKETS] = {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300};
static const double token_bounds[N_BUCKETS] = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                                               0.1,    0.2,   0.5,   1,     2,    5,    10};

static void histogram_add(Histogram *h, double value) {
    int i = 0;
    while (i < N_BUCKETS && value > h->bounds[i]) i++;
    h->counts[i]++;
    h->sum += value;
}

static bool is_gone(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

// Wait for `cond` or a moment. The lock is held.
static void wait_moment(Server *s, pthread_cond_t *cond) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += LOOK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L, until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(cond, &s->lock, &until);
}

// ---------------------------------------------------------------------------------------------
// Budgets

// False: the client has gone, or the server ends. A demand over the whole size is the caller's fault.
static bool budget_take(Server *s, Budget *b, size_t bytes, int fd) {
    Waiter me = {0};
    bool ok = true;
    pthread_mutex_lock(&s->lock);
    *(b->first ? &b->last->next : &b->first) = &me;
    b->last = &me;
    while (b->first != &me || b->used + bytes > b->size) {
        wait_moment(s, &s->budget_freed);
        pthread_mutex_unlock(&s->lock);
        ok = !is_gone(fd);
        pthread_mutex_lock(&s->lock);
        if (!(ok = ok && !s->aborting)) break;
    }
    Waiter **link = &b->first, *before = NULL;
    while (*link != &me) before = *link, link = &before->next;
    *link = me.next;
    if (b->last == &me) b->last = before;
    if (ok) b->used += bytes;
    pthread_cond_broadcast(&s->budget_freed); // whoever is next in line
    pthread_mutex_unlock(&s->lock);
    return ok;
}

static void budget_give(Server *s, Budget *b, size_t bytes) {
    if (!bytes) return;
    pthread_mutex_lock(&s->lock);
    b->used -= bytes;
    pthread_cond_broadcast(&s->budget_freed);
    pthread_mutex_unlock(&s->lock);
}

// ---------------------------------------------------------------------------------------------
// The engine's thread

// Have the engine's thread run a function between two steps, and wait for it. It runs under the lock.
static void engine_call(Server *s, void (*run)(Server *, void *), void *argument) {
    Task task = {.run = run, .argument = argument};
    pthread_mutex_lock(&s->lock);
    *(s->tasks ? &s->last_task->next : &s->tasks) = &task;
    s->last_task = &task;
    pthread_cond_signal(&s->engine_wake);
    while (!task.done) pthread_cond_wait(&s->task_done, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static void run_tasks(Server *s) {
    bool any = s->tasks != NULL;
    for (Task *t; (t = s->tasks); t->done = true) {
        s->tasks = t->next;
        t->run(s, t->argument);
    }
    if (any) pthread_cond_broadcast(&s->task_done);
}

static void job_finish(Server *s, Job *job) {
    Finish finish = job->seq->finish;
    job->finished = true;
    s->metrics.finished[finish - FINISH_STOP]++;
    histogram_add(&s->metrics.whole, now_seconds() - job->arrived);
}

// Tell the requests what the step has brought.
static void publish(Server *s) {
    double now = now_seconds();
    for (Job **link = &s->jobs, *job; (job = *link);) {
        int n = job->seq->n_tokens - job->seq->n_prompt;
        bool news = n > job->published || job->seq->finish != FINISH_NONE;
        for (; job->published < n; job->published++) {
            if (job->published)
                histogram_add(&s->metrics.between_tokens, now - job->latest);
            else
                histogram_add(&s->metrics.first_token, now - job->arrived);
            job->latest = now;
            s->metrics.generated_tokens++;
        }
        if (job->seq->finish != FINISH_NONE) {
            *link = job->next;
            job_finish(s, job);
        } else {
            link = &job->next;
        }
        if (news) pthread_cond_signal(job->news);
    }
}

static void engine_run(Server *s) {
    pthread_mutex_lock(&s->lock);
    while (!s->ended) {
        run_tasks(s);
        for (Job *job = s->jobs; job; job = job->next)
            if (job->cancel || s->aborting) engine_cancel(s->engine, job->seq);
        if (!s->jobs) {
            engine_step(s->engine); // which has nothing to do but to let go of a picture that nobody wants any more
            if (!s->ended) pthread_cond_wait(&s->engine_wake, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        engine_step(s->engine);
        pthread_mutex_lock(&s->lock);
        publish(s);
        s->steps[engine_last_step(s->engine)->n % KEPT_STEPS] = *engine_last_step(s->engine);
    }
    run_tasks(s);
    pthread_mutex_unlock(&s->lock);
}

// --- the tasks

typedef struct Submission {
    Request request;
    Job *job;
    Error *err;
} Submission;

static void task_submit(Server *s, void *argument) {
    Submission *sub = argument;
    sub->job->seq = engine_submit(s->engine, &sub->request, sub->err);
    if (!sub->job->seq) return;
    s->metrics.prompt_tokens += sub->request.n;
    Job **link = &s->jobs; // in the order of arrival
    while (*link) link = &(*link)->next;
    *link = sub->job;
}

static void task_release(Server *s, void *argument) {
    Job *job = argument;
    for (Job **link = &s->jobs; *link; link = &(*link)->next)
        if (*link == job) {
            *link = job->next;
            s->metrics.finished[FINISH_CANCELLED - FINISH_STOP]++;
            break;
        }
    engine_release(s->engine, job->seq);
}

static void task_map(Server *s, void *argument) { engine_map(s->engine, argument); }

static void task_flush(Server *s, void *argument) {
    (void)argument;
    engine_flush(s->engine);
}

// ---------------------------------------------------------------------------------------------
// A request

typedef struct Call Call;
typedef struct Route {
    const char *method, *path;
    void (*run)(Call *call);
    enum { OPEN = 1, QUEUES = 2 } how; // without a key; takes a place in the queue
} Route;

typedef struct Source {
    PictureSource base; // first, so that the pointers are the same
    Call *call;
    bool sizes_only; // a dry run: nothing is decoded
} Source;

typedef struct Choice {
    Answer answer;
    Job job;
    bool ended;         // its last chunk is written
    int told;           // tokens whose log-probabilities are written
    TextStream decoded; // of those, for the completions' text offsets
    size_t offset;
} Choice;

struct Call {
    Server *server;
    struct MHD_Connection *connection;
    Client *client;
    const Route *route;
    double began;
    time_t created;
    Error err; // with a status: the reply, whatever the body says
    enum MHD_Result queued;
    bool cut; // nothing more can be read from this connection
    int status;

    Text body;
    size_t body_bytes, received, body_charge, fetch_charge, picture_charge; // charges: taken from the budgets
    double fetch_until; // for all pictures of the request; 0: none has been fetched
    bool counted;       // in server->calls

    json_t *json;
    Source source;
    Generation how;
    Conversation chat;
    bool text; // /v1/completions
    char id[40];
    pthread_cond_t news;
    Choice choices[MAX_N];
    int planned, n_choices, prompt_tokens, written; // answers wanted, put to work; tokens of all prompts and answers
    Text out;                                       // of a stream: not sent yet
    size_t sent;
    bool streamed; // the last byte of it is in `out`
};

// --- replies

static bool is_closing(Server *s) {
    pthread_mutex_lock(&s->lock);
    bool closing = s->closed || s->aborting;
    pthread_mutex_unlock(&s->lock);
    return closing;
}

static void reply(Call *call, int status, const char *type, struct MHD_Response *response) {
    struct {
        const char *name, *value;
    } headers[] = {{"Content-Type", type}, {"Cache-Control", "no-store"}, {"X-Content-Type-Options", "nosniff"}};
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        MHD_add_response_header(response, headers[i].name, headers[i].value);
    if (status == 429 || status == 503) MHD_add_response_header(response, "Retry-After", "1");
    if (status == 405)
        MHD_add_response_header(response, "Allow", strcmp(call->route->method, "GET") ? "POST" : "GET, HEAD");
    if (status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (is_closing(call->server) || call->cut) MHD_add_response_header(response, "Connection", "close");
    call->status = status;
    call->queued = MHD_queue_response(call->connection, (unsigned)status, response);
    MHD_destroy_response(response);
}

static void reply_bytes(Call *call, int status, const char *type, char *bytes, size_t n) {
    reply(call, status, type, MHD_create_response_from_buffer(n, bytes, MHD_RESPMEM_MUST_FREE));
}

// Ends `value`.
static void reply_json(Call *call, int status, json_t *value) {
    char *text = need(json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(9)));
    json_decref(value);
    reply_bytes(call, status, "application/json", text, strlen(text));
}

static json_t *error_json(const Error *err) {
    const char *type = err->status == 401   ? "authentication_error"
                       : err->status == 404 ? "not_found_error"
                       : err->status == 429 ? "rate_limit_error"
                       : err->status >= 500 ? "server_error"
                                            : "invalid_request_error";
    return json_pack("{s:{s:s, s:s, s:o, s:n}}", "error", "message", err->message, "type", type, "param",
                     *err->param ? json_string(err->param) : json_null(), "code");
}

static void reply_error(Call *call) { reply_json(call, call->err.status, error_json(&call->err)); }

// ---------------------------------------------------------------------------------------------
// Pictures of a request

static bool call_gone(void *context) {
    Call *call = context;
    pthread_mutex_lock(&call->server->lock);
    bool aborting = call->server->aborting;
    pthread_mutex_unlock(&call->server->lock);
    return aborting || is_gone(call->client->fd);
}

// Why a wait has ended without what was waited for.
static bool fail_gone(const Call *call, Error *err) {
    pthread_mutex_lock(&call->server->lock);
    bool aborting = call->server->aborting;
    pthread_mutex_unlock(&call->server->lock);
    return aborting ? fail(err, 503, "the server was told to stop at once") : fail(err, 499, "the client has gone");
}

// file:// below --media-dir, wherever links lead.
static bool source_file(Server *s, const char *url, Picture *p, Error *err) {
    Text path = {0};
    Error hidden;
    char real[PATH_MAX];
    size_t n = strlen(s->media_dir);
    if (!n)
        return fail_at(err, "messages", "file:// pictures are not offered (start with --media-dir to allow a folder)");
    file_url_path(url, &path);
    bool ok = realpath(path.data, real) && strncmp(real, s->media_dir, n) == 0 && (real[n] == '/' || n == 1) &&
              read_file(real, &p->bytes, &hidden);
    free(path.data);
    return ok || fail_at(err, "messages", "this file:// picture is not there, or not in the folder that is served");
}

// Room for bytes that have come. Whoever waits for it holds some, so nobody waits past his time.
static bool fetch_room(void *context, size_t bytes) {
    Call *call = context;
    Server *s = call->server;
    Budget *b = &s->fetched;
    pthread_mutex_lock(&s->lock);
    while (b->used + bytes > b->size && now_seconds() < call->fetch_until && !s->aborting)
        wait_moment(s, &s->budget_freed);
    bool ok = b->used + bytes <= b->size;
    if (ok) b->used += bytes, call->fetch_charge += bytes;
    pthread_mutex_unlock(&s->lock);
    return ok;
}

static bool source_fetch(PictureSource *source, const char *url, Picture *p, Error *err) {
    Call *call = ((Source *)source)->call;
    Server *s = call->server;
    if (strncasecmp(url, "file:", 5) == 0) return source_file(s, url, p, err);
    if (strncasecmp(url, "http://", 7) && strncasecmp(url, "https://", 8))
        return fail_at(err, "messages", "a picture's URL begins with data:, http:// or https://");
    if (!call->fetch_until) call->fetch_until = now_seconds() + s->options->fetch_seconds;
    FetchRules rules = s->fetch;
    rules.seconds = call->fetch_until - now_seconds();
    rules.room = fetch_room, rules.gone = call_gone, rules.context = call;
    return fetch_url(&rules, url, s->options->fetch_bytes, &p->bytes, err);
}

static bool source_decode(PictureSource *source, Picture **pictures, int n, Error *err) {
    Source *src = (Source *)source;
    Call *call = src->call;
    Server *s = call->server;
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (!picture_probe(pictures[i], err)) return false;
        bytes += 3 * (size_t)pictures[i]->image.width * (size_t)pictures[i]->image.height;
    }
    if (src->sizes_only || !n) return true;
    if (bytes > s->pictures.size)
        return fail(err, 413, "its pictures take %zu bytes resized, the limit is %zu: lower max_pixels or their number",
                    bytes, s->pictures.size);
    if (!budget_take(s, &s->pictures, bytes, call->client->fd)) return fail_gone(call, err);
    call->picture_charge = bytes;
    bool ok = true;
    pthread_mutex_lock(&s->decoding);
    for (int i = 0; ok && i < n; i++) ok = picture_decode(pictures[i], s->work, err);
    pthread_mutex_unlock(&s->decoding);
    return ok;
}

// ---------------------------------------------------------------------------------------------
// Generation: from fields to sequences in the engine

static bool call_read_chat(Call *call, bool sizes_only) {
    Server *s = call->server;
    json_t *messages = json_object_get(call->json, "messages");
    Text begun = {0};
    if (!json_is_array(messages)) return fail_at(&call->err, "messages", "messages must be an array");
    call->source = (Source){{.config = engine_image_config(s->engine),
                             .most = s->options->max_images,
                             .most_text = s->most_text,
                             .fetch = source_fetch,
                             .decode = source_decode},
                            call,
                            sizes_only};
    bool ok = conversation_read(&call->chat, &call->source.base, s->model->tokenizer, messages, &call->how.tools,
                                &begun, &call->err);
    for (int i = 0; i < MAX_N && begun.n; i++) {
        Answer *a = &call->choices[i].answer;
        text_add(&a->text, begun.data, begun.n);
        a->begun = begun.n;
    }
    free(begun.data);
    json_object_del(call->json, "messages"); // a picture's base64 is the most of it
    budget_give(s, &s->fetched, call->fetch_charge);
    budget_give(s, &s->bodies, call->body_charge);
    call->fetch_charge = call->body_charge = 0;
    return ok;
}

// max_tokens of each answer, or what is wrong with it.
static bool call_limit(const Call *call, int prompt, int *most, Error *err) {
    int room = call->server->room;
    *most = call->how.max_tokens ? call->how.max_tokens : room - prompt;
    if (prompt >= room)
        return fail_at(err, "messages", "the prompt has %d tokens, the context %d: nothing is left for an answer",
                       prompt, room);
    return *most <= room - prompt ||
           fail_at(err, "max_tokens", "the prompt has %d tokens and max_tokens is %d: together over the context of %d",
                   prompt, *most, room);
}

// Bytes that the log-probabilities of so many tokens take until the reply is sent. A stream sends them as they come.
static size_t logprobs_bytes(const Call *call, size_t tokens) {
    if (!call->how.logprobs || call->how.stream) return 0;
    return tokens * (1 + (size_t)call->how.sampling.logprobs) * LOGPROB_BYTES;
}

// Put an answer to `ids` to work. Its seed is the request's plus its number.
static bool call_submit(Call *call, const int32_t *ids, size_t n) {
    Choice *c = &call->choices[call->n_choices];
    Submission sub = {.job = &c->job, .err = &call->err};
    int most;
    if (!n) return fail_at(&call->err, call->text ? "prompt" : "messages", "the prompt is empty");
    if (!call_limit(call, (int)(n < INT_MAX ? n : INT_MAX), &most, &call->err)) return false;
    if (logprobs_bytes(call, (size_t)call->planned * (size_t)most) > call->server->bodies.size)
        return fail_at(&call->err, "logprobs",
                       "log-probabilities of %d x %d tokens are too many for one reply: take a stream, or lower "
                       "max_tokens, n or top_logprobs",
                       call->planned, most);
    c->answer.seed = call->how.seeded ? call->how.sampling.seed + (uint64_t)call->n_choices : random_seed();
    c->answer.how = &call->how;
    c->job = (Job){.arrived = call->began, .news = &call->news};
    sub.request = (Request){.ids = ids,
                            .n = (int)n,
                            .images = call->chat.prompt.images,
                            .n_images = call->chat.prompt.n_images,
                            .sampling = call->how.sampling,
                            .max_tokens = most,
                            .biases = call->how.biases,
                            .n_biases = call->how.n_biases};
    sub.request.sampling.seed = c->answer.seed;
    memcpy(sub.request.salt, call->how.salt, 32);
    engine_call(call->server, task_submit, &sub);
    if (!c->job.seq && !*call->err.param)
        snprintf(call->err.param, sizeof call->err.param, "%s", call->text ? "prompt" : "messages");
    c->answer.seq = c->job.seq;
    call->n_choices += c->answer.seq != NULL;
    return c->answer.seq != NULL;
}

// Wait for news and read them. False: the client has gone, or the server ends.
static bool call_pump(Call *call) {
    Server *s = call->server;
    const Tokenizer *tok = s->model->tokenizer;
    int published[MAX_N];
    bool finished[MAX_N], news = false;
    pthread_mutex_lock(&s->lock);
    for (int look = 0; !news && look < 2; look++) {
        if (look) wait_moment(s, &call->news);
        for (int i = 0; i < call->n_choices; i++) {
            const Choice *c = &call->choices[i];
            published[i] = c->job.published, finished[i] = c->job.finished;
            news |= !c->answer.finished && (published[i] > c->answer.read || finished[i]);
        }
    }
    bool aborting = s->aborting;
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < call->n_choices; i++) {
        Choice *c = &call->choices[i];
        if (!c->answer.finished) answer_read(&c->answer, tok, published[i], finished[i]);
    }
    return !aborting && !is_gone(call->client->fd);
}

// No more tokens of this answer are wanted. Its sequence is read afterwards, so wait until the engine has let go.
static void choice_end(Call *call, Choice *c) {
    Server *s = call->server;
    pthread_mutex_lock(&s->lock);
    c->job.cancel = true;
    while (!c->job.finished) pthread_cond_wait(&call->news, &s->lock);
    pthread_mutex_unlock(&s->lock);
    call->written += c->answer.stopped ? c->answer.read : c->job.published;
}

static json_t *usage_json(const Call *call) {
    int cached = 0, image = 0, prompt = call->prompt_tokens;
    for (int i = 0; i < call->n_choices; i++) {
        const Sequence *q = call->choices[i].answer.seq;
        if (i == 0 || q->cached_tokens < cached) cached = q->cached_tokens;
        image = q->image_tokens;
    }
    return json_pack("{s:i, s:i, s:i, s:{s:i, s:i}}", "prompt_tokens", prompt, "completion_tokens", call->written,
                     "total_tokens", prompt + call->written, "prompt_tokens_details", "cached_tokens", cached,
                     "image_tokens", image);
}

static json_t *receipts_json(const Call *call) {
    json_t *list = json_array();
    for (int i = 0; i < call->n_choices; i++) {
        const Answer *a = &call->choices[i].answer;
        json_t *receipt = receipt_json(&call->chat, a, call->server->token_bytes, call->server->row_bytes);
        json_object_set_new(receipt, "seed", json_integer((json_int_t)a->seed));
        json_array_append_new(list, receipt);
    }
    return list;
}

static json_t *envelope_json(const Call *call, const char *object) {
    const Server *s = call->server;
    return json_pack("{s:s, s:s, s:I, s:s, s:s}", "id", call->id, "object", object, "created",
                     (json_int_t)call->created, "model", s->name, "system_fingerprint", s->fingerprint);
}

static void add_ending(const Call *call, json_t *object) {
    json_object_set_new(object, "usage", usage_json(call));
    json_object_set_new(object, "receipt", receipts_json(call));
}

static void add_warnings(const Call *call, json_t *object) {
    if (json_array_size(call->how.warnings)) json_object_set(object, "warnings", call->how.warnings);
}

// ---------------------------------------------------------------------------------------------
// A reply as a whole

static json_t *choice_logprobs(Call *call, Choice *c, int end) {
    const Tokenizer *tok = call->server->model->tokenizer;
    if (!call->how.logprobs) return json_null();
    json_t *out = call->text ? text_logprobs_json(&c->answer, tok, c->told, end, &c->decoded, &c->offset)
                             : chat_logprobs_json(&c->answer, tok, c->told, end);
    c->told = end;
    return out;
}

static json_t *choice_json(Call *call, int index) {
    Choice *c = &call->choices[index];
    Text text = {0};
    json_t *calls = json_array(), *out;
    Piece piece;
    text_add(&text, "", 0);
    while (answer_next(&c->answer, &piece))
        if (piece.call)
            json_array_append_new(calls, piece.call);
        else
            text_add(&text, piece.text, piece.n);
    json_t *content = text.n || !json_array_size(calls) ? json_stringn(text.data, text.n) : json_null();
    if (call->text) {
        out = json_pack("{s:i, s:o}", "index", index, "text", content);
    } else {
        json_t *message = json_pack("{s:s, s:o, s:n}", "role", "assistant", "content", content, "refusal");
        if (json_array_size(calls)) json_object_set(message, "tool_calls", calls);
        out = json_pack("{s:i, s:o}", "index", index, "message", message);
    }
    json_object_set_new(out, "logprobs", choice_logprobs(call, c, c->answer.read));
    json_object_set_new(out, "finish_reason", json_string(answer_finish(&c->answer)));
    json_decref(calls);
    free(text.data);
    return out;
}

// Memory for a large reply. Pictures, which the engine needs no more, go first: budgets are taken in one order only.
static bool call_reserve_reply(Call *call) {
    Server *s = call->server;
    size_t bytes = logprobs_bytes(call, (size_t)call->written);
    if (bytes <= SMALL_BODY) return true;
    for (int i = 0; i < call->chat.n; i++) image_free(&call->chat.pictures[i]->image);
    budget_give(s, &s->pictures, call->picture_charge);
    call->picture_charge = 0;
    if (!budget_take(s, &s->bodies, bytes, call->client->fd)) return fail_gone(call, &call->err);
    call->body_charge = bytes;
    return true;
}

static void reply_whole(Call *call) {
    json_t *choices = json_array();
    for (int left = call->n_choices; left;) {
        left = 0;
        if (!call_pump(call)) {
            json_decref(choices);
            fail_gone(call, &call->err);
            return reply_error(call);
        }
        for (int i = 0; i < call->n_choices; i++) left += !call->choices[i].answer.finished;
    }
    for (int i = 0; i < call->n_choices; i++) choice_end(call, &call->choices[i]);
    if (!call_reserve_reply(call)) {
        json_decref(choices);
        return reply_error(call);
    }
    for (int i = 0; i < call->n_choices; i++) json_array_append_new(choices, choice_json(call, i));
    json_t *out = envelope_json(call, call->text ? "text_completion" : "chat.completion");
    json_object_set_new(out, "choices", choices);
    add_ending(call, out);
    add_warnings(call, out);
    reply_json(call, 200, out);
}

// ---------------------------------------------------------------------------------------------
// A reply as a stream of events

static void put_event(Call *call, json_t *event) {
    char *text = need(json_dumps(event, JSON_COMPACT | JSON_REAL_PRECISION(9)));
    text_format(&call->out, "data: %s\n\n", text);
    free(text);
    json_decref(event);
}

// `delta` is ended: a chat's delta, or (completions) the text. NULL `finish`: more to come.
static json_t *chunk_json(Call *call, int index, json_t *delta, json_t *logprobs, const char *finish) {
    json_t *choice = json_pack("{s:i, s:o, s:o, s:o}", "index", index, call->text ? "text" : "delta", delta, "logprobs",
                               logprobs, "finish_reason", finish ? json_string(finish) : json_null());
    json_t *chunk = envelope_json(call, call->text ? "text_completion" : "chat.completion.chunk");
    json_object_set_new(chunk, "choices", json_pack("[o]", choice));
    if (call->how.include_usage) json_object_set_new(chunk, "usage", json_null());
    return chunk;
}

static void put_piece(Call *call, int index, const Piece *piece) {
    Choice *c = &call->choices[index];
    json_t *delta;
    if (piece->call) {
        json_object_set_new(piece->call, "index", json_integer(c->answer.calls - 1));
        delta = json_pack("{s:[o]}", "tool_calls", piece->call);
    } else {
        delta = json_stringn(piece->text, piece->n);
        if (!call->text) delta = json_pack("{s:o}", "content", delta);
    }
    put_event(call, chunk_json(call, index, delta, choice_logprobs(call, c, c->answer.read), NULL));
}

static void put_finish(Call *call, int index) {
    Choice *c = &call->choices[index];
    choice_end(call, c);
    c->ended = true;
    json_t *delta = call->text ? json_string("") : json_object();
    json_t *logprobs = c->told < c->answer.read ? choice_logprobs(call, c, c->answer.read) : json_null();
    json_t *chunk = chunk_json(call, index, delta, logprobs, answer_finish(&c->answer));
    bool last = true;
    for (int i = 0; i < call->n_choices; i++) last &= call->choices[i].ended;
    if (last && !call->how.include_usage) add_warnings(call, chunk);
    put_event(call, chunk);
}

static void put_ending(Call *call) {
    if (call->how.include_usage) {
        json_t *chunk = envelope_json(call, call->text ? "text_completion" : "chat.completion.chunk");
        json_object_set_new(chunk, "choices", json_array());
        add_ending(call, chunk);
        add_warnings(call, chunk);
        put_event(call, chunk);
    }
    text_format(&call->out, "data: [DONE]\n\n");
    call->streamed = true;
}

// Wait for more of the answers and write it.
static void stream_more(Call *call) {
    int left = 0;
    if (!call_pump(call)) {
        fail_gone(call, &call->err);
        put_event(call, error_json(&call->err));
        call->streamed = true;
        return;
    }
    for (int i = 0; i < call->n_choices; i++) {
        Choice *c = &call->choices[i];
        Piece piece;
        while (!c->ended && answer_next(&c->answer, &piece)) put_piece(call, i, &piece);
        if (!c->ended && c->answer.finished) put_finish(call, i);
        left += !c->ended;
    }
    if (!left) put_ending(call);
}

// libmicrohttpd counts idle seconds from the last byte sent, and a client that waits is not idle.
static void restart_timeout(Call *call) {
    MHD_set_connection_option(call->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    MHD_set_connection_option(call->connection, MHD_CONNECTION_OPTION_TIMEOUT,
                              (unsigned)call->server->options->idle_seconds);
}

static ssize_t stream_read(void *context, uint64_t position, char *out, size_t most) {
    Call *call = context;
    (void)position;
    while (call->sent == call->out.n) {
        if (call->streamed) return MHD_CONTENT_READER_END_OF_STREAM;
        call->out.n = call->sent = 0;
        stream_more(call);
    }
    size_t n = call->out.n - call->sent < most ? call->out.n - call->sent : most;
    memcpy(out, call->out.data + call->sent, n);
    call->sent += n;
    restart_timeout(call);
    return (ssize_t)n;
}

static void reply_stream(Call *call) {
    for (int i = 0; i < call->n_choices && !call->text; i++) {
        json_t *delta = json_pack("{s:s, s:s}", "role", "assistant", "content", "");
        put_event(call, chunk_json(call, i, delta, json_null(), NULL));
    }
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16 << 10, stream_read, call, NULL);
    MHD_add_response_header(r, "X-Accel-Buffering", "no"); // for balancers that would collect events
    reply(call, 200, "text/event-stream", r);
}

// ---------------------------------------------------------------------------------------------
// Routes

static void answer_call(Call *call, bool ok) {
    if (!ok)
        reply_error(call);
    else if (call->how.stream)
        reply_stream(call);
    else
        reply_whole(call);
}

static void chat_completions(Call *call) {
    Server *s = call->server;
    snprintf(call->id, sizeof call->id, "chatcmpl-%013llx", (unsigned long long)random_seed());
    bool ok = generation_read(&call->how, call->json, false, s->options->strict, s->model->tokenizer, &call->err) &&
              call_read_chat(call, false);
    const Ids *ids = &call->chat.prompt.ids;
    call->prompt_tokens = (int)ids->n, call->planned = call->how.n;
    for (int i = 0; ok && i < call->how.n; i++) ok = call_submit(call, ids->data, ids->n);
    answer_call(call, ok);
}

// What the request would take, and whether it fits.
static void chat_count(Call *call) {
    Server *s = call->server;
    MemoryMap map;
    Error why = {0};
    size_t bytes = 0;
    int most, prompt;
    if (!generation_read(&call->how, call->json, false, s->options->strict, s->model->tokenizer, &call->err) ||
        !call_read_chat(call, true))
        return reply_error(call);
    engine_call(s, task_map, &map);
    json_t *images = json_array();
    int image_total = 0;
    for (int i = 0; i < call->chat.n; i++) {
        const Image *im = &call->chat.pictures[i]->image;
        int tokens = image_tokens(im, call->source.base.config);
        image_total += tokens, bytes += 3 * (size_t)im->width * (size_t)im->height;
        json_array_append_new(images, json_pack("{s:[i,i], s:[i,i], s:i}", "source", im->source_width,
                                                im->source_height, "resized", im->width, im->height, "tokens", tokens));
    }
    prompt = (int)call->chat.prompt.ids.n;
    bool fits = call_limit(call, prompt, &most, &why);
    if (fits && bytes > s->pictures.size) fits = fail(&why, 413, "the pictures are over --picture-memory");
    json_t *memory =
        json_pack("{s:I, s:I, s:I, s:I, s:I}", "kv_bytes",
                  (json_int_t)((size_t)(prompt + (most > 0 ? most : 0)) * s->token_bytes), "kv_total",
                  (json_int_t)map.owners[OWNER_KV].bytes, "picture_bytes", (json_int_t)bytes, "picture_memory",
                  (json_int_t)s->pictures.size, "body_bytes", (json_int_t)call->body_bytes);
    json_t *out = json_pack("{s:i, s:i, s:o, s:i, s:i, s:b, s:o, s:o}", "prompt_tokens", prompt, "image_tokens",
                            image_total, "images", images, "max_tokens", most, "context", s->room, "fits", fits,
                            "reason", fits ? json_null() : json_string(why.message), "memory", memory);
    add_warnings(call, out);
    reply_json(call, 200, out);
}

// Token ids out of JSON.
static bool ids_read(json_t *list, int vocab, Ids *out, Error *err) {
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) {
        json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
        if (id < 0 || id >= vocab)
            return fail_at(err, "prompt", "item %zu of the prompt is no token id from 0 to %d", i, vocab - 1);
        ids_push(out, (int32_t)id);
    }
    return true;
}

// One prompt: a text or ids.
static bool prompt_read(Server *s, json_t *prompt, Ids *out, Error *err) {
    if (json_is_array(prompt)) return ids_read(prompt, s->model->config.text.vocab, out, err);
    if (!json_is_string(prompt)) return fail_at(err, "prompt", "a prompt is a string or an array of token ids");
    if (json_string_length(prompt) > s->most_text)
        return fail_at(err, "prompt", "a text of %zu bytes, over the %zu that are taken for a context of %d tokens",
                       json_string_length(prompt), s->most_text, s->room);
    return tokenizer_encode(s->model->tokenizer, json_string_value(prompt), json_string_length(prompt), out, err);
}

// The fields of OpenAI's older interface that are refused rather than ignored.
static bool completions_check(json_t *body, Error *err) {
    json_t *echo = json_object_get(body, "echo");
    if (echo && !json_is_null(echo) && !json_is_false(echo)) return fail_at(err, "echo", "echo is not offered");
    const char *const refused[] = {"suffix", "best_of"};
    for (int i = 0; i < 2; i++) {
        json_t *value = json_object_get(body, refused[i]);
        if (value && !json_is_null(value)) return fail_at(err, refused[i], "%s is not offered", refused[i]);
    }
    return true;
}

static bool completions_submit(Call *call) {
    Server *s = call->server;
    json_t *prompt = json_object_get(call->json, "prompt"), *first = json_array_get(prompt, 0);
    bool many = json_is_array(prompt) && !json_is_integer(first);
    size_t n = many ? json_array_size(prompt) : 1;
    if (!prompt || n < 1) return fail_at(&call->err, "prompt", "prompt is needed");
    if (n * (size_t)call->how.n > MAX_N)
        return fail_at(&call->err, "prompt", "%zu prompts with %d answers each: over %d", n, call->how.n, MAX_N);
    call->planned = (int)n * call->how.n;
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
        Ids ids = {0};
        json_t *one = many ? json_array_get(prompt, i) : prompt;
        ok = !many || json_typeof(one) == json_typeof(first) ||
             fail_at(&call->err, "prompt", "prompts are all strings or all arrays of token ids");
        ok = ok && prompt_read(s, one, &ids, &call->err);
        if (ok) call->prompt_tokens += (int)ids.n;
        for (int k = 0; ok && k < call->how.n; k++) ok = call_submit(call, ids.data, ids.n);
        free(ids.data);
    }
    return ok;
}

static void completions(Call *call) {
    Server *s = call->server;
    snprintf(call->id, sizeof call->id, "cmpl-%013llx", (unsigned long long)random_seed());
    call->text = true;
    answer_call(call,
                generation_read(&call->how, call->json, true, s->options->strict, s->model->tokenizer, &call->err) &&
                    completions_check(call->json, &call->err) && completions_submit(call));
}

static void tokenize(Call *call) {
    Server *s = call->server;
    Ids ids = {0};
    json_t *list = json_array();
    bool chat = json_object_get(call->json, "messages") != NULL;
    bool ok =
        generation_read(&call->how, call->json, !chat, s->options->strict, s->model->tokenizer, &call->err) &&
        (chat ? call_read_chat(call, true) : prompt_read(s, json_object_get(call->json, "prompt"), &ids, &call->err));
    const Ids *from = chat ? &call->chat.prompt.ids : &ids;
    for (size_t i = 0; ok && i < from->n; i++) json_array_append_new(list, json_integer(from->data[i]));
    json_t *out = json_pack("{s:I, s:i, s:o}", "count", (json_int_t)from->n, "max_model_len", s->room, "tokens", list);
    add_warnings(call, out);
    free(ids.data);
    if (ok) return reply_json(call, 200, out);
    json_decref(out);
    reply_error(call);
}

static void detokenize(Call *call) {
    json_t *tokens = json_object_get(call->json, "tokens");
    Text text = {0};
    text_add(&text, "", 0);
    bool ok = json_is_array(tokens) || fail_at(&call->err, "tokens", "tokens must be an array of ids");
    ok = ok && ids_text(call->server->model->tokenizer, tokens, &text, &call->err);
    if (ok)
        reply_json(call, 200, json_pack("{s:o}", "prompt", json_stringn(text.data, text.n)));
    else
        reply_error(call);
    free(text.data);
}

static json_t *model_json(const Server *s) {
    return json_pack("{s:s, s:s, s:I, s:s, s:i}", "id", s->name, "object", "model", "created", (json_int_t)s->created,
                     "owned_by", "vlm.c", "max_model_len", s->room);
}

static void models(Call *call) {
    reply_json(call, 200, json_pack("{s:s, s:[o]}", "object", "list", "data", model_json(call->server)));
}

static void one_model(Call *call) { reply_json(call, 200, model_json(call->server)); }

static void health(Call *call) {
    Server *s = call->server;
    pthread_mutex_lock(&s->lock);
    bool draining = s->draining;
    pthread_mutex_unlock(&s->lock);
    reply_json(call, draining ? 503 : 200, json_pack("{s:s}", "status", draining ? "draining" : "ok"));
}

static void flush_cache(Call *call) {
    engine_call(call->server, task_flush, NULL);
    reply_json(call, 200, json_pack("{s:s}", "status", "ok"));
}

static void memory(Call *call) {
    Server *s = call->server;
    MemoryMap map;
    engine_call(s, task_map, &map);
    pthread_mutex_lock(&s->lock);
    size_t bodies = s->bodies.used + s->fetched.used, pictures = s->pictures.used;
    pthread_mutex_unlock(&s->lock);
    reply_json(call, 200, map_json(&map, s->work->size, bodies, pictures));
}

static void steps(Call *call) {
    Server *s = call->server;
    const char *given = MHD_lookup_connection_value(call->connection, MHD_GET_ARGUMENT_KIND, "after");
    long long after = given ? strtoll(given, NULL, 10) : 0;
    json_t *list = json_array();
    pthread_mutex_lock(&s->lock);
    int64_t last = 0;
    for (int i = 0; i < KEPT_STEPS; i++)
        if (s->steps[i].n > last) last = s->steps[i].n;
    for (int64_t n = last > KEPT_STEPS ? last - KEPT_STEPS + 1 : 1; n <= last; n++) {
        const StepRecord *r = &s->steps[n % KEPT_STEPS];
        if (n <= after) continue;
        json_array_append_new(
            list, json_pack("{s:I, s:f, s:f, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "n", (json_int_t)n, "start",
                            (r->start - s->started) * 1e3, "ms", r->seconds * 1e3, "decode", r->decode, "prefill",
                            r->prefill, "patches", r->patches, "running", r->running, "waiting", r->waiting, "kv_held",
                            r->blocks_held, "kv_cached", r->blocks_cached, "image_slots", r->slots_used));
    }
    pthread_mutex_unlock(&s->lock);
    reply_json(call, 200, json_pack("{s:o}", "steps", list));
}

// --- /metrics, in the names of the field

static void put_histogram(Text *out, const Histogram *h) {
    int64_t count = 0;
    text_format(out, "# HELP %s %s\n# TYPE %s histogram\n", h->name, h->help, h->name);
    for (int i = 0; i < N_BUCKETS; i++) {
        count += h->counts[i];
        text_format(out, "%s_bucket{le=\"%g\"} %lld\n", h->name, h->bounds[i], (long long)count);
    }
    count += h->counts[N_BUCKETS];
    text_format(out, "%s_bucket{le=\"+Inf\"} %lld\n%s_sum %.9g\n%s_count %lld\n", h->name, (long long)count, h->name,
                h->sum, h->name, (long long)count);
}

static void put_metric(Text *out, const char *type, const char *name, const char *help, double value) {
    text_format(out, "# HELP %s %s\n# TYPE %s %s\n%s %.15g\n", name, help, name, type, name, value);
}

static void put_map(Text *out, const MemoryMap *m) {
    put_metric(out, "gauge", "vlm_num_requests_running", "Sequences that the engine computes.", m->running);
    put_metric(out, "gauge", "vlm_num_requests_waiting", "Sequences that wait for room.", m->waiting);
    put_metric(out, "gauge", "vlm_kv_cache_usage_perc", "KV blocks held, of all: 1 is full.",
               (double)m->blocks_held / m->blocks);
    put_metric(out, "counter", "vlm_prefix_cache_queries_total", "Tokens of prompts admitted.",
               (double)m->prefix_queries);
    put_metric(out, "counter", "vlm_prefix_cache_hits_total", "Tokens of them that were cached.",
               (double)m->prefix_hits);
    put_metric(out, "counter", "vlm_mm_cache_queries_total", "Pictures looked up.",
               (double)(m->image_hits + m->image_misses));
    put_metric(out, "counter", "vlm_mm_cache_hits_total", "Pictures that were cached.", (double)m->image_hits);
    put_metric(out, "counter", "vlm_num_preemptions_total", "Sequences set back to make room.", (double)m->preemptions);
    text_format(out, "# HELP vlm_memory_bytes Bytes by owner.\n# TYPE vlm_memory_bytes gauge\n");
    for (const Owner *o = m->owners; o < m->owners + N_OWNERS; o++)
        text_format(out,
                    "vlm_memory_bytes{owner=\"%s\",kind=\"planned\"} %zu\nvlm_memory_bytes{owner=\"%s\",kind=\"used\"} "
                    "%zu\nvlm_memory_bytes{owner=\"%s\",kind=\"peak\"} %zu\n",
                    o->name, o->bytes, o->name, o->used, o->name, o->peak);
}

static void metrics(Call *call) {
    static const char *const finish[] = {"stop", "length", "abort"};
    Server *s = call->server;
    MemoryMap map;
    Text out = {0};
    engine_call(s, task_map, &map);
    put_map(&out, &map);
    pthread_mutex_lock(&s->lock);
    const Metrics m = s->metrics;
    pthread_mutex_unlock(&s->lock);
    put_metric(&out, "counter", "vlm_prompt_tokens_total", "Tokens of prompts.", (double)m.prompt_tokens);
    put_metric(&out, "counter", "vlm_generation_tokens_total", "Tokens written.", (double)m.generated_tokens);
    put_histogram(&out, &m.first_token);
    put_histogram(&out, &m.between_tokens);
    put_histogram(&out, &m.whole);
    text_format(&out, "# HELP vlm_request_success_total Answers by how they ended.\n# TYPE vlm_request_success_total "
                      "counter\n");
    for (int i = 0; i < 3; i++)
        text_format(&out, "vlm_request_success_total{finished_reason=\"%s\"} %lld\n", finish[i],
                    (long long)m.finished[i]);
    text_format(&out, "# HELP vlm_http_requests_total Requests by status.\n# TYPE vlm_http_requests_total counter\n");
    for (int i = 0; i < 600; i++)
        if (m.http[i]) text_format(&out, "vlm_http_requests_total{code=\"%d\"} %lld\n", i, (long long)m.http[i]);
    reply_bytes(call, 200, "text/plain; version=0.0.4", out.data, out.n);
}

// --- the page

__asm__(".section .rodata\n.global page_html, page_html_end\npage_html: .incbin \"page.html\"\npage_html_end: .byte 0\n"
        ".previous\n");
extern const char page_html[], page_html_end[];

static void page(Call *call) {
    struct MHD_Response *r =
        MHD_create_response_from_buffer((size_t)(page_html_end - page_html), (void *)page_html, MHD_RESPMEM_PERSISTENT);
    MHD_add_response_header(r, "Content-Security-Policy",
                            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                            "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                            "frame-ancestors 'none'; require-trusted-types-for 'script'");
    reply(call, 200, "text/html; charset=utf-8", r);
}

static const Route routes[] = {
    {"GET", "/", page, OPEN},
    {"GET", "/health", health, OPEN},
    {"GET", "/v1/models", models, 0},
    {"POST", "/v1/chat/completions", chat_completions, QUEUES},
    {"POST", "/v1/chat/completions/count", chat_count, QUEUES},
    {"POST", "/v1/completions", completions, QUEUES},
    {"POST", "/tokenize", tokenize, QUEUES},
    {"POST", "/detokenize", detokenize, 0},
    {"GET", "/memory", memory, 0},
    {"GET", "/steps", steps, 0},
    {"GET", "/metrics", metrics, 0},
    {"POST", "/flush_cache", flush_cache, 0},
};

static bool route_find(Call *call, const char *method, const char *path) {
    static const Route this_model = {"GET", "/v1/models/", one_model, 0};
    const Server *s = call->server;
    const char *as = strcmp(method, "HEAD") == 0 ? "GET" : method;
    for (const Route *r = routes; r < routes + sizeof routes / sizeof *routes; r++)
        if (strcmp(path, r->path) == 0) call->route = r;
    size_t n = strlen(this_model.path);
    if (strncmp(path, this_model.path, n) == 0 && strcmp(path + n, s->name) == 0) call->route = &this_model;
    if (!call->route) return fail(&call->err, 404, "there is nothing at %.100s", path);
    return strcmp(as, call->route->method) == 0 ||
           fail(&call->err, 405, "%s takes %s only", call->route->path, call->route->method);
}

// ---------------------------------------------------------------------------------------------
// From head to reply

static const char *header(const Call *call, const char *name) {
    return MHD_lookup_connection_value(call->connection, MHD_HEADER_KIND, name);
}

static bool key_fits(const Call *call) {
    const char *key = call->server->options->api_key, *given = NULL;
    size_t n = 0, blanks;
    if (!key) return true;
    MHD_lookup_connection_value_n(call->connection, MHD_HEADER_KIND, "Authorization", strlen("Authorization"), &given,
                                  &n);
    if (!given || n < 7 || strncasecmp(given, "Bearer ", 7) != 0) return false;
    blanks = 7 + strspn(given + 7, " ");
    return n - blanks == strlen(key) && CRYPTO_memcmp(given + blanks, key, n - blanks) == 0;
}

typedef struct HeadCheck {
    int lengths, bad_names;
} HeadCheck;

static enum MHD_Result check_header(void *context, enum MHD_ValueKind kind, const char *name, const char *value) {
    HeadCheck *check = context;
    (void)kind, (void)value;
    check->lengths += strcasecmp(name, "Content-Length") == 0;
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~");
    check->bad_names += !n || name[n];
    return MHD_YES;
}

// Bytes of the body: as declared, or SIZE_MAX when its end shows by itself. A head that can be read in two ways is an
// attempt to have a proxy in front see another request than we do.
static bool body_length(Call *call, size_t *out) {
    const char *length = header(call, "Content-Length"), *coding = header(call, "Transfer-Encoding");
    HeadCheck check = {0};
    *out = SIZE_MAX;
    MHD_get_connection_values(call->connection, MHD_HEADER_KIND, check_header, &check);
    if (check.bad_names) return fail(&call->err, 400, "a header's name has a character that none may have");
    if (check.lengths > 1 || (length && coding)) return fail(&call->err, 400, "the head gives the body's length twice");
    if (coding && strcasecmp(coding, "chunked"))
        return fail(&call->err, 400, "no Transfer-Encoding but chunked is taken");
    if (coding) return true;
    if (!length) return *out = 0, true;
    char *end;
    errno = 0;
    unsigned long long n = strtoull(length, &end, 10);
    if (*end || *length < '0' || *length > '9') return fail(&call->err, 400, "Content-Length is no number");
    *out = errno || n >= SIZE_MAX ? SIZE_MAX - 1 : n;
    return true;
}

// A place in the queue.
static bool call_enter(Call *call) {
    Server *s = call->server;
    pthread_mutex_lock(&s->lock);
    bool closed = s->closed || s->aborting, full = s->calls >= s->options->max_queue;
    call->counted = !closed && !full;
    s->calls += call->counted;
    pthread_mutex_unlock(&s->lock);
    if (closed) return fail(&call->err, 503, "the server is ending");
    return !full || fail(&call->err, 429, "%d requests are in work, the limit is %d: try again later",
                         s->options->max_queue, s->options->max_queue);
}

// All that the head decides. `length` gets the body's.
static bool call_admit(Call *call, const char *method, const char *path, size_t *length) {
    Server *s = call->server;
    size_t most = s->options->max_body;
    bool known = body_length(call, length) && route_find(call, method, path);
    if (!(known && call->route->how & OPEN) && !key_fits(call))
        return fail(&call->err, 401, "the API key is missing or wrong");
    if (!known) return false;
    if (*length != SIZE_MAX && *length > most)
        return fail(&call->err, 413, "the body has %zu bytes, the limit is %zu", *length, most);
    if (call->route->how & QUEUES && !call_enter(call)) return false;
    size_t charge = 2 * (*length < most ? *length : most); // it and the strings in it
    if (charge <= SMALL_BODY) return true;
    if (charge > s->bodies.size) charge = s->bodies.size;
    if (!budget_take(s, &s->bodies, charge, call->client->fd)) return fail_gone(call, &call->err);
    call->body_charge = charge;
    return true;
}

// Read past a body that nobody wants, for a moment: a connection that is closed with bytes unread is reset, and its
// client does not see the reply.
static void skip_body(int fd) {
    enum { SILENCE_MS = 200, MOST_SECONDS = 5 };
    char bytes[1 << 14];
    struct pollfd p = {.fd = fd, .events = POLLIN};
    for (double end = now_seconds() + MOST_SECONDS; now_seconds() < end;)
        if (poll(&p, 1, SILENCE_MS) <= 0 || recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) <= 0) return;
}

static void stage_set(Call *call, Stage stage) {
    Server *s = call->server;
    pthread_mutex_lock(&s->lock);
    call->client->stage = stage;
    call->client->since = now_seconds();
    call->client->received = 0;
    pthread_mutex_unlock(&s->lock);
}

static Call *call_open(Server *s, struct MHD_Connection *connection, const char *method, const char *path) {
    Call *call = need(calloc(1, sizeof *call));
    call->server = s;
    call->connection = connection;
    call->client = (Client *)MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    call->began = now_seconds(), call->created = time(NULL);
    pthread_cond_init(&call->news, NULL);
    stage_set(call, STAGE_WORK); // waiting for memory is no fault of the client's
    MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    size_t length = 0;
    if (!call_admit(call, method, path, &length) && length > SMALL_BODY) {
        call->cut = true;
        skip_body(call->client->fd);
        reply_error(call);
    }
    stage_set(call, call->status ? STAGE_WORK : STAGE_BODY);
    restart_timeout(call);
    return call;
}

// A piece of the body. False: cut the connection.
static bool call_receive(Call *call, const char *bytes, size_t n) {
    Server *s = call->server;
    size_t most = s->options->max_body;
    call->received += n;
    pthread_mutex_lock(&s->lock);
    call->client->received = call->received;
    pthread_mutex_unlock(&s->lock);
    if (call->received > most && !call->err.status)
        fail(&call->err, 413, "the body is over the limit of %zu bytes", most);
    if (call->err.status) return call->received <= most + SMALL_BODY; // read past it, so that the client sees the reply
    text_add(&call->body, bytes, n);
    return true;
}

static void call_run(Call *call) {
    Server *s = call->server;
    stage_set(call, STAGE_WORK);
    MHD_set_connection_option(call->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    call->body_bytes = call->body.n;
    if (!call->err.status && strcmp(call->route->method, "POST") == 0 && call->route->run != flush_cache)
        call->json = json_read(call->body.data ? call->body.data : "", call->body.n, &call->err);
    free(call->body.data);
    call->body = (Text){0};
    const char *model = json_string_value(json_object_get(call->json, "model"));
    json_t *given = json_object_get(call->json, "model");
    if (given && !json_is_null(given) && !model) fail_at(&call->err, "model", "model must be a string");
    if (s->options->strict && model && strcmp(model, s->name) && !call->err.status) {
        fail_at(&call->err, "model", "this server has the model \"%.100s\" only", s->name);
        call->err.status = 404;
    }
    if (call->err.status)
        reply_error(call);
    else
        call->route->run(call);
    restart_timeout(call);
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *bytes, size_t *n, void **state) {
    (void)version;
    Call *call = *state;
    if (!call) {
        *state = call = call_open(context, connection, method, path);
        return call->status ? call->queued : MHD_YES;
    }
    if (*n) {
        bool go_on = call_receive(call, bytes, *n);
        *n = 0;
        return go_on ? MHD_YES : MHD_NO;
    }
    call_run(call);
    return call->queued;
}

static void call_log(const Call *call) {
    const Route *r = call->route;
    fprintf(stderr, "%s %s %d %.0f ms", r ? r->method : "-", r ? r->path : "(no such path)", call->status,
            (now_seconds() - call->began) * 1e3);
    if (call->n_choices) fprintf(stderr, ", %d+%d tokens", call->prompt_tokens, call->written);
    if (call->err.status && call->status != 200) {
        fputs(": ", stderr);
        put_clean(stderr, call->err.message, strlen(call->err.message), false);
    }
    fputc('\n', stderr);
}

// The reply is sent, or the connection is lost: give everything back.
static void on_completed(void *context, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode why) {
    Server *s = context;
    Call *call = *state;
    (void)connection, (void)why;
    if (!call) return;
    if (!call->status) call->status = 499; // it went before there was a reply
    for (int i = 0; i < MAX_N; i++) {
        if (i < call->n_choices) engine_call(s, task_release, &call->choices[i].job);
        free(call->choices[i].answer.text.data);
    }
    if (!s->options->quiet) call_log(call);
    conversation_free(&call->chat);
    generation_free(&call->how);
    json_decref(call->json);
    free(call->body.data);
    free(call->out.data);
    budget_give(s, &s->pictures, call->picture_charge);
    budget_give(s, &s->fetched, call->fetch_charge);
    budget_give(s, &s->bodies, call->body_charge);
    stage_set(call, STAGE_IDLE);
    pthread_mutex_lock(&s->lock);
    s->calls -= call->counted;
    s->metrics.http[call->status]++;
    pthread_mutex_unlock(&s->lock);
    pthread_cond_destroy(&call->news);
    free(call);
    *state = NULL;
}

// ---------------------------------------------------------------------------------------------
// Clients and the housekeeper

static void on_connection(void *context, struct MHD_Connection *connection, void **socket_context,
                          enum MHD_ConnectionNotificationCode what) {
    Server *s = context;
    pthread_mutex_lock(&s->lock);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        Client *c = need(calloc(1, sizeof *c));
        c->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        c->since = now_seconds();
        c->next = s->clients;
        if (c->next) c->next->before = c;
        s->clients = c;
        *socket_context = c;
    } else {
        Client *c = *socket_context;
        *(c->before ? &c->before->next : &s->clients) = c->next;
        if (c->next) c->next->before = c->before;
        free(c);
    }
    pthread_mutex_unlock(&s->lock);
}

// Close connections whose head or body takes too long. What comes from us then is all that is sent on them.
static void drop_slow(Server *s) {
    static const char reply[] = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    double now = now_seconds(), head = s->options->header_seconds, idle = s->options->idle_seconds;
    pthread_mutex_lock(&s->lock);
    bool hurry = s->bodies.first != NULL;
    double grace = hurry && idle > HURRY_SECONDS ? HURRY_SECONDS : idle, rate = hurry ? HURRY_RATE : BODY_RATE;
    for (Client *c = s->clients; c; c = c->next) {
        double most = c->stage == STAGE_HEAD   ? head
                      : c->stage == STAGE_BODY ? grace + (double)c->received / rate
                      : c->stage == STAGE_IDLE ? idle + head
                                               : HUGE_VAL;
        if (now - c->since <= most) continue;
        if (c->stage != STAGE_IDLE) s->metrics.http[408]++;
        if (c->stage != STAGE_IDLE && send(c->fd, reply, sizeof reply - 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) errno = 0;
        shutdown(c->fd, SHUT_RDWR);
        c->since = HUGE_VAL; // once
    }
    pthread_mutex_unlock(&s->lock);
}

static void *housekeep(void *context) {
    Server *s = context;
    sigset_t signals;
    const struct timespec tick = {.tv_nsec = 100000000};
    double close_at = HUGE_VAL, leave_at = HUGE_VAL;
    int listening = -1;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT);
    for (bool left = true; left;) {
        int got = sigtimedwait(&signals, NULL, &tick);
        drop_slow(s);
        pthread_mutex_lock(&s->lock);
        if (got > 0 && s->draining && !s->aborting) {
            s->aborting = true;
            leave_at = now_seconds() + 1; // for the clients to be told
        }
        if (got > 0 && !s->draining) {
            s->draining = true;
            close_at = now_seconds() + (got == SIGTERM ? s->options->drain : 0);
            if (!s->options->quiet) fputs("vlm serve: finishing what runs; again to stop at once\n", stderr);
        }
        bool close_now = !s->closed && s->draining && (s->aborting || now_seconds() >= close_at);
        if (close_now) s->closed = true;
        left = !s->closed || (s->calls && now_seconds() < leave_at);
        pthread_cond_signal(&s->engine_wake);
        pthread_mutex_unlock(&s->lock);
        if (close_now && (listening = MHD_quiesce_daemon(s->daemon)) >= 0) close(listening);
    }
    MHD_stop_daemon(s->daemon); // waits for the connections' threads, whose tasks the engine still runs
    pthread_mutex_lock(&s->lock);
    s->ended = true;
    pthread_cond_signal(&s->engine_wake);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

// ---------------------------------------------------------------------------------------------
// Start

// A listening socket at host and port. `port` gets the one taken.
static int listen_at(const ServeOptions *o, int *port, Error *err) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *found;
    struct sockaddr_storage at;
    socklen_t n = sizeof at;
    char number[8];
    int one = 1, fd = -1;
    snprintf(number, sizeof number, "%d", o->port);
    int why = getaddrinfo(o->host, number, &hints, &found);
    if (why) return fail(err, 500, "--host '%.100s': %s", o->host, gai_strerror(why)), -1;
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
              bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1024) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &n) == 0;
    freeaddrinfo(found);
    if (!ok) {
        fail(err, 500, "cannot listen at %.100s, port %d: %s", o->host, o->port, strerror(errno));
        if (fd >= 0) close(fd);
        return -1;
    }
    *port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                           : ((struct sockaddr_in *)&at)->sin_port);
    return fd;
}

static void server_init(Server *s) {
    const ServeOptions *o = s->options;
    const char *source = modelfile_text(s->model->file, "source");
    MemoryMap map;
    engine_map(s->engine, &map);
    snprintf(s->name, sizeof s->name, "%s", o->model_name);
    snprintf(s->fingerprint, sizeof s->fingerprint, "vlm-%.8s", source ? source : "0");
    int kv = map.blocks * KV_BLOCK, ctx = engine_options(s->engine)->ctx;
    s->room = kv < ctx ? kv : ctx;
    s->most_text = (size_t)s->room * TEXT_PER_TOKEN + (64 << 10);
    s->token_bytes = map.owners[OWNER_KV].bytes / (size_t)kv;
    s->row_bytes = (size_t)s->model->config.text.hidden * sizeof(float);
    s->bodies.size = o->body_memory, s->pictures.size = o->picture_memory, s->fetched.size = FETCHES * o->fetch_bytes;
    s->started = now_seconds(), s->created = time(NULL);
    s->metrics.first_token = (Histogram){.name = "vlm_time_to_first_token_seconds",
                                         .help = "From the request's head to the first token.",
                                         .bounds = latency_bounds};
    s->metrics.between_tokens = (Histogram){
        .name = "vlm_inter_token_latency_seconds", .help = "From one token to the next.", .bounds = token_bounds};
    s->metrics.whole = (Histogram){.name = "vlm_e2e_request_latency_seconds",
                                   .help = "From the request's head to the last token.",
                                   .bounds = latency_bounds};
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->decoding, NULL);
    pthread_cond_init(&s->engine_wake, NULL);
    pthread_cond_init(&s->task_done, NULL);
    pthread_cond_init(&s->budget_freed, NULL);
}

static bool server_rules(Server *s, Error *err) {
    const ServeOptions *o = s->options;
    s->fetch.seconds = o->fetch_seconds;
    if (o->allow_images_from && !networks_parse(o->allow_images_from, &s->fetch.allowed, &s->fetch.n_allowed, err))
        return false;
    if (o->media_dir && !realpath(o->media_dir, s->media_dir))
        return fail(err, 500, "--media-dir %.100s: %s", o->media_dir, strerror(errno));
    return true;
}

static void log_nothing(void *context, const char *format, va_list args) { (void)context, (void)format, (void)args; }

static size_t unescape(void *context, struct MHD_Connection *connection, char *s) {
    (void)context, (void)connection;
    return percent_decode(s);
}

static bool server_start(Server *s, int fd, Error *err) {
    const ServeOptions *o = s->options;
    const unsigned flags = MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL |
                           MHD_USE_ITC | MHD_USE_ERROR_LOG;
    s->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, log_nothing, NULL,
                                 MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
                                 (unsigned)o->max_connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)o->idle_seconds,
                                 MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEAD_MEMORY, MHD_OPTION_THREAD_STACK_SIZE,
                                 (size_t)THREAD_STACK, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_UNESCAPE_CALLBACK,
                                 unescape, NULL, MHD_OPTION_NOTIFY_COMPLETED, on_completed, s,
                                 MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_END);
    return s->daemon || fail(err, 500, "the HTTP server does not start");
}

bool serve(const Model *model, Engine *engine, Workspace *work, const ServeOptions *options, Error *err) {
    Server *s = need(calloc(1, sizeof *s));
    *s = (Server){.options = options, .model = model, .engine = engine, .work = work};
    sigset_t signals;
    pthread_t housekeeper;
    int port, fd = -1;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); // the housekeeper asks for them
    signal(SIGPIPE, SIG_IGN);
    mallopt(M_ARENA_MAX, 2);               // connections come and go, and so would heaps of their threads
    mallopt(M_MMAP_THRESHOLD, SMALL_BODY); // a body's bytes go back to the system when it is done with
    json_object_seed(0);                   // before threads would race for it
    curl_global_init(CURL_GLOBAL_DEFAULT);
    server_init(s);
    bool ok = server_rules(s, err) && (fd = listen_at(options, &port, err)) >= 0 && server_start(s, fd, err);
    if (ok) {
        bool v6 = strchr(options->host, ':') != NULL;
        printf("vlm serve: http://%s%s%s:%d\n", v6 ? "[" : "", options->host, v6 ? "]" : "", port);
        fflush(stdout);
        pthread_create(&housekeeper, NULL, housekeep, s);
        engine_run(s);
        pthread_join(housekeeper, NULL);
    } else if (fd >= 0) {
        close(fd);
    }
    curl_global_cleanup();
    free(s->fetch.allowed);
    free(s);
    return ok;
}
