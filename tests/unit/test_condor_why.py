"""Explanations of where an HTCondor job is and why, from the ads of daemons."""

from __future__ import annotations

from typing import Any

import pytest

from condor.diagnose import daemon_queries
from condor.diagnose.findings import JobLocation
from condor.events.outcomes import AGAIN, OUTCOMES
from tests.kit.condor_daemons import Collector, Daemons, Schedd, daemons, node, queued
from tests.kit.condor_why import codes, explain, rejected
from vmjobs.errors import NotFound, Unavailable

COPIED = {"JobUniverse": "9", "GridResource": '"condor site.grid cm.grid"'}


#: The state by JobStatus, of a job that is not in the queue's history.
STATES = {
    "0": "in an unknown state",
    "1": "idle",
    "2": "running",
    "3": "removed",
    "4": "completed",
    "5": "held",
    "6": "transferring output",
    "7": "suspended",
}


@pytest.mark.parametrize(
    ("code", "attributes", "message"),
    [
        (
            "RUNNING",
            {"JobStatus": "2", "RemoteHost": '"slot1@n1"', "ChirpVMState": '"BOOTING"'},
            "it runs on slot1@n1; its VM is BOOTING",
        ),
        ("RUNNING", {"JobStatus": "2", "ChirpVMNode": '"n1"'}, "it runs on n1"),
        ("TRANSFERRING", {"JobStatus": "6"}, "it has ended"),
        ("SUSPENDED", {"JobStatus": "7"}, "until condor_continue"),
        ("REMOVING", {"JobStatus": "3", "RemoveReason": '"me"'}, "it was removed: me; it leaves"),
        ("COMPLETED", {"JobStatus": "4", "ExitCode": "3"}, "it has ended, with status 3"),
        ("COMPLETED", {"JobStatus": "4", "ExitBySignal": "true", "ExitSignal": "9"}, "by signal 9"),
        ("COMPLETED", {"JobStatus": "4"}, "with an unknown status"),
        ("GONE", {"JobStatus": "0"}, "it has left the queue"),
        (
            "SPOOLING",
            {"JobStatus": "5", "HoldReasonCode": "16", "HoldReason": '"Spooling"'},
            "its input files are on their way",
        ),
        (
            "HELD",
            {"JobStatus": "5", "HoldReasonCode": "1", "HoldReason": '"via condor_hold"'},
            "via condor_hold [HoldReasonCode 1, sub-code 0]",
        ),
        ("HELD", {"JobStatus": "5"}, "no reason given"),
        ("UNIVERSE", {"JobUniverse": "7"}, "universe 7"),
        ("NO_ROUTE", {"JobUniverse": "9"}, "grid_resource is not set"),
        ("NO_ROUTE", {"JobUniverse": "9", "GridResource": '"arc https://x"'}, "arc https://x"),
        ("NOT_SENT", COPIED, "has not sent it to site.grid"),
        (
            "SITE_DOWN",
            {**COPIED, "GridResourceUnavailableTime": "1795228000"},
            "cannot reach the schedd site.grid (collector cm.grid), for 3 min",
        ),
        (
            "SITE_UNREADABLE",
            {**COPIED, "GridJobId": '"condor site.grid cm.grid 7.1"'},
            "as job 7.1; the reason could not be read: collector cm.grid: no answer",
        ),
    ],
)
def test_where_a_job_is(code: str, attributes: dict[str, str], message: str) -> None:
    said = daemons(queued(**attributes))
    found = explain(said)
    state = STATES[attributes.get("JobStatus", "1")]
    assert (found.id, found.state, codes(found)) == ("3.0", state, [code])
    assert message in found.findings[0].message
    assert "explain" not in said.asked


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("code", OUTCOMES)
def test_each_hold_of_ours_has_a_remedy(code: str, remote: bool) -> None:
    outcome = OUTCOMES[code]
    hold = {
        "JobStatus": "5",
        "HoldReasonCode": "3",
        "HoldReasonSubCode": str(outcome.subcode),
        "HoldReason": f'"{code}: so it is; the console\'s last lines: a b c"',
        "NumJobStarts": "5",
        "ChirpVMNode": '"n7"',
    }
    found = explain(daemons(queued(**hold, **(COPIED if remote else {})))).findings[0]
    assert found.code == "HELD"
    assert found.message.startswith(f"{outcome.why} ({code}: so it is)")
    assert f"sub-code {outcome.subcode}]" in found.message
    assert "on n7; condor_q -af HoldReason 3.0 has the console's last lines [" in found.message
    assert "a b c" not in found.message
    assert found.remedy and "{" not in found.remedy
    if outcome.action == AGAIN and not remote and code != "NO_HYPERVISOR":
        assert "VMJobMaxStarts 10" in found.remedy
    if remote:
        assert "condor_qedit" not in found.remedy


def test_a_hold_for_what_has_no_code_of_its_own() -> None:
    hold = {"JobStatus": "5", "HoldReasonCode": "3", "HoldReason": '"UNAUTHENTICATED: no"'}
    found = explain(daemons(queued(**hold, HoldReasonSubCode="199"))).findings[0]
    assert "UNAUTHENTICATED" in found.message and "VMJobMaxStarts" in found.remedy
    found = explain(daemons(queued(**hold, HoldReasonSubCode="77"))).findings[0]
    assert found.remedy.startswith("its own policy")


def test_a_job_whose_vm_had_no_memory_left() -> None:
    reason = '"OUT_OF_MEMORY: the job was killed by signal 9; the machine had no memory left"'
    ended = queued(JobStatus="4", ExitBySignal="true", ExitSignal="9", ChirpVMReason=reason)
    first, second = explain(daemons(ended=[ended])).findings
    assert (first.code, second.code) == ("COMPLETED", "OUT_OF_MEMORY")
    assert second.remedy == "ask for more with request_memory"


def test_jobs_that_have_left_the_queue() -> None:
    said = daemons(ended=[queued(JobStatus="4", ExitCode="0"), queued(4, JobStatus="3")])
    assert codes(explain(said)) == ["COMPLETED"]
    found = explain(said, JobLocation("", "", 4))
    assert (found.state, codes(found)) == ("not in the queue", ["REMOVED"])


def test_a_job_that_nobody_knows_and_a_schedd_that_does_not_answer() -> None:
    with pytest.raises(NotFound, match=r"no job 3\.0"):
        explain(daemons())
    with pytest.raises(NotFound, match="no job 3, "):
        explain(daemons(), JobLocation("", "", 3))
    with pytest.raises(Unavailable, match=r"other\.grid: no answer"):
        explain(daemons(), JobLocation("", "other.grid", 3))


def test_of_a_cluster_the_job_that_waits_is_looked_at() -> None:
    jobs = [
        queued(3, 0, JobStatus="2"),
        queued(3, 1, JobStatus="5"),
        queued(3, 2),
        queued(3, 3),
        queued(4, 0),
    ]
    found = explain(daemons(*jobs, nodes=[node()]), JobLocation("", "", 3))
    assert found.id == "3.2"
    assert found.jobs == {"1": 2, "2": 1, "5": 1}


@pytest.mark.parametrize(
    ("waits", "answer", "message"),
    [
        ("true", "BACKS_OFF", "the next one is in 15 s or later"),
        ("false", "WAITING", "1 node could take it now"),
    ],
)
def test_a_job_that_failed_waits_a_while(waits: str, answer: str, message: str) -> None:
    told = {"VMJobWaits": waits, "ChirpVMTried": "1795228195", "NumJobStarts": "5"}
    told["ChirpVMVacated"] = "2"
    job = queued(ChirpVMOutcome='"again"', **told)
    found = explain(daemons(job, nodes=[node()]))
    assert codes(found) == [answer, "TRIED"]
    assert message in found.findings[0].message


def at_site(*jobs: Any, **ads: Any) -> Daemons:
    sent = queued(3, **COPIED, GridJobId='"condor site.grid cm.grid 7.1"', GlobalJobId='"here#3.0#1"')
    said = daemons(sent)
    said.schedds["site.grid"] = Schedd(jobs)
    said.collectors["cm.grid"] = Collector({"Startd": [node()], **ads})
    return said


def test_a_job_is_followed_to_its_site() -> None:
    found = explain(at_site(queued(7, 1, RequestMemory="9999")))
    assert (found.id, found.state, codes(found)) == ("3.0", "idle", ["TOO_LARGE"])
    assert found.route == ["3.0 at here", "7.1 at site.grid"]
    found = explain(at_site(queued(7, 1, JobStatus="2")))
    assert codes(found) == ["RUNNING"]


def test_a_site_that_says_less() -> None:
    found = explain(at_site())
    assert codes(found) == ["SITE_UNREADABLE"]
    assert "site.grid has no job 7.1" in found.findings[0].message
    alone, gone = at_site(queued(7, 1)), at_site()
    alone.collectors["cm.grid"].silent = frozenset({"Startd"})  # it answers only for its jobs
    del gone.schedds["site.grid"]
    for said, code, route in (
        (alone, "SITE_UNREADABLE", ["3.0 at here", "7.1 at site.grid"]),
        (gone, "NO_ROUTE", ["3.0 at here"]),
    ):
        found = explain(said)
        assert (codes(found), found.route) == ([code], route)


def test_a_job_that_is_sent_round_in_circles() -> None:
    circle = queued(7, 1, **COPIED, GridJobId='"condor site.grid cm.grid 7.1"')
    found = explain(at_site(circle))
    assert codes(found) == ["AT_SITE"]
    assert len(found.route) == 4


ROUTED = {"VMJobPolicy": '"route"', "RoutedToJobId": '"4.0"', "Managed": '"External"'}


def test_a_job_that_a_router_takes_is_followed_by_its_copy() -> None:
    said = at_site(queued(7, 1, RequestMemory="9999"))
    (copy,) = said.schedds[""].jobs
    copy["ClusterId"], copy["GlobalJobId"] = 4, "here#4.0#1"
    said.schedds[""] = Schedd([queued(3, schedd="here", **ROUTED), copy])
    found = explain(said)
    assert (found.id, codes(found)) == ("3.0", ["TOO_LARGE"])
    assert found.route == ["3.0 at here", "4.0 at here", "7.1 at site.grid"]


@pytest.mark.parametrize("more", [{"Managed": ""}, {"Managed": '"Schedd"'}, {"RoutedToJobId": ""}])
def test_a_job_that_no_router_has_taken(more: dict[str, str]) -> None:
    found = explain(daemons(queued(schedd="here", **{**ROUTED, **more})))
    assert codes(found) == ["NOT_ROUTED"]
    assert "the job router at here" in found.findings[0].message


def test_a_routed_job_that_is_held_is_not_released_at_once() -> None:
    held = {**ROUTED, "JobStatus": "5", "HoldReasonCode": "3", "HoldReasonSubCode": "101"}
    (finding,) = explain(daemons(queued(**held))).findings
    assert "condor_release 3.0" in finding.remedy and "wait until the job router" in finding.remedy
    (finding,) = explain(daemons(queued(**{**held, "Managed": '"Schedd"'}))).findings
    assert "wait until" not in finding.remedy


def test_a_copy_that_is_not_there_or_the_job_itself() -> None:
    found = explain(daemons(queued(**ROUTED)))
    assert codes(found) == ["SITE_UNREADABLE"]
    found = explain(daemons(queued(**{**ROUTED, "RoutedToJobId": '"3.0"'})))
    assert codes(found) == ["AT_SITE"]


def test_an_ad_that_is_too_long_is_not_looked_at() -> None:
    found = explain(daemons(queued(Long='"' + "x" * 2_000_000 + '"'), nodes=[node()]))
    assert codes(found) == ["UNREAD"]


@pytest.mark.parametrize("odd", ['real("INF")', 'real("NaN")', "{1}", "error", '"8192"', "true", "A"])
def test_numbers_that_are_none_are_no_trouble(odd: str) -> None:
    wish = dict.fromkeys(
        ("RequestMemory", "RequestCpus", "NumJobStarts", "ServerTime", "LastMatchTime"), odd
    )
    slot = {"TotalSlotMemory": odd, "Cpus": odd, "Start": "false"}
    assert explain(daemons(queued(**wish), nodes=[node(**slot), node("n2")])).findings


def test_what_is_no_ad_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        daemon_queries.explain(None, None, "[ a = ")


def test_words_of_others_are_bounded_and_on_one_line() -> None:
    odd = '"\\033]0;yours\\007\\n' + "x" * 9000 + '"'
    for attributes in (
        {"JobStatus": "5", "HoldReason": odd},
        {"JobStatus": "3", "RemoveReason": odd},
        {"JobStatus": "2", "RemoteHost": odd},
        {"JobUniverse": "9", "GridResource": odd},
        rejected(odd),
    ):
        found = explain(daemons(queued(**attributes), nodes=[node()]))
        message = found.findings[0].message
        assert message.isprintable() and len(message) < 3000
