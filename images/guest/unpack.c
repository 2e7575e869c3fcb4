// Unpacks the job disk, a tar stream that the host has written (docs/guest-contract.md, "The job disk").
//
//   unpack description DISK DIRECTORY  writes job.json, job.env, environment and outputs to a directory
//   unpack files DISK DIRECTORY        writes the script to a directory, the inputs to `work` there, and makes `home`
//                                      and `tmp`
//
// Large files go round the guest's page cache (O_DIRECT): under User Mode Linux it passes on 200 MB a second, one
// page at a time. The program is static, as `talk` is.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 512           // of a tar stream
#define PIECE (1 << 20)     // bytes read and written at once; files of this size or more go round the cache
#define PAGE 4096           // alignment for O_DIRECT
#define NAME_BYTES (1 << 16)

// A header as Python's tarfile writes it: POSIX.1-1988 with GNU's long names and large numbers (tar manual, "Basic
// Tar Format").
struct header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[5], rest[250];
};

static char piece[PIECE + PAGE] __attribute__((aligned(PAGE)));

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "damaged");
    exit(1);
}

// Reads or writes around the cache as long as the device allows that.
static ssize_t transfer(int file, size_t size, off_t at, bool out)
{
    ssize_t done = out ? pwrite(file, piece, size, at) : pread(file, piece, size, at);
    int flags = fcntl(file, F_GETFL);
    if (done >= 0 || errno != EINVAL || !(flags & O_DIRECT)) return done;
    fcntl(file, F_SETFL, flags & ~O_DIRECT);
    return transfer(file, size, at, out);
}

// Copies bytes of the disk from an offset on into a new file.
static void write_file(const char *path, mode_t mode, const char *disk, off_t start, off_t size)
{
    int direct = size >= PIECE ? O_DIRECT : 0;
    int in = open(disk, O_RDONLY | O_CLOEXEC | direct);
    int out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | direct, mode);
    if (out < 0) out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    if (in < 0 || out < 0) fail(path);
    for (off_t at = 0; at < size;) {
        size_t wanted = size - at < PIECE ? size - at : PIECE;
        size_t most = direct ? (wanted + PAGE - 1) / PAGE * PAGE : wanted;
        errno = 0;
        ssize_t got = transfer(in, (wanted + BLOCK - 1) / BLOCK * BLOCK, start + at, false);
        if (got < (ssize_t)wanted || transfer(out, most, at, true) != (ssize_t)most) fail(path);
        at += wanted;
    }
    // Only now it has its size: the last page was written whole.
    if (ftruncate(out, size) || fchmod(out, mode) || close(out)) fail(path);
    close(in);
}

static void make_directory(const char *path, mode_t mode)
{
    if (mkdir(path, mode) && errno != EEXIST) fail(path);
    if (mode & S_ISVTX && chmod(path, mode)) fail(path);
}

static void make_parents(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        make_directory(path, 0755);
        *slash = '/';
    }
}

static off_t size_in(const struct header *header)
{
    if (!(header->size[0] & 0x80)) return strtoll(header->size, NULL, 8);
    off_t size = 0;
    for (int byte = 1; byte < 12; byte++) size = size << 8 | (unsigned char)header->size[byte];
    return size;
}

// Returns where in the directory an entry belongs; NULL: nowhere, this time.
static const char *place_of(const char *name, bool files)
{
    static char place[NAME_BYTES + sizeof "work/"];
    bool input = !strncmp(name, "inputs/", 7);
    if (files != (input || !strcmp(name, "script"))) return NULL;
    snprintf(place, sizeof place, "%s%s", input ? "work/" : "", input ? name + 7 : name);
    return place;
}

int main(int count, char **words)
{
    bool files = count == 4 && !strcmp(words[1], "files");
    if (count != 4 || (!files && strcmp(words[1], "description"))) {
        fputs("unpack description|files DISK DIRECTORY\n", stderr);
        return 1;
    }
    const char *disk = words[2];
    if (chdir(words[3])) fail(words[3]);
    if (files) {
        make_directory("work", 0755);
        make_directory("home", 0755);
        make_directory("tmp", 01777);
    }
    int headers = open(disk, O_RDONLY | O_CLOEXEC);
    if (headers < 0) fail(disk);
    static char long_name[NAME_BYTES];
    struct header header;
    for (off_t at = 0;;) {
        errno = 0;
        if (pread(headers, &header, BLOCK, at) != BLOCK) fail(disk);
        if (!header.name[0]) return 0;
        if (memcmp(header.magic, "ustar", sizeof header.magic)) fail(disk);
        off_t size = size_in(&header);
        at += BLOCK;
        if (header.type == 'L') {
            if (size >= NAME_BYTES || pread(headers, long_name, size, at) != size) fail(disk);
            long_name[size] = 0;
        } else {
            char name[NAME_BYTES];
            snprintf(name, sizeof name, *long_name ? "%s" : "%.100s", *long_name ? long_name : header.name);
            const char *place = place_of(name, files);
            if (place) {
                char path[NAME_BYTES + sizeof "work/"];
                strcpy(path, place);
                make_parents(path);
                write_file(path, strtol(header.mode, NULL, 8), disk, at, size);
            } else if (!files) {
                return 0; // the description comes first
            }
            *long_name = 0;
        }
        at += (size + BLOCK - 1) / BLOCK * BLOCK;
    }
}
