# shellcheck shell=sh disable=SC2154
cat >measure.py <<'END'
import os
import time
import urllib.request

import uproot

SECONDS = int(os.environ["BENCH_SECONDS"])
URL = f"http://{os.environ['BENCH_ADDRESS']}:{os.environ['BENCH_PORTS'].split()[0]}/events.root"


def measure(name, place):
    seen, began = 0, time.monotonic()
    while time.monotonic() < began + SECONDS:
        with uproot.open({place: "events"}, handler=uproot.HTTPSource if place == URL else None) as tree:
            seen += sum(len(part["x"]) for part in tree.iterate(["x", "y", "z", "energy"], library="np"))
    print("figure", name, seen / (time.monotonic() - began))


urllib.request.urlretrieve(URL, "events.root")
measure("local", "events.root")
measure("http", URL)
END
python3 measure.py
