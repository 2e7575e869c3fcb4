# shellcheck shell=sh
figure primes "$(sysbench cpu --threads=1 --time="$BENCH_SECONDS" run | awk '/events per second/ { print $4 }')"
figure pythia "$(python3 - $((BENCH_SCALE * 100)) <<'END'
import sys
import time

import pythia8mc

pythia = pythia8mc.Pythia("", False)
for setting in ("Print:quiet = on", "Beams:eCM = 13000.", "SoftQCD:inelastic = on", "Random:setSeed = on"):
    assert pythia.readString(setting)
assert pythia.init()
events = int(sys.argv[1])
began = time.monotonic()
for _ in range(events):
    pythia.next()
print(f"{events / (time.monotonic() - began):.3f}")
END
)"
