"""`hvd-quant bench exchange` on the workers of a launch, whatever the framework."""

import json

from click.testing import CliRunner

from hvd_quant.cli import bench, main
from hvd_quant.exchange import cost


def what_bench_finds(monkeypatch, tmp_path, rank, world, linear):
    """What it measures of onebit and of a linear code, briefly, checked but for ``measured_seconds``; worker 0 alone says and saves
    something. ``plan`` predicts by what was saved."""
    monkeypatch.setattr(bench, "SAMPLE", 2**14)
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(cost, "_SIZES", [2**10, 2**12])
    done = _run("bench", "exchange", "--json", "--shape", "100x100", "-c", "onebit", "-c", linear, "--save", str(tmp_path / "n.json"))
    assert done.exit_code == 0, done.output
    if rank != 0:
        assert done.output == "" and not list(tmp_path.iterdir())
        return []
    found = json.loads(done.output)
    assert [one["spec"] for one in found["exchanges"]] == ["onebit:exchange=allgather", "onebit:exchange=sra", f"{linear}:exchange=allreduce"]
    assert all(one["exchange_seconds"] > 0 for one in found["exchanges"])
    assert set(found["costs"]["rates"]) >= {"none", "fp16", "onebit", linear}
    planned = _run("plan", "--shapes", "100x100", "--workers", str(world), "-c", "onebit", "--json", "--calibration", found["saved"])
    expected = {one["spec"]: one["exchange_seconds"] for one in found["exchanges"]}
    assert {one["spec"]: one["exchange_seconds"] for one in json.loads(planned.output)["predictions"] if one["spec"] in expected} == {
        spec: seconds for spec, seconds in expected.items() if spec.startswith("onebit")}
    return found["exchanges"]


def _run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)
