"""What is installed here works, with the frameworks that are here. tests/package/run calls it in each environment."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import hvd_quant

FRAMEWORKS = {"both": ["torch", "tensorflow"], "torch": ["torch"], "tensorflow": ["tensorflow"], "neither": []}[sys.argv[1]]
INFO = hvd_quant.TensorInfo.whole("w", (300, 300))
CODE = hvd_quant.Compression.blockwise8(block_size=128)  # whose bytes are the same in all backends, scales included


def refusal(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    raise SystemExit(f"{module} should not import here")


def payload(framework: str) -> bytes:
    """What the native code of a framework makes of a gradient."""
    ops = importlib.import_module(f"hvd_quant.ops.{framework}")
    grad = np.random.default_rng(0).normal(size=INFO.numel).astype(np.float32)
    if framework == "torch":
        import torch
        return bytes(CODE.encode(ops, torch.from_numpy(grad), {"residual": torch.zeros(INFO.numel)}, None, INFO).numpy())
    if framework == "tensorflow":
        import tensorflow as tf
        return bytes(CODE.encode(ops, tf.constant(grad), {"residual": tf.Variable(tf.zeros(INFO.numel))}, None, INFO).numpy())
    return bytes(CODE.encode(ops, grad, {"residual": np.zeros(INFO.numel, np.float32)}, None, INFO))


place = Path(hvd_quant.__file__).parent
assert "site-packages" in str(place), place
assert version("hvd_quant") == hvd_quant.__version__
assert (place / "py.typed").exists()
assert {path.name.split(".")[0] for path in place.glob("*.so")} == {f"_{name}_ops" for name in FRAMEWORKS}
assert hvd_quant.get_compressor("topk:ratio=0.01").spec == "topk" and "onebit" in hvd_quant.list_compressors()
command = [Path(sys.executable).with_name("hvd-quant"), "--version"]
assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1] == hvd_quant.__version__
for name, missing in (("torch", "PyTorch"), ("tensorflow", "TensorFlow"), ("keras", "TensorFlow")):
    here = (name if name != "keras" else "tensorflow") in FRAMEWORKS
    expected = "hvd-quant build-horovod" if here else f"needs {missing}: pip install"  # Horovod itself is never here
    assert expected in (said := refusal(f"hvd_quant.{name}")), said
assert len({payload(name) for name in ["generic", *FRAMEWORKS]}) == 1
print(f"hvd_quant {hvd_quant.__version__} with {' and '.join(FRAMEWORKS) or 'neither framework'}: works")
