// chat.c: main(). The command line, the answers to it, and the conversation in a terminal.
//
//   argv -> Settings -> Session (model, engine, workspace for pictures)
//                          |
//   -p, piped text, --chat, --chats, REPL -> Conversation (ids, pictures)
//                          |
//                       Answer: submit, step, step, ... -> text as it comes, or one JSON object
//
// All five ways in end in the same conversation_add() and answer_start(), so that they cannot
// give the model different ids.
#include "request.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <omp.h>
#include <openssl/evp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <wctype.h>
// libedit has a `Tokenizer` of its own, which we do not use.
#define Tokenizer EditTokenizer
#include <histedit.h>
#undef Tokenizer

#define VERSION "0.1"

static volatile sig_atomic_t interrupted; // Ctrl-C was pressed

static void on_interrupt(int signal) {
    (void)signal;
    interrupted = 1;
}

// ---------------------------------------------------------------------------------------------
// Small helpers

// "12.3 MiB" for a size in bytes; returns `out`.
static const char *size_text(char out[static 24], double bytes) {
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    for (; bytes >= 1024 && u < 4; u++) bytes /= 1024;
    snprintf(out, 24, bytes == floor(bytes) ? "%.0f %s" : "%.1f %s", bytes, unit[u]);
    return out;
}

// ---------------------------------------------------------------------------------------------
// The command line: one table gives the parser, the checks and the help.

typedef enum Command {
    CHAT = 1,
    MAP = 2,
    TOKENIZE = 4,
    BENCH = 8,
    SERVE = 16,
    HELP = 32,
    PLANNED = CHAT | MAP | BENCH | SERVE, // what plans an engine's memory
    ANY = PLANNED | TOKENIZE
} Command;

typedef struct Settings {
    Command command;
    const char *model, *prompt, *system, *device, *shape, *type, *chat, *chats, *load, *roofline;
    const char **images; // owned; the strings are argv's
    int n_images;
    EngineOptions engine;
    ServeOptions serve;
    BenchOptions bench;
    Sampling sampling; // but for these two:
    int64_t seed;      // -1: a random one for each answer
    int logprobs;      // -1: none
    int max_tokens, threads;
    bool json, decode, help, version;
} Settings;

typedef enum Kind { FLAG, TEXT, LIST, INT, LONG, SIZE, REAL } Kind; // of the field in Settings

typedef struct Option {
    int letter; // 0: none
    const char *name, *argument;
    Kind kind;
    size_t offset; // of the field in Settings
    double low, high;
    unsigned commands; // that take it; 0: a heading of the help
    const char *help;
} Option;

#define AT(field) offsetof(Settings, field)
static const double MANY = 1 << 20, MOST_BYTES = 0x1p50;

// clang-format off
static const Option options[] = {
    {.name = "common"},
    {'m', "model", "FILE", TEXT, AT(model), 0, 0, ANY, "model file (default: the small one in tiny/)"},
    {'i', "image", "IMAGE", LIST, AT(images), 0, 0, CHAT, "picture: JPEG, PNG, GIF or BMP; again for more"},
    {'p', "prompt", "PROMPT", TEXT, AT(prompt), 0, 0, CHAT, "answer this and leave"},
    {0, "chat", "FILE", TEXT, AT(chat), 0, 0, CHAT, "answer a conversation: OpenAI's JSON array of messages"},
    {0, "chats", "FILE", TEXT, AT(chats), 0, 0, CHAT, "one such array a line, many at once; JSON lines out"},
    {0, "device", "NAME", TEXT, AT(device), 0, 0, ANY, "where to compute: cpu, cuda (the default), null (plans only)"},
    {0, "threads", "N", INT, AT(threads), 1, 1024, ANY, "CPU threads (default: the cores that are ours)"},
    {0, "memory", "SIZE", SIZE, AT(engine.memory), 1, MOST_BYTES, PLANNED, "bytes for everything: 512M, 2G"},
    {0, "ctx", "N", INT, AT(engine.ctx), 1, MANY, PLANNED, "tokens of a conversation, answers too"},
    {0, "max-batch-tokens", "N", INT, AT(engine.max_batch_tokens), 1, MANY, PLANNED, "tokens that a step computes"},
    {0, "max-seqs", "N", INT, AT(engine.max_seqs), 1, 4096, PLANNED, "conversations that run together"},
    {0, "max-pixels", "N", LONG, AT(engine.max_pixels), 1, 0x1p31, PLANNED, "of a resized picture (fewer: faster)"},
    {0, "image-cache", "SIZE", SIZE, AT(engine.image_cache), 1, MOST_BYTES, PLANNED, "bytes for pictures seen"},
    {0, "kv-blocks", "N", INT, AT(engine.kv_blocks), 1, 0x1p30, PLANNED, "blocks of 16 tokens in the KV cache"},
    {0, "step-patches", "N", INT, AT(engine.step_patches), 1, 0x1p24, PLANNED, "picture work that a step does"},
    {0, "explain", NULL, FLAG, AT(engine.explain), 0, 0, CHAT | BENCH | SERVE, "the plan, and a line a step, on standard error"},
    {0, "trace", "FILE", TEXT, AT(engine.trace), 0, 0, CHAT | BENCH | SERVE, "Chrome trace of the steps"},
    {0, "shape", "NAME", TEXT, AT(shape), 0, 0, MAP | BENCH, "instead of a model: qwen2.5-vl-3b, -7b, -32b or -72b"},
    {0, "load", "LOAD", TEXT, AT(load), 0, 0, BENCH, "images=WxH,concurrency=N,requests=N,prompt=N,output=N"},
    {0, "stages", "LIST", TEXT, AT(bench.stages), 0, 0, BENCH, "vision=PIXELS,prefill=TOKENS,decode=SEQUENCES,..."},
    {0, "repeat", "N", INT, AT(bench.repeat), 1, 100, BENCH, "times that a stage runs (default 3)"},
    {0, "profile", NULL, FLAG, AT(bench.profile), 0, 0, BENCH, "where the time goes, by operation"},
    {0, "roofline", "NAME", TEXT, AT(roofline), 0, 0, BENCH, "limits of a GPU: h100 (default of null), h200, rtx4090"},
    {0, "type", "TYPE", TEXT, AT(type), 0, 0, MAP | BENCH, "of the shape's weights: f32, bf16 (default), q8, q4"},
    {0, "decode", NULL, FLAG, AT(decode), 0, 0, TOKENIZE, "the way back: a JSON array of ids to text"},
    {.name = "sampling"},
    {'n', "max-tokens", "N", INT, AT(max_tokens), 1, MANY, CHAT, "of an answer (default: what the context leaves)"},
    {0, "temperature", "T", REAL, AT(sampling.temperature), 0, 100, CHAT, "0 (default): always the likeliest token"},
    {0, "top-k", "K", INT, AT(sampling.top_k), 0, MANY, CHAT, "draw from the K likeliest (0: off)"},
    {0, "top-p", "P", REAL, AT(sampling.top_p), 0, 1, CHAT, "draw from the likeliest that make up P (1: off)"},
    {0, "min-p", "P", REAL, AT(sampling.min_p), 0, 1, CHAT, "draw from those over P times the best (0: off)"},
    {0, "seed", "S", LONG, AT(seed), 0, 0x1p53 - 1, CHAT, "repeatable draws (default: random, told by --json)"},
    {0, "repetition-penalty", "R", REAL, AT(sampling.repetition_penalty), 0.01, 100, CHAT,
     "of tokens of prompt and answer, a factor (1: off)"},
    {0, "presence-penalty", "R", REAL, AT(sampling.presence_penalty), -100, 100, CHAT,
     "of the answer's tokens (0: off)"},
    {0, "frequency-penalty", "R", REAL, AT(sampling.frequency_penalty), -100, 100, CHAT,
     "the same, times how often (0: off)"},
    {0, "system", "TEXT", TEXT, AT(system), 0, 0, CHAT, "the system message"},
    {.name = "server"},
    {0, "host", "H", TEXT, AT(serve.host), 0, 0, SERVE, "address to listen at (default 127.0.0.1: this machine only)"},
    {0, "port", "P", INT, AT(serve.port), 0, 65535, SERVE, "port to listen at (default 8000; 0: any free one)"},
    {0, "api-key", "KEY", TEXT, AT(serve.api_key), 0, 0, SERVE, "that clients must send (or VLM_API_KEY in the environment)"},
    {0, "model-name", "NAME", TEXT, AT(serve.model_name), 0, 0, SERVE, "its id for clients (default: the file's name)"},
    {0, "max-body", "SIZE", SIZE, AT(serve.max_body), 1, 0x1p40, SERVE, "of a request (default 64M)"},
    {0, "body-memory", "SIZE", SIZE, AT(serve.body_memory), 1, 0x1p40, SERVE, "for bodies; more wait unread (default 256M)"},
    {0, "max-images", "N", INT, AT(serve.max_images), 0, 4096, SERVE, "pictures of a request (default 32)"},
    {0, "picture-memory", "SIZE", SIZE, AT(serve.picture_memory), 1, 0x1p40, SERVE, "for resized pictures; more wait (default 256M)"},
    {0, "max-queue", "N", INT, AT(serve.max_queue), 1, MANY, SERVE, "requests in work; more get 429 (default 256)"},
    {0, "max-connections", "N", INT, AT(serve.max_connections), 1, 65536, SERVE, "clients connected (default 512)"},
    {0, "header-seconds", "N", INT, AT(serve.header_seconds), 1, 3600, SERVE, "for a request's head (default 10)"},
    {0, "idle-seconds", "N", INT, AT(serve.idle_seconds), 1, 86400, SERVE, "without a byte from or to a client (default 60)"},
    {0, "fetch-seconds", "N", INT, AT(serve.fetch_seconds), 1, 3600, SERVE, "for the pictures of a request from http(s) (default 10)"},
    {0, "fetch-bytes", "SIZE", SIZE, AT(serve.fetch_bytes), 1, 0x1p32, SERVE, "of a picture from http(s) (default 32M)"},
    {0, "allow-images-from", "LIST", TEXT, AT(serve.allow_images_from), 0, 0, SERVE, "networks, beside public ones: 10.0.0.0/8,::1"},
    {0, "media-dir", "DIR", TEXT, AT(serve.media_dir), 0, 0, SERVE, "that file:// pictures may be read from (default: none)"},
    {0, "strict", NULL, FLAG, AT(serve.strict), 0, 0, SERVE, "unknown fields and models are errors"},
    {0, "drain", "N", INT, AT(serve.drain), 0, 86400, SERVE, "seconds to listen on after SIGTERM, /health saying 503 (default 0)"},
    {0, "quiet", NULL, FLAG, AT(serve.quiet), 0, 0, SERVE, "no line per request on standard error"},
    {.name = "output"},
    {0, "json", NULL, FLAG, AT(json), 0, 0, PLANNED, "one JSON object"},
    {0, "logprobs", "N", INT, AT(logprobs), 0, MAX_LOGPROBS, CHAT, "with --json: log-probabilities, and of the N best"},
    {0, "dump", "DIR", TEXT, AT(engine.dump), 0, 0, CHAT, "write every named intermediate as .npy"},
    {'h', "help", NULL, FLAG, AT(help), 0, 0, ANY, "this text"},
    {0, "version", NULL, FLAG, AT(version), 0, 0, ANY, "the version"},
};
// clang-format on
enum { N_OPTIONS = sizeof options / sizeof options[0], LONG_ONLY = 256 }; // LONG_ONLY + i: getopt's value of option i

static const char *command_name(Command command) {
    switch (command) {
    case MAP: return "map";
    case TOKENIZE: return "tokenize";
    case BENCH: return "bench";
    case SERVE: return "serve";
    case HELP: return "help";
    default: return "chat";
    }
}

// Wrong usage: one line, exit 2.
static _Noreturn void usage(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("vlm: ", stderr);
    vfprintf(stderr, format, args);
    va_end(args);
    fputs(" ('vlm help' lists the flags)\n", stderr);
    exit(2);
}

static void help_print(void) {
    puts("vlm.c " VERSION ": talk about pictures with a vision-language model\n\n"
         "  vlm [chat] [-m FILE] [-i IMAGE]... [-p PROMPT]   one answer to -p or piped text, else a conversation\n"
         "  vlm serve [-m FILE] [--host H] [--port P]        OpenAI-compatible server, and a page for people\n"
         "  vlm map [-m FILE | --shape NAME]                 the memory plan: every byte and its owner\n"
         "  vlm bench [-m FILE | --shape NAME] [--load LOAD]  the speed of each stage, or of serving a load\n"
         "  vlm tokenize [-m FILE] < TEXT                    the ids of a text as a JSON array; --decode: back\n"
         "  vlm help                                         this text");
    for (const Option *o = options; o < options + N_OPTIONS; o++) {
        char flag[64], letter[8] = "    ", only[32] = "";
        if (!o->commands) {
            printf("\n%s:\n", o->name);
            continue;
        }
        if (o->letter) snprintf(letter, sizeof letter, "-%c, ", o->letter);
        snprintf(flag, sizeof flag, "%s--%s %s", letter, o->name, o->argument ? o->argument : "");
        if (o->commands == MAP || o->commands == TOKENIZE || o->commands == BENCH)
            snprintf(only, sizeof only, " (vlm %s)", command_name((Command)o->commands));
        printf("  %-30s %s%s\n", flag, o->help, only);
    }
    puts("\nK, M, G and T stand for powers of 1024.\n"
         "Exit status: 0 done, 1 a request or a file was at fault, 2 wrong usage.");
}

// Whole and strict: no sign but '-', no blank, nothing behind the number, within int64_t.
static bool parse_whole(const char *s, const char **end, int64_t *out) {
    if (!isdigit((unsigned char)s[*s == '-'])) return false;
    errno = 0;
    *out = strtoll(s, (char **)end, 10);
    return errno == 0;
}

static bool parse_size(const char *s, double *out) {
    int64_t n;
    const char *end, *units = "KMGT";
    if (!parse_whole(s, &end, &n)) return false;
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    *out = (double)n * (unit ? ldexp(1, 10 * (int)(unit - units + 1)) : 1);
    return end[unit != NULL] == 0;
}

// Decimal and strict; strtod alone would take "nan", "inf", "0x1p3" and leading blanks.
static bool parse_real(const char *s, double *out) {
    if (!*s || s[strspn(s, "0123456789.eE+-")] != 0) return false;
    char *end;
    *out = strtod(s, &end);
    return *end == 0 && isfinite(*out);
}

static _Noreturn void usage_value(const Option *o, const char *value) {
    static const char *const what[] = {[INT] = "a whole number", [LONG] = "a whole number", [REAL] = "a number"};
    if (o->kind == SIZE) usage("--%s '%s': give a size, such as 512M or 2G, up to 1024T", o->name, value);
    usage("--%s '%s': give %s from %.16g to %.16g", o->name, value, what[o->kind], o->low, o->high);
}

// Put an option's value into its field.
static void option_apply(Settings *settings, const Option *o, const char *value) {
    void *field = (char *)settings + o->offset;
    const char *end = "";
    int64_t whole = 0;
    double number = 0;
    if (o->kind == FLAG) {
        *(bool *)field = true;
    } else if (o->kind == TEXT) {
        *(const char **)field = value;
    } else if (o->kind == LIST) {
        settings->images[settings->n_images++] = value;
    } else {
        bool ok = o->kind == SIZE   ? parse_size(value, &number)
                  : o->kind == REAL ? parse_real(value, &number)
                                    : parse_whole(value, &end, &whole) && *end == 0;
        if (o->kind == INT || o->kind == LONG) number = (double)whole;
        if (!ok || !(number >= o->low && number <= o->high)) usage_value(o, value);
        if (o->kind == INT) *(int *)field = (int)whole;
        if (o->kind == LONG) *(int64_t *)field = whole;
        if (o->kind == SIZE) *(size_t *)field = (size_t)number;
        if (o->kind == REAL) *(float *)field = (float)number;
    }
}

// The option that getopt's value stands for, or NULL.
static const Option *option_find(int value) {
    for (const Option *o = options; o < options + N_OPTIONS; o++)
        if (value == LONG_ONLY + (int)(o - options) || (o->letter && value == o->letter)) return o;
    return NULL;
}

#ifdef HAVE_CUDA
#define DEVICES "cpu, cuda and null"
static const Device *const devices[] = {&device_cpu, &device_cuda, &device_null};
#else
#define DEVICES "cpu and null"
static const Device *const devices[] = {&device_cpu, &device_null};
#endif

// The device of that name, or NULL. No name: CUDA's where there is one.
static const Device *device_find(const char *name) {
    Error none;
    if (!name && !strcmp(devices[1]->name, "cuda") && devices[1]->start(&none)) return devices[1];
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (!name || !strcmp(name, devices[i]->name)) return devices[i];
    return NULL;
}

// Combinations that cannot be meant, found before anything is loaded.
static void settings_check(const Settings *s) {
    bool file = s->chat || s->chats;
    if (s->chat && s->chats) usage("--chat and --chats do not go together");
    if (file && (s->prompt || s->n_images || s->system))
        usage("-p, -i and --system do not go with --chat or --chats: the file says it all");
    if (s->logprobs >= 0 && !s->json && !s->chats) usage("--logprobs needs --json");
    if (s->shape && s->model) usage("-m and --shape do not go together");
    if (s->type && !s->shape) usage("--type needs --shape: a model file has its own type");
    Dtype type;
    if (s->type && !dtype_find(s->type, &type)) usage("--type '%s': give f32, bf16, q8 or q4", s->type);
    if (!device_find(s->device)) usage("--device '%s': not built in; this program has %s", s->device, DEVICES);
    if (s->command & (CHAT | SERVE) && device_find(s->device) == &device_null)
        usage("--device null computes nothing: it is for 'vlm bench' and 'vlm map'");
    if (s->command == SERVE && s->serve.api_key && !*s->serve.api_key)
        usage("--api-key is empty: give a key, or unset VLM_API_KEY");
    Network *networks = NULL;
    Error err;
    int n;
    if (s->serve.allow_images_from && !networks_parse(s->serve.allow_images_from, &networks, &n, &err))
        usage("%s", err.message);
    free(networks);
    if (s->command != BENCH) return;
    if (s->load && (s->bench.stages || s->bench.profile || s->bench.repeat))
        usage("--stages, --repeat and --profile do not go with --load");
    if (s->engine.trace && !s->load) usage("--trace needs --load");
}

static Command command_parse(int *argc, char ***argv) {
    if (*argc < 2 || (*argv)[1][0] == '-') return CHAT;
    const char *word = (*argv)[1];
    for (Command c = CHAT; c <= HELP; c = (Command)(c << 1)) {
        if (strcmp(word, command_name(c)) != 0) continue;
        (*argc)--, (*argv)++;
        return c;
    }
    usage("'%s' is no command (chat, serve, map, bench, tokenize, help); pictures are given with -i", word);
}

static Settings settings_parse(int argc, char **argv) {
    Settings s = {.seed = -1,
                  .logprobs = -1,
                  .sampling = {.top_p = 1, .repetition_penalty = 1},
                  .serve = {.host = "127.0.0.1",
                            .api_key = getenv("VLM_API_KEY"),
                            .port = 8000,
                            .max_body = 64 << 20,
                            .body_memory = 256 << 20,
                            .picture_memory = 256 << 20,
                            .fetch_bytes = 32 << 20,
                            .max_images = 32,
                            .max_queue = 256,
                            .max_connections = 512,
                            .header_seconds = 10,
                            .idle_seconds = 60,
                            .fetch_seconds = 10}};
    struct option longs[N_OPTIONS + 1] = {0};
    char shorts[2 * N_OPTIONS + 2] = ":", *end = shorts + 1; // the colon: a missing value is reported as ':'
    for (int i = 0, n = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        if (!o->commands) continue;
        longs[n++] = (struct option){o->name, o->argument ? required_argument : no_argument, NULL, LONG_ONLY + i};
        if (o->letter) *end++ = (char)o->letter;
        if (o->letter && o->argument) *end++ = ':';
    }
    s.command = command_parse(&argc, &argv);
    s.images = need(calloc((size_t)argc + 1, sizeof *s.images));
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, shorts, longs, NULL)) != -1;) {
        const Option *o = option_find(c == ':' || c == '?' ? optopt : c);
        if (c == ':') usage("--%s needs a value: %s", o->name, o->argument);
        if (c == '?' && o) usage("--%s takes no value", o->name);
        if (c == '?' && optopt) usage("no such flag: -%c", optopt);
        if (c == '?') usage("no such flag, or not clear: %s", argv[optind - 1]);
        if (!(o->commands & s.command) && s.command != HELP)
            usage("--%s is not for 'vlm %s'", o->name, command_name(s.command));
        option_apply(&s, o, optarg);
    }
    if (optind < argc) usage("'%s': what is it? Commands come first, pictures are given with -i", argv[optind]);
    if (s.command == HELP) s.help = true;
    settings_check(&s);
    return s;
}

// ---------------------------------------------------------------------------------------------
// Threads: as many as the cores that this process may really use. More would wait for one another
// at the end of each operation.

// The CPUs' worth of time that the control groups grant (the smallest cpu.max from here to the root).
static double cgroup_cpus(void) {
    char line[PATH_MAX], path[PATH_MAX + 32], *group = NULL;
    FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && !group && fgets(line, sizeof line, f))
        if (strncmp(line, "0::", 3) == 0) group = line + 3;
    if (f) fclose(f);
    if (!group) return HUGE_VAL;
    double least = HUGE_VAL, quota, period;
    group[strcspn(group, "\n")] = 0;
    for (char *cut = group + strlen(group); cut; cut = strrchr(group, '/')) {
        *cut = 0;
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        if (!(f = fopen(path, "r"))) continue;
        if (fscanf(f, "%lf %lf", &quota, &period) == 2 && period > 0) least = fmin(least, quota / period);
        fclose(f);
    }
    return least;
}

// Two hardware threads of one core share its arithmetic units, so cores are counted.
static int allowed_threads(void) {
    cpu_set_t cpus, cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return 1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &cpus)) continue;
        char path[96];
        int first = cpu;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *f = fopen(path, "r");
        if (f && fscanf(f, "%d", &first) != 1) first = cpu;
        if (f) fclose(f);
        if (first >= 0 && first < CPU_SETSIZE) CPU_SET(first, &cores);
    }
    int n = (int)fmin(CPU_COUNT(&cores), ceil(cgroup_cpus()));
    return n > 1 ? n : 1;
}

// ---------------------------------------------------------------------------------------------
// Session: the model, its engine, and the memory that pictures are decoded in.

typedef struct Session {
    PictureSource source; // files; first, so that the pointers are the same
    const Settings *settings;
    const Device *device;
    char *path; // of the model file
    Model *model;
    Engine *engine;
    Workspace work;
    double load_seconds;
} Session;

// tiny/tiny.vlm beside the program, else in the current folder. Owned by the caller.
static char *default_model(Error *err) {
    char program[PATH_MAX - 32] = "", path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n > 0) program[n] = 0;
    char *slash = strrchr(program, '/');
    if (slash) *slash = 0;
    snprintf(path, sizeof path, "%s/tiny/tiny.vlm", program);
    if (access(path, F_OK) == 0) return need(strdup(path));
    if (access("tiny/tiny.vlm", F_OK) == 0) return need(strdup("tiny/tiny.vlm"));
    fail(err, 400, "no model: tiny/tiny.vlm is neither in '%.150s' nor here; name a model file with -m", program);
    return NULL;
}

// A path or a file:// URL. Nothing is fetched from a network here.
static bool file_fetch(PictureSource *source, const char *url, Picture *p, Error *err) {
    (void)source;
    if (strncmp(url, "http://", 7) == 0 || strncmp(url, "https://", 8) == 0)
        return fail(err, 400, "'%.90s': pictures are not fetched; save it and give its path", url);
    Text path = {0};
    if (strncmp(url, "file://", 7) == 0)
        file_url_path(url, &path);
    else
        text_add(&path, url, strlen(url));
    bool ok = path.n ? read_file(path.data, &p->bytes, err) : fail(err, 400, "'%.90s': there is no path in it", url);
    if (ok) p->path = realpath(path.data, NULL);
    if (ok && !p->path) p->path = need(strdup(path.data)); // a pipe of the shell's has no lasting path
    free(path.data);
    return ok;
}

static bool file_decode(PictureSource *source, Picture **pictures, int n, Error *err) {
    Session *s = (Session *)source;
    for (int i = 0; i < n; i++)
        if (!picture_decode(pictures[i], &s->work, err)) return false;
    return true;
}

// A picture that is ready, or NULL.
static Picture *session_picture(Session *s, const char *url, Error *err) {
    Picture *p = picture_from_url(&s->source, url, err);
    if (p && file_decode(&s->source, &p, 1, err)) return p;
    if (p) picture_free(p);
    return NULL;
}

static bool session_open(Session *s, const Settings *settings, Error *err) {
    double start = now_seconds();
    *s = (Session){.settings = settings, .device = device_find(settings->device)};
    s->path = settings->model ? need(strdup(settings->model)) : default_model(err);
    if (!s->path || !(s->model = model_open(s->path, err))) return false;
    if (!(s->engine = engine_open(s->model, s->device, &settings->engine, err))) return false;
    s->source = (PictureSource){
        .config = engine_image_config(s->engine), .most = INT_MAX, .fetch = file_fetch, .decode = file_decode};
    s->work.size = image_workspace(s->source.config);
    s->work.base = need(malloc(s->work.size)); // pages that no picture touches are never taken from the machine
    s->load_seconds = now_seconds() - start;
    return true;
}

static void session_close(Session *s) {
    if (s->engine) engine_close(s->engine);
    if (s->model) model_close(s->model);
    free(s->work.base);
    free(s->path);
}

// ---------------------------------------------------------------------------------------------
// What is said

// Where to go back to when a message cannot be answered.
typedef struct Mark {
    size_t ids;
    int images, pictures, sent;
    bool started;
} Mark;

static Mark conversation_mark(const Conversation *c) {
    return (Mark){c->prompt.ids.n, c->prompt.n_images, c->n, c->sent, c->prompt.started};
}

static void conversation_rollback(Conversation *c, Mark mark) {
    c->prompt.ids.n = mark.ids;
    c->prompt.n_images = mark.images;
    c->prompt.started = mark.started;
    while (c->n > mark.pictures) picture_free(c->pictures[--c->n]);
    c->sent = mark.sent;
}

static bool conversation_add(Session *s, Conversation *c, const char *role, const Part *parts, int n, Error *err) {
    return prompt_add(&c->prompt, s->model->tokenizer, s->source.config, role, parts, n, err);
}

// A message of text only.
static bool conversation_say(Session *s, Conversation *c, const char *role, const char *text, size_t n, Error *err) {
    return conversation_add(s, c, role, &(Part){.text = text, .n = n}, 1, err);
}

// The user's message: the waiting pictures, then the text.
static bool conversation_ask(Session *s, Conversation *c, const char *text, size_t n, Error *err) {
    int pictures = c->n - c->sent;
    Part *parts = need(calloc((size_t)pictures + 1, sizeof *parts));
    for (int i = 0; i < pictures; i++) parts[i].image = &c->pictures[c->sent + i]->image;
    parts[pictures] = (Part){.text = text, .n = n};
    bool ok = conversation_add(s, c, "user", parts, pictures + 1, err);
    if (ok) c->sent = c->n, prompt_open_reply(&c->prompt, s->model->tokenizer);
    free(parts);
    return ok;
}

// Fill an empty conversation from `n` bytes of JSON: [{"role": "user", "content": "text" or [part, ...]}, ...]
static bool conversation_parse(Session *s, Conversation *c, const char *text, size_t n, Error *err) {
    json_t *root = json_read(text, n, err);
    size_t count = json_array_size(root);
    const char *role = json_string_value(json_object_get(json_array_get(root, count ? count - 1 : 0), "role"));
    bool ok = root && conversation_read(c, &s->source, s->model->tokenizer, root, NULL, NULL, err);
    if (ok && strcmp(role, "user") != 0)
        ok = fail(err, 400, "the last message must be the user's: it is what gets answered");
    json_decref(root);
    return ok;
}

// ---------------------------------------------------------------------------------------------
// Answers

// Hand the conversation to the engine. On an error the caller rolls the conversation back.
static bool answer_start(Session *s, Conversation *c, Answer *a, Error *err) {
    const Settings *settings = s->settings;
    *a = (Answer){.seed = settings->seed >= 0 ? (uint64_t)settings->seed : random_seed()};
    if (c->prompt.ids.n > INT_MAX) return fail(err, 413, "a prompt of over %d tokens", INT_MAX);
    Request request = {
        .ids = c->prompt.ids.data,
        .n = (int)c->prompt.ids.n,
        .images = c->prompt.images,
        .n_images = c->prompt.n_images,
        .sampling = settings->sampling,
        .max_tokens = settings->max_tokens,
    };
    request.sampling.seed = a->seed;
    request.sampling.logprobs = settings->logprobs > 0 ? settings->logprobs : 0;
    a->seq = engine_submit(s->engine, &request, err);
    return a->seq != NULL;
}

// Tokens that the model wrote.
static int answer_tokens(const Answer *a) { return a->seq->n_tokens - a->seq->n_prompt; }

// Turn the tokens that came since the last call into text.
static void answer_more(Session *s, Answer *a) {
    answer_read(a, s->model->tokenizer, answer_tokens(a), a->seq->finish != FINISH_NONE);
}

// Step until the answer is complete. Ctrl-C ends the answer, not the program.
static void answer_run(Session *s, Answer *a, bool show) {
    bool terminal = isatty(STDOUT_FILENO);
    struct sigaction stop = {.sa_handler = on_interrupt}, before;
    sigaction(SIGINT, &stop, &before);
    for (size_t shown = 0; a->seq->finish == FINISH_NONE; shown = a->text.n) {
        if (interrupted) engine_cancel(s->engine, a->seq);
        engine_step(s->engine);
        answer_more(s, a);
        if (!show) continue;
        if (terminal)
            put_clean(stdout, a->text.data + shown, a->text.n - shown, true);
        else
            fwrite(a->text.data + shown, 1, a->text.n - shown, stdout);
        fflush(stdout);
    }
    sigaction(SIGINT, &before, NULL);
}

static void answer_free(Session *s, Answer *a) {
    if (a->seq) engine_release(s->engine, a->seq);
    free(a->text.data);
    *a = (Answer){0};
}

// ---------------------------------------------------------------------------------------------
// Answers in JSON

static json_t *logprobs_json(const Answer *a, int top) {
    json_t *list = json_array();
    for (int i = 0; i < answer_tokens(a); i++) {
        const Sampled *t = &a->seq->sampled[i];
        json_t *best = json_array();
        for (int k = 0; k < top && isfinite(t->top_logprob[k]); k++)
            json_array_append_new(best, json_pack("[i, o]", (int)t->top_id[k], logprob_json(t->top_logprob[k])));
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:o}", "id", (int)t->id, "logprob", logprob_json(t->logprob), "top", best));
    }
    return list;
}

static json_t *timings_json(const Session *s, const Receipt *r) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "load", s->load_seconds * 1e3, "queue", r->queue, "first_token",
                     r->first, "decode", r->decode, "total", r->total, "tokens_per_second", r->rate);
}

static json_t *bytes_json(const Session *s) {
    MemoryMap map;
    engine_map(s->engine, &map);
    json_t *owners = json_object();
    for (int i = 0; i < N_OWNERS; i++)
        json_object_set_new(
            owners, map.owners[i].name,
            json_pack("{s:I, s:I}", "used", (json_int_t)map.owners[i].used, "peak", (json_int_t)map.owners[i].peak));
    return owners;
}

static json_t *answer_json(const Session *s, const Conversation *c, const Answer *a) {
    Receipt r = receipt_make(a->seq);
    MemoryMap map;
    engine_map(s->engine, &map);
    size_t token = map.owners[OWNER_KV].bytes / map.blocks / KV_BLOCK,
           row = s->model->config.text.hidden * sizeof(float);
    json_t *ids = json_array(), *out = json_object();
    for (int i = 0; i < r.written; i++) json_array_append_new(ids, json_integer(answer_ids(a)[i]));
    json_object_set_new(out, "text", json_stringn(a->text.data, a->text.n));
    json_object_set_new(out, "token_ids", ids);
    json_object_set_new(out, "finish_reason", json_string(answer_finish(a)));
    json_object_set_new(out, "prompt_tokens", json_integer(r.prompt));
    json_object_set_new(out, "image_tokens", json_integer(r.image));
    json_object_set_new(out, "completion_tokens", json_integer(r.written));
    json_object_set_new(out, "cached_tokens", json_integer(r.cached));
    if (s->settings->logprobs >= 0) json_object_set_new(out, "logprobs", logprobs_json(a, s->settings->logprobs));
    json_object_set_new(out, "seed", json_integer((json_int_t)a->seed));
    json_object_set_new(out, "timings", timings_json(s, &r));
    json_object_set_new(out, "receipt", receipt_json(c, a, token, row));
    json_object_set_new(out, "bytes", bytes_json(s));
    return out;
}

// One line on standard output; ends `value`.
static void json_put(json_t *value) {
    json_dumpf(value, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    fflush(stdout);
    json_decref(value);
}

// ---------------------------------------------------------------------------------------------
// vlm chat with something to answer: -p, piped text, --chat

// The whole of standard input, less the newline that ends a shell's line.
static bool read_stdin(Text *out, Error *err) {
    if (!read_all(STDIN_FILENO, out)) return fail(err, 400, "cannot read standard input: %s", strerror(errno));
    if (out->n && out->data[out->n - 1] == '\n') out->data[--out->n] = 0;
    return true;
}

// Fill the conversation with what the command line asks.
static bool conversation_from_settings(Session *s, Conversation *c, Error *err) {
    const Settings *settings = s->settings;
    Text text = {0};
    bool ok = true;
    if (settings->chat) {
        Error why = {0};
        ok = read_file(settings->chat, &text, err);
        if (ok && !conversation_parse(s, c, text.data, text.n, &why))
            ok = fail(err, why.status, "'%.80s': %.150s", settings->chat, why.message);
    } else {
        if (settings->prompt)
            text_add(&text, settings->prompt, strlen(settings->prompt));
        else
            ok = read_stdin(&text, err);
        if (settings->system)
            ok = ok && conversation_say(s, c, "system", settings->system, strlen(settings->system), err);
        for (int i = 0; ok && i < settings->n_images; i++)
            ok = conversation_attach(c, session_picture(s, settings->images[i], err));
        if (ok && !settings->prompt && text.n == 0 && c->n == 0)
            ok = fail(err, 400, "standard input is empty: pipe a prompt into it or give one with -p");
        ok = ok && conversation_ask(s, c, text.data, text.n, err);
    }
    free(text.data);
    return ok;
}

static int answer_once(Session *s) {
    Error err = {0};
    Conversation chat = {0};
    Answer answer = {0};
    int status = 0;
    if (!conversation_from_settings(s, &chat, &err) || !answer_start(s, &chat, &answer, &err)) {
        fprintf(stderr, "vlm: %s\n", err.message);
        status = 1;
    } else {
        answer_run(s, &answer, !s->settings->json);
        if (s->settings->json)
            json_put(answer_json(s, &chat, &answer));
        else
            putchar('\n');
        if (answer.seq->finish == FINISH_CANCELLED) status = 128 + SIGINT; // as a shell expects it
    }
    answer_free(s, &answer);
    conversation_free(&chat);
    return status;
}

// ---------------------------------------------------------------------------------------------
// vlm chat --chats: a file of conversations, as many together as the engine runs

typedef struct Job {
    const char *text;
    size_t n;
    Conversation chat;
    Answer answer;
    json_t *result; // waits here until the ones before it are written
} Job;

// A job for each line that is not blank. Points into `text`; owned by the caller.
static Job *jobs_split(const Text *text, size_t *n) {
    Job *jobs = NULL;
    *n = 0;
    for (const char *line = text->data, *end = text->data + text->n; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((stop ? stop : end) - line);
        if (strspn(line, " \t\r") < length) {
            jobs = need(realloc(jobs, sizeof *jobs * (*n + 1)));
            jobs[(*n)++] = (Job){.text = line, .n = length};
        }
        line += length + 1;
    }
    return jobs;
}

// True when the job runs now. A job that cannot be run has its error as the result.
static bool job_start(Session *s, Job *job) {
    Error err = {0};
    if (conversation_parse(s, &job->chat, job->text, job->n, &err) && answer_start(s, &job->chat, &job->answer, &err))
        return true;
    job->result = need(json_pack("{s:{s:i, s:s}}", "error", "status", err.status, "message", err.message));
    conversation_free(&job->chat);
    return false;
}

// True when the job has just ended.
static bool job_collect(Session *s, Job *job) {
    if (!job->answer.seq || job->answer.seq->finish == FINISH_NONE) return false;
    answer_more(s, &job->answer);
    job->result = answer_json(s, &job->chat, &job->answer);
    answer_free(s, &job->answer);
    conversation_free(&job->chat);
    return true;
}

// Write the results in the file's order. One bad conversation harms only itself.
static int answer_many(Session *s) {
    Error err = {0};
    Text text = {0};
    size_t n = 0, started = 0, written = 0, failed = 0;
    if (!read_file(s->settings->chats, &text, &err)) {
        fprintf(stderr, "vlm: %s\n", err.message);
        return free(text.data), 1;
    }
    Job *jobs = jobs_split(&text, &n);
    for (int running = 0, most = engine_options(s->engine)->max_seqs; written < n;) {
        while (started < n && running < most) running += job_start(s, &jobs[started++]);
        if (running) engine_step(s->engine);
        for (size_t i = written; i < started; i++) running -= job_collect(s, &jobs[i]);
        for (; written < started && jobs[written].result; written++) {
            failed += json_object_get(jobs[written].result, "error") != NULL;
            json_put(jobs[written].result);
        }
    }
    if (failed) fprintf(stderr, "vlm: %zu of %zu conversations failed: their lines say why\n", failed, n);
    free(jobs);
    free(text.data);
    return failed > 0;
}

// ---------------------------------------------------------------------------------------------
// vlm map: who owns which bytes

static void map_row(const char *name, const Owner *o, const char *what) {
    char bytes[24], used[24], peak[24];
    printf("  %-8s %16zu  %10s %10s %10s  %s\n", name, o->bytes, size_text(bytes, (double)o->bytes),
           size_text(used, (double)o->used), size_text(peak, (double)o->peak), what);
}

// The device's memory, all of it: what the owners have there, and what its driver reports beside them.
static void driver_print(const MemoryMap *m) {
    const DeviceMemory *d = &m->driver;
    size_t ours = m->total - m->owners[OWNER_IO].bytes, parts = d->context + ours + d->slack + d->available;
    bool taken = d->total - d->available >= d->context + ours; // and not only planned
    printf("\n  the memory of the device, as its driver reports it\n");
    printf("  %-8s %16zu  in use before: the driver's context, our code, other programs\n", "context", d->context);
    if (taken) {
        printf("  %-8s %16zu  weights, kv, images and arena; io is the host's\n", "owners", ours);
        printf("  %-8s %16zu  the end of the last page\n", "slack", d->slack);
    }
    printf("  %-8s %16zu\n", "free", d->available);
    if (taken && parts != d->total)
        printf("  %-8s %16zd  other programs, since\n", "others", (ssize_t)(d->total - parts));
    printf("  %-8s %16zu\n", "total", d->total);
}

static void map_print(const MemoryMap *m, const Config *config, size_t workspace) {
    static const char *const what[N_OWNERS] = {
        "the model's tensors, as in its file", "keys and values of tokens, in blocks",
        "pictures: their rows, and one in the vision tower", "one step's intermediate results",
        "ids, positions, block tables, patches, sampled tokens"};
    char block[24], token[24], slot[24], tower[24], work[24];
    printf("memory on device %s, %d thread%s\n\n", m->device, omp_get_max_threads(),
           omp_get_max_threads() > 1 ? "s" : "");
    printf("  %-8s %16s  %10s %10s %10s\n", "owner", "bytes", "", "used", "peak");
    Owner total = {.bytes = m->total};
    for (int i = 0; i < N_OWNERS; i++) {
        map_row(m->owners[i].name, &m->owners[i], what[i]);
        total.used += m->owners[i].used;
        total.peak += m->owners[i].peak;
    }
    map_row("total", &total, "");
    const TextConfig *t = &config->text;
    double token_bytes = 2.0 * t->layers * t->kv_heads * t->head_dim * (double)dtype_bytes(config->type);
    printf("\n  kv       %d blocks: %d free, %d cached, %d held; a block of %d tokens is %s, a token %s\n", m->blocks,
           m->blocks_free, m->blocks_cached, m->blocks_held, KV_BLOCK, size_text(block, KV_BLOCK * token_bytes),
           size_text(token, token_bytes));
    printf("  images   %d slots of %s: %d used, %d pinned; %lld hits, %lld misses, %lld evictions; %s for the tower\n",
           m->slots, size_text(slot, (double)m->slot_bytes), m->slots_used, m->slots_pinned, (long long)m->image_hits,
           (long long)m->image_misses, (long long)m->image_evictions, size_text(tower, (double)m->tower_bytes));
    printf("  host     %s to decode pictures in, outside of the total\n", size_text(work, (double)workspace));
    if (m->driver.total) driver_print(m);
}

static int map_command(const Settings *settings) {
    Error err = {0};
    MemoryMap map = {0};
    Config config;
    Session s = {0};
    bool ok;
    if (settings->shape) {
        ok = config_shape(settings->shape, &config, &err);
        Dtype type;
        const Device *device = settings->device ? device_find(settings->device) : &device_cpu;
        if (ok && settings->type && dtype_find(settings->type, &type)) config_retype(&config, type);
        ok = ok && engine_plan(&config, config_weight_bytes(&config), device, &settings->engine, &map, &err);
    } else {
        ok = session_open(&s, settings, &err);
        if (ok) engine_map(s.engine, &map);
        if (ok) config = s.model->config;
    }
    if (!ok)
        fprintf(stderr, "vlm: %s\n", err.message);
    else if (settings->json)
        json_put(map_json(&map, image_workspace(&config.image), 0, 0));
    else
        map_print(&map, &config, image_workspace(&config.image));
    session_close(&s);
    return !ok;
}

// ---------------------------------------------------------------------------------------------
// vlm tokenize

static bool encode_stdin(const Tokenizer *tok, const Text *text, Error *err) {
    Ids ids = {0};
    bool ok = tokenizer_encode(tok, text->data, text->n, &ids, err);
    json_t *list = json_array();
    for (size_t i = 0; i < ids.n; i++) json_array_append_new(list, json_integer(ids.data[i]));
    if (ok)
        json_put(list);
    else
        json_decref(list);
    free(ids.data);
    return ok;
}

static bool decode_stdin(const Tokenizer *tok, const Text *text, Error *err) {
    json_error_t where;
    json_t *list = json_loadb(text->data, text->n, 0, &where);
    Text out = {0};
    bool ok = json_is_array(list) || fail(err, 400, "standard input must be a JSON array of ids, such as [1, 2, 3]");
    ok = ok && ids_text(tok, list, &out, err);
    if (ok) fwrite(out.data, 1, out.n, stdout);
    free(out.data);
    json_decref(list);
    return ok;
}

static int tokenize_command(const Settings *settings) {
    Error err = {0};
    Text text = {0};
    char *path = settings->model ? need(strdup(settings->model)) : default_model(&err);
    ModelFile *file = path ? modelfile_open(path, &err) : NULL;
    Tokenizer *tok = file ? tokenizer_open(file, &err) : NULL;
    bool ok = tok != NULL;
    if (ok && !read_all(STDIN_FILENO, &text)) ok = fail(&err, 400, "cannot read standard input: %s", strerror(errno));
    ok = ok && (settings->decode ? decode_stdin : encode_stdin)(tok, &text, &err);
    if (!ok) fprintf(stderr, "vlm: %s\n", err.message);
    if (tok) tokenizer_close(tok);
    if (file) modelfile_close(file);
    free(path);
    free(text.data);
    return !ok;
}

// ---------------------------------------------------------------------------------------------
// The REPL: a conversation in a terminal

typedef struct Repl {
    Session *session;
    Conversation chat;
    json_t *messages; // what was said, in the form that --chat reads
    char *system;     // NULL: the template's own
    Receipt last;
    bool answered;        // `last` holds something
    bool escapes, colour; // may be sent to the terminal
    EditLine *edit;
    History *history;
    char *history_path; // NULL: not kept
    bool cut;           // Ctrl-C ended the line that is being read
    int cuts;           // Ctrl-C in a row at an empty prompt
    bool leave;
} Repl;

typedef struct ReplCommand {
    const char *name, *argument, *help;
    void (*run)(Repl *r, const char *argument);
} ReplCommand;

static const char *style(const Repl *r, const char *codes) { return r->colour ? codes : ""; }
static const char *dim(const Repl *r) { return style(r, "\033[2m"); }
static const char *red(const Repl *r) { return style(r, "\033[1;31m"); }
static const char *plain(const Repl *r) { return style(r, "\033[0m"); }

static void repl_line(const char *before, const char *text, const char *after) {
    fputs(before, stdout);
    put_clean(stdout, text, strlen(text), true);
    fputs(after, stdout);
    putchar('\n');
}

static void repl_error(const Repl *r, const Error *err) {
    printf("%serror:%s ", red(r), plain(r));
    repl_line("", err->message, "");
}

// --- pictures in a line

// Attach a picture and say so: what the model gets is not what is in the file.
static bool repl_attach(Repl *r, const char *path, Error *err) {
    Picture *p = session_picture(r->session, path, err);
    if (!conversation_attach(&r->chat, p)) return false;
    char figures[128];
    snprintf(figures, sizeof figures, ": %dx%d, the model sees %dx%d, %d tokens%s", p->image.source_width,
             p->image.source_height, p->image.width, p->image.height,
             image_tokens(&p->image, r->session->source.config), plain(r));
    fputs(dim(r), stdout);
    repl_line("picture ", p->path ? p->path : "", figures);
    return true;
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// A word of a line as a terminal drops a path into it: '...', "...", back\ slashes, file:// URLs.
typedef struct Word {
    size_t bytes; // in the line
    Text path;    // without the quoting
    bool dropped; // quoted, escaped or a URL: nobody types that by chance
} Word;

// False when a quote does not end: then it is an apostrophe.
static bool word_unquote(const char *s, Word *w) {
    size_t i = 0;
    text_add(&w->path, "", 0);
    while (s[i] && !is_blank(s[i])) {
        bool quote = s[i] == '\'' || s[i] == '"', escape = s[i] == '\\' && s[i + 1];
        const char *end = quote ? strchr(s + i + 1, s[i]) : NULL;
        if (quote && !end) return false;
        if (quote)
            text_add(&w->path, s + i + 1, (size_t)(end - (s + i + 1)));
        else
            text_add(&w->path, s + i + escape, 1);
        w->dropped |= quote || escape;
        i = quote ? (size_t)(end - s) + 1 : i + 1 + escape;
    }
    w->bytes = i;
    return true;
}

// "~/x" and "file:///x" to the path they mean.
static void word_expand(Word *w) {
    const char *home = getenv("HOME");
    Text path = {0};
    if (w->path.n && strncmp(w->path.data, "file://", 7) == 0) {
        file_url_path(w->path.data, &path);
        w->dropped = true;
    } else if (home && w->path.n > 1 && strncmp(w->path.data, "~/", 2) == 0) {
        text_add(&path, home, strlen(home));
        text_add(&path, w->path.data + 1, w->path.n - 1);
    } else {
        return;
    }
    text_add(&path, "", 0);
    free(w->path.data);
    w->path = path;
}

// Formats that we cannot read are in the list too: the loader says so, and silence would not.
static bool has_picture_ending(const char *path) {
    static const char *const endings[] = {"png",  "jpg",  "jpeg", "gif",  "bmp", "webp",
                                          "heic", "avif", "tif",  "tiff", "svg"};
    const char *name = strrchr(path, '/'), *dot = strrchr(path, '.');
    name = name ? name + 1 : path;
    for (size_t i = 0; dot && dot > name && i < sizeof endings / sizeof endings[0]; i++)
        if (strcasecmp(dot + 1, endings[i]) == 0) return true;
    return false;
}

// Does the word mean a picture? Yes by its ending; yes when it is a path written as terminals drop
// them; and at either end of a line, where paths are dropped, also when it names something there is.
static bool word_is_picture(const Word *w, bool edge) {
    const char *p = w->path.data;
    if (has_picture_ending(p)) return true;
    bool rooted = p[0] == '/' || strncmp(p, "./", 2) == 0 || strncmp(p, "../", 3) == 0;
    return rooted && p[1] && (w->dropped || (edge && access(p, F_OK) == 0));
}

// "what is in a.png?": the mark belongs to the sentence.
static void word_trim(Word *w, const char *s) {
    const char *marks = ".,;:!?)";
    size_t n = w->path.n, bytes = w->bytes;
    while (n && bytes && strchr(marks, s[bytes - 1]) && w->path.data[n - 1] == s[bytes - 1]) n--, bytes--;
    if (n == w->path.n || has_picture_ending(w->path.data)) return;
    char mark = w->path.data[n];
    w->path.data[n] = 0;
    if (has_picture_ending(w->path.data))
        w->path.n = n, w->bytes = bytes;
    else
        w->path.data[n] = mark;
}

static Word word_read(const char *s) {
    Word w = {0};
    size_t bare = strcspn(s, " \t\r\n");
    bool quoting = *s == '\'' || *s == '"' || memchr(s, '\\', bare);
    if (!quoting || !word_unquote(s, &w)) {
        free(w.path.data);
        w = (Word){.bytes = bare};
        text_add(&w.path, s, bare);
    }
    word_expand(&w);
    word_trim(&w, s);
    return w;
}

// Attach what the line names and leave its words in `rest`. A picture that cannot be had stops the
// message: sent without it, the model would talk about something else.
static bool repl_take_pictures(Repl *r, const char *line, Text *rest, Error *err) {
    if (line[0] == '/' && access(line, F_OK) == 0) return repl_attach(r, line, err); // one path, its blanks as they are
    bool one_line = !strchr(line, '\n');
    for (const char *s = line; *s;) {
        size_t blanks = strspn(s, " \t\r\n"), bare = strcspn(s + blanks, " \t\r\n");
        Word w = word_read(s + blanks);
        const char *end = s + blanks + w.bytes;
        bool edge = one_line && (s == line || !end[strspn(end, " \t\r")]);
        bool picture = word_is_picture(&w, edge), ok = !picture || repl_attach(r, w.path.data, err);
        if (!picture) text_add(rest, s, blanks + bare);
        s = picture ? end : s + blanks + bare;
        free(w.path.data);
        if (!ok) return false;
    }
    return true;
}

// --- one message and its answer

static json_t *text_part(const char *text, size_t n) {
    return json_pack("{s:s, s:o}", "type", "text", "text", json_stringn(text, n));
}

// Keep what was said for /save. Pictures first, as the model got them.
static void repl_record(Repl *r, int first_picture, const Text *text, const Answer *a) {
    json_t *content = json_array();
    for (int i = first_picture; i < r->chat.n; i++) {
        const char *path = r->chat.pictures[i]->path;
        json_array_append_new(content, json_pack("{s:s, s:s}", "type", "image", "image", path ? path : ""));
    }
    if (text->n) json_array_append_new(content, text_part(text->data, text->n));
    json_array_append_new(r->messages, json_pack("{s:s, s:o}", "role", "user", "content", content));
    json_array_append_new(
        r->messages, json_pack("{s:s, s:o}", "role", "assistant", "content", json_stringn(a->text.data, a->text.n)));
}

// The line under an answer, and why it ended if the model did not end it.
static void repl_receipt(const Repl *r, const Answer *a) {
    const Receipt *last = &r->last;
    const int most = r->session->settings->max_tokens;
    printf("%s%d tokens, %.1f tokens/s, first after %.0f ms, %d of %d prompt tokens cached%s\n", dim(r), last->written,
           last->rate, last->first, last->cached, last->prompt, plain(r));
    if (a->seq->finish == FINISH_CANCELLED) printf("%sstopped%s\n", dim(r), plain(r));
    if (a->seq->finish != FINISH_LENGTH) return;
    if (last->written == most)
        printf("%scut at %d tokens (-n)%s\n", dim(r), most, plain(r));
    else
        printf("%sthe context is full%s at %d tokens: /reset starts anew, --ctx makes it longer\n", red(r), plain(r),
               a->seq->n_tokens);
}

static struct termios terminal; // as it was before the answer

static void terminal_quiet(void);

// Whoever ends or stops the program while an answer streams gets the terminal as it was. Only a stop returns.
static void on_leave(int signal) {
    tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
    raise(signal); // by the default action: the handler is gone
    terminal_quiet();
}

static const int leaving[] = {SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};
enum { N_LEAVING = sizeof leaving / sizeof *leaving };

// No echo: what is typed while an answer streams waits for the prompt, and is no part of the answer.
static void terminal_quiet(void) {
    struct termios quiet = terminal;
    quiet.c_lflag &= ~(tcflag_t)ECHO;
    for (int i = 0; i < N_LEAVING; i++)
        sigaction(leaving[i], &(struct sigaction){.sa_handler = on_leave, .sa_flags = SA_RESETHAND | SA_NODEFER}, NULL);
    tcsetattr(STDIN_FILENO, TCSANOW, &quiet);
}

static void terminal_restore(void) {
    tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
    for (int i = 0; i < N_LEAVING; i++) signal(leaving[i], SIG_DFL);
}

// Send the waiting pictures and the text; on an error the conversation stays as it was.
static bool repl_answer(Repl *r, const Text *text, Error *err) {
    Session *s = r->session;
    Answer a = {0};
    int first_picture = r->chat.sent;
    if (!r->chat.prompt.started && r->system &&
        !conversation_say(s, &r->chat, "system", r->system, strlen(r->system), err))
        return false;
    if (!conversation_ask(s, &r->chat, text->data, text->n, err) || !answer_start(s, &r->chat, &a, err)) return false;
    bool quiet = tcgetattr(STDIN_FILENO, &terminal) == 0;
    if (quiet) terminal_quiet();
    answer_run(s, &a, true);
    if (quiet) terminal_restore();
    if (!a.text.n || a.text.data[a.text.n - 1] != '\n') putchar('\n');
    prompt_close_reply(&r->chat.prompt, s->model->tokenizer, answer_ids(&a), (size_t)answer_tokens(&a));
    r->last = receipt_make(a.seq);
    r->answered = true;
    repl_record(r, first_picture, text, &a);
    repl_receipt(r, &a);
    answer_free(s, &a);
    return true;
}

static void repl_message(Repl *r, const char *line) {
    Error err = {0};
    Text rest = {0};
    Mark mark = conversation_mark(&r->chat);
    bool ok = repl_take_pictures(r, line, &rest, &err);
    while (rest.n && is_blank(rest.data[rest.n - 1])) rest.data[--rest.n] = 0; // where a path was cut out of it
    const char *start = rest.n ? rest.data + strspn(rest.data, " \t\r\n") : "";
    Text text = {0};
    text_add(&text, start, strlen(start));
    bool sent = ok && text.n;
    if (sent) ok = repl_answer(r, &text, &err);
    if (!ok) {
        conversation_rollback(&r->chat, mark);
        repl_error(r, &err);
        int waiting = sent ? r->chat.n - r->chat.sent : 0; // perhaps it is they that do not fit
        while (r->chat.n > r->chat.sent && sent) picture_free(r->chat.pictures[--r->chat.n]);
        if (waiting)
            printf("the picture%s that waited for it %s put down\n", waiting > 1 ? "s" : "",
                   waiting > 1 ? "are" : "is");
        printf("nothing was sent; the Up arrow brings your message back\n");
    }
    free(rest.data);
    free(text.data);
}

// --- commands

static void repl_forget(Repl *r) {
    conversation_free(&r->chat);
    json_array_clear(r->messages);
    r->answered = false;
}

static void command_image(Repl *r, const char *argument) {
    Error err = {0};
    if (!*argument) {
        printf("which? /image PATH\n");
        return;
    }
    Word w = word_read(argument);
    bool whole = access(argument, F_OK) == 0 || argument[w.bytes]; // a path with blanks needs no quotes here
    if (!repl_attach(r, whole ? argument : w.path.data, &err)) repl_error(r, &err);
    free(w.path.data);
}

// The mean colour of a box of the picture, as the colour codes of `layer` (38: letters, 48: ground).
static void show_pixel(const Image *im, int layer, int x0, int x1, int y0, int y1) {
    long sum[3] = {0}, n = 0;
    for (int y = y0; y < y1; y++)
        for (int x = x0; x < x1; x++, n++)
            for (int c = 0; c < 3; c++) sum[c] += im->pixels[((size_t)y * im->width + x) * 3 + c];
    printf("\033[%d;2;%ld;%ld;%ldm", layer, sum[0] / n, sum[1] / n, sum[2] / n);
}

// Two pixels a character: an upper half block in the upper one's colour on the lower one's.
static void show_image(const Image *im, int columns, int rows) {
    double scale = fmin(1, fmin((double)columns / im->width, 2.0 * rows / im->height));
    int w = (int)fmax(1, im->width * scale), h = (int)fmax(2, im->height * scale) / 2 * 2;
    for (int y = 0; y < h; y += 2) {
        for (int x = 0; x < w; x++) {
            int left = x * im->width / w, right = (x + 1) * im->width / w;
            show_pixel(im, 38, left, right, y * im->height / h, (y + 1) * im->height / h);
            show_pixel(im, 48, left, right, (y + 1) * im->height / h, (y + 2) * im->height / h);
            fputs("\xe2\x96\x80", stdout);
        }
        puts("\033[0m");
    }
}

static void command_show(Repl *r, const char *argument) {
    (void)argument;
    struct winsize size = {0};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    if (!r->chat.n)
        printf("no picture yet: /image PATH\n");
    else if (!r->colour)
        printf("a picture needs colours, and they are off\n");
    else
        show_image(&r->chat.pictures[r->chat.n - 1]->image, size.ws_col ? size.ws_col : 80,
                   size.ws_row > 4 ? size.ws_row - 2 : 22);
}

static void command_reset(Repl *r, const char *argument) {
    (void)argument;
    repl_forget(r);
    printf("a new conversation\n");
}

static void command_system(Repl *r, const char *argument) {
    if (!*argument) {
        repl_line("system message: ", r->system ? r->system : "the model's own", "");
        return;
    }
    free(r->system);
    r->system = need(strdup(argument));
    repl_forget(r); // it stands before everything that was said
    printf("a new conversation, with this system message\n");
}

static void command_map(Repl *r, const char *argument) {
    (void)argument;
    MemoryMap map;
    engine_map(r->session->engine, &map);
    map_print(&map, &r->session->model->config, r->session->work.size);
}

static void command_stats(Repl *r, const char *argument) {
    (void)argument;
    const Receipt *last = &r->last;
    MemoryMap map;
    engine_map(r->session->engine, &map);
    printf("conversation  %zu of %d tokens, %d pictures\n", r->chat.prompt.ids.n,
           engine_options(r->session->engine)->ctx, r->chat.n);
    printf("pictures      %lld looked at, %lld found in the cache\n", (long long)map.image_misses,
           (long long)map.image_hits);
    if (!r->answered) return;
    printf("last prompt   %d tokens: %d cached, %d of pictures\n", last->prompt, last->cached, last->image);
    printf("last answer   %d tokens, %.1f tokens/s\n", last->written, last->rate);
    printf("last times    first token %.1f ms (pictures %.1f), the rest %.1f ms\n", last->first, last->vision,
           last->decode);
}

// Markdown for people. The JSON is --chat's, once a question stands at its end.
static void markdown_write(FILE *f, json_t *messages) {
    size_t i, k;
    json_t *message, *part;
    json_array_foreach(messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        json_t *content = json_object_get(message, "content");
        fprintf(f, "**%s**\n\n", role);
        if (json_is_string(content)) fprintf(f, "%s\n\n", json_string_value(content));
        json_array_foreach(content, k, part) {
            const char *image = json_string_value(json_object_get(part, "image"));
            if (image)
                fprintf(f, "![picture](<%s>)\n\n", image);
            else
                fprintf(f, "%s\n\n", json_string_value(json_object_get(part, "text")));
        }
    }
}

static void command_save(Repl *r, const char *argument) {
    Error err = {0};
    Word w = word_read(argument);
    const char *dot = strrchr(w.path.data, '.');
    bool json = dot && strcmp(dot, ".json") == 0, markdown = dot && strcmp(dot, ".md") == 0;
    FILE *f = NULL;
    if (!json && !markdown) {
        fail(&err, 400, "say where: /save FILE, ending in .md or .json");
    } else if (!(f = fopen(w.path.data, "w"))) {
        fail(&err, 400, "cannot write '%.150s': %s", w.path.data, strerror(errno));
    } else {
        json_t *all = json_array();
        if (r->system) json_array_append_new(all, json_pack("{s:s, s:s}", "role", "system", "content", r->system));
        json_array_extend(all, r->messages);
        if (json)
            json_dumpf(all, f, JSON_INDENT(2)), fputc('\n', f);
        else
            markdown_write(f, all);
        json_decref(all);
        bool bad = ferror(f);
        if (fclose(f) != 0 || bad) fail(&err, 500, "cannot write '%.150s': %s", w.path.data, strerror(errno));
    }
    if (err.status)
        repl_error(r, &err);
    else
        repl_line("saved: ", w.path.data, "");
    free(w.path.data);
}

static void command_help(Repl *r, const char *argument); // lists the table below

static void command_quit(Repl *r, const char *argument) {
    (void)argument;
    r->leave = true;
}

static const ReplCommand repl_commands[] = {
    {"/image", "PATH", "attach a picture to the next message", command_image},
    {"/show", "", "the latest picture as the model sees it", command_show},
    {"/reset", "", "forget the conversation", command_reset},
    {"/system", "TEXT", "start anew with this system message", command_system},
    {"/map", "", "the memory and its owners", command_map},
    {"/stats", "", "what this conversation and the last answer took", command_stats},
    {"/save", "FILE", "write the conversation as .md or .json", command_save},
    {"/help", "", "this list", command_help},
    {"/quit", "", "leave", command_quit},
};
enum { N_COMMANDS = sizeof repl_commands / sizeof repl_commands[0] };

static void command_help(Repl *r, const char *argument) {
    (void)argument;
    for (const ReplCommand *c = repl_commands; c < repl_commands + N_COMMANDS; c++)
        printf("  %-8s %-6s %s%s%s\n", c->name, c->argument, dim(r), c->help, plain(r));
    printf("Drop a picture's file into the line to attach it. Ctrl-C stops an answer, Ctrl-D leaves.\n");
}

// True when the line was a command, or was meant to be one. Paths begin with a slash too.
static bool repl_run_command(Repl *r, const char *line) {
    size_t n = strcspn(line, " \t\r\n");
    if (line[0] != '/') return false;
    for (const ReplCommand *c = repl_commands; c < repl_commands + N_COMMANDS; c++) {
        if (strlen(c->name) != n || strncmp(c->name, line, n) != 0) continue;
        c->run(r, line + n + strspn(line + n, " \t\r\n"));
        return true;
    }
    Word w = word_read(line);
    bool path = memchr(line + 1, '/', n - 1) || word_is_picture(&w, true);
    free(w.path.data);
    if (!path) printf("no command %.*s: /help lists them\n", (int)n, line);
    return !path;
}

// --- the line editor

enum { KEY_ACCEPT = 0x1d }; // Ctrl-], bound to libedit's own "accept the line"

static Repl *edit_repl(EditLine *edit) {
    void *repl = NULL;
    el_get(edit, EL_CLIENTDATA, &repl);
    return repl;
}

static char *edit_prompt(EditLine *edit) {
    (void)edit;
    return (char *)"> "; // libedit only reads it
}

// Ctrl-C at the prompt: the line stays on the screen, marked, and is not sent. It is accepted
// through libedit's own newline, which knows where the end of a line of several rows is.
static unsigned char key_interrupt(EditLine *edit, int key) {
    (void)key;
    Repl *r = edit_repl(edit);
    const LineInfoW *line = el_wline(edit);
    r->cut = true;
    r->cuts = line->lastchar == line->buffer ? r->cuts + 1 : 0;
    el_cursor(edit, (int)(line->lastchar - line->cursor));
    el_winsertstr(edit, L"^C");
    el_wpush(edit, (wchar_t[]){KEY_ACCEPT, 0});
    return CC_REFRESH;
}

// Ctrl-Z: libedit's handler gives the shell its terminal back and redraws the line afterwards.
static unsigned char key_suspend(EditLine *edit, int key) {
    (void)edit, (void)key;
    raise(SIGTSTP);
    return CC_REFRESH;
}

// libedit lets the terminal swap CR and LF, so a line's end in a paste may be any of the two, or both.
static bool is_line_end(wchar_t c) { return c == L'\r' || c == L'\n'; }

// A paste, between ESC[200~ and ESC[201~: one message, whatever is in it.
static unsigned char key_paste(EditLine *edit, int key) {
    (void)key;
    static const wchar_t end[] = L"\033[201~";
    size_t n = 0, cap = 256, tail = wcslen(end);
    wchar_t *text = need(malloc(cap * sizeof *text)), c;
    while (el_wgetc(edit, &c) == 1) {
        if (n + 2 > cap) text = need(realloc(text, (cap *= 2) * sizeof *text));
        text[n++] = c;
        if (n < tail || wmemcmp(text + n - tail, end, tail) != 0) continue;
        n -= tail;
        break;
    }
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (is_line_end(text[i]) && i + 1 < n && is_line_end(text[i + 1]) && text[i] != text[i + 1]) i++;
        if (is_line_end(text[i]))
            text[kept++] = L'\n';
        else if (text[i] == L'\t' || !iswcntrl((wint_t)text[i]))
            text[kept++] = text[i];
    }
    text[kept] = 0;
    if (kept) el_winsertstr(edit, text);
    free(text);
    return CC_REFRESH;
}

// The next key if it is there already, as in a burst. A person is slower.
static wchar_t key_waiting(EditLine *edit) {
    enum { BURST_MS = 10 };
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    wchar_t next = 0;
    return poll(&input, 1, BURST_MS) > 0 && el_wgetc(edit, &next) == 1 ? next : 0;
}

// Enter. Where a terminal does not mark pastes, a line with more of them behind it in the same burst is
// part of one message; a command ends it, so that scripts can drive the program.
static unsigned char key_enter(EditLine *edit, int key) {
    const LineInfoW *line = el_wline(edit);
    bool command = line->lastchar > line->buffer && line->buffer[0] == L'/';
    wchar_t next = command ? 0 : key_waiting(edit);
    if (is_line_end(next) && next != (wchar_t)key) next = key_waiting(edit); // the other half of CR LF
    if (next && next != L'/' && (is_line_end(next) || iswprint((wint_t)next))) {
        el_winsertstr(edit, L"\n");
        el_wpush(edit, (wchar_t[]){next, 0}); // as if typed
    } else {
        el_wpush(edit, (wchar_t[]){KEY_ACCEPT, next, 0});
    }
    return CC_REFRESH;
}

// Tab: commands at the start of a line, paths elsewhere.
static unsigned char key_complete(EditLine *edit, int key) {
    const LineInfo *line = el_line(edit);
    size_t n = (size_t)(line->cursor - line->buffer), common = 0;
    const char *first = NULL;
    int matches = 0;
    for (const ReplCommand *c = repl_commands; n && c < repl_commands + N_COMMANDS; c++) {
        if (strncmp(c->name, line->buffer, n) != 0) continue;
        if (!matches++) first = c->name, common = strlen(first);
        while (strncmp(first, c->name, common) != 0) common--;
    }
    if (!matches) return _el_fn_complete(edit, key);
    if (matches > 1 && common == n) {
        putchar('\n');
        for (const ReplCommand *c = repl_commands; c < repl_commands + N_COMMANDS; c++)
            if (strncmp(c->name, line->buffer, n) == 0) printf("%s  ", c->name);
        putchar('\n');
        return CC_REDISPLAY;
    }
    char more[32];
    snprintf(more, sizeof more, "%.*s%s", (int)(common - n), first + n, matches == 1 ? " " : "");
    return el_insertstr(edit, more) == 0 ? CC_REFRESH : CC_ERROR;
}

static void edit_open(Repl *r) {
    static const struct {
        const wchar_t *name, *keys;
        unsigned char (*run)(EditLine *, int);
    } keys[] = {{L"vlm-interrupt", L"\003", key_interrupt}, {L"vlm-suspend", L"\032", key_suspend},
                {L"vlm-paste", L"\033[200~", key_paste},    {L"vlm-enter", L"\r", key_enter},
                {L"vlm-enter", L"\n", key_enter},           {L"vlm-complete", L"\t", key_complete}};
    r->edit = need(el_init("vlm", stdin, stdout, stderr));
    el_set(r->edit, EL_CLIENTDATA, r);
    el_set(r->edit, EL_PROMPT, edit_prompt);
    el_set(r->edit, EL_EDITOR, "emacs");
    el_set(r->edit, EL_SIGNAL, 1); // the terminal is put right when a signal ends the program
    el_set(r->edit, EL_HIST, history, r->history);
    el_source(r->edit, NULL);                       // ~/.editrc
    el_set(r->edit, EL_SETTY, "-d", "-isig", NULL); // while a line is read Ctrl-C and Ctrl-Z are keys, not signals
    el_set(r->edit, EL_BIND, "^]", "ed-newline", NULL);
    el_set(r->edit, EL_BIND, "^R", "em-inc-search-prev", NULL);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) { // wide, because el_set() would leak copies of the names
        el_wset(r->edit, EL_ADDFN, keys[i].name, keys[i].name, keys[i].run);
        el_wset(r->edit, EL_BIND, keys[i].keys, keys[i].name, NULL);
    }
}

// The next line without the newline at its end, owned by the caller; NULL: leave.
static char *repl_read(Repl *r) {
    for (;;) {
        int n = 0;
        r->cut = false;
        fputs(r->escapes ? "\033[?2004h" : "", stdout); // the terminal marks pastes
        const char *line = el_gets(r->edit, &n);
        interrupted = 0; // from here on it means the answer
        fputs(r->escapes ? "\033[?2004l" : "", stdout);
        if (r->cut) {
            if (r->cuts >= 2) return NULL;
            if (r->cuts) printf("Ctrl-C again leaves\n");
            continue;
        }
        r->cuts = 0;
        if (!line || n <= 0) return putchar('\n'), NULL;
        size_t length = (size_t)n;
        while (length && is_blank(line[length - 1])) length--;
        return need(strndup(line, length));
    }
}

// --- history

// $XDG_STATE_HOME/vlm/history, or ~/.local/state/vlm/history, with its folders made. NULL with errno set.
static char *history_open(void) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char path[PATH_MAX];
    int n;
    if (state && state[0] == '/')
        n = snprintf(path, sizeof path, "%s/vlm/history", state);
    else if (home)
        n = snprintf(path, sizeof path, "%s/.local/state/vlm/history", home);
    else
        return errno = ENOENT, NULL;
    if (n >= (int)sizeof path) return errno = ENAMETOOLONG, NULL;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0700) != 0 && errno != EEXIST) return NULL;
        *slash = '/';
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600); // what people ask is theirs
    if (fd < 0) return NULL;
    close(fd);
    return need(strdup(path));
}

static void history_start(Repl *r) {
    HistEvent event;
    r->history = need(history_init());
    history(r->history, &event, H_SETSIZE, 1000);
    history(r->history, &event, H_SETUNIQUE, 1);
    r->history_path = history_open();
    if (r->history_path)
        history(r->history, &event, H_LOAD, r->history_path);
    else
        printf("%slines are not kept for next time: %s%s\n", dim(r), strerror(errno), plain(r));
}

// Written line by line, so that a killed program loses nothing.
static void history_keep(Repl *r, const char *line) {
    HistEvent event;
    history(r->history, &event, H_ENTER, line);
    if (!r->history_path || history(r->history, &event, H_SAVE, r->history_path) >= 0) return;
    printf("%slines are no longer kept: cannot write %s%s\n", dim(r), r->history_path, plain(r));
    free(r->history_path);
    r->history_path = NULL;
}

// --- the loop

// The picture that the model file suggests to begin with, by its path from here.
static void repl_suggest_sample(const Session *s) {
    const char *sample = modelfile_text(s->model->file, "sample"), *slash = strrchr(s->path, '/');
    char path[PATH_MAX], here[PATH_MAX];
    if (!sample) return;
    snprintf(path, sizeof path, "%.*s%s", slash ? (int)(slash - s->path) + 1 : 0, s->path, sample);
    size_t skip = getcwd(here, sizeof here) ? strlen(here) : 0;
    skip = skip && strncmp(path, here, skip) == 0 && path[skip] == '/' ? skip + 1 : 0;
    if (access(path, R_OK) == 0) repl_line("A picture to begin with: /image ", path + skip, "");
}

static void repl_greet(const Repl *r) {
    const Session *s = r->session;
    const char *name = modelfile_text(s->model->file, "name"), *hint = modelfile_text(s->model->file, "hint");
    const char *base = strrchr(s->path, '/');
    char bytes[24], figures[160];
    snprintf(figures, sizeof figures, " (%s, %s) on %s, %d thread%s, context %d tokens",
             size_text(bytes, (double)modelfile_bytes(s->model->file)), dtype_name(s->model->config.text_type),
             s->device->name, omp_get_max_threads(), omp_get_max_threads() > 1 ? "s" : "",
             engine_options(s->engine)->ctx);
    repl_line("vlm.c: ", name ? name : base ? base + 1 : s->path, figures);
    if (hint) repl_line("It knows: ", hint, "");
    repl_suggest_sample(s);
    printf("%s/help lists the commands; Ctrl-D leaves%s\n", dim(r), plain(r));
}

static void repl_close(Repl *r) {
    if (r->edit) el_end(r->edit);
    if (r->history) history_end(r->history);
    json_decref(r->messages);
    conversation_free(&r->chat);
    free(r->history_path);
    free(r->system);
}

static int repl_run(Session *s) {
    const char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    Repl r = {.session = s, .messages = json_array()};
    Error err = {0};
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL); // too late for an answer, not a death
    r.escapes = isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0;
    r.colour = r.escapes && !(no_colour && *no_colour);
    if (s->settings->system) r.system = need(strdup(s->settings->system));
    repl_greet(&r);
    for (int i = 0; i < s->settings->n_images; i++) {
        if (repl_attach(&r, s->settings->images[i], &err)) continue;
        fprintf(stderr, "vlm: %s\n", err.message);
        return repl_close(&r), 1;
    }
    history_start(&r);
    edit_open(&r);
    for (char *line; !r.leave && (line = repl_read(&r)); free(line)) {
        if (!*line) continue;
        history_keep(&r, line);
        if (!repl_run_command(&r, line)) repl_message(&r, line);
    }
    repl_close(&r);
    return 0;
}

// ---------------------------------------------------------------------------------------------

static int chat_command(const Settings *settings) {
    bool file = settings->chat || settings->chats;
    bool repl = !file && !settings->prompt && isatty(STDIN_FILENO);
    if (repl && settings->json) usage("--json needs something to answer: -p, --chat or piped text");
    Error err = {0};
    Session s;
    int status = 1;
    if (!session_open(&s, settings, &err))
        fprintf(stderr, "vlm: %s\n", err.message);
    else
        status = settings->chats ? answer_many(&s) : repl ? repl_run(&s) : answer_once(&s);
    session_close(&s);
    return status;
}

// ---------------------------------------------------------------------------------------------
// vlm serve

static int serve_command(Settings *settings) {
    Error err = {0};
    Session s;
    char name[128] = "";
    bool ok = session_open(&s, settings, &err);
    if (ok && !settings->serve.model_name) { // "tiny" of "tiny/tiny.vlm"
        const char *base = strrchr(s.path, '/');
        snprintf(name, sizeof name, "%s", base ? base + 1 : s.path);
        char *end = strstr(name, ".vlm");
        if (end && end != name && !end[4]) *end = 0;
        settings->serve.model_name = name;
    }
    ok = ok && serve(s.model, s.engine, &s.work, &settings->serve, &err);
    if (!ok) fprintf(stderr, "vlm: %s\n", err.message);
    session_close(&s);
    return !ok;
}

// ---------------------------------------------------------------------------------------------
// vlm bench

// What this machine reaches: 64 MB of weights once, and a product that stays in the caches.
static Roofline roofline_here(void) {
    enum { N = 4096, K = 4096, T = 256 };
    Roofline r = {.name = "here", .launch = 1e-6};
    size_t bytes = 2 * ((size_t)N * K + T * K) + sizeof(float) * T * N + device_cpu.scratch;
    uint16_t *w = need(device_cpu.reserve(bytes)), *x = w + (size_t)N * K;
    float *y = (float *)(x + (size_t)T * K);
    memset(w, 0x3c, 2 * ((size_t)N * K + T * K));
    for (int again = 0; again < 5; again++) {
        double t0 = now_seconds();
        device_cpu.linear(y, F32, x, w, BF16, NULL, 1, N, K, false);
        double t1 = now_seconds();
        device_cpu.linear(y, F32, x, w, BF16, NULL, T, N, K, false);
        double t2 = now_seconds();
        r.bandwidth = fmax(r.bandwidth, 2.0 * N * K / (t1 - t0)), r.flops = fmax(r.flops, 2.0 * T * N * K / (t2 - t1));
    }
    device_cpu.release(w, bytes);
    r.peak_bandwidth = r.bandwidth, r.peak_flops = r.flops;
    return r;
}

static Model *bench_model(const Settings *settings, Error *err) {
    Config config;
    if (settings->shape) {
        if (!config_shape(settings->shape, &config, err)) return NULL;
        Dtype type;
        if (settings->type && dtype_find(settings->type, &type)) config_retype(&config, type);
        return device_find(settings->device) == &device_null ? model_shape(&config) : model_random(&config, err);
    }
    char *path = settings->model ? need(strdup(settings->model)) : default_model(err);
    Model *model = path ? model_open(path, err) : NULL;
    free(path);
    return model;
}

static int bench_command(const Settings *settings) {
    Error err = {0};
    Roofline r = {0};
    const Device *device = device_find(settings->device);
    BenchOptions bench = settings->bench;
    const char *name = settings->roofline ? settings->roofline : "h100";
    if (strcmp(name, "here") == 0)
        r = roofline_here();
    else if (!null_preset(name, &r))
        usage("--roofline '%s': known are h100, h200, rtx4090 and here", name);
    null_use(&r);
    if (settings->roofline || device == &device_null) bench.roofline = &r;
    if (!bench.repeat) bench.repeat = 3;
    bench.json = settings->json;
    Model *model = bench_model(settings, &err);
    bool ok =
        model && (settings->load ? bench_load(model, device, &settings->engine, settings->load, settings->json, &err)
                                 : bench_stages(model, device, &settings->engine, &bench, &err));
    if (!ok) fprintf(stderr, "vlm: %s\n", err.message);
    model_close(model);
    return ok ? 0 : 1;
}

// Threads that wait for one another by spinning keep the core from those that they wait for: on two busy cores a
// picture took 600 ms that takes 17 when they sleep, and on idle ones there is no difference to see. The OpenMP
// runtime reads its settings before main() begins, so: set them, and begin again.
static void sleep_between_operations(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("OMP_PROC_BIND"))
        return; // bound threads stay: this one's core would be all
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("GOMP_SPINCOUNT", "3000", 0); // some microseconds: what one operation's end takes
    execv("/proc/self/exe", argv);       // where it fails, the program is slower on busy machines
}

int main(int argc, char **argv) {
    sleep_between_operations(argv);
    // Letters of all languages on the command line and in the editor; numbers keep the decimal point.
    if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    Settings settings = settings_parse(argc, argv);
    int status = 0;
    if (settings.threads)
        omp_set_num_threads(settings.threads);
    else if (!getenv("OMP_NUM_THREADS") && !getenv("OMP_PROC_BIND")) // a bound thread sees its own core only
        omp_set_num_threads(allowed_threads());
    if (settings.help)
        help_print();
    else if (settings.version)
        puts("vlm.c " VERSION);
    else if (settings.command == MAP)
        status = map_command(&settings);
    else if (settings.command == SERVE)
        status = serve_command(&settings);
    else if (settings.command == BENCH)
        status = bench_command(&settings);
    else if (settings.command == TOKENIZE)
        status = tokenize_command(&settings);
    else
        status = chat_command(&settings);
    free(settings.images);
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    fprintf(stderr, "vlm: cannot write to standard output: %s\n", strerror(errno));
    return 1;
}
