// How the guest program talks to its endpoint (docs/guest-contract.md): HTTP, one request on a connection.
//
//   talk METHOD PATH [SIZE]  sends a request with SIZE bytes of standard input; prints the answer's text.
//                            0: the answer was 2xx. 2 to 125: 400 to 523, less 398. 1: another, or none.
//   talk carry NAME          sends the data of the pipe at standard input to /v1/log/NAME.
//
// Environment: VMJOBS_ENDPOINT (http://ADDRESS[:PORT]) and VMJOBS_TOKEN; run, the guest program's directory;
// VMJOBS_CHECKPOINT, if the VM may be saved and resumed: then the token is in the file `token` in that directory.
//
// A shell would need half a dozen processes for each part of a job's output. The program is static, because a
// container image may have no libraries, and C, because each page that a program touches costs a guest some time.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MAX_CHUNK (1 << 20)   // of a log in one request
#define BATCH_MS 100          // between two requests, unless MAX_CHUNK bytes arrive earlier
#define MORE_MS 5             // between two reads of a pipe that is being filled
#define CONNECT_SECONDS 30
#define PATIENCE_SECONDS 40   // to wait for an answer if the VM may be saved: then the answer never arrives

static const char *run;
static bool may_move;

static void say(const char *format, ...)
{
    int console = open("/dev/console", O_WRONLY | O_NOCTTY | O_CLOEXEC);
    va_list words;
    va_start(words, format);
    vdprintf(console, format, words);
    va_end(words);
    close(console);
}

static void mark(const char *name, const char *suffix)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%s", run, name, suffix);
    close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
}

static int dial(const char *endpoint)
{
    char host[256] = "";
    unsigned port = 80;
    sscanf(endpoint, "http://%255[0-9.]:%u", host, &port);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1) return -1;
    int peer = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = CONNECT_SECONDS};
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(peer, (struct sockaddr *)&to, sizeof to) == 0) {
        limit.tv_sec = may_move ? PATIENCE_SECONDS : 0;
        setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        return peer;
    }
    close(peer);
    return -1;
}

static const char *token(void)
{
    static char line[1024];
    if (!may_move) return getenv("VMJOBS_TOKEN");
    char path[4096];
    snprintf(path, sizeof path, "%s/token", run);
    FILE *file = fopen(path, "re");
    if (!file || !fgets(line, sizeof line, file)) *line = 0;
    if (file) fclose(file);
    line[strcspn(line, "\n")] = 0;
    return line;
}

// Sends `size` bytes of `body`: from the beginning of a file, or the next bytes of a pipe.
static void send_body(int peer, int body, off_t size)
{
    struct stat about;
    off_t at = 0;
    bool file = size && fstat(body, &about) == 0 && S_ISREG(about.st_mode);
    static char piece[1 << 16];
    while (size > 0) {
        off_t most = size < (off_t)sizeof piece ? size : (off_t)sizeof piece;
        ssize_t sent = file ? sendfile(peer, body, &at, size) : read(body, piece, most);
        if (sent <= 0) return;
        for (ssize_t done = 0, more; !file && done < sent; done += more)
            if ((more = send(peer, piece + done, sent - done, 0)) <= 0) return;
        size -= sent;
    }
}

// Reads an answer; writes its text to `out`. Returns its status; 0: it is incomplete.
static int receive(FILE *answer, FILE *out)
{
    char line[4096];
    int status = 0;
    long left = -1;
    if (!fgets(line, sizeof line, answer) || sscanf(line, "HTTP/%*s %d", &status) != 1) return 0;
    do {
        if (!fgets(line, sizeof line, answer)) return 0;
        if (!strncasecmp(line, "content-length:", 15)) left = atol(line + 15);
    } while (*line != '\r' && *line != '\n');
    if (status != 200 || !out) return status;
    for (size_t got; left && (got = fread(line, 1, sizeof line, answer)) > 0; left -= left < 0 ? 0 : (long)got)
        fwrite(line, 1, got, out);
    return left > 0 ? 0 : status;
}

// Sends a request; returns its status, or 0 for no answer.
static int request(const char *method, const char *path, int body, off_t size, FILE *out)
{
    const char *endpoint = getenv("VMJOBS_ENDPOINT"), *secret = token();
    int peer = endpoint && secret ? dial(endpoint) : -1;
    if (peer < 0) return 0;
    char head[8192];
    int length = snprintf(head, sizeof head,
                          "%s %s HTTP/1.0\r\nHost: vmjobs\r\nAuthorization: Bearer %s\r\nContent-Length: %lld\r\n"
                          "Connection: close\r\n\r\n", method, path, secret, (long long)size);
    int status = 0;
    // A server that refuses a body answers and hangs up before it has read the body.
    if (length < (int)sizeof head && send(peer, head, length, size ? MSG_MORE : 0) == length) {
        send_body(peer, body, size);
        FILE *answer = fdopen(peer, "r");
        status = receive(answer, out);
        fclose(answer);
    } else {
        close(peer);
    }
    return status;
}

static int ask(const char *method, const char *path, off_t size)
{
    int status = request(method, path, 0, size, stdout);
    if (fflush(stdout)) return 1;
    if (status / 100 == 2) return 0;
    return status >= 400 && status < 524 ? status - 398 : 1;
}

// ------------------------------------------------------------------ output of the script
//
// Data that has been read from the pipe, and that the host has not acknowledged, is in a file NAME.OFFSET, whose bytes
// are those of the stream from OFFSET on. The kernel moves them there (splice), so that none are lost when this
// program is killed, as by a script that kills all processes. A restarted program continues with that file. It is
// removed once the file with the next offset exists; if there are two, the first counts.

static void chunk_path(char *path, size_t size, const char *name, long long offset)
{
    snprintf(path, size, "%s/%s.%lld", run, name, offset);
}

// Returns the offset of the first chunk; 0 if there is none.
static long long first_chunk(const char *name)
{
    long long first = -1, offset;
    size_t length = strlen(name);
    DIR *directory = opendir(run);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char *end;
        if (strncmp(entry->d_name, name, length) || entry->d_name[length] != '.') continue;
        offset = strtoll(entry->d_name + length + 1, &end, 10);
        if (end > entry->d_name + length + 1 && !*end && (first < 0 || offset < first)) first = offset;
    }
    if (directory) closedir(directory);
    return first < 0 ? 0 : first;
}

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

// Moves the pipe's data to the end of a chunk until that is large enough or old enough. False: the pipe has ended.
// If the job has filled the file system the chunk is only in memory.
static bool gather(int chunk, off_t *size, long long not_before)
{
    for (;;) {
        ssize_t moved = splice(0, NULL, chunk, size, MAX_CHUNK - *size, SPLICE_F_NONBLOCK);
        if (moved == 0) return *size >= MAX_CHUNK;
        if (moved > 0) continue;
        if (errno != EAGAIN) {
            if (*size) return true;
            int memory = memfd_create("chunk", 0);
            if (dup2(memory, chunk) < 0) sleep(1);
            close(memory);
            continue;
        }
        long long wait = *size ? not_before - now_ms() : -1;
        if (*size && wait <= 0) return true;
        // Waking up for each page would cost more than everything else.
        struct pollfd pipe = {.fd = 0, .events = POLLIN};
        poll(&pipe, *size ? 0 : 1, *size && wait > MORE_MS ? MORE_MS : wait);
    }
}

// Sends a chunk until the host accepts or refuses it: five tries, and any number while the host answers that this
// VM is being saved, or was resumed and needs its new token.
static void deliver(const char *name, long long offset, int chunk, off_t size)
{
    static const unsigned pauses[] = {1, 2, 4, 8};
    char path[128];
    snprintf(path, sizeof path, "/v1/log/%s?offset=%lld", name, offset);
    for (unsigned tries = 0;;) {
        int status = request("POST", path, chunk, size, NULL);
        if (status / 100 == 2) return;
        if (may_move && (status == 401 || status == 503)) {
            sleep(2);
            continue;
        }
        bool may_change = !status || status == 408 || status == 429 || status >= 500;
        if (may_change && tries < sizeof pauses / sizeof *pauses) {
            sleep(pauses[tries++]);
            continue;
        }
        say("\nvmjobs: error: std%s lost bytes (%03d)\n", name, status);
        if (may_change) mark("undelivered", "");
        return;
    }
}

static int carry(const char *name)
{
    char path[4096], next[4096];
    long long offset = first_chunk(name), not_before = 0;
    fcntl(0, F_SETPIPE_SZ, MAX_CHUNK);
    for (bool more = true; more;) {
        chunk_path(path, sizeof path, name, offset);
        int chunk = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        off_t size = lseek(chunk, 0, SEEK_END);
        if (size == 0) more = gather(chunk, &size, not_before);
        if (size > 0) {
            not_before = now_ms() + BATCH_MS;
            deliver(name, offset, chunk, size);
            offset += size;
            chunk_path(next, sizeof next, name, offset);
            close(open(next, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
            unlink(path);
        }
        close(chunk);
    }
    mark(name, ".over");
    return 0;
}

int main(int count, char **words)
{
    const char *saved = getenv("VMJOBS_CHECKPOINT");
    may_move = saved && *saved;
    run = getenv("run");
    if (!run) run = "/run/vmjobs";
    signal(SIGPIPE, SIG_IGN);
    if (count == 3 && !strcmp(words[1], "carry")) return carry(words[2]);
    if (count == 3 || count == 4) return ask(words[1], words[2], count == 4 ? atoll(words[3]) : 0);
    fputs("talk METHOD PATH [SIZE]\ntalk carry NAME\n", stderr);
    return 1;
}
