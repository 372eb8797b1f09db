"""The exchange benchmark without its cluster: workloads, sizes, limits, streaming twins, and what becomes of the figures."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import allreduce  # noqa: E402
import allreduce_grid  # noqa: E402
import allreduce_report  # noqa: E402
import allreduce_workers  # noqa: E402
import min_numel  # noqa: E402
import pages  # noqa: E402
import plan as plan_benchmark  # noqa: E402
from allreduce import grid, parse  # noqa: E402
from allreduce_grid import BASELINE, IDEAL, ROWS, WORKLOADS, Key, entries  # noqa: E402
from cluster import HEADERS  # noqa: E402

from hvd_quant import get_compressor, wire  # noqa: E402
from hvd_quant.compressors import TensorInfo  # noqa: E402
from hvd_quant.exchange import cost  # noqa: E402

CODES = [get_compressor(code) for code in allreduce_grid.CODES]
each_code = pytest.mark.parametrize("compressor", CODES, ids=lambda c: c.name)
WHOLE = TensorInfo.whole("w", (300, 300), world=2)
each_range = pytest.mark.parametrize("info", [WHOLE, WHOLE.part(49152, 90000), WHOLE.part(0, 16384)], ids=lambda i: str(i.range))


# ------------------------------------------------------------------------------------------------------------ workloads

def test_resnet50_is_resnet50():
    shapes = WORKLOADS["resnet50"]
    assert len(shapes) == 161 and entries("resnet50") == 25_557_032
    convolutions = [shape for shape in shapes if len(shape) == 4]
    assert len(convolutions) == 53 and shapes[0] == (64, 3, 7, 7) and shapes[-2:] == [(1000, 2048), (1000,)]
    assert convolutions.count((512, 512, 3, 3)) == 3 and convolutions.count((2048, 1024, 1, 1)) == 1


def test_transformer_is_pytorchs():
    with torch.device("meta"):  # which has its own norm at the end of encoder and decoder, and projects q, k, v together
        theirs = sum(p.numel() for p in torch.nn.Transformer(512, 8, 6, 6, 2048, batch_first=True).parameters()) - 2 * 2 * 512
    assert entries("transformer") == 60_522_496 == theirs + 32000 * 512


# ----------------------------------------------------------------------------------------------------------------- grid

def test_the_default_grid_has_what_is_compared():
    keys = grid(parse(["run", "--list"]))
    everything = grid(parse(["run", "--list", "--all"]))
    assert len(set(everything)) == len(everything) == 3 * 3 * len(WORKLOADS) * len(ROWS)
    assert set(keys) < set(everything)
    assert {key[:3] for key in keys} >= {(4, rate, workload) for rate in ("1gbit", "10gbit") for workload in WORKLOADS}
    assert {key[:3] for key in keys} >= {(n, rate, "4096x4096") for n in (2, 4, 8) for rate in allreduce_grid.RATES}
    assert {key for key in keys if key.row.startswith(("fp16:", "bf16:"))} >= {
        Key(n, "1gbit", "4096x4096", f"{code}:exchange={exchange}")
        for n in (4, 8) for code in ("fp16", "bf16") for exchange in ("allgather", "sra")}
    # What everything is compared with, and the choice between exchanges, are wherever something else is.
    for row in (BASELINE, "auto:onebit", "auto:adaptive", "auto:topk"):
        assert {key[:3] for key in keys} == {key[:3] for key in keys if key.row == row}


def test_the_default_grid_takes_less_than_an_hour(capsys, monkeypatch):
    def minutes(*options):
        monkeypatch.setattr(sys, "argv", ["allreduce.py", "run", "--list", *options])
        allreduce.main()
        *_, points, minutes, _ = capsys.readouterr().out.splitlines()[-2].split("│")
        assert int(points) == len(grid(parse(["run", "--list", *options])))
        return float(minutes)

    assert 20 < minutes() < 60 < minutes("--all")


def test_time_is_told_by_what_is_similar():
    points = [point(Key(4, "1gbit", "64x64", "topk"), 0.01), point(Key(4, "1gbit", "1024x1024", "topk"), 0.1),
              point(Key(8, "10gbit", "1024x1024", "topk"), 0.3), point(Key(4, "1gbit", "1024x1024", "onebit"), 7.0)]
    for workers, rate, workload, seconds in ((4, "10gbit", "1024x1024", 0.1), (8, "1gbit", "2048x2048", 1.2),
                                             (2, "1gbit", "1024x1024", 0.05), (4, "1gbit", "128x128", 0.04)):
        assert allreduce.likely(Key(workers, rate, workload, "topk"), points) == pytest.approx(seconds)


@pytest.mark.parametrize("one, count", [(0.001, 50), (0.1, 10), (0.5, 5), (1.9, 5), (2.1, 3), (60.0, 3)])
def test_slow_points_are_repeated_less(one, count):
    assert allreduce.iterations(1.0, one) == count


def test_patterns_choose():
    keys = grid(parse(["run", "--json", "x", "--workers", "2", "--rates", "1gbit", "--workloads", "4096*", "--rows", "topk*"]))
    assert keys == [Key(2, "1gbit", "4096x4096", row) for row in ("topk:exchange=allgather", "topk:exchange=sra")]


@pytest.mark.parametrize("arguments, sentence", [
    (["--list", "--rates", "fast"], "the rate is 'fast'"), (["--list", "--rows", "lookfor"], "no point of the grid matches"),
    ([], "give --json FILE")])
def test_arguments_are_checked(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        parse(["run", *arguments])
    assert sentence in capsys.readouterr().err


def test_rows_of_a_version_to_come_are_left_out():
    assert allreduce_workers.unavailable("sorcery:exchange=allgather").startswith("there is no compressor 'sorcery'")
    assert allreduce_workers.unavailable("topk:exchange=telepathy").startswith("topk: exchange='telepathy' is not accepted")
    for row in (BASELINE, allreduce_grid.POWERSGD, "none", "onebit:exchange=allgather", IDEAL + "topk:exchange=allgather",
                *(row for row in ROWS if row.startswith("DDP"))):
        assert allreduce_workers.unavailable(row) is None


# ------------------------------------------------------------------------------------------------------ streaming twins

@each_code
@each_range
def test_a_twin_sends_payloads_that_are_accepted(compressor, info):
    twin = allreduce_workers.streaming(compressor)
    grad, residual = torch.randn(info.numel), torch.zeros(info.numel)
    params = twin.measure(ops, grad, {"residual": residual}, info)
    payloads = [twin.encode(ops, grad, {"residual": residual}, params, info) for _ in range(2)]
    assert torch.equal(residual, grad + grad)  # one pass an encode
    real = compressor.encode(ops, grad, {"residual": residual}, compressor.measure(ops, grad, {"residual": residual}, info), info)
    for payload in wire.split(torch.cat(payloads), 2):
        assert payload.shape == real.shape == (compressor.payload_bytes(info),)
        header = wire.parse_header(wire.host_bytes(payload[:wire.HEADER_BYTES]), payload.numel(), compressor.name, info.numel)
        assert header.flags == 0
    assert not compressor.decode_sum(ops, payloads, info).any()  # the checksum fits too


@each_code
def test_a_twin_stays_in_its_range(compressor):
    info = WHOLE.part(16384, 49152)
    twin = allreduce_workers.streaming(compressor)
    grad, room, residuals = torch.ones(WHOLE.numel), torch.ones(WHOLE.numel), torch.ones(WHOLE.numel)
    mine = slice(*info.range)
    payload = twin.encode(ops, grad[mine], {"residual": residuals[mine]}, None, info)
    for decode in (twin.decode_sum, twin.decode_mean):
        room.fill_(1.0)
        assert decode(ops, [payload], info, room[mine]).data_ptr() == room[mine].data_ptr()
        assert not room[mine].any() and room.sum() == WHOLE.numel - info.numel
        assert decode(ops, [payload], info).shape == (info.numel,)
    assert grad.sum() == WHOLE.numel and residuals.sum() == WHOLE.numel + info.numel


def test_only_residuals_are_streamed():
    with pytest.raises(ValueError, match="fp16 keeps no residual"):
        allreduce_workers.streaming(get_compressor("fp16"))


# -------------------------------------------------------------------------------------------------------------- figures

def test_gradients_differ_between_iterations_and_workers():
    def written(seed, iteration):
        gradients = [torch.empty(4, 8), torch.empty(7)]
        allreduce_workers.Pool(39, seed).write(gradients, iteration)
        return torch.cat([g.view(-1) for g in gradients])

    first = written(0, 0)
    assert torch.equal(first, written(0, 0))
    for other in (written(0, 1), written(1, 0)):
        assert not (first == other).any()


def test_ddp_is_handed_gradients_without_a_copy():
    model, clock = allreduce_workers.Model([(3, 4), (5,)]), []
    allreduce_workers.Pool(17, 0).write(model.gradients, 0)
    model(clock).backward()
    assert [p.grad.data_ptr() for p in model.weights] == [g.data_ptr() for g in model.gradients] and len(clock) == 1


def test_the_slowest_worker_makes_the_time():
    def samples(*times, encode=1.0):
        return [{"seconds": t, "encode_seconds": encode} for t in times]

    figures = allreduce.summary(list(zip(samples(1, 5, 2, 1), samples(2, 1, 9, 3, encode=3.0))))
    assert figures["seconds"] == 4 and figures["iterations"] == 4  # of 2 5 9 3
    assert figures["encode_seconds"] == 2
    assert 2 <= figures["quartiles"][0] < 4 < figures["quartiles"][1] <= 9


def point(key, seconds, **more):
    return {**key._asdict(), "seconds": seconds, "quartiles": [0.9 * seconds, 1.1 * seconds], "link_bytes": 1e6, "load": 0.5,
            "memory": {"encode": 12e9, "decode": 8e9}, **more}


def test_the_limit_is_wire_and_two_passes():
    coded = {"wire_bytes": 1e6, "encode_bytes": 12e6, "decode_bytes": 4e6}
    passes = 0.001 + 0.0005
    assert allreduce_report.limit(point(Key(4, "1gbit", "x", "topk"), 1, **coded)) == pytest.approx(0.008 * HEADERS + passes)
    assert allreduce_report.limit(point(Key(4, "unlimited", "x", "topk"), 1, **coded)) == pytest.approx(passes)
    seen = point(Key(4, "1gbit", "x", allreduce_grid.POWERSGD), 1)
    assert allreduce_report.limit(seen) == pytest.approx(0.008 * HEADERS)


def test_calculated_bytes():
    """Of 4096 x 4096 onebit: 8 bytes a block of 2048, a bit an entry, and a header."""
    payload = 32 + 2**24 // 2048 * 8 + 2**24 // 8
    assert allreduce_report.exchanged_bytes("onebit:exchange=allgather", 2**24, 4) == 3 * payload
    assert allreduce_report.exchanged_bytes("onebit:exchange=sra", 2**24, 4) == 2 * 3 * ((payload - 32) / 4 + 32)
    few = get_compressor("threshold:tau=6").payload_bytes(TensorInfo.whole("", (2**24,)))
    assert allreduce_report.exchanged_bytes("threshold:tau=6,exchange=allgather", 2**24, 2) == few


@pytest.mark.parametrize("value, text", [(0, "0.00"), (0.0071, "0.007"), (0.126, "0.13"), (9.996, "10.0"), (99.96, "100"),
                                         (1234.5, "1,234")])
def test_digits(value, text):
    assert allreduce_report.digits(value) == text


# --------------------------------------------------------------------------------------------------- files and report

ROW = "topk:exchange=allgather"
TIMES = {BASELINE: 1.0, "DDP fp32": 2.0, ROW: 0.25, IDEAL + ROW: 0.125}


@pytest.fixture
def results():
    parts = {"encode_seconds": 0.05, "wait_seconds": 0.1, "decode_seconds": 0.02, "wire_bytes": 1e6}
    points = [point(Key(workers, rate, workload, row), seconds, **(parts if "topk" in row else {}))
              for workers in (2, 4) for rate in ("10gbit", "1gbit", "unlimited") for workload in ("64x64", "4096x4096")
              for row, seconds in TIMES.items()]
    return {"settings": {"seconds": 1.0, "controller": "gloo"}, "machine": allreduce.machine(), "points": points}


def test_what_is_saved_is_read_and_resumed(tmp_path, results, monkeypatch):
    path = tmp_path / "figures.json"
    allreduce.save(results, path)
    assert json.loads(path.read_text()) == results and list(tmp_path.iterdir()) == [path]
    resumed = allreduce.begin(path, True, results["settings"])
    assert resumed == results
    keys = [Key(2, "1gbit", "64x64", ROW), Key(8, "1gbit", "64x64", ROW), Key(2, "1gbit", "128x128", ROW)]
    assert allreduce.missing(keys, resumed["points"]) == keys[1:]
    assert allreduce.begin(tmp_path / "other.json", False, results["settings"])["points"] == []
    with pytest.raises(ValueError, match="exists: give --resume"):
        allreduce.begin(path, False, results["settings"])
    with pytest.raises(ValueError, match="other settings: seconds is 1.0 there and 2.0 here"):
        allreduce.begin(path, True, {**results["settings"], "seconds": 2.0})
    monkeypatch.setattr(allreduce, "machine", lambda: {**results["machine"], "cores": 77})
    with pytest.raises(ValueError, match="other machine: cores is"):
        allreduce.begin(path, True, results["settings"])


def test_the_report_replaces_what_is_between_the_marks(tmp_path, results):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path, page = tmp_path / "figures.json", tmp_path / "README.md"
    path.write_text(json.dumps(results))
    page.write_text(f"# before\n{allreduce_report.BEGIN}\nold\n{pages.END}\nafter\n")
    for _ in range(2):  # the second time, over its own report
        allreduce_report.report(path, page)
    text = page.read_text()
    assert text.startswith("# before\n") and text.endswith(f"{pages.END}\nafter\n") and "\nold\n" not in text
    lines = text.splitlines()
    titles = [line for line in lines if line.startswith("### ")]
    assert titles[:3] == ["### 2 workers, 1gbit", "### 2 workers, 10gbit", "### 2 workers, unlimited"] and len(titles) == 12
    cells = [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {ROW} ")).strip("|").split("|")]
    assert cells == [ROW, "250 (4.00)", "250 (4.00)"]
    detail = lines[lines.index("### 4096x4096, 4 workers, 1gbit, in detail"):]
    cells = [cell.strip() for cell in next(line for line in detail if line.startswith(f"| {ROW} ")).strip("|").split("|")]
    assert cells[1:9] == ["250", "225 … 275", "4.00", "50.0", "100", "20.0", "8.36", "125"]
    for image in ("speedup.png", "breakdown.png", "bytes.png"):
        assert f"]({image})" in text and (tmp_path / image).read_bytes().startswith(b"\x89PNG")


def test_a_code_takes_turns_in_all_its_ways():
    keys = [Key(4, "1gbit", "64x64", row) for row in (BASELINE, "topk:exchange=sra", "DDP fp32", "auto:topk", IDEAL + ROW, "none")]
    other = Key(4, "10gbit", "64x64", ROW)
    assert allreduce_grid.contests_of([*keys, other]) == [
        [keys[0]], [keys[1], keys[3], keys[4]], [keys[2]], [keys[5]], [other]]


@pytest.mark.parametrize("seconds, longer, cross", [(0.0115, "+15 %", ""), (0.0121, "+21 %", "✗"), (0.009, "-10 %", "")])
def test_what_auto_chose_is_compared_with_the_fastest(seconds, longer, cross):
    points = {key: point(key, ms / 1e3, exchanges={"sra": 1}) for key, ms in (
        (Key(4, "1gbit", "64x64", BASELINE), 90), (Key(4, "1gbit", "64x64", "topk:exchange=sra"), 10), (Key(4, "1gbit", "64x64", ROW), 11))}
    auto = Key(4, "1gbit", "64x64", "auto:topk")
    points[auto] = point(auto, seconds, exchanges={"allgather": 1, "dense": 0})
    [row] = zip(*(column.cells for column in allreduce_report.choices(points).columns))
    assert row[1:3] == ("topk", "sra") and row[4] == "1 allgather" and (row[6], row[8]) == (longer, cross)


def test_a_report_needs_marks_and_points(tmp_path, results):
    path, page = tmp_path / "figures.json", tmp_path / "README.md"
    path.write_text(json.dumps(results))
    page.write_text(f"{allreduce_report.BEGIN}\nthe end is missing\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        allreduce_report.report(path, page)
    path.write_text(json.dumps({**results, "points": []}))
    page.write_text(f"{allreduce_report.BEGIN}\n{pages.END}\n")
    with pytest.raises(ValueError, match="has no points"):
        allreduce_report.report(path, page)
    assert page.read_text() == f"{allreduce_report.BEGIN}\n{pages.END}\n"


def test_the_page_has_its_marks():
    text = (allreduce.FIGURES.parent / "README.md").read_text()
    assert text.count(allreduce_report.BEGIN) == text.count(pages.END) == 1


# ------------------------------------------------------------------------------------------------------------ min_numel

def test_rounds_of_min_numel_become_medians():
    keys = [Key(4, rate, "resnet50", "topk:min_numel=1024") for rate in ("1gbit", "10gbit")]
    rounds = {key: [point(key, factor * seconds, wire_bytes=2e6, exchanges={kind: 76, "dense": 85})
                    for seconds, kind in ((0.3, "sra"), (0.1, "allgather"), (0.2, "sra"))] for key, factor in zip(keys, (1, 9))}
    table = min_numel.table("1gbit", rounds)
    assert [list(column.cells) for column in table.columns] == [
        ["topk:min_numel=1024"], ["76 of 161"], ["allgather, sra"], ["2.00"], ["200"], ["100 … 300"]]


def test_the_parts_of_powersgd_make_up_its_time():
    torch = pytest.importorskip("torch")
    powersgd = pytest.importorskip("powersgd", exc_type=ImportError)
    compressor, info = powersgd.Compression.powersgd(rank=2), powersgd.TensorInfo.whole("w", (300, 200), world=1)
    state = {key: torch.zeros(shape) for key, shape in compressor.state_shapes(info).items()}
    grad, timed = torch.randn(info.numel), powersgd.Timed()
    given = grad.clone()
    whole = powersgd.step(timed, compressor, grad, state, info)
    assert all(timed.seconds.values()) and sum(timed.seconds.values()) <= whole
    torch.testing.assert_close(grad + state["residual"], given, rtol=0, atol=1e-4)


def test_the_table_of_schemes(tmp_path):
    schemes = pytest.importorskip("schemes", exc_type=ImportError)
    tests = [{"step": 100, "accuracy": 0.9, "wire_bytes": 5}, {"step": 200, "accuracy": 0.976, "wire_bytes": 10}]
    runs = [{"row": row, "seed": seed, "epochs": 4, "accuracy": 0.97 + 0.001 * seed, "wire_bytes": 10, "dense_bytes": 40,
             "tests": tests[:1 + (row == "none")]} for row in ("topk", "none") for seed in (1, 2, 3)]
    assert schemes.report(runs).splitlines()[2:] == [
        "| `none` | 97.20 % | 97.10 … 97.30 |  |  | 200 |", "| `topk` | 97.20 % | 97.10 … 97.30 | +0.00 | 4.0 × | – |"]
    page = tmp_path / "README.md"
    page.write_text(f"before\n{schemes.BEGIN}\nold\n{pages.END}\nafter\n")
    (tmp_path / "mnist.json").write_text(json.dumps({"runs": runs}))
    schemes.main(["report", str(tmp_path / "mnist.json"), "--page", str(page)])
    assert page.read_text() == f"before\n{schemes.BEGIN}\n\n{schemes.report(runs)}\n\n{pages.END}\nafter\n"
    left = schemes.missing(schemes.ROWS[:2], [1, 4], 4, [{**run, "row": "none"} for run in runs])
    assert [(row.name, seed) for row, seed in left] == [("fp16", 1), ("none", 4), ("fp16", 4)]


def test_the_committed_table_is_that_of_the_committed_runs():
    schemes = pytest.importorskip("schemes", exc_type=ImportError)
    folder = Path(schemes.__file__).parents[1] / "docs" / "schemes"
    assert f"{schemes.BEGIN}\n\n{schemes.report(schemes.load(folder / 'mnist.json'))}\n\n{pages.END}" in (folder / "README.md").read_text()


def test_every_compressor_and_scheme_has_a_row():
    schemes = pytest.importorskip("schemes", exc_type=ImportError)
    from hvd_quant import get_compressor, list_compressors
    from hvd_quant.registry import compressor_class
    specs = [get_compressor(spec) for row in schemes.ROWS
             for spec in (row.spec.values() if isinstance(row.spec, dict) else [row.spec])]
    assert {spec.name for spec in specs} >= {name for name in list_compressors() if compressor_class(name).__module__.startswith("hvd_quant.")}
    assert {spec.merge for spec in specs} == {"none", "sum", "replace", "error"} and any(spec.momentum for spec in specs)
    assert any(row.every for row in schemes.ROWS) and any(row.outer for row in schemes.ROWS)


# ----------------------------------------------------------------------------------------------------- plan's predictions

def test_predictions_are_compared_with_what_they_are_of(tmp_path):
    costs = cost.typical(4)
    spec = "onebit:exchange=sra"
    infos = [TensorInfo.whole("w", (1024, 1024), world=4)]
    seconds = {BASELINE: costs.exchange(get_compressor("none"), infos), spec: costs.exchange(get_compressor(spec), infos)}
    points = [point(Key(4, "1gbit", "1024x1024", BASELINE), seconds[BASELINE]),
              point(Key(4, "1gbit", "1024x1024", spec), 2 * seconds[spec]),
              *(point(Key(4, "1gbit", "1024x1024", row), 1.0) for row in (IDEAL + spec, "DDP fp32", "Horovod fp16")),
              point(Key(2, "1gbit", "1024x1024", spec), 1.0)]  # a place that was not measured
    assert plan_benchmark.places(points) == [(4, "1gbit"), (2, "1gbit")]
    checked = plan_benchmark.check(points, {(4, "1gbit"): costs})
    assert [ratio for _, ratio in checked] == [pytest.approx(1.0), pytest.approx(0.5)]
    rows = plan_benchmark.summary(checked)
    assert rows == [("4", "1gbit", "more", "2", "1 (50%)", "0.75"), ("all", "", "", "2", "1 (50%)", "0.75")]
    page = tmp_path / "plan.md"
    page.write_text(f"before\n{plan_benchmark.BEGIN}\nold\n{pages.END}\nafter\n")
    for _ in range(2):
        plan_benchmark.write({"Title": rows}, page)
    text = page.read_text()
    assert text.startswith("before\n<!--") and text.endswith("<!-- up to here -->\nafter\n") and "old" not in text
    assert text.count("| 4 | 1gbit | more | 2 | 1 (50%) | 0.75 |") == 1
    assert all(plan_benchmark.PAGE.read_text().count(mark) == 1 for mark in (plan_benchmark.BEGIN, pages.END))
