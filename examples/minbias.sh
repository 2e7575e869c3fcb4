#!/bin/sh
# Generates minimum-bias events with Pythia 8 and counts charged particles.
#
# Wants the steering card card.cmnd (or the one named by the first argument) in its directory.
# Leaves hist-SEED.csv: charged multiplicity within |eta| < 2.5, one bin a line.
set -eu
exec python3 - "${1:-card.cmnd}" <<'PYTHON'
import os
import sys

import numpy as np
import pythia8mc as pythia8

card = sys.argv[1]
seed = 1000 + int(os.environ.get("VMJOBS_ARRAY_INDEX", "0"))

pythia = pythia8.Pythia("", False)
if not pythia.readFile(card):
    sys.exit(f"cannot read the steering card {card}")
pythia.readString("Random:setSeed = on")
pythia.readString(f"Random:seed = {seed}")
if not pythia.init():
    sys.exit("Pythia could not be initialised")

wanted = pythia.mode("Main:numberOfEvents")
counts = []
while len(counts) < wanted:
    if pythia.next():
        event = pythia.event
        counts.append(
            sum(1 for p in event if p.isFinal() and p.isCharged() and abs(p.eta()) < 2.5)
        )

bins = np.arange(0, 305, 5)
heights, _ = np.histogram(np.clip(counts, 0, 304), bins=bins)
name = f"hist-{seed}.csv"
with open(name, "w", encoding="ascii") as out:
    out.write("low,high,events\n")
    for low, high, height in zip(bins[:-1], bins[1:], heights):
        out.write(f"{low},{high},{height}\n")
print(f"{len(counts)} events, seed {seed}, mean charged multiplicity {np.mean(counts):.2f}")
PYTHON
