// fetch.c: a picture from http(s), for strangers who name URLs.
//
// What a URL means is decided by whoever wrote it: it may name the machine itself, its neighbours, or a cloud's
// metadata. So the address that is about to be connected to is checked, after the name's resolution and on every
// redirect, in the one place where all connections pass: where the socket is made. A name that resolves to another
// address the next time has no effect.
#include "request.h"
#include <arpa/inet.h>
#include <curl/curl.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// Networks: a prefix of an IPv6 address; IPv4 ones are ::ffff:a.b.c.d.

struct Network {
    uint8_t address[16];
    int bits;
};

static void map_v4(const void *v4, uint8_t out[16]) {
    memset(out, 0, 10), memset(out + 10, 0xff, 2);
    memcpy(out + 12, v4, 4);
}

static bool network_has(const Network *n, const uint8_t address[16]) {
    int bytes = n->bits / 8, rest = n->bits % 8;
    return memcmp(n->address, address, (size_t)bytes) == 0 &&
           (!rest || (n->address[bytes] ^ address[bytes]) >> (8 - rest) == 0);
}

// "10.0.0.0/8", "::1", "192.168.1.5"
static bool network_parse(const char *text, Network *out) {
    char address[64], *end = NULL;
    const char *slash = strchr(text, '/');
    size_t length = slash ? (size_t)(slash - text) : strlen(text);
    uint8_t v4[4];
    if (length >= sizeof address) return false;
    memcpy(address, text, length), address[length] = 0;
    bool is_v4 = inet_pton(AF_INET, address, v4) == 1;
    if (is_v4) map_v4(v4, out->address);
    if (!is_v4 && inet_pton(AF_INET6, address, out->address) != 1) return false;
    int most = is_v4 ? 32 : 128;
    long bits = slash ? strtol(slash + 1, &end, 10) : most;
    if (slash && (end == slash + 1 || *end || bits < 0 || bits > most)) return false;
    out->bits = (int)bits + (is_v4 ? 96 : 0);
    return true;
}

bool networks_parse(const char *list, Network **out, int *n, Error *err) {
    char *copy = need(strdup(list)), *save;
    bool ok = true;
    *out = NULL, *n = 0;
    for (char *part = strtok_r(copy, ", ", &save); ok && part; part = strtok_r(NULL, ", ", &save)) {
        *out = need(realloc(*out, sizeof **out * ((size_t)*n + 1)));
        ok = network_parse(part, &(*out)[(*n)++]) ||
             fail(err, 400, "--allow-images-from: '%.60s' is no address and no network, such as 10.0.0.0/8", part);
    }
    free(copy);
    return ok;
}

// IANA's special-purpose registries of addresses that are not globally reachable, and those that carry another address.
static bool address_public(const uint8_t address[16]) {
    static const char *const special[] = {"0.0.0.0/8",      "10.0.0.0/8",     "100.64.0.0/10", "127.0.0.0/8",
                                          "169.254.0.0/16", "172.16.0.0/12",  "192.0.0.0/24",  "192.0.2.0/24",
                                          "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
                                          "203.0.113.0/24", "224.0.0.0/4",    "240.0.0.0/4",   "2001::/23",
                                          "2001:db8::/32",  "2002::/16",      "3fff::/20"};
    Network n, v4 = {.bits = 96}, global = {.address = {0x20}, .bits = 3}; // 2000::/3
    map_v4("\0\0\0", v4.address);
    if (!network_has(&v4, address) && !network_has(&global, address)) return false;
    for (size_t i = 0; i < sizeof special / sizeof *special; i++)
        if (network_parse(special[i], &n) && network_has(&n, address)) return false;
    return true;
}

// ---------------------------------------------------------------------------------------------
// One fetch

typedef struct Fetch {
    const FetchRules *rules;
    Text *out;
    size_t limit;
    bool refused, too_large, no_room;
} Fetch;

static curl_socket_t open_socket(void *context, curlsocktype purpose, struct curl_sockaddr *to) {
    Fetch *f = context;
    uint8_t address[16];
    if (purpose != CURLSOCKTYPE_IPCXN) return CURL_SOCKET_BAD;
    if (to->family == AF_INET)
        map_v4(&((struct sockaddr_in *)&to->addr)->sin_addr, address);
    else if (to->family == AF_INET6)
        memcpy(address, &((struct sockaddr_in6 *)&to->addr)->sin6_addr, 16);
    else
        return CURL_SOCKET_BAD;
    bool allowed = address_public(address);
    for (int i = 0; i < f->rules->n_allowed; i++) allowed |= network_has(&f->rules->allowed[i], address);
    if (!allowed) return f->refused = true, CURL_SOCKET_BAD;
    return socket(to->family, to->socktype | SOCK_CLOEXEC, to->protocol);
}

static size_t receive(char *bytes, size_t size, size_t n, void *context) {
    Fetch *f = context;
    if (size * n > f->limit - f->out->n) return f->too_large = true, 0;
    if (!f->rules->room(f->rules->context, size * n)) return f->no_room = true, 0;
    text_add(f->out, bytes, size * n);
    return size * n;
}

// curl asks now and then whether to go on.
static int progress(void *context, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    const FetchRules *rules = ((Fetch *)context)->rules;
    (void)a, (void)b, (void)c, (void)d;
    return rules->gone(rules->context);
}

static void fetch_options(CURL *curl, Fetch *f, const char *url) {
    curl_easy_setopt(curl, CURLOPT_URL, url);
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
#else
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
    curl_easy_setopt(curl, CURLOPT_DISALLOW_USERNAME_IN_URL, 1L);
    curl_easy_setopt(curl, CURLOPT_HTTP09_ALLOWED, 0L);
    curl_easy_setopt(curl, CURLOPT_PROXY, ""); // a proxy's address would be checked in place of the picture's
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(curl, CURLOPT_MAXREDIRS, 3L);
    curl_easy_setopt(curl, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    curl_easy_setopt(curl, CURLOPT_OPENSOCKETDATA, f);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, receive);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, f);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, progress);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, f);
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_MAXFILESIZE_LARGE, (curl_off_t)f->limit);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (long)(f->rules->seconds * 1e3));
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_USERAGENT, "vlm.c");
}

static bool fail_late(Error *err) { return fail(err, 400, "the request's pictures took too long to fetch"); }

bool fetch_url(const FetchRules *rules, const char *url, size_t limit, Text *out, Error *err) {
    Fetch f = {.rules = rules, .out = out, .limit = limit};
    long status = 0;
    if (rules->seconds < 0.001) return fail_late(err);
    CURL *curl = need(curl_easy_init());
    fetch_options(curl, &f, url);
    CURLcode code = curl_easy_perform(curl);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(curl);
    if (f.refused) return fail(err, 400, "the picture's address is not a public one: it is not fetched from there");
    if (f.too_large || code == CURLE_FILESIZE_EXCEEDED)
        return fail(err, 400, "the picture is over the limit of %zu bytes for fetching", limit);
    if (f.no_room) return fail(err, 503, "too many pictures are being fetched: try again later");
    if (code == CURLE_OPERATION_TIMEDOUT) return fail_late(err);
    if (code == CURLE_TOO_MANY_REDIRECTS) return fail(err, 400, "the picture's server redirects too often");
    if (code == CURLE_UNSUPPORTED_PROTOCOL) return fail(err, 400, "pictures are fetched by http and https only");
    if (code != CURLE_OK) return fail(err, 400, "the picture cannot be fetched: its server cannot be reached");
    if (status != 200) return fail(err, 400, "the picture's server answered with status %ld", status);
    return out->n > 0 || fail(err, 400, "the picture's server sent nothing");
}
