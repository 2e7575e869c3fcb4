# shellcheck shell=sh
files=$((BENCH_SCALE * 10))
for number in $(seq "$files"); do
    cat >"part$number.c" <<END
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
double part$number(double x)
{
    char text[64];
    snprintf(text, sizeof text, "%f", sqrt(x) + $number);
    return strtod(text, NULL) + strlen(text);
}
END
done
{
    echo "int main(void) { return 0; }"
} >main.c
printf 'all: %s main.o\n\tcc -o all $^ -lm\n' "$(seq -f 'part%g.o' -s ' ' "$files")" >Makefile
began=$(date +%s%N)
make CFLAGS=-O2 >&2
took=$((($(date +%s%N) - began) / 1000000))
figure build "$((took / 1000)).$(printf '%03d' $((took % 1000)))"
