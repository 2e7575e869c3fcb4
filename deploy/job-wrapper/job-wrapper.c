// HTCondor's USER_JOB_WRAPPER: runs a job that names an image in a VM, and any other job unchanged.
//
// The starter runs this as the job's user, in the job's directory and environment, with the job's command as
// arguments. That environment controls a dynamically linked program, a shell or Python: LD_PRELOAD alone runs the
// job's own code on the node. So this program is static, and uses no variables except HTCondor's. It is C because it
// starts every job of the node: Go's runtime obeys GODEBUG, and prints into the job's standard error. Data from guests
// is read by exec-unchanged (Python), which this program starts in a clean environment.

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef EXEC
#define EXEC "/usr/libexec/vmjobs/exec-unchanged"
#endif
#define SSHD "/usr/sbin/sshd"
#define SSHD_CONFIG "ssh-to-job.sshd" // beside this program
#define GETPWNAM "libgetpwnam.so"
#define OWN "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"

// Tells the starter why the job did not start, so that the starter does not count this as the job's own end.
static _Noreturn void refuse(const char *what)
{
    const char *why = strerror(errno), *told = getenv("_CONDOR_WRAPPER_ERROR_FILE");
    FILE *file = told && *told ? fopen(told, "w") : NULL;
    if (file) {
        fprintf(file, "vmjobs: cannot run %s: %s\n", what, why);
        fclose(file);
    }
    fprintf(stderr, "vmjobs: cannot run %s: %s\n", what, why);
    exit(1);
}

static char *print(const char *format, const char *value)
{
    char *text;
    if (asprintf(&text, format, value) < 0)
        refuse(value);
    return text;
}

// Whether the job's ad names an image. If the ad cannot be read the job does not start: it may need a VM.
static bool wants_vm(const char *command)
{
    const char *path = getenv("_CONDOR_JOB_AD"), name[] = "VMJobImage";
    if (!path || !*path)
        return false;
    FILE *ad = fopen(path, "re");
    char *line = NULL;
    size_t size = 0;
    bool found = false;
    while (ad && getline(&line, &size, ad) >= 0) {
        char *rest = line + strlen(name);
        if (strncasecmp(line, name, strlen(name)) != 0 || *(rest += strspn(rest, " ")) != '=')
            continue;
        rest += 1 + strspn(rest + 1, " ");
        size_t word = strcspn(rest, " \n");
        bool undefined = word == strlen("undefined") && strncasecmp(rest, "undefined", word) == 0;
        found = found || !undefined || rest[word + strspn(rest + word, " \n")] != '\0';
    }
    if (!ad || ferror(ad))
        refuse(command);
    return found;
}

// Returns a file with the job's environment variables, each terminated by a NUL. The file has no name, so it
// disappears with the processes that have it open.
static int variables(const char *command)
{
    int handle = memfd_create("environment", 0);
    FILE *file = handle < 0 ? NULL : fdopen(handle, "w");
    for (char **word = environ; file && *word; word++)
        fwrite(*word, strlen(*word) + 1, 1, file);
    if (!file || fflush(file) != 0 || ferror(file))
        refuse(command);
    return handle;
}

// Whether this is the SSH server of condor_ssh_to_job and not the job: .condor_ssh_to_job_NUMBER/sshd_config.
static bool is_sshd(const char *config)
{
    const char *scratch = getenv("_CONDOR_SCRATCH_DIR");
    char *start = print("%s/.condor_ssh_to_job_", scratch ? scratch : ".");
    if (strncmp(config, start, strlen(start)) != 0)
        return false;
    const char *number = config + strlen(start);
    return isdigit((unsigned char)*number) && strcmp(number + strspn(number, "0123456789"), "/sshd_config") == 0;
}

// HTCondor's own library, with which the server accepts accounts without a shell or an entry in the user database.
// The job can set LD_PRELOAD too: so root alone must be able to change the file and all directories above it.
static char *account_library(void)
{
    const char *said = getenv("LD_PRELOAD");
    char *path = said ? realpath(said, NULL) : NULL, *name = path ? strrchr(path, '/') : NULL;
    if (!name || strcmp(name + 1, GETPWNAM) != 0 || strpbrk(path, " :;$"))
        return NULL;
    char *result = print("LD_PRELOAD=%s", path);
    for (char *end = name + strlen(name); end; end = strrchr(path, '/')) {
        *end = '\0';
        struct stat found;
        if (stat(*path ? path : "/", &found) < 0 || found.st_uid != 0 || found.st_mode & (S_IWGRP | S_IWOTH))
            return NULL;
    }
    return result;
}

// Executes an SSH server that leads only into the VM, for any files that the job has put into that directory.
static _Noreturn void serve(const char *config)
{
    char self[PATH_MAX] = "", *name;
    if (readlink("/proc/self/exe", self, sizeof self - sizeof SSHD_CONFIG) < 0 || !(name = strrchr(self, '/')))
        refuse(SSHD);
    strcpy(name + 1, SSHD_CONFIG);
    char *keys = strndup(config, (size_t)(strrchr(config, '/') - config));
    char *host = print("HostKey=%s/sshkey", keys), *users = print("AuthorizedKeysFile=%s/authorized_keys", keys);
    char *argv[] = {SSHD, "-i", "-e", "-f", self, "-o", host, "-o", users, NULL};
    execve(SSHD, argv, (char *[]){OWN, account_library(), NULL});
    refuse(SSHD);
}

int main(int argc, char **argv)
{
    errno = EINVAL;
    if (argc < 2)
        refuse("a job without a command");
    if (!wants_vm(argv[1])) {
        execve(argv[1], argv + 1, environ);
        refuse(argv[1]);
    }
    if (is_sshd(argv[argc - 1]))
        serve(argv[argc - 1]);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", variables(argv[1]));
    char *words[argc + 2];
    words[0] = EXEC;
    words[1] = path;
    memcpy(words + 2, argv + 1, (size_t)argc * sizeof *argv); // includes the final NULL
    execve(EXEC, words, (char *[]){OWN, NULL});
    refuse(argv[1]);
}
