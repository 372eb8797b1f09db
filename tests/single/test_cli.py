"""The commands `hvd-quant list`, `show`, `plan` and `bench`, as users meet them."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hvd_quant import TensorInfo, get_compressor, list_compressors, registry
from hvd_quant.cli import compressors, main
from hvd_quant.cli import plan as command
from hvd_quant.exchange import cost, plan

OWN = '''
import dataclasses
from hvd_quant import Compressor, register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Compressor):
    """Every other entry.

    Source: nobody.

    Arguments:
        offset: the first one.
    """

    name = "mine"
    offset: int

    def payload_bytes(self, info):
        return 32 + 2 * info.numel
'''

MODELS = '''
from types import SimpleNamespace as S

def variable(path, *shape):
    return S(path=path, name=path, shape=shape, requires_grad=path != "frozen")

class Torch:
    def named_parameters(self):
        return [(v.path, v) for v in (variable("w", 1000, 300), variable("frozen", 10), variable("b", 10))]

def keras():
    return S(built=True, trainable_variables=[variable("dense/kernel", 1000, 300), variable("dense/bias", 10)])

def unbuilt():
    return S(built=False, trainable_variables=[])

def nothing():
    return 7

def fails():
    raise RuntimeError("no data here")

empty = S(named_parameters=lambda: [])
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory, with another cache, and with what is imported from there forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def found(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


@pytest.mark.parametrize("name", [*main.commands, "bench kernels", "bench exchange"])
def test_every_command_has_help_with_examples_and_json(name):
    said = run(*name.split(), "--help")
    if name != "bench":
        assert "Examples:\n    h" in said
    if name != "bench":
        assert "--json" in said and "Exit codes: 0" in said


def test_the_commands():
    assert sorted(main.commands) == ["bench", "build-horovod", "doctor", "list", "plan", "show"]
    assert "No such command 'lst'" in run("lst", code=2)


def test_no_framework_is_imported_until_it_is_needed():
    code = "import sys, hvd_quant.cli; print({'torch', 'tensorflow', 'horovod'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# -------------------------------------------------------------------------------------------------------- list and show

def test_all_compressors_are_listed_with_sizes():
    listed = {one["name"]: one for one in found("list", "--shape", "1000x300")}
    assert list(listed) == list_compressors()
    info = TensorInfo.whole("", (1000, 300), world=2)
    for spec in ("onebit", "topk", "threshold:tau=2", "fp16", "powersgd"):
        one = get_compressor(spec)
        assert listed[one.name]["payload_bytes"] == (one.summed_bytes(info) if one.linear else one.payload_bytes(info))
    assert listed["none"]["ratio"] == 1 and listed["none"]["state_bytes"] == 0 and listed["topk"]["state_bytes"] == 4 * 300_000
    assert "Aji, Heafield 2017" in listed["topk"]["paper"]
    assert all(name in run("list") for name in listed)


@pytest.mark.parametrize("name", list_compressors())
def test_every_knob_is_described(name):
    one = found("show", name)
    assert one["name"] == name and one["summary"] and [knob["name"] for knob in one["knobs"] if not knob["help"]] == []
    assert not any(mark in json.dumps(one) for mark in ("``", ":class:", "\\\\|"))


def test_a_spec_is_shown_with_what_it_changes():
    one = found("show", "topk:ratio=0.001,warmup=5", "--numel", 10**6)
    values = {knob["name"]: (knob["value"], knob["default"], knob["common"]) for knob in one["knobs"]}
    assert values["ratio"] == (0.001, 0.01, False) and values["warmup"] == (5, 0, True)
    assert one["spec"] == "topk:warmup=5,ratio=0.001" and one["sizes"]["dense_bytes"] == 4 * 10**6
    assert one["sizes"]["payload_bytes"] == get_compressor("topk:ratio=0.001").payload_bytes(TensorInfo.whole("", (10**6,)))
    said = run("show", "topk:ratio=0.001")
    assert 'compression="topk:ratio=0.001"' in said and "the fraction of entries" in said and "Source: Aji" in said
    assert found("show", "auto:onebit")["spec"] == "onebit:only_if_faster=true"


def test_what_has_to_be_given_is_named():
    one = found("show", "threshold")
    assert one["spec"] == "threshold:tau=VALUE"
    assert [knob["name"] for knob in one["knobs"] if knob["default"] is None] == ["tau"]


def test_ones_own_compressor_is_shown(folder):
    (folder / "mine.py").write_text(OWN)
    one = found("show", "mine", "--import", "mine", "--shape", "10x10")
    assert one["sizes"]["payload_bytes"] == 232 and one["paper"] == "nobody." and one["summary"] == "Every other entry."
    assert one["spec"] == "mine:offset=VALUE" and {"offset": "the first one."}.items() <= {k["name"]: k["help"] for k in one["knobs"]}.items()
    assert "mine" in [other["name"] for other in found("list", "--import", "mine")]


@pytest.mark.parametrize("arguments, said", [
    (["show", "topkk"], "there is no compressor 'topkk', did you mean 'topk'?"),
    (["show", "topk:ratoi=1"], "topk has no knob 'ratoi', did you mean 'ratio'?"),
    (["show", "topk:ratio=2"], "ratio"),
    (["show", "topk", "--shape", "1024y512"], "'1024y512' is no shape: write dimensions with an x between them"),
    (["show", "topk", "--shape", "0x5"], "'0x5' is no shape"),
    (["show", "topk", "--shape", "5", "--numel", "5"], "give --shape or --numel, not both"),
    (["list", "--import", "nowhere_at_all"], "nowhere_at_all can't be imported: ModuleNotFoundError"),
    (["plan", "--workers", "4", "--rate", "1gbit"], "give the model as --model, --shapes or --file, one of them"),
    (["plan", "--shapes", "5", "--rate", "1gbit"], "Missing option '--workers'"),
    (["plan", "--shapes", "5", "--workers", "1", "--rate", "1gbit"], "1 is not in the range x>=2"),
    (["plan", "--shapes", "5,x", "--workers", "4", "--rate", "1gbit"], "--shapes: 'x' is no shape"),
    (["plan", "--shapes", "5", "--workers", "4", "--rate", "fast"], "the rate is 'fast', expected tc's syntax"),
    (["plan", "--shapes", "5", "--workers", "4", "--rate", "unlimited"], "expected that of a link, as 10gbit"),
    (["plan", "--shapes", "5", "--workers", "4"], "give --rate, such as 1gbit, or measure: horovodrun -np 4"),
    (["plan", "--shapes", "5", "--workers", "4", "--rate", "1gbit", "-c", "topkk"], "did you mean 'topk'?"),
    (["plan", "--model", "models", "--workers", "4", "--rate", "1gbit"], "expected module:function"),
    (["plan", "--model", "nowhere:f", "--workers", "4", "--rate", "1gbit"], "nowhere can't be imported: ModuleNotFoundError"),
    (["plan", "--model", "broken:f", "--workers", "4", "--rate", "1gbit"], "broken can't be imported: ZeroDivisionError: division by zero"),
    (["plan", "--model", "models:resnet", "--workers", "4", "--rate", "1gbit"], "models has no resnet"),
    (["plan", "--model", "models:fails", "--workers", "4", "--rate", "1gbit"], "models:fails() failed: RuntimeError: no data here"),
    (["plan", "--model", "models:nothing", "--workers", "4", "--rate", "1gbit"], "gave a int; a torch.nn.Module or a Keras model"),
    (["plan", "--model", "models:unbuilt", "--workers", "4", "--rate", "1gbit"], "gave a model that isn't built"),
    (["plan", "--model", "models:empty", "--workers", "4", "--rate", "1gbit"], "the model has no parameters"),
    (["plan", "--file", "shapes.txt", "--workers", "4", "--rate", "1gbit"], "shapes.txt:3: 'twelve' is no shape"),
    (["plan", "--shapes", "5", "--workers", "4", "--calibration", "shapes.txt"], "shapes.txt can't be read"),
    (["plan", "--shapes", "5", "--workers", "4", "--calibration", "three.json"], "was measured between 3 workers, and --workers is 4"),
    (["bench", "kernels", "--rounds", "1"], "1 is not in the range x>=2"),
])
def test_what_is_wrong_is_said_with_what_to_do(arguments, said, folder):
    (folder / "models.py").write_text(MODELS)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "shapes.txt").write_text("a 5x5\n\ntwelve\n")
    command.save_calibration(network(3), 3, folder / "three.json")
    assert said in " ".join(run(*arguments, code=2).split())


# ----------------------------------------------------------------------------------------------------------------- plan

def network(world, second_per_byte=8e-9, latency=1e-3, rate=1e-10):
    """Collectives that take as long as their bytes, and codes that take next to nothing."""
    rates = cost.Rates(rate, rate, rate)
    return dataclasses.replace(cost.typical(world, 8 / second_per_byte),
                               rates={cost.key_of(c): rates for c in [*command.everything(), get_compressor("threshold:tau=1")]})


@pytest.fixture
def measured(monkeypatch):
    """Codes that take a nanosecond an entry on this machine."""
    rates = cost.Rates(1e-9, 1e-9, 1e-9)
    monkeypatch.setattr(command.timing, "here", lambda: SimpleNamespace(name="PyTorch", can=lambda compressor: True))
    monkeypatch.setattr(command.timing, "all_rates", lambda compressors, backend, world: {cost.key_of(c): rates for c in compressors})


GIVEN = [["--model", "models:Torch"], ["--model", "models:keras"], ["--shapes", "1000x300, 10"], ["--file", "shapes.txt"]]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: " ".join(given))
def test_a_model_is_planned_for_however_it_is_given(given, folder, measured):
    (folder / "models.py").write_text(MODELS)
    (folder / "shapes.txt").write_text("# a model\nw 1000x300\n10   # its bias\n")
    one = found("plan", *given, "--workers", 4, "--rate", "1gbit", "-c", "onebit", "-c", "fp16")
    assert (one["tensors"], one["entries"]) == (2, 300_010)
    specs = {prediction["spec"] for prediction in one["predictions"]}
    assert specs == {"none", "fp16:exchange=allreduce", "onebit:exchange=allgather", "onebit:exchange=sra"}
    assert one["recommended"] == one["predictions"][0]["spec"] == "onebit:exchange=allgather"
    assert "codes as they run here in PyTorch" in one["basis"]


def test_all_compressors_are_compared(measured):
    one = found("plan", "--shapes", "4096x4096", "--workers", 8, "--rate", "100mbit")
    names = {prediction["spec"].partition(":")[0] for prediction in one["predictions"]}
    assert names == set(list_compressors()) - {"threshold"}  # which needs to be told its tau


@pytest.mark.parametrize("framework, code, trained", [
    ("torch", "m = torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.BatchNorm1d(1000)); m[0].bias.requires_grad = False",
     [("0.weight", (1000, 300)), ("1.weight", (1000,)), ("1.bias", (1000,))]),
    ("keras", "m = keras.Sequential([keras.layers.Input((300,)), keras.layers.Dense(1000, name='d'), keras.layers.BatchNormalization(name='n')])",
     [("d/kernel", (300, 1000)), ("d/bias", (1000,)), ("n/gamma", (1000,)), ("n/beta", (1000,))])])
def test_what_a_real_model_trains(framework, code, trained, folder):
    pytest.importorskip(framework)
    (folder / "real.py").write_text(f"import {framework}\n\ndef make():\n    {code}\n    return m\n")
    found_in = command.shapes_of_model("real:make")
    assert [(name.removeprefix("sequential/"), shape) for name, shape in found_in] == trained


def test_the_plan_is_the_one_that_auto_makes(measured):
    """Both add up what cost.Costs says of what travels together."""
    costs, infos = network(8), [TensorInfo.whole("w", (3000, 1000), world=8), TensorInfo.whole("b", (1000,), world=8)]
    whole = plan.predict(get_compressor("onebit"), infos, costs)
    decided = cost.decide(get_compressor("onebit"), infos[:1], costs)
    dense = costs.exchange(get_compressor("none"), infos[1:])
    assert whole.exchange_seconds == pytest.approx(costs.exchange(decided, infos[:1]) + dense)
    assert whole.exchange_seconds == min(plan.predict(way, infos, costs).exchange_seconds for way in cost.ways(get_compressor("onebit")))


def test_tensors_of_the_same_name_count_each():
    info, costs = TensorInfo.whole("w", (1000, 1000), world=4), network(4)
    one, two = (plan.predict(get_compressor("onebit:exchange=sra"), [info] * n, costs) for n in (1, 2))
    assert two.sent_bytes == 2 * one.sent_bytes and two.exchange_seconds > one.exchange_seconds


def test_the_network_is_what_was_stated(measured):
    arguments = ["plan", "--shapes", "4096x4096", "--workers", 4, "-c", "none"]
    slow, fast = (found(*arguments, "--rate", rate)["predictions"][0] for rate in ("1gbit", "10gbit"))
    assert slow["sent_bytes"] == fast["sent_bytes"] == 2 * 3 / 4 * 4 * 4096**2
    assert slow["exchange_seconds"] == pytest.approx(slow["sent_bytes"] * 8e-9, rel=0.01)
    assert fast["exchange_seconds"] == pytest.approx(fast["sent_bytes"] * 8e-10, rel=0.05)


def test_or_it_is_what_was_measured_last(folder):
    costs = network(4, second_per_byte=3e-8)
    command.save_calibration(costs, 4, command.calibration_path(4))
    command.save_calibration(network(4, second_per_byte=1e-9), 4, folder / "other.json")
    arguments = ["plan", "--shapes", "4096x4096", "--workers", 4, "-c", "none"]
    one = found(*arguments)
    assert one["predictions"][0]["exchange_seconds"] == costs.collective("allreduce", 4 * 4096**2)
    assert str(command.calibration_path(4)) in one["basis"]
    assert found(*arguments, "--calibration", "other.json")["predictions"][0]["exchange_seconds"] < 0.2
    assert "give --rate or --calibration, not both" in run(*arguments, "--rate", "1gbit", "--calibration", "other.json", code=2)


def test_figures_survive_a_file():
    costs = network(4)
    assert cost.Costs.of(json.loads(json.dumps(costs.as_dict()))) == costs
    for damaged in ({}, [], {**costs.as_dict(), "collectives": {}}, {**costs.as_dict(), "rates": {"topk": {"encode": 1}}}):
        with pytest.raises(ValueError, match="no costs of exchanges"):
            cost.Costs.of(damaged)


@pytest.mark.parametrize("rate, backward, worth", [("100mbit", 0, True), ("100gbit", 0, False), ("1gbit", 100, False), ("1gbit", 0.1, True)])
def test_compression_is_recommended_where_it_is_worth_it(rate, backward, worth, measured):
    arguments = ["plan", "--shapes", ",".join(["1024x1024"] * 60), "--workers", 4, "--rate", rate, "--backward", backward]
    one = found(*arguments)
    none = next(other for other in one["predictions"] if other["spec"] == "none")
    assert (one["recommended"] != "none") == worth == (one["predictions"][0]["step_seconds"] < 0.9 * none["step_seconds"])
    said = run(*arguments)
    assert (f'Recommended: compression="{one["recommended"]}"' if worth else "Recommended: no compression") in said
    assert (" step " in said) == bool(backward)


def test_of_those_that_take_as_long_the_one_that_loses_least_is_recommended():
    def best(*figures):
        return plan.recommend([plan.Prediction(spec, payload, 1, seconds, seconds) for spec, payload, seconds in figures]).spec

    assert best(("a", 10, 1.0), ("b", 20, 1.1), ("c", 30, 1.2)) == "b"
    assert best(("a", 10, 1.0), ("none", 5, 1.1)) == "none"
    assert best(("a", 10, 1.1), ("b", 10, 1.0)) == "b"


def test_what_goes_on_beside_backward_is_hidden():
    infos = [TensorInfo.whole(str(i), (5_000_000,), world=4) for i in range(10)]
    costs, none = network(4), get_compressor("none")
    alone, beside = plan.predict(none, infos, costs), plan.predict(none, infos, costs, backward=1.0)
    bucket = costs.exchange(none, [infos[0], infos[0]])  # 25 MiB hold one of 20 MB
    assert alone.exchange_seconds == beside.exchange_seconds > 2
    assert beside.step_seconds == pytest.approx(0.1 + alone.exchange_seconds) and bucket < alone.exchange_seconds
    long = plan.predict(none, infos, costs, backward=100.0)
    assert long.step_seconds == pytest.approx(100 + costs.exchange(none, infos[:1]))


def test_without_kernels_codes_take_a_typical_time(monkeypatch):
    monkeypatch.setattr(command.timing, "here", lambda: None)
    assert "a typical time, since no framework's kernels" in found(
        "plan", "--shapes", "4096x4096", "--workers", 4, "--rate", "1gbit", "-c", "topk")["basis"]


def test_the_first_framework_that_works_is_timed(monkeypatch):
    timing = command.timing

    def broken():
        raise ImportError("no kernels")

    monkeypatch.setattr(timing.importlib.util, "find_spec", lambda name: name)
    for torch, tensorflow, expected in ((lambda: "torch", broken, "torch"), (broken, lambda: "tensorflow", "tensorflow"), (broken, broken, None)):
        monkeypatch.setattr(timing, "in_torch", torch)
        monkeypatch.setattr(timing, "in_tensorflow", tensorflow)
        assert timing.here() == expected


@pytest.mark.parametrize("make", ["in_torch", "in_tensorflow"])
def test_codes_are_timed_without_horovod(make):
    timing = command.timing
    pytest.importorskip({"in_torch": "torch", "in_tensorflow": "tensorflow"}[make])
    backend = getattr(timing, make)()
    rates = timing.all_rates([c for c in command.everything() if backend.can(c)], backend, 3, sample=2**14)
    assert set(rates) == {cost.key_of(c) for c in command.everything()}
    for key, one in rates.items():
        in_sums_alone = key in ("powersgd", "randomk")
        assert one.encode > 0 and one.call >= 0 and (one.decode_all > 0) != in_sums_alone, key


def test_kernels_are_timed():
    pytest.importorskip("torch")
    one = found("bench", "kernels", "--entries", 4096, "--rounds", 2)
    assert {"onebit encode", "topk 1 % decode_sum of 4"} <= set(one["rows"]) and all(row["ms"] > 0 for row in one["rows"].values())


def test_kernels_are_compared_with_their_limits():
    pytest.importorskip("torch")
    shown = run("bench", "kernels", "--entries", 4096, "--rounds", 2)
    assert "4096 fp32 entries, 1 thread(s), 2 rounds" in shown and "of reading" in shown and "times PyTorch's" not in shown


def test_kernels_of_tensorflow_are_compared_with_pytorchs():
    pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    from hvd_quant.cli import kernels

    rows = kernels.Bench(4096, tf).rows(baseline=True)
    figures = kernels.summary(kernels.measure(rows, 2, kernels.clock(1)))
    assert figures[kernels.BASELINE]["topk_speedup"] > 0
    assert {name.removesuffix(kernels.IN_TENSORFLOW) for name in figures if name.endswith(kernels.IN_TENSORFLOW)} == {
        f"{name} {what}" for name in kernels.NAMES for what in ("encode", f"decode_sum of {kernels.WORKERS}")}
    assert "times PyTorch's" in [column.header for column in kernels.table(figures, 4096, "").columns]


def test_one_worker_has_nothing_to_exchange(monkeypatch):
    alone = SimpleNamespace(init=lambda: None, size=lambda: 1)
    monkeypatch.setattr("hvd_quant.cli.bench.frontend", lambda: (alone, None))
    assert "horovodrun -np 2 -H host1:1,host2:1 hvd-quant bench exchange" in " ".join(run("bench", "exchange", code=2).split())


def test_what_bench_lacks_is_said(monkeypatch):
    for name in ("hvd_quant.torch", "hvd_quant.tensorflow", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for what in ("exchange", "kernels"):
        assert "`hvd-quant doctor` tells more" in run("bench", what, code=1)


def test_a_compressor_without_a_docstring_can_be_shown():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Bare(type(get_compressor("none"))):
        name = "bare"

    assert compressors.summary(Bare) == "" and compressors.paper(Bare) is None
