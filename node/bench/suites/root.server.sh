# shellcheck shell=sh disable=SC2086,SC2154
set -eu
set -- $BENCH_PORTS
mkdir files
python3 - <<END >&2
import numpy
import uproot

names = ("x", "y", "z", "energy")
with uproot.recreate("files/events.root") as file:
    file.mktree("events", dict.fromkeys(names, "float32"))
    for _ in range(10):
        parts = numpy.random.default_rng(1).normal(size=(4, $BENCH_SCALE * 20000)).astype("float32")
        file["events"].extend(dict(zip(names, parts)))
END
cat >nginx.conf <<END
worker_processes 1;
pid $PWD/nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path $PWD/body;
    proxy_temp_path $PWD/proxy;
    fastcgi_temp_path $PWD/fastcgi;
    uwsgi_temp_path $PWD/uwsgi;
    scgi_temp_path $PWD/scgi;
    server { listen $BENCH_ADDRESS:$1; root $PWD/files; }
}
END
nginx -c "$PWD/nginx.conf" >&2
echo ready
exec sleep infinity
