"""The translation example on two workers: it learns a toy language, and goes on bit for bit where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
HOROVODRUN = Path(sys.executable).with_name("horovodrun")

# In one launch, since it takes longer than the training: 30 steps at once; 20 steps; and 10 more after those.
WORKER = """
import sys; sys.path[:0] = sys.argv[1:3]
import torch, pytorch_nmt, hvd_quant.torch as hvd
from common import nmt
hvd.init()
torch.set_num_threads(1)
line = sys.argv[4:]
for steps, folder in ((30, "whole"), (20, "parts"), (30, "parts")):
    arguments = nmt.parse("", ("transformer", "rnn"), tied=True, argv=[
        *line, "--steps", str(steps), "--checkpoint", f"{sys.argv[3]}/{folder}", "--output", f"{sys.argv[3]}/{folder}-{steps}"])
    nmt.run(hvd, arguments, pytorch_nmt.total, pytorch_nmt.Trainer)
"""


def test_two_workers_learn_and_go_on_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch", reason="Horovod is not built for PyTorch", exc_type=ImportError)
    for needed in ("sentencepiece", "sacrebleu"):
        pytest.importorskip(needed, reason="pip install 'hvd_quant[examples]'")
    words = "the a red green old new house car tree dog cat big small blue fast slow".split()
    random, line = np.random.default_rng(0), []
    for part, count in (("train", 400), ("valid", 8), ("test", 8)):
        sources = [random.choice(words, random.integers(2, 9)).tolist() for _ in range(count)]
        for side, texts in (("src", sources), ("tgt", [[word[::-1] + "en" for word in source] for source in sources])):
            (tmp_path / f"{part}.{side}").write_text("".join(" ".join(text) + "\n" for text in texts))
            line += [f"--{part}-{side}", str(tmp_path / f"{part}.{side}")]
    spec = "topk:ratio=0.1,merge=replace,min_numel=0,exchange=allgather"  # which "auto" chooses by the time it takes
    command = [HOROVODRUN, "-np", "2", "--gloo", sys.executable, "-c", WORKER, ROOT / "examples", ROOT / "examples" / "pytorch", tmp_path, *line,
               "--compression", spec, "--vocabulary", "70", "--width", "64", "--layers", "1", "--max-tokens", "200", "--warmup", "10",
               "--lr", "0.01", "--evaluate-every", "10"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    whole, parts = ([torch.load(tmp_path / folder / spec / f"00000030-{rank}of2", weights_only=True) for rank in range(2)]
                    for folder in ("whole", "parts"))
    for one, other in zip(whole, parts):
        for name, value in one["model"].items():
            assert torch.equal(value, other["model"][name]), name
        for kept, same in zip(one["compression"]["tensors"].values(), other["compression"]["tensors"].values(), strict=True):
            assert all(torch.equal(value, same["state"][key]) for key, value in kept["state"].items()) and kept["step"] == same["step"] == 30
        assert torch.equal(one["random"], other["random"])
    residuals = [next(iter(one["compression"]["tensors"].values()))["state"]["residual"] for one in whole]
    assert not torch.equal(*residuals) and not torch.equal(whole[0]["random"], whole[1]["random"])  # each worker's own

    runs = [json.loads((tmp_path / folder / "results.json").read_text())["runs"][0] for folder in ("whole-30", "parts-30")]
    assert runs[0]["bleu"] == runs[1]["bleu"] and runs[0]["more"] == runs[1]["more"] and "nrefs:1" in runs[0]["more"]["signature"]
    assert runs[0]["wire_bytes"] == runs[1]["wire_bytes"] > 0 and [test["step"] for test in runs[1]["tests"]] == [10, 20, 30]
    assert "tokens/s=" in done.stderr
