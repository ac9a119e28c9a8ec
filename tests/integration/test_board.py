"""`whale board`: on this machine only, read only, nothing outside of the run folder, and runs that are
being written.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whale.report.board import make_server
from whale.report.run_data import MOST_POINTS

PARTS = {"compute_s": 0.1, "communication_s": 0.2, "bubble_s": 0.3, "total_s": 0.6}


def line(step: int, **values: Any) -> str:
    record = {"step": step, "time": 100.0 + step, "loss": 1.0 / (1 + step), "samples_per_s": 10.0}
    return json.dumps(record | PARTS | {"memory_bytes": 5} | values) + "\n"


def write_run(folder: Path, num_steps: int, num_ranks: int = 2) -> Path:
    (folder / "metrics").mkdir(parents=True)
    for rank in range(num_ranks):
        text = "".join(line(step) for step in range(num_steps))
        (folder / "metrics" / f"rank_{rank:05d}.jsonl").write_text(text)
    return folder


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    write_run(tmp_path / "runs" / "first", 3)
    server = make_server(tmp_path / "runs", "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(5)


def ask(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def run_of(port: int, name: str) -> dict[str, Any]:
    status, text = ask(port, f"/run/{name}")
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_and_its_data(port: int, tmp_path: Path) -> None:
    status, page = ask(port, "/")
    assert status == 200 and "<title>Whale runs</title>" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
    (tmp_path / "runs" / "first" / "checkpoints" / "step_00000002").mkdir(parents=True)
    found = run_of(port, "first")
    assert found["curves"]["loss"] == [[0, 1.0], [1, 0.5], [2, 1 / 3]]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["bubble_s"] == 0.3
    assert found["checkpoints"] == ["step_00000002"]
    assert not found["has_plan"]


def test_runs_are_newest_first_and_new_ones_appear(port: int, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "second", 9)
    names = [run["name"] for run in json.loads(ask(port, "/runs")[1])]
    assert names == ["second", "first"]


def test_a_run_that_is_being_written(port: int, tmp_path: Path) -> None:
    """Torn lines, damaged ones, and numbers that JSON does not have are left out; what comes later
    is shown; a file that begins anew is read anew.
    """
    path = tmp_path / "runs" / "first" / "metrics" / "rank_00000.jsonl"
    whole = line(3)
    with path.open("a") as file:
        file.write("[1, 2]\nnull\nnot JSON\n" + line(9, loss=float("nan")) + whole[:20])
    assert [point[0] for point in run_of(port, "first")["curves"]["loss"]] == [0, 1, 2]
    with path.open("a") as file:
        file.write(whole[20:])
    assert [point[0] for point in run_of(port, "first")["curves"]["loss"]] == [0, 1, 2, 3]
    path.write_text(line(0))
    assert [point[0] for point in run_of(port, "first")["curves"]["loss"]] == [0]
    path.unlink()
    assert [rank["rank"] for rank in run_of(port, "first")["ranks"]] == [1]


def test_a_run_that_ended_well_is_finished(port: int, tmp_path: Path) -> None:
    assert not run_of(port, "first")["is_finished"]
    finished = tmp_path / "runs" / "first" / "metrics" / "finished.json"
    finished.write_text('{"step": 2, "ti')  # torn
    assert not run_of(port, "first")["is_finished"]
    elsewhere = tmp_path / "finished.json"
    elsewhere.write_text('{"step": 2, "time": 102.0}')
    finished.unlink()
    finished.symlink_to(elsewhere)
    assert not run_of(port, "first")["is_finished"]
    finished.unlink()
    finished.write_text(elsewhere.read_text())
    assert run_of(port, "first")["is_finished"]
    page = ask(port, "/")[1]
    assert '`${run.is_finished ? "finished, " : ""}step ' in page


def test_long_curves_are_thinned_out(port: int, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "long", 5 * MOST_POINTS + 1)
    points = run_of(port, "long")["curves"]["loss"]
    assert len(points) <= MOST_POINTS
    assert points[-1][0] == 5 * MOST_POINTS


@pytest.mark.parametrize(
    "path",
    [
        "/run/..",
        "/run/../secret",
        "/run/%2e%2e%2fsecret",
        "/run//etc",
        "/run/first/../../secret",
        "/run/linked",
        "/plan/..%2f..%2fetc%2fpasswd",
        "/plan/first",
        "/../../etc/passwd",
        "/etc/passwd",
        "/runs/../../secret/metrics/rank_00000.jsonl?x",
        "/run/first%00",
    ],
)
def test_nothing_outside_of_the_folder_is_served(port: int, tmp_path: Path, path: str) -> None:
    secret = write_run(tmp_path / "secret", 1)
    (secret / "plan.json").write_text("a secret")
    (tmp_path / "runs" / "linked").symlink_to(secret)
    (tmp_path / "runs" / "first" / "plan.json").symlink_to(secret / "plan.json")
    (tmp_path / "runs" / "first" / "metrics" / "rank_00007.jsonl").symlink_to(
        secret / "metrics" / "rank_00000.jsonl"
    )
    status, text = ask(port, path)
    assert "secret" not in text and "root:" not in text
    assert status == 404 or path.startswith("/runs")
    assert [rank["rank"] for rank in run_of(port, "first")["ranks"]] == [0, 1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_it_is_read_only(port: int, method: str) -> None:
    assert ask(port, "/runs", method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "10.0.0.1"])
def test_names_of_other_machines_are_refused(port: int, host: str) -> None:
    """Else a page elsewhere could read it through the user's own browser."""
    assert ask(port, "/runs", host=host)[0] == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.com", "::"])
def test_it_listens_on_this_machine_only(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match=f"--host {host}: whale board shows runs to this machine"):
        make_server(tmp_path, host, 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_all_names_of_this_machine_are_taken(tmp_path: Path, host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with make_server(tmp_path, host, 0) as server:
        assert server.server_address[1] > 0


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is no folder"):
        make_server(tmp_path / "nothing", "127.0.0.1", 0)
    with (
        make_server(tmp_path, "127.0.0.1", 0) as taken,
        pytest.raises(ValueError, match="cannot be opened"),
    ):
        make_server(tmp_path, "127.0.0.1", taken.server_address[1])
