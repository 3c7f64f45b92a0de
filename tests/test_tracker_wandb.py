"""The wandb tracker: an offline run file holds every rank's series, the claims and the config."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import record, trackers
from harness.errors import PrerequisiteError, UsageError
from harness.plan import ArmPlan, Layout, Plan, write_text
from harness.scenario import Arm, Claim, Kind, Outcome, Role, Scenario, holds, unknown
from harness.tables import Tables
from harness.trackers import TrackerError
from harness.trackers import wandb as tracker
from harness.verdict import Verdict, decide

pytest.importorskip("wandb", reason="wandb is not installed")

ROOT = Path(__file__).parents[1]
STEPS = 150
"""So many that rank 0's file is longer than one block of its log."""
CLAIM = Claim(
    name="drift",
    kind=Kind.SYMPTOM,
    text="The ranks drift apart.",
    expects=Outcome.HOLDS,
    judge=lambda tables: holds("By 3 floors.", effect=1.5, floor=0.5, unit="relative L2"),
)
HANGS = Claim(
    name="hangs",
    kind=Kind.COST,
    text="It hangs.",
    expects=Outcome.REFUTED,
    judge=lambda tables: unknown("Nobody waited."),
)
SCENARIO = Scenario(
    title="Ranks drift",
    family="testing",
    cause="none",
    claims=[CLAIM, HANGS],
    arms=[Arm(name=name, role=Role.FAULTY, about="") for name in ("faulty", "fixed")],
    params=object,
    run=lambda rank, arm, params: None,
    headline=lambda findings: "They drift.",
)
CONFIG = {"scenario": "drift", "seed": 3, "params": {"lr": 0.1, "names": ["a"], "bound": math.inf}}


def loss(arm: str, rank: int, step: int) -> float:
    """Return values with all digits, and among them those that a JSON writer gets wrong."""
    special = [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 2.0**53 + 2, -0.0]
    if arm == "faulty" and step < len(special):
        return special[step]
    return (step + 1) / (rank + 3) + (arm == "fixed")


def make(root: Path, *, killed: int | None = None) -> tuple[Layout, Tables, Verdict]:
    layout = Layout(root)
    plan = Plan(
        run_id="r1",
        scenario="drift",
        params={},
        arms=tuple(
            ArmPlan(name=arm, ranks=2, repeats=2, isolated=False) for arm in ("faulty", "fixed")
        ),
        world_size=2,
        device="cpu",
        backend="gloo",
        seed=0,
        engine="warm",
        collective_timeout_s=1.0,
        arm_timeout_s=1.0,
    )
    write_text(layout.plan, plan.to_json())
    for arm in ("faulty", "fixed"):
        for rank in range(2):
            header = record.Header(run="r1", scenario="drift", arm=arm, rank=rank, world_size=2)
            writer = record.Writer(layout, header)
            for step in range(STEPS):
                metrics = {"loss": loss(arm, rank, step), "w.digest": f"{step:04x}"}
                writer.write(metrics, repeat=0, step=step, phase="after_step")
                writer.write({"n": step, "ok": True, "no": None}, repeat=0, step=step)
                writer.write({"loss": 7.0}, repeat=1, step=step)
                if rank == killed and step == 4:
                    break
            writer.close()
    tables = Tables.read(layout)
    return layout, tables, decide(SCENARIO, "drift", tables)


def offline(
    layout: Layout, tables: Tables, verdict: Verdict, **options: Any
) -> dict[int, list[Any]]:
    """Publish offline and return the records of each rank's run file."""
    options = {"mode": "offline", **options}
    said = trackers.publish("wandb", options, layout, SCENARIO, tables, verdict, CONFIG)
    assert f"wandb sync {layout.root}/wandb/offline-run-*" in said
    files = {
        rank: list(layout.root.glob(f"wandb/offline-run-*-r1-rank{rank}/run-r1-rank{rank}.wandb"))
        for rank in range(2)
    }
    assert all(len(found) == 1 for found in files.values())
    return {rank: list(run_records(found[0])) for rank, found in files.items()}


def run_records(path: Path) -> Iterator[Any]:
    """Yield the records of a wandb run file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    full, first, middle, last = 1, 2, 3, 4
    data = path.read_bytes()
    assert struct.unpack("<4sH", data[:6]) == (b":W&B", 0xBEE1)
    at, parts = 7, []
    while at < len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        body = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + body) == crc
        assert len(body) == length
        assert kind in ((middle, last) if parts else (full, first))
        at += 7 + length
        parts.append(body)
        if kind in (full, last):
            got = wandb_internal_pb2.Record()
            got.ParseFromString(b"".join(parts))
            parts = []
            yield got
    assert not parts


def cells(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of series; the table of claims has one of its own."""
    rows = [cells(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    return [row for row in rows if "claims/_type" not in row]


def config(records: list[Any]) -> dict[str, Any]:
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    return cells(run.config.update)


def same(got: Any, want: float) -> bool:
    return got == want or (isinstance(got, float) and math.isnan(got) and math.isnan(want))


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    """Nobody's home: no login, no settings, and a place where strays would be found."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NETRC", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(home)
    # Here nobody else's runs are open, whichever test imported wandb first.
    monkeypatch.setattr(tracker, "FOREIGN", False)
    return home


def test_an_offline_run_holds_every_series_of_every_rank_exactly(tmp_path):
    for rank, records in offline(*make(tmp_path / "r1")).items():
        rows = history(records)
        assert [row["step"] for row in rows] == list(range(STEPS))
        for step, row in enumerate(rows):
            for arm in ("faulty", "fixed"):
                assert same(row[f"{arm}/after_step/loss"], loss(arm, rank, step))
                assert (row[f"{arm}/n"], row[f"{arm}/ok"]) == (step, True)
            assert {name for name in row if not name.startswith("_")} == {
                "step",
                *(f"{arm}/{name}" for arm in ("faulty", "fixed")
                  for name in ("after_step/loss", "n", "ok")),
            }  # fmt: skip
        assert sum(len(str(r)) for r in records) > 32768


def test_the_runs_of_the_ranks_are_one_group_with_the_config(tmp_path):
    for rank, records in offline(
        *make(tmp_path / "r1"), project="p", entity="team", tags=["night"]
    ).items():
        (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.run_group, run.job_type) == (f"r1-rank{rank}", "r1", "drift")
        assert (run.project, run.entity, list(run.tags)) == ("p", "team", ["drift", "night"])
        got = config(records)
        assert (got["run"], got["rank"], got["scenario"], got["seed"]) == ("r1", rank, "drift", 3)
        assert got["params"] == {"lr": 0.1, "names": ["a"], "bound": "inf"}
        (metric,) = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
        assert (metric.glob_name, metric.step_metric) == ("*", "step")
        (ended,) = [r.exit for r in records if r.WhichOneof("record_type") == "exit"]
        assert ended.exit_code == 0


def test_rank_0_has_the_claims_as_a_table_and_the_verdict_in_its_summary(tmp_path):
    layout, tables, verdict = make(tmp_path / "r1")
    runs = offline(layout, tables, verdict)
    (table,) = layout.root.glob("wandb/offline-run-*-r1-rank0/files/media/table/claims_*.json")
    assert not list(layout.root.glob("wandb/offline-run-*-r1-rank1/files/media"))
    data = json.loads(table.read_text())
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["data"]]
    assert rows == [
        {
            "claim": "drift", "kind": "symptom", "text": "The ranks drift apart.",
            "expects": "holds", "outcome": "holds", "effect": 1.5, "floor": 0.5, "multiple": 3.0,
            "unit": "relative L2", "reason": "By 3 floors.",
        },
        {
            "claim": "hangs", "kind": "cost", "text": "It hangs.", "expects": "refuted",
            "outcome": "unknown", "effect": None, "floor": None, "multiple": None, "unit": "",
            "reason": "Nobody waited.",
        },
    ]  # fmt: skip
    summary: dict[str, Any] = {}
    for r in runs[0]:
        if r.WhichOneof("record_type") == "summary":
            summary |= cells(r.summary.update)
    assert (summary["conclusion"], summary["headline"]) == ("inconclusive", "They drift.")
    assert summary["claims/_type"] == "table-file"
    assert table.name == Path(summary["claims/path"]).name


def test_repeats_are_published_when_asked_for(tmp_path):
    for records in offline(*make(tmp_path / "r1"), repeats=True).values():
        assert {row["faulty/repeat1/loss"] for row in history(records)} == {7.0}


def test_a_killed_rank_is_published_up_to_its_last_record_and_a_failed_run_is_marked(tmp_path):
    layout, tables, verdict = make(tmp_path / "r1", killed=1)
    verdict = decide(SCENARIO, "drift", tables, ["rank 1 was killed"])
    runs = offline(layout, tables, verdict)
    assert [len(history(runs[rank])) for rank in range(2)] == [STEPS, 5]
    for records in runs.values():
        (ended,) = [r.exit for r in records if r.WhichOneof("record_type") == "exit"]
        assert ended.exit_code == 1


def test_nothing_is_written_outside_the_run_nothing_stays_behind_and_twice_works(
    tmp_path, stranger
):
    before = dict(os.environ)
    for name in ("a", "b"):
        offline(*make(tmp_path / name))
    assert list(stranger.rglob("*")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "home"]
    assert dict(os.environ) == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not [line for line in left if b"wandb" in line]


def test_a_server_that_is_not_there_is_an_error_that_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(tracker, "INIT_TIMEOUT_S", 1.0)
    layout, tables, verdict = make(tmp_path / "r1")
    with pytest.raises(TrackerError, match=r"(?s)wandb \(online\) .*r1.*tracker\.mode=offline"):
        trackers.publish("wandb", {}, layout, SCENARIO, tables, verdict, CONFIG)


@pytest.mark.parametrize(
    ("options", "environment", "mode"),
    [
        ({}, {}, "offline"),
        ({"mode": "auto"}, {"WANDB_API_KEY": "k"}, "online"),
        ({"mode": "auto"}, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"mode": "offline"}, {"WANDB_API_KEY": "k"}, "offline"),
        ({"mode": "online"}, {"WANDB_MODE": "offline"}, "online"),
    ],
)
def test_the_mode_is_what_the_config_says_then_the_environment_then_the_login(
    monkeypatch, options, environment, mode
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracker._mode(options) == mode


def test_a_login_in_netrc_counts_for_its_own_server_only(stranger, monkeypatch):
    (stranger / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (stranger / ".netrc").chmod(0o600)
    assert tracker._mode({}) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert tracker._mode({}) == "offline"
    (stranger / ".netrc").write_text("nonsense")
    assert tracker._mode({}) == "offline"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "ofline"}, "tracker.mode='ofline' is not legal; nearest: offline"),
        ({"projekt": "p"}, "tracker.projekt is not an option of wandb; nearest: project"),
        ({"tags": "a"}, "tracker.tags='a' is not a list"),
        ({"entity": 3}, "tracker.entity=3 is not a text"),
        ({"repeats": 2}, "tracker.repeats=2 is neither true nor false"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(tmp_path, options, says):
    (wrong,) = trackers.check("wandb", options)
    assert wrong.startswith(says)
    layout, tables, verdict = make(tmp_path / "r1")
    with pytest.raises(UsageError) as raised:
        trackers.publish("wandb", options, layout, SCENARIO, tables, verdict, CONFIG)
    assert str(raised.value) == wrong
    assert not (layout.root / "wandb").exists()


def test_the_configuration_files_hold_legal_options():
    from omegaconf import OmegaConf

    for name in trackers.TRACKERS:
        options = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/tracker/{name}.yaml"))
        assert isinstance(options, Mapping)
        assert trackers.check(name, options) == []
    assert sorted(path.stem for path in (ROOT / "conf/tracker").iterdir()) == sorted(
        trackers.TRACKERS
    )


def test_an_unknown_tracker_names_the_legal_ones():
    with pytest.raises(UsageError, match=r"tracker=wandbb .*nearest: wandb\nlegal: none, wandb"):
        trackers.check("wandbb", {})


def test_without_a_tracker_nothing_is_said_or_written(tmp_path):
    layout, tables, verdict = make(tmp_path / "r1")
    assert trackers.publish("none", {}, layout, SCENARIO, tables, verdict, CONFIG) == ""
    assert sorted(path.name for path in layout.root.iterdir()) == ["plan.json", "records"]
    assert trackers.check("none", {"mode": "x"}) == [
        "tracker.mode means nothing under tracker=none"
    ]


def test_without_wandb_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    layout, tables, verdict = make(tmp_path / "r1")
    with pytest.raises(PrerequisiteError, match="pip install wandb"):
        trackers.publish("wandb", {}, layout, SCENARIO, tables, verdict, CONFIG)


def test_choosing_and_checking_a_tracker_imports_no_wandb():
    code = (
        "import sys\n"
        "from harness import trackers\n"
        "trackers.check('wandb', {})\n"
        "assert 'wandb' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
