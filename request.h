// request.h: what the chat and the server share: conversations in OpenAI's JSON, the pictures in them, how an answer is
// to be made, the answer as it grows, and its receipt.
#pragma once
#include "vlm.h"
#include <jansson.h>
#include <stdio.h>

enum {
    MAX_FILE = 256 << 20, // bytes of a picture or of a text that are read at most
    MAX_STOPS = 16,
    MAX_STOP = 256, // bytes of a stop string
    MAX_N = 16,     // answers to one request
};

// ---------------------------------------------------------------------------------------------
// Small helpers

// `memory`, or the end of the program where there is none.
void *need(void *memory);
double now_seconds(void); // CLOCK_MONOTONIC

// Growing bytes, always with a 0 behind them. Zero-initialise; free(text.data) ends it.
typedef struct Text {
    char *data;
    size_t n, cap;
} Text;
// Make room for `extra` more bytes and return where they go.
char *text_room(Text *text, size_t extra);
void text_add(Text *text, const char *bytes, size_t n);
void text_format(Text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Text of others (a model, a client, a file's name) for a terminal or a log: control characters could move the cursor,
// rename the window, type for the user or forge a line, so they are shown as U+FFFD, newline and tab too unless
// `lines`.
void put_clean(FILE *out, const char *text, size_t n, bool lines);

// Everything of an open file. False with errno set; EFBIG past MAX_FILE.
bool read_all(int fd, Text *out);
// A regular file or a pipe; devices are refused because some of them never end.
bool read_file(const char *path, Text *out, Error *err);

// JSON of a stranger: one value, nested at most 64 deep, of as many values as fit some megabytes, no key twice.
json_t *json_read(const char *text, size_t n, Error *err);

// ---------------------------------------------------------------------------------------------
// Pictures

typedef struct Picture {
    Image image;
    Text bytes;         // the file, until it is decoded
    char *path;         // absolute; NULL when it came another way
    ImageConfig config; // with the limits that the request sets for this one
    int message;        // of the conversation, from 1 on, that it is in; 0: attached by hand
} Picture;

void picture_free(Picture *picture);
// image_probe() and image_load() of its bytes; the latter gives these up. An Error says which picture it is.
bool picture_probe(Picture *picture, Error *err);
bool picture_decode(Picture *picture, Workspace *work, Error *err);

// "%41" to "A", in place; a zero becomes '?'. Returns the length.
size_t percent_decode(char *s);

// Where pictures come from, and where they are decoded. data: URLs are read by request.c.
typedef struct PictureSource PictureSource;
struct PictureSource {
    const ImageConfig *config;
    int most;         // pictures that a request may have
    size_t most_text; // bytes of text; 0: any
    bool (*fetch)(PictureSource *source, const char *url, Picture *picture, Error *err);
    // From bytes to image, for all pictures of a request.
    bool (*decode)(PictureSource *source, Picture **pictures, int n, Error *err);
};

// The path in "file://host/a%20b.png", into `out`.
void file_url_path(const char *url, Text *out);
// The picture that a data:, file: or other URL means, not decoded yet. NULL: an Error.
Picture *picture_from_url(PictureSource *source, const char *url, Error *err);

// ---------------------------------------------------------------------------------------------
// Conversation: the ids so far and the pictures they speak of.

typedef struct Conversation {
    Prompt prompt;
    Picture **pictures; // (n) owned, at fixed addresses: the prompt borrows their images
    int n, sent;        // pictures[sent ..] are attached but in no message yet
    int message;        // that is being read
} Conversation;

void conversation_free(Conversation *c);
// Take over a picture; it waits for the next message. NULL (after an Error) gives false.
bool conversation_attach(Conversation *c, Picture *picture);

// The functions that a model may call, and whether it must.
typedef enum ToolChoice { TOOL_NONE, TOOL_AUTO, TOOL_REQUIRED, TOOL_NAMED } ToolChoice;
typedef struct Tools {
    json_t *list; // OpenAI's "tools", checked; NULL: none. Borrowed
    ToolChoice choice;
    const char *name; // for TOOL_NAMED
    bool parallel;    // an answer may hold several calls
} Tools;

// Fill an empty conversation from OpenAI's "messages", pictures loaded and the assistant's turn opened. `begun` gets
// what the turn begins with in the model's place: a forced call.
bool conversation_read(Conversation *c, PictureSource *source, const Tokenizer *tok, json_t *messages,
                       const Tools *tools, Text *begun, Error *err);

// ---------------------------------------------------------------------------------------------
// How to answer, as a request's fields say it

typedef struct Stop {
    const char *text;
    size_t n;
} Stop;

typedef struct Generation {
    Sampling sampling;
    bool seeded;       // sampling.seed is the request's
    int n, max_tokens; // max_tokens 0: to the context's end
    bool stream, include_usage, logprobs;
    Stop stops[MAX_STOPS]; // the texts are the request's
    int n_stops;
    TokenCount *biases; // owned
    int n_biases;
    Tools tools;
    uint8_t salt[32];
    json_t *warnings; // owned: fields that nobody reads
} Generation;

// Read the fields of a request to /v1/chat/completions, or (`text`) to /v1/completions. `body` must outlive `g`.
bool generation_read(Generation *g, json_t *body, bool text, bool strict, const Tokenizer *tok, Error *err);
void generation_free(Generation *g);
// A random seed below 2^53, so that every JSON reader gets it unharmed.
uint64_t random_seed(void);

// ---------------------------------------------------------------------------------------------
// Answer: one request in the engine, and the text of it as it grows.

typedef struct CallScan { // how far the text of a call has been looked at for its end
    size_t at;
    bool string, escaped; // inside a string of its JSON; behind a backslash
} CallScan;

typedef struct Answer {
    Sequence *seq;
    uint64_t seed;
    const Generation *how; // stops and tools; NULL: neither
    int read;              // tokens of the answer that are in `text`
    TextStream stream;
    Text text;      // whole characters only, cut where a stop string begins
    size_t begun;   // bytes of it that were put in the model's place
    size_t settled; // bytes of it that no stop string can take back any more
    size_t at;      // bytes of it that answer_next() has handed out
    size_t sought;  // bytes of it in which a call that ends it does not begin
    CallScan seeking, taking;
    size_t called; // where the latest call ends
    int calls;     // handed out
    bool stopped;  // by a stop string, or because one call was wanted
    bool finished; // no more text will come
} Answer;

static inline const int32_t *answer_ids(const Answer *a) { return a->seq->ids + a->seq->n_prompt; }

// Turn the answer's first n tokens into text. `finished`: there will be no more of them.
void answer_read(Answer *a, const Tokenizer *tok, int n, bool finished);

// The next piece of an answer that nothing can take back: text, or a whole call of a function.
typedef struct Piece {
    const char *text;
    size_t n;
    json_t *call; // {"id", "type", "function"}: the caller's; NULL: text
} Piece;
bool answer_next(Answer *a, Piece *piece);
// "stop", "length", "tool_calls" or "cancelled".
const char *answer_finish(const Answer *a);

// What an answer cost, in milliseconds.
typedef struct Receipt {
    int prompt, image, cached, written;
    double queue, vision, prefill, first, decode, total, rate; // rate: tokens a second after the first
} Receipt;
Receipt receipt_make(const Sequence *seq);

// ---------------------------------------------------------------------------------------------
// JSON of them

// -inf is no JSON number; a probability that rounds to 0 is written as OpenAI's API writes it.
json_t *logprob_json(float logprob);
// What each stage took: milliseconds, the bytes that it filled, and how much of it a cache has saved. `token_bytes` is
// what a token takes in the KV cache, `row_bytes` a row of a picture.
json_t *receipt_json(const Conversation *c, const Answer *a, size_t token_bytes, size_t row_bytes);
// The live memory map: docs/memory.md. `pictures`: bytes of resized pictures in flight.
json_t *map_json(const MemoryMap *map, size_t decode_workspace, size_t bodies, size_t pictures);

// OpenAI's "logprobs" of the chat: tokens [first, end) that write text.
json_t *chat_logprobs_json(const Answer *a, const Tokenizer *tok, int first, int end);
// The completions' "logprobs": `stream` and `offset` carry on from call to call.
json_t *text_logprobs_json(const Answer *a, const Tokenizer *tok, int first, int end, TextStream *stream,
                           size_t *offset);

// The text of a list of ids, special tokens by their names.
bool ids_text(const Tokenizer *tok, json_t *list, Text *out, Error *err);

// ---------------------------------------------------------------------------------------------
// Pictures from http(s) (fetch.c)

typedef struct Network Network; // addresses with a prefix in common

typedef struct FetchRules {
    Network *allowed; // beside the public ones
    int n_allowed;
    double seconds;
    bool (*room)(void *context, size_t bytes); // memory for bytes that have come
    bool (*gone)(void *context);               // nobody waits for them any more
    void *context;
} FetchRules;

// "127.0.0.0/8,192.168.1.5" to a list, which is the caller's to free().
bool networks_parse(const char *list, Network **out, int *n, Error *err);
// Append what `url` holds to `out`, at most `limit` bytes.
bool fetch_url(const FetchRules *rules, const char *url, size_t limit, Text *out, Error *err);

// ---------------------------------------------------------------------------------------------
// The server (server.c)

typedef struct ServeOptions {
    const char *host, *api_key, *model_name, *allow_images_from, *media_dir; // NULL: none
    int port;                                                                // 0: any free one
    size_t max_body, body_memory, picture_memory, fetch_bytes;
    int max_images, max_queue, max_connections;
    int header_seconds, idle_seconds, fetch_seconds, drain; // seconds
    bool strict, quiet;
} ServeOptions;

// Serve until SIGTERM or SIGINT. The calling thread becomes the engine's. `work` has room for any picture.
bool serve(const Model *model, Engine *engine, Workspace *work, const ServeOptions *options, Error *err);
