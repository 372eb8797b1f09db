"""The Keras frontend: everything that horovod.tensorflow.keras has, for Keras 3 and tf_keras, with compressed
gradients.

Write ``import hvd_quant.keras as hvd`` in the place of ``import horovod.tensorflow.keras as hvd`` or of ``import
horovod.keras as hvd``, and pass ``compression=`` to :func:`DistributedOptimizer`. ``tf.keras`` decides whose callbacks
and layers these are: Keras 3's, or with ``TF_USE_LEGACY_KERAS=1`` those of tf_keras.
"""

import os as _os
import sys as _sys

try:
    import tensorflow as _tensorflow
except ImportError as error:
    raise ImportError("hvd_quant.keras needs TensorFlow: pip install tensorflow") from error

_legacy = _os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
try:
    if _legacy:
        import tf_keras as _keras
    else:
        import keras as _keras
except ImportError as error:
    if _legacy:
        raise ImportError(f"TF_USE_LEGACY_KERAS is set, which needs tf_keras ({error}): pip install "
                          f"tf_keras=={_tensorflow.__version__}, or unset the variable to use Keras 3") from error
    raise ImportError(f"hvd_quant.keras can't import Keras ({error}): pip install 'keras>=3.5', and set "
                      "KERAS_BACKEND=tensorflow") from error
if not _legacy:
    if _keras.backend.backend() != "tensorflow":
        raise ImportError("hvd_quant.keras needs Keras on TensorFlow, and its backend is "
                          f"{_keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow before Keras is imported")
    if tuple(map(int, _keras.__version__.split(".")[:2])) < (3, 5):
        raise ImportError(f"hvd_quant.keras needs Keras 3.5 or newer, and this is {_keras.__version__}: pip install "
                          "--upgrade keras, or use tf_keras with TF_USE_LEGACY_KERAS=1")

try:
    import horovod.tensorflow.keras as _horovod
except ImportError as error:
    raise ImportError("hvd_quant.keras needs Horovod built for this TensorFlow; this command builds it: "
                      "hvd-quant build-horovod") from error

from horovod.tensorflow.keras import *  # noqa: F403

import hvd_quant.keras.callbacks as callbacks  # noqa: F401  "from ... import" would find Horovod's, just imported
import hvd_quant.keras.elastic as elastic  # noqa: F401
from hvd_quant import Compression  # noqa: F401
from hvd_quant.exchange.averaging import averaging_bound  # noqa: F401
from hvd_quant.exchange.telemetry import compression_progress, compression_summary, log_compression  # noqa: F401
from hvd_quant.keras.averaging import ModelAveragingOptimizer  # noqa: F401
from hvd_quant.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model  # noqa: F401
from hvd_quant.tensorflow import broadcast_variables  # noqa: F401
from hvd_quant.tensorflow.averaging import average_parameters  # noqa: F401
from hvd_quant.tensorflow.guard import install_guard as _install_guard
from hvd_quant.tensorflow.sync_batch_norm import SyncBatchNormalization  # noqa: F401

_install_guard()

# Scripts also import Horovod's submodules by name.
for _name, _module in list(_sys.modules.items()):
    if _name.startswith("horovod.tensorflow.keras."):
        _sys.modules.setdefault(_name.replace("horovod.tensorflow.", "hvd_quant.", 1), _module)

__all__ = [name for name in dir(_horovod) if not name.startswith("_")]


def __getattr__(name):
    return getattr(_horovod, name)
