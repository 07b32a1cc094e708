// tokenizer.c: text <-> ids, and conversations -> ids.
//
//   text -> code points -> NFC -> words (the splitting pattern) -> bytes -> merges by rank -> ids
//   ids  -> bytes -> whole UTF-8 characters
//   messages -> the template's special ids around texts, a run of image ids for each picture
//
// It follows Hugging Face `tokenizers` with the tokenizer.json of Qwen2.5 to the id. Special tokens come from
// the template's code only: a text is never searched for them, so no text can forge one.
#include "vlm.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MAX_TEXT = 1 << 30 }; // bytes: positions in a text are 32 bits

typedef struct Merge {
    int32_t left, right; // ids that may stand side by side
    int32_t rank;        // lower ranks merge first; -1: an empty slot of the table
    int32_t id;          // what they become
} Merge;

// The pieces of the chat template, each as ids once and for all, but for what joins the text beside it.
typedef struct Template {
    json_t *json;  // owns roles and after_role
    json_t *roles; // the names a message may have
    const char *after_role, *default_system;
    int32_t open, image_before, image, image_after;
    Ids default_turn; // the default system message, whole; empty if the template has none
    Ids turn_end;     // close, and what is between turns
    Ids reply;        // open, assistant
} Template;

struct Tokenizer {
    json_t *added;          // name -> id of tokens that are not special, but that a text does not become: "<tool_call>"
    const uint8_t *bytes;   // (offsets[n]): all tokens' bytes, in the model file
    const int32_t *offsets; // (n + 1): token i is bytes[offsets[i] .. offsets[i + 1])
    int n;                  // tokens
    int longest;            // bytes of the longest
    bool *special;          // (n)
    int32_t byte_id[256];   // the token of a single byte
    Merge *merges;          // hash table of 1 << merge_bits slots, at most half full, open addressing
    int merge_bits;
    Template template;
};

// ---------------------------------------------------------------------------------------------
// Tables. They come from a file, so nothing about them is believed.

static size_t token_length(const Tokenizer *tok, int32_t id) { return tok->offsets[id + 1] - tok->offsets[id]; }
static const uint8_t *token_start(const Tokenizer *tok, int32_t id) { return tok->bytes + tok->offsets[id]; }

// Map the tokens' bytes, and check that each token has some and all lie inside.
static bool tokens_open(Tokenizer *tok, const ModelFile *file, Error *err) {
    int64_t n_bytes = -1, n_offsets = -1;
    if (!(tok->bytes = modelfile_tensor(file, "tokenizer.bytes", "U8", 1, &n_bytes, err))) return false;
    if (!(tok->offsets = modelfile_tensor(file, "tokenizer.offsets", "I32", 1, &n_offsets, err))) return false;
    if (n_offsets < 257 || n_offsets > INT32_MAX)
        return fail(err, 500, "tokenizer.offsets has %lld entries, at least 257 are needed: export the model again",
                    (long long)n_offsets);
    tok->n = (int)(n_offsets - 1);
    if (tok->offsets[0] != 0 || tok->offsets[tok->n] != n_bytes)
        return fail(err, 500, "tokenizer.offsets does not span tokenizer.bytes: export the model again");
    for (int i = 0; i < tok->n; i++) // before any length is taken: both ends are known, so all lie between
        if (tok->offsets[i] >= tok->offsets[i + 1])
            return fail(err, 500, "tokenizer.offsets does not grow at token %d: export the model again", i);
    for (int b = 0; b < 256; b++) tok->byte_id[b] = -1;
    for (int i = tok->n - 1; i >= 0; i--) {
        int length = (int)token_length(tok, i);
        if (length > tok->longest) tok->longest = length;
        if (length == 1) tok->byte_id[*token_start(tok, i)] = i;
    }
    for (int b = 0; b < 256; b++)
        if (tok->byte_id[b] < 0)
            return fail(err, 500, "the tokenizer has no token for the byte %d: export the model again", b);
    return true;
}

static json_t *metadata_object(const ModelFile *file, const char *key, Error *err) {
    const char *text = modelfile_text(file, key);
    json_t *object = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (json_is_object(object)) return object;
    json_decref(object);
    fail(err, 500, "the model file's metadata has no proper \"%s\": export the model again", key);
    return NULL;
}

static bool token_is_called(const Tokenizer *tok, json_int_t id, const char *name) {
    return id >= 0 && id < tok->n && token_length(tok, id) == strlen(name) &&
           !memcmp(token_start(tok, id), name, strlen(name));
}

// Mark the special tokens, and check that each is called as the table says.
static bool specials_open(Tokenizer *tok, json_t *specials, Error *err) {
    const char *name;
    json_t *value;
    if (!(tok->special = calloc(tok->n, sizeof *tok->special)))
        return fail(err, 500, "out of memory for %d tokens", tok->n);
    json_object_foreach(specials, name, value) {
        if (!json_is_integer(value) || !token_is_called(tok, json_integer_value(value), name))
            return fail(err, 500, "the special token %.40s has another name in the table: export the model again",
                        name);
        tok->special[json_integer_value(value)] = true;
    }
    for (int b = 0; b < 256; b++)
        if (tok->special[tok->byte_id[b]])
            return fail(err, 500, "the token of the byte %d is special: export the model again", b);
    return true;
}

static bool added_open(Tokenizer *tok, const ModelFile *file, Error *err) {
    const char *name;
    json_t *value;
    if (!(tok->added = metadata_object(file, "added_tokens", err))) return false;
    json_object_foreach(tok->added, name, value) {
        if (!json_is_integer(value) || !token_is_called(tok, json_integer_value(value), name))
            return fail(err, 500, "the added token %.40s has another name in the table: export the model again", name);
    }
    return true;
}

// The slot of a pair: the one that holds it, or the empty one where it would go. Fibonacci hashing: a product's high
// bits are the well mixed ones.
static Merge *merge_slot(const Tokenizer *tok, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t mask = ((size_t)1 << tok->merge_bits) - 1;
    size_t i = (key * 0x9e3779b97f4a7c15u) >> (64 - tok->merge_bits);
    while (tok->merges[i].rank >= 0 && (tok->merges[i].left != left || tok->merges[i].right != right))
        i = (i + 1) & mask;
    return &tok->merges[i];
}

// Whether the bytes of `id` are those of `left` and `right` together, and none of a merge's tokens is a special one:
// else a text could spell it.
static bool merge_fits(const Tokenizer *tok, int32_t left, int32_t right, int32_t id) {
    if (left < 0 || left >= tok->n || right < 0 || right >= tok->n || id < 0 || id >= tok->n) return false;
    if (tok->special[left] || tok->special[right] || tok->special[id]) return false;
    size_t a = token_length(tok, left), b = token_length(tok, right);
    return token_length(tok, id) == a + b && !memcmp(token_start(tok, id), token_start(tok, left), a) &&
           !memcmp(token_start(tok, id) + a, token_start(tok, right), b);
}

static bool merges_open(Tokenizer *tok, const ModelFile *file, Error *err) {
    int64_t dims[2] = {-1, 3};
    const int32_t *rows = modelfile_tensor(file, "tokenizer.merges", "I32", 2, dims, err);
    if (!rows) return false;
    if (dims[0] > MAX_TEXT) return fail(err, 500, "tokenizer.merges has too many rows: export the model again");
    for (tok->merge_bits = 1; (int64_t)1 << tok->merge_bits < 2 * dims[0]; tok->merge_bits++) {}
    size_t slots = (size_t)1 << tok->merge_bits; // at most 64 bytes for each 12 of the file
    if (!(tok->merges = malloc(slots * sizeof *tok->merges)))
        return fail(err, 500, "out of memory for %lld merges", (long long)dims[0]);
    for (size_t i = 0; i < slots; i++) tok->merges[i].rank = -1;
    for (int32_t rank = 0; rank < dims[0]; rank++) {
        const int32_t *row = rows + 3 * (size_t)rank;
        int32_t left = row[0], right = row[1], id = row[2];
        if (!merge_fits(tok, left, right, id))
            return fail(err, 500, "tokenizer.merges: row %d does not make its token: export the model again", rank);
        Merge *slot = merge_slot(tok, left, right);
        if (slot->rank >= 0)
            return fail(err, 500, "tokenizer.merges: row %d is there twice: export the model again", rank);
        *slot = (Merge){left, right, rank, id};
    }
    return true;
}

// The id of the template's piece `key`, which must be one special token.
static bool template_special(json_t *template, json_t *specials, const char *key, int32_t *id, Error *err) {
    const char *text = json_string_value(json_object_get(template, key));
    json_t *value = text ? json_object_get(specials, text) : NULL;
    if (!value)
        return fail(err, 500, "the chat template's \"%s\" is no special token: this template is not supported", key);
    *id = (int32_t)json_integer_value(value); // in range: specials_open() checked it
    return true;
}

static void ids_append(Ids *out, const int32_t *ids, size_t n) {
    for (size_t i = 0; i < n; i++) ids_push(out, ids[i]);
}

// Append `open`, the role, the text after it and the content.
static bool turn_start(const Tokenizer *tok, const char *role, const char *content, Ids *out, Error *err) {
    char *text;
    int n = asprintf(&text, "%s%s%s", role, tok->template.after_role, content);
    if (n < 0) return fail(err, 500, "out of memory for the chat template");
    ids_push(out, tok->template.open);
    bool ok = tokenizer_encode(tok, text, n, out, err); // as one string: a merge may cross its seams
    free(text);
    return ok;
}

static bool template_open(Tokenizer *tok, const ModelFile *file, json_t *specials, Error *err) {
    Template *t = &tok->template;
    if (!(t->json = metadata_object(file, "template", err))) return false;
    int32_t close = 0;
    if (!template_special(t->json, specials, "open", &t->open, err) ||
        !template_special(t->json, specials, "close", &close, err) ||
        !template_special(t->json, specials, "image_before", &t->image_before, err) ||
        !template_special(t->json, specials, "image", &t->image, err) ||
        !template_special(t->json, specials, "image_after", &t->image_after, err))
        return false;
    const char *after_close = NULL;
    json_t *system = NULL;
    if (json_unpack(t->json, "{s:s, s:s, s:o, s:o}", "after_role", &t->after_role, "after_close", &after_close,
                    "default_system", &system, "roles", &t->roles) ||
        !(json_is_string(system) || json_is_null(system)) || !json_is_array(t->roles))
        return fail(err, 500, "the chat template has no proper after_role, after_close, default_system or roles");
    ids_push(&t->turn_end, close);
    if (!tokenizer_encode(tok, after_close, strlen(after_close), &t->turn_end, err)) return false;
    if (!turn_start(tok, "assistant", "", &t->reply, err)) return false;
    t->default_system = json_is_null(system) ? "" : json_string_value(system);
    if (json_is_null(system)) return true;
    if (!turn_start(tok, "system", t->default_system, &t->default_turn, err)) return false;
    ids_append(&t->default_turn, t->turn_end.data, t->turn_end.n);
    return true;
}

Tokenizer *tokenizer_open(const ModelFile *file, Error *err) {
    Tokenizer *tok = calloc(1, sizeof *tok);
    if (!tok) {
        fail(err, 500, "out of memory for the tokenizer");
        return NULL;
    }
    json_t *specials = metadata_object(file, "special_tokens", err);
    bool ok = specials && tokens_open(tok, file, err) && specials_open(tok, specials, err) &&
              added_open(tok, file, err) && merges_open(tok, file, err) && template_open(tok, file, specials, err);
    json_decref(specials);
    if (ok) return tok;
    tokenizer_close(tok);
    return NULL;
}

void tokenizer_close(Tokenizer *tok) {
    if (!tok) return;
    free(tok->special);
    free(tok->merges);
    free(tok->template.default_turn.data);
    free(tok->template.turn_end.data);
    free(tok->template.reply.data);
    json_decref(tok->template.json);
    json_decref(tok->added);
    free(tok);
}

int tokenizer_vocab(const Tokenizer *tok) { return tok->n; }

const char *tokenizer_default_system(const Tokenizer *tok) { return tok->template.default_system; }

const char *tokenizer_bytes(const Tokenizer *tok, int32_t id, size_t *n) {
    if (id < 0 || id >= tok->n) return NULL;
    *n = token_length(tok, id);
    return (const char *)token_start(tok, id);
}

bool tokenizer_is_special(const Tokenizer *tok, int32_t id) { return id >= 0 && id < tok->n && tok->special[id]; }

// ---------------------------------------------------------------------------------------------
// Unicode. The references' tables stand at different versions, and ids depend on them: the
// splitting pattern's classes are those of Unicode 16, the normaliser's those of Unicode 9, and
// utf8proc is whatever the distribution has. The two tables below make up for it, from Unicode 14
// on. test/parity/test_tokenizer_live.py goes through all code points.

typedef struct Range {
    int32_t first, last;
} Range;

static bool in_ranges(const Range *ranges, size_t n, int32_t c) {
    size_t low = 0, high = n; // the first range that does not end before c
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].last < c)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n && ranges[low].first <= c;
}

// Letters and numbers of Unicode 15 to 16, for a utf8proc that knows them not.
static const Range late_letters[] = {
    {0x1c89, 0x1c8a},   {0xa7cb, 0xa7cd},   {0xa7da, 0xa7dc},   {0x105c0, 0x105f3}, {0x10d4a, 0x10d65},
    {0x10d6f, 0x10d85}, {0x10ec2, 0x10ec4}, {0x1123f, 0x11240}, {0x11380, 0x11389}, {0x1138b, 0x1138b},
    {0x1138e, 0x1138e}, {0x11390, 0x113b5}, {0x113b7, 0x113b7}, {0x113d1, 0x113d1}, {0x113d3, 0x113d3},
    {0x11bc0, 0x11be0}, {0x11f02, 0x11f02}, {0x11f04, 0x11f10}, {0x11f12, 0x11f33}, {0x1342f, 0x1342f},
    {0x13441, 0x13446}, {0x13460, 0x143fa}, {0x16100, 0x1611d}, {0x16d40, 0x16d6c}, {0x18cff, 0x18cff},
    {0x1b132, 0x1b132}, {0x1b155, 0x1b155}, {0x1df25, 0x1df2a}, {0x1e030, 0x1e06d}, {0x1e4d0, 0x1e4eb},
    {0x1e5d0, 0x1e5ed}, {0x1e5f0, 0x1e5f0}, {0x2b739, 0x2b739}, {0x2ebf0, 0x2ee5d}, {0x31350, 0x323af}};
static const Range late_numbers[] = {{0x10d40, 0x10d49}, {0x116d0, 0x116e3}, {0x11bf0, 0x11bf9}, {0x11f50, 0x11f59},
                                     {0x16130, 0x16139}, {0x16d70, 0x16d79}, {0x1ccf0, 0x1ccf9}, {0x1d2c0, 0x1d2d3},
                                     {0x1e4f0, 0x1e4f9}, {0x1e5f1, 0x1e5fa}};

// Marks and compositions younger than Unicode 9. A range may span other code points, as long as they have
// neither: to be unknown makes no difference to them.
static const Range late_marks[] = {{0x5c8, 0x5c9},     {0x7fd, 0x7fd},     {0x897, 0x8d3},     {0x9fe, 0x9fe},
                                   {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},
                                   {0x1abf, 0x1af0},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x105c9, 0x105e4},
                                   {0x10d24, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x11382, 0x113d0},
                                   {0x1145e, 0x1145e}, {0x11839, 0x11a99}, {0x11d42, 0x1612f}, {0x16d63, 0x16ff1},
                                   {0x1d127, 0x1d128}, {0x1d250, 0x1d281}, {0x1e08f, 0x1e6f5}};

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef enum Kind { OTHER, LETTER, NUMBER, SPACE, NEWLINE } Kind; // NEWLINE: \r and \n, which are spaces too

static Kind kind(int32_t c) {
    if (c == '\n' || c == '\r') return NEWLINE;
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return LETTER;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return NUMBER;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return SPACE;
    case UTF8PROC_CATEGORY_CC: return (c >= 0x9 && c <= 0xd) || c == 0x85 ? SPACE : OTHER;
    case UTF8PROC_CATEGORY_CN:
        return in_ranges(late_letters, COUNT(late_letters), c)   ? LETTER
               : in_ranges(late_numbers, COUNT(late_numbers), c) ? NUMBER
                                                                 : OTHER;
    default: return OTHER;
    }
}

// A text as code points.
typedef struct Text {
    int32_t *cp;
    size_t n;
} Text;

// Where the first bytes that are no UTF-8 begin; n: nowhere.
static size_t utf8_fault(const char *text, size_t n) {
    int32_t c;
    for (size_t i = 0; i < n;) {
        utf8proc_ssize_t step = utf8proc_iterate((const uint8_t *)text + i, n - i, &c);
        if (step <= 0) return i;
        i += step;
    }
    return n;
}

static bool text_decode(Text *t, const char *text, size_t n, Error *err) {
    size_t fault = utf8_fault(text, n);
    if (fault < n) return fail(err, 400, "the text is not UTF-8: the byte at %zu is wrong", fault);
    if (!(t->cp = malloc((n + 1) * sizeof *t->cp))) return fail(err, 500, "out of memory for a text of %zu bytes", n);
    t->n = 0;
    for (size_t i = 0; i < n;) i += utf8proc_iterate((const uint8_t *)text + i, n - i, &t->cp[t->n++]);
    return true;
}

static int mark_class(int32_t c) { return utf8proc_get_property(c)->combining_class; } // 0: no mark

// Put n marks into the order of their classes, equal ones staying in order. By counting: utf8proc's own sorting takes
// quadratic time, and a text may hold a million marks in a row.
static void sort_run(int32_t *cp, size_t n, int32_t *scratch) {
    size_t place[257] = {0};
    for (size_t i = 0; i < n; i++) place[mark_class(cp[i]) + 1]++;
    for (int c = 0; c < 256; c++) place[c + 1] += place[c];
    for (size_t i = 0; i < n; i++) scratch[place[mark_class(cp[i])]++] = cp[i];
    memcpy(cp, scratch, n * sizeof *cp);
}

static void sort_marks(int32_t *cp, size_t n, int32_t *scratch) {
    for (size_t start = 0, end; start < n; start = end + 1) {
        bool sorted = true;
        for (end = start; end < n && mark_class(cp[end]); end++)
            sorted = sorted && (end == start || mark_class(cp[end - 1]) <= mark_class(cp[end]));
        if (!sorted) sort_run(cp + start, end - start, scratch);
    }
}

static const utf8proc_option_t NFC = UTF8PROC_STABLE | UTF8PROC_COMPOSE;

// Order and compose cp[start .. end), which is decomposed; returns its new end.
static size_t compose(int32_t *cp, size_t start, size_t end, int32_t *scratch) {
    sort_marks(cp + start, end - start, scratch);
    return start + utf8proc_normalize_utf32(cp + start, end - start, NFC);
}

// Normalise to NFC. Late marks stay where they are and nothing crosses them, as for a table that has them not.
static bool text_normalize(Text *t, Error *err) {
    size_t n = 0, start = 0, end = 0;
    int bound = 0;
    bool plain = true;
    for (size_t i = 0; i < t->n; i++) plain = plain && t->cp[i] < 0x300; // neither marks nor anything that composes
    if (plain) return true;
    for (size_t i = 0; i < t->n; i++) n += utf8proc_decompose_char(t->cp[i], NULL, 0, NFC, &bound);
    int32_t *out = malloc(2 * n * sizeof *out);
    if (!out) return fail(err, 500, "out of memory for a text of %zu characters", t->n);
    for (size_t i = 0; i < t->n; i++) {
        if (in_ranges(late_marks, COUNT(late_marks), t->cp[i])) {
            end = compose(out, start, end, out + n);
            out[end++] = t->cp[i];
            start = end;
        } else
            end += utf8proc_decompose_char(t->cp[i], out + end, n - end, NFC, &bound);
    }
    free(t->cp);
    *t = (Text){out, compose(out, start, end, out + n)};
    return true;
}

// ---------------------------------------------------------------------------------------------
// Words. The pattern, whose alternatives are tried from left to right:
//
//   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N} |  ?[^\s\p{L}\p{N}]+[\r\n]* | \s*[\r\n]+ |
//   \s+(?!\S) | \s+
//
// One of them always matches, so words follow each other without a gap.

// Case folding, as far as the contractions go: the long s folds to s.
static int32_t fold(int32_t c) { return c == 0x17f ? 's' : c >= 'A' && c <= 'Z' ? c + 32 : c; }

static size_t contraction_end(const int32_t *cp, size_t i, size_t n) {
    if (cp[i] != '\'' || i + 1 >= n) return i;
    int32_t a = fold(cp[i + 1]), b = i + 2 < n ? fold(cp[i + 2]) : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
    return i;
}

static size_t run_end(const int32_t *cp, size_t i, size_t n, Kind k) {
    while (i < n && kind(cp[i]) == k) i++;
    return i;
}

// The end of the word that begins at i < n.
static size_t word_end(const int32_t *cp, size_t i, size_t n) {
    size_t end = contraction_end(cp, i, n);
    if (end > i) return end;
    Kind first = kind(cp[i]);
    size_t start = i + (first == SPACE || first == OTHER);
    if ((end = run_end(cp, start, n, LETTER)) > start) return end;
    if (first == NUMBER) return i + 1;
    start = i + (cp[i] == ' ');
    if ((end = run_end(cp, start, n, OTHER)) > start) return run_end(cp, end, n, NEWLINE);
    size_t after_newline = i;
    for (end = i; end < n && kind(cp[end]) >= SPACE; end++)
        if (kind(cp[end]) == NEWLINE) after_newline = end + 1;
    if (after_newline > i) return after_newline;
    return end < n && end - i > 1 ? end - 1 : end; // the last space goes with the word that follows
}

// ---------------------------------------------------------------------------------------------
// Merging. A word's bytes are a linked list of symbols; a heap holds the pairs that can merge, lowest rank
// first and leftmost among equals. Pairs that changed in the meantime are recognised when they
// come up. O(n log n) for a word of n bytes, whatever it looks like.

typedef struct Symbol {
    int32_t id;         // -1: merged into the one before
    int32_t prev, next; // -1: none
} Symbol;

typedef struct Bpe {
    const Tokenizer *tok;
    Symbol *symbols; // (cap)
    uint64_t *heap;  // (2 cap): rank << 32 | position of the left symbol. A merge takes one out and puts two in at most
    size_t cap, n, n_heap;
} Bpe;

static void heap_push(Bpe *b, uint64_t key) {
    size_t i = b->n_heap++;
    for (; i > 0 && b->heap[(i - 1) / 2] > key; i = (i - 1) / 2) b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = key;
}

static uint64_t heap_pop(Bpe *b) {
    uint64_t top = b->heap[0], last = b->heap[--b->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < b->n_heap; i = child) {
        if (child + 1 < b->n_heap && b->heap[child + 1] < b->heap[child]) child++;
        if (b->heap[child] >= last) break;
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = last;
    return top;
}

// The merge of the symbol at `at` with the next, or NULL.
static const Merge *merge_at(const Bpe *b, int32_t at) {
    const Symbol *s = &b->symbols[at];
    if (s->id < 0 || s->next < 0) return NULL;
    const Merge *m = merge_slot(b->tok, s->id, b->symbols[s->next].id);
    return m->rank < 0 ? NULL : m;
}

static void propose(Bpe *b, int32_t at) {
    const Merge *m = at >= 0 ? merge_at(b, at) : NULL;
    if (m) heap_push(b, (uint64_t)m->rank << 32 | (uint32_t)at);
}

// Room for a word of n bytes.
static bool bpe_reserve(Bpe *b, size_t n) {
    if (n <= b->cap) return true;
    free(b->symbols);
    free(b->heap);
    b->cap = n > 2 * b->cap ? n : 2 * b->cap;
    b->symbols = malloc(b->cap * sizeof *b->symbols);
    b->heap = malloc(2 * b->cap * sizeof *b->heap);
    return b->symbols && b->heap;
}

static size_t utf8_length(int32_t c) { return 1 + (c >= 0x80) + (c >= 0x800) + (c >= 0x10000); }

// Set up the list with the bytes of a word.
static bool bpe_begin(Bpe *b, const int32_t *cp, size_t n) {
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += utf8_length(cp[i]);
    if (!bpe_reserve(b, bytes)) return false;
    b->n = b->n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t utf8[4];
        utf8proc_ssize_t length = utf8proc_encode_char(cp[i], utf8);
        for (int k = 0; k < length; k++, b->n++)
            b->symbols[b->n] = (Symbol){b->tok->byte_id[utf8[k]], (int32_t)b->n - 1, (int32_t)b->n + 1};
    }
    b->symbols[b->n - 1].next = -1;
    return true;
}

// Append the ids of a word of n > 0 code points.
static bool bpe_word(Bpe *b, const int32_t *cp, size_t n, Ids *out) {
    if (!bpe_begin(b, cp, n)) return false;
    for (size_t i = 0; i < b->n; i++) propose(b, (int32_t)i);
    while (b->n_heap) {
        uint64_t top = heap_pop(b);
        int32_t at = (int32_t)(uint32_t)top;
        const Merge *m = merge_at(b, at);
        if (!m || (uint64_t)m->rank != top >> 32) continue; // the pair is no more
        Symbol *left = &b->symbols[at], *right = &b->symbols[left->next];
        left->id = m->id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) b->symbols[left->next].prev = at;
        propose(b, left->prev);
        propose(b, at);
    }
    for (int32_t at = 0; at >= 0; at = b->symbols[at].next) ids_push(out, b->symbols[at].id);
    return true;
}

bool tokenizer_encode(const Tokenizer *tok, const char *text, size_t n, Ids *out, Error *err) {
    if (n > MAX_TEXT) return fail(err, 413, "a text of %zu bytes is over the limit of %d", n, MAX_TEXT);
    Text t = {0};
    Bpe bpe = {.tok = tok};
    size_t before = out->n;
    bool ok = text_decode(&t, text, n, err) && text_normalize(&t, err);
    for (size_t i = 0, end; ok && i < t.n; i = end) {
        end = word_end(t.cp, i, t.n);
        if (!bpe_word(&bpe, t.cp + i, end - i, out))
            ok = fail(err, 500, "out of memory for a word of %zu characters", end - i);
    }
    if (!ok) out->n = before;
    free(bpe.symbols);
    free(bpe.heap);
    free(t.cp);
    return ok;
}

// ---------------------------------------------------------------------------------------------
// Decoding, token by token. A token may end inside a character, so up to three bytes wait. What cannot be UTF-8
// becomes one U+FFFD for each longest part that might have begun a character (Unicode 3.9, table 3-8), as in Python
// and in Rust's from_utf8_lossy.

static const char REPLACEMENT[3] = "\xef\xbf\xbd"; // U+FFFD

// Bytes of the character that `lead` begins; 0: it begins none.
static int character_length(uint8_t lead) {
    return lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

// Whether `byte` can follow the bytes held: the second byte of some characters has a smaller range, which leaves out
// overlong forms, surrogates and what lies beyond U+10FFFF.
static bool continues(const TextStream *s, uint8_t byte) {
    uint8_t lead = s->held[0], low = 0x80, high = 0xbf;
    if (s->n == 1) {
        if (lead == 0xe0) low = 0xa0;
        if (lead == 0xed) high = 0x9f;
        if (lead == 0xf0) low = 0x90;
        if (lead == 0xf4) high = 0x8f;
    }
    return byte >= low && byte <= high;
}

static size_t stream_byte(TextStream *s, uint8_t byte, char *out) {
    size_t n = 0;
    if (s->n && !continues(s, byte)) n += stream_end(s, out);
    if (!s->n && !character_length(byte)) {
        memcpy(out + n, REPLACEMENT, 3);
        return n + 3;
    }
    s->held[s->n++] = (char)byte;
    if (s->n < character_length(s->held[0])) return n;
    memcpy(out + n, s->held, s->n);
    n += s->n;
    s->n = 0;
    return n;
}

// A byte gives at most its own replacement; the bytes held, three more.
size_t stream_room(const Tokenizer *tok) { return 3 * (size_t)tok->longest + 3; }

size_t stream_push(TextStream *stream, const Tokenizer *tok, int32_t id, char *out) {
    size_t length = 0, n = 0;
    const char *bytes = tokenizer_bytes(tok, id, &length);
    if (!bytes || tokenizer_is_special(tok, id)) return 0; // the model's rows may outnumber the tokens
    for (size_t i = 0; i < length; i++) n += stream_byte(stream, (uint8_t)bytes[i], out + n);
    return n;
}

size_t stream_end(TextStream *stream, char *out) {
    if (!stream->n) return 0;
    memcpy(out, REPLACEMENT, 3);
    stream->n = 0;
    return 3;
}

// ---------------------------------------------------------------------------------------------
// Conversations. Between special tokens the reference encodes all text as one string ("user\n" and what the user
// wrote, adjacent parts too), so this gathers it before encoding.

typedef struct Buffer {
    char *data;
    size_t n, cap;
} Buffer;

static bool buffer_add(Buffer *b, const char *bytes, size_t n, Error *err) {
    if (n > MAX_TEXT || b->n + n > MAX_TEXT) return fail(err, 413, "a message is over the limit of %d bytes", MAX_TEXT);
    if (b->n + n > b->cap) {
        size_t cap = 2 * (b->n + n);
        char *data = realloc(b->data, cap);
        if (!data) return fail(err, 500, "out of memory for a message of %zu bytes", b->n + n);
        b->data = data, b->cap = cap;
    }
    if (n) memcpy(b->data + b->n, bytes, n);
    b->n += n;
    return true;
}

static bool buffer_flush(Buffer *b, const Tokenizer *tok, Ids *out, Error *err) {
    bool ok = tokenizer_encode(tok, b->data ? b->data : "", b->n, out, err);
    b->n = 0;
    return ok;
}

static bool prompt_picture(Prompt *prompt, const Tokenizer *tok, const ImageConfig *config, const Image *image,
                           Error *err) {
    if (prompt->n_images == prompt->cap_images) {
        int cap = prompt->cap_images ? 2 * prompt->cap_images : 4;
        const Image **images = realloc(prompt->images, cap * sizeof *images);
        if (!images) return fail(err, 500, "out of memory for %d pictures", cap);
        prompt->images = images, prompt->cap_images = cap;
    }
    prompt->images[prompt->n_images++] = image;
    ids_push(&prompt->ids, tok->template.image_before);
    for (int i = image_tokens(image, config); i > 0; i--) ids_push(&prompt->ids, tok->template.image);
    ids_push(&prompt->ids, tok->template.image_after);
    return true;
}

static bool prompt_parts(Prompt *prompt, const Tokenizer *tok, const ImageConfig *config, Buffer *text,
                         const Part *parts, int n_parts, Error *err) {
    for (int i = 0; i < n_parts; i++) {
        const Part *part = &parts[i];
        if (!part->text) {
            if (!buffer_flush(text, tok, &prompt->ids, err)) return false;
            if (!prompt_picture(prompt, tok, config, part->image, err)) return false;
            continue;
        }
        json_t *id = part->markup ? json_object_get(tok->added, part->text) : NULL;
        if (id) {
            if (!buffer_flush(text, tok, &prompt->ids, err)) return false;
            ids_push(&prompt->ids, (int32_t)json_integer_value(id));
            continue;
        }
        size_t fault = utf8_fault(part->text, part->n); // part by part, so that halves of a character do not join
        if (fault < part->n)
            return fail(err, 400, "part %d of the message is not UTF-8: the byte at %zu is wrong", i, fault);
        if (!buffer_add(text, part->text, part->n, err)) return false;
    }
    return buffer_flush(text, tok, &prompt->ids, err);
}

static bool role_known(const Template *t, const char *role) {
    size_t i;
    json_t *name;
    json_array_foreach(t->roles, i,
                       name) if (json_is_string(name) && !strcmp(json_string_value(name), role)) return true;
    return false;
}

bool prompt_add(Prompt *prompt, const Tokenizer *tok, const ImageConfig *config, const char *role, const Part *parts,
                int n_parts, Error *err) {
    const Template *t = &tok->template;
    size_t n_ids = prompt->ids.n;
    int n_images = prompt->n_images;
    Buffer text = {0};
    if (!role_known(t, role)) return fail(err, 400, "unknown role: known are system, user and assistant");
    if (!prompt->started && strcmp(role, "system")) ids_append(&prompt->ids, t->default_turn.data, t->default_turn.n);
    ids_push(&prompt->ids, t->open);
    bool ok = buffer_add(&text, role, strlen(role), err) &&
              buffer_add(&text, t->after_role, strlen(t->after_role), err) &&
              prompt_parts(prompt, tok, config, &text, parts, n_parts, err);
    free(text.data);
    if (!ok) {
        prompt->ids.n = n_ids, prompt->n_images = n_images;
        return false;
    }
    ids_append(&prompt->ids, t->turn_end.data, t->turn_end.n);
    prompt->started = true;
    return true;
}

void prompt_open_reply(Prompt *prompt, const Tokenizer *tok) {
    ids_append(&prompt->ids, tok->template.reply.data, tok->template.reply.n);
}

bool prompt_begin_reply(Prompt *prompt, const Tokenizer *tok, const Part *parts, int n_parts, Error *err) {
    Buffer text = {0};
    bool ok = prompt_parts(prompt, tok, NULL, &text, parts, n_parts, err);
    free(text.data);
    return ok;
}

void prompt_close_reply(Prompt *prompt, const Tokenizer *tok, const int32_t *ids, size_t n) {
    if (n && tokenizer_is_special(tok, ids[n - 1])) n--; // whatever ended the answer gives way to the template's own
    for (size_t i = 0; i < n; i++) // a model may write the placeholder, but it stands for no picture
        if (ids[i] != tok->template.image) ids_push(&prompt->ids, ids[i]);
    ids_append(&prompt->ids, tok->template.turn_end.data, tok->template.turn_end.n);
}

void prompt_free(Prompt *prompt) {
    free(prompt->ids.data);
    free(prompt->images);
    *prompt = (Prompt){0};
}
