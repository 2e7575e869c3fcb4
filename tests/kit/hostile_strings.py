"""Strings that would mean more than themselves to HTCondor, a shell or a file format."""

from __future__ import annotations

HOSTILE = [
    "$(HOME)",
    "$$(Machine)",
    "$$([ 1 + 1 ])",
    "$ENV(PATH)",
    "$F(vmjobs_id)",
    "$RANDOM_CHOICE(1,2)",
    'a" + Owner + "b',
    "a\\",
    'a\\" || true || \\"',
    "a\nqueue 1000\n",
    "a\r\n+VMJobsOwner = root",
    "@=end",
    "a\x00b",
    "a\x1fb",
    "; rm -rf /",
    'it\'s "quoted"',
    "ünïcödé \u2028 line",
    "\ud800",
    "x" * 5000,
]
