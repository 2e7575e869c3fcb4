# shellcheck shell=sh
mkdir files
head -c 1024 /dev/urandom >files/small
head -c 1048576 /dev/urandom >files/large
chmod -R a+rX /job/work 2>/dev/null || :
cat >nginx.conf <<END
user root;
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
    server { listen 127.0.0.1:8080; root $PWD/files; }
}
END
nginx -c "$PWD/nginx.conf" >&2
for size in small large; do
    figure $size "$(ab -q -c 4 -t "$BENCH_SECONDS" -n 10000000 http://127.0.0.1:8080/$size | awk '/^Requests per second/ { print $4 }')"
done
kill "$(cat nginx.pid)"
