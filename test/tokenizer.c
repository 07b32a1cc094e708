// A program around tokenizer.c for test_tokenizer.py: commands on stdin, one answer line each. A
// text travels as its length in bytes, a newline, the bytes.
//
//   encode N \n BYTES      ids
//   decode K ID...         texts of stream_push() and, last, of stream_end(), as hexadecimal, "-" when empty
//   prompt \n JSON \n      ids | number of pictures. JSON: {"turns": [{"role", "parts": [PART]} or {"reply": [ids]}],
//                          "open": bool}; a PART is "text", [height, width] or {"byte": value}, which no JSON text can
//                          hold
//   tokens                 number, then "hexadecimal bytes*" for each; the * marks special ones
//
// An answer that begins with "error" is an Error's status and message.
#include "vlm.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const ImageConfig images = {.patch = 14, .merge = 2, .temporal = 2};

static void print_ids(const Ids *ids) {
    for (size_t i = 0; i < ids->n; i++) printf("%d ", ids->data[i]);
}

static void print_hex(const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) printf("%02x", (unsigned char)bytes[i]);
    printf(n ? " " : "- ");
}

static void print_error(const Error *err) { printf("error %d %s", err->status, err->message); }

static bool encode(const Tokenizer *tok) {
    size_t n;
    if (scanf("%zu", &n) != 1 || getchar() != '\n') return false;
    char *text = malloc(n ? n : 1); // exactly as long as the text, so that a sanitizer sees any step over its end
    Ids ids = {0};
    Error err;
    bool ok = fread(text, 1, n, stdin) == n;
    if (ok && tokenizer_encode(tok, text, n, &ids, &err))
        print_ids(&ids);
    else if (ok)
        print_error(&err);
    free(ids.data);
    free(text);
    return ok;
}

static bool decode(const Tokenizer *tok) {
    TextStream stream = {0};
    char *out = malloc(stream_room(tok)), end[3];
    int count, id;
    if (scanf("%d", &count) != 1) return false;
    while (count-- > 0) {
        if (scanf("%d", &id) != 1) return false;
        print_hex(out, stream_push(&stream, tok, id, out));
    }
    print_hex(end, stream_end(&stream, end));
    free(out);
    return true;
}

// One turn of the JSON above into the prompt.
static bool turn(Prompt *prompt, const Tokenizer *tok, json_t *json, Image *pictures, Error *err) {
    json_t *reply = json_object_get(json, "reply"), *list = json_object_get(json, "parts");
    size_t n = json_array_size(reply ? reply : list), i;
    json_t *item;
    bool ok = true;
    Part *parts = calloc(n + 1, sizeof *parts);
    int32_t *ids = calloc(n + 1, sizeof *ids);
    char *bytes = calloc(n + 1, 1);
    json_array_foreach(reply, i, item) ids[i] = (int32_t)json_integer_value(item);
    json_array_foreach(list, i, item) {
        pictures[i].height = (int)json_integer_value(json_array_get(item, 0));
        pictures[i].width = (int)json_integer_value(json_array_get(item, 1));
        bytes[i] = (char)json_integer_value(json_object_get(item, "byte"));
        parts[i] = (Part){.text = json_string_value(item), .n = json_string_length(item), .image = &pictures[i]};
        if (json_is_object(item)) parts[i] = (Part){.text = &bytes[i], .n = 1};
    }
    if (reply)
        prompt_close_reply(prompt, tok, ids, n);
    else
        ok = prompt_add(prompt, tok, &images, json_string_value(json_object_get(json, "role")), parts, (int)n, err);
    free(bytes);
    free(ids);
    free(parts);
    return ok;
}

static bool prompt(const Tokenizer *tok) {
    enum { MAX_PARTS = 64, MAX_TURNS = 64 };
    static Image pictures[MAX_TURNS][MAX_PARTS];
    json_t *json = json_loadf(stdin, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL), *item;
    size_t i;
    Prompt p = {0};
    Error err;
    bool ok = json != NULL;
    json_array_foreach(json_object_get(json, "turns"), i, item) {
        if (json_is_true(json_object_get(item, "open"))) prompt_open_reply(&p, tok);
        if ((ok = turn(&p, tok, item, pictures[i % MAX_TURNS], &err))) continue;
        print_error(&err);
        printf(" | "); // and the prompt as the failed turn left it
        ok = true;
    }
    if (json_is_true(json_object_get(json, "open"))) prompt_open_reply(&p, tok);
    print_ids(&p.ids);
    printf("| %d", p.n_images);
    prompt_free(&p);
    json_decref(json);
    return ok;
}

static bool tokens(const Tokenizer *tok) {
    printf("%d ", tokenizer_vocab(tok));
    for (int id = 0; id < tokenizer_vocab(tok); id++) {
        size_t n;
        const char *bytes = tokenizer_bytes(tok, id, &n);
        print_hex(bytes, n);
        if (tokenizer_is_special(tok, id)) printf("* ");
    }
    size_t n;
    return !tokenizer_bytes(tok, -1, &n) && !tokenizer_bytes(tok, tokenizer_vocab(tok), &n);
}

int main(int argc, char **argv) {
    Error err;
    ModelFile *file = argc == 2 ? modelfile_open(argv[1], &err) : NULL;
    Tokenizer *tok = file ? tokenizer_open(file, &err) : NULL;
    if (!tok) {
        fprintf(stderr, "%s\n", argc == 2 ? err.message : "usage: test_tokenizer MODEL < COMMANDS");
        modelfile_close(file);
        return argc == 2 ? 1 : 2;
    }
    char command[16];
    bool ok = true;
    while (ok && scanf("%15s", command) == 1) {
        ok = !strcmp(command, "encode")   ? encode(tok)
             : !strcmp(command, "decode") ? decode(tok)
             : !strcmp(command, "prompt") ? prompt(tok)
             : !strcmp(command, "tokens") ? tokens(tok)
                                          : false;
        putchar('\n');
        fflush(stdout);
    }
    tokenizer_close(tok);
    modelfile_close(file);
    return ok ? 0 : 2;
}
