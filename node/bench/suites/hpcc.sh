# shellcheck shell=sh
size=$((BENCH_SCALE * 300))
cat >hpccinf.txt <<END
HPLinpack benchmark input file
none
HPL.out
8
1
$size
1
80
0
1
1
2
16.0
1
2
1
4
1
2
1
1
1
1
1
0
2
64
0
0
1
8
0
0
0
0
END
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
mpirun --oversubscribe -np 2 --mca btl self,vader --mca btl_vader_single_copy_mechanism none hpcc >&2
# value NAME FACTOR: prints a value of the summary.
value() {
    awk -F= -v name="$1" -v factor="$2" '$1 == name { printf "%.6f\n", $2 * factor }' hpccoutf.txt
}
figure hpl "$(value HPL_Tflops 1000)"
figure stream "$(value SingleSTREAM_Triad 1)"
figure ptrans "$(value PTRANS_GBs 1)"
figure latency "$(value AvgPingPongLatency_usec 1)"
figure bandwidth "$(value AvgPingPongBandwidth_GBytes 1)"
