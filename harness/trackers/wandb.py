"""Weights & Biases: one wandb run per rank, grouped by run; offline unless the user is logged in.

Rank k of run r is the wandb run `<r>-rank<k>` in group `<r>`. Its history has a row per step, with
the column `step` and a series `<arm>/<phase>/<metric>` for each number recorded; rank 0 has the
claims as a table and the verdict in its summary. Texts (digests) stay in the records. Everything
wandb writes is in the run directory; `wandb sync` uploads an offline run later.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from harness.errors import PrerequisiteError, did_you_mean
from harness.plan import Layout
from harness.scenario import Finding, Scenario
from harness.tables import Tables
from harness.trackers import TrackerError
from harness.verdict import Verdict, strict

MODES = ("auto", "offline", "online")
OPTIONS = ("mode", "project", "entity", "group", "tags", "repeats")
FOREIGN = "wandb" in sys.modules
"""True if somebody else in this process uses wandb: its service is then theirs to stop."""
INIT_TIMEOUT_S = 30.0
"""After so many seconds without an answer from the server the run stays untracked."""
SERVER = "https://api.wandb.ai"
CLAIMS = (
    "claim", "kind", "text", "expects", "outcome", "effect", "floor", "multiple", "unit", "reason",
)  # fmt: skip
"""Columns of the table of claims."""


def check(options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the options, one sentence each."""
    wrong = [
        f"tracker.{name} is not an option of wandb{did_you_mean(name, OPTIONS)}; "
        f"legal: {', '.join(OPTIONS)}"
        for name in options
        if name not in OPTIONS
    ]
    mode = options.get("mode", "auto")
    if mode not in MODES:
        wrong.append(
            f"tracker.mode={mode!r} is not legal{did_you_mean(str(mode), MODES)}; "
            f"legal: {', '.join(MODES)}"
        )
    for name in ("project", "entity", "group"):
        if not isinstance(options.get(name), str | None):
            wrong.append(f"tracker.{name}={options[name]!r} is not a text")
    tags = options.get("tags") or []
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
        wrong.append(f"tracker.tags={tags!r} is not a list of texts: type tracker.tags=[a,b]")
    if not isinstance(options.get("repeats", False), bool):
        wrong.append(f"tracker.repeats={options['repeats']!r} is neither true nor false")
    return wrong


def publish(
    options: Mapping[str, Any],
    layout: Layout,
    scenario: Scenario,
    tables: Tables,
    verdict: Verdict,
    config: Mapping[str, Any],
) -> str:
    """Write one wandb run per rank and return one line that says where they are.

    Raises:
        PrerequisiteError: if wandb is not installed.
        TrackerError: if wandb failed, for example because its server cannot be reached.
    """
    mode = _mode(options)
    plan = tables.plan
    with _surroundings(layout, mode):
        wandb = _import()
        place = ""
        try:
            for rank in range(plan.world_size):
                run = wandb.init(
                    project=options.get("project") or "crossrank",
                    entity=options.get("entity"),
                    group=options.get("group") or plan.run_id,
                    job_type=plan.scenario,
                    id=f"{plan.run_id}-rank{rank}",
                    name=f"{plan.scenario} rank {rank}",
                    tags=[plan.scenario, *(options.get("tags") or [])],
                    config={**strict(config), "run": plan.run_id, "rank": rank},
                    dir=layout.root,
                    mode=mode,
                    reinit="create_new",
                    settings=wandb.Settings(
                        console="off",
                        silent=True,
                        init_timeout=INIT_TIMEOUT_S,
                        login_timeout=INIT_TIMEOUT_S,
                        disable_git=True,
                        disable_code=True,
                        x_disable_stats=True,
                    ),
                )
                place = run.url or ""
                run.define_metric("*", step_metric="step")
                for row in _history(tables, rank, repeats=bool(options.get("repeats"))):
                    run.log(row)
                if rank == 0:
                    run.log(
                        {
                            "claims": wandb.Table(
                                columns=list(CLAIMS), data=_claims(scenario, verdict)
                            )
                        }
                    )
                    run.summary["conclusion"] = verdict.conclusion.value
                    run.summary["headline"] = verdict.headline
                run.finish(exit_code=1 if verdict.failures else 0)
        except Exception as error:
            # Its errors have no base in common: its own, TimeoutError, pydantic's, the system's.
            raise TrackerError(
                f"wandb ({mode}) did not take run {plan.run_id}: {error}\n"
                "the records are complete without it; type tracker.mode=offline to write them "
                "for a later `wandb sync`"
            ) from error
    if mode == "online":
        return f"wandb: {place.rsplit('/runs/', 1)[0]}, group {plan.run_id}"
    return f"wandb (offline): upload with `wandb sync {layout.tracker('wandb')}/offline-run-*`"


def _history(tables: Tables, rank: int, *, repeats: bool) -> Iterator[dict[str, Any]]:
    """Yield one row per step, in order, with every number the rank recorded in any arm."""
    steps: dict[int, dict[str, Any]] = {}
    for arm, of, row in tables.rows():
        if of != rank or (row.repeat and not repeats):
            continue
        parts = [arm, f"repeat{row.repeat}" if row.repeat else "", row.phase]
        prefix = "/".join(part for part in parts if part)
        cells = steps.setdefault(row.step, {"step": row.step})
        for name, value in row.metrics.items():
            if isinstance(value, int | float):
                cells[f"{prefix}/{name}"] = value
    for step in sorted(steps):
        yield steps[step]


def _claims(scenario: Scenario, verdict: Verdict) -> list[list[Any]]:
    return [
        [
            claim.name,
            claim.kind.value,
            claim.text,
            claim.expects.value,
            *_finding(verdict.findings.get(claim.name)),
        ]
        for claim in scenario.claims
    ]


def _finding(finding: Finding | None) -> list[Any]:
    if finding is None:
        return ["unknown", None, None, None, "", "the run was not judged"]
    numbers = [finding.effect, finding.floor, finding.multiple]
    return [finding.outcome.value, *numbers, finding.unit, finding.reason]


def _mode(options: Mapping[str, Any]) -> str:
    """Return offline or online; `auto` is what WANDB_MODE says, else whether there is a login."""
    mode = options.get("mode", "auto")
    if mode != "auto":
        return str(mode)
    return os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")


def _logged_in() -> bool:
    """Say whether wandb would find a login, without asking wandb, which might ask the user."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or SERVER).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


@contextlib.contextmanager
def _surroundings(layout: Layout, mode: str) -> Iterator[None]:
    """Keep what wandb writes in the run directory, and leave no process of it behind."""
    own = layout.tracker("wandb")
    settings = {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": str(own / "cache"),
        "WANDB_DATA_DIR": str(own / "cache"),
    }
    if mode != "online":
        # Online, the user's own settings may say which server and entity are meant.
        settings["WANDB_CONFIG_DIR"] = str(own / "cache")
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if not FOREIGN and (module := sys.modules.get("wandb")):
            module.teardown()


def _import() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise PrerequisiteError(
            "tracker=wandb needs wandb, which is not installed\ntype: pip install wandb"
        ) from error
    return wandb
