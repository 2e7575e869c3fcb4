// What programs pay to the kernel they run on: prints a line for each thing, its name and its seconds.

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

// A quarter of a circle by random numbers, as event generators spend their time: no call of the kernel.
static void compute(void)
{
    uint64_t state = 88172645463325252u;
    volatile double sum = 0;
    for (int i = 0; i < 60 * 1000 * 1000; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum += sqrt((double)(state >> 11) / 9007199254740992.0);
    }
}

static void child(const char *self, int computes)
{
    pid_t pid = fork();
    if (pid < 0)
        exit(1);
    if (pid == 0) {
        if (computes)
            compute();
        else if (self)
            execl(self, self, "nothing", (char *)NULL);
        _exit(0);
    }
}

static void measure(const char *name, int count, const char *self, int computes)
{
    double began = now();
    for (int i = 0; i < count; i++) {
        child(self, computes);
        if (!computes)
            wait(NULL);
    }
    while (wait(NULL) > 0)
        ;
    printf("%s %.9f\n", name, (now() - began) / (computes ? 1 : count));
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    double began = now();
    for (int i = 0; i < 50000; i++)
        syscall(SYS_getppid);
    printf("system call %.9f\n", (now() - began) / 50000);
    measure("fork", 200, NULL, 0);
    measure("exec", 200, argv[0], 0);
    measure("compute", 1, NULL, 1);
    measure("two processes", 2, NULL, 1);
}
