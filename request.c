// request.c: OpenAI's JSON becomes a prompt and a way to answer, and what the engine writes becomes JSON again.
//
//   messages -> script (roles, texts, tags, pictures to come) -> pictures loaded -> prompt: ids     conversation_read()
//   fields   -> sampling, stops, tools, limits                                                     generation_read()
//   tokens   -> text -> cut at stop strings -> pieces: text and calls of functions                 answer_next()
//
// The chat's files of conversations and the server's bodies go through the same functions, so the same request gives
// the model the same ids.
#include "request.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// Small helpers

void *need(void *memory) {
    if (memory) return memory;
    fputs("vlm: out of memory\n", stderr);
    exit(1);
}

double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

char *text_room(Text *text, size_t extra) {
    if (text->n + extra + 1 > text->cap) {
        text->cap = 2 * (text->n + extra + 32);
        text->data = need(realloc(text->data, text->cap));
    }
    text->data[text->n + extra] = 0;
    return text->data + text->n;
}

void text_add(Text *text, const char *bytes, size_t n) {
    memcpy(text_room(text, n), bytes, n);
    text->n += n;
    text->data[text->n] = 0;
}

void text_format(Text *text, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    vsnprintf(text_room(text, (size_t)n), (size_t)n + 1, format, again);
    text->n += (size_t)n;
    va_end(again);
    va_end(args);
}

void put_clean(FILE *out, const char *text, size_t n, bool lines) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i], next = i + 1 < n ? (unsigned char)text[i + 1] : 0;
        bool c1 = c == 0xc2 && next >= 0x80 && next < 0xa0; // U+0080 .. U+009F, which some terminals obey too
        if (c1 || c == 0x7f || (c < 0x20 && !(lines && (c == '\n' || c == '\t')))) {
            fputs("\xef\xbf\xbd", out);
            i += c1;
        } else {
            fputc(c, out);
        }
    }
}

bool read_all(int fd, Text *out) {
    for (;;) {
        ssize_t got = read(fd, text_room(out, 1 << 16), 1 << 16);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return false;
        out->n += (size_t)got;
        out->data[out->n] = 0;
        if (got == 0) return true;
        if (out->n > MAX_FILE) return errno = EFBIG, false;
    }
}

bool read_file(const char *path, Text *out, Error *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO that nobody writes to must not hold us up
    if (fd >= 0) fcntl(fd, F_SETFL, 0);
    const char *why = fd < 0 || fstat(fd, &st) != 0                   ? strerror(errno)
                      : S_ISDIR(st.st_mode)                           ? "it is a folder"
                      : S_ISREG(st.st_mode) && st.st_size > MAX_FILE  ? strerror(EFBIG)
                      : !S_ISREG(st.st_mode) && !S_ISFIFO(st.st_mode) ? "it is a device"
                      : read_all(fd, out)                             ? NULL
                                                                      : strerror(errno);
    if (fd >= 0) close(fd);
    return !why || fail(err, 400, "cannot read '%.150s': %s", path, why);
}

// A parser of trees takes up to 400 bytes for each "[]," of a body, and a level of its stack for each "[".
static bool json_bounded(const char *text, size_t n, Error *err) {
    enum { DEPTH = 64, CONTAINERS = 1 << 14, VALUES = 1 << 18 };
    int depth = 0, containers = 0, values = 0;
    bool string = false;
    for (size_t i = 0; i < n; i++) {
        char c = text[i];
        if (string) {
            i += c == '\\';
            string = c != '"';
        } else if (c == '"') {
            string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > DEPTH) return fail(err, 400, "the JSON is nested more than %d deep", DEPTH);
            if (++containers > CONTAINERS) return fail(err, 400, "the JSON has over %d arrays and objects", CONTAINERS);
        } else if (c == ']' || c == '}') {
            depth--;
        } else if (c == ',' && ++values > VALUES) {
            return fail(err, 400, "the JSON has over %d values", VALUES);
        }
    }
    return true;
}

json_t *json_read(const char *text, size_t n, Error *err) {
    if (!json_bounded(text, n, err)) return NULL;
    json_error_t where;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &where);
    if (!root) fail(err, 400, "not JSON: %.120s at byte %d", where.text, where.position);
    return root;
}

// ---------------------------------------------------------------------------------------------
// Pictures

void picture_free(Picture *p) {
    image_free(&p->image);
    free(p->bytes.data);
    free(p->path);
    free(p);
}

// What is wrong with it, and which one it is.
static bool picture_fail(const Picture *p, const Error *why, Error *err) {
    char message[24] = "";
    if (p->message) snprintf(message, sizeof message, "message %d: ", p->message);
    if (p->path)
        fail(err, why->status, "%s'%.90s': %s", message, p->path, why->message);
    else
        fail_at(err, "messages", "%s%s", message, why->message);
    err->status = why->status;
    return false;
}

bool picture_probe(Picture *p, Error *err) {
    Error why = {0};
    return image_probe(&p->config, p->bytes.data, p->bytes.n, &p->image, &why) || picture_fail(p, &why, err);
}

bool picture_decode(Picture *p, Workspace *work, Error *err) {
    Error why = {0};
    bool ok = image_load(&p->config, work, p->bytes.data, p->bytes.n, &p->image, &why) || picture_fail(p, &why, err);
    free(p->bytes.data);
    p->bytes = (Text){0};
    return ok;
}

size_t percent_decode(char *s) {
    char *out = s;
    for (const char *in = s; *in; out++) {
        unsigned byte = (unsigned char)*in;
        bool escape = in[0] == '%' && isxdigit((unsigned char)in[1]) && isxdigit((unsigned char)in[2]);
        if (escape) sscanf(in + 1, "%2x", &byte);
        *out = (char)(byte ? byte : '?'); // %00 is in no path and no base64
        in += escape ? 3 : 1;
    }
    *out = 0;
    return (size_t)(out - s);
}

// Base64 with either alphabet, line breaks and blanks anywhere, padding or none. False: it is none.
static bool base64_decode(const char *s, Text *out) {
    uint32_t bits = 0;
    int n = 0, pads = 0;
    text_room(out, strlen(s) / 4 * 3 + 3);
    for (; *s; s++) {
        char c = *s;
        int v = c >= 'A' && c <= 'Z'   ? c - 'A'
                : c >= 'a' && c <= 'z' ? c - 'a' + 26
                : c >= '0' && c <= '9' ? c - '0' + 52
                : c == '+' || c == '-' ? 62
                : c == '/' || c == '_' ? 63
                                       : -1;
        if (isspace((unsigned char)c)) continue;
        if (c == '=' && ++pads <= 2) continue;
        if (v < 0 || pads) return false;
        bits = bits << 6 | (uint32_t)v;
        if (++n % 4) continue;
        out->data[out->n++] = (char)(bits >> 16), out->data[out->n++] = (char)(bits >> 8);
        out->data[out->n++] = (char)bits;
    }
    if (n % 4 == 1 || (pads && (n + pads) % 4)) return false;
    if (n % 4 >= 2) out->data[out->n++] = (char)(n % 4 == 2 ? bits >> 4 : bits >> 10);
    if (n % 4 == 3) out->data[out->n++] = (char)(bits >> 2);
    return true;
}

// "data:image/png;base64,...": what follows the comma decides, the declared type does not.
static bool picture_from_data(Picture *p, const char *url, Error *err) {
    const char *comma = strchr(url, ',');
    if (!comma || comma - url < 12 || strncasecmp(comma - 7, ";base64", 7) != 0)
        return fail(err, 400, "a data: URL must have ';base64,' before its bytes");
    if (strlen(comma + 1) > MAX_FILE) return fail(err, 413, "a data: URL of over %d bytes", MAX_FILE);
    char *plain = strchr(comma, '%') ? need(strdup(comma + 1)) : NULL;
    if (plain) percent_decode(plain);
    bool ok = base64_decode(plain ? plain : comma + 1, &p->bytes);
    free(plain);
    if (!ok) return fail(err, 400, "a data: URL whose base64 is broken");
    return p->bytes.n || fail(err, 400, "a data: URL without any bytes");
}

void file_url_path(const char *url, Text *out) {
    url += strlen("file://");
    if (strncmp(url, "localhost/", 10) == 0) url += 9;
    text_add(out, url, strlen(url));
    out->n = percent_decode(out->data);
}

Picture *picture_from_url(PictureSource *source, const char *url, Error *err) {
    Picture *p = need(calloc(1, sizeof *p));
    p->config = *source->config;
    bool ok = strncasecmp(url, "data:", 5) == 0 ? picture_from_data(p, url, err) : source->fetch(source, url, p, err);
    if (ok) return p;
    picture_free(p);
    return NULL;
}

// ---------------------------------------------------------------------------------------------
// Conversation

void conversation_free(Conversation *c) {
    while (c->n) picture_free(c->pictures[--c->n]);
    free(c->pictures);
    prompt_free(&c->prompt);
    *c = (Conversation){0};
}

bool conversation_attach(Conversation *c, Picture *picture) {
    if (!picture) return false;
    c->pictures = need(realloc(c->pictures, sizeof *c->pictures * ((size_t)c->n + 1)));
    c->pictures[c->n++] = picture;
    return true;
}

// What will be in the prompt: turns of parts, whose texts are the JSON's or the script's own.
typedef struct Turn {
    const char *role;
    Part *parts;
    int n;
} Turn;

typedef struct Script {
    Turn *turns;
    int n;
    char **owned;
    int n_owned;
} Script;

static size_t script_text(const Script *s) { // bytes
    size_t n = 0;
    for (int i = 0; i < s->n; i++)
        for (int k = 0; k < s->turns[i].n; k++) n += s->turns[i].parts[k].n;
    return n;
}

static void script_free(Script *s) {
    for (int i = 0; i < s->n; i++) free(s->turns[i].parts);
    for (int i = 0; i < s->n_owned; i++) free(s->owned[i]);
    free(s->turns);
    free(s->owned);
}

static Turn *script_turn(Script *s, const char *role) {
    s->turns = need(realloc(s->turns, sizeof *s->turns * ((size_t)s->n + 1)));
    s->turns[s->n] = (Turn){.role = role};
    return &s->turns[s->n++];
}

static const char *script_own(Script *s, char *text) {
    s->owned = need(realloc(s->owned, sizeof *s->owned * ((size_t)s->n_owned + 1)));
    return s->owned[s->n_owned++] = need(text);
}

static void turn_add(Turn *t, Part part) {
    t->parts = need(realloc(t->parts, sizeof *t->parts * ((size_t)t->n + 1)));
    t->parts[t->n++] = part;
}

static void turn_say(Turn *t, const char *text) { turn_add(t, (Part){.text = text, .n = strlen(text)}); }
static void turn_tag(Turn *t, const char *tag) { turn_add(t, (Part){.text = tag, .n = strlen(tag), .markup = true}); }

// --- tools, as Qwen2.5's template writes them

static const char CALL[] = "<tool_call>", CALL_END[] = "</tool_call>";

// After the system's text: what may be called, and how.
static void turn_offer(Script *s, Turn *t, json_t *tools) {
    size_t i;
    json_t *tool;
    turn_say(t, "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                "You are provided with function signatures within <tools></tools> XML tags:\n<tools>");
    json_array_foreach(tools, i, tool) {
        turn_say(t, "\n");
        turn_say(t, script_own(s, json_dumps(tool, 0)));
    }
    turn_say(t, "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ");
    turn_tag(t, CALL), turn_tag(t, CALL_END);
    turn_say(t, " XML tags:\n");
    turn_tag(t, CALL);
    turn_say(t, "\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n");
    turn_tag(t, CALL_END);
}

// The calls that the assistant made: OpenAI keeps arguments as a JSON text, the template wants the object.
static bool turn_calls(Script *s, Turn *t, json_t *calls, Error *err) {
    size_t i;
    json_t *call;
    if (!json_is_array(calls)) return fail(err, 400, "\"tool_calls\" must be an array");
    json_array_foreach(calls, i, call) {
        json_t *function = json_object_get(call, "function"), *given = json_object_get(function, "arguments");
        const char *name = json_string_value(json_object_get(function, "name"));
        Error why;
        json_t *arguments = json_is_string(given) ? json_read(json_string_value(given), json_string_length(given), &why)
                                                  : json_incref(given);
        if (json_is_string(given) && !json_string_length(given)) arguments = json_object();
        bool ok = name && json_is_object(arguments);
        json_t *object = ok ? json_pack("{s:s, s:O}", "name", name, "arguments", arguments) : NULL;
        json_decref(arguments);
        if (!ok) return fail(err, 400, "call %zu needs a function's name and its arguments, a JSON object", i + 1);
        if (t->n) turn_say(t, "\n");
        turn_tag(t, CALL);
        turn_say(t, "\n");
        turn_say(t, script_own(s, json_dumps(object, 0)));
        json_decref(object);
        turn_say(t, "\n");
        turn_tag(t, CALL_END);
    }
    return true;
}

// --- messages

// A limit of the picture's size: beside the picture or in its image_url.
static bool picture_limit(json_t *item, json_t *inner, const char *name, int64_t low, int64_t high, int64_t *out,
                          Error *err) {
    json_t *value = json_object_get(item, name);
    if (!value || json_is_null(value)) value = json_object_get(inner, name);
    if (!value || json_is_null(value)) return true;
    double number = json_is_number(value) ? json_number_value(value) : -1;
    if (!(number >= (double)low && number <= (double)high) || number != floor(number))
        return fail_at(err, name, "%s must be a whole number from %lld to %lld", name, (long long)low, (long long)high);
    *out = (int64_t)number;
    return true;
}

static bool picture_limits(Picture *p, json_t *item, json_t *inner, Error *err) {
    ImageConfig *c = &p->config;
    json_t *given = json_object_get(inner, "detail");
    const char *detail = json_string_value(given);
    int64_t unit = (int64_t)c->patch * c->merge, least = unit * unit, most = c->max_pixels, low = 512 * 512;
    if (given && !json_is_null(given) &&
        (!detail || (strcmp(detail, "low") && strcmp(detail, "high") && strcmp(detail, "auto"))))
        return fail_at(err, "detail", "detail must be low, high or auto");
    if (detail && !strcmp(detail, "low") && most > low) c->max_pixels = low;
    if (c->min_pixels > c->max_pixels) c->min_pixels = c->max_pixels;
    if (!picture_limit(item, inner, "max_pixels", least, most, &c->max_pixels, err)) return false;
    if (c->min_pixels > c->max_pixels) c->min_pixels = c->max_pixels;
    return picture_limit(item, inner, "min_pixels", 1, c->max_pixels, &c->min_pixels, err);
}

// {"type": "text", "text": T}, {"type": "image", "image": URL} or {"type": "image_url", "image_url": {"url": URL}}
static bool part_read(Conversation *c, PictureSource *source, Turn *turn, json_t *item, Error *err) {
    const char *type = json_string_value(json_object_get(item, "type"));
    if (!type) return fail(err, 400, "a part of a message needs a \"type\"");
    if (strcmp(type, "text") == 0) {
        json_t *text = json_object_get(item, "text");
        if (!json_is_string(text)) return fail(err, 400, "a part of type \"text\" needs a string \"text\"");
        turn_add(turn, (Part){.text = json_string_value(text), .n = json_string_length(text)});
        return true;
    }
    if (strcmp(type, "image") != 0 && strcmp(type, "image_url") != 0)
        return fail(err, 400, "a part of type \"%.40s\": text, image and image_url are taken", type);
    json_t *inner = json_object_get(item, type), *url = json_is_object(inner) ? json_object_get(inner, "url") : inner;
    if (!json_is_string(url)) return fail(err, 400, "a part of type \"%s\" does not say which picture", type);
    if (strlen(json_string_value(url)) != json_string_length(url)) return fail(err, 400, "a URL with a zero in it");
    if (c->n >= source->most) return fail(err, 400, "over the limit of %d pictures a request", source->most);
    if (!conversation_attach(c, picture_from_url(source, json_string_value(url), err))) return false;
    Picture *p = c->pictures[c->n - 1];
    p->message = c->message;
    turn_add(turn, (Part){.image = &p->image});
    return picture_limits(p, item, inner, err);
}

static bool content_read(Conversation *c, PictureSource *source, Turn *turn, json_t *content, Error *err) {
    size_t i;
    json_t *item;
    if (json_is_string(content)) {
        turn_add(turn, (Part){.text = json_string_value(content), .n = json_string_length(content)});
        return true;
    }
    if (!json_is_array(content) && content && !json_is_null(content))
        return fail(err, 400, "\"content\" must be a string, null or an array of parts");
    json_array_foreach(content, i, item) if (!part_read(c, source, turn, item, err)) return false;
    return true;
}

static bool message_read(Conversation *c, PictureSource *source, Script *s, json_t *message, bool after_tool,
                         Error *err) {
    const char *role = json_string_value(json_object_get(message, "role"));
    json_t *content = json_object_get(message, "content"), *calls = json_object_get(message, "tool_calls");
    if (!role) return fail(err, 400, "it needs a \"role\"");
    if (strcmp(role, "developer") == 0) role = "system";
    if (strcmp(role, "system") && strcmp(role, "user") && strcmp(role, "assistant") && strcmp(role, "tool"))
        return fail(err, 400, "the role \"%.40s\" is none of system, developer, user, assistant and tool", role);
    if (strcmp(role, "tool") == 0) { // what functions returned is the user's to say, all of it in one turn
        Turn *t = after_tool ? &s->turns[s->n - 1] : script_turn(s, "user");
        turn_say(t, after_tool ? "\n" : "");
        turn_tag(t, "<tool_response>");
        turn_say(t, "\n");
        if (!content_read(c, source, t, content, err)) return false;
        turn_say(t, "\n");
        turn_tag(t, "</tool_response>");
        return true;
    }
    Turn *t = script_turn(s, role);
    if (!content_read(c, source, t, content, err)) return false;
    if (!calls || json_is_null(calls) || (json_is_array(calls) && json_array_size(calls) == 0)) return true;
    if (strcmp(role, "assistant")) return fail(err, 400, "\"tool_calls\" are the assistant's only");
    if (t->n == 1 && t->parts[0].text && !t->parts[0].n) t->n = 0; // "" beside calls is no content
    return turn_calls(s, t, calls, err);
}

static bool is_role(json_t *message, const char *role) {
    const char *is = json_string_value(json_object_get(message, "role"));
    return is && strcmp(is, role) == 0;
}

static bool script_read(Conversation *c, PictureSource *source, const Tokenizer *tok, json_t *messages,
                        const Tools *tools, Script *s, Error *err) {
    size_t n = json_array_size(messages);
    bool offer = tools && tools->list && tools->choice != TOOL_NONE;
    if (n == 0) return fail_at(err, "messages", "a conversation is an array of messages, and not an empty one");
    json_t *first = json_array_get(messages, 0);
    if (offer && !is_role(first, "system") && !is_role(first, "developer")) {
        Turn *t = script_turn(s, "system");
        turn_say(t, tokenizer_default_system(tok));
        turn_offer(s, t, tools->list);
    }
    for (size_t i = 0; i < n; i++) {
        Error why = {0};
        c->message = (int)i + 1;
        bool after_tool = i && is_role(json_array_get(messages, i - 1), "tool");
        if (!message_read(c, source, s, json_array_get(messages, i), after_tool, &why)) {
            fail_at(err, *why.param ? why.param : "messages", "message %zu: %.220s", i + 1, why.message);
            err->status = why.status;
            return false;
        }
        if (offer && i == 0 && s->n == 1) turn_offer(s, &s->turns[0], tools->list);
    }
    return true;
}

// A call that must be made is begun in the model's place. The blank before what follows is the model's, because with
// it starts a token.
static bool conversation_force(Conversation *c, const Tokenizer *tok, const Tools *tools, Text *begun, Error *err) {
    if (!tools || !tools->list || tools->choice < TOOL_REQUIRED) return true;
    Text text = {0};
    text_format(&text, "\n{\"name\": \"");
    if (tools->choice == TOOL_NAMED) text_format(&text, "%s\", \"arguments\":", tools->name);
    Part parts[] = {{.text = CALL, .n = strlen(CALL), .markup = true}, {.text = text.data, .n = text.n}};
    bool ok = prompt_begin_reply(&c->prompt, tok, parts, 2, err);
    text_format(begun, "%s%s", CALL, text.data);
    free(text.data);
    return ok;
}

bool conversation_read(Conversation *c, PictureSource *source, const Tokenizer *tok, json_t *messages,
                       const Tools *tools, Text *begun, Error *err) {
    Script s = {0};
    bool ok = script_read(c, source, tok, messages, tools, &s, err);
    if (ok && source->most_text && script_text(&s) > source->most_text)
        ok = fail_at(err, "messages", "a text of %zu bytes, over the %zu that are taken for the context's length",
                     script_text(&s), source->most_text);
    ok = ok && source->decode(source, c->pictures, c->n, err);
    for (int i = 0; ok && i < s.n; i++)
        ok = prompt_add(&c->prompt, tok, source->config, s.turns[i].role, s.turns[i].parts, s.turns[i].n, err);
    if (ok) prompt_open_reply(&c->prompt, tok);
    ok = ok && conversation_force(c, tok, tools, begun, err);
    c->sent = c->n;
    script_free(&s);
    return ok;
}

// ---------------------------------------------------------------------------------------------
// Fields. null is as good as absent.

static json_t *field(json_t *body, const char *name) {
    json_t *value = json_object_get(body, name);
    return json_is_null(value) ? NULL : value;
}

static bool field_flag(json_t *body, const char *name, bool *out, Error *err) {
    json_t *value = field(body, name);
    if (!value) return true;
    if (!json_is_boolean(value)) return fail_at(err, name, "%s must be true or false", name);
    *out = json_is_true(value);
    return true;
}

static bool field_real(json_t *body, const char *name, double low, double high, float *out, Error *err) {
    json_t *value = field(body, name);
    if (!value) return true;
    double number = json_is_number(value) ? json_number_value(value) : NAN;
    if (!(number >= low && number <= high))
        return fail_at(err, name, "%s must be a number from %g to %g", name, low, high);
    *out = (float)number;
    return true;
}

// 5.0 is whole: not every client tells integers from other numbers.
static bool field_whole(json_t *body, const char *name, int64_t low, int64_t high, int64_t *out, Error *err) {
    json_t *value = field(body, name);
    if (!value) return true;
    double number = json_is_real(value) ? json_real_value(value) : 0;
    bool ok = json_is_integer(value) || (json_is_real(value) && number == floor(number) && fabs(number) < 0x1p62);
    int64_t whole = json_is_integer(value) ? json_integer_value(value) : ok ? (int64_t)number : 0;
    if (!ok || whole < low || whole > high)
        return fail_at(err, name, "%s must be a whole number from %lld to %lld", name, (long long)low, (long long)high);
    *out = whole;
    return true;
}

static bool field_int(json_t *body, const char *name, int low, int high, int *out, Error *err) {
    int64_t whole = *out;
    if (!field_whole(body, name, low, high, &whole, err)) return false;
    *out = (int)whole;
    return true;
}

static bool sampling_read(Generation *g, json_t *body, Error *err) {
    Sampling *s = &g->sampling;
    int64_t seed = 0;
    int top_k = 0;
    if (!field_real(body, "temperature", 0, 2, &s->temperature, err) ||
        !field_real(body, "top_p", 0, 1, &s->top_p, err) || !field_real(body, "min_p", 0, 1, &s->min_p, err) ||
        !field_real(body, "presence_penalty", -2, 2, &s->presence_penalty, err) ||
        !field_real(body, "frequency_penalty", -2, 2, &s->frequency_penalty, err) ||
        !field_real(body, "repetition_penalty", 0.01, 100, &s->repetition_penalty, err) ||
        !field_int(body, "top_k", -1, INT32_MAX, &top_k, err) ||
        !field_whole(body, "seed", INT64_MIN, INT64_MAX, &seed, err))
        return false;
    s->top_k = top_k < 0 ? 0 : top_k;
    s->seed = (uint64_t)seed;
    g->seeded = field(body, "seed") != NULL;
    return field_int(body, "n", 1, MAX_N, &g->n, err);
}

static bool max_tokens_read(Generation *g, json_t *body, Error *err) {
    int older = 0, newer = 0;
    if (!field_int(body, "max_tokens", 1, INT32_MAX, &older, err) ||
        !field_int(body, "max_completion_tokens", 1, INT32_MAX, &newer, err))
        return false;
    if (older && newer && older != newer)
        return fail_at(err, "max_tokens", "max_tokens and max_completion_tokens mean the same and differ");
    if (older || newer) g->max_tokens = older ? older : newer;
    return true;
}

static bool stop_read(Generation *g, json_t *body, Error *err) {
    json_t *value = field(body, "stop");
    size_t n = json_is_string(value) ? 1 : json_array_size(value);
    if (!value) return true;
    if (n > MAX_STOPS || (!json_is_string(value) && !json_is_array(value)))
        return fail_at(err, "stop", "stop must be a string, or an array of at most %d", MAX_STOPS);
    for (size_t i = 0; i < n; i++) {
        json_t *item = json_is_string(value) ? value : json_array_get(value, i);
        size_t length = json_string_length(item);
        if (!json_is_string(item) || length < 1 || length > MAX_STOP)
            return fail_at(err, "stop", "a stop string has from 1 to %d bytes", MAX_STOP);
        g->stops[g->n_stops++] = (Stop){json_string_value(item), length};
    }
    return true;
}

static bool logprobs_read(Generation *g, json_t *body, bool text, Error *err) {
    int top = -1;
    if (text) { // /v1/completions: a number
        if (!field_int(body, "logprobs", 0, MAX_LOGPROBS, &top, err)) return false;
        g->logprobs = top >= 0;
    } else {
        if (!field_flag(body, "logprobs", &g->logprobs, err) ||
            !field_int(body, "top_logprobs", 0, MAX_LOGPROBS, &top, err))
            return false;
        if (top > 0 && !g->logprobs) return fail_at(err, "top_logprobs", "top_logprobs needs logprobs: true");
    }
    g->sampling.logprobs = top > 0 ? top : 0;
    return true;
}

static bool biases_read(Generation *g, json_t *body, int vocab, Error *err) {
    json_t *value = field(body, "logit_bias"), *number;
    const char *key;
    if (!value) return true;
    if (!json_is_object(value)) return fail_at(err, "logit_bias", "logit_bias must be an object of ids and numbers");
    if (json_object_size(value) > MAX_BIASES)
        return fail_at(err, "logit_bias", "logit_bias has over %d entries", MAX_BIASES);
    g->biases = need(calloc(json_object_size(value) + 1, sizeof *g->biases));
    json_object_foreach(value, key, number) {
        char *end;
        long id = isdigit((unsigned char)*key) ? strtol(key, &end, 10) : -1;
        double bias = json_is_number(number) ? json_number_value(number) : NAN;
        if (id < 0 || *end || id >= vocab || (key[0] == '0' && key[1]))
            return fail_at(err, "logit_bias", "logit_bias: '%.40s' is no token id from 0 to %d", key, vocab - 1);
        if (!(bias >= -100 && bias <= 100))
            return fail_at(err, "logit_bias", "logit_bias of %ld must be a number from -100 to 100", id);
        g->biases[g->n_biases++] = (TokenCount){.id = (int32_t)id, .bias = (float)bias};
    }
    return true;
}

static bool stream_read(Generation *g, json_t *body, Error *err) {
    json_t *options = field(body, "stream_options");
    if (!field_flag(body, "stream", &g->stream, err)) return false;
    if (!options) return true;
    if (!json_is_object(options)) return fail_at(err, "stream_options", "stream_options must be an object");
    if (!g->stream) return fail_at(err, "stream_options", "stream_options needs stream: true");
    return field_flag(options, "include_usage", &g->include_usage, err);
}

static bool format_read(json_t *body, Error *err) {
    json_t *value = field(body, "response_format");
    const char *type = json_string_value(json_object_get(value, "type"));
    if (!value) return true;
    if (!type) return fail_at(err, "response_format", "response_format must be an object with a \"type\"");
    if (strcmp(type, "text") == 0) return true;
    return fail_at(err, "response_format", "response_format \"%.40s\" is not offered here: text only", type);
}

// --- tools

// A JSON Schema as far as a template needs it: no validator, but what cannot be one is refused.
static bool schema_check(json_t *schema, Error *err) {
    static const char *const types[] = {"object", "array", "string", "number", "integer", "boolean", "null"};
    json_t *type = json_object_get(schema, "type"), *required = json_object_get(schema, "required"),
           *properties = json_object_get(schema, "properties"), *item;
    size_t i, n = json_is_array(type) ? json_array_size(type) : type ? 1 : 0;
    const char *name;
    if (json_is_boolean(schema)) return true;
    if (!json_is_object(schema)) return fail_at(err, "tools", "a schema must be an object");
    for (i = 0; i < n; i++) {
        const char *is = json_string_value(json_is_array(type) ? json_array_get(type, i) : type);
        size_t k = 0;
        while (is && k < sizeof types / sizeof *types && strcmp(is, types[k])) k++;
        if (!is || k == sizeof types / sizeof *types)
            return fail_at(err, "tools", "a schema's \"type\" is \"%.40s\"", is ? is : "no string");
    }
    if (required && !json_is_array(required)) return fail_at(err, "tools", "a schema's \"required\" must be an array");
    json_array_foreach(required, i, item) if (!json_is_string(item)) return fail_at(
        err, "tools", "a schema's \"required\" must hold names");
    if (properties && !json_is_object(properties))
        return fail_at(err, "tools", "a schema's \"properties\" must be an object");
    json_object_foreach(properties, name, item) if (!schema_check(item, err)) return false;
    item = json_object_get(schema, "items");
    return !item || schema_check(item, err);
}

static const char *tool_name(json_t *tool) {
    return json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
}

static json_t *tool_find(json_t *tools, const char *name) {
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) if (tool_name(tool) && !strcmp(tool_name(tool), name)) return tool;
    return NULL;
}

static bool tool_check(json_t *tools, json_t *tool, Error *err) {
    const char *type = json_string_value(json_object_get(tool, "type")), *name = tool_name(tool);
    json_t *parameters = json_object_get(json_object_get(tool, "function"), "parameters");
    if (!type || strcmp(type, "function")) return fail_at(err, "tools", "a tool's \"type\" must be \"function\"");
    size_t n = name ? strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") : 0;
    if (n < 1 || n > 64 || name[n])
        return fail_at(err, "tools", "a function's \"name\" has 1 to 64 letters, digits, _ and -");
    if (tool_find(tools, name) != tool) return fail_at(err, "tools", "two functions are called \"%s\"", name);
    return !parameters || json_is_null(parameters) || schema_check(parameters, err);
}

static bool choice_read(Tools *tools, json_t *body, Error *err) {
    json_t *value = field(body, "tool_choice");
    const char *word = json_string_value(value);
    tools->choice = tools->list ? TOOL_AUTO : TOOL_NONE;
    if (!value || (word && strcmp(word, "none") == 0)) {
        if (value) tools->choice = TOOL_NONE;
        return true;
    }
    if (word && strcmp(word, "auto") == 0) return true;
    if (!tools->list) return fail_at(err, "tool_choice", "tool_choice needs tools");
    if (word && strcmp(word, "required") == 0) return tools->choice = TOOL_REQUIRED, true;
    tools->name = json_is_object(value) ? tool_name(value) : NULL;
    if (!tools->name)
        return fail_at(err, "tool_choice", "tool_choice must be none, auto, required or a function of tools");
    if (!tool_find(tools->list, tools->name))
        return fail_at(err, "tool_choice", "tool_choice names \"%.64s\", which is not among the tools", tools->name);
    tools->choice = TOOL_NAMED;
    return true;
}

static bool tools_read(Tools *tools, json_t *body, Error *err) {
    json_t *list = field(body, "tools"), *tool;
    size_t i;
    if (list && !json_is_array(list)) return fail_at(err, "tools", "tools must be an array");
    if (json_array_size(list) > 128) return fail_at(err, "tools", "over 128 tools");
    json_array_foreach(list, i, tool) if (!tool_check(list, tool, err)) return false;
    tools->list = json_array_size(list) ? list : NULL;
    tools->parallel = true;
    return field_flag(body, "parallel_tool_calls", &tools->parallel, err) && choice_read(tools, body, err);
}

// --- all fields of a body

// Fields that somebody reads. Of the others the caller is told.
static const char *const known_fields[] = {"model",
                                           "max_tokens",
                                           "temperature",
                                           "top_p",
                                           "top_k",
                                           "min_p",
                                           "presence_penalty",
                                           "frequency_penalty",
                                           "repetition_penalty",
                                           "seed",
                                           "n",
                                           "stop",
                                           "logprobs",
                                           "logit_bias",
                                           "stream",
                                           "stream_options",
                                           "cache_salt",
                                           "user", // so far for both; from here on for one of them:
                                           "messages",
                                           "max_completion_tokens",
                                           "top_logprobs",
                                           "response_format",
                                           "tools",
                                           "tool_choice",
                                           "parallel_tool_calls",
                                           "prompt",
                                           "echo",
                                           "suffix",
                                           "best_of"};
enum { N_KNOWN = sizeof known_fields / sizeof *known_fields, FIRST_CHAT = 18, FIRST_TEXT = 25 };

static bool field_known(const char *name, bool text) {
    for (int i = 0; i < N_KNOWN; i++)
        if (!strcmp(name, known_fields[i])) return i < FIRST_CHAT || (i >= FIRST_TEXT) == text;
    return false;
}

static bool unknown_read(Generation *g, json_t *body, bool text, bool strict, Error *err) {
    enum { TOLD = 16 };
    const char *name;
    json_t *value;
    json_object_foreach(body, name, value) {
        if (field_known(name, text)) continue;
        if (strict) return fail_at(err, name, "unknown field \"%.100s\"", name);
        if (json_array_size(g->warnings) >= TOLD) continue;
        Error told;
        fail(&told, 200, "unknown field \"%.100s\" ignored", name);
        json_array_append_new(g->warnings, json_string(told.message));
    }
    return true;
}

bool generation_read(Generation *g, json_t *body, bool text, bool strict, const Tokenizer *tok, Error *err) {
    *g = (Generation){.n = 1,
                      .max_tokens = text ? 16 : 0,
                      .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
                      .warnings = need(json_array())};
    json_t *salt = field(body, "cache_salt"), *user = field(body, "user");
    if (!json_is_object(body)) return fail(err, 400, "the body must be a JSON object");
    if (salt && !json_is_string(salt)) return fail_at(err, "cache_salt", "cache_salt must be a string");
    if (user && !json_is_string(user)) return fail_at(err, "user", "user must be a string");
    if (salt) SHA256((const uint8_t *)json_string_value(salt), json_string_length(salt), g->salt);
    return unknown_read(g, body, text, strict, err) && sampling_read(g, body, err) && max_tokens_read(g, body, err) &&
           stop_read(g, body, err) && logprobs_read(g, body, text, err) &&
           biases_read(g, body, tokenizer_vocab(tok), err) && stream_read(g, body, err) &&
           (text || (format_read(body, err) && tools_read(&g->tools, body, err)));
}

void generation_free(Generation *g) {
    free(g->biases);
    json_decref(g->warnings);
    *g = (Generation){0};
}

uint64_t random_seed(void) {
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed) seed = (uint64_t)(now_seconds() * 1e9);
    return seed >> 11;
}

// ---------------------------------------------------------------------------------------------
// Answer

// Where the first stop string begins in the bytes from `from` on; SIZE_MAX: in none of them. Nothing that was settled
// can be a part of one.
static size_t stop_find(const Answer *a, size_t from) {
    size_t first = SIZE_MAX;
    for (int i = 0; i < a->how->n_stops; i++) {
        const Stop *stop = &a->how->stops[i];
        const char *found = memmem(a->text.data + from, a->text.n - from, stop->text, stop->n);
        if (found && (size_t)(found - a->text.data) < first) first = (size_t)(found - a->text.data);
    }
    return first;
}

// Bytes at the end of the text, after `from`, that a stop string may begin with.
static size_t stop_pending(const Answer *a, size_t from) {
    size_t longest = 0;
    for (int i = 0; i < a->how->n_stops; i++) {
        const Stop *stop = &a->how->stops[i];
        size_t k = a->text.n - from < stop->n - 1 ? a->text.n - from : stop->n - 1;
        while (k > longest && memcmp(a->text.data + a->text.n - k, stop->text, k)) k--;
        if (k > longest) longest = k;
    }
    return longest;
}

static size_t call_end(Answer *a);

// Where the answer ends, now that it has the text of one token more; SIZE_MAX: it goes on. Decided token by token, so
// that it does not matter how many come at a time.
static size_t answer_end(Answer *a, size_t from) {
    if (!a->how) return SIZE_MAX;
    size_t stop = stop_find(a, from);
    bool one_call = a->how->tools.choice == TOOL_NAMED || !a->how->tools.parallel;
    return stop == SIZE_MAX && one_call ? call_end(a) : stop;
}

static void answer_cut(Answer *a, size_t from) {
    size_t end = answer_end(a, from);
    if (end == SIZE_MAX) return;
    a->text.n = end;
    a->stopped = true;
}

void answer_read(Answer *a, const Tokenizer *tok, int n, bool finished) {
    size_t from = a->settled > a->begun ? a->settled : a->begun;
    for (; a->read < n && !a->stopped; a->read++) {
        char *room = text_room(&a->text, stream_room(tok));
        a->text.n += stream_push(&a->stream, tok, answer_ids(a)[a->read], room);
        answer_cut(a, from);
    }
    if (finished && !a->stopped) { // a character of which there is a part becomes U+FFFD, and that may be a stop
        a->text.n += stream_end(&a->stream, text_room(&a->text, 3));
        answer_cut(a, from);
    }
    text_add(&a->text, "", 0); // the 0 at the end
    a->finished = finished || a->stopped;
    a->settled = a->finished || !a->how ? a->text.n : a->text.n - stop_pending(a, from);
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// {"name": ..., "arguments": {...}} of one of the tools, as OpenAI writes it. NULL: it is none.
static json_t *call_parse(const Answer *a, const char *text, size_t n) {
    Error why;
    json_t *call = json_read(text, n, &why);
    const char *name = json_string_value(json_object_get(call, "name"));
    json_t *arguments = json_object_get(call, "arguments"), *out = NULL;
    bool whole = !arguments || json_is_null(arguments) || json_is_object(arguments);
    if (name && whole && tool_find(a->how->tools.list, name)) {
        char *text_of = json_is_object(arguments) ? need(json_dumps(arguments, 0)) : need(strdup("{}"));
        json_t *id = json_sprintf("call_%016llx%08x", (unsigned long long)a->seed, a->calls);
        out = need(json_pack("{s:o, s:s, s:{s:s, s:s}}", "id", id, "type", "function", "function", "name", name,
                             "arguments", text_of));
        free(text_of);
    }
    json_decref(call);
    return out;
}

// Where in text[at .. end) a call begins, or may begin at its end.
static size_t call_find(const char *text, size_t at, size_t end) {
    size_t length = strlen(CALL);
    for (; at < end; at++)
        if (!memcmp(text + at, CALL, end - at < length ? end - at : length)) break;
    return at;
}

static bool takes_calls(const Answer *a) { return a->how && a->how->tools.list && a->how->tools.choice != TOOL_NONE; }

// Where the call that begins at `tag` ends: at the first end tag outside of JSON's strings, which cannot be part of
// JSON. SIZE_MAX: not in the n bytes that there are. Each byte is looked at once, however the text comes.
static size_t call_close(CallScan *scan, const char *text, size_t tag, size_t n) {
    size_t body = tag + strlen(CALL), length = strlen(CALL_END);
    if (scan->at < body) *scan = (CallScan){.at = body};
    for (; scan->at < n; scan->at++) {
        char c = text[scan->at];
        size_t left = n - scan->at;
        if (scan->string) {
            scan->string = c != '"' || scan->escaped;
            scan->escaped = c == '\\' && !scan->escaped;
        } else if (c == '"') {
            scan->string = true;
        } else if (!memcmp(text + scan->at, CALL_END, left < length ? left : length)) {
            return left < length ? SIZE_MAX : scan->at + length;
        }
    }
    return SIZE_MAX;
}

static json_t *call_take(const Answer *a, size_t tag, size_t end) {
    size_t body = tag + strlen(CALL);
    return call_parse(a, a->text.data + body, end - strlen(CALL_END) - body);
}

// The end of the first call, when it is the only one wanted.
static size_t call_end(Answer *a) {
    size_t n = a->text.n;
    while (takes_calls(a) && a->sought < n) {
        a->sought = call_find(a->text.data, a->sought, n);
        size_t end = n - a->sought < strlen(CALL) ? SIZE_MAX : call_close(&a->seeking, a->text.data, a->sought, n);
        if (end == SIZE_MAX) break;
        json_t *call = call_take(a, a->sought, end);
        json_decref(call);
        if (call) return end;
        a->sought = end;
    }
    return SIZE_MAX;
}

static bool piece_text(Answer *a, Piece *piece, size_t end) {
    *piece = (Piece){.text = a->text.data + a->at, .n = end - a->at};
    a->at = end;
    return piece->n > 0;
}

// The call that begins at `tag`, if its end is there.
static bool piece_call(Answer *a, Piece *piece, size_t tag) {
    size_t end = call_close(&a->taking, a->text.data, tag, a->settled);
    if (end == SIZE_MAX) return a->finished && piece_text(a, piece, a->settled);
    if (!(piece->call = call_take(a, tag, end))) return piece_text(a, piece, end);
    a->at = a->called = end, a->calls++;
    return true;
}

bool answer_next(Answer *a, Piece *piece) {
    *piece = (Piece){0};
    if (!takes_calls(a)) return piece_text(a, piece, a->settled);
    const char *text = a->text.data;
    size_t end = a->settled, tag = call_find(text, a->at, end), stop = tag;
    while (stop > a->at && is_blank(text[stop - 1])) stop--; // blanks before a call belong to it
    if (tag == end && a->finished) stop = stop == a->at && a->calls && a->at == a->called ? stop : end; // or after one
    if (stop > a->at) return piece_text(a, piece, stop);
    if (end - tag >= strlen(CALL)) return piece_call(a, piece, tag);
    return a->finished && tag < end && piece_text(a, piece, end);
}

const char *answer_finish(const Answer *a) {
    Finish finish = a->seq->finish;
    if (a->calls && (a->stopped || finish == FINISH_STOP)) return "tool_calls";
    return a->stopped || finish == FINISH_STOP ? "stop" : finish == FINISH_LENGTH ? "length" : "cancelled";
}

static double span_ms(double from, double to) { return from > 0 && to > from ? (to - from) * 1e3 : 0; }

Receipt receipt_make(const Sequence *q) {
    Receipt r = {
        .prompt = q->n_prompt,
        .image = q->image_tokens,
        .cached = q->cached_tokens,
        .written = q->n_tokens - q->n_prompt,
        .queue = span_ms(q->t_submit, q->t_admit),
        .vision = q->vision_seconds * 1e3,
        .prefill = span_ms(q->t_admit, q->t_first),
        .first = span_ms(q->t_submit, q->t_first),
        .decode = span_ms(q->t_first, q->t_last),
        .total = span_ms(q->t_submit, q->t_last),
    };
    r.rate = r.decode > 0 ? (r.written - 1) / r.decode * 1e3 : 0;
    return r;
}

// ---------------------------------------------------------------------------------------------
// JSON

json_t *logprob_json(float logprob) { return json_real(isfinite(logprob) ? logprob : -9999.0); }

json_t *receipt_json(const Conversation *c, const Answer *a, size_t token_bytes, size_t row_bytes) {
    Receipt r = receipt_make(a->seq);
    double decode = 0, resize = 0;
    size_t decode_bytes = 0, resize_bytes = 0;
    for (int i = 0; i < c->n; i++) {
        const Image *im = &c->pictures[i]->image;
        decode += im->decode_seconds * 1e3, resize += im->resize_seconds * 1e3;
        decode_bytes = im->decode_bytes > decode_bytes ? im->decode_bytes : decode_bytes;
        resize_bytes += (size_t)im->width * im->height * 3;
    }
    return json_pack(
        "{s:{s:f}, s:{s:f, s:I}, s:{s:f, s:I}, s:{s:f, s:I, s:i, s:i}, s:{s:f, s:I, s:i, s:i}, s:{s:f, s:I, s:i}}", //
        "queue", "ms", r.queue,                                                                                     //
        "picture_decode", "ms", decode, "bytes", (json_int_t)decode_bytes,                                          //
        "picture_resize", "ms", resize, "bytes", (json_int_t)resize_bytes,                                          //
        "vision", "ms", r.vision, "bytes", (json_int_t)(r.image * row_bytes), "computed", a->seq->vision_runs,
        "from_cache", a->seq->image_hits, //
        "prefill", "ms", r.prefill, "bytes", (json_int_t)((r.prompt - r.cached) * token_bytes), "computed",
        r.prompt - r.cached, "from_cache", r.cached, //
        "decode", "ms", r.decode, "bytes", (json_int_t)(r.written * token_bytes), "computed", r.written);
}

json_t *map_json(const MemoryMap *m, size_t decode_workspace, size_t bodies, size_t pictures) {
    json_t *owners = json_array();
    for (const Owner *o = m->owners; o < m->owners + N_OWNERS; o++)
        json_array_append_new(owners, json_pack("{s:s, s:I, s:I, s:I}", "name", o->name, "bytes", (json_int_t)o->bytes,
                                                "used", (json_int_t)o->used, "peak", (json_int_t)o->peak));
    json_t *blocks = json_pack("{s:i, s:i, s:i, s:i}", "total", m->blocks, "free", m->blocks_free, "cached",
                               m->blocks_cached, "held", m->blocks_held);
    json_t *images = json_pack("{s:i, s:i, s:i, s:I, s:I, s:I}", "slots", m->slots, "used", m->slots_used, "pinned",
                               m->slots_pinned, "hits", (json_int_t)m->image_hits, "misses",
                               (json_int_t)m->image_misses, "evictions", (json_int_t)m->image_evictions);
    json_t *map =
        json_pack("{s:s, s:I, s:o, s:o, s:o, s:{s:i, s:i}, s:{s:I, s:I, s:I}}", "device", m->device, "total",
                  (json_int_t)m->total, "owners", owners, "blocks", blocks, "images", images, "sequences", "running",
                  m->running, "waiting", m->waiting, "host", "decode_workspace", (json_int_t)decode_workspace, "bodies",
                  (json_int_t)bodies, "pictures", (json_int_t)pictures);
    const DeviceMemory *d = &m->driver;
    if (d->total)
        json_object_set_new(map, "driver",
                            json_pack("{s:I, s:I, s:I, s:I}", "total", (json_int_t)d->total, "free",
                                      (json_int_t)d->available, "context", (json_int_t)d->context, "slack",
                                      (json_int_t)d->slack));
    return map;
}

bool ids_text(const Tokenizer *tok, json_t *list, Text *out, Error *err) {
    TextStream stream = {0};
    size_t i, n;
    json_t *item;
    json_array_foreach(list, i, item) {
        json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
        const char *bytes = id >= 0 && id <= INT32_MAX ? tokenizer_bytes(tok, (int32_t)id, &n) : NULL;
        if (!bytes)
            return fail(err, 400, "item %zu is no id of this vocabulary (0 to %d)", i, tokenizer_vocab(tok) - 1);
        char *room = text_room(out, stream_room(tok) + 3);
        out->n += tokenizer_is_special(tok, (int32_t)id) ? stream_end(&stream, room)
                                                         : stream_push(&stream, tok, (int32_t)id, room);
        if (tokenizer_is_special(tok, (int32_t)id)) text_add(out, bytes, n);
    }
    out->n += stream_end(&stream, text_room(out, 3));
    return true;
}

// A token's own text: bytes that are no whole character show as U+FFFD.
static json_t *token_json(const Tokenizer *tok, int32_t id) {
    Text text = {0};
    TextStream stream = {0};
    size_t n = 0;
    const char *bytes = tokenizer_bytes(tok, id, &n);
    if (tokenizer_is_special(tok, id)) {
        text_add(&text, bytes, n);
    } else {
        text.n = stream_push(&stream, tok, id, text_room(&text, stream_room(tok) + 3));
        text.n += stream_end(&stream, text.data + text.n);
    }
    json_t *out = json_stringn(text.data, text.n);
    free(text.data);
    return out;
}

static json_t *token_logprob_json(const Tokenizer *tok, int32_t id, float logprob) {
    size_t n = 0;
    const char *bytes = tokenizer_bytes(tok, id, &n);
    json_t *list = json_array();
    for (size_t i = 0; bytes && i < n; i++) json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return json_pack("{s:o, s:o, s:o}", "token", token_json(tok, id), "logprob", logprob_json(logprob), "bytes", list);
}

json_t *chat_logprobs_json(const Answer *a, const Tokenizer *tok, int first, int end) {
    json_t *content = json_array();
    for (int i = first; i < end; i++) {
        const Sampled *t = &a->seq->sampled[i];
        json_t *top = json_array();
        for (int k = 0; k < a->how->sampling.logprobs && t->top_id[k] >= 0; k++)
            json_array_append_new(top, token_logprob_json(tok, t->top_id[k], t->top_logprob[k]));
        if (!tokenizer_is_special(tok, t->id)) {
            json_t *token = token_logprob_json(tok, t->id, t->logprob);
            json_object_set(token, "top_logprobs", top);
            json_array_append_new(content, token);
        }
        json_decref(top);
    }
    return json_pack("{s:o, s:n}", "content", content, "refusal");
}

json_t *text_logprobs_json(const Answer *a, const Tokenizer *tok, int first, int end, TextStream *stream,
                           size_t *offset) {
    json_t *tokens = json_array(), *logprobs = json_array(), *tops = json_array(), *offsets = json_array();
    Text text = {0};
    for (int i = first; i < end; i++) {
        const Sampled *t = &a->seq->sampled[i];
        if (tokenizer_is_special(tok, t->id)) continue;
        json_t *top = json_object();
        for (int k = 0; k < a->how->sampling.logprobs && t->top_id[k] >= 0; k++) {
            json_t *name = token_json(tok, t->top_id[k]);
            json_object_set_new(top, json_string_value(name), logprob_json(t->top_logprob[k]));
            json_decref(name);
        }
        json_array_append_new(tokens, token_json(tok, t->id));
        json_array_append_new(logprobs, logprob_json(t->logprob));
        json_array_append_new(tops, top);
        json_array_append_new(offsets, json_integer((json_int_t)*offset));
        size_t n = stream_push(stream, tok, t->id, text_room(&text, stream_room(tok)));
        for (size_t j = 0; j < n; j++) *offset += ((unsigned char)text.data[j] & 0xc0) != 0x80; // characters
    }
    free(text.data);
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", logprobs, "top_logprobs", tops,
                     "text_offset", offsets);
}
