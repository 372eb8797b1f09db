"""Names, spec strings, patterns, entry points, and the sentences for what is wrong with them."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass

import pytest

import hvd_quant
from hvd_quant import Compression, Compressor, get_compressor, list_compressors, register, registry
from hvd_quant.compressors import advice
from tests.conftest import CODECS

BUILT_IN = ["adaptive", "bf16", "blockwise8", "fp16", "natural", "none", "onebit", "powersgd", "qsgd", "randomk", "signsgd",
            "terngrad", "threshold", "topk"]


@pytest.fixture
def empty_slot(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def test_all_compressors_are_listed():
    assert list_compressors() == BUILT_IN
    assert dir(Compression) == BUILT_IN


def test_what_is_ready_to_use():
    assert Compression.none.spec == "none" and Compression.auto == get_compressor("auto")
    with pytest.raises(AttributeError):
        Compression.zip  # noqa: B018


def test_horovods_own_compression_is_taken_as_it_is():
    class Own:
        compress = decompress = staticmethod(lambda *arguments: arguments)

    assert registry.resolve(Own) is Own


@pytest.mark.parametrize("parameters, sentence", [
    ([], "bind was given no parameters"),
    (type("Net", (), {"trainable_variables": []})(), "bind was given a model, a Net"),
    ([("weight", 1.0)], "a PyTorch tensor or a TensorFlow tensor or variable is expected, not a builtins.float"),
])
def test_what_can_not_be_bound(parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        get_compressor("onebit").bind(parameters)


def test_importing_brings_no_framework():
    code = "import sys, hvd_quant; print([m for m in ('torch', 'tensorflow', 'horovod') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("compressor", CODECS.values(), ids=list(CODECS))
def test_spec_gives_the_compressor_back(compressor):
    assert get_compressor(compressor.spec) == compressor
    assert hash(get_compressor(compressor.spec)) == hash(compressor)


def test_every_knob_survives_its_spec():
    other = {"exchange": "allgather", "memory": "none", "warmup": 3, "min_numel": 7, "tau": 0.25, "capacity": 0.5,
             "block_size": 64, "zeros": True, "ratio": 0.125, "values": "sign", "mean": "tensor", "scope": "model", "schedule": "dgc",
             "schedule_steps": 5, "rank": 3, "bits": 2, "norm": "l2", "clip": 1.5, "code": "linear", "seed": -9}
    for name in BUILT_IN:
        cls = registry.compressor_class(name)
        knobs = {f.name: other[f.name] for f in dataclasses.fields(cls) if f.name in other}
        if name in ("powersgd", "randomk"):
            knobs["exchange"] = "allreduce"
        compressor = cls(**knobs)
        assert get_compressor(compressor.spec) == compressor
        assert eval(repr(compressor), vars(hvd_quant.compressors)) == compressor


def test_ready_made_and_classes():
    assert isinstance(Compression.none, Compressor) and isinstance(Compression.fp16, Compressor)
    assert Compression.topk(ratio=0.5) == get_compressor("topk:ratio=0.5")
    assert get_compressor(Compression.onebit) == Compression.onebit()  # parentheses left out, as with Horovod's classes


@pytest.mark.parametrize("spec, error, sentence", [
    ("tpk", ValueError, "there is no compressor 'tpk', did you mean 'topk'? Known: adaptive, bf16"),
    ("zzz", ValueError, "there is no compressor 'zzz'. Known: adaptive"),
    ("topk:ratoi=0.1", ValueError, "topk has no knob 'ratoi', did you mean 'ratio'? Known: average_every"),
    ("topk:ratio", ValueError, "'ratio' is not of the form knob=value"),
    ("topk:ratio=0.1,ratio=0.2", ValueError, "gives ratio twice"),
    ("topk:ratio=abc", ValueError, "topk: ratio=abc is not a number"),
    ("topk:ratio=0", ValueError, "topk: ratio=0.0 is not accepted; give a number above 0 and up to 1"),
    ("topk:ratio=nan", ValueError, "topk: ratio=nan is not accepted"),
    ("topk:values=int8", ValueError, "topk: values='int8' is not accepted; give 'float32' or 'float16' or 'sign' or '2bit'"),
    ("topk:values=sign,mean=block", ValueError, "topk: mean='block' is not accepted; give 'unit' or 'tensor'"),
    ("topk:values=2bit,mean=tensor", ValueError, "topk: mean='tensor' is not accepted; give 'unit' with values='2bit'"),
    ("topk:scope=layer", ValueError, "topk: scope='layer' is not accepted; give 'tensor' or 'model'"),
    ("topk:schedule=cosine", ValueError, "topk: schedule='cosine' is not accepted; give 'none' or 'dgc' or 'merging'"),
    ("topk:schedule_steps=5", ValueError, "topk: schedule_steps=5 is not accepted; give it together with schedule='dgc' or 'merging'"),
    ("adaptive:schedule_steps=0", ValueError, "adaptive: schedule_steps=0 is not accepted; give a whole number of steps, 1 or more"),
    ("onebit:block_size=100", ValueError, "onebit: block_size=100 is not accepted; give a multiple of 64"),
    ("onebit:block_size=1.5", ValueError, "onebit: block_size=1.5 is not a whole number"),
    ("onebit:zeros=2", ValueError, "onebit: zeros=2 is not accepted; give true or false"),
    ("onebit:exchange=allreduce", ValueError, "onebit: exchange='allreduce' is not accepted; give 'auto' or 'allgather'"),
    ("qsgd:bits=3", ValueError, "qsgd: bits=3 is not accepted; give 2, 4 or 8"),
    ("qsgd:norm=l1", ValueError, "qsgd: norm='l1' is not accepted; give 'max' or 'l2'"),
    ("qsgd:block_size=32", ValueError, "qsgd: block_size=32 is not accepted; give a multiple of 64"),
    ("qsgd:seed=0.5", ValueError, "qsgd: seed=0.5 is not a whole number"),
    ("terngrad:clip=-1", ValueError, "terngrad: clip=-1.0 is not accepted; give a number of standard deviations, 0 for none"),
    ("terngrad:clip=inf", ValueError, "terngrad: clip=inf is not accepted"),
    ("blockwise8:code=log", ValueError, "blockwise8: code='log' is not accepted; give 'dynamic' or 'linear'"),
    ("signsgd:zeros=2", ValueError, "signsgd: zeros=2 is not accepted; give true or false"),
    ("threshold", ValueError, "threshold needs tau: write threshold:tau=VALUE"),
    ("threshold:tau=inf", ValueError, "threshold: tau=inf is not accepted; give a finite number above 0"),
    ("threshold:tau=-1", ValueError, "threshold: tau=-1.0 is not accepted"),
    ("threshold:tau=1,capacity=2", ValueError, "threshold: capacity=2.0 is not accepted"),
    ("adaptive:ratio=1.5", ValueError, "adaptive: ratio=1.5 is not accepted"),
    ("adaptive:warmup=-1", ValueError, "adaptive: warmup=-1 is not accepted; give a whole number of steps"),
    ("adaptive:min_numel=-1", ValueError, "adaptive: min_numel=-1 is not accepted"),
    ("adaptive:memory=ef20", ValueError, "adaptive: memory='ef20' is not accepted; give 'error_feedback' or 'none' or 'ef21'"),
    ("fp16:memory=error_feedback", ValueError, "fp16: memory='error_feedback' is not accepted"),
    ("topk:merge=add", ValueError, "topk: merge='add' is not accepted; give 'none' or 'sum' or 'replace' or 'error'"),
    ("topk:merge=sum,memory=none", ValueError, "topk: merge='sum' is not accepted; give 'none' beside memory='none', or"),
    ("topk:merge=sum,momentum=0.9", ValueError, "topk: merge='sum' is not accepted; give 'none' beside momentum correction"),
    ("topk:merge=sum,hierarchical=true", ValueError, "topk: hierarchical=True is not accepted; give False beside a merge"),
    ("topk:memory=ef21,hierarchical=true", ValueError, "topk: hierarchical=True is not accepted; give False beside a merge"),
    ("topk:momentum=0.9,hierarchical=true", ValueError, "topk: hierarchical=True is not accepted; give False beside a merge"),
    ("topk:momentum=1", ValueError, "topk: momentum=1.0 is not accepted; give a number from 0 up to, but not, 1"),
    ("topk:momentum=0.9,memory=ef21", ValueError, "topk: momentum=0.9 is not accepted; give 0 beside a linear code or another"),
    ("randomk:momentum=0.9", ValueError, "randomk: momentum=0.9 is not accepted; give 0 beside a linear code"),
    ("powersgd:momentum=0.9,memory=none", ValueError, "powersgd: momentum=0.9 is not accepted; give 0 beside a linear code"),
    ("fp16:nesterov=true", ValueError, "fp16: nesterov=True is not accepted; give it together with momentum="),
    ("fp16:memory=ef21", ValueError, "fp16: memory='ef21' is not accepted"),
    ("topk:nesterov=true", ValueError, "topk: nesterov=True is not accepted; give it together with momentum="),
    ("topk:clip_norm=1", ValueError, "topk: clip_norm=1.0 is not accepted; give it together with momentum="),
    ("topk:weight_decay=-1,momentum=0.5", ValueError, "topk: weight_decay=-1.0 is not accepted; give a number, 0 or more"),
    ("topk:eta=0.5", ValueError, "topk: eta=0.5 is not accepted; give 1, or memory='ef21'"),
    ("topk:average_every=-5", ValueError, "topk: average_every=-5 is not accepted; give a whole number of steps, 0 or more"),
    (3, TypeError, "a compressor or a spec string such as 'topk:ratio=0.01' is expected, not 3"),
    (None, TypeError, "not None"),
])
def test_a_bad_spec_is_one_clear_sentence(spec, error, sentence):
    with pytest.raises(error) as caught:
        get_compressor(spec)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("knobs", [{"ratio": "1"}, {"ratio": True}, {"ratio": None}, {"min_numel": 1.0}, {"warmup": "x"}])
def test_values_of_a_wrong_type_are_refused(knobs):
    with pytest.raises(ValueError, match="is not accepted"):
        Compression.topk(**knobs)


def test_compressors_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compression.topk().ratio = 0.5
    with pytest.raises(TypeError):
        Compression.topk(0.5)


def test_patterns_first_match_wins():
    select = registry.selector({"*.bias": "none", "out.*": Compression.onebit(), "*weight": "topk:ratio=0.1"})
    assert select("out.bias").name == "none"
    assert select("out.weight").name == "onebit"
    assert select("in.weight").spec == "topk:ratio=0.1"
    assert select("scale").name == "none"
    with pytest.raises(TypeError, match="3 is not a string"):
        registry.selector({3: "none"})
    with pytest.raises(ValueError, match="no compressor 'nope'"):
        registry.selector({"*": "nope"})


def test_register_a_class_of_ones_own(empty_slot):
    @register
    @dataclass(frozen=True, kw_only=True)
    class Mine(Compressor):
        name = "mine"
        size: int = 3

    assert get_compressor("mine:size=5") == Mine(size=5)
    assert Compression.mine(size=4).size == 4
    assert "mine" in list_compressors()
    with pytest.raises(NotImplementedError, match="Mine does not say its payload_bytes"):
        Mine().payload_bytes(None)


def test_register_refuses_what_is_no_compressor(empty_slot):
    with pytest.raises(TypeError, match="takes a subclass of hvd_quant.Compressor"):
        register(dict)
    with pytest.raises(TypeError, match="Loose is not a frozen dataclass"):
        @register
        class Loose(Compressor):
            name = "loose"
    with pytest.raises(ValueError, match="name is 'Bad Name'"):
        @register
        @dataclass(frozen=True, kw_only=True)
        class Bad(Compressor):
            name = "Bad Name"
    with pytest.raises(ValueError, match="the name 'topk' is taken by hvd_quant.compressors.topk.TopK"):
        @register
        @dataclass(frozen=True, kw_only=True)
        class Thief(Compressor):
            name = "topk"


class _Point:
    def __init__(self, name, loaded):
        self.name, self.value, self._loaded = name, f"package:{name}", loaded

    def load(self):
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


def test_entry_points_are_found_by_name(empty_slot, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Foreign(Compressor):
        name = "foreign"

    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points",
                        lambda group: [_Point("foreign", Foreign)] if group == "hvd_quant.compressors" else [])
    assert get_compressor("foreign") == Foreign()


def test_a_broken_entry_point_says_which(empty_slot, monkeypatch):
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [_Point("sick", OSError("no disk"))])
    with pytest.raises(ValueError, match="'sick' of entry point 'package:sick' can't be registered: no disk"):
        get_compressor("sick")


@pytest.mark.parametrize("settings, specs, told", [
    ({"momentum": 0.9}, ["topk:momentum=0.5"], ["momentum"]), ({"betas": (0.9, 0.99)}, ["none", "topk:momentum=0.5"], ["momentum"]),
    ({"_beta1": 0.9}, ["none:momentum=0.5"], ["momentum"]), ({"beta_1": lambda: 0.9}, ["topk:momentum=0.5"], ["momentum"]),
    ({"momentum": 0.9, "weight_decay": 0.1}, ["topk"], []), ({"momentum": 0, "betas": (0.0, 0.99)}, ["topk:momentum=0.5"], []),
    ({"beta_1": None, "weight_decay": None}, ["topk:momentum=0.5,weight_decay=0.1"], []),
    ({"weight_decay": 0.1}, ["topk:momentum=0.5"], []),
    ({"_momentum": 0.9, "weight_decay": 0.1}, ["topk:momentum=0.5,weight_decay=0.1"], ["momentum", "weight decay"])], ids=str)
def test_what_an_optimizer_would_do_once_more(settings, specs, told):
    sentences = advice.twice(Compression, [{}, settings], map(get_compressor, specs))
    assert len(sentences) == len(told)
    for sentence, what in zip(sentences, told):
        assert f"has a {what} of its own, and compression={specs[-1]} adds another to the gradients" in sentence


def test_parameters_without_the_momentum_of_others():
    some = {"a": get_compressor("topk:momentum=0.5"), "b": get_compressor("none"), "c": get_compressor("onebit")}
    (sentence,) = advice.left_out(some)
    assert "momentum of some parameters, and b, c train without any: give them one too" in sentence and "'none:momentum=0.5'" in sentence
    assert all(not advice.left_out({name: some[name] for name in names}) for names in ("a", "bc", ""))
