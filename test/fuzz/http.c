// Fuzzer's entry for server.c: what a stranger sends on a connection, to the real server with the small model, in this
// process. Whatever comes, it is answered in HTTP or the connection is closed, and all that it took is given back.
//   make fuzz, or: build/fuzz/fuzz_http -max_total_time=600 CORPUS
// The input is what the client sends. The byte 0xFF, which is in no UTF-8, gives orders to the client:
//   0xFF |   stop until the server has read everything and waits for more
//   0xFF X   hang up: the end of file comes right behind what was sent
//   0xFF C   close: the same, and nothing of the reply is taken
//   0xFF L   seven digits: how many bytes follow the next empty line, so that a changed body still fits its head
//   0xFF F   the path of the folder that file:// pictures may be in
//   0xFF S   what follows is not sent: it is what every server says that pictures are fetched from
//   0xFF 3   the byte before it 4^3 times more (or another power)
//   0xFF     and any other byte: both as they are
// A client that has sent all waits for what comes, and hangs up when the server waits too, or when the answer gets
// long. Time plays no part in it: poll() is where a connection's thread waits for its client and looks for it, so
// poll() below is where the client goes on. Run it in the project's folder: its model is tiny/tiny.vlm.
#include "server.c"
#include <netinet/in.h>
#include <omp.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/un.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static Server server;
static Text got; // what it has sent

#define EXPECT(what)                                                                                                   \
    do {                                                                                                               \
        if (!(what)) failed(__LINE__, #what);                                                                          \
    } while (0)

static void failed(int line, const char *what) {
    fprintf(stderr, "%s:%d: not so: %s; this came: ", __FILE__, line, what);
    put_clean(stderr, got.data, got.n < 2000 ? got.n : 2000, true);
    fputc('\n', stderr);
    abort();
}

enum { MOST_SENT = 1 << 20, MOST_STOPS = 32, LENGTH_DIGITS = 7, PATIENCE = 400, HANG_SECONDS = 60, MOST_FETCHES = 16 };

// ---------------------------------------------------------------------------------------------
// The client

typedef enum Leave { LEAVE_LAST, LEAVE_HANGING_UP, LEAVE_CLOSING } Leave;

static struct {
    Text bytes; // to send
    size_t sent, stops[MOST_STOPS];
    int n_stops, next_stop;
    Leave leave;         // how, when all is sent
    int64_t most_tokens; // of the server's metrics, that it waits for
    int fd;
    atomic_int server_fd; // the other end; -1: no connection
} client = {.server_fd = -1};

static struct { // every server that pictures are fetched from
    const uint8_t *says;
    size_t n;
    int fds[MOST_FETCHES], n_fds;
} elsewhere;

// The count of bytes that follow the empty line behind `at`, in the digits there.
static void put_length(size_t at) {
    Text *t = &client.bytes;
    const char *body = memmem(t->data + at, t->n - at, "\r\n\r\n", 4);
    char digits[LENGTH_DIGITS + 1];
    snprintf(digits, sizeof digits, "%0*zu", LENGTH_DIGITS, body ? t->n - (size_t)(body + 4 - t->data) : 0);
    memcpy(t->data + at, digits, LENGTH_DIGITS);
}

// Do one order. False: it is none.
static bool client_order(char order, size_t *length) {
    Text *t = &client.bytes;
    if (order >= '0' && order <= '9') {
        size_t times = (size_t)1 << 2 * (order - '0');
        char *room = text_room(t, times);
        memset(room, t->n ? room[-1] : ' ', times);
        t->n += times;
    } else if (order == '|') {
        if (client.n_stops < MOST_STOPS) client.stops[client.n_stops++] = t->n;
    } else if (order == 'L') {
        *length = t->n;
        text_add(t, "0000000", LENGTH_DIGITS);
    } else if (order == 'F') {
        text_add(t, server.media_dir, strlen(server.media_dir));
    } else if (order == 'X') {
        client.leave = LEAVE_HANGING_UP;
    } else if (order == 'C') {
        client.leave = LEAVE_CLOSING;
    } else {
        return false;
    }
    return true;
}

static void client_read(const uint8_t *data, size_t n) {
    Text *t = &client.bytes;
    size_t length = SIZE_MAX;
    t->n = client.sent = 0, client.n_stops = client.next_stop = 0, client.leave = LEAVE_LAST;
    elsewhere.n = 0;
    text_add(t, "", 0);
    for (size_t i = 0; i < n && t->n < MOST_SENT && !elsewhere.n; i++) {
        bool is_order = data[i] == 0xFF && i + 1 < n;
        if (is_order && data[i + 1] == 'S')
            elsewhere.says = data + i + 2, elsewhere.n = n - i - 2;
        else if (is_order && client_order((char)data[i + 1], &length))
            i++;
        else
            text_add(t, (const char *)&data[i], 1);
    }
    if (length != SIZE_MAX) put_length(length);
}

// Send up to the next stop, or the end of file, if the server has read all there is.
static void client_go_on(int server_fd) {
    int unread;
    if (ioctl(server_fd, FIONREAD, &unread) < 0 || unread) return;
    while (client.next_stop < client.n_stops && client.stops[client.next_stop] <= client.sent) client.next_stop++;
    size_t to = client.next_stop < client.n_stops ? client.stops[client.next_stop] : client.bytes.n;
    if (client.sent == client.bytes.n && client.leave == LEAVE_LAST) client.leave = LEAVE_HANGING_UP;
    while (client.sent < to) {
        ssize_t n = send(client.fd, client.bytes.data + client.sent, to - client.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n <= 0) return; // the rest when it has read this
        client.sent += (size_t)n;
    }
    if (client.leave != LEAVE_LAST && client.sent == client.bytes.n)
        shutdown(client.fd, client.leave == LEAVE_CLOSING ? SHUT_RDWR : SHUT_WR);
}

static bool answer_is_long(void) {
    pthread_mutex_lock(&server.lock);
    bool is_long = server.metrics.generated_tokens > client.most_tokens;
    pthread_mutex_unlock(&server.lock);
    return is_long;
}

int poll(struct pollfd *fds, nfds_t n, int timeout) {
    struct timespec limit = {timeout / 1000, timeout % 1000 * 1000000L};
    int server_fd = atomic_load(&client.server_fd);
    for (nfds_t i = 0; i < n && server_fd >= 0; i++) {
        if (fds[i].fd != server_fd) continue;
        if (timeout && fds[i].events & POLLIN) client_go_on(server_fd);
        if (!timeout && answer_is_long()) shutdown(client.fd, SHUT_WR); // it looks whether the client is still there
    }
    return ppoll(fds, n, timeout < 0 ? NULL : &limit, NULL);
}

// No fetch leaves this process: names are not looked up, and whoever is called says what the input wants.
int connect(int fd, const struct sockaddr *address, socklen_t n) {
    int ends[2];
    (void)address, (void)n;
    errno = ECONNREFUSED;
    if (!elsewhere.n || elsewhere.n_fds == MOST_FETCHES) return -1;
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    EXPECT(send(ends[1], elsewhere.says, elsewhere.n, MSG_NOSIGNAL) > 0 && shutdown(ends[1], SHUT_WR) == 0);
    EXPECT(dup2(ends[0], fd) == fd);
    close(ends[0]);
    elsewhere.fds[elsewhere.n_fds++] = ends[1];
    return 0;
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    (void)name, (void)service, (void)hints, (void)out;
    return EAI_NONAME;
}

// ---------------------------------------------------------------------------------------------
// The server

static ServeOptions options = {.model_name = "tiny",
                               .media_dir = "tiny/samples",
                               .max_body = 1 << 20,
                               .body_memory = 1 << 20,
                               .picture_memory = 48 << 10,
                               .fetch_bytes = 1 << 16,
                               .max_images = 4,
                               .max_queue = 256,
                               .max_connections = 8,
                               .header_seconds = 2 * HANG_SECONDS, // nobody is slow
                               .idle_seconds = 2 * HANG_SECONDS,
                               .fetch_seconds = 10,
                               .quiet = true};

static void *engine_thread(void *context) {
    omp_set_num_threads(1);
    engine_run(context);
    return NULL;
}

static void server_open(void) {
    static Workspace work;
    Error err = {0};
    pthread_t threads[2];
    // a name that the system makes up: connections are handed over without it
    struct sockaddr_un nowhere = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    Model *model = model_open("tiny/tiny.vlm", &err);
    if (!model) fprintf(stderr, "%s\n", err.message), abort();
    model->config.image.max_source_pixels = 1 << 19;
    // so few blocks that many answers at a time do not fit
    Engine *engine =
        engine_open(model, &device_cpu, &(EngineOptions){.ctx = 480, .kv_blocks = 32, .max_seqs = 4}, &err);
    if (!engine) fprintf(stderr, "%s\n", err.message), abort();
    work.base = need(malloc(work.size = image_workspace(engine_image_config(engine))));
    server = (Server){.options = &options, .model = model, .engine = engine, .work = &work};
    json_object_seed(1);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    server_init(&server);
    EXPECT(bind(fd, (struct sockaddr *)&nowhere, sizeof nowhere.sun_family) == 0 && listen(fd, 1) == 0);
    EXPECT(server_rules(&server, &err) && server_start(&server, fd, &err));
    pthread_create(&threads[0], NULL, engine_thread, &server);
    pthread_create(&threads[1], NULL, housekeep, &server);
}

// Everything is given back: by the time the client has seen the end, or (the connection itself) soon after.
static void check_idle(void) {
    Server *s = &server;
    MemoryMap map;
    Error err = {0};
    bool connected = true;
    for (double end = now_seconds() + HANG_SECONDS; connected; usleep(20)) {
        pthread_mutex_lock(&s->lock);
        connected = s->clients != NULL;
        pthread_mutex_unlock(&s->lock);
        EXPECT(now_seconds() < end);
    }
    EXPECT(!s->calls && !s->jobs && !s->tasks && !s->bodies.first && !s->pictures.first);
    EXPECT(!s->bodies.used && !s->pictures.used && !s->fetched.used);
    engine_call(s, task_flush, NULL); // so that no input depends on those before it
    engine_call(s, task_map, &map);
    EXPECT(!map.running && !map.waiting && map.blocks_free == map.blocks && !map.slots_used);
    EXPECT(engine_check(s->engine, &err));
}

// ---------------------------------------------------------------------------------------------
// What comes back

typedef struct Head {
    int status;
    bool sized, chunked, json, events;
    size_t length;
} Head;

static bool is_field(const char *line, const char *name, const char **value) {
    size_t n = strlen(name);
    *value = line + n + 2;
    return strncasecmp(line, name, n) == 0 && strncmp(line + n, ": ", 2) == 0;
}

// From the status line to the empty line at `end`, which becomes a 0.
static Head head_read(char *text, char *end) {
    Head h = {0};
    char *save;
    const char *value;
    *end = 0;
    EXPECT(strlen(text) == (size_t)(end - text));
    EXPECT(strncmp(text, "HTTP/1.1 ", 9) == 0 && strspn(text + 9, "0123456789") == 3 && text[12] == ' ');
    h.status = atoi(text + 9);
    EXPECT(h.status >= 100 && h.status < 600 && h.status != 500);
    for (char *line = strtok_r(text, "\r\n", &save); (line = strtok_r(NULL, "\r\n", &save));) {
        for (const char *c = line; *c; c++) EXPECT((unsigned char)*c >= ' ' && (unsigned char)*c < 127);
        EXPECT(strstr(line, ": "));
        if (is_field(line, "Content-Length", &value)) {
            EXPECT(!h.sized && strspn(value, "0123456789") == strlen(value));
            h.sized = true, h.length = strtoull(value, NULL, 10);
        }
        if (is_field(line, "Transfer-Encoding", &value)) h.chunked = strcmp(value, "chunked") == 0;
        if (is_field(line, "Content-Type", &value)) {
            h.json = strcmp(value, "application/json") == 0;
            h.events = strcmp(value, "text/event-stream") == 0;
        }
    }
    EXPECT(!(h.sized && h.chunked));
    return h;
}

static void check_json(const char *text, size_t n) {
    json_t *value = json_loadb(text, n, JSON_ALLOW_NUL, NULL);
    EXPECT(json_is_object(value));
    json_decref(value);
}

// Events of JSON, and at the end either [DONE] or an error.
static void check_events(char *text, size_t n) {
    bool done = false, error = false;
    while (n) {
        char *end = memmem(text, n, "\n\n", 2);
        EXPECT(end && strncmp(text, "data: ", 6) == 0 && !done && !error);
        done = end - text == 12 && strncmp(text + 6, "[DONE]", 6) == 0;
        error = strncmp(text + 6, "{\"error\":", 9) == 0;
        if (!done) check_json(text + 6, (size_t)(end - text) - 6);
        n -= (size_t)(end + 2 - text), text = end + 2;
    }
    EXPECT(done || error);
}

// Put the chunks at `text` together, in place. Returns where they end in the input; `n` gets what they hold.
static char *unchunk(char *text, const char *end, size_t *n) {
    char *out = text;
    for (char *at = text;;) {
        char *line = memmem(at, (size_t)(end - at), "\r\n", 2);
        EXPECT(line && line != at && strspn(at, "0123456789ABCDEF") == (size_t)(line - at));
        size_t size = strtoull(at, NULL, 16);
        at = line + 2;
        EXPECT(size < (size_t)(end - at) && size + 2 <= (size_t)(end - at) && memcmp(at + size, "\r\n", 2) == 0);
        if (!size) return *n = (size_t)(out - text), at + 2;
        memmove(out, at, size);
        out += size, at += size + 2;
    }
}

// Whole replies, one after another.
static void check_replies(char *text, size_t n) {
    char *end = text + n;
    bool heads = memmem(client.bytes.data, client.bytes.n, "HEAD", 4); // there may be replies without their bodies
    while (text < end) {
        char *body = memmem(text, (size_t)(end - text), "\r\n\r\n", 4), *next;
        EXPECT(body);
        size_t n_head = (size_t)(body + 4 - text);
        // libmicrohttpd 0.9.75 sends the head of some refusals of its own twice, and closes
        if (n_head <= (size_t)(end - text) / 2 && memcmp(text, text + n_head, n_head) == 0)
            text += n_head, body += n_head;
        Head h = head_read(text, body);
        next = body += 4;
        size_t size = 0;
        bool without = h.status < 200 || (heads && (body == end || strncmp(body, "HTTP/1.1 ", 9) == 0));
        if (!without && h.chunked) next = unchunk(body, end, &size);
        if (!without && !h.chunked) size = h.sized ? h.length : (size_t)(end - body), next = body + size;
        EXPECT(size <= (size_t)(end - body));
        if (h.json && !without) check_json(body, size);
        if (h.events && !without) check_events(body, size);
        text = next;
    }
}

// All that the server sends until it closes.
static void receive_all(Text *out) {
    for (ssize_t n = 1; n > 0;) {
        char *room = text_room(out, 1 << 16);
        n = recv(client.fd, room, 1 << 16, 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            fprintf(stderr, "no byte and no end in %d seconds\n", HANG_SECONDS), abort();
        out->n += n > 0 ? (size_t)n : 0;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = HANG_SECONDS};
    int ends[2];
    if (!server.daemon) server_open();
    client_read(data, n);
    // who sends a key comes to a strict server that wants one
    options.strict = memmem(data, n, "Bearer", 6);
    options.api_key = options.strict ? "key" : NULL;
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    client.fd = ends[0], client.most_tokens = server.metrics.generated_tokens + PATIENCE;
    setsockopt(client.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    atomic_store(&client.server_fd, ends[1]);
    EXPECT(MHD_add_connection(server.daemon, ends[1], (struct sockaddr *)&address, sizeof address) == MHD_YES);
    got.n = 0;
    receive_all(&got);
    check_idle();
    atomic_store(&client.server_fd, -1);
    close(client.fd);
    while (elsewhere.n_fds) close(elsewhere.fds[--elsewhere.n_fds]);
    if (client.leave != LEAVE_CLOSING) check_replies(got.data, got.n);
    return 0;
}
